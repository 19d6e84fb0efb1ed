//! C for narrow dtypes: vectors as they are in memory, and the way to what they are computed in and back.
//!
//! Integers are computed as `i64v`, halves as `f32v`. Where no instruction converts halves, it is done by
//! arithmetic on bits, some ten instructions a vector.

use std::fmt::Write;

use kiln_ir::DType;
use kiln_ir::math::c::Isa;

use super::helpers::partial;
use super::memory_type;
use super::windows::back;

/// The vector type of a narrow dtype's elements in memory.
pub(super) const fn memory_vector(dtype: DType) -> &'static str {
    match dtype {
        DType::U8 => "u8m",
        DType::I8 => "i8m",
        DType::I16 => "i16m",
        DType::I32 => "i32m",
        DType::F16 => "f16m",
        DType::BF16 => "bf16m",
        DType::Bool => "u8v",
        DType::I64 => "i64v",
        DType::F32 => "f32v",
        DType::F64 => "f64v",
    }
}

/// A computed integer as a narrow dtype holds it.
pub(super) fn wrapped(dtype: DType, value: &str) -> String {
    match dtype {
        DType::U8 | DType::I8 | DType::I16 | DType::I32 => format!("kiln_wrap_{dtype}({value})"),
        _ => value.into(),
    }
}

/// The helpers of the narrow dtypes that are used.
pub(super) fn helpers(lanes: usize, isa: Isa, uses: &dyn Fn(&str) -> bool) -> String {
    let mut out = String::new();
    for dtype in DType::ALL.into_iter().filter(|d| d.is_narrow() && uses(&format!("_{d}("))) {
        let (vector, scalar, name) = (memory_vector(dtype), memory_type(dtype), dtype.name());
        let _ = write!(
            out,
            "typedef {scalar} {vector} __attribute__((vector_size({})));
typedef {vector} {vector}_memory __attribute__((aligned(1), may_alias));
KILN_INLINE {vector} kiln_load_{name}(const void *p) {{ return *(const {vector}_memory *)p; }}
KILN_INLINE void kiln_store_{name}(void *p, {vector} v) {{ *({vector}_memory *)p = v; }}
",
            lanes * dtype.size()
        );
        out.push_str(&partial(vector, scalar, name, isa, lanes));
        let _ = write!(
            out,
            "KILN_INLINE {vector} kiln_stream_{name}(const void *p, long count) {{
    __builtin_prefetch((const char *)p + 1024);
    return kiln_read_{name}(p, count);
}}
"
        );
        if uses(&format!("kiln_back_{name}(")) || uses(&format!("kiln_turned_{name}(")) {
            out.push_str(&back(vector, scalar, name, lanes));
        }
        out.push_str(&conversions(dtype, isa, lanes));
    }
    out
}

fn conversions(dtype: DType, isa: Isa, lanes: usize) -> String {
    let (vector, name) = (memory_vector(dtype), dtype.name());
    // Registers of 256 bits and more: a smaller half is no vector register of its own.
    let has_instructions = isa != Isa::Plain && lanes >= 8;
    match dtype {
        DType::F16 if has_instructions => format!("{HALF_INSTRUCTIONS}{}", one(dtype)),
        DType::F16 => format!("{HALF}{}", one(dtype)),
        DType::BF16 => {
            let widen = if has_instructions { BRAIN_WIDEN_INSTRUCTION } else { BRAIN_WIDEN };
            let masks = isa == Isa::Avx512 && has_instructions;
            let shorten = if masks { BRAIN_SHORTEN_INSTRUCTIONS } else { BRAIN_SHORTEN };
            format!("{widen}{shorten}{}", one(dtype))
        }
        _ => {
            let wrapped = match dtype {
                DType::U8 => "x & 255".to_string(),
                _ => format!("(i64v)((u64v)x << {0}) >> {0}", 64 - 8 * dtype.size()),
            };
            format!(
                "KILN_INLINE i64v kiln_widen_{name}({vector} v) {{ return __builtin_convertvector(v, i64v); }}
KILN_INLINE {vector} kiln_shorten_{name}(i64v x) {{ return __builtin_convertvector(x, {vector}); }}
KILN_INLINE i64v kiln_wrap_{name}(i64v x) {{ return {wrapped}; }}
"
            )
        }
    }
}

/// A scalar of memory in every lane.
fn one(dtype: DType) -> String {
    let vector = memory_vector(dtype);
    format!(
        "KILN_INLINE f32v kiln_one_{dtype}(unsigned short x) {{
    return kiln_widen_{dtype}(({vector}){{0}} + x);
}}
"
    )
}

/// Every processor with AVX2 has them; 0 asks for rounding to nearest even.
const HALF_INSTRUCTIONS: &str = "\
KILN_INLINE f32v kiln_widen_f16(f16m v) {
    f32v x;
    __asm__(\"vcvtph2ps %1, %0\" : \"=v\"(x) : \"v\"(v));
    return x;
}
KILN_INLINE f16m kiln_shorten_f16(f32v x) {
    f16m v;
    __asm__(\"vcvtps2ph $0, %1, %0\" : \"=v\"(v) : \"v\"(x));
    return v;
}
";

/// Exponents move by multiplying with 2¹¹², which makes subnormal halves normal floats; on the way back adding
/// ½ leaves the last bit of a subnormal half at the end of the sum.
const HALF: &str = "\
KILN_INLINE f32v kiln_widen_f16(f16m v) {
    const u32v h = __builtin_convertvector(v, u32v), sign = (h & 0x8000u) << 16, rest = (h & 0x7fffu) << 13;
    const u32v special = (u32v)(rest >= 0x0f800000u) & 0x7f800000u;
    return (f32v)((u32v)((f32v)rest * 0x1p112f) | special | sign);
}
KILN_INLINE f16m kiln_shorten_f16(f32v x) {
    const u32v u = (u32v)x, sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    const u32v usual = (a + 0xc8000fffu + ((a >> 13) & 1u)) >> 13;
    const u32v small = (u32v)((f32v)a + 0.5f) - 0x3f000000u;
    const u32v is_small = (u32v)(a < 0x38800000u), is_large = (u32v)(a >= 0x47800000u);
    const u32v nan = (u32v)(a > 0x7f800000u) & 0x200u;
    const u32v finite = (is_small & small) | (~is_small & usual);
    return __builtin_convertvector((is_large & 0x7c00u) | (~is_large & finite) | nan | sign, f16m);
}
";

const BRAIN_WIDEN: &str = "\
KILN_INLINE f32v kiln_widen_bf16(bf16m v) { return (f32v)(__builtin_convertvector(v, u32v) << 16); }
";

/// GCC 12 converts vectors of 512 bits in halves.
const BRAIN_WIDEN_INSTRUCTION: &str = "\
KILN_INLINE f32v kiln_widen_bf16(bf16m v) {
    u32v x;
    __asm__(\"vpmovzxwd %1, %0\" : \"=v\"(x) : \"v\"(v));
    return (f32v)(x << 16);
}
";

/// To nearest even; a NaN keeps its upper bits and becomes quiet.
const BRAIN_SHORTEN: &str = "\
KILN_INLINE bf16m kiln_shorten_bf16(f32v x) {
    const u32v u = (u32v)x, nan = (u32v)(x != x);
    const u32v rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return __builtin_convertvector((nan & ((u >> 16) | 0x40u)) | (~nan & rounded), bf16m);
}
";

/// The same. The machine's own conversion takes subnormal numbers for zeros.
const BRAIN_SHORTEN_INSTRUCTIONS: &str = "\
KILN_INLINE bf16m kiln_shorten_bf16(f32v x) {
    const u32v u = (u32v)x, quiet = (u32v){0} + 0x400000u;
    u32v y = u + 0x7fffu + ((u >> 16) & 1u);
    unsigned short nan;
    bf16m v;
    __asm__(\"vcmpunordps %1, %1, %0\" : \"=Yk\"(nan) : \"v\"(x));
    __asm__(\"vpord %1, %2, %0%{%3%}\" : \"+v\"(y) : \"v\"(u), \"v\"(quiet), \"Yk\"(nan));
    y >>= 16;
    __asm__(\"vpmovdw %1, %0\" : \"=v\"(v) : \"v\"(y));
    return v;
}
";
