//! Values that several kernels need: stored, or computed again in each of them.
//!
//! What is decided about a value depends on what it is made of and on how many kernels need it, up to
//! [`MANY`]; values are looked at in the order of the graph, so that what lies before is decided. A layer is
//! therefore treated like its neighbours, however many there are, and layers share their kernels.

use kiln_ir::math::Function;
use kiln_ir::{Class, Def, Op, Value};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::WhyNot;
use crate::fuse::Fusion;

/// From so many kernels on it makes no difference how many there are: layers are treated like their neighbours.
const MANY: usize = 4;

/// Bytes of the smallest mask that is worth a kernel of its own, and how often it must be repeated: with less the
/// kernel's start costs more than the mask.
const SMALLEST_MASK: i64 = 1024;
const REPEATED: i64 = 8;

/// The stored values that a value goes into, as far as they are counted.
type Sinks = SmallVec<[u32; MANY]>;

impl Fusion<'_> {
    /// Stores values that go into many stored values, straight or through others, like the sums along a chain
    /// of residual layers: computed again everywhere, each of them would be all layers before it.
    pub fn store_far_reaching(&mut self) {
        let graph = self.graph;
        let mut sinks: Vec<Sinks> = vec![Sinks::new(); graph.nodes.len()];
        for n in (0..graph.nodes.len()).rev().filter(|&n| self.live[n]) {
            let node = &graph.nodes[n];
            let out = node.outs[0];
            let ends = self.stored.contains(&out) || !self.is_inlined(out);
            let through = if ends { smallvec::smallvec![n as u32] } else { sinks[n].clone() };
            for &arg in &node.args {
                let Def::Node { node: from, .. } = graph.def(arg) else { continue };
                let known = &mut sinks[from as usize];
                for &sink in &through {
                    if known.len() < MANY && !known.contains(&sink) {
                        known.push(sink);
                    }
                }
            }
        }
        let users = self.users();
        for (n, sinks) in sinks.iter().enumerate().filter(|(_, sinks)| sinks.len() == MANY) {
            let value = graph.nodes[n].outs[0];
            let pointwise = graph.nodes[n].op.row().class == Class::Pointwise;
            if pointwise && users[n] > 1 && self.is_inlined(value) && !self.stored.contains(&value) {
                self.store_if_dear(value, sinks.len());
            }
        }
    }

    /// Stores what is made of positions alone and repeated, like the mask of attention that all heads and samples
    /// share: arithmetic of 64-bit integers, half as many to a vector as what it is for.
    pub fn store_masks(&mut self) {
        let graph = self.graph;
        // More is no longer in a core's cache when it is read again, and would be there for nothing else.
        let largest = self.machine.l2 as i64;
        // By node: whether it is made of positions and numbers alone, and whether there is a position in it.
        let mut made: Vec<Option<bool>> = Vec::with_capacity(graph.nodes.len());
        for node in &graph.nodes {
            let class = node.op.row().class;
            let of_args = || {
                let of = |&arg: &Value| match graph.def(arg) {
                    _ if !self.is_tensor(arg) => Some(false),
                    Def::Node { node, .. } => made[node as usize],
                    Def::Input(_) => None,
                };
                node.args.iter().map(of).try_fold(false, |any, one| one.map(|one| any | one))
            };
            made.push(match node.op {
                Op::Arange { .. } => Some(true),
                Op::Full { .. } => Some(false),
                _ if matches!(class, Class::Pointwise | Class::View) && self.is_inlined(node.outs[0]) => {
                    of_args()
                }
                _ => None,
            });
        }
        for (n, node) in graph.nodes.iter().enumerate() {
            let (Op::Expand { .. }, [mask]) = (&node.op, &node.args[..]) else { continue };
            let Def::Node { node: from, .. } = graph.def(*mask) else { continue };
            let mask = *mask;
            let pointwise = graph.nodes[from as usize].op.row().class == Class::Pointwise;
            let (once, all) = (self.bytes(mask), self.bytes(node.outs[0]));
            if self.live[n]
                && made[from as usize] == Some(true)
                && pointwise
                && (SMALLEST_MASK..=largest).contains(&once)
                && all >= REPEATED * once
                && !self.stored.contains(&mask)
            {
                self.why_not
                    .push(WhyNot::Stored { value: mask, reason: "it is made of positions, and repeated" });
                self.store(mask);
            }
        }
    }

    /// How many live nodes read a node's result.
    fn users(&self) -> Vec<u32> {
        let mut users = vec![0; self.graph.nodes.len()];
        for (_, node) in self.graph.nodes.iter().enumerate().filter(|(n, _)| self.live[*n]) {
            for &arg in &node.args {
                if let Def::Node { node, .. } = self.graph.def(arg) {
                    users[node as usize] += 1;
                }
            }
        }
        users
    }

    /// Stores values that several kernels compute where storing moves less. True if there were any.
    pub fn store_dear_values(&mut self) -> bool {
        let graph = self.graph;
        // By node, how many kernels compute it.
        let mut kernels: FxHashMap<u32, usize> = FxHashMap::default();
        for node in self.groups.iter().flat_map(|g| &g.lowered.nodes) {
            *kernels.entry(*node).or_default() += 1;
        }
        let mut shared: Vec<(u32, usize)> =
            kernels.iter().filter(|(_, n)| **n > 1).map(|(n, k)| (*n, *k)).collect();
        shared.sort_unstable();
        // By node, whether a kernel needs it for something that not all of its kernels compute, or that is larger.
        let mut branches: FxHashSet<u32> = FxHashSet::default();
        for (&n, &k) in &kernels {
            let node = &graph.nodes[n as usize];
            let whole = self.stored.contains(&node.outs[0]);
            for &arg in &node.args {
                if let Def::Node { node: from, .. } = graph.def(arg)
                    && (whole
                        || kernels.get(&from).is_some_and(|needed| *needed != k)
                        || self.bytes(node.outs[0]) > self.bytes(arg))
                {
                    branches.insert(from);
                }
            }
        }
        let mut changed = false;
        for (n, kernels) in shared {
            let value = graph.nodes[n as usize].outs[0];
            if branches.contains(&n) && !self.stored.contains(&value) && self.is_inlined(value) {
                changed |= self.store_if_dear(value, kernels);
            }
        }
        changed
    }

    fn store_if_dear(&mut self, value: Value, kernels: usize) -> bool {
        let counted = kernels.min(MANY) as i64;
        let again = self.cost(value, &mut FxHashSet::default()) * (counted - 1);
        let stored = self.bytes(value) * (1 + counted);
        if again > stored {
            self.why_not.push(WhyNot::ComputedOnce { value, kernels, stored, again });
            self.chosen.insert(value);
            self.store(value);
        }
        again > stored
    }

    /// What computing a value once costs: bytes loaded, and operations counted as bytes.
    fn cost(&self, value: Value, seen: &mut FxHashSet<u32>) -> i64 {
        let Def::Node { node, .. } = self.graph.def(value) else { return self.bytes(value) };
        if !self.is_tensor(value) {
            return 0;
        }
        if !seen.insert(node) {
            return 0;
        }
        if self.stored.contains(&value) || !self.is_inlined(value) {
            return self.bytes(value);
        }
        let n = &self.graph.nodes[node as usize];
        let elements = self.graph.ty(value).as_tensor().map_or(0, |t| t.shape.numel() as i64);
        let own = n.op.row().function.map_or(0, Function::cost) * elements;
        own + n.args.iter().map(|&a| self.cost(a, seen)).sum::<i64>()
    }
}
