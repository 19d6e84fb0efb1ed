//! Methods of pointwise ops whose arguments the op table's macros don't give: optional limits and fillings,
//! dtypes of results, operands that are not numbers.

use kiln_ir::{DType, Loc, Op, Result, Scalar};

use crate::Tensor;
use crate::composed::composed_of;
use crate::dispatch::dispatch_tensor;
use crate::hook::Arg;
use crate::methods::Operand;

/// The largest number of a float dtype.
fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => kiln_ir::f16::MAX.to_f64(),
        DType::BF16 => kiln_ir::bf16::MAX.to_f64(),
        DType::F64 => f64::MAX,
        _ => f64::from(f32::MAX),
    }
}

impl Tensor {
    /// y − alpha · x
    #[track_caller]
    pub fn rsub_scaled<'a>(&self, y: impl Into<Operand<'a>>, alpha: impl Into<Scalar>) -> Result<Tensor> {
        let y = y.into();
        let args = [Arg::Tensor(self), y.arg(), Arg::Number(alpha.into())];
        dispatch_tensor(&Op::Rsub {}, &args, false, Loc::caller())
    }

    /// log(x / (1 − x)) of x limited to [eps, 1 − eps].
    #[track_caller]
    pub fn logit_eps(&self, eps: f64) -> Result<Tensor> {
        let args = [Arg::Tensor(self), Arg::Number(Scalar::Float(eps))];
        dispatch_tensor(&Op::Logit {}, &args, false, Loc::caller())
    }

    /// Rounded to this many digits after the point; negative ones before it.
    #[track_caller]
    pub fn round_decimals(&self, decimals: i32) -> Result<Tensor> {
        let scale = 10f64.powi(decimals.saturating_abs());
        composed_of([self], |[x]| match decimals {
            0 => x.round(),
            d if d > 0 => x.mul(scale)?.round()?.div(scale),
            _ => x.div(scale)?.round()?.mul(scale),
        })
        .map_err(|error| error.named("round"))
    }

    fn nan_to_num_args(&self, nan: Option<f64>, posinf: Option<f64>, neginf: Option<f64>) -> [Arg<'_>; 4] {
        let most = largest(self.dtype());
        let number = |x: Option<f64>, default: f64| Arg::Number(Scalar::Float(x.unwrap_or(default)));
        [Arg::Tensor(self), number(nan, 0.0), number(posinf, most), number(neginf, -most)]
    }

    /// NaN and the infinities replaced, by default with 0 and the dtype's largest and smallest numbers.
    #[track_caller]
    pub fn nan_to_num(&self, nan: Option<f64>, posinf: Option<f64>, neginf: Option<f64>) -> Result<Tensor> {
        let args = self.nan_to_num_args(nan, posinf, neginf);
        dispatch_tensor(&Op::NanToNum {}, &args, false, Loc::caller())
    }

    /// [`nan_to_num`](Tensor::nan_to_num) in place.
    #[track_caller]
    pub fn nan_to_num_(&self, nan: Option<f64>, posinf: Option<f64>, neginf: Option<f64>) -> Result<&Tensor> {
        let args = self.nan_to_num_args(nan, posinf, neginf);
        dispatch_tensor(&Op::NanToNum {}, &args, true, Loc::caller())?;
        Ok(self)
    }

    /// `value` where the mask holds, this tensor's elements elsewhere.
    #[track_caller]
    pub fn masked_fill<'a>(&self, mask: &Tensor, value: impl Into<Operand<'a>>) -> Result<Tensor> {
        let value = value.into();
        let args = [Arg::Tensor(self), Arg::Tensor(mask), value.arg()];
        dispatch_tensor(&Op::MaskedFill {}, &args, false, Loc::caller())
    }

    /// [`masked_fill`](Tensor::masked_fill) in place.
    #[track_caller]
    pub fn masked_fill_<'a>(&self, mask: &Tensor, value: impl Into<Operand<'a>>) -> Result<&Tensor> {
        let value = value.into();
        let args = [Arg::Tensor(self), Arg::Tensor(mask), value.arg()];
        dispatch_tensor(&Op::MaskedFill {}, &args, true, Loc::caller())?;
        Ok(self)
    }

    /// A tensor of this one's shape and dtype filled with a number.
    #[track_caller]
    pub fn full_like(&self, value: impl Into<Scalar>) -> Result<Tensor> {
        let op = Op::FullLike { dtype: self.dtype() };
        dispatch_tensor(&op, &[Arg::Tensor(self), Arg::Number(value.into())], false, Loc::caller())
    }

    /// x where positive, weight · x elsewhere; one weight, or one for each channel (dim 1).
    #[track_caller]
    pub fn prelu(&self, weight: &Tensor) -> Result<Tensor> {
        dispatch_tensor(&Op::Prelu {}, &[Arg::Tensor(self), Arg::Tensor(weight)], false, Loc::caller())
    }
}
