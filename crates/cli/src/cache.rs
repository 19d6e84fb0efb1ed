//! `kiln cache`: what lies in the kernel cache, whether it is whole, and away with it.

use clap::Subcommand;
use kiln_runtime::KernelCache;

use crate::failure::{Done, Failure};
use crate::output::{self, bytes, count};

/// What to do with the kernel cache.
#[derive(Subcommand, Copy, Clone)]
pub enum Action {
    /// Show where it is, what lies in it, and its limit (KILN_CACHE_SIZE)
    Info,
    /// Remove everything in it; kernels are compiled again when they are wanted
    Clear,
    /// Check every object; exit with 1 if one is damaged (it would be compiled again)
    Verify,
}

/// Does it.
pub fn run(action: Action) -> Done {
    let cache = KernelCache::global();
    let off = |reason: &kiln_runtime::directory::Refused| Failure::NoCache { reason: reason.to_string() };
    let directory = cache.directory().map_err(off)?.display();
    let text = match action {
        Action::Info => {
            let contents = cache.contents().map_err(off)?;
            let facts = [
                ("directory", directory.to_string()),
                ("objects", contents.objects.to_string()),
                ("texts", contents.texts.to_string()),
                ("plans", contents.plans.to_string()),
                ("measurements", contents.remarks.to_string()),
                ("unfinished", contents.folders.to_string()),
                ("size", bytes(contents.bytes as f64)),
                ("limit", bytes(cache.limit().map_err(off)? as f64)),
            ];
            facts.iter().map(|(name, value)| format!("{name:12}  {value}\n")).collect()
        }
        Action::Clear => {
            let before = cache.clear().map_err(off)?;
            format!(
                "{directory}: {}, {} and {} removed, {}",
                count(before.objects, "object"),
                count(before.plans, "plan"),
                count(before.remarks, "measurement"),
                bytes(before.bytes as f64)
            )
        }
        Action::Verify => {
            let damaged = cache.damaged().map_err(off)?;
            if !damaged.is_empty() {
                let objects = damaged.iter().map(|path| path.display().to_string()).collect();
                return Err(Failure::Damaged { objects });
            }
            let contents = cache.contents().map_err(off)?;
            let (objects, plans) = (count(contents.objects, "object"), count(contents.plans, "plan"));
            format!("{directory}: {objects} and {plans}, all whole")
        }
    };
    Ok(output::print(&text)?)
}
