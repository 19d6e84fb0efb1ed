//! Scans: the loop over a body's steps. The body is a program that a crate above compiles, once for each body and
//! strides of what is the same in every step; without one its ops run one by one.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use kiln_ir::{Body, Error, Graph, Layout, Op, Order, Outcome, Place, Result, Scalar, Steps, Strides, Ty};
use kiln_runtime::pool::Buffer;
use rustc_hash::FxHashMap;

use super::{Input, Job, operand};
use crate::Tensor;
use crate::graph::{GraphValue, run_graph};
use crate::kernels::{self, Operand};
use crate::program::Executable;
use crate::storage::Storage;
use crate::tensor::Ready;

/// Makes a program of a functional graph, for inputs with these strides; `None`: it can't.
pub type CompileBody = fn(&Graph, &[Strides]) -> Option<Executable>;

static COMPILER: OnceLock<CompileBody> = OnceLock::new();

/// Gives scans what compiles their bodies, once and for all.
pub fn compile_bodies_by(compiler: CompileBody) {
    COMPILER.get_or_init(|| compiler);
}

/// Programs by body and strides; the body stays, so that its address means it.
type Programs = FxHashMap<(usize, Vec<Strides>), (Body, Option<Arc<Executable>>)>;

static PROGRAMS: OnceLock<Mutex<Programs>> = OnceLock::new();
/// So many are kept; a program with more bodies starts over.
const MOST: usize = 1 << 10;

fn program(body: &Body, strides: Vec<Strides>) -> Option<Arc<Executable>> {
    let compiler = COMPILER.get()?;
    let programs = || PROGRAMS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let key = (body.address(), strides);
    if let Some((_, program)) = programs().get(&key) {
        return program.clone();
    }
    // Nothing is locked meanwhile: other threads may need other bodies.
    let made = compiler(body, &key.1).map(Arc::new);
    let mut programs = programs();
    if programs.len() >= MOST {
        programs.clear();
    }
    programs.entry(key).or_insert((body.clone(), made)).1.clone()
}

/// A tensor in the same memory, with a lock of its own.
///
/// # Safety
/// It is gone before the memory is, and before anybody may write there.
unsafe fn borrow(ready: &Ready, layout: Layout) -> Ready {
    // SAFETY: the caller's promise is passed on.
    let storage = Storage::new(unsafe { Buffer::borrowed(ready.storage.pointer()) });
    Ready { storage, layout, view_version: None, ..ready.clone() }
}

/// What runs a step.
struct Step<'a> {
    body: &'a Graph,
    program: Option<Arc<Executable>>,
    /// By input of the body, the numbers.
    numbers: Vec<Option<Scalar>>,
    bits: Vec<u64>,
}

impl Step<'_> {
    /// Runs the body: the results, dense and in memory of their own or of what went in.
    fn run(&self, inputs: &[Option<Tensor>]) -> Result<Vec<Ready>> {
        if let Some(program) = &self.program {
            let mut results = Vec::with_capacity(self.body.outputs.len());
            // Where it fails, the ops one by one say why.
            if program.run(inputs.iter().map(Option::as_ref), &self.bits, &mut results).is_ok() {
                return Ok(results);
            }
        }
        let value = |(input, number): (&Option<Tensor>, &Option<Scalar>)| match (input, number) {
            (Some(tensor), _) => Ok(GraphValue::Tensor(tensor.clone())),
            (None, Some(number)) => Ok(GraphValue::Number(*number)),
            (None, None) => Err(Error::bug("an input of a scan's body is missing")),
        };
        let values = inputs.iter().zip(&self.numbers).map(value).collect::<Result<Vec<_>>>()?;
        run_graph(self.body, &values)?.iter().map(|result| Ok(result.ready()?.clone())).collect()
    }
}

/// The number in a 0-d tensor of the dtype of a number's kind.
fn number(ready: &Ready, ty: &Ty) -> Option<Scalar> {
    let Ty::Scalar(kind) = ty else { return None };
    let mut bits = [0u8; 8];
    // SAFETY: a 0-d tensor holds one element, of at most eight bytes, and is locked for reading.
    unsafe { std::ptr::copy_nonoverlapping(ready.pointer(), bits.as_mut_ptr(), ready.dtype.size()) };
    Some(Scalar::from_bits(u64::from_le_bytes(bits), *kind))
}

impl Job<'_> {
    pub(super) fn steps(&self, out: &Ready, inputs: &[Input<'_>]) -> Result<()> {
        let (Some(scan), Op::Scan { body, dtype, saves, .. }) = (Steps::of(self.op), self.op) else {
            return Err(Error::bug("a scan of something else"));
        };
        let of_sequences = scan.carries..scan.carries + scan.inputs;
        let mut operands = Vec::with_capacity(inputs.len());
        for i in 0..inputs.len() {
            let tensor = self.tensor(inputs, i)?;
            let is_element_dense = || element(tensor, 0).is_contiguous();
            let as_it_is = i >= of_sequences.end || (of_sequences.contains(&i) && is_element_dense());
            operands.push(if as_it_is { tensor.clone() } else { self.dense(tensor)? });
        }
        // SAFETY: operands are locked for reading as long as this runs, and so long these tensors live: results of
        // steps that lie in them are copied before it ends.
        let borrowed = |ready: &Ready| unsafe { borrow(ready, ready.layout.clone()) };
        let operands: Vec<Ready> = operands.iter().map(borrowed).collect();
        let tys = || body.inputs.iter().map(|&input| body.ty(input));
        let numbers: Vec<Option<Scalar>> =
            operands.iter().zip(tys()).map(|(operand, ty)| number(operand, ty)).collect();
        let mut step = Step { body, program: None, numbers, bits: Vec::new() };
        if scan.length > 0 {
            let strides = operands.iter().zip(tys()).enumerate().map(|(i, (operand, ty))| match ty {
                Ty::Tensor(ty) if i < of_sequences.end => ty.shape.contiguous_strides(),
                Ty::Tensor(_) => operand.layout.strides.clone(),
                Ty::Scalar(_) | Ty::List(_) => Strides::new(),
            });
            step.program = program(body, strides.collect());
        }
        if let Some(program) = &step.program {
            program.numbers().fill(&|input| step.numbers[input], &mut step.bits)?;
        }

        let places = scan.places(*dtype, *saves);
        let mut carries = operands[..scan.carries].to_vec();
        let mut args: Vec<Option<Tensor>> = operands
            .iter()
            .zip(tys())
            .map(|(operand, ty)| ty.as_tensor().map(|_| Tensor::from_ready(operand.clone())))
            .collect();
        for turn in 0..scan.length {
            let t = scan.order.element(turn, scan.length);
            let is_over = scan.order == Order::While
                && number(&carries[0], &Ty::Scalar(kiln_ir::ScalarKind::Bool)) == Some(Scalar::Bool(false));
            if is_over && !saves {
                break;
            }
            for place in &places {
                if let Outcome::Before(carry) = place.outcome {
                    store(out, place, Some(t), &carries[carry]);
                }
            }
            if is_over {
                continue;
            }
            for (arg, carry) in args.iter_mut().zip(&carries) {
                *arg = Some(Tensor::from_ready(carry.clone()));
            }
            for i in of_sequences.clone() {
                let layout = element(&operands[i], t);
                args[i] = Some(Tensor::from_ready(Ready { layout, ..operands[i].clone() }));
            }
            let mut results = step.run(&args).map_err(|error| error.at(self.loc))?;
            for place in &places {
                if let Outcome::Stacked(given) = place.outcome {
                    store(out, place, Some(t), &results[scan.carries + given]);
                }
            }
            results.truncate(scan.carries);
            carries = results.iter().map(|result| self.dense(result)).collect::<Result<_>>()?;
        }
        for place in &places {
            if let Outcome::Last(carry) = place.outcome {
                store(out, place, None, &carries[carry]);
            }
        }
        Ok(())
    }
}

/// How an element of a sequence lies.
fn element(sequence: &Ready, t: usize) -> Layout {
    let Layout { shape, strides, offset } = &sequence.layout;
    Layout {
        shape: shape[1..].into(),
        strides: strides[1..].into(),
        offset: offset.wrapping_add_signed(strides[0] * t as isize),
    }
}

/// Copies a tensor to its place in the result: all of it, or the part of one step.
fn store(out: &Ready, place: &Place, t: Option<usize>, tensor: &Ready) {
    let shape = &tensor.layout.shape;
    let strides = shape.contiguous_strides();
    let start = place.start + t.unwrap_or(0) * shape.numel();
    let ptr = out.pointer().wrapping_add(start * out.dtype.size());
    let target = Operand { ptr, dtype: out.dtype, shape, strides: &strides };
    // SAFETY: `out` is dense and nobody else's; the place, of the tensor's shape, lies inside; the tensor is not in it.
    unsafe { kernels::convert(&target, &operand(tensor)) };
}
