//! [`Linear`]: a matrix product and a bias.

use kiln_tensor::{Result, Tensor};

use crate::hooks::forward_with_hooks;
use crate::options::options;
use crate::{Hooks, Module, Parameter, Training, init};

/// x · weightᵀ + bias, over the last dim.
///
/// ```
/// use kiln_nn::{Forward, Linear};
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let layer = Linear::options().bias(false).build(10, 20)?;
/// let y = layer.forward(&Tensor::ones([4, 10], &Device::Cpu)?)?;
/// assert_eq!(y.shape().to_vec(), [4, 20]);
/// # Ok(()) }
/// ```
#[derive(Module)]
#[module(extra_repr = Self::describe)]
pub struct Linear {
    /// `[out_features, in_features]`
    pub weight: Parameter,
    /// `[out_features]`
    pub bias: Option<Parameter>,
    training: Training,
    hooks: Hooks,
}

impl Linear {
    /// A layer of these tensors.
    pub fn from_parts(weight: Parameter, bias: Option<Parameter>) -> Linear {
        Linear { weight, bias, training: Training::default(), hooks: Hooks::default() }
    }

    /// The size of the last dim that comes in.
    pub fn in_features(&self) -> usize {
        self.weight.shape().get(1).copied().unwrap_or(0)
    }

    /// The size of the last dim that comes out.
    pub fn out_features(&self) -> usize {
        self.weight.shape().first().copied().unwrap_or(0)
    }

    fn describe(&self) -> String {
        let bias = if self.bias.is_some() { "True" } else { "False" };
        format!("in_features={}, out_features={}, bias={bias}", self.in_features(), self.out_features())
    }
}

forward_with_hooks! {
    Linear: |this, x| x.linear(&this.weight, this.bias.as_deref());
}

options! {
    /// How [`Linear`] layers are made.
    LinearOptions for Linear(in_features: usize, out_features: usize) {
        /// Whether there is a bias; there is by default.
        bias: bool = true,
    }
}

impl LinearOptions {
    /// A layer, its weight and bias drawn from U(−1/√in_features, 1/√in_features) as PyTorch does.
    #[track_caller]
    pub fn build(&self, in_features: usize, out_features: usize) -> Result<Linear> {
        let bound = match in_features {
            0 => 0.0,
            n => 1.0 / (n as f64).sqrt(),
        };
        let weight = init::uniform([out_features, in_features], -bound, bound, self.dtype, &self.device)?;
        let bias = if self.bias {
            Some(init::uniform([out_features], -bound, bound, self.dtype, &self.device)?)
        } else {
            None
        };
        Ok(Linear::from_parts(Parameter::new(weight)?, bias.map(Parameter::new).transpose()?))
    }
}
