//! Normalisation and dropout, in PyTorch's terms.

use kiln_ir::{DType, Error, Loc, Op, Result, Scalar, Why};

use crate::Tensor;
use crate::composed::composed;
use crate::dispatch::dispatch_tensor;
use crate::hook::Arg;

/// The arguments of batch normalisation besides its input.
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm<'a> {
    /// Running mean and variance; in training they move, otherwise they are used.
    pub running: Option<(&'a Tensor, &'a Tensor)>,
    /// Scale of each channel.
    pub weight: Option<&'a Tensor>,
    /// Shift of each channel.
    pub bias: Option<&'a Tensor>,
    /// Whether the batch's own statistics are used. Without running ones they always are.
    pub training: bool,
    /// How far the running statistics move towards the batch's.
    pub momentum: f64,
    /// What is added to the variance.
    pub eps: f64,
}

impl Default for BatchNorm<'_> {
    fn default() -> Self {
        BatchNorm { running: None, weight: None, bias: None, training: false, momentum: 0.1, eps: 1e-5 }
    }
}

impl Tensor {
    /// A row that normalises, with what scales and shifts its result.
    fn normalise(
        &self,
        op: &Op,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
        loc: Loc,
    ) -> Result<Tensor> {
        let eps = Arg::Number(Scalar::Float(eps));
        match (weight, bias) {
            (None, None) => dispatch_tensor(op, &[Arg::Tensor(self), eps], false, loc),
            (Some(weight), None) => {
                dispatch_tensor(op, &[Arg::Tensor(self), eps, Arg::Tensor(weight)], false, loc)
            }
            (weight, Some(bias)) => {
                let ones = match weight {
                    Some(weight) => weight.clone(),
                    None => bias.ones_like()?,
                };
                let args = [Arg::Tensor(self), eps, Arg::Tensor(&ones), Arg::Tensor(bias)];
                dispatch_tensor(op, &args, false, loc)
            }
        }
    }

    /// The number of last dims that a shape names.
    fn last_dims(&self, name: &str, shape: &[usize], loc: Loc) -> Result<usize> {
        let own = self.shape();
        if own.ends_with(shape) && !shape.is_empty() {
            Ok(shape.len())
        } else {
            Err(Error::op(name, Why::shape("the last dims of x", shape, own), loc))
        }
    }

    /// (x − mean) / √(variance + eps) over the last dims, of this shape, times weight plus bias.
    #[track_caller]
    pub fn layer_norm(
        &self,
        shape: &[usize],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        let loc = Loc::caller();
        let dims = self.last_dims("layer_norm", shape, loc)?;
        self.normalise(&Op::LayerNorm { dims }, weight, bias, eps, loc)
    }

    /// x / √(mean of x² + eps) over the last dims, of this shape, times weight. Without an eps it is the dtype's
    /// smallest step from 1.
    #[track_caller]
    pub fn rms_norm(&self, shape: &[usize], weight: Option<&Tensor>, eps: Option<f64>) -> Result<Tensor> {
        let loc = Loc::caller();
        let dims = self.last_dims("rms_norm", shape, loc)?;
        let least = if self.dtype() == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
        self.normalise(&Op::RmsNorm { dims }, weight, None, eps.unwrap_or(least), loc)
    }

    /// (x − mean) / √(variance + eps) over groups of channels of each sample, times weight plus bias.
    #[track_caller]
    pub fn group_norm(
        &self,
        groups: usize,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        self.normalise(&Op::GroupNorm { groups }, weight, bias, eps, Loc::caller())
    }

    /// Normalises each channel (dim 1) by the batch's statistics in training, by the running ones otherwise.
    #[track_caller]
    pub fn batch_norm(&self, options: BatchNorm<'_>) -> Result<Tensor> {
        let loc = Loc::caller();
        let BatchNorm { running, weight, bias, training, momentum, eps } = options;
        let shape = self.shape();
        if shape.numel() == 0 {
            // There is nothing to normalise, and no statistics to move towards.
            return self.clone_tensor();
        }
        if shape.rank() < 2 {
            let why = Why::Rank { argument: "x", expected: "2 or more", got: shape.rank() };
            return Err(Error::op("batch_norm", why, loc));
        }
        match running {
            Some(running) if !training => self.batch_norm_by(running, weight, bias, eps),
            running => {
                let count = shape.numel() / shape[1].max(1);
                if training && count == 1 {
                    let (argument, expected) = ("the number of values per channel", "2 or more in training");
                    let why = Why::Number { argument, expected, got: 1.0 };
                    return Err(Op::BatchNorm {}.error(&[self.ty().into()], why, loc));
                }
                if let Some((mean, variance)) = running {
                    self.move_running(mean, variance, momentum, count, loc)?;
                }
                self.normalise(&Op::BatchNorm {}, weight, bias, eps, loc)
            }
        }
    }

    /// Moves running statistics towards the batch's; the variance is that of the population.
    fn move_running(
        &self,
        mean: &Tensor,
        variance: &Tensor,
        momentum: f64,
        count: usize,
        loc: Loc,
    ) -> Result<()> {
        let own = self.detach()?;
        let moments = dispatch_tensor(&Op::BatchMoments {}, &[Arg::Tensor(&own)], false, loc)?;
        let correction = count as f64 / count.saturating_sub(1).max(1) as f64;
        mean.mul_(1.0 - momentum)?.add_scaled_(&moments.select(0, 0)?, momentum)?;
        variance.mul_(1.0 - momentum)?.add_scaled_(&moments.select(0, 1)?, momentum * correction)?;
        Ok(())
    }

    /// x · scale + shift, with both made from running statistics.
    fn batch_norm_by(
        &self,
        (mean, variance): (&Tensor, &Tensor),
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        let mut columns = vec![1usize; self.rank() - 1];
        columns[0] = self.shape()[1];
        composed([Some(self), Some(mean), Some(variance), weight, bias], |operands| {
            let [Some(x), Some(mean), Some(variance), weight, bias] = operands else {
                return Ok(self.clone());
            };
            let inverse = variance.add(eps)?.rsqrt()?;
            let scale = match weight {
                Some(weight) => inverse.mul(weight)?,
                None => inverse,
            };
            let moved = mean.mul(&scale)?;
            let shift = match bias {
                Some(bias) => bias.sub(&moved)?,
                None => moved.neg()?,
            };
            let column = |t: &Tensor| t.reshape(&columns[..]);
            column(&shift)?.addcmul(x, &column(&scale)?, 1.0)
        })
    }

    /// Each element zero with probability `p`, the others scaled up by 1 / (1 − p); as it is when not training.
    #[track_caller]
    pub fn dropout(&self, p: f64, training: bool) -> Result<Tensor> {
        let loc = Loc::caller();
        if !(0.0..=1.0).contains(&p) {
            let why = Why::Number { argument: "p", expected: "between 0 and 1", got: p };
            return Err(Error::op("dropout", why, loc));
        }
        if !training || p == 0.0 {
            return Ok(self.clone());
        }
        if p == 1.0 {
            return self.mul(0.0);
        }
        let ty = self.ty();
        // Numbers of every float dtype are as random as f32 is fine.
        let kept = Tensor::rand_of(ty.shape, DType::F32, &ty.device)?.ge(p)?;
        self.mul(&kept.to_dtype(ty.dtype)?.mul(1.0 / (1.0 - p))?)
    }
}
