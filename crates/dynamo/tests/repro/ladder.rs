//! The stages of the compiler, each against eager.

use kiln_dynamo::{bisect, reproduce};
use kiln_repro::{Case, Value};
use kiln_tensor::{DType, Tensor};
use kiln_testkit::{Argument, Data, generate};

/// A case of a random program.
fn case_of(seed: u64, nodes: usize) -> Option<Case> {
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

#[test]
fn random_programs_are_right_at_every_stage() {
    for seed in 0..60 {
        let Some(case) = case_of(seed, 30) else { continue };
        if bisect(&case).unwrap().is_some() {
            let limit = std::time::Duration::from_secs(20);
            let (small, found) = kiln_dynamo::investigate(&case, limit, &mut |_| {}).unwrap().unwrap();
            panic!("seed {seed}: {found}\n{}", small.to_text().unwrap().0);
        }
    }
}

#[test]
fn a_recording_with_gradients_is_right() {
    let text = "\
x: f32[5, 7] leaf
w: f32[7, 3] leaf
h: f32[5, 3]
n: float
a = mm(x, w)
b = tanh(a)
c = mul(b, n)
s = sum(c) {dims: [0, 1], keepdim: false}
backward(s) x -> gx, w -> gw
no_grad sub_(h, b)
d = exp(x)
live gx, gw, d
";
    let case = Case::from_text(text, &[]).unwrap();
    assert_eq!(reproduce(&case).unwrap(), None);
    let (text, beside) = case.to_text().unwrap();
    let again = Case::from_text(&text, &beside).unwrap();
    assert_eq!(again.to_text().unwrap().0, text);
    assert_eq!(reproduce(&again).unwrap(), None);
}

#[test]
fn halves_are_judged_by_doubles() {
    let text = "\
x: f16[64]
y = square(x)
z = exp(y)
live z
";
    let case = Case::from_text(text, &[]).unwrap();
    assert_eq!(case.inputs[&0].values.dtype(), DType::F16);
    assert_eq!(reproduce(&case).unwrap(), None);
}
