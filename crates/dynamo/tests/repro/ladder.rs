//! The stages of the compiler, each against eager.

use std::time::Duration;

use kiln_dynamo::{bisect, investigate, reproduce};
use kiln_repro::Case;
use kiln_tensor::DType;

use crate::random::case_of;

#[test]
fn random_programs_are_right_at_every_stage() {
    for seed in 0..16 {
        let Some(case) = case_of(seed, 30) else { continue };
        if bisect(&case).unwrap().is_some() {
            let limit = Duration::from_secs(20);
            let (small, found) = investigate(&case, limit, &mut |_| {}).unwrap().unwrap();
            panic!("seed {seed}: {found}\n{}", small.to_text().unwrap().0);
        }
    }
}

/// What failed once: each file is a case that some test, or somebody, found and minified.
#[test]
fn what_failed_once_is_right() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/repro/golden");
    let mut count = 0;
    for file in std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()) {
        if file.extension().is_some_and(|extension| extension == "kir") {
            let case = Case::read(&file).unwrap();
            assert!(!case.notes.is_empty(), "{}: what went wrong is not said", file.display());
            assert_eq!(reproduce(&case).unwrap(), None, "{}", file.display());
            count += 1;
        }
    }
    assert!(count > 0);
}

#[test]
fn a_recording_with_gradients_is_right() {
    let text = "\
x: f32[5, 7] leaf
w: f32[7, 3] leaf
h: f32[5, 3]
n: float
a = mm(x, w)
b = tanh(a)
c = mul(b, n)
s = sum(c) {dims: [0, 1], keepdim: false}
backward(s) x -> gx, w -> gw
no_grad sub_(h, b)
d = exp(x)
live gx, gw, d
";
    let case = Case::from_text(text, &[]).unwrap();
    assert_eq!(reproduce(&case).unwrap(), None);
    let (text, beside) = case.to_text().unwrap();
    let again = Case::from_text(&text, &beside).unwrap();
    assert_eq!(again.to_text().unwrap().0, text);
    assert_eq!(reproduce(&again).unwrap(), None);
}

#[test]
fn halves_are_judged_by_doubles() {
    let text = "\
x: f16[64]
y = square(x)
z = exp(y)
live z
";
    let case = Case::from_text(text, &[]).unwrap();
    assert_eq!(case.inputs[&0].values.dtype(), DType::F16);
    assert_eq!(reproduce(&case).unwrap(), None);
}

/// More of the same, for whoever looks for mistakes: `KILN_SEEDS=first..last`.
#[test]
#[ignore = "a search"]
#[allow(clippy::print_stdout, reason = "what was found")]
fn search() {
    let asked = std::env::var("KILN_SEEDS").unwrap_or("0..100".into());
    let (first, last) = asked.split_once("..").unwrap();
    for seed in first.parse().unwrap()..last.parse().unwrap() {
        let Some(case) = case_of(seed, 60) else { continue };
        if let Some((small, found)) = investigate(&case, Duration::from_secs(20), &mut |_| {}).unwrap() {
            println!("seed {seed}: {found}\n{}", small.to_text().unwrap().0);
        }
    }
}
