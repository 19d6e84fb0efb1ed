//! `kiln bench`: cases one after the other, as a table or as JSON lines.

use crate::cases::Case;
use crate::failure::Done;
use crate::measure::{self, Figures};
use crate::memory::Resident;
use crate::output::{self, Table, bytes, error, maybe, time};
use crate::overhead::{self, Overhead};
use crate::peer::{self, Peer};
use crate::progress::Progress;
use crate::{BenchCommand, BenchOptions, How, against, sweep};

/// Runs the cases; fails at the end if any compiled result was not eager's, or was not compiled.
pub fn run(options: &BenchOptions) -> Done {
    if let Some(BenchCommand::Ops(options)) = &options.command {
        return sweep::run(options);
    }
    // What can fail at once should not fail after minutes.
    options.how.device.find()?;
    let peers = options.peer.as_deref().map(peer::read).transpose()?;
    let named: Vec<Case> = options.cases.iter().flat_map(|cases| cases.0.iter().copied()).collect();
    let cases = if named.is_empty() { Case::ALL } else { &named };
    if let Some(other) = &options.against {
        return against::run(cases, &options.how, other, options.pairs);
    }
    let progress = Progress::bar(cases.len());
    progress.follow_compiler();
    let mut all = Vec::new();
    for &case in cases {
        let result = Measured::new(case, &options.how, &progress)?;
        if options.json {
            let line = result.json(&options.how)?;
            progress.hidden(|| output::print(&line))?;
        }
        all.push(result);
        progress.step();
    }
    drop(progress);
    if !options.json {
        output::print(&text(&all))?;
    }
    if let Some(peers) = peers {
        let table = side_by_side(&all, &peers);
        // With --json the table goes where it does not mix with the lines.
        if options.json { eprint!("{table}") } else { output::print(&format!("\n{table}"))? }
    }
    all.iter().try_for_each(|result| match result {
        Measured::Case(figures) => figures.check(),
        Measured::Overhead(_) => Ok(()),
    })
}

/// One case's result.
enum Measured {
    Case(Box<Figures>),
    Overhead(Overhead),
}

impl Measured {
    fn new(case: Case, how: &How, progress: &Progress) -> Result<Measured, crate::failure::Failure> {
        match case {
            Case::Overhead => Ok(Measured::Overhead(overhead::measure(how, progress)?)),
            _ => Ok(Measured::Case(Box::new(measure::measure(case, how, progress)?))),
        }
    }

    fn json(&self, how: &How) -> Result<String, std::io::Error> {
        Ok(match self {
            Measured::Case(figures) => serde_json::to_string(&figures.line(how, how.device.name()))?,
            Measured::Overhead(overhead) => serde_json::to_string(&overhead.line(how))?,
        })
    }
}

fn text(all: &[Measured]) -> String {
    let mut table = Table::new(&[
        "case",
        "eager",
        "compiled",
        "± IQR",
        "speed-up",
        "floor",
        "of floor",
        "cold call",
        "warm call",
        "kernels",
        "peak eager",
        "peak comp.",
        "rel. error",
    ]);
    let mut notes = Vec::new();
    let mut cases = 0;
    for result in all {
        match result {
            Measured::Case(figures) => {
                table.row(row(figures));
                notes.extend(figures.resident.map(|Resident { eager, compiled }| {
                    let [eager, compiled] = [eager, compiled].map(|number| bytes(number as f64));
                    format!(
                        "{}: resident memory above the model: {eager} eager, {compiled} compiled\n",
                        figures.case
                    )
                }));
                notes.extend(figures.notes.iter().map(|note| format!("{}: {note}\n", figures.case)));
                cases += 1;
            }
            Measured::Overhead(overhead) => notes.push(overhead.to_string()),
        }
    }
    let table = if cases > 0 { table.to_string() } else { String::new() };
    let gap = if cases > 0 && !notes.is_empty() { "\n" } else { "" };
    format!("{table}{gap}{}", notes.concat())
}

fn row(figures: &Figures) -> Vec<String> {
    let Figures { eager, compiled, floor, first, .. } = figures;
    vec![
        figures.case.to_string(),
        time(eager.median()),
        time(compiled.median()),
        time(compiled.iqr()),
        format!("{:.2} x", eager.ratio_to(compiled).median),
        maybe(floor.as_ref(), |floor| time(floor.median())),
        maybe(floor.as_ref(), |floor| format!("{:.0} %", floor.ratio_to(compiled).median * 100.0)),
        time(first.cold),
        time(first.warm),
        figures.kernels.to_string(),
        bytes(figures.peak_eager as f64),
        bytes(figures.peak_compiled as f64),
        error(figures.difference.relative),
    ]
}

fn side_by_side(all: &[Measured], peers: &[Peer]) -> String {
    let mut table = peer::table();
    let mut rows = 0;
    for figures in all.iter().filter_map(|result| match result {
        Measured::Case(figures) => Some(figures),
        Measured::Overhead(_) => None,
    }) {
        if let Some(peer) = peers.iter().find(|peer| peer.case == figures.case.to_string()) {
            table.row(peer.row(figures.eager.median(), figures.compiled.median(), figures.first.cold));
            rows += 1;
        }
    }
    match rows {
        0 => "no case of this run is in the peer's file\n".into(),
        _ => format!("against PyTorch (kiln / torch: below 1 Kiln is faster)\n\n{table}"),
    }
}
