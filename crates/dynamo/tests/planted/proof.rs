//! The proof: every planted fault is found in the big program, its stage is named, and what is left of the program is a
//! handful of ops.

#![allow(clippy::print_stdout, reason = "the table")]

use std::process::Command;
use std::time::{Duration, Instant};

use kiln_dynamo::{Compile, Failure, Found, investigate, reproduce};
use kiln_ir::{Error, Fault, Shows, plant};
use kiln_repro::{Case, record};
use kiln_tensor::{Tensor, TensorList, foreach, manual_seed};

use crate::random;
use crate::text::Text;
use crate::turn;
use crate::world::World;

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
        "prims" => &["decompose", "simplify", "accumulate", "join"],
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

/// Some of them, in every run of the tests.
#[test]
fn some_faults_are_found() {
    let _turn = turn();
    let quick = |fault: &&Fault| !matches!(fault.shows(), Shows::Hang);
    for &fault in Fault::ALL.iter().filter(quick).step_by(8) {
        let (line, ok) = proof(fault);
        assert!(ok, "{line}");
    }
}

#[test]
#[ignore = "takes minutes: the table of all faults"]
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

/// Random graphs of sixty ops, as other tests draw them.
#[test]
#[ignore = "a table of times"]
fn random_programs_are_minified() {
    let _turn = turn();
    for fault in
        [Fault::IntegersSubtractedBackwards, Fault::SortedBackwards, Fault::SliceStepIgnored, Fault::SignLost]
    {
        let cases = (0..400).filter_map(|seed| Some((seed, random::case_of(seed, 60)?)));
        let fails = |case: &Case| {
            let _planted = plant(fault);
            matches!(reproduce(case), Ok(Some(Failure::Wrong(_))))
        };
        let Some((seed, case)) = cases.into_iter().find(|(_, case)| fails(case)) else { continue };
        let _planted = plant(fault);
        let begin = Instant::now();
        let (small, found) = investigate(&case, Duration::from_secs(25), &mut |_| {}).unwrap().unwrap();
        let time = begin.elapsed().as_secs_f64();
        println!(
            "{fault}, seed {seed}: {} ops, now {}, {time:.1} s: stage {:?}",
            case.len(),
            small.len(),
            found.stage
        );
        assert!(small.len() <= 5);
    }
}

/// A program that is run with a fault planted from outside.
#[test]
#[ignore = "a process of the next test"]
fn victim() {
    let region = Compile::new().region();
    let x = Tensor::from(vec![3.0f32, 1.0, 2.0]);
    let list = TensorList::new(vec![x.clone(), x.neg().unwrap()]);
    let run = || -> Result<Vec<f32>, Error> {
        let scaled = region.run(|| foreach::mul(&list, 2.0))?;
        let order = region.run(|| x.argsort(0, false))?;
        scaled.get(0)?.add(&order)?.to_vec::<f32>()
    };
    match run() {
        Ok(found) => println!("found {found:?}"),
        Err(error) => println!("error {error}"),
    }
}

/// What `KILN_REPRO` does in a program that knows nothing of it.
#[test]
fn failures_are_saved_by_themselves() {
    let folder = std::env::temp_dir().join(format!("kiln-planted-{}", std::process::id()));
    let run = |fault: &str, asked: &str| -> String {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["proof::victim", "--exact", "--ignored", "--nocapture"]);
        command.env("KILN_PLANT", fault).env("KILN_REPRO", asked).env("KILN_REPRO_DIR", &folder);
        let output = command.output().unwrap();
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    };
    // A kernel that would end the process is not run in it.
    let text = run("null-store", "crash");
    assert!(text.contains("found [7.0, 4.0, 4.0]"), "{text}");
    assert!(text.contains("crash: killed by SIGSEGV\nkiln: stage c"), "{text}");
    // A wrong result is an error.
    let text = run("sorted-backwards", "accuracy");
    assert!(text.contains("error wrong result: ") && text.contains("stage call: library (argsort"), "{text}");
    let mut files: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|file| file.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    files.sort();
    assert_eq!(files, ["crash_c_1.kir", "wrong_result_call_1.kir"]);
    // The files show it again where the fault is, and nothing where it is not.
    let case = Case::read(&folder.join("wrong_result_call_1.kir")).unwrap();
    assert!(case.len() == 1 && reproduce(&case).unwrap().is_none());
    let _turn = turn();
    let _planted = plant(Fault::SortedBackwards);
    assert!(matches!(reproduce(&case).unwrap(), Some(Failure::Wrong(_))));
    std::fs::remove_dir_all(&folder).unwrap();
}
