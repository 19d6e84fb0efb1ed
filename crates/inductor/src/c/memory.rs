//! Loads and stores: how an access moves from lane to lane decides how.

use kiln_ir::DType;

use super::narrow::memory_vector;
use super::windows::has_second;
use super::{Emitter, Level, memory_type, suffix};
use kiln_plan::index::{ExprId, Index, Term};
use kiln_plan::loops::{ExprKind, Reduction};

impl<'k> Emitter<'k> {
    pub(super) fn load(
        &mut self,
        id: ExprId,
        buffer: usize,
        index: &'k Index,
        before: &mut String,
        indent: &str,
    ) -> String {
        let dtype = self.kernel.buffers[buffer];
        if matches!(self.levels[id], Level::Call | Level::Item) {
            let text = self.index_text(id, index, None, &|_, _| true);
            return self.splat_memory(dtype, &format!("b{buffer}[{text}]"));
        }
        let pointer = format!("p{id}");
        if let Some(vector) = self.load_turned(id, dtype) {
            return match dtype {
                DType::F16 | DType::BF16 => self.half(id, dtype, &vector, before, indent),
                _ => self.as_value(dtype, &vector),
            };
        }
        if self.lane_varies[id]
            && let Some((inner, most)) = self.border(index)
        {
            return self.load_border(id, dtype, index, (inner, most), before, indent);
        }
        if self.lane_varies[id]
            && matches!(dtype, DType::F32 | DType::F64)
            && let Some(repeats) = self.repeats(index)
        {
            return self.load_repeated(id, dtype, index, repeats);
        }
        if self.lane_varies[id] && index.is_bent(self.kernel.vector_axis()) && !self.has_lane_values(index) {
            return self.load_bent(id, dtype, index, before, indent);
        }
        let (text, class) = self.moving(id, index, self.lane_varies[id]);
        match class {
            Class::Back => {
                let vector = format!("kiln_back_{}({pointer} + {text} - (count - 1), count)", suffix(dtype));
                match dtype {
                    DType::F16 | DType::BF16 => self.half(id, dtype, &vector, before, indent),
                    _ => self.as_value(dtype, &vector),
                }
            }
            Class::Second if has_second(dtype) => {
                format!("kiln_second_{}({pointer} + {text}, count)", suffix(dtype))
            }
            Class::Same => self.splat_memory(dtype, &format!("{pointer}[{text}]")),
            Class::Next => {
                let read = if self.streams { "stream" } else { "read" };
                self.read.push(id);
                let vector = format!("kiln_{read}_{}({pointer} + {text}, count)", suffix(dtype));
                match dtype {
                    DType::F16 | DType::BF16 => self.half(id, dtype, &vector, before, indent),
                    _ => self.as_value(dtype, &vector),
                }
            }
            Class::Scattered | Class::Second => {
                let each = self.each_lane(id, index);
                let name = format!("x{id}");
                let ty = memory_vector(dtype);
                before.push_str(&format!("{indent}{ty} {name} = {{0}};\n{indent}{each}\n"));
                self.as_value(dtype, &name)
            }
        }
    }

    /// A half as it is in memory, under a name of its own, and its value: where it is stored, nothing is rounded again.
    pub(super) fn half(
        &mut self,
        id: ExprId,
        dtype: DType,
        vector: &str,
        before: &mut String,
        indent: &str,
    ) -> String {
        self.halves.insert(id, dtype);
        before.push_str(&format!("{indent}const {} x{id}_ = {vector};\n", memory_vector(dtype)));
        format!("kiln_widen_{dtype}(x{id}_)")
    }

    /// The part of an index that changes inside an item.
    pub(super) fn moving_text(&mut self, access: usize, index: &'k Index) -> String {
        self.index_text(access, index, None, &|this, term| !this.is_fixed(term))
    }

    /// The part of an index that changes inside an item, and how it changes along lanes.
    fn moving(&mut self, access: usize, index: &'k Index, varies: bool) -> (String, Class) {
        let wanted = |this: &Emitter<'_>, term: &Term| !this.is_fixed(term);
        if !varies {
            return (self.index_text(access, index, None, &wanted), Class::Same);
        }
        let vector = self.kernel.vector_axis();
        let plain = !index.is_nested(vector) && !self.has_lane_values(index);
        let class = match index.factor(vector) {
            1 if plain => Class::Next,
            -1 if plain => Class::Back,
            2 if plain => Class::Second,
            _ => Class::Scattered,
        };
        (self.index_text(access, index, None, &wanted), class)
    }

    /// The statement that loads each lane from a place of its own. A whole vector is put together in registers: written
    /// element by element and read at one go, it would wait for memory.
    pub(super) fn each_lane(&mut self, id: ExprId, index: &'k Index) -> String {
        let element = |this: &mut Self, lane: &str| {
            let wanted = |this: &Emitter<'_>, term: &Term| !this.is_fixed(term);
            format!("p{id}[{}]", this.index_text(id, index, Some(lane), &wanted))
        };
        let ExprKind::Load { buffer, .. } = self.kernel.exprs[id].kind else { return String::new() };
        let ty = memory_vector(self.kernel.buffers[buffer]);
        let all: Vec<String> = (0..self.lanes).map(|lane| element(self, &lane.to_string())).collect();
        let (all, each) = (all.join(", "), element(self, "l"));
        format!(
            "if (count == KILN_LANES) x{id} = ({ty}){{{all}}};\nelse for (long l = 0; l < count; l++) x{id}[l] = {each};"
        )
    }

    /// The part of an index that changes inside an item, for lane `l`.
    pub(super) fn lane_text(&mut self, access: usize, index: &'k Index) -> String {
        self.index_text(access, index, Some("l"), &|this, term| !this.is_fixed(term))
    }

    /// The declaration of the pointer through which an access goes: everything that is fixed within an item.
    pub(super) fn pointer(
        &mut self,
        name: &str,
        access: usize,
        buffer: usize,
        index: &'k Index,
        dtype: DType,
    ) -> String {
        let text = self.index_text(access, index, None, &|this, term| this.is_fixed(term));
        let ty = memory_type(dtype);
        self.outer_names.insert(name.into(), format!("{ty} *"));
        format!("        {ty} *{name} = b{buffer} + {text};\n")
    }

    /// The store of a value inside a body that computes these.
    pub(super) fn store(&mut self, store: usize, computed: &[ExprId], indent: &str) -> String {
        let s = &self.kernel.stores[store];
        let (dtype, access) = (self.kernel.buffers[s.buffer], self.store_access(store));
        let (text, class) = self.moving(access, &s.index, true);
        // What is wrapped in memory anyhow is not wrapped before.
        let name = match self.kernel.exprs[s.value].kind {
            ExprKind::Narrow(narrow, arg)
                if narrow == dtype && !dtype.is_float() && !s.adds && computed.contains(&arg) =>
            {
                format!("v{arg}")
            }
            _ => format!("v{}", s.value),
        };
        let is_there = self.halves.get(&s.value) == Some(&dtype) && computed.contains(&s.value);
        let value = if is_there { format!("x{}_", s.value) } else { self.as_memory(dtype, &name) };
        let suffix = suffix(dtype);
        match class {
            Class::Next if s.adds => {
                let old = self.as_value(dtype, &format!("kiln_read_{suffix}(q{store} + {text}, count)"));
                let sum = self.combine(Reduction::Sum, dtype.computing(), &old, &name);
                let sum = self.as_memory(dtype, &sum);
                format!("{indent}kiln_write_{suffix}(q{store} + {text}, {sum}, count);\n")
            }
            Class::Next => format!("{indent}kiln_write_{suffix}(q{store} + {text}, {value}, count);\n"),
            Class::Back if !s.adds => {
                format!(
                    "{indent}kiln_write_{suffix}(q{store} + {text} - (count - 1), kiln_turned_{suffix}({value}, count), count);\n"
                )
            }
            Class::Same | Class::Second | Class::Back | Class::Scattered => {
                let text = self.lane_text(access, &s.index);
                let (ty, place) = (memory_vector(dtype), format!("q{store}[{text}]"));
                if s.adds {
                    return self.add(dtype, &place, &name, "count", indent);
                }
                let wanted = |this: &Emitter<'_>, term: &Term| !this.is_fixed(term);
                let lanes = self.lanes;
                let lane = |lane: usize| {
                    let text = self.index_text(access, &s.index, Some(&lane.to_string()), &wanted);
                    format!("q{store}[{text}] = x[{lane}];")
                };
                let all: Vec<String> = (0..lanes).map(lane).collect();
                format!(
                    "{indent}{{ const {ty} x = {value};
{indent}if (count == KILN_LANES) {{ {} }}
{indent}else for (long l = 0; l < count; l++) {place} = x[l]; }}\n",
                    all.join(" ")
                )
            }
        }
    }

    /// Adds so many lanes of a value to what is at their places, which depend on `l`.
    fn add(&mut self, dtype: DType, place: &str, name: &str, count: &str, indent: &str) -> String {
        let ty = memory_vector(dtype);
        if dtype.is_float() && dtype.is_narrow() {
            // Elements of a window, which never meet: what an index puts somewhere is summed up in f32.
            let old = self.as_value(dtype, "old");
            let sum = self.combine(Reduction::Sum, dtype.computing(), &old, name);
            let sum = self.as_memory(dtype, &sum);
            return format!(
                "{indent}{{ {ty} old = {{0}}; for (long l = 0; l < {count}; l++) old[l] = {place}; \
                 const {ty} x = {sum}; for (long l = 0; l < {count}; l++) {place} = x[l]; }}\n"
            );
        }
        // One after the other: lanes may meet.
        let sum = if dtype.is_float() {
            format!("{place} + x[l]")
        } else {
            format!("({})((unsigned long long){place} + (unsigned long long)x[l])", memory_type(dtype))
        };
        let value = self.as_memory(dtype, name);
        format!("{indent}{{ const {ty} x = {value}; for (long l = 0; l < {count}; l++) {place} = {sum}; }}\n")
    }

    /// The store of a value that is the same in all lanes.
    pub(super) fn store_one(&mut self, store: usize, indent: &str) -> String {
        let s = &self.kernel.stores[store];
        let dtype = self.kernel.buffers[s.buffer];
        let text = self.index_text(self.store_access(store), &s.index, None, &|_, _| true);
        let place = format!("b{}[{text}]", s.buffer);
        let name = format!("v{}", s.value);
        if s.adds {
            return self.add(dtype, &place, &name, "1", indent);
        }
        let value = self.as_memory(dtype, &name);
        format!("{indent}{place} = {value}[0];\n")
    }

    pub(super) fn store_access(&self, store: usize) -> usize {
        self.kernel.exprs.len() + store
    }
}

/// How an access moves from lane to lane.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Class {
    Same,
    Next,
    /// From the end to the beginning.
    Back,
    /// Every second element.
    Second,
    Scattered,
}
