//! The calls of the sweep: every row of the op table at three sizes, in its dtypes and layouts, and the methods that are
//! no rows; and the one description of a call, from which Kiln and `benches/torch_ops.py` both make it.

use std::collections::BTreeMap;

use kiln::ir::{Class, Domain, Grad, Op, Row, Sample, SampleArg, Scalar, TensorTy, Ty};
use kiln::{DType, Shape};
use serde::Serialize;

use super::methods::{METHODS, Method};
use super::scale::{self, Scaled};

/// How large the largest tensor of a call is.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Size {
    /// The host's time.
    Small,
    /// About a second-level cache.
    Medium,
    /// Memory.
    Large,
}

impl Size {
    pub const ALL: [Size; 3] = [Size::Small, Size::Medium, Size::Large];

    pub fn name(self) -> &'static str {
        match self {
            Size::Small => "small",
            Size::Medium => "medium",
            Size::Large => "large",
        }
    }

    /// Elements at most. Products do more with each.
    fn elements(self, class: Class) -> usize {
        let large = if class == Class::Contraction { 1 << 20 } else { 1 << 22 };
        [1 << 10, 1 << 18, large][self as usize]
    }
}

/// What is called.
#[derive(Clone)]
pub enum What {
    Row(Op),
    Method(&'static Method),
}

/// A call, as both sides make it.
#[derive(Serialize, Clone)]
pub struct Call {
    /// Names it, with all that tells it from others.
    pub call: String,
    pub op: &'static str,
    pub attributes: BTreeMap<&'static str, String>,
    pub args: Vec<Operand>,
    /// Whether its gradients are part of it, those of all float operands.
    pub backward: bool,
    /// Whether the result, a view, is made contiguous: looking costs nothing.
    pub copied: bool,
    /// The result's shape; nothing for a method.
    pub result: Option<Vec<usize>>,
    pub size: &'static str,
    #[serde(skip)]
    pub what: What,
}

/// An operand, and how its values are drawn.
#[derive(Serialize, Clone)]
#[serde(untagged)]
pub enum Operand {
    Tensor {
        dtype: &'static str,
        shape: Vec<usize>,
        domain: &'static str,
        /// The bounds that a domain has.
        bounds: Vec<f64>,
        /// Dims from the slowest to the fastest in memory.
        order: Vec<usize>,
    },
    Number {
        number: String,
        kind: &'static str,
    },
}

/// Ways to call a row that are measured, spread over all that its samples show.
fn most_ways(class: Class) -> usize {
    if class == Class::Pointwise { 3 } else { 4 }
}

/// The calls of the rows and methods whose names are given, of all if none is.
pub fn calls(names: &[String]) -> Vec<Call> {
    let is_named = |name: &str| names.is_empty() || names.iter().any(|given| given == name);
    let rows = Op::ROWS.iter().filter(|row| is_named(row.name)).flat_map(row_calls);
    let methods = METHODS.iter().filter(|method| is_named(method.name)).flat_map(method_calls);
    let mut all: Vec<Call> = rows.chain(methods).collect();
    let mut seen = std::collections::HashSet::new();
    all.retain(|call| seen.insert(call.call.clone()));
    all
}

/// Random rows have no samples. Of recurrent layers, which take sequences of many lengths, only the steps would grow:
/// they are benchmark cases.
fn is_measured(row: &Row) -> bool {
    !matches!(row.class, Class::Constant | Class::List | Class::Custom | Class::Random)
        && !row.optional.contains(&"lengths")
}

fn is_differentiated(row: &Row) -> bool {
    !matches!(row.grad, Grad::Zero | Grad::NotDifferentiable(_))
}

fn row_calls(row: &'static Row) -> Vec<Call> {
    if !is_measured(row) {
        return Vec::new();
    }
    let mut all = Vec::new();
    for (way, sample) in ways(row).iter().enumerate() {
        let main = if sample.dtypes.contains(&DType::F32) { DType::F32 } else { DType::I64 };
        for dtype in [DType::F32, DType::BF16, DType::I64] {
            if !sample.dtypes.contains(&dtype) || (way > 0 && dtype != main) {
                continue;
            }
            for size in Size::ALL {
                let Some(scaled) = scale::scaled(sample, dtype, size.elements(row.class)) else { continue };
                // Other ways than the first do nothing else on the host; where memory is, they do.
                if way > 0 && size != Size::Large {
                    continue;
                }
                all.push(row_call(&scaled, dtype, size, None, false));
                let is_float =
                    |arg: &SampleArg| scale::ty(arg, dtype).as_tensor().is_some_and(|ty| ty.dtype.is_float());
                let has_gradient = is_differentiated(row)
                    && scaled.result.as_tensor().is_some_and(|ty| ty.dtype.is_float())
                    && scaled.args.iter().any(is_float);
                if has_gradient && (dtype == DType::F32 || size == Size::Large) {
                    all.push(row_call(&scaled, dtype, size, None, true));
                }
                if way == 0
                    && dtype == main
                    && size == Size::Large
                    && let Some(order) = other_order(row, &scaled)
                {
                    all.push(row_call(&scaled, dtype, size, Some(order), false));
                }
            }
        }
    }
    all
}

/// Another order of the first operand's dims in memory, where that makes a difference: a pointwise function of one
/// tensor takes its elements as they lie.
fn other_order(row: &Row, call: &Scaled) -> Option<Vec<usize>> {
    let is_tensor = |arg: &&SampleArg| !matches!(arg, SampleArg::Number(_));
    if row.class == Class::View
        || (row.class == Class::Pointwise && call.args.iter().filter(is_tensor).count() < 2)
    {
        return None;
    }
    match scale::ty(call.args.first()?, DType::F32).as_tensor()?.shape.rank() {
        0 | 1 => None,
        4 => Some(vec![0, 2, 3, 1]),
        rank => Some((0..rank - 2).chain([rank - 1, rank - 2]).collect()),
    }
}

/// Samples of a row that differ in more than sizes, at most [`most_ways`]: those of more than one dim first, and last
/// those with a tensor of one element, whose sizes don't grow.
fn ways(row: &Row) -> Vec<Sample> {
    let mut ways: Vec<(String, Sample)> = Vec::new();
    let mut samples = row.sample_calls();
    samples.retain(|sample| {
        sample
            .args
            .iter()
            .all(|arg| scale::ty(arg, DType::F32).as_tensor().is_none_or(|ty| ty.shape.numel() > 0))
    });
    samples.sort_by_key(|sample| {
        let args: Vec<Ty> = sample.args.iter().map(|arg| scale::ty(arg, DType::F32)).collect();
        // What is made from nothing has the result's size alone.
        let results =
            if args.iter().any(|ty| ty.as_tensor().is_some()) { None } else { sample.op.infer(&args).ok() };
        let tys = || args.iter().chain(results.iter().flatten()).filter_map(Ty::as_tensor);
        (
            tys().any(|ty| ty.shape.numel() == 1),
            tys().map(|ty| ty.shape.rank()).max().is_some_and(|rank| rank < 2),
        )
    });
    for sample in samples {
        let key = way(row, &sample);
        if !ways.iter().any(|(other, _)| *other == key) {
            ways.push((key, sample));
        }
    }
    let count = ways.len();
    let taken = count.min(most_ways(row.class));
    let spread = (0..taken).map(|i| i * count / taken);
    spread.map(|i| ways[i].1.clone()).collect()
}

/// What a sample does, apart from sizes.
fn way(row: &Row, sample: &Sample) -> String {
    let attributes = sample
        .op
        .attributes()
        .into_iter()
        .filter(|(name, _)| *name != "keepdim" && !sample.op.goes_with_sizes(name));
    let mut key = attributes.map(|(name, text)| format!("{name}={text} ")).collect::<String>();
    let shapes: Vec<Option<Shape>> = sample
        .args
        .iter()
        .map(|arg| scale::ty(arg, DType::F32).as_tensor().map(|ty| ty.shape.clone()))
        .collect();
    let mut tensors = shapes.iter().flatten();
    let first = tensors.next();
    let is_flat = row.class == Class::Pointwise && tensors.all(|shape| Some(shape) == first);
    for shape in &shapes {
        key += &match shape {
            None => "number ".into(),
            Some(_) if is_flat => "tensor ".into(),
            Some(shape) => format!("{} ", shape.rank()),
        };
    }
    key
}

fn row_call(scaled: &Scaled, dtype: DType, size: Size, order: Option<Vec<usize>>, backward: bool) -> Call {
    let row = scaled.op.row();
    let mut args: Vec<Operand> = scaled.args.iter().map(|arg| operand(arg, dtype)).collect();
    if let (Some(order), Some(Operand::Tensor { order: first, .. })) = (order, args.first_mut()) {
        *first = order;
    }
    Call {
        call: String::new(),
        op: row.name,
        attributes: scaled.op.attributes().into_iter().collect(),
        args,
        backward,
        copied: row.class == Class::View,
        result: scaled.result.as_tensor().map(|ty: &TensorTy| ty.shape.to_vec()),
        size: size.name(),
        what: What::Row(scaled.op.clone()),
    }
    .named()
}

fn method_calls(method: &'static Method) -> Vec<Call> {
    let sizes = Size::ALL.into_iter().flat_map(|size| {
        let backward = if method.gradient { vec![false, true] } else { vec![false] };
        backward.into_iter().map(move |backward| (size, backward))
    });
    let call = |(size, backward): (Size, bool)| {
        let args = (method.args)(size.elements(Class::Index));
        Call {
            call: String::new(),
            op: method.name,
            attributes: BTreeMap::new(),
            args: args.iter().map(|arg| operand(arg, DType::F32)).collect(),
            backward,
            copied: false,
            result: None,
            size: size.name(),
            what: What::Method(method),
        }
        .named()
    };
    sizes.map(call).collect()
}

fn operand(arg: &SampleArg, dtype: DType) -> Operand {
    let tensor = |dtype: DType, shape: &Shape, domain: Domain| {
        let (domain, bounds) = match domain {
            Domain::Any => ("any", vec![]),
            Domain::Positive => ("positive", vec![]),
            Domain::NonZero => ("nonzero", vec![]),
            Domain::Between(low, high) => ("between", vec![low, high]),
            Domain::Index(bound) => ("index", vec![bound as f64]),
            Domain::Distinct(bound) => ("distinct", vec![bound as f64]),
        };
        let order = (0..shape.rank()).collect();
        Operand::Tensor { dtype: dtype.name(), shape: shape.to_vec(), domain, bounds, order }
    };
    match arg {
        SampleArg::Tensor(shape, domain) => tensor(dtype, shape, *domain),
        SampleArg::Fixed(dtype, shape, domain) => tensor(*dtype, shape, *domain),
        SampleArg::Number(number) => Operand::Number {
            number: match number {
                Scalar::Float(x) => x.to_string(),
                other => other.as_i64().to_string(),
            },
            kind: number.kind().name(),
        },
    }
}

impl Call {
    fn named(mut self) -> Call {
        let mut words = vec![self.op.to_owned()];
        let Call { attributes, args, .. } = &self;
        words.extend(attributes.iter().map(|(name, text)| format!("{name}={}", text.replace(' ', ""))));
        words.extend(args.iter().map(|arg| match arg {
            Operand::Number { number, .. } => number.clone(),
            Operand::Tensor { dtype, shape, order, .. } => {
                let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
                let lies = if order.is_sorted() {
                    String::new()
                } else {
                    format!("@{}", order.iter().map(usize::to_string).collect::<String>())
                };
                format!("{dtype}[{}]{lies}", sizes.join("x"))
            }
        }));
        words.extend(self.backward.then(|| "grad".to_owned()));
        self.call = words.join(" ");
        self
    }

    /// The dtype under test: the first operand's.
    pub fn dtype(&self) -> &'static str {
        let tensor = self.args.iter().find_map(|arg| match arg {
            Operand::Tensor { dtype, .. } => Some(*dtype),
            Operand::Number { .. } => None,
        });
        tensor.unwrap_or("none")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_measured_at_three_sizes() {
        let all = calls(&[]);
        assert!(all.len() >= 600, "{}", all.len());
        for row in Op::ROWS.iter().filter(|row| is_measured(row)) {
            for size in Size::ALL {
                let found = all.iter().any(|call| call.op == row.name && call.size == size.name());
                assert!(found, "{} {size:?}", row.name);
            }
            let with_gradient = all.iter().any(|call| call.op == row.name && call.backward);
            let has_gradient =
                is_differentiated(row) && row.class != Class::Create && row.class != Class::Random;
            assert!(with_gradient || !has_gradient, "{}: no gradient is measured", row.name);
        }
        let one = calls(&["flip".into()]);
        assert!(!one.is_empty() && one.iter().all(|call| call.op == "flip"));
    }
}
