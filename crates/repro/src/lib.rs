//! Programs that fail, without the program: what was recorded of one and what it began with is a [`Case`], which is
//! text, runs again ([`play`]), is judged against eager's own error ([`Judge`]), and is made smaller while it still
//! fails ([`minify`]).
//!
//! Nothing here knows how a case is compiled: that is a function that the caller gives.

mod case;
mod file;
mod judge;
mod minify;
mod play;
mod program;
mod record;
mod trail;
mod variants;

pub use case::{Case, Input, Value};
pub use judge::{Judge, Verdict};
pub use minify::{Progress, minify};
pub use play::{Arithmetic, Live, Outcome, Seen, play};
pub use program::rust_program;
pub use record::{Recorded, record};
pub use variants::{other_calls, other_sizes};
