//! `kiln info`: what Kiln finds on this machine.

use kiln_runtime::{Compiler, Isa, KernelCache, pool, threads};

use crate::failure::Done;
use crate::output::{self, bytes, count};

/// Prints it.
pub fn run() -> Done {
    let isa = Isa::best();
    let asked =
        if isa == Isa::detect() { String::new() } else { format!(", of {} found", Isa::detect().name()) };
    let compiler = match Compiler::find() {
        Ok(compiler) => compiler.program().display().to_string(),
        Err(error) => format!("none: {error}; programs run eagerly"),
    };
    let cache = match KernelCache::global().directory() {
        Ok(directory) => {
            let contents = KernelCache::global().contents().unwrap_or_default();
            format!(
                "{} ({}, {})",
                directory.display(),
                count(contents.objects, "object"),
                bytes(contents.bytes as f64)
            )
        }
        Err(reason) => format!("off: {reason}"),
    };
    let facts = [
        ("kiln", env!("CARGO_PKG_VERSION").to_owned()),
        ("instructions", format!("{}, {}-byte vectors{asked}", isa.name(), isa.vector_bytes())),
        ("threads", threads::count().to_string()),
        ("memory", bytes(pool::machine_bytes() as f64)),
        ("C compiler", compiler),
        ("kernel cache", cache),
        ("CUDA", "not in this build".to_owned()),
    ];
    let width = facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let text: String = facts.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect();
    Ok(output::print(&text)?)
}
