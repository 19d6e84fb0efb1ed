//! Scaled dot-product attention, gated linear units and cosine similarity.

use kiln_ir::{DType, Error, Loc, Result, Why};

use crate::Tensor;
use crate::composed::{composed, composed_of};
use crate::methods::normalise_dim;

/// The arguments of attention besides queries, keys and values.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attention<'a> {
    /// Truth values: which keys a query sees. Floats: what is added to the scores.
    pub mask: Option<&'a Tensor>,
    /// Whether query i sees only keys up to i.
    pub causal: bool,
    /// Factor of the scores; 1 / √(size of a query) if there is none.
    pub scale: Option<f64>,
    /// Probability with which a weight is dropped.
    pub dropout: f64,
    /// Whether several heads of queries share one head of keys and values.
    pub grouped: bool,
}

impl Tensor {
    /// softmax(q · kᵀ · scale + mask) · v, for queries `[…, l, e]`, keys `[…, s, e]` and values `[…, s, v]`.
    #[track_caller]
    pub fn scaled_dot_product_attention(
        &self,
        key: &Tensor,
        value: &Tensor,
        options: Attention<'_>,
    ) -> Result<Tensor> {
        let loc = Loc::caller();
        let fail = |why| Err(Error::op("scaled_dot_product_attention", why, loc));
        for (argument, t) in [("query", self), ("key", key), ("value", value)] {
            if t.rank() < 2 {
                return fail(Why::Rank { argument, expected: "2 or more", got: t.rank() });
            }
            if !t.dtype().is_float() {
                return fail(Why::DType { argument, expected: "floating point", got: t.dtype() });
            }
        }
        if options.mask.is_some() && options.causal {
            return fail(Why::Either { one: "a mask", other: "causal" });
        }
        composed([Some(self), Some(key), Some(value), options.mask], |operands| match operands {
            [Some(query), Some(key), Some(value), mask] => {
                query.attend(key, value, Attention { mask, ..options }, loc)
            }
            _ => Ok(self.clone()),
        })
    }

    /// [`scaled_dot_product_attention`](Tensor::scaled_dot_product_attention) of operands that fit.
    fn attend(&self, key: &Tensor, value: &Tensor, options: Attention<'_>, loc: Loc) -> Result<Tensor> {
        let (key, value) = if options.grouped {
            (key.repeat_heads(self, loc)?, value.repeat_heads(self, loc)?)
        } else {
            (key.clone(), value.clone())
        };
        let size = self.shape()[self.rank() - 1];
        let scale = options.scale.unwrap_or(1.0 / (size as f64).sqrt());
        let scores = self.mul(scale)?.matmul(&key.transpose(-2, -1)?)?;
        let weights = match options.mask {
            Some(mask) => scores.masked_weights(mask)?,
            None if options.causal => {
                let shape = scores.shape();
                let device = scores.ty().device;
                let [rows, columns] = [shape[shape.rank() - 2], shape[shape.rank() - 1]];
                let row = Tensor::arange(0, rows as i64, &device)?.reshape([-1, 1])?;
                let seen = row.ge(&Tensor::arange(0, columns as i64, &device)?)?;
                seen.where_self(&scores, f64::NEG_INFINITY)?.softmax(-1)?
            }
            None => scores.softmax(-1)?,
        };
        weights.dropout(options.dropout, true)?.matmul(&value)
    }

    /// softmax of masked scores; a query that sees nothing has weights of zero.
    fn masked_weights(&self, mask: &Tensor) -> Result<Tensor> {
        let masked = match mask.dtype() {
            DType::Bool => mask.where_self(self, f64::NEG_INFINITY)?,
            _ => self.add(mask)?,
        };
        let blind = masked.detach()?.amax_dim(-1, true)?.eq(f64::NEG_INFINITY)?;
        let weights = blind.where_self(0.0, &masked)?.softmax(-1)?;
        blind.where_self(0.0, &weights)
    }

    /// Heads (the third dim from the end) repeated to as many as the queries have.
    fn repeat_heads(&self, query: &Tensor, loc: Loc) -> Result<Tensor> {
        let (own, wanted) = (self.shape(), query.shape());
        let heads = |s: &kiln_ir::Shape| s.rank().checked_sub(3).map(|d| s[d]);
        match (heads(&own), heads(&wanted)) {
            (Some(few), Some(many)) if few > 0 && many.is_multiple_of(few) => {
                let at = own.rank() - 3;
                let mut wide = own.to_vec();
                wide.insert(at + 1, many / few);
                let mut flat = own.to_vec();
                flat[at] = many;
                self.unsqueeze(at as i64 + 1)?.expand(&wide[..])?.reshape(&flat[..])
            }
            (few, many) => {
                let (what, by) = ("the number of query heads", "that of key and value heads");
                let (size, parts) = (many.unwrap_or(0), few.unwrap_or(0));
                let why = Why::Divisible { what, size, by, parts };
                Err(Error::op("scaled_dot_product_attention", why, loc))
            }
        }
    }

    /// The first half along a dim, gated by the sigmoid of the second.
    #[track_caller]
    pub fn glu(&self, dim: i64) -> Result<Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("glu", dim, self.rank(), loc)?;
        let size = self.shape().get(dim).copied().unwrap_or(0);
        if size == 0 || size % 2 == 1 {
            let (argument, got) = ("the size of the dim that is halved", size as f64);
            let why = Why::Number { argument, expected: "even and not 0", got };
            return Err(Error::op("glu", why, loc));
        }
        let (half, dim) = (size / 2, dim as i64);
        composed_of([self], |[x]| x.narrow(dim, 0, half)?.mul(&x.narrow(dim, half, half)?.sigmoid()?))
    }

    /// x · y / (max(|x|, eps) · max(|y|, eps)) along a dim.
    #[track_caller]
    pub fn cosine_similarity(&self, other: &Tensor, dim: i64, eps: f64) -> Result<Tensor> {
        let loc = Loc::caller();
        let rank = self.rank().max(other.rank());
        let dim = normalise_dim("cosine_similarity", dim, rank, loc)? as i64 - rank as i64;
        composed_of([self, other], |[x, y]| {
            let both = x.mul(y)?;
            let product = both.sum_dim(dim, false)?;
            // Both with all dims, as the sums are divided element by element.
            let shape = both.shape();
            // max under the root: its gradient at zero is zero, not infinite.
            let length = |x: &Tensor| -> Result<Tensor> {
                x.expand(&shape)?.mul(x)?.sum_dim(dim, false)?.maximum(eps * eps)?.sqrt()
            };
            product.div(&length(x)?.mul(&length(y)?)?)
        })
    }
}
