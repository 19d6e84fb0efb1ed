//! Pooling and resizing of dense planes: weighted sums of neighbours along both dims, the same the other way
//! for gradients, and the places of windows' maxima.

use smallvec::SmallVec;

use super::isa::vectorised;
use super::norm::Real;
use super::operand::Shared;
use kiln_ir::table::resample::Axis;
use kiln_runtime::parallel_for;
use kiln_runtime::threads::GRAIN;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// An axis with its weights in the elements' type, one after the other.
struct Taps<T> {
    /// For each element of the result: its first neighbour, and where its weights are.
    spans: Vec<(usize, std::ops::Range<usize>)>,
    weights: Vec<T>,
    input: usize,
}

impl<T: Real> Taps<T> {
    fn new(axis: &Axis) -> Taps<T> {
        let mut taps =
            Taps { spans: Vec::with_capacity(axis.taps.len()), weights: Vec::new(), input: axis.input };
        for (first, weights) in &axis.taps {
            let from = taps.weights.len();
            taps.weights.extend(weights.iter().map(|&w| T::from_f64(w)));
            taps.spans.push((*first, from..taps.weights.len()));
        }
        taps
    }

    fn at(&self, i: usize) -> (usize, &[T]) {
        let (first, span) = &self.spans[i];
        (*first, &self.weights[span.clone()])
    }
}

fn grain(area: usize) -> usize {
    (GRAIN / 2).div_ceil(area.max(1))
}

/// `out` = weighted sums of neighbours in `x`, plane by plane.
///
/// # Safety
/// `out` and `x` hold `planes` planes of the axes' output and input sizes; they don't overlap.
pub unsafe fn resample<T: Real>(planes: usize, axes: &[Axis; 2], out: *mut T, x: *const T) {
    let (rows, columns) = (Taps::<T>::new(&axes[0]), Taps::<T>::new(&axes[1]));
    let (height, width) = (rows.spans.len(), columns.spans.len());
    let area = rows.input * columns.input;
    let shared = Shared::new((out, x));
    parallel_for(planes, grain(area), |begin, end| {
        let (out, x) = shared.get();
        let mut line = vec![T::ZERO; columns.input];
        for plane in begin..end {
            // SAFETY: whole planes; the output's belongs to this item.
            let (out, x) = unsafe {
                (
                    from_raw_parts_mut(out.add(plane * height * width), height * width),
                    from_raw_parts(x.add(plane * area), area),
                )
            };
            for i in 0..height {
                let (first, weights) = rows.at(i);
                line.fill(T::ZERO);
                for (r, &weight) in weights.iter().enumerate() {
                    let from = &x[(first + r) * columns.input..][..columns.input];
                    for (sum, &x) in line.iter_mut().zip(from) {
                        *sum = *sum + weight * x;
                    }
                }
                for (j, out) in out[i * width..][..width].iter_mut().enumerate() {
                    let (first, weights) = columns.at(j);
                    let terms = weights.iter().zip(&line[first..]);
                    *out = terms.fold(T::ZERO, |sum, (&weight, &x)| sum + weight * x);
                }
            }
        }
    });
}

/// `out` = what each element of `grad` gives back to its neighbours, plane by plane.
///
/// # Safety
/// `out` and `grad` hold `planes` planes of the axes' input and output sizes; they don't overlap.
pub unsafe fn resample_backward<T: Real>(planes: usize, axes: &[Axis; 2], out: *mut T, grad: *const T) {
    let (rows, columns) = (Taps::<T>::new(&axes[0]), Taps::<T>::new(&axes[1]));
    let (height, width) = (rows.spans.len(), columns.spans.len());
    let area = rows.input * columns.input;
    let shared = Shared::new((out, grad));
    parallel_for(planes, grain(area), |begin, end| {
        let (out, grad) = shared.get();
        let mut line = vec![T::ZERO; columns.input];
        for plane in begin..end {
            // SAFETY: whole planes; the output's belongs to this item.
            let (out, grad) = unsafe {
                (
                    from_raw_parts_mut(out.add(plane * area), area),
                    from_raw_parts(grad.add(plane * height * width), height * width),
                )
            };
            out.fill(T::ZERO);
            for i in 0..height {
                line.fill(T::ZERO);
                for (j, &g) in grad[i * width..][..width].iter().enumerate() {
                    let (first, weights) = columns.at(j);
                    for (place, &weight) in line[first..].iter_mut().zip(weights) {
                        *place = *place + weight * g;
                    }
                }
                let (first, weights) = rows.at(i);
                for (r, &weight) in weights.iter().enumerate() {
                    let to = &mut out[(first + r) * columns.input..][..columns.input];
                    for (place, &x) in to.iter_mut().zip(&line) {
                        *place = *place + weight * x;
                    }
                }
            }
        }
    });
}

/// Windows over planes; pairs are vertical, horizontal.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Size of a plane.
    pub input: [usize; 2],
    /// Number of windows.
    pub output: [usize; 2],
    /// Size of a window.
    pub kernel: [usize; 2],
    /// Distance between windows.
    pub stride: [usize; 2],
    /// How far the first window begins before the plane.
    pub padding: [usize; 2],
    /// Distance between a window's elements.
    pub dilation: [usize; 2],
}

/// The windows that have a tap inside the plane.
struct Tap {
    /// The first such window.
    first: usize,
    /// The one after the last.
    end: usize,
    /// Where the first one's element is.
    column: usize,
}

impl Windows {
    /// Which windows of a line have this horizontal element.
    fn tap(&self, tap: usize) -> Tap {
        let (offset, pad, stride) = (tap * self.dilation[1], self.padding[1], self.stride[1]);
        let first = pad.saturating_sub(offset).div_ceil(stride);
        let end = (self.input[1] + pad).saturating_sub(offset).div_ceil(stride).min(self.output[1]);
        Tap { first, end, column: (first * stride + offset).saturating_sub(pad) }
    }

    /// The positions of window `i` along a dim that lie inside the plane: the first one and the one after the
    /// last.
    fn span(&self, d: usize, i: usize) -> (usize, usize) {
        let (begin, pad, step) = (i * self.stride[d], self.padding[d], self.dilation[d]);
        let skipped = pad.saturating_sub(begin).div_ceil(step);
        let first = begin + skipped * step - pad;
        let end = (begin + (self.kernel[d] - 1) * step + 1).saturating_sub(pad);
        (first, end.min(self.input[d]))
    }
}

/// The place in its plane of the largest element of each window: the first of equals, the last NaN.
///
/// # Safety
/// `x` holds `planes` planes, `out` as many of the windows' number; they don't overlap.
pub unsafe fn max_pool_indices<T: Copy + PartialOrd + Sync>(
    planes: usize,
    windows: &Windows,
    out: *mut i64,
    x: *const T,
) {
    let area = windows.input[0] * windows.input[1];
    let [height, width] = windows.output;
    let columns: SmallVec<[(usize, usize); 64]> = (0..width).map(|j| windows.span(1, j)).collect();
    let taps: SmallVec<[Tap; 8]> = (0..windows.kernel[1]).map(|tap| windows.tap(tap)).collect();
    let shared = Shared::new((out, x));
    parallel_for(planes, grain(area), |begin, end| {
        let (out, x) = shared.get();
        let mut largest: SmallVec<[T; 128]> = SmallVec::with_capacity(width);
        for plane in begin..end {
            // SAFETY: whole planes; the output's belongs to this item.
            let (out, x) = unsafe {
                (
                    from_raw_parts_mut(out.add(plane * height * width), height * width),
                    from_raw_parts(x.add(plane * area), area),
                )
            };
            for i in 0..height {
                let (top, bottom) = windows.span(0, i);
                let best = &mut out[i * width..][..width];
                // With dilation, a window can lie in the padding altogether.
                if top >= bottom || area == 0 {
                    best.fill(0);
                    continue;
                }
                let start = top * windows.input[1];
                largest.clear();
                for (best, &(left, right)) in best.iter_mut().zip(&columns) {
                    let first = if left < right { start + left } else { 0 };
                    *best = first as i64;
                    largest.push(x[first]);
                }
                // All windows of a line at once, element by element: the next comparison need not wait.
                for row in (top..bottom).step_by(windows.dilation[0]) {
                    let start = row * windows.input[1];
                    for tap in taps.iter().filter(|tap| tap.first < tap.end) {
                        let (best, largest) =
                            (&mut best[tap.first..tap.end], &mut largest[tap.first..tap.end]);
                        let line = &x[start + tap.column..start + windows.input[1]];
                        let first = start + tap.column;
                        // SAFETY: taps of these windows lie inside the line.
                        unsafe {
                            match windows.stride[1] {
                                1 => raise::<T, 1>(best, largest, line, first, 1),
                                2 => raise::<T, 2>(best, largest, line, first, 2),
                                stride => raise::<T, 0>(best, largest, line, first, stride),
                            }
                        }
                    }
                }
            }
        }
    });
}

vectorised! {
    /// Puts what is larger in the place of the largest so far; every `stride`th element of the line belongs to
    /// the next window. `STRIDE` is that distance, if it is known.
    ///
    /// # Safety
    /// As many places in `best` as in `largest`, and the line reaches to the last one's element.
    fn raise [T: Copy + PartialOrd, const STRIDE: usize] [T, STRIDE] (
        best: &mut [i64], largest: &mut [T], line: &[T], first: usize, stride: usize
    ) {
        let stride = if STRIDE > 0 { STRIDE } else { stride };
        for (j, (best, largest)) in best.iter_mut().zip(largest).enumerate() {
            // SAFETY: the caller's promise.
            let x = unsafe { *line.as_ptr().add(j * stride) };
            // Only NaN is not even its own equal. No branch: which wins can't be foretold.
            #[allow(clippy::eq_op)]
            let wins = (x > *largest) | (x != x);
            *best = if wins { (first + j * stride) as i64 } else { *best };
            *largest = if wins { x } else { *largest };
        }
    }
}
