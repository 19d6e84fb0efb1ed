//! Epilogues of matrix products and convolutions: a kernel that reads a product row by row runs on each band of rows
//! as soon as the product has finished it, while the band is in the cache, and not in a pass over memory afterwards.
//! One that reads a convolution's result pixel by pixel runs on the pixels of some planes, likewise.
//!
//! The kernel stays the step after the product's: the product's step only says that the two go together, and
//! which items belong to which rows. Whoever runs them one after the other gets the same result, and so it is done
//! with products too small to be cut into bands.

use kiln_ir::{DType, Op, TensorTy, Ty};

use crate::WhyNot;
use crate::assemble::Loops;
use crate::c;
use crate::index::{Index, Term};
use crate::loops::{ExprKind, Kernel, Mode};
use crate::plan::{BufferId, BufferPlan, BufferRef, Epilogue, OnPlanes, Place, Step, ViewRef};
use crate::temporaries::InPlace;

/// What keeps a kernel from being the epilogue of the product before it.
fn refusal(reason: &'static str) -> WhyNot {
    WhyNot::Epilogue { reason }
}

/// Finds out which kernels go on with what the step before them makes, a product or a convolution. `loops` are the
/// kernels' by step. Says what keeps others from it.
pub(crate) fn connect(steps: &mut [Step], loops: &[Option<Loops>]) -> Vec<WhyNot> {
    let mut why_not = Vec::new();
    for s in 1..steps.len() {
        let (before, after) = steps.split_at_mut(s);
        let (Step::Kernel { bufs, items, checks, .. }, Some(loops)) = (&after[0], &loops[s]) else {
            continue;
        };
        let may_follow =
            |operands: [BufferId; 2], result| may_follow(bufs, !checks.is_empty(), operands, result);
        match &mut before[s - 1] {
            Step::Gemm { m, n, lhs, rhs, dst, epilogue, .. } => {
                let (result, size) = (dst.at.buffer, [*m as i64, *n as i64]);
                let found = may_follow([lhs.at.buffer, rhs.at.buffer], result);
                let found =
                    found.map(|may| may.and_then(|()| by_rows(&loops.kernel, *items, bufs, result, size)));
                *epilogue = found.and_then(|found| found.map_err(|why| why_not.push(why)).ok());
            }
            Step::Convolution { op, x, weight, dst, dtype, epilogue, .. } => {
                let found = may_follow([x.at.buffer, weight.at.buffer], *dst);
                let found = found.map(|may| {
                    may.and_then(|()| on_planes(loops, bufs, *dst, planes(op, x, weight, *dtype)))
                });
                *epilogue = found.and_then(|found| found.map_err(|why| why_not.push(why)).ok());
            }
            _ => {}
        }
    }
    why_not
}

/// Whether a kernel may run on parts of a result that is not there as a whole; `None` if it has nothing to do with it.
fn may_follow(
    slots: &[BufferRef],
    is_checked: bool,
    operands: [BufferId; 2],
    result: BufferId,
) -> Option<Result<(), WhyNot>> {
    if !slots.iter().any(|slot| slot.buffer == result) {
        return None;
    }
    if slots.iter().any(|slot| operands.contains(&slot.buffer)) {
        return Some(Err(refusal("it touches an operand of the product, too")));
    }
    Some(if is_checked { Err(refusal("it checks indices")) } else { Ok(()) })
}

/// How a kernel goes on with the rows of a product.
fn by_rows(
    kernel: &Kernel,
    items: i64,
    slots: &[BufferRef],
    product: BufferId,
    [m, n]: [i64; 2],
) -> Result<Epilogue, WhyNot> {
    let Some((items, span)) = stride(kernel, items) else {
        return Err(refusal("its loops don't go along the product's rows"));
    };
    if !reads_in_order(kernel, slots, product, span, m * n) {
        return Err(refusal("it reads the product in another order"));
    }
    rows(items, span, n)
}

/// The planes of a convolution's result, and the pixels of each.
fn planes(op: &Op, x: &ViewRef, weight: &ViewRef, dtype: DType) -> [i64; 2] {
    let ty = |view: &ViewRef| Ty::Tensor(TensorTy::new(dtype, view.shape.clone()));
    let made = op.infer(&[ty(x), ty(weight)]).ok();
    let shape =
        made.and_then(|made| made.first()?.as_tensor().map(|ty| ty.shape.clone())).unwrap_or_default();
    let count = |dims: &[usize]| dims.iter().product::<usize>() as i64;
    let (planes, pixels) = shape.split_at(2.min(shape.rank()));
    [count(planes), count(pixels)]
}

/// How a kernel goes on with pixels of some planes of a convolution's result.
fn on_planes(
    loops: &Loops,
    slots: &[BufferRef],
    result: BufferId,
    [planes, pixels]: [i64; 2],
) -> Result<OnPlanes, WhyNot> {
    let kernel = &loops.kernel;
    let vector = kernel.vector_axis();
    let length = kernel.axes[vector].extent;
    let is_one_loop = kernel.outer() == 1;
    let Some([length_at, width, blocks]) = loops.arguments.blocks(vector) else {
        return Err(refusal("its loops don't go along planes"));
    };
    if kernel.mode != Mode::Map || length != if is_one_loop { planes * pixels } else { pixels } {
        return Err(refusal("its loops don't go along planes"));
    }
    if !reads_in_order(kernel, slots, result, length, planes * pixels) {
        return Err(refusal("it reads the planes in another order"));
    }
    // What lies a number of elements further with every pixel can begin at any of them.
    let mut steps: Vec<Option<i64>> = vec![None; slots.len()];
    let loads = kernel.exprs.iter().map(|expr| match &expr.kind {
        ExprKind::Load { buffer, index } => Some((Some(*buffer), index)),
        ExprKind::Position(index) => Some((None, index)),
        _ => None,
    });
    let stores = kernel.stores.iter().map(|store| (Some(store.buffer), &store.index));
    for (buffer, index) in loads.flatten().chain(stores) {
        let is_plain = match buffer {
            Some(_) => !index.is_nested(vector),
            None => !index.mentions(vector),
        };
        let step = index.factor(vector);
        let is_same = buffer.is_none_or(|buffer| *steps[buffer].get_or_insert(step) == step);
        if !is_plain || !is_same {
            return Err(refusal("what it reads does not follow the pixels"));
        }
    }
    let steps = steps.into_iter().map(Option::unwrap_or_default).collect();
    Ok(OnPlanes { pixels: pixels as usize, is_one_loop, steps, length: length_at, width, blocks })
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
        let product = &mut before[s];
        let (operands, dst) = match product {
            Step::Gemm { lhs, rhs, dst, .. } => ([lhs.at.buffer, rhs.at.buffer], dst.at.buffer),
            Step::Convolution { x, weight, dst, .. } => ([x.at.buffer, weight.at.buffer], *dst),
            _ => continue,
        };
        let (true, Step::Kernel { bufs, .. }) = (product.has_epilogue(), &after[0]) else { continue };
        let life = |buffer: BufferId| lives[buffer.index()].unwrap_or_default();
        let dies = |buffer: BufferId| is_temporary(buffer) && life(buffer).1 == s;
        let takes_place =
            |buffer: BufferId| in_place.contains(&InPlace { step: s + 1, from: dst, to: buffer });
        let mut fresh: Vec<BufferId> =
            bufs.iter().map(|slot| slot.buffer).filter(|&b| life(b).0 == s + 1).collect();
        fresh.sort_unstable();
        fresh.dedup();
        let goes_there =
            life(dst).1 == s + 1 && is_temporary(dst) && matches!(fresh[..], [only] if takes_place(only));
        // An output's memory is there anyway; but an operand could have lain in it.
        let is_in_the_way = |operand: BufferId| {
            dies(operand)
                && fresh.iter().any(|&result| is_temporary(result) || bytes(operand) <= bytes(result))
        };
        if !goes_there && operands.into_iter().any(is_in_the_way) {
            match product {
                Step::Gemm { epilogue, .. } => *epilogue = None,
                Step::Convolution { epilogue, .. } => *epilogue = None,
                _ => {}
            }
            why_not.push(refusal("the product's operands would be in memory together with its results"));
        }
    }
    why_not
}
