//! The committed list of differences from PyTorch (`docs/torch-differences.md`): a table whose rows name an op,
//! dtypes, a kind of samples, a stage and a mode, and say why.

use std::cell::Cell;
use std::path::Path;

/// A row of the list.
pub struct Entry {
    /// The row's text, to be shown.
    pub text: String,
    fields: Vec<Vec<String>>,
    /// How many samples it explains in this run.
    pub used: Cell<usize>,
}

/// Reads the list.
pub fn read(path: &Path) -> Vec<Entry> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    rows.map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let fields = cells
            .iter()
            .take(5)
            .map(|cell| cell.split(',').map(|word| word.trim().trim_matches('`').to_string()).collect());
        Entry { text: line.into(), fields: fields.collect(), used: Cell::new(0) }
    })
    .collect()
}

impl Entry {
    /// Whether the row speaks of a sample: its op, dtype, kind, stage and mode.
    pub fn covers(&self, sample: [&str; 5]) -> bool {
        self.fields.len() == sample.len()
            && self
                .fields
                .iter()
                .zip(sample)
                .all(|(field, given)| field.iter().any(|word| word == "any" || word == given))
    }
}
