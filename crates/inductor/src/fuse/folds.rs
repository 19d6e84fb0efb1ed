//! Reductions along both dims of a matrix in one kernel: it goes through rows, and what reduces over rows is
//! gathered on the way.
//!
//! ```text
//! %2 = sum(%0) {dims: [1]}       (rows)          sum(%3) : a row's sum
//! %3 = sum(%1) {dims: [0]}       (columns)       fold_sum(%4) : what this row adds to every column
//! ```
//!
//! The gradient of a layer norm needs both of the same operands: sums along rows for its input's gradient, sums over
//! rows for those of scale and shift, and the layer before it wants its gradient's sum over rows. Apart, each of
//! them reads the operands again.

use kiln_ir::Value;
use rustc_hash::FxHashSet;

use crate::fuse::{Fusion, Group};
use crate::lower::{LoweredRoot, Space};
use crate::schedule::goes_along_rows;
use kiln_plan::loops::{ExprKind, Kernel};

// Whether columns are folded, and in how many parts, decides in which order their elements are added: these are fixed,
// since no bit depends on the machine's caches.

/// Operands of fewer bytes are still in the caches when they are read again, which costs less than sums for every
/// part.
const CACHED: i64 = 4 << 20;
/// Fewer rows are not worth sums of their own for every part.
const FEWEST_ROWS: i64 = 128;
/// The accumulators of longer rows would push the rows out of the cache.
const LONGEST_ROW: i64 = 8192;
/// Shorter rows leave vectors empty.
const SHORTEST_ROW: i64 = 16;
/// From so many rows on there are more parts, for machines with many cores.
const MANY_ROWS: i64 = 4096;

/// Into how many parts rows are cut. Fixed, so that results don't depend on the number of threads.
pub(crate) const fn parts(rows: i64) -> i64 {
    if rows < MANY_ROWS { 16 } else { 64 }
}

impl Space {
    /// The space of a matrix whose rows are reduced, for that of the same matrix whose columns are.
    fn turned(&self) -> Option<Space> {
        let [rows, columns] = self.0[..] else { return None };
        let fits = !columns.inner
            && rows.inner
            && !rows.reversed
            && rows.count >= FEWEST_ROWS
            && (SHORTEST_ROW..=LONGEST_ROW).contains(&columns.count);
        let mut turned = self.clone();
        turned.0.iter_mut().for_each(|segment| segment.inner = !segment.inner);
        fits.then_some(turned)
    }

    /// The space of rows in which the reductions of the other over columns are folds.
    pub fn join_folding(&self, other: &Space) -> Option<Space> {
        let one = other.turned().filter(|turned| turned == self);
        one.or_else(|| self.turned().filter(|turned| turned == other))
    }
}

impl Fusion<'_> {
    /// The roots of a kernel that are folds when it runs in `space`.
    pub fn folds_in(&self, group: &Group, space: &Space) -> Vec<Value> {
        if group.lowered.space.turned().as_ref() != Some(space) {
            return group.folds.clone();
        }
        let is_whole = |&root: &Value| {
            self.graph.ty(root).as_tensor().is_some_and(|ty| ty.shape.numel() as i64 == space.total())
        };
        group.roots.iter().copied().filter(|root| !is_whole(root)).collect()
    }

    /// Whether two kernels over rows and over columns of a matrix save more than the sums of the parts cost.
    pub fn folding_pays(&self, a: &Group, b: &Group, space: &Space, new: usize) -> bool {
        let touched = |group: &Group| -> FxHashSet<Value> {
            group.lowered.loads.iter().chain(&group.roots).copied().collect()
        };
        let (of_a, of_b) = (touched(a), touched(b));
        let saved: i64 = of_a.intersection(&of_b).map(|&value| self.bytes(value)).sum();
        let all: i64 = of_a.union(&of_b).map(|&value| self.bytes(value)).sum();
        // Sums are written, read and read again, of elements of eight bytes at most.
        let cost = 3 * parts(space.outer()) * space.inner() * 8 * new as i64;
        saved > cost && all > CACHED
    }
}

/// A fold that something needs while rows are still worked on: it is complete only behind the last one.
pub(crate) fn needed_too_early(kernel: &Kernel, roots: &[LoweredRoot], folds: &[Value]) -> Option<Value> {
    if folds.is_empty() {
        return None;
    }
    let mut late: Vec<bool> = Vec::with_capacity(kernel.exprs.len());
    for (id, expr) in kernel.exprs.iter().enumerate() {
        let of_late = kernel.operands(id).iter().any(|&operand| late[operand]);
        let is_fold = matches!(expr.kind, ExprKind::Fold(..));
        if of_late && (is_fold || matches!(expr.kind, ExprKind::Reduce(..))) {
            return folds.first().copied();
        }
        late.push(is_fold || of_late);
    }
    roots.iter().find(|root| late[root.expr] && !folds.contains(&root.value)).map(|root| root.value)
}

/// Whether a kernel with folds runs along its rows as they lie in memory.
pub(crate) fn runs_well(group: &Group) -> bool {
    group.folds.is_empty() || goes_along_rows(&group.lowered.kernel)
}
