//! Epilogues of matrix products and convolutions: a kernel that reads a product row by row runs on each band of rows
//! as soon as the product has finished it, while the band is in the cache, and not in a pass over memory afterwards.
//! One that reads a convolution's result pixel by pixel runs on the pixels of some planes, likewise.
//!
//! The kernel stays the step after the product's: the product's step only says that the two go together, and
//! which items belong to which rows. Whoever runs them one after the other gets the same result, and so it is done
//! with products too small to be cut into bands.

use kiln_ir::{DType, Op};

use crate::WhyNot;
use crate::assemble::Loops;
use crate::memory::temporaries::InPlace;
use kiln_plan::index::{Index, Term};
use kiln_plan::loops::{ExprKind, Kernel, Mode};
use kiln_plan::{
    BufferId, BufferPlan, BufferRef, Call, Epilogue, Launch, OnPlanes, Place, Step, Then, ViewRef, signature,
};

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
        let (Step::Call(call), Step::Launch(Launch { bufs, checks, .. }), Some(loops)) =
            (&mut before[s - 1], &after[0], &loops[s])
        else {
            continue;
        };
        let ([x, y], [out]) = (&call.args[..], &call.outs[..]) else { continue };
        let found = || {
            let result = out.at.buffer;
            let may = may_follow(bufs, !checks.is_empty(), [x.at.buffer, y.at.buffer], result)?;
            Some(may.and_then(|()| match call.op {
                Op::Mm {} => by_rows(&loops.kernel, bufs, out).map(Then::Rows),
                _ => on_planes(loops, bufs, out).map(Then::Planes),
            }))
        };
        let is_followed = matches!(call.op, Op::Mm {}) || is_own_convolution(call);
        let then = is_followed.then(found).flatten();
        call.then = then.and_then(|then| then.map_err(|why| why_not.push(why)).ok());
    }
    why_not
}

/// Whether a convolution is computed where its operands are, in the type of its result.
fn is_own_convolution(call: &Call) -> bool {
    let is_float = |view: &ViewRef| matches!(view.ty.dtype, DType::F32 | DType::F64);
    matches!(call.op, Op::Convolution { .. })
        && call.args.len() == 2
        && call.args.iter().all(ViewRef::is_dense)
        && call.outs.iter().all(is_float)
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
fn by_rows(kernel: &Kernel, slots: &[BufferRef], product: &ViewRef) -> Result<Epilogue, WhyNot> {
    let Some((items, span)) = signature::stride(kernel) else {
        return Err(refusal("its loops don't go along the product's rows"));
    };
    if !reads_in_order(kernel, slots, product.at.buffer, span, product.ty.shape.numel() as i64) {
        return Err(refusal("it reads the product in another order"));
    }
    rows(items, span, product.ty.shape[1] as i64)
}

/// How a kernel goes on with pixels of some planes of a convolution's result.
fn on_planes(loops: &Loops, slots: &[BufferRef], out: &ViewRef) -> Result<OnPlanes, WhyNot> {
    let (planes, pixels) = out.ty.shape.split_at(2.min(out.ty.shape.rank()));
    let [planes, pixels] = [planes, pixels].map(|dims| dims.iter().product::<usize>() as i64);
    let kernel = &loops.kernel;
    let vector = kernel.vector_axis();
    let length = kernel.axes[vector].extent;
    let is_one_loop = kernel.outer() == 1;
    let is_cut = loops.signature.blocks(vector).is_some();
    let is_in_order = kernel.mode == Mode::Map && signature::tiled(kernel).is_none();
    if !is_cut || !is_in_order || length != if is_one_loop { planes * pixels } else { pixels } {
        return Err(refusal("its loops don't go along planes"));
    }
    if !reads_in_order(kernel, slots, out.at.buffer, length, planes * pixels) {
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
    Ok(OnPlanes { pixels: pixels as usize, is_one_loop, steps })
}

/// Which items belong to which rows of `n` elements, if `items` of them cover `span` elements.
pub(crate) fn rows(items: i64, span: i64, n: i64) -> Result<Epilogue, WhyNot> {
    match (span % n, n % span) {
        (0, _) => Ok(Epilogue { rows: (span / n) as usize, items }),
        (_, 0) => Ok(Epilogue { rows: 1, items: items * (n / span) }),
        _ => Err(refusal("its items end inside of rows")),
    }
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
        let (Step::Call(call), Step::Launch(Launch { bufs, .. })) = (&mut before[s], &after[0]) else {
            continue;
        };
        if call.then.is_none() {
            continue;
        }
        let (mut operands, dst) = (call.args.iter().map(|arg| arg.at.buffer), call.outs[0].at.buffer);
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
        if !goes_there && operands.any(is_in_the_way) {
            call.then = None;
            why_not.push(refusal("the product's operands would be in memory together with its results"));
        }
    }
    why_not
}
