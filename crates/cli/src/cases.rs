//! The benchmark cases: names, and the workloads behind them, exactly as the PyTorch script has them.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use kiln::Result;
use kiln::models::{Gpt2, Gpt2Config};
use kiln::prelude::*;

use crate::measure::EQUAL_STEPS;
use crate::networks::Network;
use crate::{latency, transformer};

/// Ops in one call of the overhead case.
pub const OVERHEAD_OPS: usize = 500;
/// Shape of the pointwise and softmax cases.
pub const MATRIX: [usize; 2] = [4096, 1024];

/// Layers of the transformer, where its name has no number.
const TRANSFORMER_LAYERS: usize = 12;

/// One benchmark case.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Case {
    /// An optimizer step over `layers` square matrices.
    Optimizer {
        /// Which one.
        kind: OptimizerKind,
        /// How many matrices.
        layers: usize,
        /// Rows and columns of each.
        size: usize,
    },
    /// A training step of a small classifier.
    MlpTrain,
    /// A training step of a small GPT-2.
    GptTrain,
    /// The same with parameters and activations in bf16, over twice as many texts.
    GptTrainBf16,
    /// A training step of a network over pictures.
    NetworkTrain(Network),
    /// A training step of a transformer.
    TransformerTrain {
        /// How many blocks.
        layers: usize,
    },
    /// A training step of a recurrent network.
    LstmTrain {
        /// How many steps its sequences have.
        steps: usize,
    },
    /// ResNet18 on one picture, without gradients.
    Resnet18Latency,
    /// The next token of a character GPT behind 128 others, from its cache.
    GptLatency,
    /// The same without a cache: a text that grows by a character in every call.
    GptGrowing,
    /// Softmax over the rows of a matrix.
    Softmax,
    /// Ten pointwise ops in a row.
    Chain10,
    /// Layer norm, scaled and shifted, and gelu.
    LnGelu,
    /// The sum of squares over the rows of a matrix.
    Sum0,
    /// The product of an [m, k] and a [k, n] matrix.
    Matmul {
        /// Rows of the first.
        m: usize,
        /// Columns of the first, rows of the second.
        k: usize,
        /// Columns of the second.
        n: usize,
    },
    /// Forward and backward of every convolution of ResNet18, batch 8, 112×112.
    ConvResnet18,
    /// A thousand additions of tensors of one element, eager with gradient recording.
    OpOverhead,
    /// Many ops on tensors of one element: what the host costs.
    Overhead,
}

/// The optimizers of the cases: lr 0.01, SGD with momentum 0.9.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OptimizerKind {
    // No doc comments: they would turn the help text into a list of lists.
    #[default]
    Adam,
    Adamw,
    Sgd,
}

const fn optimizer(kind: OptimizerKind, layers: usize, size: usize) -> Case {
    Case::Optimizer { kind, layers, size }
}

const fn matmul(m: usize, k: usize, n: usize) -> Case {
    Case::Matmul { m, k, n }
}

impl Case {
    /// The cases `kiln bench` runs when none is named.
    pub const ALL: &'static [Case] = &[
        optimizer(OptimizerKind::Adam, 10, 1024),
        optimizer(OptimizerKind::Adamw, 10, 1024),
        optimizer(OptimizerKind::Sgd, 10, 1024),
        optimizer(OptimizerKind::Adam, 1000, 128),
        Case::MlpTrain,
        Case::GptTrain,
        Case::GptTrainBf16,
        Case::NetworkTrain(Network::Resnet18),
        Case::NetworkTrain(Network::MobilenetV2),
        Case::NetworkTrain(Network::EfficientnetB0),
        Case::NetworkTrain(Network::ConvnextTiny),
        Case::TransformerTrain { layers: TRANSFORMER_LAYERS },
        Case::LstmTrain { steps: 50 },
        Case::LstmTrain { steps: 200 },
        Case::LstmTrain { steps: 400 },
        Case::Resnet18Latency,
        Case::GptLatency,
        Case::GptGrowing,
        Case::Softmax,
        Case::Chain10,
        Case::LnGelu,
        Case::Sum0,
        matmul(2048, 2048, 2048),
        matmul(512, 256, 8192),
        matmul(512, 576, 3136),
        matmul(64, 256, 256),
        Case::ConvResnet18,
        Case::OpOverhead,
        Case::Overhead,
    ];

    /// After how many equal steps compiled results are compared with eager's.
    ///
    /// The sum of a network's logits has no minimum, and its gradients are small differences of large numbers:
    /// after three steps f32 and f64 have nothing in common any more, in PyTorch neither.
    pub fn equal_steps(self) -> usize {
        if matches!(self, Case::NetworkTrain(_)) { 1 } else { EQUAL_STEPS }
    }

    /// The workload, from seed 0: two of them start from the same state.
    pub fn build(self, device: &Device) -> Result<Workload> {
        manual_seed(0);
        match self {
            Case::Optimizer { kind, layers, size } => optimizer_step(kind, layers, size, device),
            Case::MlpTrain => mlp_train(256, 64, device),
            Case::GptTrain => gpt_train(DType::F32, 4, device),
            Case::GptTrainBf16 => gpt_train(DType::BF16, 8, device),
            Case::NetworkTrain(network) => network.train(device),
            Case::TransformerTrain { layers } => transformer::train(layers, device),
            Case::LstmTrain { steps } => lstm_train(steps, device),
            Case::Resnet18Latency => latency::resnet18_latency(device),
            Case::GptLatency => latency::gpt_latency(device),
            Case::GptGrowing => latency::gpt_growing(device),
            Case::Softmax => micro(device, |x| x.softmax(-1)),
            Case::Chain10 => micro(device, |x| {
                (((((x * 2.0 + 1.0).tanh() * x).sigmoid() + x).exp() - 1.0).relu().sqrt() * 0.5 + x).ok()
            }),
            Case::LnGelu => {
                micro(device, |x| (x.layer_norm(&[MATRIX[1]], None, None, 1e-5)? * 2.0 + 1.0).ok()?.gelu())
            }
            Case::ConvResnet18 => convolutions(device),
            Case::Sum0 => micro(device, |x| (x * x).ok()?.sum_dim(0, false)),
            Case::Matmul { m, k, n } => {
                let (a, b) = (Tensor::rand([m, k], device)?, Tensor::rand([k, n], device)?);
                let reads = vec![a.clone(), b.clone()];
                Ok(Workload::new(move || a.mm(&b).map(Some), Vec::new()).reading(reads))
            }
            Case::OpOverhead => op_overhead(device),
            Case::Overhead => overhead(device),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rows, columns] = MATRIX;
        match self {
            Case::Optimizer { kind: OptimizerKind::Adam, layers, size } => write!(f, "adam_{layers}x{size}"),
            Case::Optimizer { kind: OptimizerKind::Adamw, layers, size } => {
                write!(f, "adamw_{layers}x{size}")
            }
            Case::Optimizer { kind: OptimizerKind::Sgd, layers, size } => {
                write!(f, "sgd_momentum_{layers}x{size}")
            }
            Case::MlpTrain => f.write_str("mlp_train"),
            Case::GptTrain => f.write_str("gpt_train"),
            Case::GptTrainBf16 => f.write_str("gpt_train_bf16"),
            Case::NetworkTrain(network) => network.fmt(f),
            Case::TransformerTrain { layers: TRANSFORMER_LAYERS } => f.write_str("transformer_train"),
            Case::TransformerTrain { layers } => write!(f, "transformer_train_{layers}"),
            Case::LstmTrain { steps } => write!(f, "lstm_train_{steps}"),
            Case::Resnet18Latency => f.write_str("resnet18_latency"),
            Case::GptLatency => f.write_str("gpt_latency"),
            Case::GptGrowing => f.write_str("gpt_growing"),
            Case::Softmax => write!(f, "softmax_{rows}x{columns}"),
            Case::Chain10 => write!(f, "chain10_{rows}x{columns}"),
            Case::LnGelu => write!(f, "ln_gelu_{rows}x{columns}"),
            Case::ConvResnet18 => f.write_str("conv_resnet18"),
            Case::Sum0 => write!(f, "sum0_{rows}x{columns}"),
            Case::Matmul { m, k, n } if m == k && k == n => write!(f, "matmul_{m}"),
            Case::Matmul { m, k, n } => write!(f, "matmul_{m}x{k}x{n}"),
            Case::OpOverhead => f.write_str("op_overhead_x1000"),
            Case::Overhead => f.write_str("overhead"),
        }
    }
}

impl FromStr for Case {
    type Err = String;

    /// A listed name, an optimizer's with other numbers (`adam_3x64`), or the transformer's with other layers
    /// (`transformer_train_24`).
    fn from_str(name: &str) -> Result<Case, String> {
        let listed = Case::ALL.iter().copied().find(|case| case.to_string() == name);
        listed.or_else(|| parse_optimizer(name)).or_else(|| parse_transformer(name)).ok_or_else(|| {
            let names: Vec<String> = Case::ALL.iter().map(Case::to_string).collect();
            format!(
                "no such case; there are {}, and the optimizers' and the transformer's with other numbers (adam_3x64, transformer_train_24)",
                names.join(", ")
            )
        })
    }
}

/// The cases that a word on the command line asks for.
#[derive(Clone)]
pub struct Cases(pub Vec<Case>);

impl FromStr for Cases {
    type Err = String;

    /// One case by its name, else all whose names contain the word.
    fn from_str(word: &str) -> Result<Cases, String> {
        Case::from_str(word).map(|case| Cases(vec![case])).or_else(|error| {
            let found: Vec<Case> =
                Case::ALL.iter().copied().filter(|case| case.to_string().contains(word)).collect();
            if found.is_empty() { Err(error) } else { Ok(Cases(found)) }
        })
    }
}

fn parse_optimizer(name: &str) -> Option<Case> {
    let (kind, numbers) = name.rsplit_once('_')?;
    let kind = match kind {
        "adam" => OptimizerKind::Adam,
        "adamw" => OptimizerKind::Adamw,
        "sgd_momentum" => OptimizerKind::Sgd,
        _ => return None,
    };
    let (layers, size) = numbers.split_once('x')?;
    let number = |text: &str| text.parse::<usize>().ok().filter(|number| *number > 0);
    Some(optimizer(kind, number(layers)?, number(size)?))
}

fn parse_transformer(name: &str) -> Option<Case> {
    let layers = name.strip_prefix("transformer_train_")?.parse().ok().filter(|layers| *layers > 0)?;
    Some(Case::TransformerTrain { layers })
}

/// Something that runs step by step, eagerly unless the caller compiles the step.
pub struct Workload {
    step: Box<dyn Fn() -> Result<Option<Tensor>>>,
    state: Vec<Tensor>,
    reads: Vec<Tensor>,
}

impl Workload {
    /// A step, and what it changes.
    pub fn new(step: impl Fn() -> Result<Option<Tensor>> + 'static, state: Vec<Tensor>) -> Workload {
        Workload { step: Box::new(step), state, reads: Vec::new() }
    }

    /// What else it reads of floats, so that it can run in another precision.
    pub fn reading(self, reads: Vec<Tensor>) -> Workload {
        Workload { reads, ..self }
    }

    /// One step; the result, where the workload is a function.
    pub fn step(&self) -> Result<Option<Tensor>> {
        (self.step)()
    }

    /// From now on it computes in f64, from the same numbers.
    pub fn widen(&self) -> Result<()> {
        let wide = |t: &Tensor| t.detach()?.to_dtype(DType::F64);
        for tensor in self.state.iter().chain(&self.reads).filter(|t| t.dtype().is_float()) {
            tensor.set_data(&wide(tensor)?)?;
            tensor.set_grad(tensor.grad().as_ref().map(wide).transpose()?);
        }
        Ok(())
    }

    /// Everything a run leaves behind: what `steps` steps changed and the last one's result, on the host.
    pub fn results(&self, last: Option<Tensor>) -> Result<Vec<Vec<f64>>> {
        let values = |t: &Tensor| t.detach()?.to_dtype(DType::F64)?.to_vec::<f64>();
        self.state.iter().chain(&last).map(values).collect()
    }
}

/// `opt.step()` over the gradients of `model(rand(size)).sum()`.
fn optimizer_step(kind: OptimizerKind, layers: usize, size: usize, device: &Device) -> Result<Workload> {
    let linear = nn::Linear::options().bias(false).device(device);
    let model = nn::Sequential::from_iter((0..layers).map(|_| linear.build(size, size)))?;
    model.forward(&Tensor::rand([size], device)?)?.sum()?.backward()?;
    let state = model.parameters();
    let opt: Box<dyn Optimizer> = match kind {
        OptimizerKind::Adam => Box::new(optim::Adam::new(model.parameters(), 0.01)?),
        OptimizerKind::Adamw => Box::new(optim::AdamW::new(model.parameters(), 0.01)?),
        OptimizerKind::Sgd => {
            Box::new(optim::SGD::options().lr(0.01).momentum(0.9).build(model.parameters())?)
        }
    };
    Ok(Workload::new(move || opt.step().map(|()| None), state))
}

/// Forward, cross-entropy, backward and Adam of a three-layer classifier with ten classes.
pub fn mlp_train(width: usize, batch: usize, device: &Device) -> Result<Workload> {
    let linear = nn::Linear::options().device(device);
    let model = nn::seq![
        linear.build(width, width)?,
        nn::Gelu,
        linear.build(width, width)?,
        nn::Gelu,
        linear.build(width, 10)?,
    ];
    let state = model.parameters();
    let opt = optim::Adam::new(model.parameters(), 1e-3)?;
    let (x, y) = (Tensor::randn([batch, width], device)?, Tensor::randint(0, 10, [batch], device)?);
    let reads = vec![x.clone()];
    let step = move || {
        opt.zero_grad();
        model.forward(&x)?.cross_entropy(&y)?.backward()?;
        opt.step()?;
        Ok(None)
    };
    Ok(Workload::new(step, state).reading(reads))
}

/// Forward, mean square, backward and Adam of a two-layer LSTM, 128 to 256, over 16 sequences.
fn lstm_train(steps: usize, device: &Device) -> Result<Workload> {
    let model = nn::LSTM::options().num_layers(2).device(device).build(128, 256)?;
    let state = model.parameters();
    let opt = optim::Adam::new(model.parameters(), 1e-3)?;
    let x = Tensor::randn([steps, 16, 128], device)?;
    let reads = vec![x.clone()];
    let step = move || {
        opt.zero_grad();
        let (y, _last) = model.forward(&x)?;
        (&y * &y).ok()?.mean()?.backward()?;
        opt.step()?;
        Ok(None)
    };
    Ok(Workload::new(step, state).reading(reads))
}

/// Forward, loss, backward and AdamW of four blocks of GPT-2, over texts of 128 tokens.
fn gpt_train(dtype: DType, texts: usize, device: &Device) -> Result<Workload> {
    let config = Gpt2Config { vocab_size: 8192, n_embd: 256, n_layer: 4, n_head: 4, ..Gpt2Config::small() };
    let model = Gpt2::new(config.without_dropout())?;
    model.to(dtype)?;
    let state = model.parameters();
    let opt = optim::AdamW::new(model.parameters(), 1e-4)?;
    let ids = Tensor::randint(0, 8192, [texts, 128], device)?;
    let reads = model.buffers();
    let step = move || {
        opt.zero_grad();
        model.loss(&ids, &ids)?.backward()?;
        opt.step()?;
        Ok(None)
    };
    Ok(Workload::new(step, state).reading(reads))
}

/// A function of one matrix of normal numbers.
fn micro(device: &Device, function: impl Fn(&Tensor) -> Result<Tensor> + 'static) -> Result<Workload> {
    let x = Tensor::randn(MATRIX, device)?;
    let reads = vec![x.clone()];
    Ok(Workload::new(move || function(&x).map(Some), Vec::new()).reading(reads))
}

/// The convolutions one by one, each with its own input and filters.
fn convolutions(device: &Device) -> Result<Workload> {
    // Channels in and out, filter size, stride, pixels along a side.
    let mut shapes = vec![(3, 64, 7, 2, 112)];
    shapes.extend([(64, 64, 3, 1, 28); 4]);
    for (from, to, pixels) in [(64, 128, 28), (128, 256, 14), (256, 512, 7)] {
        shapes.extend([(from, to, 3, 2, pixels), (from, to, 1, 2, pixels)]);
        shapes.extend([(to, to, 3, 1, usize::div_ceil(pixels, 2)); 3]);
    }
    let mut layers = Vec::new();
    for (from, to, size, stride, pixels) in shapes {
        let x = Tensor::randn([8, from, pixels, pixels], device)?;
        let weight = Tensor::randn([to, from, size, size], device)?;
        x.requires_grad_(true)?;
        weight.requires_grad_(true)?;
        layers.push((x, weight, stride, size / 2));
    }
    let reads = layers.iter().flat_map(|(x, weight, ..)| [x.clone(), weight.clone()]).collect();
    let step = move || {
        for (x, weight, stride, padding) in &layers {
            x.conv2d(weight, None, *stride, *padding, 1, 1)?.sum()?.backward()?;
        }
        Ok(None)
    };
    Ok(Workload::new(step, Vec::new()).reading(reads))
}

/// A thousand additions whose results nobody keeps.
fn op_overhead(device: &Device) -> Result<Workload> {
    let (a, b) = (Tensor::rand([1], device)?, Tensor::rand([1], device)?);
    a.requires_grad_(true)?;
    let reads = vec![a.clone(), b.clone()];
    let step = move || {
        for _ in 0..1000 {
            a.add(&b)?;
        }
        Ok(None)
    };
    Ok(Workload::new(step, Vec::new()).reading(reads))
}

/// A chain of [`OVERHEAD_OPS`] ops on tensors of one element.
fn overhead(device: &Device) -> Result<Workload> {
    let (x, a, b) = (Tensor::rand([1], device)?, Tensor::rand([1], device)?, Tensor::rand([1], device)?);
    let reads = vec![x.clone(), a.clone(), b.clone()];
    let step = move || {
        let mut y = x.clone();
        for _ in 0..OVERHEAD_OPS / 2 {
            y = y.mul(&a)?.add(&b)?;
        }
        Ok(Some(y))
    };
    Ok(Workload::new(step, Vec::new()).reading(reads))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for case in Case::ALL {
            assert_eq!(case.to_string().parse(), Ok(*case));
        }
        assert_eq!("adam_3x64".parse(), Ok(optimizer(OptimizerKind::Adam, 3, 64)));
        assert_eq!("transformer_train_3".parse(), Ok(Case::TransformerTrain { layers: 3 }));
        assert_eq!("sgd_momentum_2x8".parse(), Ok(optimizer(OptimizerKind::Sgd, 2, 8)));
    }

    #[test]
    fn an_unknown_name_gives_the_list() {
        for name in ["", "resnet19_train", "adam_0x64", "adam_64", "rmsprop_1x1"] {
            let error = name.parse::<Case>().expect_err("not a case");
            assert!(Case::ALL.iter().all(|case| error.contains(&case.to_string())), "{error}");
        }
    }
}
