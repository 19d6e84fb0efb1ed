//! The random stream: a seed and a position in Philox's counter space. Element i of a tensor uses the
//! counters from its position on, whatever the number of threads, so eager and compiled programs agree.

use parking_lot::Mutex;

use kiln_ir::DType;

struct Generator {
    seed: u64,
    offset: u64,
}

static GENERATOR: Mutex<Generator> = Mutex::new(Generator { seed: 0, offset: 0 });

/// Starts the stream anew from a seed.
pub fn manual_seed(seed: u64) {
    *GENERATOR.lock() = Generator { seed, offset: 0 };
}

/// Where the stream is: two programs with the same state draw the same numbers from here on.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct RngState {
    /// The seed.
    pub seed: u64,
    /// The next counter.
    pub offset: u64,
}

/// Where the stream is now.
pub fn get_rng_state() -> RngState {
    let generator = GENERATOR.lock();
    RngState { seed: generator.seed, offset: generator.offset }
}

/// Goes to a place in a stream.
pub fn set_rng_state(state: RngState) {
    *GENERATOR.lock() = Generator { seed: state.seed, offset: state.offset };
}

/// Takes the counters for `numel` elements: the seed and the first counter.
pub(crate) fn advance(numel: usize, dtype: DType) -> (u64, u64) {
    let per_counter = if dtype == DType::F64 { 2 } else { 4 };
    let mut generator = GENERATOR.lock();
    let offset = generator.offset;
    generator.offset = offset.wrapping_add(numel.div_ceil(per_counter) as u64);
    (generator.seed, offset)
}
