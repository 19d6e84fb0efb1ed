//! The types of values in a graph: tensors, host scalars, lists of tensors.

use std::fmt;

use smallvec::SmallVec;

use crate::{DType, Device, ListTy, ScalarKind, Shape};

/// The type of a tensor: everything a type rule may look at. Strides are not part of it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct TensorTy {
    /// Element type.
    pub dtype: DType,
    /// Where it lives.
    pub device: Device,
    /// Its sizes.
    pub shape: Shape,
}

impl TensorTy {
    /// A tensor type on the CPU.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> TensorTy {
        TensorTy { dtype, device: Device::Cpu, shape: shape.into() }
    }

    /// Bytes of a dense tensor of this type.
    pub fn bytes(&self) -> usize {
        self.shape.numel() * self.dtype.size()
    }
}

/// The type of a value in a graph.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Ty {
    /// A tensor.
    Tensor(TensorTy),
    /// A number that is known only when the program runs (a learning rate, a seed).
    Scalar(ScalarKind),
    /// A list of tensors, operated on as a whole by the `foreach_*` forms.
    List(ListTy),
}

/// The types of an op's results.
pub type Tys = SmallVec<[Ty; 1]>;

impl Ty {
    /// A tensor type on the CPU.
    pub fn tensor(dtype: DType, shape: impl Into<Shape>) -> Ty {
        Ty::Tensor(TensorTy::new(dtype, shape))
    }

    /// The tensor type, unless this is a scalar or a list.
    pub fn as_tensor(&self) -> Option<&TensorTy> {
        match self {
            Ty::Tensor(t) => Some(t),
            Ty::Scalar(_) | Ty::List(_) => None,
        }
    }

    /// The elements' types, if this is a list.
    pub fn as_list(&self) -> Option<&ListTy> {
        match self {
            Ty::List(l) => Some(l),
            Ty::Tensor(_) | Ty::Scalar(_) => None,
        }
    }

    /// Whether values of this type are host numbers.
    pub fn is_scalar(&self) -> bool {
        matches!(self, Ty::Scalar(_))
    }
}

impl fmt::Display for TensorTy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)?;
        match self.device {
            Device::Cpu => Ok(()),
            device => write!(f, "@{device}"),
        }
    }
}

impl fmt::Display for Ty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ty::Tensor(t) => write!(f, "{t}"),
            Ty::Scalar(kind) => f.write_str(kind.name()),
            Ty::List(items) => write!(f, "{items}"),
        }
    }
}

impl fmt::Debug for TensorTy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for Ty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<TensorTy> for Ty {
    fn from(t: TensorTy) -> Ty {
        Ty::Tensor(t)
    }
}
