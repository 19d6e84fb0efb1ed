//! What a graph is brought to before it is lowered: lists whose tensors don't lie alike are taken apart, what goes into
//! windows and where an index says is set apart or goes straight into an input, products read halves as they are.

pub(crate) mod elements;
pub(crate) mod halves;
pub(crate) mod lists;
pub(crate) mod scatters;
pub(crate) mod windows;
