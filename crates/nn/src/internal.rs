//! For the crates that build on this one: files as Kiln reads and writes them, and whether a state fits.

use std::collections::HashMap;

use kiln_ir::Loc;
use kiln_tensor::{Error, Result, Tensor};

pub use crate::files::{fail as file_error, read_text, write_text};
use crate::state::{LoadReport, Mismatch, StateDict};

/// The largest count in a state: whole numbers up to here are exact.
pub const MOST_COUNTED: u64 = 1 << 53;

/// Whether values fit the tensors of the same names.
pub fn check_state(
    own: &StateDict,
    values: &StateDict,
    strict: bool,
    what: &str,
    loc: Loc,
) -> Result<LoadReport> {
    let mut report = LoadReport::default();
    // The names of each tensor that the state has: those of tied weights stand in for each other.
    let mut there: HashMap<usize, Vec<(&str, &Tensor)>> = HashMap::new();
    for (name, tensor) in own.iter() {
        if let Some(value) = values.get(name) {
            there.entry(tensor.address()).or_default().push((name, value));
            if value.shape() != tensor.shape() {
                report.mismatched.push(Mismatch {
                    name: name.to_string(),
                    expected: tensor.shape(),
                    got: value.shape(),
                });
            }
        }
    }
    for (name, tensor) in own.iter() {
        match there.get(&tensor.address()) {
            None => report.missing.push(name.to_string()),
            Some(there) => {
                let (first, value) = there[0];
                let own_value = there.iter().find(|(other, _)| *other == name && name != first);
                if let Some((_, other)) = own_value
                    && !equal(value, other)?
                {
                    report.conflicting.push((first.to_string(), name.to_string()));
                }
            }
        }
    }
    report.unexpected = values.names().filter(|name| own.get(name).is_none()).map(String::from).collect();
    if !report.mismatched.is_empty() || (strict && !report.is_clean()) {
        return Err(Error::State(format!("loading the state of {what}: {report}, at {loc}")));
    }
    Ok(report)
}

/// Whether two tensors have the same values, bit by bit.
fn equal(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(a.same(b) || (a.ty() == b.ty() && a.to_bytes()? == b.to_bytes()?))
}
