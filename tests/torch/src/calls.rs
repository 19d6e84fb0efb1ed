//! The one table that says how a call of PyTorch's is written in Kiln: by the name of its OpInfo.
//!
//! A call that is not here by name is the row of the op table with that name, if its arguments are the row's
//! operands.

mod index;
mod nn;
mod pointwise;
mod reduce;
mod shape;

use kiln::Tensor;
use kiln::ir::Op;
use kiln::tensor::{Arg, Operand, Output, run_op};

use crate::args::{Args, Outcome, unmapped};

/// Outputs; `None` is one that is not compared, since PyTorch may choose.
pub type Outputs = Vec<Option<Tensor>>;

/// A call in Kiln's terms.
pub type Run = fn(&Args) -> Outcome<Outputs>;

/// The call of one output.
pub fn one(result: kiln::Result<Tensor>) -> Outcome<Outputs> {
    Ok(vec![Some(result?)])
}

/// The call of two outputs.
pub fn two(result: kiln::Result<(Tensor, Tensor)>) -> Outcome<Outputs> {
    let (first, second) = result?;
    Ok(vec![Some(first), Some(second)])
}

/// The call of a list.
pub fn several(result: kiln::Result<Vec<Tensor>>) -> Outcome<Outputs> {
    Ok(result?.into_iter().map(Some).collect())
}

fn tables() -> impl Iterator<Item = &'static (&'static str, Run)> {
    pointwise::CALLS.iter().chain(reduce::CALLS).chain(shape::CALLS).chain(index::CALLS).chain(nn::CALLS)
}

/// OpInfos that are rows under another name.
const SPELT: &[(&str, &str)] = &[
    ("nn.functional.logsigmoid", "log_sigmoid"),
    ("max.binary", "maximum"),
    ("min.binary", "minimum"),
    ("div.no_rounding_mode", "div"),
    ("true_divide", "div"),
    ("mvlgamma", ""),
];

/// The name of the row of an OpInfo that is not in the tables.
fn row_name(name: &str) -> &str {
    let spelt = SPELT.iter().find(|(from, _)| *from == name).map(|(_, to)| *to);
    spelt.unwrap_or_else(|| name.strip_prefix("nn.functional.").unwrap_or(name))
}

fn row(name: &str) -> Option<Op> {
    Op::parse(row_name(name), &mut |_| None)
}

/// The names of all OpInfos that Kiln has calls for.
pub fn names() -> Vec<String> {
    let rows = Op::ROWS.iter().flat_map(|row| [row.name.to_string(), format!("nn.functional.{}", row.name)]);
    let mut names: Vec<String> = tables().map(|(name, _)| (*name).to_string()).collect();
    names.extend(rows.filter(|name| row(name).is_some()));
    names.extend(SPELT.iter().map(|(name, _)| (*name).to_string()));
    names.sort();
    names.dedup();
    names
}

/// Runs a call.
pub fn run(name: &str, args: &Args) -> Outcome<Outputs> {
    let outputs = match tables().find(|(known, _)| *known == name) {
        Some((_, run)) => run(args)?,
        None => run_row(name, args)?,
    };
    args.all_read()?;
    Ok(outputs)
}

fn run_row(name: &str, args: &Args) -> Outcome<Outputs> {
    let Some(op) = row(name) else { return unmapped("no such op") };
    let operands = (0..args.count()).map(|i| args.operand(i, "operand")).collect::<Outcome<Vec<_>>>()?;
    let of = |operand: &Operand<'_>| match operand {
        Operand::Tensor(tensor) => (*tensor).clone(),
        Operand::Number(_) => unreachable!("numbers are passed by value"),
    };
    let tensors: Vec<Option<Tensor>> =
        operands.iter().map(|o| matches!(o, Operand::Tensor(_)).then(|| of(o))).collect();
    let given: Vec<Arg<'_>> = operands
        .iter()
        .zip(&tensors)
        .map(|(operand, tensor)| match (operand, tensor) {
            (Operand::Number(x), _) => Arg::Number(*x),
            (_, Some(tensor)) => Arg::Tensor(tensor),
            (_, None) => unreachable!("made above"),
        })
        .collect();
    args.all_read()?;
    match run_op(&op, &given)? {
        Output::Tensor(tensor) => Ok(vec![Some(tensor)]),
        Output::List(_) => unmapped("a list"),
    }
}
