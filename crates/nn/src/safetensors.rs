//! safetensors files: written atomically, read through a memory map, in one file or in shards with an index.
//!
//! ```
//! use kiln_nn::{Linear, Module, safetensors};
//! # fn main() -> kiln_tensor::Result<()> {
//! # let folder = std::env::temp_dir().join(format!("kiln-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder).map_err(|e| kiln_tensor::Error::Environment(e.to_string()))?;
//! # let path = folder.join("model.safetensors");
//! let (a, b) = (Linear::new(4, 2)?, Linear::new(4, 2)?);
//! safetensors::save(&a.state_dict(), &path)?;
//! b.load_state_dict(&safetensors::load(&path)?, true)?;
//! assert_eq!(a.weight.to_vec::<f32>()?, b.weight.to_vec::<f32>()?);
//! # std::fs::remove_dir_all(&folder).map_err(|e| kiln_tensor::Error::Environment(e.to_string()))?;
//! # Ok(()) }
//! ```

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use kiln_ir::Error;
use kiln_tensor::{DType, MappedFile, Result, Tensor};
use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::StateDict;

/// What a file says of itself: text by name.
pub type Metadata = BTreeMap<String, String>;

const METADATA: &str = "__metadata__";
/// How the index of a sharded checkpoint is called.
const INDEX: &str = "model.safetensors.index.json";

fn fail(path: &Path, error: impl std::fmt::Display) -> Error {
    Error::Environment(format!("{}: {error}", path.display()))
}

fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "BOOL",
        DType::U8 => "U8",
        DType::I8 => "I8",
        DType::I16 => "I16",
        DType::I32 => "I32",
        DType::I64 => "I64",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        DType::F32 => "F32",
        DType::F64 => "F64",
    }
}

fn dtype_of(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::BOOL => DType::Bool,
        Dtype::U8 => DType::U8,
        Dtype::I8 => DType::I8,
        Dtype::I16 => DType::I16,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        _ => return None,
    })
}

/// Writes all tensors to a file. It appears under its name when it is finished: whoever reads it sees the old file
/// or the new one.
pub fn save(state: &StateDict, path: impl AsRef<Path>) -> Result<()> {
    save_with(state, &Metadata::new(), path)
}

/// [`save`] with text about the file.
pub fn save_with(state: &StateDict, metadata: &Metadata, path: impl AsRef<Path>) -> Result<()> {
    let tensors: Vec<(&str, &Tensor)> = state.iter().collect();
    write(&tensors, metadata, path.as_ref())
}

fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.dtype().size()
}

fn write(tensors: &[(&str, &Tensor)], metadata: &Metadata, path: &Path) -> Result<()> {
    if let Some((name, _)) = tensors.iter().find(|(name, _)| *name == METADATA) {
        return Err(fail(path, format_args!("no tensor can be called {name}")));
    }
    // Wide elements first: then everything lies at a multiple of its own size.
    let mut order = tensors.to_vec();
    order.sort_by_key(|(name, tensor)| (std::cmp::Reverse(tensor.dtype().size()), *name));
    let mut header = serde_json::Map::new();
    if !metadata.is_empty() {
        header.insert(METADATA.into(), json!(metadata));
    }
    let mut begin = 0;
    for (name, tensor) in &order {
        let end = begin + bytes_of(tensor);
        let entry = json!({
            "dtype": dtype_name(tensor.dtype()),
            "shape": tensor.shape().to_vec(),
            "data_offsets": [begin, end],
        });
        header.insert(name.to_string(), entry);
        begin = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    write_atomically(path, |file| {
        let put = |file: &mut dyn Write, bytes: &[u8]| file.write_all(bytes).map_err(|e| fail(path, e));
        put(file, &(header.len() as u64).to_le_bytes())?;
        put(file, &header)?;
        for (_, tensor) in &order {
            put(file, &tensor.to_bytes()?)?;
        }
        Ok(())
    })
}

/// Writes a file beside its place, and moves it there when all of it is on the disk.
pub(crate) fn write_atomically(path: &Path, body: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let name = path.file_name().ok_or_else(|| fail(path, "not the name of a file"))?;
    let mut beside = OsString::from(".");
    beside.push(name);
    beside.push(format!(".{}.part", std::process::id()));
    let beside = path.with_file_name(beside);
    let write = || -> Result<()> {
        let file = File::create(&beside).map_err(|e| fail(&beside, e))?;
        let mut buffered = BufWriter::with_capacity(1 << 20, file);
        body(&mut buffered)?;
        let file = buffered.into_inner().map_err(|e| fail(&beside, e))?;
        file.sync_all().map_err(|e| fail(&beside, e))?;
        fs::rename(&beside, path).map_err(|e| fail(path, e))
    };
    let written = write();
    if written.is_err() {
        // What is left of it is of no use; if it can't be removed, the first error says more.
        let _ = fs::remove_file(&beside);
    }
    written
}

/// A safetensors file that is mapped into memory: each tensor is read when it is asked for. The file must not be
/// changed meanwhile; [`save`] replaces files and does not change them.
pub struct SafeTensorsFile {
    path: PathBuf,
    bytes: MappedFile,
    metadata: Metadata,
    names: Vec<String>,
}

impl SafeTensorsFile {
    /// Opens a file and checks its header.
    pub fn open(path: impl AsRef<Path>) -> Result<SafeTensorsFile> {
        let path = path.as_ref().to_path_buf();
        let bytes = MappedFile::open(&path)?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| fail(&path, e))?;
        let metadata = header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
        let names = header.offset_keys();
        // Checks that the data is all there.
        SafeTensors::deserialize(&bytes).map_err(|e| fail(&path, e))?;
        Ok(SafeTensorsFile { path, bytes, metadata, names })
    }

    /// The names of the tensors, as their data lies in the file.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// What the file says of itself.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn parsed(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.bytes).map_err(|e| fail(&self.path, e))
    }

    /// One tensor, on the CPU.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        let view = self.parsed()?.tensor(name).map_err(|e| fail(&self.path, e))?;
        self.tensor(name, view)
    }

    /// All tensors.
    pub fn state_dict(&self) -> Result<StateDict> {
        let parsed = self.parsed()?;
        let mut state = StateDict::new();
        for name in &self.names {
            let view = parsed.tensor(name).map_err(|e| fail(&self.path, e))?;
            state.insert(name, self.tensor(name, view)?);
        }
        Ok(state)
    }

    fn tensor(&self, name: &str, view: safetensors::tensor::TensorView<'_>) -> Result<Tensor> {
        let Some(dtype) = dtype_of(view.dtype()) else {
            return Err(fail(&self.path, format_args!("{name}: Kiln has no dtype {:?}", view.dtype())));
        };
        Tensor::from_bytes(view.data(), view.shape(), dtype)
            .map_err(|e| fail(&self.path, format_args!("{name}: {e}")))
    }
}

/// All tensors of a file, or of all shards that an index (`….index.json`) names.
pub fn load(path: impl AsRef<Path>) -> Result<StateDict> {
    let path = path.as_ref();
    match path.to_string_lossy().ends_with(".index.json") {
        true => load_shards(path),
        false => SafeTensorsFile::open(path)?.state_dict(),
    }
}

fn load_shards(index: &Path) -> Result<StateDict> {
    let text = fs::read_to_string(index).map_err(|e| fail(index, e))?;
    let parsed: Value = serde_json::from_str(&text).map_err(|e| fail(index, e))?;
    let map = parsed["weight_map"].as_object().ok_or_else(|| fail(index, "there is no weight_map"))?;
    let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, shard) in map {
        let shard =
            shard.as_str().ok_or_else(|| fail(index, format_args!("{name}: not the name of a file")))?;
        // Shards lie beside their index, nowhere else.
        if Path::new(shard).file_name() != Some(shard.as_ref()) {
            return Err(fail(
                index,
                format_args!("{name}: {shard:?} is not the name of a file in this folder"),
            ));
        }
        shards.entry(shard).or_default().push(name);
    }
    let mut state = StateDict::new();
    for (shard, names) in shards {
        let file = SafeTensorsFile::open(index.with_file_name(shard))?;
        for name in names {
            state.insert(name, file.get(name)?);
        }
    }
    Ok(state)
}

/// Writes files of at most `most` bytes of data each (a tensor is never divided) and an index that names them, and
/// gives the index's path: `model-00001-of-00003.safetensors`, …, `model.safetensors.index.json`. The index
/// comes last, so that it never names what is not there.
pub fn save_sharded(state: &StateDict, folder: impl AsRef<Path>, most: usize) -> Result<PathBuf> {
    let folder = folder.as_ref();
    let mut shards: Vec<Vec<(&str, &Tensor)>> = vec![Vec::new()];
    let (mut room, mut total) = (most, 0);
    for (name, tensor) in state.iter() {
        let bytes = bytes_of(tensor);
        total += bytes;
        match shards.last_mut() {
            Some(shard) if bytes <= room || shard.is_empty() => shard.push((name, tensor)),
            _ => {
                shards.push(vec![(name, tensor)]);
                room = most;
            }
        }
        room = room.saturating_sub(bytes);
    }
    let metadata = Metadata::from([("format".to_string(), "pt".to_string())]);
    let mut map = serde_json::Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        write(shard, &metadata, &folder.join(&name))?;
        map.extend(shard.iter().map(|(tensor, _)| (tensor.to_string(), json!(name))));
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    let path = folder.join(INDEX);
    let text = serde_json::to_string_pretty(&index).map_err(|e| fail(&path, e))?;
    write_atomically(&path, |file| file.write_all(text.as_bytes()).map_err(|e| fail(&path, e)))?;
    Ok(path)
}
