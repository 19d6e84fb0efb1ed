//! Random convolutional networks, run eagerly and compiled: convolutions, normalisation, activations, residuals,
//! pooling and views in any order, for their results alone and in steps of training.
//!
//! `KILN_NETWORKS=a..b` runs other networks than the first few.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_dynamo::Compile;
use kiln_ir::{DType, Result};
use kiln_tensor::{BatchNorm, Pool, Tensor, no_grad};

/// Numbers that follow from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        // An additive step, and a mix of its bits.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed ^ (mixed >> 27)) >> 11) as usize % end
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}

/// A layer; its operands are numbers of what came before.
#[derive(Clone, Debug)]
enum Layer {
    Convolution {
        x: usize,
        weight: usize,
        bias: Option<usize>,
        stride: usize,
        padding: usize,
        dilation: usize,
        groups: usize,
    },
    Norm {
        x: usize,
        parts: [usize; 4],
        training: bool,
    },
    Activation {
        x: usize,
        which: usize,
    },
    Mix {
        x: usize,
        y: usize,
        which: usize,
    },
    MaxPool {
        x: usize,
        pool: Pool<2>,
    },
    AvgPool {
        x: usize,
        pool: Pool<2>,
    },
    AdaptivePool {
        x: usize,
        output: [usize; 2],
    },
    Narrow {
        x: usize,
        dim: usize,
        from: usize,
        length: usize,
    },
    Turn {
        x: usize,
    },
    Cat {
        x: usize,
        y: usize,
    },
}

/// Layers over an image, with parameters.
struct Network {
    layers: Vec<Layer>,
    x: Tensor,
    parameters: Vec<Tensor>,
    dtype: DType,
}

fn waves(shape: &[usize], seed: usize, dtype: DType) -> Result<Tensor> {
    let count = shape.iter().product::<usize>();
    let data: Vec<f64> =
        (0..count).map(|i| ((i as f64 + 0.5) * (0.37 + seed as f64 * 0.113)).sin()).collect();
    Tensor::from_vec(data, shape.to_vec())?.to_dtype(dtype)
}

impl Network {
    fn random(seed: u64) -> Result<Network> {
        let random = &mut Random(seed);
        let dtype = random.of(&[DType::F32, DType::F64]);
        let channels = random.of(&[1, 3, 8, 24, 32]);
        let shape = [random.of(&[1, 2, 5]), channels, 6 + random.below(30), 6 + random.below(30)];
        let x = waves(&shape, 1, dtype)?;
        let mut network = Network { layers: Vec::new(), x, parameters: Vec::new(), dtype };
        let mut shapes: Vec<[usize; 4]> = vec![shape];
        for _ in 0..4 + random.below(9) {
            // Mostly what came last.
            let x = shapes.len() - 1 - if random.below(4) == 0 { random.below(shapes.len()) } else { 0 };
            if let Some((layer, shape)) = network.layer(random, x, &shapes)? {
                network.layers.push(layer);
                shapes.push(shape);
            }
        }
        Ok(network)
    }

    fn parameter(&mut self, shape: &[usize]) -> Result<usize> {
        let count = shape.iter().skip(1).product::<usize>().max(1) as f64;
        let scale = 1.0 / count.sqrt();
        self.parameters.push(waves(shape, self.parameters.len() + 2, self.dtype)?.mul(scale)?);
        Ok(self.parameters.len() - 1)
    }

    fn layer(
        &mut self,
        random: &mut Random,
        x: usize,
        shapes: &[[usize; 4]],
    ) -> Result<Option<(Layer, [usize; 4])>> {
        let shape @ [n, c, h, w] = shapes[x];
        let others = |wanted: &dyn Fn(&[usize; 4]) -> bool| -> Vec<usize> {
            (0..shapes.len()).filter(|&i| wanted(&shapes[i])).collect()
        };
        Ok(match random.below(13) {
            0..=3 => {
                let groups = random.of(&[1, 1, 1, 2, c]);
                let (size, dilation) = (random.of(&[1, 2, 3, 3, 3, 5]), random.of(&[1, 1, 1, 2]));
                let (stride, padding) = (random.of(&[1, 1, 2, 3]), random.below(3));
                let filters = groups * random.of(&[1, 3, 8, 32]);
                let out = |side: usize| {
                    (side + 2 * padding).checked_sub(dilation * (size - 1) + 1).map(|rest| rest / stride + 1)
                };
                let (Some(height), Some(width)) = (out(h), out(w)) else { return Ok(None) };
                if c % groups != 0 || filters > 64 {
                    return Ok(None);
                }
                let weight = self.parameter(&[filters, c / groups, size, size])?;
                let bias = if random.below(2) == 0 { Some(self.parameter(&[filters])?) } else { None };
                let layer = Layer::Convolution { x, weight, bias, stride, padding, dilation, groups };
                Some((layer, [n, filters, height, width]))
            }
            4 => {
                let parts = [0; 4].map(|_| self.parameter(&[c]));
                let [mean, variance, weight, bias] = parts;
                let training = random.below(2) == 0 && n * h * w > 1;
                Some((Layer::Norm { x, parts: [mean?, variance?, weight?, bias?], training }, shape))
            }
            5 | 6 => Some((Layer::Activation { x, which: random.below(4) }, shape)),
            7 => {
                let y = random.of(&others(&|other| *other == shape));
                Some((Layer::Mix { x, y, which: random.below(3) }, shape))
            }
            kind @ (8 | 9) => {
                let most = random.of(&[3, 3, 3, 6]);
                let kernel = [1 + random.below(most), 1 + random.below(most)];
                let dilation = if kind == 8 { random.of(&[1, 1, 2]) } else { 1 };
                let pool = Pool {
                    kernel,
                    stride: [1 + random.below(3), 1 + random.below(3)],
                    padding: kernel.map(|size| random.below(size / 2 + 1)),
                    dilation: [dilation; 2],
                    ceil_mode: random.below(3) == 0,
                    count_include_pad: random.below(2) == 0,
                };
                let sample = waves(&[n, c, h, w], 0, DType::F32)?;
                let pooled = if kind == 8 { sample.max_pool2d(pool) } else { sample.avg_pool2d(pool) };
                // Windows that don't fit are refused.
                let Ok(pooled) = pooled else { return Ok(None) };
                let shape = <[usize; 4]>::try_from(pooled.shape().to_vec()).unwrap();
                if shape.contains(&0) {
                    return Ok(None);
                }
                Some((if kind == 8 { Layer::MaxPool { x, pool } } else { Layer::AvgPool { x, pool } }, shape))
            }
            10 => {
                let dim = 1 + random.below(3);
                let from = random.below(shape[dim]);
                let length = 1 + random.below(shape[dim] - from);
                let mut shape = shape;
                shape[dim] = length;
                Some((Layer::Narrow { x, dim, from, length }, shape))
            }
            11 => {
                // Sizes that divide the plane's, mostly.
                let part = |random: &mut Random, size: usize| match random.below(4) {
                    0 => 1 + random.below(size),
                    _ => random.of(&(1..=size).filter(|part| size.is_multiple_of(*part)).collect::<Vec<_>>()),
                };
                let output = [part(random, h), part(random, w)];
                Some((Layer::AdaptivePool { x, output }, [n, c, output[0], output[1]]))
            }
            _ if random.below(2) == 0 => Some((Layer::Turn { x }, [n, c, w, h])),
            _ => {
                let y = random.of(&others(&|other| [other[0], other[2], other[3]] == [n, h, w]));
                let shape = [n, c + shapes[y][1], h, w];
                (shape[1] <= 64).then_some((Layer::Cat { x, y }, shape))
            }
        })
    }

    /// The last result and the mean of all.
    fn run(&self) -> Result<Vec<Tensor>> {
        let mut values = vec![self.x.clone()];
        let p = |i: &usize| &self.parameters[*i];
        for layer in &self.layers {
            let value = match layer {
                Layer::Convolution { x, weight, bias, stride, padding, dilation, groups } => values[*x]
                    .conv2d(
                        p(weight),
                        bias.as_ref().map(p),
                        [*stride; 2],
                        [*padding; 2],
                        [*dilation; 2],
                        *groups,
                    )?,
                Layer::Norm { x, parts: [mean, variance, weight, bias], training } => {
                    let variance = p(variance).square()?.add(0.5)?.detach()?;
                    let mean = p(mean).mul(1.0)?.detach()?;
                    values[*x].batch_norm(BatchNorm {
                        running: Some((&mean, &variance)),
                        weight: Some(p(weight)),
                        bias: Some(p(bias)),
                        training: *training,
                        ..BatchNorm::default()
                    })?
                }
                Layer::Activation { x, which } => match which {
                    0 | 1 => values[*x].relu()?,
                    2 => values[*x].tanh()?,
                    _ => values[*x].sigmoid()?,
                },
                Layer::Mix { x, y, which } => match which {
                    0 => values[*x].add(&values[*y])?,
                    1 => values[*x].sub(&values[*y].mul(0.5)?)?,
                    _ => values[*x].mul(&values[*y].tanh()?)?,
                },
                Layer::MaxPool { x, pool } => values[*x].max_pool2d(*pool)?,
                Layer::AvgPool { x, pool } => values[*x].avg_pool2d(*pool)?,
                Layer::AdaptivePool { x, output } => values[*x].adaptive_avg_pool2d(*output)?,
                Layer::Narrow { x, dim, from, length } => values[*x].narrow(*dim as i64, *from, *length)?,
                Layer::Turn { x } => values[*x].transpose(2, 3)?,
                Layer::Cat { x, y } => Tensor::cat([&values[*x], &values[*y]], 1)?,
            };
            values.push(value);
        }
        let mut sum = values[0].mean()?;
        for value in &values[1..] {
            sum = sum.add(&value.square()?.mean()?)?;
        }
        Ok(vec![values.pop().unwrap(), sum])
    }

    /// A step: the results, and the gradients of all parameters.
    fn step(&self) -> Result<Vec<Tensor>> {
        for parameter in &self.parameters {
            parameter.set_grad(None);
        }
        let results = self.run()?;
        results[1].backward()?;
        let mut all: Vec<Tensor> = results.iter().map(Tensor::detach).collect::<Result<_>>()?;
        all.extend(self.parameters.iter().filter_map(Tensor::grad));
        Ok(all)
    }
}

fn close(got: &[Tensor], want: &[Tensor], dtype: DType) -> std::result::Result<(), String> {
    let allowed = if dtype == DType::F64 { 1e-9 } else { 2e-3 };
    if got.len() != want.len() {
        return Err(format!("{} results, not {}", got.len(), want.len()));
    }
    for (number, (got, want)) in got.iter().zip(want).enumerate() {
        let numbers = |t: &Tensor| t.to_dtype(DType::F64).and_then(|t| t.to_vec_cast::<f64>()).unwrap();
        let (a, b) = (numbers(got), numbers(want));
        if got.shape() != want.shape() {
            return Err(format!("result {number}: {:?}, not {:?}", got.shape(), want.shape()));
        }
        let size = b.iter().fold(1e-3f64, |most, x| most.max(x.abs()));
        let far =
            a.iter().zip(&b).position(|(a, b)| (a - b).abs() > allowed * size || a.is_nan() != b.is_nan());
        if let Some(at) = far {
            return Err(format!("result {number} at {at}: {} not {}, of {size}", a[at], b[at]));
        }
    }
    Ok(())
}

fn check(seed: u64) -> Result<()> {
    let network = Network::random(seed)?;
    let mode = ["mode=default", "mode=reduce-overhead"][seed as usize % 2];
    let (plain, training) = (mode.parse::<Compile>()?.region(), mode.parse::<Compile>()?.region());
    let want = network.run()?;
    for call in 0..3 {
        let got = plain.run(|| {
            let _none = no_grad();
            network.run()
        })?;
        if let Err(why) = close(&got, &want, network.dtype) {
            panic!("network {seed}, call {call}: {why}\n{:#?}\n{}", network.layers, plain.explain());
        }
    }
    if network.parameters.is_empty() {
        return Ok(());
    }
    for parameter in &network.parameters {
        parameter.requires_grad_(true)?;
    }
    let want = network.step()?;
    for call in 0..3 {
        let got = training.run(|| network.step())?;
        if let Err(why) = close(&got, &want, network.dtype) {
            panic!("network {seed}, step {call}: {why}\n{:#?}\n{}", network.layers, training.explain());
        }
    }
    Ok(())
}

#[test]
fn networks() -> Result<()> {
    let asked = std::env::var("KILN_NETWORKS").ok();
    let asked = asked.as_deref().and_then(|text| text.split_once(".."));
    let range = asked.map_or(0..24, |(from, to)| from.parse().unwrap()..to.parse().unwrap());
    range.into_iter().try_for_each(check)?;
    // They would run op by op, and be right all the same.
    assert_eq!(kiln_dynamo::counters().refused, 0, "kernels that the C compiler fails on");
    Ok(())
}
