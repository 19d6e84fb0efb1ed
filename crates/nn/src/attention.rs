//! [`MultiheadAttention`].

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::{Attention, DType, Result, Tensor};

use crate::options::options;
use crate::{Forward, Module, Parameter, Training, init};

/// Attention with several heads, each over its share of the embedding.
///
/// ```
/// use kiln_nn::{AttentionCall, Forward, MultiheadAttention};
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let attention = MultiheadAttention::options().batch_first(true).build(8, 2)?;
/// let x = Tensor::ones([3, 5, 8], &Device::Cpu)?;
/// let (y, weights) = attention.attend(&x, &x, &x, AttentionCall::default())?;
/// assert_eq!(y.shape().to_vec(), [3, 5, 8]);
/// assert_eq!(weights.map(|w| w.shape().to_vec()), Some(vec![3, 5, 5]));
/// # Ok(()) }
/// ```
#[derive(Module)]
pub struct MultiheadAttention {
    /// The projections of query, key and value, one above the other: `[3 · embed_dim, embed_dim]`. Absent where
    /// keys or values have another size.
    pub in_proj_weight: Option<Parameter>,
    /// The projection of the query, where the three are apart.
    pub q_proj_weight: Option<Parameter>,
    /// The projection of the key, where the three are apart.
    pub k_proj_weight: Option<Parameter>,
    /// The projection of the value, where the three are apart.
    pub v_proj_weight: Option<Parameter>,
    /// `[3 · embed_dim]`
    pub in_proj_bias: Option<Parameter>,
    /// The projection of what the heads found.
    pub out_proj: OutProjection,
    training: Training,
    #[module(skip)]
    embed_dim: usize,
    #[module(skip)]
    num_heads: usize,
    #[module(skip)]
    dropout: f64,
    #[module(skip)]
    batch_first: bool,
}

/// The last projection of [`MultiheadAttention`]: a linear layer, printed as PyTorch prints it there.
#[derive(Module)]
#[module(name = "NonDynamicallyQuantizableLinear", extra_repr = Self::describe)]
pub struct OutProjection {
    /// `[embed_dim, embed_dim]`
    pub weight: Parameter,
    /// `[embed_dim]`
    pub bias: Option<Parameter>,
}

impl OutProjection {
    fn describe(&self) -> String {
        let shape = self.weight.shape();
        let bias = crate::display::python_bool(self.bias.is_some());
        format!("in_features={}, out_features={}, bias={bias}", shape[1], shape[0])
    }
}

options! {
    /// The options of [`MultiheadAttention`], with PyTorch's names and defaults.
    MultiheadAttentionOptions for MultiheadAttention(embed_dim: usize, num_heads: usize) {
        /// Probability with which a weight is dropped in training, 0 by default.
        dropout: f64 = 0.0,
        /// Whether the projections have biases; they have by default.
        bias: bool = true,
        /// The size of keys; the embedding's by default.
        kdim: Option<usize> = None,
        /// The size of values; the embedding's by default.
        vdim: Option<usize> = None,
        /// Whether inputs are `[batch, length, size]` instead of `[length, batch, size]`; not by default.
        batch_first: bool = false,
    }
}

impl MultiheadAttentionOptions {
    /// A layer, its parameters drawn as PyTorch draws them: Glorot's uniform distribution for the projections,
    /// zeros for the biases.
    #[track_caller]
    pub fn build(&self, embed_dim: usize, num_heads: usize) -> Result<MultiheadAttention> {
        if embed_dim == 0 || num_heads == 0 || !embed_dim.is_multiple_of(num_heads) {
            let why =
                Why::Divisible { what: "embed_dim", size: embed_dim, by: "num_heads", parts: num_heads };
            return Err(Error::op("MultiheadAttention", why, Loc::caller()));
        }
        let zeros = |shape: &[usize]| Tensor::full_of(shape, 0.0, self.dtype, &self.device);
        let glorot = |rows: usize, columns: usize| -> Result<Parameter> {
            let weight = Parameter::new(zeros(&[rows, columns])?)?;
            init::xavier_uniform_(&weight, 1.0)?;
            Ok(weight)
        };
        let (kdim, vdim) = (self.kdim.unwrap_or(embed_dim), self.vdim.unwrap_or(embed_dim));
        let together = kdim == embed_dim && vdim == embed_dim;
        let apart = |columns| if together { Ok(None) } else { glorot(embed_dim, columns).map(Some) };
        let bias = |size: usize| if self.bias { Parameter::new(zeros(&[size])?).map(Some) } else { Ok(None) };
        let bound = 1.0 / (embed_dim as f64).sqrt();
        let weight = init::uniform([embed_dim, embed_dim], -bound, bound, self.dtype, &self.device)?;
        Ok(MultiheadAttention {
            in_proj_weight: if together { Some(glorot(3 * embed_dim, embed_dim)?) } else { None },
            q_proj_weight: apart(embed_dim)?,
            k_proj_weight: apart(kdim)?,
            v_proj_weight: apart(vdim)?,
            in_proj_bias: bias(3 * embed_dim)?,
            out_proj: OutProjection { weight: Parameter::new(weight)?, bias: bias(embed_dim)? },
            training: Training::default(),
            embed_dim,
            num_heads,
            dropout: self.dropout,
            batch_first: self.batch_first,
        })
    }
}

/// The arguments of [`MultiheadAttention`] besides query, key and value, with PyTorch's names and defaults.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall<'a> {
    /// Truth values: which keys of a sample are *not* seen. Floats: what is added to their scores. `[batch, keys]`.
    pub key_padding_mask: Option<&'a Tensor>,
    /// Truth values: which keys a query does *not* see. Floats: what is added to the scores. `[queries, keys]` or
    /// `[batch · heads, queries, keys]`.
    pub attn_mask: Option<&'a Tensor>,
    /// Whether the weights are returned; they are by default.
    pub need_weights: bool,
    /// Whether the weights are averaged over the heads; they are by default.
    pub average_attn_weights: bool,
    /// Whether query i sees only keys up to i. Needs no mask.
    pub is_causal: bool,
}

impl Default for AttentionCall<'_> {
    fn default() -> Self {
        AttentionCall {
            key_padding_mask: None,
            attn_mask: None,
            need_weights: true,
            average_attn_weights: true,
            is_causal: false,
        }
    }
}

impl MultiheadAttention {
    /// What the queries find among the values, and the weights, if they are wanted. Inputs are
    /// `[length, batch, size]` (`[batch, length, size]` with `batch_first`) or `[length, size]`.
    #[track_caller]
    pub fn attend(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        call: AttentionCall<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let loc = Loc::caller();
        let _behalf = loc.on_behalf(crate::folder());
        let rank = query.rank();
        let fail = |why| Err(Error::op("MultiheadAttention", why, loc));
        if !matches!(rank, 2 | 3) {
            return fail(Why::Rank { argument: "query", expected: "2 or 3", got: rank });
        }
        for (what, other) in [("the ranks of query and key", key), ("the ranks of query and value", value)] {
            if other.rank() != rank {
                return fail(Why::sizes(what, rank, other.rank()));
            }
        }
        // All as [batch, length, size].
        let batched = |x: &Tensor| match (rank, self.batch_first) {
            (2, _) => x.unsqueeze(0),
            (_, true) => Ok(x.clone()),
            (_, false) => x.transpose(0, 1),
        };
        // What is one tensor stays one: it is projected at once.
        let own = batched(query)?;
        let keys = if key.same(query) { own.clone() } else { batched(key)? };
        let values = if value.same(key) { keys.clone() } else { batched(value)? };
        let (output, weights) = self.attend_batch(&own, &keys, &values, call)?;
        let output = match (rank, self.batch_first) {
            (2, _) => output.squeeze(0)?,
            (_, true) => output,
            (_, false) => output.transpose(0, 1)?,
        };
        let weights = match weights {
            Some(weights) => {
                let weights = if call.average_attn_weights { weights.mean_dim(1, false)? } else { weights };
                Some(if rank == 2 { weights.squeeze(0)? } else { weights })
            }
            None => None,
        };
        Ok((output, weights))
    }

    fn attend_batch(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        call: AttentionCall<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (batch, queries, keys) = (query.size(0)?, query.size(1)?, key.size(1)?);
        let head = self.embed_dim / self.num_heads;
        let [query, key, value] = self.project(query, key, value)?;
        // [batch, heads, length, size of a head]
        let split = |x: &Tensor| x.reshape([batch, x.size(1)?, self.num_heads, head])?.transpose(1, 2);
        let (query, key, value) = (split(&query)?, split(&key)?, split(&value)?);
        let mask = self.mask(&query, [batch, queries, keys], call)?;
        let dropout = if self.training.get() { self.dropout } else { 0.0 };
        let (found, weights) = if call.need_weights {
            let scores = query.mul(1.0 / (head as f64).sqrt())?.matmul(&key.transpose(-2, -1)?)?;
            let scores = match &mask {
                Some(mask) => scores.add(mask)?,
                None => scores,
            };
            let weights = scores.softmax(-1)?.dropout(dropout, true)?;
            (weights.matmul(&value)?, Some(weights))
        } else {
            let options = Attention { mask: mask.as_ref(), dropout, ..Attention::default() };
            (query.scaled_dot_product_attention(&key, &value, options)?, None)
        };
        let joined = found.transpose(1, 2)?.reshape([batch, queries, self.embed_dim])?;
        Ok((joined.linear(&self.out_proj.weight, self.out_proj.bias.as_deref())?, weights))
    }

    fn project(&self, query: &Tensor, key: &Tensor, value: &Tensor) -> Result<[Tensor; 3]> {
        let size = self.embed_dim;
        if let (Some(weight), true) = (&self.in_proj_weight, query.same(key) && key.same(value)) {
            // One product for all three.
            let all = query.linear(weight, self.in_proj_bias.as_deref())?;
            return Ok([
                all.narrow(-1, 0, size)?,
                all.narrow(-1, size, size)?,
                all.narrow(-1, 2 * size, size)?,
            ]);
        }
        let part = |i: usize, x: &Tensor, own: &Option<Parameter>| -> Result<Tensor> {
            let weight = match (&self.in_proj_weight, own) {
                (Some(all), _) => all.narrow(0, i * size, size)?,
                (None, Some(own)) => own.tensor().clone(),
                (None, None) => {
                    let argument = "in_proj_weight, or q_proj_weight, k_proj_weight and v_proj_weight,";
                    let why = Why::Operand { argument, expected: "set" };
                    return Err(Error::op("MultiheadAttention", why, Loc::caller()));
                }
            };
            let bias = self.in_proj_bias.as_ref().map(|bias| bias.narrow(0, i * size, size)).transpose()?;
            x.linear(&weight, bias.as_ref())
        };
        Ok([
            part(0, query, &self.q_proj_weight)?,
            part(1, key, &self.k_proj_weight)?,
            part(2, value, &self.v_proj_weight)?,
        ])
    }

    /// What is added to the scores `[batch, heads, queries, keys]`.
    fn mask(
        &self,
        query: &Tensor,
        [batch, queries, keys]: [usize; 3],
        call: AttentionCall<'_>,
    ) -> Result<Option<Tensor>> {
        let ty = query.ty();
        let zero = || Tensor::full_of([0usize; 0], 0.0, ty.dtype, &ty.device);
        let added = |mask: &Tensor| match mask.dtype() {
            DType::Bool => mask.where_self(f64::NEG_INFINITY, &zero()?),
            _ => Ok(mask.clone()),
        };
        let mut sum: Option<Tensor> = None;
        let mut add = |mask: Tensor| -> Result<()> {
            sum = Some(match sum.take() {
                Some(sum) => sum.add(&mask)?,
                None => mask,
            });
            Ok(())
        };
        if let Some(mask) = call.attn_mask {
            let mask = added(mask)?;
            add(match mask.rank() {
                3 => mask.reshape([batch, self.num_heads, queries, keys])?,
                _ => mask,
            })?;
        } else if call.is_causal {
            let row = Tensor::arange(0, queries as i64, &ty.device)?.reshape([-1, 1])?;
            add(added(&row.lt(&Tensor::arange(0, keys as i64, &ty.device)?)?)?)?;
        }
        if let Some(mask) = call.key_padding_mask {
            add(added(mask)?.reshape([batch, 1, 1, keys])?)?;
        }
        Ok(sum)
    }
}

impl Forward<(Tensor, Tensor, Tensor)> for MultiheadAttention {
    type Output = (Tensor, Option<Tensor>);
    #[track_caller]
    fn forward(&self, (query, key, value): &(Tensor, Tensor, Tensor)) -> Result<Self::Output> {
        self.attend(query, key, value, AttentionCall::default())
    }
}
