//! The latency cases: one small answer at a time, without gradients.

use kiln::Result;
use kiln::models::{KvCache, resnet18};
use kiln::prelude::*;

use crate::cases::Workload;
use crate::train::CharGpt;

/// Characters of the GPT, as many as ASCII has.
const CHARACTERS: usize = 128;

/// What ResNet18 says of one picture of 224×224.
pub fn resnet18_latency(device: &Device) -> Result<Workload> {
    let model = resnet18(1000)?;
    model.eval();
    let x = Tensor::randn([1, 3, 224, 224], device)?;
    let step = move || {
        let _off = no_grad();
        model.forward(&x).map(Some)
    };
    Ok(Workload::new(step, Vec::new()))
}

/// The next character behind 128 of them: 127 are in the cache, the last one is new.
pub fn gpt_latency(device: &Device) -> Result<Workload> {
    let size = CharGpt::usual(CHARACTERS);
    let model = size.build(0.0)?;
    model.eval();
    let ids = Tensor::randint(0, CHARACTERS as i64, [1, size.context], device)?;
    let cache = KvCache::new(&model, 1, size.context)?;
    let seen = size.context - 1;
    model.decode(&ids.narrow(1, 0, seen)?, &cache)?;
    let last = ids.narrow(1, seen, 1)?.contiguous()?;
    let step = move || {
        // Each call is the same one: the character that the call before has put in goes out again.
        cache.truncate(seen)?;
        model.decode(&last, &cache).map(Some)
    };
    Ok(Workload::new(step, Vec::new()))
}
