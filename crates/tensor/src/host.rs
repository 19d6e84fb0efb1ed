//! Between tensors and host memory: reading elements back.

use kiln_ir::{DType, Error, Loc, Op, Result, Scalar, TensorTy, Why, bf16, f16};

use crate::Tensor;
use crate::dispatch::execute_tensor;
use crate::hook::{self, Access, Arg};
use crate::storage;

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is the element of some dtype.
pub trait Element: Copy + sealed::Sealed + 'static {
    /// Its dtype.
    const DTYPE: DType;
    /// Writes elements to memory.
    ///
    /// # Safety
    /// `to` must be valid for `data.len()` elements of the dtype.
    unsafe fn write(data: &[Self], to: *mut u8);
    /// Reads elements from memory.
    ///
    /// # Safety
    /// `from` must be valid for `len` elements of the dtype.
    unsafe fn read(from: *const u8, len: usize) -> Vec<Self>;
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
            unsafe fn read(from: *const u8, len: usize) -> Vec<$ty> {
                let mut out: Vec<$ty> = Vec::with_capacity(len);
                if len > 0 {
                    // SAFETY: the caller promises `len` elements; the vector has room for them. Truth values
                    // in storages are always 0 or 1.
                    unsafe {
                        std::ptr::copy_nonoverlapping(from.cast::<$ty>(), out.as_mut_ptr(), len);
                        out.set_len(len);
                    }
                }
                out
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

impl Tensor {
    /// The elements in row-major order, converted to `T`.
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        read(self, "to_vec", Loc::caller())
    }

    /// The only element of a tensor that has one.
    #[track_caller]
    pub fn item<T: Element>(&self) -> Result<T> {
        let loc = Loc::caller();
        if self.numel() != 1 {
            let why = Why::Other(format!("a tensor of {} elements is not a single number", self.numel()));
            return Err(Op::Detach {}.error(&[self.ty().into()], why, loc).named("item"));
        }
        Ok(read(self, "item", loc)?[0])
    }

    /// Overwrites the elements, in row-major order.
    #[track_caller]
    pub fn write_slice<T: Element>(&self, data: &[T]) -> Result<()> {
        let loc = Loc::caller();
        hook::host_access(self, Access::Write, "write_slice", loc)?;
        let source = Tensor::from_vec(data.to_vec(), self.shape())?;
        let _eager = hook::Scope::suspend();
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

pub(crate) fn read<T: Element>(tensor: &Tensor, what: &'static str, loc: Loc) -> Result<Vec<T>> {
    hook::host_access(tensor, Access::Read, what, loc)?;
    // Looked at once: its data may be replaced at any time.
    let ready = tensor.ready()?.clone();
    let dense = match ready.layout.is_contiguous() && ready.dtype == T::DTYPE {
        true => Tensor::from_ready(ready),
        false => {
            let tensor = &Tensor::from_ready(ready.clone());
            let converted = match ready.dtype == T::DTYPE {
                true => tensor.clone(),
                false => execute_tensor(&Op::To { dtype: T::DTYPE }, &[Arg::Tensor(tensor)], loc)?,
            };
            execute_tensor(&Op::Clone {}, &[Arg::Tensor(&converted)], loc)?
        }
    };
    let ready = dense.ready()?;
    let TensorTy { shape, .. } = ready.ty();
    let _lock = storage::Guard::lock(std::iter::once((&ready.storage, false)));
    match ready.pointer().is_null() && shape.numel() > 0 {
        true => Err(Error::op(what, Why::Other("the tensor has no memory".into()), loc)),
        // SAFETY: the storage is locked for reading and holds `numel` dense elements of T's dtype.
        false => Ok(unsafe { T::read(ready.pointer(), shape.numel()) }),
    }
}
