//! Tensors and bytes: what files hold, in little-endian order, and files mapped into memory.

use std::fs::File;
use std::ops::Deref;
use std::path::Path;

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

impl Tensor {
    /// A tensor of these bytes: its elements in row-major order, each in little-endian order. A truth value is
    /// false if its byte is 0.
    #[track_caller]
    pub fn from_bytes(bytes: &[u8], shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let (loc, shape) = (Loc::caller(), shape.into());
        let size = shape.checked_numel().and_then(|numel| numel.checked_mul(dtype.size()));
        if size != Some(bytes.len()) {
            let why = Why::Other(format!("{} bytes are not {dtype}{shape}", bytes.len()));
            return Err(Error::op("from_bytes", why, loc));
        }
        check_rank(&shape, "from_bytes", loc)?;
        let ready = allocate(&TensorTy::new(dtype, shape), "from_bytes", loc)?;
        // SAFETY: the memory is fresh, dense and as long as `bytes`; nobody else has it.
        unsafe { u8::write(bytes, ready.storage.pointer()) };
        if !bytes.is_empty() {
            // SAFETY: as above, and now all of it is set.
            let own = unsafe { std::slice::from_raw_parts_mut(ready.storage.pointer(), bytes.len()) };
            file_order(own, dtype);
            if dtype == DType::Bool {
                own.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
            }
        }
        Ok(Tensor::from_ready(ready))
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

/// A file's bytes, read as they are needed. The file must not be changed while it is mapped.
pub struct MappedFile(memmap2::Mmap);

impl MappedFile {
    /// Maps a file.
    pub fn open(path: impl AsRef<Path>) -> Result<MappedFile> {
        let path = path.as_ref();
        let fail = |error: std::io::Error| Error::Environment(format!("{}: {error}", path.display()));
        let file = File::open(path).map_err(fail)?;
        // SAFETY: the mapping is private and read-only. That no other process changes or cuts the file meanwhile is
        // what `open` asks of its caller, and what saving by renaming a finished file keeps.
        Ok(MappedFile(unsafe { memmap2::Mmap::map(&file) }.map_err(fail)?))
    }
}

impl Deref for MappedFile {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}
