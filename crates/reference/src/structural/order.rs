//! Reductions beyond sum and amax, scans and order, as their definitions in plain loops.

use std::cmp::Ordering;

use kiln_ir::{DType, Dims, Op, Shape, Why};

use super::{coordinates, groups, numbers, position};
use crate::{Array, Data, Precision};

type Result<T> = std::result::Result<T, Why>;

/// The elements of each group of a reduction, by position.
fn members(x: &Array, shape: &Shape, dims: &Dims) -> Vec<Vec<usize>> {
    let mut members = vec![Vec::new(); shape.numel()];
    let group = if dims.is_empty() { (0..x.numel()).collect() } else { groups(x, dims) };
    group.into_iter().enumerate().for_each(|(i, group)| members[group].push(i));
    members
}

/// The lines of x along a dim, each as positions in order.
fn lines(x: &Array, dim: usize) -> Vec<Vec<usize>> {
    if x.shape.rank() == 0 {
        return vec![vec![0]];
    }
    let dims = Dims::from(dim);
    members(x, &x.shape.reduced(&dims, true), &dims)
}

fn compare(x: &Array, a: usize, b: usize) -> Ordering {
    match &x.data {
        Data::Int(v) => v[a].cmp(&v[b]),
        Data::Float(v) => v[a].partial_cmp(&v[b]).unwrap_or_else(|| v[a].is_nan().cmp(&v[b].is_nan())),
    }
}

fn is_nan(x: &Array, i: usize) -> bool {
    matches!(&x.data, Data::Float(v) if v[i].is_nan())
}

/// The order that sorts a line, stable.
fn sorted(x: &Array, line: &[usize], descending: bool) -> Vec<i64> {
    let mut order: Vec<usize> = (0..line.len()).collect();
    order.sort_by(|&a, &b| {
        let ascending = compare(x, line[a], line[b]);
        if descending { ascending.reverse() } else { ascending }
    });
    order.into_iter().map(|i| i as i64).collect()
}

/// Results of lines put where the lines' elements are in `shape`.
fn scatter<T: Clone + Default>(x: &Array, shape: &Shape, dim: usize, results: &[Vec<T>]) -> Vec<T> {
    if shape.rank() == 0 {
        return results[0].clone();
    }
    let kept = x.shape.reduced(&Dims::from(dim), true);
    let mut out = Vec::with_capacity(shape.numel());
    coordinates(shape, |at| {
        let mut line = at.to_vec();
        line[dim] = 0;
        out.push(results[position(&kept, &line)][at[dim]].clone());
    });
    out
}

pub(super) fn evaluate(
    op: &Op,
    args: &[Array],
    shape: &Shape,
    dtype: DType,
    precision: Precision,
) -> Result<Option<Array>> {
    let x = &args[0];
    let rounded = |array: Array| array.convert(dtype, precision);
    let reduced = |dims: &Dims, f: &dyn Fn(&[f64]) -> f64| {
        let members = members(x, shape, dims);
        let of = |group: &Vec<usize>| f(&group.iter().map(|&i| x.float(i)).collect::<Vec<f64>>());
        rounded(Array::floats(DType::F64, shape, |i| of(&members[i])))
    };
    let chosen = |f: &dyn Fn(&[usize]) -> i64, dim: usize| {
        let results: Vec<i64> = lines(x, dim).iter().map(|line| f(line)).collect();
        Array::ints(DType::I64, shape, |i| results[i])
    };
    Ok(Some(match op {
        Op::Amin { dims, .. } => {
            let least = |group: &Vec<usize>| {
                let nan = group.iter().find(|&&i| is_nan(x, i));
                *nan.unwrap_or_else(|| group.iter().min_by(|&&a, &&b| compare(x, a, b)).unwrap_or(&0))
            };
            let picks: Vec<usize> = members(x, shape, dims).iter().map(least).collect();
            x.take(shape.clone(), picks.into_iter())
        }
        Op::Any { dims, .. } => reduced(dims, &|v| f64::from(u8::from(v.iter().any(|&x| x != 0.0)))),
        Op::All { dims, .. } => reduced(dims, &|v| f64::from(u8::from(v.iter().all(|&x| x != 0.0)))),
        Op::CountNonzero { dims } => reduced(dims, &|v| v.iter().filter(|&&x| x != 0.0).count() as f64),
        Op::Prod { dims, .. } | Op::Nansum { dims, .. } => {
            let product = matches!(op, Op::Prod { .. });
            let (mut float, mut int) = (Vec::new(), Vec::new());
            for group in members(x, shape, dims) {
                float.push(if product {
                    group.iter().map(|&i| x.float(i)).product()
                } else {
                    group.iter().map(|&i| x.float(i)).filter(|v| !v.is_nan()).fold(0.0, |a, b| a + b)
                });
                int.push(if product {
                    group.iter().fold(1i64, |a, &i| a.wrapping_mul(x.int(i)))
                } else {
                    group.iter().fold(0i64, |a, &i| a.wrapping_add(x.int(i)))
                });
            }
            rounded(numbers(if dtype.is_float() { DType::F64 } else { dtype }, shape, float, int))
        }
        Op::ProdBackward { dims } => {
            // Each from scratch: its gradient times all the other factors.
            let (grad, x) = (&args[0], &args[1]);
            let mut out = vec![0.0; x.numel()];
            for (group, at) in members(x, &grad.shape, dims).iter().zip(0..) {
                for &i in group {
                    let others = group.iter().filter(|&&k| k != i).map(|&k| x.float(k));
                    out[i] = grad.float(at) * others.product::<f64>();
                }
            }
            rounded(Array::floats(DType::F64, shape, |i| out[i]))
        }
        Op::Logsumexp { dims, .. } => reduced(dims, &|v| {
            let top = v.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let top = if top.is_infinite() { 0.0 } else { top };
            top + v.iter().map(|x| (x - top).exp()).sum::<f64>().ln()
        }),
        Op::Var { dims, correction, .. } | Op::Std { dims, correction, .. } => reduced(dims, &|v| {
            let n = v.len() as f64;
            let mean = v.iter().sum::<f64>() / n;
            let squares: f64 = v.iter().map(|x| (x - mean) * (x - mean)).sum();
            let var = squares / (n - *correction as f64).max(0.0);
            if matches!(op, Op::Std { .. }) { var.sqrt() } else { var }
        }),
        Op::LinalgVectorNorm { ord, dims, .. } => {
            let ord = ord.as_f64();
            reduced(dims, &|v| {
                let sizes = v.iter().map(|x| x.abs());
                match ord {
                    0.0 => v.iter().filter(|&&x| x != 0.0).count() as f64,
                    f64::INFINITY => sizes.fold(0.0, f64::max),
                    f64::NEG_INFINITY => sizes.fold(f64::INFINITY, f64::min),
                    _ => sizes.map(|x| x.powf(ord)).sum::<f64>().powf(1.0 / ord),
                }
            })
        }
        Op::Argmax { dim, .. } | Op::Argmin { dim, .. } => {
            let largest = matches!(op, Op::Argmax { .. });
            let best = |line: &[usize]| match line.iter().position(|&i| is_nan(x, i)) {
                Some(nan) => nan as i64,
                None => sorted(x, line, largest)[0],
            };
            chosen(&best, *dim)
        }
        Op::CummaxIndex { dim } | Op::CumminIndex { dim } => {
            let largest = matches!(op, Op::CummaxIndex { .. });
            // Each result from scratch, over its own part of the line; of equals `max_by` takes the last.
            let better = |&a: &usize, &b: &usize| {
                let ascending = compare(x, a, b);
                is_nan(x, a).cmp(&is_nan(x, b)).then(if largest { ascending } else { ascending.reverse() })
            };
            let last = |line: &[usize]| (0..line.len()).max_by(|&a, &b| better(&line[a], &line[b]));
            let upto = |line: &Vec<usize>| {
                (1..=line.len()).map(|n| last(&line[..n]).unwrap_or(0) as i64).collect::<Vec<i64>>()
            };
            let all: Vec<Vec<i64>> = lines(x, *dim).iter().map(upto).collect();
            let all = scatter(x, shape, *dim, &all);
            Array::ints(DType::I64, shape, |i| all[i])
        }
        Op::MedianIndex { dim, .. } => {
            let middle = |line: &[usize]| match line.iter().position(|&i| is_nan(x, i)) {
                Some(nan) => nan as i64,
                None => sorted(x, line, false)[(line.len() - 1) / 2],
            };
            chosen(&middle, *dim)
        }
        Op::Argsort { dim, .. } | Op::TopkIndex { dim, .. } => {
            let (descending, count) = match op {
                Op::TopkIndex { largest, k, .. } => (*largest, *k),
                Op::Argsort { descending, .. } => (*descending, usize::MAX),
                _ => (false, usize::MAX),
            };
            let orders: Vec<Vec<i64>> = lines(x, *dim)
                .iter()
                .map(|line| sorted(x, line, descending).into_iter().take(count).collect())
                .collect();
            let all = scatter(x, shape, *dim, &orders);
            Array::ints(DType::I64, shape, |i| all[i])
        }
        Op::Cumsum { dim, .. } | Op::Cumprod { dim } | Op::Logcumsumexp { dim, .. } => {
            let backwards =
                matches!(op, Op::Cumsum { reverse: true, .. } | Op::Logcumsumexp { reverse: true, .. });
            let (mut floats, mut ints) = (Vec::new(), Vec::new());
            for line in lines(x, *dim) {
                let n = line.len();
                // Each result from scratch, over its own part of the line.
                let part = |i: usize| if backwards { &line[i..] } else { &line[..=i] };
                let float = |part: &[usize]| match op {
                    Op::Cumsum { .. } => part.iter().map(|&i| x.float(i)).sum(),
                    Op::Cumprod { .. } => part.iter().map(|&i| x.float(i)).product(),
                    _ => {
                        let top = part.iter().map(|&i| x.float(i)).fold(f64::NEG_INFINITY, f64::max);
                        let top = if top.is_infinite() { 0.0 } else { top };
                        top + part.iter().map(|&i| (x.float(i) - top).exp()).sum::<f64>().ln()
                    }
                };
                let int = |part: &[usize]| match op {
                    Op::Cumprod { .. } => part.iter().fold(1i64, |a, &i| a.wrapping_mul(x.int(i))),
                    _ => part.iter().fold(0i64, |a, &i| a.wrapping_add(x.int(i))),
                };
                floats.push((0..n).map(|i| float(part(i))).collect::<Vec<f64>>());
                ints.push((0..n).map(|i| int(part(i))).collect::<Vec<i64>>());
            }
            let (floats, ints) = (scatter(x, shape, *dim, &floats), scatter(x, shape, *dim, &ints));
            rounded(numbers(if dtype.is_float() { DType::F64 } else { dtype }, shape, floats, ints))
        }
        _ => return Ok(None),
    }))
}
