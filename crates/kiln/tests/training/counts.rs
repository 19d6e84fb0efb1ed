//! How often a long training compiles: once.

use std::collections::HashSet;

use kiln::prelude::*;
use kiln::{Explanation, Result};

use crate::compare::{constant, samples, weight};

struct Training {
    parameters: Vec<Tensor>,
    optimizer: optim::Adam,
}

impl Training {
    fn new() -> Result<Training> {
        let dtype = DType::F32;
        let parameters = vec![
            weight(&[16, 8], 1, dtype)?,
            constant(16, 0.1, dtype)?,
            weight(&[3, 16], 2, dtype)?,
            constant(3, 0.0, dtype)?,
        ];
        Ok(Training { optimizer: optim::Adam::new(parameters.clone(), 0.01)?, parameters })
    }

    fn step(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        self.optimizer.zero_grad();
        let [w1, b1, w2, b2] = [0, 1, 2, 3].map(|i| &self.parameters[i]);
        let loss = x.linear(w1, Some(b1))?.gelu()?.linear(w2, Some(b2))?.cross_entropy(y)?;
        loss.backward()?;
        self.optimizer.step()?;
        loss.detach()
    }
}

fn close(got: &Tensor, want: &Tensor, what: &str) -> Result<()> {
    let (got, want) = (got.item::<f64>()?, want.item::<f64>()?);
    assert!((got - want).abs() <= 1e-4 * want.abs().max(0.1), "{what}: {got} instead of {want}");
    Ok(())
}

#[test]
fn a_schedule_of_a_thousand_steps_is_one_graph() -> Result<()> {
    let (compiled, eager) = (Training::new()?, Training::new()?);
    let region = Compile::new().fullgraph(true).region();
    let (x, y) = samples(&[12, 8], 3, 1, DType::F32)?;
    for i in 0..1000 {
        // Numbers that compilers like to treat as special are among them: 0 and 1e-2 exactly.
        let lr = 0.005 * (1.0 + (std::f64::consts::PI * f64::from(i) / 500.0).cos());
        compiled.optimizer.set_lr(lr);
        eager.optimizer.set_lr(lr);
        let got = region.run(|| compiled.step(&x, &y))?;
        close(&got, &eager.step(&x, &y)?, &format!("step {i}"))?;
    }
    let explanation = region.explain();
    assert_eq!((explanation.graphs.len(), explanation.recompiles.len()), (1, 0), "{explanation}");
    assert_eq!((explanation.calls, explanation.replays), (1000, 999), "{explanation}");
    Ok(())
}

/// Trains with twenty batch sizes, each twice in a row.
fn sizes(dynamic: Option<bool>) -> Result<Explanation> {
    let (compiled, eager) = (Training::new()?, Training::new()?);
    let region = Compile::new().dynamic(dynamic).fullgraph(true).region();
    for size in (2..22).map(|i| (i * 7) % 41 + 2).flat_map(|size| [size, size]) {
        let (x, y) = samples(&[size, 8], 3, size, DType::F32)?;
        let got = region.run(|| compiled.step(&x, &y))?;
        close(&got, &eager.step(&x, &y)?, &format!("batch of {size}"))?;
    }
    Ok(region.explain())
}

#[test]
fn twenty_batch_sizes_share_their_kernels() -> Result<()> {
    for dynamic in [None, Some(true)] {
        let explanation = sizes(dynamic)?;
        assert_eq!((explanation.recompiles.len(), explanation.sizes), (0, 19), "{explanation}");
        assert_eq!(explanation.graphs.len(), 20, "{explanation}");
        let resized = explanation.graphs.iter().filter(|graph| graph.resizes.is_some()).count();
        assert_eq!(resized, 19, "{explanation}");
        // What is compiled depends on what the cache on disk knows; the text of the kernels does not.
        let mut known = HashSet::new();
        for (i, graph) in explanation.graphs.iter().enumerate() {
            assert_eq!(graph.interpreted, None, "{explanation}");
            let code = graph.texts.iter().filter(|(stage, _)| *stage == "code");
            let new = code.filter(|(_, text)| known.insert(text.clone())).count();
            assert!(i < 2 || graph.compiled_kernels == 0, "{} kernels, plan {i}", graph.compiled_kernels);
            assert!(i < 2 || new == 0, "{new} new kernels with plan {i}");
        }
        assert!(!known.is_empty());
    }
    Ok(())
}
