//! Gradients where something is changed in place: leaves, inputs, intermediates, gradients themselves.

use kiln_dynamo::{Backend, Compile};
use kiln_tensor::{Error, Result, Tensor, foreach, no_grad};

use crate::lab::{CPU, as_eager, leaf, t, turn};

#[test]
fn a_gradient_is_read_and_changed_inside() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        for _ in 0..3 {
            w.set_grad(None);
            let norm = lab.run(|| {
                (&w * &w).ok()?.sum()?.backward()?;
                let grad = w.grad().unwrap();
                let norm = grad.mul(&grad)?.sum()?.sqrt()?;
                grad.div_(&norm)?;
                let _guard = no_grad();
                w.add_scaled_(&grad, -0.5)?;
                Ok(norm)
            })?;
            lab.see("norm", &norm)?;
            lab.see("w", &w)?;
            lab.see_grad("gradient", &w)?;
        }
        Ok(())
    })
}

#[test]
fn a_leaf_is_changed_and_used_again() -> Result<()> {
    as_eager(|lab| {
        let (w, x) = (leaf(&[1.0, 2.0]), t(&[0.5, 0.25]));
        for _ in 0..3 {
            w.set_grad(None);
            let (first, second) = lab.run(|| {
                let first = (&w * &x).ok()?.sum()?;
                first.backward()?;
                {
                    let _guard = no_grad();
                    w.add_scaled_(&w.grad().unwrap(), -0.5)?;
                }
                let second = (&w * &w).ok()?.sum()?;
                second.backward()?;
                Ok((first, second))
            })?;
            lab.see("first", &first)?;
            lab.see("second", &second)?;
            lab.see_grad("w", &w)?;
            lab.see("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn an_intermediate_is_changed() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        for k in [1.0, 2.0] {
            w.set_grad(None);
            lab.run(|| {
                let y = (&w * 2.0).ok()?;
                y.add_(k)?; // with gradients
                y.mul_(&w)?;
                y.sum()?.backward()
            })?;
            lab.see_grad("recorded", &w)?;
            w.set_grad(None);
            lab.run(|| {
                let y = (&w * 2.0).ok()?;
                {
                    let _guard = no_grad();
                    y.mul_(10.0)?; // the values change, the history does not
                }
                (&y * 3.0).ok()?.sum()?.backward()
            })?;
            lab.see_grad("not recorded", &w)?;
            w.set_grad(None);
            let y = lab.run(|| {
                let buffer = Tensor::zeros([2], &CPU)?;
                buffer.add_(&(&w * 4.0).ok()?)?;
                Ok(buffer)
            })?;
            lab.say("flag", y.requires_grad());
            y.sum()?.backward()?;
            lab.see_grad("buffer", &w)?;
        }
        Ok(())
    })
}

#[test]
fn an_input_gets_a_history_inside() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        for direct in [true, false, true, false] {
            w.set_grad(None);
            let buffer = t(&[1.0, 1.0]);
            lab.run(|| {
                if direct { buffer.add_(&w).map(drop) } else { buffer.add_(&(&w * 2.0).ok()?).map(drop) }
            })?;
            lab.say("flags", format!("{} {}", buffer.requires_grad(), buffer.is_leaf()));
            (&buffer * 3.0).ok()?.sum()?.backward()?;
            lab.see("buffer", &buffer)?;
            lab.see_grad("w", &w)?;
            lab.see_grad("the buffer's own", &buffer)?;
        }
        Ok(())
    })
}

#[test]
fn an_input_needed_by_backward_is_overwritten() -> Result<()> {
    as_eager(|lab| {
        let (w, x) = (leaf(&[1.0, 2.0]), t(&[3.0, 4.0]));
        // Overwritten between the call and backward: an error, as in eager.
        let y = lab.run(|| (&w * &x).ok())?;
        x.add_(1.0)?;
        lab.outcome(
            "after the call",
            y.sum()?.backward().map_err(|error| match error.why() {
                Some(kiln_ir::Why::Version { .. }) => Error::State("version".into()),
                _ => error,
            }),
        );
        lab.see_grad("w", &w)
    })?;
    // Overwritten inside: eager refuses; compiled may keep the old value, but must not use the new one.
    for &backend in Backend::ALL {
        let _turn = turn();
        let region = Compile::new().backend(backend).region();
        let (w, x) = (leaf(&[1.0, 2.0]), t(&[3.0, 4.0]));
        let y = region.run(|| {
            let y = (&w * &x).ok()?;
            x.add_(1.0)?;
            Ok::<_, Error>(y)
        })?;
        if y.sum()?.backward().is_ok() {
            assert_eq!(w.grad().unwrap().to_vec::<f32>()?, [3.0, 4.0], "{backend}");
        }
    }
    Ok(())
}

#[test]
fn a_leaf_is_changed_and_the_result_leaves() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, -2.0, 3.0]);
        for _ in 0..2 {
            let y = lab.run(|| {
                {
                    let _guard = no_grad();
                    w.maximum_(-1.0)?; // clipped before it is used
                }
                w.exp()
            })?;
            y.sum()?.backward()?;
            lab.see_grad("w", &w)?;
        }
        // Through views that are not recorded: the leaf's gradient counts once.
        w.set_grad(None);
        lab.run(|| {
            let part = {
                let _guard = no_grad();
                w.slice(0, 0, 2, 1)?
            };
            part.mul_(2.0)?;
            w.detach()?.slice(0, 1, 2, 1)?.add_(1.0)?;
            (&w * &w).ok()?.sum()?.backward()
        })?;
        lab.see("w", &w)?;
        lab.see_grad("w", &w)
    })
}

#[test]
fn an_intermediate_is_changed_behind_the_tapes_back() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        for _ in 0..2 {
            let y = lab.run(|| {
                let y = w.add(1.0)?;
                y.detach()?.mul_(10.0)?;
                foreach::add_(&Tensor::list([&y.detach()?]), 1.0)?;
                Ok(y)
            })?;
            lab.see("y", &y)?;
            y.sum()?.backward()?;
            lab.see_grad("w", &w)?;
            let z = lab.run(|| {
                let view = {
                    let _guard = no_grad();
                    w.add(1.0)?;
                    w.reshape([2, 1])?
                };
                view.reshape([1, 2])?.mul(2.0)
            })?;
            lab.say("a view of a view that is not recorded", z.requires_grad());
        }
        Ok(())
    })
}

#[test]
fn comparisons_in_place_end_the_gradient() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        for _ in 0..2 {
            let y = lab.run(|| {
                let y = w.mul(2.0)?;
                y.gt_(3.0)?;
                y.add(1.0)
            })?;
            lab.see("y", &y)?;
            y.sum()?.backward()?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn what_was_read_before_a_change_has_its_own_history() -> Result<()> {
    as_eager(|lab| {
        let (a, b) = (leaf(&[1.0, 2.0]), leaf(&[3.0, 4.0]));
        lab.run(|| {
            let y = a.mul(2.0)?;
            let sum = y.sum()?;
            y.copy_(&b)?;
            sum.backward()
        })?;
        lab.see_grad("read", &a)?;
        lab.say("b was not read", b.grad().is_none());
        Ok(())
    })
}

#[test]
fn an_expanded_result_stays_expanded() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        let wide = lab.run(|| w.exp()?.expand([3, 2]))?;
        let _mode = no_grad();
        lab.say("changed in place", wide.detach()?.add_(1.0).is_err());
        lab.see("values", &wide)
    })
}
