//! Epilogues of matrix products: a kernel that reads a product row by row runs on each band of rows as soon as the
//! product has finished it, while the band is in the cache, and not in a pass over memory afterwards.
//!
//! The kernel stays the step after the product's: the product's step only says that the two go together, and
//! which items belong to which rows. Whoever runs them one after the other gets the same result, and so it is done
//! with products too small to be cut into bands.

use crate::WhyNot;
use crate::assemble::Loops;
use crate::c;
use crate::index::{Index, Term};
use crate::loops::{ExprKind, Kernel, Mode};
use crate::plan::{BufferId, BufferPlan, BufferRef, Epilogue, Place, Step};
use crate::temporaries::InPlace;

/// What keeps a kernel from being the epilogue of the product before it.
fn refusal(reason: &'static str) -> WhyNot {
    WhyNot::Epilogue { reason }
}

/// Finds out which kernels go on with the rows of the product in the step before them. `loops` are the kernels' by
/// step. Says what keeps others from it.
pub(crate) fn connect(steps: &mut [Step], loops: &[Option<Loops>]) -> Vec<WhyNot> {
    let mut why_not = Vec::new();
    for s in 1..steps.len() {
        let (before, after) = steps.split_at_mut(s);
        let (Step::Kernel { bufs, items, checks, .. }, Some(loops)) = (&after[0], &loops[s]) else {
            continue;
        };
        let found = find(&before[s - 1], &loops.kernel, *items, bufs, !checks.is_empty());
        if let Step::Gemm { epilogue, .. } = &mut before[s - 1] {
            *epilogue = found.and_then(|found| found.map_err(|why| why_not.push(why)).ok());
        }
    }
    why_not
}

/// How a kernel, which is the step after `product`, goes on with its rows; `None` if it has nothing to do with that
/// step, or that is no product.
fn find(
    product: &Step,
    kernel: &Kernel,
    items: i64,
    slots: &[BufferRef],
    is_checked: bool,
) -> Option<Result<Epilogue, WhyNot>> {
    let Step::Gemm { m, n, lhs, rhs, dst, .. } = product else { return None };
    let product = dst.at.buffer;
    if !slots.iter().any(|slot| slot.buffer == product) {
        return None;
    }
    let is_operand = |slot: &BufferRef| [lhs.at.buffer, rhs.at.buffer].contains(&slot.buffer);
    if slots.iter().any(is_operand) {
        return Some(Err(refusal("it touches an operand of the product, too")));
    }
    if is_checked {
        return Some(Err(refusal("it checks indices")));
    }
    let Some((items, span)) = stride(kernel, items) else {
        return Some(Err(refusal("its loops don't go along the product's rows")));
    };
    if !reads_in_order(kernel, slots, product, span, *m as i64 * *n as i64) {
        return Some(Err(refusal("it reads the product in another order")));
    }
    Some(rows(items, span, *n as i64))
}

/// Which items belong to which rows of `n` elements, if `items` of them cover `span` elements.
pub(crate) fn rows(items: i64, span: i64, n: i64) -> Result<Epilogue, WhyNot> {
    match (span % n, n % span) {
        (0, _) => Ok(Epilogue { rows: (span / n) as usize, items }),
        (_, 0) => Ok(Epilogue { rows: 1, items: items * (n / span) }),
        _ => Err(refusal("its items end inside of rows")),
    }
}

/// So many items in a row, and the elements of a dense matrix they would cover together.
pub(crate) fn stride(kernel: &Kernel, items: i64) -> Option<(i64, i64)> {
    if kernel.chunk.is_some() || kernel.parts.is_some() {
        return None;
    }
    match kernel.mode {
        Mode::Map => {
            let length = kernel.axes[kernel.vector_axis()].extent;
            let blocks = (length + c::CHUNK - 1) / c::CHUNK;
            match kernel.outer() {
                // A single loop is cut into pieces of the same length.
                1 if blocks > 1 => Some((1, c::CHUNK)),
                _ => Some((blocks, length)),
            }
        }
        Mode::Rows => {
            let length = kernel.axes[kernel.vector_axis()].extent;
            let inner = kernel.axes.iter().filter(|axis| axis.inner).count();
            (inner == 1 && items > 0).then_some((1, length))
        }
        Mode::Columns | Mode::Table => None,
    }
    .filter(|(items, span)| *items > 0 && *span > 0)
}

/// Whether all loads and stores of the product's memory go through it from front to back with the loops, all of
/// it once.
pub(crate) fn reads_in_order(
    kernel: &Kernel,
    slots: &[BufferRef],
    product: BufferId,
    span: i64,
    count: i64,
) -> bool {
    let vector = kernel.vector_axis();
    let axes: Vec<usize> = (0..kernel.axes.len()).filter(|&a| !kernel.axes[a].inner || a == vector).collect();
    let total: i64 = axes.iter().map(|&a| kernel.axes[a].extent).product();
    if total != count {
        return false;
    }
    let in_order = |index: &Index| {
        let mut step = 1;
        let dense = axes.iter().rev().all(|&a| {
            let fits = index.factor(a) == step || kernel.axes[a].extent == 1;
            step *= kernel.axes[a].extent;
            fits
        });
        dense
            && index.constant == 0
            && index.terms.iter().all(|(term, _)| matches!(term, Term::Axis(a) if axes.contains(a)))
    };
    let here = |buffer: usize| slots[buffer].buffer == product;
    let loads = kernel.exprs.iter().filter_map(|expr| match &expr.kind {
        ExprKind::Load { buffer, index } => Some((*buffer, index)),
        _ => None,
    });
    let accesses = loads.chain(kernel.stores.iter().map(|store| (store.buffer, &store.index)));
    span > 0
        && accesses
            .filter(|(buffer, _)| here(*buffer))
            .all(|(buffer, index)| slots[buffer].offset == 0 && in_order(index))
}

/// Takes back the epilogues that would need more memory: while a product runs its operands are there, and with an
/// epilogue its kernel's results, too. `lives` are the steps that use each buffer first and last, `in_place` the
/// results that may lie where an operand does.
pub(crate) fn keep_memory(
    steps: &mut [Step],
    lives: &[Option<(usize, usize)>],
    in_place: &[InPlace],
    buffers: &[BufferPlan],
) -> Vec<WhyNot> {
    let is_temporary = |buffer: BufferId| matches!(buffers[buffer.index()].place, Place::Arena { .. });
    let bytes = |buffer: BufferId| buffers[buffer.index()].ty.bytes;
    let mut why_not = Vec::new();
    for s in 0..steps.len().saturating_sub(1) {
        let (before, after) = steps.split_at_mut(s + 1);
        let Step::Gemm { lhs, rhs, dst, epilogue, .. } = &mut before[s] else { continue };
        if epilogue.is_none() {
            continue;
        }
        let Step::Kernel { bufs, .. } = &after[0] else {
            *epilogue = None;
            continue;
        };
        let life = |buffer: BufferId| lives[buffer.index()].unwrap_or_default();
        let dies = |buffer: BufferId| is_temporary(buffer) && life(buffer).1 == s;
        let takes_place =
            |buffer: BufferId| in_place.contains(&InPlace { step: s + 1, from: dst.at.buffer, to: buffer });
        let mut fresh: Vec<BufferId> =
            bufs.iter().map(|slot| slot.buffer).filter(|&b| life(b).0 == s + 1).collect();
        fresh.sort_unstable();
        fresh.dedup();
        let goes_there = life(dst.at.buffer).1 == s + 1
            && is_temporary(dst.at.buffer)
            && matches!(fresh[..], [only] if takes_place(only));
        // An output's memory is there anyway; but an operand could have lain in it.
        let is_in_the_way = |operand: BufferId| {
            dies(operand)
                && fresh.iter().any(|&result| is_temporary(result) || bytes(operand) <= bytes(result))
        };
        if !goes_there && [lhs.at.buffer, rhs.at.buffer].into_iter().any(is_in_the_way) {
            *epilogue = None;
            why_not.push(refusal("the product's operands would be in memory together with its results"));
        }
    }
    why_not
}
