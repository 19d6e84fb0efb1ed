//! A device that is none: an [`Engine`] whose memory the host can't touch and whose work is done only when somebody waits
//! for it. What runs here relies on nothing that a GPU would not give.

use std::collections::{BTreeMap, VecDeque};
use std::ptr::NonNull;
use std::sync::Arc;

use kiln_ir::{DType, Error, Scalar, ScalarKind, Ty};
use kiln_plan::{BufferRef, Numbers, Place, Plan, ScalarRef, Step};
use kiln_runtime::AllocError;
use kiln_runtime::engine::{Code, Engine, Loaded, Ticket};
use kiln_runtime::program::Stopped;
use parking_lot::Mutex;

use kiln_testkit::plan::{Memory, decode, run_call, run_launch};

/// The first address: no memory of a process is there, so whoever reads it from the host ends at once.
const FIRST: usize = 0x7f00_0000_0000_0000;
/// What memory is filled with that nobody has written.
const UNWRITTEN: u8 = 0xEE;

/// See the [module](self). Clones are the same device.
#[derive(Clone)]
pub struct Simulated(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Blocks by their first address.
    blocks: BTreeMap<usize, Vec<u8>>,
    next: usize,
    waiting: VecDeque<Work>,
    /// How much work there ever was, and how much of it is done.
    given: Ticket,
    done: Ticket,
    /// Plans that stopped, and nobody has asked yet.
    stopped: BTreeMap<Ticket, Stopped<Error>>,
    limit: usize,
    live: usize,
}

enum Work {
    Free(usize),
    Upload { bytes: Vec<u8>, to: usize },
    Run { plan: Arc<Program>, inputs: Vec<usize>, outputs: Vec<usize>, scalars: Vec<u64> },
}

impl Simulated {
    /// A device with so many bytes of memory.
    pub fn new(limit: usize) -> Simulated {
        Simulated(Arc::new(Mutex::new(State { next: FIRST, limit, ..State::default() })))
    }

    /// Bytes in blocks that nobody gave back.
    pub fn live_bytes(&self) -> usize {
        self.0.lock().live
    }

    /// How much of its work is not done.
    pub fn waiting(&self) -> usize {
        self.0.lock().waiting.len()
    }
}

impl State {
    fn give(&mut self, work: Work) -> Ticket {
        self.waiting.push_back(work);
        self.given += 1;
        self.given
    }

    fn advance(&mut self, ticket: Ticket) {
        while self.done < ticket {
            let Some(work) = self.waiting.pop_front() else { return };
            self.done += 1;
            match work {
                Work::Free(address) => drop(self.blocks.remove(&address)),
                Work::Upload { bytes, to } => self.slice(to, bytes.len()).copy_from_slice(&bytes),
                Work::Run { plan, inputs, outputs, scalars } => {
                    if let Err(stopped) = plan.run(self, &inputs, &outputs, &scalars) {
                        self.stopped.insert(self.done, stopped);
                    }
                }
            }
        }
    }

    /// Memory inside one block: anything else is a fault.
    fn slice(&mut self, address: usize, bytes: usize) -> &mut [u8] {
        let (first, block) = self.blocks.range_mut(..=address).next_back().expect("an address of the device");
        let at = address - first;
        assert!(at + bytes <= block.len(), "{bytes} bytes from byte {at} of a block of {}", block.len());
        &mut block[at..at + bytes]
    }
}

impl Engine for Simulated {
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, AllocError> {
        let mut state = self.0.lock();
        if state.live + bytes > state.limit {
            let (live, machine) = (state.live, state.limit);
            return Err(AllocError::Exhausted { requested: bytes, live, machine });
        }
        let address = state.next;
        // A gap, so that blocks never touch.
        state.next += bytes.next_multiple_of(4096) + 4096;
        state.live += bytes;
        state.blocks.insert(address, vec![UNWRITTEN; bytes]);
        Ok(NonNull::without_provenance(std::num::NonZero::new(address).expect("not 0")))
    }

    unsafe fn free(&self, memory: NonNull<u8>, bytes: usize) {
        let mut state = self.0.lock();
        state.live -= bytes;
        state.give(Work::Free(memory.addr().get()));
    }

    unsafe fn upload(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<Ticket, Error> {
        // SAFETY: the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(from, bytes) }.to_vec();
        Ok(self.0.lock().give(Work::Upload { bytes, to: to.addr() }))
    }

    unsafe fn download(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<(), Error> {
        let mut state = self.0.lock();
        let all = state.given;
        state.advance(all);
        let source = state.slice(from.addr(), bytes);
        // SAFETY: the caller's promise; the device's own memory is no memory of the host's.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), to, bytes) };
        Ok(())
    }

    fn load(&self, plan: &Plan, code: &[Code<'_>]) -> Result<(Box<dyn Loaded>, Numbers), String> {
        for (kernel, code) in plan.kernels.iter().zip(code) {
            if code.text != kernel.to_string() {
                return Err(format!("{} is no text for an interpreter", code.name));
            }
        }
        let mut numbers = Numbers::new(plan.scalars.clone());
        let mut kinds = Vec::new();
        let mut add = |number: ScalarRef, kind: ScalarKind| {
            let at = numbers.position(number);
            kinds.resize(kinds.len().max(at + 1), (number, kind));
            kinds[at] = (number, kind);
        };
        for step in &plan.steps {
            match step {
                Step::Launch(launch) => {
                    let wanted = &plan.kernels[launch.kernel].scalars;
                    launch.scalars.iter().zip(wanted).for_each(|(&number, &kind)| add(number, kind));
                }
                Step::Call(call) => call.scalars.iter().for_each(|&number| add(number, ScalarKind::Int)),
                Step::OneByOne(ops) => {
                    let wanted = ops.graph.inputs.iter().skip(ops.args.len());
                    for (&number, &input) in ops.scalars.iter().zip(wanted) {
                        let Ty::Scalar(kind) = ops.graph.ty(input) else { return Err("no number".into()) };
                        add(number, *kind);
                    }
                }
            }
        }
        let program = Arc::new(Program { plan: plan.clone(), kinds });
        Ok((Box::new(Ready { device: self.clone(), program }), numbers))
    }

    fn wait(&self, ticket: Ticket) -> Result<(), Stopped<Error>> {
        let mut state = self.0.lock();
        state.advance(ticket);
        state.stopped.remove(&ticket).map_or(Ok(()), Err)
    }
}

struct Program {
    plan: Plan,
    kinds: Vec<(ScalarRef, ScalarKind)>,
}

struct Ready {
    device: Simulated,
    program: Arc<Program>,
}

impl Loaded for Ready {
    unsafe fn run(
        &self,
        inputs: &[*mut u8],
        outputs: &[*mut u8],
        scalars: &[u64],
    ) -> Result<Ticket, Stopped<Error>> {
        let addresses = |pointers: &[*mut u8]| pointers.iter().map(|pointer| pointer.addr()).collect();
        let (inputs, outputs) = (addresses(inputs), addresses(outputs));
        let (plan, scalars) = (self.program.clone(), scalars.to_vec());
        Ok(self.device.0.lock().give(Work::Run { plan, inputs, outputs, scalars }))
    }
}

/// The memory of a plan that runs.
struct Running<'a> {
    state: &'a mut State,
    plan: &'a Plan,
    inputs: &'a [usize],
    outputs: &'a [usize],
    arena: Vec<u8>,
    /// By buffer, those that are there for one band only: here as a whole.
    bands: Vec<Vec<u8>>,
}

impl Running<'_> {
    fn slice(&mut self, at: BufferRef, element: i64, dtype: DType) -> &mut [u8] {
        let (size, buffer) = (dtype.size(), at.buffer.index());
        let byte = (at.offset + element) * size as i64;
        let here = |first: usize| first.wrapping_add_signed(byte as isize);
        match self.plan.buffers[buffer].place {
            Place::Input(i) => self.state.slice(here(self.inputs[i]), size),
            Place::Output(k) => self.state.slice(here(self.outputs[k]), size),
            Place::BeforeOutput { output, offset } => {
                self.state.slice(here(self.outputs[output] + offset), size)
            }
            Place::Arena { offset } => &mut self.arena[here(offset)..][..size],
            Place::Band { .. } => &mut self.bands[buffer][here(0)..][..size],
        }
    }
}

/// One step at a time reads or writes, and reading needs the blocks, which are found by changing nothing.
struct Shared<'a>(std::cell::RefCell<Running<'a>>);

impl Memory for Shared<'_> {
    fn read(&self, at: BufferRef, dtype: DType, element: i64) -> Scalar {
        decode(self.0.borrow_mut().slice(at, element, dtype), dtype)
    }

    fn write(&mut self, at: BufferRef, dtype: DType, element: i64, value: Scalar) {
        let bytes = value.to_element(dtype).to_le_bytes();
        self.0.get_mut().slice(at, element, dtype).copy_from_slice(&bytes[..dtype.size()]);
    }
}

impl Program {
    fn run(
        &self,
        state: &mut State,
        inputs: &[usize],
        outputs: &[usize],
        scalars: &[u64],
    ) -> Result<(), Stopped<Error>> {
        let plan = &self.plan;
        let band = |buffer: &kiln_plan::BufferPlan| match buffer.place {
            Place::Band { .. } => vec![UNWRITTEN; buffer.ty.bytes],
            _ => Vec::new(),
        };
        let arena = vec![UNWRITTEN; plan.arena_bytes];
        let bands = plan.buffers.iter().map(band).collect();
        let mut memory =
            Shared(std::cell::RefCell::new(Running { state, plan, inputs, outputs, arena, bands }));
        let number = |wanted: ScalarRef| {
            // Not looked for: a number that is none differs from itself.
            if let ScalarRef::Constant(number) = wanted {
                return number;
            }
            let at = self.kinds.iter().position(|(known, _)| *known == wanted);
            let at = at.expect("a number that the plan's steps take");
            Scalar::from_bits(scalars[at], self.kinds[at].1)
        };
        for (index, step) in plan.steps.iter().enumerate() {
            match step {
                Step::Launch(launch) => match run_launch(plan, launch, &mut memory, &number) {
                    0 => {}
                    code => return Err(Stopped::Status { step: index, code: code as i32 }),
                },
                _ => run_call(step, &mut memory, &number).map_err(Stopped::Host)?,
            }
        }
        Ok(())
    }
}
