//! Activations as modules.

use kiln_tensor::{Approximate, Result, Tensor};

use crate::{Forward, Module, functional};

/// max(x, 0)
#[derive(Module, Copy, Clone, Debug, Default)]
#[module(name = "ReLU")]
pub struct Relu;

/// Hyperbolic tangent.
#[derive(Module, Copy, Clone, Debug, Default)]
pub struct Tanh;

/// 1 / (1 + e⁻ˣ)
#[derive(Module, Copy, Clone, Debug, Default)]
pub struct Sigmoid;

/// Gives back what it gets.
#[derive(Module, Copy, Clone, Debug, Default)]
pub struct Identity;

/// x · Φ(x): the exact form as the value `Gelu`, the approximation as [`Gelu::tanh()`].
#[derive(Module, Copy, Clone, Debug, Default)]
#[module(name = "GELU", extra_repr = Self::describe)]
pub struct Gelu {
    #[module(skip)]
    approximate: Approximate,
}

/// The exact GELU.
// A value with the name of its type, so that `Gelu` reads in a list of layers like `Relu` does.
#[allow(non_upper_case_globals)]
pub const Gelu: Gelu = Gelu { approximate: Approximate::None };

impl Gelu {
    /// The approximation with tanh.
    pub const fn tanh() -> Gelu {
        Gelu { approximate: Approximate::Tanh }
    }

    /// This or that form.
    pub const fn new(approximate: Approximate) -> Gelu {
        Gelu { approximate }
    }

    fn describe(&self) -> String {
        let form = match self.approximate {
            Approximate::None => "none",
            Approximate::Tanh => "tanh",
        };
        format!("approximate='{form}'")
    }
}

/// exp(x) / Σ exp(x) along a dim.
#[derive(Module, Copy, Clone, Debug)]
#[module(extra_repr = Self::describe)]
pub struct Softmax {
    /// The dim whose elements add up to 1; negative dims count from the end.
    #[module(skip)]
    pub dim: i64,
}

/// x − log Σ exp(x) along a dim.
#[derive(Module, Copy, Clone, Debug)]
#[module(extra_repr = Self::describe)]
pub struct LogSoftmax {
    /// The dim along which the exponentials add up to 1; negative dims count from the end.
    #[module(skip)]
    pub dim: i64,
}

impl Softmax {
    fn describe(&self) -> String {
        format!("dim={}", self.dim)
    }
}

impl LogSoftmax {
    fn describe(&self) -> String {
        format!("dim={}", self.dim)
    }
}

macro_rules! forward {
    ($($Type:ty: |$this:ident, $x:ident| $body:expr;)*) => {
        $(impl Forward for $Type {
            type Output = Tensor;
            #[track_caller]
            fn forward(&self, $x: &Tensor) -> Result<Tensor> {
                let $this = self;
                $body
            }
        })*
    };
}
forward! {
    Relu: |_this, x| x.relu();
    Tanh: |_this, x| x.tanh();
    Sigmoid: |_this, x| x.sigmoid();
    Identity: |_this, x| Ok(x.clone());
    Gelu: |this, x| functional::gelu(x, this.approximate);
    Softmax: |this, x| x.softmax(this.dim);
    LogSoftmax: |this, x| x.log_softmax(this.dim);
}
