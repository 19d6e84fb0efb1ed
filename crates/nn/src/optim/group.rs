//! What all optimizers share: groups of parameters, their state, and which of them are updated together.

use std::collections::{BTreeMap, HashSet};

use parking_lot::Mutex;

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::{Result, Tensor, TensorList, foreach, hook, no_grad};

/// Parameters with options of their own.
#[derive(Clone)]
pub struct ParamGroup<O> {
    /// The parameters.
    pub parameters: Vec<Tensor>,
    /// Their options.
    pub options: O,
}

impl<O> ParamGroup<O> {
    /// These parameters with these options.
    pub fn new(parameters: Vec<Tensor>, options: O) -> ParamGroup<O> {
        ParamGroup { parameters, options }
    }
}

/// An optimizer's options and formula.
pub(super) trait Rule: Sync {
    /// The optimizer's name, for errors.
    fn name(&self) -> &'static str;
    /// Whether the options make sense.
    fn check(&self, loc: Loc) -> Result<()>;
    /// The learning rate.
    fn lr(&mut self) -> &mut f64;
    /// How many state tensors a parameter has. They start as zeros.
    fn states(&self) -> usize;
    /// What must be equal for parameters to be updated together, given how many updates they have had: a rule
    /// that reads the count must tell counts apart.
    fn key(&self, steps: u64) -> u64;
    /// Update number `step`, from 1. The lists go together element by element.
    fn update(&self, step: u64, params: &TensorList, grads: TensorList, state: &[TensorList]) -> Result<()>;
}

/// An option that is not what it must be.
pub(super) fn check_number(
    optimizer: &str,
    argument: &'static str,
    expected: &'static str,
    got: f64,
    holds: bool,
    loc: Loc,
) -> Result<()> {
    match holds {
        true => Ok(()),
        false => Err(Error::op(optimizer, Why::Number { argument, expected, got }, loc)),
    }
}

struct Entry {
    param: Tensor,
    /// Updates so far; while the entry is in a bucket, the bucket's count holds.
    steps: u64,
    /// Empty until its first gradient is seen.
    state: Vec<Tensor>,
    /// Whether it had a gradient at the last step.
    has_grad: bool,
}

impl Entry {
    /// Makes the state at the first gradient, as PyTorch does. Off the record: in a captured program state is
    /// an input from the first call on, never something the program makes.
    fn make_state(&mut self, count: usize) -> Result<()> {
        if self.state.len() == count {
            return Ok(());
        }
        // Asked of the recorder, if the parameter is its own.
        let ty = self.param.ty();
        let _eager = hook::Scope::suspend();
        self.state = (0..count)
            .map(|_| Tensor::full_of(ty.shape.clone(), 0.0, ty.dtype, &ty.device))
            .collect::<Result<_>>()?;
        Ok(())
    }
}

/// Parameters that are updated together. Kept from step to step, for as long as the same parameters have
/// gradients: a captured step then sees the same lists.
struct Bucket {
    members: Vec<usize>,
    steps: u64,
    params: TensorList,
    state: Vec<TensorList>,
}

impl Bucket {
    fn update(&mut self, rule: &impl Rule, grads: TensorList) -> Result<()> {
        let step = self.steps + 1;
        let lists: Vec<&TensorList> = [&self.params, &grads].into_iter().chain(&self.state).collect();
        // Piece by piece, eagerly: the parameters go through all the ops while they are in the caches.
        let in_pieces = foreach::each_piece(&lists, |piece| match piece {
            [params, grads, state @ ..] => rule.update(step, params, grads.clone(), state),
            _ => Ok(()),
        });
        match in_pieces {
            Some(done) => done?,
            None => rule.update(step, &self.params, grads, &self.state)?,
        }
        self.steps = step;
        Ok(())
    }
}

struct Group<R> {
    rule: R,
    entries: Vec<Entry>,
    /// In the order of their keys; empty: to be made.
    buckets: Vec<Bucket>,
    /// Memory for a step's gradients; empty between steps, so that no gradient is kept alive.
    grads: Vec<Option<Tensor>>,
}

impl<R: Rule> Group<R> {
    fn step(&mut self) -> Result<()> {
        let mut grads = std::mem::take(&mut self.grads);
        let mut changed = self.buckets.is_empty();
        for i in 0..self.entries.len() {
            // Long lists of parameters are not in the caches: their turn is prepared a little ahead.
            if let Some(later) = self.entries.get(i + 16) {
                later.param.prefetch();
            }
            let entry = &mut self.entries[i];
            let grad = entry.param.grad();
            changed |= entry.has_grad != grad.is_some();
            entry.has_grad = grad.is_some();
            grads.push(grad);
        }
        let meet = |pair: &[Bucket]| self.rule.key(pair[0].steps) == self.rule.key(pair[1].steps);
        if changed || self.buckets.windows(2).any(meet) {
            self.regroup()?;
        }
        for bucket in &mut self.buckets {
            let grads: TensorList = bucket.members.iter().filter_map(|&i| grads[i].take()).collect();
            bucket.update(&self.rule, grads)?;
        }
        grads.clear();
        self.grads = grads;
        Ok(())
    }

    fn regroup(&mut self) -> Result<()> {
        for bucket in std::mem::take(&mut self.buckets) {
            for i in bucket.members {
                self.entries[i].steps = bucket.steps;
            }
        }
        let states = self.rule.states();
        let mut members: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (i, entry) in self.entries.iter_mut().enumerate().filter(|(_, entry)| entry.has_grad) {
            entry.make_state(states)?;
            members.entry(self.rule.key(entry.steps)).or_default().push(i);
        }
        let entries = &self.entries;
        self.buckets = members
            .into_values()
            .map(|members| Bucket {
                steps: entries[members[0]].steps,
                params: members.iter().map(|&i| entries[i].param.clone()).collect(),
                state: (0..states)
                    .map(|s| members.iter().map(|&i| entries[i].state[s].clone()).collect())
                    .collect(),
                members,
            })
            .collect();
        Ok(())
    }

    /// Updates so far and state of a parameter.
    fn state(&self, param: &Tensor) -> Option<(u64, Vec<Tensor>)> {
        let i = self.entries.iter().position(|entry| entry.param.same(param))?;
        let bucket = self.buckets.iter().find(|bucket| bucket.members.contains(&i));
        let entry = &self.entries[i];
        Some((bucket.map_or(entry.steps, |bucket| bucket.steps), entry.state.clone()))
    }
}

/// All parameters of an optimizer.
pub(super) struct Groups<R>(Mutex<Vec<Group<R>>>);

impl<R: Rule> Groups<R> {
    pub(super) fn new(groups: Vec<ParamGroup<R>>, name: &str, loc: Loc) -> Result<Groups<R>> {
        let all = Groups(Mutex::new(Vec::new()));
        if groups.is_empty() {
            return Err(Error::op(name, Why::Other("there are no parameter groups".into()), loc));
        }
        for group in groups {
            all.add(group, loc)?;
        }
        Ok(all)
    }

    pub(super) fn add(&self, group: ParamGroup<R>, loc: Loc) -> Result<()> {
        let ParamGroup { parameters, options: rule } = group;
        rule.check(loc)?;
        let mut groups = self.0.lock();
        let fail = |why| Err(Error::op(rule.name(), why, loc));
        if parameters.is_empty() {
            return fail(Why::Other("the list of parameters is empty".into()));
        }
        let mut seen: HashSet<usize> =
            groups.iter().flat_map(|group| &group.entries).map(|entry| entry.param.address()).collect();
        for parameter in &parameters {
            let named = || parameter.label().map_or(String::new(), |label| format!(" ({label})"));
            let ty = parameter.ty();
            if !ty.dtype.is_float() {
                return fail(Why::DType {
                    argument: "a parameter",
                    expected: "floating point",
                    got: ty.dtype,
                });
            }
            if !parameter.is_leaf() {
                return fail(Why::Other(format!(
                    "{ty}{} was computed: only leaves can be optimized",
                    named()
                )));
            }
            if !seen.insert(parameter.address()) {
                return fail(Why::Other(format!("the parameter {ty}{} is there twice", named())));
            }
        }
        let entry = |param| Entry { param, steps: 0, state: Vec::new(), has_grad: false };
        let entries = parameters.into_iter().map(entry).collect();
        groups.push(Group { rule, entries, buckets: Vec::new(), grads: Vec::new() });
        Ok(())
    }

    pub(super) fn step(&self) -> Result<()> {
        let _guard = no_grad();
        self.0.lock().iter_mut().try_for_each(Group::step)
    }

    pub(super) fn parameters(&self) -> Vec<Tensor> {
        self.0.lock().iter().flat_map(|group| &group.entries).map(|entry| entry.param.clone()).collect()
    }

    pub(super) fn zero_grad(&self) {
        for entry in self.0.lock().iter().flat_map(|group| &group.entries) {
            entry.param.set_grad(None);
        }
    }

    pub(super) fn lrs(&self) -> Vec<f64> {
        self.0.lock().iter_mut().map(|group| *group.rule.lr()).collect()
    }

    pub(super) fn set_lrs(&self, lrs: &[f64]) {
        for (group, lr) in self.0.lock().iter_mut().zip(lrs) {
            *group.rule.lr() = *lr;
        }
    }

    pub(super) fn set_lr(&self, lr: f64) {
        for group in self.0.lock().iter_mut() {
            *group.rule.lr() = lr;
        }
    }

    pub(super) fn state(&self, param: &Tensor) -> Option<(u64, Vec<Tensor>)> {
        self.0.lock().iter().find_map(|group| group.state(param))
    }
}

/// The parts that are the same for every optimizer: making one, and the trait.
macro_rules! optimizer {
    ($Optimizer:ident, $Options:ident, $name:literal) => {
        impl $Optimizer {
            #[doc = concat!($name, " with default options for these parameters.")]
            #[track_caller]
            pub fn new(parameters: Vec<Tensor>, lr: f64) -> Result<$Optimizer> {
                $Optimizer::options().lr(lr).build(parameters)
            }

            /// The default options.
            pub fn options() -> $Options {
                $Options::default()
            }

            /// For several groups of parameters, each with its own options.
            #[track_caller]
            pub fn from_groups(groups: impl IntoIterator<Item = ParamGroup<$Options>>) -> Result<$Optimizer> {
                let groups =
                    groups.into_iter().map(|group| ParamGroup::new(group.parameters, group.options.0));
                Ok($Optimizer { groups: Groups::new(groups.collect(), $name, Loc::caller())? })
            }

            /// Adds a group of parameters.
            #[track_caller]
            pub fn add_param_group(&self, group: ParamGroup<$Options>) -> Result<()> {
                self.groups.add(ParamGroup::new(group.parameters, group.options.0), Loc::caller())
            }
        }

        impl $Options {
            /// The optimizer for these parameters.
            #[track_caller]
            pub fn build(&self, parameters: Vec<Tensor>) -> Result<$Optimizer> {
                $Optimizer::from_groups([ParamGroup::new(parameters, self.clone())])
            }
        }

        impl $crate::optim::Optimizer for $Optimizer {
            #[track_caller]
            fn step(&self) -> Result<()> {
                let _behalf = Loc::caller().on_behalf($crate::folder());
                self.groups.step()
            }
            fn parameters(&self) -> Vec<Tensor> {
                self.groups.parameters()
            }
            fn zero_grad(&self) {
                self.groups.zero_grad();
            }
            fn lrs(&self) -> Vec<f64> {
                self.groups.lrs()
            }
            fn set_lrs(&self, lrs: &[f64]) {
                self.groups.set_lrs(lrs);
            }
            fn set_lr(&self, lr: f64) {
                self.groups.set_lr(lr);
            }
        }
    };
}
pub(super) use optimizer;
