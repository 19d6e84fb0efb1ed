//! Plans as bytes, for a cache or a package: what a [`Writer`] writes, a [`Reader`] reads back.
//!
//! The bytes are for the build that wrote them: nothing in them says which version they are, whoever keeps them
//! does. Reading never trusts them, all the same: bytes that are no plan are no plan.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use kiln_ir::math::Function;
use kiln_ir::{DType, Device, Fault, Graph, Loc, Op, Scalar, ScalarKind, TensorTy, planted};

use crate::index::{Index, Term};
use crate::loops::{Axis, Expr, ExprKind, Kernel, Mode, Operation, Reduction, Scan, Store};
use crate::plan::{
    Bands, BufferId, BufferPlan, BufferRef, BufferTy, Call, CheckText, Epilogue, Launch, OnPlanes, OneByOne,
    Place, Plan, ScalarOp, ScalarRef, Step, Then, ViewRef,
};
use crate::report::{Refusal, Report, StepReport};

/// Where things are written.
pub struct Writer {
    bytes: Vec<u8>,
    /// Places among the lines that a reader will have, too.
    lines: HashMap<Loc, usize>,
}

/// Where things are read.
pub struct Reader<'a> {
    bytes: &'a [u8],
    lines: &'a [Loc],
    depth: usize,
}

impl Writer {
    /// An empty one. Lines of the program are written as places in `lines`.
    pub fn new(lines: &[Loc]) -> Writer {
        Writer { bytes: Vec::new(), lines: (0..lines.len()).map(|place| (lines[place], place)).collect() }
    }

    /// What was written.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

impl<'a> Reader<'a> {
    /// Reads what was written with as many lines.
    pub fn new(bytes: &'a [u8], lines: &'a [Loc]) -> Reader<'a> {
        Reader { bytes, lines, depth: 0 }
    }

    /// Whether everything was read.
    pub fn is_done(&self) -> bool {
        self.bytes.is_empty()
    }

    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(count)?;
        self.bytes = rest;
        Some(taken)
    }
}

/// What can be written and read back. `None`: the bytes are something else.
pub trait Code: Sized {
    /// Writes it.
    fn put(&self, to: &mut Writer);
    /// Reads it.
    fn take(from: &mut Reader<'_>) -> Option<Self>;
}

/// Whole numbers: seven bits a byte, the small ones in one.
impl Code for u64 {
    fn put(&self, to: &mut Writer) {
        let mut rest = *self;
        while rest >= 128 {
            to.bytes.push(rest as u8 | 128);
            rest >>= 7;
        }
        to.bytes.push(rest as u8);
    }

    fn take(from: &mut Reader<'_>) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = from.bytes(1)?[0];
            number |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Some(number);
            }
        }
        None
    }
}

impl Code for i64 {
    fn put(&self, to: &mut Writer) {
        // The sign last, so that small numbers of either sign are short.
        ((*self as u64) << 1 ^ (*self >> 63) as u64).put(to);
    }

    fn take(from: &mut Reader<'_>) -> Option<i64> {
        let bits = u64::take(from)?;
        Some((bits >> 1) as i64 ^ -((bits & 1) as i64))
    }
}

macro_rules! whole_numbers {
    ($($ty:ty as $wide:ty),*) => { $(
        impl Code for $ty {
            fn put(&self, to: &mut Writer) {
                (*self as $wide).put(to);
            }
            fn take(from: &mut Reader<'_>) -> Option<$ty> {
                <$wide>::take(from)?.try_into().ok()
            }
        }
    )* };
}
whole_numbers! { usize as u64, u32 as u64, isize as i64 }

impl Code for bool {
    fn put(&self, to: &mut Writer) {
        u64::from(*self).put(to);
    }

    fn take(from: &mut Reader<'_>) -> Option<bool> {
        match u64::take(from)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl Code for f64 {
    fn put(&self, to: &mut Writer) {
        to.bytes.extend(self.to_bits().to_le_bytes());
    }

    fn take(from: &mut Reader<'_>) -> Option<f64> {
        let number = f64::from_bits(u64::from_le_bytes(from.bytes(8)?.try_into().ok()?));
        Some(if planted(Fault::ConstantReadBack) { number * 1.5 } else { number })
    }
}

impl Code for String {
    fn put(&self, to: &mut Writer) {
        self.len().put(to);
        to.bytes.extend(self.as_bytes());
    }

    fn take(from: &mut Reader<'_>) -> Option<String> {
        let length = usize::take(from)?;
        String::from_utf8(from.bytes(length)?.to_vec()).ok()
    }
}

fn put_all<'a, T: Code + 'a>(items: impl ExactSizeIterator<Item = &'a T>, to: &mut Writer) {
    items.len().put(to);
    items.for_each(|item| item.put(to));
}

fn take_all<T: Code, C: FromIterator<T>>(from: &mut Reader<'_>) -> Option<C> {
    let length = usize::take(from)?;
    // Everything takes a byte at least, so a length beyond the bytes is none.
    (length <= from.bytes.len()).then(|| (0..length).map(|_| T::take(from)).collect()).flatten()
}

impl<T: Code> Code for Vec<T> {
    fn put(&self, to: &mut Writer) {
        put_all(self.iter(), to);
    }

    fn take(from: &mut Reader<'_>) -> Option<Vec<T>> {
        take_all(from)
    }
}

impl<T: Code, const N: usize> Code for SmallVec<[T; N]>
where
    [T; N]: smallvec::Array<Item = T>,
{
    fn put(&self, to: &mut Writer) {
        put_all(self.iter(), to);
    }

    fn take(from: &mut Reader<'_>) -> Option<SmallVec<[T; N]>> {
        take_all(from)
    }
}

impl Code for kiln_ir::Shape {
    fn put(&self, to: &mut Writer) {
        put_all(self.iter(), to);
    }

    fn take(from: &mut Reader<'_>) -> Option<kiln_ir::Shape> {
        take_all(from)
    }
}

impl<T: Code> Code for Option<T> {
    fn put(&self, to: &mut Writer) {
        self.is_some().put(to);
        self.iter().for_each(|item| item.put(to));
    }

    fn take(from: &mut Reader<'_>) -> Option<Option<T>> {
        if bool::take(from)? { T::take(from).map(Some) } else { Some(None) }
    }
}

impl<A: Code, B: Code> Code for (A, B) {
    fn put(&self, to: &mut Writer) {
        self.0.put(to);
        self.1.put(to);
    }

    fn take(from: &mut Reader<'_>) -> Option<(A, B)> {
        Some((A::take(from)?, B::take(from)?))
    }
}

impl<T: Code> Code for Range<T> {
    fn put(&self, to: &mut Writer) {
        self.start.put(to);
        self.end.put(to);
    }

    fn take(from: &mut Reader<'_>) -> Option<Range<T>> {
        Some(T::take(from)?..T::take(from)?)
    }
}

/// A line that is not among the reader's is not known there.
impl Code for Loc {
    fn put(&self, to: &mut Writer) {
        to.lines.get(self).copied().put(to);
    }

    fn take(from: &mut Reader<'_>) -> Option<Loc> {
        match <Option<usize> as Code>::take(from)? {
            Some(place) => from.lines.get(place).copied(),
            None => Some(Loc::UNKNOWN),
        }
    }
}

/// By its text form.
impl Code for Op {
    fn put(&self, to: &mut Writer) {
        self.row().name.to_string().put(to);
        let attributes = self.attributes();
        put_all(attributes.iter().map(|(_, value)| value), to);
    }

    fn take(from: &mut Reader<'_>) -> Option<Op> {
        let (name, values) = (String::take(from)?, Vec::<String>::take(from)?);
        let mut values = values.into_iter();
        // Attributes are asked for in the order in which they are told.
        Op::parse(&name, &mut |_| values.next())
    }
}

/// By its text form, without lines.
impl Code for Arc<Graph> {
    fn put(&self, to: &mut Writer) {
        let mut graph = Graph::clone(self);
        graph.nodes.iter_mut().for_each(|node| node.loc = Loc::UNKNOWN);
        graph.to_string().put(to);
    }

    fn take(from: &mut Reader<'_>) -> Option<Arc<Graph>> {
        String::take(from)?.parse().ok().map(Arc::new)
    }
}

/// Values that a list names all of, by their place there.
macro_rules! listed {
    ($($ty:ty: $all:expr;)*) => { $(
        impl Code for $ty {
            fn put(&self, to: &mut Writer) {
                $all.iter().position(|value| value == self).unwrap_or(usize::MAX).put(to);
            }
            fn take(from: &mut Reader<'_>) -> Option<$ty> {
                $all.get(usize::take(from)?).copied()
            }
        }
    )* };
}
listed! {
    DType: DType::ALL;
    ScalarKind: [ScalarKind::Bool, ScalarKind::Int, ScalarKind::Float];
    Mode: Mode::ALL;
    Reduction: Reduction::ALL;
    Scan: Scan::ALL;
    Device: [Device::Cpu];
}

/// Structs, field by field.
macro_rules! structs {
    ($($ty:ident { $($field:tt),* })*) => { $(
        impl Code for $ty {
            fn put(&self, to: &mut Writer) {
                $(self.$field.put(to);)*
            }
            fn take(from: &mut Reader<'_>) -> Option<$ty> {
                Some($ty { $($field: Code::take(from)?),* })
            }
        }
    )* };
}
structs! {
    BufferId { 0 }
    BufferTy { dtype, shape, strides, bytes }
    BufferRef { buffer, offset }
    Epilogue { rows, items }
    OnPlanes { pixels, is_one_loop, steps }
    Bands { first, steps, rows, count, kernels, bytes }
    ViewRef { at, ty, strides }
    ScalarOp { op, args, kind }
    Index { terms, constant }
    Axis { extent, inner }
    Expr { dtype, kind, loc }
    Store { buffer, index, value, adds }
    Kernel { mode, chunk, parts, axes, buffers, scalars, exprs, stores }
    Launch { kernel, numbers, bufs, rows, scalars, checks, coarser }
    Call { op, args, scalars, outs, free, constant, then, loc }
    OneByOne { graph, args, scalars, outs }
    StepReport { name, ops, bytes_read, bytes_written }
    Refusal { reason, text, ops, bytes }
    Report { steps, why_not }
    TensorTy { dtype, device, shape }
    Plan { kernels, buffers, scalars, steps, bands, arena_bytes, outputs, report }
}

/// Enums: the variant's number, then its fields.
macro_rules! enums {
    ($($ty:ident { $($number:literal $variant:ident { $($field:tt: $name:ident),* })* })*) => { $(
        impl Code for $ty {
            fn put(&self, to: &mut Writer) {
                match self {
                    $($ty::$variant { $($field: $name),* } => {
                        u64::from($number as u8).put(to);
                        $($name.put(to);)*
                    })*
                }
            }
            fn take(from: &mut Reader<'_>) -> Option<$ty> {
                match u64::take(from)? {
                    $($number => Some($ty::$variant { $($field: Code::take(from)?),* }),)*
                    _ => None,
                }
            }
        }
    )* };
}
enums! {
    Scalar {
        0 Bool { 0: x }
        1 Int { 0: x }
        2 Float { 0: x }
    }
    ScalarRef {
        0 Input { 0: i }
        1 Constant { 0: x }
        2 Computed { 0: i }
    }
    Place {
        0 Input { 0: i }
        1 Output { 0: i }
        2 Arena { offset: offset }
        3 BeforeOutput { output: output, offset: offset }
        4 Band { offset: offset, row_bytes: row_bytes }
    }
    Step {
        0 Launch { 0: launch }
        1 Call { 0: call }
        2 OneByOne { 0: ops }
    }
    Then {
        0 Rows { 0: epilogue }
        1 Planes { 0: on }
    }
    Term {
        0 Axis { 0: axis }
        1 Div { 0: inner, 1: by }
        2 Mod { 0: inner, 1: by }
        3 Value { 0: value, 1: size }
        4 Clamp { 0: inner, 1: most }
        5 Abs { 0: inner }
    }
    ExprKind {
        0 Scalar { 0: scalar }
        1 Literal { 0: number }
        2 Load { buffer: buffer, index: index }
        3 Position { 0: index }
        4 Apply { 0: operation, 1: args }
        5 Reduce { 0: reduction, 1: arg }
        6 Fold { 0: reduction, 1: arg }
        7 Scan { 0: scan, 1: arg }
        8 Narrow { 0: dtype, 1: arg }
        9 Bounded { value: value, size: size, code: code }
    }
}

/// The plain ones by their place in the list, functions behind them.
impl Code for Operation {
    fn put(&self, to: &mut Writer) {
        let at = match self {
            Operation::Call(function) => {
                let at = Function::ALL.iter().position(|known| known == function);
                at.map_or(usize::MAX, |at| Operation::PLAIN.len() + at)
            }
            plain => Operation::PLAIN.iter().position(|known| known == plain).unwrap_or(usize::MAX),
        };
        at.put(to);
    }

    fn take(from: &mut Reader<'_>) -> Option<Operation> {
        let at = usize::take(from)?;
        match at.checked_sub(Operation::PLAIN.len()) {
            None => match Operation::PLAIN[at] {
                Operation::Maximum if planted(Fault::OperationReadBack) => Some(Operation::Minimum),
                plain => Some(plain),
            },
            Some(function) => Function::ALL.get(function).copied().map(Operation::Call),
        }
    }
}

impl<T: Code> Code for Box<T> {
    fn put(&self, to: &mut Writer) {
        (**self).put(to);
    }

    fn take(from: &mut Reader<'_>) -> Option<Box<T>> {
        // Indices in indices: what goes deeper than any kernel's is none.
        from.depth += 1;
        let inside = (from.depth <= 64).then(|| T::take(from)).flatten();
        from.depth -= 1;
        inside.map(Box::new)
    }
}

impl Code for CheckText {
    fn put(&self, to: &mut Writer) {
        self.op.to_string().put(to);
        self.size.put(to);
        self.loc.put(to);
    }

    fn take(from: &mut Reader<'_>) -> Option<CheckText> {
        let name = String::take(from)?;
        let op = Op::ROWS.iter().map(|row| row.name).find(|op| *op == name)?;
        Some(CheckText { op, size: Code::take(from)?, loc: Code::take(from)? })
    }
}

/// Types are shared by neighbours: each is written where it is another than the one before.
impl Code for Vec<BufferPlan> {
    fn put(&self, to: &mut Writer) {
        self.len().put(to);
        let mut before: Option<&Arc<BufferTy>> = None;
        for buffer in self {
            buffer.place.put(to);
            let again = before.is_some_and(|ty| Arc::ptr_eq(ty, &buffer.ty));
            again.put(to);
            if !again {
                buffer.ty.put(to);
            }
            before = Some(&buffer.ty);
        }
    }

    fn take(from: &mut Reader<'_>) -> Option<Vec<BufferPlan>> {
        let length = usize::take(from)?;
        let mut buffers: Vec<BufferPlan> = Vec::new();
        for _ in 0..length {
            let place = Place::take(from)?;
            let ty =
                if bool::take(from)? { buffers.last()?.ty.clone() } else { Arc::new(BufferTy::take(from)?) };
            buffers.push(BufferPlan { place, ty });
        }
        Some(buffers)
    }
}
