//! Ops of one's own: one node in a graph, one step in a plan, gradients by ops of their own.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_dynamo::{Backend, Compile};
use kiln_ir::{Graph, TensorTy};
use kiln_tensor::{CustomOp, DType, GradOptions, Result, Tensor, grad};

use crate::{leaf, t};

static CALLS: AtomicUsize = AtomicUsize::new(0);

/// x · sigmoid(y), with gradients for both; in f32 alone.
fn gate() -> CustomOp {
    static MADE: OnceLock<CustomOp> = OnceLock::new();
    *MADE.get_or_init(|| {
        let like = |tys: &[TensorTy]| Ok(tys[0].clone());
        let first = CustomOp::new("tests::gate_x")
            .types(like)
            .kernel(|args| args[3].mul(&args[1].sigmoid()?))
            .register();
        let second = CustomOp::new("tests::gate_y")
            .types(like)
            .kernel(|args| {
                let s = args[1].sigmoid()?;
                args[3].mul(&args[0])?.mul(&s.mul(&s.rsub(1.0)?)?)
            })
            .register();
        let op = CustomOp::new("tests::gate").types(|tys| match tys {
            [x, y] if x.shape == y.shape && x.dtype == DType::F32 => Ok(x.clone()),
            [x, y] => Err(format!("{x} and {y}: two equal shapes in f32 are wanted")),
            _ => Err(format!("takes two tensors, not {}", tys.len())),
        });
        let op = op.kernel(|args| {
            CALLS.fetch_add(1, Ordering::Relaxed);
            args[0].mul(&args[1].sigmoid()?)
        });
        op.gradient(0, &first.unwrap()).gradient(1, &second.unwrap()).register().unwrap()
    })
}

/// What the op stands for, by ops of the table.
fn plain(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    x.mul(&y.sigmoid()?)
}

/// A program around it: strided operands, a change in place of its result, gradients.
fn program(op: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let z = op(&x.exp()?.t()?, &y.t()?)?;
    let total = op(&z, &z.add(1.0)?)?.mul(&z)?.sum()?;
    total.backward()?;
    total.detach()
}

#[test]
fn they_are_captured_compiled_and_differentiated() -> Result<()> {
    let data = |from: f32| -> Result<Tensor> {
        leaf(&[0.1, -0.7, 1.3, 0.4, -0.2, 0.9]).detach()?.add(from)?.reshape((2, 3))
    };
    let leaves = || -> Result<(Tensor, Tensor)> {
        let (x, y) = (data(0.0)?, data(0.5)?);
        x.requires_grad_(true)?;
        y.requires_grad_(true)?;
        Ok((x, y))
    };
    let op = |x: &Tensor, y: &Tensor| gate().call(&[x, y]);
    let (x, y) = leaves()?;
    let want = program(&plain, &x, &y)?;
    let near = |a: &Tensor, b: &Tensor| -> Result<bool> {
        Ok(a.sub(b)?.abs()?.max()?.item::<f32>()? < 1e-5 && a.shape() == b.shape())
    };
    for backend in [None, Some(Backend::Inductor), Some(Backend::AotEager), Some(Backend::Eager)] {
        let region = backend.map(|backend| Compile::new().backend(backend).fullgraph(true).region());
        for _ in 0..3 {
            let (a, b) = leaves()?;
            let got = match &region {
                Some(region) => region.run(|| program(&op, &a, &b))?,
                None => program(&op, &a, &b)?,
            };
            assert!(near(&got, &want)?, "{backend:?}: {got} instead of {want}");
            assert!(near(&a.grad().unwrap(), &x.grad().unwrap())?, "{backend:?}");
            assert!(near(&b.grad().unwrap(), &y.grad().unwrap())?, "{backend:?}");
        }
        let Some(region) = region else { continue };
        let explanation = region.explain();
        assert_eq!((explanation.graphs.len(), explanation.breaks.len()), (1, 0), "{backend:?}");
        if backend == Some(Backend::Inductor) {
            assert_eq!(explanation.graphs[0].interpreted, None);
            assert!(explanation.to_string().contains("tests::gate"), "{explanation}");
        }
    }
    Ok(())
}

#[test]
fn their_kernels_run_once_a_call() -> Result<()> {
    let (x, y) = (t(&[1.0, 2.0]), t(&[0.0, 0.0]));
    let before = CALLS.load(Ordering::Relaxed);
    let region = Compile::new().region();
    for _ in 0..4 {
        let z = region.run(|| gate().call(&[&x, &y])?.add(1.0))?;
        assert_eq!(z.to_vec::<f32>()?, [1.5, 2.0]);
    }
    assert!(CALLS.load(Ordering::Relaxed) - before >= 4);
    Ok(())
}

#[test]
fn what_is_wrong_with_them_is_said() -> Result<()> {
    let (x, y) = (t(&[1.0, 2.0]), t(&[1.0]));
    for compiled in [false, true] {
        let call = || gate().call(&[&x, &y]);
        let error = if compiled { Compile::new().region().run(call) } else { call() };
        let error = error.unwrap_err().to_string();
        assert!(
            error.starts_with(
                "tests::gate: f32[2] × f32[1]: f32[2] and f32[1]: two equal shapes in f32 are wanted"
            ) && error.contains("custom_ops.rs"),
            "{error}"
        );
    }
    let same = |tys: &[TensorTy]| Ok(tys[0].clone());
    let liar = CustomOp::new("tests::liar").types(same).kernel(|args| args[0].sum()).register()?;
    let error = liar.call(&[&x]).unwrap_err().to_string();
    assert!(error.contains("its kernel returned f32[], its type rule says f32[2]"), "{error}");
    let region = Compile::new().region();
    let error = region.run(|| liar.call(&[&x])).unwrap_err().to_string();
    assert!(error.contains("its kernel returned f32[]"), "{error}");
    // An operand handed back is not the result itself.
    let same_memory =
        CustomOp::new("tests::same").types(same).kernel(|args| Ok(args[0].clone())).register()?;
    let z = same_memory.call(&[&x])?;
    z.add_(1.0)?;
    assert_eq!((x.to_vec::<f32>()?, z.to_vec::<f32>()?), (vec![1.0, 2.0], vec![2.0, 3.0]));
    // No gradient, and gradients of gradients.
    let x = leaf(&[1.0, 2.0]);
    let error = same_memory.call(&[&x])?.sum()?.backward().unwrap_err().to_string();
    assert!(error.contains("no gradient was registered for it"), "{error}");
    let options = GradOptions { create_graph: true, ..GradOptions::default() };
    let first = grad(&[&gate().call(&[&x, &x])?.sum()?], &[&x], &[], options)?.remove(0).unwrap();
    let error = first.sum()?.backward().unwrap_err().to_string();
    assert!(
        error.contains("tests::gate_")
            && error.contains("custom_ops.rs")
            && error.contains("no gradient was registered for it"),
        "{error}"
    );
    for (name, want) in [
        ("softcap", "a name is a namespace and a name"),
        ("tests::gate", "already registered"),
        ("tests::", "a name is a namespace and a name"),
    ] {
        gate();
        let made = CustomOp::new(name).types(same).kernel(|args| Ok(args[0].clone())).register();
        assert!(made.unwrap_err().to_string().contains(want), "{name}");
    }
    assert!(
        CustomOp::new("tests::empty").types(same).register().unwrap_err().to_string().contains("no kernel")
    );
    assert_eq!(CustomOp::find("tests::gate"), Some(gate()));
    Ok(())
}

#[test]
fn their_graphs_are_text_that_parses_back() -> Result<()> {
    gate();
    let text = "\
graph(%0: f32[2], %1: f32[2]) {
  %2 = custom(%0, %1) {op: tests::gate} : f32[2]
  return %2
}
";
    assert_eq!(text.parse::<Graph>()?.to_string(), text);
    let unknown = text.replace("tests::gate", "tests::nobody").parse::<Graph>().unwrap_err().to_string();
    assert!(unknown.contains("unknown op or attributes: `custom`"), "{unknown}");
    Ok(())
}
