//! Loops that the program writes itself: recordings that differ in how often something repeats are one graph.
//!
//! A recording of a loop over time is as long as the loop. The first one is compiled as it is. With each goes its
//! [rolled](roll) form, in which every loop is a scan: there the number of steps is a size, and what is known of
//! [sizes](crate::general) makes one plan for all. See docs/decisions/loops.md.

mod find;
mod roll;
mod scan;
mod wanted;

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use kiln_ir::Scalar;

use crate::explain::SizesInfo;
use crate::general::{Came, Generals, Resized};
use crate::region::Site;
use crate::segment::Segment;
use crate::state::State;
use crate::trie::{LiveSet, ROOT, Trie};

pub(crate) use roll::Rolled;

/// What to do with a recording.
pub(crate) enum Verdict {
    /// Nothing is known of it.
    Unknown,
    /// It has a segment, which was made for its number of steps now or before.
    Segment(Arc<Segment>, Came),
    /// It is a known graph, and this number of steps may never come again.
    Once,
    /// The same number of steps came again.
    Again,
}

/// The graphs of a region that have loops.
pub(crate) struct Loops {
    /// The first rolled recording of each.
    trie: Trie,
    graphs: FxHashMap<(u64, LiveSet), First>,
    generals: Generals,
    /// Nodes of the region's trie behind which a loop may go on or end.
    within: FxHashSet<u32>,
}

struct First {
    /// Where the rolled recording ends.
    rolled: u32,
    /// Where the recording ends in the region's trie, and what was live.
    own: (u32, LiveSet),
    /// Sizes that ran op by op once.
    once: FxHashSet<u64>,
}

impl Default for Loops {
    fn default() -> Loops {
        Loops {
            trie: Trie::new(),
            graphs: FxHashMap::default(),
            generals: Generals::default(),
            within: FxHashSet::default(),
        }
    }
}

impl Loops {
    /// Whether a call that leaves the region's trie behind a node may only go through a loop more or less often.
    pub(crate) fn may_part(&self, node: u32) -> bool {
        self.within.contains(&node)
    }

    /// Takes note of a recording that is compiled as it is, and ends at a node of the region's trie.
    pub(crate) fn note(&mut self, site: &Site, at: u32, state: &State) {
        let Some(rolled) = rolled(&site.trie, at, state) else { return };
        let key = (rolled.trie.node(rolled.at).form, rolled.live.clone());
        if self.graphs.contains_key(&key) {
            return;
        }
        let (end, _) = self.trie.graft(ROOT, &rolled.trie, rolled.at);
        let path = site.trie.path(at);
        for &(start, end) in &rolled.spans {
            // What comes behind a loop may be the beginning of another step.
            let end = (end + (end - start)).min(path.len());
            self.within.extend(&path[start..end]);
        }
        let own = (at, state.live.clone());
        self.graphs.insert(key, First { rolled: end, own, once: FxHashSet::default() });
    }

    /// What to do with a recording that ends at a node of a trie.
    pub(crate) fn verdict(&mut self, site: &Site, trie: &Trie, at: u32, state: &State) -> Verdict {
        let Some(rolled) = (!self.graphs.is_empty()).then(|| rolled(trie, at, state)).flatten() else {
            return Verdict::Unknown;
        };
        let key = (rolled.trie.node(rolled.at).form, rolled.live.clone());
        let Some(first) = self.graphs.get_mut(&key) else { return Verdict::Unknown };
        let at_once = site.options.dynamic == Some(true);
        let own = (&self.trie, first.rolled);
        let made = self.generals.segment(site, own, (&rolled.trie, rolled.at), &rolled.live, at_once);
        if let Some(Resized { segment, came }) = made
            && let Some(segment) = segment.renumbered(&rolled)
        {
            return Verdict::Segment(Arc::new(segment), came);
        }
        if first.once.insert(crate::general::sizes_of(&rolled.trie, rolled.at)) {
            Verdict::Once
        } else {
            Verdict::Again
        }
    }

    /// What is known of other numbers of steps of the graph that ends at a node.
    pub(crate) fn describe(&self, at: u32, live: &LiveSet) -> Option<SizesInfo> {
        let own = |first: &&First| (first.own.0, &first.own.1) == (at, live);
        let ((_, live), first) = self.graphs.iter().find(|(_, first)| own(first))?;
        self.generals.describe(&self.trie, first.rolled, live)
    }
}

/// A recording rolled, if its numbers are the same in every step.
fn rolled(trie: &Trie, at: u32, state: &State) -> Option<Rolled> {
    let rolled = roll::roll(trie, at, &state.live)?;
    are_alike(&rolled.alike, &state.numbers).then_some(rolled)
}

/// Whether numbers that are one number in a rolled recording are the same, to the last bit.
pub(crate) fn are_alike(alike: &[(u32, u32)], numbers: &[Scalar]) -> bool {
    let bits = |hole: u32| match numbers.get(hole as usize) {
        Some(Scalar::Float(x)) => Some(x.to_bits() as i64),
        Some(Scalar::Int(x)) => Some(*x),
        Some(Scalar::Bool(x)) => Some(i64::from(*x)),
        None => None,
    };
    alike.iter().all(|&(first, other)| bits(first) == bits(other))
}
