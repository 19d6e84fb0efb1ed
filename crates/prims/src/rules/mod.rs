//! The rewrite rules, one table per theme. See [`Rule`] for the law they all obey.

mod arithmetic;
mod choice;
mod constants;
mod conversion;
mod lists;
mod views;

use crate::Rule;

pub use arithmetic::ARITHMETIC;
pub use choice::CHOICE;
pub use constants::CONSTANTS;
pub use conversion::CONVERSION;
pub use lists::LISTS;
pub use views::VIEWS;

/// Every rule that is on by default.
pub const ALL: &[&[Rule]] = &[CONSTANTS, ARITHMETIC, CHOICE, CONVERSION, VIEWS, LISTS];

/// A rule that did not apply.
const NO: kiln_ir::Result<Option<kiln_ir::Value>> = Ok(None);
