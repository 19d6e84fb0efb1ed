//! Whether a plan that was read from somewhere stays inside of its memory: everything that running it takes on trust.
//!
//! A plan's seal says who wrote it. This says that what was written can be run, whoever did: numbers of buffers, places
//! and extents fit together, loops stay inside of their buffers, and nothing is read before it was written or while it is
//! overwritten. What it can't say is that the plan computes what
//! the graph says: a constant may be any number.

use std::ops::Range;

use kiln_ir::{DType, Def, Graph, Scalar, ScalarKind, Shape, Strides, TensorTy, Ty, Value};

use crate::check_kernels::{Access, accesses, well_formed};
use crate::loops::{ExprKind, Kernel, Mode};
use crate::plan::{
    BufferId, BufferPlan, BufferRef, Call, Epilogue, Launch, OnPlanes, Place, Plan, ScalarRef, Step, Then,
    ViewRef,
};
use crate::signature::{self, Signature};

/// What a plan takes and gives, as whoever runs it knows.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// Its inputs.
    pub inputs: Vec<Given>,
    /// Its results, dense.
    pub outputs: Vec<TensorTy>,
    /// By input, whether the plan may change it.
    pub writes: Vec<bool>,
}

impl Surroundings {
    /// What the plan of a graph takes and gives, whose inputs have these strides.
    pub fn of<'a>(graph: &Graph, strides: impl Iterator<Item = &'a Strides>) -> Surroundings {
        let given = |(&value, strides): (&Value, &Strides)| match graph.ty(value) {
            Ty::Scalar(kind) => Given::Number(*kind),
            Ty::Tensor(ty) => Given::tensor(ty, strides),
            // Lists have no memory of their own: nothing may be read of them.
            Ty::List(_) => Given::Tensor { dtype: DType::Bool, reach: 0 },
        };
        let inputs = graph.inputs.iter().zip(strides).map(given).collect();
        let mut writes = vec![false; graph.inputs.len()];
        for write in &graph.writes {
            if let Def::Input(number) = graph.def(write.target) {
                writes[number as usize] = true;
            }
        }
        let outputs = graph.outputs.iter().filter_map(|&value| graph.ty(value).as_tensor().cloned());
        Surroundings { inputs, outputs: outputs.collect(), writes }
    }
}

/// One input.
#[derive(Clone, PartialEq, Debug)]
pub enum Given {
    /// A tensor.
    Tensor {
        /// Its element type.
        dtype: DType,
        /// Elements from its first one to the end of the last.
        reach: usize,
    },
    /// A number.
    Number(ScalarKind),
}

impl Given {
    /// A tensor that lies like this.
    pub fn tensor(ty: &TensorTy, strides: &Strides) -> Given {
        let last = last(&ty.shape, strides).map_or(0, |last| last + 1);
        Given::Tensor { dtype: ty.dtype, reach: usize::try_from(last).unwrap_or(0) }
    }
}

/// Position of the last element; `None` without elements, or if they don't lie in one direction.
fn last(shape: &Shape, strides: &Strides) -> Option<i128> {
    if shape.rank() != strides.len() || shape.contains(&0) || strides.iter().any(|stride| *stride < 0) {
        return None;
    }
    Some(shape.iter().zip(strides).map(|(&size, &stride)| (size as i128 - 1) * stride as i128).sum())
}

/// No size that is larger occurs, so that products of a few of them can be had.
const MOST: usize = 1 << 40;

pub(crate) type Checked<T = ()> = Result<T, String>;

/// An error unless something holds.
pub(crate) fn holds(condition: bool, what: impl FnOnce() -> String) -> Checked {
    if condition { Ok(()) } else { Err(what()) }
}

impl Plan {
    /// Checks a plan that may have been changed since it was made. The error says what is wrong.
    pub fn check(&self, surroundings: &Surroundings) -> Checked {
        let check = Check { plan: self, around: surroundings };
        check.buffers()?;
        check.scalars()?;
        for (number, kernel) in self.kernels.iter().enumerate() {
            well_formed(kernel).map_err(|what| format!("kernel {number}: {what}"))?;
        }
        let mut uses = Vec::with_capacity(self.steps.len());
        for (number, step) in self.steps.iter().enumerate() {
            let used = check.step(number, step).map_err(|reason| format!("step {number}: {reason}"))?;
            uses.push(used);
        }
        check.bands()?;
        check.lifetimes(&uses)
    }

    /// Checks that all launches of a kernel are what its text was written for.
    pub fn check_signatures<'a>(&self, signatures: impl Iterator<Item = &'a Signature>) -> Checked {
        let signatures: Vec<&Signature> = signatures.collect();
        for step in &self.steps {
            if let Step::Launch(launch) = step {
                let (kernel, signature) = (&self.kernels[launch.kernel], signatures[launch.kernel]);
                holds(signature.fits(kernel, &launch.numbers), || {
                    "loops that a kernel was not written for".into()
                })?;
            }
        }
        Ok(())
    }
}

/// What a step reads and writes.
#[derive(Default)]
struct Uses {
    reads: Vec<BufferId>,
    writes: Vec<BufferId>,
    /// Bytes of the arena that it works in.
    free: Range<usize>,
}

struct Check<'a> {
    plan: &'a Plan,
    around: &'a Surroundings,
}

impl Check<'_> {
    fn buffers(&self) -> Checked {
        let Plan { buffers, arena_bytes, outputs, .. } = self.plan;
        let limit = |output: usize| {
            self.around.outputs.get(output).map(TensorTy::bytes).ok_or_else(|| format!("no output {output}"))
        };
        for (number, buffer) in buffers.iter().enumerate() {
            let ty = &buffer.ty;
            let wrong = || format!("buffer {number} does not fit its place");
            let elements = ty.shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
            let bytes = elements.and_then(|elements| elements.checked_mul(ty.dtype.size()));
            holds(bytes == Some(ty.bytes) && ty.bytes <= MOST, wrong)?;
            holds(ty.strides.len() == ty.shape.rank(), wrong)?;
            let is_inside = |reach: usize| {
                ty.bytes == 0 || last(&ty.shape, &ty.strides).is_some_and(|last| last < reach as i128)
            };
            let fits = |offset: usize, limit: usize| {
                let is_inside = is_inside(ty.bytes / ty.dtype.size());
                holds(is_inside && offset.checked_add(ty.bytes).is_some_and(|end| end <= limit), wrong)
            };
            match buffer.place {
                Place::Input(input) => match self.around.inputs.get(input) {
                    Some(Given::Tensor { dtype, reach }) => {
                        holds(*dtype == ty.dtype && is_inside(*reach), wrong)?
                    }
                    Some(Given::Number(_)) | None => return Err(wrong()),
                },
                Place::Output(output) => {
                    let given = self.around.outputs.get(output);
                    holds(given.is_some_and(|given| given.dtype == ty.dtype), wrong)?;
                    fits(0, limit(output)?)?;
                }
                Place::BeforeOutput { output, offset } => fits(offset, limit(output)?)?,
                Place::Arena { offset } => {
                    fits(offset, *arena_bytes)?;
                }
                // Looked at with the steps that have it.
                Place::Band { .. } => {}
            }
        }
        holds(*arena_bytes <= MOST, || "an arena too large".into())?;
        holds(outputs.len() == self.around.outputs.len(), || "another number of outputs".into())?;
        for (number, id) in outputs.iter().enumerate() {
            let buffer = buffers.get(id.index()).ok_or("an output without a buffer")?;
            let ty = &self.around.outputs[number];
            let is_it = buffer.place == Place::Output(number)
                && (buffer.ty.dtype, &buffer.ty.shape) == (ty.dtype, &ty.shape);
            holds(is_it, || format!("output {number} is another tensor"))?;
        }
        Ok(())
    }

    fn scalars(&self) -> Checked {
        for (number, scalar) in self.plan.scalars.iter().enumerate() {
            let kinds = scalar.args.iter().map(|&arg| self.kind(arg, number)).collect::<Checked<Vec<_>>>()?;
            let tys: Vec<Ty> = kinds.into_iter().map(Ty::Scalar).collect();
            let is_number = scalar.op.infer(&tys).is_ok_and(|out| matches!(out.first(), Some(Ty::Scalar(_))));
            holds(is_number && tys.len() <= 4, || format!("number {number} is not computed from numbers"))?;
        }
        Ok(())
    }

    /// The kind of a number, of which there are so many computed ones.
    fn kind(&self, scalar: ScalarRef, computed: usize) -> Checked<ScalarKind> {
        match scalar {
            ScalarRef::Input(input) => match self.around.inputs.get(input) {
                Some(Given::Number(kind)) => Ok(*kind),
                Some(Given::Tensor { .. }) | None => Err(format!("input {input} is no number")),
            },
            ScalarRef::Constant(Scalar::Bool(_)) => Ok(ScalarKind::Bool),
            ScalarRef::Constant(Scalar::Int(_)) => Ok(ScalarKind::Int),
            ScalarRef::Constant(Scalar::Float(_)) => Ok(ScalarKind::Float),
            ScalarRef::Computed(at) if at < computed => Ok(self.plan.scalars[at].kind),
            ScalarRef::Computed(at) => Err(format!("number {at} is not there yet")),
        }
    }

    fn is_kind(&self, scalar: ScalarRef, kind: ScalarKind) -> Checked {
        let found = self.kind(scalar, self.plan.scalars.len())?;
        holds(found == kind, || format!("a number is {}, not {}", found.name(), kind.name()))
    }

    fn dtype(&self, id: BufferId) -> Checked<DType> {
        let buffer = self.plan.buffers.get(id.index());
        buffer.map(|buffer| buffer.ty.dtype).ok_or_else(|| format!("no buffer {}", id.0))
    }

    /// How many elements there are from a buffer's first one on.
    fn reach(&self, id: BufferId) -> Checked<i128> {
        let buffer = self.plan.buffers.get(id.index()).ok_or_else(|| format!("no buffer {}", id.0))?;
        Ok(match (buffer.place, &self.around.inputs) {
            (Place::Input(input), inputs) => match &inputs[input] {
                Given::Tensor { reach, .. } => *reach as i128,
                Given::Number(_) => 0,
            },
            _ => (buffer.ty.bytes / buffer.ty.dtype.size()) as i128,
        })
    }

    /// Checks that elements from `first` to `last`, counted from a place, are there.
    fn inside(&self, at: BufferRef, first: i128, last: i128) -> Checked {
        let (from, to) = (i128::from(at.offset) + first, i128::from(at.offset) + last);
        let reach = self.reach(at.buffer)?;
        holds(0 <= from && to < reach, || {
            format!("buffer {}: {from} to {to} of {reach} elements", at.buffer.0)
        })
    }

    fn of_dtype(&self, id: BufferId, dtype: DType) -> Checked {
        let found = self.dtype(id)?;
        holds(found == dtype, || format!("buffer {} is {found}, not {dtype}", id.0))
    }

    /// Checks that an operand lies inside of its buffer, and that products of its sizes can be had.
    fn view(&self, view: &ViewRef) -> Checked {
        let ViewRef { at, ty, strides } = view;
        self.of_dtype(at.buffer, ty.dtype)?;
        holds(ty.shape.rank() == strides.len(), || "an operand without all its strides".into())?;
        let elements = ty.shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        let is_small = elements.is_some_and(|elements| elements <= MOST);
        holds(is_small && ty.shape.iter().all(|&size| size <= MOST), || "an operand too large".into())?;
        if ty.shape.contains(&0) {
            return Ok(());
        }
        let mut range = (0, 0);
        for (&size, &stride) in ty.shape.iter().zip(strides) {
            let last = (size as i128 - 1) * stride as i128;
            range = (range.0 + last.min(0), range.1 + last.max(0));
        }
        self.inside(*at, range.0, range.1)
    }

    fn step(&self, number: usize, step: &Step) -> Checked<Uses> {
        match step {
            Step::Launch(launch) => self.launch(launch),
            Step::Call(call) => self.call(number, call),
            // They stand for kernels that a compiler failed on, and such plans are not kept.
            Step::OneByOne(_) => Err("ops one by one".into()),
        }
    }

    fn call(&self, number: usize, call: &Call) -> Checked<Uses> {
        let Call { op, args, scalars, outs, free, constant: _, then, loc: _ } = call;
        args.iter().chain(outs).try_for_each(|view| self.view(view))?;
        let forwards = args.iter().chain(outs).all(|view| view.strides.iter().all(|stride| *stride >= 0));
        holds(forwards || call.product().is_some(), || "an operand that runs backwards".into())?;
        let is_wide = call.widens();
        let widened = |ty: TensorTy| match ty.dtype {
            DType::F16 | DType::BF16 if is_wide => TensorTy { dtype: DType::F32, ..ty },
            _ => ty,
        };
        let tensors = call.types().into_iter().map(|ty| Ty::Tensor(widened(ty)));
        let numbers =
            scalars.iter().map(|&scalar| self.kind(scalar, self.plan.scalars.len()).map(Ty::Scalar));
        let tys = tensors.map(Ok).chain(numbers).collect::<Checked<Vec<Ty>>>()?;
        let made = op.infer(&tys).map_err(|why| format!("{}: {why:?}", op.name()))?;
        let is_result = |(made, out): (&Ty, &ViewRef)| made.as_tensor() == Some(&out.ty);
        let results = made.len() == outs.len() && made.iter().zip(outs).all(is_result);
        holds(results, || format!("{} gives other results", op.name()))?;
        if matches!(op, kiln_ir::Op::Bmm {}) {
            // The dims that count matrices are joined above: each operand may have its own.
            holds(args.iter().all(|arg| arg.ty.shape.rank() >= 3), || {
                "a batched product of matrices".into()
            })?;
        }
        let fits = free.start <= free.end && free.end <= self.plan.arena_bytes;
        holds(fits, || "free memory outside of the arena".into())?;
        match then {
            None => {}
            Some(Then::Rows(epilogue)) => {
                let product = call.product().filter(|product| product.batch == 1);
                let rows = product.ok_or("an epilogue of no product")?.m;
                let (_, kernel) = self.next(number)?;
                holds(in_rows(&kernel, *epilogue, rows), || "an epilogue for other rows".into())?;
            }
            Some(Then::Planes(on)) => self.planes(on, number, call)?,
        }
        let ids = |views: &[ViewRef]| views.iter().map(|view| view.at.buffer).collect();
        Ok(Uses { reads: ids(args), writes: ids(outs), free: free.clone() })
    }

    /// The kernel that runs next, as it is launched there.
    fn next(&self, number: usize) -> Checked<(&Launch, Kernel)> {
        match self.plan.steps.get(number + 1) {
            Some(Step::Launch(launch)) => Ok((launch, self.kernel(launch)?)),
            _ => Err("an epilogue without a kernel".into()),
        }
    }

    fn kernel(&self, launch: &Launch) -> Checked<Kernel> {
        let known =
            self.plan.kernels.get(launch.kernel).ok_or_else(|| format!("no kernel {}", launch.kernel))?;
        let mut count = 0;
        known.each_number(&mut |_| count += 1);
        holds(launch.numbers.len() == count, || "loops of other numbers".into())?;
        Ok(self.plan.kernel(launch))
    }

    fn launch(&self, launch: &Launch) -> Checked<Uses> {
        let kernel = self.kernel(launch)?;
        let Launch { kernel: _, numbers: _, bufs, rows, scalars, checks, coarser } = launch;
        holds(*coarser > 0, || "pieces of nothing".into())?;
        holds(scalars.len() == kernel.scalars.len(), || "another number of numbers".into())?;
        for (&scalar, &kind) in scalars.iter().zip(&kernel.scalars) {
            self.is_kind(scalar, kind)?;
        }
        let code = |kind: &ExprKind| if let ExprKind::Bounded { code, .. } = kind { *code } else { 0 };
        let codes = kernel.exprs.iter().map(|expr| code(&expr.kind)).max().unwrap_or(0);
        holds(codes <= checks.len(), || "a check without a text".into())?;
        let columns = kernel.buffers.len();
        let is_table = kernel.mode == Mode::Table;
        let count = if is_table { rows.len().checked_mul(columns) } else { Some(columns) };
        holds(count == Some(bufs.len()) && (is_table || rows.is_empty()), || {
            "another number of buffers".into()
        })?;
        for (at, &dtype) in bufs.iter().zip(kernel.buffers.iter().cycle()) {
            self.of_dtype(at.buffer, dtype)?;
        }
        let mut uses = Uses::default();
        accesses(&kernel, rows, &mut |access: Access| {
            let at = bufs[access.buffer];
            if let Some((first, last)) = access.range {
                self.inside(at, first, last)?;
            }
            let list = if access.is_write { &mut uses.writes } else { &mut uses.reads };
            list.push(at.buffer);
            Ok(())
        })?;
        Ok(uses)
    }

    /// A kernel that runs on parts of a convolution's planes.
    fn planes(&self, on: &OnPlanes, number: usize, call: &Call) -> Checked {
        let (launch, kernel) = self.next(number)?;
        let shape = &call.outs.first().ok_or("no result")?.ty.shape;
        let planes = shape.iter().take(2).product::<usize>();
        let length = if on.is_one_loop { planes * on.pixels } else { on.pixels };
        let fits = kernel.mode == Mode::Map
            && on.steps.len() == launch.bufs.len()
            && planes.checked_mul(on.pixels) == Some(shape.numel())
            && kernel.axes[kernel.vector_axis()].extent == length as i64
            && on.is_one_loop == (kernel.outer() == 1);
        holds(fits, || "an epilogue for other planes".into())?;
        for (at, &step) in launch.bufs.iter().zip(&on.steps) {
            let end = (length as i128 - 1) * i128::from(step);
            self.inside(*at, end.min(0), end.max(0))?;
        }
        Ok(())
    }

    fn bands(&self) -> Checked {
        let Plan { steps, bands, buffers, .. } = self.plan;
        let mut taken = vec![false; buffers.len()];
        let mut from = 0;
        for band in bands {
            let wrong = || "bands of other steps".to_string();
            let end = band.first.checked_add(band.steps).filter(|end| *end <= steps.len());
            let end = end.filter(|_| band.first >= from && band.steps > 0).ok_or_else(wrong)?;
            from = end;
            let first = steps[band.first].product().ok_or_else(wrong)?;
            let (batch, all) = (first.batch, first.m);
            holds(band.rows > 0 && band.count > 0 && band.bytes <= MOST, wrong)?;
            let before_last = band.rows.checked_mul(band.count - 1).filter(|rows| *rows < all.max(1));
            let most = before_last
                .map(|before| (all - before.min(all)).max(band.rows.min(all)))
                .ok_or_else(wrong)?;
            let mut kernels = band.kernels.iter();
            for step in &steps[band.first..end] {
                let mut ids: Vec<BufferId> = Vec::new();
                step.touched(&mut |id| ids.push(id));
                match (step, step.product()) {
                    (Step::Launch(launch), _) => {
                        let epilogue = kernels.next().ok_or_else(wrong)?;
                        let whole = in_rows(&self.kernel(launch)?, *epilogue, batch * all)
                            && (band.count == 1 || band.rows.is_multiple_of(epilogue.rows))
                            && (batch == 1 || all.is_multiple_of(epilogue.rows));
                        holds(whole, wrong)?;
                    }
                    (_, Some(product)) => {
                        holds(
                            product.out.ty.dtype.is_float() && (product.batch, product.m) == (batch, all),
                            wrong,
                        )?;
                    }
                    (_, None) => return Err(wrong()),
                }
                for id in ids {
                    let Place::Band { offset, row_bytes } = buffers[id.index()].place else { continue };
                    taken[id.index()] = true;
                    let rows = row_bytes.checked_mul(batch * all) == Some(buffers[id.index()].ty.bytes);
                    let own = row_bytes.checked_mul(most).and_then(|bytes| bytes.checked_add(offset));
                    holds(rows && own.is_some_and(|end| end <= band.bytes), wrong)?;
                }
            }
            holds(kernels.next().is_none(), wrong)?;
        }
        let in_band = |buffer: usize| matches!(buffers[buffer].place, Place::Band { .. });
        holds((0..buffers.len()).all(|buffer| !in_band(buffer) || taken[buffer]), || {
            "a buffer of no band".into()
        })
    }

    /// Nothing is read before it was written, nor overwritten before it was read for the last time; inputs are changed
    /// only where that was promised.
    fn lifetimes(&self, uses: &[Uses]) -> Checked {
        let Plan { steps, bands, buffers, outputs, .. } = self.plan;
        let mut written = vec![false; buffers.len()];
        let mut lives: Vec<Option<(usize, usize)>> = vec![None; buffers.len()];
        for (step, used) in uses.iter().enumerate() {
            for id in &used.reads {
                let BufferPlan { place, ty } = &buffers[id.index()];
                // What has no elements is there as it is.
                let is_there = matches!(place, Place::Input(_)) || ty.bytes == 0;
                holds(is_there || written[id.index()] || used.writes.contains(id), || {
                    format!("step {step} reads buffer {} before it is written", id.0)
                })?;
            }
            for id in &used.writes {
                if let Place::Input(input) = buffers[id.index()].place {
                    let may = self.around.writes.get(input).copied().unwrap_or(false);
                    holds(may, || format!("step {step} changes input {input}"))?;
                }
                written[id.index()] = true;
            }
            // A kernel after a product runs together with it, and so do the steps of a band.
            let first = if step > 0 && steps[step - 1].has_epilogue() { step - 1 } else { step };
            let band = bands.iter().find(|band| (band.first..band.first + band.steps).contains(&step));
            let (first, last) = band.map_or((first, step), |band| (band.first, band.first + band.steps - 1));
            for id in used.reads.iter().chain(&used.writes) {
                let life = lives[id.index()].get_or_insert((first, last));
                *life = (life.0.min(first), life.1.max(last));
            }
        }
        let is_missing = |(id, ty): &(&BufferId, &TensorTy)| ty.bytes() > 0 && !written[id.index()];
        let missing = outputs.iter().zip(&self.around.outputs).find(is_missing);
        holds(missing.is_none(), || "an output that nothing writes".into())?;
        self.overlaps(uses, &lives)
    }

    fn overlaps(&self, uses: &[Uses], lives: &[Option<(usize, usize)>]) -> Checked {
        let Plan { steps, buffers, arena_bytes, .. } = self.plan;
        // Where memory is shared: the arena, then each output, one after the other.
        let mut bases = vec![*arena_bytes];
        for ty in &self.around.outputs {
            bases.push(bases[bases.len() - 1].saturating_add(ty.bytes()));
        }
        let mut spans: Vec<Span> = Vec::new();
        for (number, (buffer, life)) in buffers.iter().zip(lives).enumerate() {
            let Some((first, mut last)) = *life else { continue };
            let start = match buffer.place {
                Place::Arena { offset } => offset,
                Place::BeforeOutput { output, offset } => bases[output] + offset,
                Place::Output(output) => {
                    last = usize::MAX;
                    bases[output]
                }
                Place::Input(_) | Place::Band { .. } => continue,
            };
            spans.push(Span { number, bytes: start..start + buffer.ty.bytes, first, last });
        }
        spans.sort_by_key(|span| span.bytes.start);
        // One may take the other's place in the kernel that reads it for the last time, element by element.
        let is_heir = |from: &Span, to: &Span| {
            let read_by = to.first + usize::from(steps[to.first].has_epilogue());
            from.last == read_by
                && from.bytes == to.bytes
                && matches!(steps.get(read_by), Some(Step::Launch(_)))
        };
        for (at, one) in spans.iter().enumerate() {
            for other in spans[at + 1..].iter().take_while(|other| other.bytes.start < one.bytes.end) {
                let apart = one.last < other.first || other.last < one.first || other.bytes.is_empty();
                holds(apart || is_heir(one, other) || is_heir(other, one), || {
                    format!("buffers {} and {} share memory", one.number, other.number)
                })?;
            }
        }
        for (step, Uses { free, .. }) in uses.iter().enumerate().filter(|(_, used)| !used.free.is_empty()) {
            let is_used = |span: &&Span| {
                let lives = span.first <= step && step <= span.last;
                lives && span.bytes.start < free.end && free.start < span.bytes.end
            };
            let found = spans.iter().find(is_used);
            holds(found.is_none(), || format!("step {step} works where something lies"))?;
        }
        Ok(())
    }
}

/// Whether a kernel goes through so many rows in order, some of its items for some of them.
fn in_rows(kernel: &Kernel, Epilogue { rows, items: per }: Epilogue, all: usize) -> bool {
    let Some((own, _)) = signature::stride(kernel) else { return false };
    let items = i128::from(signature::items(kernel));
    let covered = all.div_ceil(rows.max(1)) as i128 * i128::from(per);
    rows > 0 && per > 0 && per % own == 0 && covered >= items && covered - i128::from(per) < items.max(1)
}

/// A buffer's bytes, and the steps between which they are its.
struct Span {
    number: usize,
    bytes: Range<usize>,
    first: usize,
    last: usize,
}
