//! One definition of the mathematics.
//!
//! Each scalar function is written once, generic over [`Lane`]: a context of exact IEEE and integer
//! operations with explicit fma. [`ScalarF32`] and [`ScalarF64`] perform the operations (eager kernels
//! are loops over them that the compiler vectorises); [`c::CText`] writes them down as C. So eager and
//! compiled results agree bit for bit, and the accuracy is proved once.
//!
//! ```
//! use kiln_ir::math::{c, Function, Width};
//! assert_eq!(Function::Exp.eval_f32(&[0.0]), 1.0);
//! assert!(c::function(Function::Exp, Width::F32).contains("kiln_exp_f32(f32v x)"));
//! ```

mod activation;
mod arcs;
pub mod c;
mod composite;
mod error_function;
mod exponential;
mod function;
mod gamma;
mod hyperbolic;
mod lane;
mod logarithm;
mod power;
mod scalar;
mod trigonometric;

#[cfg(test)]
mod accuracy;
#[cfg(test)]
mod special;
#[cfg(test)]
mod sweep;

pub use function::{Function, cost};
pub use lane::{InDouble, Lane, Libm, Rare, Table, Whole, Width};
pub use scalar::{QuickF32, QuickF64, ScalarF32, ScalarF64};
