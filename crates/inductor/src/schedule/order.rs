//! Write-backs and the order of steps: which write-backs go straight into their target, and a sequence in which
//! every step finds what it reads.

use kiln_ir::{Def, Fault, Graph, Node, Refuses, Strides, Value, planted};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::WhyNot;
use crate::fuse::{Fusion, Group, Target, Unit};
use crate::lower::{Lowered, LoweredRoot, is_library};
use crate::rewrite::elements::Elements;
use crate::schedule::sequence::{Needs, sequence};
use kiln_plan::index::{ExprId, Index};
use kiln_plan::loops::{ExprKind, Kernel};

/// By input, the row of a table in which it is read.
struct RowsRead(Vec<u32>);

impl RowsRead {
    const NONE: u32 = u32::MAX;
    const SEVERAL: u32 = u32::MAX - 1;

    fn of(fusion: &Fusion<'_>, table: usize) -> RowsRead {
        let mut rows = vec![RowsRead::NONE; fusion.graph.inputs.len()];
        fusion.tables[table].for_each_read(fusion, |row, value| {
            if let Def::Input(number) = fusion.graph.def(value) {
                let known = &mut rows[number as usize];
                *known = match *known {
                    RowsRead::NONE => row as u32,
                    same if same == row as u32 => same,
                    _ => RowsRead::SEVERAL,
                };
            }
        });
        RowsRead(rows)
    }

    /// Whether an input is read in no row but this one.
    fn only_in(&self, input: u32, row: Option<usize>) -> bool {
        match self.0[input as usize] {
            RowsRead::NONE => true,
            RowsRead::SEVERAL => false,
            known => row == Some(known as usize),
        }
    }
}

/// By input, the units that read it: mostly one, which is all that is kept then.
struct Readers {
    first: Vec<u32>,
    more: FxHashMap<u32, SmallVec<[usize; 2]>>,
}

impl Readers {
    fn of(fusion: &Fusion<'_>) -> Readers {
        let mut readers =
            Readers { first: vec![u32::MAX; fusion.graph.inputs.len()], more: FxHashMap::default() };
        for (u, unit) in fusion.units.iter().enumerate() {
            fusion.for_each_read(unit, |value| {
                let Def::Input(input) = fusion.graph.def(value) else { return };
                let first = &mut readers.first[input as usize];
                match *first {
                    u32::MAX => *first = u as u32,
                    known if known == u as u32 => {}
                    _ => {
                        let more = readers.more.entry(input).or_default();
                        if more.last() != Some(&u) {
                            more.push(u);
                        }
                    }
                }
            });
        }
        readers
    }

    fn of_input(&self, input: u32) -> impl Iterator<Item = usize> {
        let first = Some(self.first[input as usize]).filter(|&u| u != u32::MAX);
        let more = self.more.get(&input).filter(|_| first.is_some()).into_iter().flatten();
        first.map(|u| u as usize).into_iter().chain(more.copied())
    }
}

/// Units in order, and the write-backs that wait in a temporary.
pub(crate) struct Order {
    pub units: Vec<usize>,
    /// Write-backs that must be copied at the end.
    pub late: FxHashSet<usize>,
    pub why_not: Vec<WhyNot>,
}

pub(crate) fn order(fusion: &Fusion<'_>) -> Order {
    let graph = fusion.graph;
    let mut deps = fusion.dependencies(&fusion.units, &fusion.groups);
    let readers = Readers::of(fusion);
    // By write-back, the unit that computes what is written.
    let mut writer: Vec<Option<u32>> = vec![None; graph.writes.len()];
    for (u, unit) in fusion.units.iter().enumerate() {
        let values = match unit {
            Unit::Kernel(g) => fusion.groups[*g].roots.clone(),
            Unit::Table(t) => fusion.tables[*t].results(graph),
            Unit::Library(_) => Vec::new(),
        };
        if let Unit::Table(t) = unit {
            for &root in &fusion.tables[*t].roots {
                let rows = fusion.elements.rows(root);
                for w in (0..rows.len()).filter_map(|row| Elements::write(rows, row)) {
                    writer[w] = Some(u as u32);
                }
            }
        }
        if let Unit::Library(n) = unit
            && let Some(&w) = fusion.windows.get(&graph.nodes[*n].outs[0])
        {
            writer[w] = Some(u as u32);
        }
        for value in values {
            for target in fusion.targets.get(&value).into_iter().flatten() {
                if let Target::Part { of, .. } = target
                    && let Some(&w) = fusion.windows.get(of)
                {
                    writer[w] = Some(u as u32);
                }
                if let Target::Write(w) = target {
                    let in_table = matches!(unit, Unit::Table(_));
                    // A table writes only its first target; others are copied by a kernel.
                    let own =
                        fusion.library_target(value).map(|t| &fusion.targets[&value][t]) == Some(target);
                    let is_list_get = fusion.is_list_get(value);
                    if own == in_table || (!in_table && !is_list_get) {
                        writer[*w] = Some(u as u32);
                    }
                }
            }
        }
    }
    let rows: Vec<RowsRead> = (0..fusion.tables.len()).map(|t| RowsRead::of(fusion, t)).collect();
    let (mut late, mut why_not) = (FxHashSet::default(), Vec::new());
    let mut waiting: Option<(usize, Vec<bool>)> = None;
    // Rows go into inputs by one index: the first step that has it checks it for all, before it changes anything.
    let in_place = |n: usize| fusion.windows.contains_key(&graph.nodes[n].outs[0]);
    let first = (0..graph.nodes.len()).find(|&n| is_library(graph, &graph.nodes[n]) && in_place(n));
    let may_fail = |unit: &Unit| match unit {
        Unit::Kernel(g) => !fusion.groups[*g].lowered.checks.is_empty(),
        Unit::Library(n) => may_refuse(graph, &graph.nodes[*n]) && (!in_place(*n) || first == Some(*n)),
        Unit::Table(_) => false,
    };
    let checked: Vec<usize> = (0..fusion.units.len()).filter(|&u| may_fail(&fusion.units[u])).collect();
    for (w, write) in graph.writes.iter().enumerate().filter(|_| !planted(Fault::WriteTooEarly)) {
        let Some(u) = writer[w].map(|u| u as usize) else { continue };
        let Def::Input(input) = graph.def(write.target) else { continue };
        let others: SmallVec<[usize; 4]> = readers.of_input(input).filter(|&r| r != u).collect();
        let inside = match &fusion.units[u] {
            Unit::Kernel(g) => same_place(fusion, &fusion.groups[*g], w, write.target),
            // A table must read the target only in the row that writes it.
            Unit::Table(t) => rows[*t].only_in(input, fusion.list_row(write)),
            Unit::Library(_) => true,
        };
        // Who waits for a unit does not depend on what that unit waits for: one search for all its write-backs.
        let waits = match &mut waiting {
            Some((unit, waits)) if *unit == u => waits,
            other => &mut other.insert((u, waiting_for(&deps, u))).1,
        };
        if !inside || others.iter().any(|&r| waits[r]) {
            late.insert(w);
            why_not.push(WhyNot::StillRead { input: input as usize });
            continue;
        }
        // Whatever can fail comes before the first change: a program that fails leaves no trace.
        let is_first = matches!(fusion.units[u], Unit::Library(n) if first == Some(n));
        if (checked.contains(&u) && !is_first) || checked.iter().any(|&c| waits[c]) {
            late.insert(w);
            why_not.push(WhyNot::MayFail { input: input as usize });
            continue;
        }
        if !others.is_empty() || !checked.is_empty() {
            deps[u].extend(others);
            deps[u].extend(checked.iter().filter(|&&c| c != u));
            deps[u].sort_unstable();
            deps[u].dedup();
        }
    }
    let units = sequence(&deps, &needs(fusion, &late));
    Order { units, late, why_not }
}

/// Which units wait for a unit, straight or through others.
fn waiting_for(deps: &[Vec<usize>], unit: usize) -> Vec<bool> {
    let mut users: Vec<SmallVec<[usize; 4]>> = vec![SmallVec::new(); deps.len()];
    for (user, list) in deps.iter().enumerate() {
        list.iter().for_each(|&d| users[d].push(user));
    }
    let mut waits = vec![false; deps.len()];
    let mut todo = vec![unit];
    while let Some(next) = todo.pop() {
        for &user in &users[next] {
            if !std::mem::replace(&mut waits[user], true) {
                todo.push(user);
            }
        }
    }
    waits
}

/// Whether an eager kernel may refuse what it is given.
fn may_refuse(graph: &Graph, node: &Node) -> bool {
    let is_float = |&arg: &Value| graph.ty(arg).as_tensor().is_none_or(|ty| ty.dtype.is_float());
    match node.op.row().refuses {
        Refuses::Nothing => false,
        Refuses::NotFloats => !node.args.iter().all(is_float),
        Refuses::Values => true,
    }
}

/// The memory that units need: the buffers of stored values, outputs, and write-backs that wait for the end.
fn needs(fusion: &Fusion<'_>, late: &FxHashSet<usize>) -> Needs {
    let graph = fusion.graph;
    let mut needs = Needs::of_steps(fusion.units.len());
    let mut items: FxHashMap<Value, Option<u32>> = FxHashMap::default();
    // Where a value that units read is kept.
    let mut item = |needs: &mut Needs, value: Value| {
        let value = fusion.scatters.last(value);
        *items.entry(value).or_insert_with(|| {
            let bytes = graph.ty(value).as_tensor().map_or(0, |ty| ty.bytes());
            let targets = fusion.targets.get(&value).map_or(&[][..], |targets| targets);
            let is_output = targets.iter().any(|t| matches!(t, Target::Output(_)));
            let is_late = targets.iter().any(|t| matches!(t, Target::Write(w) if late.contains(w)));
            let is_direct = targets.iter().any(|t| matches!(t, Target::Write(w) if !late.contains(w)));
            // What is written straight into an input needs no memory.
            let is_direct = is_direct || fusion.windows.contains_key(&value);
            (is_output || is_late || !is_direct).then(|| needs.item(bytes, is_output || is_late))
        })
    };
    for (u, unit) in fusion.units.iter().enumerate() {
        let mut touched: Vec<Value> = Vec::new();
        fusion.for_each_read(unit, |value| {
            if matches!(graph.def(value), Def::Node { .. }) {
                touched.push(value);
            }
        });
        match unit {
            Unit::Kernel(g) => {
                for &root in &fusion.groups[*g].roots {
                    let parts = fusion.targets.get(&root).into_iter().flatten().filter_map(|t| match t {
                        Target::Part { of, .. } => Some(*of),
                        _ => None,
                    });
                    touched.extend(parts.chain([root]));
                }
            }
            Unit::Table(t) => touched.extend(fusion.tables[*t].results(graph)),
            Unit::Library(n) => touched.push(graph.nodes[*n].outs[0]),
        }
        for value in touched {
            if let Some(item) = item(&mut needs, value) {
                needs.touch(u, item);
            }
        }
    }
    needs
}

/// Whether a kernel reads a write-back's target only at the element it is about to write, and not afterwards.
fn same_place(fusion: &Fusion<'_>, group: &Group, write: usize, target: Value) -> bool {
    let lowered = &group.lowered;
    let Some(load) = lowered.loads.iter().position(|&v| v == target) else { return true };
    let writes = |r: &&LoweredRoot| fusion.targets[&r.value].contains(&Target::Write(write));
    let Some(root) = lowered.roots.iter().find(writes) else { return false };
    reads_only_where_it_writes(lowered, load, root, &fusion.write_strides(write, root.value))
}

/// Whether a kernel reads one of its operands only at the element where it is about to store a root with these
/// strides, and not afterwards: then the root may take the operand's place.
pub(crate) fn reads_only_where_it_writes(
    lowered: &Lowered,
    buffer: usize,
    root: &LoweredRoot,
    strides: &Strides,
) -> bool {
    if lowered.space.is_tall() {
        return false;
    }
    let kernel = &lowered.kernel;
    let mut place = Index::default();
    for (i, &stride) in root.index.iter().zip(strides) {
        place.add_scaled(i, stride as i64);
    }
    let loads_here = |e: &ExprKind| matches!(e, ExprKind::Load { buffer: b, .. } if *b == buffer);
    let elsewhere =
        |e: &ExprKind| matches!(e, ExprKind::Load { buffer: b, index } if *b == buffer && *index != place);
    if kernel.exprs.iter().any(|e| elsewhere(&e.kind)) {
        return false;
    }
    // Passes after the store must not need the old contents.
    let depths = kernel.depths();
    let whole = |index: &[Index]| {
        index.iter().any(|i| (0..kernel.axes.len()).any(|a| kernel.axes[a].inner && i.mentions(a)))
    };
    if !lowered.space.has_inner() || !whole(&root.index) {
        return true;
    }
    let stored_in = depths[root.expr];
    let later_roots = lowered.roots.iter().filter(|r| depths[r.expr] > stored_in).map(|r| r.expr);
    let later_reductions = kernel.exprs.iter().filter_map(|e| match e.kind {
        ExprKind::Reduce(_, arg) if depths[arg] > stored_in => Some(arg),
        // Rows are folded behind all passes.
        ExprKind::Fold(_, arg) => Some(arg),
        _ => None,
    });
    !later_roots.chain(later_reductions).any(|e| in_pass(kernel, e, &loads_here))
}

/// Whether an expression needs, in the same pass, one for which `wanted` holds.
fn in_pass(kernel: &Kernel, expr: ExprId, wanted: &dyn Fn(&ExprKind) -> bool) -> bool {
    let mut todo = vec![expr];
    let mut seen = FxHashSet::default();
    while let Some(e) = todo.pop() {
        if wanted(&kernel.exprs[e].kind) {
            return true;
        }
        if seen.insert(e) && !matches!(kernel.exprs[e].kind, ExprKind::Reduce(..)) {
            todo.extend(kernel.operands(e));
        }
    }
    false
}
