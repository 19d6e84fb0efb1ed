//! [`ModuleList`] and [`ModuleDict`]: modules by position and by name.

use std::fmt;
use std::ops::{Deref, DerefMut};

use crate::display::MODULE_LIST;
use crate::{Layer, Module, Visitor};

/// Modules in a list, named by their position. Any modules if they are boxed, which they are unless told otherwise;
/// a `Vec` of modules is visited the same way.
///
/// ```
/// use kiln_nn::{Forward, Layer, Linear, Module, ModuleList, ReLU};
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let layers: ModuleList = ModuleList::from(vec![Box::new(Linear::new(4, 4)?) as Box<dyn Layer>, Box::new(ReLU)]);
/// let mut x = Tensor::ones([4], &Device::Cpu)?;
/// for layer in layers.iter() {
///     x = layer.forward(&x)?;
/// }
/// assert_eq!(layers.named_parameters()[0].0, "0.weight");
/// # Ok(()) }
/// ```
pub struct ModuleList<M = Box<dyn Layer>>(Vec<M>);

impl<M> Default for ModuleList<M> {
    fn default() -> Self {
        ModuleList(Vec::new())
    }
}

impl<M> From<Vec<M>> for ModuleList<M> {
    fn from(modules: Vec<M>) -> Self {
        ModuleList(modules)
    }
}

impl<M> FromIterator<M> for ModuleList<M> {
    fn from_iter<I: IntoIterator<Item = M>>(modules: I) -> Self {
        ModuleList(modules.into_iter().collect())
    }
}

impl<'a, M> IntoIterator for &'a ModuleList<M> {
    type Item = &'a M;
    type IntoIter = std::slice::Iter<'a, M>;
    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<M> Deref for ModuleList<M> {
    type Target = Vec<M>;
    fn deref(&self) -> &Vec<M> {
        &self.0
    }
}

impl<M> DerefMut for ModuleList<M> {
    fn deref_mut(&mut self) -> &mut Vec<M> {
        &mut self.0
    }
}

impl<M: Module> Module for ModuleList<M> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        for (i, module) in self.0.iter().enumerate() {
            visitor.module(&i.to_string(), module);
        }
    }
    fn type_name(&self) -> &'static str {
        MODULE_LIST
    }
}

impl<M: Module> fmt::Display for ModuleList<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        crate::fmt_module(self, f)
    }
}

/// Modules by name, in the order in which they came.
pub struct ModuleDict<M = Box<dyn Layer>>(Vec<(String, M)>);

impl<M> Default for ModuleDict<M> {
    fn default() -> Self {
        ModuleDict(Vec::new())
    }
}

impl<M> ModuleDict<M> {
    /// No modules yet.
    pub fn new() -> Self {
        ModuleDict::default()
    }

    /// The module of this name.
    pub fn get(&self, name: &str) -> Option<&M> {
        self.0.iter().find(|(own, _)| own == name).map(|(_, module)| module)
    }

    /// Adds a module, or replaces the one with that name, which is returned.
    pub fn insert(&mut self, name: &str, module: M) -> Option<M> {
        match self.0.iter_mut().find(|(own, _)| own == name) {
            Some((_, old)) => Some(std::mem::replace(old, module)),
            None => {
                self.0.push((name.to_string(), module));
                None
            }
        }
    }

    /// Names and modules.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &M)> {
        self.0.iter().map(|(name, module)| (name.as_str(), module))
    }
}

impl<M> FromIterator<(String, M)> for ModuleDict<M> {
    fn from_iter<I: IntoIterator<Item = (String, M)>>(modules: I) -> Self {
        let mut dict = ModuleDict::default();
        for (name, module) in modules {
            dict.insert(&name, module);
        }
        dict
    }
}

impl<M: Module> Module for ModuleDict<M> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        for (name, module) in &self.0 {
            visitor.module(name, module);
        }
    }
    fn type_name(&self) -> &'static str {
        "ModuleDict"
    }
}

impl<M: Module> fmt::Display for ModuleDict<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        crate::fmt_module(self, f)
    }
}
