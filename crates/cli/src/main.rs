//! The `kiln` command: runs the recipe, benchmarks, and shows what Kiln knows. The only crate that prints.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod against;
mod allocations;
mod bench;
mod cache;
mod cases;
mod child;
mod corpus;
mod doctor;
mod explain;
mod failure;
mod first_call;
mod floor;
mod info;
mod latency;
mod measure;
mod memory;
mod networks;
mod ops;
mod output;
mod overhead;
mod peer;
mod progress;
mod recipe;
mod repro;
mod selftest;
mod sweep;
mod train;
mod transformer;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kiln::benchmark::Rounds;
use kiln::prelude::{Compile, Device, Mode};

use crate::cases::{Case, Cases, OptimizerKind};
use crate::failure::{Done, Failure};

#[global_allocator]
static COUNTED: allocations::Counted = allocations::Counted;

/// Kiln compiles eager tensor programs. Without a command: the optimizer recipe, eager against compiled.
#[derive(Parser)]
#[command(name = "kiln", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    recipe: RecipeOptions,
}

#[derive(Subcommand)]
enum Command {
    /// Run the optimizer recipe: eager against compiled (what `kiln` alone does)
    Recipe(RecipeOptions),
    /// Benchmark cases: eager, compiled, floor, first calls, memory, accuracy
    Bench(BenchOptions),
    /// Show how the recipe is compiled: graphs, kernels, bytes, breaks, recompiles
    Explain(RecipeOptions),
    /// Train a model on built-in data, compiled, with checkpoints, metrics and a plot
    Train {
        #[command(subcommand)]
        what: train::What,
    },
    /// Compile small programs and compare the results with eager
    Selftest {
        /// Where to run
        #[arg(long, value_enum, default_value_t)]
        device: DeviceKind,
    },
    /// Run the corpus eagerly and compiled: check results and whether each step is one graph
    Corpus(CorpusOptions),
    /// List the operators
    Ops,
    /// Show what Kiln finds on this machine: vector instructions, C compiler, kernel cache, threads
    Info,
    /// Check this machine for what Kiln needs and say what to install; exit with 1 if something is missing
    Doctor,
    /// Run a saved program, eagerly and compiled, and say how it fails
    Repro {
        /// A recording or a graph as text
        file: PathBuf,
    },
    /// Name the compiler's stage (and rewrite rule) that makes a saved program fail
    Bisect {
        /// A recording or a graph as text
        file: PathBuf,
    },
    /// Make a saved program that fails as small as possible
    Minify {
        /// A recording or a graph as text
        file: PathBuf,
        /// Where the result goes: NAME.min.kir unless told otherwise
        #[arg(short, long)]
        output: Option<PathBuf>,
        /// How long to try
        #[arg(long, default_value_t = 60.0, value_parser = seconds)]
        seconds: f64,
    },
    /// The kernel cache on disk
    Cache {
        #[command(subcommand)]
        action: cache::Action,
    },
    /// Time the first compiled call of a case in this process
    #[command(hide = true)]
    FirstCall {
        case: Case,
        #[command(flatten)]
        how: How,
    },
    /// Time a case's steps whenever standard input asks for it
    #[command(hide = true)]
    Turns {
        case: Case,
        #[command(flatten)]
        how: How,
    },
    /// Measure the resident memory of a case's steps in this process
    #[command(hide = true)]
    PeakMemory {
        case: Case,
        #[command(flatten)]
        how: How,
        /// Run eagerly, without compiling
        #[arg(long)]
        eager: bool,
    },
}

/// Where and how to compile.
#[derive(Args, Clone)]
struct How {
    /// Where to run
    #[arg(long, value_enum, default_value_t)]
    device: DeviceKind,
    /// As in torch.compile: default, reduce-overhead, max-autotune
    #[arg(long, default_value = "default", value_parser = mode)]
    mode: Mode,
    /// Vector instructions of compiled code: best, avx512, avx2, plain (KILN_ISA sets those of eager code too)
    #[arg(long, default_value = "best", value_parser = isa)]
    isa: String,
    /// How long to time a case
    #[arg(long, default_value_t = 3.0, value_parser = seconds)]
    seconds: f64,
}

impl How {
    fn compile(&self) -> Result<Compile, Failure> {
        Ok(Compile::new().mode(self.mode).option("isa", &self.isa)?)
    }

    fn rounds(&self) -> Rounds {
        let default = Rounds::default();
        let settle = default.settle.min(Duration::from_secs_f64(self.seconds / 25.0));
        Rounds { min_time: Duration::from_secs_f64(self.seconds), settle, ..default }
    }
}

#[derive(Args)]
struct RecipeOptions {
    #[command(flatten)]
    how: How,
    /// The optimizer whose step is compiled
    #[arg(long, value_enum, default_value_t)]
    optimizer: OptimizerKind,
    /// Number of Linear layers
    #[arg(long, default_value_t = 10, value_parser = positive)]
    layers: usize,
    /// Width of each layer
    #[arg(long, default_value_t = 1024, value_parser = positive)]
    size: usize,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

impl RecipeOptions {
    fn case(&self) -> Case {
        Case::Optimizer { kind: self.optimizer, layers: self.layers, size: self.size }
    }
}

#[derive(Subcommand)]
enum BenchCommand {
    /// Every row of the op table at three sizes, eager and compiled
    Ops(sweep::Options),
}

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
struct BenchOptions {
    #[command(subcommand)]
    command: Option<BenchCommand>,
    /// Cases to run, by name or part of a name; all if none are given
    #[arg(value_name = "CASE")]
    cases: Vec<Cases>,
    #[command(flatten)]
    how: How,
    /// One JSON object per case
    #[arg(long)]
    json: bool,
    /// PyTorch results for the same cases as JSON lines: adds a side-by-side table
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// Another build of this command to alternate with: prints the ratio of every time, with its interval
    #[arg(long, value_name = "BINARY", conflicts_with_all = ["json", "peer", "seconds"])]
    against: Option<PathBuf>,
    /// Number of process pairs to alternate
    #[arg(long, value_name = "NUMBER", default_value_t = 20, value_parser = several, requires = "against")]
    pairs: usize,
}

#[derive(Args)]
struct CorpusOptions {
    /// Only programs whose name or theme contains this
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Print the page docs/capture.md instead of the table
    #[arg(long)]
    markdown: bool,
    /// The seed that programs begin with
    #[arg(long)]
    seed: Option<u64>,
}

#[derive(Copy, Clone, Default, ValueEnum)]
enum DeviceKind {
    #[default]
    Cpu,
    Cuda,
}

impl DeviceKind {
    /// As on the command line.
    fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
        }
    }

    fn find(self) -> Result<Device, Failure> {
        match self {
            DeviceKind::Cpu => Ok(Device::Cpu),
            DeviceKind::Cuda => Err(Failure::NoDevice),
        }
    }
}

fn mode(text: &str) -> Result<Mode, String> {
    text.parse::<Mode>().map_err(|error| error.to_string())
}

fn isa(text: &str) -> Result<String, String> {
    let known = Compile::new().option("isa", text);
    known.map(|_| text.to_owned()).map_err(|error| error.to_string())
}

fn seconds(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().map_err(|error| error.to_string())?;
    if (0.0..=3600.0).contains(&number) { Ok(number) } else { Err("must be from 0 to 3600".into()) }
}

fn minutes(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().map_err(|error| error.to_string())?;
    if number > 0.0 && number <= 1e4 {
        Ok(number)
    } else {
        Err("must be greater than 0 and at most 10000".into())
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(error) => Err(format!("{error}")),
    }
}

fn several(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0..5) => Err("must be at least 5".into()),
        Ok(number) => Ok(number),
        Err(error) => Err(format!("{error}")),
    }
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let done = match cli.command.unwrap_or(Command::Recipe(cli.recipe)) {
        Command::Recipe(options) => recipe::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Explain(options) => explain::run(&options),
        Command::Train { what } => train::run(&what),
        Command::Selftest { device } => selftest::run(device),
        Command::Corpus(options) => corpus::run(&options),
        Command::Ops => ops::run(),
        Command::Info => info::run(),
        Command::Doctor => doctor::run(),
        Command::Repro { file } => repro::run(&file),
        Command::Bisect { file } => repro::stage(&file),
        Command::Minify { file, output, seconds } => repro::smaller(&file, output, seconds),
        Command::Cache { action } => cache::run(action),
        Command::FirstCall { case, how } => first_call::run(case, &how),
        Command::Turns { case, how } => against::child(case, &how),
        Command::PeakMemory { case, how, eager } => memory::run(case, &how, eager),
    };
    finish(done)
}

/// Help and version as they are; errors on one line.
fn usage(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    if !error.use_stderr() {
        return finish(output::print(&text).map_err(Failure::from));
    }
    let told = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let told: Vec<&str> = told.filter(|line| !line.is_empty() && !line.starts_with("For more")).collect();
    eprintln!("{} (see `kiln --help`)", told.join(" "));
    ExitCode::from(2)
}

fn finish(done: Done) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // The reader has seen enough (`kiln ops | head`).
        Err(Failure::Io(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {}", failure.to_string().trim().replace('\n', " "));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn without_a_command_it_is_the_recipe() {
        let cli = Cli::try_parse_from(["kiln", "--layers", "3", "--optimizer", "sgd"]).unwrap();
        assert!(cli.command.is_none());
        assert_eq!(cli.recipe.case().to_string(), "sgd_momentum_3x1024");
    }

    #[test]
    fn cases_are_named_in_whole_or_in_part() {
        let cases = |word: &str| {
            let cli = Cli::try_parse_from(["kiln", "bench", word]).unwrap();
            let Some(Command::Bench(options)) = cli.command else { panic!("not bench") };
            options.cases.iter().flat_map(|cases| &cases.0).map(Case::to_string).collect::<Vec<_>>()
        };
        assert_eq!(cases("resnet18_train"), ["resnet18_train"]);
        assert_eq!(cases("adam_3x64"), ["adam_3x64"]);
        let resnet = cases("resnet");
        assert!(resnet.len() > 1 && resnet.iter().all(|name| name.contains("resnet")), "{resnet:?}");
    }

    #[test]
    fn unknown_values_are_usage_errors() {
        for words in [
            &["bench", "nosuch"][..],
            &["--layers", "0"],
            &["--device", "tpu"],
            &["--mode", "quick"],
            &["bench", "--isa", "sse9"],
            &["cache"],
            &["train"],
            &["train", "gpt", "--backend", "tpu"],
            &["train", "gpt", "--minutes", "0"],
            &["train", "gpt", "--no-compile", "--backend", "eager"],
        ] {
            let parsed = Cli::try_parse_from(["kiln"].iter().chain(words));
            assert_eq!(parsed.err().map(|error| error.exit_code()), Some(2), "{words:?}");
        }
    }
}
