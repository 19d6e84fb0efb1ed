//! Planted faults: each must show in the big program, and without one compiled must be eager.
//!
//! Those that crash or hang are for whoever has a child process to spare: `KILN_PLANT=null-store` plants one from
//! outside.

#![allow(clippy::unwrap_used)] // a test may panic

mod lists;
mod pictures;
mod proof;
#[path = "../repro/random.rs"]
mod random;
mod tables;
mod text;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard};

use kiln_dynamo::{Compile, Explanation, GraphInfo, Region};
use kiln_ir::{DType, Error, Fault, Shows, plant};
use kiln_runtime::threads;
use kiln_tensor::manual_seed;

use crate::text::Text;
use crate::world::{Notes, Step, World};

type Result<T, E = Error> = std::result::Result<T, E>;

/// The random stream is the process's: runs take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// What a run is about.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Case {
    /// Two steps.
    Steps,
    /// The same; an input of the second lies transposed.
    Turned,
    /// The language model alone, in several sizes.
    Sizes,
}

impl Case {
    fn of(fault: Fault) -> Case {
        match (fault.stage(), fault) {
            ("general", _) => Case::Sizes,
            (_, Fault::GuardIgnoresStrides) => Case::Turned,
            _ => Case::Steps,
        }
    }

    /// What is seen, eagerly or in a region.
    fn notes(self, region: Option<&Region>) -> Result<Notes> {
        let mut notes = Notes::default();
        manual_seed(11);
        if self == Case::Sizes {
            for batch in [5, 7, 9] {
                let text = Text::new(batch)?;
                let loss = match region {
                    Some(region) => region.run(|| text.train())?,
                    None => text.train()?,
                };
                notes.see("loss", &loss)?;
                for (i, grad) in text.parameters().iter().filter_map(|p| p.grad()).enumerate() {
                    notes.see(format!("gradient {i}"), &grad)?;
                }
            }
            return Ok(notes);
        }
        let mut world = World::new()?;
        let run = |body: &dyn Fn() -> Result<Step>| match region {
            Some(region) => region.run(body),
            None => body(),
        };
        for rate in [0.01, 0.03] {
            world.call(&run, rate, &mut notes)?;
            if self == Case::Turned {
                world.tables.turned = world.tables.turned.t()?;
            }
        }
        Ok(notes)
    }

    fn region(self, graph_cache: bool) -> Region {
        let options = Compile::new().dynamic(self == Case::Sizes).option("graph_cache", graph_cache).unwrap();
        options.option("keep_text", false).unwrap().region()
    }
}

/// The largest difference between two runs, and where: 1 is as much as rounding may make.
fn difference(got: &Notes, want: &Notes) -> (f64, String) {
    assert_eq!(got.0.len(), want.0.len());
    let mut worst = (0.0, String::new());
    for (got, want) in got.0.iter().zip(&want.0) {
        if (&got.name, got.dtype, got.values.len()) != (&want.name, want.dtype, want.values.len()) {
            return (f64::INFINITY, format!("{} is another tensor", want.name));
        }
        let allowed = match want.dtype {
            DType::BF16 | DType::F16 => 0.02,
            dtype if dtype.is_float() => 2e-4,
            _ => 1e-9,
        };
        let scale = want.values.iter().filter(|x| x.is_finite()).fold(1e-3f64, |most, x| most.max(x.abs()));
        for (i, (g, w)) in got.values.iter().zip(&want.values).enumerate() {
            let apart =
                if g == w || g.is_nan() && w.is_nan() { 0.0 } else { (g - w).abs() / (allowed * scale) };
            let apart = if apart.is_nan() { f64::INFINITY } else { apart };
            if apart > worst.0 {
                worst = (apart, format!("{}[{i}] is {g}, not {w}", want.name));
            }
        }
    }
    worst
}

/// What came of a run with a fault.
enum Outcome {
    Panicked,
    Failed(String),
    Ran { apart: f64, at: String, explanation: Box<Explanation> },
}

fn outcome(case: Case, graph_cache: bool, want: &Notes) -> Outcome {
    let region = case.region(graph_cache);
    match catch_unwind(AssertUnwindSafe(|| case.notes(Some(&region)))) {
        Err(_) => Outcome::Panicked,
        Ok(Err(error)) => Outcome::Failed(error.to_string()),
        Ok(Ok(got)) => {
            let (apart, at) = difference(&got, want);
            Outcome::Ran { apart, at, explanation: Box::new(region.explain()) }
        }
    }
}

/// Whether a fault comes to light in the way that it is for; if not, what came of it.
fn shows(fault: Fault) -> Result<(), String> {
    let case = Case::of(fault);
    let eager = || case.notes(None).map_err(|error| error.to_string());
    let want = eager()?;
    let _planted = plant(fault);
    if difference(&eager()?, &want).0 > 0.0 {
        return Err(format!("{fault} spoils eager mode, too"));
    }
    let graph_cache = fault.stage() == "codec";
    if graph_cache {
        // The first region leaves its plan there, the second finds it.
        let _ = outcome(case, graph_cache, &want);
    }
    let outcome = outcome(case, graph_cache, &want);
    let shown = match (&outcome, fault.shows()) {
        (Outcome::Panicked, shows) => shows == Shows::Panic || shows == Shows::Caught,
        (Outcome::Failed(_), _) => false,
        (Outcome::Ran { apart, .. }, Shows::Wrong | Shows::Caught) => *apart > 10.0,
        (Outcome::Ran { apart, explanation, .. }, shows) => {
            let any = |is: &dyn Fn(&GraphInfo) -> bool| explanation.graphs.iter().any(is);
            let is_told = match shows {
                Shows::Refused => any(&|graph| !graph.fallbacks.is_empty()),
                Shows::Memory => any(&|graph| graph.arena_bytes > 100 << 20),
                Shows::Break => !explanation.breaks.is_empty(),
                _ => false,
            };
            is_told && *apart < 1.0
        }
    };
    let told = match outcome {
        Outcome::Panicked => "it panicked".to_string(),
        Outcome::Failed(error) => format!("it failed: {error}"),
        Outcome::Ran { apart, at, .. } => format!("{apart:.3} at {at}"),
    };
    if shown { Ok(()) } else { Err(format!("{fault} ({}) does not show: {told}", fault.what())) }
}

#[test]
fn without_a_fault_compiled_is_eager() {
    let _turn = turn();
    for case in [Case::Steps, Case::Turned, Case::Sizes] {
        let want = case.notes(None).unwrap();
        let region = case.region(false);
        let got = case.notes(Some(&region)).unwrap();
        let explanation = region.explain();
        let (apart, at) = difference(&got, &want);
        assert!(apart < 1.0, "{case:?}: {at}\n{explanation}");
        assert!(explanation.breaks.is_empty() && explanation.fallbacks.is_empty(), "{explanation}");
        assert!(explanation.graphs.iter().all(|graph| graph.interpreted.is_none()), "{explanation}");
        if case == Case::Steps {
            assert_eq!(explanation.graphs.len(), 1);
            assert!(explanation.graphs[0].nodes > 450 && explanation.graphs[0].has_backward, "{explanation}");
        }
    }
}

#[test]
fn every_fault_shows() {
    let _turn = turn();
    threads::set_count(3);
    let here = |fault: &Fault| !matches!(fault.shows(), Shows::Crash | Shows::Hang);
    let faults = Fault::ALL.iter().copied().filter(here);
    let hidden: Vec<String> = faults.filter_map(|fault| shows(fault).err()).collect();
    assert!(hidden.is_empty(), "\n{}\n", hidden.join("\n"));
}
