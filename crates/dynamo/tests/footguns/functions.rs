//! Custom functions: their forward and their backward are the user's code, which runs on every call.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_dynamo::Backend;
use kiln_tensor::{Context, Function, GradOptions, Result, Tensor, backward_all, grad, no_grad};

use crate::lab::{as_eager, check, leaf, one_graph, t};

/// Rounds; the gradient passes.
struct StraightThrough;

impl Function for StraightThrough {
    fn forward(&mut self, _: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].round()?])
    }

    fn backward(&self, _: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(grads[0].clone())])
    }
}

/// Hands its input back; the gradient is turned round.
struct Reverse {
    strength: f64,
    calls: Arc<AtomicUsize>,
}

impl Function for Reverse {
    fn forward(&mut self, _: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].clone()])
    }

    fn backward(&self, _: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Ok(vec![Some(grads[0].mul(-self.strength)?)])
    }
}

/// eˣ and x², by what was saved.
struct ExpAndSquare;

impl Function for ExpAndSquare {
    fn forward(&mut self, context: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let exp = inputs[0].exp()?;
        context.save_for_backward(&[&exp, inputs[0]]);
        Ok(vec![exp, inputs[0].mul(inputs[0])?])
    }

    fn backward(&self, context: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        let [exp, x] = context.saved() else { unreachable!("two were saved") };
        Ok(vec![Some((&grads[0] * exp + &grads[1] * x * 2.0).ok()?)])
    }
}

/// What its backward returns is wrong.
struct Wrong(usize);

impl Function for Wrong {
    fn name(&self) -> &str {
        "a wrong function"
    }

    fn forward(&mut self, _: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].mul(2.0)?])
    }

    fn backward(&self, _: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        Ok(match self.0 {
            0 => vec![],
            1 => vec![Some(grads[0].sum()?)],
            2 => vec![Some(grads[0].to_dtype(kiln_tensor::DType::F64)?)],
            _ => vec![None],
        })
    }
}

/// Only the first input gets a gradient.
struct First;

impl Function for First {
    fn forward(&mut self, _: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].add(inputs[1])?])
    }

    fn backward(&self, _: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(grads[0].clone()), None])
    }
}

/// The tape of an input that gets no gradient may be used up.
#[test]
fn an_input_without_a_gradient() -> Result<()> {
    as_eager(|lab| {
        for _ in 0..3 {
            let w = leaf(&[1.0, -2.0, 3.0]);
            let used = w.exp()?;
            used.sum()?.backward()?;
            lab.run(|| {
                let y = First.apply(&[&w, &used])?;
                backward_all(&[&y.sum()?, &y.mean()?], &[None, None], GradOptions::default())
            })?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn a_straight_through_estimator() -> Result<()> {
    one_graph(check(|lab| {
        let w = leaf(&[0.4, -1.6, 2.5]);
        for scale in 1..4 {
            w.set_grad(None);
            let loss = lab.run(|| {
                let hard = StraightThrough.apply(&[&w.mul(scale)?])?;
                let loss = hard.mul(&hard)?.sum()?;
                loss.backward()?;
                loss.detach()
            })?;
            lab.see("loss", &loss)?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn what_a_backward_reads_is_not_frozen() -> Result<()> {
    one_graph(check(|lab| {
        let (w, v) = (leaf(&[0.4, -1.6]), leaf(&[1.0, 2.0]));
        let calls = Arc::new(AtomicUsize::new(0));
        for round in 1..5 {
            w.set_grad(None);
            lab.run(|| {
                let features = w.exp()?;
                let function = Reverse { strength: 0.5 * f64::from(round), calls: calls.clone() };
                let turned = function.apply(&[&features])?;
                ((turned * &v).ok()?.sum()? + features.sum()?).ok()?.backward()
            })?;
            lab.see_grad("w", &w)?;
            lab.see_grad("v", &v)?;
            lab.say("calls", calls.load(Ordering::Relaxed));
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn a_chain_of_functions_with_several_outputs() -> Result<()> {
    one_graph(check(|lab| {
        let w = leaf(&[0.4, -0.6]);
        for _ in 0..3 {
            lab.run(|| {
                let mut x = w.mul(0.5)?;
                for _ in 0..3 {
                    let outputs = ExpAndSquare.apply_all(&[&x])?;
                    x = (&outputs[0] + &outputs[1]).ok()?.tanh()?;
                }
                let first = ExpAndSquare.apply_all(&[&x])?.remove(0);
                first.sum()?.backward()
            })?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn the_gradient_of_a_gradient() -> Result<()> {
    one_graph(check(|lab| {
        let w = leaf(&[0.4, -0.6]);
        for _ in 0..3 {
            w.set_grad(None);
            lab.run(|| {
                let outputs = ExpAndSquare.apply_all(&[&w.mul(2.0)?])?;
                let y = (&outputs[0] * &outputs[1]).ok()?.sum()?;
                let options = GradOptions { create_graph: true, ..GradOptions::default() };
                let slope = grad(&[&y], &[&w], &[], options)?.remove(0).expect("y depends on w");
                slope.mul(&slope)?.sum()?.backward()
            })?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn gradients_by_request_through_a_function() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[0.4, -0.6]);
        let calls = Arc::new(AtomicUsize::new(0));
        for _ in 0..3 {
            let found = lab.run(|| {
                let hidden = w.exp()?;
                let turned = Reverse { strength: 2.0, calls: calls.clone() }.apply(&[&hidden])?;
                let after = turned.mul(3.0)?;
                let y = after.mul(&after)?.sum()?;
                let options = GradOptions { retain_graph: Some(true), ..GradOptions::default() };
                let near = grad(&[&y], &[&after], &[], options)?;
                lab.say("not called", calls.load(Ordering::Relaxed));
                let middle = grad(&[&y], &[&turned], &[], options)?;
                lab.say("not called", calls.load(Ordering::Relaxed));
                let far = grad(&[&y], &[&w, &hidden], &[], GradOptions::default())?;
                lab.say("called", calls.load(Ordering::Relaxed));
                Ok([near, middle, far].concat())
            })?;
            for gradient in found.into_iter().flatten() {
                lab.see("gradient", &gradient)?;
            }
        }
        Ok(())
    })
}

#[test]
fn gradients_that_are_wrong_are_errors() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[0.4, -0.6]);
        for round in 0..8 {
            let outcome = lab.run(|| Wrong(round % 4).apply(&[&w])?.exp()?.sum()?.backward());
            lab.outcome("backward", outcome);
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn a_function_whose_gradient_is_needed_outside() -> Result<()> {
    let explanations = check(|lab| {
        let (w, v) = (leaf(&[0.4, -0.6]), leaf(&[1.5, 0.25]));
        let calls = Arc::new(AtomicUsize::new(0));
        for round in 1..5 {
            w.set_grad(None);
            let loss = lab.run(|| {
                let features = (w.exp()? * &v).ok()?;
                let function = Reverse { strength: f64::from(round), calls: calls.clone() };
                function.apply(&[&features])?.mul(&v)?.tanh()?.sum()
            })?;
            loss.backward()?;
            lab.see_grad("w", &w)?;
            lab.see_grad("v", &v)?;
            lab.say("calls", calls.load(Ordering::Relaxed));
        }
        Ok(())
    })?;
    for (_, explanation) in explanations.into_iter().filter(|(backend, _)| *backend != Backend::Eager) {
        assert!(explanation.to_string().contains("Reverse"), "{explanation}");
    }
    Ok(())
}

#[test]
fn a_backward_that_needs_a_value() -> Result<()> {
    struct Clip(Arc<AtomicUsize>);
    impl Function for Clip {
        fn forward(&mut self, _: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            Ok(vec![inputs[0].clone()])
        }

        fn backward(&self, _: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            let largest = grads[0].abs()?.amax()?.item::<f64>()?;
            Ok(vec![Some(if largest > 1.0 { grads[0].div(largest)? } else { grads[0].clone() })])
        }
    }
    as_eager(|lab| {
        let w = leaf(&[0.4, -0.6]);
        let calls = Arc::new(AtomicUsize::new(0));
        for scale in [0.1, 10.0, 0.2, 20.0] {
            w.set_grad(None);
            lab.run(|| Clip(calls.clone()).apply(&[&w.exp()?])?.mul(scale)?.sum()?.backward())?;
            lab.see_grad("w", &w)?;
            lab.say("calls", calls.load(Ordering::Relaxed));
        }
        Ok(())
    })
}

#[test]
fn what_was_saved_is_changed_and_the_tape_is_used_up() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[0.4, -0.6]);
        for _ in 0..3 {
            let twice = lab.run(|| {
                let y = ExpAndSquare.apply_all(&[&w])?.remove(0).sum()?;
                y.backward()?;
                y.backward()
            });
            lab.say("twice", twice.is_err());
            lab.see_grad("w", &w)?;
            let changed = lab.run(|| {
                let x = w.mul(2.0)?;
                let y = ExpAndSquare.apply_all(&[&x])?.remove(1);
                x.detach()?.add_(1.0)?;
                y.sum()?.backward()
            });
            lab.say("changed", changed.is_err());
            lab.see_grad("w", &w)?;
            lab.run(|| {
                let x = w.mul(2.0)?;
                let y = StraightThrough.apply(&[&x])?;
                y.mul_(&w)?;
                (y.sum()? + x.sum()?).ok()?.backward()
            })?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn an_input_of_a_function_that_is_frozen_afterwards() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[0.4, -0.6]);
        for _ in 0..3 {
            w.set_grad(None);
            lab.run(|| {
                let y = ExpAndSquare.apply_all(&[&w])?.remove(0).sum()?;
                w.requires_grad_(false)?;
                y.backward()
            })?;
            lab.see_grad("w", &w)?;
            w.requires_grad_(true)?;
        }
        Ok(())
    })
}

#[test]
fn without_gradients_a_function_is_its_forward() -> Result<()> {
    one_graph(check(|lab| {
        let (w, x) = (leaf(&[0.4, -0.6]), t(&[1.4, 0.6]));
        for _ in 0..3 {
            let made = lab.run(|| {
                let plain = StraightThrough.apply(&[&x])?;
                let _guard = no_grad();
                let quiet = ExpAndSquare.apply_all(&[&w])?;
                (plain + &quiet[0] + &quiet[1]).ok()
            })?;
            lab.see("made", &made)?;
            lab.say("flag", made.requires_grad());
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn functions_hooks_and_several_losses() -> Result<()> {
    as_eager(|lab| {
        let (w, v) = (leaf(&[0.4, -0.6]), leaf(&[1.5, 0.25]));
        let order = Arc::new(std::sync::Mutex::new(Vec::new()));
        for (name, parameter) in [("w", &w), ("v", &v)] {
            let order = order.clone();
            parameter.register_hook(move |grad| {
                order.lock().unwrap().push(name);
                grad.mul(0.5).map(Some)
            })?;
        }
        for _ in 0..3 {
            lab.run(|| {
                let hidden = (&w * &v).ok()?;
                hidden.retain_grad()?;
                let outputs = ExpAndSquare.apply_all(&[&hidden])?;
                let (first, second) = (outputs[0].sum()?, (&outputs[1] * &v).ok()?.sum()?);
                backward_all(&[&first, &second], &[], GradOptions::default())?;
                let kept = hidden.grad().expect("it is retained");
                v.detach()?.sub_(&kept.mul(0.01)?).map(drop)
            })?;
            lab.see_grad("w", &w)?;
            lab.see_grad("v", &v)?;
            lab.see("v itself", &v)?;
            lab.say("order", format!("{:?}", order.lock().unwrap()));
        }
        Ok(())
    })
}
