//! `kiln ops`: the op table.

use kiln::ir::{Class, Grad, Op, Row};

use crate::failure::Done;
use crate::output;

/// Prints one line per op.
pub fn run() -> Done {
    let rows: Vec<[String; 4]> =
        Op::ROWS.iter().filter(|row| row.class != Class::Custom).map(cells).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2)];
    let mut text = String::new();
    for [call, kind, gradient, doc] in &rows {
        let [w0, w1, w2] = widths;
        text += &format!("{call:w0$}  {kind:w1$}  {gradient:w2$}  {doc}\n");
    }
    text += &format!("{} ops; every pointwise op also works on lists, as foreach_…\n", rows.len());
    Ok(output::print(&text)?)
}

fn cells(row: &Row) -> [String; 4] {
    let mut operands: Vec<String> = row.args.iter().map(|name| name.to_string()).collect();
    operands.extend(row.variadic.then(|| "…".into()));
    operands.extend(row.optional.iter().map(|name| format!("[{name}]")));
    operands.extend(row.attributes.iter().map(|name| format!("{name}=")));
    let level = if row.decompose.is_some() && row.prim.is_none() { ", composite" } else { "" };
    let gradient = match row.grad {
        Grad::Fn(_) | Grad::Decompose => "grad",
        Grad::Zero => "grad 0",
        Grad::NotDifferentiable(_) => "no grad",
    };
    [
        format!("{}({})", row.name, operands.join(", ")),
        format!("{:?}{level}", row.class).to_lowercase(),
        gradient.into(),
        row.doc.trim().into(),
    ]
}
