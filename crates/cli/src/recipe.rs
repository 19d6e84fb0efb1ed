//! The main job: the optimizer recipe, eager against compiled.
//!
//! Ten Linear layers without bias, gradients of `model(rand(1024)).sum()`, then `opt.step()` timed both ways.

use serde::Serialize;

use crate::RecipeOptions;
use crate::failure::{Done, Failure};
use crate::measure::{self, EQUAL_STEPS, Figures, Line};
use crate::output::{self, Table, bytes, count, error, time};
use crate::progress::Progress;

/// Runs it, prints it, and judges it.
pub fn run(options: &RecipeOptions) -> Done {
    let case = options.case();
    let progress = Progress::spinner("building the model");
    progress.follow_compiler();
    let figures = measure::measure(case, &options.how, &progress)?;
    drop(progress);
    output::print(&if options.json { json(options, &figures)? } else { text(options, &figures) })?;
    figures.check()?;
    let ratio = figures.compiled.ratio_to(&figures.eager);
    if ratio.low > 1.0 { Err(Failure::Slower { ratio: ratio.median }) } else { Ok(()) }
}

fn text(options: &RecipeOptions, figures: &Figures) -> String {
    let Figures { eager, compiled, floor, first, difference, .. } = figures;
    let mut timed = Table::new(&["", "median", "spread (IQR)", "mean"]);
    for measured in [Some(eager), Some(compiled), floor.as_ref()].into_iter().flatten() {
        let numbers = [measured.median(), measured.iqr(), measured.mean()];
        timed.row([measured.label.clone()].into_iter().chain(numbers.map(time)).collect());
    }

    let parameters = options.layers * options.size * options.size;
    let moved = figures.bytes_moved as f64;
    let speed_up = eager.ratio_to(compiled);
    let speed_up = format!("{:.2} x ({:.2} to {:.2})", speed_up.median, speed_up.low, speed_up.high);
    let mut facts = vec![("speed-up", speed_up)];
    if let Some(floor) = floor {
        let ratio = compiled.ratio_to(floor).median;
        facts.push((
            "floor",
            format!("{}, a hand-written loop; compiled / floor {ratio:.2}", time(floor.median())),
        ));
    }
    facts.extend([
        (
            "bytes moved",
            format!(
                "{} a step: {} a parameter, {}/s",
                bytes(moved),
                moved / parameters as f64,
                bytes(moved / compiled.median())
            ),
        ),
        ("first call, cold", time(first.cold)),
        ("first call, from the disk cache", time(first.warm)),
        ("kernels", format!("{} in {}", count(figures.kernels, "kernel"), count(figures.graphs, "graph"))),
        (
            "largest difference of the parameters",
            format!(
                "{}, relative {}, after {EQUAL_STEPS} equal steps",
                error(difference.absolute),
                error(difference.relative)
            ),
        ),
    ]);
    facts.extend(figures.notes.iter().map(|note| ("note", note.clone())));
    let width = facts.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let facts: String = facts.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect();

    format!(
        "eager runtime: {:.1}us\ncompiled runtime: {:.1}us\n\n{timed}\n{facts}",
        eager.median() * 1e6,
        compiled.median() * 1e6
    )
}

/// What `--json` prints: the figures of `kiln bench` and the recipe's own.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    line: Line<'a>,
    eager_iqr_us: f64,
    compiled_iqr_us: f64,
    speedup: f64,
    bytes_moved: u64,
    graphs: usize,
    max_abs_err: f64,
}

fn json(options: &RecipeOptions, figures: &Figures) -> Result<String, std::io::Error> {
    let report = Report {
        line: figures.line(&options.how, options.how.device.name()),
        eager_iqr_us: figures.eager.iqr() * 1e6,
        compiled_iqr_us: figures.compiled.iqr() * 1e6,
        speedup: figures.eager.ratio_to(&figures.compiled).median,
        bytes_moved: figures.bytes_moved,
        graphs: figures.graphs,
        max_abs_err: figures.difference.absolute,
    };
    Ok(serde_json::to_string(&report)?)
}
