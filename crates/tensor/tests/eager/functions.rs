//! Custom functions in eager mode: what their gradients are, what goes wrong and how it is told.

#![allow(clippy::unwrap_used)] // a test may panic

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_tensor::{Context, Function, GradOptions, Result, Tensor, grad, no_grad};

fn leaf(data: &[f32]) -> Tensor {
    let x = Tensor::from_slice(data).unwrap();
    x.requires_grad_(true).unwrap();
    x
}

fn gradient(x: &Tensor) -> Vec<f32> {
    x.grad().expect("a gradient").to_vec().unwrap()
}

/// The exponential, by its output; counts the times it is dropped.
struct Exp(Arc<AtomicUsize>);

impl Function for Exp {
    fn forward(&mut self, context: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let output = inputs[0].exp()?;
        context.save_for_backward(&[&output]);
        Ok(vec![output])
    }

    fn backward(&self, context: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(grads[0].mul(&context.saved()[0])?)])
    }
}

impl Drop for Exp {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Sum and product of two inputs; says for which inputs a gradient was asked.
struct SumAndProduct(Arc<AtomicUsize>);

impl Function for SumAndProduct {
    fn forward(&mut self, context: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        context.save_for_backward(inputs);
        Ok(vec![inputs[0].add(inputs[1])?, inputs[0].mul(inputs[1])?])
    }

    fn backward(&self, context: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        let asked = (0..2).map(|i| usize::from(context.needs_input_grad(i)) << i).sum();
        self.0.store(asked, Ordering::Relaxed);
        let [a, b] = context.saved() else { unreachable!("two were saved") };
        Ok(vec![Some((&grads[0] + &grads[1] * b).ok()?), Some((&grads[0] + &grads[1] * a).ok()?)])
    }
}

/// Hands its input back.
struct Identity;

impl Function for Identity {
    fn forward(&mut self, _: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].clone()])
    }

    fn backward(&self, _: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(grads[0].mul(7.0)?)])
    }
}

#[test]
fn the_first_three_derivatives_of_an_exponential() -> Result<()> {
    let dropped = Arc::new(AtomicUsize::new(0));
    {
        let x = leaf(&[0.0, 1.0]);
        let y = Exp(dropped.clone()).apply(&[&x.mul(2.0)?])?.sum()?;
        let options = GradOptions { create_graph: true, ..GradOptions::default() };
        let mut derivative = y;
        for order in 1..4 {
            derivative = grad(&[&derivative.sum()?], &[&x], &[], options)?.remove(0).unwrap();
            let want: Vec<f32> = [0.0f32, 1.0].map(|x| 2f32.powi(order) * (2.0 * x).exp()).to_vec();
            let got = derivative.to_vec::<f32>()?;
            assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() <= 1e-5 * w.abs()), "{got:?} {want:?}");
        }
    }
    assert_eq!(dropped.load(Ordering::Relaxed), 1, "a saved output must not keep its function alive");
    Ok(())
}

#[test]
fn several_inputs_and_outputs() -> Result<()> {
    let asked = Arc::new(AtomicUsize::new(0));
    let (a, b) = (leaf(&[2.0, 3.0]), leaf(&[5.0, 7.0]));
    let outputs = SumAndProduct(asked.clone()).apply_all(&[&a, &b])?;
    (&outputs[0] + &outputs[1] * 10.0).ok()?.sum()?.backward()?;
    assert_eq!((gradient(&a), gradient(&b)), (vec![51.0, 71.0], vec![21.0, 31.0]));
    assert_eq!(asked.load(Ordering::Relaxed), 3);
    // An output that nobody uses has zeros; an input without a gradient is not asked for.
    a.set_grad(None);
    let fixed = Tensor::from_slice(&[4.0f32, 4.0])?;
    SumAndProduct(asked.clone()).apply_all(&[&a, &fixed])?[1].sum()?.backward()?;
    assert_eq!((gradient(&a), fixed.grad().is_none()), (vec![4.0, 4.0], true));
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    Ok(())
}

#[test]
fn an_input_that_is_handed_back_is_another_tensor() -> Result<()> {
    let x = leaf(&[1.0, 2.0]);
    let y = Identity.apply(&[&x])?;
    assert!(x.is_leaf() && !y.is_leaf() && !y.same(&x));
    (&x + &y).ok()?.sum()?.backward()?;
    assert_eq!(gradient(&x), [8.0, 8.0]);
    let quiet = {
        let _guard = no_grad();
        Identity.apply(&[&x])?
    };
    assert!(quiet.same(&x));
    Ok(())
}

#[test]
fn what_may_not_be_done() -> Result<()> {
    let count = Arc::new(AtomicUsize::new(0));
    let x = leaf(&[1.0, 2.0]);
    let y = Exp(count.clone()).apply(&[&x])?;
    let sum = y.sum()?;
    sum.backward()?;
    let again = y.mul(2.0)?.sum()?.backward().unwrap_err().to_string();
    assert!(again.contains("backward of Exp") && again.contains("functions.rs"), "{again}");
    let y = Exp(count.clone()).apply(&[&x])?;
    let sum = y.sum()?;
    y.detach()?.add_(1.0)?;
    let changed = sum.backward().unwrap_err().to_string();
    assert!(changed.contains("backward of Exp"), "{changed}");
    let (a, b) = (leaf(&[1.0]), leaf(&[2.0]));
    let one = SumAndProduct(count).apply(&[&a, &b]).unwrap_err().to_string();
    assert!(
        one.contains("SumAndProduct") && one.contains("expected 1 output") && one.contains("got 2"),
        "{one}"
    );
    Ok(())
}
