//! Loads that go down the columns of a transposed matrix: tile by tile, they are turned in scratch, and the body reads
//! them along its rows.

use std::fmt::Write;

use kiln_ir::DType;
use kiln_ir::math::c::Isa;

use super::{Emitter, Level, Piece, memory_type, suffix};
use kiln_plan::index::{AxisId, ExprId, Index, Term};
use kiln_plan::loops::{ExprKind, Mode, Store};
use kiln_plan::signature::{LINE, TILE};

/// Loads that are turned: those that lie side by side along an axis, but not along the vector axis.
pub(super) struct Turned {
    axis: AxisId,
    loads: Vec<ExprId>,
    /// Elements from one row of a tile to the next.
    step: String,
}

impl<'k> Emitter<'k> {
    /// The loads that tiles over this axis and the vector axis turn.
    fn turned_loads(&self, axis: AxisId) -> Vec<ExprId> {
        let vector = self.kernel.vector_axis();
        let is_turned = |index: &Index| {
            index.terms.iter().all(|(term, _)| matches!(term, Term::Axis(_)))
                && index.factor(axis) == 1
                && !matches!(index.factor(vector), -1..=1)
        };
        let of_load = |&id: &ExprId| match &self.kernel.exprs[id].kind {
            ExprKind::Load { index, .. } => is_turned(index),
            _ => false,
        };
        (0..self.kernel.exprs.len()).filter(of_load).collect()
    }

    /// Statements that turn the loads of a tile of independent elements.
    pub(super) fn turn_tile(&mut self, axis: AxisId) -> String {
        let loads = self.turned_loads(axis);
        let (mut out, mut fill) = (String::new(), String::new());
        for &id in &loads {
            let size = |bytes: i64| Piece::Bytes(TILE * TILE * bytes);
            let [declared, filled] = self.turn(id, &TILE.to_string(), &size, "", ("bottom - top", "hi - lo"));
            out.push_str(&declared);
            fill.push_str(&filled);
        }
        if !loads.is_empty() {
            let _ = write!(out, "        {{\n        const long i{axis} = top, j = lo;\n{fill}        }}\n");
        }
        self.turned = Some(Turned { axis, loads, step: TILE.to_string() });
        out
    }

    /// The loops of a kernel that does nothing but turn: from memory to memory.
    pub(super) fn turned_copy(&mut self, axis: AxisId) -> Option<String> {
        let (kernel, vector, loads) = (self.kernel, self.kernel.vector_axis(), self.turned_loads(axis));
        let is_copy = |store: &Store| {
            let is_plain = store.index.terms.iter().all(|(term, _)| matches!(term, Term::Axis(_)));
            let fits = is_plain && !store.adds && loads.contains(&store.value);
            fits && store.index.factor(vector) == 1
                && store.index.factor(axis) != 0
                && self.loaded_dtype(store.value) == Some(kernel.buffers[store.buffer])
        };
        let is_beside = |id: ExprId| self.levels[id] == Level::Body && !loads.contains(&id);
        if !kernel.stores.iter().all(is_copy) || (0..kernel.exprs.len()).any(is_beside) {
            return None;
        }
        let mut out = format!("        {{\n        const long i{axis} = top, j = lo;\n");
        for (s, store) in kernel.stores.iter().enumerate() {
            let access = self.store_access(s);
            let into = self.index_text(access, &store.index, None, &|_, _| true);
            let down = store.index.terms.iter().position(|(term, _)| *term == Term::Axis(axis))?;
            let step = self.stride(access, down, &store.index.terms[down].1);
            let to = format!("b{} + {into}", store.buffer);
            out.push_str(&self.turning(store.value, &to, &step, ("bottom - top", "hi - lo")));
        }
        out.push_str("        }\n");
        Some(out)
    }

    /// Statements that turn loads of as many rows as a line of memory has elements, before the first of them. They stay
    /// in the core's own cache.
    pub(super) fn turn_rows(&mut self) -> String {
        let (kernel, outer, last) = (self.kernel, self.kernel.outer(), self.kernel.vector_axis());
        let is_plain = kernel.chunk.is_none() && kernel.parts.is_none() && last == outer;
        let Some(axis) = outer.checked_sub(1).filter(|_| is_plain) else { return String::new() };
        let (rows, elements) = (kernel.axes[axis].extent, kernel.axes[last].extent);
        let mut loads = self.turned_loads(axis);
        // Those of one size go together: as many rows fill a line.
        let size = loads.iter().map(|&id| self.loaded(id)).min().unwrap_or(LINE);
        loads.retain(|&id| self.loaded(id) == size);
        loads.truncate((self.machine.l2 as i64 / 2 / (LINE * elements.max(1))) as usize);
        if loads.is_empty() || rows < TILE || elements < TILE {
            return String::new();
        }
        self.outer_names.insert("line".into(), "long".into());
        let (mut out, mut fill) = (String::new(), String::new());
        let lines = LINE / size;
        let _ = write!(
            out,
            "        const long line = (n{last} + KILN_LANES - 1) / KILN_LANES * KILN_LANES;
        const long top = i{axis} - i{axis} % {lines};\n"
        );
        for &id in &loads {
            let place = format!(" + (i{axis} - top) * line");
            let [declared, filled] =
                self.turn(id, "line", &|_| Piece::Tile, &place, ("down", &format!("n{last}")));
            out.push_str(&declared);
            fill.push_str(&filled);
        }
        // Other rows than those of these items may not be there.
        let _ = write!(
            out,
            "        if (item == begin || i{axis} == top) {{
        const long bottom = top + {lines} < n{axis} ? top + {lines} : n{axis}, left = bottom - i{axis};
        const long down = left < end - item ? left : end - item, j = 0;
{fill}        }}\n"
        );
        self.turned = Some(Turned { axis, loads, step: "line".into() });
        out
    }

    fn loaded_dtype(&self, id: ExprId) -> Option<DType> {
        match &self.kernel.exprs[id].kind {
            ExprKind::Load { buffer, .. } => Some(self.kernel.buffers[*buffer]),
            _ => None,
        }
    }

    /// Bytes of what a load loads.
    fn loaded(&self, id: ExprId) -> i64 {
        self.loaded_dtype(id).map_or(LINE, |dtype| dtype.size() as i64)
    }

    /// The declaration of where a load is turned, and the call that turns it from where loops stand on.
    fn turn(
        &mut self,
        id: ExprId,
        step: &str,
        piece: &dyn Fn(i64) -> Piece,
        place: &str,
        sizes: (&str, &str),
    ) -> [String; 2] {
        let Some(dtype) = self.loaded_dtype(id) else { return Default::default() };
        let (ty, at) = (memory_type(dtype), self.scratch(format!("at_tile{id}"), piece(self.loaded(id))));
        self.outer_names.insert(format!("tile{id}"), format!("{ty} *"));
        let declared = format!("        {ty} *tile{id} = ({ty} *)(scratch + {at});\n");
        [declared, self.turning(id, &format!("tile{id}{place}"), step, sizes)]
    }

    /// The call that turns a load from where loops stand on.
    fn turning(&mut self, id: ExprId, to: &str, step: &str, (rows, columns): (&str, &str)) -> String {
        let ExprKind::Load { buffer, index } = &self.kernel.exprs[id].kind else { return String::new() };
        let (bytes, vector) = (self.loaded(id), self.kernel.vector_axis());
        let from = self.index_text(id, index, None, &|_, _| true);
        let along = index.terms.iter().position(|(term, _)| *term == Term::Axis(vector)).unwrap_or(0);
        let stride = self.stride(id, along, &index.terms[along].1);
        format!("        kiln_tile_{bytes}({to}, {step}, b{buffer} + {from}, {stride}, {rows}, {columns});\n")
    }

    /// A vector of a turned load, as it is in memory.
    pub(super) fn load_turned(&self, id: ExprId, dtype: DType) -> Option<String> {
        let Turned { axis, loads, step } = self.turned.as_ref()?;
        let start = if self.kernel.mode == Mode::Map { "lo" } else { "0" };
        let load = || {
            let suffix = suffix(dtype);
            format!("kiln_load_{suffix}(tile{id} + (i{axis} - top) * {step} + (j - {start}))")
        };
        loads.contains(&id).then(load)
    }
}

/// `to[r][c] = from[c][r]` for a tile of elements of so many bytes: rows of `to` and columns of `from` lie side by side.
pub(super) fn turn(bytes: usize, isa: Isa) -> String {
    let ty =
        ["unsigned char", "unsigned short", "unsigned int", "unsigned long long"][bytes.ilog2() as usize];
    // A block is as many vectors as one has lanes.
    let lanes = match isa {
        Isa::Plain => 1,
        Isa::Avx2 if bytes == 8 => 4,
        Isa::Avx512 | Isa::Avx2 => 8,
    };
    let block = if lanes > 1 { blocks(ty, bytes, lanes) } else { String::new() };
    format!(
        "KILN_INLINE void kiln_tile_{bytes}(void *to, long step, const void *from, long stride, long rows, long columns) {{
    {ty} *t = to;
    const {ty} *p = from;
    long c = 0;
{block}    for (; c < columns; c++)
        for (long r = 0; r < rows; r++) t[r * step + c] = p[c * stride + r];
}}
"
    )
}

/// [Note: turning a block]
/// Each round puts the first half of the vectors between the second: with the bits of row and column of an element
/// in a row, they move on by one place. After as many rounds as either has bits, rows are columns.
fn blocks(ty: &str, bytes: usize, lanes: usize) -> String {
    let half = lanes / 2;
    let mixed = |from: usize| {
        (from..from + half)
            .flat_map(|l| [l.to_string(), (lanes + l).to_string()])
            .collect::<Vec<_>>()
            .join(", ")
    };
    let (low, high) = (mixed(0), mixed(half));
    let mut text = format!(
        "#ifdef KILN_SHUFFLE
    typedef {ty} line __attribute__((vector_size({}), aligned(1), may_alias));
    typedef {ty} whole __attribute__((vector_size({})));
    for (; c + {lanes} <= columns; c += {lanes}) {{
        long r = 0;
        for (; r + {lanes} <= rows; r += {lanes}) {{
",
        bytes * lanes,
        bytes * lanes
    );
    // What the next tile needs: its lines are far apart, and the processor's own prefetcher follows few at a time.
    let _ = write!(text, "if (r % {} == 0) {{", LINE as usize / bytes);
    for i in 0..lanes {
        let _ = write!(text, " __builtin_prefetch(p + (c + {i}) * stride + r + {TILE});");
    }
    text.push_str(" }\n");
    for i in 0..lanes {
        let _ = writeln!(text, "const whole x0_{i} = *(const line *)(p + (c + {i}) * stride + r);");
    }
    let rounds = lanes.ilog2() as usize;
    for round in 0..rounds {
        let next = round + 1;
        for i in 0..half {
            let (a, b) = (format!("x{round}_{i}"), format!("x{round}_{}", i + half));
            let _ = writeln!(text, "const whole x{next}_{} = KILN_SHUFFLE({a}, {b}, {low});", 2 * i);
            let _ = writeln!(text, "const whole x{next}_{} = KILN_SHUFFLE({a}, {b}, {high});", 2 * i + 1);
        }
    }
    for i in 0..lanes {
        let _ = writeln!(text, "*(line *)(t + (r + {i}) * step + c) = x{rounds}_{i};");
    }
    let _ = write!(
        text,
        "        }}
        for (; r < rows; r++)
            for (long i = c; i < c + {lanes}; i++) t[r * step + i] = p[i * stride + r];
    }}
#endif
"
    );
    text
}
