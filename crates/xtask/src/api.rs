//! The public interface of `kiln` as text, `docs/api.txt`: a test compares it with the sources, so that no name, method
//! or field comes, goes or changes unnoticed. `BLESS=1 cargo test -p xtask interface` renews it; read the difference.
//!
//! It is read from the sources, through all `pub use`: every path that a program can name, then what each of them is,
//! with its public fields, methods and impls. Macros are not expanded: of a macro that makes public items the listing
//! has what it makes (`pub fn $name(…)`) and each call of it. Methods by rows of the op table are in `docs/ops.md`.

mod names;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write;
use std::path::Path;
use std::sync::OnceLock;

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::{Fields, ImplItem, Item, TraitItem, Type};

use names::{Module, Modules, Target, attributes, is_public, named};

/// The libraries that `kiln` may hand on something of.
const LIBRARIES: &[(&str, &str)] = &[
    ("kiln_ir", "ir"),
    ("kiln_plan", "plan"),
    ("kiln_runtime", "runtime"),
    ("kiln_tensor", "tensor"),
    ("kiln_inductor", "inductor"),
    ("kiln_dynamo", "dynamo"),
    ("kiln_nn_derive", "nn-derive"),
    ("kiln_nn", "nn"),
    ("kiln_training", "training"),
    ("kiln_models", "models"),
    ("kiln", "kiln"),
];

/// The whole listing.
fn listing(root: &Path) -> Result<String, String> {
    let mut modules = Modules::default();
    for (name, folder) in LIBRARIES {
        modules.read(name, &root.join("crates").join(folder).join("src/lib.rs"))?;
    }
    let (paths, shown) = reachable(&modules);
    let mut definitions: BTreeMap<Target, BTreeSet<String>> =
        shown.iter().map(|target| (target.clone(), BTreeSet::new())).collect();
    for module in modules.0.values() {
        for item in &module.items {
            define(&modules, module, item, &mut definitions);
        }
    }
    let mut out = String::from("# What a program can name\n\n");
    paths.iter().for_each(|line| _ = writeln!(out, "{line}"));
    out.push_str("\n# What these are\n");
    for (target, lines) in definitions {
        let _ = writeln!(out, "\n{}", full_name(&target));
        lines.iter().for_each(|line| _ = writeln!(out, "    {line}"));
    }
    out.push_str("\n# What macros make\n");
    for line in by_macros(&modules, &shown) {
        out.push_str(&line);
    }
    Ok(out)
}

fn full_name(target: &Target) -> String {
    match target {
        Target::Module(path) => path.join("::"),
        Target::Item { module, name } => format!("{}::{name}", module.join("::")),
        Target::Outside(path) => path.clone(),
    }
}

/// Every path from `kiln` on, with what it stands for; and the items among them.
fn reachable(modules: &Modules) -> (Vec<String>, BTreeSet<Target>) {
    let (mut lines, mut shown) = (Vec::new(), BTreeSet::new());
    let mut at: BTreeMap<Vec<String>, String> = BTreeMap::new();
    let mut waiting = VecDeque::from([(vec!["kiln".to_string()], "kiln".to_string())]);
    while let Some((path, public)) = waiting.pop_front() {
        if let Some(first) = at.get(&path) {
            lines.push(format!("{public} = {first}"));
            continue;
        }
        at.insert(path.clone(), public.clone());
        let Some(module) = modules.0.get(&path) else { continue };
        let own = |name: &str| Target::Item { module: path.clone(), name: name.to_string() };
        let mut found: Vec<(String, Target)> = Vec::new();
        for (name, _) in module.children.iter().filter(|(_, public)| *public) {
            found.push((name.clone(), Target::Module(path.iter().cloned().chain([name.clone()]).collect())));
        }
        for (name, path, _) in module.uses.iter().filter(|(.., public)| *public) {
            let target = modules.resolve(&module.path, path);
            found.push((name.clone(), target.unwrap_or_else(|| Target::Outside(path.join("::")))));
        }
        for item in module.items.iter().filter(|item| is_public_item(item)) {
            found.extend(named(item).map(|name| (name.clone(), own(&name))));
        }
        for (name, target) in found {
            let public = format!("{public}::{name}");
            match target {
                Target::Module(path) => waiting.push_back((path, public)),
                Target::Item { .. } => {
                    lines.push(format!("{public} = {}", full_name(&target)));
                    shown.insert(target);
                }
                Target::Outside(path) => lines.push(format!("{public} = {path}")),
            }
        }
    }
    // Macros lie at the root of their crate.
    for module in modules.0.values().filter(|module| at.contains_key(&module.path[..1])) {
        for item in &module.items {
            if let (Item::Macro(made), true) = (item, is_exported(item)) {
                let name = made.ident.as_ref().map(ToString::to_string).unwrap_or_default();
                lines.push(format!(
                    "{}::{name}! = {}::{name}",
                    at[&module.path[..1]],
                    module.path.join("::")
                ));
            }
        }
    }
    lines.sort();
    (lines, shown)
}

fn is_public_item(item: &Item) -> bool {
    match item {
        Item::Const(item) => is_public(&item.vis),
        Item::Enum(item) => is_public(&item.vis),
        Item::Fn(item) => is_public(&item.vis),
        Item::Static(item) => is_public(&item.vis),
        Item::Struct(item) => is_public(&item.vis),
        Item::Trait(item) => is_public(&item.vis),
        Item::Type(item) => is_public(&item.vis),
        _ => false,
    }
}

fn is_exported(item: &Item) -> bool {
    attributes(item).iter().any(|attribute| attribute.path().is_ident("macro_export"))
}

/// What an item says of the definitions that are shown.
fn define(modules: &Modules, module: &Module, item: &Item, shown: &mut BTreeMap<Target, BTreeSet<String>>) {
    if let Item::Impl(block) = item {
        let header = cut(module, block.impl_token.span, block.brace_token.span.open());
        let target = |path: &syn::Path| {
            let names: Vec<String> = path.segments.iter().map(|step| step.ident.to_string()).collect();
            modules.resolve(&module.path, &names)
        };
        let own = match &*block.self_ty {
            // A name that is not there is one that a macro makes here.
            Type::Path(path) => target(&path.path).or_else(|| {
                let name = path.path.get_ident()?.to_string();
                Some(Target::Item { module: module.path.clone(), name })
            }),
            _ => None,
        };
        match &block.trait_ {
            Some((path, _)) => {
                // It belongs to its type, or to its trait where the type is everybody's.
                let of = own.filter(|own| shown.contains_key(own)).or_else(|| target(path));
                if let Some(lines) = of.and_then(|of| shown.get_mut(&of)) {
                    lines.insert(header);
                }
            }
            None => {
                let Some(lines) = own.and_then(|own| shown.get_mut(&own)) else { return };
                let header = header.strip_prefix("impl").unwrap_or(&header).trim().to_string();
                for item in &block.items {
                    let signature = match item {
                        ImplItem::Fn(item) if is_public(&item.vis) => whole(module, item.sig.span()),
                        ImplItem::Const(item) if is_public(&item.vis) => {
                            format!("const {}: {}", item.ident, whole(module, item.ty.span()))
                        }
                        _ => continue,
                    };
                    lines.insert(format!("{header}: {signature}"));
                }
            }
        }
        return;
    }
    let Some(name) = named(item) else { return };
    let target = Target::Item { module: module.path.clone(), name };
    let Some(lines) = shown.get_mut(&target) else { return };
    for attribute in attributes(item) {
        let is_said = ["derive", "non_exhaustive", "must_use", "deprecated"];
        if is_said.iter().any(|word| attribute.path().is_ident(word)) {
            lines.insert(whole(module, attribute.span()));
        }
    }
    match item {
        Item::Struct(item) => {
            let end = item.generics.span();
            let start = item.struct_token.span;
            let header = if item.generics.params.is_empty() { item.ident.span() } else { end };
            lines.insert(format!("{}{}", between(module, start, header), clause(module, &item.generics)));
            fields(module, "", &item.fields, lines);
        }
        Item::Enum(item) => {
            lines.insert(cut(module, item.enum_token.span, item.brace_token.span.open()));
            for variant in &item.variants {
                lines.insert(format!("{}: variant", variant.ident));
                for field in &variant.fields {
                    let name = field.ident.as_ref().map(ToString::to_string).unwrap_or_default();
                    lines.insert(format!("{}: {name}: {}", variant.ident, whole(module, field.ty.span())));
                }
            }
        }
        Item::Trait(item) => {
            let start = item.unsafety.map_or(item.trait_token.span, |word| word.span);
            lines.insert(cut(module, start, item.brace_token.span.open()));
            for item in &item.items {
                lines.insert(match item {
                    TraitItem::Fn(item) => {
                        let given = if item.default.is_some() { " { … }" } else { "" };
                        format!("{}{given}", whole(module, item.sig.span()))
                    }
                    other => whole(module, other.span()),
                });
            }
        }
        Item::Fn(item) => _ = lines.insert(whole(module, item.sig.span())),
        Item::Const(item) => _ = lines.insert(format!("const: {}", whole(module, item.ty.span()))),
        Item::Static(item) => _ = lines.insert(format!("static: {}", whole(module, item.ty.span()))),
        Item::Type(item) => _ = lines.insert(whole(module, item.span())),
        _ => {}
    }
}

fn clause(module: &Module, generics: &syn::Generics) -> String {
    generics
        .where_clause
        .as_ref()
        .map(|clause| format!(" {}", whole(module, clause.span())))
        .unwrap_or_default()
}

/// The public fields of a struct, and whether there are others.
fn fields(module: &Module, of: &str, all: &Fields, lines: &mut BTreeSet<String>) {
    for (place, field) in all.iter().enumerate() {
        let name = field.ident.as_ref().map_or_else(|| place.to_string(), ToString::to_string);
        lines.insert(if is_public(&field.vis) {
            format!("{of}pub {name}: {}", whole(module, field.ty.span()))
        } else {
            format!("{of}private fields")
        });
    }
}

/// Macros that make public items, or impls of a trait that is shown: what they make, and their calls.
fn by_macros(modules: &Modules, shown: &BTreeSet<Target>) -> Vec<String> {
    let mut made: BTreeMap<(String, Vec<String>), BTreeSet<String>> = BTreeMap::new();
    let mut names: BTreeMap<String, Vec<&[String]>> = BTreeMap::new();
    let mut texts = BTreeMap::new();
    for module in modules.0.values() {
        for item in &module.items {
            let Item::Macro(item) = item else { continue };
            let (Some(name), true) = (&item.ident, item.mac.path.is_ident("macro_rules")) else { continue };
            let name = name.to_string();
            texts.insert((name.clone(), &module.path[..]), whole(module, item.mac.span()));
            names.entry(name).or_default().push(&module.path);
        }
    }
    for ((name, module), body) in &texts {
        let templates = templates(modules, module, body, shown);
        if !templates.is_empty() {
            made.entry((name.clone(), module.to_vec())).or_default().extend(templates);
        }
    }
    for module in modules.0.values() {
        let mut note = |mac: &syn::Macro| {
            let name = mac.path.segments.last().map(|step| step.ident.to_string()).unwrap_or_default();
            // Its own, or the one that there is.
            let places = names.get(&name).map(Vec::as_slice).unwrap_or_default();
            let place = places.iter().find(|place| **place == module.path).or(places.first());
            if let Some(lines) = place.and_then(|place| made.get_mut(&(name.clone(), place.to_vec()))) {
                let call = shortened(&whole(module, mac.span()));
                lines.insert(format!("{}: {call}", module.path.join("::")));
            }
        };
        for item in &module.items {
            match item {
                Item::Macro(item) if item.ident.is_none() => note(&item.mac),
                Item::Impl(block) => block.items.iter().for_each(|item| {
                    if let ImplItem::Macro(item) = item {
                        note(&item.mac);
                    }
                }),
                _ => {}
            }
        }
    }
    let text = |((name, module), lines): (&(String, Vec<String>), &BTreeSet<String>)| {
        let lines: String = lines.iter().map(|line| format!("    {line}\n")).collect();
        format!("\n{}::{name}!\n{lines}", module.join("::"))
    };
    made.iter().map(text).collect()
}

/// The public items that the text of a macro has, without their bodies, and the impls.
fn templates(modules: &Modules, module: &[String], body: &str, shown: &BTreeSet<Target>) -> Vec<String> {
    const ITEMS: &[&str] =
        &["const", "enum", "fn", "mod", "static", "struct", "trait", "type", "unsafe", "use"];
    let words: Vec<&str> = body.split(' ').collect();
    let until = |i: usize, ends: &dyn Fn(&str) -> bool| {
        let end = words[i..].iter().position(|word| ends(word)).map_or(words.len(), |n| i + n + 1);
        words[i..end].join(" ").trim_end_matches(['{', ' ', ',']).to_string()
    };
    let opens = |word: &str| word.ends_with('{') || word.ends_with(';');
    let (mut found, mut impls) = (Vec::new(), Vec::new());
    for (i, word) in words.iter().enumerate() {
        let word = word.trim_start_matches(['{', '(']);
        let is_item = words.get(i + 1).is_some_and(|next| ITEMS.contains(next));
        if word == "pub" && is_item {
            found.push(until(i, &opens));
        } else if word == "pub" {
            found.push(until(i, &|word| opens(word) || word.contains(',')));
        } else if word == "impl" || word.starts_with("impl<") {
            let item = until(i, &opens);
            let Some((head, _)) = item.split_once(" for ") else { continue };
            // The trait's path, without what is between angle brackets behind it.
            let mut depth = 0;
            let path = head.char_indices().rev().find(|&(_, c)| {
                depth += i32::from(c == '>') - i32::from(c == '<');
                depth == 0 && c == ' '
            });
            let path = &head[path.map_or(0, |(at, _)| at + 1)..];
            let path: Vec<String> =
                path.split('<').next().unwrap_or(path).split("::").map(String::from).collect();
            match modules.resolve(module, &path) {
                Some(target) if shown.contains(&target) => found.push(item),
                Some(Target::Outside(_)) | None => impls.push(item),
                Some(_) => {}
            }
        }
    }
    // Everybody's traits count where something public is made.
    if !found.is_empty() {
        found.extend(impls);
    }
    found
}

/// The text of a macro's call without the bodies inside of it.
fn shortened(text: &str) -> String {
    let (mut depth, mut out) = (0, String::new());
    for c in text.chars() {
        depth -= i32::from(c == '}');
        if depth < 2 {
            if c == '}' && depth == 1 && out.ends_with('{') {
                out.push('…');
            }
            out.push(c);
        }
        depth += i32::from(c == '{');
    }
    out
}

/// The text of something whole.
fn whole(module: &Module, span: Span) -> String {
    text(module, span.start(), span.end())
}

/// From the start of one to the start of another.
fn cut(module: &Module, from: Span, to: Span) -> String {
    text(module, from.start(), to.start())
}

/// From the start of one to the end of another.
fn between(module: &Module, from: Span, to: Span) -> String {
    text(module, from.start(), to.end())
}

/// A piece of a module's text on one line, as if it had always been on one.
fn text(module: &Module, from: proc_macro2::LineColumn, to: proc_macro2::LineColumn) -> String {
    let mut piece = String::new();
    for (number, line) in (from.line..).zip(&module.text[from.line - 1..to.line]) {
        let begin = if number == from.line { from.column } else { 0 };
        let end = if number == to.line { to.column } else { usize::MAX };
        piece.extend(line.chars().skip(begin).take(end - begin));
        piece.push(' ');
    }
    let mut piece = piece.split_whitespace().collect::<Vec<_>>().join(" ");
    for (long, short) in [("( ", "("), (", )", ")"), (" )", ")"), ("< ", "<"), (", >", ">"), ("[ ", "[")] {
        piece = piece.replace(long, short);
    }
    piece.trim_end_matches(',').trim().to_string()
}

/// The listing of this repository.
fn own() -> &'static str {
    static LISTING: OnceLock<String> = OnceLock::new();
    LISTING.get_or_init(|| listing(&crate::root()).unwrap_or_else(|error| panic!("{error}")))
}

#[test]
fn the_interface_is_as_listed() {
    let (now, path) = (own(), crate::root().join("docs/api.txt"));
    if std::env::var_os("BLESS").is_some_and(|bless| bless == "1") {
        std::fs::write(&path, now).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    let listed = std::fs::read_to_string(&path).unwrap_or_default();
    let (listed, now): (BTreeSet<&str>, BTreeSet<&str>) = (listed.lines().collect(), now.lines().collect());
    let gone: Vec<String> = listed.difference(&now).map(|line| format!("- {line}")).collect();
    let new: Vec<String> = now.difference(&listed).map(|line| format!("+ {line}")).collect();
    assert!(
        gone.is_empty() && new.is_empty(),
        "the interface of kiln is not as docs/api.txt has it:\n{}\n{}\n\
         `BLESS=1 cargo test -p xtask interface` renews the page",
        gone.join("\n"),
        new.join("\n")
    );
}

/// What would let safe code reach what runs trust: none of it is to be had through `kiln`.
#[test]
fn the_interface_has_nothing_that_runs_trust() {
    let listed = own();
    let (paths, _) = listed.split_once("\n# What these are\n").unwrap_or_default();
    for hidden in [
        "::hook::",
        "tensor::internal",
        "::program",
        "::storage",
        "Ready",
        "Executable",
        "Recorder",
        "KernelCache",
    ] {
        let shown: Vec<&str> = paths.lines().filter(|line| line.contains(hidden)).collect();
        assert!(
            shown.iter().all(|line| ["hook::Arg", "hook::Output"].iter().any(|fine| line.ends_with(fine))),
            "{shown:?}"
        );
    }
    let tensor =
        listed.split("\nkiln_tensor::tensor::Tensor\n").nth(1).and_then(|rest| rest.split("\n\n").next());
    let tensor = tensor.unwrap_or_default();
    for hidden in ["lazy(", "publish(", "set_tag(", "prefetch(", "from_ready(", "try_ready("] {
        assert!(!tensor.contains(&format!("fn {hidden}")), "{hidden}");
    }
    assert!(tensor.contains("fn deep_clone(&self) -> Result<Tensor>"), "{tensor}");
}
