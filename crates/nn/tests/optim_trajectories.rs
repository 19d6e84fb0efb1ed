//! Twenty steps of every optimizer with every option, against PyTorch's numbers.

mod common;

use common::{DTYPES, assert_close, numbers, tensor};
use kiln_nn::optim::{Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, Optimizer, RAdam, RMSprop, SGD};
use kiln_tensor::{DType, Result, Tensor};
use serde_json::Value;

/// Sets the options of a fixture by their names.
macro_rules! with_options {
    ($options:expr, $given:expr, [$($number:ident),*], [$($flag:ident),*] $(, $betas:ident)?) => {{
        let mut options = $options;
        for (name, value) in $given.as_object().expect("options") {
            options = match name.as_str() {
                $(stringify!($number) => options.$number(value.as_f64().expect("a number")),)*
                $(stringify!($flag) => options.$flag(value.as_bool().expect("a flag")),)*
                $(stringify!($betas) => {
                    options.$betas(value[0].as_f64().expect("beta1"), value[1].as_f64().expect("beta2"))
                })?
                other => panic!("unknown option {other}"),
            };
        }
        options
    }};
}

fn build(case: &Value, params: Vec<Tensor>) -> Result<Box<dyn Optimizer>> {
    let given = &case["options"];
    macro_rules! build {
        ($Optimizer:ident, $($options:tt)*) => {
            Box::new(with_options!($Optimizer::options(), given, $($options)*).build(params)?)
        };
    }
    Ok(match case["optimizer"].as_str().expect("a name") {
        "SGD" => build!(SGD, [lr, momentum, dampening, weight_decay], [nesterov, maximize]),
        "Adam" => build!(Adam, [lr, eps, weight_decay], [amsgrad, maximize], betas),
        "AdamW" => build!(AdamW, [lr, eps, weight_decay], [amsgrad, maximize], betas),
        "RMSprop" => build!(RMSprop, [lr, alpha, eps, momentum, weight_decay], [centered, maximize]),
        "Adagrad" => {
            build!(Adagrad, [lr, lr_decay, weight_decay, initial_accumulator_value, eps], [maximize])
        }
        "Adadelta" => build!(Adadelta, [lr, rho, eps, weight_decay], [maximize]),
        "Adamax" => build!(Adamax, [lr, eps, weight_decay], [maximize], betas),
        "NAdam" => {
            build!(NAdam, [lr, eps, weight_decay, momentum_decay], [decoupled_weight_decay, maximize], betas)
        }
        "RAdam" => build!(RAdam, [lr, eps, weight_decay], [decoupled_weight_decay, maximize], betas),
        other => panic!("unknown optimizer {other}"),
    })
}

fn run(fixture: &Value, case: &Value, key: &str, dtype: DType, tolerance: f64) -> Result<()> {
    let name = case["name"].as_str().expect("a name");
    let shapes: Vec<Vec<usize>> = fixture["shapes"]
        .as_array()
        .expect("shapes")
        .iter()
        .map(|shape| numbers(shape).into_iter().map(|n| n as usize).collect())
        .collect();
    let params = shapes
        .iter()
        .enumerate()
        .map(|(i, shape)| {
            let param = tensor(&numbers(&fixture["start"][i]), shape, dtype)?;
            param.requires_grad_(true)?;
            Ok(param)
        })
        .collect::<Result<Vec<_>>>()?;
    let optimizer = build(case, params.clone())?;
    let (recorded, without) = (numbers(&fixture["recorded"]), numbers(&fixture["no_grad"]));
    let mut checked = 0;
    for step in 1..=20 {
        for (i, param) in params.iter().enumerate() {
            let missing = case["no_grad"] == true && i == 1 && without.contains(&f64::from(step));
            let grad = &fixture["gradients"][step as usize - 1][i];
            param.set_grad(if missing { None } else { Some(tensor(&numbers(grad), &shapes[i], dtype)?) });
        }
        optimizer.step()?;
        for (i, param) in params.iter().enumerate() {
            // A step must not touch the gradients.
            if let Some(grad) = param.grad() {
                assert_eq!(
                    grad.to_vec_cast::<f64>()?,
                    numbers(&fixture["gradients"][step as usize - 1][i]),
                    "{name}"
                );
            }
        }
        if case["schedule"] == true {
            optimizer.set_lr(optimizer.lr() * 0.9);
        }
        if recorded.contains(&f64::from(step)) {
            for (i, param) in params.iter().enumerate() {
                let want = numbers(&case[key][checked][i]);
                assert_close(param, &want, tolerance, &format!("{name} {key}, step {step}, parameter {i}"))?;
            }
            checked += 1;
        }
    }
    assert_eq!(checked, recorded.len());
    Ok(())
}

#[test]
fn trajectories_are_pytorchs() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("fixtures/optim.json")).expect("a fixture");
    let cases = fixture["cases"].as_array().expect("cases");
    assert!(cases.len() >= 43);
    for case in cases {
        for (key, dtype, tolerance) in DTYPES {
            run(&fixture, case, key, dtype, tolerance)?;
        }
    }
    Ok(())
}
