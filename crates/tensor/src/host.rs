//! Between tensors and host memory: reading elements back.

use std::collections::TryReserveError;

use kiln_ir::{DType, Device, Error, Loc, Op, Result, Scalar, ScalarKind, TensorTy, Why, bf16, f16};

use crate::dispatch::execute_tensor;
use crate::hook::{self, Access, Arg};
use crate::storage;
use crate::{Tensor, device};

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is the element of some dtype.
pub trait Element: Copy + Into<Scalar> + sealed::Sealed + 'static {
    /// Its dtype.
    const DTYPE: DType;
    /// Writes elements to memory.
    ///
    /// # Safety
    /// `to` must be valid for `data.len()` elements of the dtype.
    unsafe fn write(data: &[Self], to: *mut u8);
    /// Reads elements from memory; an error if there is no memory for them.
    ///
    /// # Safety
    /// `from` must be valid for `len` elements of the dtype.
    unsafe fn read(from: *const u8, len: usize) -> Result<Vec<Self>, TryReserveError>;
    /// The number as this type.
    fn from_scalar(value: Scalar) -> Self;
}

macro_rules! element {
    ($ty:ty, $dtype:ident, $from:expr) => {
        impl sealed::Sealed for $ty {}
        impl crate::Nested for $ty {
            type Element = $ty;
            fn sizes(&self, _: &mut kiln_ir::Shape) -> Result<(), (usize, usize)> {
                Ok(())
            }
            fn elements(&self, out: &mut Vec<$ty>) {
                out.push(*self);
            }
        }
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
            unsafe fn write(data: &[$ty], to: *mut u8) {
                // SAFETY: the caller promises room for all elements; a slice never overlaps fresh memory.
                unsafe { std::ptr::copy_nonoverlapping(data.as_ptr().cast::<u8>(), to, size_of_val(data)) };
            }
            unsafe fn read(from: *const u8, len: usize) -> Result<Vec<$ty>, TryReserveError> {
                let mut out: Vec<$ty> = reserved(len)?;
                if len > 0 {
                    // SAFETY: the caller promises `len` elements; the vector has room for them. Truth values
                    // in storages are always 0 or 1.
                    unsafe {
                        std::ptr::copy_nonoverlapping(from.cast::<$ty>(), out.as_mut_ptr(), len);
                        out.set_len(len);
                    }
                }
                Ok(out)
            }
            fn from_scalar(value: Scalar) -> $ty {
                let from: fn(Scalar) -> $ty = $from;
                from(value)
            }
        }
    };
}
element!(f32, F32, |x| x.as_f64() as f32);
element!(f64, F64, |x| x.as_f64());
element!(i64, I64, |x| x.as_i64());
element!(bool, Bool, |x| x.as_bool());
element!(u8, U8, |x| x.as_i64() as u8);
element!(i8, I8, |x| x.as_i64() as i8);
element!(i16, I16, |x| x.as_i64() as i16);
element!(i32, I32, |x| x.as_i64() as i32);
element!(f16, F16, |x| f16::from_f32(x.as_f64() as f32));
element!(bf16, BF16, |x| bf16::from_f32(x.as_f64() as f32));

/// An empty vector with room for so many elements.
pub(crate) fn reserved<T>(len: usize) -> Result<Vec<T>, TryReserveError> {
    let mut all = Vec::new();
    all.try_reserve_exact(len)?;
    Ok(all)
}

/// [`reserved`], for an op that the user called.
pub(crate) fn reserve<T>(len: usize, op: &str, loc: Loc) -> Result<Vec<T>> {
    let bytes = len.saturating_mul(size_of::<T>());
    let fail = |reason: String| Error::op(op, Why::Memory { bytes, reason }, loc);
    // The system may promise more than the machine has, and end the process later.
    if bytes > kiln_runtime::pool::machine_bytes() {
        return Err(fail("the machine has less".into()));
    }
    reserved(len).map_err(|error| fail(error.to_string()))
}

impl Tensor {
    /// The elements in row-major order. `T` must be the tensor's own element type: nothing is converted unasked
    /// ([`to_vec_cast`](Tensor::to_vec_cast) converts).
    ///
    /// ```
    /// # use kiln_tensor::Tensor;
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let x = Tensor::from_slice(&[1.5f32, f32::NAN])?;
    /// assert_eq!(x.to_vec::<f32>()?[0], 1.5);
    /// let error = x.to_vec::<i64>().unwrap_err().to_string();
    /// assert!(error.starts_with("to_vec: f32[2]: the tensor holds f32, not i64 (convert with to_vec_cast)"), "{error}");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        read_own(self, "to_vec", Loc::caller())
    }

    /// The elements in row-major order, converted to `T` as [`to_dtype`](Tensor::to_dtype) converts: floats are
    /// rounded, or cut off where `T` is an integer.
    ///
    /// ```
    /// # use kiln_tensor::Tensor;
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let x = Tensor::from_slice(&[1.5f32, -2.0])?;
    /// assert_eq!(x.to_vec_cast::<i64>()?, [1, -2]);
    /// assert_eq!(x.to_vec_cast::<f64>()?, [1.5, -2.0]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn to_vec_cast<T: Element>(&self) -> Result<Vec<T>> {
        read(self, "to_vec_cast", Loc::caller())
    }

    /// The element of a single-element tensor, as any type that can hold it: a float as any float (rounded), an
    /// integer or bool as any type that represents the same number. A float does not read as an integer
    /// ([`to_dtype`](Tensor::to_dtype) converts it).
    ///
    /// ```
    /// # use kiln_tensor::{Device, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let count = Tensor::from_slice(&[true, true, false])?.sum()?;
    /// assert_eq!(count.item::<i64>()?, 2);
    /// assert_eq!(count.item::<f32>()?, 2.0);
    /// let large = Tensor::new(&300i64, &Device::Cpu)?;
    /// assert!(large.item::<u8>().unwrap_err().to_string().contains("300 does not fit in u8"));
    /// let loss = Tensor::new(&0.5f32, &Device::Cpu)?;
    /// assert_eq!(loss.item::<f64>()?, 0.5);
    /// assert!(loss.item::<i64>().is_err());
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn item<T: Element>(&self) -> Result<T> {
        let loc = Loc::caller();
        let fail = |why| Err(self.refusal("item", why, loc));
        if self.numel() != 1 {
            return fail(Why::Count { what: "element", expected: 1, got: self.numel() });
        }
        let (own, wanted) = (self.dtype(), T::DTYPE);
        if own == wanted || (own.is_float() && wanted.is_float()) {
            return Ok(read(self, "item", loc)?[0]);
        }
        if own.is_float() {
            return fail(Why::ElementType { own, wanted, converts: "to_dtype" });
        }
        let value: i64 = read(self, "item", loc)?[0];
        let same = |held: Scalar| match held.kind() {
            ScalarKind::Float => held.as_f64() as i128 == i128::from(value),
            ScalarKind::Int | ScalarKind::Bool => held.as_i64() == value,
        };
        let held = T::from_scalar(Scalar::Int(value));
        if same(held.into()) { Ok(held) } else { fail(Why::Unfit { value, dtype: wanted }) }
    }

    /// Overwrites the elements, in row-major order.
    #[track_caller]
    pub fn write_slice<T: Element>(&self, data: &[T]) -> Result<()> {
        let loc = Loc::caller();
        hook::host_access(self, Access::Write, "write_slice", loc)?;
        let source = Tensor::from_vec(data.to_vec(), self.shape())?;
        let _eager = hook::Scope::suspend();
        let source = source.to(&self.device())?;
        let call = hook::Call {
            op: &Op::Copy {},
            args: &[Arg::Tensor(self), Arg::Tensor(&source)],
            in_place: true,
            grad_enabled: false,
            loc,
        };
        crate::dispatch::execute(&call).map(drop)
    }
}

/// The elements of a tensor whose elements are `T`.
pub(crate) fn read_own<T: Element>(tensor: &Tensor, what: &'static str, loc: Loc) -> Result<Vec<T>> {
    let ty = tensor.ty();
    if ty.dtype != T::DTYPE {
        let why = Why::ElementType { own: ty.dtype, wanted: T::DTYPE, converts: "to_vec_cast" };
        return Err(Op::Detach {}.error(&[ty.into()], why, loc).named(what));
    }
    read(tensor, what, loc)
}

/// The elements, converted to `T`.
pub(crate) fn read<T: Element>(tensor: &Tensor, what: &'static str, loc: Loc) -> Result<Vec<T>> {
    hook::host_access(tensor, Access::Read, what, loc)?;
    elements(tensor, what, loc)
}

/// [`read`] behind the hook.
pub(crate) fn elements<T: Element>(tensor: &Tensor, what: &'static str, loc: Loc) -> Result<Vec<T>> {
    // Looked at once: its data may be replaced at any time.
    let ready = match tensor.ready()?.clone() {
        ready if ready.device == Device::Cpu => ready,
        _ => device::moved(tensor, Device::Cpu, what, loc)?,
    };
    let dense = if ready.layout.is_contiguous() && ready.dtype == T::DTYPE {
        Tensor::from_ready(ready)
    } else {
        let tensor = &Tensor::from_ready(ready.clone());
        let converted = if ready.dtype == T::DTYPE {
            tensor.clone()
        } else {
            execute_tensor(&Op::To { dtype: T::DTYPE }, &[Arg::Tensor(tensor)], loc)?
        };
        execute_tensor(&Op::Clone {}, &[Arg::Tensor(&converted)], loc)?
    };
    let ready = dense.ready()?;
    let TensorTy { shape, .. } = ready.ty();
    let _lock = storage::Guard::lock(std::iter::once((&ready.storage, false)));
    if ready.pointer().is_null() && shape.numel() > 0 {
        return Err(Error::bug(format!("{what} of a tensor without storage")));
    }
    // SAFETY: the storage is locked for reading and holds `numel` dense elements of T's dtype.
    unsafe { T::read(ready.pointer(), shape.numel()) }.map_err(|error| {
        let bytes = shape.numel() * T::DTYPE.size();
        Error::op(what, Why::Memory { bytes, reason: error.to_string() }, loc)
    })
}
