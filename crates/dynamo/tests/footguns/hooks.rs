//! Hooks, retained gradients, gradients by request: user code and tapes that a compiled program must not skip.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_tensor::{GradOptions, Result, grad};

use crate::lab::{as_eager, check, leaf, one_graph, t};

#[test]
fn a_hook_on_a_parameter_runs_on_every_call() -> Result<()> {
    one_graph(check(|lab| {
        let (w, x) = (leaf(&[1.0, -2.0]), t(&[3.0, 4.0]));
        let calls = Arc::new(AtomicUsize::new(0));
        let step = || {
            w.set_grad(None);
            lab.run(|| (&w * &x).tanh().ok()?.sum()?.backward())?;
            lab.see_grad("gradient", &w)
        };
        step()?;
        let count = calls.clone();
        let handle = w.register_hook(move |grad| {
            count.fetch_add(1, Ordering::Relaxed);
            grad.mul(2.0).map(Some)
        })?;
        for _ in 0..3 {
            step()?;
        }
        handle.remove();
        step()?;
        lab.say("calls", calls.load(Ordering::Relaxed));
        Ok(())
    })?);
    Ok(())
}

#[test]
fn a_hook_set_inside() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, -2.0]);
        for round in 1..4 {
            w.set_grad(None);
            lab.run(|| {
                let hidden = w.exp()?;
                hidden.register_hook(move |grad| grad.mul(round).map(Some))?;
                hidden.mul(3.0)?.sum()?.backward()
            })?;
            lab.see_grad("gradient", &w)?;
        }
        Ok(())
    })
}

#[test]
fn a_hook_and_a_retained_gradient_set_after_the_tensor_was_used() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, -2.0]);
        for round in 1..5 {
            w.set_grad(None);
            let (loss, kept) = lab.run(|| {
                let (hidden, kept) = (w.exp()?, w.tanh()?);
                let (used, also) = (hidden.mul(3.0)?, kept.mul(2.0)?);
                hidden.register_hook(move |grad| grad.mul(round).map(Some))?;
                kept.retain_grad()?;
                let loss = (used + also + hidden.mul(2.0)?).ok()?.sum()?;
                if round % 2 == 0 {
                    loss.backward_with(None, true)?;
                }
                Ok((loss, kept))
            })?;
            loss.backward()?;
            lab.see_grad("gradient", &w)?;
            lab.see_grad("kept", &kept)?;
        }
        Ok(())
    })
}

#[test]
fn a_retained_gradient() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, -2.0]);
        for _ in 0..3 {
            let hidden = lab.run(|| {
                let hidden = w.exp()?;
                hidden.retain_grad()?;
                hidden.mul(&hidden)?.sum()?.backward()?;
                Ok(hidden)
            })?;
            lab.see_grad("hidden", &hidden)?;
            lab.see_grad("leaf", &w)?;
        }
        Ok(())
    })
}

#[test]
fn gradients_by_request_inside_and_outside() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[0.5, -2.0]);
        for _ in 0..3 {
            let inside = lab.run(|| {
                let y = (w.exp()? * &w).ok()?.sum()?;
                grad(&[&y], &[&w], &[], GradOptions::default())
            })?;
            lab.see("inside", inside[0].as_ref().expect("y depends on w"))?;
            let y = lab.run(|| (w.exp()? * &w).ok()?.sum())?;
            let outside = grad(&[&y], &[&w], &[], GradOptions::default())?;
            lab.see("outside", outside[0].as_ref().expect("y depends on w"))?;
            lab.see_grad("untouched", &w)?;
        }
        Ok(())
    })
}
