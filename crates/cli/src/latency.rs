//! The latency cases: one small answer at a time, without gradients.

use std::cell::Cell;

use kiln::Result;
use kiln::models::{KvCache, resnet18};
use kiln::prelude::*;

use crate::cases::Workload;
use crate::train::CharGpt;

/// A character GPT with as many characters as ASCII has.
const GPT: CharGpt = CharGpt { characters: 128, layers: 4, width: 128, heads: 4, context: 128 };

/// What ResNet18 says of one picture of 224×224.
pub fn resnet18_latency(device: &Device) -> Result<Workload> {
    let model = resnet18(1000)?;
    model.eval();
    let x = Tensor::randn([1, 3, 224, 224], device)?;
    let reads = [model.parameters(), model.buffers(), vec![x.clone()]].concat();
    let step = move || {
        let _off = no_grad();
        model.forward(&x).map(Some)
    };
    Ok(Workload::new(step, Vec::new()).reading(reads))
}

/// The next character behind 128 of them: 127 are in the cache, the last one is new.
pub fn gpt_latency(device: &Device) -> Result<Workload> {
    let model = GPT.build(0.0)?;
    model.eval();
    let ids = Tensor::randint(0, GPT.characters as i64, [1, GPT.context], device)?;
    let cache = KvCache::new(&model, 1, GPT.context)?;
    let seen = GPT.context - 1;
    let reads = [model.parameters(), model.buffers(), cache.tensors()].concat();
    model.decode(&ids.narrow(1, 0, seen)?, &cache)?;
    let last = ids.narrow(1, seen, 1)?.contiguous()?;
    let step = move || {
        // Each call is the same one: the character that the call before has put in goes out again.
        cache.truncate(seen)?;
        model.decode(&last, &cache).map(Some)
    };
    Ok(Workload::new(step, Vec::new()).reading(reads))
}

/// The next character behind a text that is longer by one in every call, and begins anew when it fills the context.
pub fn gpt_growing(device: &Device) -> Result<Workload> {
    const SHORTEST: usize = 16;
    let model = GPT.build(0.0)?;
    model.eval();
    let ids = Tensor::randint(0, GPT.characters as i64, [1, GPT.context], device)?;
    let calls = Cell::new(0);
    let reads = [model.parameters(), model.buffers()].concat();
    let step = move || {
        let _off = no_grad();
        let length = SHORTEST + calls.get() % (GPT.context - SHORTEST);
        calls.set(calls.get() + 1);
        let text = ids.narrow(1, 0, length)?.contiguous()?;
        model.forward(&text)?.narrow(1, length - 1, 1).map(Some)
    };
    Ok(Workload::new(step, Vec::new()).reading(reads))
}
