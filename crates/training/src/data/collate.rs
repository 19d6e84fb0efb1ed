//! [`Collate`]: many samples become one batch.

use std::collections::BTreeMap;

use kiln_ir::{Loc, Why};
use kiln_tensor::{Element, Error, Result, Tensor};

use crate::Fault;

/// Samples that can be put together by themselves, as PyTorch's `default_collate` does it: tensors are stacked,
/// numbers become a tensor, tuples, arrays, lists and maps are collated part by part, text is listed.
///
/// ```
/// use kiln_training::data::Collate;
/// use kiln_tensor::Tensor;
/// # fn main() -> kiln_tensor::Result<()> {
/// let sample = |label: i64| -> kiln_tensor::Result<_> { Ok((Tensor::from_slice(&[1.0f32, 2.0])?, label)) };
/// let (x, labels) = Collate::collate(vec![sample(3)?, sample(5)?])?;
/// assert_eq!(x.shape().to_vec(), [2, 2]);
/// assert_eq!(labels.to_vec::<i64>()?, [3, 5]);
/// # Ok(()) }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be put into batches by itself",
    note = "implement `Collate` for it, or give the loader a function: `build_with(dataset, |samples| …)`"
)]
pub trait Collate: Sized {
    /// What they become.
    type Batch: Send;

    /// The batch of these samples. Where one is unlike the others, an [`Error::Batch`](crate::Error::Batch) has its
    /// place in the batch as its sample; a loader tells which one that is in the data set.
    #[track_caller]
    fn collate(samples: Vec<Self>) -> Result<Self::Batch>;
}

impl Collate for Tensor {
    type Batch = Tensor;
    fn collate(samples: Vec<Tensor>) -> Result<Tensor> {
        let loc = Loc::caller();
        let _behalf = loc.on_behalf(crate::folder());
        if let Some(first) = samples.first() {
            let shape = first.shape();
            if let Some((place, other)) = samples.iter().enumerate().find(|(_, other)| other.shape() != shape)
            {
                let why = Why::shape("every tensor of the batch", shape, other.shape());
                return Err(unlike(place, why, loc));
            }
        }
        Tensor::stack(&samples, 0)
    }
}

/// The error of a sample that is not like the first one, by its place in the batch.
fn unlike(place: usize, why: Why, loc: Loc) -> Error {
    let fault = Fault::Error(Box::new(Error::op("collate", why, loc)));
    crate::Error::Batch { batch: 0, sample: Some(place), fault }.into()
}

macro_rules! collate_numbers {
    ($($Number:ty),*) => {
        $(impl Collate for $Number {
            type Batch = Tensor;
            fn collate(samples: Vec<$Number>) -> Result<Tensor> {
                numbers(samples)
            }
        })*
    };
}
collate_numbers!(f32, f64, i64, i32, i16, i8, u8, bool);

fn numbers<T: Element>(samples: Vec<T>) -> Result<Tensor> {
    let count = samples.len();
    Tensor::from_vec(samples, [count])
}

impl Collate for usize {
    type Batch = Tensor;
    /// Indices: `i64`.
    fn collate(samples: Vec<usize>) -> Result<Tensor> {
        numbers(samples.into_iter().map(|number| number as i64).collect())
    }
}

impl Collate for String {
    type Batch = Vec<String>;
    fn collate(samples: Vec<String>) -> Result<Vec<String>> {
        Ok(samples)
    }
}

impl Collate for () {
    type Batch = ();
    fn collate(_: Vec<()>) -> Result<()> {
        Ok(())
    }
}

macro_rules! collate_tuples {
    ($(($($T:ident $part:ident),*)),*) => {
        $(impl<$($T: Collate),*> Collate for ($($T,)*) {
            type Batch = ($($T::Batch,)*);
            fn collate(samples: Vec<Self>) -> Result<Self::Batch> {
                $(let mut $part = Vec::with_capacity(samples.len());)*
                for sample in samples {
                    #[allow(non_snake_case, reason = "each part is taken apart under its type's name")]
                    let ($($T,)*) = sample;
                    $($part.push($T);)*
                }
                Ok(($($T::collate($part)?,)*))
            }
        })*
    };
}
collate_tuples!((A a), (A a, B b), (A a, B b, C c), (A a, B b, C c, D d), (A a, B b, C c, D d, E e));

impl<T: Collate> Collate for Vec<T> {
    type Batch = Vec<T::Batch>;
    fn collate(samples: Vec<Vec<T>>) -> Result<Vec<T::Batch>> {
        let parts = samples.first().map_or(0, Vec::len);
        let mut columns: Vec<Vec<T>> = (0..parts).map(|_| Vec::with_capacity(samples.len())).collect();
        for (place, sample) in samples.into_iter().enumerate() {
            if sample.len() != parts {
                let why = Why::sizes("the lengths of the samples", parts, sample.len());
                return Err(unlike(place, why, Loc::caller()));
            }
            columns.iter_mut().zip(sample).for_each(|(column, part)| column.push(part));
        }
        columns.into_iter().map(T::collate).collect()
    }
}

impl<T: Collate, const N: usize> Collate for [T; N] {
    type Batch = Vec<T::Batch>;
    fn collate(samples: Vec<[T; N]>) -> Result<Vec<T::Batch>> {
        Vec::collate(samples.into_iter().map(Vec::from).collect())
    }
}

impl<T: Collate> Collate for BTreeMap<String, T> {
    type Batch = BTreeMap<String, T::Batch>;
    /// The first sample's names are the batch's; each sample must have them, and no others.
    fn collate(samples: Vec<Self>) -> Result<Self::Batch> {
        let names: Vec<String> =
            samples.first().map(|first| first.keys().cloned().collect()).unwrap_or_default();
        let mut rows = Vec::with_capacity(samples.len());
        for (place, sample) in samples.into_iter().enumerate() {
            if !sample.keys().eq(&names) {
                let other: Vec<String> = sample.into_keys().collect();
                let why = Why::Other(format!(
                    "samples have different keys: {} and {}",
                    names.join(", "),
                    other.join(", ")
                ));
                return Err(unlike(place, why, Loc::caller()));
            }
            rows.push(sample.into_values().collect::<Vec<T>>());
        }
        Ok(names.into_iter().zip(Vec::collate(rows)?).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_collated_by_themselves() -> Result<()> {
        let sample = |n: i64| (vec![n, 10 * n], [n as f32], n as usize, format!("#{n}"), n > 1);
        let (list, array, index, text, truth) = Collate::collate(vec![sample(1), sample(2)])?;
        assert_eq!(list.len(), 2);
        assert_eq!(list[1].to_vec::<i64>()?, [10, 20]);
        assert_eq!(array[0].to_vec::<f32>()?, [1.0, 2.0]);
        assert_eq!(index.to_vec::<i64>()?, [1, 2]);
        assert_eq!(text, ["#1", "#2"]);
        assert_eq!(truth.to_vec::<bool>()?, [false, true]);
        let named = |n: f32| BTreeMap::from([("x".to_string(), n), ("y".to_string(), -n)]);
        let batch = Collate::collate(vec![named(1.0), named(2.0)])?;
        assert_eq!(batch["y"].to_vec::<f32>()?, [-1.0, -2.0]);
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_told() -> Result<()> {
        let error = <Vec<f32>>::collate(vec![vec![1.0], vec![1.0, 2.0]]).expect_err("different lengths");
        assert!(error.to_string().contains("the lengths of the samples differ: 1 vs 2"), "{error}");
        let named = |name: &str| BTreeMap::from([(name.to_string(), 1.0f32)]);
        let error = Collate::collate(vec![named("x"), named("y")]).expect_err("different names");
        assert!(error.to_string().contains("samples have different keys: x and y"), "{error}");
        let shapes = vec![Tensor::from_slice(&[1.0f32])?, Tensor::from_slice(&[1.0f32, 2.0])?];
        assert!(Tensor::collate(shapes).is_err());
        Ok(())
    }
}
