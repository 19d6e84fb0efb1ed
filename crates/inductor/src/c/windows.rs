//! Loads of windows: every second element, and positions that are clamped at the borders of a plane.
//!
//! Most vectors of a line lie inside of it, and are loaded as if there were no border; only the others look at
//! each lane.

use std::fmt::Write;

use kiln_ir::DType;
use kiln_ir::math::c::Isa;

use super::narrow::memory_vector;
use super::{Emitter, suffix};
use kiln_plan::index::{ExprId, Index, Repeats, Term};
use kiln_plan::loops::ExprKind;

/// Whether every second element of a dtype is had by loading all and taking half.
pub(super) fn has_second(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::I64)
}

impl<'k> Emitter<'k> {
    /// What is clamped along the lanes, and to what, if everything else is the same in all of them.
    pub(super) fn border(&self, index: &'k Index) -> Option<(&'k Index, &'k i64)> {
        index.border(self.kernel.vector_axis()).filter(|_| !self.has_lane_values(index))
    }

    /// How elements are repeated along the lanes, if everything else is the same in all of them.
    pub(super) fn repeats(&self, index: &'k Index) -> Option<Repeats<'k>> {
        index.repeats(self.kernel.vector_axis()).filter(|_| !self.has_lane_values(index))
    }

    /// A load that has each element several times.
    pub(super) fn load_repeated(
        &mut self,
        id: ExprId,
        dtype: DType,
        index: &'k Index,
        of: Repeats<'k>,
    ) -> String {
        let vector = self.kernel.vector_axis();
        let is_repeated = |term: &Term| matches!(term, Term::Clamp(inner, _) if inner.mentions(vector));
        let rest = self.index_text(id, index, None, &|this, term| !this.is_fixed(term) && !is_repeated(term));
        let first = self.inner_index(of.inner, None);
        let (by, shift) = (self.inner_number(of.by), self.inner_number(&of.clamped.constant));
        let (most, suffix) = (self.last_position(of.clamped, of.most), suffix(dtype));
        format!("kiln_repeat_{suffix}(p{id} + {rest}, {first}, {by}, {shift}, {most}, count)")
    }

    /// Whether some of the loads are clamped along the lanes.
    pub(super) fn has_borders(&self, ids: &[ExprId]) -> bool {
        ids.iter().any(|&id| match &self.kernel.exprs[id].kind {
            ExprKind::Load { index, .. } => {
                self.lane_varies[id]
                    && (self.border(index).is_some()
                        || self.repeats(index).is_some()
                        || index.is_bent(self.kernel.vector_axis()))
            }
            _ => false,
        })
    }

    /// A load whose position along the lanes is `inner`, clamped to `most`.
    pub(super) fn load_border(
        &mut self,
        id: ExprId,
        dtype: DType,
        index: &'k Index,
        (inner, most): (&'k Index, &'k i64),
        before: &mut String,
        indent: &str,
    ) -> String {
        let (vector, name, ty) = (self.kernel.vector_axis(), format!("x{id}"), memory_vector(dtype));
        let each = self.lane_text(id, index);
        let each = format!("for (long l = 0; l < count; l++) {name}[l] = p{id}[{each}];");
        let step = inner.terms.iter().find(|(term, _)| *term == Term::Axis(vector)).map(|(_, factor)| factor);
        let read = match step {
            Some(1) => Some("read"),
            Some(2) if has_second(dtype) => Some("second"),
            _ => None,
        };
        let _ = writeln!(before, "{indent}{ty} {name} = {{0}};");
        let (Some(read), Some(step)) = (read, step) else {
            let _ = writeln!(before, "{indent}{each}");
            return self.as_value(dtype, &name);
        };
        let is_border = |term: &Term| matches!(term, Term::Clamp(inner, _) if inner.mentions(vector));
        let rest = self.index_text(id, index, None, &|this, term| !this.is_fixed(term) && !is_border(term));
        let (first, step, most) =
            (self.inner_index(inner, None), self.inner_number(step), self.last_position(inner, most));
        let suffix = suffix(dtype);
        let _ = if has_second(dtype) {
            writeln!(
                before,
                "{indent}{name} = kiln_border_{suffix}(p{id} + {rest}, {first}, {step}, {most}, count);"
            )
        } else {
            // That all taps of a column go the same way is hidden: compilers would write out every combination.
            writeln!(
                before,
                "{indent}long f{id} = {first};
{indent}__asm__(\"\" : \"+r\"(f{id}));
{indent}if (f{id} >= 0 && f{id} + (count - 1) * {step} <= {most}) {name} = kiln_{read}_{suffix}(p{id} + {rest} + f{id}, count);
{indent}else {each}",
            )
        };
        self.as_value(dtype, &name)
    }
}

impl<'k> Emitter<'k> {
    /// A load along a line that is bent ([`Index::is_bent`]): most vectors lie where it goes straight, up or down.
    pub(super) fn load_bent(
        &mut self,
        id: ExprId,
        dtype: DType,
        index: &'k Index,
        before: &mut String,
        indent: &str,
    ) -> String {
        let wanted = |this: &Emitter<'_>, term: &Term| !this.is_fixed(term);
        let [first, last] = ["0", "(count - 1)"].map(|lane| self.index_text(id, index, Some(lane), &wanted));
        let each = self.each_lane(id, index);
        let (ty, suffix) = (memory_vector(dtype), suffix(dtype));
        let _ = write!(
            before,
            "{indent}{ty} x{id} = {{0}};
{indent}long f{id} = {first}, g{id} = {last};
{indent}if (g{id} - f{id} == count - 1) x{id} = kiln_read_{suffix}(p{id} + f{id}, count);
{indent}else if (f{id} - g{id} == count - 1) x{id} = kiln_back_{suffix}(p{id} + g{id}, count);
{indent}else {{ {each} }}
"
        );
        self.as_value(dtype, &format!("x{id}"))
    }
}

/// Loads and stores from the end to the beginning: of neighbouring elements the last comes first.
pub(super) fn back(vector: &str, scalar: &str, suffix: &str, lanes: usize) -> String {
    let order: Vec<String> = (0..lanes).rev().map(|lane| lane.to_string()).collect();
    let order = order.join(", ");
    format!(
        "KILN_INLINE {vector} kiln_back_{suffix}(const void *p, long count) {{
    {vector} v = {{0}};
#ifdef KILN_SHUFFLE
    if (count == KILN_LANES) {{ v = kiln_load_{suffix}(p); return KILN_SHUFFLE(v, v, {order}); }}
#endif
    for (long i = 0; i < count; i++) v[i] = ((const {scalar} *)p)[count - 1 - i];
    return v;
}}
KILN_INLINE {vector} kiln_turned_{suffix}({vector} x, long count) {{
#ifdef KILN_SHUFFLE
    if (count == KILN_LANES) return KILN_SHUFFLE(x, x, {order});
#endif
    {vector} v = {{0}};
    for (long i = 0; i < count; i++) v[i] = x[count - 1 - i];
    return v;
}}
"
    )
}

/// Loads every second of the elements from `p` on; those beyond the last one wanted are not touched.
pub(super) fn second(vector: &str, scalar: &str, suffix: &str, isa: Isa, lanes: usize) -> String {
    let list = |lane: &dyn Fn(usize) -> usize| {
        (0..lanes).map(|l| lane(l).to_string()).collect::<Vec<_>>().join(", ")
    };
    let whole = list(&|l| if 2 * l < lanes { 2 * l } else { 2 * l + 1 });
    let part = list(&|l| 2 * l);
    let masked = match isa {
        Isa::Avx512 => format!(
            "const long all = 2 * count - 1, low = all < KILN_LANES ? all : KILN_LANES;
    return KILN_SHUFFLE(kiln_read_{suffix}(p, low), kiln_read_{suffix}(p + KILN_LANES, all - low), {part});"
        ),
        Isa::Avx2 | Isa::Plain => {
            format!(
                "{vector} v = {{0}};\n    for (long i = 0; i < count; i++) v[i] = p[2 * i];\n    return v;"
            )
        }
    };
    format!(
        "KILN_INLINE {vector} kiln_second_{suffix}(const {scalar} *p, long count) {{
#ifdef KILN_SHUFFLE
    if (count == KILN_LANES) return KILN_SHUFFLE(kiln_load_{suffix}(p), kiln_load_{suffix}(p + KILN_LANES - 1), {whole});
    {masked}
#else
    {vector} v = {{0}};
    for (long i = 0; i < count; i++) v[i] = p[2 * i];
    return v;
#endif
}}
"
    )
}

/// Elements of a vector, or of two, in an order that is known at run time only.
pub(super) fn permute(vector: &str, suffix: &str, isa: Isa, lanes: usize) -> String {
    let (lane, packed, bytes) = match suffix {
        "f32" => ("i32v", "ps", 4 * lanes),
        _ => ("i64v", "pd", 8 * lanes),
    };
    let one = |text: &str| {
        format!(
            "KILN_INLINE {vector} kiln_permute_{suffix}({vector} x, {lane} at) {{ {vector} v; {text} return v; }}\n"
        )
    };
    match isa {
        Isa::Avx512 if (16..=64).contains(&bytes) => {
            // The smallest registers have an instruction of their own.
            let order = if bytes == 16 { "vpermil" } else { "vperm" };
            let operands = if bytes == 16 { "%2, %1, %0" } else { "%1, %2, %0" };
            let text = format!("__asm__(\"{order}{packed} {operands}\" : \"=v\"(v) : \"v\"(x), \"v\"(at));");
            let two = format!(
                "KILN_INLINE {vector} kiln_permute2_{suffix}({vector} x, {vector} y, {lane} at) {{
    __asm__(\"vpermi2{packed} %2, %1, %0\" : \"+v\"(at) : \"v\"(x), \"v\"(y));
    return ({vector})at;
}}
"
            );
            format!("{}{two}", one(&text))
        }
        Isa::Avx2 if bytes == 32 && suffix == "f32" => {
            one("__asm__(\"vpermps %1, %2, %0\" : \"=x\"(v) : \"x\"(x), \"x\"(at));")
        }
        Isa::Avx2 if bytes == 32 => one(
            "\n#ifdef __clang__\n    for (int i = 0; i < KILN_LANES; i++) v[i] = x[at[i]];\n#else\n    v = __builtin_shuffle(x, at);\n#endif\n   ",
        ),
        Isa::Avx512 | Isa::Avx2 | Isa::Plain => String::new(),
    }
}

/// Loads elements whose positions are clamped to `most`, one or two apart. Where vectors can be permuted there is no
/// branch: all elements lie within one or two vectors, and which is where is the same for all lines of a window.
pub(super) fn border(vector: &str, scalar: &str, suffix: &str, isa: Isa, lanes: usize) -> String {
    let iota: Vec<String> = (0..lanes).map(|lane| lane.to_string()).collect();
    let (lane, int, instruction, masked) = match suffix {
        "f32" => ("i32v", "int", "vmovups", "vmaskmovps"),
        _ => ("i64v", "long long", "vmovupd", "vmaskmovpd"),
    };
    let bytes = lanes * if suffix == "f32" { 4 } else { 8 };
    let second = match suffix {
        "f32" | "f64" | "i64" => {
            format!("\n        if (step == 2) return kiln_second_{suffix}(p + first, count);")
        }
        _ => String::new(),
    };
    let branching = format!(
        "    __asm__(\"\" : \"+r\"(first));
    if (first >= 0 && first + (count - 1) * step <= most) {{
        if (step == 1) return kiln_read_{suffix}(p + first, count);{second}
    }}
    {vector} v = {{0}};
    for (long i = 0; i < count; i++) v[i] = p[kiln_clamp(first + i * step, most)];
    return v;
"
    );
    let iota = iota.join(", ");
    let text = match isa {
        Isa::Avx2 if bytes == 32 => format!(
            "    if (step == 1) {{
        const long base = kiln_clamp(first, most), there = most + 1 - base;
        const int last = there - 1;
        const {lane} live = kiln_live{}(there < KILN_LANES ? there : KILN_LANES);
        i32v at = (i32v){{{iota}}} + (int)(first - base);
        at &= at >= 0;
        at = (at & (at <= last)) | ((at > last) & last);
        {vector} x;
        __asm__(\"{masked} (%1), %2, %0\" : \"=x\"(x) : \"r\"(p + base), \"x\"(live), \"m\"(*(const {vector}_memory *)(p + base)));
        return kiln_permute_{suffix}(x, __builtin_convertvector(at, {lane}));
    }}
{branching}",
            8 * bytes / lanes
        ),
        Isa::Avx512 if (16..=64).contains(&bytes) => format!(
            "    const long base = kiln_clamp(first, most), there = most + 1 - base;
    const long low = there < KILN_LANES ? there : KILN_LANES, high = there - low < KILN_LANES ? there - low : KILN_LANES;
    const {int} last = there - 1;
    {lane} at = ({lane}){{{iota}}} * ({int})step + ({int})(first - base);
    at &= at >= 0;
    at = (at & (at <= last)) | ((at > last) & last);
    {vector} x, y;
    __asm__(\"{instruction} (%1), %0%{{%2%}}%{{z%}}\" : \"=v\"(x) : \"r\"(p + base), \"Yk\"((unsigned short)((1u << low) - 1)), \"m\"(*(const {vector}_memory *)(p + base)));
    if (step == 1) return kiln_permute_{suffix}(x, at);
    __asm__(\"{instruction} (%1), %0%{{%2%}}%{{z%}}\" : \"=v\"(y) : \"r\"(p + base + KILN_LANES), \"Yk\"((unsigned short)((1u << high) - 1)), \"m\"(*(const {vector}_memory *)(p + base + KILN_LANES)));
    return kiln_permute2_{suffix}(x, y, at);
"
        ),
        Isa::Avx512 | Isa::Avx2 | Isa::Plain => branching,
    };
    format!(
        "KILN_INLINE {vector} kiln_border_{suffix}(const {scalar} *p, long first, long step, long most, long count) {{
{text}}}
"
    )
}

/// `(over + lane) / by` for `over` below `by`, and the quotients `(first + lane) / by` of positions that are exact in
/// single precision.
pub(super) fn quotient(iota: &str) -> String {
    // A small number and a half divided by a small number: no rounding reaches the next whole one. By a large one, no
    // quotient is more than one.
    format!(
        "KILN_INLINE i32v kiln_parts(long over, long by) {{
    const i32v at = (i32v){{{iota}}} + (int)over;
    if (by >= 4096) return -(at >= (int)by);
    return __builtin_convertvector((__builtin_convertvector(at, f32v) + 0.5f) * (1.0f / by), i32v);
}}
KILN_INLINE f32v kiln_quotient_f32(long first, long by) {{
    const long from = first / by;
    return __builtin_convertvector(kiln_parts(first - from * by, by), f32v) + (float)from;
}}
"
    )
}

/// Loads elements at `(first + lane) / by + shift`, clamped to `most`. There are fewer of them than lanes, so that one
/// vector has them all.
pub(super) fn repeat(vector: &str, scalar: &str, suffix: &str, isa: Isa, lanes: usize) -> String {
    let (instruction, masked, lane, bytes) = match suffix {
        "f32" => ("vmovups", "vmaskmovps", "i32v", 4 * lanes),
        _ => ("vmovupd", "vmaskmovpd", "i64v", 8 * lanes),
    };
    let load = match isa {
        Isa::Avx512 if (16..=64).contains(&bytes) => Some(format!(
            "    const long base = kiln_clamp(from + shift, most), there = most + 1 - base;
    const long low = there < KILN_LANES ? there : KILN_LANES;
    {vector} x;
    __asm__(\"{instruction} (%1), %0%{{%2%}}%{{z%}}\" : \"=v\"(x) : \"r\"(p + base), \"Yk\"((unsigned short)((1u << low) - 1)), \"m\"(*(const {vector}_memory *)(p + base)));
"
        )),
        Isa::Avx2 if bytes == 32 => Some(format!(
            "    const long base = kiln_clamp(from + shift, most), there = most + 1 - base;
    const {lane} live = kiln_live{}(there < KILN_LANES ? there : KILN_LANES);
    {vector} x;
    __asm__(\"{masked} (%1), %2, %0\" : \"=x\"(x) : \"r\"(p + base), \"x\"(live), \"m\"(*(const {vector}_memory *)(p + base)));
",
            8 * bytes / lanes
        )),
        Isa::Avx512 | Isa::Avx2 | Isa::Plain => None,
    };
    let [even, odd] = [0, 1]
        .map(|over| (0..lanes).map(|lane| ((lane + over) / 2).to_string()).collect::<Vec<_>>().join(", "));
    let permuted = load.map(|load| {
        format!(
            "{load}    const int last = there - 1;
    i32v at = kiln_parts(over, by) + (int)(from + shift - base);
    at &= at >= 0;
    at = (at & (at <= last)) | ((at > last) & last);
    return kiln_permute_{suffix}(x, __builtin_convertvector(at, {lane}));
"
        )
    });
    format!(
        "KILN_INLINE {vector} kiln_repeat_{suffix}(const {scalar} *p, long first, long by, long shift, long most, long count) {{
    const long from = first / by;
    long over = first - from * by;
{}    {vector} v = {{0}};
    if (count == KILN_LANES && from + shift >= 0 && from + shift + (over + KILN_LANES - 1) / by <= most) {{
        p += from + shift;
#ifdef KILN_SHUFFLE
        if (by == 2 && from + shift + KILN_LANES - 1 <= most) {{
            v = kiln_load_{suffix}(p);
            return over ? KILN_SHUFFLE(v, v, {odd}) : KILN_SHUFFLE(v, v, {even});
        }}
#endif
        for (int i = 0; i < KILN_LANES; i++) {{
            v[i] = *p;
            const long next = ++over == by;
            p += next;
            over = next ? 0 : over;
        }}
        return v;
    }}
    for (long i = 0, at = from + shift; i < count; i++) {{
        v[i] = p[kiln_clamp(at, most)];
        if (++over == by) {{ over = 0; at++; }}
    }}
    return v;
}}
",
        permuted.unwrap_or_default()
    )
}
