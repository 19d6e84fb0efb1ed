//! [`Forward`]: what a module computes.

use std::sync::Arc;

use kiln_ir::Loc;
use kiln_tensor::{Result, Tensor};

use crate::Module;

/// What a module computes. Apart from [`Module`], since the same module may take different inputs, and models
/// differ in how many they take: several are a tuple.
///
/// ```
/// use kiln_nn::{Forward, Linear, Module};
/// use kiln_tensor::{Device, Result, Tensor};
///
/// #[derive(Module)]
/// struct Bilinear { left: Linear, right: Linear }
///
/// impl Forward<(Tensor, Tensor)> for Bilinear {
///     type Output = Tensor;
///     fn forward(&self, (x, y): &(Tensor, Tensor)) -> Result<Tensor> {
///         self.left.forward(x)?.mul(&self.right.forward(y)?)
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let model = Bilinear { left: Linear::new(3, 2)?, right: Linear::new(5, 2)? };
/// let (x, y) = (Tensor::ones([4, 3], &Device::Cpu)?, Tensor::ones([4, 5], &Device::Cpu)?);
/// assert_eq!(model.forward(&(x, y))?.shape().to_vec(), [4, 2]);
/// # Ok(()) }
/// ```
pub trait Forward<In: ?Sized = Tensor> {
    /// The result.
    type Output;

    /// Computes the result for an input.
    // Without `#[track_caller]`, which impls would inherit: errors name the innermost line of a user's model.
    // Kiln's own layers have it, since that line is their caller's.
    fn forward(&self, input: &In) -> Result<Self::Output>;
}

macro_rules! delegate_forward {
    ($($Pointer:ty),*) => {
        $(impl<In: ?Sized, M: Forward<In> + ?Sized> Forward<In> for $Pointer {
            type Output = M::Output;
            #[track_caller]
            fn forward(&self, input: &In) -> Result<M::Output> {
                (**self).forward(input)
            }
        })*
    };
}
delegate_forward!(&M, Box<M>, Arc<M>);

/// The forward of layers without hooks, from one tensor to one tensor.
macro_rules! forward {
    ($($Type:ty: |$this:ident, $x:ident| $body:expr;)*) => {
        $(impl $crate::Forward for $Type {
            type Output = kiln_tensor::Tensor;
            #[track_caller]
            fn forward(&self, $x: &kiln_tensor::Tensor) -> kiln_tensor::Result<kiln_tensor::Tensor> {
                let $this = self;
                $body
            }
        })*
    };
}
pub(crate) use forward;

/// A module from one tensor to one tensor, whichever its type: `Box<dyn Layer>`, which is a [`Forward`] again.
/// Every module with such a [`Forward`] is one.
pub trait Layer: Module {
    /// [`Forward::forward`] on behalf of the line `caller`.
    fn forward_from(&self, x: &Tensor, caller: Loc) -> Result<Tensor>;
}

// A call through a vtable loses its caller: `#[track_caller]` then names the method itself. So the caller comes
// as an argument, and what this line asks for is put down to the caller's.
impl<M: Module + Forward<Output = Tensor>> Layer for M {
    fn forward_from(&self, x: &Tensor, caller: Loc) -> Result<Tensor> {
        let _behalf = caller.on_behalf(crate::folder());
        self.forward(x)
    }
}

impl Forward for dyn Layer + '_ {
    type Output = Tensor;
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_from(x, Loc::caller())
    }
}
