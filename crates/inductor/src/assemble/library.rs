//! Steps that are library calls: products, convolutions, random numbers, and ops without a loop form.

use kiln_ir::{Def, Op, ScalarKind, TensorTy, Value};

use super::Assembler;
use crate::fuse::Fusion;
use crate::lower::views::view_of;
use kiln_plan::{BufferRef, Call, Step, ViewRef};

impl Assembler<'_, '_> {
    fn batch(&mut self, value: Value) -> ViewRef {
        let view = self.fusion.batch(value);
        let ty = self.tensor(value);
        let matrix = [ty.shape[1], ty.shape[2]];
        let shape: Vec<usize> = view.sizes.iter().copied().chain(matrix).collect();
        let strides = view.strides.iter().copied().chain([view.row, view.column]).collect();
        let at = BufferRef { buffer: self.home(view.base), offset: view.offset };
        ViewRef { at, ty: TensorTy { shape: shape.into(), ..ty }, strides }
    }

    fn view(&mut self, value: Value) -> ViewRef {
        let view = view_of(self.fusion.graph, self.fusion.layouts, &self.fusion.stored, value);
        let at = BufferRef { buffer: self.home(view.base), offset: view.offset };
        ViewRef { at, ty: self.tensor(value), strides: view.strides }
    }

    /// Whether a value is an input that is likely to be the same in the next call, or a part of one.
    fn constant(&self, value: Value) -> bool {
        let Fusion { graph, layouts, stored, .. } = self.fusion;
        let base = view_of(graph, layouts, stored, value).base;
        self.options.constants
            && matches!(graph.def(base), Def::Input(_))
            && graph.writes.iter().all(|write| write.target != base)
    }

    pub(super) fn library(&mut self, n: usize) {
        let node = &self.fusion.graph.nodes[n];
        let out = node.outs[0];
        let ty = self.tensor(out);
        if ty.shape.numel() == 0 {
            return;
        }
        let dst = self.home(out);
        let ops = self.ops(&[n as u32]);
        let read: usize =
            node.args.iter().map(|&a| self.fusion.graph.ty(a).as_tensor().map_or(0, |t| t.bytes())).sum();
        let is_batched = self.fusion.is_batched(node);
        let operand = |this: &mut Self, arg| {
            let arg = this.fusion.operand(node, arg);
            if is_batched { this.batch(arg) } else { this.view(arg) }
        };
        let is_tensor = |arg: &&Value| self.fusion.graph.ty(**arg).as_tensor().is_some();
        let args = node.args.iter().filter(is_tensor).map(|&arg| operand(self, arg)).collect();
        let out = ViewRef::dense(BufferRef { buffer: dst, offset: 0 }, ty.clone());
        let mut call = Call::new(node.op.clone(), args, out, node.loc);
        let name = match &node.op {
            Op::Mm {} => "gemm",
            Op::Bmm {} if is_batched => "bmm",
            Op::Convolution { .. } => "convolution",
            Op::Rand { .. } | Op::Randn { .. } => {
                call.scalars = node.args.iter().map(|&arg| self.scalar((arg, ScalarKind::Int))).collect();
                "random"
            }
            _ => "library",
        };
        call.constant = matches!(node.op, Op::Mm {} | Op::Convolution { .. }) && self.constant(node.args[1]);
        self.step(Step::Call(call), name, ops, read, ty.bytes());
    }
}
