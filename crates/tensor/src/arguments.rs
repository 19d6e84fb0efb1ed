//! The forms in which users write arguments: dims and shapes as numbers, tuples, arrays and slices; dtype and
//! device alone or together.

use kiln_ir::{DType, Device, Shape};

use crate::Tensor;

mod sealed {
    pub trait Sealed {}
    impl Sealed for i64 {}
    impl Sealed for i32 {}
    impl Sealed for usize {}
}

/// An integer that names a dim or a size. (A bare literal becomes an i32.)
pub trait Integer: Copy + sealed::Sealed {
    /// As i64; what does not fit is its largest number, which no dim and no size has.
    fn as_i64(self) -> i64;
}

impl Integer for i64 {
    fn as_i64(self) -> i64 {
        self
    }
}
impl Integer for i32 {
    fn as_i64(self) -> i64 {
        i64::from(self)
    }
}
impl Integer for usize {
    fn as_i64(self) -> i64 {
        i64::try_from(self).unwrap_or(i64::MAX)
    }
}

fn integers<T: Integer>(all: &[T]) -> Vec<i64> {
    all.iter().map(|&n| n.as_i64()).collect()
}

/// One dim or several, negative ones counted from the end: `-1`, `[0, 2]`, `&[0, 2]`, `(0, 2)`.
///
/// ```
/// # use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let x = Tensor::zeros((2, 3, 4), &Device::Cpu)?;
/// assert_eq!(x.permute(&[0, 2, 1])?.dims3()?, (2, 4, 3));
/// assert_eq!(x.permute((2, 0, 1))?.dims3()?, (4, 2, 3));
/// assert_eq!(x.sum_dim([0, -1], false)?.dims1()?, 3);
/// # Ok(()) }
/// ```
pub trait IntoDims {
    /// The dims as given.
    fn into_dims(self) -> Vec<i64>;
}

/// A shape in which one size may be −1: whatever is left. `[-1, 4]`, `(batch, -1)`, `&sizes`.
///
/// ```
/// # use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let x = Tensor::zeros((2, 3, 4), &Device::Cpu)?;
/// let (batch, _, _) = x.dims3()?;
/// assert_eq!(x.reshape((batch, -1))?.dims2()?, (2, 12));
/// assert_eq!(x.reshape(-1)?.dims1()?, 24);
/// # Ok(()) }
/// ```
pub trait IntoShape {
    /// The sizes as given.
    fn into_sizes(self) -> Vec<i64>;
}

macro_rules! lists {
    ($($Trait:ident $method:ident),*) => { $(
        impl<T: Integer> $Trait for T {
            fn $method(self) -> Vec<i64> {
                vec![self.as_i64()]
            }
        }
        impl<T: Integer, const N: usize> $Trait for [T; N] {
            fn $method(self) -> Vec<i64> {
                integers(&self)
            }
        }
        impl<T: Integer, const N: usize> $Trait for &[T; N] {
            fn $method(self) -> Vec<i64> {
                integers(self)
            }
        }
        impl<T: Integer> $Trait for &[T] {
            fn $method(self) -> Vec<i64> {
                integers(self)
            }
        }
        impl<T: Integer> $Trait for Vec<T> {
            fn $method(self) -> Vec<i64> {
                integers(&self)
            }
        }
        impl<T: Integer> $Trait for &Vec<T> {
            fn $method(self) -> Vec<i64> {
                integers(self)
            }
        }
        lists!(@tuple $Trait $method, a A, b B);
        lists!(@tuple $Trait $method, a A, b B, c C);
        lists!(@tuple $Trait $method, a A, b B, c C, d D);
        lists!(@tuple $Trait $method, a A, b B, c C, d D, e E);
    )* };
    (@tuple $Trait:ident $method:ident, $($name:ident $T:ident),*) => {
        impl<$($T: Integer),*> $Trait for ($($T),*) {
            fn $method(self) -> Vec<i64> {
                let ($($name),*) = self;
                vec![$($name.as_i64()),*]
            }
        }
    };
}
lists!(IntoDims into_dims, IntoShape into_sizes);

impl IntoShape for &Shape {
    fn into_sizes(self) -> Vec<i64> {
        integers(self)
    }
}
impl IntoShape for Shape {
    fn into_sizes(self) -> Vec<i64> {
        integers(&self)
    }
}

/// What a tensor is made as: a dtype, a device, or both; what is left out is the function's own choice.
///
/// ```
/// # use kiln_tensor::{DType, Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let device = Device::Cpu;
/// assert_eq!(Tensor::zeros([2, 3], &device)?.dtype(), DType::F32);
/// assert_eq!(Tensor::zeros([2, 3], DType::I64)?.dtype(), DType::I64);
/// let x = Tensor::randn([2, 3], (DType::F64, &device))?;
/// assert_eq!(x.to(DType::BF16)?.dtype(), DType::BF16);
/// assert_eq!(Tensor::ones([3], &x)?.dtype(), DType::F64); // as another tensor
/// # Ok(()) }
/// ```
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct TensorOptions {
    /// The element type, if it was named.
    pub dtype: Option<DType>,
    /// The device, if it was named.
    pub device: Option<Device>,
}

impl TensorOptions {
    pub(crate) fn dtype_or(&self, usual: DType) -> DType {
        self.dtype.unwrap_or(usual)
    }

    pub(crate) fn device(&self) -> Device {
        self.device.unwrap_or_default()
    }
}

macro_rules! options {
    ($($Ty:ty, $given:pat => $dtype:expr, $device:expr;)*) => { $(
        impl From<$Ty> for TensorOptions {
            fn from($given: $Ty) -> TensorOptions {
                TensorOptions { dtype: $dtype, device: $device }
            }
        }
    )* };
}
// A device alone is borrowed: with both forms, clippy would call the usual one needless.
options! {
    DType, dtype => Some(dtype), None;
    &Device, device => None, Some(*device);
    (DType, Device), (dtype, device) => Some(dtype), Some(device);
    (DType, &Device), (dtype, device) => Some(dtype), Some(*device);
    &Tensor, tensor => Some(tensor.dtype()), Some(tensor.device());
}
