//! Plays a case: does what its recording says, op by op, through the interface that programs use. Inside a compiled
//! function it is captured and compiled like any program; outside it is eager.

use std::fmt;

use kiln_aot::trace::{Event, GradTarget, InputVariable, TraceArg, Variable};
use kiln_ir::{Class, DType, Emit, Error, Layout, Loc, Op, Result, Scalar, Ty, Value, Values};
use kiln_tensor::graph::GraphValue;
use kiln_tensor::hook::{Arg, Output};
use kiln_tensor::internal::TensorState;
use kiln_tensor::{GradOptions, Tensor, TensorList, backward_all, enable_grad, grad, no_grad, run_op_at};

use crate::case::Case;
use crate::judge::ulp;

/// The numbers to compute with.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Arithmetic {
    /// Those of the program.
    Own,
    /// Doubles in place of every other float: what the program means.
    Wide,
    /// The program's, each result off by a unit in the last place, at random: what rounding may do to it.
    Noisy(u64),
}

/// Where something can be seen when a program is over.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// A variable that is still held; of a list, one of its items.
    Live(Variable, usize),
    /// An input, which may have been changed.
    Input(Variable),
    /// The gradient of an input, by the program's own passes and by one from all results that left with gradients.
    Gradient(Variable),
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Seen::Live(variable, 0) => write!(f, "%{variable}"),
            Seen::Live(variable, item) => write!(f, "%{variable}[{item}]"),
            Seen::Input(variable) => write!(f, "input %{variable} afterwards"),
            Seen::Gradient(variable) => write!(f, "the gradient of %{variable}"),
        }
    }
}

/// What a program left behind: dense copies.
#[derive(Clone, Default)]
pub struct Outcome {
    /// Everything that can be seen.
    pub seen: Vec<(Seen, Option<Tensor>)>,
    /// What left with gradients and can't be differentiated any more, by number.
    pub refused: Vec<usize>,
}

/// A variable while the program runs.
#[derive(Clone)]
pub(crate) enum Held {
    Tensor(Tensor),
    List(TensorList),
}

/// What outlives the program.
pub struct Live(Vec<(Variable, Held)>);

/// Plays a case. `run` is given the program and runs it: as it is, or compiled.
pub fn play(
    case: &Case,
    arithmetic: Arithmetic,
    run: &dyn Fn(&dyn Fn() -> Result<Live>) -> Result<Live>,
) -> Result<Outcome> {
    let player = Player::new(case, arithmetic)?;
    let live = run(&|| player.run())?;
    player.outcome(live)
}

pub(crate) struct Player<'a> {
    case: &'a Case,
    arithmetic: Arithmetic,
    /// By variable, the inputs.
    inputs: Vec<Option<Tensor>>,
    /// The leaves that inputs with a tape outside were made from.
    bases: Vec<(Variable, Tensor)>,
}

fn lost() -> Error {
    Error::State("a variable of the recording is used before it is made".into())
}

/// Numbers that look random, the same for the same seed.
pub(crate) fn signs(seed: u64, count: usize) -> impl Iterator<Item = bool> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count).map(move |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 40 & 1 == 1
    })
}

impl<'a> Player<'a> {
    pub(crate) fn new(case: &'a Case, arithmetic: Arithmetic) -> Result<Player<'a>> {
        let trace = &case.recording.trace;
        let mut player =
            Player { case, arithmetic, inputs: vec![None; trace.variables.len()], bases: Vec::new() };
        for (variable, info) in (0..).zip(&trace.variables) {
            let Some(input) = &info.input else { continue };
            let tensor = player.input(variable, input)?;
            player.inputs[variable as usize] = Some(tensor);
        }
        Ok(player)
    }

    fn input(&mut self, variable: Variable, input: &InputVariable) -> Result<Tensor> {
        let given = self.case.inputs.get(&variable).ok_or_else(lost)?;
        let layout: &Layout = &input.layout;
        if let Some(first) = given.shares {
            let first = self.inputs[first as usize].as_ref().ok_or_else(lost)?;
            return Ok(Tensor::from_ready(first.ready()?.with_layout(layout.clone())?));
        }
        let values = self.widened(&given.values)?.deep_clone()?;
        let values = self.noisy(values, u64::from(variable) + 1)?;
        if !input.leaf && input.requires_grad {
            values.requires_grad_(true)?;
            self.bases.push((variable, values.clone()));
            return arranged(&values.mul(1)?, layout);
        }
        let tensor = laid_out(&values, layout)?;
        if input.requires_grad {
            tensor.requires_grad_(true)?;
        }
        Ok(tensor)
    }

    fn widened(&self, tensor: &Tensor) -> Result<Tensor> {
        match self.arithmetic {
            Arithmetic::Wide if tensor.dtype().is_float() => tensor.to_dtype(DType::F64),
            _ => Ok(tensor.clone()),
        }
    }

    /// A result, off by a unit in the last place if it is to be.
    fn noisy(&self, tensor: Tensor, number: u64) -> Result<Tensor> {
        match self.noise(&tensor, number)? {
            Some(noise) => tensor.mul(&noise),
            None => Ok(tensor),
        }
    }

    fn noise(&self, tensor: &Tensor, number: u64) -> Result<Option<Tensor>> {
        let Arithmetic::Noisy(seed) = self.arithmetic else { return Ok(None) };
        let ulp = ulp(tensor.dtype());
        if ulp == 0.0 {
            return Ok(None);
        }
        let shape = tensor.shape();
        let factors = signs(seed ^ number << 20, shape.numel()).map(|up| 1.0 + if up { ulp } else { -ulp });
        let factors = Tensor::from_vec(factors.collect::<Vec<f64>>(), shape)?;
        factors.to_dtype(tensor.dtype()).map(Some)
    }

    /// Does what the recording says.
    fn run(&self) -> Result<Live> {
        self.run_with(&mut |_, _, _| Ok(()))
    }

    fn begin(&self) -> Vec<Option<Held>> {
        self.inputs.iter().map(|input| input.clone().map(Held::Tensor)).collect()
    }

    /// The same, with a look at what is held before every event.
    pub(crate) fn run_with(
        &self,
        look: &mut dyn FnMut(usize, &Event, &[Option<Held>]) -> Result<()>,
    ) -> Result<Live> {
        let recording = &self.case.recording;
        let mut held = self.begin();
        for (number, event) in recording.trace.events.iter().enumerate() {
            look(number, event, &held)?;
            self.event(event, number, &mut held)?;
        }
        let live = recording.live.iter().map(|&v| Some((v, held[v as usize].clone()?)));
        Ok(Live(live.collect::<Option<Vec<_>>>().ok_or_else(lost)?))
    }

    /// Plays as far as the first pass that does not give what it is to give (`lost`); by number of the pass, which leaves
    /// it reached.
    pub(crate) fn survey(
        &self,
        lost: &mut Vec<Variable>,
        reached: &mut Vec<(usize, Vec<Variable>)>,
    ) -> Result<()> {
        let mut held = self.begin();
        let leaves = || (0..).zip(&self.inputs).filter_map(|(v, input)| Some((v, input.as_ref()?)));
        for (number, event) in self.case.recording.trace.events.iter().enumerate() {
            if let Event::Backward { .. } = event {
                leaves().filter(|(_, leaf)| leaf.grad().is_some()).for_each(|(_, leaf)| leaf.set_grad(None));
            }
            self.event(event, number, &mut held)?;
            if let Event::Backward { .. } | Event::Grad { .. } = event {
                lost.extend(event.made().into_iter().filter(|&made| held[made as usize].is_none()));
                let found = leaves().filter(|(_, leaf)| leaf.grad().is_some());
                reached.push((number, found.map(|(variable, _)| variable).collect()));
            }
            if !lost.is_empty() {
                break;
            }
        }
        Ok(())
    }

    fn event(&self, event: &Event, number: usize, held: &mut [Option<Held>]) -> Result<()> {
        let tensor = |held: &[Option<Held>], variable: Variable| match &held[variable as usize] {
            Some(Held::Tensor(tensor)) => Ok(tensor.clone()),
            _ => Err(lost()),
        };
        match event {
            Event::Call { op, args, out, in_place, grad_enabled, .. } => {
                let _mode = if *grad_enabled { enable_grad() } else { no_grad() };
                let made = self.call(op, args, *in_place, event, number, held)?;
                if let Some(out) = out {
                    held[*out as usize] = Some(made);
                }
            }
            Event::Backward { outputs, targets, retain_graph, .. } => {
                for (leaf, target) in targets {
                    let existing = match target {
                        GradTarget::New(_) => None,
                        GradTarget::Accumulate(existing) => Some(tensor(held, *existing)?),
                    };
                    tensor(held, *leaf)?.set_grad(existing);
                }
                let (of, from) = self.outputs(outputs, held)?;
                let from: Vec<Option<&Tensor>> = from.iter().map(Option::as_ref).collect();
                let options = GradOptions { retain_graph: Some(*retain_graph), ..GradOptions::default() };
                backward_all(&of.iter().collect::<Vec<_>>(), &from, options)?;
                for (leaf, target) in targets {
                    if let GradTarget::New(new) = target {
                        let leaf = tensor(held, *leaf)?;
                        held[*new as usize] = leaf.grad().map(Held::Tensor);
                    }
                }
            }
            Event::Grad { outputs, inputs, results, retain_graph, create_graph, .. } => {
                let (of, from) = self.outputs(outputs, held)?;
                let from: Vec<Option<&Tensor>> = from.iter().map(Option::as_ref).collect();
                let inputs = inputs.iter().map(|&v| tensor(held, v)).collect::<Result<Vec<_>>>()?;
                let options = GradOptions {
                    retain_graph: Some(*retain_graph),
                    create_graph: *create_graph,
                    allow_unused: true,
                };
                let of: Vec<&Tensor> = of.iter().collect();
                let found = grad(&of, &inputs.iter().collect::<Vec<_>>(), &from, options)?;
                for (found, result) in found.into_iter().zip(results) {
                    if let Some(result) = result {
                        held[*result as usize] = found.map(Held::Tensor);
                    }
                }
            }
            Event::RequiresGrad { variable, on, .. } => {
                tensor(held, *variable)?.requires_grad_(*on)?;
            }
            Event::Retain { variable, .. } => tensor(held, *variable)?.retain_grad()?,
            Event::Read { variable, .. } => drop(tensor(held, *variable)?.to_bytes()?),
            // What a custom function made is where passes end: its own backward was recorded as ops.
            Event::Apply { outputs, .. } => {
                for &output in outputs {
                    let cut = tensor(held, output)?.detach()?;
                    cut.requires_grad_(true)?;
                    held[output as usize] = Some(Held::Tensor(cut));
                }
            }
        }
        Ok(())
    }

    #[allow(clippy::type_complexity, reason = "two lists")]
    fn outputs(
        &self,
        outputs: &[(Variable, Option<Variable>)],
        held: &[Option<Held>],
    ) -> Result<(Vec<Tensor>, Vec<Option<Tensor>>)> {
        let tensor = |variable: Variable| match &held[variable as usize] {
            Some(Held::Tensor(tensor)) => Ok(tensor.clone()),
            _ => Err(lost()),
        };
        let of = outputs.iter().map(|(output, _)| tensor(*output)).collect::<Result<Vec<_>>>()?;
        let from =
            outputs.iter().map(|(_, seed)| seed.map(tensor).transpose()).collect::<Result<Vec<_>>>()?;
        Ok((of, if from.iter().all(Option::is_none) { Vec::new() } else { from }))
    }

    fn call(
        &self,
        op: &Op,
        args: &[TraceArg],
        in_place: bool,
        event: &Event,
        number: usize,
        held: &[Option<Held>],
    ) -> Result<Held> {
        let args = args.iter().map(|arg| match arg {
            TraceArg::Variable(variable) => match &held[*variable as usize] {
                Some(Held::Tensor(tensor)) => Ok(Arg::Tensor(tensor)),
                Some(Held::List(list)) => Ok(Arg::List(list)),
                None => Err(lost()),
            },
            other => self.case.number(other).map(Arg::Number).ok_or_else(lost),
        });
        let args = args.collect::<Result<Vec<_>>>()?;
        if let Op::List {} = op {
            let tensor = |arg: &Arg<'_>| {
                if let Arg::Tensor(tensor) = arg { Ok((*tensor).clone()) } else { Err(lost()) }
            };
            return Ok(Held::List(TensorList::new(args.iter().map(tensor).collect::<Result<_>>()?)));
        }
        // An item is no copy.
        if let (Op::ListGet { index }, [Arg::List(list)]) = (op, &args[..]) {
            return list.get(*index).map(Held::Tensor);
        }
        let class = op.row().class;
        // What is composed of others rounds at each of them, and so do its gradients.
        if let (Arithmetic::Noisy(_), Class::Composite | Class::Reduction, false) =
            (self.arithmetic, class, in_place)
            && let Some(made) = Parts::new(self, number).run(op, &args)?
        {
            return Ok(Held::Tensor(made));
        }
        let wide = (self.arithmetic == Arithmetic::Wide).then(|| widened(op)).flatten();
        let rounds = class != Class::Random;
        let op = wide.as_ref().filter(|_| rounds).unwrap_or(op);
        let made = match run_op_at(op, &args, in_place, event.loc())? {
            Output::Tensor(tensor) => tensor,
            Output::List(list) => return Ok(Held::List(list)),
        };
        let computes =
            matches!(class, Class::Pointwise | Class::Reduction | Class::Contraction | Class::Composite);
        Ok(Held::Tensor(match self.arithmetic {
            // The same numbers are drawn, whatever they are computed with.
            Arithmetic::Wide if !rounds => self.widened(&made)?,
            Arithmetic::Noisy(_) if computes && in_place => {
                if let Some(noise) = self.noise(&made, number as u64 + 1000)? {
                    made.mul_(&noise)?;
                }
                made
            }
            Arithmetic::Noisy(_) if computes && !matches!(op, Op::Copy {}) => {
                self.noisy(made, number as u64 + 1000)?
            }
            _ => made,
        }))
    }

    /// What can be seen now.
    fn outcome(&self, live: Live) -> Result<Outcome> {
        let mut outcome = Outcome::default();
        let mut leaving: Vec<Tensor> = Vec::new();
        let dense = |tensor: &Tensor| tensor.detach()?.deep_clone()?.contiguous();
        for (variable, held) in &live.0 {
            let items = match held {
                Held::Tensor(tensor) => vec![tensor.clone()],
                Held::List(list) => list.items()?.to_vec(),
            };
            for (item, tensor) in items.iter().enumerate() {
                outcome.seen.push((Seen::Live(*variable, item), Some(dense(tensor)?)));
                if tensor.requires_grad() && !tensor.is_leaf() {
                    leaving.push(tensor.clone());
                }
            }
        }
        for (variable, input) in (0..).zip(&self.inputs) {
            if let Some(input) = input {
                outcome.seen.push((Seen::Input(variable), Some(dense(input)?)));
            }
        }
        outcome.refused = self.pass_from(&leaving)?;
        let leaves = (0..).zip(&self.inputs).filter_map(|(v, input)| Some((v, input.as_ref()?)));
        let leaves = leaves.filter(|(_, input)| input.requires_grad() && input.is_leaf());
        for (variable, leaf) in leaves.chain(self.bases.iter().map(|(v, base)| (*v, base))) {
            let gradient = leaf.grad().map(|gradient| dense(&gradient)).transpose()?;
            outcome.seen.push((Seen::Gradient(variable), gradient));
        }
        Ok(outcome)
    }
}

impl Player<'_> {
    /// Runs a pass from everything that left with gradients and can still be differentiated; which can't, by number.
    fn pass_from(&self, leaving: &[Tensor]) -> Result<Vec<usize>> {
        let leaves: Vec<&Tensor> =
            self.inputs.iter().flatten().chain(self.bases.iter().map(|(_, base)| base)).collect();
        let weights = leaving.iter().enumerate().map(|(number, tensor)| tangent(number, tensor));
        let weights = weights.collect::<Result<Vec<_>>>()?;
        // What the program's own passes used up is found out one by one, and leaves no gradient.
        let mut refused = Vec::new();
        if leaving.len() > 1 || !leaves.is_empty() {
            let before: Vec<Option<Tensor>> = leaves.iter().map(|leaf| leaf.grad()).collect();
            for (number, (tensor, weight)) in leaving.iter().zip(&weights).enumerate() {
                leaves.iter().for_each(|leaf| leaf.set_grad(None));
                if tensor.backward_with(Some(weight), true).is_err() {
                    refused.push(number);
                }
            }
            leaves.iter().zip(before).for_each(|(leaf, before)| leaf.set_grad(before));
        }
        let left = |number: &usize| !refused.contains(number);
        let numbers: Vec<usize> = (0..leaving.len()).filter(left).collect();
        let outputs: Vec<&Tensor> = numbers.iter().map(|&number| &leaving[number]).collect();
        let weights: Vec<Option<&Tensor>> = numbers.iter().map(|&number| Some(&weights[number])).collect();
        if !outputs.is_empty() {
            backward_all(&outputs, &weights, GradOptions::default())?;
        }
        Ok(refused)
    }
}

/// The parts of an op, run one by one, each result off by a unit in the last place.
struct Parts<'p, 'a> {
    player: &'p Player<'a>,
    number: usize,
    values: Vec<(GraphValue, Ty)>,
}

impl<'p, 'a> Parts<'p, 'a> {
    fn new(player: &'p Player<'a>, number: usize) -> Parts<'p, 'a> {
        Parts { player, number, values: Vec::new() }
    }

    fn add(&mut self, value: GraphValue) -> Value {
        let ty = match &value {
            GraphValue::Tensor(tensor) => Ty::Tensor(tensor.ty()),
            GraphValue::Number(number) => Ty::Scalar(number.kind()),
            GraphValue::List(list) => {
                Ty::List(list.items().unwrap_or_default().iter().map(Tensor::ty).collect())
            }
        };
        self.values.push((value, ty));
        Value(self.values.len() as u32 - 1)
    }

    fn run(mut self, op: &Op, args: &[Arg<'_>]) -> Result<Option<Tensor>> {
        let args: Vec<Value> = args
            .iter()
            .map(|arg| match arg {
                Arg::Tensor(tensor) => self.add(GraphValue::Tensor((*tensor).clone())),
                Arg::Number(number) => self.add(GraphValue::Number(*number)),
                Arg::List(list) => self.add(GraphValue::List((*list).clone())),
            })
            .collect();
        let tys: Vec<Ty> = args.iter().map(|&value| self.ty(value).clone()).collect();
        if op.is_prim(&tys) {
            return Ok(None);
        }
        let Some(made) = op.decompose(&mut self, &args)? else { return Ok(None) };
        Ok(self.values[made[0].index()].0.tensor().cloned())
    }
}

impl Emit for Parts<'_, '_> {
    fn emit(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        let tys: Vec<Ty> = args.iter().map(|&value| self.ty(value).clone()).collect();
        if matches!(op.row().class, Class::Composite | Class::Reduction)
            && !op.is_prim(&tys)
            && let Some(made) = op.decompose(self, args)?
        {
            return Ok(made);
        }
        let given: Vec<GraphValue> = args.iter().map(|value| self.values[value.index()].0.clone()).collect();
        if let Op::Constant { value } = op {
            return Ok(std::iter::once(self.add(GraphValue::Number(value))).collect());
        }
        let numbers: Option<Vec<Scalar>> = given.iter().map(GraphValue::number).collect();
        if let Some(folded) =
            numbers.filter(|numbers| !numbers.is_empty()).and_then(|numbers| op.fold(&numbers))
        {
            return Ok(std::iter::once(self.add(GraphValue::Number(folded))).collect());
        }
        let given: Vec<Arg<'_>> = given
            .iter()
            .map(|value| match value {
                GraphValue::Tensor(tensor) => Arg::Tensor(tensor),
                GraphValue::Number(number) => Arg::Number(*number),
                GraphValue::List(list) => Arg::List(list),
            })
            .collect();
        let made = match run_op_at(&op, &given, false, Loc::UNKNOWN)? {
            Output::Tensor(tensor) if op.computes() => {
                let number = (self.number * 64 + self.values.len()) as u64 + 100_000;
                GraphValue::Tensor(self.player.noisy(tensor, number)?)
            }
            Output::Tensor(tensor) => GraphValue::Tensor(tensor),
            Output::List(list) => GraphValue::List(list),
        };
        Ok(std::iter::once(self.add(made)).collect())
    }

    fn ty(&self, value: Value) -> &Ty {
        &self.values[value.index()].1
    }
}

/// An op on doubles instead of other floats, if it names some.
fn widened(op: &Op) -> Option<Op> {
    let attributes = op.attributes();
    let narrow = |text: &str| matches!(text, "f32" | "f16" | "bf16");
    if !attributes.iter().any(|(_, value)| narrow(value)) {
        return None;
    }
    Op::parse(op.row().name, &mut |wanted| {
        let (_, value) = attributes.iter().find(|(name, _)| *name == wanted)?;
        Some(if narrow(value) { "f64".to_string() } else { value.to_string() })
    })
}

/// A gradient to start from: sixteenths, which every float dtype has.
fn tangent(number: usize, tensor: &Tensor) -> Result<Tensor> {
    let shape = tensor.shape();
    let bits = signs(number as u64 + 77, shape.numel() * 4).collect::<Vec<bool>>();
    let number = |four: &[bool]| four.iter().fold(0.0, |sum, &bit| 2.0 * sum + f64::from(u8::from(bit)));
    let values: Vec<f64> = bits.chunks(4).map(|four| (number(four) - 7.5) / 8.0).collect();
    Tensor::from_vec(values, shape)?.to_dtype(tensor.dtype())
}

/// Dense values in memory of this layout.
fn laid_out(values: &Tensor, layout: &Layout) -> Result<Tensor> {
    if layout.is_contiguous() && layout.offset == 0 {
        return Ok(values.clone());
    }
    let reach =
        |(&size, &stride): (&usize, &isize)| size.saturating_sub(1).saturating_mul(stride.unsigned_abs());
    let reaches = layout.shape.iter().zip(layout.strides.iter()).map(reach);
    let extent = reaches.fold(layout.offset.saturating_add(1), usize::saturating_add);
    let memory = Tensor::full_of([extent], 0.0, values.dtype(), &values.device())?;
    let _mode = no_grad();
    // Elements that share memory are written once.
    let (mut single, mut values) = (layout.clone(), values.clone());
    for dim in 0..layout.shape.rank() {
        if layout.strides[dim] == 0 && layout.shape[dim] > 1 {
            single.shape[dim] = 1;
            values = values.narrow(dim as i64, 0, 1)?;
        }
    }
    Tensor::from_ready(memory.ready()?.with_layout(single)?).copy_(&values)?;
    Ok(Tensor::from_ready(memory.ready()?.with_layout(layout.clone())?))
}

/// A tensor with a tape, its elements in this order in memory where dims can be put so.
fn arranged(tensor: &Tensor, layout: &Layout) -> Result<Tensor> {
    let rank = layout.shape.rank();
    let mut order: Vec<usize> = (0..rank).collect();
    order.sort_by_key(|&dim| std::cmp::Reverse(layout.strides[dim]));
    let dims = |order: &[usize]| order.iter().map(|&dim| dim as i64).collect::<Vec<_>>();
    let mut back = vec![0; rank];
    order.iter().enumerate().for_each(|(place, &dim)| back[dim] = place);
    tensor.permute(&dims(&order)[..])?.contiguous()?.permute(&dims(&back)[..])
}
