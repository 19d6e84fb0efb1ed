//! Plans, run by definition and compiled, and compared with the reference evaluator.
#![allow(dead_code, reason = "each test binary uses a part")]

mod compile;
pub mod golden;
mod memory;
mod run;

use std::collections::HashMap;
use std::sync::Arc;

use kiln_inductor::{C, Interpreter, Layout, Lowered, Options, lower};
use kiln_ir::{DType, Graph, Scalar, Stage, Strides, TensorTy, Ty};
use kiln_plan::{BufferId, BufferRef, Place, Plan, ViewRef};
use kiln_testkit::plan::{Memory as _, interpret, positions};
use kiln_testkit::{Argument, Array, Data};

pub use compile::{Compiled, best_isa, clang, compile, compile_all};
pub use memory::check_memory;
pub use run::Run;

/// An element of an array.
pub fn element(array: &Array, n: usize) -> Scalar {
    match (&array.data, array.dtype) {
        (Data::Float(x), _) => Scalar::Float(x[n]),
        (Data::Int(x), DType::Bool) => Scalar::Bool(x[n] != 0),
        (Data::Int(x), _) => Scalar::Int(x[n]),
    }
}

/// Doubles that come from floats are as exact as floats.
fn close(got: Scalar, want: Scalar, dtype: DType, has_f32: bool) -> bool {
    let (a, b) = (got.as_f64(), want.as_f64());
    let tolerance = match dtype {
        DType::F64 if !has_f32 => 1e-10,
        DType::F16 | DType::BF16 => kiln_testkit::tolerance(dtype),
        _ => 2e-5,
    };
    if dtype.is_float() {
        a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * (1.0 + b.abs())
    } else {
        got.as_i64() == want.as_i64()
    }
}

fn compare(what: &str, got: &Array, want: &Array, lowered: &Lowered, graph: &Graph) {
    let types = graph.nodes.iter().flat_map(|n| n.args.iter().chain(&n.outs));
    let has_f32 = types.filter_map(|&v| graph.ty(v).as_tensor()).any(|t| t.dtype.computing() == DType::F32);
    assert_eq!(got.ty(), want.ty(), "{what}");
    let dtype = want.dtype;
    for n in 0..want.numel() {
        let (got, want) = (element(got, n), element(want, n));
        assert!(
            close(got, want, dtype, has_f32),
            "{what}[{n}]: {got:?}, expected {want:?}\n{graph}\n{}\n{}\n{:#?}",
            lowered.plan.kernels.iter().map(ToString::to_string).collect::<String>(),
            lowered.code.iter().map(|k| k.code.as_str()).collect::<String>(),
            lowered.plan.steps
        );
    }
}

/// The bits of everything that a plan gives and writes back.
pub fn bits(graph: &Graph, options: &Options, inputs: &[Argument]) -> Option<Vec<u64>> {
    let lowered = lower(graph, options).unwrap();
    let compiled = compile(&lowered.code, &*options.target)?;
    let mut run = Run::new(&lowered, graph, options, inputs);
    run.run(&compiled).unwrap();
    let mut bits = Vec::new();
    let values = graph.outputs.iter().zip(&run.outputs);
    let written = graph.inputs.iter().zip(&run.inputs);
    for (value, memory) in values.chain(written) {
        let ty = graph.ty(*value).as_tensor().unwrap();
        bits.extend((0..ty.shape.numel()).map(|at| memory.read(at, ty.dtype).to_bits()));
    }
    Some(bits)
}

/// Lowers a graph; runs its plan by definition, and compiled; and compares both with the reference evaluator.
pub fn check_run(graph: &Graph, options: &Options, inputs: &[Argument]) -> Plan {
    graph.verify(Stage::Prims, "the test").unwrap();
    let lowered = lower(graph, options).unwrap();
    check_lowered(&lowered, graph, options, inputs, compile(&lowered.code, &*options.target).as_ref());
    lowered.plan
}

/// The same for a graph that was lowered and compiled before.
pub fn check_lowered(
    lowered: &Lowered,
    graph: &Graph,
    options: &Options,
    inputs: &[Argument],
    compiled: Option<&Compiled>,
) {
    check_memory(&lowered.plan);
    let strides: Vec<Strides> = options.input_layouts.iter().map(|layout| layout.strides.clone()).collect();
    // As it lies in memory: elements of expanded inputs are one.
    let mut inputs = inputs.to_vec();
    for (input, strides) in inputs.iter_mut().zip(&strides) {
        if let Argument::Tensor(t) = input {
            let at = positions(&t.shape, strides);
            let last: HashMap<i64, usize> = at.iter().enumerate().map(|(n, place)| (*place, n)).collect();
            *t = t.take(t.shape.clone(), at.iter().map(|place| last[place]));
        }
    }
    let wanted = kiln_testkit::evaluate(graph, &inputs).map_err(|error| error.to_string());
    let both = |what: &str, got: Result<kiln_testkit::Outcome, String>| match (&wanted, got) {
        (Ok(wanted), Ok(got)) => {
            let sides = [("output", &wanted.outputs, &got.outputs), ("input", &wanted.inputs, &got.inputs)];
            for (side, want, got) in sides {
                for (n, pair) in want.iter().zip(got).enumerate() {
                    if let (Argument::Tensor(want), Argument::Tensor(got)) = pair {
                        compare(&format!("{what}: {side} {n}"), got, want, lowered, graph);
                    }
                }
            }
        }
        (Err(want), Err(got)) => assert!(want.contains(&got), "{what}: {got}, expected {want}"),
        (want, got) => panic!("{what}: expected {want:?}, got {got:?}\n{graph}"),
    };
    let size: usize =
        graph.nodes.iter().map(|n| graph.ty(n.outs[0]).as_tensor().map_or(0, |t| t.shape.numel())).sum();
    // Element by element takes its time.
    if size <= 60_000 {
        both("by definition", interpret(&lowered.plan, graph, &strides, &inputs));
        let plain = Options { target: Arc::new(Interpreter), ..options.clone() };
        let plain = lower(graph, &plain).unwrap();
        check_memory(&plain.plan);
        both("for an interpreter", interpret(&plain.plan, graph, &strides, &inputs));
    }
    let Some(compiled) = compiled else { return };
    let mut run = Run::new(lowered, graph, options, &inputs);
    let done = run.run(compiled).map(|()| {
        let view = |place: Place, ty: &TensorTy, strides: &Strides| {
            let buffer = lowered.plan.buffers.iter().position(|buffer| buffer.place == place)?;
            let at = BufferRef { buffer: BufferId(buffer as u32), offset: 0 };
            Some(run.array(&ViewRef { at, ty: ty.clone(), strides: strides.clone() }))
        };
        let outputs = graph.outputs.iter().enumerate().filter_map(|(k, &v)| {
            let ty = graph.ty(v).as_tensor()?;
            view(Place::Output(k), ty, &ty.shape.contiguous_strides())
        });
        let after = inputs.iter().enumerate().map(|(i, input)| match input {
            Argument::Tensor(t) => {
                view(Place::Input(i), &t.ty(), &strides[i]).map_or(input.clone(), Into::into)
            }
            other => other.clone(),
        });
        kiln_testkit::Outcome { outputs: outputs.map(Into::into).collect(), inputs: after.collect() }
    });
    both("compiled", done);
}

/// A small random generator.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = self.0 ^ (self.0 >> 33);
        x.wrapping_mul(0xff51afd7ed558ccd) >> 17
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn float(&mut self) -> f64 {
        f64::from(((self.next() % 4001) as f64 / 1000.0 - 2.0) as f32)
    }

    pub fn value(&mut self, ty: &Ty) -> Argument {
        let number = |this: &mut Random, dtype: DType| match dtype {
            DType::Bool => Scalar::Bool(this.below(2) == 1),
            dtype if dtype.is_float() => Scalar::Float(dtype.round(this.float())),
            dtype => Scalar::Int(dtype.wrap(this.below(7) as i64 - 3)),
        };
        match ty {
            Ty::Scalar(kind) => Argument::Scalar(number(self, kind.dtype())),
            Ty::Tensor(t) if t.dtype.is_float() => {
                Array::floats(t.dtype, t.shape.clone(), |_| number(self, t.dtype).as_f64()).into()
            }
            Ty::Tensor(t) => Array::ints(t.dtype, t.shape.clone(), |_| number(self, t.dtype).as_i64()).into(),
            Ty::List(_) => panic!("lists are packed in the graph"),
        }
    }

    pub fn inputs(&mut self, graph: &Graph) -> Vec<Argument> {
        graph.inputs.iter().map(|&v| self.value(graph.ty(v))).collect()
    }
}

/// Checks a graph given as text, on the machine's best instruction set.
pub fn check_text(text: &str) -> Plan {
    check_strided(text, &[])
}

/// The same with strides for some inputs.
pub fn check_strided(text: &str, strides: &[(usize, &[isize])]) -> Plan {
    let graph: Graph = text.parse().unwrap();
    let mut options = Options::dense(&graph, C::new(best_isa()));
    for (input, strides) in strides {
        Arc::make_mut(&mut options.input_layouts)[*input] = Layout { strides: Strides::from_slice(strides) };
    }
    let inputs = Random(text.len() as u64).inputs(&graph);
    check_run(&graph, &options, &inputs)
}
