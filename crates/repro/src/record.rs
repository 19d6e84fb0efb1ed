//! Records a program as a case while it runs eagerly: what it does, what it begins with and what outlives it. Nothing of
//! how compiled functions are captured is used, so mistakes in that show as well.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use kiln_aot::Recording;
use kiln_aot::trace::{Event, GradTarget, InputVariable, Trace, TraceArg, Variable};
use kiln_ir::{Layout, Loc, Op, Result, TensorTy, Ty};
use kiln_tensor::autograd::{self, Application};
use kiln_tensor::hook::{Access, Arg, Call, GradRequest, Output, Recorder, Scope, Tag};
use kiln_tensor::internal::{ListState, TensorState};
use kiln_tensor::{Tensor, TensorList, execute};

use crate::case::{Case, Input};

/// What became of a program that was to be recorded.
pub struct Recorded<T> {
    /// What it gave, eagerly.
    pub value: T,
    /// The program; why there is none, if there isn't.
    pub case: Result<Case, &'static str>,
}

/// Runs a program eagerly and records it.
pub fn record<T, E>(body: impl FnOnce() -> Result<T, E>) -> Result<Recorded<T>, E> {
    let tracer = Arc::new(Tracer::new());
    let value = {
        let _scope = Scope::enter(tracer.clone());
        body()?
    };
    let case = tracer.state.lock().finish();
    Ok(Recorded { value, case })
}

/// Runs of dynamo count from 1, recordings from the other end.
static NEXT: AtomicU32 = AtomicU32::new(u32::MAX);

struct Tracer {
    run: u32,
    state: Mutex<State>,
}

/// A variable whose tensor may still be held by somebody.
enum Held {
    /// It was there before.
    Input(Tensor),
    Made(Tensor),
    List(TensorList),
    /// Nobody has it any more.
    Gone,
}

#[derive(Default)]
struct State {
    run: u32,
    trace: Trace,
    held: Vec<Held>,
    case: Case,
    memories: Vec<(usize, Variable)>,
    /// Items of lists that were made, by their number behind [`ITEMS`]: which list, and which item.
    items: Vec<(Variable, usize)>,
    /// By address, the lists that are known.
    lists: BTreeMap<usize, Variable>,
    unsupported: Option<&'static str>,
}

/// Tags from here on are items of lists that are no variables yet.
const ITEMS: u32 = 1 << 31;

impl Tracer {
    fn new() -> Tracer {
        let run = NEXT.fetch_sub(1, Ordering::Relaxed);
        Tracer { run, state: Mutex::new(State { run, ..State::default() }) }
    }
}

impl State {
    fn define(&mut self, ty: Ty, input: Option<InputVariable>, held: Held) -> Variable {
        self.held.push(held);
        self.trace.define(ty, input)
    }

    /// The variable that a tensor is; one that is new was there before.
    fn variable(&mut self, tensor: &Tensor) -> Result<Variable> {
        let tag = tensor.tag();
        if tag.run() == self.run && tag.variable() >= ITEMS {
            let (list, index) = self.items[(tag.variable() - ITEMS) as usize];
            let out = self.made(tensor);
            let (op, args) = (Op::ListGet { index }, vec![TraceArg::Variable(list)]);
            self.event(Event::Call {
                op,
                args,
                out: Some(out),
                in_place: false,
                grad_enabled: true,
                loc: Loc::UNKNOWN,
            });
            return Ok(out);
        }
        if tag.run() == self.run {
            return Ok(tag.variable());
        }
        let ready = tensor.ready()?;
        let (layout, memory) = (Arc::new(ready.layout().clone()), ready.storage().address());
        drop(ready);
        let requires_grad = tensor.requires_grad();
        let input = InputVariable { layout, requires_grad, leaf: tensor.is_leaf() };
        let variable = self.define(Ty::Tensor(tensor.ty()), Some(input), Held::Input(tensor.clone()));
        tensor.set_tag(Tag::new(self.run, variable));
        let shares = self.memories.iter().find(|(other, _)| *other == memory).map(|(_, first)| *first);
        if shares.is_none() {
            self.memories.push((memory, variable));
        }
        let values = {
            let _eager = Scope::suspend();
            tensor.detach()?.deep_clone()?.contiguous()?
        };
        self.case.inputs.insert(variable, Input { values, shares });
        Ok(variable)
    }

    /// The variable of a tensor that was just made.
    fn made(&mut self, tensor: &Tensor) -> Variable {
        let variable = self.define(Ty::Tensor(tensor.ty()), None, Held::Made(tensor.clone()));
        tensor.set_tag(Tag::new(self.run, variable));
        variable
    }

    fn list(&mut self, list: &TensorList) -> Result<Variable> {
        if let Some(&known) = self.lists.get(&list.address()) {
            return Ok(known);
        }
        let items = list.items()?;
        let args = items.iter().map(|item| self.variable(item).map(TraceArg::Variable));
        let args = args.collect::<Result<Vec<_>>>()?;
        let ty = Ty::List(items.iter().map(Tensor::ty).collect());
        let out = self.define(ty, None, Held::List(list.clone()));
        self.lists.insert(list.address(), out);
        let (op, loc) = (Op::List {}, Loc::UNKNOWN);
        self.event(Event::Call { op, args, out: Some(out), in_place: false, grad_enabled: true, loc });
        Ok(out)
    }

    fn made_list(&mut self, list: &TensorList) -> Result<Variable> {
        let items = list.items()?;
        let ty = Ty::List(items.iter().map(Tensor::ty).collect());
        let out = self.define(ty, None, Held::List(list.clone()));
        self.lists.insert(list.address(), out);
        for (index, item) in items.iter().enumerate() {
            item.set_tag(Tag::new(self.run, ITEMS + self.items.len() as u32));
            self.items.push((out, index));
        }
        Ok(out)
    }

    fn event(&mut self, event: Event) {
        self.trace.events.push(event);
    }

    /// Lets go of what only the recording still has.
    fn let_go(&mut self, variables: &[Variable]) {
        for &variable in variables {
            if let Held::Made(tensor) = &self.held[variable as usize]
                && tensor.references() == 1
            {
                self.held[variable as usize] = Held::Gone;
            }
        }
    }

    fn args(&mut self, call: &Call<'_>) -> Result<Vec<TraceArg>> {
        let arg = |arg: &Arg<'_>| {
            Ok(match arg {
                Arg::Tensor(tensor) => TraceArg::Variable(self.variable(tensor)?),
                Arg::List(list) => TraceArg::Variable(self.list(list)?),
                Arg::Number(number) => {
                    self.trace.numbers.push(number.kind());
                    self.case.numbers.push(*number);
                    TraceArg::Number(self.trace.numbers.len() as u32 - 1)
                }
            })
        };
        call.args.iter().map(arg).collect()
    }

    /// The leaves that are known, and the gradients that they have.
    fn leaves(&self) -> Vec<(Variable, Tensor)> {
        let tensor = |held: &Held| match held {
            Held::Input(tensor) | Held::Made(tensor) => Some(tensor.clone()),
            Held::List(_) | Held::Gone => None,
        };
        let leaves = (0..).zip(&self.held).filter_map(|(variable, held)| Some((variable, tensor(held)?)));
        leaves.filter(|(_, tensor)| tensor.requires_grad() && tensor.is_leaf()).collect()
    }

    fn outputs(&mut self, request: &GradRequest<'_>) -> Result<Vec<(Variable, Option<Variable>)>> {
        let mut outputs = Vec::new();
        for (number, output) in request.outputs.iter().enumerate() {
            let weight = request.weights.get(number).copied().flatten();
            let weight = weight.map(|weight| self.variable(weight)).transpose()?;
            outputs.push((self.variable(output)?, weight));
        }
        Ok(outputs)
    }

    /// The case.
    fn finish(&mut self) -> Result<Case, &'static str> {
        if let Some(why) = self.unsupported {
            return Err(why);
        }
        // Views hold what they are views of: the last go first.
        let all: Vec<Variable> = (0..self.held.len() as Variable).rev().collect();
        self.let_go(&all);
        let mut live = Vec::new();
        for (variable, held) in (0..).zip(&self.held) {
            let is_live = match held {
                Held::Made(tensor) => tensor.references() > 1,
                Held::List(list) => {
                    let made = self.trace.events.iter().any(|event| {
                        matches!(event, Event::Call { op: Op::List {}, out: Some(out), .. } if *out == variable)
                    });
                    let items = list.try_items().unwrap_or_default();
                    !made && (list.references() > 1 || items.iter().any(|item| item.references() > 1))
                }
                Held::Input(_) | Held::Gone => false,
            };
            if is_live {
                live.push(variable);
            }
        }
        let mut case = std::mem::take(&mut self.case);
        case.recording = Recording { trace: std::mem::take(&mut self.trace), live };
        Ok(case)
    }
}

impl Recorder for Tracer {
    fn call(&self, call: &Call<'_>) -> Result<Output> {
        let mut state = self.state.lock();
        let args = state.args(call)?;
        let _eager = Scope::suspend();
        let output = execute(call)?;
        let out = match &output {
            _ if call.in_place => None,
            Output::Tensor(tensor) if tensor.tag().run() == self.run => {
                // An op that has nothing to do gives its operand.
                let ty = Ty::Tensor(tensor.ty());
                let held = Held::Gone;
                Some(state.define(ty, None, held))
            }
            Output::Tensor(tensor) => Some(state.made(tensor)),
            Output::List(list) => Some(state.made_list(list)?),
        };
        let used: Vec<Variable> = args
            .iter()
            .filter_map(|arg| if let TraceArg::Variable(variable) = arg { Some(*variable) } else { None })
            .collect();
        let Call { op, in_place, grad_enabled, loc, .. } = *call;
        state.event(Event::Call { op: op.clone(), args, out, in_place, grad_enabled, loc });
        state.let_go(&used);
        Ok(output)
    }

    fn backward(&self, request: &GradRequest<'_>) -> Result<()> {
        let mut state = self.state.lock();
        let outputs = state.outputs(request)?;
        let leaves = state.leaves();
        if leaves.iter().any(|(_, leaf)| leaf.has_hooks()) {
            state.unsupported = Some("hooks run code of the program's");
        }
        let mut before = Vec::new();
        for (variable, leaf) in leaves {
            let grad = leaf.grad();
            let known = grad.as_ref().map(|grad| state.variable(grad)).transpose()?;
            let version = grad.map(|grad| Ok::<u64, kiln_ir::Error>(grad.ready()?.storage().version()));
            before.push((variable, leaf, known, version.transpose()?));
        }
        let _eager = Scope::suspend();
        autograd::run_backward(request)?;
        let mut targets = Vec::new();
        for (variable, leaf, known, version) in before {
            let Some(grad) = leaf.grad() else { continue };
            let now = grad.ready()?.storage().version();
            match known {
                Some(_) if version == Some(now) => {}
                Some(existing) => targets.push((variable, GradTarget::Accumulate(existing))),
                None => targets.push((variable, GradTarget::New(state.made(&grad)))),
            }
        }
        let (retain_graph, loc) = (request.retain_graph, request.loc);
        state.event(Event::Backward { outputs, targets, retain_graph, loc });
        Ok(())
    }

    fn grad(&self, request: &GradRequest<'_>) -> Result<Option<Vec<Option<Tensor>>>> {
        let mut state = self.state.lock();
        let outputs = state.outputs(request)?;
        let inputs = request.inputs.iter().map(|input| state.variable(input)).collect::<Result<Vec<_>>>()?;
        let _eager = Scope::suspend();
        let found = autograd::run_grad(request)?;
        let results = found.iter().map(|found| found.as_ref().map(|found| state.made(found))).collect();
        let GradRequest { retain_graph, create_graph, loc, .. } = *request;
        state.event(Event::Grad { outputs, inputs, results, retain_graph, create_graph, made: false, loc });
        Ok(Some(found))
    }

    fn requires_grad(&self, tensor: &Tensor, on: bool, loc: Loc) -> Result<()> {
        let mut state = self.state.lock();
        let variable = state.variable(tensor)?;
        state.event(Event::RequiresGrad { variable, on, loc });
        Ok(())
    }

    fn retain_grad(&self, tensor: &Tensor, loc: Loc) -> Result<bool> {
        let mut state = self.state.lock();
        let variable = state.variable(tensor)?;
        state.event(Event::Retain { variable, loc });
        Ok(false)
    }

    fn begin_function(&self, _: &str, _: &[&Tensor], _: Loc) -> Result<bool> {
        self.state.lock().unsupported = Some("custom functions run code of the program's");
        Ok(false)
    }

    fn apply(&self, application: Application<'_>) -> Result<()> {
        application.put_on_tape();
        Ok(())
    }

    fn access(&self, tensor: &Tensor, access: Access, _: &'static str, loc: Loc) -> Result<()> {
        let mut state = self.state.lock();
        match access {
            Access::Read | Access::Print if tensor.tag().run() == self.run => {
                let variable = state.variable(tensor)?;
                state.event(Event::Read { variable, loc });
            }
            Access::Write => state.unsupported = Some("the program writes into a tensor by itself"),
            Access::Read | Access::Print | Access::State | Access::Tape => {}
        }
        Ok(())
    }

    fn ty(&self, _: &Tensor) -> Option<TensorTy> {
        None
    }

    fn layout(&self, _: &Tensor) -> Option<Layout> {
        None
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }

    fn force(&self) -> Result<()> {
        Ok(())
    }
}
