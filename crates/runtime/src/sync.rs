//! What the lock-free protocols are made of: the standard library's atomics or, built with `--cfg loom`, those of
//! the model checker, which tries every order in which threads can take their steps and every value that a load
//! may see.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p kiln-runtime -p kiln-tensor --lib loom` runs the models.

#[cfg(not(loom))]
mod real {
    pub use parking_lot::{Mutex, MutexGuard};
    pub use std::sync::atomic::{AtomicBool, AtomicUsize, fence};
    pub use std::thread::yield_now;

    /// Tells threads apart: the address of something only this thread has. Never 0.
    #[inline]
    pub fn this_thread() -> usize {
        thread_local!(static MARK: u8 = const { 0 });
        MARK.with(|mark| std::ptr::from_ref(mark) as usize)
    }
}

#[cfg(not(loom))]
pub use real::{AtomicBool, AtomicUsize, Mutex, MutexGuard, fence, this_thread, yield_now};

#[cfg(loom)]
mod model {
    pub use loom::sync::MutexGuard;
    pub use loom::sync::atomic::{AtomicBool, AtomicUsize, fence};
    pub use loom::thread::yield_now;

    /// The model's mutex, which is never poisoned.
    #[derive(Debug, Default)]
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        /// A mutex around a value.
        pub fn new(value: T) -> Mutex<T> {
            Mutex(loom::sync::Mutex::new(value))
        }

        /// Takes the lock.
        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
        }
    }

    /// Tells the model's threads apart. Never 0.
    pub fn this_thread() -> usize {
        loom::thread_local!(static MARK: Box<u8> = Box::new(0));
        MARK.with(|mark| std::ptr::from_ref::<u8>(mark) as usize)
    }
}

#[cfg(loom)]
pub use model::{AtomicBool, AtomicUsize, Mutex, MutexGuard, fence, this_thread, yield_now};
