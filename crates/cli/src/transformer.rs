//! The transformer of the benchmark: pre-norm blocks with causal self-attention, learning the next word.

use kiln::prelude::*;
use kiln::{Attention, Result};

use crate::cases::Workload;

const WIDTH: usize = 256;
const HEADS: usize = 4;
const WORDS: usize = 1024;
/// Sequences of a step, and words of a sequence.
const TEXT: [usize; 2] = [4, 128];

#[derive(Module)]
struct Block {
    norm1: nn::LayerNorm,
    qkv: nn::Linear,
    out: nn::Linear,
    norm2: nn::LayerNorm,
    up: nn::Linear,
    down: nn::Linear,
}

impl Block {
    fn new(linear: &impl Fn(usize, usize) -> Result<nn::Linear>, device: &Device) -> Result<Block> {
        let norm = || nn::LayerNorm::options().device(device).build([WIDTH]);
        Ok(Block {
            norm1: norm()?,
            qkv: linear(WIDTH, 3 * WIDTH)?,
            out: linear(WIDTH, WIDTH)?,
            norm2: norm()?,
            up: linear(WIDTH, 4 * WIDTH)?,
            down: linear(4 * WIDTH, WIDTH)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [batch, length] = TEXT;
        let qkv = self.qkv.forward(&self.norm1.forward(x)?)?;
        let qkv = qkv.view([batch, length, 3, HEADS, WIDTH / HEADS])?.permute([2, 0, 3, 1, 4])?.unbind(0)?;
        let options = Attention { causal: true, ..Attention::default() };
        let seen = qkv[0].scaled_dot_product_attention(&qkv[1], &qkv[2], options)?;
        let x = (x + self.out.forward(&seen.transpose(1, 2)?.reshape([batch, length, WIDTH])?)?).ok()?;
        let wide = self.up.forward(&self.norm2.forward(&x)?)?.gelu()?;
        (&x + self.down.forward(&wide)?).ok()
    }
}

#[derive(Module)]
struct Transformer {
    words: nn::Embedding,
    places: nn::Embedding,
    blocks: Vec<Block>,
    norm: nn::LayerNorm,
    head: nn::Linear,
}

impl Transformer {
    fn new(layers: usize, device: &Device) -> Result<Transformer> {
        let linear = |inputs, outputs| nn::Linear::options().device(device).build(inputs, outputs);
        let embedding = |count| nn::Embedding::options().device(device).build(count, WIDTH);
        Ok(Transformer {
            words: embedding(WORDS)?,
            places: embedding(TEXT[1])?,
            blocks: (0..layers).map(|_| Block::new(&linear, device)).collect::<Result<_>>()?,
            norm: nn::LayerNorm::options().device(device).build([WIDTH])?,
            head: nn::Linear::options().bias(false).device(device).build(WIDTH, WORDS)?,
        })
    }

    fn loss(&self, words: &Tensor, following: &Tensor) -> Result<Tensor> {
        let mut x = (self.words.forward(words)? + &*self.places.weight).ok()?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        let logits = self.head.forward(&self.norm.forward(&x)?)?;
        logits.view([-1, WORDS as i64])?.cross_entropy(&following.view([-1])?)
    }
}

/// Forward, cross-entropy, backward and AdamW.
pub fn train(layers: usize, device: &Device) -> Result<Workload> {
    let model = Transformer::new(layers, device)?;
    let state = model.parameters();
    let optimizer = optim::AdamW::new(model.parameters(), 1e-4)?;
    let words = Tensor::randint(0, WORDS as i64, TEXT, device)?;
    let reads = model.buffers();
    let following = Tensor::randint(0, WORDS as i64, TEXT, device)?;
    let step = move || {
        optimizer.zero_grad();
        model.loss(&words, &following)?.backward()?;
        optimizer.step()?;
        Ok(None)
    };
    Ok(Workload::new(step, state).reading(reads))
}
