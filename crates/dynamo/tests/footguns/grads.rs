//! Gradients by request inside a compiled function: captured, refused as in eager mode, differentiated again.

use kiln_dynamo::{Backend, Explanation};
use kiln_tensor::{GradOptions, Result, Tensor, backward_all, grad, no_grad};

use crate::lab::{Lab, as_eager, check, leaf, matrix, reason, t};

const ONCE: GradOptions = GradOptions { retain_graph: None, create_graph: false, allow_unused: false };
const KEEP: GradOptions = GradOptions { retain_graph: Some(true), ..ONCE };
const AGAIN: GradOptions = GradOptions { create_graph: true, ..ONCE };
const UNUSED: GradOptions = GradOptions { allow_unused: true, ..ONCE };

/// The gradient of one tensor by another.
fn slope(of: &Tensor, by: &Tensor, options: GradOptions) -> Result<Tensor> {
    Ok(grad(&[of], &[by], &[], options)?.remove(0).unwrap())
}

/// Notes gradients, where there are any.
fn see_all(lab: &Lab, what: &str, found: &[Option<Tensor>]) -> Result<()> {
    for grad in found {
        match grad {
            Some(grad) => {
                lab.say("flag", grad.requires_grad());
                lab.see(what, grad)?;
            }
            None => lab.say(what, "none"),
        }
    }
    Ok(())
}

/// Every call was one graph, compiled, without breaks.
fn assert_captured(explanations: Vec<(Backend, Explanation)>) {
    for (backend, explanation) in explanations {
        assert_eq!(explanation.graphs.len(), 1, "{explanation}");
        assert!(explanation.breaks.is_empty() && explanation.fallbacks.is_empty(), "{explanation}");
        assert!(explanation.recompiles.is_empty(), "{explanation}");
        assert!(backend == Backend::Eager || explanation.graphs[0].interpreted.is_none(), "{explanation}");
    }
}

#[test]
fn one_gradient() -> Result<()> {
    assert_captured(check(|lab| {
        let w = leaf(&[0.5, -2.0, 3.0]);
        for k in [1.0, 2.0, 3.0] {
            let found = lab.run(|| {
                let y = ((w.exp()? * &w) * k).ok()?.sum()?;
                let slope = slope(&y, &w, ONCE)?;
                slope.mul(&slope)
            })?;
            lab.see("square", &found)?;
            lab.see_grad("untouched", &w)?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn several_inputs_and_a_step() -> Result<()> {
    assert_captured(check(|lab| {
        let (a, b, c) = (matrix(4, 3), t(&[0.1; 4]), matrix(2, 4));
        let params = [&a, &b, &c];
        for p in params {
            p.requires_grad_(true)?;
        }
        let x = matrix(5, 3);
        for _ in 0..4 {
            let loss = lab.run(|| {
                let hidden = x.linear(&a, Some(&b))?.tanh()?;
                let loss = hidden.linear(&c, None)?.square()?.mean()?;
                let grads = grad(&[&loss], &params, &[], ONCE)?;
                let _guard = no_grad();
                for (p, g) in params.iter().zip(&grads) {
                    p.add_scaled_(g.as_ref().unwrap(), -0.1)?;
                }
                Ok(loss)
            })?;
            lab.see("loss", &loss)?;
        }
        params.iter().try_for_each(|p| lab.see("parameter", p))
    })?);
    Ok(())
}

#[test]
fn one_input_twice() -> Result<()> {
    assert_captured(check(|lab| {
        let (w, v) = (leaf(&[1.0, 2.0]), leaf(&[3.0, 4.0]));
        for _ in 0..3 {
            let found = lab.run(|| {
                let y = (&w + &v).ok()?.sum()?;
                let found = grad(&[&y], &[&w, &v, &w], &[], ONCE)?;
                // Each has memory of its own.
                found[0].as_ref().unwrap().mul_(10.0)?;
                Ok(found)
            })?;
            see_all(lab, "gradient", &found)?;
            found[1].as_ref().unwrap().mul_(7.0)?;
            see_all(lab, "changed", &found)?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn what_the_outputs_do_not_depend_on() -> Result<()> {
    check(|lab| {
        let (w, v, u) = (leaf(&[1.0, 2.0]), leaf(&[3.0, 4.0]), leaf(&[5.0]));
        for _ in 0..3 {
            let found = lab.run(|| {
                let (y, _z) = ((&w * 2.0).ok()?.sum()?, (&v * 3.0).ok()?);
                let found = grad(&[&y], &[&v, &w, &u], &[], UNUSED)?;
                Ok((found, y.mul(2.0)?.detach()?))
            })?;
            see_all(lab, "allowed", &found.0)?;
            lab.see("after", &found.1)?;
            let refused = lab.run(|| {
                let (y, z) = ((&w * 2.0).ok()?.sum()?, (&v * 3.0).ok()?);
                let refused = grad(&[&y], &[&w, &v], &[], ONCE).map(drop);
                // The pass has run all the same: its tape is used up.
                let again = grad(&[&y], &[&w], &[], ONCE).map(drop).map_err(reason);
                Ok((refused, again, z.detach()?))
            })?;
            lab.outcome("refused", refused.0);
            lab.outcome("again", refused.1);
            lab.see("goes on", &refused.2)?;
        }
        Ok(())
    })?;
    assert_captured(check(|lab| {
        let (w, v) = (leaf(&[1.0, 2.0]), leaf(&[3.0, 4.0]));
        for _ in 0..3 {
            let found = lab.run(|| {
                let (y, z) = ((&w * 2.0).ok()?.sum()?, (&v * 3.0).ok()?);
                let found = grad(&[&y], &[&v, &w, &z], &[], UNUSED)?;
                Ok(found)
            })?;
            see_all(lab, "allowed", &found)?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn weights_are_given() -> Result<()> {
    assert_captured(check(|lab| {
        let (w, seed) = (leaf(&[0.5, -1.0, 2.0]), t(&[1.0, 10.0, 100.0]));
        for k in [1.0, 2.0] {
            let found = lab.run(|| {
                let (y, z) = (w.sin()?, (&w * &w).ok()?.sum()?);
                let inside = (&seed * k).ok()?;
                let mut found = grad(&[&y, &z], &[&w], &[Some(&inside), None], KEEP)?;
                found.extend(grad(&[&y], &[&w], &[Some(&seed)], KEEP)?);
                found.extend(grad(&[&y], &[&y], &[Some(&w)], ONCE)?); // the weight itself
                Ok(found)
            })?;
            see_all(lab, "weighted", &found)?;
            found[2].as_ref().unwrap().mul_(2.0)?;
            lab.see("untouched", &w)?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn a_weight_comes_back() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[0.5, -1.0, 2.0]);
        for round in 0..3 {
            let seed = t(&[1.0, 10.0, 100.0]);
            let found = lab.run(|| {
                let y = w.sin()?;
                let found = grad(&[&y], &[&y, &w, &y], &[Some(&seed)], ONCE)?;
                if round == 2 {
                    seed.mul_(3.0)?;
                }
                Ok(found)
            })?;
            see_all(lab, "gradient", &found)?;
            found[0].as_ref().unwrap().mul_(7.0)?;
            seed.add_(1.0)?;
            see_all(lab, "changed", &found)?;
            lab.see("seed", &seed)?;
        }
        Ok(())
    })
}

#[test]
fn twice_needs_retain_graph() -> Result<()> {
    assert_captured(check(|lab| {
        let w = leaf(&[0.5, -1.0]);
        for _ in 0..3 {
            let found = lab.run(|| {
                let y = w.exp()?.sum()?;
                Ok([slope(&y, &w, KEEP)?, slope(&y, &w, ONCE)?])
            })?;
            lab.see("first", &found[0])?;
            lab.see("second", &found[1])?;
        }
        Ok(())
    })?);
    as_eager(|lab| {
        let (w, v) = (leaf(&[0.5, -1.0]), leaf(&[2.0, 3.0]));
        for _ in 0..3 {
            let outcome = lab.run(|| {
                let y = w.exp()?.sum()?;
                slope(&y, &w, ONCE)?;
                slope(&y, &w, ONCE).map_err(reason)
            });
            lab.outcome("twice", outcome);
            let outcome = lab.run(|| {
                let y = w.exp()?.sum()?;
                slope(&y, &w, ONCE)?;
                y.backward().map_err(reason)
            });
            lab.outcome("then backward", outcome);
            // Only the way to what was asked for is used up.
            let y = lab.run(|| {
                let (a, b) = (w.exp()?.sum()?, v.exp()?.sum()?);
                slope(&(&a + &b).ok()?, &w, ONCE)?;
                Ok((a, b))
            })?;
            lab.outcome("used up", y.0.backward().map_err(reason));
            lab.outcome("still there", y.1.backward());
            lab.see_grad("v", &v)?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn tensors_made_inside() -> Result<()> {
    assert_captured(check(|lab| {
        let w = leaf(&[0.5, -1.0, 2.0, 1.5]);
        for _ in 0..3 {
            let found = lab.run(|| {
                let hidden = (&w * 3.0).ok()?.tanh()?;
                let square = hidden.reshape([2, 2])?;
                let row = square.transpose(0, 1)?;
                let y = (row.exp()? * &square).ok()?.sum()?;
                let y = (y + hidden.sum()?).ok()?;
                grad(&[&y], &[&hidden, &w, &square, &row, &y], &[], ONCE)
            })?;
            see_all(lab, "gradient", &found)?;
        }
        Ok(())
    })?);
    // Changed in place while gradients are recorded: the gradient is that of the last value.
    as_eager(|lab| {
        let w = leaf(&[0.5, -1.0]);
        for _ in 0..3 {
            let found = lab.run(|| {
                let hidden = (&w * 3.0).ok()?;
                let before = hidden.add(5.0)?.sum()?;
                hidden.add_(&w)?;
                let after = hidden.mul(2.0)?.sum()?;
                let first = grad(&[&after], &[&hidden, &w], &[], KEEP)?;
                let second = grad(&[&before], &[&hidden, &w], &[], UNUSED)?;
                Ok([first, second].concat())
            })?;
            see_all(lab, "gradient", &found)?;
        }
        Ok(())
    })
}

#[test]
fn the_tape_goes_on_outside() -> Result<()> {
    as_eager(|lab| {
        let (a, b) = (leaf(&[1.0, 2.0]), leaf(&[0.5, -1.0]));
        for _ in 0..3 {
            let outer = (&a * 3.0).tanh().ok()?;
            // As far as the border, and no further.
            let inside = lab.run(|| grad(&[&(&outer * &b).ok()?.sum()?], &[&outer, &b], &[], ONCE))?;
            see_all(lab, "border", &inside)?;
            // Through the border.
            let beyond = lab.run(|| grad(&[&(&outer * &b).ok()?.sum()?], &[&a, &b, &outer], &[], ONCE))?;
            see_all(lab, "beyond", &beyond)?;
            // Two ways to the same border, one of them outside.
            let (outer, k) = ((&a * 2.0).ok()?, leaf(&[4.0]));
            let other = outer.exp()?;
            let both = lab.run(|| grad(&[&(&outer * &other * &k).ok()?.sum()?], &[&outer], &[], ONCE))?;
            see_all(lab, "both", &both)?;
            // Unused inside, used outside.
            let outer = (&a * 2.0).ok()?;
            let unused = lab.run(|| grad(&[&(&outer * &b).ok()?.sum()?], &[&a, &k], &[], UNUSED))?;
            see_all(lab, "unused", &unused)?;
        }
        Ok(())
    })
}

#[test]
fn hooks_are_called() -> Result<()> {
    as_eager(|lab| {
        let (w, v) = (leaf(&[1.0, 2.0]), leaf(&[0.5, -1.0]));
        for round in 0..4 {
            let hook = (round > 1).then(|| v.register_hook(|g| g.mul(10.0).map(Some))).transpose()?;
            let outer = (&w * 2.0).ok()?;
            let watched = (round == 3).then(|| outer.register_hook(|g| g.mul(3.0).map(Some))).transpose()?;
            let found = lab.run(|| grad(&[&(&outer * &v).ok()?.sum()?], &[&v, &outer], &[], ONCE))?;
            see_all(lab, "hooked", &found)?;
            drop((hook, watched));
        }
        Ok(())
    })
}

#[test]
fn errors_are_those_of_eager() -> Result<()> {
    as_eager(|lab| {
        let (w, x) = (leaf(&[1.0, 2.0]), t(&[3.0, 4.0]));
        for _ in 0..3 {
            let outcome = lab.run(|| {
                let y = (&w * &x).ok()?;
                let mut all = vec![
                    grad(&[&y], &[&w], &[], ONCE).map(drop),
                    grad(&[&y.sum()?], &[&x], &[], ONCE).map(drop),
                    grad(&[&y.sum()?], &[&w], &[None, None], ONCE).map(drop),
                    grad(&[&y.detach()?.sum()?], &[&w], &[], ONCE).map(drop),
                    grad(&[&y], &[&w], &[Some(&y.sum()?.detach()?)], ONCE).map(drop),
                ];
                // Nothing happened: the tape is whole.
                all.push(grad(&[&y.sum()?], &[&w], &[], ONCE).map(drop));
                Ok(all)
            })?;
            outcome.into_iter().for_each(|result| lab.outcome("outcome", result));
        }
        Ok(())
    })
}

#[test]
fn gradients_of_gradients() -> Result<()> {
    assert_captured(check(|lab| {
        let x = leaf(&[0.3, -0.7, 1.1]);
        for k in [1.0, 2.0, 3.0] {
            let found = lab.run(|| {
                let y = (x.tanh()? * &x * k).ok()?.sum()?;
                let first = slope(&y, &x, AGAIN)?;
                let second = slope(&first.square()?.sum()?, &x, AGAIN)?;
                let third = slope(&second.sum()?, &x, ONCE)?;
                Ok([first.detach()?, second.detach()?, third])
            })?;
            found.iter().try_for_each(|g| lab.see("derivative", g))?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn a_product_with_the_hessian() -> Result<()> {
    assert_captured(check(|lab| {
        let (w, x, direction) = (matrix(3, 4), matrix(5, 4), matrix(3, 4));
        w.requires_grad_(true)?;
        for _ in 0..3 {
            let product = lab.run(|| {
                let loss = x.linear(&w, None)?.gelu()?.square()?.mean()?;
                let first = slope(&loss, &w, AGAIN)?;
                slope(&(&first * &direction).ok()?.sum()?, &w, ONCE)
            })?;
            lab.see("product", &product)?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn a_gradient_penalty() -> Result<()> {
    assert_captured(check(|lab| {
        let (a, bias, c, last) = (matrix(6, 3), t(&[0.1; 6]), matrix(1, 6), t(&[0.2]));
        let params = [&a, &bias, &c, &last];
        for p in params {
            p.requires_grad_(true)?;
        }
        let x = matrix(5, 3);
        x.requires_grad_(true)?;
        for _ in 0..4 {
            params.iter().for_each(|p| p.set_grad(None));
            x.set_grad(None);
            let loss = lab.run(|| {
                let score = x.linear(&a, Some(&bias))?.tanh()?.linear(&c, Some(&last))?.sum()?;
                let penalty = (slope(&score, &x, AGAIN)?.norm_dim(2.0, 1, false)? - 1.0).square().mean();
                let loss = penalty.ok()?;
                loss.backward()?;
                Ok(loss)
            })?;
            lab.see("loss", &loss)?;
            // The last bias has no part in the penalty: it gets no gradient, rather than zeros.
            params.iter().try_for_each(|p| lab.see_grad("parameter", p))?;
            lab.see_grad("x", &x)?;
            lab.outcome("used up", loss.backward().map_err(reason));
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn a_step_of_training_inside_training() -> Result<()> {
    assert_captured(check(|lab| {
        let (w, b) = (matrix(1, 3), t(&[0.1]));
        w.requires_grad_(true)?;
        b.requires_grad_(true)?;
        let (x, y) = (matrix(6, 3), matrix(6, 1));
        for _ in 0..3 {
            let loss = lab.run(|| {
                w.set_grad(None);
                let (mut fast, mut bias) = (w.clone(), b.clone());
                for _ in 0..2 {
                    let loss = (x.linear(&fast, Some(&bias))?.tanh()? - &y).ok()?.square()?.mean()?;
                    let slopes = grad(&[&loss], &[&fast, &bias], &[], AGAIN)?;
                    fast = (&fast - slopes[0].as_ref().unwrap() * 0.3).ok()?;
                    bias = (&bias - slopes[1].as_ref().unwrap() * 0.3).ok()?;
                }
                let loss = (x.linear(&fast, Some(&bias))?.tanh()? - &y).ok()?.square()?.mean()?;
                loss.backward()?;
                let _guard = no_grad();
                w.add_scaled_(&w.grad().unwrap(), -0.1)?;
                Ok(loss)
            })?;
            lab.see("loss", &loss)?;
            lab.see_grad("b", &b)?;
            b.set_grad(None);
        }
        lab.see("w", &w)
    })?);
    Ok(())
}

#[test]
fn a_gradient_that_is_constant_is_on_no_tape() -> Result<()> {
    as_eager(|lab| {
        let (w, x) = (leaf(&[1.0, 2.0]), t(&[3.0, 4.0]));
        for _ in 0..3 {
            let (flags, outcome) = lab.run(|| {
                let y = (&w * &x).ok()?;
                let first = slope(&y.sum()?, &w, AGAIN)?;
                let second = slope(&(&y * &y).ok()?.sum()?, &w, AGAIN)?;
                let flags = format!("{} {}", first.requires_grad(), second.requires_grad());
                Ok((flags, first.sum()?.backward()))
            })?;
            lab.say("flags", flags);
            lab.outcome("backward", outcome);
        }
        Ok(())
    })
}

#[test]
fn gradients_leave_with_their_tape() -> Result<()> {
    as_eager(|lab| {
        let x = leaf(&[0.3, -0.7, 1.1]);
        for round in 0..4 {
            x.set_grad(None);
            let (y, first) = lab.run(|| {
                let y = (x.tanh()? * &x).ok()?.sum()?;
                let first = slope(&y, &x, AGAIN)?;
                Ok((y, first))
            })?;
            lab.see("first", &first)?;
            lab.say("flags", format!("{} {}", first.requires_grad(), first.is_leaf()));
            match round % 2 {
                0 => lab.see("second", &slope(&first.sum()?, &x, AGAIN)?)?,
                _ => first.sum()?.backward()?,
            }
            lab.see_grad("x", &x)?;
            lab.outcome("y", y.backward().map_err(reason));
        }
        Ok(())
    })
}

#[test]
fn a_second_pass_uses_up_the_first() -> Result<()> {
    as_eager(|lab| {
        let (x, v) = (leaf(&[0.3, -0.7]), leaf(&[2.0, 1.0]));
        for _ in 0..3 {
            let (y, z, outcome) = lab.run(|| {
                let y = (x.tanh()? * &v).ok()?.sum()?;
                let z = (&x * 2.0).ok()?.sum()?;
                let first = slope(&y, &x, AGAIN)?;
                let second = slope(&first.sum()?, &x, ONCE)?;
                let outcome = slope(&first.sum()?, &v, ONCE).map(drop).map_err(reason);
                Ok((y, (z + second.sum()?).ok()?, outcome))
            })?;
            lab.see("y", &y)?;
            lab.see("z", &z)?;
            lab.outcome("third", outcome);
            lab.outcome("y", y.backward().map_err(reason));
            lab.outcome("z", z.backward().map_err(reason));
            lab.see_grad("x", &x)?;
            x.set_grad(None);
        }
        Ok(())
    })
}

#[test]
fn a_gradient_on_the_tape_is_changed() -> Result<()> {
    as_eager(|lab| {
        let (x, y) = (leaf(&[0.3, -0.7]), leaf(&[2.0, 1.0]));
        for _ in 0..3 {
            let found = lab.run(|| {
                let sum = (&x + &y).ok()?.square()?.sum()?;
                let found = grad(&[&sum], &[&x, &y], &[], AGAIN)?;
                let _guard = no_grad();
                found[0].as_ref().unwrap().mul_(10.0)?;
                Ok([found[0].as_ref().unwrap().detach()?, found[1].as_ref().unwrap().detach()?])
            })?;
            lab.see("first", &found[0])?;
            lab.see("second", &found[1])?;
        }
        Ok(())
    })
}

#[test]
fn an_error_after_a_gradient() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        let mut kept = None;
        for again in [false, true, false, true] {
            let outcome = lab.run(|| {
                let y = (&w * &w).ok()?.sum()?;
                let first = slope(&y, &w, if again { AGAIN } else { KEEP })?;
                kept = Some(first.mul(2.0)?);
                y.backward()?;
                w.mm(&w)
            });
            lab.outcome("error", outcome);
            lab.see("kept", kept.as_ref().unwrap())?;
            lab.say("flag", kept.as_ref().unwrap().requires_grad());
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn other_requests_are_other_recordings() -> Result<()> {
    as_eager(|lab| {
        let (w, v) = (leaf(&[1.0, 2.0]), leaf(&[3.0, 4.0]));
        for round in 0..6 {
            let found = lab.run(|| {
                let y = (&w * &v).ok()?.sum()?;
                let by = if round % 2 == 0 { &w } else { &v };
                grad(&[&y], &[by], &[], if round < 3 { ONCE } else { KEEP })
            })?;
            see_all(lab, "gradient", &found)?;
        }
        Ok(())
    })
}

#[test]
fn backward_of_several() -> Result<()> {
    as_eager(|lab| {
        let (w, v) = (leaf(&[1.0, 2.0]), leaf(&[3.0, 4.0]));
        for _ in 0..3 {
            lab.run(|| {
                let (y, z) = ((&w * &v).ok()?.sum()?, (&w * 3.0).ok()?);
                backward_all(&[&y, &z], &[None, Some(&v.detach()?)], ONCE)
            })?;
            lab.run(|| backward_all(&[&(&w * &v).ok()?.sum()?], &[], ONCE))?;
            lab.see_grad("w", &w)?;
            lab.see_grad("v", &v)?;
        }
        Ok(())
    })
}
