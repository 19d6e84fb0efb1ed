//! What compiled graphs compute, theme by theme: one program, so that it is linked once and its tests share the cores.

mod capture;
mod division;
mod indexing;
mod lists;
mod networks;
mod parts;
mod pooling;
mod scatters;
