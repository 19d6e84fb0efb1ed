//! Pooling and resizing of dense planes: weighted sums of neighbours along both dims, the same the other way
//! for gradients, and the places of windows' maxima.

use smallvec::SmallVec;

use super::isa::vectorised;
use super::norm::Real;
use super::operand::Shared;
use kiln_ir::table::resample::Axis;
use kiln_runtime::parallel_for;
use kiln_runtime::threads::{self, GRAIN};
use std::ops::Range;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// Lines shorter than this have plain loops: the choice of better ones takes longer.
const NARROW: usize = 16;

/// What each element along a dim is a weighted sum of, with the weights in the elements' type.
struct Taps<T> {
    /// For each element: its first neighbour, and where its weights end.
    spans: Vec<(usize, usize)>,
    weights: Vec<T>,
    /// The longest run of elements with equally many neighbours, and how many these are: it has a loop of its own.
    even: Range<usize>,
    count: usize,
    /// The weights of that run, neighbour by neighbour.
    aligned: Vec<T>,
}

impl<T: Real> Taps<T> {
    fn new(axis: &Axis) -> Taps<T> {
        Taps::of(axis.spans.clone(), axis.weights.iter().map(|&w| T::from_f64(w)).collect())
    }

    /// What each element of the input gives to: the elements of the result that it is a neighbour of, which are one
    /// behind the other, since windows don't overtake each other.
    fn turned(axis: &Axis) -> Taps<T> {
        let mut begin = 0;
        let spans = axis.spans.iter().map(|&(first, end)| {
            let span = first..first + end - std::mem::replace(&mut begin, end);
            (span, begin)
        });
        let spans: Vec<(Range<usize>, usize)> = spans.collect();
        let mut weights = Vec::with_capacity(axis.weights.len());
        let mut turned = Vec::with_capacity(axis.input);
        let mut first = 0;
        for place in 0..axis.input {
            while first < spans.len() && spans[first].0.end <= place {
                first += 1;
            }
            let those = spans[first..].iter().take_while(|(span, _)| span.contains(&place));
            weights.extend(those.map(|(span, end)| T::from_f64(axis.weights[end - (span.end - place)])));
            turned.push((first, weights.len()));
        }
        debug_assert_eq!(weights.len(), axis.weights.len());
        Taps::of(turned, weights)
    }

    fn of(spans: Vec<(usize, usize)>, weights: Vec<T>) -> Taps<T> {
        let mut taps = Taps { spans, weights, even: 0..0, count: 0, aligned: Vec::new() };
        let mut begin = 0;
        for i in 0..taps.len() {
            let count = taps.range(i).len();
            if count != taps.range(begin).len() {
                begin = i;
            }
            if i + 1 - begin > taps.even.len() {
                (taps.even, taps.count) = (begin..i + 1, count);
            }
        }
        let even = taps.even.clone().map(|i| taps.range(i).start);
        let starts: Vec<usize> = even.collect();
        let weight = |tap: usize| starts.iter().map(move |start| start + tap);
        taps.aligned = (0..taps.count).flat_map(weight).map(|at| taps.weights[at]).collect();
        taps
    }

    fn len(&self) -> usize {
        self.spans.len()
    }

    fn range(&self, i: usize) -> Range<usize> {
        let begin = if i == 0 { 0 } else { self.spans[i - 1].1 };
        begin..self.spans[i].1
    }

    /// The first neighbour of an element, and the weights.
    fn at(&self, i: usize) -> (usize, &[T]) {
        (self.spans[i].0, &self.weights[self.range(i)])
    }

    /// The neighbours of some elements.
    fn reach(&self, elements: Range<usize>) -> Range<usize> {
        let last = elements.end - 1;
        self.spans[elements.start].0..self.spans[last].0 + self.range(last).len()
    }

    /// `out` = the sums of a line.
    fn sums(&self, out: &mut [T], line: &[T]) {
        let single = |out: &mut [T], elements: Range<usize>| {
            for (i, out) in elements.zip(out) {
                let (first, weights) = self.at(i);
                let terms = weights.iter().zip(&line[first..]);
                *out = terms.fold(T::ZERO, |sum, (&weight, &x)| sum + weight * x);
            }
        };
        let Range { start, end } = self.even;
        let (before, rest) = out.split_at_mut(start);
        let (even, behind) = rest.split_at_mut(end - start);
        single(before, 0..start);
        single(behind, end..self.len());
        let spans = &self.spans[start..end];
        debug_assert!(spans.iter().all(|(first, _)| first + self.count <= line.len() || self.count == 0));
        // SAFETY: the neighbours of all elements lie in the line, as an axis says, and each has `count` weights.
        unsafe {
            match self.count {
                _ if even.len() < NARROW => single(even, start..end),
                0 => even.fill(T::ZERO),
                1 => even_sums::<T, 1>(even, line, spans, &self.aligned),
                2 => even_sums::<T, 2>(even, line, spans, &self.aligned),
                3 => even_sums::<T, 3>(even, line, spans, &self.aligned),
                4 => even_sums::<T, 4>(even, line, spans, &self.aligned),
                _ => single(even, start..end),
            }
        }
    }
}

vectorised! {
    /// # Safety
    /// The `K` neighbours from each span's first on lie in the line; there are `K` weights for each element.
    fn even_sums [T: Real, const K: usize] [T, K] (
        out: &mut [T], line: &[T], spans: &[(usize, usize)], weights: &[T]
    ) {
        let n = out.len();
        for (i, (out, &(first, _))) in out.iter_mut().zip(spans).enumerate() {
            let mut sum = T::ZERO;
            for k in 0..K {
                // SAFETY: the caller's promise.
                unsafe { sum = sum + *weights.get_unchecked(k * n + i) * *line.get_unchecked(first + k) };
            }
            *out = sum;
        }
    }
}

/// `line` = the weighted sum of as many rows as there are weights, one behind the other.
fn sum_rows<T: Real>(line: &mut [T], rows: &[T], weights: &[T]) {
    let width = line.len();
    if width >= NARROW {
        // SAFETY: nothing is asked.
        return unsafe { sum_wide_rows(line, rows, weights) };
    }
    line.fill(T::ZERO);
    for (r, &weight) in weights.iter().enumerate() {
        for (sum, &x) in line.iter_mut().zip(&rows[r * width..]) {
            *sum = *sum + weight * x;
        }
    }
}

vectorised! {
    /// [`sum_rows`] of wide rows.
    ///
    /// # Safety
    /// None.
    fn sum_wide_rows [T: Real] [T] (line: &mut [T], rows: &[T], weights: &[T]) {
        let width = line.len();
        let row = |r: usize| &rows[r * width..][..width];
        match *weights {
            [a] => {
                for (line, &x) in line.iter_mut().zip(row(0)) {
                    *line = T::ZERO + a * x;
                }
            }
            [a, b] => {
                for ((line, &x), &y) in line.iter_mut().zip(row(0)).zip(row(1)) {
                    *line = T::ZERO + a * x + b * y;
                }
            }
            [a, b, c] => {
                for (((line, &x), &y), &z) in line.iter_mut().zip(row(0)).zip(row(1)).zip(row(2)) {
                    *line = T::ZERO + a * x + b * y + c * z;
                }
            }
            _ => {
                line.fill(T::ZERO);
                for (r, &weight) in weights.iter().enumerate() {
                    for (sum, &x) in line.iter_mut().zip(row(r)) {
                        *sum = *sum + weight * x;
                    }
                }
            }
        }
    }
}

/// Adds a weighted line to a row, or to zeros if it `begins` the row.
fn add_line<T: Real>(row: &mut [T], line: &[T], weight: T, begins: bool) {
    if row.len() >= NARROW {
        if begins {
            row.fill(T::ZERO);
        }
        // SAFETY: nothing is asked.
        return unsafe { add_wide_line(row, line, weight) };
    }
    for (row, &x) in row.iter_mut().zip(line) {
        *row = if begins { T::ZERO } else { *row } + weight * x;
    }
}

vectorised! {
    /// # Safety
    /// None.
    fn add_wide_line [T: Real] [T] (row: &mut [T], line: &[T], weight: T) {
        for (row, &x) in row.iter_mut().zip(line) {
            *row = *row + weight * x;
        }
    }
}

fn grain(area: usize) -> usize {
    (GRAIN / 2).div_ceil(area.max(1))
}

/// Runs a body on every plane's rows, in blocks of rows where planes are few: plane, rows, and a line of so many elements
/// to work with.
fn in_blocks<T: Real>(
    planes: usize,
    [rows, row]: [usize; 2],
    line: usize,
    body: impl Fn(usize, Range<usize>, &mut [T]) + Sync,
) {
    let blocks = (4 * threads::count()).div_ceil(planes.max(1)).min(rows.div_ceil(8)).max(1);
    let height = rows.div_ceil(blocks);
    parallel_for(planes * blocks, grain(height * row), |begin, end| {
        let mut line = vec![T::ZERO; line];
        for item in begin..end {
            let first = item % blocks * height;
            let rows = first.min(rows)..(first + height).min(rows);
            if !rows.is_empty() {
                body(item / blocks, rows, &mut line);
            }
        }
    });
}

/// `out` = weighted sums of neighbours in `x`, plane by plane.
///
/// # Safety
/// `out` and `x` hold `planes` planes of the axes' output and input sizes; they don't overlap.
pub unsafe fn resample<T: Real>(planes: usize, axes: &[Axis; 2], out: *mut T, x: *const T) {
    let [rows, columns] = axes.each_ref().map(Taps::new);
    // SAFETY: the caller's contract.
    unsafe { sums(planes, [&rows, &columns], axes.each_ref().map(|axis| axis.input), out, x) }
}

/// `out` = what each element of `grad` gives back to its neighbours, plane by plane: rows first, so that only as many
/// rows as there are in the output are summed along columns.
///
/// # Safety
/// `out` and `grad` hold `planes` planes of the axes' input and output sizes; they don't overlap.
pub unsafe fn resize_backward<T: Real>(planes: usize, axes: &[Axis; 2], out: *mut T, grad: *const T) {
    let [rows, columns] = axes.each_ref().map(Taps::turned);
    // SAFETY: the caller's contract.
    unsafe { sums(planes, [&rows, &columns], axes.each_ref().map(|axis| axis.spans.len()), out, grad) }
}

/// Weighted sums along rows, then along columns, of planes of this input size.
///
/// # Safety
/// `out` and `x` hold `planes` planes; they don't overlap.
unsafe fn sums<T: Real>(planes: usize, taps: [&Taps<T>; 2], input: [usize; 2], out: *mut T, x: *const T) {
    let ([rows, columns], [tall, wide]) = (taps, input);
    let (height, width) = (rows.len(), columns.len());
    let area = tall * wide;
    let shared = Shared::new((out, x));
    in_blocks(planes, [height, width], wide, |plane, block, line: &mut [T]| {
        let (out, x) = shared.get();
        // SAFETY: a whole plane, and rows of the output that belong to this item.
        let (out, x) = unsafe {
            let first = plane * height + block.start;
            (
                from_raw_parts_mut(out.add(first * width), block.len() * width),
                from_raw_parts(x.add(plane * area), area),
            )
        };
        for (r, i) in block.clone().enumerate() {
            let (first, weights) = rows.at(i);
            // An element of a row is the same as one of the row before, if it is the same of the same neighbours.
            if r > 0 && is_same(rows.at(i - 1), (first, weights)) {
                out.copy_within((r - 1) * width..r * width, r * width);
                continue;
            }
            sum_rows(line, &x[first * wide..], weights);
            columns.sums(&mut out[r * width..][..width], line);
        }
    });
}

/// Whether two elements have the same neighbours and weights.
fn is_same<T: Real>(a: (usize, &[T]), b: (usize, &[T])) -> bool {
    a.0 == b.0 && a.1.iter().map(|w| w.to_f64()).eq(b.1.iter().map(|w| w.to_f64()))
}

/// [`resize_backward`], line by line of `grad`, in the order in which compiled code sums the gradients of averages.
///
/// # Safety
/// That of [`resize_backward`].
pub unsafe fn resample_backward<T: Real>(planes: usize, axes: &[Axis; 2], out: *mut T, grad: *const T) {
    let (rows, turned) = (Taps::<T>::new(&axes[0]), Taps::<T>::turned(&axes[0]));
    let (columns, across) = (Taps::<T>::new(&axes[1]), Taps::<T>::turned(&axes[1]));
    let (height, width) = (rows.len(), columns.len());
    let [tall, wide] = [axes[0].input, axes[1].input];
    // Few columns, and those of ever other numbers of neighbours, are quicker from the other side.
    let gathers = wide >= NARROW && across.even.len() >= wide / 2;
    let shared = Shared::new((out, grad));
    in_blocks(planes, [tall, wide], wide, |plane, block, line: &mut [T]| {
        let (out, grad) = shared.get();
        // SAFETY: a whole plane, and rows of the output that belong to this item.
        let (out, grad) = unsafe {
            let first = plane * tall + block.start;
            (
                from_raw_parts_mut(out.add(first * wide), block.len() * wide),
                from_raw_parts(grad.add(plane * height * width), height * width),
            )
        };
        for (row, i) in out.chunks_exact_mut(wide).zip(block.clone()) {
            if turned.range(i).is_empty() {
                row.fill(T::ZERO);
            }
        }
        for i in turned.reach(block.clone()) {
            let grad = &grad[i * width..][..width];
            if gathers {
                across.sums(line, grad);
            } else {
                line.fill(T::ZERO);
                for (j, &g) in grad.iter().enumerate() {
                    let (first, weights) = columns.at(j);
                    for (place, &weight) in line[first..].iter_mut().zip(weights) {
                        *place = *place + weight * g;
                    }
                }
            }
            let (first, weights) = rows.at(i);
            for (place, &weight) in (first..).zip(weights) {
                if block.contains(&place) {
                    let row = &mut out[(place - block.start) * wide..][..wide];
                    add_line(row, line, weight, turned.spans[place].0 == i);
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
