//! Guards: what a recording asks of its inputs.

use std::sync::Arc;

use kiln_aot::trace::{InputVariable, Variable, VariableInfo};
use kiln_ir::{DType, Device, Fault, Layout, Shape, Strides, TensorTy, planted};
use kiln_tensor::internal::TensorState;
use kiln_tensor::{DynamicDim, Ready, Tensor};

use crate::sizes;

/// What must hold of an input when it is first used.
#[derive(Clone, Debug)]
pub(crate) struct Guard {
    pub(crate) variable: Variable,
    /// The earlier input whose storage it shares.
    pub(crate) shares_with: Option<Variable>,
    /// All the rest, which inputs that are alike have in common: of a thousand parameters, most are.
    wanted: Arc<Wanted>,
}

/// What must hold of an input, whichever it is.
#[derive(PartialEq, Debug)]
pub(crate) struct Wanted {
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    pub(crate) shape: Shape,
    pub(crate) strides: Strides,
    pub(crate) requires_grad: bool,
    pub(crate) leaf: bool,
    /// Dims that the user said will change. Not compared: they say what to do about other sizes.
    pub(crate) dynamic: Vec<DynamicDim>,
    /// The same for traces.
    pub(crate) info: Arc<VariableInfo>,
    /// What is left of it when sizes are not looked at.
    pub(crate) form: u64,
}

impl std::ops::Deref for Guard {
    type Target = Wanted;

    fn deref(&self) -> &Wanted {
        &self.wanted
    }
}

impl PartialEq for Guard {
    fn eq(&self, other: &Guard) -> bool {
        self.variable == other.variable && self.shares_with == other.shares_with && self.wants_the_same(other)
    }
}

impl Wanted {
    fn of(tensor: &Tensor, ready: &Ready) -> Wanted {
        let (shape, strides) = (ready.layout().shape.clone(), ready.layout().strides.clone());
        let (requires_grad, leaf) = (tensor.requires_grad(), tensor.is_leaf());
        let ty = TensorTy { dtype: ready.dtype(), device: ready.device(), shape: shape.clone() }.into();
        let layout = Arc::new(Layout { shape: shape.clone(), strides: strides.clone(), offset: 0 });
        let input = Some(InputVariable { layout, requires_grad, leaf });
        let mut wanted = Wanted {
            dtype: ready.dtype(),
            device: ready.device(),
            shape,
            strides,
            requires_grad,
            leaf,
            dynamic: tensor.dynamic_dims(),
            info: Arc::new(VariableInfo { ty, input }),
            form: 0,
        };
        wanted.form = sizes::form_of_input(&wanted);
        wanted
    }

    /// Whether it is exactly what this tensor would ask for.
    fn is_of(&self, tensor: &Tensor, ready: &Ready) -> bool {
        self.holds(tensor, ready) && self.leaf == tensor.is_leaf() && self.dynamic == tensor.dynamic_dims()
    }

    #[inline]
    fn holds(&self, tensor: &Tensor, ready: &Ready) -> bool {
        self.dtype == ready.dtype()
            && self.shape == ready.layout().shape
            && (self.strides == ready.layout().strides || planted(Fault::GuardIgnoresStrides))
            && self.device == ready.device()
            && self.requires_grad == tensor.requires_grad()
            && (!self.requires_grad || self.leaf == tensor.is_leaf())
    }
}

impl Guard {
    /// The guard of an input; `before` is that of the one before it.
    pub(crate) fn new(
        variable: Variable,
        tensor: &Tensor,
        ready: &Ready,
        shares_with: Option<Variable>,
        before: Option<&Guard>,
    ) -> Guard {
        let like = before.map(|before| &before.wanted).filter(|wanted| wanted.is_of(tensor, ready));
        let wanted = like.cloned().unwrap_or_else(|| Arc::new(Wanted::of(tensor, ready)));
        Guard { variable, shares_with, wanted }
    }

    /// The same of an input of another size.
    pub(crate) fn resized(&self, shape: Shape, strides: Strides) -> Guard {
        if shape == self.shape && strides == self.strides {
            return self.clone();
        }
        let ty = TensorTy { dtype: self.dtype, device: self.device, shape: shape.clone() }.into();
        let layout = Arc::new(Layout { shape: shape.clone(), strides: strides.clone(), offset: 0 });
        let input = Some(InputVariable { layout, requires_grad: self.requires_grad, leaf: self.leaf });
        let wanted = Wanted {
            shape,
            strides,
            dynamic: self.dynamic.clone(),
            info: Arc::new(VariableInfo { ty, input }),
            ..**self
        };
        Guard { variable: self.variable, shares_with: self.shares_with, wanted: Arc::new(wanted) }
    }

    /// The same of another variable.
    pub(crate) fn renamed(&self, variable: Variable, shares_with: Option<Variable>) -> Guard {
        Guard { variable, shares_with, wanted: self.wanted.clone() }
    }

    /// Whether an input is as it was; compares without copying.
    pub(crate) fn holds(&self, tensor: &Tensor, shares_with: Option<Variable>) -> bool {
        tensor.try_ready().is_some_and(|ready| self.holds_of(tensor, &ready, shares_with))
    }

    /// [`Guard::holds`] of a tensor whose ready state is at hand.
    #[inline]
    pub(crate) fn holds_of(&self, tensor: &Tensor, ready: &Ready, shares_with: Option<Variable>) -> bool {
        self.shares_with == shares_with && self.wanted.holds(tensor, ready)
    }

    fn wants_the_same(&self, other: &Guard) -> bool {
        Arc::ptr_eq(&self.wanted, &other.wanted) || *self.wanted == *other.wanted
    }

    /// Whether it asks the same of another variable.
    pub(crate) fn is_like(&self, other: &Guard) -> bool {
        self.shares_with == other.shares_with && self.wants_the_same(other)
    }
}
