//! The subset of pickle that state dicts need: a stack machine that builds tensors and plain containers.

use std::collections::HashMap;

use kiln_tensor::{DType, Tensor};

use super::{STORAGES, Value};
use crate::StateDict;

type Result<T> = std::result::Result<T, String>;

/// The functions that a file may call, besides naming storages.
pub const FUNCTIONS: [&str; 3] =
    ["collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"];

/// How many values a file may have in all: a list of lists of lists, each the same one, is exponential.
const MOST: usize = 10_000_000;
/// How deep containers may be nested.
const DEEPEST: usize = 200;

/// A value while it is built. Containers are numbers of [`Machine::containers`], since the memo shares them.
#[derive(Clone)]
enum Item {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Tuple(Vec<Item>),
    List(usize),
    Dict(usize),
    Tensor(Tensor),
    Function(&'static str),
    StorageType(DType),
    Storage { dtype: DType, key: String },
    Mark,
}

#[derive(Default)]
struct Machine {
    stack: Vec<Item>,
    memo: HashMap<u64, Item>,
    /// Elements of lists, and keys and values of dicts in turn.
    containers: Vec<Vec<Item>>,
}

/// The bytes of a program, from where it is.
struct Program<'a> {
    rest: &'a [u8],
}

impl<'a> Program<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        if count > self.rest.len() {
            return Err("its pickle is cut off".into());
        }
        let (taken, rest) = self.rest.split_at(count);
        self.rest = rest;
        Ok(taken)
    }

    fn number(&mut self, size: usize) -> Result<u64> {
        Ok(self.take(size)?.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
    }

    fn text(&mut self, size: usize) -> Result<String> {
        let bytes = self.take(size)?;
        std::str::from_utf8(bytes).map(String::from).map_err(|_| "a text in it is not UTF-8".to_string())
    }

    fn line(&mut self) -> Result<String> {
        let end = self.rest.iter().position(|&byte| byte == b'\n').ok_or("its pickle is cut off")?;
        let line = self.text(end)?;
        self.take(1)?;
        Ok(line)
    }
}

/// The bytes of a storage by its key.
type Storages<'a> = dyn Fn(&str) -> Option<&'a [u8]> + 'a;

/// Runs a program; `data` gives the bytes of a storage by its key.
pub(super) fn run(program: &[u8], data: &Storages<'_>) -> Result<Value> {
    let mut machine = Machine::default();
    let mut program = Program { rest: program };
    while machine.step(&mut program, data)? {}
    let result = machine.pop()?;
    machine.finish(&result, 0, &mut 0)
}

impl Machine {
    fn pop(&mut self) -> Result<Item> {
        match self.stack.pop() {
            Some(Item::Mark) | None => Err("its pickle takes what is not there".into()),
            Some(item) => Ok(item),
        }
    }

    /// What was pushed since the last mark.
    fn since_mark(&mut self) -> Result<Vec<Item>> {
        let mark = self.stack.iter().rposition(|item| matches!(item, Item::Mark));
        let items = self.stack.split_off(mark.ok_or("its pickle has no mark")? + 1);
        self.stack.pop();
        Ok(items)
    }

    fn top_tuple(&mut self, count: usize) -> Result<()> {
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(self.pop()?);
        }
        items.reverse();
        self.stack.push(Item::Tuple(items));
        Ok(())
    }

    fn container(&mut self) -> usize {
        self.containers.push(Vec::new());
        self.containers.len() - 1
    }

    /// Adds to the container on top.
    fn extend(&mut self, items: Vec<Item>, dict: bool) -> Result<()> {
        match (self.stack.last(), dict) {
            (Some(Item::List(at)), false) => self.containers[*at].extend(items),
            (Some(Item::Dict(at)), true) if items.len().is_multiple_of(2) => {
                self.containers[*at].extend(items)
            }
            _ => return Err("its pickle adds to what is no container".into()),
        }
        Ok(())
    }

    /// One instruction; false at the end.
    fn step(&mut self, program: &mut Program<'_>, data: &Storages<'_>) -> Result<bool> {
        let code = program.take(1)?[0];
        match code {
            // Protocol and frames: nothing to do.
            0x80 => drop(program.take(1)?),
            0x95 => drop(program.take(8)?),
            b'(' => self.stack.push(Item::Mark),
            b'N' => self.stack.push(Item::None),
            0x88 => self.stack.push(Item::Bool(true)),
            0x89 => self.stack.push(Item::Bool(false)),
            b'J' => {
                let number = program.number(4)? as u32 as i32;
                self.stack.push(Item::Int(i64::from(number)));
            }
            b'K' => {
                let number = program.number(1)? as i64;
                self.stack.push(Item::Int(number));
            }
            b'M' => {
                let number = program.number(2)? as i64;
                self.stack.push(Item::Int(number));
            }
            0x8a => {
                let size = program.number(1)? as usize;
                let bytes = program.take(size)?;
                if size > 8 {
                    return Err("a number in it has more than 64 bits".into());
                }
                let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
                let start = if negative { -1i64 } else { 0 };
                self.stack.push(Item::Int(bytes.iter().rev().fold(start, |sum, &b| sum << 8 | i64::from(b))));
            }
            b'G' => {
                let bits = program.take(8)?.iter().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
                self.stack.push(Item::Float(f64::from_bits(bits)));
            }
            b'X' => {
                let size = program.number(4)? as usize;
                let text = program.text(size)?;
                self.stack.push(Item::Text(text));
            }
            0x8c => {
                let size = program.number(1)? as usize;
                let text = program.text(size)?;
                self.stack.push(Item::Text(text));
            }
            b']' => {
                let list = Item::List(self.container());
                self.stack.push(list);
            }
            b'}' => {
                let dict = Item::Dict(self.container());
                self.stack.push(dict);
            }
            b')' => self.stack.push(Item::Tuple(Vec::new())),
            0x85..=0x87 => self.top_tuple(usize::from(code - 0x84))?,
            b't' => {
                let items = self.since_mark()?;
                self.stack.push(Item::Tuple(items));
            }
            b'a' => {
                let item = self.pop()?;
                self.extend(vec![item], false)?;
            }
            b'e' => {
                let items = self.since_mark()?;
                self.extend(items, false)?;
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.extend(vec![key, value], true)?;
            }
            b'u' => {
                let items = self.since_mark()?;
                self.extend(items, true)?;
            }
            b'q' | b'r' | 0x94 => {
                let at = match code {
                    b'q' => program.number(1)?,
                    b'r' => program.number(4)?,
                    _ => self.memo.len() as u64,
                };
                let top = self.stack.last().ok_or("its pickle keeps what is not there")?.clone();
                self.memo.insert(at, top);
            }
            b'h' | b'j' => {
                let at = program.number(if code == b'h' { 1 } else { 4 })?;
                let item = self.memo.get(&at).ok_or("its pickle takes what is not there")?.clone();
                self.stack.push(item);
            }
            b'c' => {
                let name = format!("{} {}", program.line()?, program.line()?);
                self.stack.push(function(&name)?);
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (module, name) {
                    (Item::Text(module), Item::Text(name)) => {
                        self.stack.push(function(&format!("{module} {name}"))?);
                    }
                    _ => return Err("its pickle names a function by what is no text".into()),
                }
            }
            b'Q' => {
                let storage = storage(self.pop()?)?;
                self.stack.push(storage);
            }
            b'R' => {
                let (arguments, function) = (self.pop()?, self.pop()?);
                let result = self.call(&function, &arguments, data)?;
                self.stack.push(result);
            }
            // Attributes of a dict, such as the versions of modules: not needed.
            b'b' => {
                self.pop()?;
                if !matches!(self.stack.last(), Some(Item::Dict(_))) {
                    return Err("its pickle sets attributes of what is no dict: refused".into());
                }
            }
            b'.' => return Ok(false),
            other => return Err(format!("its pickle has the instruction {other:#04x}: refused")),
        }
        Ok(true)
    }

    fn call(&mut self, function: &Item, arguments: &Item, data: &Storages<'_>) -> Result<Item> {
        let (Item::Function(name), Item::Tuple(arguments)) = (function, arguments) else {
            return Err("its pickle calls what is no function: refused".into());
        };
        match (*name, &arguments[..]) {
            ("collections OrderedDict", []) => Ok(Item::Dict(self.container())),
            ("torch._utils _rebuild_parameter", [tensor @ Item::Tensor(_), ..]) => Ok(tensor.clone()),
            (
                "torch._utils _rebuild_tensor_v2",
                [Item::Storage { dtype, key }, Item::Int(offset), Item::Tuple(size), Item::Tuple(stride), ..],
            ) => {
                let bytes = data(key).ok_or_else(|| format!("there is no storage {key}"))?;
                tensor(bytes, *dtype, *offset, &sizes(size)?, &sizes(stride)?).map(Item::Tensor)
            }
            (name, _) => Err(format!("{name} is called with other arguments than PyTorch's: refused")),
        }
    }

    /// A finished value, cut off from the memo.
    fn finish(&self, item: &Item, depth: usize, count: &mut usize) -> Result<Value> {
        *count += 1;
        if depth > DEEPEST || *count > MOST {
            return Err("its containers are too many or too deep".into());
        }
        let all = |items: &[Item], count: &mut usize| {
            items.iter().map(|item| self.finish(item, depth + 1, count)).collect::<Result<Vec<Value>>>()
        };
        Ok(match item {
            Item::None => Value::None,
            Item::Bool(value) => Value::Bool(*value),
            Item::Int(value) => Value::Int(*value),
            Item::Float(value) => Value::Float(*value),
            Item::Text(value) => Value::Text(value.clone()),
            Item::Tensor(tensor) => Value::Tensor(tensor.clone()),
            Item::Tuple(items) => Value::List(all(items, count)?),
            Item::List(at) => Value::List(all(&self.containers[*at], count)?),
            Item::Dict(at) => {
                let mut flat = all(&self.containers[*at], count)?.into_iter();
                let mut entries = Vec::with_capacity(flat.len() / 2);
                while let (Some(key), Some(value)) = (flat.next(), flat.next()) {
                    entries.push((key, value));
                }
                Value::Dict(entries)
            }
            Item::Function(_) | Item::StorageType(_) | Item::Storage { .. } | Item::Mark => {
                return Err("it holds a function or a storage where a value should be".into());
            }
        })
    }
}

fn function(name: &str) -> Result<Item> {
    if let Some(known) = FUNCTIONS.iter().find(|known| **known == name) {
        return Ok(Item::Function(known));
    }
    let storage =
        name.strip_prefix("torch ").and_then(|own| STORAGES.iter().find(|(known, _)| *known == own));
    match storage {
        Some((_, dtype)) => Ok(Item::StorageType(*dtype)),
        None => Err(format!("it asks for {}: refused", name.replace(' ', "."))),
    }
}

/// `('storage', type, key, location, count)`
fn storage(id: Item) -> Result<Item> {
    match id {
        Item::Tuple(parts) => match &parts[..] {
            [Item::Text(kind), Item::StorageType(dtype), Item::Text(key), Item::Text(_), Item::Int(_)]
                if kind == "storage" =>
            {
                Ok(Item::Storage { dtype: *dtype, key: key.clone() })
            }
            _ => Err("it names a storage in another way than PyTorch: refused".into()),
        },
        _ => Err("it names a storage in another way than PyTorch: refused".into()),
    }
}

fn sizes(items: &[Item]) -> Result<Vec<usize>> {
    let size = |item: &Item| match item {
        Item::Int(size) => usize::try_from(*size).map_err(|_| "a size in it is negative".to_string()),
        _ => Err("a size in it is no integer".to_string()),
    };
    items.iter().map(size).collect()
}

/// The tensor of a storage's elements from an offset on, by sizes and strides.
fn tensor(bytes: &[u8], dtype: DType, offset: i64, size: &[usize], stride: &[usize]) -> Result<Tensor> {
    let broken = || "a tensor in it reaches beyond its storage".to_string();
    if size.len() != stride.len() {
        return Err("a tensor in it has other dims than strides".into());
    }
    let offset = usize::try_from(offset).map_err(|_| broken())?;
    let numel = size.iter().try_fold(1usize, |n, &s| n.checked_mul(s)).ok_or_else(broken)?;
    // One past the last element.
    let mut reach = usize::from(numel > 0);
    for (&size, &stride) in size.iter().zip(stride).filter(|_| numel > 0) {
        reach = (size - 1).checked_mul(stride).and_then(|s| s.checked_add(reach)).ok_or_else(broken)?;
    }
    let begin = offset.checked_mul(dtype.size()).ok_or_else(broken)?;
    let length = reach.checked_mul(dtype.size()).ok_or_else(broken)?;
    let end = begin.checked_add(length).ok_or_else(broken)?;
    let part = bytes.get(begin..end).ok_or_else(broken)?;
    let mut dense = 1;
    let contiguous = size.iter().zip(stride).rev().all(|(&size, &stride)| {
        let holds = size == 1 || stride == dense;
        dense *= size;
        holds
    });
    let made = match contiguous || numel == 0 {
        true => Tensor::from_bytes(part, size, dtype),
        // Not more elements than twice those of the storage: an expanded tensor of a few bytes could be endless.
        false if numel > 2 * reach => return Err("a tensor in it repeats its elements: refused".into()),
        false => Tensor::from_bytes(part, [reach], dtype)
            .and_then(|flat| flat.as_strided(size, stride, 0))
            .and_then(|view| view.contiguous()),
    };
    made.map_err(|error| error.to_string())
}

/// A state dict as a pickle; storages are named by their positions.
pub(super) fn write(state: &StateDict) -> Vec<u8> {
    let mut out = b"\x80\x02ccollections\nOrderedDict\n)R(".to_vec();
    let text = |out: &mut Vec<u8>, text: &str| {
        out.push(b'X');
        out.extend((text.len() as u32).to_le_bytes());
        out.extend(text.as_bytes());
    };
    let integer = |out: &mut Vec<u8>, number: usize| match i32::try_from(number) {
        Ok(number) => {
            out.push(b'J');
            out.extend(number.to_le_bytes());
        }
        Err(_) => {
            out.extend([0x8a, 8]);
            out.extend((number as u64).to_le_bytes());
        }
    };
    let sizes = |out: &mut Vec<u8>, sizes: &[usize]| {
        out.push(b'(');
        sizes.iter().for_each(|&size| integer(out, size));
        out.push(b't');
    };
    for (i, (name, tensor)) in state.iter().enumerate() {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        let kind = STORAGES.iter().find(|(_, own)| *own == dtype).map_or("FloatStorage", |(name, _)| name);
        text(&mut out, name);
        out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut out, "storage");
        out.extend(format!("ctorch\n{kind}\n").as_bytes());
        text(&mut out, &i.to_string());
        text(&mut out, "cpu");
        integer(&mut out, tensor.numel());
        out.extend(b"tQ");
        integer(&mut out, 0);
        sizes(&mut out, &shape);
        let mut stride = vec![1; shape.rank()];
        for d in (1..shape.rank()).rev() {
            stride[d - 1] = stride[d] * shape[d].max(1);
        }
        sizes(&mut out, &stride);
        // No gradient, no hooks.
        out.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    }
    out.extend(b"u.");
    out
}
