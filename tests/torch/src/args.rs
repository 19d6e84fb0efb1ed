//! The arguments of a call, by position or by keyword, as a call of Kiln's reads them.

use std::cell::RefCell;

use kiln::ir::Scalar;
use kiln::tensor::Operand;
use kiln::{DType, Error, Indexer, Reduction, Tensor};

use crate::bundle::{Bundle, Given};

/// Why a call has no result.
#[derive(Debug)]
pub enum Stop {
    /// Kiln has no such call, and why.
    Unmapped(String),
    /// Kiln refuses it.
    Refused(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Refused(error)
    }
}

/// A result, or why there is none.
pub type Outcome<T> = Result<T, Stop>;

/// A call that Kiln has no form of.
pub fn unmapped<T>(why: impl Into<String>) -> Outcome<T> {
    Err(Stop::Unmapped(why.into()))
}

/// An argument whose tensors are Kiln's.
#[derive(Clone)]
pub enum Value {
    /// None.
    Nothing,
    /// A number or truth value.
    Number(Scalar),
    /// Text.
    Text(String),
    /// A dtype.
    DType(DType),
    /// A tensor.
    Tensor(Tensor),
    /// A list or tuple.
    List(Vec<Value>),
    /// A slice in an index.
    Slice([Option<i64>; 3]),
    /// An ellipsis in an index.
    Ellipsis,
}

impl Value {
    fn read(given: &Given, bundle: &Bundle, tensors: &mut Vec<Tensor>) -> kiln::Result<Value> {
        Ok(match given {
            Given::Nothing => Value::Nothing,
            Given::Bool(x) => Value::Number(Scalar::Bool(*x)),
            Given::Int(x) => Value::Number(Scalar::Int(*x)),
            Given::Float(x) => Value::Number(Scalar::Float(*x)),
            Given::Special { float } => Value::Number(Scalar::Float(float.parse().unwrap_or(f64::NAN))),
            Given::Text(text) => Value::Text(text.clone()),
            Given::DType { dtype } => Value::DType(DType::from_name(dtype).unwrap_or(DType::F32)),
            Given::Slice { slice } => Value::Slice(*slice),
            Given::Ellipsis { .. } => Value::Ellipsis,
            Given::List(items) => Value::List(
                items.iter().map(|x| Value::read(x, bundle, tensors)).collect::<kiln::Result<_>>()?,
            ),
            Given::Tensor { tensor } => {
                let tensor = bundle.tensor(tensor)?;
                tensors.push(tensor.clone());
                Value::Tensor(tensor)
            }
        })
    }

    fn words(&self) -> &'static str {
        match self {
            Value::Nothing => "None",
            Value::Number(Scalar::Bool(_)) => "a bool",
            Value::Number(_) => "a number",
            Value::Text(_) => "text",
            Value::DType(_) => "a dtype",
            Value::Tensor(_) => "a tensor",
            Value::List(_) => "a list",
            Value::Slice(_) => "a slice",
            Value::Ellipsis => "an ellipsis",
        }
    }

    fn ints(&self) -> Option<Vec<i64>> {
        match self {
            Value::Number(Scalar::Int(x)) => Some(vec![*x]),
            Value::List(items) => items
                .iter()
                .map(|item| match item {
                    Value::Number(Scalar::Int(x)) => Some(*x),
                    _ => None,
                })
                .collect(),
            _ => None,
        }
    }
}

/// A shape of any number of dims, one of which may be −1.
pub struct Sizes(Vec<i64>);

impl kiln::tensor::IntoShape for Sizes {
    fn into_sizes(self) -> Vec<i64> {
        self.0
    }
}

/// Arguments, and which of them were read: what nobody reads, Kiln's call does not take.
pub struct Args {
    positional: Vec<Value>,
    keywords: Vec<(String, Value)>,
    /// All tensors, in order.
    pub tensors: Vec<Tensor>,
    read: RefCell<Vec<bool>>,
}

impl Args {
    /// The arguments of a call, with tensors of their own.
    pub fn of(call: &crate::bundle::Call, bundle: &Bundle) -> kiln::Result<Args> {
        let mut tensors = Vec::new();
        let mut positional = Vec::new();
        for given in &call.args {
            positional.push(Value::read(given, bundle, &mut tensors)?);
        }
        let mut keywords = Vec::new();
        for (name, given) in &call.kwargs {
            keywords.push((name.clone(), Value::read(given, bundle, &mut tensors)?));
        }
        let read = RefCell::new(vec![false; positional.len() + keywords.len()]);
        Ok(Args { positional, keywords, tensors, read })
    }

    /// How many positional arguments there are.
    pub fn count(&self) -> usize {
        self.positional.len()
    }

    /// An argument that is not None.
    pub fn get(&self, at: usize, name: &str) -> Option<&Value> {
        let named = self.keywords.iter().position(|(keyword, _)| keyword == name);
        let (value, place) = match (self.positional.get(at), named) {
            (Some(value), _) => (value, at),
            (None, Some(k)) => (&self.keywords[k].1, self.positional.len() + k),
            (None, None) => return None,
        };
        self.read.borrow_mut()[place] = true;
        (!matches!(value, Value::Nothing)).then_some(value)
    }

    /// A keyword argument.
    pub fn keyword(&self, name: &str) -> Option<&Value> {
        self.get(usize::MAX, name)
    }

    /// An error if there is an argument that was not read.
    pub fn all_read(&self) -> Outcome<()> {
        let read = self.read.borrow();
        let names = (0..self.positional.len())
            .map(|i| format!("#{i}"))
            .chain(self.keywords.iter().map(|(name, _)| name.clone()));
        let values = self.positional.iter().chain(self.keywords.iter().map(|(_, value)| value));
        for ((name, value), read) in names.zip(values).zip(read.iter()) {
            let is_off = matches!(value, Value::Nothing | Value::Number(Scalar::Bool(false)));
            if !read && !is_off {
                return unmapped(format!("no argument `{name}`"));
            }
        }
        Ok(())
    }

    fn wrong<T>(&self, name: &str, value: &Value) -> Outcome<T> {
        unmapped(format!("{} for `{name}`", value.words()))
    }

    /// A tensor.
    pub fn tensor(&self, at: usize, name: &str) -> Outcome<&Tensor> {
        match self.tensor_or(at, name)? {
            Some(tensor) => Ok(tensor),
            None => unmapped(format!("no `{name}`")),
        }
    }

    /// The first argument, a tensor.
    pub fn x(&self) -> Outcome<&Tensor> {
        self.tensor(0, "input")
    }

    /// A tensor that may be left out.
    pub fn tensor_or(&self, at: usize, name: &str) -> Outcome<Option<&Tensor>> {
        match self.get(at, name) {
            None => Ok(None),
            Some(Value::Tensor(tensor)) => Ok(Some(tensor)),
            Some(other) => self.wrong(name, other),
        }
    }

    /// A list of tensors.
    pub fn tensors(&self, at: usize, name: &str) -> Outcome<Vec<&Tensor>> {
        match self.get(at, name) {
            Some(Value::List(items)) => items
                .iter()
                .map(|item| match item {
                    Value::Tensor(tensor) => Ok(tensor),
                    other => self.wrong(name, other),
                })
                .collect(),
            Some(Value::Tensor(tensor)) => Ok(vec![tensor]),
            Some(other) => self.wrong(name, other),
            None => unmapped(format!("no `{name}`")),
        }
    }

    /// A number that may be left out.
    pub fn number_or(&self, at: usize, name: &str) -> Outcome<Option<Scalar>> {
        match self.get(at, name) {
            None => Ok(None),
            Some(Value::Number(x)) => Ok(Some(*x)),
            Some(other) => self.wrong(name, other),
        }
    }

    /// A number.
    pub fn number(&self, at: usize, name: &str, default: impl Into<Scalar>) -> Outcome<Scalar> {
        Ok(self.number_or(at, name)?.unwrap_or(default.into()))
    }

    /// A float.
    pub fn float(&self, at: usize, name: &str, default: f64) -> Outcome<f64> {
        Ok(self.number(at, name, default)?.as_f64())
    }

    /// An integer that may be left out.
    pub fn int_or(&self, at: usize, name: &str) -> Outcome<Option<i64>> {
        match self.get(at, name) {
            None => Ok(None),
            Some(Value::Number(Scalar::Int(x))) => Ok(Some(*x)),
            Some(other) => self.wrong(name, other),
        }
    }

    /// An integer.
    pub fn int(&self, at: usize, name: &str, default: i64) -> Outcome<i64> {
        Ok(self.int_or(at, name)?.unwrap_or(default))
    }

    /// A size or count.
    pub fn size(&self, at: usize, name: &str, default: usize) -> Outcome<usize> {
        match usize::try_from(self.int(at, name, default as i64)?) {
            Ok(size) => Ok(size),
            Err(_) => unmapped(format!("a negative `{name}`")),
        }
    }

    /// Integers that may be left out; one is a list of one.
    pub fn ints_or(&self, at: usize, name: &str) -> Outcome<Option<Vec<i64>>> {
        match self.get(at, name) {
            None => Ok(None),
            Some(value) => match value.ints() {
                Some(ints) => Ok(Some(ints)),
                None => self.wrong(name, value),
            },
        }
    }

    /// Integers.
    pub fn ints(&self, at: usize, name: &str) -> Outcome<Vec<i64>> {
        match self.ints_or(at, name)? {
            Some(ints) => Ok(ints),
            None => unmapped(format!("no `{name}`")),
        }
    }

    /// Integers that are one argument, or all arguments from this one on.
    pub fn rest(&self, at: usize, name: &str) -> Outcome<Vec<i64>> {
        if self.positional.len() <= at + 1 {
            return self.ints(at, name);
        }
        (at..self.positional.len()).map(|i| Ok(self.ints(i, name)?[0])).collect()
    }

    /// A shape, in one argument or in all from this one on; one size may be −1.
    pub fn shape(&self, at: usize, name: &str) -> Outcome<Sizes> {
        Ok(Sizes(self.rest(at, name)?))
    }

    /// Sizes: none negative.
    pub fn sizes(&self, at: usize, name: &str) -> Outcome<Vec<usize>> {
        counts(&self.ints(at, name)?, name)
    }

    /// A size for each of N dims, or one for all.
    pub fn window<const N: usize>(&self, at: usize, name: &str, default: [usize; N]) -> Outcome<[usize; N]> {
        let Some(given) = self.ints_or(at, name)? else { return Ok(default) };
        match &counts(&given, name)?[..] {
            [] => Ok(default),
            [one] => Ok([*one; N]),
            several => match <[usize; N]>::try_from(several) {
                Ok(sizes) => Ok(sizes),
                Err(_) => unmapped(format!("{} sizes for `{name}`", several.len())),
            },
        }
    }

    /// A truth value.
    pub fn flag(&self, at: usize, name: &str, default: bool) -> Outcome<bool> {
        match self.get(at, name) {
            None => Ok(default),
            Some(Value::Number(x)) => Ok(x.as_bool()),
            Some(other) => self.wrong(name, other),
        }
    }

    /// Text.
    pub fn text(&self, at: usize, name: &str, default: &str) -> Outcome<String> {
        match self.get(at, name) {
            None => Ok(default.into()),
            Some(Value::Text(text)) => Ok(text.clone()),
            Some(other) => self.wrong(name, other),
        }
    }

    /// The keyword `dtype`.
    pub fn dtype(&self) -> Outcome<Option<DType>> {
        match self.keyword("dtype") {
            None => Ok(None),
            Some(Value::DType(dtype)) => Ok(Some(*dtype)),
            Some(other) => self.wrong("dtype", other),
        }
    }

    /// A tensor or a number.
    pub fn operand(&self, at: usize, name: &str) -> Outcome<Operand<'_>> {
        match self.get(at, name) {
            Some(Value::Tensor(tensor)) => Ok(Operand::Tensor(tensor)),
            Some(Value::Number(x)) => Ok(Operand::Number(*x)),
            Some(other) => self.wrong(name, other),
            None => unmapped(format!("no `{name}`")),
        }
    }

    /// How a loss is reduced.
    pub fn reduction(&self) -> Outcome<Reduction> {
        match &self.text(usize::MAX, "reduction", "mean")?[..] {
            "none" => Ok(Reduction::None),
            "sum" => Ok(Reduction::Sum),
            "mean" => Ok(Reduction::Mean),
            other => unmapped(format!("the reduction `{other}`")),
        }
    }

    /// What stands in the brackets of an index.
    pub fn indexers(&self, at: usize) -> Outcome<Vec<Indexer>> {
        let one = |value: &Value| match value {
            Value::Nothing => Ok(Indexer::NewAxis),
            Value::Ellipsis => Ok(Indexer::Ellipsis),
            Value::Number(Scalar::Int(i)) => Ok(Indexer::Select(*i)),
            Value::Slice([start, end, step]) => match usize::try_from(step.unwrap_or(1)) {
                Ok(step) => Ok(Indexer::Range { start: *start, end: *end, step }),
                Err(_) => unmapped("a negative step"),
            },
            Value::Tensor(tensor) => Ok(Indexer::Tensor(tensor.clone())),
            Value::List(_) => match value.ints() {
                Some(ints) => Ok(Indexer::Tensor(Tensor::from_slice(&ints)?)),
                None => unmapped("a list in an index"),
            },
            other => self.wrong("index", other),
        };
        self.read.borrow_mut()[at] = true;
        match self.positional.get(at) {
            Some(Value::List(items)) => items.iter().map(one).collect(),
            Some(value) => Ok(vec![one(value)?]),
            None => unmapped("no index"),
        }
    }

    /// A list of tensors with gaps, as `index_put` takes its indices.
    pub fn indices(&self, at: usize, name: &str) -> Outcome<Vec<Option<&Tensor>>> {
        match self.get(at, name) {
            Some(Value::List(items)) => items
                .iter()
                .map(|item| match item {
                    Value::Tensor(tensor) => Ok(Some(tensor)),
                    Value::Nothing => Ok(None),
                    other => self.wrong(name, other),
                })
                .collect(),
            _ => unmapped(format!("no `{name}`")),
        }
    }
}

fn counts(ints: &[i64], name: &str) -> Outcome<Vec<usize>> {
    ints.iter().map(|&x| usize::try_from(x).or_else(|_| unmapped(format!("a negative `{name}`")))).collect()
}
