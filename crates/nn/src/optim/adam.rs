//! Adam, and AdamW with its decoupled weight decay.

use kiln_ir::Loc;
use kiln_tensor::{Result, Tensor, TensorList, foreach};

use super::define::{Setting, check_betas, check_not_negative, optimizer};
use super::group::{Groups, Options, ParamGroup, Rule, Step, average, directed, shrink};

/// Adam: steps scaled by running averages of the gradient and its square.
pub struct Adam {
    groups: Groups<Settings>,
}

/// Adam with weight decay apart from the gradient.
pub struct AdamW {
    groups: Groups<Settings>,
}

/// The options of [`Adam`], with PyTorch's names and defaults.
#[derive(Clone, Debug)]
pub struct AdamOptions(Settings);

/// The options of [`AdamW`], with PyTorch's names and defaults.
#[derive(Clone, Debug)]
pub struct AdamWOptions(Settings);

#[derive(Clone, Debug)]
struct Settings {
    name: &'static str,
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    amsgrad: bool,
    maximize: bool,
    /// Whether weight decay shrinks the parameters themselves rather than adding to their gradients.
    decoupled: bool,
}

const ADAM: Settings = Settings {
    name: "Adam",
    lr: 1e-3,
    betas: (0.9, 0.999),
    eps: 1e-8,
    weight_decay: 0.0,
    amsgrad: false,
    maximize: false,
    decoupled: false,
};

const ADAM_W: Settings = Settings { name: "AdamW", weight_decay: 1e-2, decoupled: true, ..ADAM };

macro_rules! adam_options {
    ($Options:ident, $defaults:expr, $weight_decay:literal) => {
        impl Default for $Options {
            fn default() -> $Options {
                $Options($defaults)
            }
        }

        impl $Options {
            /// The learning rate, 0.001 by default.
            pub fn lr(mut self, lr: f64) -> $Options {
                self.0.lr = lr;
                self
            }

            /// How much the running averages of the gradient and of its square keep; (0.9, 0.999) by default.
            pub fn betas(mut self, beta1: f64, beta2: f64) -> $Options {
                self.0.betas = (beta1, beta2);
                self
            }

            /// What is added to the divisor, 1e-8 by default.
            pub fn eps(mut self, eps: f64) -> $Options {
                self.0.eps = eps;
                self
            }

            #[doc = concat!("Weight decay, ", $weight_decay, " by default.")]
            pub fn weight_decay(mut self, weight_decay: f64) -> $Options {
                self.0.weight_decay = weight_decay;
                self
            }

            /// Whether to divide by the largest average of the square so far.
            pub fn amsgrad(mut self, amsgrad: bool) -> $Options {
                self.0.amsgrad = amsgrad;
                self
            }

            /// Whether to climb instead of descend.
            pub fn maximize(mut self, maximize: bool) -> $Options {
                self.0.maximize = maximize;
                self
            }
        }
    };
}
adam_options!(AdamOptions, ADAM, "0");
adam_options!(AdamWOptions, ADAM_W, "0.01");

optimizer!(Adam, AdamOptions, "Adam");
optimizer!(AdamW, AdamWOptions, "AdamW");

/// What Adam knows of a parameter.
#[derive(Clone)]
pub struct AdamState {
    /// Updates so far.
    pub step: u64,
    /// The running average of the gradient.
    pub exp_avg: Tensor,
    /// The running average of its square.
    pub exp_avg_sq: Tensor,
    /// The largest of those so far, with `amsgrad`.
    pub max_exp_avg_sq: Option<Tensor>,
}

impl AdamState {
    fn of(groups: &Groups<Settings>, parameter: &Tensor) -> Option<AdamState> {
        let (step, state) = groups.state(parameter)?;
        let mut state = state.into_iter();
        Some(AdamState {
            step,
            exp_avg: state.next()?,
            exp_avg_sq: state.next()?,
            max_exp_avg_sq: state.next(),
        })
    }
}

impl Adam {
    /// The state of a parameter, once it has one.
    pub fn state(&self, parameter: &Tensor) -> Option<AdamState> {
        AdamState::of(&self.groups, parameter)
    }
}

impl AdamW {
    /// The state of a parameter, once it has one.
    pub fn state(&self, parameter: &Tensor) -> Option<AdamState> {
        AdamState::of(&self.groups, parameter)
    }
}

impl Options for Settings {
    fn name(&self) -> &'static str {
        self.name
    }

    fn lr(&mut self) -> &mut f64 {
        &mut self.lr
    }

    fn options(&mut self) -> Vec<(&'static str, Setting<'_>)> {
        vec![
            ("lr", Setting::Number(&mut self.lr)),
            ("betas.0", Setting::Number(&mut self.betas.0)),
            ("betas.1", Setting::Number(&mut self.betas.1)),
            ("eps", Setting::Number(&mut self.eps)),
            ("weight_decay", Setting::Number(&mut self.weight_decay)),
            ("amsgrad", Setting::Flag(&mut self.amsgrad)),
            ("maximize", Setting::Flag(&mut self.maximize)),
        ]
    }
}

impl Rule for Settings {
    fn check(&self, loc: Loc) -> Result<()> {
        check_not_negative(self.name, [("lr", self.lr), ("eps", self.eps)], loc)?;
        check_betas(self.name, self.betas, loc)?;
        check_not_negative(self.name, [("weight_decay", self.weight_decay)], loc)
    }

    fn states(&self) -> Vec<&'static str> {
        if self.amsgrad {
            vec!["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        } else {
            vec!["exp_avg", "exp_avg_sq"]
        }
    }

    fn update(&self, at: Step, params: &TensorList, grads: TensorList, state: &[TensorList]) -> Result<()> {
        let Settings { lr, betas: (beta1, beta2), eps, weight_decay, .. } = *self;
        let (exp_avg, exp_avg_sq) = (&state[0], &state[1]);
        let correction1 = 1.0 - beta1.powf(at.number as f64);
        let correction2 = 1.0 - beta2.powf(at.number as f64);

        let added = if self.decoupled { 0.0 } else { weight_decay };
        let grads = directed(params, grads, self.maximize, added)?;
        if self.decoupled {
            shrink(params, lr, weight_decay)?;
        }
        average((exp_avg, exp_avg_sq), &grads, self.betas)?;
        // Frees weight decay's or maximize's gradients before the divisor needs memory.
        drop(grads);
        let divisor = match state.get(2) {
            Some(max_exp_avg_sq) => {
                foreach::maximum_(max_exp_avg_sq, exp_avg_sq)?;
                foreach::sqrt(max_exp_avg_sq)?
            }
            None => foreach::sqrt(exp_avg_sq)?,
        };
        foreach::div_(&divisor, correction2.sqrt())?;
        foreach::add_(&divisor, eps)?;
        foreach::addcdiv_(params, exp_avg, &divisor, -(lr / correction1))
    }
}
