//! Layers that change shapes: flattening, resizing, shuffling.

use kiln_tensor::{Interpolation, Resize, Result, Tensor};

use crate::display::{python_float, python_tuple};
use crate::forward::forward;
use crate::{Forward, Module};

/// Several dims as one; all but the first by default.
#[derive(Module, Copy, Clone, Debug)]
#[module(extra_repr = Self::describe)]
pub struct Flatten {
    /// The first of them; negative dims count from the end.
    #[module(skip)]
    pub start_dim: i64,
    /// The last of them.
    #[module(skip)]
    pub end_dim: i64,
}

impl Default for Flatten {
    fn default() -> Flatten {
        Flatten::new(1, -1)
    }
}

impl Flatten {
    /// The dims from `start_dim` to `end_dim`, which is included.
    pub const fn new(start_dim: i64, end_dim: i64) -> Flatten {
        Flatten { start_dim, end_dim }
    }

    fn describe(&self) -> String {
        format!("start_dim={}, end_dim={}", self.start_dim, self.end_dim)
    }
}

/// One dim as several.
#[derive(Module, Clone, Debug)]
#[module(extra_repr = Self::describe)]
pub struct Unflatten {
    #[module(skip)]
    dim: i64,
    #[module(skip)]
    sizes: Vec<usize>,
}

impl Unflatten {
    /// The dim `dim` as dims of these sizes.
    pub fn new(dim: i64, sizes: &[usize]) -> Unflatten {
        Unflatten { dim, sizes: sizes.to_vec() }
    }

    fn describe(&self) -> String {
        format!("dim={}, unflattened_size={}", self.dim, python_tuple(&self.sizes))
    }
}

/// The dims in another order, as a view.
#[derive(Module, Clone, Debug)]
pub struct Permute {
    #[module(skip)]
    dims: Vec<i64>,
}

impl Permute {
    /// Dim `i` of the result is dim `dims[i]` of the input; negative dims count from the end.
    pub fn new(dims: &[i64]) -> Permute {
        Permute { dims: dims.to_vec() }
    }
}

/// Images `[n, c, height, width]` resized to a size or by a factor.
///
/// ```
/// use kiln_nn::{Forward, Upsample};
/// use kiln_tensor::{Device, Interpolation, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let twice = Upsample::new(2.0, Interpolation::Nearest);
/// assert_eq!(twice.forward(&Tensor::ones([1, 1, 3, 4], &Device::Cpu)?)?.shape().to_vec(), [1, 1, 6, 8]);
/// # Ok(()) }
/// ```
#[derive(Module, Copy, Clone, Debug)]
#[module(extra_repr = Self::describe)]
pub struct Upsample {
    #[module(skip)]
    to: Resize,
    #[module(skip)]
    mode: Interpolation,
}

impl Upsample {
    /// To a size (`[64, 64]`) or by a factor (`2.0`).
    pub fn new(to: impl Into<Resize>, mode: Interpolation) -> Upsample {
        Upsample { to: to.into(), mode }
    }

    fn describe(&self) -> String {
        let to = match self.to {
            Resize::Size(size) => format!("size={}", python_tuple(&size)),
            Resize::Scale([height, width]) if height == width => {
                format!("scale_factor={}", python_float(height))
            }
            Resize::Scale([height, width]) => {
                format!("scale_factor=({}, {})", python_float(height), python_float(width))
            }
        };
        let mode = match self.mode {
            Interpolation::Nearest => "nearest",
            Interpolation::Bilinear { .. } => "bilinear",
        };
        format!("{to}, mode='{mode}'")
    }
}

/// `[n, c·r², h, w]` as `[n, c, h·r, w·r]`.
#[derive(Module, Copy, Clone, Debug)]
#[module(extra_repr = Self::describe)]
pub struct PixelShuffle {
    /// r
    #[module(skip)]
    pub upscale_factor: usize,
}

impl PixelShuffle {
    fn describe(&self) -> String {
        format!("upscale_factor={}", self.upscale_factor)
    }
}

/// `[n, c, h·r, w·r]` as `[n, c·r², h, w]`.
#[derive(Module, Copy, Clone, Debug)]
#[module(extra_repr = Self::describe)]
pub struct PixelUnshuffle {
    /// r
    #[module(skip)]
    pub downscale_factor: usize,
}

impl PixelUnshuffle {
    fn describe(&self) -> String {
        format!("downscale_factor={}", self.downscale_factor)
    }
}

/// The cosine of the angle between two tensors along a dim.
#[derive(Module, Copy, Clone, Debug)]
pub struct CosineSimilarity {
    /// The dim, 1 by default.
    #[module(skip)]
    pub dim: i64,
    /// The least length that is divided by, 1e-8 by default.
    #[module(skip)]
    pub eps: f64,
}

impl Default for CosineSimilarity {
    fn default() -> CosineSimilarity {
        CosineSimilarity { dim: 1, eps: 1e-8 }
    }
}

impl Forward<(Tensor, Tensor)> for CosineSimilarity {
    type Output = Tensor;
    #[track_caller]
    fn forward(&self, (x, y): &(Tensor, Tensor)) -> Result<Tensor> {
        x.cosine_similarity(y, self.dim, self.eps)
    }
}

forward! {
    Flatten: |this, x| x.flatten_dims(this.start_dim, this.end_dim);
    Unflatten: |this, x| x.unflatten(this.dim, &this.sizes[..]);
    Permute: |this, x| x.permute(&this.dims[..]);
    Upsample: |this, x| x.interpolate(this.to, this.mode);
    PixelShuffle: |this, x| x.pixel_shuffle(this.upscale_factor);
    PixelUnshuffle: |this, x| x.pixel_unshuffle(this.downscale_factor);
}
