//! What happened to a compiled function, as data and as text.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kiln_ir::Loc;

use crate::options::Compile;
use crate::segment::{Plan, Segment};

/// A line at which a graph ends or is not compiled, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Break {
    /// The user's line.
    pub loc: Loc,
    /// Why.
    pub reason: String,
}

/// A recording that went another way than before.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recompile {
    /// `recompile #1 at model.rs:42: input 0 was [32], now [48]`.
    pub reason: String,
}

/// One captured graph.
#[derive(Clone, Debug)]
pub struct GraphInfo {
    /// Ops recorded.
    pub nodes: usize,
    /// Inputs checked on every call.
    pub guards: usize,
    /// Kernel launches per call.
    pub kernels: usize,
    /// Kernels that had to be compiled (the others came from a cache).
    pub compiled_kernels: usize,
    /// Library calls per call (matrix products, random numbers, copies).
    pub library_calls: usize,
    /// Ops that run as eager calls inside the program.
    pub fallbacks: Vec<String>,
    /// Bytes its kernels read per call.
    pub bytes_read: usize,
    /// Bytes its kernels write per call.
    pub bytes_written: usize,
    /// Bytes of temporary memory.
    pub arena_bytes: usize,
    /// Bytes kept for a later backward.
    pub bytes_saved: usize,
    /// Bytes computed again in backward instead of being kept.
    pub bytes_recomputed: usize,
    /// Whether a compiled backward belongs to it.
    pub has_backward: bool,
    /// Why it is run op by op, if it is.
    pub interpreted: Option<String>,
    /// The steps, with the ops they implement.
    pub steps: Vec<String>,
    /// Fusions that were refused, and why.
    pub why_not: Vec<String>,
    /// Time per stage.
    pub stages: Vec<(&'static str, Duration)>,
    /// The text at each stage: graph, joint, prims, loops, code.
    pub texts: Vec<(&'static str, String)>,
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub struct Explanation {
    /// The function's name.
    pub name: String,
    /// Mode and backend.
    pub options: String,
    /// Calls so far.
    pub calls: usize,
    /// Captured graphs.
    pub graphs: Vec<GraphInfo>,
    /// Graph breaks.
    pub breaks: Vec<Break>,
    /// Calls that went on eagerly.
    pub fallbacks: Vec<Break>,
    /// Recompilations.
    pub recompiles: Vec<Recompile>,
}

impl Explanation {
    pub(crate) fn new(
        name: &str,
        options: &Compile,
        calls: usize,
        segments: &[Arc<Segment>],
        breaks: Vec<Break>,
        fallbacks: Vec<Break>,
        recompiles: Vec<Recompile>,
    ) -> Explanation {
        let graphs = segments.iter().map(|segment| {
            let info = segment.info.clone();
            let (interpreted, has_backward) = match &segment.plan {
                Plan::Interpreted(reason) => (Some(reason.clone()), false),
                Plan::Compiled { backward, .. } => (None, backward.is_some()),
            };
            GraphInfo {
                nodes: info.nodes,
                guards: info.guards,
                kernels: info.kernels,
                compiled_kernels: info.compiled_kernels,
                library_calls: info.library_calls,
                fallbacks: info.fallbacks,
                bytes_read: info.bytes_read,
                bytes_written: info.bytes_written,
                arena_bytes: info.arena_bytes,
                bytes_saved: info.bytes_saved,
                bytes_recomputed: info.bytes_recomputed,
                has_backward,
                interpreted,
                steps: info.steps,
                why_not: info.why_not,
                stages: info.stages,
                texts: info.texts.iter().map(|(stage, text)| (*stage, text.to_string())).collect(),
            }
        });
        Explanation {
            name: name.to_string(),
            options: format!("mode {}, backend {}", options.mode, options.backend),
            calls,
            graphs: graphs.collect(),
            breaks,
            fallbacks,
            recompiles,
        }
    }

    /// Kernel launches per call, over all graphs.
    pub fn kernels(&self) -> usize {
        self.graphs.iter().map(|g| g.kernels).sum()
    }
}

fn plural(count: usize, word: &str) -> String {
    format!("{count} {word}{}", if count == 1 { "" } else { "s" })
}

/// Ops of one line after each other name it once: `sub, mul at step.rs:7; sqrt at step.rs:8`.
pub(crate) fn by_line(ops: &[String]) -> String {
    let line = |op: &String| op.split_once(" at ").map(|(_, line)| line.to_string());
    let groups = ops.chunk_by(|a, b| line(a).is_some() && line(a) == line(b));
    let text = |group: &[String]| {
        let names: Vec<&str> = group.iter().map(|op| op.split(" at ").next().unwrap_or(op)).collect();
        match group.first().and_then(line) {
            Some(line) => format!("{} at {line}", names.join(", ")),
            None => names.join(", "),
        }
    };
    groups.map(text).collect::<Vec<_>>().join("; ")
}

pub(crate) fn bytes(count: usize) -> String {
    match count {
        0..10_000 => format!("{count} B"),
        10_000..10_000_000 => format!("{:.1} kB", count as f64 / 1e3),
        _ => format!("{:.1} MB", count as f64 / 1e6),
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {}, {}, {}, {} ({})",
            self.name,
            plural(self.calls, "call"),
            plural(self.graphs.len(), "graph"),
            plural(self.breaks.len(), "break"),
            plural(self.recompiles.len(), "recompile"),
            self.options
        )?;
        for (i, graph) in self.graphs.iter().enumerate() {
            writeln!(
                f,
                "graph {i}: {}, {}",
                plural(graph.nodes, "op"),
                plural(graph.guards, "guarded input")
            )?;
            if let Some(reason) = &graph.interpreted {
                writeln!(f, "  runs op by op: {reason}")?;
                continue;
            }
            writeln!(
                f,
                "  {} ({} compiled now), {}, {} read, {} written, {} of temporary memory",
                plural(graph.kernels, "kernel"),
                graph.compiled_kernels,
                plural(graph.library_calls, "library call"),
                bytes(graph.bytes_read),
                bytes(graph.bytes_written),
                bytes(graph.arena_bytes)
            )?;
            if graph.has_backward {
                writeln!(
                    f,
                    "  backward compiled too: {} saved, {} recomputed",
                    bytes(graph.bytes_saved),
                    bytes(graph.bytes_recomputed)
                )?;
            }
            for step in &graph.steps {
                writeln!(f, "    {step}")?;
            }
            for op in &graph.fallbacks {
                writeln!(f, "  runs eagerly inside: {op}")?;
            }
            for why in &graph.why_not {
                writeln!(f, "  not fused: {why}")?;
            }
            let stages: Vec<String> =
                graph.stages.iter().map(|(name, time)| format!("{name} {time:.1?}")).collect();
            writeln!(f, "  time: {}", stages.join(", "))?;
        }
        for at in &self.breaks {
            writeln!(f, "break at {}: {}", at.loc, at.reason)?;
        }
        for at in &self.fallbacks {
            writeln!(f, "went on eagerly at {}: {}", at.loc, at.reason)?;
        }
        for recompile in &self.recompiles {
            writeln!(f, "{}", recompile.reason)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_named_once() {
        let ops = ["sub at a.rs:1", "mul at a.rs:1", "sqrt at b.rs:2", "neg", "abs"].map(String::from);
        assert_eq!(by_line(&ops), "sub, mul at a.rs:1; sqrt at b.rs:2; neg; abs");
        assert_eq!(by_line(&[]), "");
    }
}
