//! How a kernel runs its loops: trivial loops dropped, the vector axis chosen, loops ordered and joined, tall
//! reductions cut into chunks.

pub(crate) mod bands;
pub(crate) mod epilogue;
pub(crate) mod order;
pub(crate) mod sequence;

use kiln_ir::{DType, Fault, planted};

use crate::fuse::folds;
use crate::target::Schedule;
use kiln_plan::index::{AxisId, ExprId, Index};
use kiln_plan::loops::{Axis, Expr, ExprKind, Kernel, Mode, Store};

// What is cut, and into which chunks, decides in which order elements are added: these are fixed, since no bit depends on
// the machine's caches or on the number of threads.

/// Elements of a chunk of a tall reduction.
const CHUNK: i64 = 65536;
/// Reductions to so few elements, over so many, would run on one core.
const FEW: i64 = 16;
const LONG: i64 = 32768;
/// Sums of columns of a matrix with so many elements, and no more columns than that, are sums of chunks of its rows.
const LARGE: i64 = 1 << 21;
const WIDEST: i64 = 8192;
/// Each chunk of such a matrix has a row of partial sums, which is written and read again: of so many rows it is next to
/// nothing, and so many chunks keep the threads busy.
const ROWS: i64 = 128;
const CHUNKS: i64 = 32;

/// Few kept elements over many reduced ones: such a reduction is cut into chunks, or it has no parallelism.
pub(crate) fn is_tall(outer: i64, inner: i64) -> bool {
    outer <= FEW && inner >= LONG
}

/// Orders and joins the loops of a lowered kernel.
fn schedule(mut kernel: Kernel) -> Kernel {
    let is_short = |axis: &Axis| planted(Fault::ShortLoopDropped) && axis.extent == 2 && !axis.inner;
    keep(&mut kernel, &|axis| axis.extent != 1 && !is_short(axis));
    let has_inner = kernel.axes.iter().any(|a| a.inner);
    if kernel.axes.iter().all(|a| a.inner) {
        // Something to iterate over, for the one result.
        kernel.axes.insert(0, Axis { extent: 1, inner: false });
        shift(&mut kernel, 1);
        if !has_inner {
            for store in &mut kernel.stores {
                store.index.add_scaled(&Index::axis(0), 1);
            }
        }
    }
    // Folds lie side by side along the last axis.
    let vector = if has_folds(&kernel) { kernel.axes.len() - 1 } else { vector_axis(&kernel, has_inner) };
    kernel.mode = match (has_inner, kernel.axes[vector].inner) {
        (false, _) => Mode::Map,
        (true, true) => Mode::Rows,
        (true, false) => Mode::Columns,
    };
    let mut order: Vec<AxisId> = (0..kernel.axes.len()).collect();
    order.sort_by_key(|&a| (kernel.axes[a].inner, a == vector));
    permute(&mut kernel, &order);
    join(&mut kernel);
    kernel
}

/// Moves every axis number up.
fn shift(kernel: &mut Kernel, by: usize) {
    rewrite(kernel, &|a| Index::axis(a + by));
}

/// Rewrites every index.
fn rewrite(kernel: &mut Kernel, axis: &dyn Fn(AxisId) -> Index) {
    for expr in &mut kernel.exprs {
        if let ExprKind::Load { index, .. } | ExprKind::Position(index) = &mut expr.kind {
            *index = index.map(axis, &|v| v);
        }
    }
    for store in &mut kernel.stores {
        store.index = store.index.map(axis, &|v| v);
    }
}

/// Drops the axes for which `wanted` does not hold; their variables are 0.
fn keep(kernel: &mut Kernel, wanted: &dyn Fn(&Axis) -> bool) {
    let mut number = 0;
    let places: Vec<Option<usize>> = kernel
        .axes
        .iter()
        .map(|a| {
            wanted(a).then(|| {
                number += 1;
                number - 1
            })
        })
        .collect();
    rewrite(kernel, &|a| places[a].map_or(Index::default(), Index::axis));
    kernel.axes.retain(|a| wanted(a));
}

fn permute(kernel: &mut Kernel, order: &[AxisId]) {
    let mut places = vec![0; order.len()];
    for (new, &old) in order.iter().enumerate() {
        places[old] = new;
    }
    rewrite(kernel, &|a| Index::axis(places[a]));
    kernel.axes = order.iter().map(|&a| kernel.axes[a]).collect();
}

fn accesses(kernel: &Kernel) -> Vec<(&Index, i64)> {
    let loads = kernel.exprs.iter().filter_map(|e| match &e.kind {
        ExprKind::Load { index, buffer } => Some((index, kernel.buffers[*buffer].size() as i64)),
        _ => None,
    });
    let stores = kernel.stores.iter().map(|s| (&s.index, 2 * kernel.buffers[s.buffer].size() as i64));
    loads.chain(stores).collect()
}

/// The axis along which most bytes lie side by side.
fn vector_axis(kernel: &Kernel, has_inner: bool) -> AxisId {
    let accesses = accesses(kernel);
    // A computed place is somewhere else for each position that it is computed from.
    let varies: Vec<Vec<bool>> = (0..kernel.axes.len()).map(|axis| kernel.varies(|a| a == axis)).collect();
    let is_computed = |index: &Index, axis: AxisId| {
        let mut found = false;
        index.for_each_value(&mut |value| found |= varies[axis][value]);
        found
    };
    let size = |index: &Index| -> f64 {
        let moves = |&axis: &AxisId| index.mentions(axis) || is_computed(index, axis);
        (0..kernel.axes.len()).filter(moves).map(|a| kernel.axes[a].extent as f64).product()
    };
    let has_scans = kernel.has_scans();
    let all: f64 = accesses.iter().map(|(index, bytes)| size(index) * *bytes as f64).sum();
    let score = |axis: AxisId| -> f64 {
        let sum: f64 = accesses
            .iter()
            .map(|(index, bytes)| {
                let step = match index.border(axis) {
                    _ if is_computed(index, axis) => None,
                    Some((inner, _)) => Some(inner.factor(axis)),
                    None if index.is_bent(axis) => Some(-1),
                    None if index.repeats(axis).is_some() => Some(1),
                    None => (!index.is_nested(axis)).then(|| index.factor(axis)),
                };
                let share = match step {
                    Some(1) => 1.0,
                    // From the end to the beginning: a vector is turned round. A scan goes along its rows, too.
                    Some(-1) if has_scans => 1.0,
                    Some(-1) => 0.9,
                    // Half of what is loaded is used.
                    Some(2) => 0.5,
                    Some(0) => 0.0,
                    _ => -1.0,
                };
                share * size(index) * *bytes as f64
            })
            .sum();
        // Vectors along a short axis are mostly empty: elements that lie apart take no longer.
        let full = (kernel.axes[axis].extent as f64 / 16.0).min(1.0);
        let empty = if has_inner { 0.0 } else { (1.0 - full) * all };
        if sum < 0.0 { sum / full } else { sum * full - empty }
    };
    let mut best = kernel.axes.len() - 1;
    if has_inner {
        best = (0..kernel.axes.len()).rev().find(|&a| kernel.axes[a].inner).unwrap_or(best);
    }
    let mut best_score = score(best);
    // In vectors along another inner axis than the last, elements would come in another order.
    let keeps_order = |axis: AxisId| !kernel.axes[axis].inner || axis == best || !kernel.is_ordered();
    let axes: Vec<AxisId> = (0..kernel.axes.len()).rev().filter(|&axis| keeps_order(axis)).collect();
    for axis in axes {
        let s = score(axis);
        if s > best_score {
            (best, best_score) = (axis, s);
        }
    }
    best
}

fn has_folds(kernel: &Kernel) -> bool {
    kernel.exprs.iter().any(|expr| matches!(expr.kind, ExprKind::Fold(..)))
}

/// Whether vectors along the last axis are what the kernel's loads want.
pub(crate) fn goes_along_rows(kernel: &Kernel) -> bool {
    vector_axis(kernel, true) == kernel.axes.len() - 1
}

/// Joins neighbouring axes that every access walks through as one.
fn join(kernel: &mut Kernel) {
    let mut a = 0;
    while a + 1 < kernel.axes.len() {
        let (outer, inner) = (kernel.axes[a], kernel.axes[a + 1]);
        let fits = |index: &Index| {
            index.factor(a) == index.factor(a + 1) * inner.extent
                && !index.is_nested(a)
                && !index.is_nested(a + 1)
        };
        let positions = kernel.exprs.iter().filter_map(|e| match &e.kind {
            ExprKind::Position(index) => Some(index),
            _ => None,
        });
        let all = accesses(kernel).iter().all(|(index, _)| fits(index)) && { positions }.all(fits);
        if outer.inner != inner.inner || !all {
            a += 1;
            continue;
        }
        kernel.axes[a].extent *= inner.extent;
        // The pair i_a·e + i_(a+1) is the new variable: its factor is the inner one's.
        rewrite(kernel, &|axis| match axis {
            x if x < a => Index::axis(x),
            x if x == a => Index::default(),
            x => Index::axis(x - 1),
        });
        kernel.axes.remove(a + 1);
    }
}

/// A kernel in its final form.
#[derive(Clone, PartialEq, Debug)]
pub struct Scheduled {
    /// The kernel.
    pub kernel: Kernel,
    /// The old numbers of its buffers.
    pub buffers: Vec<usize>,
    /// The old numbers of its scalars.
    pub scalars: Vec<usize>,
}

/// Prunes and schedules a lowered kernel for several threads. A reduction to few elements over many becomes two kernels:
/// the first leaves partial results of chunks, the second combines them.
pub(crate) fn in_parallel(kernel: Kernel) -> Schedule {
    together(fold(&kernel).or_else(|| cut(&kernel)), kernel)
}

/// Prunes and schedules a lowered kernel as it is. Only what folds becomes two kernels: sums of parts, and their sums.
pub(crate) fn whole(kernel: Kernel) -> Schedule {
    together(fold(&kernel), kernel)
}

fn together(parts: Option<(Scheduled, Scheduled, Vec<(DType, i64)>)>, kernel: Kernel) -> Schedule {
    match parts {
        Some((first, second, between)) => Schedule { kernels: vec![first, second], between },
        None => Schedule { kernels: vec![pruned(kernel)], between: Vec::new() },
    }
}

fn pruned(mut kernel: Kernel) -> Scheduled {
    let (buffers, scalars) = kernel.prune();
    Scheduled { kernel: schedule(kernel), buffers, scalars }
}

fn is_whole(kernel: &Kernel, store: &Store) -> bool {
    (0..kernel.axes.len()).any(|a| kernel.axes[a].inner && store.index.mentions(a))
}

/// A kernel with folds as one that leaves sums of its parts, and one that adds them up.
fn fold(kernel: &Kernel) -> Option<(Scheduled, Scheduled, Vec<(DType, i64)>)> {
    let folds: Vec<ExprId> =
        (0..kernel.exprs.len()).filter(|&e| matches!(kernel.exprs[e].kind, ExprKind::Fold(..))).collect();
    if folds.is_empty() {
        return None;
    }
    let parts = folds::parts(kernel.count(false));
    let base = kernel.buffers.len();
    let (mut place, mut columns) = (Index::default(), 1);
    for (a, axis) in kernel.axes.iter().enumerate().rev().filter(|(_, axis)| axis.inner) {
        place.add_scaled(&Index::axis(a), columns);
        columns *= axis.extent;
    }
    let is_of_row =
        |store: &Store| (0..kernel.axes.len()).any(|a| !kernel.axes[a].inner && store.index.mentions(a));

    let mut first = kernel.clone();
    first.stores.retain(is_of_row);
    for (n, &e) in folds.iter().enumerate() {
        first.buffers.push(kernel.exprs[e].dtype);
        first.stores.push(Store { buffer: base + n, index: place.clone(), value: e, adds: false });
    }
    let mut first = pruned(first);
    first.kernel.parts = Some(parts);

    // In the second kernel columns are kept, and the only reduced axis is that of the parts.
    let mut second = kernel.clone();
    second.stores.retain(|store| !is_of_row(store));
    for axis in &mut second.axes {
        *axis = Axis { extent: if axis.inner { axis.extent } else { 1 }, inner: false };
    }
    let new_axis = second.axes.len();
    second.axes.push(Axis { extent: parts, inner: true });
    for (n, &e) in folds.iter().enumerate() {
        let mut index = place.clone();
        index.add_scaled(&Index::axis(new_axis), columns);
        let ExprKind::Fold(reduction, _) = second.exprs[e].kind else { continue };
        let Expr { dtype, loc, .. } = second.exprs[e];
        second.buffers.push(dtype);
        second.exprs.push(Expr { dtype, kind: ExprKind::Load { buffer: base + n, index }, loc });
        second.exprs[e].kind = ExprKind::Reduce(reduction, second.exprs.len() - 1);
    }
    second.sort_operands();
    let sizes = folds.iter().map(|&e| (kernel.exprs[e].dtype, columns * parts)).collect();
    Some((first, pruned(second), sizes))
}

fn cut(kernel: &Kernel) -> Option<(Scheduled, Scheduled, Vec<(DType, i64)>)> {
    let (outer, inner) = (kernel.count(false), kernel.count(true));
    let depths = kernel.depths();
    let has_inner = kernel.axes.iter().any(|a| a.inner);
    let one_pass = depths.iter().all(|&d| d <= 1)
        && kernel.stores.iter().all(|s| depths[s.value] == 0 || !is_whole(kernel, s));
    let is_tall = is_tall(outer, inner);
    // Columns that threads shared would be narrow strips of far-apart lines: rows are shared instead.
    let is_wide = outer > FEW && outer <= WIDEST && inner >= outer && outer * inner >= LARGE;
    if !has_inner || !(is_tall || is_wide) || !one_pass || kernel.is_ordered() {
        return None;
    }
    let reductions: Vec<ExprId> =
        (0..kernel.exprs.len()).filter(|&e| matches!(kernel.exprs[e].kind, ExprKind::Reduce(..))).collect();
    let base = kernel.buffers.len();
    let (mut place, mut step) = (Index::default(), 1);
    for (a, axis) in kernel.axes.iter().enumerate().rev().filter(|(_, axis)| !axis.inner) {
        place.add_scaled(&Index::axis(a), step);
        step *= axis.extent;
    }

    let mut first = kernel.clone();
    first.stores.retain(|s| is_whole(kernel, s));
    for (n, &e) in reductions.iter().enumerate() {
        first.buffers.push(kernel.exprs[e].dtype);
        first.stores.push(Store { buffer: base + n, index: place.clone(), value: e, adds: false });
    }
    let mut first = pruned(first);
    let k = &mut first.kernel;
    if is_wide && k.mode != Mode::Columns {
        return None;
    }
    let axis = k.outer();
    let row = k.count(true) / k.axes[axis].extent.max(1);
    let rows = k.axes[axis].extent;
    let fewest = if is_wide { (rows / CHUNKS).min(ROWS / row.max(1)) } else { 1 };
    let chunk = (CHUNK / (row * outer).max(1)).max(fewest).max(1);
    let chunks = (rows + chunk - 1) / chunk;
    if chunks < 2 {
        return None;
    }
    // A new outermost axis counts the chunks.
    k.chunk = Some(chunk);
    k.axes.insert(0, Axis { extent: chunks, inner: false });
    shift(k, 1);
    let own = k.stores.len() - reductions.len();
    for store in &mut k.stores[own..] {
        store.index.add_scaled(&Index::axis(0), outer);
    }

    // The second kernel reduces over the chunks: one new inner axis in place of all others.
    let mut second = kernel.clone();
    second.stores.retain(|s| !is_whole(kernel, s));
    let new_axis = second.axes.len();
    for axis in second.axes.iter_mut().filter(|a| a.inner) {
        axis.extent = 1;
    }
    second.axes.push(Axis { extent: chunks, inner: true });
    for (n, &e) in reductions.iter().enumerate() {
        let mut index = place.clone();
        if !planted(Fault::FirstChunkRepeated) {
            index.add_scaled(&Index::axis(new_axis), outer);
        }
        let ExprKind::Reduce(reduction, _) = second.exprs[e].kind else { continue };
        let Expr { dtype, loc, .. } = second.exprs[e];
        second.buffers.push(dtype);
        second.exprs.push(Expr { dtype, kind: ExprKind::Load { buffer: base + n, index }, loc });
        second.exprs[e].kind = ExprKind::Reduce(reduction, second.exprs.len() - 1);
    }
    second.sort_operands();
    let sizes = reductions.iter().map(|&e| (kernel.exprs[e].dtype, outer * chunks)).collect();
    Some((first, pruned(second), sizes))
}
