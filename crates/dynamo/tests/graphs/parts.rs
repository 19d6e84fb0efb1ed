//! Gradients of parts of one tensor: whatever windows are taken, eager and compiled code add up the same, in the tape's
//! order, and a compiled backward is as long as the parts are many.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_dynamo::{Backend, Compile};
use kiln_tensor::{DType, Device, GradOptions, Result, Tensor, grad};

const CPU: Device = Device::Cpu;
const SIZES: [usize; 2] = [12, 5];

/// Small whole numbers below a bound, the same for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound
    }
}

/// Elements start, start + step, … before end of a dim, or with their own order turned round.
#[derive(Copy, Clone, Debug)]
struct Part {
    dim: usize,
    start: usize,
    end: usize,
    step: usize,
    flipped: bool,
}

impl Part {
    fn of(&self, x: &Tensor) -> Result<Tensor> {
        let part = x.slice(self.dim as i64, self.start as i64, self.end as i64, self.step)?;
        if self.flipped { part.flip([self.dim as i64]) } else { Ok(part) }
    }

    fn places(&self) -> Vec<usize> {
        let mut places: Vec<usize> = (self.start..self.end).step_by(self.step).collect();
        if self.flipped {
            places.reverse();
        }
        places
    }
}

/// Parts of all kinds: side by side, with gaps, met by others, in steps, empty, along two dims.
fn parts(seed: u64) -> Vec<Part> {
    let mut random = Random(seed * 77 + 5);
    let kind = random.below(4);
    let rows = SIZES[0];
    if kind == 0 {
        // Every row, in some order; perhaps without the last ones.
        let mut order: Vec<usize> = (0..rows).collect();
        (1..rows).rev().for_each(|i| order.swap(i, random.below(i + 1)));
        order.truncate(rows - random.below(3));
        let row = |start| Part { dim: 0, start, end: start + 1, step: 1, flipped: false };
        return order.into_iter().map(row).collect();
    }
    let count = 1 + random.below(7);
    let part = |_| {
        let dim = if kind == 3 { random.below(2) } else { 0 };
        let start = random.below(SIZES[dim]);
        let end = start + random.below(SIZES[dim] - start + 1);
        Part {
            dim,
            start,
            end,
            step: 1 + random.below(if kind == 1 { 1 } else { 3 }),
            flipped: random.below(5) == 0,
        }
    };
    (0..count).map(part).collect()
}

fn weights(part: &Part, n: usize, dtype: DType) -> Tensor {
    let mut shape = SIZES;
    shape[part.dim] = part.places().len();
    let mut random = Random(n as u64 + 91);
    // −0 among them.
    let data: Vec<f32> =
        (0..shape[0] * shape[1]).map(|_| (random.below(64) as f32 - 32.0) / 7.0 * -1.0).collect();
    Tensor::new(&data[..], &CPU).unwrap().reshape(shape).unwrap().to_dtype(dtype).unwrap()
}

/// Σ of parts, each times its weights; `whole` of them is the tensor itself.
fn sum_of_parts(x: &Tensor, parts: &[Part], whole: Option<usize>) -> Result<Tensor> {
    let mut total = Tensor::zeros([], &CPU)?.to_dtype(x.dtype())?;
    for (n, part) in parts.iter().enumerate() {
        if whole == Some(n) {
            total = total.add(&x.mul(2.0)?.sum()?)?;
        }
        total = total.add(&part.of(x)?.mul(&weights(part, n, x.dtype()))?.sum()?)?;
    }
    Ok(total)
}

/// What an element's gradient is: the weights of the windows that hold it, added in the tape's order.
fn expected(parts: &[Part], whole: Option<usize>, dtype: DType) -> Vec<f64> {
    let rounded = |value: f64| -> f64 {
        let number = Tensor::new(&[value], &CPU).unwrap().to_dtype(dtype).unwrap();
        number.to_vec_cast::<f64>().unwrap()[0]
    };
    let mut sums: Vec<Option<f64>> = vec![None; SIZES[0] * SIZES[1]];
    let mut add = |at: usize, value: f64| {
        sums[at] = Some(sums[at].map_or(value, |sum| rounded(sum + value)));
    };
    for (n, part) in parts.iter().enumerate().rev() {
        let weights = weights(part, n, dtype).to_vec_cast::<f64>().unwrap();
        let places = part.places();
        let (rows, columns) = match part.dim {
            0 => (places, (0..SIZES[1]).collect()),
            _ => ((0..SIZES[0]).collect::<Vec<_>>(), places),
        };
        for (i, &row) in rows.iter().enumerate() {
            for (j, &column) in columns.iter().enumerate() {
                add(row * SIZES[1] + column, weights[i * columns.len() + j]);
            }
        }
        if whole == Some(n) {
            (0..SIZES[0] * SIZES[1]).for_each(|at| add(at, 2.0));
        }
    }
    sums.into_iter().map(Option::unwrap_or_default).collect()
}

fn leaf(dtype: DType) -> Tensor {
    let x = Tensor::arange(0, (SIZES[0] * SIZES[1]) as i64, &CPU).unwrap();
    let x = x.to_dtype(dtype).unwrap().mul(0.25).unwrap().sub(3.0).unwrap().reshape(SIZES).unwrap();
    x.requires_grad_(true).unwrap();
    x
}

#[test]
fn windows_add_up_in_the_tapes_order() {
    for seed in 0..60 {
        let parts = parts(seed);
        let dtype = [DType::F32, DType::F64, DType::BF16, DType::F16][seed as usize % 4];
        let whole = (seed % 5 == 0).then_some(seed as usize % parts.len());
        let program = || -> Result<Tensor> {
            let x = leaf(dtype);
            let loss = sum_of_parts(&x, &parts, whole)?;
            loss.backward()?;
            Ok(x.grad().unwrap())
        };
        let eager: Tensor = program().unwrap();
        let want = expected(&parts, whole, dtype);
        assert_eq!(eager.to_vec_cast::<f64>().unwrap(), want, "{dtype} {whole:?} {parts:?}");
        let region = Compile::new().backend(Backend::Inductor).region();
        let x = leaf(dtype);
        let pass = || -> Result<Tensor> {
            let loss = sum_of_parts(&x, &parts, whole)?;
            Ok(grad(&[&loss], &[&x], &[], GradOptions::default())?.remove(0).unwrap())
        };
        for _ in 0..2 {
            let got: Tensor = region.run(pass).unwrap();
            assert_eq!(got.to_bytes().unwrap(), eager.to_bytes().unwrap(), "{dtype} {whole:?} {parts:?}");
        }
        for graph in &region.explain().graphs {
            assert_eq!(graph.interpreted, None, "{dtype} {whole:?} {parts:?}");
        }
    }
}

/// Under `create_graph` sums of parts are on the tape themselves: d/dx Σ v · 3 x² w = Σ v · 6 x w.
#[test]
fn second_gradients_flow_through_sums_of_parts() {
    for seed in 0..24 {
        let parts = parts(seed);
        let again = GradOptions { create_graph: true, ..GradOptions::default() };
        let x = leaf(DType::F64);
        let v = Tensor::arange(1, (SIZES[0] * SIZES[1]) as i64 + 1, &CPU).unwrap();
        let v = v.to_dtype(DType::F64).unwrap().reshape(SIZES).unwrap();
        let program = || -> Result<Tensor> {
            let mut total = Tensor::zeros([], &CPU)?.to_dtype(DType::F64)?;
            for (n, part) in parts.iter().enumerate() {
                let part_of_x = part.of(&x)?;
                let cube = part_of_x.mul(&part_of_x)?.mul(&part_of_x)?;
                total = total.add(&cube.mul(&weights(part, n, DType::F64))?.sum()?)?;
            }
            let first = grad(&[&total], &[&x], &[], again)?.remove(0).unwrap();
            let weighted = first.mul(&v)?.sum()?;
            Ok(grad(&[&weighted], &[&x], &[], GradOptions::default())?.remove(0).unwrap())
        };
        let eager: Tensor = program().unwrap();
        let weights = expected(&parts, None, DType::F64);
        let (got, at) = (eager.to_vec::<f64>().unwrap(), x.detach().unwrap().to_vec::<f64>().unwrap());
        for (i, (got, (w, x))) in got.iter().zip(weights.iter().zip(&at)).enumerate() {
            let want = (i + 1) as f64 * 6.0 * x * w;
            assert!((got - want).abs() <= 1e-9 * want.abs().max(1.0), "{i}: {got} {want} {parts:?}");
        }
        let region = Compile::new().backend(Backend::Inductor).region();
        let compiled: Tensor = region.run(program).unwrap();
        for (a, b) in compiled.to_vec::<f64>().unwrap().iter().zip(&got) {
            assert!((a - b).abs() <= 1e-9 * b.abs().max(1.0), "{a} {b} {parts:?}");
        }
    }
}

/// Hooks and retained gradients see the whole sum, once.
#[test]
fn watchers_see_the_sum_of_parts() -> Result<()> {
    let x = leaf(DType::F32);
    let y = x.mul(1.0)?;
    y.retain_grad()?;
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let sees = seen.clone();
    y.register_hook(move |grad| {
        sees.lock().unwrap().push(grad.to_vec_cast::<f64>()?);
        grad.mul(2.0).map(Some)
    })?;
    let parts =
        [(0, 3), (6, 9), (2, 5)].map(|(start, end)| Part { dim: 0, start, end, step: 1, flipped: false });
    sum_of_parts(&y, &parts, None)?.backward()?;
    let want = expected(&parts, None, DType::F32);
    assert_eq!(*seen.lock().unwrap(), [want.clone()]);
    let twice: Vec<f64> = want.iter().map(|w| 2.0 * w).collect();
    assert_eq!(y.grad().unwrap().to_vec_cast::<f64>()?, twice);
    assert_eq!(x.grad().unwrap().to_vec_cast::<f64>()?, twice);
    Ok(())
}

/// A gradient that was given, or that another tensor has, is not changed by what is added for a part.
#[test]
fn sums_of_parts_change_nobody_elses_gradient() -> Result<()> {
    let (x, y) = (leaf(DType::F32), leaf(DType::F32));
    let seed = Tensor::ones(SIZES, &CPU)?;
    let sum = x.add(&y)?;
    let part = x.narrow(0, 2, 3)?.sum()?;
    let options = GradOptions::default();
    kiln_tensor::backward_all(&[&sum, &part], &[Some(&seed), None], options)?;
    let ones = vec![1.0; SIZES[0] * SIZES[1]];
    assert_eq!(
        (seed.to_vec_cast::<f64>()?, y.grad().unwrap().to_vec_cast::<f64>()?),
        (ones.clone(), ones.clone())
    );
    let mut want = ones;
    want[2 * SIZES[1]..5 * SIZES[1]].fill(2.0);
    assert_eq!(x.grad().unwrap().to_vec_cast::<f64>()?, want);
    Ok(())
}
