//! [`Meter`]: how far a loop is, how fast it goes and how long it will take, in words.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

/// Counts steps and what they went through (samples, tokens), and shows the rate of the last few seconds, so that a
/// first step which compiles does not count for ever: `120/500, 12.3 k tokens/s, 0:31 left`.
#[derive(Clone, Debug)]
pub struct Meter {
    unit: String,
    total: Option<u64>,
    steps: u64,
    start: Instant,
    /// When each of the last steps ended, with all steps and items until then.
    recent: VecDeque<(Instant, u64, u64)>,
    items: u64,
}

/// The rate is that of so long.
const WINDOW: Duration = Duration::from_secs(5);

impl Meter {
    /// Counts from now on; `unit` is what a step goes through.
    pub fn new(unit: impl Into<String>) -> Meter {
        let start = Instant::now();
        Meter { unit: unit.into(), total: None, steps: 0, start, recent: VecDeque::new(), items: 0 }
    }

    /// How many steps there will be.
    pub fn steps(mut self, total: u64) -> Meter {
        self.total = Some(total);
        self
    }

    /// The same for a meter that is running.
    pub fn set_steps(&mut self, total: u64) {
        self.total = Some(total);
    }

    /// Starts with steps that were done before: after a checkpoint was loaded.
    pub fn done_before(mut self, steps: u64) -> Meter {
        self.steps = steps;
        self
    }

    /// Counts a finished step over this many items.
    pub fn step(&mut self, items: u64) {
        self.step_at(items, Instant::now());
    }

    fn step_at(&mut self, items: u64, now: Instant) {
        self.steps += 1;
        self.items += items;
        self.recent.push_back((now, self.steps, self.items));
        while self.recent.len() > 2 && now.duration_since(self.recent[1].0) > WINDOW {
            self.recent.pop_front();
        }
    }

    /// Steps so far, those before a checkpoint included.
    pub fn done(&self) -> u64 {
        self.steps
    }

    /// Items so far.
    pub fn items(&self) -> u64 {
        self.items
    }

    /// Time since the meter was made.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Items a second, of late. Two steps must be done to tell.
    pub fn rate(&self) -> Option<f64> {
        self.per_second(|(_, _, items)| *items)
    }

    /// Steps a second, of late.
    pub fn step_rate(&self) -> Option<f64> {
        self.per_second(|(_, steps, _)| *steps)
    }

    fn per_second(&self, count: impl Fn(&(Instant, u64, u64)) -> u64) -> Option<f64> {
        let (first, last) = (self.recent.front()?, self.recent.back()?);
        let seconds = last.0.duration_since(first.0).as_secs_f64();
        (seconds > 0.0).then(|| (count(last) - count(first)) as f64 / seconds)
    }

    /// How long the rest will take, if the number of steps is known.
    pub fn left(&self) -> Option<Duration> {
        let rest = self.total?.saturating_sub(self.steps) as f64;
        Duration::try_from_secs_f64(rest / self.step_rate()?).ok()
    }
}

impl fmt::Display for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.steps)?;
        if let Some(total) = self.total {
            write!(f, "/{total}")?;
        }
        if let Some(rate) = self.rate() {
            let (number, prefix) = match rate {
                r if r >= 1e6 => (r / 1e6, "M "),
                r if r >= 1e3 => (r / 1e3, "k "),
                r => (r, ""),
            };
            write!(f, ", {number:.1} {prefix}{}/s", self.unit)?;
        }
        if let Some(left) = self.left().filter(|left| !left.is_zero()) {
            let seconds = left.as_secs_f64().ceil() as u64;
            write!(f, ", {}:{:02} left", seconds / 60, seconds % 60)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_late() {
        let mut meter = Meter::new("tokens").steps(100);
        assert_eq!(meter.to_string(), "0/100");
        // A step that compiles, then quick ones.
        let mut now = meter.start + Duration::from_secs(60);
        meter.step_at(512, now);
        assert_eq!(meter.to_string(), "1/100");
        for _ in 0..9 {
            now += Duration::from_millis(500);
            meter.step_at(512, now);
        }
        assert_eq!(meter.to_string(), "10/100, 1.0 k tokens/s, 0:45 left");
        // The loop becomes slower, and the meter notices.
        for _ in 0..20 {
            now += Duration::from_secs(2);
            meter.step_at(512, now);
        }
        assert_eq!(meter.to_string(), "30/100, 256.0 tokens/s, 2:20 left");
        assert_eq!((meter.done(), meter.items()), (30, 30 * 512));
    }

    #[test]
    fn a_meter_goes_on_from_a_checkpoint() {
        let mut meter = Meter::new("samples").steps(12).done_before(10);
        let start = meter.start;
        meter.step_at(1, start + Duration::from_secs(1));
        meter.step_at(1, start + Duration::from_secs(2));
        assert_eq!(meter.to_string(), "12/12, 1.0 samples/s");
    }
}
