//! The sizes of a convolution, from an op's attributes and shapes.

use kiln_ir::{Op, Shape};
use parking_lot::Mutex;

use crate::pool::AllocError;
use crate::threads::{self, parallel_for};

/// Sizes of a convolution. A pair is vertical, horizontal; over one dim the vertical part is trivial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Images.
    pub batch: usize,
    /// Channels of the input.
    pub channels: usize,
    /// Channels of the output.
    pub filters: usize,
    /// Size of the input.
    pub input: [usize; 2],
    /// Size of the output.
    pub output: [usize; 2],
    /// Size of the kernel.
    pub kernel: [usize; 2],
    /// Distance between positions of the kernel.
    pub stride: [usize; 2],
    /// Zeros on each side.
    pub padding: [usize; 2],
    /// Distance between taps.
    pub dilation: [usize; 2],
    /// Groups of channels that don't mix.
    pub groups: usize,
}

/// Spatial sizes as vertical, horizontal; over one dim the vertical one is `fill`.
pub fn pair(list: &[usize], fill: usize) -> [usize; 2] {
    match *list {
        [width] => [fill, width],
        [height, width, ..] => [height, width],
        [] => [fill, fill],
    }
}

impl Geometry {
    /// The sizes of a convolution, or of one of its gradients.
    pub fn of(op: &Op, input: &Shape, weight: &Shape, output: &Shape) -> Option<Geometry> {
        let (Op::Convolution { stride, padding, dilation, groups }
        | Op::ConvolutionInputGradient { stride, padding, dilation, groups, .. }
        | Op::ConvolutionWeightGradient { stride, padding, dilation, groups, .. }) = op
        else {
            return None;
        };
        // Larger strides and dilations than the padded input make no difference: there is one position, one tap.
        let within = |steps: &[usize]| -> [usize; 2] {
            let (steps, sizes, padding) = (pair(steps, 1), pair(&input[2..], 1), pair(padding, 0));
            std::array::from_fn(|d| {
                steps[d].min(padding[d].saturating_mul(2).saturating_add(sizes[d]).max(1))
            })
        };
        Some(Geometry {
            batch: input[0],
            channels: input[1],
            filters: weight[0],
            input: pair(&input[2..], 1),
            output: pair(&output[2..], 1),
            kernel: pair(&weight[2..], 1),
            stride: within(stride),
            padding: pair(padding, 0),
            dilation: within(dilation),
            groups: *groups,
        })
    }

    pub(super) fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Whether groups have so few channels that planes are summed up directly.
    pub(super) fn is_direct(&self) -> bool {
        kiln_plan::sums_planes(self.groups, self.channels)
    }

    /// The taps that meet the positions of one phase along one dim: number of the tap, and the position in the
    /// output that the first of them meets.
    pub(super) fn phase(
        &self,
        d: usize,
        first: usize,
    ) -> impl Iterator<Item = (usize, isize)> + Clone + use<> {
        let (padding, dilation, stride) = (self.padding[d], self.dilation[d], self.stride[d] as isize);
        (0..self.kernel[d]).filter_map(move |tap| {
            let at = (first + padding) as isize - (tap * dilation) as isize;
            (at.rem_euclid(stride) == 0).then(|| (tap, at.div_euclid(stride)))
        })
    }

    /// Positions of one phase along one dim.
    pub(super) fn phase_size(&self, d: usize, first: usize) -> usize {
        self.input[d].saturating_sub(first).div_ceil(self.stride[d])
    }

    /// Runs a product for each group: groups side by side if there are many, else each on all threads.
    pub(super) fn each_group(
        &self,
        product: impl Fn(usize) -> Result<(), AllocError> + Sync,
    ) -> Result<(), AllocError> {
        if self.groups < 2 * threads::count() {
            return (0..self.groups).try_for_each(product);
        }
        let failure = Mutex::new(None);
        parallel_for(self.groups, 1, |begin, end| {
            if let Err(error) = (begin..end).try_for_each(&product) {
                *failure.lock() = Some(error);
            }
        });
        failure.into_inner().map_or(Ok(()), Err)
    }
}
