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

impl Fan {
    fn of(self, (inputs, outputs): (usize, usize)) -> usize {
        match self {
            Fan::In => inputs,
            Fan::Out => outputs,
        }
    }
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
    let fan = mode.of(fans("kaiming_uniform_", tensor, Loc::caller())?);
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

/// Normal random numbers of this mean and deviation.
#[track_caller]
pub fn normal_(tensor: &Tensor, mean: f64, std: f64) -> Result<()> {
    let _guard = no_grad();
    let ty = tensor.ty();
    // Halves are rounded once, at the end.
    let dtype = if ty.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let drawn = Tensor::randn_of(ty.shape, dtype, &ty.device)?;
    drawn.mul_(std)?;
    drawn.add_(mean)?;
    tensor.copy_(&drawn.to_dtype(ty.dtype)?).map(drop)
}

/// Normal random numbers of this mean and deviation, from [low, high] alone.
#[track_caller]
pub fn trunc_normal_(tensor: &Tensor, mean: f64, std: f64, low: f64, high: f64) -> Result<()> {
    let loc = Loc::caller();
    if high.is_nan() || low.is_nan() || low > high {
        let why = Why::Number { argument: "high", expected: "low or more", got: high };
        return Err(Error::op("trunc_normal_", why, loc));
    }
    let _guard = no_grad();
    let ty = tensor.ty();
    let dtype = if ty.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    // The inverse of the distribution function, of uniform numbers between its values at both ends. In terms of
    // 2Φ − 1, the error function.
    let end = |x: f64| error_function((x - mean) / (std * std::f64::consts::SQRT_2));
    let drawn = uniform(ty.shape, end(low), end(high), dtype, &ty.device)?.erfinv()?;
    drawn.mul_(std * std::f64::consts::SQRT_2)?;
    drawn.add_(mean)?;
    drawn.clamp_(low, high)?;
    tensor.copy_(&drawn.to_dtype(ty.dtype)?).map(drop)
}

/// The error function to double precision, by the series of the whole and by the continued fraction of its tail.
fn error_function(x: f64) -> f64 {
    let magnitude = x.abs();
    if x.is_nan() || magnitude > 6.0 {
        return if x.is_nan() { x } else { x.signum() };
    }
    if magnitude < 3.0 {
        // 2/√π · e^(−x²) · Σ 2ⁿ x²ⁿ⁺¹ / (2n + 1)!!
        let (mut term, mut sum, mut n) = (x, x, 0.0);
        while term.abs() > 1e-17 * sum.abs() {
            n += 1.0;
            term *= 2.0 * x * x / (2.0 * n + 1.0);
            sum += term;
        }
        return 2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum;
    }
    let mut fraction = 0.0;
    for n in (1..=60).rev() {
        fraction = f64::from(n) / 2.0 / (magnitude + fraction);
    }
    let tail = (-x * x).exp() / (std::f64::consts::PI.sqrt() * (magnitude + fraction));
    x.signum() * (1.0 - tail)
}

/// N(0, σ²) with σ = gain / √fan: He initialisation.
#[track_caller]
pub fn kaiming_normal_(tensor: &Tensor, nonlinearity: Nonlinearity, mode: Fan) -> Result<()> {
    let fan = mode.of(fans("kaiming_normal_", tensor, Loc::caller())?);
    if tensor.numel() == 0 {
        return Ok(());
    }
    normal_(tensor, 0.0, nonlinearity.gain() / (fan as f64).sqrt())
}

/// N(0, σ²) with σ = gain · √(2 / (fan_in + fan_out)): Glorot initialisation.
#[track_caller]
pub fn xavier_normal_(tensor: &Tensor, gain: f64) -> Result<()> {
    let (inputs, outputs) = fans("xavier_normal_", tensor, Loc::caller())?;
    if tensor.numel() == 0 {
        return Ok(());
    }
    normal_(tensor, 0.0, gain * (2.0 / (inputs + outputs) as f64).sqrt())
}

/// Ones on the diagonal of a matrix, zeros elsewhere.
#[track_caller]
pub fn eye_(tensor: &Tensor) -> Result<()> {
    let loc = Loc::caller();
    let ty = tensor.ty();
    let &[rows, columns] = &ty.shape[..] else {
        let why = Why::Rank { argument: "the tensor", expected: "2", got: ty.shape.rank() };
        return Err(Error::op("eye_", why, loc));
    };
    let _guard = no_grad();
    tensor.copy_(&Tensor::eye(rows, columns, &ty.device)?.to_dtype(ty.dtype)?).map(drop)
}

/// A (semi-)orthogonal matrix times gain: the rows, or the columns if there are fewer, of `[n, everything else]` are
/// orthogonal and of length gain, drawn evenly from all such.
#[track_caller]
pub fn orthogonal_(tensor: &Tensor, gain: f64) -> Result<()> {
    let loc = Loc::caller();
    let ty = tensor.ty();
    if ty.shape.rank() < 2 {
        let why = Why::Rank { argument: "the tensor", expected: "2 or more", got: ty.shape.rank() };
        return Err(Error::op("orthogonal_", why, loc));
    }
    if ty.shape.numel() == 0 {
        return Ok(());
    }
    let _guard = no_grad();
    let rows = ty.shape[0];
    let columns = ty.shape.numel() / rows;
    let (count, size) = (rows.min(columns), rows.max(columns));
    // Normal vectors point evenly in all directions; each is made orthogonal to those before it, twice, since one
    // pass leaves rounding errors.
    let mut vectors = Tensor::randn_of([count, size], DType::F64, &ty.device)?.to_vec::<f64>()?;
    for i in 0..count {
        let (done, rest) = vectors.split_at_mut(i * size);
        let vector = &mut rest[..size];
        for _ in 0..2 {
            for earlier in done.chunks_exact(size) {
                let share: f64 = earlier.iter().zip(vector.iter()).map(|(a, b)| a * b).sum();
                vector.iter_mut().zip(earlier).for_each(|(x, e)| *x -= share * e);
            }
        }
        let length = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
        vector.iter_mut().for_each(|x| *x /= length);
    }
    let matrix = Tensor::from_vec(vectors, [count, size])?;
    let matrix = if rows > columns { matrix.t()? } else { matrix };
    let scaled = matrix.mul(gain)?.reshape(&ty.shape)?.to_dtype(ty.dtype)?;
    tensor.copy_(&scaled).map(drop)
}

#[cfg(test)]
mod tests {
    use super::error_function;

    #[test]
    fn the_error_function_is_exact() {
        let known = [
            (0.0, 0.0),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
            (3.5, 0.999_999_256_901_627_7),
            (9.0, 1.0),
        ];
        for (x, y) in known {
            assert!((error_function(x) - y).abs() < 1e-15, "{x}");
            assert!((error_function(-x) + y).abs() < 1e-15, "{x}");
        }
    }
}
