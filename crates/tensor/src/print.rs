//! Printing tensors, as PyTorch does: nested brackets, long ones summarised.

use std::fmt;

use kiln_ir::{DType, Loc, Shape};

use crate::Tensor;
use crate::host::read;

/// More elements than this are summarised.
const THRESHOLD: usize = 1000;
/// How many are shown at each end then.
const EDGE: usize = 3;

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ty = self.ty();
        let texts = match ty.dtype {
            DType::Bool => read::<bool>(self, "printing", Loc::UNKNOWN)
                .map(|data| data.iter().map(bool::to_string).collect()),
            dtype if dtype.is_float() => {
                read::<f64>(self, "printing", Loc::UNKNOWN).map(|data| floats(&data))
            }
            _ => read::<i64>(self, "printing", Loc::UNKNOWN)
                .map(|data| data.iter().map(i64::to_string).collect()),
        };
        let texts: Vec<String> = match texts {
            Ok(texts) => texts,
            Err(error) => return write!(f, "tensor({error})"),
        };
        let width = texts.iter().map(String::len).max().unwrap_or(0);
        f.write_str("tensor(")?;
        rows(f, &texts, &ty.shape, 0, 0, width, ty.shape.numel() > THRESHOLD)?;
        if ty.shape.numel() == 0 {
            write!(f, ", shape={}", ty.shape)?;
        }
        if !matches!(ty.dtype, DType::F32 | DType::I64 | DType::Bool) {
            write!(f, ", dtype={}", ty.dtype)?;
        }
        if self.requires_grad() {
            f.write_str(", requires_grad=true")?;
        }
        f.write_str(")")
    }
}

/// Four decimals, or exponents when the sizes are far apart; whole numbers as `1.`.
fn floats(data: &[f64]) -> Vec<String> {
    let finite = || data.iter().filter(|x| x.is_finite()).map(|x| x.abs());
    let whole = finite().all(|x| x.fract() == 0.0);
    let largest = finite().fold(0.0, f64::max);
    let smallest = finite().filter(|&x| x > 0.0).fold(f64::INFINITY, f64::min);
    let scientific =
        largest >= 1e8 || (smallest < 1e-4 && smallest.is_finite()) || largest / smallest > 1e3 * 1e5;
    data.iter()
        .map(|&x| match x {
            x if x.is_nan() => "nan".to_string(),
            x if x.is_infinite() => if x > 0.0 { "inf" } else { "-inf" }.to_string(),
            x if scientific => format!("{x:.4e}"),
            x if whole => format!("{x:.0}."),
            x => format!("{x:.4}"),
        })
        .collect()
}

fn rows(
    f: &mut fmt::Formatter<'_>,
    texts: &[String],
    shape: &Shape,
    dim: usize,
    first: usize,
    width: usize,
    cut: bool,
) -> fmt::Result {
    if dim == shape.rank() {
        return write!(f, "{:>width$}", texts.get(first).map_or("", String::as_str));
    }
    let inner: usize = shape[dim + 1..].iter().product();
    let last = dim + 1 == shape.rank();
    f.write_str("[")?;
    for i in 0..shape[dim] {
        let skip = cut && shape[dim] > 2 * EDGE && (EDGE..shape[dim] - EDGE).contains(&i);
        if skip && i > EDGE {
            continue;
        }
        if i > 0 {
            match last {
                true => f.write_str(", ")?,
                false => {
                    write!(f, ",{}{:indent$}", "\n".repeat(shape.rank() - dim - 1), "", indent = 8 + dim)?
                }
            }
        }
        match skip {
            true => f.write_str("...")?,
            false => rows(f, texts, shape, dim + 1, first + i * inner, width, cut)?,
        }
    }
    f.write_str("]")
}

impl fmt::Debug for Tensor {
    /// The type only: printing elements would finish a run.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({}{})", self.ty(), if self.is_lazy() { ", lazy" } else { "" })
    }
}
