//! Stances override what compiled functions do, without touching them: for a service that must not compile
//! while it answers requests, or a debugging session that wants everything eager.

use std::cell::Cell;
use std::sync::atomic::{AtomicU8, Ordering};

use kiln_tensor::hook;

use crate::options::named;

/// What compiled functions do.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default)]
pub enum Stance {
    /// Compile anything new.
    #[default]
    Default,
    /// Run everything eagerly, as if nothing had been compiled.
    ForceEager,
    /// Use compiled code; anything new runs eagerly.
    EagerOnRecompile,
    /// Use compiled code; anything new is an error that says what it is.
    FailOnRecompile,
}
named!(
    Stance,
    "stance",
    Default = "default",
    ForceEager = "force_eager",
    EagerOnRecompile = "eager_on_recompile",
    FailOnRecompile = "fail_on_recompile"
);

thread_local! {
    static THREAD: Cell<Option<Stance>> = const { Cell::new(None) };
}
/// The process's stance, by its number, which is its place in `Stance::ALL`.
static PROCESS: AtomicU8 = AtomicU8::new(0);

const _: () = {
    let mut place = 0;
    while place < Stance::ALL.len() {
        assert!(Stance::ALL[place] as usize == place);
        place += 1;
    }
};

/// Restores the thread's previous stance when dropped. See [`set_stance`].
#[must_use = "the stance lasts as long as this value"]
pub struct StanceGuard {
    previous: Option<Stance>,
    /// It is the thread's.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Drop for StanceGuard {
    fn drop(&mut self) {
        THREAD.set(self.previous);
    }
}

/// Sets the stance of this thread until the returned value is dropped.
///
/// ```
/// use kiln_dynamo::{Stance, compile, set_stance};
/// use kiln_tensor::{Result, Tensor};
/// # fn main() -> Result<()> {
/// let double = compile(|x: &Tensor| x.mul(2.0));
/// double.warm_up((&Tensor::from_slice(&[1.0f32, 2.0])?,))?;
///
/// let _stance = set_stance(Stance::FailOnRecompile);
/// double(&Tensor::from_slice(&[3.0f32, 4.0])?)?; // compiled before
/// double(&Tensor::from_slice(&[1.0f32, 2.0, 3.0])?)?; // other sizes need no compilation
/// let error = double(&Tensor::from_slice(&[1.0f64, 2.0])?).unwrap_err().to_string();
/// assert!(error.starts_with("stance fail_on_recompile: recompile #1 at "));
/// assert!(error.ends_with("input 0 was f32, now f64"));
/// # Ok(()) }
/// ```
pub fn set_stance(stance: Stance) -> StanceGuard {
    StanceGuard { previous: THREAD.replace(Some(stance)), _not_send: std::marker::PhantomData }
}

/// Sets the stance of all threads that have none of their own, until it is set again; returns the previous one.
pub fn set_process_stance(stance: Stance) -> Stance {
    of(PROCESS.swap(stance as u8, Ordering::Relaxed))
}

fn of(place: u8) -> Stance {
    Stance::ALL[usize::from(place)]
}

/// The stance of this thread.
pub fn stance() -> Stance {
    THREAD.get().unwrap_or_else(|| of(PROCESS.load(Ordering::Relaxed)))
}

/// Whether the calling code runs inside a compiled function. The function runs on every call, so this is true
/// on the first call and on all later ones: code that asks takes the same path each time.
///
/// ```
/// use kiln_dynamo::{compile, is_compiling};
/// # fn main() -> kiln_tensor::Result<()> {
/// let f = compile(|| Ok::<_, kiln_tensor::Error>(is_compiling()));
/// assert_eq!((is_compiling(), f()?, f()?), (false, true, true));
/// # Ok(()) }
/// ```
pub fn is_compiling() -> bool {
    hook::with_current(|recorder| recorder.is_some())
}
