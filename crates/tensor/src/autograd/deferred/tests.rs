//! Formulas give the bits of their ops run one after the other: every row and every gradient, in every dtype and
//! layout.

use std::cell::Cell;

use kiln_ir::{Class, DType, Domain, Loc, Op, SampleArg, Value};

use crate::autograd::EagerEmit;
use crate::dispatch::arg_tys;
use crate::hook::{Arg, Output};
use crate::{Result, Tensor, no_grad, run_op};

thread_local! {
    static OP_BY_OP: Cell<bool> = const { Cell::new(false) };
}

pub(super) fn op_by_op() -> bool {
    OP_BY_OP.get()
}

/// Numbers that are the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn float(&mut self, domain: Domain, special: bool) -> f64 {
        let x = (self.next() % 4001) as f64 / 1000.0 - 2.0;
        match domain {
            Domain::Any if special && self.next().is_multiple_of(16) => {
                [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0, 1e-40, 3e38][self.next() as usize % 7]
            }
            Domain::Any => x * 3.0,
            Domain::Positive => x.abs() + 0.25,
            Domain::NonZero => x + 0.25f64.copysign(x),
            Domain::Between(low, high) => low + (high - low) * (x + 2.0) / 4.0,
            Domain::Index(bound) | Domain::Distinct(bound) => (self.next() % bound.max(1) as u64) as f64,
        }
    }
}

/// How an operand lies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lies {
    Dense,
    Transposed,
    Gaps,
    Broadcast,
}

fn tensor(
    numbers: &mut Numbers,
    shape: &[usize],
    dtype: DType,
    domain: Domain,
    lies: Lies,
) -> Result<Tensor> {
    let mut dense = |shape: &[usize]| -> Result<Tensor> {
        let n: usize = shape.iter().product();
        if let Domain::Distinct(bound) = domain {
            let all: Vec<i64> = (0..n).map(|i| (i % bound.max(1)) as i64).collect();
            return Tensor::from_slice(&all)?.reshape(shape)?.to_dtype(dtype);
        }
        let all: Vec<f64> = (0..n).map(|_| numbers.float(domain, dtype.is_float())).collect();
        Tensor::from_slice(&all)?.reshape(shape)?.to_dtype(dtype)
    };
    let Some((&last, lead)) = shape.split_last() else { return dense(shape) };
    match lies {
        Lies::Transposed => {
            let turned: Vec<usize> = shape.iter().rev().copied().collect();
            let order: Vec<i64> = (0..shape.len() as i64).rev().collect();
            dense(&turned)?.permute(&order[..])
        }
        Lies::Gaps => {
            let mut wide = lead.to_vec();
            wide.push(2 * last);
            dense(&wide)?.slice(-1, 0, 2 * last as i64, 2)
        }
        Lies::Broadcast => {
            let mut one = lead.to_vec();
            one.push(last.min(1));
            dense(&one)?.expand(shape)
        }
        Lies::Dense => dense(shape),
    }
}

/// A result, its elements exactly.
fn bits(tensor: &Tensor) -> Result<(DType, Vec<usize>, Vec<u64>)> {
    let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
    let elements = if dtype.is_float() {
        let wide = tensor.to_dtype(DType::F64)?.to_vec::<f64>()?;
        // Which NaN it is depends on how vectors are cut.
        wide.into_iter().map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect()
    } else {
        tensor.to_dtype(DType::I64)?.to_vec::<i64>()?.into_iter().map(|x| x as u64).collect()
    };
    Ok((dtype, shape, elements))
}

type Outcome = std::result::Result<Vec<Option<(DType, Vec<usize>, Vec<u64>)>>, String>;

/// The result of a call, in the other mode too, and the gradients of its operands.
fn outcome(op: &Op, args: &[(SampleArg, Option<Tensor>)], with_gradients: bool) -> Outcome {
    let run = || -> Result<Vec<Option<_>>> {
        let fresh = |tensor: &Tensor| -> Result<Tensor> {
            let leaf = tensor.detach()?;
            if leaf.dtype().is_float() && with_gradients {
                leaf.requires_grad_(true)?;
            }
            Ok(leaf)
        };
        let leaves: Vec<Option<Tensor>> =
            args.iter().map(|(_, t)| t.as_ref().map(fresh).transpose()).collect::<Result<_>>()?;
        let operands: Vec<Arg<'_>> = args
            .iter()
            .zip(&leaves)
            .map(|((arg, _), leaf)| match (arg, leaf) {
                (SampleArg::Number(x), _) => Arg::Number(*x),
                (_, Some(leaf)) => Arg::Tensor(leaf),
                _ => unreachable!("tensors were made"),
            })
            .collect();
        let guard = (!with_gradients).then(no_grad);
        let Output::Tensor(y) = run_op(op, &operands)? else { return Ok(Vec::new()) };
        drop(guard);
        let mut all = vec![Some(bits(&y)?)];
        if with_gradients && y.requires_grad() {
            let g = tensor(&mut Numbers(7), &y.shape(), y.dtype(), Domain::Any, Lies::Dense)?;
            y.backward_with(Some(&g), false)?;
            for leaf in leaves.iter().flatten() {
                all.push(leaf.grad().map(|grad| bits(&grad)).transpose()?);
            }
        }
        Ok(all)
    };
    run().map_err(|error| error.to_string())
}

fn compare(op: &Op, args: &[(SampleArg, Option<Tensor>)], what: &dyn Fn() -> String) {
    for with_gradients in [false, true] {
        OP_BY_OP.set(true);
        let expected = outcome(op, args, with_gradients);
        OP_BY_OP.set(false);
        let got = outcome(op, args, with_gradients);
        if got != expected {
            let differences = match (&got, &expected) {
                (Ok(got), Ok(expected)) => {
                    let pairs = got.iter().zip(expected).map(|(a, b)| match (a, b) {
                        (Some(a), Some(b)) => {
                            let at = a.2.iter().zip(&b.2).position(|(a, b)| a != b);
                            format!("{:?} {:?} / {:?} {:?}, first at {at:?}", a.0, a.1, b.0, b.1)
                        }
                        _ => format!("{} / {}", a.is_some(), b.is_some()),
                    });
                    pairs.collect::<Vec<_>>().join("; ")
                }
                _ => format!("{:?} / {:?}", got.as_ref().err(), expected.as_ref().err()),
            };
            panic!("{}, gradients: {with_gradients}: {differences}", what());
        }
    }
}

/// Rows whose results depend on nothing but their operands.
fn rows() -> impl Iterator<Item = &'static kiln_ir::Row> {
    Op::ROWS.iter().filter(|row| !matches!(row.class, Class::Random | Class::Custom | Class::Constant))
}

#[test]
fn formulas_are_their_ops_on_samples() {
    for row in rows() {
        for sample in row.sample_calls() {
            for &dtype in sample.dtypes {
                let mut numbers = Numbers(row.name.len() as u64);
                let layouts: &[Lies] = match row.class {
                    Class::Pointwise => &[Lies::Dense, Lies::Transposed, Lies::Gaps, Lies::Broadcast],
                    _ => &[Lies::Dense, Lies::Transposed],
                };
                for &lies in layouts {
                    let args: Vec<_> = sample
                        .args
                        .iter()
                        .map(|arg| {
                            let made = match arg {
                                SampleArg::Tensor(shape, domain) => Some((dtype, shape, *domain)),
                                SampleArg::Fixed(dtype, shape, domain) => Some((*dtype, shape, *domain)),
                                SampleArg::Number(_) => None,
                            };
                            let made = made.map(|(dtype, shape, domain)| {
                                tensor(&mut numbers, shape, dtype, domain, lies).unwrap()
                            });
                            (arg.clone(), made)
                        })
                        .collect();
                    compare(&sample.op, &args, &|| {
                        format!("{:?} of {:?} {dtype:?} {lies:?}", sample.op, sample.args)
                    });
                }
            }
        }
    }
}

/// A row that is a scalar function as well computes what its decomposition does. (gelu's function is more exact, and
/// lerp's decomposition takes a number from 1 in double precision.)
#[test]
fn functions_are_their_formulas() {
    let differs = |row: &kiln_ir::Row| matches!(row.name, "gelu" | "lerp");
    for row in rows().filter(|row| row.function.is_some() && row.decompose.is_some() && !differs(row)) {
        for sample in row.sample_calls() {
            for &dtype in sample.dtypes {
                let mut numbers = Numbers(row.name.len() as u64);
                let mut made = Vec::new();
                for arg in &sample.args {
                    made.push(match arg {
                        SampleArg::Tensor(shape, domain) => {
                            Some(tensor(&mut numbers, shape, dtype, *domain, Lies::Dense).unwrap())
                        }
                        SampleArg::Fixed(dtype, shape, domain) => {
                            Some(tensor(&mut numbers, shape, *dtype, *domain, Lies::Dense).unwrap())
                        }
                        SampleArg::Number(_) => None,
                    });
                }
                let args: Vec<Arg<'_>> = sample
                    .args
                    .iter()
                    .zip(&made)
                    .map(|(arg, made)| match (arg, made) {
                        (SampleArg::Number(x), _) => Arg::Number(*x),
                        (_, Some(tensor)) => Arg::Tensor(tensor),
                        _ => unreachable!("tensors were made"),
                    })
                    .collect();
                // Integers that are divided by zero.
                let Ok(Output::Tensor(got)) = run_op(&sample.op, &args) else { continue };
                let mut cx = EagerEmit::new(false, Loc::UNKNOWN);
                let tys = arg_tys(&args).unwrap();
                if row.prim.is_some_and(|is_prim| is_prim(&sample.op, &tys)) {
                    continue;
                }
                let values: Vec<Value> = args.iter().zip(&tys).map(|(arg, ty)| cx.arg(arg, ty)).collect();
                let parts = sample.op.decompose(&mut cx, &values).unwrap().unwrap();
                let expected = cx.take(parts[0]).unwrap();
                assert_eq!(
                    bits(&got).unwrap(),
                    bits(&expected).unwrap(),
                    "{:?} {dtype:?} {:?}",
                    sample.op,
                    sample.args
                );
            }
        }
    }
}

/// Shapes that take several blocks, with tails, and operands that are broadcast against one another.
#[test]
fn formulas_are_their_ops_in_many_blocks() {
    let shapes: [&[&[usize]]; 4] = [
        &[&[67, 71], &[67, 71], &[67, 71]],
        &[&[67, 71], &[71], &[67, 1]],
        &[&[1, 71], &[67, 1], &[]],
        &[&[4099], &[1], &[4099]],
    ];
    for row in rows().filter(|row| row.class == Class::Pointwise) {
        let Some(sample) = row
            .sample_calls()
            .into_iter()
            .find(|sample| sample.args.iter().any(|arg| !matches!(arg, SampleArg::Number(_))))
        else {
            continue;
        };
        for &dtype in sample.dtypes {
            for (turn, shapes) in shapes.iter().enumerate() {
                for lies in [Lies::Dense, Lies::Transposed, Lies::Gaps, Lies::Broadcast] {
                    let mut numbers = Numbers(turn as u64);
                    let mut next = 0;
                    let mut args = Vec::new();
                    for arg in &sample.args {
                        let (dtype, domain) = match arg {
                            SampleArg::Tensor(_, domain) => (dtype, *domain),
                            SampleArg::Fixed(dtype, _, domain) => (*dtype, *domain),
                            SampleArg::Number(_) => {
                                args.push((arg.clone(), None));
                                continue;
                            }
                        };
                        let shape = shapes[next % 3];
                        next += 1;
                        // Dense beside others, too.
                        let lies = if next == 2 && lies == Lies::Gaps { Lies::Dense } else { lies };
                        args.push((
                            arg.clone(),
                            Some(tensor(&mut numbers, shape, dtype, domain, lies).unwrap()),
                        ));
                    }
                    compare(&sample.op, &args, &|| format!("{:?} {dtype:?} {shapes:?} {lies:?}", sample.op));
                }
            }
        }
    }
}

/// A power with one exponent for all is the power with as many exponents.
#[test]
fn powers_are_powers() {
    let numbers = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e-40, -1e-40, 3e38, -3e38, 1e-45, 0.3, 7e12];
    let special = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
    let x: Vec<f64> = numbers.iter().chain(&special).copied().collect();
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let x = Tensor::from_slice(&x).unwrap().to_dtype(dtype).unwrap();
        for exponent in [0.0, 1.0, 2.0, 3.0, 0.5, -1.0, 1.7] {
            let by_number = x.pow(exponent).unwrap();
            let all = Tensor::full_of(x.shape(), exponent, dtype, &crate::Device::Cpu).unwrap();
            // 1.7 is no half, and a number isn't rounded.
            if exponent != 1.7 || dtype.computing() == dtype {
                assert_eq!(
                    bits(&by_number).unwrap(),
                    bits(&x.pow(&all).unwrap()).unwrap(),
                    "{dtype:?} {exponent}"
                );
            }
        }
    }
}
