//! Pointwise ops over whole lists of tensors, made from the op table: `foreach::mul_(&params, 0.9)`. While a
//! program is captured each is one node, however long the list; optimizers are written with these.

use kiln_ir::{Error, Loc, Op, Result, Scalar, Why};

use crate::TensorList;
use crate::dispatch::dispatch;
use crate::hook::{Arg, Output};
pub use crate::pieces::each_piece;

/// The second operand of a list op: a list or one number for all.
pub enum ListOperand<'a> {
    /// A list of the same length.
    List(&'a TensorList),
    /// A number.
    Number(Scalar),
}

impl ListOperand<'_> {
    fn arg(&self) -> Arg<'_> {
        match self {
            ListOperand::List(l) => Arg::List(l),
            ListOperand::Number(x) => Arg::Number(*x),
        }
    }
}

impl<'a> From<&'a TensorList> for ListOperand<'a> {
    fn from(l: &'a TensorList) -> ListOperand<'a> {
        ListOperand::List(l)
    }
}

impl<T: Into<Scalar>> From<T> for ListOperand<'_> {
    fn from(x: T) -> Self {
        ListOperand::Number(x.into())
    }
}

fn list(output: Output, op: &Op, loc: Loc) -> Result<TensorList> {
    match output {
        Output::List(l) => Ok(l),
        Output::Tensor(_) => {
            Err(Error::op(op.name(), Why::Operand { argument: "x", expected: "a list" }, loc))
        }
    }
}

macro_rules! define_foreach {
    ($( $(#[doc = $doc:literal])*
        [$class:ident $method:ident $inplace:ident] $name:literal $Variant:ident
        ($($arg:ident),*) ($($optional:ident),*) { $($attr:ident : $AttrTy:ty),* } $body:tt;
    )*) => {
        $( foreach! { $(#[doc = $doc])* [$class $method $inplace] $Variant ($($arg),*) } )*
    };
}
macro_rules! foreach {
    ($(#[doc = $doc:literal])* [pointwise $method:ident $inplace:ident] $Variant:ident ($x:ident $(, $arg:ident)*)) => {
        $(#[doc = $doc])*
        ///
        /// For every tensor of the list.
        #[track_caller]
        #[allow(clippy::extra_unused_lifetimes, reason = "ops of one operand have none to borrow")]
        pub fn $method<'a>($x: &TensorList $(, $arg: impl Into<ListOperand<'a>>)*) -> Result<TensorList> {
            let (op, loc) = (Op::$Variant {}, Loc::caller());
            $(let $arg = $arg.into();)*
            list(dispatch(&op, &[Arg::List($x) $(, $arg.arg())*], false, loc)?, &op, loc)
        }

        $(#[doc = $doc])*
        ///
        /// For every tensor of the list, in place.
        #[track_caller]
        #[allow(clippy::extra_unused_lifetimes, reason = "as above")]
        pub fn $inplace<'a>($x: &TensorList $(, $arg: impl Into<ListOperand<'a>>)*) -> Result<()> {
            let (op, loc) = (Op::$Variant {}, Loc::caller());
            $(let $arg = $arg.into();)*
            dispatch(&op, &[Arg::List($x) $(, $arg.arg())*], true, loc).map(drop)
        }
    };
    ($($other:tt)*) => {};
}
kiln_ir::op_table!(define_foreach);

/// x + alpha · y, for every tensor of the list, in place.
#[track_caller]
pub fn add_scaled_<'a>(
    x: &TensorList,
    y: impl Into<ListOperand<'a>>,
    alpha: impl Into<Scalar>,
) -> Result<()> {
    dispatch(&Op::Add {}, &[Arg::List(x), y.into().arg(), Arg::Number(alpha.into())], true, Loc::caller())
        .map(drop)
}

/// x + alpha · y, for every tensor of the list.
#[track_caller]
pub fn add_scaled<'a>(
    x: &TensorList,
    y: impl Into<ListOperand<'a>>,
    alpha: impl Into<Scalar>,
) -> Result<TensorList> {
    let (op, loc) = (Op::Add {}, Loc::caller());
    list(dispatch(&op, &[Arg::List(x), y.into().arg(), Arg::Number(alpha.into())], false, loc)?, &op, loc)
}

/// Each tensor of the list takes the values of the other list's.
#[track_caller]
pub fn copy_<'a>(x: &TensorList, src: impl Into<ListOperand<'a>>) -> Result<()> {
    dispatch(&Op::Copy {}, &[Arg::List(x), src.into().arg()], true, Loc::caller()).map(drop)
}
