//! What all optimizers share: groups of parameters, their state, and which of them are updated together.

use std::collections::{BTreeMap, HashSet};

use parking_lot::Mutex;

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::internal::TensorState;
use kiln_tensor::{Result, Tensor, TensorList, foreach, hook, no_grad};

use super::define::Setting;
use crate::StateDict;
use crate::state::copy_into;

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

/// An optimizer's options.
pub(super) trait Options {
    /// The optimizer's name, for errors.
    fn name(&self) -> &'static str;
    /// The learning rate.
    fn lr(&mut self) -> &mut f64;
    /// All options, by PyTorch's names: what a state dict keeps of a group.
    fn options(&mut self) -> Vec<(&'static str, Setting<'_>)>;
    /// The number that schedules of momentum turn, if there is one: the momentum, or the first beta.
    fn momentum(&mut self) -> Option<&mut f64> {
        self.options().into_iter().find_map(|(name, setting)| match setting {
            Setting::Number(number) if name == "momentum" || name == "betas.0" => Some(number),
            _ => None,
        })
    }
}

/// An optimizer's formula.
pub(super) trait Rule: Options + Sync {
    /// Whether the options make sense.
    fn check(&self, loc: Loc) -> Result<()>;
    /// PyTorch's names of the state tensors that a parameter has.
    fn states(&self) -> Vec<&'static str>;
    /// What the elements of all state tensors start as.
    fn start(&self) -> f64 {
        0.0
    }
    /// The product that a rule carries from update to update, after update number `step`; it starts as 1.
    fn carry(&self, step: u64, product: f64) -> f64 {
        let _ = step;
        product
    }
    /// What must be equal for parameters to be updated together, given how many updates they have had: a rule
    /// that reads the count must tell counts apart.
    fn key(&self, steps: u64) -> u64 {
        steps
    }
    /// One update. The lists go together element by element.
    fn update(&self, at: Step, params: &TensorList, grads: TensorList, state: &[TensorList]) -> Result<()>;
}

/// Which update it is.
#[derive(Copy, Clone)]
pub(super) struct Step {
    /// From 1.
    pub(super) number: u64,
    /// What the rule carries, this update included.
    pub(super) product: f64,
}

/// The gradients as a rule uses them: turned around to climb, with weight decay added. Never changed in place
/// while they are the parameters' own.
pub(super) fn directed(
    params: &TensorList,
    grads: TensorList,
    maximize: bool,
    weight_decay: f64,
) -> Result<TensorList> {
    match (maximize, weight_decay != 0.0) {
        (false, false) => Ok(grads),
        (true, false) => foreach::neg(&grads),
        (false, true) => foreach::add_scaled(&grads, params, weight_decay),
        (true, true) => {
            let grads = foreach::neg(&grads)?;
            foreach::add_scaled_(&grads, params, weight_decay)?;
            Ok(grads)
        }
    }
}

/// Weight decay that shrinks the parameters themselves rather than adding to their gradients.
pub(super) fn shrink(params: &TensorList, lr: f64, weight_decay: f64) -> Result<()> {
    if weight_decay == 0.0 { Ok(()) } else { foreach::mul_(params, 1.0 - lr * weight_decay) }
}

/// The running averages of the gradients and of their squares, with these gradients.
pub(super) fn average(
    (exp_avg, exp_avg_sq): (&TensorList, &TensorList),
    grads: &TensorList,
    (beta1, beta2): (f64, f64),
) -> Result<()> {
    foreach::lerp_(exp_avg, grads, 1.0 - beta1)?;
    foreach::mul_(exp_avg_sq, beta2)?;
    foreach::addcmul_(exp_avg_sq, grads, grads, 1.0 - beta2)
}

struct Entry {
    param: Tensor,
    /// Updates so far; while the entry is in a bucket, the bucket's count holds.
    steps: u64,
    /// What the rule carries; while the entry is in a bucket, the bucket's holds.
    product: f64,
    /// Empty until its first gradient is seen.
    state: Vec<Tensor>,
    /// States of an earlier choice of options that go on, by their place among the present ones.
    kept: Vec<Option<Tensor>>,
    /// Whether it had a gradient at the last step.
    has_grad: bool,
}

impl Entry {
    /// Makes the state at the first gradient, as PyTorch does. Off the record: in a captured program state is
    /// an input from the first call on, never something the program makes.
    fn make_state(&mut self, names: &[&'static str], start: f64) -> Result<()> {
        if self.state.len() == names.len() {
            return Ok(());
        }
        // Asked of the recorder, if the parameter is its own.
        let ty = self.param.ty();
        let _eager = hook::Scope::suspend();
        let kept = std::mem::take(&mut self.kept);
        self.state = (0..names.len())
            .map(|i| match kept.get(i).cloned().flatten() {
                Some(state) => Ok(state),
                None => Tensor::full_of(ty.shape.clone(), start, ty.dtype, &ty.device),
            })
            .collect::<Result<_>>()?;
        if let Some(label) = self.param.label() {
            for (name, state) in names.iter().zip(&self.state) {
                state.set_label(&format!("{name} of {label}"));
            }
        }
        Ok(())
    }
}

/// Parameters that are updated together. Kept from step to step, for as long as the same parameters have
/// gradients: a captured step then sees the same lists.
struct Bucket {
    members: Vec<usize>,
    steps: u64,
    product: f64,
    params: TensorList,
    state: Vec<TensorList>,
}

impl Bucket {
    fn update(&mut self, rule: &impl Rule, grads: TensorList) -> Result<()> {
        let number = self.steps + 1;
        let step = Step { number, product: rule.carry(number, self.product) };
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
        self.steps = number;
        self.product = step.product;
        Ok(())
    }
}

struct Group<R> {
    rule: R,
    /// The learning rate that schedules count from, once there is one.
    initial_lr: Option<f64>,
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
        let key = |bucket: &Bucket| (self.rule.key(bucket.steps), bucket.product.to_bits());
        let meet = |pair: &[Bucket]| key(&pair[0]) == key(&pair[1]);
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
        self.settle();
        self.buckets.clear();
        let states = self.rule.states();
        let mut members: BTreeMap<(u64, u64), Vec<usize>> = BTreeMap::new();
        for (i, entry) in self.entries.iter_mut().enumerate().filter(|(_, entry)| entry.has_grad) {
            entry.make_state(&states, self.rule.start())?;
            let key = (self.rule.key(entry.steps), entry.product.to_bits());
            members.entry(key).or_default().push(i);
        }
        let entries = &self.entries;
        self.buckets = members
            .into_values()
            .map(|members| Bucket {
                steps: entries[members[0]].steps,
                product: entries[members[0]].product,
                params: members.iter().map(|&i| entries[i].param.clone()).collect(),
                state: (0..states.len())
                    .map(|s| members.iter().map(|&i| entries[i].state[s].clone()).collect())
                    .collect(),
                members,
            })
            .collect();
        Ok(())
    }

    /// After a change of options that has states come or go: those that stay are kept, new ones are made anew.
    fn rename_states(&mut self, before: &[&'static str]) {
        let after = self.rule.states();
        if after == before {
            return;
        }
        self.settle();
        self.buckets.clear();
        for entry in &mut self.entries {
            // Made from the old ones, should they be as many, the new ones would have the wrong meaning.
            let old = std::mem::take(&mut entry.state);
            let place = |name: &&str| before.iter().position(|old| old == name);
            entry.kept = after.iter().map(|name| place(name).and_then(|at| old.get(at).cloned())).collect();
        }
    }

    /// Tells the entries what their buckets know.
    fn settle(&mut self) {
        for bucket in &self.buckets {
            for &i in &bucket.members {
                self.entries[i].steps = bucket.steps;
                self.entries[i].product = bucket.product;
            }
        }
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
            return Err(Error::op(name, Why::none("the number of parameter groups"), loc));
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
            return fail(Why::none("the number of parameters"));
        }
        let mut seen: HashSet<usize> =
            groups.iter().flat_map(|group| &group.entries).map(|entry| entry.param.address()).collect();
        for parameter in &parameters {
            let ty = parameter.ty();
            let named = || {
                let label = parameter.label().map_or(String::new(), |label| format!(" ({label})"));
                format!("the parameter {ty}{label}")
            };
            if !ty.dtype.is_float() {
                return fail(Why::DType {
                    argument: "a parameter",
                    expected: "floating point",
                    got: ty.dtype,
                });
            }
            if !parameter.is_leaf() {
                return fail(Why::NotLeaf { what: named() });
            }
            if !seen.insert(parameter.address()) {
                return fail(Why::Twice { what: named() });
            }
        }
        let entry = |param| Entry {
            param,
            steps: 0,
            product: 1.0,
            state: Vec::new(),
            kept: Vec::new(),
            has_grad: false,
        };
        let entries = parameters.into_iter().map(entry).collect();
        groups.push(Group { rule, initial_lr: None, entries, buckets: Vec::new(), grads: Vec::new() });
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

    pub(super) fn initial_lrs(&self) -> Vec<f64> {
        let first = |group: &mut Group<R>| {
            let lr = *group.rule.lr();
            *group.initial_lr.get_or_insert(lr)
        };
        self.0.lock().iter_mut().map(first).collect()
    }

    pub(super) fn set_initial_lrs(&self, lrs: &[f64]) {
        for (group, lr) in self.0.lock().iter_mut().zip(lrs) {
            group.initial_lr = Some(*lr);
        }
    }

    pub(super) fn momenta(&self) -> Vec<f64> {
        self.0.lock().iter_mut().filter_map(|group| group.rule.momentum().copied()).collect()
    }

    pub(super) fn set_momenta(&self, momenta: &[f64]) {
        for (group, momentum) in self.0.lock().iter_mut().zip(momenta) {
            let before = group.rule.states();
            if let Some(own) = group.rule.momentum() {
                *own = *momentum;
            }
            group.rename_states(&before);
        }
    }

    pub(super) fn state(&self, param: &Tensor) -> Option<(u64, Vec<Tensor>)> {
        self.0.lock().iter().find_map(|group| group.state(param))
    }

    /// Options, counts and state tensors by PyTorch's names: `param_groups.0.lr`, `state.3.exp_avg`. Parameters
    /// are numbered through all groups.
    pub(super) fn state_dict(&self) -> Result<StateDict> {
        let mut found = StateDict::new();
        let mut number = 0;
        for (g, group) in self.0.lock().iter_mut().enumerate() {
            group.settle();
            for (name, setting) in group.rule.options() {
                found.insert_number(&format!("param_groups.{g}.{name}"), setting.get())?;
            }
            if let Some(lr) = group.initial_lr {
                found.insert_number(&format!("param_groups.{g}.initial_lr"), lr)?;
            }
            found.insert_number(&format!("param_groups.{g}.params"), group.entries.len() as f64)?;
            let names = group.rule.states();
            for entry in &group.entries {
                if entry.steps > 0 {
                    found.insert_number(&format!("state.{number}.step"), entry.steps as f64)?;
                    found.insert_number(&format!("state.{number}.product"), entry.product)?;
                    for (name, tensor) in names.iter().zip(&entry.state) {
                        found.insert(&format!("state.{number}.{name}"), tensor.clone());
                    }
                }
                number += 1;
            }
        }
        Ok(found)
    }

    /// Takes a state over. Everything is checked before anything changes.
    pub(super) fn load_state_dict(&self, values: &StateDict, loc: Loc) -> Result<()>
    where
        R: Clone,
    {
        let _off = no_grad();
        let mut groups = self.0.lock();
        let fail =
            |message: String| Err(Error::State(format!("loading optimizer state: {message}, at {loc}")));
        if values.get(&format!("param_groups.{}.params", groups.len())).is_some() {
            return fail(format!(
                "the state has more parameter groups than the optimizer ({})",
                groups.len()
            ));
        }
        let mut number = 0;
        let mut loaded = Vec::new();
        for (g, group) in groups.iter().enumerate() {
            let mut rule = group.rule.clone();
            for (name, setting) in rule.options() {
                setting.set(values.number(&format!("param_groups.{g}.{name}"))?);
            }
            rule.check(loc)?;
            let initial = format!("param_groups.{g}.initial_lr");
            let initial_lr = values.get(&initial).map(|_| values.number(&initial)).transpose()?;
            let count = values.number(&format!("param_groups.{g}.params"))?;
            if count != group.entries.len() as f64 {
                let own = group.entries.len();
                return fail(format!(
                    "group {g} has {count} parameters in the state, {own} in the optimizer"
                ));
            }
            let names = rule.states();
            let mut entries = Vec::new();
            for entry in &group.entries {
                let prefix = format!("state.{number}.");
                number += 1;
                if values.get(&format!("{prefix}step")).is_none() {
                    entries.push((0, 1.0, Vec::new()));
                    continue;
                }
                let steps = values.count(&format!("{prefix}step"))?;
                let product = values.number(&format!("{prefix}product"))?;
                let mut state = Vec::new();
                for name in &names {
                    let name = format!("{prefix}{name}");
                    match values.get(&name) {
                        Some(value) if value.shape() == entry.param.shape() => state.push(value.clone()),
                        Some(value) => {
                            let (own, got) = (entry.param.shape(), value.shape());
                            return fail(format!("{name} has shape {got}, but its parameter {own}"));
                        }
                        None => return fail(format!("{name} is missing")),
                    }
                }
                entries.push((steps, product, state));
            }
            loaded.push((rule, initial_lr, entries));
        }
        for (group, (rule, initial_lr, entries)) in groups.iter_mut().zip(loaded) {
            group.rule = rule;
            group.initial_lr = initial_lr;
            group.buckets.clear();
            let (names, start) = (group.rule.states(), group.rule.start());
            for (entry, (steps, product, state)) in group.entries.iter_mut().zip(entries) {
                (entry.steps, entry.product) = (steps, product);
                entry.kept.clear();
                if state.is_empty() {
                    entry.state.clear();
                    if steps == 0 {
                        continue;
                    }
                }
                // Into the tensors that are there: a compiled step goes on with them.
                entry.make_state(&names, start)?;
                for (own, value) in entry.state.iter().zip(&state) {
                    if !own.same(value) {
                        copy_into(own, value)?;
                    }
                }
            }
        }
        Ok(())
    }
}
