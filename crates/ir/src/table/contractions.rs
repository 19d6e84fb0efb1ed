//! Rows: matrix products and convolution.

use smallvec::smallvec;

use crate::gradient::Cx;
use crate::samples::{Domain, Sample, SampleArg};
use crate::types::{added, checked, common_device, same_dtype, tensor};
use crate::{
    DType, Dims, EmitExt, GradCall, Op, Result, Shape, TensorTy, Ty, Tys, Value, Values, Why, broadcast,
};

#[doc(hidden)]
#[macro_export]
macro_rules! rows_contractions {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_shapes! { $callback [
            $($rows)*

            /// Matrix product of [m, k] and [k, n]
            [contraction mm _none] "mm" Mm (x, y) () {}
                { ty: types::mm, grad: Grad::Fn(gradient::mm), decompose: Some(decompose::contraction),
                  eval: Eval::Structural,
                  prim: Some(|_, args| args[0].as_tensor().is_some_and(|t| !t.dtype.is_narrow())), kernel: true, refuses: Refuses::Nothing, samples: samples::mm };
            /// input + x · y
            [contraction addmm _none] "addmm" Addmm (input, x, y) () {}
                { ty: types::addmm, grad: Grad::Fn(gradient::addmm),
                  decompose: Some(decompose::addmm), eval: Eval::Structural, kernel: true, samples: samples::addmm };
            /// x · weightᵀ + bias, over the last dim of x
            [contraction linear _none] "linear" Linear (x, weight) (bias) {}
                { ty: types::linear, grad: Grad::Fn(gradient::linear),
                  decompose: Some(decompose::linear), eval: Eval::Structural,
                  kernel: true, samples: samples::linear };
            /// Matrix products of [b, m, k] and [b, k, n], one for each b
            [contraction bmm _none] "bmm" Bmm (x, y) () {}
                { ty: contractions::bmm_type, grad: Grad::Fn(contractions::bmm_gradient),
                  eval: Eval::Structural, refuses: Refuses::NotFloats, samples: contractions::bmm_samples };
            /// input + x · y, matrices in batches
            [contraction baddbmm _none] "baddbmm" Baddbmm (input, x, y) () {}
                { ty: contractions::baddbmm_type, grad: Grad::Decompose,
                  decompose: Some(contractions::baddbmm), eval: Eval::Structural, samples: contractions::baddbmm_samples };
            /// Matrix product over the last two dims, the dims before them broadcast; one dim is a vector
            [contraction matmul _none] "matmul" Matmul (x, y) () {}
                { ty: contractions::matmul_type, grad: Grad::Decompose,
                  decompose: Some(contractions::matmul), eval: Eval::Structural, samples: contractions::matmul_samples };
            /// Cross-correlation of images [n, c, …] with filters [o, c / groups, …] over one or two dims
            [contraction convolution _none] "convolution" Convolution (x, weight) (bias)
                { stride: Sizes, padding: Sizes, dilation: Sizes, groups: usize }
                { ty: convolution::forward_type, grad: Grad::Fn(convolution::forward_gradient),
                  decompose: Some(convolution::forward), eval: Eval::Structural,
                  prim: Some(|_, args| args.len() == 2), kernel: true, refuses: Refuses::NotFloats, samples: convolution::forward_samples };
            /// The gradient of a convolution's input; a transposed convolution
            [contraction convolution_input_gradient _none] "convolution_input_gradient" ConvolutionInputGradient (grad, weight) ()
                { input: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: usize }
                { ty: convolution::input_type, grad: Grad::Fn(convolution::input_gradient),
                  eval: Eval::Structural,
                  refuses: Refuses::NotFloats, places: &["input"], samples: convolution::input_samples };
            /// The gradient of a convolution's filters
            [contraction convolution_weight_gradient _none] "convolution_weight_gradient" ConvolutionWeightGradient (x, grad) ()
                { weight: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: usize }
                { ty: convolution::weight_type, grad: Grad::Fn(convolution::weight_gradient),
                  eval: Eval::Structural, refuses: Refuses::NotFloats, samples: convolution::weight_samples };
        ]}
    };
}

type Rule = Result<Tys, Why>;
type Grads = Result<Vec<Option<Value>>>;
fn batch<'a>(args: &'a [Ty], i: usize, argument: &'static str) -> Result<&'a TensorTy, Why> {
    let t = tensor(args, i, argument)?;
    match t.shape.rank() {
        3 => Ok(t),
        got => Err(Why::Rank { argument, expected: "3", got }),
    }
}

pub(crate) fn bmm_type(_: &Op, args: &[Ty]) -> Rule {
    let (x, y) = (batch(args, 0, "x")?, batch(args, 1, "y")?);
    let device = common_device(args)?;
    same_dtype("y", x, y)?;
    if x.shape[0] != y.shape[0] {
        return Err(Why::sizes("the batch sizes", x.shape[0], y.shape[0]));
    }
    if x.shape[2] != y.shape[1] {
        return Err(Why::InnerSizes { left: x.shape[2], right: y.shape[1] });
    }
    checked(TensorTy { dtype: x.dtype, device, shape: Shape::from([x.shape[0], x.shape[1], y.shape[2]]) })
}

pub(crate) fn baddbmm_type(op: &Op, args: &[Ty]) -> Rule {
    added(args, bmm_type(op, &args[1..])?)
}

/// gx = g·yᵀ, gy = xᵀ·g
pub(crate) fn bmm_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let Some(g) = call.grads[0] else { return Ok(vec![None, None]) };
    let turned = Dims::from([0, 2, 1]);
    let gx = call.wanted(cx, 0, |cx| {
        let yt = cx.permute(call.inputs[1], turned.clone())?;
        cx.bmm(g, yt)
    })?;
    let gy = call.wanted(cx, 1, |cx| {
        let xt = cx.permute(call.inputs[0], turned)?;
        cx.bmm(xt, g)
    })?;
    Ok(vec![gx, gy])
}

pub(crate) fn baddbmm(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let product = cx.bmm(args[1], args[2])?;
    Ok(smallvec![cx.add(product, args[0])?])
}

/// The sizes of a matmul: batch dims, m, k, n. A vector is a row on the left and a column on the right.
struct Product {
    batch: Shape,
    m: usize,
    k: usize,
    n: usize,
}

fn product(x: &Shape, y: &Shape) -> Result<Product, Why> {
    for (argument, shape) in [("x", x), ("y", y)] {
        if shape.rank() == 0 {
            return Err(Why::Rank { argument, expected: "1 or more", got: 0 });
        }
    }
    let (m, k) = if x.rank() == 1 { (1, x[0]) } else { (x[x.rank() - 2], x[x.rank() - 1]) };
    let (inner, n) = if y.rank() == 1 { (y[0], 1) } else { (y[y.rank() - 2], y[y.rank() - 1]) };
    if k != inner {
        return Err(Why::InnerSizes { left: k, right: inner });
    }
    let lead = |s: &Shape| Shape::from(&s[..s.rank().saturating_sub(2)]);
    let (left, right) = (lead(x), lead(y));
    match broadcast(&left, &right) {
        Some(batch) => Ok(Product { batch, m, k, n }),
        None => Err(Why::Broadcast { left, right }),
    }
}

impl Product {
    fn result(&self, x: &Shape, y: &Shape) -> Shape {
        let mut shape = self.batch.clone();
        if x.rank() > 1 {
            shape.push(self.m);
        }
        if y.rank() > 1 {
            shape.push(self.n);
        }
        shape
    }
}

pub(crate) fn matmul_type(_: &Op, args: &[Ty]) -> Rule {
    let (x, y) = (tensor(args, 0, "x")?, tensor(args, 1, "y")?);
    let device = common_device(args)?;
    same_dtype("y", x, y)?;
    let shape = product(&x.shape, &y.shape)?.result(&x.shape, &y.shape);
    checked(TensorTy { dtype: x.dtype, device, shape })
}

/// One matrix on the right serves all rows of x, whatever their batch: one product. Else one for each batch.
pub(crate) fn matmul(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let (x, y) = (cx.tensor_ty(args[0]).shape, cx.tensor_ty(args[1]).shape);
    let sizes = match product(&x, &y) {
        Ok(sizes) => sizes,
        Err(why) => {
            return Err(op.error(
                &[cx.ty(args[0]).clone(), cx.ty(args[1]).clone()],
                why,
                crate::Loc::UNKNOWN,
            ));
        }
    };
    let Product { ref batch, m, k, n } = sizes;
    let flat = if y.rank() <= 2 {
        let rows: usize = x[..x.rank() - 1].iter().product();
        let x = as_shape(cx, args[0], Shape::from([rows, k]))?;
        let y = as_shape(cx, args[1], Shape::from([k, n]))?;
        cx.mm(x, y)?
    } else {
        let x = as_batch(cx, args[0], batch, [m, k])?;
        let y = as_batch(cx, args[1], batch, [k, n])?;
        cx.bmm(x, y)?
    };
    Ok(smallvec![as_shape(cx, flat, sizes.result(&x, &y))?])
}

fn as_shape(cx: Cx<'_>, x: Value, shape: Shape) -> Result<Value> {
    if cx.tensor_ty(x).shape == shape { Ok(x) } else { cx.reshape(x, shape) }
}

/// A stack of matrices, as many as `batch` has, in one dim.
fn as_batch(cx: Cx<'_>, x: Value, batch: &Shape, [rows, columns]: [usize; 2]) -> Result<Value> {
    let own = cx.tensor_ty(x).shape;
    let mut wide = batch.clone();
    wide.push(rows);
    wide.push(columns);
    let matrices = if own.rank() == 1 { cx.reshape(x, Shape::from([rows, columns]))? } else { x };
    let spread = if cx.tensor_ty(matrices).shape == wide { matrices } else { cx.expand(matrices, wide)? };
    as_shape(cx, spread, Shape::from([batch.numel(), rows, columns]))
}

const NUMBERS: &[DType] = &[DType::I64, DType::F32, DType::F64];
const FLOATS: &[DType] = &[DType::F32, DType::F64];

fn call(dtypes: &'static [DType], op: Op, shapes: &[&[usize]]) -> Sample {
    let args = shapes.iter().map(|s| SampleArg::Tensor(Shape::from(*s), Domain::Any)).collect();
    Sample { op, args, dtypes }
}

pub(crate) fn bmm_samples() -> Vec<Sample> {
    [(2, 3, 5, 4), (1, 1, 1, 1), (3, 17, 9, 6), (0, 2, 3, 4), (2, 3, 0, 2), (4, 1, 33, 1)]
        .into_iter()
        .map(|(b, m, k, n)| call(NUMBERS, Op::Bmm {}, &[&[b, m, k], &[b, k, n]]))
        .collect()
}

pub(crate) fn baddbmm_samples() -> Vec<Sample> {
    let inputs: [&[usize]; 4] = [&[2, 3, 4], &[4], &[3, 1], &[1, 3, 4]];
    inputs.iter().map(|input| call(FLOATS, Op::Baddbmm {}, &[input, &[2, 3, 5], &[2, 5, 4]])).collect()
}

pub(crate) fn matmul_samples() -> Vec<Sample> {
    let cases: [(&[usize], &[usize]); 12] = [
        (&[7], &[7]),
        (&[3, 5], &[5]),
        (&[5], &[5, 4]),
        (&[3, 5], &[5, 4]),
        (&[2, 3, 5], &[5]),
        (&[2, 3, 5], &[5, 4]),
        (&[5], &[2, 5, 4]),
        (&[3, 5], &[2, 5, 4]),
        (&[2, 1, 3, 5], &[3, 5, 4]),
        (&[2, 3, 1, 5], &[1, 3, 5, 2]),
        (&[0, 3, 5], &[5, 4]),
        (&[2, 3, 0], &[2, 0, 4]),
    ];
    cases.iter().map(|(x, y)| call(FLOATS, Op::Matmul {}, &[x, y])).collect()
}
