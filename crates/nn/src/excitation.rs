//! Squeeze and excitation: channels weighed by what is in the whole image.

use kiln_tensor::{Result, Tensor};

use crate::{AdaptiveAvgPool2d, Conv2d, Forward, Module, Relu, Sigmoid};

/// Images `[n, c, height, width]` times a weight of each channel, which two 1 × 1 convolutions make of the channels'
/// means.
///
/// ```
/// use kiln_nn::{Forward, SqueezeExcitation};
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let layer = SqueezeExcitation::new(8, 2)?;
/// let y = layer.forward(&Tensor::ones([1, 8, 4, 4], &Device::Cpu)?)?;
/// assert!(y.to_vec::<f32>()?.iter().all(|y| (0.0..1.0).contains(y)));
/// # Ok(()) }
/// ```
#[derive(Module)]
#[module(name = "SqueezeExcitation")]
pub struct SqueezeExcitation<A: Module = Relu, S: Module = Sigmoid> {
    /// The mean of each channel.
    pub avgpool: AdaptiveAvgPool2d,
    /// To the squeezed channels.
    pub fc1: Conv2d,
    /// And back.
    pub fc2: Conv2d,
    /// Behind `fc1`.
    pub activation: A,
    /// Behind `fc2`.
    pub scale_activation: S,
}

impl SqueezeExcitation {
    /// With ReLU between the convolutions and a sigmoid behind them.
    #[track_caller]
    pub fn new(input_channels: usize, squeeze_channels: usize) -> Result<SqueezeExcitation> {
        SqueezeExcitation::with(input_channels, squeeze_channels, Relu, Sigmoid)
    }
}

impl<A: Module, S: Module> SqueezeExcitation<A, S> {
    /// With these activations between the convolutions and behind them.
    #[track_caller]
    pub fn with(
        input_channels: usize,
        squeeze_channels: usize,
        activation: A,
        scale_activation: S,
    ) -> Result<SqueezeExcitation<A, S>> {
        Ok(SqueezeExcitation {
            avgpool: AdaptiveAvgPool2d::new(1),
            fc1: Conv2d::new(input_channels, squeeze_channels, 1)?,
            fc2: Conv2d::new(squeeze_channels, input_channels, 1)?,
            activation,
            scale_activation,
        })
    }
}

impl<A, S> Forward for SqueezeExcitation<A, S>
where
    A: Module + Forward<Output = Tensor>,
    S: Module + Forward<Output = Tensor>,
{
    type Output = Tensor;
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let scale = self.activation.forward(&self.fc1.forward(&self.avgpool.forward(x)?)?)?;
        self.scale_activation.forward(&self.fc2.forward(&scale)?)?.mul(x)
    }
}
