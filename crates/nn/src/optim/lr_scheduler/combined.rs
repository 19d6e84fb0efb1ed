//! Schedules made of schedules: one after the other, or one on top of the other.

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::Result;

use super::Schedule;

/// Schedules one after the other, each from its milestone on.
pub struct SequentialLR {
    /// Each with the step at which it begins.
    parts: Vec<(u64, Box<dyn Schedule>)>,
}

impl SequentialLR {
    /// This schedule first.
    pub fn new(first: impl Schedule + 'static) -> SequentialLR {
        SequentialLR { parts: vec![(0, Box::new(first))] }
    }

    /// From step `milestone` on this one, which begins anew from the first learning rate.
    pub fn then(mut self, milestone: u64, schedule: impl Schedule + 'static) -> SequentialLR {
        self.parts.push((milestone, Box::new(schedule)));
        self
    }

    /// Who is responsible for a step, and since when.
    fn part(&self, epoch: u64) -> (u64, &dyn Schedule) {
        let (begin, schedule) =
            self.parts.iter().rev().find(|(milestone, _)| *milestone <= epoch).unwrap_or(&self.parts[0]);
        (*begin, schedule)
    }
}

impl Schedule for SequentialLR {
    fn begin(&self, base: &[f64], _: &[f64]) -> Vec<f64> {
        self.part(0).1.begin(base, base)
    }
    fn next(&self, epoch: u64, base: &[f64], now: &[f64]) -> Vec<f64> {
        match self.part(epoch) {
            (begin, schedule) if begin == epoch => schedule.begin(base, base),
            (begin, schedule) => schedule.next(epoch - begin, base, now),
        }
    }
    fn momentum(&self, epoch: u64) -> Option<f64> {
        let (begin, schedule) = self.part(epoch);
        schedule.momentum(epoch - begin)
    }
    fn check(&self, groups: usize, loc: Loc) -> Result<()> {
        if self.parts.windows(2).any(|pair| pair[0].0 > pair[1].0) {
            let why = Why::Operand { argument: "milestones", expected: "in ascending order" };
            return Err(Error::op("SequentialLR", why, loc));
        }
        self.parts.iter().try_for_each(|(_, schedule)| schedule.check(groups, loc))
    }
    fn check_step(&self, epoch: u64, loc: Loc) -> Result<()> {
        let (begin, schedule) = self.part(epoch);
        schedule.check_step(epoch - begin, loc)
    }
}

/// Schedules that all change the learning rate in every step, one on top of the other.
pub struct ChainedScheduler(Vec<Box<dyn Schedule>>);

impl ChainedScheduler {
    /// This one first.
    pub fn new(first: impl Schedule + 'static) -> ChainedScheduler {
        ChainedScheduler(vec![Box::new(first)])
    }

    /// And this one on top.
    pub fn and(mut self, schedule: impl Schedule + 'static) -> ChainedScheduler {
        self.0.push(Box::new(schedule));
        self
    }
}

impl Schedule for ChainedScheduler {
    fn begin(&self, base: &[f64], now: &[f64]) -> Vec<f64> {
        self.0.iter().fold(now.to_vec(), |now, schedule| schedule.begin(base, &now))
    }
    fn next(&self, epoch: u64, base: &[f64], now: &[f64]) -> Vec<f64> {
        self.0.iter().fold(now.to_vec(), |now, schedule| schedule.next(epoch, base, &now))
    }
    fn momentum(&self, epoch: u64) -> Option<f64> {
        self.0.iter().rev().find_map(|schedule| schedule.momentum(epoch))
    }
    fn check(&self, groups: usize, loc: Loc) -> Result<()> {
        self.0.iter().try_for_each(|schedule| schedule.check(groups, loc))
    }
    fn check_step(&self, epoch: u64, loc: Loc) -> Result<()> {
        self.0.iter().try_for_each(|schedule| schedule.check_step(epoch, loc))
    }
}
