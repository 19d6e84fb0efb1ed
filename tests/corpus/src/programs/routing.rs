//! Models that choose: experts, early exits, trees, memories that are read and written.

use kiln::Result;
use kiln::prelude::*;

use super::{CPU, classifier, gradient, programs, samples, weight};
use crate::{Record, Step};

programs!("routing":
    mixture_of_experts, experts_on_their_tokens, early_exit, soft_decision_tree, neural_memory, graph_convolution,
    gumbel_choice, hyper_network,
);

/// Every expert sees every token; the two best by the gate count.
fn mixture_of_experts(step: &Step) -> Result<Record> {
    let (gate, up, down) = (weight([4, 8], 0.4)?, weight([4, 8, 12], 0.3)?, weight([4, 12, 8], 0.3)?);
    let (x, y) = (Tensor::randn([10, 8], &CPU)?, Tensor::randn([10, 8], &CPU)?);
    let optimizer = optim::Adam::new(vec![gate.clone(), up.clone(), down.clone()], 0.01)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let shares = x.linear(&gate, None)?.softmax(1)?;
            let (best, index) = shares.topk(2, 1, true)?;
            let best = best.div(&best.sum_dim(1, true)?)?;
            let routes = shares.detach()?.zeros_like()?.scatter(1, &index, &best)?;
            let hidden = Tensor::einsum("td,edh->eth", &[&x, &up])?.gelu()?;
            let out = Tensor::einsum("eth,ehd,te->td", &[&hidden, &down, &routes])?;
            let used = index.one_hot(4)?.to_dtype(DType::F32)?.mean_dim([0, 1], false)?;
            let balance = (used * shares.mean_dim(0, false)?).sum();
            let loss = (out.mse_loss(&y, Reduction::Mean)? + balance * 0.04).ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&gate, &up, &down])?;
    Ok(record)
}

/// Each expert gets only its own tokens, picked by `nonzero`: their number is known only at run time.
fn experts_on_their_tokens(step: &Step) -> Result<Record> {
    let (gate, experts) = (Tensor::randn([3, 6], &CPU)?, Tensor::randn([3, 6, 6], &CPU)?);
    let mut record = Record::new();
    for _ in 0..3 {
        let x = Tensor::randn([9, 6], &CPU)?;
        let out = step.run(|| {
            let choice = x.linear(&gate, None)?.argmax_dim(1, false)?;
            let out = x.zeros_like()?;
            for expert in 0..3 {
                let mine = choice.eq(expert)?.nonzero()?.squeeze(1)?;
                let made = x.index_select(0, &mine)?.mm(&experts.select(0, expert)?)?.tanh()?;
                out.index_copy_(0, &mine, &made)?;
            }
            Ok::<_, kiln::Error>(out)
        })?;
        record.tensor("out", &out)?;
    }
    Ok(record)
}

/// Layers are applied until the model is sure: the host looks inside the step.
fn early_exit(step: &Step) -> Result<Record> {
    let layers = (0..4).map(|_| Tensor::randn([6, 6], &CPU)).collect::<Result<Vec<_>>>()?;
    let head = Tensor::randn([3, 6], &CPU)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let x = Tensor::randn([1, 6], &CPU)?;
        let (scores, used) = step.run(|| {
            let (mut h, mut used) = (x.clone(), 0);
            loop {
                h = h.linear(&layers[used], None)?.tanh()?;
                used += 1;
                let scores = h.linear(&head, None)?.softmax(1)?;
                if used == layers.len() || scores.amax()?.item::<f32>()? > 0.9 {
                    return Ok::<_, kiln::Error>((scores, used));
                }
            }
        })?;
        record.integer("layers", used);
        record.tensor("scores", &scores)?;
    }
    Ok(record)
}

/// A tree whose branches are taken by probability, so that it can be trained.
fn soft_decision_tree(step: &Step) -> Result<Record> {
    let (nodes, leaves) = (nn::Linear::new(6, 7)?, weight([8, 3], 0.3)?);
    let (x, y) = samples(12, 6, 3)?;
    let optimizer = optim::Adam::new([nodes.parameters(), vec![leaves.clone()]].concat(), 0.05)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let right = nodes.forward(&x)?.sigmoid()?;
            let (mut reached, mut first) = (Tensor::ones([12, 1], &CPU)?, 0);
            for depth in 0..3 {
                let width = 1 << depth;
                let here = right.narrow(1, first, width)?;
                let both = Tensor::stack([&(&reached * (1.0 - &here)).ok()?, &reached.mul(&here)?], 2)?;
                reached = both.view([12, -1])?;
                first += width;
            }
            let loss = reached.mm(&leaves.softmax(1)?)?.log()?.nll_loss(&y, Reduction::Mean)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&*nodes.weight, &leaves])?;
    Ok(record)
}

/// A memory of slots that is read by attention and written in place, kept across calls.
fn neural_memory(step: &Step) -> Result<Record> {
    let (memory, key) = (Tensor::randn([6, 8], &CPU)?, Tensor::randn([8, 8], &CPU)?.mul(0.4)?);
    let (erase, add) = (Tensor::randn([8, 8], &CPU)?.mul(0.4)?, Tensor::randn([8, 8], &CPU)?.mul(0.4)?);
    let mut record = Record::new();
    for _ in 0..6 {
        let x = Tensor::randn([8], &CPU)?;
        let seen = step.run(|| {
            let similar = memory.cosine_similarity(&x.linear(&key, None)?.unsqueeze(0)?, 1, 1e-8)?;
            let shares = similar.mul(4.0)?.softmax(0)?;
            let seen = shares.unsqueeze(0)?.mm(&memory)?.squeeze(0)?;
            memory.mul_(&shares.outer(&x.linear(&erase, None)?.sigmoid()?)?.rsub(1.0)?)?;
            memory.add_(&shares.outer(&x.linear(&add, None)?.tanh()?)?)?;
            Ok::<_, kiln::Error>(seen)
        })?;
        record.tensor("seen", &seen)?;
    }
    record.tensor("memory", &memory)?;
    Ok(record)
}

/// Messages along the edges of a graph, summed at their targets, divided by degree.
fn graph_convolution(step: &Step) -> Result<Record> {
    let (first, second) = (nn::Linear::new(5, 12)?, nn::Linear::new(12, 3)?);
    let (x, y) = samples(10, 5, 3)?;
    let (from, to) = (Tensor::randint(0, 10, [24], &CPU)?, Tensor::randint(0, 10, [24], &CPU)?);
    let degree = Tensor::ones([10], &CPU)?.index_add(0, &to, &Tensor::ones([24], &CPU)?)?.unsqueeze(1)?;
    let optimizer = optim::Adam::new([first.parameters(), second.parameters()].concat(), 0.02)?;
    let spread = |h: &Tensor| h.index_add(0, &to, &h.index_select(0, &from)?)?.div(&degree);
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let hidden = spread(&first.forward(&x)?)?.relu()?;
            let loss = spread(&second.forward(&hidden)?)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("weights", [&*first.weight, &*second.weight])?;
    Ok(record)
}

/// One of several operations is drawn, hard in forward, soft in backward; it cools down from call to call.
fn gumbel_choice(step: &Step) -> Result<Record> {
    let (choice, scale) = (weight([4], 0.1)?, weight([6], 0.5)?);
    let x = Tensor::randn([8, 6], &CPU)?;
    let y = x.sin()?;
    let mut record = Record::new();
    for i in 0..6 {
        let temperature = 1.0 / (1.0 + i as f64);
        let loss = step.run(|| {
            let noise = choice.rand_like()?.clamp(1e-6, 1.0)?.log()?.neg()?.log()?.neg()?;
            let soft = ((&choice + noise) / temperature).softmax(0).ok()?;
            let hard = soft.argmax()?.one_hot(4)?.to_dtype(DType::F32)?;
            let pick = (hard - soft.detach()? + &soft).ok()?;
            let h = (&x * &scale).ok()?;
            let ways = Tensor::stack([&h, &h.tanh()?, &h.relu()?, &h.sin()?], 2)?;
            let loss = (ways * pick).ok()?.sum_dim(2, false)?.mse_loss(&y, Reduction::Mean)?;
            loss.backward()?;
            let _guard = no_grad();
            for parameter in [&choice, &scale] {
                parameter.add_scaled_(&gradient(parameter)?, -0.2)?;
                parameter.set_grad(None);
            }
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&choice, &scale])?;
    Ok(record)
}

/// One network makes the weights of another, a set for each sample.
fn hyper_network(step: &Step) -> Result<Record> {
    let maker = classifier(3, 12, 4 * 5 + 4)?;
    let (task, x) = (Tensor::randn([6, 3], &CPU)?, Tensor::randn([6, 5], &CPU)?);
    let y = Tensor::randint(0, 4, [6], &CPU)?;
    let optimizer = optim::AdamW::new(maker.parameters(), 0.02)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let made = maker.forward(&task)?.split_sizes(&[20, 4], 1)?;
            let scores = made[0].view([6, 4, 5])?.bmm(&x.unsqueeze(2)?)?.squeeze(2)?;
            let loss = (scores + &made[1]).ok()?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &maker.parameters())?;
    Ok(record)
}
