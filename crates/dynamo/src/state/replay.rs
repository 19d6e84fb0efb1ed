//! The fast path: an op or a list that is the one expected, compared at once and not allocated for.

use kiln_aot::trace::Variable;
use kiln_tensor::hook::{Arg, Call, Tag};
use kiln_tensor::internal::{ListState, TensorState};
use kiln_tensor::{Tensor, TensorList, autograd};

use super::{Held, ListItem, State};
use crate::region::Site;
use crate::trie::Quick;

impl State {
    /// The usual case, made quick: moves on if the op was recorded here first, on variables that are known.
    /// Returns whether gradients flow through its result.
    #[inline(always)]
    fn advance(&mut self, site: &Site, call: &Call<'_>) -> Option<bool> {
        if self.eager || self.analysis.is_some() || self.aside.is_some() || call.args.len() > Quick::MOST_ARGS
        {
            return None;
        }
        // A tag without the run's id is the variable's number; one of another run has more than 32 bits.
        let (own, mut all, mut numbers) = (Tag::new(self.id, 0).0, 0, false);
        let mut variable = |tag: Tag| {
            let number = tag.0 ^ own;
            all |= number;
            number
        };
        let quick = Quick::new(call.op, call.in_place, call.grad_enabled, call.args, |i, arg| match arg {
            Arg::Tensor(tensor) => variable(tensor.tag()),
            Arg::List(list) => variable(list.tag()),
            Arg::Number(x) => {
                numbers = true;
                Quick::number(x.kind(), call.op.row().scalar_class.map_or(0, |class| class(i, *x)))
            }
        });
        if all > u64::from(u32::MAX) {
            return None;
        }
        if self.next_of != self.at || self.next == 0 {
            (self.next, self.next_of) = (site.trie.first_child(self.at), self.at);
        }
        // Node 0 is the start, which is no op.
        let (after, requires_grad) = site.trie.follow(self.next, call.op, quick)?;
        (self.at, self.next_of) = (self.next, self.next);
        self.next = after;
        if numbers {
            self.keep_numbers(call);
        }
        Some(requires_grad)
    }

    /// An op, if it is the one expected.
    #[inline]
    pub(crate) fn replay(&mut self, site: &Site, call: &Call<'_>) -> Option<Tensor> {
        if call.in_place {
            return None;
        }
        let requires_grad = self.advance(site, call)?;
        Some(self.make(requires_grad))
    }

    /// An op that changes a tensor, if it is the one expected.
    #[inline]
    pub(crate) fn replay_in_place(&mut self, site: &Site, call: &Call<'_>) -> bool {
        let (true, Some(Arg::Tensor(target))) = (call.in_place, call.args.first()) else { return false };
        let Some(requires_grad) = self.advance(site, call) else { return false };
        self.writes = true;
        if requires_grad {
            target.mark_requires_grad(true);
        }
        true
    }

    /// The usual case of a list met for the first time, made quick: its elements all arrive with it, as they
    /// did when it was recorded here. They are marked and compared in one walk in which nothing is counted:
    /// the list keeps them.
    pub(super) fn pack_again(
        &mut self,
        site: &Site,
        list: &TensorList,
        items: &[Tensor],
    ) -> Option<Variable> {
        if self.analysis.is_some() || self.aside.is_some() || !self.fresh.is_empty() || !self.trusts_tags() {
            return None;
        }
        let first = self.variables.len() as Variable;
        let (next, packed) = site.trie.packed(self.at)?;
        if !packed.fits(first, items.len(), autograd::grad_enabled()) {
            return None;
        }
        let mut variable = first;
        for (item, guard) in list.walk().zip(packed.guards()) {
            let tag = Tag::new(self.id, variable);
            let known = |mark: Tag| mark.run() == self.id;
            let arrives = item.try_ready().filter(|ready| {
                !known(item.tag()) && !known(Tag(ready.storage().tag())) && guard.holds_of(item, ready, None)
            });
            let Some(ready) = arrives else {
                // As if nobody had been here: the long way finds out what is different.
                for item in &items[..(variable - first) as usize] {
                    item.set_tag(Tag::default());
                    item.try_ready().inspect(|ready| ready.storage().set_tag(0));
                }
                return None;
            };
            item.set_tag(tag);
            ready.storage().set_tag(tag.0);
            variable += 1;
        }
        self.makers.resize(variable as usize, u32::MAX);
        self.variables
            .extend((0..items.len() as u32).map(|index| Held::Item(ListItem::new(variable, index))));
        self.at = next;
        list.set_tag(Tag::new(self.id, variable));
        self.variables.push(Held::List(list.clone()));
        self.makers.push(next);
        Some(variable)
    }
}
