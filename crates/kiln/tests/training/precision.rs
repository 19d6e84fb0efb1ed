//! Training with more than one precision.

use kiln::Result;
use kiln::prelude::*;

use crate::compare::{Precision, Record, Step, check, constant, samples, weight};

/// A body in `body`, a head in `head`, parameters in `parameter`, all learned with Adam.
fn train(step: &Step, [parameter, body, head]: [DType; 3]) -> Result<Record> {
    let parameters = vec![
        weight(&[16, 8], 1, parameter)?,
        constant(16, 0.1, parameter)?,
        weight(&[3, 16], 2, head)?,
        constant(3, 0.0, head)?,
    ];
    let optimizer = optim::Adam::new(parameters.clone(), 0.02)?;
    let mut record = Record::default();
    for i in 0..50 {
        record.step(i);
        let (x, y) = samples(&[if i % 4 == 3 { 5 } else { 12 }, 8], 3, i % 8, parameter)?;
        let loss = step.run(|| {
            optimizer.zero_grad();
            let [w1, b1] = [0, 1].map(|k| parameters[k].to_dtype(body));
            let hidden = x.to_dtype(body)?.linear(&w1?, Some(&b1?))?.gelu()?;
            let [w2, b2] = [2, 3].map(|k| parameters[k].clone());
            let scores = hidden.to_dtype(head)?.linear(&w2, Some(&b2))?;
            let loss = scores.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            loss.detach()
        })?;
        record.tensor("loss", &loss)?;
        record.tensors("parameter", &parameters)?;
        for (k, parameter) in parameters.iter().enumerate() {
            let (gradient, state) = (parameter.grad().unwrap(), optimizer.state(parameter).unwrap());
            assert_eq!(gradient.dtype(), parameter.dtype());
            record.tensor(&format!("gradient {k}"), &gradient)?;
            record.tensors(&format!("state {k}"), [&state.exp_avg, &state.exp_avg_sq])?;
        }
    }
    Ok(record)
}

#[test]
fn a_head_in_f64() -> Result<()> {
    for (_, explanation) in check(Precision::Single, |step, dtype| train(step, [dtype, dtype, DType::F64]))? {
        assert!(explanation.breaks.is_empty(), "{explanation}");
        assert_eq!((explanation.recompiles.len(), explanation.sizes), (0, 1), "{explanation}");
    }
    Ok(())
}

#[test]
fn a_forward_in_bf16() -> Result<()> {
    let program = |step: &Step, dtype| match dtype {
        DType::F64 => train(step, [DType::F64; 3]),
        _ => train(step, [dtype, DType::BF16, dtype]),
    };
    for (_, explanation) in check(Precision::Half, program)? {
        assert!(explanation.breaks.is_empty(), "{explanation}");
        assert_eq!((explanation.recompiles.len(), explanation.sizes), (0, 1), "{explanation}");
    }
    Ok(())
}
