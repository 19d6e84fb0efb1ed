//! Memory that a call needs at once: compiled hardly more than eager, which frees every value after its last use, for
//! programs of several kinds; and none from the system once a step has run a few times.

use std::sync::{Mutex, MutexGuard};

use kiln::Result;
use kiln::nn::{Masks, seq};
use kiln::prelude::*;
use kiln::runtime::pool;

const CPU: Device = Device::Cpu;

/// The pool is the process's: tests take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

type Step = Box<dyn Fn() -> Result<Option<Tensor>>>;

/// The most memory that a step needs above what was in use before it, after a few of its kind.
fn peak(step: &dyn Fn() -> Result<Option<Tensor>>) -> Result<usize> {
    let (mut last, mut peak) = (None, 0);
    for _ in 0..4 {
        drop(last.take());
        pool::reset_peak();
        let before = pool::stats();
        last = step()?;
        let after = pool::stats();
        peak = after.peak_live_bytes - (before.live_bytes - before.reserved_bytes);
    }
    Ok(peak)
}

/// Two of a program, one eager and one compiled: the compiled one needs hardly more memory; twice as much at the most
/// where it keeps its memory bound between calls.
fn hardly_more_than_eager(name: &str, make: impl Fn() -> Result<Step>) -> Result<()> {
    let _turn = turn();
    for mode in [Mode::Default, Mode::ReduceOverhead] {
        manual_seed(1);
        let eager = make()?;
        let eager = peak(&*eager)?;
        manual_seed(1);
        let step = make()?;
        let region = Compile::new().mode(mode).fullgraph(true).region();
        let compiled = peak(&|| region.run(&step))?;
        let explanation = region.explain();
        assert!(explanation.graphs.iter().all(|graph| graph.interpreted.is_none()), "{name}: {explanation}");
        assert!(eager > 100_000, "{name}: large enough to be measured, {eager} bytes");
        let allowed = if mode == Mode::ReduceOverhead { 2 * eager } else { eager + eager / 10 };
        assert!(
            compiled <= allowed,
            "{name}, {mode}: {compiled} bytes compiled, {eager} eager\n{explanation}"
        );
    }
    Ok(())
}

/// Gradients are added to those that are there, or made anew.
fn convolutions(anew: bool) -> Result<Step> {
    let mut layers = Vec::new();
    for (from, to, size, stride, pixels) in [(3, 32, 7, 2, 56), (32, 32, 3, 1, 28), (32, 64, 3, 2, 28)] {
        let x = Tensor::randn([4, from, pixels, pixels], &CPU)?;
        let weight = Tensor::randn([to, from, size, size], &CPU)?;
        x.requires_grad_(true)?;
        weight.requires_grad_(true)?;
        layers.push((x, weight, stride, size / 2));
    }
    Ok(Box::new(move || {
        for (x, weight, stride, padding) in &layers {
            if anew {
                x.set_grad(None);
                weight.set_grad(None);
            }
            x.conv2d(weight, None, *stride, *padding, 1, 1)?.relu()?.sum()?.backward()?;
        }
        Ok(None)
    }))
}

#[test]
fn convolutions_forward_and_backward() -> Result<()> {
    hardly_more_than_eager("gradients added", || convolutions(false))?;
    hardly_more_than_eager("gradients anew", || convolutions(true))
}

/// A training step: forward, loss, backward, Adam.
fn training(model: nn::Sequential, x: Tensor, classes: i64, anew: bool) -> Result<Step> {
    let y = Tensor::randint(0, classes, [x.shape()[0]], &CPU)?;
    let optimizer = optim::Adam::new(model.parameters(), 1e-3)?;
    Ok(Box::new(move || {
        if anew {
            optimizer.zero_grad();
        }
        let loss = model.forward(&x)?.cross_entropy(&y)?;
        loss.backward()?;
        optimizer.step()?;
        Ok(Some(loss))
    }))
}

#[test]
fn training_of_a_perceptron() -> Result<()> {
    // More activations than weights, and the other way round.
    for (batch, width) in [(512, 128), (32, 384)] {
        for anew in [false, true] {
            hardly_more_than_eager(&format!("batch {batch}, width {width}"), || {
                let linear = |to: usize| nn::Linear::new(width, to);
                let model = seq![linear(width)?, nn::Gelu, linear(width)?, nn::ReLU, linear(10)?];
                training(model, Tensor::randn([batch, width], &CPU)?, 10, anew)
            })?;
        }
    }
    Ok(())
}

#[test]
fn training_of_a_convolutional_network() -> Result<()> {
    use nn::{BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, ReLU};
    hardly_more_than_eager("convolutional network", || {
        let model = seq![
            Conv2d::options().padding(1).build(3, 16, 3)?,
            BatchNorm2d::new(16)?,
            ReLU,
            MaxPool2d::new(2),
            Conv2d::options().padding(1).build(16, 32, 3)?,
            BatchNorm2d::new(32)?,
            ReLU,
            MaxPool2d::new(2),
            Flatten::default(),
            Linear::new(32 * 8 * 8, 10)?
        ];
        training(model, Tensor::randn([16, 3, 32, 32], &CPU)?, 10, true)
    })
}

#[test]
fn a_transformer_block() -> Result<()> {
    let block = || -> Result<(nn::TransformerEncoderLayer, Tensor)> {
        let block =
            nn::TransformerEncoderLayer::options().dropout(0.0).batch_first(true).encoder_layer(64, 4)?;
        Ok((block, Tensor::randn([4, 96, 64], &CPU)?))
    };
    hardly_more_than_eager("inference", || {
        let (block, x) = block()?;
        block.eval();
        Ok(Box::new(move || {
            let _mode = no_grad();
            block.encode(&x, Masks::default()).map(Some)
        }))
    })?;
    hardly_more_than_eager("training", || {
        let (block, x) = block()?;
        let optimizer = optim::SGD::new(block.parameters(), 0.01)?;
        Ok(Box::new(move || {
            optimizer.zero_grad();
            block.encode(&x, Masks::default())?.square()?.mean()?.backward()?;
            optimizer.step()?;
            Ok(None)
        }))
    })
}

#[test]
fn pointwise_and_reductions() -> Result<()> {
    hardly_more_than_eager("pointwise chain", || {
        let x = Tensor::randn([256, 300], &CPU)?;
        Ok(Box::new(move || ((&x * 2.0 + 1.0).tanh() * &x).softmax(-1).ok().map(Some)))
    })?;
    hardly_more_than_eager("several results", || {
        let x = Tensor::randn([256, 300], &CPU)?;
        let w = Tensor::randn([300, 300], &CPU)?;
        Ok(Box::new(move || {
            let h = x.mm(&w)?.tanh()?;
            let g = h.mm(&w)?.exp()?.neg()?.exp()?;
            Tensor::cat(&[h.mm(&g.t()?)?, g.mm(&h.t()?)?], 0).map(Some)
        }))
    })
}
