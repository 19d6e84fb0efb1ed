//! C helpers beside the mathematics: tails, strided loads, conversions, horizontal reductions.

use std::fmt::Write;

use kiln_ir::math::Width;
use kiln_ir::math::c::Isa;

use super::KernelSource;

/// The helpers that the kernels use, for vectors of `lanes` elements.
pub(super) fn helpers(lanes: usize, isa: Isa, kernels: &[&KernelSource]) -> String {
    let uses = |name: &str| kernels.iter().any(|k| k.code.contains(name));
    let uses_tile = |bytes: &usize| uses(&format!("kiln_tile_{bytes}("));
    let uses_back =
        |suffix: &str| uses(&format!("kiln_back_{suffix}")) || uses(&format!("kiln_turned_{suffix}"));
    let mut out = String::new();
    let shuffles = ["kiln_turn", "kiln_second", "kiln_border", "kiln_repeat", "kiln_back", "kiln_tile"];
    if shuffles.into_iter().any(uses) {
        out.push_str(
            "#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define KILN_SHUFFLE __builtin_shufflevector
#endif
#endif
",
        );
    }
    [1, 2, 4, 8]
        .iter()
        .filter(|bytes| uses_tile(bytes))
        .for_each(|&bytes| out.push_str(&super::tiles::turn(bytes, isa)));
    let iota: Vec<String> = (0..lanes).map(|i| i.to_string()).collect();
    let iota = iota.join(", ");
    let _ = write!(
        out,
        "KILN_INLINE i32v kiln_live32(long count) {{ return ((i32v){{{iota}}}) < (int)count; }}
KILN_INLINE i64v kiln_live64(long count) {{ return ((i64v){{{iota}}}) < (long long)count; }}
"
    );
    let all: [(&str, String); 7] = [
        (
            "kiln_clamp",
            "KILN_INLINE long kiln_clamp(long x, long most) { return x < 0 ? 0 : x > most ? most : x; }\n".into(),
        ),
        ("kiln_outside", outside(isa, lanes)),
        ("kiln_size", "KILN_INLINE long kiln_size(long x) { return x < 0 ? -x : x; }\n".into()),
        (
            "kiln_number",
            "KILN_INLINE double kiln_number(unsigned long bits) { double x; __builtin_memcpy(&x, &bits, 8); return x; }\n"
                .into(),
        ),
        (
            "kiln_pow_i64",
            "KILN_INLINE i64v kiln_pow_i64(i64v x, i64v y) {
    i64v out;
    for (int i = 0; i < KILN_LANES; i++) {
        unsigned long base = (unsigned long)x[i], power = 1;
        long e = y[i];
        if (x[i] == 1 || (x[i] == -1 && e < 0)) { power = x[i] == 1 || e % 2 == 0 ? 1 : -1ul; e = 0; }
        else if (e < 0) { power = 0; e = 0; }
        for (; e > 0; e >>= 1) { if (e & 1) power *= base; base *= base; }
        out[i] = (long)power;
    }
    return out;
}
"
            .into(),
        ),
        (
            "kiln_splat_mask32",
            "KILN_INLINE i32v kiln_splat_mask32(int x) { return (i32v){0} - (x != 0); }\n".into(),
        ),
        (
            "kiln_splat_mask64",
            "KILN_INLINE i64v kiln_splat_mask64(int x) { return (i64v){0} - (long long)(x != 0); }\n".into(),
        ),
    ];
    for (name, text) in all {
        if uses(name) || name == "kiln_clamp" && (uses("kiln_border") || uses("kiln_repeat")) {
            out.push_str(&text);
        }
    }
    out.push_str(&super::narrow::helpers(lanes, isa, &uses));
    for (vector, suffix) in [("i64v", "i64"), ("f32v", "f32")] {
        let name = format!("kiln_iota_{suffix}");
        if uses(&name) {
            let _ = writeln!(out, "KILN_INLINE {vector} {name}(void) {{ return ({vector}){{{iota}}}; }}");
        }
    }
    if uses("kiln_quotient") || uses("kiln_repeat") {
        out.push_str(&super::windows::quotient(&iota));
    }
    for (vector, scalar, suffix) in [
        ("f32v", "float", "f32"),
        ("f64v", "double", "f64"),
        ("i64v", "long long", "i64"),
        ("u8v", "unsigned char", "bool"),
    ] {
        let width = match suffix {
            "f32" => Some(Width::F32),
            "f64" => Some(Width::F64),
            _ => None,
        };
        if !uses(&format!("_{suffix}")) || width.is_some_and(|w| !isa.has_helpers(lanes, w)) {
            continue;
        }
        out.push_str(&partial(vector, scalar, suffix, isa, lanes));
        if uses(&format!("kiln_stream_{suffix}")) {
            // The processor's own prefetcher stops at every page and starts slowly; memory-bound loops gain a
            // tenth from asking a kilobyte ahead. Beyond the end of a buffer the request is ignored.
            let _ = write!(
                out,
                "KILN_INLINE {vector} kiln_stream_{suffix}(const void *p, long count) {{
    __builtin_prefetch((const char *)p + 1024);
    return kiln_read_{suffix}(p, count);
}}
"
            );
        }
        if uses_back(suffix) {
            out.push_str(&super::windows::back(vector, scalar, suffix, lanes));
        }
        let has_border = uses(&format!("kiln_border_{suffix}"));
        if has_border || uses(&format!("kiln_second_{suffix}")) {
            out.push_str(&super::windows::second(vector, scalar, suffix, isa, lanes));
        }
        let has_repeat = uses(&format!("kiln_repeat_{suffix}"));
        if has_border || has_repeat {
            out.push_str(&super::windows::permute(vector, suffix, isa, lanes));
        }
        if has_border {
            out.push_str(&super::windows::border(vector, scalar, suffix, isa, lanes));
        }
        if has_repeat {
            out.push_str(&super::windows::repeat(vector, scalar, suffix, isa, lanes));
        }
        for half in (0..lanes.ilog2()).map(|bit| 1usize << bit) {
            let name = format!("kiln_turn{half}_{suffix}");
            if uses(&name) {
                let order: Vec<String> = (0..lanes).map(|lane| (lane ^ half).to_string()).collect();
                let _ = write!(
                    out,
                    "KILN_INLINE {vector} {name}({vector} x) {{
#ifdef KILN_SHUFFLE
    return KILN_SHUFFLE(x, x, {});
#else
    {vector} out;
    for (int i = 0; i < KILN_LANES; i++) out[i] = x[i ^ {half}];
    return out;
#endif
}}
",
                    order.join(", ")
                );
            }
        }
        if uses(&format!("kiln_i64_from_{suffix}")) {
            out.push_str(&whole_numbers(vector, scalar, suffix, isa, lanes));
        }
    }
    if uses("kiln_f64_from_f32") {
        let elements: Vec<String> = (0..lanes).map(|lane| format!("x[{lane}]")).collect();
        let text = match isa {
            // A conversion of whole vectors wider than the registers, selected from, is more than GCC 12 can take.
            Isa::Plain => format!("(f64v){{{}}}", elements.join(", ")),
            Isa::Avx512 | Isa::Avx2 => "__builtin_convertvector(x, f64v)".into(),
        };
        let _ = writeln!(out, "KILN_INLINE f64v kiln_f64_from_f32(f32v x) {{ return {text}; }}");
    }
    out
}

/// Declares `any`: whether a lane of the mask `is`, of so many bytes, holds. `None` without an instruction for it.
fn any(isa: Isa, lanes: usize, bytes: usize) -> Option<String> {
    let letter = if bytes == 4 { ["d", "s"] } else { ["q", "d"] };
    Some(match (isa, lanes * bytes) {
        (Isa::Avx512, 16..=64) => {
            format!(
                "unsigned short any; __asm__(\"vptestm{} %1, %1, %0\" : \"=Yk\"(any) : \"v\"(is));",
                letter[0]
            )
        }
        (Isa::Avx2, 16 | 32) => {
            format!("int any; __asm__(\"vmovmskp{} %1, %0\" : \"=r\"(any) : \"x\"(is));", letter[1])
        }
        _ => return None,
    })
}

/// Whether a live lane is not in `0..size`.
fn outside(isa: Isa, lanes: usize) -> String {
    let each = "long long any = 0;\nfor (int i = 0; i < KILN_LANES; i++) any |= is[i];";
    let any = any(isa, lanes, 8).unwrap_or_else(|| each.into());
    format!(
        "KILN_INLINE int kiln_outside(i64v x, long size, long count) {{
const i64v is = (i64v)((u64v)x >= (u64v)((i64v){{0}} + (long long)size)) & kiln_live64(count);
{any}
return any != 0;
}}
"
    )
}

/// Whole numbers of floats, like a conversion in Rust: NaN gives 0, what is out of range the nearest integer.
fn whole_numbers(vector: &str, scalar: &str, suffix: &str, isa: Isa, lanes: usize) -> String {
    let text = match isa {
        // GCC 12 can't take conversions of vectors wider than the registers.
        Isa::Plain => format!(
            "    i64v out;
    for (int i = 0; i < KILN_LANES; i++) {{
        {scalar} e = x[i];
        out[i] = e != e ? 0 : e >= most ? 0x7fffffffffffffffLL : e < -most ? -0x7fffffffffffffffLL - 1 : (long long)e;
    }}
    return out;"
        ),
        Isa::Avx512 | Isa::Avx2 => {
            let (mask, bytes) = if suffix == "f32" { ("i32v", 4) } else { ("i64v", 8) };
            // Most numbers fit into four bytes, which takes one instruction.
            let usual = any(isa, lanes, bytes).map(|any| {
                format!(
                    "    const {mask} is = (x < ({scalar})-2147483648.0) | (x >= ({scalar})2147483648.0) | (x != x);
    {any}
    if (!any) return __builtin_convertvector(__builtin_convertvector(x, i32v), i64v);
"
                )
            });
            let usual = usual.unwrap_or_default();
            let wide = |mask: &str| format!("__builtin_convertvector({mask}, i64v)");
            format!(
                "{usual}    const {mask} low = x < -most, high = x >= most, fits = (x >= -most) & (x < most);
    const i64v whole = __builtin_convertvector(({vector})(({mask})x & fits), i64v);
    return whole | ({} & (-0x7fffffffffffffffLL - 1)) | ({} & 0x7fffffffffffffffLL);",
                wide("low"),
                wide("high")
            )
        }
    };
    format!(
        "KILN_INLINE i64v kiln_i64_from_{suffix}({vector} x) {{
    const {scalar} most = ({scalar})9223372036854775808.0;
{text}
}}
"
    )
}

/// Loads and stores of `count` elements. With a constant full count only the plain access remains.
pub(super) fn partial(vector: &str, scalar: &str, suffix: &str, isa: Isa, lanes: usize) -> String {
    let bytes = lanes
        * match suffix {
            "f32" => 4,
            "f16" | "bf16" => 2,
            "bool" => 1,
            _ => 8,
        };
    let masked = match (isa, suffix) {
        (Isa::Avx512, "f32") if bytes >= 16 => Some("vmovups"),
        (Isa::Avx512, "f64" | "i64") if bytes <= 64 => Some("vmovupd"),
        (Isa::Avx512, "f16" | "bf16") if bytes >= 16 => Some("vmovdqu16"),
        (Isa::Avx512, "bool") if bytes >= 16 => Some("vmovdqu8"),
        _ => None,
    };
    let (load, store) = match masked {
        // A masked access touches live lanes only.
        Some(instruction) => (
            format!(
                "{vector} v;
    __asm__(\"{instruction} (%1), %0%{{%2%}}%{{z%}}\" : \"=v\"(v) : \"r\"(p), \"Yk\"((unsigned short)((1u << count) - 1)), \"m\"(*(const {vector}_memory *)p));
    return v;"
            ),
            format!(
                "__asm__ volatile(\"{instruction} %1, (%0)%{{%2%}}\" : : \"r\"(p), \"v\"(v), \"Yk\"((unsigned short)((1u << count) - 1)) : \"memory\");"
            ),
        ),
        None => (
            format!("{vector} v = {{0}};\n    for (long i = 0; i < count; i++) v[i] = ((const {scalar} *)p)[i];\n    return v;"),
            format!("for (long i = 0; i < count; i++) (({scalar} *)p)[i] = v[i];"),
        ),
    };
    format!(
        "KILN_INLINE {vector} kiln_read_{suffix}(const void *p, long count) {{
    if (count == KILN_LANES) return kiln_load_{suffix}(p);
    {load}
}}
KILN_INLINE void kiln_write_{suffix}(void *p, {vector} v, long count) {{
    if (count == KILN_LANES) {{ kiln_store_{suffix}(p, v); return; }}
    {store}
}}
"
    )
}
