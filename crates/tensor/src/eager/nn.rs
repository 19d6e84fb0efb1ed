//! Eager execution of products in batches, convolution, pooling, resizing and normalisation.

use kiln_ir::table::resample;
use kiln_ir::{DType, Op, Result, Shape, Why};
use kiln_runtime::AllocError;
use kiln_runtime::convolution::{self, Geometry, Operands, pair};
use kiln_runtime::halves::Half;

use super::{Input, Job, operand};
use crate::kernels::norm::{self, Affine, Groups, Normalisation};
use crate::kernels::{self, resample as planes};
use crate::tensor::Ready;

/// Runs a body with `$T` the Rust type of a float dtype.
macro_rules! with_float {
    ($job:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::F64 => {
                type $T = f64;
                $body
            }
            got => return Err($job.fail(Why::DType { argument: "x", expected: "f32 or f64", got })),
        }
    };
}

impl Job<'_> {
    fn fail(&self, why: Why) -> kiln_ir::Error {
        self.op.error(self.tys, why, self.loc)
    }

    pub(super) fn memory(&self, error: AllocError) -> kiln_ir::Error {
        self.fail(Why::Memory { bytes: 0, reason: error.to_string() })
    }

    pub(super) fn bmm(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let (x, y) = (self.tensor(inputs, 0)?, self.tensor(inputs, 1)?);
        // SAFETY: `out` is fresh, the operands are locked for reading; the type rule checked shapes and dtypes.
        let done = unsafe { kernels::bmm(&operand(out), &operand(x), &operand(y)) };
        done.ok_or_else(|| {
            self.fail(Why::DType { argument: "x", expected: "f32, f64 or i64", got: out.dtype })
        })
    }

    /// The sizes of a convolution, or of one of its gradients, of these operands.
    fn geometry(&self, out: &Ready, first: &Ready, second: &Ready) -> Option<Geometry> {
        let (a, b, c) = (&first.layout.shape, &second.layout.shape, &out.layout.shape);
        let (input, weight, output) = match self.op {
            Op::ConvolutionInputGradient { .. } => (c, b, a),
            Op::ConvolutionWeightGradient { .. } => (a, c, b),
            _ => (a, b, c),
        };
        Geometry::of(self.op, input, weight, output)
    }

    /// A convolution of halves or one of its gradients, if it reads them as they are.
    pub(super) fn convolution_of_halves(
        &self,
        half: Half,
        out: &Ready,
        [first, second]: [&Ready; 2],
        bias: Option<&Ready>,
    ) -> Option<Result<()>> {
        let geometry = self.geometry(out, first, second).filter(convolution::is_for_halves)?;
        let run = || {
            let (first, second) = (self.dense(first)?, self.dense(second)?);
            let bias = bias.map(|bias| self.dense(bias)).transpose()?;
            let [to, left, right] = [out, &first, &second].map(|t| t.pointer().cast::<u16>());
            let operands = match self.op {
                Op::ConvolutionInputGradient { .. } => Operands::InputGradient(left, right),
                Op::ConvolutionWeightGradient { .. } => Operands::WeightGradient(left, right),
                _ => {
                    let bias = bias.as_ref().map(|bias| bias.pointer().cast::<u16>().cast_const());
                    Operands::Forward(left, right, bias)
                }
            };
            // SAFETY: all are dense, `out` is fresh, the others are locked for reading or fresh; the type rule checked
            // that the sizes fit together.
            let done = unsafe { convolution::of_halves(&geometry, half, to, operands) };
            done.map_err(|error| self.memory(error))
        };
        Some(run())
    }

    /// A convolution or one of its gradients.
    pub(super) fn convolution(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let (first, second) = (self.dense(self.tensor(inputs, 0)?)?, self.dense(self.tensor(inputs, 1)?)?);
        let Some(geometry) = self.geometry(out, &first, &second) else { return Ok(()) };
        let bias = match inputs.get(2) {
            Some(Input::Tensor(bias)) => Some(self.dense(bias)?),
            _ => None,
        };
        with_float!(self, out.dtype, T => {
            let (to, left, right) =
                (out.pointer().cast::<T>(), first.pointer().cast::<T>(), second.pointer().cast::<T>());
            // SAFETY: all are dense, `out` is fresh, the others are locked for reading or fresh; the type rule
            // checked that the sizes fit together.
            let done = unsafe {
                match (self.op, &bias) {
                    (Op::ConvolutionInputGradient { .. }, _) => {
                        convolution::input_gradient(&geometry, to, left, right)
                    }
                    (Op::ConvolutionWeightGradient { .. }, _) => {
                        convolution::weight_gradient(&geometry, to, left, right)
                    }
                    (_, Some(bias)) => {
                        let bias = bias.pointer().cast::<T>();
                        convolution::forward_biased(&geometry, to, left, right, bias)
                    }
                    (_, None) => convolution::forward(&geometry, to, left, right),
                }
            };
            done.map_err(|error| self.memory(error))?;
        });
        Ok(())
    }

    pub(super) fn max_pool(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let x = self.dense(self.tensor(inputs, 0)?)?;
        let Op::MaxPool2dIndices { kernel, stride, padding, dilation, .. } = self.op else { return Ok(()) };
        let (input, output) = (&x.layout.shape, &out.layout.shape);
        let windows = planes::Windows {
            input: pair(&input[2..], 1),
            output: pair(&output[2..], 1),
            kernel: pair(kernel, 1),
            stride: pair(stride, 1),
            padding: pair(padding, 0),
            dilation: pair(dilation, 1),
        };
        let (count, to, from) = (input[0] * input[1], out.pointer().cast::<i64>(), x.pointer());
        // SAFETY: both are dense, `out` is fresh, `x` locked for reading; the type rule made the sizes.
        unsafe {
            match x.dtype {
                DType::F32 => planes::max_pool_indices(count, &windows, to, from.cast::<f32>()),
                DType::F64 => planes::max_pool_indices(count, &windows, to, from.cast::<f64>()),
                DType::I64 => planes::max_pool_indices(count, &windows, to, from.cast::<i64>()),
                got => {
                    return Err(self.fail(Why::DType { argument: "x", expected: "f32, f64 or i64", got }));
                }
            }
        }
        Ok(())
    }

    /// Pooling by means and resizing, and their gradients.
    pub(super) fn resample(&self, out: &Ready, inputs: &[Input], backward: bool) -> Result<()> {
        // Without images the sizes may be absurd, and the plans below are as long as they are.
        if out.layout.shape.numel() == 0 {
            return Ok(());
        }
        let x = self.dense(self.tensor(inputs, 0)?)?;
        let (input, output) = if backward {
            (&out.layout.shape, &x.layout.shape)
        } else {
            (&x.layout.shape, &out.layout.shape)
        };
        let count = input[0] * input[1];
        // Nor may one dim of a gradient be looked at whose other is empty: its result is zeros.
        let places = if x.layout.shape.numel() == 0 { [0, 0] } else { pair(&output[2..], 1) };
        let Some(axes) = resample::axes(self.op, pair(&input[2..], 1), places) else {
            return Ok(());
        };
        with_float!(self, out.dtype, T => {
            let (to, from) = (out.pointer().cast::<T>(), x.pointer().cast::<T>());
            // SAFETY: both are dense, `out` is fresh, `x` locked for reading; the type rule made the sizes.
            unsafe {
                match self.op {
                    Op::UpsampleNearest2dBackward { .. } | Op::UpsampleBilinear2dBackward { .. } => {
                        planes::resize_backward(count, &axes, to, from)
                    }
                    _ if backward => planes::resample_backward(count, &axes, to, from),
                    _ => planes::resample(count, &axes, to, from),
                }
            }
        });
        Ok(())
    }

    /// The groups in which an op normalises a tensor of this shape.
    fn groups(&self, shape: &Shape) -> Groups {
        match *self.op {
            Op::LayerNorm { dims }
            | Op::LayerNormBackward { dims }
            | Op::RmsNorm { dims }
            | Op::RmsNormBackward { dims } => {
                let (outer, inner) = shape.split_at(shape.rank() - dims);
                let length: usize = inner.iter().product();
                let count = if length == 0 { 0 } else { outer.iter().product() };
                Groups { count, group: length, segments: 1, segment: 0, length }
            }
            Op::GroupNorm { groups } => {
                let length = shape[1..].iter().product::<usize>() / groups;
                Groups { count: shape[0] * groups, group: length, segments: 1, segment: 0, length }
            }
            _ => {
                let length: usize = shape[2..].iter().product();
                Groups {
                    count: shape[1],
                    group: length,
                    segments: shape[0],
                    segment: shape[1] * length,
                    length,
                }
            }
        }
    }

    fn normalisation(&self, shape: &Shape, eps: f64) -> Normalisation {
        let centred = !matches!(self.op, Op::RmsNorm { .. } | Op::RmsNormBackward { .. });
        Normalisation { groups: self.groups(shape), centred, eps }
    }

    pub(super) fn normalise(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        // However many channels there are.
        if out.layout.shape.numel() == 0 {
            return Ok(());
        }
        let x = self.dense(self.tensor(inputs, 0)?)?;
        let what = self.normalisation(&x.layout.shape, self.number(inputs, 1)?.as_f64());
        let mut affine = Vec::new();
        for i in 2..inputs.len() {
            affine.push(self.dense(self.tensor(inputs, i)?)?);
        }
        with_float!(self, out.dtype, T => {
            let part = |i: usize| {
                let Some(numbers) = affine.get(i).map(|t| t.pointer().cast::<T>().cast_const()) else {
                    return Affine::None;
                };
                match *self.op {
                    Op::BatchNorm {} => Affine::Group(numbers),
                    Op::GroupNorm { groups } => {
                        Affine::Channel { numbers, groups, plane: x.layout.shape[2..].iter().product() }
                    }
                    _ => Affine::Element(numbers),
                }
            };
            let (to, from) = (out.pointer().cast::<T>(), x.pointer().cast::<T>());
            // SAFETY: all are dense, `out` is fresh, the others locked for reading or fresh; the type rule
            // checked weight and bias.
            unsafe { norm::normalise(&what, to, from, part(0), part(1)) };
        });
        Ok(())
    }

    pub(super) fn normalise_backward(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        if out.layout.shape.numel() == 0 {
            return Ok(());
        }
        let (grad, x) = (self.dense(self.tensor(inputs, 0)?)?, self.dense(self.tensor(inputs, 1)?)?);
        let what = self.normalisation(&x.layout.shape, self.number(inputs, 2)?.as_f64());
        with_float!(self, out.dtype, T => {
            let (to, grad, x) =
                (out.pointer().cast::<T>(), grad.pointer().cast::<T>(), x.pointer().cast::<T>());
            // SAFETY: all are dense and of one shape; `out` is fresh, the others locked for reading or fresh.
            unsafe { norm::normalise_backward(&what, to, grad, x) };
        });
        Ok(())
    }

    pub(super) fn batch_moments(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let x = self.dense(self.tensor(inputs, 0)?)?;
        let groups = self.groups(&x.layout.shape);
        with_float!(self, out.dtype, T => {
            // SAFETY: `out` is fresh and has two elements a channel, `x` is dense and locked for reading.
            unsafe { norm::moments(&groups, out.pointer().cast::<T>(), x.pointer().cast::<T>()) };
        });
        Ok(())
    }
}
