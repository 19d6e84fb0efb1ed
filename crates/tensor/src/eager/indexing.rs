//! Picking and placing elements by index. Every index is checked before anything is written.

use kiln_ir::{DType, Op, Result, ScatterReduce, Shape, Why, bf16, f16};
use kiln_runtime::{parallel_for, threads};

use super::{Input, Job, elements, elements_mut, operand};
use crate::kernels::{self, Picks, Shared};
use crate::tensor::Ready;

/// Bytes below which a copy is not worth a thread.
const GRAIN: usize = 4 * threads::GRAIN;

/// Whether an op changes some elements of its first operand and leaves the others, so that in place it needs
/// to touch only those.
pub(super) fn changes_places(op: &Op) -> bool {
    matches!(
        op,
        Op::IndexAdd { .. }
            | Op::IndexCopy { .. }
            | Op::Scatter { .. }
            | Op::ScatterAdd { .. }
            | Op::ScatterReduce { .. }
            | Op::MaskedScatter {}
            | Op::IndexPut { .. }
    )
}

/// The dtype in which sums and products of elements are taken: truth values as integers.
fn computing(dtype: DType) -> DType {
    match dtype.computing() {
        DType::Bool => DType::I64,
        other => other,
    }
}

/// A number that elements are reduced in.
pub(super) trait Number: Copy + PartialEq + Send + Sync {
    const LOWEST: Self;
    const HIGHEST: Self;
    const ZERO: Self;
    const ONE: Self;
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    /// Divided by a count; integers are rounded down.
    fn shared(self, count: i64) -> Self;
}

macro_rules! float_number {
    ($ty:ty) => {
        impl Number for $ty {
            const LOWEST: $ty = <$ty>::NEG_INFINITY;
            const HIGHEST: $ty = <$ty>::INFINITY;
            const ZERO: $ty = 0.0;
            const ONE: $ty = 1.0;
            fn plus(self, other: $ty) -> $ty {
                self + other
            }
            fn times(self, other: $ty) -> $ty {
                self * other
            }
            fn larger(self, other: $ty) -> $ty {
                if self.is_nan() || self > other { self } else { other }
            }
            fn smaller(self, other: $ty) -> $ty {
                if self.is_nan() || self < other { self } else { other }
            }
            fn shared(self, count: i64) -> $ty {
                self / count as $ty
            }
        }
    };
}
float_number!(f32);
float_number!(f64);

impl Number for i64 {
    const LOWEST: i64 = i64::MIN;
    const HIGHEST: i64 = i64::MAX;
    const ZERO: i64 = 0;
    const ONE: i64 = 1;
    fn plus(self, other: i64) -> i64 {
        self.wrapping_add(other)
    }
    fn times(self, other: i64) -> i64 {
        self.wrapping_mul(other)
    }
    fn larger(self, other: i64) -> i64 {
        self.max(other)
    }
    fn smaller(self, other: i64) -> i64 {
        self.min(other)
    }
    fn shared(self, count: i64) -> i64 {
        self.div_euclid(count)
    }
}

/// `body` with the Rust type of a computing dtype.
macro_rules! with_number {
    ($dtype:expr, $ty:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $ty = f32;
                $body
            }
            DType::F64 => {
                type $ty = f64;
                $body
            }
            _ => {
                type $ty = i64;
                $body
            }
        }
    };
}

pub(super) use with_number;

/// A tensor as `outer` blocks of `size` slices of `inner` elements.
struct Slices {
    outer: usize,
    size: usize,
    inner: usize,
}

impl Slices {
    fn of(shape: &Shape, dim: usize) -> Slices {
        Slices {
            outer: shape[..dim].iter().product(),
            size: shape[dim],
            inner: shape[dim + 1..].iter().product(),
        }
    }
}

impl Job<'_> {
    /// as_strided of a tensor that is not row-major: its elements are lined up first.
    pub(super) fn as_strided(&self, out: &Ready, x: &Ready) -> Result<()> {
        let dense = self.dense(x)?;
        match dense.layout.view(self.op) {
            Some(layout) => {
                let view = Ready { layout, ..dense };
                // SAFETY: `out` is fresh and has the view's shape; the view lies inside `dense`.
                unsafe { kernels::convert(&operand(out), &operand(&view)) };
                Ok(())
            }
            None => Err(self.op.error(self.tys, Why::NoView, self.loc)),
        }
    }

    /// The elements read backwards along dims.
    pub(super) fn flip(&self, out: &Ready, x: &Ready, dims: &[usize]) -> Result<()> {
        let mut layout = x.layout.clone();
        if layout.shape.numel() > 0 {
            for &d in dims {
                let last = (layout.shape[d] - 1) as isize * layout.strides[d];
                layout.offset = (layout.offset as isize + last) as usize;
                layout.strides[d] = -layout.strides[d];
            }
        }
        let turned = Ready { layout, ..x.clone() };
        // SAFETY: `out` is fresh and of x's shape; the layout reaches the same elements as x's.
        unsafe { kernels::convert(&operand(out), &operand(&turned)) };
        Ok(())
    }

    /// The elements of each matrix on one side of a diagonal and on it, the others 0.
    pub(super) fn triangle(&self, out: &Ready, x: &Ready, diagonal: i64, lower: bool) -> Result<()> {
        let shape = &out.layout.shape;
        let (columns, rows) = (shape[shape.rank() - 1], shape[shape.rank() - 2]);
        let lines = shape.numel().checked_div(columns).unwrap_or(0);
        let (x, size) = (self.dense(x)?, out.dtype.size());
        let (from, to) = (Shared::new(x.pointer()), Shared::new(out.pointer()));
        parallel_for(lines, (GRAIN / (columns * size).max(1)).max(1), |begin, end| {
            for line in begin..end {
                // Where the upper part begins, or the lower one ends.
                let edge =
                    (line % rows) as i64 + diagonal.saturating_add(i64::from(lower)).min(columns as i64);
                let edge = edge.clamp(0, columns as i64) as usize;
                let kept = if lower { 0..edge } else { edge..columns };
                let zeros = if lower { edge..columns } else { 0..edge };
                // SAFETY: both are dense and of one shape; the line is this thread's.
                unsafe {
                    let (from, to) =
                        (from.get().add(line * columns * size), to.get().add(line * columns * size));
                    let (first, count) = (kept.start * size, kept.len() * size);
                    std::ptr::copy_nonoverlapping(from.add(first), to.add(first), count);
                    to.add(zeros.start * size).write_bytes(0, zeros.len() * size);
                }
            }
        });
        Ok(())
    }

    pub(super) fn checked_index(&self, out: &Ready, index: &Ready, size: usize) -> Result<()> {
        let index = self.dense(index)?;
        let n = index.layout.shape.numel();
        // SAFETY: `index` is dense i64, locked or fresh; `out` is fresh and of its shape.
        let (from, to) = unsafe { (elements::<i64>(&index, n), elements_mut::<i64>(out, n)) };
        let whole = i64::try_from(size).unwrap_or(i64::MAX);
        for (to, &i) in to.iter_mut().zip(from) {
            if i < -whole || i >= whole {
                return Err(self.op.error(self.tys, Why::Index { index: i, size }, self.loc));
            }
            *to = if i < 0 { i + whole } else { i };
        }
        Ok(())
    }

    pub(super) fn one_hot(&self, out: &Ready, index: &Ready, classes: usize) -> Result<()> {
        let (index, n) = self.positions(index, classes)?;
        // SAFETY: as in `positions`.
        let picks = unsafe { elements::<i64>(&index, n) };
        let to = Shared::new(out.pointer().cast::<i64>());
        parallel_for(n, GRAIN.div_ceil(classes.saturating_mul(8).max(1)), |begin, end| {
            for (row, &pick) in (begin..).zip(&picks[begin..end]) {
                // SAFETY: `out` is fresh i64 with a row of so many classes for each index; the row is this thread's, and
                // the pick was checked.
                unsafe {
                    let row = to.get().add(row * classes);
                    row.write_bytes(0, classes);
                    row.add(pick as usize).write(1);
                }
            }
        });
        Ok(())
    }

    pub(super) fn index_select(&self, out: &Ready, inputs: &[Input], dim: usize) -> Result<()> {
        self.slices_at(out, self.tensor(inputs, 0)?, self.tensor(inputs, 1)?, dim)
    }

    /// The slices of x at the positions of an index, whatever its shape, one after the other.
    pub(super) fn slices_at(&self, out: &Ready, x: &Ready, index: &Ready, dim: usize) -> Result<()> {
        let (index, n) = self.positions(index, x.layout.shape[dim])?;
        let x = self.dense(x)?;
        let Slices { outer, size, inner } = Slices::of(&x.layout.shape, dim);
        let bytes = inner * x.dtype.size();
        if outer * n * bytes == 0 {
            return Ok(());
        }
        // SAFETY: as in `positions`.
        let picks = unsafe { elements::<i64>(&index, n) };
        let (from, to) = (Shared::new(x.pointer()), Shared::new(out.pointer()));
        macro_rules! pick {
            ($bytes:expr) => {
                parallel_for(outer * n, (GRAIN / bytes).max(1), |begin, end| {
                    let (mut block, mut i) = (begin / n, begin % n);
                    for row in begin..end {
                        let source = (block * size + picks[i] as usize) * bytes;
                        // SAFETY: picks were checked, so the slice lies in `x`; row `row` of `out` is this thread's.
                        unsafe {
                            let (from, to) = (from.get().add(source), to.get().add(row * bytes));
                            std::ptr::copy_nonoverlapping(from, to, $bytes);
                        }
                        i += 1;
                        if i == n {
                            (block, i) = (block + 1, 0);
                        }
                    }
                })
            };
        }
        // Of a known size, a slice of one element is moved and not copied by a call.
        match bytes {
            1 => pick!(1),
            2 => pick!(2),
            4 => pick!(4),
            8 => pick!(8),
            _ => pick!(bytes),
        }
        Ok(())
    }

    /// out = x, unless they are the same memory.
    pub(super) fn start_from(&self, out: &Ready, x: &Ready) {
        if x.storage.address() != out.storage.address() || x.layout != out.layout {
            // SAFETY: `out` is fresh or locked for writing and has x's shape; x is locked for reading.
            unsafe { kernels::convert(&operand(out), &operand(x)) };
        }
    }

    /// Where sums are taken: `out` itself, or a copy in the computing dtype.
    pub(super) fn workspace(&self, out: &Ready) -> Result<Ready> {
        match computing(out.dtype) {
            dtype if dtype == out.dtype => Ok(out.clone()),
            dtype => self.convert(out, dtype),
        }
    }

    pub(super) fn finish(out: &Ready, work: &Ready) {
        if work.storage.address() != out.storage.address() {
            // SAFETY: `out` is fresh or locked for writing; `work` is fresh and of its shape.
            unsafe { kernels::convert(&operand(out), &operand(work)) };
        }
    }

    pub(super) fn operand_in(&self, t: &Ready, dtype: DType) -> Result<Ready> {
        if t.dtype == dtype { self.dense(t) } else { self.convert(t, dtype) }
    }

    /// index_add and index_copy. `out` is dense.
    pub(super) fn index_write(&self, out: &Ready, inputs: &[Input], dim: usize, add: bool) -> Result<()> {
        let (x, index, src) = (self.tensor(inputs, 0)?, self.tensor(inputs, 1)?, self.tensor(inputs, 2)?);
        self.write_slices(out, x, (index, src), dim, add)
    }

    /// x with the slices of a tensor put, or added, at the positions of an index, whatever its shape.
    pub(super) fn write_slices(
        &self,
        out: &Ready,
        x: &Ready,
        (index, src): (&Ready, &Ready),
        dim: usize,
        add: bool,
    ) -> Result<()> {
        let (index, n) = self.positions(index, x.layout.shape[dim])?;
        let wide = computing(out.dtype);
        let work = if add && wide != out.dtype {
            self.convert(x, wide)?
        } else {
            self.start_from(out, x);
            out.clone()
        };
        let is_half = src.dtype.is_float() && src.dtype != work.dtype;
        let src = if is_half { self.dense(src)? } else { self.operand_in(src, work.dtype)? };
        let Slices { outer, size, inner } = Slices::of(&out.layout.shape, dim);
        if outer * n * inner == 0 {
            Job::finish(out, &work);
            return Ok(());
        }
        // SAFETY: as in `positions`.
        let picks = unsafe { elements::<i64>(&index, n) };
        let lines = kernels::Slices { picks, outer, size, inner };
        let (to, from) = (work.pointer(), src.pointer().cast_const());
        // SAFETY: picks were checked; both tensors are dense and have the slices' elements, of one dtype or halves that are
        // added up in f32; `work` is fresh, or `out`, which is fresh or locked for writing.
        unsafe {
            if add && is_half {
                match src.dtype {
                    DType::F16 => lines.write(to.cast::<f32>(), from.cast(), |a, b: f16| a + b.to_f32()),
                    _ => lines.write(to.cast::<f32>(), from.cast(), |a, b: bf16| a + b.to_f32()),
                }
            } else if add {
                with_number!(work.dtype, T => lines.write(to.cast::<T>(), from.cast(), Number::plus));
            } else {
                match work.dtype.size() {
                    1 => lines.write(to, from, |_, new| new),
                    2 => lines.write(to.cast::<u16>(), from.cast(), |_, new| new),
                    4 => lines.write(to.cast::<u32>(), from.cast(), |_, new| new),
                    _ => lines.write(to.cast::<u64>(), from.cast(), |_, new| new),
                }
            }
        }
        Job::finish(out, &work);
        Ok(())
    }

    /// The scatters; `None` puts, otherwise values that meet are reduced. `out` is dense.
    pub(super) fn scatter(
        &self,
        out: &Ready,
        inputs: &[Input],
        dim: usize,
        reduce: Option<(ScatterReduce, bool)>,
    ) -> Result<()> {
        let (x, index, src) = (self.tensor(inputs, 0)?, self.tensor(inputs, 1)?, self.tensor(inputs, 2)?);
        let (index, n) = self.positions(index, x.layout.shape[dim])?;
        self.start_from(out, x);
        if n == 0 {
            return Ok(());
        }
        // SAFETY: as in `positions`.
        let picked = unsafe { elements::<i64>(&index, n) };
        let picks = Picks { index: picked, shape: &index.layout.shape, strides: &out.layout.strides, dim };
        let Some((reduce, include_self)) = reduce else {
            // One number for all places stays one.
            let is_number = src.layout.strides.iter().all(|&stride| stride == 0);
            let (src, step) = if is_number { (src.clone(), 0) } else { (self.dense(src)?, 1) };
            let memory = Shared::new((src.pointer(), out.pointer()));
            macro_rules! put {
                ($ty:ty) => {
                    // SAFETY: index's other sizes are at most out's and picks were checked, so the place lies in
                    // `out`; it is one thread's; `src` is dense with `n` elements, or one element.
                    picks.each(true, |place, i| unsafe {
                        let (from, to) = memory.get();
                        to.cast::<$ty>().offset(place).write(from.cast::<$ty>().add(i * step).read());
                    })
                };
            }
            match out.dtype.size() {
                1 => put!(u8),
                2 => put!(u16),
                4 => put!(u32),
                _ => put!(u64),
            }
            return Ok(());
        };
        let work = self.workspace(out)?;
        let src = self.operand_in(src, work.dtype)?;
        let total = out.layout.shape.numel();
        with_number!(work.dtype, T => {
            // SAFETY: `work` is `out`, which is fresh or locked for writing, or fresh; `src` is dense with `n`
            // elements; both are of type T.
            let (to, from) = unsafe { (elements_mut::<T>(&work, total), elements::<T>(&src, n)) };
            combine(to, from, picks, reduce, include_self);
        });
        Job::finish(out, &work);
        Ok(())
    }

    pub(super) fn masked_scatter(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let (x, mask, src) = (self.tensor(inputs, 0)?, self.tensor(inputs, 1)?, self.tensor(inputs, 2)?);
        let n = out.layout.shape.numel();
        let mask = self.mask_line(mask, &x.layout.shape)?;
        // SAFETY: the line is dense with as many truth values.
        let mask = unsafe { elements::<u8>(&mask, n) };
        let (src, have) = (self.dense(src)?, src.layout.shape.numel());
        let wanted = kernels::count(mask);
        if wanted > have {
            let why = Why::sizes("the number of true elements in mask and of elements in src", wanted, have);
            return Err(self.op.error(self.tys, why, self.loc));
        }
        self.start_from(out, x);
        if wanted == 0 {
            return Ok(());
        }
        let (to, from) = (out.pointer(), src.pointer().cast_const());
        // SAFETY: `out` is dense with n elements, `src` has one at least, and enough; both are of one dtype.
        unsafe {
            match out.dtype.size() {
                1 => kernels::spread(mask, to, from, have),
                2 => kernels::spread(mask, to.cast::<u16>(), from.cast(), have),
                4 => kernels::spread(mask, to.cast::<u32>(), from.cast(), have),
                _ => kernels::spread(mask, to.cast::<u64>(), from.cast(), have),
            }
        }
        Ok(())
    }

    pub(super) fn masked_scatter_backward(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let (x, mask) = (self.tensor(inputs, 0)?, self.tensor(inputs, 1)?);
        let mask = self.mask_line(mask, &x.layout.shape)?;
        // SAFETY: the line is dense with as many truth values.
        let mask = unsafe { elements::<u8>(&mask, x.layout.shape.numel()) };
        let (x, room) = (self.dense(x)?, out.layout.shape.numel());
        let (to, from) = (out.pointer(), x.pointer().cast_const());
        // SAFETY: `out` is fresh, dense and has room for so many; x has as many elements as the mask; both are of one dtype.
        let found = unsafe {
            match out.dtype.size() {
                1 => kernels::collect(mask, to, from, room),
                2 => kernels::collect(mask, to.cast::<u16>(), from.cast(), room),
                4 => kernels::collect(mask, to.cast::<u32>(), from.cast(), room),
                _ => kernels::collect(mask, to.cast::<u64>(), from.cast(), room),
            }
        };
        let size = out.dtype.size();
        // SAFETY: the elements behind those found.
        unsafe { to.add(found * size).write_bytes(0, (room - found) * size) };
        Ok(())
    }

    /// A mask, broadcast to a shape, as truth values one after the other.
    fn mask_line(&self, mask: &Ready, shape: &Shape) -> Result<Ready> {
        let wide = match mask.layout.view(&Op::Expand { shape: shape.clone() }) {
            Some(layout) => Ready { layout, ..mask.clone() },
            None => mask.clone(),
        };
        self.dense(&wide)
    }
}

/// Reduces the elements of `src` into the places that are picked in `to`.
fn combine<T: Number>(to: &mut [T], src: &[T], picks: Picks<'_>, reduce: ScatterReduce, include_self: bool) {
    /// The element at each place becomes what a function makes of it and the `i`-th of `src`.
    fn change<T: Copy>(to: &mut [T], picks: Picks<'_>, function: impl Fn(T, usize) -> T + Sync) {
        let to = Shared::new(to.as_mut_ptr());
        // SAFETY: picks were checked, so places lie in `to`; each is one thread's.
        picks.each(true, |place, i| unsafe {
            let place = to.get().offset(place);
            *place = function(*place, i);
        });
    }
    if !include_self {
        let start = match reduce {
            ScatterReduce::Sum | ScatterReduce::Mean => T::ZERO,
            ScatterReduce::Prod => T::ONE,
            ScatterReduce::Amax => T::LOWEST,
            ScatterReduce::Amin => T::HIGHEST,
        };
        change(to, picks, |_, _| start);
    }
    match reduce {
        ScatterReduce::Sum | ScatterReduce::Mean => change(to, picks, |x, i| x.plus(src[i])),
        ScatterReduce::Prod => change(to, picks, |x, i| x.times(src[i])),
        ScatterReduce::Amax => change(to, picks, |x, i| x.larger(src[i])),
        ScatterReduce::Amin => change(to, picks, |x, i| x.smaller(src[i])),
    }
    if reduce == ScatterReduce::Mean {
        let mut counts = vec![i64::from(include_self); to.len()];
        change(&mut counts, picks, |count, _| count + 1);
        for (value, count) in to.iter_mut().zip(counts) {
            if count > 1 {
                *value = value.shared(count);
            }
        }
    }
}
