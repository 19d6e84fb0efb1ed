//! `kiln repro`, `kiln bisect` and `kiln minify`: programs that were saved because they failed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kiln::repro::{Case, bisect, investigate, reproduce_apart, rust_program};

use crate::failure::{Done, Failure};
use crate::output::count;
use crate::progress::Progress;

/// Runs a case, eagerly and compiled, in a process of its own; fails if they differ.
pub fn run(path: &Path) -> Done {
    let case = Case::read(path)?;
    match reproduce_apart(&case)? {
        None => {
            println!("{}: {}, compiled as eager", path.display(), count(case.len(), "op"));
            Ok(())
        }
        Some(failure) => {
            Err(Failure::Reproduced { path: path.display().to_string(), failure: failure.to_string() })
        }
    }
}

/// Names the first stage of the compiler that is wrong.
pub fn stage(path: &Path) -> Done {
    let case = Case::read(path)?;
    let progress = Progress::spinner("compiling up to each stage");
    let found = bisect(&case)?;
    progress.hidden(|| match found {
        None => println!("{}: {}, right at every stage", path.display(), count(case.len(), "op")),
        Some(found) => println!("{found}"),
    });
    Ok(())
}

/// Makes a case smaller and writes what is left next to it, as a case and as a Rust program.
pub fn smaller(path: &Path, to: Option<PathBuf>, seconds: f64) -> Done {
    let case = Case::read(path)?;
    let progress = Progress::spinner("compiling up to each stage");
    let before = case.len();
    let small = investigate(&case, Duration::from_secs_f64(seconds), &mut |at| {
        progress.says(&format!("{} of {before} ops left, {} programs tried", at.events, at.tried));
    })?;
    let Some((small, found)) = small else {
        println!("{}: {}, compiled as eager: nothing to minify", path.display(), count(before, "op"));
        return Ok(());
    };
    let to = to.unwrap_or_else(|| path.with_extension("min.kir"));
    small.write(&to)?;
    let (text, beside) = small.to_text()?;
    progress.hidden(|| {
        println!("{found}");
        println!("{}, now {}: kiln repro {}", count(before, "op"), small.len(), to.display());
    });
    if beside.is_empty() {
        let program = to.with_extension("rs");
        std::fs::write(&program, rust_program(&small, &text))?;
        println!("as a Rust program: {}", program.display());
    }
    Ok(())
}
