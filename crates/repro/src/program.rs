//! A case as a Rust program.

use crate::case::Case;

/// A program that compiles and runs a case; `text` is the case's.
pub fn rust_program(case: &Case, text: &str) -> String {
    let notes: String = case.notes.iter().map(|note| format!("//! {note}\n")).collect();
    format!(
        r##"//! A program to run eagerly and compiled, and to compare.
{notes}
use kiln::repro::{{Case, reproduce}};

const CASE: &str = r#"
{text}"#;

fn main() -> kiln::Result<()> {{
    let case = Case::from_text(CASE, &[])?;
    match reproduce(&case)? {{
        Some(failure) => println!("{{failure}}"),
        None => println!("compiled as eager"),
    }}
    Ok(())
}}
"##
    )
}
