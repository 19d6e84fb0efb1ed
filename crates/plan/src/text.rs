//! Plans as text, for people and golden files; and back.
//!
//! ```text
//! plan arena 64 {
//!   b0: f32[4, 3] input 0
//!   b1: f32[3, 2] by [1, 3] input 1
//!   b2: f32[4, 2] arena 0
//!   b3: f32[4, 2] output 0
//!   n0 = mul(input 2, 0.5) : float
//!   k0 = map (i0: outer 8) (b0: f32, b1: f32) (s0: float) { … }
//!   call mm(b0, b1) -> b2 then 1 rows, 1 items
//!   launch k0(b2, b3; n0)
//!   return b3
//! }
//! ```
//!
//! A tensor in a call is a whole buffer as it lies there, or says what it is: `b0+4 f32[2, 3] by [1, 2]`. A launch says
//! the numbers of its loops where they are others than in the kernel above: `launch k0 [16](b2, b3; n0)`. The
//! report and the user's lines are not part of the text.

use std::fmt::{self, Write as _};
use std::str::FromStr;
use std::sync::Arc;

use kiln_ir::{Graph, Loc, Op, Scalar, ScalarKind, Shape, Strides, TensorTy, quoted_end};

use crate::parse::{ParseError, Read, Reader};
use crate::plan::{
    Bands, BufferId, BufferPlan, BufferRef, BufferTy, Call, CheckText, Epilogue, Launch, OnPlanes, OneByOne,
    Place, Plan, ScalarOp, ScalarRef, Step, Then, ViewRef,
};
use crate::report::Report;

fn list<T: fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for ScalarRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScalarRef::Input(i) => write!(f, "input {i}"),
            ScalarRef::Constant(x) => write!(f, "{x}"),
            ScalarRef::Computed(i) => write!(f, "n{i}"),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Input(i) => write!(f, "input {i}"),
            Place::Output(k) => write!(f, "output {k}"),
            Place::BeforeOutput { output, offset } => write!(f, "before output {output} at {offset}"),
            Place::Arena { offset } => write!(f, "arena {offset}"),
            Place::Band { offset, row_bytes } => write!(f, "band {offset} of {row_bytes} bytes a row"),
        }
    }
}

/// An op's attributes, as in graphs.
fn attributes(op: &Op) -> String {
    let attributes = op.attributes();
    if attributes.is_empty() {
        return String::new();
    }
    format!(" {{{}}}", list(attributes.iter().map(|(name, value)| format!("{name}: {value}"))))
}

/// Strides that are not those of a dense tensor.
fn by(shape: &Shape, strides: &Strides) -> String {
    if *strides == shape.contiguous_strides() { String::new() } else { format!(" by [{}]", list(strides)) }
}

impl Plan {
    fn view(&self, view: &ViewRef) -> String {
        let ViewRef { at, ty, strides } = view;
        let mut text = format!("b{}", at.buffer.0);
        if at.offset != 0 {
            let _ = write!(text, "+{}", at.offset);
        }
        let whole = &self.buffers[at.buffer.index()].ty;
        if at.offset != 0 || (&whole.shape, &whole.strides) != (&ty.shape, strides) {
            let _ = write!(text, " {ty}{}", by(&ty.shape, strides));
        }
        text
    }

    fn views(&self, views: &[ViewRef]) -> String {
        list(views.iter().map(|view| self.view(view)))
    }

    fn step(&self, step: &Step) -> String {
        let numbers = |scalars: &[ScalarRef]| match scalars {
            [] => String::new(),
            scalars => format!("; {}", list(scalars)),
        };
        match step {
            Step::Launch(Launch { kernel, numbers: own, bufs, rows, scalars, checks, coarser }) => {
                let mut text = format!("launch k{kernel}");
                if *own != self.kernels[*kernel].numbers() {
                    let _ = write!(text, " [{}]", list(own));
                }
                let slot = |at: &BufferRef| match at.offset {
                    0 => format!("b{}", at.buffer.0),
                    offset => format!("b{}+{offset}", at.buffer.0),
                };
                let _ = write!(text, "({}{})", list(bufs.iter().map(slot)), numbers(scalars));
                if !rows.is_empty() {
                    let _ = write!(text, " rows [{}]", list(rows));
                }
                if *coarser != 1 {
                    let _ = write!(text, " coarser {coarser}");
                }
                for CheckText { op, size, loc: _ } in checks {
                    let _ = write!(text, " check {op} {size}");
                }
                text
            }
            Step::Call(Call { op, args, scalars, outs, free, constant, then, loc: _ }) => {
                let args = format!("{}{}", self.views(args), numbers(scalars));
                let mut text =
                    format!("call {}({args}){} -> {}", op.row().name, attributes(op), self.views(outs));
                if !free.is_empty() {
                    let _ = write!(text, " free {} to {}", free.start, free.end);
                }
                if *constant {
                    text += " constant";
                }
                match then {
                    None => {}
                    Some(Then::Rows(Epilogue { rows, items })) => {
                        let _ = write!(text, " then {rows} rows, {items} items");
                    }
                    Some(Then::Planes(OnPlanes { pixels, is_one_loop, steps })) => {
                        let loops = if *is_one_loop { "in one loop" } else { "plane by plane" };
                        let _ = write!(text, " then {pixels} pixels {loops}, steps [{}]", list(steps));
                    }
                }
                text
            }
            Step::OneByOne(OneByOne { graph, args, scalars, outs }) => {
                let args = format!("{}{}", self.views(args), numbers(scalars));
                let outs = list(outs.iter().map(|(result, out)| format!("{result} -> {}", self.view(out))));
                format!("ops ({args}) ({outs}) {graph}").trim_end().to_string()
            }
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "plan arena {} {{", self.arena_bytes)?;
        for (number, BufferPlan { place, ty }) in self.buffers.iter().enumerate() {
            let BufferTy { dtype, shape, strides, bytes: _ } = &**ty;
            writeln!(f, "  b{number}: {dtype}{shape}{} {place}", by(shape, strides))?;
        }
        for (number, ScalarOp { op, args, kind }) in self.scalars.iter().enumerate() {
            writeln!(f, "  n{number} = {}({}){} : {}", op.name(), list(args), attributes(op), kind.name())?;
        }
        for (number, kernel) in self.kernels.iter().enumerate() {
            writeln!(f, "  k{number} = {}", kernel.to_string().trim_end().replace('\n', "\n  "))?;
        }
        for (number, step) in self.steps.iter().enumerate() {
            if let Some(bands) = self.bands.iter().find(|bands| bands.first == number) {
                let Bands { first: _, steps, rows, count, kernels, bytes } = bands;
                let kernels = list(kernels.iter().map(|k| format!("{} rows {} items", k.rows, k.items)));
                writeln!(f, "  bands {count} of {rows} rows, {steps} steps, {bytes} bytes ({kernels})")?;
            }
            writeln!(f, "  {}", self.step(step))?;
        }
        writeln!(f, "  return {}\n}}", list(self.outputs.iter().map(|id| format!("b{}", id.0))))
    }
}

impl<'a> Reader<'a> {
    fn size(&mut self) -> Read<usize> {
        let number = self.number()?;
        number.try_into().or_else(|_| self.fail("a number that is not negative"))
    }

    fn numbers<T: TryFrom<i64>>(&mut self) -> Read<Vec<T>> {
        self.expect("[")?;
        let mut out = Vec::new();
        while !self.eat("]") {
            let number = self.number()?;
            out.push(number.try_into().or_else(|_| self.fail("a number that is not so large"))?);
            self.eat(",");
        }
        Ok(out)
    }

    fn buffer(&mut self) -> Read<BufferId> {
        Ok(BufferId(self.numbered("b")? as u32))
    }

    fn at(&mut self) -> Read<BufferRef> {
        let buffer = self.buffer()?;
        Ok(BufferRef { buffer, offset: if self.eat("+") { self.number()? } else { 0 } })
    }

    fn shaped(&mut self) -> Read<(TensorTy, Strides)> {
        let dtype = self.dtype()?;
        let ty = TensorTy::new(dtype, Shape::from(self.numbers::<usize>()?));
        let dense = ty.shape.contiguous_strides();
        let strides = if self.eat("by") { self.numbers::<isize>()?.into_iter().collect() } else { dense };
        Ok((ty, strides))
    }

    fn view(&mut self, buffers: &[BufferPlan]) -> Read<ViewRef> {
        let at = self.at()?;
        self.space();
        if self.text.starts_with(|c: char| c.is_ascii_lowercase()) && !self.starts_a_clause() {
            let (ty, strides) = self.shaped()?;
            return Ok(ViewRef { at, ty, strides });
        }
        let Some(BufferPlan { ty, .. }) = buffers.get(at.buffer.index()) else {
            return self.fail("a buffer");
        };
        Ok(ViewRef { at, ty: TensorTy::new(ty.dtype, ty.shape.clone()), strides: ty.strides.clone() })
    }

    /// Whether what a call says behind its results comes next.
    fn starts_a_clause(&self) -> bool {
        ["free ", "constant", "then ", "call ", "launch ", "ops ", "return", "bands "]
            .iter()
            .any(|word| self.text.starts_with(word))
    }

    fn views(&mut self, buffers: &[BufferPlan]) -> Read<Vec<ViewRef>> {
        let mut out = Vec::new();
        self.space();
        while self.text.starts_with('b') && !self.starts_a_clause() {
            out.push(self.view(buffers)?);
            self.eat(",");
            self.space();
        }
        Ok(out)
    }

    fn scalar(&mut self) -> Read<ScalarRef> {
        if self.eat("input") {
            return Ok(ScalarRef::Input(self.size()?));
        }
        self.space();
        let end = self.text.find([',', ')', ';']).unwrap_or(self.text.len());
        let (word, rest) = self.text.split_at(end);
        self.text = rest;
        let number = match word.trim() {
            "true" => Scalar::Bool(true),
            "false" => Scalar::Bool(false),
            "nan" => Scalar::Float(f64::NAN),
            "inf" => Scalar::Float(f64::INFINITY),
            "-inf" => Scalar::Float(f64::NEG_INFINITY),
            word => {
                let computed = word.strip_prefix('n').and_then(|number| number.parse().ok());
                if let Some(number) = computed {
                    return Ok(ScalarRef::Computed(number));
                }
                let float = || word.parse().ok().map(Scalar::Float);
                match word.parse().ok().map(Scalar::Int).or_else(float) {
                    Some(number) => number,
                    None => return self.fail("a number"),
                }
            }
        };
        Ok(ScalarRef::Constant(number))
    }

    /// Numbers up to a closing parenthesis, behind a semicolon if there are any.
    fn scalars(&mut self) -> Read<Vec<ScalarRef>> {
        let mut out = Vec::new();
        if self.eat(";") {
            while !self.eat(")") {
                out.push(self.scalar()?);
                self.eat(",");
            }
        } else {
            self.expect(")")?;
        }
        Ok(out)
    }

    /// An op of this name, with the attributes that come next.
    fn op(&mut self, name: &str) -> Read<Op> {
        let mut attributes: Vec<(&str, &str)> = Vec::new();
        if self.eat("{") {
            while !self.eat("}") {
                let name = self.word();
                self.expect(":")?;
                self.space();
                let mut depth = 0;
                let end = self.text.find(|c: char| {
                    depth += i32::from(c == '[') - i32::from(c == ']');
                    depth == 0 && (c == ',' || c == '}')
                });
                let end = quoted_end(self.text).or(end);
                let (value, rest) = self.text.split_at(end.unwrap_or(self.text.len()));
                attributes.push((name, value.trim()));
                self.text = rest;
                self.eat(",");
            }
        }
        let value =
            |wanted: &str| attributes.iter().find(|(name, _)| *name == wanted).map(|(_, v)| v.to_string());
        Op::parse(name, &mut |wanted| value(wanted)).map_or_else(|| self.fail("an op and its attributes"), Ok)
    }

    fn place(&mut self) -> Read<Place> {
        Ok(match self.word() {
            "input" => Place::Input(self.size()?),
            "output" => Place::Output(self.size()?),
            "before" => {
                self.expect("output")?;
                let output = self.size()?;
                self.expect("at")?;
                Place::BeforeOutput { output, offset: self.size()? }
            }
            "arena" => Place::Arena { offset: self.size()? },
            "band" => {
                let offset = self.size()?;
                self.expect("of")?;
                let row_bytes = self.size()?;
                ["bytes", "a", "row"].into_iter().try_for_each(|word| self.expect(word))?;
                Place::Band { offset, row_bytes }
            }
            _ => return self.fail("input, output, before, arena or band"),
        })
    }

    fn launch(&mut self, plan: &Plan) -> Read<Launch> {
        let kernel = self.numbered("k")?;
        let Some(known) = plan.kernels.get(kernel) else { return self.fail("a kernel") };
        self.space();
        let numbers = if self.text.starts_with('[') { self.numbers()? } else { known.numbers() };
        self.expect("(")?;
        let mut bufs = Vec::new();
        self.space();
        while self.text.starts_with('b') {
            bufs.push(self.at()?);
            self.eat(",");
            self.space();
        }
        let scalars = self.scalars()?;
        let rows = if self.eat("rows") { self.numbers()? } else { Vec::new() };
        let coarser = if self.eat("coarser") { self.number()? } else { 1 };
        let mut checks = Vec::new();
        while self.eat("check") {
            let name = self.word();
            let row = Op::ROWS.iter().find(|row| row.name == name);
            let op = row.map_or_else(|| self.fail("an op"), |row| Ok(row.name))?;
            checks.push(CheckText { op, size: self.number()?, loc: Loc::UNKNOWN });
        }
        Ok(Launch { kernel, numbers, bufs, rows, scalars, checks, coarser })
    }

    fn call(&mut self, plan: &Plan) -> Read<Call> {
        let name = self.word();
        self.expect("(")?;
        let args = self.views(&plan.buffers)?;
        let scalars = self.scalars()?;
        let op = self.op(name)?;
        self.expect("->")?;
        let outs = self.views(&plan.buffers)?;
        let mut free = 0..0;
        if self.eat("free") {
            let start = self.size()?;
            self.expect("to")?;
            free = start..self.size()?;
        }
        let constant = self.eat("constant");
        let then = if self.eat("then") { Some(self.then()?) } else { None };
        Ok(Call { op, args, scalars, outs, free, constant, then, loc: Loc::UNKNOWN })
    }

    fn then(&mut self) -> Read<Then> {
        let count = self.size()?;
        if self.eat("rows") {
            self.expect(",")?;
            let items = self.number()?;
            self.expect("items")?;
            return Ok(Then::Rows(Epilogue { rows: count, items }));
        }
        self.expect("pixels")?;
        let is_one_loop = self.eat("in one loop");
        if !is_one_loop {
            self.expect("plane by plane")?;
        }
        self.expect(",")?;
        self.expect("steps")?;
        Ok(Then::Planes(OnPlanes { pixels: count, is_one_loop, steps: self.numbers()? }))
    }

    fn one_by_one(&mut self, plan: &Plan) -> Read<OneByOne> {
        self.expect("(")?;
        let args = self.views(&plan.buffers)?;
        let scalars = self.scalars()?;
        let outs = self.list(|r, _| {
            let result = r.size()?;
            r.expect("->")?;
            Ok((result, r.view(&plan.buffers)?))
        })?;
        self.space();
        let Some(end) = self.text.find('}') else { return self.fail("a graph") };
        let (graph, rest) = self.text.split_at(end + 1);
        let Ok(graph) = graph.parse::<Graph>() else { return self.fail("a graph") };
        self.text = rest;
        Ok(OneByOne { graph: Arc::new(graph), args, scalars, outs })
    }

    fn bands(&mut self, first: usize) -> Read<Bands> {
        let count = self.size()?;
        self.expect("of")?;
        let rows = self.size()?;
        self.expect("rows,")?;
        let steps = self.size()?;
        self.expect("steps,")?;
        let bytes = self.size()?;
        self.expect("bytes")?;
        let kernels = self.list(|r, _| {
            let rows = r.size()?;
            r.expect("rows")?;
            let items = r.number()?;
            r.expect("items")?;
            Ok(Epilogue { rows, items })
        })?;
        Ok(Bands { first, steps, rows, count, kernels, bytes })
    }

    fn plan(&mut self) -> Read<Plan> {
        ["plan", "arena"].into_iter().try_for_each(|word| self.expect(word))?;
        let arena_bytes = self.size()?;
        self.expect("{")?;
        let mut plan = Plan {
            kernels: Vec::new(),
            buffers: Vec::new(),
            scalars: Vec::new(),
            steps: Vec::new(),
            bands: Vec::new(),
            arena_bytes,
            outputs: Vec::new(),
            report: Report::default(),
        };
        loop {
            match self.word() {
                "launch" => {
                    let launch = self.launch(&plan)?;
                    plan.steps.push(Step::Launch(launch));
                }
                "call" => {
                    let call = self.call(&plan)?;
                    plan.steps.push(Step::Call(call));
                }
                "ops" => {
                    let ops = self.one_by_one(&plan)?;
                    plan.steps.push(Step::OneByOne(ops));
                }
                "bands" => {
                    let bands = self.bands(plan.steps.len())?;
                    plan.bands.push(bands);
                }
                "return" => break,
                word if word.starts_with('b') => {
                    self.expect(":")?;
                    let (ty, strides) = self.shaped()?;
                    let TensorTy { dtype, shape, .. } = ty;
                    let bytes = shape.numel() * dtype.size();
                    let ty = Arc::new(BufferTy { dtype, shape, strides, bytes });
                    let before =
                        plan.buffers.last().map(|buffer| buffer.ty.clone()).filter(|known| *known == ty);
                    let place = self.place()?;
                    plan.buffers.push(BufferPlan { place, ty: before.unwrap_or(ty) });
                }
                word if word.starts_with('k') => {
                    self.expect("=")?;
                    let kernel = self.kernel()?;
                    plan.kernels.push(kernel);
                }
                word if word.starts_with('n') => {
                    self.expect("=")?;
                    let name = self.word();
                    let args = self.list(|r, _| r.scalar())?;
                    let op = self.op(name)?;
                    self.expect(":")?;
                    let name = self.word();
                    let kinds = [ScalarKind::Bool, ScalarKind::Int, ScalarKind::Float];
                    let kind = kinds.into_iter().find(|kind| kind.name() == name);
                    let kind = kind.map_or_else(|| self.fail("a kind of number"), Ok)?;
                    plan.scalars.push(ScalarOp { op, args, kind });
                }
                _ => return self.fail("a buffer, number, kernel or step"),
            }
        }
        while !self.eat("}") {
            plan.outputs.push(self.buffer()?);
            self.eat(",");
        }
        Ok(plan)
    }
}

impl FromStr for Plan {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Plan, ParseError> {
        Reader::new(text).plan()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_a_round_trip() {
        let text = "\
plan arena 64 {
  b0: f32[4, 3] input 0
  b1: f32[3, 2] by [1, 3] input 1
  b2: f32[4, 2] arena 0
  b3: f32[4, 2] output 0
  b4: f32[2, 3, 3] before output 0 at 64
  b5: f32[2, 3, 3] band 0 of 12 bytes a row
  n0 = mul(input 2, 0.5) : float
  n1 = to(n0) {dtype: i64} : int
  k0 = map (i0: outer 8) (b0: f32, b1: f32) (s0: float) {
    %0 = load b0[i0] : f32
    %1 = scalar s0 : f32
    %2 = mul(%0, %1) : f32
    store b1[i0] <- %2
  }
  call mm(b0, b1) -> b2 constant then 1 rows, 1 items
  launch k0(b2, b3; n0)
  launch k0 [2](b2+4, b3+2; nan) coarser 4
  bands 2 of 1 rows, 1 steps, 24 bytes (1 rows 2 items, 1 rows 1 items)
  call bmm(b4 f32[1, 2, 3, 3], b4+1 f32[2, 3, 3] by [0, 1, 2]) -> b5 free 0 to 32
  call rand(; n1, 3) {shape: [4, 2], dtype: f32, device: cpu} -> b3
  call sum(b0) {dims: [0, 1], keepdim: false} -> b2 f32[]
  ops (b0; true) (0 -> b3) graph(%0: f32[4, 2]) {
  %1 = neg(%0) : f32[4, 2]
  return %1
}
  return b3
}
";
        let plan: Plan = text.parse().unwrap();
        assert_eq!(plan.to_string(), text);
        assert_eq!(plan.steps.len(), 7);
        let error = "plan arena 0 {\n  b0: f32[2] nowhere\n}".parse::<Plan>().unwrap_err();
        assert_eq!(error.to_string(), "line 2: expected input, output, before, arena or band");
    }
}
