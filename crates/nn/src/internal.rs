//! For the crates that build on this one: files as Kiln reads and writes them, and whether a state fits.

use kiln_ir::Loc;
use kiln_tensor::Result;

pub use crate::files::{fail as file_error, read_text, write_text};
use crate::state::{self, LoadReport, StateDict};

/// Counters in files are at most this.
pub const MOST_COUNTED: u64 = state::MOST_COUNTED;

/// Whether values fit the tensors of the same names.
pub fn check_state(
    own: &StateDict,
    values: &StateDict,
    strict: bool,
    what: &str,
    loc: Loc,
) -> Result<LoadReport> {
    state::check(own, values, strict, what, loc)
}
