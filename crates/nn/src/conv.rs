//! Convolutions and transposed convolutions over one and two dims.

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::{ConvTranspose, DType, Device, IntoSizes, Padding, Result, Tensor};

use crate::display::{python_bool, python_tuple};
use crate::hooks::forward_with_hooks;
use crate::{Hooks, Module, Parameter, Training, init};

/// What stands around a convolution's input.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub enum PaddingMode {
    /// Zeros.
    #[default]
    Zeros,
    /// The input mirrored at its edge.
    Reflect,
    /// The edge repeated.
    Replicate,
    /// The input from its other end.
    Circular,
}

impl PaddingMode {
    fn name(self) -> &'static str {
        match self {
            PaddingMode::Zeros => "zeros",
            PaddingMode::Reflect => "reflect",
            PaddingMode::Replicate => "replicate",
            PaddingMode::Circular => "circular",
        }
    }
}

/// The options of a convolution over `N` dims, with PyTorch's names and defaults.
#[derive(Clone, Debug)]
pub struct ConvOptions<const N: usize> {
    stride: [usize; N],
    padding: Padding<N>,
    dilation: [usize; N],
    groups: usize,
    bias: bool,
    padding_mode: PaddingMode,
    dtype: DType,
    device: Device,
}

impl<const N: usize> Default for ConvOptions<N> {
    fn default() -> Self {
        ConvOptions {
            stride: [1; N],
            padding: Padding::Size([0; N]),
            dilation: [1; N],
            groups: 1,
            bias: true,
            padding_mode: PaddingMode::Zeros,
            dtype: DType::F32,
            device: Device::Cpu,
        }
    }
}

impl<const N: usize> ConvOptions<N> {
    /// Distance between positions; 1 by default.
    pub fn stride(mut self, stride: impl IntoSizes<N>) -> Self {
        self.stride = stride.into_sizes();
        self
    }

    /// What is added around the input; nothing by default.
    pub fn padding(mut self, padding: impl Into<Padding<N>>) -> Self {
        self.padding = padding.into();
        self
    }

    /// What the padding is; zeros by default.
    pub fn padding_mode(mut self, padding_mode: PaddingMode) -> Self {
        self.padding_mode = padding_mode;
        self
    }

    fn describe(&self, weight: &Tensor, bias: bool) -> String {
        let shape = weight.shape();
        let mut text = format!(
            "{}, {}, kernel_size={}, stride={}",
            shape.get(1).copied().unwrap_or(0) * self.groups,
            shape.first().copied().unwrap_or(0),
            python_tuple(&shape[2.min(shape.rank())..]),
            python_tuple(&self.stride)
        );
        match self.padding {
            Padding::Size(sizes) if sizes == [0; N] => {}
            Padding::Size(sizes) => text += &format!(", padding={}", python_tuple(&sizes)),
            Padding::Same => text += ", padding=same",
            Padding::Valid => text += ", padding=valid",
        }
        if self.dilation != [1; N] {
            text += &format!(", dilation={}", python_tuple(&self.dilation));
        }
        if self.groups != 1 {
            text += &format!(", groups={}", self.groups);
        }
        if !bias {
            text += &format!(", bias={}", python_bool(false));
        }
        if self.padding_mode != PaddingMode::Zeros {
            text += &format!(", padding_mode={}", self.padding_mode.name());
        }
        text
    }

    /// Weight and bias from U(−1/√fan_in, 1/√fan_in), as PyTorch draws them.
    #[track_caller]
    fn parameters(
        &self,
        shape: Vec<usize>,
        out_channels: usize,
        bias: bool,
    ) -> Result<(Parameter, Option<Parameter>)> {
        let fan_in: usize = shape[1..].iter().product();
        let bound = if fan_in == 0 { 0.0 } else { 1.0 / (fan_in as f64).sqrt() };
        let draw = |shape: Vec<usize>| -> Result<Parameter> {
            Parameter::new(init::uniform(shape, -bound, bound, self.dtype, &self.device)?)
        };
        Ok((draw(shape)?, if bias { Some(draw(vec![out_channels])?) } else { None }))
    }

    #[track_caller]
    fn check(&self, op: &str, in_channels: usize, out_channels: usize) -> Result<()> {
        let (by, parts) = ("groups", self.groups);
        if parts == 0 {
            return Err(Error::op(op, Why::none(by), Loc::caller()));
        }
        for (what, size) in [("in_channels", in_channels), ("out_channels", out_channels)] {
            if !size.is_multiple_of(parts) {
                return Err(Error::op(op, Why::Divisible { what, size, by, parts }, Loc::caller()));
            }
        }
        if let (Padding::Same, Some(&stride)) =
            (self.padding, self.stride.iter().find(|&&stride| stride != 1))
        {
            return Err(Error::op(op, Why::stride_with_same(stride), Loc::caller()));
        }
        Ok(())
    }

    /// The input with its padding around it, where that is not zeros, and what is left to pad.
    #[track_caller]
    fn padded(&self, x: &Tensor, kernel: &[usize]) -> Result<(Tensor, Padding<N>)> {
        if self.padding_mode == PaddingMode::Zeros {
            return Ok((x.clone(), self.padding));
        }
        // From the last dim to the first, before and after.
        let mut widths = Vec::with_capacity(2 * N);
        for d in (0..N).rev() {
            let (before, after) = match self.padding {
                Padding::Size(sizes) => (sizes[d], sizes[d]),
                Padding::Valid => (0, 0),
                Padding::Same => {
                    let total = self.dilation[d] * kernel.get(d).map_or(0, |k| k.saturating_sub(1));
                    (total / 2, total - total / 2)
                }
            };
            widths.extend([before as i64, after as i64]);
        }
        let padded = match self.padding_mode {
            PaddingMode::Reflect => x.reflection_pad(&widths)?,
            PaddingMode::Replicate => x.replication_pad(&widths)?,
            PaddingMode::Circular | PaddingMode::Zeros => circular_pad(x, &widths)?,
        };
        Ok((padded, Padding::Size([0; N])))
    }
}

/// Each of the last dims with its end before its beginning and its beginning behind its end.
#[track_caller]
fn circular_pad(x: &Tensor, widths: &[i64]) -> Result<Tensor> {
    let mut padded = x.clone();
    for (back, width) in widths.chunks_exact(2).enumerate() {
        let dim = -1 - back as i64;
        let size = padded.size(dim)?;
        let (before, after) = (width[0] as usize, width[1] as usize);
        if before > size || after > size {
            let why = Why::Number {
                argument: "circular padding",
                expected: "at most the size of its dim",
                got: before.max(after) as f64,
            };
            return Err(Error::op("pad", why, Loc::caller()));
        }
        let (end, begin) = (padded.narrow(dim, size - before, before)?, padded.narrow(dim, 0, after)?);
        padded = Tensor::cat([&end, &padded, &begin], dim)?;
    }
    Ok(padded)
}

/// A layer of filters and a bias, made from options that know how to `draw` them.
macro_rules! layer {
    ($(#[$doc:meta])* $Conv:ident<$dims:literal>, $Options:ident, $weight:literal, |$this:ident, $x:ident| $forward:expr) => {
        $(#[$doc])*
        #[derive(Module)]
        #[module(extra_repr = Self::describe)]
        pub struct $Conv {
            #[doc = concat!("The filters, `", $weight, "`.")]
            pub weight: Parameter,
            /// `[out_channels]`
            pub bias: Option<Parameter>,
            training: Training,
            hooks: Hooks,
            #[module(skip)]
            options: $Options<$dims>,
        }

        impl $Conv {
            /// With default options: stride 1, no padding, a bias.
            #[track_caller]
            pub fn new(
                in_channels: usize,
                out_channels: usize,
                kernel_size: impl IntoSizes<$dims>,
            ) -> Result<$Conv> {
                $Conv::options().build(in_channels, out_channels, kernel_size)
            }

            /// Options, from which any number of layers can be built.
            pub fn options() -> $Options<$dims> {
                $Options::default()
            }

            fn describe(&self) -> String {
                self.options.describe(&self.weight, self.bias.is_some())
            }
        }

        impl $Options<$dims> {
            /// A layer, weight and bias drawn as PyTorch draws them: from U(−1/√n, 1/√n), where n is the size of a
            /// filter.
            #[track_caller]
            pub fn build(
                &self,
                in_channels: usize,
                out_channels: usize,
                kernel_size: impl IntoSizes<$dims>,
            ) -> Result<$Conv> {
                let channels = (in_channels, out_channels);
                let (weight, bias) = self.draw(stringify!($Conv), channels, kernel_size.into_sizes())?;
                let (training, hooks) = (Training::default(), Hooks::default());
                Ok($Conv { weight, bias, training, hooks, options: self.clone() })
            }
        }

        forward_with_hooks! {
            $Conv: |$this, $x| $forward;
        }
    };
}

/// The options that a convolution and its transpose share.
macro_rules! shared_options {
    ($($Options:ident),*) => { $(
        impl<const N: usize> $Options<N> {
            /// Distance between taps; 1 by default.
            pub fn dilation(mut self, dilation: impl IntoSizes<N>) -> Self {
                self.dilation = dilation.into_sizes();
                self
            }

            /// Groups of channels that don't mix; one by default.
            pub fn groups(mut self, groups: usize) -> Self {
                self.groups = groups;
                self
            }

            /// Whether there is a bias; there is by default.
            pub fn bias(mut self, bias: bool) -> Self {
                self.bias = bias;
                self
            }

            /// The parameters' dtype; f32 by default.
            pub fn dtype(mut self, dtype: DType) -> Self {
                self.dtype = dtype;
                self
            }

            /// Where the parameters live; on the CPU by default.
            pub fn device(mut self, device: &Device) -> Self {
                self.device = *device;
                self
            }
        }
    )* };
}
shared_options!(ConvOptions, ConvTransposeOptions);

impl<const N: usize> ConvOptions<N> {
    #[track_caller]
    fn draw(
        &self,
        layer: &str,
        (in_channels, out_channels): (usize, usize),
        kernel: [usize; N],
    ) -> Result<(Parameter, Option<Parameter>)> {
        self.check(layer, in_channels, out_channels)?;
        let shape = [[out_channels, in_channels / self.groups].as_slice(), &kernel].concat();
        self.parameters(shape, out_channels, self.bias)
    }
}

macro_rules! convolution {
    ($Conv:ident, $dims:literal, $function:ident, $shape:literal) => {
        layer! {
            #[doc = concat!("Cross-correlation of inputs `", $shape, "` with learned filters.")]
            ///
            /// ```
            #[doc = concat!("use kiln_nn::{", stringify!($Conv), ", Forward};")]
            /// use kiln_tensor::{Device, Tensor};
            /// # fn main() -> kiln_tensor::Result<()> {
            #[doc = concat!("let layer = ", stringify!($Conv), "::options().padding(1).bias(false).build(3, 8, 3)?;")]
            #[doc = concat!("let x = Tensor::ones([[2, 3].as_slice(), &[5; ", $dims, "]].concat(), &Device::Cpu)?;")]
            /// assert_eq!(layer.forward(&x)?.shape()[..2], [2, 8]);
            /// # Ok(()) }
            /// ```
            $Conv<$dims>, ConvOptions, "[out_channels, in_channels / groups, kernel…]", |this, x| {
                let options = &this.options;
                let kernel = this.weight.shape();
                let (x, padding) = options.padded(x, &kernel[2.min(kernel.rank())..])?;
                let ConvOptions { stride, dilation, groups, .. } = *options;
                x.$function(&this.weight, this.bias.as_deref(), stride, padding, dilation, groups)
            }
        }
    };
}
convolution!(Conv1d, 1, conv1d, "[n, c, length]");
convolution!(Conv2d, 2, conv2d, "[n, c, height, width]");

/// The options of a transposed convolution over `N` dims, with PyTorch's names and defaults.
#[derive(Clone, Debug)]
pub struct ConvTransposeOptions<const N: usize> {
    stride: [usize; N],
    padding: [usize; N],
    output_padding: [usize; N],
    dilation: [usize; N],
    groups: usize,
    bias: bool,
    dtype: DType,
    device: Device,
}

impl<const N: usize> Default for ConvTransposeOptions<N> {
    fn default() -> Self {
        ConvTransposeOptions {
            stride: [1; N],
            padding: [0; N],
            output_padding: [0; N],
            dilation: [1; N],
            groups: 1,
            bias: true,
            dtype: DType::F32,
            device: Device::Cpu,
        }
    }
}

impl<const N: usize> ConvTransposeOptions<N> {
    /// Distance between positions in the result; 1 by default.
    pub fn stride(mut self, stride: impl IntoSizes<N>) -> Self {
        self.stride = stride.into_sizes();
        self
    }

    /// What is cut off on both sides; nothing by default.
    pub fn padding(mut self, padding: impl IntoSizes<N>) -> Self {
        self.padding = padding.into_sizes();
        self
    }

    /// What is added at the end; nothing by default.
    pub fn output_padding(mut self, output_padding: impl IntoSizes<N>) -> Self {
        self.output_padding = output_padding.into_sizes();
        self
    }

    fn describe(&self, weight: &Tensor, bias: bool) -> String {
        let shape = weight.shape();
        let mut text = format!(
            "{}, {}, kernel_size={}, stride={}",
            shape.first().copied().unwrap_or(0),
            shape.get(1).copied().unwrap_or(0) * self.groups,
            python_tuple(&shape[2.min(shape.rank())..]),
            python_tuple(&self.stride)
        );
        let sizes = [("padding", self.padding, 0), ("dilation", self.dilation, 1)];
        for (name, sizes, _) in sizes.iter().filter(|(_, sizes, usual)| *sizes != [*usual; N]) {
            text += &format!(", {name}={}", python_tuple(sizes));
        }
        if self.output_padding != [0; N] {
            text += &format!(", output_padding={}", python_tuple(&self.output_padding));
        }
        if self.groups != 1 {
            text += &format!(", groups={}", self.groups);
        }
        if !bias {
            text += &format!(", bias={}", python_bool(false));
        }
        text
    }
}

impl<const N: usize> ConvTransposeOptions<N> {
    #[track_caller]
    fn draw(
        &self,
        layer: &str,
        (in_channels, out_channels): (usize, usize),
        kernel: [usize; N],
    ) -> Result<(Parameter, Option<Parameter>)> {
        let ConvTransposeOptions { groups, dtype, device, .. } = *self;
        let options = ConvOptions::<N> { groups, dtype, device, ..ConvOptions::default() };
        options.check(layer, in_channels, out_channels)?;
        let shape = [[in_channels, out_channels / groups].as_slice(), &kernel].concat();
        options.parameters(shape, out_channels, self.bias)
    }
}

macro_rules! transposed_convolution {
    ($Conv:ident, $dims:literal, $function:ident, $shape:literal) => {
        layer! {
            #[doc = concat!("Transposed convolution of inputs `", $shape, "` with learned filters.")]
            $Conv<$dims>, ConvTransposeOptions, "[in_channels, out_channels / groups, kernel…]", |this, x| {
                let ConvTransposeOptions { stride, padding, output_padding, dilation, groups, .. } = this.options;
                let options = ConvTranspose { stride, padding, output_padding, dilation, groups };
                x.$function(&this.weight, this.bias.as_deref(), options)
            }
        }
    };
}
transposed_convolution!(ConvTranspose1d, 1, conv_transpose1d, "[n, c, length]");
transposed_convolution!(ConvTranspose2d, 2, conv_transpose2d, "[n, c, height, width]");
