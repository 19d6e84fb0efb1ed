//! Gradients: inside, outside, both; accumulated, cut off, refused.

use kiln_dynamo::Backend;
use kiln_tensor::{Result, Tensor, TensorList, foreach, no_grad};

use crate::lab::{CPU, as_eager, check, leaf, matrix, reason, t, training_step};

#[test]
fn a_training_step() -> Result<()> {
    let explanations = check(|lab| {
        let params = [matrix(6, 4), t(&[0.1; 6]), matrix(3, 6)];
        for p in &params {
            p.requires_grad_(true)?;
        }
        let momenta: TensorList = params.iter().map(|p| p.detach().unwrap().mul(0.0).unwrap()).collect();
        let (x, y) = (matrix(5, 4), Tensor::from_slice(&[0i64, 1, 2, 1, 1])?);
        for _ in 0..5 {
            lab.see("loss", &lab.run(|| training_step(&params, &momenta, &x, &y, false))?)?;
        }
        params.iter().try_for_each(|p| lab.see("parameter", p))
    })?;
    for (backend, explanation) in explanations {
        assert_eq!(explanation.graphs.len(), 1, "{explanation}");
        assert!(explanation.recompiles.is_empty() && explanation.breaks.is_empty(), "{explanation}");
        assert!(backend == Backend::Eager || explanation.graphs[0].interpreted.is_none(), "{explanation}");
    }
    Ok(())
}

#[test]
fn gradients_are_none_and_then_accumulate() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        let x = t(&[3.0, 4.0]);
        let mut seen = Vec::new();
        for round in 0..7 {
            if round == 3 {
                w.set_grad(None);
            }
            if round == 5 {
                w.grad().unwrap().zero_()?;
            }
            lab.run(|| (&w * &x).ok()?.sum()?.backward())?;
            lab.see_grad("accumulated", &w)?;
            seen.push(w.grad().unwrap());
        }
        // One tensor from None on, in place.
        lab.say(
            "the same tensor",
            seen[0].same(&seen[1]) && seen[1].same(&seen[2]) && !seen[2].same(&seen[3]),
        );
        for grad in seen {
            lab.see("kept", &grad)?;
        }
        Ok(())
    })
}

#[test]
fn two_backward_passes_in_one_call() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        for round in 0..3 {
            let (first, second) = lab.run(|| {
                (&w * 3.0).ok()?.sum()?.backward()?;
                let first = w.grad();
                if round > 0 {
                    w.set_grad(None); // zero_grad in between
                }
                (&w * &w).ok()?.sum()?.backward()?;
                Ok((first.unwrap(), w.grad().unwrap()))
            })?;
            lab.see("first", &first)?;
            lab.see("second", &second)?;
            lab.say("the same tensor", first.same(&second));
            lab.see_grad("w", &w)?;
        }
        // An error after both: the interpreter gives eager's gradients.
        w.set_grad(None);
        let outcome = lab.run(|| {
            (&w * 5.0).ok()?.sum()?.backward()?;
            w.set_grad(None);
            (&w * 7.0).ok()?.sum()?.backward()?;
            w.mm(&w)
        });
        lab.outcome("error", outcome);
        lab.see_grad("w", &w)?;
        let existing = w.grad().unwrap();
        let outcome = lab.run(|| {
            (&w * 5.0).ok()?.sum()?.backward()?;
            w.set_grad(None);
            (&w * 7.0).ok()?.sum()?.backward()?;
            w.mm(&w)
        });
        lab.outcome("error", outcome);
        lab.see("existing", &existing)?;
        lab.see_grad("w", &w)
    })
}

#[test]
fn the_tape_goes_on_outside() -> Result<()> {
    as_eager(|lab| {
        let (a, b) = (leaf(&[1.0, 2.0]), leaf(&[0.5, -1.0]));
        for round in 0..3 {
            let outer = (&a * 3.0).tanh().ok()?; // not a leaf
            lab.run(|| (&outer * &b).ok()?.sum()?.backward())?;
            lab.see_grad("a", &a)?;
            lab.see_grad("b", &b)?;
            // Its tape is used up now.
            lab.outcome("once more", lab.run(|| (&outer * &b).ok()?.sum()?.backward()));
            lab.see_grad("b", &b)?;
            if round == 1 {
                a.set_grad(None);
                b.set_grad(None);
            }
        }
        Ok(())
    })
}

#[test]
fn backward_of_something_made_outside() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        for _ in 0..2 {
            let loss = (&w * &w).ok()?.sum()?;
            let y = lab.run(|| {
                let y = w.mul(2.0)?;
                loss.backward()?;
                w.grad().unwrap().add(&y)
            })?;
            lab.see("y", &y)?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn backward_outside() -> Result<()> {
    as_eager(|lab| {
        let (w, b) = (matrix(3, 4), t(&[0.1, 0.2, 0.3]));
        w.requires_grad_(true)?;
        b.requires_grad_(true)?;
        let x = matrix(5, 4);
        for k in [1.0, 2.0] {
            let (y, z) = lab.run(|| {
                let y = (x.linear(&w, Some(&b))? * k).gelu().ok()?;
                Ok((y.clone(), y.log_softmax(-1)?))
            })?;
            lab.say("flags", format!("{} {} {}", y.requires_grad(), y.is_leaf(), z.requires_grad()));
            (&y.sum()? + &z.select(0, 1)?.sum()?).ok()?.backward()?;
            lab.see_grad("w", &w)?;
            lab.see_grad("b", &b)?;
        }
        Ok(())
    })
}

#[test]
fn only_one_of_two_results_is_differentiated() -> Result<()> {
    as_eager(|lab| {
        let (w, v) = (leaf(&[1.0, 2.0]), leaf(&[3.0, 4.0]));
        for _ in 0..2 {
            let (y, _z) = lab.run(|| Ok(((&w * 2.0).exp().ok()?, (&v * 3.0).ok()?)))?;
            y.sum()?.backward()?;
            lab.see_grad("w", &w)?;
            lab.see_grad("v", &v)?;
        }
        Ok(())
    })
}

#[test]
fn backward_twice_needs_retain_graph() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        for _ in 0..2 {
            lab.outcome(
                "twice inside",
                lab.run(|| {
                    let loss = (&w * &w).ok()?.sum()?;
                    loss.backward()?;
                    loss.backward()
                })
                .map_err(reason),
            );
            lab.see_grad("w", &w)?;
            lab.outcome(
                "retained",
                lab.run(|| {
                    let loss = (&w * &w).ok()?.sum()?;
                    loss.backward_with(None, true)?;
                    loss.backward()
                }),
            );
            lab.see_grad("w", &w)?;
            let loss = lab.run(|| {
                let loss = (&w * &w).ok()?.sum()?;
                loss.backward()?;
                Ok(loss)
            })?;
            lab.outcome("inside, then outside", loss.backward().map_err(reason));
            lab.see_grad("w", &w)?;
            let loss = lab.run(|| (&w * &w).ok()?.sum())?;
            loss.backward_with(None, true)?;
            loss.backward()?;
            lab.see_grad("w", &w)?;
            lab.outcome("three times outside", loss.backward().map_err(reason));
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn gradients_given_by_the_user() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        for k in [1.0f32, 5.0] {
            let seed = t(&[k, -1.0]);
            lab.run(|| (&w * &w).ok()?.backward_with(Some(&seed), false))?;
            lab.see_grad("w", &w)?;
            lab.run(|| {
                let y = (&w * 3.0).ok()?;
                y.backward_with(Some(&seed.mul(2.0)?), false)
            })?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn no_grad_and_detach() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        for recording in [true, false, true] {
            w.set_grad(None);
            let (y, z) = lab.run(|| {
                let scale = {
                    let _guard = no_grad();
                    w.exp()?
                };
                let y = (&w * &scale + &w.detach()?).ok()?;
                let z = if recording {
                    y.mul(2.0)?
                } else {
                    let _guard = no_grad();
                    y.mul(2.0)?
                };
                y.sum()?.backward_with(None, true)?;
                Ok((y, z))
            })?;
            lab.say("flags", format!("{} {}", y.requires_grad(), z.requires_grad()));
            lab.see_grad("w", &w)?;
        }
        // A call inside no_grad, and one outside.
        let y = {
            let _guard = no_grad();
            lab.run(|| w.mul(2.0))?
        };
        lab.say("inside", y.requires_grad());
        lab.say("outside", lab.run(|| w.mul(2.0))?.requires_grad());
        Ok(())
    })
}

#[test]
fn a_leaf_is_made_inside() -> Result<()> {
    as_eager(|lab| {
        for k in [1.0, 2.0] {
            let w = lab.run(|| {
                let w = Tensor::full([2], k, &CPU)?;
                w.requires_grad_(true)?;
                (&w * &w).ok()?.sum()?.backward()?;
                Ok(w)
            })?;
            lab.say("flags", format!("{} {}", w.requires_grad(), w.is_leaf()));
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn requires_grad_changes_between_calls() -> Result<()> {
    as_eager(|lab| {
        let w = t(&[1.0, 2.0]);
        for on in [false, true, false, true] {
            w.requires_grad_(on)?;
            let y = lab.run(|| (&w * 2.0).ok())?;
            lab.say("flag", y.requires_grad());
            w.requires_grad_(false)?;
            let y = lab.run(|| {
                let y = w.mul(2.0)?;
                w.requires_grad_(on)?;
                Ok((y, w.mul(3.0)?))
            })?;
            lab.say("flags", format!("{} {}", y.0.requires_grad(), y.1.requires_grad()));
        }
        Ok(())
    })
}

#[test]
fn what_is_not_asked_for_makes_no_nan() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[-1.0, 4.0]);
        for _ in 0..2 {
            // The derivative of the root is NaN at −1; nobody asks for it.
            let (y, root) = lab.run(|| Ok(((&w * 2.0).ok()?, w.sqrt()?)))?;
            y.sum()?.backward()?;
            lab.see_grad("w", &w)?;
            lab.say("root", root.requires_grad());
            // Tapes that have nothing in common are used up one by one.
            let v = leaf(&[1.0, 2.0]);
            let (a, b) = lab.run(|| Ok(((&w * 3.0).ok()?, (&v * &v).ok()?)))?;
            a.sum()?.backward()?;
            b.sum()?.backward()?;
            lab.see_grad("w", &w)?;
            lab.see_grad("v", &v)?;
            lab.outcome("again", b.sum()?.backward().map_err(reason));
        }
        Ok(())
    })
}

#[test]
fn gradients_through_lists() -> Result<()> {
    as_eager(|lab| {
        let (a, b) = (leaf(&[1.0, 2.0]), leaf(&[3.0]));
        for k in [2.0, 3.0] {
            let list = lab.run(|| foreach::mul(&Tensor::list([&a, &b]), k))?;
            for y in list.items()? {
                lab.say("flag", y.requires_grad());
                y.sum()?.backward()?;
            }
            lab.see_grad("a", &a)?;
            lab.see_grad("b", &b)?;
        }
        Ok(())
    })
}

#[test]
fn a_second_backward_through_the_tape_outside_adds_to_the_same_leaf() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        let outside = w.mul(3.0)?;
        lab.run(|| {
            w.sum()?.backward()?;
            w.set_grad(None);
            outside.sum()?.backward()
        })?;
        lab.see_grad("of the second alone", &w)
    })
}
