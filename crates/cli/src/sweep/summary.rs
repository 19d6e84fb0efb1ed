//! What a sweep shows: geometric means, and the slowest calls by each ratio.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;

use super::run::Line;
use crate::output::{Table, count, maybe, time};

/// PyTorch's time of a call, or why it has none.
#[derive(Deserialize)]
pub struct Peer {
    call: String,
    eager_us: Option<f64>,
    error: Option<String>,
}

/// A ratio of two times: below 1 is good.
struct Ratio {
    name: &'static str,
    of: fn(&Line, Option<f64>) -> Option<f64>,
}

const RATIOS: [Ratio; 3] = [
    Ratio { name: "eager / torch eager", of: |line, torch| Some(line.eager_us / torch?) },
    Ratio { name: "compiled / torch eager", of: |line, torch| Some(line.compiled_us / torch?) },
    Ratio { name: "compiled / kiln eager", of: |line, _| Some(line.compiled_us / line.eager_us) },
];

/// The tables.
pub fn text(lines: &[Line], peers: &[Peer], slowest: usize, markdown: bool) -> String {
    let times: HashMap<&str, f64> =
        peers.iter().filter_map(|peer| Some((peer.call.as_str(), peer.eager_us?))).collect();
    let torch = |line: &Line| times.get(line.call.as_str()).copied();
    let mut text = format!(
        "{}, {} of them timed in PyTorch\n",
        count(lines.len(), "call"),
        lines.iter().filter_map(torch).count()
    );
    text += &refusals(peers);
    text += &format!("\n{}", means(lines, &torch).text(markdown));
    for ratio in &RATIOS {
        let mut by_ratio: Vec<(f64, &Line)> =
            lines.iter().filter_map(|line| Some(((ratio.of)(line, torch(line))?, line))).collect();
        if by_ratio.is_empty() {
            continue;
        }
        by_ratio.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut table = Table::new(&["call", "eager", "compiled", "torch", ratio.name]);
        for (value, line) in by_ratio.iter().take(slowest) {
            let us = |us: f64| time(us * 1e-6);
            let cells =
                [us(line.eager_us), us(line.compiled_us), maybe(torch(line), us), format!("{value:.2}")];
            table.row([line.call.clone()].into_iter().chain(cells).collect());
        }
        text += &format!("\n{}", table.text(markdown));
    }
    text
}

/// Geometric means, of all calls and of groups.
fn means(lines: &[Line], torch: &dyn Fn(&Line) -> Option<f64>) -> Table {
    let mut groups: BTreeMap<String, Vec<&Line>> = BTreeMap::new();
    for line in lines {
        let pass = if line.backward { "with gradients" } else { "forward" };
        for group in ["all", &line.size, &line.dtype, pass] {
            groups.entry(group.to_owned()).or_default().push(line);
        }
    }
    let mut head = vec!["geometric mean of", "calls"];
    head.extend(RATIOS.iter().map(|ratio| ratio.name));
    let mut table = Table::new(&head);
    for (group, lines) in &groups {
        let mut cells = vec![group.clone(), lines.len().to_string()];
        for ratio in &RATIOS {
            let logarithms: Vec<f64> =
                lines.iter().filter_map(|line| (ratio.of)(line, torch(line))).map(f64::ln).collect();
            let mean = logarithms.iter().sum::<f64>() / logarithms.len() as f64;
            cells.push(maybe((!logarithms.is_empty()).then(|| mean.exp()), |mean| format!("{mean:.2}")));
        }
        table.row(cells);
    }
    table
}

/// What PyTorch could not do, by reason.
fn refusals(peers: &[Peer]) -> String {
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for reason in peers.iter().filter_map(|peer| peer.error.as_deref()) {
        *reasons.entry(reason).or_default() += 1;
    }
    reasons.iter().map(|(reason, calls)| format!("not in PyTorch ({calls}): {reason}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_come_first_and_means_are_geometric() {
        let line = |call: &str, eager_us: f64| Line {
            call: call.into(),
            op: "add".into(),
            size: "small".into(),
            dtype: "f32".into(),
            backward: false,
            eager_us,
            compiled_us: 2.0,
        };
        let peer = |call: &str| Peer { call: call.into(), eager_us: Some(1.0), error: None };
        let text = text(&[line("quick", 1.0), line("slow", 4.0)], &[peer("quick"), peer("slow")], 1, true);
        assert!(text.contains("| all | 2 | 2.00 | 2.00 | 1.00 |"), "{text}");
        assert!(text.contains("| slow | 4.0 us | 2.0 us | 1.0 us | 4.00 |"), "{text}");
        assert!(!text.contains("| quick | 1.0 us | 2.0 us | 1.0 us | 1.00 |"), "{text}");
        assert!(text.contains("| quick | 1.0 us | 2.0 us | 1.0 us | 2.00 |"), "{text}");
    }
}
