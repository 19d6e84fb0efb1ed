//! Every example runs, and `docs/from-pytorch.md` shows the code and the output that it has.
//!
//! The examples are modules of this program, which starts itself once for each: they are built with the tests and
//! nothing else, and what they print can be read.

#![allow(clippy::unwrap_used, clippy::print_stdout)] // a test may panic

use std::process::Command;

/// Declares the examples and lists them.
macro_rules! examples {
    ($($name:ident = $path:literal),* $(,)?) => {
        $(#[path = $path] mod $name;)*
        const EXAMPLES: &[(&str, fn() -> kiln::Result<()>, &str)] =
            &[$((stringify!($name), $name::main, include_str!($path))),*];
    };
}

examples! {
    attributes = "../examples/attributes.rs",
    compile_options = "../examples/compile_options.rs",
    custom_backend = "../examples/custom_backend.rs",
    dynamic_shapes = "../examples/dynamic_shapes.rs",
    explain = "../examples/explain.rs",
    inference = "../examples/inference.rs",
    recipe = "../examples/recipe.rs",
    resnet18 = "../examples/resnet18.rs",
    scan = "../examples/scan.rs",
    serialization = "../examples/serialization.rs",
    simple_model = "../examples/simple_model.rs",
    tensors = "../examples/tensors.rs",
    train_step = "../examples/train_step.rs",
    training = "../examples/training.rs",
}

/// Those that print times, or more than the page shows.
const PRINT_THEIR_OWN: &[&str] = &["custom_backend", "explain", "inference"];

/// Tells the process which example it is.
const WHICH: &str = "KILN_EXAMPLE";

fn main() {
    if let Ok(which) = std::env::var(WHICH) {
        let (_, run, _) = EXAMPLES.iter().find(|(name, ..)| *name == which).unwrap();
        return run().unwrap();
    }
    // Without a C compiler nothing is fused: other numbers of kernels.
    let compiler = kiln::runtime::Compiler::find().is_ok();
    let page = include_str!("../../../docs/from-pytorch.md");
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples")).unwrap();
    assert_eq!(files.count(), EXAMPLES.len(), "an example is not in the list");
    for (name, _, source) in EXAMPLES {
        let ran = Command::new(std::env::current_exe().unwrap()).env(WHICH, name).output().unwrap();
        let (out, err) = (String::from_utf8(ran.stdout).unwrap(), String::from_utf8_lossy(&ran.stderr));
        assert!(ran.status.success() && !out.is_empty(), "{name}: {out}{err}");
        assert!(page.contains(&format!("`{name}`")), "docs/from-pytorch.md does not name {name}");
        if compiler && !PRINT_THEIR_OWN.contains(name) {
            assert!(
                page.contains(&format!("```text\n{out}```")),
                "docs/from-pytorch.md: {name} prints\n{out}"
            );
        }
        println!("{name}: ok, {} lines of {}", out.lines().count(), source.lines().count());
    }
    // The Rust of the page is that of the examples, less the indentation of `main`.
    for block in page.split("```rust\n").skip(1) {
        let block = block.split("```").next().unwrap();
        let shown = |source: &str| {
            let lines = source.lines().map(|line| line.strip_prefix("    ").unwrap_or(line));
            lines.collect::<Vec<_>>().join("\n").contains(block.trim_end())
        };
        let known = EXAMPLES.iter().any(|(_, _, source)| source.contains(block.trim_end()) || shown(source));
        assert!(known, "docs/from-pytorch.md: in no example\n{block}");
    }
}
