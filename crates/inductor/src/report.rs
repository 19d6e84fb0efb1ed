//! The report of a lowering: what was fused, what was not and why, and the bytes every step moves.

use std::fmt;

use crate::Refusal;

/// One step, for people.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StepReport {
    /// Kernel name or library call.
    pub name: String,
    /// Ops with the user's lines.
    pub ops: Vec<String>,
    /// Bytes read from memory (each buffer once).
    pub bytes_read: usize,
    /// Bytes written.
    pub bytes_written: usize,
}

/// What was decided.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// One entry per step of the plan.
    pub steps: Vec<StepReport>,
    /// Refused fusions.
    pub why_not: Vec<Refusal>,
}

impl Report {
    /// Bytes moved by all steps.
    pub fn bytes(&self) -> usize {
        self.steps.iter().map(|s| s.bytes_read + s.bytes_written).sum()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.steps {
            writeln!(f, "{}: reads {}, writes {} bytes", step.name, step.bytes_read, step.bytes_written)?;
            for op in &step.ops {
                writeln!(f, "    {op}")?;
            }
        }
        for why in &self.why_not {
            writeln!(f, "not fused: {why}")?;
        }
        Ok(())
    }
}
