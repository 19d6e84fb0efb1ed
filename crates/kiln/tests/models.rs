//! The models of `kiln::models` compute what torchvision's and Hugging Face's do, eagerly and compiled: logits, loss,
//! gradients, and everything after a step of the optimizer. `crates/models/tests/fixtures/models.py` asked them.

#![allow(clippy::unwrap_used)] // a test may panic

use std::collections::BTreeMap;

use kiln::models::bert::{BertConfig, BertForMaskedLm, BertForSequenceClassification, BertInput};
use kiln::models::convnext::{CNBlockConfig, ConvNeXt, ConvNeXtConfig};
use kiln::models::efficientnet::{EfficientNet, EfficientNetConfig, MBConvConfig};
use kiln::models::mobilenet::{InvertedResidualSetting, MobileNetV2, MobileNetV2Config};
use kiln::models::resnet::{Bottleneck, ResNet};
use kiln::models::{Bert, Gpt2, Gpt2Config, KvCache, ViT, ViTConfig};
use kiln::models::{convnext_tiny, efficientnet_b0, mobilenet_v2, resnet18, resnet34, resnet50, vit_b_16};
use kiln::prelude::*;
use kiln::{Region, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Sum, norm and four elements.
type Summary = [f64; 6];

#[derive(Deserialize)]
struct Case {
    state: BTreeMap<String, Vec<usize>>,
    logits: Summary,
    loss: f64,
    gradients: BTreeMap<String, Summary>,
    after: BTreeMap<String, Summary>,
    #[serde(default)]
    text: Vec<Vec<i64>>,
}

/// What the fixture says under a name.
fn fixture<T: DeserializeOwned>(name: &str) -> T {
    let text = include_str!("../../models/tests/fixtures/models.json");
    let mut all: BTreeMap<String, serde_json::Value> = serde_json::from_str(text).unwrap();
    serde_json::from_value(all.remove(name).unwrap()).unwrap()
}

/// Numbers in [-1, 1) that only depend on the name: 24 bits each, exact in every float.
fn numbers(name: &str, count: usize) -> Vec<f64> {
    let seed = name.bytes().fold(2166136261u32, |seed, byte| (seed ^ u32::from(byte)).wrapping_mul(16777619));
    let number = |i: u32| {
        let mut h = i.wrapping_mul(2654435761).wrapping_add(seed);
        h = (h ^ (h >> 16)).wrapping_mul(73244475);
        h = (h ^ (h >> 16)).wrapping_mul(73244475);
        h ^= h >> 16;
        f64::from(h >> 8) / f64::from(1 << 23) - 1.0
    };
    (0..count as u32).map(number).collect()
}

/// Weights of the usual size, norms around one. Shared ones go by the first of their names.
fn fill(model: &dyn Module) -> Result<()> {
    let _off = no_grad();
    let mut seen = Vec::new();
    for (name, tensor) in model.state_dict().iter() {
        if !tensor.dtype().is_float() || seen.contains(&tensor.address()) {
            continue;
        }
        seen.push(tensor.address());
        let mut values = numbers(name, tensor.numel());
        let (offset, scale) = match tensor.rank() {
            1 if name.contains("running_var") || name.ends_with("weight") => (1.0, 0.25),
            1 => (0.0, 0.25),
            _ => (0.0, (3.0 / (tensor.numel() / tensor.shape()[0]) as f64).sqrt()),
        };
        values.iter_mut().for_each(|value| *value = offset + *value * scale);
        tensor.copy_(&Tensor::from_vec(values, tensor.shape())?.to_dtype(tensor.dtype())?)?;
    }
    Ok(())
}

fn images(dtype: DType) -> Result<Tensor> {
    Tensor::from_vec(numbers("images", 4 * 3 * 48 * 48), [4, 3, 48, 48])?.to_dtype(dtype)
}

fn tokens(name: &str, below: f64, shape: &[usize]) -> Result<Tensor> {
    let count = shape.iter().product();
    let all = numbers(name, count).iter().map(|x| ((x + 1.0) / 2.0 * below) as i64).collect();
    Tensor::from_vec::<i64>(all, shape)
}

fn summary(tensor: &Tensor) -> Result<Summary> {
    let flat = tensor.detach()?.to_dtype(DType::F64)?.flatten()?;
    let norm = flat.square()?.sum()?.sqrt()?.item::<f64>()?;
    let n = flat.numel();
    let at = |i: usize| flat.select(0, i as i64)?.item::<f64>();
    Ok([flat.sum()?.item()?, norm, at(0)?, at(n / 3)?, at(n / 2)?, at(n - 1)?])
}

/// Compares tensors by their summaries. An element may be off by `tolerance` of itself and of the greatest root mean
/// square among the tensors: gradients that are zero but for rounding have no size of their own.
fn compare(
    what: &str,
    got: &[(String, Tensor)],
    want: &BTreeMap<String, Summary>,
    tolerance: f64,
) -> Result<()> {
    let mut names: Vec<&String> = got.iter().map(|(name, _)| name).collect();
    names.sort();
    assert!(names.into_iter().eq(want.keys()), "{what}: other names");
    let size = |tensor: &Tensor, summary: &Summary| summary[1] / (tensor.numel() as f64).sqrt();
    let greatest = got.iter().map(|(name, tensor)| size(tensor, &want[name])).fold(0.0, f64::max);
    for (name, tensor) in got {
        let (want, got) = (want[name], summary(tensor)?);
        let n = tensor.numel() as f64;
        // Errors of a sum add up like a walk, at least in part.
        let factors = [n, n.sqrt(), 1.0, 1.0, 1.0, 1.0];
        for ((want, got), factor) in want.iter().zip(got).zip(factors) {
            let allowed = tolerance * (want.abs() + factor * greatest);
            assert!((want - got).abs() <= allowed, "{what} of {name}: {got} instead of {want}");
        }
    }
    Ok(())
}

/// How a step is run.
#[derive(Copy, Clone, Debug, PartialEq)]
enum Run {
    Eager(DType),
    Compiled(DType),
}

/// What f32 may be off by. Networks of convolutions and batch norms amplify rounding: PyTorch's own gradients in f32
/// and f64 differ as much.
const CONVOLUTIONS: f64 = 2e-2;
const TRANSFORMERS: f64 = 1e-4;

/// Runs a training step of a new model each way and compares it with PyTorch's; `single` is the tolerance in f32.
fn check<M: Module>(
    name: &str,
    build: impl Fn() -> Result<M>,
    single: f64,
    optimizer: impl Fn(Vec<Tensor>) -> Result<Box<dyn Optimizer>>,
    step: impl Fn(&M, DType) -> Result<(Tensor, Tensor)>,
) -> Result<()> {
    let case: Case = fixture(name);
    let first = build()?;
    first.to(DType::F64)?;
    fill(&first)?;
    let weights = first.state_dict();
    for run in [Run::Eager(DType::F64), Run::Compiled(DType::F64), Run::Compiled(DType::F32)] {
        let (Run::Eager(dtype) | Run::Compiled(dtype)) = run;
        let model = build()?;
        model.to(dtype)?;
        let state: BTreeMap<String, Vec<usize>> =
            model.state_dict().iter().map(|(name, t)| (name.to_string(), t.shape().to_vec())).collect();
        assert_eq!(state, case.state, "{name}");
        assert!(model.load_state_dict(&weights, true)?.is_clean());
        let optimizer = optimizer(model.parameters())?;
        let whole = || -> Result<(Tensor, Tensor)> {
            optimizer.zero_grad();
            let (logits, loss) = step(&model, dtype)?;
            loss.backward()?;
            optimizer.step()?;
            Ok((logits.detach()?, loss.detach()?))
        };
        let (logits, loss) = match run {
            Run::Eager(_) => whole()?,
            Run::Compiled(_) => {
                let region = Compile::new().region();
                let results = region.run(whole)?;
                one_graph(&region);
                results
            }
        };
        // PyTorch's numbers are f64, written to ten digits.
        let tolerance = if dtype == DType::F64 { 1e-8 } else { single };
        let what = format!("{name}, {run:?}");
        let got = [("logits".to_string(), logits), ("loss".to_string(), loss)];
        let loss = [case.loss, case.loss.abs(), case.loss, case.loss, case.loss, case.loss];
        let want = BTreeMap::from([("logits".to_string(), case.logits), ("loss".to_string(), loss)]);
        compare(&what, &got, &want, tolerance)?;
        let parameters = model.named_parameters();
        let gradients: Vec<(String, Tensor)> =
            parameters.iter().map(|(name, tensor)| (name.clone(), tensor.grad().unwrap())).collect();
        compare(&format!("{what}, gradient"), &gradients, &case.gradients, tolerance)?;
        let buffers = model.named_buffers().into_iter().filter(|(_, buffer)| buffer.dtype().is_float());
        let after: Vec<(String, Tensor)> = parameters.into_iter().chain(buffers).collect();
        compare(&format!("{what}, value"), &after, &case.after, tolerance)?;
    }
    Ok(())
}

fn one_graph(region: &Region) {
    let explanation = region.explain();
    assert_eq!((explanation.graphs.len(), explanation.breaks.len()), (1, 0), "{explanation}");
    assert_eq!(explanation.graphs[0].interpreted, None);
}

fn sgd(parameters: Vec<Tensor>) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(optim::SGD::options().lr(0.01).momentum(0.9).weight_decay(1e-4).build(parameters)?))
}

fn adamw(parameters: Vec<Tensor>) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(optim::AdamW::options().lr(1e-3).eps(1e-3).build(parameters)?))
}

fn classify(model: &impl Forward<Output = Tensor>, dtype: DType) -> Result<(Tensor, Tensor)> {
    let logits = model.forward(&images(dtype)?)?;
    let loss = logits.cross_entropy(&tokens("classes", 10.0, &[4])?)?;
    Ok((logits, loss))
}

#[test]
fn resnet18_is_torchvisions() -> Result<()> {
    check("resnet18", || resnet18(10), CONVOLUTIONS, sgd, classify)
}

#[test]
fn resnets_of_bottlenecks_are_torchvisions() -> Result<()> {
    check("bottleneck", || ResNet::<Bottleneck>::new([1, 1, 1, 1], 10), CONVOLUTIONS, sgd, classify)
}

#[test]
fn mobilenet_is_torchvisions() -> Result<()> {
    let setting = |expand_ratio, channels, num_blocks, stride| InvertedResidualSetting {
        expand_ratio,
        channels,
        num_blocks,
        stride,
    };
    let config = MobileNetV2Config {
        width_mult: 0.5,
        inverted_residual_setting: vec![setting(1, 16, 1, 1), setting(6, 24, 2, 2), setting(4, 40, 1, 2)],
        dropout: 0.0,
        num_classes: 10,
    };
    check("mobilenet_v2", || MobileNetV2::new(&config), CONVOLUTIONS, sgd, classify)
}

#[test]
fn efficientnet_is_torchvisions() -> Result<()> {
    let stage = |expand_ratio, kernel, stride, input_channels, out_channels, num_layers| MBConvConfig {
        expand_ratio,
        kernel,
        stride,
        input_channels,
        out_channels,
        num_layers,
    };
    let config = EfficientNetConfig {
        inverted_residual_setting: vec![
            stage(1, 3, 1, 16, 8, 1),
            stage(6, 5, 2, 8, 12, 2),
            stage(4, 3, 2, 12, 20, 1),
        ],
        dropout: 0.0,
        stochastic_depth_prob: 0.0,
        num_classes: 10,
    };
    check("efficientnet", || EfficientNet::new(&config), CONVOLUTIONS, sgd, classify)
}

#[test]
fn convnext_is_torchvisions() -> Result<()> {
    let stage =
        |input_channels, out_channels, num_layers| CNBlockConfig { input_channels, out_channels, num_layers };
    let config = ConvNeXtConfig {
        block_setting: vec![stage(8, Some(12), 1), stage(12, Some(20), 2), stage(20, None, 1)],
        stochastic_depth_prob: 0.0,
        layer_scale: 1e-6,
        num_classes: 10,
    };
    check("convnext", || ConvNeXt::new(&config), TRANSFORMERS, adamw, classify)
}

#[test]
fn vit_is_torchvisions() -> Result<()> {
    let config = ViTConfig {
        image_size: 48,
        num_layers: 2,
        num_heads: 4,
        hidden_dim: 32,
        mlp_dim: 48,
        num_classes: 10,
        ..ViTConfig::b_16()
    };
    check("vit", || ViT::new(config.clone()), TRANSFORMERS, adamw, classify)
}

fn gpt2() -> Result<Gpt2> {
    let config = Gpt2Config {
        vocab_size: 60,
        n_positions: 24,
        n_embd: 32,
        n_layer: 2,
        n_head: 4,
        ..Gpt2Config::small()
    };
    Gpt2::new(config.without_dropout())
}

#[test]
fn gpt2_is_hugging_faces() -> Result<()> {
    check("gpt2", gpt2, TRANSFORMERS, adamw, |model, _| {
        let ids = tokens("tokens", 60.0, &[2, 12])?;
        Ok((model.forward(&ids)?, model.loss(&ids, &ids)?))
    })
}

fn bert() -> BertConfig {
    let config = BertConfig {
        vocab_size: 60,
        hidden_size: 32,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        intermediate_size: 48,
        max_position_embeddings: 24,
        ..BertConfig::base()
    };
    config.without_dropout()
}

/// 1 for the tokens of the second text that are there.
fn mask() -> Result<Tensor> {
    Tensor::from_vec((0..24).map(|i| i64::from(i < 21)).collect(), [2, 12])
}

#[test]
fn bert_that_classifies_is_hugging_faces() -> Result<()> {
    let build = || BertForSequenceClassification::new(&bert(), 3);
    check("bert_classification", build, TRANSFORMERS, adamw, |model, _| {
        let kinds = Tensor::from_vec((0..24i64).map(|i| i64::from(i % 12 >= 7)).collect(), [2, 12])?;
        let input = BertInput {
            input_ids: tokens("tokens", 60.0, &[2, 12])?.mul(&mask()?)?,
            attention_mask: Some(mask()?),
            token_type_ids: Some(kinds),
        };
        let logits = model.forward(&input)?;
        let loss = logits.cross_entropy(&Tensor::from_slice(&[2i64, 0])?)?;
        Ok((logits, loss))
    })
}

#[test]
fn bert_that_fills_in_is_hugging_faces() -> Result<()> {
    check(
        "bert_masked_lm",
        || BertForMaskedLm::new(&bert()),
        TRANSFORMERS,
        adamw,
        |model, _| {
            let ids = tokens("tokens", 60.0, &[2, 12])?;
            let asked = Tensor::from_vec((0..12i64).map(|i| i64::from(i % 4 == 1)).collect(), [12])?.eq(1)?;
            let labels = asked.where_self(&ids, -100)?;
            let input = BertInput { attention_mask: Some(mask()?), ..BertInput::from(&ids) };
            let logits = model.forward(&input)?;
            let loss = logits.reshape([-1, 60])?.cross_entropy(&labels.reshape([-1])?)?;
            Ok((logits, loss))
        },
    )
}

#[test]
fn gpt2_goes_on_as_hugging_faces_does() -> Result<()> {
    let text: Vec<Vec<i64>> = fixture::<Case>("gpt2").text;
    let model = gpt2()?;
    fill(&model)?;
    model.eval();
    let start = tokens("tokens", 60.0, &[2, 12])?.narrow(1, 0, 5)?;
    assert_eq!(model.generate(&start, 10)?.to_vec::<i64>()?, text.concat());

    // Compiled, a token at a time: the program is the same for each, and again for the next text.
    let region = Compile::new().region();
    let cache = KvCache::new(&model, 2, 15)?;
    for _ in 0..2 {
        cache.clear()?;
        let (mut all, mut last) = (start.clone(), start.clone());
        for _ in 0..10 {
            last = region.run(|| model.decode(&last, &cache)?.argmax_dim(-1, true))?;
            all = Tensor::cat([&all, &last], 1)?;
        }
        assert_eq!(all.to_vec::<i64>()?, text.concat());
    }
    let explanation = region.explain();
    // One for the text that is given, one for a token.
    assert_eq!((explanation.graphs.len(), explanation.breaks.len()), (2, 0), "{explanation}");
    assert_eq!(explanation.recompiles.len(), 1, "{explanation}");

    // What was decoded last is what the whole text says, and what does not fit is refused.
    let cache = KvCache::new(&model, 2, 15)?;
    let all = Tensor::from_vec(text.concat(), [2, 15])?;
    model.decode(&all.narrow(1, 0, 14)?, &cache)?;
    let decoded = model.decode(&all.narrow(1, 14, 1)?, &cache)?;
    let whole = model.forward(&all)?.select(1, -1)?;
    assert!(decoded.sub(&whole)?.abs()?.max()?.item::<f32>()? < 1e-5);
    assert_eq!((cache.len(), cache.capacity()), (15, 15));
    let refused = model.decode(&all.narrow(1, 14, 1)?, &cache).unwrap_err().to_string();
    assert!(refused.contains("at most 0 (the room left in the cache), got 1"), "{refused}");
    assert!(KvCache::new(&model, 2, 25).is_err());
    // Back to where it was: the same token gives the same logits, at whatever place.
    cache.truncate(14)?;
    cache.truncate(99)?;
    assert_eq!(cache.len(), 14);
    let again = model.decode(&all.narrow(1, 14, 1)?, &cache)?;
    assert_eq!(again.to_vec::<f32>()?, decoded.to_vec::<f32>()?);
    Ok(())
}

#[derive(Deserialize)]
struct Size {
    tensors: usize,
    parameters: usize,
    hash: String,
}

/// The state of a model has the names and shapes that PyTorch's has, in this order.
fn same_state(name: &str, model: &dyn Module) {
    let want = fixture::<BTreeMap<String, Size>>("sizes").remove(name).unwrap();
    let state = model.state_dict();
    assert_eq!(state.len(), want.tensors, "{name}");
    let parameters: usize = model.parameters().iter().map(Tensor::numel).sum();
    assert_eq!(parameters, want.parameters, "{name}");
    let mut hash = 14695981039346656037u64;
    for (key, tensor) in state.iter() {
        for byte in format!("{key}{:?}", tensor.shape().to_vec()).bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(1099511628211);
        }
    }
    assert_eq!(hash.to_string(), want.hash, "{name}");
}

#[test]
fn states_of_whole_resnets_are_torchvisions() -> Result<()> {
    same_state("resnet18", &resnet18(1000)?);
    same_state("resnet34", &resnet34(1000)?);
    same_state("resnet50", &resnet50(1000)?);
    Ok(())
}

#[test]
fn states_of_whole_depthwise_networks_are_torchvisions() -> Result<()> {
    same_state("mobilenet_v2", &mobilenet_v2(1000)?);
    same_state("efficientnet_b0", &efficientnet_b0(1000)?);
    same_state("convnext_tiny", &convnext_tiny(1000)?);
    Ok(())
}

/// The small ones above have the same parts; these take memory and some seconds.
#[test]
#[ignore = "half a gigabyte of weights"]
fn states_of_whole_transformers_are_pytorchs() -> Result<()> {
    same_state("gpt2", &Gpt2::new(Gpt2Config::small())?);
    same_state("bert", &Bert::new(&BertConfig::base())?);
    same_state("vit_b_16", &vit_b_16(1000)?);
    Ok(())
}
