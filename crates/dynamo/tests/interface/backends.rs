//! Backends of one's own: what they are given, and that they can't break a program.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use kiln_dynamo::{
    Backend, ChosenBackend, Compile, CompiledGraph, CustomBackend, GraphContext, GraphKind, GraphValue,
    Level, OutputRole, list_backends, register_backend, run_graph, run_graph_with, run_node,
};
use kiln_ir::Graph;
use kiln_tensor::{Error, Result, Tensor, TensorList, foreach, no_grad};

use crate::{leaf, t};

/// What a backend was given.
type Seen = Arc<Mutex<Vec<(GraphKind, String, Vec<OutputRole>)>>>;

struct Watching {
    seen: Seen,
    level: Level,
}

impl Watching {
    fn new(level: Level) -> (Seen, Watching) {
        let seen = Seen::default();
        (seen.clone(), Watching { seen, level })
    }
}

impl CustomBackend for Watching {
    fn name(&self) -> &str {
        "watching"
    }

    fn level(&self) -> Level {
        self.level
    }

    fn compile(&self, graph: &Graph, context: &GraphContext<'_>) -> Result<CompiledGraph> {
        assert_eq!(context.outputs.len(), graph.outputs.len());
        assert_eq!(context.strides.len(), graph.inputs.len());
        assert!(graph.writes.is_empty());
        self.seen.lock().unwrap().push((context.kind, graph.to_string(), context.outputs.clone()));
        let graph = graph.clone();
        Ok(Box::new(move |inputs| run_graph(&graph, inputs)))
    }
}

#[test]
fn a_backend_gets_a_functional_graph_and_kiln_writes_back() -> Result<()> {
    let (seen, backend) = Watching::new(Level::Aten);
    let region = Compile::new().backend(backend).region();
    let (x, y) = (t(&[1.0, 2.0]), t(&[10.0, 20.0]));
    for lr in [0.5, 0.25] {
        // The two inputs change places, and a number is a hole.
        let sum = region.run(|| {
            let old = x.clone_tensor()?;
            x.copy_(&y)?;
            y.copy_(&old)?;
            x.mul(lr)?.add(&y)
        })?;
        assert_eq!(sum.numel(), 2);
    }
    assert_eq!(x.to_vec::<f32>()?, [1.0, 2.0]);
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 1, "one compilation serves both numbers");
    let (kind, graph, outputs) = &seen[0];
    assert_eq!(*kind, GraphKind::Whole);
    let writes = outputs.iter().filter(|role| matches!(role, OutputRole::WriteBack(_))).count();
    assert_eq!((outputs[0], writes), (OutputRole::Result, 2), "{graph}");
    assert!(graph.contains("float") && !graph.contains("copy_"), "{graph}");
    assert!(region.explain().options.contains("backend watching"));
    Ok(())
}

#[test]
fn results_that_leave_with_gradients_make_two_graphs() -> Result<()> {
    let (seen, backend) = Watching::new(Level::Prims);
    let region = Compile::new().backend(backend).region();
    let w = leaf(&[0.5, -1.0, 2.0]);
    for call in 1..=2 {
        w.set_grad(None);
        region.run(|| w.tanh()?.mul(&w))?.sum()?.backward()?;
        let want: Vec<f32> = [0.5f32, -1.0, 2.0].map(|w| w.tanh() + w * (1.0 - w.tanh() * w.tanh())).to_vec();
        for (got, want) in w.grad().unwrap().to_vec::<f32>()?.iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "call {call}: {got} instead of {want}");
        }
    }
    let kinds: Vec<GraphKind> = seen.lock().unwrap().iter().map(|(kind, ..)| *kind).collect();
    assert_eq!(kinds, [GraphKind::Forward, GraphKind::Backward]);
    assert!(region.explain().graphs[0].has_backward);
    Ok(())
}

#[test]
fn lists_are_packed_in_the_graph() -> Result<()> {
    let (seen, backend) = Watching::new(Level::Aten);
    let region = Compile::new().backend(backend).region();
    let tensors = vec![t(&[1.0, 2.0]), t(&[3.0])];
    let list = TensorList::new(tensors.clone());
    for _ in 0..2 {
        region.run(|| foreach::mul_(&list, 3.0))?;
    }
    assert_eq!((tensors[0].to_vec::<f32>()?, tensors[1].to_vec::<f32>()?), (vec![9.0, 18.0], vec![27.0]));
    let seen = seen.lock().unwrap();
    assert!(seen[0].1.contains("list(2 x ") || seen[0].1.contains("list("), "{}", seen[0].1);
    Ok(())
}

/// A backend that always answers with the same thing.
fn answering(
    answer: impl Fn(&[GraphValue]) -> Result<Vec<Tensor>> + Clone + Send + Sync + 'static,
) -> Compile {
    Compile::new()
        .backend(move |_: &Graph, _: &GraphContext<'_>| Ok(Box::new(answer.clone()) as CompiledGraph))
}

#[test]
fn what_a_backend_returns_is_checked() -> Result<()> {
    let x = t(&[1.0, 2.0]);
    let check = |compile: Compile, want: &str| {
        let error = compile.region().run(|| x.exp()).unwrap_err().to_string();
        assert_eq!(error, want);
    };
    check(answering(|_| Ok(Vec::new())), "backend custom: expected 1 tensors, one per output, got 0");
    check(answering(|_| Ok(vec![t(&[1.0])])), "backend custom: output 0 must be f32[2], got f32[1]");
    check(answering(|_| Err(Error::State("out of order".into()))), "out of order");
    Ok(())
}

#[test]
fn what_a_backend_returns_gets_memory_of_its_own() -> Result<()> {
    let kept = t(&[5.0, 6.0]);
    // The input itself, a tensor that the backend keeps, and a view that does not begin at the beginning.
    for (case, want) in [[1.0, 2.0], [5.0, 6.0], [8.0, 9.0]].into_iter().enumerate() {
        let kept = kept.clone();
        let region = answering(move |inputs| {
            Ok(vec![match case {
                0 => inputs[0].tensor().unwrap().clone(),
                1 => kept.clone(),
                _ => t(&[7.0, 8.0, 9.0]).slice(0, 1, 3, 1)?,
            }])
        })
        .region();
        let x = t(&[1.0, 2.0]);
        let first = region.run(|| x.neg())?;
        assert_eq!(first.to_vec::<f32>()?, want);
        first.fill_(0.0)?;
        assert_eq!(x.to_vec::<f32>()?, [1.0, 2.0], "case {case}: the input is not the result");
        assert_eq!(
            region.run(|| x.neg())?.to_vec::<f32>()?,
            want,
            "case {case}: calls do not share a result"
        );
    }
    Ok(())
}

#[test]
fn a_backend_that_refuses_leaves_the_program_as_it_is() -> Result<()> {
    let refuse = |_: &Graph, _: &GraphContext<'_>| -> Result<CompiledGraph> {
        Err(Error::State("no exp here".into()))
    };
    let region = Compile::new().backend(refuse).region();
    for _ in 0..2 {
        assert_eq!(region.run(|| t(&[0.0]).exp())?.item::<f32>()?, 1.0);
    }
    let explanation = region.explain();
    let reason = explanation.graphs[0].interpreted.as_ref().map(|why| why.to_string());
    assert_eq!(
        reason.as_deref(),
        Some("backend custom failed to compile a graph: no exp here"),
        "{explanation}"
    );
    Ok(())
}

#[test]
fn a_backend_may_take_over_some_ops() -> Result<()> {
    let region = Compile::new()
        .backend(|graph: &Graph, _: &GraphContext<'_>| {
            let graph = graph.clone();
            Ok(Box::new(move |inputs: &[GraphValue]| {
                run_graph_with(&graph, inputs, &mut |node, args| match (node.op.name(), args) {
                    ("exp", [x]) => Ok(GraphValue::Tensor(x.tensor().unwrap().mul(100.0)?)),
                    _ => run_node(node, args),
                })
            }) as CompiledGraph)
        })
        .region();
    assert_eq!(region.run(|| t(&[1.0]).add(1.0)?.exp())?.item::<f32>()?, 200.0);
    Ok(())
}

#[test]
fn backends_are_known_by_name() -> Result<()> {
    static GRAPHS: AtomicUsize = AtomicUsize::new(0);
    let count = |graph: &Graph, _: &GraphContext<'_>| {
        GRAPHS.fetch_add(1, Ordering::Relaxed);
        let graph = graph.clone();
        Ok(Box::new(move |inputs: &[GraphValue]| run_graph(&graph, inputs)) as CompiledGraph)
    };
    register_backend("tests-count", count)?;
    assert!(register_backend("tests-count", count).unwrap_err().to_string().contains("already"));
    assert!(register_backend("inductor", count).is_err());
    assert!(list_backends().starts_with(&["inductor".into(), "aot_eager".into(), "eager".into()]));
    assert!(list_backends().contains(&"tests-count".to_string()));
    let compile: Compile = "backend=tests-count".parse()?;
    compile.region().run(|| t(&[1.0]).exp())?;
    assert_eq!(GRAPHS.load(Ordering::Relaxed), 1);
    let error = "nvfuser".parse::<ChosenBackend>().unwrap_err().to_string();
    assert!(
        error.starts_with("backend: unknown value \"nvfuser\", expected one of inductor, aot_eager, eager, ")
    );
    assert_eq!(ChosenBackend::from(Backend::Eager).name(), "eager");
    Ok(())
}

#[test]
fn a_training_step_with_numbers_that_change() -> Result<()> {
    let step = |region: Option<&kiln_dynamo::Region>| -> Result<Vec<f32>> {
        let w = leaf(&[1.0, -2.0, 0.5]);
        for lr in [0.1, 0.2, 0.05] {
            let body = || {
                w.set_grad(None);
                w.mul(&w)?.sum()?.backward()?;
                let _guard = no_grad();
                w.sub_(&w.grad().unwrap().mul(lr)?)?;
                Ok::<_, Error>(())
            };
            match region {
                Some(region) => region.run(body)?,
                None => body()?,
            }
        }
        w.to_vec()
    };
    let (_, backend) = Watching::new(Level::Prims);
    let region = Compile::new().backend(backend).fullgraph(true).region();
    assert_eq!(step(Some(&region))?, step(None)?);
    assert_eq!(region.explain().graphs.len(), 1, "{}", region.explain());
    Ok(())
}

#[test]
fn a_backend_that_panics_leaves_nothing_behind() -> Result<()> {
    let x = t(&[1.0, 2.0]);
    let region = answering(|_| panic!("on purpose")).region();
    for needs_value in [false, true] {
        let body =
            || region.run(|| if needs_value { x.exp()?.to_vec::<f32>() } else { x.exp().map(|_| vec![]) });
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        assert!(outcome.is_err(), "the panic is the caller's");
    }
    let y = Compile::new().region().run(|| x.add(1.0))?;
    assert_eq!(y.to_vec::<f32>()?, [2.0, 3.0]);
    Ok(())
}
