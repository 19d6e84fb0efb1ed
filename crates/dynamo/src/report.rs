//! An explanation as text: short by default, everything with `{:#}`.

use std::fmt;

use kiln_inductor::Lowered;
use kiln_ir::Op;
use kiln_ir::table::recurrent::Sequence;
use kiln_plan::{Bands, Refusal, Step};

use crate::explain::{Break, Explanation, GraphInfo, GuardInfo, SizesInfo, StepInfo};
use crate::segment::{Info, Text};

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

impl Break {
    /// What can be done about it, if there is something.
    pub fn advice(&self) -> Option<&'static str> {
        self.reason.advice()
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, what: &str) -> fmt::Result {
        write!(f, "{what} at {}", self.loc)?;
        if let Some(module) = &self.module {
            write!(f, " (after {module})")?;
        }
        writeln!(f, ": {}", self.reason)?;
        write_hint(f, self.advice())
    }
}

fn write_hint(f: &mut fmt::Formatter<'_>, advice: Option<&str>) -> fmt::Result {
    advice.map_or(Ok(()), |advice| writeln!(f, "  hint: {advice}"))
}

impl GuardInfo {
    /// What is checked besides the number and the name.
    fn words(&self) -> String {
        let mut text = format!("{}{}", self.dtype, self.shape);
        if self.strides != self.shape.contiguous_strides() {
            text += &format!(" with strides {:?}", self.strides.as_slice());
        }
        match (self.requires_grad, self.leaf) {
            (true, true) => text += ", a leaf that requires a gradient",
            (true, false) => text += ", with history from outside",
            (false, _) => {}
        }
        if let Some(other) = self.shares_with {
            text += &format!(", sharing memory with input {other}");
        }
        text
    }

    fn is_like(&self, other: &GuardInfo) -> bool {
        let same_memory = self.shares_with == other.shares_with;
        self.name.is_none() && other.name.is_none() && same_memory && self.words() == other.words()
    }
}

/// `input 0 (fc1.weight) is f32[8, 5], a leaf that requires a gradient`.
impl fmt::Display for GuardInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "input {}", self.input)?;
        if let Some(name) = &self.name {
            write!(f, " ({name})")?;
        }
        write!(f, " is {}", self.words())
    }
}

/// What a short text has at most of everything; the rest is counted.
mod most {
    pub(super) const GRAPHS: usize = 4;
    pub(super) const OPS: usize = 12;
    pub(super) const STEPS: usize = 3;
    /// Lines of the program in the text of a step.
    pub(super) const LINES: usize = 3;
    pub(super) const REASONS: usize = 3;
    pub(super) const EVENTS: usize = 4;
    pub(super) const RULES: usize = 6;
}

/// How many entries are shown.
fn shown(f: &fmt::Formatter<'_>, most: usize) -> usize {
    if f.alternate() { usize::MAX } else { most }
}

fn write_guards(f: &mut fmt::Formatter<'_>, guards: &[GuardInfo]) -> fmt::Result {
    for group in guards.chunk_by(GuardInfo::is_like) {
        match group {
            [only] => writeln!(f, "  guard: {only}")?,
            [first, .., last] => {
                writeln!(f, "  guard: inputs {} to {} are {}", first.input, last.input, first.words())?;
            }
            [] => {}
        }
    }
    Ok(())
}

/// `gemm (41.0 kB read, 16.4 kB written): mm at model.rs:18`.
impl fmt::Display for StepInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (read, written) = (bytes(self.bytes_read), bytes(self.bytes_written));
        write!(f, "{} ({read} read, {written} written", self.name)?;
        if let Some(joined) = &self.joined {
            write!(f, ", {joined}")?;
        }
        let lines = by_line(&self.ops);
        let shown = lines.split("; ").take(shown(f, most::LINES)).collect::<Vec<_>>().join("; ");
        write!(f, "): {shown}{}", if shown.len() < lines.len() { "; …" } else { "" })
    }
}

/// The heaviest steps, or all in their order.
fn write_steps(f: &mut fmt::Formatter<'_>, steps: &[StepInfo]) -> fmt::Result {
    if f.alternate() {
        return steps.iter().try_for_each(|step| writeln!(f, "    {step:#}"));
    }
    let mut heaviest: Vec<&StepInfo> = steps.iter().collect();
    heaviest.sort_by_key(|step| std::cmp::Reverse(step.bytes_read + step.bytes_written));
    for step in heaviest.iter().take(most::STEPS) {
        writeln!(f, "    {step}")?;
    }
    match steps.len().saturating_sub(most::STEPS) {
        0 => Ok(()),
        rest => {
            writeln!(
                f,
                "    and {} that move{} fewer bytes",
                plural(rest, "step"),
                if rest == 1 { "s" } else { "" }
            )
        }
    }
}

/// Refusals by their reason, those about most bytes first, or all of them.
fn write_refusals(f: &mut fmt::Formatter<'_>, refusals: &[Refusal]) -> fmt::Result {
    if f.alternate() {
        for refusal in refusals {
            let ops =
                if refusal.ops.is_empty() { String::new() } else { format!(" ({})", by_line(&refusal.ops)) };
            writeln!(f, "  not fused: {refusal}{ops}")?;
        }
        return Ok(());
    }
    struct Kind<'a> {
        count: usize,
        bytes: usize,
        largest: &'a Refusal,
    }
    let mut kinds: Vec<Kind<'_>> = Vec::new();
    for refusal in refusals {
        match kinds.iter_mut().find(|kind| kind.largest.reason == refusal.reason) {
            Some(kind) => {
                kind.count += 1;
                kind.bytes += refusal.bytes;
                if refusal.bytes > kind.largest.bytes {
                    kind.largest = refusal;
                }
            }
            None => kinds.push(Kind { count: 1, bytes: refusal.bytes, largest: refusal }),
        }
    }
    kinds.sort_by_key(|kind| std::cmp::Reverse(kind.bytes));
    for Kind { count, bytes: total, largest } in kinds.iter().take(most::REASONS) {
        let mut facts = Vec::new();
        if *count > 1 {
            facts.push(format!("{count} ×"));
        }
        if *total > 0 {
            facts.push(bytes(*total));
        }
        if !largest.ops.is_empty() {
            facts.push(format!("{}{}", if *count > 1 { "largest: " } else { "" }, by_line(&largest.ops)));
        }
        let facts = if facts.is_empty() { String::new() } else { format!(" ({})", facts.join(", ")) };
        writeln!(f, "  not fused: {}{facts}", largest.reason)?;
    }
    let rest: usize = kinds.iter().skip(most::REASONS).map(|kind| kind.count).sum();
    if rest == 0 { Ok(()) } else { writeln!(f, "  not fused: {rest} more, for other reasons") }
}

fn write_sizes(f: &mut fmt::Formatter<'_>, sizes: &SizesInfo) -> fmt::Result {
    if !sizes.symbols.is_empty() {
        let most = shown(f, most::RULES);
        let rest = sizes.rules.len().saturating_sub(most);
        let rules = sizes.symbols.iter().chain(sizes.rules.iter().take(most));
        let mut text: Vec<String> = rules.cloned().collect();
        if rest > 0 {
            text.push(format!("{} more", plural(rest, "rule")));
        }
        writeln!(f, "  sizes: {}", text.join(", "))?;
    }
    if !sizes.ranges.is_empty() {
        let made = plural(sizes.made, "size");
        writeln!(f, "  sizes: one plan each for {} ({made} so far)", sizes.ranges.join("; "))?;
    }
    sizes.refused.iter().try_for_each(|reason| writeln!(f, "  sizes: some are compiled separately: {reason}"))
}

fn write_graph(f: &mut fmt::Formatter<'_>, number: usize, graph: &GraphInfo) -> fmt::Result {
    let (ops, inputs) = (plural(graph.nodes, "op"), plural(graph.guards.len(), "guarded input"));
    if let (Some(first), None) = (graph.resizes, &graph.interpreted) {
        writeln!(f, "graph {number}: graph {first} for other sizes")?;
        if f.alternate() {
            write_guards(f, &graph.guards)?;
        }
        // What was made from a plan for many sizes has no report of its own.
        return if graph.steps.is_empty() {
            writeln!(f, "  {}, from the dynamic-shape plan", plural(graph.kernels, "kernel"))
        } else {
            write_kernels(f, graph)
        };
    }
    writeln!(f, "graph {number}: {ops}, {inputs}")?;
    let mut counts: Vec<String> = graph
        .ops
        .iter()
        .take(shown(f, most::OPS))
        .map(|(name, count)| match count {
            1 => name.to_string(),
            _ => format!("{name} × {count}"),
        })
        .collect();
    if counts.len() < graph.ops.len() {
        counts.push("…".into());
    }
    writeln!(f, "  ops: {}", counts.join(", "))?;
    if f.alternate() {
        write_guards(f, &graph.guards)?;
    }
    if let Some(sizes) = &graph.sizes {
        write_sizes(f, sizes)?;
    }
    if !graph.without_gradient.is_empty() {
        writeln!(f, "  without a gradient: {}", graph.without_gradient.join(", "))?;
    }
    if let Some(reason) = &graph.interpreted {
        writeln!(f, "  runs op by op: {reason}")?;
        return write_hint(f, reason.advice());
    }
    if graph.steps.is_empty() && graph.kernels == 0 {
        writeln!(f, "  runs as compiled by its backend")?;
    } else {
        write_kernels(f, graph)?;
    }
    if graph.has_backward {
        let (saved, recomputed) = (bytes(graph.bytes_saved), bytes(graph.bytes_recomputed));
        writeln!(f, "  backward compiled too: {saved} saved, {recomputed} recomputed")?;
    }
    write_steps(f, &graph.steps)?;
    let eager = some(f, graph.fallbacks.len(), "  runs eagerly inside", |f, i| {
        writeln!(f, "  runs eagerly inside: {}", graph.fallbacks[i])
    });
    eager?;
    write_refusals(f, &graph.why_not)?;
    some(f, graph.tuned.len(), "  tuned", |f, i| writeln!(f, "  tuned: {}", graph.tuned[i]))?;
    let times: Vec<String> = graph.times().iter().map(|(name, time)| format!("{name} {time:.1?}")).collect();
    writeln!(f, "  time: {}", times.join(", "))
}

/// So many entries as are shown, then how many more there are.
fn some(
    f: &mut fmt::Formatter<'_>,
    count: usize,
    what: &str,
    write: impl Fn(&mut fmt::Formatter<'_>, usize) -> fmt::Result,
) -> fmt::Result {
    let shown = shown(f, most::EVENTS).min(count);
    (0..shown).try_for_each(|i| write(f, i))?;
    if shown == count { Ok(()) } else { writeln!(f, "{what}: and {} more", count - shown) }
}

fn write_kernels(f: &mut fmt::Formatter<'_>, graph: &GraphInfo) -> fmt::Result {
    writeln!(
        f,
        "  {} ({} compiled now), {}, {} read, {} written, {} of temporary memory",
        plural(graph.kernels, "kernel"),
        graph.compiled_kernels,
        plural(graph.library_calls, "library call"),
        bytes(graph.bytes_read),
        bytes(graph.bytes_written),
        bytes(graph.arena_bytes)
    )
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {}, {}, {}, {}{} ({})",
            self.name,
            plural(self.calls, "call"),
            plural(self.graphs.len(), "graph"),
            plural(self.breaks.len(), "break"),
            plural(self.recompiles.len(), "recompile"),
            if self.sizes == 0 { String::new() } else { format!(", {} new sizes", self.sizes) },
            self.options
        )?;
        let graphs = shown(f, most::GRAPHS).min(self.graphs.len());
        for (i, graph) in self.graphs[..graphs].iter().enumerate() {
            write_graph(f, i, graph)?;
        }
        if graphs < self.graphs.len() {
            writeln!(f, "and {}", plural(self.graphs.len() - graphs, "more graph"))?;
        }
        some(f, self.breaks.len(), "break", |f, i| self.breaks[i].write(f, "break"))?;
        some(f, self.fallbacks.len(), "fell back to eager", |f, i| {
            self.fallbacks[i].write(f, "fell back to eager")
        })?;
        some(f, self.recompiles.len(), "recompiles", |f, i| {
            writeln!(f, "{}", self.recompiles[i])?;
            write_hint(f, self.recompiles[i].reason.advice())
        })?;
        if !self.unused.is_empty() {
            writeln!(f, "parameters never used: {}", self.unused.join(", "))?;
        }
        if self.given_up {
            writeln!(f, "runs eagerly from now on: too many recompilations")?;
        }
        if f.alternate() || self.graphs.is_empty() {
            Ok(())
        } else {
            writeln!(f, "{{:#}} prints every guard, step and refusal")
        }
    }
}

impl Info {
    /// Takes in what a plan does; `refused` are the kernels that it does without, and why.
    pub(crate) fn describe(&mut self, lowered: &Lowered, refused: &[(String, String)], keep_text: bool) {
        let Lowered { plan, code } = lowered;
        if keep_text {
            for (number, (kernel, source)) in plan.kernels.iter().zip(code).enumerate() {
                self.texts.push(("loops", Text::Source(kernel.to_string())));
                self.texts.push(("code", Text::Source(source.told(plan.ops_of(number)))));
            }
        }
        let info = &mut self.graph;
        info.arena_bytes += plan.arena_bytes;
        info.refused.extend(refused.iter().map(|(name, reason)| format!("{name}: {reason}")));
        for (index, (step, report)) in plan.steps.iter().zip(&plan.report.steps).enumerate() {
            match step {
                Step::Launch(_) => info.kernels += 1,
                Step::Call(call) => match call.op {
                    Op::Mm {}
                    | Op::Bmm {}
                    | Op::Convolution { .. }
                    | Op::Rand { .. }
                    | Op::Randn { .. }
                    | Op::Clone {} => {
                        info.library_calls += 1;
                    }
                    _ if Sequence::is_recurrent(&call.op) => info.library_calls += 1,
                    _ => info.fallbacks.push(format!("{} at {}", call.op.name(), call.loc)),
                },
                Step::OneByOne(_) => {
                    let reason = refused.first().map_or("", |(_, reason)| reason);
                    let reason = reason.lines().next().unwrap_or_default();
                    info.fallbacks.push(format!("{}: {reason}", by_line(&report.ops)));
                }
            }
            info.bytes_read += report.bytes_read;
            info.bytes_written += report.bytes_written;
            let follows = |bands: &&Bands| (bands.first + 1..bands.first + bands.steps).contains(&index);
            let is_epilogue = index > 0 && plan.steps[index - 1].has_epilogue();
            let joined = match plan.bands.iter().find(follows) {
                Some(bands) => Some(format!("in bands of {} rows with the previous step", bands.rows)),
                None => is_epilogue.then(|| "with the previous step".into()),
            };
            info.steps.push(StepInfo {
                name: report.name.clone(),
                ops: report.ops.clone(),
                bytes_read: report.bytes_read,
                bytes_written: report.bytes_written,
                joined,
            });
        }
        info.why_not.extend(plan.report.why_not.iter().cloned());
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
