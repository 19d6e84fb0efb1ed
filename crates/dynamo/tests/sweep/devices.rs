//! A second device: the simulated one, whose memory the host can't touch and whose work waits until somebody asks.
//! Every row runs there, eagerly and compiled, forwards and backwards, and gives what the CPU gives.

use std::sync::{Arc, Mutex, OnceLock};

use kiln_dynamo::{Compile, register_device};
use kiln_inductor::Interpreter;
use kiln_ir::{Class, Device, Grad, Op, Row};
use kiln_tensor::{DType, GradOptions, Result, Tensor, grad, no_grad};
use kiln_testkit::tolerance;

use crate::cases::{Case, Layout, whole};
use crate::simulated::Simulated;

const DEVICE: Device = Device::Cuda(0);
const LIMIT: usize = 1 << 28;

fn device() -> &'static Simulated {
    static MADE: OnceLock<Simulated> = OnceLock::new();
    MADE.get_or_init(|| {
        let made = Simulated::new(LIMIT);
        register_device(DEVICE, Arc::new(Interpreter), Box::new(made.clone())).unwrap();
        made
    })
}

/// Tests that count what is in the device's memory take turns with the others.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> std::sync::MutexGuard<'static, ()> {
    device();
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The tensor there, lying as it does here.
fn there(tensor: &Tensor, layout: Layout) -> Result<Tensor> {
    let own = tensor.detach()?;
    let reversed: Vec<i64> = (0..own.rank() as i64).rev().collect();
    let moved = match layout {
        Layout::Strided if own.rank() > 1 => {
            own.permute(&reversed[..])?.contiguous()?.to(&DEVICE)?.permute(&reversed[..])?
        }
        Layout::Expanded if own.rank() > 0 && own.shape()[0] > 0 => {
            own.slice(0, 0, 1, 1)?.to(&DEVICE)?.expand(own.shape())?
        }
        _ => own.to(&DEVICE)?,
    };
    moved.requires_grad_(tensor.requires_grad())?;
    Ok(moved)
}

fn case_there(case: &Case) -> Result<Case> {
    let mut sample = case.sample.clone();
    sample.op = sample.op.on(DEVICE);
    let tensors = case.tensors.iter().map(|t| t.as_ref().map(|t| there(t, case.layout)).transpose());
    Ok(Case { row: case.row, sample, layout: case.layout, tensors: tensors.collect::<Result<_>>()? })
}

/// The result, after a backward pass into the operands if it has one.
fn run(case: &Case) -> Result<Tensor> {
    let y = case.run()?;
    if y.requires_grad() {
        ((&y * &y * 0.1) + (&y * 0.37)).ok()?.sum()?.backward()?;
    }
    y.detach()
}

fn difference(got: &Tensor, want: &Tensor) -> Result<Option<String>> {
    if got.device() != DEVICE || got.dtype() != want.dtype() || got.shape() != want.shape() {
        return Ok(Some(format!("{} instead of {}", got.ty(), want.ty())));
    }
    let (got, values) = (got.to_vec_cast::<f64>()?, want.to_vec_cast::<f64>()?);
    let scale = values.iter().filter(|x| x.is_finite()).fold(1.0f64, |a, x| a.max(x.abs()));
    let tolerance = if want.dtype().is_float() { tolerance(want.dtype()) * scale } else { 0.0 };
    let close = |g: f64, w: f64| g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance;
    let wrong = got.iter().zip(&values).position(|(g, w)| !close(*g, *w));
    Ok(wrong.map(|i| format!("at {i}: {} instead of {}", got[i], values[i])))
}

/// What differs between the CPU and the device in one case.
fn compare(case: &Case, got: &Case, result: &Tensor, want: &Tensor) -> Result<Option<String>> {
    if let Some(text) = difference(result, want)? {
        return Ok(Some(format!("result: {text}")));
    }
    for (k, (a, b)) in got.tensors.iter().flatten().zip(case.tensors.iter().flatten()).enumerate() {
        let text = match (a.grad(), b.grad()) {
            (Some(a), Some(b)) => difference(&a, &b)?,
            (None, None) => None,
            (a, _) => Some(format!("there: {}", a.is_some())),
        };
        if let Some(text) = text {
            return Ok(Some(format!("gradient of operand {k}: {text}")));
        }
    }
    Ok(None)
}

fn cases(row: &'static Row, dtype: DType) -> Result<Vec<Case>> {
    let gradients = dtype.is_float() && !matches!(row.grad, Grad::Zero | Grad::NotDifferentiable(_));
    let samples = row.sample_calls();
    let fitting = samples.iter().filter(|sample| sample.dtypes.contains(&dtype));
    // Interpreted: small is enough, and the layouts take turns.
    let layouts = [Layout::Contiguous, Layout::Strided, Layout::Expanded];
    let most = if whole() { usize::MAX } else { 6 };
    let case = |(i, sample)| Case::new(row, sample, dtype, layouts[i % 3], gradients, i as u64);
    fitting.take(most).enumerate().map(case).collect()
}

fn sweep(dtype: DType) {
    let _turn = turn();
    let mut failures = Vec::new();
    for row in Op::ROWS.iter().filter(|row| row.class != Class::List) {
        let mut check = || -> Result<()> {
            for case in cases(row, dtype)? {
                let want = run(&case)?;
                let operands: Vec<String> =
                    case.tensors.iter().flatten().map(|t| t.ty().to_string()).collect();
                let what =
                    format!("{} {:?} of {}", row.name, case.sample.op.attributes(), operands.join(" × "));
                let eager = case_there(&case)?;
                let result = run(&eager).map_err(|error| error.named(&format!("eagerly: {what}")))?;
                let found = compare(&case, &eager, &result, &want)?;
                failures.extend(found.map(|text| format!("eagerly: {what}: {text}")));
                let compiled = case_there(&case)?;
                let region = Compile::new().region();
                let result = region.run(|| run(&compiled))?;
                let found = compare(&case, &compiled, &result, &want)?;
                failures.extend(found.map(|text| format!("compiled: {what}: {text}")));
                let interpreted = region.explain().graphs.into_iter().find_map(|graph| graph.interpreted);
                failures.extend(interpreted.map(|why| format!("{what} is not compiled: {why}")));
            }
            Ok(())
        };
        if let Err(error) = check() {
            failures.push(format!("{}: {error}", row.name));
        }
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_row_runs_on_a_second_device_in_f32() {
    sweep(DType::F32);
}

#[test]
fn every_row_runs_on_a_second_device_in_i64() {
    sweep(DType::I64);
}

#[test]
fn every_row_runs_on_a_second_device_in_halves() {
    sweep(DType::BF16);
}

#[test]
fn work_waits_until_somebody_asks_and_memory_goes_back() -> Result<()> {
    let _turn = turn();
    let before = device().live_bytes();
    {
        let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0])?.to(&DEVICE)?;
        let y = ((&x * 2.0 + 1.0) * &x).ok()?;
        assert!(device().waiting() >= 2, "nothing was waited for");
        assert_eq!(y.to_vec::<f32>()?, [3.0, 10.0, 21.0]);
        assert_eq!(device().waiting(), 0);
        assert_eq!(y.to_string(), Tensor::from_slice(&[3.0f32, 10.0, 21.0])?.to_string());
        assert_eq!((y.device(), y.sum()?.item::<f32>()?), (DEVICE, 34.0));
    }
    assert_eq!(device().live_bytes(), before);
    Ok(())
}

#[test]
fn gradients_pass_from_device_to_device() -> Result<()> {
    let _turn = turn();
    let x = Tensor::from_slice(&[1.0f32, -2.0, 3.0])?.requires_grad_(true)?.clone();
    let y = x.to(&DEVICE)?;
    let z = (&y * &y).ok()?.to(&Device::Cpu)?;
    (&z * &x).ok()?.sum()?.backward()?;
    // d(x³)/dx, and nothing of it was lost on the way.
    assert_eq!(x.grad().unwrap().to_vec::<f32>()?, [3.0, 12.0, 27.0]);
    // And once more: the gradient of the gradient.
    let y = x.to(&DEVICE)?;
    let cube = (&y * &y * &y).ok()?.to(&Device::Cpu)?.sum()?;
    let options = GradOptions { create_graph: true, ..GradOptions::default() };
    let first = grad(&[&cube], &[&x], &[], options)?.remove(0).unwrap();
    let second = grad(&[&first.sum()?], &[&x], &[], GradOptions::default())?.remove(0).unwrap();
    assert_eq!(second.to_vec::<f32>()?, [6.0, -12.0, 18.0]);
    let half = x.detach()?.to((DType::F16, DEVICE))?;
    assert_eq!((half.dtype(), half.device()), (DType::F16, DEVICE));
    assert_eq!(half.to(&Device::Cpu)?.to_vec_cast::<f32>()?, [1.0, -2.0, 3.0]);
    Ok(())
}

#[test]
fn changes_in_place_are_seen_through_views_there() -> Result<()> {
    let _turn = turn();
    let x = Tensor::arange(0, 12, (DType::F32, DEVICE))?.reshape((3, 4))?;
    let column = x.select(1, 1)?;
    column.mul_(10.0)?;
    x.select(0, 0)?.add_(&x.select(0, 2)?)?;
    // Operands that share memory with the target.
    x.copy_(&x.flip(0)?)?;
    x.narrow(1, 0, 3)?.add_(&x.narrow(1, 1, 3)?)?;
    let want = {
        let x = Tensor::arange(0, 12, DType::F32)?.reshape((3, 4))?;
        x.select(1, 1)?.mul_(10.0)?;
        x.select(0, 0)?.add_(&x.select(0, 2)?)?;
        x.copy_(&x.flip(0)?)?;
        x.narrow(1, 0, 3)?.add_(&x.narrow(1, 1, 3)?)?;
        x
    };
    assert_eq!(x.to_vec::<f32>()?, want.to_vec::<f32>()?);
    let order = Tensor::randperm(5, &DEVICE)?.sort(0, false)?.0;
    assert_eq!((order.device(), order.to_vec::<i64>()?), (DEVICE, vec![0, 1, 2, 3, 4]));
    assert_eq!(Tensor::new(&[[1.0f32], [2.0]], &DEVICE)?.sum()?.item::<f32>()?, 3.0);
    x.write_slice(&[0.5f32; 12])?;
    assert_eq!(x.sum()?.item::<f32>()?, 6.0);
    Ok(())
}

/// Ten steps of gradient descent on a small network; compiled or not.
fn trained(device: Device, compiled: bool) -> Result<Vec<f32>> {
    let weights = |n: usize, m: usize| -> Result<Tensor> {
        let data = (0..n * m).map(|i| ((i * 37 % 19) as f32 - 9.0) / 20.0).collect();
        let made = Tensor::from_vec(data, (n, m))?.to(&device)?;
        made.requires_grad_(true)?;
        Ok(made)
    };
    let (first, second) = (weights(8, 16)?, weights(16, 4)?);
    let x = weights(5, 8)?.detach()?;
    let region = Compile::new().region();
    let step = || -> Result<()> {
        let y = x.matmul(&first)?.gelu()?.matmul(&second)?.softmax(1)?;
        (&y * &y).ok()?.mean()?.backward()?;
        let _mode = no_grad();
        for weight in [&first, &second] {
            let grad = weight.grad().unwrap();
            weight.sub_(&grad.mul(0.5)?)?;
            grad.zero_()?;
        }
        Ok(())
    };
    for _ in 0..10 {
        if compiled { region.run(step)? } else { step()? }
    }
    let mut all = first.to_vec::<f32>()?;
    all.extend(second.to_vec::<f32>()?);
    Ok(all)
}

#[test]
fn a_network_trains_there_as_it_does_here() -> Result<()> {
    let _turn = turn();
    let want = trained(Device::Cpu, false)?;
    for compiled in [false, true] {
        let got = trained(DEVICE, compiled)?;
        let wrong = got.iter().zip(&want).position(|(a, b)| (a - b).abs() > 1e-5);
        assert_eq!(wrong, None, "compiled: {compiled}");
    }
    Ok(())
}

#[test]
fn what_can_not_be_is_refused() -> Result<()> {
    let _turn = turn();
    let (here, there) =
        (Tensor::from_slice(&[1.0f32, 2.0])?, Tensor::from_slice(&[1.0f32, 2.0])?.to(&DEVICE)?);
    let error = here.add(&there).unwrap_err().to_string();
    assert!(error.contains("cpu and cuda:0") && error.contains("devices.rs"), "{error}");
    let error = here.to(&Device::Cuda(3)).unwrap_err().to_string();
    assert!(error.contains("cuda:3 is not available"), "{error}");
    let error = Tensor::zeros((1 << 20, 1 << 10), (DType::F32, DEVICE)).unwrap_err().to_string();
    assert!(error.contains("out of memory"), "{error}");
    let index = Tensor::from_slice(&[5i64])?;
    let want = here.index_select(0, &index).unwrap_err().to_string();
    let error = there.index_select(0, &index.to(&DEVICE)?).unwrap_err().to_string();
    assert_eq!(error.split(", at ").next(), want.split(", at ").next());
    let region = Compile::new().region();
    let error = region.run(|| there.index_select(0, &index.to(&DEVICE)?)).unwrap_err().to_string();
    assert_eq!(error.split(", at ").next(), want.split(", at ").next());
    // Nothing is left behind.
    assert_eq!(there.to_vec::<f32>()?, [1.0, 2.0]);
    Ok(())
}
