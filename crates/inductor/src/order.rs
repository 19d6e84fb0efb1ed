//! Write-backs and the order of steps: which write-backs go straight into their target, and a sequence in which
//! every step finds what it reads.

use kiln_ir::{Def, Op, Value};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::WhyNot;
use crate::fuse::{Fusion, Group, Target, Unit, reaches};
use crate::index::{ExprId, Index};
use crate::loops::{ExprKind, Kernel};

/// The rows of a table in which it reads each input.
type RowsRead = FxHashMap<Value, SmallVec<[usize; 2]>>;

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
    let mut readers: FxHashMap<Value, SmallVec<[usize; 2]>> = FxHashMap::default();
    for (u, unit) in fusion.units.iter().enumerate() {
        for value in fusion.reads_of(unit) {
            if matches!(graph.def(value), Def::Input(_)) {
                let list = readers.entry(value).or_default();
                if list.last() != Some(&u) {
                    list.push(u);
                }
            }
        }
    }
    let mut writer: FxHashMap<usize, usize> = FxHashMap::default();
    for (u, unit) in fusion.units.iter().enumerate() {
        let values = match unit {
            Unit::Kernel(g) => fusion.groups[*g].roots.clone(),
            Unit::Table(t) => fusion.tables[*t].results(graph),
            Unit::Library(_) => Vec::new(),
        };
        for value in values {
            for target in fusion.targets.get(&value).into_iter().flatten() {
                if let Target::Write(w) = target {
                    let in_table = matches!(unit, Unit::Table(_));
                    // A table writes only its first target; others are copied by a kernel.
                    let own =
                        fusion.library_target(value).map(|t| &fusion.targets[&value][t]) == Some(target);
                    let is_list_get = fusion.is_list_get(value);
                    if own == in_table || (!in_table && !is_list_get) {
                        writer.insert(*w, u);
                    }
                }
            }
        }
    }
    let rows: Vec<RowsRead> = (0..fusion.tables.len()).map(|t| rows_read(fusion, t)).collect();
    let (mut late, mut why_not) = (FxHashSet::default(), Vec::new());
    let same: Vec<usize> = (0..deps.len()).collect();
    let may_fail = |unit: &Unit| match unit {
        Unit::Kernel(g) => !fusion.groups[*g].lowered.checks.is_empty(),
        // Eager kernels check what they are given; those that do no more than compute can't fail.
        Unit::Library(n) => {
            let op = &graph.nodes[*n].op;
            !matches!(op, Op::Mm {} | Op::Rand { .. } | Op::Randn { .. } | Op::GatherBackward { .. })
        }
        Unit::Table(_) => false,
    };
    let checked: Vec<usize> = (0..fusion.units.len()).filter(|&u| may_fail(&fusion.units[u])).collect();
    for (w, write) in graph.writes.iter().enumerate() {
        let Some(&u) = writer.get(&w) else { continue };
        let others: SmallVec<[usize; 4]> =
            readers.get(&write.target).into_iter().flatten().copied().filter(|&r| r != u).collect();
        let inside = match &fusion.units[u] {
            Unit::Kernel(g) => same_place(fusion, &fusion.groups[*g], w, write.target),
            Unit::Table(t) => {
                // A table must read the target only in the row that writes it.
                let row = fusion.list_row(write.value);
                rows[*t].get(&write.target).is_none_or(|rows| rows.iter().all(|r| Some(*r) == row))
            }
            Unit::Library(_) => true,
        };
        let waits = |deps: &[Vec<usize>], r: usize| deps[r].contains(&u) || reaches(deps, &same, r, u);
        let Def::Input(input) = graph.def(write.target) else { continue };
        if !inside || others.iter().any(|&r| waits(&deps, r)) {
            late.insert(w);
            why_not.push(WhyNot::StillRead { input: input as usize });
            continue;
        }
        // Whatever can fail comes before the first change: a program that fails leaves no trace.
        if checked.contains(&u) || checked.iter().any(|&c| waits(&deps, c)) {
            late.insert(w);
            why_not.push(WhyNot::MayFail { input: input as usize });
            continue;
        }
        if !others.is_empty() || !checked.is_empty() {
            deps[u].extend(others);
            deps[u].extend(&checked);
            deps[u].sort_unstable();
            deps[u].dedup();
        }
    }
    Order { units: sequence(&deps), late, why_not }
}

/// Units so that each comes after what it waits for, otherwise in the order of their numbers.
fn sequence(deps: &[Vec<usize>]) -> Vec<usize> {
    let mut state = vec![0u8; deps.len()];
    let mut out = Vec::with_capacity(deps.len());
    for start in 0..deps.len() {
        let mut stack = vec![(start, 0)];
        while let Some((unit, next)) = stack.pop() {
            if next == 0 {
                if state[unit] != 0 {
                    continue;
                }
                state[unit] = 1;
            }
            match deps[unit].get(next) {
                Some(&d) => {
                    stack.push((unit, next + 1));
                    if state[d] == 0 {
                        stack.push((d, 0));
                    }
                }
                None => {
                    state[unit] = 2;
                    out.push(unit);
                }
            }
        }
    }
    out
}

/// Whether a kernel reads a write-back's target only at the element it is about to write, and not afterwards.
fn same_place(fusion: &Fusion<'_>, group: &Group, write: usize, target: Value) -> bool {
    let lowered = &group.lowered;
    let Some(buffer) = lowered.loads.iter().position(|&v| v == target) else { return true };
    if lowered.space.is_tall() {
        return false;
    }
    let kernel = &lowered.kernel;
    let Some(root) = lowered.roots.iter().find(|r| fusion.targets[&r.value].contains(&Target::Write(write)))
    else {
        return false;
    };
    let strides = fusion.write_strides(write, root.value);
    let mut place = Index::default();
    for (i, &stride) in root.index.iter().zip(&strides) {
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

/// The rows in which a table reads each input.
fn rows_read(fusion: &Fusion<'_>, table: usize) -> RowsRead {
    let graph = fusion.graph;
    let mut out = RowsRead::default();
    for pack in fusion.tables[table].packs(graph).iter().filter_map(|&p| graph.producer(p)) {
        for (row, &element) in pack.args.iter().enumerate() {
            out.entry(fusion.element(element).base).or_default().push(row);
        }
    }
    out
}
