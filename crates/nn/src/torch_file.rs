//! PyTorch's own files (`torch.save`): read by an unpickler that can build tensors and plain containers and nothing
//! else, and written so that `torch.load(weights_only=True)` takes them.
//!
//! ```
//! use kiln_nn::{Linear, Module, torch_file};
//! # fn main() -> kiln_tensor::Result<()> {
//! # let folder = std::env::temp_dir().join(format!("kiln-pt-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder).map_err(|e| kiln_tensor::Error::Environment(e.to_string()))?;
//! # let path = folder.join("model.pt");
//! let (a, b) = (Linear::new(4, 2)?, Linear::new(4, 2)?);
//! torch_file::save(&a.state_dict(), &path)?;
//! b.load_state_dict(&torch_file::load(&path)?, true)?;
//! assert_eq!(a.weight.to_vec::<f32>()?, b.weight.to_vec::<f32>()?);
//! # std::fs::remove_dir_all(&folder).map_err(|e| kiln_tensor::Error::Environment(e.to_string()))?;
//! # Ok(()) }
//! ```
//!
//! A pickle is a program, and Python runs whatever it says. Here its instructions may push numbers, text, lists,
//! tuples and dicts, and call the handful of functions that tensors are made with ([`FUNCTIONS`] and the names of
//! storages); anything else is refused by its name.

mod archive;
#[cfg(test)]
mod hostile;
mod pickle;

use std::io::{Read, Seek};
use std::path::Path;
use std::sync::Arc;

use kiln_tensor::{DType, Result, Tensor};

use crate::StateDict;
use crate::files::{fail, open, write_atomically};
use archive::Archive;

pub use pickle::FUNCTIONS;

/// What a file holds. What is one object in the file is one here: containers and texts are shared, and tensors of one
/// storage share its memory.
#[derive(Clone)]
pub enum Value {
    /// None.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A number.
    Float(f64),
    /// Text.
    Text(Arc<str>),
    /// A list or a tuple.
    List(Arc<[Value]>),
    /// A dict, in order.
    Dict(Arc<[(Value, Value)]>),
    /// A tensor.
    Tensor(Tensor),
}

impl Value {
    /// The entry of a dict under a name.
    pub fn get(&self, name: &str) -> Option<&Value> {
        match self {
            Value::Dict(entries) => entries
                .iter()
                .find(|(key, _)| matches!(key, Value::Text(text) if &**text == name))
                .map(|(_, value)| value),
            _ => None,
        }
    }

    /// The tensors of a dict by their names; `None` if it is no dict of named tensors.
    pub fn state_dict(&self) -> Option<StateDict> {
        let Value::Dict(entries) = self else { return None };
        entries
            .iter()
            .map(|entry| match entry {
                (Value::Text(name), Value::Tensor(tensor)) => Some((name.to_string(), tensor.clone())),
                _ => None,
            })
            .collect()
    }
}

/// Everything that a file holds.
pub fn load_value(path: impl AsRef<Path>) -> Result<Value> {
    let path = path.as_ref();
    let (file, _) = open(path)?;
    read(file).map_err(|error| fail(path, error))
}

/// The named tensors of a file: a state dict as `torch.save(model.state_dict(), …)` writes it.
pub fn load(path: impl AsRef<Path>) -> Result<StateDict> {
    let path = path.as_ref();
    load_value(path)?.state_dict().ok_or_else(|| fail(path, "not a dict of named tensors (see `load_value`)"))
}

/// What a file holds.
fn read(file: impl Read + Seek) -> std::result::Result<Value, String> {
    let mut archive = Archive::parse(file)?;
    let root = archive.root("data.pkl")?;
    let program = archive.get(&format!("{root}data.pkl"))?.unwrap_or_default();
    if archive.get(&format!("{root}byteorder"))?.is_some_and(|order| order != b"little") {
        return Err("big-endian data is not supported".into());
    }
    pickle::run(&program, &mut |key, dtype| {
        let name = format!("{root}data/{key}");
        let size = archive.size(&name).ok_or_else(|| format!("storage {key} is missing"))? as usize;
        if !size.is_multiple_of(dtype.size()) {
            return Err(format!(
                "storage {key} has {size} bytes, which is not a whole number of {dtype} elements"
            ));
        }
        archive.read(&name, |bytes| {
            Tensor::from_reader(bytes, [size / dtype.size()], dtype).map_err(|error| error.to_string())
        })
    })
}

/// Writes named tensors to a file, atomically, as `torch.save` writes a state dict: a tensor that has several names is
/// written once.
pub fn save(state: &StateDict, path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let program = pickle::write(state);
    write_atomically(path, |file| {
        let mut archive = archive::Writer::new(file);
        let mut put = |name: &str, bytes: &[u8]| {
            archive.put(&format!("archive/{name}"), bytes).map_err(|error| fail(path, error))
        };
        put("data.pkl", &program)?;
        put("byteorder", b"little")?;
        for (i, ((_, tensor), storage)) in state.iter().zip(pickle::storages(state)).enumerate() {
            if storage == i {
                put(&format!("data/{i}"), &tensor.to_bytes()?)?;
            }
        }
        put("version", b"3\n")?;
        archive.finish().map_err(|error| fail(path, error))
    })
}

/// PyTorch's storages and the dtypes of their elements.
const STORAGES: [(&str, DType); 10] = [
    ("BoolStorage", DType::Bool),
    ("ByteStorage", DType::U8),
    ("CharStorage", DType::I8),
    ("ShortStorage", DType::I16),
    ("IntStorage", DType::I32),
    ("LongStorage", DType::I64),
    ("HalfStorage", DType::F16),
    ("BFloat16Storage", DType::BF16),
    ("FloatStorage", DType::F32),
    ("DoubleStorage", DType::F64),
];
