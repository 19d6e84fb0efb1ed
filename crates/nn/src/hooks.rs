//! Forward hooks: functions that see, and may replace, what goes into a layer and what comes out of it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use kiln_tensor::{Result, Tensor};

use crate::{Forward, Module};

type Before = Arc<dyn Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync>;
type After = Arc<dyn Fn(&Tensor, &Tensor) -> Result<Option<Tensor>> + Send + Sync>;

#[derive(Default)]
struct List {
    last: AtomicU64,
    before: Mutex<Vec<(u64, Before)>>,
    after: Mutex<Vec<(u64, After)>>,
}

/// The forward hooks of a layer: a field of modules that have any. Kiln's layers with parameters have it, so does
/// [`Sequential`](crate::Sequential); [`Hooked`] gives hooks to everything else. In a compiled program hooks run on
/// every call, like all host code.
///
/// ```
/// use kiln_nn::{Forward, Linear, Module};
/// use kiln_tensor::{Device, Tensor};
/// use std::sync::{Arc, Mutex};
/// # fn main() -> kiln_tensor::Result<()> {
/// let layer = Linear::new(4, 2)?;
/// let seen = Arc::new(Mutex::new(Vec::new()));
/// let log = seen.clone();
/// let handle = layer.register_forward_hook(move |_, output| {
///     log.lock().expect("one thread").push(output.shape().to_vec());
///     Ok(None)
/// })?;
/// layer.forward(&Tensor::ones([3, 4], &Device::Cpu)?)?;
/// handle.remove();
/// layer.forward(&Tensor::ones([5, 4], &Device::Cpu)?)?;
/// assert_eq!(*seen.lock().expect("one thread"), [[3, 2]]);
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
pub struct Hooks(Arc<OnceLock<List>>);

/// A registered hook. Dropping it keeps the hook, as PyTorch's handles do.
#[derive(Clone)]
pub struct ForwardHook {
    list: Weak<OnceLock<List>>,
    id: u64,
}

impl ForwardHook {
    /// Takes the hook away.
    pub fn remove(self) {
        if let Some(list) = self.list.upgrade()
            && let Some(list) = list.get()
        {
            list.before.lock().retain(|(id, _)| *id != self.id);
            list.after.lock().retain(|(id, _)| *id != self.id);
        }
    }
}

impl Hooks {
    fn next(&self) -> (&List, ForwardHook) {
        let list = self.0.get_or_init(List::default);
        let id = list.last.fetch_add(1, Ordering::Relaxed);
        (list, ForwardHook { list: Arc::downgrade(&self.0), id })
    }

    /// Adds a function that sees the input before the layer does; a tensor it returns takes the input's place.
    pub fn register_pre(
        &self,
        hook: impl Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> ForwardHook {
        let (list, handle) = self.next();
        list.before.lock().push((handle.id, Arc::new(hook)));
        handle
    }

    /// Adds a function that sees input and output; a tensor it returns takes the output's place.
    pub fn register(
        &self,
        hook: impl Fn(&Tensor, &Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> ForwardHook {
        let (list, handle) = self.next();
        list.after.lock().push((handle.id, Arc::new(hook)));
        handle
    }

    /// The input after all hooks that come before the layer. For the `forward` of modules with hooks.
    pub fn before(&self, input: &Tensor) -> Result<Tensor> {
        let mut input = input.clone();
        if let Some(list) = self.0.get() {
            // The hooks are called without the lock: they may add or remove hooks.
            let hooks: Vec<Before> = list.before.lock().iter().map(|(_, hook)| hook.clone()).collect();
            for hook in hooks {
                if let Some(other) = hook(&input)? {
                    input = other;
                }
            }
        }
        Ok(input)
    }

    /// The output after all hooks that come behind the layer.
    pub fn after(&self, input: &Tensor, mut output: Tensor) -> Result<Tensor> {
        if let Some(list) = self.0.get() {
            let hooks: Vec<After> = list.after.lock().iter().map(|(_, hook)| hook.clone()).collect();
            for hook in hooks {
                if let Some(other) = hook(input, &output)? {
                    output = other;
                }
            }
        }
        Ok(output)
    }
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.get().map_or(0, |list| list.before.lock().len() + list.after.lock().len());
        write!(f, "Hooks({count})")
    }
}

/// The `Forward` of a layer from a tensor to a tensor, with its hooks around it.
macro_rules! forward_with_hooks {
    ($($Type:ty: |$this:ident, $x:ident| $body:expr;)*) => {
        $(impl $crate::Forward for $Type {
            type Output = Tensor;
            #[track_caller]
            fn forward(&self, $x: &Tensor) -> Result<Tensor> {
                let $this = self;
                // Not in a closure: it would lose the caller's line.
                let input = self.hooks.before($x)?;
                let $x = &input;
                let output = $body?;
                self.hooks.after($x, output)
            }
        })*
    };
}
pub(crate) use forward_with_hooks;

/// Any module from a tensor to a tensor, with forward hooks. Otherwise it is that module: names, printing and
/// everything behind `Deref` are the module's.
///
/// ```
/// use kiln_nn::{Forward, Hooked, Module, ReLU};
/// use kiln_tensor::Tensor;
/// # fn main() -> kiln_tensor::Result<()> {
/// let act = Hooked::new(ReLU);
/// act.register_forward_hook(|_, output| Ok(Some(output.add(1.0)?)))?;
/// assert_eq!(act.forward(&Tensor::from_slice(&[-1.0f32, 2.0])?)?.to_vec::<f32>()?, [1.0, 3.0]);
/// # Ok(()) }
/// ```
pub struct Hooked<M> {
    module: M,
    hooks: Hooks,
}

impl<M> Hooked<M> {
    /// The module, without hooks yet.
    pub fn new(module: M) -> Hooked<M> {
        Hooked { module, hooks: Hooks::default() }
    }
}

impl<M> std::ops::Deref for Hooked<M> {
    type Target = M;
    fn deref(&self) -> &M {
        &self.module
    }
}

impl<M: Module> Module for Hooked<M> {
    fn visit(&self, visitor: &mut dyn crate::Visitor) {
        visitor.hooks(&self.hooks);
        self.module.visit(visitor);
    }
    fn type_name(&self) -> &'static str {
        self.module.type_name()
    }
    fn extra_repr(&self) -> String {
        self.module.extra_repr()
    }
}

impl<M: Forward<Output = Tensor>> Forward for Hooked<M> {
    type Output = Tensor;
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let input = self.hooks.before(x)?;
        let output = self.module.forward(&input)?;
        self.hooks.after(&input, output)
    }
}

impl<M: Module> fmt::Display for Hooked<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        crate::fmt_module(self, f)
    }
}
