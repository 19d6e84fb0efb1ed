//! The recipe and a two-layer MLP's training step at every stage, as golden files in `tests/golden`:
//! their input is one of the programs here. `BLESS=1 cargo test -p kiln --test stages` renews them.

use std::collections::BTreeMap;

use kiln::prelude::*;
use kiln::{Explanation, GraphInfo, Result};
use kiln_testkit::golden;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
const PROGRAMS: [&str; 3] = ["recipe", "mlp", "forward"];

/// The text of a stage without the lines of the user's program, which move when this file is edited.
fn text(graph: &GraphInfo, stage: &str) -> String {
    let parts = graph.texts.iter().filter(|(name, _)| *name == stage);
    let mut all = String::new();
    for (_, text) in parts {
        for line in text.lines() {
            let line = line.split(" ; ").next().unwrap_or(line).trim_end();
            // Comments in C name the user's lines too.
            let line = if line.trim_start().starts_with("* ") {
                line.split(" at ").next().unwrap_or(line)
            } else {
                line
            };
            all.push_str(line);
            all.push('\n');
        }
        all.push('\n');
    }
    all
}

/// What is printed parses back and prints the same.
fn round_trip(text: &str) {
    let graph: kiln::ir::Graph = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
    assert_eq!(graph.to_string().trim_end(), text.trim_end());
}

/// One of the programs below, compiled and run twice.
fn explained(program: &str) -> Result<Explanation> {
    let explanation = match program {
        "recipe" => the_recipe(),
        "mlp" => a_training_step_of_an_mlp(),
        "forward" => a_forward_whose_backward_happens_outside(),
        _ => panic!("there is no program {program}"),
    }?;
    assert_eq!(explanation.graphs.len(), 1, "{explanation}");
    assert_eq!(explanation.graphs[0].interpreted, None, "{explanation}");
    Ok(explanation)
}

/// A file's header is `; test recipe loops`: the program and the stage to show.
#[test]
fn golden() {
    let programs: BTreeMap<&str, Explanation> =
        PROGRAMS.map(|name| (name, explained(name).unwrap_or_else(|e| panic!("{name}: {e}")))).into();
    let stage = |header: &str, _: &str| -> std::result::Result<String, String> {
        let (program, stage) = header.split_once(' ').ok_or("no program and stage")?;
        let explanation = programs.get(program).ok_or_else(|| format!("there is no program {program}"))?;
        let got = text(&explanation.graphs[0], stage);
        if got.is_empty() {
            return Err(format!("{program} has no stage {stage}"));
        }
        if !matches!(stage, "loops" | "code") {
            got.split_inclusive("\n}\n").map(str::trim_start).filter(|g| !g.is_empty()).for_each(round_trip);
        }
        Ok(got)
    };
    golden::run(FOLDER, stage).unwrap_or_else(|e| panic!("{e}"));
}

fn the_recipe() -> Result<Explanation> {
    let dev = Device::best();
    let linear = nn::Linear::options().bias(false).device(&dev);
    let model = nn::Sequential::from_iter((0..3).map(|_| linear.build(8, 8)))?;
    model.forward(&Tensor::rand([8], &dev)?)?.sum()?.backward()?;
    let opt = optim::Adam::new(model.parameters(), 0.01)?;
    let step = compile(|| opt.step());
    step()?;
    step()?;
    Ok(step.explain())
}

fn a_training_step_of_an_mlp() -> Result<Explanation> {
    let dev = Device::best();
    let model = nn::seq![nn::Linear::new(8, 16)?, nn::Gelu::default(), nn::Linear::new(16, 3)?];
    let opt = optim::Adam::new(model.parameters(), 1e-3)?;
    let (x, y) = (Tensor::randn([4, 8], &dev)?, Tensor::randint(0, 3, [4], &dev)?);
    let step = compile(|| {
        opt.zero_grad();
        let loss = model.forward(&x)?.cross_entropy(&y)?;
        loss.backward()?;
        opt.step()?;
        Ok::<_, kiln::Error>(loss)
    });
    step()?;
    step()?;
    Ok(step.explain())
}

fn a_forward_whose_backward_happens_outside() -> Result<Explanation> {
    let dev = Device::best();
    let model = nn::seq![nn::Linear::new(8, 16)?, nn::Gelu::default(), nn::Linear::new(16, 3)?];
    let x = Tensor::randn([4, 8], &dev)?;
    let forward = compile(|| model.forward(&x));
    forward()?.sum()?.backward()?;
    Ok(forward.explain())
}

#[test]
fn the_tour_is_true() {
    let tour = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/tour.md")).unwrap();
    let files = golden::files(FOLDER).unwrap_or_else(|e| panic!("{e}"));
    let recipe: Vec<_> = files.iter().filter(|file| file.header.starts_with("recipe ")).collect();
    assert_eq!(recipe.len(), 4, "graph, prims, loops and code");
    for file in recipe {
        let text = file.expected().trim_end();
        assert!(
            !text.is_empty() && tour.contains(text),
            "docs/tour.md does not show {} as it is",
            file.header
        );
    }
}
