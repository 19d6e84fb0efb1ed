//! `compile()`: the program is re-run on every call, and checked.
//!
//! Rust has no frame hook and no way to look into a closure, so Kiln does not guess what a closure depends
//! on: the closure runs on every call, on lazy tensors; each op is checked against what was recorded before,
//! and where a value is needed (or at the end) the compiled segment runs. Host code is never skipped, so
//! nothing about it can go stale.
//!
//! | module        | what it is                                                             |
//! |---------------|------------------------------------------------------------------------|
//! | `options`     | what `compile()` can be told; `settings`: inductor's named options     |
//! | `backend`     | who runs captured graphs: Kiln's backends and users' own               |
//! | `stance`      | what compiled functions do for now; `counters`: what they did          |
//! | `compile`     | functions of up to four arguments                                      |
//! | `region`      | the primitive behind every form of `compile()`                         |
//! | `run`         | one call: takes ops and runs segments where values are needed          |
//! | `state`       | where a call is in the trie and how it goes on from op to op           |
//! | `record`      | what happens only where no call went before                            |
//! | `trie`        | everything the program ever did, as paths                              |
//! | `analysis`    | what recording must know and replay needn't: aliases, the tape         |
//! | `pipeline`    | the whole compiler as one list of stages; `compiling` goes through it  |
//! | `leaving`     | what leaves a compiled function with gradients                         |
//! | `why`         | why a graph runs op by op; `difference`: why a function is recompiled  |
//! | `sizes`       | which recordings differ in sizes alone; `general`: one graph for all   |
//! | `loops`       | which recordings differ in how often something repeats                 |
//! | `kernels`     | a plan's kernels compiled, loaded and bound                            |
//! | `device`      | devices other than the CPU, and their eager ops                        |
//! | `scans`       | loops whose body is recorded once                                       |
//! | `autotune`    | the fastest of several forms of each kernel, by measuring              |
//! | `segment`     | a compiled piece of program and its backward                           |
//! | `interpret`   | the same piece run op by op                                            |
//! | `progress`    | progress reports of long work                                          |
//! | `explain`     | what happened, as data; `report`: as text                              |

mod analysis;
mod autotune;
mod backend;
mod bisect;
mod caller;
mod compile;
mod compiling;
mod counters;
mod device;
mod difference;
mod event;
mod explain;
mod general;
mod gradients;
mod graph_cache;
mod guard;
mod interpret;
mod kernels;
mod leaving;
mod logs;
mod loops;
mod options;
mod pipeline;
mod progress;
mod record;
mod region;
mod report;
mod run;
mod rung;
mod scans;
mod segment;
mod settings;
mod sizes;
mod stance;
mod state;
mod steps;
mod trie;
mod verify;
mod why;

pub use backend::{
    Backend, ChosenBackend, CompiledGraph, CustomBackend, GraphContext, GraphKind, Level, OutputRole,
    list_backends, register_backend,
};
pub use bisect::{Failure, Found, bisect, investigate, reproduce, reproduce_apart};
pub use compile::{Call, Callable, Compilable, Compiled, compile};
pub use counters::{Counters, counters};
pub use device::register_device;
pub use difference::{Change, Difference, Forbidden, Recompile};
pub use explain::{Break, Explanation, GraphInfo, GuardInfo, SizesInfo, StepInfo, explain};
pub use kiln_plan::Refusal;
pub use kiln_tensor::graph::{GraphValue, run_graph, run_graph_with, run_node};
pub use options::{Compile, Mode, OptimizationLevel};
pub use progress::{Progress, on_progress};
pub use region::Region;
pub use rung::Rung;
pub use scans::{Scan, Tree, scan, while_loop};
pub use settings::{Numerics, OptLevel, OptionInfo, Settings, list_options};
pub use stance::{Stance, StanceGuard, is_compiling, set_process_stance, set_stance, stance};
pub use verify::Every;
pub use why::{NotCompiled, Reason};

/// Starts over: drops the recordings of every compiled function in this process, forgets the kernels it has
/// loaded (the disk cache is left alone) and resets the counters. The functions stay usable and are compiled
/// again when they are called; calls in progress finish with what they have.
pub fn reset() {
    region::reset_all();
    kernels::forget();
    counters::reset();
}
