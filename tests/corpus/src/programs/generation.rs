//! Generating: greedy decoding, caches of keys and values, beams, sampling.

use kiln::Result;
use kiln::prelude::*;
use kiln::tensor::Attention;

use super::{CPU, programs};
use crate::{Record, Step};

programs!("generation":
    greedy_decoding, growing_cache, preallocated_cache, until_end_token, beam_search, top_k_sampling,
    nucleus_sampling, speculative_decoding,
);

/// A small decoder with one head of attention. Nothing in it is trained.
struct Decoder {
    tokens: Tensor,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
}

const SIZE: usize = 8;
const VOCABULARY: usize = 12;

impl Decoder {
    fn new() -> Result<Decoder> {
        let table = |rows: usize| Tensor::randn([rows, SIZE], &CPU);
        let square = || table(SIZE)?.mul(0.5);
        Ok(Decoder {
            tokens: table(VOCABULARY)?,
            positions: table(16)?.mul(0.5)?,
            query: square()?,
            key: square()?,
            value: square()?,
            out: table(VOCABULARY)?,
        })
    }

    /// Scores of the token after the last of `text`, read as a whole.
    fn next(&self, text: &Tensor) -> Result<Tensor> {
        let length = text.size(0)?;
        let x = (self.tokens.embedding(text)? + self.positions.narrow(0, 0, length)?).ok()?;
        let [q, k, v] = [&self.query, &self.key, &self.value].map(|w| x.linear(w, None));
        let seen =
            q?.scaled_dot_product_attention(&k?, &v?, Attention { causal: true, ..Attention::default() })?;
        (seen + x).ok()?.select(0, -1)?.linear(&self.out, None)
    }

    /// Features, key and value of one token at a position.
    fn read(&self, token: &Tensor, position: &Tensor) -> Result<[Tensor; 3]> {
        let x = (self.tokens.embedding(token)? + self.positions.embedding(position)?).ok()?;
        Ok([x.clone(), x.linear(&self.key, None)?, x.linear(&self.value, None)?])
    }
}

/// The whole text is read again for every token: each length is a graph of its own.
fn greedy_decoding(step: &Step) -> Result<Record> {
    let (decoder, _guard) = (Decoder::new()?, no_grad());
    let mut text = Tensor::from_slice(&[3i64])?;
    for _ in 0..6 {
        text = step.run(|| Tensor::cat([&text, &decoder.next(&text)?.argmax()?.view([1])?], 0))?;
    }
    let mut record = Record::new();
    record.tensor("text", &text)?;
    Ok(record)
}

/// Keys and values of what was read are kept; the cache grows by `cat`.
fn growing_cache(step: &Step) -> Result<Record> {
    let (decoder, _guard) = (Decoder::new()?, no_grad());
    let mut token = Tensor::from_slice(&[1i64])?;
    let (mut keys, mut values) = (Tensor::zeros([0, SIZE], &CPU)?, Tensor::zeros([0, SIZE], &CPU)?);
    let mut record = Record::new();
    for position in 0..8 {
        let (next, k, v) = step.run(|| {
            let at = Tensor::full_of([1], position, DType::I64, &CPU)?;
            let [x, key, value] = decoder.read(&token, &at)?;
            let (k, v) = (Tensor::cat([&keys, &key], 0)?, Tensor::cat([&values, &value], 0)?);
            let query = x.linear(&decoder.query, None)?;
            let seen = query.scaled_dot_product_attention(&k, &v, Attention::default())?;
            let scores = (seen + x).ok()?.linear(&decoder.out, None)?;
            Ok::<_, kiln::Error>((scores.argmax_dim(1, false)?, k, v))
        })?;
        (token, keys, values) = (next, k, v);
        record.tensor("token", &token)?;
    }
    record.tensors("cache", [&keys, &values])?;
    Ok(record)
}

/// The cache has its full size from the start; what is not yet written is masked. One graph serves all positions.
fn preallocated_cache(step: &Step) -> Result<Record> {
    let (decoder, _guard) = (Decoder::new()?, no_grad());
    let (keys, values) = (Tensor::zeros([12, SIZE], &CPU)?, Tensor::zeros([12, SIZE], &CPU)?);
    let (mut token, at) = (Tensor::from_slice(&[1i64])?, Tensor::from_slice(&[0i64])?);
    let mut record = Record::new();
    for _ in 0..10 {
        token = step.run(|| {
            let [x, key, value] = decoder.read(&token, &at)?;
            keys.index_copy_(0, &at, &key)?;
            values.index_copy_(0, &at, &value)?;
            let written = Tensor::arange(0, 12, &CPU)?.le(&at)?.unsqueeze(0)?;
            let query = x.linear(&decoder.query, None)?;
            let options = Attention { mask: Some(&written), ..Attention::default() };
            let seen = query.scaled_dot_product_attention(&keys, &values, options)?;
            at.add_(1)?;
            (seen + x).ok()?.linear(&decoder.out, None)?.argmax_dim(1, false)
        })?;
        record.tensor("token", &token)?;
    }
    record.tensors("cache", [&keys, &values, &at])?;
    Ok(record)
}

/// Several texts at once, each until it ends; the host looks whether all have ended, outside the step.
fn until_end_token(step: &Step) -> Result<Record> {
    let (decoder, _guard) = (Decoder::new()?, no_grad());
    let mut token = Tensor::from_slice(&[1i64, 5, 7, 9])?;
    let ended = Tensor::full_of([4], false, DType::Bool, &CPU)?;
    let state = Tensor::zeros([4, SIZE], &CPU)?;
    let (mut record, mut steps) = (Record::new(), 0);
    while steps < 20 {
        let all = step.run(|| {
            let x = decoder.tokens.embedding(&token)?;
            state.copy_(&(state.linear(&decoder.query, None)? + x).tanh().ok()?)?;
            let next = state.linear(&decoder.out, None)?.argmax_dim(1, false)?;
            token = ended.where_self(0, &next)?;
            ended.copy_(&ended.logical_or(&token.lt(3)?)?)?;
            ended.all()
        })?;
        record.tensor("token", &token)?;
        steps += 1;
        if all.item::<bool>()? {
            break;
        }
    }
    record.integer("steps", steps);
    Ok(record)
}

/// The best three texts are kept; beams change places by `index_select`.
fn beam_search(step: &Step) -> Result<Record> {
    let (decoder, _guard) = (Decoder::new()?, no_grad());
    let mut texts = Tensor::full_of([3, 1], 1, DType::I64, &CPU)?;
    let mut scores = Tensor::from_slice(&[0.0f32, -1e9, -1e9])?;
    let mut states = Tensor::zeros([3, SIZE], &CPU)?;
    let mut record = Record::new();
    for _ in 0..5 {
        (texts, scores, states) = step.run(|| {
            let x = decoder.tokens.embedding(&texts.select(1, -1)?)?;
            let state = (states.linear(&decoder.key, None)? + x).tanh().ok()?;
            let next = state.linear(&decoder.out, None)?.log_softmax(1)?;
            let total = (next + scores.unsqueeze(1)?).ok()?.flatten()?;
            let (best, index) = total.topk(3, 0, true)?;
            let (beam, token) = (index.floor_divide(VOCABULARY as i64)?, index.remainder(VOCABULARY as i64)?);
            let texts = Tensor::cat([&texts.index_select(0, &beam)?, &token.unsqueeze(1)?], 1)?;
            Ok::<_, kiln::Error>((texts, best, state.index_select(0, &beam)?))
        })?;
        record.tensor("scores", &scores)?;
    }
    record.tensor("texts", &texts)?;
    Ok(record)
}

/// Draws among the four best tokens, at a temperature, by the largest of scores plus Gumbel noise.
fn top_k_sampling(step: &Step) -> Result<Record> {
    let (decoder, _guard) = (Decoder::new()?, no_grad());
    let mut token = Tensor::from_slice(&[2i64, 4])?;
    let mut record = Record::new();
    for i in 0..8 {
        let temperature = 0.5 + 0.1 * i as f64;
        token = step.run(|| {
            let scores = decoder.tokens.embedding(&token)?.linear(&decoder.out, None)?.div(temperature)?;
            let (best, index) = scores.topk(4, 1, true)?;
            let noise = best.rand_like()?.clamp_min(1e-9)?.log()?.neg()?.log()?;
            let chosen = (best - noise).ok()?.argmax_dim(1, true)?;
            index.gather(1, &chosen)?.squeeze(1)
        })?;
        record.tensor("token", &token)?;
    }
    Ok(record)
}

/// Draws among the fewest tokens that have nine tenths of the probability.
fn nucleus_sampling(step: &Step) -> Result<Record> {
    let (decoder, _guard) = (Decoder::new()?, no_grad());
    let mut token = Tensor::from_slice(&[2i64, 4, 6])?;
    let mut record = Record::new();
    for _ in 0..6 {
        token = step.run(|| {
            let scores = decoder.tokens.embedding(&token)?.linear(&decoder.out, None)?;
            let (sorted, order) = scores.softmax(1)?.sort(1, true)?;
            let before = (sorted.cumsum(1)? - &sorted).ok()?;
            let kept = sorted.masked_fill(&before.gt(0.9)?, 0.0)?;
            let share = kept.div(&kept.sum_dim(1, true)?)?.cumsum(1)?;
            let draw = Tensor::rand([3, 1], &CPU)?;
            let place = share.lt(&draw)?.to_dtype(DType::I64)?.sum_dim(1, true)?.clamp_max(11)?;
            order.gather(1, &place)?.squeeze(1)
        })?;
        record.tensor("token", &token)?;
    }
    Ok(record)
}

/// A quick model proposes four tokens, the slow one checks them at once; how many are taken is read by the host.
fn speculative_decoding(step: &Step) -> Result<Record> {
    let (slow, quick, _guard) = (Decoder::new()?, Decoder::new()?, no_grad());
    let check = step.another("check");
    let (mut last, mut text) = (Tensor::from_slice(&[1i64])?, vec![1]);
    while text.len() < 10 {
        let draft = step.run(|| {
            let mut tokens = vec![last.clone()];
            for i in 0..4 {
                let x = quick.tokens.embedding(&tokens[i])?;
                tokens.push(x.linear(&quick.out, None)?.argmax_dim(1, false)?);
            }
            Tensor::cat(&tokens, 0)
        })?;
        let (right, count) = check.run(|| {
            let right = slow.tokens.embedding(&draft)?.linear(&slow.out, None)?.argmax_dim(1, false)?;
            let agreed = right.i(..4)?.eq(&draft.i(1..)?)?.to_dtype(DType::I64)?.cumprod(0)?;
            Ok::<_, kiln::Error>((right, agreed.sum()?))
        })?;
        let taken = count.item::<i64>()? as usize + 1;
        text.extend(&right.to_vec::<i64>()?[..taken]);
        last = right.narrow(0, taken - 1, 1)?;
    }
    let mut record = Record::new();
    text.iter().for_each(|token| record.integer("token", *token as usize));
    Ok(record)
}
