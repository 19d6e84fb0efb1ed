//! Adagrad.

use kiln_ir::Loc;
use kiln_tensor::{Result, Tensor, TensorList, foreach};

use super::define::{check_not_negative, optimizer, settings};
use super::group::{Groups, ParamGroup, Rule, Step, directed};

settings! {
    /// Adagrad: steps divided by the root of the sum of all squared gradients.
    Adagrad, AdagradOptions, "Adagrad", {
        /// The learning rate, 0.01 by default.
        lr: f64 = 1e-2,
        /// How much the learning rate shrinks: lr / (1 + (step − 1) · lr_decay). 0 by default.
        lr_decay: f64 = 0.0,
        /// The weight of the parameters' square in what is minimised, 0 by default.
        weight_decay: f64 = 0.0,
        /// What the sums start as, 0 by default.
        initial_accumulator_value: f64 = 0.0,
        /// What is added to the divisor, 1e-10 by default.
        eps: f64 = 1e-10,
        /// Whether to climb instead of descend.
        maximize: bool = false,
    }
}

impl Rule for Settings {
    fn check(&self, loc: Loc) -> Result<()> {
        let numbers = [
            ("lr", self.lr),
            ("lr_decay", self.lr_decay),
            ("weight_decay", self.weight_decay),
            ("initial_accumulator_value", self.initial_accumulator_value),
            ("eps", self.eps),
        ];
        check_not_negative("Adagrad", numbers, loc)
    }

    fn states(&self) -> Vec<&'static str> {
        vec!["sum"]
    }

    fn start(&self) -> f64 {
        self.initial_accumulator_value
    }

    /// Only a learning rate that shrinks depends on the number of updates.
    fn key(&self, steps: u64) -> u64 {
        if self.lr_decay == 0.0 { 0 } else { steps }
    }

    fn update(&self, at: Step, params: &TensorList, grads: TensorList, state: &[TensorList]) -> Result<()> {
        let grads = directed(params, grads, self.maximize, self.weight_decay)?;
        let lr = self.lr / (1.0 + (at.number - 1) as f64 * self.lr_decay);
        foreach::addcmul_(&state[0], &grads, &grads, 1.0)?;
        let divisor = foreach::sqrt(&state[0])?;
        foreach::add_(&divisor, self.eps)?;
        foreach::addcdiv_(params, &grads, &divisor, -lr)
    }
}
