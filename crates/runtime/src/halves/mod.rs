//! Matrix products of halves: sums of f32, each rounded once at the end.
//!
//! Operands are packed block by block into words that the machine multiplies (`pack.rs`, `tile.rs`): pairs of bf16
//! where it has instructions for them, else f32. There is never a copy of a whole operand in f32.
//!
//! ```text
//! for each block of rows and group of panels (on one thread)
//!   pack the rows
//!   for each panel: pack it                         stays in the second-level cache
//!     for each stretch of the inner dim             the panel's stretch stays in the first-level cache
//!       for each tile of rows                       accumulators in registers
//! ```
//!
//! A few rows are multiplied with columns that are read where they lie (`few.rs`).
//!
//! A result is one chain of fused additions along the inner dim, whatever the sizes, tiles and threads are. Instructions
//! for bf16 take subnormal numbers for zeros, so blocks in which there could be some, as operands or as sums, are
//! computed without them: this changes no other bit.

#[cfg(target_arch = "x86_64")]
mod amx;
mod banded;
mod few;
mod format;
mod pack;
mod results;
mod step;
mod tile;

use parking_lot::Mutex;

use crate::cpu::{Isa, machine};
use crate::gemm::{Matrix, Shape};
use crate::pool::{AllocError, Buffer};
use crate::scratch;
use crate::threads::{self, Shared, parallel_for};
pub(crate) use banded::Banded;
use few::{ABREAST, FEW};
pub(crate) use format::Format;
pub use format::Half;
use pack::{Lines, least_exponent, pack, pack_rows, words};
pub use results::Results;
use results::{begin, finish};
pub(crate) use step::HalvesAt;
use tile::{Kernel, Set, Task};

/// `results = start + lhs · rhs`.
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// Where results go.
    pub results: Results,
    /// What sums begin with, else zero; its strides may be 0.
    pub start: Option<Matrix<u16>>,
    /// The left operand.
    pub lhs: Matrix<u16>,
    /// The right operand.
    pub rhs: Matrix<u16>,
}

impl Product {
    fn transposed(self) -> Product {
        let results = match self.results {
            Results::Sums(matrix) => Results::Sums(matrix.transposed()),
            Results::Rounded(matrix) => Results::Rounded(matrix.transposed()),
        };
        let start = self.start.map(Matrix::transposed);
        Product { results, start, lhs: self.rhs.transposed(), rhs: self.lhs.transposed() }
    }
}

/// Work below which a second thread costs more than it brings, in multiply-adds.
const TASK: usize = 1 << 17;
/// What packing a word costs, in multiply-adds.
const PACKING: usize = 8;
/// Blocks for each thread, so that a slower core gets fewer, and work from which there are so many.
const BALANCE: usize = 4;
const BALANCED: usize = 1 << 26;

/// Panels of a right operand that serve all blocks of rows.
#[derive(Clone, Copy)]
struct Packed<'a> {
    /// Number of the first.
    first: usize,
    /// Words of the first, and of each.
    words: *mut u32,
    size: usize,
    /// Their least exponents.
    least: &'a [u16],
}

impl Packed<'_> {
    fn panel(&self, number: usize) -> (*mut u32, u16) {
        let at = number - self.first;
        (self.words.wrapping_add(at * self.size), self.least[at])
    }
}

/// What a thread does at a time.
enum Part<'a> {
    /// Packs a panel where there is room for it and for its least exponent.
    Panel { number: usize, to: (*mut u32, &'a mut u16) },
    /// Computes the results of a block of rows and a group of panels, packed or not, in scratch memory of the plan's size.
    Block { at: [usize; 2], packed: Option<Packed<'a>>, scratch: *mut u8 },
}

/// How products of one shape are cut into blocks.
#[derive(Clone, Copy)]
struct Plan {
    /// The operands', and that of rounded results.
    formats: [Format; 2],
    half: Half,
    set: Set,
    kernel: Kernel,
    shape: Shape,
    /// Whether the transposed products are computed.
    is_turned: bool,
    /// Rows of a block, and panels of a group.
    height: usize,
    group: usize,
    /// Blocks of a product.
    row_blocks: usize,
    groups: usize,
    /// Words of a stretch.
    stretch: usize,
}

impl Plan {
    fn new(formats: [Format; 2], set: Set, count: usize, shape: Shape) -> Plan {
        let kernel = Kernel::of(formats, set);
        // All tiles, full or not, and the packing.
        let cost =
            |m: usize, n: usize| m.next_multiple_of(kernel.height(1)) * n.next_multiple_of(kernel.width);
        let is_turned = match shape.m.min(shape.n) {
            ..=FEW => shape.n < shape.m,
            _ => cost(shape.n, shape.m) < cost(shape.m, shape.n),
        };
        let Shape { m, n, k } = shape;
        let (m, n) = if is_turned { (n, m) } else { (m, n) };
        let [lhs, rhs] = formats;
        let formats = if is_turned { [rhs, lhs] } else { formats };
        let half = lhs.half().or(rhs.half()).unwrap_or(Half::F16);
        let depth = kernel.depth(k).max(1);
        let (rows, panels) = (kernel.rows(), n.div_ceil(kernel.width));
        // The rows take half of a core's own cache.
        let most = (machine().l2 / 2 / (depth * size_of::<u32>())).max(rows) / rows * rows;
        let work = count.saturating_mul(m).saturating_mul(n).saturating_mul(k);
        let threads = threads::count();
        let wanted = match work / TASK {
            _ if threads == 1 => 1,
            _ if work >= threads * BALANCED => BALANCE * threads,
            tasks => tasks.clamp(1, threads),
        };
        let mut height = most;
        while count * m.div_ceil(height) * panels < wanted && height > 2 * rows {
            height = (height / 2).next_multiple_of(rows);
        }
        let row_blocks = m.div_ceil(height);
        let height = m.div_ceil(row_blocks).next_multiple_of(rows);
        let group = panels.div_ceil(wanted.div_ceil(count * row_blocks).min(panels));
        // Two groups at a time stay in the last cache, where they are packed once for all blocks of rows.
        let panel_bytes = depth * kernel.width * size_of::<u32>();
        let group = if row_blocks == 1 { group } else { group.min((machine().l3 / 8 / panel_bytes).max(1)) };
        let stretch =
            (machine().l1 / 2 / (kernel.width * size_of::<u32>())).max(1).next_multiple_of(kernel.step);
        let (row_blocks, groups) = (m.div_ceil(height), panels.div_ceil(group));
        Plan {
            formats,
            half,
            set,
            kernel,
            shape: Shape { m, n, k },
            is_turned,
            height,
            group,
            row_blocks,
            groups,
            stretch,
        }
    }

    /// Bytes of a block's packed rows, of a panel, and of a panel's sums.
    fn room(&self) -> [usize; 3] {
        let Plan { kernel, height, shape, .. } = self;
        let (height, depth) = (height.min(&shape.m).next_multiple_of(kernel.rows()), kernel.depth(shape.k));
        let mut words = [height * depth, depth * kernel.width, height * kernel.width];
        if shape.m <= FEW {
            words[0] = words[0].max(shape.m * few_pitch(shape.k));
            words[2] = words[2].max(shape.m * ABREAST * kernel.width);
        }
        // Each begins with a cache line.
        words.map(|words| (words * size_of::<u32>()).next_multiple_of(64))
    }

    /// A part of the work on this thread, with the set's instructions.
    ///
    /// # Safety
    /// That of [`products`] and of the part.
    unsafe fn run(&self, product: Product, part: Part<'_>) {
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c,bmi2")]
            unsafe fn avx512(plan: &Plan, product: Product, part: Part<'_>) {
                // SAFETY: the caller's promise is passed on.
                unsafe { plan.part::<true>(product, part) }
            }
            #[target_feature(enable = "avx2,f16c,bmi2")]
            unsafe fn avx2(plan: &Plan, product: Product, part: Part<'_>) {
                // SAFETY: the caller's promise is passed on.
                unsafe { plan.part::<true>(product, part) }
            }
            match self.set.isa {
                // SAFETY: `isa` never names more than the machine has.
                Isa::Avx512 => return unsafe { avx512(self, product, part) },
                // SAFETY: as above.
                Isa::Avx2 => return unsafe { avx2(self, product, part) },
                Isa::Plain => {}
            }
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { self.part::<false>(product, part) }
    }

    /// # Safety
    /// That of [`run`](Self::run); `FAST` needs AVX2 and F16C.
    #[inline(always)]
    unsafe fn part<const FAST: bool>(&self, product: Product, part: Part<'_>) {
        let product = if self.is_turned { product.transposed() } else { product };
        // SAFETY: the caller's promise is passed on.
        unsafe {
            match part {
                Part::Panel { number, to } => *to.1 = self.panel::<FAST>(product.rhs, number, to.0),
                Part::Block { at, packed, scratch } => self.block::<FAST>(product, at, packed, scratch),
            }
        }
    }

    /// Packs a panel; returns its least exponent, if its words are pairs.
    ///
    /// # Safety
    /// The operand's elements are readable; there is room for the panel. `FAST` needs AVX2 and F16C.
    #[inline(always)]
    unsafe fn panel<const FAST: bool>(&self, rhs: Matrix<u16>, number: usize, to: *mut u32) -> u16 {
        let Plan {
            formats: [_, format],
            kernel: kernel @ Kernel { width, is_paired, .. },
            shape: Shape { n, k, .. },
            ..
        } = *self;
        let (j, packed, depth) = (number * width, words(k, is_paired) * width, kernel.depth(k) * width);
        // SAFETY: the caller's promise is passed on.
        unsafe {
            let lines = Lines { from: rhs.at(0, j), format, count: width.min(n - j), length: k };
            pack::<FAST>(lines, is_paired, to, width);
            to.add(packed).write_bytes(0, depth - packed);
            if is_paired { least_exponent(std::slice::from_raw_parts(to, packed)) } else { 0 }
        }
    }

    /// # Safety
    /// That of [`run`](Self::run); `FAST` needs AVX2 and F16C.
    #[inline(always)]
    unsafe fn block<const FAST: bool>(
        &self,
        product: Product,
        [row_block, group]: [usize; 2],
        shared: Option<Packed<'_>>,
        scratch: *mut u8,
    ) {
        let Plan { formats, half, kernel, shape: Shape { m, n, k }, height, .. } = *self;
        let Kernel { width, is_paired, .. } = kernel;
        let Product { results, start, lhs, rhs } = product;
        let depth = kernel.depth(k);
        let [rows_bytes, panel_bytes, _] = self.room();
        let packed = scratch.cast::<u32>();
        let panel = scratch.wrapping_add(rows_bytes).cast::<u32>();
        let sums = scratch.wrapping_add(rows_bytes + panel_bytes).cast::<f32>();
        let first = row_block * height;
        let count = height.min(m - first);
        let panels = group * self.group..((group + 1) * self.group).min(n.div_ceil(width));
        let is_one_format = formats == [Format::Half(half); 2];
        if m <= FEW && is_one_format && (rhs.row == 1 || rhs.column == 1) {
            let columns = |number: usize| width.min(n - number * width);
            // SAFETY: rows of the product; the scratch has room for their numbers.
            unsafe { few_rows::<FAST>(half, lhs, [m, k], packed) };
            let (loops, abreast) =
                if rhs.column == 1 { (kernel.few.across, ABREAST) } else { (kernel.few.along, 1) };
            for leading in panels.clone().step_by(abreast) {
                let together = leading..(leading + abreast).min(panels.end);
                let at = |number: usize| sums.wrapping_add((number - leading) * m * width);
                // SAFETY: columns of the product; the scratch has room for the sums of these panels. The task is as
                // described, and `of` chose what the machine has.
                unsafe {
                    for number in together.clone() {
                        let to = std::slice::from_raw_parts_mut(at(number), m * width);
                        let start = start.map(|start| (start.at(0, number * width), m));
                        begin::<FAST>(half, start, columns(number), width, to);
                    }
                    let task = few::Task {
                        rows: packed.cast(),
                        pitch: few_pitch(k),
                        from: rhs.at(0, leading * width),
                        columns: (together.end * width).min(n) - leading * width,
                        length: k,
                        is_paired,
                        sums,
                    };
                    loops[m - 1](&task);
                    for number in together {
                        let rows = std::slice::from_raw_parts(at(number), m * width).chunks_exact(width);
                        finish::<FAST>(half, rows, columns(number), results, [0, number * width]);
                    }
                }
            }
            return;
        }
        let tiles = || (0..count).step_by(kernel.rows()).map(move |i| (i, kernel.height(count - i)));
        // SAFETY: rows of the product; the scratch has room for tiles of them.
        let least_row = unsafe {
            let rows = Lines { from: lhs.at(first, 0).transposed(), format: formats[0], count, length: k };
            let end = pack_rows::<FAST>(rows, &kernel, packed);
            if is_paired { least_exponent(std::slice::from_raw_parts(packed, end * depth)) } else { 0 }
        };
        #[cfg(target_arch = "x86_64")]
        let _registers = if kernel.step > 1 { amx::Registers::new() } else { None };
        for number in panels {
            let j = number * width;
            let columns = width.min(n - j);
            // SAFETY: columns of the product; the scratch has room for a panel and its sums.
            unsafe {
                let (panel, least_panel) = match shared {
                    Some(packed) => packed.panel(number),
                    None => (panel, self.panel::<FAST>(rhs, number, panel)),
                };
                let all = count.next_multiple_of(kernel.rows()) * width;
                let all = std::slice::from_raw_parts_mut(sums, all);
                let least_start =
                    begin::<FAST>(half, start.map(|start| (start.at(first, j), count)), columns, width, all);
                let is_exact = is_paired && !is_normal(least_row, least_panel, least_start);
                for from in (0..depth).step_by(self.stretch) {
                    let part = self.stretch.min(depth - from);
                    for (i, rows) in tiles() {
                        let task = Task {
                            rows: packed.add(i * depth + from * rows),
                            panel: panel.add(from * width),
                            depth: part,
                            sums: sums.add(i * width),
                        };
                        kernel.run(rows, is_exact, &task);
                    }
                }
                let rows = std::slice::from_raw_parts(sums, count * width).chunks_exact(width);
                finish::<FAST>(half, rows, columns, results, [first, j]);
            }
        }
    }
}

/// Numbers of a row, and one more where they are odd.
fn few_pitch(k: usize) -> usize {
    k.next_multiple_of(2)
}

/// The numbers of a few rows, one row after the other.
///
/// # Safety
/// The elements are readable, and `to` has room for rows of [`few_pitch`]. `FAST` needs AVX2 and F16C.
#[inline(always)]
unsafe fn few_rows<const FAST: bool>(half: Half, from: Matrix<u16>, [rows, k]: [usize; 2], to: *mut u32) {
    for i in 0..rows {
        // SAFETY: the caller's promise.
        unsafe {
            let row = std::slice::from_raw_parts_mut(to.add(i * few_pitch(k)), few_pitch(k));
            let (row, rest) = row.split_at_mut(k);
            rest.fill(0);
            if from.column == 1 {
                half.widen_all::<FAST>(from.at(i, 0).pointer, row);
            } else {
                row.iter_mut().enumerate().for_each(|(p, x)| *x = half.widen(*from.at(i, p).pointer));
            }
        }
    }
}

/// Whether neither operands nor sums can be subnormal: those of these least exponents and start. Every product, and so
/// every sum, is a multiple of the product of the operands' last digits, which is then a normal number.
fn is_normal(row: u16, panel: u16, start: f32) -> bool {
    const DIGITS: u16 = 8;
    let is_start_normal = start >= f32::MIN_POSITIVE * f32::from(1_u16 << (DIGITS - 1));
    // Biased by 127: (row - 127 - 7) + (panel - 127 - 7) ≥ -126.
    row > 0 && panel > 0 && row + panel >= 2 * (127 + DIGITS - 1) - 126 && is_start_normal
}

/// Computes `count` products of one shape.
///
/// # Safety
/// All elements the shape and strides reach must be valid: those of the operands and the start to read, those of the
/// results to write. No two results share memory, and none with what is read.
pub unsafe fn products(
    half: Half,
    count: usize,
    shape: Shape,
    product: &(dyn Fn(usize) -> Product + Sync),
) -> Result<(), AllocError> {
    // SAFETY: the caller's promise is passed on.
    unsafe { products_of([Format::Half(half); 2], count, shape, product) }
}

/// The same of operands in other formats, f32 among them; what is rounded or begun with is a half's.
///
/// # Safety
/// That of [`products`].
pub(crate) unsafe fn products_of(
    formats: [Format; 2],
    count: usize,
    shape: Shape,
    product: &(dyn Fn(usize) -> Product + Sync),
) -> Result<(), AllocError> {
    // SAFETY: the caller's promise is passed on; the machine has its instructions.
    unsafe { products_with(Set::of_machine(), formats, count, shape, product) }
}

/// # Safety
/// That of [`products`]; the machine has the instructions.
unsafe fn products_with(
    set: Set,
    formats: [Format; 2],
    count: usize,
    shape: Shape,
    product: &(dyn Fn(usize) -> Product + Sync),
) -> Result<(), AllocError> {
    if count == 0 || shape.m == 0 || shape.n == 0 {
        return Ok(());
    }
    let work = shape.m.saturating_mul(shape.n).saturating_mul(shape.k);
    if work >= threads::count() * BALANCED {
        let plan = Plan::new(formats, set, 1, shape);
        if plan.row_blocks > 1 {
            // SAFETY: the caller's promise is passed on.
            return (0..count).try_for_each(|number| unsafe { plan.one(product(number), machine().l3 / 4) });
        }
    }
    let plan = Plan::new(formats, set, count, shape);
    let blocks = plan.row_blocks * plan.groups;
    // SAFETY: the caller's promise is passed on; blocks are disjoint in the results.
    each(&plan, count * blocks, TASK.div_ceil((work / blocks).max(1)), &|item, scratch| unsafe {
        let (number, block) = (item / blocks, item % blocks);
        let at = [block % plan.row_blocks, block / plan.row_blocks];
        plan.run(product(number), Part::Block { at, packed: None, scratch });
    })
}

/// Runs items on all threads, each with scratch memory of the plan's size.
fn each(
    plan: &Plan,
    count: usize,
    grain: usize,
    run: &(dyn Fn(usize, *mut u8) + Sync),
) -> Result<(), AllocError> {
    let room = plan.room().iter().sum();
    let failure = Mutex::new(None);
    parallel_for(count, grain, |begin, end| {
        let done = scratch::with(room, |scratch| (begin..end).for_each(|item| run(item, scratch)));
        if let Err(error) = done {
            *failure.lock() = Some(error);
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

impl Plan {
    /// A large product: several blocks of rows go through panels that are packed once, about so many bytes at a time.
    ///
    /// # Safety
    /// That of [`products`].
    unsafe fn one(&self, product: Product, bytes: usize) -> Result<(), AllocError> {
        let Plan { kernel, shape: Shape { n, k, .. }, group, row_blocks, groups, .. } = *self;
        let size = kernel.depth(k) * kernel.width;
        let together = (bytes / (group * size * size_of::<u32>()).max(1)).clamp(1, groups);
        let room = Buffer::alloc((together * group * size * size_of::<u32>()).max(1))?;
        let mut least = vec![0_u16; together * group];
        let product = Shared(product);
        for from in (0..groups).step_by(together) {
            let to = (from + together).min(groups);
            let panels = from * group..(to * group).min(n.div_ceil(kernel.width));
            let first = panels.start;
            let words = Shared((room.as_ptr().cast::<u32>(), least.as_mut_ptr()));
            parallel_for(panels.len(), (TASK / PACKING).div_ceil(size.max(1)), |begin, end| {
                for at in begin..end {
                    // SAFETY: the caller's promise is passed on; each panel has its own room.
                    unsafe {
                        let to = (words.get().0.add(at * size), &mut *words.get().1.add(at));
                        self.run(product.get(), Part::Panel { number: first + at, to });
                    }
                }
            });
            let packed = Shared(Packed { first, words: room.as_ptr().cast(), size, least: &least });
            // SAFETY: the caller's promise is passed on; blocks are disjoint in the results.
            each(self, row_blocks * (to - from), 1, &|item, scratch| unsafe {
                let at = [item % row_blocks, from + item / row_blocks];
                self.run(product.get(), Part::Block { at, packed: Some(packed.get()), scratch });
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
