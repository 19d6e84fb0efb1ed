//! Kernels that become one: those that read what others make, go through the same space, or fill each other's windows.

use kiln_ir::Value;
use rustc_hash::FxHashMap;

use super::reach::Reach;
use super::table::Table;
use super::{Fusion, Group, Target, Unit, folds};
use crate::WhyNot;
use crate::lower::{Refusal, is_library, lower_group};

/// Of the kernels that share a value, so many on either side of one, in the order of the graph, are thought of as its
/// partners: work grows with the number of kernels, however many read the same weight.
const NEIGHBOURS: usize = 24;

impl<'g> Fusion<'g> {
    /// Makes kernels one where that saves memory traffic.
    pub(super) fn merge(&mut self, groups: Vec<Group>) {
        let mut groups: Vec<Option<Group>> = groups.into_iter().map(Some).collect();
        self.tables = Table::find(self.graph, &self.live);
        loop {
            // Units anew: numbers of the kernels that are left.
            let alive: Vec<usize> = (0..groups.len()).filter(|&g| groups[g].is_some()).collect();
            let current: Vec<Group> = alive.iter().filter_map(|&g| groups[g].take()).collect();
            let (mut current, merged) = self.merge_round(current);
            if !merged {
                self.units = self.make_units(current.len());
                self.merge_tables(&current);
                self.groups = std::mem::take(&mut current);
                return;
            }
            groups = current.into_iter().map(Some).collect();
        }
    }

    pub(super) fn make_units(&self, groups: usize) -> Vec<Unit> {
        let mut units: Vec<Unit> = (0..groups).map(Unit::Kernel).collect();
        units.extend((0..self.tables.len()).map(Unit::Table));
        for n in (0..self.graph.nodes.len()).filter(|&n| self.live[n]) {
            let node = &self.graph.nodes[n];
            if is_library(self.graph, node) && !self.scatters.makes(node.outs[0]) {
                units.push(Unit::Library(n));
            }
        }
        units
    }

    /// One sweep over all kernels; each is merged with the partner that saves most.
    fn merge_round(&mut self, groups: Vec<Group>) -> (Vec<Group>, bool) {
        if groups.len() < 2 {
            return (groups, false);
        }
        let units = self.make_units(groups.len());
        let mut deps = self.dependencies(&units, &groups);
        let mut reach = Reach::new(&deps);
        let mut groups: Vec<Option<Group>> = groups.into_iter().map(Some).collect();
        // Who reads and who stores a value.
        let mut touching: FxHashMap<Value, Vec<usize>> = FxHashMap::default();
        for (g, group) in groups.iter().enumerate() {
            let Some(group) = group else { continue };
            for &v in group.lowered.loads.iter().chain(&group.roots) {
                touching.entry(v).or_default().push(g);
            }
        }
        let mut merged = false;
        let mut into: Vec<usize> = (0..units.len()).collect();
        for g in 0..groups.len() {
            let Some(group) = &groups[g] else { continue };
            let mut savings: FxHashMap<usize, i64> = FxHashMap::default();
            for v in group.lowered.loads.iter().chain(&group.roots) {
                let all = touching.get(v).map_or(&[][..], |all| all);
                let at = all.partition_point(|&other| other < g);
                let near = at.saturating_sub(NEIGHBOURS)..all.len().min(at + NEIGHBOURS + 1);
                for &other in &all[near] {
                    let other = find(&into, other);
                    if other != g && groups[other].is_some() {
                        *savings.entry(other).or_default() += self.bytes(*v);
                    }
                }
            }
            let mut partners: Vec<(i64, usize)> =
                savings.into_iter().map(|(other, bytes)| (-bytes, other)).collect();
            partners.sort_unstable();
            for (_, other) in partners.into_iter().take(12) {
                let (Some(a), Some(b)) = (&groups[g], &groups[other]) else { continue };
                match self.try_merge(a, b, g, other, &deps, &into, &mut reach) {
                    Ok(both) => {
                        groups[other] = None;
                        groups[g] = Some(both);
                        into[other] = g;
                        let taken = std::mem::take(&mut deps[other]);
                        deps[g].extend(taken);
                        deps[g].retain(|&d| find(&into, d) != g);
                        reach.join(&into, g, other);
                        merged = true;
                    }
                    Err(why) => {
                        if self.why_not.len() < 200 && !self.why_not.contains(&why) {
                            self.why_not.push(why);
                        }
                    }
                }
            }
        }
        (groups.into_iter().flatten().collect(), merged)
    }

    fn try_merge(
        &self,
        a: &Group,
        b: &Group,
        ua: usize,
        ub: usize,
        deps: &[Vec<usize>],
        into: &[usize],
        reach: &mut Reach,
    ) -> Result<Group, WhyNot> {
        let (left, right) = (a.roots[0].min(b.roots[0]), a.roots[0].max(b.roots[0]));
        let spaces = WhyNot::Spaces { left, right };
        let (one, other) = (&a.lowered.space, &b.lowered.space);
        let joined = one.join(other);
        let space = joined.clone().or_else(|| one.join_folding(other)).ok_or_else(|| spaces.clone())?;
        let mut folds = self.folds_in(a, &space);
        folds.extend(self.folds_in(b, &space));
        let new = folds.len() - a.folds.len() - b.folds.len();
        if joined.is_none() && !self.folding_pays(a, b, &space, new) {
            return Err(spaces);
        }
        if a.lowered.kernel.exprs.len() + b.lowered.kernel.exprs.len() > self.tuning.fusion_size {
            return Err(WhyNot::TooLarge { value: left, limit: self.tuning.fusion_size });
        }
        let loads = a.lowered.loads.len() + b.lowered.loads.len();
        if loads + a.roots.len() + b.roots.len() > self.tuning.fusion_buffers {
            return Err(WhyNot::Buffers { value: left, limit: self.tuning.fusion_buffers });
        }
        if reach.between(deps, into, ua, ub) {
            return Err(WhyNot::Between { left, right });
        }
        if let Some(value) = self.filled_by(a, b).or_else(|| self.filled_by(b, a)) {
            return Err(WhyNot::OtherPlace { value });
        }
        let mut roots: Vec<Value> = a.roots.iter().chain(&b.roots).copied().collect();
        roots.sort_unstable();
        match lower_group(&self.context(), &roots, &folds, &space) {
            Ok(lowered) => {
                let both = Group { roots, folds, lowered };
                if folds::runs_well(&both) { Ok(both) } else { Err(spaces) }
            }
            Err(Refusal::Store(_, why) | Refusal::Apart(why)) => Err(why),
        }
    }

    /// A value that one kernel fills in parts and the other reads, or must have filled before.
    fn filled_by(&self, writer: &Group, other: &Group) -> Option<Value> {
        let parts =
            writer.roots.iter().flat_map(|r| self.targets.get(r).into_iter().flatten().map(move |t| (*r, t)));
        parts
            .filter_map(|(root, target)| match target {
                Target::Part { of, .. } => Some((root, *of)),
                _ => None,
            })
            .find(|(root, of)| {
                // The window of a `slice_scatter` lies over what surrounds it: in one kernel, whichever thread
                // comes last would win.
                let around = self.surroundings(*of, *root);
                let fills =
                    |target: &Target| matches!(target, Target::Part { of, .. } if Some(*of) == around);
                let over = around.is_some_and(|around| other.roots.contains(&around))
                    || other.roots.iter().any(|r| self.targets.get(r).into_iter().flatten().any(fills));
                over || other.lowered.loads.contains(of)
            })
            .map(|(_, of)| of)
    }

    /// List kernels over equal shapes are one, unless something lies between them.
    fn merge_tables(&mut self, groups: &[Group]) {
        let mut a = 0;
        let mut known = None;
        while a < self.tables.len() {
            let mut b = a + 1;
            while b < self.tables.len() {
                if !self.tables[a].fits(&self.tables[b]) {
                    b += 1;
                    continue;
                }
                let deps = known.take().unwrap_or_else(|| {
                    let units = self.make_units(groups.len());
                    self.dependencies(&units, groups)
                });
                let same: Vec<usize> = (0..deps.len()).collect();
                let (ua, ub) = (groups.len() + a, groups.len() + b);
                let between = Reach::new(&deps).between(&deps, &same, ua, ub);
                // List values are never read from memory: a direct edge means packed results of the other.
                let direct = deps[ua].contains(&ub) || deps[ub].contains(&ua);
                if !between && !direct {
                    let other = self.tables.remove(b);
                    self.tables[a].roots.extend(other.roots);
                } else {
                    b += 1;
                    known = Some(deps);
                }
            }
            a += 1;
        }
        self.units = self.make_units(groups.len());
    }
}

pub(crate) fn find(into: &[usize], mut unit: usize) -> usize {
    while into[unit] != unit {
        unit = into[unit];
    }
    unit
}
