//! Segments: what was captured between two points where values were needed, ready to run.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use kiln_aot::trace::Variable;
use kiln_aot::{GraphInput, Home, SavedFrom, Survivor, View};
use kiln_ir::{DType, Device, Error, Graph, Layout, Loc, Result, Scalar, Why};
use kiln_tensor::autograd::{self, TapeFunction};
use kiln_tensor::graph::{self, GraphValue};
use kiln_tensor::internal::{ListState, TensorState};
use kiln_tensor::program::{Executable, Failure};
use kiln_tensor::{Ready, Tensor};

use crate::analysis::{Analysis, Reach, TapeCall};
use crate::backend::Custom;
use crate::explain::GraphInfo;
use crate::graph_cache::Made;
use crate::interpret;
use crate::leaving::{self, Edges};
use crate::loops::{self, Rolled};
use crate::region::Site;
use crate::rung::Defined;
use crate::state::{Held, State};
use crate::why::NotCompiled;

/// A compiled graph.
pub(crate) enum Code {
    /// Kernels and library calls.
    Program(LoadedGraph),
    /// A graph that is run op by op.
    Graph(Graph),
    /// A plan that is run by its definition.
    Plan(Defined),
    /// What a user's backend made.
    Custom(Custom),
}

/// A graph lowered and loaded.
pub(crate) struct LoadedGraph {
    pub(crate) executable: Executable,
    /// The element types of the results, in order.
    pub(crate) outputs: Vec<(DType, Device)>,
}

/// The compiled backward of a segment whose results leave with gradients, or a part of it (see `kiln_aot::Joint`).
pub(crate) struct Backward {
    pub(crate) code: Arc<Code>,
    /// The graph, where gradients may arrive for some results only. It is run op by op then: to fill in zeros
    /// would make 0 · NaN of what was never asked for.
    pub(crate) partial: Option<Graph>,
    /// Where backward's first inputs come from, and the user's lines that they are read for.
    pub(crate) saved: Vec<(SavedFrom, Loc)>,
    /// The variables that it gives gradients to (inputs, and results of earlier parts), and which of its results
    /// those are.
    pub(crate) grads: Vec<(Variable, usize)>,
    /// The survivors that gradients arrive for, in the order of the tangents: variable and output.
    pub(crate) tangents: Vec<(Variable, usize)>,
    /// What eager's tape of each of them is.
    pub(crate) tapes: Vec<Tape>,
    /// How many of the forward's results are the program's own; fresh saved values follow.
    pub(crate) forward_outputs: usize,
}

/// The tape that eager would have for a result, as far as this part: gradients reach these variables through
/// these calls.
pub(crate) struct Tape {
    calls: BTreeMap<usize, TapeCall>,
    inputs: Vec<Variable>,
}

impl Tape {
    pub(crate) fn new(analysis: &Analysis, reach: Reach) -> Tape {
        let calls = reach.calls.iter().map(|&call| (call, analysis.tape_call(call)));
        Tape { calls: calls.collect(), inputs: reach.inputs }
    }

    /// Of the calls that were used up, the one that a pass meets first.
    fn first_of(&self, freed: &FxHashSet<usize>) -> Option<(usize, TapeCall)> {
        let met = self.calls.iter().rev().find(|(call, _)| freed.contains(call));
        met.map(|(&index, call)| (index, call.clone()))
    }
}

pub(crate) enum Execution {
    /// Runs op by op, for this reason.
    Interpreted(NotCompiled),
    Compiled {
        code: Arc<Code>,
        inputs: Vec<GraphInput>,
        survivors: Vec<Survivor>,
        /// In the order of its parts.
        backward: Vec<Arc<Backward>>,
        /// Results whose tape a `backward` inside used up, and what of it a pass would meet first.
        used_up: leaving::UsedUp,
    },
}

impl Execution {
    /// What runs in the place of a recording, of which this is the tape.
    pub(crate) fn compiled(tape: &Analysis, made: Made<Code>, edges: Edges) -> Execution {
        let Made { code, forward_outputs, parts, .. } = made;
        let Edges { inputs, survivors, used_up, gradients } = edges;
        let connect = |gradients| leaving::connect(tape, &gradients, forward_outputs, parts);
        let backward = gradients.map(connect).unwrap_or_default();
        Execution::Compiled { code: Arc::new(code), inputs, survivors, backward, used_up }
    }
}

/// A stage's result, turned into text when somebody asks.
#[derive(Clone)]
pub(crate) enum Text {
    Graph(Arc<Graph>),
    Source(String),
    /// A stage that was not gone through.
    Later(Arc<dyn Fn() -> String + Send + Sync>),
}

impl Text {
    pub(crate) fn later(text: impl Fn() -> String + Send + Sync + 'static) -> Text {
        Text::Later(Arc::new(text))
    }
}

impl std::fmt::Debug for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Text({self})")
    }
}

impl std::fmt::Display for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Text::Graph(graph) => write!(f, "{graph}"),
            Text::Source(text) => f.write_str(text),
            Text::Later(text) => f.write_str(&text()),
        }
    }
}

/// What a segment is, for people.
#[derive(Clone, Debug, Default)]
pub(crate) struct Info {
    /// What is known when it is compiled.
    pub(crate) graph: GraphInfo,
    /// Names of inputs that have one, by number.
    pub(crate) names: Vec<(Variable, String)>,
    /// Leaves that were used and that no `backward` reached.
    pub(crate) without_gradient: Vec<Variable>,
    /// The program at each stage.
    pub(crate) texts: Vec<(&'static str, Text)>,
}

/// See the [module](self).
pub(crate) struct Segment {
    pub(crate) execution: Execution,
    pub(crate) info: Info,
    /// Numbers of the recording that are one number in what runs.
    pub(crate) alike: Vec<(u32, u32)>,
}

impl Segment {
    /// Runs what is pending in a run and makes its live variables ready.
    pub(crate) fn run(&self, site: &Site, state: &mut State) -> Result<()> {
        let Execution::Compiled { code, inputs, survivors, backward, used_up } = &self.execution else {
            return interpret::run(site, state);
        };
        if !loops::are_alike(&self.alike, &state.numbers) {
            return interpret::run(site, state);
        }
        let mut results = std::mem::take(&mut state.results);
        let mut scalars = std::mem::take(&mut state.scalars);
        results.clear();
        let outcome = execute(code, inputs, state, &mut scalars, &mut results);
        state.scalars = scalars;
        if let Err(failure) = outcome {
            state.results = results;
            return match failure {
                // Nothing was changed yet: the interpreter gives the very error that eager gives.
                Stop::Retry => interpret::run(site, state),
                // As above; if eager gives none, the error is the backend's.
                Stop::Backend(error) => interpret::run(site, state).and(Err(error)),
                Stop::Error(error) => {
                    interpret::drop_lazy_gradients(state);
                    Err(error)
                }
            };
        }
        publish(survivors, state, &results)?;
        for part in backward {
            attach(part, inputs, state, &results)?;
        }
        for (tensor, call) in used_up.iter().filter_map(|(v, call)| Some((held(state, *v)?, call))) {
            let function = Arc::new(UsedUp(call.clone()));
            autograd::attach(function, &[], std::slice::from_ref(tensor), Loc::UNKNOWN);
        }
        results.clear();
        state.results = results;
        Ok(())
    }
}

impl Segment {
    /// A segment for a rolled recording, for the recording that was rolled.
    pub(crate) fn renumbered(&self, rolled: &Rolled) -> Option<Segment> {
        let Execution::Compiled { code, inputs, survivors, backward, used_up } = &self.execution else {
            return None;
        };
        let was = |variable: Variable| *rolled.variables.get(variable as usize)?;
        let input = |input: &GraphInput| {
            Some(match *input {
                GraphInput::Variable(v) => GraphInput::Variable(was(v)?),
                GraphInput::Number(hole) => GraphInput::Number(*rolled.holes.get(hole as usize)?),
            })
        };
        let survivor = |survivor: &Survivor| {
            let mut survivor = survivor.clone();
            survivor.variable = was(survivor.variable)?;
            for (home, _) in &mut survivor.homes {
                if let Home::Input(v) = home {
                    *v = was(*v)?;
                }
            }
            if let View::Of(root) = &mut survivor.view {
                *root = was(*root)?;
            }
            Some(survivor)
        };
        let used_up = used_up.iter().map(|(v, call)| Some((was(*v)?, call.clone())));
        Some(Segment {
            execution: Execution::Compiled {
                code: code.clone(),
                inputs: inputs.iter().map(input).collect::<Option<_>>()?,
                survivors: survivors.iter().map(survivor).collect::<Option<_>>()?,
                backward: backward.iter().map(|part| part.renumbered(&was)).collect::<Option<_>>()?,
                used_up: used_up.collect::<Option<_>>()?,
            },
            info: self.info.clone(),
            alike: rolled.alike.clone(),
        })
    }
}

impl Backward {
    fn renumbered(&self, was: &dyn Fn(Variable) -> Option<Variable>) -> Option<Arc<Backward>> {
        let numbered = |pairs: &[(Variable, usize)]| pairs.iter().map(|&(v, i)| Some((was(v)?, i))).collect();
        let tape = |tape: &Tape| {
            let inputs = tape.inputs.iter().map(|v| was(*v)).collect::<Option<_>>()?;
            Some(Tape { calls: tape.calls.clone(), inputs })
        };
        let grads: Option<Vec<(Variable, usize)>> = numbered(&self.grads);
        Some(Arc::new(Backward {
            code: self.code.clone(),
            partial: self.partial.clone(),
            saved: self.saved.clone(),
            grads: grads?,
            tangents: numbered(&self.tangents)?,
            tapes: self.tapes.iter().map(tape).collect::<Option<_>>()?,
            forward_outputs: self.forward_outputs,
        }))
    }
}

enum Stop {
    Retry,
    Backend(Error),
    Error(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Error(error)
    }
}

fn held(state: &State, variable: Variable) -> Option<&Tensor> {
    state.held(variable)
}

fn execute(
    code: &Code,
    inputs: &[GraphInput],
    state: &State,
    scalars: &mut Vec<u64>,
    results: &mut Vec<Ready>,
) -> Result<(), Stop> {
    let number = |i: usize| match inputs[i] {
        GraphInput::Number(hole) => Some(state.numbers[hole as usize]),
        GraphInput::Variable(_) => None,
    };
    let tensor = |input: &GraphInput| match input {
        GraphInput::Variable(v) => held(state, *v),
        GraphInput::Number(_) => None,
    };
    match code {
        Code::Program(program) => {
            program.executable.numbers().fill(&number, scalars)?;
            program.executable.run(inputs.iter().map(tensor), scalars, results).map_err(Stop::from)
        }
        Code::Graph(_) | Code::Custom(_) | Code::Plan(_) => {
            let value = |(i, input): (usize, &GraphInput)| {
                let tensor = tensor(input).map(|tensor| GraphValue::Tensor(tensor.clone()));
                let value = tensor.or_else(|| number(i).map(GraphValue::Number));
                value.ok_or_else(|| Error::bug(format!("input {i} of a graph is not there")))
            };
            let values = inputs.iter().enumerate().map(value).collect::<Result<Vec<_>>>()?;
            let graph = match code {
                Code::Graph(graph) => graph,
                Code::Custom(custom) => {
                    results.extend(custom.run(&values).map_err(Stop::Backend)?);
                    return Ok(());
                }
                Code::Plan(plan) => {
                    for output in plan.run(&values)? {
                        results.push(output.ready()?.clone());
                    }
                    return Ok(());
                }
                Code::Program(_) => return Ok(()),
            };
            // Nothing is written before everything is computed: the interpreter gives the very error.
            let outputs = graph::run_functional(graph, &values).map_err(|_| Stop::Retry)?;
            for output in outputs {
                results.push(output.ready()?.clone());
            }
            Ok(())
        }
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        match failure {
            Failure::Error(error) => Stop::Error(error),
            // Steps that can fail come before the first change of an input.
            Failure::Status { .. } | Failure::Refused(_) => Stop::Retry,
        }
    }
}

/// Makes the variables that outlive the segment ready.
fn publish(survivors: &[Survivor], state: &State, results: &[Ready]) -> Result<()> {
    let ready = |home: Home, layout: &Layout| match home {
        Home::Output(i) => results[i].with_layout(layout.clone()),
        Home::Input(v) => {
            let base = held(state, v).and_then(Tensor::try_ready);
            let base = base.ok_or_else(|| Error::bug(format!("the result's input {v} is not there")))?;
            let mut layout = layout.clone();
            layout.offset += base.layout().offset;
            base.with_layout(layout)
        }
    };
    for survivor in survivors {
        match state.variables.get(survivor.variable as usize) {
            Some(Held::Made(tensor)) => {
                let (home, layout) = &survivor.homes[0];
                tensor.publish(ready(*home, layout)?.as_view(survivor.view != View::Itself));
            }
            Some(Held::List(list)) => {
                let items = survivor.homes.iter().map(|(home, layout)| ready(*home, layout));
                list.publish(items.map(|ready| ready.map(Tensor::from_ready)).collect::<Result<_>>()?);
            }
            _ => {}
        }
    }
    connect_views(survivors, state, results);
    Ok(())
}

/// Views that leave know what they are views of, so that a later change in place through one is seen by all.
fn connect_views(survivors: &[Survivor], state: &State, results: &[Ready]) {
    // Tensors that nobody has: they stand for what only views are left of.
    let mut gone: SmallVec<[(Variable, Tensor); 4]> = SmallVec::new();
    for survivor in survivors {
        let View::Of(root) = survivor.view else { continue };
        let Some(tensor) = held(state, survivor.variable)
            .filter(|t| t.try_ready().is_some_and(|ready| ready.dtype().is_float()))
        else {
            continue;
        };
        if let Some(base) = held(state, root).filter(|base| !base.is_lazy()) {
            tensor.become_view_of(base);
            continue;
        }
        let base = match (gone.iter().find(|(variable, _)| *variable == root), survivor.homes[0].0) {
            (Some((_, base)), _) => base.clone(),
            (None, Home::Output(output)) => Tensor::from_ready(results[output].clone()),
            (None, Home::Input(_)) => continue,
        };
        tensor.become_view_of(&base);
        gone.push((root, base));
    }
}

/// Puts the compiled backward on the tape of the results.
fn attach(backward: &Arc<Backward>, inputs: &[GraphInput], state: &State, results: &[Ready]) -> Result<()> {
    let mut saved = Vec::with_capacity(backward.saved.len());
    for (source, _) in &backward.saved {
        saved.push(match *source {
            SavedFrom::Input(i) => match inputs[i] {
                GraphInput::Number(hole) => SavedValue::Number(state.numbers[hole as usize]),
                GraphInput::Variable(v) => {
                    let Some(tensor) = held(state, v) else { continue };
                    SavedValue::tensor(tensor.ready()?.clone())
                }
            },
            SavedFrom::Output(i) => SavedValue::tensor(results[i].clone()),
            SavedFrom::Fresh(i) => SavedValue::tensor(results[backward.forward_outputs + i].clone()),
        });
    }
    let tensors = |variables: &mut dyn Iterator<Item = Variable>| -> Vec<Tensor> {
        variables.filter_map(|v| held(state, v).cloned()).collect()
    };
    let differentiated = tensors(&mut backward.grads.iter().map(|(v, _)| *v));
    let outputs = tensors(&mut backward.tangents.iter().map(|(v, _)| *v));
    let kept = Mutex::new(Kept { saved, freed: FxHashSet::default() });
    let function = CompiledBackward { backward: backward.clone(), kept };
    autograd::attach(Arc::new(function), &differentiated, &outputs, Loc::UNKNOWN);
    outputs.iter().for_each(Tensor::watch_for_retained);
    Ok(())
}

#[derive(Clone)]
enum SavedValue {
    Number(Scalar),
    /// A tensor and its storage's version when it was saved.
    Tensor(Tensor, u64),
}

impl SavedValue {
    fn tensor(ready: Ready) -> SavedValue {
        let version = ready.storage().version();
        SavedValue::Tensor(Tensor::from_ready(ready), version)
    }
}

/// The node on the tape that runs a segment's backward.
struct CompiledBackward {
    backward: Arc<Backward>,
    kept: Mutex<Kept>,
}

/// What a compiled backward still has.
struct Kept {
    saved: Vec<SavedValue>,
    /// The calls of the segment whose tape eager would have freed by now.
    freed: FxHashSet<usize>,
}

impl Kept {
    /// What backward reads, if eager could go through these tapes, too; frees them unless told to keep them.
    fn take(&mut self, all: &[Tape], wanted: &[&Tape], retain_graph: bool) -> Result<Vec<SavedValue>> {
        let met = wanted.iter().filter_map(|tape| tape.first_of(&self.freed));
        if let Some((_, call)) = met.max_by_key(|(index, _)| *index) {
            return Err(used_up(Some(call)));
        }
        if retain_graph {
            return Ok(self.saved.clone());
        }
        self.freed.extend(wanted.iter().flat_map(|tape| tape.calls.keys()));
        if all.iter().all(|tape| tape.first_of(&self.freed).is_some()) {
            Ok(std::mem::take(&mut self.saved))
        } else {
            Ok(self.saved.clone())
        }
    }
}

/// The error that eager gives where a pass comes to tape that was used up.
fn used_up(call: Option<TapeCall>) -> Error {
    match call {
        Some(TapeCall { op: Some(op), loc }) => Error::op(&format!("backward of {op}"), Why::Freed, loc),
        Some(TapeCall { op: None, loc }) => Error::op("compiled backward", Why::Freed, loc),
        None => Error::op("compiled backward", Why::Freed, Loc::UNKNOWN),
    }
}

/// The node on the tape of a result whose own tape was used up inside the segment, there first.
struct UsedUp(Option<TapeCall>);

impl TapeFunction for UsedUp {
    fn name(&self) -> &str {
        "compiled backward"
    }

    fn backward(&self, _: &[Option<Tensor>], _: bool) -> Result<Vec<Option<Tensor>>> {
        Err(used_up(self.0.clone()))
    }

    fn goes_through(&self) -> bool {
        false
    }
}

impl TapeFunction for CompiledBackward {
    fn name(&self) -> &str {
        "compiled backward"
    }

    fn goes_through(&self) -> bool {
        let kept = self.kept.lock();
        let unchanged = |value: &SavedValue| match value {
            SavedValue::Number(_) => true,
            SavedValue::Tensor(tensor, version) => {
                tensor.try_ready().is_some_and(|ready| ready.storage().version() == *version)
            }
        };
        kept.freed.is_empty() && kept.saved.iter().all(unchanged)
    }

    fn backward(&self, grads: &[Option<Tensor>], retain_graph: bool) -> Result<Vec<Option<Tensor>>> {
        let tapes = &self.backward.tapes;
        let given = tapes.iter().zip(grads).filter(|(_, grad)| grad.is_some());
        let wanted: Vec<&Tape> = given.map(|(tape, _)| tape).collect();
        let saved = self.kept.lock().take(tapes, &wanted, retain_graph)?;
        let read = |i: usize| match &saved[i] {
            SavedValue::Number(x) => Ok(GraphValue::Number(*x)),
            SavedValue::Tensor(tensor, version) => match tensor.ready()?.storage().version() {
                now if now != *version => {
                    let (why, (_, loc)) = (Why::Version { saved: *version, now }, &self.backward.saved[i]);
                    Err(Error::op("compiled backward", why, *loc))
                }
                _ => Ok(GraphValue::Tensor(tensor.clone())),
            },
        };
        if let Some(graph) = self.backward.partial.as_ref().filter(|_| wanted.len() < tapes.len()) {
            let results = graph::run_sparse(graph, saved.len(), &read, grads)?;
            // An input that only other results were computed from gets no gradient, rather than zeros.
            let reached = |variable: &Variable| wanted.iter().any(|tape| tape.inputs.contains(variable));
            let gradient = |(variable, result): &(Variable, usize)| {
                reached(variable).then(|| results[*result].clone()).flatten()
            };
            return Ok(self.backward.grads.iter().map(gradient).collect());
        }
        let mut values = (0..saved.len()).map(read).collect::<Result<Vec<_>>>()?;
        for grad in grads.iter().flatten() {
            // Backward was compiled for dense gradients.
            let dense = grad.ready()?.layout().is_contiguous();
            values.push(GraphValue::Tensor(if dense { grad.clone() } else { grad.clone_tensor()? }));
        }
        let results = run_on_values(&self.backward.code, &values)?;
        Ok(self.backward.grads.iter().map(|(_, result)| Some(results[*result].clone())).collect())
    }
}

fn run_on_values(code: &Code, values: &[GraphValue]) -> Result<Vec<Tensor>> {
    match code {
        Code::Graph(graph) => graph::run_functional(graph, values),
        Code::Plan(plan) => plan.run(values),
        Code::Custom(custom) => Ok(custom.run(values)?.into_iter().map(Tensor::from_ready).collect()),
        Code::Program(program) => {
            let number = |i: usize| match &values[i] {
                GraphValue::Number(x) => Some(*x),
                GraphValue::Tensor(_) | GraphValue::List(_) => None,
            };
            let mut scalars = Vec::new();
            program.executable.numbers().fill(&number, &mut scalars)?;
            let inputs = values.iter().map(|value| match value {
                GraphValue::Tensor(t) => Some(t),
                _ => None,
            });
            let mut results = Vec::with_capacity(program.outputs.len());
            program.executable.run(inputs, &scalars, &mut results).map_err(|failure| match failure {
                Failure::Error(error) | Failure::Refused(error) => error,
                Failure::Status { .. } => {
                    let why = Why::Other("an index is out of range".into());
                    Error::op("compiled backward", why, Loc::UNKNOWN)
                }
            })?;
            Ok(results.into_iter().map(Tensor::from_ready).collect())
        }
    }
}
