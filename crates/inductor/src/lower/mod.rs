//! From a group of graph values to one kernel: every op becomes an expression at an index, views become
//! changes of the index.
//!
//! ```text
//! %1 = exp(%0) : f32[4, 3]                 %0 = load b0[i0*3 + i1]
//! %2 = permute(%1) {dims: [1, 0]}    →     %1 = exp(%0)
//! return %2                                store b1[i1*4 + i0] <- %1
//! ```
//!
//! The loops of a kernel are found on the way: they start as one loop per *segment* (a run of dims that are
//! all kept or all reduced), and are cut where a shape asks for it.

mod build;
mod ops;
pub(crate) mod pooling;
pub(crate) mod positions;
pub(crate) mod scans;
mod space;
pub(crate) mod views;

use kiln_ir::{
    DType, Def, Dims, Fault, Graph, Loc, Node, Op, ScalarKind, Shape, Strides, TensorTy, Ty, Value, planted,
};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::{SmallVec, smallvec};

pub(crate) use build::{Builder, operand_dtype};
pub(crate) use ops::{is_inlined, is_library, operation};
pub(crate) use space::Space;

use crate::fuse::folds;
use crate::lower::scans::Running;
use crate::rewrite::scatters::Scatters;
use crate::{Layout, WhyNot};
use kiln_plan::CheckText;
use kiln_plan::index::{ExprId, Index, Split};
use kiln_plan::loops::{Axis, ExprKind, Kernel, Mode, Operation, Reduction, Scan};

/// Kernels of more operations than this are not made.
pub(crate) const MOST_EXPRS: usize = 600;

/// What lowering needs to know of the rest of the graph.
pub(crate) struct Context<'a> {
    pub graph: &'a Graph,
    /// Strides of the graph's inputs.
    pub layouts: &'a [Layout],
    /// Values that are stored, dense, by some kernel or library step.
    pub stored: &'a FxHashSet<Value>,
    /// Where values go whose places are computed.
    pub scatters: &'a Scatters,
}

/// A root of a kernel: its value, and the index at which it is computed.
pub(crate) struct LoweredRoot {
    pub value: Value,
    pub expr: ExprId,
    pub index: Vec<Index>,
    /// Where it goes along the dim of a scatter.
    pub place: Option<Index>,
}

/// A group of values as one kernel, without stores.
pub(crate) struct Lowered {
    pub kernel: Kernel,
    pub space: Space,
    pub roots: Vec<LoweredRoot>,
    /// The values behind the kernel's buffers.
    pub loads: Vec<Value>,
    /// The numbers behind the kernel's scalars, each converted to a kind.
    pub scalars: Vec<(Value, ScalarKind)>,
    pub checks: Vec<CheckText>,
    /// Node numbers of the ops in it.
    pub nodes: Vec<u32>,
    /// The reductions in it.
    pub reductions: Vec<Value>,
}

/// Why a group can't be one kernel.
pub(crate) enum Refusal {
    /// This value must be stored by another kernel.
    Store(Value, WhyNot),
    /// These roots don't fit together.
    Apart(WhyNot),
}

/// A part of the iteration space.
#[derive(Copy, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    Whole,
    Outer,
    Inner,
}

pub(crate) enum Stop {
    Cut(Split),
    Widen(Space),
    Refuse(Refusal),
}

impl From<Split> for Stop {
    fn from(split: Split) -> Stop {
        Stop::Cut(split)
    }
}

/// Lowers the values `roots` (each at its own index) as one kernel over `space`.
/// Those of `folds` are reductions over the rows of a space of rows.
pub(crate) fn lower_group(
    cx: &Context<'_>,
    roots: &[Value],
    folds: &[Value],
    space: &Space,
) -> Result<Lowered, Refusal> {
    let mut space = space.clone();
    let mut axes: Vec<Axis> = space.axes();
    loop {
        match Lowering::run(cx, roots, folds, &space, &axes) {
            Ok(lowered) => return Ok(lowered),
            Err(Stop::Cut(Split { axis, factor })) => {
                let Axis { extent, inner } = axes[axis];
                axes[axis].extent = extent / factor;
                axes.insert(axis + 1, Axis { extent: factor, inner });
            }
            Err(Stop::Widen(wider)) => {
                space = wider;
                axes = space.axes();
            }
            Err(Stop::Refuse(refusal)) => return Err(refusal),
        }
    }
}

pub(crate) struct Lowering<'a> {
    pub(crate) cx: &'a Context<'a>,
    pub(crate) space: &'a Space,
    axes: &'a [Axis],
    pub(crate) extents: Vec<i64>,
    places: FxHashMap<Value, Vec<Index>>,
    pub(crate) builder: Builder,
    known: FxHashMap<(Value, Vec<Index>), ExprId>,
    loads: Vec<Value>,
    checks: Vec<CheckText>,
    pub(crate) nodes: FxHashSet<u32>,
    pub(crate) reductions: Vec<Value>,
    /// Inside the operand of a reduction, or in a root over the whole space.
    inside: bool,
    /// In a root that is a fold, and not inside the operand of a reduction.
    pub(crate) folding: bool,
}

impl<'a> Lowering<'a> {
    fn run(
        cx: &'a Context<'a>,
        roots: &[Value],
        folds: &[Value],
        space: &'a Space,
        axes: &'a [Axis],
    ) -> Result<Lowered, Stop> {
        let mut this = Lowering {
            cx,
            space,
            axes,
            extents: axes.iter().map(|a| a.extent).collect(),
            places: FxHashMap::default(),
            builder: Builder::default(),
            known: FxHashMap::default(),
            loads: Vec::new(),
            checks: Vec::new(),
            nodes: FxHashSet::default(),
            reductions: Vec::new(),
            inside: false,
            folding: false,
        };
        for &root in roots {
            let shape = this.tensor(root).shape;
            let count = shape.numel() as i64;
            let part = match (folds.contains(&root), count) {
                (true, count) if count == space.inner() => Part::Inner,
                (false, count) if count == space.total() => Part::Whole,
                (false, count) if count == space.outer() => Part::Outer,
                _ => return Err(apart(roots[0], root)),
            };
            let index = this.place(&shape, part)?;
            if roots.len() > 1 && index.iter().any(|i| (0..axes.len()).any(|a| i.is_nested(a))) {
                return Err(apart(roots[0], root));
            }
            this.places.insert(root, index);
        }
        let mut lowered = Vec::new();
        let mut scatters = false;
        for &root in roots {
            let index = this.places[&root].clone();
            this.inside = space.has_inner() && this.tensor(root).shape.numel() as i64 == space.total();
            this.folding = folds.contains(&root);
            let expr = this.compute(root, &index)?;
            let place = this.scattered(root, &index)?;
            scatters |= cx.scatters.is_ordered(root);
            lowered.push(LoweredRoot { value: root, expr, index, place });
        }
        let mut kernel = Kernel::empty(Mode::Map);
        kernel.axes = axes.to_vec();
        kernel.buffers = this.loads.iter().map(|&v| this.tensor(v).dtype).collect();
        kernel.scalars = this.builder.scalars.iter().map(|(_, kind)| *kind).collect();
        kernel.exprs = this.builder.exprs;
        if let Some(root) = folds::needed_too_early(&kernel, &lowered, folds) {
            return Err(Stop::Refuse(Refusal::Apart(WhyNot::OtherPlace { value: root })));
        }
        let is_ordered = scatters || kernel.has_scans();
        if is_ordered && !folds.is_empty() {
            return Err(apart(roots[0], folds[0]));
        }
        if space.is_tall() {
            let why = WhyNot::FewRows { value: roots[0], rows: space.outer(), length: space.inner() };
            // What runs in order can't be cut at all, and would keep reductions from it.
            if is_ordered && (scatters || !kernel.depths().iter().all(|&depth| depth == 0)) {
                return Err(Stop::Refuse(Refusal::Apart(why)));
            }
            // Only one pass can be cut into chunks: a reduction that another one reads comes first.
            let depths = kernel.depths();
            if depths.iter().any(|&depth| depth > 1) {
                return Err(Stop::Refuse(Refusal::Store(this.reductions[0], why)));
            }
            let whole = |r: &LoweredRoot| {
                this.cx.graph.ty(r.value).as_tensor().is_some_and(|t| t.shape.numel() as i64 == space.total())
            };
            if lowered.iter().any(|r| whole(r) && depths[r.expr] > 0) {
                return Err(Stop::Refuse(Refusal::Apart(why)));
            }
        }
        let mut nodes: Vec<u32> = this.nodes.into_iter().collect();
        nodes.sort_unstable();
        Ok(Lowered {
            kernel,
            space: space.clone(),
            roots: lowered,
            loads: this.loads,
            scalars: this.builder.scalars,
            checks: this.checks,
            nodes,
            reductions: this.reductions,
        })
    }

    pub(crate) fn tensor(&self, value: Value) -> TensorTy {
        match self.cx.graph.ty(value) {
            Ty::Tensor(t) => t.clone(),
            Ty::Scalar(kind) => TensorTy::new(kind.dtype(), ()),
            Ty::List(_) => TensorTy::new(DType::F32, ()),
        }
    }

    /// Whether a value is one that this kernel is for.
    pub(crate) fn is_root(&self, value: Value) -> bool {
        self.places.contains_key(&value)
    }

    /// The index of a tensor of this shape that covers a part of the space, in order.
    pub(crate) fn place(&self, shape: &Shape, part: Part) -> Result<Vec<Index>, Stop> {
        let (mut linear, mut step) = (Index::default(), 1);
        let wanted = |axis: &Axis| match part {
            Part::Whole => true,
            Part::Outer => !axis.inner,
            Part::Inner => axis.inner,
        };
        for (a, axis) in self.axes.iter().enumerate().rev().filter(|(_, axis)| wanted(axis)) {
            linear.add_scaled(&Index::axis(a), step);
            step *= axis.extent;
        }
        let mut place = self.unfold(linear, shape)?;
        if self.space.is_reversed() {
            let turned = |a: usize| match self.axes[a] {
                Axis { inner: true, extent } => Index::axis(a).scaled(-1, extent - 1),
                Axis { inner: false, .. } => Index::axis(a),
            };
            place.iter_mut().for_each(|index| *index = index.map(&turned, &|value| value));
        }
        Ok(place)
    }

    /// Whether all roots have an element for each of the space.
    pub(crate) fn is_whole(&self) -> bool {
        self.places.keys().all(|&root| self.tensor(root).shape.numel() as i64 == self.space.total())
    }

    /// A linear index as one index per dim.
    pub(crate) fn unfold(&self, mut linear: Index, shape: &Shape) -> Result<Vec<Index>, Stop> {
        let mut out = vec![Index::default(); shape.rank()];
        let first = shape.iter().position(|&size| size != 1);
        for d in (0..shape.rank()).rev().filter(|&d| shape[d] != 1) {
            if Some(d) == first {
                out[d] = linear;
                break;
            }
            let (high, low) = linear.div_mod((shape[d] as i64).max(1), &self.extents)?;
            out[d] = low;
            linear = high;
        }
        Ok(out)
    }

    /// The expression of a value at an index: loaded, or computed in place.
    pub(crate) fn at(&mut self, value: Value, index: &[Index]) -> Result<ExprId, Stop> {
        if let Some(place) = self.places.get(&value) {
            if place == index {
                return self.compute(value, index);
            }
            if self.cx.stored.contains(&value) {
                return Err(Stop::Refuse(Refusal::Apart(WhyNot::OtherPlace { value })));
            }
        }
        if self.cx.stored.contains(&value) {
            let strides = self.tensor(value).shape.contiguous_strides();
            return Ok(self.load(value, index, &strides));
        }
        self.compute(value, index)
    }

    fn load(&mut self, value: Value, index: &[Index], strides: &Strides) -> ExprId {
        let mut linear = Index::default();
        for (i, &stride) in index.iter().zip(strides) {
            linear.add_scaled(i, stride as i64);
        }
        let linear = linear.joined();
        let buffer = self.loads.iter().position(|&v| v == value).unwrap_or_else(|| {
            self.loads.push(value);
            self.loads.len() - 1
        });
        let dtype = self.tensor(value).dtype.computing();
        self.builder.push(dtype, ExprKind::Load { buffer, index: linear })
    }

    fn compute(&mut self, value: Value, index: &[Index]) -> Result<ExprId, Stop> {
        let key = (value, index.to_vec());
        if let Some(&expr) = self.known.get(&key) {
            return Ok(expr);
        }
        if self.builder.exprs.len() > MOST_EXPRS {
            let why = WhyNot::TooLarge { value, limit: MOST_EXPRS };
            return Err(Stop::Refuse(match self.places.len() {
                1 => Refusal::Store(value, why),
                _ => Refusal::Apart(why),
            }));
        }
        let graph = self.cx.graph;
        let expr = match graph.def(value) {
            Def::Input(number) => {
                let strides = self.cx.layouts[number as usize].strides.clone();
                self.load(value, index, &strides)
            }
            Def::Node { node, .. } if !is_inlined(graph, &graph.nodes[node as usize]) => {
                let strides = self.tensor(value).shape.contiguous_strides();
                self.load(value, index, &strides)
            }
            Def::Node { node, .. } => {
                self.nodes.insert(node);
                let node = &graph.nodes[node as usize];
                let before = std::mem::replace(&mut self.builder.loc, node.loc);
                let expr = self.node(value, node, index)?;
                self.builder.loc = before;
                expr
            }
        };
        self.known.insert(key, expr);
        Ok(expr)
    }

    fn node(&mut self, value: Value, node: &Node, index: &[Index]) -> Result<ExprId, Stop> {
        let graph = self.cx.graph;
        let result = self.tensor(value);
        let x = node.args.first().copied().unwrap_or(value);
        match &node.op {
            Op::Reshape { shape } => {
                let mut linear = Index::default();
                for (i, &stride) in index.iter().zip(&shape.contiguous_strides()) {
                    linear.add_scaled(i, stride as i64);
                }
                let inner = self.unfold(linear, &self.tensor(x).shape)?;
                self.at(x, &inner)
            }
            Op::Permute { dims } => {
                let mut inner = vec![Index::default(); dims.len()];
                for (i, &d) in dims.iter().enumerate() {
                    inner[d] = index[i].clone();
                }
                self.at(x, &inner)
            }
            Op::Expand { shape } => {
                let from = self.tensor(x).shape;
                let lead = shape.rank() - from.rank();
                let inner: Vec<Index> = (0..from.rank())
                    .map(|d| if from[d] == 1 { Index::default() } else { index[d + lead].clone() })
                    .collect();
                self.at(x, &inner)
            }
            Op::Slice { dim, start, step, .. } => {
                let mut inner = index.to_vec();
                let step = if planted(Fault::SliceStepIgnored) { 1 } else { *step };
                inner[*dim] = index[*dim].scaled(step as i64, *start as i64);
                self.at(x, &inner)
            }
            Op::Diagonal { offset, dim1, dim2 } => {
                let along = index[index.len() - 1].clone();
                let mut inner = index[..index.len() - 1].to_vec();
                // The smaller dim goes in first, so that both end up where they belong.
                let (row, column) = ((-offset).max(0), (*offset).max(0));
                let mut places = [(*dim1, row), (*dim2, column)];
                places.sort_unstable();
                for (dim, start) in places {
                    inner.insert(dim, along.scaled(1, start));
                }
                self.at(x, &inner)
            }
            Op::Unfold { dim, step, .. } => {
                let mut inner = index[..index.len() - 1].to_vec();
                inner[*dim] = index[*dim].scaled(*step as i64, 0);
                inner[*dim].add_scaled(&index[index.len() - 1], 1);
                self.at(x, &inner)
            }
            Op::Flip { dims } => {
                let mut inner = index.to_vec();
                for &d in dims.iter() {
                    inner[d] = index[d].scaled(-1, result.shape[d] as i64 - 1);
                }
                self.at(x, &inner)
            }
            Op::Full { dtype, .. } => {
                let number = self.builder.scalar(x, dtype.computing());
                Ok(self.builder.narrow(number, *dtype))
            }
            Op::Arange { dtype: DType::I64, .. }
                if let (Some(start), Some(1)) = (self.whole(x), self.whole(node.args[1])) =>
            {
                Ok(self.builder.push(DType::I64, ExprKind::Position(index[0].scaled(1, start))))
            }
            Op::Arange { dtype, .. } => {
                // Floats are computed in double precision and rounded once.
                let wide = if dtype.computing() == DType::I64 { DType::I64 } else { DType::F64 };
                let (start, step) = (self.builder.scalar(x, wide), self.builder.scalar(node.args[1], wide));
                let position = self.builder.push(DType::I64, ExprKind::Position(index[0].clone()));
                let position = self.builder.convert(position, wide);
                let scaled =
                    self.builder.push(wide, ExprKind::Apply(Operation::Mul, smallvec![position, step]));
                let sum = self.builder.push(wide, ExprKind::Apply(Operation::Add, smallvec![start, scaled]));
                let sum = self.builder.convert(sum, *dtype);
                Ok(self.builder.narrow(sum, *dtype))
            }
            Op::MaxPool2dIndices { .. } if self.tensor(x).shape.numel() == 0 => {
                Ok(self.builder.push(DType::I64, ExprKind::Literal(0)))
            }
            Op::MaxPool2dIndices { .. } => Ok(self.largest_of_window(node, index)?.1),
            Op::AvgPool2d { .. } => self.mean_of_window(node, index),
            Op::AvgPool2dBackward { .. } => self.spread_of_windows(node, index),
            Op::Gather { dim } => {
                if let Some((pool, windows)) = self.gathers_largest(node, index)? {
                    return Ok(self.largest_of_window(&pool, &windows)?.0);
                }
                let at = self.at(node.args[1], index)?;
                let size = self.tensor(x).shape[*dim] as i64;
                if let Some(place) = self.place_of(at, size) {
                    let mut inner = index.to_vec();
                    inner[*dim] = place;
                    return self.at(x, &inner);
                }
                let code = self.check("gather", size, node.loc);
                let bounded = self.builder.push(DType::I64, ExprKind::Bounded { value: at, size, code });
                if size == 0 {
                    // Every index is out of range: nothing is read, the check remains.
                    return Ok(self.builder.convert(bounded, result.dtype));
                }
                let mut inner = index.to_vec();
                inner[*dim] = Index::value(bounded, size);
                self.at(x, &inner)
            }
            Op::Sum { dims, .. } => self.reduce(value, x, dims, Reduction::Sum, result.dtype, index),
            Op::Amax { dims, .. } => self.reduce(value, x, dims, Reduction::Max, result.dtype, index),
            Op::Cumsum { dim, reverse } => {
                self.scan(value, x, Running { scan: Scan::Sum, dim: *dim, reverse: *reverse }, index)
            }
            Op::Cumprod { dim } => {
                self.scan(value, x, Running { scan: Scan::Product, dim: *dim, reverse: false }, index)
            }
            op => {
                let operands = operand_dtype(op, node.args.iter().map(|&v| graph.ty(v)), 0);
                let mut exprs: SmallVec<[ExprId; 3]> = SmallVec::new();
                for &arg in &node.args {
                    // Numbers are added below, in the dtype the op wants them.
                    exprs.push(if graph.ty(arg).is_scalar() { usize::MAX } else { self.at(arg, index)? });
                }
                if let Some(compared) = self.compared_positions(op, &exprs) {
                    return Ok(compared);
                }
                let args = node.args.clone();
                let mut next = exprs.iter();
                let made = self.builder.pointwise::<Stop>(
                    op,
                    &args,
                    operands,
                    result.dtype,
                    &mut |b, v, dtype| {
                        Ok(match next.next() {
                            Some(&expr) if expr != usize::MAX => expr,
                            _ => b.scalar(v, dtype),
                        })
                    },
                )?;
                let why = WhyNot::Stored { value, reason: "it has no loop form" };
                made.ok_or(Stop::Refuse(Refusal::Store(value, why)))
            }
        }
    }

    pub(crate) fn check(&mut self, op: &'static str, size: i64, loc: Loc) -> usize {
        let text = CheckText { op, size, loc };
        let at = self.checks.iter().position(|c| *c == text).unwrap_or_else(|| {
            self.checks.push(text);
            self.checks.len() - 1
        });
        at + 1
    }

    fn reduce(
        &mut self,
        value: Value,
        x: Value,
        dims: &Dims,
        reduction: Reduction,
        dtype: DType,
        index: &[Index],
    ) -> Result<ExprId, Stop> {
        let (from, dtype) = (self.tensor(x), dtype.computing());
        let space = Space::of(&from.shape, dims);
        let mut rest = index.iter();
        if !space.has_inner() {
            // Over dims of size 1: the element itself.
            let inner: Vec<Index> = (0..from.shape.rank())
                .map(|d| {
                    if dims.contains(&d) {
                        Index::default()
                    } else {
                        rest.next().cloned().unwrap_or_default()
                    }
                })
                .collect();
            let expr = self.at(x, &inner)?;
            return Ok(self.builder.convert(expr, dtype));
        }
        if space.inner() == 0 {
            return Ok(self.builder.push(dtype, ExprKind::Literal(0)));
        }
        let refuse = |why| Err(Stop::Refuse(Refusal::Store(value, why)));
        if !self.space.has_inner() {
            let total = self.space.total();
            if space.is_tall() && (total != space.outer()) {
                return refuse(WhyNot::FewRows { value, rows: space.outer(), length: space.inner() });
            }
            if total == space.total() || total == space.outer() {
                return Err(Stop::Widen(space));
            }
            return refuse(WhyNot::OtherLoops { value });
        }
        let is_fold = self.folding && self.space.join_folding(&space).as_ref() == Some(self.space);
        if self.folding != is_fold || (!is_fold && space != *self.space) {
            return refuse(WhyNot::OtherLoops { value });
        }
        if is_fold && dtype == DType::Bool {
            return refuse(WhyNot::OtherLoops { value });
        }
        if self.inside && space.is_tall() {
            return refuse(WhyNot::FewRows { value, rows: space.outer(), length: space.inner() });
        }
        let whole = self.place(&from.shape, Part::Whole)?;
        for (d, place) in whole.iter().enumerate().filter(|(d, _)| !dims.contains(d)) {
            let asked = rest.next().cloned().unwrap_or_default();
            if asked != *place && from.shape[d] != 1 {
                return refuse(WhyNot::OtherLoops { value });
            }
        }
        let inside = std::mem::replace(&mut self.inside, true);
        self.folding = false;
        let arg = self.at(x, &whole)?;
        (self.inside, self.folding) = (inside, is_fold);
        let arg = self.builder.convert(arg, dtype);
        if !self.reductions.contains(&value) {
            self.reductions.push(value);
        }
        let kind = if is_fold { ExprKind::Fold(reduction, arg) } else { ExprKind::Reduce(reduction, arg) };
        Ok(self.builder.push(dtype, kind))
    }
}

pub(crate) fn apart(left: Value, right: Value) -> Stop {
    Stop::Refuse(Refusal::Apart(WhyNot::Spaces { left, right }))
}
