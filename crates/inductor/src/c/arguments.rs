//! The arguments of a kernel: integers that follow from the numbers of its loops, whatever those are.

use super::folds;
use crate::index::AxisId;
use crate::loops::{Kernel, Mode};

/// Elements per item of a kernel without rows.
pub(crate) const CHUNK: i64 = 16384;

/// Bytes of an element in scratch: none is wider.
pub(super) const ELEMENT: i64 = 8;

/// Where an integer argument comes from.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Argument {
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
pub(super) enum Piece {
    /// A row, of elements of so many bytes.
    Row(i64),
    /// An element for each column that rows are folded into, and room for a vector that reaches beyond.
    Folded,
    /// An element for each column of an item.
    Columns,
    /// So many bytes.
    Bytes(i64),
}

/// How the arguments of a kernel follow from its loops.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Arguments {
    pub(super) list: Vec<Argument>,
    pub(super) pieces: Vec<Piece>,
    pub(super) lanes: i64,
    /// What an element costs.
    pub(super) cost: i64,
}

/// One use of a kernel.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Launch {
    pub ints: Vec<i64>,
    pub items: i64,
    pub grain: i64,
    pub scratch_bytes: usize,
}

impl Arguments {
    /// Which arguments are the extent of an axis, the elements per item, and the items per row.
    pub(crate) fn blocks(&self, axis: AxisId) -> Option<[usize; 3]> {
        let at = |wanted: Argument| self.list.iter().position(|argument| *argument == wanted);
        // Extents come first among the numbers of the loops.
        Some([at(Argument::Number(axis))?, at(Argument::Width)?, at(Argument::Blocks)?])
    }

    /// How many integers follow from the loops.
    pub(crate) fn count(&self) -> usize {
        self.list.len()
    }

    /// Tells which numbers of the loops these integers are, and what they are.
    pub(crate) fn each_number(&self, ints: &[i64], tell: &mut dyn FnMut(usize, i64)) {
        for (argument, value) in self.list.iter().zip(ints) {
            if let Argument::Number(number) = argument {
                tell(*number, *value);
            }
        }
    }

    /// The arguments of a kernel of this text.
    pub(crate) fn of(&self, kernel: &Kernel, threads: usize) -> Launch {
        let mut numbers = Vec::with_capacity(64);
        kernel.each_number(&mut |number| numbers.push(*number));
        let (outer, blocked) = (kernel.outer(), kernel.mode != Mode::Rows);
        let (mut items, mut work, mut width, mut blocks) = (1, 1, 1, 1);
        if kernel.mode != Mode::Table {
            let parallel = if blocked { outer - 1 } else { outer };
            let others: i64 = kernel.axes[..parallel].iter().map(|axis| axis.extent).product();
            if blocked {
                let n = kernel.axes[kernel.vector_axis()].extent;
                width = match kernel.mode {
                    Mode::Columns => column_block(n, others, self.lanes, threads),
                    _ => CHUNK.min(round_up(n.max(1), self.lanes)),
                };
                blocks = (n + width - 1) / width;
                work = width.min(n.max(1));
            }
            items = blocks * others;
            work *= kernel.count(true).max(1);
        }
        if let Some(chunk) = kernel.chunk {
            work = chunk * work / kernel.axes[outer].extent.max(1);
        }
        let (rows, mut share) = (items, 0);
        if let Some(parts) = kernel.parts {
            share = (rows + parts - 1) / parts;
            items = parts;
            work *= share.max(1);
        }
        let mut ends: Vec<i64> = Vec::with_capacity(self.pieces.len() + 1);
        let mut scratch = 0;
        for piece in &self.pieces {
            ends.push(scratch);
            scratch += match piece {
                Piece::Row(bytes) if kernel.parts.is_some() => {
                    folds::GROUP as i64 * row_bytes(kernel, self.lanes, *bytes)
                }
                Piece::Row(bytes) => row_bytes(kernel, self.lanes, *bytes),
                Piece::Folded => row_bytes(kernel, self.lanes, ELEMENT) + self.lanes * ELEMENT,
                Piece::Columns => round_up(round_up(width, self.lanes) * 8, 64),
                Piece::Bytes(bytes) => *bytes,
            };
        }
        let int = |argument: &Argument| match *argument {
            Argument::Number(number) => numbers[number],
            Argument::Width => width,
            Argument::Blocks => blocks,
            Argument::Rows => rows,
            Argument::Share => share,
            Argument::Inner => kernel.count(true),
            Argument::RowBytes => row_bytes(kernel, self.lanes, ELEMENT),
            Argument::Scratch(piece) => ends[piece],
        };
        Launch {
            ints: self.list.iter().map(int).collect(),
            items,
            grain: (CHUNK * 2 / (work * self.cost).max(1)).max(1),
            scratch_bytes: scratch as usize,
        }
    }
}

/// The bytes of a row in scratch: whole vectors.
pub(super) fn row_bytes(kernel: &Kernel, lanes: i64, bytes: i64) -> i64 {
    round_up(round_up(kernel.count(true), lanes) * bytes, 64)
}

pub(super) fn round_up(n: i64, to: i64) -> i64 {
    (n + to - 1) / to * to
}

/// Columns per item: whole rows if other items keep the threads busy, else an equal share of them.
fn column_block(n: i64, others: i64, lanes: i64, threads: usize) -> i64 {
    let share = match others >= threads as i64 {
        true => n,
        false => (n * others.max(1) + threads as i64 - 1) / threads.max(1) as i64,
    };
    round_up(share.clamp(1, 2048), 4 * lanes).min(round_up(n.max(1), lanes))
}
