//! [`Embedding`]: a table of vectors that is looked up by number.

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::{Result, Tensor, no_grad};

use crate::hooks::forward_with_hooks;
use crate::options::options;
use crate::{Hooks, Module, Parameter, Training};

/// The rows of a table at the numbers that come in.
///
/// ```
/// use kiln_nn::{Embedding, Forward};
/// use kiln_tensor::Tensor;
/// # fn main() -> kiln_tensor::Result<()> {
/// let words = Embedding::options().padding_idx(Some(0)).build(100, 16)?;
/// let x = words.forward(&Tensor::from_slice(&[5i64, 0, 7])?)?;
/// assert_eq!(x.shape().to_vec(), [3, 16]);
/// assert_eq!(x.select(0, 1)?.to_vec::<f32>()?, [0.0; 16]);
/// # Ok(()) }
/// ```
#[derive(Module)]
#[module(extra_repr = Self::describe)]
pub struct Embedding {
    /// `[num_embeddings, embedding_dim]`
    pub weight: Parameter,
    training: Training,
    hooks: Hooks,
    /// The row that has no gradient.
    #[module(skip)]
    padding_idx: Option<usize>,
}

options! {
    /// The options of [`Embedding`], with PyTorch's names and defaults.
    EmbeddingOptions for Embedding(num_embeddings: usize, embedding_dim: usize) {
        /// The row that starts as zeros and gets no gradient; negative ones count from the end. None by default.
        padding_idx: Option<i64> = None,
    }
}

impl EmbeddingOptions {
    /// A table with this many rows of this size, drawn from N(0, 1) as PyTorch does.
    #[track_caller]
    pub fn build(&self, num_embeddings: usize, embedding_dim: usize) -> Result<Embedding> {
        let weight = Tensor::randn_of([num_embeddings, embedding_dim], self.dtype, &self.device)?;
        let embedding = self.of(Parameter::new(weight)?)?;
        if let Some(padding) = embedding.padding_idx {
            let _off = no_grad();
            embedding.weight.select(0, padding as i64)?.zero_()?;
        }
        Ok(embedding)
    }

    /// A table with this weight, as it is.
    #[track_caller]
    pub fn of(&self, weight: Parameter) -> Result<Embedding> {
        let rows = weight.size(0)?;
        let padding_idx = match self.padding_idx {
            Some(index) if index >= -(rows as i64) && index < rows as i64 => {
                Some(index.rem_euclid(rows as i64) as usize)
            }
            Some(index) => {
                return Err(Error::op("Embedding", Why::Index { index, size: rows }, Loc::caller()));
            }
            None => None,
        };
        Ok(Embedding { weight, training: Training::default(), hooks: Hooks::default(), padding_idx })
    }
}

impl Embedding {
    /// A table of these rows, PyTorch's `from_pretrained`: not trained if `freeze`.
    #[track_caller]
    pub fn from_pretrained(weight: Tensor, freeze: bool) -> Result<Embedding> {
        let embedding = Embedding::options().of(Parameter::new(weight)?)?;
        embedding.weight.requires_grad_(!freeze)?;
        Ok(embedding)
    }

    fn describe(&self) -> String {
        let shape = self.weight.shape();
        let padding = self.padding_idx.map_or(String::new(), |index| format!(", padding_idx={index}"));
        format!("{}, {}{padding}", shape[0], shape.get(1).copied().unwrap_or(0))
    }
}

forward_with_hooks! {
    Embedding: |this, x| match this.padding_idx {
        Some(padding) => this.weight.embedding_padded(x, padding as i64),
        None => this.weight.embedding(x),
    };
}
