//! Which values are stored, and which are computed together.
//!
//! Everything is computed where it is used unless something speaks against it. Stored are: results, write-backs,
//! operands of library steps, reductions that don't fit their consumer's loops, values that several kernels
//! need and that are dearer to compute than to store. Then kernels that read the same memory, or one the
//! other's result, are made one, if their loops agree and no other step lies between them.

pub(crate) mod folds;
pub(crate) mod merge;
pub(crate) mod reach;
pub(crate) mod shared;
pub(crate) mod table;
pub(crate) mod why_not;

use kiln_ir::{Def, Fault, Graph, Node, Op, Strides, Ty, Value, Write, planted};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::fuse::table::Table;
use crate::lower::pooling;
use crate::lower::views::{BatchView, View, batch_of, is_row_major, view_of};
use crate::lower::{Context, Lowered, Lowering, Refusal, is_inlined, is_library, lower_group};
use crate::rewrite::elements::Elements;
use crate::rewrite::halves;
use crate::rewrite::scatters::Scatters;
use crate::{Layout, Options, Tuning, WhyNot};
use kiln_plan::Machine;

/// Where a value goes.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Target {
    /// Its own buffer.
    Home,
    /// The graph output with this number.
    Output(usize),
    /// The input that this write-back names.
    Write(usize),
    /// A part of another value's buffer.
    Part { of: Value, offset: i64, strides: Strides },
}

/// The units behind every stored value; nearly always one.
type Producers = FxHashMap<Value, SmallVec<[usize; 2]>>;

/// Something that runs as one.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Unit {
    /// A loop kernel; index into [`Fusion::groups`].
    Kernel(usize),
    /// A table kernel; index into [`Fusion::tables`].
    Table(usize),
    /// A node run by a library.
    Library(usize),
}

/// A loop kernel in the making.
pub(crate) struct Group {
    pub roots: Vec<Value>,
    /// Those of the roots that are reductions over the rows that the kernel goes through.
    pub folds: Vec<Value>,
    pub lowered: Lowered,
}

/// The result of fusion.
pub(crate) struct Fusion<'g> {
    pub graph: &'g Graph,
    pub layouts: &'g [Layout],
    /// Elements of lists that go straight into an input.
    pub elements: Elements,
    /// Results of `slice_scatter` and `index_copy` that lie in the input that a write-back names.
    pub windows: FxHashMap<Value, usize>,
    pub scatters: Scatters,
    tuning: Tuning,
    machine: &'g Machine,
    /// Values with a buffer of their own.
    pub stored: FxHashSet<Value>,
    /// Where roots go.
    pub targets: FxHashMap<Value, SmallVec<[Target; 1]>>,
    pub groups: Vec<Group>,
    pub tables: Vec<Table>,
    pub units: Vec<Unit>,
    pub why_not: Vec<WhyNot>,
    /// Whether a node is needed.
    pub live: Vec<bool>,
    /// Stored by choice: the store goes if nobody else reads it.
    pub chosen: FxHashSet<Value>,
}

/// The value behind reshapes: the same bytes if it is stored dense.
pub(crate) fn behind_reshapes(graph: &Graph, mut value: Value) -> Value {
    while let Some(node) = graph.producer(value)
        && (matches!(node.op, Op::Reshape { .. })
            || planted(Fault::PermuteIsReshape) && matches!(node.op, Op::Permute { .. }))
    {
        value = node.args[0];
    }
    value
}

/// Decides what is stored and what is fused.
pub(crate) fn fuse<'g>(
    graph: &'g Graph,
    options: &'g Options,
    elements: Elements,
    windows: FxHashMap<Value, usize>,
    scatters: Scatters,
) -> Fusion<'g> {
    let mut this = Fusion {
        graph,
        layouts: &options.input_layouts,
        elements,
        windows,
        scatters,
        tuning: options.tuning,
        machine: options.target.machine(),
        stored: FxHashSet::default(),
        targets: FxHashMap::default(),
        groups: Vec::new(),
        tables: Vec::new(),
        units: Vec::new(),
        why_not: Vec::new(),
        live: live_nodes(graph),
        chosen: FxHashSet::default(),
    };
    this.sinks();
    this.operands();
    this.store_masks();
    this.store_far_reaching();
    this.large_cones();
    this.tables = Table::find(graph, &this.live);
    // Each round stores more; what was found in the way of one kernel is gone in the next round.
    loop {
        let roots = this.lower_roots();
        if this.store_shared_reductions(&roots) {
            continue;
        }
        this.merge(roots);
        if !this.store_dear_values() {
            break;
        }
    }
    this
}

pub(crate) fn live_nodes(graph: &Graph) -> Vec<bool> {
    let mut live = vec![false; graph.nodes.len()];
    let mark = |live: &mut Vec<bool>, v: Value| {
        if let Def::Node { node, .. } = graph.def(v) {
            live[node as usize] = true;
        }
    };
    for &v in graph.outputs.iter().chain(graph.writes.iter().map(|w| &w.value)) {
        mark(&mut live, v);
    }
    for n in (0..graph.nodes.len()).rev() {
        if live[n] {
            for &arg in &graph.nodes[n].args {
                mark(&mut live, arg);
            }
        }
    }
    live
}

impl<'g> Fusion<'g> {
    pub fn is_tensor(&self, value: Value) -> bool {
        matches!(self.graph.ty(value), Ty::Tensor(_))
    }

    pub fn bytes(&self, value: Value) -> i64 {
        self.graph.ty(value).as_tensor().map_or(0, |t| t.bytes() as i64)
    }

    /// Whether a value is computed in loops (and not by a library step, a table, or from outside).
    pub fn is_inlined(&self, value: Value) -> bool {
        self.graph.producer(value).is_some_and(|n| is_inlined(self.graph, n)) && self.is_tensor(value)
    }

    fn add_target(&mut self, value: Value, target: Target) {
        self.targets.entry(value).or_default().push(target);
    }

    pub fn store(&mut self, value: Value) {
        if self.stored.insert(value) && self.is_inlined(value) {
            self.add_target(value, Target::Home);
        }
    }

    /// Results and write-backs.
    fn sinks(&mut self) {
        for (k, &v) in self.graph.outputs.iter().enumerate() {
            let value = behind_reshapes(self.graph, v);
            self.add_target(value, Target::Output(k));
            if self.is_inlined(value) {
                self.stored.insert(value);
            }
        }
        // Elements of lists have no target of their own: a table knows where its rows go.
        for (w, write) in self.graph.writes.iter().enumerate().filter(|(_, w)| w.element.is_none()) {
            if self.windows.contains_key(&write.value) {
                continue; // it is there
            }
            let Def::Input(number) = self.graph.def(write.target) else { continue };
            let shape = self.graph.tensor_of(write.target).shape.clone();
            let dense = is_row_major(&shape, &self.layouts[number as usize].strides);
            let value = if dense { behind_reshapes(self.graph, write.value) } else { write.value };
            self.add_target(value, Target::Write(w));
            if dense && self.is_inlined(value) {
                self.stored.insert(value);
            }
        }
    }

    /// Operands of library steps and parts of larger values.
    fn operands(&mut self) {
        let graph = self.graph;
        for (n, node) in graph.nodes.iter().enumerate() {
            if !self.live[n] {
                continue;
            }
            match &node.op {
                _ if self.scatters.makes(node.outs[0]) => {
                    let of = node.outs[0];
                    let strides = graph.tensor_of(of).shape.contiguous_strides();
                    let (base, src) = (node.args[0], node.args[node.args.len() - 1]);
                    if self.scatters.surrounded(base).is_none() {
                        self.add_target(base, Target::Part { of, offset: 0, strides: strides.clone() });
                    }
                    self.add_target(src, Target::Part { of, offset: 0, strides });
                }
                op if is_library(graph, node) || matches!(op, Op::List {}) => {
                    for &arg in &node.args {
                        if !self.is_tensor(arg) {
                            continue;
                        }
                        let base = match node.op {
                            Op::List {} => self.element_base(arg),
                            _ => self.operand_base(node, arg),
                        };
                        if self.is_inlined(base) && !self.stored.contains(&base) {
                            let reason = "a library step or a list reads it";
                            self.why_not.push(WhyNot::Stored { value: base, reason });
                            self.store(base);
                        }
                    }
                }
                _ if pooling::is_inlined(graph, node) => {
                    let x = node.args[0];
                    let is_there = |value: Value| self.stored.contains(&value) || !self.is_inlined(value);
                    if !pooling::is_cheap(graph, node, &is_there) {
                        let reason = "windows overlap, and it is not computed again for each";
                        self.why_not.push(WhyNot::Stored { value: x, reason });
                        self.store(x);
                    }
                }
                Op::Cat { dim } => {
                    let shape = self.graph.tensor_of(node.outs[0]).shape.clone();
                    let strides = shape.contiguous_strides();
                    let mut at = 0;
                    for &arg in &node.args {
                        let size = self.graph.ty(arg).as_tensor().map_or(0, |t| t.shape[*dim]) as i64;
                        let offset = at * strides[*dim] as i64;
                        let target = Target::Part { of: node.outs[0], offset, strides: strides.clone() };
                        self.add_target(arg, target);
                        at += size - i64::from(planted(Fault::CatOverlaps) && size > 1);
                    }
                }
                Op::SliceScatter { dim, start, step, .. } => {
                    let shape = self.graph.tensor_of(node.outs[0]).shape.clone();
                    let mut strides = shape.contiguous_strides();
                    let (x, src) = (node.args[0], node.args[1]);
                    let covers =
                        self.graph.ty(src).as_tensor().is_some_and(|t| t.shape.numel() == shape.numel());
                    let is_there = self.windows.contains_key(&node.outs[0]);
                    if !covers && !is_there {
                        let target = Target::Part { of: node.outs[0], offset: 0, strides: strides.clone() };
                        self.add_target(x, target);
                    }
                    let offset = *start as i64 * strides[*dim] as i64;
                    strides[*dim] *= *step as isize;
                    self.add_target(src, Target::Part { of: node.outs[0], offset, strides });
                }
                _ => {}
            }
        }
    }

    /// Values that hang on very many nodes are stored, so that kernels stay of a size compilers like.
    fn large_cones(&mut self) {
        let mut cones = vec![0usize; self.graph.value_count()];
        let graph = self.graph;
        for (n, node) in graph.nodes.iter().enumerate() {
            let out = node.outs[0];
            if !self.live[n] || !self.is_inlined(out) {
                continue;
            }
            let cone = 1 + node.args.iter().map(|a| cones[a.index()]).sum::<usize>();
            cones[out.index()] = if self.stored.contains(&out) { 1 } else { cone };
            if cone > self.tuning.inlined && !self.stored.contains(&out) {
                cones[out.index()] = 1;
                self.why_not.push(WhyNot::TooLarge { value: out, limit: self.tuning.inlined });
                self.chosen.insert(out);
                self.store(out);
            }
        }
    }

    fn context(&self) -> Context<'_> {
        Context { graph: self.graph, layouts: self.layouts, stored: &self.stored, scatters: &self.scatters }
    }

    /// Lowers every root on its own, storing what must be stored for that.
    fn lower_roots(&mut self) -> Vec<Group> {
        let mut done: FxHashMap<Value, Group> = FxHashMap::default();
        loop {
            let mut roots: Vec<Value> = self.targets.keys().copied().filter(|v| self.is_root(*v)).collect();
            roots.sort_unstable();
            let mut changed = false;
            for &root in roots.iter().filter(|r| !done.contains_key(*r)).collect::<Vec<_>>() {
                let shape = self.graph.tensor_of(root).shape.clone();
                let space = Lowering::own_space(&self.scatters, root, &shape);
                match lower_group(&self.context(), &[root], &[], &space) {
                    Ok(lowered) => {
                        done.insert(root, Group { roots: vec![root], folds: Vec::new(), lowered });
                    }
                    Err(Refusal::Store(value, why) | Refusal::Apart(why @ WhyNot::FewRows { value, .. }))
                        if !self.stored.contains(&value) =>
                    {
                        self.why_not.push(why);
                        self.store(value);
                        changed = true;
                    }
                    // Stored by another root of this round, or nothing can be done: then there is no kernel.
                    Err(Refusal::Store(_, why)) => self.why_not.push(why),
                    Err(Refusal::Apart(why)) => self.why_not.push(why),
                }
            }
            if changed {
                // Kernels that computed a value that is stored now are lowered anew.
                let stored = &self.stored;
                let graph = self.graph;
                done.retain(|root, group| {
                    !group.lowered.nodes.iter().any(|&n| {
                        let out = graph.nodes[n as usize].outs[0];
                        out != *root && stored.contains(&out)
                    })
                });
                continue;
            }
            return roots.into_iter().filter_map(|r| done.remove(&r)).collect();
        }
    }

    /// Whether a kernel must be made for a value's targets.
    fn is_root(&self, value: Value) -> bool {
        let Some(tensor) = self.graph.ty(value).as_tensor() else { return false };
        if tensor.shape.numel() == 0 {
            return false;
        }
        // A library's first result target is where the library writes.
        let library = self.graph.producer(value).is_some_and(|n| !is_inlined(self.graph, n));
        self.targets[&value].len() > usize::from(library && self.library_target(value).is_some())
    }

    /// The target that a library step or table writes directly.
    pub fn library_target(&self, value: Value) -> Option<usize> {
        let in_table = matches!(self.graph.producer(value).map(|n| &n.op), Some(Op::ListGet { .. }));
        let targets = self.targets.get(&value)?;
        let write = targets.iter().position(|t| in_table && matches!(t, Target::Write(_)));
        write.or_else(|| targets.iter().position(|t| matches!(t, Target::Output(_))))
    }

    /// A reduction in several kernels is computed once.
    fn store_shared_reductions(&mut self, groups: &[Group]) -> bool {
        let mut count: FxHashMap<Value, usize> = FxHashMap::default();
        for reduction in groups.iter().flat_map(|g| &g.lowered.reductions) {
            *count.entry(*reduction).or_default() += 1;
        }
        let mut changed = false;
        for (&value, &kernels) in count.iter().filter(|(_, n)| **n > 1) {
            if !self.stored.contains(&value) {
                self.chosen.insert(value);
                self.store(value);
                self.why_not.push(WhyNot::SharedReduction { value, kernels });
                changed = true;
            }
        }
        changed
    }

    fn for_each_read_in(&self, unit: &Unit, groups: &[Group], mut read: impl FnMut(Value)) {
        match unit {
            Unit::Kernel(g) => groups[*g].lowered.loads.iter().for_each(|&v| read(v)),
            Unit::Table(t) => self.tables[*t].for_each_read(self, |_, v| read(v)),
            Unit::Library(n) => {
                let node = &self.graph.nodes[*n];
                let tensors = node.args.iter().filter(|v| self.is_tensor(**v));
                tensors.for_each(|&v| read(self.operand_base(node, v)));
            }
        }
    }

    /// The stored value or input behind an operand of a library step.
    fn operand_base(&self, node: &Node, value: Value) -> Value {
        let value = self.operand(node, value);
        if self.is_batched(node) {
            self.batch(value).base
        } else {
            view_of(self.graph, self.layouts, &self.stored, value).base
        }
    }

    /// What a library step reads for an operand: the halves that it is, if it is a product of such.
    pub fn operand(&self, node: &Node, value: Value) -> Value {
        let mut halves = node.args.iter().zip(halves::operands(self.graph, self.layouts, node));
        halves.find(|(arg, _)| **arg == value).and_then(|(_, half)| half).unwrap_or(value)
    }

    /// Whether a node is a batched product that is a step of its own, and no call of an eager kernel.
    pub fn is_batched(&self, node: &Node) -> bool {
        let ty = self.graph.ty(node.outs[0]).as_tensor();
        matches!(node.op, Op::Bmm {}) && ty.is_some_and(|ty| ty.dtype.is_float())
    }

    /// The matrices of an operand of a batched product.
    pub fn batch(&self, value: Value) -> BatchView {
        let is_there = |base: Value| !self.is_inlined(base) || self.stored.contains(&base);
        batch_of(self.graph, self.layouts, &self.stored, &is_there, value)
    }

    /// The inputs and stored values that a unit reads.
    pub fn for_each_read(&self, unit: &Unit, read: impl FnMut(Value)) {
        self.for_each_read_in(unit, &self.groups, read);
    }

    /// Whether a value is an element of a list that a table makes.
    pub fn is_list_get(&self, value: Value) -> bool {
        matches!(self.graph.producer(value).map(|n| &n.op), Some(Op::ListGet { .. }))
    }

    /// Which element of its list a write-back's value is.
    pub fn list_row(&self, write: &Write) -> Option<usize> {
        match self.graph.producer(behind_reshapes(self.graph, write.value)).map(|n| &n.op) {
            _ if write.element.is_some() => write.element.map(|row| row as usize),
            Some(Op::ListGet { index }) => Some(*index),
            _ => None,
        }
    }

    /// The strides with which `root` is stored into a write-back's target.
    pub fn write_strides(&self, write: usize, root: Value) -> Strides {
        let target = self.graph.writes[write].target;
        let shape = |v: Value| self.graph.tensor_of(v).shape.clone();
        match self.graph.def(target) {
            Def::Input(number) if shape(target) == shape(root) => {
                self.layouts[number as usize].strides.clone()
            }
            // Behind a reshape: only dense targets get there.
            _ => shape(root).contiguous_strides(),
        }
    }

    /// An element of a packed list as a strided look at its base. Not at a stored copy of the view: the rows of
    /// tables were chosen by these strides.
    pub fn element(&self, value: Value) -> View {
        view_of(self.graph, self.layouts, &FxHashSet::default(), value)
    }

    /// The base of an element of a packed list.
    pub fn element_base(&self, value: Value) -> Value {
        match self.graph.def(value) {
            Def::Input(_) => value,
            Def::Node { .. } => self.element(value).base,
        }
    }

    /// The kernels and library steps behind every stored value.
    fn producers(&self, units: &[Unit], groups: &[Group]) -> Producers {
        let mut out = Producers::default();
        for (u, unit) in units.iter().enumerate() {
            match unit {
                Unit::Kernel(g) => {
                    for root in &groups[*g].roots {
                        if self.is_inlined(*root) {
                            out.entry(*root).or_default().push(u);
                        }
                        for target in self.targets.get(root).into_iter().flatten() {
                            if let Target::Part { of, .. } = target {
                                out.entry(*of).or_default().push(u);
                            }
                        }
                    }
                }
                Unit::Table(t) => {
                    for value in self.tables[*t].results(self.graph) {
                        out.entry(value).or_default().push(u);
                    }
                }
                Unit::Library(n) => out.entry(self.graph.nodes[*n].outs[0]).or_default().push(u),
            }
        }
        out
    }

    /// What every unit must wait for.
    pub fn dependencies(&self, units: &[Unit], groups: &[Group]) -> Vec<Vec<usize>> {
        let producers = self.producers(units, groups);
        let mut out: Vec<Vec<usize>> = Vec::with_capacity(units.len());
        for (u, unit) in units.iter().enumerate() {
            let mut deps: Vec<usize> = Vec::new();
            self.for_each_read_in(unit, groups, |value| {
                // Inputs are there from the start.
                if matches!(self.graph.def(value), Def::Node { .. }) {
                    deps.extend(producers.get(&value).into_iter().flatten().copied());
                }
            });
            if let Unit::Kernel(g) = unit {
                deps.extend(self.overwritten(&groups[*g].roots, &producers, units, groups));
            }
            deps.retain(|&d| d != u);
            deps.sort_unstable();
            deps.dedup();
            out.push(deps);
        }
        out
    }

    /// What surrounds a value's elements in the buffer of `of`, and is there before them: a window's of a
    /// `slice_scatter`, or those of a scatter.
    fn surroundings(&self, of: Value, root: Value) -> Option<Value> {
        let node = self.graph.producer(of)?;
        let window = match node.op {
            Op::SliceScatter { .. } => node.args[1],
            _ if self.scatters.makes(of) => node.args[node.args.len() - 1],
            _ => return None,
        };
        (window == root && node.args[0] != root).then_some(node.args[0])
    }

    /// The steps that fill the rest of a `slice_scatter` before these roots are put into their window.
    fn overwritten(
        &self,
        roots: &[Value],
        producers: &Producers,
        units: &[Unit],
        groups: &[Group],
    ) -> Vec<usize> {
        let mut out = Vec::new();
        for root in roots.iter().filter(|_| !planted(Fault::WindowFirst)) {
            for target in self.targets.get(root).into_iter().flatten() {
                let Target::Part { of, .. } = target else { continue };
                let Some(around) = self.surroundings(*of, *root) else { continue };
                if self.scatters.surrounded(around) == Some(*of) {
                    out.extend(producers.get(&around).into_iter().flatten().copied());
                }
                for &u in producers.get(of).into_iter().flatten() {
                    if let Unit::Kernel(g) = &units[u]
                        && groups[*g].roots.contains(&around)
                    {
                        out.push(u);
                    }
                }
            }
        }
        out
    }

    /// Whether a value that was stored by choice is read by no other kernel, so that its store can go.
    pub fn is_dropped(&self, value: Value, read: &FxHashSet<Value>) -> bool {
        self.chosen.contains(&value) && !read.contains(&value)
    }
}
