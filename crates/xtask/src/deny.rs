//! `cargo xtask deny`: licences, sources and bans of `deny.toml`, checked against `Cargo.lock` and cargo's metadata.
//!
//! `cargo deny` checks the same and more, but takes longer to build than Kiln: 170 crates. So what needs no network is
//! checked here, by the rules of the same file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// A package of `Cargo.lock`.
#[derive(Default)]
struct Locked {
    name: String,
    version: String,
    source: Option<String>,
    checksum: bool,
}

/// What is against `deny.toml`.
pub fn check(root: &Path, cargo: Command) -> Vec<String> {
    let read =
        |name: &str| std::fs::read_to_string(root.join(name)).map_err(|error| format!("{name}: {error}"));
    match (read("deny.toml"), read("Cargo.lock"), metadata(cargo)) {
        (Ok(rules), Ok(lock), Ok(packages)) => {
            let mut problems = sources(&rules, &locked(&lock));
            problems.extend(bans(&rules, &locked(&lock)));
            problems.extend(licences(&rules, &packages));
            problems
        }
        (rules, lock, packages) => [rules.err(), lock.err(), packages.err()].into_iter().flatten().collect(),
    }
}

/// Names and licences of the packages that are built on this machine.
fn metadata(mut cargo: Command) -> Result<Vec<(String, String)>, String> {
    let output = cargo.output().map_err(|error| format!("cargo metadata: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let parsed: Value =
        serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata: {error}"))?;
    // Of the packages of all platforms, those that have a place in this one's graph.
    let nodes = parsed["resolve"]["nodes"].as_array().cloned().unwrap_or_default();
    let built: BTreeSet<&str> = nodes.iter().filter_map(|node| node["id"].as_str()).collect();
    let text = |package: &Value, field: &str| package[field].as_str().unwrap_or_default().to_string();
    let packages = parsed["packages"].as_array().into_iter().flatten();
    Ok(packages
        .filter(|package| package["id"].as_str().is_some_and(|id| built.contains(id)))
        .map(|package| (text(package, "name"), text(package, "license")))
        .collect())
}

/// The packages of a lock file.
fn locked(lock: &str) -> Vec<Locked> {
    let mut packages: Vec<Locked> = Vec::new();
    for line in lock.lines() {
        if line == "[[package]]" {
            packages.push(Locked::default());
        }
        if let (Some(package), Some((key, value))) = (packages.last_mut(), line.split_once(" = ")) {
            let value = value.trim_matches('"').to_string();
            match key {
                "name" => package.name = value,
                "version" => package.version = value,
                "source" => package.source = Some(value),
                "checksum" => package.checksum = true,
                _ => {}
            }
        }
    }
    packages
}

/// The strings of a list in a section of `deny.toml`; of a table in it, the one under `crate`.
fn list<'a>(rules: &'a str, section: &str, key: &str) -> Vec<&'a str> {
    let heading = format!("[{section}]");
    let lines = rules.lines().map(str::trim).skip_while(|line| *line != heading).skip(1);
    let mut lines = lines.take_while(|line| !line.starts_with('[')).filter(|line| !line.starts_with('#'));
    let Some(first) = lines.find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix('=')) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for line in std::iter::once(first).chain(lines) {
        // In a table the first string is the crate's.
        let strings = line.split('"').skip(1).step_by(2);
        found.extend(strings.take(if line.starts_with('{') { 1 } else { usize::MAX }));
        if line.ends_with(']') {
            break;
        }
    }
    found
}

fn sources(rules: &str, packages: &[Locked]) -> Vec<String> {
    let allowed = list(rules, "sources", "allow-registry");
    let foreign = packages.iter().filter_map(|package| {
        let (name, source) = (&package.name, package.source.as_deref()?);
        match source.strip_prefix("registry+") {
            Some(registry) if !allowed.contains(&registry) => Some(format!("{name} comes from {registry}")),
            None => Some(format!("{name} comes from {source}")),
            Some(_) if !package.checksum => Some(format!("{name} has no checksum in Cargo.lock")),
            Some(_) => None,
        }
    });
    foreign.collect()
}

fn bans(rules: &str, packages: &[Locked]) -> Vec<String> {
    let (denied, skipped) = (list(rules, "bans", "deny"), list(rules, "bans", "skip"));
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in packages {
        versions.entry(&package.name).or_default().insert(&package.version);
    }
    let several = |name: &str| versions.get(name).is_some_and(|versions| versions.len() > 1);
    let banned = versions.keys().filter(|name| denied.contains(name)).map(|name| format!("{name} is banned"));
    let twice =
        versions.iter().filter(|(name, _)| several(name) && !skipped.contains(name)).map(|(name, all)| {
            let all: Vec<&str> = all.iter().copied().collect();
            format!("{name} is there as {}: agree on one, or say in deny.toml why not", all.join(" and "))
        });
    let needless = skipped.iter().filter(|name| !several(name));
    let needless = needless.map(|name| format!("deny.toml skips {name}, of which there is one version"));
    banned.chain(twice).chain(needless).collect()
}

fn licences(rules: &str, packages: &[(String, String)]) -> Vec<String> {
    let allowed = list(rules, "licenses", "allow");
    let refused = packages.iter().filter(|(_, licence)| !permitted(licence, &allowed));
    refused
        .map(|(name, licence)| format!("{name} is under {licence:?}, which deny.toml does not allow"))
        .collect()
}

/// Whether a licence expression (`(MIT OR Apache-2.0) AND Unicode-3.0`) can be met by licences of the list. An older
/// form writes `/` for OR.
fn permitted(expression: &str, allowed: &[&str]) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = &words[..];
    let met = any(&mut rest, allowed);
    rest.is_empty() && met == Some(true)
}

fn any(words: &mut &[&str], allowed: &[&str]) -> Option<bool> {
    let mut met = all(words, allowed)?;
    while let Some(("OR", rest)) = words.split_first().map(|(first, rest)| (*first, rest)) {
        *words = rest;
        met |= all(words, allowed)?;
    }
    Some(met)
}

fn all(words: &mut &[&str], allowed: &[&str]) -> Option<bool> {
    let mut met = one(words, allowed)?;
    while let Some(("AND", rest)) = words.split_first().map(|(first, rest)| (*first, rest)) {
        *words = rest;
        met &= one(words, allowed)?;
    }
    Some(met)
}

fn one(words: &mut &[&str], allowed: &[&str]) -> Option<bool> {
    let (first, rest) = words.split_first()?;
    *words = rest;
    if *first != "(" {
        return Some(allowed.contains(first));
    }
    let met = any(words, allowed)?;
    let (")", rest) = words.split_first().map(|(first, rest)| (*first, rest))? else { return None };
    *words = rest;
    Some(met)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: &str = r#"
[licenses]
# Which.
allow = [
    "MIT",
    "Zlib",
]
[sources]
allow-registry = ["https://a", "https://b"]
[bans]
deny = [
    { crate = "curl", reason = "no network" },
]
skip = [
    { crate = "syn", reason = "on its way" },
]
"#;

    #[test]
    fn lists_are_read() {
        assert_eq!(list(RULES, "licenses", "allow"), ["MIT", "Zlib"]);
        assert_eq!(list(RULES, "sources", "allow-registry"), ["https://a", "https://b"]);
        assert_eq!(list(RULES, "bans", "deny"), ["curl"]);
        assert_eq!(list(RULES, "bans", "skip"), ["syn"]);
        assert!(list(RULES, "bans", "none").is_empty() && list(RULES, "none", "skip").is_empty());
    }

    #[test]
    fn licences_are_expressions() {
        let allowed = ["MIT", "Zlib", "Unicode-3.0"];
        for (expression, expected) in [
            ("MIT", true),
            ("GPL-3.0", false),
            ("GPL-3.0 OR MIT", true),
            ("GPL-3.0/MIT", true),
            ("GPL-3.0 AND MIT", false),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("MIT OR Apache-2.0 AND GPL-3.0", true),
            ("(MIT OR Apache-2.0) AND GPL-3.0", false),
            ("Apache-2.0 WITH LLVM-exception", false),
            ("(MIT", false),
            ("MIT Zlib", false),
            ("", false),
        ] {
            assert_eq!(permitted(expression, &allowed), expected, "{expression}");
        }
    }

    #[test]
    fn lock_files_are_checked() {
        let package = |name: &str, version: &str, source: &str| {
            format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\n{source}\n")
        };
        let good = "source = \"registry+https://a\"\nchecksum = \"0\"";
        let check = |packages: &[String]| {
            let packages = locked(&packages.concat());
            [sources(RULES, &packages), bans(RULES, &packages)].concat()
        };
        let two = [package("syn", "2", good), package("syn", "3", good)];
        assert!(check(&[package("kiln", "1", ""), two.concat()]).is_empty());
        let told = |name: &str, source: &str| check(&[package(name, "1", source), two.concat()]).join("; ");
        assert_eq!(told("x", "source = \"registry+https://c\"\nchecksum = \"0\""), "x comes from https://c");
        assert_eq!(told("x", "source = \"git+https://a\""), "x comes from git+https://a");
        assert_eq!(told("x", "source = \"registry+https://a\""), "x has no checksum in Cargo.lock");
        assert_eq!(told("curl", good), "curl is banned");
        let twice = check(&[package("x", "1", good), package("x", "2", good), two.concat()]).join("; ");
        assert!(twice.starts_with("x is there as 1 and 2"), "{twice}");
        assert_eq!(check(&[two[0].clone()]), ["deny.toml skips syn, of which there is one version"]);
    }
}
