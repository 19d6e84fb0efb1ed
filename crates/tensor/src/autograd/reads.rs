//! Which values of a call are saved: those that its rule reads, for the gradients that are wanted.
//!
//! A rule is asked once for each kind of call, and the answer is remembered: by thread for each op, types and wanted
//! gradients, and by process for calls whose tensors are all of one type.

use std::cell::RefCell;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU16, Ordering};

use kiln_ir::{Op, Reads, Result, Ty};
use rustc_hash::{FxHashMap, FxHasher};
use smallvec::SmallVec;

use super::node::Edge;
use crate::dispatch::arg_tys;
use crate::hook::{Arg, Call};

/// An answer, with all that it depends on.
#[derive(Clone)]
struct Known {
    op: Op,
    tys: SmallVec<[Ty; 4]>,
    needs: SmallVec<[bool; 4]>,
    reads: Reads,
}

/// Kinds of calls that are remembered; a program with more starts over.
const MOST: usize = 1 << 12;

thread_local! {
    /// The last answer of each row: most calls are like the one before.
    static LAST: RefCell<Vec<Option<Known>>> = const { RefCell::new(Vec::new()) };
    static KNOWN: RefCell<FxHashMap<u64, Known>> = RefCell::default();
}

/// Answers for ops without attributes and optional operands on a few tensors of one type, by row, by the operands that want a gradient and
/// by those that are numbers: such rules look at nothing else. Zero is none yet.
static OF_ONE_TYPE: [[AtomicU16; 256]; Op::ROWS.len()] =
    [const { [const { AtomicU16::new(0) }; 256] }; Op::ROWS.len()];

/// Says that there is an answer.
const THERE: u16 = 1 << 15;

/// [`reads`] for a call whose tensors are all of the result's type, which is most calls.
#[inline]
pub(super) fn reads_of_one_type(call: &Call<'_>, edges: &[Edge]) -> Result<Reads> {
    let row = call.op.row();
    if row.args.len() > 4 || call.args.len() != row.args.len() || !row.attributes.is_empty() {
        return reads(call, edges);
    }
    let mut kind = 0;
    for (i, (arg, edge)) in call.args.iter().zip(edges).enumerate() {
        kind |= usize::from(wants(edge)) << i | usize::from(matches!(arg, Arg::Number(_))) << (4 + i);
    }
    let place = &OF_ONE_TYPE[call.op.index()][kind];
    // The answer is all there is: nothing else has to be seen with it.
    match place.load(Ordering::Relaxed) {
        0 => {
            let reads = reads(call, edges)?;
            place.store(reads.packed() | THERE, Ordering::Relaxed);
            Ok(reads)
        }
        packed => Ok(Reads::unpacked(packed)),
    }
}

fn wants(edge: &Edge) -> bool {
    !matches!(edge, Edge::None)
}

impl Known {
    fn is_of(&self, call: &Call<'_>, edges: &[Edge]) -> bool {
        let same = |(arg, ty): (&Arg<'_>, &Ty)| match (arg, ty) {
            (Arg::Number(x), Ty::Scalar(kind)) => x.kind() == *kind,
            (Arg::Tensor(t), Ty::Tensor(ty)) => {
                t.try_ready().is_some_and(|ready| ready.dtype == ty.dtype && ready.layout.shape == ty.shape)
            }
            _ => false,
        };
        self.tys.len() == call.args.len()
            && self.op == *call.op
            && self.needs.iter().copied().eq(edges.iter().map(wants))
            && call.args.iter().zip(&self.tys).all(same)
    }
}

/// A number for all that an answer depends on; others may have it, too.
fn kind(call: &Call<'_>, edges: &[Edge]) -> u64 {
    let mut hasher = FxHasher::default();
    call.op.index().hash(&mut hasher);
    for (arg, edge) in call.args.iter().zip(edges) {
        wants(edge).hash(&mut hasher);
        match arg {
            Arg::Number(x) => x.kind().hash(&mut hasher),
            Arg::Tensor(t) => {
                if let Some(ready) = t.try_ready() {
                    (ready.dtype, &ready.layout.shape[..]).hash(&mut hasher);
                }
            }
            Arg::List(_) => {}
        }
    }
    hasher.finish()
}

/// What the rule of a call reads, given where its operands' gradients go.
pub(super) fn reads(call: &Call<'_>, edges: &[Edge]) -> Result<Reads> {
    let row = call.op.index();
    LAST.with_borrow_mut(|last| {
        if let Some(Some(known)) = last.get(row)
            && known.is_of(call, edges)
        {
            return Ok(known.reads);
        }
        let known = known(call, edges)?;
        let reads = known.reads;
        if last.len() <= row {
            last.resize(Op::ROWS.len(), None);
        }
        last[row] = Some(known);
        Ok(reads)
    })
}

/// The answer for a call that is not like the last one of its row.
#[cold]
fn known(call: &Call<'_>, edges: &[Edge]) -> Result<Known> {
    let kind = kind(call, edges);
    let found = KNOWN.with_borrow(|known| known.get(&kind).filter(|known| known.is_of(call, edges)).cloned());
    if let Some(known) = found {
        return Ok(known);
    }
    let tys = arg_tys(call.args)?;
    let needs: SmallVec<[bool; 4]> = edges.iter().map(wants).collect();
    let result = call.op.infer(&tys).map_err(|why| call.op.error(&tys, why, call.loc))?;
    // A rule that fails does so when it is run, and says why.
    let reads = Reads::of(call.op, &tys, &result[0], &needs).unwrap_or(Reads::ALL);
    let made = Known { op: call.op.clone(), tys, needs, reads };
    KNOWN.with_borrow_mut(|known| {
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(kind, made.clone());
    });
    Ok(made)
}
