//! EfficientNet: torchvision's `efficientnet_b0`.

use kiln_nn::init::{uniform_, zeros_};
use kiln_nn::{
    AdaptiveAvgPool2d, BatchNorm2d, Dropout, Forward, Linear, Module, Sequential, SiLU, Sigmoid,
    SqueezeExcitation, StochasticDepth, seq,
};
use kiln_tensor::{Result, Tensor};

use crate::inverted::{Square, channels, draw};

/// A stage of blocks of a kind, by torchvision's names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MBConvConfig {
    /// So many times as many channels are there inside a block.
    pub expand_ratio: usize,
    /// Size of the depthwise convolution.
    pub kernel: usize,
    /// Stride of the first block.
    pub stride: usize,
    /// Channels before the first block.
    pub input_channels: usize,
    /// Channels behind each block.
    pub out_channels: usize,
    /// Number of blocks.
    pub num_layers: usize,
}

/// The size of an EfficientNet, by torchvision's names.
#[derive(Clone, Debug, PartialEq)]
pub struct EfficientNetConfig {
    /// The stages.
    pub inverted_residual_setting: Vec<MBConvConfig>,
    /// Probability of dropout before the classifier.
    pub dropout: f64,
    /// Probability that the last block is left out for a sample; it grows from 0 at the first.
    pub stochastic_depth_prob: f64,
    /// Number of classes.
    pub num_classes: usize,
}

impl EfficientNetConfig {
    /// EfficientNet-B0 for so many classes.
    pub fn b0(num_classes: usize) -> EfficientNetConfig {
        let stages = [
            [1, 3, 1, 32, 16, 1],
            [6, 3, 2, 16, 24, 2],
            [6, 5, 2, 24, 40, 2],
            [6, 3, 2, 40, 80, 3],
            [6, 5, 1, 80, 112, 3],
            [6, 5, 2, 112, 192, 4],
            [6, 3, 1, 192, 320, 1],
        ];
        let stage = |[expand_ratio, kernel, stride, input_channels, out_channels, num_layers]: [usize; 6]| {
            MBConvConfig { expand_ratio, kernel, stride, input_channels, out_channels, num_layers }
        };
        EfficientNetConfig {
            inverted_residual_setting: stages.map(stage).to_vec(),
            dropout: 0.2,
            stochastic_depth_prob: 0.2,
            num_classes,
        }
    }
}

/// An inverted residual with squeeze and excitation.
#[derive(Module)]
pub struct MBConv {
    /// Expansion, depthwise convolution, squeeze and excitation, projection.
    pub block: Sequential,
    /// Before the sum with the input.
    pub stochastic_depth: StochasticDepth,
    #[module(skip)]
    use_res_connect: bool,
}

impl MBConv {
    fn new(config: MBConvConfig, stochastic_depth_prob: f64) -> Result<MBConv> {
        let MBConvConfig { expand_ratio, kernel, stride, input_channels, out_channels, .. } = config;
        let expanded = channels((input_channels * expand_ratio) as f64);
        let mut block = Sequential::new();
        if expanded != input_channels {
            block.push(Square::pointwise(input_channels, expanded).then(SiLU)?);
        }
        block.push(Square::depthwise(expanded, kernel, stride).then(SiLU)?);
        let excitation = SqueezeExcitation::with(expanded, (input_channels / 4).max(1), SiLU, Sigmoid)?;
        draw(&excitation.fc1)?;
        draw(&excitation.fc2)?;
        block.push(excitation);
        block.push(seq![Square::pointwise(expanded, out_channels).build()?, BatchNorm2d::new(out_channels)?]);
        Ok(MBConv {
            block,
            stochastic_depth: StochasticDepth::new(stochastic_depth_prob)?,
            use_res_connect: stride == 1 && input_channels == out_channels,
        })
    }
}

impl Forward for MBConv {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.block.forward(x)?;
        if self.use_res_connect { self.stochastic_depth.forward(&y)?.add(x) } else { Ok(y) }
    }
}

/// A network of [`MBConv`] blocks over images `[n, 3, height, width]`.
///
/// ```
/// use kiln_models::efficientnet_b0;
/// use kiln_nn::{Forward, Module};
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let model = efficientnet_b0(10)?;
/// model.eval();
/// let y = model.forward(&Tensor::ones([1, 3, 32, 32], &Device::Cpu)?)?;
/// assert_eq!(y.shape().to_vec(), [1, 10]);
/// # Ok(()) }
/// ```
#[derive(Module)]
pub struct EfficientNet {
    /// A convolution, the stages, and a convolution to four times the channels.
    pub features: Sequential,
    /// The mean over all pixels.
    pub avgpool: AdaptiveAvgPool2d,
    /// Dropout and a linear layer.
    pub classifier: Sequential,
}

impl EfficientNet {
    /// A network of this size, drawn as torchvision draws it.
    pub fn new(config: &EfficientNetConfig) -> Result<EfficientNet> {
        let stages = &config.inverted_residual_setting;
        let first = stages.first().map_or(32, |stage| stage.input_channels);
        let last = stages.last().map_or(first, |stage| stage.out_channels);
        let blocks: usize = stages.iter().map(|stage| stage.num_layers).sum();
        let mut features =
            seq![Square { channels: 3, filters: first, size: 3, stride: 2, groups: 1 }.then(SiLU)?];
        let mut block = 0;
        for stage in stages {
            let mut layers = Sequential::new();
            for layer in 0..stage.num_layers {
                let following = MBConvConfig { stride: 1, input_channels: stage.out_channels, ..*stage };
                let config_of_layer = if layer == 0 { *stage } else { following };
                let prob = config.stochastic_depth_prob * block as f64 / blocks as f64;
                layers.push(MBConv::new(config_of_layer, prob)?);
                block += 1;
            }
            features.push(layers);
        }
        features.push(Square::pointwise(last, 4 * last).then(SiLU)?);
        let fc = Linear::new(4 * last, config.num_classes)?;
        let range = 1.0 / (config.num_classes.max(1) as f64).sqrt();
        uniform_(&fc.weight, -range, range)?;
        fc.bias.as_ref().map_or(Ok(()), |bias| zeros_(bias))?;
        Ok(EfficientNet {
            features,
            avgpool: AdaptiveAvgPool2d::new(1),
            classifier: seq![Dropout::new(config.dropout)?, fc],
        })
    }
}

impl Forward for EfficientNet {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.avgpool.forward(&self.features.forward(x)?)?;
        self.classifier.forward(&x.flatten_dims(1, -1)?)
    }
}

/// EfficientNet-B0.
pub fn efficientnet_b0(num_classes: usize) -> Result<EfficientNet> {
    EfficientNet::new(&EfficientNetConfig::b0(num_classes))
}
