//! Formulas: pointwise steps on operands of one shape, a block of elements at a time. Operands are read once, what a
//! step leaves for a later one stays in the first-level cache, and only results that somebody wants go to memory.
//!
//! [Note: a step is what the op would do] Each step runs the loops that the op has when it is called alone, with the
//! same conversions before and after, so a formula has the bits of its ops run one after the other.

use std::cell::Cell;
use std::mem::MaybeUninit;

use kiln_ir::DType;
use kiln_ir::math::Function;
use kiln_runtime::{machine, parallel_for};
use smallvec::SmallVec;

use super::convert::cast;
use super::drive::{Cost, Form, Loop, MAX_INPUTS};
use super::narrow::{copy_loop, narrowing, widening};
use super::operand::{Operand, Shared};
use super::pointwise::{
    Bits, Comparison, Logical, bits_loop, choice_loop, comparison_loop, function_loops, logical_loop,
};
use super::softmax::prefetch;
use super::strided::gather;

/// What a step computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Computes {
    /// A scalar function.
    Function(Function),
    /// A truth value.
    Comparison(Comparison),
    /// A connective of truth values.
    Logical(Logical),
    /// A function of bits.
    Bits(Bits),
    /// Its second operand where the first, a truth value, holds, else the third.
    Choice,
    /// Its operand, converted.
    Conversion,
}

/// Where a step finds an operand.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// In memory: the number of the operand.
    Leaf(usize),
    /// The result of the step with this number.
    Step(usize),
    /// One element for all, little end first.
    Number {
        /// The element.
        element: u64,
        /// Its type: that in which the step takes operands, or the one this is computed in.
        dtype: DType,
    },
}

/// A step of a formula.
#[derive(Clone, Debug)]
pub struct Step {
    /// What is computed.
    pub computes: Computes,
    /// The dtype that operands are converted to first (but for a choice's condition).
    pub taken: DType,
    /// The dtype of the result.
    pub result: DType,
    /// The operands.
    pub operands: SmallVec<[Source; MAX_INPUTS]>,
    /// Where the result goes, if it is wanted: dense memory.
    pub out: Option<*mut u8>,
}

impl Computes {
    /// Whether there is such a step on this dtype.
    pub fn takes(self, dtype: DType) -> bool {
        match self {
            Computes::Function(function) => function_loops(function, dtype).is_some(),
            _ => true,
        }
    }

    /// How many operands it has.
    pub fn arity(self) -> usize {
        match self {
            Computes::Function(function) => function.arity(),
            Computes::Comparison(_) | Computes::Bits(_) | Computes::Logical(Logical::And) => 2,
            Computes::Choice => 3,
            Computes::Logical(Logical::Not) | Computes::Conversion => 1,
        }
    }

    /// In vector instructions.
    fn instructions(self) -> usize {
        match self {
            Computes::Function(function) => function.instructions(),
            _ => 1,
        }
    }

    /// The loop, and whether it takes and gives elements as they are in memory.
    fn inner(self, dtype: DType) -> Option<(Loop, Form)> {
        Some(match self {
            Computes::Function(function) => (function_loops(function, dtype)?.apart, Form::Computing),
            Computes::Comparison(comparison) => (comparison_loop(comparison, dtype), Form::Computing),
            Computes::Logical(connective) => (logical_loop(connective), Form::Memory),
            Computes::Bits(function) => (bits_loop(function, dtype), Form::Computing),
            Computes::Choice => (choice_loop(dtype), Form::Memory),
            Computes::Conversion => (cast(dtype, dtype).0, Form::Memory),
        })
    }
}

/// Whether an operand is better copied before a formula reads it: element after element, it is all over its memory.
pub fn is_scattered(leaf: &Operand) -> bool {
    let runs = Runs::of(leaf);
    let Some(&(_, inner)) = runs.dims.last() else { return false };
    let least = runs.dims.iter().map(|(_, stride)| stride.unsigned_abs()).filter(|&stride| stride > 0).min();
    inner != 0
        && least.is_some_and(|least| least < inner.unsigned_abs())
        && leaf.numel() * runs.size > machine().l1
}

/// Runs the steps over all elements.
///
/// # Safety
/// The contract of [`Operand`] for the leaves, all of this shape; steps come after those they use, and each has the
/// operands that it takes. Wanted results go to memory of their own with room for all elements.
pub unsafe fn run(shape: &[usize], leaves: &[Operand], steps: &[Step]) {
    let numel: usize = shape.iter().product();
    debug_assert!(leaves.iter().all(|leaf| leaf.shape == shape));
    if numel == 0 {
        return;
    }
    let program = Program::of(leaves, steps, numel);
    let work: usize = steps.iter().map(|step| step.computes.instructions()).sum();
    let grain = if work < 16 { Cost::Cheap } else { Cost::Costly }.grain();
    let shared = Shared::new(&raw const program);
    // SAFETY: the program outlives the loop; ranges are disjoint, so threads write different elements.
    let part = |begin: usize, end: usize| unsafe { (*shared.get()).range(begin, end) };
    if numel < 2 * grain {
        return part(0, numel);
    }
    parallel_for(numel, grain, part);
}

/// How an operand lies: its dims as few as can be, each with its stride in bytes.
struct Runs {
    start: *const u8,
    size: usize,
    dims: SmallVec<[(usize, isize); 4]>,
}

impl Runs {
    fn of(leaf: &Operand) -> Runs {
        let size = leaf.dtype.size();
        let mut dims: SmallVec<[(usize, isize); 4]> = SmallVec::new();
        for (&count, &stride) in leaf.shape.iter().zip(leaf.strides).filter(|(count, _)| **count != 1) {
            let stride = stride * size as isize;
            match dims.last_mut() {
                Some(last) if last.1 == stride * count as isize => *last = (last.0 * count, stride),
                _ => dims.push((count, stride)),
            }
        }
        Runs { start: leaf.ptr, size, dims }
    }

    /// Whether there is but one element.
    fn is_constant(&self) -> bool {
        self.dims.iter().all(|(_, stride)| *stride == 0)
    }

    fn is_dense(&self) -> bool {
        matches!(self.dims[..], [(_, stride)] if stride == self.size as isize)
    }

    /// Copies the elements `at..at + n` into a block.
    ///
    /// # Safety
    /// The elements can be read and the block has room for them.
    unsafe fn gather(&self, at: usize, n: usize, mut block: *mut u8) {
        let Some((&(inner, step), outer)) = self.dims.split_last() else { return };
        let (mut row, mut column, mut left) = (at / inner, at % inner, n);
        while left > 0 {
            let (mut memory, mut rest) = (self.start, row);
            for &(count, stride) in outer.iter().rev() {
                memory = memory.wrapping_offset((rest % count) as isize * stride);
                rest /= count;
            }
            let count = (inner - column).min(left);
            // SAFETY: elements of the run; the block has room for what is left.
            unsafe { gather(block, memory.wrapping_offset(column as isize * step), step, count, self.size) };
            block = block.wrapping_add(count * self.size);
            (row, column, left) = (row + 1, 0, left - count);
        }
    }
}

/// Where a register's elements are.
#[derive(Clone, Copy)]
enum Home {
    /// In memory, all of them.
    Memory(*mut u8),
    /// In scratch memory, a block of them.
    Block(usize),
    /// The same in all blocks.
    Constant(usize),
}

/// Elements on their way: of a leaf, of a number, of a step, or converted.
#[derive(Clone, Copy)]
struct Register {
    home: Home,
    size: usize,
}

enum Action {
    Loop(Loop),
    /// Gathers a leaf.
    Gather(usize),
}

struct Instruction {
    action: Action,
    inputs: SmallVec<[usize; MAX_INPUTS]>,
    out: usize,
}

/// A formula as instructions on registers.
#[derive(Default)]
struct Program {
    registers: Vec<Register>,
    /// What fills the registers that are the same in all blocks: the first element, or an instruction.
    elements: Vec<(usize, u64)>,
    constants: Vec<Instruction>,
    body: Vec<Instruction>,
    leaves: Vec<Runs>,
    /// Elements in a block.
    block: usize,
    /// Bytes of a register in scratch memory, and how many there are.
    slot: usize,
    slots: usize,
    /// Leaves that instructions read where they are.
    streams: SmallVec<[(*const u8, usize); 4]>,
}

/// The registers of a value, by the dtypes it has been converted to.
type Forms = SmallVec<[(DType, usize); 2]>;

impl Program {
    fn of(leaves: &[Operand], steps: &[Step], numel: usize) -> Program {
        let mut program = Program::default();
        let mut forms: Vec<Forms> = Vec::with_capacity(leaves.len() + steps.len());
        for (number, leaf) in leaves.iter().enumerate() {
            let register = program.leaf(number, leaf);
            forms.push(Forms::from_iter([(leaf.dtype, register)]));
        }
        let mut numbers: Vec<((u64, DType), Forms)> = Vec::new();
        for step in steps {
            let result = program.step(step, leaves.len(), &mut forms, &mut numbers);
            forms.push(Forms::from_iter([(step.result, result)]));
        }
        program.assign(numel);
        program
    }

    fn register(&mut self, home: Home, size: usize) -> usize {
        self.registers.push(Register { home, size });
        self.registers.len() - 1
    }

    fn leaf(&mut self, number: usize, leaf: &Operand) -> usize {
        let runs = Runs::of(leaf);
        let size = runs.size;
        let register = if runs.is_constant() {
            let mut element = 0u64;
            // SAFETY: the leaf has an element, and any fits.
            unsafe { std::ptr::copy_nonoverlapping(leaf.ptr, (&raw mut element).cast(), size) };
            self.number(element, size)
        } else if runs.is_dense() {
            self.streams.push((leaf.ptr, size));
            self.register(Home::Memory(leaf.ptr), size)
        } else {
            let out = self.register(Home::Block(0), size);
            self.body.push(Instruction { action: Action::Gather(number), inputs: SmallVec::new(), out });
            out
        };
        self.leaves.push(runs);
        register
    }

    fn number(&mut self, element: u64, size: usize) -> usize {
        let register = self.register(Home::Constant(0), size);
        self.elements.push((register, element));
        register
    }

    /// Adds an instruction; its result is where it is wanted, or in scratch memory.
    fn emit(
        &mut self,
        action: Loop,
        inputs: SmallVec<[usize; MAX_INPUTS]>,
        size: usize,
        out: Option<*mut u8>,
    ) -> usize {
        let constant = |&input: &usize| matches!(self.registers[input].home, Home::Constant(_));
        let action = Action::Loop(action);
        match out {
            Some(out) => {
                let out = self.register(Home::Memory(out), size);
                self.body.push(Instruction { action, inputs, out });
                out
            }
            None if inputs.iter().all(constant) => {
                let out = self.register(Home::Constant(0), size);
                self.constants.push(Instruction { action, inputs, out });
                out
            }
            None => {
                let out = self.register(Home::Block(0), size);
                self.body.push(Instruction { action, inputs, out });
                out
            }
        }
    }

    /// A value, of which there are these forms, as a dtype.
    fn converted(&mut self, forms: &mut Forms, to: DType) -> usize {
        if let Some((_, register)) = forms.iter().find(|(dtype, _)| *dtype == to) {
            return *register;
        }
        let (from, register) = forms[0];
        let one = |input| SmallVec::from_iter([input]);
        let register = match cast(from, to) {
            (inner, Form::Memory) => self.emit(inner, one(register), to.size(), None),
            (inner, Form::Computing) => {
                let wide = match widening(from) {
                    Some(_) => self.converted(forms, from.computing()),
                    None => register,
                };
                let result = self.emit(inner, one(wide), to.computing().size(), None);
                match narrowing(to) {
                    Some(narrow) => self.emit(narrow, one(result), to.size(), None),
                    None => result,
                }
            }
        };
        forms.push((to, register));
        register
    }

    /// Adds a step, whose operands have these forms; its result's register.
    fn step(
        &mut self,
        step: &Step,
        leaves: usize,
        forms: &mut [Forms],
        numbers: &mut Vec<((u64, DType), Forms)>,
    ) -> usize {
        let Some((inner, form)) = step.computes.inner(step.taken) else { return 0 };
        let mut inputs: SmallVec<[usize; MAX_INPUTS]> = SmallVec::new();
        for (i, &source) in step.operands.iter().enumerate() {
            let taken = match step.computes {
                Computes::Choice if i == 0 => DType::Bool,
                Computes::Conversion => step.result,
                _ => step.taken,
            };
            let computed = if form == Form::Computing { taken.computing() } else { taken };
            let own = match source {
                Source::Leaf(leaf) => &mut forms[leaf],
                Source::Step(step) => &mut forms[leaves + step],
                Source::Number { element, dtype } => {
                    let key = (element, dtype);
                    let at = numbers.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
                        let register = self.number(element, dtype.size());
                        numbers.push((key, Forms::from_iter([(dtype, register)])));
                        numbers.len() - 1
                    });
                    // A number that comes in the computing type is not rounded first.
                    let own = &mut numbers[at].1;
                    inputs.push(self.converted(own, computed));
                    continue;
                }
            };
            let register = self.converted(own, taken);
            inputs.push(if computed == taken {
                register
            } else if own[0].0 == taken {
                self.converted(own, computed)
            } else {
                // What was converted to a narrow dtype is widened from there.
                let mut narrow = Forms::from_iter([(taken, register)]);
                self.converted(&mut narrow, computed)
            });
        }
        if let Computes::Conversion = step.computes {
            return match step.out {
                Some(_) => {
                    let size = step.result.size();
                    self.emit(copying(size), inputs, size, step.out)
                }
                None => inputs[0],
            };
        }
        let narrow = if form == Form::Computing { narrowing(step.result) } else { None };
        match narrow {
            Some(narrow) => {
                let result = self.emit(inner, inputs, step.result.computing().size(), None);
                self.emit(narrow, SmallVec::from_iter([result]), step.result.size(), step.out)
            }
            None => self.emit(inner, inputs, step.result.size(), step.out),
        }
    }

    /// Gives registers their places in scratch memory, and blocks their size.
    fn assign(&mut self, numel: usize) {
        let mut last = vec![0; self.registers.len()];
        for (i, instruction) in self.body.iter().enumerate() {
            for &input in &instruction.inputs {
                last[input] = i;
            }
        }
        let mut slots = 0;
        for register in &mut self.registers {
            if let Home::Constant(slot) = &mut register.home {
                *slot = slots;
                slots += 1;
            }
        }
        let mut free: SmallVec<[usize; 16]> = SmallVec::new();
        for (i, instruction) in self.body.iter().enumerate() {
            // The result first: it must not lie where an operand is.
            if let Home::Block(slot) = &mut self.registers[instruction.out].home {
                *slot = free.pop().unwrap_or_else(|| {
                    slots += 1;
                    slots - 1
                });
            }
            for (n, &input) in instruction.inputs.iter().enumerate() {
                if let Home::Block(slot) = self.registers[input].home
                    && last[input] == i
                    && !instruction.inputs[..n].contains(&input)
                {
                    free.push(slot);
                }
            }
        }
        let widest = self.registers.iter().map(|register| register.size).max().unwrap_or(8);
        let direct =
            self.registers.iter().filter(|register| matches!(register.home, Home::Memory(_))).count();
        let fits = machine().l1 / 4 * 3 / (widest * (slots + direct).max(1));
        self.block = (fits / LINE * LINE).clamp(LEAST_BLOCK, MOST_BLOCK).min(numel.next_multiple_of(LINE));
        (self.slot, self.slots) = (self.block * widest, slots);
    }

    /// Runs the elements `begin..end`.
    ///
    /// # Safety
    /// That of [`run`].
    unsafe fn range(&self, begin: usize, end: usize) {
        let mut scratch = Scratch::take(self.slot * self.slots);
        let base = scratch.start();
        // Where a register's first element is, and how far apart its elements are in memory.
        let places: SmallVec<[(*mut u8, usize); 24]> = self
            .registers
            .iter()
            .map(|register| match register.home {
                Home::Memory(start) => (start, register.size),
                Home::Block(slot) | Home::Constant(slot) => (base.wrapping_add(slot * self.slot), 0),
            })
            .collect();
        let execute = |instruction: &Instruction, at: usize, n: usize| {
            let place = |register: usize| {
                let (start, step) = places[register];
                start.wrapping_add(at * step)
            };
            let out = place(instruction.out);
            match instruction.action {
                Action::Loop(inner) => {
                    let mut inputs = [out.cast_const(); MAX_INPUTS];
                    for (input, &register) in inputs.iter_mut().zip(&instruction.inputs) {
                        *input = place(register);
                    }
                    // SAFETY: n elements each; a result lies where no operand of its instruction does.
                    unsafe { inner(out, &inputs, n) }
                }
                // SAFETY: elements of the leaf; a block has room for them.
                Action::Gather(leaf) => unsafe { self.leaves[leaf].gather(at, n, out) },
            }
        };
        for (register, element) in &self.elements {
            let size = self.registers[*register].size;
            // SAFETY: a block has room for as many elements of the size.
            unsafe { gather(places[*register].0, (&raw const *element).cast(), 0, self.block, size) };
        }
        for instruction in &self.constants {
            execute(instruction, 0, self.block);
        }
        let mut at = begin;
        while at < end {
            let n = self.block.min(end - at);
            for (stream, size) in &self.streams {
                prefetch(stream.wrapping_add(at * size + AHEAD_BYTES), n * size);
            }
            for instruction in &self.body {
                execute(instruction, at, n);
            }
            at += n;
        }
        scratch.give_back();
    }
}

fn copying(size: usize) -> Loop {
    match size {
        1 => copy_loop::<u8>,
        2 => copy_loop::<u16>,
        4 => copy_loop::<u32>,
        _ => copy_loop::<u64>,
    }
}

/// Elements that blocks are a multiple of: a line of bytes.
const LINE: usize = 64;
/// The less, the more it costs to go from one instruction to the next.
const LEAST_BLOCK: usize = 256;
/// The more, the less evenly memory is asked.
const MOST_BLOCK: usize = 2048;
/// How far ahead of their turn elements are asked for: the processor does not see that blocks go on.
const AHEAD_BYTES: usize = 4096;

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [MaybeUninit<u8>; LINE]);

thread_local! {
    /// The scratch memory of this thread's last formula.
    static SCRATCH: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// Memory for blocks, kept for the thread's next formula.
struct Scratch(Vec<Line>);

impl Scratch {
    fn take(bytes: usize) -> Scratch {
        let (mut lines, count) = (SCRATCH.take(), bytes.div_ceil(LINE));
        if lines.len() < count {
            lines.resize(count, Line([MaybeUninit::uninit(); LINE]));
        }
        Scratch(lines)
    }

    fn start(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    fn give_back(self) {
        SCRATCH.set(self.0);
    }
}
