//! A trace: what a program did, op by op, over variables that it may change in place. Capture records it;
//! [`functionalise`](crate::functionalise) turns it into a graph.

use std::sync::Arc;

use kiln_ir::{Layout, Loc, Op, Scalar, ScalarKind, Ty};

/// A tensor or list that the program held, numbered by first use.
pub type Variable = u32;

/// What is known of a variable that existed before the program began.
#[derive(Clone, PartialEq, Debug)]
pub struct InputVariable {
    /// How its elements lie.
    pub layout: Arc<Layout>,
    /// Whether gradients are wanted for it or flow through it.
    pub requires_grad: bool,
    /// Whether it was made by the user rather than by a differentiated op.
    pub leaf: bool,
}

/// A variable's type and origin.
#[derive(Clone, PartialEq, Debug)]
pub struct VariableInfo {
    /// Its type.
    pub ty: Ty,
    /// Set if it existed before.
    pub input: Option<InputVariable>,
}

/// An operand of a recorded op.
#[derive(Copy, Clone, PartialEq, Debug)]
pub enum TraceArg {
    /// A tensor or list.
    Variable(Variable),
    /// The number in this hole, known when the program runs.
    Number(u32),
    /// A number that is always this one.
    Constant(Scalar),
}

/// Where the gradient of a leaf goes.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum GradTarget {
    /// It becomes this new variable.
    New(Variable),
    /// It is added to this existing one.
    Accumulate(Variable),
}

/// One thing the program did.
#[allow(missing_docs, reason = "most fields are what their names say")]
#[derive(Clone, PartialEq, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "nearly every event is a call; a box would cost it an allocation"
)]
pub enum Event {
    /// An op.
    Call {
        op: Op,
        args: Vec<TraceArg>,
        /// The variable it made; `None` for in-place ops.
        out: Option<Variable>,
        /// Whether it changed its first operand.
        in_place: bool,
        /// Whether gradients were being recorded.
        grad_enabled: bool,
        loc: Loc,
    },
    /// `backward()`.
    Backward {
        /// What is differentiated, and from which gradient, if not from one.
        outputs: Vec<(Variable, Option<Variable>)>,
        /// The leaves that get a gradient, and where it goes.
        targets: Vec<(Variable, GradTarget)>,
        /// Whether the tape is kept for another pass.
        retain_graph: bool,
        loc: Loc,
    },
    /// `grad()`.
    Grad {
        /// What is differentiated, and from which gradient, if not from one.
        outputs: Vec<(Variable, Option<Variable>)>,
        /// The variables whose gradients are asked for.
        inputs: Vec<Variable>,
        /// What each gradient becomes; `None` where the outputs don't depend on the input.
        results: Vec<Option<Variable>>,
        /// Whether the tape is kept for another pass.
        retain_graph: bool,
        /// Whether the pass is on the tape itself.
        create_graph: bool,
        /// Whether what is asked for are results of a custom function, as they were when it made them.
        made: bool,
        loc: Loc,
    },
    /// A leaf was told whether it requires a gradient.
    RequiresGrad {
        variable: Variable,
        /// Whether it does from now on.
        on: bool,
        loc: Loc,
    },
    /// `retain_grad()`.
    Retain { variable: Variable, loc: Loc },
    /// The host looked at a variable: here a graph breaks. Never part of a segment.
    Read { variable: Variable, loc: Loc },
    /// A custom function made these variables, by the ops before: no pass goes further than to them.
    Apply {
        /// Its results that carry gradients.
        outputs: Vec<Variable>,
        loc: Loc,
    },
}

/// What a program did between two points where its values were needed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Trace {
    /// Every variable, by number. Those that are alike, as parameters mostly are, share what is known of them.
    pub variables: Vec<Arc<VariableInfo>>,
    /// Every hole, by number.
    pub numbers: Vec<ScalarKind>,
    /// What happened, in order.
    pub events: Vec<Event>,
}

impl Event {
    /// The user's line.
    pub fn loc(&self) -> Loc {
        match self {
            Event::Call { loc, .. }
            | Event::Backward { loc, .. }
            | Event::Grad { loc, .. }
            | Event::RequiresGrad { loc, .. }
            | Event::Retain { loc, .. }
            | Event::Read { loc, .. }
            | Event::Apply { loc, .. } => *loc,
        }
    }
}

impl Event {
    /// The variables that it makes.
    pub fn made(&self) -> Vec<Variable> {
        match self {
            Event::Call { out, .. } => out.iter().copied().collect(),
            Event::Backward { targets, .. } => {
                let new = |(_, target): &(Variable, GradTarget)| match target {
                    GradTarget::New(new) => Some(*new),
                    GradTarget::Accumulate(_) => None,
                };
                targets.iter().filter_map(new).collect()
            }
            Event::Grad { results, .. } => results.iter().copied().flatten().collect(),
            Event::RequiresGrad { .. } | Event::Retain { .. } | Event::Read { .. } | Event::Apply { .. } => {
                Vec::new()
            }
        }
    }

    /// The variables that it reads or changes.
    pub fn used(&self) -> Vec<Variable> {
        let both = |outputs: &[(Variable, Option<Variable>)]| -> Vec<Variable> {
            outputs.iter().flat_map(|(output, seed)| std::iter::once(*output).chain(*seed)).collect()
        };
        match self {
            Event::Call { args, .. } => {
                let variable = |arg: &TraceArg| match arg {
                    TraceArg::Variable(variable) => Some(*variable),
                    TraceArg::Number(_) | TraceArg::Constant(_) => None,
                };
                args.iter().filter_map(variable).collect()
            }
            Event::Backward { outputs, targets, .. } => {
                let mut used = both(outputs);
                for (leaf, target) in targets {
                    used.push(*leaf);
                    used.extend(match target {
                        GradTarget::Accumulate(existing) => Some(*existing),
                        GradTarget::New(_) => None,
                    });
                }
                used
            }
            Event::Grad { outputs, inputs, .. } => {
                let mut used = both(outputs);
                used.extend(inputs);
                used
            }
            Event::RequiresGrad { variable, .. }
            | Event::Retain { variable, .. }
            | Event::Read { variable, .. } => vec![*variable],
            Event::Apply { outputs, .. } => outputs.clone(),
        }
    }

    /// Gives every variable another number.
    pub fn renumber(&mut self, number: &mut dyn FnMut(Variable) -> Variable) {
        let mut set = |variable: &mut Variable| *variable = number(*variable);
        match self {
            Event::Call { args, out, .. } => {
                for arg in args {
                    if let TraceArg::Variable(variable) = arg {
                        set(variable);
                    }
                }
                out.iter_mut().for_each(set);
            }
            Event::Backward { outputs, targets, .. } => {
                outputs.iter_mut().for_each(|(output, seed)| {
                    set(output);
                    seed.iter_mut().for_each(&mut set);
                });
                targets.iter_mut().for_each(|(leaf, target)| {
                    set(leaf);
                    match target {
                        GradTarget::New(variable) | GradTarget::Accumulate(variable) => set(variable),
                    }
                });
            }
            Event::Grad { outputs, inputs, results, .. } => {
                outputs.iter_mut().for_each(|(output, seed)| {
                    set(output);
                    seed.iter_mut().for_each(&mut set);
                });
                inputs.iter_mut().for_each(&mut set);
                results.iter_mut().flatten().for_each(set);
            }
            Event::RequiresGrad { variable, .. }
            | Event::Retain { variable, .. }
            | Event::Read { variable, .. } => set(variable),
            Event::Apply { outputs, .. } => outputs.iter_mut().for_each(set),
        }
    }
}

impl Event {
    /// An op off the tape; without a new variable it changes its first operand.
    pub fn off_tape(op: Op, args: Vec<TraceArg>, out: Option<Variable>, loc: Loc) -> Event {
        Event::Call { op, args, out, in_place: out.is_none(), grad_enabled: false, loc }
    }
}

impl Trace {
    /// Adds a variable, which existed before if `input` says how.
    pub fn define(&mut self, ty: Ty, input: Option<InputVariable>) -> Variable {
        self.variables.push(Arc::new(VariableInfo { ty, input }));
        self.variables.len() as Variable - 1
    }

    /// The type of an operand.
    pub fn ty(&self, arg: &TraceArg) -> Ty {
        match arg {
            TraceArg::Variable(variable) => self.variables[*variable as usize].ty.clone(),
            TraceArg::Number(number) => Ty::Scalar(self.numbers[*number as usize]),
            TraceArg::Constant(value) => Ty::Scalar(value.kind()),
        }
    }
}
