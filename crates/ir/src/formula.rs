//! Formulas: gradient rules and decompositions written as mathematics.
//!
//! A [`Term`] stands for a value of an emitter. Operators and functions of terms emit their ops in the order in which
//! Rust evaluates them: tanh's rule is `g * (1.0 - y * y)`. An op that fails is remembered, and what follows it is not
//! emitted; the error comes out where the formula ends.

use std::cell::RefCell;
use std::ops;

use crate::{
    Approximate, DType, Device, Dims, Division, Emit, EmitExt, Error, Op, Pairs, Reduction, Result, Scalar,
    ScatterReduce, Shape, Sizes, Ty, Value,
};

/// What terms are written on.
trait Sheet {
    fn emit(&self, op: Op, args: &[Value]) -> Value;
    fn ty(&self, value: Value) -> Ty;
}

/// An emitter that terms can share, with the first error.
pub(crate) struct Paper<'e> {
    cx: RefCell<&'e mut dyn Emit>,
    failed: RefCell<Option<Error>>,
}

impl Sheet for Paper<'_> {
    fn emit(&self, op: Op, args: &[Value]) -> Value {
        let mut failed = self.failed.borrow_mut();
        if failed.is_none() {
            match self.cx.borrow_mut().emit_one(op, args) {
                Ok(value) => return value,
                Err(error) => *failed = Some(error),
            }
        }
        // A value that is there; nobody will see it, as the formula ends with the error.
        args.first().copied().unwrap_or(Value(0))
    }

    fn ty(&self, value: Value) -> Ty {
        self.cx.borrow().ty(value).clone()
    }
}

impl<'e> Paper<'e> {
    pub(crate) fn new(cx: &'e mut dyn Emit) -> Paper<'e> {
        Paper { cx: RefCell::new(cx), failed: RefCell::new(None) }
    }

    /// A value as a term.
    pub(crate) fn term(&self, value: Value) -> Term<'_> {
        Term { sheet: self, value }
    }

    /// The end of the formula: its first error, if there was one.
    pub(crate) fn end(self) -> Result<()> {
        match self.failed.into_inner() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// A value in a formula.
#[derive(Copy, Clone)]
pub(crate) struct Term<'p> {
    sheet: &'p dyn Sheet,
    value: Value,
}

/// What may stand beside a term: another one, or a number.
pub(crate) trait Operand {
    fn beside(self, term: Term<'_>) -> Value;
}

impl Operand for Term<'_> {
    fn beside(self, _: Term<'_>) -> Value {
        self.value
    }
}

impl Operand for f64 {
    fn beside(self, term: Term<'_>) -> Value {
        term.sheet.emit(Op::Constant { value: Scalar::Float(self) }, &[])
    }
}

impl Operand for i64 {
    fn beside(self, term: Term<'_>) -> Value {
        term.sheet.emit(Op::Constant { value: Scalar::Int(self) }, &[])
    }
}

impl<'p> Term<'p> {
    /// The value it stands for.
    pub(crate) fn value(self) -> Value {
        self.value
    }

    fn then(self, op: Op, args: &[Value]) -> Term<'p> {
        Term { value: self.sheet.emit(op, args), ..self }
    }

    /// A number on the same paper.
    pub(crate) fn number(self, number: impl Operand) -> Term<'p> {
        Term { value: number.beside(self), ..self }
    }

    /// Whether it is a number and no tensor.
    pub(crate) fn is_number(self) -> bool {
        self.sheet.ty(self.value).is_scalar()
    }

    /// It and others behind it, joined along a dim.
    pub(crate) fn join(self, others: &[Term<'p>], dim: usize) -> Term<'p> {
        if others.is_empty() {
            return self;
        }
        let all: Vec<Value> = [self].iter().chain(others).map(|term| term.value).collect();
        self.then(Op::Cat { dim }, &all)
    }

    /// Its shape; a number has that of a 0-d tensor, a list that of its first element.
    pub(crate) fn shape(self) -> Shape {
        match self.sheet.ty(self.value) {
            Ty::Tensor(t) => t.shape,
            Ty::Scalar(_) => Shape::scalar(),
            Ty::List(items) => items.first().map(|t| t.shape.clone()).unwrap_or_default(),
        }
    }

    /// Its dtype; a list's is that of its first element.
    pub(crate) fn dtype(self) -> DType {
        match self.sheet.ty(self.value) {
            Ty::Tensor(t) => t.dtype,
            Ty::Scalar(kind) => kind.dtype(),
            Ty::List(items) => items.first().map_or(DType::F32, |t| t.dtype),
        }
    }

    /// Integers as f32, floats and numbers as they are.
    pub(crate) fn float(self) -> Term<'p> {
        let is_whole = match self.sheet.ty(self.value) {
            Ty::Tensor(t) => !t.dtype.is_float(),
            Ty::Scalar(_) => false,
            Ty::List(items) => items.kinds().all(|t| !t.dtype.is_float()),
        };
        if is_whole { self.to(DType::F32) } else { self }
    }
}

macro_rules! define_terms {
    ($( $(#[doc = $doc:literal])*
        [$class:ident $method:ident $inplace:ident] $name:literal $Variant:ident
        ($($arg:ident),*) ($($optional:ident),*) { $($attr:ident : $AttrTy:ty),* } $body:tt;
    )*) => {
        #[allow(dead_code, reason = "one for each row")]
        impl<'p> Term<'p> {
            $( function! { $(#[doc = $doc])* $method $Variant ($($arg),*) { $($attr : $AttrTy),* } } )*
        }
    };
}
// Rows whose first operand is a term; those of lists and of nothing are left to the emitter.
macro_rules! function {
    ($(#[doc = $doc:literal])* $method:ident $Variant:ident () $attributes:tt) => {};
    ($(#[doc = $doc:literal])* $method:ident $Variant:ident (tensors) $attributes:tt) => {};
    ($(#[doc = $doc:literal])* $method:ident $Variant:ident ($first:ident $(, $arg:ident)*)
     { $($attr:ident : $AttrTy:ty),* }) => {
        $(#[doc = $doc])*
        pub(crate) fn $method(self $(, $arg: impl Operand)* $(, $attr: $AttrTy)*) -> Term<'p> {
            $( let $arg = $arg.beside(self); )*
            self.then(Op::$Variant { $($attr),* }, &[self.value $(, $arg)*])
        }
    };
}
crate::op_table!(define_terms);

macro_rules! operators {
    ($($Trait:ident $method:ident $Variant:ident;)*) => { $(
        impl<'p> ops::$Trait for Term<'p> {
            type Output = Term<'p>;

            fn $method(self, other: Term<'p>) -> Term<'p> {
                self.then(Op::$Variant {}, &[self.value, other.value])
            }
        }

        impl<'p> ops::$Trait<f64> for Term<'p> {
            type Output = Term<'p>;

            fn $method(self, other: f64) -> Term<'p> {
                let other = other.beside(self);
                self.then(Op::$Variant {}, &[self.value, other])
            }
        }

        impl<'p> ops::$Trait<Term<'p>> for f64 {
            type Output = Term<'p>;

            fn $method(self, other: Term<'p>) -> Term<'p> {
                let number = self.beside(other);
                other.then(Op::$Variant {}, &[number, other.value])
            }
        }
    )* };
}
operators! {
    Add add Add;
    Sub sub Sub;
    Mul mul Mul;
    Div div Div;
}

impl<'p> ops::Neg for Term<'p> {
    type Output = Term<'p>;

    fn neg(self) -> Term<'p> {
        self.then(Op::Neg {}, &[self.value])
    }
}

/// A gradient rule, of the result's gradient, the operands and, behind a semicolon, the result: a formula for each
/// operand, which is looked at only where that operand wants its gradient. Further operands have none. In a row, or
/// with the emitter and the call in front as what a function returns.
///
/// ```text
/// rule!(|g, _x; y| [g * (1.0 - y * y)])
/// rule!(|g, x, y| { let share = g / y; [share, -share * (x / y)] })
/// rule!(cx, call, |g, _x; y| [y * (g - sum_along(g * y, dim))])
/// ```
macro_rules! rule {
    (|$($formula:tt)*) => {
        Grad::Fn(|cx, call| $crate::formula::rule!(cx, call, |$($formula)*))
    };
    ($cx:expr, $call:expr, |$g:ident $(, $x:ident)* $(; $y:ident)?| [$($grad:expr),+ $(,)?]) => {
        $crate::formula::rule!($cx, $call, |$g $(, $x)* $(; $y)?| { [$($grad),+] })
    };
    ($cx:expr, $call:expr, |$g:ident $(, $x:ident)* $(; $y:ident)?|
     { $(let $name:pat = $value:expr;)* [$($grad:expr),+ $(,)?] }) => {{
        let (paper, call) = ($crate::formula::Paper::new($cx), $call);
        let mut grads: Vec<Option<Value>> = Vec::with_capacity(call.inputs.len());
        if let (Some(g), [$($x,)* ..]) = (call.g(), call.inputs) {
            let $g = paper.term(g);
            $( let $x = paper.term(*$x); )*
            $( let $y = paper.term(call.y()); )?
            $( let $name = $value; )*
            $( grads.push(if call.wants(grads.len()) { Some(($grad).value()) } else { None }); )+
        }
        grads.resize(call.inputs.len(), None);
        paper.end()?;
        Ok(grads)
    }};
}
pub(crate) use rule;

/// A decomposition, of the operands; `promoted` ones were converted to the dtype of the result first. In a row, or with
/// the emitter and the operands in front as what a function returns. Behind a semicolon: all further operands.
///
/// ```text
/// steps!(|x| x * x.sigmoid())
/// steps!(promoted |x, y| x.maximum(y) + (-(x - y).abs()).exp().log1p())
/// steps!(cx, args, |x, eps| normalised(op, x, eps))
/// ```
macro_rules! steps {
    (|$($x:ident),*| $body:expr) => {
        Some(|cx, _, args| $crate::formula::steps!(cx, args, |$($x),*| $body))
    };
    (promoted |$($x:ident),*| $body:expr) => {
        Some(|cx, op, args| {
            let args = $crate::table::functions::promoted(cx, op, args)?;
            $crate::formula::steps!(cx, &args[..], |$($x),*| $body)
        })
    };
    ($cx:expr, $args:expr, |$($x:ident),* $(; $others:ident)?| $body:expr) => {{
        let paper = $crate::formula::Paper::new($cx);
        let [$($x,)* _others @ ..] = $args else { unreachable!("the type rule counts operands") };
        $( let $x = paper.term(*$x); )*
        $( let $others = _others.iter().map(|&value| paper.term(value)); )?
        let value = $body.value();
        paper.end()?;
        Ok(smallvec::smallvec![value])
    }};
}
pub(crate) use steps;
