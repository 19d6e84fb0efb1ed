//! Activations as modules.

use kiln_tensor::{Approximate, Result, Tensor};

use crate::display::python_float;
use crate::forward::forward;
use crate::options::options;
use crate::{Module, Parameter, Training, functional, init};

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

macro_rules! plain_activations {
    ($($(#[$doc:meta])* $Type:ident)*) => {
        $(
            $(#[$doc])*
            #[derive(Module, Copy, Clone, Debug, Default)]
            pub struct $Type;
        )*
    };
}
plain_activations! {
    /// elu with the factors that keep mean and variance.
    SELU
    /// min(max(x, 0), 6)
    ReLU6
    /// x / (1 + e⁻ˣ)
    SiLU
    /// x · tanh(log(1 + eˣ))
    Mish
    /// min(max(x + 3, 0), 6) / 6
    Hardsigmoid
    /// x · hardsigmoid(x)
    Hardswish
    /// x − tanh x
    Tanhshrink
    /// x / (1 + |x|)
    Softsign
    /// log(1 / (1 + e⁻ˣ))
    LogSigmoid
}

/// Activations with numbers: their fields, and what PyTorch prints of them.
macro_rules! activations {
    ($($(#[$doc:meta])* $Type:ident { $($(#[$field_doc:meta])* $field:ident: $Number:ty = $default:expr),* }
        |$this:ident| $describe:expr;)*) => {
        $(
            $(#[$doc])*
            #[derive(Module, Copy, Clone, Debug)]
            #[module(extra_repr = Self::describe)]
            pub struct $Type {
                $($(#[$field_doc])* #[module(skip)] pub $field: $Number,)*
            }

            impl $Type {
                /// With these numbers.
                pub const fn new($($field: $Number),*) -> $Type {
                    $Type { $($field),* }
                }

                fn describe(&self) -> String {
                    let $this = self;
                    $describe
                }
            }

            impl Default for $Type {
                /// PyTorch's default.
                fn default() -> $Type {
                    $Type { $($field: $default),* }
                }
            }
        )*
    };
}
activations! {
    /// x where positive, alpha·(eˣ − 1) elsewhere.
    ELU {
        /// The factor, 1 by default.
        alpha: f64 = 1.0
    } |this| format!("alpha={}", python_float(this.alpha));
    /// x where positive, alpha·(e^(x/alpha) − 1) elsewhere.
    CELU {
        /// The factor, 1 by default.
        alpha: f64 = 1.0
    } |this| format!("alpha={}", python_float(this.alpha));
    /// x where positive, negative_slope·x elsewhere.
    LeakyReLU {
        /// The slope below zero, 0.01 by default.
        negative_slope: f64 = 0.01
    } |this| format!("negative_slope={}", python_float(this.negative_slope));
    /// x limited to [min_val, max_val].
    Hardtanh {
        /// The lower limit, −1 by default.
        min_val: f64 = -1.0,
        /// The upper limit, 1 by default.
        max_val: f64 = 1.0
    } |this| format!("min_val={}, max_val={}", python_float(this.min_val), python_float(this.max_val));
    /// x, and 0 where |x| ≤ lambd.
    Hardshrink {
        /// The limit, ½ by default.
        lambd: f64 = 0.5
    } |this| python_float(this.lambd);
    /// x moved towards 0 by lambd.
    Softshrink {
        /// How far, ½ by default.
        lambd: f64 = 0.5
    } |this| python_float(this.lambd);
    /// log(1 + e^(beta·x)) / beta, and x where beta·x is above the threshold.
    Softplus {
        /// The steepness, 1 by default.
        beta: f64 = 1.0,
        /// Where it becomes linear, 20 by default.
        threshold: f64 = 20.0
    } |this| format!("beta={}, threshold={}", python_float(this.beta), python_float(this.threshold));
    /// The first half along a dim, gated by the sigmoid of the second.
    GLU {
        /// The dim, the last by default.
        dim: i64 = -1
    } |this| format!("dim={}", this.dim);
    /// softmax(−x) along a dim.
    Softmin {
        /// The dim, the last by default.
        dim: i64 = -1
    } |this| format!("dim={}", this.dim);
}

/// x where it is above the threshold, value elsewhere.
#[derive(Module, Copy, Clone, Debug)]
#[module(extra_repr = Self::describe)]
pub struct Threshold {
    /// The threshold.
    #[module(skip)]
    pub threshold: f64,
    /// What stands for what is not above it.
    #[module(skip)]
    pub value: f64,
}

impl Threshold {
    fn describe(&self) -> String {
        format!("threshold={}, value={}", python_float(self.threshold), python_float(self.value))
    }
}

/// x where positive, a learned slope times x elsewhere; one slope, or one for each channel (dim 1).
#[derive(Module)]
#[module(extra_repr = Self::describe)]
pub struct PReLU {
    /// The slopes.
    pub weight: Parameter,
}

impl PReLU {
    fn describe(&self) -> String {
        format!("num_parameters={}", self.weight.numel())
    }
}

options! {
    /// The options of [`PReLU`], with PyTorch's names and defaults.
    ///
    /// ```
    /// # use kiln_nn::PReLU;
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let layer = PReLU::options().num_parameters(4).init(0.1).build()?;
    /// assert_eq!(layer.weight.to_vec::<f32>()?, [0.1; 4]);
    /// # Ok(()) }
    /// ```
    PReLUOptions for PReLU() {
        /// How many slopes there are: one by default, or one a channel.
        num_parameters: usize = 1,
        /// What they start as, ¼ by default.
        init: f64 = 0.25,
    }
}

impl PReLUOptions {
    /// A layer.
    #[track_caller]
    pub fn build(&self) -> Result<PReLU> {
        let slopes = Tensor::full_of([self.num_parameters], self.init, self.dtype, &self.device)?;
        Ok(PReLU { weight: Parameter::new(slopes)? })
    }
}

/// x where positive, a slope times x elsewhere: drawn from U(lower, upper) for each element in training, their
/// middle in evaluation.
#[derive(Module, Debug)]
#[module(extra_repr = Self::describe)]
pub struct RReLU {
    training: Training,
    #[module(skip)]
    lower: f64,
    #[module(skip)]
    upper: f64,
}

impl RReLU {
    /// Slopes between these.
    pub fn new(lower: f64, upper: f64) -> RReLU {
        RReLU { training: Training::default(), lower, upper }
    }

    fn describe(&self) -> String {
        format!("lower={}, upper={}", python_float(self.lower), python_float(self.upper))
    }

    #[track_caller]
    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        if !self.training.get() {
            return x.leaky_relu((self.lower + self.upper) / 2.0);
        }
        let ty = x.ty();
        let slopes = init::uniform(ty.shape, self.lower, self.upper, ty.dtype, &ty.device)?;
        x.ge(0.0)?.where_self(x, &x.mul(&slopes)?)
    }
}

impl Default for RReLU {
    /// Slopes between ⅛ and ⅓.
    fn default() -> RReLU {
        RReLU::new(1.0 / 8.0, 1.0 / 3.0)
    }
}

forward! {
    Relu: |_this, x| x.relu();
    Tanh: |_this, x| x.tanh();
    Sigmoid: |_this, x| x.sigmoid();
    Identity: |_this, x| Ok(x.clone());
    Gelu: |this, x| functional::gelu(x, this.approximate);
    Softmax: |this, x| x.softmax(this.dim);
    LogSoftmax: |this, x| x.log_softmax(this.dim);
    SELU: |_this, x| x.selu();
    ReLU6: |_this, x| x.relu6();
    SiLU: |_this, x| x.silu();
    Mish: |_this, x| x.mish();
    Hardsigmoid: |_this, x| x.hardsigmoid();
    Hardswish: |_this, x| x.hardswish();
    Tanhshrink: |_this, x| x.tanhshrink();
    Softsign: |_this, x| x.div(&x.abs()?.add(1.0)?);
    LogSigmoid: |_this, x| x.log_sigmoid();
    ELU: |this, x| x.elu(this.alpha);
    CELU: |this, x| x.celu(this.alpha);
    LeakyReLU: |this, x| x.leaky_relu(this.negative_slope);
    Hardtanh: |this, x| x.hardtanh(this.min_val, this.max_val);
    Hardshrink: |this, x| x.hardshrink(this.lambd);
    Softshrink: |this, x| x.softshrink(this.lambd);
    Softplus: |this, x| x.softplus(this.beta, this.threshold);
    GLU: |this, x| x.glu(this.dim);
    Softmin: |this, x| x.neg()?.softmax(this.dim);
    Threshold: |this, x| x.threshold(this.threshold, this.value);
    PReLU: |this, x| x.prelu(&this.weight);
    RReLU: |this, x| this.apply(x);
}
