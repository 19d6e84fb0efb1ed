//! Loops over independent elements, cut into stages where the chain of operations is long.
//!
//! [Note: stages]
//! A processor looks some hundred instructions ahead. A body with several transcendental functions in a row is
//! longer than that, so one vector's chain of dependent operations would hardly overlap with the next one's,
//! and most of the time the units would wait. Such a body is cut into stages that each run over a block of
//! elements before the next one starts; what crosses a cut stays in the first-level cache. Five functions in
//! a row run 1.6 times as fast this way.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use kiln_ir::DType;

use super::unroll::Statements;
use super::{Emitter, Level, Piece, memory_type, suffix, vector_type};
use kiln_plan::index::ExprId;
use kiln_plan::loops::ExprKind;

/// Bodies of fewer instructions are left whole.
const LONG: usize = 56;
/// A stage has at least this many instructions.
const SHORTEST: usize = 20;
/// From this many on a stage ends wherever few values cross.
const ENOUGH: usize = 32;

impl Emitter<'_> {
    /// The loops of a kernel over independent elements.
    pub(super) fn map_loops(&mut self) -> String {
        let stores: Vec<usize> = (0..self.kernel.stores.len()).collect();
        let results = self.stored(&stores);
        let (all, _) = self.needed(results.iter().copied(), &|id| self.levels[id] != Level::Body);
        // Which stage computes a value that a later one needs.
        let kept = self.crossing(&all, &results);
        let stages = kept.values().max().map_or(1, |last| last + 2);

        // Elements of a block: with a few values each, of eight bytes at most, they stay in the first-level cache.
        let length = self.machine.l1 as i64 / 32;
        let mut out = self.item_statements(0);
        let mut declared = BTreeSet::new();
        let mut rows = String::new();
        for &id in kept.keys() {
            let ty = memory_type(self.kernel.exprs[id].dtype);
            let at = self.scratch(format!("kept{id}"), Piece::Bytes(length * self.element_bytes(id)));
            let _ = writeln!(rows, "        {ty} *r{id} = ({ty} *)(scratch + {at});");
            self.outer_names.insert(format!("r{id}"), format!("{ty} *"));
        }
        self.outer_names.insert("block".into(), "long".into());

        let mut loops = String::new();
        for stage in 0..stages {
            let made: Vec<ExprId> = kept.iter().filter(|(_, at)| **at == stage).map(|(id, _)| *id).collect();
            let is_last = stage + 1 == stages;
            let roots = if is_last { results.clone() } else { made.clone() };
            let before = |id: ExprId| kept.get(&id).is_some_and(|&at| at < stage);
            let (ids, take) = self.needed(roots, &|id| self.levels[id] != Level::Body || before(id));
            let mut locals: BTreeSet<String> = ids.iter().map(|id| format!("v{id}")).collect();
            let mut list = Vec::new();
            for id in take.into_iter().filter(|&id| before(id)) {
                let dtype = self.kernel.exprs[id].dtype;
                let (ty, suffix) = (vector_type(dtype, self.mask), suffix(dtype));
                list.push(format!("    const {ty} v{id} = kiln_load_{suffix}(r{id} + (j - block));\n"));
                locals.insert(format!("v{id}"));
            }
            self.streams = stage == 0;
            list.extend(ids.iter().map(|&id| self.compute_one(id, "    ")));
            self.streams = false;
            for &id in &made {
                let suffix = suffix(self.kernel.exprs[id].dtype);
                list.push(format!("    kiln_store_{suffix}(r{id} + (j - block), v{id});\n"));
            }
            let stores = if is_last { stores.as_slice() } else { &[] };
            list.extend(stores.iter().map(|&s| self.store(s, &ids, "    ")));
            out.push_str(&self.pointers(&ids, stores, &mut declared));
            let name = if stages == 1 { "body".to_string() } else { format!("stage{stage}") };
            let statements = Statements { ids, list, locals };
            let body = self.body(&name, &statements.text(), &statements.locals, &[]);
            let several = self.several_vectors(&name, &statements, (&[], &[]), stores, "stop");
            let each = body.call("j", "stop - j < KILN_LANES ? stop - j : KILN_LANES", &[]);
            let _ = match (several, self.has_borders(&statements.ids)) {
                (Some(several), _) => write!(
                    loops,
                    "        {{\n        long j = block;\n{several}for (; j < stop; j += KILN_LANES) {each}\n        }}\n"
                ),
                // Windows are long, and their loads look at the borders anyway: written out once they compile in half
                // the time.
                (None, true) => {
                    writeln!(loops, "        for (long j = block; j < stop; j += KILN_LANES) {each}")
                }
                (None, false) => write!(
                    loops,
                    "        {{
        long j = block;
        for (; j + KILN_LANES <= stop; j += KILN_LANES) {}
        if (j < stop) {}
        }}
",
                    body.call("j", "KILN_LANES", &[]),
                    body.call("j", "stop - j", &[])
                ),
            };
        }
        out.push_str(&rows);
        let _ = match stages {
            1 => write!(out, "        const long block = lo, stop = hi;\n{loops}"),
            _ => write!(
                out,
                "        for (long block = lo; block < hi; block += {length}) {{
        const long stop = block + {length} < hi ? block + {length} : hi;
{loops}        }}
"
            ),
        };
        out
    }

    /// The values of a body that are kept for a later stage, with the stage that computes them.
    fn crossing(&self, ids: &[ExprId], results: &[ExprId]) -> BTreeMap<ExprId, usize> {
        let instructions = |id: ExprId| match &self.kernel.exprs[id].kind {
            ExprKind::Apply(op, _) => op.instructions(),
            _ => 0,
        };
        let mut kept = BTreeMap::new();
        let mut left: usize = ids.iter().map(|&id| instructions(id)).sum();
        let is_long =
            |id: &ExprId| matches!(&self.kernel.exprs[*id].kind, ExprKind::Apply(op, _) if op.cost() > 0);
        if left < LONG || !self.staged || !ids.iter().any(is_long) {
            return kept;
        }
        let last_use = self.last_uses(ids, results);
        let (mut stage, mut length) = (0, 0);
        for (at, &id) in ids.iter().enumerate() {
            length += instructions(id);
            left -= instructions(id);
            if length < SHORTEST || left < SHORTEST {
                continue;
            }
            // Loads and positions are had again for less than keeping them.
            let is_cheap = |id: ExprId| self.kernel.operands(id).is_empty();
            let needed = |id: ExprId| last_use.get(&id).is_some_and(|&last| last > at) && !is_cheap(id);
            let crossing: Vec<ExprId> = ids[..=at].iter().copied().filter(|&id| needed(id)).collect();
            let new = crossing.iter().filter(|id| !kept.contains_key(*id)).count();
            let is_mask = |id: &ExprId| self.kernel.exprs[*id].dtype == DType::Bool;
            if new > usize::from(length >= ENOUGH) + 1 || crossing.iter().any(is_mask) {
                continue;
            }
            for id in crossing {
                kept.entry(id).or_insert(stage);
            }
            (stage, length) = (stage + 1, 0);
        }
        kept
    }

    /// The position in `ids` at which each value is used last; results are used behind the end.
    fn last_uses(&self, ids: &[ExprId], results: &[ExprId]) -> BTreeMap<ExprId, usize> {
        let mut last = BTreeMap::new();
        for (at, &id) in ids.iter().enumerate() {
            for operand in self.kernel.operands(id) {
                last.insert(operand, at);
            }
        }
        last.extend(results.iter().map(|&id| (id, ids.len())));
        last
    }
}
