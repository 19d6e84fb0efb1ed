//! Sweeps made from the op table: every row, on all its samples, dtypes, layouts, magnitudes and edge values, out of
//! place and in place, compiled and eagerly, forwards and backwards.
//!
//! What takes long is sampled; `KILN_WHOLE=1` (`cargo xtask test --whole`) runs all of it.

#![allow(clippy::unwrap_used)] // a test may panic

mod cases;
mod devices;
mod in_place;
mod magnitudes;
mod numerics;
mod rows;
mod second;
mod simulated;
