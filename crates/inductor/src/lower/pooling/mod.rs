//! Pooling as loops: the elements of a window, its *taps*, one after the other.
//!
//! ```text
//! %1 = max_pool2d_indices(%0)      →      best = x[first tap]; place = its position
//!                                         for every other tap: wins = tap > best or tap is NaN
//!                                                              best, place = wins ? tap, its position : best, place
//! ```
//!
//! A tap is the value at another index, so whatever comes before is computed at each of them, and the window is
//! part of whatever comes after. What lies in the padding is never read: positions are clamped into the plane, where
//! the clamped one is a tap, too. The maximum of a window does not change by having one of them twice, and neither
//! does its place; averages leave such taps out, and so do maxima with dilation, where the nearest element may be no
//! tap. A window of which no tap lies in the plane has the plane's first element.
//!
//! Windows of many taps stay with the library (for averages it adds up a line once for all windows that share it).

mod gradients;

use kiln_ir::{Class, DType, Fault, Graph, Node, Op, Shape, Sizes, Value, planted};
use smallvec::smallvec;

use crate::fuse::behind_reshapes;
use crate::lower::{Lowering, Stop, operation};
use kiln_plan::index::{ExprId, Index};
use kiln_plan::loops::{ExprKind, Operation};

/// Windows of more taps are not written out: compilers take their time, and averages have no use for it.
const MOST_TAPS: usize = 49;
const MOST_TAPS_OF_MEANS: usize = 25;

/// Averages of windows that overlap have no more taps than this, and lines of no fewer windows.
const MOST_SHARED_TAPS: usize = 9;
const SHORTEST_LINE: usize = 12;

/// What is pooled is computed at every tap if that is no more than so many operations for each window.
const MOST_OPERATIONS: usize = 72;

/// Whether a node is a pooling that is computed at its consumers' index.
pub(crate) fn is_inlined(graph: &Graph, node: &Node) -> bool {
    match &node.op {
        Op::MaxPool2dIndices { kernel, .. } => kernel.iter().product::<usize>() <= MOST_TAPS,
        Op::AvgPool2d { kernel, stride, .. } => {
            // The library adds up each line once, whatever windows share it.
            let overlap = kernel.iter().zip(stride.iter()).any(|(size, step)| step < size);
            let width = graph.ty(node.outs[0]).as_tensor().map_or(0, |ty| ty.shape[3]);
            let (most, least) =
                if overlap { (MOST_SHARED_TAPS, SHORTEST_LINE) } else { (MOST_TAPS_OF_MEANS, 0) };
            kernel.iter().product::<usize>() <= most && width >= least
        }
        Op::AvgPool2dBackward { kernel, stride, .. } => gradients::is_inlined(graph, node, kernel, stride),
        _ => false,
    }
}

/// Whether what a pooling reads is cheap enough to be computed at every tap. `is_there` says what is in memory.
pub(crate) fn is_cheap(graph: &Graph, node: &Node, is_there: &dyn Fn(Value) -> bool) -> bool {
    let (Op::MaxPool2dIndices { kernel, .. }
    | Op::AvgPool2d { kernel, .. }
    | Op::AvgPool2dBackward { kernel, .. }) = &node.op
    else {
        return true;
    };
    let taps: usize = kernel.iter().product();
    let (mut todo, mut operations) = (vec![node.args[0]], 0);
    while let Some(value) = todo.pop() {
        let Some(node) = graph.producer(value).filter(|_| !is_there(value)) else { continue };
        let operation = operation(&node.op, None, DType::F32).map(|(operation, _)| operation);
        let is_view = matches!(node.op.row().class, Class::View | Class::Constant);
        if !is_view && operation.is_none_or(|operation| operation.cost() > 0) {
            return false;
        }
        operations += usize::from(!is_view);
        if operations * taps > MOST_OPERATIONS {
            return false;
        }
        todo.extend(&node.args);
    }
    true
}

/// In which windows a tap was seen so far.
enum Begun {
    Never,
    If(ExprId),
    Always,
}

/// How windows lie along one dim.
struct Along<'a> {
    kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
    ceil_mode: bool,
    /// Number of the window.
    window: &'a Index,
    /// Size of the plane.
    size: usize,
}

impl Along<'_> {
    /// Where a tap is, counted from the first element of the plane. It may be outside.
    fn position(&self, tap: usize) -> Index {
        self.window.scaled(self.stride as i64, (tap * self.dilation) as i64 - self.padding as i64)
    }

    /// Whether some window may have this tap before the first element, and behind the last one. No size has a say:
    /// loops are the same for all.
    fn leaves(&self, tap: usize) -> (bool, bool) {
        let before_last = (self.kernel - 1 - tap) * self.dilation;
        // Without rounding up, the last window ends in the padding at the latest.
        let behind = if self.ceil_mode { tap > 0 } else { before_last < self.padding };
        (tap * self.dilation < self.padding, behind)
    }

    /// Where the tap is, or the nearest element.
    fn clamped(&self, tap: usize) -> Index {
        match self.leaves(tap) {
            (false, false) => self.position(tap),
            _ => self.position(tap).clamped(self.size as i64 - 1),
        }
    }
}

impl Lowering<'_> {
    /// The largest element of a window, and where it lies in its plane. The first of equals, the last NaN.
    pub(crate) fn largest_of_window(
        &mut self,
        node: &Node,
        index: &[Index],
    ) -> Result<(ExprId, ExprId), Stop> {
        let x = node.args[0];
        let ty = self.tensor(x);
        let [rows, columns] = along(&node.op, &ty.shape, index);
        let [in_rows, in_columns] = [&rows, &columns].map(|along| self.taps_inside(along));
        let mut largest = None;
        let mut begun = Begun::Never;
        for (r, &in_row) in in_rows.iter().enumerate() {
            for (c, &in_column) in in_columns.iter().enumerate() {
                let at = [index[0].clone(), index[1].clone(), rows.clamped(r), columns.clamped(c)];
                let tap = self.tap(x, &at, ty.dtype)?;
                // What is the same for a line is a number of its own, and so is what is the same for a column.
                let line = at[2].scaled(columns.size as i64, 0);
                let line = self.builder.push(DType::I64, ExprKind::Position(line));
                let column = self.position_in(&columns, c);
                let place = self.operate(Operation::Add, DType::I64, [line, column]);
                let inside = self.both(in_row, in_column);
                let (best, from) = match (largest, inside) {
                    (Some(largest), _) => largest,
                    (None, None) => (tap, place),
                    // What a window without taps has.
                    (None, Some(_)) => {
                        let first = [index[0].clone(), index[1].clone(), Index::default(), Index::default()];
                        let zero = self.builder.push(DType::I64, ExprKind::Literal(0));
                        (self.tap(x, &first, ty.dtype)?, zero)
                    }
                };
                let wins = self.wins(tap, best, ty.dtype, &begun);
                let wins = self.both(wins, inside);
                begun = match (begun, inside) {
                    (_, None) | (Begun::Always, _) => Begun::Always,
                    (Begun::Never, Some(inside)) => Begun::If(inside),
                    (Begun::If(before), Some(inside)) => {
                        Begun::If(self.operate(Operation::BitOr, DType::Bool, [before, inside]))
                    }
                };
                largest = Some(match wins {
                    None => (tap, place),
                    Some(wins) => (self.choose(wins, tap, best), self.choose(wins, place, from)),
                });
            }
        }
        // Windows have a tap: the type rules see to that.
        Ok(largest.unwrap_or((0, 0)))
    }

    /// Whether a tap takes the place of the largest so far; `None` if it does in every window.
    fn wins(&mut self, tap: ExprId, best: ExprId, dtype: DType, begun: &Begun) -> Option<ExprId> {
        if let Begun::Never = begun {
            return None;
        }
        let mut wins = self.operate(Operation::Gt, DType::Bool, [tap, best]);
        if dtype.is_float() {
            let is_nan = self.operate(Operation::Ne, DType::Bool, [tap, tap]);
            wins = self.operate(Operation::BitOr, DType::Bool, [wins, is_nan]);
        }
        if let Begun::If(before) = *begun {
            let is_first = self.builder.push(DType::Bool, ExprKind::Apply(Operation::Not, smallvec![before]));
            wins = self.operate(Operation::BitOr, DType::Bool, [wins, is_first]);
        }
        Some(wins)
    }

    /// By tap, whether it lies in the plane; `None` if it does in every window, or the nearest element is a tap of
    /// the same window.
    fn taps_inside(&mut self, along: &Along<'_>) -> Vec<Option<ExprId>> {
        let is_apart = along.dilation > 1;
        (0..along.kernel).map(|tap| is_apart.then(|| self.is_inside(along, tap)).flatten()).collect()
    }

    /// Both conditions, where there are any.
    fn both(&mut self, one: Option<ExprId>, other: Option<ExprId>) -> Option<ExprId> {
        match (one, other) {
            (Some(one), Some(other)) => Some(self.operate(Operation::And, DType::Bool, [one, other])),
            (one, other) => one.or(other),
        }
    }

    /// The mean of a window: lines are added up first, then columns, as the library does it.
    pub(crate) fn mean_of_window(&mut self, node: &Node, index: &[Index]) -> Result<ExprId, Stop> {
        let x = node.args[0];
        let ty = self.tensor(x);
        let dtype = ty.dtype.computing();
        let is_counted = matches!(node.op, Op::AvgPool2d { count_include_pad: true, .. })
            || planted(Fault::PaddingCounted);
        let [rows, columns] = along(&node.op, &ty.shape, index);
        let (of_row, of_column) =
            (self.weight(&rows, is_counted, dtype), self.weight(&columns, is_counted, dtype));
        let zero = self.builder.push(dtype, ExprKind::Literal(0));
        let mut mean = None;
        for c in 0..columns.kernel {
            let mut line = None;
            for r in 0..rows.kernel {
                let at = [index[0].clone(), index[1].clone(), rows.clamped(r), columns.clamped(c)];
                let mut tap = self.tap(x, &at, ty.dtype)?;
                if let Some(is_inside) = self.is_inside(&rows, r) {
                    tap = self.choose(is_inside, tap, zero);
                }
                let tap = self.operate(Operation::Mul, dtype, [of_row, tap]);
                line = Some(line.map_or(tap, |sum| self.operate(Operation::Add, dtype, [sum, tap])));
            }
            let mut line = line.unwrap_or(zero);
            if let Some(is_inside) = self.is_inside(&columns, c) {
                line = self.choose(is_inside, line, zero);
            }
            let line = self.operate(Operation::Mul, dtype, [of_column, line]);
            mean = Some(mean.map_or(line, |sum| self.operate(Operation::Add, dtype, [sum, line])));
        }
        // The library's sums begin with a zero, so that none is a negative zero.
        Ok(self.operate(Operation::Add, dtype, [mean.unwrap_or(zero), zero]))
    }

    /// What each tap along a dim counts for.
    fn weight(&mut self, along: &Along<'_>, is_counted: bool, dtype: DType) -> ExprId {
        if !along.ceil_mode && (is_counted || along.padding == 0) {
            return self.whole_share(along.kernel, dtype);
        }
        // Positions are counted from the first element of the padding.
        let begin = along.window.scaled(along.stride as i64, 0);
        let end = begin.scaled(1, along.kernel as i64);
        let (begin, end) = (self.number_at(begin, dtype), self.number_at(end, dtype));
        self.share_of(begin, end, along.size, along.padding, is_counted)
    }

    /// What an element counts for in a window that lies in the plane.
    fn whole_share(&mut self, kernel: usize, dtype: DType) -> ExprId {
        let [one, count] =
            [1, kernel].map(|number| self.builder.push(dtype, ExprKind::Literal(number as i64)));
        self.operate(Operation::Div, dtype, [one, count])
    }

    /// What an element counts for in a window from `begin` to `end`, counted from the first element of the padding.
    fn share_of(
        &mut self,
        mut begin: ExprId,
        end: ExprId,
        size: usize,
        padding: usize,
        is_counted: bool,
    ) -> ExprId {
        let dtype = self.builder.exprs[begin].dtype;
        let [one, before] =
            [1, padding].map(|number| self.builder.push(dtype, ExprKind::Literal(number as i64)));
        let behind = size + padding + if is_counted { padding } else { 0 };
        let behind = self.number_at(Index::constant(behind as i64), dtype);
        let end = self.operate(Operation::Minimum, dtype, [end, behind]);
        if !is_counted {
            begin = self.operate(Operation::Maximum, dtype, [begin, before]);
        }
        let count = self.operate(Operation::Sub, dtype, [end, begin]);
        self.operate(Operation::Div, dtype, [one, count])
    }

    /// Whether a tap lies in the plane; `None` if it does in every window.
    fn is_inside(&mut self, along: &Along<'_>, tap: usize) -> Option<ExprId> {
        let at = along.position(tap);
        let dtype = if self.is_exact(&at) { DType::F32 } else { DType::I64 };
        let (before, behind) = along.leaves(tap);
        let not_before = before.then(|| {
            let (at, zero) =
                (self.number_at(at.clone(), dtype), self.builder.push(dtype, ExprKind::Literal(0)));
            self.operate(Operation::Ge, DType::Bool, [at, zero])
        });
        let not_behind = behind.then(|| {
            let size = Index::constant(along.size as i64);
            let (at, size) = (self.number_at(at, dtype), self.number_at(size, dtype));
            self.operate(Operation::Lt, DType::Bool, [at, size])
        });
        self.both(not_before, not_behind)
    }

    /// A position as a number of a dtype that is computed in.
    fn number_at(&mut self, index: Index, dtype: DType) -> ExprId {
        let made = if dtype == DType::F32 && self.is_exact(&index) { DType::F32 } else { DType::I64 };
        let number = self.builder.push(made, ExprKind::Position(index));
        self.builder.convert(number, dtype)
    }

    /// The pooling whose largest elements a `gather` takes, and its windows' index, if that is all it does.
    pub(crate) fn gathers_largest(
        &self,
        node: &Node,
        index: &[Index],
    ) -> Result<Option<(Node, Vec<Index>)>, Stop> {
        let graph = self.cx.graph;
        let Some(pool) = largest_gathered(graph, node) else { return Ok(None) };
        if self.cx.stored.contains(&pool) && !self.is_root(pool) {
            // Another kernel finds it, and this one need not.
            return Ok(None);
        }
        let shape = self.tensor(node.args[1]).shape;
        let mut linear = Index::default();
        for (i, &stride) in index.iter().zip(&shape.contiguous_strides()) {
            linear.add_scaled(i, stride as i64);
        }
        let windows = self.unfold(linear, &self.tensor(pool).shape)?;
        Ok(graph.producer(pool).map(|node| (node.clone(), windows)))
    }

    /// An element of a window, as it would be stored.
    fn tap(&mut self, x: Value, at: &[Index], dtype: DType) -> Result<ExprId, Stop> {
        let tap = self.at(x, at)?;
        let is_stored = matches!(self.builder.exprs[tap].kind, ExprKind::Load { .. });
        Ok(if is_stored || !dtype.is_float() { tap } else { self.builder.narrow(tap, dtype) })
    }

    /// The clamped position of a tap along the lanes, computed a vector at a time.
    fn position_in(&mut self, along: &Along<'_>, tap: usize) -> ExprId {
        let mut push = |index: Index| self.builder.push(DType::I64, ExprKind::Position(index));
        let (mut at, most) = (push(along.position(tap)), push(Index::constant(along.size as i64 - 1)));
        let (before, behind) = along.leaves(tap);
        if before {
            let zero = self.builder.push(DType::I64, ExprKind::Literal(0));
            at = self.operate(Operation::Maximum, DType::I64, [at, zero]);
        }
        if behind {
            at = self.operate(Operation::Minimum, DType::I64, [at, most]);
        }
        at
    }

    fn operate(&mut self, operation: Operation, dtype: DType, operands: [ExprId; 2]) -> ExprId {
        self.builder.push(dtype, ExprKind::Apply(operation, smallvec![operands[0], operands[1]]))
    }

    fn choose(&mut self, wins: ExprId, yes: ExprId, no: ExprId) -> ExprId {
        let dtype = self.builder.exprs[yes].dtype;
        self.builder.push(dtype, ExprKind::Apply(Operation::Where, smallvec![wins, yes, no]))
    }
}

/// The places of largest elements that a `gather` goes by, if it takes them from where they were found.
pub(crate) fn largest_gathered(graph: &Graph, node: &Node) -> Option<Value> {
    let (Op::Gather { dim }, &[from, places]) = (&node.op, &node.args[..]) else { return None };
    let pool = behind_reshapes(graph, places);
    let producer = graph.producer(pool)?;
    let Op::MaxPool2dIndices { .. } = producer.op else { return None };
    let shape = |value: Value| graph.ty(value).as_tensor().map(|ty| &ty.shape);
    let (images, windows) = (shape(producer.args[0])?, shape(pool)?);
    let (planes, chosen) = (shape(from)?, shape(places)?);
    let is_same = behind_reshapes(graph, from) == behind_reshapes(graph, producer.args[0]);
    let area = |shape: &Shape| shape[2] * shape[3];
    let fits = is_inlined(graph, producer)
        && is_same
        && *dim + 1 == planes.rank()
        && planes[..*dim] == chosen[..*dim]
        && (planes[*dim], chosen[*dim]) == (area(images), area(windows))
        && images.numel() > 0;
    fits.then_some(pool)
}

/// How the windows of a pooling lie in planes of an input of this shape, at an index of its result.
fn along<'a>(op: &Op, shape: &Shape, index: &'a [Index]) -> [Along<'a>; 2] {
    let one = || Sizes::from([1, 1]);
    let (kernel, stride, padding, dilation, ceil_mode) = match op {
        Op::MaxPool2dIndices { kernel, stride, padding, dilation, ceil_mode } => {
            (kernel.clone(), stride.clone(), padding.clone(), dilation.clone(), *ceil_mode)
        }
        Op::AvgPool2d { kernel, stride, padding, ceil_mode, .. } => {
            (kernel.clone(), stride.clone(), padding.clone(), one(), *ceil_mode)
        }
        _ => (one(), one(), Sizes::from([0, 0]), one(), false),
    };
    [0, 1].map(|d| Along {
        kernel: kernel[d],
        stride: stride[d],
        padding: padding[d],
        dilation: dilation[d],
        ceil_mode,
        window: &index[d + 2],
        size: shape[d + 2],
    })
}
