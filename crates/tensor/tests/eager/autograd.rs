//! Gradients by request, hooks, retained gradients, second derivatives, anomaly detection.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_tensor::{Device, GradOptions, IndexOp, Result, Tensor, backward_all, detect_anomaly, grad};

fn leaf(values: &[f64]) -> Tensor {
    let x = Tensor::from_slice(values).unwrap();
    x.requires_grad_(true).unwrap();
    x
}

fn values(x: &Tensor) -> Vec<f64> {
    x.to_vec_cast::<f64>().unwrap()
}

const AGAIN: GradOptions = GradOptions { retain_graph: None, create_graph: true, allow_unused: false };

fn one(output: &Tensor, input: &Tensor, options: GradOptions) -> Tensor {
    grad(&[output], &[input], &[], options).unwrap().remove(0).unwrap()
}

#[test]
fn grad_touches_nobody() {
    let (x, y) = (leaf(&[2.0, 3.0]), leaf(&[5.0, 7.0]));
    let z = x.mul(&y).unwrap();
    let loss = z.mul(&x).unwrap().sum().unwrap();
    let found = grad(&[&loss], &[&z, &y, &x, &x], &[], GradOptions::default()).unwrap();
    let found: Vec<Vec<f64>> = found.into_iter().map(|g| values(&g.unwrap())).collect();
    assert_eq!(found, [vec![2.0, 3.0], vec![4.0, 9.0], vec![20.0, 42.0], vec![20.0, 42.0]]);
    assert!(x.grad().is_none() && y.grad().is_none());
    let error = grad(&[&loss], &[&x], &[], GradOptions::default()).unwrap_err();
    assert!(error.to_string().contains("freed"), "{error}");
}

#[test]
fn only_what_leads_to_the_inputs_is_run() {
    let (x, y) = (leaf(&[2.0]), leaf(&[3.0]));
    let seen = Arc::new(AtomicUsize::new(0));
    let side = y.exp().unwrap();
    let count = seen.clone();
    y.register_hook(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(None)
    })
    .unwrap();
    let loss = x.mul(&side).unwrap();
    one(&loss, &x, GradOptions { retain_graph: Some(true), ..GradOptions::default() });
    assert_eq!(seen.load(Ordering::Relaxed), 0);
    loss.backward().unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), 1);
}

#[test]
fn unused_inputs() {
    let (x, y) = (leaf(&[2.0]), leaf(&[3.0]));
    let loss = x.exp().unwrap();
    let keep = GradOptions { retain_graph: Some(true), ..GradOptions::default() };
    let error = grad(&[&loss], &[&x, &y], &[], keep).unwrap_err();
    assert!(error.to_string().contains("input 1"), "{error}");
    let found = grad(&[&loss], &[&x, &y], &[], GradOptions { allow_unused: true, ..keep }).unwrap();
    assert!(found[0].is_some() && found[1].is_none());
    let plain = Tensor::from_slice(&[1.0f64]).unwrap();
    assert!(grad(&[&loss], &[&plain], &[], keep).is_err());
    assert!(grad(&[&plain], &[&x], &[], keep).is_err());
}

#[test]
fn third_derivatives() {
    let x = leaf(&[0.3, -1.2, 2.0]);
    let mut y = x.exp().unwrap().mul(&x).unwrap();
    // Derivatives of x·eˣ.
    let expected: [fn(f64) -> f64; 3] =
        [|x| (x + 1.0) * x.exp(), |x| (x + 2.0) * x.exp(), |x| (x + 3.0) * x.exp()];
    for derivative in expected {
        y = one(&y.sum().unwrap(), &x, AGAIN);
        for (found, x) in values(&y).into_iter().zip([0.3, -1.2, 2.0]) {
            assert!(
                (found - derivative(x)).abs() < 1e-12 * derivative(x).abs().max(1.0),
                "{found} {}",
                derivative(x)
            );
        }
    }
}

#[test]
fn a_gradient_penalty_reaches_the_weights() {
    // loss = Σ (∂ Σ tanh(x w) / ∂x)², by finite differences in w.
    let x_values = [0.3, -0.7, 1.1, 0.4, 0.2, -0.5];
    let penalty = |weights: &[f64]| -> (Tensor, Tensor) {
        let x = Tensor::from_slice(&x_values).unwrap().reshape([2, 3]).unwrap();
        let x = x.detach().unwrap();
        x.requires_grad_(true).unwrap();
        let w = leaf(weights);
        let y = x.mm(&w.reshape([3, 2]).unwrap()).unwrap().tanh().unwrap().sum().unwrap();
        let slope = one(&y, &x, AGAIN);
        (slope.mul(&slope).unwrap().sum().unwrap(), w)
    };
    let weights = [0.5, -0.2, 0.8, 0.1, -0.9, 0.3];
    let (loss, w) = penalty(&weights);
    loss.backward().unwrap();
    let found = values(&w.grad().unwrap());
    for i in 0..weights.len() {
        let at = |h: f64| {
            let mut moved = weights;
            moved[i] += h;
            penalty(&moved).0.item::<f64>().unwrap()
        };
        let numeric = (at(1e-5) - at(-1e-5)) / 2e-5;
        assert!((found[i] - numeric).abs() < 1e-8, "{i}: {} {numeric}", found[i]);
    }
}

#[test]
fn hooks_change_gradients_and_go_away() {
    let x = leaf(&[1.0, 2.0]);
    let y = x.mul(3.0).unwrap();
    let on_leaf = x.register_hook(|g| g.mul(10.0).map(Some)).unwrap();
    let on_result = y.register_hook(|g| g.add(1.0).map(Some)).unwrap();
    y.sum().unwrap().backward_with(None, true).unwrap();
    assert_eq!(values(&x.grad().unwrap()), [60.0, 60.0]);
    on_leaf.remove();
    on_result.remove();
    x.set_grad(None);
    y.sum().unwrap().backward().unwrap();
    assert_eq!(values(&x.grad().unwrap()), [3.0, 3.0]);
}

#[test]
fn a_failing_hook_stops_the_pass_and_touches_no_leaf() {
    let x = leaf(&[1.0]);
    let y = x.exp().unwrap();
    y.register_hook(|g| g.reshape([7]).map(Some)).unwrap();
    assert!(y.backward().is_err());
    assert!(x.grad().is_none());
    let z = x.exp().unwrap();
    z.register_hook(|_| Tensor::from_slice(&[1.0f64, 2.0]).map(Some)).unwrap();
    let error = z.backward().unwrap_err();
    assert!(error.to_string().contains("hook"), "{error}");
    assert!(Tensor::from_slice(&[1.0f64]).unwrap().register_hook(|_| Ok(None)).is_err());
}

#[test]
fn retained_gradients_accumulate() {
    let x = leaf(&[2.0]);
    let y = x.mul(&x).unwrap();
    y.retain_grad().unwrap();
    y.retain_grad().unwrap();
    assert!(y.grad().is_none());
    let z = y.mul(3.0).unwrap();
    z.backward_with(None, true).unwrap();
    z.backward().unwrap();
    assert_eq!((values(&y.grad().unwrap()), values(&x.grad().unwrap())), (vec![6.0], vec![24.0]));
    x.retain_grad().unwrap();
    assert!(Tensor::from_slice(&[1.0f64]).unwrap().retain_grad().is_err());
}

#[test]
fn several_roots_in_one_pass() {
    let x = leaf(&[1.0, 2.0]);
    let (a, b) = (x.mul(2.0).unwrap().sum().unwrap(), x.mul(&x).unwrap());
    let weights = Tensor::from_slice(&[1.0f64, 10.0]).unwrap();
    backward_all(&[&a, &b], &[None, Some(&weights)], GradOptions::default()).unwrap();
    assert_eq!(values(&x.grad().unwrap()), [4.0, 42.0]);
    assert!(backward_all(&[&a], &[None, None], GradOptions::default()).is_err());
    // With create_graph the gradient itself is on the tape.
    let y = leaf(&[3.0]);
    backward_all(&[&y.mul(&y).unwrap()], &[], AGAIN).unwrap();
    let slope = y.grad().unwrap();
    assert!(slope.requires_grad());
    assert_eq!(values(&one(&slope, &y, GradOptions::default())), [2.0]);
}

#[test]
fn anomalies_are_named() {
    let x = leaf(&[0.0, 1.0]);
    let y = x.sqrt().unwrap();
    let zero = y.mul(0.0).unwrap().sum().unwrap();
    zero.backward_with(None, true).unwrap();
    assert!(values(&x.grad().unwrap())[0].is_nan());
    x.set_grad(None);
    let _search = detect_anomaly();
    let error = zero.backward().unwrap_err().to_string();
    assert!(error.contains("sqrt") && error.contains("NaN") && error.contains("autograd.rs"), "{error}");
    assert!(x.grad().is_none());
}

#[test]
fn a_leaf_that_is_a_view_is_trained_like_any_other() -> kiln_tensor::Result<()> {
    let weight = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0])?.reshape([2, 2])?;
    weight.requires_grad_(true)?;
    for _ in 0..3 {
        weight.set_grad(None);
        weight.narrow(0, 0, 1)?.mul(3.0)?.sum()?.backward()?;
        let _mode = kiln_tensor::no_grad();
        weight.sub_(&weight.grad().unwrap())?;
    }
    assert_eq!(weight.to_vec::<f32>()?, [-8.0, -7.0, 3.0, 4.0]);
    Ok(())
}

/// Results that nobody else has may be changed, whatever op made them.
#[test]
fn results_of_composites_can_be_changed_in_place() -> Result<()> {
    let table = Tensor::randn([5, 3], &Device::Cpu)?;
    let leaf = || -> Result<Tensor> {
        let leaf = table.clone_tensor()?;
        leaf.requires_grad_(true)?;
        Ok(leaf)
    };
    let index = Tensor::new(&[0i64, 2, 2, 4], &Device::Cpu)?;
    let mask = Tensor::new(&[true, false, true, true, false], &Device::Cpu)?;
    type Make<'a> = (&'a str, Box<dyn Fn(&Tensor) -> Result<Tensor> + 'a>);
    let makes: Vec<Make<'_>> = vec![
        ("embedding", Box::new(|x| x.embedding(&index))),
        ("index", Box::new(|x| x.i(&index))),
        ("masked index", Box::new(|x| x.i(&mask))),
        ("index_select", Box::new(|x| x.index_select(0, &index))),
        ("take", Box::new(|x| x.take(&index))),
        ("gather", Box::new(|x| x.gather(0, &index.reshape([4, 1])?))),
        ("logsumexp, kept by another op", Box::new(|x| x.logsumexp([1], false)?.mul(1.0))),
        ("var", Box::new(|x| x.var_dim(1, 1, true))),
        ("softmax", Box::new(|x| x.softmax(-1)?.mul(1.0))),
        ("cat", Box::new(|x| Tensor::cat([x, x], 0))),
        ("stack", Box::new(|x| Tensor::stack([x, x], 0))),
        ("repeat", Box::new(|x| x.repeat([1, 1]))),
        ("flip", Box::new(|x| x.flip([0]))),
        ("roll", Box::new(|x| x.roll(1, 0))),
        ("sort", Box::new(|x| Ok(x.sort(0, false)?.0))),
        ("max_dim", Box::new(|x| Ok(x.max_dim(1, false)?.0))),
        ("layer_norm", Box::new(|x| x.layer_norm(&[3], None, None, 1e-5))),
        ("masked_fill", Box::new(|x| x.masked_fill(&mask.reshape([5, 1])?, 0.5))),
        ("tril", Box::new(|x| x.tril(0))),
    ];
    for (name, make) in makes {
        let (a, b) = (leaf()?, leaf()?);
        let (x, y) = (make(&a)?, make(&b)?);
        x.add_(1.5).map_err(|e| e.named(name))?.mul_(0.5)?;
        let y = y.add(1.5)?.mul(0.5)?;
        assert_eq!(x.to_vec::<f32>()?, y.to_vec::<f32>()?, "{name}");
        x.mul(&x)?.sum()?.backward()?;
        y.mul(&y)?.sum()?.backward()?;
        assert_eq!(a.grad().unwrap().to_vec::<f32>()?, b.grad().unwrap().to_vec::<f32>()?, "{name}");
    }
    Ok(())
}

/// Assignment by any index is recorded, with gradients for what is kept and what is put.
#[test]
fn assigned_parts_have_gradients() -> Result<()> {
    let x = Tensor::randn([4, 3], &Device::Cpu)?;
    let rows = Tensor::new(&[true, false, true, false], &Device::Cpu)?;
    let mask = x.gt(0.0)?;
    let index = Tensor::new(&[3i64, 1], &Device::Cpu)?;
    type Set<'a> = (&'a str, &'a [usize], Box<dyn Fn(&Tensor, &Tensor) -> Result<()> + 'a>);
    let ways: Vec<Set<'_>> = vec![
        ("a mask, a number", &[], Box::new(|t, v| t.set_i(&mask, v))),
        ("a mask of rows", &[3], Box::new(|t, v| t.set_i(&rows, v))),
        ("a mask of rows, each its own", &[2, 3], Box::new(|t, v| t.set_i(&rows, v))),
        ("an index", &[2, 3], Box::new(|t, v| t.set_i(&index, v))),
        ("a row", &[3], Box::new(|t, v| t.set_i(2, v))),
        ("a column", &[4], Box::new(|t, v| t.set_i((.., 1), v))),
        ("a range", &[2, 3], Box::new(|t, v| t.set_i(1..3, v))),
        ("an element", &[], Box::new(|t, v| t.set_i((1, 2), v))),
        ("an index and a range", &[2, 2], Box::new(|t, v| t.set_i((&index, 1..), v))),
    ];
    for (name, shape, set) in ways {
        let (leaf, value) = (x.clone_tensor()?, Tensor::randn(shape, &Device::Cpu)?);
        leaf.requires_grad_(true)?;
        value.requires_grad_(true)?;
        let t = leaf.mul(1.0)?;
        set(&t, &value).map_err(|e| e.named(name))?;
        let weights = Tensor::arange(1, 13, &Device::Cpu)?.to_dtype(x.dtype())?.reshape([4, 3])?;
        t.mul(&weights)?.sum()?.backward()?;
        // Marks show which elements were replaced, and by which of the values.
        let marks = Tensor::zeros([4, 3], &Device::Cpu)?;
        set(&marks, &Tensor::ones(shape, &Device::Cpu)?)?;
        let kept = weights.mul(&marks.neg()?.add(1.0)?)?;
        assert_eq!(leaf.grad().unwrap().to_vec::<f32>()?, kept.to_vec::<f32>()?, "{name}");
        let (put, total) = (value.grad().unwrap().sum()?, weights.mul(&marks)?.sum()?);
        assert_eq!(put.item::<f32>()?, total.item::<f32>()?, "{name}");
    }
    Ok(())
}
