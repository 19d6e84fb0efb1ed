//! Folds: what rows add to the columns.
//!
//! [Note: rows in groups]
//! An item is a part of the rows. Its accumulators lie in scratch, one element per column, and go into the part's
//! place in memory after every block of rows. They are not touched while a row is worked on: that would be a load and
//! a store beside every load, and takes three times as long when rows come from afar. Instead, what a few rows add
//! is computed once more when these are done, from operands that are in the cache by then.

use std::collections::BTreeSet;
use std::fmt::Write;

use kiln_plan::signature::GROUP;

use super::{Argument, Emitter, Level, Piece, memory_type, suffix, vector_type};
use kiln_plan::index::ExprId;
use kiln_plan::loops::{ExprKind, Reduction};

/// Rows whose sum is formed before it is added to the part's: fixed, since no bit depends on the machine's caches.
const BLOCK: usize = super::columns::ROWS;

/// A fold as it is stored.
#[derive(Copy, Clone)]
struct Fold {
    store: usize,
    id: ExprId,
    reduction: Reduction,
    arg: ExprId,
}

impl Emitter<'_> {
    /// Whether a store is that of a fold.
    pub(super) fn is_fold(&self, store: usize) -> bool {
        matches!(self.kernel.exprs[self.kernel.stores[store].value].kind, ExprKind::Fold(..))
    }

    fn folds(&self) -> Vec<Fold> {
        let fold = |(store, id): (usize, ExprId)| match self.kernel.exprs[id].kind {
            ExprKind::Fold(reduction, arg) => Some(Fold { store, id, reduction, arg }),
            _ => None,
        };
        self.kernel.stores.iter().map(|store| store.value).enumerate().filter_map(fold).collect()
    }

    /// The values of every element that are folded.
    pub(super) fn folded(&self) -> Vec<ExprId> {
        self.folds().iter().map(|fold| fold.arg).collect()
    }

    /// Whether a name stands for something else in every row.
    fn is_of_row(&self, name: &str) -> bool {
        let (kind, number) = name.split_at(1);
        let number = number.parse::<usize>().ok();
        match (kind, number) {
            ("p" | "r", Some(_)) => true,
            ("v", Some(id)) => self.levels[id] == Level::Item,
            ("i", Some(axis)) => !self.kernel.axes[axis].inner,
            _ => false,
        }
    }

    /// The loops over parts, blocks and groups of rows around those of an item, which is a row.
    pub(super) fn part_loops(&mut self, row: &str, declared: &mut BTreeSet<String>) -> String {
        let folds = self.folds();
        let (rows, share) =
            (self.int("rows".into(), Argument::Rows), self.int("share".into(), Argument::Share));
        let inner = self.int("inner".into(), Argument::Inner);
        let (mut start, mut clear, mut flush) = (String::new(), String::new(), String::new());
        for &Fold { store, id, reduction, .. } in &folds {
            let dtype = self.kernel.exprs[id].dtype;
            let (ty, s, buffer) = (memory_type(dtype), suffix(dtype), self.kernel.stores[store].buffer);
            let identity = self.identity(reduction, dtype);
            let at = self.scratch(format!("kept{id}"), Piece::Folded);
            let each = format!("for (long j = 0; j < {inner}; j += KILN_LANES)");
            let count = format!("{inner} - j < KILN_LANES ? {inner} - j : KILN_LANES");
            let _ = writeln!(
                start,
                "{ty} *f{id} = ({ty} *)(scratch + {at}), *g{id} = b{buffer} + part * {inner};
                {each} kiln_write_{s}(g{id} + j, {identity}, {count});"
            );
            let _ = writeln!(clear, "{each} kiln_store_{s}(f{id} + j, {identity});");
            let (total, block) =
                (format!("kiln_read_{s}(g{id} + j, {count})"), format!("kiln_load_{s}(f{id} + j)"));
            let sum = self.combine(reduction, dtype, &total, &block);
            let _ = writeln!(flush, "{each} kiln_write_{s}(g{id} + j, {sum}, {count});");
        }
        let Group { before, keep, fold } = self.group(&folds, declared);
        format!(
            "for (long part = begin; part < end; part++) {{
            const long first = part * {share}, beyond = first + {share} < {rows} ? first + {share} : {rows};
            {start}for (long some = first; some < beyond; some += {BLOCK}) {{
            const long until = some + {BLOCK} < beyond ? some + {BLOCK} : beyond;
            {clear}for (long group = some; group < until; group += {GROUP}) {{
            const long behind = group + {GROUP} < until ? group + {GROUP} : until;
            {before}for (long item = group; item < behind; item++) {{
            {row}{keep}}}
            {fold}}}
            {flush}}}
            }}
"
        )
    }

    /// What is done with the rows of a group.
    fn group(&mut self, folds: &[Fold], declared: &mut BTreeSet<String>) -> Group {
        let known = |id: ExprId| self.levels[id] != Level::Body || self.saved.contains_key(&id);
        let (ids, take) = self.needed(folds.iter().map(|fold| fold.arg), &known);
        let mut locals: BTreeSet<String> = ids.iter().map(|id| format!("v{id}")).collect();
        let mut text = String::new();
        for id in take.into_iter().filter(|&id| self.levels[id] == Level::Body) {
            let dtype = self.kernel.exprs[id].dtype;
            let (ty, s) = (vector_type(dtype, self.mask), suffix(dtype));
            let _ = writeln!(text, "    const {ty} v{id} = kiln_load_{s}(r{id} + j);");
            locals.insert(format!("v{id}"));
        }
        text.push_str(&self.compute(&ids, "    "));
        let (mut more, mut addresses) = (Vec::new(), Vec::new());
        let (mut load, mut store) = (String::new(), String::new());
        for &Fold { store: s, id, reduction, arg } in folds {
            let dtype = self.kernel.exprs[id].dtype;
            let (ty, name) = (vector_type(dtype, self.mask), suffix(dtype));
            // Lanes behind the end may belong to other columns: what is combined with those changes nothing.
            let live = self.masked(reduction, dtype, &format!("v{arg}"));
            let combined = self.combine(reduction, dtype, &format!("*w{id}"), &format!("x{id}_"));
            let _ = writeln!(text, "    const {ty} x{id}_ = count == KILN_LANES ? v{arg} : {live};");
            let _ = writeln!(text, "    *w{id} = {combined};");
            more.push(format!("{ty} *w{id}"));
            addresses.push(format!("&w{id}"));
            let index = &self.kernel.stores[s].index;
            let at = self.index_text(self.store_access(s), index, None, &|_, _| true);
            let _ = writeln!(load, "{ty} w{id} = kiln_load_{name}(f{id} + {at});");
            let _ = writeln!(store, "kiln_store_{name}(f{id} + {at}, w{id});");
        }
        let mut keep = self.pointers(&ids, &[], declared);
        let body = self.body("fold", &text, &locals, &more);
        let of_row: BTreeSet<String> = body.params().filter(|name| self.is_of_row(name)).cloned().collect();
        let mut before = String::new();
        for name in &of_row {
            let ty = &self.outer_names[name];
            let _ = writeln!(before, "{ty} {name}_of[{GROUP}];");
            let _ = writeln!(keep, "{name}_of[item - group] = {name};");
        }
        let call = |row: &str, count: &str| {
            let named =
                |name: &str| if of_row.contains(name) { format!("{name}_of[{row}]") } else { name.into() };
            body.call_with("j", count, &addresses, &named)
        };
        let last = self.kernel.axes.len() - 1;
        let several = |count: &str| {
            let rows: Vec<String> = (0..GROUP).map(|row| call(&row.to_string(), count)).collect();
            format!("{{\n{load}{}\n{store}}}", rows.join("\n"))
        };
        let (open, close) = self.serial_loops(last - self.kernel.outer());
        let fold = format!(
            "{open}if (behind - group == {GROUP}) {{
            long j = 0;
            for (; j + KILN_LANES <= n{last}; j += KILN_LANES) {}
            if (j < n{last}) {}
            }} else for (long row = 0; row < behind - group; row++) {{
            for (long j = 0; j < n{last}; j += KILN_LANES) {{
            {load}{}
            {store}}}
            }}
            {close}",
            several("KILN_LANES"),
            several(&format!("n{last} - j")),
            call("row", &format!("n{last} - j < KILN_LANES ? n{last} - j : KILN_LANES")),
        );
        Group { before, keep, fold }
    }
}

/// The text around a group of rows: declarations, what is kept of every row, and the folds.
struct Group {
    before: String,
    keep: String,
    fold: String,
}
