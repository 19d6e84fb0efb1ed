//! Random numbers as `rand` and `randn` define them, one element at a time: Philox 4x32-10, element `i` of
//! an f32 tensor from word `i % 4` of counter `offset + i/4`, of an f64 tensor from two words of counter
//! `offset + i/2`.

use kiln_ir::DType;

/// Four random words for a counter and a key.
pub fn philox(counter: u64, key: u64) -> [u32; 4] {
    let mut c = [counter as u32, (counter >> 32) as u32, 0, 0];
    let mut k = [key as u32, (key >> 32) as u32];
    for _ in 0..10 {
        let left = u64::from(c[0]) * 0xD251_1F53;
        let right = u64::from(c[2]) * 0xCD9E_8D57;
        c = [
            (right >> 32) as u32 ^ c[1] ^ k[0],
            right as u32,
            (left >> 32) as u32 ^ c[3] ^ k[1],
            left as u32,
        ];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// Element `i` of a uniform tensor, in [0, 1).
pub fn uniform(dtype: DType, seed: u64, offset: u64, i: usize) -> f64 {
    match dtype {
        DType::F64 => {
            let words = philox(offset.wrapping_add(i as u64 / 2), seed);
            let (first, second) = (words[2 * (i % 2)], words[2 * (i % 2) + 1]);
            let bits = (u64::from(first) << 32 | u64::from(second)) >> 11;
            bits as f64 / (1u64 << 53) as f64
        }
        _ => f64::from(philox(offset.wrapping_add(i as u64 / 4), seed)[i % 4] >> 8) / 16_777_216.0,
    }
}

/// Element `i` of a standard normal tensor: neighbours `2p` and `2p + 1` are the cosine and sine of one pair
/// of uniform numbers (Box and Muller's method).
pub fn normal(dtype: DType, seed: u64, offset: u64, i: usize) -> f64 {
    let first = i - i % 2;
    let tiny = if dtype == DType::F64 { f64::EPSILON / 2.0 } else { 1.0 / 16_777_216.0 };
    let a = uniform(dtype, seed, offset, first) + tiny;
    let b = uniform(dtype, seed, offset, first + 1);
    let (sine, cosine) = (std::f64::consts::TAU * b).sin_cos();
    (-2.0 * a.ln()).sqrt() * if i == first { cosine } else { sine }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        assert_eq!(philox(0, 0), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
    }
}
