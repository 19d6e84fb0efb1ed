//! Every layer and loss against PyTorch's numbers; state dicts, files, hooks, schedules.

#[path = "layers/build.rs"]
mod build;
mod common;
#[path = "layers/schedules.rs"]
mod schedules;
#[path = "layers/state.rs"]
mod state;

use std::sync::{Mutex, MutexGuard};

use build::Built;
use kiln_nn::Module;
use kiln_tensor::{DType, Result, Tensor};
use serde_json::Value;

/// The random stream is the process's: tests that draw from it take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn shape(value: &Value) -> Vec<usize> {
    common::numbers(&value["shape"]).into_iter().map(|n| n as usize).collect()
}

/// A tensor of the fixture; floats in this dtype.
fn tensor(value: &Value, dtype: DType) -> Result<Tensor> {
    let dtype = match value["kind"].as_str() {
        Some("i64") => DType::I64,
        Some("bool") => DType::Bool,
        _ => dtype,
    };
    common::tensor(&common::numbers(&value["data"]), &shape(value), dtype)
}

#[track_caller]
fn check(got: &Tensor, want: &Value, tolerance: f64, what: &str) -> Result<()> {
    assert_eq!(got.shape().to_vec(), shape(want), "{what}");
    common::assert_close(got, &common::numbers(&want["data"]), tolerance, what)
}

fn check_all(got: &[Tensor], want: &Value, tolerance: f64, what: &str) -> Result<()> {
    let want = want.as_array().expect("outputs");
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        check(got, want, tolerance, &format!("{what}, output {i}"))?;
    }
    Ok(())
}

fn run(case: &Value, dtype: DType, tolerance: f64) -> Result<()> {
    let name = case["name"].as_str().expect("a name");
    let Built { module, call } = build::build(name, dtype)?;
    assert_eq!((&*module as &dyn Module).to_string(), case["printed"].as_str().expect("text"), "{name}");
    let state = case["state"].as_object().expect("a state");
    let state = state.iter().map(|(name, value)| Ok((name.clone(), tensor(value, dtype)?)));
    module.load_state_dict(&state.collect::<Result<_>>()?, true)?;
    // The gradients that PyTorch computed say which inputs are leaves.
    let inputs = case["inputs"].as_array().expect("inputs");
    let inputs: Vec<Tensor> = inputs.iter().map(|x| tensor(x, dtype)).collect::<Result<_>>()?;
    for (i, x) in inputs.iter().enumerate() {
        x.requires_grad_(!case["input_gradients"][i].is_null())?;
    }
    let outputs = call(&*module, &inputs)?;
    check_all(&outputs, &case["outputs"], tolerance, name)?;
    for (i, output) in outputs.iter().enumerate() {
        let weights = (0..output.numel()).map(|i| (i % 7) as f64 / 4.0 - 0.75).collect();
        let weights = Tensor::from_vec(weights, output.shape())?.to_dtype(dtype)?;
        output.backward_with(Some(&weights), i + 1 < outputs.len())?;
    }
    for (i, x) in inputs.iter().enumerate() {
        if let (want @ Value::Object(_), Some(got)) = (&case["input_gradients"][i], x.grad()) {
            check(&got, want, tolerance, &format!("{name}, gradient of input {i}"))?;
        } else {
            assert!(case["input_gradients"][i].is_null(), "{name}: input {i} has no gradient");
        }
    }
    for (parameter, want) in case["gradients"].as_object().expect("gradients") {
        let own = module.state_dict().get(parameter).cloned().expect("a parameter");
        let got = own.grad().unwrap_or_else(|| panic!("{name}: {parameter} has no gradient"));
        check(&got, want, tolerance, &format!("{name}, gradient of {parameter}"))?;
    }
    for (buffer, want) in case["after"].as_object().expect("buffers") {
        check(&module.state_dict().get(buffer).cloned().expect("a buffer"), want, tolerance, name)?;
    }
    module.eval();
    let want = if case["evaluated"].is_null() { &case["outputs"] } else { &case["evaluated"] };
    check_all(&call(&*module, &inputs)?, want, tolerance, &format!("{name} in evaluation"))
}

#[test]
fn layers_are_pytorchs() -> Result<()> {
    let _turn = turn();
    let fixture: Value = serde_json::from_str(include_str!("fixtures/modules.json")).expect("a fixture");
    let cases = fixture["cases"].as_array().expect("cases");
    assert!(cases.len() >= 95, "{}", cases.len());
    for case in cases {
        for (_, dtype, _) in common::DTYPES {
            run(case, dtype, if dtype == DType::F64 { 1e-7 } else { 2e-4 })?;
        }
    }
    Ok(())
}
