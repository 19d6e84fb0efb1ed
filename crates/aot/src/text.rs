//! Recordings as text that parses back. A line is a variable or a number that the program begins with, or what it does:
//!
//! ```text
//! x: f32[4, 3] leaf                                a leaf that requires a gradient; `inner`: no leaf
//! w: f32[3, 4] by [1, 3] at 2                      strides and the first element's position, unless dense from 0
//! n: float                                         a number, known when the program runs
//! y = slice(x) {dim: 0, start: 0, end: 2, step: 1} ; model.rs:12
//! mul_(y, n)                                       in place
//! no_grad z = mul(y, 2.0)
//! backward(z) x -> g, w += h                       a new gradient g; one that is added to h
//! backward(z from s) x -> g retain
//! a, none = grad(z of x, w) create                 create: on the tape itself; none: does not depend on it
//! requires_grad(z)                                 also no_requires_grad, retain_grad, apply
//! read(y)                                          the host looks at it: a graph breaks here
//! live y, g                                        what outlives the trace
//! ```
//!
//! Variables that are printed have numbers, `%3`, and so have numbers, `#0`. Other lines that begin with a semicolon are
//! comments.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use kiln_ir::{Error, Layout, Loc, Op, Result, Scalar, Ty};

use crate::trace::{Event, GradTarget, InputVariable, Trace, TraceArg, Variable};

/// A trace, and which of its variables outlive it.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Recording {
    /// What the program did.
    pub trace: Trace,
    /// What somebody still holds afterwards.
    pub live: Vec<Variable>,
}

impl FromStr for Recording {
    type Err = Error;

    fn from_str(text: &str) -> Result<Recording> {
        Recording::named(text).map(|(recording, _)| recording)
    }
}

impl Recording {
    /// Reads a text; also what it calls its variables, by number.
    pub fn named(text: &str) -> Result<(Recording, Vec<String>)> {
        let mut reader = Reader::default();
        for (number, line) in text.lines().enumerate() {
            let located = |error: Error| match error {
                Error::Parse { message, .. } => Error::Parse { line: number + 1, message },
                other => Error::Parse { line: number + 1, message: other.to_string() },
            };
            let (line, loc) = split_comment(line);
            if !line.is_empty() {
                reader.line(line, loc).map_err(located)?;
            }
        }
        Ok((Recording { trace: reader.trace, live: reader.live }, reader.variables))
    }

    /// What its text calls each of its variables: `%3`.
    pub fn labels(&self) -> HashMap<Variable, String> {
        let mut printer = Printer { trace: &self.trace, labels: HashMap::new() };
        self.inputs().for_each(|(variable, _)| drop(printer.define(variable)));
        self.trace.events.iter().for_each(|event| drop(printer.event(event)));
        printer.labels.into_iter().map(|(variable, label)| (variable, format!("%{label}"))).collect()
    }

    /// The variables that it begins with.
    pub fn inputs(&self) -> impl Iterator<Item = (Variable, &InputVariable)> {
        (0..).zip(&self.trace.variables).filter_map(|(variable, info)| Some((variable, info.input.as_ref()?)))
    }
}

fn fail<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::Parse { line: 0, message: message.into() })
}

/// A line without its comment, and the user's line if that is what the comment says.
fn split_comment(line: &str) -> (&str, Loc) {
    let Some((line, comment)) = line.split_once(';') else { return (line.trim(), Loc::UNKNOWN) };
    let named = comment.trim().rsplit_once(':').and_then(|(file, number)| {
        let is_name = !file.is_empty() && !file.contains(char::is_whitespace);
        Some((file, number.parse().ok()?)).filter(|_| is_name)
    });
    (line.trim(), named.map_or(Loc::UNKNOWN, |(file, number)| Loc::named(file, number)))
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|word| !word.is_empty())
}

/// A text without a word at its end, and whether it was there.
fn strip_word<'a>(text: &'a str, word: &str) -> (&'a str, bool) {
    match text.trim().strip_suffix(word) {
        Some(rest) => (rest.trim_end(), true),
        None => (text.trim(), false),
    }
}

/// What a name stands for.
#[derive(Copy, Clone)]
enum Name {
    Variable(Variable),
    Number(u32),
}

#[derive(Default)]
struct Reader {
    trace: Trace,
    live: Vec<Variable>,
    names: HashMap<String, Name>,
    /// The names of variables, by number.
    variables: Vec<String>,
}

impl Reader {
    fn line(&mut self, line: &str, loc: Loc) -> Result<()> {
        if let Some(live) = line.strip_prefix("live") {
            self.live = self.variables(live)?;
            return Ok(());
        }
        let Some((begin, rest)) = line.split_once('(').filter(|(begin, _)| !begin.contains(": ")) else {
            return self.begins_with(line);
        };
        let Some((inside, rest)) = rest.split_once(')') else { return fail("expected `)`") };
        let (begin, grad_enabled) = match begin.strip_prefix("no_grad ") {
            Some(begin) => (begin, false),
            None => (begin, true),
        };
        let (targets, name) = begin.split_once(" = ").unwrap_or(("", begin));
        let event = match name {
            "backward" => {
                let outputs = self.outputs(inside)?;
                let (targets, retain_graph) = strip_word(rest, "retain");
                let targets = words(targets).map(|target| self.target(target)).collect::<Result<_>>()?;
                Event::Backward { outputs, targets, retain_graph, loc }
            }
            "grad" => {
                let Some((outputs, inputs)) = inside.split_once(" of ") else { return fail("expected `of`") };
                let (outputs, inputs) = (self.outputs(outputs)?, self.variables(inputs)?);
                let (rest, made) = strip_word(rest, "made");
                let (rest, create_graph) = strip_word(rest, "create");
                let (_, retain_graph) = strip_word(rest, "retain");
                let mut results = Vec::new();
                for (target, &input) in words(targets).zip(&inputs) {
                    let ty = self.trace.variables[input as usize].ty.clone();
                    results.push((target != "none").then(|| self.define(target, ty, None)));
                }
                let retain_graph = retain_graph || create_graph;
                Event::Grad { outputs, inputs, results, retain_graph, create_graph, made, loc }
            }
            "requires_grad" | "no_requires_grad" => {
                Event::RequiresGrad { variable: self.variable(inside)?, on: name == "requires_grad", loc }
            }
            "retain_grad" => Event::Retain { variable: self.variable(inside)?, loc },
            "read" => Event::Read { variable: self.variable(inside)?, loc },
            "apply" => Event::Apply { outputs: self.variables(inside)?, loc },
            _ => self.call(targets, (name, rest), inside, grad_enabled, loc)?,
        };
        self.trace.events.push(event);
        Ok(())
    }

    /// A variable or number that is there from the start.
    fn begins_with(&mut self, line: &str) -> Result<()> {
        let Some((name, ty)) = line.split_once(": ") else {
            return fail("expected a variable, a number or what the program does");
        };
        let (ty, leaf) = strip_word(ty, "leaf");
        let (ty, inner) = strip_word(ty, "inner");
        let (ty, offset) = match ty.split_once(" at ") {
            Some((ty, offset)) => (ty, offset.trim().parse().or_else(|_| fail("expected a position"))?),
            None => (ty, 0),
        };
        let (ty, strides) = match ty.split_once(" by ") {
            Some((ty, strides)) => (ty, Some(strides.trim().trim_matches(['[', ']']))),
            None => (ty, None),
        };
        let ty: Ty = ty.parse()?;
        match &ty {
            Ty::Scalar(kind) => {
                self.trace.numbers.push(*kind);
                let number = Name::Number(self.trace.numbers.len() as u32 - 1);
                self.names.insert(name.to_string(), number);
            }
            Ty::Tensor(tensor) => {
                let mut layout = Layout { offset, ..Layout::contiguous(tensor.shape.clone()) };
                if let Some(strides) = strides {
                    let read = words(strides).map(|s| s.parse().or_else(|_| fail("expected strides")));
                    layout.strides = read.collect::<Result<Vec<isize>>>()?.into_iter().collect();
                    if layout.strides.len() != layout.shape.rank() {
                        return fail("expected one stride per dim");
                    }
                }
                let layout = Arc::new(layout);
                let input = InputVariable { layout, requires_grad: leaf || inner, leaf: !inner };
                self.define(name, ty, Some(input));
            }
            Ty::List(_) => return fail("lists are made by the program"),
        }
        Ok(())
    }

    fn call(
        &mut self,
        target: &str,
        (name, attributes): (&str, &str),
        args: &str,
        grad_enabled: bool,
        loc: Loc,
    ) -> Result<Event> {
        let (op, in_place) = Op::from_text(name, attributes.trim())?;
        let args = words(args).map(|arg| self.arg(arg)).collect::<Result<Vec<TraceArg>>>()?;
        let tys: Vec<Ty> = args.iter().map(|arg| self.trace.ty(arg)).collect();
        let made = op.infer(&tys).or_else(|why| fail(format!("{name}: {why}")))?;
        let out = (!in_place).then(|| self.define(target, made[0].clone(), None));
        Ok(Event::Call { op, args, out, in_place, grad_enabled, loc })
    }

    fn define(&mut self, name: &str, ty: Ty, input: Option<InputVariable>) -> Variable {
        let variable = self.trace.define(ty, input);
        self.names.insert(name.to_string(), Name::Variable(variable));
        self.variables.push(name.to_string());
        variable
    }

    fn variable(&self, name: &str) -> Result<Variable> {
        match self.names.get(name.trim()) {
            Some(Name::Variable(variable)) => Ok(*variable),
            _ => fail(format!("{} is not a variable here", name.trim())),
        }
    }

    fn variables(&self, names: &str) -> Result<Vec<Variable>> {
        words(names).map(|name| self.variable(name)).collect()
    }

    fn outputs(&self, text: &str) -> Result<Vec<(Variable, Option<Variable>)>> {
        let output = |text: &str| match text.split_once(" from ") {
            Some((output, seed)) => Ok((self.variable(output)?, Some(self.variable(seed)?))),
            None => Ok((self.variable(text)?, None)),
        };
        words(text).map(output).collect()
    }

    fn target(&mut self, text: &str) -> Result<(Variable, GradTarget)> {
        if let Some((leaf, existing)) = text.split_once(" += ") {
            return Ok((self.variable(leaf)?, GradTarget::Accumulate(self.variable(existing)?)));
        }
        let Some((leaf, new)) = text.split_once(" -> ") else { return fail("expected `->` or `+=`") };
        let leaf = self.variable(leaf)?;
        let ty = self.trace.variables[leaf as usize].ty.clone();
        Ok((leaf, GradTarget::New(self.define(new.trim(), ty, None))))
    }

    fn arg(&self, text: &str) -> Result<TraceArg> {
        match (self.names.get(text), text.parse::<i64>(), text.parse::<f64>(), text.parse::<bool>()) {
            (Some(Name::Variable(variable)), ..) => Ok(TraceArg::Variable(*variable)),
            (Some(Name::Number(number)), ..) => Ok(TraceArg::Number(*number)),
            (None, Ok(int), ..) => Ok(TraceArg::Constant(Scalar::Int(int))),
            (None, _, Ok(float), _) => Ok(TraceArg::Constant(Scalar::Float(float))),
            (None, _, _, Ok(truth)) => Ok(TraceArg::Constant(Scalar::Bool(truth))),
            _ => fail(format!("{text} is not defined here")),
        }
    }
}

/// Prints variables under new numbers, in the order in which the text defines them.
struct Printer<'a> {
    trace: &'a Trace,
    labels: HashMap<Variable, usize>,
}

impl Printer<'_> {
    fn define(&mut self, variable: Variable) -> String {
        let label = self.labels.len();
        format!("%{}", *self.labels.entry(variable).or_insert(label))
    }

    fn label(&self, variable: Variable) -> String {
        // A variable that no line defines shows as what it is: an error when it is read.
        self.labels
            .get(&variable)
            .map_or_else(|| format!("%undefined{variable}"), |label| format!("%{label}"))
    }

    fn list(&self, variables: &[Variable]) -> String {
        variables.iter().map(|&v| self.label(v)).collect::<Vec<_>>().join(", ")
    }

    fn outputs(&self, outputs: &[(Variable, Option<Variable>)]) -> String {
        let output = |(output, seed): &(Variable, Option<Variable>)| match seed {
            Some(seed) => format!("{} from {}", self.label(*output), self.label(*seed)),
            None => self.label(*output),
        };
        outputs.iter().map(output).collect::<Vec<_>>().join(", ")
    }

    fn arg(&self, arg: &TraceArg) -> String {
        match arg {
            TraceArg::Variable(variable) => self.label(*variable),
            TraceArg::Number(number) => format!("#{number}"),
            TraceArg::Constant(value) => value.to_string(),
        }
    }

    fn event(&mut self, event: &Event) -> String {
        match event {
            Event::Call { op, args, out, in_place, grad_enabled, .. } => {
                let is_list = |arg: &TraceArg| matches!(self.trace.ty(arg), Ty::List(_));
                let over_lists = op.row().class == kiln_ir::Class::Pointwise && args.iter().any(is_list);
                let given: Vec<String> = args.iter().map(|arg| self.arg(arg)).collect();
                let target = out.map(|out| self.define(out) + " = ").unwrap_or_default();
                let mode = if *grad_enabled { "" } else { "no_grad " };
                let name = op.text_name(over_lists, *in_place);
                format!("{mode}{target}{name}({}){}", given.join(", "), op.text_attributes())
            }
            Event::Backward { outputs, targets, retain_graph, .. } => {
                let outputs = self.outputs(outputs);
                let target = |(leaf, target): &(Variable, GradTarget)| match target {
                    GradTarget::New(new) => format!("{} -> {}", self.label(*leaf), self.define(*new)),
                    GradTarget::Accumulate(old) => format!("{} += {}", self.label(*leaf), self.label(*old)),
                };
                let targets: Vec<String> = targets.iter().map(target).collect();
                let retain = if *retain_graph { " retain" } else { "" };
                format!("backward({outputs}) {}{retain}", targets.join(", "))
            }
            Event::Grad { outputs, inputs, results, retain_graph, create_graph, made, .. } => {
                let given = format!("{} of {}", self.outputs(outputs), self.list(inputs));
                let result = |result: &Option<Variable>| result.map_or("none".into(), |v| self.define(v));
                let results: Vec<String> = results.iter().map(result).collect();
                let flags = [
                    (*retain_graph && !create_graph, " retain"),
                    (*create_graph, " create"),
                    (*made, " made"),
                ];
                let flags: String = flags.iter().filter(|(on, _)| *on).map(|(_, flag)| *flag).collect();
                format!("{} = grad({given}){flags}", results.join(", "))
            }
            Event::RequiresGrad { variable, on, .. } => {
                format!("{}requires_grad({})", if *on { "" } else { "no_" }, self.label(*variable))
            }
            Event::Retain { variable, .. } => format!("retain_grad({})", self.label(*variable)),
            Event::Read { variable, .. } => format!("read({})", self.label(*variable)),
            Event::Apply { outputs, .. } => format!("apply({})", self.list(outputs)),
        }
    }
}

impl fmt::Display for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut printer = Printer { trace: &self.trace, labels: HashMap::new() };
        for (variable, InputVariable { layout, requires_grad, leaf }) in self.inputs() {
            write!(f, "{}: {}", printer.define(variable), self.trace.variables[variable as usize].ty)?;
            if layout.strides != layout.shape.contiguous_strides() {
                let strides: Vec<String> = layout.strides.iter().map(isize::to_string).collect();
                write!(f, " by [{}]", strides.join(", "))?;
            }
            if layout.offset != 0 {
                write!(f, " at {}", layout.offset)?;
            }
            writeln!(
                f,
                "{}",
                match (requires_grad, leaf) {
                    (true, true) => " leaf",
                    (_, false) => " inner",
                    (false, true) => "",
                }
            )?;
        }
        for (number, kind) in self.trace.numbers.iter().enumerate() {
            writeln!(f, "#{number}: {}", kind.name())?;
        }
        for event in &self.trace.events {
            let text = printer.event(event);
            match event.loc() {
                loc if loc.is_known() => writeln!(f, "{text:<72} ; {loc}")?,
                _ => writeln!(f, "{text}")?,
            }
        }
        writeln!(f, "live {}", printer.list(&self.live))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_a_round_trip() {
        let text = "\
%0: f32[4, 3] leaf
%1: f32[3, 4] by [1, 3] at 2
%2: f32[4, 4] inner
%3: f32[4, 3]
#0: float
%4 = mul(%0, #0)                                                         ; model.rs:12
no_grad %5 = mm(%4, %1)
add_(%5, 2.5)
%6 = list(%4, %0)
%7 = foreach_add(%6, 1)
%8 = sum(%4) {dims: [0, 1], keepdim: false}
requires_grad(%5)
retain_grad(%4)
%9 = sum(%2) {dims: [0, 1], keepdim: false}
%10, none = grad(%8 of %0, %2) create
backward(%8, %9 from %8) %0 += %3, %2 -> %11 retain
live %5, %11
";
        let recording: Recording = text.parse().unwrap();
        assert_eq!(recording.to_string(), text);
    }

    #[test]
    fn errors_say_where() {
        let check = |text: &str, want: &str| {
            assert_eq!(text.parse::<Recording>().unwrap_err().to_string(), want);
        };
        check("x: f32[4]\ny = nonsense(x)", "line 2: unknown op or attributes: `nonsense`");
        check("x: f32[4]\n\ny = exp(z)", "line 3: z is not defined here");
        check("x: f32[4] by [1, 2]", "line 1: expected one stride per dim");
        check(
            "x: f32[4]\ny: f32[3]\nz = add(x, y)",
            "line 3: add: shapes [4] and [3] don't broadcast together",
        );
        check("live x", "line 1: x is not a variable here");
    }
}
