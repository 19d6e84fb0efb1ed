//! Plans: what they compute, by definition and compiled, and what they look like. One program, so that it is linked once and
//! its tests share the cores.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, reason = "a test")]

mod attention;
mod dtypes;
mod epilogues;
mod execute;
mod folds;
mod golden;
mod in_place;
mod layouts;
mod machines;
mod mutations;
mod random;
mod scans;
mod scatters;
mod support;
mod unroll;
