//! CPU features: which vector instructions this machine has, found once; asking for memory ahead.

use std::sync::OnceLock;

/// Asks for a cache line that will be read soon; any address will do.
#[inline(always)]
pub fn prefetch<T>(place: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that reads nothing.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place.cast())
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// The instruction sets Kiln writes code for, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// AVX-512 F, VL, DQ and BW: 64-byte vectors.
    Avx512,
    /// AVX2 with FMA and F16C: 32-byte vectors.
    Avx2,
    /// What every CPU of the architecture has: 16-byte vectors.
    Plain,
}

impl Isa {
    /// The best set of this machine, or the one `KILN_ISA` (avx512, avx2, plain) asks for.
    ///
    /// Asking for more than the machine has gives what it has.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let found = Isa::detect();
            match std::env::var("KILN_ISA") {
                Err(_) => found,
                Ok(name) => match Isa::parse(&name) {
                    Some(wanted) => wanted.max(found),
                    None => {
                        crate::warn::once("KILN_ISA", || {
                            format!("KILN_ISA={name} is not avx512, avx2 or plain; using {}", found.name())
                        });
                        found
                    }
                },
            }
        })
    }

    /// What the CPU reports, whatever the environment says.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("bmi2");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw");
            match (avx512, avx2) {
                (true, true) => Isa::Avx512,
                (false, true) => Isa::Avx2,
                (_, false) => Isa::Plain,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Plain
    }

    /// The name `KILN_ISA` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Plain => "plain",
        }
    }

    /// Bytes in one vector register.
    pub const fn vector_bytes(self) -> usize {
        match self {
            Isa::Avx512 => 64,
            Isa::Avx2 => 32,
            Isa::Plain => 16,
        }
    }

    /// Flags that let GCC and Clang use the set.
    ///
    /// Named features rather than `-march=native`: the flags are part of a kernel's identity, so they
    /// must say what they mean on every machine that shares a cache directory.
    pub const fn compiler_flags(self) -> &'static [&'static str] {
        match self {
            Isa::Avx512 => &[
                "-mavx512f",
                "-mavx512vl",
                "-mavx512dq",
                "-mavx512bw",
                "-mavx2",
                "-mfma",
                "-mf16c",
                "-mbmi2",
                "-mprefer-vector-width=512",
            ],
            Isa::Avx2 => &["-mavx2", "-mfma", "-mf16c", "-mbmi2"],
            Isa::Plain => &[],
        }
    }

    fn parse(name: &str) -> Option<Isa> {
        [Isa::Avx512, Isa::Avx2, Isa::Plain]
            .into_iter()
            .find(|isa| isa.name().eq_ignore_ascii_case(name.trim()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for isa in [Isa::Avx512, Isa::Avx2, Isa::Plain] {
            assert_eq!(Isa::parse(isa.name()), Some(isa));
            assert!(isa.vector_bytes().is_power_of_two());
        }
        assert_eq!(Isa::parse("sse9"), None);
        assert!(Isa::best() >= Isa::detect());
    }
}
