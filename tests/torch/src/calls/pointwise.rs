//! Arithmetic, activations and whatever else goes element by element.

use kiln::ir::Scalar;
use kiln::{DType, Tensor};

use super::{Outputs, Run, one};
use crate::args::{Args, Outcome, Value, unmapped};

/// y ∘ x, where PyTorch writes the method of x.
fn reflected(a: &Args, f: fn(&Tensor, &Tensor) -> kiln::Result<Tensor>) -> Outcome<Outputs> {
    let x = a.x()?;
    match a.get(1, "other") {
        Some(Value::Tensor(y)) => one(f(y, x)),
        // A number on the left has no methods in Rust.
        _ => unmapped("a number on the left"),
    }
}

fn converted(a: &Args, dtype: DType) -> Outcome<Outputs> {
    a.keyword("memory_format");
    let x = a.x()?;
    if let Some((least, most)) = range(dtype).filter(|_| x.dtype().is_float()) {
        let values = x.detach()?.to_dtype(DType::F64)?.to_vec::<f64>()?;
        if !values.iter().all(|x| (least..=most).contains(&x.trunc())) {
            return unmapped("a float that the integer can't hold: C++ leaves open what it becomes");
        }
    }
    one(x.to_dtype(dtype))
}

/// The range of an integer dtype, as far as doubles tell it.
fn range(dtype: DType) -> Option<(f64, f64)> {
    match dtype {
        DType::I64 => Some((-9.2e18, 9.2e18)),
        dtype => dtype.narrow_range().map(|(least, most)| (least as f64, most as f64)),
    }
}

fn limits(a: &Args) -> Outcome<Outputs> {
    let x = a.x()?;
    let (low, high) = (a.get(1, "min"), a.get(2, "max"));
    one(match (low.is_some(), high.is_some()) {
        (true, true) => x.clamp(a.operand(1, "min")?, a.operand(2, "max")?),
        (true, false) => x.clamp_min(a.operand(1, "min")?),
        (false, true) => x.clamp_max(a.operand(2, "max")?),
        (false, false) => return unmapped("no limits"),
    })
}

fn optional(a: &Args, at: usize, name: &str) -> Outcome<Option<f64>> {
    Ok(a.number_or(at, name)?.map(Scalar::as_f64))
}

fn polygamma(a: &Args, order: i64) -> Outcome<Outputs> {
    match (a.int(1, "n", 0)?, order) {
        (0, 0) => one(a.x()?.digamma()),
        (1, 1) => one(a.x()?.trigamma()),
        _ => unmapped("another order"),
    }
}

/// The calls.
pub const CALLS: &[(&str, Run)] = &[
    ("add", |a| match a.number_or(2, "alpha")? {
        Some(alpha) => one(a.x()?.add_scaled(a.operand(1, "other")?, alpha)),
        None => one(a.x()?.add(a.operand(1, "other")?)),
    }),
    ("sub", |a| match a.number_or(2, "alpha")? {
        Some(Scalar::Int(alpha)) => one(a.x()?.add_scaled(a.operand(1, "other")?, -alpha)),
        Some(alpha) => one(a.x()?.add_scaled(a.operand(1, "other")?, -alpha.as_f64())),
        None => one(a.x()?.sub(a.operand(1, "other")?)),
    }),
    ("rsub", |a| match a.number_or(2, "alpha")? {
        Some(alpha) => one(a.x()?.rsub_scaled(a.operand(1, "other")?, alpha)),
        None => one(a.x()?.rsub(a.operand(1, "other")?)),
    }),
    ("__radd__", |a| reflected(a, |x, y| x.add(y))),
    ("__rmul__", |a| reflected(a, |x, y| x.mul(y))),
    ("__rsub__", |a| one(a.x()?.rsub(a.operand(1, "other")?))),
    ("div.floor_rounding", |a| {
        a.keyword("rounding_mode");
        one(a.x()?.floor_divide(a.operand(1, "other")?))
    }),
    ("div.trunc_rounding", |a| {
        a.keyword("rounding_mode");
        one(a.x()?.div_trunc(a.operand(1, "other")?))
    }),
    ("true_divide", |a| {
        a.keyword("rounding_mode");
        one(a.x()?.div(a.operand(1, "other")?))
    }),
    ("where", |a| {
        let (x, y) = (a.operand(0, "self")?, a.operand(2, "other")?);
        one(a.tensor(1, "condition")?.where_self(x, y))
    }),
    ("clamp", limits),
    ("clamp_min", |a| one(a.x()?.clamp_min(a.operand(1, "min")?))),
    ("clamp_max", |a| one(a.x()?.clamp_max(a.operand(1, "max")?))),
    ("lerp", |a| one(a.x()?.lerp(a.operand(1, "end")?, a.operand(2, "weight")?))),
    ("addcmul", |a| {
        let value = a.number(3, "value", 1i64)?;
        one(a.x()?.addcmul(a.operand(1, "tensor1")?, a.operand(2, "tensor2")?, value))
    }),
    ("addcdiv", |a| {
        let value = a.number(3, "value", 1i64)?;
        one(a.x()?.addcdiv(a.operand(1, "tensor1")?, a.operand(2, "tensor2")?, value))
    }),
    ("round", |a| one(a.x()?.round())),
    ("round.decimals_0", |a| one(a.x()?.round_decimals(a.int(1, "decimals", 0)? as i32))),
    ("round.decimals_3", |a| one(a.x()?.round_decimals(a.int(1, "decimals", 0)? as i32))),
    ("round.decimals_neg_3", |a| one(a.x()?.round_decimals(a.int(1, "decimals", 0)? as i32))),
    ("nan_to_num", |a| {
        one(a.x()?.nan_to_num(optional(a, 1, "nan")?, optional(a, 2, "posinf")?, optional(a, 3, "neginf")?))
    }),
    ("logit", |a| match a.number_or(1, "eps")? {
        Some(eps) => one(a.x()?.logit_eps(eps.as_f64())),
        None => one(a.x()?.logit()),
    }),
    // Each variant has samples of all orders.
    ("polygamma.polygamma_n_0", |a| polygamma(a, 0)),
    ("polygamma.polygamma_n_1", |a| polygamma(a, 1)),
    ("masked_fill", |a| one(a.x()?.masked_fill(a.tensor(1, "mask")?, a.operand(2, "value")?))),
    ("full_like", |a| match a.dtype()? {
        Some(_) => unmapped("another dtype"),
        None => one(a.x()?.full_like(a.number(1, "fill_value", 0i64)?)),
    }),
    ("zeros_like", |a| one(a.x()?.zeros_like())),
    ("ones_like", |a| one(a.x()?.ones_like())),
    ("fill", |a| {
        let x = a.x()?.clone_tensor()?;
        match a.operand(1, "value")? {
            kiln::tensor::Operand::Number(value) => x.fill_(value)?,
            kiln::tensor::Operand::Tensor(value) => x.copy_(value)?,
        };
        one(Ok(x))
    }),
    ("clone", |a| {
        a.keyword("memory_format");
        one(a.x()?.clone_tensor())
    }),
    ("bool", |a| converted(a, DType::Bool)),
    ("byte", |a| converted(a, DType::U8)),
    ("char", |a| converted(a, DType::I8)),
    ("short", |a| converted(a, DType::I16)),
    ("int", |a| converted(a, DType::I32)),
    ("long", |a| converted(a, DType::I64)),
    ("half", |a| converted(a, DType::F16)),
    ("bfloat16", |a| converted(a, DType::BF16)),
    ("float", |a| converted(a, DType::F32)),
    ("double", |a| converted(a, DType::F64)),
    ("nn.functional.gelu", |a| match &a.text(1, "approximate", "none")?[..] {
        "tanh" => one(a.x()?.gelu_tanh()),
        _ => one(a.x()?.gelu()),
    }),
    ("nn.functional.elu", |a| one(a.x()?.elu(a.number(1, "alpha", 1.0)?))),
    ("nn.functional.celu", |a| one(a.x()?.celu(a.number(1, "alpha", 1.0)?))),
    ("nn.functional.leaky_relu", |a| one(a.x()?.leaky_relu(a.number(1, "negative_slope", 0.01)?))),
    ("nn.functional.hardtanh", |a| {
        let (low, high) = (a.number(1, "min_val", -1.0)?, a.number(2, "max_val", 1.0)?);
        one(a.x()?.hardtanh(low, high))
    }),
    ("nn.functional.hardshrink", |a| one(a.x()?.hardshrink(a.number(1, "lambd", 0.5)?))),
    ("nn.functional.softshrink", |a| one(a.x()?.softshrink(a.number(1, "lambd", 0.5)?))),
    ("nn.functional.threshold", |a| {
        one(a.x()?.threshold(a.number(1, "threshold", 0.0)?, a.number(2, "value", 0.0)?))
    }),
    ("nn.functional.softplus", |a| {
        one(a.x()?.softplus(a.number(1, "beta", 1.0)?, a.number(2, "threshold", 20.0)?))
    }),
    ("nn.functional.prelu", |a| one(a.x()?.prelu(a.tensor(1, "weight")?))),
    ("nn.functional.glu", |a| one(a.x()?.glu(a.int(1, "dim", -1)?))),
];
