//! Normalising layers.

use kiln_ir::{Error, Loc, Op, Why};
use kiln_tensor::hook::{Arg, Output};
use kiln_tensor::{BatchNorm, DType, Device, Result, Shape, Tensor, no_grad, run_op};

use crate::display::{python_bool, python_float, python_tuple};
use crate::hooks::forward_with_hooks;
use crate::options::options;
use crate::{Buffer, Hooks, Module, Parameter, Training};

fn ones(shape: &[usize], dtype: DType, device: &Device) -> Result<Parameter> {
    Parameter::new(Tensor::full_of(shape, 1.0, dtype, device)?)
}

fn zeros(shape: &[usize], dtype: DType, device: &Device) -> Result<Parameter> {
    Parameter::new(Tensor::full_of(shape, 0.0, dtype, device)?)
}

macro_rules! batch_norm {
    ($BatchNorm:ident, $Options:ident, $ranks:pat, $expected:literal, $shape:literal) => {
        #[doc = concat!("Normalises each channel of ", $shape, " over the batch; in evaluation by the running statistics.")]
        #[derive(Module)]
        #[module(extra_repr = Self::describe)]
        pub struct $BatchNorm {
            /// Scale of each channel.
            pub weight: Option<Parameter>,
            /// Shift of each channel.
            pub bias: Option<Parameter>,
            /// The running mean of each channel.
            pub running_mean: Option<Buffer>,
            /// The running variance of each channel.
            pub running_var: Option<Buffer>,
            /// How many batches the running statistics have seen, i64.
            pub num_batches_tracked: Option<Buffer>,
            training: Training,
            hooks: Hooks,
            #[module(skip)]
            num_features: usize,
            #[module(skip)]
            options: $Options,
        }

        options! {
            #[doc = concat!("The options of [`", stringify!($BatchNorm), "`], with PyTorch's names and defaults.")]
            $Options for $BatchNorm(num_features: usize) {
                /// What is added to the variance, 1e-5 by default.
                eps: f64 = 1e-5,
                /// How far the running statistics move towards a batch's, 0.1 by default; `None` is their plain average
                /// over all batches.
                momentum: Option<f64> = Some(0.1),
                /// Whether there are a scale and a shift; there are by default.
                affine: bool = true,
                /// Whether there is a bias in addition to the scale; true by default.
                bias: bool = true,
                /// Whether there are running statistics; there are by default.
                track_running_stats: bool = true,
            }
        }

        impl $Options {
            /// A layer for this many channels.
            #[track_caller]
            pub fn build(&self, num_features: usize) -> Result<$BatchNorm> {
                let (shape, dtype, device) = ([num_features], self.dtype, &self.device);
                let (affine, shift) = (self.affine, self.affine && self.bias);
                let tracked = |value: f64, shape: &[usize], dtype| {
                    if !self.track_running_stats {
                        return Ok::<_, Error>(None);
                    }
                    Ok(Some(Buffer::new(Tensor::full_of(shape, value, dtype, device)?)))
                };
                Ok($BatchNorm {
                    weight: affine.then(|| ones(&shape, dtype, device)).transpose()?,
                    bias: shift.then(|| zeros(&shape, dtype, device)).transpose()?,
                    running_mean: tracked(0.0, &shape, dtype)?,
                    running_var: tracked(1.0, &shape, dtype)?,
                    num_batches_tracked: tracked(0.0, &[], DType::I64)?,
                    training: Training::default(),
                    hooks: Hooks::default(),
                    num_features,
                    options: self.clone(),
                })
            }
        }

        impl $BatchNorm {
            fn describe(&self) -> String {
                let $Options { eps, momentum, affine, track_running_stats, .. } = self.options;
                format!(
                    "{}, eps={}, momentum={}, affine={}, bias={}, track_running_stats={}",
                    self.num_features,
                    python_float(eps),
                    momentum.map_or("None".into(), python_float),
                    python_bool(affine),
                    python_bool(self.bias.is_some()),
                    python_bool(track_running_stats)
                )
            }

            #[track_caller]
            fn check(&self, x: &Tensor) -> Result<()> {
                let (shape, loc) = (x.shape(), Loc::caller());
                let fail = |why| Err(Error::op(stringify!($BatchNorm), why, loc));
                if !matches!(shape.rank(), $ranks) {
                    return fail(Why::Rank { argument: "x", expected: $expected, got: shape.rank() });
                }
                if shape[1] != self.num_features {
                    let (left, right) = (shape[1], self.num_features);
                    return fail(Why::sizes("the channels of x and num_features", left, right));
                }
                Ok(())
            }
        }

        forward_with_hooks! {
            $BatchNorm: |this, x| {
                this.check(x)?;
                let running = match (&this.running_mean, &this.running_var) {
                    (Some(mean), Some(variance)) => Some((mean.tensor(), variance.tensor())),
                    _ => None,
                };
                let training = this.training.get();
                let mut options = BatchNorm {
                    running,
                    weight: this.weight.as_deref(),
                    bias: this.bias.as_deref(),
                    training,
                    momentum: 0.1,
                    eps: this.options.eps,
                };
                if let (true, Some(count)) = (training, &this.num_batches_tracked) {
                    count.add_(1i64)?;
                    match (this.options.momentum, running) {
                        (Some(momentum), _) => options.momentum = momentum,
                        (None, Some((mean, variance))) => {
                            average(x, mean, variance, count)?;
                            options.running = None;
                        }
                        (None, None) => {}
                    }
                }
                x.batch_norm(options)
            };
        }
    };
}
batch_norm!(BatchNorm1d, BatchNorm1dOptions, 2 | 3, "2 or 3", "`[n, c]` or `[n, c, length]`");
batch_norm!(BatchNorm2d, BatchNorm2dOptions, 4, "4", "`[n, c, height, width]`");

/// Moves running statistics to the average over all batches. The count is a tensor: reading it would end a graph.
#[track_caller]
fn average(x: &Tensor, mean: &Tensor, variance: &Tensor, count: &Tensor) -> Result<()> {
    let _off = no_grad();
    let shape = x.shape();
    let each = shape.numel() / shape[1].max(1);
    if each == 1 {
        // The error of the normalisation itself, before anything changes.
        return x.batch_norm(BatchNorm { training: true, ..BatchNorm::default() }).map(drop);
    }
    let Output::Tensor(moments) = run_op(&Op::BatchMoments {}, &[Arg::Tensor(&x.detach()?)])? else {
        return Ok(());
    };
    let share = count.to_dtype(mean.dtype())?.reciprocal()?;
    mean.lerp_(&moments.select(0, 0)?, &share)?;
    let correction = each as f64 / (each - 1) as f64;
    variance.lerp_(&moments.select(0, 1)?.mul(correction)?, &share)?;
    Ok(())
}

/// (x − mean) / √(variance + eps) over the last dims, scaled and shifted.
#[derive(Module)]
#[module(extra_repr = Self::describe)]
pub struct LayerNorm {
    /// The scale, of the normalised shape.
    pub weight: Option<Parameter>,
    /// The shift, of the normalised shape.
    pub bias: Option<Parameter>,
    training: Training,
    hooks: Hooks,
    #[module(skip)]
    normalized_shape: Shape,
    #[module(skip)]
    eps: f64,
}

options! {
    /// The options of [`LayerNorm`], with PyTorch's names and defaults.
    LayerNormOptions for LayerNorm(normalized_shape: impl Into<Shape>) {
        /// What is added to the variance, 1e-5 by default.
        eps: f64 = 1e-5,
        /// Whether there are a scale and a shift; there are by default.
        elementwise_affine: bool = true,
        /// Whether there is a bias in addition to the scale; true by default.
        bias: bool = true,
    }
}

impl LayerNormOptions {
    /// A layer that normalises over last dims of these sizes.
    #[track_caller]
    pub fn build(&self, normalized_shape: impl Into<Shape>) -> Result<LayerNorm> {
        let shape = normalized_shape.into();
        let weight = self.elementwise_affine.then(|| ones(&shape, self.dtype, &self.device)).transpose()?;
        let has_bias = self.elementwise_affine && self.bias;
        let bias = has_bias.then(|| zeros(&shape, self.dtype, &self.device)).transpose()?;
        Ok(LayerNorm {
            weight,
            bias,
            training: Training::default(),
            hooks: Hooks::default(),
            normalized_shape: shape,
            eps: self.eps,
        })
    }
}

impl LayerNorm {
    fn describe(&self) -> String {
        format!(
            "{}, eps={}, elementwise_affine={}, bias={}",
            python_tuple(&self.normalized_shape),
            python_float(self.eps),
            python_bool(self.weight.is_some()),
            python_bool(self.bias.is_some())
        )
    }
}

/// [`LayerNorm`] over the channels of each pixel of `[n, c, height, width]`.
#[derive(Module)]
#[module(extra_repr = Self::describe)]
pub struct LayerNorm2d {
    /// Scale of each channel.
    pub weight: Option<Parameter>,
    /// Shift of each channel.
    pub bias: Option<Parameter>,
    training: Training,
    hooks: Hooks,
    #[module(skip)]
    num_channels: usize,
    #[module(skip)]
    eps: f64,
}

options! {
    /// The options of [`LayerNorm2d`], with the names and defaults of [`LayerNorm`]'s.
    LayerNorm2dOptions for LayerNorm2d(num_channels: usize) {
        /// What is added to the variance, 1e-5 by default.
        eps: f64 = 1e-5,
        /// Whether there are a scale and a shift; there are by default.
        elementwise_affine: bool = true,
        /// Whether there is a bias in addition to the scale; true by default.
        bias: bool = true,
    }
}

impl LayerNorm2dOptions {
    /// A layer for this many channels.
    #[track_caller]
    pub fn build(&self, num_channels: usize) -> Result<LayerNorm2d> {
        let (affine, shape) = (self.elementwise_affine, [num_channels]);
        Ok(LayerNorm2d {
            weight: affine.then(|| ones(&shape, self.dtype, &self.device)).transpose()?,
            bias: (affine && self.bias).then(|| zeros(&shape, self.dtype, &self.device)).transpose()?,
            training: Training::default(),
            hooks: Hooks::default(),
            num_channels,
            eps: self.eps,
        })
    }
}

impl LayerNorm2d {
    fn describe(&self) -> String {
        format!(
            "{}, eps={}, elementwise_affine={}, bias={}",
            python_tuple(&[self.num_channels]),
            python_float(self.eps),
            python_bool(self.weight.is_some()),
            python_bool(self.bias.is_some())
        )
    }
}

/// (x − mean) / √(variance + eps) over groups of channels of each sample, scaled and shifted.
#[derive(Module)]
#[module(extra_repr = Self::describe)]
pub struct GroupNorm {
    /// Scale of each channel.
    pub weight: Option<Parameter>,
    /// Shift of each channel.
    pub bias: Option<Parameter>,
    training: Training,
    hooks: Hooks,
    #[module(skip)]
    num_groups: usize,
    #[module(skip)]
    num_channels: usize,
    #[module(skip)]
    eps: f64,
}

options! {
    /// The options of [`GroupNorm`], with PyTorch's names and defaults.
    GroupNormOptions for GroupNorm(num_groups: usize, num_channels: usize) {
        /// What is added to the variance, 1e-5 by default.
        eps: f64 = 1e-5,
        /// Whether there are a scale and a shift; there are by default.
        affine: bool = true,
        /// Whether there is a bias in addition to the scale; true by default.
        bias: bool = true,
    }
}

impl GroupNormOptions {
    /// A layer that normalises over groups of channels.
    #[track_caller]
    pub fn build(&self, num_groups: usize, num_channels: usize) -> Result<GroupNorm> {
        if num_groups == 0 || !num_channels.is_multiple_of(num_groups) {
            let (what, by) = ("num_channels", "num_groups");
            let why = Why::Divisible { what, size: num_channels, by, parts: num_groups };
            return Err(Error::op("GroupNorm", why, Loc::caller()));
        }
        let (shape, shift) = ([num_channels], self.affine && self.bias);
        Ok(GroupNorm {
            weight: self.affine.then(|| ones(&shape, self.dtype, &self.device)).transpose()?,
            bias: shift.then(|| zeros(&shape, self.dtype, &self.device)).transpose()?,
            training: Training::default(),
            hooks: Hooks::default(),
            num_groups,
            num_channels,
            eps: self.eps,
        })
    }
}

impl GroupNorm {
    fn describe(&self) -> String {
        format!(
            "{}, {}, eps={}, affine={}, bias={}",
            self.num_groups,
            self.num_channels,
            python_float(self.eps),
            python_bool(self.weight.is_some()),
            python_bool(self.bias.is_some())
        )
    }
}

/// x / √(mean of x² + eps) over the last dims, scaled.
#[derive(Module)]
#[module(extra_repr = Self::describe)]
pub struct RMSNorm {
    /// The scale, of the normalised shape.
    pub weight: Option<Parameter>,
    training: Training,
    hooks: Hooks,
    #[module(skip)]
    normalized_shape: Shape,
    #[module(skip)]
    eps: Option<f64>,
}

options! {
    /// The options of [`RMSNorm`], with PyTorch's names and defaults.
    RMSNormOptions for RMSNorm(normalized_shape: impl Into<Shape>) {
        /// What is added to the mean; by default the smallest step from 1 of the input's dtype.
        eps: Option<f64> = None,
        /// Whether there is a scale; there is by default.
        elementwise_affine: bool = true,
    }
}

impl RMSNormOptions {
    /// A layer that normalises over last dims of these sizes.
    #[track_caller]
    pub fn build(&self, normalized_shape: impl Into<Shape>) -> Result<RMSNorm> {
        let shape = normalized_shape.into();
        let weight = self.elementwise_affine.then(|| ones(&shape, self.dtype, &self.device)).transpose()?;
        Ok(RMSNorm {
            weight,
            training: Training::default(),
            hooks: Hooks::default(),
            normalized_shape: shape,
            eps: self.eps,
        })
    }
}

impl RMSNorm {
    fn describe(&self) -> String {
        format!(
            "{}, eps={}, elementwise_affine={}",
            python_tuple(&self.normalized_shape),
            self.eps.map_or("None".into(), python_float),
            python_bool(self.weight.is_some())
        )
    }
}

forward_with_hooks! {
    LayerNorm: |this, x| {
        x.layer_norm(&this.normalized_shape, this.weight.as_deref(), this.bias.as_deref(), this.eps)
    };
    LayerNorm2d: |this, x| {
        let pixels = x.permute([0, 2, 3, 1])?;
        let (weight, bias) = (this.weight.as_deref(), this.bias.as_deref());
        pixels.layer_norm(&[this.num_channels], weight, bias, this.eps)?.permute([0, 3, 1, 2])
    };
    GroupNorm: |this, x| {
        x.group_norm(this.num_groups, this.weight.as_deref(), this.bias.as_deref(), this.eps)
    };
    RMSNorm: |this, x| x.rms_norm(&this.normalized_shape, this.weight.as_deref(), this.eps);
}
