//! Counters of the whole process: what compiled functions did since it began, or since `reset()`.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

macro_rules! counters {
    ($($name:ident $kind:ident $text:literal),* $(,)?) => {
        /// What compiled functions did: see [`counters`].
        #[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub struct Counters {
            $(#[doc = $text] pub $name: usize),*
        }

        /// A counter.
        #[derive(Copy, Clone)]
        pub(crate) enum Count {
            $($kind),*
        }

        static COUNTS: [AtomicUsize; [$(stringify!($name)),*].len()] =
            [const { AtomicUsize::new(0) }; [$(stringify!($name)),*].len()];

        /// What compiled functions of this process did so far.
        ///
        /// ```
        /// # fn main() -> kiln_tensor::Result<()> {
        /// # let x = kiln_tensor::Tensor::from_slice(&[1.0f32])?;
        /// let before = kiln_dynamo::counters();
        /// let double = kiln_dynamo::compile(|x: &kiln_tensor::Tensor| x.mul(2.0));
        /// for _ in 0..3 {
        ///     double(&x)?;
        /// }
        /// let done = kiln_dynamo::counters() - before;
        /// assert_eq!((done.calls, done.graphs, done.replays), (3, 1, 2));
        /// # Ok(()) }
        /// ```
        pub fn counters() -> Counters {
            Counters { $($name: COUNTS[Count::$kind as usize].load(Ordering::Relaxed)),* }
        }

        impl std::ops::Sub for Counters {
            type Output = Counters;
            fn sub(self, before: Counters) -> Counters {
                Counters { $($name: self.$name.saturating_sub(before.$name)),* }
            }
        }

        impl fmt::Display for Counters {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                $(writeln!(f, "{:<14}{:>8}  {}", stringify!($name), self.$name, $text)?;)*
                Ok(())
            }
        }
    };
}

counters! {
    calls Call "calls of compiled functions",
    replays Replay "of these, calls that met nothing new",
    eager_calls EagerCall "calls that ran eagerly as a whole",
    graphs Graph "graphs compiled",
    breaks Break "times a value was needed in the middle of a call",
    recompiles Recompile "recordings that went another way than before",
    resizes Resize "known graphs that came with new sizes",
    fallbacks Fallback "times the rest of a call ran eagerly",
    cache_hits CacheHit "kernels found in memory or on disk",
    cache_misses CacheMiss "kernels that had to be compiled",
    refused RefusedKernel "kernels that the C compiler failed on",
}

pub(crate) fn count(what: Count) {
    add(what, 1);
}

pub(crate) fn add(what: Count, many: usize) {
    COUNTS[what as usize].fetch_add(many, Ordering::Relaxed);
}

/// Starts all counters again.
pub(crate) fn reset() {
    COUNTS.iter().for_each(|count| count.store(0, Ordering::Relaxed));
}

thread_local! {
    /// Whether the call in progress on this thread met something new.
    static NEW: Cell<bool> = const { Cell::new(false) };
}

/// A call met something new.
pub(crate) fn note_new() {
    NEW.set(true);
}

/// Whether the call met something new; the next one starts afresh.
pub(crate) fn take_new() -> bool {
    NEW.replace(false)
}
