//! Tensors and bytes: what files hold, in little-endian order.

use std::io::Read;

use kiln_ir::{DType, Error, Loc, Result, Shape, TensorTy, Why, bf16, f16};

use crate::create::{allocate, check_rank};
use crate::host::{Element, read, reserve};
use crate::{Tensor, hook};

/// Elements as the bytes of a file, or back: the same on a little-endian machine, turned around otherwise.
fn file_order(bytes: &mut [u8], dtype: DType) {
    if cfg!(target_endian = "big") {
        bytes.chunks_exact_mut(dtype.size()).for_each(<[u8]>::reverse);
    }
}

/// The bytes of a dense tensor.
fn size_of(shape: &Shape, dtype: DType) -> Option<usize> {
    shape.checked_numel()?.checked_mul(dtype.size())
}

/// How much of a reader is taken at once: what a core's cache holds.
const PIECE: usize = 256 << 10;

/// A new tensor of a reader's next bytes.
fn fill(mut reader: impl Read, shape: Shape, dtype: DType, op: &'static str, loc: Loc) -> Result<Tensor> {
    let too_large = || Error::op(op, Why::TooLarge { shape: shape.clone() }, loc);
    let size = size_of(&shape, dtype).ok_or_else(too_large)?;
    let ready = allocate(&TensorTy::new(dtype, shape), op, loc)?;
    let mut piece = vec![0; size.min(PIECE)];
    let mut done = 0;
    while done < size {
        let part = &mut piece[..(size - done).min(PIECE)];
        let read = reader.read_exact(part);
        read.map_err(|error| Error::op(op, Why::Read { bytes: size, reason: error.to_string() }, loc))?;
        file_order(part, dtype);
        if dtype == DType::Bool {
            part.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
        }
        // SAFETY: the memory is fresh and dense, nobody else has it, and `done + part.len()` is at most its size.
        unsafe { u8::write(part, ready.storage.pointer().add(done)) };
        done += part.len();
    }
    Ok(Tensor::from_ready(ready))
}

impl Tensor {
    /// A tensor of these bytes: its elements in row-major order, each in little-endian order. A truth value is
    /// false if its byte is 0.
    #[track_caller]
    pub fn from_bytes(bytes: &[u8], shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let (loc, shape) = (Loc::caller(), shape.into());
        if let Some(expected) = size_of(&shape, dtype).filter(|&size| size != bytes.len()) {
            let why = Why::Count { what: "bytes", expected, got: bytes.len() };
            return Err(Error::op("from_bytes", why, loc));
        }
        check_rank(&shape, "from_bytes", loc)?;
        fill(bytes, shape, dtype, "from_bytes", loc)
    }

    /// A tensor of the next bytes of a reader, as [`Tensor::from_bytes`] takes them, without a copy of all of them
    /// in between. The memory is taken before anything is read: a size that comes from a file is to be compared with
    /// the file's length first.
    #[track_caller]
    pub fn from_reader(reader: impl Read, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let (shape, loc) = (shape.into(), Loc::caller());
        check_rank(&shape, "from_reader", loc)?;
        fill(reader, shape, dtype, "from_reader", loc)
    }

    /// The elements in row-major order, each in little-endian order.
    #[track_caller]
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        fn bytes<T: Element>(tensor: &Tensor, loc: Loc) -> Result<Vec<u8>> {
            let _eager = hook::Scope::suspend();
            let elements = read::<T>(tensor, "to_bytes", loc)?;
            let length = size_of_val(&elements[..]);
            let mut bytes = reserve(length, "to_bytes", loc)?;
            // SAFETY: elements are plain numbers without padding, read as the bytes they are.
            bytes.extend_from_slice(unsafe {
                std::slice::from_raw_parts(elements.as_ptr().cast::<u8>(), length)
            });
            file_order(&mut bytes, T::DTYPE);
            Ok(bytes)
        }
        let loc = Loc::caller();
        hook::host_access(self, hook::Access::Read, "to_bytes", loc)?;
        match self.dtype() {
            DType::Bool => bytes::<bool>(self, loc),
            DType::U8 => bytes::<u8>(self, loc),
            DType::I8 => bytes::<i8>(self, loc),
            DType::I16 => bytes::<i16>(self, loc),
            DType::I32 => bytes::<i32>(self, loc),
            DType::I64 => bytes::<i64>(self, loc),
            DType::F16 => bytes::<f16>(self, loc),
            DType::BF16 => bytes::<bf16>(self, loc),
            DType::F32 => bytes::<f32>(self, loc),
            DType::F64 => bytes::<f64>(self, loc),
        }
    }
}
