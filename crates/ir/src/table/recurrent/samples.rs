//! Sample calls of recurrent layers.

use crate::samples::{Domain, FLOATS, Sample, SampleArg, t, with_op};
use crate::{DType, Op, Shape};

/// The sizes of samples: steps, rows, units, columns of a projected output; whether the last step comes first, and
/// whether rows have lengths.
const CASES: &[([usize; 4], bool, bool)] = &[
    ([3, 2, 5, 3], false, false),
    ([4, 3, 2, 1], true, false),
    ([3, 4, 3, 2], false, true),
    ([4, 2, 3, 2], true, true),
    ([1, 1, 19, 4], false, false),
    ([2, 0, 3, 2], true, false),
    ([0, 2, 3, 2], false, false),
];

/// Calls of an op, given its sizes and whether the last step comes first; the shapes of its operands follow from the
/// sizes.
fn calls(op: impl Fn(bool, usize) -> Op, shapes: impl Fn([usize; 4]) -> Vec<Shape>) -> Vec<Sample> {
    let case = |(number, &(sizes, reverse, has_lengths)): (usize, &([usize; 4], bool, bool))| {
        let mut args: Vec<SampleArg> =
            shapes(sizes).iter().map(|shape| t(shape, Domain::Between(-1.5, 1.5))).collect();
        if has_lengths {
            args.push(SampleArg::Fixed(DType::I64, Shape::from([sizes[1]]), Domain::Index(sizes[0] + 1)));
        }
        with_op(op(reverse, number), FLOATS, args)
    };
    CASES.iter().enumerate().map(case).collect()
}

/// [`calls`] of a gradient. Without any steps it reads nothing of the trace.
fn backward_calls(op: impl Fn(bool, usize) -> Op, shapes: impl Fn([usize; 4]) -> Vec<Shape>) -> Vec<Sample> {
    let mut all = calls(op, shapes);
    all.pop();
    all
}

/// Shapes of a trace's gradient and of the trace.
fn traces([steps, rows, ..]: [usize; 4], columns: usize) -> Vec<Shape> {
    vec![Shape::from([steps + 1, rows, columns]); 2]
}

pub(crate) fn samples_of_lstm() -> Vec<Sample> {
    let shapes = |[steps, rows, n, _]: [usize; 4]| {
        vec![[steps, rows, 4 * n].into(), [rows, n].into(), [rows, n].into(), [4 * n, n].into()]
    };
    calls(|reverse, number| Op::Lstm { reverse, keep: number != 1 }, shapes)
}

pub(crate) fn samples_of_lstm_backward() -> Vec<Sample> {
    let shapes = |sizes: [usize; 4]| {
        let n = sizes[2];
        [traces(sizes, 6 * n), vec![[4 * n, n].into()]].concat()
    };
    backward_calls(|reverse, _| Op::LstmBackward { reverse }, shapes)
}

pub(crate) fn samples_of_lstm_projected() -> Vec<Sample> {
    let shapes = |[steps, rows, n, p]: [usize; 4]| {
        let states = [[rows, p].into(), [rows, n].into()];
        let weights = [[4 * n, p].into(), [p, n].into()];
        [vec![[steps, rows, 4 * n].into()], states.into(), weights.into()].concat()
    };
    calls(|reverse, number| Op::LstmProjected { reverse, keep: number != 2 }, shapes)
}

pub(crate) fn samples_of_lstm_projected_backward() -> Vec<Sample> {
    let shapes = |sizes: [usize; 4]| {
        let [_, _, n, p] = sizes;
        [traces(sizes, p + 5 * n), vec![[4 * n, p].into(), [p, n].into()]].concat()
    };
    backward_calls(|reverse, _| Op::LstmProjectedBackward { reverse }, shapes)
}

pub(crate) fn samples_of_gru() -> Vec<Sample> {
    let shapes = |[steps, rows, n, _]: [usize; 4]| {
        vec![[steps, rows, 3 * n].into(), [rows, n].into(), [3 * n, n].into(), [3 * n].into()]
    };
    calls(|reverse, number| Op::Gru { reverse, keep: number != 1 }, shapes)
}

pub(crate) fn samples_of_gru_backward() -> Vec<Sample> {
    let shapes = |sizes: [usize; 4]| {
        let n = sizes[2];
        [traces(sizes, 5 * n), vec![[3 * n, n].into()]].concat()
    };
    backward_calls(|reverse, _| Op::GruBackward { reverse }, shapes)
}

pub(crate) fn samples_of_rnn() -> Vec<Sample> {
    let shapes =
        |[steps, rows, n, _]: [usize; 4]| vec![[steps, rows, n].into(), [rows, n].into(), [n, n].into()];
    calls(|reverse, number| Op::Rnn { relu: number % 2 == 1, reverse }, shapes)
}

pub(crate) fn samples_of_rnn_backward() -> Vec<Sample> {
    let shapes = |sizes: [usize; 4]| {
        let n = sizes[2];
        [traces(sizes, n), vec![[n, n].into()]].concat()
    };
    backward_calls(|reverse, number| Op::RnnBackward { relu: number % 2 == 1, reverse }, shapes)
}
