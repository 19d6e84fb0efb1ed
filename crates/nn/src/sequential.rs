//! [`Sequential`]: layers one after the other.

use std::fmt;

use kiln_ir::Loc;
use kiln_tensor::{Result, Tensor};

use crate::{Forward, Hooks, Layer, Module, Training, Visitor};

/// Layers one after the other, of any types.
///
/// ```
/// use kiln_nn::{Forward, Gelu, Linear, Module, Sequential, seq};
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let model = seq![Linear::new(4, 8)?, Gelu, Linear::new(8, 2)?];
/// assert_eq!(model.forward(&Tensor::ones([4], &Device::Cpu)?)?.shape().to_vec(), [2]);
///
/// let linear = Linear::options().bias(false);
/// let deep = Sequential::from_iter((0..10).map(|_| linear.build(16, 16)))?;
/// assert_eq!(deep.parameters().len(), 10);
/// # Ok(()) }
/// ```
#[derive(Default)]
pub struct Sequential {
    layers: Vec<(String, Box<dyn Layer>)>,
    training: Training,
    hooks: Hooks,
}

/// What [`Sequential::from_iter`] takes: a layer, or the result of making one.
pub trait IntoLayer {
    /// The layer in a box.
    fn into_layer(self) -> Result<Box<dyn Layer>>;
}

impl<L: Layer + 'static> IntoLayer for L {
    fn into_layer(self) -> Result<Box<dyn Layer>> {
        Ok(Box::new(self))
    }
}

impl<L: Layer + 'static> IntoLayer for Result<L> {
    fn into_layer(self) -> Result<Box<dyn Layer>> {
        Ok(Box::new(self?))
    }
}

impl Sequential {
    /// No layers yet: gives back what it gets.
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// The layers of an iterator, or the first error in making them.
    // Unlike the trait's `from_iter` (which is there too) it takes results, since making a layer may fail.
    #[allow(clippy::should_implement_trait)]
    pub fn from_iter<L: IntoLayer>(layers: impl IntoIterator<Item = L>) -> Result<Sequential> {
        Ok(Sequential::from_layers(layers.into_iter().map(L::into_layer).collect::<Result<_>>()?))
    }

    /// These layers, named by their position.
    pub fn from_layers(layers: Vec<Box<dyn Layer>>) -> Sequential {
        let layers = layers.into_iter().enumerate().map(|(i, layer)| (i.to_string(), layer)).collect();
        let made = Sequential { layers, training: Training::default(), hooks: Hooks::default() };
        // Labels the parameters: errors can say in which layer they happened.
        made.named_parameters();
        made
    }

    /// Adds a layer, named by its position.
    pub fn push(&mut self, layer: impl Layer + 'static) {
        self.push_named(&self.layers.len().to_string(), layer);
    }

    /// Adds a layer under a name.
    pub fn push_named(&mut self, name: &str, layer: impl Layer + 'static) {
        self.layers.push((name.to_string(), Box::new(layer)));
        self.named_parameters();
    }

    /// The layers in order.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = &dyn Layer> {
        self.layers.iter().map(|(_, layer)| &**layer)
    }

    /// The layer at `index`.
    pub fn get(&self, index: usize) -> Option<&dyn Layer> {
        self.layers.get(index).map(|(_, layer)| &**layer)
    }

    /// Number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there are no layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }
}

impl<L: Layer + 'static> FromIterator<L> for Sequential {
    fn from_iter<I: IntoIterator<Item = L>>(layers: I) -> Sequential {
        Sequential::from_layers(layers.into_iter().map(|layer| Box::new(layer) as Box<dyn Layer>).collect())
    }
}

impl Module for Sequential {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.training(&self.training);
        visitor.hooks(&self.hooks);
        for (name, layer) in &self.layers {
            visitor.module(name, layer);
        }
    }
    fn type_name(&self) -> &'static str {
        "Sequential"
    }
}

impl Forward for Sequential {
    type Output = Tensor;
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let caller = Loc::caller();
        let x = self.hooks.before(x)?;
        let mut y = x.clone();
        for layer in self.layers() {
            y = layer.forward_from(&y, caller)?;
        }
        self.hooks.after(&x, y)
    }
}

impl fmt::Display for Sequential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        crate::fmt_module(self, f)
    }
}

/// A [`Sequential`](crate::Sequential) of these layers: `seq![Linear::new(256, 256)?, Gelu]`.
#[macro_export]
macro_rules! seq {
    ($($layer:expr),* $(,)?) => {
        $crate::Sequential::from_layers(::std::vec![
            $(::std::boxed::Box::new($layer) as ::std::boxed::Box<dyn $crate::Layer>),*
        ])
    };
}
