//! BERT, with the names of Hugging Face's `BertModel` and of two models on top of it.

use kiln_ir::{Error, Loc, Why};
use kiln_nn::{
    Dropout, Embedding, Forward, Gelu, LayerNorm, Linear, Module, Parameter, Tanh, Training, init,
};
use kiln_tensor::{Attention, Device, Result, Tensor};

/// The size of a BERT, by Hugging Face's names.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// Number of different tokens.
    pub vocab_size: usize,
    /// Size of a token's vector.
    pub hidden_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Heads of the attention.
    pub num_attention_heads: usize,
    /// Size between the two layers of a block's perceptron.
    pub intermediate_size: usize,
    /// The longest text.
    pub max_position_embeddings: usize,
    /// Number of kinds of segments.
    pub type_vocab_size: usize,
    /// The token that fills up short texts: its vector is not trained.
    pub pad_token_id: i64,
    /// What norms add to variances.
    pub layer_norm_eps: f64,
    /// Probability of dropout behind embeddings and layers.
    pub hidden_dropout_prob: f64,
    /// Probability of dropout of the attention's weights.
    pub attention_probs_dropout_prob: f64,
}

impl BertConfig {
    /// `bert-base-uncased`: 110 million parameters.
    pub fn base() -> BertConfig {
        BertConfig {
            vocab_size: 30522,
            hidden_size: 768,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            intermediate_size: 3072,
            max_position_embeddings: 512,
            type_vocab_size: 2,
            pad_token_id: 0,
            layer_norm_eps: 1e-12,
            hidden_dropout_prob: 0.1,
            attention_probs_dropout_prob: 0.1,
        }
    }

    /// `bert-large-uncased`: 340 million parameters.
    pub fn large() -> BertConfig {
        BertConfig {
            hidden_size: 1024,
            num_hidden_layers: 24,
            num_attention_heads: 16,
            intermediate_size: 4096,
            ..BertConfig::base()
        }
    }

    /// The same without dropout.
    pub fn without_dropout(self) -> BertConfig {
        BertConfig { hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0, ..self }
    }

    fn norm(&self) -> Result<LayerNorm> {
        LayerNorm::options().eps(self.layer_norm_eps).build([self.hidden_size])
    }
}

/// The deviation of normal weights.
const DEVIATION: f64 = 0.02;

fn linear(from: usize, to: usize) -> Result<Linear> {
    let layer = Linear::new(from, to)?;
    init::normal_(&layer.weight, 0.0, DEVIATION)?;
    if let Some(bias) = &layer.bias {
        init::zeros_(bias)?;
    }
    Ok(layer)
}

/// From tokens, segments and places to vectors.
#[derive(Module)]
#[module(name = "BertEmbeddings")]
pub struct BertEmbeddings {
    /// A vector for each token.
    pub word_embeddings: Embedding,
    /// A vector for each place.
    pub position_embeddings: Embedding,
    /// A vector for each kind of segment.
    pub token_type_embeddings: Embedding,
    /// Behind the sum.
    #[module(name = "LayerNorm")]
    pub layer_norm: LayerNorm,
    /// Behind the norm.
    pub dropout: Dropout,
}

impl BertEmbeddings {
    fn new(config: &BertConfig) -> Result<BertEmbeddings> {
        let table = |rows: usize, padding: Option<i64>| -> Result<Embedding> {
            let weight = Tensor::zeros([rows, config.hidden_size], &Device::Cpu)?;
            init::normal_(&weight, 0.0, DEVIATION)?;
            if let Some(padding) = padding {
                weight.select(0, padding)?.zero_()?;
            }
            Embedding::options().padding_idx(padding).of(Parameter::new(weight)?)
        };
        Ok(BertEmbeddings {
            word_embeddings: table(config.vocab_size, Some(config.pad_token_id))?,
            position_embeddings: table(config.max_position_embeddings, None)?,
            token_type_embeddings: table(config.type_vocab_size, None)?,
            layer_norm: config.norm()?,
            dropout: Dropout::new(config.hidden_dropout_prob)?,
        })
    }

    fn forward(&self, input: &BertInput) -> Result<Tensor> {
        let ids = &input.input_ids;
        let kinds = match &input.token_type_ids {
            Some(kinds) => kinds.clone(),
            None => ids.zeros_like()?,
        };
        let places = Tensor::arange(0, ids.size(1)? as i64, &ids.device())?;
        let words = self.word_embeddings.forward(ids)?.add(&self.token_type_embeddings.forward(&kinds)?)?;
        let x = words.add(&self.position_embeddings.forward(&places)?)?;
        self.dropout.forward(&self.layer_norm.forward(&x)?)
    }
}

/// Every token looks at every token.
#[derive(Module)]
#[module(name = "BertSelfAttention")]
pub struct BertSelfAttention {
    /// What a token looks for.
    pub query: Linear,
    /// What a token is found by.
    pub key: Linear,
    /// What is found.
    pub value: Linear,
    training: Training,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    dropout: f64,
}

impl BertSelfAttention {
    fn forward(&self, x: &Tensor, seen: Option<&Tensor>) -> Result<Tensor> {
        let (batch, length, size) = (x.size(0)?, x.size(1)?, x.size(2)?);
        let split = |x: Tensor| x.reshape([batch, length, self.heads, size / self.heads])?.transpose(1, 2);
        let query = split(self.query.forward(x)?)?;
        let key = split(self.key.forward(x)?)?;
        let value = split(self.value.forward(x)?)?;
        let dropout = if self.training.get() { self.dropout } else { 0.0 };
        let options = Attention { mask: seen, dropout, ..Attention::default() };
        let found = query.scaled_dot_product_attention(&key, &value, options)?;
        found.transpose(1, 2)?.reshape([batch, length, size])
    }
}

/// A linear layer that is added to what came before it, and a norm.
#[derive(Module)]
#[module(name = "BertOutput")]
pub struct BertResidual {
    /// The layer.
    pub dense: Linear,
    /// Behind the sum.
    #[module(name = "LayerNorm")]
    pub layer_norm: LayerNorm,
    /// Behind the layer.
    pub dropout: Dropout,
}

impl BertResidual {
    fn new(from: usize, config: &BertConfig) -> Result<BertResidual> {
        Ok(BertResidual {
            dense: linear(from, config.hidden_size)?,
            layer_norm: config.norm()?,
            dropout: Dropout::new(config.hidden_dropout_prob)?,
        })
    }

    fn forward(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        let x = self.dropout.forward(&self.dense.forward(x)?)?;
        self.layer_norm.forward(&x.add(residual)?)
    }
}

/// The attention of a block and what follows it.
#[derive(Module)]
#[module(name = "BertAttention")]
pub struct BertAttention {
    /// The heads.
    #[module(name = "self")]
    pub heads: BertSelfAttention,
    /// What is made of what they found.
    pub output: BertResidual,
}

/// The first layer of a block's perceptron.
#[derive(Module)]
#[module(name = "BertIntermediate")]
pub struct BertIntermediate {
    /// To the larger size.
    pub dense: Linear,
    /// Behind it.
    pub intermediate_act_fn: Gelu,
}

/// Attention and an MLP, each with a residual connection and followed by a norm.
#[derive(Module)]
#[module(name = "BertLayer")]
pub struct BertLayer {
    /// The attention.
    pub attention: BertAttention,
    /// The first layer of the perceptron.
    pub intermediate: BertIntermediate,
    /// The second.
    pub output: BertResidual,
}

impl BertLayer {
    fn new(config: &BertConfig) -> Result<BertLayer> {
        let size = config.hidden_size;
        Ok(BertLayer {
            attention: BertAttention {
                heads: BertSelfAttention {
                    query: linear(size, size)?,
                    key: linear(size, size)?,
                    value: linear(size, size)?,
                    training: Training::default(),
                    heads: config.num_attention_heads,
                    dropout: config.attention_probs_dropout_prob,
                },
                output: BertResidual::new(size, config)?,
            },
            intermediate: BertIntermediate {
                dense: linear(size, config.intermediate_size)?,
                intermediate_act_fn: Gelu,
            },
            output: BertResidual::new(config.intermediate_size, config)?,
        })
    }

    fn forward(&self, x: &Tensor, seen: Option<&Tensor>) -> Result<Tensor> {
        let x = self.attention.output.forward(&self.attention.heads.forward(x, seen)?, x)?;
        let BertIntermediate { dense, intermediate_act_fn } = &self.intermediate;
        self.output.forward(&intermediate_act_fn.forward(&dense.forward(&x)?)?, &x)
    }
}

/// The blocks of a [`Bert`].
#[derive(Module)]
#[module(name = "BertEncoder")]
pub struct BertEncoder {
    /// The blocks.
    pub layer: Vec<BertLayer>,
}

/// From the first token's vector to one for the whole text.
#[derive(Module)]
#[module(name = "BertPooler")]
pub struct BertPooler {
    /// The layer.
    pub dense: Linear,
    /// Behind it.
    pub activation: Tanh,
}

/// What a [`Bert`] reads: tokens `[batch, length]`, and perhaps which of them are seen, and of which segment they are.
#[derive(Clone)]
pub struct BertInput {
    /// The tokens.
    pub input_ids: Tensor,
    /// `[batch, length]`: 0 for tokens that nobody sees, those that fill up. All are seen if there is none.
    pub attention_mask: Option<Tensor>,
    /// `[batch, length]`: the kind of segment. All 0 if there is none.
    pub token_type_ids: Option<Tensor>,
}

impl From<&Tensor> for BertInput {
    fn from(input_ids: &Tensor) -> BertInput {
        BertInput { input_ids: input_ids.clone(), attention_mask: None, token_type_ids: None }
    }
}

/// What a [`Bert`] tells.
#[derive(Clone)]
pub struct BertOutput {
    /// `[batch, length, hidden_size]`: a vector for each token.
    pub last_hidden_state: Tensor,
    /// `[batch, hidden_size]`: one for the whole text, of models that have a pooler.
    pub pooler_output: Option<Tensor>,
}

/// BERT without a head.
///
/// ```
/// use kiln_models::{Bert, BertConfig};
/// use kiln_nn::Forward;
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let tiny = BertConfig { vocab_size: 50, hidden_size: 24, num_hidden_layers: 2, ..BertConfig::base() };
/// let model = Bert::new(&tiny)?;
/// let output = model.forward(&Tensor::randint(0, 50, [2, 5], &Device::Cpu)?)?;
/// assert_eq!(output.last_hidden_state.shape().to_vec(), [2, 5, 24]);
/// # Ok(()) }
/// ```
#[derive(Module)]
#[module(name = "BertModel")]
pub struct Bert {
    /// From tokens to vectors.
    pub embeddings: BertEmbeddings,
    /// The blocks.
    pub encoder: BertEncoder,
    /// From the first token's vector to one for the whole text.
    pub pooler: Option<BertPooler>,
}

impl Bert {
    /// A model of this size with a pooler, drawn as Hugging Face draws it.
    #[track_caller]
    pub fn new(config: &BertConfig) -> Result<Bert> {
        let bert = Bert::without_pooler(config)?;
        let dense = linear(config.hidden_size, config.hidden_size)?;
        Ok(Bert { pooler: Some(BertPooler { dense, activation: Tanh }), ..bert })
    }

    /// A model of this size without a pooler.
    #[track_caller]
    pub fn without_pooler(config: &BertConfig) -> Result<Bert> {
        let (size, heads) = (config.hidden_size, config.num_attention_heads);
        if heads == 0 || !size.is_multiple_of(heads) {
            let (what, by) = ("hidden_size", "num_attention_heads");
            let why = Why::Divisible { what, size, by, parts: heads };
            return Err(Error::op("Bert", why, Loc::caller()));
        }
        Ok(Bert {
            embeddings: BertEmbeddings::new(config)?,
            encoder: BertEncoder {
                layer: (0..config.num_hidden_layers)
                    .map(|_| BertLayer::new(config))
                    .collect::<Result<_>>()?,
            },
            pooler: None,
        })
    }
}

impl Forward<BertInput> for Bert {
    type Output = BertOutput;
    fn forward(&self, input: &BertInput) -> Result<BertOutput> {
        let seen = match &input.attention_mask {
            // [batch, heads, queries, keys]
            Some(mask) => Some(mask.ne(0)?.unsqueeze(1)?.unsqueeze(1)?),
            None => None,
        };
        let mut x = self.embeddings.forward(input)?;
        for layer in &self.encoder.layer {
            x = layer.forward(&x, seen.as_ref())?;
        }
        let pooler_output = match &self.pooler {
            Some(BertPooler { dense, activation }) => {
                Some(activation.forward(&dense.forward(&x.select(1, 0)?)?)?)
            }
            None => None,
        };
        Ok(BertOutput { last_hidden_state: x, pooler_output })
    }
}

impl Forward for Bert {
    type Output = BertOutput;
    fn forward(&self, ids: &Tensor) -> Result<BertOutput> {
        self.forward(&BertInput::from(ids))
    }
}

/// BERT that classifies texts: logits `[batch, classes]`.
#[derive(Module)]
pub struct BertForSequenceClassification {
    /// Everything but the head.
    pub bert: Bert,
    /// Behind the pooler.
    pub dropout: Dropout,
    /// The head.
    pub classifier: Linear,
}

impl BertForSequenceClassification {
    /// A model of this size, drawn as Hugging Face draws it.
    #[track_caller]
    pub fn new(config: &BertConfig, num_labels: usize) -> Result<BertForSequenceClassification> {
        Ok(BertForSequenceClassification {
            bert: Bert::new(config)?,
            dropout: Dropout::new(config.hidden_dropout_prob)?,
            classifier: linear(config.hidden_size, num_labels)?,
        })
    }
}

impl Forward<BertInput> for BertForSequenceClassification {
    type Output = Tensor;
    fn forward(&self, input: &BertInput) -> Result<Tensor> {
        let output: BertOutput = self.bert.forward(input)?;
        let pooled = output.pooler_output.unwrap_or(output.last_hidden_state);
        self.classifier.forward(&self.dropout.forward(&pooled)?)
    }
}

/// BERT that fills in tokens: logits `[batch, length, vocab_size]`. The head's weight is the table of tokens.
#[derive(Module)]
#[module(name = "BertForMaskedLM")]
pub struct BertForMaskedLm {
    /// Everything but the head.
    pub bert: Bert,
    /// The head.
    pub cls: BertOnlyMlmHead,
}

/// The head of [`BertForMaskedLm`].
#[derive(Module)]
#[module(name = "BertOnlyMLMHead")]
pub struct BertOnlyMlmHead {
    /// The head.
    pub predictions: BertLmPredictionHead,
}

/// From vectors to logits.
#[derive(Module)]
#[module(name = "BertLMPredictionHead")]
pub struct BertLmPredictionHead {
    /// The decoder's bias.
    pub bias: Parameter,
    /// Before the decoder.
    pub transform: BertPredictionHeadTransform,
    /// With the table of tokens as weight.
    pub decoder: Linear,
}

/// A layer before the decoder.
#[derive(Module)]
pub struct BertPredictionHeadTransform {
    /// The layer.
    pub dense: Linear,
    /// Behind the layer.
    pub transform_act_fn: Gelu,
    /// Behind GELU.
    #[module(name = "LayerNorm")]
    pub layer_norm: LayerNorm,
}

impl BertForMaskedLm {
    /// A model of this size, drawn as Hugging Face draws it.
    #[track_caller]
    pub fn new(config: &BertConfig) -> Result<BertForMaskedLm> {
        let bert = Bert::without_pooler(config)?;
        let bias = Parameter::new(Tensor::zeros([config.vocab_size], &Device::Cpu)?)?;
        let words = bert.embeddings.word_embeddings.weight.clone();
        let transform = BertPredictionHeadTransform {
            dense: linear(config.hidden_size, config.hidden_size)?,
            transform_act_fn: Gelu,
            layer_norm: config.norm()?,
        };
        let decoder = Linear::from_parts(words, Some(bias.clone()));
        Ok(BertForMaskedLm {
            bert,
            cls: BertOnlyMlmHead { predictions: BertLmPredictionHead { bias, transform, decoder } },
        })
    }
}

impl Forward<BertInput> for BertForMaskedLm {
    type Output = Tensor;
    fn forward(&self, input: &BertInput) -> Result<Tensor> {
        let output: BertOutput = self.bert.forward(input)?;
        let BertLmPredictionHead { transform, decoder, .. } = &self.cls.predictions;
        let x = transform.dense.forward(&output.last_hidden_state)?;
        decoder.forward(&transform.layer_norm.forward(&transform.transform_act_fn.forward(&x)?)?)
    }
}
