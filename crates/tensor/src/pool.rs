//! Pooling and resizing of images, in PyTorch's terms.

use kiln_ir::table::resample;
use kiln_ir::{DType, Error, Loc, Op, Result, Scalar, Sizes, Why};

use crate::Tensor;
use crate::conv::IntoSizes;
use crate::dispatch::dispatch_tensor;
use crate::hook::Arg;
use crate::integer_windows::are_integers;

/// How windows move over an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pool<const N: usize> {
    /// Size of a window.
    pub kernel: [usize; N],
    /// Distance between windows.
    pub stride: [usize; N],
    /// How far windows may begin before the image.
    pub padding: [usize; N],
    /// Distance between a window's elements; averages have none.
    pub dilation: [usize; N],
    /// Whether a window that does not fit altogether counts.
    pub ceil_mode: bool,
    /// Whether averages count the padding.
    pub count_include_pad: bool,
}

impl<const N: usize> Pool<N> {
    /// Windows side by side.
    pub fn new(kernel: impl IntoSizes<N>) -> Pool<N> {
        let kernel = kernel.into_sizes();
        Pool {
            kernel,
            stride: kernel,
            padding: [0; N],
            dilation: [1; N],
            ceil_mode: false,
            count_include_pad: true,
        }
    }

    /// With this distance between windows.
    pub fn stride(self, stride: impl IntoSizes<N>) -> Pool<N> {
        Pool { stride: stride.into_sizes(), ..self }
    }

    /// With padding.
    pub fn padding(self, padding: impl IntoSizes<N>) -> Pool<N> {
        Pool { padding: padding.into_sizes(), ..self }
    }

    /// With this distance between a window's elements.
    pub fn dilation(self, dilation: impl IntoSizes<N>) -> Pool<N> {
        Pool { dilation: dilation.into_sizes(), ..self }
    }

    /// With windows that don't fit altogether.
    pub fn ceil_mode(self, ceil_mode: bool) -> Pool<N> {
        Pool { ceil_mode, ..self }
    }

    /// With averages that count the padding, or not.
    pub fn count_include_pad(self, count_include_pad: bool) -> Pool<N> {
        Pool { count_include_pad, ..self }
    }
}

impl From<Pool<1>> for Pool<2> {
    fn from(pool: Pool<1>) -> Pool<2> {
        Pool {
            kernel: [1, pool.kernel[0]],
            stride: [1, pool.stride[0]],
            padding: [0, pool.padding[0]],
            dilation: [1, pool.dilation[0]],
            ceil_mode: pool.ceil_mode,
            count_include_pad: pool.count_include_pad,
        }
    }
}

/// How an image is resized.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Interpolation {
    /// By the nearest element.
    #[default]
    Nearest,
    /// By linear interpolation in both directions.
    Bilinear {
        /// Whether the corners' centres stay where they are.
        align_corners: bool,
    },
}

/// The size an image is resized to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Resize {
    /// Height and width.
    Size([usize; 2]),
    /// Factors of height and width.
    Scale([f64; 2]),
}

impl From<[usize; 2]> for Resize {
    fn from(size: [usize; 2]) -> Resize {
        Resize::Size(size)
    }
}

impl From<f64> for Resize {
    fn from(scale: f64) -> Resize {
        Resize::Scale([scale; 2])
    }
}

impl Tensor {
    /// Runs an op on `[n, c, height, width]`; `[c, height, width]` is one image.
    fn on_images(&self, name: &str, loc: Loc, op: &Op) -> Result<Tensor> {
        let run = |x: &Tensor| dispatch_tensor(op, &[Arg::Tensor(x)], false, loc).map_err(|e| e.named(name));
        match self.rank() {
            4 => run(self),
            3 => run(&self.unsqueeze(0)?)?.squeeze(0),
            got => Err(Error::op(name, Why::Rank { argument: "x", expected: "3 or 4", got }, loc)),
        }
    }

    /// Runs a pooling of `[n, c, length]` or `[c, length]` as one of images of height 1.
    fn as_lines(&self, name: &str, loc: Loc) -> Result<Tensor> {
        match self.rank() {
            2 | 3 => self.unsqueeze(-2),
            got => Err(Error::op(name, Why::Rank { argument: "x", expected: "2 or 3", got }, loc)),
        }
    }

    /// The largest element of each window.
    #[track_caller]
    pub fn max_pool2d(&self, pool: Pool<2>) -> Result<Tensor> {
        Ok(self.max_pool2d_with_indices(pool)?.0)
    }

    /// The largest element of each window, and where it lies in its plane.
    #[track_caller]
    pub fn max_pool2d_with_indices(&self, pool: Pool<2>) -> Result<(Tensor, Tensor)> {
        let op = Op::MaxPool2dIndices {
            kernel: Sizes::from(pool.kernel),
            stride: Sizes::from(pool.stride),
            padding: Sizes::from(pool.padding),
            dilation: Sizes::from(pool.dilation),
            ceil_mode: pool.ceil_mode,
        };
        let indices = self.on_images("max_pool2d", Loc::caller(), &op)?;
        let (own, result) = (self.shape(), indices.shape());
        let lead = &own[..own.rank() - 2];
        let flat = |plane: &[usize]| [lead, &[plane.iter().product()]].concat();
        let planes = self.reshape(&flat(&own[lead.len()..])[..])?;
        let picked = planes.gather(-1, &indices.reshape(&flat(&result[lead.len()..])[..])?)?;
        Ok((picked.reshape(&result)?, indices))
    }

    /// The largest element of each window of `[n, c, length]`.
    #[track_caller]
    pub fn max_pool1d(&self, pool: Pool<1>) -> Result<Tensor> {
        self.as_lines("max_pool1d", Loc::caller())?.max_pool2d(pool.into())?.squeeze(-2)
    }

    /// The mean of each window.
    #[track_caller]
    pub fn avg_pool2d(&self, pool: Pool<2>) -> Result<Tensor> {
        let loc = Loc::caller();
        if let Some(&dilation) = pool.dilation.iter().find(|&&dilation| dilation != 1) {
            let (expected, got) = ("1 (max_pool2d takes others)", dilation as f64);
            return Err(Error::op("avg_pool2d", Why::Number { argument: "dilation", expected, got }, loc));
        }
        let op = Op::AvgPool2d {
            kernel: Sizes::from(pool.kernel),
            stride: Sizes::from(pool.stride),
            padding: Sizes::from(pool.padding),
            ceil_mode: pool.ceil_mode,
            count_include_pad: pool.count_include_pad,
        };
        if are_integers(self) {
            return match self.rank() {
                3 => self.unsqueeze(0)?.average_integers(pool, &op, loc)?.squeeze(0),
                _ => self.average_integers(pool, &op, loc),
            };
        }
        self.on_images("avg_pool2d", loc, &op)
    }

    /// The mean of each window of `[n, c, length]`.
    #[track_caller]
    pub fn avg_pool1d(&self, pool: Pool<1>) -> Result<Tensor> {
        self.as_lines("avg_pool1d", Loc::caller())?.avg_pool2d(pool.into())?.squeeze(-2)
    }

    /// The means of as many windows as give a result of this size.
    #[track_caller]
    pub fn adaptive_avg_pool2d(&self, output: impl IntoSizes<2>) -> Result<Tensor> {
        let loc = Loc::caller();
        let output = output.into_sizes();
        if output == [1, 1] && self.dtype().is_float() && matches!(self.rank(), 3 | 4) {
            return self.mean_dim([-2, -1], true);
        }
        self.on_images("adaptive_avg_pool2d", loc, &Op::AdaptiveAvgPool2d { output: Sizes::from(output) })
    }

    /// The means of as many windows of `[n, c, length]` as give a result of this length.
    #[track_caller]
    pub fn adaptive_avg_pool1d(&self, output: usize) -> Result<Tensor> {
        let lines = self.as_lines("adaptive_avg_pool1d", Loc::caller())?;
        lines.adaptive_avg_pool2d([1, output])?.squeeze(-2)
    }

    /// Resized to another height and width: `x.interpolate([64, 64], Interpolation::Nearest)`, or by a factor.
    #[track_caller]
    pub fn interpolate(&self, to: impl Into<Resize>, mode: Interpolation) -> Result<Tensor> {
        let loc = Loc::caller();
        let shape = self.shape();
        let Some(&[height, width]) =
            shape.get(2..4).and_then(|s| s.first_chunk::<2>()).filter(|_| shape.rank() == 4)
        else {
            let why = Why::Rank { argument: "x", expected: "4", got: shape.rank() };
            return Err(Error::op("interpolate", why, loc));
        };
        let (input, to) = ([height, width], to.into());
        let mut output = [0; 2];
        // Zero: the ratio of the sizes.
        let mut ratio = [Scalar::Float(0.0); 2];
        for d in 0..2 {
            output[d] = match to {
                Resize::Size(size) => size[d],
                Resize::Scale(scale) => {
                    if !matches!(mode, Interpolation::Bilinear { align_corners: true }) {
                        ratio[d] = Scalar::Float(1.0 / scale[d]);
                    }
                    (input[d] as f64 * scale[d]).floor().max(0.0) as usize
                }
            };
            if output[d] == 0 {
                let why = Why::none("the new size");
                return Err(Error::op("interpolate", why, loc));
            }
        }
        if mode == Interpolation::Nearest && are_integers(self) {
            // Elements only move: no float could hold them all.
            let mut moved = self.clone();
            for d in 0..2 {
                let step = resample::step(ratio[d], input[d], output[d], false);
                let last = input[d].saturating_sub(1) as i64;
                let count = Tensor::arange(0, output[d] as i64, (DType::F32, self.device()))?;
                let places = count.mul(step)?.floor()?.to_dtype(DType::I64)?.clamp_max(last)?;
                moved = moved.index_select(d as i64 + 2, &places)?;
            }
            return Ok(moved);
        }
        let [height_ratio, width_ratio] = ratio;
        let output = Sizes::from(output);
        let op = match mode {
            Interpolation::Nearest => Op::UpsampleNearest2d { output, height_ratio, width_ratio },
            Interpolation::Bilinear { align_corners } => {
                Op::UpsampleBilinear2d { output, align_corners, height_ratio, width_ratio }
            }
        };
        self.on_images("interpolate", loc, &op)
    }
}
