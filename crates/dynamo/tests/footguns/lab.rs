//! The laboratory: a scenario runs eagerly and then in a region of every backend, and whatever it notes on the
//! way must be the same.

use std::cell::RefCell;
use std::sync::{Mutex, MutexGuard};

use kiln_dynamo::{
    Backend, Compile, CompiledGraph, CustomBackend, Explanation, GraphContext, GraphInfo, Level, Mode,
    Region, run_graph,
};
use kiln_ir::Graph;
use kiln_tensor::{DType, Device, Error, Result, Tensor, TensorList, foreach, manual_seed, no_grad};

pub const CPU: Device = Device::Cpu;

/// The random stream is the process's: scenarios take turns.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Numbers between −2 and 2 that look random.
pub fn data(shape: &[usize]) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let numbers: Vec<f32> = (0..count).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect();
    Tensor::from_slice(&numbers)?.reshape(shape.to_vec())
}

/// Fails unless a tensor is what it should be, but for rounding.
#[track_caller]
pub fn assert_close(got: &Tensor, want: &Tensor, what: &str) -> Result<()> {
    assert_eq!((got.shape(), got.dtype()), (want.shape(), want.dtype()), "{what}");
    let (got, want) =
        (got.to_dtype(DType::F64)?.to_vec_cast::<f64>()?, want.to_dtype(DType::F64)?.to_vec_cast::<f64>()?);
    let scale = want.iter().fold(1.0f64, |most, x| most.max(x.abs()));
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        assert!((got - want).abs() <= 1e-5 * scale, "{what} at {i}: {got} instead of {want}");
    }
    Ok(())
}

/// What a scenario saw.
#[derive(Clone, Debug)]
pub enum Seen {
    Values { shape: Vec<usize>, values: Vec<f64> },
    Text(String),
}

/// Runs a scenario's compiled part, eagerly or in a region, and takes its notes.
pub struct Lab {
    pub region: Option<Region>,
    pub notes: RefCell<Vec<(String, Seen)>>,
}

impl Lab {
    pub fn new(region: Option<Region>) -> Lab {
        Lab { region, notes: RefCell::default() }
    }

    pub fn run<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        match &self.region {
            Some(region) => region.run(body),
            None => body(),
        }
    }

    pub fn see(&self, what: &str, tensor: &Tensor) -> Result<()> {
        let seen = Seen::Values { shape: tensor.shape().to_vec(), values: tensor.to_vec_cast::<f64>()? };
        self.notes.borrow_mut().push((what.to_string(), seen));
        Ok(())
    }

    pub fn say(&self, what: &str, text: impl ToString) {
        self.notes.borrow_mut().push((what.to_string(), Seen::Text(text.to_string())));
    }

    pub fn see_grad(&self, what: &str, tensor: &Tensor) -> Result<()> {
        match tensor.grad() {
            Some(grad) => self.see(what, &grad),
            None => {
                self.say(what, "no gradient");
                Ok(())
            }
        }
    }

    pub fn outcome<T>(&self, what: &str, result: Result<T>) {
        self.say(what, result.map_or_else(|error| error.to_string(), |_| "fine".to_string()));
    }
}

pub fn same(got: &Seen, want: &Seen) -> bool {
    match (got, want) {
        (Seen::Text(got), Seen::Text(want)) => got == want,
        (Seen::Values { shape: a, values: x }, Seen::Values { shape: b, values: y }) => {
            let close = |(g, w): (&f64, &f64)| {
                g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= 1e-6 + 1e-5 * w.abs()
            };
            a == b && x.iter().zip(y).all(close)
        }
        _ => false,
    }
}

/// Runs a scenario eagerly and on every backend and compares the notes.
pub fn as_eager(scenario: impl Fn(&Lab) -> Result<()>) -> Result<()> {
    check(scenario).map(drop)
}

/// [`as_eager`] that hands out the explanations.
pub fn check(scenario: impl Fn(&Lab) -> Result<()>) -> Result<Vec<(Backend, Explanation)>> {
    let _turn = turn();
    manual_seed(5);
    let eager = Lab::new(None);
    scenario(&eager)?;
    let want = eager.notes.into_inner();
    let mut explanations = Vec::new();
    for (backend, options) in contestants() {
        manual_seed(5);
        let lab = Lab::new(Some(options.clone().region()));
        let outcome = scenario(&lab);
        let explanation = lab.region.as_ref().unwrap().explain();
        if let Err(error) = outcome {
            panic!("{options}: {error}\n{explanation}");
        }
        let got = lab.notes.into_inner();
        for (i, ((what, got), (_, want))) in got.iter().zip(&want).enumerate() {
            assert!(
                same(got, want),
                "{options}, note {i}, {what}:\n{got:?}\ninstead of\n{want:?}\n{explanation}"
            );
        }
        assert_eq!(got.len(), want.len(), "{options}");
        explanations.extend(backend.map(|backend| (backend, explanation)));
    }
    Ok(explanations)
}

/// Every call was one graph, the same in all.
#[track_caller]
pub fn one_graph(explanations: Vec<(Backend, Explanation)>) {
    for (backend, explanation) in explanations {
        assert!(explanation.breaks.is_empty() && explanation.fallbacks.is_empty(), "{explanation}");
        let whole = |graph: &GraphInfo| graph.interpreted.is_none() || backend == Backend::Eager;
        assert!(explanation.graphs.iter().all(whole), "{explanation}");
    }
}

/// Kiln's backends, and other options that must give the same.
fn contestants() -> Vec<(Option<Backend>, Compile)> {
    let own = Backend::ALL.iter().map(|&backend| (Some(backend), Compile::new().backend(backend)));
    let others = [
        Compile::new().mode(Mode::ReduceOverhead),
        Compile::new().backend(Interpreter(Level::Aten)),
        Compile::new().backend(Interpreter(Level::Prims)),
    ];
    own.chain(others.map(|options| (None, options))).collect()
}

/// A backend that runs graphs op by op.
struct Interpreter(Level);

impl CustomBackend for Interpreter {
    fn level(&self) -> Level {
        self.0
    }

    fn compile(&self, graph: &Graph, _: &GraphContext<'_>) -> Result<CompiledGraph> {
        let graph = graph.clone();
        Ok(Box::new(move |inputs| run_graph(&graph, inputs)))
    }
}

pub fn t(data: &[f32]) -> Tensor {
    Tensor::from_slice(data).unwrap()
}

pub fn leaf(data: &[f32]) -> Tensor {
    let x = t(data);
    x.requires_grad_(true).unwrap();
    x
}

pub fn matrix(rows: usize, columns: usize) -> Tensor {
    let data: Vec<f32> = (0..rows * columns).map(|i| (i as f32 * 0.37).sin()).collect();
    Tensor::from_vec(data, [rows, columns]).unwrap()
}

/// A training step with SGD and momentum.
pub fn training_step(
    params: &[Tensor],
    momenta: &TensorList,
    x: &Tensor,
    y: &Tensor,
    keep: bool,
) -> Result<Tensor> {
    if !keep {
        params.iter().for_each(|p| p.set_grad(None));
    }
    let hidden = x.linear(&params[0], Some(&params[1]))?.gelu()?;
    let loss = hidden.linear(&params[2], None)?.cross_entropy(y)?;
    loss.backward()?;
    let _guard = no_grad();
    let grads: TensorList = params.iter().filter_map(Tensor::grad).collect();
    foreach::mul_(momenta, 0.9)?;
    foreach::add_(momenta, &grads)?;
    foreach::add_scaled_(&TensorList::new(params.to_vec()), momenta, -0.1)?;
    Ok(loss)
}

/// The reason of an error without op and line: a compiled backward is one node with a name of its own, and of
/// lines that begin alike the first is named.
pub fn reason(error: Error) -> Error {
    Error::State(error.why().map_or_else(|| error.to_string(), ToString::to_string))
}
