//! `compile()`: the program is re-run on every call, and checked.
//!
//! Rust has no frame hook and a closure can't be looked into, so Kiln does not guess what a closure depends
//! on: the closure runs on every call, on lazy tensors; each op is checked against what was recorded before,
//! and where a value is needed (or at the end) the compiled segment runs. Host code is never skipped, so
//! nothing about it can go stale.
//!
//! | module        | what it is                                                             |
//! |---------------|------------------------------------------------------------------------|
//! | `region`      | the primitive behind every form of `compile()`                         |
//! | `run`         | one call: takes ops and runs segments where values are needed          |
//! | `state`       | where a call is in the trie and how it goes on from op to op           |
//! | `record`      | what happens only where no call went before                            |
//! | `trie`        | everything the program ever did, as paths                              |
//! | `analysis`    | what recording must know and replay needn't: aliases, the tape         |
//! | `pipeline`    | the whole compiler as one list of stages                               |
//! | `segment`     | a compiled piece of program and its backward                           |
//! | `interpret`   | the same piece run op by op                                            |
//! | `explain`     | what happened, as data and text                                        |

mod analysis;
mod compile;
mod explain;
mod interpret;
mod logs;
mod options;
mod pipeline;
mod record;
mod region;
mod run;
mod segment;
mod state;
mod trie;

pub use compile::{Compilable, Compiled, compile};
pub use explain::{Break, Explanation, GraphInfo, Recompile};
pub use options::{Backend, Compile, Mode};
pub use region::Region;

/// Forgets the kernels that this process has loaded, so that the next compilation starts cold (the disk cache
/// is left alone). Compiled functions keep theirs.
pub fn reset() {
    pipeline::forget_kernels();
}
