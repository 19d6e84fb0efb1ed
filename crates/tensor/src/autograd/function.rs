//! Functions that users differentiate themselves: a forward, and a backward that says what its gradient is.

use std::sync::Arc;

use parking_lot::Mutex;

use kiln_ir::{Error, Loc, Result, TensorTy, Why};

use super::node::{Edge, GradNode, Rule, put_on_tape};
use super::{grad_enabled, no_grad};
use crate::Tensor;
use crate::handle::Handle;
use crate::hook::{self, Scope};

/// A computation with a custom gradient: a straight-through estimator, gradient reversal or clipping, or a function
/// whose backward has a better closed form.
///
/// `forward` runs without recording gradients; what it saves is available in `backward`, together with the
/// gradients of its outputs. A value of the type is one application of the function: its fields hold whatever
/// `forward` needs besides tensors, and can carry what `backward` needs besides tensors. Second derivatives flow
/// through `backward` as far as it is made of ops on its arguments and on saved inputs and outputs.
///
/// ```
/// use kiln_tensor::{Context, Function, Result, Tensor};
///
/// /// Rounds; the gradient passes as if it had not.
/// struct StraightThrough;
///
/// impl Function for StraightThrough {
///     fn forward(&mut self, _: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
///         Ok(vec![inputs[0].round()?])
///     }
///
///     fn backward(&self, _: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
///         Ok(vec![Some(grads[0].clone())])
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let x = Tensor::from_slice(&[0.4f32, 1.6])?;
/// x.requires_grad_(true)?;
/// let y = StraightThrough.apply(&[&x])?;
/// assert_eq!(y.to_vec::<f32>()?, [0.0, 2.0]);
/// y.mul(3.0)?.sum()?.backward()?;
/// assert_eq!(x.grad().map(|g| g.to_vec::<f32>()).transpose()?, Some(vec![3.0, 3.0]));
/// # Ok(()) }
/// ```
pub trait Function: Send + Sync + 'static {
    /// Its name, for messages: the type's, if nothing else is said.
    fn name(&self) -> &str {
        let path = std::any::type_name::<Self>();
        let path = path.split('<').next().unwrap_or(path);
        path.rsplit("::").next().unwrap_or(path)
    }

    /// The outputs, from the inputs.
    fn forward(&mut self, context: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>>;

    /// The gradients of the inputs, one each (`None`: zero), from those of the outputs. An output that no
    /// gradient arrives for has zeros.
    fn backward(&self, context: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>>;

    /// Runs the function, which has one output.
    #[track_caller]
    fn apply(self, inputs: &[&Tensor]) -> Result<Tensor>
    where
        Self: Sized,
    {
        let (name, loc) = (self.name().to_string(), Loc::caller());
        let mut outputs = apply(self, inputs, loc)?;
        match outputs.len() {
            1 => Ok(outputs.remove(0)),
            got => {
                let why = Why::Count { what: "output (apply_all takes several)", expected: 1, got };
                Err(Error::op(&name, why, loc))
            }
        }
    }

    /// Runs the function.
    #[track_caller]
    fn apply_all(self, inputs: &[&Tensor]) -> Result<Vec<Tensor>>
    where
        Self: Sized,
    {
        apply(self, inputs, Loc::caller())
    }
}

/// What a function's forward leaves for its backward.
#[derive(Clone, Default)]
pub struct Context {
    saved: Vec<Tensor>,
    needs: Vec<bool>,
}

impl Context {
    /// Keeps tensors for `backward`. Only through inputs and outputs of the function do gradients of gradients
    /// flow. Each may be changed in place afterwards only if no backward pass follows.
    pub fn save_for_backward(&mut self, tensors: &[&Tensor]) {
        self.saved.extend(tensors.iter().map(|&tensor| tensor.clone()));
    }

    /// What was saved, in order.
    pub fn saved(&self) -> &[Tensor] {
        &self.saved
    }

    /// Whether the gradient of an input is asked for: if not, `backward` may return `None` for it.
    pub fn needs_input_grad(&self, input: usize) -> bool {
        self.needs.get(input).copied().unwrap_or(false)
    }

    /// The same with other tensors in place of those that were saved: for a run, which knows them by numbers.
    pub fn with_saved(&self, saved: Vec<Tensor>) -> Context {
        Context { saved, needs: self.needs.clone() }
    }
}

/// A function whose forward was run.
pub struct Application<'a> {
    /// The function.
    pub function: Arc<dyn Function>,
    /// What its forward left.
    pub context: Context,
    /// What it was applied to.
    pub inputs: &'a [&'a Tensor],
    /// What came of it.
    pub outputs: &'a [Tensor],
    /// Whether a pass went through it and used up what was saved.
    pub used_up: bool,
    /// The user's line.
    pub loc: Loc,
}

impl Application<'_> {
    /// Has gradients of the outputs flow through the function to its inputs. Everything must be ready.
    pub fn put_on_tape(self) {
        let Application { function, context, inputs, outputs, used_up, loc } = self;
        let keep = |tensor: &Tensor| {
            let role = match (place(inputs.iter().copied(), tensor), place(outputs.iter(), tensor)) {
                (Some(input), _) => Role::Input(input),
                (None, Some(output)) => Role::Output(output),
                (None, None) => Role::Other,
            };
            // Not the handle itself, for an output: the node that keeps it would keep itself alive.
            let ready = tensor.try_ready();
            let version = ready.as_ref().map_or(0, |ready| ready.storage.version());
            let tensor = match (role, ready) {
                (Role::Other, _) | (_, None) => tensor.clone(),
                (_, Some(ready)) => Tensor::from_ready(ready.clone()),
            };
            Keep { tensor, version, role }
        };
        let saved = context.saved.iter().map(keep).collect();
        let custom = Custom {
            function,
            needs: context.needs,
            inputs: inputs.iter().map(|input| input.ty()).collect(),
            outputs: outputs.iter().map(Tensor::ty).collect(),
            saved: Mutex::new((!used_up).then_some(saved)),
        };
        let edges = inputs.iter().map(|input| Edge::to(input)).collect();
        put_on_tape(Rule::Custom(Box::new(custom)), edges, outputs, loc);
    }
}

fn place<'a>(mut tensors: impl Iterator<Item = &'a Tensor>, tensor: &Tensor) -> Option<usize> {
    tensors.position(|other| other.same(tensor))
}

/// What a saved tensor is to the function.
#[derive(Copy, Clone)]
enum Role {
    Input(usize),
    Output(usize),
    Other,
}

/// A saved tensor and its storage's version then.
#[derive(Clone)]
struct Keep {
    tensor: Tensor,
    version: u64,
    role: Role,
}

/// A custom function on the tape.
pub(crate) struct Custom {
    function: Arc<dyn Function>,
    needs: Vec<bool>,
    inputs: Vec<TensorTy>,
    outputs: Vec<TensorTy>,
    /// `None` once a pass has used it up.
    saved: Mutex<Option<Vec<Keep>>>,
}

impl Custom {
    pub(crate) fn name(&self) -> &str {
        self.function.name()
    }

    fn fail<T>(&self, why: Why, loc: Loc) -> Result<T> {
        Err(Error::op(&format!("backward of {}", self.name()), why, loc))
    }

    fn check_versions(&self, saved: &[Keep], loc: Loc) -> Result<()> {
        for keep in saved {
            let now = keep.tensor.ready()?.storage.version();
            if now != keep.version {
                return self.fail(Why::Version { saved: keep.version, now }, loc);
            }
        }
        Ok(())
    }

    /// The gradients of the inputs.
    pub(crate) fn differentiate(
        &self,
        node: &Handle<GradNode>,
        grads: &[Option<Tensor>],
        retain_graph: bool,
        create_graph: bool,
    ) -> Result<Vec<Option<Tensor>>> {
        let saved = {
            let mut saved = self.saved.lock();
            if retain_graph { saved.clone() } else { saved.take() }
        };
        let Some(saved) = saved else { return self.fail(Why::Freed, node.loc) };
        self.check_versions(&saved, node.loc)?;
        // To be differentiated again, what was saved gets its place on the tape back.
        let place = |keep: &Keep| match (keep.role, create_graph) {
            (Role::Input(input), true) => node.edges[input].give_history(&keep.tensor),
            (Role::Output(output), true) => Edge::Node(node.clone(), output).give_history(&keep.tensor),
            _ => Ok(keep.tensor.clone()),
        };
        let saved = saved.iter().map(place).collect::<Result<_>>()?;
        let context = Context { saved, needs: self.needs.clone() };
        let types = (self.inputs.as_slice(), self.outputs.as_slice());
        gradients_of(&*self.function, &context, grads, types, node.loc)
    }
}

/// Runs a function's backward and checks what it returns, given the types of its inputs and outputs.
pub fn gradients_of(
    function: &dyn Function,
    context: &Context,
    grads: &[Option<Tensor>],
    (inputs, outputs): (&[TensorTy], &[TensorTy]),
    loc: Loc,
) -> Result<Vec<Option<Tensor>>> {
    let mut given = Vec::with_capacity(outputs.len());
    for (ty, grad) in outputs.iter().zip(grads) {
        given.push(match grad {
            Some(grad) => grad.clone(),
            None => Tensor::full_in(ty.shape.clone(), 0.0, ty.dtype, ty.device, loc)?,
        });
    }
    let mut results = function.backward(context, &given)?;
    let fail = |why| Err(Error::op(&format!("backward of {}", function.name()), why, loc));
    if results.len() != inputs.len() {
        let (expected, got) = (inputs.len(), results.len());
        return fail(Why::Count { what: "gradients, one per input", expected, got });
    }
    for (i, (result, ty)) in results.iter_mut().zip(inputs).enumerate() {
        if !context.needs_input_grad(i) {
            *result = None;
        }
        if let Some(grad) = result
            && grad.ty() != *ty
        {
            return fail(Why::ty("the gradient of input", Some(i), ty.clone(), grad.ty()));
        }
    }
    Ok(results)
}

fn apply(mut function: impl Function, inputs: &[&Tensor], loc: Loc) -> Result<Vec<Tensor>> {
    let mut context = Context::default();
    if !grad_enabled() || !inputs.iter().any(|input| input.requires_grad()) {
        let _mode = no_grad();
        return function.forward(&mut context, inputs);
    }
    context.needs = inputs.iter().map(|input| input.requires_grad()).collect();
    let taken = hook::with_current(|recorder| {
        recorder.map_or(Ok(false), |recorder| recorder.begin_function(function.name(), inputs, loc))
    })?;
    let _eager = (!taken).then(Scope::suspend);
    let outputs = {
        let _mode = no_grad();
        let outputs = function.forward(&mut context, inputs)?;
        own_outputs(outputs, inputs, &mut context)?
    };
    let function = Arc::new(function);
    let application = Application { function, context, inputs, outputs: &outputs, used_up: false, loc };
    if taken {
        hook::with_current(|recorder| match recorder {
            Some(recorder) => recorder.apply(application),
            None => {
                application.put_on_tape();
                Ok(())
            }
        })?
    } else {
        application.put_on_tape()
    }
    Ok(outputs)
}

/// The outputs as tensors that are nothing else yet, since they get a history: an input that is handed back, or a
/// tensor that somebody keeps, is given another handle to the same memory.
fn own_outputs(outputs: Vec<Tensor>, inputs: &[&Tensor], context: &mut Context) -> Result<Vec<Tensor>> {
    let mut own = Vec::with_capacity(outputs.len());
    for output in &outputs {
        let saved = context.saved.iter().filter(|saved| saved.same(output)).count();
        // This handle, what was saved, and a run's.
        let known = 1 + saved + usize::from(output.is_lazy());
        let given = inputs.iter().any(|input| input.same(output));
        if !given && !output.requires_grad() && output.references() <= known {
            own.push(output.clone());
            continue;
        }
        let fresh = output.detach()?;
        if !given {
            context
                .saved
                .iter_mut()
                .filter(|saved| saved.same(output))
                .for_each(|saved| *saved = fresh.clone());
        }
        own.push(fresh);
    }
    Ok(own)
}
