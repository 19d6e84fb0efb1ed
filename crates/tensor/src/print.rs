//! Printing tensors as PyTorch does: four digits, exponents where sizes are far apart, lines of 80 columns, long
//! tensors summarised, then what is not the default: size, dtype, gradient.

use std::fmt;

use kiln_ir::{DType, Loc, Result, ScalarKind, Shape};

use crate::host::elements;
use crate::{Tensor, hook};

/// More elements than this are summarised.
const THRESHOLD: usize = 1000;
/// How many are shown at each end then.
const EDGE: usize = 3;
/// Columns of a line.
const WIDTH: usize = 80;
/// Columns before the first bracket: `tensor(`.
const INDENT: usize = 7;

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ty = self.ty();
        let elements = match Elements::of(self, ty.dtype.kind()) {
            Ok(elements) => elements,
            Err(error) => return write!(f, "tensor({error})"),
        };
        let empty = ty.shape.numel() == 0;
        let mut text = String::from("tensor(");
        if empty {
            text.push_str("[]");
        } else {
            let cut = ty.shape.numel() > THRESHOLD;
            let mut shown = Vec::new();
            each_shown(&ty.shape, cut, 0, 0, &mut |at| shown.push(at));
            let grid = Grid { style: elements.style(&shown), elements, shape: &ty.shape, cut };
            grid.write(&mut text, 0, 0);
        }
        let mut notes = Vec::new();
        if empty && ty.shape.rank() != 1 {
            notes.push(format!("size={}", ty.shape));
        }
        let usual = match ty.dtype {
            DType::F32 => true,
            DType::I64 | DType::Bool => !empty,
            _ => false,
        };
        if !usual {
            notes.push(format!("dtype={}", ty.dtype));
        }
        match self.gradient_source() {
            Some(source) => notes.push(format!("grad_fn=<{source}>")),
            None if self.requires_grad() => notes.push("requires_grad=True".to_string()),
            None => {}
        }
        let mut column = text.len() - text.rfind('\n').map_or(0, |at| at + 1) + 2;
        for note in notes {
            if column + note.len() + 2 > WIDTH {
                text.push_str(&format!(",\n{:INDENT$}", ""));
                column = INDENT + note.len();
            } else {
                text.push_str(", ");
                column += note.len() + 2;
            }
            text.push_str(&note);
        }
        text.push(')');
        f.write_str(&text)
    }
}

/// Calls `f` with the position of every element that is printed.
fn each_shown(shape: &Shape, cut: bool, dim: usize, first: usize, f: &mut dyn FnMut(usize)) {
    if dim == shape.rank() {
        return f(first);
    }
    let inner: usize = shape[dim + 1..].iter().product();
    for i in (0..shape[dim]).filter(|&i| !hidden(shape[dim], i, cut)) {
        each_shown(shape, cut, dim + 1, first + i * inner, f);
    }
}

fn hidden(size: usize, i: usize, cut: bool) -> bool {
    cut && size > 2 * EDGE && (EDGE..size - EDGE).contains(&i)
}

enum Elements {
    Floats(Vec<f64>),
    Ints(Vec<i64>),
    Bools(Vec<bool>),
}

/// How all elements of a tensor are written.
#[derive(Copy, Clone)]
struct Style {
    form: Form,
    width: usize,
}

#[derive(Copy, Clone, PartialEq)]
enum Form {
    /// As they are: integers, truth values.
    Plain,
    /// Floats that are all whole: `1.`
    Whole,
    /// `1.0000`
    Fixed,
    /// `1.0000e+00`
    Exponent,
}

impl Elements {
    fn of(tensor: &Tensor, kind: ScalarKind) -> Result<Elements> {
        let (what, loc) = ("printing", Loc::UNKNOWN);
        hook::host_access(tensor, hook::Access::Print, what, loc)?;
        Ok(match kind {
            ScalarKind::Float => Elements::Floats(elements(tensor, what, loc)?),
            ScalarKind::Int => Elements::Ints(elements(tensor, what, loc)?),
            ScalarKind::Bool => Elements::Bools(elements(tensor, what, loc)?),
        })
    }

    fn style(&self, shown: &[usize]) -> Style {
        let form = match self {
            Elements::Floats(data) => {
                let sizes = || shown.iter().map(|&i| data[i].abs()).filter(|x| x.is_finite() && *x != 0.0);
                let largest = sizes().fold(0.0, f64::max);
                let smallest = sizes().fold(f64::INFINITY, f64::min);
                let whole = sizes().all(|x| x.fract() == 0.0);
                let far = largest / smallest > 1000.0 || largest > 1e8;
                if far && largest > 0.0 {
                    Form::Exponent
                } else if whole {
                    Form::Whole
                } else if smallest < 1e-4 {
                    Form::Exponent
                } else {
                    Form::Fixed
                }
            }
            Elements::Ints(_) | Elements::Bools(_) => Form::Plain,
        };
        // Numbers set the width; nothing, NaN and infinities go along with it.
        let counts = |i: usize| match self {
            Elements::Floats(data) => data[i].is_finite() && data[i] != 0.0,
            Elements::Ints(_) | Elements::Bools(_) => true,
        };
        let width = shown.iter().filter(|&&i| counts(i)).map(|&i| self.text(i, form).len()).max();
        Style { form, width: width.unwrap_or(1) }
    }

    fn text(&self, i: usize, form: Form) -> String {
        match self {
            Elements::Ints(data) => data[i].to_string(),
            Elements::Bools(data) => if data[i] { "True" } else { "False" }.to_string(),
            Elements::Floats(data) => match data[i] {
                x if x.is_nan() => "nan".to_string(),
                x if x.is_infinite() => if x > 0.0 { "inf" } else { "-inf" }.to_string(),
                x => match form {
                    Form::Exponent => exponent(x),
                    Form::Whole => format!("{x:.0}."),
                    Form::Plain | Form::Fixed => format!("{x:.4}"),
                },
            },
        }
    }
}

/// `1.2500e-07`: a sign and at least two digits in the exponent.
fn exponent(x: f64) -> String {
    let text = format!("{x:.4e}");
    match text.split_once('e') {
        Some((digits, power)) => {
            let (sign, power) = power.strip_prefix('-').map_or(('+', power), |p| ('-', p));
            format!("{digits}e{sign}{power:0>2}")
        }
        None => text,
    }
}

/// The elements with what it takes to write them in rows.
struct Grid<'a> {
    elements: Elements,
    style: Style,
    shape: &'a Shape,
    cut: bool,
}

impl Grid<'_> {
    fn write(&self, text: &mut String, dim: usize, first: usize) {
        let rank = self.shape.rank();
        if dim == rank {
            return text.push_str(&self.cell(first));
        }
        text.push('[');
        if dim + 1 == rank {
            self.line(text, dim, first);
        } else {
            let inner: usize = self.shape[dim + 1..].iter().product();
            let size = self.shape[dim];
            let gap = format!(",{}{:width$}", "\n".repeat(rank - dim - 1), "", width = INDENT + dim + 1);
            for i in 0..size {
                if !hidden(size, i, self.cut) {
                    let gap = if i > 0 { gap.as_str() } else { "" };
                    text.push_str(gap);
                    self.write(text, dim + 1, first + i * inner);
                } else if i == EDGE {
                    text.push_str(&gap);
                    text.push_str("...");
                }
            }
        }
        text.push(']');
    }

    /// The elements of the innermost dim, as many to a line as fit.
    fn line(&self, text: &mut String, dim: usize, first: usize) {
        let size = self.shape[dim];
        let indent = INDENT + dim;
        let most = ((WIDTH - indent.min(WIDTH)) / (self.style.width + 2)).max(1);
        let mut cells = Vec::new();
        for i in 0..size {
            if !hidden(size, i, self.cut) {
                cells.push(self.cell(first + i));
            } else if i == EDGE {
                cells.push(" ...".to_string());
            }
        }
        for (row, cells) in cells.chunks(most).enumerate() {
            if row > 0 {
                text.push_str(&format!(",\n{:width$}", "", width = indent + 1));
            }
            text.push_str(&cells.join(", "));
        }
    }

    fn cell(&self, i: usize) -> String {
        format!("{:>width$}", self.elements.text(i, self.style.form), width = self.style.width)
    }
}

impl fmt::Debug for Tensor {
    /// The type only: printing elements would finish a run.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({}{})", self.ty(), if self.is_lazy() { ", lazy" } else { "" })
    }
}
