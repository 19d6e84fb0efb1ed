//! Text models: transformer blocks, masked and causal language modelling, embeddings.

use kiln::Result;
use kiln::prelude::*;
use kiln::tensor::Attention;

use super::{CPU, constant, gradient, programs, weight};
use crate::{Record, Step};

programs!("language":
    transformer_encoder, causal_language_model, masked_language_model, tied_weights, rotary_attention,
    embedding_bag, skip_gram, cross_attention,
);

/// A block of a transformer: attention and a feed-forward layer, each with a norm before.
struct Block {
    qkv: nn::Linear,
    out: nn::Linear,
    up: nn::Linear,
    down: nn::Linear,
    norms: [Tensor; 2],
}

impl Block {
    fn new(size: usize) -> Result<Block> {
        Ok(Block {
            qkv: nn::Linear::options().bias(false).build(size, 3 * size)?,
            out: nn::Linear::new(size, size)?,
            up: nn::Linear::new(size, 2 * size)?,
            down: nn::Linear::new(2 * size, size)?,
            norms: [constant([size], 1.0)?, constant([size], 1.0)?],
        })
    }

    fn parameters(&self) -> Vec<Tensor> {
        let layers = [&self.qkv, &self.out, &self.up, &self.down].map(|layer| layer.parameters());
        [layers.concat(), self.norms.to_vec()].concat()
    }

    fn forward(&self, x: &Tensor, heads: usize, causal: bool, dropout: f64) -> Result<Tensor> {
        let [batch, length, size] = x.shape()[..] else { unreachable!("batch, time, features") };
        let normed = x.layer_norm(&[size], Some(&self.norms[0]), None, 1e-5)?;
        let qkv = self.qkv.forward(&normed)?.view([batch, length, 3, heads, size / heads])?;
        let qkv = qkv.permute([2, 0, 3, 1, 4])?.unbind(0)?;
        let options = Attention { causal, dropout, ..Attention::default() };
        let seen = qkv[0].scaled_dot_product_attention(&qkv[1], &qkv[2], options)?;
        let x = (x + self.out.forward(&seen.transpose(1, 2)?.reshape([batch, length, size])?)?).ok()?;
        let normed = x.layer_norm(&[size], Some(&self.norms[1]), None, 1e-5)?;
        (&x + self.down.forward(&self.up.forward(&normed)?.gelu()?)?).ok()
    }
}

/// An encoder block with dropout classifies sequences by their mean.
fn transformer_encoder(step: &Step) -> Result<Record> {
    let (block, head) = (Block::new(16)?, nn::Linear::new(16, 3)?);
    let (x, y) = (Tensor::randn([4, 6, 16], &CPU)?, Tensor::randint(0, 3, [4], &CPU)?);
    let optimizer = optim::AdamW::new([block.parameters(), head.parameters()].concat(), 0.005)?;
    let mut record = Record::new();
    for _ in 0..3 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let features = block.forward(&x, 4, false, 0.1)?.mean_dim(1, false)?;
            let loss = head.forward(&features)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &block.parameters())?;
    Ok(record)
}

/// Two causal blocks learn to say the next token.
fn causal_language_model(step: &Step) -> Result<Record> {
    let (tokens, positions) = (weight([20, 16], 0.2)?, weight([8, 16], 0.2)?);
    let (blocks, head) = ([Block::new(16)?, Block::new(16)?], nn::Linear::new(16, 20)?);
    let own = vec![tokens.clone(), positions.clone()];
    let inner = blocks.iter().flat_map(|block| block.parameters()).collect();
    let optimizer = optim::AdamW::new([own, inner, head.parameters()].concat(), 0.01)?;
    let mut record = Record::new();
    for _ in 0..3 {
        let text = Tensor::randint(0, 20, [3, 9], &CPU)?;
        let loss = step.run(|| {
            optimizer.zero_grad();
            let (input, target) = (text.i((.., ..-1))?, text.i((.., 1..))?);
            let mut x = (tokens.embedding(&input)? + &positions).ok()?;
            for block in &blocks {
                x = block.forward(&x, 2, true, 0.0)?;
            }
            let loss = head.forward(&x)?.view([-1, 20])?.cross_entropy(&target.reshape([-1])?)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("embeddings", [&tokens, &positions])?;
    Ok(record)
}

/// Random tokens are hidden, and only those count in the loss.
fn masked_language_model(step: &Step) -> Result<Record> {
    let (tokens, block, head) = (weight([21, 16], 0.2)?, Block::new(16)?, nn::Linear::new(16, 20)?);
    let parameters = [vec![tokens.clone()], block.parameters(), head.parameters()].concat();
    let optimizer = optim::Adam::new(parameters, 0.01)?;
    let text = Tensor::randint(0, 20, [4, 8], &CPU)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let hidden = Tensor::rand([4, 8], &CPU)?.lt(0.3)?;
            let x = tokens.embedding(&text.masked_fill(&hidden, 20)?)?;
            let scores = head.forward(&block.forward(&x, 2, false, 0.0)?)?;
            let target = hidden.where_self(&text, -100)?;
            let loss = scores.view([-1, 20])?.cross_entropy(&target.view([-1])?)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("tokens", &tokens)?;
    Ok(record)
}

/// The table that reads tokens also says them: one weight, two gradients.
fn tied_weights(step: &Step) -> Result<Record> {
    let (table, middle) = (weight([12, 8], 0.3)?, nn::Linear::new(8, 8)?);
    let optimizer = optim::AdamW::new([vec![table.clone()], middle.parameters()].concat(), 0.02)?;
    let text = Tensor::randint(0, 12, [6, 2], &CPU)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let x = middle.forward(&table.embedding(&text.select(1, 0)?)?)?.tanh()?;
            let loss = x.matmul(&table.t()?)?.cross_entropy(&text.select(1, 1)?)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("table", &table)?;
    Ok(record)
}

/// Positions by rotation of queries and keys; several heads of queries share keys; norms by root mean square.
fn rotary_attention(step: &Step) -> Result<Record> {
    let (query, keys) = (weight([16, 16], 0.3)?, weight([16, 16], 0.3)?);
    let (scale, x) = (constant([16], 1.0)?, Tensor::randn([2, 6, 16], &CPU)?);
    let rates = Tensor::arange(0, 2, &CPU)?.to_dtype(DType::F32)?.mul(-2.0)?.exp()?;
    let angles = Tensor::arange(0, 6, &CPU)?.to_dtype(DType::F32)?.outer(&rates)?;
    let rotate = |t: &Tensor| {
        let (even, odd) = (t.i((Ellipsis, ..2))?, t.i((Ellipsis, 2..))?);
        let (sine, cosine) = (angles.sin()?, angles.cos()?);
        let left = (&even * &cosine - &odd * &sine).ok()?;
        Tensor::cat([&left, &(even * sine + odd * cosine).ok()?], -1)
    };
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            let h = x.rms_norm(&[16], Some(&scale), None)?;
            let q = h.linear(&query, None)?.view([2, 6, 4, 4])?.transpose(1, 2)?;
            let kv = h.linear(&keys, None)?.view([2, 6, 2, 2, 4])?.permute([2, 0, 3, 1, 4])?;
            let options = Attention { causal: true, grouped: true, ..Attention::default() };
            let (k, v) = (rotate(&kv.i(0)?)?, kv.i(1)?);
            let seen = rotate(&q)?.scaled_dot_product_attention(&k, &v, options)?;
            let loss = seen.transpose(1, 2)?.reshape([2, 6, 16])?.mse_loss(&x, Reduction::Mean)?;
            loss.backward()?;
            let _guard = no_grad();
            for parameter in [&query, &keys, &scale] {
                parameter.add_scaled_(&gradient(parameter)?, -0.5)?;
                parameter.set_grad(None);
            }
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&query, &keys, &scale])?;
    Ok(record)
}

/// Bags of words by hand: rows picked, added up by bag.
fn embedding_bag(step: &Step) -> Result<Record> {
    let (table, head) = (weight([30, 8], 0.3)?, nn::Linear::new(8, 2)?);
    let optimizer = optim::Adam::new([vec![table.clone()], head.parameters()].concat(), 0.02)?;
    let (words, y) = (Tensor::randint(0, 30, [14], &CPU)?, Tensor::from_slice(&[0i64, 1, 1, 0])?);
    let bags = Tensor::from_slice(&[0i64, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3])?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let sums = Tensor::zeros([4, 8], &CPU)?.index_add(0, &bags, &table.embedding(&words)?)?;
            let counts = Tensor::zeros([4], &CPU)?.index_add(0, &bags, &Tensor::ones([14], &CPU)?)?;
            let loss = head.forward(&sums.div(&counts.unsqueeze(1)?)?)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("table", &table)?;
    Ok(record)
}

/// Word vectors with negative samples drawn in the step.
fn skip_gram(step: &Step) -> Result<Record> {
    let (words, contexts) = (weight([25, 6], 0.3)?, weight([25, 6], 0.3)?);
    let optimizer = optim::SGD::new(vec![words.clone(), contexts.clone()], 0.5)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let (centre, near) = (Tensor::randint(0, 25, [8], &CPU)?, Tensor::randint(0, 25, [8], &CPU)?);
        let loss = step.run(|| {
            optimizer.zero_grad();
            let far = Tensor::randint(0, 25, [8, 3], &CPU)?;
            let vector = words.embedding(&centre)?;
            let positive = (&vector * contexts.embedding(&near)?).ok()?.sum_dim(1, false)?.log_sigmoid()?;
            let negative = contexts.embedding(&far)?.bmm(&vector.unsqueeze(2)?)?.neg()?.log_sigmoid()?;
            let loss = (-(positive.mean()? + negative.mean()? * 3.0)).ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("vectors", [&words, &contexts])?;
    Ok(record)
}

/// Learned queries look at a set of points, part of which is hidden by a mask.
fn cross_attention(step: &Step) -> Result<Record> {
    let (queries, keys, values) = (weight([1, 3, 8], 0.5)?, nn::Linear::new(4, 8)?, nn::Linear::new(4, 8)?);
    let head = nn::Linear::new(24, 2)?;
    let layers = [keys.parameters(), values.parameters(), head.parameters()].concat();
    let optimizer = optim::Adam::new([vec![queries.clone()], layers].concat(), 0.02)?;
    let (points, y) = (Tensor::randn([4, 7, 4], &CPU)?, Tensor::randint(0, 2, [4], &CPU)?);
    let mut record = Record::new();
    for count in [7, 5, 6, 4] {
        let there = Tensor::arange(0, 7, &CPU)?.lt(count)?.view([1, 1, 7])?;
        let loss = step.run(|| {
            optimizer.zero_grad();
            let (k, v) = (keys.forward(&points)?, values.forward(&points)?);
            let options = Attention { mask: Some(&there), ..Attention::default() };
            let seen = queries.expand([4, 3, 8])?.scaled_dot_product_attention(&k, &v, options)?;
            let loss = head.forward(&seen.flatten_dims(1, 2)?)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("queries", &queries)?;
    Ok(record)
}
