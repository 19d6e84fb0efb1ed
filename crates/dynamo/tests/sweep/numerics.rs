//! What compiled pointwise code promises about bits: every pointwise row of the op table on edge values (NaN,
//! infinities, both zeros, subnormal numbers, the largest ones), and random chains of rows, compiled and
//! compared with eager bit for bit.
//!
//! Many calls share a region, so that few kernels are compiled, and the C compiler works little: what is computed
//! does not depend on it.

use kiln_dynamo::{Compile, Numerics};
use kiln_ir::{Class, Op, Sample, SampleArg};
use kiln_tensor::hook::{Arg, Output};
use kiln_tensor::{DType, Result, Scalar, Tensor, run_op};
use kiln_testkit::Rng;

/// Calls that are compiled together.
const TOGETHER: usize = 40;

/// Numbers at which functions have something to get wrong.
const FLOATS: [f64; 30] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    -2.5,
    3.0,
    -7.25,
    f64::NAN,
    f64::INFINITY,
    f64::NEG_INFINITY,
    std::f64::consts::PI,
    0.999_999_9,
    -0.1,
    88.8,
    -104.5,
    1e-3,
    -1e-20,
    1e-40,
    -1e-45,
    6e-8,
    f32::MIN_POSITIVE as f64,
    f32::MAX as f64,
    -65504.0,
    16_777_217.0,
    f64::MIN_POSITIVE,
    5e-324,
    f64::MAX,
];

const INTEGERS: [i64; 14] = [0, 1, -1, 2, -3, 7, 63, 64, -64, 127, 255, (1 << 53) + 1, i64::MAX, i64::MIN];

/// Elements of every operand: all pairs of floats.
const COUNT: usize = FLOATS.len() * FLOATS.len();

/// The edge values of a dtype, in an order of its own for each operand: every value meets every other.
fn edges(dtype: DType, operand: usize) -> Result<Tensor> {
    let at = |i: usize, count: usize| match operand {
        0 => i / count % count,
        1 => i % count,
        _ => (i / count + operand * (i % count) + 3 * operand) % count,
    };
    let numbers = 0..COUNT;
    match dtype {
        DType::Bool => Tensor::from_vec(numbers.map(|i| at(i, 2) == 1).collect(), [COUNT]),
        dtype if dtype.is_float() => {
            Tensor::from_vec(numbers.map(|i| FLOATS[at(i, FLOATS.len())]).collect(), [COUNT])?.to_dtype(dtype)
        }
        dtype => {
            let pick = |i: usize| INTEGERS[at(i, INTEGERS.len())];
            Tensor::from_vec(numbers.map(pick).collect(), [COUNT])?.to_dtype(dtype)
        }
    }
}

/// A tensor, or a number known at run time.
#[derive(Clone)]
enum Operand {
    Tensor(Tensor),
    Number(Scalar),
}

/// One call of a row.
#[derive(Clone)]
struct Call {
    op: Op,
    operands: Vec<Operand>,
}

impl Call {
    fn of(sample: &Sample, dtype: DType) -> Result<Call> {
        let operand = |(i, arg): (usize, &SampleArg)| {
            Ok(match arg {
                SampleArg::Tensor(..) => Operand::Tensor(edges(dtype, i)?),
                SampleArg::Fixed(fixed, ..) => Operand::Tensor(edges(*fixed, i)?),
                SampleArg::Number(number) => Operand::Number(*number),
            })
        };
        let operands = sample.args.iter().enumerate().map(operand).collect::<Result<_>>()?;
        Ok(Call { op: sample.op.clone(), operands })
    }

    /// The same call with another number in the place of each.
    fn with_number(&self, number: f64) -> Call {
        let mut call = self.clone();
        for operand in &mut call.operands {
            if let Operand::Number(Scalar::Float(x)) = operand {
                *x = number;
            }
        }
        call
    }

    fn run(&self) -> Result<Tensor> {
        let arg = |operand| match operand {
            &Operand::Number(x) => Arg::Number(x),
            Operand::Tensor(t) => Arg::Tensor(t),
        };
        let args: Vec<Arg<'_>> = self.operands.iter().map(arg).collect();
        match run_op(&self.op, &args)? {
            Output::Tensor(t) => Ok(t),
            Output::List(_) => unreachable!("no operand is a list"),
        }
    }
}

/// The calls of all pointwise rows in a dtype that eager mode has results for.
fn calls(dtype: DType) -> Result<Vec<Call>> {
    let mut calls: Vec<Call> = Vec::new();
    for row in Op::ROWS.iter().filter(|row| row.class == Class::Pointwise) {
        let mut seen: Vec<Vec<bool>> = Vec::new();
        for sample in row.sample_calls().iter().filter(|s| s.dtypes.contains(&dtype)) {
            // Samples that differ in shapes alone are one here.
            let call = Call::of(sample, dtype)?;
            let kinds: Vec<bool> = call.operands.iter().map(|o| matches!(o, Operand::Tensor(_))).collect();
            let known = calls.iter().any(|other| other.op == call.op) && seen.contains(&kinds);
            if known || call.operands.is_empty() {
                continue;
            }
            // Integers divided by zero have none.
            if call.run().is_ok() {
                let numbers = call.operands.iter().any(|o| matches!(o, Operand::Number(Scalar::Float(_))));
                if numbers && matches!(dtype, DType::F32 | DType::BF16) {
                    calls.extend([-0.0, f64::NAN, f64::INFINITY, 1e-45].map(|x| call.with_number(x)));
                }
                calls.push(call);
            }
            seen.push(kinds);
        }
    }
    Ok(calls)
}

/// Where two tensors differ in a bit; one NaN is as good as another.
fn difference(got: &Tensor, want: &Tensor) -> Result<Option<String>> {
    if got.ty() != want.ty() {
        return Ok(Some(format!("{} instead of {}", got.ty(), want.ty())));
    }
    if !want.dtype().is_float() {
        let (got, want) = (got.to_vec_cast::<i64>()?, want.to_vec_cast::<i64>()?);
        let wrong = (0..want.len()).find(|&i| got[i] != want[i]);
        return Ok(wrong.map(|i| format!("at {i}: {} instead of {}", got[i], want[i])));
    }
    let (got, want) = (got.to_vec_cast::<f64>()?, want.to_vec_cast::<f64>()?);
    let same = |a: f64, b: f64| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    let count = (0..want.len()).filter(|&i| !same(got[i], want[i])).count();
    let wrong = (0..want.len()).find(|&i| !same(got[i], want[i]));
    Ok(wrong.map(|i| format!("{count} differ, at {i}: {:e} instead of {:e}", got[i], want[i])))
}

fn check_edges(compile: &Compile, dtypes: &[DType]) -> Result<()> {
    let mut failures = Vec::new();
    for &dtype in dtypes {
        for calls in calls(dtype)?.chunks(TOGETHER) {
            let want: Vec<Tensor> = calls.iter().map(Call::run).collect::<Result<_>>()?;
            let region = compile.clone().region();
            let got = region.run(|| calls.iter().map(Call::run).collect::<Result<Vec<_>>>())?;
            for ((call, got), want) in calls.iter().zip(&got).zip(&want) {
                if let Some(difference) = difference(got, want)? {
                    let numbers = call.operands.iter().filter_map(|operand| match operand {
                        Operand::Number(x) => Some(x.to_string()),
                        Operand::Tensor(_) => None,
                    });
                    let numbers: Vec<String> = numbers.collect();
                    failures.push(format!("{:?} {numbers:?} on {dtype}: {difference}", call.op));
                }
            }
            let interpreted = region.explain().graphs.iter().find_map(|g| g.interpreted.clone());
            assert_eq!(interpreted, None, "{dtype}");
        }
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
    Ok(())
}

fn quick() -> Compile {
    Compile::new().option("opt_level", 1).unwrap()
}

#[test]
fn edges_of_floats() -> Result<()> {
    check_edges(&quick(), &[DType::F32, DType::F64])
}

/// Kernels of the other narrow dtypes differ in the type only; `KILN_STRESS` asks for them too.
fn chosen<'a>(usual: &'a [DType], all: &'a [DType]) -> &'a [DType] {
    if std::env::var_os("KILN_STRESS").is_some() { all } else { usual }
}

#[test]
fn edges_of_integers() -> Result<()> {
    let all = [DType::I64, DType::Bool, DType::U8, DType::I8, DType::I16, DType::I32];
    check_edges(&quick(), chosen(&all[..2], &all))
}

#[test]
fn strict_edges_of_halves() -> Result<()> {
    let strict = quick().numerics(Numerics::Strict);
    check_edges(&strict, chosen(&[DType::BF16], &[DType::F16, DType::BF16]))
}

/// A chain of pointwise rows: each step takes values made before it.
struct Chain {
    dtype: DType,
    steps: Vec<(Op, Vec<usize>)>,
    inputs: Vec<Tensor>,
}

impl Chain {
    /// Rows that take tensors of one float dtype and give one; with `smooth`, rows whose results depend little on
    /// the last bit of their operands.
    fn random(rng: &mut Rng, dtype: DType, smooth: bool) -> Result<Chain> {
        const SMOOTH: [&str; 12] = [
            "add", "sub", "mul", "tanh", "sigmoid", "gelu", "silu", "maximum", "softplus", "relu", "neg",
            "erf",
        ];
        let mut rows: Vec<(Op, usize)> = Vec::new();
        for row in Op::ROWS.iter().filter(|row| row.class == Class::Pointwise) {
            for sample in row.sample_calls() {
                let tensors = sample.args.iter().all(|arg| matches!(arg, SampleArg::Tensor(..)));
                let fits = tensors && sample.dtypes.contains(&dtype) && !sample.args.is_empty();
                let call = Call::of(&sample, dtype)?;
                if fits
                    && (!smooth || SMOOTH.contains(&row.name))
                    && !rows.iter().any(|(op, count)| *op == sample.op && *count == sample.args.len())
                    && call.run()?.dtype() == dtype
                {
                    rows.push((sample.op.clone(), sample.args.len()));
                }
            }
        }
        let numbers = |rng: &mut Rng| (0..COUNT).map(|_| rng.normal() * 2.0).collect::<Vec<f64>>();
        let mut inputs = Vec::new();
        for i in 0..3 {
            let plain = Tensor::from_vec(numbers(rng), [COUNT])?.to_dtype(dtype)?;
            // A few edges among ordinary numbers: they must not cover everything with NaN.
            let rare = Tensor::from_vec((0..COUNT).map(|_| !smooth && rng.one_in(20)).collect(), [COUNT])?;
            inputs.push(rare.where_self(&edges(dtype, i)?, &plain)?);
        }
        let mut steps = Vec::new();
        for step in 0..14 {
            let (op, count) = rng.pick(&rows).clone();
            // Later values are likelier, so that chains get deep.
            let known = inputs.len() + step;
            let mut operands: Vec<usize> =
                (0..count).map(|_| rng.below(known).max(rng.below(known))).collect();
            if let Op::Copysign {} = op {
                // Which sign a computed NaN has is nobody's promise.
                operands[1] = rng.below(inputs.len());
            }
            steps.push((op, operands));
        }
        Ok(Chain { dtype, steps, inputs })
    }

    /// The last few values, computed in a dtype.
    fn run(&self, dtype: DType) -> Result<Vec<Tensor>> {
        let mut values = self.inputs.clone();
        if dtype != self.dtype {
            values = values.iter().map(|x| x.to_dtype(dtype)).collect::<Result<_>>()?;
        }
        for (op, operands) in &self.steps {
            let operands = operands.iter().map(|&at| Operand::Tensor(values[at].clone())).collect();
            values.push(Call { op: op.clone(), operands }.run()?);
        }
        Ok(values.split_off(values.len() - 3))
    }
}

#[test]
fn strict_chains_are_eagers_bits() -> Result<()> {
    let mut rng = Rng::new(7);
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        for program in 0..4 {
            let chain = Chain::random(&mut rng, dtype, false)?;
            let want = chain.run(dtype)?;
            let got = quick().numerics(Numerics::Strict).region().run(|| chain.run(dtype))?;
            for (got, want) in got.iter().zip(&want) {
                let difference = difference(got, want)?;
                assert_eq!(difference, None, "{dtype}, program {program}: {:?}", chain.steps);
            }
        }
    }
    Ok(())
}

/// The largest distance from exact values, over the largest of them.
fn error(got: &Tensor, exact: &Tensor) -> Result<f64> {
    let (got, exact) = (got.to_vec_cast::<f64>()?, exact.to_vec_cast::<f64>()?);
    let largest = exact.iter().fold(0.0f64, |a, x| a.max(x.abs()));
    let pairs = got.iter().zip(&exact);
    Ok(pairs.fold(0.0f64, |a, (x, y)| a.max((x - y).abs())) / largest.max(f64::MIN_POSITIVE))
}

/// By default halves are rounded less often than eager rounds them: not the same bits, and no larger errors.
#[test]
fn chains_of_halves_are_nearer_to_the_exact_result_than_eager() -> Result<()> {
    let mut rng = Rng::new(3);
    let (mut compiled, mut eager) = (0.0, 0.0);
    for dtype in [DType::F16, DType::BF16] {
        for _ in 0..4 {
            let chain = Chain::random(&mut rng, dtype, true)?;
            let (want, exact) = (chain.run(dtype)?, chain.run(DType::F64)?);
            let got = quick().region().run(|| chain.run(dtype))?;
            for ((got, want), exact) in got.iter().zip(&want).zip(&exact) {
                let (own, allowed) = (error(got, exact)?, 2.0 * error(want, exact)? + 1e-6);
                assert!(own <= allowed, "{dtype}: {own:e} > {allowed:e}: {:?}", chain.steps);
                compiled += own;
                eager += error(want, exact)?;
            }
        }
    }
    assert!(compiled < 0.8 * eager, "{compiled:e} and {eager:e}");
    Ok(())
}

/// The forced instruction sets give the same bits, and so do kernels with the compiler's checks in them.
#[test]
fn other_instruction_sets_and_checked_kernels() -> Result<()> {
    let mut rng = Rng::new(11);
    for (name, value) in [("isa", "avx2"), ("isa", "plain"), ("sanitize", "undefined")] {
        for dtype in [DType::F32, DType::F16] {
            let chain = Chain::random(&mut rng, dtype, false)?;
            let want = chain.run(dtype)?;
            let region = quick().numerics(Numerics::Strict).option(name, value)?.region();
            for (got, want) in region.run(|| chain.run(dtype))?.iter().zip(&want) {
                assert_eq!(difference(got, want)?, None, "{name} {value}, {dtype}: {:?}", chain.steps);
            }
            assert!(region.explain().graphs.iter().all(|graph| graph.interpreted.is_none()));
        }
    }
    Ok(())
}
