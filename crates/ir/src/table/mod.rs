//! THE OP TABLE: one row per operator, the single place that says what it is.
//!
//! A row reads
//!
//! ```text
//! /// What it computes.
//! [class method in-place-method] "name" Variant (operands) (optional operands) { attributes }
//!     { ty: type rule, grad: gradient, … };
//! ```
//!
//! Names and semantics are PyTorch's. Everything else is derived from these rows: the [`Op`](crate::Op) enum,
//! printer and parser, the emitter's builder methods, the methods of `Tensor`, `docs/ops.md` and the sweep
//! tests. Operands are tensors or numbers known at run time; attributes are what shapes the code. Every
//! pointwise row also exists over lists of tensors, under the name `foreach_…`.
//!
//! `op_table!(callback)` hands all rows to a macro named `callback`. The rows live in one file per theme, each
//! a macro that adds its rows to those before it and passes them on; a theme's file also holds the rules that
//! only its rows use. What many rows share is in `types`, `gradient`, `decompose` and `samples`.

pub(crate) mod activations;
mod arithmetic;
pub(crate) mod choices;
pub(crate) mod contractions;
pub(crate) mod convolution;
mod creation;
pub(crate) mod functions;
pub(crate) mod indexing;
mod lists;
pub(crate) mod nn;
pub(crate) mod norms;
pub(crate) mod order;
pub(crate) mod padding;
pub(crate) mod products;
pub mod recurrent;
pub(crate) mod reductions;
pub mod resample;
pub(crate) mod rounding;
pub(crate) mod scatter;
pub(crate) mod shapes;

/// Hands every row of the op table to the macro `$callback`. See the [module](crate::table) for the grammar.
#[macro_export]
macro_rules! op_table {
    ($callback:ident) => {
        $crate::rows_arithmetic! { $callback [] }
    };
}
