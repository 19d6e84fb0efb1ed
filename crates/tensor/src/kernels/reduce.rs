//! Reductions over any set of dims: sum, product, amax and amin.
//!
//! [Note: accuracy and order]
//! f32 sums run in many f32 lanes over short stretches, which are then added in f64: at least as accurate as
//! a cascade. Large reductions are cut into pieces whose bounds depend on the shape alone and whose results
//! are added in pairs, so the result doesn't depend on the number of threads.

use super::convert::convert;
use super::drive::{Loop, MAX_INPUTS};
use super::element::{Bool, Element};
use super::isa::vectorised;
use super::narrow::widening;
use super::operand::{Operand, Shared};
use super::strided::gather;
use kiln_ir::DType;
use kiln_runtime::parallel_for;
use kiln_runtime::threads::GRAIN;
use smallvec::SmallVec;
use std::slice::from_raw_parts;

/// What to compute over the reduced elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// The sum. Integers wrap; booleans are counted, giving i64.
    Sum,
    /// The largest element; NaN if there is one. Of nothing: the dtype's least value.
    Amax,
    /// The smallest element; NaN if there is one. Of nothing: the dtype's largest value.
    Amin,
    /// The product. Integers wrap; booleans are multiplied as i64.
    Prod,
}

/// `out = reduction of input over dims`.
///
/// `out` has the input's dims without the reduced ones, in order, contiguous.
///
/// # Safety
/// The contract of [`Operand`]; dims are distinct and in range; the output has the input's dtype or what that
/// is computed in (i64 for a sum or product of booleans) and overlaps nothing.
pub unsafe fn reduce(reduction: Reduction, out: &Operand, input: &Operand, dims: &[usize]) {
    debug_assert!(out.is_contiguous());
    if out.dtype.is_narrow() {
        let mut totals = vec![0u64; out.numel()];
        let wide = Operand { ptr: totals.as_mut_ptr().cast(), dtype: out.dtype.computing(), ..*out };
        // SAFETY: the totals have room for the output's elements, whatever their type.
        unsafe {
            reduce(reduction, &wide, input, dims);
            convert(out, &wide);
        }
        return;
    }
    // SAFETY: the caller's contract; each reducer fits the input's dtype.
    unsafe {
        match (reduction, input.dtype.computing()) {
            (Reduction::Sum, DType::F32) => run::<SumF32>(out, input, dims),
            (Reduction::Sum, DType::F64) => run::<SumF64>(out, input, dims),
            (Reduction::Sum, DType::Bool) => run::<CountBool>(out, input, dims),
            (Reduction::Sum, _) => run::<SumI64>(out, input, dims),
            (Reduction::Amax, DType::F32) => run::<AmaxF32>(out, input, dims),
            (Reduction::Amax, DType::F64) => run::<AmaxF64>(out, input, dims),
            (Reduction::Amax, DType::Bool) => run::<AmaxBool>(out, input, dims),
            (Reduction::Amax, _) => run::<AmaxI64>(out, input, dims),
            (Reduction::Amin, DType::F32) => run::<AminF32>(out, input, dims),
            (Reduction::Amin, DType::F64) => run::<AminF64>(out, input, dims),
            (Reduction::Amin, DType::Bool) => run::<AminBool>(out, input, dims),
            (Reduction::Amin, _) => run::<AminI64>(out, input, dims),
            (Reduction::Prod, DType::F32) => run::<ProdF32>(out, input, dims),
            (Reduction::Prod, DType::F64) => run::<ProdF64>(out, input, dims),
            (Reduction::Prod, DType::Bool) => run::<ProdBool>(out, input, dims),
            (Reduction::Prod, _) => run::<ProdI64>(out, input, dims),
        }
    }
}

/// A reduction of one dtype.
pub(super) trait Reducer: 'static {
    /// Elements.
    type In: Element;
    /// What a vector lane accumulates over a short stretch.
    type Lane: Copy + Send + Sync;
    /// What stretches are joined in.
    type Total: Copy + Send + Sync;
    /// The result.
    type Out: Element;
    /// The lane of nothing.
    const LANE: Self::Lane;
    /// The total of nothing.
    const TOTAL: Self::Total;
    /// One more element.
    fn step(lane: Self::Lane, x: Self::In) -> Self::Lane;
    /// Two lanes in one.
    fn merge(a: Self::Lane, b: Self::Lane) -> Self::Lane;
    /// A lane as a total.
    fn widen(lane: Self::Lane) -> Self::Total;
    /// Two totals in one.
    fn join(a: Self::Total, b: Self::Total) -> Self::Total;
    /// The result.
    fn finish(total: Self::Total) -> Self::Out;
}

macro_rules! reducer {
    ($name:ident: $in:ty, $lane:ty, $total:ty, $out:ty;
     $zero_lane:expr, $zero_total:expr; |$x:ident| $lift:expr; |$a:ident, $b:ident| $join:expr) => {
        pub(super) struct $name;
        impl Reducer for $name {
            type In = $in;
            type Lane = $lane;
            type Total = $total;
            type Out = $out;
            const LANE: $lane = $zero_lane;
            const TOTAL: $total = $zero_total;
            #[inline(always)]
            fn step($a: $lane, $x: $in) -> $lane {
                let $b: $lane = $lift;
                $join
            }
            #[inline(always)]
            fn merge($a: $lane, $b: $lane) -> $lane {
                $join
            }
            #[inline(always)]
            fn widen(lane: $lane) -> $total {
                lane as $total
            }
            #[inline(always)]
            fn join($a: $total, $b: $total) -> $total {
                $join
            }
            #[inline(always)]
            fn finish(total: $total) -> $out {
                total as $out
            }
        }
    };
}

reducer!(SumF32: f32, f32, f64, f32; 0.0, 0.0; |x| x; |a, b| a + b);
reducer!(SumF64: f64, f64, f64, f64; 0.0, 0.0; |x| x; |a, b| a + b);
reducer!(SumI64: i64, i64, i64, i64; 0, 0; |x| x; |a, b| a.wrapping_add(b));
reducer!(CountBool: Bool, i64, i64, i64; 0, 0; |x| i64::from(x); |a, b| a + b);
// A NaN in `a` stays because no comparison with it holds, one in `b` is taken up.
reducer!(AmaxF32: f32, f32, f32, f32; f32::NEG_INFINITY, f32::NEG_INFINITY; |x| x;
    |a, b| if (b > a) | b.is_nan() { b } else { a });
reducer!(AmaxF64: f64, f64, f64, f64; f64::NEG_INFINITY, f64::NEG_INFINITY; |x| x;
    |a, b| if (b > a) | b.is_nan() { b } else { a });
reducer!(AmaxI64: i64, i64, i64, i64; i64::MIN, i64::MIN; |x| x; |a, b| if b > a { b } else { a });
reducer!(AmaxBool: Bool, Bool, Bool, Bool; 0, 0; |x| x; |a, b| a | b);
reducer!(AminF32: f32, f32, f32, f32; f32::INFINITY, f32::INFINITY; |x| x;
    |a, b| if (b < a) | b.is_nan() { b } else { a });
reducer!(AminF64: f64, f64, f64, f64; f64::INFINITY, f64::INFINITY; |x| x;
    |a, b| if (b < a) | b.is_nan() { b } else { a });
reducer!(AminI64: i64, i64, i64, i64; i64::MAX, i64::MAX; |x| x; |a, b| if b < a { b } else { a });
reducer!(AminBool: Bool, Bool, Bool, Bool; 1, 1; |x| x; |a, b| a & b);
// In f64, so that large and small factors of f32 may come in any order.
reducer!(ProdF32: f32, f64, f64, f32; 1.0, 1.0; |x| f64::from(x); |a, b| a * b);
reducer!(ProdF64: f64, f64, f64, f64; 1.0, 1.0; |x| x; |a, b| a * b);
reducer!(ProdI64: i64, i64, i64, i64; 1, 1; |x| x; |a, b| a.wrapping_mul(b));
reducer!(ProdBool: Bool, i64, i64, i64; 1, 1; |x| i64::from(x); |a, b| a * b);

// The maximum of numbers: one instruction, where NaN may or may not show.
reducer!(LargestF32: f32, f32, f32, f32; f32::NEG_INFINITY, f32::NEG_INFINITY; |x| x;
    |a, b| if b > a { b } else { a });
reducer!(LargestF64: f64, f64, f64, f64; f64::NEG_INFINITY, f64::NEG_INFINITY; |x| x;
    |a, b| if b > a { b } else { a });

// Lanes, stretches, pieces and tiles decide in which order elements are added: they are fixed, since no bit depends on the
// machine or on the number of threads.

/// Lanes of a contiguous reduction: four registers of sixteen.
const LANES: usize = 64;
/// Elements that one lane takes before it is widened.
const STRETCH: usize = 32;
/// Elements of a long reduction that a thread takes.
const PIECE: usize = 65536;
/// Columns that are accumulated together.
const TILE: usize = 1024;

vectorised! {
    /// The total of contiguous elements.
    ///
    /// # Safety
    /// None beyond what the arguments say.
    pub(super) fn total [R: Reducer] [R] (x: &[R::In]) -> R::Total {
        let mut total = R::TOTAL;
        for block in x.chunks(LANES * STRETCH) {
            let mut lanes = [R::LANE; LANES];
            let (whole, rest) = block.as_chunks::<LANES>();
            for chunk in whole {
                for l in 0..LANES {
                    lanes[l] = R::step(lanes[l], chunk[l]);
                }
            }
            // Short rows skip the lanes they never used.
            if !whole.is_empty() {
                let mut width = LANES;
                // The first halvings add few lanes of few elements: still as good as a cascade.
                while width > 16 {
                    width /= 2;
                    for l in 0..width {
                        lanes[l] = R::merge(lanes[l], lanes[l + width]);
                    }
                }
                let mut wide: [R::Total; 16] = [R::TOTAL; 16];
                for l in 0..16 {
                    wide[l] = R::widen(lanes[l]);
                }
                while width > 1 {
                    width /= 2;
                    for l in 0..width {
                        wide[l] = R::join(wide[l], wide[l + width]);
                    }
                }
                total = R::join(total, wide[0]);
            }
            for &x in rest {
                total = R::join(total, R::widen(R::step(R::LANE, x)));
            }
        }
        total
    }
}

vectorised! {
    /// lanes[j] takes up row[j] of each row.
    ///
    /// # Safety
    /// Each row has as many elements as there are lanes.
    fn accumulate_rows [R: Reducer] [R] (lanes: &mut [R::Lane], rows: &[*const R::In]) {
        let n = lanes.len();
        let (groups, rest) = rows.as_chunks::<4>();
        for group in groups {
            // SAFETY: the caller's promise.
            let [a, b, c, d] = group.map(|row| unsafe { from_raw_parts(row, n) });
            for j in 0..n {
                let (ab, cd) = (R::step(R::step(R::LANE, a[j]), b[j]), R::step(R::step(R::LANE, c[j]), d[j]));
                lanes[j] = R::merge(lanes[j], R::merge(ab, cd));
            }
        }
        for &row in rest {
            // SAFETY: the caller's promise.
            let row = unsafe { from_raw_parts(row, n) };
            for j in 0..n {
                lanes[j] = R::step(lanes[j], row[j]);
            }
        }
    }
}

/// Rows that are gathered or widened at a time: they stay in the first-level cache. They are added by fours.
const GATHERED: usize = 16;

/// One dim: size and stride of the input in elements.
#[derive(Clone, Copy, Debug)]
struct Dim {
    size: usize,
    stride: isize,
}

type DimList = SmallVec<[Dim; 6]>;

fn push(dims: &mut DimList, dim: Dim) {
    if dim.size == 1 {
        return;
    }
    match dims.last_mut() {
        Some(last) if last.stride == dim.stride * dim.size as isize => {
            *last = Dim { size: last.size * dim.size, stride: dim.stride };
        }
        _ => dims.push(dim),
    }
}

fn count(dims: &[Dim]) -> usize {
    dims.iter().map(|d| d.size).product()
}

/// Offset in elements of a row-major index.
fn offset(dims: &[Dim], mut index: usize) -> isize {
    let mut offset = 0;
    for dim in dims.iter().rev() {
        offset += (index % dim.size) as isize * dim.stride;
        index /= dim.size;
    }
    offset
}

/// Where elements are read from: memory of the type they are computed in, or of a narrow one.
#[derive(Clone, Copy)]
struct Source {
    ptr: *const u8,
    size: usize,
    widen: Option<Loop>,
}

impl Source {
    fn of(input: &Operand) -> Source {
        Source { ptr: input.ptr, size: input.dtype.size(), widen: widening(input.dtype) }
    }

    /// Some elements further on.
    fn at(self, offset: isize) -> Source {
        Source { ptr: self.ptr.wrapping_offset(offset * self.size as isize), ..self }
    }

    /// The elements themselves, if no widening is needed.
    fn direct<T>(self) -> Option<*const T> {
        self.widen.is_none().then_some(self.ptr.cast())
    }

    /// Copies n elements, `stride` apart, widened; `natural` has room for them as they are in memory.
    ///
    /// # Safety
    /// The elements can be read, T is what they are computed in, and `block` has room for them.
    unsafe fn read<T>(self, block: *mut T, natural: *mut u8, stride: isize, n: usize) {
        let stride = stride * self.size as isize;
        // SAFETY: the caller's promise.
        unsafe {
            match self.widen {
                None => gather(block.cast(), self.ptr, stride, n, self.size),
                Some(widen) if stride == self.size as isize => {
                    widen(block.cast(), &[self.ptr; MAX_INPUTS], n);
                }
                Some(widen) => {
                    gather(natural, self.ptr, stride, n, self.size);
                    widen(block.cast(), &[natural.cast_const(); MAX_INPUTS], n);
                }
            }
        }
    }
}

/// # Safety
/// That of [`reduce`].
unsafe fn run<R: Reducer>(out: &Operand, input: &Operand, dims: &[usize]) {
    let outputs = out.numel();
    let (mut kept, mut reduced) = (DimList::new(), DimList::new());
    for (d, (&size, &stride)) in input.shape.iter().zip(input.strides).enumerate() {
        push(if dims.contains(&d) { &mut reduced } else { &mut kept }, Dim { size, stride });
    }
    let length = count(&reduced);
    if outputs == 0 {
        return;
    }
    if length == 0 {
        for i in 0..outputs {
            // SAFETY: output i.
            unsafe { out.ptr.cast::<R::Out>().add(i).write(R::finish(R::TOTAL)) };
        }
        return;
    }
    // The order of a reduction is free: its smallest stride goes last.
    reduced.sort_by_key(|d| std::cmp::Reverse(d.stride.unsigned_abs()));
    let reduced_stride = reduced.last().map_or(isize::MAX, |d| d.stride.abs());
    let columns = kept.last().is_some_and(|last| last.stride.abs() < reduced_stride && last.size >= 8);
    // SAFETY: the caller's contract.
    unsafe {
        if columns {
            reduce_columns::<R>(out.ptr.cast(), Source::of(input), &kept, &reduced);
        } else {
            reduce_rows::<R>(out.ptr.cast(), Source::of(input), &kept, &reduced);
        }
    }
}

/// Each output's elements lie along the input: outputs, or pieces of them, one after the other.
///
/// # Safety
/// That of [`reduce`].
unsafe fn reduce_rows<R: Reducer>(out: *mut R::Out, input: Source, kept: &[Dim], reduced: &[Dim]) {
    let (outputs, length) = (count(kept), count(reduced));
    let pieces = length.div_ceil(PIECE);
    let shared = Shared::new((out, input));
    let work = |begin: usize, end: usize, store: &dyn Fn(usize, R::Total)| {
        for task in begin..end {
            let (output, piece) = (task / pieces, task % pieces);
            let (first, last) = (piece * PIECE, ((piece + 1) * PIECE).min(length));
            let base = shared.get().1.at(offset(kept, output));
            // SAFETY: elements first..last of this output's.
            store(task, unsafe { range_total::<R>(base, reduced, first, last) });
        }
    };
    let tasks = outputs * pieces;
    // SAFETY: output `i` is written by the task that owns it alone.
    let finish = |i: usize, total: R::Total| unsafe { shared.get().0.add(i).write(R::finish(total)) };
    if outputs * length < 2 * GRAIN {
        work(0, tasks, &finish);
    } else if pieces == 1 {
        parallel_for(tasks, GRAIN.div_ceil(length), |begin, end| work(begin, end, &finish));
    } else {
        let mut totals = vec![R::TOTAL; tasks];
        let slots = Shared::new(totals.as_mut_ptr());
        parallel_for(tasks, 1, |begin, end| {
            // SAFETY: each task has its own slot.
            work(begin, end, &|task, total| unsafe { slots.get().add(task).write(total) });
        });
        for (i, totals) in totals.chunks(pieces).enumerate() {
            finish(i, pairwise::<R>(totals));
        }
    }
}

fn pairwise<R: Reducer>(totals: &[R::Total]) -> R::Total {
    match totals {
        [] => R::TOTAL,
        [one] => *one,
        _ => {
            let (left, right) = totals.split_at(totals.len() / 2);
            R::join(pairwise::<R>(left), pairwise::<R>(right))
        }
    }
}

/// The total of the elements `first..last` in the order of the dims.
///
/// # Safety
/// These elements can be read.
unsafe fn range_total<R: Reducer>(base: Source, dims: &[Dim], first: usize, last: usize) -> R::Total {
    let Some((inner, outer)) = dims.split_last() else {
        // SAFETY: no dims: one element.
        return unsafe { strided_total::<R>(base, 1, 1) };
    };
    let mut total = R::TOTAL;
    let mut at = first;
    while at < last {
        let (row, column) = (at / inner.size, at % inner.size);
        let n = (inner.size - column).min(last - at);
        let start = base.at(offset(outer, row) + column as isize * inner.stride);
        // SAFETY: n elements along the inner dim.
        total = R::join(total, unsafe { strided_total::<R>(start, inner.stride, n) });
        at += n;
    }
    total
}

/// # Safety
/// n elements, `stride` apart, can be read.
unsafe fn strided_total<R: Reducer>(start: Source, stride: isize, n: usize) -> R::Total {
    if stride == 1
        && let Some(start) = start.direct()
    {
        // SAFETY: contiguous elements.
        return unsafe { total::<R>(from_raw_parts(start, n)) };
    }
    const BLOCK: usize = LANES * STRETCH;
    let mut block = [std::mem::MaybeUninit::<R::In>::uninit(); BLOCK];
    let mut natural = [std::mem::MaybeUninit::<u32>::uninit(); BLOCK];
    let mut result = R::TOTAL;
    let mut done = 0;
    while done < n {
        let count = BLOCK.min(n - done);
        let from = start.at(done as isize * stride);
        // SAFETY: the blocks have room for `count` elements (narrow ones take at most 4 bytes), which are then
        // initialised.
        unsafe {
            from.read::<R::In>(block.as_mut_ptr().cast(), natural.as_mut_ptr().cast(), stride, count);
            result = R::join(result, total::<R>(from_raw_parts(block.as_ptr().cast(), count)));
        }
        done += count;
    }
    result
}

/// Outputs lie along the input: whole rows are added to each other.
///
/// # Safety
/// That of [`reduce`].
unsafe fn reduce_columns<R: Reducer>(out: *mut R::Out, input: Source, kept: &[Dim], reduced: &[Dim]) {
    let Some((inner, outer)) = kept.split_last() else { return };
    let rows = count(reduced);
    let (groups, tiles) = (count(outer), inner.size.div_ceil(TILE));
    // Few columns: rows are split too, into pieces that the shape alone decides.
    let pieces = if groups * tiles >= 8 { 1 } else { (rows * inner.size.min(TILE) / PIECE).clamp(1, 16) };
    let piece_rows = rows.div_ceil(pieces);
    let tasks = groups * tiles * pieces;
    let mut partials = if pieces > 1 { vec![R::TOTAL; tasks * TILE] } else { Vec::new() };
    let shared = Shared::new((out, input, partials.as_mut_ptr()));

    let work = |begin: usize, end: usize| {
        let (out, input, partials) = shared.get();
        let mut lanes = [R::LANE; TILE];
        let mut totals = [R::TOTAL; TILE];
        for task in begin..end {
            let (piece, tile) = (task % pieces, task / pieces % tiles);
            let group = task / pieces / tiles;
            let first = tile * TILE;
            let width = TILE.min(inner.size - first);
            let base = input.at(offset(outer, group) + first as isize * inner.stride);
            let bounds = (piece * piece_rows, ((piece + 1) * piece_rows).min(rows));
            // SAFETY: these rows of these columns can be read.
            unsafe {
                column_totals::<R>(
                    base,
                    inner.stride,
                    reduced,
                    bounds,
                    &mut lanes[..width],
                    &mut totals[..width],
                );
            }
            for (j, &total) in totals[..width].iter().enumerate() {
                // SAFETY: each task has its own part of the partial totals, or of the output.
                unsafe {
                    if pieces > 1 {
                        partials.add(task * TILE + j).write(total);
                    } else {
                        out.add(group * inner.size + first + j).write(R::finish(total));
                    }
                }
            }
        }
    };
    let task_elements = piece_rows * inner.size.min(TILE);
    if tasks * task_elements < 2 * GRAIN {
        work(0, tasks);
    } else {
        parallel_for(tasks, (GRAIN / task_elements.max(1)).max(1), work);
    }
    if pieces > 1 {
        let mut column = [R::TOTAL; 16];
        for task in 0..groups * tiles {
            let (group, first) = (task / tiles, task % tiles * TILE);
            for j in 0..TILE.min(inner.size - first) {
                for (piece, total) in column[..pieces].iter_mut().enumerate() {
                    *total = partials[(task * pieces + piece) * TILE + j];
                }
                let total = pairwise::<R>(&column[..pieces]);
                // SAFETY: an output of this group and tile.
                unsafe { out.add(group * inner.size + first + j).write(R::finish(total)) };
            }
        }
    }
}

/// Accumulates rows `bounds.0..bounds.1` of some columns.
///
/// # Safety
/// The rows' elements at these columns can be read.
unsafe fn column_totals<R: Reducer>(
    base: Source,
    column_stride: isize,
    reduced: &[Dim],
    bounds: (usize, usize),
    lanes: &mut [R::Lane],
    totals: &mut [R::Total],
) {
    totals.fill(R::TOTAL);
    let mut rows: SmallVec<[*const R::In; STRETCH]> = SmallVec::new();
    let mut gathered: Vec<R::In> = Vec::new();
    let mut natural: Vec<u32> = Vec::new();
    let width = lanes.len();
    let is_direct = column_stride == 1 && base.widen.is_none();
    let step = if is_direct { STRETCH } else { GATHERED };
    gathered.reserve(if is_direct { 0 } else { step * width });
    natural.reserve(if is_direct { 0 } else { width });
    let mut at = bounds.0;
    while at < bounds.1 {
        let n = STRETCH.min(bounds.1 - at);
        lanes.fill(R::LANE);
        for from in (at..at + n).step_by(step) {
            rows.clear();
            for (i, row) in (from..(from + step).min(at + n)).enumerate() {
                let source = base.at(offset(reduced, row));
                rows.push(match source.direct::<R::In>() {
                    Some(row) if is_direct => row,
                    _ => {
                        let row = gathered.as_mut_ptr().wrapping_add(i * width);
                        // SAFETY: the columns of a row; both vectors have room for them.
                        unsafe { source.read(row, natural.as_mut_ptr().cast(), column_stride, width) };
                        row.cast_const()
                    }
                });
            }
            // SAFETY: each row has these columns.
            unsafe { accumulate_rows::<R>(lanes, &rows) };
        }
        for (total, &lane) in totals.iter_mut().zip(&*lanes) {
            *total = R::join(*total, R::widen(lane));
        }
        at += n;
    }
}
