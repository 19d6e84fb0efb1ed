//! The loops of kernels that reduce over rows and run vectors along columns: accumulators lie in scratch, one
//! element per column, and the rows stream by.

use std::collections::BTreeSet;
use std::fmt::Write;

use kiln_ir::{Fault, planted};

use super::unroll::{Statements, each_word};
use super::{Emitter, Level, Piece, memory_type, vector_type};
use kiln_plan::index::ExprId;
use kiln_plan::loops::Reduction;

/// Rows whose sum is formed before it is added to the total: fixed, since no bit depends on the machine's caches.
pub(super) const ROWS: usize = 256;

impl Emitter<'_> {
    /// Declares an array with one element per column.
    fn column(&mut self, name: &str, id: ExprId) -> String {
        let dtype = self.kernel.exprs[id].dtype;
        let at = self.scratch(format!("at_{name}"), Piece::Columns);
        // Masks are kept as they are.
        let ty = match dtype {
            kiln_ir::DType::Bool if self.mask == 4 => "int",
            kiln_ir::DType::Bool => "long long",
            _ => memory_type(dtype),
        };
        self.outer_names.insert(name.into(), format!("{ty} *"));
        format!("        {ty} *{name} = ({ty} *)(scratch + {at});\n")
    }

    fn column_load(&self, name: &str, id: ExprId) -> String {
        let ty = vector_type(self.kernel.exprs[id].dtype, self.mask);
        format!("*({ty} *)({name} + (j - lo))")
    }

    pub(super) fn column_loops(&mut self) -> String {
        let passes = self.passes();
        let mut out = self.item_statements(0);
        let mut declared = BTreeSet::new();
        let kept = self.kept_columns(passes);
        for &id in &kept {
            let text = self.column(&format!("c{id}"), id);
            out.push_str(&text);
            if self.is_reduction(id) {
                let text = self.column(&format!("a{id}"), id);
                out.push_str(&text);
            }
        }
        for pass in 0..=passes {
            let text = self.column_values(pass, pass == passes, &kept, &mut declared);
            out.push_str(&text);
            if pass < passes {
                let text = self.column_pass(pass, &mut declared);
                out.push_str(&text);
            }
        }
        out
    }

    /// The values per column that are needed in another loop than the one that computes them.
    fn kept_columns(&self, passes: usize) -> BTreeSet<ExprId> {
        let kernel = self.kernel;
        let mut kept: BTreeSet<ExprId> =
            (0..kernel.exprs.len()).filter(|&id| self.is_reduction(id)).collect();
        for id in 0..kernel.exprs.len() {
            for operand in kernel.operands(id) {
                let elsewhere = self.levels[id] == Level::Body || self.depths[id] != self.depths[operand];
                if self.levels[operand] == Level::Column && (elsewhere || self.is_reduction(id)) {
                    kept.insert(operand);
                }
            }
        }
        for (s, store) in kernel.stores.iter().enumerate() {
            let late = self.is_whole(s) || self.store_depth(s) != passes;
            for value in store.operands() {
                if self.levels[value] == Level::Column && late {
                    kept.insert(value);
                }
            }
        }
        kept
    }

    fn each_column(&self, call: &dyn Fn(&str, &str) -> String) -> String {
        format!(
            "        {{ long j = lo;
        for (; j + KILN_LANES <= hi; j += KILN_LANES) {{ {} }}
        if (j < hi) {{ {} }} }}
",
            call("j", "KILN_LANES"),
            call("j", "hi - j")
        )
    }

    /// Computes what is known per column when `depth` passes are done, and stores results at the end.
    fn column_values(
        &mut self,
        depth: usize,
        last: bool,
        kept: &BTreeSet<ExprId>,
        declared: &mut BTreeSet<String>,
    ) -> String {
        let ids: Vec<ExprId> =
            kept.iter().copied().filter(|&id| self.depths[id] == depth && !self.is_reduction(id)).collect();
        let stores: Vec<usize> = if last {
            (0..self.kernel.stores.len()).filter(|&s| !self.is_whole(s)).collect()
        } else {
            Vec::new()
        };
        if ids.is_empty() && stores.is_empty() {
            return String::new();
        }
        let roots = ids.iter().copied().chain(stores.iter().map(|&s| self.kernel.stores[s].value));
        let mine: BTreeSet<ExprId> = ids.iter().copied().collect();
        let known = |id: ExprId| match self.levels[id] {
            Level::Call | Level::Item => true,
            Level::Column => kept.contains(&id) && !mine.contains(&id),
            Level::Body => false,
        };
        let (compute, take) = self.needed(roots.collect::<Vec<_>>(), &known);
        let mut text = String::new();
        let mut locals: BTreeSet<String> = compute.iter().map(|id| format!("v{id}")).collect();
        for id in take {
            if self.levels[id] == Level::Column {
                let ty = vector_type(self.kernel.exprs[id].dtype, self.mask);
                let _ = writeln!(text, "    const {ty} v{id} = {};", self.column_load(&format!("c{id}"), id));
                locals.insert(format!("v{id}"));
            }
        }
        text.push_str(&self.compute(&compute, "    "));
        for &id in &ids {
            let _ = writeln!(text, "    {} = v{id};", self.column_load(&format!("c{id}"), id));
        }
        for &s in &stores {
            let line = self.store(s, &compute, "    ");
            text.push_str(&line);
        }
        let mut out = self.pointers(&compute, &stores, declared);
        let body = self.body(&format!("columns{depth}"), &text, &locals, &[]);
        out.push_str(&self.each_column(&|j, count| body.call(j, count, &[])));
        out
    }

    fn column_pass(&mut self, pass: usize, declared: &mut BTreeSet<String>) -> String {
        let (reductions, stores) = self.sinks(pass);
        let roots: Vec<ExprId> = reductions.iter().map(|r| r.2).chain(self.stored(&stores)).collect();
        let (ids, take) = self.needed(roots, &|id| self.levels[id] != Level::Body);
        let mut locals: BTreeSet<String> = ids.iter().map(|id| format!("v{id}")).collect();
        let mut list = Vec::new();
        for id in take {
            if self.levels[id] == Level::Column {
                let ty = vector_type(self.kernel.exprs[id].dtype, self.mask);
                list.push(format!("    const {ty} v{id} = {};\n", self.column_load(&format!("c{id}"), id)));
                locals.insert(format!("v{id}"));
            }
        }
        list.extend(ids.iter().map(|&id| self.compute_one(id, "    ")));
        list.extend(stores.iter().map(|&s| self.store(s, &ids, "    ")));
        let mut more = Vec::new();
        for &(id, reduction, arg) in &reductions {
            let dtype = self.kernel.exprs[id].dtype;
            let combined = self.combine(reduction, dtype, &format!("*w{id}"), &format!("v{arg}"));
            list.push(format!("    *w{id} = {combined};\n"));
            more.push(format!("{} *w{id}", vector_type(dtype, self.mask)));
        }
        let mut out = self.pointers(&ids, &stores, declared);
        let scans = self.scans(&ids);
        for &(id, scan) in &scans {
            let dtype = self.kernel.exprs[id].dtype;
            more.push(format!("{} *s{id}", vector_type(dtype, self.mask)));
            let text = self.column(&format!("s{id}_{pass}"), id);
            out.push_str(&text);
            let start = self.scan_start(scan, dtype);
            let target = self.column_load(&format!("s{id}_{pass}"), id);
            let _ = writeln!(out, "        for (long j = lo; j < hi; j += KILN_LANES) {target} = {start};");
        }
        let last = self.kernel.axes.len() - 1;
        let unroll = if reductions.is_empty() && scans.is_empty() { 1 } else { self.unroll(&ids) };
        let statements = Statements { ids, list, locals };
        let name = format!("pass{pass}");
        let body = self.body(&name, &statements.text(), &statements.locals, &more);
        // Along columns, where nothing is carried from row to row.
        let several = if more.is_empty() {
            self.several_vectors(&name, &statements, (&[], &[]), &stores, "hi")
        } else {
            None
        };

        // Several rows at one go, so that accumulators are loaded and stored less often.
        let steps: Vec<usize> = if unroll > 1 { vec![unroll, 1] } else { vec![1] };
        let accumulators = reductions.iter().map(|r| format!("&w{}", r.0));
        let addresses: Vec<String> = accumulators.chain(scans.iter().map(|s| format!("&s{}", s.0))).collect();
        let mut groups = Vec::new();
        for &rows in &steps {
            let mut text = String::new();
            for &(id, _, _) in &reductions {
                let ty = vector_type(self.kernel.exprs[id].dtype, self.mask);
                let _ = writeln!(text, "    {ty} w{id} = {};", self.column_load(&format!("a{id}"), id));
            }
            for &(id, _) in &scans {
                let ty = vector_type(self.kernel.exprs[id].dtype, self.mask);
                let state = self.column_load(&format!("s{id}_{pass}"), id);
                let _ = writeln!(text, "    {ty} s{id} = {state};");
            }
            let names = body.call("j", "count", &addresses);
            for u in 0..rows {
                let row = format!("i{last}_{u}");
                let _ = writeln!(text, "    const long {row} = i{last} + {u};");
                let axis = format!("i{last}");
                let call = each_word(&names, &|word| (word == axis).then(|| row.clone()));
                let _ = writeln!(text, "    {call}");
            }
            for &(id, _, _) in &reductions {
                let _ = writeln!(text, "    {} = w{id};", self.column_load(&format!("a{id}"), id));
            }
            for &(id, _) in &scans {
                let state = self.column_load(&format!("s{id}_{pass}"), id);
                let _ = writeln!(text, "    {state} = s{id};");
            }
            groups.push(self.body(&format!("pass{pass}_rows{rows}"), &text, &BTreeSet::new(), &[]));
        }

        for &(id, reduction, _) in &reductions {
            let identity = self.identity(reduction, self.kernel.exprs[id].dtype);
            let target = self.column_load(&format!("c{id}"), id);
            let _ =
                writeln!(out, "        for (long j = lo; j < hi; j += KILN_LANES) {target} = {identity};");
        }
        let inner = self.kernel.axes.len() - self.kernel.outer();
        let (open, close) = self.serial_loops(inner - 1);
        let (from, to) = match (inner, self.kernel.chunk) {
            (1, Some(_)) => ("from".to_string(), "upto".to_string()),
            _ => ("0".to_string(), format!("n{last}")),
        };
        out.push_str(&open);
        let step = if planted(Fault::EndlessLoop) && !scans.is_empty() { 0 } else { ROWS };
        let _ = writeln!(
            out,
            "        for (long block = {from}; block < {to}; block += {step}) {{
        const long stop = block + {ROWS} < {to} ? block + {ROWS} : {to};"
        );
        for &(id, reduction, _) in &reductions {
            let identity = self.identity(reduction, self.kernel.exprs[id].dtype);
            let target = self.column_load(&format!("a{id}"), id);
            let _ =
                writeln!(out, "        for (long j = lo; j < hi; j += KILN_LANES) {target} = {identity};");
        }
        // Whole vectors, several rows at a time; then single rows and the last columns with a variable count.
        let variable = "hi - j < KILN_LANES ? hi - j : KILN_LANES";
        match (steps.as_slice(), groups.as_slice(), several) {
            (_, [single], Some(several)) => {
                let _ = write!(
                    out,
                    "for (long i{last} = block; i{last} < stop; i{last}++) {{
                    long j = lo;
                    {several}for (; j < hi; j += KILN_LANES) {}
                    }}
",
                    single.call("j", variable, &[]),
                );
            }
            ([rows, _], [several, single], _) => {
                let _ = write!(
                    out,
                    "const long whole = lo + (hi - lo) / KILN_LANES * KILN_LANES, done = block + (stop - block) / {rows} * {rows};
                    for (long i{last} = block; i{last} < done; i{last} += {rows}) {{
                    for (long j = lo; j < whole; j += KILN_LANES) {}
                    }}
                    for (long i{last} = block; i{last} < stop; i{last}++) {{
                    for (long j = i{last} < done ? whole : lo; j < hi; j += KILN_LANES) {}
                    }}
",
                    several.call("j", "KILN_LANES", &[]),
                    single.call("j", variable, &[]),
                );
            }
            (_, groups, _) => {
                for group in groups {
                    let _ = writeln!(out, "for (long i{last} = block; i{last} < stop; i{last}++) {{");
                    out.push_str(&self.each_column(&|j, count| group.call(j, count, &[])));
                    out.push_str("}\n");
                }
            }
        }
        for &(id, reduction, _) in &reductions {
            let (total, part) =
                (self.column_load(&format!("c{id}"), id), self.column_load(&format!("a{id}"), id));
            let text = self.combine_columns(reduction, id, &total, &part);
            let _ = writeln!(out, "        for (long j = lo; j < hi; j += KILN_LANES) {total} = {text};");
        }
        out.push_str("        }\n");
        out.push_str(&close);
        out
    }

    fn combine_columns(&mut self, reduction: Reduction, id: ExprId, total: &str, part: &str) -> String {
        let dtype = self.kernel.exprs[id].dtype;
        self.combine(reduction, dtype, total, part)
    }
}
