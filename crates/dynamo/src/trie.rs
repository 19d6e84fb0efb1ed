//! The trie of recordings: every path from the root is something the program did once. Nodes are only ever
//! added, so calls follow it without locks.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use smallvec::SmallVec;

use kiln_aot::trace::Variable;
use kiln_ir::{Op, ScalarKind, Ty};
use kiln_runtime::prefetch;

use crate::event::{CallEvent, Event, KeyArg, Made};
use crate::guard::Guard;
use crate::segment::Segment;
use crate::sizes;

/// A set of variables, as bits.
pub(crate) type LiveSet = SmallVec<[u64; 4]>;

/// An op on known variables and numbers, in a form that is compared at once: three words, put together in
/// registers. Most of a recording is such ops. Attributes are not in it.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Quick {
    /// Op, number of operands, in place or not, grad mode.
    head: u64,
    /// Two operands in a word: a variable's number, or kind and class of a number marked by the highest bit.
    low: u64,
    high: u64,
}

impl Quick {
    /// Of what has no such form; equal to no op's key.
    const NONE: Quick = Quick { head: u64::MAX, low: 0, high: 0 };

    /// Whether the keys are equal. Word by word: were they compared as one value, they would be put into memory
    /// first, and to read them again in other pieces takes as long as all the rest.
    #[inline(always)]
    pub(crate) fn is(self, other: &Quick) -> bool {
        (self.head ^ other.head) | (self.low ^ other.low) | (self.high ^ other.high) == 0
    }

    /// More operands than this and there is no such form.
    pub(crate) const MOST_ARGS: usize = 4;

    /// The key of an op with these operands, at most `MOST_ARGS`. `word` tells an operand, by place, in 32 bits.
    #[inline(always)]
    pub(crate) fn new<A>(
        op: &Op,
        in_place: bool,
        grad_enabled: bool,
        args: &[A],
        mut word: impl FnMut(usize, &A) -> u64,
    ) -> Quick {
        let (mut low, mut high) = (0, 0);
        for (place, arg) in args.iter().enumerate() {
            high = high << 32 | low >> 32;
            low = low << 32 | word(place, arg);
        }
        let modes = u64::from(in_place) << 1 | u64::from(grad_enabled);
        Quick { head: (op.index() as u64) << 16 | (args.len() as u64) << 8 | modes, low, high }
    }

    /// A number as an operand.
    #[inline]
    pub(crate) fn number(kind: ScalarKind, class: u8) -> u64 {
        1 << 31 | (kind as u64) << 8 | u64::from(class)
    }

    fn of(event: &Event) -> Quick {
        let word = |_: usize, arg: &KeyArg| match arg {
            KeyArg::Variable(v) => u64::from(*v),
            KeyArg::Number(kind, class) => Quick::number(*kind, *class),
        };
        match event {
            Event::Call(call) if call.guards.is_empty() && call.args.len() <= Quick::MOST_ARGS => {
                match &call.made {
                    Made::Changed { alike, .. } if !alike.is_empty() => Quick::NONE,
                    Made::Variable { ty: Ty::Tensor(_), .. } | Made::Changed { .. } => {
                        Quick::new(&call.op, call.in_place, call.grad_enabled, &call.args, word)
                    }
                    Made::Variable { .. } => Quick::NONE,
                }
            }
            _ => Quick::NONE,
        }
    }
}

/// A list whose elements all arrived with it, next to each other and none sharing memory with another input.
/// Neighbours mostly are alike, so what must hold is kept once for each run of them: with a thousand elements
/// the guards one by one would be read from memory on every call.
pub(crate) struct Packed {
    first: Variable,
    count: usize,
    grad_enabled: bool,
    runs: Vec<(usize, Guard)>,
}

impl Packed {
    fn of(event: &Event) -> Option<Packed> {
        let Event::Call(CallEvent { op: Op::List {}, in_place: false, grad_enabled, args, guards, .. }) =
            event
        else {
            return None;
        };
        let (first, count) = (guards.first()?.variable, guards.len());
        let arrived = |(i, guard): (usize, &Guard)| {
            let variable = first + i as Variable;
            guard.variable == variable
                && guard.shares_with.is_none()
                && args.get(i) == Some(&KeyArg::Variable(variable))
        };
        if args.len() != count || !guards.iter().enumerate().all(arrived) {
            return None;
        }
        let mut runs: Vec<(usize, Guard)> = Vec::new();
        for guard in guards {
            match runs.last_mut() {
                Some((length, before)) if before.is_like(guard) => *length += 1,
                _ => runs.push((1, guard.clone())),
            }
        }
        Some(Packed { first, count, grad_enabled: *grad_enabled, runs })
    }

    /// Whether a list of this length, whose elements would be numbered from `first`, can be this one.
    pub(crate) fn fits(&self, first: Variable, count: usize, grad_enabled: bool) -> bool {
        self.first == first && self.count == count && self.grad_enabled == grad_enabled
    }

    /// What must hold of each element; the numbers of the variables are not to be looked at.
    pub(crate) fn guards(&self) -> impl Iterator<Item = &Guard> {
        self.runs.iter().flat_map(|(length, guard)| std::iter::repeat_n(guard, *length))
    }
}

pub(crate) struct Node {
    quick: Quick,
    first_child: AtomicU32,
    next_sibling: AtomicU32,
    pub(crate) parent: u32,
    /// For an op: whether gradients flow through its result.
    requires_grad: bool,
    packed: Option<Box<Packed>>,
    /// The way from the root to here, but for sizes.
    pub(crate) form: u64,
    pub(crate) event: Box<Event>,
    /// Segments that end here, by what was live.
    ends: OnceLock<Box<boxcar::Vec<(LiveSet, Arc<Segment>)>>>,
}

pub(crate) const ROOT: u32 = 0;

/// How many nodes ahead of its turn one is asked for.
const AHEAD: usize = 3;

/// The recordings of one region.
pub(crate) struct Trie {
    nodes: boxcar::Vec<Node>,
    /// Taken to add nodes and segments.
    growing: Mutex<()>,
}

fn node(parent: u32, form: u64, event: Event) -> Node {
    let requires_grad = match &event {
        Event::Call(CallEvent {
            made: Made::Variable { requires_grad, .. } | Made::Changed { requires_grad, .. },
            ..
        }) => *requires_grad,
        _ => false,
    };
    Node {
        parent,
        first_child: AtomicU32::new(0),
        next_sibling: AtomicU32::new(0),
        requires_grad,
        quick: Quick::of(&event),
        packed: Packed::of(&event).map(Box::new),
        form: sizes::form(form, &event),
        event: Box::new(event),
        ends: OnceLock::new(),
    }
}

impl Trie {
    pub(crate) fn new() -> Trie {
        let nodes = boxcar::Vec::new();
        nodes.push(node(ROOT, 0, Event::Start));
        Trie { nodes, growing: Mutex::new(()) }
    }

    /// One that goes on where another is: forms are the same there.
    pub(crate) fn behind(other: &Trie, at: u32) -> Trie {
        let nodes = boxcar::Vec::new();
        nodes.push(Node { form: other.node(at).form, ..node(ROOT, 0, Event::Start) });
        Trie { nodes, growing: Mutex::new(()) }
    }

    /// Adds the events from the beginning of another trie to a node of it behind `at`. Returns where that leads,
    /// and what became of each node on the way.
    pub(crate) fn graft(&self, at: u32, other: &Trie, to: u32) -> (u32, Vec<(u32, u32)>) {
        let mut way = Vec::new();
        let mut index = to;
        while index != ROOT {
            way.push(index);
            index = other.node(index).parent;
        }
        let (mut end, mut places) = (at, vec![(ROOT, at)]);
        for index in way.into_iter().rev() {
            end = self.insert(end, (*other.node(index).event).clone());
            places.push((index, end));
        }
        (end, places)
    }

    #[inline]
    pub(crate) fn node(&self, index: u32) -> &Node {
        &self.nodes[index as usize]
    }

    /// Number of nodes.
    pub(crate) fn len(&self) -> usize {
        self.nodes.count()
    }

    /// The child recorded first, 0 if there is none.
    #[inline]
    pub(crate) fn first_child(&self, parent: u32) -> u32 {
        self.node(parent).first_child.load(Ordering::Acquire)
    }

    /// If a node is this op with this key: its own first child, and whether gradients flow through its result.
    #[inline(always)]
    pub(crate) fn follow(&self, index: u32, op: &Op, quick: Quick) -> Option<(u32, bool)> {
        let node = self.node(index);
        // Nodes mostly lie in the order in which they are followed, and a long recording is more than the
        // first-level cache holds.
        let later = std::ptr::from_ref(node).wrapping_add(AHEAD);
        prefetch(later);
        prefetch(later.wrapping_byte_add(64));
        let fits = quick.is(&node.quick) && (op.row().attributes.is_empty() || node.event.is_call_of(op));
        fits.then(|| (node.first_child.load(Ordering::Acquire), node.requires_grad))
    }

    /// The child recorded first, if it packs a list of tensors that arrived with it.
    pub(crate) fn packed(&self, parent: u32) -> Option<(u32, &Packed)> {
        let child = self.node(parent).first_child.load(Ordering::Acquire);
        let packed = self.node(child).packed.as_deref()?;
        (child != 0).then_some((child, packed))
    }

    /// The child whose event fits, if there is one.
    #[inline]
    pub(crate) fn find(&self, parent: u32, fits: impl Fn(&Event) -> bool) -> Option<u32> {
        let mut child = self.node(parent).first_child.load(Ordering::Acquire);
        while child != 0 {
            let node = self.node(child);
            if fits(&node.event) {
                return Some(child);
            }
            child = node.next_sibling.load(Ordering::Acquire);
        }
        None
    }

    pub(crate) fn children(&self, parent: u32) -> Vec<u32> {
        let mut all = Vec::new();
        let mut child = self.node(parent).first_child.load(Ordering::Acquire);
        while child != 0 {
            all.push(child);
            child = self.node(child).next_sibling.load(Ordering::Acquire);
        }
        all
    }

    /// Adds a child, unless another thread just added the same.
    pub(crate) fn insert(&self, parent: u32, event: Event) -> u32 {
        let _growing = self.growing.lock();
        if let Some(child) = self.find(parent, |other| *other == event) {
            return child;
        }
        let index = self.nodes.push(node(parent, self.node(parent).form, event)) as u32;
        match self.children(parent).last() {
            None => self.node(parent).first_child.store(index, Ordering::Release),
            Some(&last) => self.node(last).next_sibling.store(index, Ordering::Release),
        }
        index
    }

    /// The segment that ends at a node with this live set.
    #[inline]
    pub(crate) fn segment(&self, at: u32, live: &LiveSet) -> Option<&Arc<Segment>> {
        let ends = self.node(at).ends.get()?;
        ends.iter().find(|(_, (set, _))| set == live).map(|(_, (_, segment))| segment)
    }

    pub(crate) fn add_segment(&self, at: u32, live: LiveSet, segment: Arc<Segment>) -> Arc<Segment> {
        let _growing = self.growing.lock();
        if let Some(there) = self.segment(at, &live) {
            return there.clone();
        }
        self.node(at).ends.get_or_init(Default::default).push((live, segment.clone()));
        segment
    }

    /// Every segment with the node it ends at and what was live, in the order of the nodes.
    pub(crate) fn segments(&self) -> Vec<(u32, LiveSet, Arc<Segment>)> {
        let mut all = Vec::new();
        for (at, node) in self.nodes.iter() {
            for (_, (live, segment)) in node.ends.get().iter().flat_map(|ends| ends.iter()) {
                all.push((at as u32, live.clone(), segment.clone()));
            }
        }
        all
    }

    /// The nodes of the segment that ends at `at`, in order; the break or start before it is left out.
    pub(crate) fn path(&self, at: u32) -> Vec<u32> {
        let mut path = Vec::new();
        let mut index = at;
        while !matches!(*self.node(index).event, Event::Start | Event::Break) {
            path.push(index);
            index = self.node(index).parent;
        }
        path.reverse();
        path
    }
}
