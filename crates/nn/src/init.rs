//! Initialisers: they overwrite a tensor in place, off the tape, by PyTorch's formulas.

use kiln_ir::{Loc, Why};
use kiln_tensor::{DType, Device, Error, Result, Scalar, Shape, Tensor, no_grad};

/// Uniform random numbers in [low, high) of any floating dtype.
#[track_caller]
pub(crate) fn uniform(
    shape: impl Into<Shape>,
    low: f64,
    high: f64,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    match dtype {
        DType::F32 => Tensor::uniform(shape, low, high, device),
        // Rounded once, at the end.
        DType::F16 | DType::BF16 => Tensor::uniform(shape, low, high, device)?.to_dtype(dtype),
        // Drawn in the dtype itself: converted f32 would have only 24 random bits.
        _ => {
            let unit = Tensor::rand_of(shape, dtype, device)?;
            unit.mul_(high - low)?;
            unit.add_(low)?;
            Ok(unit)
        }
    }
}

/// Uniform random numbers in [low, high).
#[track_caller]
pub fn uniform_(tensor: &Tensor, low: f64, high: f64) -> Result<()> {
    let _guard = no_grad();
    let ty = tensor.ty();
    let drawn = uniform(ty.shape, low, high, ty.dtype, &ty.device)?;
    tensor.copy_(&drawn).map(drop)
}

/// Every element becomes `value`.
#[track_caller]
pub fn constant_(tensor: &Tensor, value: impl Into<Scalar>) -> Result<()> {
    let _guard = no_grad();
    tensor.fill_(value).map(drop)
}

/// Every element becomes 0.
#[track_caller]
pub fn zeros_(tensor: &Tensor) -> Result<()> {
    constant_(tensor, 0.0)
}

/// Every element becomes 1.
#[track_caller]
pub fn ones_(tensor: &Tensor) -> Result<()> {
    constant_(tensor, 1.0)
}

/// Which side's number of connections keeps its variance: the forward pass or the backward pass.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub enum Fan {
    /// `fan_in`: inputs of an output element.
    #[default]
    In,
    /// `fan_out`: outputs of an input element.
    Out,
}

/// The function that follows a layer, which says how much its values shrink.
#[derive(Copy, Clone, PartialEq, Debug)]
pub enum Nonlinearity {
    /// None, or one that keeps the variance: linear, sigmoid.
    Linear,
    /// tanh
    Tanh,
    /// max(x, 0)
    Relu,
    /// max(x, slope · x) with this slope.
    LeakyRelu(f64),
}

impl Nonlinearity {
    /// PyTorch's `calculate_gain`.
    pub fn gain(self) -> f64 {
        match self {
            Nonlinearity::Linear => 1.0,
            Nonlinearity::Tanh => 5.0 / 3.0,
            Nonlinearity::Relu => 2f64.sqrt(),
            Nonlinearity::LeakyRelu(slope) => (2.0 / (1.0 + slope * slope)).sqrt(),
        }
    }
}

/// Inputs and outputs of a layer with this weight: `[out, in, kernel…]`.
fn fans(op: &str, tensor: &Tensor, loc: Loc) -> Result<(usize, usize)> {
    match &tensor.shape()[..] {
        [outputs, inputs, kernel @ ..] => {
            let field: usize = kernel.iter().product();
            Ok((inputs * field, outputs * field))
        }
        few => Err(Error::op(
            op,
            Why::Rank { argument: "the weight", expected: "2 or more", got: few.len() },
            loc,
        )),
    }
}

/// U(−b, b) with b = gain · √(3 / fan): He initialisation.
///
/// `kaiming_uniform_(&weight, Nonlinearity::LeakyRelu(5f64.sqrt()), Fan::In)` is how PyTorch makes linear
/// layers.
#[track_caller]
pub fn kaiming_uniform_(tensor: &Tensor, nonlinearity: Nonlinearity, mode: Fan) -> Result<()> {
    let (inputs, outputs) = fans("kaiming_uniform_", tensor, Loc::caller())?;
    let fan = match mode {
        Fan::In => inputs,
        Fan::Out => outputs,
    };
    if tensor.numel() == 0 {
        return Ok(());
    }
    let bound = nonlinearity.gain() * (3.0 / fan as f64).sqrt();
    uniform_(tensor, -bound, bound)
}

/// U(−b, b) with b = gain · √(6 / (fan_in + fan_out)): Glorot initialisation.
#[track_caller]
pub fn xavier_uniform_(tensor: &Tensor, gain: f64) -> Result<()> {
    let (inputs, outputs) = fans("xavier_uniform_", tensor, Loc::caller())?;
    if tensor.numel() == 0 {
        return Ok(());
    }
    let bound = gain * (6.0 / (inputs + outputs) as f64).sqrt();
    uniform_(tensor, -bound, bound)
}
