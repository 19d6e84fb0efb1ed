//! Results that leave with gradients and were computed from each other: the gradient of the first is everything
//! that arrives there, from outside and through the others.

use kiln_dynamo::Backend;
use kiln_tensor::{Context, Function, GradOptions, Result, Tensor, grad};

use crate::lab::{Lab, as_eager, check, leaf, t};

fn weight_and_data() -> Result<(Tensor, Tensor)> {
    let w = t(&[0.3, -0.2, 0.5, 0.1, -0.4, 0.7]).reshape([3, 2])?.clone_tensor()?;
    let x = t(&[1.0, 2.0, -1.0, 0.5, -0.5, 1.5]).reshape([2, 3])?;
    w.requires_grad_(true)?;
    Ok((w, x))
}

/// Three results, each computed from the one before; the last from the first, too.
fn three(lab: &Lab, w: &Tensor, x: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    lab.run(|| {
        let first = x.mm(w)?;
        let second = first.tanh()?;
        let third = (&second * &first).ok()?.sum()?;
        Ok((first, second, third))
    })
}

#[test]
fn a_gradient_is_retained_where_another_result_begins() -> Result<()> {
    as_eager(|lab| {
        let (w, x) = weight_and_data()?;
        for _ in 0..3 {
            let (first, second, third) = three(lab, &w, &x)?;
            first.retain_grad()?;
            second.retain_grad()?;
            third.add(&first.sum()?)?.backward()?;
            lab.see_grad("first", &first)?;
            lab.see_grad("second", &second)?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn a_hook_changes_the_gradient_of_a_result_on_its_way() -> Result<()> {
    as_eager(|lab| {
        let (w, x) = weight_and_data()?;
        for call in 0..3 {
            let (first, _, third) = three(lab, &w, &x)?;
            first.register_hook(move |grad| grad.mul(f64::from(call)).map(Some))?;
            third.backward()?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn grad_is_asked_for_results() -> Result<()> {
    as_eager(|lab| {
        let (w, x) = weight_and_data()?;
        for _ in 0..2 {
            let (first, second, third) = three(lab, &w, &x)?;
            let keep = GradOptions { retain_graph: Some(true), ..GradOptions::default() };
            let found = |what: &str, of: &Tensor, inputs: &[&Tensor], options: GradOptions| -> Result<()> {
                for gradient in grad(&[of], inputs, &[], options)?.into_iter().flatten() {
                    lab.see(what, &gradient)?;
                }
                Ok(())
            };
            found("of the third", &third, &[&first, &second, &w], keep)?;
            // What lies before is not gone through, so its tape is still there.
            found("of the second", &second.sum()?, &[&first], GradOptions::default())?;
            found("of the first", &first.sum()?, &[&w], GradOptions::default())?;
        }
        Ok(())
    })
}

#[test]
fn tapes_are_used_up_part_by_part() -> Result<()> {
    as_eager(|lab| {
        let (w, x) = weight_and_data()?;
        for _ in 0..2 {
            let (first, second, third) = three(lab, &w, &x)?;
            lab.outcome("the second", second.sum()?.backward());
            lab.see_grad("w", &w)?;
            // The product was not gone through, but what it leads to was.
            lab.outcome("the third", third.backward());
            lab.outcome("the first", first.sum()?.backward());
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn what_a_backward_inside_used_up_is_named() -> Result<()> {
    as_eager(|lab| {
        let (w, x) = weight_and_data()?;
        for _ in 0..2 {
            let y = lab.run(|| {
                let y = x.matmul(&w)?.exp()?;
                y.sum()?.backward()?;
                y.neg()
            })?;
            lab.outcome("outside", y.sum()?.backward());
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn a_loss_leaves_with_what_it_was_computed_from() -> Result<()> {
    let explanations = check(|lab| {
        let (w, x) = weight_and_data()?;
        for _ in 0..2 {
            let (scores, loss) = lab.run(|| {
                let scores = x.matmul(&w)?;
                let loss = scores.log_softmax(-1)?.mean()?.neg()?;
                Ok((scores, loss))
            })?;
            loss.backward()?;
            lab.see("scores", &scores)?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })?;
    for (backend, explanation) in explanations {
        if backend != Backend::Eager {
            assert!(explanation.graphs.iter().all(|graph| graph.has_backward), "{explanation}");
        }
    }
    Ok(())
}

/// Its backward gives the first input a gradient, the second none.
struct First;

impl Function for First {
    fn forward(&mut self, context: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        context.save_for_backward(inputs);
        Ok(vec![inputs[0].mul(inputs[1])?])
    }

    fn backward(&self, context: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        let [_, second] = context.saved() else { unreachable!("two were saved") };
        Ok(vec![Some(grads[0].mul(second)?), None])
    }
}

#[test]
fn a_function_that_no_gradient_reached_is_not_used_up() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, -2.0, 0.5]);
        for _ in 0..3 {
            let kept = lab.run(|| {
                let inner = First.apply(&[&w, &w.detach()?])?;
                let outer = First.apply(&[&w.mul(2.0)?, &inner])?;
                // The gradient does not get from the outer one to the inner one.
                outer.sum()?.backward()?;
                inner.mul(3.0)
            })?;
            lab.outcome("outside", kept.sum()?.backward());
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

/// Its backward returns something of another shape.
struct Misshapen;

impl Function for Misshapen {
    fn forward(&mut self, _: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].mul(2.0)?])
    }

    fn backward(&self, _: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(grads[0].sum()?)])
    }
}

/// A pass that fails outside the region has changed no leaf, those inside among them.
#[test]
fn a_pass_that_fails_outside_changes_nothing() -> Result<()> {
    as_eager(|lab| {
        let (w, v) = (leaf(&[1.0, 2.0]), leaf(&[3.0, 4.0]));
        for _ in 0..3 {
            let outside = Misshapen.apply(&[&w])?;
            lab.outcome("the pass", lab.run(|| (&outside * &v).ok()?.sum()?.backward()));
            lab.see_grad("v", &v)?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

/// Hands its input back.
struct Same;

impl Function for Same {
    fn forward(&mut self, _: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].clone()])
    }

    fn backward(&self, _: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(grads[0].clone())])
    }
}

#[test]
fn a_leaf_is_frozen_after_a_function_was_applied_to_it() -> Result<()> {
    as_eager(|lab| {
        for call in 0..3 {
            let z = lab.run(|| {
                let z = t(&[1.0, 2.0]).mul(call)?;
                z.requires_grad_(true)?;
                let twice = Same.apply(&[&Same.apply(&[&z])?])?;
                z.requires_grad_(false)?;
                lab.outcome("the pass", twice.reshape([2, 1])?.sum()?.backward());
                Ok(z)
            })?;
            lab.see_grad("z", &z)?;
        }
        Ok(())
    })
}

#[test]
fn a_function_that_a_backward_inside_used_up_is_named() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        for _ in 0..3 {
            let y = lab.run(|| {
                let y = Same.apply(&[&w])?;
                y.sum()?.backward()?;
                Ok(y)
            })?;
            lab.outcome("outside", y.sum()?.backward());
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}
