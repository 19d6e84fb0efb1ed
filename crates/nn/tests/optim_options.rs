//! Options that make no sense, groups, and what a step is to a recorder.

use std::sync::Arc;

use expect_test::{Expect, expect};
use kiln_nn::optim::{Adam, AdamW, Optimizer, ParamGroup, SGD};
use kiln_nn::{Linear, Module};
use kiln_tensor::hook::{Access, Arg, Call, Output, Recorder, Scope};
use kiln_tensor::internal::ListState;
use kiln_tensor::{Device, Result, Tensor};
use parking_lot::Mutex;

fn parameter(n: usize) -> Result<Tensor> {
    let tensor = Tensor::ones([n], &Device::Cpu)?;
    tensor.requires_grad_(true)?;
    Ok(tensor)
}

/// The error without its line.
fn check<T>(result: Result<T>, expect: Expect) {
    let message = result.err().map_or("no error".to_string(), |error| error.to_string());
    assert!(message.contains(", at optim_options.rs:"), "{message}");
    expect.assert_eq(message.split(", at optim_options.rs").next().unwrap_or_default());
}

#[test]
fn options_are_checked() -> Result<()> {
    let p = || -> Result<_> { Ok(vec![parameter(2)?]) };
    check(SGD::new(p()?, -0.1), expect!["SGD: lr must be 0 or more, got -0.1"]);
    check(SGD::new(p()?, f64::NAN), expect!["SGD: lr must be 0 or more, got NaN"]);
    check(SGD::options().momentum(-1.0).build(p()?), expect!["SGD: momentum must be 0 or more, got -1"]);
    check(
        SGD::options().weight_decay(-1.0).build(p()?),
        expect!["SGD: weight_decay must be 0 or more, got -1"],
    );
    check(
        SGD::options().nesterov(true).build(p()?),
        expect!["SGD: momentum must be more than 0 with nesterov, got 0"],
    );
    check(
        SGD::options().nesterov(true).momentum(0.9).dampening(0.1).build(p()?),
        expect!["SGD: dampening must be 0 with nesterov, got 0.1"],
    );
    check(Adam::new(p()?, -1.0), expect!["Adam: lr must be 0 or more, got -1"]);
    check(Adam::options().eps(-1.0).build(p()?), expect!["Adam: eps must be 0 or more, got -1"]);
    check(
        Adam::options().betas(1.0, 0.9).build(p()?),
        expect!["Adam: betas.0 must be 0 or more and less than 1, got 1"],
    );
    check(
        AdamW::options().betas(0.9, -0.5).build(p()?),
        expect!["AdamW: betas.1 must be 0 or more and less than 1, got -0.5"],
    );
    check(
        AdamW::options().weight_decay(-1.0).build(p()?),
        expect!["AdamW: weight_decay must be 0 or more, got -1"],
    );
    Ok(())
}

#[test]
fn parameters_are_checked() -> Result<()> {
    let p = parameter(2)?;
    check(Adam::new(vec![], 0.1), expect!["Adam: the number of parameters must be 1 or more, got 0"]);
    check(Adam::from_groups([]), expect!["Adam: the number of parameter groups must be 1 or more, got 0"]);
    check(SGD::new(vec![p.clone(), p.clone()], 0.1), expect!["SGD: the parameter f32[2] appears twice"]);
    check(
        SGD::new(vec![p.exp()?], 0.1),
        expect!["SGD: the parameter f32[2] must be a leaf (detach() gives one)"],
    );
    check(
        SGD::new(vec![Tensor::from_slice(&[1i64])?], 0.1),
        expect!["SGD: a parameter must be floating point, got i64"],
    );
    let linear = Linear::new(2, 3)?;
    let adam = Adam::new(linear.parameters(), 0.1)?;
    let again = ParamGroup::new(vec![linear.weight.tensor().clone()], Adam::options());
    check(adam.add_param_group(again), expect!["Adam: the parameter f32[3, 2] (weight) appears twice"]);
    Ok(())
}

#[test]
fn groups_have_options_of_their_own() -> Result<()> {
    let (a, b) = (parameter(1)?, parameter(1)?);
    let sgd = SGD::from_groups([
        ParamGroup::new(vec![a.clone()], SGD::options().lr(0.5)),
        ParamGroup::new(vec![b.clone()], SGD::options().lr(0.25)),
    ])?;
    assert_eq!((sgd.lr(), sgd.lrs()), (0.5, vec![0.5, 0.25]));
    for p in sgd.parameters() {
        p.set_grad(Some(Tensor::from_slice(&[1.0f32])?));
    }
    sgd.step()?;
    assert_eq!((a.item::<f32>()?, b.item::<f32>()?), (0.5, 0.75));
    sgd.set_lrs(&[0.0, 0.5]);
    sgd.step()?;
    assert_eq!((a.item::<f32>()?, b.item::<f32>()?), (0.5, 0.25));
    sgd.set_lr(0.25);
    sgd.step()?;
    assert_eq!((a.item::<f32>()?, b.item::<f32>()?), (0.25, 0.0));
    sgd.zero_grad();
    assert!(a.grad().is_none() && b.grad().is_none());
    sgd.step()?;
    assert_eq!(a.item::<f32>()?, 0.25);
    Ok(())
}

#[test]
fn parameters_count_their_own_steps() -> Result<()> {
    let (a, b) = (parameter(2)?, parameter(3)?);
    let adam = Adam::new(vec![a.clone(), b.clone()], 0.1)?;
    a.set_grad(Some(a.ones_like()?));
    adam.step()?;
    assert!(adam.state(&b).is_none(), "state is made at the first gradient");
    b.set_grad(Some(b.ones_like()?));
    adam.step()?;
    adam.step()?;
    a.set_grad(None);
    adam.step()?;
    let steps = |p: &Tensor| adam.state(p).map(|state| state.step);
    assert_eq!((steps(&a), steps(&b)), (Some(3), Some(3)));
    a.set_grad(Some(a.ones_like()?));
    adam.step()?;
    assert_eq!((steps(&a), steps(&b)), (Some(4), Some(4)));
    Ok(())
}

/// Writes down every op, then runs it eagerly.
#[derive(Default)]
struct Log(Mutex<Vec<String>>);

impl Recorder for Log {
    fn call(&self, call: &Call<'_>) -> Result<Output> {
        let operands: Vec<String> = call
            .args
            .iter()
            .map(|arg| match arg {
                Arg::Tensor(_) => "tensor".to_string(),
                Arg::Number(x) => x.kind().name().to_string(),
                Arg::List(list) => format!("list of {}", list.try_items().map_or(0, <[_]>::len)),
            })
            .collect();
        let mark = if call.in_place { "_" } else { "" };
        self.0.lock().push(format!("{}{mark}({})", call.op.name(), operands.join(", ")));
        assert!(!call.grad_enabled);
        let _eager = Scope::suspend();
        kiln_tensor::execute(call)
    }
    fn backward(&self, _: &kiln_tensor::hook::GradRequest<'_>) -> Result<()> {
        panic!("no backward in a step")
    }
    fn access(&self, _: &Tensor, _: Access, what: &'static str, _: kiln_ir::Loc) -> Result<()> {
        panic!("{what} in a step")
    }
    fn ty(&self, _: &Tensor) -> Option<kiln_ir::TensorTy> {
        None
    }
    fn layout(&self, _: &Tensor) -> Option<kiln_ir::Layout> {
        None
    }
    fn settle(&self) -> Result<()> {
        Ok(())
    }
    fn force(&self) -> Result<()> {
        Ok(())
    }
}

/// The ops of a step, which must be the same in the first call and in later ones.
fn check_ops(build: impl Fn(Vec<Tensor>) -> Result<Box<dyn Optimizer>>, expect: Expect) -> Result<()> {
    let params = (1..=5).map(parameter).collect::<Result<Vec<_>>>()?;
    let optimizer = build(params.clone())?;
    for p in &params {
        p.set_grad(Some(p.ones_like()?));
    }
    let mut first = None;
    for lr in [0.1, 0.1, 0.05] {
        optimizer.set_lr(lr);
        let log = Arc::new(Log::default());
        {
            let _scope = Scope::enter(log.clone());
            optimizer.step()?;
        }
        let ops = log.0.lock().join("\n");
        assert_eq!(&ops, first.get_or_insert(ops.clone()));
    }
    expect.assert_eq(&first.unwrap_or_default());
    Ok(())
}

#[test]
fn every_step_is_the_same_few_ops() -> Result<()> {
    check_ops(
        |p| Ok(Box::new(Adam::new(p, 0.1)?)),
        expect![[r#"
            lerp_(list of 5, list of 5, float)
            mul_(list of 5, float)
            addcmul_(list of 5, list of 5, list of 5, float)
            sqrt(list of 5)
            div_(list of 5, float)
            add_(list of 5, float)
            addcdiv_(list of 5, list of 5, list of 5, float)"#]],
    )?;
    check_ops(
        |p| Ok(Box::new(AdamW::options().amsgrad(true).build(p)?)),
        expect![[r#"
            mul_(list of 5, float)
            lerp_(list of 5, list of 5, float)
            mul_(list of 5, float)
            addcmul_(list of 5, list of 5, list of 5, float)
            maximum_(list of 5, list of 5)
            sqrt(list of 5)
            div_(list of 5, float)
            add_(list of 5, float)
            addcdiv_(list of 5, list of 5, list of 5, float)"#]],
    )?;
    check_ops(|p| Ok(Box::new(SGD::new(p, 0.1)?)), expect!["add_(list of 5, list of 5, float)"])?;
    check_ops(
        |p| Ok(Box::new(SGD::options().momentum(0.9).dampening(0.2).build(p)?)),
        expect![[r#"
            mul_(list of 5, float)
            add_(list of 5, list of 5, float)
            add_(list of 5, list of 5, float)"#]],
    )?;
    Ok(())
}
