//! Tells the compiled code which sources it was made from: plans that another build made are not its own.

use std::collections::BTreeSet;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

/// The crates that take part in making a plan, and in running it.
const CRATES: [&str; 8] = ["ir", "plan", "runtime", "tensor", "prims", "aot", "inductor", "dynamo"];

fn main() {
    let own = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default());
    let mut hash = DefaultHasher::new();
    std::env::var("CARGO_PKG_VERSION").unwrap_or_default().hash(&mut hash);
    // Away from its siblings (as a package) the version alone says which they are.
    for folder in CRATES.iter().filter_map(|name| Some(own.parent()?.join(name).join("src"))) {
        println!("cargo::rerun-if-changed={}", folder.display());
        for file in files(&folder) {
            file.file_name().hash(&mut hash);
            fs::read(&file).unwrap_or_default().hash(&mut hash);
        }
    }
    println!("cargo::rustc-env=KILN_FINGERPRINT={:016x}", hash.finish());
}

fn files(folder: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.insert(path);
        }
    }
    found
}
