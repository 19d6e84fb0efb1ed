//! PyTorch's results for the same cases, and the table that sets Kiln beside them.

use std::path::Path;

use serde::Deserialize;

use crate::failure::Failure;
use crate::output::{Table, maybe, time};

/// One line of the PyTorch script.
#[derive(Debug, Deserialize)]
pub struct Peer {
    pub case: String,
    eager_us: Option<f64>,
    compiled_us: Option<f64>,
    first_call_s: Option<f64>,
    fused_us: Option<f64>,
}

/// Reads JSON lines; other lines (warnings of the script's libraries) are passed over.
pub fn read(path: &Path) -> Result<Vec<Peer>, Failure> {
    let name = path.display().to_string();
    let failed = |line, reason: String| Failure::Peer { path: name.clone(), line, reason };
    let text = std::fs::read_to_string(path).map_err(|error| failed(0, error.to_string()))?;
    let lines = (1..).zip(text.lines()).filter(|(_, line)| line.trim_start().starts_with('{'));
    let peers: Vec<Peer> = lines
        .map(|(number, line)| serde_json::from_str(line).map_err(|error| failed(number, error.to_string())))
        .collect::<Result<_, _>>()?;
    if peers.is_empty() {
        return Err(failed(0, "no JSON lines in the file".into()));
    }
    Ok(peers)
}

/// The side-by-side table's head.
pub fn table() -> Table {
    Table::new(&[
        "case",
        "kiln",
        "torch",
        "kiln/torch",
        "torch fused",
        "kiln/fused",
        "kiln eager",
        "torch eager",
        "kiln/torch",
        "kiln first",
        "torch first",
        "kiln/torch",
    ])
}

impl Peer {
    /// Kiln's seconds beside PyTorch's.
    pub fn row(&self, eager: f64, compiled: f64, first_call: f64) -> Vec<String> {
        let seconds = |us: Option<f64>| us.map(|us| us * 1e-6);
        let pairs = [
            (Some(compiled), seconds(self.compiled_us)),
            (None, seconds(self.fused_us)),
            (Some(eager), seconds(self.eager_us)),
            (Some(first_call), self.first_call_s),
        ];
        let mut cells = vec![self.case.clone()];
        for (kiln, torch) in pairs {
            cells.extend(kiln.map(time));
            cells.push(maybe(torch, time));
            cells.push(maybe(torch, |torch| verdict(kiln.unwrap_or(compiled) / torch)));
        }
        cells
    }
}

/// A ratio, and whose it is: a loss is called one.
fn verdict(ratio: f64) -> String {
    let word = if ratio <= 1.0 { "win " } else { "LOSS" };
    format!("{ratio:.3} {word}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_head_s_columns_and_call_losses_losses() {
        let line = r#"{"case": "adam_10x1024", "eager_us": 36500, "compiled_us": 8000.0, "first_call_s": 28.9, "fused_us": 7500}"#;
        let peer: Peer = serde_json::from_str(line).unwrap();
        let row = peer.row(0.040, 0.0076, 0.15);
        assert_eq!(row.len(), 12);
        assert_eq!([&row[3], &row[5], &row[8]], ["0.950 win ", "1.013 LOSS", "1.096 LOSS"]);
        let missing: Peer =
            serde_json::from_str(r#"{"case": "x", "eager_us": 1.0, "compiled_us": null}"#).unwrap();
        assert_eq!(missing.row(1e-6, 1e-6, 0.1)[2..6], ["–", "–", "–", "–"]);
    }
}
