//! What every C source begins with: vector types and the operations C has no operator for.

use super::super::lane::Width;
use super::{DOUBLES, Isa, Names, names};
use std::fmt::Write;

/// The opening of a C source for vectors of `lanes` elements.
///
/// Beside the types it defines, for each format with helpers (shown for f32): `kiln_splat_f32`,
/// `kiln_load_f32`, `kiln_store_f32`, `kiln_load_part_f32(p, n)` (the first n lanes, others 0),
/// `kiln_store_part_f32(p, v, n)`, `kiln_fma_f32`, `kiln_root_f32` (√), `kiln_absolute_f32`,
/// `kiln_min_f32`/`kiln_max_f32` (of the unordered the second operand), `kiln_round_even_f32`,
/// `kiln_round_down_f32`, `kiln_select_f32(mask, a, b)` and `kiln_scale_f32`; load, store and splat also
/// for `i64` and (as `u8v`) `bool`.
pub fn prelude(lanes: usize, isa: Isa) -> String {
    let mut out = types(lanes, isa);
    for width in [Width::F32, Width::F64] {
        if isa.has_helpers(lanes, width) {
            out.push_str(&helpers(isa, width, names(width), lanes));
        }
    }
    out
}

/// Vectors of doubles for functions of floats that are [computed in doubles](crate::math::InDouble): the helpers, and
/// `KILN_IN_DOUBLE1(f, x)` and `KILN_IN_DOUBLE2(f, x, y)`, which convert, call f once or for each half, and round.
pub(super) fn doubles(lanes: usize, isa: Isa) -> String {
    let Names { vector, int, suffix } = DOUBLES;
    let halves = !isa.has_helpers(lanes, Width::F64);
    let each = if halves { lanes / 2 } else { lanes };
    let mut out = format!(
        "typedef double {vector} __attribute__((vector_size({size})));
typedef long long {int} __attribute__((vector_size({size})));
KILN_INLINE {vector} kiln_splat_{suffix}(double x) {{ return x - ({vector}){{0}}; }}
",
        size = 8 * each
    );
    out.push_str(&helpers(isa, Width::F64, DOUBLES, each));
    if !halves {
        out.push_str(
            "#define KILN_IN_DOUBLE1(f, x) __builtin_convertvector(f(__builtin_convertvector(x, f64h)), f32v)
#define KILN_IN_DOUBLE2(f, x, y) __builtin_convertvector(f(__builtin_convertvector(x, f64h), __builtin_convertvector(y, f64h)), f32v)
",
        );
        return out;
    }
    // The modifiers name the halves of registers: half of a float's register is as many lanes as one of doubles.
    let (half, extract, insert) = match isa {
        Isa::Avx512 => ("t", "vextractf32x8", "vinsertf32x8"),
        Isa::Avx2 | Isa::Plain => ("x", "vextractf128", "vinsertf128"),
    };
    let _ = write!(
        out,
        "KILN_INLINE f64h kiln_low_f64h(f32v x) {{
    f64h r;
    __asm__(\"vcvtps2pd %{half}1, %0\" : \"=v\"(r) : \"v\"(x));
    return r;
}}
KILN_INLINE f64h kiln_high_f64h(f32v x) {{
    f64h r;
    __asm__(\"{extract} $1, %1, %{half}0\\n\\tvcvtps2pd %{half}0, %0\" : \"=v\"(r) : \"v\"(x));
    return r;
}}
KILN_INLINE f32v kiln_join_f64h(f64h low, f64h high) {{
    f32v r;
    __asm__(\"vcvtpd2ps %1, %{half}0\" : \"=v\"(r) : \"v\"(low));
    __asm__(\"vcvtpd2ps %1, %{half}0\" : \"=v\"(high) : \"v\"(high));
    __asm__(\"{insert} $1, %{half}1, %0, %0\" : \"+v\"(r) : \"v\"(high));
    return r;
}}
#define KILN_IN_DOUBLE1(f, x) ({{ const f32v x_ = (x); kiln_join_f64h(f(kiln_low_f64h(x_)), f(kiln_high_f64h(x_))); }})
#define KILN_IN_DOUBLE2(f, x, y) ({{ const f32v x_ = (x), y_ = (y); kiln_join_f64h(f(kiln_low_f64h(x_), kiln_low_f64h(y_)), f(kiln_high_f64h(x_), kiln_high_f64h(y_))); }})
"
    );
    out
}

fn types(lanes: usize, isa: Isa) -> String {
    let mut out = format!("enum {{ KILN_LANES = {lanes} }};\n");
    out.push_str("#define KILN_INLINE static inline __attribute__((always_inline, unused))\n");
    let elements = [
        ("float", "f32v", 4),
        ("double", "f64v", 8),
        ("int", "i32v", 4),
        ("unsigned int", "u32v", 4),
        ("long long", "i64v", 8),
        ("unsigned long long", "u64v", 8),
        ("unsigned char", "u8v", 1),
    ];
    for (scalar, vector, bytes) in elements {
        let size = bytes * lanes;
        let _ = writeln!(out, "typedef {scalar} {vector} __attribute__((vector_size({size})));");
    }
    for (scalar, vector, suffix) in [
        ("float", "f32v", "f32"),
        ("double", "f64v", "f64"),
        ("long long", "i64v", "i64"),
        ("unsigned char", "u8v", "bool"),
    ] {
        // Arrays in memory are aligned for their elements only.
        let _ = write!(
            out,
            "typedef {vector} {vector}_memory __attribute__((aligned(1), may_alias));
KILN_INLINE {vector} kiln_load_{suffix}(const void *p) {{ return *(const {vector}_memory *)p; }}
KILN_INLINE void kiln_store_{suffix}(void *p, {vector} v) {{ *({vector}_memory *)p = v; }}
KILN_INLINE {vector} kiln_load_part_{suffix}(const void *p, long n) {{
    {vector} v = {{0}};
    __builtin_memcpy(&v, p, (unsigned long)n * sizeof({scalar}));
    return v;
}}
KILN_INLINE void kiln_store_part_{suffix}(void *p, {vector} v, long n) {{
    __builtin_memcpy(p, &v, (unsigned long)n * sizeof({scalar}));
}}
"
        );
    }
    // GCC widens a vector that it knows to come from memory byte by byte: here it doesn't know. Clang does not, and has no
    // registers for the smallest vectors.
    let known = match isa {
        Isa::Avx512 | Isa::Avx2 => {
            out.push_str("#ifdef __clang__\n#define KILN_HIDE(b)\n#else\n#define KILN_HIDE(b) __asm__(\"\" : \"+v\"(b))\n#endif\n");
            "KILN_HIDE(b); "
        }
        Isa::Plain => "",
    };
    for (suffix, mask) in [("f32", "i32v"), ("f64", "i64v")] {
        let _ = writeln!(
            out,
            "KILN_INLINE {mask} kiln_mask_{suffix}_from_bool(u8v b) {{ {known}return __builtin_convertvector(b, {mask}) != 0; }}"
        );
    }
    let apart = match isa {
        Isa::Avx512 if lanes <= 8 => format!("\n#ifdef __clang__\n    {APART}\n#endif\n   "),
        Isa::Avx512 | Isa::Avx2 | Isa::Plain => String::new(),
    };
    let _ = writeln!(
        out,
        "KILN_INLINE i64v kiln_select_i64(i64v m, i64v a, i64v b) {{{apart} return (m & a) | (~m & b); }}"
    );
    // x - 0 keeps the sign of a zero, x + 0 would not.
    out.push_str(
        "KILN_INLINE f32v kiln_splat_f32(float x) { return x - (f32v){0}; }
KILN_INLINE f64v kiln_splat_f64(double x) { return x - (f64v){0}; }
KILN_INLINE i64v kiln_splat_i64(long long x) { return x - (i64v){0}; }
KILN_INLINE i64v kiln_widen_mask(i32v m) { return __builtin_convertvector(m, i64v); }
KILN_INLINE i32v kiln_narrow_mask(i64v m) { return __builtin_convertvector(m, i32v); }
KILN_INLINE u8v kiln_bool_from_mask_f32(i32v m) { return __builtin_convertvector(m & 1, u8v); }
KILN_INLINE u8v kiln_bool_from_mask_f64(i64v m) { return __builtin_convertvector(m & 1, u8v); }
#define KILN_RARE static __attribute__((noinline, cold, unused))
#define KILN_LOOKUP(type, table, index) ({ const __typeof__(index) i_ = (index); type r_; for (unsigned l_ = 0; l_ < sizeof(r_) / sizeof(r_[0]); l_++) r_[l_] = table[i_[l_]]; r_; })
#define KILN_EACH1(type, f, x) ({ const type x_ = (x); type r_; for (int i_ = 0; i_ < KILN_LANES; i_++) r_[i_] = __builtin_##f(x_[i_]); r_; })
#define KILN_EACH2(type, f, x, y) ({ const type x_ = (x), y_ = (y); type r_; for (int i_ = 0; i_ < KILN_LANES; i_++) r_[i_] = __builtin_##f(x_[i_], y_[i_]); r_; })
",
    );
    out
}

fn helpers(isa: Isa, width: Width, names: Names, lanes: usize) -> String {
    let Names { vector, int, suffix } = names;
    let magnitude_mask = match width {
        Width::F32 => "0x7fffffff",
        Width::F64 => "0x7fffffffffffffffLL",
    };
    let mut out = format!(
        "KILN_INLINE {vector} kiln_absolute_{suffix}({vector} x) {{ return ({vector})(({int})x & {magnitude_mask}); }}\n"
    );
    let _ = writeln!(
        out,
        "#define KILN_RARELY_{suffix}(mask, rare, common) ({{ const {int} m_ = (mask); const {vector} c_ = (common); __builtin_expect(kiln_any_{suffix}(m_), 0) ? kiln_select_{suffix}(m_, rare, c_) : c_; }})"
    );
    match isa {
        Isa::Avx512 | Isa::Avx2 => out.push_str(&x86_helpers(isa, width, names, lanes)),
        Isa::Plain => out.push_str(&plain_helpers(width, names)),
    }
    out
}

/// One instruction each; asm without side effects may be moved and merged freely. GCC keeps its constants out of loops;
/// Clang does so only for what it understands, and knows these instructions by what they do in plain C.
fn x86_helpers(isa: Isa, width: Width, names: Names, lanes: usize) -> String {
    let Names { vector, int, suffix } = names;
    let packed = match width {
        Width::F32 => "ps",
        Width::F64 => "pd",
    };
    let vanishing = width.vanishing();
    let round = match isa {
        Isa::Avx512 => "vrndscale",
        Isa::Avx2 | Isa::Plain => "vround",
    };
    let mut out = format!(
        "{}KILN_INLINE {vector} kiln_root_{suffix}({vector} x) {{
    __asm__(\"vsqrt{packed} %1, %0\" : \"=v\"(x) : \"v\"(x));
    return x;
}}
KILN_INLINE {vector} kiln_round_even_{suffix}({vector} x) {{
    __asm__(\"{round}{packed} $8, %1, %0\" : \"=v\"(x) : \"v\"(x));
    return x;
}}
KILN_INLINE {vector} kiln_round_down_{suffix}({vector} x) {{
    __asm__(\"{round}{packed} $9, %1, %0\" : \"=v\"(x) : \"v\"(x));
    return x;
}}
",
        fma(width, names, lanes)
    );
    // A lane of a mask is 0 or all ones, so its sign says it.
    let signs = match isa {
        Isa::Avx512 => {
            let (letter, k) = if width == Width::F32 { ("d", "w") } else { ("q", "b") };
            format!("vpmov{letter}2m %1, %%k1\\n\\tkmov{k} %%k1, %0\" : \"=r\"(any) : \"v\"(m) : \"k1\"")
        }
        Isa::Avx2 | Isa::Plain => format!("vmovmsk{packed} %1, %0\" : \"=r\"(any) : \"x\"(m)"),
    };
    let _ = write!(
        out,
        "KILN_INLINE int kiln_any_{suffix}({int} m) {{
    unsigned any;
    __asm__(\"{signs});
    return any != 0;
}}
"
    );
    let apart = if isa == Isa::Avx512 { APART } else { "" };
    let _ = write!(out, "#ifdef __clang__\n{}#else\n", choices(names, apart));
    out.push_str(&format!(
        "KILN_INLINE {vector} kiln_min_{suffix}({vector} a, {vector} b) {{
    __asm__(\"vmin{packed} %2, %1, %0\" : \"=v\"(a) : \"v\"(a), \"v\"(b));
    return a;
}}
KILN_INLINE {vector} kiln_max_{suffix}({vector} a, {vector} b) {{
    __asm__(\"vmax{packed} %2, %1, %0\" : \"=v\"(a) : \"v\"(a), \"v\"(b));
    return a;
}}
"
    ));
    out.push_str(&match isa {
        Isa::Avx512 => format!(
            "KILN_INLINE {vector} kiln_select_{suffix}({int} m, {vector} a, {vector} b) {{
    __asm__(\"vpternlogd $0xca, %2, %1, %0\" : \"+v\"(m) : \"v\"(a), \"v\"(b));
    return ({vector})m;
}}
#endif
KILN_INLINE {vector} kiln_scale_{suffix}({vector} x, {vector} n, {int} n_int) {{
    (void)n_int;
    const {vector} vanishing = kiln_splat_{suffix}({vanishing:.1});
    __asm__(\"vcmp{packed} $0x15, %2, %1, %%k1\\n\\tvscalef{packed} %1, %0, %0%{{%%k1%}}%{{z%}}\" : \"+v\"(x) : \"v\"(n), \"v\"(vanishing) : \"k1\");
    return x;
}}
"
        ),
        Isa::Avx2 | Isa::Plain => format!(
            "KILN_INLINE {vector} kiln_select_{suffix}({int} m, {vector} a, {vector} b) {{
    __asm__(\"vblendv{packed} %3, %2, %1, %0\" : \"=x\"(a) : \"x\"(b), \"x\"(a), \"x\"(m));
    return a;
}}
#endif
{}",
            general_scale(width, names)
        ),
    });
    out
}

/// A fused multiply-add of whole vectors. Clang's builtins for it are other ones in every few versions.
fn fma(width: Width, names: Names, lanes: usize) -> String {
    let Names { vector, suffix, .. } = names;
    let packed = if width == Width::F32 { "ps" } else { "pd" };
    let asm =
        format!("__asm__(\"vfmadd213{packed} %2, %1, %0\" : \"+v\"(a) : \"v\"(b), \"v\"(c));\n    return a;");
    let (builtin, more) = match lanes * width.bytes() {
        64 => (format!("__builtin_ia32_vfmadd{packed}512_mask"), ", -1, 4"),
        32 => (format!("__builtin_ia32_vfmadd{packed}256"), ""),
        _ => (format!("__builtin_ia32_vfmadd{packed}"), ""),
    };
    format!(
        "#ifndef __clang__
#define KILN_FMA_{suffix} {asm}
#elif __has_builtin(__builtin_elementwise_fma)
#define KILN_FMA_{suffix} return __builtin_elementwise_fma(a, b, c);
#elif __has_builtin({builtin})
#define KILN_FMA_{suffix} return {builtin}(a, b, c{more});
#else
#define KILN_FMA_{suffix} {asm}
#endif
KILN_INLINE {vector} kiln_fma_{suffix}({vector} a, {vector} b, {vector} c) {{ KILN_FMA_{suffix} }}
",
        asm = asm.replace("\n    ", " ")
    )
}

/// [`Lane::scale`](crate::math::Lane::scale) as it is defined: two products, the first one exact.
fn general_scale(width: Width, names: Names) -> String {
    let Names { vector, int, suffix } = names;
    let (bias, mantissa, vanishing) = (width.bias(), width.mantissa_bits(), width.vanishing());
    format!(
        "KILN_INLINE {vector} kiln_scale_{suffix}({vector} x, {vector} n, {int} n_int) {{
    x = kiln_select_{suffix}(n < kiln_splat_{suffix}({vanishing:.1}), ({vector}){{0}}, x);
    const {int} half = n_int >> 1;
    const {int} rest = n_int - half;
    return (x * ({vector})((half + {bias}) << {mantissa})) * ({vector})((rest + {bias}) << {mantissa});
}}
"
    )
}

/// Clang 14 gets `m ? f(b, c, x) : b` wrong where f is bitwise logic and c a constant: it makes one masked `vpternlog`
/// of it, whose operands are in another order than its table. What it can't look into it does not merge.
const APART: &str = "__asm__(\"\" : \"+v\"(a)); ";

/// Selection, minimum and maximum in plain C.
fn choices(names: Names, apart: &str) -> String {
    let Names { vector, int, suffix } = names;
    let select =
        |mask: &str| format!("const {int} m = {mask}; return ({vector})((m & ({int})a) | (~m & ({int})b));");
    format!(
        "KILN_INLINE {vector} kiln_select_{suffix}({int} mask, {vector} a, {vector} b) {{ {apart}{} }}
KILN_INLINE {vector} kiln_min_{suffix}({vector} a, {vector} b) {{ {} }}
KILN_INLINE {vector} kiln_max_{suffix}({vector} a, {vector} b) {{ {} }}
",
        select("mask"),
        select("a < b"),
        select("a > b")
    )
}

fn plain_helpers(width: Width, names: Names) -> String {
    let Names { vector, int, suffix } = names;
    let f = match width {
        Width::F32 => "f",
        Width::F64 => "",
    };
    let mut out = format!(
        "{}KILN_INLINE {vector} kiln_fma_{suffix}({vector} a, {vector} b, {vector} c) {{
    for (int i = 0; i < KILN_LANES; i++) a[i] = __builtin_fma{f}(a[i], b[i], c[i]);
    return a;
}}
",
        choices(names, "")
    );
    for (name, builtin) in [("root", "sqrt"), ("round_even", "rint"), ("round_down", "floor")] {
        let _ = write!(
            out,
            "KILN_INLINE {vector} kiln_{name}_{suffix}({vector} x) {{
    for (int i = 0; i < KILN_LANES; i++) x[i] = __builtin_{builtin}{f}(x[i]);
    return x;
}}
"
        );
    }
    let _ = write!(
        out,
        "KILN_INLINE int kiln_any_{suffix}({int} m) {{
    int r = 0;
    for (int i = 0; i < (int)(sizeof(m) / sizeof(m[0])); i++) r |= m[i] != 0;
    return r;
}}
"
    );
    out.push_str(&general_scale(width, names));
    out
}
