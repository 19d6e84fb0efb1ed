//! Losses as modules.

use kiln_tensor::{Reduction, Result, Tensor};

use crate::{Forward, Module, functional};

macro_rules! class_loss {
    ($(#[$doc:meta])* $Type:ident $name:literal $function:path) => {
        $(#[$doc])*
        #[derive(Module, Copy, Clone, Debug)]
        #[module(name = $name)]
        pub struct $Type {
            #[module(skip)]
            reduction: Reduction,
            #[module(skip)]
            ignore_index: i64,
        }

        impl $Type {
            /// The mean over the samples; those of class −100 don't count.
            pub const fn new() -> $Type {
                $Type { reduction: Reduction::Mean, ignore_index: functional::IGNORE_INDEX }
            }

            /// Mean, sum, or one loss per sample.
            pub const fn reduction(mut self, reduction: Reduction) -> $Type {
                self.reduction = reduction;
                self
            }

            /// The class whose samples don't count.
            pub const fn ignore_index(mut self, ignore_index: i64) -> $Type {
                self.ignore_index = ignore_index;
                self
            }

            /// The loss of an input `[samples, classes]` for class numbers `[samples]`.
            #[track_caller]
            pub fn forward(&self, input: &Tensor, target: &Tensor) -> Result<Tensor> {
                $function(input, target, self.reduction, self.ignore_index)
            }
        }

        impl Default for $Type {
            fn default() -> $Type {
                $Type::new()
            }
        }

        impl Forward<(Tensor, Tensor)> for $Type {
            type Output = Tensor;
            #[track_caller]
            fn forward(&self, (input, target): &(Tensor, Tensor)) -> Result<Tensor> {
                $Type::forward(self, input, target)
            }
        }
    };
}

class_loss! {
    /// Cross-entropy of scores and class numbers.
    ///
    /// ```
    /// use kiln_nn::CrossEntropyLoss;
    /// use kiln_tensor::{Device, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let (scores, classes) = (Tensor::zeros([2, 4], &Device::Cpu)?, Tensor::from_slice(&[1i64, 3])?);
    /// let loss = CrossEntropyLoss::new().forward(&scores, &classes)?;
    /// assert!((loss.item::<f64>()? - 4f64.ln()).abs() < 1e-6);
    /// # Ok(()) }
    /// ```
    CrossEntropyLoss "CrossEntropyLoss" functional::cross_entropy_with
}

class_loss! {
    /// Negative log-likelihood of log-probabilities and class numbers.
    NllLoss "NLLLoss" functional::nll_loss_with
}
