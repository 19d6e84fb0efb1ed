//! `KILN_LOGS=graph,joint,prims,loops,code,fusion,recompiles,dynamic,timing`: prints any stage to standard error.

use std::io::Write;
use std::sync::OnceLock;

/// What can be printed.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) enum Log {
    Graph,
    Joint,
    Prims,
    Loops,
    Code,
    Fusion,
    Recompiles,
    Dynamic,
    Timing,
}

const NAMES: [(&str, Log); 9] = [
    ("graph", Log::Graph),
    ("joint", Log::Joint),
    ("prims", Log::Prims),
    ("loops", Log::Loops),
    ("code", Log::Code),
    ("fusion", Log::Fusion),
    ("recompiles", Log::Recompiles),
    ("dynamic", Log::Dynamic),
    ("timing", Log::Timing),
];

fn wanted() -> &'static [Log] {
    static WANTED: OnceLock<Vec<Log>> = OnceLock::new();
    WANTED.get_or_init(|| {
        let text = std::env::var("KILN_LOGS").unwrap_or_default();
        let mut logs = Vec::new();
        for word in text.split(',').map(str::trim).filter(|w| !w.is_empty()) {
            match NAMES.iter().find(|(name, _)| *name == word) {
                Some((_, log)) => logs.push(*log),
                None if word == "all" => logs.extend(NAMES.iter().map(|(_, log)| *log)),
                None => {
                    let names: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
                    kiln_runtime::warn::once("KILN_LOGS", || {
                        format!("KILN_LOGS: unknown name {word:?}, expected one of all, {}", names.join(", "))
                    });
                }
            }
        }
        logs
    })
}

/// Whether a log is asked for.
pub(crate) fn enabled(log: Log) -> bool {
    wanted().contains(&log)
}

/// Prints a text under a heading, if the log is asked for.
pub(crate) fn write(log: Log, heading: &str, text: &dyn Fn() -> String) {
    if enabled(log) {
        let mut out = std::io::stderr().lock();
        // A log that can't be written is not worth failing for.
        let _ = writeln!(out, "---- {heading}\n{}", text().trim_end());
    }
}
