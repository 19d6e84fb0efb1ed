//! [`Emit`]: the interface against which gradients and decompositions are written, once. Eager autograd runs
//! what is emitted; capture and passes record it.

use smallvec::SmallVec;

use crate::{
    Approximate, Body, Custom, DType, Device, Dims, Division, Op, Order, Pairs, Reduction, Result, Scalar,
    ScatterReduce, Shape, Sizes, TensorTy, Ty,
};

/// A value in a graph, or in whatever an emitter keeps.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Value(pub u32);

impl Value {
    /// The value's index in tables.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The results of an op.
pub type Values = SmallVec<[Value; 2]>;

/// Takes ops one by one.
pub trait Emit {
    /// Adds an op and returns its results.
    fn emit(&mut self, op: Op, args: &[Value]) -> Result<Values>;
    /// The type of a value.
    fn ty(&self, value: Value) -> &Ty;
}

macro_rules! define_builders {
    ($( $(#[doc = $doc:literal])*
        [$class:ident $method:ident $inplace:ident] $name:literal $Variant:ident
        ($($arg:ident),*) ($($optional:ident),*) { $($attr:ident : $AttrTy:ty),* } $body:tt;
    )*) => {
        /// One method per row of the op table, for emitters (optional operands left out).
        pub trait EmitExt: Emit {
            $( builder! { $(#[doc = $doc])* [$class] $method $Variant ($($arg),*) { $($attr : $AttrTy),* } } )*

            /// Emits an op that has one result.
            fn emit_one(&mut self, op: Op, args: &[Value]) -> Result<Value> {
                Ok(self.emit(op, args)?[0])
            }

            /// A number of the program text.
            fn number(&mut self, value: impl Into<Scalar>) -> Result<Value> {
                self.emit_one(Op::Constant { value: value.into() }, &[])
            }

            /// The tensor type of a value that is known to be a tensor (for a list: its first element's).
            fn tensor_ty(&self, value: Value) -> TensorTy {
                match self.ty(value) {
                    Ty::Tensor(t) => t.clone(),
                    Ty::Scalar(kind) => TensorTy::new(kind.dtype(), ()),
                    Ty::List(items) => items.first().cloned().unwrap_or(TensorTy::new(DType::F32, ())),
                }
            }
        }
        impl<E: Emit + ?Sized> EmitExt for E {}
    };
}
// `cat` and `list` take any number of operands: their builders take a slice. `constant` is `number`.
macro_rules! builder {
    ($(#[doc = $doc:literal])* [constant] $($rest:tt)*) => {};
    ($(#[doc = $doc:literal])* [$class:ident] $method:ident $Variant:ident (tensors) { $($attr:ident : $AttrTy:ty),* }) => {
        $(#[doc = $doc])*
        fn $method(&mut self, tensors: &[Value], $($attr: $AttrTy),*) -> Result<Value> {
            self.emit_one(Op::$Variant { $($attr),* }, tensors)
        }
    };
    ($(#[doc = $doc:literal])* [$class:ident] $method:ident $Variant:ident ($($arg:ident),*) { $($attr:ident : $AttrTy:ty),* }) => {
        $(#[doc = $doc])*
        fn $method(&mut self, $($arg: Value,)* $($attr: $AttrTy),*) -> Result<Value> {
            self.emit_one(Op::$Variant { $($attr),* }, &[$($arg),*])
        }
    };
}
crate::op_table!(define_builders);
