//! A case as a Rust program.

use crate::case::Case;

/// A program that compiles and runs a case; `text` is the case's.
pub fn rust_program(case: &Case, text: &str) -> String {
    let notes: String = case.notes.iter().map(|note| format!("// {note}\n")).collect();
    format!(
        "{notes}use kiln::repro::{{Case, reproduce}};\n\nconst CASE: &str = r#\"\n{text}\"#;\n\n\
         fn main() -> kiln::Result<()> {{\n    let case = Case::from_text(CASE, &[])?;\n    \
         println!(\"{{}}\", reproduce(&case)?);\n    Ok(())\n}}\n"
    )
}
