//! The machine: its caches, cores and vector instructions, found once; asking for memory ahead.

use std::sync::OnceLock;

pub use kiln_ir::math::c::Isa;
pub use kiln_plan::Machine;

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

/// The same for what will be read a little later: it need not be in the first-level cache.
#[inline(always)]
pub(crate) fn prefetch_near<T>(place: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that reads nothing.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(place.cast())
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// This machine, found once; its instructions are the best it has, or those `KILN_ISA` (avx512, avx2, plain) asks for.
///
/// Asking for more than the machine has gives what it has.
pub fn machine() -> &'static Machine {
    static MACHINE: OnceLock<Machine> = OnceLock::new();
    MACHINE.get_or_init(|| {
        let found = Isa::detect();
        let isa = match std::env::var("KILN_ISA") {
            Err(_) => found,
            Ok(name) => match Isa::named(&name) {
                Some(wanted) => wanted.max(found),
                None => {
                    crate::warn::once("KILN_ISA", || {
                        format!("KILN_ISA={name} is not avx512, avx2 or plain; using {}", found.name())
                    });
                    found
                }
            },
        };
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let caches = caches(&|number, name| {
            let path = format!("/sys/devices/system/cpu/cpu0/cache/index{number}/{name}");
            std::fs::read_to_string(path).ok().map(|text| text.trim().to_string())
        });
        Machine { cores, ..Machine::with(isa).caches(caches) }
    })
}

/// The instructions to use: [`machine`]'s.
pub fn isa() -> Isa {
    machine().isa
}

/// How pairs of bf16 are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// One number after the other.
    Apart,
    /// Vectors of pairs at a time.
    Vectors,
    /// Tiles of pairs at a time.
    Tiles,
}

/// What the instructions to use have for pairs of bf16.
pub fn pairs() -> Pairs {
    #[cfg(target_arch = "x86_64")]
    if isa() == Isa::Avx512 && is_x86_feature_detected!("avx512bf16") {
        return if has_tiles() { Pairs::Tiles } else { Pairs::Vectors };
    }
    Pairs::Apart
}

/// Whether tiles of bf16 are among the instructions to use: the machine has them, the system lets this process have their
/// registers, and `KILN_ISA` doesn't ask for vectors.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_tiles() -> bool {
    static TILES: OnceLock<bool> = OnceLock::new();
    *TILES.get_or_init(|| std::env::var_os("KILN_ISA").is_none() && allows_tiles())
}

/// Asks the system for tile registers, which it saves for those who asked.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn allows_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    /// From Linux's `asm/prctl.h`, and the registers' number.
    const REQUEST: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    let has_bits = |word: u32, bits: &[u32]| bits.iter().all(|bit| word >> bit & 1 == 1);
    // The system tells what it saves; AVX512-BF16 and tiles for bf16 are there; eight tiles of 16 rows of 64 bytes.
    if __cpuid(0).eax < 0x1d
        || !has_bits(__cpuid(1).ecx, &[27])
        || !has_bits(__cpuid_count(7, 0).edx, &[22, 24])
    {
        return false;
    }
    let form = __cpuid_count(0x1d, 1);
    if (form.ebx >> 16, form.ebx & 0xffff, form.ecx & 0xffff) != (8, 64, 16) {
        return false;
    }
    let saved: u32;
    // SAFETY: the instruction is there, as the first of the bits said; it reads a register.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") saved, out("edx") _, options(nomem, nostack));
    }
    // SAFETY: the call takes numbers, and changes what this process may do.
    has_bits(saved, &[17, 18]) && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILE_DATA) } == 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn allows_tiles() -> bool {
    false
}

/// The sizes of a core's caches for data, by level: `read` gives what Linux tells of its caches, by number and name.
/// Of a second level that several cores share each has its part. Elsewhere nothing is known.
fn caches(read: &dyn Fn(usize, &str) -> Option<String>) -> [Option<usize>; 3] {
    let mut sizes = [None; 3];
    let mut threads = 1;
    for number in 0.. {
        let facts = ["level", "type", "size", "shared_cpu_list"].map(|name| read(number, name));
        let [Some(level), Some(kind), Some(size), Some(list)] = facts else { break };
        let (sharing, size) = (sharing(&list), bytes(&size));
        match (level.as_str(), kind.as_str()) {
            (_, "Instruction") => {}
            ("1", _) => (threads, sizes[0]) = (sharing, size),
            ("2", _) => sizes[1] = size.map(|size| size / (sharing / threads).max(1)),
            ("3", _) => sizes[2] = size,
            _ => {}
        }
    }
    sizes
}

/// How many processors a list like `0-3,8` has.
fn sharing(list: &str) -> usize {
    let count = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    };
    list.split(',').filter_map(count).sum::<usize>().max(1)
}

/// The bytes of a size like `32K`.
fn bytes(text: &str) -> Option<usize> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_a_sane_one() {
        let Machine { l1, l2, l3, cores, isa } = *machine();
        assert!([l1, l2, l3].iter().all(|size| *size > 0 && size.is_multiple_of(4 << 10)), "{:?}", machine());
        assert!(l1 <= l2 && l2 <= l3 && cores >= 1, "{:?}", machine());
        assert!(isa >= Isa::detect());
    }

    #[test]
    fn caches_are_read_as_linux_tells_them() {
        let found = |text: &str| {
            let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
            caches(&|number, name| {
                let names = ["level", "type", "size", "shared_cpu_list"];
                let at = names.iter().position(|known| *known == name)?;
                Some(lines.get(number)?[at].to_string())
            })
        };
        let two_threads = "1 Data 48K 0,8\n1 Instruction 32K 0,8\n2 Unified 2048K 0,8\n3 Unified 105M 0-15";
        assert_eq!(found(two_threads), [Some(48 << 10), Some(2 << 20), Some(105 << 20)]);
        let four_cores = "1 Data 32K 0\n1 Instruction 64K 0\n2 Unified 4096K 0-3";
        assert_eq!(found(four_cores), [Some(32 << 10), Some(1 << 20), None]);
        assert_eq!(found(""), [None; 3]);
    }

    #[test]
    fn sizes_have_units() {
        let sizes = ["32K", "1024K", "105M", "4096", "", "K", "12 parsecs"].map(bytes);
        let expected = [Some(32 << 10), Some(1 << 20), Some(105 << 20), Some(4096), None, None, None];
        assert_eq!(sizes, expected);
    }

    #[test]
    fn names_parse_back() {
        assert!(Isa::ALL.into_iter().all(|isa| Isa::named(isa.name()) == Some(isa)));
        assert_eq!(Isa::named("sse9"), None);
    }
}
