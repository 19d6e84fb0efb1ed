//! [`Dataset`]: samples by index; data sets of tensors, parts of others.

use std::sync::Arc;

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::{Result, Tensor};

use super::Random;

/// So many samples, each under an index. Workers of a loader ask from several threads at once.
pub trait Dataset: Send + Sync {
    /// What a sample is: a tuple of tensors, say.
    type Sample: Send;

    /// How many samples there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sample of this index, which is below [`Dataset::len`].
    fn get(&self, index: usize) -> Result<Self::Sample>;
}

macro_rules! delegate_dataset {
    ($($Pointer:ty),*) => {
        $(impl<D: Dataset + ?Sized> Dataset for $Pointer {
            type Sample = D::Sample;
            fn len(&self) -> usize {
                (**self).len()
            }
            fn get(&self, index: usize) -> Result<D::Sample> {
                (**self).get(index)
            }
        })*
    };
}
delegate_dataset!(&D, Box<D>, Arc<D>);

/// The elements of a list.
// Not `Vec` itself: wherever `Dataset` is imported, `list.get(1)` would no longer be the slice's.
#[derive(Clone, Debug)]
pub struct ListDataset<T>(pub Vec<T>);

impl<T: Clone + Send + Sync> Dataset for ListDataset<T> {
    type Sample = T;
    fn len(&self) -> usize {
        self.0.len()
    }
    #[track_caller]
    fn get(&self, index: usize) -> Result<T> {
        let loc = Loc::caller();
        self.0.get(index).cloned().ok_or_else(|| beyond("ListDataset", index, self.0.len(), loc))
    }
}

fn beyond(what: &str, index: usize, size: usize, loc: Loc) -> Error {
    Error::op(what, Why::Index { index: index as i64, size }, loc)
}

/// The tensors of a [`TensorDataset`]: one, a tuple, an array or a list.
pub trait Columns: Send + Sync + Sized {
    /// All of them.
    fn tensors(&self) -> Vec<&Tensor>;

    /// The same with a tensor each in the others' places.
    fn map(&self, each: impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Self>;
}

impl Columns for Tensor {
    fn tensors(&self) -> Vec<&Tensor> {
        vec![self]
    }
    fn map(&self, mut each: impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        each(self)
    }
}

impl Columns for Vec<Tensor> {
    fn tensors(&self) -> Vec<&Tensor> {
        self.iter().collect()
    }
    fn map(&self, each: impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Vec<Tensor>> {
        self.iter().map(each).collect()
    }
}

macro_rules! tuple_columns {
    ($(($($T:ident $place:tt),*)),*) => {
        $(impl Columns for ($($T,)*) {
            fn tensors(&self) -> Vec<&Tensor> {
                vec![$(&self.$place),*]
            }
            fn map(&self, mut each: impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
                Ok(($(each(&self.$place)?,)*))
            }
        })*
    };
}
tuple_columns!(
    (Tensor 0),
    (Tensor 0, Tensor 1),
    (Tensor 0, Tensor 1, Tensor 2),
    (Tensor 0, Tensor 1, Tensor 2, Tensor 3)
);

/// Tensors whose first dim counts the samples: sample i is what each of them has at i.
///
/// ```
/// use kiln_training::data::{Dataset, TensorDataset};
/// use kiln_tensor::Tensor;
/// # fn main() -> kiln_tensor::Result<()> {
/// let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]], &kiln_tensor::Device::Cpu)?;
/// let y = Tensor::from_slice(&[0i64, 1, 0])?;
/// let pairs = TensorDataset::new((x, y))?;
/// let (row, label) = pairs.get(1)?;
/// assert_eq!((row.to_vec::<f32>()?, label.item::<i64>()?), (vec![3.0, 4.0], 1));
/// # Ok(()) }
/// ```
pub struct TensorDataset<T> {
    columns: T,
    len: usize,
}

impl<T: Columns> TensorDataset<T> {
    /// The data set of these tensors, which must have equally many rows.
    #[track_caller]
    pub fn new(columns: T) -> Result<TensorDataset<T>> {
        let loc = Loc::caller();
        let mut len = None;
        for tensor in columns.tensors() {
            let Some(&rows) = tensor.shape().to_vec().first() else {
                let why = Why::Rank { argument: "each tensor", expected: "1 or more", got: 0 };
                return Err(Error::op("TensorDataset", why, loc));
            };
            let first = *len.get_or_insert(rows);
            if first != rows {
                let why = Why::sizes("the number of rows of the tensors", first, rows);
                return Err(Error::op("TensorDataset", why, loc));
            }
        }
        Ok(TensorDataset { columns, len: len.unwrap_or(0) })
    }

    /// The tensors.
    pub fn tensors(&self) -> &T {
        &self.columns
    }
}

impl<T: Columns> Dataset for TensorDataset<T> {
    type Sample = T;
    fn len(&self) -> usize {
        self.len
    }
    #[track_caller]
    fn get(&self, index: usize) -> Result<T> {
        if index >= self.len {
            return Err(beyond("TensorDataset", index, self.len, Loc::caller()));
        }
        self.columns.map(|tensor| tensor.select(0, index as i64))
    }
}

/// Some samples of a data set, under new indices.
pub struct Subset<D> {
    dataset: D,
    indices: Vec<usize>,
}

impl<D: Dataset> Subset<D> {
    /// The samples of these indices, in this order.
    #[track_caller]
    pub fn new(dataset: D, indices: Vec<usize>) -> Result<Subset<D>> {
        let len = dataset.len();
        match indices.iter().find(|index| **index >= len) {
            Some(&index) => Err(beyond("Subset", index, len, Loc::caller())),
            None => Ok(Subset { dataset, indices }),
        }
    }

    /// Which samples of the other data set these are.
    pub fn indices(&self) -> &[usize] {
        &self.indices
    }

    /// The data set they are from.
    pub fn dataset(&self) -> &D {
        &self.dataset
    }
}

impl<D: Dataset> Dataset for Subset<D> {
    type Sample = D::Sample;
    fn len(&self) -> usize {
        self.indices.len()
    }
    #[track_caller]
    fn get(&self, index: usize) -> Result<D::Sample> {
        match self.indices.get(index) {
            Some(&index) => self.dataset.get(index),
            None => Err(beyond("Subset", index, self.indices.len(), Loc::caller())),
        }
    }
}

/// Deals all samples out by chance, into parts of these lengths, which must be the data set's together. The seed
/// alone decides which is where.
#[track_caller]
pub fn random_split<D: Dataset, const N: usize>(
    dataset: D,
    lengths: [usize; N],
    seed: u64,
) -> Result<[Subset<Arc<D>>; N]> {
    let total = lengths.iter().sum();
    if dataset.len() != total {
        let why = Why::sizes("the number of samples and the sum of the lengths", dataset.len(), total);
        return Err(Error::op("random_split", why, Loc::caller()));
    }
    let mut indices: Vec<usize> = (0..total).collect();
    Random::new(seed).shuffle(&mut indices);
    let dataset = Arc::new(dataset);
    let mut rest = indices.into_iter();
    Ok(lengths
        .map(|length| Subset { dataset: dataset.clone(), indices: rest.by_ref().take(length).collect() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_must_have_equally_many_rows() -> Result<()> {
        let rows = |n: usize| Tensor::from_vec(vec![0.0f32; n * 2], [n, 2]);
        assert_eq!(TensorDataset::new((rows(3)?, rows(3)?, rows(3)?))?.len(), 3);
        assert_eq!(TensorDataset::new(vec![rows(2)?; 5])?.get(1)?.len(), 5);
        let error = TensorDataset::new((rows(3)?, rows(2)?)).err().expect("rows differ").to_string();
        assert!(
            error.starts_with("TensorDataset: the number of rows of the tensors differ: 3 vs 2, at"),
            "{error}"
        );
        let number = Tensor::from_vec(vec![1.0f32], kiln_tensor::Shape::scalar())?;
        assert!(TensorDataset::new(number).is_err());
        let error = TensorDataset::new(rows(3)?)?.get(3).expect_err("3 of 3").to_string();
        assert!(error.contains("index 3 is out of range for size 3"), "{error}");
        Ok(())
    }

    #[test]
    fn a_split_deals_every_sample_once() -> Result<()> {
        let split = |seed| random_split(ListDataset((0..10).collect::<Vec<i64>>()), [7, 3], seed);
        let [train, test] = split(4)?;
        assert_eq!((train.len(), test.len()), (7, 3));
        let mut all: Vec<usize> = train.indices().iter().chain(test.indices()).copied().collect();
        assert_eq!(split(4)?[0].indices(), train.indices());
        assert_ne!(split(5)?[0].indices(), train.indices());
        all.sort_unstable();
        assert_eq!(all, (0..10).collect::<Vec<_>>());
        assert_eq!(test.get(0)?, test.indices()[0] as i64);
        assert!(test.get(3).is_err() && split(0)?[1].get(9).is_err());
        assert!(random_split(ListDataset(vec![0; 9]), [7, 3], 0).is_err());
        assert!(Subset::new(ListDataset(vec![0; 9]), vec![9]).is_err());
        Ok(())
    }
}
