//! `model.compile()` and what the public face shows of the compiler.

#![allow(clippy::unwrap_used)] // a test may panic

use std::sync::{Mutex, MutexGuard};

use kiln::nn::{self, Gelu, Linear, Training, seq};
use kiln::prelude::*;
use kiln::{Error, Result, Stance, set_stance};

const CPU: Device = Device::Cpu;

/// The random stream and `reset` are the process's: tests take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn model() -> Result<nn::Sequential> {
    manual_seed(3);
    Ok(seq![Linear::new(4, 8)?, Gelu, Linear::new(8, 2)?])
}

/// A layer that behaves differently in training, and one with a buffer it changes.
#[derive(Module)]
struct Noisy {
    fc: Linear,
    seen: nn::Buffer,
    training: Training,
}

impl Noisy {
    fn new() -> Result<Noisy> {
        manual_seed(9);
        let seen = nn::Buffer::new(Tensor::zeros([2], &CPU)?);
        Ok(Noisy { fc: Linear::new(3, 2)?, seen, training: Training::default() })
    }

    fn batches(&self) -> Result<f32> {
        self.seen.sum()?.item()
    }
}

impl Forward for Noisy {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.fc.forward(x)?;
        if !self.training.get() {
            return Ok(y);
        }
        {
            let _guard = no_grad();
            self.seen.add_(0.5)?;
        }
        y.mul(10.0)
    }
}

#[test]
fn a_compiled_module_is_still_that_module() -> Result<()> {
    let _turn = turn();
    let eager = model()?;
    let names: Vec<String> = eager.named_parameters().into_iter().map(|(name, _)| name).collect();
    let parameters = eager.parameters();
    let compiled = eager.compile();
    let after = compiled.named_parameters();
    assert_eq!(after.iter().map(|(name, _)| name).collect::<Vec<_>>(), names.iter().collect::<Vec<_>>());
    for ((_, a), b) in after.iter().zip(&parameters) {
        assert!(a.same(b), "the parameters are the very same tensors");
    }
    assert_eq!(compiled.len(), 3); // a method of the module, by deref
    assert_eq!(compiled.to_string(), model()?.to_string());
    // It is a layer of larger models, too, under the same names.
    let outer = seq![compiled, Gelu];
    assert_eq!(outer.named_parameters()[0].0, "0.0.weight");
    Ok(())
}

#[test]
fn training_a_compiled_module_is_training_the_module() -> Result<()> {
    let _turn = turn();
    let x = Tensor::ones([5, 4], &CPU)?;
    let train = |model: &dyn nn::Layer| -> Result<Vec<f32>> {
        let opt = optim::SGD::new(model.parameters(), 0.1)?;
        for _ in 0..4 {
            opt.zero_grad();
            model.forward(&x)?.square()?.mean()?.backward()?;
            opt.step()?;
        }
        model.parameters()[0].to_vec()
    };
    let eager = model()?;
    let want = train(&eager)?;
    let compiled = model()?.compile();
    let got = train(&compiled)?;
    for (got, want) in got.iter().zip(&want) {
        assert!((got - want).abs() < 1e-6, "{got} instead of {want}");
    }
    let explanation = compiled.explain();
    assert_eq!(
        (explanation.calls, explanation.replays, explanation.graphs.len()),
        (4, 3, 1),
        "{explanation}"
    );
    assert!(explanation.graphs[0].has_backward && explanation.name == "Sequential");
    let named = explanation.graphs[0].guards.iter().filter_map(|guard| guard.name.as_deref());
    assert!(named.collect::<Vec<_>>().contains(&"2.bias"), "{explanation}");
    // The line of an op is the user's, not one of Kiln's.
    assert!(explanation.to_string().contains("at interface.rs:"), "{explanation}");
    Ok(())
}

#[test]
fn train_and_eval_are_honoured() -> Result<()> {
    let _turn = turn();
    let model = Noisy::new()?;
    let compiled = (&model).compile();
    let x = Tensor::ones([1, 3], &CPU)?;
    let plain = model.fc.forward(&x)?.to_vec::<f32>()?;
    let scaled: Vec<f32> = plain.iter().map(|y| 10.0 * y).collect();
    for round in 0..2 {
        compiled.train();
        assert!(model.is_training());
        assert_eq!(compiled.forward(&x)?.to_vec::<f32>()?, scaled, "round {round}");
        compiled.eval();
        assert_eq!(compiled.forward(&x)?.to_vec::<f32>()?, plain, "round {round}");
    }
    assert_eq!(compiled.batches()?, 2.0, "the buffer counted the two training calls");
    assert_eq!(model.batches()?, 2.0, "and is the module's own");
    Ok(())
}

#[test]
fn a_parameter_that_is_replaced_is_seen() -> Result<()> {
    let _turn = turn();
    let compiled = Linear::new(2, 1)?.compile();
    let x = Tensor::ones([1, 2], &CPU)?;
    compiled.forward(&x)?;
    {
        let _guard = no_grad();
        compiled.parameters().iter().try_for_each(|p| p.fill_(2.0).map(drop))?;
    }
    assert_eq!(compiled.forward(&x)?.item::<f32>()?, 6.0);
    assert_eq!(compiled.explain().graphs.len(), 1);
    Ok(())
}

#[test]
fn options_of_a_compiled_module() -> Result<()> {
    let _turn = turn();
    let options: Compile = "mode=evaluation, fullgraph=true, name=net".parse()?;
    let compiled = model()?.compile_with(options);
    let x = Tensor::ones([3, 4], &CPU)?;
    compiled.warm_up(&x)?;
    {
        let _stance = set_stance(Stance::FailOnRecompile);
        assert!(!compiled.forward(&x)?.requires_grad());
        // Another batch is no recompilation, another rank is one.
        assert_eq!(compiled.forward(&Tensor::ones([2, 4], &CPU)?)?.shape()[0], 2);
        let error = compiled.forward(&Tensor::ones([4], &CPU)?).unwrap_err().to_string();
        assert!(error.contains("was [3, 4], now [4]"), "{error}");
    }
    assert!(compiled.explain().to_string().starts_with("net: "));
    compiled.reset();
    assert_eq!(compiled.explain().calls, 0);
    Ok(())
}

/// A model that asks for a value in the middle.
#[derive(Module)]
struct Branching {
    first: Linear,
    second: Linear,
}

impl Forward for Branching {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.first.forward(x)?;
        if y.sum()?.item::<f32>()?.is_nan() {
            return Err(Error::State("not a number".into()));
        }
        self.second.forward(&y)
    }
}

#[test]
fn breaks_in_a_model_name_the_module() -> Result<()> {
    let _turn = turn();
    let compiled = Branching { first: Linear::new(2, 2)?, second: Linear::new(2, 2)? }.compile();
    compiled.forward(&Tensor::ones([2], &CPU)?)?;
    let explanation = compiled.explain();
    assert_eq!(explanation.breaks[0].module.as_deref(), Some("first"), "{explanation}");
    assert!(explanation.breaks[0].loc.to_string().starts_with("interface.rs:"), "{explanation}");
    assert_eq!(explanation.graphs.len(), 2);
    Ok(())
}

#[test]
fn parameters_without_gradient_are_named() -> Result<()> {
    let _turn = turn();
    let model = model()?;
    let opt = optim::SGD::new(model.parameters(), 0.1)?;
    let x = Tensor::ones([3, 4], &CPU)?;
    let explanation = kiln::explain(|| {
        opt.zero_grad();
        // Cut off by mistake: the first layer learns nothing.
        let hidden = model.get(0).unwrap().forward(&x)?.detach()?;
        let y = model.get(2).unwrap().forward(&hidden.gelu()?)?;
        y.sum()?.backward()?;
        opt.step()
    })?;
    assert_eq!(explanation.without_gradient(), ["0.bias", "0.weight"], "{explanation}");
    Ok(())
}

#[test]
fn parameters_that_a_compiled_module_does_not_use_are_named() -> Result<()> {
    #[derive(Module)]
    struct Net {
        used: nn::Linear,
        forgotten: nn::Linear,
    }
    impl Forward<Tensor> for Net {
        type Output = Tensor;
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            self.used.forward(x)
        }
    }
    let _turn = turn();
    let net = Net { used: nn::Linear::new(4, 2)?, forgotten: nn::Linear::new(4, 2)? }.compile();
    assert!(net.explain().unused.is_empty(), "nothing is known before the first call");
    net.forward(&Tensor::ones([3, 4], &CPU)?)?.sum()?.backward()?;
    assert_eq!(net.explain().unused, ["forgotten.weight", "forgotten.bias"], "{}", net.explain());
    net.forgotten.parameters().iter().try_for_each(|p| p.requires_grad_(false).map(drop))?;
    assert!(net.explain().unused.is_empty(), "{}", net.explain());
    Ok(())
}

/// A screen is enough for a small net; `{:#}` has everything, with names.
#[test]
fn explanations_are_short_and_named() -> Result<()> {
    let _turn = turn();
    let model = model()?;
    let opt = optim::AdamW::new(model.parameters(), 0.1)?;
    let (x, y) = (Tensor::ones([8, 4], &CPU)?, Tensor::zeros([8, 2], &CPU)?);
    let step = compile(|| {
        opt.zero_grad();
        let loss = model.forward(&x)?.mse_loss(&y, kiln::Reduction::Mean)?;
        loss.backward()?;
        opt.step()?;
        Ok(loss)
    });
    step()?;
    step()?;
    let explanation = step.explain();
    let (short, whole) = (explanation.to_string(), format!("{explanation:#}"));
    assert!(short.lines().count() <= 18, "{short}");
    assert!(whole.contains("(exp_avg of 0.weight) is f32["), "{whole}");
    assert!(whole.contains("(exp_avg_sq of 2.bias) is f32["), "{whole}");
    for text in [&short, &whole] {
        assert!(!text.contains(&i64::MAX.to_string()), "{text}");
    }
    Ok(())
}

#[test]
fn reset_drops_all_recordings() -> Result<()> {
    let _turn = turn();
    let x = Tensor::ones([2], &CPU)?;
    let f = compile(|x: &Tensor| x.exp());
    let g = model()?.compile();
    f(&x)?;
    g.forward(&Tensor::ones([1, 4], &CPU)?)?;
    kiln::reset();
    assert_eq!((f.explain().graphs.len(), g.explain().graphs.len()), (0, 0));
    f(&x)?;
    assert_eq!(f.explain().graphs.len(), 1);
    Ok(())
}
