//! What every variable of a case held when, eagerly; and smaller cases made of some of its events, which find there what
//! the other events would have given them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kiln_aot::Recording;
use kiln_aot::trace::{Event, GradTarget, InputVariable, Trace, TraceArg, Variable, VariableInfo};
use kiln_ir::{Layout, Loc, Op, Result, Ty};
use kiln_tensor::Tensor;
use kiln_tensor::internal::TensorState;

use crate::case::{Case, Input};
use crate::play::{Arithmetic, Held, Player};

/// A tensor as it was.
#[derive(Clone)]
struct Snapshot {
    values: Tensor,
    layout: Arc<Layout>,
    requires_grad: bool,
}

impl Snapshot {
    fn of(tensor: &Tensor) -> Result<Snapshot> {
        let layout = Arc::new(tensor.ready()?.layout().clone());
        let values = tensor.detach()?.deep_clone()?.contiguous()?;
        Ok(Snapshot { values, layout, requires_grad: tensor.requires_grad() })
    }
}

/// See the [module](self).
pub struct Trail<'a> {
    case: &'a Case,
    /// By event and variable that it uses, what that held before; of a list, its items.
    before: BTreeMap<(usize, Variable), Vec<Snapshot>>,
}

impl<'a> Trail<'a> {
    /// Plays a case eagerly and notes what its variables hold.
    pub fn new(case: &'a Case) -> Result<Trail<'a>> {
        let mut before = BTreeMap::new();
        // What did not change is noted once.
        let mut known: BTreeMap<Variable, (Vec<u64>, Vec<Snapshot>)> = BTreeMap::new();
        let player = Player::new(case, Arithmetic::Own)?;
        player.run_with(&mut |number, event, held| {
            for variable in event.used() {
                let items = match &held[variable as usize] {
                    Some(Held::Tensor(tensor)) => vec![tensor.clone()],
                    Some(Held::List(list)) => list.items()?.to_vec(),
                    None => continue,
                };
                let version = |tensor: &Tensor| Ok(tensor.ready()?.storage().version());
                let versions = items.iter().map(version).collect::<Result<Vec<u64>>>()?;
                let snapshots = match known.get(&variable).filter(|(seen, _)| *seen == versions) {
                    Some((_, snapshots)) => snapshots.clone(),
                    None => items.iter().map(Snapshot::of).collect::<Result<Vec<_>>>()?,
                };
                known.insert(variable, (versions, snapshots.clone()));
                before.insert((number, variable), snapshots);
            }
            Ok(())
        })?;
        Ok(Trail { case, before })
    }

    /// The case with these of its events only. What they use and don't make are inputs, with the values that they had;
    /// what other events use, or what outlives the case, outlives this one. `None` if that is no program.
    pub fn keep(&self, events: &[usize]) -> Option<Case> {
        let mut given = BTreeSet::new();
        // Gradients that passes of the smaller program don't give are inputs as well.
        for _ in 0..4 {
            let (case, numbers) = self.without(events, &given)?;
            match passes(case).ok()? {
                Passes::Same(case) => return Some(case),
                Passes::Lost(lost) => {
                    let old = |new: &Variable| numbers.iter().find(|(_, n)| *n == new).map(|(old, _)| *old);
                    given.extend(lost.iter().filter_map(old));
                }
            }
        }
        None
    }

    fn without(
        &self,
        events: &[usize],
        given: &BTreeSet<Variable>,
    ) -> Option<(Case, BTreeMap<Variable, Variable>)> {
        let old = &self.case.recording.trace;
        let mut builder = Builder::default();
        let mut used_elsewhere: BTreeSet<Variable> = self.case.recording.live.iter().copied().collect();
        let kept: BTreeSet<usize> = events.iter().copied().collect();
        for (number, event) in old.events.iter().enumerate().filter(|(number, _)| !kept.contains(number)) {
            let _ = number;
            used_elsewhere.extend(event.used());
        }
        let mut live = Vec::new();
        for &number in events {
            let mut event = old.events[number].clone();
            forget(&mut event, given);
            for variable in event.used() {
                if !builder.numbers.contains_key(&variable) {
                    self.begin_with(&mut builder, number, variable)?;
                }
            }
            for made in event.made() {
                builder.define(made, old.variables[made as usize].ty.clone(), None);
                if used_elsewhere.contains(&made) {
                    live.push(builder.numbers[&made]);
                }
            }
            if let Event::Call { args, .. } = &mut event {
                for arg in args {
                    if let TraceArg::Number(hole) = arg {
                        builder.trace.numbers.push(old.numbers[*hole as usize]);
                        builder.case.numbers.push(*self.case.numbers.get(*hole as usize)?);
                        *hole = builder.trace.numbers.len() as u32 - 1;
                    }
                }
            }
            event.renumber(&mut |variable| builder.numbers[&variable]);
            builder.trace.events.push(event);
        }
        let Builder { trace, mut case, numbers } = builder;
        case.recording = Recording { trace, live };
        (case.options, case.notes) = (self.case.options.clone(), self.case.notes.clone());
        Some((case, numbers))
    }

    /// Makes a variable an input, with what it held before an event.
    fn begin_with(&self, builder: &mut Builder, number: usize, variable: Variable) -> Option<()> {
        let old = &self.case.recording.trace.variables[variable as usize];
        let snapshots = self.before.get(&(number, variable))?;
        let input = |builder: &mut Builder, of: Variable, snapshot: &Snapshot, ty: Ty| {
            let Snapshot { values, layout, requires_grad } = snapshot.clone();
            let info = match &old.input {
                Some(input) => input.clone(),
                None => InputVariable { layout, requires_grad, leaf: true },
            };
            let made = builder.define(of, ty, Some(info));
            builder.case.inputs.insert(made, Input { values, shares: None });
            made
        };
        match &old.ty {
            Ty::Tensor(_) => {
                input(builder, variable, snapshots.first()?, old.ty.clone());
            }
            Ty::List(items) => {
                // Items have no numbers in the old case: those behind its own are free.
                let mut args = Vec::new();
                for (item, (snapshot, ty)) in snapshots.iter().zip(items.iter()).enumerate() {
                    let of = u32::MAX - variable * 4096 - item as u32;
                    args.push(TraceArg::Variable(input(builder, of, snapshot, Ty::Tensor(ty.clone()))));
                }
                let out = Some(builder.define(variable, old.ty.clone(), None));
                let (op, loc) = (Op::List {}, Loc::UNKNOWN);
                builder.trace.events.push(Event::Call {
                    op,
                    args,
                    out,
                    in_place: false,
                    grad_enabled: true,
                    loc,
                });
            }
            Ty::Scalar(_) => return None,
        }
        Some(())
    }
}

#[derive(Default)]
struct Builder {
    trace: Trace,
    case: Case,
    /// New numbers by old ones.
    numbers: BTreeMap<Variable, Variable>,
}

impl Builder {
    fn define(&mut self, old: Variable, ty: Ty, input: Option<InputVariable>) -> Variable {
        let new = self.trace.define(ty, input);
        self.numbers.insert(old, new);
        new
    }
}

/// Takes away what a pass is to give that it does not.
fn forget(event: &mut Event, given: &BTreeSet<Variable>) {
    match event {
        Event::Backward { targets, .. } => targets.retain(|(_, target)| match target {
            GradTarget::New(new) => !given.contains(new),
            GradTarget::Accumulate(_) => true,
        }),
        Event::Grad { results, .. } => {
            for result in results {
                *result = result.filter(|result| !given.contains(result));
            }
        }
        _ => {}
    }
}

/// Whether the passes of a case give what it says.
enum Passes {
    /// They do, and where they give more that is said now.
    Same(Case),
    /// They don't give these.
    Lost(Vec<Variable>),
}

/// Plays a case to see which leaves its passes reach.
fn passes(mut case: Case) -> Result<Passes> {
    let is_pass = |event: &Event| matches!(event, Event::Backward { .. } | Event::Grad { .. });
    if !case.recording.trace.events.iter().any(is_pass) {
        return Ok(Passes::Same(case));
    }
    let mut lost = Vec::new();
    let mut reached: Vec<(usize, Vec<Variable>)> = Vec::new();
    let player = Player::new(&case, Arithmetic::Own)?;
    player.survey(&mut lost, &mut reached)?;
    if !lost.is_empty() {
        return Ok(Passes::Lost(lost));
    }
    for (number, leaves) in reached {
        for leaf in leaves {
            let trace = &mut case.recording.trace;
            let ty = trace.variables[leaf as usize].ty.clone();
            let Event::Backward { targets, .. } = &mut trace.events[number] else { continue };
            if targets.iter().any(|(target, _)| *target == leaf) {
                continue;
            }
            let new = trace.variables.len() as Variable;
            targets.push((leaf, GradTarget::New(new)));
            trace.variables.push(Arc::new(VariableInfo { ty, input: None }));
            case.recording.live.push(new);
        }
    }
    Ok(Passes::Same(case))
}
