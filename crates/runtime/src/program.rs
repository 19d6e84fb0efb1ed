//! Programs: plans prepared to run again and again without asking the allocator for anything. A program has one task for
//! each step of its plan.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_ir::{Fault, planted};
use kiln_plan::{Bands, Epilogue, Place};

use crate::bands::{self, Failed};
use crate::convolve::{self, Convolution};
use crate::gemm::{self, Matrix, Product, Then};
use crate::halves::HalvesAt;
use crate::kept::{Contents, Form, Kept, Made, Operand};
use crate::kernel::{Args, Kernel};
use crate::pool::{AllocError, Buffer, Reserve};
use crate::random;
use crate::threads::Shared;

/// The element types library calls know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// Single precision.
    F32,
    /// Double precision.
    F64,
    /// 64-bit integers.
    I64,
}

/// A strided matrix in a buffer; offset and strides count elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatrixAt {
    pub buffer: usize,
    /// Its first element.
    pub offset: isize,
    /// From row to row.
    pub row: isize,
    /// From column to column.
    pub column: isize,
}

impl MatrixAt {
    /// The matrix, in buffers that are there.
    fn matrix<T>(&self, pointers: &[*mut u8]) -> Matrix<T> {
        Matrix::new(pointers[self.buffer].cast::<T>().wrapping_offset(self.offset), self.row, self.column)
    }
}

/// A batch of strided matrices in a buffer.
#[derive(Debug, Clone)]
pub(crate) struct BatchAt {
    /// The first of them.
    pub matrix: MatrixAt,
    /// Sizes of the dims that count the matrices, outermost first.
    pub sizes: Vec<usize>,
    /// Elements from one to the next in each of these dims.
    pub strides: Vec<isize>,
}

impl BatchAt {
    /// The matrix with this number.
    pub(crate) fn at(&self, mut number: usize) -> MatrixAt {
        let mut offset = self.matrix.offset;
        for (size, stride) in self.sizes.iter().zip(&self.strides).rev() {
            offset += (number % size) as isize * stride;
            number /= size;
        }
        MatrixAt { offset, ..self.matrix }
    }
}

/// A step, prepared.
#[derive(Debug)]
pub(crate) enum Task {
    /// Launches a kernel.
    Kernel {
        kernel: Kernel,
        /// Its buffers and byte offsets into them.
        bufs: Vec<(usize, isize)>,
        /// Sizes, strides, offsets.
        ints: Vec<i64>,
        /// Which of the run's numbers it gets.
        scalars: Vec<usize>,
        /// Items to split over threads.
        items: i64,
        /// Fewest items worth a thread.
        grain: i64,
        /// Scratch memory per thread.
        scratch_bytes: usize,
    },
    /// A matrix product.
    Gemm {
        /// Sizes.
        shape: gemm::Shape,
        /// Result.
        dst: MatrixAt,
        /// Left operand.
        lhs: MatrixAt,
        /// Right operand.
        rhs: MatrixAt,
        /// Element type.
        element: Element,
        /// If the right operand is a constant of the program: which one, and its copy the right way round.
        constant: Option<(usize, Kept)>,
        /// How the next step, a kernel, runs on rows that are finished.
        epilogue: Option<Epilogue>,
    },
    /// Matrix products, one for each matrix of a batch.
    Bmm {
        /// How many.
        batch: usize,
        /// Sizes of each.
        shape: gemm::Shape,
        /// The buffer of the results, which are dense.
        dst: usize,
        /// Left operands.
        lhs: BatchAt,
        /// Right operands.
        rhs: BatchAt,
        /// Element type: a float.
        element: Element,
    },
    /// Matrix products of halves, or of f32 and halves, one for each matrix of a batch.
    Halves(Box<HalvesAt>),
    Convolution(Box<Convolution>),
    /// Fills a dense buffer with random numbers.
    Random {
        /// Standard normal instead of uniform.
        normal: bool,
        buffer: usize,
        /// How many.
        count: usize,
        /// Element type.
        element: Element,
        /// Which of the run's numbers is the seed.
        seed: usize,
        /// Which of the run's numbers is the first counter.
        offset: usize,
    },
    /// Calls back to the host.
    Host,
}

/// A program: see the [module](self).
#[derive(Debug)]
pub struct Program {
    /// By step of the plan.
    pub(crate) tasks: Vec<Task>,
    /// Those that run together, in order.
    pub(crate) bands: Vec<Bands>,
    /// Where every buffer lives.
    pub(crate) places: Vec<Place>,
    pub(crate) arena_bytes: usize,
    pub(crate) constants: Vec<usize>,
}

/// Why a program stopped.
#[derive(Debug, Clone, PartialEq)]
pub enum Stopped<E> {
    /// There was no memory for the arena.
    Memory(AllocError),
    /// A kernel found a data-dependent error.
    Status {
        /// The step.
        step: usize,
        /// The code the kernel returned.
        code: i32,
    },
    /// A host step failed.
    Host(E),
}

/// What a run works with; kept between runs so that none of them allocates.
#[derive(Debug, Default)]
pub struct Workspace {
    pointers: Vec<*mut u8>,
    bufs: Vec<*mut u8>,
    scalars: Vec<u64>,
    bound: Option<Box<Bound>>,
    times: Option<Vec<Duration>>,
}

impl Workspace {
    /// A workspace that keeps the arena and the steps' tables of pointers from run to run: what has not moved
    /// since the last run is not put together again. It must be used with one program only.
    pub fn bound() -> Workspace {
        Workspace { bound: Some(Box::default()), ..Workspace::default() }
    }

    /// A workspace that times every step.
    pub fn timed() -> Workspace {
        Workspace { times: Some(Vec::new()), ..Workspace::default() }
    }

    /// How long each step of the last run took, if that was asked for.
    pub fn times(&self) -> &[Duration] {
        self.times.as_deref().unwrap_or_default()
    }
}

/// Pointers as they were in the last run.
#[derive(Debug, Default)]
struct Bound {
    arena: Option<Reserve>,
    inputs: Vec<*mut u8>,
    outputs: Vec<*mut u8>,
    /// The tables of all kernels, one after the other.
    tables: Vec<*mut u8>,
    /// Where each step's table begins; one more for the end.
    starts: Vec<usize>,
    /// Whether a step's table has an output in it.
    has_output: Vec<bool>,
}

impl Bound {
    /// Brings pointers and tables up to date; where the arena is.
    fn renew(
        &mut self,
        program: &Program,
        inputs: &[*mut u8],
        outputs: &[*mut u8],
        pointers: &mut Vec<*mut u8>,
    ) -> Result<*mut u8, AllocError> {
        let first = self.arena.is_none();
        let arena = match &self.arena {
            Some(arena) => arena.as_ptr(),
            None => self.arena.insert(Reserve::alloc(program.arena_bytes)?).as_ptr(),
        };
        let moved = first || self.inputs != inputs;
        if !moved && self.outputs == outputs {
            return Ok(arena);
        }
        if first {
            self.starts.push(0);
            for step in &program.tasks {
                let wanted = if let Task::Kernel { bufs, .. } = step { bufs.as_slice() } else { &[] };
                let is_output = |&(buffer, _): &(usize, isize)| {
                    matches!(program.places[buffer], Place::Output(_) | Place::BeforeOutput { .. })
                };
                self.has_output.push(wanted.iter().any(is_output));
                self.tables.resize(self.tables.len() + wanted.len(), std::ptr::null_mut());
                self.starts.push(self.tables.len());
            }
        }
        program.place(inputs, outputs, arena, pointers);
        for (index, step) in program.tasks.iter().enumerate() {
            let Task::Kernel { bufs, .. } = step else { continue };
            if moved || self.has_output[index] {
                let table = &mut self.tables[self.starts[index]..self.starts[index + 1]];
                for (to, &(buffer, offset)) in table.iter_mut().zip(bufs) {
                    *to = pointers[buffer].wrapping_offset(offset);
                }
            }
        }
        self.inputs.clear();
        self.inputs.extend(inputs);
        self.outputs.clear();
        self.outputs.extend(outputs);
        Ok(arena)
    }
}

// SAFETY: the pointers are scratch, filled and used within one run.
unsafe impl Send for Workspace {}

/// The copy of a product's right operand that is kept, if there is one. Without memory for it there is none.
///
/// # Safety
/// The operand is readable for the shape, and its contents are those of its constant.
pub(crate) unsafe fn kept_copy(
    constant: &Option<(usize, Kept)>,
    contents: &[Contents],
    shape: gemm::Shape,
    element: Element,
    rhs: &MatrixAt,
    pointers: &[*mut u8],
) -> Option<Arc<Made>> {
    let (number, kept) = constant.as_ref()?;
    macro_rules! straightened {
        ($ty:ty) => {{
            let matrix = rhs.matrix::<$ty>(pointers);
            let (size, bytes) = ([shape.k, shape.n], size_of::<$ty>());
            let form = Form::Straight { size, column: rhs.column, bytes };
            let operand = Operand { contents: contents[*number], address: matrix.pointer.addr(), form };
            // SAFETY: the caller's promise is passed on.
            kept.get(operand, || unsafe { gemm::straightened(shape, matrix).map(Some) })
        }};
    }
    let made = match element {
        Element::F64 => straightened!(f64),
        _ => straightened!(f32),
    };
    made.ok().flatten()
}

/// The pointers of a kernel's buffers: as they were bound, or put together in `room`.
fn table<'a>(
    bound: &'a Option<Box<Bound>>,
    step: usize,
    wanted: &[(usize, isize)],
    pointers: &[*mut u8],
    room: &'a mut Vec<*mut u8>,
) -> &'a [*mut u8] {
    match bound {
        Some(bound) => &bound.tables[bound.starts[step]..bound.starts[step + 1]],
        None => {
            room.clear();
            room.extend(wanted.iter().map(|&(buffer, offset)| pointers[buffer].wrapping_offset(offset)));
            room
        }
    }
}

impl Program {
    /// Number of steps.
    pub fn steps(&self) -> usize {
        self.tasks.len()
    }

    /// Size of the arena.
    pub fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    /// Inputs from which things are made that are kept between runs, in order.
    pub fn constants(&self) -> &[usize] {
        &self.constants
    }

    /// Where every buffer is.
    fn place(&self, inputs: &[*mut u8], outputs: &[*mut u8], arena: *mut u8, pointers: &mut Vec<*mut u8>) {
        pointers.clear();
        pointers.extend(self.places.iter().map(|place| match *place {
            Place::Input(i) => inputs[i],
            Place::Output(output) => outputs[output],
            Place::BeforeOutput { output, offset } => outputs[output].wrapping_add(offset),
            Place::Arena { offset } => arena.wrapping_add(offset),
            // Each band says where.
            Place::Band { .. } => std::ptr::null_mut(),
        }));
    }

    /// Whether a step is left to the host.
    pub fn is_host(&self, step: usize) -> bool {
        matches!(self.tasks[step], Task::Host)
    }

    /// Runs all steps; stops at the first that fails. `contents` are those of the [constants](Program::constants). The
    /// host is given the number of a step, where every buffer is, and the arena.
    ///
    /// # Safety
    /// `inputs` and `outputs` point to memory as large as the steps' accesses reach, of their element types;
    /// nobody else writes what is read or touches what is written until the run returns; the steps are what a
    /// correct lowering made (in bounds for these sizes, disjoint between threads).
    pub unsafe fn run<E>(
        &self,
        inputs: &[*mut u8],
        outputs: &[*mut u8],
        scalars: &[u64],
        contents: &[Contents],
        workspace: &mut Workspace,
        host: &mut dyn FnMut(usize, &[*mut u8], *mut u8) -> Result<(), E>,
    ) -> Result<(), Stopped<E>> {
        let Workspace { pointers, bufs, scalars: numbers, bound, times } = workspace;
        if let Some(times) = times {
            times.clear();
        }
        // Lives as long as the run.
        let (arena, _own) = match bound {
            Some(bound) => (bound.renew(self, inputs, outputs, pointers).map_err(Stopped::Memory)?, None),
            None => {
                let arena = Buffer::alloc(self.arena_bytes).map_err(Stopped::Memory)?;
                self.place(inputs, outputs, arena.as_ptr(), pointers);
                (arena.as_ptr(), Some(arena))
            }
        };
        // The step before has run this one, too.
        let mut is_done = false;
        let mut bands = self.bands.iter().peekable();
        // The steps before this one have run.
        let mut next = 0;
        for (index, step) in self.tasks.iter().enumerate() {
            let begin = times.is_some().then(Instant::now);
            if let Some(bands) = bands.next_if(|bands| bands.first == index) {
                let pointers = Shared(&pointers[..]);
                let run = bands::Run { program: self, bands, pointers, scalars, contents };
                // SAFETY: the caller's promise about the steps is passed on.
                unsafe { run.run() }.map_err(|failed| match failed {
                    Failed::Memory(error) => Stopped::Memory(error),
                    Failed::Status { step, code } => Stopped::Status { step, code },
                })?;
                next = index + bands.steps;
            }
            match step {
                _ if index < next => {}
                Task::Kernel { .. } if std::mem::take(&mut is_done) => {}
                Task::Kernel { kernel, bufs: wanted, ints, scalars: used, items, grain, scratch_bytes } => {
                    let bufs = table(bound, index, wanted, pointers, bufs);
                    numbers.clear();
                    numbers.extend(used.iter().map(|&i| scalars[i]));
                    let args = Args { bufs, ints, scalars: numbers };
                    // SAFETY: the caller's promise about the steps is passed on.
                    let code = unsafe { kernel.launch(&args, *items, *grain, *scratch_bytes) };
                    if code != 0 {
                        return Err(Stopped::Status { step: index, code });
                    }
                }
                Task::Gemm { shape, dst, lhs, rhs, element, constant, epilogue } => {
                    // SAFETY: the caller's promise about the steps is passed on.
                    let copy = unsafe { kept_copy(constant, contents, *shape, *element, rhs, pointers) };
                    macro_rules! product {
                        ($ty:ty) => {{
                            let matrix = |m: &MatrixAt| m.matrix::<$ty>(pointers);
                            let straight = copy
                                .as_ref()
                                .map(|copy| Matrix::new(copy.as_ptr().cast::<$ty>(), shape.n as isize, 1));
                            let (dst, lhs, rhs) = (matrix(dst), matrix(lhs), matrix(rhs));
                            Product { shape: *shape, dst, accumulate: false, lhs, rhs, straight }
                        }};
                    }
                    // Steps that are timed run one by one.
                    match (epilogue, self.tasks.get(index + 1)) {
                        (
                            Some(Epilogue { rows, items: per }),
                            Some(Task::Kernel {
                                kernel,
                                bufs: wanted,
                                ints,
                                scalars: used,
                                items,
                                scratch_bytes,
                                ..
                            }),
                        ) if *element != Element::I64 && times.is_none() => {
                            let bufs = table(bound, index + 1, wanted, pointers, bufs);
                            numbers.clear();
                            numbers.extend(used.iter().map(|&i| scalars[i]));
                            let args = Args { bufs, ints, scalars: numbers };
                            // SAFETY: the caller promises that the kernel may run on rows that are finished.
                            let launch = unsafe { kernel.launch_in_parts(&args, *scratch_bytes) };
                            let run = |begin: usize, end: usize| {
                                let item = |row: usize| {
                                    if row == shape.m { *items } else { (row / rows) as i64 * per }
                                };
                                launch.part(item(begin), item(end));
                            };
                            let then = Some(Then { rows: *rows, run: &run });
                            // SAFETY: the caller's promise about the steps is passed on.
                            is_done = unsafe {
                                match element {
                                    Element::F64 => gemm::gemm(product!(f64), then),
                                    _ => gemm::gemm(product!(f32), then),
                                }
                            };
                            let code = launch.status();
                            if code != 0 {
                                return Err(Stopped::Status { step: index + 1, code });
                            }
                        }
                        // SAFETY: the caller's promise about the steps is passed on.
                        _ => unsafe {
                            match element {
                                Element::F32 => _ = gemm::gemm(product!(f32), None),
                                Element::F64 => _ = gemm::gemm(product!(f64), None),
                                Element::I64 => {
                                    let Product { shape, dst, accumulate, lhs, rhs, .. } = product!(i64);
                                    gemm::gemm_i64(shape, dst, accumulate, lhs, rhs);
                                }
                            }
                        },
                    }
                }
                Task::Bmm { batch, shape, dst, lhs, rhs, element } => {
                    let pointers = Shared(&pointers[..]);
                    macro_rules! products {
                        ($ty:ty) => {{
                            let place = |m: MatrixAt| m.matrix::<$ty>(pointers.get());
                            let product = |number: usize| {
                                let offset = (number * shape.m * shape.n) as isize;
                                let dst = MatrixAt { buffer: *dst, offset, row: shape.n as isize, column: 1 };
                                [dst, lhs.at(number), rhs.at(number)].map(place)
                            };
                            // SAFETY: the caller's promise about the steps is passed on.
                            unsafe { gemm::batched(*batch, *shape, &product) }
                        }};
                    }
                    match element {
                        Element::F64 => products!(f64),
                        _ => products!(f32),
                    }
                }
                // SAFETY: the caller's promise about the steps is passed on.
                Task::Halves(step) => unsafe { step.run(pointers) }.map_err(Stopped::Memory)?,
                Task::Convolution(step) => {
                    let mut epilogue = None;
                    // Steps that are timed run one by one.
                    if let (
                        Some(on),
                        Some(Task::Kernel {
                            kernel, bufs: wanted, ints, scalars: used, scratch_bytes, ..
                        }),
                    ) = (step.epilogue.as_ref().filter(|_| times.is_none()), self.tasks.get(index + 1))
                    {
                        let bufs = table(bound, index + 1, wanted, pointers, bufs);
                        numbers.clear();
                        numbers.extend(used.iter().map(|&i| scalars[i]));
                        let args = Args { bufs, ints, scalars: numbers };
                        epilogue =
                            Some(convolve::Epilogue { on, kernel, args, scratch_bytes: *scratch_bytes });
                        is_done = true;
                    }
                    // SAFETY: the caller's promise about the steps is passed on.
                    unsafe { step.run(pointers, contents, epilogue.as_ref()) }.map_err(
                        |failed| match failed {
                            convolve::Failed::Memory(error) => Stopped::Memory(error),
                            convolve::Failed::Epilogue(code) => Stopped::Status { step: index + 1, code },
                        },
                    )?;
                }
                Task::Random { normal, buffer, count, element, seed, offset } => {
                    let (seed, offset) = (scalars[*seed], scalars[*offset]);
                    let offset = if planted(Fault::StreamRestarts) { 0 } else { offset };
                    let first = pointers[*buffer];
                    // No elements: there may be no memory either.
                    let first = if *count == 0 { std::ptr::dangling_mut::<u64>().cast() } else { first };
                    macro_rules! fill {
                        ($ty:ty, $uniform:path, $normal:path) => {{
                            // SAFETY: the caller promises that the buffer holds `count` elements that only
                            // this run touches.
                            let to = unsafe { std::slice::from_raw_parts_mut(first.cast::<$ty>(), *count) };
                            match normal {
                                true => $normal(to, seed, offset, 0.0, 1.0),
                                false => $uniform(to, seed, offset, 0.0, 1.0),
                            }
                        }};
                    }
                    match element {
                        Element::F64 => fill!(f64, random::fill_uniform_f64, random::fill_normal_f64),
                        _ => fill!(f32, random::fill_uniform_f32, random::fill_normal_f32),
                    }
                }
                Task::Host => host(index, pointers, arena).map_err(Stopped::Host)?,
            }
            if let (Some(times), Some(begin)) = (&mut *times, begin) {
                times.push(begin.elapsed());
            }
        }
        Ok(())
    }
}
