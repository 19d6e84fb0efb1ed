//! Regions: the primitive behind every form of `compile()`.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};

use kiln_ir::{Error, Line, Result};
use kiln_runtime::warn;
use kiln_tensor::hook::Scope;
use kiln_tensor::no_grad;

use crate::analysis;
use crate::backend::Backend;
use crate::counters::{self, Count, count};
use crate::difference::{Difference, Forbidden, Recompile};
use crate::event::Event;
use crate::explain::{Break, Explanation};
use crate::general::{Came, Generals, Resized};
use crate::logs::{self, Log};
use crate::loops::{Loops, Verdict};
use crate::options::{Compile, Mode};
use crate::run::Run;
use crate::segment::Segment;
use crate::settings::Numerics;
use crate::sizes::{self, Parted, Sight, Sizes};
use crate::stance::{Stance, is_compiling, stance};
use crate::state::{Leave, State};
use crate::trie::{LiveSet, ROOT, Trie};
use crate::verify::{self, Checks};
use crate::why::Reason;

/// More recorded ops than this, and whatever else is new runs eagerly.
const NODE_LIMIT: usize = 1 << 20;

/// What a region remembers: its recordings and what happened.
pub(crate) struct Site {
    pub(crate) options: Compile,
    pub(crate) trie: Trie,
    generals: Mutex<Generals>,
    loops: Mutex<Loops>,
    /// Whether some graph has a template.
    is_general: AtomicBool,
    /// Runs that the next calls use again; none once the region is gone or was reset. A run holds its site,
    /// so neither would ever be freed otherwise.
    runs: Mutex<Option<Vec<Arc<Run>>>>,
    breaks: Mutex<Vec<Break>>,
    fallbacks: Mutex<Vec<Break>>,
    recompiles: Mutex<Vec<Recompile>>,
    sizes: Mutex<Sizes>,
    calls: AtomicUsize,
    replays: AtomicUsize,
    given_up: AtomicBool,
    /// Whether gradients flow from outside to what can't be part of a compiled backward: custom functions and
    /// retained gradients end the graph then.
    split: AtomicBool,
    /// Set if calls are checked against eager ones.
    pub(crate) checks: Option<Box<Checks>>,
}

impl Site {
    fn new(options: Compile) -> Arc<Site> {
        Arc::new(Site {
            checks: Checks::of(&options),
            options,
            trie: Trie::new(),
            generals: Mutex::default(),
            loops: Mutex::default(),
            is_general: AtomicBool::new(false),
            runs: Mutex::new(Some(Vec::new())),
            breaks: Mutex::default(),
            fallbacks: Mutex::default(),
            recompiles: Mutex::default(),
            sizes: Mutex::default(),
            calls: AtomicUsize::new(0),
            replays: AtomicUsize::new(0),
            given_up: AtomicBool::new(false),
            split: AtomicBool::new(false),
        })
    }

    /// Lets go of the runs that are kept.
    fn retire(&self) {
        let runs = self.runs.lock().take();
        drop(runs);
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Whether what a compiled backward can't do ends the graph.
    pub(crate) fn splits(&self) -> bool {
        self.split.load(Ordering::Relaxed)
    }

    /// A value was needed in the middle of a call. `module` says where, if it is known.
    pub(crate) fn note_break(&self, loc: Line, reason: Reason, module: impl FnOnce() -> Option<String>) {
        note(&self.breaks, loc, reason, module);
    }

    /// The rest of a call runs eagerly.
    pub(crate) fn note_fallback(&self, loc: Line, reason: Reason, module: impl FnOnce() -> Option<String>) {
        count(Count::Fallback);
        note(&self.fallbacks, loc, reason, module);
    }

    /// From now on such things end the graph.
    pub(crate) fn split(&self) {
        self.split.store(true, Ordering::Relaxed);
    }

    /// What becomes of a segment that has no plan yet. `parted`: this call parted from a recording by its sizes
    /// alone; if the ops that followed were others too, it is a recompilation after all, and counted once.
    pub(crate) fn sight(&self, at: u32, live: &LiveSet, parted: &mut Option<Parted>) -> Result<Sight, Leave> {
        counters::note_new();
        let at_once = match self.options.dynamic {
            Some(false) => return Ok(Sight::New),
            Some(true) => true,
            None => false,
        };
        let mut sizes = self.sizes.lock();
        let before = sizes.count;
        let sight = sizes.sight(&self.trie, at, live, at_once);
        counters::add(Count::Resize, sizes.count - before);
        drop(sizes);
        if sight == Sight::New
            && let Some(Parted { like, to }) = parted.take()
        {
            let recompile = self.recompile(like, &self.trie.node(to).event);
            let reason = Difference::Branch(Box::new(recompile.reason));
            self.note_recompile(Recompile { reason, ..recompile })?;
        }
        Ok(sight)
    }

    /// A segment made from a template, for a known graph that came in other sizes. `first` is where its first
    /// recording ends.
    pub(crate) fn general(&self, at: u32, first: u32, live: &LiveSet, at_once: bool) -> Option<Arc<Segment>> {
        let _eager = Scope::suspend();
        let made =
            self.generals.lock().segment(self, (&self.trie, first), (&self.trie, at), live, at_once)?;
        if made.came != Came::First {
            self.is_general.store(true, Ordering::Relaxed);
        }
        Some(made.segment)
    }

    /// The same for a recording that lies aside.
    pub(crate) fn general_aside(&self, trie: &Trie, at: u32, live: &LiveSet) -> Option<Resized> {
        let first = self.sizes.lock().first(trie.node(at).form, live)?;
        let at_once = self.options.dynamic == Some(true);
        let _eager = Scope::suspend();
        let made = self.generals.lock().segment(self, (&self.trie, first), (trie, at), live, at_once)?;
        if made.came == Came::New {
            self.sizes.lock().count += 1;
            counters::add(Count::Resize, 1);
        }
        Some(made)
    }

    /// Called before a segment is compiled. If the stance forbids it, the segment runs op by op, and the
    /// error, if there is one, is the call's.
    pub(crate) fn may_compile(&self) -> Result<(), Option<Error>> {
        counters::note_new();
        match stance() {
            Stance::Default | Stance::ForceEager => Ok(()),
            Stance::EagerOnRecompile => Err(None),
            Stance::FailOnRecompile => Err(Some(Forbidden::Results { function: self.name().into() }.into())),
        }
    }

    /// Called before the trie grows at a node: keeps the reason if this is another way to go on, and says no
    /// past the limits and where the stance forbids it. Where only sizes are new, this may be the graph that is
    /// known: then the way it is like is returned.
    pub(crate) fn check_growth(
        &self,
        at: u32,
        event: &Event,
        parted: Option<&Parted>,
    ) -> Result<Option<u32>, Leave> {
        counters::note_new();
        let siblings = self.trie.children(at);
        if let Some(like) = self.same_but_for_sizes(&siblings, event) {
            return Ok(Some(like));
        }
        // How often a loop goes round shows at the end.
        if let Some(&like) = siblings.first()
            && self.loops.lock().may_part(at)
        {
            return Ok(Some(like));
        }
        // What is known stays compiled.
        if self.is_given_up() {
            return Err(Leave::Eager(Reason::RecompileLimit));
        }
        match stance() {
            Stance::Default | Stance::ForceEager => {}
            // Behind other sizes everything is new; whether it is another graph shows at its end.
            _ if parted.is_some() && siblings.is_empty() => {}
            Stance::EagerOnRecompile => {
                return Err(Leave::Eager(Reason::Stance));
            }
            Stance::FailOnRecompile => {
                let forbidden = match siblings.first() {
                    Some(&first) => Forbidden::Recompile(Box::new(self.recompile(first, event))),
                    None if at == ROOT => Forbidden::NotYet { function: self.name().into() },
                    None => Forbidden::longer(event),
                };
                return Err(Leave::Error(forbidden.into()));
            }
        }
        if self.trie.len() >= NODE_LIMIT {
            self.give_up(Reason::RecordedOps)?;
        }
        if let Some(&first) = siblings.first() {
            self.note_recompile(self.recompile(first, event))?;
        }
        Ok(None)
    }

    /// Whether sizes that part from those recorded at a node are recorded aside: there may be a template for them,
    /// or there is no room for them.
    pub(crate) fn records_aside(&self, at: u32) -> bool {
        self.is_general.load(Ordering::Relaxed) || self.is_full(at) || self.loops.lock().may_part(at)
    }

    /// Whether loops of other numbers of steps are one graph here.
    fn rolls(&self) -> bool {
        self.options.dynamic != Some(false)
            && self.options.settings.numerics == Numerics::Default
            && self.options.backend.is(Backend::Inductor)
            && self.options.mode != Mode::MaxAutotune
    }

    /// Takes note of a graph that is compiled for as many steps as its loops have.
    pub(crate) fn note_loops(&self, state: &State) {
        if self.rolls() {
            self.loops.lock().note(self, state.at, state);
        }
    }

    /// What to do with what is pending if it is a graph that came with another number of steps before.
    pub(crate) fn verdict(&self, state: &State) -> Verdict {
        if !self.rolls() {
            return Verdict::Unknown;
        }
        let _eager = Scope::suspend();
        let verdict = self.loops.lock().verdict(self, state.trie(self), state.at, state);
        if matches!(verdict, Verdict::Segment(_, Came::New) | Verdict::Once) {
            self.sizes.lock().count += 1;
            counters::add(Count::Resize, 1);
        }
        verdict
    }

    /// Whether no other sizes are recorded behind a node.
    pub(crate) fn is_full(&self, at: u32) -> bool {
        self.trie.children(at).len() >= self.options.settings.size_limit || self.trie.len() >= NODE_LIMIT
    }

    /// The way recorded first that differs from an event in nothing but sizes.
    fn same_but_for_sizes(&self, siblings: &[u32], event: &Event) -> Option<u32> {
        if self.options.dynamic == Some(false) {
            return None;
        }
        let form = sizes::form(0, event);
        siblings.iter().copied().find(|&sibling| sizes::form(0, &self.trie.node(sibling).event) == form)
    }

    /// A recording went another way than those before; says no past the limit.
    fn note_recompile(&self, recompile: Recompile) -> Result<(), Leave> {
        count(Count::Recompile);
        let number = recompile.number;
        let text = recompile.to_string();
        logs::write(Log::Recompiles, "recompile", &|| text.clone());
        self.recompiles.lock().push(recompile);
        if number > self.options.settings.recompile_limit {
            let key = format!("recompiles-{:p}", self);
            warn::once(&key, || format!("{}: {text}; from now on anything new runs eagerly", self.name()));
            return self.give_up(Reason::Recompilations);
        }
        Ok(())
    }

    /// Why an event is another way to go on than the one recorded first.
    fn recompile(&self, first: u32, event: &Event) -> Recompile {
        let number = self.recompiles.lock().len() + 1;
        let arrived = |&index: &u32| self.trie.node(index).event.guards().len();
        let inputs: usize = self.trie.path(self.trie.node(first).parent).iter().map(arrived).sum();
        let reason = Difference::between(&self.trie.node(first).event, event, inputs);
        Recompile { number, loc: event.loc(), reason }
    }

    fn give_up(&self, reason: Reason) -> Result<(), Leave> {
        self.given_up.store(true, Ordering::Relaxed);
        Err(Leave::Eager(reason))
    }

    pub(crate) fn name(&self) -> &str {
        self.options.name.as_deref().unwrap_or("compiled function")
    }

    fn explain(&self) -> Explanation {
        Explanation {
            calls: self.calls.load(Ordering::Relaxed),
            replays: self.replays.load(Ordering::Relaxed),
            graphs: crate::explain::graphs(
                &self.trie,
                &self.generals.lock(),
                &self.loops.lock(),
                self.options.dynamic == Some(false),
            ),
            breaks: self.breaks.lock().clone(),
            fallbacks: self.fallbacks.lock().clone(),
            recompiles: self.recompiles.lock().clone(),
            sizes: self.sizes.lock().count,
            given_up: self.is_given_up(),
            ..Explanation::empty(self.name(), &self.options)
        }
    }
}

/// Keeps the first of equal entries.
fn note(list: &Mutex<Vec<Break>>, loc: Line, reason: Reason, module: impl FnOnce() -> Option<String>) {
    let mut list = list.lock();
    if !list.iter().any(|at| at.loc == loc && at.reason == reason) {
        list.push(Break { loc, module: module(), reason });
    }
}

/// A place in a program whose tensor work is captured and compiled. The closure runs on every call; only its
/// tensor ops are intercepted, so nothing it depends on can go stale.
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
    place: Arc<Place>,
}

/// Where a region's recordings are: `reset` puts new ones there.
struct Place {
    options: Compile,
    site: RwLock<Arc<Site>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.site.get_mut().retire();
    }
}

/// All regions of the process, for `reset`.
static REGIONS: Mutex<Vec<Weak<Place>>> = Mutex::new(Vec::new());

/// Drops the recordings of every region.
pub(crate) fn reset_all() {
    let regions: Vec<Arc<Place>> = REGIONS.lock().iter().filter_map(Weak::upgrade).collect();
    for place in regions {
        Region { place }.reset();
    }
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
        let site = RwLock::new(Site::new(self.clone()));
        let place = Arc::new(Place { options: self, site });
        let mut regions = REGIONS.lock();
        if regions.len() == regions.capacity() {
            regions.retain(|region| region.strong_count() > 0);
        }
        regions.push(Arc::downgrade(&place));
        Region { place }
    }
}

impl Region {
    /// Runs a closure with its tensor work compiled. Any captures, any result; inputs are found by use. A region
    /// inside another becomes part of it.
    pub fn run<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        self.try_run(body)
    }

    /// [`run`](Region::run) for closures with an error type of their own.
    ///
    /// ```
    /// # use kiln_dynamo::Compile;
    /// # use kiln_tensor::Tensor;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let region = Compile::new().region();
    /// let x = Tensor::from_slice(&[1.0f32, 2.0])?;
    /// let y = region.try_run(|| -> Result<Tensor, Box<dyn std::error::Error>> {
    ///     let scale: f64 = "0.5".parse()?;
    ///     Ok(x.mul(scale)?)
    /// })?;
    /// assert_eq!(y.to_vec::<f32>()?, [0.5, 1.0]);
    /// # Ok(()) }
    /// ```
    pub fn try_run<T, E: From<Error>>(&self, body: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let options = &self.place.options;
        let _mode = (options.mode == Mode::Evaluation).then(no_grad);
        if is_compiling() {
            return body();
        }
        if options.disable || stance() == Stance::ForceEager {
            count(Count::EagerCall);
            return body();
        }
        let site = self.place.site.read().clone();
        if let Some(checks) = site.checks.as_ref().filter(|checks| checks.wants()) {
            return verify::call(checks, self, body);
        }
        site.calls.fetch_add(1, Ordering::Relaxed);
        count(Count::Call);
        let kept = site.runs.lock().as_mut().and_then(Vec::pop);
        let run = kept.unwrap_or_else(|| Run::new(site.clone()));
        // What a call that panicked left.
        counters::take_new();
        run.begin();
        let mut finish = Finish { run: &run, done: false };
        let result = {
            let _scope = Scope::enter(run.clone());
            body()
        };
        finish.done = true;
        let ended = run.end(result.is_ok());
        drop(finish);
        if !counters::take_new() {
            count(Count::Replay);
            site.replays.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(runs) = &mut *site.runs.lock() {
            runs.push(run);
        }
        match result {
            Ok(value) => ended.map(|()| value).map_err(E::from),
            Err(error) => Err(error),
        }
    }

    /// What was captured, compiled and refused so far.
    pub fn explain(&self) -> Explanation {
        let site = self.place.site.read().clone();
        site.explain()
    }

    /// Runs a closure once, so that it is compiled before it is needed, and drops the result. Side effects
    /// stay: warming up a training step makes a step.
    pub fn warm_up<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<()> {
        self.run(body).map(drop)
    }

    /// Forgets all recordings and everything known about them. Calls in progress finish with what they have.
    pub fn reset(&self) {
        let old = std::mem::replace(&mut *self.place.site.write(), Site::new(self.place.options.clone()));
        old.retire();
    }

    /// What was recorded last.
    pub(crate) fn last_trace(&self) -> kiln_aot::Trace {
        let site = self.place.site.read().clone();
        analysis::trace(&site.trie, site.trie.len() as u32 - 1)
    }

    /// The options it was made with.
    pub fn options(&self) -> &Compile {
        &self.place.options
    }
}
