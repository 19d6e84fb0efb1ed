//! Convolution over one or two spatial dims, and its two gradients, on dense memory.
//!
//! All three are products of matrices that lie at sums of offsets ([`contract`]): images are padded by a copy
//! (where there is padding), and the pixel under a tap is then at *offset of the position* + *offset of the
//! tap*. The gradient of the input with a stride falls apart into one product for each phase of the stride,
//! none of which multiplies by the zeros between the steps. Convolutions with few channels a group are done
//! directly (`direct/`), and large ones of 3 × 3 without a stride with fewer multiplications (`winograd.rs`).

mod direct;
mod geometry;
mod halves;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
use std::any::TypeId;
use std::ops::Range;

use crate::contract::{Lattice, Real, contract};
use crate::list::List;
use crate::pool::{AllocError, Buffer};
use crate::threads::{GRAIN, Shared, parallel_for};
#[cfg(target_arch = "x86_64")]
use crate::winograd::{self, Kernels, Task};

pub use direct::Direct;
pub use geometry::{Geometry, pair};
pub(crate) use halves::sums_of_halves;
pub use halves::{Operands, is_for_halves, of_halves};

/// Elements of a result that are there: those of these planes (counted through all images) from pixel to pixel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// The planes.
    pub planes: Range<usize>,
    /// The pixels of each of them.
    pub pixels: Range<usize>,
}

/// What is told of every part of a result once, when it is finished, on the thread that computed it.
pub type OnFinished<'a> = &'a (dyn Fn(Finished) + Sync);

/// Kernels that stay as they are from call to call.
#[derive(Debug, Clone, Copy)]
pub struct Constant<'a>(
    /// The kernels in the form that [`transformed`] gives them, if that was done already.
    pub Option<&'a Buffer>,
);

/// Planes in memory, a padded copy or the original.
struct Planes<T> {
    base: *mut T,
    size: [usize; 2],
    _copy: Option<Buffer>,
}

impl<T: Real> Planes<T> {
    fn area(&self) -> usize {
        self.size[0] * self.size[1]
    }

    /// `count` planes with zeros around them.
    ///
    /// # Safety
    /// `planes` points to that many planes of this size.
    unsafe fn padded(
        planes: *mut T,
        count: usize,
        size: [usize; 2],
        before: [usize; 2],
        after: [usize; 2],
    ) -> Result<Planes<T>, AllocError> {
        if before == [0, 0] && after == [0, 0] {
            return Ok(Planes { base: planes, size, _copy: None });
        }
        // Zeros take no memory of the user's: with a large step between positions there may be any number.
        let side = |d: usize| before[d].saturating_add(size[d]).saturating_add(after[d]);
        let wide = [side(0), side(1)];
        let bytes = [wide[0], wide[1], size_of::<T>()].iter().fold(count, |all, &n| all.saturating_mul(n));
        let copy = Buffer::alloc(bytes.max(1))?;
        let area = wide[0] * wide[1];
        let base = copy.as_ptr().cast::<T>();
        let shared = Shared((planes, base));
        parallel_for(count, GRAIN.div_ceil(area.max(1)), |begin, end| {
            let (planes, base) = shared.get();
            for plane in begin..end {
                // SAFETY: a plane of each, which no other thread touches.
                unsafe {
                    let to = std::slice::from_raw_parts_mut(base.add(plane * area), area);
                    let from =
                        std::slice::from_raw_parts(planes.add(plane * size[0] * size[1]), size[0] * size[1]);
                    to.fill(T::ZERO);
                    for row in 0..size[0] {
                        to[(row + before[0]) * wide[1] + before[1]..][..size[1]]
                            .copy_from_slice(&from[row * size[1]..][..size[1]]);
                    }
                }
            }
        });
        Ok(Planes { base, size: wide, _copy: Some(copy) })
    }
}

/// Offsets of positions `(image, row, column)`, with these distances between them.
fn positions(batch: usize, size: [usize; 2], distance: [usize; 3]) -> Result<List<isize>, AllocError> {
    let mut offsets = List::with_room(batch * size[0] * size[1])?;
    for n in 0..batch {
        for i in 0..size[0] {
            let row = n * distance[0] + i * distance[1];
            (0..size[1]).for_each(|j| offsets.push((row + j * distance[2]) as isize));
        }
    }
    Ok(offsets)
}

/// Offsets of `channels` things at a distance, each with the same taps, the taps innermost.
fn with_taps(channels: usize, distance: usize, taps: &[usize]) -> Result<List<isize>, AllocError> {
    let offsets = (0..channels).flat_map(|c| taps.iter().map(move |tap| (c * distance + tap) as isize));
    List::of(channels * taps.len(), offsets)
}

/// `count` offsets at a distance.
fn strided(count: usize, distance: usize) -> Result<List<isize>, AllocError> {
    List::of(count, (0..count).map(|i| (i * distance) as isize))
}

/// Offsets of the taps in an image this wide.
fn taps(g: &Geometry, width: usize) -> Result<List<usize>, AllocError> {
    let row = |r: usize| (0..g.kernel[1]).map(move |s| r * g.dilation[0] * width + s * g.dilation[1]);
    List::of(g.taps(), (0..g.kernel[0]).flat_map(row))
}

/// The convolution, or the gradient of its input, as one of 3 × 3 that there is a quicker way for.
#[cfg(target_arch = "x86_64")]
pub(crate) fn minimal_task(g: &Geometry, kernels: Kernels) -> Option<Task> {
    let is_plain = g.stride == [1, 1] && g.dilation == [1, 1] && g.groups == 1;
    if g.kernel != [3, 3] || !is_plain || g.padding.iter().any(|zeros| *zeros > 2) {
        return None;
    }
    let straight = Task {
        batch: g.batch,
        channels: g.channels,
        filters: g.filters,
        input: g.input,
        output: g.output,
        padding: g.padding,
        kernels,
    };
    Some(match kernels {
        Kernels::Straight => straight,
        Kernels::Turned => Task {
            channels: g.filters,
            filters: g.channels,
            input: g.output,
            output: g.input,
            padding: g.padding.map(|zeros| 2 - zeros),
            ..straight
        },
    })
}

/// The convolution, or the gradient of its input, as one with fewer multiplications, where that is quicker.
#[cfg(target_arch = "x86_64")]
fn minimal<T: 'static>(g: &Geometry, kernels: Kernels, kept: bool) -> Option<Task> {
    let task = if TypeId::of::<T>() == TypeId::of::<f32>() { minimal_task(g, kernels) } else { None };
    task.filter(|task| task.pays(kept))
}

/// Constant kernels as [`forward_with`] can use them again and again; `None` if it takes them as they are.
///
/// # Safety
/// The weights are dense and of the sizes that the geometry says.
pub unsafe fn transformed<T: Real>(g: &Geometry, weight: *const T) -> Result<Option<Buffer>, AllocError> {
    #[cfg(target_arch = "x86_64")]
    if let Some(task) = minimal::<T>(g, Kernels::Straight, true) {
        // SAFETY: elements are f32; the caller's promise is passed on.
        return unsafe { task.transformed(weight.cast()).map(Some) };
    }
    let _ = (g, weight);
    Ok(None)
}

/// Whether constant kernels are worth [transforming](transformed).
pub fn is_transformed<T: Real>(g: &Geometry) -> bool {
    #[cfg(target_arch = "x86_64")]
    return minimal::<T>(g, Kernels::Straight, true).is_some();
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = g;
        false
    }
}

/// `out[n, o, p] = Σ x[n, c, p·stride + tap] · weight[o, c, tap]`.
///
/// # Safety
/// `out` `[batch, filters, output]`, `x` `[batch, channels, input]` and `weight`
/// `[filters, channels / groups, kernel]` are dense; `out` overlaps nothing. The sizes fit together.
pub unsafe fn forward<T: Direct>(
    g: &Geometry,
    out: *mut T,
    x: *const T,
    weight: *const T,
) -> Result<(), AllocError> {
    // SAFETY: the caller's promise is passed on.
    unsafe { forward_with(g, out, x, weight, None, None) }
}

/// [`forward`] plus a number for each filter, which is added to results as they are finished.
///
/// # Safety
/// That of [`forward`]; `bias` has a number for each filter.
pub unsafe fn forward_biased<T: Direct>(
    g: &Geometry,
    out: *mut T,
    x: *const T,
    weight: *const T,
    bias: *const T,
) -> Result<(), AllocError> {
    let area = g.output[0] * g.output[1];
    let shared = Shared((out, bias.cast_mut()));
    let add = |part: Finished| {
        let (out, bias) = shared.get();
        for plane in part.planes {
            let at = out.wrapping_add(plane * area + part.pixels.start);
            // SAFETY: a filter's number, and a finished part of its plane, which is told of to nobody else.
            unsafe { (T::loops().wide.add)(at, *bias.add(plane % g.filters), part.pixels.len()) };
        }
    };
    // SAFETY: the caller's promise is passed on.
    unsafe { forward_with(g, out, x, weight, None, Some(&add)) }
}

/// [`forward`] with kernels that are constant, perhaps, and somebody to be told of what is finished. That the
/// kernels are constant may decide how results are computed, and so their last bits; whether they were
/// transformed before does not.
///
/// # Safety
/// That of [`forward`]. Transformed kernels are those of these weights.
pub unsafe fn forward_with<T: Direct>(
    g: &Geometry,
    out: *mut T,
    x: *const T,
    weight: *const T,
    constant: Option<Constant<'_>>,
    then: Option<OnFinished<'_>>,
) -> Result<(), AllocError> {
    if g.is_direct() {
        // SAFETY: the caller's promise is passed on.
        return unsafe { direct::forward(g, out, x.cast_mut(), weight, then) };
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(task) = minimal::<T>(g, Kernels::Straight, constant.is_some()) {
        // SAFETY: elements are f32; the caller's promise is passed on.
        unsafe {
            let run = |kernels: &Buffer| winograd::run(&task, out.cast(), x.cast(), kernels, then);
            return match constant {
                Some(Constant(Some(kernels))) => run(kernels),
                Some(Constant(None)) | None => run(&task.transformed(weight.cast())?),
            };
        }
    }
    // SAFETY: the input's planes.
    let image = unsafe { Planes::padded(x.cast_mut(), g.batch * g.channels, g.input, g.padding, g.padding)? };
    let (channels, filters) = (g.channels / g.groups, g.filters / g.groups);
    let (area, pixels) = (image.area(), g.output[0] * g.output[1]);
    let steps = [g.channels * area, g.stride[0] * image.size[1], g.stride[1]];
    let under = positions(g.batch, g.output, steps)?;
    let inner = with_taps(channels, area, &taps(g, image.size[1])?)?;
    let (weights, weight_columns) = (strided(inner.len(), 1)?, strided(filters, inner.len())?);
    let places = positions(g.batch, g.output, [g.filters * pixels, g.output[1], 1])?;
    let planes = strided(filters, pixels)?;
    let shared = Shared((out, image.base, weight.cast_mut()));
    g.each_group(|group| {
        let (out, image, weight) = shared.get();
        let dst =
            Lattice { base: out.wrapping_add(group * filters * pixels), rows: &places, columns: &planes };
        let lhs =
            Lattice { base: image.wrapping_add(group * channels * area), rows: &under, columns: &inner };
        let base = weight.wrapping_add(group * filters * inner.len());
        let rhs = Lattice { base, rows: &weights, columns: &weight_columns };
        let told = |positions: Range<usize>, columns: Range<usize>| {
            let Some(then) = then else { return };
            for image in positions.start / pixels..positions.end.div_ceil(pixels) {
                let pixel = |position: usize| position.saturating_sub(image * pixels).min(pixels);
                let first = image * g.filters + group * filters;
                then(Finished {
                    planes: first + columns.start..first + columns.end,
                    pixels: pixel(positions.start)..pixel(positions.end),
                });
            }
        };
        // SAFETY: every position with every tap lies inside the padded image; groups' results are disjoint.
        unsafe { contract(dst, lhs, rhs, Some(&told)) }
    })
}

/// `out[n, c, i] = Σ grad[n, o, p] · weight[o, c, tap]` over all `p`, `tap` with `p·stride + tap = i`.
///
/// # Safety
/// `out` `[batch, channels, input]`, `grad` `[batch, filters, output]` and `weight` are dense; `out` overlaps
/// nothing. The sizes fit together.
pub unsafe fn input_gradient<T: Direct>(
    g: &Geometry,
    out: *mut T,
    grad: *const T,
    weight: *const T,
) -> Result<(), AllocError> {
    if g.is_direct() {
        // SAFETY: the caller's promise is passed on.
        return unsafe { direct::input_gradient(g, out, grad.cast_mut(), weight) };
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(task) = minimal::<T>(g, Kernels::Turned, false) {
        // SAFETY: elements are f32; the caller's promise is passed on.
        return unsafe {
            let kernels = task.transformed(weight.cast())?;
            winograd::run(&task, out.cast(), grad.cast(), &kernels, None)
        };
    }
    // How far phases reach beyond the output.
    let mut before = [0usize; 2];
    let mut after = [0usize; 2];
    for d in 0..2 {
        for first in 0..g.stride[d].min(g.input[d]) {
            for (_, at) in g.phase(d, first) {
                let end = at + g.phase_size(d, first) as isize - g.output[d] as isize;
                before[d] = before[d].max(usize::try_from(-at).unwrap_or(0));
                after[d] = after[d].max(usize::try_from(end).unwrap_or(0));
            }
        }
    }
    // SAFETY: the gradient's planes.
    let field = unsafe { Planes::padded(grad.cast_mut(), g.batch * g.filters, g.output, before, after)? };
    let (channels, filters) = (g.channels / g.groups, g.filters / g.groups);
    let (area, pixels) = (field.area(), g.input[0] * g.input[1]);
    let planes = strided(channels, pixels)?;
    let weight_columns = strided(channels, g.taps())?;
    for top in 0..g.stride[0].min(g.input[0]) {
        for left in 0..g.stride[1].min(g.input[1]) {
            let (rows, columns) = (g.phase(0, top), g.phase(1, left));
            let size = [g.phase_size(0, top), g.phase_size(1, left)];
            let mut meets = List::with_room(g.taps())?;
            let mut tap_places = List::with_room(g.taps())?;
            for (r, row) in rows {
                for (s, column) in columns.clone() {
                    let row = (row + before[0] as isize) as usize;
                    let column = (column + before[1] as isize) as usize;
                    meets.push(row * field.size[1] + column);
                    tap_places.push(r * g.kernel[1] + s);
                }
            }
            let under = positions(g.batch, size, [g.filters * area, field.size[1], 1])?;
            let inner = with_taps(filters, area, &meets)?;
            let weights = with_taps(filters, channels * g.taps(), &tap_places)?;
            let distance = [g.channels * pixels, g.stride[0] * g.input[1], g.stride[1]];
            let places = positions(g.batch, size, distance)?;
            let shared = Shared((out, field.base, weight.cast_mut()));
            g.each_group(|group| {
                let (out, field, weight) = shared.get();
                let base = out.wrapping_add(group * channels * pixels + top * g.input[1] + left);
                let dst = Lattice { base, rows: &places, columns: &planes };
                let base = field.wrapping_add(group * filters * area);
                let lhs = Lattice { base, rows: &under, columns: &inner };
                let base = weight.wrapping_add(group * filters * channels * g.taps());
                // SAFETY: every position with every tap of its phase lies inside the padded gradient; results
                // of groups and phases are disjoint.
                unsafe {
                    contract(dst, lhs, Lattice { base, rows: &weights, columns: &weight_columns }, None)
                }
            })?;
        }
    }
    Ok(())
}

/// `out[o, c, tap] = Σ x[n, c, p·stride + tap] · grad[n, o, p]` over all images and positions.
///
/// # Safety
/// `out` `[filters, channels / groups, kernel]`, `x` and `grad` are dense; `out` overlaps nothing. The sizes
/// fit together.
pub unsafe fn weight_gradient<T: Direct>(
    g: &Geometry,
    out: *mut T,
    x: *const T,
    grad: *const T,
) -> Result<(), AllocError> {
    if g.is_direct() {
        // SAFETY: the caller's promise is passed on.
        return unsafe { direct::weight_gradient(g, out, x.cast_mut(), grad.cast_mut()) };
    }
    // SAFETY: the input's planes.
    let image = unsafe { Planes::padded(x.cast_mut(), g.batch * g.channels, g.input, g.padding, g.padding)? };
    let (channels, filters) = (g.channels / g.groups, g.filters / g.groups);
    let (area, pixels) = (image.area(), g.output[0] * g.output[1]);
    let under = with_taps(channels, area, &taps(g, image.size[1])?)?;
    let steps = [g.channels * area, g.stride[0] * image.size[1], g.stride[1]];
    let inner = positions(g.batch, g.output, steps)?;
    let grads = positions(g.batch, g.output, [g.filters * pixels, g.output[1], 1])?;
    let planes = strided(filters, pixels)?;
    let (places, weight_columns) = (strided(under.len(), 1)?, strided(filters, under.len())?);
    let shared = Shared((out, image.base, grad.cast_mut()));
    g.each_group(|group| {
        let (out, image, grad) = shared.get();
        let base = out.wrapping_add(group * filters * under.len());
        let dst = Lattice { base, rows: &places, columns: &weight_columns };
        let lhs =
            Lattice { base: image.wrapping_add(group * channels * area), rows: &under, columns: &inner };
        let base = grad.wrapping_add(group * filters * pixels);
        // SAFETY: every position with every tap lies inside the padded image; groups' results are disjoint.
        unsafe { contract(dst, lhs, Lattice { base, rows: &grads, columns: &planes }, None) }
    })
}
