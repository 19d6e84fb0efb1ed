//! Pooling layers.

use std::marker::PhantomData;

use kiln_tensor::{IntoSizes, Pool};

use crate::Module;
use crate::display::{python_bool, python_tuple};
use crate::forward::forward;

/// One number where all are the same and were perhaps given as one, else a tuple: as PyTorch prints what it was
/// given.
fn sizes(sizes: &[usize]) -> String {
    match sizes {
        [first, rest @ ..] if rest.iter().all(|size| size == first) => first.to_string(),
        sizes => python_tuple(sizes),
    }
}

/// The options of a pooling layer `L`, with PyTorch's names and defaults.
///
/// ```
/// # use kiln_nn::{Forward, MaxPool2d};
/// # use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let layer = MaxPool2d::options().stride(2).padding(1).build(3);
/// assert_eq!(layer.forward(&Tensor::ones((1, 3, 8, 8), &Device::Cpu)?)?.dims4()?, (1, 3, 4, 4));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct PoolOptions<L, const N: usize> {
    windows: Pool<N>,
    stride: Option<[usize; N]>,
    layer: PhantomData<fn() -> L>,
}

impl<L: From<Pool<N>>, const N: usize> PoolOptions<L, N> {
    /// The distance between windows; their size by default.
    pub fn stride(self, stride: impl IntoSizes<N>) -> Self {
        PoolOptions { stride: Some(stride.into_sizes()), ..self }
    }

    /// How far windows may begin before the image, 0 by default.
    pub fn padding(self, padding: impl IntoSizes<N>) -> Self {
        PoolOptions { windows: self.windows.padding(padding), ..self }
    }

    /// The distance between a window's elements, 1 by default; averages have none.
    pub fn dilation(self, dilation: impl IntoSizes<N>) -> Self {
        PoolOptions { windows: self.windows.dilation(dilation), ..self }
    }

    /// Whether a window that does not fit altogether counts; not by default.
    pub fn ceil_mode(self, ceil_mode: bool) -> Self {
        PoolOptions { windows: self.windows.ceil_mode(ceil_mode), ..self }
    }

    /// Whether averages count the padding; they do by default.
    pub fn count_include_pad(self, count_include_pad: bool) -> Self {
        PoolOptions { windows: self.windows.count_include_pad(count_include_pad), ..self }
    }

    /// A layer of windows of this size.
    pub fn build(&self, kernel_size: impl IntoSizes<N>) -> L {
        let kernel = kernel_size.into_sizes();
        L::from(Pool { kernel, stride: self.stride.unwrap_or(kernel), ..self.windows })
    }
}

macro_rules! pooling {
    ($(#[$doc:meta])* $Pool:ident, $dims:literal, $function:ident, |$pool:ident| $describe:expr) => {
        $(#[$doc])*
        #[derive(Module, Copy, Clone, Debug)]
        #[module(extra_repr = Self::describe)]
        pub struct $Pool {
            #[module(skip)]
            pool: Pool<$dims>,
        }

        impl $Pool {
            /// Windows of this size, side by side.
            pub fn new(kernel_size: impl IntoSizes<$dims>) -> $Pool {
                $Pool { pool: Pool::new(kernel_size) }
            }

            /// Options, from which any number of layers can be built.
            pub fn options() -> PoolOptions<$Pool, $dims> {
                PoolOptions { windows: Pool::new(1), stride: None, layer: PhantomData }
            }

            /// With windows as the function takes them: `Pool::new(3).stride(2).padding(1)`.
            pub fn with(pool: Pool<$dims>) -> $Pool {
                $Pool { pool }
            }

            fn describe(&self) -> String {
                let $pool = &self.pool;
                $describe
            }
        }

        impl From<Pool<$dims>> for $Pool {
            fn from(pool: Pool<$dims>) -> $Pool {
                $Pool { pool }
            }
        }

        forward! {
            $Pool: |this, x| x.$function(this.pool);
        }
    };
}

fn describe_max<const N: usize>(pool: &Pool<N>) -> String {
    format!(
        "kernel_size={}, stride={}, padding={}, dilation={}, ceil_mode={}",
        sizes(&pool.kernel),
        sizes(&pool.stride),
        sizes(&pool.padding),
        sizes(&pool.dilation),
        python_bool(pool.ceil_mode)
    )
}

pooling! {
    /// The largest element of each window of `[n, c, length]`.
    MaxPool1d, 1, max_pool1d, |pool| describe_max(pool)
}
pooling! {
    /// The largest element of each window of `[n, c, height, width]`.
    ///
    /// ```
    /// use kiln_nn::{Forward, MaxPool2d};
    /// use kiln_tensor::{Device, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let x = Tensor::ones([1, 3, 8, 8], &Device::Cpu)?;
    /// assert_eq!(MaxPool2d::new(2).forward(&x)?.shape().to_vec(), [1, 3, 4, 4]);
    /// let overlapping = MaxPool2d::options().stride(2).padding(1).build(3);
    /// assert_eq!(overlapping.forward(&x)?.shape().to_vec(), [1, 3, 4, 4]);
    /// # Ok(()) }
    /// ```
    MaxPool2d, 2, max_pool2d, |pool| describe_max(pool)
}
pooling! {
    /// The mean of each window of `[n, c, length]`.
    AvgPool1d, 1, avg_pool1d, |pool| {
        let [kernel, stride, padding] = [pool.kernel, pool.stride, pool.padding].map(|s| python_tuple(&s));
        format!("kernel_size={kernel}, stride={stride}, padding={padding}")
    }
}
pooling! {
    /// The mean of each window of `[n, c, height, width]`.
    AvgPool2d, 2, avg_pool2d, |pool| {
        let [kernel, stride, padding] = [pool.kernel, pool.stride, pool.padding].map(|s| sizes(&s));
        format!("kernel_size={kernel}, stride={stride}, padding={padding}")
    }
}

/// The means of as many windows of `[n, c, length]` as give a result of this length.
#[derive(Module, Copy, Clone, Debug)]
#[module(extra_repr = Self::describe)]
pub struct AdaptiveAvgPool1d {
    #[module(skip)]
    output_size: usize,
}

/// The means of as many windows of `[n, c, height, width]` as give a result of this size.
#[derive(Module, Copy, Clone, Debug)]
#[module(extra_repr = Self::describe)]
pub struct AdaptiveAvgPool2d {
    #[module(skip)]
    output_size: [usize; 2],
}

impl AdaptiveAvgPool1d {
    /// For a result of this length.
    pub const fn new(output_size: usize) -> AdaptiveAvgPool1d {
        AdaptiveAvgPool1d { output_size }
    }

    fn describe(&self) -> String {
        format!("output_size={}", self.output_size)
    }
}

impl AdaptiveAvgPool2d {
    /// For a result of this height and width.
    pub fn new(output_size: impl IntoSizes<2>) -> AdaptiveAvgPool2d {
        AdaptiveAvgPool2d { output_size: output_size.into_sizes() }
    }

    fn describe(&self) -> String {
        format!("output_size={}", sizes(&self.output_size))
    }
}

forward! {
    AdaptiveAvgPool1d: |this, x| x.adaptive_avg_pool1d(this.output_size);
    AdaptiveAvgPool2d: |this, x| x.adaptive_avg_pool2d(this.output_size);
}
