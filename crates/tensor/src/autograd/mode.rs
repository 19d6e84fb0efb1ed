//! Whether ops are being recorded for differentiation, per thread.

use std::cell::Cell;

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(true) };
}

/// Whether ops leave nodes on the tape now.
#[inline]
pub fn grad_enabled() -> bool {
    ENABLED.get()
}

/// Restores the mode when dropped.
#[must_use = "the mode lasts as long as this value"]
pub struct GradMode {
    previous: bool,
    /// The mode is the thread's.
    _not_send: std::marker::PhantomData<*const ()>,
}

/// No recording until the returned value is dropped.
///
/// ```
/// use kiln_tensor::{Tensor, no_grad};
/// # fn main() -> kiln_tensor::Result<()> {
/// let x = Tensor::from_slice(&[1.0f32])?;
/// x.requires_grad_(true)?;
/// let y = { let _guard = no_grad(); x.exp()? };
/// assert!(!y.requires_grad());
/// # Ok(()) }
/// ```
pub fn no_grad() -> GradMode {
    set(false)
}

/// Recording until the returned value is dropped.
pub fn enable_grad() -> GradMode {
    set(true)
}

fn set(on: bool) -> GradMode {
    GradMode { previous: ENABLED.replace(on), _not_send: std::marker::PhantomData }
}

impl Drop for GradMode {
    fn drop(&mut self) {
        ENABLED.set(self.previous);
    }
}
