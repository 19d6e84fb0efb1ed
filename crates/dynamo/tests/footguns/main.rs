//! The ways in which compiled programs go silently wrong, one test each. A scenario runs eagerly and then in
//! a region of every backend; whatever it notes on the way (values, errors, flags) must be the same.

#![allow(clippy::unwrap_used)] // a test may panic

mod errors;
mod frozen;
mod functions;
mod general;
mod gradients;
mod gradients_in_place;
mod grads;
mod hooks;
mod lab;
mod leaves;
mod leaving;
mod many_sizes;
mod memory;
mod sizes;
mod threads;
mod views;
