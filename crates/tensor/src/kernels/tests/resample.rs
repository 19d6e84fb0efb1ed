//! Resizing and pooling against sums over all pairs of elements.

use kiln_ir::table::resample::{Axis, axes};
use kiln_ir::{Op, Scalar, Sizes};

use crate::kernels::resample::{resample, resample_backward, resize_backward};

/// The weight of each pair of an element of the result and one of the input.
fn weights(axis: &Axis) -> Vec<Vec<f64>> {
    let mut begin = 0;
    let mut line = |&(first, end): &(usize, usize)| {
        let mut line = vec![0.0; axis.input];
        line[first..first + end - begin].copy_from_slice(&axis.weights[begin..end]);
        begin = end;
        line
    };
    axis.spans.iter().map(&mut line).collect()
}

#[test]
fn every_neighbour_counts_with_its_weight() {
    let free = [Scalar::Float(0.0); 2];
    let nearest = |output: [usize; 2]| Op::UpsampleNearest2d {
        output: Sizes::from(output),
        height_ratio: free[0],
        width_ratio: free[1],
    };
    let bilinear = |output: [usize; 2], align_corners| Op::UpsampleBilinear2d {
        output: Sizes::from(output),
        align_corners,
        height_ratio: free[0],
        width_ratio: free[1],
    };
    let average = |kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2]| Op::AvgPool2d {
        kernel: kernel.into(),
        stride: stride.into(),
        padding: padding.into(),
        ceil_mode: true,
        count_include_pad: false,
    };
    let mut cases: Vec<(Op, [usize; 2], [usize; 2])> = Vec::new();
    for input in [[1, 1], [3, 4], [7, 5], [40, 130]] {
        for output in [[1, 1], [2, 9], [6, 8], [5, 3], [90, 33], [80, 260]] {
            let adaptive = Op::AdaptiveAvgPool2d { output: Sizes::from(output) };
            for op in [nearest(output), bilinear(output, false), bilinear(output, true), adaptive] {
                cases.push((op, input, output));
            }
        }
    }
    for (op, output) in [
        (average([2, 2], [2, 2], [0, 0]), [4, 3]),
        (average([3, 3], [2, 2], [1, 1]), [4, 3]),
        (average([5, 3], [1, 1], [2, 1]), [7, 5]),
        (average([1, 2], [3, 2], [0, 1]), [3, 3]),
        (average([7, 5], [1, 1], [0, 0]), [1, 1]),
    ] {
        cases.push((op, [7, 5], output));
    }
    for (op, input, output) in cases {
        let both = axes(&op, input, output).expect("an op with axes");
        let [rows, columns] = [weights(&both[0]), weights(&both[1])];
        for planes in [1, 3] {
            let number = |i: usize| ((i * 7919 % 1009) as f64 / 504.0 - 1.0) as f32;
            let areas = [input[0] * input[1], output[0] * output[1]];
            let x: Vec<f32> = (0..planes * areas[0]).map(number).collect();
            let g: Vec<f32> = (0..planes * areas[1]).map(number).collect();
            let (mut y, mut back) = (vec![f32::NAN; g.len()], vec![f32::NAN; x.len()]);
            let mut turned = back.clone();
            // SAFETY: planes of the axes' sizes.
            unsafe {
                resample(planes, &both, y.as_mut_ptr(), x.as_ptr());
                resample_backward(planes, &both, back.as_mut_ptr(), g.as_ptr());
                resize_backward(planes, &both, turned.as_mut_ptr(), g.as_ptr());
            }
            // What they add up to, and what their sizes do.
            let (mut forward, mut backward) = (vec![[0.0; 2]; y.len()], vec![[0.0; 2]; back.len()]);
            for (plane, (i, j)) in
                (0..planes).flat_map(|p| (0..areas[1]).map(move |o| (p, (o / output[1], o % output[1]))))
            {
                let to = plane * areas[1] + i * output[1] + j;
                for (r, row) in rows[i].iter().enumerate().filter(|(_, weight)| **weight != 0.0) {
                    for (c, column) in columns[j].iter().enumerate().filter(|(_, weight)| **weight != 0.0) {
                        let from = plane * areas[0] + r * input[1] + c;
                        for (sums, term) in [(&mut forward[to], x[from]), (&mut backward[from], g[to])] {
                            let term = row * column * f64::from(term);
                            *sums = [sums[0] + term, sums[1] + term.abs()];
                        }
                    }
                }
            }
            let near = |got: &[f32], exact: &[[f64; 2]]| {
                got.iter().zip(exact).all(|(&got, [sum, size])| (f64::from(got) - sum).abs() <= 1e-5 * size)
            };
            assert!(near(&y, &forward), "{op:?} of {planes} × {input:?}");
            assert!(
                near(&back, &backward) && near(&turned, &backward),
                "the gradient of {op:?} of {planes} × {input:?}"
            );
        }
    }
}
