//! A small language model: embeddings that also give the scores, blocks of attention, dropout, a loss.

use kiln_tensor::{Attention, Result, Tensor};

use crate::world::{numbers, parameter, whole};

const WORDS: usize = 33;
const WIDTH: usize = 12;
const HEADS: usize = 2;
const LENGTH: usize = 7;
const BLOCKS: usize = 3;

struct Block {
    first_norm: [Tensor; 2],
    attend: [Tensor; 2],
    merge: [Tensor; 2],
    second_norm: [Tensor; 2],
    up: [Tensor; 2],
    down: [Tensor; 2],
}

/// A weight and a bias.
fn layer(seed: u64, outputs: usize, inputs: usize) -> Result<[Tensor; 2]> {
    Ok([parameter(seed, &[outputs, inputs], 0.3)?, parameter(seed + 1, &[outputs], 0.1)?])
}

fn norm(seed: u64) -> Result<[Tensor; 2]> {
    let scale = numbers(seed, &[WIDTH])?.mul(0.1)?.add(1.0)?;
    scale.requires_grad_(true)?;
    Ok([scale, parameter(seed + 1, &[WIDTH], 0.1)?])
}

impl Block {
    fn new(seed: u64) -> Result<Block> {
        Ok(Block {
            first_norm: norm(seed)?,
            attend: layer(seed + 2, 3 * WIDTH, WIDTH)?,
            merge: layer(seed + 4, WIDTH, WIDTH)?,
            second_norm: norm(seed + 6)?,
            up: layer(seed + 8, 2 * WIDTH, WIDTH)?,
            down: layer(seed + 10, WIDTH, 2 * WIDTH)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let batch = x.shape()[0];
        let normed = x.layer_norm(&[WIDTH], Some(&self.first_norm[0]), Some(&self.first_norm[1]), 1e-5)?;
        let all = normed.linear(&self.attend[0], Some(&self.attend[1]))?;
        let all = all.reshape([batch, LENGTH, 3, HEADS, WIDTH / HEADS])?.permute([2, 0, 3, 1, 4])?;
        let [query, key, value] = [all.select(0, 0)?, all.select(0, 1)?, all.select(0, 2)?];
        let options = Attention { causal: true, ..Attention::default() };
        let seen = query.scaled_dot_product_attention(&key, &value, options)?;
        let seen = seen.transpose(1, 2)?.reshape([batch, LENGTH, WIDTH])?;
        let merged = seen.linear(&self.merge[0], Some(&self.merge[1]))?.dropout(0.2, true)?;
        let x = x.add(&merged)?;
        let normed = x.layer_norm(&[WIDTH], Some(&self.second_norm[0]), Some(&self.second_norm[1]), 1e-5)?;
        let wide = normed.linear(&self.up[0], Some(&self.up[1]))?.gelu()?;
        x.add(&wide.linear(&self.down[0], Some(&self.down[1]))?.dropout(0.2, true)?)
    }
}

/// See the [module](self).
pub struct Text {
    words: Tensor,
    positions: Tensor,
    blocks: Vec<Block>,
    tokens: Tensor,
    targets: Tensor,
}

impl Text {
    /// The model, and so many sentences.
    pub fn new(batch: usize) -> Result<Text> {
        Ok(Text {
            words: parameter(100, &[WORDS, WIDTH], 0.5)?,
            positions: parameter(101, &[LENGTH, WIDTH], 0.2)?,
            blocks: (0..BLOCKS as u64).map(|block| Block::new(110 + 20 * block)).collect::<Result<_>>()?,
            tokens: whole(102, &[batch, LENGTH], WORDS as i64)?,
            targets: whole(103, &[batch * LENGTH], WORDS as i64)?,
        })
    }

    pub fn parameters(&self) -> Vec<Tensor> {
        let mut all = vec![self.words.clone(), self.positions.clone()];
        for block in &self.blocks {
            let Block { first_norm, attend, merge, second_norm, up, down } = block;
            all.extend([first_norm, attend, merge, second_norm, up, down].into_iter().flatten().cloned());
        }
        all
    }

    /// The loss, after a backward pass.
    pub fn train(&self) -> Result<Tensor> {
        let mut x = self.words.embedding(&self.tokens)?.add(&self.positions)?.dropout(0.1, true)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        let scores =
            x.rms_norm(&[WIDTH], None, None)?.reshape([-1, WIDTH as i64])?.linear(&self.words, None)?;
        let small = scores.square()?.mean()?.mul(0.1)?;
        let loss = scores.cross_entropy(&self.targets)?.add(&small)?;
        loss.backward()?;
        loss.detach()
    }
}
