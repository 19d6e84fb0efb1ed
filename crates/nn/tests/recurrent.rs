//! Recurrent layers beside loops of ordinary ops, at sizes that fill register tiles and vectors and that don't, on one
//! thread and on several, in all dtypes; their gradients of gradients; what can't be.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_nn::{
    Forward, GRU, LSTM, Module, Nonlinearity, PackedSequence, RNN, pack_padded_sequence, pad_packed_sequence,
};
use kiln_tensor::{DType, Device, GradOptions, Result, Tensor, grad, manual_seed, no_grad};

fn randn(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::randn(shape.to_vec(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn part(x: &Tensor, i: usize, n: usize) -> Tensor {
    x.narrow(-1, i * n, n).unwrap()
}

/// What kind of layer.
#[derive(Copy, Clone, Debug, PartialEq)]
enum Kind {
    Lstm,
    Projected,
    Gru,
    Rnn(Nonlinearity),
}

const KINDS: [Kind; 5] =
    [Kind::Lstm, Kind::Projected, Kind::Gru, Kind::Rnn(Nonlinearity::Tanh), Kind::Rnn(Nonlinearity::Relu)];

/// One layer, both directions.
struct Layer {
    kind: Kind,
    module: Box<dyn Module>,
    run: Box<dyn Fn(&Tensor, &[usize]) -> Result<Vec<Tensor>>>,
    hidden: usize,
    outputs: usize,
}

fn layer(kind: Kind, input: usize, hidden: usize, dtype: DType) -> Result<Layer> {
    let outputs = if kind == Kind::Projected { hidden.div_ceil(2) } else { hidden };
    macro_rules! layer {
        ($module:expr, |$last:ident| $states:expr) => {{
            let module = std::sync::Arc::new($module);
            let own = module.clone();
            let run = move |x: &Tensor, lengths: &[usize]| {
                let packed = pack_padded_sequence(x, lengths, false, false)?;
                let (y, $last) = Forward::<PackedSequence>::forward(&*own, &packed)?;
                let mut all = vec![pad_packed_sequence(&y, false, 0.0, None)?.0];
                all.extend($states);
                Ok(all)
            };
            Layer { kind, module: Box::new(module), run: Box::new(run), hidden, outputs }
        }};
    }
    Ok(match kind {
        Kind::Lstm | Kind::Projected => {
            let size = if kind == Kind::Projected { outputs } else { 0 };
            let options = LSTM::options().bidirectional(true).dtype(dtype).proj_size(size);
            layer!(options.build(input, hidden)?, |last| [last.0, last.1])
        }
        Kind::Gru => {
            layer!(GRU::options().bidirectional(true).dtype(dtype).build(input, hidden)?, |last| [last])
        }
        Kind::Rnn(nonlinearity) => {
            let options = RNN::options().bidirectional(true).dtype(dtype).nonlinearity(nonlinearity);
            layer!(options.build(input, hidden)?, |last| [last])
        }
    })
}

impl Layer {
    /// Step by step and sequence by sequence.
    fn loops(&self, x: &Tensor, lengths: &[usize], of: &dyn Fn(&str, &str) -> Tensor) -> Result<Vec<Tensor>> {
        let steps = *lengths.iter().max().unwrap();
        let mut outputs: Vec<Vec<Tensor>> = Vec::new();
        let (mut hiddens, mut cells) = (Vec::new(), Vec::new());
        for side in ["", "_reverse"] {
            let (w, u) = (of("weight_ih", side), of("weight_hh", side));
            let (b, d) = (of("bias_ih", side), of("bias_hh", side));
            let (n, ty) = (self.hidden, x.ty());
            let zeros = |columns: usize| Tensor::full_of([1, columns], 0.0, ty.dtype, &ty.device).unwrap();
            let mut rows = Vec::new();
            let (mut last_h, mut last_c) = (Vec::new(), Vec::new());
            for (row, &length) in lengths.iter().enumerate() {
                let (mut h, mut c) = (zeros(self.outputs), zeros(n));
                let mut all = vec![zeros(self.outputs); steps];
                let order: Vec<usize> =
                    if side.is_empty() { (0..length).collect() } else { (0..length).rev().collect() };
                for t in order {
                    let x = x.select(0, t as i64)?.narrow(0, row, 1)?.linear(&w, Some(&b))?;
                    let p = h.linear(&u, Some(&d))?;
                    h = match self.kind {
                        Kind::Lstm | Kind::Projected => {
                            let a = x.add(&p)?;
                            let kept = part(&a, 1, n).sigmoid()?.mul(&c)?;
                            c = kept.add(&part(&a, 0, n).sigmoid()?.mul(&part(&a, 2, n).tanh()?)?)?;
                            let m = part(&a, 3, n).sigmoid()?.mul(&c.tanh()?)?;
                            if self.kind == Kind::Projected {
                                m.linear(&of("weight_hr", side), None)?
                            } else {
                                m
                            }
                        }
                        Kind::Gru => {
                            let gate = |i| part(&x, i, n).add(&part(&p, i, n)).unwrap().sigmoid().unwrap();
                            let (r, z) = (gate(0), gate(1));
                            let new = part(&x, 2, n).add(&r.mul(&part(&p, 2, n))?)?.tanh()?;
                            new.add(&z.mul(&h.sub(&new)?)?)?
                        }
                        Kind::Rnn(Nonlinearity::Tanh) => x.add(&p)?.tanh()?,
                        Kind::Rnn(Nonlinearity::Relu) => x.add(&p)?.relu()?,
                    };
                    all[t] = h.clone();
                }
                rows.push(Tensor::stack(&all, 0)?);
                last_h.push(h);
                last_c.push(c);
            }
            outputs.push(rows);
            hiddens.push(Tensor::cat(&last_h, 0)?);
            cells.push(Tensor::cat(&last_c, 0)?);
        }
        let sides: Vec<Tensor> = outputs.iter().map(|rows| Tensor::cat(rows, 1)).collect::<Result<_>>()?;
        let mut all = vec![Tensor::cat(&sides, -1)?, Tensor::stack(&hiddens, 0)?];
        if matches!(self.kind, Kind::Lstm | Kind::Projected) {
            all.push(Tensor::stack(&cells, 0)?);
        }
        Ok(all)
    }
}

/// Σ of the results, each element with a weight of its own.
fn total(results: &[Tensor]) -> Result<Tensor> {
    let mut total = Tensor::full_of([], 0.0, DType::F64, &Device::Cpu)?;
    for result in results {
        let result = result.to_dtype(DType::F64)?;
        let count = result.numel() as i64;
        let weights = Tensor::arange(0, count, &Device::Cpu)?.to_dtype(DType::F64)?.mul(0.7)?.sin()?;
        let shape: Vec<i64> = result.shape().iter().map(|size| *size as i64).collect();
        total = total.add(&result.mul(&weights.reshape(shape)?)?.sum()?)?;
    }
    Ok(total)
}

fn close(got: &Tensor, want: &Tensor, tolerance: f64, what: &str) -> Result<()> {
    assert_eq!(got.shape(), want.shape(), "{what}");
    let (got, want) = (got.to_vec_cast::<f64>()?, want.to_vec_cast::<f64>()?);
    let scale = want.iter().fold(1.0f64, |a, x| a.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        assert!((g - w).abs() <= tolerance * scale, "{what} at {i}: {g} instead of {w}");
    }
    Ok(())
}

const TOLERANCES: [(DType, f64); 4] =
    [(DType::F64, 1e-12), (DType::F32, 3e-5), (DType::F16, 2e-2), (DType::BF16, 1e-1)];

fn compare(kind: Kind, [steps, rows, input, hidden]: [usize; 4], dtypes: &[(DType, f64)]) -> Result<()> {
    for &(dtype, tolerance) in dtypes {
        manual_seed((steps * 31 + rows) as u64);
        let layer = layer(kind, input, hidden, dtype)?;
        // Every second element of every second row of something, and transposed: no dense input.
        let x = randn(&[rows, 2 * steps, 2 * input], dtype);
        let x = x
            .slice(1, 0, 2 * steps as i64, 2)?
            .slice(2, 1, 2 * input as i64, 2)?
            .transpose(0, 1)?
            .detach()?;
        x.requires_grad_(true)?;
        let lengths: Vec<usize> =
            (0..rows).map(|row| if row == 0 { steps } else { 1 + (row * 7) % steps }).collect();
        for lengths in [vec![steps; rows], lengths] {
            let what = format!("{kind:?} {steps} {rows} {input} {hidden} {dtype} {lengths:?}");
            let wide = |t: &Tensor| t.detach().unwrap().to_dtype(DType::F64).unwrap();
            let names: Vec<String> =
                layer.module.named_parameters().into_iter().map(|(name, _)| name).collect();
            let parameters: Vec<Tensor> = layer.module.parameters();
            let exact: Vec<Tensor> = parameters.iter().map(wide).collect();
            exact.iter().for_each(|t| drop(t.requires_grad_(true)));
            let exact_x = wide(&x);
            exact_x.requires_grad_(true)?;
            let of = |name: &str, side: &str| {
                let at = names.iter().position(|known| *known == format!("{name}_l0{side}")).unwrap();
                exact[at].clone()
            };
            let want = layer.loops(&exact_x, &lengths, &of)?;
            let got = (layer.run)(&x, &lengths)?;
            for (g, w) in got.iter().zip(&want) {
                close(g, w, tolerance, &what)?;
            }
            // Without gradients there is no trace of gates.
            {
                let _off = no_grad();
                for (g, w) in (layer.run)(&x, &lengths)?.iter().zip(&want) {
                    close(g, w, tolerance, &what)?;
                }
            }
            // What was rounded to a half may be on the other side of a relu's kink.
            if kind == Kind::Rnn(Nonlinearity::Relu) && matches!(dtype, DType::F16 | DType::BF16) {
                continue;
            }
            for parameter in parameters.iter().chain([&x]) {
                parameter.set_grad(None);
            }
            total(&got)?.backward()?;
            total(&want)?.backward()?;
            for (got, want) in parameters.iter().chain([&x]).zip(exact.iter().chain([&exact_x])) {
                close(&got.grad().unwrap(), &want.grad().unwrap(), tolerance, &format!("gradient, {what}"))?;
            }
        }
    }
    Ok(())
}

#[test]
fn layers_are_loops_of_ordinary_ops() -> Result<()> {
    for kind in KINDS {
        for sizes in [[3, 2, 3, 5], [1, 1, 1, 2], [4, 9, 2, 33], [2, 17, 3, 16]] {
            compare(kind, sizes, &TOLERANCES)?;
        }
    }
    Ok(())
}

/// Large enough for several threads: they share blocks of units, or rows.
#[test]
fn layers_of_several_threads_are_loops_of_ordinary_ops() -> Result<()> {
    for kind in KINDS {
        for sizes in [[2, 5, 3, 130], [2, 70, 2, 40]] {
            compare(kind, sizes, &TOLERANCES[1..2])?;
        }
    }
    Ok(())
}

/// How many threads there are changes no bit.
#[test]
fn no_bit_depends_on_the_threads() -> Result<()> {
    for kind in KINDS {
        for [steps, rows, hidden] in [[3, 16, 96], [3, 70, 40], [2, 3, 257]] {
            let layer = layer(kind, 4, hidden, DType::F32)?;
            let x = randn(&[steps, rows, 4], DType::F32);
            let bits = |threads: usize| -> Result<Vec<u32>> {
                let before = kiln_runtime::threads::count();
                kiln_runtime::threads::set_count(threads);
                layer.module.parameters().iter().for_each(|p| p.set_grad(None));
                let results = (layer.run)(&x, &vec![steps; rows])?;
                total(&results)?.backward()?;
                kiln_runtime::threads::set_count(before);
                let grads: Vec<Tensor> = layer.module.parameters().iter().filter_map(Tensor::grad).collect();
                // Products over all steps are cut by threads; what the recurrent rows give is in the last of these.
                let bias = grads.iter().filter(|grad| grad.rank() == 1).cloned();
                let all = results.into_iter().chain(bias).map(|t| t.to_vec::<f32>());
                Ok(all.collect::<Result<Vec<_>>>()?.concat().iter().map(|x| x.to_bits()).collect())
            };
            assert_eq!(bits(1)?, bits(2)?, "{kind:?} {steps} {rows} {hidden}");
        }
    }
    Ok(())
}

#[test]
fn gradients_have_gradients() -> Result<()> {
    for kind in KINDS {
        let layer = layer(kind, 2, 3, DType::F64)?;
        let lengths = [3, 2];
        let penalty =
            |run: &dyn Fn(&Tensor) -> Result<Vec<Tensor>>, parameters: &[Tensor]| -> Result<Tensor> {
                manual_seed(5);
                let x = randn(&[3, 2, 2], DType::F64);
                x.requires_grad_(true)?;
                let results = run(&x)?;
                let options = GradOptions { create_graph: true, ..GradOptions::default() };
                let slopes = grad(&[&total(&results)?], &[&x], &[], options)?;
                let slope = slopes[0].clone().unwrap();
                slope.mul(&slope)?.sum()?.backward()?;
                // None is a gradient of zeros.
                let of = |p: &Tensor| p.grad().unwrap_or_else(|| p.zeros_like().unwrap());
                let grads: Vec<Tensor> = parameters.iter().map(of).collect();
                parameters.iter().for_each(|p| p.set_grad(None));
                let flat: Vec<Tensor> = grads.iter().map(Tensor::flatten).collect::<Result<_>>()?;
                Tensor::cat(&flat, 0)
            };
        let parameters = layer.module.parameters();
        let names: Vec<String> = layer.module.named_parameters().into_iter().map(|(name, _)| name).collect();
        let of = |name: &str, side: &str| {
            let at = names.iter().position(|known| *known == format!("{name}_l0{side}")).unwrap();
            parameters[at].clone()
        };
        let got = penalty(&|x| (layer.run)(x, &lengths), &parameters)?;
        let want = penalty(&|x| layer.loops(x, &lengths, &of), &parameters)?;
        close(&got, &want, 1e-10, &format!("{kind:?}"))?;
    }
    Ok(())
}

#[test]
fn packed_sequences_are_pytorchs() -> Result<()> {
    let x = Tensor::arange(0, 24, &Device::Cpu)?.to_dtype(DType::F32)?.reshape([4, 3, 2])?;
    let packed = pack_padded_sequence(&x, &[2, 3, 1], false, false)?;
    assert_eq!((packed.lengths(), packed.batch_sizes()), (&[2, 3, 1][..], vec![3, 2, 1]));
    // torch.nn.utils.rnn.pack_padded_sequence(x, [2, 3, 1], enforce_sorted=False).data
    let data = [[2., 3.], [0., 1.], [4., 5.], [8., 9.], [6., 7.], [14., 15.]];
    assert_eq!(packed.data()?.to_vec::<f32>()?, data.concat());
    let doubled = packed.map(|x| x.mul(2.0))?;
    let (y, lengths) = pad_packed_sequence(&doubled, true, -1.0, Some(4))?;
    assert_eq!((y.shape().to_vec(), lengths), (vec![3, 4, 2], vec![2, 3, 1]));
    assert_eq!(y.select(0, 2)?.contiguous()?.to_vec::<f32>()?, [8., 10., -1., -1., -1., -1., -1., -1.]);
    Ok(())
}

#[test]
fn what_can_not_be_says_why() -> Result<()> {
    let x = randn(&[4, 3, 2], DType::F32);
    let fails = |result: Result<PackedSequence>, text: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text) && error.contains("recurrent.rs"), "{error}");
    };
    fails(pack_padded_sequence(&x, &[2, 3, 1], false, true), "sorted, longest first");
    fails(pack_padded_sequence(&x, &[2, 3], false, false), "the number of lengths and the batch size");
    fails(pack_padded_sequence(&x, &[2, 5, 1], false, false), "from 1 to the number of steps, got 5");
    fails(pack_padded_sequence(&x, &[2, 0, 1], false, false), "from 1 to the number of steps, got 0");
    let error = LSTM::options().proj_size(4).build(2, 4).err().unwrap().to_string();
    assert!(error.contains("proj_size must be smaller than hidden_size, got 4"), "{error}");
    let lstm = LSTM::options().proj_size(2).build(2, 4)?;
    let states = (randn(&[1, 3, 2], DType::F32), randn(&[1, 3, 2], DType::F32));
    let error = lstm.forward(&(x.clone(), states)).unwrap_err().to_string();
    assert!(error.contains("the initial cell state must have shape [1, 3, 4], got [1, 3, 2]"), "{error}");
    let error = lstm.forward(&x.to_dtype(DType::F64)?).unwrap_err().to_string();
    assert!(error.contains("f64") && error.contains("recurrent.rs"), "{error}");
    Ok(())
}

#[test]
fn no_sequences_have_no_outputs() -> Result<()> {
    let gru = GRU::new(2, 4)?;
    let x = randn(&[3, 0, 2], DType::F32);
    let (y, last) = Forward::<Tensor>::forward(&gru, &x)?;
    assert_eq!((y.shape().to_vec(), last.shape().to_vec()), (vec![3, 0, 4], vec![1, 0, 4]));
    y.sum()?.backward()?;
    assert_eq!(gru.parameters()[1].grad().unwrap().to_vec::<f32>()?, vec![0.0; 48]);
    Ok(())
}
