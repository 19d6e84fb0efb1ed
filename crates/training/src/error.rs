//! What can go wrong with batches and checkpoints.

use std::path::PathBuf;

use kiln_ir::Loc;

/// Batches that can't be made and checkpoints that can't be gone on from. Functions return Kiln's error, of which this
/// is the source:
///
/// ```
/// use kiln_training::data::{DataLoader, Dataset};
/// use kiln_training::Error;
/// use std::error::Error as _;
///
/// struct Files;
///
/// impl Dataset for Files {
///     type Sample = f32;
///     fn len(&self) -> usize {
///         8
///     }
///     fn get(&self, index: usize) -> kiln_tensor::Result<f32> {
///         if index == 5 { Err(std::io::Error::other("no such file"))? }
///         Ok(0.0)
///     }
/// }
///
/// # fn main() -> kiln_tensor::Result<()> {
/// let loader = DataLoader::options().batch_size(4).build(Files)?;
/// let error = loader.iter().nth(1).expect("two batches").unwrap_err();
/// assert_eq!(error.to_string(), "batch 1, sample 5: no such file");
/// let Some(Error::Batch { sample, .. }) = error.source().and_then(|e| e.downcast_ref()) else { panic!() };
/// assert_eq!(*sample, Some(5));
/// # Ok(()) }
/// ```
#[allow(missing_docs, reason = "the message of a variant says what its fields are")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A batch that a data loader could not make.
    #[error("batch {batch}{}: {fault}", .sample.map(|sample| format!(", sample {sample}")).unwrap_or_default())]
    Batch {
        /// The batch's number in its epoch.
        batch: usize,
        /// The sample, where one of them is to blame.
        sample: Option<usize>,
        /// What happened.
        #[source]
        fault: Fault,
    },
    /// A file that is no checkpoint, or a damaged one.
    #[error("{}: {why}", .path.display())]
    Checkpoint { path: PathBuf, why: String },
    /// A checkpoint without something that is to be loaded from it.
    #[error("{} has no {part}, at {loc}", .path.display())]
    Missing { path: PathBuf, part: String, loc: Loc },
}

impl From<Error> for kiln_ir::Error {
    fn from(error: Error) -> kiln_ir::Error {
        kiln_ir::Error::other(error)
    }
}

/// Why there is no sample, or no batch of samples.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The user's code returned an error.
    #[error("{0}")]
    Error(#[source] Box<kiln_ir::Error>),
    /// The user's code panicked.
    #[error("panicked: {0}")]
    Panic(String),
}
