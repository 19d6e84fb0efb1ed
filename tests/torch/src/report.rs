//! Goes through all calls on a few threads and prints one table.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::bundle::{Bundle, Call, Given, Stored};
use crate::calls;
use crate::check::{Mode, Verdict, check};
use crate::differences;

/// At least so many samples must agree.
const BAR: f64 = 0.995;
/// At least so many there must be.
const LEAST: usize = 40_000;

/// What to run.
pub struct Run {
    /// Where the calls are.
    pub folder: PathBuf,
    /// The list of differences.
    pub list: PathBuf,
    /// Only these ops, if any are named.
    pub ops: Vec<String>,
    /// Whether every sample runs compiled, too.
    pub all: bool,
    /// Whether none does.
    pub eager_only: bool,
}

/// What is counted for a kind of samples.
#[derive(Default, Clone, Copy)]
struct Counts {
    samples: usize,
    gradients: usize,
    seconds: usize,
    compiled: usize,
    differing: usize,
}

/// A sample that differs.
struct Difference {
    op: String,
    dtype: String,
    kind: String,
    stage: &'static str,
    mode: &'static str,
    what: String,
    call: String,
}

#[derive(Default)]
struct Outcome {
    kinds: BTreeMap<String, Counts>,
    unmapped: BTreeMap<String, usize>,
    differences: Vec<Difference>,
}

fn shown(given: &Given) -> String {
    match given {
        Given::Tensor { tensor } => format!("{}{:?}", tensor.dtype, tensor.shape),
        Given::List(items) => format!("[{}]", items.iter().map(shown).collect::<Vec<_>>().join(", ")),
        Given::Bool(x) => x.to_string(),
        Given::Int(x) => x.to_string(),
        Given::Float(x) => x.to_string(),
        Given::Text(x) => x.clone(),
        Given::Special { float } => float.clone(),
        Given::DType { dtype } => dtype.clone(),
        Given::Slice { slice } => format!("{slice:?}"),
        Given::Ellipsis { .. } => "...".into(),
        Given::Nothing => "None".into(),
    }
}

fn describe(call: &Call) -> String {
    let keywords = call.kwargs.iter().map(|(name, given)| format!("{name}={}", shown(given)));
    let all: Vec<String> = call.args.iter().map(shown).chain(keywords).collect();
    format!("{}({})", call.op, all.join(", "))
}

/// Which samples of an op are alike enough that one of them is compiled for all: those of one dtype and kind whose
/// operand is, or is not, a single number, and that have as many tensors.
fn likeness(call: &Call) -> (&str, &str, &str, usize, usize) {
    fn tensors<'a>(given: &'a Given, all: &mut Vec<&'a Stored>) {
        match given {
            Given::Tensor { tensor } => all.push(tensor),
            Given::List(items) => items.iter().for_each(|item| tensors(item, all)),
            _ => {}
        }
    }
    let mut all = Vec::new();
    call.args.iter().chain(call.kwargs.iter().map(|(_, given)| given)).for_each(|x| tensors(x, &mut all));
    let kind = if call.kind == "reference" { "opinfo" } else { &call.kind };
    let dims = all.first().map_or(0, |tensor| tensor.shape.len().min(1));
    (&call.dtype, kind, &call.form, all.len().min(4), dims)
}

fn run_op(run: &Run, name: &str) -> Outcome {
    let mut outcome = Outcome::default();
    let Some(bundle) = Bundle::read(&run.folder, name) else { return outcome };
    if let Ok(text) = std::fs::read_to_string(run.folder.join(format!("{name}.refused.json"))) {
        let reasons: BTreeMap<String, usize> = serde_json::from_str(&text).unwrap_or_default();
        for (why, count) in reasons {
            *outcome.unmapped.entry(why).or_default() += count;
        }
    }
    let mut seen = HashSet::new();
    for call in &bundle.calls {
        let is_new = seen.insert(likeness(call));
        let modes: &[Mode] = if !run.eager_only && (run.all || is_new) {
            &[Mode::Eager, Mode::Compiled]
        } else {
            &[Mode::Eager]
        };
        for &mode in modes {
            let (stage, what) = match check(call, &bundle, mode) {
                Verdict::Unmapped(why) => {
                    *outcome.unmapped.entry(format!("{name}: {why}")).or_default() += 1;
                    break;
                }
                Verdict::Agrees(stages) => {
                    let counts = outcome.kinds.entry(call.kind.clone()).or_default();
                    match mode {
                        Mode::Eager => {
                            counts.samples += 1;
                            counts.gradients += usize::from(stages > 1);
                            counts.seconds += usize::from(stages > 2);
                        }
                        Mode::Compiled => counts.compiled += 1,
                    }
                    continue;
                }
                Verdict::Differs { stage, what } => (stage, what),
            };
            let counts = outcome.kinds.entry(call.kind.clone()).or_default();
            match mode {
                Mode::Eager => counts.samples += 1,
                Mode::Compiled => counts.compiled += 1,
            }
            counts.differing += 1;
            outcome.differences.push(Difference {
                op: call.op.clone(),
                dtype: call.dtype.clone(),
                kind: call.kind.clone(),
                stage,
                mode: if mode == Mode::Eager { "eager" } else { "compiled" },
                what,
                call: describe(call),
            });
            // What is wrong already says nothing about the compiler.
            break;
        }
    }
    outcome
}

/// Runs everything; whether the bar is reached and nothing is unexplained.
pub fn run(run: &Run) -> bool {
    std::panic::set_hook(Box::new(|_| {}));
    let names = if run.ops.is_empty() { calls::names() } else { run.ops.clone() };
    let (next, all) = (AtomicUsize::new(0), Mutex::new(Outcome::default()));
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = run_op(run, name);
                    let Ok(mut all) = all.lock() else { return };
                    for (kind, counts) in outcome.kinds {
                        let sum = all.kinds.entry(kind).or_default();
                        sum.samples += counts.samples;
                        sum.gradients += counts.gradients;
                        sum.seconds += counts.seconds;
                        sum.compiled += counts.compiled;
                        sum.differing += counts.differing;
                    }
                    for (why, count) in outcome.unmapped {
                        *all.unmapped.entry(why).or_default() += count;
                    }
                    all.differences.extend(outcome.differences);
                }
            });
        }
    });
    let all = all.into_inner().unwrap_or_default();
    print(run, &all)
}

fn print(run: &Run, all: &Outcome) -> bool {
    let entries = differences::read(&run.list);
    let all_of_them: String = all
        .differences
        .iter()
        .map(|d| {
            format!("{}\t{}\t{}\t{}\t{}\t{}\t{}\n", d.op, d.dtype, d.kind, d.stage, d.mode, d.call, d.what)
        })
        .collect();
    let place = run.folder.join("differences.tsv");
    if let Err(error) = std::fs::write(&place, all_of_them) {
        println!("{}: {error}", place.display());
    }
    let mut unexplained: BTreeMap<String, Vec<&Difference>> = BTreeMap::new();
    for d in &all.differences {
        let entry = entries.iter().find(|e| e.covers([&d.op, &d.dtype, &d.kind, d.stage, d.mode]));
        match entry {
            Some(entry) => entry.used.set(entry.used.get() + 1),
            None => unexplained.entry(format!("{} {} {}", d.op, d.stage, d.mode)).or_default().push(d),
        }
    }
    for (what, several) in &unexplained {
        println!("{what}: {} samples", several.len());
        for d in several.iter().take(if run.ops.is_empty() { 4 } else { 400 }) {
            println!("    {} {}: {}: {}", d.kind, d.dtype, d.call, d.what);
        }
    }
    let is_whole = run.ops.is_empty() && !run.eager_only;
    let stale: Vec<_> = entries.iter().filter(|e| is_whole && e.used.get() == 0).collect();
    for entry in &stale {
        println!("explains nothing any more: {}", entry.text);
    }
    let left_out: usize = all.unmapped.values().sum();
    let absent = std::fs::read_to_string(run.folder.join("unmapped.json")).unwrap_or_default();
    let absent: Vec<String> = serde_json::from_str(&absent).unwrap_or_default();
    println!(
        "\nnot compared: {left_out} samples, and {} of PyTorch's operators that Kiln has no call for",
        absent.len()
    );
    let mut reasons: Vec<_> = all.unmapped.iter().collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    for (why, count) in reasons.iter().take(if run.ops.is_empty() { 60 } else { 100 }) {
        println!("{count:>8}  {why}");
    }
    println!(
        "\n{:<12}{:>10}{:>12}{:>12}{:>12}{:>12}{:>10}",
        "samples", "values", "gradients", "second", "compiled", "differing", "agree"
    );
    let mut sum = Counts::default();
    let line = |name: &str, c: &Counts| {
        let agree = 100.0 * (1.0 - c.differing as f64 / c.samples.max(1) as f64);
        println!(
            "{name:<12}{:>10}{:>12}{:>12}{:>12}{:>12}{agree:>9.2}%",
            c.samples, c.gradients, c.seconds, c.compiled, c.differing
        );
    };
    for (kind, c) in &all.kinds {
        line(kind, c);
        sum.samples += c.samples;
        sum.gradients += c.gradients;
        sum.seconds += c.seconds;
        sum.compiled += c.compiled;
        sum.differing += c.differing;
    }
    line("all", &sum);
    let counters = kiln::counters();
    println!(
        "compiled: {} calls were {} graphs, {} values were needed in between, {} calls ran eagerly after all",
        counters.calls,
        counters.graphs,
        counters.breaks,
        counters.eager_calls + counters.fallbacks
    );
    let explained: usize = entries.iter().map(|e| e.used.get()).sum();
    let open: usize = unexplained.values().map(Vec::len).sum();
    println!("{explained} of the differences are explained in {}, {open} are not", run.list.display());
    let is_enough = !run.ops.is_empty() || sum.samples >= LEAST;
    if !is_enough {
        println!("fewer than {LEAST} samples");
    }
    open == 0 && stale.is_empty() && is_enough && sum.differing as f64 <= (1.0 - BAR) * sum.samples as f64
}
