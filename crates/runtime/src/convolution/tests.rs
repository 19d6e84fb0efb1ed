//! Convolutions and their gradients against plain loops.

use parking_lot::Mutex;

use super::*;

fn values(seed: u64, count: usize) -> Vec<f64> {
    (0..count as u64).map(|i| f64::from(crate::random::philox(i, seed)[0] % 15) - 7.0).collect()
}

/// Every tap of every position: indices of out, x and weight.
fn each(g: &Geometry, mut body: impl FnMut(usize, usize, usize)) {
    let (channels, filters) = (g.channels / g.groups, g.filters / g.groups);
    for n in 0..g.batch {
        for o in 0..g.filters {
            for p in 0..g.output[0] * g.output[1] {
                for c in 0..channels {
                    for t in 0..g.taps() {
                        let at = |d: usize, p: usize, t: usize| {
                            (p * g.stride[d] + t * g.dilation[d]).checked_sub(g.padding[d])
                        };
                        let (row, column) = (
                            at(0, p / g.output[1], t / g.kernel[1]),
                            at(1, p % g.output[1], t % g.kernel[1]),
                        );
                        let (Some(row), Some(column)) = (row, column) else { continue };
                        if row >= g.input[0] || column >= g.input[1] {
                            continue;
                        }
                        let channel = n * g.channels + o / filters * channels + c;
                        body(
                            (n * g.filters + o) * g.output[0] * g.output[1] + p,
                            (channel * g.input[0] + row) * g.input[1] + column,
                            (o * channels + c) * g.taps() + t,
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn more_zeros_than_memory_are_refused() {
    let many = 1usize << 31;
    let g = Geometry {
        batch: 1,
        channels: 1,
        filters: 1,
        input: [1, 1],
        output: [3, 3],
        kernel: [1, 1],
        stride: [many, many],
        padding: [many, many],
        dilation: [1, 1],
        groups: 1,
    };
    let (mut out, x, weight) = ([0.0f32; 9], [1.0f32], [1.0f32]);
    // SAFETY: arrays of the sizes named.
    let done = unsafe { forward(&g, out.as_mut_ptr(), x.as_ptr(), weight.as_ptr()) };
    assert!(matches!(done, Err(AllocError::TooLarge { .. })));
}

#[test]
fn what_a_tap_does_not_meet_may_be_infinite() {
    // The last column of the first plane, next to which vectors may end.
    for (channels, width) in (1..40).map(|width| (2, width)).chain((1..17).map(|width| (11, width))) {
        let g = Geometry {
            batch: 1,
            channels,
            filters: channels,
            input: [5, width],
            output: [5, width],
            kernel: [3, 3],
            stride: [1, 1],
            padding: [1, 1],
            dilation: [1, 1],
            groups: channels,
        };
        let mut x = vec![1.0f32; 5 * channels * width];
        x[width - 1..5 * width].iter_mut().step_by(width).for_each(|x| *x = f32::INFINITY);
        let (weight, grad) = (vec![1.0f32; 9 * channels], vec![1.0f32; x.len()]);
        let (mut out, mut sums) = (vec![f32::NAN; x.len()], vec![f32::NAN; 9 * channels]);
        // SAFETY: dense vectors of the sizes the geometry says.
        unsafe {
            forward(&g, out.as_mut_ptr(), x.as_ptr(), weight.as_ptr()).unwrap();
            weight_gradient(&g, sums.as_mut_ptr(), x.as_ptr(), grad.as_ptr()).unwrap();
        }
        for (i, out) in out.iter().enumerate() {
            let is_near = i < 5 * width && i % width + 2 >= width;
            assert!(if is_near { *out == f32::INFINITY } else { out.is_finite() }, "{i} of {width}");
        }
        // No result meets the last column with a tap of the first.
        for (tap, sum) in sums.iter().enumerate() {
            let is_near = tap < 9 && tap % 3 > 0 && (width > 1 || tap % 3 == 1);
            assert_eq!(sum.is_finite(), !is_near, "tap {tap} of width {width}");
        }
    }
}

/// All numbers but results are exact in halves, and results are rounded once.
fn halves(
    g: &Geometry,
    half: crate::halves::Half,
    [x, weight, grad, bias]: [&[f32]; 4],
    want: &(Vec<f32>, Vec<f32>, Vec<f32>),
) {
    use half::{bf16, f16};
    let round = |x: &f32| match half {
        crate::halves::Half::F16 => f16::from_f32(*x).to_bits(),
        crate::halves::Half::Bf16 => bf16::from_f32(*x).to_bits(),
    };
    let narrow = |list: &[f32]| -> Vec<u16> { list.iter().map(round).collect() };
    let area = (g.output[0] * g.output[1]).max(1);
    let biased: Vec<f32> =
        want.0.iter().enumerate().map(|(i, sum)| sum + bias[i / area % g.filters]).collect();
    let [x, weight, grad, bias] = [x, weight, grad, bias].map(narrow);
    let of = |operands: Operands<u16>, want: &[f32]| {
        let mut out = vec![0x7fffu16; want.len()];
        // SAFETY: dense vectors of the sizes the geometry says.
        unsafe { of_halves(g, half, out.as_mut_ptr(), operands).unwrap() };
        assert!(out == narrow(want), "{half:?} {operands:?} {g:?}");
    };
    let [x, weight, grad, bias] = [x.as_ptr(), weight.as_ptr(), grad.as_ptr(), bias.as_ptr()];
    of(Operands::Forward(x, weight, None), &want.0);
    of(Operands::Forward(x, weight, Some(bias)), &biased);
    of(Operands::InputGradient(grad, weight), &want.1);
    of(Operands::WeightGradient(x, grad), &want.2);
}

#[test]
fn all_three_against_plain_loops() {
    let cases: &[[usize; 13]] = &[
        // batch, channels, filters, groups, input, kernel, stride, padding, dilation (vertical) + width
        [2, 3, 5, 1, 9, 3, 1, 1, 1, 7, 3, 1, 1],
        [1, 4, 6, 2, 8, 3, 2, 1, 1, 9, 2, 3, 0],
        [2, 2, 3, 1, 11, 3, 1, 2, 2, 12, 3, 2, 2],
        [1, 1, 1, 1, 5, 1, 1, 0, 1, 5, 1, 1, 0],
        [3, 6, 6, 6, 7, 3, 2, 1, 1, 6, 3, 1, 1],
        [2, 4, 8, 4, 5, 3, 3, 2, 2, 9, 2, 2, 1],
        [1, 3, 40, 1, 1, 1, 1, 0, 1, 64, 5, 2, 2],
        [2, 33, 17, 1, 6, 2, 3, 0, 1, 6, 2, 3, 0],
        [1, 8, 16, 4, 6, 3, 1, 1, 1, 6, 3, 1, 1],
        [2, 6, 6, 6, 14, 7, 1, 3, 1, 14, 7, 1, 3],
        [1, 4, 12, 4, 9, 5, 2, 2, 1, 33, 5, 2, 2],
        [1, 2, 2, 2, 25, 3, 2, 3, 3, 37, 3, 3, 1],
        [1, 6, 4, 2, 13, 9, 1, 8, 2, 23, 10, 2, 9],
        [1, 20, 20, 2, 7, 3, 1, 1, 1, 7, 3, 2, 1],
        // More than a block, in either dim.
        [1, 2, 2, 2, 150, 3, 1, 1, 1, 130, 3, 1, 1],
        [1, 2, 2, 2, 150, 3, 2, 2, 2, 130, 3, 2, 1],
        [1, 2, 2, 2, 1, 1, 1, 0, 1, 5000, 3, 2, 1],
        [1, 2, 2, 2, 3, 3, 1, 1, 1, 2100, 4, 1, 2],
        // Small planes of many channels, not all of which fill a vector.
        [2, 19, 19, 19, 7, 3, 1, 1, 1, 7, 3, 1, 1],
        [3, 33, 33, 33, 7, 3, 2, 1, 1, 6, 3, 2, 1],
        [1, 8, 8, 8, 14, 5, 2, 2, 1, 13, 5, 3, 0],
        [2, 17, 17, 17, 9, 7, 1, 3, 1, 5, 7, 1, 3],
        [2, 16, 16, 16, 11, 3, 2, 4, 2, 8, 2, 1, 5],
        [5, 16, 16, 16, 8, 2, 3, 0, 1, 9, 2, 4, 0],
        [33, 9, 9, 9, 1, 1, 1, 0, 1, 12, 3, 1, 1],
        [1, 20, 20, 20, 4, 3, 1, 9, 1, 3, 1, 1, 5],
        [0, 16, 16, 16, 7, 3, 1, 1, 1, 7, 3, 1, 1],
        [2, 16, 16, 16, 14, 7, 1, 3, 1, 14, 7, 1, 3],
    ];
    for case in cases {
        let [batch, channels, filters, groups, h, kh, sh, ph, dilation, w, kw, sw, pw] = *case;
        let size = |i: usize, k: usize, s: usize, p: usize| (i + 2 * p - dilation * (k - 1) - 1) / s + 1;
        let g = Geometry {
            batch,
            channels,
            filters,
            input: [h, w],
            output: [size(h, kh, sh, ph), size(w, kw, sw, pw)],
            kernel: [kh, kw],
            stride: [sh, sw],
            padding: [ph, pw],
            dilation: [dilation; 2],
            groups,
        };
        let x = values(1, batch * channels * h * w);
        let weight = values(2, filters * channels / groups * g.taps());
        let grad = values(3, batch * filters * g.output[0] * g.output[1]);
        let mut want = (vec![0.0; grad.len()], vec![0.0; x.len()], vec![0.0; weight.len()]);
        each(&g, |o, i, w| {
            want.0[o] += x[i] * weight[w];
            want.1[i] += grad[o] * weight[w];
            want.2[w] += grad[o] * x[i];
        });
        let nan = |n: usize| vec![f64::NAN; n];
        let mut got = (nan(grad.len()), nan(x.len()), nan(weight.len()));
        let (area, finished) = (g.output[0] * g.output[1], Mutex::new(vec![0; grad.len()]));
        let count = |part: Finished| {
            for plane in part.planes {
                let places = plane * area + part.pixels.start..plane * area + part.pixels.end;
                finished.lock()[places].iter_mut().for_each(|times| *times += 1);
            }
        };
        // SAFETY: dense vectors of the sizes the geometry says.
        unsafe {
            forward_with(&g, got.0.as_mut_ptr(), x.as_ptr(), weight.as_ptr(), None, Some(&count)).unwrap();
            input_gradient(&g, got.1.as_mut_ptr(), grad.as_ptr(), weight.as_ptr()).unwrap();
            weight_gradient(&g, got.2.as_mut_ptr(), x.as_ptr(), grad.as_ptr()).unwrap();
        }
        let bias = values(4, filters);
        let mut biased = nan(grad.len());
        // SAFETY: as above.
        unsafe {
            let at = biased.as_mut_ptr();
            forward_biased(&g, at, x.as_ptr(), weight.as_ptr(), bias.as_ptr()).unwrap();
        }
        let sums = want.0.iter().enumerate().map(|(i, sum)| sum + bias[i / area.max(1) % filters]);
        assert!(biased.into_iter().eq(sums), "with a bias {g:?}");
        assert!(finished.into_inner().iter().all(|times| *times == 1), "{g:?}: each is finished once");
        // All numbers are small integers: f32 is as exact.
        let narrow = |list: &[f64]| -> Vec<f32> { list.iter().map(|&x| x as f32).collect() };
        let (x, weight, grad) = (narrow(&x), narrow(&weight), narrow(&grad));
        let unknown = |count: usize| vec![f32::NAN; count];
        let mut single = (unknown(grad.len()), unknown(x.len()), unknown(weight.len()));
        // SAFETY: as above.
        unsafe {
            forward(&g, single.0.as_mut_ptr(), x.as_ptr(), weight.as_ptr()).unwrap();
            input_gradient(&g, single.1.as_mut_ptr(), grad.as_ptr(), weight.as_ptr()).unwrap();
            weight_gradient(&g, single.2.as_mut_ptr(), x.as_ptr(), grad.as_ptr()).unwrap();
        }
        let all = (narrow(&want.0), narrow(&want.1), narrow(&want.2));
        assert!(single == all, "f32 {g:?}");
        if is_for_halves(&g) {
            for half in [crate::halves::Half::F16, crate::halves::Half::Bf16] {
                halves(&g, half, [&x, &weight, &grad, &narrow(&bias)], &all);
            }
        }
        assert_eq!(got.0, want.0, "forward {g:?}");
        assert_eq!(got.1, want.1, "input {g:?}");
        assert_eq!(got.2, want.2, "weight {g:?}");
    }
}
