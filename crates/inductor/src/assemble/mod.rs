//! From fused units in order to the plan: buffers, steps, C text.

mod eager;
mod library;
mod scalars;
mod table;

use std::sync::Arc;

use kiln_ir::{Def, Fault, Loc, Op, ScalarKind, Strides, TensorTy, Value, planted};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::assemble::eager::Of;
use crate::assemble::scalars::Scalars;
use crate::c::KernelSource;
use crate::fuse::{Fusion, Target, Unit};
use crate::lower::{Lowered, LoweredRoot};
use crate::memory::temporaries::{InPlace, place_temporaries};
use crate::options::Options;
use crate::schedule::bands;
use crate::schedule::epilogue;
use crate::schedule::order::{Order, reads_only_where_it_writes};
use crate::target::Schedule;
use kiln_plan::index::Index;
use kiln_plan::loops::{ExprKind, Kernel, Operation, Store};
use kiln_plan::{
    BufferId, BufferPlan, BufferRef, BufferTy, Call, Launch, Place, Plan, Report, Signature, Step,
    StepReport, ViewRef,
};

struct Assembler<'f, 'g> {
    fusion: &'f Fusion<'g>,
    order: &'f Order,
    options: &'f Options,
    /// Names of kernels that there must not be.
    refused: &'f [String],
    /// Whether one of them scatters: its ops alone would not put their results where they belong.
    refused_scatters: bool,
    buffers: Vec<BufferPlan>,
    inputs: Vec<Option<BufferId>>,
    outputs: Vec<BufferId>,
    homes: FxHashMap<Value, BufferId>,
    list_gets: FxHashMap<(Value, usize), Value>,
    /// Values read by some unit.
    read: FxHashSet<Value>,
    kernels: Vec<Kernel>,
    /// By kernel, its text.
    code: Vec<KernelSource>,
    /// By name, the kernels of that text.
    known: FxHashMap<String, Vec<usize>>,
    steps: Vec<Step>,
    reports: Vec<StepReport>,
    copies: Vec<(BufferId, BufferId)>,
    /// Steps whose result may lie where this operand does, if that is not needed any more.
    in_place: Vec<InPlace>,
    /// By step, the loops of its kernel (not those of tables).
    loops: Vec<Option<Loops>>,
    scalars: Scalars<'g>,
}

/// The loops of a step, and how they are called.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Loops {
    pub kernel: Kernel,
    pub signature: Arc<Signature>,
}

/// A plan, and what it takes to work it out again for other sizes.
pub(crate) struct Assembled {
    pub plan: Plan,
    /// By kernel, its text.
    pub code: Vec<KernelSource>,
    /// By step, the loops of its kernel (not those of tables).
    pub loops: Vec<Option<Loops>>,
    pub in_place: Vec<InPlace>,
    /// Whether there is a kernel that there must not be, since it scatters.
    pub refused_scatters: bool,
}

pub(crate) fn assemble(
    fusion: &Fusion<'_>,
    order: &Order,
    options: &Options,
    refused: &[String],
) -> Assembled {
    let graph = fusion.graph;
    let mut this = Assembler {
        fusion,
        order,
        options,
        refused,
        refused_scatters: false,
        buffers: Vec::new(),
        inputs: Vec::new(),
        outputs: Vec::new(),
        homes: FxHashMap::default(),
        list_gets: FxHashMap::default(),
        read: FxHashSet::default(),
        kernels: Vec::new(),
        code: Vec::new(),
        known: FxHashMap::default(),
        steps: Vec::new(),
        reports: Vec::new(),
        copies: Vec::new(),
        in_place: Vec::new(),
        loops: Vec::new(),
        scalars: Scalars::new(graph),
    };
    for unit in &fusion.units {
        fusion.for_each_read(unit, |value| {
            if matches!(graph.def(value), Def::Node { .. }) {
                this.read.insert(value);
            }
        });
    }
    this.buffers.reserve(graph.inputs.len() + graph.outputs.len());
    this.inputs.reserve(graph.inputs.len());
    for (i, &input) in graph.inputs.iter().enumerate() {
        let strides = &fusion.layouts[i].strides;
        let buffer = graph.ty(input).as_tensor().map(|ty| this.buffer(Place::Input(i), ty, strides));
        this.inputs.push(buffer);
    }
    for (k, &output) in graph.outputs.iter().enumerate() {
        let ty = this.tensor(output);
        let strides = ty.shape.contiguous_strides();
        let id = this.buffer(Place::Output(k), &ty, &strides);
        this.outputs.push(id);
    }
    for node in &graph.nodes {
        if let Op::ListGet { index } = node.op {
            this.list_gets.entry((node.args[0], index)).or_insert(node.outs[0]);
        }
    }
    for &unit in &order.units {
        match &fusion.units[unit] {
            Unit::Kernel(g) => this.kernel(*g),
            Unit::Table(t) => this.table(*t),
            Unit::Library(n) => this.library(*n),
        }
    }
    for (src, dst) in std::mem::take(&mut this.copies) {
        this.copy(src, dst);
    }
    this.finish()
}

impl<'f, 'g> Assembler<'f, 'g> {
    fn tensor(&self, value: Value) -> TensorTy {
        self.fusion.graph.tensor_of(value).clone()
    }

    fn buffer(&mut self, place: Place, ty: &TensorTy, strides: &Strides) -> BufferId {
        let before = self.buffers.last().map(|b| &b.ty).filter(|before| {
            before.dtype == ty.dtype && before.shape == ty.shape && before.strides == *strides
        });
        let ty = before.cloned().unwrap_or_else(|| {
            Arc::new(BufferTy {
                dtype: ty.dtype,
                shape: ty.shape.clone(),
                strides: strides.clone(),
                bytes: ty.bytes(),
            })
        });
        self.buffers.push(BufferPlan { place, ty });
        BufferId(self.buffers.len() as u32 - 1)
    }

    fn arena(&mut self, ty: &TensorTy) -> BufferId {
        self.buffer(Place::Arena { offset: 0 }, ty, &ty.shape.contiguous_strides())
    }

    /// Memory in the arena for what an input is going to hold, lying as it does there if it has its shape.
    fn arena_like(&mut self, ty: &TensorTy, input: BufferId) -> BufferId {
        let there = self.buffers[input.index()].ty.clone();
        if there.shape == ty.shape {
            self.buffer(Place::Arena { offset: 0 }, ty, &there.strides)
        } else {
            self.arena(ty)
        }
    }

    /// The input behind a write-back, if its value goes straight there.
    fn direct(&self, write: usize) -> Option<BufferId> {
        if self.order.late.contains(&write) {
            return None;
        }
        self.input_of(write)
    }

    fn input_of(&self, write: usize) -> Option<BufferId> {
        match self.fusion.graph.def(self.fusion.graph.writes[write].target) {
            Def::Input(number) => self.inputs[number as usize],
            Def::Node { .. } => None,
        }
    }

    /// The buffer of a stored value or input.
    fn home(&mut self, value: Value) -> BufferId {
        if let Def::Input(number) = self.fusion.graph.def(value)
            && let Some(id) = self.inputs[number as usize]
        {
            return id;
        }
        if let Some(&id) = self.homes.get(&value) {
            return id;
        }
        let last = self.fusion.scatters.last(value);
        if last != value {
            return self.home(last);
        }
        if let Some(id) = self.fusion.windows.get(&value).and_then(|&write| self.input_of(write)) {
            self.homes.insert(value, id);
            return id;
        }
        let targets = self.fusion.targets.get(&value).cloned().unwrap_or_default();
        let list_get = self.fusion.is_list_get(value);
        let inlined =
            self.fusion.graph.producer(value).is_some_and(|n| crate::lower::is_inlined(self.fusion.graph, n));
        let output = targets.iter().find_map(|t| match t {
            Target::Output(k) => Some(self.outputs[*k]),
            _ => None,
        });
        let written = targets.iter().find_map(|t| match t {
            Target::Write(w) => {
                let id = self.direct(*w)?;
                let b = &self.buffers[id.index()].ty;
                (list_get || crate::lower::views::is_row_major(&b.shape, &b.strides)).then_some(id)
            }
            _ => None,
        });
        let id = match (list_get, inlined) {
            (true, _) => {
                written.or(if targets.iter().any(|t| matches!(t, Target::Write(_))) { None } else { output })
            }
            (false, true) => output.or(written),
            (false, false) => output,
        };
        let waiting = targets.iter().find_map(|t| match t {
            Target::Write(w) if list_get => self.input_of(*w),
            _ => None,
        });
        let id = id.unwrap_or_else(|| {
            let ty = self.tensor(value);
            match waiting {
                Some(input) => self.arena_like(&ty, input),
                None => self.arena(&ty),
            }
        });
        self.homes.insert(value, id);
        id
    }

    fn op(&self, node: u32) -> String {
        let node = &self.fusion.graph.nodes[node as usize];
        if node.loc.is_known() {
            format!("{} at {}", node.op.name(), node.loc)
        } else {
            node.op.name().to_string()
        }
    }

    fn ops(&self, nodes: &[u32]) -> Vec<String> {
        nodes.iter().map(|&node| self.op(node)).collect()
    }

    fn step(&mut self, step: Step, name: &str, ops: Vec<String>, bytes_read: usize, bytes_written: usize) {
        self.steps.push(step);
        self.loops.push(None);
        self.reports.push(StepReport { name: name.into(), ops, bytes_read, bytes_written });
    }

    /// Copies what waits in a temporary to the input it is for.
    fn copy(&mut self, src: BufferId, dst: BufferId) {
        let [from, to] = [src, dst].map(|id| self.buffers[id.index()].ty.clone());
        let ty = TensorTy::new(from.dtype, from.shape.clone());
        let at = |buffer| BufferRef { buffer, offset: 0 };
        // Behind a reshape: only dense targets get there.
        let out = if from.shape == to.shape {
            ViewRef { at: at(dst), ty: ty.clone(), strides: to.strides.clone() }
        } else {
            ViewRef::dense(at(dst), ty.clone())
        };
        let src = ViewRef { at: at(src), ty, strides: from.strides.clone() };
        let call = Call::new(Op::Clone {}, vec![src], out, Loc::UNKNOWN);
        self.step(Step::Call(call), "copy", vec![], from.bytes, from.bytes);
    }

    /// Where a root of a kernel is stored: buffers, first elements, strides.
    fn places(&mut self, root: &LoweredRoot) -> Vec<(BufferId, i64, Strides)> {
        let fusion = self.fusion;
        let targets = fusion.targets.get(&root.value).cloned().unwrap_or_default();
        let ty = self.tensor(root.value);
        let dense = ty.shape.contiguous_strides();
        let inlined =
            fusion.graph.producer(root.value).is_some_and(|n| crate::lower::is_inlined(fusion.graph, n));
        let own = fusion.library_target(root.value);
        let mut places: Vec<(BufferId, i64, Strides)> = Vec::new();
        for (t, target) in targets.iter().enumerate() {
            if !inlined && own == Some(t) && fusion.graph.producer(root.value).is_some() {
                continue; // written by the library step itself
            }
            match target {
                Target::Home => {
                    if !fusion.is_dropped(root.value, &self.read) {
                        places.push((self.home(root.value), 0, dense.clone()));
                    }
                }
                Target::Output(k) => places.push((self.outputs[*k], 0, dense.clone())),
                Target::Part { of, offset, strides } => {
                    places.push((self.home(*of), *offset, strides.clone()))
                }
                Target::Write(w) => match (self.direct(*w), self.input_of(*w)) {
                    (Some(id), _) => {
                        places.push((id, 0, fusion.write_strides(*w, root.value)));
                    }
                    (None, Some(id)) => {
                        let temporary = match fusion.graph.def(root.value) {
                            Def::Input(_) => {
                                let shape = self.buffers[id.index()].ty.shape.clone();
                                self.arena(&TensorTy::new(ty.dtype, shape))
                            }
                            Def::Node { .. } => self.home(root.value),
                        };
                        if inlined || matches!(fusion.graph.def(root.value), Def::Input(_)) {
                            places.push((temporary, 0, dense.clone()));
                        }
                        self.copies.push((temporary, id));
                    }
                    (None, None) => {}
                },
            }
        }
        // A stored value that others read must be in its home, wherever that is.
        if inlined && self.read.contains(&root.value) && fusion.stored.contains(&root.value) {
            places.push((self.home(root.value), 0, dense));
        }
        let mut done = FxHashSet::default();
        places.retain(|(buffer, offset, _)| done.insert((*buffer, *offset)));
        places
    }

    /// Stores of a group's roots. By root, where they go.
    fn add_stores(
        &mut self,
        kernel: &mut Kernel,
        slots: &mut Vec<BufferRef>,
        group: usize,
    ) -> (usize, Vec<(usize, ViewRef)>) {
        let fusion = self.fusion;
        let (mut written, mut views) = (0, Vec::new());
        for (r, root) in fusion.groups[group].lowered.roots.iter().enumerate() {
            let shape = self.tensor(root.value).shape;
            for (buffer, offset, strides) in self.places(root) {
                let scatter = fusion.scatters.get(root.value).zip(root.place.as_ref());
                let mut index = match scatter {
                    Some((scatter, place)) => scatter.target(&root.index, place, &strides),
                    None => Index::default(),
                };
                for (i, &stride) in root.index.iter().zip(&strides).filter(|_| scatter.is_none()) {
                    index.add_scaled(i, stride as i64);
                }
                let adds = scatter.is_some_and(|(scatter, _)| scatter.adds);
                let dtype = self.buffers[buffer.index()].ty.dtype;
                let mut value = root.expr;
                if kernel.exprs[value].dtype != dtype.computing() {
                    let kind = ExprKind::Apply(Operation::Convert, smallvec::smallvec![value]);
                    let loc = kernel.exprs[value].loc;
                    kernel.exprs.push(kiln_plan::loops::Expr { dtype: dtype.computing(), kind, loc });
                    value = kernel.exprs.len() - 1;
                }
                written += shape.numel() * dtype.size();
                let at = BufferRef { buffer, offset };
                views.push((r, ViewRef { at, ty: TensorTy::new(dtype, shape.clone()), strides }));
                let offset = offset + std::mem::take(&mut index.constant);
                slots.push(BufferRef { buffer, offset });
                kernel.buffers.push(dtype);
                kernel.stores.push(Store { buffer: slots.len() - 1, index, value, adds });
            }
        }
        (written, views)
    }

    fn kernel(&mut self, g: usize) {
        let fusion = self.fusion;
        let lowered = &fusion.groups[g].lowered;
        let mut kernel = lowered.kernel.clone();
        let mut slots: Vec<BufferRef> = Vec::new();
        let mut bytes_read = 0;
        for &v in &lowered.loads {
            slots.push(BufferRef { buffer: self.home(v), offset: 0 });
            bytes_read += self.tensor(v).bytes();
        }
        // Constants of indices go into the pointers.
        for e in 0..kernel.exprs.len() {
            if let ExprKind::Load { buffer, index } = &mut kernel.exprs[e].kind
                && index.constant != 0
            {
                let slot = BufferRef { buffer: slots[*buffer].buffer, offset: index.constant };
                let dtype = kernel.buffers[*buffer];
                index.constant = 0;
                let at = slots.iter().position(|s| *s == slot).unwrap_or_else(|| {
                    slots.push(slot);
                    slots.len() - 1
                });
                *buffer = at;
                if at == kernel.buffers.len() {
                    kernel.buffers.push(dtype);
                }
            }
        }
        let (bytes_written, outs) = self.add_stores(&mut kernel, &mut slots, g);
        if kernel.stores.is_empty() {
            return;
        }
        if lowered.loads.is_empty() && kernel.stores.len() > 1 {
            // Filling memory is no faster together, and a kernel for each number of places would be compiled.
            let stores = std::mem::take(&mut kernel.stores);
            let bytes = bytes_written / stores.len();
            for (store, out) in stores.into_iter().zip(outs) {
                let alone = Kernel { stores: vec![store], ..kernel.clone() };
                self.launch(lowered, alone, slots.clone(), vec![out], (0, bytes));
            }
            return;
        }
        self.launch(lowered, kernel, slots, outs, (bytes_read, bytes_written));
    }

    /// The steps of a kernel whose buffers are `slots`; its results go to `outs`.
    fn launch(
        &mut self,
        lowered: &Lowered,
        kernel: Kernel,
        mut slots: Vec<BufferRef>,
        outs: Vec<(usize, ViewRef)>,
        (bytes_read, bytes_written): (usize, usize),
    ) {
        let Schedule { kernels: parts, between } = self.options.target.schedule(kernel);
        let sources: Vec<KernelSource> =
            parts.iter().map(|part| self.options.target.emit(&part.kernel)).collect();
        let scatters = lowered.roots.iter().any(|root| root.place.is_some());
        let is_refused = sources.iter().any(|source| self.is_refused(source));
        self.refused_scatters |= is_refused && scatters;
        if is_refused && !scatters {
            let roots: Vec<Value> = lowered.roots.iter().map(|root| root.value).collect();
            let ops = self.ops(&lowered.nodes);
            if self.eager(&roots, Of::Kernel, outs, ops, (bytes_read, bytes_written)) {
                return;
            }
        }
        for (dtype, count) in between {
            let buffer = self.arena(&TensorTy::new(dtype, [count as usize]));
            slots.push(BufferRef { buffer, offset: 0 });
        }
        let last = parts.len() - 1;
        if last == 0 {
            self.find_in_place(lowered);
        }
        for (p, (part, source)) in parts.into_iter().zip(sources).enumerate() {
            let (name, signature) = (source.name.clone(), source.signature.clone());
            let launch = Launch {
                numbers: part.kernel.numbers(),
                kernel: self.number(&part.kernel, source),
                bufs: part.buffers.iter().map(|&b| slots[b]).collect(),
                rows: Vec::new(),
                scalars: part.scalars.iter().map(|&s| self.scalar(lowered.scalars[s])).collect(),
                checks: lowered.checks.clone(),
                coarser: 1,
            };
            let (read, written) = if p == last && p > 0 { (0, 0) } else { (bytes_read, bytes_written) };
            self.step(Step::Launch(launch), &name, self.ops(&lowered.nodes), read, written);
            if let Some(loops) = self.loops.last_mut() {
                *loops = Some(Loops { kernel: part.kernel, signature });
            }
        }
    }

    /// Notes which results of a kernel, whose step comes next, could take the place of an operand.
    fn find_in_place(&mut self, lowered: &Lowered) {
        for root in &lowered.roots {
            let Some(&to) = self.homes.get(&root.value) else { continue };
            let ty = self.buffers[to.index()].ty.clone();
            // Results of windows and views lie elsewhere, or are not all of their buffer.
            let is_whole = self.fusion.targets.get(&root.value).is_some_and(|targets| {
                targets.iter().any(|t| matches!(t, Target::Home | Target::Output(_)))
                    && !targets.iter().any(|t| matches!(t, Target::Part { .. }))
            });
            if !is_whole || matches!(self.buffers[to.index()].place, Place::Input(_)) {
                continue;
            }
            let dense = self.tensor(root.value).shape.contiguous_strides();
            for (load, value) in lowered.loads.iter().enumerate() {
                let Some(&from) = self.homes.get(value) else { continue };
                let source = &self.buffers[from.index()];
                if matches!(source.place, Place::Arena { .. })
                    && (source.ty.dtype, source.ty.bytes) == (ty.dtype, ty.bytes)
                    && (reads_only_where_it_writes(lowered, load, root, &dense)
                        || planted(Fault::InPlaceElsewhere))
                {
                    self.in_place.push(InPlace { step: self.steps.len(), from, to });
                }
            }
        }
    }

    fn scalar(&mut self, (value, kind): (Value, ScalarKind)) -> kiln_plan::ScalarRef {
        self.scalars.get(value, kind)
    }

    /// The number of a kernel: of a known one, if its text was written for these loops, too.
    fn number(&mut self, kernel: &Kernel, source: KernelSource) -> usize {
        let numbers = kernel.numbers();
        let known = self.known.entry(source.name.clone()).or_default();
        let fits = |&&number: &&usize| source.signature.fits(&self.kernels[number], &numbers);
        if let Some(&number) = known.iter().find(fits) {
            return number;
        }
        known.push(self.kernels.len());
        self.kernels.push(kernel.clone());
        self.code.push(source);
        self.kernels.len() - 1
    }

    fn is_refused(&self, source: &KernelSource) -> bool {
        self.refused.contains(&source.name)
    }

    /// Puts the steps into another order, in which each still finds what it reads: by new place, the old one.
    fn reorder(&mut self, order: &[usize]) {
        fn moved<T>(all: &mut Vec<T>, order: &[usize]) {
            let mut old: Vec<Option<T>> = all.drain(..).map(Some).collect();
            all.extend(order.iter().filter_map(|&s| old[s].take()));
        }
        moved(&mut self.steps, order);
        moved(&mut self.loops, order);
        moved(&mut self.reports, order);
        let mut places = vec![0; order.len()];
        order.iter().enumerate().for_each(|(new, &old)| places[old] = new);
        self.in_place.iter_mut().for_each(|in_place| in_place.step = places[in_place.step]);
    }

    /// Places the arena's buffers and puts the plan together.
    fn finish(mut self) -> Assembled {
        let (mut bands, mut why_not) = (Vec::new(), self.fusion.why_not.clone());
        why_not.extend(self.order.why_not.iter().cloned());
        if self.options.target.runs_together() {
            let (mut from, machine) = (0, self.options.target.machine());
            while let Some((order, next)) =
                bands::gather(&self.steps, &self.loops, &self.buffers, &self.in_place, machine, from)
            {
                self.reorder(&order);
                from = next;
            }
            why_not.extend(epilogue::connect(&mut self.steps, &self.loops));
            let apart;
            (bands, apart) =
                bands::connect(&mut self.steps, &self.loops, &mut self.buffers, &self.in_place, machine);
            why_not.extend(apart);
        }
        let (arena_bytes, taken_back) =
            place_temporaries(&mut self.buffers, &mut self.steps, &bands, self.outputs.len(), &self.in_place);
        why_not.extend(taken_back);
        let mut seen = FxHashSet::default();
        why_not.retain(|w| seen.insert(w.clone()));
        let graph = &self.fusion.graph;
        let made_by = |value| match graph.def(value) {
            Def::Node { node, .. } => Some(self.op(node)),
            Def::Input(input) => Some(format!("input {input}")),
        };
        let why_not = why_not.iter().map(|why| why.told(graph, made_by)).collect();
        let plan = Plan {
            kernels: self.kernels,
            buffers: self.buffers,
            scalars: self.scalars.ops,
            steps: self.steps,
            bands,
            arena_bytes,
            outputs: self.outputs,
            report: Report { steps: self.reports, why_not },
        };
        Assembled {
            plan,
            code: self.code,
            loops: self.loops,
            in_place: self.in_place,
            refused_scatters: self.refused_scatters,
        }
    }
}
