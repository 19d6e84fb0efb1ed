//! Eager: matrix products.

use kiln_ir::math::Function;
use kiln_ir::{DType, Dims, Error, Layout, Op, Result, Shape, Why};
use kiln_runtime::gemm;
use kiln_runtime::halves::{self, Half, Results};
use smallvec::SmallVec;

use super::{Input, Job};
use crate::kernels::Shared;
use crate::tensor::Ready;

/// The format of a half.
fn half(dtype: DType) -> Option<Half> {
    match dtype {
        DType::F16 => Some(Half::F16),
        DType::BF16 => Some(Half::Bf16),
        _ => None,
    }
}

impl Job<'_> {
    /// A product or a convolution of halves, all of one format; `None` if it is anything else.
    pub(super) fn halves(&self, out: &Ready, inputs: &[Input]) -> Option<Result<()>> {
        let half = half(out.dtype)?;
        let mut tensors: SmallVec<[&Ready; 3]> = SmallVec::new();
        for input in inputs {
            match input {
                Input::Tensor(t) if t.dtype == out.dtype => tensors.push(t),
                _ => return None,
            }
        }
        let product = |out: &Ready, x: &Ready, y: &Ready, start: Option<&Ready>| {
            self.halves_product(half, out, [x, y], start)
        };
        Some(match (self.op, &tensors[..]) {
            (Op::Mm {} | Op::Bmm {}, &[x, y]) => product(out, x, y, None),
            (Op::Addmm {}, &[start, x, y]) => product(out, x, y, Some(start)),
            (Op::Linear {}, &[x, weight]) => {
                self.linear_of(out, x, weight, |out, x, y| product(out, x, y, None))
            }
            (Op::Linear {}, &[x, weight, bias]) => {
                self.linear_of(out, x, weight, |out, x, y| product(out, x, y, Some(bias)))
            }
            (
                Op::Convolution { .. }
                | Op::ConvolutionInputGradient { .. }
                | Op::ConvolutionWeightGradient { .. },
                &[first, second, ref bias @ ..],
            ) => return self.convolution_of_halves(half, out, [first, second], bias.first().copied()),
            _ => return None,
        })
    }

    fn halves_product(
        &self,
        half: Half,
        out: &Ready,
        [x, y]: [&Ready; 2],
        start: Option<&Ready>,
    ) -> Result<()> {
        let dims = out.layout.shape.rank() - 2;
        let count = if dims == 0 { 1 } else { out.layout.shape[0] };
        let [m, n] = [out.layout.shape[dims], out.layout.shape[dims + 1]];
        let shape = gemm::Shape { m, n, k: x.layout.shape[dims + 1] };
        let start = match start {
            Some(start) => {
                let expanded = start.layout.view(&Op::Expand { shape: out.layout.shape.clone() });
                let layout =
                    expanded.ok_or_else(|| Error::bug("what a product starts with has another shape"))?;
                Some(Ready { layout, ..start.clone() })
            }
            None => None,
        };
        let place = |t: &Ready| {
            let strides = &t.layout.strides;
            let batch = if dims == 0 { 0 } else { strides[0] };
            (gemm::Matrix::<u16>::new(t.pointer().cast(), strides[dims], strides[dims + 1]), batch)
        };
        let places = Shared::new((place(out), place(x), place(y), start.as_ref().map(place)));
        let product = |number: usize| {
            let (out, x, y, start) = places.get();
            let at = |(matrix, batch): (gemm::Matrix<u16>, isize)| gemm::Matrix {
                pointer: matrix.pointer.wrapping_offset(number as isize * batch),
                ..matrix
            };
            halves::Product {
                results: Results::Rounded(at(out)),
                start: start.map(at),
                lhs: at(x),
                rhs: at(y),
            }
        };
        // SAFETY: `out` is fresh and has the shape; the others are locked for reading; the type rule checked that
        // the sizes fit, and all dtypes are the format's.
        unsafe { halves::products(half, count, shape, &product) }.map_err(|error| self.memory(error))
    }

    pub(super) fn mm(&self, out: &Ready, x: &Ready, y: &Ready, accumulate: bool) -> Result<()> {
        let shape = gemm::Shape { m: x.layout.shape[0], n: y.layout.shape[1], k: x.layout.shape[1] };
        macro_rules! product {
            ($gemm:path, $ty:ty) => {{
                let matrix = |t: &Ready| gemm::Matrix::<$ty>::new(t.pointer().cast(), t.layout.strides[0], t.layout.strides[1]);
                // SAFETY: `out` is fresh and m × n; `x` and `y` are locked for reading; the type rule checked
                // that the sizes fit and the dtypes agree.
                unsafe { $gemm(shape, matrix(out), accumulate, matrix(x), matrix(y)) }
            }};
        }
        match out.dtype {
            DType::F32 => product!(gemm::gemm_f32, f32),
            DType::F64 => product!(gemm::gemm_f64, f64),
            DType::I64 => product!(gemm::gemm_i64, i64),
            _ => {
                let why = Why::DType { argument: "x", expected: "numeric", got: out.dtype };
                return Err(self.op.error(self.tys, why, self.loc));
            }
        }
        Ok(())
    }

    pub(super) fn linear(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let (x, weight) = (self.tensor(inputs, 0)?, self.tensor(inputs, 1)?);
        self.linear_of(out, x, weight, |out, x, y| self.mm(out, x, y, false))?;
        match inputs.get(2) {
            Some(Input::Tensor(bias)) => {
                self.function(Function::Add, out, &[Input::Tensor(out), Input::Tensor(bias)])
            }
            _ => Ok(()),
        }
    }

    /// Calls `product` with the matrices behind a linear layer.
    fn linear_of(
        &self,
        out: &Ready,
        x: &Ready,
        weight: &Ready,
        product: impl FnOnce(&Ready, &Ready, &Ready) -> Result<()>,
    ) -> Result<()> {
        let shape = &x.layout.shape;
        let rows: usize = shape[..shape.rank() - 1].iter().product();
        let flatten = |t: &Ready, columns: usize| -> Result<Ready> {
            let matrix = Op::Reshape { shape: Shape::from([rows, columns]) };
            match t.layout.view(&matrix) {
                Some(layout) => Ok(Ready { layout, ..t.clone() }),
                None => {
                    let dense = self.dense(t)?;
                    let layout = Layout {
                        offset: dense.layout.offset,
                        ..Layout::contiguous(Shape::from([rows, columns]))
                    };
                    Ok(Ready { layout, ..dense })
                }
            }
        };
        let flat = flatten(x, weight.layout.shape[1])?;
        let result = flatten(out, weight.layout.shape[0])?;
        let transposed = weight.layout.view(&Op::Permute { dims: Dims::from([1, 0]) });
        let transposed = transposed.ok_or_else(|| Error::bug("a weight has no transposed layout"))?;
        product(&result, &flat, &Ready { layout: transposed, ..weight.clone() })
    }
}
