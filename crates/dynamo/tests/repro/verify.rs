//! Calls that are checked against eager, and what is recorded of them.

use kiln_dynamo::{Compile, Every, Region, reproduce};
use kiln_repro::record;
use kiln_tensor::{Device, Result, Tensor, foreach, grad, no_grad};

fn checked() -> Region {
    Compile::new().verify(Every(1)).region()
}

fn numbers(shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    Tensor::from_vec((0..count).map(|i| (i as f32 * 0.7).sin()).collect::<Vec<f32>>(), shape).unwrap()
}

/// Runs a program three times with a check of every call, and as often eagerly: the program must not notice.
fn check(program: impl Fn() -> Result<Vec<Tensor>>) {
    let region = checked();
    for _ in 0..3 {
        region.run(&program).unwrap();
    }
    let explanation = region.explain();
    // Recorded and compiled it is the same program, call after call.
    assert!(explanation.recompiles.is_empty() && explanation.fallbacks.is_empty(), "{explanation}");
    assert!(explanation.graphs.iter().all(|graph| graph.interpreted.is_none()), "{explanation}");
}

#[test]
fn training_steps() {
    let (x, w, b) = (numbers(&[6, 5]), numbers(&[5, 3]), numbers(&[3]));
    w.requires_grad_(true).unwrap();
    b.requires_grad_(true).unwrap();
    check(|| {
        w.set_grad(None);
        b.set_grad(None);
        let loss = x.matmul(&w)?.add(&b)?.tanh()?.square()?.mean()?;
        loss.backward()?;
        let _guard = no_grad();
        for parameter in [&w, &b] {
            if let Some(grad) = parameter.grad() {
                parameter.sub_(&grad.mul(0.1)?)?;
            }
        }
        Ok(vec![loss])
    });
}

#[test]
fn results_that_leave_with_gradients() {
    let (x, w) = (numbers(&[4, 5]), numbers(&[5, 5]));
    w.requires_grad_(true).unwrap();
    check(|| {
        let hidden = x.matmul(&w)?.relu()?;
        let out = hidden.matmul(&w)?;
        Ok(vec![hidden, out])
    });
}

#[test]
fn gradients_of_gradients_and_random_numbers() {
    let x = numbers(&[7]);
    x.requires_grad_(true).unwrap();
    check(|| {
        let y = x.mul(&x)?.mul(&x)?.mul(&Tensor::rand([7], &Device::Cpu)?)?.sum()?;
        let create = kiln_tensor::GradOptions { create_graph: true, ..Default::default() };
        let first = grad(&[&y], &[&x], &[], create)?.remove(0).unwrap();
        let second = grad(&[&first.sum()?], &[&x], &[], Default::default())?.remove(0).unwrap();
        Ok(vec![second])
    });
}

#[test]
fn lists_views_and_breaks() {
    let tensors: Vec<Tensor> = (1..4).map(|n| numbers(&[n, 3])).collect();
    let cache = numbers(&[6, 4]);
    check(|| {
        let list = kiln_tensor::TensorList::new(tensors.clone());
        let scaled = foreach::mul(&list, 0.5)?;
        let row = cache.narrow(0, 2, 1)?;
        row.add_(1.0)?;
        let total = cache.sum()?;
        let more = if total.item::<f32>()? > 0.0 { cache.exp()? } else { cache.neg()? };
        Ok(vec![scaled.get(1)?, more, row.t()?.contiguous()?])
    });
}

/// A graph that ends because the program looks at a value is no failure.
#[test]
fn programs_may_look_at_values() {
    let x = numbers(&[4]);
    let recorded = record(|| -> Result<Tensor> {
        let total = x.sum()?.item::<f32>()?;
        if total > 0.0 { x.mul(f64::from(total)) } else { x.neg() }
    });
    let case = recorded.unwrap().case.unwrap();
    assert!(case.recording.to_string().contains("read(%1)"), "{}", case.recording);
    assert_eq!(reproduce(&case).unwrap(), None);
}

/// What is recorded is what was done, and what outlives it what somebody holds.
#[test]
fn recordings_hold_what_outlives_them() {
    let x = numbers(&[2, 3]);
    let recorded = record(|| -> Result<Tensor> {
        let dropped = x.exp()?.t()?;
        dropped.add(1.0)
    });
    let case = recorded.unwrap().case.unwrap();
    assert_eq!(
        case.recording.to_string().lines().map(|line| line.split("  ").next().unwrap()).collect::<Vec<_>>(),
        [
            "%0: f32[2, 3]",
            "#0: float",
            "%1 = exp(%0)",
            "%2 = transpose(%1) {dim0: 0, dim1: 1}",
            "%3 = add(%2, #0)",
            "live %3"
        ]
    );
}
