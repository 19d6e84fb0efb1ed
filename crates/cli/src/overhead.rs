//! The host's share: what one op costs in a compiled call, and whether a call asks for memory.

use std::cell::RefCell;
use std::fmt;

use kiln::Result;
use kiln::benchmark::compare;
use kiln::prelude::*;
use serde::Serialize;

use crate::cases::{Case, OVERHEAD_OPS};
use crate::failure::Failure;
use crate::output::{count, time};
use crate::progress::Progress;
use crate::{How, allocations};

/// Seconds per op, and allocations per call.
pub struct Overhead {
    per_op: f64,
    eager_per_op: f64,
    allocations: usize,
}

/// As one line of JSON.
#[derive(Serialize)]
pub struct Line<'a> {
    case: String,
    device: &'a str,
    mode: String,
    ns_per_op: f64,
    eager_ns_per_op: f64,
    allocations_per_call: usize,
}

/// Times a function of many ops on tensors of one element.
pub fn measure(how: &How, progress: &Progress) -> Result<Overhead, Failure> {
    progress.says("overhead: compiling");
    let workload = Case::Overhead.build(&how.device.find()?)?;
    let region = how.compile()?.region();
    let call = || region.run(|| workload.step());
    for _ in 0..10 {
        call()?;
    }
    let (result, allocations) = allocations::during(|| call().map(drop));
    result?;

    progress.says("overhead: timing");
    let failed: RefCell<Option<kiln::Error>> = RefCell::new(None);
    let note = |result: Result<Option<Tensor>>| {
        if let Err(error) = result {
            failed.borrow_mut().get_or_insert(error);
        }
    };
    let (mut compiled, mut eager) = (|| note(call()), || note(workload.step()));
    let mut contestants: [(&str, &mut dyn FnMut()); 2] = [("compiled", &mut compiled), ("eager", &mut eager)];
    let measured = progress.quietly(|| compare(&mut contestants, how.rounds()));
    if let Some(error) = failed.take() {
        return Err(error.into());
    }
    let per_op = |index: usize| measured[index].median() / OVERHEAD_OPS as f64;
    Ok(Overhead { per_op: per_op(0), eager_per_op: per_op(1), allocations })
}

impl Overhead {
    /// For `--json`.
    pub fn line(&self, how: &How) -> Line<'static> {
        Line {
            case: Case::Overhead.to_string(),
            device: how.device.name(),
            mode: how.mode.to_string(),
            ns_per_op: self.per_op * 1e9,
            eager_ns_per_op: self.eager_per_op * 1e9,
            allocations_per_call: self.allocations,
        }
    }
}

impl fmt::Display for Overhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (compiled, eager) = (time(self.per_op), time(self.eager_per_op));
        let allocations = count(self.allocations, "allocation");
        writeln!(
            f,
            "overhead: {compiled} an op compiled, {eager} eager; {allocations} in a call of {OVERHEAD_OPS} ops"
        )
    }
}
