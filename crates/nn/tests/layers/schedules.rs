//! Schedules of learning rates against PyTorch's.

use kiln_nn::optim::lr_scheduler::*;
use kiln_nn::optim::{Adagrad, Adam, Optimizer, ParamGroup};
use kiln_tensor::{Device, Result, Tensor};
use serde_json::Value;

use crate::common::numbers;

fn adam() -> Result<Adam> {
    let group = |lr| -> Result<_> {
        let parameter = Tensor::zeros([1], &Device::Cpu)?;
        parameter.requires_grad_(true)?;
        Ok(ParamGroup::new(vec![parameter], Adam::options().lr(lr)))
    };
    Adam::from_groups([group(0.1)?, group(0.5)?])
}

fn schedule(name: &str) -> Box<dyn Schedule> {
    match name {
        "step" => Box::new(StepLR::new(4).gamma(0.5)),
        "multi_step" => Box::new(MultiStepLR::new(&[3, 7, 7, 20]).gamma(0.3)),
        "exponential" => Box::new(ExponentialLR::new(0.9)),
        "constant" => Box::new(ConstantLR::new().factor(0.25).total_iters(6)),
        "linear" => Box::new(LinearLR::new().start_factor(0.2).end_factor(0.9).total_iters(7)),
        "polynomial" => Box::new(PolynomialLR::new(12).power(1.7)),
        "cosine" => Box::new(CosineAnnealingLR::new(8).eta_min(0.01)),
        "warm_restarts" => Box::new(CosineAnnealingWarmRestarts::new(4).t_mult(2).eta_min(0.01)),
        "lambda" => Box::new(LambdaLR::new(|epoch| 1.0 / (1.0 + epoch as f64))),
        "multiplicative" => Box::new(MultiplicativeLR::new(|epoch| if epoch % 2 == 1 { 0.95 } else { 1.02 })),
        "one_cycle" => Box::new(OneCycleLR::new(0.8, 30)),
        "one_cycle_options" => Box::new(
            OneCycleLR::new(0.8, 31)
                .max_lrs(vec![0.8, 0.4])
                .pct_start(0.4)
                .anneal_strategy(Anneal::Linear)
                .base_momentum(0.7)
                .max_momentum(0.9)
                .div_factor(10.0)
                .final_div_factor(100.0)
                .three_phase(true),
        ),
        "sequential" => Box::new(
            SequentialLR::new(LinearLR::new().start_factor(0.1).total_iters(5))
                .then(5, CosineAnnealingLR::new(10))
                .then(17, ExponentialLR::new(0.8)),
        ),
        "chained" => Box::new(
            ChainedScheduler::new(ConstantLR::new().factor(0.5).total_iters(4)).and(ExponentialLR::new(0.9)),
        ),
        other => panic!("unknown schedule {other}"),
    }
}

fn plateau(name: &str) -> ReduceLROnPlateau {
    match name {
        "plateau" => ReduceLROnPlateau::new().factor(0.5).patience(2).cooldown(1).min_lr(0.02),
        _ => {
            let options = ReduceLROnPlateau::new().mode(Plateau::Max).factor(0.3).patience(1);
            options.threshold(0.1).threshold_mode(ThresholdMode::Absolute)
        }
    }
}

#[test]
fn schedules_are_pytorchs() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/schedules.json")).expect("a fixture");
    let metrics = numbers(&fixture["metrics"]);
    let cases = fixture["cases"].as_object().expect("cases");
    assert!(cases.len() >= 16);
    for (name, rows) in cases {
        let adam = adam()?;
        let check = |step: usize, row: &Value| {
            let got = [adam.lrs(), vec![adam.momenta()[0]]].concat();
            for (got, want) in got.iter().zip(numbers(row)) {
                assert!(
                    (got - want).abs() <= 1e-12 * want.abs().max(1e-3),
                    "{name}, step {step}: {got}, not {want}"
                );
            }
        };
        let rows = rows.as_array().expect("rows");
        if name.starts_with("plateau") {
            let scheduler = plateau(name).on(&adam)?;
            for (step, row) in rows.iter().enumerate() {
                check(step, row);
                // From its own state it goes on as before.
                scheduler.load_state_dict(&scheduler.state_dict()?)?;
                scheduler.step(metrics[step]);
            }
            continue;
        }
        let mut scheduler = schedule(name).on(&adam)?;
        for (step, row) in rows.iter().enumerate() {
            check(step, row);
            if step == 9 {
                // Another one that takes the state over goes on from there; so do the learning rates.
                let (state, optimizer) = (scheduler.state_dict()?, adam.state_dict()?.copied()?);
                scheduler = schedule(name).on(&adam)?;
                scheduler.load_state_dict(&state)?;
                adam.load_state_dict(&optimizer)?;
            }
            scheduler.step()?;
        }
        assert_eq!(scheduler.last_epoch(), rows.len() as u64, "{name}");
    }
    Ok(())
}

#[test]
fn schedules_that_make_no_sense_are_refused() -> Result<()> {
    let parameter = Tensor::zeros([1], &Device::Cpu)?;
    parameter.requires_grad_(true)?;
    let adagrad = Adagrad::new(vec![parameter], 0.1)?;
    let message =
        |result: Result<Scheduler<&Adagrad>>| result.err().map(|e| e.to_string()).unwrap_or_default();
    assert!(message(OneCycleLR::new(0.1, 10).on(&adagrad)).contains("cycles momentum"));
    assert!(message(StepLR::new(0).on(&adagrad)).contains("step_size must be 1 or more"));
    let two: Vec<Box<dyn Fn(u64) -> f64 + Send + Sync>> = vec![Box::new(|_| 1.0), Box::new(|_| 1.0)];
    assert!(
        message(LambdaLR::each(two).on(&adagrad))
            .contains("the number of functions and of groups differ: 2 vs 1")
    );
    let cycle = OneCycleLR::new(0.1, 2).cycle_momentum(false).on(&adagrad)?;
    cycle.step()?;
    cycle.step()?;
    assert!(cycle.step().is_err(), "the cycle is over");
    Ok(())
}
