//! Bodies as inline functions, and the loops of kernels that run along rows.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::unroll::Statements;
use super::{Emitter, Level, Piece, memory_type, suffix, vector_type};
use kiln_plan::index::{ExprId, Index};
use kiln_plan::loops::{ExprKind, Reduction};

/// A function written for a pass: its name and what it is called with beside position and count.
pub(super) struct Body {
    name: String,
    params: Vec<String>,
}

impl Body {
    pub(super) fn params(&self) -> impl Iterator<Item = &String> {
        self.params.iter()
    }

    pub(super) fn call(&self, position: &str, count: &str, more: &[String]) -> String {
        self.call_with(position, count, more, &|name| name.into())
    }

    /// A call where the parameters go under other names.
    pub(super) fn call_with(
        &self,
        position: &str,
        count: &str,
        more: &[String],
        named: &dyn Fn(&str) -> String,
    ) -> String {
        let mut args = vec![position.to_string(), count.to_string()];
        args.extend(self.params.iter().map(|name| named(name)));
        args.extend(more.iter().cloned());
        format!("{}({});", self.name, args.join(", "))
    }
}

impl Emitter<'_> {
    /// Statements for the expressions of a level that are computed once per call.
    pub(super) fn statements(&mut self, level: Level, indent: &str) -> String {
        let ids: Vec<ExprId> = (0..self.kernel.exprs.len()).filter(|&id| self.levels[id] == level).collect();
        self.compute(&ids, indent)
    }

    /// Statements for the expressions that are computed once per item when `depth` passes are done.
    pub(super) fn item_statements(&mut self, depth: usize) -> String {
        let ids: Vec<ExprId> = (0..self.kernel.exprs.len())
            .filter(|&id| {
                self.levels[id] == Level::Item && self.depths[id] == depth && !self.is_reduction(id)
            })
            .collect();
        self.compute(&ids, "        ")
    }

    pub(super) fn compute(&mut self, ids: &[ExprId], indent: &str) -> String {
        ids.iter().map(|&id| self.compute_one(id, indent)).collect()
    }

    /// The statement that computes an expression, and what it needs before.
    pub(super) fn compute_one(&mut self, id: ExprId, indent: &str) -> String {
        let mut out = String::new();
        let text = self.expression(id, &mut out, indent);
        let ty = vector_type(self.kernel.exprs[id].dtype, self.mask);
        let _ = writeln!(out, "{indent}const {ty} v{id} = {text};");
        out
    }

    /// Declarations of the pointers of loads and stores in a body.
    pub(super) fn pointers(
        &mut self,
        ids: &[ExprId],
        stores: &[usize],
        declared: &mut BTreeSet<String>,
    ) -> String {
        let mut out = String::new();
        for &id in ids {
            if let ExprKind::Load { buffer, index } = &self.kernel.exprs[id].kind
                && matches!(self.levels[id], Level::Body | Level::Column)
                && declared.insert(format!("p{id}"))
            {
                let dtype = self.kernel.buffers[*buffer];
                let text = self.pointer(&format!("p{id}"), id, *buffer, index, dtype);
                out.push_str(&text);
            }
        }
        for &s in stores {
            if declared.insert(format!("q{s}")) {
                let store = &self.kernel.stores[s];
                let dtype = self.kernel.buffers[store.buffer];
                let text =
                    self.pointer(&format!("q{s}"), self.store_access(s), store.buffer, &store.index, dtype);
                out.push_str(&text);
            }
        }
        out
    }

    /// Writes a body function. What it takes from outside is found in its text.
    pub(super) fn body(
        &mut self,
        name: &str,
        text: &str,
        locals: &BTreeSet<String>,
        more: &[String],
    ) -> Body {
        let mut params: BTreeSet<String> = BTreeSet::new();
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        for word in text.split(|c: char| !is_word(c)).filter(|w| !w.is_empty()) {
            if self.outer_names.contains_key(word) && !locals.contains(word) && word != "j" && word != "count"
            {
                params.insert(word.into());
            }
        }
        let params: Vec<String> = params.into_iter().collect();
        let mut list = vec!["long j".to_string(), "long count".to_string()];
        list.extend(params.iter().map(|p| {
            let ty = &self.outer_names[p];
            if ty.ends_with('*') { format!("{ty}{p}") } else { format!("const {ty} {p}") }
        }));
        list.extend(more.iter().cloned());
        let _ = write!(self.bodies, "KILN_INLINE void KERNEL_{name}({}) {{\n{text}}}\n", list.join(", "));
        Body { name: format!("KERNEL_{name}"), params }
    }

    /// Cheap bodies run with several accumulators, so that the additions overlap.
    pub(super) fn unroll(&self, ids: &[ExprId]) -> usize {
        let dear = ids.iter().any(|&id| {
            matches!(&self.kernel.exprs[id].kind, ExprKind::Apply(op, _) if op.cost() > 0)
                || matches!(&self.kernel.exprs[id].kind, ExprKind::Bounded { .. })
        });
        let operations =
            ids.iter().filter(|&&id| matches!(self.kernel.exprs[id].kind, ExprKind::Apply(..))).count();
        if dear || operations > 6 { 1 } else { 4 }
    }

    /// Loops over all inner axes but the last; returns the opening and the closing text.
    pub(super) fn serial_loops(&self, count: usize) -> (String, String) {
        let outer = self.kernel.outer();
        let (mut open, mut close) = (String::new(), String::new());
        for a in outer..outer + count {
            let (from, to) = match (a == outer, self.kernel.chunk) {
                (true, Some(_)) => ("from".to_string(), "upto".to_string()),
                _ => ("0".to_string(), format!("n{a}")),
            };
            let _ = writeln!(open, "        for (long i{a} = {from}; i{a} < {to}; i{a}++) {{");
            close.push_str("        }\n");
        }
        (open, close)
    }

    pub(super) fn row_loops(&mut self, declared: &mut BTreeSet<String>) -> String {
        let passes = self.passes();
        self.choose_saved(passes);
        let mut out = String::new();
        let saved: Vec<ExprId> = self.saved.keys().copied().collect();
        for id in saved {
            let dtype = self.kernel.exprs[id].dtype;
            let at = self.scratch(format!("kept{id}"), Piece::Row(self.element_bytes(id)));
            let ty = memory_type(dtype);
            // Those of a group of rows are needed once more.
            let row = if self.kernel.parts.is_some() { " + (item - group) * row_bytes" } else { "" };
            let _ = writeln!(out, "        {ty} *r{id} = ({ty} *)(scratch + {at}{row});");
            self.outer_names.insert(format!("r{id}"), format!("{ty} *"));
        }
        for pass in 0..passes {
            out.push_str(&self.item_statements(pass));
            let text = self.row_pass(pass, passes, declared);
            out.push_str(&text);
            if pass == 0 && passes > 1 {
                out.push_str(&self.rows_ahead());
            }
        }
        out.push_str(&self.item_statements(passes));
        for s in 0..self.kernel.stores.len() {
            if !self.is_fold(s) && !self.is_whole(s) {
                let text = self.store_one(s, "        ");
                out.push_str(&text);
            }
        }
        out
    }

    /// Pointers to the next row of every operand that the first pass reads front to back. Rows that would not
    /// stay in the second-level cache until their turn are left alone.
    fn rows_ahead(&mut self) -> String {
        let inner = self.kernel.axes.len() - self.kernel.outer();
        let (kernel, outer) = (self.kernel, self.kernel.outer());
        let mut read = std::mem::take(&mut self.read);
        read.retain(|&id| {
            let moves = |index: &Index| (0..outer).any(|axis| index.mentions(axis));
            let differs = matches!(&kernel.exprs[id].kind, ExprKind::Load { index, .. } if moves(index));
            differs && inner == 1 && kernel.chunk.is_none()
        });
        let last = self.kernel.axes.len() - 1;
        // Elements of the longest such row: of f32, a sixteenth of the cache.
        let longest = self.machine.l2 / 64;
        let mut out = String::new();
        for &id in &read {
            let ExprKind::Load { buffer, .. } = kernel.exprs[id].kind else { continue };
            let ty = memory_type(kernel.buffers[buffer]);
            self.outer_names.insert(format!("ahead{id}"), format!("{ty} *"));
            let _ = writeln!(out, "        {ty} *ahead{id} = p{id} + (n{last} <= {longest} ? n{last} : 0);");
        }
        self.ahead = read;
        out
    }

    fn row_pass(&mut self, pass: usize, passes: usize, declared: &mut BTreeSet<String>) -> String {
        let (reductions, stores) = self.sinks(pass);
        let roots: Vec<ExprId> = reductions.iter().map(|r| r.2).chain(self.stored(&stores)).collect();
        let kept_before = |id: ExprId| self.saved.get(&id).is_some_and(|&at| at < pass);
        let known = |id: ExprId| self.levels[id] != Level::Body || kept_before(id);
        let (ids, take) = self.needed(roots, &known);
        let mut locals: BTreeSet<String> = ids.iter().map(|id| format!("v{id}")).collect();
        let mut list = Vec::new();
        for id in take {
            if kept_before(id) {
                let expr = &self.kernel.exprs[id];
                let ty = vector_type(expr.dtype, self.mask);
                list.push(format!("    const {ty} v{id} = kiln_load_{}(r{id} + j);\n", suffix(expr.dtype)));
                locals.insert(format!("v{id}"));
            }
        }
        self.streams = passes == 1;
        list.extend(ids.iter().map(|&id| self.compute_one(id, "    ")));
        self.streams = false;
        if pass == 1 {
            for id in std::mem::take(&mut self.ahead) {
                // The first pass is the one that waits for memory: what the next row needs is asked for here.
                list.push(format!("    __builtin_prefetch(ahead{id} + j);\n"));
            }
        }
        for &id in &ids {
            if self.saved.get(&id) == Some(&pass) {
                // Dead lanes of the last vector are kept too: the row has room for them.
                let suffix = suffix(self.kernel.exprs[id].dtype);
                list.push(format!("    kiln_store_{suffix}(r{id} + j, v{id});\n"));
            }
        }
        list.extend(stores.iter().map(|&s| self.store(s, &ids, "    ")));
        let mut more = Vec::new();
        for &(id, reduction, arg) in &reductions {
            let dtype = self.kernel.exprs[id].dtype;
            let live = self.masked(reduction, dtype, &format!("v{arg}"));
            let combined = self.combine(reduction, dtype, &format!("*a{id}"), &format!("x{id}_"));
            let ty = vector_type(dtype, self.mask);
            list.push(format!(
                "    const {ty} x{id}_ = count == KILN_LANES ? v{arg} : {live};\n    *a{id} = {combined};\n"
            ));
            more.push(format!("{ty} *a{id}"));
        }
        let mut out = self.pointers(&ids, &stores, declared);
        let scans = self.scans(&ids);
        for &(id, scan) in &scans {
            let ty = memory_type(self.kernel.exprs[id].dtype);
            more.push(format!("{ty} *s{id}"));
            let _ = writeln!(out, "        {ty} s{id}_{pass} = {};", scan.start());
        }
        let statements = Statements { ids, list, locals };
        let ids = &statements.ids;
        let body = self.body(&format!("pass{pass}"), &statements.text(), &statements.locals, &more);

        let unroll = if reductions.is_empty() { 1 } else { self.unroll(ids) };
        let has_sum = reductions.iter().any(|r| r.1 == Reduction::Sum);
        for &(id, reduction, _) in &reductions {
            let dtype = self.kernel.exprs[id].dtype;
            let (ty, identity) = (vector_type(dtype, self.mask), self.identity(reduction, dtype));
            let _ = writeln!(out, "        {ty} w{id} = {identity};");
        }
        let inner = self.kernel.axes.len() - self.kernel.outer();
        let last = self.kernel.axes.len() - 1;
        let (open, close) = self.serial_loops(inner - 1);
        let (from, to) = match (inner, self.kernel.chunk) {
            (1, Some(_)) => ("from".to_string(), "upto".to_string()),
            _ => ("0".to_string(), format!("n{last}")),
        };
        out.push_str(&open);
        let addresses = |u: usize| -> Vec<String> {
            let accumulators = reductions.iter().map(|r| format!("&a{}_{u}", r.0));
            accumulators.chain(scans.iter().map(|s| format!("&s{}_{pass}", s.0))).collect()
        };
        // Blocks of sums are added up separately: rounding errors grow with the block, not with the row.
        let _ = if has_sum {
            writeln!(
                out,
                "        for (long block = {from}; block < {to}; block += {0} * KILN_LANES) {{
        const long stop = block + {0} * KILN_LANES < {to} ? block + {0} * KILN_LANES : {to};
        long j = block;",
                128
            )
        } else {
            writeln!(out, "        {{\n        const long stop = {to};\n        long j = {from};")
        };
        for &(id, reduction, _) in &reductions {
            let dtype = self.kernel.exprs[id].dtype;
            let (ty, identity) = (vector_type(dtype, self.mask), self.identity(reduction, dtype));
            let names: Vec<String> = (0..unroll).map(|u| format!("a{id}_{u} = {identity}")).collect();
            let _ = writeln!(out, "        {ty} {};", names.join(", "));
        }
        if unroll > 1 {
            let _ = writeln!(
                out,
                "        for (; j + {unroll} * KILN_LANES <= stop; j += {unroll} * KILN_LANES) {{"
            );
            for u in 0..unroll {
                let position = if u == 0 { "j".to_string() } else { format!("j + {u} * KILN_LANES") };
                let _ = writeln!(out, "            {}", body.call(&position, "KILN_LANES", &addresses(u)));
            }
            out.push_str("        }\n");
        }
        let several = match unroll {
            1 => {
                let (name, at) = (format!("pass{pass}"), addresses(0));
                self.several_vectors(&name, &statements, (&more, &at), &stores, "stop")
            }
            _ => None,
        };
        out.push_str(several.as_deref().unwrap_or_default());
        // Behind an unrolled loop little is left: one body with a variable count does for it.
        let _ = if unroll > 1 || several.is_some() {
            writeln!(
                out,
                "for (; j < stop; j += KILN_LANES) {}",
                body.call("j", "stop - j < KILN_LANES ? stop - j : KILN_LANES", &addresses(0))
            )
        } else {
            writeln!(
                out,
                "for (; j + KILN_LANES <= stop; j += KILN_LANES) {}\nif (j < stop) {}",
                body.call("j", "KILN_LANES", &addresses(0)),
                body.call("j", "stop - j", &addresses(0))
            )
        };
        for &(id, reduction, _) in &reductions {
            let dtype = self.kernel.exprs[id].dtype;
            let mut step = unroll;
            while step > 1 {
                step /= 2;
                for u in 0..step {
                    let text =
                        self.combine(reduction, dtype, &format!("a{id}_{u}"), &format!("a{id}_{}", u + step));
                    let _ = writeln!(out, "        a{id}_{u} = {text};");
                }
            }
            let text = self.combine(reduction, dtype, &format!("w{id}"), &format!("a{id}_0"));
            let _ = writeln!(out, "        w{id} = {text};");
        }
        out.push_str("        }\n");
        out.push_str(&close);
        for &(id, reduction, _) in &reductions {
            let dtype = self.kernel.exprs[id].dtype;
            let ty = vector_type(dtype, self.mask);
            let text = self.across(reduction, dtype, &format!("w{id}"), &mut out);
            let _ = writeln!(out, "        const {ty} v{id} = {text};");
        }
        out
    }
}
