//! Sizes: the same ops on tensors of other sizes are the same graph.
//!
//! Kernels take extents and strides as arguments, so another size needs no new code, only another plan: which
//! buffers, how long, in which arguments. What is kept here is which recordings differ in nothing else, so that a
//! function that is called with many sizes is not taken for one that goes another way each time.
//!
//! Two sizes may be all there are (a batch, and what is left at the end), and one may never come again: the second
//! size runs op by op, as in eager mode, and is planned for itself if it comes again. From the third on one plan
//! serves many sizes, if the graph allows it (see [`general`](crate::general)).

use std::hash::{Hash, Hasher};

use rustc_hash::{FxHashMap, FxHashSet, FxHasher};

use kiln_ir::{Op, Ty};

use crate::event::{CallEvent, Event, Made};
use crate::guard::{Guard, Wanted};
use crate::trie::{LiveSet, Trie};

/// What is left of an event when sizes are not looked at. 0 and 1 are: an empty tensor and one that is
/// repeated are computed with other code.
pub(crate) fn form(before: u64, event: &Event) -> u64 {
    let mut hash = FxHasher::default();
    before.hash(&mut hash);
    std::mem::discriminant(event).hash(&mut hash);
    match event {
        Event::Start | Event::Break => {}
        Event::Call(call) => form_of_call(call, &mut hash),
        Event::Backward(event) => {
            (&event.outputs, event.retain_graph).hash(&mut hash);
            for (variable, target, outside) in &event.targets {
                (variable, std::mem::discriminant(target), outside).hash(&mut hash);
            }
            event.guards.iter().for_each(|guard| form_of_guard(guard, &mut hash));
        }
        Event::Mark(event) => (event.mark, event.variable).hash(&mut hash),
        Event::Apply(event) => {
            (&event.inputs, &event.outputs).hash(&mut hash);
            event.guards.iter().for_each(|guard| form_of_guard(guard, &mut hash));
        }
        Event::Grad(event) => {
            (&event.key, &event.found, &event.reached).hash(&mut hash);
            event.guards.iter().for_each(|guard| form_of_guard(guard, &mut hash));
        }
    }
    hash.finish()
}

fn form_of_call(call: &CallEvent, hash: &mut FxHasher) {
    (call.op.index(), call.in_place, call.grad_enabled).hash(hash);
    for (name, value) in call.op.attributes() {
        if !call.op.goes_with_sizes(name) {
            value.hash(hash);
        }
    }
    call.args.hash(hash);
    call.guards.iter().for_each(|guard| form_of_guard(guard, hash));
}

fn form_of_guard(guard: &Guard, hash: &mut FxHasher) {
    (guard.variable, guard.shares_with, guard.form).hash(hash);
}

/// Whether two events differ in sizes alone.
pub(crate) fn alike(a: &Event, b: &Event) -> bool {
    let inputs = |a: &[Guard], b: &[Guard]| {
        let same = |(a, b): (&Guard, &Guard)| {
            (a.variable, a.shares_with, a.form) == (b.variable, b.shares_with, b.form)
                && (a.dtype, a.device, a.requires_grad, a.leaf)
                    == (b.dtype, b.device, b.requires_grad, b.leaf)
                && a.shape.rank() == b.shape.rank()
        };
        a.len() == b.len() && a.iter().zip(b).all(same)
    };
    if !inputs(a.guards(), b.guards()) {
        return false;
    }
    match (a, b) {
        (Event::Start, Event::Start) | (Event::Break, Event::Break) => true,
        (Event::Call(a), Event::Call(b)) => {
            let made = match (&a.made, &b.made) {
                (
                    Made::Variable { requires_grad: a, ty: Ty::Tensor(x) },
                    Made::Variable { requires_grad: b, ty: Ty::Tensor(y) },
                ) => a == b && (x.dtype, x.device, x.shape.rank()) == (y.dtype, y.device, y.shape.rank()),
                (Made::Variable { .. }, Made::Variable { .. })
                | (Made::Changed { .. }, Made::Changed { .. }) => a.made == b.made,
                _ => false,
            };
            let same = (a.in_place, a.grad_enabled, &a.args) == (b.in_place, b.grad_enabled, &b.args);
            made && same && (a.op == b.op || sizeless(&a.op) == sizeless(&b.op))
        }
        (Event::Backward(a), Event::Backward(b)) => {
            (&a.outputs, a.retain_graph, &a.targets) == (&b.outputs, b.retain_graph, &b.targets)
        }
        (Event::Grad(a), Event::Grad(b)) => (&a.key, &a.found, &a.reached) == (&b.key, &b.found, &b.reached),
        (Event::Mark(a), Event::Mark(b)) => (a.mark, a.variable) == (b.mark, b.variable),
        (Event::Apply(a), Event::Apply(b)) => (&a.inputs, &a.outputs) == (&b.inputs, &b.outputs),
        _ => false,
    }
}

/// An op without its sizes. How many there are shows.
fn sizeless(op: &Op) -> Op {
    let mut bare = op.clone();
    bare.each_number(&mut |name, number| {
        if op.goes_with_sizes(name) {
            *number = 0;
        }
    });
    bare
}

/// What is left of an input when sizes are not looked at.
pub(crate) fn form_of_input(wanted: &Wanted) -> u64 {
    let mut hash = FxHasher::default();
    (wanted.dtype, wanted.device).hash(&mut hash);
    let is_dense = wanted.strides == wanted.shape.contiguous_strides();
    (wanted.requires_grad, wanted.leaf, is_dense).hash(&mut hash);
    wanted.dynamic.hash(&mut hash);
    for &size in wanted.shape.iter() {
        size.min(2).hash(&mut hash);
    }
    hash.finish()
}

/// What becomes of a segment that was recorded and has no plan for what is live now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Sight {
    /// It is a graph of its own.
    New,
    /// A graph that is known, in other sizes.
    Known {
        /// Where its first recording ends.
        first: u32,
        /// Whether these sizes came before, and ran op by op.
        again: bool,
        /// Whether the user wants no size to wait.
        at_once: bool,
    },
}

/// The sizes in which a region's graphs came.
#[derive(Default)]
pub(crate) struct Sizes {
    /// For every graph, the node where its first recording ended.
    graphs: FxHashMap<(u64, LiveSet), u32>,
    /// Recordings that ran op by op once.
    once: FxHashSet<(u32, LiveSet)>,
    /// How often a known graph came with new sizes.
    pub(crate) count: usize,
}

impl Sizes {
    /// Where the first recording of a graph ends.
    pub(crate) fn first(&self, form: u64, live: &LiveSet) -> Option<u32> {
        self.graphs.get(&(form, live.clone())).copied()
    }

    /// Takes note of a segment that ends at node `at`. `at_once`: no size waits; those that the user announced
    /// don't in any case.
    pub(crate) fn sight(&mut self, trie: &Trie, at: u32, live: &LiveSet, at_once: bool) -> Sight {
        let first = *self.graphs.entry((trie.node(at).form, live.clone())).or_insert(at);
        if first == at {
            return Sight::New;
        }
        let again = self.once.remove(&(at, live.clone()));
        self.count += usize::from(!again);
        let at_once = at_once || announced(trie, first, at);
        if !again && !at_once {
            self.once.insert((at, live.clone()));
        }
        Sight::Known { first, again, at_once }
    }
}

/// A way that parted from a recording by its sizes alone. Whether it is the same graph shows at its end.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Parted {
    /// The node it would have gone to with the sizes recorded first.
    pub(crate) like: u32,
    /// The node it went to.
    pub(crate) to: u32,
}

/// Whether the user marked all dims in which the inputs of two recordings, which end at these nodes, differ.
fn announced(trie: &Trie, before: u32, now: u32) -> bool {
    let marked = |(before, now): (&Guard, &Guard)| {
        let mut dims = (0..now.shape.rank()).filter(|&d| before.shape.get(d) != now.shape.get(d));
        dims.all(|d| now.dynamic.iter().any(|mark| mark.dim == d))
    };
    let guards = |at: u32| trie.path(at).into_iter().flat_map(|index| trie.node(index).event.guards());
    let pairs = || guards(before).zip(guards(now));
    pairs().any(|(before, now)| before.shape != now.shape) && pairs().all(marked)
}
