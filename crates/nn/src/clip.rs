//! Limiting gradients: by their common norm, or each element by itself.

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::{Result, Tensor, TensorList, foreach, no_grad};

/// The options of [`clip_grad_norm_`], with PyTorch's names and defaults.
#[derive(Clone, Copy, Debug)]
pub struct ClipNorm {
    /// Which norm; infinity is the largest element. 2 by default.
    pub norm_type: f64,
    /// Whether a norm that is not finite is an error. Asking reads it, which ends a graph. Not by default.
    pub error_if_nonfinite: bool,
}

impl Default for ClipNorm {
    fn default() -> ClipNorm {
        ClipNorm { norm_type: 2.0, error_if_nonfinite: false }
    }
}

fn gradients(parameters: &[Tensor]) -> Vec<Tensor> {
    parameters.iter().filter_map(Tensor::grad).collect()
}

/// The norm of all elements of several tensors together.
#[track_caller]
pub fn get_total_norm(tensors: &[Tensor], norm_type: f64) -> Result<Tensor> {
    let _behalf = Loc::caller().on_behalf(crate::folder());
    let _off = no_grad();
    let norms: Vec<Tensor> = tensors.iter().map(|tensor| tensor.norm(norm_type)).collect::<Result<_>>()?;
    if norms.is_empty() {
        Tensor::zeros([0usize; 0], &kiln_tensor::Device::Cpu)
    } else {
        Tensor::stack(&norms, 0)?.norm(norm_type)
    }
}

/// Scales the gradients of all parameters down so that their common norm is at most `max_norm`, and gives the norm
/// they had. PyTorch's formula: times min(1, max_norm / (norm + 1e-6)), which is a tensor too, so that a compiled
/// program need not wait for it.
///
/// ```
/// use kiln_nn::{ClipNorm, Forward, Linear, Module, clip_grad_norm_};
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let model = Linear::new(4, 2)?;
/// model.forward(&Tensor::ones([8, 4], &Device::Cpu)?)?.sum()?.backward()?;
/// let norm = clip_grad_norm_(&model.parameters(), 1.0, ClipNorm::default())?;
/// assert!(norm.item::<f32>()? > 1.0);
/// let clipped = clip_grad_norm_(&model.parameters(), 1.0, ClipNorm::default())?;
/// assert!((clipped.item::<f32>()? - 1.0).abs() < 1e-5);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn clip_grad_norm_(parameters: &[Tensor], max_norm: f64, options: ClipNorm) -> Result<Tensor> {
    let loc = Loc::caller();
    let _behalf = loc.on_behalf(crate::folder());
    let _off = no_grad();
    let grads = gradients(parameters);
    let total = get_total_norm(&grads, options.norm_type)?;
    if options.error_if_nonfinite {
        let norm = total.item::<f64>()?;
        if !norm.is_finite() {
            let why = Why::Number { argument: "the norm of the gradients", expected: "finite", got: norm };
            return Err(Error::op("clip_grad_norm_", why, loc));
        }
    }
    if grads.is_empty() {
        return Ok(total);
    }
    // 1 / (norm + 1e-6) · max_norm: the number stays the second operand.
    let share = total.add(1e-6)?.reciprocal()?.mul(max_norm)?.clamp(f64::NEG_INFINITY, 1.0)?;
    scale_(grads, &share)?;
    Ok(total)
}

/// Multiplies all tensors by one factor: a list op for each dtype there is.
fn scale_(mut tensors: Vec<Tensor>, factor: &Tensor) -> Result<()> {
    while let Some(dtype) = tensors.first().map(Tensor::dtype) {
        let (same, others): (Vec<Tensor>, Vec<Tensor>) =
            tensors.into_iter().partition(|t| t.dtype() == dtype);
        let factor = if factor.dtype() == dtype { factor.clone() } else { factor.to_dtype(dtype)? };
        let factors = TensorList::new(vec![factor; same.len()]);
        foreach::mul_(&TensorList::new(same), &factors)?;
        tensors = others;
    }
    Ok(())
}

/// Limits every element of the parameters' gradients to [−clip_value, clip_value]: one list op.
#[track_caller]
pub fn clip_grad_value_(parameters: &[Tensor], clip_value: f64) -> Result<()> {
    let _behalf = Loc::caller().on_behalf(crate::folder());
    let _off = no_grad();
    let grads = gradients(parameters);
    if grads.is_empty() { Ok(()) } else { foreach::clamp_(&TensorList::new(grads), -clip_value, clip_value) }
}
