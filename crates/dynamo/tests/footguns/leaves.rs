//! Leaves made inside a compiled program, leaves told otherwise in the middle of it, gradients retained and passes
//! from several tensors: all of it is part of the graph.

use kiln_tensor::{GradOptions, Result, Tensor, TensorList, backward_all, foreach, grad, no_grad};

use crate::lab::{as_eager, check, leaf, matrix, one_graph, t};

#[test]
fn an_adversarial_example() -> Result<()> {
    one_graph(check(|lab| {
        let (w, x) = (leaf(&[1.0, -2.0, 0.5]), t(&[0.3, 0.1, -0.4]));
        for round in 1..5 {
            w.set_grad(None);
            let reach = 0.1 * f64::from(round);
            let near = lab.run(|| {
                let z = x.detach()?;
                z.requires_grad_(true)?;
                assert!(z.is_leaf() && z.requires_grad());
                (&z * &w).tanh().ok()?.sum()?.backward()?;
                let step = z.grad().expect("z is a leaf").sign()?.mul(reach)?;
                x.add(&step)
            })?;
            lab.see("near", &near)?;
            lab.see_grad("w", &w)?;
            lab.see_grad("x", &x)?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn steps_of_a_leaf_that_is_changed_in_place() -> Result<()> {
    one_graph(check(|lab| {
        let (w, x) = (matrix(3, 3), matrix(2, 3));
        for _ in 0..3 {
            let z = lab.run(|| {
                let z = x.clone_tensor()?;
                z.requires_grad_(true)?;
                for _ in 0..3 {
                    z.set_grad(None);
                    z.mm(&w)?.tanh()?.sum()?.backward()?;
                    let _guard = no_grad();
                    z.add_(&z.grad().expect("z is a leaf").sign()?.mul(0.1)?)?;
                }
                Ok(z)
            })?;
            lab.say("leaf", format!("{:?}", (z.is_leaf(), z.requires_grad())));
            lab.see("z", &z)?;
            lab.see_grad("z.grad", &z)?;
            lab.see("x", &x)?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn a_leaf_that_shares_the_memory_of_an_input() -> Result<()> {
    as_eager(|lab| {
        let x = t(&[1.0, 2.0, 3.0]);
        for _ in 0..3 {
            let z = lab.run(|| {
                let z = x.detach()?;
                z.requires_grad_(true)?;
                z.mul(3.0)?.sum()?.backward()?;
                x.add_(1.0)?;
                z.mul(5.0)?.sum()?.backward()?;
                Ok(z)
            })?;
            lab.see_grad("both", &z)?;
            x.mul_(2.0)?;
            lab.see("z", &z)?;
        }
        Ok(())
    })
}

#[test]
fn what_was_computed_before_has_no_history() -> Result<()> {
    as_eager(|lab| {
        let (w, x) = (leaf(&[2.0, 3.0]), t(&[1.0, 4.0]));
        for _ in 0..3 {
            w.set_grad(None);
            let (before, z) = lab.run(|| {
                let z = x.mul(2.0)?;
                let (before, view) = (z.mul(&w)?, z.unsqueeze(0)?);
                z.requires_grad_(true)?;
                let after = z.mul(&w)?;
                (&before + &after + view.squeeze(0)? * 7.0).ok()?.sum()?.backward()?;
                Ok((before, z))
            })?;
            lab.see_grad("z", &z)?;
            lab.see_grad("w", &w)?;
            lab.see("before", &before)?;
        }
        Ok(())
    })
}

#[test]
fn parameters_frozen_for_a_part_of_a_step() -> Result<()> {
    one_graph(check(|lab| {
        let (critic, maker) = (leaf(&[0.5, -1.0]), leaf(&[1.5, 0.2]));
        let x = t(&[0.7, 0.9]);
        for _ in 0..4 {
            critic.set_grad(None);
            maker.set_grad(None);
            lab.run(|| {
                let made = (&maker * &x).tanh().ok()?;
                (made.detach()? * &critic).ok()?.sum()?.backward()?;
                critic.requires_grad_(false)?;
                (&made * &critic).ok()?.exp()?.sum()?.backward()?;
                critic.requires_grad_(true).map(drop)
            })?;
            lab.see_grad("critic", &critic)?;
            lab.see_grad("maker", &maker)?;
            lab.say("flag", critic.requires_grad());
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn a_leaf_and_its_tape_that_leave() -> Result<()> {
    as_eager(|lab| {
        let x = t(&[1.0, -2.0]);
        for _ in 0..4 {
            let (z, y) = lab.run(|| {
                let z = x.mul(0.5)?;
                z.requires_grad_(true)?;
                let y = z.exp()?.sum()?;
                Ok((z, y))
            })?;
            lab.say("leaf", format!("{:?}", (z.is_leaf(), y.is_leaf())));
            y.backward()?;
            lab.see_grad("z", &z)?;
        }
        Ok(())
    })
}

#[test]
fn what_may_be_told() -> Result<()> {
    as_eager(|lab| {
        let (w, x) = (leaf(&[1.0, -2.0]), t(&[1.0, 3.0]));
        for _ in 0..3 {
            lab.run(|| {
                let z = w.mul(&x)?;
                lab.outcome("a result", z.requires_grad_(false));
                lab.outcome("integers", x.gt(2.0)?.requires_grad_(true));
                let fresh = x.mul(2.0)?;
                lab.outcome("nothing to retain", fresh.retain_grad());
                fresh.requires_grad_(true)?;
                lab.outcome("a leaf", fresh.retain_grad());
                lab.outcome("in place", fresh.add_(1.0));
                fresh.requires_grad_(false)?;
                lab.outcome("in place", fresh.add_(1.0));
                lab.see("fresh", &fresh)
            })?;
        }
        Ok(())
    })
}

#[test]
fn a_retained_gradient_is_part_of_the_graph() -> Result<()> {
    one_graph(check(|lab| {
        let w = leaf(&[1.0, -2.0]);
        for _ in 0..3 {
            w.set_grad(None);
            let (hidden, twice) = lab.run(|| {
                let hidden = w.exp()?;
                hidden.retain_grad()?;
                let middle = hidden.mul(3.0)?;
                middle.retain_grad()?;
                middle.mul(&hidden)?.sum()?.backward()?;
                let twice = middle.grad().expect("it is retained").mul(2.0)?;
                Ok((hidden, twice))
            })?;
            lab.see_grad("hidden", &hidden)?;
            lab.see("twice", &twice)?;
            lab.see_grad("leaf", &w)?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn a_gradient_retained_by_several_passes() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, -2.0]);
        for _ in 0..3 {
            let hidden = lab.run(|| {
                let hidden = w.exp()?;
                hidden.retain_grad()?;
                let sum = hidden.mul(&hidden)?.sum()?;
                sum.backward_with(None, true)?;
                let asked = grad(
                    &[&sum],
                    &[&w],
                    &[],
                    GradOptions { retain_graph: Some(true), ..Default::default() },
                )?;
                lab.see("asked", asked[0].as_ref().expect("it depends on w"))?;
                sum.backward()?;
                hidden.set_grad(None);
                lab.say("none", hidden.grad().is_none());
                hidden.mul(2.0)?.sum().map(drop)?;
                Ok(hidden)
            })?;
            lab.see_grad("hidden", &hidden)?;
            lab.see_grad("leaf", &w)?;
        }
        Ok(())
    })
}

#[test]
fn a_gradient_retained_for_a_pass_outside() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[0.5, -2.0]);
        for _ in 0..4 {
            w.set_grad(None);
            let (hidden, loss) = lab.run(|| {
                let hidden = w.exp()?;
                hidden.retain_grad()?;
                let loss = hidden.mul(&hidden)?.sum()?;
                Ok((hidden, loss))
            })?;
            loss.backward()?;
            lab.see_grad("hidden", &hidden)?;
            lab.see_grad("leaf", &w)?;
        }
        Ok(())
    })
}

#[test]
fn a_view_and_a_changed_tensor_that_are_retained() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[0.5, -2.0, 1.0, 3.0]);
        for _ in 0..3 {
            w.set_grad(None);
            let kept = lab.run(|| {
                let hidden = w.exp()?;
                let view = hidden.reshape([2, 2])?;
                view.retain_grad()?;
                let changed = w.mul(2.0)?;
                changed.retain_grad()?;
                changed.mul_(&w)?;
                (view.sum()? + changed.sum()?).ok()?.backward()?;
                Ok((view, changed))
            })?;
            lab.see_grad("view", &kept.0)?;
            lab.see_grad("changed", &kept.1)?;
            lab.see_grad("leaf", &w)?;
        }
        Ok(())
    })
}

#[test]
fn a_changed_tensor_that_is_retained_and_leaves() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[0.5, -2.0, 1.0, 3.0]);
        for _ in 0..3 {
            w.set_grad(None);
            let kept = lab.run(|| {
                let changed = w.mul(2.0)?;
                changed.retain_grad()?;
                changed.div_(&changed)?;
                Ok(changed)
            })?;
            kept.sum()?.backward()?;
            lab.see_grad("changed", &kept)?;
            lab.see_grad("leaf", &w)?;
        }
        Ok(())
    })
}

#[test]
fn a_leaf_that_was_let_go_is_changed_twice() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, -2.0, 3.0]);
        for _ in 0..3 {
            w.set_grad(None);
            lab.run(|| {
                let x = w.detach()?.mul(2.0)?;
                x.requires_grad_(true)?;
                x.requires_grad_(false)?;
                x.maximum_(&w)?;
                x.mul_(&w)?;
                x.sum()?.backward()
            })?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

/// A leaf that an optimizer changed as one of a list: what is computed from it after `backward` has a tape of its own.
#[test]
fn a_leaf_of_a_changed_list_is_used_on() -> Result<()> {
    as_eager(|lab| {
        let (w, step) = (leaf(&[1.0, -2.0, 3.0]), t(&[0.5, 0.5, 0.25]));
        for _ in 0..3 {
            w.set_grad(None);
            let y = lab.run(|| {
                {
                    let _off = no_grad();
                    foreach::sub_(&TensorList::new(vec![w.clone()]), &TensorList::new(vec![step.clone()]))?;
                }
                w.sum()?.backward()?;
                step.div(&w)
            })?;
            y.sum()?.backward()?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn several_losses_at_once() -> Result<()> {
    one_graph(check(|lab| {
        let (w, v) = (leaf(&[1.0, -2.0]), leaf(&[0.5, 0.25]));
        for round in 1..4 {
            if round == 3 {
                w.set_grad(None);
            }
            lab.run(|| {
                let hidden = (&w * &v).tanh().ok()?;
                let (first, second) = (hidden.sum()?, hidden.mul(&w)?);
                let weight = t(&[1.0, 2.0]).mul(round)?;
                backward_all(&[&first, &second], &[None, Some(&weight)], GradOptions::default())
            })?;
            lab.see_grad("w", &w)?;
            lab.see_grad("v", &v)?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn several_losses_some_from_outside() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, -2.0]);
        for _ in 0..3 {
            let outside = w.exp()?.sum()?;
            lab.run(|| {
                let inside = w.mul(3.0)?.sum()?;
                backward_all(&[&inside, &outside], &[], GradOptions::default())
            })?;
            lab.see_grad("w", &w)?;
            lab.outcome(
                "again",
                lab.run(|| {
                    let sum = w.exp()?.sum()?;
                    backward_all(&[&sum, &sum], &[None], GradOptions::default())
                }),
            );
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn a_penalty_on_the_gradient_by_backward_alone() -> Result<()> {
    as_eager(|lab| {
        let (w, x) = (leaf(&[1.0, -2.0]), t(&[0.3, 0.8]));
        for _ in 0..3 {
            w.set_grad(None);
            lab.run(|| {
                let z = x.detach()?;
                z.requires_grad_(true)?;
                let score = (&z * &w).tanh().ok()?.sum()?;
                let options = GradOptions { create_graph: true, ..GradOptions::default() };
                let slope = grad(&[&score], &[&z], &[], options)?.remove(0).expect("it depends on z");
                (slope.mul(&slope)?.sum()? + score).ok()?.backward()
            })?;
            lab.see_grad("w", &w)?;
            w.set_grad(None);
            lab.run(|| {
                let loss = w.mul(&w)?.mul(&w)?.sum()?;
                backward_all(&[&loss], &[], GradOptions { create_graph: true, ..GradOptions::default() })?;
                let first = w.grad().expect("w is a leaf");
                w.set_grad(None);
                first.mul(&first)?.sum()?.backward()
            })?;
            lab.see_grad("second", &w)?;
        }
        Ok(())
    })
}

#[test]
fn a_call_that_ends_early() -> Result<()> {
    as_eager(|lab| {
        let (w, x) = (leaf(&[1.0, -2.0]), t(&[0.3, 0.8]));
        for round in 0..4 {
            let mut kept: Option<Tensor> = None;
            let outcome = lab.run(|| {
                let z = x.mul(2.0)?;
                z.requires_grad_(true)?;
                let hidden = z.mul(&w)?;
                hidden.retain_grad()?;
                hidden.exp()?.sum()?.backward()?;
                kept = Some(hidden);
                w.requires_grad_(false)?;
                if round % 2 == 1 {
                    return x.mm(&x).map(drop);
                }
                Ok(())
            });
            lab.outcome("outcome", outcome);
            lab.say("flag", w.requires_grad());
            w.requires_grad_(true)?;
            lab.see_grad("w", &w)?;
            lab.see_grad("hidden", &kept.expect("the call came here"))?;
        }
        Ok(())
    })
}
