//! [`Module`]: something with parameters, buffers and children, each under a name.

use std::collections::HashSet;
use std::sync::Arc;

use kiln_tensor::{Result, Tensor};

use crate::{Buffer, Parameter, Training};

/// Is shown what a module is made of, one level deep; whoever wants the whole tree calls
/// [`Module::visit`] of each child.
pub trait Visitor {
    /// A parameter of the module itself.
    fn parameter(&mut self, name: &str, parameter: &Parameter);
    /// A buffer of the module itself.
    fn buffer(&mut self, name: &str, buffer: &Buffer);
    /// A child.
    fn module(&mut self, name: &str, module: &dyn Module);
    /// The module's own training flag.
    fn training(&mut self, flag: &Training) {
        let _ = flag;
    }
}

/// A part of a model. Derived for structs with `#[derive(Module)]`; what it computes is
/// [`Forward`](crate::Forward).
///
/// Names are PyTorch's: the path of fields to the parameter, `layers.3.fc.weight`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a module",
    note = "put `#[derive(Module)]` on the struct"
)]
pub trait Module: Send + Sync {
    /// Shows the visitor the module's own parameters, buffers and children, in the order of the fields.
    fn visit(&self, visitor: &mut dyn Visitor);

    /// The name it is printed under: `Linear`.
    fn type_name(&self) -> &'static str;

    /// What is printed between the brackets: `in_features=10, out_features=20`.
    fn extra_repr(&self) -> String {
        String::new()
    }

    /// Every parameter with its full name, each once however often it is used. Each learns its name, so that
    /// errors can tell where they happened.
    fn named_parameters(&self) -> Vec<(String, Tensor)> {
        let mut found = Distinct::default();
        walk(self, &mut |path, item| {
            if let Item::Parameter(parameter) = item {
                parameter.set_label(path);
                found.add(path, parameter);
            }
        });
        found.tensors
    }

    /// Every parameter once: what an optimizer takes.
    fn parameters(&self) -> Vec<Tensor> {
        self.named_parameters().into_iter().map(|(_, tensor)| tensor).collect()
    }

    /// Every buffer with its full name.
    fn named_buffers(&self) -> Vec<(String, Tensor)> {
        let mut found = Distinct::default();
        walk(self, &mut |path, item| {
            if let Item::Buffer(buffer) = item {
                found.add(path, buffer);
            }
        });
        found.tensors
    }

    /// Every buffer.
    fn buffers(&self) -> Vec<Tensor> {
        self.named_buffers().into_iter().map(|(_, tensor)| tensor).collect()
    }

    /// Takes every parameter's gradient away.
    fn zero_grad(&self) {
        walk(self, &mut |_, item| {
            if let Item::Parameter(parameter) = item {
                parameter.set_grad(None);
            }
        });
    }

    /// Puts the module and all its parts into training mode.
    fn train(&self) {
        set_training(self, true);
    }

    /// Puts the module and all its parts into evaluation mode.
    fn eval(&self) {
        set_training(self, false);
    }

    /// Whether the module is in training mode: its own flag, or that of its first part that has one.
    fn is_training(&self) -> bool {
        let mut training = None;
        walk(self, &mut |_, item| {
            if let Item::Training(flag) = item {
                training.get_or_insert(flag.get());
            }
        });
        training.unwrap_or(true)
    }

    /// Asks for gradients of all parameters, or no longer does: a frozen model.
    fn requires_grad_(&self, on: bool) -> Result<()> {
        let mut result = Ok(());
        walk(self, &mut |_, item| {
            if let (Item::Parameter(parameter), Ok(())) = (item, &result) {
                result = parameter.requires_grad_(on).map(drop);
            }
        });
        result
    }
}

fn set_training(module: &(impl Module + ?Sized), on: bool) {
    walk(module, &mut |_, item| {
        if let Item::Training(flag) = item {
            flag.set(on);
        }
    });
}

/// Something found on a walk over a whole module.
enum Item<'a> {
    Parameter(&'a Parameter),
    Buffer(&'a Buffer),
    Training(&'a Training),
}

/// Calls `each` for everything in the tree, with its full name.
fn walk(module: &(impl Module + ?Sized), each: &mut dyn FnMut(&str, Item<'_>)) {
    module.visit(&mut Walk { path: String::new(), each });
}

struct Walk<'a> {
    /// The names from the root to the module being visited.
    path: String,
    each: &'a mut dyn FnMut(&str, Item<'_>),
}

impl Walk<'_> {
    fn below(&mut self, name: &str, body: impl FnOnce(&mut Self)) {
        let length = self.path.len();
        if length > 0 {
            self.path.push('.');
        }
        self.path.push_str(name);
        body(self);
        self.path.truncate(length);
    }
}

impl Visitor for Walk<'_> {
    fn parameter(&mut self, name: &str, parameter: &Parameter) {
        self.below(name, |walk| (walk.each)(&walk.path, Item::Parameter(parameter)));
    }
    fn buffer(&mut self, name: &str, buffer: &Buffer) {
        self.below(name, |walk| (walk.each)(&walk.path, Item::Buffer(buffer)));
    }
    fn training(&mut self, flag: &Training) {
        (self.each)(&self.path, Item::Training(flag));
    }
    fn module(&mut self, name: &str, module: &dyn Module) {
        self.below(name, |walk| module.visit(walk));
    }
}

/// Named tensors, each under the first of its names: shared weights count once.
#[derive(Default)]
struct Distinct {
    seen: HashSet<usize>,
    tensors: Vec<(String, Tensor)>,
}

impl Distinct {
    fn add(&mut self, name: &str, tensor: &Tensor) {
        if self.seen.insert(tensor.address()) {
            self.tensors.push((name.to_string(), tensor.clone()));
        }
    }
}

macro_rules! delegate_module {
    ($($Pointer:ty),*) => {
        $(impl<M: Module + ?Sized> Module for $Pointer {
            fn visit(&self, visitor: &mut dyn Visitor) {
                (**self).visit(visitor);
            }
            fn type_name(&self) -> &'static str {
                (**self).type_name()
            }
            fn extra_repr(&self) -> String {
                (**self).extra_repr()
            }
        })*
    };
}
delegate_module!(&M, Box<M>, Arc<M>);
