//! `docs/ops.md`, made from the op table and kept true by a test.

use std::fmt::Write;

use kiln_ir::{Class, Grad, Op, Row};

/// The whole page.
fn page() -> String {
    let mut page = String::from(
        "# Operators\n\n\
         Made from the op table (`crates/ir/src/table`) by `cargo xtask docs`; do not edit by hand.\n\n\
         Names and semantics are PyTorch's. Operands are tensors or numbers known at run time, those in brackets may\n\
         be left out; attributes shape the code. A *prim* is lowered by inductor, a *composite* has a decomposition.\n\
         Every pointwise op also exists over lists of tensors, under the name `foreach_…`.\n\n",
    );
    let rows = || Op::ROWS.iter().filter(|row| row.class != Class::Custom);
    let _ = writeln!(page, "{} operators.\n", rows().count());
    page.push_str("| name | operands | attributes | class | level | gradient | what it computes |\n");
    page.push_str("|---|---|---|---|---|---|---|\n");
    for row in rows() {
        let (operands, attributes) = (operands(row), row.attributes.join(", "));
        let (class, level) = (format!("{:?}", row.class).to_lowercase(), level(row));
        let (gradient, doc) = (cell(&gradient(row)), cell(row.doc.trim()));
        let _ = writeln!(
            page,
            "| `{}` | {operands} | {attributes} | {class} | {level} | {gradient} | {doc} |",
            row.name
        );
    }
    page
}

fn operands(row: &Row) -> String {
    let mut names: Vec<String> = row.args.iter().map(|name| name.to_string()).collect();
    if row.variadic {
        names.push("…".into());
    }
    names.extend(row.optional.iter().map(|name| format!("[{name}]")));
    names.join(", ")
}

fn level(row: &Row) -> &'static str {
    match (row.decompose, row.prim) {
        (None, _) => "prim",
        (Some(_), Some(_)) => "prim, some calls decomposed",
        (Some(_), None) => "composite",
    }
}

fn gradient(row: &Row) -> String {
    match row.grad {
        Grad::Fn(_) => "yes".into(),
        Grad::Zero => "zero".into(),
        Grad::Decompose => "of its decomposition".into(),
        Grad::NotDifferentiable(reason) => format!("none: {reason}"),
    }
}

/// Text that does not end a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;
    /// `BLESS=1` writes it, as for golden files; so does `cargo xtask docs`.
    #[test]
    fn the_page_is_what_the_table_says() -> std::io::Result<()> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/ops.md");
        if crate::golden::blesses() {
            std::fs::write(path, super::page())?;
        }
        let there = std::fs::read_to_string(path)?;
        assert!(there == super::page(), "docs/ops.md is not what the op table says; run `cargo xtask docs`");
        Ok(())
    }

    #[test]
    fn every_row_has_its_line() {
        let page = super::page();
        for row in Op::ROWS.iter().filter(|row| row.class != Class::Custom) {
            assert!(page.contains(&format!("| `{}` |", row.name)), "{}", row.name);
        }
        let cells = |line: &str| line.replace("\\|", "").matches('|').count();
        assert!(page.lines().filter(|line| line.starts_with('|')).all(|line| cells(line) == 8));
    }
}
