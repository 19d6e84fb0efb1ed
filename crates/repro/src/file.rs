//! Cases as text: a recording (see `kiln_aot::Recording`) or a graph, and what it begins with.
//!
//! ```text
//! ; sum over the last dim is wrong                 what went wrong
//! options mode=default
//! %0: f32[3] leaf
//! #0: float
//! %1 = mul(%0, #0)
//! live %1
//! data %0 1.0 -2.0 0.5
//! data #0 0.25
//! ```
//!
//! Data is also `normal 7` (a seed), `zeros`, `ones`, `count` (0, 1, 2 …), `shares %0` (the memory of an input before it)
//! or `file 128` (from this byte of the file beside it). Inputs that no line tells of are normal numbers, or small
//! integers.

use std::collections::BTreeMap;
use std::path::Path;

use kiln_aot::Recording;
use kiln_aot::trace::Variable;
use kiln_ir::{DType, Error, Graph, Result, Scalar, ScalarKind, TensorTy, Ty};
use kiln_tensor::Tensor;

use crate::case::{Case, Input, Value};

/// With more elements than this in all, inputs go into a file beside the text.
const SMALL: usize = 4096;

fn fail<T>(line: usize, message: impl Into<String>) -> Result<T> {
    Err(Error::Parse { line, message: message.into() })
}

/// The lines of a text that are not part of the program, by what they tell of; and the program, with those lines empty.
struct Parts<'t> {
    program: String,
    options: String,
    notes: Vec<String>,
    /// Line number and text, by label.
    data: BTreeMap<&'t str, (usize, &'t str)>,
}

impl<'t> Parts<'t> {
    fn of(text: &'t str) -> Parts<'t> {
        let mut parts = Parts {
            program: String::new(),
            options: String::new(),
            notes: Vec::new(),
            data: BTreeMap::new(),
        };
        let mut begun = false;
        for (number, line) in text.lines().enumerate() {
            let told = if let Some(options) = line.strip_prefix("options ") {
                parts.options = options.trim().to_string();
                true
            } else if let Some((label, data)) =
                line.strip_prefix("data ").and_then(|l| l.trim().split_once(' '))
            {
                parts.data.insert(label, (number + 1, data.trim()));
                true
            } else {
                begun |= !line.trim().is_empty() && !line.starts_with(';');
                if let Some(note) = line.strip_prefix(';').filter(|_| !begun) {
                    parts.notes.push(note.trim().to_string());
                }
                false
            };
            if !told {
                parts.program += line;
            }
            parts.program.push('\n');
        }
        parts
    }

    fn is_graph(&self) -> bool {
        let mut lines = self.program.lines().map(str::trim);
        lines
            .find(|line| !line.is_empty() && !line.starts_with(';'))
            .is_some_and(|line| line.starts_with("graph"))
    }
}

impl Case {
    /// Reads a case; `beside` are the bytes of the file beside it, if there is one.
    pub fn from_text(text: &str, beside: &[u8]) -> Result<Case> {
        let parts = Parts::of(text);
        let mut case = if parts.is_graph() {
            let graph: Graph = parts.program.parse()?;
            let value = |(number, &input): (usize, &kiln_ir::Value)| {
                let label = format!("%{number}");
                match graph.ty(input) {
                    Ty::Tensor(ty) => tensor(&parts, &label, number as u64, ty, beside).map(Value::Tensor),
                    Ty::Scalar(kind) => self::number(&parts, &label, *kind).map(Value::Number),
                    Ty::List(_) => fail(1, "a graph with a list as input has no recording"),
                }
            };
            let values = graph.inputs.iter().enumerate().map(value).collect::<Result<Vec<_>>>()?;
            Case::of_graph(&graph, &values)?
        } else {
            let (recording, names) = Recording::named(&parts.program)?;
            let mut case = Case::default();
            for (variable, _) in recording.inputs() {
                let label = &names[variable as usize];
                let shares =
                    parts.data.get(label.as_str()).and_then(|(_, data)| data.strip_prefix("shares "));
                let shares = match shares {
                    Some(first) => names.iter().position(|name| name == first.trim()).map(|v| v as Variable),
                    None => None,
                };
                let Ty::Tensor(ty) = &recording.trace.variables[variable as usize].ty else {
                    return fail(1, "lists are made by the program");
                };
                let values = match shares {
                    Some(_) => Tensor::full_of(ty.shape.clone(), 0.0, ty.dtype, &ty.device)?,
                    None => tensor(&parts, label, u64::from(variable), ty, beside)?,
                };
                case.inputs.insert(variable, Input { values, shares });
            }
            for (hole, &kind) in recording.trace.numbers.iter().enumerate() {
                case.numbers.push(number(&parts, &format!("#{hole}"), kind)?);
            }
            case.recording = recording;
            case
        };
        (case.options, case.notes) = (parts.options, parts.notes);
        Ok(case)
    }

    /// The case as text, and the bytes of the file beside it: none if the inputs are small.
    pub fn to_text(&self) -> Result<(String, Vec<u8>)> {
        let mut text: String = self.notes.iter().map(|note| format!("; {note}\n")).collect();
        if !self.options.is_empty() {
            text += &format!("options {}\n", self.options);
        }
        text += &self.recording.to_string();
        let labels = self.recording.labels();
        let mut beside = Vec::new();
        let elements: usize = self.inputs.values().map(|input| input.values.shape().numel()).sum();
        for (variable, input) in &self.inputs {
            let Some(label) = labels.get(variable) else { continue };
            let told = match input.shares.and_then(|first| labels.get(&first)) {
                Some(first) => format!("shares {first}"),
                None => match pattern(&input.values)? {
                    Some(pattern) => pattern,
                    None if elements <= SMALL => elements_of(&input.values)?,
                    None => {
                        let begin = beside.len();
                        beside.extend(input.values.to_bytes()?);
                        format!("file {begin}")
                    }
                },
            };
            text += &format!("data {label} {told}\n");
        }
        for (hole, number) in self.numbers.iter().enumerate() {
            text += &format!("data #{hole} {number}\n");
        }
        Ok((text, beside))
    }

    /// Reads a case from a file, and from the one beside it (`NAME.data`).
    pub fn read(path: &Path) -> Result<Case> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::Environment(format!("{}: {error}", path.display())))?;
        let beside = std::fs::read(path.with_extension("data")).unwrap_or_default();
        Case::from_text(&text, &beside)
    }

    /// Writes a case to a file, and what is not small beside it.
    pub fn write(&self, path: &Path) -> Result<()> {
        let (text, beside) = self.to_text()?;
        let failed = |error: std::io::Error| Error::Environment(format!("{}: {error}", path.display()));
        if !beside.is_empty() {
            std::fs::write(path.with_extension("data"), beside).map_err(failed)?;
        }
        std::fs::write(path, text).map_err(failed)
    }
}

fn number(parts: &Parts<'_>, label: &str, kind: ScalarKind) -> Result<Scalar> {
    let Some((line, text)) = parts.data.get(label) else {
        return Ok(match kind {
            ScalarKind::Bool => Scalar::Bool(true),
            ScalarKind::Int => Scalar::Int(3),
            ScalarKind::Float => Scalar::Float(0.75),
        });
    };
    let read = match kind {
        ScalarKind::Bool => text.parse().ok().map(Scalar::Bool),
        ScalarKind::Int => text.parse().ok().map(Scalar::Int),
        ScalarKind::Float => text.parse().ok().map(Scalar::Float),
    };
    read.map_or_else(|| fail(*line, format!("expected {}", kind.name())), Ok)
}

fn tensor(parts: &Parts<'_>, label: &str, number: u64, ty: &TensorTy, beside: &[u8]) -> Result<Tensor> {
    let Some(&(line, text)) = parts.data.get(label) else { return ordinary(ty, number) };
    let count = ty.shape.numel();
    if let Some(seed) = text.strip_prefix("normal ") {
        return match seed.trim().parse() {
            Ok(seed) => ordinary(ty, seed),
            Err(_) => fail(line, "expected a seed"),
        };
    }
    if let Some(begin) = text.strip_prefix("file ") {
        let begin: usize = begin.trim().parse().or_else(|_| fail(line, "expected a position"))?;
        let end = begin.checked_add(count * ty.dtype.size());
        let Some(bytes) = end.and_then(|end| beside.get(begin..end)) else {
            return fail(line, "the file beside this one is missing or too short");
        };
        return Tensor::from_bytes(bytes, ty.shape.clone(), ty.dtype);
    }
    match text {
        "zeros" | "ones" => {
            let value = f64::from(u8::from(text == "ones"));
            return Tensor::full_of(ty.shape.clone(), value, ty.dtype, &ty.device);
        }
        "count" => return values((0..count).map(|i| i as f64), ty),
        _ => {}
    }
    let read: Option<Vec<Scalar>> = text.split_whitespace().map(element).collect();
    let Some(read) = read.filter(|read| read.len() == count) else {
        return fail(line, format!("expected {count} numbers"));
    };
    if ty.dtype.is_float() {
        values(read.iter().map(|x| x.as_f64()), ty)
    } else {
        let read: Vec<i64> = read.iter().map(|x| x.as_i64()).collect();
        Tensor::from_vec(read, ty.shape.clone())?.to_dtype(ty.dtype)
    }
}

fn element(text: &str) -> Option<Scalar> {
    let int = text.parse().ok().map(Scalar::Int);
    int.or_else(|| text.parse().ok().map(Scalar::Float)).or_else(|| text.parse().ok().map(Scalar::Bool))
}

fn values(of: impl Iterator<Item = f64>, ty: &TensorTy) -> Result<Tensor> {
    Tensor::from_vec(of.collect::<Vec<f64>>(), ty.shape.clone())?.to_dtype(ty.dtype)
}

/// Numbers of an ordinary kind, the same for the same seed.
fn ordinary(ty: &TensorTy, seed: u64) -> Result<Tensor> {
    let mut bits = crate::play::signs(seed ^ 0x5EED, usize::MAX);
    let mut draw =
        |count: u32| (0..count).fold(0u32, |sum, _| sum << 1 | u32::from(bits.next() == Some(true)));
    let count = ty.shape.numel();
    let drawn: Vec<f64> = (0..count)
        .map(|_| match ty.dtype {
            DType::Bool => f64::from(draw(1)),
            dtype if dtype.is_float() => {
                // Twelve uniform numbers add up to nearly a normal one.
                (0..12).map(|_| f64::from(draw(8)) / 256.0).sum::<f64>() - 6.0
            }
            _ => f64::from(draw(2)),
        })
        .collect();
    values(drawn.into_iter(), ty)
}

/// A name for these values, if they have one.
fn pattern(tensor: &Tensor) -> Result<Option<String>> {
    let (shape, dtype) = (tensor.shape(), tensor.dtype());
    let count = shape.numel();
    if count < 4 {
        return Ok(None);
    }
    let ty = TensorTy { dtype, shape, device: tensor.device() };
    let bytes = tensor.to_bytes()?;
    let zeros = Tensor::full_of(ty.shape.clone(), 0.0, dtype, &ty.device)?;
    let ones = Tensor::full_of(ty.shape.clone(), 1.0, dtype, &ty.device)?;
    for (name, like) in
        [("zeros", zeros), ("ones", ones), ("count", values((0..count).map(|i| i as f64), &ty)?)]
    {
        if like.to_bytes()? == bytes {
            return Ok(Some(name.to_string()));
        }
    }
    for seed in 0..8 {
        if count <= 1 << 16 && ordinary(&ty, seed)?.to_bytes()? == bytes {
            return Ok(Some(format!("normal {seed}")));
        }
    }
    Ok(None)
}

fn elements_of(tensor: &Tensor) -> Result<String> {
    let texts: Vec<String> = match tensor.dtype() {
        DType::F64 => tensor.to_vec::<f64>()?.iter().map(|x| format!("{x:?}")).collect(),
        dtype if dtype.is_float() => {
            tensor.to_dtype(DType::F32)?.to_vec::<f32>()?.iter().map(|x| format!("{x:?}")).collect()
        }
        _ => tensor.to_dtype(DType::I64)?.to_vec::<i64>()?.iter().map(i64::to_string).collect(),
    };
    Ok(texts.join(" "))
}
