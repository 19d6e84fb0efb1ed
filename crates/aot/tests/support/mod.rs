//! Traces as text, for golden files. A line is a variable or a number that the program begins with, or what it does:
//!
//! ```text
//! x: f32[4, 3] leaf                                a leaf that requires a gradient; `inner`: no leaf
//! n: float                                         a number, known when the program runs
//! y = slice(x) {dim: 0, start: 0, end: 2, step: 1}
//! mul_(y, n)                                       in place
//! no_grad z = mul(y, 2.0)
//! backward(z) x -> g, w += h                       a new gradient g; one that is added to h
//! backward(z from s) x -> g retain
//! a, none = grad(z of x, w) create                 create: on the tape itself; none: does not depend on it
//! requires_grad(z), no_requires_grad(z), retain_grad(z), apply(z)
//! live y, g                                        what outlives the trace
//! ```

use std::collections::HashMap;
use std::sync::Arc;

use kiln_aot::trace::{Event, GradTarget, InputVariable, TraceArg, Variable, VariableInfo};
use kiln_aot::{Functional, Home, Trace, View};
use kiln_ir::{Graph, Layout, Loc, Op, Scalar, Ty};

/// What a name stands for.
#[derive(Copy, Clone)]
enum Name {
    Variable(Variable),
    Number(u32),
}

/// A trace under construction.
#[derive(Default)]
pub struct Reader {
    pub trace: Trace,
    pub live: Vec<Variable>,
    names: HashMap<String, Name>,
}

type Outcome<T> = Result<T, String>;

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|word| !word.is_empty())
}

impl Reader {
    /// The trace of a file; comments begin with a semicolon.
    pub fn read(text: &str) -> Outcome<Reader> {
        let mut reader = Reader::default();
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(';'));
        for line in lines {
            reader.line(line).map_err(|why| format!("{line}: {why}"))?;
        }
        Ok(reader)
    }

    fn line(&mut self, line: &str) -> Outcome<()> {
        let (begin, inside, rest) = match line.split_once('(') {
            Some((begin, rest)) => {
                let (inside, rest) = rest.split_once(')').ok_or("no closing bracket")?;
                (begin, inside, rest.trim())
            }
            None if line.starts_with("live ") => {
                self.live = self.variables(&line[5..])?;
                return Ok(());
            }
            None => return self.begins_with(line),
        };
        let (targets, name) = begin.split_once(" = ").unwrap_or(("", begin));
        let (targets, grad_enabled) = match targets.strip_prefix("no_grad ").map(|targets| (targets, false)) {
            Some(found) => found,
            None => (targets, true),
        };
        let loc = Loc::UNKNOWN;
        match name {
            "backward" => {
                let (targets, retain_graph) = strip_word(rest, "retain");
                let targets = words(targets).map(|target| self.target(target)).collect::<Outcome<_>>()?;
                let outputs = vec![self.output(inside)?];
                self.trace.events.push(Event::Backward { outputs, targets, retain_graph, loc });
            }
            "grad" => {
                let (output, inputs) = inside.split_once(" of ").ok_or("no inputs")?;
                let (outputs, inputs) = (vec![self.output(output)?], self.variables(inputs)?);
                let (rest, create_graph) = strip_word(rest, "create");
                let (_, retain_graph) = strip_word(rest, "retain");
                let mut results = Vec::new();
                for (target, &input) in words(targets).zip(&inputs) {
                    let ty = self.trace.variables[input as usize].ty.clone();
                    results.push((target != "none").then(|| self.define(target, ty, None)));
                }
                let retain_graph = retain_graph || create_graph;
                let made = false;
                let event = Event::Grad { outputs, inputs, results, retain_graph, create_graph, made, loc };
                self.trace.events.push(event);
            }
            "requires_grad" | "no_requires_grad" => {
                let (variable, on) = (self.variable(inside)?, name == "requires_grad");
                self.trace.events.push(Event::RequiresGrad { variable, on, loc });
            }
            "retain_grad" => {
                let variable = self.variable(inside)?;
                self.trace.events.push(Event::Retain { variable, loc });
            }
            "apply" => {
                let outputs = self.variables(inside)?;
                self.trace.events.push(Event::Apply { outputs, loc });
            }
            _ => {
                let (name, grad_enabled) = match name.strip_prefix("no_grad ") {
                    Some(name) => (name, false),
                    None => (name, grad_enabled),
                };
                self.call(targets, name, inside, rest, grad_enabled)?;
            }
        }
        Ok(())
    }

    /// A variable or number that is there from the start.
    fn begins_with(&mut self, line: &str) -> Outcome<()> {
        let (name, ty) = line.split_once(": ").ok_or("neither a variable nor an event")?;
        let (ty, leaf) = strip_word(ty, "leaf");
        let (ty, inner) = strip_word(ty, "inner");
        let ty = parse_ty(ty)?;
        match &ty {
            Ty::Scalar(kind) => {
                self.trace.numbers.push(*kind);
                let number = Name::Number(self.trace.numbers.len() as u32 - 1);
                self.names.insert(name.to_string(), number);
            }
            Ty::Tensor(tensor) => {
                let layout = Arc::new(Layout::contiguous(tensor.shape.clone()));
                let input = InputVariable { layout, requires_grad: leaf || inner, leaf: !inner };
                self.define(name, ty, Some(input));
            }
            Ty::List(_) => return Err("lists are made by the program".into()),
        }
        Ok(())
    }

    fn call(
        &mut self,
        target: &str,
        name: &str,
        args: &str,
        attributes: &str,
        grad_enabled: bool,
    ) -> Outcome<()> {
        let (name, in_place) = match name.strip_suffix('_').filter(|_| target.is_empty()) {
            Some(name) => (name, true),
            None => (name, false),
        };
        let attributes = attributes.trim_matches(['{', '}']);
        let mut attribute = |wanted: &str| {
            let at = attributes.find(&format!("{wanted}: "))?;
            let value = &attributes[at + wanted.len() + 2..];
            let end = value.find(if value.starts_with('[') { ']' } else { ',' }).unwrap_or(value.len());
            let end = if value.starts_with('[') { end + 1 } else { end };
            Some(value[..end].trim().to_string())
        };
        let name = name.strip_prefix("foreach_").unwrap_or(name);
        let op = Op::parse(name, &mut attribute).ok_or("there is no such op")?;
        let args = words(args).map(|arg| self.arg(arg)).collect::<Outcome<Vec<TraceArg>>>()?;
        let tys: Vec<Ty> = args.iter().map(|arg| self.ty(arg)).collect();
        let made = op.infer(&tys).map_err(|why| why.to_string())?;
        let out = (!in_place).then(|| self.define(target, made[0].clone(), None));
        let loc = Loc::UNKNOWN;
        self.trace.events.push(Event::Call { op, args, out, in_place, grad_enabled, loc });
        Ok(())
    }

    fn define(&mut self, name: &str, ty: Ty, input: Option<InputVariable>) -> Variable {
        self.trace.variables.push(Arc::new(VariableInfo { ty, input }));
        let variable = self.trace.variables.len() as Variable - 1;
        self.names.insert(name.to_string(), Name::Variable(variable));
        variable
    }

    fn variable(&self, name: &str) -> Outcome<Variable> {
        match self.names.get(name.trim()) {
            Some(Name::Variable(variable)) => Ok(*variable),
            _ => Err(format!("{name} is no variable")),
        }
    }

    fn variables(&self, names: &str) -> Outcome<Vec<Variable>> {
        words(names).map(|name| self.variable(name)).collect()
    }

    fn output(&self, text: &str) -> Outcome<(Variable, Option<Variable>)> {
        match text.split_once(" from ") {
            Some((output, seed)) => Ok((self.variable(output)?, Some(self.variable(seed)?))),
            None => Ok((self.variable(text)?, None)),
        }
    }

    fn target(&mut self, text: &str) -> Outcome<(Variable, GradTarget)> {
        if let Some((leaf, existing)) = text.split_once(" += ") {
            return Ok((self.variable(leaf)?, GradTarget::Accumulate(self.variable(existing)?)));
        }
        let (leaf, new) = text.split_once(" -> ").ok_or("no target")?;
        let leaf = self.variable(leaf)?;
        let ty = self.trace.variables[leaf as usize].ty.clone();
        Ok((leaf, GradTarget::New(self.define(new.trim(), ty, None))))
    }

    fn arg(&self, text: &str) -> Outcome<TraceArg> {
        match (self.names.get(text), text.parse::<i64>(), text.parse::<f64>()) {
            (Some(Name::Variable(variable)), ..) => Ok(TraceArg::Variable(*variable)),
            (Some(Name::Number(number)), ..) => Ok(TraceArg::Number(*number)),
            (None, Ok(int), _) => Ok(TraceArg::Constant(Scalar::Int(int))),
            (None, _, Ok(float)) => Ok(TraceArg::Constant(Scalar::Float(float))),
            _ => Err(format!("{text} is not defined")),
        }
    }

    fn ty(&self, arg: &TraceArg) -> Ty {
        match arg {
            TraceArg::Variable(variable) => self.trace.variables[*variable as usize].ty.clone(),
            TraceArg::Number(number) => Ty::Scalar(self.trace.numbers[*number as usize]),
            TraceArg::Constant(value) => Ty::Scalar(value.kind()),
        }
    }

    /// The name of a variable.
    pub fn name(&self, variable: Variable) -> String {
        let named = |(name, of): (&String, &Name)| {
            matches!(of, Name::Variable(v) if *v == variable).then(|| name.clone())
        };
        self.names.iter().find_map(named).unwrap_or_else(|| variable.to_string())
    }

    /// What outlives a trace: where its memory is, and what it is to autograd.
    pub fn survivors(&self, functional: &Functional) -> String {
        let mut text = String::new();
        for survivor in &functional.survivors {
            let homes = survivor.homes.iter().map(|(home, layout)| {
                let home = match home {
                    Home::Output(output) => format!("output {output}"),
                    Home::Input(input) => format!("memory of {}", self.name(*input)),
                };
                let strides: Vec<String> = layout.strides.iter().map(isize::to_string).collect();
                format!("{home} {} by [{}] at {}", layout.shape, strides.join(", "), layout.offset)
            });
            let notes = [
                (survivor.requires_grad, "on the tape"),
                (survivor.used_up, "used up"),
                (survivor.twice, "through a pass"),
                (survivor.view == View::Unrecorded, "a view that was not recorded"),
            ];
            let homes: Vec<String> = homes.collect();
            text += &format!("{}: {}", self.name(survivor.variable), homes.join("; "));
            for (_, note) in notes.iter().filter(|(holds, _)| *holds) {
                text += &format!(", {note}");
            }
            if let View::Of(base) = survivor.view {
                text += &format!(", a view of {}", self.name(base));
            }
            text += "\n";
        }
        text
    }
}

/// A text without a word at its end, and whether it was there.
fn strip_word<'a>(text: &'a str, word: &str) -> (&'a str, bool) {
    match text.trim().strip_suffix(word) {
        Some(rest) => (rest.trim_end(), true),
        None => (text.trim(), false),
    }
}

fn parse_ty(text: &str) -> Outcome<Ty> {
    let graph: Graph =
        format!("graph(%0: {text}) {{ return }}").parse().map_err(|_| format!("{text} is no type"))?;
    Ok(graph.ty(graph.inputs[0]).clone())
}
