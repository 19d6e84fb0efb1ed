//! Timing: [`Timer`] in the manner of `torch.utils.benchmark`, and [`compare`], the one way Kiln compares
//! anything with anything.
//!
//! A machine's speed drifts (frequency, neighbours, page placement), so two numbers measured one after the
//! other differ even where the code does not. [`compare`] therefore lets its contestants take turns, in short
//! blocks and alternating order; what it reports is medians with their spread, and ratios taken round by
//! round, in which the drift cancels.
//!
//! ```
//! use std::time::Duration;
//! use kiln::benchmark::{Rounds, Timer, compare};
//!
//! let data = vec![1.0f32; 4096];
//! let sum = |stride: usize| std::hint::black_box(data.iter().step_by(stride).sum::<f32>());
//!
//! let alone = Timer::new("sum", || _ = sum(1)).blocked_autorange(Duration::from_millis(5));
//! assert!(alone.median() > 0.0);
//!
//! let (mut all, mut some) = (|| _ = sum(1), || _ = sum(64));
//! let rounds = Rounds { settle: Duration::ZERO, min_time: Duration::from_millis(5), ..Rounds::default() };
//! let [all, some] = &compare(&mut [("all", &mut all), ("some", &mut some)], rounds)[..] else { panic!() };
//! println!("{all}\n{some}\nfaster by {}", all.ratio_to(some));
//! ```

use std::fmt;
use std::time::{Duration, Instant};

/// Shorter blocks than this would measure the clock.
const SHORTEST_BLOCK: Duration = Duration::from_millis(1);
/// More calls than this in a block are pointless even for the shortest function.
const MOST_CALLS: usize = 1 << 24;

/// Times one function.
pub struct Timer<'f> {
    label: String,
    function: Box<dyn FnMut() + 'f>,
}

impl fmt::Debug for Timer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Timer({})", self.label)
    }
}

impl<'f> Timer<'f> {
    /// A timer for `function`; the label names it in what is printed.
    pub fn new(label: impl Into<String>, function: impl FnMut() + 'f) -> Timer<'f> {
        Timer { label: label.into(), function: Box::new(function) }
    }

    /// One block of `calls` calls.
    pub fn timeit(&mut self, calls: usize) -> Measurement {
        let calls = calls.max(1);
        let time = self.block(calls);
        Measurement { label: self.label.clone(), calls_per_block: calls, times: vec![time] }
    }

    /// Blocks of equal length until `min_run_time` has passed, at least three.
    ///
    /// The number of calls in a block grows until one takes a millisecond: then reading the clock costs
    /// nothing that matters, and short functions are averaged over many calls.
    pub fn blocked_autorange(&mut self, min_run_time: Duration) -> Measurement {
        let calls = self.calls_for(SHORTEST_BLOCK);
        let mut times = Vec::new();
        let start = Instant::now();
        while times.len() < 3 || start.elapsed() < min_run_time {
            times.push(self.block(calls));
        }
        Measurement { label: self.label.clone(), calls_per_block: calls, times }
    }

    /// Seconds per call over one block.
    fn block(&mut self, calls: usize) -> f64 {
        let start = Instant::now();
        for _ in 0..calls {
            (self.function)();
        }
        start.elapsed().as_secs_f64() / calls as f64
    }

    /// Calls that nobody times.
    fn run_for(&mut self, time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            (self.function)();
        }
    }

    /// How many calls take `time`.
    fn calls_for(&mut self, time: Duration) -> usize {
        let wanted = time.as_secs_f64();
        let mut calls = 1;
        loop {
            let took = self.block(calls) * calls as f64;
            if took >= wanted || calls >= MOST_CALLS {
                return calls;
            }
            // Towards the goal at once, but no further than tenfold: the first calls may be slow ones.
            let factor = if took > 0.0 { (wanted / took * 1.2).clamp(2.0, 10.0) } else { 10.0 };
            calls = (calls as f64 * factor) as usize;
        }
    }
}

/// How long and how often [`compare`] lets its contestants run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rounds {
    /// Calls of each contestant before anything is timed.
    pub warm_up: usize,
    /// Untimed calls before each block, for this long: they bring the contestant's data back into the caches
    /// after the others' turn. A large shared cache needs a dozen passes to take a working set in again; with
    /// fewer each contestant would pay for the others' memory.
    pub settle: Duration,
    /// Rounds at least.
    pub min_rounds: usize,
    /// Rounds at most.
    pub max_rounds: usize,
    /// All rounds together take this long at least, within `max_rounds`.
    pub min_time: Duration,
    /// Length of one block, rounded up to whole calls.
    pub block: Duration,
}

impl Default for Rounds {
    fn default() -> Rounds {
        Rounds {
            warm_up: 5,
            settle: Duration::from_millis(80),
            min_rounds: 11,
            max_rounds: 1001,
            min_time: Duration::from_secs(3),
            block: Duration::from_millis(20),
        }
    }
}

/// A contestant of [`compare`]: its label and the function.
pub type Contestant<'a> = (&'a str, &'a mut dyn FnMut());

/// Times functions against each other in paired, interleaved rounds: every contestant runs one block in
/// every round, and each round turns the order round.
///
/// The results are in the contestants' order; entry `i` of each one's [`times`](Measurement::times) is from
/// round `i`, so that [`ratio_to`](Measurement::ratio_to) compares what ran side by side.
pub fn compare(contestants: &mut [Contestant<'_>], rounds: Rounds) -> Vec<Measurement> {
    let mut timers: Vec<Timer<'_>> =
        contestants.iter_mut().map(|(label, function)| Timer::new(*label, &mut **function)).collect();
    let calls: Vec<usize> = timers
        .iter_mut()
        .map(|timer| {
            (0..rounds.warm_up).for_each(|_| (timer.function)());
            timer.calls_for(rounds.block.max(SHORTEST_BLOCK))
        })
        .collect();
    let mut times = vec![Vec::new(); timers.len()];
    let start = Instant::now();
    let mut round = 0;
    let enough = |round: usize| {
        round >= rounds.min_rounds.max(1)
            && (start.elapsed() >= rounds.min_time || round >= rounds.max_rounds)
    };
    while !timers.is_empty() && !enough(round) {
        for turn in 0..timers.len() {
            let index = if round % 2 == 0 { turn } else { timers.len() - 1 - turn };
            let timer = &mut timers[index];
            timer.run_for(rounds.settle);
            times[index].push(timer.block(calls[index]));
        }
        round += 1;
    }
    let labels = timers.into_iter().map(|timer| timer.label);
    let parts = labels.zip(calls).zip(times);
    parts.map(|((label, calls_per_block), times)| Measurement { label, calls_per_block, times }).collect()
}

/// What timing a function gave: the time of one call, block by block.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// What was timed.
    pub label: String,
    /// Calls in each block.
    pub calls_per_block: usize,
    /// Seconds per call, one entry for each block, in the order they ran.
    pub times: Vec<f64>,
}

impl Measurement {
    /// Seconds per call, on average.
    pub fn mean(&self) -> f64 {
        self.times.iter().sum::<f64>() / self.times.len().max(1) as f64
    }

    /// Seconds per call, in the median block.
    pub fn median(&self) -> f64 {
        self.spread().median
    }

    /// Median and quartiles of the seconds per call.
    pub fn spread(&self) -> Spread {
        Spread::of(&self.times)
    }

    /// The interquartile range, in seconds: half of all blocks lie in a range of this width.
    pub fn iqr(&self) -> f64 {
        self.spread().iqr()
    }

    /// This one's times over the other's, round by round, for two results of one [`compare`].
    ///
    /// Above 1 where this one is slower.
    pub fn ratio_to(&self, other: &Measurement) -> Spread {
        let ratios: Vec<f64> =
            self.times.iter().zip(&other.times).map(|(mine, theirs)| mine / theirs).collect();
        Spread::of(&ratios)
    }
}

impl fmt::Display for Measurement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |seconds: f64| seconds * 1e6;
        let (blocks, calls) = (self.times.len(), self.calls_per_block);
        write!(f, "{}: median {:.1} us, IQR {:.1} us, ", self.label, us(self.median()), us(self.iqr()))?;
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        write!(f, "mean {:.1} us ({blocks} block{} of ", us(self.mean()), plural(blocks))?;
        write!(f, "{calls} call{})", plural(calls))
    }
}

/// A median with the quartiles around it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// A quarter of the values lie below.
    pub low: f64,
    /// Half of the values lie below.
    pub median: f64,
    /// A quarter of the values lie above.
    pub high: f64,
}

impl Spread {
    /// Of some values, interpolated between neighbours; NaN where there are none.
    pub fn of(values: &[f64]) -> Spread {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let quantile = |q: f64| {
            let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
            let place = q * last as f64;
            let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
            below + (above - below) * place.fract()
        };
        Spread { low: quantile(0.25), median: quantile(0.5), high: quantile(0.75) }
    }

    /// The width of the middle half.
    pub fn iqr(&self) -> f64 {
        self.high - self.low
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(2);
        write!(f, "{:.digits$} ({:.digits$} to {:.digits$})", self.median, self.low, self.high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    fn spin(time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            std::hint::spin_loop();
        }
    }

    fn short() -> Rounds {
        Rounds {
            settle: Duration::from_millis(1),
            min_time: Duration::from_millis(20),
            block: Duration::from_millis(1),
            ..Rounds::default()
        }
    }

    #[test]
    fn quartiles() {
        assert_eq!(Spread::of(&[5.0, 1.0, 4.0, 2.0, 3.0]), Spread { low: 2.0, median: 3.0, high: 4.0 });
        assert_eq!(Spread::of(&[1.0, 2.0]).median, 1.5);
        assert_eq!(Spread::of(&[7.0]).iqr(), 0.0);
        assert!(Spread::of(&[]).median.is_nan());
        assert_eq!(format!("{:.1}", Spread::of(&[1.0, 2.0, 3.0])), "2.0 (1.5 to 2.5)");
    }

    #[test]
    fn blocks_grow_to_a_millisecond() {
        let calls = Cell::new(0usize);
        let measured =
            Timer::new("cheap", || calls.set(calls.get() + 1)).blocked_autorange(Duration::from_millis(20));
        assert!(measured.calls_per_block > 1, "{measured}");
        assert!(calls.get() >= measured.calls_per_block * measured.times.len());
        assert!(measured.median() < 1e-5, "{measured}");
    }

    #[test]
    fn a_slow_function_is_called_one_by_one() {
        let measured =
            Timer::new("slow", || spin(Duration::from_millis(2))).blocked_autorange(Duration::ZERO);
        assert_eq!((measured.calls_per_block, measured.times.len()), (1, 3));
        assert!(measured.median() >= 2e-3 && measured.mean() >= 2e-3, "{measured}");
        assert!(measured.to_string().starts_with("slow: median "), "{measured}");
        assert!(measured.to_string().ends_with("(3 blocks of 1 call)"), "{measured}");
    }

    #[test]
    fn contestants_take_turns() {
        let order = RefCell::new(String::new());
        let run = |name: char| {
            order.borrow_mut().push(name);
            spin(Duration::from_millis(1));
        };
        let (mut a, mut b) = (|| run('a'), || run('b'));
        let rounds =
            Rounds { warm_up: 0, settle: Duration::ZERO, min_rounds: 4, min_time: Duration::ZERO, ..short() };
        let results = compare(&mut [("a", &mut a), ("b", &mut b)], rounds);
        // One call of each finds the length of a block, then the order alternates.
        assert_eq!(*order.borrow(), "ab".to_owned() + "ab" + "ba" + "ab" + "ba");
        assert_eq!(
            results.iter().map(|m| (m.label.as_str(), m.times.len())).collect::<Vec<_>>(),
            [("a", 4), ("b", 4)]
        );
    }

    #[test]
    fn ratios_are_paired() {
        // A drift that hits both contestants of a round alike leaves no trace in the ratio.
        let times = |factor: f64| (1..=9).map(|round| f64::from(round) * factor).collect();
        let [one, two] =
            [1.0, 2.0].map(|f| Measurement { label: "x".into(), calls_per_block: 1, times: times(f) });
        assert_eq!(two.ratio_to(&one), Spread { low: 2.0, median: 2.0, high: 2.0 });
        assert!(one.iqr() > 0.0);
    }

    #[test]
    fn twice_the_work_is_twice_the_time() {
        let (mut one, mut two) = (|| spin(Duration::from_micros(300)), || spin(Duration::from_micros(600)));
        // On a busy machine whole comparisons may be somebody else's time.
        let mut ratios = (0..20).map(|_| {
            let results = compare(&mut [("one", &mut one), ("two", &mut two)], short());
            results[1].ratio_to(&results[0]).median
        });
        assert!(ratios.any(|ratio| (1.5..2.7).contains(&ratio)));
    }

    #[test]
    fn nobody_to_compare() {
        assert!(compare(&mut [], short()).is_empty());
    }
}
