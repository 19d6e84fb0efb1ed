//! The numbers a program gives back, and how two runs of it are compared.

use std::fmt;

use kiln::{Result, Tensor};

/// How far floats may be apart, relative to the number.
const RELATIVE: f64 = 1e-4;
/// How far floats may be apart, relative to the largest number beside them: a sum that cancels has no digits of
/// its own.
const BESIDE: f64 = 1e-5;

#[derive(Clone, PartialEq, Debug)]
enum Values {
    Floats(Vec<f64>),
    Integers(Vec<i64>),
}

/// The numbers a program gives back, in order, each under a name.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Record {
    entries: Vec<(&'static str, Values)>,
}

/// Where two runs differ.
#[derive(Clone, PartialEq, Debug)]
pub struct Difference {
    /// The entry: its number and name.
    pub entry: String,
    /// What eager gives.
    pub eager: String,
    /// What the compiled program gives.
    pub compiled: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} instead of {}", self.entry, self.compiled, self.eager)
    }
}

impl Record {
    /// Nothing yet.
    pub fn new() -> Record {
        Record::default()
    }

    /// Adds all elements of a tensor.
    #[track_caller]
    pub fn tensor(&mut self, name: &'static str, tensor: &Tensor) -> Result<()> {
        let values = if tensor.dtype().is_float() {
            Values::Floats(tensor.to_vec_cast::<f64>()?)
        } else {
            Values::Integers(tensor.to_vec_cast::<i64>()?)
        };
        self.entries.push((name, values));
        Ok(())
    }

    /// Adds all elements of several tensors.
    #[track_caller]
    pub fn tensors<'a>(
        &mut self,
        name: &'static str,
        tensors: impl IntoIterator<Item = &'a Tensor>,
    ) -> Result<()> {
        tensors.into_iter().try_for_each(|tensor| self.tensor(name, tensor))
    }

    /// Adds a number.
    pub fn number(&mut self, name: &'static str, number: f64) {
        self.entries.push((name, Values::Floats(vec![number])));
    }

    /// Adds an integer: a count, a decision.
    pub fn integer(&mut self, name: &'static str, integer: usize) {
        self.entries.push((name, Values::Integers(vec![integer as i64])));
    }

    /// How many numbers there are.
    pub fn len(&self) -> usize {
        let count = |values: &Values| match values {
            Values::Floats(floats) => floats.len(),
            Values::Integers(integers) => integers.len(),
        };
        self.entries.iter().map(|(_, values)| count(values)).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first number in which a compiled run differs from this eager one by more than rounding.
    pub fn difference(&self, compiled: &Record) -> Option<Difference> {
        let count = |record: &Record| record.entries.len().to_string();
        if self.entries.len() != compiled.entries.len() {
            let (eager, compiled) = (count(self), count(compiled));
            return Some(Difference { entry: "entries".into(), eager, compiled });
        }
        let pairs = self.entries.iter().zip(&compiled.entries);
        pairs.enumerate().find_map(|(number, ((name, eager), (_, compiled)))| {
            let (eager, compiled) = unequal(eager, compiled)?;
            Some(Difference { entry: format!("#{number} {name}"), eager, compiled })
        })
    }
}

fn unequal(eager: &Values, compiled: &Values) -> Option<(String, String)> {
    match (eager, compiled) {
        (Values::Integers(a), Values::Integers(b)) => first_unequal(a, b, |a, b| a == b),
        (Values::Floats(a), Values::Floats(b)) => {
            let finite = a.iter().map(|x| x.abs()).filter(|x| x.is_finite());
            let beside = BESIDE * finite.fold(0.0, f64::max);
            first_unequal(a, b, |a, b| {
                let near = || a.is_finite() && (a - b).abs() <= RELATIVE * a.abs() + beside;
                a == b || (a.is_nan() && b.is_nan()) || near()
            })
        }
        _ => Some((format!("{eager:?}"), format!("{compiled:?}"))),
    }
}

fn first_unequal<T: fmt::Debug>(a: &[T], b: &[T], same: impl Fn(&T, &T) -> bool) -> Option<(String, String)> {
    if a.len() != b.len() {
        return Some((format!("{} elements", a.len()), format!("{} elements", b.len())));
    }
    let (a, b) = a.iter().zip(b).find(|(a, b)| !same(a, b))?;
    Some((format!("{a:?}"), format!("{b:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(values: &[f64]) -> Record {
        Record { entries: vec![("x", Values::Floats(values.to_vec()))] }
    }

    #[test]
    fn rounding_is_no_difference() {
        assert_eq!(floats(&[1.0, f64::NAN]).difference(&floats(&[1.00005, f64::NAN])), None);
        assert_eq!(floats(&[100.0, 0.0]).difference(&floats(&[100.0, 1e-4])), None);
    }

    #[test]
    fn differences_are_named() {
        let text = |a: &[f64], b: &[f64]| floats(a).difference(&floats(b)).map(|d| d.to_string());
        assert_eq!(text(&[1.0, 2.0], &[1.0, 2.1]).as_deref(), Some("#0 x: 2.1 instead of 2.0"));
        assert_eq!(text(&[1.0], &[f64::NAN]).as_deref(), Some("#0 x: NaN instead of 1.0"));
        assert!(text(&[f64::INFINITY], &[1.0]).is_some());
        assert!(text(&[1.0], &[1.0, 1.0]).is_some());
    }

    #[test]
    fn integers_are_equal_or_not() {
        let record = |n| {
            let mut record = Record::new();
            record.integer("count", n);
            record
        };
        assert_eq!(record(1_000_000).difference(&record(1_000_000)), None);
        assert!(record(1_000_000).difference(&record(1_000_001)).is_some());
    }
}
