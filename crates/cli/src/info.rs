//! `kiln info`: what Kiln finds on this machine.

use kiln_runtime::{Compiler, Isa, KernelCache, Machine, machine, pool, threads};

use crate::failure::Done;
use crate::output::{self, bytes, count};

/// Prints it.
pub fn run() -> Done {
    let (Machine { l1, l2, l3, cores, isa }, best) = (*machine(), Isa::detect());
    let asked = if isa == best { String::new() } else { format!(", of {} found", best.name()) };
    let [l1, l2, l3] = [l1, l2, l3].map(|size| size >> 10);
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
        ("instructions", format!("{}, {}-byte vectors{asked}", isa.name(), isa.register_bytes())),
        ("caches of a core", format!("{l1} KiB, {l2} KiB, {l3} KiB of what is shared")),
        ("threads", format!("{} on {}", threads::count(), count(cores, "core"))),
        ("memory", bytes(pool::machine_bytes() as f64)),
        ("C compiler", compiler),
        ("kernel cache", cache),
        ("CUDA", "not in this build".to_owned()),
    ];
    let width = facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let text: String = facts.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect();
    Ok(output::print(&text)?)
}
