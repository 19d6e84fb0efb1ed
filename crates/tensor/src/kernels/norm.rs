//! Normalisation over groups of elements, forward and backward, in one kernel each: a group is visited two or
//! three times while it stays in cache. Sums run in lanes over short stretches, which are added in f64.

use super::channels;
use super::isa::vectorised;
use super::operand::Shared;
use kiln_runtime::parallel_for;
use kiln_runtime::threads::GRAIN;
use std::ops::{Add, Mul, Range, Sub};
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// Which elements of dense memory are normalised together: group `g` is made of the segments
/// `g · group + s · segment` for each `s`, `length` elements each.
#[derive(Clone, Copy, Debug)]
pub struct Groups {
    /// Number of groups.
    pub count: usize,
    /// Distance between groups.
    pub group: usize,
    /// Segments of a group.
    pub segments: usize,
    /// Distance between a group's segments.
    pub segment: usize,
    /// Elements of a segment.
    pub length: usize,
}

/// What is done with the elements of a group.
#[derive(Clone, Copy, Debug)]
pub struct Normalisation {
    pub groups: Groups,
    /// Whether the mean is taken off.
    pub centred: bool,
    /// What is added to the mean square.
    pub eps: f64,
}

/// A float type, with what the loops need.
pub trait Real:
    Copy + Send + Sync + 'static + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self>
{
    const ZERO: Self;
    /// A double, rounded.
    fn from_f64(x: f64) -> Self;
    /// As a double.
    fn to_f64(self) -> f64;
}

macro_rules! real {
    ($($ty:ty)*) => {
        $(impl Real for $ty {
            const ZERO: $ty = 0.0;
            #[inline(always)]
            fn from_f64(x: f64) -> $ty {
                x as $ty
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
        })*
    };
}
real!(f32 f64);

/// Scale or shift of the result.
#[derive(Clone, Copy)]
pub enum Affine<T> {
    /// There is none.
    None,
    /// One number for each element of a segment.
    Element(*const T),
    /// One number for each group.
    Group(*const T),
    /// One number for each channel: `plane` elements of a group belong to a channel, the next as many to the next one,
    /// and after `groups` groups the first channel is there again.
    Channel { numbers: *const T, groups: usize, plane: usize },
}

impl Groups {
    fn numel(&self) -> usize {
        self.segments * self.length
    }

    fn segment_at(&self, group: usize, segment: usize) -> usize {
        group * self.group + segment * self.segment
    }

    fn each(&self, body: impl Fn(Range<usize>) + Sync) {
        let grain = (GRAIN / 2).div_ceil(self.numel().max(1));
        parallel_for(self.count, grain, |begin, end| body(begin..end));
    }
}

/// Sums side by side, and elements that they take before they are added in f64: fixed, since no bit depends on the
/// machine.
const LANES: usize = 16;
const STRETCH: usize = 1024;

/// Σ of a term over equally long slices.
#[inline(always)]
fn total<T: Real, const N: usize>(slices: [&[T]; N], term: impl Fn([T; N]) -> T) -> f64 {
    let length = slices[0].len();
    let mut total = 0.0;
    let mut from = 0;
    while from < length {
        let end = (from + STRETCH).min(length);
        let part = slices.map(|slice| &slice[from..end]);
        let mut lanes = [T::ZERO; LANES];
        let whole = (end - from) / LANES * LANES;
        for at in (0..whole).step_by(LANES) {
            let part = part.map(|slice| &slice[at..at + LANES]);
            for (l, lane) in lanes.iter_mut().enumerate() {
                *lane = *lane + term(part.map(|slice| slice[l]));
            }
        }
        for at in whole..end - from {
            lanes[at % LANES] = lanes[at % LANES] + term(part.map(|slice| slice[at]));
        }
        total += lanes.iter().map(|&lane| lane.to_f64()).sum::<f64>();
        from = end;
    }
    total
}

vectorised! {
    /// # Safety
    /// None.
    fn sum [T: Real] [T] (x: &[T]) -> f64 {
        total([x], |[x]| x)
    }
}

vectorised! {
    /// # Safety
    /// None.
    fn squares [T: Real] [T] (x: &[T], mean: T) -> f64 {
        total([x], |[x]| (x - mean) * (x - mean))
    }
}

vectorised! {
    /// # Safety
    /// Equal lengths.
    fn products [T: Real] [T] (g: &[T], x: &[T], mean: T) -> f64 {
        total([g, x], |[g, x]| g * (x - mean))
    }
}

vectorised! {
    /// # Safety
    /// Equal lengths.
    fn apply [T: Real] [T] (out: &mut [T], x: &[T], mean: T, scale: T) {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = (x - mean) * scale;
        }
    }
}

vectorised! {
    /// # Safety
    /// Equal lengths.
    fn apply_scaled [T: Real] [T] (out: &mut [T], x: &[T], mean: T, scale: T, weight: &[T]) {
        for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
            *out = (x - mean) * scale * weight;
        }
    }
}

vectorised! {
    /// # Safety
    /// Equal lengths.
    fn apply_affine [T: Real] [T] (out: &mut [T], x: &[T], mean: T, scale: T, weight: &[T], bias: &[T]) {
        for (((out, &x), &weight), &bias) in out.iter_mut().zip(x).zip(weight).zip(bias) {
            *out = (x - mean) * scale * weight + bias;
        }
    }
}

vectorised! {
    /// # Safety
    /// Equal lengths.
    fn apply_numbers [T: Real] [T] (out: &mut [T], x: &[T], mean: T, scale: T, weight: T, bias: Option<T>) {
        match bias {
            Some(bias) => {
                for (out, &x) in out.iter_mut().zip(x) {
                    *out = (x - mean) * scale * weight + bias;
                }
            }
            None => {
                for (out, &x) in out.iter_mut().zip(x) {
                    *out = (x - mean) * scale * weight;
                }
            }
        }
    }
}

vectorised! {
    /// # Safety
    /// Equal lengths.
    fn apply_backward [T: Real] [T] (out: &mut [T], g: &[T], x: &[T], mean: T, scale: T, shift: T, slope: T) {
        for ((out, &g), &x) in out.iter_mut().zip(g).zip(x) {
            *out = (g - shift - (x - mean) * scale * slope) * scale;
        }
    }
}

/// Mean and mean square deviation of a group.
///
/// # Safety
/// `x` holds all elements of the groups.
unsafe fn group_moments<T: Real>(groups: &Groups, centred: bool, x: *const T, group: usize) -> (T, f64) {
    // SAFETY: segments of the group.
    let segment = |s: usize| unsafe { from_raw_parts(x.add(groups.segment_at(group, s)), groups.length) };
    let count = groups.numel() as f64;
    let mean = if centred {
        // SAFETY: nothing is asked.
        T::from_f64((0..groups.segments).map(|s| unsafe { sum(segment(s)) }).sum::<f64>() / count)
    } else {
        T::ZERO
    };
    // SAFETY: nothing is asked.
    let square = (0..groups.segments).map(|s| unsafe { squares(segment(s), mean) }).sum::<f64>();
    (mean, square / count)
}

/// `out = (x − mean) / √(mean square + eps) · weight + bias`, group by group; a bias needs a weight.
///
/// # Safety
/// `out` and `x` hold all elements of the groups and don't overlap; weight and bias as many as their kind says.
pub unsafe fn normalise<T: Real>(
    what: &Normalisation,
    out: *mut T,
    x: *const T,
    weight: Affine<T>,
    bias: Affine<T>,
) {
    let Normalisation { groups, centred, eps } = *what;
    if centred && channels::are_narrow(&groups) {
        // SAFETY: the caller's promise is passed on.
        return unsafe { channels::normalise(what, out, x, weight, bias) };
    }
    let shared = Shared::new((out, x, weight, bias));
    groups.each(|range| {
        let (out, x, weight, bias) = shared.get();
        for group in range {
            // SAFETY: the group's own elements; whole rows of weight and bias, or this group's number.
            unsafe {
                let (mean, variance) = group_moments(&groups, centred, x, group);
                let scale = T::from_f64(1.0 / (variance + eps).sqrt());
                for s in 0..groups.segments {
                    let at = groups.segment_at(group, s);
                    let out = from_raw_parts_mut(out.add(at), groups.length);
                    let x = from_raw_parts(x.add(at), groups.length);
                    match (weight, bias) {
                        (Affine::Element(weight), Affine::Element(bias)) => {
                            let weight = from_raw_parts(weight, groups.length);
                            apply_affine(out, x, mean, scale, weight, from_raw_parts(bias, groups.length));
                        }
                        (Affine::Element(weight), _) => {
                            apply_scaled(out, x, mean, scale, from_raw_parts(weight, groups.length));
                        }
                        (Affine::Group(weight), bias) => {
                            let bias = match bias {
                                Affine::Group(bias) => Some(*bias.add(group)),
                                _ => None,
                            };
                            apply_numbers(out, x, mean, scale, *weight.add(group), bias);
                        }
                        (Affine::Channel { numbers: weight, groups: count, plane }, bias) => {
                            let first = group % count * (groups.length / plane);
                            let planes = out.chunks_mut(plane).zip(x.chunks(plane));
                            for (channel, (out, x)) in (first..).zip(planes) {
                                let bias = match bias {
                                    Affine::Channel { numbers: bias, .. } => Some(*bias.add(channel)),
                                    _ => None,
                                };
                                apply_numbers(out, x, mean, scale, *weight.add(channel), bias);
                            }
                        }
                        (Affine::None, _) => apply(out, x, mean, scale),
                    }
                }
            }
        }
    });
}

/// The gradient of `x` for the gradient `grad` of the normalised elements.
///
/// # Safety
/// All hold the elements of the groups; `out` overlaps nothing.
pub unsafe fn normalise_backward<T: Real>(what: &Normalisation, out: *mut T, grad: *const T, x: *const T) {
    let Normalisation { groups, centred, eps } = *what;
    if centred && channels::are_narrow(&groups) {
        // SAFETY: the caller's promise is passed on.
        return unsafe { channels::normalise_backward(what, out, grad, x) };
    }
    let shared = Shared::new((out, grad, x));
    groups.each(|range| {
        let (out, grad, x) = shared.get();
        let count = groups.numel() as f64;
        for group in range {
            // SAFETY: the group's own elements.
            unsafe {
                let segment = |from: *const T, s: usize| {
                    from_raw_parts(from.add(groups.segment_at(group, s)), groups.length)
                };
                let (mean, variance) = group_moments(&groups, centred, x, group);
                let scale = 1.0 / (variance + eps).sqrt();
                let (mut shift, mut slope) = (0.0, 0.0);
                for s in 0..groups.segments {
                    if centred {
                        shift += sum(segment(grad, s));
                    }
                    slope += products(segment(grad, s), segment(x, s), mean);
                }
                let (shift, slope) = (T::from_f64(shift / count), T::from_f64(slope * scale / count));
                for s in 0..groups.segments {
                    let out = from_raw_parts_mut(out.add(groups.segment_at(group, s)), groups.length);
                    let scale = T::from_f64(scale);
                    apply_backward(out, segment(grad, s), segment(x, s), mean, scale, shift, slope);
                }
            }
        }
    });
}

/// The mean of each group, then the mean square deviation of each group.
///
/// # Safety
/// `x` holds the elements of the groups, `out` has two for each group; they don't overlap.
pub unsafe fn moments<T: Real>(groups: &Groups, out: *mut T, x: *const T) {
    if channels::are_narrow(groups) {
        // SAFETY: the caller's promise is passed on.
        return unsafe { channels::moments(groups, out, x) };
    }
    let shared = Shared::new((out, x));
    let groups = *groups;
    groups.each(|range| {
        let (out, x) = shared.get();
        for group in range {
            // SAFETY: the group's own elements and results.
            unsafe {
                let (mean, variance) = group_moments(&groups, true, x, group);
                *out.add(group) = mean;
                *out.add(groups.count + group) = T::from_f64(variance);
            }
        }
    });
}
