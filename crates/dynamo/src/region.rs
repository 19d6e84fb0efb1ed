//! Regions: the primitive behind every form of `compile()`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use kiln_ir::{Error, Result};
use kiln_runtime::warn;
use kiln_tensor::hook::{self, Scope};

use crate::explain::{Break, Explanation, Recompile};
use crate::logs::{self, Log};
use crate::options::Compile;
use crate::run::Run;
use crate::trie::{CallEvent, Event, Trie};

/// More different continuations than this in one region, and it runs eagerly from then on.
const RECOMPILE_LIMIT: usize = 16;
/// More recorded ops than this, and it runs eagerly from then on.
const NODE_LIMIT: usize = 1 << 20;

/// What a region remembers: its recordings and what happened.
pub(crate) struct Site {
    pub(crate) options: Compile,
    pub(crate) trie: Trie,
    runs: Mutex<Vec<Arc<Run>>>,
    breaks: Mutex<Vec<Break>>,
    fallbacks: Mutex<Vec<Break>>,
    recompiles: Mutex<Vec<Recompile>>,
    calls: AtomicUsize,
    given_up: AtomicBool,
}

impl Site {
    pub(crate) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    pub(crate) fn note_break(&self, at: Break) {
        note(&self.breaks, at);
    }

    pub(crate) fn note_fallback(&self, at: Break) {
        note(&self.fallbacks, at);
    }

    /// Called before the trie grows at a node: keeps the reason if this is another way to go on, and says no
    /// past the limits.
    pub(crate) fn check_growth(&self, at: u32, event: &Event) -> Result<(), &'static str> {
        let siblings = self.trie.children(at);
        if self.trie.len() >= NODE_LIMIT {
            return self.give_up("too many recorded ops");
        }
        let Some(&first) = siblings.first() else { return Ok(()) };
        let reason = difference(&self.trie.node(first).event, event);
        let mut recompiles = self.recompiles.lock();
        let number = recompiles.len() + 1;
        let text = format!("recompile #{number} at {}: {reason}", location(event));
        logs::write(Log::Recompiles, "recompile", &|| text.clone());
        recompiles.push(Recompile { reason: text.clone() });
        if number > RECOMPILE_LIMIT {
            drop(recompiles);
            let key = format!("recompiles-{:p}", self);
            warn::once(&key, || format!("{}: {text}; running eagerly from now on", self.name()));
            return self.give_up("too many recompilations");
        }
        Ok(())
    }

    fn give_up(&self, reason: &'static str) -> Result<(), &'static str> {
        self.given_up.store(true, Ordering::Relaxed);
        Err(reason)
    }

    fn name(&self) -> &str {
        self.options.name.as_deref().unwrap_or("compiled function")
    }
}

/// Keeps the first of equal entries.
fn note(list: &Mutex<Vec<Break>>, at: Break) {
    let mut list = list.lock();
    if !list.contains(&at) {
        list.push(at);
    }
}

fn location(event: &Event) -> String {
    match event {
        Event::Call(call) => call.loc.to_string(),
        Event::Backward(event) => event.loc.to_string(),
        Event::Start | Event::Break => "the end of the graph".into(),
    }
}

/// How two events differ, in words.
fn difference(before: &Event, now: &Event) -> String {
    match (before, now) {
        (Event::Call(a), Event::Call(b)) => call_difference(a, b),
        (Event::Backward(_), Event::Backward(_)) => "backward finds other gradients in place".into(),
        (before, now) => format!("{} was {}, now {}", "the next thing", kind(before), kind(now)),
    }
}

fn call_difference(a: &CallEvent, b: &CallEvent) -> String {
    if a.op.name() != b.op.name() {
        return format!("the op was {}, now {}", a.op.name(), b.op.name());
    }
    for ((name, before), (_, now)) in a.op.attributes().iter().zip(b.op.attributes()) {
        if *before != now {
            return format!("{name} of {} was {before}, now {now}", a.op.name());
        }
    }
    if let Some(text) = a.guards.iter().zip(&b.guards).find_map(|(a, b)| a.difference(b)) {
        return text;
    }
    if a.grad_enabled != b.grad_enabled {
        return format!("gradients were {}recorded, now {}", not(a.grad_enabled), not(b.grad_enabled));
    }
    format!("{} has other operands", a.op.name())
}

fn not(on: bool) -> &'static str {
    if on { "" } else { "not " }
}

fn kind(event: &Event) -> String {
    match event {
        Event::Start => "the start".into(),
        Event::Break => "a graph break".into(),
        Event::Call(call) => call.op.name().into(),
        Event::Backward(_) => "backward".into(),
    }
}

/// A place in a program whose tensor work is captured and compiled. The closure runs on every call; only its
/// tensor ops are taken over, so nothing it depends on can go stale.
///
/// ```
/// use kiln_dynamo::Compile;
/// use kiln_tensor::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// let region = Compile::new().region();
/// let x = Tensor::ones([4], &Device::Cpu)?;
/// for scale in [1.0, 2.0, 3.0] {
///     // `scale` is a run-time number: one compilation serves all three.
///     let y = region.run(|| (&x * scale + 1.0).ok())?;
///     assert_eq!(y.to_vec::<f32>()?, [scale as f32 + 1.0; 4]);
/// }
/// assert_eq!(region.explain().recompiles.len(), 0);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Region {
    site: Arc<Site>,
}

/// Ends a call whatever way it ends.
struct Finish<'a> {
    run: &'a Arc<Run>,
    done: bool,
}

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        if !self.done {
            // A panic is on its way: results as in eager, errors have nobody to go to.
            let _ = self.run.end(false);
        }
    }
}

impl Compile {
    /// A region with these options.
    pub fn region(self) -> Region {
        Region {
            site: Arc::new(Site {
                options: self,
                trie: Trie::new(),
                runs: Mutex::default(),
                breaks: Mutex::default(),
                fallbacks: Mutex::default(),
                recompiles: Mutex::default(),
                calls: AtomicUsize::new(0),
                given_up: AtomicBool::new(false),
            }),
        }
    }
}

impl Region {
    /// Runs a closure, its tensor work compiled. Any captures, any result; inputs are found by use. A region
    /// inside another is part of it.
    pub fn run<T, E: From<Error>>(&self, body: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let nested = hook::with_current(|recorder| recorder.is_some());
        if nested || self.site.options.disable || self.site.is_given_up() {
            return body();
        }
        self.site.calls.fetch_add(1, Ordering::Relaxed);
        let run = self.site.runs.lock().pop().unwrap_or_else(|| Run::new(self.site.clone()));
        run.begin();
        let mut finish = Finish { run: &run, done: false };
        let result = {
            let _scope = Scope::enter(run.clone());
            body()
        };
        finish.done = true;
        let ended = run.end(result.is_ok());
        drop(finish);
        self.site.runs.lock().push(run);
        match result {
            Ok(value) => ended.map(|()| value).map_err(E::from),
            Err(error) => Err(error),
        }
    }

    /// What was captured, compiled and refused so far.
    pub fn explain(&self) -> Explanation {
        Explanation::new(
            self.site.name(),
            &self.site.options,
            self.site.calls.load(Ordering::Relaxed),
            &self.site.trie.segments(),
            self.site.breaks.lock().clone(),
            self.site.fallbacks.lock().clone(),
            self.site.recompiles.lock().clone(),
        )
    }
}
