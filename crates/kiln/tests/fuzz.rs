//! Random calls of every row, right and wrong: each ends in a result of the type that the row's rule says or in
//! an error that names the op, never in a panic; and whatever happens the operands stay as they were.

#![allow(clippy::unwrap_used)] // a test may panic

use std::panic::{AssertUnwindSafe, catch_unwind};

use kiln::Error;
use kiln::ir::{Class, Op, Row, SampleArg, Scalar, Ty};
use kiln::tensor::{Arg, DType, Output, Tensor, run_op};
use kiln_testkit::Rng;

/// Calls; `KILN_FUZZ` asks for more.
const CALLS: usize = 60_000;

/// Larger results (of expand) are not looked at.
const MOST_ELEMENTS: usize = 1 << 20;

/// Whether a result that could be computed can always be differentiated. This row's gradient is a scatter that
/// checks how many places there are.
fn can_go_back(op: &Op) -> bool {
    !matches!(op, Op::MaskedScatterBackward { .. })
}

fn shape(rng: &mut Rng) -> Vec<usize> {
    let rank = rng.below(5);
    (0..rank).map(|_| *rng.pick(&[0, 1, 1, 2, 3, 4, 5, 7, 16])).collect()
}

/// A tensor of any dtype, shape and layout.
fn tensor(rng: &mut Rng, dtype: DType, shape: &[usize]) -> Result<Tensor, Error> {
    let n: usize = shape.iter().product();
    let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1e300, -1e-320, 1e9, -3.0];
    let odd = rng.one_in(4);
    let floats = (0..n).map(|_| if odd && rng.one_in(3) { *rng.pick(&special) } else { rng.normal() });
    let base = if dtype.is_float() {
        Tensor::from_vec(floats.collect::<Vec<f64>>(), shape)?
    } else {
        let special = [i64::MIN, i64::MAX, -1, 0, 1, 1 << 40];
        let ints =
            (0..n).map(|_| if odd && rng.one_in(3) { *rng.pick(&special) } else { rng.below(6) as i64 - 1 });
        Tensor::from_vec(ints.collect::<Vec<i64>>(), shape)?
    };
    let base = base.to_dtype(dtype)?;
    let rank = shape.len();
    match rng.below(5) {
        0 if rank > 1 => base.transpose(0, rank as i64 - 1),
        1 if rank > 0 && shape[0] > 1 => base.slice(0, 1, i64::MAX, 2),
        2 if rank > 0 => {
            let mut wider = vec![2];
            wider.extend(shape);
            base.expand(&wider[..])
        }
        _ => Ok(base),
    }
}

fn number(rng: &mut Rng) -> Scalar {
    match rng.below(8) {
        0 => Scalar::Bool(rng.one_in(2)),
        1 => Scalar::Int(*rng.pick(&[i64::MIN, i64::MAX, -1, 0, 1, 2, 1 << 40])),
        2 => Scalar::Float(*rng.pick(&[f64::NAN, f64::INFINITY, -0.0, 1e300, -1e-300, 0.5])),
        3 | 4 => Scalar::Int(rng.below(7) as i64 - 3),
        _ => Scalar::Float(rng.normal()),
    }
}

/// Another text for an attribute: numbers in it are moved, now and then to absurd places.
fn disturb(rng: &mut Rng, text: &str) -> String {
    let other = |rng: &mut Rng| match rng.below(12) {
        0 => 1usize << 40,
        1 => usize::MAX >> 1,
        2 => 64,
        _ => rng.below(6),
    };
    if let Some(inner) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
        let mut parts: Vec<String> =
            inner.split(',').map(|p| p.trim().to_string()).filter(|p| !p.is_empty()).collect();
        match rng.below(4) {
            0 => parts.push(other(rng).to_string()),
            1 => drop(parts.pop()),
            _ => {
                for part in &mut parts {
                    if rng.one_in(2) {
                        *part = other(rng).to_string();
                    }
                }
            }
        }
        return format!("[{}]", parts.join(", "));
    }
    match text {
        "true" => "false".into(),
        "false" => "true".into(),
        _ if text.parse::<i64>().is_ok() => other(rng).to_string(),
        _ if DType::from_name(text).is_some() => rng.pick(&DType::ALL).name().into(),
        _ => text.into(),
    }
}

/// A call near one of the row's samples, or far from it.
fn call(rng: &mut Rng, row: &Row) -> Option<(Op, Vec<Result<Tensor, Scalar>>)> {
    let samples = row.sample_calls();
    if samples.is_empty() {
        return None;
    }
    let sample = rng.pick(&samples).clone();
    let wild = rng.one_in(2);
    let op = if wild && rng.one_in(2) {
        let attributes: Vec<(&str, String)> = sample.op.attributes();
        let texts: Vec<(&str, String)> =
            attributes.into_iter().map(|(name, text)| (name, disturb(rng, &text))).collect();
        let mut find = |name: &str| texts.iter().find(|(n, _)| *n == name).map(|(_, t)| t.clone());
        Op::parse(row.name, &mut find)?
    } else {
        sample.op.clone()
    };
    let dtype = if wild { *rng.pick(&DType::ALL) } else { *rng.pick(sample.dtypes) };
    let mut args = Vec::new();
    for arg in &sample.args {
        let random_shape = wild && rng.one_in(3);
        let of = |rng: &mut Rng, dtype: DType, known: &[usize]| {
            let dtype = if wild && rng.one_in(6) { *rng.pick(&DType::ALL) } else { dtype };
            let shape = if random_shape { shape(rng) } else { known.to_vec() };
            tensor(rng, dtype, &shape).unwrap()
        };
        args.push(match arg {
            _ if wild && rng.one_in(12) => Err(number(rng)),
            SampleArg::Tensor(shape, _) => Ok(of(rng, dtype, shape)),
            SampleArg::Fixed(dtype, shape, _) => Ok(of(rng, *dtype, shape)),
            SampleArg::Number(x) => Err(if wild { number(rng) } else { *x }),
        });
    }
    if wild && rng.one_in(20) {
        args.pop();
    }
    Some((op, args))
}

/// What a tensor's elements are, bit for bit.
fn contents(x: &Tensor) -> Vec<u64> {
    if x.dtype().is_float() {
        x.to_vec_cast::<f64>().unwrap().into_iter().map(f64::to_bits).collect()
    } else {
        x.to_vec_cast::<i64>().unwrap().into_iter().map(|i| i as u64).collect()
    }
}

#[test]
fn random_calls() {
    let calls = std::env::var("KILN_FUZZ").ok().and_then(|n| n.parse().ok()).unwrap_or(CALLS);
    let rows: Vec<&Row> = Op::ROWS
        .iter()
        .filter(|row| !matches!(row.class, Class::List | Class::Constant | Class::Custom))
        .collect();
    let mut rng = Rng::new(2024);
    let (mut fine, mut refused, mut failures) = (0usize, 0usize, Vec::new());
    std::panic::set_hook(Box::new(|_| {}));
    for round in 0..calls {
        let row = rows[round % rows.len()];
        let Some((op, args)) = call(&mut rng, row) else { continue };
        let before: Vec<Vec<u64>> = args.iter().flatten().map(contents).collect();
        let with_grad = rng.one_in(3);
        if with_grad {
            for t in args.iter().flatten().filter(|t| t.dtype().is_float() && t.is_leaf()) {
                t.requires_grad_(true).unwrap();
            }
        }
        let operands: Vec<Arg<'_>> = args
            .iter()
            .map(|arg| match arg {
                Ok(tensor) => Arg::Tensor(tensor),
                Err(number) => Arg::Number(*number),
            })
            .collect();
        let tys: Vec<Ty> = args
            .iter()
            .map(|arg| match arg {
                Ok(tensor) => Ty::Tensor(tensor.ty()),
                Err(number) => Ty::Scalar(number.kind()),
            })
            .collect();
        let describe = || {
            let tys: Vec<String> = tys.iter().map(Ty::to_string).collect();
            format!("{} {:?} of {}", op.name(), op.attributes(), tys.join(", "))
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<Option<String>, Error> {
            let expected = op.infer(&tys);
            let result = run_op(&op, &operands);
            Ok(match (result, expected) {
                (Ok(Output::Tensor(y)), Ok(want)) => {
                    let is_number = matches!(want.first(), Some(Ty::Scalar(_)));
                    let same = is_number || want.first() == Some(&Ty::Tensor(y.ty()));
                    let found = y.ty().to_string();
                    if y.numel() <= MOST_ELEMENTS {
                        let _values = contents(&y.detach()?);
                    }
                    if with_grad && y.requires_grad() && y.numel() <= MOST_ELEMENTS && can_go_back(&op) {
                        y.sum()?.backward()?;
                    }
                    fine += 1;
                    (!same).then(|| format!("has type {found} instead of {want:?}"))
                }
                (Ok(_), Ok(_)) => Some("made a list".into()),
                (Ok(_), Err(why)) => Some(format!("ran, though its rule says: {why}")),
                (Err(error), _) => {
                    refused += 1;
                    let text = error.to_string();
                    // Divisions of integers go by the name of what was asked for.
                    let named = text.contains(op.name()) || matches!(op, Op::IntegerDivision { .. });
                    (!named).then(|| format!("the error does not name it: {text}"))
                }
            })
        }));
        match outcome {
            Ok(Ok(None)) => {}
            Ok(Ok(Some(problem))) => failures.push(format!("{}: {problem}", describe())),
            Ok(Err(error)) => failures.push(format!("{}: its backward: {error}", describe())),
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .cloned()
                    .or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
                failures.push(format!("{}: panicked: {}", describe(), text.unwrap_or_default()));
            }
        }
        let after: Vec<Vec<u64>> = args.iter().flatten().map(contents).collect();
        if before != after {
            failures.push(format!("{}: an operand was changed", describe()));
        }
        if failures.len() > 30 {
            break;
        }
    }
    drop(std::panic::take_hook());
    failures.sort();
    failures.dedup();
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
    assert!(fine > calls / 4 && refused > calls / 20, "{fine} ran, {refused} refused");
}
