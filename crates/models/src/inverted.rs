//! What the mobile networks share: convolution, norm and activation in a row, and channels in multiples of eight.

use kiln_nn::init::{Fan, Nonlinearity, kaiming_normal_, zeros_};
use kiln_nn::{BatchNorm2d, Conv2d, Layer, Sequential, seq};
use kiln_tensor::Result;

/// The sizes of a convolution between norms: square, padded so that stride 1 keeps the size.
#[derive(Copy, Clone)]
pub(crate) struct Square {
    pub channels: usize,
    pub filters: usize,
    pub size: usize,
    pub stride: usize,
    pub groups: usize,
}

impl Square {
    /// 1 × 1.
    pub fn pointwise(channels: usize, filters: usize) -> Square {
        Square { channels, filters, size: 1, stride: 1, groups: 1 }
    }

    /// A filter for each channel.
    pub fn depthwise(channels: usize, size: usize, stride: usize) -> Square {
        Square { channels, filters: channels, size, stride, groups: channels }
    }

    /// The convolution, without bias.
    pub fn build(self) -> Result<Conv2d> {
        let options =
            Conv2d::options().stride(self.stride).padding(self.size / 2).groups(self.groups).bias(false);
        let conv = options.build(self.channels, self.filters, self.size)?;
        draw(&conv)?;
        Ok(conv)
    }

    /// With a norm and an activation behind it.
    pub fn then(self, activation: impl Layer + 'static) -> Result<Sequential> {
        Ok(seq![self.build()?, BatchNorm2d::new(self.filters)?, activation])
    }
}

/// Filters as torchvision draws them, no bias.
pub(crate) fn draw(conv: &Conv2d) -> Result<()> {
    kaiming_normal_(&conv.weight, Nonlinearity::Relu, Fan::Out)?;
    conv.bias.as_ref().map_or(Ok(()), |bias| zeros_(bias))
}

/// A multiple of eight near so many channels, and not below nine tenths of them.
pub(crate) fn channels(count: f64) -> usize {
    let near = ((count + 4.0) as usize / 8 * 8).max(8);
    if (near as f64) < 0.9 * count { near + 8 } else { near }
}
