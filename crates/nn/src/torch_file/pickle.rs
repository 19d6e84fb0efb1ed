//! The subset of pickle that state dicts need: a stack machine that builds tensors and plain containers.
//!
//! [Note: hostile programs] A memo makes a few bytes stand for anything: a tuple of two equal tuples of two equal
//! tuples, and so on, has more elements than there is memory. So nothing is copied when it is taken from the memo:
//! containers are numbers, texts and tensors are shared, storages are read once and tensors are views of them. What
//! an instruction can take is then a constant, and what is left to limit is how many there are ([`MOST`]), how deep
//! the result is nested ([`DEEPEST`]), and how large it looks to somebody who walks through all of it
//! ([`Finished::size`]).

use std::collections::HashMap;
use std::sync::Arc;

use kiln_tensor::{DType, Shape, Tensor};

use super::{STORAGES, Value};
use crate::StateDict;
use crate::files::MOST_DIMS;

type Result<T> = std::result::Result<T, String>;

/// The functions that a file may call, besides naming storages.
pub const FUNCTIONS: [&str; 3] =
    ["collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"];

/// How many instructions a file may have. Each adds at most one value to the stack, the memo or a container.
const MOST: usize = 20_000_000;
/// How many tensors it may build.
const MOST_TENSORS: usize = 1 << 20;
/// How deep containers may be nested.
const DEEPEST: usize = 200;

/// A value while it is built, cheap to copy. Containers are numbers of [`Machine::containers`], since the memo shares
/// them.
#[derive(Clone)]
enum Item {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Arc<str>),
    Tuple(usize),
    List(usize),
    Dict(usize),
    Tensor(Tensor),
    Function(&'static str),
    StorageType(DType),
    Storage { dtype: DType, key: Arc<str> },
    Mark,
}

/// Reads a storage, once: all of its elements as a 1-d tensor.
type ReadStorage<'a> = dyn FnMut(&str, DType) -> Result<Tensor> + 'a;

struct Machine<'a> {
    stack: Vec<Item>,
    memo: HashMap<u64, Item>,
    /// Elements of tuples and lists, and keys and values of dicts in turn.
    containers: Vec<Vec<Item>>,
    read_storage: &'a mut ReadStorage<'a>,
    storages: HashMap<Arc<str>, Tensor>,
    tensors: usize,
}

/// The bytes of a program, from where it is.
struct Program<'a> {
    rest: &'a [u8],
}

impl<'a> Program<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        if count > self.rest.len() {
            return Err("the pickle is truncated".into());
        }
        let (taken, rest) = self.rest.split_at(count);
        self.rest = rest;
        Ok(taken)
    }

    fn number(&mut self, size: usize) -> Result<u64> {
        Ok(self.take(size)?.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
    }

    fn text(&mut self, size: usize) -> Result<&'a str> {
        let bytes = self.take(size)?;
        std::str::from_utf8(bytes).map_err(|_| "a text in it is not UTF-8".to_string())
    }

    fn line(&mut self) -> Result<&'a str> {
        let end = self.rest.iter().position(|&byte| byte == b'\n').ok_or("the pickle is truncated")?;
        let line = self.text(end)?;
        self.take(1)?;
        Ok(line)
    }
}

/// Runs a program; `read_storage` reads a storage by its key.
pub(super) fn run<'a>(program: &[u8], read_storage: &'a mut ReadStorage<'a>) -> Result<Value> {
    let mut machine = Machine {
        stack: Vec::new(),
        memo: HashMap::new(),
        containers: Vec::new(),
        read_storage,
        storages: HashMap::new(),
        tensors: 0,
    };
    let largest = program.len().saturating_mul(16).saturating_add(1 << 20);
    let mut program = Program { rest: program };
    let mut instructions = 0;
    while machine.step(&mut program)? {
        instructions += 1;
        if instructions > MOST {
            return Err(format!("the pickle has more than {MOST} instructions"));
        }
    }
    let result = machine.pop()?;
    let mut finish =
        Finish { done: vec![None; machine.containers.len()], containers: &machine.containers, largest };
    Ok(finish.value(&result, 0)?.value)
}

impl Machine<'_> {
    fn pop(&mut self) -> Result<Item> {
        match self.stack.pop() {
            Some(Item::Mark) | None => Err("the pickle reads from an empty stack or memo".into()),
            Some(item) => Ok(item),
        }
    }

    /// What was pushed since the last mark.
    fn since_mark(&mut self) -> Result<Vec<Item>> {
        let mark = self.stack.iter().rposition(|item| matches!(item, Item::Mark));
        let items = self.stack.split_off(mark.ok_or("the pickle has no mark")? + 1);
        self.stack.pop();
        Ok(items)
    }

    fn top_tuple(&mut self, count: usize) -> Result<()> {
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(self.pop()?);
        }
        items.reverse();
        let tuple = Item::Tuple(self.container(items));
        self.stack.push(tuple);
        Ok(())
    }

    fn container(&mut self, items: Vec<Item>) -> usize {
        self.containers.push(items);
        self.containers.len() - 1
    }

    /// Adds to the container on top.
    fn extend(&mut self, items: Vec<Item>, dict: bool) -> Result<()> {
        match (self.stack.last(), dict) {
            (Some(Item::List(at)), false) => self.containers[*at].extend(items),
            (Some(Item::Dict(at)), true) if items.len().is_multiple_of(2) => {
                self.containers[*at].extend(items)
            }
            _ => return Err("the pickle appends to something that is not a container".into()),
        }
        Ok(())
    }

    /// One instruction; false at the end.
    fn step(&mut self, program: &mut Program<'_>) -> Result<bool> {
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
                    return Err("an integer has more than 64 bits".into());
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
                self.stack.push(Item::Text(text.into()));
            }
            0x8c => {
                let size = program.number(1)? as usize;
                let text = program.text(size)?;
                self.stack.push(Item::Text(text.into()));
            }
            b']' => {
                let list = Item::List(self.container(Vec::new()));
                self.stack.push(list);
            }
            b'}' => {
                let dict = Item::Dict(self.container(Vec::new()));
                self.stack.push(dict);
            }
            b')' => self.top_tuple(0)?,
            0x85..=0x87 => self.top_tuple(usize::from(code - 0x84))?,
            b't' => {
                let items = self.since_mark()?;
                let tuple = Item::Tuple(self.container(items));
                self.stack.push(tuple);
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
                let top = self.stack.last().ok_or("the pickle memoizes from an empty stack")?.clone();
                self.memo.insert(at, top);
            }
            b'h' | b'j' => {
                let at = program.number(if code == b'h' { 1 } else { 4 })?;
                let item = self.memo.get(&at).ok_or("the pickle reads from an empty stack or memo")?.clone();
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
                    _ => return Err("the pickle names a global with something other than text".into()),
                }
            }
            b'Q' => {
                let id = self.pop()?;
                self.stack.push(self.storage(&id)?);
            }
            b'R' => {
                let (arguments, function) = (self.pop()?, self.pop()?);
                let result = self.call(&function, &arguments)?;
                self.stack.push(result);
            }
            // Attributes of a dict, such as the versions of modules: not needed.
            b'b' => {
                self.pop()?;
                if !matches!(self.stack.last(), Some(Item::Dict(_))) {
                    return Err("refused: the pickle sets attributes on something that is not a dict".into());
                }
            }
            b'.' => return Ok(false),
            other => return Err(format!("refused: pickle opcode {other:#04x}")),
        }
        Ok(true)
    }

    fn call(&mut self, function: &Item, arguments: &Item) -> Result<Item> {
        let (Item::Function(name), Item::Tuple(arguments)) = (function, arguments) else {
            return Err("refused: the pickle calls something that is not a function".into());
        };
        match (*name, &self.containers[*arguments][..]) {
            ("collections OrderedDict", []) => Ok(Item::Dict(self.container(Vec::new()))),
            ("torch._utils _rebuild_parameter", [tensor @ Item::Tensor(_), ..]) => Ok(tensor.clone()),
            (
                "torch._utils _rebuild_tensor_v2",
                [Item::Storage { dtype, key }, Item::Int(offset), Item::Tuple(size), Item::Tuple(stride), ..],
            ) => {
                let (dtype, key, offset) = (*dtype, key.clone(), *offset);
                let (size, stride) = (sizes(&self.containers[*size])?, sizes(&self.containers[*stride])?);
                self.tensors += 1;
                if self.tensors > MOST_TENSORS {
                    return Err(format!("more than {MOST_TENSORS} tensors"));
                }
                let storage = self.elements(&key, dtype)?;
                tensor(&storage, offset, &size, &stride).map(Item::Tensor)
            }
            (name, _) => Err(format!("refused: {name} is called with arguments PyTorch would not write")),
        }
    }

    /// `('storage', type, key, location, count)`
    fn storage(&self, id: &Item) -> Result<Item> {
        if let Item::Tuple(parts) = id
            && let [Item::Text(kind), Item::StorageType(dtype), Item::Text(key), Item::Text(_), Item::Int(_)] =
                &self.containers[*parts][..]
            && &**kind == "storage"
        {
            return Ok(Item::Storage { dtype: *dtype, key: key.clone() });
        }
        Err("refused: a storage is named in a way PyTorch would not write".into())
    }

    /// The elements of a storage. PyTorch saves none as two dtypes.
    fn elements(&mut self, key: &Arc<str>, dtype: DType) -> Result<Tensor> {
        if let Some(storage) = self.storages.get(key) {
            if storage.dtype() != dtype {
                return Err(format!("refused: storage {key} is used as {} and as {dtype}", storage.dtype()));
            }
            return Ok(storage.clone());
        }
        let storage = (self.read_storage)(key, dtype)?;
        self.storages.insert(key.clone(), storage.clone());
        Ok(storage)
    }
}

/// Makes values of items, each container once.
struct Finish<'a> {
    containers: &'a [Vec<Item>],
    done: Vec<Option<Finished>>,
    /// What the size of a value may be.
    largest: usize,
}

/// A value, and how it looks to whoever walks through all of it.
#[derive(Clone)]
struct Finished {
    value: Value,
    /// Values in it, and bytes of texts, those that are shared as often as they are met.
    size: usize,
    /// How many containers lie in one another.
    height: usize,
}

impl Finish<'_> {
    /// A finished value; `depth` ends the walk through a container that holds itself.
    fn value(&mut self, item: &Item, depth: usize) -> Result<Finished> {
        let (at, make): (usize, fn(Vec<Value>) -> Value) = match item {
            Item::Tuple(at) | Item::List(at) => (*at, |values| Value::List(values.into())),
            Item::Dict(at) => (*at, |values| {
                let mut values = values.into_iter();
                let pairs = std::iter::from_fn(|| Some((values.next()?, values.next()?)));
                Value::Dict(pairs.collect())
            }),
            single => return Finished::single(single),
        };
        if let Some(done) = &self.done[at] {
            return Ok(done.clone());
        }
        let too_deep = || format!("containers are nested more than {DEEPEST} deep");
        if depth > DEEPEST {
            return Err(too_deep());
        }
        let mut whole = Finished { value: Value::None, size: 1, height: 1 };
        let mut values = Vec::with_capacity(self.containers[at].len());
        for item in &self.containers[at] {
            let Finished { value, size, height } = self.value(item, depth + 1)?;
            values.push(value);
            whole.size = whole.size.saturating_add(size);
            whole.height = whole.height.max(height + 1);
            if whole.height > DEEPEST {
                return Err(too_deep());
            }
            if whole.size > self.largest {
                return Err("refused: values are repeated too often".into());
            }
        }
        whole.value = make(values);
        Ok(self.done[at].insert(whole).clone())
    }
}

impl Finished {
    fn single(item: &Item) -> Result<Finished> {
        let value = match item {
            Item::None => Value::None,
            Item::Bool(value) => Value::Bool(*value),
            Item::Int(value) => Value::Int(*value),
            Item::Float(value) => Value::Float(*value),
            Item::Text(value) => Value::Text(value.clone()),
            Item::Tensor(tensor) => Value::Tensor(tensor.clone()),
            _ => return Err("a function or storage stands where a value is expected".into()),
        };
        let size = if let Item::Text(text) = item { 1 + text.len() } else { 1 };
        Ok(Finished { value, size, height: 0 })
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
        None => Err(format!("refused: the pickle asks for {}", name.replace(' ', "."))),
    }
}

fn sizes(items: &[Item]) -> Result<Vec<usize>> {
    if items.len() > MOST_DIMS {
        return Err(format!("a tensor in it has {} dims, the limit is {MOST_DIMS}", items.len()));
    }
    let size = |item: &Item| match item {
        Item::Int(size) => usize::try_from(*size).map_err(|_| "a size in it is negative".to_string()),
        _ => Err("a size is not an integer".to_string()),
    };
    items.iter().map(size).collect()
}

/// The view of a storage's elements from an offset on, by sizes and strides.
fn tensor(storage: &Tensor, offset: i64, size: &[usize], stride: &[usize]) -> Result<Tensor> {
    let broken = || "a tensor in it reaches beyond its storage".to_string();
    if size.len() != stride.len() {
        return Err("a tensor has a different number of sizes and strides".into());
    }
    let offset = usize::try_from(offset).map_err(|_| broken())?;
    let numel = Shape::from(size).checked_numel().ok_or_else(broken)?;
    // One past the last element.
    let mut reach = usize::from(numel > 0);
    for (&size, &stride) in size.iter().zip(stride).filter(|_| numel > 0) {
        reach = (size - 1).checked_mul(stride).and_then(|s| s.checked_add(reach)).ok_or_else(broken)?;
    }
    if offset.checked_add(reach).is_none_or(|end| end > storage.numel()) {
        return Err(broken());
    }
    // An expanded tensor of a few bytes could be endless for whoever makes it contiguous.
    if numel > reach.saturating_mul(2) {
        return Err("refused: a tensor repeats its elements".into());
    }
    let made = match numel {
        0 => Tensor::from_bytes(&[], size, storage.dtype()),
        _ => storage.as_strided(size, stride, offset),
    };
    made.map_err(|error| error.to_string())
}

/// The storage of each tensor: the position of the first entry that has the same tensor.
pub(super) fn storages(state: &StateDict) -> Vec<usize> {
    let mut first = HashMap::new();
    state.iter().enumerate().map(|(i, (_, tensor))| *first.entry(tensor.address()).or_insert(i)).collect()
}

/// A state dict as a pickle.
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
    for ((name, tensor), storage) in state.iter().zip(storages(state)) {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        let kind = STORAGES.iter().find(|(_, own)| *own == dtype).map_or("FloatStorage", |(name, _)| name);
        text(&mut out, name);
        out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut out, "storage");
        out.extend(format!("ctorch\n{kind}\n").as_bytes());
        text(&mut out, &storage.to_string());
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
