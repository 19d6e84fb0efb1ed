//! Steps that run together, band by band of rows: products and the kernels between them. What lies between is there
//! for one band only, in memory of the running thread.
//!
//! Kernels don't know: they are given a pointer from which the rows before the band are subtracted, and the items of
//! the band.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kiln_plan::{Bands, Epilogue, Place};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::gemm::{self, Matrix, Product, Shape};
use crate::halves::Banded;
use crate::kept::{Contents, Made};
use crate::kernel::Args;
use crate::panel::Float;
use crate::pool::AllocError;
use crate::program::{self, Element, MatrixAt, Program, Task};
use crate::scratch;
use crate::threads::{Shared, parallel_for};

/// Why bands stopped.
pub(crate) enum Failed {
    Memory(AllocError),
    Status { step: usize, code: i32 },
}

/// One run of some bands.
pub(crate) struct Run<'a> {
    pub program: &'a Program,
    pub bands: &'a Bands,
    /// Where every buffer is.
    pub pointers: Shared<&'a [*mut u8]>,
    /// The run's numbers.
    pub scalars: &'a [u64],
    /// Those of the program's constants.
    pub contents: &'a [Contents],
}

/// A right operand that is turned round once for all bands of a matrix.
#[derive(Clone, Copy, PartialEq)]
struct Turned {
    /// The product.
    step: usize,
    /// Where the copy begins in the thread's memory, unless one is kept.
    offset: usize,
}

/// Copies of right operands that are kept, by product.
type KeptCopies = SmallVec<[(usize, Arc<Made>); MOST_TURNED]>;

/// Products with halves: their steps, where their memory begins, and how they are computed.
type Packed = SmallVec<[(usize, usize, Banded); MOST_TURNED]>;

/// The most of them; others are turned round by every band.
const MOST_TURNED: usize = 4;

/// A product, of which there are some rows to compute.
#[derive(Clone, Copy)]
struct Rows {
    shape: Shape,
    /// The buffer of the results, which are dense.
    dst: usize,
    lhs: MatrixAt,
    rhs: MatrixAt,
    /// If the right operand is turned round once: room for that.
    copy: Option<*mut u8>,
    /// Or it is there already.
    kept: Option<*mut u8>,
}

/// The rows that are worked on.
#[derive(Clone, Copy)]
struct Band {
    /// The matrix, and rows of it.
    matrix: usize,
    from: usize,
    to: usize,
    /// The rows of all matrices before this one, and of all there are.
    before: usize,
    all: usize,
    /// The thread's memory.
    memory: *mut u8,
    /// Whether the thread's last band was of another matrix.
    is_new: bool,
}

impl Run<'_> {
    /// # Safety
    /// As for [`Program::run`]; bands are independent of each other.
    pub(crate) unsafe fn run(&self) -> Result<(), Failed> {
        let Bands { first, rows, count, bytes, .. } = *self.bands;
        let (batch, m) = match &self.program.tasks[first] {
            Task::Gemm { shape, .. } => (1, shape.m),
            Task::Bmm { batch, shape, .. } => (*batch, shape.m),
            Task::Halves(step) => (step.batch, step.shape.m),
            Task::Kernel { .. } | Task::Convolution(_) | Task::Random { .. } | Task::Host => return Ok(()),
        };
        // SAFETY: the caller's promise is passed on.
        let kept = unsafe { self.kept() };
        let (turned, turned_end) = self.turned(&kept, bytes.next_multiple_of(64));
        let (packed, turned_end) = self.packed(rows.max(m - (count - 1) * rows), turned_end);
        // Kernels' tables of pointers and numbers come last.
        let table = self.members().map(|(_, step)| match step {
            Task::Kernel { bufs, scalars, .. } => bufs.len() + scalars.len(),
            _ => 0,
        });
        let table = table.max().unwrap_or(0) * size_of::<u64>();
        let failed = Mutex::new(None);
        let is_failed = AtomicBool::new(false);
        parallel_for(batch * count, 1, |begin, end| {
            let done = scratch::with((turned_end + table).max(1), |memory| {
                for unit in begin..end {
                    let (matrix, band) = (unit / count, unit % count);
                    let from = band * rows;
                    let to = if band + 1 == count { m } else { from + rows };
                    let is_new = unit == begin || band == 0;
                    let (before, all) = (matrix * m, batch * m);
                    let band = Band { matrix, from, to, before, all, memory, is_new };
                    // SAFETY: the caller's promise is passed on; the tables lie behind everything else.
                    unsafe { self.band(band, (&turned, &kept, &packed), memory.wrapping_add(turned_end)) }?;
                }
                Ok(())
            });
            if let Err(error) = done.map_err(Failed::Memory).flatten()
                && !is_failed.swap(true, Ordering::Relaxed)
            {
                *failed.lock() = Some(error);
            }
        });
        failed.into_inner().map_or(Ok(()), Err)
    }

    /// What is kept of the products' right operands.
    ///
    /// # Safety
    /// As for [`Run::run`].
    unsafe fn kept(&self) -> KeptCopies {
        let copies = self.members().filter_map(|(index, step)| match step {
            Task::Gemm { shape, rhs, element, constant, .. } => {
                let pointers = self.pointers.get();
                // SAFETY: the caller's promise is passed on. A constant is no band's.
                let copy =
                    unsafe { program::kept_copy(constant, self.contents, *shape, *element, rhs, pointers) };
                copy.map(|copy| (index, copy))
            }
            _ => None,
        });
        copies.collect()
    }

    /// Right operands that each band would turn round, copied once for all bands of a matrix: their copies begin at
    /// this byte; and where they end.
    fn turned(&self, kept: &KeptCopies, mut end: usize) -> ([Option<Turned>; MOST_TURNED], usize) {
        let mut found = [None; MOST_TURNED];
        let mut places = found.iter_mut();
        for (step, member) in self.members().filter(|_| self.bands.count > 1) {
            let (shape, rhs, element) = match member {
                Task::Gemm { shape, rhs, element, .. } => (shape, rhs, element),
                Task::Bmm { shape, rhs, element, .. } => (shape, &rhs.matrix, element),
                Task::Kernel { .. }
                | Task::Halves(_)
                | Task::Convolution(_)
                | Task::Random { .. }
                | Task::Host => continue,
            };
            let bytes = match element {
                Element::F64 => gemm::turned_once::<f64>(*shape, rhs.row, rhs.column),
                _ => gemm::turned_once::<f32>(*shape, rhs.row, rhs.column),
            };
            if let (Some(bytes), Some(place)) = (bytes, places.next()) {
                *place = Some(Turned { step, offset: end });
                let is_kept = kept.iter().any(|(product, _)| *product == step);
                end += if is_kept { 0 } else { bytes.next_multiple_of(64) };
            }
        }
        (found, end)
    }

    /// How products with halves are computed, of which there are at most so many rows at a time: their memory begins at
    /// this byte; and where it ends.
    fn packed(&self, rows: usize, mut end: usize) -> (Packed, usize) {
        let packed = self.members().filter_map(|(index, step)| match step {
            Task::Halves(step) => {
                let banded = Banded::new(step.formats, Shape { m: rows, ..step.shape });
                let offset = end;
                end += banded.bytes().next_multiple_of(64);
                Some((index, offset, banded))
            }
            _ => None,
        });
        (packed.collect(), end)
    }

    fn members(&self) -> impl Iterator<Item = (usize, &Task)> {
        let Bands { first, steps, .. } = *self.bands;
        self.program.tasks.iter().enumerate().skip(first).take(steps)
    }

    /// All steps on one band; `table` has room for the pointers and numbers of any of the kernels.
    ///
    /// # Safety
    /// As for [`Run::run`].
    unsafe fn band(
        &self,
        band: Band,
        (turned, kept, packed): (&[Option<Turned>], &KeptCopies, &Packed),
        table: *mut u8,
    ) -> Result<(), Failed> {
        let mut kernels = self.bands.kernels.iter();
        for (index, step) in self.members() {
            let copy = turned.iter().flatten().find(|turned| turned.step == index);
            let copy = copy.map(|turned| band.memory.wrapping_add(turned.offset));
            let kept = kept.iter().find(|(product, _)| *product == index).map(|(_, copy)| copy.as_ptr());
            match step {
                Task::Kernel { kernel, bufs, ints, scalars, items, grain: _, scratch_bytes } => {
                    let Some(&Epilogue { rows, items: per }) = kernels.next() else { continue };
                    let pointers = table.cast::<*mut u8>();
                    let numbers = pointers.wrapping_add(bufs.len()).cast::<u64>();
                    // SAFETY: the table has room for them; nobody else knows it.
                    let (bufs, scalars) = unsafe {
                        for (i, &(buffer, offset)) in bufs.iter().enumerate() {
                            pointers.add(i).write(self.buffer(buffer, band).wrapping_offset(offset));
                        }
                        for (i, &number) in scalars.iter().enumerate() {
                            numbers.add(i).write(self.scalars[number]);
                        }
                        (
                            std::slice::from_raw_parts(pointers, bufs.len()),
                            std::slice::from_raw_parts(numbers, scalars.len()),
                        )
                    };
                    let item = |row: usize| if row == band.all { *items } else { (row / rows) as i64 * per };
                    let (begin, end) = (item(band.before + band.from), item(band.before + band.to));
                    let args = Args { bufs, ints, scalars };
                    // SAFETY: the caller's promise is passed on.
                    let code = unsafe { kernel.run(&args, begin, end, *scratch_bytes) };
                    if code != 0 {
                        return Err(Failed::Status { step: index, code });
                    }
                }
                Task::Gemm { shape, dst, lhs, rhs, element, .. } => {
                    let rows = Rows { shape: *shape, dst: dst.buffer, lhs: *lhs, rhs: *rhs, copy, kept };
                    // SAFETY: the caller's promise is passed on.
                    unsafe { self.product(band, rows, *element) }
                }
                Task::Bmm { shape, dst, lhs, rhs, element, .. } => {
                    let (lhs, rhs) = (lhs.at(band.matrix), rhs.at(band.matrix));
                    let rows = Rows { shape: *shape, dst: *dst, lhs, rhs, copy, kept };
                    // SAFETY: the caller's promise is passed on.
                    unsafe { self.product(band, rows, *element) }
                }
                Task::Halves(step) => {
                    let Some((_, offset, banded)) = packed.iter().find(|(step, ..)| *step == index) else {
                        continue;
                    };
                    let memory = band.memory.wrapping_add(*offset);
                    let product = step.product(band.matrix, band.from, &|buffer| self.buffer(buffer, band));
                    // SAFETY: the caller's promise is passed on; the thread's memory has room for it.
                    unsafe {
                        if band.is_new {
                            banded.pack(product.rhs, memory);
                        }
                        banded.rows(product, band.to - band.from, memory);
                    }
                }
                Task::Convolution(_) | Task::Random { .. } | Task::Host => {}
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Run::run`].
    unsafe fn product(&self, band: Band, rows: Rows, element: Element) {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            match element {
                Element::F64 => self.rows_of::<f64>(band, rows),
                _ => self.rows_of::<f32>(band, rows),
            }
        }
    }

    /// # Safety
    /// As for [`Run::run`]; elements are of type T.
    unsafe fn rows_of<T: Float>(&self, band: Band, rows: Rows) {
        let Rows { shape, dst, lhs, rhs, copy, kept } = rows;
        let dst = MatrixAt { buffer: dst, offset: 0, row: shape.n as isize, column: 1 };
        let matrix = |at: MatrixAt, row: usize| {
            let first = self.buffer(at.buffer, band).cast::<T>().wrapping_offset(at.offset);
            Matrix::new(first, at.row, at.column).at(row, 0)
        };
        let mut rhs = matrix(rhs, 0);
        let dense = |pointer: *mut u8| Matrix::new(pointer.cast::<T>(), shape.n as isize, 1);
        let mut straight = kept.map(dense);
        if let Some(copy) = copy.map(dense) {
            if straight.is_none() && band.is_new {
                // SAFETY: the thread's memory has room for the copy.
                unsafe { gemm::turn(shape, rhs, copy) }
            }
            rhs = straight.take().unwrap_or(copy);
        }
        let product = Product {
            shape: Shape { m: band.to - band.from, ..shape },
            dst: matrix(dst, band.before + band.from),
            accumulate: false,
            lhs: matrix(lhs, band.from),
            rhs,
            straight,
        };
        // SAFETY: the caller's promise is passed on.
        unsafe { gemm::serial(product, shape.m) }
    }

    /// Where a buffer is, or would be if there were more of it than the band.
    fn buffer(&self, buffer: usize, band: Band) -> *mut u8 {
        match self.program.places[buffer] {
            Place::Band { offset, row_bytes } => {
                band.memory.wrapping_add(offset).wrapping_sub((band.before + band.from) * row_bytes)
            }
            Place::Input(_) | Place::Output(_) | Place::BeforeOutput { .. } | Place::Arena { .. } => {
                self.pointers.get()[buffer]
            }
        }
    }
}
