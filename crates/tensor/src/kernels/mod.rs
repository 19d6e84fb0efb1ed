//! Eager CPU kernels on raw strided operands. They know nothing of tensors.
//!
//! | module        | what it computes                                                         |
//! |---------------|--------------------------------------------------------------------------|
//! | [`pointwise`] | scalar functions, comparisons, logic, `where`                            |
//! | [`divide`]    | divisions of integers                                                    |
//! | [`blocks`]    | several scalar functions one after the other, block by block               |
//! | [`formula`]   | several of all of these, on values that stay in the cache                   |
//! | [`convert`]   | copies, transposes and casts; `fill`, `arange`                           |
//! | [`reduce`]    | sums and maxima over any set of dims                                     |
//! | [`softmax`]   | softmax and log_softmax along a dim                                      |
//! | [`order`]     | positions of extrema, sorting orders and scans along a dim                |
//! | [`picks`]     | elements at the indices of a tensor along a dim                            |
//! | [`nll`]       | the gather of nll_loss                                                   |
//! | [`product`]   | matrix products in batches                                               |
//! | [`norm`]      | normalisation over groups, forward and backward                          |
//! | [`recurrent`] | recurrent layers over whole sequences, and their slopes                  |
//! | [`resample`]  | pooling and resizing of planes                                           |
//!
//! An [`Operand`] is a pointer with dtype, sizes and strides. Every kernel is `unsafe` for the same
//! reason, stated once in [`Operand`]; each says in addition how operands may overlap.
//!
//! Large work is split over the threads of `kiln_runtime`; results never depend on how many there are.

mod blocks;
mod channels;
pub mod convert;
mod divide;
mod drive;
mod element;
pub mod formula;
mod isa;
mod narrow;
pub mod nll;
pub mod norm;
mod operand;
pub mod order;
pub mod picks;
pub mod pointwise;
pub mod product;
pub mod recurrent;
pub mod reduce;
pub mod resample;
pub mod softmax;
mod strided;
#[cfg(test)]
mod tests;
mod tiles;

pub use blocks::{Step, pointwise_blocks};
pub use convert::{arange, convert, fill};
pub use divide::divide;
pub use drive::{Dense, MAX_INPUTS, Row};
pub use nll::nll_forward;
pub use operand::Operand;
pub(crate) use operand::Shared;
pub use order::{Lines, Position, Scan, positions, scan};
pub use picks::{Picks, outside};
pub use pointwise::{Bits, Comparison, Logical, bits, compare, logical, pointwise, pointwise_rows, select};
pub use product::bmm;
pub use reduce::{Reduction, reduce};
pub use softmax::softmax;
