//! Residual networks: torchvision's `resnet18`, `resnet34` and `resnet50`.

use kiln_nn::init::{Fan, Nonlinearity, kaiming_normal_};
use kiln_nn::{
    AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Forward, Linear, MaxPool2d, Module, Relu, Sequential, seq,
};
use kiln_tensor::{Result, Tensor};

/// What a residual network is made of.
pub trait ResNetBlock: Module + Forward<Output = Tensor> + Sized {
    /// So many times as many channels come out as the block is wide.
    const EXPANSION: usize;

    /// A block from this many channels to [`EXPANSION`](Self::EXPANSION) · width, over every `stride`-th pixel.
    fn build(channels: usize, width: usize, stride: usize) -> Result<Self>;
}

/// Two 3 × 3 convolutions with a residual connection.
#[derive(Module)]
pub struct BasicBlock {
    /// The convolution that may leave pixels out.
    pub conv1: Conv2d,
    /// Behind `conv1`.
    pub bn1: BatchNorm2d,
    /// Behind `bn1` and behind the sum.
    pub relu: Relu,
    /// The second convolution.
    pub conv2: Conv2d,
    /// Behind `conv2`.
    pub bn2: BatchNorm2d,
    /// The shortcut, where the shape changes.
    pub downsample: Option<Sequential>,
}

impl ResNetBlock for BasicBlock {
    const EXPANSION: usize = 1;

    fn build(channels: usize, width: usize, stride: usize) -> Result<BasicBlock> {
        Ok(BasicBlock {
            conv1: conv(channels, width, 3, stride)?,
            bn1: BatchNorm2d::new(width)?,
            relu: Relu,
            conv2: conv(width, width, 3, 1)?,
            bn2: BatchNorm2d::new(width)?,
            downsample: shortcut(channels, width, stride)?,
        })
    }
}

impl Forward for BasicBlock {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.relu.forward(&self.bn1.forward(&self.conv1.forward(x)?)?)?;
        let y = self.bn2.forward(&self.conv2.forward(&y)?)?;
        self.relu.forward(&y.add(&skipped(&self.downsample, x)?)?)
    }
}

/// A 3 × 3 convolution between two 1 × 1 ones that shrink and expand the channels, with a residual connection.
#[derive(Module)]
pub struct Bottleneck {
    /// 1 × 1, to the width of the block.
    pub conv1: Conv2d,
    /// Behind `conv1`.
    pub bn1: BatchNorm2d,
    /// 3 × 3; the convolution that may leave pixels out.
    pub conv2: Conv2d,
    /// Behind `conv2`.
    pub bn2: BatchNorm2d,
    /// 1 × 1, to four times the width.
    pub conv3: Conv2d,
    /// Behind `conv3`.
    pub bn3: BatchNorm2d,
    /// Behind the first two norms and behind the sum.
    pub relu: Relu,
    /// The shortcut, where the shape changes.
    pub downsample: Option<Sequential>,
}

impl ResNetBlock for Bottleneck {
    const EXPANSION: usize = 4;

    fn build(channels: usize, width: usize, stride: usize) -> Result<Bottleneck> {
        let wide = width * Self::EXPANSION;
        Ok(Bottleneck {
            conv1: conv(channels, width, 1, 1)?,
            bn1: BatchNorm2d::new(width)?,
            conv2: conv(width, width, 3, stride)?,
            bn2: BatchNorm2d::new(width)?,
            conv3: conv(width, wide, 1, 1)?,
            bn3: BatchNorm2d::new(wide)?,
            relu: Relu,
            downsample: shortcut(channels, wide, stride)?,
        })
    }
}

impl Forward for Bottleneck {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.relu.forward(&self.bn1.forward(&self.conv1.forward(x)?)?)?;
        let y = self.relu.forward(&self.bn2.forward(&self.conv2.forward(&y)?)?)?;
        let y = self.bn3.forward(&self.conv3.forward(&y)?)?;
        self.relu.forward(&y.add(&skipped(&self.downsample, x)?)?)
    }
}

/// A residual network over images `[n, 3, height, width]`.
///
/// ```
/// use kiln_models::resnet18;
/// use kiln_nn::Forward;
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let model = resnet18(10)?;
/// let y = model.forward(&Tensor::ones([2, 3, 32, 32], &Device::Cpu)?)?;
/// assert_eq!(y.shape().to_vec(), [2, 10]);
/// assert_eq!(model.layer2[0].conv1.weight.shape().to_vec(), [128, 64, 3, 3]);
/// # Ok(()) }
/// ```
#[derive(Module)]
#[module(name = "ResNet")]
pub struct ResNet<B: ResNetBlock> {
    /// 7 × 7, every second pixel.
    pub conv1: Conv2d,
    /// Behind `conv1`.
    pub bn1: BatchNorm2d,
    /// Behind `bn1`.
    pub relu: Relu,
    /// Every second pixel again.
    pub maxpool: MaxPool2d,
    /// Blocks of width 64.
    pub layer1: Vec<B>,
    /// Blocks of width 128.
    pub layer2: Vec<B>,
    /// Blocks of width 256.
    pub layer3: Vec<B>,
    /// Blocks of width 512.
    pub layer4: Vec<B>,
    /// The mean over all pixels.
    pub avgpool: AdaptiveAvgPool2d,
    /// The classifier.
    pub fc: Linear,
}

impl<B: ResNetBlock> ResNet<B> {
    /// So many blocks of each width, drawn as torchvision draws them.
    pub fn new(blocks: [usize; 4], num_classes: usize) -> Result<ResNet<B>> {
        let mut channels = 64;
        let mut layer = |i: usize, width: usize, stride: usize| -> Result<Vec<B>> {
            let mut layer = Vec::with_capacity(blocks[i]);
            for block in 0..blocks[i] {
                layer.push(B::build(channels, width, if block == 0 { stride } else { 1 })?);
                channels = width * B::EXPANSION;
            }
            Ok(layer)
        };
        Ok(ResNet {
            conv1: conv(3, 64, 7, 2)?,
            bn1: BatchNorm2d::new(64)?,
            relu: Relu,
            maxpool: MaxPool2d::options().stride(2).padding(1).build(3),
            layer1: layer(0, 64, 1)?,
            layer2: layer(1, 128, 2)?,
            layer3: layer(2, 256, 2)?,
            layer4: layer(3, 512, 2)?,
            avgpool: AdaptiveAvgPool2d::new(1),
            fc: Linear::new(channels, num_classes)?,
        })
    }
}

impl<B: ResNetBlock> Forward for ResNet<B> {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.relu.forward(&self.bn1.forward(&self.conv1.forward(x)?)?)?;
        let mut x = self.maxpool.forward(&x)?;
        for block in [&self.layer1, &self.layer2, &self.layer3, &self.layer4].into_iter().flatten() {
            x = block.forward(&x)?;
        }
        self.fc.forward(&self.avgpool.forward(&x)?.flatten_dims(1, -1)?)
    }
}

/// A square convolution without bias, padded so that stride 1 keeps the size.
fn conv(channels: usize, width: usize, size: usize, stride: usize) -> Result<Conv2d> {
    let conv = Conv2d::options().stride(stride).padding(size / 2).bias(false).build(channels, width, size)?;
    kaiming_normal_(&conv.weight, Nonlinearity::Relu, Fan::Out)?;
    Ok(conv)
}

/// What makes a shortcut of another shape; none where it stays.
fn shortcut(channels: usize, wide: usize, stride: usize) -> Result<Option<Sequential>> {
    match (channels == wide, stride) {
        (true, 1) => Ok(None),
        _ => Ok(Some(seq![conv(channels, wide, 1, stride)?, BatchNorm2d::new(wide)?])),
    }
}

/// What goes around a block.
fn skipped(downsample: &Option<Sequential>, x: &Tensor) -> Result<Tensor> {
    downsample.as_ref().map_or_else(|| Ok(x.clone()), |downsample| downsample.forward(x))
}

/// ResNet-18.
pub fn resnet18(num_classes: usize) -> Result<ResNet<BasicBlock>> {
    ResNet::new([2, 2, 2, 2], num_classes)
}

/// ResNet-34.
pub fn resnet34(num_classes: usize) -> Result<ResNet<BasicBlock>> {
    ResNet::new([3, 4, 6, 3], num_classes)
}

/// ResNet-50.
pub fn resnet50(num_classes: usize) -> Result<ResNet<Bottleneck>> {
    ResNet::new([3, 4, 6, 3], num_classes)
}
