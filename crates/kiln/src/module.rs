//! `model.compile()`: a module whose forward is compiled, and that is still that module.

use std::fmt;
use std::ops::{Deref, DerefMut};

use kiln_dynamo::{Compile, Explanation, Region};
use kiln_ir::Loc;
use kiln_nn::{Forward, Module, Visitor};
use kiln_tensor::Result;

/// A module with a compiled `forward`. Everything else is the module's: it derefs to it, and parameters,
/// buffers, their names and their storages are the very same, so optimizers and checkpoints notice nothing.
///
/// ```
/// use kiln::nn::{Gelu, Linear, seq};
/// use kiln::prelude::*;
///
/// # fn main() -> kiln::Result<()> {
/// let model = seq![Linear::new(4, 8)?, Gelu, Linear::new(8, 2)?].compile();
/// let opt = optim::SGD::new(model.parameters(), 0.1)?;
/// let x = Tensor::ones([3, 4], &Device::Cpu)?;
/// for _ in 0..3 {
///     opt.zero_grad();
///     model.forward(&x)?.sum()?.backward()?; // forward and backward are compiled
///     opt.step()?;
/// }
/// assert_eq!(model.len(), 3); // a method of `Sequential`
/// assert_eq!(model.explain().graphs.len(), 1);
/// # Ok(()) }
/// ```
pub struct CompiledModule<M> {
    module: M,
    region: Region,
}

/// Compiles modules: `model.compile()`. For every module.
pub trait CompileModule: Module + Sized {
    /// The module with a compiled `forward`, by the default options. To keep the module, compile a reference:
    /// `(&model).compile()`.
    fn compile(self) -> CompiledModule<Self> {
        self.compile_with(Compile::new())
    }

    /// The module with a `forward` compiled by these options.
    fn compile_with(self, options: Compile) -> CompiledModule<Self> {
        let options = match options.name_of() {
            Some(_) => options,
            None => options.name(self.type_name()),
        };
        // Parameters learn their names: guards and breaks can tell them.
        self.named_parameters();
        CompiledModule { module: self, region: options.region() }
    }
}

impl<M: Module> CompileModule for M {}

impl<M: Module> CompiledModule<M> {
    /// What was captured, compiled and refused so far, and which parameters no call has used.
    pub fn explain(&self) -> Explanation {
        self.region.explain().with_parameters(&self.module.named_parameters())
    }
}

impl<M> CompiledModule<M> {
    /// The region behind it.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Calls `forward` once, so that it is compiled before it is needed, and drops the result. Side effects of
    /// `forward` (counting batches, moving averages) stay.
    pub fn warm_up<In: ?Sized>(&self, input: &In) -> Result<()>
    where
        M: Forward<In>,
    {
        self.forward(input).map(drop)
    }

    /// Forgets all recordings, so that the next call compiles anew.
    pub fn reset(&self) {
        self.region.reset();
    }

    /// The module, no longer compiled.
    pub fn into_inner(self) -> M {
        self.module
    }
}

impl<M> Deref for CompiledModule<M> {
    type Target = M;
    fn deref(&self) -> &M {
        &self.module
    }
}

/// The module may be changed: `forward` runs on every call, so a layer that is replaced is seen by the next one.
impl<M> DerefMut for CompiledModule<M> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.module
    }
}

impl<M: Module> Module for CompiledModule<M> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.module.visit(visitor);
    }
    fn type_name(&self) -> &'static str {
        self.module.type_name()
    }
    fn extra_repr(&self) -> String {
        self.module.extra_repr()
    }
}

impl<In: ?Sized, M: Forward<In>> Forward<In> for CompiledModule<M> {
    type Output = M::Output;
    #[track_caller]
    fn forward(&self, input: &In) -> Result<M::Output> {
        let caller = Loc::caller();
        self.region.run(|| {
            // A closure has no caller: what this file asks for is put down to the line that called it.
            let _behalf = caller.on_behalf(file!());
            self.module.forward(input)
        })
    }
}

impl<M: fmt::Display> fmt::Display for CompiledModule<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.module.fmt(f)
    }
}
