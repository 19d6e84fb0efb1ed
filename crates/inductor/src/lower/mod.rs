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

pub(crate) mod pooling;
pub(crate) mod positions;
pub(crate) mod scans;
pub(crate) mod views;

use kiln_ir::{
    Class, DType, Def, Dims, Graph, Loc, Node, Op, ScalarKind, Shape, Strides, TensorTy, Ty, Value,
};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::{SmallVec, smallvec};

use crate::fuse::folds;
use crate::lower::scans::Running;
use crate::rewrite::scatters::Scatters;
use crate::{Layout, WhyNot};
use kiln_plan::CheckText;
use kiln_plan::index::{ExprId, Index, Split};
use kiln_plan::loops::{Axis, Expr, ExprKind, Kernel, Mode, Operation, Reduction, Scan};

/// Kernels of more operations than this are not made.
pub(crate) const MOST_EXPRS: usize = 600;

/// A run of dims, all kept or all reduced.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    pub count: i64,
    pub inner: bool,
    /// Whether it is gone through from the end.
    pub reversed: bool,
}

/// The iteration space of a kernel: segments in the order of the tensors' dims, none of count 1.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Space(pub Vec<Segment>);

impl Space {
    /// The space of a tensor whose `dims` are reduced.
    pub fn of(shape: &Shape, dims: &[usize]) -> Space {
        let mut segments: Vec<Segment> = Vec::new();
        for (d, &size) in shape.iter().enumerate().filter(|(_, size)| **size != 1) {
            let inner = dims.contains(&d);
            match segments.last_mut() {
                Some(last) if last.inner == inner => last.count *= size as i64,
                _ => segments.push(Segment { count: size as i64, inner, reversed: false }),
            }
        }
        Space(segments)
    }

    /// The same, its inner dims gone through from the end.
    pub fn reversed(mut self) -> Space {
        self.0.iter_mut().for_each(|segment| segment.reversed = segment.inner);
        self
    }

    pub fn is_reversed(&self) -> bool {
        self.0.iter().any(|segment| segment.reversed)
    }

    pub fn has_inner(&self) -> bool {
        self.0.iter().any(|s| s.inner)
    }

    pub fn count(&self, wanted: impl Fn(&Segment) -> bool) -> i64 {
        self.0.iter().filter(|s| wanted(s)).map(|s| s.count).product()
    }

    pub fn outer(&self) -> i64 {
        self.count(|s| !s.inner)
    }

    pub fn inner(&self) -> i64 {
        self.count(|s| s.inner)
    }

    pub fn total(&self) -> i64 {
        self.count(|_| true)
    }

    /// Few kept elements over many reduced ones: such a reduction is cut into chunks, or it has no parallelism.
    pub fn is_tall(&self) -> bool {
        self.has_inner() && self.outer() <= 16 && self.inner() >= 32768
    }

    /// The space that serves kernels of both spaces, if there is one.
    pub fn join(&self, other: &Space) -> Option<Space> {
        match (self.has_inner(), other.has_inner()) {
            (false, false) | (true, true) => (self == other).then(|| self.clone()),
            (true, false) => {
                let fits = other.total() == self.total() || other.total() == self.outer();
                fits.then(|| self.clone())
            }
            (false, true) => other.join(self),
        }
    }
}

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

impl Space {
    fn axes(&self) -> Vec<Axis> {
        self.0.iter().map(|s| Axis { extent: s.count, inner: s.inner }).collect()
    }
}

/// The operation and the dtype its operands are converted to.
pub(crate) fn operation(op: &Op, operand: Option<DType>, result: DType) -> Option<(Operation, DType)> {
    let compared = operand.unwrap_or(result);
    Some(match op {
        Op::Add {} => (Operation::Add, result),
        Op::Sub {} => (Operation::Sub, result),
        Op::Mul {} => (Operation::Mul, result),
        Op::Div {} => (Operation::Div, result),
        Op::Pow {} => (Operation::Pow, result),
        Op::Maximum {} => (Operation::Maximum, result),
        Op::Minimum {} => (Operation::Minimum, result),
        Op::Neg {} => (Operation::Neg, result),
        Op::Abs {} => (Operation::Abs, result),
        Op::Sqrt {} => (Operation::Sqrt, result),
        Op::Eq {} => (Operation::Eq, compared),
        Op::Ne {} => (Operation::Ne, compared),
        Op::Lt {} => (Operation::Lt, compared),
        Op::Le {} => (Operation::Le, compared),
        Op::Gt {} => (Operation::Gt, compared),
        Op::Ge {} => (Operation::Ge, compared),
        Op::LogicalAnd {} => (Operation::And, DType::Bool),
        Op::LogicalNot {} => (Operation::Not, DType::Bool),
        Op::BitwiseAnd {} => (Operation::BitAnd, result),
        Op::BitwiseOr {} => (Operation::BitOr, result),
        Op::BitwiseXor {} => (Operation::BitXor, result),
        Op::BitwiseLeftShift {} => (Operation::ShiftLeft, result),
        Op::BitwiseRightShift {} => (Operation::ShiftRight, result),
        Op::Where {} => (Operation::Where, result),
        Op::To { dtype } => (Operation::Convert, *dtype),
        _ => (Operation::Call(op.row().function?), result),
    })
}

/// Whether a node is computed at its consumers' index. All other nodes' results are stored by a step.
pub(crate) fn is_inlined(graph: &Graph, node: &Node) -> bool {
    let op = &node.op;
    operation(op, None, DType::F32).is_some()
        || pooling::is_inlined(graph, node)
        || matches!(
            op,
            Op::Reshape { .. }
                | Op::Permute { .. }
                | Op::Expand { .. }
                | Op::Slice { .. }
                | Op::Diagonal { .. }
                | Op::Unfold { .. }
                | Op::Flip { .. }
                | Op::Full { .. }
                | Op::Arange { .. }
                | Op::Gather { .. }
                | Op::Sum { .. }
                | Op::Amax { .. }
                | Op::Cumsum { .. }
                | Op::Cumprod { .. }
        )
}

/// Whether a node is a step of its own: a library call, or the eager kernel of an op without a loop form.
pub(crate) fn is_library(graph: &Graph, node: &Node) -> bool {
    let op = &node.op;
    let in_parts = matches!(op, Op::Cat { .. } | Op::SliceScatter { .. });
    let list = matches!(op.row().class, Class::List | Class::Constant);
    !(is_inlined(graph, node) || in_parts || list)
}

/// Whether the result of an operation on values of a narrow integer dtype may be outside its range. Halves are
/// kept in f32 until they are stored or converted.
fn may_leave(operation: Operation, dtype: DType) -> bool {
    let stays = matches!(operation, Operation::Maximum | Operation::Minimum | Operation::Where);
    dtype.is_narrow() && !dtype.is_float() && !stays
}

/// Builds expressions, each once. Their dtypes are those that elements are computed in.
#[derive(Default)]
pub(crate) struct Builder {
    pub exprs: Vec<Expr>,
    known: FxHashMap<Expr, ExprId>,
    pub scalars: Vec<(Value, ScalarKind)>,
}

impl Builder {
    pub fn push(&mut self, dtype: DType, kind: ExprKind) -> ExprId {
        let expr = Expr { dtype, kind };
        if let Some(&id) = self.known.get(&expr) {
            return id;
        }
        let id = self.exprs.len();
        self.exprs.push(expr.clone());
        self.known.insert(expr, id);
        id
    }

    pub fn scalar(&mut self, value: Value, dtype: DType) -> ExprId {
        let key = (value, dtype.kind());
        let at = self.scalars.iter().position(|s| *s == key).unwrap_or_else(|| {
            self.scalars.push(key);
            self.scalars.len() - 1
        });
        let number = self.push(dtype.computing(), ExprKind::Scalar(at));
        if dtype.is_float() { number } else { self.narrow(number, dtype) }
    }

    /// In the type in which a dtype is computed, not yet rounded or wrapped to it.
    pub fn convert(&mut self, expr: ExprId, dtype: DType) -> ExprId {
        let dtype = dtype.computing();
        if self.exprs[expr].dtype == dtype {
            return expr;
        }
        self.push(dtype, ExprKind::Apply(Operation::Convert, smallvec![expr]))
    }

    /// An integer brought into a range.
    fn limited(&mut self, expr: ExprId, (least, most): (i64, i64)) -> ExprId {
        let (least, most) =
            (self.push(DType::I64, ExprKind::Literal(least)), self.push(DType::I64, ExprKind::Literal(most)));
        let raised = self.push(DType::I64, ExprKind::Apply(Operation::Maximum, smallvec![expr, least]));
        self.push(DType::I64, ExprKind::Apply(Operation::Minimum, smallvec![raised, most]))
    }

    /// Rounded or wrapped to a dtype.
    pub fn narrow(&mut self, expr: ExprId, dtype: DType) -> ExprId {
        match dtype.is_narrow() {
            true => self.push(dtype.computing(), ExprKind::Narrow(dtype, expr)),
            false => expr,
        }
    }

    /// A pointwise op. `operand` gives the expression of operand i as it is, or as a number of a dtype.
    pub fn pointwise<E>(
        &mut self,
        op: &Op,
        args: &[Value],
        operand_dtype: Option<DType>,
        result: DType,
        operand: &mut dyn FnMut(&mut Builder, Value, DType) -> Result<ExprId, E>,
    ) -> Result<Option<ExprId>, E> {
        let Some((operation, dtype)) = operation(op, operand_dtype, result) else { return Ok(None) };
        let mut exprs: SmallVec<[ExprId; 3]> = SmallVec::new();
        for (i, &arg) in args.iter().enumerate() {
            let wanted = if operation == Operation::Where && i == 0 { DType::Bool } else { dtype };
            // A limit is brought into the dtype's range before it is taken for an element.
            let range = wanted.narrow_range().filter(|_| op.takes_limits());
            let expr = operand(self, arg, if range.is_some() { wanted.computing() } else { wanted })?;
            let expr = self.convert(expr, wanted);
            exprs.push(match (range, &self.exprs[expr].kind) {
                (Some(range), ExprKind::Scalar(_)) => self.limited(expr, range),
                _ => expr,
            });
        }
        if operation == Operation::Convert {
            let fits = operand_dtype.is_some_and(|from| dtype.holds(from));
            return Ok(Some(if fits { exprs[0] } else { self.narrow(exprs[0], dtype) }));
        }
        let value = self.push(result.computing(), ExprKind::Apply(operation, exprs));
        Ok(Some(if may_leave(operation, result) { self.narrow(value, result) } else { value }))
    }
}

/// The dtype of the tensors a pointwise op reads (conditions don't count).
pub(crate) fn operand_dtype<'a>(op: &Op, tys: impl Iterator<Item = &'a Ty>, row: usize) -> Option<DType> {
    let skip = usize::from(matches!(op, Op::Where {}));
    tys.skip(skip).find_map(|ty| match ty {
        Ty::Tensor(t) => Some(t.dtype),
        Ty::List(items) => items.get(row).map(|t| t.dtype),
        Ty::Scalar(_) => None,
    })
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
            scatters |= place.is_some();
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
            // Only one pass can be cut into chunks.
            let depths = kernel.depths();
            let whole = |r: &LoweredRoot| {
                this.cx.graph.ty(r.value).as_tensor().is_some_and(|t| t.shape.numel() as i64 == space.total())
            };
            if depths.iter().any(|&d| d > 1) || lowered.iter().any(|r| whole(r) && depths[r.expr] > 0) {
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
                self.node(value, &graph.nodes[node as usize], index)?
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
                inner[*dim] = index[*dim].scaled(*step as i64, *start as i64);
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
                if self.whole(x).is_some() && self.whole(node.args[1]) == Some(1) =>
            {
                let start = self.whole(x).unwrap_or_default();
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
