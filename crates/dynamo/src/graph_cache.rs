//! The graph cache: what the passes made of a graph, kept beside the kernels for the next process, which then goes
//! from the captured graph straight to its kernels.
//!
//! A plan is found by everything it was made from: the functional graph with the user's lines (they are in its
//! report), how the inputs lie, which gradients leave, the options, the target with its machine, and the very
//! sources of the compiler. Modes that measure keep their own remarks and don't come here. What is found is
//! [checked](Entry::check) before it is run.

use kiln_aot::{BackwardPart, Report, SavedFrom};
use kiln_inductor::{C, Options};
use kiln_ir::{Def, Graph, Loc, Stage, TensorTy};
use kiln_plan::codec::{Code as _, Reader, Writer};
use kiln_plan::{Given, Plan, Surroundings};
use kiln_runtime::KernelCache;

/// What a program has to know of the graph it was made from.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Outline {
    /// The results.
    pub(crate) outputs: Vec<TensorTy>,
    /// Which inputs it changes.
    pub(crate) writes: Vec<bool>,
}

impl Outline {
    pub(crate) fn of(graph: &Graph) -> Result<Outline, String> {
        let tensor = |&value| graph.ty(value).as_tensor().cloned();
        let outputs: Option<Vec<TensorTy>> = graph.outputs.iter().map(tensor).collect();
        let mut writes = vec![false; graph.inputs.len()];
        for write in &graph.writes {
            if let Def::Input(number) = graph.def(write.target) {
                writes[number as usize] = true;
            }
        }
        Ok(Outline { outputs: outputs.ok_or("an output that is not a tensor")?, writes })
    }
}

/// A graph as it was lowered.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Planned {
    pub(crate) outline: Outline,
    pub(crate) plan: Plan,
}

/// What a part of a backward takes and gives, beside its plan.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct PartFacts {
    /// Where its first inputs come from, and the user's lines that they are read for.
    pub(crate) saved: Vec<(SavedFrom, Loc)>,
    /// As in `kiln_aot::Part`.
    pub(crate) grads: Vec<Option<usize>>,
    /// The graph, where gradients may arrive for some results only.
    pub(crate) partial: Option<Graph>,
}

impl PartFacts {
    /// Of a part; `is_partial`: gradients may arrive for some of its results only.
    pub(crate) fn of(part: BackwardPart, is_partial: bool) -> PartFacts {
        // For each input the user's line that it is first read for.
        let mut lines = vec![Loc::UNKNOWN; part.graph.value_count()];
        for node in part.graph.nodes.iter().rev() {
            node.args.iter().for_each(|arg| lines[arg.index()] = node.loc);
        }
        let lines = part.graph.inputs.iter().map(|input| lines[input.index()]);
        PartFacts {
            saved: part.saved.iter().map(|saved| saved.what).zip(lines).collect(),
            grads: part.grads,
            partial: is_partial.then_some(part.graph),
        }
    }
}

/// What the passes made of a captured graph: code of some kind for it, or for its forward and the parts of its backward.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Made<C> {
    /// The graph's, or its forward's.
    pub(crate) code: C,
    /// How many of its results are the program's own.
    pub(crate) forward_outputs: usize,
    /// The parts of its backward.
    pub(crate) parts: Vec<(PartFacts, C)>,
    /// What the backward keeps.
    pub(crate) report: Report,
}

/// The same as data: what the cache holds.
pub(crate) type Entry = Made<Planned>;

impl<C> Made<C> {
    /// The code of every graph, the forward's first.
    pub(crate) fn codes(&self) -> impl Iterator<Item = &C> {
        [&self.code].into_iter().chain(self.parts.iter().map(|(_, code)| code))
    }

    /// The same, to be changed.
    pub(crate) fn codes_mut(&mut self) -> impl Iterator<Item = &mut C> {
        [&mut self.code].into_iter().chain(self.parts.iter_mut().map(|(_, code)| code))
    }

    /// The same with other code for every graph, the forward's first.
    pub(crate) fn map<D, E>(self, mut other: impl FnMut(C) -> Result<D, E>) -> Result<Made<D>, E> {
        let code = other(self.code)?;
        let parts = self.parts.into_iter().map(|(facts, code)| Ok((facts, other(code)?)));
        Ok(Made {
            code,
            parts: parts.collect::<Result<_, E>>()?,
            forward_outputs: self.forward_outputs,
            report: self.report,
        })
    }
}

/// What is known of a graph before its entry is found.
pub(crate) struct Around<'a> {
    /// The functional graph.
    pub(crate) graph: &'a Graph,
    /// How its plan would be lowered, with its inputs' layouts.
    pub(crate) options: &'a Options,
    /// By part of the backward, which results gradients arrive for.
    pub(crate) tangents: Vec<Vec<usize>>,
    /// The inputs that gradients are for.
    pub(crate) targets: Vec<usize>,
}

impl Entry {
    /// Whether the entry can be run in the place of its graph's: whoever wrote it, it takes and gives what the graph does,
    /// and stays inside of that. The error says what is wrong.
    pub(crate) fn check(&self, around: &Around<'_>) -> Result<(), String> {
        let holds = |condition: bool, what: &str| if condition { Ok(()) } else { Err(what.to_string()) };
        let Around { graph, options, tangents, targets } = around;
        let own = Outline::of(graph)?;
        let Outline { outputs, writes } = &self.code.outline;
        let results = self.forward_outputs;
        holds(outputs.get(..results) == Some(&own.outputs[..]), "other results")?;
        // What is written back may turn out to be what is there already: `x.copy_(&x)`.
        let permitted = writes.iter().zip(&own.writes).all(|(written, may)| *may || !written);
        holds(writes.len() == own.writes.len() && permitted, "other inputs are changed")?;
        holds(!tangents.is_empty() || outputs.len() == results, "results that nobody takes")?;
        holds(self.parts.len() == tangents.len(), "another number of parts")?;
        let strides = options.input_layouts.iter().map(|layout| &layout.strides);
        let forward = Surroundings { outputs: outputs.clone(), ..Surroundings::of(graph, strides) };
        self.code.plan.check(&forward)?;
        let dense = |ty: &TensorTy| Given::tensor(ty, &ty.shape.contiguous_strides());
        let mut expected: Vec<&TensorTy> =
            targets.iter().filter_map(|&input| graph.ty(*graph.inputs.get(input)?).as_tensor()).collect();
        for ((facts, part), arriving) in self.parts.iter().zip(tangents) {
            let saved = facts.saved.iter().map(|(source, _)| match *source {
                SavedFrom::Input(input) => forward.inputs.get(input).cloned(),
                SavedFrom::Output(output) => outputs.get(..results)?.get(output).map(dense),
                SavedFrom::Fresh(fresh) => outputs.get(results..)?.get(fresh).map(dense),
            });
            let arriving: Vec<&TensorTy> =
                arriving.iter().filter_map(|&output| own.outputs.get(output)).collect();
            let inputs: Option<Vec<Given>> = saved.chain(arriving.iter().map(|ty| Some(dense(ty)))).collect();
            let inputs = inputs.ok_or("a saved value that is not there")?;
            let Outline { outputs, writes } = &part.outline;
            holds(
                writes.len() == inputs.len() && !writes.contains(&true),
                "a backward that changes its inputs",
            )?;
            holds(facts.grads.len() == expected.len(), "another number of gradients")?;
            for (ty, result) in expected.iter().zip(&facts.grads) {
                let is_it = result.is_none_or(|result| outputs.get(result).is_some_and(|found| found == *ty));
                holds(is_it, "a gradient of another type")?;
            }
            if let Some(partial) = &facts.partial {
                partial.verify(Stage::Prims, "the graph cache").map_err(|error| error.to_string())?;
                let results: Option<Vec<&TensorTy>> =
                    partial.outputs.iter().map(|&value| partial.ty(value).as_tensor()).collect();
                let same = results.is_some_and(|results| results.into_iter().eq(outputs));
                holds(same && partial.inputs.len() == inputs.len(), "a backward of other values")?;
            }
            let around = Surroundings { inputs, outputs: outputs.clone(), writes: writes.clone() };
            part.plan.check(&around)?;
            expected.extend(arriving);
        }
        Ok(())
    }
}

/// What an entry is found by.
pub(crate) struct Key<'a> {
    text: String,
    /// The graph whose lines plans tell.
    graph: &'a Graph,
}

impl<'a> Key<'a> {
    /// The key of a functional graph, to be run on a target with its machine; `facts` are what else its plan depends on.
    pub(crate) fn new(graph: &'a Graph, target: C, facts: &[&dyn std::fmt::Debug]) -> Key<'a> {
        let mut text = format!("kiln plan {}\n{target:?}\n", env!("KILN_FINGERPRINT"));
        // What a planted fault spoilt is not for others.
        kiln_ir::planted_fault().into_iter().for_each(|fault| text += &format!("{fault}\n"));
        facts.iter().for_each(|fact| text += &format!("{fact:?}\n"));
        text += &graph.to_string();
        Key { text, graph }
    }

    fn lines(&self) -> Vec<Loc> {
        let mut lines: Vec<Loc> = self.graph.nodes.iter().map(|node| node.loc).collect();
        lines.dedup();
        lines
    }

    /// The entry, if another process (or an earlier call) kept one.
    pub(crate) fn find(&self) -> Option<Entry> {
        let (bytes, lines) = (KernelCache::global().plan(&self.text)?, self.lines());
        let mut reader = Reader::new(&bytes, &lines);
        let entry = take(&mut reader)?;
        reader.is_done().then_some(entry)
    }

    /// Keeps what was made.
    pub(crate) fn keep(&self, entry: &Entry) {
        let lines = self.lines();
        let mut writer = Writer::new(&lines);
        put(entry, &mut writer);
        KernelCache::global().keep_plan(&self.text, &writer.into_bytes());
    }
}

fn put(entry: &Entry, to: &mut Writer) {
    let planned = |planned: &Planned, to: &mut Writer| {
        planned.outline.outputs.put(to);
        planned.outline.writes.put(to);
        planned.plan.put(to);
    };
    planned(&entry.code, to);
    entry.forward_outputs.put(to);
    let Report { bytes_saved, bytes_recomputed, nodes_recomputed } = entry.report;
    [bytes_saved, bytes_recomputed, nodes_recomputed, entry.parts.len()].iter().for_each(|n| n.put(to));
    for (facts, part) in &entry.parts {
        let saved: Vec<((usize, usize), Loc)> =
            facts.saved.iter().map(|(source, loc)| (numbers(*source), *loc)).collect();
        saved.put(to);
        facts.grads.put(to);
        facts.partial.as_ref().map(Graph::to_string).put(to);
        planned(part, to);
    }
}

fn take(from: &mut Reader<'_>) -> Option<Entry> {
    let planned = |from: &mut Reader<'_>| -> Option<Planned> {
        let outline = Outline { outputs: Vec::take(from)?, writes: Vec::take(from)? };
        Some(Planned { outline, plan: Plan::take(from)? })
    };
    let code = planned(from)?;
    let mut number = || usize::take(from);
    let forward_outputs = number()?;
    let report = Report { bytes_saved: number()?, bytes_recomputed: number()?, nodes_recomputed: number()? };
    let count = number()?;
    let mut parts = Vec::new();
    for _ in 0..count {
        let saved = Vec::<((usize, usize), Loc)>::take(from)?;
        let saved = saved.into_iter().map(|(numbers, loc)| Some((source(numbers)?, loc)));
        let saved = saved.collect::<Option<_>>()?;
        let grads = Vec::take(from)?;
        let partial = match kiln_plan::codec::Code::take(from)? {
            Some::<String>(text) => Some(text.parse().ok()?),
            None => None,
        };
        parts.push((PartFacts { saved, grads, partial }, planned(from)?));
    }
    Some(Entry { code, forward_outputs, parts, report })
}

fn numbers(source: SavedFrom) -> (usize, usize) {
    match source {
        SavedFrom::Input(i) => (0, i),
        SavedFrom::Output(i) => (1, i),
        SavedFrom::Fresh(i) => (2, i),
    }
}

fn source((kind, i): (usize, usize)) -> Option<SavedFrom> {
    match kind {
        0 => Some(SavedFrom::Input(i)),
        1 => Some(SavedFrom::Output(i)),
        2 => Some(SavedFrom::Fresh(i)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_plan::Machine;
    use kiln_runtime::Isa;

    #[test]
    fn machines_that_share_a_directory_share_no_plans() {
        let graph = Graph::default();
        let usual = Machine::with(Isa::Avx2);
        let others = [
            Machine { l1: 48 << 10, ..usual },
            Machine { l2: 2 << 20, ..usual },
            Machine { l3: 32 << 20, ..usual },
            Machine { isa: Isa::Plain, ..usual },
        ];
        let key = |machine: Machine| Key::new(&graph, C { machine, ..C::new(machine.isa) }, &[]).text;
        assert_eq!(key(usual), Key::new(&graph, C::new(Isa::Avx2), &[]).text);
        assert!(others.into_iter().all(|other| key(other) != key(usual)));
    }
}
