//! `kiln corpus`: programs as users write them, run eagerly and compiled.

use kiln::Backend;
use kiln_corpus::{Report, SEED, all, page, run_from, totals};

use crate::CorpusOptions;
use crate::failure::{Done, Failure};
use crate::output::{self, Table, count};
use crate::progress::Progress;

/// Prints the table, what ended graphs, and the totals; a wrong result is the failure.
pub fn run(options: &CorpusOptions) -> Done {
    let name = options.name.as_deref().unwrap_or_default();
    let wanted = all().into_iter().filter(|p| p.name.contains(name) || p.theme.contains(name));
    let programs: Vec<_> = wanted.collect();
    if programs.is_empty() {
        return Err(Failure::NoProgram { name: name.into() });
    }
    let progress = Progress::bar(programs.len());
    let mut reports = Vec::new();
    for program in &programs {
        progress.says(program.name);
        reports.push(run_from(program, Backend::Inductor, options.seed.unwrap_or(SEED)));
        progress.step();
    }
    drop(progress);
    output::print(&if options.markdown { page::markdown(&reports) } else { text(&reports) })?;
    let wrong = |r: &Report| r.wrong.as_ref().map(|what| format!("{}: {what}", r.name));
    let programs: Vec<String> = reports.iter().filter_map(wrong).collect();
    if programs.is_empty() { Ok(()) } else { Err(Failure::Wrong { programs }) }
}

fn text(reports: &[Report]) -> String {
    let yes = |on: bool| if on { "yes" } else { "no" }.to_string();
    let mut table = Table::new(&["program", "right", "calls", "graphs", "breaks", "recompiles", "one graph"]);
    for report in reports {
        let counts = [report.calls, report.graphs, report.breaks.len(), report.recompiles.len()];
        let mut row = vec![report.name.to_string(), yes(report.is_right())];
        row.extend(counts.map(|n| n.to_string()));
        row.push(yes(report.is_whole()));
        table.row(row);
    }
    let sum = totals(reports);
    format!(
        "{table}\n{}{}: {} right, {} in one graph a call; {}, {}, {}\n",
        reasons(reports),
        count(sum.programs, "program"),
        sum.right,
        sum.whole,
        count(sum.graphs, "graph"),
        count(sum.breaks, "break"),
        count(sum.recompiles, "recompile"),
    )
}

/// Where graphs end, and why; where calls go another way.
fn reasons(reports: &[Report]) -> String {
    let mut text = String::new();
    for report in reports {
        let breaks = report.breaks.iter().map(|at| format!("break at {}: {}", at.loc, at.reason));
        let eager = report.fallbacks.iter().map(|at| format!("eager from {}: {}", at.loc, at.reason));
        let interpreted = report.interpreted.iter().map(|reason| format!("op by op: {reason}"));
        for line in breaks.chain(eager).chain(interpreted).chain(report.recompiles.iter().cloned()) {
            text += &format!("{}: {line}\n", report.name);
        }
    }
    if text.is_empty() { text } else { text + "\n" }
}
