//! Scans and loops with a bound, eagerly and compiled.

mod errors;
mod gradients;
mod values;
