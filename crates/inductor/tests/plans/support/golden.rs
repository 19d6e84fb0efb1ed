//! The golden files' graphs, and what the headers and comments ask for.
//!
//! ```text
//! ; test plan                the plan, and why not more was fused
//! ; test plan c              and its kernels as text
//! ; test plan unroll 2       with this field of `C`; other words are fields of `Tuning`
//! ; test plan constants      inputs are likely to stay the same
//! ; test plan general        kernels for other sizes, too
//! ; strides %0 [1, 8]        input 0 lies in memory like this
//! ```

use std::sync::Arc;

use kiln_inductor::{C, Layout, Options};
use kiln_ir::math::c::Isa;
use kiln_ir::{Graph, Stage, Strides};
use kiln_testkit::golden::{Golden, files};

/// The folder of the golden files.
pub const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");

/// Every golden file that has a plan, with its graph and its options, those for `isa`.
pub fn all(isa: Isa) -> Vec<(Golden, Graph, Options)> {
    let read = |file: Golden| {
        let (graph, options) = parse(&file.header, &file.input, isa);
        graph.verify(Stage::Prims, "the golden file").unwrap_or_else(|e| panic!("{e}\n{}", file.input));
        (file, graph, options)
    };
    let files = files(FOLDER).unwrap_or_else(|e| panic!("{e}")).into_iter();
    files.filter(|file| !file.header.ends_with(" fails")).map(read).collect()
}

/// The graph of an input, and the options that it asks for.
pub fn parse(header: &str, input: &str, isa: Isa) -> (Graph, Options) {
    let graph: Graph = input.parse().unwrap_or_else(|e| panic!("{e}\n{input}"));
    let mut target = C::new(isa);
    let mut options = Options::dense(&graph, target);
    let mut words = header.split_whitespace();
    assert_eq!(words.next(), Some("plan"), "the stage");
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|n| n.parse().ok()).expect("a number");
        match word {
            "c" => {}
            "constants" => options.constants = true,
            "general" => (options.general, target.general) = (true, true),
            "unroll" => target.unroll = number(),
            "products" => options.tuning.products = number(),
            "inlined" => options.tuning.inlined = number(),
            "fusion_size" => options.tuning.fusion_size = number(),
            "fusion_buffers" => options.tuning.fusion_buffers = number(),
            other => panic!("{other} is no word of a header"),
        }
    }
    options.target = Arc::new(target);
    for line in input.lines().filter_map(|line| line.strip_prefix("; strides %")) {
        let (number, strides) = line.split_once(' ').expect("an input and its strides");
        let strides = strides.trim_matches(['[', ']']).split(", ").map(|s| s.parse().expect("a stride"));
        let strides = Strides::from_iter(strides);
        Arc::make_mut(&mut options.input_layouts)[number.parse::<usize>().unwrap()] = Layout { strides };
    }
    (graph, options)
}
