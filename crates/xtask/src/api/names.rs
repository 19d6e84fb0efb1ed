//! The crates' sources as trees of modules, and what a name in one of them stands for.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use syn::{Item, UseTree, Visibility};

/// The lines of a file without their comments and literals: what signatures are cut from.
pub type Text = Rc<[String]>;

/// A module: its items, its children, and what it has in scope by `use`.
pub struct Module {
    /// `kiln_tensor::autograd::mode`.
    pub path: Vec<String>,
    pub text: Text,
    pub items: Vec<Item>,
    /// Names brought in by `use`: name, full path as written, whether for everybody.
    pub uses: Vec<(String, Vec<String>, bool)>,
    /// Modules below: name, and whether for everybody.
    pub children: Vec<(String, bool)>,
}

/// All modules of the workspace's libraries, by path.
#[derive(Default)]
pub struct Modules(pub BTreeMap<Vec<String>, Module>);

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    Module(Vec<String>),
    /// An item of a module, or what a macro made there.
    Item {
        module: Vec<String>,
        name: String,
    },
    /// Somebody else's.
    Outside(String),
}

impl Modules {
    /// Reads a library from its `lib.rs`.
    pub fn read(&mut self, name: &str, file: &Path) -> Result<(), String> {
        self.module(vec![name.to_string()], file, &folder_of(file))
    }

    fn module(&mut self, path: Vec<String>, file: &Path, folder: &Path) -> Result<(), String> {
        let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let parsed = syn::parse_file(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        let text: Text = crate::source::code_only(&text).lines().map(String::from).collect();
        self.items(path, text, parsed.items, folder)
    }

    fn items(
        &mut self,
        path: Vec<String>,
        text: Text,
        items: Vec<Item>,
        folder: &Path,
    ) -> Result<(), String> {
        let mut module =
            Module { path: path.clone(), text, items: Vec::new(), uses: Vec::new(), children: Vec::new() };
        for item in items {
            match item {
                item if is_for_tests(attributes(&item)) => {}
                Item::Mod(child) => {
                    let name = child.ident.to_string();
                    module.children.push((name.clone(), is_public(&child.vis)));
                    let below = path.iter().cloned().chain([name.clone()]).collect();
                    match child.content {
                        Some((_, items)) => {
                            self.items(below, module.text.clone(), items, &folder.join(&name))?;
                        }
                        None => {
                            let beside = folder.join(format!("{name}.rs"));
                            let inside = folder.join(&name).join("mod.rs");
                            let file = if beside.exists() { beside } else { inside };
                            self.module(below, &file, &folder.join(&name))?;
                        }
                    }
                }
                Item::Use(used) => {
                    let public = is_public(&used.vis);
                    leaves(&used.tree, &mut Vec::new(), &mut |name, path| {
                        module.uses.push((name, path, public));
                    });
                }
                other => module.items.push(other),
            }
        }
        self.0.insert(path, module);
        Ok(())
    }

    /// What a path means in a module.
    pub fn resolve(&self, module: &[String], path: &[String]) -> Option<Target> {
        self.resolve_in(module, path, &mut HashSet::new())
    }

    fn resolve_in(
        &self,
        module: &[String],
        path: &[String],
        seen: &mut HashSet<(Vec<String>, String)>,
    ) -> Option<Target> {
        let (first, rest) = path.split_first()?;
        let mut at = match first.as_str() {
            "crate" => Target::Module(module[..1].to_vec()),
            "self" => Target::Module(module.to_vec()),
            "super" => Target::Module(module[..module.len() - 1].to_vec()),
            name => match self.named(module, name, seen) {
                Some(target) => target,
                None if self.0.contains_key(&vec![name.to_string()]) => {
                    Target::Module(vec![name.to_string()])
                }
                None if rest.is_empty() => return None,
                None => return Some(Target::Outside(path.join("::"))),
            },
        };
        for name in rest {
            at = match at {
                Target::Module(module) if name == "super" => {
                    Target::Module(module[..module.len() - 1].to_vec())
                }
                Target::Module(module) => {
                    // A module without such an item has it from a macro.
                    let made = Target::Item { module: module.clone(), name: name.clone() };
                    self.named(&module, name, seen).unwrap_or(made)
                }
                // A variant or an associated item goes with its type.
                item => return Some(item),
            };
        }
        Some(at)
    }

    /// What a module itself calls by a name.
    fn named(&self, at: &[String], name: &str, seen: &mut HashSet<(Vec<String>, String)>) -> Option<Target> {
        let module = self.0.get(at)?;
        if module.children.iter().any(|(child, _)| child == name) {
            return Some(Target::Module(at.iter().cloned().chain([name.to_string()]).collect()));
        }
        if module.items.iter().any(|item| named(item).is_some_and(|own| own == name)) {
            return Some(Target::Item { module: at.to_vec(), name: name.to_string() });
        }
        if !seen.insert((at.to_vec(), name.to_string())) {
            return None;
        }
        let (_, path, _) = module.uses.iter().find(|(own, ..)| own == name)?;
        self.resolve_in(at, path, seen)
    }
}

/// Where a file's child modules lie.
fn folder_of(file: &Path) -> PathBuf {
    file.parent().map(PathBuf::from).unwrap_or_default()
}

pub fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// `#[cfg(test)]`, `#[cfg(all(test, …))]`, `#[cfg(doctest)]`.
fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            list.tokens.to_string().split(|c: char| !c.is_alphanumeric()).any(|word| word.ends_with("test"))
        }
        _ => false,
    })
}

/// The name that an item is called by.
pub fn named(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

pub fn attributes(item: &Item) -> &[syn::Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Each name that a `use` brings, with its path.
fn leaves(tree: &UseTree, path: &mut Vec<String>, found: &mut dyn FnMut(String, Vec<String>)) {
    match tree {
        UseTree::Path(step) => {
            path.push(step.ident.to_string());
            leaves(&step.tree, path, found);
            path.pop();
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| leaves(tree, path, found)),
        UseTree::Name(name) if name.ident == "self" => {
            found(path.last().cloned().unwrap_or_default(), path.clone());
        }
        UseTree::Name(name) => {
            let whole = path.iter().cloned().chain([name.ident.to_string()]).collect();
            found(name.ident.to_string(), whole);
        }
        UseTree::Rename(rename) => {
            let mut whole = path.clone();
            if rename.ident != "self" {
                whole.push(rename.ident.to_string());
            }
            found(rename.rename.to_string(), whole);
        }
        // Shown as it is written: the workspace re-exports by name.
        UseTree::Glob(_) => found("*".into(), path.clone()),
    }
}
