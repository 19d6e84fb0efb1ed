//! From a plan to a program: launches with their arguments, calls of what this runtime has itself. All others are the
//! host's.

use std::sync::Arc;

use kiln_ir::{DType, Fault, Op, planted};
use kiln_plan::{Call, Launch, Numbers, Place, Plan, Product, Signature, Step, Then, ViewRef};

use crate::convolution::{self, Geometry};
use crate::convolve::{self, Convolution, OnPlanes};
use crate::gemm;
use crate::halves::{Format, Half, HalvesAt};
use crate::kept::Kept;
use crate::kernel::Kernel;
use crate::program::{BatchAt, Element, MatrixAt, Program, Task};

/// A kernel of a plan, compiled and loaded.
#[derive(Debug, Clone)]
pub struct Callable {
    /// The function.
    pub function: Kernel,
    /// How it is called.
    pub signature: Arc<Signature>,
}

struct Binder<'a> {
    plan: &'a Plan,
    kernels: &'a [Callable],
    threads: usize,
    numbers: Numbers,
    places: Vec<Place>,
    /// Inputs from which things are made that are kept.
    constants: Vec<usize>,
}

impl Program {
    /// Prepares a plan to run on so many threads, with `kernels` for its own; and tells which numbers a run needs.
    pub fn new(plan: &Plan, kernels: &[Callable], threads: usize) -> Result<(Program, Numbers), String> {
        for (i, id) in plan.outputs.iter().enumerate() {
            if plan.buffers[id.index()].place != Place::Output(i) {
                return Err(format!("output {i} has no buffer of its own"));
            }
        }
        let place = |place: Place| match place {
            Place::Arena { offset } if planted(Fault::TemporariesOverlap) => {
                Place::Arena { offset: offset.saturating_sub(64) }
            }
            place => place,
        };
        let places = plan.buffers.iter().map(|buffer| place(buffer.place)).collect();
        let numbers = Numbers::new(plan.scalars.clone());
        let mut this = Binder { plan, kernels, threads, numbers, places, constants: Vec::new() };
        let task = |(number, step): (usize, &Step)| match step {
            Step::Launch(launch) => Ok(this.launch(launch)),
            Step::Call(call) => this.call(number, call),
            Step::OneByOne(_) => Ok(Task::Host),
        };
        let mut tasks = plan.steps.iter().enumerate().map(task).collect::<Result<Vec<_>, String>>()?;
        let Binder { numbers, places, mut constants, .. } = this;
        // Contents come in the order of the inputs.
        constants.sort_unstable();
        constants.dedup();
        for task in &mut tasks {
            let constant = match task {
                Task::Convolution(convolution) => &mut convolution.constant,
                Task::Gemm { constant, .. } => constant,
                _ => continue,
            };
            if let Some((number, _)) = constant {
                *number = constants.partition_point(|input| *input < *number);
            }
        }
        let (bands, arena_bytes) = (plan.bands.clone(), plan.arena_bytes);
        Ok((Program { tasks, bands, places, arena_bytes, constants }, numbers))
    }
}

fn element(dtype: DType) -> Option<Element> {
    match dtype {
        DType::F64 => Some(Element::F64),
        DType::F32 => Some(Element::F32),
        DType::I64 => Some(Element::I64),
        _ => None,
    }
}

fn matrix(view: &ViewRef) -> MatrixAt {
    let [.., mut row, mut column] = view.strides[..] else {
        unreachable!("a product's operand has rows and columns")
    };
    if planted(Fault::TransposeOverlooked) && row == 1 {
        (row, column) = (view.ty.shape.last().map_or(1, |&columns| columns as isize), 1);
    }
    MatrixAt { buffer: view.at.buffer.index(), offset: view.at.offset as isize, row, column }
}

fn batch(view: &ViewRef) -> BatchAt {
    let dims = view.strides.len() - 2;
    let (sizes, strides) = (view.ty.shape[..dims].to_vec(), view.strides[..dims].to_vec());
    BatchAt { matrix: matrix(view), sizes, strides }
}

/// What an operand of a step on f32 and halves is made of.
fn format(view: &ViewRef) -> Option<Format> {
    match view.ty.dtype {
        DType::F16 => Some(Format::Half(Half::F16)),
        DType::BF16 => Some(Format::Half(Half::Bf16)),
        DType::F32 => Some(Format::F32),
        _ => None,
    }
}

/// Products with operands that are halves; `None` if the call is anything else.
fn halves(call: &Call) -> Option<HalvesAt> {
    let Product { batch: count, m, n, k, lhs, rhs, out } = call.product()?;
    let formats = [format(lhs)?, format(rhs)?];
    let is_rounded = out.ty.dtype != DType::F32;
    let fits = !is_rounded || lhs.ty.dtype == out.ty.dtype && rhs.ty.dtype == out.ty.dtype;
    let (shape, [dst, lhs, rhs]) = (gemm::Shape { m, n, k }, [out, lhs, rhs].map(batch));
    let is_known = fits && formats != [Format::F32; 2];
    is_known.then_some(HalvesAt { formats, batch: count, shape, dst, is_rounded, lhs, rhs })
}

impl Binder<'_> {
    /// A number for an input that is kept in another form as long as it stays the same.
    fn watched(&mut self, view: &ViewRef, is_kept: bool) -> Option<(usize, Kept)> {
        match self.plan.buffers[view.at.buffer.index()].place {
            Place::Input(input) if is_kept => {
                self.constants.push(input);
                Some((input, Kept::default()))
            }
            _ => None,
        }
    }

    fn bytes(&self, buffer: usize) -> isize {
        self.plan.buffers[buffer].ty.dtype.size() as isize
    }

    fn launch(&mut self, launch: &Launch) -> Task {
        let Callable { function, signature } = &self.kernels[launch.kernel];
        let arguments = signature.arguments(&self.plan.kernels[launch.kernel], launch, self.threads);
        let at = |buffer: usize, offset: i64| (buffer, offset as isize * self.bytes(buffer));
        let mut bufs: Vec<_> = launch.bufs.iter().map(|slot| at(slot.buffer.index(), slot.offset)).collect();
        if planted(Fault::BuffersSwapped)
            && let [(one, 0), (other, 0), ..] = bufs[..]
            && self.plan.buffers[one].ty == self.plan.buffers[other].ty
        {
            bufs.swap(0, 1);
        }
        Task::Kernel {
            kernel: function.clone(),
            bufs,
            ints: arguments.ints,
            scalars: launch.scalars.iter().map(|&number| self.numbers.position(number)).collect(),
            items: arguments.items,
            grain: arguments.grain,
            scratch_bytes: arguments.scratch_bytes,
        }
    }

    fn call(&mut self, number: usize, call: &Call) -> Result<Task, String> {
        if let Some(halves) = halves(call) {
            return Ok(Task::Halves(Box::new(halves)));
        }
        let Some(element) = call.outs.first().and_then(|out| element(out.ty.dtype)) else {
            return Ok(Task::Host);
        };
        let is_float = element != Element::I64;
        Ok(match &call.op {
            Op::Mm {} | Op::Bmm {} => {
                let product = call.product().ok_or("a product of other operands")?;
                let shape = gemm::Shape { m: product.m, n: product.n, k: product.k };
                let (lhs, rhs, dst) = (product.lhs, product.rhs, product.out);
                match call.op {
                    Op::Mm {} => {
                        let right = matrix(rhs);
                        let is_kept =
                            call.constant && is_float && gemm::is_kept(shape, right.row, right.column);
                        let epilogue =
                            if let Some(Then::Rows(rows)) = &call.then { Some(*rows) } else { None };
                        let constant = self.watched(rhs, is_kept);
                        let (lhs, rhs, dst) = (matrix(lhs), right, matrix(dst));
                        Task::Gemm { shape, dst, lhs, rhs, element, constant, epilogue }
                    }
                    _ if is_float => {
                        let (lhs, rhs, dst) = (batch(lhs), batch(rhs), dst.at.buffer.index());
                        Task::Bmm { batch: product.batch, shape, dst, lhs, rhs, element }
                    }
                    _ => Task::Host,
                }
            }
            Op::Convolution { .. } if is_float && call.args.iter().all(ViewRef::is_dense) => {
                self.convolution(number, call, element)?
            }
            Op::Rand { .. } | Op::Randn { .. } if is_float => {
                let [seed, offset] = call.scalars[..] else {
                    return Err("random numbers without a seed".into());
                };
                Task::Random {
                    normal: matches!(call.op, Op::Randn { .. }),
                    buffer: call.outs[0].at.buffer.index(),
                    count: call.outs[0].ty.shape.numel(),
                    element,
                    seed: self.numbers.position(seed),
                    offset: self.numbers.position(offset),
                }
            }
            _ => Task::Host,
        })
    }

    fn convolution(&mut self, number: usize, call: &Call, element: Element) -> Result<Task, String> {
        let ([x, weight], [out]) = (&call.args[..], &call.outs[..]) else { return Ok(Task::Host) };
        let geometry = Geometry::of(&call.op, &x.ty.shape, &weight.ty.shape, &out.ty.shape);
        let mut geometry = geometry.ok_or("a convolution of other tensors")?;
        if planted(Fault::StrideOverlooked) {
            geometry.stride = [1, 1];
        }
        let half = match format(x) {
            Some(Format::Half(half)) if element == Element::F32 && convolution::is_for_halves(&geometry) => {
                Some(half)
            }
            Some(Format::Half(_)) => return Err("a convolution of halves that widens no planes".into()),
            _ => None,
        };
        let constant = self.watched(weight, call.constant && convolve::is_kept(&geometry, element));
        let epilogue = match (&call.then, self.plan.steps.get(number + 1)) {
            (Some(Then::Planes(on)), Some(Step::Launch(launch))) => {
                let axis = self.plan.kernels[launch.kernel].vector_axis();
                let blocks = self.kernels[launch.kernel].signature.blocks(axis);
                let steps = launch.bufs.iter().zip(&on.steps);
                let steps = steps.map(|(slot, &step)| step as isize * self.bytes(slot.buffer.index()));
                Some(OnPlanes {
                    pixels: on.pixels,
                    is_one_loop: on.is_one_loop,
                    steps: steps.collect(),
                    ints: blocks.ok_or("an epilogue that is not cut into blocks")?,
                })
            }
            _ => None,
        };
        self.places.push(Place::Arena { offset: call.free.start });
        Ok(Task::Convolution(Box::new(Convolution {
            geometry,
            element,
            half,
            dst: out.at.buffer.index(),
            x: (x.at.buffer.index(), x.at.offset as isize),
            weight: (weight.at.buffer.index(), weight.at.offset as isize),
            // A further buffer, which no plan knows.
            free: (self.places.len() - 1, call.free.len()),
            constant,
            epilogue,
        })))
    }
}
