//! The storage pool: memory blocks that are kept and handed out again instead of going back to the system.
//!
//! Sizes are rounded up to classes, four to each power of two, so at most a fifth of a block is unused. Each
//! class has a free list threaded through the free blocks themselves: neither taking a cached block nor
//! giving one back calls the global allocator. Small blocks pass through a few lists of the thread's own first,
//! without locks or shared counters: an eager op on a small tensor would otherwise spend more time here than
//! in its kernel. Blocks of 2 MiB and more come from the system directly,
//! aligned so that they can be backed by huge pages: a fresh 16 MiB block otherwise costs thousands of page
//! faults.

mod class;
mod loan;
mod magazine;
mod system;

use std::ptr::NonNull;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};

use kiln_ir::Device;
use parking_lot::Mutex;
use thiserror::Error;

use crate::{engine, guard, isolate};
use class::{CLASSES, Class};
use loan::Loan;
use magazine::Magazine;
use system::{from_system, to_system};

pub use loan::lend;
pub use system::machine_bytes;

/// Alignment of every buffer.
pub const ALIGNMENT: usize = 64;

/// Why a buffer could not be had.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AllocError {
    /// More than the machine could ever give.
    #[error("{requested} bytes requested, but the machine has only {machine} bytes of memory")]
    TooLarge {
        /// Bytes asked for.
        requested: usize,
        /// Bytes of memory the process may use.
        machine: usize,
    },
    /// Together with the live buffers, more than the machine has.
    #[error("out of memory: {requested} bytes requested, {live} of {machine} bytes in use by live buffers")]
    Exhausted {
        /// Bytes asked for.
        requested: usize,
        /// Bytes in live buffers.
        live: usize,
        /// Bytes of memory the process may use.
        machine: usize,
    },
}

/// What the pool holds, in bytes rounded up to size classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Bytes in live buffers.
    pub live_bytes: usize,
    /// Bytes in free blocks kept for reuse.
    pub cached_bytes: usize,
    /// The most `live_bytes` has been since the last [`reset_peak`].
    pub peak_live_bytes: usize,
    /// Of the live bytes, those that compiled programs keep from call to call ([`Reserve`]).
    pub reserved_bytes: usize,
    /// Blocks taken from the system so far.
    pub system_allocations: usize,
}

/// A buffer that is kept from call to call although nothing is in it between them.
#[derive(Debug)]
pub struct Reserve(Buffer);

impl Reserve {
    /// A reserve of `bytes` bytes.
    pub fn alloc(bytes: usize) -> Result<Reserve, AllocError> {
        let buffer = Buffer::alloc(bytes)?;
        POOL.reserved.fetch_add(buffer.size(), Ordering::Relaxed);
        Ok(Reserve(buffer))
    }

    /// The first byte, as [`Buffer::as_ptr`] gives it.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        POOL.reserved.fetch_sub(self.0.size(), Ordering::Relaxed);
    }
}

/// An owned block of raw memory; dropping it returns it to the pool.
///
/// The memory is aligned to 64 bytes and not initialised. The type hands out only a raw pointer: who may read and
/// write when is decided by the owner. Where it is another device's ([`Buffer::alloc_on`]), the pointer means
/// something to its engine alone.
#[derive(Debug)]
pub struct Buffer {
    pointer: NonNull<u8>,
    bytes: usize,
    device: Device,
}

// SAFETY: a buffer owns its block, and access to the memory goes through raw pointers in unsafe code that
// has to order its own accesses.
unsafe impl Send for Buffer {}
// SAFETY: as above; a shared buffer only shows its address and size.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Where buffers without bytes are: aligned like all others, so that empty slices can be made of it.
    const NOWHERE: NonNull<u8> =
        NonNull::without_provenance(std::num::NonZero::new(ALIGNMENT).expect("not 0"));

    /// A buffer of `bytes` bytes with unspecified contents.
    #[inline]
    pub fn alloc(bytes: usize) -> Result<Buffer, AllocError> {
        if bytes == 0 {
            return Ok(Buffer::here(Buffer::NOWHERE, 0));
        }
        let class = Class::of(bytes);
        if let Some(class) = class
            && let Some(pointer) = Magazine::with(class, |magazine| magazine.take(class)).flatten()
        {
            guard::used(pointer.as_ptr(), bytes, class.bytes);
            return Ok(Buffer::here(pointer, bytes));
        }
        Buffer::alloc_shared(bytes, class)
    }

    /// The same from what all threads share, or from the system.
    fn alloc_shared(bytes: usize, class: Option<Class>) -> Result<Buffer, AllocError> {
        let Some(class) = class else {
            isolate::memory_refused();
            return Err(AllocError::TooLarge { requested: bytes, machine: machine_bytes() });
        };
        if let Some(pointer) = Loan::take(class, bytes) {
            return Ok(Buffer::here(pointer, bytes));
        }
        let pointer = match POOL.pop(class) {
            Some(pointer) => pointer,
            None => POOL.fresh(class, bytes).inspect_err(|_| isolate::memory_refused())?,
        };
        POOL.count(class.bytes as isize);
        guard::used(pointer.as_ptr(), bytes, class.bytes);
        Ok(Buffer::here(pointer, bytes))
    }

    #[inline]
    fn here(pointer: NonNull<u8>, bytes: usize) -> Buffer {
        Buffer { pointer, bytes, device: Device::Cpu }
    }

    /// A buffer of a device's memory; none if the device has no engine.
    pub fn alloc_on(device: Device, bytes: usize) -> Option<Result<Buffer, AllocError>> {
        if device == Device::Cpu {
            return Some(Buffer::alloc(bytes));
        }
        let engine = engine::of(device)?;
        let pointer = if bytes == 0 { Ok(Buffer::NOWHERE) } else { engine.allocate(bytes) };
        Some(pointer.map(|pointer| Buffer { pointer, bytes, device }))
    }

    /// The same, never from memory that is [lent](lend): for buffers that outlive a loan.
    pub(crate) fn alloc_to_keep(bytes: usize) -> Result<Buffer, AllocError> {
        Loan::without(|| Buffer::alloc(bytes))
    }

    /// A buffer of no bytes whose address is that of memory somebody else owns (null: there is none); dropping
    /// it does nothing.
    ///
    /// # Safety
    /// Whoever uses the address answers for the memory behind it.
    pub unsafe fn borrowed(pointer: *mut u8) -> Buffer {
        Buffer::here(NonNull::new(pointer).unwrap_or(Buffer::NOWHERE), 0)
    }

    /// The first byte. Dangling (but aligned) when the buffer has no bytes.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.pointer.as_ptr()
    }

    /// Where it is.
    #[inline]
    pub fn device(&self) -> Device {
        self.device
    }

    /// The size asked for.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The size of its block.
    fn size(&self) -> usize {
        if self.bytes == 0 { 0 } else { Class::of(self.bytes).map_or(0, |class| class.bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        if self.device != Device::Cpu {
            if let Some(engine) = engine::of(self.device) {
                // SAFETY: the engine gave it, and with the buffer goes the last who could give it to work.
                unsafe { engine.free(self.pointer, self.bytes) };
            }
            return;
        }
        let class = Class::of(self.bytes).expect("the class existed when the buffer was made");
        if Magazine::with(class, |magazine| magazine.put(class, self.pointer)) == Some(true) {
            guard::unused(self.pointer.as_ptr(), class.bytes, false);
            return;
        }
        if Loan::give_back(self.pointer, self.bytes) {
            return;
        }
        POOL.count(-(class.bytes as isize));
        if POOL.cached() > machine_bytes() / 2 {
            // SAFETY: the block came from `fresh` with this class and is not used any more.
            unsafe { give_back(self.pointer, class) };
        } else {
            // Once on the list it may be another thread's.
            guard::unused(self.pointer.as_ptr(), class.bytes, false);
            POOL.push(class, self.pointer);
        }
    }
}

/// What the pool holds now.
pub fn stats() -> Stats {
    Magazine::report_own();
    Stats {
        live_bytes: POOL.live(),
        cached_bytes: POOL.cached(),
        peak_live_bytes: POOL.peak.load(Ordering::Relaxed),
        reserved_bytes: POOL.reserved.load(Ordering::Relaxed),
        system_allocations: POOL.system_allocations.load(Ordering::Relaxed),
    }
}

/// Starts a new measurement of the peak from what is live now.
pub fn reset_peak() {
    Magazine::report_own();
    POOL.peak.store(POOL.live(), Ordering::Relaxed);
}

/// Returns all cached blocks to the system, but for the few small ones that other threads keep.
pub fn clear() {
    Magazine::empty_own();
    for index in 0..CLASSES {
        let Some(class) = Class::at(index) else { return };
        while let Some(block) = POOL.pop(class) {
            // SAFETY: a cached block belongs to the pool alone and was made with its list's class.
            unsafe { give_back(block, class) };
        }
    }
}

/// The first free block of a class; each free block holds the address of the next in its first bytes.
#[repr(align(64))]
struct FreeList(Mutex<Option<Link>>);

#[derive(Clone, Copy)]
struct Link(NonNull<u8>);
// SAFETY: a free block belongs to whoever takes it off the list, on any thread.
unsafe impl Send for Link {}

struct Pool {
    lists: [FreeList; CLASSES],
    /// Bytes in live buffers, but for what threads have not reported yet; less than zero for a moment where
    /// one thread's buffers are dropped by another.
    live: AtomicIsize,
    /// Bytes taken from the system and not given back: the cached bytes are what of these is not live.
    held: AtomicUsize,
    peak: AtomicUsize,
    reserved: AtomicUsize,
    system_allocations: AtomicUsize,
}

static POOL: Pool = Pool {
    lists: [const { FreeList(Mutex::new(None)) }; CLASSES],
    live: AtomicIsize::new(0),
    held: AtomicUsize::new(0),
    peak: AtomicUsize::new(0),
    reserved: AtomicUsize::new(0),
    system_allocations: AtomicUsize::new(0),
};

impl Pool {
    fn cached(&self) -> usize {
        // Two counters read one after the other may for a moment not fit together.
        self.held.load(Ordering::Relaxed).saturating_sub(self.live())
    }

    fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed).max(0) as usize
    }

    /// Counts bytes that came to life, or died if negative.
    fn count(&self, bytes: isize) {
        let live = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if live > 0 && live as usize > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(live as usize, Ordering::Relaxed);
        }
    }

    #[inline]
    fn pop(&self, class: Class) -> Option<NonNull<u8>> {
        let mut head = self.lists[class.index].0.lock();
        let Link(block) = (*head)?;
        // SAFETY: `push` wrote a link at the start of every block on the list.
        *head = guard::at_link(block, || unsafe { block.cast::<Option<Link>>().read() });
        Some(block)
    }

    #[inline]
    fn push(&self, class: Class, block: NonNull<u8>) {
        let mut head = self.lists[class.index].0.lock();
        // SAFETY: the block is at least 64 bytes, aligned, and no longer used by its former owner.
        guard::at_link(block, || unsafe { block.cast::<Option<Link>>().write(*head) });
        *head = Some(Link(block));
    }

    /// A block from the system; cached blocks are given up before it is refused.
    #[cold]
    fn fresh(&self, class: Class, requested: usize) -> Result<NonNull<u8>, AllocError> {
        let machine = machine_bytes();
        if requested > machine {
            return Err(AllocError::TooLarge { requested, machine });
        }
        let live = self.live();
        let exhausted = AllocError::Exhausted { requested, live, machine };
        // The system would promise more than it has and end the process later.
        if live.saturating_add(requested) > machine {
            return Err(exhausted);
        }
        if live + requested + self.cached() > machine {
            clear();
        }
        let block = from_system(class).or_else(|| {
            clear();
            from_system(class)
        });
        let block = block.ok_or(exhausted)?;
        self.system_allocations.fetch_add(1, Ordering::Relaxed);
        self.held.fetch_add(class.bytes, Ordering::Relaxed);
        Ok(block)
    }
}

/// # Safety
/// `block` came from the pool with this class and is not used any more.
unsafe fn give_back(block: NonNull<u8>, class: Class) {
    POOL.held.fetch_sub(class.bytes, Ordering::Relaxed);
    guard::unused(block.as_ptr(), class.bytes, true);
    // SAFETY: the caller's promise is passed on.
    unsafe { to_system(block, class) };
}

#[cfg(test)]
mod tests {
    use super::class::BIG;
    use super::*;

    /// The pool is shared by all tests of the process: those that count take turns.
    pub(super) static TURN: Mutex<()> = Mutex::new(());

    #[test]
    fn a_freed_block_comes_back() {
        let _turn = TURN.lock();
        for bytes in [1000, 5 << 20] {
            let first = Buffer::alloc(bytes).unwrap();
            let address = first.as_ptr();
            assert_eq!(address as usize % if bytes >= BIG { BIG } else { ALIGNMENT }, 0);
            drop(first);
            assert_eq!(Buffer::alloc(bytes - 1).unwrap().as_ptr(), address);
        }
    }

    #[test]
    fn peak_follows_live_bytes() {
        let _turn = TURN.lock();
        clear();
        reset_peak();
        let before = stats();
        let big = Buffer::alloc(64 << 20).unwrap();
        drop(big);
        let after = stats();
        assert!(after.peak_live_bytes >= before.live_bytes + (64 << 20));
        assert!(after.cached_bytes >= 64 << 20);
        clear();
        assert!(stats().cached_bytes < 64 << 20);
    }

    #[test]
    fn reserves_are_counted() {
        let _turn = TURN.lock();
        let before = stats().reserved_bytes;
        let (kept, empty) = (Reserve::alloc(3 << 20).unwrap(), Reserve::alloc(0).unwrap());
        assert_eq!(stats().reserved_bytes, before + (3 << 20));
        drop((kept, empty));
        assert_eq!(stats().reserved_bytes, before);
    }

    #[test]
    fn no_bytes_are_aligned_too() {
        // SAFETY: nobody uses the address.
        let borrowed = unsafe { Buffer::borrowed(std::ptr::null_mut()) };
        for buffer in [borrowed, Buffer::alloc(0).unwrap()] {
            assert!(!buffer.as_ptr().is_null() && (buffer.as_ptr() as usize).is_multiple_of(ALIGNMENT));
        }
    }

    #[test]
    fn absurd_sizes_are_refused() {
        for bytes in [usize::MAX, isize::MAX as usize, 1 << 60, machine_bytes() + 1] {
            assert!(
                matches!(Buffer::alloc(bytes), Err(AllocError::TooLarge { requested, .. }) if requested == bytes)
            );
        }
    }

    #[test]
    fn threads_never_share_a_block() {
        std::thread::scope(|scope| {
            for tag in 0..4u8 {
                scope.spawn(move || {
                    for round in 0..2000usize {
                        let bytes = 64 + round % 300;
                        let buffer = Buffer::alloc(bytes).unwrap();
                        // SAFETY: the buffer is ours; every byte is written before it is read.
                        unsafe {
                            std::ptr::write_bytes(buffer.as_ptr(), tag, bytes);
                            std::hint::black_box(buffer.as_ptr());
                            assert!((0..bytes).all(|i| *buffer.as_ptr().add(i) == tag));
                        }
                    }
                });
            }
        });
    }
}
