//! `kiln bench ops`: every row of the op table, eager and compiled, beside PyTorch's eager mode.
//!
//! ```text
//! kiln bench ops --calls > calls.jsonl
//! python3 benches/torch_ops.py calls.jsonl > torch.jsonl
//! kiln bench ops --peer torch.jsonl
//! ```

mod calls;
mod methods;
mod run;
mod scale;
mod summary;

use std::path::{Path, PathBuf};

use clap::Args;
use kiln::ir::Op;
use serde::de::DeserializeOwned;

use crate::failure::{Done, Failure};
use crate::output;
use crate::progress::Progress;

/// What `kiln bench ops` takes.
#[derive(Args)]
pub struct Options {
    /// Ops to run; all if none are given
    #[arg(value_name = "OP", value_parser = op)]
    ops: Vec<String>,
    /// Print the calls as JSON lines for benches/torch_ops.py, and run none
    #[arg(long)]
    calls: bool,
    /// What benches/torch_ops.py printed: adds PyTorch's times
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// Lines of an earlier run with --json, in place of a new one
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Blocks of which the quickest counts
    #[arg(long, default_value_t = 5, value_parser = crate::positive)]
    rounds: usize,
    /// How many of the slowest to show for each ratio
    #[arg(long, default_value_t = 40)]
    slowest: usize,
    /// One JSON object per call, and no tables
    #[arg(long)]
    json: bool,
    /// Tables in Markdown
    #[arg(long)]
    markdown: bool,
}

/// Runs the calls, prints each or the tables.
pub fn run(options: &Options) -> Done {
    let peers = options.peer.as_deref().map(lines::<summary::Peer>).transpose()?.unwrap_or_default();
    let calls = calls::calls(&options.ops);
    if options.calls {
        return calls.iter().try_for_each(|call| {
            let line = serde_json::to_string(call).map_err(std::io::Error::from)?;
            Ok(output::print(&line)?)
        });
    }
    let measured = match &options.from {
        Some(file) => {
            let wanted = |line: &run::Line| options.ops.is_empty() || options.ops.contains(&line.op);
            lines::<run::Line>(file)?.into_iter().filter(wanted).collect()
        }
        None => measure(&calls, options)?,
    };
    if options.json {
        return Ok(());
    }
    Ok(output::print(&summary::text(&measured, &peers, options.slowest, options.markdown))?)
}

fn measure(calls: &[calls::Call], options: &Options) -> Result<Vec<run::Line>, Failure> {
    let progress = Progress::bar(calls.len());
    let mut all = Vec::new();
    for call in calls {
        progress.says(&call.call);
        match progress.quietly(|| run::measure(call, options.rounds)) {
            Ok(line) => {
                if options.json {
                    let text = serde_json::to_string(&line).map_err(std::io::Error::from)?;
                    progress.hidden(|| output::print(&text))?;
                }
                all.push(line);
            }
            Err(error) => progress.hidden(|| eprintln!("{}: {error}", call.call)),
        }
        // What a large call leaves behind is not the next one's.
        kiln::runtime::pool::clear();
        progress.step();
    }
    Ok(all)
}

/// JSON lines; other lines are passed over.
fn lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, Failure> {
    let name = path.display().to_string();
    let failed = |line, reason: String| Failure::Peer { path: name.clone(), line, reason };
    let text = std::fs::read_to_string(path).map_err(|error| failed(0, error.to_string()))?;
    let lines = (1..).zip(text.lines()).filter(|(_, line)| line.starts_with('{'));
    lines
        .map(|(number, line)| serde_json::from_str(line).map_err(|error| failed(number, error.to_string())))
        .collect()
}

fn op(word: &str) -> Result<String, String> {
    let known = Op::ROWS.iter().map(|row| row.name).chain(methods::METHODS.iter().map(|method| method.name));
    if known.into_iter().any(|name| name == word) {
        Ok(word.to_owned())
    } else {
        Err(format!("no row of the op table is called `{word}` (`kiln ops` lists them)"))
    }
}
