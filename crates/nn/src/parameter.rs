//! What modules own besides other modules: parameters, buffers, and the flag that tells training from
//! evaluation.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};

use kiln_tensor::{Result, Tensor};

/// A tensor that training changes: a leaf that requires a gradient. Used like the tensor it is.
#[derive(Clone)]
pub struct Parameter(Tensor);

impl Parameter {
    /// Makes a tensor a parameter. One that was computed is cut off from its history.
    #[track_caller]
    pub fn new(tensor: Tensor) -> Result<Parameter> {
        let tensor = if tensor.is_leaf() { tensor } else { tensor.detach()? };
        tensor.requires_grad_(true)?;
        Ok(Parameter(tensor))
    }

    /// The tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.0
    }
}

/// A tensor that belongs to a module's state but is not trained, such as a running mean.
#[derive(Clone)]
pub struct Buffer(Tensor, Persistence);

/// Whether a buffer is part of what is saved.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Persistence {
    Saved,
    Transient,
}

impl Buffer {
    /// Makes a tensor a buffer, which `state_dict` has.
    pub fn new(tensor: Tensor) -> Buffer {
        Buffer(tensor, Persistence::Saved)
    }

    /// Makes a tensor a buffer that `state_dict` leaves out: one that can be computed again, such as a mask.
    pub fn transient(tensor: Tensor) -> Buffer {
        Buffer(tensor, Persistence::Transient)
    }

    /// Whether `state_dict` has it.
    pub fn is_persistent(&self) -> bool {
        self.1 == Persistence::Saved
    }

    /// The tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.0
    }
}

macro_rules! is_a_tensor {
    ($($Type:ident),*) => {
        $(
            impl Deref for $Type {
                type Target = Tensor;
                fn deref(&self) -> &Tensor {
                    &self.0
                }
            }
            impl AsRef<Tensor> for $Type {
                fn as_ref(&self) -> &Tensor {
                    &self.0
                }
            }
            // Its type, not its elements: debugging must not make a captured program wait for values.
            impl fmt::Debug for $Type {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    write!(f, concat!(stringify!($Type), "({})"), self.0.ty())
                }
            }
        )*
    };
}
is_a_tensor!(Parameter, Buffer);

/// Whether a module is being trained: a field of modules that behave differently then, set by
/// [`Module::train`](crate::Module::train) and [`Module::eval`](crate::Module::eval) of whatever model they
/// are in. New modules are in training.
#[derive(Debug)]
pub struct Training(AtomicBool);

impl Training {
    /// Whether the module is being trained.
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Switches between training and evaluation.
    pub fn set(&self, on: bool) {
        self.0.store(on, Ordering::Relaxed);
    }
}

impl Default for Training {
    fn default() -> Training {
        Training(AtomicBool::new(true))
    }
}
