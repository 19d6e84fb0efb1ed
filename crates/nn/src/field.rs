//! What the fields of a module may be: parameters, buffers, modules, and options and lists of those.

use std::marker::PhantomData;

use crate::{Buffer, Hooks, Module, Parameter, Training, Visitor};

/// A field that `#[derive(Module)]` visits. A type that is none of these is refused with a hint:
///
/// ```compile_fail,E0277
/// use kiln_nn::{Linear, Module};
///
/// #[derive(Module)]
/// struct Attention {
///     proj: Linear,
///     heads: usize, // needs #[module(skip)]
/// }
/// ```
///
/// ```compile_fail,E0277
/// use kiln_nn::Module;
/// use kiln_tensor::Tensor;
///
/// #[derive(Module)]
/// struct Scale {
///     weight: Tensor, // a parameter, or a buffer?
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is neither a parameter, nor a buffer, nor a module",
    label = "can't be visited as part of a module",
    note = "a tensor that is trained is a `Parameter`, one that is only kept is a `Buffer`",
    note = "modules, and `Option`, `Vec`, arrays, `Box` and `Arc` of them are visited as they are",
    note = "mark anything else `#[module(skip)]`"
)]
pub trait Field: Send + Sync {
    /// Shows the visitor what this field holds, under the field's name.
    fn visit_field(&self, name: &str, visitor: &mut dyn Visitor);
}

impl<M: Module> Field for M {
    fn visit_field(&self, name: &str, visitor: &mut dyn Visitor) {
        visitor.module(name, self);
    }
}

impl Field for Parameter {
    fn visit_field(&self, name: &str, visitor: &mut dyn Visitor) {
        visitor.parameter(name, self);
    }
}

impl Field for Buffer {
    fn visit_field(&self, name: &str, visitor: &mut dyn Visitor) {
        visitor.buffer(name, self);
    }
}

impl Field for Training {
    fn visit_field(&self, _: &str, visitor: &mut dyn Visitor) {
        visitor.training(self);
    }
}

impl Field for Hooks {
    fn visit_field(&self, _: &str, visitor: &mut dyn Visitor) {
        visitor.hooks(self);
    }
}

impl<T: Send + Sync> Field for PhantomData<T> {
    fn visit_field(&self, _: &str, _: &mut dyn Visitor) {}
}

impl<F: Field> Field for Option<F> {
    fn visit_field(&self, name: &str, visitor: &mut dyn Visitor) {
        if let Some(field) = self {
            field.visit_field(name, visitor);
        }
    }
}

impl<F: Field> Field for Vec<F> {
    fn visit_field(&self, name: &str, visitor: &mut dyn Visitor) {
        visitor.module(name, &List(self));
    }
}

impl<F: Field, const N: usize> Field for [F; N] {
    fn visit_field(&self, name: &str, visitor: &mut dyn Visitor) {
        visitor.module(name, &List(self));
    }
}

/// Several fields under one name: PyTorch's `ModuleList`.
struct List<'a, F>(&'a [F]);

impl<F: Field> Module for List<'_, F> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        for (i, field) in self.0.iter().enumerate() {
            field.visit_field(&i.to_string(), visitor);
        }
    }
    fn type_name(&self) -> &'static str {
        crate::display::MODULE_LIST
    }
}
