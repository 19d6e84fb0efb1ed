//! Losses, in PyTorch's terms. Each is a composition of ops, reduced over its elements or samples.

use kiln_ir::{DType, Error, Loc, Op, Reduction, Result, Scalar, Why};

use smallvec::SmallVec;

use crate::Tensor;
use crate::composed::{composed, composed_of};
use crate::dispatch::dispatch_tensor;
use crate::hook::Arg;

/// The arguments of cross-entropy and nll_loss besides scores and targets.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// Weight of each class.
    pub weight: Option<&'a Tensor>,
    /// The class whose samples don't count.
    pub ignore_index: i64,
    /// How the samples' losses are reduced.
    pub reduction: Reduction,
    /// How much of each target is spread evenly over all classes.
    pub label_smoothing: f64,
}

impl Default for CrossEntropy<'_> {
    fn default() -> Self {
        CrossEntropy { weight: None, ignore_index: -100, reduction: Reduction::Mean, label_smoothing: 0.0 }
    }
}

/// Class targets, made ready to look up.
struct Targets {
    /// Which samples count, `[m]`.
    counted: Tensor,
    /// The classes, `[m, 1]`, 0 for samples that don't count.
    classes: Tensor,
}

impl Tensor {
    #[track_caller]
    fn reduced(&self, reduction: Reduction) -> Result<Tensor> {
        match reduction {
            Reduction::None => Ok(self.clone()),
            Reduction::Mean => self.mean(),
            Reduction::Sum => self.sum(),
        }
    }

    /// (x − target)²
    #[track_caller]
    pub fn mse_loss(&self, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
        composed_of([self, target], |[x, target]| {
            let difference = x.sub(target)?;
            difference.mul(&difference)?.reduced(reduction)
        })
    }

    /// |x − target|
    #[track_caller]
    pub fn l1_loss(&self, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
        composed_of([self, target], |[x, target]| x.sub(target)?.abs()?.reduced(reduction))
    }

    /// ½ d² / beta where d = |x − target| is below beta, else d − ½ beta.
    #[track_caller]
    pub fn smooth_l1_loss(&self, target: &Tensor, beta: f64, reduction: Reduction) -> Result<Tensor> {
        if beta < 0.0 {
            let why = Why::Number { argument: "beta", expected: "0 or more", got: beta };
            return Err(Error::op("smooth_l1_loss", why, Loc::caller()));
        }
        if beta == 0.0 {
            return self.l1_loss(target, reduction);
        }
        composed_of([self, target], |[x, target]| {
            let (difference, limited) = x.bent(target, beta)?;
            limited.div(beta)?.mul(&difference)?.reduced(reduction)
        })
    }

    /// ½ d² where d = |x − target| is at most delta, else delta · (d − ½ delta).
    #[track_caller]
    pub fn huber_loss(&self, target: &Tensor, delta: f64, reduction: Reduction) -> Result<Tensor> {
        if delta.is_nan() || delta <= 0.0 {
            let why = Why::Number { argument: "delta", expected: "more than 0", got: delta };
            return Err(Error::op("huber_loss", why, Loc::caller()));
        }
        composed_of([self, target], |[x, target]| {
            let (difference, limited) = x.bent(target, delta)?;
            limited.mul(&difference)?.reduced(reduction)
        })
    }

    /// d − ½ c and c for d = x − target and c = clamp(d, −limit, limit). Their product is ½ d² within the limit and
    /// a line beyond it, and its gradient is c everywhere: at infinite differences and at NaN, too.
    #[track_caller]
    fn bent(&self, target: &Tensor, limit: f64) -> Result<(Tensor, Tensor)> {
        let difference = self.sub(target)?;
        let limited = difference.clamp(-limit, limit)?;
        Ok((difference.sub(&limited.mul(0.5)?)?, limited))
    }

    /// −(target · log x + (1 − target) · log(1 − x)) for probabilities x, times weight; logarithms stop at −100.
    #[track_caller]
    pub fn binary_cross_entropy(
        &self,
        target: &Tensor,
        weight: Option<&Tensor>,
        reduction: Reduction,
    ) -> Result<Tensor> {
        self.check_target(target, "binary_cross_entropy", Loc::caller())?;
        self.weighted_loss(&Op::BinaryCrossEntropy {}, &[Arg::Tensor(target)], weight, reduction)
    }

    /// Not broadcast: a target of another shape is a mistake.
    fn check_target(&self, target: &Tensor, op: &str, loc: Loc) -> Result<()> {
        if self.shape() == target.shape() {
            return Ok(());
        }
        let what = "the number of elements of x and target";
        let why = Why::sizes(what, self.numel(), target.numel());
        Err(Error::op(op, why, loc))
    }

    /// A row that gives each element's loss, times weight, reduced.
    #[track_caller]
    fn weighted_loss(
        &self,
        op: &Op,
        others: &[Arg<'_>],
        weight: Option<&Tensor>,
        reduction: Reduction,
    ) -> Result<Tensor> {
        let args: SmallVec<[Arg<'_>; 4]> = [Arg::Tensor(self)].iter().chain(others).copied().collect();
        let loss = dispatch_tensor(op, &args, false, Loc::caller())?;
        composed([Some(&loss), weight], |[loss, weight]| match (loss, weight) {
            (Some(loss), Some(weight)) => loss.mul(weight)?.reduced(reduction),
            (loss, _) => loss.map_or_else(|| self.reduced(reduction), |loss| loss.reduced(reduction)),
        })
    }

    /// Binary cross-entropy of σ(x), without the loss of precision; positive targets count `pos_weight` times.
    #[track_caller]
    pub fn binary_cross_entropy_with_logits(
        &self,
        target: &Tensor,
        weight: Option<&Tensor>,
        pos_weight: Option<&Tensor>,
        reduction: Reduction,
    ) -> Result<Tensor> {
        self.check_target(target, "binary_cross_entropy_with_logits", Loc::caller())?;
        let pos_weight = pos_weight.map_or(Arg::Number(Scalar::Float(1.0)), Arg::Tensor);
        let others = [Arg::Tensor(target), pos_weight];
        self.weighted_loss(&Op::BinaryCrossEntropyWithLogits {}, &others, weight, reduction)
    }

    /// target · (log target − x) for log-probabilities x; the target too may be given by its logarithm. For
    /// PyTorch's `batchmean` divide the sum by the number of samples.
    #[track_caller]
    pub fn kl_div(&self, target: &Tensor, log_target: bool, reduction: Reduction) -> Result<Tensor> {
        composed_of([self, target], |[x, target]| {
            if log_target {
                return target.exp()?.mul(&target.sub(x)?)?.reduced(reduction);
            }
            // 0 · log 0 = 0, in the gradient too.
            let none = target.eq(0.0)?;
            let entropy = target.mul(&none.where_self(1.0, target)?.log()?)?;
            entropy.sub(&target.mul(x)?)?.reduced(reduction)
        })
    }

    /// Scores `[n, c]`, `[n, c, …]` or `[c]` as a matrix with a row for each sample, and the shape of the samples.
    fn class_rows(&self, name: &str, loc: Loc) -> Result<(Tensor, Vec<usize>)> {
        let shape = self.shape();
        match shape.rank() {
            0 => Err(Error::op(name, Why::Rank { argument: "input", expected: "1 or more", got: 0 }, loc)),
            1 => Ok((self.unsqueeze(0)?, Vec::new())),
            2 => Ok((self.clone(), vec![shape[0]])),
            rank => {
                let mut order: Vec<i64> = (0..rank as i64).filter(|&d| d != 1).collect();
                order.push(1);
                let mut samples = shape.to_vec();
                let classes = samples.remove(1);
                let rows: usize = samples.iter().product();
                Ok((self.permute(&order[..])?.reshape([rows, classes])?, samples))
            }
        }
    }

    /// Class numbers of these samples, `[m]`.
    fn class_targets(&self, name: &str, samples: &[usize], loc: Loc) -> Result<Tensor> {
        if self.dtype() != DType::I64 {
            let why = Why::DType { argument: "target", expected: "i64 class indices", got: self.dtype() };
            return Err(Error::op(name, why, loc));
        }
        if self.shape()[..] != *samples {
            let why = Why::shape("target", samples, self.shape());
            return Err(Error::op(name, why, loc));
        }
        self.reshape([self.numel()])
    }

    fn look_up(&self, ignore_index: i64) -> Result<Targets> {
        let counted = self.ne(ignore_index)?;
        let classes = counted.where_self(self, 0i64)?.reshape([-1, 1])?;
        Ok(Targets { counted, classes })
    }

    /// `[m]` losses as the samples lie, or reduced; a mean is over `weights` if there are any.
    fn by_sample(&self, samples: &[usize], reduction: Reduction, weights: Option<&Tensor>) -> Result<Tensor> {
        match (reduction, weights) {
            (Reduction::None, _) => self.reshape(samples),
            (Reduction::Sum, _) => self.sum(),
            (Reduction::Mean, Some(weights)) => self.sum()?.div(&weights.sum()?),
            (Reduction::Mean, None) => self.mean(),
        }
    }

    /// −weight[target] · x[target] for log-probabilities `[n, c]`, `[n, c, …]` or `[c]` and class numbers.
    #[track_caller]
    pub fn nll_loss_with(&self, target: &Tensor, options: CrossEntropy<'_>) -> Result<Tensor> {
        let loc = Loc::caller();
        let CrossEntropy { weight, ignore_index, reduction, .. } = options;
        let (rows, samples) = self.class_rows("nll_loss", loc)?;
        let target = target.class_targets("nll_loss", &samples, loc)?;
        let Some(weight) = weight else {
            let op = Op::NllLoss { reduction, ignore_index };
            let loss = dispatch_tensor(&op, &[Arg::Tensor(&rows), Arg::Tensor(&target)], false, loc)?;
            return if reduction == Reduction::None { loss.reshape(&samples[..]) } else { Ok(loss) };
        };
        composed_of([&rows, weight], |[rows, weight]| {
            let (losses, weights) = rows.weighted_nll(&target.look_up(ignore_index)?, Some(weight))?;
            losses.by_sample(&samples, reduction, Some(&weights))
        })
    }

    /// The losses of rows of log-probabilities, and what each sample weighs: both `[m]`, zero where it does not
    /// count.
    fn weighted_nll(&self, targets: &Targets, weight: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        let picked = self.gather(1, &targets.classes)?.reshape([-1])?;
        let ty = picked.ty();
        let weights = match weight {
            Some(weight) => weight.gather(0, &targets.classes.reshape([-1])?)?,
            None => Tensor::full_of(ty.shape, 1.0, ty.dtype, &ty.device)?,
        };
        let weights = targets.counted.where_self(&weights, 0.0)?;
        let losses = targets.counted.where_self(&picked.mul(&weights)?.neg()?, 0.0)?;
        Ok((losses, weights))
    }

    /// Cross-entropy of scores `[n, c]`, `[n, c, …]` or `[c]` with all options. Targets are class numbers, or
    /// probabilities of the scores' shape and dtype.
    #[track_caller]
    pub fn cross_entropy_of(&self, target: &Tensor, options: CrossEntropy<'_>) -> Result<Tensor> {
        let loc = Loc::caller();
        let CrossEntropy { weight, ignore_index, reduction, label_smoothing: smoothing } = options;
        if !(0.0..=1.0).contains(&smoothing) {
            let why =
                Why::Number { argument: "label_smoothing", expected: "between 0 and 1", got: smoothing };
            return Err(Error::op("cross_entropy", why, loc));
        }
        let (rows, samples) = self.class_rows("cross_entropy", loc)?;
        let classes = rows.shape()[1] as f64;
        if target.dtype().is_float() {
            if target.shape() != self.shape() {
                let why = Why::shape("target", self.shape(), target.shape());
                return Err(Error::op("cross_entropy", why, loc));
            }
            let target = target.class_rows("cross_entropy", loc)?.0;
            return composed([Some(&rows), Some(&target), weight], |operands| {
                let [Some(rows), Some(target), weight] = operands else { return Ok(rows.clone()) };
                let target = if smoothing > 0.0 {
                    target.mul(1.0 - smoothing)?.add(smoothing / classes)?
                } else {
                    target.clone()
                };
                let mut terms = rows.log_softmax(1)?.mul(&target)?;
                if let Some(weight) = weight {
                    terms = terms.mul(weight)?;
                }
                terms.sum_dim(1, false)?.neg()?.by_sample(&samples, reduction, None)
            });
        }
        let target = target.class_targets("cross_entropy", &samples, loc)?;
        if weight.is_none() && smoothing == 0.0 {
            let op = Op::CrossEntropy { reduction, ignore_index };
            let loss = dispatch_tensor(&op, &[Arg::Tensor(&rows), Arg::Tensor(&target)], false, loc)?;
            return if reduction == Reduction::None { loss.reshape(&samples[..]) } else { Ok(loss) };
        }
        let targets = target.look_up(ignore_index)?;
        composed([Some(&rows), weight], |operands| {
            let [Some(rows), weight] = operands else { return Ok(rows.clone()) };
            let log_probability = rows.log_softmax(1)?;
            let (losses, weights) = log_probability.weighted_nll(&targets, weight)?;
            if smoothing == 0.0 {
                return losses.by_sample(&samples, reduction, Some(&weights));
            }
            let spread = match weight {
                Some(weight) => log_probability.mul(weight)?,
                None => log_probability,
            };
            let spread = spread.sum_dim(1, false)?.neg()?;
            let spread = targets.counted.where_self(&spread, 0.0)?;
            let mixed = losses.mul(1.0 - smoothing)?.add(&spread.mul(smoothing / classes)?)?;
            mixed.by_sample(&samples, reduction, Some(&weights))
        })
    }
}
