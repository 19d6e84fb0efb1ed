//! Reads the text form of loop kernels back.

use std::str::FromStr;

use kiln_ir::{DType, Loc, ScalarKind};

use crate::index::{Index, Term};
use crate::loops::{Axis, Expr, ExprKind, Kernel, Mode, Operation, Reduction, Scan, Store};

/// Text that is not a kernel.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("line {line}: expected {expected}")]
pub struct ParseError {
    /// 1-based line of the text.
    pub line: usize,
    /// What should have been there.
    pub expected: &'static str,
}

pub(crate) struct Reader<'a> {
    pub(crate) text: &'a str,
    line: usize,
}

pub(crate) type Read<T> = Result<T, ParseError>;

impl<'a> Reader<'a> {
    pub(crate) fn new(text: &'a str) -> Reader<'a> {
        Reader { text, line: 1 }
    }

    pub(crate) fn fail<T>(&self, expected: &'static str) -> Read<T> {
        Err(ParseError { line: self.line, expected })
    }

    pub(crate) fn space(&mut self) {
        let rest = self.text.trim_start();
        self.line += self.text[..self.text.len() - rest.len()].matches('\n').count();
        self.text = rest;
    }

    pub(crate) fn eat(&mut self, token: &str) -> bool {
        self.space();
        match self.text.strip_prefix(token) {
            Some(rest) => {
                self.text = rest;
                true
            }
            None => false,
        }
    }

    pub(crate) fn expect(&mut self, token: &'static str) -> Read<()> {
        if self.eat(token) { Ok(()) } else { self.fail(token) }
    }

    pub(crate) fn word(&mut self) -> &'a str {
        self.space();
        let end = self.text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(self.text.len());
        let (word, rest) = self.text.split_at(end);
        self.text = rest;
        word
    }

    pub(crate) fn number(&mut self) -> Read<i64> {
        self.space();
        let digits = |c: char| !c.is_ascii_digit();
        let start = usize::from(self.text.starts_with('-'));
        let end = self.text[start..].find(digits).map_or(self.text.len(), |e| e + start);
        let (number, rest) = self.text.split_at(end);
        match number.parse() {
            Ok(n) => {
                self.text = rest;
                Ok(n)
            }
            Err(_) => self.fail("a number"),
        }
    }

    pub(crate) fn numbered(&mut self, prefix: &'static str) -> Read<usize> {
        self.expect(prefix)?;
        Ok(self.number()? as usize)
    }

    pub(crate) fn dtype(&mut self) -> Read<DType> {
        DType::from_name(self.word()).map_or_else(|| self.fail("a dtype"), Ok)
    }

    /// Skips a comment, and says which line of a program it names.
    fn comment(&mut self) -> Loc {
        let end = self.text.find('\n').unwrap_or(self.text.len());
        let loc = Loc::written(&self.text[..end]);
        if self.text.trim_start_matches(' ').starts_with(';') {
            self.text = &self.text[end..];
        }
        loc
    }

    pub(crate) fn list<T>(
        &mut self,
        mut item: impl FnMut(&mut Reader<'a>, usize) -> Read<T>,
    ) -> Read<Vec<T>> {
        self.expect("(")?;
        let mut out = Vec::new();
        while !self.eat(")") {
            out.push(item(self, out.len())?);
            self.eat(",");
        }
        Ok(out)
    }

    fn index(&mut self, end: &'static str) -> Read<Index> {
        let mut out = Index::default();
        while !self.eat(end) {
            let term = if self.eat("(") {
                let inner = Box::new(self.index(")")?);
                Some(if self.eat("/") {
                    Term::Div(inner, self.number()?)
                } else if self.eat("<=") {
                    Term::Clamp(inner, self.number()?)
                } else {
                    self.expect("%")?;
                    Term::Mod(inner, self.number()?)
                })
            } else if self.eat("abs(") {
                Some(Term::Abs(Box::new(self.index(")")?)))
            } else if self.eat("%") {
                let value = self.number()? as usize;
                self.expect("<")?;
                Some(Term::Value(value, self.number()?))
            } else if self.eat("i") {
                Some(Term::Axis(self.number()? as usize))
            } else {
                None
            };
            match term {
                Some(term) => {
                    let factor = if self.eat("*") { self.number()? } else { 1 };
                    out.add_scaled(&Index { terms: vec![(term, 1)], constant: 0 }, factor);
                }
                None => out.constant += self.number()?,
            }
            self.eat("+");
        }
        Ok(out)
    }

    pub(crate) fn kernel(&mut self) -> Read<Kernel> {
        let mode = match self.word() {
            "map" => Mode::Map,
            "rows" => Mode::Rows,
            "columns" => Mode::Columns,
            "table" => Mode::Table,
            _ => return self.fail("map, rows, columns or table"),
        };
        let mut kernel = Kernel::empty(mode);
        if self.eat("chunk") {
            kernel.chunk = Some(self.number()?);
        }
        if self.eat("parts") {
            kernel.parts = Some(self.number()?);
        }
        kernel.axes = self.list(|r, _| {
            r.numbered("i")?;
            r.expect(":")?;
            let inner = r.eat("inner");
            if !inner {
                r.expect("outer")?;
            }
            Ok(Axis { extent: r.number()?, inner })
        })?;
        kernel.buffers = self.list(|r, _| {
            r.numbered("b")?;
            r.expect(":")?;
            r.dtype()
        })?;
        kernel.scalars = self.list(|r, _| {
            r.numbered("s")?;
            r.expect(":")?;
            let name = r.word();
            let kinds = [ScalarKind::Bool, ScalarKind::Int, ScalarKind::Float];
            kinds.into_iter().find(|k| k.name() == name).map_or_else(|| r.fail("a kind of number"), Ok)
        })?;
        self.expect("{")?;
        while !self.eat("}") {
            if self.eat("store") {
                let buffer = self.numbered("b")?;
                self.expect("[")?;
                let index = self.index("]")?;
                let adds = self.eat("+=");
                if !adds {
                    self.expect("<-")?;
                }
                let value = self.numbered("%")?;
                kernel.stores.push(Store { buffer, index, value, adds });
                continue;
            }
            self.numbered("%")?;
            self.expect("=")?;
            let kind = self.expr()?;
            self.expect(":")?;
            let dtype = self.dtype()?;
            let loc = self.comment();
            kernel.exprs.push(Expr { dtype, kind, loc });
        }
        Ok(kernel)
    }

    fn only(&self, args: &[usize]) -> Read<usize> {
        match args {
            [arg] => Ok(*arg),
            _ => self.fail("one operand"),
        }
    }

    fn expr(&mut self) -> Read<ExprKind> {
        Ok(match self.word() {
            "scalar" => ExprKind::Scalar(self.numbered("s")?),
            "literal" => ExprKind::Literal(self.number()?),
            "load" => {
                let buffer = self.numbered("b")?;
                self.expect("[")?;
                ExprKind::Load { buffer, index: self.index("]")? }
            }
            "position" => {
                self.expect("[")?;
                ExprKind::Position(self.index("]")?)
            }
            "narrow" => {
                self.expect("(")?;
                let arg = self.numbered("%")?;
                self.expect(",")?;
                let dtype = self.dtype()?;
                self.expect(")")?;
                ExprKind::Narrow(dtype, arg)
            }
            "bounded" => {
                self.expect("(")?;
                let value = self.numbered("%")?;
                self.expect(",")?;
                let size = self.number()?;
                self.expect(",")?;
                let code = self.number()? as usize;
                self.expect(")")?;
                ExprKind::Bounded { value, size, code }
            }
            name => {
                let fold = name.strip_prefix("fold_").and_then(Reduction::from_name);
                let args = self.list(|r, _| r.numbered("%"));
                if let Some(scan) = Scan::from_name(name) {
                    return Ok(ExprKind::Scan(scan, self.only(&args?)?));
                }
                match (Reduction::from_name(name), fold, Operation::from_name(name)) {
                    (Some(reduction), _, _) => ExprKind::Reduce(reduction, self.only(&args?)?),
                    (_, Some(reduction), _) => ExprKind::Fold(reduction, self.only(&args?)?),
                    (_, _, Some(op)) => ExprKind::Apply(op, args?.into_iter().collect()),
                    _ => return self.fail("an expression"),
                }
            }
        })
    }
}

impl FromStr for Kernel {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Kernel, ParseError> {
        Reader::new(text).kernel()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_a_round_trip() {
        let text = "\
rows chunk 64 (i0: outer 4, i1: inner 1024) (b0: f32, b1: i64, b2: bool) (s0: float) {
  %0 = load b1[i0] : i64
  %1 = bounded(%0, 9, 1) : i64
  %2 = load b0[i0*3 + (i1 + 2)/5 + (i1)%5*7 + %1<9*4] : f32
  %3 = scalar s0 : f32
  %4 = add(%2, %3) : f32                                                 ; model.py:12
  %5 = max(%4) : f32
  %6 = position [i1 + 3] : i64
  %7 = literal 0 : f32
  %8 = lt(%5, %7) : bool
  %9 = narrow(%6, u8) : i64
  store b2[i0] <- %8
}
";
        let kernel: Kernel = text.parse().unwrap();
        assert_eq!(kernel.to_string(), text);
        // The line is not part of what a kernel computes.
        assert_eq!(kernel, text.replace("; model.py:12", "").parse().unwrap());
        let text = "\
rows parts 16 (i0: outer 512, i1: inner 64) (b0: f32, b1: f32) () {
  %0 = load b0[i0*64 + i1] : f32
  %1 = fold_sum(%0) : f32
  store b1[i1] <- %1
}
";
        let kernel: Kernel = text.parse().unwrap();
        assert_eq!((kernel.parts, kernel.to_string().as_str()), (Some(16), text));
        let text = "\
columns (i0: outer 64, i1: inner 9) (b0: i64, b1: f32, b2: f32) () {
  %0 = load b0[i1] : i64
  %1 = bounded(%0, 7, 1) : i64
  %2 = load b1[i0 + i1*64] : f32
  %3 = scan_product(%2) : f32
  store b2[i0 + %1<7*64] += %3
}
";
        let kernel: Kernel = text.parse().unwrap();
        assert_eq!((kernel.is_ordered(), kernel.to_string().as_str()), (true, text));
    }

    #[test]
    fn errors_say_where() {
        let error = "rows () () () {\n  %0 = nonsense : f32\n}".parse::<Kernel>().unwrap_err();
        assert_eq!(error.to_string(), "line 2: expected an expression");
    }
}
