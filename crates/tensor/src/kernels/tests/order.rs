//! Orders, medians, the first few, distinct elements and scans along dims, against sorts by comparison and plain loops.

use std::cmp::Ordering;

use kiln_ir::DType;

use super::{Array, Item, Layout};
use crate::kernels::{Lines, Position, Scan, distinct, positions, scan};

const SHAPES: &[(&[usize], usize)] = &[
    (&[], 0),
    (&[1], 0),
    (&[9], 0),
    (&[3000], 0),
    (&[5, 700], 1),
    (&[700, 5], 0),
    (&[4, 31, 70], 1),
    (&[6, 33], 1),
    (&[3, 0], 0),
];

fn compare(a: Item, b: Item) -> Ordering {
    match (a, b) {
        (Item::Int(a), Item::Int(b)) => a.cmp(&b),
        (a, b) => {
            let (a, b) = (a.float(), b.float());
            a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
        }
    }
}

/// Arrays with many equals, infinities, zeros of both signs, NaN; and of integers far apart or near each other.
fn arrays(shape: &[usize]) -> Vec<Array> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F64, DType::I64, DType::Bool] {
        for kind in 0..3 {
            let mut x = Array::new(dtype, shape, Layout::Contiguous, 7 + kind);
            for i in 0..shape.iter().product() {
                let coarse = match (x.read(i), kind) {
                    (item, 0) => item,
                    (Item::Float(x), 1) => {
                        Item::Float([0.0, -0.0, f64::INFINITY, -1.0, x.round()][i * i % 5])
                    }
                    (Item::Float(x), _) => Item::Float(if x.is_nan() { 1.0 } else { x }),
                    (Item::Int(x), _) if dtype == DType::I64 => Item::Int(x % 7),
                    (item, _) => item,
                };
                x.write(i, coarse);
            }
            all.push(x);
        }
    }
    all
}

/// The places of a line's elements in an array, line by line.
fn lines(shape: &[usize], dim: usize) -> Vec<Vec<usize>> {
    let Lines { outer, size, inner } = Lines::of(shape, dim);
    let line =
        |line: usize| (0..size).map(move |i| (line / inner * size + i) * inner + line % inner).collect();
    (0..outer * inner).map(line).collect()
}

fn found(position: Position, x: &mut Array, dim: usize, count: usize) -> Vec<i64> {
    let lines = Lines::of(&x.shape, dim);
    let mut out = vec![-1; lines.outer * lines.inner * count];
    let (dtype, from) = (x.dtype, x.base());
    // SAFETY: the array's elements, and room for `count` places a line.
    unsafe { positions(position, dtype, lines, from, out.as_mut_ptr()) };
    // Line by line.
    let at = |line: usize, i: usize| (line / lines.inner * count + i) * lines.inner + line % lines.inner;
    (0..lines.outer * lines.inner)
        .flat_map(|line| (0..count).map(move |i| at(line, i)))
        .map(|at| out[at])
        .collect()
}

#[test]
fn orders_are_those_of_a_stable_sort() {
    for &(shape, dim) in SHAPES {
        for mut x in arrays(shape) {
            let what = format!("{:?} {shape:?} {dim}", x.dtype);
            let size = shape.get(dim).copied().unwrap_or(1);
            for descending in [false, true] {
                let sorted = |line: Vec<usize>| {
                    let mut order: Vec<usize> = (0..line.len()).collect();
                    order.sort_by(|&a, &b| {
                        let order = compare(x.read(line[a]), x.read(line[b]));
                        if descending { order.reverse() } else { order }
                    });
                    order.into_iter().map(|i| i as i64).collect::<Vec<i64>>()
                };
                let orders: Vec<Vec<i64>> = lines(shape, dim).into_iter().map(sorted).collect();
                let got = found(Position::Sorted { descending }, &mut x, dim, size);
                assert_eq!(got, orders.concat(), "{what} {descending}");
                for count in [0, 1, 5, 32, 40, size.saturating_sub(1), size] {
                    if count <= size {
                        let got = found(Position::Top { count, largest: descending }, &mut x, dim, count);
                        let expected: Vec<i64> =
                            orders.iter().flat_map(|order| &order[..count]).copied().collect();
                        assert_eq!(got, expected, "{what} {descending} {count}");
                    }
                }
                if !descending && size > 0 {
                    let expected: Vec<i64> = lines(shape, dim)
                        .into_iter()
                        .zip(&orders)
                        .map(|(line, order)| {
                            let is_nan = |i: &usize| matches!(x.read(line[*i]), Item::Float(x) if x.is_nan());
                            (0..size).find(is_nan).map_or(order[(size - 1) / 2], |i| i as i64)
                        })
                        .collect();
                    assert_eq!(found(Position::Median, &mut x, dim, 1), expected, "{what}");
                }
            }
        }
    }
}

#[test]
fn distinct_elements_are_counted() {
    for n in [0usize, 1, 50, 3000] {
        for mut x in arrays(&[n]) {
            let mut order: Vec<usize> = (0..n).collect();
            order.sort_by(|&a, &b| compare(x.read(a), x.read(b)));
            let (mut firsts, mut counts, mut inverse) = (Vec::<usize>::new(), Vec::<i64>::new(), vec![0; n]);
            for at in order {
                let is_nan = matches!(x.read(at), Item::Float(x) if x.is_nan());
                let same = firsts.last().is_some_and(|&last| compare(x.read(last), x.read(at)).is_eq());
                if !same || is_nan {
                    firsts.push(at);
                    counts.push(0);
                }
                *counts.last_mut().expect("one") += 1;
                inverse[at] = counts.len() as i64 - 1;
            }
            let (dtype, from) = (x.dtype, x.base());
            // SAFETY: the array's elements.
            let got = unsafe { distinct(dtype, from, n) };
            assert_eq!((got.firsts, got.counts, got.inverse), (firsts, counts, inverse), "{dtype:?} {n}");
        }
    }
}

#[test]
fn scans_carry_along_every_line() {
    for &(shape, dim) in SHAPES.iter().chain(&[(&[9, 40][..], 1), (&[2, 200, 3], 1), (&[300, 130], 0)]) {
        for dtype in [DType::F32, DType::F64, DType::I64] {
            for kind in [Scan::Sum, Scan::Prod, Scan::LogSumExp] {
                if (kind, dtype) == (Scan::LogSumExp, DType::I64) {
                    continue;
                }
                for reverse in [false, true] {
                    let mut x = Array::new(dtype, shape, Layout::Contiguous, 11);
                    let mut out = Array::new(dtype, shape, Layout::Contiguous, 12);
                    let lies = Lines::of(shape, dim);
                    let (from, to) = (x.base(), out.base());
                    // SAFETY: arrays of these lines.
                    unsafe { scan(kind, dtype, lies, reverse, from, to) };
                    for mut line in lines(shape, dim) {
                        if reverse {
                            line.reverse();
                        }
                        let (mut float, mut int) = match kind {
                            Scan::Sum => (0.0, 0i64),
                            Scan::Prod => (1.0, 1),
                            Scan::LogSumExp => (f64::NEG_INFINITY, 0),
                        };
                        for at in line {
                            let item = x.read(at);
                            match kind {
                                Scan::Sum => {
                                    (float, int) = (float + item.float(), int.wrapping_add(item.int()))
                                }
                                Scan::Prod => {
                                    (float, int) = (float * item.float(), int.wrapping_mul(item.int()))
                                }
                                Scan::LogSumExp => float = (float.exp() + item.float().exp()).ln(),
                            }
                            let what = format!("{kind:?} {dtype:?} {shape:?} {dim} {reverse}");
                            match out.read(at) {
                                Item::Int(got) => assert_eq!(got, int, "{what}"),
                                Item::Float(got) if float.is_nan() => assert!(got.is_nan(), "{what}"),
                                // What is carried is in f64.
                                Item::Float(got) if kind == Scan::LogSumExp => {
                                    assert!(
                                        (got - float).abs() <= 1e-5 * float.abs().max(1.0),
                                        "{what}: {got} {float}"
                                    )
                                }
                                got => assert!(
                                    got.same(Item::Float(dtype.round(float))),
                                    "{what}: {got:?} {float}"
                                ),
                            }
                        }
                    }
                }
            }
        }
    }
}
