//! From many ways to say something to few: decomposition to prims, then clean-up by named rewrite rules.
//!
//! ```text
//! functional graph ──► decompose ──► simplify ──► accumulate ──► join ──► what inductor lowers
//! ```
//!
//! Passes are functions from graph to graph; each leaves a graph that passes the verifier. This crate knows
//! nothing of devices or loops.

mod accumulate;
mod dead;
mod decompose;
pub mod forms;
mod join;
mod rewrite;
pub mod rules;
mod simplify;

use std::borrow::Cow;

use kiln_ir::{Graph, Result, Stage};

pub use dead::remove_dead;
pub use decompose::{Rounding, decompose, decompose_rounding};
pub use rewrite::{Call, Rewriter, Rule};
use simplify::simplify_without;
pub use simplify::{simplify, simplify_by};

/// Lowers a functional graph to prims and cleans it up.
///
/// ```
/// use kiln_ir::Graph;
/// # fn main() -> kiln_ir::Result<()> {
/// let graph: Graph = "graph(%0: f32[4, 3]) {
///   %1 = relu(%0) : f32[4, 3]
///   %2 = relu(%1) : f32[4, 3]
///   return %2
/// }".parse()?;
/// assert_eq!(kiln_prims::lower(&graph)?.to_string(), "\
/// graph(%0: f32[4, 3]) {
///   %1 = constant() {value: 0} : int
///   %2 = maximum(%1, %0) : f32[4, 3]
///   return %2
/// }
/// ");
/// # Ok(()) }
/// ```
pub fn lower(graph: &Graph) -> Result<Graph> {
    lower_with(graph, &mut |_, _| {})
}

/// [`lower`], with every intermediate graph shown to `after` under the name of the pass that made it.
pub fn lower_with(graph: &Graph, after: &mut dyn FnMut(&str, &Graph)) -> Result<Graph> {
    run(graph, How::default(), after)
}

/// [`lower`], in another way.
pub fn lower_how(graph: &Graph, how: How) -> Result<Graph> {
    run(graph, how, &mut |_, _| {})
}

/// How far a graph is lowered, and by what.
#[derive(Copy, Clone, Debug)]
pub struct How {
    /// Where halves are rounded.
    pub rounding: Rounding,
    /// The last pass, by name; all of them if there is none of that name.
    pub last: &'static str,
    /// A rule that is not used.
    pub without: &'static str,
}

impl Default for How {
    fn default() -> How {
        How { rounding: Rounding::Stored, last: "", without: "" }
    }
}

fn run(graph: &Graph, how: How, after: &mut dyn FnMut(&str, &Graph)) -> Result<Graph> {
    type Pass<'a> = (&'a str, &'a dyn Fn(&Graph) -> Result<Graph>);
    let passes: [Pass<'_>; 4] = [
        ("decompose", &|graph| decompose_rounding(graph, how.rounding)),
        ("simplify", &|graph| Ok(simplify_without(graph, rules::ALL, how.without)?.0)),
        ("accumulate", &accumulate::accumulate),
        ("join", &join::join),
    ];
    // Eager's bits are not those of sums in another order.
    let count = if matches!(how.rounding, Rounding::Stored) { passes.len() } else { 2 };
    let mut graph = Cow::Borrowed(graph);
    for (name, pass) in passes.into_iter().take(count) {
        graph = Cow::Owned(pass(&graph)?);
        if cfg!(debug_assertions) {
            graph.verify(Stage::Prims, name)?;
        }
        after(name, &graph);
        if name == how.last {
            break;
        }
    }
    Ok(graph.into_owned())
}
