//! [`History`]: numbers of a training loop, row by row, and their CSV file.

use std::fmt::Write;
use std::path::Path;

use kiln_nn::internal::{file_error, read_text, write_text};
use kiln_tensor::Result;

/// Named columns of numbers, of which a row need not have all: losses at each step, accuracies at each epoch.
///
/// ```
/// use kiln_training::History;
/// let mut history = History::new(["step", "loss", "validation"]);
/// history.push([Some(1.0), Some(2.5), None]);
/// history.push([Some(2.0), Some(2.25), Some(2.3)]);
/// assert_eq!(history.to_csv(), "step,loss,validation\n1,2.5,\n2,2.25,2.3\n");
/// assert_eq!(history.curve("validation"), [(2.0, 2.3)]);
/// assert_eq!(history.last("loss"), Some(2.25));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct History {
    names: Vec<String>,
    rows: Vec<Vec<Option<f64>>>,
}

impl History {
    /// No rows yet, of columns with these names; the first one is what curves are drawn over.
    pub fn new<N: Into<String>>(names: impl IntoIterator<Item = N>) -> History {
        History { names: names.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row: a number, or none, for each column. What is missing at its end is none, what is too much goes.
    pub fn push(&mut self, row: impl IntoIterator<Item = Option<f64>>) {
        let mut row: Vec<Option<f64>> = row.into_iter().collect();
        row.resize(self.names.len(), None);
        self.rows.push(row);
    }

    /// The names of the columns.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The points of a column over the first one, where a row has both; nothing if there is no such column.
    pub fn curve(&self, name: &str) -> Vec<(f64, f64)> {
        let Some(at) = self.place(name) else { return Vec::new() };
        self.rows.iter().filter_map(|row| Some((row[0]?, row[at]?))).collect()
    }

    /// The last number of a column.
    pub fn last(&self, name: &str) -> Option<f64> {
        let at = self.place(name)?;
        self.rows.iter().rev().find_map(|row| row[at])
    }

    /// Keeps the rows whose first number is at most this one: those that a checkpoint knows.
    pub fn truncate(&mut self, most: f64) {
        self.rows.retain(|row| row.first().is_some_and(|first| first.is_some_and(|first| first <= most)));
    }

    fn place(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|other| other == name)
    }

    /// As comma-separated values: names first, numbers that read back bit-exactly.
    pub fn to_csv(&self) -> String {
        let mut text = self.names.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(",");
        text.push('\n');
        for row in &self.rows {
            for (column, number) in row.iter().enumerate() {
                let comma = if column > 0 { "," } else { "" };
                // Writing to a string never fails.
                let _ = match number {
                    Some(number) => write!(text, "{comma}{number}"),
                    None => write!(text, "{comma}"),
                };
            }
            text.push('\n');
        }
        text
    }

    /// Writes the CSV file, which appears when it is complete.
    pub fn save_csv(&self, path: impl AsRef<Path>) -> Result<()> {
        write_text(path.as_ref(), &self.to_csv())
    }

    /// Reads such a file.
    pub fn load_csv(path: impl AsRef<Path>) -> Result<History> {
        let path = path.as_ref();
        History::from_csv(&read_text(path)?)
            .map_err(|(line, why)| file_error(path, format_args!("line {line}: {why}")))
    }

    fn from_csv(text: &str) -> Result<History, (usize, String)> {
        let mut lines = (1..).zip(text.lines());
        let (_, head) = lines.next().ok_or((1, "the file is empty".to_string()))?;
        let mut history = History::new(cells(head));
        for (line, text) in lines {
            let row: Vec<Option<f64>> = text
                .split(',')
                .map(|cell| match cell {
                    "" => Ok(None),
                    _ => cell.parse().map(Some).map_err(|_| (line, format!("{cell:?} is not a number"))),
                })
                .collect::<Result<_, _>>()?;
            if row.len() != history.names.len() {
                let (expected, got) = (history.names.len(), row.len());
                return Err((line, format!("expected {expected} columns as in the first line, got {got}")));
            }
            history.rows.push(row);
        }
        Ok(history)
    }
}

/// A name as a cell, in quotes if it needs them.
fn quoted(name: &str) -> String {
    let name = name.replace(['\n', '\r'], " ");
    if name.contains([',', '"']) { format!("\"{}\"", name.replace('"', "\"\"")) } else { name }
}

/// The cells of a line, without their quotes.
fn cells(line: &str) -> Vec<String> {
    let mut cells = vec![String::new()];
    let mut inside = false;
    let mut characters = line.chars().peekable();
    while let Some(c) = characters.next() {
        let last = cells.len() - 1;
        match c {
            '"' if inside && characters.peek() == Some(&'"') => {
                characters.next();
                cells[last].push('"');
            }
            '"' => inside = !inside,
            ',' if !inside => cells.push(String::new()),
            c => cells[last].push(c),
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_read_back_to_the_bit() {
        let mut history = History::new(["step", "a, \"b\"", "lr"]);
        history.push([Some(1.0), Some(0.1 + 0.2), None]);
        history.push([Some(2.0), None, Some(3e-300)]);
        history.push([Some(3.0), Some(f64::INFINITY)]);
        let text = history.to_csv();
        assert_eq!(History::from_csv(&text), Ok(history.clone()), "{text}");
        assert_eq!(history.curve("a, \"b\""), [(1.0, 0.1 + 0.2), (3.0, f64::INFINITY)]);
        history.truncate(2.0);
        assert_eq!((history.len(), history.last("lr"), history.curve("no such")), (2, Some(3e-300), vec![]));
    }

    #[test]
    fn what_is_wrong_in_a_file_is_told_with_its_line() {
        let wrong = |text: &str| History::from_csv(text).expect_err("wrong");
        assert_eq!(wrong(""), (1, "the file is empty".into()));
        assert_eq!(wrong("a,b\n1,2\n1,x\n"), (3, "\"x\" is not a number".into()));
        assert_eq!(wrong("a,b\n1\n"), (2, "expected 2 columns as in the first line, got 1".into()));
    }
}
