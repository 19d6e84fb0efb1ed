//! `kiln bench --against OTHER`: this binary and another one take turns, so that the machine's moods meet both.
//!
//! A pair of processes stands side by side, each with its case built and compiled; now one runs for a moment and
//! now the other. What a pair says is one value, since how memory happens to lie is a process's own luck; the
//! interval is over many pairs.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use kiln::benchmark::Spread;
use kiln::counters;

use crate::cases::Case;
use crate::failure::{Done, Failure};
use crate::output::Table;
use crate::progress::Progress;
use crate::{How, child, first_call, measure, output};

/// Turns of a pair in each way of running.
const TURNS: usize = 5;
/// How long a turn runs untimed, and then timed.
const TURN: Duration = Duration::from_millis(20);
/// What both may do before they are timed: sizes that change have been compiled by then.
const WARM_UP: Duration = Duration::from_millis(200);
/// The ways of running, as the children are asked for them.
const WAYS: [&str; 2] = ["eager", "compiled"];

/// The child's side: for each way on a line of standard input, the seconds of a step.
pub fn child(case: Case, how: &How) -> Done {
    let before = counters();
    let workload = case.build(&how.device.find()?)?;
    let compiled = how.compile()?.region();
    let eager = how.compile()?.disable(true).region();
    let mut counts = [1; WAYS.len()];
    for (count, region) in counts.iter_mut().zip([&eager, &compiled]) {
        let (start, mut steps) = (Instant::now(), 0);
        while steps < 3 || start.elapsed() < WARM_UP {
            region.run(|| workload.step())?;
            steps += 1;
        }
        let start = Instant::now();
        region.run(|| workload.step())?;
        let steps = TURN.as_secs_f64() / start.elapsed().as_secs_f64().max(1e-9);
        *count = steps.ceil().clamp(1.0, 1e6) as usize;
    }
    if let Some(reason) = measure::refusal(&compiled.explain(), counters() - before) {
        return Err(Failure::Refused { what: case.to_string(), reason });
    }
    output::print("ready")?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (region, count) = match WAYS.iter().position(|way| *way == line) {
            Some(0) => (&eager, counts[0]),
            Some(_) => (&compiled, counts[1]),
            None => return Err(child::failed(case, format!("can't run `{line}`"))),
        };
        let mut start = Instant::now();
        for step in 0..2 * count {
            if step == count {
                start = Instant::now();
            }
            region.run(|| workload.step())?;
        }
        output::print(&format!("{:e}", start.elapsed().as_secs_f64() / count as f64))?;
    }
    Ok(())
}

/// Compares this binary with `other`, case by case. What can't be compared (the other may not have the case) is left
/// out of the table, and the command fails when the others are done.
pub fn run(cases: &[Case], how: &How, other: &Path, pairs: usize) -> Done {
    let binaries = [&*std::env::current_exe()?, &*std::fs::canonicalize(other)?];
    let progress = Progress::bar(cases.len() * pairs);
    let mut table = Table::new(&["case", "eager", "compiled", "cold call", "warm call"]);
    let mut all: [Vec<f64>; 4] = Default::default();
    let mut failure = None;
    for (done, &case) in cases.iter().enumerate() {
        progress.at((done * pairs) as u64, (cases.len() * pairs) as u64);
        match intervals(binaries, case, how, pairs, &progress) {
            Ok(cells) => {
                for (all, interval) in all.iter_mut().zip(&cells) {
                    all.push(interval.mean);
                }
                table.row([case.to_string()].into_iter().chain(cells.map(|cell| cell.to_string())).collect());
            }
            Err(why) => failure = failure.or(Some(why)),
        }
    }
    drop(progress);
    let compared = all[0].len();
    if compared > 1 {
        let means = all.map(|all| format!("{:.3}", (all.iter().sum::<f64>() / compared as f64).exp()));
        table.row(["geometric mean".to_string()].into_iter().chain(means).collect());
    }
    if compared > 0 {
        output::print(&format!(
            "this binary's times over those of {}, {pairs} process pairs;\nmeans and their 95 % intervals, below 1 \
             where this one is faster\n\n{table}",
            other.display()
        ))?;
    }
    failure.map_or(Ok(()), Err)
}

/// What `pairs` pairs of processes say of a case: a step eager, a step compiled, first calls cold and warm.
fn intervals(
    [this, other]: [&Path; 2],
    case: Case,
    how: &How,
    pairs: usize,
    progress: &Progress,
) -> Result<[Interval; 4], Failure> {
    let mut logs: [Vec<f64>; 4] = Default::default();
    for pair in 0..pairs {
        progress.says(&format!("{case}: pair {} of {pairs}", pair + 1));
        // Which of the two begins alternates.
        let ratios = progress.quietly(|| match pair % 2 {
            0 => Pair { binaries: [this, other] }.ratios(case, how),
            _ => Ok(Pair { binaries: [other, this] }.ratios(case, how)?.map(|ratio| 1.0 / ratio)),
        })?;
        for (logs, ratio) in logs.iter_mut().zip(ratios) {
            logs.push(ratio.ln());
        }
        progress.step();
    }
    Ok(logs.each_ref().map(|logs| Interval::of(logs)))
}

/// Two binaries; the first one begins.
struct Pair<'a> {
    binaries: [&'a Path; 2],
}

impl Pair<'_> {
    /// The first one's time over the second one's: a step eager, a step compiled, first calls cold and warm.
    fn ratios(&self, case: Case, how: &How) -> Result<[f64; 4], Failure> {
        let [a, b] = self.binaries;
        let first = [first_call::once(a, case, how)?, first_call::once(b, case, how)?];
        let mut players = [Player::new(a, case, how)?, Player::new(b, case, how)?];
        let [mut eager, mut compiled] = [Vec::new(), Vec::new()];
        for turn in 0..TURNS {
            for (ratios, way) in [&mut eager, &mut compiled].into_iter().zip(WAYS) {
                let mut times = [0.0; 2];
                for player in [turn % 2, (turn + 1) % 2] {
                    times[player] = players[player].turn(way)?;
                }
                ratios.push(times[0] / times[1]);
            }
        }
        let median = |ratios: &[f64]| Spread::of(ratios).median;
        let [cold, warm] = [first[0].cold / first[1].cold, first[0].warm / first[1].warm];
        Ok([median(&eager), median(&compiled), cold, warm])
    }
}

/// A child that waits for its turn.
struct Player {
    case: Case,
    process: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Player {
    fn new(binary: &Path, case: Case, how: &How) -> Result<Player, Failure> {
        let mut command = child::command(binary, "turns", case, how);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (Some(asks), Some(answers)) = (process.stdin.take(), process.stdout.take()) else {
            unreachable!("both are pipes")
        };
        let mut player = Player { case, process, asks, answers: BufReader::new(answers) };
        match player.answer()?.as_str() {
            "ready" => Ok(player),
            other => Err(child::failed(case, format!("`{other}` instead of `ready`"))),
        }
    }

    fn answer(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        match self.answers.read_line(&mut line)? {
            0 => Err(self.ended()),
            _ => Ok(line.trim().to_owned()),
        }
    }

    /// What a child leaves behind that has ended; why, it has said itself.
    fn ended(&mut self) -> Failure {
        let status = self.process.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        child::failed(
            self.case,
            format!("it exited ({status}); a build without this command can't be compared with"),
        )
    }

    /// Seconds of a step.
    fn turn(&mut self, way: &str) -> Result<f64, Failure> {
        if writeln!(self.asks, "{way}").is_err() {
            return Err(self.ended());
        }
        let answer = self.answer()?;
        answer.parse().map_err(|_| child::failed(self.case, format!("`{answer}` is not a time")))
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        // It has nothing to save; where it is gone already, all the better.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A mean of logarithms with its 95 % interval, shown as ratios.
struct Interval {
    mean: f64,
    half: f64,
}

impl Interval {
    fn of(logs: &[f64]) -> Interval {
        let count = logs.len() as f64;
        let mean = logs.iter().sum::<f64>() / count;
        let free = count - 1.0;
        let variance = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / free;
        // Student's distribution, by the first terms of its series beside the normal one.
        let z = 1.96_f64;
        let student = z
            + (z.powi(3) + z) / (4.0 * free)
            + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * free * free);
        Interval { mean, half: student * (variance / count).sqrt() }
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [low, mean, high] = [self.mean - self.half, self.mean, self.mean + self.half].map(f64::exp);
        write!(f, "{mean:.3} [{low:.3}, {high:.3}]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_students() {
        // Five values of variance 1: 2.776 / √5 on each side; twenty: 2.093 / √20.
        let five = Interval::of(&[-1.264_911, -0.632_456, 0.0, 0.632_456, 1.264_911]);
        assert!(five.mean.abs() < 1e-9 && (five.half - 1.2415).abs() < 0.03, "{}", five.half);
        let twenty: Vec<f64> = (0..20).map(|at| if at % 2 == 0 { 1.0 } else { -1.0 }).collect();
        assert!((Interval::of(&twenty).half - 2.093 * (20.0_f64 / 19.0 / 20.0).sqrt()).abs() < 1e-3);
        assert_eq!(Interval { mean: 0.0, half: 0.0 }.to_string(), "1.000 [1.000, 1.000]");
    }
}
