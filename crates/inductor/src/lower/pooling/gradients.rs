//! Gradients of averages as loops: an element of the input adds up what it gets from the windows that hold it.
//!
//! ```text
//! %1 = avg_pool2d_backward(%0)      →      last = (position + padding) / stride
//!                                          for every window last − n … last: sum += holds ? weight · %0[window] : 0
//! ```
//!
//! No more than ⌈kernel / stride⌉ windows hold an element along a dim. Windows that are not there are never read:
//! their numbers are clamped, and what they would give is left out. Lines of windows are added up first, then
//! columns, from the first window to the last, as the library does it.

use crate::lower::pooling::SHORTEST_LINE;
use crate::lower::{Lowering, Stop};
use kiln_ir::{DType, Graph, Node, Op, Sizes};
use kiln_plan::index::{ExprId, Index};
use kiln_plan::loops::{ExprKind, Operation};

/// Elements get something from no more windows than this: each is written out, and compilers take their time.
const MOST_HOLDERS: usize = 25;

/// Whether a gradient is computed at its consumers' index. The library is as quick or quicker where lines are short,
/// where elements of a line are held by different numbers of windows (masks cost more than the sums), and where windows
/// of a line are far apart (it goes from window to window). Halves are loaded one by one.
pub(super) fn is_inlined(graph: &Graph, node: &Node, kernel: &Sizes, stride: &Sizes) -> bool {
    let Some(ty) = graph.ty(node.outs[0]).as_tensor() else { return false };
    let holders = |(kernel, stride): (&usize, &usize)| kernel.div_ceil(*stride);
    let count: usize = kernel.iter().zip(stride.iter()).map(holders).product();
    let is_plain = kernel[1] == 1 && stride[1] == 1;
    let is_even = kernel[1].is_multiple_of(stride[1]) && stride[1] <= 2;
    let pays = is_even && ty.shape[3] >= SHORTEST_LINE && !ty.dtype.is_narrow();
    count <= MOST_HOLDERS && (is_plain || pays)
}

/// How the windows that may hold an element lie along one dim.
struct Holders<'a> {
    kernel: usize,
    stride: usize,
    padding: usize,
    ceil_mode: bool,
    /// The element's position.
    element: &'a Index,
    /// Size of the plane.
    size: usize,
    /// Number of windows.
    windows: usize,
}

impl Holders<'_> {
    fn count(&self) -> usize {
        self.kernel.div_ceil(self.stride)
    }

    /// The element's position, counted from the first element of the padding.
    fn position(&self) -> Index {
        self.element.scaled(1, self.padding as i64)
    }

    /// Whether for some element the window so many before the last one that may hold it is before the first there
    /// is, and behind the last. No size has a say: loops are the same for all.
    fn leaves(&self, back: usize) -> (bool, bool) {
        (back > self.padding / self.stride, back * self.stride + self.padding + 1 < self.kernel)
    }

    /// The number of that window, or of the nearest there is.
    fn window(&self, back: usize) -> Index {
        let window = self.position().quotient(self.stride as i64).scaled(1, -(back as i64));
        let is_there = self.stride == 1 && self.leaves(back) == (false, false);
        if is_there { window } else { window.clamped(self.windows as i64 - 1) }
    }
}

/// What windows along a dim give: whether they hold the element (`None`: always), and what it counts for in them.
type Given = Vec<(Index, Option<ExprId>, ExprId)>;

impl Lowering<'_> {
    /// The gradient of an element of what was averaged.
    pub(crate) fn spread_of_windows(&mut self, node: &Node, index: &[Index]) -> Result<ExprId, Stop> {
        let (grad, dtype) = (node.args[0], self.tensor(node.outs[0]).dtype);
        let (ty, computing) = (self.tensor(grad), dtype.computing());
        let Op::AvgPool2dBackward { input, kernel, stride, padding, ceil_mode, count_include_pad } = &node.op
        else {
            return self.at(grad, index);
        };
        let [rows, columns] = [0, 1].map(|d| {
            let holders = Holders {
                kernel: kernel[d],
                stride: stride[d],
                padding: padding[d],
                ceil_mode: *ceil_mode,
                element: &index[d + 2],
                size: input[d + 2],
                windows: ty.shape[d + 2],
            };
            self.given(&holders, *count_include_pad, computing)
        });
        let zero = self.builder.push(computing, ExprKind::Literal(0));
        let mut sum = None;
        for (row, holds, weight) in &rows {
            let mut line = None;
            for (column, holds, weight) in &columns {
                let at = [index[0].clone(), index[1].clone(), row.clone(), column.clone()];
                let tap = self.tap(grad, &at, ty.dtype)?;
                line = Some(self.plus_share(line, tap, *holds, *weight));
            }
            sum = Some(self.plus_share(sum, line.unwrap_or(zero), *holds, *weight));
        }
        // The library's sums begin with a zero, so that none is a negative zero.
        Ok(self.operate(Operation::Add, computing, [sum.unwrap_or(zero), zero]))
    }

    /// A sum with what a window gives.
    fn plus_share(
        &mut self,
        sum: Option<ExprId>,
        from: ExprId,
        holds: Option<ExprId>,
        weight: ExprId,
    ) -> ExprId {
        let dtype = self.builder.exprs[weight].dtype;
        let mut share = self.operate(Operation::Mul, dtype, [weight, from]);
        if let Some(holds) = holds {
            let zero = self.builder.push(dtype, ExprKind::Literal(0));
            share = self.choose(holds, share, zero);
        }
        sum.map_or(share, |sum| self.operate(Operation::Add, dtype, [sum, share]))
    }

    /// The windows that may hold an element, first to last.
    fn given(&mut self, holders: &Holders<'_>, is_counted: bool, dtype: DType) -> Given {
        let (at, stride) = (holders.position(), holders.stride as i64);
        let exact = if self.is_exact(&at) { DType::F32 } else { DType::F64 };
        // Where the last window that may hold the element begins, counted like its position.
        let begin = self.number_at(at.quotient(stride).scaled(stride, 0), exact);
        let at = self.number_at(at, exact);
        let literal =
            |this: &mut Self, number: usize| this.builder.push(exact, ExprKind::Literal(number as i64));
        let window = |this: &mut Self, back: usize| {
            let (before, behind) = holders.leaves(back);
            let distance = back * holders.stride;
            let mut holds = None;
            let mut also = |this: &mut Self, condition: ExprId| {
                let and = |held| this.operate(Operation::And, DType::Bool, [held, condition]);
                holds = Some(holds.map_or(condition, and));
            };
            if before {
                let first = literal(this, distance);
                let condition = this.operate(Operation::Ge, DType::Bool, [at, first]);
                also(this, condition);
            }
            if behind {
                let end = Index::constant(((holders.windows + back) * holders.stride) as i64);
                let end = this.number_at(end, exact);
                let condition = this.operate(Operation::Lt, DType::Bool, [at, end]);
                also(this, condition);
            }
            if distance + holders.stride > holders.kernel {
                let offset = this.operate(Operation::Sub, exact, [at, begin]);
                let reach = literal(this, holders.kernel - distance);
                let condition = this.operate(Operation::Lt, DType::Bool, [offset, reach]);
                also(this, condition);
            }
            let weight = if holders.ceil_mode || !is_counted && holders.padding > 0 {
                let begin = if back == 0 {
                    begin
                } else {
                    let distance = literal(this, distance);
                    this.operate(Operation::Sub, exact, [begin, distance])
                };
                let begin = this.builder.convert(begin, dtype);
                let kernel = this.builder.push(dtype, ExprKind::Literal(holders.kernel as i64));
                let end = this.operate(Operation::Add, dtype, [begin, kernel]);
                this.share_of(begin, end, holders.size, holders.padding, is_counted)
            } else {
                this.whole_share(holders.kernel, dtype)
            };
            (holders.window(back), holds, weight)
        };
        (0..holders.count()).rev().map(|back| window(self, back)).collect()
    }
}
