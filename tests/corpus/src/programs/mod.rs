//! The programs, a file for each theme. Each is what a user would write: a model, data, and a step that is called
//! again and again.

mod adversarial;
mod autograd;
mod control;
mod detection;
mod generation;
mod language;
mod meta;
mod metric;
mod optimizers;
mod recurrent;
mod regularisation;
mod reinforcement;
mod routing;
mod scientific;
mod simulation;
mod training;
mod vision;

use kiln::prelude::*;
use kiln::{Error, Result};

use crate::{Record, Step};

/// A program of the corpus.
#[derive(Copy, Clone)]
pub struct Program {
    /// Its name: that of the function.
    pub name: &'static str,
    /// The file it is in, without the ending.
    pub theme: &'static str,
    /// Runs it, with its step called through the argument, and gives back what it computed.
    pub body: fn(&Step) -> Result<Record>,
}

/// The table of a theme's programs.
macro_rules! programs {
    ($theme:literal: $($name:ident),* $(,)?) => {
        /// The programs of this theme.
        pub(super) const PROGRAMS: &[$crate::Program] =
            &[$($crate::Program { name: stringify!($name), theme: $theme, body: $name }),*];
    };
}
use programs;

/// Every program, theme by theme.
pub fn all() -> Vec<Program> {
    let themes = [
        training::PROGRAMS,
        optimizers::PROGRAMS,
        regularisation::PROGRAMS,
        vision::PROGRAMS,
        language::PROGRAMS,
        recurrent::PROGRAMS,
        generation::PROGRAMS,
        adversarial::PROGRAMS,
        autograd::PROGRAMS,
        meta::PROGRAMS,
        metric::PROGRAMS,
        detection::PROGRAMS,
        routing::PROGRAMS,
        reinforcement::PROGRAMS,
        scientific::PROGRAMS,
        simulation::PROGRAMS,
        control::PROGRAMS,
    ];
    themes.concat()
}

const CPU: Device = Device::Cpu;

/// A weight to be trained, of normally distributed numbers.
fn weight(shape: impl Into<Shape>, scale: f64) -> Result<Tensor> {
    let weight = Tensor::randn(shape, &CPU)?.mul(scale)?;
    weight.requires_grad_(true)?;
    Ok(weight)
}

/// A weight to be trained that begins with one number everywhere.
fn constant(shape: impl Into<Shape>, value: f64) -> Result<Tensor> {
    let weight = Tensor::full(shape, value, &CPU)?;
    weight.requires_grad_(true)?;
    Ok(weight)
}

/// The gradient that `backward` left.
fn gradient(parameter: &Tensor) -> Result<Tensor> {
    parameter.grad().ok_or_else(|| Error::State("backward reached no gradient of this parameter".into()))
}

/// A small classifier.
fn classifier(inputs: usize, hidden: usize, classes: usize) -> Result<nn::Sequential> {
    Ok(nn::seq![nn::Linear::new(inputs, hidden)?, nn::Tanh, nn::Linear::new(hidden, classes)?])
}

/// Points and the class of each.
fn samples(count: usize, inputs: usize, classes: i64) -> Result<(Tensor, Tensor)> {
    Ok((Tensor::randn([count, inputs], &CPU)?, Tensor::randint(0, classes, [count], &CPU)?))
}
