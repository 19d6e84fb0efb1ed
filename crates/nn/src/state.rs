//! State dicts: named tensors of a model, an optimizer or a scheduler, and loading them with a report.

use std::collections::HashMap;
use std::fmt;

use kiln_ir::{Error, Loc};
use kiln_tensor::{DType, Result, Shape, Tensor, no_grad};

use crate::internal::{MOST_COUNTED, check_state};

/// Named tensors, in the order in which they came.
///
/// ```
/// use kiln_nn::{Linear, Module, StateDict};
/// # fn main() -> kiln_tensor::Result<()> {
/// let (a, b) = (Linear::new(4, 2)?, Linear::new(4, 2)?);
/// let report = b.load_state_dict(&a.state_dict(), true)?;
/// assert!(report.is_clean());
/// assert_eq!(a.weight.to_vec::<f32>()?, b.weight.to_vec::<f32>()?);
///
/// // Several parts of a program in one dict, and back.
/// let mut all = StateDict::new();
/// all.extend_prefixed("model.", a.state_dict());
/// assert_eq!(all.names().collect::<Vec<_>>(), ["model.weight", "model.bias"]);
/// b.load_state_dict(&all.below("model."), true)?;
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
pub struct StateDict {
    entries: Vec<(String, Tensor)>,
    places: HashMap<String, usize>,
}

impl StateDict {
    /// Nothing yet.
    pub fn new() -> StateDict {
        StateDict::default()
    }

    /// Inserts a tensor under a name, replacing the one that has it.
    pub fn insert(&mut self, name: &str, tensor: Tensor) {
        match self.places.get(name) {
            Some(&at) => self.entries[at].1 = tensor,
            None => {
                self.places.insert(name.to_string(), self.entries.len());
                self.entries.push((name.to_string(), tensor));
            }
        }
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.places.get(name).map(|&at| &self.entries[at].1)
    }

    /// Takes the tensor of this name out.
    pub fn remove(&mut self, name: &str) -> Option<Tensor> {
        let at = self.places.remove(name)?;
        let (_, tensor) = self.entries.remove(at);
        self.places.values_mut().filter(|place| **place > at).for_each(|place| *place -= 1);
        Some(tensor)
    }

    /// Names and tensors.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Tensor)> {
        self.entries.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The names.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.entries.iter().map(|(name, _)| name.as_str())
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds all of another dict, with a prefix before each name: `"model."`.
    pub fn extend_prefixed(&mut self, prefix: &str, other: StateDict) {
        for (name, tensor) in other.entries {
            self.insert(&format!("{prefix}{name}"), tensor);
        }
    }

    /// What begins with a prefix, without it.
    pub fn below(&self, prefix: &str) -> StateDict {
        self.iter()
            .filter_map(|(name, tensor)| Some((name.strip_prefix(prefix)?.to_string(), tensor.clone())))
            .collect()
    }

    /// The same names with copies of the tensors: training on does not change them.
    #[track_caller]
    pub fn copied(&self) -> Result<StateDict> {
        let _off = no_grad();
        self.iter().map(|(name, tensor)| Ok((name.to_string(), tensor.clone_tensor()?))).collect()
    }

    /// A number under a name, as a tensor.
    pub(crate) fn insert_number(&mut self, name: &str, number: f64) -> Result<()> {
        self.insert(name, Tensor::from_vec(vec![number], Shape::scalar())?);
        Ok(())
    }

    /// The number under a name.
    pub(crate) fn number(&self, name: &str) -> Result<f64> {
        match self.get(name) {
            Some(tensor) => tensor.item::<f64>(),
            None => Err(Error::State(format!("the state has no {name}"))),
        }
    }

    /// The number under a name, which counts something: whole, and small enough to count on from.
    pub(crate) fn count(&self, name: &str) -> Result<u64> {
        let number = self.number(name)?;
        if !(0.0..=MOST_COUNTED as f64).contains(&number) || number.fract() != 0.0 {
            return Err(Error::State(format!("{name} must be a count, got {number}")));
        }
        Ok(number as u64)
    }

    /// Numbers under a name, as a tensor.
    pub(crate) fn insert_numbers(&mut self, name: &str, numbers: &[f64]) -> Result<()> {
        self.insert(name, Tensor::from_slice(numbers)?);
        Ok(())
    }

    /// The numbers under a name.
    pub(crate) fn numbers(&self, name: &str) -> Result<Vec<f64>> {
        match self.get(name) {
            Some(tensor) => tensor.to_vec_cast::<f64>(),
            None => Err(Error::State(format!("the state has no {name}"))),
        }
    }
}

impl FromIterator<(String, Tensor)> for StateDict {
    fn from_iter<I: IntoIterator<Item = (String, Tensor)>>(entries: I) -> StateDict {
        let mut dict = StateDict::new();
        for (name, tensor) in entries {
            dict.insert(&name, tensor);
        }
        dict
    }
}

// Types, not elements: debugging must not make a captured program wait for values.
impl fmt::Debug for StateDict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().map(|(name, tensor)| (name, tensor.ty().to_string()))).finish()
    }
}

/// A name present on both sides, with different shapes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// The name.
    pub name: String,
    /// The shape in the module.
    pub expected: Shape,
    /// The shape in the state.
    pub got: Shape,
}

/// What did not fit when a state was loaded.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LoadReport {
    /// Names that the module has and the state has not.
    pub missing: Vec<String>,
    /// Names that the state has and the module has not.
    pub unexpected: Vec<String>,
    /// Names whose shapes differ.
    pub mismatched: Vec<Mismatch>,
    /// Two names of one tensor of the module (tied weights) under which the state has different values.
    pub conflicting: Vec<(String, String)>,
}

impl LoadReport {
    /// Whether everything fitted.
    pub fn is_clean(&self) -> bool {
        let LoadReport { missing, unexpected, mismatched, conflicting } = self;
        missing.is_empty() && unexpected.is_empty() && mismatched.is_empty() && conflicting.is_empty()
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_clean() {
            return f.write_str("all names matched");
        }
        let mut lines = Vec::new();
        if !self.missing.is_empty() {
            lines.push(format!("missing: {}", self.missing.join(", ")));
        }
        if !self.unexpected.is_empty() {
            lines.push(format!("unexpected: {}", self.unexpected.join(", ")));
        }
        for Mismatch { name, expected, got } in &self.mismatched {
            lines.push(format!("{name}: the state has {got}, the module {expected}"));
        }
        for (first, second) in &self.conflicting {
            lines.push(format!("{first} and {second} are tied in the module, but differ in the state"));
        }
        f.write_str(&lines.join("; "))
    }
}

/// Copies values into the tensors of the same names. Nothing is changed if anything is refused.
pub(crate) fn load(
    own: &StateDict,
    values: &StateDict,
    strict: bool,
    what: &str,
    loc: Loc,
) -> Result<LoadReport> {
    let report = check_state(own, values, strict, what, loc)?;
    let _off = no_grad();
    let _behalf = loc.on_behalf(crate::folder());
    for (name, tensor) in own.iter() {
        if let Some(value) = values.get(name).filter(|value| !tensor.same(value)) {
            copy_into(tensor, value)?;
        }
    }
    Ok(report)
}

/// Overwrites a tensor, converting the dtype.
pub(crate) fn copy_into(tensor: &Tensor, value: &Tensor) -> Result<()> {
    let dtype: DType = tensor.dtype();
    let value = if value.dtype() == dtype { value.clone() } else { value.to_dtype(dtype)? };
    tensor.copy_(&value).map(drop)
}
