//! How a kernel is called: the integers it takes, which follow from the numbers of its loops, whatever those are, and
//! how its work is cut into items that threads share.

use crate::index::{AxisId, Index};
use crate::loops::{ExprKind, Kernel, Mode};
use crate::plan::Launch;

/// Elements of little cost per item of a kernel without rows, and of a table: half of what a thread is worth waking for.
pub const CHUNK: i64 = 16384;
/// The fewest elements of such an item, whatever each costs: what is done once per item is nothing next to them.
const SHORTEST: i64 = 1024;
/// The most columns of an item: their accumulators take half of the smallest first-level cache there is.
const WIDEST: i64 = 2048;
/// Rows and columns of a tile: what lies side by side down its columns is a line of memory or two each, and all of them
/// stay in any first-level cache.
pub const TILE: i64 = 32;
/// Bytes of a line of memory.
pub const LINE: i64 = 64;
/// Rows that a fold adds to its accumulators at one go.
pub const GROUP: usize = 4;
/// Bytes of an element in scratch: none is wider.
const ELEMENT: i64 = 8;

/// Where an integer argument comes from.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Argument {
    /// A number of the loops, by its position in [`Kernel::each_number`].
    Number(usize),
    /// Columns per item.
    Width,
    /// Items per row of columns.
    Blocks,
    /// Rows of all parts.
    Rows,
    /// Rows of a part.
    Share,
    /// Elements of a row.
    Inner,
    /// Bytes of a row in scratch.
    RowBytes,
    /// Where this piece of scratch begins.
    Scratch(usize),
}

/// What a thread's scratch holds, piece after piece.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Piece {
    /// A row, of elements of so many bytes.
    Row(i64),
    /// An element for each column that rows are folded into, and room for a vector that reaches beyond.
    Folded,
    /// An element for each column of an item.
    Columns,
    /// So many bytes.
    Bytes(i64),
    /// A line of memory for each element of a row: as many rows as it has elements.
    Tile,
}

/// See the [module](self).
#[derive(Clone, PartialEq, Debug)]
pub struct Signature {
    /// The integers.
    pub list: Vec<Argument>,
    /// The scratch memory.
    pub pieces: Vec<Piece>,
    /// Numbers of the loops that are no arguments, since others that are have the same value: which, and as which.
    pub twins: Vec<(usize, usize)>,
    /// Lanes of its vectors.
    pub lanes: i64,
}

/// What one use of a kernel passes.
#[derive(Clone, PartialEq, Debug)]
pub struct Arguments {
    /// The integers; for a table, behind them row, first element and count of each item.
    pub ints: Vec<i64>,
    /// Items to split over threads.
    pub items: i64,
    /// Fewest items worth a thread.
    pub grain: i64,
    /// Scratch memory per thread.
    pub scratch_bytes: usize,
}

impl Signature {
    /// Which arguments are the extent of an axis, the elements per item, and the items per row.
    pub fn blocks(&self, axis: AxisId) -> Option<[usize; 3]> {
        let at = |wanted: Argument| self.list.iter().position(|argument| *argument == wanted);
        // Extents come first among the numbers of the loops.
        Some([at(Argument::Number(axis))?, at(Argument::Width)?, at(Argument::Blocks)?])
    }

    /// Whether loops with these numbers are what its kernel was written for: it takes some of them as arguments, and
    /// was written for the others.
    pub fn fits(&self, kernel: &Kernel, numbers: &[i64]) -> bool {
        let mut own = kernel.numbers();
        if own.len() != numbers.len() {
            return false;
        }
        for argument in &self.list {
            if let Argument::Number(number) = *argument {
                own[number] = numbers[number];
            }
        }
        self.twins.iter().for_each(|&(number, like)| own[number] = own[like]);
        own == numbers
    }

    /// What a launch of its kernel passes, for so many threads.
    pub fn arguments(&self, kernel: &Kernel, launch: &Launch, threads: usize) -> Arguments {
        let numbers = &launch.numbers;
        let count = |inner: bool| -> i64 {
            let axes = kernel.axes.iter().zip(numbers).filter(|(axis, _)| axis.inner == inner);
            axes.map(|(_, extent)| extent).product()
        };
        let row_bytes = |bytes: i64| round_up(round_up(count(true), self.lanes) * bytes, 64);
        let (outer, blocked) = (kernel.outer(), kernel.mode != Mode::Rows);
        let (mut items, mut work, mut width, mut blocks) = (1, 1, 1, 1);
        if kernel.mode != Mode::Table {
            let parallel = if blocked { outer - 1 } else { outer };
            let tiled = tiled(kernel);
            let rows =
                |(axis, &n): (AxisId, &i64)| if Some(axis) == tiled { (n + TILE - 1) / TILE } else { n };
            let others: i64 = numbers[..parallel].iter().enumerate().map(rows).product();
            if blocked {
                let n = numbers[kernel.vector_axis()];
                width = match kernel.mode {
                    Mode::Columns => column_block(n, others, self.lanes, threads),
                    _ if tiled.is_some() => TILE,
                    _ => item_elements(kernel).min(round_up(n.max(1), self.lanes)),
                };
                blocks = (n + width - 1) / width;
                work = width.min(n.max(1)) * tiled.map_or(1, |axis| TILE.min(numbers[axis]));
            }
            items = blocks * others;
            work *= count(true).max(1);
        }
        if kernel.chunk.is_some() {
            // Behind the extents.
            work = numbers[kernel.axes.len()] * work / numbers[outer].max(1);
        }
        let (rows, mut share) = (items, 0);
        if let Some(parts) = kernel.parts {
            share = (rows + parts - 1) / parts;
            items = parts;
            work *= share.max(1);
        }
        let mut ends: Vec<i64> = Vec::with_capacity(self.pieces.len());
        let mut scratch = 0;
        for piece in &self.pieces {
            ends.push(scratch);
            scratch += match piece {
                Piece::Row(bytes) if kernel.parts.is_some() => GROUP as i64 * row_bytes(*bytes),
                Piece::Row(bytes) => row_bytes(*bytes),
                Piece::Folded => row_bytes(ELEMENT) + self.lanes * ELEMENT,
                Piece::Columns => round_up(round_up(width, self.lanes) * ELEMENT, 64),
                Piece::Bytes(bytes) => *bytes,
                Piece::Tile => LINE * round_up(count(true), self.lanes),
            };
        }
        let int = |argument: &Argument| match *argument {
            Argument::Number(number) => numbers[number],
            Argument::Width => width,
            Argument::Blocks => blocks,
            Argument::Rows => rows,
            Argument::Share => share,
            Argument::Inner => count(true),
            Argument::RowBytes => row_bytes(ELEMENT),
            Argument::Scratch(piece) => ends[piece],
        };
        let mut ints: Vec<i64> = self.list.iter().map(int).collect();
        if kernel.mode == Mode::Table {
            let share = launch.rows.iter().sum::<i64>() / threads.max(1) as i64;
            (items, work) = pieces(&launch.rows, share.clamp(item_elements(kernel), CHUNK), &mut ints);
        }
        let grain = (CHUNK * 2 / (work * kernel.cost()).max(1)).max(1).saturating_mul(launch.coarser);
        Arguments { ints, items, grain, scratch_bytes: scratch as usize }
    }
}

/// The loop that runs in tiles together with the vector axis, if one does: along it lie elements that don't lie side by
/// side along the vector axis, as in a transposed matrix. Row by row, each of their lines of memory would be read as often
/// as it has elements.
pub fn tiled(kernel: &Kernel) -> Option<AxisId> {
    let vector = kernel.vector_axis();
    if kernel.mode != Mode::Map || kernel.axes[vector].extent < TILE {
        return None;
    }
    let loads = kernel.exprs.iter().filter_map(|expr| match &expr.kind {
        ExprKind::Load { index, .. } => Some(index),
        _ => None,
    });
    let is_turned = |index: &Index, axis: AxisId| {
        let is_plain = !index.is_nested(axis) && !index.is_nested(vector);
        is_plain && index.factor(axis) == 1 && !matches!(index.factor(vector), -1..=1)
    };
    let stores = kernel.stores.iter().map(|store| &store.index);
    let mut accesses = loads.chain(stores);
    accesses.find_map(|index| {
        (0..vector).find(|&axis| kernel.axes[axis].extent >= TILE && is_turned(index, axis))
    })
}

/// Elements per item of a kernel without rows, and fewest of a table's: the same on every machine, as what is done
/// band by band is cut there.
fn item_elements(kernel: &Kernel) -> i64 {
    let elements = (CHUNK * 2 / kernel.cost()).clamp(SHORTEST, CHUNK);
    1 << elements.ilog2()
}

/// Cuts the rows of a table into pieces of at most `most` elements: how many there are, and how many elements each has
/// about.
fn pieces(rows: &[i64], most: i64, ints: &mut Vec<i64>) -> (i64, i64) {
    let first = ints.len();
    for (row, &count) in rows.iter().enumerate() {
        let pieces = (count + most - 1) / most;
        let piece = round_up((count + pieces - 1) / pieces.max(1), 64);
        let mut at = 0;
        while at < count {
            ints.extend([row as i64, at, piece.min(count - at)]);
            at += piece;
        }
    }
    let items = (ints.len() - first) as i64 / 3;
    (items, rows.iter().sum::<i64>() / items.max(1))
}

/// Whole vectors of so many bytes a lane that a row takes in scratch.
pub fn row_bytes(kernel: &Kernel, lanes: i64, bytes: i64) -> i64 {
    round_up(round_up(kernel.count(true), lanes) * bytes, 64)
}

/// Of a kernel whose items go through the elements of its outer loops in order: so many items in a row, and the elements
/// of a dense matrix that they cover together.
pub fn stride(kernel: &Kernel) -> Option<(i64, i64)> {
    if kernel.chunk.is_some() || kernel.parts.is_some() || tiled(kernel).is_some() {
        return None;
    }
    let length = kernel.axes.get(kernel.vector_axis())?.extent;
    let found = match kernel.mode {
        Mode::Map => {
            let item = item_elements(kernel);
            let blocks = (length + item - 1) / item;
            // A single loop is cut into pieces of the same length.
            if kernel.outer() == 1 && blocks > 1 { (1, item) } else { (blocks, length) }
        }
        Mode::Rows => {
            let inner = kernel.axes.iter().filter(|axis| axis.inner).count();
            if inner != 1 || kernel.count(false) == 0 {
                return None;
            }
            (1, length)
        }
        Mode::Columns | Mode::Table => return None,
    };
    (found.0 > 0 && found.1 > 0).then_some(found)
}

/// How many items a kernel has that [goes through its elements in order](stride).
pub fn items(kernel: &Kernel) -> i64 {
    match kernel.mode {
        Mode::Rows => kernel.count(false),
        Mode::Map | Mode::Columns | Mode::Table => {
            let vector = kernel.vector_axis();
            let others: i64 = kernel.axes[..vector].iter().map(|axis| axis.extent).product();
            let item = item_elements(kernel);
            (kernel.axes[vector].extent + item - 1) / item * others
        }
    }
}

fn round_up(n: i64, to: i64) -> i64 {
    (n + to - 1) / to * to
}

/// Columns per item: whole rows if other items keep the threads busy, else an equal share of them.
fn column_block(n: i64, others: i64, lanes: i64, threads: usize) -> i64 {
    let share = if others >= threads as i64 {
        n
    } else {
        (n * others.max(1) + threads as i64 - 1) / threads.max(1) as i64
    };
    round_up(share.clamp(1, WIDEST), 4 * lanes).min(round_up(n.max(1), lanes))
}
