//! A network with batch norm and dropout, trained with all that usually surrounds a step: a schedule, batches
//! of other sizes, clipped gradients, averaged weights, evaluations in between.

use kiln::prelude::*;
use kiln::tensor::BatchNorm;
use kiln::{Error, Result};

use crate::compare::{Precision, Record, Step, check, constant, samples, weight};

const STEPS: usize = 50;
/// The last one is what is left of the data.
const BATCHES: [usize; 6] = [16, 16, 7, 16, 16, 3];

struct Network {
    /// Weights and biases, except those of the norm.
    layers: Vec<Tensor>,
    norm: [Tensor; 2],
    running: [Tensor; 2],
}

impl Network {
    fn new(dtype: DType) -> Result<Network> {
        let running = |value: f64| Tensor::full_of([24], value, dtype, &Device::Cpu);
        Ok(Network {
            layers: vec![
                // No bias before a norm: its gradient would be nothing but rounding.
                weight(&[24, 12], 1, dtype)?,
                weight(&[16, 24], 2, dtype)?,
                constant(16, 0.0, dtype)?,
                weight(&[4, 16], 3, dtype)?,
                constant(4, 0.0, dtype)?,
            ],
            norm: [constant(24, 1.0, dtype)?, constant(24, 0.0, dtype)?],
            running: [running(0.0)?, running(1.0)?],
        })
    }

    fn forward(&self, x: &Tensor, training: bool) -> Result<Tensor> {
        let norm = BatchNorm {
            running: Some((&self.running[0], &self.running[1])),
            weight: Some(&self.norm[0]),
            bias: Some(&self.norm[1]),
            training,
            ..BatchNorm::default()
        };
        let hidden = x.linear(&self.layers[0], None)?.batch_norm(norm)?.gelu()?.dropout(0.2, training)?;
        let hidden = hidden.linear(&self.layers[1], Some(&self.layers[2]))?.tanh()?.dropout(0.1, training)?;
        hidden.linear(&self.layers[3], Some(&self.layers[4]))
    }

    fn parameters(&self) -> Vec<Tensor> {
        self.layers.iter().chain(&self.norm).cloned().collect()
    }
}

/// Rises for ten steps, then falls as a cosine does.
fn learning_rate(step: usize) -> f64 {
    let done = (step as f64 - 10.0) / (STEPS as f64 - 10.0);
    match step {
        0..10 => 0.02 * (step + 1) as f64 / 10.0,
        _ => 0.01 * (1.0 + (std::f64::consts::PI * done).cos()),
    }
}

/// Scales gradients down together where their norm is more than `limit`; tells the norm.
fn clip_norm(parameters: &[Tensor], limit: f64) -> Result<Tensor> {
    let gradients: Vec<Tensor> = parameters.iter().filter_map(Tensor::grad).collect();
    let norms = gradients.iter().map(|g| g.norm(2.0)).collect::<Result<Vec<_>>>()?;
    let norm = Tensor::stack(&norms, 0)?.norm(2.0)?;
    let scale = (limit / (&norm + 1e-6)).clamp_max(1.0).ok()?;
    for gradient in &gradients {
        gradient.mul_(&scale)?;
    }
    Ok(norm)
}

fn train(step: &Step, dtype: DType) -> Result<Record> {
    let network = Network::new(dtype)?;
    let parameters = network.parameters();
    let optimizer = optim::Adam::new(parameters.clone(), 0.0)?;
    let averages = parameters.iter().map(|p| p.detach()?.add(0.0)).collect::<Result<Vec<_>>>()?;
    let (held_out, held_out_classes) = samples(&[10, 12], 4, 999, dtype)?;
    let mut record = Record::default();
    for i in 0..STEPS {
        record.step(i);
        optimizer.set_lr(learning_rate(i));
        let (x, y) = samples(&[BATCHES[i % BATCHES.len()], 12], 4, i % 12, dtype)?;
        let (loss, norm) = step.run(|| {
            optimizer.zero_grad();
            let loss = network.forward(&x, true)?.cross_entropy(&y)?;
            loss.backward()?;
            let norm = clip_norm(&parameters, 0.8)?;
            optimizer.step()?;
            let _guard = no_grad();
            for (average, parameter) in averages.iter().zip(&parameters) {
                average.lerp_(parameter, 0.1)?;
            }
            Ok::<_, Error>((loss.detach()?, norm))
        })?;
        record.tensor("loss", &loss)?;
        record.tensor("norm", &norm)?;
        record.tensors("parameter", &parameters)?;
        record.tensors("average", &averages)?;
        record.tensors("running", &network.running)?;
        for (k, parameter) in parameters.iter().enumerate() {
            let state = optimizer.state(parameter).unwrap();
            assert_eq!(state.step, i as u64 + 1);
            record.tensor(&format!("gradient {k}"), &parameter.grad().unwrap())?;
            record.tensors(&format!("state {k}"), [&state.exp_avg, &state.exp_avg_sq])?;
        }
        if i % 10 == 9 {
            let scores = step.run(|| {
                let _guard = no_grad();
                network.forward(&held_out, false)
            })?;
            record.tensor("scores", &scores)?;
            record.tensor("held-out loss", &scores.cross_entropy(&held_out_classes)?)?;
        }
    }
    Ok(record)
}

#[test]
fn fifty_steps_with_all_that_surrounds_them() -> Result<()> {
    for (_, explanation) in check(Precision::Single, train)? {
        assert!(explanation.breaks.is_empty(), "{explanation}");
        // The evaluation is another way; other batch sizes are not.
        assert_eq!(explanation.recompiles.len(), 1, "{explanation}");
        assert_eq!(explanation.sizes, 2, "{explanation}");
    }
    Ok(())
}
