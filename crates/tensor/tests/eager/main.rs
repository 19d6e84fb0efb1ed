//! Eager tensors, theme by theme: one program, so that it is linked once and its tests share the cores.

mod autograd;
mod basics;
mod dtypes;
mod functions;
mod halves;
mod indexing;
mod kernels;
mod lists;
mod nn;
mod order;
mod reasons;
mod shaping;
mod views_in_place;
