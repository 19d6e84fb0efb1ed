//! Where the largest or smallest element of a dim is, as two reductions: what it is, and the first place that has it.
//!
//! ```text
//! %1 = argmax(%0) {dim: 1}      →      %1 = amax(%0) {dims: [1]}
//!                                      %2 = where(%0 == %1, -position, least)
//!                                      %3 = -amax(%2) {dims: [1]}
//! ```
//!
//! So it is loops, fused with what comes before and after. A NaN is the largest and the smallest: where there is one,
//! the first reduction gives NaN, which equals nothing, and elements that differ from themselves are the places.

use std::borrow::Cow;

use kiln_ir::{
    DType, Dims, Fault, Graph, Loc, Node, Op, Scalar, ScalarKind, Shape, TensorTy, Ty, Value, planted,
};

use super::replace;

/// Two passes over shorter rows, in vectors that are half empty, take longer than a plain loop.
const SHORTEST_ROW: usize = 32;

/// Takes `argmax` and `argmin` apart where the reductions run in one kernel; `is_cut` says of a shape and a dim whether such
/// a reduction would be cut into several.
pub fn take_apart<'g>(graph: Cow<'g, Graph>, is_cut: &dyn Fn(&Shape, usize) -> bool) -> Cow<'g, Graph> {
    let found = |node: &Node| {
        let (dim, is_least) = match &node.op {
            Op::Argmax { dim, .. } => (*dim, false),
            Op::Argmin { dim, .. } => (*dim, true),
            _ => return None,
        };
        let ty = graph.ty(node.args[0]).as_tensor()?;
        let out = graph.ty(node.outs[0]).as_tensor()?.shape.clone();
        // Only one pass over few long rows is cut into chunks; halves that loops have not rounded yet would not be
        // equal where they are when they are stored; integers can't all be negated.
        let is_short = dim + 1 == ty.shape.rank() && ty.shape[dim] < SHORTEST_ROW;
        let fits = dim < ty.shape.rank()
            && !is_short
            && ty.shape.numel() > 0
            && !is_cut(&ty.shape, dim)
            && ty.dtype != DType::Bool
            && !(ty.dtype.is_float() && ty.dtype.is_narrow())
            && (ty.dtype.is_float() || !is_least);
        fits.then(|| Extreme { ty: ty.clone(), out, dim, is_least })
    };
    let emit = |result: &mut Graph, node: &Node, args: &[Value], extreme: Extreme| {
        extreme.emit(result, args[0], node.loc)
    };
    let replaced = replace(&graph, found, emit);
    replaced.map_or(graph, Cow::Owned)
}

/// An `argmax` or `argmin` of a tensor of this type.
struct Extreme {
    ty: TensorTy,
    /// The shape of the result.
    out: Shape,
    dim: usize,
    is_least: bool,
}

impl Extreme {
    fn emit(&self, graph: &mut Graph, x: Value, loc: Loc) -> Value {
        let (shape, dim) = (&self.ty.shape, self.dim);
        let of = |dtype: DType, shape: &Shape| {
            Ty::Tensor(TensorTy { dtype, shape: shape.clone(), ..self.ty.clone() })
        };
        let whole = |dtype: DType| of(dtype, shape);
        let kept: Shape = (0..shape.rank()).filter(|&d| d != dim).map(|d| shape[d]).collect();
        let line: Shape = (0..shape.rank()).map(|d| if d == dim { shape[d] } else { 1 }).collect();
        let mut once = shape.clone();
        once[dim] = 1;
        let mut push = |op: Op, args: &[Value], ty: Ty| graph.push(op, args, [ty], false, loc)[0];
        let is_negated = self.is_least && !planted(Fault::ArgminIsArgmax);
        let x = if is_negated { push(Op::Neg {}, &[x], whole(self.ty.dtype)) } else { x };
        let dims = || std::iter::once(dim).collect::<Dims>();

        let most = push(Op::Amax { dims: dims(), keepdim: false }, &[x], of(self.ty.dtype, &kept));
        let most = push(Op::Reshape { shape: once.clone() }, &[most], of(self.ty.dtype, &once));
        let most = push(Op::Expand { shape: shape.clone() }, &[most], whole(self.ty.dtype));
        let number = |value: i64| Op::Constant { value: Scalar::Int(value) };
        let int = Ty::Scalar(ScalarKind::Int);
        let (start, step) = (push(number(0), &[], int.clone()), push(number(1), &[], int.clone()));
        let arange = Op::Arange { len: shape[dim], dtype: DType::I64, device: self.ty.device };
        let count = Shape::from([shape[dim]]);
        let at = push(arange, &[start, step], of(DType::I64, &count));
        let at = push(Op::Neg {}, &[at], of(DType::I64, &count));
        let at = push(Op::Reshape { shape: line.clone() }, &[at], of(DType::I64, &line));
        let at = push(Op::Expand { shape: shape.clone() }, &[at], whole(DType::I64));
        let far = push(number(i64::MIN), &[], int);

        let is_most = push(Op::Eq {}, &[x, most], whole(DType::Bool));
        let mut key = push(Op::Where {}, &[is_most, at, far], whole(DType::I64));
        if self.ty.dtype.is_float() {
            let is_nan = push(Op::Ne {}, &[x, x], whole(DType::Bool));
            key = push(Op::Where {}, &[is_nan, at, key], whole(DType::I64));
        }
        let first = push(Op::Amax { dims: dims(), keepdim: false }, &[key], of(DType::I64, &kept));
        let first = push(Op::Neg {}, &[first], of(DType::I64, &kept));
        if self.out == kept {
            first
        } else {
            push(Op::Reshape { shape: self.out.clone() }, &[first], of(DType::I64, &self.out))
        }
    }
}
