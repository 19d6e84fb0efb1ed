//! Templates: a segment whose numbers are functions of the sizes that change, ready to be made for any of them.
//!
//! A template is found by trying. The recording is taken through all passes with several sizes instead of its
//! own; where what comes out is the same but for numbers, and each number is a polynomial of the sizes at all of
//! these points, the polynomials stand for the numbers from then on. The points are the corners of a range of
//! sizes and some inside that differ in what divides them. What a pass decides by comparing sizes (is this one
//! smaller than that?) comes out the same everywhere between corners at which it comes out the same, where the
//! difference is linear in each size; what it decides because one size divides another shows as another form at
//! some point, and only points of one form make a template. A template serves the sizes within its range and no
//! others.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;

use kiln_inductor::Numbers;
use kiln_ir::{Fault, planted};
use kiln_runtime::Callable;

use super::draft::{Draft, DraftForm, Drawn, recording_with};
use super::fit::{Fitter, Point, Polynomial};
use super::shapes::Shapes;
use super::{Came, Resized};
use crate::analysis::Analysis;
use crate::kernels;
use crate::region::Site;
use crate::segment::{Code, Execution, Info, Segment};
use crate::trie::{LiveSet, Trie};
use crate::why::NotCompiled;

/// Where ranges of sizes meet.
const BORDERS: [i64; 9] = [3, 13, 61, 251, 1021, 4093, 16381, 65521, 1_048_573];

/// Where a range as wide as that has no template, narrower ones are tried, from a size divided by the first so many
/// hundredths to the size times the second: upwards first, since what changes mostly grows.
const NARROWER: [(i64, i64); 4] = [(100, 135), (160, 160), (100, 112), (115, 105)];

/// Segments made from a template that are kept.
const MOST_KEPT: usize = 32;

/// By symbol, the smallest and the largest value.
pub(super) type Ranges = SmallVec<[(i64, i64); 3]>;

/// The range that a size lies in; `None` if it is too small or too large for any.
fn range(size: i64) -> Option<(i64, i64)> {
    let after = BORDERS.iter().position(|border| *border > size).filter(|after| *after > 0)?;
    Some((BORDERS[after - 1], BORDERS[after]))
}

/// The ranges that are tried for a point, wide ones first.
fn tries(point: &Point) -> Vec<Ranges> {
    let Some(wide) = point.iter().map(|&size| range(size)).collect::<Option<Ranges>>() else {
        return Vec::new();
    };
    let narrower = |(down, up): (i64, i64)| -> Ranges {
        let narrow = |(&size, &(from, to)): (&i64, &(i64, i64))| {
            let (low, high) = ((size * 100 / down).max(from), (size * up / 100).min(to));
            let low = (from..=low).rev().find(|n| is_prime(*n)).unwrap_or(low);
            (low, (size..=high).rev().find(|n| is_prime(*n)).unwrap_or(high))
        };
        point.iter().zip(&wide).map(narrow).collect()
    };
    let mut tries = vec![wide.clone()];
    tries.extend(NARROWER.into_iter().map(narrower));
    tries.dedup();
    tries
}

fn is_prime(n: i64) -> bool {
    n > 1 && (2..).take_while(|d| d * d <= n).all(|d| n % d != 0)
}

pub(super) fn contains(ranges: &Ranges, point: &Point) -> bool {
    ranges.iter().zip(point).all(|((from, to), size)| (*from..=*to).contains(size))
}

/// The points at which a recording is tried: all corners, then points inside, odd and even.
fn points(ranges: &Ranges) -> Vec<Point> {
    let corner = |corner: usize| -> Point {
        let end = |(s, (from, to)): (usize, &(i64, i64))| if corner >> s & 1 == 0 { *from } else { *to };
        ranges.iter().enumerate().map(end).collect()
    };
    let mut points: Vec<Point> = (0..1 << ranges.len()).map(corner).collect();
    let inside: Vec<[i64; 4]> = ranges.iter().map(|&(from, to)| inside(from, to)).collect();
    let count = [4, 6, 5][ranges.len() - 1];
    // Neighbours in one size are apart in the others.
    for i in 0..count {
        let point: Point =
            inside.iter().enumerate().map(|(s, inside)| inside[(i + s * (i / 4 + i + 1)) % 4]).collect();
        if !points.contains(&point) {
            points.push(point);
        }
    }
    // Primes alone would say that n − 1 can always be halved.
    let round: Vec<[i64; 2]> = ranges.iter().map(|&(from, to)| round(from, to)).collect();
    let masks = 1..1usize << ranges.len();
    let some_round =
        masks.filter(|mask| mask.count_ones() == 1 || mask.count_ones() as usize == ranges.len());
    for (i, mask) in some_round.chain(std::iter::repeat_n(1, usize::from(ranges.len() == 1))).enumerate() {
        let size = |s: usize| if mask >> s & 1 == 1 { round[s][i % 2] } else { inside[s][(i + s) % 4] };
        let point: Point = (0..ranges.len()).map(size).collect();
        if !points.contains(&point) {
            points.push(point);
        }
    }
    points
}

/// Two sizes inside a range that two and three divide, and little else; even ones where there are none.
fn round(from: i64, to: i64) -> [i64; 2] {
    [1, 2].map(|i| {
        let (at, next) = (from + (to - from) * i / 3, from + (to - from) * (i + 1) / 3);
        let even = (at..next).filter(|n| n % 2 == 0);
        even.clone().find(|n| n % 12 == 6).or(even.min()).unwrap_or(at)
    })
}

/// Whether sizes with every remainder by two and by three are among these points, and with several by the next
/// primes: what was decided at all of them was not decided by what divides a size. A square that has one remainder
/// at three of them has it everywhere.
fn is_mixed<'a>(points: impl Iterator<Item = &'a Point> + Clone, ranges: &Ranges) -> bool {
    let remainders = |by: i64, of: &dyn Fn(&Point) -> i64| {
        let mut seen = [false; 13];
        points.clone().for_each(|point| seen[(of(point) % by) as usize] = true);
        seen.into_iter().filter(|seen| *seen).count() as i64
    };
    let changes: SmallVec<[usize; 3]> = (0..ranges.len()).filter(|&s| ranges[s].0 < ranges[s].1).collect();
    let each = changes.iter().all(|&s| {
        let sizes = ranges[s].1 - ranges[s].0 + 1;
        [(2, 2), (3, 3), (5, 3), (7, 3), (11, 3), (13, 3)]
            .iter()
            .all(|&(by, want)| remainders(by, &|p| p[s]) >= sizes.min(want))
    });
    // Of several sizes, also their sums.
    let pairs = changes.iter().flat_map(|&a| changes.iter().map(move |&b| (a, b))).filter(|(a, b)| a < b);
    each && { pairs }.all(|(a, b)| remainders(2, &|p| p[a] + p[b]) == 2)
}

/// Four sizes inside a range, primes where there are any.
fn inside(from: i64, to: i64) -> [i64; 4] {
    [1, 2, 3, 4].map(|i| {
        let at = from + (to - from) * i / 5;
        let next = from + (to - from) * (i + 1) / 5;
        (at..next.min(to)).find(|n| is_prime(*n)).unwrap_or(at)
    })
}

/// Why there is no template.
pub(super) enum Refusal {
    /// There may be one for a narrower range.
    Here(String),
    /// There is none for any sizes.
    Never(String),
}

/// How a number follows from the symbols.
enum Rule {
    Int(Polynomial),
    /// times · ⌈of / by⌉: a long reduction goes in chunks.
    Chunks {
        of: Polynomial,
        by: i64,
        times: i64,
    },
    /// A float that is a whole number.
    Whole(Polynomial),
    /// One divided by a whole number.
    Reciprocal(Polynomial),
}

#[derive(Copy, Clone, PartialEq)]
enum Number {
    Int(i64),
    Float(f64),
}

/// Writes numbers down.
#[derive(Default)]
struct Collect(Vec<Number>);

impl Numbers for Collect {
    fn int(&mut self, number: i64) -> i64 {
        self.0.push(Number::Int(number));
        number
    }
    fn float(&mut self, number: f64) -> f64 {
        self.0.push(Number::Float(number));
        number
    }
}

/// Puts what the rules say in the place of numbers.
struct Exchange<'a> {
    /// Those that change, by position.
    rules: std::iter::Peekable<std::slice::Iter<'a, (usize, Rule)>>,
    position: usize,
    point: &'a Point,
    /// A number grew too large.
    failed: bool,
}

impl Exchange<'_> {
    fn next(&mut self) -> Option<&Rule> {
        let position = self.position;
        self.position += 1;
        self.rules.next_if(|(at, _)| *at == position).map(|(_, rule)| rule)
    }
}

impl Numbers for Exchange<'_> {
    fn int(&mut self, number: i64) -> i64 {
        let point = self.point;
        let value = match self.next() {
            None => return number,
            Some(Rule::Int(rule)) => rule.at(point),
            Some(Rule::Chunks { of, by, times }) => chunks(of, *by, *times, point),
            Some(Rule::Whole(_) | Rule::Reciprocal(_)) => None,
        };
        self.failed |= value.is_none();
        value.unwrap_or(number)
    }

    fn float(&mut self, number: f64) -> f64 {
        let point = self.point;
        let value = match self.next() {
            None => return number,
            Some(Rule::Whole(_)) if planted(Fault::CountFrozen) => Some(number),
            Some(Rule::Whole(rule)) => rule.at(point).map(|value| value as f64),
            Some(Rule::Reciprocal(rule)) => rule.at(point).map(|value| 1.0 / value as f64),
            Some(Rule::Int(_) | Rule::Chunks { .. }) => None,
        };
        self.failed |= value.is_none();
        value.unwrap_or(number)
    }
}

fn chunks(of: &Polynomial, by: i64, times: i64, point: &Point) -> Option<i64> {
    let of = of.at(point)?;
    Some((of.checked_add(by - 1)? / by) * times)
}

/// See the [module](self).
pub(crate) struct Template {
    draft: Draft,
    /// By position among the draft's numbers, those that change.
    rules: Vec<(usize, Rule)>,
    pub(super) ranges: Ranges,
    /// By graph, its kernels.
    kernels: Vec<Vec<Callable>>,
    tape: Analysis,
    made: AtomicUsize,
    kept: Mutex<Vec<(Point, Arc<Segment>)>>,
}

impl Template {
    /// A template for the recording that ends at a node, for this point and those around it.
    pub(super) fn find(
        site: &Site,
        recording: (&Trie, u32),
        live: &LiveSet,
        shapes: &Shapes,
        point: &Point,
    ) -> Result<Template, Refusal> {
        let mut refusal = "a size is very small or very large".to_string();
        for ranges in tries(point) {
            match Template::within(site, recording, live, shapes, &ranges, point) {
                Ok(template) if contains(&template.ranges, point) => return Ok(template),
                Ok(_) => refusal = "one size divides another".into(),
                Err(Refusal::Here(reason)) => refusal = reason,
                Err(never) => return Err(never),
            }
        }
        Err(Refusal::Here(refusal))
    }

    /// A template for points around this one within these ranges.
    fn within(
        site: &Site,
        (trie, at): (&Trie, u32),
        live: &LiveSet,
        shapes: &Shapes,
        ranges: &Ranges,
        around: &Point,
    ) -> Result<Template, Refusal> {
        let mut points = points(ranges);
        points.sort();
        let tried = points.len();
        let mut drafts: Vec<(Point, Draft, DraftForm)> = Vec::new();
        let mut refusal = String::new();
        for point in points {
            let draft =
                shapes.at(&point).ok_or_else(|| "a size would be 0 or 1".to_string()).and_then(|slots| {
                    let (trie, at) = recording_with(trie, at, &slots)?;
                    Draft::of(site, &trie, at, live)
                });
            match draft {
                Ok(draft) => {
                    let form = draft.form();
                    drafts.push((point, draft, form));
                }
                Err(reason) => refusal = reason,
            }
        }
        // The form that the nearest have; with one size, only those that have it all the way.
        let distance = |point: &Point| -> f64 {
            point.iter().zip(around).map(|(a, b)| (*a as f64 / *b as f64).ln().abs()).sum()
        };
        let nearest = (0..drafts.len())
            .min_by(|&a, &b| distance(&drafts[a].0).total_cmp(&distance(&drafts[b].0)))
            .ok_or_else(|| Refusal::Here(format!("no other sizes to try: {refusal}")))?;
        let is_like = |i: &usize| drafts[*i].2 == drafts[nearest].2;
        let alike: Vec<usize> = match around.len() {
            1 => {
                let before = (0..nearest).rev().take_while(is_like);
                let mut alike: Vec<usize> =
                    before.chain((nearest..drafts.len()).take_while(is_like)).collect();
                alike.sort_unstable();
                alike
            }
            _ => (0..drafts.len()).filter(is_like).collect(),
        };
        let at_ends =
            |i: &usize| drafts[*i].0.iter().zip(ranges).all(|(size, (a, b))| size == a || size == b);
        let corners = alike.iter().copied().filter(|i| at_ends(i)).count();
        let whole = around.len() == 1 || corners == 1 << around.len();
        if alike.len() < [4, 6, 9][around.len() - 1] || !whole {
            return Err(Refusal::Here("other sizes are computed differently".into()));
        }
        let mut number = 0..;
        drafts.retain(|_| number.next().is_some_and(|i| alike.contains(&i)));
        let mut kept = drafts;
        let mut ranges: Ranges = SmallVec::new();
        for s in 0..shapes.symbols() {
            let values = || kept.iter().map(|(point, ..)| point[s]);
            ranges.push((values().min().unwrap_or(0), values().max().unwrap_or(0)));
        }
        if !is_mixed(kept.iter().map(|(point, ..)| point), &ranges) {
            return Err(Refusal::Here("the plan depends on what divides a size".into()));
        }
        let all = kept.len() == tried;
        let never = |reason| if all { Refusal::Never(reason) } else { Refusal::Here(reason) };
        let rules = rules(&mut kept).map_err(never)?;
        let (_, draft, _) = kept.swap_remove(0);
        let build = site.options.settings.build();
        let never = |reason: String| Refusal::Never(NotCompiled::Compiler(reason).to_string());
        let mut kernels = Vec::new();
        for drawn in draft.made.codes() {
            let loading = kernels::load(drawn.general.code(), build).map_err(never)?;
            if let Some((_, reason)) = loading.refused.first() {
                return Err(never(reason.clone()));
            }
            kernels.push(loading.find(drawn.general.code()).map_err(never)?);
        }
        let tape = Analysis::of(trie, at);
        let kept = Mutex::new(Vec::new());
        Ok(Template {
            draft: draft.without_text(),
            rules,
            ranges,
            kernels,
            tape,
            made: AtomicUsize::new(0),
            kept,
        })
    }

    /// The segment for these sizes, made now or before.
    pub(super) fn segment(&self, site: &Site, point: &Point) -> Result<Resized, String> {
        let mut kept = self.kept.lock();
        if let Some(i) = kept.iter().position(|(other, _)| other == point) {
            let found = kept.remove(i);
            kept.push(found.clone());
            return Ok(Resized { segment: found.1, came: Came::Again });
        }
        let segment = Arc::new(self.make(site, point)?);
        self.made.fetch_add(1, Ordering::Relaxed);
        if kept.len() == MOST_KEPT {
            kept.remove(0);
        }
        kept.push((point.clone(), segment.clone()));
        Ok(Resized { segment, came: Came::New })
    }

    /// How many sizes segments were made for.
    pub(super) fn made(&self) -> usize {
        self.made.load(Ordering::Relaxed)
    }

    /// The sizes it is for: `13 ≤ s0 ≤ 61`.
    pub(super) fn words(&self) -> String {
        let words = |(s, (from, to)): (usize, &(i64, i64))| format!("{from} ≤ s{s} ≤ {to}");
        self.ranges.iter().enumerate().map(words).collect::<Vec<_>>().join(", ")
    }

    fn make(&self, site: &Site, point: &Point) -> Result<Segment, String> {
        let mut draft = self.draft.clone();
        let mut exchange =
            Exchange { rules: self.rules.iter().peekable(), position: 0, point, failed: false };
        draft.each_number(&mut exchange);
        if exchange.failed || exchange.rules.peek().is_some() {
            return Err("a size is too large".into());
        }
        draft.settle();
        let mode = site.options.mode;
        let mut info = Info::default();
        info.graph.nodes = self.draft.edges.inputs.len();
        let mut kernels = self.kernels.iter();
        let bind = |drawn: Drawn| {
            let kernels = kernels.next().ok_or("a draft without kernels")?;
            info.graph.arena_bytes += drawn.general.plan().arena_bytes;
            info.graph.kernels += kernels.len();
            kernels::bind(&drawn.outline, drawn.general.plan(), kernels, mode).map(Code::Program)
        };
        let made = draft.made.map(bind)?;
        let execution = Execution::compiled(&self.tape, made, draft.edges);
        Ok(Segment { execution, info, alike: Vec::new() })
    }
}

/// How each number that is not the same in all drafts follows from their points.
fn rules(drafts: &mut [(Point, Draft, DraftForm)]) -> Result<Vec<(usize, Rule)>, String> {
    let fitter = Fitter::new(drafts.iter().map(|(point, ..)| point.clone()).collect());
    let mut numbers: Vec<Vec<Number>> = Vec::with_capacity(drafts.len());
    for (_, draft, _) in drafts.iter_mut() {
        let mut collect = Collect::default();
        draft.each_number(&mut collect);
        numbers.push(collect.0);
    }
    let mut rules: Vec<(usize, Rule)> = Vec::new();
    // Those that no polynomial fits: parts of long reductions.
    let mut left: Vec<(usize, Vec<i64>)> = Vec::new();
    let mut lengths: Vec<Polynomial> = Vec::new();
    for position in 0..numbers[0].len() {
        let values: Vec<Number> = numbers.iter().map(|numbers| numbers[position]).collect();
        if values.iter().all(|value| *value == values[0]) {
            continue;
        }
        let ints: Option<Vec<i64>> =
            values.iter().map(|v| if let Number::Int(n) = v { Some(*n) } else { None }).collect();
        if let Some(ints) = ints {
            match fitter.fit(&ints) {
                Some(rule) => {
                    if !lengths.contains(&rule) {
                        lengths.push(rule.clone());
                    }
                    rules.push((position, Rule::Int(rule)));
                }
                None => left.push((position, ints)),
            }
            continue;
        }
        let floats = |of: &dyn Fn(f64) -> f64| -> Option<Vec<i64>> {
            let whole = |value: &Number| match value {
                Number::Float(x) if of(*x).abs() < 9e15 && of(of(*x).round()) == *x => {
                    Some(of(*x).round() as i64)
                }
                _ => None,
            };
            values.iter().map(whole).collect()
        };
        let rule = match (floats(&|x| x), floats(&|x| 1.0 / x)) {
            (Some(whole), _) => fitter.fit(&whole).map(Rule::Whole),
            (None, Some(reciprocal)) => fitter.fit(&reciprocal).map(Rule::Reciprocal),
            (None, None) => None,
        };
        rules.push((position, rule.ok_or("a number in the program is not a function of its sizes")?));
    }
    let by: Vec<i64> = drafts[0].1.made.codes().flat_map(|drawn| drawn.general.chunks()).collect();
    for (position, values) in left {
        let found = lengths.iter().find_map(|of| {
            by.iter().find_map(|&by| {
                let times = values[0].checked_div(chunks(of, by, 1, &drafts[0].0)?)?;
                let holds = times > 0 && fitter.holds(|point| chunks(of, by, times, point), &values);
                holds.then(|| Rule::Chunks { of: of.clone(), by, times })
            })
        });
        let found = found.ok_or_else(|| format!("no formula fits a size: {values:?}"))?;
        rules.push((position, found));
    }
    rules.sort_by_key(|(position, _)| *position);
    Ok(rules)
}
