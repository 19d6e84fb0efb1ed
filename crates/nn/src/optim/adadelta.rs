//! Adadelta.

use kiln_ir::Loc;
use kiln_tensor::{Result, Tensor, TensorList, foreach};

use super::define::{check_not_negative, check_number, optimizer, settings};
use super::group::{Groups, ParamGroup, Rule, Step, directed};

settings! {
    /// Adadelta: steps in proportion to the root mean square of past steps over that of gradients.
    Adadelta, AdadeltaOptions, "Adadelta", {
        /// The learning rate, 1 by default.
        lr: f64 = 1.0,
        /// How much the running averages keep, 0.9 by default.
        rho: f64 = 0.9,
        /// What is added under the roots, 1e-6 by default.
        eps: f64 = 1e-6,
        /// The weight of the parameters' square in what is minimised, 0 by default.
        weight_decay: f64 = 0.0,
        /// Whether to climb instead of descend.
        maximize: bool = false,
    }
}

impl Rule for Settings {
    fn check(&self, loc: Loc) -> Result<()> {
        check_not_negative("Adadelta", [("lr", self.lr)], loc)?;
        check_number("Adadelta", "rho", "between 0 and 1", self.rho, (0.0..=1.0).contains(&self.rho), loc)?;
        check_not_negative("Adadelta", [("eps", self.eps), ("weight_decay", self.weight_decay)], loc)
    }

    fn states(&self) -> Vec<&'static str> {
        vec!["square_avg", "acc_delta"]
    }

    fn key(&self, _: u64) -> u64 {
        0
    }

    fn update(&self, _: Step, params: &TensorList, grads: TensorList, state: &[TensorList]) -> Result<()> {
        let Settings { lr, rho, eps, .. } = *self;
        let (square_avg, acc_delta) = (&state[0], &state[1]);
        let grads = directed(params, grads, self.maximize, self.weight_decay)?;
        foreach::mul_(square_avg, rho)?;
        foreach::addcmul_(square_avg, &grads, &grads, 1.0 - rho)?;
        let root = foreach::add(square_avg, eps)?;
        foreach::sqrt_(&root)?;
        let delta = foreach::add(acc_delta, eps)?;
        foreach::sqrt_(&delta)?;
        foreach::div_(&delta, &root)?;
        foreach::mul_(&delta, &grads)?;
        foreach::mul_(acc_delta, rho)?;
        foreach::addcmul_(acc_delta, &delta, &delta, 1.0 - rho)?;
        foreach::add_scaled_(params, &delta, -lr)
    }
}
