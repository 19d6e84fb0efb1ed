//! Convolutions with one input channel a group: a plane at a time, a tap at a time, along whole rows.

use super::{Finished, Geometry, OnFinished};
use crate::contract::Real;
use crate::threads::{GRAIN, Shared, parallel_for};

/// The positions along one dim at which a tap lies inside the input.
fn inside(g: &Geometry, d: usize, tap: usize) -> std::ops::Range<usize> {
    let shift = tap * g.dilation[d];
    let begin = g.padding[d].saturating_sub(shift).div_ceil(g.stride[d]);
    let end = match (g.input[d] + g.padding[d]).checked_sub(shift + 1) {
        Some(last) => (last / g.stride[d] + 1).min(g.output[d]),
        None => 0,
    };
    begin.min(end)..end
}

/// Calls `body(tap, output row's first place, input row's first place, length)` for every row of every tap:
/// output places follow each other, input places lie a stride apart.
#[inline(always)]
fn rows(g: &Geometry, mut body: impl FnMut(usize, usize, usize, usize)) {
    for r in 0..g.kernel[0] {
        for s in 0..g.kernel[1] {
            let columns = inside(g, 1, s);
            if columns.is_empty() {
                continue;
            }
            let left = columns.start * g.stride[1] + s * g.dilation[1] - g.padding[1];
            for row in inside(g, 0, r) {
                let top = row * g.stride[0] + r * g.dilation[0] - g.padding[0];
                let (out, at) = (row * g.output[1] + columns.start, top * g.input[1] + left);
                body(r * g.kernel[1] + s, out, at, columns.len());
            }
        }
    }
}

/// The number of elements of a plane of the input, of the output and of the kernel.
fn areas(g: &Geometry) -> [usize; 3] {
    [g.input, g.output, g.kernel].map(|size| size[0] * size[1])
}

/// Filters that read one channel.
fn spread(g: &Geometry) -> usize {
    g.filters / g.channels
}

fn grain(g: &Geometry) -> usize {
    let [_, pixels, taps] = areas(g);
    (2 * GRAIN).div_ceil((pixels * taps).max(1))
}

/// # Safety
/// That of the outer function of this name; so for all here.
pub(super) unsafe fn forward<T: Real>(
    g: &Geometry,
    out: *mut T,
    x: *const T,
    weight: *const T,
    then: Option<OnFinished<'_>>,
) {
    let [area, pixels, taps] = areas(g);
    let shared = Shared((out, x, weight));
    parallel_for(g.batch * g.filters, grain(g), |begin, end| {
        let (out, x, weight) = shared.get();
        for plane in begin..end {
            let (n, o) = (plane / g.filters, plane % g.filters);
            let channel = n * g.channels + o / spread(g);
            // SAFETY: whole planes; the output's belongs to this item.
            let (out, x, weight) = unsafe {
                (
                    std::slice::from_raw_parts_mut(out.add(plane * pixels), pixels),
                    std::slice::from_raw_parts(x.add(channel * area), area),
                    std::slice::from_raw_parts(weight.add(o * taps), taps),
                )
            };
            out.fill(T::ZERO);
            rows(g, |tap, to, from, length| {
                let (to, from) = (&mut out[to..][..length], x[from..].iter().step_by(g.stride[1]));
                for (to, &x) in to.iter_mut().zip(from) {
                    *to = T::multiply_add::<false>(weight[tap], x, *to);
                }
            });
            if let Some(then) = then {
                then(Finished { planes: plane..plane + 1, pixels: 0..pixels });
            }
        }
    });
}

/// # Safety
/// That of the outer function of this name.
pub(super) unsafe fn input_gradient<T: Real>(g: &Geometry, out: *mut T, grad: *const T, weight: *const T) {
    let [area, pixels, taps] = areas(g);
    let shared = Shared((out, grad, weight));
    parallel_for(g.batch * g.channels, grain(g), |begin, end| {
        let (out, grad, weight) = shared.get();
        for plane in begin..end {
            let (n, c) = (plane / g.channels, plane % g.channels);
            // SAFETY: a whole plane that belongs to this item.
            let out = unsafe { std::slice::from_raw_parts_mut(out.add(plane * area), area) };
            out.fill(T::ZERO);
            for o in c * spread(g)..(c + 1) * spread(g) {
                // SAFETY: whole planes.
                let (grad, weight) = unsafe {
                    (
                        std::slice::from_raw_parts(grad.add((n * g.filters + o) * pixels), pixels),
                        std::slice::from_raw_parts(weight.add(o * taps), taps),
                    )
                };
                rows(g, |tap, from, to, length| {
                    let to = out[to..].iter_mut().step_by(g.stride[1]);
                    for (to, &x) in to.zip(&grad[from..][..length]) {
                        *to = T::multiply_add::<false>(weight[tap], x, *to);
                    }
                });
            }
        }
    });
}

/// # Safety
/// That of the outer function of this name.
pub(super) unsafe fn weight_gradient<T: Real>(g: &Geometry, out: *mut T, x: *const T, grad: *const T) {
    let [area, pixels, taps] = areas(g);
    let shared = Shared((out, x, grad));
    parallel_for(g.filters, 1, |begin, end| {
        let (out, x, grad) = shared.get();
        for o in begin..end {
            // SAFETY: a kernel that belongs to this item.
            let out = unsafe { std::slice::from_raw_parts_mut(out.add(o * taps), taps) };
            out.fill(T::ZERO);
            for n in 0..g.batch {
                let channel = n * g.channels + o / spread(g);
                // SAFETY: whole planes.
                let (x, grad) = unsafe {
                    (
                        std::slice::from_raw_parts(x.add(channel * area), area),
                        std::slice::from_raw_parts(grad.add((n * g.filters + o) * pixels), pixels),
                    )
                };
                rows(g, |tap, at, from, length| {
                    let from = x[from..].iter().step_by(g.stride[1]);
                    let mut lanes = [T::ZERO; 8];
                    for (i, (&g, &x)) in grad[at..][..length].iter().zip(from).enumerate() {
                        lanes[i % 8] = T::multiply_add::<false>(g, x, lanes[i % 8]);
                    }
                    out[tap] = lanes.iter().fold(out[tap], |sum, &lane| sum + lane);
                });
            }
        }
    });
}
