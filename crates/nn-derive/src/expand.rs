//! From a struct to its `Module` impl.

use proc_macro2::TokenStream;
use quote::{format_ident, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{Data, DeriveInput, Fields, Index, Member, Result, Type};

use crate::attributes::{OfField, OfStruct};

/// A field that is visited.
struct Visited<'a> {
    member: Member,
    name: String,
    ty: &'a Type,
}

pub(crate) fn module(input: &DeriveInput) -> Result<TokenStream> {
    let Data::Struct(data) = &input.data else {
        let message = "derive(Module) works on structs; for an enum, implement `visit` by hand with a match";
        return Err(syn::Error::new(input.ident.span(), message));
    };
    let options = OfStruct::parse(&input.attrs)?;
    let root = options.root.as_ref().map_or_else(find_root, |path| quote!(#path));
    let visited = visited(&data.fields)?;

    let visits = visited.iter().map(|Visited { member, name, ty }| {
        // Spanned at the type: a field that is none of the kinds is reported there.
        quote_spanned!(ty.span()=> #root::Field::visit_field(&self.#member, #name, visitor);)
    });
    let visitor = if visited.is_empty() { format_ident!("_visitor") } else { format_ident!("visitor") };

    let ident = &input.ident;
    let name = options.name.unwrap_or_else(|| ident.unraw().to_string());
    let extra_repr = options.extra_repr.map(|path| {
        quote! {
            fn extra_repr(&self) -> ::std::string::String {
                #path(self)
            }
        }
    });
    let mut generics = input.generics.clone();
    bound(&mut generics, input, &visited, &root);
    let (impl_generics, ty_generics, where_clause) = generics.split_for_impl();
    let display = (!options.no_display).then(|| {
        quote! {
            #[automatically_derived]
            impl #impl_generics ::std::fmt::Display for #ident #ty_generics #where_clause {
                fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                    #root::fmt_module(self, f)
                }
            }
        }
    });
    Ok(quote! {
        #[automatically_derived]
        impl #impl_generics #root::Module for #ident #ty_generics #where_clause {
            fn visit(&self, #visitor: &mut dyn #root::Visitor) {
                #(#visits)*
            }
            fn type_name(&self) -> &'static str {
                #name
            }
            #extra_repr
        }
        #display
    })
}

fn visited(fields: &Fields) -> Result<Vec<Visited<'_>>> {
    let mut visited = Vec::new();
    for (i, field) in fields.iter().enumerate() {
        let options = OfField::parse(&field.attrs)?;
        if options.skip {
            continue;
        }
        let (member, own) = match &field.ident {
            Some(ident) => (Member::Named(ident.clone()), ident.unraw().to_string()),
            None => (Member::Unnamed(Index::from(i)), i.to_string()),
        };
        visited.push(Visited { member, name: options.name.unwrap_or(own), ty: &field.ty });
    }
    Ok(visited)
}

/// Bounds for generic structs: every visited field whose type has a type parameter in it must be a field of a
/// module, and the struct must be shareable between threads, as every module is.
fn bound(generics: &mut syn::Generics, input: &DeriveInput, visited: &[Visited<'_>], root: &TokenStream) {
    let parameters: Vec<_> = input.generics.type_params().map(|p| p.ident.clone()).collect();
    if parameters.is_empty() {
        return;
    }
    let predicates = &mut generics.make_where_clause().predicates;
    for Visited { ty, .. } in visited.iter().filter(|field| mentions(quote_type(field.ty), &parameters)) {
        predicates.push(syn::parse_quote!(#ty: #root::Field));
    }
    predicates.push(syn::parse_quote!(Self: ::std::marker::Send + ::std::marker::Sync));
}

fn quote_type(ty: &Type) -> TokenStream {
    quote!(#ty)
}

fn mentions(tokens: TokenStream, parameters: &[syn::Ident]) -> bool {
    tokens.into_iter().any(|token| match token {
        proc_macro2::TokenTree::Ident(ident) => parameters.contains(&ident),
        proc_macro2::TokenTree::Group(group) => mentions(group.stream(), parameters),
        _ => false,
    })
}

/// Where Kiln's `nn` is for the crate that is being compiled: `kiln-nn` if it depends on that (or is that),
/// else through the public face. The manifest is looked at rather than parsed: the two answers differ only for
/// crates that name `kiln-nn`, and `#[module(crate = …)]` serves whoever renames it.
fn find_root() -> TokenStream {
    let names_it = |manifest: &str| {
        manifest.lines().map(str::trim_start).any(|line| {
            line.strip_prefix("kiln-nn").is_some_and(|rest| rest.trim_start().starts_with(['=', '.']))
                || line.strip_prefix("[dependencies.kiln-nn]").is_some()
        })
    };
    let is_it = std::env::var("CARGO_PKG_NAME").is_ok_and(|name| name == "kiln-nn");
    let direct = is_it
        || std::env::var("CARGO_MANIFEST_DIR")
            .ok()
            .and_then(|dir| std::fs::read_to_string(std::path::Path::new(&dir).join("Cargo.toml")).ok())
            .is_some_and(|manifest| names_it(&manifest));
    if direct { quote!(::kiln_nn) } else { quote!(::kiln::nn) }
}
