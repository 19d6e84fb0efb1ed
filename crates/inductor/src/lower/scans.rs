//! Scans as loops: what the elements of a dim up to each one come to, carried along a loop that runs in order.
//!
//! ```text
//! %1 = cumsum(%0) {dim: 0}      →      %0 = load b0[i0 + i1*64]      (i0: outer, i1: inner, in order)
//!                                      %1 = scan_sum(%0)
//!                                      store b1[i0 + i1*64] <- %1
//! ```
//!
//! What comes before and after, element by element, is computed in the same loop. The order of additions is that of
//! the eager kernel, and like there single precision is carried in double, so no bit changes. `logcumsumexp` stays a
//! step of its own: it calls the library's functions for every element, so there is nothing to gain.
//!
//! A scan from the end is a scan of a space that is gone through from the end ([`Space::reversed`]).

use kiln_ir::{Class, DType, Fault, Op, Value, planted};
use smallvec::smallvec;

use crate::WhyNot;
use crate::lower::{Lowering, Part, Refusal, Space, Stop, is_inlined};
use kiln_plan::index::{ExprId, Index};
use kiln_plan::loops::{ExprKind, Operation, Scan};

/// A scan along a dim.
#[derive(Copy, Clone)]
pub(crate) struct Running {
    pub scan: Scan,
    pub dim: usize,
    pub reverse: bool,
}

impl Lowering<'_> {
    /// Whether a value is computed where it is needed, and not only looked at.
    fn is_work(&self, value: Value) -> bool {
        let Some(node) = self.cx.graph.producer(value) else { return false };
        if self.cx.stored.contains(&value) || !is_inlined(self.cx.graph, node) {
            return false;
        }
        match node.op {
            Op::Full { .. } | Op::Arange { .. } => false,
            _ => node.op.row().class != Class::View || node.args.iter().any(|&arg| self.is_work(arg)),
        }
    }

    /// The scan `value` of `x` at an index.
    pub(crate) fn scan(
        &mut self,
        value: Value,
        x: Value,
        Running { scan, dim, reverse }: Running,
        index: &[Index],
    ) -> Result<ExprId, Stop> {
        let (from, result) = (self.tensor(x), self.tensor(value).dtype);
        let carried = if result.is_float() { DType::F64 } else { DType::I64 };
        let space = Space::of(&from.shape, &[dim]);
        if !space.has_inner() {
            // A single element: what the scan begins with is added to it.
            let only = self.at(x, index)?;
            let only = self.builder.convert(only, result);
            let Scan::Sum = scan else { return Ok(only) };
            let dtype = result.computing();
            let zero = self.builder.push(dtype, ExprKind::Literal(0));
            return Ok(self.builder.push(dtype, ExprKind::Apply(Operation::Add, smallvec![zero, only])));
        }
        if planted(Fault::CumprodPanics) && scan == Scan::Product {
            panic!("a planted fault: running products can't be lowered");
        }
        let space = if reverse && !planted(Fault::ScanForwards) { space.reversed() } else { space };
        let refuse = |value, why| Err(Stop::Refuse(Refusal::Store(value, why)));
        let few_rows = |value| WhyNot::FewRows { value, rows: space.outer(), length: space.inner() };
        if !self.space.has_inner() {
            return if self.space.total() == space.total() {
                Err(Stop::Widen(space))
            } else {
                refuse(value, WhyNot::OtherLoops { value })
            };
        }
        let whole = self.place(&from.shape, Part::Whole)?;
        let is_elsewhere = (0..from.shape.rank()).any(|d| from.shape[d] != 1 && index[d] != whole[d]);
        if self.folding || space != *self.space || is_elsewhere {
            return refuse(value, WhyNot::OtherLoops { value });
        }
        // Reductions of few long rows are cut into chunks, which a scan can't be.
        if space.is_tall() && !self.is_whole() {
            return refuse(value, few_rows(value));
        }
        if space.is_tall() && self.is_work(x) {
            // The few rows of a scan go to as few threads; what it adds up has more of them.
            return refuse(x, few_rows(x));
        }
        let arg = self.at(x, &whole)?;
        let arg = self.builder.convert(arg, carried);
        if !self.reductions.contains(&value) {
            self.reductions.push(value);
        }
        let running = self.builder.push(carried, ExprKind::Scan(scan, arg));
        Ok(self.builder.convert(running, result))
    }
}
