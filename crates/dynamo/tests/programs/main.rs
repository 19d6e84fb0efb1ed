//! Random user programs over the public API: whatever a program does (views, changes in place, breaks,
//! gradients inside and outside, other numbers and shapes in every call), compiled is what eager is.
//!
//! A program is data. It runs three times in a row eagerly on one copy of its inputs and in a region on
//! another; after every call all tensors, inputs and gradients are compared, and at the end everything is
//! changed in place once, so that memory shared in one world and not in the other shows. A program that
//! fails is made smaller and printed as Rust.
//!
//! `KILN_PROGRAMS=first..last` runs these seeds instead of the usual ones.

#![allow(clippy::unwrap_used)] // a test may panic

mod generate;
mod program;
mod world;

use std::fmt::Write as _;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use kiln_dynamo::{Backend, Compile, CompiledGraph, GraphContext, Mode, investigate, run_graph};
use kiln_ir::Graph;
use kiln_repro::record;
use kiln_tensor::{DType, Result, Tensor, no_grad};

use crate::generate::generate;
use crate::program::{CALLS, Program};
use crate::world::World;

fn different(got: &Tensor, want: &Tensor) -> Result<Option<String>> {
    let flags = |t: &Tensor| format!("{} requires_grad={}", t.ty(), t.requires_grad());
    if flags(got) != flags(want) {
        return Ok(Some(format!("{} instead of {}", flags(got), flags(want))));
    }
    if !want.dtype().is_float() {
        let (got, want) = (got.to_vec_cast::<i64>()?, want.to_vec_cast::<i64>()?);
        return Ok((got != want).then(|| format!("{got:?} instead of {want:?}")));
    }
    let (got, want) = (got.to_vec_cast::<f64>()?, want.to_vec_cast::<f64>()?);
    let scale = want.iter().filter(|x| x.is_finite()).fold(0.0f64, |a, x| a.max(x.abs()));
    let close = |g: f64, w: f64| g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= 1e-5 + 1e-4 * scale;
    let wrong = got.iter().zip(&want).position(|(g, w)| !close(*g, *w));
    Ok(wrong.map(|i| format!("at {i}: {} instead of {}\n{got:?}\ninstead of\n{want:?}", got[i], want[i])))
}

fn compare(got: &World, want: &World, moment: &str) -> std::result::Result<(), String> {
    if let Some((g, w)) = got.notes.iter().zip(&want.notes).find(|(g, w)| g != w) {
        return Err(format!("{moment}: {g}\ninstead of\n{w}"));
    }
    if got.notes.len() != want.notes.len() {
        return Err(format!("{moment}: {:?}\ninstead of\n{:?}", got.notes, want.notes));
    }
    for (call, (got, want)) in got.history.iter().zip(&want.history).enumerate() {
        for id in got.keys().chain(want.keys()) {
            let what = format!("{moment}: v{id} of call {call}");
            let (Some(g), Some(w)) = (got.get(id), want.get(id)) else {
                return Err(format!("{what} is there in one world only"));
            };
            let tensors = [("", Some(g.clone()), Some(w.clone())), (".grad", g.grad(), w.grad())];
            for (part, g, w) in tensors {
                match (g, w) {
                    (None, None) => {}
                    (Some(g), Some(w)) => match different(&g, &w) {
                        Ok(None) => {}
                        Ok(Some(text)) => return Err(format!("{what}{part} is {text}")),
                        Err(error) => return Err(format!("{what}{part}: {error}")),
                    },
                    (g, w) => {
                        return Err(format!("{what}{part}: {} instead of {}", g.is_some(), w.is_some()));
                    }
                }
            }
        }
    }
    Ok(())
}

/// Changes everything in place, so that memory shared in one world only shows.
fn stir(world: &World) {
    let _guard = no_grad();
    for (i, tensor) in world.history.iter().flat_map(|v| v.values()).enumerate() {
        // Refused for expanded tensors, in both worlds alike.
        let _ = tensor.add_(if tensor.dtype() == DType::Bool { 0 } else { 1 + i as i64 % 5 });
    }
}

/// Segments that were made from templates.
static FROM_TEMPLATES: AtomicUsize = AtomicUsize::new(0);

/// Whether a program gives the same in both worlds; `Ok(false)` if eager itself refuses.
fn agrees(program: &Program, options: &Compile) -> std::result::Result<bool, String> {
    let (mut eager, mut compiled) = (World::new(None), World::new(Some(options)));
    let outcome = catch_unwind(AssertUnwindSafe(|| -> std::result::Result<bool, String> {
        for call in 0..program.sizes.len() {
            if eager.call(program, call).is_err() {
                return Ok(false);
            }
            if compiled.call(program, call).is_err() {
                return Ok(false);
            }
            compare(&compiled, &eager, &format!("after call {call}"))?;
        }
        stir(&eager);
        stir(&compiled);
        compare(&compiled, &eager, "after stirring")?;
        Ok(true)
    }));
    let graphs = compiled.region.as_ref().map(|region| region.explain().graphs).unwrap_or_default();
    let made = graphs.iter().filter_map(|graph| graph.sizes.as_ref()).map(|sizes| sizes.made).sum();
    FROM_TEMPLATES.fetch_add(made, Ordering::Relaxed);
    let explain = || compiled.region.as_ref().map(|r| r.explain().to_string()).unwrap_or_default();
    match outcome {
        Ok(Ok(ran)) => Ok(ran),
        Ok(Err(text)) => Err(format!("{text}\n{}", explain())),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            Err(format!("panic: {}", text.unwrap_or_default()))
        }
    }
}

/// The smallest program found by dropping steps that still fails.
fn shrink(program: Program, options: &Compile) -> Program {
    let fails = |p: &Program| agrees(p, options).is_err();
    let mut best = program;
    let mut again = true;
    while again {
        again = false;
        for i in (0..best.steps.len()).rev() {
            let mut smaller = best.clone();
            smaller.steps.remove(i);
            if fails(&smaller) {
                (best, again) = (smaller, true);
            }
        }
        let mut calm = best.clone();
        calm.outside = None;
        if best.outside.is_some() && fails(&calm) {
            best = calm;
        }
        let mut still = best.clone();
        still.sizes = vec![best.sizes[0]; CALLS];
        if best.sizes != still.sizes && fails(&still) {
            best = still;
        }
        let mut fewer = best.clone();
        fewer.sizes.truncate(best.sizes.len().saturating_sub(1).max(CALLS));
        if best.sizes != fewer.sizes && fails(&fewer) {
            best = fewer;
        }
    }
    best
}

/// What of a program fails by itself, call by call: minified, and saved where it is tried again in every run of the tests.
fn saved(program: &Program, options: &Compile, seed: u64) -> Option<String> {
    let mut world = World::new(None);
    for call in 0..program.sizes.len() {
        let recorded = record(|| world.call(program, call)).ok()?;
        let Ok(mut case) = recorded.case else { continue };
        case.options = options.to_text();
        if let Ok(Some((small, found))) = investigate(&case, Duration::from_secs(20), &mut |_| {}) {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/repro/golden");
            let file = Path::new(folder).join(format!("found_{seed}.kir"));
            small.write(&file).ok()?;
            return Some(format!("{found}\nsaved as {}\n{}", file.display(), small.to_text().ok()?.0));
        }
    }
    None
}

/// The random stream is the process's: only one test runs at a time.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The seeds that `KILN_PROGRAMS` asks for.
fn asked() -> Option<Range<u64>> {
    let text = std::env::var("KILN_PROGRAMS").ok()?;
    let (first, last) = text.split_once("..")?;
    Some(first.parse().ok()?..last.parse().ok()?)
}

/// Runs the seeds of this test in one process a core: within a process programs take turns.
fn share(usual: Range<u64>) {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4)) as u64;
    let thread = std::thread::current();
    let test = thread.name().unwrap();
    let count = (usual.end - usual.start).div_ceil(cores);
    let part = |n: u64| usual.start + n * count..(usual.start + (n + 1) * count).min(usual.end);
    let run = |seeds: Range<u64>| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test, "--exact"]).env("KILN_PROGRAMS", format!("{}..{}", seeds.start, seeds.end));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..cores).map(part).filter(|seeds| !seeds.is_empty()).map(run).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains(" 1 passed"), "{text}");
    }
}

fn check(options: Compile, usual: Range<u64>) {
    check_as(options, usual, generate);
}

fn check_as(options: Compile, usual: Range<u64>, generate: impl Fn(u64) -> Program) {
    let _turn = turn();
    let Some(seeds) = asked() else { return share(usual) };
    let (mut ran, mut failures) = (0, String::new());
    let mut count = 0;
    for seed in seeds {
        let program = generate(seed);
        // Other sizes planned at once, at second sight, and as graphs of their own. The C compiler takes most of the
        // time: it does all it can for every third program only.
        let options = options.clone().dynamic([Some(true), None, Some(false)][seed as usize % 3]);
        let options = options.option("opt_level", [2, 0, 0][seed as usize / 3 % 3]).unwrap();
        let options = options.option("unroll", [1, 2, 1, 4][seed as usize / 9 % 4]).unwrap();
        match agrees(&program, &options) {
            Ok(true) => ran += 1,
            Ok(false) => {}
            Err(first) => {
                let small = shrink(program, &options);
                let why = agrees(&small, &options).err().unwrap_or(first);
                let saved = saved(&small, &options, seed).unwrap_or_default();
                let _ = writeln!(failures, "==== {options}, seed {seed}\n{small}{why}\n{saved}");
                count += 1;
                if count == 5 {
                    break;
                }
            }
        }
    }
    assert!(failures.is_empty(), "{count} programs disagree\n{failures}");
    assert!(ran > 0, "no program ran");
    // They would run op by op, and be right all the same.
    assert_eq!(kiln_dynamo::counters().refused, 0, "kernels that the C compiler fails on");
}

#[test]
fn inductor() {
    check(Compile::new(), 0..480);
}

/// New sizes in nearly every call: those in the middle of a range, at its borders, beyond it, and again.
#[test]
fn many_sizes() {
    check_as(Compile::new(), 60_000..60_150, |seed| {
        let mut program = generate(seed);
        let n = program.sizes[0];
        program.sizes = match seed % 5 {
            0 => vec![n, n + 1, 7, 5, 12, 7, 2, 3],
            1 => vec![n, 14, 9, 13, 40, 17, 64],
            2 => vec![n, 10, 4, 11, 8, 0, 6, 1],
            3 => vec![8, 16, 12, 10, 24, 15],
            _ => (3..20).collect(),
        };
        program
    });
    if let Some(seeds) = asked().filter(|seeds| seeds.end - seeds.start >= 20) {
        let made = FROM_TEMPLATES.load(Ordering::Relaxed) as u64;
        assert!(made > (seeds.end - seeds.start) / 2, "only {made} segments came from templates");
    }
}

#[test]
fn aot_eager() {
    check(Compile::new().backend(Backend::AotEager), 10_000..12_000);
}

#[test]
fn eager() {
    check(Compile::new().backend(Backend::Eager), 20_000..20_300);
}

#[test]
fn reduce_overhead() {
    // Programs whose kernels the test above has made.
    check(Compile::new().mode(Mode::ReduceOverhead), 0..150);
}

/// Whichever forms of kernels are the quickest, they give the same.
#[test]
fn max_autotune() {
    check(Compile::new().mode(Mode::MaxAutotune).option("autotune_ms", 1).unwrap(), 50_000..50_006);
}

#[test]
fn backends_of_ones_own() {
    check(Compile::new().backend(interpret), 40_000..40_300);
}

/// A backend that runs graphs op by op.
fn interpret(graph: &Graph, _: &GraphContext<'_>) -> kiln_tensor::Result<CompiledGraph> {
    let graph = graph.clone();
    Ok(Box::new(move |inputs| run_graph(&graph, inputs)))
}
