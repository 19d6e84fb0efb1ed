//! Events: what a program did, one step of a recording each.

use std::sync::Arc;

use smallvec::SmallVec;

use kiln_aot::trace::{GradTarget, Variable};
use kiln_ir::{Loc, Op, ScalarKind, Ty};

use crate::guard::Guard;

/// An operand as it is compared: which variable, or what kind of number.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum KeyArg {
    Variable(Variable),
    /// Kind and class of a number; its value is a hole.
    Number(ScalarKind, u8),
}

/// What an op made.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Made {
    /// Nothing: it changed its first operand; whether gradients flow through that now, and through which others
    /// that have the same memory.
    Changed { requires_grad: bool, alike: SmallVec<[Variable; 2]> },
    /// A variable of this type.
    Variable { ty: Ty, requires_grad: bool },
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct CallEvent {
    pub(crate) op: Op,
    pub(crate) args: SmallVec<[KeyArg; 4]>,
    pub(crate) in_place: bool,
    pub(crate) grad_enabled: bool,
    /// The inputs first used here, in the order of their numbers.
    pub(crate) guards: SmallVec<[Guard; 1]>,
    pub(crate) made: Made,
    pub(crate) loc: Loc,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct BackwardEvent {
    /// What is differentiated, and from which gradient, if not from one.
    pub(crate) outputs: SmallVec<[(Variable, Option<Variable>); 1]>,
    pub(crate) retain_graph: bool,
    /// Leaves that get a gradient, and inputs. Those with a tape of their own outside are marked.
    pub(crate) targets: Vec<(Variable, GradTarget, bool)>,
    pub(crate) guards: SmallVec<[Guard; 1]>,
    pub(crate) loc: Loc,
}

/// What `grad` was asked for: compared at once on replay.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct GradKey {
    /// What is differentiated, and from which gradient, if not from one.
    pub(crate) outputs: SmallVec<[(Variable, Option<Variable>); 1]>,
    pub(crate) inputs: SmallVec<[Variable; 4]>,
    pub(crate) retain_graph: bool,
    pub(crate) create_graph: bool,
    pub(crate) allow_unused: bool,
    /// Set if it is a step of a longer pass.
    pub(crate) step: Option<StepKey>,
}

/// Which step of a pass that user code takes part in (see `steps.rs`).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct StepKey {
    /// What the whole pass is for: these variables, or (`None`) the gradients of leaves.
    pub(crate) toward: Option<SmallVec<[Variable; 4]>>,
    /// Whether the whole pass keeps the tape.
    pub(crate) retain_graph: bool,
    /// Whether an input that the outputs don't depend on is no error.
    pub(crate) allow_unused: bool,
    /// The custom function whose results are asked for; `None` for the last step.
    pub(crate) function: Option<u32>,
}

/// Something that was told of a variable.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct MarkEvent {
    pub(crate) mark: Mark,
    pub(crate) variable: Variable,
    pub(crate) loc: Loc,
}

#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Mark {
    /// `requires_grad_()` of a leaf.
    RequiresGrad(bool),
    /// `retain_grad()`.
    Retain,
    /// Somebody will look at the gradient from outside: a hook, or a `grad()` that is not captured.
    Watch,
}

impl Mark {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Mark::RequiresGrad(_) => "requires_grad_",
            Mark::Retain => "retain_grad",
            Mark::Watch => "watch",
        }
    }
}

/// A custom function was applied; the ops of its forward came before.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct ApplyEvent {
    /// The name of the function that was met here first.
    pub(crate) name: Arc<str>,
    pub(crate) inputs: SmallVec<[Variable; 2]>,
    /// The results that carry gradients.
    pub(crate) outputs: SmallVec<[Variable; 1]>,
    pub(crate) guards: SmallVec<[Guard; 1]>,
    pub(crate) loc: Loc,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct GradEvent {
    pub(crate) key: GradKey,
    /// The gradients: `None` where the outputs don't depend on the input, otherwise whether gradients flow
    /// through it. Those that are there become variables in this order.
    pub(crate) found: SmallVec<[Option<bool>; 4]>,
    /// The inputs of the segment that gradients reach, wanted or not, and whether each is a leaf.
    pub(crate) reached: Vec<(Variable, bool)>,
    pub(crate) guards: SmallVec<[Guard; 1]>,
    pub(crate) loc: Loc,
}

impl GradEvent {
    /// What each gradient becomes, if `first` is the number of the next variable.
    pub(crate) fn results(&self, first: Variable) -> Vec<Option<Variable>> {
        let mut next = first;
        let mut number = |found: &Option<bool>| {
            found.map(|_| {
                next += 1;
                next - 1
            })
        };
        self.found.iter().map(&mut number).collect()
    }
}

/// One step of a recording.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Event {
    /// The beginning.
    Start,
    Call(CallEvent),
    Backward(BackwardEvent),
    Grad(GradEvent),
    Mark(MarkEvent),
    Apply(ApplyEvent),
    /// Values were needed here: a new segment begins.
    Break,
}

impl Event {
    /// The inputs first used by it.
    pub(crate) fn guards(&self) -> &[Guard] {
        match self {
            Event::Start | Event::Break | Event::Mark(_) => &[],
            Event::Call(call) => &call.guards,
            Event::Apply(event) => &event.guards,
            Event::Backward(event) => &event.guards,
            Event::Grad(event) => &event.guards,
        }
    }

    /// The op, or what else it is.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Event::Start => "the start",
            Event::Break => "a graph break",
            Event::Call(call) => call.op.name(),
            Event::Backward(_) => "backward",
            Event::Grad(_) => "grad",
            Event::Mark(event) => event.mark.name(),
            Event::Apply(_) => "custom function",
        }
    }

    /// The user's line.
    pub(crate) fn loc(&self) -> Loc {
        match self {
            Event::Call(call) => call.loc,
            Event::Backward(event) => event.loc,
            Event::Grad(event) => event.loc,
            Event::Mark(event) => event.loc,
            Event::Apply(event) => event.loc,
            Event::Start | Event::Break => Loc::UNKNOWN,
        }
    }

    /// Those inputs, to be changed.
    pub(crate) fn guards_mut(&mut self) -> &mut [Guard] {
        match self {
            Event::Start | Event::Break | Event::Mark(_) => &mut [],
            Event::Call(call) => &mut call.guards,
            Event::Apply(event) => &mut event.guards,
            Event::Backward(event) => &mut event.guards,
            Event::Grad(event) => &mut event.guards,
        }
    }

    /// Whether it is part of a `backward()` that is gone in steps.
    pub(crate) fn delivers_in_steps(&self) -> bool {
        matches!(self, Event::Grad(GradEvent { key: GradKey { step: Some(step), .. }, .. }) if step.toward.is_none())
    }

    /// Whether it is an op with these very attributes.
    pub(crate) fn is_call_of(&self, op: &Op) -> bool {
        matches!(self, Event::Call(call) if call.op == *op)
    }
}
