//! Evaluation of recurrent layers and their slopes, sequence by sequence and step by step.

use kiln_ir::table::recurrent::{Cell, Sequence};
use kiln_ir::{DType, Op, Shape};

use crate::Array;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Part of a row of a dense tensor, whose rows are this long.
fn row(x: &Array, row: usize, length: usize, from: usize, count: usize) -> Vec<f64> {
    (from..from + count).map(|column| x.float(row * length + column)).collect()
}

/// matrix · x, or matrixᵀ · x, for a matrix with so many columns.
fn product(matrix: &Array, columns: usize, x: &[f64], is_transposed: bool) -> Vec<f64> {
    let rows = matrix.numel().checked_div(columns).unwrap_or(0);
    let at = |i: usize, j: usize| matrix.float(i * columns + j);
    match is_transposed {
        false if columns == 0 => vec![0.0; matrix.shape[0]],
        false => (0..rows).map(|i| (0..columns).map(|j| at(i, j) * x[j]).sum()).collect(),
        true => (0..columns).map(|j| (0..rows).map(|i| at(i, j) * x[i]).sum()).collect(),
    }
}

/// What a recurrent op computes; `None` for other ops.
pub(crate) fn evaluate(op: &Op, args: &[Array], shape: &Shape) -> Option<Array> {
    let shapes: Vec<&Shape> = args.iter().map(|array| &array.shape).collect();
    let s = Sequence::of(op, &shapes)?;
    let lengths = args.get(Sequence::lengths_at(op));
    let mut out = vec![0.0; shape.numel()];
    let width = shape[2];
    for sequence in 0..s.rows {
        let length = lengths.map_or(i64::MAX, |lengths| lengths.int(sequence));
        let entries = if Sequence::is_gradient(op) {
            slopes(&s, args, sequence, length)
        } else {
            trace(&s, args, sequence, length)
        };
        for (entry, values) in entries {
            let at = (entry * s.rows + sequence) * width;
            out[at..at + values.len()].copy_from_slice(&values);
        }
    }
    Some(Array::floats(DType::F64, shape, |i| out[i]))
}

/// The entries of one sequence: their numbers and their first columns, zeros behind them.
type Entries = Vec<(usize, Vec<f64>)>;

fn trace(s: &Sequence, args: &[Array], sequence: usize, length: i64) -> Entries {
    let n = s.units;
    let mut h = row(&args[1], sequence, s.outputs, 0, s.outputs);
    let mut c = if s.cell == Cell::Lstm { row(&args[2], sequence, n, 0, n) } else { Vec::new() };
    let weight = if s.cell == Cell::Lstm { &args[3] } else { &args[2] };
    let mut entries = vec![(s.first(), [h.clone(), c.clone()].concat())];
    for number in 0..s.steps {
        let step = s.step(number);
        let gates = s.cell.gates();
        let x = row(&args[0], step * s.rows + sequence, gates * n, 0, gates * n);
        let mut kept = Vec::new();
        if length > step as i64 {
            let p = product(weight, s.outputs, &h, false);
            let new: Vec<f64> = match s.cell {
                Cell::Lstm => {
                    let gate = |g: usize, u: usize| x[g * n + u] + p[g * n + u];
                    let (i, f, o) = (
                        (0..n).map(|u| sigmoid(gate(0, u))).collect::<Vec<_>>(),
                        (0..n).map(|u| sigmoid(gate(1, u))).collect::<Vec<_>>(),
                        (0..n).map(|u| sigmoid(gate(3, u))).collect::<Vec<_>>(),
                    );
                    let g: Vec<f64> = (0..n).map(|u| gate(2, u).tanh()).collect();
                    c = (0..n).map(|u| f[u] * c[u] + i[u] * g[u]).collect();
                    let new = (0..n).map(|u| o[u] * c[u].tanh()).collect();
                    kept = [i, f, g, o].concat();
                    new
                }
                Cell::Gru => {
                    let p: Vec<f64> = (0..3 * n).map(|i| p[i] + args[3].float(i)).collect();
                    let r: Vec<f64> = (0..n).map(|u| sigmoid(x[u] + p[u])).collect();
                    let z: Vec<f64> = (0..n).map(|u| sigmoid(x[n + u] + p[n + u])).collect();
                    let new: Vec<f64> = (0..n).map(|u| (x[2 * n + u] + r[u] * p[2 * n + u]).tanh()).collect();
                    let h = (0..n).map(|u| (1.0 - z[u]) * new[u] + z[u] * h[u]).collect();
                    kept = [r, z, new, p[2 * n..].to_vec()].concat();
                    h
                }
                Cell::Tanh => (0..n).map(|u| (x[u] + p[u]).tanh()).collect(),
                Cell::Relu => (0..n).map(|u| (x[u] + p[u]).max(0.0)).collect(),
            };
            h = if s.projected { product(&args[4], n, &new, false) } else { new };
        }
        kept.truncate(if s.keep { kept.len() } else { 0 });
        entries.push((s.after(step), [h.clone(), c.clone(), kept].concat()));
    }
    entries
}

fn slopes(s: &Sequence, args: &[Array], sequence: usize, length: i64) -> Entries {
    let (n, width) = (s.units, s.trace());
    let part = |x: &Array, entry: usize, from: usize, count: usize| {
        row(x, entry * s.rows + sequence, width, from, count)
    };
    let add = |x: &[f64], y: Vec<f64>| -> Vec<f64> { x.iter().zip(y).map(|(x, y)| x + y).collect() };
    let (grad, trace) = (&args[0], &args[1]);
    let is_lstm = s.cell == Cell::Lstm;
    let (mut to_h, mut to_c) = (vec![0.0; s.outputs], vec![0.0; if is_lstm { n } else { 0 }]);
    let mut entries = Vec::new();
    for number in (0..s.steps).rev() {
        let step = s.step(number);
        let (after, before) = (s.after(step), s.before(step));
        to_h = add(&to_h, part(grad, after, 0, s.outputs));
        to_c = add(&to_c, part(grad, after, s.outputs, to_c.len()));
        if length <= step as i64 {
            entries.push((after, Vec::new()));
            continue;
        }
        let kept = |i: usize| part(trace, after, s.states() + i * n, n);
        let more = |i: usize| part(grad, after, s.states() + i * n, n);
        let own = if s.projected { product(&args[3], n, &to_h, true) } else { to_h.clone() };
        let mut past = vec![0.0; s.outputs];
        let all: Vec<Vec<f64>> = match s.cell {
            Cell::Lstm => {
                let ([i, f, g, o], [mi, mf, mg, mo]) = ([0, 1, 2, 3].map(kept), [0, 1, 2, 3].map(more));
                let (c, old) = (part(trace, after, s.outputs, n), part(trace, before, s.outputs, n));
                let d: Vec<f64> =
                    (0..n).map(|u| to_c[u] + own[u] * o[u] * (1.0 - c[u].tanh().powi(2))).collect();
                to_c = (0..n).map(|u| d[u] * f[u]).collect();
                vec![
                    (0..n).map(|u| (d[u] * g[u] + mi[u]) * i[u] * (1.0 - i[u])).collect(),
                    (0..n).map(|u| (d[u] * old[u] + mf[u]) * f[u] * (1.0 - f[u])).collect(),
                    (0..n).map(|u| (d[u] * i[u] + mg[u]) * (1.0 - g[u] * g[u])).collect(),
                    (0..n).map(|u| (own[u] * c[u].tanh() + mo[u]) * o[u] * (1.0 - o[u])).collect(),
                ]
            }
            Cell::Gru => {
                let ([r, z, new, inner], [mr, mz, mn, mi]) = ([0, 1, 2, 3].map(kept), [0, 1, 2, 3].map(more));
                let old = part(trace, before, 0, n);
                past = (0..n).map(|u| own[u] * z[u]).collect();
                let d: Vec<f64> =
                    (0..n).map(|u| (own[u] * (1.0 - z[u]) + mn[u]) * (1.0 - new[u] * new[u])).collect();
                vec![
                    (0..n).map(|u| (d[u] * inner[u] + mr[u]) * r[u] * (1.0 - r[u])).collect(),
                    (0..n).map(|u| (own[u] * (old[u] - new[u]) + mz[u]) * z[u] * (1.0 - z[u])).collect(),
                    d.clone(),
                    (0..n).map(|u| d[u] * r[u] + mi[u]).collect(),
                ]
            }
            Cell::Tanh => {
                let h = part(trace, after, 0, n);
                vec![(0..n).map(|u| own[u] * (1.0 - h[u] * h[u])).collect()]
            }
            Cell::Relu => {
                let h = part(trace, after, 0, n);
                vec![(0..n).map(|u| if h[u] > 0.0 { own[u] } else { 0.0 }).collect()]
            }
        };
        let of_weight = match s.cell {
            Cell::Gru => [all[0].clone(), all[1].clone(), all[3].clone()].concat(),
            _ => all.concat(),
        };
        let mut values = all.concat();
        values.extend(if s.projected { to_h.clone() } else { Vec::new() });
        to_h = add(&past, product(&args[2], s.outputs, &of_weight, true));
        entries.push((after, values));
    }
    to_h = add(&to_h, part(grad, s.first(), 0, s.outputs));
    to_c = add(&to_c, part(grad, s.first(), s.outputs, to_c.len()));
    entries.push((s.first(), [to_h, to_c].concat()));
    entries
}
