//! The proof: every planted fault is found in the big program, its stage is named, and what is left of the program is a
//! handful of ops.

#![allow(clippy::print_stdout, reason = "the table")]

use std::time::{Duration, Instant};

use kiln_dynamo::{Found, investigate};
use kiln_ir::{Fault, plant};
use kiln_repro::{Case, record};
use kiln_tensor::manual_seed;

use crate::text::Text;
use crate::world::World;
use crate::turn;

/// The big program as it is recorded eagerly; for templates the language model alone.
fn case_of(fault: Fault) -> Case {
    manual_seed(11);
    if fault.stage() == "general" {
        let text = Text::new(7).unwrap();
        return record(|| text.train()).unwrap().case.unwrap();
    }
    let world = World::new().unwrap();
    let recorded = record(|| world.step(0.01)).unwrap();
    recorded.case.unwrap()
}

/// Whether the stage that was found is the one that the fault is in.
fn is_right(fault: Fault, found: &Found) -> bool {
    let Some(stage) = found.stage else { return false };
    let named: &[&str] = match fault.stage() {
        "capture" => &["capture", "replay"],
        "prims" => &["decompose", "simplify", "accumulate"],
        other => &[other],
    };
    let rule = match (fault.rule(), &found.detail) {
        (Some("decompose"), _) => stage.name() == "decompose",
        (Some("accumulate"), _) => stage.name() == "accumulate",
        (Some(rule), Some(detail)) => detail.contains(rule),
        (Some(_), None) => false,
        (None, _) => true,
    };
    named.contains(&stage.name()) && rule
}

/// One line of the table, and whether all is as it should be.
fn proof(fault: Fault) -> (String, bool) {
    let case = case_of(fault);
    let planted = plant(fault);
    let begin = Instant::now();
    let found = investigate(&case, Duration::from_secs(25), &mut |_| {});
    let time = begin.elapsed();
    drop(planted);
    let (told, ok) = match &found {
        Err(error) => (format!("error: {error}"), false),
        Ok(None) => ("not found".to_string(), false),
        Ok(Some((small, found))) => {
            let ok = is_right(fault, found) && small.len() <= 5 && time < Duration::from_secs(30);
            if !ok {
                println!("{}", small.to_text().unwrap().0.chars().take(3000).collect::<String>());
            }
            let text = found.to_string().replace('\n', " | ");
            (format!("{:>3} ops  {}", small.len(), text.chars().take(200).collect::<String>()), ok)
        }
    };
    let mark = if ok { " " } else { "*" };
    (format!("{mark} {:<14} {:<30} {:>5.1} s  {told}", fault.stage(), fault.name(), time.as_secs_f64()), ok)
}

#[test]
#[ignore = "takes minutes: the table of all faults"]
#[allow(clippy::print_stdout, reason = "the table")]
fn every_fault_is_found() {
    let _turn = turn();
    let wanted = std::env::var("KILN_FAULTS").unwrap_or_default();
    let faults = Fault::ALL.iter().filter(|fault| fault.name().contains(&wanted) || fault.stage() == wanted);
    let (mut failed, mut all) = (0, 0);
    for &fault in faults {
        let (line, ok) = proof(fault);
        println!("{line}");
        failed += usize::from(!ok);
        all += 1;
    }
    assert_eq!(failed, 0, "of {all}");
}
