//! Long training is the same compiled and eager: whole training loops, compared step by step.

#![allow(clippy::unwrap_used)] // a test may panic

mod compare;
mod counts;
mod loops;
mod mlp;
mod networks;
mod precision;
mod sequences;
