//! Dropout: in training some of what passes is zero.

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::{Result, Tensor};

use crate::display::python_float;
use crate::{Forward, Module, Training};

macro_rules! dropout {
    ($(#[$doc:meta])* $Dropout:ident, $description:literal, |$x:ident, $p:ident| $body:expr) => {
        $(#[$doc])*
        #[derive(Module, Debug)]
        #[module(extra_repr = Self::describe)]
        pub struct $Dropout {
            training: Training,
            #[module(skip)]
            p: f64,
        }

        impl $Dropout {
            /// With this probability of zero.
            #[track_caller]
            pub fn new(p: f64) -> Result<$Dropout> {
                if !(0.0..=1.0).contains(&p) {
                    let why = Why::Number { argument: "p", expected: "between 0 and 1", got: p };
                    return Err(Error::op(stringify!($Dropout), why, Loc::caller()));
                }
                Ok($Dropout { training: Training::default(), p })
            }

            fn describe(&self) -> String {
                format!($description, python_float(self.p))
            }
        }

        impl Default for $Dropout {
            /// With probability ½.
            fn default() -> $Dropout {
                $Dropout { training: Training::default(), p: 0.5 }
            }
        }

        impl Forward for $Dropout {
            type Output = Tensor;
            #[track_caller]
            fn forward(&self, $x: &Tensor) -> Result<Tensor> {
                if !self.training.get() || self.p == 0.0 {
                    return Ok($x.clone());
                }
                let $p = self.p;
                $body
            }
        }
    };
}

dropout! {
    /// Each element is zero with probability p, the others are scaled up by 1 / (1 − p); nothing happens in
    /// evaluation.
    ///
    /// ```
    /// use kiln_nn::{Dropout, Forward, Module};
    /// use kiln_tensor::{Device, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let (layer, x) = (Dropout::new(0.5)?, Tensor::ones([8], &Device::Cpu)?);
    /// assert!(layer.forward(&x)?.to_vec::<f32>()?.iter().all(|&y| y == 0.0 || y == 2.0));
    /// layer.eval();
    /// assert_eq!(layer.forward(&x)?.to_vec::<f32>()?, [1.0; 8]);
    /// # Ok(()) }
    /// ```
    Dropout, "p={}, inplace=False", |x, p| x.dropout(p, true)
}

dropout! {
    /// Dropout of whole channels of `[n, c, height, width]` or `[c, height, width]`.
    Dropout2d, "p={}, inplace=False", |x, p| {
        let shape = x.shape();
        match shape.rank() {
            3 | 4 => channels(x, &[&shape[..shape.rank() - 2], &[1, 1]].concat(), p),
            got => rank_error("Dropout2d", "3 or 4", got),
        }
    }
}

dropout! {
    /// Dropout of whole channels of `[n, c, length]` or `[c, length]`.
    Dropout1d, "p={}, inplace=False", |x, p| {
        let shape = x.shape();
        match shape.rank() {
            2 | 3 => channels(x, &[&shape[..shape.rank() - 1], &[1]].concat(), p),
            got => rank_error("Dropout1d", "2 or 3", got),
        }
    }
}

dropout! {
    /// Dropout of whole samples, the rows of dim 0: in a residual branch, whether the branch counts.
    ///
    /// ```
    /// use kiln_nn::{Forward, StochasticDepth};
    /// use kiln_tensor::{Device, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let y = StochasticDepth::new(0.5)?.forward(&Tensor::ones([8, 3], &Device::Cpu)?)?;
    /// assert!(y.to_vec::<f32>()?.chunks(3).all(|row| row == [0.0; 3] || row == [2.0; 3]));
    /// # Ok(()) }
    /// ```
    StochasticDepth, "p={}, mode=row", |x, p| {
        let mut shape = x.shape().to_vec();
        let Some((_, rest)) = shape.split_first_mut() else {
            return rank_error("StochasticDepth", "1 or more", 0);
        };
        rest.fill(1);
        channels(x, &shape, p)
    }
}

#[track_caller]
fn rank_error(op: &str, expected: &'static str, got: usize) -> Result<Tensor> {
    Err(Error::op(op, Why::Rank { argument: "x", expected, got }, Loc::caller()))
}

/// One decision for all elements that share a place in this shape.
#[track_caller]
fn channels(x: &Tensor, shape: &[usize], p: f64) -> Result<Tensor> {
    x.mul(&Tensor::full_of(shape, 1.0, x.dtype(), &x.device())?.dropout(p, true)?)
}
