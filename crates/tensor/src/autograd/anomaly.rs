//! Finding the op whose gradient is not a number.

use std::cell::Cell;

use kiln_ir::{Error, Loc, Op, Result, Why};

use crate::Tensor;
use crate::dispatch::execute_tensor;
use crate::hook::Arg;

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
}

/// Ends the search when dropped.
#[must_use = "the search lasts as long as this value"]
pub struct AnomalyMode {
    previous: bool,
    /// The mode is the thread's.
    _not_send: std::marker::PhantomData<*const ()>,
}

/// Until the returned value is dropped, a backward pass on this thread stops at the first op that makes NaN
/// out of gradients that had none, and names it with its line. Slow: for looking for a mistake.
///
/// ```
/// use kiln_tensor::{Tensor, detect_anomaly};
/// # fn main() -> kiln_tensor::Result<()> {
/// let x = Tensor::from_slice(&[0.0f32])?;
/// x.requires_grad_(true)?;
/// let _search = detect_anomaly();
/// let error = x.sqrt()?.mul(0.0)?.sum()?.backward().unwrap_err();
/// assert!(error.to_string().contains("sqrt"), "{error}");
/// # Ok(()) }
/// ```
pub fn detect_anomaly() -> AnomalyMode {
    AnomalyMode { previous: ON.replace(true), _not_send: std::marker::PhantomData }
}

impl Drop for AnomalyMode {
    fn drop(&mut self) {
        ON.set(self.previous);
    }
}

/// Fails if a gradient that the op called `name` made has NaN.
pub(super) fn check(name: &str, grads: &[Option<Tensor>], loc: Loc) -> Result<()> {
    if !ON.get() {
        return Ok(());
    }
    for grad in grads.iter().flatten() {
        let differs = execute_tensor(&Op::Ne {}, &[Arg::Tensor(grad), Arg::Tensor(grad)], loc)?;
        let dims = (0..grad.rank()).collect();
        let count = execute_tensor(&Op::Sum { dims, keepdim: false }, &[Arg::Tensor(&differs)], loc)?;
        if count.item::<i64>()? > 0 {
            return Err(Error::op(&format!("backward of {name}"), Why::NanGradient, loc));
        }
    }
    Ok(())
}
