//! Gradients by request: of some tensors with respect to some others, without touching anybody's `grad`.

use kiln_ir::{Error, Loc, Result, Why};

use super::engine::{self, Pass};
use super::{check_backward, enable_grad, no_grad};
use crate::Tensor;
use crate::hook::{self, Access};

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
    let loc = Loc::caller();
    for input in inputs {
        hook::host_access(input, access(options), "grad", loc)?;
        if !input.requires_grad() {
            return Err(Error::op("grad", Why::NoGradient, loc));
        }
    }
    let pass = Pass::wanting(inputs, retains(options), options.create_graph);
    let found = run("grad", outputs, weights, pass, options, loc)?;
    if !options.allow_unused
        && let Some(index) = found.iter().position(Option::is_none)
    {
        let why =
            Why::Other(format!("the outputs don't depend on input {index}; allow_unused gives None for it"));
        return Err(Error::op("grad", why, loc));
    }
    Ok(found)
}

/// `backward` from several tensors at once, in one pass.
#[track_caller]
pub fn backward_all(outputs: &[&Tensor], weights: &[Option<&Tensor>], options: GradOptions) -> Result<()> {
    let loc = Loc::caller();
    let pass = Pass::new(retains(options), options.create_graph);
    run("backward", outputs, weights, pass, options, loc).map(drop)
}

/// What a recorder has to provide for a pass: the tape of a compiled graph is one node, which can't be
/// differentiated twice.
fn access(options: GradOptions) -> Access {
    if options.create_graph { Access::Tape } else { Access::State }
}

fn retains(options: GradOptions) -> bool {
    options.retain_graph.unwrap_or(options.create_graph)
}

fn run(
    name: &'static str,
    outputs: &[&Tensor],
    weights: &[Option<&Tensor>],
    pass: Pass,
    options: GradOptions,
    loc: Loc,
) -> Result<Vec<Option<Tensor>>> {
    if !weights.is_empty() && weights.len() != outputs.len() {
        let why =
            Why::Sizes { what: "numbers of outputs and weights", left: outputs.len(), right: weights.len() };
        return Err(Error::op(name, why, loc));
    }
    for tensor in outputs.iter().copied().chain(weights.iter().copied().flatten()) {
        hook::host_access(tensor, access(options), name, loc)?;
    }
    // From here on nothing is recorded: a seed that a recorder holds back would have to be forced out of it.
    let _eager = hook::Scope::suspend();
    let mut seeds = Vec::with_capacity(outputs.len());
    for (i, output) in outputs.iter().enumerate() {
        let weight = weights.get(i).copied().flatten();
        check_backward(output, weight, loc)?;
        let seed = match weight {
            Some(weight) => weight.clone(),
            None => {
                let ty = output.ty();
                Tensor::full_in(ty.shape, 1.0, ty.dtype, ty.device, loc)?
            }
        };
        seeds.push(((*output).clone(), seed));
    }
    let _mode = if options.create_graph { enable_grad() } else { no_grad() };
    engine::run(&seeds, pass, loc)
}
