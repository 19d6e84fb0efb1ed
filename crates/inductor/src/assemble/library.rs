//! Steps that are library calls: products, convolutions, random numbers, and ops without a loop form.

use kiln_ir::{DType, Def, Node, Op, ScalarKind, Value};

use super::Assembler;
use crate::fuse::Fusion;
use crate::plan::{BatchRef, BufferRef, Distribution, MatrixRef, Step, ViewRef};
use crate::views::view_of;

impl Assembler<'_, '_> {
    fn matrix(&mut self, value: Value) -> MatrixRef {
        let view = view_of(self.fusion.graph, self.fusion.layouts, &self.fusion.stored, value);
        let at = BufferRef { buffer: self.home(view.base), offset: view.offset };
        MatrixRef { at, row: view.strides[0] as i64, column: view.strides[1] as i64 }
    }

    fn batch(&mut self, value: Value) -> BatchRef {
        let view = self.fusion.batch(value);
        let at = BufferRef { buffer: self.home(view.base), offset: view.offset };
        let matrix = MatrixRef { at, row: view.row as i64, column: view.column as i64 };
        BatchRef { matrix, sizes: view.sizes, strides: view.strides }
    }

    fn view(&mut self, value: Value) -> ViewRef {
        let view = view_of(self.fusion.graph, self.fusion.layouts, &self.fusion.stored, value);
        let at = BufferRef { buffer: self.home(view.base), offset: view.offset };
        ViewRef { at, shape: self.tensor(value).shape, strides: view.strides }
    }

    /// Whether a convolution reads its operands where they are, and is computed in their type.
    fn convolves(&self, node: &Node) -> bool {
        let Fusion { graph, layouts, stored, .. } = self.fusion;
        let is_dense = |&value: &Value| {
            view_of(graph, layouts, stored, value).strides == self.tensor(value).shape.contiguous_strides()
        };
        let is_float = matches!(self.tensor(node.outs[0]).dtype, DType::F32 | DType::F64);
        is_float && node.args.len() == 2 && node.args.iter().all(is_dense)
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
        let (step, name) = match &node.op {
            Op::Mm {} => {
                let (m, n, k) = (ty.shape[0], ty.shape[1], self.tensor(node.args[0]).shape[1]);
                let (lhs, rhs) = (self.matrix(node.args[0]), self.matrix(node.args[1]));
                let dst = MatrixRef { at: BufferRef { buffer: dst, offset: 0 }, row: n as i64, column: 1 };
                let (dtype, constant) = (ty.dtype, self.constant(node.args[1]));
                let (accumulate, epilogue) = (false, None);
                (Step::Gemm { m, n, k, lhs, rhs, dst, accumulate, dtype, constant, epilogue }, "gemm")
            }
            Op::Bmm {} if self.fusion.is_batched(node) => {
                let (m, n, k) = (ty.shape[1], ty.shape[2], self.tensor(node.args[0]).shape[2]);
                let (lhs, rhs) = (self.batch(node.args[0]), self.batch(node.args[1]));
                (Step::Bmm { batch: ty.shape[0], m, n, k, lhs, rhs, dst, dtype: ty.dtype }, "bmm")
            }
            Op::Convolution { .. } if self.convolves(node) => {
                let (x, weight) = (self.view(node.args[0]), self.view(node.args[1]));
                let constant = self.constant(node.args[1]);
                let (op, dtype) = (node.op.clone(), ty.dtype);
                let step =
                    Step::Convolution { op, x, weight, dst, dtype, constant, free: 0..0, epilogue: None };
                (step, "convolution")
            }
            Op::Rand { .. } | Op::Randn { .. } => {
                let uniform = matches!(node.op, Op::Rand { .. });
                let distribution = if uniform { Distribution::Uniform } else { Distribution::Normal };
                let seed = self.scalar((node.args[0], ScalarKind::Int));
                let offset = self.scalar((node.args[1], ScalarKind::Int));
                (Step::Random { distribution, buffer: dst, seed, offset }, "random")
            }
            op => {
                let args = node.args.iter().map(|&a| self.view(a)).collect();
                (
                    Step::Fallback { op: op.clone(), args, outs: vec![dst], free: 0..0, loc: node.loc },
                    "library",
                )
            }
        };
        self.step(step, name, ops, read, ty.bytes());
    }
}
