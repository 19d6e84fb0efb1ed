//! The ends of buffers, for the address sanitizer.
//!
//! The pool's blocks are larger than what was asked for, and stay allocated when buffers are dropped. With
//! `KILN_SANITIZE=address` the sanitizer is told which bytes are in use, so that it finds kernels that go one element
//! too far, or into memory that was given back. Memory that is lent is one buffer to it.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::cc::Sanitize;

type Mark = unsafe extern "C" fn(*const c_void, usize);

/// The sanitizer's functions.
struct Marks {
    forbid: Mark,
    allow: Mark,
}

/// `None` unless the sanitizer was asked for and its library is there.
#[inline]
fn marks() -> Option<&'static Marks> {
    static MARKS: OnceLock<Option<Marks>> = OnceLock::new();
    MARKS.get_or_init(find).as_ref()
}

#[cold]
fn find() -> Option<Marks> {
    if Sanitize::asked() != Sanitize::Address {
        return None;
    }
    let find = |name: &CStr| -> Option<Mark> {
        // SAFETY: a lookup by name; the library's functions of these names have this type.
        unsafe {
            let found = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
            (!found.is_null()).then(|| std::mem::transmute::<*mut c_void, Mark>(found))
        }
    };
    let (forbid, allow) = (find(c"__asan_poison_memory_region")?, find(c"__asan_unpoison_memory_region")?);
    Some(Marks { forbid, allow })
}

/// The first `bytes` of a block of `size` are in use, the others are not.
#[inline]
pub(crate) fn used(block: *const u8, bytes: usize, size: usize) {
    if let Some(Marks { forbid, allow }) = marks() {
        // SAFETY: the functions only change what the sanitizer thinks of these bytes.
        unsafe {
            allow(block.cast(), bytes);
            forbid(block.wrapping_add(bytes).cast(), size - bytes);
        }
    }
}

/// The pool goes to the link at the start of a block that nobody uses. The sanitizer has to be told where it watches
/// this crate, too: `cargo xtask sanitize` builds with `--cfg sanitize_rust`.
#[inline(always)]
pub(crate) fn at_link<R>(block: NonNull<u8>, go: impl FnOnce() -> R) -> R {
    let link = block.as_ptr().cast::<c_void>();
    if cfg!(sanitize_rust)
        && let Some(Marks { allow, .. }) = marks()
    {
        // SAFETY: as above.
        unsafe { allow(link, size_of::<usize>()) };
    }
    let result = go();
    if cfg!(sanitize_rust)
        && let Some(Marks { forbid, .. }) = marks()
    {
        // SAFETY: as above.
        unsafe { forbid(link, size_of::<usize>()) };
    }
    result
}

/// Nobody uses a block, and it is the system's again if `gone`.
#[inline]
pub(crate) fn unused(block: *const u8, size: usize, gone: bool) {
    if let Some(Marks { forbid, allow }) = marks() {
        // SAFETY: as above.
        unsafe { if gone { allow(block.cast(), size) } else { forbid(block.cast(), size) } }
    }
}
