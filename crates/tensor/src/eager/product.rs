//! Eager: matrix products.

use kiln_ir::math::Function;
use kiln_ir::{DType, Dims, Error, Layout, Op, Result, Shape, Why};
use kiln_runtime::gemm;

use super::{Input, Job};
use crate::tensor::Ready;

impl Job<'_> {
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
        self.mm(&result, &flat, &Ready { layout: transposed, ..weight.clone() }, false)?;
        match inputs.get(2) {
            Some(Input::Tensor(bias)) => {
                self.function(Function::Add, out, &[Input::Tensor(out), Input::Tensor(bias)])
            }
            _ => Ok(()),
        }
    }
}
