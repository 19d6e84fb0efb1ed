//! Printing a module as PyTorch prints it: its name, what it says of itself, its children indented.

use std::fmt;

use crate::{Buffer, Layer, Module, Parameter, Visitor};

/// The printed name of a list of modules. Equal neighbours in such a list are printed once.
pub(crate) const MODULE_LIST: &str = "ModuleList";

/// Writes a module in PyTorch's form. What `Display` of derived modules calls.
///
/// ```
/// use kiln_nn::{Linear, Relu, seq};
/// # fn main() -> kiln_tensor::Result<()> {
/// let model = seq![Linear::new(10, 20)?, Relu];
/// assert_eq!(model.to_string(), "\
/// Sequential(
///   (0): Linear(in_features=10, out_features=20, bias=True)
///   (1): ReLU()
/// )");
/// # Ok(()) }
/// ```
pub fn fmt_module(module: &dyn Module, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str(&text(module))
}

impl fmt::Display for dyn Module + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt_module(self, f)
    }
}

impl fmt::Display for dyn Layer + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt_module(&self, f)
    }
}

fn text(module: &dyn Module) -> String {
    let mut children = Children(Vec::new());
    module.visit(&mut children);
    let (name, extra) = (module.type_name(), module.extra_repr());
    let blocks = if name == MODULE_LIST {
        gather(children.0)
    } else {
        children.0.into_iter().map(|(name, text)| format!("({name}): {text}")).collect()
    };
    if blocks.is_empty() && !extra.contains('\n') {
        return format!("{name}({extra})");
    }
    let lines: Vec<String> = extra
        .lines()
        .chain(blocks.iter().flat_map(|block| block.lines()))
        .map(|line| format!("  {line}"))
        .collect();
    format!("{name}(\n{}\n)", lines.join("\n"))
}

/// Runs of equal neighbours as one block: `(0-3): 4 x Linear(…)`.
fn gather(children: Vec<(String, String)>) -> Vec<String> {
    children
        .chunk_by(|(_, left), (_, right)| left == right)
        .map(|run| match run {
            [(first, text), .., (last, _)] => format!("({first}-{last}): {} x {text}", run.len()),
            [(name, text)] => format!("({name}): {text}"),
            [] => String::new(),
        })
        .collect()
}

/// The printed children of one module.
struct Children(Vec<(String, String)>);

impl Visitor for Children {
    fn parameter(&mut self, _: &str, _: &Parameter) {}
    fn buffer(&mut self, _: &str, _: &Buffer) {}
    fn module(&mut self, name: &str, module: &dyn Module) {
        self.0.push((name.to_string(), text(module)));
    }
}

/// `True` or `False`, as Python writes it.
pub(crate) fn python_bool(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

/// A number as Python writes it: `0.1`, `1.0`, `1e-05`.
pub(crate) fn python_float(value: f64) -> String {
    if !value.is_finite() {
        return match value {
            f64::INFINITY => "inf".into(),
            f64::NEG_INFINITY => "-inf".into(),
            _ => "nan".into(),
        };
    }
    if value != 0.0 && !(1e-4..1e16).contains(&value.abs()) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = format!("{value}");
    if text.contains('.') { text } else { text + ".0" }
}

/// Sizes as Python writes a tuple: `(3, 3)`, `(3,)`.
pub(crate) fn python_tuple(sizes: &[usize]) -> String {
    match sizes {
        [one] => format!("({one},)"),
        sizes => format!("({})", sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_python_writes_them() {
        let texts = [(0.1, "0.1"), (1.0, "1.0"), (1e-5, "1e-05"), (1.5e-12, "1.5e-12"), (1e16, "1e+16")];
        for (number, text) in texts {
            assert_eq!(python_float(number), text);
        }
        assert_eq!((python_tuple(&[3]), python_tuple(&[3, 4])), ("(3,)".into(), "(3, 4)".into()));
    }
}
