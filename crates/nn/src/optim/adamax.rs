//! Adamax.

use kiln_ir::Loc;
use kiln_tensor::{Result, Tensor, TensorList, foreach};

use super::define::{check_betas, check_not_negative, optimizer, settings};
use super::group::{Groups, ParamGroup, Rule, Step, directed};

settings! {
    /// Adamax: Adam with the infinity norm of recent gradients instead of their root mean square.
    Adamax, AdamaxOptions, "Adamax", betas: (0.9, 0.999), {
        /// The learning rate, 0.002 by default.
        lr: f64 = 2e-3,
        /// What is added to gradients' sizes, 1e-8 by default.
        eps: f64 = 1e-8,
        /// The weight of the parameters' square in what is minimised, 0 by default.
        weight_decay: f64 = 0.0,
        /// Whether to climb instead of descend.
        maximize: bool = false,
    }
}

impl Rule for Settings {
    fn check(&self, loc: Loc) -> Result<()> {
        check_not_negative("Adamax", [("lr", self.lr), ("eps", self.eps)], loc)?;
        check_betas("Adamax", self.betas, loc)?;
        check_not_negative("Adamax", [("weight_decay", self.weight_decay)], loc)
    }

    fn states(&self) -> Vec<&'static str> {
        vec!["exp_avg", "exp_inf"]
    }

    fn update(&self, at: Step, params: &TensorList, grads: TensorList, state: &[TensorList]) -> Result<()> {
        let (beta1, beta2) = self.betas;
        let (exp_avg, exp_inf) = (&state[0], &state[1]);
        let grads = directed(params, grads, self.maximize, self.weight_decay)?;
        foreach::lerp_(exp_avg, &grads, 1.0 - beta1)?;
        foreach::mul_(exp_inf, beta2)?;
        let size = foreach::abs(&grads)?;
        foreach::add_(&size, self.eps)?;
        foreach::maximum_(exp_inf, &size)?;
        let correction = 1.0 - beta1.powf(at.number as f64);
        foreach::addcdiv_(params, exp_avg, exp_inf, -(self.lr / correction))
    }
}
