//! Networks of other kinds: convolutions with batch norm and pooling, and an LSTM that carries its state on.

use kiln::prelude::*;
use kiln::tensor::{BatchNorm, Pool};
use kiln::{Error, Result};

use crate::compare::{Precision, Record, Step, check, constant, numbers, samples, weight};

/// Two convolutions with batch norm, the first pooled, over images of 8 × 8.
fn images(step: &Step, dtype: DType) -> Result<Record> {
    let filters = [weight(&[6, 2, 3, 3], 1, dtype)?, weight(&[8, 6, 3, 3], 2, dtype)?];
    let norms =
        [6, 8].map(|n| -> Result<[Tensor; 2]> { Ok([constant(n, 1.0, dtype)?, constant(n, 0.0, dtype)?]) });
    let [first, second] = norms;
    let norms = [first?, second?];
    let running = |n: usize| -> Result<[Tensor; 2]> {
        let full = |value: f64| Tensor::full_of([n], value, dtype, &Device::Cpu);
        Ok([full(0.0)?, full(1.0)?])
    };
    let running = [running(6)?, running(8)?];
    let (head, bias) = (weight(&[3, 8 * 2 * 2], 3, dtype)?, constant(3, 0.0, dtype)?);
    let mut parameters: Vec<Tensor> = filters.iter().chain(norms.iter().flatten()).cloned().collect();
    parameters.extend([head.clone(), bias.clone()]);
    let optimizer = optim::AdamW::new(parameters.clone(), 0.01)?;

    let layer = |x: &Tensor, i: usize| -> Result<Tensor> {
        let norm = BatchNorm {
            running: Some((&running[i][0], &running[i][1])),
            weight: Some(&norms[i][0]),
            bias: Some(&norms[i][1]),
            training: true,
            ..BatchNorm::default()
        };
        x.conv2d(&filters[i], None, 1, 1, 1, 1)?.batch_norm(norm)?.relu()?.max_pool2d(Pool::new(2))
    };
    let mut record = Record::default();
    for i in 0..20 {
        record.step(i);
        let (x, y) = samples(&[if i % 5 == 4 { 3 } else { 6 }, 2, 8, 8], 3, i % 4, dtype)?;
        let loss = step.run(|| {
            optimizer.zero_grad();
            let features = layer(&layer(&x, 0)?, 1)?.flatten_dims(1, -1)?;
            let loss = features.linear(&head, Some(&bias))?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            loss.detach()
        })?;
        record.tensor("loss", &loss)?;
        record.tensors("parameter", &parameters)?;
        record.tensors("running", running.iter().flatten())?;
        for (k, parameter) in parameters.iter().enumerate() {
            let state = optimizer.state(parameter).unwrap();
            record.tensors(&format!("state {k}"), [&state.exp_avg, &state.exp_avg_sq])?;
        }
    }
    Ok(record)
}

#[test]
fn convolutions() -> Result<()> {
    for (_, explanation) in check(Precision::Single, images)? {
        assert!(explanation.breaks.is_empty(), "{explanation}");
        assert_eq!((explanation.recompiles.len(), explanation.sizes), (0, 1), "{explanation}");
    }
    Ok(())
}

const WIDTH: usize = 8;

/// A sine wave in pieces of six points, its state carried from piece to piece, its gradient not.
fn wave(step: &Step, dtype: DType) -> Result<Record> {
    let input = weight(&[4 * WIDTH, 3], 1, dtype)?;
    let recurrent = weight(&[4 * WIDTH, WIDTH], 2, dtype)?;
    let bias = constant(4 * WIDTH, 0.0, dtype)?;
    let readout = weight(&[3, WIDTH], 3, dtype)?;
    let parameters = vec![input.clone(), recurrent.clone(), bias.clone(), readout.clone()];
    let optimizer = optim::Adam::new(parameters.clone(), 0.03)?;

    let cell = |x: &Tensor, hidden: &Tensor, memory: &Tensor| -> Result<(Tensor, Tensor)> {
        let gates = (x.linear(&input, Some(&bias))? + hidden.linear(&recurrent, None)?).ok()?.chunk(4, 1)?;
        let [enter, forget, new, out] = [&gates[0], &gates[1], &gates[2], &gates[3]];
        let memory = (forget.sigmoid()? * memory + enter.sigmoid()? * new.tanh()?).ok()?;
        Ok((out.sigmoid()?.mul(&memory.tanh()?)?, memory))
    };
    let zeros = || Tensor::full_of([4, WIDTH], 0.0, dtype, &Device::Cpu);
    let (mut hidden, mut memory) = (zeros()?, zeros()?);
    let phase = numbers(&[4, 3], 5, 3.0, dtype)?;
    let mut record = Record::default();
    for i in 0..30 {
        record.step(i);
        let loss;
        (loss, hidden, memory) = step.run(|| {
            optimizer.zero_grad();
            let (mut h, mut c) = (hidden.clone(), memory.clone());
            let mut losses = Vec::new();
            for point in 6 * i..6 * i + 6 {
                let at = |k: usize| (&phase + 0.3 * k as f64).sin().ok();
                (h, c) = cell(&at(point)?, &h, &c)?;
                losses.push(h.linear(&readout, None)?.mse_loss(&at(point + 1)?, Reduction::Mean)?);
            }
            let loss = Tensor::stack(&losses, 0)?.mean()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>((loss.detach()?, h.detach()?, c.detach()?))
        })?;
        record.tensor("loss", &loss)?;
        record.tensors("carried", [&hidden, &memory])?;
        record.tensors("parameter", &parameters)?;
    }
    Ok(record)
}

#[test]
fn an_lstm_that_carries_its_state_on() -> Result<()> {
    for (_, explanation) in check(Precision::Single, wave)? {
        assert!(explanation.breaks.is_empty(), "{explanation}");
        assert_eq!((explanation.recompiles.len(), explanation.graphs.len()), (0, 1), "{explanation}");
    }
    Ok(())
}
