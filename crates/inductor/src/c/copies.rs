//! Kernels that only move memory: the C library does it a line at a time, as wide as the machine can.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::{Emitter, Level, memory_type};
use kiln_plan::index::{ExprId, Index};
use kiln_plan::loops::{ExprKind, Mode};

/// Shorter lines are sooner copied than asked for.
const SHORTEST: i64 = 2048;

impl<'k> Emitter<'k> {
    /// The loops of a kernel whose stores are all of what lies side by side elsewhere.
    pub(super) fn copies(&mut self) -> Option<String> {
        let (kernel, vector) = (self.kernel, self.kernel.vector_axis());
        let goes_along = |index: &Index| {
            !index.is_nested(vector) && index.factor(vector) == 1 && !self.has_lane_values(index)
        };
        let copied = |store: usize| -> Option<ExprId> {
            let to = &kernel.stores[store];
            let ExprKind::Load { buffer, index } = &kernel.exprs[to.value].kind else { return None };
            let dtype = kernel.buffers[*buffer];
            let is_long = kernel.axes[vector].extent * dtype.size() as i64 >= SHORTEST;
            let is_copy = dtype == kernel.buffers[to.buffer] && !to.adds && !to.is_scatter();
            let fits = self.levels[to.value] == Level::Body && goes_along(index) && goes_along(&to.index);
            (kernel.mode == Mode::Map && is_long && is_copy && fits).then_some(to.value)
        };
        let stores: Vec<usize> = (0..kernel.stores.len()).collect();
        let loads: Vec<ExprId> = stores.iter().map(|&store| copied(store)).collect::<Option<_>>()?;
        // What is computed beside them, the check of a place, has its own loops.
        let is_beside = |id: ExprId| self.levels[id] == Level::Body && !loads.contains(&id);
        if (0..kernel.exprs.len()).any(is_beside) {
            return None;
        }
        let mut out = self.item_statements(0);
        out.push_str(&self.pointers(&loads, &stores, &mut BTreeSet::new()));
        out.push_str("        { const long j = lo;\n");
        for (store, load) in stores.into_iter().zip(loads) {
            let to = &kernel.stores[store];
            let ExprKind::Load { index, .. } = &kernel.exprs[load].kind else { continue };
            let (from, into) =
                (self.moving_text(load, index), self.moving_text(self.store_access(store), &to.index));
            let ty = memory_type(kernel.buffers[to.buffer]);
            // An operand whose place the result takes is where it belongs.
            let _ = writeln!(
                out,
                "        __builtin_memmove(q{store} + {into}, p{load} + {from}, (hi - lo) * sizeof({ty}));"
            );
        }
        out.push_str("        }\n");
        Some(out)
    }
}
