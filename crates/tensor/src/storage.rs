//! Storages: the memory behind tensors, with the lock that keeps safe Rust sound, a version that counts
//! changes, and a tag that says which run has it in use.

use std::borrow::Borrow;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RawRwLock;
use parking_lot::lock_api::RawRwLock as _;
use smallvec::SmallVec;

use kiln_ir::{Device, Error, Result};
use kiln_runtime::engine::{self, Ticket};
use kiln_runtime::kept::Contents;
use kiln_runtime::pool::Buffer;
use kiln_runtime::program::Stopped;

use crate::handle::{Handle, Recycle, free_list};

pub(crate) struct StorageInner {
    lock: RawRwLock,
    buffer: Option<Buffer>,
    version: AtomicU64,
    tag: AtomicU64,
    /// See [`Storage::complete_at`].
    ticket: AtomicU64,
    /// See [`Storage::contents`]; 0 until somebody asks.
    number: AtomicU64,
}

impl Default for StorageInner {
    fn default() -> StorageInner {
        StorageInner {
            lock: RawRwLock::INIT,
            buffer: None,
            version: AtomicU64::new(0),
            tag: AtomicU64::new(0),
            ticket: AtomicU64::new(0),
            number: AtomicU64::new(0),
        }
    }
}

impl Recycle for StorageInner {
    fn clear(&mut self) {
        self.buffer = None;
        *self.version.get_mut() = 0;
        *self.tag.get_mut() = 0;
        *self.ticket.get_mut() = 0;
        *self.number.get_mut() = 0;
    }
    free_list!(STORAGES, StorageInner);
}

/// A block of memory that tensors share. Reading and writing it needs its lock.
#[derive(Clone)]
pub struct Storage(Handle<StorageInner>);

impl Storage {
    /// A storage over this memory.
    #[inline]
    pub fn new(buffer: Buffer) -> Storage {
        Storage(Handle::new(|inner: &mut StorageInner| inner.buffer = Some(buffer)))
    }

    /// The first byte.
    #[inline]
    pub fn pointer(&self) -> *mut u8 {
        self.0.buffer.as_ref().map_or(std::ptr::null_mut(), Buffer::as_ptr)
    }

    /// Where it is.
    #[inline]
    pub fn device(&self) -> Device {
        self.0.buffer.as_ref().map_or(Device::Cpu, Buffer::device)
    }

    /// Says which work of its device's engine writes it last.
    pub(crate) fn complete_at(&self, ticket: Ticket) {
        self.0.ticket.store(ticket, Ordering::Relaxed);
    }

    /// Waits until it holds what it is to hold.
    pub(crate) fn wait(&self) -> Result<()> {
        let Some(engine) = engine::of(self.device()) else { return Ok(()) };
        engine.wait(self.0.ticket.load(Ordering::Relaxed)).map_err(|stopped| match stopped {
            Stopped::Host(error) => error,
            Stopped::Memory(error) => Error::Environment(error.to_string()),
            // Plans whose kernels check indices are waited for where they run.
            Stopped::Status { step, code } => Error::bug(format!("step {step} ended with {code} unnoticed")),
        })
    }

    /// Its size; 0 where the memory is somebody else's.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.0.buffer.as_ref().map_or(0, Buffer::bytes)
    }

    /// Counts the changes made to it.
    pub fn version(&self) -> u64 {
        self.0.version.load(Ordering::Relaxed)
    }

    /// What is in it now: equal as long as nothing is changed, and never again afterwards, whatever storage comes
    /// to lie here.
    pub(crate) fn contents(&self) -> Contents {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let mut number = self.0.number.load(Ordering::Relaxed);
        if number == 0 {
            let fresh = NUMBERS.fetch_add(1, Ordering::Relaxed);
            // Somebody else may have been quicker.
            number = match self.0.number.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => fresh,
                Err(there) => there,
            };
        }
        Contents { memory: number, version: self.version() }
    }

    /// Notes a change. Whoever changes a storage holds its lock for writing: no other count is lost.
    pub(crate) fn bump_version(&self) {
        self.0.version.store(self.version() + 1, Ordering::Relaxed);
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

    /// Asks for the storage's lock, version and tag to be near when their turn comes.
    #[inline]
    pub(crate) fn prefetch(&self) {
        self.0.prefetch();
    }

    /// Equal for handles to the same storage.
    #[inline]
    pub fn address(&self) -> usize {
        self.0.address()
    }

    /// How many tensors share it.
    pub fn references(&self) -> usize {
        self.0.references()
    }
}

/// What locking the storages of a program needs and the next run can use again.
#[derive(Default)]
pub(crate) struct Room {
    /// The uses in the order of their addresses. A program mostly comes with the storages it had before: then
    /// the order still holds, and nothing is sorted.
    order: Vec<u32>,
    uses: Vec<(&'static Storage, bool)>,
    held: Vec<(&'static Storage, bool)>,
}

/// The memory of an empty list, for a list of what lives shorter or longer.
#[expect(clippy::unnecessary_filter_map, reason = "a filter keeps the type, and with it the lifetime")]
fn emptied<'a>(list: Vec<(&Storage, bool)>) -> Vec<(&'a Storage, bool)> {
    // Collected in place: nothing is allocated.
    list.into_iter().filter_map(|_| None).collect()
}

impl Room {
    /// Where the storages of a run are listed, each with whether it is written.
    pub(crate) fn list<'a>(&mut self) -> Vec<(&'a Storage, bool)> {
        emptied(std::mem::take(&mut self.uses))
    }

    /// Locks the listed storages, each once, in address order, for writing if any role writes; those that are
    /// written count a change. The contents of the uses that are `watched` are appended.
    pub(crate) fn lock<'a>(
        &mut self,
        uses: Vec<(&'a Storage, bool)>,
        watched: &[usize],
        contents: &mut Vec<Contents>,
    ) -> Locked<'a> {
        let address = |&i: &u32| uses[i as usize].0.address();
        if self.order.len() != uses.len() || !self.order.is_sorted_by_key(address) {
            self.order.clear();
            self.order.extend(0..uses.len() as u32);
            self.order.sort_unstable_by_key(address);
        }
        let mut held: Vec<(&'a Storage, bool)> = emptied(std::mem::take(&mut self.held));
        for &i in &self.order {
            let (storage, write) = uses[i as usize];
            match held.last_mut() {
                Some((last, writes)) if last.address() == storage.address() => *writes |= write,
                _ => held.push((storage, write)),
            }
        }
        lock_all(&held);
        held.iter().filter(|(_, write)| *write).for_each(|(storage, _)| storage.bump_version());
        contents.extend(watched.iter().map(|&i| uses[i].0.contents()));
        self.uses = emptied(uses);
        Locked { held }
    }

    /// Gives the locks up and keeps the memory of their list.
    pub(crate) fn release(&mut self, mut locked: Locked<'_>) {
        let held = std::mem::take(&mut locked.held);
        // SAFETY: `lock` took these locks; `locked` has none of them any more, so they are given up once.
        unsafe { unlock_all(&held) };
        self.held = emptied(held);
    }
}

/// Locks that are held. See [`Room::lock`].
pub(crate) struct Locked<'a> {
    held: Vec<(&'a Storage, bool)>,
}

impl<'a> Locked<'a> {
    /// Those that are written.
    pub(crate) fn written(&self) -> impl Iterator<Item = &'a Storage> {
        self.held.iter().filter(|(_, write)| *write).map(|(storage, _)| *storage)
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // SAFETY: `Room::lock` took exactly these locks; `Room::release` leaves none here.
        unsafe { unlock_all(&self.held) };
    }
}

/// The locks of several storages, held for the time of one op: each taken once, in address order, for writing
/// if any role writes. Given up on drop.
pub(crate) struct Guard<'a> {
    held: SmallVec<[(&'a Storage, bool); 5]>,
}

impl<'a> Guard<'a> {
    /// Locks these storages, each with whether it is written.
    #[inline]
    pub(crate) fn lock(storages: impl Iterator<Item = (&'a Storage, bool)>) -> Guard<'a> {
        let mut held: SmallVec<[(&Storage, bool); 5]> = SmallVec::new();
        for (storage, write) in storages {
            let address = storage.address();
            let at = held.iter().take_while(|(held, _)| held.address() < address).count();
            match held.get_mut(at) {
                Some((same, writes)) if same.address() == address => *writes |= write,
                Some(_) => held.insert(at, (storage, write)),
                None => held.push((storage, write)),
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

/// Sorts what several calls use by storage, and says whether none writes what another uses.
pub(crate) fn independent(uses: &mut [Use<'_>]) -> bool {
    let address = |used: &Use<'_>| used.storage.address();
    uses.sort_unstable_by_key(address);
    uses.chunk_by(|a, b| address(a) == address(b)).all(|same| {
        let write = same.iter().any(|used| used.write);
        !write || same.iter().all(|used| used.row == same[0].row)
    })
}

impl<'a> Guard<'a> {
    /// Locks what several calls use, so that they can run in any order; `None` if one writes what another uses.
    pub(crate) fn lock_rows(uses: &mut [Use<'a>]) -> Option<Guard<'a>> {
        if !independent(uses) {
            return None;
        }
        let mut held: SmallVec<[(&Storage, bool); 5]> = SmallVec::new();
        for same in uses.chunk_by(|a, b| a.storage.address() == b.storage.address()) {
            held.push((same[0].storage, same.iter().any(|used| used.write)));
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

/// How many storages ahead of its turn one is asked for.
const AHEAD: usize = 12;

/// Takes the locks in the order of the list, which has each storage once, sorted by address.
#[inline]
fn lock_all<S: Borrow<Storage>>(held: &[(S, bool)]) {
    for (i, (storage, write)) in held.iter().enumerate() {
        if let Some((later, _)) = held.get(i + AHEAD) {
            later.borrow().prefetch();
        }
        let lock = &storage.borrow().0.lock;
        if *write { lock.lock_exclusive() } else { lock.lock_shared() }
    }
}

/// # Safety
/// `lock_all` took these locks, and they have not been given up since.
#[inline]
unsafe fn unlock_all<S: Borrow<Storage>>(held: &[(S, bool)]) {
    for (i, (storage, write)) in held.iter().enumerate() {
        // The kernel may have swept the caches since the locks were taken.
        if let Some((later, _)) = held.get(i + AHEAD) {
            later.borrow().prefetch();
        }
        let lock = &storage.borrow().0.lock;
        // SAFETY: the caller's promise.
        unsafe { if *write { lock.unlock_exclusive() } else { lock.unlock_shared() } }
    }
}
