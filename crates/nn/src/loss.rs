//! Losses as modules: `forward(&input, &target)`, or `Forward` of both as a tuple.

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::{CrossEntropy, Reduction, Result, Tensor};

use crate::{Buffer, Forward, Module, functional};

/// Losses with their weights, which are buffers, and their numbers.
macro_rules! losses {
    ($($(#[$doc:meta])* $Type:ident
        $([$($(#[$buffer_doc:meta])* $buffer:ident),*])?
        { $($(#[$field_doc:meta])* $field:ident: $Number:ty = $default:expr),* }
        |$this:ident, $($operand:ident),*| $body:expr;)*) => {
        $(
            #[derive(Module, Clone, Debug)]
            $(#[$doc])*
            pub struct $Type {
                #[module(skip)]
                reduction: Reduction,
                $($($(#[$buffer_doc])* pub $buffer: Option<Buffer>,)*)?
                $(#[module(skip)] $field: $Number,)*
            }

            impl $Type {
                /// The mean, with PyTorch's defaults.
                pub const fn new() -> $Type {
                    $Type { reduction: Reduction::Mean, $($($buffer: None,)*)? $($field: $default),* }
                }

                $($(
                    $(#[$buffer_doc])*
                    pub fn $buffer(mut self, $buffer: Tensor) -> $Type {
                        self.$buffer = Some(Buffer::new($buffer));
                        self
                    }
                )*)?

                /// Mean, sum, or one loss for each element or sample.
                pub const fn reduction(mut self, reduction: Reduction) -> $Type {
                    self.reduction = reduction;
                    self
                }

                $(
                    $(#[$field_doc])*
                    pub const fn $field(mut self, $field: $Number) -> $Type {
                        self.$field = $field;
                        self
                    }
                )*

                /// The loss.
                #[track_caller]
                pub fn forward(&self, $($operand: &Tensor),*) -> Result<Tensor> {
                    let $this = self;
                    $body
                }
            }

            impl Default for $Type {
                fn default() -> $Type {
                    $Type::new()
                }
            }

            impl Forward<($(losses!(@tensor $operand)),*)> for $Type {
                type Output = Tensor;
                #[track_caller]
                fn forward(&self, ($($operand),*): &($(losses!(@tensor $operand)),*)) -> Result<Tensor> {
                    $Type::forward(self, $($operand),*)
                }
            }
        )*
    };
    (@tensor $operand:ident) => { Tensor };
}

losses! {
    /// Cross-entropy of scores `[samples, classes, …]` and class numbers, or probabilities of all classes.
    ///
    /// ```
    /// use kiln_nn::CrossEntropyLoss;
    /// use kiln_tensor::{Device, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let (scores, classes) = (Tensor::zeros([2, 4], &Device::Cpu)?, Tensor::from_slice(&[1i64, 3])?);
    /// let loss = CrossEntropyLoss::new().label_smoothing(0.1).forward(&scores, &classes)?;
    /// assert!((loss.item::<f64>()? - 4f64.ln()).abs() < 1e-6);
    /// # Ok(()) }
    /// ```
    CrossEntropyLoss [
        /// Weight of each class, all alike by default.
        weight
    ] {
        /// The class whose samples don't count, −100 by default.
        ignore_index: i64 = functional::IGNORE_INDEX,
        /// How much of each target is spread evenly over all classes, nothing by default.
        label_smoothing: f64 = 0.0
    }
    |this, input, target| match (&this.weight, this.label_smoothing == 0.0, input.rank() == 2) {
        (None, true, true) if !target.dtype().is_float() => {
            functional::cross_entropy_with(input, target, this.reduction, this.ignore_index)
        }
        _ => input.cross_entropy_of(target, CrossEntropy {
            weight: this.weight.as_deref(),
            ignore_index: this.ignore_index,
            reduction: this.reduction,
            label_smoothing: this.label_smoothing,
        }),
    };
    /// Negative log-likelihood of log-probabilities `[samples, classes, …]` and class numbers.
    #[module(name = "NLLLoss")]
    NllLoss [
        /// Weight of each class, all alike by default.
        weight
    ] {
        /// The class whose samples don't count, −100 by default.
        ignore_index: i64 = functional::IGNORE_INDEX
    }
    |this, input, target| match (&this.weight, input.rank() == 2) {
        (None, true) => functional::nll_loss_with(input, target, this.reduction, this.ignore_index),
        _ => input.nll_loss_with(target, CrossEntropy {
            weight: this.weight.as_deref(),
            ignore_index: this.ignore_index,
            reduction: this.reduction,
            label_smoothing: 0.0,
        }),
    };
    /// (input − target)²
    MSELoss {}
    |this, input, target| input.mse_loss(target, this.reduction);
    /// |input − target|
    L1Loss {}
    |this, input, target| input.l1_loss(target, this.reduction);
    /// The absolute difference, bent to a square below beta.
    SmoothL1Loss {
        /// Where it bends, 1 by default.
        beta: f64 = 1.0
    }
    |this, input, target| input.smooth_l1_loss(target, this.beta, this.reduction);
    /// Half the square of the difference, straight beyond delta.
    HuberLoss {
        /// Where it becomes straight, 1 by default.
        delta: f64 = 1.0
    }
    |this, input, target| input.huber_loss(target, this.delta, this.reduction);
    /// Binary cross-entropy of probabilities.
    BCELoss [
        /// Weight of each element, all alike by default.
        weight
    ] {}
    |this, input, target| input.binary_cross_entropy(target, this.weight.as_deref(), this.reduction);
    /// Binary cross-entropy of scores.
    BCEWithLogitsLoss [
        /// Weight of each element, all alike by default.
        weight,
        /// How often positive targets count, once by default.
        pos_weight
    ] {}
    |this, input, target| input.binary_cross_entropy_with_logits(
        target,
        this.weight.as_deref(),
        this.pos_weight.as_deref(),
        this.reduction,
    );
    /// target · (log target − input) for log-probabilities.
    KLDivLoss {
        /// Whether the target is given by its logarithm; it is not by default.
        log_target: bool = false,
        /// Whether the sum is divided by the number of samples, PyTorch's `batchmean`, whatever the reduction; not by default.
        batchmean: bool = false
    }
    |this, input, target| if this.batchmean {
        let samples = input.size(0)?.max(1) as f64;
        input.kl_div(target, this.log_target, Reduction::Sum)?.div(samples)
    } else {
        input.kl_div(target, this.log_target, this.reduction)
    };
    /// log(1 + e^(−target · input)) for targets 1 and −1.
    SoftMarginLoss {}
    |this, input, target| reduce(&target.neg()?.mul(input)?.exp()?.log1p()?, this.reduction);
    /// input where the target is 1, max(0, margin − input) where it is −1.
    HingeEmbeddingLoss {
        /// The margin, 1 by default.
        margin: f64 = 1.0
    }
    |this, input, target| {
        let zeros = input.zeros_like()?;
        let apart = input.neg()?.add(this.margin)?.maximum(0.0)?;
        let apart = target.ne(1.0)?.where_self(&apart, &zeros)?;
        let near = target.ne(-1.0)?.where_self(input, &zeros)?;
        reduce(&apart.add(&near)?, this.reduction)
    };
    /// exp(input) − target · input for inputs that are logarithms, else input − target · log(input + eps).
    PoissonNLLLoss {
        /// Whether the input is a logarithm; it is by default.
        log_input: bool = true,
        /// Whether Stirling's approximation of log target! is added where the target is above 1; not by default.
        full: bool = false,
        /// What is added before the logarithm, 1e-8 by default.
        eps: f64 = 1e-8
    }
    |this, input, target| {
        let mut loss = if this.log_input {
            input.exp()?.sub(&target.mul(input)?)?
        } else {
            input.sub(&target.mul(&input.add(this.eps)?.log()?)?)?
        };
        if this.full {
            let stirling = target
                .mul(&target.log()?)?
                .sub(target)?
                .add(&target.mul(2.0 * std::f64::consts::PI)?.log()?.mul(0.5)?)?;
            loss = loss.add(&target.le(1.0)?.where_self(0.0, &stirling)?)?;
        }
        reduce(&loss, this.reduction)
    };
    /// max(0, −target · (x − y) + margin) for targets 1 (x ranks higher) and −1.
    #[derive(Copy)]
    MarginRankingLoss {
        /// The margin, 0 by default.
        margin: f64 = 0.0
    }
    |this, x, y, target| {
        reduce(&target.neg()?.mul(&x.sub(y)?)?.add(this.margin)?.maximum(0.0)?, this.reduction)
    };
    /// 1 − cos(x, y) where the target is 1, max(0, cos(x, y) − margin) where it is −1.
    #[derive(Copy)]
    CosineEmbeddingLoss {
        /// The margin, 0 by default.
        margin: f64 = 0.0
    }
    |this, x, y, target| {
        if target.rank() + 1 != x.rank() || x.rank() == 0 {
            let (what, left) = ("the rank of target and the rank of x minus one", target.rank());
            let why = Why::sizes(what, left, x.rank().saturating_sub(1));
            return Err(Error::op("CosineEmbeddingLoss", why, Loc::caller()));
        }
        // As PyTorch computes it: a small number under the root instead of a least length.
        let length = |t: &Tensor| -> Result<Tensor> { t.mul(t)?.sum_dim(-1, false)?.add(1e-12) };
        let product = x.mul(y)?.sum_dim(-1, false)?;
        let cosine = product.div(&length(x)?.mul(&length(y)?)?.sqrt()?)?;
        let zeros = cosine.zeros_like()?;
        let near = target.eq(1.0)?.where_self(&cosine.neg()?.add(1.0)?, &zeros)?;
        let apart = target.eq(-1.0)?.where_self(&cosine.sub(this.margin)?.maximum(0.0)?, &zeros)?;
        reduce(&near.add(&apart)?, this.reduction)
    };
    /// max(0, |anchor − positive| − |anchor − negative| + margin), by a norm along the last dim.
    #[derive(Copy)]
    TripletMarginLoss {
        /// The margin, 1 by default.
        margin: f64 = 1.0,
        /// The norm, 2 by default.
        p: f64 = 2.0,
        /// What is added to every difference, 1e-6 by default.
        eps: f64 = 1e-6
    }
    |this, anchor, positive, negative| {
        let distance = |other: &Tensor| -> Result<Tensor> {
            anchor.sub(other)?.add(this.eps)?.norm_dim(this.p, -1, false)
        };
        let loss = distance(positive)?.sub(&distance(negative)?)?.add(this.margin)?.maximum(0.0)?;
        reduce(&loss, this.reduction)
    };
}

#[track_caller]
fn reduce(loss: &Tensor, reduction: Reduction) -> Result<Tensor> {
    match reduction {
        Reduction::None => Ok(loss.clone()),
        Reduction::Mean => loss.mean(),
        Reduction::Sum => loss.sum(),
    }
}
