//! Recurrent layers in compiled training: one graph whatever the length of the sequences.

use kiln::prelude::*;
use kiln::{Explanation, Result};

/// A sequence in, an LSTM of two layers, a GRU of two directions, a loss.
struct Training {
    lstm: nn::LSTM,
    gru: nn::GRU,
    optimizer: optim::Adam,
}

impl Training {
    fn new() -> Result<Training> {
        manual_seed(3);
        let lstm = nn::LSTM::options().num_layers(2).build(5, 12)?;
        let gru = nn::GRU::options().bidirectional(true).batch_first(true).build(12, 6)?;
        let parameters = [lstm.parameters(), gru.parameters()].concat();
        Ok(Training { optimizer: optim::Adam::new(parameters, 0.01)?, lstm, gru })
    }

    fn step(&self, x: &Tensor) -> Result<Tensor> {
        self.optimizer.zero_grad();
        let (y, (hidden, _)) = self.lstm.forward(x)?;
        let (y, last) = self.gru.forward(&y.transpose(0, 1)?)?;
        let loss = (y.square()?.mean()? + last.mean()? + hidden.square()?.mean()?).ok()?;
        loss.backward()?;
        self.optimizer.step()?;
        loss.detach()
    }
}

fn train(lengths: impl Iterator<Item = usize>) -> Result<Explanation> {
    let (compiled, eager) = (Training::new()?, Training::new()?);
    let region = Compile::new().fullgraph(true).region();
    for (i, length) in lengths.enumerate() {
        manual_seed(100 + i as u64);
        let x = Tensor::randn([length, 3, 5], &Device::Cpu)?;
        let (got, want) = (region.run(|| compiled.step(&x))?, eager.step(&x)?);
        let (got, want) = (got.item::<f64>()?, want.item::<f64>()?);
        assert!((got - want).abs() <= 1e-4 * want.abs().max(0.1), "length {length}: {got} instead of {want}");
    }
    Ok(region.explain())
}

#[test]
fn twenty_lengths_are_one_graph() -> Result<()> {
    let explanation = train((0..20).map(|i| 3 + (i * 37) % 53))?;
    assert!(explanation.breaks.is_empty() && explanation.recompiles.is_empty(), "{explanation}");
    assert_eq!((explanation.calls, explanation.sizes), (20, 19), "{explanation}");
    // A layer's direction is one op, whatever the length.
    assert!(
        explanation.graphs[0].fallbacks.is_empty() && explanation.graphs[0].kernels < 70,
        "{explanation}"
    );
    let resized = explanation.graphs.iter().filter(|graph| graph.resizes.is_some());
    assert!(resized.count() >= 1, "{explanation}");
    Ok(())
}
