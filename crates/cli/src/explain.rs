//! `kiln explain`: how the recipe's step is compiled.

use crate::failure::Done;
use crate::progress::Progress;
use crate::{RecipeOptions, output};

/// Compiles the step once and prints the explanation.
pub fn run(options: &RecipeOptions) -> Done {
    let progress = Progress::spinner("compiling");
    progress.follow_compiler();
    let workload = options.case().build(&options.how.device.find()?)?;
    let region = options.how.compile()?.region();
    region.run(|| workload.step())?;
    drop(progress);
    Ok(output::print(&region.explain().to_string())?)
}
