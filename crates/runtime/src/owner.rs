//! A lock for data that one thread uses almost always. For that thread, its *owner*, taking the lock is a plain
//! store and a load; the price is paid by the others, who come once in a blue moon.
//!
//! The owner says "I am inside", then looks whether somebody revoked its right; a stranger revokes it, then
//! looks whether the owner is inside. Each must see the other's store, which takes a full fence on both sides,
//! and a full fence costs as much as any lock. Linux lets the stranger pay for both: `membarrier` makes every
//! running thread of the process pass a fence. Where there is no such call, the owner uses a real fence.
//!
//! Only the owner writes `inside`, so a thread must never take itself for the owner by what it read a while ago:
//! an owner gives its right up itself ([`OwnerLock::disown`]), nobody takes it away.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;
use std::sync::atomic::{Ordering, compiler_fence};

pub use crate::sync::this_thread;
use crate::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, fence, yield_now};

/// See the [module](self).
#[derive(Debug, Default)]
pub struct OwnerLock<T> {
    /// The owner's mark (see [`this_thread`]).
    owner: AtomicUsize,
    /// The owner is inside.
    inside: AtomicBool,
    /// A stranger is inside, or about to be.
    revoked: AtomicBool,
    /// Strangers take turns.
    strangers: Mutex<()>,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a guard, and there is one at a time.
unsafe impl<T: Send> Sync for OwnerLock<T> {}

/// Whether strangers can pass a fence on the owner's behalf.
#[cfg(all(target_os = "linux", not(loom)))]
#[inline]
fn has_membarrier() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| {
        // SAFETY: this command takes no pointers; it only registers the process for expedited barriers.
        unsafe {
            libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0
        }
    })
}

#[cfg(any(not(target_os = "linux"), loom))]
fn has_membarrier() -> bool {
    static NEVER: OnceLock<bool> = OnceLock::new();
    *NEVER.get_or_init(|| false)
}

/// A fence for this thread and, if [`has_membarrier`], for every other.
fn heavy_fence() {
    fence(Ordering::SeqCst);
    #[cfg(all(target_os = "linux", not(loom)))]
    if has_membarrier() {
        // SAFETY: this command takes no pointers; the process was registered for it.
        unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) };
    }
}

impl<T> OwnerLock<T> {
    /// A lock around a value; nobody owns it yet.
    pub fn new(value: T) -> OwnerLock<T> {
        OwnerLock {
            owner: AtomicUsize::new(0),
            inside: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            strangers: Mutex::new(()),
            value: UnsafeCell::new(value),
        }
    }

    /// Makes this thread the owner, unless another is. Whether it is the owner now.
    pub fn own(&self) -> bool {
        // A stranger may be inside: the new owner meets it when it takes the lock.
        self.is_own()
            || self.owner.compare_exchange(0, this_thread(), Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Leaves the lock without an owner, if it is this thread's; it must not hold it.
    pub fn disown(&self) {
        if self.is_own() {
            assert!(!self.inside.load(Ordering::Relaxed), "the owner holds the lock");
            self.owner.store(0, Ordering::Release);
        }
    }

    /// Whether this thread is the owner.
    #[inline]
    pub fn is_own(&self) -> bool {
        self.owner.load(Ordering::Relaxed) == this_thread()
    }

    /// Takes the lock, waiting if need be. Panics if the owner holds it already.
    #[inline]
    pub fn lock(&self) -> OwnerGuard<'_, T> {
        if !self.is_own() {
            return self.lock_as_stranger();
        }
        assert!(!self.inside.load(Ordering::Relaxed), "the owner holds the lock already");
        while !self.enter() {
            self.wait_for_strangers();
        }
        OwnerGuard { lock: self, stranger: None, _not_send: std::marker::PhantomData }
    }

    /// Takes the lock if this thread is the owner, does not hold it already and nobody else wants it.
    #[inline]
    pub fn lock_own(&self) -> Option<OwnGuard<'_, T>> {
        if !self.is_own() || self.inside.load(Ordering::Relaxed) {
            return None;
        }
        self.enter().then(|| OwnGuard { lock: self, _not_send: std::marker::PhantomData })
    }

    /// The owner says that it is inside; false if a stranger may be, too.
    #[inline]
    fn enter(&self) -> bool {
        self.inside.store(true, Ordering::Relaxed);
        if has_membarrier() {
            compiler_fence(Ordering::SeqCst)
        } else {
            fence(Ordering::SeqCst)
        }
        let alone = !self.revoked.load(Ordering::Acquire);
        if !alone {
            self.inside.store(false, Ordering::Release);
        }
        alone
    }

    /// Takes the lock unless it is this thread's own and held.
    pub fn lock_unless_inside(&self) -> Option<OwnerGuard<'_, T>> {
        if self.is_own() && self.inside.load(Ordering::Relaxed) { None } else { Some(self.lock()) }
    }

    #[cold]
    fn wait_for_strangers(&self) {
        while self.revoked.load(Ordering::Acquire) {
            yield_now();
        }
    }

    #[cold]
    fn lock_as_stranger(&self) -> OwnerGuard<'_, T> {
        let turn = self.strangers.lock();
        self.revoked.store(true, Ordering::SeqCst);
        heavy_fence();
        while self.inside.load(Ordering::Acquire) {
            yield_now();
        }
        OwnerGuard { lock: self, stranger: Some(turn), _not_send: std::marker::PhantomData }
    }
}

/// The lock, held.
pub struct OwnerGuard<'a, T> {
    lock: &'a OwnerLock<T>,
    /// Set if it is a stranger who holds it.
    stranger: Option<MutexGuard<'a, ()>>,
    /// Given up where it was taken.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl<T> Drop for OwnerGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        match &self.stranger {
            None => self.lock.inside.store(false, Ordering::Release),
            // Before the turn is passed on: the next stranger revokes anew.
            Some(_) => self.lock.revoked.store(false, Ordering::Release),
        }
    }
}

/// The lock, held by its owner.
pub struct OwnGuard<'a, T> {
    lock: &'a OwnerLock<T>,
    /// Given up where it was taken.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl<T> Drop for OwnGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.inside.store(false, Ordering::Release);
    }
}

macro_rules! gives_the_value {
    ($($Guard:ident),*) => { $(
        impl<T> Deref for $Guard<'_, T> {
            type Target = T;
            #[inline]
            fn deref(&self) -> &T {
                // SAFETY: the guard holds the lock.
                unsafe { &*self.lock.value.get() }
            }
        }

        impl<T> DerefMut for $Guard<'_, T> {
            #[inline]
            fn deref_mut(&mut self) -> &mut T {
                // SAFETY: the guard holds the lock, and is borrowed mutably.
                unsafe { &mut *self.lock.value.get() }
            }
        }
    )* };
}
gives_the_value!(OwnerGuard, OwnGuard);

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    /// The cell tells on two threads that touch it at once, and on a reader that need not see the last write.
    fn bump(value: &UnsafeCell<u32>) {
        // SAFETY: the lock is held; if that is not enough, the model says so.
        value.with_mut(|value| unsafe { *value += 1 });
    }

    fn lock() -> Arc<OwnerLock<UnsafeCell<u32>>> {
        Arc::new(OwnerLock::new(UnsafeCell::new(0)))
    }

    fn end(lock: &OwnerLock<UnsafeCell<u32>>, wanted: u32) {
        // SAFETY: as in `bump`.
        lock.lock().with(|value| assert_eq!(unsafe { *value }, wanted));
    }

    #[test]
    fn an_owner_and_a_stranger() {
        loom::model(|| {
            let lock = lock();
            assert!(lock.own());
            let theirs = lock.clone();
            let stranger = thread::spawn(move || bump(&theirs.lock()));
            bump(&lock.lock());
            let second = lock.lock_own().map(|value| bump(&value)).is_some();
            stranger.join().expect("no panic");
            end(&lock, 2 + u32::from(second));
        });
    }

    #[test]
    fn owners_and_a_stranger_while_ownership_moves() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let lock = lock();
            let use_and_leave = |lock: &OwnerLock<UnsafeCell<u32>>| {
                lock.own();
                bump(&lock.lock());
                lock.disown();
            };
            let theirs = lock.clone();
            let other = thread::spawn(move || use_and_leave(&theirs));
            let theirs = lock.clone();
            let stranger = thread::spawn(move || bump(&theirs.lock()));
            use_and_leave(&lock);
            other.join().expect("no panic");
            stranger.join().expect("no panic");
            end(&lock, 3);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn owner_and_strangers_take_turns() {
        let lock = OwnerLock::new([0u64; 2]);
        lock.own();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let mut both = lock.lock();
                        both[0] += 1;
                        both[1] += 1;
                        assert_eq!(both[0], both[1]);
                    }
                });
            }
            for _ in 0..250_000 {
                let mut both = lock.lock();
                both[0] += 1;
                both[1] += 1;
                assert_eq!(both[0], both[1]);
            }
            let mut left = 250_000;
            while left > 0 {
                let Some(mut both) = lock.lock_own() else { continue };
                both[0] += 1;
                both[1] += 1;
                assert_eq!(both[0], both[1]);
                left -= 1;
            }
        });
        assert_eq!(*lock.lock(), [506_000; 2]);
    }

    #[test]
    fn ownership_moves() {
        let lock = OwnerLock::new(1);
        assert!(lock.own() && lock.own());
        let held = lock.lock();
        assert!(lock.lock_unless_inside().is_none() && lock.lock_own().is_none());
        drop(held);
        assert!(lock.lock_unless_inside().is_some());
        let elsewhere = || std::thread::scope(|scope| scope.spawn(|| lock.own()).join().unwrap());
        assert!(!elsewhere(), "an owner is not robbed");
        lock.disown();
        assert!(elsewhere());
        assert!(!lock.is_own() && !lock.own());
        *lock.lock() += 1;
        assert_eq!(*lock.lock(), 2);
    }
}
