//! Kernels that work along dims: reductions, softmax, the losses.

use kiln_ir::DType;

use super::{Array, Item, LAYOUTS, Layout, expect};
use crate::kernels::nll::IndexOutOfRange;
use crate::kernels::*;

/// Reduces naively: the items of each output, in input order.
fn groups(input: &Array, dims: &[usize]) -> (Vec<usize>, Vec<Vec<Item>>) {
    let kept: Vec<usize> = (0..input.shape.len()).filter(|d| !dims.contains(d)).collect();
    let out_shape: Vec<usize> = kept.iter().map(|&d| input.shape[d]).collect();
    let mut groups = vec![Vec::new(); out_shape.iter().product()];
    for (i, item) in input.items().into_iter().enumerate() {
        let mut index = vec![0; input.shape.len()];
        let mut rest = i;
        for d in (0..input.shape.len()).rev() {
            index[d] = rest % input.shape[d];
            rest /= input.shape[d];
        }
        groups[kept.iter().fold(0, |at, &d| at * input.shape[d] + index[d])].push(item);
    }
    (out_shape, groups)
}

/// The largest relative error of one rounding to a half.
fn half_unit(dtype: DType) -> f64 {
    if dtype == DType::F16 { 1.0 / 2048.0 } else { 1.0 / 256.0 }
}

fn check_reduce(reduction: Reduction, dtype: DType, shape: &[usize], layout: Layout, dims: &[usize]) {
    let mut input = Array::new(dtype, shape, layout, 5);
    let totals = matches!(reduction, Reduction::Sum | Reduction::Prod);
    if dtype.is_float() && totals {
        for i in 0..input.memory.len() - 1 {
            if !input.read(i).float().is_finite() {
                input.write(i, Item::Float(1.5));
            }
        }
    }
    let (out_shape, groups) = groups(&input, dims);
    let counted = !dtype.is_float() && totals;
    let out_dtype = if counted { DType::I64 } else { dtype };
    let mut out = Array::new(out_dtype, &out_shape, Layout::Contiguous, 1);
    // SAFETY: operands made for this call.
    unsafe { reduce(reduction, &out.operand(), &input.operand(), dims) };
    for (got, items) in out.items().into_iter().zip(groups) {
        let what = format!("{reduction:?} {dtype:?} {shape:?} {layout:?} {dims:?}");
        match (reduction, got) {
            (Reduction::Sum, Item::Int(got)) => {
                assert_eq!(got, items.iter().fold(0i64, |a, x| a.wrapping_add(x.int())), "{what}");
            }
            (Reduction::Sum, Item::Float(got)) => {
                let exact: f64 = items.iter().map(|x| x.float()).sum();
                let size: f64 = items.iter().map(|x| x.float().abs()).sum();
                let epsilon = match dtype {
                    DType::F64 => 1e-12,
                    DType::F32 => 3e-7,
                    // Added up in f32, rounded once.
                    _ => 3e-7 + half_unit(dtype),
                };
                let right = (got - exact).abs() <= epsilon * size || got == dtype.round(exact);
                assert!(right, "{what}: {got}, not {exact}");
            }
            (Reduction::Prod, Item::Int(got)) => {
                assert_eq!(got, items.iter().fold(1i64, |a, x| a.wrapping_mul(x.int())), "{what}");
            }
            (Reduction::Prod, Item::Float(got)) => {
                let exact: f64 = items.iter().map(|x| x.float()).product();
                let epsilon = if dtype.is_narrow() { half_unit(dtype) } else { 1e-6 };
                let close = got == dtype.round(exact) || (got - exact).abs() <= epsilon * exact.abs();
                assert!(close || (got.is_nan() && exact.is_nan()), "{what}: {got}, not {exact}");
            }
            (Reduction::Amin, Item::Int(got)) => {
                let most = dtype.wrap(if dtype == DType::Bool { 1 } else { i64::MAX });
                assert_eq!(got, items.iter().map(|x| x.int()).min().unwrap_or(most), "{what}");
            }
            (Reduction::Amin, Item::Float(got)) => {
                let nan = items.iter().any(|x| x.float().is_nan());
                let smallest = items.iter().map(|x| x.float()).fold(f64::INFINITY, f64::min);
                assert!(if nan { got.is_nan() } else { got == smallest }, "{what}: {got}, not {smallest}");
            }
            (Reduction::Amax, Item::Int(got)) => {
                let least = dtype.wrap(if dtype == DType::Bool { 0 } else { i64::MIN });
                assert_eq!(got, items.iter().map(|x| x.int()).max().unwrap_or(least), "{what}");
            }
            (Reduction::Amax, Item::Float(got)) => {
                let nan = items.iter().any(|x| x.float().is_nan());
                let largest = items.iter().map(|x| x.float()).fold(f64::NEG_INFINITY, f64::max);
                assert!(if nan { got.is_nan() } else { got == largest }, "{what}: {got}, not {largest}");
            }
        }
    }
}

#[test]
fn reductions() {
    let shapes: &[(&[usize], &[&[usize]])] = &[
        (&[], &[&[]]),
        (&[7], &[&[0], &[]]),
        (&[5000], &[&[0]]),
        (&[0, 3], &[&[0], &[1], &[0, 1]]),
        (&[33, 70], &[&[0], &[1], &[0, 1], &[]]),
        (&[6, 5, 40], &[&[0], &[1], &[2], &[0, 2], &[1, 2], &[0, 1], &[0, 1, 2]]),
        (&[3, 2, 5, 4], &[&[1, 3], &[0, 2]]),
    ];
    for reduction in [Reduction::Sum, Reduction::Amax, Reduction::Amin, Reduction::Prod] {
        for dtype in DType::ALL {
            for (shape, sets) in shapes {
                for dims in *sets {
                    for layout in LAYOUTS {
                        check_reduce(reduction, dtype, shape, layout, dims);
                    }
                }
            }
        }
    }
}

#[test]
fn large_reductions() {
    for dtype in [DType::F32, DType::F64, DType::I64, DType::BF16, DType::I8] {
        check_reduce(Reduction::Sum, dtype, &[200_001], Layout::Contiguous, &[0]);
        check_reduce(Reduction::Sum, dtype, &[300, 1100], Layout::Contiguous, &[0]);
        check_reduce(Reduction::Sum, dtype, &[300, 1100], Layout::Contiguous, &[1]);
        check_reduce(Reduction::Sum, dtype, &[300, 1100], Layout::Reversed, &[0]);
        check_reduce(Reduction::Amax, dtype, &[2500, 40], Layout::Gaps, &[0]);
    }
}

#[test]
fn results_do_not_depend_on_threads() {
    let bits = |threads: usize| {
        kiln_runtime::threads::set_count(threads);
        let mut x = Array::new(DType::F32, &[600, 700], Layout::Contiguous, 8);
        for i in 0..420_000 {
            let value = x.read(i).float();
            x.write(i, Item::Float(if value.is_nan() { 0.1 } else { value }));
        }
        let mut all = Array::new(DType::F32, &[], Layout::Contiguous, 1);
        let mut columns = Array::new(DType::F32, &[700], Layout::Contiguous, 1);
        // SAFETY: operands made for this call.
        unsafe {
            reduce(Reduction::Sum, &all.operand(), &x.operand(), &[0, 1]);
            reduce(Reduction::Sum, &columns.operand(), &x.operand(), &[0]);
        }
        (all.memory[0], columns.memory)
    };
    let one = bits(1);
    assert_eq!(one, bits(2));
    assert_eq!(one, bits(3));
}

/// An array without NaN.
fn finite(dtype: DType, shape: &[usize], layout: Layout, seed: u64) -> Array {
    let mut array = Array::new(dtype, shape, layout, seed);
    for i in 0..array.memory.len() - 1 {
        // Not too large either for the logarithm of a softmax in half precision.
        if !array.read(i).float().abs().lt(&100.0) {
            array.write(i, Item::Float(-1.25));
        }
    }
    array
}

/// The lines of items along a dim: for each, the positions of its elements in row-major order.
fn line_positions(shape: &[usize], dim: usize) -> Vec<Vec<usize>> {
    let inner: usize = shape[dim + 1..].iter().product();
    let outer: usize = shape[..dim].iter().product();
    let length = shape[dim];
    (0..outer * inner)
        .map(|l| (0..length).map(|k| (l / inner * length + k) * inner + l % inner).collect())
        .collect()
}

#[test]
fn softmax_and_its_logarithm() {
    for dtype in DType::ALL.into_iter().filter(|d| d.is_float()) {
        let tolerance = match dtype {
            DType::F64 => 1e-14,
            DType::F32 => 1e-6,
            _ => 1e-6 + half_unit(dtype),
        };
        for (shape, dim) in [
            (&[5][..], 0),
            (&[6, 33], 1),
            (&[6, 33], 0),
            (&[3, 4, 5], 1),
            (&[40, 3000], 1),
            (&[2, 1], 1),
            (&[900, 19], 0),
            (&[2, 900, 9], 1),
        ] {
            for layout in [Layout::Contiguous, Layout::Reversed, Layout::Gaps, Layout::Backwards] {
                for logarithm in [false, true] {
                    let mut x = finite(dtype, shape, layout, 3);
                    let mut y = Array::new(dtype, shape, Layout::Contiguous, 1);
                    // SAFETY: operands made for this call.
                    unsafe { softmax(logarithm, &y.operand(), &x.operand(), dim) };
                    let (x_items, y_items) = (x.items(), y.items());
                    for line in line_positions(shape, dim) {
                        let largest = line.iter().map(|&i| x_items[i].float()).fold(f64::MIN, f64::max);
                        let total: f64 = line.iter().map(|&i| (x_items[i].float() - largest).exp()).sum();
                        let p = |i: usize| (x_items[i].float() - largest).exp() / total;
                        for &i in &line {
                            let expected = if logarithm { p(i).ln() } else { p(i) };
                            assert!(
                                (y_items[i].float() - expected).abs() <= tolerance * expected.abs().max(8.0),
                                "{shape:?} {layout:?}"
                            );
                        }
                    }
                    // SAFETY: in place.
                    unsafe {
                        let operand = x.operand();
                        softmax(logarithm, &operand, &operand, dim);
                    }
                    expect("softmax in place", &x, &y_items);
                }
            }
        }
    }
}

#[test]
fn softmax_of_empty_and_scalar() {
    let mut x = finite(DType::F32, &[], Layout::Contiguous, 3);
    let mut y = Array::new(DType::F32, &[], Layout::Contiguous, 1);
    // SAFETY: operands made for this call.
    unsafe { softmax(false, &y.operand(), &x.operand(), 0) };
    assert_eq!(y.read(0), Item::Float(1.0));
    let mut empty = Array::new(DType::F32, &[0, 4], Layout::Contiguous, 3);
    // SAFETY: operands made for this call.
    unsafe {
        let operand = empty.operand();
        softmax(true, &operand, &operand, 1);
    }
}

#[test]
fn nll_gathers_and_checks() {
    let mut input = finite(DType::F32, &[3, 4], Layout::Gaps, 3);
    let mut target = Array::new(DType::I64, &[3], Layout::Contiguous, 1);
    let mut weight = finite(DType::F32, &[4], Layout::Contiguous, 7);
    let [mut losses, mut weights] = [(); 2].map(|()| Array::new(DType::F32, &[3], Layout::Contiguous, 1));
    for (i, t) in [2, -100, 0].into_iter().enumerate() {
        target.write(i, Item::Int(t));
    }
    // SAFETY: operands made for this call.
    unsafe {
        nll_forward(
            &losses.operand(),
            &weights.operand(),
            &input.operand(),
            &target.operand(),
            Some(&weight.operand()),
            -100,
        )
        .unwrap();
    }
    let (x, w) = (input.items(), weight.items());
    let loss =
        |row: usize, t: usize| Item::Float(f64::from(-(w[t].float() as f32 * x[row * 4 + t].float() as f32)));
    expect("losses", &losses, &[loss(0, 2), Item::Float(0.0), loss(2, 0)]);
    expect("weights", &weights, &[w[2], Item::Float(0.0), w[0]]);

    target.write(1, Item::Int(4));
    // SAFETY: operands made for this call.
    let error = unsafe {
        nll_forward(&losses.operand(), &weights.operand(), &input.operand(), &target.operand(), None, -100)
    };
    assert_eq!(error, Err(IndexOutOfRange { row: 1, target: 4, classes: 4 }));
}
