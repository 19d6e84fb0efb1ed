//! Sequences read step by step: cells written from ops, states kept across calls, attention over what was read.

use kiln::prelude::*;
use kiln::{IndexOp, Result};

use super::{CPU, constant, gradient, programs, weight};
use crate::{Record, Step};

programs!("recurrent":
    elman_network, lstm_with_state, gru_last_state, teacher_forcing, scheduled_sampling, attention_decoder,
    variable_lengths, padded_and_masked, bidirectional, state_space_scan, output_buffer,
);

/// A plain recurrent network over a sequence, trained through time.
fn elman_network(step: &Step) -> Result<Record> {
    let (input, recurrent, out) = (weight([8, 3], 0.4)?, weight([8, 8], 0.3)?, weight([2, 8], 0.4)?);
    let optimizer = optim::SGD::new(vec![input.clone(), recurrent.clone(), out.clone()], 0.1)?;
    let (x, y) = (Tensor::randn([6, 4, 3], &CPU)?, Tensor::randn([6, 4, 2], &CPU)?);
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let mut hidden = Tensor::zeros([4, 8], &CPU)?;
            let mut loss = Tensor::zeros((), &CPU)?;
            for time in 0..6 {
                let seen = x.select(0, time)?.linear(&input, None)?;
                hidden = (seen + hidden.linear(&recurrent, None)?).tanh().ok()?;
                let guess = hidden.linear(&out, None)?;
                loss = (loss + guess.mse_loss(&y.select(0, time)?, Reduction::Mean)?).ok()?;
            }
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&input, &recurrent, &out])?;
    Ok(record)
}

/// Outputs are put into a buffer that was made before, row by row, as PyTorch programs often do.
fn output_buffer(step: &Step) -> Result<Record> {
    let (input, recurrent) = (weight([8, 3], 0.4)?, weight([8, 8], 0.3)?);
    let optimizer = optim::SGD::new(vec![input.clone(), recurrent.clone()], 0.1)?;
    let (x, y) = (Tensor::randn([4, 6, 3], &CPU)?, Tensor::randn([4, 6, 8], &CPU)?);
    let mut record = Record::new();
    for _ in 0..4 {
        let (outputs, loss) = step.run(|| {
            optimizer.zero_grad();
            let outputs = Tensor::zeros([4, 6, 8], &CPU)?;
            let mut hidden = Tensor::zeros([4, 8], &CPU)?;
            for time in 0..6 {
                let seen = x.i((.., time))?.linear(&input, None)?;
                hidden = (seen + hidden.linear(&recurrent, None)?).tanh().ok()?;
                outputs.set_i((.., time), &hidden)?;
            }
            // What comes first is not judged.
            outputs.i((.., ..2))?.mul_(0.0)?;
            let loss = outputs.mse_loss(&y, Reduction::Mean)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>((outputs.detach()?, loss))
        })?;
        record.tensor("outputs", &outputs)?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&input, &recurrent])?;
    Ok(record)
}

/// One step of a long short-term memory: all four gates by one product.
fn lstm_cell(
    x: &Tensor,
    hidden: &Tensor,
    cell: &Tensor,
    w: &Tensor,
    bias: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let gates = Tensor::cat([x, hidden], 1)?.linear(w, Some(bias))?.chunk(4, 1)?;
    let (forget, input) = (gates[0].sigmoid()?, gates[1].sigmoid()?);
    let cell = (forget * cell + input * gates[2].tanh()?).ok()?;
    Ok((gates[3].sigmoid()?.mul(&cell.tanh()?)?, cell))
}

/// A stream is read in pieces; hidden state and cell go from call to call, cut off from the gradient.
fn lstm_with_state(step: &Step) -> Result<Record> {
    let (w, bias, out) = (weight([32, 3 + 8], 0.3)?, constant([32], 0.0)?, weight([1, 8], 0.5)?);
    let optimizer = optim::Adam::new(vec![w.clone(), bias.clone(), out.clone()], 0.02)?;
    let stream = Tensor::randn([4, 24, 3], &CPU)?;
    let targets = stream.sum_dim(2, true)?.cumsum(1)?;
    let (mut hidden, mut cell) = (Tensor::zeros([4, 8], &CPU)?, Tensor::zeros([4, 8], &CPU)?);
    let mut record = Record::new();
    for piece in 0..4 {
        let (x, y) = (stream.narrow(1, piece * 6, 6)?, targets.narrow(1, piece * 6, 6)?);
        let (loss, h, c) = step.run(|| {
            optimizer.zero_grad();
            let (mut h, mut c) = (hidden.clone(), cell.clone());
            let mut outputs = Vec::new();
            for x in x.unbind(1)? {
                (h, c) = lstm_cell(&x, &h, &c, &w, &bias)?;
                outputs.push(h.linear(&out, None)?);
            }
            let loss = Tensor::stack(&outputs, 1)?.mse_loss(&y, Reduction::Mean)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>((loss, h.detach()?, c.detach()?))
        })?;
        (hidden, cell) = (h, c);
        record.tensor("loss", &loss)?;
        record.tensor("hidden", &hidden)?;
    }
    record.tensors("parameters", [&w, &bias, &out])?;
    Ok(record)
}

/// A gated recurrent unit reads a sequence; only its last state is used.
fn gru_last_state(step: &Step) -> Result<Record> {
    let (gates, candidate) = (nn::Linear::new(4 + 8, 16)?, nn::Linear::new(4 + 8, 8)?);
    let head = nn::Linear::new(8, 3)?;
    let parameters = [gates.parameters(), candidate.parameters(), head.parameters()].concat();
    let optimizer = optim::AdamW::new(parameters, 0.02)?;
    let (x, y) = (Tensor::randn([5, 6, 4], &CPU)?, Tensor::randint(0, 3, [5], &CPU)?);
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let mut h = Tensor::zeros([5, 8], &CPU)?;
            for x in x.unbind(1)? {
                let both = gates.forward(&Tensor::cat([&x, &h], 1)?)?.sigmoid()?;
                let (update, reset) = (both.i((.., ..8))?, both.i((.., 8..))?);
                let fresh = candidate.forward(&Tensor::cat([&x, &reset.mul(&h)?], 1)?)?.tanh()?;
                h = h.lerp(&fresh, &update)?;
            }
            let loss = head.forward(&h)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("weight", &gates.weight)?;
    Ok(record)
}

/// A decoder that is told the right token before each guess.
fn teacher_forcing(step: &Step) -> Result<Record> {
    let (embedding, recurrent, out) = (weight([10, 8], 0.5)?, weight([8, 8], 0.3)?, weight([10, 8], 0.4)?);
    let optimizer = optim::Adam::new(vec![embedding.clone(), recurrent.clone(), out.clone()], 0.02)?;
    let tokens = Tensor::randint(0, 10, [4, 7], &CPU)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let mut hidden = Tensor::zeros([4, 8], &CPU)?;
            let mut scores = Vec::new();
            for time in 0..6 {
                let token = embedding.embedding(&tokens.select(1, time)?)?;
                hidden = (token + hidden.linear(&recurrent, None)?).tanh().ok()?;
                scores.push(hidden.linear(&out, None)?);
            }
            let scores = Tensor::stack(&scores, 1)?.view([-1, 10])?;
            let loss = scores.cross_entropy(&tokens.i((.., 1..))?.reshape([-1])?)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&embedding, &recurrent, &out])?;
    Ok(record)
}

/// Sometimes the decoder is told the right token, sometimes its own guess: a random mask chooses.
fn scheduled_sampling(step: &Step) -> Result<Record> {
    let (embedding, recurrent, out) = (weight([10, 8], 0.5)?, weight([8, 8], 0.3)?, weight([10, 8], 0.4)?);
    let optimizer = optim::SGD::new(vec![embedding.clone(), recurrent.clone(), out.clone()], 0.3)?;
    let tokens = Tensor::randint(0, 10, [4, 6], &CPU)?;
    let mut record = Record::new();
    for epoch in 0..4 {
        let told = 1.0 - 0.25 * epoch as f64;
        let loss = step.run(|| {
            optimizer.zero_grad();
            let (mut hidden, mut token) = (Tensor::zeros([4, 8], &CPU)?, tokens.select(1, 0)?);
            let mut loss = Tensor::zeros((), &CPU)?;
            for time in 1..6 {
                let seen = embedding.embedding(&token)?;
                hidden = (seen + hidden.linear(&recurrent, None)?).tanh().ok()?;
                let scores = hidden.linear(&out, None)?;
                let right = tokens.select(1, time)?;
                loss = (loss + scores.cross_entropy(&right)?).ok()?;
                let mask = Tensor::rand([4], &CPU)?.lt(told)?;
                token = mask.where_self(&right, &scores.argmax_dim(1, false)?)?;
            }
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("embedding", &embedding)?;
    Ok(record)
}

/// Encoder and decoder, with additive attention over the encoder's states.
fn attention_decoder(step: &Step) -> Result<Record> {
    let shapes: [[usize; 2]; 6] = [[8, 12], [8, 16], [8, 8], [8, 8], [1, 8], [6, 8]];
    let weights = shapes.into_iter().map(|shape| weight(shape, 0.3)).collect::<Result<Vec<_>>>()?;
    let [encode, decode, query, key, energy, out] = &weights[..] else { unreachable!("six weights") };
    let (source, target) = (Tensor::randn([3, 5, 4], &CPU)?, Tensor::randint(0, 6, [3, 4], &CPU)?);
    let optimizer = optim::Adam::new(weights.clone(), 0.02)?;
    let mut record = Record::new();
    for _ in 0..3 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let (mut h, mut states) = (Tensor::zeros([3, 8], &CPU)?, Vec::new());
            for x in source.unbind(1)? {
                h = Tensor::cat([&x, &h], 1)?.linear(encode, None)?.tanh()?;
                states.push(h.clone());
            }
            let states = Tensor::stack(&states, 1)?;
            let (keys, mut scores) = (states.linear(key, None)?, Vec::new());
            for _ in 0..4 {
                let asked = h.linear(query, None)?.unsqueeze(1)?;
                let shares = (&keys + asked).tanh().ok()?.linear(energy, None)?.softmax(1)?;
                let context = (shares * &states).ok()?.sum_dim(1, false)?;
                h = Tensor::cat([&context, &h], 1)?.linear(decode, None)?.tanh()?;
                scores.push(h.linear(out, None)?);
            }
            let loss = Tensor::stack(&scores, 1)?.flatten_dims(0, 1)?.cross_entropy(&target.flatten()?)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &weights)?;
    Ok(record)
}

/// Each sequence as long as it is: every length is its own graph.
fn variable_lengths(step: &Step) -> Result<Record> {
    let (w, bias, out) = (weight([16, 2 + 4], 0.4)?, constant([16], 0.0)?, weight([2, 4], 0.5)?);
    let optimizer = optim::Adam::new(vec![w.clone(), bias.clone(), out.clone()], 0.02)?;
    let mut record = Record::new();
    for length in [3, 5, 2, 3, 5, 5, 2] {
        let (x, y) = (Tensor::randn([length, 1, 2], &CPU)?, Tensor::randint(0, 2, [1], &CPU)?);
        let loss = step.run(|| {
            optimizer.zero_grad();
            let (mut h, mut c) = (Tensor::zeros([1, 4], &CPU)?, Tensor::zeros([1, 4], &CPU)?);
            for x in x.unbind(0)? {
                (h, c) = lstm_cell(&x, &h, &c, &w, &bias)?;
            }
            let loss = h.linear(&out, None)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&w, &bias, &out])?;
    Ok(record)
}

/// Sequences of several lengths in one batch: past its end a sequence keeps its state.
fn padded_and_masked(step: &Step) -> Result<Record> {
    let (w, bias, out) = (weight([24, 3 + 6], 0.3)?, constant([24], 0.0)?, weight([2, 6], 0.5)?);
    let optimizer = optim::Adam::new(vec![w.clone(), bias.clone(), out.clone()], 0.02)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let (x, y) = (Tensor::randn([4, 5, 3], &CPU)?, Tensor::randint(0, 2, [4], &CPU)?);
        let lengths = Tensor::randint(1, 6, [4, 1], &CPU)?;
        let loss = step.run(|| {
            optimizer.zero_grad();
            let (mut h, mut c) = (Tensor::zeros([4, 6], &CPU)?, Tensor::zeros([4, 6], &CPU)?);
            for (time, x) in x.unbind(1)?.iter().enumerate() {
                let (next_h, next_c) = lstm_cell(x, &h, &c, &w, &bias)?;
                let goes_on = lengths.gt(time as i64)?;
                (h, c) = (goes_on.where_self(&next_h, &h)?, goes_on.where_self(&next_c, &c)?);
            }
            let loss = h.linear(&out, None)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&w, &bias, &out])?;
    Ok(record)
}

/// Read forwards and backwards, both states written into one buffer by slices.
fn bidirectional(step: &Step) -> Result<Record> {
    let forth = Tensor::randn([4, 3 + 4], &CPU)?.mul(0.4)?;
    let back = Tensor::randn([4, 3 + 4], &CPU)?.mul(0.4)?;
    let states = Tensor::zeros([6, 2, 8], &CPU)?;
    let mut record = Record::new();
    for _ in 0..3 {
        let x = Tensor::randn([6, 2, 3], &CPU)?;
        let summary = step.run(|| {
            let (mut a, mut b) = (Tensor::zeros([2, 4], &CPU)?, Tensor::zeros([2, 4], &CPU)?);
            for time in 0..6 {
                a = Tensor::cat([&x.i(time)?, &a], 1)?.linear(&forth, None)?.tanh()?;
                b = Tensor::cat([&x.i(5 - time)?, &b], 1)?.linear(&back, None)?.tanh()?;
                states.i((time, .., ..4))?.copy_(&a)?;
                states.i((5 - time, .., 4..))?.copy_(&b)?;
            }
            states.amax_dim(0, false)
        })?;
        record.tensor("summary", &summary)?;
        record.tensor("states", &states)?;
    }
    Ok(record)
}

/// A linear recurrence over time with a decay that is trained: ten states, one channel.
fn state_space_scan(step: &Step) -> Result<Record> {
    let (decay, input, output) = (weight([10], 0.5)?, weight([10], 0.5)?, weight([10], 0.5)?);
    let signal = Tensor::randn([16], &CPU)?;
    let target = signal.cumsum(0)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            let keep = decay.sigmoid()?;
            let (mut state, mut outputs) = (Tensor::zeros([10], &CPU)?, Vec::new());
            for time in 0..16 {
                state = (&keep * &state + &input * signal.i(time)?).ok()?;
                outputs.push(state.dot(&output)?);
            }
            let loss = Tensor::stack(&outputs, 0)?.mse_loss(&target, Reduction::Mean)?;
            loss.backward()?;
            let _guard = no_grad();
            for parameter in [&decay, &input, &output] {
                parameter.add_scaled_(&gradient(parameter)?, -0.01)?;
                parameter.set_grad(None);
            }
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&decay, &input, &output])?;
    Ok(record)
}
