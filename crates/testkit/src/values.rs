//! Random values of a given type, ordinary or special, and the table's samples as programs.

use kiln_ir::{
    DType, Domain, Emit, Graph, Result, Sample, SampleArg, Scalar, ScalarKind, TensorTy, Ty, bf16, f16,
};

use crate::{Argument, Array, Precision, Program, Rng};
use kiln_reference::round;

/// A random tensor whose elements lie in a domain.
pub fn random_array(rng: &mut Rng, ty: &TensorTy, domain: Domain) -> Array {
    let away = |x: f64| if x < 0.0 { x - 0.25 } else { x + 0.25 };
    let distinct = match domain {
        Domain::Distinct(bound) => rng.permutation(bound),
        _ => Vec::new(),
    };
    let array = match (ty.dtype, domain) {
        (DType::I64, Domain::Distinct(bound)) => {
            Array::ints(DType::I64, &ty.shape, |i| distinct[i % bound] as i64)
        }
        (DType::Bool, _) => Array::ints(DType::Bool, &ty.shape, |_| rng.below(2) as i64),
        (dtype, domain) if !dtype.is_float() => Array::ints(dtype, &ty.shape, |_| {
            dtype.wrap(match domain {
                Domain::Any => rng.below(9) as i64 - 4,
                Domain::Positive => rng.below(4) as i64 + 1,
                Domain::NonZero => (rng.below(4) as i64 + 1) * if rng.one_in(2) { -1 } else { 1 },
                Domain::Between(low, high) => {
                    let (low, high) = (low.ceil() as i64, high.floor() as i64);
                    low + rng.below((high - low + 1).max(1) as usize) as i64
                }
                Domain::Index(bound) | Domain::Distinct(bound) => rng.below(bound) as i64,
            })
        }),
        (dtype, domain) => Array::floats(dtype, &ty.shape, |_| {
            let x = match domain {
                Domain::Any => rng.normal(),
                Domain::Positive => away(rng.normal().abs()),
                Domain::NonZero => away(rng.normal()),
                Domain::Between(low, high) => {
                    low + (high - low) * rng.below(1 << 20) as f64 / f64::from(1 << 20)
                }
                Domain::Index(bound) | Domain::Distinct(bound) => rng.below(bound) as f64,
            };
            round(x, dtype, Precision::Rounded)
        }),
    };
    Array { device: ty.device, ..array }
}

/// A random value of any type.
pub fn random_argument(rng: &mut Rng, ty: &Ty) -> Argument {
    match ty {
        Ty::Tensor(t) => random_array(rng, t, Domain::Any).into(),
        Ty::List(items) => Argument::List(items.iter().map(|t| random_array(rng, t, Domain::Any)).collect()),
        Ty::Scalar(ScalarKind::Bool) => Argument::Scalar(Scalar::Bool(rng.one_in(2))),
        Ty::Scalar(ScalarKind::Int) => Argument::Scalar(Scalar::Int(rng.below(9) as i64 - 4)),
        Ty::Scalar(ScalarKind::Float) => Argument::Scalar(Scalar::Float((rng.normal() * 8.0).round() / 8.0)),
    }
}

/// A random value full of the numbers that break careless rewrites: NaN, infinities, both zeros, the
/// smallest and largest floats and integers.
pub fn special_argument(rng: &mut Rng, ty: &Ty) -> Argument {
    let array = |rng: &mut Rng, t: &TensorTy| {
        let plain = random_array(rng, t, Domain::Any);
        match t.dtype {
            DType::Bool => plain,
            dtype if !dtype.is_float() => {
                let bits = dtype.size() as u32 * 8;
                // As signed and as unsigned: the ends of the range, wrapped to it.
                let top = 1i64 << (bits - 1);
                let special = [top, top.wrapping_sub(1), -1, 0, 1, (1 << 53) + 1];
                let special = special.map(|x| dtype.wrap(x));
                let array = Array::ints(t.dtype, &t.shape, |i| {
                    if rng.one_in(2) { *rng.pick(&special) } else { plain.int(i) }
                });
                Array { device: t.device, ..array }
            }
            dtype => {
                let (tiny, huge) = match dtype {
                    DType::F16 => (f16::from_bits(1).to_f64(), f16::MAX.to_f64()),
                    DType::BF16 => (bf16::from_bits(1).to_f64(), bf16::MAX.to_f64()),
                    DType::F32 => (f64::from(f32::from_bits(1)), f64::from(f32::MAX)),
                    _ => (f64::from_bits(1), f64::MAX),
                };
                let special =
                    [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, tiny, -tiny, huge, 1.0, -1.0];
                let array = Array::floats(dtype, &t.shape, |i| {
                    if rng.one_in(2) { *rng.pick(&special) } else { plain.float(i) }
                });
                Array { device: t.device, ..array }
            }
        }
    };
    match ty {
        Ty::Tensor(t) => array(rng, t).into(),
        Ty::List(items) => Argument::List(items.iter().map(|t| array(rng, t)).collect()),
        Ty::Scalar(ScalarKind::Float) => {
            let special = [f64::NAN, f64::INFINITY, -0.0, 0.0, 0.5, -3.25];
            Argument::Scalar(Scalar::Float(*rng.pick(&special)))
        }
        other => random_argument(rng, other),
    }
}

/// A sample call of the op table as a program of one node.
pub fn sample_program(rng: &mut Rng, sample: &Sample, dtype: DType) -> Result<Program> {
    let mut graph = Graph::new();
    let mut inputs = Vec::new();
    let mut args = Vec::new();
    for arg in &sample.args {
        let input: Argument = match arg {
            SampleArg::Tensor(shape, domain) => {
                random_array(rng, &TensorTy::new(dtype, shape), *domain).into()
            }
            SampleArg::Fixed(dtype, shape, domain) => {
                random_array(rng, &TensorTy::new(*dtype, shape), *domain).into()
            }
            SampleArg::Number(number) => Argument::Scalar(*number),
        };
        args.push(graph.input(input.ty()));
        inputs.push(input);
    }
    graph.outputs = graph.emit(sample.op.clone(), &args)?.to_vec();
    Ok(Program { graph, inputs })
}
