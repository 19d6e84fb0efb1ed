//! Eager CPU kernels on raw strided operands. They know nothing of tensors.
//!
//! | module        | what it computes                                                         |
//! |---------------|--------------------------------------------------------------------------|
//! | [`pointwise`] | scalar functions, comparisons, logic, `where`                            |
//! | [`divide`]    | divisions of integers                                                    |
//! | [`blocks`]    | several scalar functions one after the other, block by block               |
//! | [`formula`]   | several of all of these, on values that stay in the cache                   |
//! | [`convert`]   | copies, transposes and casts; `fill`, `arange`                           |
//! | [`copy`]      | copies between layouts                                                   |
//! | [`reduce`]    | sums and maxima over any set of dims                                     |
//! | [`slices`]    | slices at the places of an index, elements where a mask holds            |
//! | [`softmax`]   | softmax and log_softmax along a dim                                      |
//! | [`order`]     | positions of extrema, medians, sorting orders along a dim                |
//! | [`scan`]      | sums, products up to each element along a dim                            |
//! | [`pad`]       | numbers or repeated elements around an array                             |
//! | [`picks`]     | elements at the indices of a tensor along a dim                            |
//! | [`places`]    | elements at several index tensors                                        |
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
mod copy;
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
pub mod pad;
pub mod picks;
pub mod places;
pub mod pointwise;
pub mod product;
pub mod recurrent;
pub mod reduce;
mod reducers;
pub mod resample;
pub mod scan;
pub mod slices;
pub mod softmax;
mod sort;
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
pub use order::{Lines, Position, distinct, positions};
pub use pad::{Filling, pad};
pub use picks::{Picks, outside};
pub use places::{Offsets, Places, transfer};
pub use pointwise::{Bits, Comparison, Logical, bits, compare, logical, pointwise, pointwise_rows, select};
pub use product::bmm;
pub use reduce::{Reduction, reduce};
pub use scan::{Scan, scan};
pub use slices::{Slices, collect, count, spread};
pub use softmax::softmax;
