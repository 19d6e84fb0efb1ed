//! Loads of windows: every second element, and positions that are clamped at the borders of a plane.
//!
//! Most vectors of a line lie inside of it, and are loaded as if there were no border; only the others look at
//! each lane.

use std::fmt::Write;

use kiln_ir::DType;
use kiln_ir::math::c::CIsa;

use super::narrow::memory_vector;
use super::{Emitter, suffix};
use crate::index::{ExprId, Index, Term};
use crate::loops::ExprKind;

/// Whether every second element of a dtype is had by loading all and taking half.
pub(super) fn has_second(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::I64)
}

impl<'k> Emitter<'k> {
    /// What is clamped along the lanes, and to what, if everything else is the same in all of them.
    pub(super) fn border(&self, index: &'k Index) -> Option<(&'k Index, &'k i64)> {
        let (inner, most) = index.border(self.kernel.vector_axis())?;
        let is_same = |term: &Term| !matches!(term, Term::Value(v, _) if self.lane_varies[*v]);
        index.terms.iter().all(|(term, _)| is_same(term)).then_some((inner, most))
    }

    /// Whether some of the loads are clamped along the lanes.
    pub(super) fn has_borders(&self, ids: &[ExprId]) -> bool {
        ids.iter().any(|&id| match &self.kernel.exprs[id].kind {
            ExprKind::Load { index, .. } => self.lane_varies[id] && self.border(index).is_some(),
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
            (self.inner_index(inner, None), self.inner_number(step), self.last_position(most));
        let suffix = suffix(dtype);
        let _ = match has_second(dtype) {
            true => writeln!(
                before,
                "{indent}{name} = kiln_border_{suffix}(p{id} + {rest}, {first}, {step}, {most}, count);"
            ),
            // That all taps of a column go the same way is hidden: compilers would write out every combination.
            false => writeln!(
                before,
                "{indent}long f{id} = {first};
{indent}__asm__(\"\" : \"+r\"(f{id}));
{indent}if (f{id} >= 0 && f{id} + (count - 1) * {step} <= {most}) {name} = kiln_{read}_{suffix}(p{id} + {rest} + f{id}, count);
{indent}else {each}",
            ),
        };
        self.as_value(dtype, &name)
    }
}

/// Loads every second of the elements from `p` on; those beyond the last one wanted are not touched.
pub(super) fn second(vector: &str, scalar: &str, suffix: &str, isa: CIsa, lanes: usize) -> String {
    let list = |lane: &dyn Fn(usize) -> usize| {
        (0..lanes).map(|l| lane(l).to_string()).collect::<Vec<_>>().join(", ")
    };
    let whole = list(&|l| if 2 * l < lanes { 2 * l } else { 2 * l + 1 });
    let part = list(&|l| 2 * l);
    let masked = match isa {
        CIsa::Avx512 => format!(
            "const long all = 2 * count - 1, low = all < KILN_LANES ? all : KILN_LANES;
    return KILN_SHUFFLE(kiln_read_{suffix}(p, low), kiln_read_{suffix}(p + KILN_LANES, all - low), {part});"
        ),
        CIsa::Avx2 | CIsa::Plain => {
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

/// Loads elements whose positions are clamped to `most`, one or two apart. Where vectors can be permuted there is no
/// branch: all elements lie within one or two vectors, and which is where is the same for all lines of a window.
pub(super) fn border(vector: &str, scalar: &str, suffix: &str, isa: CIsa, lanes: usize) -> String {
    let iota: Vec<String> = (0..lanes).map(|lane| lane.to_string()).collect();
    let (lane, int, instruction) = match suffix {
        "f32" => ("i32v", "int", "vmovups"),
        _ => ("i64v", "long long", "vmovupd"),
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
    let text = match isa {
        CIsa::Avx512 if (16..=64).contains(&bytes) => format!(
            "#if defined(__GNUC__) && !defined(__clang__)
    const long base = kiln_clamp(first, most), there = most + 1 - base;
    const long low = there < KILN_LANES ? there : KILN_LANES, high = there - low < KILN_LANES ? there - low : KILN_LANES;
    const {int} last = there - 1;
    {lane} at = ({lane}){{{}}} * ({int})step + ({int})(first - base);
    at &= at >= 0;
    at = (at & (at <= last)) | ((at > last) & last);
    {vector} x, y;
    __asm__(\"{instruction} (%1), %0%{{%2%}}%{{z%}}\" : \"=v\"(x) : \"r\"(p + base), \"Yk\"((unsigned short)((1u << low) - 1)), \"m\"(*(const char (*)[])p));
    if (step == 1) return __builtin_shuffle(x, at);
    __asm__(\"{instruction} (%1), %0%{{%2%}}%{{z%}}\" : \"=v\"(y) : \"r\"(p + base + KILN_LANES), \"Yk\"((unsigned short)((1u << high) - 1)), \"m\"(*(const char (*)[])p));
    return __builtin_shuffle(x, y, at);
#else
{branching}#endif
",
            iota.join(", ")
        ),
        CIsa::Avx512 | CIsa::Avx2 | CIsa::Plain => branching,
    };
    format!(
        "KILN_INLINE {vector} kiln_border_{suffix}(const {scalar} *p, long first, long step, long most, long count) {{
{text}}}
"
    )
}
