//! The layers: which crate may know which, and the reading of manifests that checks it.

use std::path::Path;

/// A crate of the workspace, what it may depend on, and why the list is no longer.
struct Layer {
    name: &'static str,
    knows: &'static [&'static str],
}

const fn layer(name: &'static str, knows: &'static [&'static str]) -> Layer {
    Layer { name, knows }
}

/// Every crate, in order; a crate knows only crates above it, and of those only the ones listed.
///
/// The passes (prims, aot, inductor) know graphs and plans: no devices, no tensors.
/// Only dynamo ties them together, and only cli prints.
const LAYERS: &[Layer] = &[
    layer("ir", &[]),
    layer("plan", &["ir"]),
    layer("reference", &["ir", "plan"]),
    layer("runtime", &["ir", "plan"]),
    layer("tensor", &["ir", "plan", "runtime"]),
    layer("prims", &["ir"]),
    layer("aot", &["ir"]),
    layer("inductor", &["ir", "plan", "prims"]),
    layer("repro", &["ir", "tensor", "aot"]),
    layer("dynamo", &["ir", "plan", "reference", "runtime", "tensor", "prims", "aot", "inductor", "repro"]),
    layer("nn-derive", &[]),
    layer("nn", &["ir", "tensor", "nn-derive"]),
    layer("training", &["ir", "tensor", "nn"]),
    layer("models", &["ir", "tensor", "nn"]),
    layer("kiln", &["ir", "runtime", "tensor", "repro", "dynamo", "nn", "training", "models"]),
    layer("corpus", &["kiln"]),
    layer("torch", &["kiln"]),
    layer("cli", &["runtime", "kiln", "corpus"]),
    layer("testkit", &["ir", "reference"]),
    layer("xtask", &[]),
];

/// What every crate takes from the workspace instead of stating it itself.
const INHERITED: &[&str] = &["version", "edition", "rust-version", "license", "publish"];

/// What is wrong with the crates' manifests.
pub fn check(root: &Path) -> Vec<String> {
    let mut problems = Vec::new();
    let mut found: Vec<String> = std::fs::read_dir(root.join("crates"))
        .map(|entries| {
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        })
        .unwrap_or_default();
    found.sort();
    for folder in &found {
        if !LAYERS.iter().any(|layer| layer.name == folder) {
            problems
                .push(format!("crates/{folder}: not in the table of layers (crates/xtask/src/layers.rs)"));
        }
    }
    for (place, layer) in LAYERS.iter().enumerate() {
        let path = format!("{}/Cargo.toml", folder(layer.name));
        match std::fs::read_to_string(root.join(&path)) {
            Ok(text) => {
                problems.extend(check_manifest(place, &text).into_iter().map(|p| format!("{path}: {p}")));
            }
            Err(error) => problems.push(format!("{path}: {error}")),
        }
    }
    problems
}

/// Folders of all crates.
pub fn folders() -> impl Iterator<Item = String> {
    LAYERS.iter().map(|layer| folder(layer.name))
}

/// The folder of a crate: the corpus and the comparison with PyTorch are no part of the compiler and lie with the
/// tests.
fn folder(name: &str) -> String {
    match name {
        "corpus" | "torch" => format!("tests/{name}"),
        _ => format!("crates/{name}"),
    }
}

fn check_manifest(place: usize, text: &str) -> Vec<String> {
    let layer = &LAYERS[place];
    let above = || LAYERS[..place].iter().map(|layer| layer.name);
    let mut problems = Vec::new();
    for dependency in dependencies(text) {
        let Some(name) = LAYERS.iter().map(|l| l.name).find(|name| package(name) == dependency.name) else {
            continue;
        };
        let allowed = if dependency.for_tests {
            // Tests may look at any crate above, and use the kit.
            name == "testkit" || above().any(|other| other == name) || layer.name == "testkit"
        } else {
            layer.knows.contains(&name)
        };
        if !allowed {
            let may = if layer.knows.is_empty() { "no crate of ours".into() } else { layer.knows.join(", ") };
            problems.push(format!("`{}` must not know `{name}` (it may know {may})", layer.name));
        }
    }
    for key in INHERITED {
        if !text.lines().any(|line| line.replace(' ', "") == format!("{key}.workspace=true")) {
            problems.push(format!("`{key}` must come from the workspace: `{key}.workspace = true`"));
        }
    }
    let lints =
        text.split("[lints]").nth(1).is_some_and(|rest| rest.trim_start().starts_with("workspace = true"));
    if !lints {
        problems.push("the workspace's lints are not in force: `[lints] workspace = true`".into());
    }
    problems
}

/// The package name of a crate.
fn package(name: &str) -> String {
    match name {
        "kiln" | "xtask" => name.into(),
        _ => format!("kiln-{name}"),
    }
}

struct Dependency<'a> {
    name: &'a str,
    for_tests: bool,
}

/// All entries of the dependency tables, `[dependencies.name]` and `[target.….dependencies]` included.
fn dependencies(text: &str) -> Vec<Dependency<'_>> {
    let mut found = Vec::new();
    let mut inside = None;
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let for_tests = section.contains("dev-dependencies");
            inside = section.ends_with("dependencies").then_some(for_tests);
            if let Some((_, name)) = section.rsplit_once("dependencies.") {
                found.push(Dependency { name, for_tests });
            }
        } else if let (Some(for_tests), Some((key, _))) = (inside, line.split_once('=')) {
            let name = key.trim().split('.').next().unwrap_or_default().trim_matches('"');
            if !name.starts_with('#') {
                found.push(Dependency { name, for_tests });
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(layer: &str, manifest: &str) -> Vec<String> {
        let place = LAYERS.iter().position(|l| l.name == layer).unwrap();
        let inherited: String = INHERITED.iter().map(|key| format!("{key}.workspace = true\n")).collect();
        check_manifest(place, &format!("[package]\n{inherited}\n[lints]\nworkspace = true\n\n{manifest}"))
    }

    #[test]
    fn the_table_only_points_upwards() {
        for (place, layer) in LAYERS.iter().enumerate() {
            for known in layer.knows {
                assert!(LAYERS[..place].iter().any(|l| l.name == *known), "{} → {known}", layer.name);
            }
        }
    }

    #[test]
    fn what_is_listed_is_allowed() {
        assert_eq!(check("tensor", "[dependencies]\nkiln-ir.workspace = true\nthiserror = \"2\"\n"), [""; 0]);
        assert_eq!(check("ir", "[dev-dependencies]\nkiln-testkit.workspace = true\n"), [""; 0]);
    }

    #[test]
    fn what_is_not_listed_is_named() {
        for manifest in [
            "[dependencies]\nkiln-tensor.workspace = true\n",
            "[dependencies]\nkiln-tensor = { path = \"../tensor\" }\n",
            "[dependencies.kiln-tensor]\npath = \"../tensor\"\n",
            "[target.'cfg(unix)'.dependencies]\nkiln-tensor.workspace = true\n",
            "[build-dependencies]\nkiln-tensor.workspace = true\n",
        ] {
            assert_eq!(
                check("prims", manifest),
                ["`prims` must not know `tensor` (it may know ir)"],
                "{manifest}"
            );
        }
        assert_eq!(
            check("ir", "[dev-dependencies]\nkiln.workspace = true\n"),
            ["`ir` must not know `kiln` (it may know no crate of ours)"]
        );
    }

    #[test]
    fn a_manifest_must_inherit() {
        let problems = check_manifest(0, "[package]\nname = \"kiln-ir\"\nlicense.workspace = true\n");
        assert_eq!(problems.len(), INHERITED.len());
    }
}
