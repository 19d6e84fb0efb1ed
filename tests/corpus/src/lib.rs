//! Programs as users write them, run eagerly and with their step compiled: are the results the same, and is each
//! call of the step captured as one graph?
//!
//! | module     | what it is                                                        |
//! |------------|-------------------------------------------------------------------|
//! | `programs` | the programs, a file for each theme                               |
//! | `step`     | how a program's step is called: as it is, or compiled             |
//! | `record`   | the numbers a program gives back, and how they are compared       |
//! | `runner`   | a program run both ways, and what was seen                        |
//! | `page`     | `docs/capture.md`                                                 |

pub mod page;
pub mod programs;
mod record;
mod runner;
mod step;

pub use programs::{Program, all};
pub use record::{Difference, Record};
pub use runner::{Report, SEED, Totals, run, run_from, totals};
pub use step::Step;
