//! C text of a kernel, in GCC/Clang vector extensions.
//!
//! [Note: one text for many sizes]
//! Extents, strides and run-time numbers are arguments (`ints`, `scalars`), so loops of equal form give equal
//! text whatever their sizes. What is part of the text: the modes, dtypes and operations, which strides are 0,
//! whether the stride along the vector axis is 1, divisors in indices. Loops that will run on many sizes
//! ([`C::general`]) take divisors as arguments, too.
//!
//! [Note: bodies]
//! The body of each pass is an always-inline function of the position and the number of live lanes. The main
//! loop calls it with the constant full count, so that partial loads and masks vanish, and the tail once with
//! what is left.

mod body;
mod columns;
mod copies;
mod expr;
mod folds;
mod helpers;
mod indices;
mod memory;
mod narrow;
mod source;
mod stages;
mod tiles;
mod unroll;
mod windows;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;

use kiln_ir::math::{Function, Width};
use kiln_ir::{DType, Fault, planted};

use kiln_plan::index::{AxisId, ExprId};
use kiln_plan::loops::{Expr, ExprKind, Kernel, Mode, Reduction, Store};

use indices::Last;
pub(crate) use source::name_of;
pub use source::{C, KernelSource};

use kiln_plan::signature::{self, Argument, Piece, TILE, row_bytes};
use kiln_plan::{Machine, Signature};

/// Where an expression is computed.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Level {
    /// Once per call.
    Call,
    /// Once per item.
    Item,
    /// In [`Mode::Columns`]: once per column, kept in scratch.
    Column,
    /// In the loops.
    Body,
}

struct Emitter<'k> {
    kernel: &'k Kernel,
    machine: &'k Machine,
    lanes: usize,
    /// Whether long bodies are cut into stages.
    staged: bool,
    /// How many vectors loops over independent elements take at a time.
    vectors: usize,
    /// Bytes of a mask's lanes.
    mask: usize,
    depths: Vec<usize>,
    levels: Vec<Level>,
    /// Whether the value differs between lanes.
    lane_varies: Vec<bool>,
    /// Values kept in a row of scratch, by the pass that computes them.
    saved: BTreeMap<ExprId, usize>,
    /// The numbers of the loops, by where they stand.
    numbers: BTreeMap<*const i64, usize>,
    /// The integer arguments.
    ints: Vec<Argument>,
    /// Names of `ints`, declared at the top.
    int_names: Vec<String>,
    /// What scratch holds.
    pieces: Vec<Piece>,
    /// Numbers that have no argument of their own.
    twins: Vec<(usize, usize)>,
    functions: Vec<(Function, Width)>,
    /// Types of the names that a body may take as parameters.
    outer_names: BTreeMap<String, String>,
    /// Strides of accesses, fixed once.
    stride_names: BTreeMap<(usize, usize), String>,
    /// Names of the numbers inside quotients, by where they stand in the kernel; `None` if they are part of the
    /// text.
    inner_names: Option<BTreeMap<*const i64, String>>,
    /// Names of the last positions that clamped ones may be.
    last_names: BTreeMap<Last<'k>, (String, usize)>,
    /// Functions written so far.
    bodies: String,
    uses_status: bool,
    /// Whether what is being written reads its operands from memory for the first time, front to back.
    streams: bool,
    /// Halves whose form in memory has a name where they are computed.
    halves: BTreeMap<ExprId, DType>,
    /// Loads that are turned in tiles.
    turned: Option<tiles::Turned>,
    /// Loads of neighbouring elements written so far.
    read: Vec<ExprId>,
    /// Those of the first pass over a row that the second pass asks for ahead of the next row.
    ahead: Vec<ExprId>,
}

/// The type of values of a dtype.
fn vector_type(dtype: DType, mask: usize) -> &'static str {
    match dtype {
        DType::F16 | DType::BF16 | DType::F32 => "f32v",
        DType::F64 => "f64v",
        DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => "i64v",
        DType::Bool if mask == 4 => "i32v",
        DType::Bool => "i64v",
    }
}

fn memory_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F64 => "double",
        DType::I64 => "long long",
        DType::I32 => "int",
        DType::I16 => "short",
        DType::I8 => "signed char",
        DType::Bool | DType::U8 => "unsigned char",
        // As bits.
        DType::F16 | DType::BF16 => "unsigned short",
    }
}

fn suffix(dtype: DType) -> &'static str {
    dtype.name()
}

/// Whether a kernel goes along its rows element by element: a scan does so anyway, and where there is little else to
/// compute, taking vectors apart and putting them together would take longer than the scan.
fn runs_by_elements(kernel: &Kernel) -> bool {
    let is_plain = |dtype: DType| matches!(dtype, DType::F32 | DType::F64 | DType::I64);
    let is_cheap = |expr: &Expr| match &expr.kind {
        ExprKind::Apply(op, _) => op.cost() == 0 && is_plain(expr.dtype),
        ExprKind::Reduce(..) => false,
        _ => is_plain(expr.dtype),
    };
    kernel.mode == Mode::Rows
        && kernel.has_scans()
        && kernel.exprs.iter().all(is_cheap)
        && kernel.buffers.iter().all(|&dtype| is_plain(dtype))
}

fn emit<'k>(kernel: &'k Kernel, target: &'k C) -> KernelSource {
    let lanes = if runs_by_elements(kernel) { 1 } else { target.machine.isa.lanes(kernel.widest().max(4)) };
    let has_f32 = kernel.exprs.iter().any(|e| e.dtype == DType::F32) || kernel.buffers.contains(&DType::F32);
    let wide = kernel.exprs.iter().any(|e| e.dtype.size() == 8);
    let mut this = Emitter {
        kernel,
        machine: &target.machine,
        lanes,
        staged: target.stages,
        vectors: target.unroll,
        mask: if has_f32 || !wide { 4 } else { 8 },
        depths: kernel.depths(),
        levels: Vec::new(),
        lane_varies: kernel.varies(|a| a == kernel.vector_axis()),
        saved: BTreeMap::new(),
        numbers: BTreeMap::new(),
        ints: Vec::new(),
        int_names: Vec::new(),
        pieces: Vec::new(),
        twins: Vec::new(),
        functions: Vec::new(),
        outer_names: BTreeMap::new(),
        stride_names: BTreeMap::new(),
        inner_names: target.general.then(BTreeMap::new),
        last_names: BTreeMap::new(),
        bodies: String::new(),
        uses_status: kernel.exprs.iter().any(|e| matches!(e.kind, ExprKind::Bounded { code: 1.., .. })),
        streams: false,
        halves: BTreeMap::new(),
        turned: None,
        read: Vec::new(),
        ahead: Vec::new(),
    };
    kernel.each_number(&mut |number| {
        let count = this.numbers.len();
        this.numbers.insert(std::ptr::from_ref(number), count);
    });
    this.classify();
    this.run()
}

impl<'k> Emitter<'k> {
    fn classify(&mut self) {
        let kernel = self.kernel;
        let vector = kernel.vector_axis();
        let any = kernel.varies(|_| true);
        let body = match kernel.mode {
            Mode::Map | Mode::Table => kernel.varies(|a| a == vector),
            Mode::Rows | Mode::Columns => kernel.varies(|a| kernel.axes[a].inner),
        };
        let column = kernel.varies(|a| a == vector);
        for (id, expr) in kernel.exprs.iter().enumerate() {
            let level = if body[id] || matches!(expr.kind, ExprKind::Fold(..)) {
                Level::Body
            } else if kernel.mode == Mode::Columns && (column[id] || self.depths[id] > 0) {
                // Cheap columns are computed where they are used; what needs a reduction is kept.
                let cheap = self.depths[id] == 0
                    && !matches!(&expr.kind, ExprKind::Apply(op, _) if op.cost() > 0)
                    && kernel.operands(id).iter().all(|&o| self.levels[o] != Level::Column);
                if cheap { Level::Body } else { Level::Column }
            } else if !any[id] && self.depths[id] == 0 {
                Level::Call
            } else {
                Level::Item
            };
            self.levels.push(level);
        }
    }

    /// Declares an integer argument.
    fn int(&mut self, name: String, argument: Argument) -> String {
        self.outer_names.insert(name.clone(), "long".into());
        self.ints.push(argument);
        self.int_names.push(name.clone());
        name
    }

    /// Declares a number of the loops as an argument.
    fn number(&mut self, name: String, number: &'k i64) -> String {
        let number = self.numbers[&std::ptr::from_ref(number)];
        self.int(name, Argument::Number(number))
    }

    /// Declares where a new piece of scratch begins.
    fn scratch(&mut self, name: String, piece: Piece) -> String {
        self.pieces.push(piece);
        self.int(name, Argument::Scratch(self.pieces.len() - 1))
    }

    fn passes(&self) -> usize {
        let stores = self
            .kernel
            .stores
            .iter()
            .enumerate()
            .filter(|(_, s)| !matches!(self.kernel.exprs[s.value].kind, ExprKind::Fold(..)))
            .map(|(s, _)| self.store_depth(s) + usize::from(self.is_whole(s)));
        let reductions =
            (0..self.kernel.exprs.len()).filter(|&e| self.is_reduction(e)).map(|e| self.depths[e]);
        stores.chain(reductions).max().unwrap_or(0)
    }

    fn is_reduction(&self, expr: ExprId) -> bool {
        matches!(self.kernel.exprs[expr].kind, ExprKind::Reduce(..))
    }

    /// Whether a store happens inside the inner loops. A scatter does, whatever it puts where.
    fn is_whole(&self, store: usize) -> bool {
        let Store { index, value, .. } = &self.kernel.stores[store];
        let inner = (0..self.kernel.axes.len()).any(|a| self.kernel.axes[a].inner && index.mentions(a));
        let is_body = self.levels[*value] == Level::Body && self.kernel.mode != Mode::Columns;
        inner || is_body || self.kernel.stores[store].is_scatter()
    }

    /// The passes that must be complete before a store.
    fn store_depth(&self, store: usize) -> usize {
        let operands = self.kernel.stores[store].operands();
        operands.into_iter().map(|operand| self.depths[operand]).max().unwrap_or(0)
    }

    /// What stores need to be computed.
    fn stored(&self, stores: &[usize]) -> Vec<ExprId> {
        stores.iter().flat_map(|&s| self.kernel.stores[s].operands()).collect()
    }

    /// The reductions and stores of a pass.
    fn sinks(&self, pass: usize) -> (Vec<(ExprId, Reduction, ExprId)>, Vec<usize>) {
        let mut reductions = Vec::new();
        for (id, expr) in self.kernel.exprs.iter().enumerate() {
            if let ExprKind::Reduce(r, arg) = expr.kind
                && self.depths[arg] == pass
            {
                reductions.push((id, r, arg));
            }
        }
        let stores = (0..self.kernel.stores.len())
            .filter(|&s| !self.is_fold(s) && self.is_whole(s) && self.store_depth(s) == pass)
            .collect();
        (reductions, stores)
    }

    /// The expressions needed to compute `roots`, in order, not going below those for which `known` holds;
    /// returns those known ones that are used directly, too.
    fn needed(
        &self,
        roots: impl IntoIterator<Item = ExprId>,
        known: &dyn Fn(ExprId) -> bool,
    ) -> (Vec<ExprId>, Vec<ExprId>) {
        let mut mark = vec![false; self.kernel.exprs.len()];
        for root in roots {
            mark[root] = true;
        }
        let (mut compute, mut take) = (Vec::new(), Vec::new());
        for id in (0..mark.len()).rev() {
            if !mark[id] {
                continue;
            }
            if known(id) {
                take.push(id);
                continue;
            }
            compute.push(id);
            for operand in self.kernel.operands(id) {
                mark[operand] = true;
            }
        }
        compute.reverse();
        take.reverse();
        (compute, take)
    }

    /// Decides which dear values of a row are kept for later passes.
    fn choose_saved(&mut self, passes: usize) {
        let inner = self.kernel.axes.iter().filter(|a| a.inner).count();
        if self.kernel.mode != Mode::Rows || inner != 1 || self.kernel.chunk.is_some() {
            return;
        }
        let mut first: BTreeMap<ExprId, usize> = BTreeMap::new();
        for pass in 0..=passes {
            let (reductions, stores) = self.sinks(pass);
            let roots = reductions.iter().map(|r| r.2).chain(self.stored(&stores));
            // What is folded is computed when everything else of a row is.
            let roots: Vec<ExprId> = if pass < passes { roots.collect() } else { self.folded() };
            let known =
                |id: ExprId| self.levels[id] != Level::Body || (first.contains_key(&id) && self.is_dear(id));
            let (compute, take) = self.needed(roots, &known);
            for id in take {
                if let Some(&at) = first.get(&id)
                    && self.levels[id] == Level::Body
                {
                    self.saved.insert(id, at);
                }
            }
            for id in compute {
                first.entry(id).or_insert(pass);
            }
        }
        let row = |&id: &ExprId| row_bytes(self.kernel, self.lanes as i64, self.element_bytes(id));
        let rows = if self.kernel.parts.is_some() { signature::GROUP as i64 } else { 1 };
        // They stay in the core's own cache, beside what later passes read.
        if rows * self.saved.keys().map(row).sum::<i64>() > self.machine.l2 as i64 / 2 {
            self.saved.clear();
        }
        if rows > 1 && !self.saved.is_empty() {
            self.int("row_bytes".into(), Argument::RowBytes);
        }
    }

    fn is_dear(&self, id: ExprId) -> bool {
        matches!(&self.kernel.exprs[id].kind, ExprKind::Apply(op, _) if op.cost() > 0)
            && self.kernel.exprs[id].dtype != DType::Bool
    }

    /// What an element takes in scratch.
    fn element_bytes(&self, id: ExprId) -> i64 {
        self.kernel.exprs[id].dtype.size().max(8) as i64
    }

    fn axis_name(&self, axis: AxisId) -> String {
        if axis == self.kernel.vector_axis() { "j".into() } else { format!("i{axis}") }
    }

    fn run(mut self) -> KernelSource {
        let kernel = self.kernel;
        let (outer, vector, tiled) = (kernel.outer(), kernel.vector_axis(), signature::tiled(kernel));
        for (b, dtype) in kernel.buffers.iter().enumerate() {
            self.outer_names.insert(format!("b{b}"), format!("{} *", memory_type(*dtype)));
        }
        for name in ["j", "count"] {
            self.outer_names.insert(name.into(), "long".into());
        }
        for a in 0..kernel.axes.len() {
            let name = self.axis_name(a);
            self.outer_names.insert(name, "long".into());
        }
        self.outer_names.insert("status".into(), "int *".into());
        for id in 0..kernel.exprs.len() {
            let ty = vector_type(kernel.exprs[id].dtype, self.mask);
            self.outer_names.insert(format!("v{id}"), ty.into());
        }

        let mut main = String::new();
        let mut decode = String::new();
        if kernel.mode != Mode::Table {
            for (b, dtype) in kernel.buffers.iter().enumerate() {
                let _ = writeln!(main, "    {} *b{b} = bufs[{b}];", memory_type(*dtype));
            }
            // Extents, then the item's position.
            for (a, axis) in kernel.axes.iter().enumerate() {
                self.number(format!("n{a}"), &axis.extent);
            }
            let blocked = kernel.mode != Mode::Rows;
            let parallel = if blocked { outer - 1 } else { outer };
            let _ = writeln!(decode, "        long rest = item;");
            if let Some(a) = tiled {
                // Tiles below each other come first.
                let tiles = format!("((n{a} + {}) / {TILE})", TILE - 1);
                let _ = writeln!(
                    decode,
                    "        const long top = rest % {tiles} * {TILE}, bottom = top + {TILE} < n{a} ? top + {TILE} : n{a};
        rest /= {tiles};"
                );
            }
            if blocked {
                let (width, blocks) =
                    (self.int("width".into(), Argument::Width), self.int("blocks".into(), Argument::Blocks));
                let _ = writeln!(
                    decode,
                    "        const long lo = rest % {blocks} * {width}, hi = lo + {width} < n{vector} ? lo + {width} : n{vector};
        rest /= {blocks};"
                );
            }
            let last = (0..parallel).find(|&a| tiled != Some(a));
            for a in (0..parallel).rev().filter(|&a| tiled != Some(a)) {
                let _ = match a {
                    _ if Some(a) == last => writeln!(decode, "        const long i{a} = rest;"),
                    _ => writeln!(decode, "        const long i{a} = rest % n{a};\n        rest /= n{a};"),
                };
            }
        }
        if let Some(chunk) = &kernel.chunk {
            self.number("chunk".into(), chunk);
            let n = outer;
            let _ = writeln!(
                decode,
                "        const long from = i0 * chunk, upto = from + chunk < n{n} ? from + chunk : n{n};"
            );
            self.outer_names.insert("from".into(), "long".into());
            self.outer_names.insert("upto".into(), "long".into());
        }
        for name in ["lo", "hi", "top"] {
            self.outer_names.insert(name.into(), "long".into());
        }
        let statements = self.statements(Level::Call, "    ");
        main.push_str(&statements);
        let mut declared = BTreeSet::new();
        let loops = match kernel.mode {
            Mode::Map if let Some(copy) = tiled.and_then(|a| self.turned_copy(a)) => copy,
            Mode::Map if let Some(a) = tiled => {
                let tiles = self.turn_tile(a);
                let rows = self.map_loops();
                format!("{tiles}        for (long i{a} = top; i{a} < bottom; i{a}++) {{\n{rows}        }}\n")
            }
            Mode::Map | Mode::Table => self.copies().unwrap_or_else(|| self.map_loops()),
            Mode::Rows => self.turn_rows() + &self.row_loops(&mut declared),
            Mode::Columns => self.column_loops(),
        };
        if kernel.mode == Mode::Table {
            // The list of chunks follows the other integers: row, first element, count.
            let (columns, base) = (kernel.buffers.len(), self.ints.len());
            let _ = writeln!(decode, "const long *chunk = ints + {base} + 3 * item, row = chunk[0];");
            decode.push_str("const long lo = chunk[1], hi = lo + chunk[2];\n");
            for (b, dtype) in kernel.buffers.iter().enumerate() {
                let is_null = planted(Fault::NullStore) && b + 1 == columns;
                let from = if is_null { "0".into() } else { format!("bufs[{columns} * row + {b}]") };
                let _ = writeln!(decode, "{} *b{b} = {from};", memory_type(*dtype));
            }
        }
        let items = match kernel.parts {
            Some(_) => self.part_loops(&format!("{decode}{loops}"), &mut declared),
            None => format!(
                "    for (long item = begin; item < end; item++) {{
{decode}{loops}    }}
"
            ),
        };
        let mut head = String::new();
        for (i, name) in self.int_names.iter().enumerate() {
            let _ = writeln!(head, "    const long {name} = ints[{i}];");
        }
        let status =
            if self.uses_status { ("    int code = 0, *status = &code;\n", "code") } else { ("", "0") };
        let code = format!(
            "{}int KERNEL(void *const *bufs, const long *ints, const unsigned long *scalars, long begin, long end, char *scratch) {{
{head}{}{main}{items}    return {};
}}
",
            self.bodies, status.0, status.1
        );
        self.functions.sort();
        self.functions.dedup();
        let signature =
            Signature { list: self.ints, pieces: self.pieces, twins: self.twins, lanes: self.lanes as i64 };
        let code = indent(&code);
        let name = name_of(&code);
        KernelSource {
            code: code.replace("KERNEL", &name),
            name,
            lanes: self.lanes,
            functions: self.functions,
            signature: Arc::new(signature),
        }
    }
}

/// Indents every line by the braces around it.
fn indent(text: &str) -> String {
    let (mut out, mut depth) = (String::with_capacity(text.len()), 0usize);
    for line in text.lines().map(str::trim) {
        let closing = line.chars().take_while(|c| *c == '}').count();
        let is_continued = line.starts_with(':');
        out.push_str(&"    ".repeat(depth.saturating_sub(closing) + usize::from(is_continued)));
        out.push_str(line);
        out.push('\n');
        let (open, close) = (line.matches('{').count(), line.matches('}').count());
        depth = (depth + open).saturating_sub(close);
    }
    out
}
