//! A small network forwards and backwards, against PyTorch's numbers.

mod common;

use common::{DTYPES, assert_close, numbers, tensor};
use kiln_nn::{
    CrossEntropyLoss, Forward, Gelu, Linear, LogSoftmax, Module, NllLoss, Parameter, Reduction, seq,
};
use kiln_tensor::{Approximate, Result, Tensor};
use serde_json::Value;

#[test]
fn scores_losses_and_gradients_are_pytorchs() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("fixtures/mlp.json")).expect("a fixture");
    let sizes: Vec<usize> = numbers(&fixture["sizes"]).into_iter().map(|n| n as usize).collect();
    let [batch, inputs, hidden, classes] = sizes[..] else { panic!("four sizes") };
    let target: Vec<i64> = numbers(&fixture["target"]).into_iter().map(|n| n as i64).collect();
    let target = Tensor::from_slice(&target)?;
    for case in fixture["cases"].as_array().expect("cases") {
        for (key, dtype, tolerance) in DTYPES {
            let what = |part: &str| format!("{} {key}: {part}", case["name"]);
            let parameter = |name: &str, shape: &[usize]| {
                Parameter::new(tensor(&numbers(&fixture["parameters"][name]), shape, dtype)?)
            };
            let approximate = match case["approximate"].as_str() {
                Some("tanh") => Approximate::Tanh,
                _ => Approximate::None,
            };
            let reduction = match case["reduction"].as_str() {
                Some("mean") => Reduction::Mean,
                Some("sum") => Reduction::Sum,
                _ => Reduction::None,
            };
            let ignore_index = case["ignore_index"].as_i64().expect("a class");
            let model = seq![
                Linear::from_parts(
                    parameter("0.weight", &[hidden, inputs])?,
                    Some(parameter("0.bias", &[hidden])?)
                ),
                Gelu::new(approximate),
                Linear::from_parts(parameter("2.weight", &[classes, hidden])?, None),
            ];
            if approximate == Approximate::None {
                assert_eq!(model.to_string(), fixture["printed"]);
            }

            let x = tensor(&numbers(&fixture["x"]), &[batch, inputs], dtype)?;
            let scores = model.forward(&x)?;
            let loss = CrossEntropyLoss::new().reduction(reduction).ignore_index(ignore_index);
            let loss = loss.forward(&scores, &target)?;
            let want = &case[key];
            assert_close(&scores, &numbers(&want["scores"]), tolerance, &what("scores"))?;
            assert_close(&loss, &numbers(&want["loss"]), tolerance, &what("loss"))?;

            loss.sum()?.backward()?;
            for (name, parameter) in model.named_parameters() {
                let grad = parameter.grad().expect("a gradient");
                assert_close(&grad, &numbers(&want["gradients"][&name]), tolerance, &what(&name))?;
            }

            // The same loss in two parts.
            let log_probabilities = LogSoftmax { dim: 1 }.forward(&model.forward(&x)?)?;
            let nll = NllLoss::new().reduction(reduction).ignore_index(ignore_index);
            let nll = nll.forward(&log_probabilities, &target)?;
            assert_close(&nll, &numbers(&want["loss"]), tolerance, &what("nll"))?;
        }
    }
    Ok(())
}
