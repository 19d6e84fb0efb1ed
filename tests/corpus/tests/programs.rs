//! Every program of the corpus gives what eager gives, and the page that counts what is captured is true.

use std::path::PathBuf;

use kiln::Backend;
use kiln_corpus::{Report, all, page, run, totals};

/// The programs that a test run is about: all, or those whose name contains `KILN_CORPUS`.
fn reports(backend: Backend) -> Vec<Report> {
    let wanted = std::env::var("KILN_CORPUS").unwrap_or_default();
    all()
        .iter()
        .filter(|program| program.name.contains(&wanted))
        .map(|program| run(program, backend))
        .collect()
}

/// What is wrong, a line for each program.
fn wrong(reports: &[Report]) -> Vec<String> {
    reports.iter().filter_map(|r| Some(format!("{}: {}", r.name, r.wrong.as_ref()?))).collect()
}

#[test]
fn all_are_right_and_most_are_one_graph() {
    let reports = reports(Backend::Inductor);
    assert_eq!(wrong(&reports), Vec::<String>::new());
    let compiler = kiln::runtime::Compiler::find().is_ok();
    if !compiler || std::env::var_os("KILN_CORPUS").is_some() {
        return;
    }
    let sum = totals(&reports);
    assert!(sum.programs >= 64 && sum.whole * 100 >= sum.programs * 80, "{sum:?}");
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(page::PATH);
    let page = page::markdown(&reports);
    if std::env::var_os("BLESS").is_some_and(|bless| bless == "1") {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(written, page, "{} is out of date: run with BLESS=1", page::PATH);
}

#[test]
fn all_are_right_after_ahead_of_time_autograd() {
    assert_eq!(wrong(&reports(Backend::AotEager)), Vec::<String>::new());
}

#[test]
fn all_are_right_as_captured() {
    assert_eq!(wrong(&reports(Backend::Eager)), Vec::<String>::new());
}
