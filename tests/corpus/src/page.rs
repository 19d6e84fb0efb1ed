//! `docs/capture.md`: what was seen of every program, as a table. Counts, never times, so the page is the same on
//! every machine.

use std::fmt::Write;

use crate::{Report, totals};

/// Where the page is, from the workspace's folder.
pub const PATH: &str = "docs/capture.md";

const INTRODUCTION: &str = "\
# Capture, counted

Generated from the programs in `tests/corpus` by `kiln corpus --markdown`. A test keeps this page up to date;
`BLESS=1 cargo test -p kiln-corpus` regenerates it.

Each program is written the way users write theirs: a model, data, and a step that is called again and again. It
runs twice from the same seed, once as is and once with its step compiled, and everything it computes (losses,
outputs, final parameters) is compared: integers must be equal, floats must agree within 1e-4.

- *right*: both runs give the same results.
- *calls*: how many times compiled steps were called.
- *graphs*: how many graphs were captured and compiled, over all calls.
- *breaks*: lines inside a step where a graph ends because the host needs a value (`item()`, `nonzero()`), or
  because the op there can't be captured.
- *recompiles*: how many times a call took a path no call had taken before: another branch, another dtype. Other
  sizes are not a recompilation: from the third size on they run with a dynamic-shape plan.
- *one graph*: every call of every step was one compiled graph (or ended with the same error as in eager mode).
";

/// The whole page.
pub fn markdown(reports: &[Report]) -> String {
    let sum = totals(reports);
    let mut page = String::from(INTRODUCTION);
    let percent = |part: usize| 100.0 * part as f64 / sum.programs.max(1) as f64;
    let _ = writeln!(
        page,
        "\n**{} programs: {} right ({:.0} %), {} captured in one graph per call ({:.0} %).** {} graphs, {} breaks, {} \
         recompiles.",
        sum.programs,
        sum.right,
        percent(sum.right),
        sum.whole,
        percent(sum.whole),
        sum.graphs,
        sum.breaks,
        sum.recompiles,
    );
    let mut theme = "";
    for report in reports {
        if report.theme != theme {
            theme = report.theme;
            let _ = write!(page, "\n## {}\n\n", title(theme));
            page.push_str("| program | right | calls | graphs | breaks | recompiles | one graph |\n");
            page.push_str("|---|---|---:|---:|---:|---:|---|\n");
        }
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {} | {} | {} | {} |",
            report.name,
            yes(report.is_right()),
            report.calls,
            report.graphs,
            report.breaks.len(),
            report.recompiles.len(),
            yes(report.is_whole()),
        );
    }
    page.push_str(&reasons(reports));
    page
}

/// Why programs are not one graph: what the reasons are, and how many programs have each.
fn reasons(reports: &[Report]) -> String {
    let mut lines: Vec<(String, Vec<&str>)> = Vec::new();
    for report in reports.iter().filter(|report| !report.is_whole()) {
        let breaks = report.breaks.iter().map(|b| b.reason.to_string());
        let fallbacks = report.fallbacks.iter().map(|f| f.reason.to_string());
        for reason in breaks.chain(fallbacks).chain(report.interpreted.iter().cloned()) {
            match lines.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, names)) if names.contains(&report.name) => {}
                Some((_, names)) => names.push(report.name),
                None => lines.push((reason, vec![report.name])),
            }
        }
    }
    lines.sort_by_key(|(_, names)| std::cmp::Reverse(names.len()));
    let mut text = String::from("\n## What ends a graph\n\n| reason | programs |\n|---|---|\n");
    for (reason, names) in lines {
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        let _ = writeln!(text, "| {} | {} |", reason.replace('|', "\\|"), names.join(", "));
    }
    text
}

fn title(theme: &str) -> String {
    let mut letters = theme.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

fn yes(on: bool) -> &'static str {
    if on { "yes" } else { "no" }
}
