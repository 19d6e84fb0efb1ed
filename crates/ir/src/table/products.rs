//! Products of all elements but some, without a division: right where factors are zero, and differentiable as
//! often as one likes. In log₂ n steps, each of which doubles how many factors have been taken in.

use crate::gradient::{Cx, Grads, g};
use crate::samples::{FLOATS, NonZero, t, with_op};
use crate::types::{Rule, check_dims, one, tensor};
use crate::{Dims, EmitExt, GradCall, Op, Result, Sample, Shape, Value, Values, Why};

fn part(cx: Cx<'_>, x: Value, dim: usize, start: usize, end: usize) -> Result<Value> {
    cx.slice(x, dim, start, end, 1)
}

fn size(cx: Cx<'_>, x: Value, dim: usize) -> usize {
    cx.tensor_ty(x).shape[dim]
}

/// x moved one place on, with a number in the first place.
fn delayed(cx: Cx<'_>, x: Value, dim: usize, first: f64) -> Result<Value> {
    let ty = cx.tensor_ty(x);
    let n = ty.shape[dim];
    let mut shape = ty.shape;
    shape[dim] = 1;
    let first = cx.number(first)?;
    let first = cx.full(first, shape, ty.dtype, ty.device)?;
    let rest = part(cx, x, dim, 0, n - 1)?;
    cx.cat(&[first, rest], dim)
}

/// For each place along a dim the product p of the factors before it and, given `slopes` of the factors, the
/// derivative q of that product: Σⱼ slopesⱼ · Π of the factors before it but j.
fn before(cx: Cx<'_>, x: Value, slopes: Option<Value>, dim: usize) -> Result<(Value, Option<Value>)> {
    let n = size(cx, x, dim);
    let mut p = delayed(cx, x, dim, 1.0)?;
    let mut q = match slopes {
        Some(slopes) => Some(delayed(cx, slopes, dim, 0.0)?),
        None => None,
    };
    let mut step = 1;
    while step < n {
        let (early, late) = (part(cx, p, dim, 0, n - step)?, part(cx, p, dim, step, n)?);
        if let Some(slope) = &mut q {
            let (early_slope, late_slope) =
                (part(cx, *slope, dim, 0, n - step)?, part(cx, *slope, dim, step, n)?);
            let (left, right) = (cx.mul(early_slope, late)?, cx.mul(early, late_slope)?);
            let (first, both) = (part(cx, *slope, dim, 0, step)?, cx.add(left, right)?);
            *slope = cx.cat(&[first, both], dim)?;
        }
        let (first, both) = (part(cx, p, dim, 0, step)?, cx.mul(early, late)?);
        p = cx.cat(&[first, both], dim)?;
        step *= 2;
    }
    Ok((p, q))
}

/// [`before`], of the factors behind each place.
fn behind(cx: Cx<'_>, x: Value, slopes: Option<Value>, dim: usize) -> Result<(Value, Option<Value>)> {
    let turn = |cx: Cx<'_>, x: Value| cx.flip(x, Dims::from(dim));
    let x = turn(cx, x)?;
    let slopes = slopes.map(|slopes| turn(cx, slopes)).transpose()?;
    let (p, q) = before(cx, x, slopes, dim)?;
    let q = q.map(|q| turn(cx, q)).transpose()?;
    Ok((turn(cx, p)?, q))
}

pub(crate) fn cumprod(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // (Π of the factors before j) · sⱼ with sⱼ = gⱼ + xⱼ₊₁ · sⱼ₊₁
    let (g, &Op::Cumprod { dim }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let (x, shape) = (call.inputs[0], cx.tensor_ty(call.inputs[0]).shape);
    if shape.rank() == 0 || shape.numel() == 0 {
        return Ok(vec![Some(g)]);
    }
    let n = shape[dim];
    let earlier = delayed(cx, x, dim, 1.0)?;
    let products = cx.cumprod(earlier, dim)?;
    let (mut sums, mut factors, mut step) = (g, part(cx, x, dim, 1, n)?, 1);
    while step < n {
        let later = part(cx, sums, dim, step, n)?;
        let carried = cx.mul(factors, later)?;
        let (early, last) = (part(cx, sums, dim, 0, n - step)?, part(cx, sums, dim, n - step, n)?);
        let early = cx.add(early, carried)?;
        sums = cx.cat(&[early, last], dim)?;
        if 2 * step < n {
            let length = n - 2 * step;
            let (near, far) =
                (part(cx, factors, dim, 0, length)?, part(cx, factors, dim, step, step + length)?);
            factors = cx.mul(near, far)?;
        }
        step *= 2;
    }
    Ok(vec![Some(cx.mul(products, sums)?)])
}

pub(crate) fn prod(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::Prod { dims, .. }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let x = call.inputs[0];
    let g = cx.reshape(g, cx.tensor_ty(x).shape.reduced(dims, true))?;
    Ok(vec![Some(cx.prod_backward(g, x, dims.clone())?)])
}

pub(crate) fn backward_type(op: &Op, args: &[crate::Ty]) -> Rule {
    let (g, x) = (tensor(args, 0, "grad")?, tensor(args, 1, "x")?);
    let Op::ProdBackward { dims } = op else { return one(x.clone()) };
    check_dims(dims, x.shape.rank())?;
    for (argument, t) in [("grad", g), ("x", x)] {
        if !t.dtype.is_float() || t.dtype != x.dtype {
            return Err(Why::DType { argument, expected: "floating point, the same for both", got: t.dtype });
        }
    }
    let kept = x.shape.reduced(dims, true);
    if g.shape != kept {
        return Err(Why::shape("grad", kept, g.shape.clone()));
    }
    one(x.clone())
}

/// g · Π x / x; where one factor is zero that one gets g times the product of the others; nothing where several are.
pub(crate) fn backward_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let (g, x, Op::ProdBackward { dims }) = (args[0], args[1], op) else { return Ok(args.into()) };
    let (unit, zero, dtype) = (cx.number(1.0)?, cx.number(0.0)?, cx.tensor_ty(x).dtype);
    let nothing = cx.eq(x, zero)?;
    let others = cx.where_(nothing, unit, x)?;
    let as_number = cx.to(nothing, dtype)?;
    let zeros = cx.sum(as_number, dims.clone(), true)?;
    let (none, single) = (cx.eq(zeros, zero)?, cx.eq(zeros, unit)?);
    let product = cx.prod(others, dims.clone(), true)?;
    let whole = cx.mul(g, product)?;
    let quotient = cx.div(whole, others)?;
    let hit = cx.logical_and(single, nothing)?;
    let counts = cx.maximum(none, hit)?;
    Ok([cx.where_(counts, quotient, zero)?].into_iter().collect())
}

pub(crate) fn backward(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (gg, Op::ProdBackward { dims }) = (g!(call), call.op) else { return Ok(vec![None, None]) };
    let (g, x) = (call.inputs[0], call.inputs[1]);
    let grad = call.wanted(cx, 0, |cx| {
        // Linear in g: Σ gg · (what g = 1 would give)
        let (ty, unit) = (cx.tensor_ty(g), cx.number(1.0)?);
        let ones = cx.full(unit, ty.shape, ty.dtype, ty.device)?;
        let products = cx.prod_backward(ones, x, dims.clone())?;
        let weighted = cx.mul(gg, products)?;
        cx.sum(weighted, dims.clone(), true)
    })?;
    let slope = call.wanted(cx, 1, |cx| {
        // For each i: Σⱼ gg·gⱼ · Π of all factors but i and j, in rows of all factors
        let h = cx.mul(gg, g)?;
        let shape = cx.tensor_ty(x).shape;
        let rank = shape.rank();
        let order: Dims = (0..rank).filter(|d| !dims.contains(d)).chain(dims.iter().copied()).collect();
        let n: usize = dims.iter().map(|&d| shape[d]).product();
        if n == 0 || shape.numel() == 0 {
            return Ok(h);
        }
        let turned: Shape = order.iter().map(|&d| shape[d]).collect();
        let rows = |cx: Cx<'_>, x: Value| {
            let x = cx.permute(x, order.clone())?;
            cx.reshape(x, Shape::from([shape.numel() / n, n]))
        };
        let (x, h) = (rows(cx, x)?, rows(cx, h)?);
        let (left, left_slope) = before(cx, x, Some(h), 1)?;
        let (right, right_slope) = behind(cx, x, Some(h), 1)?;
        let (left_slope, right_slope) = (left_slope.unwrap_or(left), right_slope.unwrap_or(right));
        let (early, late) = (cx.mul(left_slope, right)?, cx.mul(left, right_slope)?);
        let sum = cx.add(early, late)?;
        let sum = cx.reshape(sum, turned.clone())?;
        let mut back = order.clone();
        order.iter().enumerate().for_each(|(i, &d)| back[d] = i);
        cx.permute(sum, back)
    })?;
    Ok(vec![grad, slope])
}

pub(crate) fn backward_samples() -> Vec<Sample> {
    let cases: &[(&[usize], &[usize], &[usize])] = &[
        (&[5], &[0], &[1]),
        (&[4, 7], &[1], &[4, 1]),
        (&[2, 3, 5], &[0, 2], &[1, 3, 1]),
        (&[], &[], &[]),
        (&[3, 0], &[1], &[3, 1]),
    ];
    let case = |(x, dims, g): &(&[usize], &[usize], &[usize])| {
        let op = Op::ProdBackward { dims: Dims::from(*dims) };
        with_op(op, FLOATS, vec![t(g, crate::samples::Any), t(x, NonZero)])
    };
    cases.iter().map(case).collect()
}
