//! Gradients by request: of some tensors with respect to some others, without touching anybody's `grad`.

use kiln_ir::{Error, Loc, Result, Why};

use super::engine::{self, Pass};
use super::{backward, check_backward, enable_grad, no_grad};
use crate::Tensor;
use crate::hook::{self, Access, GradRequest};

/// Options of [`grad`] and [`backward_all`].
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct GradOptions {
    /// Keep the tape for another pass. Left out: as `create_graph`.
    pub retain_graph: Option<bool>,
    /// Put the pass itself on the tape, so that its results can be differentiated again.
    pub create_graph: bool,
    /// An input that the outputs don't depend on gets `None` instead of being an error.
    pub allow_unused: bool,
}

/// The gradients of the sum of `outputs`, each weighted by its entry of `weights` (left out: ones, for single
/// numbers), with respect to `inputs`.
///
/// ```
/// use kiln_tensor::{GradOptions, Tensor, grad};
/// # fn main() -> kiln_tensor::Result<()> {
/// let x = Tensor::from_slice(&[3.0f32])?;
/// x.requires_grad_(true)?;
/// let y = x.mul(&x)?.mul(&x)?; // x³
/// let options = GradOptions { create_graph: true, ..GradOptions::default() };
/// let first = grad(&[&y], &[&x], &[], options)?.remove(0).expect("y depends on x");
/// let second = grad(&[&first], &[&x], &[], GradOptions::default())?.remove(0).expect("so does 3x²");
/// assert_eq!((first.item::<f32>()?, second.item::<f32>()?), (27.0, 18.0));
/// # Ok(()) }
/// ```
#[track_caller]
pub fn grad(
    outputs: &[&Tensor],
    inputs: &[&Tensor],
    weights: &[Option<&Tensor>],
    options: GradOptions,
) -> Result<Vec<Option<Tensor>>> {
    let request = GradRequest {
        outputs,
        inputs,
        weights,
        retain_graph: retains(options),
        create_graph: options.create_graph,
        allow_unused: options.allow_unused,
        quiet: false,
        closed: &[],
        loc: Loc::caller(),
    };
    if inputs.iter().any(|input| !input.requires_grad()) {
        return Err(Error::op("grad", Why::NoGradient, request.loc));
    }
    check_outputs("grad", &request)?;
    if let Some(found) =
        hook::with_current(|recorder| recorder.map_or(Ok(None), |recorder| recorder.grad(&request)))?
    {
        return Ok(found);
    }
    for input in inputs {
        hook::host_access(input, access(options), "grad", request.loc)?;
    }
    for tensor in outputs.iter().copied().chain(weights.iter().copied().flatten()) {
        hook::host_access(tensor, access(options), "grad", request.loc)?;
    }
    run_grad(&request)
}

/// [`grad`] by the eager engine, whatever recorder is set.
pub fn run_grad(request: &GradRequest<'_>) -> Result<Vec<Option<Tensor>>> {
    let GradRequest { inputs, create_graph, loc, .. } = *request;
    let pass = Pass::wanting(inputs, request.retain_graph, create_graph);
    let pass = if request.quiet { pass.quiet() } else { pass };
    let mut found = run("grad", request, pass)?;
    if !request.allow_unused
        && let Some(input) = found.iter().position(Option::is_none)
    {
        return Err(Error::op("grad", Why::Independent { input }, loc));
    }
    if !create_graph {
        // Plain values: to change one must not change another, or a weight.
        for slot in &mut found {
            *slot = slot.take().map(|grad| engine::owned(grad, loc)).transpose()?;
        }
    }
    Ok(found)
}

/// Whether a pass of [`grad`] for `inputs` that arrives at these tensors has anything to do there: their tape
/// leads to one of the inputs, or a hook waits.
pub fn goes_on(tensors: &[Tensor], inputs: &[&Tensor]) -> bool {
    Pass::wanting(inputs, true, false).goes_on(tensors)
}

/// `backward` from several tensors at once, in one pass.
#[track_caller]
pub fn backward_all(outputs: &[&Tensor], weights: &[Option<&Tensor>], options: GradOptions) -> Result<()> {
    backward(outputs, weights, options, Loc::caller())
}

/// `backward` by the eager engine, whatever recorder is set.
pub fn run_backward(request: &GradRequest<'_>) -> Result<()> {
    run("backward", request, Pass::new(request.retain_graph, request.create_graph)).map(drop)
}

/// What a recorder has to provide for a pass: the tape of a compiled graph is one node, which can't be
/// differentiated twice.
fn access(options: GradOptions) -> Access {
    if options.create_graph { Access::Tape } else { Access::State }
}

fn retains(options: GradOptions) -> bool {
    options.retain_graph.unwrap_or(options.create_graph)
}

/// What a pass may be asked of; the same for eager and captured programs.
pub fn check_outputs(name: &str, request: &GradRequest<'_>) -> Result<()> {
    let GradRequest { outputs, weights, loc, .. } = *request;
    if !weights.is_empty() && weights.len() != outputs.len() {
        let why = Why::sizes("the number of outputs and of grad_outputs", outputs.len(), weights.len());
        return Err(Error::op(name, why, loc));
    }
    let weights = weights.iter().copied().chain(std::iter::repeat(None));
    outputs.iter().zip(weights).try_for_each(|(output, weight)| check_backward(output, weight, loc))
}

fn run(name: &str, request: &GradRequest<'_>, pass: Pass) -> Result<Vec<Option<Tensor>>> {
    // Nothing is recorded: a seed that a recorder holds back would have to be forced out of it.
    let _eager = hook::Scope::suspend();
    check_outputs(name, request)?;
    let GradRequest { outputs, weights, create_graph, loc, .. } = *request;
    let mut seeds = Vec::with_capacity(outputs.len());
    for (i, output) in outputs.iter().enumerate() {
        let seed = match weights.get(i).copied().flatten() {
            Some(weight) => weight.clone(),
            None => {
                let ty = output.ty();
                Tensor::full_in(ty.shape, 1.0, ty.dtype, ty.device, loc)?
            }
        };
        seeds.push(((*output).clone(), seed));
    }
    let _mode = if create_graph { enable_grad() } else { no_grad() };
    engine::run(&seeds, pass.closed(request.closed), loc)
}
