//! The report of a lowering: what was fused, what was not and why, and the bytes every step moves.

use std::fmt;

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

/// A refused fusion, as it is told.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Refusal {
    /// What refusals of this kind have in common: `kernels iterate different spaces`.
    pub reason: String,
    /// This one, by the names of the graph: `%26 and %35 iterate different spaces`.
    pub text: String,
    /// What it is about, with the user's lines: `sum at model.rs:12`.
    pub ops: Vec<String>,
    /// Bytes of the values it is about.
    pub bytes: usize,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
