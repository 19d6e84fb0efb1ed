//! Gradients by finite differences, in double precision.

use kiln_ir::{DType, Graph, Result};

use crate::{Argument, Array, Data, Evaluator};

/// The gradient of Σ weightᵢ · outputᵢ with respect to input `input`, by central differences over the exact
/// evaluator. Outputs without a weight don't count; the input must be a float tensor.
pub fn numeric_gradient(
    graph: &Graph,
    inputs: &[Argument],
    weights: &[Option<Array>],
    input: usize,
) -> Result<Array> {
    let loss = |inputs: &[Argument]| -> Result<f64> {
        let outcome = Evaluator::exact().run(graph, inputs)?;
        let mut total = 0.0;
        for (output, weight) in outcome.outputs.iter().zip(weights) {
            if let (Argument::Tensor(output), Some(weight)) = (output, weight) {
                total += (0..output.numel()).map(|i| output.float(i) * weight.float(i)).sum::<f64>();
            }
        }
        Ok(total)
    };
    let mut moved = inputs.to_vec();
    let (shape, values) = match &inputs[input] {
        Argument::Tensor(Array { shape, data: Data::Float(values), .. }) => (shape.clone(), values.clone()),
        _ => return Ok(Array::floats(DType::F64, (), |_| 0.0)),
    };
    let mut slopes = Vec::with_capacity(values.len());
    for (i, &x) in values.iter().enumerate() {
        let step = 1e-5 * x.abs().max(1e-2);
        let mut at = |x: f64| -> Result<f64> {
            if let Argument::Tensor(Array { data: Data::Float(values), .. }) = &mut moved[input] {
                values[i] = x;
            }
            loss(&moved)
        };
        let (above, below) = (at(x + step)?, at(x - step)?);
        at(x)?;
        slopes.push((above - below) / (2.0 * step));
    }
    Ok(Array::floats(DType::F64, shape, |i| slopes[i]))
}
