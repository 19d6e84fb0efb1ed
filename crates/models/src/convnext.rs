//! ConvNeXt: torchvision's `convnext_tiny`.

use kiln_nn::init::{trunc_normal_, zeros_};
use kiln_nn::{
    AdaptiveAvgPool2d, Conv2d, Flatten, Forward, Gelu, LayerNorm, LayerNorm2d, Linear, Module, Parameter,
    Permute, Sequential, StochasticDepth, seq,
};
use kiln_tensor::{Device, Result, Tensor};

/// A stage of blocks, by torchvision's names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CNBlockConfig {
    /// Channels of the blocks.
    pub input_channels: usize,
    /// Channels behind the stage, at half the size; none where the stage is the last.
    pub out_channels: Option<usize>,
    /// Number of blocks.
    pub num_layers: usize,
}

/// The size of a ConvNeXt, by torchvision's names.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvNeXtConfig {
    /// The stages.
    pub block_setting: Vec<CNBlockConfig>,
    /// Probability that the last block is left out for a sample; it grows from 0 at the first.
    pub stochastic_depth_prob: f64,
    /// What each block's channels are multiplied by at first.
    pub layer_scale: f64,
    /// Number of classes.
    pub num_classes: usize,
}

impl ConvNeXtConfig {
    /// ConvNeXt-T for so many classes.
    pub fn tiny(num_classes: usize) -> ConvNeXtConfig {
        let stages = [(96, Some(192), 3), (192, Some(384), 3), (384, Some(768), 9), (768, None, 3)];
        let stage = |(input_channels, out_channels, num_layers)| CNBlockConfig {
            input_channels,
            out_channels,
            num_layers,
        };
        ConvNeXtConfig {
            block_setting: stages.map(stage).to_vec(),
            stochastic_depth_prob: 0.1,
            layer_scale: 1e-6,
            num_classes,
        }
    }
}

/// The size that torchvision's norms add to variances.
const EPS: f64 = 1e-6;

/// A 7 × 7 depthwise convolution, and a perceptron over the channels of each pixel, with a residual connection.
#[derive(Module)]
pub struct CNBlock {
    /// A factor of each channel, `[channels, 1, 1]`.
    pub layer_scale: Parameter,
    /// The convolution, a norm, and the perceptron.
    pub block: Sequential,
    /// Before the sum with the input.
    pub stochastic_depth: StochasticDepth,
}

impl CNBlock {
    fn new(channels: usize, layer_scale: f64, stochastic_depth_prob: f64) -> Result<CNBlock> {
        let conv = Conv2d::options().padding(3).groups(channels).build(channels, channels, 7)?;
        let block = seq![
            drawn(conv)?,
            Permute::new(&[0, 2, 3, 1]),
            LayerNorm::options().eps(EPS).build([channels])?,
            dense(channels, 4 * channels)?,
            Gelu,
            dense(4 * channels, channels)?,
            Permute::new(&[0, 3, 1, 2]),
        ];
        Ok(CNBlock {
            block,
            layer_scale: Parameter::new(Tensor::full([channels, 1, 1], layer_scale, &Device::Cpu)?)?,
            stochastic_depth: StochasticDepth::new(stochastic_depth_prob)?,
        })
    }
}

impl Forward for CNBlock {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.layer_scale.mul(&self.block.forward(x)?)?;
        self.stochastic_depth.forward(&y)?.add(x)
    }
}

/// A network of [`CNBlock`]s over images `[n, 3, height, width]`.
///
/// ```
/// use kiln_models::convnext::{CNBlockConfig, ConvNeXt, ConvNeXtConfig};
/// use kiln_nn::Forward;
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let stages = [(8, Some(16), 1), (16, None, 2)];
/// let stages = stages.map(|(input_channels, out_channels, num_layers)| CNBlockConfig {
///     input_channels,
///     out_channels,
///     num_layers,
/// });
/// let config = ConvNeXtConfig { block_setting: stages.to_vec(), ..ConvNeXtConfig::tiny(10) };
/// let y = ConvNeXt::new(&config)?.forward(&Tensor::ones([2, 3, 32, 32], &Device::Cpu)?)?;
/// assert_eq!(y.shape().to_vec(), [2, 10]);
/// # Ok(()) }
/// ```
#[derive(Module)]
pub struct ConvNeXt {
    /// Patches of 4 × 4, the stages, and what halves the size between them.
    pub features: Sequential,
    /// The mean over all pixels.
    pub avgpool: AdaptiveAvgPool2d,
    /// A norm and a linear layer.
    pub classifier: Sequential,
}

impl ConvNeXt {
    /// A network of this size, drawn as torchvision draws it.
    pub fn new(config: &ConvNeXtConfig) -> Result<ConvNeXt> {
        let stages = &config.block_setting;
        let first = stages.first().map_or(96, |stage| stage.input_channels);
        let last = stages.last().map_or(first, |stage| stage.out_channels.unwrap_or(stage.input_channels));
        let blocks: usize = stages.iter().map(|stage| stage.num_layers).sum();
        let patches = drawn(Conv2d::options().stride(4).build(3, first, 4)?)?;
        let mut features = seq![seq![patches, norm(first)?]];
        let mut block = 0;
        for stage in stages {
            let mut layers = Sequential::new();
            for _ in 0..stage.num_layers {
                let prob = config.stochastic_depth_prob * block as f64 / (blocks.max(2) - 1) as f64;
                layers.push(CNBlock::new(stage.input_channels, config.layer_scale, prob)?);
                block += 1;
            }
            features.push(layers);
            if let Some(out_channels) = stage.out_channels {
                let halved = Conv2d::options().stride(2).build(stage.input_channels, out_channels, 2)?;
                features.push(seq![norm(stage.input_channels)?, drawn(halved)?]);
            }
        }
        Ok(ConvNeXt {
            features,
            avgpool: AdaptiveAvgPool2d::new(1),
            classifier: seq![norm(last)?, Flatten::new(1, -1), dense(last, config.num_classes)?],
        })
    }
}

impl Forward for ConvNeXt {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.classifier.forward(&self.avgpool.forward(&self.features.forward(x)?)?)
    }
}

/// A norm over the channels of each pixel.
fn norm(channels: usize) -> Result<LayerNorm2d> {
    LayerNorm2d::options().eps(EPS).build(channels)
}

fn drawn(conv: Conv2d) -> Result<Conv2d> {
    draw(&conv.weight, conv.bias.as_ref())?;
    Ok(conv)
}

fn dense(from: usize, to: usize) -> Result<Linear> {
    let linear = Linear::new(from, to)?;
    draw(&linear.weight, linear.bias.as_ref())?;
    Ok(linear)
}

/// Weights as torchvision draws them.
fn draw(weight: &Tensor, bias: Option<&Parameter>) -> Result<()> {
    trunc_normal_(weight, 0.0, 0.02, -2.0, 2.0)?;
    bias.map_or(Ok(()), |bias| zeros_(bias))
}

/// ConvNeXt-T.
pub fn convnext_tiny(num_classes: usize) -> Result<ConvNeXt> {
    ConvNeXt::new(&ConvNeXtConfig::tiny(num_classes))
}
