//! Kernels of rows that also have a decomposition give what that gives, bit by bit: every dtype, several layouts.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_ir::{Class, Domain, Loc, Op, Sample, SampleArg, Shape, Ty};
use kiln_tensor::autograd::EagerEmit;
use kiln_tensor::hook::{Arg, Output};
use kiln_tensor::{DType, Device, Result, Tensor, run_op};

/// How operands lie in memory.
#[derive(Clone, Copy, Debug)]
enum Lies {
    Dense,
    /// Their dims in the reverse order.
    Turned,
    /// In every other place of each last dim.
    Apart,
}

fn made(shape: &Shape, dtype: DType, domain: Domain, lies: Lies) -> Result<Tensor> {
    let value = |i: usize| match domain {
        Domain::Index(bound) => (i * 7 % bound.max(1)) as f64,
        Domain::Distinct(bound) => (i % bound.max(1)) as f64,
        Domain::Positive => 1.0 + (i % 5) as f64,
        _ if dtype == DType::Bool => (i % 3 % 2) as f64,
        _ => [0.0, -1.5, 2.0, 3.0, -4.0, 0.5, 1.0][i * i % 7],
    };
    let n = shape.numel();
    let dense = |shape: &[usize]| {
        let values: Vec<f64> = (0..n).map(value).collect();
        Tensor::from_vec(values, shape)?.to_dtype(dtype)
    };
    let rank = shape.rank();
    match lies {
        Lies::Turned if rank > 1 => {
            let turned: Vec<usize> = shape.iter().rev().copied().collect();
            let back: Vec<i64> = (0..rank as i64).rev().collect();
            dense(&turned)?.permute(&back[..])
        }
        Lies::Apart if rank > 0 => {
            let pair = [dense(shape)?, dense(shape)?];
            let wide: Vec<usize> = shape
                .iter()
                .enumerate()
                .map(|(d, &size)| if d + 1 == rank { 2 * size } else { size })
                .collect();
            Tensor::stack(pair.each_ref(), -1)?.reshape(&wide[..])?.slice(-1, 0, i64::MAX, 2)
        }
        _ => dense(shape),
    }
}

fn bits(y: &Tensor) -> Result<Vec<u64>> {
    let bits = |x: f64| if x.is_nan() { u64::MAX } else { x.to_bits() };
    Ok(y.to_dtype(DType::F64)?.to_vec::<f64>()?.into_iter().map(bits).collect())
}

fn check(sample: &Sample, dtype: DType, lies: Lies) -> Result<bool> {
    let mut tensors = Vec::new();
    for arg in &sample.args {
        tensors.push(match arg {
            SampleArg::Tensor(shape, domain) => Some(made(shape, dtype, *domain, lies)?),
            SampleArg::Fixed(dtype, shape, domain) => Some(made(shape, *dtype, *domain, lies)?),
            SampleArg::Number(_) => None,
        });
    }
    let args: Vec<Arg<'_>> = sample
        .args
        .iter()
        .zip(&tensors)
        .map(|(arg, tensor)| match (arg, tensor) {
            (_, Some(tensor)) => Arg::Tensor(tensor),
            (SampleArg::Number(x), None) => Arg::Number(*x),
            _ => unreachable!("made above"),
        })
        .collect();
    let tys: Vec<Ty> = args
        .iter()
        .map(|arg| match arg {
            Arg::Tensor(t) => Ty::tensor(t.dtype(), t.shape()),
            Arg::Number(x) => Ty::Scalar(x.kind()),
            Arg::List(_) => unreachable!("no sample has lists"),
        })
        .collect();
    if sample.op.infer(&tys).is_err() {
        return Ok(false);
    }
    let Output::Tensor(by_kernel) = run_op(&sample.op, &args)? else { return Ok(false) };
    let mut cx = EagerEmit::new(false, Loc::UNKNOWN);
    let values: Vec<_> = args.iter().zip(&tys).map(|(arg, ty)| cx.arg(arg, ty)).collect();
    let parts = sample.op.decompose(&mut cx, &values)?.expect("a decomposition");
    let by_parts = cx.take(parts[0])?;
    let what = format!("{:?} of {tys:?}, {lies:?}", sample.op);
    assert_eq!(by_kernel.shape(), by_parts.shape(), "{what}");
    assert_eq!(by_kernel.dtype(), by_parts.dtype(), "{what}");
    assert_eq!(bits(&by_kernel)?, bits(&by_parts)?, "{what}");
    Ok(true)
}

#[test]
fn kernels_give_what_decompositions_give() -> Result<()> {
    let moves = |class| matches!(class, Class::View | Class::Index);
    let computes = ["prod_backward", "nansum"];
    for row in Op::ROWS.iter().filter(|row| row.kernel && row.decompose.is_some()) {
        if !moves(row.class) && !computes.contains(&row.name) {
            continue;
        }
        let mut checked = 0;
        for sample in row.sample_calls() {
            for dtype in DType::ALL {
                for lies in [Lies::Dense, Lies::Turned, Lies::Apart] {
                    checked += usize::from(check(&sample, dtype, lies)?);
                }
            }
        }
        assert!(checked > 0, "{}", row.name);
    }
    Ok(())
}

/// Where the elements of a window meet, the last one stays, as if they were put there one after the other.
#[test]
fn the_last_of_several_in_one_place_stays() -> Result<()> {
    let x = Tensor::zeros([9], &Device::Cpu)?;
    let src = Tensor::from_vec((1..=12).map(|i| i as f32).collect(), [4, 3])?;
    let y = x.as_strided_scatter(&src, &[4, 3], &[2, 1], 0)?;
    assert_eq!(y.to_vec::<f32>()?, [1.0, 2.0, 4.0, 5.0, 7.0, 8.0, 10.0, 11.0, 12.0]);
    let long = Tensor::arange(0, 200_000, &Device::Cpu)?;
    let one =
        Tensor::zeros([2], (DType::I64, &Device::Cpu))?.as_strided_scatter(&long, &[200_000], &[0], 1)?;
    assert_eq!(one.to_vec::<i64>()?, [0, 199_999]);
    Ok(())
}

/// Wherever a copy begins in its page.
#[test]
fn long_copies_are_whole_wherever_they_begin() -> Result<()> {
    let n = 100_000;
    let x = Tensor::arange(0, n, &Device::Cpu)?.to_dtype(DType::F32)?;
    for before in [0, 1, 2, 16, 300, 511, 512, 600] {
        let y = x.pad(&[before, 3], 0.5)?.to_vec::<f32>()?;
        let at = before as usize;
        assert!(y[..at].iter().chain(&y[at + n as usize..]).all(|&y| y == 0.5), "{before}");
        assert!(y[at..at + n as usize].iter().enumerate().all(|(i, &y)| y == i as f32), "{before}");
        let part = x.slice(0, before, n, 1)?.clone_tensor()?.to_vec::<f32>()?;
        assert!(part.iter().zip(at..).all(|(&y, i)| y == i as f32), "{before}");
    }
    Ok(())
}
