//! MobileNetV2: torchvision's `mobilenet_v2`.

use kiln_nn::init::{normal_, zeros_};
use kiln_nn::{AdaptiveAvgPool2d, BatchNorm2d, Dropout, Forward, Linear, Module, ReLU6, Sequential, seq};
use kiln_tensor::{Result, Tensor};

use crate::inverted::{Square, channels};

/// Blocks of a kind, one after the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InvertedResidualSetting {
    /// So many times as many channels are there inside a block.
    pub expand_ratio: usize,
    /// Channels behind each block.
    pub channels: usize,
    /// Number of blocks.
    pub num_blocks: usize,
    /// Stride of the first one.
    pub stride: usize,
}

/// The size of a MobileNetV2, by torchvision's names.
#[derive(Clone, Debug, PartialEq)]
pub struct MobileNetV2Config {
    /// A factor of all channels.
    pub width_mult: f64,
    /// The blocks.
    pub inverted_residual_setting: Vec<InvertedResidualSetting>,
    /// Probability of dropout before the classifier.
    pub dropout: f64,
    /// Number of classes.
    pub num_classes: usize,
}

impl MobileNetV2Config {
    /// The network of the paper, for so many classes.
    pub fn standard(num_classes: usize) -> MobileNetV2Config {
        let settings = [
            [1, 16, 1, 1],
            [6, 24, 2, 2],
            [6, 32, 3, 2],
            [6, 64, 4, 2],
            [6, 96, 3, 1],
            [6, 160, 3, 2],
            [6, 320, 1, 1],
        ];
        let setting = |[expand_ratio, channels, num_blocks, stride]: [usize; 4]| InvertedResidualSetting {
            expand_ratio,
            channels,
            num_blocks,
            stride,
        };
        let inverted_residual_setting = settings.map(setting).to_vec();
        MobileNetV2Config { width_mult: 1.0, inverted_residual_setting, dropout: 0.2, num_classes }
    }
}

/// Channels are expanded, each is filtered on its own, and they are projected to few again.
#[derive(Module)]
pub struct InvertedResidual {
    /// Expansion, depthwise convolution, projection.
    pub conv: Sequential,
    #[module(skip)]
    use_res_connect: bool,
}

impl InvertedResidual {
    fn new(from: usize, to: usize, stride: usize, expand_ratio: usize) -> Result<InvertedResidual> {
        let hidden = from * expand_ratio;
        let mut conv = Sequential::new();
        if expand_ratio != 1 {
            conv.push(Square::pointwise(from, hidden).then(ReLU6)?);
        }
        conv.push(Square::depthwise(hidden, 3, stride).then(ReLU6)?);
        conv.push(Square::pointwise(hidden, to).build()?);
        conv.push(BatchNorm2d::new(to)?);
        Ok(InvertedResidual { conv, use_res_connect: stride == 1 && from == to })
    }
}

impl Forward for InvertedResidual {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.conv.forward(x)?;
        if self.use_res_connect { x.add(&y) } else { Ok(y) }
    }
}

/// A network of inverted residuals over images `[n, 3, height, width]`.
///
/// ```
/// use kiln_models::{MobileNetV2, MobileNetV2Config};
/// use kiln_nn::Forward;
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let model = MobileNetV2::new(&MobileNetV2Config { width_mult: 0.25, ..MobileNetV2Config::standard(10) })?;
/// let y = model.forward(&Tensor::ones([2, 3, 64, 64], &Device::Cpu)?)?;
/// assert_eq!(y.shape().to_vec(), [2, 10]);
/// # Ok(()) }
/// ```
#[derive(Module)]
pub struct MobileNetV2 {
    /// A convolution, the blocks, and a convolution to many channels.
    pub features: Sequential,
    /// Dropout and a linear layer.
    pub classifier: Sequential,
}

impl MobileNetV2 {
    /// A network of this size, drawn as torchvision draws it.
    pub fn new(config: &MobileNetV2Config) -> Result<MobileNetV2> {
        let wide = |count: usize, factor: f64| channels(count as f64 * factor);
        let mut from = wide(32, config.width_mult);
        let mut features =
            seq![Square { channels: 3, filters: from, size: 3, stride: 2, groups: 1 }.then(ReLU6)?];
        for setting in &config.inverted_residual_setting {
            let to = wide(setting.channels, config.width_mult);
            for block in 0..setting.num_blocks {
                let stride = if block == 0 { setting.stride } else { 1 };
                features.push(InvertedResidual::new(from, to, stride, setting.expand_ratio)?);
                from = to;
            }
        }
        let last = wide(1280, config.width_mult.max(1.0));
        features.push(Square::pointwise(from, last).then(ReLU6)?);
        let fc = Linear::new(last, config.num_classes)?;
        normal_(&fc.weight, 0.0, 0.01)?;
        fc.bias.as_ref().map_or(Ok(()), |bias| zeros_(bias))?;
        Ok(MobileNetV2 { features, classifier: seq![Dropout::new(config.dropout)?, fc] })
    }
}

impl Forward for MobileNetV2 {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = AdaptiveAvgPool2d::new(1).forward(&self.features.forward(x)?)?;
        self.classifier.forward(&x.flatten_dims(1, -1)?)
    }
}

/// MobileNetV2.
pub fn mobilenet_v2(num_classes: usize) -> Result<MobileNetV2> {
    MobileNetV2::new(&MobileNetV2Config::standard(num_classes))
}
