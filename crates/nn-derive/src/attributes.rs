//! The `#[module(…)]` attributes of structs and fields.

use syn::{Attribute, LitStr, Path, Result};

/// What `#[module(…)]` says of a struct.
#[derive(Default)]
pub(crate) struct OfStruct {
    pub(crate) name: Option<String>,
    pub(crate) extra_repr: Option<Path>,
    pub(crate) no_display: bool,
    pub(crate) root: Option<Path>,
}

/// What `#[module(…)]` says of a field.
#[derive(Default)]
pub(crate) struct OfField {
    pub(crate) name: Option<String>,
    pub(crate) skip: bool,
}

fn module_attributes(attributes: &[Attribute]) -> impl Iterator<Item = &Attribute> {
    attributes.iter().filter(|attribute| attribute.path().is_ident("module"))
}

impl OfStruct {
    pub(crate) fn parse(attributes: &[Attribute]) -> Result<OfStruct> {
        let mut found = OfStruct::default();
        for attribute in module_attributes(attributes) {
            attribute.parse_nested_meta(|meta| {
                if meta.path.is_ident("name") {
                    found.name = Some(meta.value()?.parse::<LitStr>()?.value());
                } else if meta.path.is_ident("extra_repr") {
                    found.extra_repr = Some(meta.value()?.parse()?);
                } else if meta.path.is_ident("no_display") {
                    found.no_display = true;
                } else if meta.path.is_ident("crate") {
                    found.root = Some(meta.value()?.call(Path::parse_mod_style)?);
                } else {
                    let known = "a struct takes #[module(name = \"…\")], #[module(extra_repr = path)], \
                                 #[module(no_display)] and #[module(crate = path)]";
                    return Err(meta.error(known));
                }
                Ok(())
            })?;
        }
        Ok(found)
    }
}

impl OfField {
    pub(crate) fn parse(attributes: &[Attribute]) -> Result<OfField> {
        let mut found = OfField::default();
        for attribute in module_attributes(attributes) {
            attribute.parse_nested_meta(|meta| {
                if meta.path.is_ident("skip") {
                    found.skip = true;
                } else if meta.path.is_ident("name") {
                    let name: LitStr = meta.value()?.parse()?;
                    // A dot separates a module's name from its child's.
                    if name.value().is_empty() || name.value().contains('.') {
                        return Err(syn::Error::new(name.span(), "a name is not empty and has no dots"));
                    }
                    found.name = Some(name.value());
                } else {
                    return Err(meta.error("a field takes #[module(skip)] and #[module(name = \"…\")]"));
                }
                Ok(())
            })?;
        }
        Ok(found)
    }
}
