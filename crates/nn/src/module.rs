//! [`Module`]: something with parameters, buffers and children, each under a name.

use std::collections::HashSet;
use std::sync::Arc;

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::{DType, Result, Tensor, no_grad};

use crate::state::{self, LoadReport, StateDict};
use crate::{Buffer, ForwardHook, Hooks, Parameter, Training};

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
    /// The module's own forward hooks.
    fn hooks(&mut self, hooks: &Hooks) {
        let _ = hooks;
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

    /// The module itself (under the empty name) and all modules in it, with their full names and the names of
    /// their types.
    fn named_modules(&self) -> Vec<(String, &'static str)> {
        let mut found = Vec::new();
        self.for_each_module(&mut |name, module| found.push((name.to_string(), module.type_name())));
        found
    }

    /// Calls `each` for the module itself and all modules in it, with their full names, a module before its
    /// parts.
    ///
    /// ```
    /// use kiln_nn::{Linear, Module, ReLU, init, seq};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let model = seq![Linear::new(4, 8)?, ReLU, Linear::new(8, 2)?];
    /// model.for_each_module(&mut |_, module| {
    ///     if module.type_name() == "Linear" {
    ///         for (name, parameter) in module.named_parameters() {
    ///             match name.as_str() {
    ///                 "weight" => init::normal_(&parameter, 0.0, 0.02),
    ///                 _ => init::zeros_(&parameter),
    ///             }
    ///             .expect("parameters are floats");
    ///         }
    ///     }
    /// });
    /// # Ok(()) }
    /// ```
    fn for_each_module(&self, each: &mut dyn FnMut(&str, &dyn Module)) {
        each("", &self);
        let mut each = |path: &str, item: Item<'_>| {
            if let Item::Module(module) = item {
                each(path, module);
            }
        };
        walk(self, &mut each);
    }

    /// The module's own forward hooks, if it has a place for them.
    fn hooks(&self) -> Option<Hooks> {
        own_hooks(self)
    }

    /// Adds a function that sees the input of this module before `forward` does; a tensor it returns takes the
    /// input's place. An error if the module has no [`Hooks`]: wrap it in [`Hooked`](crate::Hooked).
    #[track_caller]
    fn register_forward_pre_hook(
        &self,
        hook: impl Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> Result<ForwardHook>
    where
        Self: Sized,
    {
        let loc = Loc::caller();
        Ok(self.hooks().ok_or_else(|| no_hooks(self.type_name(), loc))?.register_pre(hook))
    }

    /// Adds a function that sees input and output of this module; a tensor it returns takes the output's place.
    /// An error if the module has no [`Hooks`]: wrap it in [`Hooked`](crate::Hooked).
    #[track_caller]
    fn register_forward_hook(
        &self,
        hook: impl Fn(&Tensor, &Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> Result<ForwardHook>
    where
        Self: Sized,
    {
        let loc = Loc::caller();
        Ok(self.hooks().ok_or_else(|| no_hooks(self.type_name(), loc))?.register(hook))
    }

    /// Every parameter and persistent buffer, by name; one that is used several times appears under each of its
    /// names. The tensors are the module's own, not copies.
    fn state_dict(&self) -> StateDict {
        let mut found = StateDict::new();
        walk(self, &mut |path, item| match item {
            Item::Parameter(parameter) => found.insert(path, parameter.tensor().clone()),
            Item::Buffer(buffer) if buffer.is_persistent() => found.insert(path, buffer.tensor().clone()),
            _ => {}
        });
        found
    }

    /// Copies the values of a [`StateDict`] into the parameters and buffers of the same names. Strict: if a name
    /// is missing, unexpected or of another shape, nothing is changed and the error lists all of them.
    /// Otherwise what fits is copied and the report says what does not; another shape is an error all the same.
    ///
    /// A tensor that the module has under several names (tied weights: `lm_head.weight` is the embedding) needs one
    /// of them: files of Hugging Face leave the others out, PyTorch's have all of them. Where a state has different
    /// values for them, strict loading refuses it; otherwise the last name's value is the one that stays, as in
    /// PyTorch, and the report names the two.
    #[track_caller]
    fn load_state_dict(&self, values: &StateDict, strict: bool) -> Result<LoadReport> {
        state::load(&self.state_dict(), values, strict, self.type_name(), Loc::caller())
    }

    /// Converts floating-point parameters, their gradients, and floating-point buffers to a dtype. They stay the
    /// same tensors: optimizers and compiled programs that know them see the change.
    #[track_caller]
    fn to(&self, dtype: DType) -> Result<()> {
        let _behalf = Loc::caller().on_behalf(crate::folder());
        if !dtype.is_float() {
            let why = Why::DType { argument: "a module's dtype", expected: "floating point", got: dtype };
            return Err(Error::op("to", why, Loc::caller()));
        }
        let mut seen = HashSet::new();
        let mut result = Ok(());
        walk(self, &mut |_, item| {
            let tensor = match item {
                Item::Parameter(parameter) => parameter.tensor(),
                Item::Buffer(buffer) => buffer.tensor(),
                _ => return,
            };
            if result.is_ok() && tensor.dtype().is_float() && seen.insert(tensor.address()) {
                result = convert(tensor, dtype);
            }
        });
        result
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

fn convert(tensor: &Tensor, dtype: DType) -> Result<()> {
    let _off = no_grad();
    if tensor.dtype() == dtype {
        return Ok(());
    }
    let gradient = tensor.grad().map(|gradient| gradient.to_dtype(dtype)).transpose()?;
    tensor.set_data(&tensor.to_dtype(dtype)?)?;
    tensor.set_grad(gradient);
    Ok(())
}

/// The hooks of the module itself.
fn own_hooks(module: &(impl Module + ?Sized)) -> Option<Hooks> {
    struct Own(Option<Hooks>);
    impl Visitor for Own {
        fn parameter(&mut self, _: &str, _: &Parameter) {}
        fn buffer(&mut self, _: &str, _: &Buffer) {}
        fn module(&mut self, _: &str, _: &dyn Module) {}
        fn hooks(&mut self, hooks: &Hooks) {
            self.0.get_or_insert_with(|| hooks.clone());
        }
    }
    let mut own = Own(None);
    module.visit(&mut own);
    own.0
}

fn no_hooks(name: &str, loc: Loc) -> Error {
    let why = Why::Operand { argument: "the module", expected: "one with hooks (wrap it in `Hooked`)" };
    Error::op(&format!("register_forward_hook of {name}"), why, loc)
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
    Module(&'a dyn Module),
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
        self.below(name, |walk| {
            (walk.each)(&walk.path, Item::Module(module));
            module.visit(walk);
        });
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
            // By the module itself: the default would show a pointer to the pointer, and so on without end.
            fn for_each_module(&self, each: &mut dyn FnMut(&str, &dyn Module)) {
                (**self).for_each_module(each);
            }
        })*
    };
}
delegate_module!(&M, Box<M>, Arc<M>);
