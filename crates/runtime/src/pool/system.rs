//! Blocks from the system and back, and how much memory it has.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::OnceLock;

use super::ALIGNMENT;
use super::class::{BIG, Class};

/// Bytes of memory the process may use: the machine's, or its control group's if that is less.
pub fn machine_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        // SAFETY: sysconf has no preconditions.
        let (pages, page) =
            unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
        let physical = match (usize::try_from(pages), usize::try_from(page)) {
            (Ok(pages), Ok(page)) if pages > 0 => pages.saturating_mul(page),
            _ => isize::MAX as usize,
        };
        let group = std::fs::read_to_string("/sys/fs/cgroup/memory.max");
        let group = group.ok().and_then(|text| text.trim().parse::<usize>().ok());
        physical.min(group.unwrap_or(usize::MAX))
    })
}

fn small_layout(class: Class) -> Layout {
    Layout::from_size_align(class.bytes, ALIGNMENT).expect("class sizes are valid layouts")
}

/// A block from the system, or nothing if it has none.
pub(super) fn from_system(class: Class) -> Option<NonNull<u8>> {
    if class.is_big() {
        return map_big(class.bytes);
    }
    // SAFETY: class sizes are not zero.
    NonNull::new(unsafe { std::alloc::alloc(small_layout(class)) })
}

/// Maps `bytes` (a multiple of the page size), zeroed, at a multiple of 2 MiB.
fn map_big(bytes: usize) -> Option<NonNull<u8>> {
    let padded = bytes.checked_add(BIG)?;
    // SAFETY: an anonymous mapping at an address the system chooses.
    let start = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(std::ptr::null_mut(), padded, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    if start == libc::MAP_FAILED {
        return None;
    }
    let before = (start as usize).next_multiple_of(BIG) - start as usize;
    // SAFETY: the three parts lie within the mapping just made; the outer two are cut off.
    unsafe {
        let block = start.byte_add(before);
        if before > 0 {
            libc::munmap(start, before);
        }
        if before < BIG {
            libc::munmap(block.byte_add(bytes), BIG - before);
        }
        #[cfg(target_os = "linux")]
        // Advice only: without huge pages the block works all the same.
        libc::madvise(block, bytes, libc::MADV_HUGEPAGE);
        NonNull::new(block.cast())
    }
}

/// # Safety
/// `block` came from `from_system(class)` and is not used any more.
pub(super) unsafe fn to_system(block: NonNull<u8>, class: Class) {
    if class.is_big() {
        // SAFETY: exactly the range that `map_big` kept.
        unsafe { libc::munmap(block.as_ptr().cast(), class.bytes) };
    } else {
        // SAFETY: allocated with the same layout.
        unsafe { std::alloc::dealloc(block.as_ptr(), small_layout(class)) };
    }
}
