//! `#[derive(Module)]`: the walk over a struct's parameters, buffers and children, under their field names.
//!
//! What a field *is* decides its type, through the trait `Field`: parameters, buffers, modules, and `Option`s,
//! `Vec`s and arrays of those. The macro only calls that trait for each field, so there is nothing to annotate:
//!
//! ```text
//! #[derive(Module)]                       impl Module for Mlp {
//! struct Mlp {                                fn visit(&self, visitor: &mut dyn Visitor) {
//!     fc: Linear,               ──►               Field::visit_field(&self.fc, "fc", visitor);
//!     #[module(skip)]                         }
//!     heads: usize,                           fn type_name(&self) -> &'static str { "Mlp" }
//! }                                       }
//! ```
//!
//! Attributes:
//! - on a field: `#[module(skip)]` (neither parameter nor module), `#[module(name = "c_attn")]` (another name).
//! - on the struct: `#[module(name = "GELU")]` (the printed name), `#[module(extra_repr = path)]` (a
//!   `fn(&Self) -> String` printed between the brackets), `#[module(no_display)]` (no `Display`),
//!   `#[module(crate = path)]` (where Kiln's `nn` is, if neither `kiln-nn` nor `kiln` is a dependency).

mod attributes;
mod expand;

use proc_macro::TokenStream;

/// Makes a struct a module: parameters, buffers and children under their field names, and PyTorch's way of
/// printing it.
#[proc_macro_derive(Module, attributes(module))]
pub fn derive_module(input: TokenStream) -> TokenStream {
    let input = syn::parse_macro_input!(input as syn::DeriveInput);
    expand::module(&input).unwrap_or_else(syn::Error::into_compile_error).into()
}
