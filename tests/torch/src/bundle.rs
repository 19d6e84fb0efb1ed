//! Reading what `samples.py` wrote: calls in JSON, and the bytes of their tensors.

use std::path::Path;

use kiln::{DType, Result, Tensor};
use serde::Deserialize;

/// A tensor in the file of bytes.
#[derive(Deserialize, Clone, Debug)]
pub struct Stored {
    /// Name of the dtype.
    pub dtype: String,
    /// Sizes of the dims.
    pub shape: Vec<usize>,
    strides: Vec<usize>,
    at: usize,
}

/// An argument of a call.
#[derive(Deserialize, Clone, Debug)]
#[serde(untagged)]
pub enum Given {
    /// True or false.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A finite float.
    Float(f64),
    /// Text, as for `reduction`.
    Text(String),
    /// A list or tuple.
    List(Vec<Given>),
    /// A tensor.
    Tensor {
        /// Where it lies.
        tensor: Stored,
    },
    /// A float that JSON has no number for.
    Special {
        /// `inf`, `-inf` or `nan`.
        float: String,
    },
    /// A dtype.
    DType {
        /// Its name.
        dtype: String,
    },
    /// A slice in an index.
    Slice {
        /// Start, stop and step.
        slice: [Option<i64>; 3],
    },
    /// An ellipsis in an index.
    Ellipsis {
        /// Always true.
        #[serde(rename = "ellipsis")]
        _there: bool,
    },
    /// None.
    Nothing,
}

/// Tensors of a result; those that PyTorch has none for are left out.
pub type Tensors = Option<Vec<Option<Stored>>>;

/// A call, and what PyTorch made of it.
#[derive(Deserialize)]
pub struct Call {
    /// Name of the OpInfo.
    pub op: String,
    /// Which part of the samples it belongs to.
    pub kind: String,
    /// What is special about it within its kind: a layout, a magnitude.
    pub form: String,
    /// The dtype that the samples were asked for with.
    pub dtype: String,
    /// Positional arguments.
    pub args: Vec<Given>,
    /// Keyword arguments, in order.
    pub kwargs: Vec<(String, Given)>,
    /// Outputs.
    pub outputs: Tensors,
    /// Gradients of the weighted outputs with respect to each float tensor, in order.
    pub gradients: Tensors,
    /// Gradients of the weighted gradients.
    pub seconds: Tensors,
    /// The three, computed in float64.
    #[serde(default)]
    pub exact: Option<[Tensors; 3]>,
}

/// The calls of an op.
pub struct Bundle {
    /// The calls.
    pub calls: Vec<Call>,
    bytes: Vec<u8>,
}

impl Bundle {
    /// Reads the files of an op.
    pub fn read(folder: &Path, name: &str) -> Option<Bundle> {
        let text = std::fs::read_to_string(folder.join(format!("{name}.jsonl"))).ok()?;
        let bytes = std::fs::read(folder.join(format!("{name}.bin"))).ok()?;
        let calls = text.lines().map(serde_json::from_str).collect::<std::result::Result<Vec<Call>, _>>();
        match calls {
            Ok(calls) => Some(Bundle { calls, bytes }),
            Err(error) => {
                eprintln!("{name}: {error}");
                None
            }
        }
    }

    /// A tensor as it lay in PyTorch's memory.
    pub fn tensor(&self, stored: &Stored) -> Result<Tensor> {
        let Stored { shape, strides, at, .. } = stored;
        let dtype = DType::from_name(&stored.dtype).unwrap_or(DType::F32);
        if shape.contains(&0) {
            return Tensor::from_bytes(&[], &shape[..], dtype);
        }
        let length = 1 + shape.iter().zip(strides).map(|(n, s)| (n - 1) * s).sum::<usize>();
        let bytes = &self.bytes[*at..at + length * dtype.size()];
        let mut dense = 1;
        let is_dense = shape.iter().zip(strides).rev().all(|(&n, &s)| {
            let fits = n == 1 || s == dense;
            dense *= n;
            fits
        });
        if is_dense {
            return Tensor::from_bytes(bytes, &shape[..], dtype);
        }
        Tensor::from_bytes(bytes, [length], dtype)?.as_strided(shape, strides, 0)?.detach()
    }
}
