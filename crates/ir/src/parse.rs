//! Reads the text form of graphs. Value numbers in the text may be any; they are renumbered in order.

use std::str::FromStr;

use rustc_hash::FxHashMap;

use crate::{
    Attribute, DType, Device, Error, Graph, ListTyBuilder, Loc, Op, Result, ScalarKind, Shape, TensorTy, Ty,
    Value, Write, quoted_end,
};

struct Parser<'a> {
    text: &'a str,
    /// Byte position in `text`.
    at: usize,
    values: FxHashMap<u32, Value>,
}

impl FromStr for Graph {
    type Err = Error;

    fn from_str(text: &str) -> Result<Graph> {
        let mut parser = Parser::new(text);
        let graph = parser.graph()?;
        parser.space();
        if parser.rest().is_empty() {
            Ok(graph)
        } else {
            Err(parser.fail("expected nothing after the graph"))
        }
    }
}

impl FromStr for Ty {
    type Err = Error;

    /// Reads what a type's text form says: `f32[4, 3]`, `float`.
    fn from_str(text: &str) -> Result<Ty> {
        let mut parser = Parser::new(text);
        let ty = parser.ty()?;
        parser.space();
        if parser.rest().is_empty() { Ok(ty) } else { Err(parser.fail("expected nothing after the type")) }
    }
}

impl Op {
    /// Reads an op as it is printed, its name (`sum`, `foreach_add`, `mul_`) and its attributes
    /// (`{dims: [1], keepdim: false}`, or nothing); and whether it changes its first operand.
    pub fn from_text(name: &str, attributes: &str) -> Result<(Op, bool)> {
        let mut parser = Parser::new(attributes);
        let attributes = parser.attributes()?;
        parser.op(name, &attributes)
    }
}

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Parser<'a> {
        Parser { text, at: 0, values: FxHashMap::default() }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn fail(&self, message: impl Into<String>) -> Error {
        let line = 1 + self.text[..self.at].matches('\n').count();
        Error::Parse { line, message: message.into() }
    }

    /// Skips white space and `; comments`.
    fn space(&mut self) {
        loop {
            let trimmed = self.rest().trim_start();
            self.at = self.text.len() - trimmed.len();
            if trimmed.starts_with(';') {
                self.at += trimmed.find('\n').unwrap_or(trimmed.len())
            } else {
                return;
            }
        }
    }

    /// The line that a comment names which comes next: `; model.rs:42`.
    fn line(&self) -> Loc {
        Loc::written(self.rest())
    }

    fn eat(&mut self, token: &str) -> bool {
        self.space();
        let hit = self.rest().starts_with(token);
        if hit {
            self.at += token.len();
        }
        hit
    }

    fn expect(&mut self, token: &str) -> Result<()> {
        if self.eat(token) { Ok(()) } else { Err(self.fail(format!("expected `{token}`"))) }
    }

    fn take_while(&mut self, keep: impl Fn(char) -> bool) -> &'a str {
        self.space();
        let rest = self.rest();
        let end = rest.find(|c| !keep(c)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    fn word(&mut self) -> &'a str {
        self.take_while(|c| c.is_alphanumeric() || c == '_')
    }

    fn number(&mut self) -> Result<usize> {
        self.take_while(|c| c.is_ascii_digit()).parse().map_err(|_| self.fail("expected a number"))
    }

    fn label(&mut self) -> Result<u32> {
        self.expect("%")?;
        Ok(self.number()? as u32)
    }

    fn used(&mut self) -> Result<Value> {
        let label = self.label()?;
        self.values.get(&label).copied().ok_or_else(|| self.fail(format!("%{label} is not defined here")))
    }

    fn tensor_ty(&mut self) -> Result<TensorTy> {
        let name = self.word();
        let dtype = DType::from_name(name).ok_or_else(|| self.fail(format!("unknown type `{name}`")))?;
        self.expect("[")?;
        let mut shape = Shape::default();
        while !self.eat("]") {
            shape.push(self.number()?);
            self.eat(",");
        }
        let device = if self.rest().starts_with('@') {
            self.at += 1;
            let name = self.take_while(|c| c.is_alphanumeric() || c == ':');
            Device::parse(name).ok_or_else(|| self.fail(format!("unknown device `{name}`")))?
        } else {
            Device::Cpu
        };
        Ok(TensorTy { dtype, device, shape })
    }

    fn ty(&mut self) -> Result<Ty> {
        for kind in [ScalarKind::Bool, ScalarKind::Int, ScalarKind::Float] {
            if self.eat(kind.name()) {
                return Ok(Ty::Scalar(kind));
            }
        }
        if !self.eat("list(") {
            return Ok(Ty::Tensor(self.tensor_ty()?));
        }
        let mut items = ListTyBuilder::default();
        while !self.eat(")") {
            let run = self.number()?;
            self.expect("x")?;
            let ty = self.tensor_ty()?;
            items.push(&ty, run);
            self.eat(",");
        }
        Ok(Ty::List(items.finish()))
    }

    /// `{name: value, name: [1, 2]}`; commas inside brackets belong to the value.
    fn attributes(&mut self) -> Result<FxHashMap<&'a str, String>> {
        let mut attributes = FxHashMap::default();
        if !self.eat("{") {
            return Ok(attributes);
        }
        while !self.eat("}") {
            let name = self.word();
            self.expect(":")?;
            self.space();
            let value = if let Some(end) = quoted_end(self.rest()) {
                let (value, _) = self.rest().split_at(end);
                self.at += end;
                value.to_string()
            } else if self.rest().starts_with('[') {
                let inner = self.take_while(|c| c != ']');
                self.expect("]")?;
                format!("{inner}]")
            } else {
                self.take_while(|c| !matches!(c, ',' | '}' | '\n')).trim_end().to_string()
            };
            attributes.insert(name, value);
            self.eat(",");
        }
        Ok(attributes)
    }

    fn op(&self, written: &str, attributes: &FxHashMap<&str, String>) -> Result<(Op, bool)> {
        let base = written.strip_prefix("foreach_").unwrap_or(written);
        let find = |name: &str| Op::parse(name, &mut |attribute| attributes.get(attribute).cloned());
        match (find(base), base.strip_suffix('_').and_then(find)) {
            (Some(op), _) => Ok((op, false)),
            (None, Some(op)) => Ok((op, true)),
            (None, None) => Err(self.fail(format!("unknown op or attributes: `{written}`"))),
        }
    }

    fn node(&mut self, graph: &mut Graph) -> Result<()> {
        let mut labels = vec![self.label()?];
        while self.eat(",") {
            labels.push(self.label()?);
        }
        self.expect("=")?;
        let written = self.word();
        self.expect("(")?;
        let mut args = Vec::new();
        while !self.eat(")") {
            args.push(self.used()?);
            self.eat(",");
        }
        let attributes = self.attributes()?;
        let (op, in_place) = self.op(written, &attributes)?;
        self.expect(":")?;
        let mut tys = vec![self.ty()?];
        let mut loc = self.line();
        while self.eat(",") {
            tys.push(self.ty()?);
            loc = self.line();
        }
        if tys.len() != labels.len() {
            return Err(self.fail("expected one type per result"));
        }
        let outs = graph.push(op, &args, tys, in_place, loc);
        for (label, out) in labels.into_iter().zip(outs) {
            self.define(label, out)?;
        }
        Ok(())
    }

    fn define(&mut self, label: u32, value: Value) -> Result<()> {
        match self.values.insert(label, value) {
            None => Ok(()),
            Some(_) => Err(self.fail(format!("%{label} is defined twice"))),
        }
    }

    fn graph(&mut self) -> Result<Graph> {
        let mut graph = Graph::new();
        self.expect("graph")?;
        self.expect("(")?;
        while !self.eat(")") {
            let label = self.label()?;
            self.expect(":")?;
            let ty = self.ty()?;
            let value = graph.input(ty);
            self.define(label, value)?;
            self.eat(",");
        }
        self.expect("{")?;
        loop {
            self.space();
            if self.rest().starts_with('%') {
                self.node(&mut graph)?;
            } else if self.eat("write") {
                let target = self.used()?;
                self.expect("<-")?;
                let value = self.used()?;
                let element = if self.eat("[") {
                    let element = self.number()? as u32;
                    self.expect("]")?;
                    Some(element)
                } else {
                    None
                };
                graph.writes.push(Write { target, value, element });
            } else if self.eat("return") {
                self.space();
                while self.rest().starts_with('%') {
                    let value = self.used()?;
                    graph.outputs.push(value);
                    self.eat(",");
                    self.space();
                }
                self.expect("}")?;
                return Ok(graph);
            } else {
                return Err(self.fail("expected a node, `write` or `return`"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_a_round_trip() {
        let text = "\
graph(%0: f32[4, 3], %1: float, %2: list(2 x f32[3], 1 x f64[])) {
  %3 = mul(%0, %1) : f32[4, 3]
  %4 = sum(%3) {dims: [0, 1], keepdim: false} : f32[]
  %5 = foreach_sqrt(%2) : list(2 x f32[3], 1 x f64[])
  %6 = full(%1) {shape: [2, 2], dtype: f32, device: cpu} : f32[2, 2]
  %7 = constant() {value: -0.5} : float
  %8 = add_(%0, %3) : f32[4, 3]
  write %0 <- %3
  return %4, %6
}
";
        let graph: Graph = text.parse().unwrap();
        assert_eq!(graph.to_string(), text);
    }

    #[test]
    fn lines_survive_a_round_trip() {
        let text = "\
graph(%0: f32[4]) {
  %1 = exp(%0) : f32[4]                                                  ; model.py:12
  %2 = neg(%1) : f32[4]
  return %2
}
";
        let graph: Graph = text.parse().unwrap();
        assert_eq!(graph.to_string(), text);
        let lines: Vec<Loc> = graph.nodes.iter().map(|node| node.loc).collect();
        assert_eq!(lines, [Loc::named("model.py", 12), Loc::UNKNOWN]);
        // What is no line is a comment like any other.
        let other: Graph = text.replace("model.py:12", "see also: 12").parse().unwrap();
        assert_eq!(other.nodes[0].loc, Loc::UNKNOWN);
    }

    #[test]
    fn errors_say_where() {
        let check = |text: &str, want: &str| {
            assert_eq!(text.parse::<Graph>().unwrap_err().to_string(), want);
        };
        check(
            "graph() {\n  %0 = nonsense() : f32[]\n return }",
            "line 2: unknown op or attributes: `nonsense`",
        );
        check("graph() {\n  %1 = exp(%0) : f32[]\n return }", "line 2: %0 is not defined here");
        check("graph(%0: f99[]) { return }", "line 1: unknown type `f99`");
    }
}
