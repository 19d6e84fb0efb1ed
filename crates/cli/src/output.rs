//! Text for people: numbers with units, aligned tables, and the one place that writes to standard output.

use std::io::Write;

/// Writes a line, or several, to standard output.
pub fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    if !text.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    out.flush()
}

/// A time, in the unit that suits it.
pub fn time(seconds: f64) -> String {
    match seconds {
        s if s.is_nan() => "–".into(),
        s if s < 1e-6 => format!("{:.1} ns", s * 1e9),
        s if s < 1e-3 => format!("{:.1} us", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// A number of bytes, in decimal units like bandwidths.
pub fn bytes(bytes: f64) -> String {
    match bytes {
        b if b < 1e3 => format!("{b} B"),
        b if b < 1e6 => format!("{:.1} kB", b / 1e3),
        b if b < 1e9 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.2} GB", b / 1e9),
    }
}

/// An error: a power of ten says enough, and none at all is worth seeing at a glance.
pub fn error(value: f64) -> String {
    if value == 0.0 { "0".into() } else { format!("{value:.1e}") }
}

/// A value that may not be there.
pub fn maybe<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "–".into(), show)
}

/// A number, its noun, and the noun's plural where it is due.
pub fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Rows of cells: the first column to the left, all others to the right, as the first row is the head.
#[derive(Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with this head.
    pub fn new(head: &[&str]) -> Table {
        Table { rows: vec![head.iter().map(|cell| (*cell).to_owned()).collect()] }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// For the terminal, or for a page in Markdown.
    pub fn text(&self, markdown: bool) -> String {
        if !markdown {
            return self.to_string();
        }
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let Some((head, rows)) = self.rows.split_first() else { return String::new() };
        let rule = format!("|---{}|\n", "|---:".repeat(head.len().saturating_sub(1)));
        [line(head), rule].into_iter().chain(rows.iter().map(|row| line(row))).collect()
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |cell: &str| cell.chars().count();
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                self.rows.iter().filter_map(|row| row.get(column)).map(|cell| width(cell)).max().unwrap_or(0)
            })
            .collect();
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[column] - width(cell));
                match column {
                    0 => line.extend([cell.as_str(), &pad]),
                    _ => line.extend(["  ", &pad, cell]),
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        let times = [3e-9, 812.34e-6, 7.921e-3, 28.94].map(time);
        assert_eq!(times, ["3.0 ns", "812.3 us", "7.92 ms", "28.94 s"]);
        assert_eq!([28.0, 2048.0, 293.6e6, 1.5e9].map(bytes), ["28 B", "2.0 kB", "293.6 MB", "1.50 GB"]);
        assert_eq!((count(1, "kernel"), count(2, "graph")), ("1 kernel".into(), "2 graphs".into()));
        assert_eq!(maybe(None::<f64>, time), "–");
        assert_eq!([0.0, 1.23e-7].map(error), ["0", "1.2e-7"]);
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["case", "time"]);
        table.row(vec!["a".into(), "12.0 ms".into()]);
        table.row(vec!["longer".into(), "–".into()]);
        assert_eq!(table.to_string(), "case       time\na       12.0 ms\nlonger        –\n");
    }
}
