//! Operators: `(&x * 2.0 + 1.0).tanh()`. They can't return `Result` (Rust does not let us define
//! `Result + Result`), so they return an [`Expr`], which takes operators and methods and ends in one `?`.

use std::ops::{Add, Div, Mul, Neg, Sub};

use kiln_ir::{Loc, Op, Result, Scalar};

use crate::Tensor;
use crate::dispatch::dispatch_tensor;
use crate::hook::Arg;
use crate::methods::Operand;

/// The result of an operator: a tensor, or the first error of the expression. It ends with [`ok`](Expr::ok), since
/// stable Rust has no `?` for types of ours; the compiler's message names the type, so the name says it:
/// "the `?` operator cannot be applied to type `ExprEndsWithOk`". In programs it goes by [`Expr`](crate::Expr).
///
/// ```
/// # use kiln_tensor::Tensor;
/// # fn main() -> kiln_tensor::Result<()> {
/// let x = Tensor::from(vec![0.0f32]);
/// let y = (&x + 1.0).exp().ok()?;
/// # Ok(()) }
/// ```
#[must_use = "an expression may have failed: end it with .ok()?"]
pub struct ExprEndsWithOk(Result<Tensor>);

use ExprEndsWithOk as Expr;

impl Expr {
    /// The tensor, or the first error of the expression.
    pub fn ok(self) -> Result<Tensor> {
        self.0
    }
}

impl From<Tensor> for Expr {
    fn from(t: Tensor) -> Expr {
        Expr(Ok(t))
    }
}

/// What may stand beside an operator.
pub trait IntoOperand {
    /// Calls `body` with the operand, or returns its error.
    fn with<R>(self, body: impl FnOnce(Arg<'_>) -> Result<R>) -> Result<R>;
}

impl IntoOperand for &Tensor {
    fn with<R>(self, body: impl FnOnce(Arg<'_>) -> Result<R>) -> Result<R> {
        body(Arg::Tensor(self))
    }
}
impl IntoOperand for Tensor {
    fn with<R>(self, body: impl FnOnce(Arg<'_>) -> Result<R>) -> Result<R> {
        body(Arg::Tensor(&self))
    }
}
impl IntoOperand for Expr {
    fn with<R>(self, body: impl FnOnce(Arg<'_>) -> Result<R>) -> Result<R> {
        body(Arg::Tensor(&self.0?))
    }
}
impl IntoOperand for &Expr {
    fn with<R>(self, body: impl FnOnce(Arg<'_>) -> Result<R>) -> Result<R> {
        match &self.0 {
            Ok(t) => body(Arg::Tensor(t)),
            Err(e) => Err(kiln_ir::Error::State(e.to_string())),
        }
    }
}
macro_rules! number_operand {
    ($($ty:ty),*) => {
        $(impl IntoOperand for $ty {
            fn with<R>(self, body: impl FnOnce(Arg<'_>) -> Result<R>) -> Result<R> {
                body(Arg::Number(Scalar::from(self)))
            }
        })*
    };
}
number_operand!(f32, f64, i32, i64);

macro_rules! operators {
    ($($Trait:ident $method:ident $Op:ident),*) => {
        $(
            impl<R: IntoOperand> $Trait<R> for &Tensor {
                type Output = Expr;
                #[track_caller]
                fn $method(self, right: R) -> Expr {
                    let loc = Loc::caller();
                    Expr(right.with(|right| dispatch_tensor(&Op::$Op {}, &[Arg::Tensor(self), right], false, loc)))
                }
            }
            impl<R: IntoOperand> $Trait<R> for Tensor {
                type Output = Expr;
                #[track_caller]
                fn $method(self, right: R) -> Expr {
                    $Trait::$method(&self, right)
                }
            }
            impl<R: IntoOperand> $Trait<R> for Expr {
                type Output = Expr;
                #[track_caller]
                fn $method(self, right: R) -> Expr {
                    match self.0 {
                        Ok(left) => $Trait::$method(&left, right),
                        Err(error) => Expr(Err(error)),
                    }
                }
            }
            // One float and one integer type only: a bare literal must not be ambiguous.
            operators!(@left $Trait $method $Op f64);
            operators!(@left $Trait $method $Op i64);
        )*
    };
    (@left $Trait:ident $method:ident $Op:ident $ty:ty) => {
        impl $Trait<&Tensor> for $ty {
            type Output = Expr;
            #[track_caller]
            fn $method(self, right: &Tensor) -> Expr {
                let args = [Arg::Number(Scalar::from(self)), Arg::Tensor(right)];
                Expr(dispatch_tensor(&Op::$Op {}, &args, false, Loc::caller()))
            }
        }
        impl $Trait<Tensor> for $ty {
            type Output = Expr;
            #[track_caller]
            fn $method(self, right: Tensor) -> Expr {
                $Trait::$method(self, &right)
            }
        }
        impl $Trait<Expr> for $ty {
            type Output = Expr;
            #[track_caller]
            fn $method(self, right: Expr) -> Expr {
                match right.0 {
                    Ok(right) => $Trait::$method(self, &right),
                    Err(error) => Expr(Err(error)),
                }
            }
        }
    };
}
operators!(Add add Add, Sub sub Sub, Mul mul Mul, Div div Div);

impl Neg for &Tensor {
    type Output = Expr;
    #[track_caller]
    fn neg(self) -> Expr {
        Expr(dispatch_tensor(&Op::Neg {}, &[Arg::Tensor(self)], false, Loc::caller()))
    }
}

impl Neg for Expr {
    type Output = Expr;
    #[track_caller]
    fn neg(self) -> Expr {
        match self.0 {
            Ok(t) => -&t,
            Err(error) => Expr(Err(error)),
        }
    }
}

macro_rules! define_expr_methods {
    ($( $(#[doc = $doc:literal])*
        [$class:ident $method:ident $inplace:ident] $name:literal $Variant:ident
        ($($arg:ident),*) ($($optional:ident),*) { $($attr:ident : $AttrTy:ty),* } $body:tt;
    )*) => {
        $( expr_method! { $(#[doc = $doc])* [$class $method] $Variant ($($arg),*) } )*
    };
}
macro_rules! expr_method {
    // The operators' own names stay with the operators.
    ($(#[doc = $doc:literal])* [pointwise add] $($rest:tt)*) => {};
    ($(#[doc = $doc:literal])* [pointwise sub] $($rest:tt)*) => {};
    ($(#[doc = $doc:literal])* [pointwise mul] $($rest:tt)*) => {};
    ($(#[doc = $doc:literal])* [pointwise div] $($rest:tt)*) => {};
    ($(#[doc = $doc:literal])* [pointwise neg] $($rest:tt)*) => {};
    ($(#[doc = $doc:literal])* [pointwise $method:ident] $Variant:ident ($x:ident $(, $arg:ident)*)) => {
        impl Expr {
            $(#[doc = $doc])*
            #[track_caller]
            #[allow(clippy::extra_unused_lifetimes, reason = "ops of one operand have none to borrow")]
            pub fn $method<'a>(self $(, $arg: impl Into<Operand<'a>>)*) -> Expr {
                match self.0 {
                    Ok(x) => Expr(x.$method($($arg),*)),
                    Err(error) => Expr(Err(error)),
                }
            }
        }
    };
    ($($other:tt)*) => {};
}
kiln_ir::op_table!(define_expr_methods);

impl Expr {
    /// The sum of all elements.
    #[track_caller]
    pub fn sum(self) -> Expr {
        match self.0 {
            Ok(x) => Expr(x.sum()),
            Err(error) => Expr(Err(error)),
        }
    }

    /// The mean of all elements.
    #[track_caller]
    pub fn mean(self) -> Expr {
        match self.0 {
            Ok(x) => Expr(x.mean()),
            Err(error) => Expr(Err(error)),
        }
    }

    /// Gaussian error linear unit, exact form.
    #[track_caller]
    pub fn gelu(self) -> Expr {
        match self.0 {
            Ok(x) => Expr(x.gelu()),
            Err(error) => Expr(Err(error)),
        }
    }

    /// exp(x) / Σ exp(x) along a dim.
    #[track_caller]
    pub fn softmax(self, dim: i64) -> Expr {
        match self.0 {
            Ok(x) => Expr(x.softmax(dim)),
            Err(error) => Expr(Err(error)),
        }
    }
}
