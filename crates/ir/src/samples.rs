//! Sample calls of each row, from which the sweep tests are made: odd shapes, broadcasting, empty and 0-d
//! tensors, numbers in place of tensors. Dtypes, strides and backends are varied by the sweep itself.

use crate::{Approximate, DType, Device, Dims, Op, Reduction, Scalar, Shape};

/// What values a sample tensor may have.
#[derive(Copy, Clone, PartialEq, Debug)]
pub enum Domain {
    /// Anything, about standard normal.
    Any,
    /// Positive, away from zero.
    Positive,
    /// Positive or negative, away from zero.
    NonZero,
    /// Uniform between these two; integers among them.
    Between(f64, f64),
    /// Small integers (class numbers, indices) below a bound.
    Index(usize),
    /// Small integers below a bound, no two alike (as long as there are enough).
    Distinct(usize),
}

/// An operand of a sample call.
#[derive(Clone, PartialEq, Debug)]
pub enum SampleArg {
    /// A tensor of the dtype under test.
    Tensor(Shape, Domain),
    /// A tensor of this dtype, whatever the dtype under test.
    Fixed(DType, Shape, Domain),
    /// A number.
    Number(Scalar),
}

/// A call of an op that must work.
#[derive(Clone, PartialEq, Debug)]
pub struct Sample {
    /// The op with attributes.
    pub op: Op,
    /// Its operands.
    pub args: Vec<SampleArg>,
    /// The dtypes it is defined for.
    pub dtypes: &'static [DType],
}

pub(crate) use Domain::{Any, Between, Index, NonZero, Positive};
pub(crate) use SampleArg::{Fixed, Number, Tensor};

pub(crate) const ALL: &[DType] = &DType::ALL;
/// Without bool, which comes first.
pub(crate) const NUMBERS: &[DType] = DType::ALL.split_at(1).1;
pub(crate) const FLOATS: &[DType] = &[DType::F16, DType::BF16, DType::F32, DType::F64];

pub(crate) const UNARY_SHAPES: &[&[usize]] = &[&[], &[0], &[5], &[3, 1], &[4, 37], &[2, 3, 17]];
pub(crate) const BINARY_SHAPES: &[(&[usize], &[usize])] = &[
    (&[], &[]),
    (&[5], &[5]),
    (&[4, 37], &[37]),
    (&[3, 1], &[1, 19]),
    (&[2, 0], &[1]),
    (&[2, 3, 17], &[3, 1]),
];

/// The op under test is filled in by the sweep: the row knows the samples, the samples don't know the row.
fn hole() -> Op {
    Op::Neg {}
}

pub(crate) fn t(shape: &[usize], domain: Domain) -> SampleArg {
    Tensor(Shape::from(shape), domain)
}

pub(crate) fn calls(dtypes: &'static [DType], args: Vec<Vec<SampleArg>>) -> Vec<Sample> {
    args.into_iter().map(|args| Sample { op: hole(), args, dtypes }).collect()
}

pub(crate) fn with_op(op: Op, dtypes: &'static [DType], args: Vec<SampleArg>) -> Sample {
    Sample { op, args, dtypes }
}

impl crate::Row {
    /// The row's samples, with `op` in place (rows without attributes share generic samples).
    pub fn sample_calls(&self) -> Vec<Sample> {
        let mut samples = (self.samples)();
        for sample in &mut samples {
            if self.attributes.is_empty()
                && let Some(op) = Op::parse(self.name, &mut |_| None)
            {
                sample.op = op;
            }
        }
        samples
    }
}

pub(crate) fn none() -> Vec<Sample> {
    Vec::new()
}

pub(crate) fn unary_on(dtypes: &'static [DType], domain: Domain) -> Vec<Sample> {
    calls(dtypes, UNARY_SHAPES.iter().map(|s| vec![t(s, domain)]).collect())
}

pub(crate) fn unary() -> Vec<Sample> {
    unary_on(ALL, Any)
}

pub(crate) fn unary_not_bool() -> Vec<Sample> {
    unary_on(NUMBERS, Any)
}

pub(crate) fn unary_float() -> Vec<Sample> {
    unary_on(FLOATS, Any)
}

/// Calls of an activation with these parameters.
pub(crate) fn activation(parameters: &[f64]) -> Vec<Sample> {
    activation_of(FLOATS, parameters)
}

pub(crate) fn activation_of(dtypes: &'static [DType], parameters: &[f64]) -> Vec<Sample> {
    let mut args: Vec<Vec<SampleArg>> = UNARY_SHAPES.iter().map(|s| vec![t(s, Any)]).collect();
    args.push(vec![t(&[3, 40], Between(-12.0, 12.0))]);
    for call in &mut args {
        call.extend(parameters.iter().map(|&x| Number(Scalar::Float(x))));
    }
    calls(dtypes, args)
}

pub(crate) fn unary_positive() -> Vec<Sample> {
    unary_on(FLOATS, Positive)
}

pub(crate) fn binary_on(dtypes: &'static [DType], right: Domain) -> Vec<Sample> {
    let mut args: Vec<Vec<SampleArg>> =
        BINARY_SHAPES.iter().map(|(a, b)| vec![t(a, Any), t(b, right)]).collect();
    args.push(vec![t(&[4, 37], Any), Number(Scalar::Int(3))]);
    args.push(vec![Number(Scalar::Int(2)), t(&[33], right)]);
    calls(dtypes, args)
}

pub(crate) fn binary() -> Vec<Sample> {
    let mut samples = binary_on(ALL, Any);
    samples.extend(calls(NUMBERS, vec![vec![t(&[2, 19], Any), Number(Scalar::Float(0.25))]]));
    samples
}

pub(crate) fn binary_not_bool() -> Vec<Sample> {
    let mut samples = binary_on(NUMBERS, Any);
    samples.extend(calls(FLOATS, vec![vec![t(&[2, 19], Any), t(&[19], Any), Number(Scalar::Float(0.5))]]));
    samples
}

pub(crate) fn division() -> Vec<Sample> {
    binary_on(NUMBERS, NonZero)
}

pub(crate) fn power() -> Vec<Sample> {
    let mut args: Vec<Vec<SampleArg>> =
        BINARY_SHAPES.iter().map(|(a, b)| vec![t(a, Positive), t(b, Any)]).collect();
    for exponent in [0.0, 1.0, 2.0, 3.0, 0.5, -0.5, -1.0, 1.7] {
        args.push(vec![t(&[3, 19], Positive), Number(Scalar::Float(exponent))]);
    }
    args.push(vec![t(&[21], Any), Number(Scalar::Int(3))]);
    calls(FLOATS, args)
}

pub(crate) fn gelu() -> Vec<Sample> {
    let mut samples = Vec::new();
    for approximate in [Approximate::None, Approximate::Tanh] {
        for shape in UNARY_SHAPES {
            samples.push(with_op(Op::Gelu { approximate }, FLOATS, vec![t(shape, Any)]));
        }
    }
    samples
}

pub(crate) fn choose() -> Vec<Sample> {
    let condition = |s: &[usize]| Fixed(DType::Bool, Shape::from(s), Any);
    calls(
        ALL,
        vec![
            vec![condition(&[5]), t(&[5], Any), t(&[5], Any)],
            vec![condition(&[4, 1]), t(&[19], Any), t(&[4, 19], Any)],
            vec![condition(&[]), t(&[3], Any), t(&[2, 1], Any)],
            vec![condition(&[0]), t(&[0], Any), t(&[1], Any)],
            vec![condition(&[33]), t(&[33], Any), Number(Scalar::Int(0))],
        ],
    )
}

pub(crate) fn lerp() -> Vec<Sample> {
    calls(
        FLOATS,
        vec![
            vec![t(&[5], Any), t(&[5], Any), Number(Scalar::Float(0.1))],
            vec![t(&[4, 37], Any), t(&[37], Any), Number(Scalar::Float(0.9))],
            vec![t(&[3, 19], Any), t(&[3, 19], Any), t(&[19], Any)],
            vec![t(&[], Any), t(&[], Any), Number(Scalar::Float(-0.3))],
        ],
    )
}

pub(crate) fn addcmul() -> Vec<Sample> {
    calls(
        NUMBERS,
        vec![
            vec![t(&[5], Any), t(&[5], Any), t(&[5], Any), Number(Scalar::Float(0.5))],
            vec![t(&[4, 37], Any), t(&[37], Any), t(&[4, 1], Any), Number(Scalar::Float(-2.0))],
            vec![t(&[0], Any), t(&[0], Any), t(&[1], Any), Number(Scalar::Float(1.0))],
            vec![t(&[3, 5], Any), t(&[5], Any), t(&[3, 1], Any), Number(Scalar::Int(3))],
        ],
    )
}

pub(crate) fn addcdiv() -> Vec<Sample> {
    calls(
        FLOATS,
        vec![
            vec![t(&[5], Any), t(&[5], Any), t(&[5], NonZero), Number(Scalar::Float(0.5))],
            vec![t(&[4, 37], Any), t(&[37], Any), t(&[4, 1], NonZero), Number(Scalar::Float(-2.0))],
        ],
    )
}

pub(crate) fn convert() -> Vec<Sample> {
    let mut samples = Vec::new();
    for dtype in DType::ALL {
        for shape in UNARY_SHAPES {
            samples.push(with_op(Op::To { dtype }, ALL, vec![t(shape, Any)]));
        }
    }
    samples
}

pub(crate) fn copy() -> Vec<Sample> {
    calls(
        ALL,
        vec![
            vec![t(&[5], Any), t(&[5], Any)],
            vec![t(&[4, 37], Any), t(&[37], Any)],
            vec![t(&[2, 3], Any), Fixed(DType::F64, Shape::from([3]), Any)],
            vec![t(&[7], Any), Number(Scalar::Int(1))],
        ],
    )
}

const REDUCTIONS: &[(&[usize], &[usize])] = &[
    (&[5], &[0]),
    (&[4, 37], &[1]),
    (&[4, 37], &[0]),
    (&[4, 37], &[0, 1]),
    (&[2, 3, 17], &[1]),
    (&[2, 3, 17], &[0, 2]),
    (&[3, 1], &[1]),
    (&[2, 1000], &[1]),
];

pub(crate) fn reductions(dtypes: &'static [DType], empty: bool, op: fn(Dims, bool) -> Op) -> Vec<Sample> {
    let mut samples = Vec::new();
    for (shape, dims) in REDUCTIONS {
        for keepdim in [false, true] {
            samples.push(with_op(op(Dims::from(*dims), keepdim), dtypes, vec![t(shape, Any)]));
        }
    }
    samples.push(with_op(op(Dims::default(), false), dtypes, vec![t(&[], Any)]));
    if empty {
        samples.push(with_op(op(Dims::from([1]), false), dtypes, vec![t(&[3, 0], Any)]));
    }
    samples.push(with_op(op(Dims::from([1]), false), dtypes, vec![t(&[0, 3], Any)]));
    samples
}

pub(crate) fn reduction() -> Vec<Sample> {
    reductions(ALL, true, |dims, keepdim| Op::Sum { dims, keepdim })
}

pub(crate) fn mean() -> Vec<Sample> {
    reductions(FLOATS, true, |dims, keepdim| Op::Mean { dims, keepdim })
}

pub(crate) fn amax() -> Vec<Sample> {
    reductions(ALL, false, |dims, keepdim| Op::Amax { dims, keepdim })
}

/// A shape and a dim to work along.
pub(crate) const LINES: &[(&[usize], usize)] = &[
    (&[5], 0),
    (&[4, 37], 1),
    (&[4, 37], 0),
    (&[2, 3, 17], 1),
    (&[], 0),
    (&[0, 3], 1),
    (&[3, 1], 1),
    (&[2, 300], 1),
];

pub(crate) fn softmax() -> Vec<Sample> {
    LINES.iter().map(|(s, dim)| with_op(Op::Softmax { dim: *dim }, FLOATS, vec![t(s, Any)])).collect()
}

pub(crate) fn log_softmax() -> Vec<Sample> {
    LINES.iter().map(|(s, dim)| with_op(Op::LogSoftmax { dim: *dim }, FLOATS, vec![t(s, Any)])).collect()
}

const PRODUCTS: &[(usize, usize, usize)] =
    &[(1, 1, 1), (3, 5, 2), (17, 33, 19), (0, 3, 2), (2, 0, 3), (1, 64, 9)];

pub(crate) fn mm() -> Vec<Sample> {
    calls(NUMBERS, PRODUCTS.iter().map(|&(m, k, n)| vec![t(&[m, k], Any), t(&[k, n], Any)]).collect())
}

pub(crate) fn addmm() -> Vec<Sample> {
    calls(
        FLOATS,
        PRODUCTS.iter().map(|&(m, k, n)| vec![t(&[n], Any), t(&[m, k], Any), t(&[k, n], Any)]).collect(),
    )
}

pub(crate) fn linear() -> Vec<Sample> {
    let mut args: Vec<Vec<SampleArg>> =
        PRODUCTS.iter().map(|&(m, k, n)| vec![t(&[m, k], Any), t(&[n, k], Any), t(&[n], Any)]).collect();
    args.push(vec![t(&[7], Any), t(&[3, 7], Any)]);
    args.push(vec![t(&[2, 3, 7], Any), t(&[5, 7], Any), t(&[5], Any)]);
    calls(FLOATS, args)
}

pub(crate) fn reshape() -> Vec<Sample> {
    let cases: &[(&[usize], &[usize])] =
        &[(&[6], &[2, 3]), (&[4, 37], &[37, 4]), (&[2, 3, 17], &[6, 17]), (&[0], &[3, 0]), (&[], &[1, 1])];
    cases
        .iter()
        .map(|(from, to)| with_op(Op::Reshape { shape: Shape::from(*to) }, ALL, vec![t(from, Any)]))
        .collect()
}

pub(crate) fn permute() -> Vec<Sample> {
    let cases: &[(&[usize], &[usize])] =
        &[(&[4, 37], &[1, 0]), (&[2, 3, 17], &[2, 0, 1]), (&[], &[]), (&[0, 2], &[1, 0])];
    cases
        .iter()
        .map(|(shape, dims)| with_op(Op::Permute { dims: Dims::from(*dims) }, ALL, vec![t(shape, Any)]))
        .collect()
}

pub(crate) fn transpose() -> Vec<Sample> {
    vec![
        with_op(Op::Transpose { dim0: 0, dim1: 1 }, ALL, vec![t(&[4, 37], Any)]),
        with_op(Op::Transpose { dim0: 0, dim1: 2 }, ALL, vec![t(&[2, 3, 17], Any)]),
    ]
}

pub(crate) fn expand() -> Vec<Sample> {
    let cases: &[(&[usize], &[usize])] =
        &[(&[1], &[5]), (&[3, 1], &[2, 3, 4]), (&[], &[2, 2]), (&[1, 4], &[0, 4])];
    cases
        .iter()
        .map(|(from, to)| with_op(Op::Expand { shape: Shape::from(*to) }, ALL, vec![t(from, Any)]))
        .collect()
}

const SLICES: &[(&[usize], usize, usize, usize, usize)] = &[
    (&[9], 0, 2, 7, 1),
    (&[9], 0, 1, 9, 3),
    (&[4, 37], 1, 0, 16, 1),
    (&[4, 37], 0, 1, 3, 1),
    (&[5], 0, 2, 2, 1),
    (&[2, 3, 17], 1, 0, 3, 2),
];

pub(crate) fn slice() -> Vec<Sample> {
    SLICES
        .iter()
        .map(|&(shape, dim, start, end, step)| {
            with_op(Op::Slice { dim, start, end, step }, ALL, vec![t(shape, Any)])
        })
        .collect()
}

pub(crate) fn slice_scatter() -> Vec<Sample> {
    into_slices(|dim, start, end, step| Op::SliceScatter { dim, start, end, step })
}

pub(crate) fn slice_add() -> Vec<Sample> {
    into_slices(|dim, start, end, step| Op::SliceAdd { dim, start, end, step })
}

fn into_slices(op: fn(usize, usize, usize, usize) -> Op) -> Vec<Sample> {
    SLICES
        .iter()
        .map(|&(shape, dim, start, end, step)| {
            let mut window = Shape::from(shape);
            window[dim] = (end - start).div_ceil(step);
            with_op(op(dim, start, end, step), ALL, vec![t(shape, Any), Tensor(window, Any)])
        })
        .collect()
}

pub(crate) fn cat() -> Vec<Sample> {
    vec![
        with_op(Op::Cat { dim: 0 }, ALL, vec![t(&[3], Any), t(&[5], Any)]),
        with_op(Op::Cat { dim: 1 }, ALL, vec![t(&[2, 17], Any), t(&[2, 1], Any), t(&[2, 0], Any)]),
        with_op(Op::Cat { dim: 0 }, ALL, vec![t(&[2, 3], Any)]),
        with_op(
            Op::Cat { dim: 1 },
            NUMBERS,
            vec![t(&[2, 3, 4], Any), Fixed(DType::F64, Shape::from([2, 1, 4]), Any)],
        ),
    ]
}

pub(crate) fn gather() -> Vec<Sample> {
    let index = |s: &[usize], n| Fixed(DType::I64, Shape::from(s), Index(n));
    vec![
        with_op(Op::Gather { dim: 1 }, ALL, vec![t(&[4, 37], Any), index(&[4, 1], 37)]),
        with_op(Op::Gather { dim: 0 }, ALL, vec![t(&[4, 37], Any), index(&[6, 20], 4)]),
        with_op(Op::Gather { dim: 0 }, ALL, vec![t(&[9], Any), index(&[0], 9)]),
    ]
}

pub(crate) fn gather_backward() -> Vec<Sample> {
    let index = |s: &[usize], n| Fixed(DType::I64, Shape::from(s), Index(n));
    vec![
        with_op(Op::GatherBackward { dim: 1, size: 37 }, FLOATS, vec![t(&[4, 3], Any), index(&[4, 3], 37)]),
        with_op(Op::GatherBackward { dim: 0, size: 4 }, FLOATS, vec![t(&[9, 2], Any), index(&[9, 2], 4)]),
    ]
}

pub(crate) fn full() -> Vec<Sample> {
    let mut samples = Vec::new();
    for dtype in DType::ALL {
        for shape in UNARY_SHAPES {
            let op = Op::Full { shape: Shape::from(*shape), dtype, device: Device::Cpu };
            samples.push(with_op(op, &[DType::F32], vec![Number(Scalar::Int(1))]));
        }
    }
    samples
}

pub(crate) fn arange() -> Vec<Sample> {
    let op = |len, dtype| Op::Arange { len, dtype, device: Device::Cpu };
    vec![
        with_op(op(37, DType::I64), &[DType::F32], vec![Number(Scalar::Int(-3)), Number(Scalar::Int(2))]),
        with_op(
            op(19, DType::F32),
            &[DType::F32],
            vec![Number(Scalar::Float(0.5)), Number(Scalar::Float(0.25))],
        ),
        with_op(op(300, DType::U8), &[DType::F32], vec![Number(Scalar::Int(-3)), Number(Scalar::Int(2))]),
        with_op(
            op(19, DType::F16),
            &[DType::F32],
            vec![Number(Scalar::Float(0.5)), Number(Scalar::Float(0.3))],
        ),
        with_op(op(0, DType::F64), &[DType::F32], vec![Number(Scalar::Int(0)), Number(Scalar::Int(1))]),
        with_op(
            op(5, DType::F64),
            &[DType::F32],
            vec![Number(Scalar::Float(1.5)), Number(Scalar::Float(-0.5))],
        ),
    ]
}

fn losses(op: fn(Reduction, i64) -> Op) -> Vec<Sample> {
    let target = |s: &[usize], n| Fixed(DType::I64, Shape::from(s), Index(n));
    let mut samples = Vec::new();
    for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
        samples.push(with_op(op(reduction, -100), FLOATS, vec![t(&[5, 10], Any), target(&[5], 10)]));
        samples.push(with_op(op(reduction, 2), FLOATS, vec![t(&[33, 3], Any), target(&[33], 3)]));
        samples.push(with_op(op(reduction, -100), FLOATS, vec![t(&[7], Any), target(&[], 7)]));
    }
    samples
}

pub(crate) fn nll_loss() -> Vec<Sample> {
    losses(|reduction, ignore_index| Op::NllLoss { reduction, ignore_index })
}

pub(crate) fn cross_entropy() -> Vec<Sample> {
    losses(|reduction, ignore_index| Op::CrossEntropy { reduction, ignore_index })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Ty;

    #[test]
    fn every_sample_has_a_type() {
        for row in Op::ROWS {
            for sample in row.sample_calls() {
                for &dtype in sample.dtypes {
                    let tys: Vec<Ty> = sample
                        .args
                        .iter()
                        .map(|arg| match arg {
                            Tensor(shape, _) => Ty::tensor(dtype, shape),
                            Fixed(dtype, shape, _) => Ty::tensor(*dtype, shape),
                            Number(x) => Ty::Scalar(x.kind()),
                        })
                        .collect();
                    let result = sample.op.infer(&tys);
                    assert!(result.is_ok(), "{} {tys:?}: {}", row.name, result.unwrap_err());
                }
            }
        }
    }
}
