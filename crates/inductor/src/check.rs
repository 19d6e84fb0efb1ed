//! Whether a plan that was read from somewhere stays inside of its memory: everything that running it takes on trust.
//!
//! A plan's seal says who wrote it. This says that what was written can be run, whoever did: numbers of buffers, places
//! and extents fit together, kernels are those that these loops have, their arguments follow from their loops, and
//! nothing is read before it was written or while it is overwritten. What it can't say is that the plan computes what
//! the graph says: a constant may be any number.

use std::ops::Range;

use kiln_ir::{DType, Def, Graph, Op, Scalar, ScalarKind, Shape, Strides, TensorTy, Ty, Value};

use crate::check_kernels::{Access, Known};
use crate::options::{Layout, Options};
use crate::plan::{
    BatchRef, BufferId, BufferPlan, BufferRef, Epilogue, MatrixRef, OnPlanes, Place, Plan, ScalarRef, Step,
    ViewRef,
};

/// What a plan takes and gives, as whoever runs it knows.
#[derive(Clone, Debug)]
pub struct Surroundings<'a> {
    /// Its inputs.
    pub inputs: Vec<Given>,
    /// Its results, dense.
    pub outputs: Vec<TensorTy>,
    /// By input, whether the plan may change it.
    pub writes: Vec<bool>,
    /// How it was lowered.
    pub options: &'a Options,
}

impl<'a> Surroundings<'a> {
    /// What the plan of a graph takes and gives.
    pub fn of(graph: &Graph, options: &'a Options) -> Surroundings<'a> {
        let given = |(&value, layout): (&Value, &Layout)| match graph.ty(value) {
            Ty::Scalar(kind) => Given::Number(*kind),
            Ty::Tensor(ty) => Given::tensor(ty, &layout.strides),
            Ty::List(_) => Given::Tensor { dtype: DType::F32, reach: 0 },
        };
        let inputs = graph.inputs.iter().zip(&*options.input_layouts).map(given).collect();
        let mut writes = vec![false; graph.inputs.len()];
        for write in &graph.writes {
            if let Def::Input(number) = graph.def(write.target) {
                writes[number as usize] = true;
            }
        }
        let outputs = graph.outputs.iter().filter_map(|&value| graph.ty(value).as_tensor().cloned());
        Surroundings { inputs, outputs: outputs.collect(), writes, options }
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
    pub fn check(&self, surroundings: &Surroundings<'_>) -> Checked {
        let check = Check { plan: self, around: surroundings };
        holds(self.isa == surroundings.options.isa, || "another instruction set".into())?;
        check.buffers()?;
        check.scalars()?;
        let known: Vec<Known> = self
            .kernels
            .iter()
            .map(|kernel| Known::new(kernel, surroundings.options))
            .collect::<Checked<_>>()?;
        let mut uses = Vec::with_capacity(self.steps.len());
        for (number, step) in self.steps.iter().enumerate() {
            let next = self.steps.get(number + 1);
            let used = check.step(step, next, &known).map_err(|reason| format!("step {number}: {reason}"))?;
            uses.push(used);
        }
        check.bands()?;
        check.lifetimes(&uses)
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
    around: &'a Surroundings<'a>,
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

    fn matrix(&self, matrix: &MatrixRef, rows: usize, columns: usize, dtype: DType) -> Checked {
        self.batch(matrix, &Shape::default(), &Strides::default(), rows, columns, dtype)
    }

    fn batch(
        &self,
        matrix: &MatrixRef,
        sizes: &[usize],
        strides: &[isize],
        rows: usize,
        columns: usize,
        dtype: DType,
    ) -> Checked {
        self.of_dtype(matrix.at.buffer, dtype)?;
        holds(sizes.len() == strides.len(), || "sizes and strides are not as many".into())?;
        if rows == 0 || columns == 0 || sizes.contains(&0) {
            return Ok(());
        }
        let mut range = (0, 0);
        let own = [(rows, matrix.row), (columns, matrix.column)];
        for (size, stride) in own.into_iter().chain(sizes.iter().zip(strides).map(|(&n, &s)| (n, s as i64))) {
            let last = (size as i128 - 1) * i128::from(stride);
            range = (range.0 + last.min(0), range.1 + last.max(0));
        }
        self.inside(matrix.at, range.0, range.1)
    }

    /// The type of an operand.
    fn view(&self, view: &ViewRef) -> Checked<TensorTy> {
        let dtype = self.dtype(view.at.buffer)?;
        holds(view.shape.rank() == view.strides.len(), || "an operand without all its strides".into())?;
        holds(view.shape.iter().all(|&size| size <= MOST), || "an operand too large".into())?;
        if !view.shape.contains(&0) {
            let last = last(&view.shape, &view.strides).ok_or("an operand that runs backwards")?;
            self.inside(view.at, 0, last)?;
        }
        Ok(TensorTy::new(dtype, view.shape.clone()))
    }

    /// Checks that a result of this type fits a buffer as it lies there.
    fn result(&self, id: BufferId, ty: &TensorTy) -> Checked {
        self.of_dtype(id, ty.dtype)?;
        let there = &self.plan.buffers[id.index()].ty;
        let is_dense = there.strides == there.shape.contiguous_strides();
        holds(there.shape.numel() == ty.shape.numel() && is_dense, || {
            format!("buffer {} has no room for {ty}", id.0)
        })
    }

    fn infer(op: &Op, args: &[TensorTy]) -> Checked<TensorTy> {
        let tys: Vec<Ty> = args.iter().cloned().map(Ty::Tensor).collect();
        let out = op.infer(&tys).map_err(|why| format!("{}: {why:?}", op.name()))?;
        out.first().and_then(Ty::as_tensor).cloned().ok_or_else(|| format!("{} gives no tensor", op.name()))
    }

    fn free(&self, free: &Range<usize>) -> Checked<Range<usize>> {
        let fits = free.start <= free.end && free.end <= self.plan.arena_bytes;
        holds(fits, || "free memory outside of the arena".into())?;
        Ok(free.clone())
    }

    fn step(&self, step: &Step, next: Option<&Step>, known: &[Known]) -> Checked<Uses> {
        let sizes =
            |sizes: &[usize]| holds(sizes.iter().all(|&size| size <= MOST), || "a product too large".into());
        match step {
            Step::Kernel { kernel, .. } => {
                let known = known.get(*kernel).ok_or_else(|| format!("no kernel {kernel}"))?;
                self.kernel(step, known)
            }
            Step::Gemm { m, n, k, lhs, rhs, dst, accumulate, dtype, constant: _, epilogue } => {
                sizes(&[*m, *n, *k])?;
                self.matrix(lhs, *m, *k, *dtype)?;
                self.matrix(rhs, *k, *n, *dtype)?;
                self.matrix(dst, *m, *n, *dtype)?;
                if let Some(Epilogue { rows, items: per }) = epilogue {
                    let Some(Step::Kernel { items, .. }) = next else {
                        return Err("an epilogue without a kernel".into());
                    };
                    let bands = m.div_ceil((*rows).max(1)) as i128;
                    let all = bands * i128::from(*per);
                    let fits = *rows > 0
                        && *per > 0
                        && all >= i128::from(*items)
                        && all - i128::from(*per) < i128::from(*items).max(1);
                    holds(fits, || "an epilogue for other rows".into())?;
                }
                let mut reads = vec![lhs.at.buffer, rhs.at.buffer];
                reads.extend(accumulate.then_some(dst.at.buffer));
                Ok(Uses { reads, writes: vec![dst.at.buffer], free: 0..0 })
            }
            Step::Bmm { batch, m, n, k, lhs, rhs, dst, dtype } => {
                sizes(&[*batch, *m, *n, *k])?;
                for (BatchRef { matrix, sizes, strides }, rows, columns) in [(lhs, *m, *k), (rhs, *k, *n)] {
                    holds(sizes.numel() == *batch, || "another number of matrices".into())?;
                    self.batch(matrix, sizes, strides, rows, columns, *dtype)?;
                }
                self.result(*dst, &TensorTy::new(*dtype, [*batch, *m, *n]))?;
                let reads = vec![lhs.matrix.at.buffer, rhs.matrix.at.buffer];
                Ok(Uses { reads, writes: vec![*dst], free: 0..0 })
            }
            Step::Convolution { op, x, weight, dst, dtype, constant: _, free, epilogue } => {
                let args = [self.view(x)?, self.view(weight)?];
                let out = Check::infer(op, &args)?;
                holds(args.iter().all(|ty| ty.dtype == *dtype), || "a convolution of another dtype".into())?;
                self.result(*dst, &out)?;
                if let Some(on) = epilogue {
                    self.planes(on, &out, next, known)?;
                }
                let reads = vec![x.at.buffer, weight.at.buffer];
                Ok(Uses { reads, writes: vec![*dst], free: self.free(free)? })
            }
            Step::Random { distribution: _, buffer, seed, offset } => {
                let dtype = self.dtype(*buffer)?;
                let there = &self.plan.buffers[buffer.index()].ty;
                self.result(*buffer, &TensorTy::new(dtype, there.shape.clone()))?;
                holds(matches!(dtype, DType::F32 | DType::F64), || "random numbers of another dtype".into())?;
                self.is_kind(*seed, ScalarKind::Int)?;
                self.is_kind(*offset, ScalarKind::Int)?;
                Ok(Uses { reads: Vec::new(), writes: vec![*buffer], free: 0..0 })
            }
            Step::Copy { src, dst } => {
                self.of_dtype(*dst, self.dtype(*src)?)?;
                let [from, to] = [src, dst].map(|id| &self.plan.buffers[id.index()].ty);
                let same = from.shape.numel() == to.shape.numel();
                let lies = from.shape == to.shape || to.strides == to.shape.contiguous_strides();
                holds(same && lies, || "a copy to a tensor of other elements".into())?;
                Ok(Uses { reads: vec![*src], writes: vec![*dst], free: 0..0 })
            }
            Step::Fallback { op, args, outs, free, loc: _ } => {
                let tys = args.iter().map(|arg| self.view(arg)).collect::<Checked<Vec<_>>>()?;
                let out = Check::infer(op, &tys)?;
                let [id] = outs[..] else { return Err("a library call without one result".into()) };
                self.result(id, &out)?;
                let reads = args.iter().map(|arg| arg.at.buffer).collect();
                Ok(Uses { reads, writes: vec![id], free: self.free(free)? })
            }
            // They stand for kernels that a compiler failed on, and such plans are not kept.
            Step::Eager { .. } => Err("ops one by one".into()),
        }
    }

    fn kernel(&self, step: &Step, known: &Known) -> Checked<Uses> {
        let Step::Kernel { bufs, ints, scalars, items, grain, scratch_bytes, checks, .. } = step else {
            return Err("no kernel".into());
        };
        holds(scalars.len() == known.scalars().len(), || "another number of numbers".into())?;
        for (&scalar, &kind) in scalars.iter().zip(known.scalars()) {
            self.is_kind(scalar, kind)?;
        }
        holds(known.codes() <= checks.len(), || "a check without a text".into())?;
        let columns = known.buffers();
        for (at, &dtype) in bufs.iter().zip(columns.iter().cycle()) {
            self.of_dtype(at.buffer, dtype)?;
        }
        let launch = (&ints[..], *items, *grain, *scratch_bytes);
        let mut uses = Uses::default();
        known.accesses(bufs.len(), launch, self.around.options, &mut |access: Access| {
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
    fn planes(&self, on: &OnPlanes, out: &TensorTy, next: Option<&Step>, known: &[Known]) -> Checked {
        let Some(Step::Kernel { kernel, bufs, .. }) = next else {
            return Err("an epilogue without a kernel".into());
        };
        let known = known.get(*kernel).ok_or_else(|| format!("no kernel {kernel}"))?;
        let blocks = known.blocks().ok_or("an epilogue that is not cut into blocks")?;
        let planes = out.shape.iter().take(2).product::<usize>();
        let fits = [on.length, on.width, on.blocks] == blocks
            && on.steps.len() == bufs.len()
            && planes * on.pixels == out.shape.numel();
        holds(fits, || "an epilogue for other planes".into())?;
        let last = if on.is_one_loop { planes * on.pixels } else { on.pixels } as i128 - 1;
        for (at, &step) in bufs.iter().zip(&on.steps) {
            let end = last * i128::from(step);
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
            let (batch, all) = match &steps[band.first] {
                Step::Gemm { m, .. } => (1, *m),
                Step::Bmm { batch, m, .. } => (*batch, *m),
                _ => return Err(wrong()),
            };
            holds(band.rows > 0 && band.count > 0 && band.bytes <= MOST, wrong)?;
            let before_last = band.rows.checked_mul(band.count - 1).filter(|rows| *rows < all.max(1));
            let most = before_last
                .map(|before| (all - before.min(all)).max(band.rows.min(all)))
                .ok_or_else(wrong)?;
            let mut kernels = band.kernels.iter();
            for step in &steps[band.first..end] {
                let ids: Vec<BufferId> = match step {
                    Step::Kernel { bufs, items, .. } => {
                        let Epilogue { rows, items: per } = kernels.next().ok_or_else(wrong)?;
                        let whole = *rows > 0
                            && *per > 0
                            && (band.count == 1 || band.rows.is_multiple_of(*rows))
                            && (batch == 1 || all.is_multiple_of(*rows));
                        let groups = (batch * all).div_ceil((*rows).max(1)) as i128 * i128::from(*per);
                        let fits = groups >= i128::from(*items)
                            && groups - i128::from(*per) < i128::from(*items).max(1);
                        holds(whole && fits, wrong)?;
                        bufs.iter().map(|at| at.buffer).collect()
                    }
                    Step::Gemm { m, lhs, rhs, dst, .. } => {
                        holds(batch == 1 && *m == all, wrong)?;
                        [lhs, rhs, dst].map(|matrix| matrix.at.buffer).to_vec()
                    }
                    Step::Bmm { batch: own, m, lhs, rhs, dst, .. } => {
                        holds(*own == batch && *m == all, wrong)?;
                        vec![lhs.matrix.at.buffer, rhs.matrix.at.buffer, *dst]
                    }
                    _ => return Err(wrong()),
                };
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
                && matches!(steps.get(read_by), Some(Step::Kernel { .. }))
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

/// A buffer's bytes, and the steps between which they are its.
struct Span {
    number: usize,
    bytes: Range<usize>,
    first: usize,
    last: usize,
}
