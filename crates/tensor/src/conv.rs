//! Convolution over one or two dims and its transpose, in PyTorch's terms.

use kiln_ir::{Error, Loc, Op, Result, Shape, Sizes, Why};

use crate::Tensor;
use crate::dispatch::dispatch_tensor;
use crate::hook::Arg;
use crate::integer_windows::are_integers;

/// One size for all dims, or one for each.
pub trait IntoSizes<const N: usize> {
    /// A size for each dim.
    fn into_sizes(self) -> [usize; N];
}

impl<const N: usize> IntoSizes<N> for usize {
    fn into_sizes(self) -> [usize; N] {
        [self; N]
    }
}

impl<const N: usize> IntoSizes<N> for [usize; N] {
    fn into_sizes(self) -> [usize; N] {
        self
    }
}

/// The zeros around a convolution's input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Padding<const N: usize> {
    /// So many on both sides of each dim.
    Size([usize; N]),
    /// As many as keep the size; only with stride 1.
    Same,
    /// None.
    Valid,
}

impl<const N: usize> From<usize> for Padding<N> {
    fn from(size: usize) -> Padding<N> {
        Padding::Size([size; N])
    }
}

impl<const N: usize> From<[usize; N]> for Padding<N> {
    fn from(sizes: [usize; N]) -> Padding<N> {
        Padding::Size(sizes)
    }
}

/// How the filters of a transposed convolution move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConvTranspose<const N: usize> {
    /// Distance between positions in the result.
    pub stride: [usize; N],
    /// What is cut off on both sides.
    pub padding: [usize; N],
    /// What is added at the end.
    pub output_padding: [usize; N],
    /// Distance between taps.
    pub dilation: [usize; N],
    /// Groups of channels that don't mix.
    pub groups: usize,
}

impl<const N: usize> Default for ConvTranspose<N> {
    fn default() -> ConvTranspose<N> {
        ConvTranspose { stride: [1; N], padding: [0; N], output_padding: [0; N], dilation: [1; N], groups: 1 }
    }
}

impl Tensor {
    /// Cross-correlation of `[n, c, length]` (or `[c, length]`) with filters `[o, c / groups, size]`.
    #[track_caller]
    pub fn conv1d(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        stride: impl IntoSizes<1>,
        padding: impl Into<Padding<1>>,
        dilation: impl IntoSizes<1>,
        groups: usize,
    ) -> Result<Tensor> {
        let window = (stride.into_sizes(), padding.into(), dilation.into_sizes());
        self.convolve("conv1d", weight, bias, window, groups, Loc::caller())
    }

    /// Cross-correlation of `[n, c, height, width]` (or `[c, height, width]`) with filters
    /// `[o, c / groups, height, width]`.
    #[track_caller]
    pub fn conv2d(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        stride: impl IntoSizes<2>,
        padding: impl Into<Padding<2>>,
        dilation: impl IntoSizes<2>,
        groups: usize,
    ) -> Result<Tensor> {
        let window = (stride.into_sizes(), padding.into(), dilation.into_sizes());
        self.convolve("conv2d", weight, bias, window, groups, Loc::caller())
    }

    fn convolve<const N: usize>(
        &self,
        name: &str,
        weight: &Tensor,
        bias: Option<&Tensor>,
        (stride, padding, dilation): ([usize; N], Padding<N>, [usize; N]),
        groups: usize,
        loc: Loc,
    ) -> Result<Tensor> {
        let (images, single) = self.as_images::<N>(name, loc)?;
        let (images, padding) = match padding {
            Padding::Valid => (images, [0; N]),
            Padding::Size(padding) => (images, padding),
            Padding::Same => images.padded_to_stay(weight, stride, dilation, name, loc)?,
        };
        if are_integers(&images) {
            let window = (stride, padding, dilation);
            let result = images.convolve_integers(name, (weight, bias), window, groups, loc)?;
            return if single { result.squeeze(0) } else { Ok(result) };
        }
        let op = Op::Convolution {
            stride: Sizes::from(stride),
            padding: Sizes::from(padding),
            dilation: Sizes::from(dilation),
            groups,
        };
        let mut args = vec![Arg::Tensor(&images), Arg::Tensor(weight)];
        args.extend(bias.map(Arg::Tensor));
        let result = dispatch_tensor(&op, &args, false, loc).map_err(|e| e.named(name))?;
        if single { result.squeeze(0) } else { Ok(result) }
    }

    /// With a dim of images, and whether it was added.
    fn as_images<const N: usize>(&self, name: &str, loc: Loc) -> Result<(Tensor, bool)> {
        match self.rank() {
            rank if rank == N + 2 => Ok((self.clone(), false)),
            rank if rank == N + 1 => Ok((self.unsqueeze(0)?, true)),
            got => {
                let expected = if N == 1 { "2 or 3" } else { "3 or 4" };
                Err(Error::op(name, Why::Rank { argument: "x", expected, got }, loc))
            }
        }
    }

    /// The padding that keeps the size. Where it is odd, one more zero goes to the end, by a copy.
    fn padded_to_stay<const N: usize>(
        &self,
        weight: &Tensor,
        stride: [usize; N],
        dilation: [usize; N],
        name: &str,
        loc: Loc,
    ) -> Result<(Tensor, [usize; N])> {
        if let Some(&stride) = stride.iter().find(|&&stride| stride != 1) {
            return Err(Error::op(name, Why::stride_with_same(stride), loc));
        }
        if weight.rank() != N + 2 {
            let (expected, got) = (if N == 1 { "3" } else { "4" }, weight.rank());
            return Err(Error::op(name, Why::Rank { argument: "weight", expected, got }, loc));
        }
        let kernel = weight.shape();
        let total: [usize; N] = std::array::from_fn(|d| dilation[d] * kernel[d + 2].saturating_sub(1));
        let mut images = self.clone();
        for d in (0..N).filter(|&d| total[d] % 2 == 1) {
            let ty = images.ty();
            let mut shape = ty.shape.clone();
            shape[d + 2] = 1;
            let edge = Tensor::full_in(shape, 0i64, ty.dtype, ty.device, loc)?;
            images = Tensor::cat([&images, &edge], d as i64 + 2)?;
        }
        Ok((images, total.map(|total| total / 2)))
    }

    /// Transposed convolution of `[n, c, length]` with filters `[c, o / groups, size]`.
    #[track_caller]
    pub fn conv_transpose1d(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        options: ConvTranspose<1>,
    ) -> Result<Tensor> {
        self.convolve_back("conv_transpose1d", weight, bias, options, Loc::caller())
    }

    /// Transposed convolution of `[n, c, height, width]` with filters `[c, o / groups, height, width]`.
    #[track_caller]
    pub fn conv_transpose2d(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        options: ConvTranspose<2>,
    ) -> Result<Tensor> {
        self.convolve_back("conv_transpose2d", weight, bias, options, Loc::caller())
    }

    fn convolve_back<const N: usize>(
        &self,
        name: &str,
        weight: &Tensor,
        bias: Option<&Tensor>,
        options: ConvTranspose<N>,
        loc: Loc,
    ) -> Result<Tensor> {
        let (images, single) = self.as_images::<N>(name, loc)?;
        let ConvTranspose { stride, padding, output_padding, dilation, groups } = options;
        let (own, kernel) = (images.shape(), weight.shape());
        if kernel.rank() != N + 2 {
            let (expected, got) = (if N == 1 { "3" } else { "4" }, kernel.rank());
            return Err(Error::op(name, Why::Rank { argument: "weight", expected, got }, loc));
        }
        let mut input = Shape::from([own[0], kernel[1].saturating_mul(groups)]);
        // Where more is added at the end than a stride, no convolution has these images as its result: the whole
        // result is computed, and the part that is asked for is cut out.
        let (mut inner, mut cuts) = (padding, Vec::new());
        for d in 0..N {
            let limit = |argument, most, limit, got| {
                Error::op(name, Why::Limit { argument, most, limit, dim: None, got }, loc)
            };
            let (step, more) = (stride[d].max(dilation[d]), output_padding[d]);
            if more >= step {
                let most = step.saturating_sub(1);
                return Err(limit("output_padding", most, "less than stride or dilation", more));
            }
            let span = |count: usize, step: usize| count.saturating_sub(1).saturating_mul(step);
            let reach = span(own[d + 2], stride[d])
                .saturating_add(span(kernel[d + 2], dilation[d]))
                .saturating_add(output_padding[d])
                .saturating_add(1);
            let Some(size) = reach.checked_sub(padding[d].saturating_mul(2)).filter(|&size| size > 0) else {
                let most = reach.saturating_sub(1) / 2;
                return Err(limit("padding", most, "more leaves no output", padding[d]));
            };
            if output_padding[d] >= stride[d] {
                let whole = reach - output_padding[d];
                cuts.splice(0..0, [-(padding[d] as i64), (padding[d] + size) as i64 - whole as i64]);
                inner[d] = 0;
                input.push(whole);
            } else {
                cuts.splice(0..0, [0, 0]);
                input.push(size);
            }
        }
        let op = Op::ConvolutionInputGradient {
            input: Sizes::from(&input),
            stride: Sizes::from(stride),
            padding: Sizes::from(inner),
            dilation: Sizes::from(dilation),
            groups,
        };
        let mut result = if are_integers(&images) {
            images.convolve_integers_back(name, weight, options, loc)?
        } else {
            let whole = dispatch_tensor(&op, &[&images, weight].map(Arg::Tensor), false, loc);
            let whole = whole.map_err(|e| e.named(name))?;
            if inner == padding && cuts.iter().all(|&cut| cut == 0) {
                whole
            } else {
                whole.pad(&cuts, 0.0)?
            }
        };
        if let Some(bias) = bias {
            let mut shape = vec![1usize; N + 1];
            shape[0] = bias.numel();
            result = result.add(&bias.reshape(&shape[..])?)?;
        }
        if single { result.squeeze(0) } else { Ok(result) }
    }
}
