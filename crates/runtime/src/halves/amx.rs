//! Products of bf16 by tiles: registers of 16 rows of 16 words each (AMX).
//!
//! The inner dim is taken in steps of 16 words. In a step, the first products of all pairs are a chain of fused additions
//! that begins with zero, the second ones another; both are added up, and then to the sum. This order is not that of the
//! other sets, and results differ from theirs in their last bits. [`MODEL`] computes the same bits by vectors: it takes
//! the numbers that tiles take for zeros, stands in for them where the machine has none, and says what they do.

use std::arch::asm;
use std::arch::x86_64::*;

use super::few::{TURNED, turn_lines};
use super::pack::Lines;
use super::tile::{Loops, Task, WIDEST};
use crate::cpu;

/// Rows of a tile register, and words of each.
pub(super) const SIDE: usize = 16;
/// Words of a tile register.
const TILE: usize = SIDE * SIDE;

/// Tile registers by the machine.
pub(super) static TILES: Loops = &[(SIDE, one_tile), (2 * SIDE, two_tiles)];
/// The same by vectors.
pub(super) static MODEL: Loops = &[(SIDE, model::<SIDE>), (2 * SIDE, model::<{ 2 * SIDE }>)];

/// The thread's tile registers, set up as long as this lives: others may want them in another form, and the system saves
/// what they hold.
pub(super) struct Registers(());

impl Registers {
    /// If the machine has them.
    pub(super) fn new() -> Option<Registers> {
        /// Eight of 16 rows of 64 bytes, in the order that the instruction reads.
        #[repr(C, align(64))]
        struct Form {
            palette: u8,
            start: u8,
            reserved: [u8; 14],
            columns: [u16; 16],
            rows: [u8; 16],
        }
        static FORM: Form = {
            let (mut columns, mut rows) = ([0; 16], [0; 16]);
            let mut register = 0;
            while register < 8 {
                (columns[register], rows[register]) = (64, SIDE as u8);
                register += 1;
            }
            Form { palette: 1, start: 0, reserved: [0; 14], columns, rows }
        };
        if !cpu::has_tiles() {
            return None;
        }
        // SAFETY: the machine has the instruction and the system allows it; it reads the 64 bytes of the form.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const FORM, options(nostack, readonly)) };
        Some(Registers(()))
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: the machine has the instruction, as it has tiles.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}

/// 16 rows times a panel.
///
/// # Safety
/// The task has 16 rows, and steps of [`SIDE`] words; the thread's registers are set up.
unsafe fn one_tile(task: &Task) {
    // SAFETY: places within the task's words and sums.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {wide}]",
            "tileloadd tmm1, [{sums} + {wide} + 64]",
            "test {steps}, {steps}",
            "jz 3f",
            "2:",
            "tileloadd tmm4, [{rows} + {narrow}]",
            "tileloadd tmm6, [{panel} + {wide}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{panel} + {wide} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {rows}, 1024",
            "add {panel}, 2048",
            "dec {steps}",
            "jnz 2b",
            "3:",
            "tilestored [{sums} + {wide}], tmm0",
            "tilestored [{sums} + {wide} + 64], tmm1",
            sums = in(reg) task.sums,
            rows = inout(reg) task.rows => _,
            panel = inout(reg) task.panel => _,
            steps = inout(reg) task.depth / SIDE => _,
            wide = in(reg) WIDEST * size_of::<f32>(),
            narrow = in(reg) SIDE * size_of::<u32>(),
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    }
}

/// 32 rows times a panel.
///
/// # Safety
/// The task has 32 rows, and steps of [`SIDE`] words; the thread's registers are set up.
unsafe fn two_tiles(task: &Task) {
    // SAFETY: places within the task's words and sums.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {wide}]",
            "tileloadd tmm1, [{sums} + {wide} + 64]",
            "tileloadd tmm2, [{lower} + {wide}]",
            "tileloadd tmm3, [{lower} + {wide} + 64]",
            "test {steps}, {steps}",
            "jz 3f",
            "2:",
            "tileloadd tmm4, [{rows} + {narrow}]",
            "tileloadd tmm6, [{panel} + {wide}]",
            "tileloadd tmm7, [{panel} + {wide} + 64]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{rows} + {narrow} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {rows}, 2048",
            "add {panel}, 2048",
            "dec {steps}",
            "jnz 2b",
            "3:",
            "tilestored [{sums} + {wide}], tmm0",
            "tilestored [{sums} + {wide} + 64], tmm1",
            "tilestored [{lower} + {wide}], tmm2",
            "tilestored [{lower} + {wide} + 64], tmm3",
            sums = in(reg) task.sums,
            lower = in(reg) task.sums.add(SIDE * WIDEST),
            rows = inout(reg) task.rows => _,
            panel = inout(reg) task.panel => _,
            steps = inout(reg) task.depth / SIDE => _,
            wide = in(reg) WIDEST * size_of::<f32>(),
            narrow = in(reg) SIDE * size_of::<u32>(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    }
}

/// What tiles compute, with all numbers counting.
///
/// # Safety
/// The task has `R` rows, and steps of [`SIDE`] words; the machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2")]
unsafe fn model<const R: usize>(task: &Task) {
    const ROWS: usize = 4;
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let halves = |word: __m512i| {
        [_mm512_slli_epi32::<16>(word), _mm512_and_si512(word, upper)].map(|x| _mm512_castsi512_ps(x))
    };
    for step in 0..task.depth / SIDE {
        for r in (0..R).step_by(ROWS) {
            // SAFETY: places within the task's words and sums.
            unsafe {
                let rows = task.rows.add(step * R * SIDE + r * SIDE);
                let panel = task.panel.add(step * SIDE * WIDEST);
                let mut sums = [[[_mm512_setzero_ps(); 2]; 2]; ROWS];
                for w in 0..SIDE {
                    for v in 0..2 {
                        let column = halves(_mm512_loadu_si512(panel.add(w * WIDEST + v * SIDE).cast()));
                        for (r, sums) in sums.iter_mut().enumerate() {
                            let row = halves(_mm512_set1_epi32(*rows.add(r * SIDE + w) as i32));
                            for (i, sum) in sums[v].iter_mut().enumerate() {
                                *sum = _mm512_fmadd_ps(row[i], column[i], *sum);
                            }
                        }
                    }
                }
                for (at, sums) in sums.iter().enumerate() {
                    for (v, [first, second]) in sums.iter().enumerate() {
                        let to = task.sums.add((r + at) * WIDEST + v * SIDE);
                        let both = _mm512_add_ps(*first, *second);
                        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), both));
                    }
                }
            }
        }
    }
}

/// Packs lines as rows of tiles, one step after the other: word `w` of line `j` goes to
/// `to + (w / 16 · lines + j) · 16 + w % 16`, with zeros behind the lines and for lines that are none.
///
/// # Safety
/// The elements are readable, and `to` has room for `lines` of them, a multiple of 16; the machine has AVX-512.
#[inline(always)]
pub(super) unsafe fn pack(from: Lines, to: *mut u32, lines: usize) {
    let Lines { from, count, length, .. } = from;
    const STEP: usize = 2 * SIDE;
    for (step, p) in (0..length).step_by(STEP).enumerate() {
        let part = STEP.min(length - p);
        let to = to.wrapping_add(step * lines * SIDE);
        if from.row == 1 {
            for j in 0..lines {
                // SAFETY: part of a line, and its place.
                unsafe {
                    let to = to.add(j * SIDE).cast::<[u16; STEP]>();
                    if j >= count {
                        *to = [0; STEP];
                    } else if part == STEP {
                        *to = from.at(p, j).pointer.cast::<[u16; STEP]>().read_unaligned();
                    } else {
                        let mut room = [0; STEP];
                        std::ptr::copy_nonoverlapping(from.at(p, j).pointer, room.as_mut_ptr(), part);
                        *to = room;
                    }
                }
            }
            continue;
        }
        for leading in (0..lines).step_by(SIDE) {
            // Pairs of all lines, one after the other; then turned.
            let mut pairs = [[[0_u16; 2]; SIDE]; SIDE];
            let wanted = SIDE.min(count.saturating_sub(leading));
            for i in 0..part {
                // SAFETY: elements of the lines.
                unsafe {
                    let first = from.at(p + i, leading);
                    let pairs = &mut pairs[i / 2];
                    if wanted == SIDE && from.column == 1 {
                        let line = first.pointer.cast::<[u16; SIDE]>().read_unaligned();
                        pairs.iter_mut().zip(line).for_each(|(pair, x)| pair[i % 2] = x);
                    } else {
                        let line = pairs.iter_mut().take(wanted).enumerate();
                        line.for_each(|(j, pair)| pair[i % 2] = *first.at(0, j).pointer);
                    }
                }
            }
            let mut sources = [std::ptr::null(); TURNED];
            sources.iter_mut().zip(&pairs).for_each(|(source, pairs)| *source = pairs.as_ptr().cast::<u16>());
            // SAFETY: 16 lines of 16 words, and a tile.
            unsafe { turn_lines(&sources, [SIDE; 2], SIDE, to.add(leading / SIDE * TILE), SIDE) }
        }
    }
}
