//! Indexing, gathering, scattering and masks.

use kiln::{IndexOp, ScatterReduce};

use super::{Outputs, Run, one};
use crate::args::{Args, Outcome, Value, unmapped};

fn scatter_reduce(a: &Args) -> Outcome<Outputs> {
    let reduce = match &a.text(4, "reduce", "sum")?[..] {
        "sum" => ScatterReduce::Sum,
        "prod" => ScatterReduce::Prod,
        "mean" => ScatterReduce::Mean,
        "amax" => ScatterReduce::Amax,
        "amin" => ScatterReduce::Amin,
        other => return unmapped(format!("reduce `{other}`")),
    };
    let (dim, index, src) = (a.int(1, "dim", 0)?, a.tensor(2, "index")?, a.tensor(3, "src")?);
    one(a.x()?.scatter_reduce(dim, index, src, reduce, a.flag(5, "include_self", true)?))
}

/// The calls.
pub const CALLS: &[(&str, Run)] = &[
    ("gather", |a| one(a.x()?.gather(a.int(1, "dim", 0)?, a.tensor(2, "index")?))),
    ("index_select", |a| one(a.x()?.index_select(a.int(1, "dim", 0)?, a.tensor(2, "index")?))),
    ("index_add", |a| {
        one(a.x()?.index_add(a.int(1, "dim", 0)?, a.tensor(2, "index")?, a.tensor(3, "source")?))
    }),
    ("index_copy", |a| {
        one(a.x()?.index_copy(a.int(1, "dim", 0)?, a.tensor(2, "index")?, a.tensor(3, "source")?))
    }),
    ("index_fill", |a| {
        let (dim, index) = (a.int(1, "dim", 0)?, a.tensor(2, "index")?);
        one(a.x()?.index_fill(dim, index, a.number(3, "value", 0i64)?))
    }),
    ("scatter", |a| {
        let (dim, index) = (a.int(1, "dim", 0)?, a.tensor(2, "index")?);
        match a.get(3, if a.keyword("value").is_some() { "value" } else { "src" }) {
            Some(Value::Tensor(src)) => one(a.x()?.scatter(dim, index, src)),
            Some(Value::Number(value)) => one(a.x()?.scatter_value(dim, index, *value)),
            _ => unmapped("no source"),
        }
    }),
    ("scatter_add", |a| {
        one(a.x()?.scatter_add(a.int(1, "dim", 0)?, a.tensor(2, "index")?, a.tensor(3, "src")?))
    }),
    ("scatter_reduce.sum", scatter_reduce),
    ("scatter_reduce.prod", scatter_reduce),
    ("scatter_reduce.mean", scatter_reduce),
    ("scatter_reduce.amax", scatter_reduce),
    ("scatter_reduce.amin", scatter_reduce),
    ("take", |a| one(a.x()?.take(a.tensor(1, "index")?))),
    ("masked_scatter", |a| one(a.x()?.masked_scatter(a.tensor(1, "mask")?, a.tensor(2, "source")?))),
    ("masked_select", |a| one(a.x()?.masked_select(a.tensor(1, "mask")?))),
    ("nonzero", |a| one(a.x()?.nonzero())),
    ("argwhere", |a| one(a.x()?.nonzero())),
    ("index_put", |a| {
        let (index, values) = (a.indices(1, "indices")?, a.tensor(2, "values")?);
        one(a.x()?.index_put(&index, values, a.flag(3, "accumulate", false)?))
    }),
    ("__getitem__", |a| one(a.x()?.i(&a.indexers(1)?[..]))),
    ("nn.functional.embedding", |a| {
        let (weight, index) = (a.tensor(0, "weight")?, a.tensor(1, "input")?);
        match a.int_or(2, "padding_idx")? {
            Some(padding) => one(weight.embedding_padded(index, padding)),
            None => one(weight.embedding(index)),
        }
    }),
    ("nn.functional.one_hot", |a| match a.int(1, "num_classes", -1)? {
        classes if classes >= 0 => one(a.x()?.one_hot(classes as usize)),
        _ => unmapped("as many classes as there are"),
    }),
];
