//! The layers of a transformer, and stacks of them.

use std::marker::PhantomData;

use kiln_ir::Loc;
use kiln_tensor::{DType, Device, Result, Tensor};

use crate::forward::forward;
use crate::options::setters;
use crate::{AttentionCall, Dropout, Forward, LayerNorm, Linear, Module, MultiheadAttention, Training};

/// The function between the two linear layers of a transformer layer.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub enum TransformerActivation {
    /// max(x, 0)
    #[default]
    Relu,
    /// x · Φ(x)
    Gelu,
}

/// The options of transformer layers, with PyTorch's names and defaults. `L` is the layer that `build` makes:
///
/// ```
/// # use kiln_nn::TransformerEncoderLayer;
/// # fn main() -> kiln_tensor::Result<()> {
/// let layer = TransformerEncoderLayer::options().batch_first(true).dim_feedforward(32).build(16, 4)?;
/// assert_eq!(layer.linear1.out_features(), 32);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct TransformerOptions<L = ()> {
    dim_feedforward: usize,
    dropout: f64,
    activation: TransformerActivation,
    layer_norm_eps: f64,
    batch_first: bool,
    norm_first: bool,
    bias: bool,
    dtype: DType,
    device: Device,
    layer: PhantomData<fn() -> L>,
}

// Derived, it would ask for layers that can be cloned.
impl<L> Clone for TransformerOptions<L> {
    fn clone(&self) -> TransformerOptions<L> {
        TransformerOptions { layer: PhantomData, ..*self }
    }
}

impl Default for TransformerOptions {
    fn default() -> TransformerOptions {
        TransformerOptions::usual()
    }
}

impl<L> TransformerOptions<L> {
    fn usual() -> TransformerOptions<L> {
        TransformerOptions {
            dim_feedforward: 2048,
            dropout: 0.1,
            activation: TransformerActivation::Relu,
            layer_norm_eps: 1e-5,
            batch_first: false,
            norm_first: false,
            bias: true,
            dtype: DType::F32,
            device: Device::Cpu,
            layer: PhantomData,
        }
    }
}

setters!(TransformerOptions<L> {
    /// The size between the two linear layers, 2048 by default.
    dim_feedforward: usize,
    /// Probability of dropout, 0.1 by default.
    dropout: f64,
    /// The function between the two linear layers, max(x, 0) by default.
    activation: TransformerActivation,
    /// What layer norms add to the variance, 1e-5 by default.
    layer_norm_eps: f64,
    /// Whether inputs are `[batch, length, size]` instead of `[length, batch, size]`; not by default.
    batch_first: bool,
    /// Whether inputs are normalised before attention and linear layers instead of after; not by default.
    norm_first: bool,
    /// Whether linear layers and norms have biases; they have by default.
    bias: bool,
});

impl<L> TransformerOptions<L> {
    fn attention(&self, d_model: usize, nhead: usize) -> Result<MultiheadAttention> {
        MultiheadAttention::options()
            .dropout(self.dropout)
            .bias(self.bias)
            .batch_first(self.batch_first)
            .dtype(self.dtype)
            .device(&self.device)
            .build(d_model, nhead)
    }

    fn linear(&self, inputs: usize, outputs: usize) -> Result<Linear> {
        Linear::options().bias(self.bias).dtype(self.dtype).device(&self.device).build(inputs, outputs)
    }

    fn norm(&self, d_model: usize) -> Result<LayerNorm> {
        LayerNorm::options()
            .eps(self.layer_norm_eps)
            .bias(self.bias)
            .dtype(self.dtype)
            .device(&self.device)
            .build([d_model])
    }

    /// An encoder layer.
    #[track_caller]
    pub fn encoder_layer(&self, d_model: usize, nhead: usize) -> Result<TransformerEncoderLayer> {
        let _behalf = Loc::caller().on_behalf(crate::folder());
        Ok(TransformerEncoderLayer {
            self_attn: self.attention(d_model, nhead)?,
            linear1: self.linear(d_model, self.dim_feedforward)?,
            dropout: Dropout::new(self.dropout)?,
            linear2: self.linear(self.dim_feedforward, d_model)?,
            norm1: self.norm(d_model)?,
            norm2: self.norm(d_model)?,
            dropout1: Dropout::new(self.dropout)?,
            dropout2: Dropout::new(self.dropout)?,
            training: Training::default(),
            activation: self.activation,
            norm_first: self.norm_first,
        })
    }

    /// A decoder layer.
    #[track_caller]
    pub fn decoder_layer(&self, d_model: usize, nhead: usize) -> Result<TransformerDecoderLayer> {
        let _behalf = Loc::caller().on_behalf(crate::folder());
        Ok(TransformerDecoderLayer {
            self_attn: self.attention(d_model, nhead)?,
            multihead_attn: self.attention(d_model, nhead)?,
            linear1: self.linear(d_model, self.dim_feedforward)?,
            dropout: Dropout::new(self.dropout)?,
            linear2: self.linear(self.dim_feedforward, d_model)?,
            norm1: self.norm(d_model)?,
            norm2: self.norm(d_model)?,
            norm3: self.norm(d_model)?,
            dropout1: Dropout::new(self.dropout)?,
            dropout2: Dropout::new(self.dropout)?,
            dropout3: Dropout::new(self.dropout)?,
            training: Training::default(),
            activation: self.activation,
            norm_first: self.norm_first,
        })
    }
}

/// How layers are made.
macro_rules! layers {
    ($($Layer:ident by $method:ident),*) => { $(
        impl TransformerOptions<$Layer> {
            /// A layer.
            #[track_caller]
            pub fn build(&self, d_model: usize, nhead: usize) -> Result<$Layer> {
                self.$method(d_model, nhead)
            }
        }

        impl $Layer {
            /// With default options.
            #[track_caller]
            pub fn new(d_model: usize, nhead: usize) -> Result<$Layer> {
                $Layer::options().build(d_model, nhead)
            }

            /// Options, from which any number of layers can be built.
            pub fn options() -> TransformerOptions<$Layer> {
                TransformerOptions::usual()
            }

            /// The two linear layers.
            fn feed(&self, x: &Tensor) -> Result<Tensor> {
                let hidden = self.linear1.forward(x)?;
                let hidden = match self.activation {
                    TransformerActivation::Relu => hidden.relu()?,
                    TransformerActivation::Gelu => hidden.gelu()?,
                };
                self.linear2.forward(&self.dropout.forward(&hidden)?)
            }
        }
    )* };
}
layers!(TransformerEncoderLayer by encoder_layer, TransformerDecoderLayer by decoder_layer);

/// What a sequence is not to see of itself, or of what it attends to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Masks<'a> {
    /// Truth values: which positions a position does *not* see. Floats: what is added to the scores.
    pub mask: Option<&'a Tensor>,
    /// Truth values: which positions of a sample nobody sees, `[batch, length]`.
    pub key_padding_mask: Option<&'a Tensor>,
    /// Whether position i sees only positions up to i.
    pub is_causal: bool,
}

impl Masks<'_> {
    /// Each position sees itself and those before it.
    pub fn causal() -> Masks<'static> {
        Masks { is_causal: true, ..Masks::default() }
    }
}

fn attend(
    attention: &MultiheadAttention,
    query: &Tensor,
    memory: &Tensor,
    masks: Masks<'_>,
) -> Result<Tensor> {
    let call = AttentionCall {
        attn_mask: masks.mask,
        key_padding_mask: masks.key_padding_mask,
        is_causal: masks.is_causal,
        need_weights: false,
        ..AttentionCall::default()
    };
    Ok(attention.attend(query, memory, memory, call)?.0)
}

/// Self-attention and two linear layers, each with a way around it and a layer norm.
///
/// ```
/// use kiln_nn::{Forward, TransformerEncoderLayer};
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let layer = TransformerEncoderLayer::options().batch_first(true).dim_feedforward(32).encoder_layer(8, 2)?;
/// let y = layer.forward(&Tensor::ones([3, 5, 8], &Device::Cpu)?)?;
/// assert_eq!(y.shape().to_vec(), [3, 5, 8]);
/// # Ok(()) }
/// ```
#[derive(Module)]
pub struct TransformerEncoderLayer {
    /// The attention of the sequence to itself.
    pub self_attn: MultiheadAttention,
    /// To the size between.
    pub linear1: Linear,
    /// Between the linear layers.
    pub dropout: Dropout,
    /// Back to the embedding's size.
    pub linear2: Linear,
    /// The norm of attention.
    pub norm1: LayerNorm,
    /// The norm of the linear layers.
    pub norm2: LayerNorm,
    /// Of what attention found.
    pub dropout1: Dropout,
    /// Of what the linear layers gave.
    pub dropout2: Dropout,
    training: Training,
    #[module(skip)]
    activation: TransformerActivation,
    #[module(skip)]
    norm_first: bool,
}

impl TransformerEncoderLayer {
    /// The layer's output, with masks.
    #[track_caller]
    pub fn encode(&self, src: &Tensor, masks: Masks<'_>) -> Result<Tensor> {
        let _behalf = Loc::caller().on_behalf(crate::folder());
        let seen = |x: &Tensor| self.dropout1.forward(&attend(&self.self_attn, x, x, masks)?);
        let fed = |x: &Tensor| self.dropout2.forward(&self.feed(x)?);
        if self.norm_first {
            let x = src.add(&seen(&self.norm1.forward(src)?)?)?;
            x.add(&fed(&self.norm2.forward(&x)?)?)
        } else {
            let x = self.norm1.forward(&src.add(&seen(src)?)?)?;
            self.norm2.forward(&x.add(&fed(&x)?)?)
        }
    }
}

/// Self-attention, attention to a memory and two linear layers, each with a way around it and a layer norm.
#[derive(Module)]
pub struct TransformerDecoderLayer {
    /// The attention of the target to itself.
    pub self_attn: MultiheadAttention,
    /// The attention of the target to the memory.
    pub multihead_attn: MultiheadAttention,
    /// To the size between.
    pub linear1: Linear,
    /// Between the linear layers.
    pub dropout: Dropout,
    /// Back to the embedding's size.
    pub linear2: Linear,
    /// The norm of self-attention.
    pub norm1: LayerNorm,
    /// The norm of attention to the memory.
    pub norm2: LayerNorm,
    /// The norm of the linear layers.
    pub norm3: LayerNorm,
    /// Of what self-attention found.
    pub dropout1: Dropout,
    /// Of what attention to the memory found.
    pub dropout2: Dropout,
    /// Of what the linear layers gave.
    pub dropout3: Dropout,
    training: Training,
    #[module(skip)]
    activation: TransformerActivation,
    #[module(skip)]
    norm_first: bool,
}

impl TransformerDecoderLayer {
    /// The layer's output, with masks of the target and of the memory.
    #[track_caller]
    pub fn decode(
        &self,
        target: &Tensor,
        memory: &Tensor,
        target_masks: Masks<'_>,
        memory_masks: Masks<'_>,
    ) -> Result<Tensor> {
        let _behalf = Loc::caller().on_behalf(crate::folder());
        let own = |x: &Tensor| self.dropout1.forward(&attend(&self.self_attn, x, x, target_masks)?);
        let other =
            |x: &Tensor| self.dropout2.forward(&attend(&self.multihead_attn, x, memory, memory_masks)?);
        let fed = |x: &Tensor| self.dropout3.forward(&self.feed(x)?);
        if self.norm_first {
            let x = target.add(&own(&self.norm1.forward(target)?)?)?;
            let x = x.add(&other(&self.norm2.forward(&x)?)?)?;
            x.add(&fed(&self.norm3.forward(&x)?)?)
        } else {
            let x = self.norm1.forward(&target.add(&own(target)?)?)?;
            let x = self.norm2.forward(&x.add(&other(&x)?)?)?;
            self.norm3.forward(&x.add(&fed(&x)?)?)
        }
    }
}

impl Forward<(Tensor, Tensor)> for TransformerDecoderLayer {
    type Output = Tensor;
    #[track_caller]
    fn forward(&self, (target, memory): &(Tensor, Tensor)) -> Result<Tensor> {
        self.decode(target, memory, Masks::default(), Masks::default())
    }
}

/// Encoder layers one after the other, and perhaps a last norm.
#[derive(Module)]
pub struct TransformerEncoder {
    /// The layers.
    pub layers: Vec<TransformerEncoderLayer>,
    /// The last norm.
    pub norm: Option<LayerNorm>,
}

impl TransformerEncoder {
    /// The output of all layers, each with these masks.
    #[track_caller]
    pub fn encode(&self, src: &Tensor, masks: Masks<'_>) -> Result<Tensor> {
        let _behalf = Loc::caller().on_behalf(crate::folder());
        let mut x = src.clone();
        for layer in &self.layers {
            x = layer.encode(&x, masks)?;
        }
        match &self.norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        }
    }
}

forward! {
    TransformerEncoderLayer: |this, src| this.encode(src, Masks::default());
    TransformerEncoder: |this, src| this.encode(src, Masks::default());
}

/// Decoder layers one after the other, and perhaps a last norm.
#[derive(Module)]
pub struct TransformerDecoder {
    /// The layers.
    pub layers: Vec<TransformerDecoderLayer>,
    /// The last norm.
    pub norm: Option<LayerNorm>,
}

impl TransformerDecoder {
    /// The output of all layers, each with these masks.
    #[track_caller]
    pub fn decode(
        &self,
        target: &Tensor,
        memory: &Tensor,
        target_masks: Masks<'_>,
        memory_masks: Masks<'_>,
    ) -> Result<Tensor> {
        let _behalf = Loc::caller().on_behalf(crate::folder());
        let mut x = target.clone();
        for layer in &self.layers {
            x = layer.decode(&x, memory, target_masks, memory_masks)?;
        }
        match &self.norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        }
    }
}

impl Forward<(Tensor, Tensor)> for TransformerDecoder {
    type Output = Tensor;
    #[track_caller]
    fn forward(&self, (target, memory): &(Tensor, Tensor)) -> Result<Tensor> {
        self.decode(target, memory, Masks::default(), Masks::default())
    }
}
