//! RAdam.

use kiln_ir::Loc;
use kiln_tensor::{Result, Tensor, TensorList, foreach};

use super::define::{check_betas, check_not_negative, optimizer, settings};
use super::group::{Groups, ParamGroup, Rule, Step, average, directed, shrink};

settings! {
    /// RAdam: Adam that starts as momentum and adapts step sizes once it has seen enough to know them.
    RAdam, RAdamOptions, "RAdam", betas: (0.9, 0.999), {
        /// The learning rate, 0.001 by default.
        lr: f64 = 1e-3,
        /// What is added to the divisor, 1e-8 by default.
        eps: f64 = 1e-8,
        /// Weight decay, 0 by default.
        weight_decay: f64 = 0.0,
        /// Whether weight decay shrinks the parameters themselves rather than adding to their gradients.
        decoupled_weight_decay: bool = false,
        /// Whether to climb instead of descend.
        maximize: bool = false,
    }
}

impl Settings {
    /// How far the adaptive step of an update can be trusted; `None` if not at all.
    fn rectification(&self, step: u64) -> Option<f64> {
        let (beta2, step) = (self.betas.1, step as f64);
        let power = beta2.powf(step);
        let longest = 2.0 / (1.0 - beta2) - 1.0;
        let length = longest - 2.0 * step * power / (1.0 - power);
        let share = (length - 4.0) * (length - 2.0) * longest;
        (length > 5.0).then(|| (share / ((longest - 4.0) * (longest - 2.0) * length)).sqrt())
    }
}

impl Rule for Settings {
    fn check(&self, loc: Loc) -> Result<()> {
        check_not_negative("RAdam", [("lr", self.lr), ("eps", self.eps)], loc)?;
        check_betas("RAdam", self.betas, loc)?;
        check_not_negative("RAdam", [("weight_decay", self.weight_decay)], loc)
    }

    fn states(&self) -> Vec<&'static str> {
        vec!["exp_avg", "exp_avg_sq"]
    }

    fn update(&self, at: Step, params: &TensorList, grads: TensorList, state: &[TensorList]) -> Result<()> {
        let Settings { lr, eps, weight_decay, betas: (beta1, beta2), .. } = *self;
        let (exp_avg, exp_avg_sq) = (&state[0], &state[1]);
        let added = if self.decoupled_weight_decay { 0.0 } else { weight_decay };
        let grads = directed(params, grads, self.maximize, added)?;
        if self.decoupled_weight_decay {
            shrink(params, lr, weight_decay)?;
        }
        average((exp_avg, exp_avg_sq), &grads, self.betas)?;
        let rate = lr / (1.0 - beta1.powf(at.number as f64));
        // Both forms of the step, one of them with a factor of zero: all steps are the same ops.
        let (plain, adaptive) = match self.rectification(at.number) {
            Some(trust) => (0.0, rate * trust * (1.0 - beta2.powf(at.number as f64)).sqrt()),
            None => (rate, 0.0),
        };
        let divisor = foreach::sqrt(exp_avg_sq)?;
        foreach::add_(&divisor, eps)?;
        foreach::addcdiv_(params, exp_avg, &divisor, -adaptive)?;
        foreach::add_scaled_(params, exp_avg, -plain)
    }
}
