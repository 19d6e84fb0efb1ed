//! safetensors files: written atomically, read tensor by tensor, in one file or in shards with an index.
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

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use kiln_tensor::{DType, Result, Tensor};
use parking_lot::Mutex;
use safetensors::tensor::{Dtype, Metadata as Header};
use serde_json::{Value, json};

use crate::StateDict;
use crate::files::{MOST_DIMS, fail, open, random, read_text, write_atomically, write_text};

/// What a file says of itself: text by name.
pub type Metadata = BTreeMap<String, String>;

const METADATA: &str = "__metadata__";
/// How the index of a sharded checkpoint is called.
const INDEX: &str = "model.safetensors.index.json";

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
        return Err(fail(path, format_args!("{name} is reserved: no tensor can have this name")));
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

/// A safetensors file: its header is read when it is opened, each tensor when it is asked for.
///
/// Tensors are read by copies, not through a memory map: under a map, another process that cuts the file off ends
/// this one by a signal, and one that changes it changes memory that is lent out as `&[u8]`. Here that is an error,
/// or another tensor's worth of numbers.
pub struct SafeTensorsFile {
    path: PathBuf,
    file: Mutex<File>,
    header: Header,
    /// Where the data begins.
    begin: u64,
    metadata: Metadata,
    names: Vec<String>,
}

/// The longest header that the format allows.
const LONGEST_HEADER: u64 = 100_000_000;

impl SafeTensorsFile {
    /// Opens a file and checks its header against the file's length.
    pub fn open(path: impl AsRef<Path>) -> Result<SafeTensorsFile> {
        let path = path.as_ref().to_path_buf();
        let (mut file, length) = open(&path)?;
        let mut size = [0; 8];
        file.read_exact(&mut size).map_err(|error| fail(&path, error))?;
        let size = u64::from_le_bytes(size);
        if size > LONGEST_HEADER || size > length.saturating_sub(8) {
            return Err(fail(&path, format_args!("the header is too long: {size} bytes")));
        }
        let mut text = vec![0; size as usize];
        file.read_exact(&mut text).map_err(|error| fail(&path, error))?;
        #[cfg(test)]
        tests::PARSED.set(tests::PARSED.get() + 1);
        let header: Header = serde_json::from_slice(&text).map_err(|error| fail(&path, error))?;
        let (begin, data) = (8 + size, header.data_len() as u64);
        if begin.checked_add(data) != Some(length) {
            let there = length - begin;
            return Err(fail(
                &path,
                format_args!(
                    "truncated or damaged: the header describes {data} bytes of data, the file has {there}"
                ),
            ));
        }
        let metadata = header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
        let names = header.offset_keys();
        Ok(SafeTensorsFile { path, file: Mutex::new(file), header, begin, metadata, names })
    }

    /// The names of the tensors, as their data lies in the file.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// What the file says of itself.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// One tensor, on the CPU.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        let told = |why: &dyn std::fmt::Display| fail(&self.path, format_args!("{name}: {why}"));
        let info = self.header.info(name).ok_or_else(|| told(&"no tensor with this name"))?;
        if info.shape.len() > MOST_DIMS {
            return Err(told(&format_args!("{} dims, the limit is {MOST_DIMS}", info.shape.len())));
        }
        let dtype =
            dtype_of(info.dtype).ok_or_else(|| told(&format_args!("unsupported dtype {:?}", info.dtype)))?;
        let mut file = self.file.lock();
        file.seek(SeekFrom::Start(self.begin + info.data_offsets.0 as u64)).map_err(|error| told(&error))?;
        Tensor::from_reader(&mut *file, &info.shape[..], dtype).map_err(|error| told(&error))
    }

    /// All tensors.
    pub fn state_dict(&self) -> Result<StateDict> {
        self.names.iter().map(|name| Ok((name.clone(), self.get(name)?))).collect()
    }
}

/// All tensors of a file, or of all shards that an index (`….index.json`) names.
pub fn load(path: impl AsRef<Path>) -> Result<StateDict> {
    let path = path.as_ref();
    if path.to_string_lossy().ends_with(".index.json") {
        load_shards(path)
    } else {
        SafeTensorsFile::open(path)?.state_dict()
    }
}

fn load_shards(index: &Path) -> Result<StateDict> {
    // Whoever saves anew removes the shards of before and may use their names again. As long as an index is there, so
    // are its shards; once all are open, that is no matter.
    let mut text = read_text(index)?;
    let shards = loop {
        let opened = open_shards(index, &text);
        let now = read_text(index)?;
        if now == text {
            break opened?;
        }
        text = now;
    };
    let mut state = StateDict::new();
    for (file, names) in shards {
        for name in names {
            state.insert(&name, file.get(&name)?);
        }
    }
    Ok(state)
}

/// The shards that an index names, each with the names of its tensors.
fn open_shards(index: &Path, text: &str) -> Result<Vec<(SafeTensorsFile, Vec<String>)>> {
    let parsed: Value = serde_json::from_str(text).map_err(|e| fail(index, e))?;
    let map = parsed["weight_map"].as_object().ok_or_else(|| fail(index, "no weight_map"))?;
    let mut shards: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (name, shard) in map {
        let shard = shard.as_str().ok_or_else(|| fail(index, format_args!("{name}: not a file name")))?;
        // Shards lie beside their index, nowhere else.
        if Path::new(shard).file_name() != Some(shard.as_ref()) {
            return Err(fail(index, format_args!("{name}: {shard:?} is not a file name in this folder")));
        }
        shards.entry(shard).or_default().push(name.clone());
    }
    let open = |(shard, names)| Ok((SafeTensorsFile::open(index.with_file_name(shard))?, names));
    shards.into_iter().map(open).collect()
}

/// Writes files of at most `most` bytes of data each (a tensor is never divided) and an index that names them, and
/// gives the index's path: `model-00001-of-00003.safetensors`, …, `model.safetensors.index.json`.
///
/// The files of an earlier save stay as they are until the new index is there, so that whoever reads it, and
/// whoever finds it after a crash, has all tensors of one save. Where names are taken the new shards get others
/// (`model-1f3a…-00001-of-00003.safetensors`); those of the save before are removed in the end.
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
    let path = folder.join(INDEX);
    // One save at a time, where folders can be locked; elsewhere shards of two at once may be left behind.
    let lock = File::open(folder).map_err(|error| fail(folder, error))?;
    let _ = lock.lock();
    let before = own_shards(&path);
    let file_name =
        |tag: &str, i: usize| format!("model-{tag}{:05}-of-{:05}.safetensors", i + 1, shards.len());
    let taken = |tag: &str| (0..shards.len()).any(|i| folder.join(file_name(tag, i)).exists());
    let mut tag = String::new();
    while taken(&tag) {
        tag = format!("{:016x}-", random());
    }
    let metadata = Metadata::from([("format".to_string(), "pt".to_string())]);
    let mut map = serde_json::Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let name = file_name(&tag, i);
        write(shard, &metadata, &folder.join(&name))?;
        map.extend(shard.iter().map(|(tensor, _)| (tensor.to_string(), json!(name))));
    }
    // No two saves have one index, even where their shards have the same names.
    let save = format!("{:016x}", random());
    let metadata = json!({ "total_size": total, "writer": WRITER, "save": save });
    let index = json!({ "metadata": metadata, "weight_map": map });
    let text = serde_json::to_string_pretty(&index).map_err(|e| fail(&path, e))?;
    write_text(&path, &text)?;
    for shard in before {
        // Named by nobody any more; what can't be removed does no harm.
        let _ = std::fs::remove_file(folder.join(shard));
    }
    Ok(path)
}

/// Who wrote an index: shards of others are not ours to remove.
const WRITER: &str = "kiln";

/// The shards of an earlier [`save_sharded`].
fn own_shards(index: &Path) -> BTreeSet<String> {
    let parsed: Option<Value> = read_text(index).ok().and_then(|text| serde_json::from_str(&text).ok());
    let own = parsed.filter(|parsed| parsed["metadata"]["writer"] == WRITER);
    let Some(map) = own.as_ref().and_then(|own| own["weight_map"].as_object()) else {
        return BTreeSet::new();
    };
    let names = map.values().filter_map(|name| name.as_str());
    names.filter(|name| Path::new(name).file_name() == Some(name.as_ref())).map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs;

    use super::*;

    thread_local! {
        /// Headers parsed on this thread.
        pub(super) static PARSED: Cell<usize> = const { Cell::new(0) };
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("kiln-safetensors-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_header_is_parsed_once_a_file() -> Result<()> {
        let folder = folder("parsed");
        let state: StateDict = (0..200)
            .map(|i| Ok((format!("layer.{i}"), Tensor::from_slice(&[i as f32, 1.0])?)))
            .collect::<Result<_>>()?;
        let index = save_sharded(&state, &folder, 400)?;
        let before = PARSED.get();
        let loaded = load(&index)?;
        assert_eq!(PARSED.get() - before, 4, "four shards of fifty tensors");
        assert_eq!(loaded.get("layer.7").expect("it").to_vec::<f32>()?, [7.0, 1.0]);
        assert_eq!(loaded.len(), 200);
        fs::remove_dir_all(&folder).unwrap();
        Ok(())
    }

    /// Savers of several versions at once, and a reader: all tensors it finds are of one of them.
    #[test]
    fn shards_of_two_saves_are_never_mixed() -> Result<()> {
        let folder = folder("mixed");
        let version = |version: usize| -> Result<StateDict> {
            let tensor = |i: usize| Ok((format!("layer.{i}"), Tensor::from_slice(&[version as f32; 8])?));
            (0..6).map(tensor).collect()
        };
        let index = save_sharded(&version(0)?, &folder, 64)?;
        let plain = folder.join("model-00001-of-00003.safetensors");
        assert!(plain.exists(), "the names that everybody knows, where they are free");
        std::thread::scope(|scope| -> Result<()> {
            let save = |versions: std::ops::Range<usize>| {
                let folder = &folder;
                // Other numbers of shards, too.
                move || {
                    versions.into_iter().try_for_each(|n| {
                        save_sharded(&version(n)?, folder, if n % 2 == 0 { 64 } else { 128 }).map(drop)
                    })
                }
            };
            let savers = [scope.spawn(save(1..8)), scope.spawn(save(11..18))];
            while !savers.iter().all(|saver| saver.is_finished()) {
                let found = load(&index)?;
                let numbers: BTreeSet<u32> = found
                    .iter()
                    .map(|(_, tensor)| Ok(tensor.to_vec::<f32>()?[0] as u32))
                    .collect::<Result<_>>()?;
                assert_eq!((found.len(), numbers.len()), (6, 1), "{numbers:?}");
            }
            savers.into_iter().try_for_each(|saver| saver.join().expect("no panic"))
        })?;
        let shards = open_shards(&index, &read_text(&index)?)?.len();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), shards + 1, "nothing else is left");
        // Files of others stay where they are.
        fs::write(&index, r#"{"weight_map": {"a": "theirs.safetensors"}}"#).unwrap();
        fs::write(folder.join("theirs.safetensors"), "").unwrap();
        save_sharded(&version(0)?, &folder, 64)?;
        assert!(folder.join("theirs.safetensors").exists());
        fs::remove_dir_all(&folder).unwrap();
        Ok(())
    }

    #[test]
    fn a_file_that_shrinks_is_an_error() -> Result<()> {
        let folder = folder("shrinks");
        let path = folder.join("model.safetensors");
        let mut state = StateDict::new();
        state.insert("a", Tensor::from_vec(vec![1.0f32; 4096], [4096])?);
        state.insert("b", Tensor::from_vec(vec![2.0f32; 4096], [4096])?);
        save(&state, &path)?;
        let file = SafeTensorsFile::open(&path)?;
        fs::File::options().write(true).open(&path).unwrap().set_len(20_000).unwrap();
        assert_eq!(file.get("a")?.to_vec::<f32>()?, [1.0; 4096]);
        let told = file.get("b").unwrap_err().to_string();
        assert!(told.contains("b: ") && told.contains("cannot read 16384 bytes"), "{told}");
        fs::remove_dir_all(&folder).unwrap();
        Ok(())
    }

    /// Headers that promise what is not there, or what no machine has.
    #[test]
    fn absurd_headers_are_errors() {
        let folder = folder("headers");
        let path = folder.join("model.safetensors");
        let load = |length: u64, header: &str, data: usize| {
            let data = vec![0; data];
            fs::write(&path, [&length.to_le_bytes()[..], header.as_bytes(), &data].concat()).unwrap();
            load(&path)
        };
        let told = |header: &str, data: usize| {
            load(header.len() as u64, header, data).map(|_| ()).unwrap_err().to_string()
        };
        for length in [u64::MAX, u64::MAX - 7, 1 << 40, 100_000_001, 3] {
            assert!(load(length, "{}", 0).is_err(), "{length}");
        }
        assert!(load(2, "{}", 0).unwrap().is_empty());
        assert!(told("{}", 1).contains("0 bytes of data, the file has 1"));
        let entry = |shape: &str, begin: u64, end: u64| {
            format!(r#""{shape}":{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
        };
        let one = |shape: &str, begin, end| format!("{{{}}}", entry(shape, begin, end));
        assert!(load(one("[1]", 0, 4).len() as u64, &one("[1]", 0, 4), 4).is_ok());
        for (shape, begin, end) in [
            ("[4611686018427387904]", 0, 0),
            ("[0,4611686018427387904,4611686018427387904]", 0, 0),
            ("[1099511627776]", 0, 4398046511104),
            ("[2]", 0, 4),
            ("[1]", 4, 8),
            ("[1]", 4, 0),
            ("[1]", 18446744073709551612, 18446744073709551615),
            ("[-1]", 0, 4),
            ("[1.0]", 0, 4),
        ] {
            let message = told(&one(shape, begin, end), 4);
            assert!(message.contains("model.safetensors"), "{message}");
        }
        // Two tensors of the same bytes, brackets without end, and more dims than a tensor has.
        assert!(!told(&format!("{{{},{}}}", entry("[1]", 0, 4), entry("[1,1]", 0, 4)), 4).is_empty());
        assert!(!told(&"[".repeat(1 << 20), 0).is_empty());
        assert!(!told(&format!("{{\"a\":{}", "{\"a\":".repeat(1 << 20)), 0).is_empty());
        let many = format!("[{}1]", "1,".repeat(1 << 20));
        assert!(told(&one(&many, 0, 4), 4).contains("dims"), "{:.200}", told(&one(&many, 0, 4), 4));
        fs::remove_dir_all(&folder).unwrap();
    }
}
