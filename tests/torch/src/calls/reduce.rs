//! Reductions, scans, orders and softmax.

use kiln::ir::Scalar;
use kiln::{DType, Tensor};

use super::{Outputs, Run, one, two};
use crate::args::{Args, Outcome, Value, unmapped};

/// A reduction over given dims or all of them, of x converted first where a dtype is asked for.
fn reduced(
    a: &Args,
    all: fn(&Tensor) -> kiln::Result<Tensor>,
    by_dim: fn(&Tensor, Vec<i64>, bool) -> kiln::Result<Tensor>,
) -> Outcome<Outputs> {
    let x = match a.dtype()? {
        Some(dtype) => a.x()?.to_dtype(dtype)?,
        None => a.x()?.clone(),
    };
    let (dims, keepdim) = (a.ints_or(1, "dim")?, a.flag(2, "keepdim", false)?);
    let everything = || (0..x.rank() as i64).collect();
    as_asked(
        a,
        match dims {
            Some(dims) if !dims.is_empty() => by_dim(&x, dims, keepdim),
            _ if keepdim => by_dim(&x, everything(), true),
            _ => all(&x),
        },
    )
}

/// PyTorch says the truth about u8 in u8, for the sake of masks of old.
fn truth(a: &Args, outputs: Outcome<Outputs>) -> Outcome<Outputs> {
    let outputs = outputs?;
    match (a.x()?.dtype(), &outputs[..]) {
        (DType::U8, [Some(answer)]) => one(answer.to_dtype(DType::U8)),
        _ => Ok(outputs),
    }
}

/// The result in the dtype that is asked for, as a user of Kiln writes it.
fn as_asked(a: &Args, result: kiln::Result<Tensor>) -> Outcome<Outputs> {
    match a.dtype()? {
        Some(dtype) => one(result?.to_dtype(dtype)),
        None => one(result),
    }
}

/// Values and their places; which of equal elements it is, PyTorch leaves open.
fn picked(result: kiln::Result<(Tensor, Tensor)>) -> Outcome<Outputs> {
    Ok(vec![Some(result?.0), None])
}

fn correction(a: &Args) -> Outcome<i64> {
    if let Some(Value::Number(Scalar::Bool(unbiased))) = a.get(2, "unbiased") {
        return Ok(i64::from(*unbiased));
    }
    match a.keyword("correction") {
        None => Ok(1),
        Some(Value::Number(Scalar::Int(n))) => Ok(*n),
        Some(_) => unmapped("a correction that is no integer"),
    }
}

fn spread(a: &Args, f: fn(&Tensor, Vec<i64>, i64, bool) -> kiln::Result<Tensor>) -> Outcome<Outputs> {
    let x = a.x()?;
    // (x, unbiased) or (x, dim, unbiased, keepdim).
    if let Some(Value::Number(Scalar::Bool(unbiased))) = a.get(1, "dim") {
        return one(f(x, (0..x.rank() as i64).collect(), i64::from(*unbiased), false));
    }
    let dims = a.ints_or(1, "dim")?.filter(|dims| !dims.is_empty());
    let dims = dims.unwrap_or_else(|| (0..x.rank() as i64).collect());
    one(f(x, dims, correction(a)?, a.flag(3, "keepdim", false)?))
}

fn extreme(
    a: &Args,
    all: fn(&Tensor) -> kiln::Result<Tensor>,
    by_dim: fn(&Tensor, i64, bool) -> kiln::Result<(Tensor, Tensor)>,
) -> Outcome<Outputs> {
    match a.int_or(1, "dim")? {
        Some(dim) => picked(by_dim(a.x()?, dim, a.flag(2, "keepdim", false)?)),
        None => one(all(a.x()?)),
    }
}

fn place(
    a: &Args,
    all: fn(&Tensor) -> kiln::Result<Tensor>,
    by_dim: fn(&Tensor, i64, bool) -> kiln::Result<Tensor>,
) -> Outcome<Outputs> {
    match (a.int_or(1, "dim")?, a.flag(2, "keepdim", false)?) {
        (Some(dim), keepdim) => one(by_dim(a.x()?, dim, keepdim)),
        (None, false) => one(all(a.x()?)),
        (None, true) => unmapped("keepdim without a dim"),
    }
}

fn along(a: &Args, f: fn(&Tensor, i64) -> kiln::Result<Tensor>) -> Outcome<Outputs> {
    let x = match a.dtype()? {
        Some(dtype) => a.x()?.to_dtype(dtype)?,
        None => a.x()?.clone(),
    };
    as_asked(a, f(&x, a.int(1, "dim", -1)?))
}

fn norm(a: &Args, ord: f64) -> Outcome<Outputs> {
    let x = match a.dtype()? {
        Some(dtype) => a.x()?.to_dtype(dtype)?,
        None => a.x()?.clone(),
    };
    match (a.ints_or(2, "dim")?, a.flag(3, "keepdim", false)?) {
        (Some(dims), keepdim) if !dims.is_empty() => one(x.norm_dim(ord, &dims[..], keepdim)),
        (_, false) => one(x.norm(ord)),
        (_, true) => one(x.norm_dim(ord, &(0..x.rank() as i64).collect::<Vec<_>>()[..], true)),
    }
}

/// The calls.
pub const CALLS: &[(&str, Run)] = &[
    ("sum", |a| reduced(a, Tensor::sum, |x, d, k| x.sum_dim(&d[..], k))),
    ("mean", |a| reduced(a, Tensor::mean, |x, d, k| x.mean_dim(&d[..], k))),
    ("prod", |a| reduced(a, Tensor::prod, |x, d, k| x.prod_dim(&d[..], k))),
    ("amax", |a| reduced(a, Tensor::amax, |x, d, k| x.amax_dim(&d[..], k))),
    ("amin", |a| reduced(a, Tensor::amin, |x, d, k| x.amin_dim(&d[..], k))),
    ("any", |a| truth(a, reduced(a, Tensor::any, |x, d, k| x.any_dim(&d[..], k)))),
    ("all", |a| truth(a, reduced(a, Tensor::all, |x, d, k| x.all_dim(&d[..], k)))),
    ("nansum", |a| reduced(a, Tensor::nansum, |x, d, k| x.nansum_dim(&d[..], k))),
    ("logsumexp", |a| reduced(a, Tensor::logsumexp_all, |x, d, k| x.logsumexp(&d[..], k))),
    ("count_nonzero", |a| match a.ints_or(1, "dim")? {
        Some(dims) if !dims.is_empty() => one(a.x()?.count_nonzero_dim(&dims[..])),
        _ => one(a.x()?.count_nonzero()),
    }),
    ("var", |a| spread(a, |x, d, c, k| x.var_dim(&d[..], c, k))),
    ("var.unbiased", |a| spread(a, |x, d, c, k| x.var_dim(&d[..], c, k))),
    ("std", |a| spread(a, |x, d, c, k| x.std_dim(&d[..], c, k))),
    ("std.unbiased", |a| spread(a, |x, d, c, k| x.std_dim(&d[..], c, k))),
    ("var_mean", |a| {
        let x = a.x()?;
        let dims = a.ints_or(1, "dim")?.filter(|dims| !dims.is_empty());
        let dims = dims.unwrap_or_else(|| (0..x.rank() as i64).collect());
        two(x.var_mean(&dims[..], correction(a)?, a.flag(3, "keepdim", false)?))
    }),
    ("linalg.vector_norm", |a| norm(a, a.float(1, "ord", 2.0)?)),
    ("norm", |a| match a.get(1, "p") {
        None => norm(a, 2.0),
        Some(Value::Number(p)) => norm(a, p.as_f64()),
        Some(_) => unmapped("a norm by name"),
    }),
    ("norm.inf", |a| norm(a, a.float(1, "p", f64::INFINITY)?)),
    ("aminmax", |a| {
        let x = a.x()?;
        let dims = match a.int_or(1, "dim")? {
            Some(dim) => vec![dim],
            None => (0..x.rank() as i64).collect(),
        };
        two(x.aminmax(&dims[..], a.flag(2, "keepdim", false)?))
    }),
    ("max.reduction_no_dim", |a| one(a.x()?.max())),
    ("min.reduction_no_dim", |a| one(a.x()?.min())),
    ("max.reduction_with_dim", |a| extreme(a, Tensor::max, Tensor::max_dim)),
    ("min.reduction_with_dim", |a| extreme(a, Tensor::min, Tensor::min_dim)),
    ("median", |a| extreme(a, Tensor::median, Tensor::median_dim)),
    ("argmax", |a| place(a, Tensor::argmax, Tensor::argmax_dim)),
    ("argmin", |a| place(a, Tensor::argmin, Tensor::argmin_dim)),
    ("sort", |a| {
        a.keyword("stable");
        let (dim, descending) = (a.int(1, "dim", -1)?, a.flag(2, "descending", false)?);
        picked(a.x()?.sort(dim, descending))
    }),
    ("argsort", |a| {
        a.keyword("stable");
        one(a.x()?.argsort(a.int(1, "dim", -1)?, a.flag(2, "descending", false)?))
    }),
    ("topk", |a| {
        a.get(4, "sorted");
        let (k, dim) = (a.size(1, "k", 0)?, a.int(2, "dim", -1)?);
        picked(a.x()?.topk(k, dim, a.flag(3, "largest", true)?))
    }),
    ("cummax", |a| picked(a.x()?.cummax(a.int(1, "dim", 0)?))),
    ("cummin", |a| picked(a.x()?.cummin(a.int(1, "dim", 0)?))),
    ("cumsum", |a| along(a, Tensor::cumsum)),
    ("cumprod", |a| along(a, Tensor::cumprod)),
    ("logcumsumexp", |a| along(a, Tensor::logcumsumexp)),
    ("softmax", |a| along(a, Tensor::softmax)),
    ("softmax.with_dtype", |a| along(a, Tensor::softmax)),
    ("log_softmax", |a| along(a, Tensor::log_softmax)),
    ("log_softmax.with_dtype", |a| along(a, Tensor::log_softmax)),
];
