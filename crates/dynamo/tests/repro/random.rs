//! Cases of random graphs.

use kiln_repro::{Case, Value};
use kiln_tensor::Tensor;
use kiln_testkit::{Argument, Data, generate};

/// A case of a random program.
pub fn case_of(seed: u64, nodes: usize) -> Option<Case> {
    let program = generate(seed, nodes);
    let value = |argument: &Argument| match argument {
        Argument::Scalar(x) => Value::Number(*x),
        Argument::Tensor(array) => {
            let wide = match &array.data {
                Data::Float(x) => Tensor::from_vec(x.clone(), array.shape.clone()).unwrap(),
                Data::Int(x) => Tensor::from_vec(x.clone(), array.shape.clone()).unwrap(),
            };
            Value::Tensor(wide.to_dtype(array.dtype).unwrap())
        }
        Argument::List(_) => panic!("no program begins with a list"),
    };
    let values: Vec<Value> = program.inputs.iter().map(value).collect();
    // Programs that compute with numbers alone have no recording.
    Case::of_graph(&program.graph, &values).ok()
}
