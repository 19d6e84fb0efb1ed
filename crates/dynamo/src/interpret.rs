//! Running a recorded segment op by op: what happens when a call ends early, when something can't be
//! compiled, and what the `eager` backend always does.

use smallvec::SmallVec;

use kiln_aot::trace::GradTarget;
use kiln_ir::{Error, Op, Result, Scalar};
use kiln_tensor::hook::{Arg, Call, GradRequest, Output};
use kiln_tensor::internal::{ListState, TensorState};
use kiln_tensor::{Tensor, autograd, enable_grad, execute, no_grad};

use crate::event::{BackwardEvent, CallEvent, Event, GradEvent, GradKey, KeyArg, Made, Mark, MarkEvent};
use crate::region::Site;
use crate::state::{Held, State, recordings};
use crate::trie::Trie;

/// Executes the pending events of a run; every variable becomes ready.
pub(crate) fn run(site: &Site, state: &mut State) -> Result<()> {
    let aside = state.aside.clone();
    let trie = recordings(&aside, site);
    let path = trie.path(state.at);
    let mut numbers = state.numbers.iter().copied();
    // In-place ops marked their targets when they were recorded; executing them gives those their history.
    for &index in &path {
        if let Event::Call(CallEvent { made: Made::Changed { requires_grad: true, .. }, args, .. }) =
            &*trie.node(index).event
            && let Some(KeyArg::Variable(target)) = args.first()
            && let Some(target) = state.input(*target)
            && target.is_leaf()
        {
            target.mark_requires_grad(false);
        }
    }
    let told = forget_told(trie, &path, state);
    // Variables are numbered in the order in which events bring and make them.
    let mut next = 0usize;
    // Gradients that `backward` put in place are taken away until their turn comes.
    let parked = park_gradients(trie, &path, state);
    let mut outcome = Ok(());
    let (mut walked, mut applied) = (false, 0);
    for &index in &path {
        let done = match &*trie.node(index).event {
            Event::Start | Event::Break => Ok(()),
            Event::Call(event) => call(event, state, &mut numbers, &mut next),
            Event::Backward(event) => {
                walked |= event.targets.iter().any(|(_, _, outside)| *outside);
                backward(event, state, &mut next)
            }
            Event::Grad(event) => grad(event, state, &mut next),
            Event::Mark(event) => mark(event, state),
            Event::Apply(event) => {
                next += event.guards.len();
                state.put_on_tape(applied);
                applied += 1;
                Ok(())
            }
        };
        if done.is_err() {
            outcome = done;
            break;
        }
    }
    restore_gradients(parked);
    if outcome.is_err() {
        drop_lazy_gradients(state);
    }
    told.iter().for_each(|(leaf, on)| leaf.mark_requires_grad(*on));
    state.walked |= walked;
    outcome
}

/// Inputs that were told whether they require a gradient are as they came, until their turn comes. Returns what
/// they are now.
fn forget_told(trie: &Trie, path: &[u32], state: &State) -> Vec<(Tensor, bool)> {
    let mut told: Vec<(Tensor, bool)> = Vec::new();
    for &index in path {
        if let Event::Mark(MarkEvent { mark: Mark::RequiresGrad(on), variable, .. }) =
            &*trie.node(index).event
            && let Some(leaf) = state.input(*variable)
            && !told.iter().any(|(other, _)| other.same(leaf))
        {
            told.push((leaf.clone(), leaf.requires_grad()));
            leaf.mark_requires_grad(!on);
        }
    }
    told
}

fn mark(event: &MarkEvent, state: &State) -> Result<()> {
    let tensor = tensor(state, event.variable)?;
    match event.mark {
        Mark::RequiresGrad(on) => tensor.mark_leaf(on),
        // Passes in steps see to what is retained themselves; others are the tape's.
        Mark::Retain => tensor.watch_for_retained(),
        Mark::Watch => {}
    }
    Ok(())
}

/// A leaf and what its `grad` is now.
struct Parked {
    leaf: Tensor,
    now: Option<Tensor>,
}

fn park_gradients(trie: &Trie, path: &[u32], state: &State) -> Vec<Parked> {
    let mut parked: Vec<Parked> = Vec::new();
    for &index in path {
        let Event::Backward(event) = &*trie.node(index).event else { continue };
        for &(input, _, outside) in &event.targets {
            if let (false, Some(leaf)) = (outside, state.held(input))
                && !parked.iter().any(|p| p.leaf.same(leaf))
            {
                parked.push(Parked { leaf: leaf.clone(), now: leaf.grad() });
                leaf.set_grad(None);
            }
        }
    }
    parked
}

/// A segment failed: a gradient that was never computed is no gradient.
pub(crate) fn drop_lazy_gradients(state: &State) {
    for variable in 0..state.variables.len() as u32 {
        if let Some(leaf) = state.held(variable)
            && leaf.grad().is_some_and(|grad| grad.is_lazy())
        {
            leaf.set_grad(None);
        }
    }
}

fn restore_gradients(parked: Vec<Parked>) {
    for Parked { leaf, now } in parked {
        // A gradient that was never computed is no gradient.
        leaf.set_grad(now.filter(|grad| !grad.is_lazy()));
    }
}

fn tensor(state: &State, variable: u32) -> Result<&Tensor> {
    state.held(variable).ok_or_else(lost)
}

#[track_caller]
fn lost() -> Error {
    Error::bug("a variable of a recording is missing")
}

fn call(
    event: &CallEvent,
    state: &State,
    numbers: &mut impl Iterator<Item = Scalar>,
    next: &mut usize,
) -> Result<()> {
    *next += event.guards.len();
    if let Made::Variable { .. } = event.made {
        *next += 1;
    }
    if matches!(event.op, Op::List {}) {
        return Ok(()); // packing: the list is there already
    }
    let made = *next - 1;
    let args: SmallVec<[Arg<'_>; 4]> = event
        .args
        .iter()
        .map(|arg| {
            Ok(match arg {
                KeyArg::Number(..) => Arg::Number(numbers.next().ok_or_else(lost)?),
                KeyArg::Variable(v) => match state.variables.get(*v as usize) {
                    Some(Held::List(list)) => Arg::List(list),
                    _ => Arg::Tensor(tensor(state, *v)?),
                },
            })
        })
        .collect::<Result<_>>()?;
    let _mode = if event.grad_enabled { enable_grad() } else { no_grad() };
    let op = Call {
        op: &event.op,
        args: &args,
        in_place: event.in_place,
        grad_enabled: event.grad_enabled,
        loc: event.loc,
    };
    let output = execute(&op)?;
    match (&event.made, output) {
        (Made::Changed { .. }, _) => Ok(()),
        (Made::Variable { .. }, Output::Tensor(result)) => tensor(state, made as u32)?.adopt(&result),
        (Made::Variable { .. }, Output::List(result)) => match state.variables.get(made) {
            Some(Held::List(list)) => {
                list.publish(result.items()?.to_vec());
                Ok(())
            }
            _ => Err(lost()),
        },
    }
}

fn backward(event: &BackwardEvent, state: &State, next: &mut usize) -> Result<()> {
    *next += event.guards.len();
    let outputs =
        event.outputs.iter().map(|(output, _)| tensor(state, *output)).collect::<Result<Vec<_>>>()?;
    let weights = event.outputs.iter().map(|(_, weight)| weight.map(|w| tensor(state, w)).transpose());
    let weights = weights.collect::<Result<Vec<_>>>()?;
    // What each leaf's gradient was when the program came here, whatever it put there since.
    for &(input, target, _) in event.targets.iter().filter(|(_, _, outside)| !outside) {
        let existing = match target {
            GradTarget::New(_) => None,
            GradTarget::Accumulate(existing) => Some(tensor(state, existing)?.clone()),
        };
        tensor(state, input)?.set_grad(existing);
    }
    // Inputs with a tape outside: the eager engine walks on through it by itself (see `State::walked`); their
    // variables get a zero that adds nothing.
    autograd::run_backward(&GradRequest {
        outputs: &outputs,
        inputs: &[],
        weights: &weights,
        retain_graph: event.retain_graph,
        create_graph: false,
        allow_unused: true,
        quiet: false,
        closed: &[],
        loc: event.loc,
    })?;
    for &(input, target, outside) in &event.targets {
        let GradTarget::New(variable) = target else { continue };
        *next += 1;
        let (leaf, made) = (tensor(state, input)?, tensor(state, variable)?);
        let grad = match (outside, leaf.grad()) {
            (false, Some(grad)) => grad,
            _ => leaf.zeros_like()?,
        };
        made.adopt(&grad)?;
        if !outside {
            leaf.set_grad(Some(made.clone()));
        }
    }
    Ok(())
}

fn grad(event: &GradEvent, state: &State, next: &mut usize) -> Result<()> {
    *next += event.guards.len();
    let results = event.results(*next as u32);
    *next += results.iter().flatten().count();
    let GradKey { outputs, inputs, retain_graph, create_graph, allow_unused, step } = &event.key;
    let tensors = |variables: &mut dyn Iterator<Item = u32>| -> Result<Vec<&Tensor>> {
        variables.map(|v| tensor(state, v)).collect()
    };
    let weights = outputs.iter().map(|(_, weight)| weight.map(|w| tensor(state, w)).transpose());
    let request = GradRequest {
        outputs: &tensors(&mut outputs.iter().map(|(output, _)| *output))?,
        inputs: &tensors(&mut inputs.iter().copied())?,
        weights: &weights.collect::<Result<Vec<_>>>()?,
        retain_graph: *retain_graph,
        create_graph: *create_graph,
        allow_unused: *allow_unused,
        quiet: step.is_some(),
        closed: &[],
        loc: event.loc,
    };
    for (grad, result) in autograd::run_grad(&request)?.iter().zip(results) {
        match (grad, result) {
            (Some(grad), Some(variable)) => tensor(state, variable)?.adopt(grad)?,
            (None, None) => {}
            _ => return Err(lost()),
        }
    }
    Ok(())
}
