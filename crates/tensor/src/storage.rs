//! Storages: the memory behind tensors, with the lock that keeps safe Rust sound, a version that counts
//! changes, and a tag that says which run has it in use.

use std::borrow::Borrow;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RawRwLock;
use parking_lot::lock_api::RawRwLock as _;
use smallvec::SmallVec;

use kiln_runtime::pool::Buffer;

use crate::handle::{Handle, Recycle, free_list};

pub(crate) struct StorageInner {
    lock: RawRwLock,
    buffer: Option<Buffer>,
    version: AtomicU64,
    tag: AtomicU64,
}

impl Default for StorageInner {
    fn default() -> StorageInner {
        StorageInner {
            lock: RawRwLock::INIT,
            buffer: None,
            version: AtomicU64::new(0),
            tag: AtomicU64::new(0),
        }
    }
}

impl Recycle for StorageInner {
    fn clear(&mut self) {
        self.buffer = None;
        *self.version.get_mut() = 0;
        *self.tag.get_mut() = 0;
    }
    free_list!(STORAGES, StorageInner);
}

/// A block of memory that tensors share. Reading and writing it needs its lock ([`Access`]).
#[derive(Clone)]
pub struct Storage(Handle<StorageInner>);

impl Storage {
    /// A storage over this memory.
    pub fn new(buffer: Buffer) -> Storage {
        Storage(Handle::new(|inner: &mut StorageInner| inner.buffer = Some(buffer)))
    }

    /// The first byte.
    #[inline]
    pub fn pointer(&self) -> *mut u8 {
        self.0.buffer.as_ref().map_or(std::ptr::null_mut(), Buffer::as_ptr)
    }

    /// Counts the changes made to it.
    pub fn version(&self) -> u64 {
        self.0.version.load(Ordering::Relaxed)
    }

    /// Notes a change.
    pub fn bump_version(&self) {
        self.0.version.fetch_add(1, Ordering::Relaxed);
    }

    /// The run that uses it and the run's number for the tensor that brought it (see [`crate::hook::Tag`]).
    #[inline]
    pub fn tag(&self) -> u64 {
        self.0.tag.load(Ordering::Relaxed)
    }

    /// Sets the tag.
    #[inline]
    pub fn set_tag(&self, tag: u64) {
        self.0.tag.store(tag, Ordering::Relaxed);
    }

    /// Equal for handles to the same storage.
    #[inline]
    pub fn address(&self) -> usize {
        self.0.address()
    }

    /// How many tensors share it.
    pub(crate) fn references(&self) -> usize {
        self.0.references()
    }
}

/// The locks of several storages, held together: each taken once, in address order, for writing if any role
/// writes. Given up on drop.
#[derive(Default)]
pub struct Access {
    held: SmallVec<[(Storage, bool); 6]>,
}

impl Access {
    /// Nothing locked yet.
    pub fn new() -> Access {
        Access::default()
    }

    /// Plans a lock. Takes effect with [`Access::lock`].
    #[inline]
    pub fn add(&mut self, storage: &Storage, write: bool) {
        self.held.push((storage.clone(), write));
    }

    /// Takes all planned locks.
    pub fn lock(mut self) -> Locked {
        let address = |(storage, _): &(Storage, bool)| storage.address();
        // Programs come with the same storages every time: often they are sorted already.
        if !self.held.is_sorted_by_key(address) {
            self.held.sort_unstable_by_key(address);
        }
        self.held.dedup_by(|next, kept| {
            let same = address(next) == address(kept);
            kept.1 |= same && next.1;
            same
        });
        lock_all(&self.held);
        Locked { held: std::mem::take(&mut self.held) }
    }
}

/// Locks that are held. See [`Access`].
pub struct Locked {
    held: SmallVec<[(Storage, bool); 6]>,
}

impl Locked {
    /// Gives the locks up and the memory of the list back, so that a caller can use it again without
    /// asking the allocator.
    pub fn release(mut self) -> Access {
        // SAFETY: `Access::lock` took these locks; the list is emptied, so they are given up once.
        unsafe { unlock_all(&self.held) };
        let mut held = std::mem::take(&mut self.held);
        held.clear();
        Access { held }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: as in `release`, after which the list is empty.
        unsafe { unlock_all(&self.held) };
    }
}

/// [`Access`] for the time of one op, whose operands outlive it: the storages are borrowed, not counted.
pub(crate) struct Guard<'a> {
    held: SmallVec<[(&'a Storage, bool); 5]>,
}

impl<'a> Guard<'a> {
    /// Locks these storages, each with whether it is written.
    #[inline]
    pub(crate) fn lock(storages: impl Iterator<Item = (&'a Storage, bool)>) -> Guard<'a> {
        let mut held: SmallVec<[(&Storage, bool); 5]> = SmallVec::new();
        for (storage, write) in storages {
            match held.binary_search_by_key(&storage.address(), |(held, _)| held.address()) {
                Ok(at) => held[at].1 |= write,
                Err(at) => held.insert(at, (storage, write)),
            }
        }
        lock_all(&held);
        Guard { held }
    }
}

/// How one of several calls uses a storage.
#[derive(Clone, Copy)]
pub(crate) struct Use<'a> {
    pub(crate) storage: &'a Storage,
    /// Which call.
    pub(crate) row: usize,
    pub(crate) write: bool,
}

impl<'a> Guard<'a> {
    /// Locks what several calls use, so that they can run in any order; `None` if one writes what another uses.
    pub(crate) fn lock_rows(uses: &mut [Use<'a>]) -> Option<Guard<'a>> {
        let address = |used: &Use<'_>| used.storage.address();
        uses.sort_unstable_by_key(address);
        let mut held: SmallVec<[(&Storage, bool); 5]> = SmallVec::new();
        for same in uses.chunk_by(|a, b| address(a) == address(b)) {
            let write = same.iter().any(|used| used.write);
            if write && same.iter().any(|used| used.row != same[0].row) {
                return None;
            }
            held.push((same[0].storage, write));
        }
        lock_all(&held);
        Some(Guard { held })
    }
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `Guard::lock` took exactly these locks, and they are given up once.
        unsafe { unlock_all(&self.held) };
    }
}

/// Takes the locks in the order of the list, which has each storage once, sorted by address.
#[inline]
fn lock_all<S: Borrow<Storage>>(held: &[(S, bool)]) {
    for (storage, write) in held {
        let lock = &storage.borrow().0.lock;
        match write {
            true => lock.lock_exclusive(),
            false => lock.lock_shared(),
        }
    }
}

/// # Safety
/// `lock_all` took these locks, and they have not been given up since.
#[inline]
unsafe fn unlock_all<S: Borrow<Storage>>(held: &[(S, bool)]) {
    for (storage, write) in held {
        let lock = &storage.borrow().0.lock;
        // SAFETY: the caller's promise.
        unsafe {
            match write {
                true => lock.unlock_exclusive(),
                false => lock.unlock_shared(),
            }
        }
    }
}
