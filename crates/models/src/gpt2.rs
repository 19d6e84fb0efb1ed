//! GPT-2, with the names of Hugging Face's `GPT2LMHeadModel`.

use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_ir::{Error, Loc, Why};
use kiln_nn::{Dropout, Embedding, Forward, Gelu, LayerNorm, Linear, Module, Parameter, Training, init};
use kiln_tensor::{Attention, DType, Device, Result, Tensor, no_grad};

/// The size of a GPT-2, by Hugging Face's names.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// Number of different tokens.
    pub vocab_size: usize,
    /// The longest text.
    pub n_positions: usize,
    /// Size of a token's vector.
    pub n_embd: usize,
    /// Number of blocks.
    pub n_layer: usize,
    /// Heads of the attention.
    pub n_head: usize,
    /// What norms add to variances.
    pub layer_norm_epsilon: f64,
    /// Probability of dropout of the embeddings.
    pub embd_pdrop: f64,
    /// Probability of dropout of the attention's weights.
    pub attn_pdrop: f64,
    /// Probability of dropout of what is added to the residual stream.
    pub resid_pdrop: f64,
}

impl Gpt2Config {
    fn sized(n_layer: usize, n_embd: usize, n_head: usize) -> Gpt2Config {
        Gpt2Config {
            vocab_size: 50257,
            n_positions: 1024,
            n_embd,
            n_layer,
            n_head,
            layer_norm_epsilon: 1e-5,
            embd_pdrop: 0.1,
            attn_pdrop: 0.1,
            resid_pdrop: 0.1,
        }
    }

    /// `gpt2`: 124 million parameters.
    pub fn small() -> Gpt2Config {
        Gpt2Config::sized(12, 768, 12)
    }

    /// `gpt2-medium`: 355 million parameters.
    pub fn medium() -> Gpt2Config {
        Gpt2Config::sized(24, 1024, 16)
    }

    /// `gpt2-large`: 774 million parameters.
    pub fn large() -> Gpt2Config {
        Gpt2Config::sized(36, 1280, 20)
    }

    /// `gpt2-xl`: 1.6 billion parameters.
    pub fn xl() -> Gpt2Config {
        Gpt2Config::sized(48, 1600, 25)
    }

    /// The same without dropout.
    pub fn without_dropout(self) -> Gpt2Config {
        Gpt2Config { embd_pdrop: 0.0, attn_pdrop: 0.0, resid_pdrop: 0.0, ..self }
    }
}

/// A linear layer whose weight lies the other way round: x · weight + bias.
#[derive(Module)]
#[module(extra_repr = Self::describe)]
pub struct Conv1D {
    /// `[in_features, out_features]`
    pub weight: Parameter,
    /// `[out_features]`
    pub bias: Parameter,
}

impl Conv1D {
    fn new(from: usize, to: usize, deviation: f64) -> Result<Conv1D> {
        let weight = Parameter::new(Tensor::zeros([from, to], &Device::Cpu)?)?;
        init::normal_(&weight, 0.0, deviation)?;
        Ok(Conv1D { weight, bias: Parameter::new(Tensor::zeros([to], &Device::Cpu)?)? })
    }

    fn describe(&self) -> String {
        let shape = self.weight.shape();
        format!("nf={}, nx={}", shape[1], shape[0])
    }
}

impl Forward for Conv1D {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (from, to) = (self.weight.size(0)?, self.weight.size(1)?);
        let mut shape = x.shape().to_vec();
        let rows = x.reshape([x.numel() / from.max(1), from])?;
        if let Some(last) = shape.last_mut() {
            *last = to;
        }
        self.bias.addmm(&rows, &self.weight)?.reshape(shape)
    }
}

/// Attention to the tokens before.
#[derive(Module)]
#[module(name = "GPT2Attention")]
pub struct Gpt2Attention {
    /// The projections of query, key and value, side by side.
    pub c_attn: Conv1D,
    /// The projection of what the heads found.
    pub c_proj: Conv1D,
    /// Behind `c_proj`.
    pub resid_dropout: Dropout,
    training: Training,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    dropout: f64,
}

impl Gpt2Attention {
    fn forward(&self, x: &Tensor, past: Option<&Past<'_>>) -> Result<Tensor> {
        let (batch, length, size) = (x.size(0)?, x.size(1)?, x.size(2)?);
        let parts = self.c_attn.forward(x)?.split(size, 2)?;
        // [batch, heads, length, size of a head]
        let split = |x: &Tensor| x.reshape([batch, length, self.heads, size / self.heads])?.transpose(1, 2);
        let (query, key, value) = (split(&parts[0])?, split(&parts[1])?, split(&parts[2])?);
        let dropout = if self.training.get() { self.dropout } else { 0.0 };
        let found = match past {
            Some(Past { keys, values, positions, seen }) => {
                keys.index_copy_(2, positions, &key)?;
                values.index_copy_(2, positions, &value)?;
                let options = Attention { mask: Some(seen), dropout, ..Attention::default() };
                query.scaled_dot_product_attention(keys, values, options)?
            }
            None => {
                let options = Attention { causal: true, dropout, ..Attention::default() };
                query.scaled_dot_product_attention(&key, &value, options)?
            }
        };
        let joined = found.transpose(1, 2)?.reshape([batch, length, size])?;
        self.resid_dropout.forward(&self.c_proj.forward(&joined)?)
    }
}

/// The perceptron of a block.
#[derive(Module)]
#[module(name = "GPT2MLP")]
pub struct Gpt2Mlp {
    /// To four times the size.
    pub c_fc: Conv1D,
    /// And back.
    pub c_proj: Conv1D,
    /// The tanh form of GELU.
    pub act: Gelu,
    /// Behind `c_proj`.
    pub dropout: Dropout,
}

impl Forward for Gpt2Mlp {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let wide = self.act.forward(&self.c_fc.forward(x)?)?;
        self.dropout.forward(&self.c_proj.forward(&wide)?)
    }
}

/// Attention and an MLP, each after a norm and with a residual connection.
#[derive(Module)]
#[module(name = "GPT2Block")]
pub struct Gpt2Block {
    /// Before the attention.
    pub ln_1: LayerNorm,
    /// The attention.
    pub attn: Gpt2Attention,
    /// Before the perceptron.
    pub ln_2: LayerNorm,
    /// The perceptron.
    pub mlp: Gpt2Mlp,
}

impl Gpt2Block {
    fn new(config: &Gpt2Config) -> Result<Gpt2Block> {
        let size = config.n_embd;
        // What is added to the residual stream is drawn smaller, the more is added.
        let residual = DEVIATION / (2.0 * config.n_layer as f64).sqrt();
        let norm = LayerNorm::options().eps(config.layer_norm_epsilon);
        Ok(Gpt2Block {
            ln_1: norm.build([size])?,
            attn: Gpt2Attention {
                c_attn: Conv1D::new(size, 3 * size, DEVIATION)?,
                c_proj: Conv1D::new(size, size, residual)?,
                resid_dropout: Dropout::new(config.resid_pdrop)?,
                training: Training::default(),
                heads: config.n_head,
                dropout: config.attn_pdrop,
            },
            ln_2: norm.build([size])?,
            mlp: Gpt2Mlp {
                c_fc: Conv1D::new(size, 4 * size, DEVIATION)?,
                c_proj: Conv1D::new(4 * size, size, residual)?,
                act: Gelu::tanh(),
                dropout: Dropout::new(config.resid_pdrop)?,
            },
        })
    }

    fn forward(&self, x: &Tensor, past: Option<&Past<'_>>) -> Result<Tensor> {
        let x = x.add(&self.attn.forward(&self.ln_1.forward(x)?, past)?)?;
        x.add(&self.mlp.forward(&self.ln_2.forward(&x)?)?)
    }
}

/// The deviation of normal weights.
const DEVIATION: f64 = 0.02;

/// GPT-2 without its head: from tokens to the last block's vectors.
#[derive(Module)]
#[module(name = "GPT2Model")]
pub struct Gpt2Model {
    /// A vector for each token.
    pub wte: Embedding,
    /// A vector for each place.
    pub wpe: Embedding,
    /// Behind the sum of both.
    pub drop: Dropout,
    /// The blocks.
    pub h: Vec<Gpt2Block>,
    /// Behind the last block.
    pub ln_f: LayerNorm,
}

impl Gpt2Model {
    /// A model of this size, drawn as Hugging Face draws it.
    #[track_caller]
    pub fn new(config: &Gpt2Config) -> Result<Gpt2Model> {
        if config.n_head == 0 || !config.n_embd.is_multiple_of(config.n_head) {
            let (what, by) = ("n_embd", "n_head");
            let why = Why::Divisible { what, size: config.n_embd, by, parts: config.n_head };
            return Err(Error::op("Gpt2", why, Loc::caller()));
        }
        let table = |rows: usize| -> Result<Embedding> {
            let table = Embedding::new(rows, config.n_embd)?;
            init::normal_(&table.weight, 0.0, DEVIATION)?;
            Ok(table)
        };
        Ok(Gpt2Model {
            wte: table(config.vocab_size)?,
            wpe: table(config.n_positions)?,
            drop: Dropout::new(config.embd_pdrop)?,
            h: (0..config.n_layer).map(|_| Gpt2Block::new(config)).collect::<Result<_>>()?,
            ln_f: LayerNorm::options().eps(config.layer_norm_epsilon).build([config.n_embd])?,
        })
    }

    fn embed(&self, ids: &Tensor, positions: &Tensor) -> Result<Tensor> {
        self.drop.forward(&self.wte.forward(ids)?.add(&self.wpe.forward(positions)?)?)
    }

    /// The vectors of the tokens that follow those in the cache.
    fn decode(&self, ids: &Tensor, cache: &KvCache) -> Result<Tensor> {
        let length = ids.size(1)?;
        let device = ids.device();
        let positions = Tensor::arange(0, length as i64, &device)?.add(&cache.position)?;
        let places = Tensor::arange(0, cache.capacity as i64, &device)?;
        let seen = places.le(&positions.unsqueeze(1)?)?;
        let mut x = self.embed(ids, &positions)?;
        for (block, (keys, values)) in self.h.iter().zip(&cache.layers) {
            x = block.forward(&x, Some(&Past { keys, values, positions: &positions, seen: &seen }))?;
        }
        cache.position.add_(length as i64)?;
        self.ln_f.forward(&x)
    }
}

impl Forward for Gpt2Model {
    type Output = Tensor;
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let positions = Tensor::arange(0, ids.size(1)? as i64, &ids.device())?;
        let mut x = self.embed(ids, &positions)?;
        for block in &self.h {
            x = block.forward(&x, None)?;
        }
        self.ln_f.forward(&x)
    }
}

/// GPT-2 as a language model: from tokens `[batch, length]` to logits `[batch, length, vocab_size]`. The head's
/// weight is the table of tokens.
///
/// ```
/// use kiln_models::{Gpt2, Gpt2Config};
/// use kiln_nn::{Forward, Module};
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let tiny = Gpt2Config { vocab_size: 50, n_positions: 16, n_embd: 8, n_layer: 2, n_head: 2, ..Gpt2Config::small() };
/// let model = Gpt2::new(tiny)?;
/// let ids = Tensor::randint(0, 50, [2, 5], &Device::Cpu)?;
/// assert_eq!(model.forward(&ids)?.shape().to_vec(), [2, 5, 50]);
/// model.loss(&ids, &ids)?.backward()?;
///
/// model.eval();
/// assert_eq!(model.generate(&ids, 4)?.shape().to_vec(), [2, 9]);
/// # Ok(()) }
/// ```
#[derive(Module)]
#[module(name = "GPT2LMHeadModel")]
pub struct Gpt2 {
    /// Everything but the head.
    pub transformer: Gpt2Model,
    /// From vectors to logits.
    pub lm_head: Linear,
    #[module(skip)]
    config: Gpt2Config,
}

impl Gpt2 {
    /// A model of this size, drawn as Hugging Face draws it.
    #[track_caller]
    pub fn new(config: Gpt2Config) -> Result<Gpt2> {
        let transformer = Gpt2Model::new(&config)?;
        let lm_head = Linear::from_parts(transformer.wte.weight.clone(), None);
        Ok(Gpt2 { transformer, lm_head, config })
    }

    /// The size it was made with.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// The mean cross-entropy of each next token; labels are tokens, those of −100 don't count. They are shifted
    /// here: the tokens themselves are the labels.
    #[track_caller]
    pub fn loss(&self, ids: &Tensor, labels: &Tensor) -> Result<Tensor> {
        let logits = self.forward(ids)?;
        let next = labels.slice(1, 1, i64::MAX, 1)?.pad(&[0, 1], -100)?;
        logits.reshape([-1, self.config.vocab_size as i64])?.cross_entropy(&next.reshape([-1])?)
    }

    /// The logits `[batch, vocab_size]` behind the last of these tokens `[batch, length]`, which follow those that
    /// the cache has seen. Without gradients. Calls with as many tokens are one graph when they are compiled: keys
    /// and values have their full size from the start.
    #[track_caller]
    pub fn decode(&self, ids: &Tensor, cache: &KvCache) -> Result<Tensor> {
        let loc = Loc::caller();
        let length = ids.size(1)?;
        let before = cache.len();
        if length == 0 {
            return Err(Error::op("decode", Why::none("the number of tokens"), loc));
        }
        if before + length > cache.capacity {
            let (argument, most) = ("the number of tokens", cache.capacity - before);
            let why =
                Why::Limit { argument, most, limit: "the room left in the cache", dim: None, got: length };
            return Err(Error::op("decode", why, loc));
        }
        let _off = no_grad();
        let x = self.transformer.decode(ids, cache)?;
        cache.length.store(before + length, Ordering::Relaxed);
        self.lm_head.forward(&x.select(1, -1)?)
    }

    /// The tokens `[batch, length]` and this many more, each the most likely one.
    #[track_caller]
    pub fn generate(&self, ids: &Tensor, more: usize) -> Result<Tensor> {
        let cache = KvCache::new(self, ids.size(0)?, ids.size(1)? + more)?;
        let (mut text, mut last) = (vec![ids.clone()], ids.clone());
        for _ in 0..more {
            last = self.decode(&last, &cache)?.argmax_dim(-1, true)?;
            text.push(last.clone());
        }
        Tensor::cat(&text, 1)
    }
}

impl Forward for Gpt2 {
    type Output = Tensor;
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(&self.transformer.forward(ids)?)
    }
}

/// The keys and values of the tokens that a [`Gpt2`] has seen, so that only new ones are computed.
pub struct KvCache {
    /// `[batch, heads, capacity, size of a head]`, for each block.
    layers: Vec<(Tensor, Tensor)>,
    /// How many tokens there are, as a tensor: programs that are compiled stay the same from token to token.
    position: Tensor,
    /// The same for the host, to refuse what does not fit.
    length: AtomicUsize,
    capacity: usize,
}

impl KvCache {
    /// The keys and values of all blocks.
    pub fn tensors(&self) -> Vec<Tensor> {
        self.layers.iter().flat_map(|(keys, values)| [keys.clone(), values.clone()]).collect()
    }

    /// An empty cache for this many texts of up to `capacity` tokens.
    #[track_caller]
    pub fn new(model: &Gpt2, batch: usize, capacity: usize) -> Result<KvCache> {
        let config = model.config();
        if capacity > config.n_positions {
            let (most, limit) = (config.n_positions, "the positions of the model");
            let why = Why::Limit { argument: "capacity", most, limit, dim: None, got: capacity };
            return Err(Error::op("KvCache", why, Loc::caller()));
        }
        let ty = model.transformer.wte.weight.ty();
        let shape = [batch, config.n_head, capacity, config.n_embd / config.n_head];
        let zeros = || Tensor::full_of(shape, 0.0, ty.dtype, &ty.device);
        Ok(KvCache {
            layers: (0..config.n_layer).map(|_| Ok((zeros()?, zeros()?))).collect::<Result<_>>()?,
            position: Tensor::full_of([1], 0, DType::I64, &ty.device)?,
            length: AtomicUsize::new(0),
            capacity,
        })
    }

    /// How many tokens it has seen.
    pub fn len(&self) -> usize {
        self.length.load(Ordering::Relaxed)
    }

    /// Whether it has seen none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many tokens fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets the tokens after the first `length`, to continue differently from there.
    pub fn truncate(&self, length: usize) -> Result<()> {
        // Also where nothing is to be forgotten: programs that are compiled stay the same.
        let length = length.min(self.len());
        self.length.store(length, Ordering::Relaxed);
        self.position.fill_(length as i64).map(drop)
    }

    /// Forgets all tokens, for the next text.
    pub fn clear(&self) -> Result<()> {
        self.length.store(0, Ordering::Relaxed);
        self.position.zero_().map(drop)
    }
}

/// What the attention of one block looks at in a [`KvCache`].
struct Past<'a> {
    keys: &'a Tensor,
    values: &'a Tensor,
    /// Where the new tokens stand.
    positions: &'a Tensor,
    /// Which places each of them sees.
    seen: &'a Tensor,
}
