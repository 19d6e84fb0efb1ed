//! Passes over the tape: `backward()` and `grad()` expanded into ops, by the rows' gradient rules.
//!
//! The tape of a translation is the graph so far: the nodes that were recorded and that history flows through.
//! A pass with `create_graph` is on the tape itself, so a later pass differentiates through what it emitted.

use smallvec::SmallVec;

use kiln_ir::{Class, EmitExt, Error, Fault, Grad, Op, Result, Ty, Value, Why, differentiate, planted};

use crate::functionalise::Translator;
use crate::trace::{GradTarget, Trace, Variable};

/// What is differentiated, and from which gradient, if not from one.
pub type Output = (Variable, Option<Variable>);

/// What a pass at the end of a trace meets.
#[derive(Clone, PartialEq, Debug)]
pub struct Survey {
    /// The trace's inputs that gradients reach, and the leaves and results of custom functions made in it.
    pub inputs: Vec<Variable>,
    /// Whether an earlier pass used up some of the tape.
    pub used_up: bool,
    /// Per variable asked for: `None` if the outputs don't depend on it, otherwise whether its gradient is on
    /// the tape.
    pub found: Vec<Option<bool>>,
}

/// What `backward()` on some variables would meet at the end of a trace.
pub fn survey_backward(trace: &Trace, outputs: &[Output]) -> Result<Survey> {
    let mut t = Translator::of(trace)?;
    let roots = outputs.iter().map(|(root, _)| t.read(*root)).collect::<Result<Vec<_>>>()?;
    let visit = t.visit(&roots, None);
    Ok(Survey { inputs: visit.inputs, used_up: t.any_used_up(&visit.nodes), found: Vec::new() })
}

/// What `grad()` would meet and find at the end of a trace; see [`Event::Grad`](crate::trace::Event) for `made`.
pub fn survey_grad(
    trace: &Trace,
    outputs: &[Output],
    (inputs, made): (&[Variable], bool),
    create_graph: bool,
) -> Result<Survey> {
    let mut t = Translator::of(trace)?;
    let roots = outputs.iter().map(|(root, _)| t.read(*root)).collect::<Result<Vec<_>>>()?;
    let wanted = inputs.iter().map(|input| t.wanted(*input, made)).collect::<Result<Vec<_>>>()?.concat();
    let reached = t.visit(&roots, None).inputs;
    let used_up = t.any_used_up(&t.visit(&roots, Some(&wanted)).nodes);
    let grads = t.gradients(outputs, (inputs, made), true, create_graph)?;
    let found = grads.into_iter().map(|grad| grad.map(|value| t.requires[value.index()])).collect();
    Ok(Survey { inputs: reached, used_up, found })
}

/// Where a pass goes.
struct Visit {
    /// The nodes that it differentiates.
    nodes: Vec<usize>,
    /// The trace's inputs that it reaches, and the leaves and results of custom functions made in it.
    inputs: Vec<Variable>,
}

impl Translator<'_> {
    /// Per node: whether it is on the tape.
    fn tape(&self) -> Vec<bool> {
        // A list counts, so that a gradient that ends in one is an error and not silently lost.
        let flows = |v: &Value| matches!(self.graph.ty(*v), Ty::List(_)) || self.requires[v.index()];
        let nodes = self.graph.nodes.iter().zip(&self.recorded);
        nodes.map(|(node, &recorded)| recorded && node.outs.iter().any(flows)).collect()
    }

    /// Where a pass from some values goes; with `wanted`, only where it leads to one of them.
    fn visit(&self, roots: &[Value], wanted: Option<&[Value]>) -> Visit {
        let tape = self.tape();
        let mut leads = vec![wanted.is_none(); self.graph.value_count()];
        for value in wanted.into_iter().flatten() {
            leads[value.index()] = true;
        }
        let mut useful = vec![wanted.is_none(); tape.len()];
        if wanted.is_some() {
            for (index, node) in self.graph.nodes.iter().enumerate().filter(|(index, _)| tape[*index]) {
                useful[index] = node.args.iter().any(|v| leads[v.index()]);
                if useful[index] {
                    node.outs.iter().for_each(|v| leads[v.index()] = true);
                }
            }
        }
        let mut reached = vec![false; self.graph.value_count()];
        roots.iter().for_each(|v| reached[v.index()] = true);
        let mut nodes = Vec::new();
        for (index, node) in self.graph.nodes.iter().enumerate().rev() {
            if tape[index] && useful[index] && node.outs.iter().any(|v| reached[v.index()]) {
                nodes.push(index);
                for v in node.args.iter().filter(|v| self.requires[v.index()]) {
                    reached[v.index()] = true;
                }
            }
        }
        let arrives = |v: &Value| reached[v.index()] && self.requires[v.index()];
        let inputs = self.bases.iter().filter(|base| base.leaf_values.iter().any(arrives));
        let mut inputs: Vec<Variable> = inputs.filter_map(|base| base.leaf).collect();
        let roots = self.roots.iter().filter(|(_, root)| root.values.iter().any(arrives));
        inputs.extend(roots.map(|(variable, _)| *variable));
        inputs.sort_unstable();
        Visit { nodes, inputs }
    }

    fn any_used_up(&self, nodes: &[usize]) -> bool {
        nodes.iter().any(|&node| self.used_up.get(node).copied().unwrap_or(false))
    }

    /// Of the tape of a value: whether some of it was used up, and whether some belongs to an earlier pass.
    pub(crate) fn passed(&self, value: Value) -> (bool, bool) {
        if !self.requires[value.index()] || (self.used_up.is_empty() && self.twice.is_empty()) {
            return (false, false);
        }
        let nodes = self.visit(&[value], None).nodes;
        let twice = nodes.iter().any(|&node| self.twice.get(node).copied().unwrap_or(false));
        (self.any_used_up(&nodes), twice)
    }

    /// A pass without `retain_graph` uses up what it visits.
    fn use_up(&mut self, roots: &[Value], wanted: Option<&[Value]>) {
        let visit = self.visit(roots, wanted);
        self.used_up.resize(self.graph.nodes.len(), false);
        visit.nodes.iter().for_each(|&node| self.used_up[node] = true);
    }

    /// The gradient from which a pass starts.
    fn seed(&mut self, root: Value, gradient: Option<Variable>) -> Result<Value> {
        let seed = match gradient {
            Some(gradient) => self.read(gradient)?,
            None => {
                let ty = self.graph.tensor_ty(root);
                let one = self.graph.number(1.0)?;
                self.graph.full(one, ty.shape, ty.dtype, ty.device)?
            }
        };
        self.note();
        Ok(seed)
    }

    /// Emits a pass; one gradient per entry of `wanted`, `None` where none arrives.
    fn pass(
        &mut self,
        seeds: &[(Value, Value)],
        wanted: &[SmallVec<[Value; 1]>],
        create_graph: bool,
    ) -> Result<Vec<Option<Value>>> {
        let flat: Vec<Value> = wanted.iter().flatten().copied().collect();
        let (tape, loc, first) = (self.tape(), self.graph.loc, self.graph.nodes.len());
        let grads = differentiate(&mut self.graph, seeds, &flat, &|node| tape.get(node) == Some(&true))?;
        self.graph.loc = loc;
        self.recording = create_graph;
        self.note();
        let mut grads = grads.into_iter();
        let mut totals = Vec::with_capacity(wanted.len());
        for values in wanted {
            let mut total: Option<Value> = None;
            for grad in grads.by_ref().take(values.len()).flatten() {
                total = Some(match total {
                    None => grad,
                    Some(sum) => self.emit(Op::Add {}, &[sum, grad])?,
                });
            }
            // A value that was there before, such as the seed, may have a history; a plain gradient has none.
            totals.push(match total {
                Some(value) if !create_graph && self.requires[value.index()] => {
                    Some(self.emit(Op::Detach {}, &[value])?)
                }
                total => total,
            });
        }
        self.recording = false;
        if create_graph {
            self.check_again(first)?;
            self.twice.resize(first, false);
            self.twice.resize(self.graph.nodes.len(), true);
        }
        Ok(totals)
    }

    /// What a pass put on the tape must have a gradient, as in eager mode, where the tape is made at once.
    fn check_again(&self, first: usize) -> Result<()> {
        for node in &self.graph.nodes[first..] {
            if let Grad::NotDifferentiable(reason) = node.op.row().grad
                && node.args.iter().any(|v| self.requires[v.index()])
            {
                return Err(Error::op(node.op.name(), Why::NotDifferentiable { reason }, node.loc));
            }
        }
        Ok(())
    }

    /// `grad()`: the gradients of some variables, `None` where the outputs don't depend on them.
    pub(crate) fn gradients(
        &mut self,
        outputs: &[Output],
        (inputs, made): (&[Variable], bool),
        retain_graph: bool,
        create_graph: bool,
    ) -> Result<Vec<Option<Value>>> {
        self.recording = false;
        let mut seeds = Vec::with_capacity(outputs.len());
        for &(root, weight) in outputs {
            let root = self.read(root)?;
            seeds.push((root, self.seed(root, weight)?));
        }
        let wanted = inputs.iter().map(|input| self.wanted(*input, made)).collect::<Result<Vec<_>>>()?;
        if !retain_graph {
            let roots: Vec<Value> = seeds.iter().map(|(root, _)| *root).collect();
            self.use_up(&roots, Some(&wanted.concat()));
        }
        let first = self.graph.nodes.len();
        let grads = self.pass(&seeds, &wanted, create_graph)?;
        let given = || outputs.iter().any(|(_, weight)| weight.is_some());
        if create_graph && given() && grads.iter().flatten().any(|&grad| self.is_view_of_older(grad, first)) {
            let reason = "a gradient recorded on the tape shares memory with the tensor it was computed from";
            return Err(Error::op("grad", Why::NotCaptured { reason }, self.graph.loc));
        }
        Ok(grads)
    }

    /// Whether a value is, or is a view of, one that no node from `first` on made.
    fn is_view_of_older(&self, value: Value, first: usize) -> bool {
        let mut value = value;
        for node in self.graph.nodes[first..].iter().rev() {
            if node.outs.contains(&value) {
                match (node.op.row().class, node.args.first()) {
                    (Class::View, Some(&source)) => value = source,
                    _ => return false,
                }
            }
        }
        true
    }

    /// `backward()`: gradients are added to those that the leaves have.
    pub(crate) fn backward(
        &mut self,
        outputs: &[Output],
        targets: &[(Variable, GradTarget)],
        retain_graph: bool,
    ) -> Result<()> {
        self.recording = false;
        let mut seeds = Vec::with_capacity(outputs.len());
        for &(root, gradient) in outputs {
            let root = self.read(root)?;
            seeds.push((root, self.seed(root, gradient)?));
        }
        let wanted = targets.iter().map(|(leaf, _)| self.wanted(*leaf, false)).collect::<Result<Vec<_>>>()?;
        if !retain_graph {
            let roots: Vec<Value> = seeds.iter().map(|(root, _)| *root).collect();
            self.use_up(&roots, None);
        }
        let totals = self.pass(&seeds, &wanted, false)?;
        for ((leaf, target), total) in targets.iter().zip(totals) {
            let total = match total {
                Some(total) => total,
                None => {
                    let leaf = self.read(*leaf)?;
                    let ty = self.graph.tensor_ty(leaf);
                    let zero = self.graph.number(0.0)?;
                    let zeros = self.graph.full(zero, ty.shape, ty.dtype, ty.device)?;
                    self.note();
                    zeros
                }
            };
            match target {
                GradTarget::New(variable) => self.define(*variable, total),
                GradTarget::Accumulate(existing) => {
                    let before = self.read(*existing)?;
                    let sum = if planted(Fault::GradientReplaced) {
                        total
                    } else {
                        self.emit(Op::Add {}, &[before, total])?
                    };
                    self.write(*existing, sum)?;
                }
            }
        }
        Ok(())
    }
}
