//! The recipe and a two-layer MLP's training step at every stage, as golden files in `tests/golden`.
//! `BLESS=1 cargo test -p kiln --test stages` renews them.

use std::path::Path;

use kiln::prelude::*;
use kiln::{Explanation, GraphInfo, Result};

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

fn check(name: &str, explanation: &Explanation, stages: &[&str]) {
    assert_eq!(explanation.graphs.len(), 1, "{explanation}");
    assert_eq!(explanation.graphs[0].interpreted, None, "{explanation}");
    for stage in stages {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{name}.{stage}.txt"));
        let got = text(&explanation.graphs[0], stage);
        if !matches!(*stage, "loops" | "code") {
            got.split_inclusive("\n}\n").map(str::trim_start).filter(|g| !g.is_empty()).for_each(round_trip);
        }
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&path, &got).expect("golden files can be written");
            continue;
        }
        let want = std::fs::read_to_string(&path).unwrap_or_default();
        if want != got {
            let line = want
                .lines()
                .zip(got.lines())
                .position(|(w, g)| w != g)
                .unwrap_or(want.lines().count().min(got.lines().count()));
            panic!(
                "{name}.{stage}.txt differs in line {}:\n  expected: {:?}\n  got:      {:?}\nBLESS=1 renews it.",
                line + 1,
                want.lines().nth(line),
                got.lines().nth(line)
            );
        }
    }
}

#[test]
fn the_recipe() -> Result<()> {
    let dev = Device::best();
    let linear = nn::Linear::options().bias(false).device(&dev);
    let model = nn::Sequential::from_iter((0..3).map(|_| linear.build(8, 8)))?;
    model.forward(&Tensor::rand([8], &dev)?)?.sum()?.backward()?;
    let opt = optim::Adam::new(model.parameters(), 0.01)?;
    let step = compile(|| opt.step());
    step()?;
    step()?;
    check("recipe", &step.explain(), &["graph", "prims", "loops", "code"]);
    Ok(())
}

#[test]
fn a_training_step_of_an_mlp() -> Result<()> {
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
    check("mlp", &step.explain(), &["graph", "prims", "loops"]);
    Ok(())
}

#[test]
fn a_forward_whose_backward_happens_outside() -> Result<()> {
    let dev = Device::best();
    let model = nn::seq![nn::Linear::new(8, 16)?, nn::Gelu::default(), nn::Linear::new(16, 3)?];
    let x = Tensor::randn([4, 8], &dev)?;
    let forward = compile(|| model.forward(&x));
    forward()?.sum()?.backward()?;
    check("forward", &forward.explain(), &["graph", "joint", "prims", "loops"]);
    Ok(())
}

#[test]
fn the_tour_is_true() {
    let read = |path: &str| {
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap_or_default()
    };
    let tour = read("../../docs/tour.md");
    for stage in ["graph", "prims", "loops", "code"] {
        let text = read(&format!("tests/golden/recipe.{stage}.txt"));
        assert!(
            tour.contains(text.trim_end()),
            "docs/tour.md does not show the {stage} of the recipe as it is"
        );
    }
}
