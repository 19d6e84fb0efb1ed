//! A plan with compiled kernels, run on one thread, in parts and out of order.

use kiln_inductor::{Lowered, Options};
use kiln_ir::{DType, Graph, Op, Scalar, Strides, TensorTy};
use kiln_plan::{
    Arguments, Bands, BufferRef, Call, Epilogue, Launch, OnPlanes, Place, ScalarRef, Step, Then, ViewRef,
};
use kiln_testkit::Argument;
use kiln_testkit::plan::{Memory as _, decode, numbers_of, positions, run_call};

use super::compile::Compiled;
use super::element;
use super::memory::Memory;

/// A plan with its memory.
pub struct Run<'p> {
    pub lowered: &'p Lowered,
    pub inputs: Vec<Memory>,
    pub outputs: Vec<Memory>,
    pub arena: Memory,
    scalars: Vec<Scalar>,
    /// The memory of a band, and the first of its rows.
    band: Option<(Memory, usize)>,
}

/// How a launch differs from the whole.
#[derive(Default)]
struct Part {
    items: Option<(i64, i64)>,
    /// On pixels of a plane: the first of them, their number.
    pixels: Option<(i64, i64)>,
}

impl<'p> Run<'p> {
    pub fn new(lowered: &'p Lowered, graph: &Graph, options: &Options, inputs: &[Argument]) -> Run<'p> {
        let mut memories = Vec::new();
        let mut scalars = Vec::new();
        for (i, input) in inputs.iter().enumerate() {
            let (mut memory, mut scalar) = (Memory::new(0), Scalar::Int(0));
            match input {
                Argument::Tensor(t) => {
                    let at = positions(&t.shape, &options.input_layouts[i].strides);
                    memory = Memory::new(at.iter().max().map_or(0, |m| (*m as usize + 1) * t.dtype.size()));
                    for (n, &at) in at.iter().enumerate() {
                        memory.write(at as usize, t.dtype, element(t, n));
                    }
                }
                Argument::Scalar(s) => scalar = *s,
                Argument::List(_) => panic!("lists are packed in the graph"),
            }
            memories.push(memory);
            scalars.push(scalar);
        }
        let bytes = |v: &kiln_ir::Value| graph.ty(*v).as_tensor().unwrap().bytes();
        let outputs = graph.outputs.iter().map(|v| Memory::new(bytes(v))).collect();
        let arena = Memory::new(lowered.plan.arena_bytes);
        Run { lowered, inputs: memories, outputs, arena, scalars, band: None }
    }

    /// Where something lies, to be read.
    fn address(&self, at: BufferRef) -> *const u8 {
        let buffer = &self.lowered.plan.buffers[at.buffer.index()];
        let offset = at.offset as usize * buffer.ty.dtype.size();
        let base = match buffer.place {
            Place::Input(i) => self.inputs[i].address(),
            Place::Output(k) => self.outputs[k].address(),
            Place::BeforeOutput { output, offset } => self.outputs[output].address().wrapping_add(offset),
            Place::Arena { offset } => self.arena.address().wrapping_add(offset),
            Place::Band { offset, row_bytes } => {
                let (memory, row) = self.band.as_ref().expect("these rows are there");
                memory.address().wrapping_add(offset).wrapping_sub(*row * row_bytes)
            }
        };
        base.wrapping_add(offset)
    }

    pub fn pointer(&mut self, at: BufferRef) -> *mut u8 {
        let buffer = &self.lowered.plan.buffers[at.buffer.index()];
        let offset = at.offset as usize * buffer.ty.dtype.size();
        let base = match buffer.place {
            Place::Input(i) => self.inputs[i].pointer(),
            Place::Output(k) => self.outputs[k].pointer(),
            Place::BeforeOutput { output, offset } => self.outputs[output].pointer().wrapping_add(offset),
            Place::Arena { offset } => self.arena.pointer().wrapping_add(offset),
            Place::Band { offset, row_bytes } => {
                let (memory, row) = self.band.as_mut().expect("these rows are there");
                memory.pointer().wrapping_add(offset).wrapping_sub(*row * row_bytes)
            }
        };
        base.wrapping_add(offset)
    }

    /// What a launch passes.
    pub fn arguments(&self, launch: &Launch) -> Arguments {
        let Lowered { plan, code } = self.lowered;
        code[launch.kernel].signature.arguments(&plan.kernels[launch.kernel], launch, 2)
    }

    /// Runs all steps; the text of a failed check is the error.
    pub fn run(&mut self, compiled: &Compiled) -> Result<(), String> {
        let plan = &self.lowered.plan;
        let mut s = 0;
        while s < plan.steps.len() {
            if let Some(bands) = plan.bands.iter().find(|bands| bands.first == s) {
                self.together(bands, compiled)?;
                s += bands.steps;
                continue;
            }
            s += match (&plan.steps[s], plan.steps.get(s + 1)) {
                (Step::Call(call @ Call { then: Some(then), .. }), Some(Step::Launch(launch))) => {
                    match then {
                        Then::Rows(epilogue) => self.bands(call, *epilogue, launch, compiled)?,
                        Then::Planes(on) => self.planes(call, on, launch, compiled)?,
                    }
                    2
                }
                (Step::Launch(launch), _) => {
                    self.launch(launch, Part::default(), compiled)?;
                    1
                }
                (step, _) => {
                    self.call(step);
                    1
                }
            };
        }
        self.inputs.iter().chain(&self.outputs).for_each(Memory::check);
        self.arena.check();
        Ok(())
    }

    fn number(&self) -> impl Fn(ScalarRef) -> Scalar + use<> {
        let given = self.scalars.clone();
        let input = |i: usize| given[i];
        let found = numbers_of(&self.lowered.plan, &input).unwrap();
        let computed: Vec<Scalar> =
            (0..self.lowered.plan.scalars.len()).map(|i| found(ScalarRef::Computed(i))).collect();
        drop(found);
        move |number| match number {
            ScalarRef::Input(i) => given[i],
            ScalarRef::Constant(x) => x,
            ScalarRef::Computed(i) => computed[i],
        }
    }

    fn call(&mut self, step: &Step) {
        let number = self.number();
        run_call(step, self, &number).unwrap();
    }

    /// Steps that run together, band after band, the last one first, each in fresh memory.
    fn together(&mut self, bands: &Bands, compiled: &Compiled) -> Result<(), String> {
        let steps = &self.lowered.plan.steps[bands.first..bands.first + bands.steps];
        let first = steps[0].product().expect("bands begin with a product");
        let (batch, all) = (first.batch, first.m);
        for (matrix, band) in (0..batch * bands.count).rev().map(|i| (i / bands.count, i % bands.count)) {
            let from = band * bands.rows;
            let to = if band + 1 == bands.count { all } else { from + bands.rows };
            let row = matrix * all + from;
            self.band = Some((Memory::new(bands.bytes), row));
            let mut kernels = bands.kernels.iter();
            for step in steps {
                match step {
                    Step::Launch(launch) => {
                        let Epilogue { rows, items: per } = kernels.next().unwrap();
                        let items = self.arguments(launch).items;
                        let item = |row: usize| {
                            assert!(row == batch * all || row.is_multiple_of(*rows));
                            if row == batch * all { items } else { (row / rows) as i64 * per }
                        };
                        let items = Some((item(row), item(matrix * all + to)));
                        self.launch(launch, Part { items, pixels: None }, compiled)?;
                    }
                    product => self.call(&Step::Call(rows_of(product, matrix, from, to))),
                }
            }
            assert!(kernels.next().is_none());
            if let Some((memory, _)) = self.band.take() {
                memory.check();
            }
        }
        Ok(())
    }

    /// A product and its epilogue, band after band, the last one first.
    fn bands(
        &mut self,
        call: &Call,
        epilogue: Epilogue,
        launch: &Launch,
        compiled: &Compiled,
    ) -> Result<(), String> {
        let product = Step::Call(call.clone());
        let (all, items) = (product.product().unwrap().m, self.arguments(launch).items);
        for band in (0..all.div_ceil(epilogue.rows)).rev() {
            let (begin, end) = (band * epilogue.rows, all.min((band + 1) * epilogue.rows));
            self.call(&Step::Call(rows_of(&product, 0, begin, end)));
            let first = band as i64 * epilogue.items;
            let until = if end == all { items } else { first + epilogue.items };
            self.launch(launch, Part { items: Some((first, until)), pixels: None }, compiled)?;
        }
        Ok(())
    }

    /// A convolution and its epilogue, plane after plane and part after part of it, the last one first.
    fn planes(
        &mut self,
        call: &Call,
        on: &OnPlanes,
        launch: &Launch,
        compiled: &Compiled,
    ) -> Result<(), String> {
        let out = &call.outs[0];
        self.call(&Step::Call(call.clone()));
        let whole = self.array(out);
        // Only what is finished is there.
        for n in 0..whole.numel() {
            self.write(out.at, out.ty.dtype, n as i64, Scalar::Float(f64::NAN));
        }
        for plane in (0..whole.numel() / on.pixels.max(1)).rev() {
            let cut = on.pixels / 3;
            for pixels in [cut..on.pixels, 0..cut] {
                for n in pixels.clone().map(|pixel| plane * on.pixels + pixel) {
                    self.write(out.at, out.ty.dtype, n as i64, element(&whole, n));
                }
                let mut part = launch.clone();
                let (first, item) = if on.is_one_loop {
                    (plane * on.pixels + pixels.start, 0)
                } else {
                    (pixels.start, plane as i64)
                };
                part.bufs.iter_mut().zip(&on.steps).for_each(|(at, step)| at.offset += first as i64 * step);
                if !pixels.is_empty() {
                    let pixels = Some((first as i64, pixels.len() as i64));
                    self.launch(&part, Part { items: Some((item, item + 1)), pixels }, compiled)?;
                }
            }
        }
        Ok(())
    }

    fn launch(&mut self, launch: &Launch, part: Part, compiled: &Compiled) -> Result<(), String> {
        let Lowered { plan, code } = self.lowered;
        let Arguments { mut ints, items, scratch_bytes, .. } = self.arguments(launch);
        if let Some((_, count)) = part.pixels {
            let axis = plan.kernels[launch.kernel].vector_axis();
            let [length, width, blocks] = code[launch.kernel].signature.blocks(axis).unwrap();
            (ints[length], ints[width], ints[blocks]) = (count, count, 1);
        }
        let bufs: Vec<*mut u8> = launch.bufs.iter().map(|&b| self.pointer(b)).collect();
        let number = self.number();
        let scalars: Vec<u64> = launch.scalars.iter().map(|&s| number(s).to_bits()).collect();
        let mut scratch = Memory::new(scratch_bytes);
        let function = compiled.kernels[launch.kernel];
        // In three ranges, as threads would.
        let (begin, end) = part.items.unwrap_or((0, items));
        let cuts = [begin, begin + (end - begin) / 3, begin + (end - begin) / 2, end];
        let mut failed = 0;
        for pair in cuts.windows(2) {
            // SAFETY: the plan gives every kernel the arguments it was written for.
            let status = unsafe {
                function(bufs.as_ptr(), ints.as_ptr(), scalars.as_ptr(), pair[0], pair[1], scratch.pointer())
            };
            failed = if status != 0 { status } else { failed };
        }
        scratch.check();
        match failed {
            0 => Ok(()),
            code => Err(launch.checks[code as usize - 1].op.to_string()),
        }
    }
}

impl kiln_testkit::plan::Memory for Run<'_> {
    fn read(&self, at: BufferRef, dtype: DType, element: i64) -> Scalar {
        let p = self.address(at).wrapping_offset(element as isize * dtype.size() as isize);
        // SAFETY: plans stay inside their buffers; the fences check writes.
        decode(unsafe { std::slice::from_raw_parts(p, dtype.size()) }, dtype)
    }

    fn write(&mut self, at: BufferRef, dtype: DType, element: i64, x: Scalar) {
        let p = self.pointer(at).wrapping_offset(element as isize * dtype.size() as isize);
        let bytes = x.to_element(dtype).to_le_bytes();
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), p, dtype.size()) };
    }
}

/// Rows of one matrix of a product, as a product of matrices.
fn rows_of(product: &Step, matrix: usize, from: usize, to: usize) -> Call {
    let Step::Call(call) = product else { panic!("a product is a call: {product:?}") };
    let kiln_plan::Product { n, k, lhs, rhs, out, .. } = product.product().unwrap();
    let nth = |view: &ViewRef, rows: std::ops::Range<usize>, columns: usize| {
        let dims = view.ty.shape.rank() - 2;
        let (mut at, mut number) = (view.at, matrix);
        for d in (0..dims).rev() {
            at.offset += (number % view.ty.shape[d]) as i64 * view.strides[d] as i64;
            number /= view.ty.shape[d];
        }
        at.offset += rows.start as i64 * view.strides[dims] as i64;
        let ty = TensorTy::new(view.ty.dtype, [rows.len(), columns]);
        ViewRef { at, ty, strides: Strides::from_slice(&view.strides[dims..]) }
    };
    let args = vec![nth(lhs, from..to, k), nth(rhs, 0..k, n)];
    Call::new(Op::Mm {}, args, nth(out, from..to, n), call.loc)
}
