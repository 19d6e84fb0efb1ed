//! Vision transformers: torchvision's `vit_b_16`.

use kiln_ir::{Error, Loc, Why};
use kiln_nn::{
    AttentionCall, Conv2d, Dropout, Forward, Gelu, LayerNorm, Linear, Module, ModuleDict, MultiheadAttention,
    Parameter, Sequential, init, seq,
};
use kiln_tensor::{Device, Result, Tensor};

/// The size of a vision transformer, by torchvision's names.
#[derive(Clone, Debug, PartialEq)]
pub struct ViTConfig {
    /// Pixels along a side of the images.
    pub image_size: usize,
    /// Pixels along a side of a patch.
    pub patch_size: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Heads of the attention.
    pub num_heads: usize,
    /// Size of a patch's vector.
    pub hidden_dim: usize,
    /// Size between the two layers of a block's perceptron.
    pub mlp_dim: usize,
    /// Probability of dropout behind every layer.
    pub dropout: f64,
    /// Probability of dropout of the attention's weights.
    pub attention_dropout: f64,
    /// Number of classes.
    pub num_classes: usize,
}

impl ViTConfig {
    /// ViT-B/16 over images of 224 × 224.
    pub fn b_16() -> ViTConfig {
        ViTConfig {
            image_size: 224,
            patch_size: 16,
            num_layers: 12,
            num_heads: 12,
            hidden_dim: 768,
            mlp_dim: 3072,
            dropout: 0.0,
            attention_dropout: 0.0,
            num_classes: 1000,
        }
    }
}

/// The size that torchvision's norms add to variances.
const EPS: f64 = 1e-6;

/// Attention and an MLP, each after a norm and with a residual connection.
#[derive(Module)]
pub struct EncoderBlock {
    /// Before the attention.
    pub ln_1: LayerNorm,
    /// Every patch looks at every patch.
    pub self_attention: MultiheadAttention,
    /// Behind the attention.
    pub dropout: Dropout,
    /// Before the perceptron.
    pub ln_2: LayerNorm,
    /// Linear, GELU, dropout, linear, dropout.
    pub mlp: Sequential,
}

impl EncoderBlock {
    fn new(config: &ViTConfig) -> Result<EncoderBlock> {
        let norm = LayerNorm::options().eps(EPS);
        let attention = MultiheadAttention::options().dropout(config.attention_dropout).batch_first(true);
        Ok(EncoderBlock {
            ln_1: norm.build([config.hidden_dim])?,
            self_attention: attention.build(config.hidden_dim, config.num_heads)?,
            dropout: Dropout::new(config.dropout)?,
            ln_2: norm.build([config.hidden_dim])?,
            mlp: seq![
                dense(config.hidden_dim, config.mlp_dim)?,
                Gelu,
                Dropout::new(config.dropout)?,
                dense(config.mlp_dim, config.hidden_dim)?,
                Dropout::new(config.dropout)?,
            ],
        })
    }
}

impl Forward for EncoderBlock {
    type Output = Tensor;
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let x = self.ln_1.forward(input)?;
        let call = AttentionCall { need_weights: false, ..AttentionCall::default() };
        let (x, _) = self.self_attention.attend(&x, &x, &x, call)?;
        let x = self.dropout.forward(&x)?.add(input)?;
        x.add(&self.mlp.forward(&self.ln_2.forward(&x)?)?)
    }
}

/// The blocks of a [`ViT`], with a vector for each place.
#[derive(Module)]
pub struct Encoder {
    /// `[1, patches + 1, hidden_dim]`
    pub pos_embedding: Parameter,
    /// Behind the sum.
    pub dropout: Dropout,
    /// `encoder_layer_0` and so on.
    pub layers: ModuleDict<EncoderBlock>,
    /// Behind the last block.
    pub ln: LayerNorm,
}

impl Forward for Encoder {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = self.dropout.forward(&x.add(self.pos_embedding.tensor())?)?;
        for (_, layer) in self.layers.iter() {
            x = layer.forward(&x)?;
        }
        self.ln.forward(&x)
    }
}

/// The classifier of a [`ViT`].
#[derive(Module)]
#[module(name = "Sequential")]
pub struct Heads {
    /// From the class token's vector to the classes.
    pub head: Linear,
}

/// A vision transformer: images are cut into patches, which look at each other; a token that stands for the whole
/// image is classified.
///
/// ```
/// use kiln_models::{ViT, ViTConfig};
/// use kiln_nn::Forward;
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let small = ViTConfig { image_size: 32, num_layers: 2, hidden_dim: 24, mlp_dim: 48, ..ViTConfig::b_16() };
/// let model = ViT::new(small)?;
/// let y = model.forward(&Tensor::ones([2, 3, 32, 32], &Device::Cpu)?)?;
/// assert_eq!(y.shape().to_vec(), [2, 1000]);
/// # Ok(()) }
/// ```
#[derive(Module)]
#[module(name = "VisionTransformer")]
pub struct ViT {
    /// `[1, 1, hidden_dim]`: stands for the whole image.
    pub class_token: Parameter,
    /// From patches to vectors.
    pub conv_proj: Conv2d,
    /// The blocks.
    pub encoder: Encoder,
    /// The classifier.
    pub heads: Heads,
    #[module(skip)]
    config: ViTConfig,
}

impl ViT {
    /// A model of this size, drawn as torchvision draws it.
    #[track_caller]
    pub fn new(config: ViTConfig) -> Result<ViT> {
        if config.patch_size == 0 || !config.image_size.is_multiple_of(config.patch_size) {
            let (what, by) = ("image_size", "patch_size");
            let why = Why::Divisible { what, size: config.image_size, by, parts: config.patch_size };
            return Err(Error::op("ViT", why, Loc::caller()));
        }
        let (hidden, patch) = (config.hidden_dim, config.patch_size);
        let conv_proj = Conv2d::options().stride(patch).build(3, hidden, patch)?;
        let deviation = (1.0 / (3 * patch * patch) as f64).sqrt();
        init::trunc_normal_(&conv_proj.weight, 0.0, deviation, -2.0, 2.0)?;
        let head = Linear::new(hidden, config.num_classes)?;
        for zero in [&conv_proj.bias, &head.bias].into_iter().flatten().chain([&head.weight]) {
            init::zeros_(zero)?;
        }
        let places = (config.image_size / patch).pow(2) + 1;
        let pos_embedding = Tensor::zeros([1, places, hidden], &Device::Cpu)?;
        init::normal_(&pos_embedding, 0.0, 0.02)?;
        let blocks = (0..config.num_layers)
            .map(|i| Ok((format!("encoder_layer_{i}"), EncoderBlock::new(&config)?)))
            .collect::<Result<ModuleDict<EncoderBlock>>>()?;
        Ok(ViT {
            class_token: Parameter::new(Tensor::zeros([1, 1, hidden], &Device::Cpu)?)?,
            conv_proj,
            encoder: Encoder {
                pos_embedding: Parameter::new(pos_embedding)?,
                dropout: Dropout::new(config.dropout)?,
                layers: blocks,
                ln: LayerNorm::options().eps(EPS).build([hidden])?,
            },
            heads: Heads { head },
            config,
        })
    }

    /// The size it was made with.
    pub fn config(&self) -> &ViTConfig {
        &self.config
    }
}

impl Forward for ViT {
    type Output = Tensor;
    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let hidden = self.config.hidden_dim;
        // [n, hidden, rows, columns] to [n, patches, hidden]
        let patches = self.conv_proj.forward(images)?.flatten_dims(2, 3)?.permute([0, 2, 1])?;
        let class = self.class_token.expand([patches.size(0)?, 1, hidden])?;
        let x = self.encoder.forward(&Tensor::cat([&class, &patches], 1)?)?;
        self.heads.head.forward(&x.select(1, 0)?)
    }
}

/// A layer of the perceptron.
fn dense(from: usize, to: usize) -> Result<Linear> {
    let layer = Linear::new(from, to)?;
    init::xavier_uniform_(&layer.weight, 1.0)?;
    if let Some(bias) = &layer.bias {
        init::normal_(bias, 0.0, 1e-6)?;
    }
    Ok(layer)
}

/// ViT-B/16 over images of 224 × 224.
pub fn vit_b_16(num_classes: usize) -> Result<ViT> {
    ViT::new(ViTConfig { num_classes, ..ViTConfig::b_16() })
}
