//! The machine that plans are made for and run on.
//!
//! [Note: no bit depends on the machine's caches]
//! What is sized by a cache decides in which order independent elements are computed, what is computed again and what
//! is kept: never in which order numbers are added. Lengths that do decide it (blocks, chunks and parts of sums,
//! stretches of a product's inner dim) are constants, the same on every machine and for any number of threads, and
//! refer to this note.

use kiln_ir::math::c::Isa;

/// See the [module](self). Sizes are in bytes.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct Machine {
    /// A core's first-level cache for data.
    pub l1: usize,
    /// A core's second-level cache.
    pub l2: usize,
    /// What a core may count on of the cache that it shares with others.
    pub l3: usize,
    /// Cores that the process may use.
    pub cores: usize,
    /// The instructions to use.
    pub isa: Isa,
}

impl Machine {
    /// A core never counts on more of a shared cache than so many times its own: others want some of it, too.
    const MOST_SHARED: usize = 16;

    /// A machine of which nothing but its instructions is known.
    pub const fn with(isa: Isa) -> Machine {
        Machine { l1: 32 << 10, l2: 1 << 20, l3: 16 << 20, cores: 1, isa }
    }

    /// The same machine with caches of these sizes, by level, where they are known. They are cut to whole pages, and no
    /// level is smaller than the one below it.
    pub fn caches(self, sizes: [Option<usize>; 3]) -> Machine {
        const PAGE: usize = 4 << 10;
        let known = |size: Option<usize>| size.map(|size| size / PAGE * PAGE).filter(|size| *size > 0);
        let [l1, l2, l3] = sizes.map(known);
        let l1 = l1.unwrap_or(self.l1);
        let l2 = l2.unwrap_or(self.l2).max(l1);
        // Where there is a second level and no third, the second is the last.
        let l3 = l3.unwrap_or(if sizes[1].is_some() { l2 } else { self.l3 });
        Machine { l1, l2, l3: l3.clamp(l2, Machine::MOST_SHARED * l2), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_are_whole_pages_and_grow_with_their_level() {
        let unknown = Machine::with(Isa::Plain);
        assert_eq!(unknown.caches([None; 3]), unknown);
        let sizes = |machine: Machine| [machine.l1, machine.l2, machine.l3];
        // Zen 4, whose third level is for eight cores; Golden Cove; a core without a third level.
        let zen = unknown.caches([Some(32 << 10), Some(1 << 20), Some(32 << 20)]);
        assert_eq!(zen, unknown);
        let cove = unknown.caches([Some(48 << 10), Some(2 << 20), Some(105 << 20)]);
        assert_eq!(sizes(cove), [48 << 10, 2 << 20, 32 << 20]);
        let small = unknown.caches([Some(64 << 10), Some(512 << 10), None]);
        assert_eq!(sizes(small), [64 << 10, 512 << 10, 512 << 10]);
        // Nonsense that a virtual machine may tell.
        let odd = unknown.caches([Some(0), Some(1000), Some(5 << 20)]);
        assert_eq!(sizes(odd), [32 << 10, 1 << 20, 5 << 20]);
    }
}
