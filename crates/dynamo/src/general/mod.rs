//! Graphs for many sizes: what differs in sizes alone is one graph, with one template for a range of sizes.
//!
//! The first recording of a graph has a plan for its very sizes. When the same ops come with other sizes, the
//! numbers that changed are fitted to all recordings ([`shapes`]): some are free symbols, the others follow from
//! them. With that a [`template`] is found for the range that the sizes lie in, from which a segment for any
//! sizes in the range is made in a fraction of a millisecond, without a pass and without a new kernel.

mod draft;
mod fit;
mod shapes;
mod template;

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHasher};

use self::fit::Point;
use self::shapes::{Shapes, Slot};
use self::template::{Refusal, Template, contains};
use crate::backend::Backend;
use crate::explain::SizesInfo;
use crate::logs::{self, Log};
use crate::options::Mode;
use crate::region::Site;
use crate::segment::Segment;
use crate::sizes;
use crate::trie::{LiveSet, Trie};

/// A graph is generalised when it came in this many sizes: two may be all there are, a batch and the rest.
const ENOUGH: usize = 3;
/// So often rules are found to be wrong before they are given up.
const MOST_GUESSES: usize = 4;
/// Sizes that rules are fitted to, at most.
const MOST_RECORDINGS: usize = 12;

/// So many templates a graph has, at most: each was found in several goes through all passes.
const MOST_TEMPLATES: usize = 24;
/// So long templates are looked for and not found.
const MOST_LOST: Duration = Duration::from_secs(2);

/// So often there seems to be no template for any sizes before that is believed: in another range there may be.
const MOST_NEVERS: usize = 3;

/// What is known of a graph that came in several sizes.
struct SizedGraph {
    /// Where its first recording ends.
    first: u32,
    /// The sizes it came in.
    recordings: Vec<Vec<Slot>>,
    shapes: Option<Shapes>,
    guesses: usize,
    templates: Vec<Arc<Template>>,
    /// Points without a template, and why.
    refused: Vec<(Point, String)>,
    /// How long templates were looked for in vain.
    lost: Duration,
    /// How often there seemed to be none for any sizes.
    nevers: usize,
    /// The sizes that came last.
    latest: Vec<Slot>,
}

/// A segment for some sizes.
pub(crate) struct Resized {
    pub(crate) segment: Arc<Segment>,
    pub(crate) came: Came,
}

/// How often the sizes that a segment is for came.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) enum Came {
    /// They are new.
    New,
    /// A segment was made for them before.
    Again,
    /// They are those of the graph's first recording: what is new lies before a break.
    First,
}

/// The graphs of a region that came in several sizes.
#[derive(Default)]
pub(crate) struct Generals {
    graphs: FxHashMap<(u64, LiveSet), SizedGraph>,
    /// Why some sizes have plans of their own, in words.
    reasons: Vec<String>,
}

impl Generals {
    /// A segment for the recording that ends at `at` in a trie, if its graph is general. `first` is where the
    /// graph's first recording ends in the trie of such; `at_once`: two sizes are enough.
    pub(crate) fn segment(
        &mut self,
        site: &Site,
        (own, first): (&Trie, u32),
        (trie, at): (&Trie, u32),
        live: &LiveSet,
        at_once: bool,
    ) -> Option<Resized> {
        if !site.options.backend.is(Backend::Inductor) || site.options.mode == Mode::MaxAutotune {
            return None;
        }
        let slots = shapes::slots(trie, at);
        let known = self.graphs.entry((trie.node(at).form, live.clone())).or_insert_with(|| SizedGraph {
            first,
            recordings: vec![shapes::slots(own, first)],
            shapes: None,
            guesses: 0,
            templates: Vec::new(),
            refused: Vec::new(),
            lost: Duration::ZERO,
            nevers: 0,
            latest: Vec::new(),
        });
        // A form is a hash: whether it is the same graph is seen here.
        let (before, now) = (own.path(known.first), trie.path(at));
        let alike = |(a, b): (&u32, &u32)| sizes::alike(&own.node(*a).event, &trie.node(*b).event);
        if before.len() != now.len() || !before.iter().zip(&now).all(alike) {
            return None;
        }
        if slots == known.recordings[0]
            && let Some(segment) = own.segment(known.first, live)
        {
            return Some(Resized { segment: segment.clone(), came: Came::First });
        }
        let point = known.bind(slots, if at_once { 2 } else { ENOUGH })?;
        match known.at(site, own, live, &point) {
            Ok(made) => Some(made),
            Err(reason) => {
                if !self.reasons.contains(&reason) {
                    logs::write(Log::Dynamic, "sizes compiled separately", &|| reason.clone());
                    self.reasons.push(reason);
                }
                None
            }
        }
    }
}

impl Generals {
    /// What is known of the sizes of the graph whose first recording ends at a node.
    pub(crate) fn describe(&self, trie: &Trie, first: u32, live: &LiveSet) -> Option<SizesInfo> {
        let known = self.graphs.get(&(trie.node(first).form, live.clone()));
        known.filter(|known| known.first == first).map(|known| known.describe(trie))
    }
}

/// The sizes of a recording, as one number.
pub(crate) fn sizes_of(trie: &Trie, at: u32) -> u64 {
    let mut hash = FxHasher::default();
    shapes::slots(trie, at).iter().for_each(|slot| slot.value.hash(&mut hash));
    hash.finish()
}

impl SizedGraph {
    fn describe(&self, trie: &Trie) -> SizesInfo {
        let mut refused: Vec<String> = self.refused.iter().map(|(_, reason)| reason.clone()).collect();
        if self.guesses == MOST_GUESSES {
            refused.push("no rule fits the sizes".into());
        }
        refused.dedup();
        let names = shapes::names(trie, self.first);
        let (symbols, rules) = self.shapes.as_ref().map(|shapes| shapes.words(&names)).unwrap_or_default();
        SizesInfo {
            symbols,
            rules,
            ranges: self.templates.iter().map(|template| template.words()).collect(),
            made: self.templates.iter().map(|template| template.made()).sum(),
            refused,
        }
    }

    /// The symbols' values in a recording, if enough is known to say; the rules are found again if need be.
    fn bind(&mut self, slots: Vec<Slot>, enough: usize) -> Option<Point> {
        self.latest.clone_from(&slots);
        if let Some(point) = self.shapes.as_ref().and_then(|shapes| shapes.bind(&slots)) {
            return Some(point);
        }
        if !self.recordings.contains(&slots) && self.recordings.len() < MOST_RECORDINGS {
            self.recordings.push(slots.clone());
        }
        if self.recordings.len() < enough || self.guesses == MOST_GUESSES {
            return None;
        }
        self.guesses += 1;
        self.shapes = Shapes::fit(&self.recordings);
        self.templates.clear();
        self.refused.clear();
        self.lost = Duration::ZERO;
        self.shapes.as_ref()?.bind(&slots)
    }

    /// The segment for these values of the symbols.
    fn at(&mut self, site: &Site, own: &Trie, live: &LiveSet, point: &Point) -> Result<Resized, String> {
        if let Some(template) = self.templates.iter().find(|template| contains(&template.ranges, point)) {
            return template.segment(site, point);
        }
        if let Some((_, reason)) = self.refused.iter().find(|(other, _)| other == point) {
            return Err(reason.clone());
        }
        if self.lost > MOST_LOST || self.templates.len() >= MOST_TEMPLATES {
            return Err("too many sizes need plans of their own".into());
        }
        let begin = Instant::now();
        let shapes = self.shapes.as_ref().ok_or("nothing is known about the sizes")?;
        match Template::find(site, (own, self.first), live, shapes, point) {
            Ok(template) => {
                let template = Arc::new(template);
                logs::write(Log::Dynamic, "dynamic-shape plan", &|| template.words());
                self.templates.push(template.clone());
                template.segment(site, point)
            }
            Err(refusal) => {
                self.lost += begin.elapsed();
                let (Refusal::Here(reason) | Refusal::Never(reason)) = &refusal;
                self.refused.push((point.clone(), reason.clone()));
                // Where rounding is in the way (every second pixel), there may be rules for multiples.
                let coarse =
                    shapes.coarser(&self.recordings).filter(|_| matches!(refusal, Refusal::Never(_)));
                match coarse.and_then(|shapes| Some((shapes.bind(&self.latest)?, shapes))) {
                    Some((point, shapes)) => {
                        self.shapes = Some(shapes);
                        self.templates.clear();
                        self.at(site, own, live, &point)
                    }
                    None => {
                        self.nevers += usize::from(matches!(refusal, Refusal::Never(_)));
                        if self.nevers == MOST_NEVERS {
                            self.lost = Duration::MAX;
                        }
                        Err(reason.clone())
                    }
                }
            }
        }
    }
}
