//! `kiln train`: whole training loops, as people write them, on data that Kiln brings along.

mod gpt;
mod pictures;
mod shapes;
mod text;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use kiln::optim::lr_scheduler::{Schedule, Scheduler};
use kiln::prelude::*;
use kiln::training::Meter;
use kiln::{Backend, Explanation, Region};

use crate::failure::{Done, Failure};
use crate::output::count;

pub use gpt::CharGpt;

/// What to train.
#[derive(Subcommand)]
pub enum What {
    /// A character GPT on Kiln's own documentation: validation loss as it learns, a sample of its text at the end
    Gpt(gpt::Options),
    /// A small convolutional network that tells pictures of shapes apart: accuracy on pictures it has not seen
    Shapes(shapes::Options),
}

/// Trains.
pub fn run(what: &What) -> Done {
    match what {
        What::Gpt(options) => gpt::run(options),
        What::Shapes(options) => shapes::run(options),
    }
}

/// What all loops have in common.
#[derive(Args, Clone)]
struct Common {
    /// What runs the captured step: inductor, aot_eager, eager
    #[arg(long, default_value = "inductor", value_parser = backend)]
    backend: Backend,
    /// Run the step eagerly, without capturing it
    #[arg(long, conflicts_with_all = ["backend", "mode"])]
    no_compile: bool,
    /// As in torch.compile: default, reduce-overhead, max-autotune
    #[arg(long, default_value = "default", value_parser = crate::mode)]
    mode: Mode,
    /// Decides about weights, dropout, and the order of the data
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Go on from the checkpoint in the folder, as if nothing had happened
    #[arg(long)]
    resume: bool,
}

fn backend(text: &str) -> Result<Backend, String> {
    text.parse::<Backend>().map_err(|error| error.to_string())
}

impl Common {
    /// A region for a function of this name.
    fn region(&self, name: &str) -> Region {
        let options = Compile::new().mode(self.mode).backend(self.backend).disable(self.no_compile);
        options.name(name).region()
    }

    /// How the step runs, in words.
    fn describe(&self) -> String {
        match (self.no_compile, self.backend) {
            (true, _) => "eager".into(),
            (false, Backend::Inductor) => "compiled".into(),
            (false, backend) => format!("captured, run by {backend}"),
        }
    }
}

/// The folder that a loop leaves its files in.
struct Folder(PathBuf);

impl Folder {
    fn new(path: &Path) -> Result<Folder, Failure> {
        std::fs::create_dir_all(path).map_err(|error| Failure::Folder {
            path: path.display().to_string(),
            reason: error.to_string(),
        })?;
        Ok(Folder(path.to_path_buf()))
    }

    fn checkpoint(&self) -> PathBuf {
        self.0.join("checkpoint.safetensors")
    }

    fn metrics(&self) -> PathBuf {
        self.0.join("metrics.csv")
    }

    fn plot(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// What is there now, in a line.
    fn told(&self, plot: &str) -> String {
        format!(
            "{}: metrics.csv, {plot}, checkpoint.safetensors (continue with --resume)\n",
            self.0.display()
        )
    }
}

/// That there is nothing to go on with, in a line.
fn finished(what: &str, done: u64, folder: &Folder) -> String {
    format!("{}: all {done} {what} are done; train longer with --{what} N\n", folder.0.display())
}

/// A schedule on an optimizer, at a certain step.
fn stepped<O: Optimizer + Clone>(
    schedule: impl Schedule + 'static,
    optimizer: &O,
    steps: u64,
) -> kiln::Result<Scheduler<O>> {
    let scheduler = schedule.on(optimizer.clone())?;
    (0..steps).try_for_each(|_| scheduler.step())?;
    Ok(scheduler)
}

/// What was compiled, in a line.
fn compiled(explanation: &Explanation) -> String {
    let kernels = explanation.graphs.iter().map(|graph| graph.kernels).sum();
    format!(
        "{}, {}, {}, {}",
        count(explanation.graphs.len(), "graph"),
        count(kernels, "kernel"),
        count(explanation.breaks.len(), "break"),
        count(explanation.recompiles.len(), "recompilation"),
    )
}

/// How fast it goes, at the end of a line; nothing before that is known.
fn speed(meter: &Meter, unit: &str) -> String {
    meter.rate().map_or_else(String::new, |rate| format!("   {rate:>6.0} {unit}/s"))
}
