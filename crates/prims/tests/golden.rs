//! Golden files of decomposition and simplification: `; test decompose`, `; test simplify`, `; test lower` (both, then
//! what follows), `; test lower strict` (halves rounded after every op), and `; test form averages`, `form extremes`,
//! `form products 8` for the forms that loops like better.

use std::borrow::Cow;
use std::collections::BTreeSet;

use kiln_ir::{Error, Graph, Op, Result, Stage};
use kiln_prims::{How, Rounding, forms, rules, simplify_by};
use kiln_testkit::golden::{self, Golden, assert_all_shown};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");

/// A graph after the pass that a header names. Of a simplification also which rules fired.
fn run(header: &str, text: &str) -> Result<String> {
    let graph: Graph = text.parse()?;
    graph.verify(Stage::Functional, "the file")?;
    let result = match header.split(' ').collect::<Vec<_>>()[..] {
        ["decompose"] => kiln_prims::decompose(&graph)?,
        ["simplify"] => {
            let (result, mut fired) = simplify_by(&graph, rules::ALL)?;
            fired.dedup();
            return Ok(format!("{result}by {}\n", fired.join(", ")));
        }
        ["lower"] => kiln_prims::lower(&graph)?,
        ["lower", "strict"] => {
            kiln_prims::lower_how(&graph, How { rounding: Rounding::Ops, ..How::default() })?
        }
        ["form", "averages"] => forms::as_plain(Cow::Owned(graph)).into_owned(),
        ["form", "extremes"] => forms::take_apart(Cow::Owned(graph), &|_, _| false).into_owned(),
        ["form", "products", most] => {
            let most = most.parse().map_err(|_| Error::Parse { line: 1, message: "no number".into() })?;
            forms::inline(Cow::Owned(graph), most).into_owned()
        }
        _ => return Err(Error::Parse { line: 1, message: format!("there is no stage `{header}`") }),
    };
    result.verify(Stage::Functional, "the result")?;
    Ok(result.to_string())
}

fn files() -> Vec<Golden> {
    golden::files(FOLDER).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn golden() {
    golden::run(FOLDER, run).unwrap_or_else(|e| panic!("{e}"));
}

/// A new rule needs a golden file of its name: what it does, and what it leaves alone.
#[test]
fn every_rule_is_shown() {
    let files = files();
    let fires = |name: &str| {
        let shown = files.iter().filter(|file| file.path.ends_with(format!("rules/{name}.kir")));
        let mut fired = shown.filter_map(|file| file.expected().lines().last()?.strip_prefix("by "));
        fired.any(|fired| fired.split(", ").any(|fired| fired == name))
    };
    assert_all_shown(
        "these rules",
        rules::ALL.iter().flat_map(|theme| theme.iter()).map(|rule| rule.name),
        fires,
    );
}

/// A new composite needs a golden file: whoever adds one sees what it becomes.
#[test]
fn every_composite_is_shown() {
    let graphs =
        files().into_iter().map(|file| file.input.parse::<Graph>().unwrap_or_else(|e| panic!("{e}")));
    let shown: BTreeSet<&str> =
        graphs.flat_map(|graph| graph.nodes.into_iter().map(|node| node.op.name())).collect();
    let composites = Op::ROWS.iter().filter(|row| row.decompose.is_some() && row.prim.is_none());
    assert_all_shown("these composites", composites.map(|row| row.name), |name| shown.contains(name));
}

#[test]
fn every_pass_is_shown_and_lines_survive() {
    let mut graph = Graph::new();
    let x = graph.input(kiln_ir::Ty::tensor(kiln_ir::DType::F32, [3]));
    graph.loc = kiln_ir::Loc::caller();
    let loc = graph.loc;
    let y = kiln_ir::EmitExt::softmax(&mut graph, x, 0).unwrap();
    graph.outputs.push(y);
    let mut passes = Vec::new();
    let lowered = kiln_prims::lower_with(&graph, &mut |pass, _| passes.push(pass.to_string())).unwrap();
    assert_eq!(passes, ["decompose", "simplify", "accumulate", "join"]);
    assert!(lowered.nodes.iter().all(|node| node.loc == loc));
}
