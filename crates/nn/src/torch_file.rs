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
mod pickle;

use std::path::Path;

use kiln_ir::Error;
use kiln_tensor::{DType, MappedFile, Result, Tensor};

use crate::StateDict;
use archive::Archive;

pub use pickle::FUNCTIONS;

/// What a file holds.
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
    Text(String),
    /// A list or a tuple.
    List(Vec<Value>),
    /// A dict, in order.
    Dict(Vec<(Value, Value)>),
    /// A tensor.
    Tensor(Tensor),
}

impl Value {
    /// The entry of a dict under a name.
    pub fn get(&self, name: &str) -> Option<&Value> {
        match self {
            Value::Dict(entries) => entries
                .iter()
                .find(|(key, _)| matches!(key, Value::Text(text) if text == name))
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
                (Value::Text(name), Value::Tensor(tensor)) => Some((name.clone(), tensor.clone())),
                _ => None,
            })
            .collect()
    }
}

fn fail(path: &Path, error: impl std::fmt::Display) -> Error {
    Error::Environment(format!("{}: {error}", path.display()))
}

/// Everything that a file holds.
pub fn load_value(path: impl AsRef<Path>) -> Result<Value> {
    let path = path.as_ref();
    let bytes = MappedFile::open(path)?;
    read(&bytes).map_err(|error| fail(path, error))
}

/// The named tensors of a file: a state dict as `torch.save(model.state_dict(), …)` writes it.
pub fn load(path: impl AsRef<Path>) -> Result<StateDict> {
    let path = path.as_ref();
    load_value(path)?
        .state_dict()
        .ok_or_else(|| fail(path, "it holds no dict of named tensors; see `load_value`"))
}

/// What the bytes of a file hold.
fn read(bytes: &[u8]) -> std::result::Result<Value, String> {
    let archive = Archive::parse(bytes)?;
    let (root, program) = archive.root("data.pkl")?;
    if archive.get(&format!("{root}byteorder")).is_some_and(|order| order != b"little") {
        return Err("its numbers are in big-endian order".into());
    }
    pickle::run(program, &|key| archive.get(&format!("{root}data/{key}")))
}

/// Writes named tensors to a file, atomically, as `torch.save` writes a state dict.
pub fn save(state: &StateDict, path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let program = pickle::write(state);
    crate::safetensors::write_atomically(path, |file| {
        let mut archive = archive::Writer::new(file);
        let mut put = |name: &str, bytes: &[u8]| {
            archive.put(&format!("archive/{name}"), bytes).map_err(|error| fail(path, error))
        };
        put("data.pkl", &program)?;
        put("byteorder", b"little")?;
        for (i, (_, tensor)) in state.iter().enumerate() {
            put(&format!("data/{i}"), &tensor.to_bytes()?)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Random changes of a good file: an error or a value, never a panic, and never long.
    #[test]
    fn broken_files_are_errors() -> Result<()> {
        let mut state = StateDict::new();
        state.insert("a.weight", Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2])?);
        state.insert("a.count", Tensor::from_vec(vec![7i64], [0usize; 0])?);
        let folder = std::env::temp_dir().join(format!("kiln-pt-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(|e| fail(&folder, e))?;
        let path = folder.join("good.pt");
        save(&state, &path)?;
        let good = std::fs::read(&path).map_err(|e| fail(&path, e))?;
        assert!(read(&good).is_ok());
        let mut random = 1u64;
        let mut next = move |below: usize| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) as usize % below
        };
        let mut refused = 0;
        for _ in 0..20_000 {
            let mut bad = good.clone();
            for _ in 0..1 + next(4) {
                let at = next(bad.len());
                bad[at] = next(256) as u8;
            }
            bad.truncate(bad.len() - next(2) * next(bad.len()));
            refused += usize::from(read(&bad).is_err());
        }
        assert!(refused > 10_000, "{refused}");
        for program in [&b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."[..], b"\x80\x02cbuiltins\neval\n."]
        {
            let error = pickle::run(program, &|_| None).err().unwrap_or_default();
            assert!(error.contains("refused"), "{error}");
        }
        std::fs::remove_dir_all(&folder).map_err(|e| fail(&folder, e))
    }
}
