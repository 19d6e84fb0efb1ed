//! Plans with compiled kernels, run on one thread between fences, in parts and out of order; and compared with the
//! reference evaluator.
#![allow(dead_code, reason = "each test binary uses a part")]

pub mod golden;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_inductor::{C, Interpreter, KernelSource, Layout, Lowered, Options, Target, lower};
use kiln_ir::math::c::{FLAGS, Isa};
use kiln_ir::{DType, Graph, Op, Scalar, Stage, Strides, TensorTy, Ty};
use kiln_plan::{
    Arguments, Bands, BufferId, BufferRef, Call, Epilogue, Launch, OnPlanes, Place, Plan, ScalarRef, Step,
    Then, ViewRef,
};
use kiln_testkit::plan::{Memory as _, decode, interpret, numbers_of, positions, run_call};
use kiln_testkit::{Argument, Array, Data};

/// Bytes put around every allocation, to see writes outside of it.
const FENCE: usize = 128;
const CANARY: u8 = 0xA5;

/// Checks that the C compiler puts into kernels: `KILN_SANITIZE`, as in the runtime.
fn sanitizer() -> &'static [&'static str] {
    match std::env::var("KILN_SANITIZE").as_deref() {
        Ok("undefined") => {
            &["-fsanitize=undefined,float-cast-overflow", "-fsanitize-undefined-trap-on-error"]
        }
        Ok("address") => &[
            "-fsanitize=address,undefined,float-cast-overflow",
            "-fsanitize-undefined-trap-on-error",
            "-fno-omit-frame-pointer",
            "-g",
        ],
        _ => &[],
    }
}

/// The C compiler: `KILN_CC`, as in the runtime.
fn compiler() -> String {
    std::env::var("KILN_CC").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| "cc".into())
}

/// A clang, by whatever name, if there is one.
pub fn clang() -> Option<String> {
    let numbered = (14..30).rev().map(|version| format!("clang-{version}"));
    let is_there = |name: &String| Command::new(name).arg("--version").output().is_ok();
    std::iter::once("clang".to_string()).chain(numbered).find(is_there)
}

/// Memory aligned to 64 bytes with a fence on either side; with the address sanitizer it is a bare allocation,
/// whose ends the sanitizer guards.
pub struct Memory {
    bytes: Box<[u8]>,
    start: usize,
    len: usize,
    bare: bool,
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bare {
            let bytes = Box::leak(std::mem::take(&mut self.bytes));
            // SAFETY: allocated in `new` with this layout, and not freed by the box.
            unsafe { std::alloc::dealloc(bytes.as_mut_ptr(), Memory::layout(self.len)) };
        }
    }
}

impl Memory {
    pub fn new(len: usize) -> Memory {
        if len > 0 && sanitizer().iter().any(|flag| flag.contains("address")) {
            // SAFETY: the layout is not empty; the memory is filled before it is read.
            let bytes = unsafe {
                let pointer = std::alloc::alloc(Memory::layout(len));
                pointer.write_bytes(0xEE, len);
                Box::from_raw(std::ptr::slice_from_raw_parts_mut(pointer, len))
            };
            return Memory { bytes, start: 0, len, bare: true };
        }
        let mut bytes = vec![CANARY; len + 2 * FENCE + 64].into_boxed_slice();
        let start = (bytes.as_ptr() as usize + FENCE).next_multiple_of(64) - bytes.as_ptr() as usize;
        bytes[start..start + len].fill(0xEE);
        Memory { bytes, start, len, bare: false }
    }

    fn layout(len: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(len, 64).unwrap()
    }

    pub fn pointer(&mut self) -> *mut u8 {
        self.bytes[self.start..].as_mut_ptr()
    }

    fn address(&self) -> *const u8 {
        self.bytes[self.start..].as_ptr()
    }

    fn check(&self) {
        let outside = self.bytes[..self.start].iter().chain(&self.bytes[self.start + self.len..]);
        assert!(outside.copied().all(|b| b == CANARY), "a kernel wrote outside its buffer");
    }

    pub fn write(&mut self, at: usize, dtype: DType, value: Scalar) {
        let at = self.start + at * dtype.size();
        let element = value.to_element(dtype).to_le_bytes();
        self.bytes[at..at + dtype.size()].copy_from_slice(&element[..dtype.size()]);
    }

    pub fn read(&self, at: usize, dtype: DType) -> Scalar {
        let at = self.start + at * dtype.size();
        decode(&self.bytes[at..at + dtype.size()], dtype)
    }
}

/// The best instruction set of this machine, or the one that `KILN_ISA` asks for.
pub fn best_isa() -> Isa {
    let asked = std::env::var("KILN_ISA").ok().and_then(|name| Isa::named(&name));
    asked.map_or(Isa::detect(), |asked| asked.max(Isa::detect()))
}

pub type KernelFn = unsafe extern "C" fn(*const *mut u8, *const i64, *const u64, i64, i64, *mut u8) -> i32;

/// Compiled kernels of a plan, by number.
pub struct Compiled {
    pub kernels: Vec<KernelFn>,
    library: Rc<Libraries>,
}

/// What was loaded, as long as somebody has kernels of it.
struct Libraries {
    loaded: Vec<libloading::Library>,
    folder: PathBuf,
}

impl Drop for Libraries {
    fn drop(&mut self) {
        self.loaded.clear();
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// A plan's kernels, compiled. `None` without a C compiler.
pub fn compile(code: &[KernelSource], target: &dyn Target) -> Option<Compiled> {
    compile_all(&[code], target)?.pop()
}

/// The kernels of several plans, compiled together: most of a text is what all kernels share.
pub fn compile_all(plans: &[&[KernelSource]], target: &dyn Target) -> Option<Vec<Compiled>> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("kiln-inductor-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut shards: HashMap<usize, BTreeMap<&str, &KernelSource>> = HashMap::new();
    for kernel in plans.iter().copied().flatten() {
        shards.entry(kernel.lanes).or_default().insert(&kernel.name, kernel);
    }
    let mut libraries = Libraries { loaded: Vec::new(), folder: folder.clone() };
    let mut found: HashMap<String, KernelFn> = HashMap::new();
    for (lanes, kernels) in shards {
        let (source, object) = (folder.join(format!("k{lanes}.c")), folder.join(format!("k{lanes}.so")));
        let kernels: Vec<&KernelSource> = kernels.into_values().collect();
        std::fs::write(&source, target.source(&kernels)).unwrap();
        let output = Command::new(compiler())
            .args(FLAGS)
            .args(target.flags())
            .args(sanitizer())
            .args(["-O1", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-o"])
            .arg(&object)
            .arg(&source)
            .arg("-lm")
            .output();
        let Ok(output) = output else {
            eprintln!("no C compiler: nothing is run");
            return None;
        };
        assert!(
            output.status.success(),
            "{}\n{}",
            String::from_utf8_lossy(&output.stderr),
            std::fs::read_to_string(&source).unwrap()
        );
        // SAFETY: the library was just built from our text and has no initialisers.
        let library = unsafe { libloading::Library::new(&object) }.unwrap();
        for kernel in kernels {
            // SAFETY: the function has this signature by construction.
            let symbol = unsafe { library.get::<KernelFn>(kernel.name.as_bytes()) }.unwrap();
            found.insert(kernel.name.clone(), *symbol);
        }
        libraries.loaded.push(library);
    }
    let library = Rc::new(libraries);
    let kernels = |code: &&[KernelSource]| code.iter().map(|kernel| found[&kernel.name]).collect();
    Some(plans.iter().map(|code| Compiled { kernels: kernels(code), library: library.clone() }).collect())
}

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
                let (first, item) = match on.is_one_loop {
                    true => (plane * on.pixels + pixels.start, 0),
                    false => (pixels.start, plane as i64),
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

/// An element of an array.
pub fn element(array: &Array, n: usize) -> Scalar {
    match (&array.data, array.dtype) {
        (Data::Float(x), _) => Scalar::Float(x[n]),
        (Data::Int(x), DType::Bool) => Scalar::Bool(x[n] != 0),
        (Data::Int(x), _) => Scalar::Int(x[n]),
    }
}

/// Doubles that come from floats are as exact as floats.
fn close(got: Scalar, want: Scalar, dtype: DType, has_f32: bool) -> bool {
    let (a, b) = (got.as_f64(), want.as_f64());
    let tolerance = match dtype {
        DType::F64 if !has_f32 => 1e-10,
        DType::F16 | DType::BF16 => kiln_testkit::tolerance(dtype),
        _ => 2e-5,
    };
    match dtype.is_float() {
        true => a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * (1.0 + b.abs()),
        false => got.as_i64() == want.as_i64(),
    }
}

fn compare(what: &str, got: &Array, want: &Array, lowered: &Lowered, graph: &Graph) {
    let types = graph.nodes.iter().flat_map(|n| n.args.iter().chain(&n.outs));
    let has_f32 = types.filter_map(|&v| graph.ty(v).as_tensor()).any(|t| t.dtype.computing() == DType::F32);
    assert_eq!(got.ty(), want.ty(), "{what}");
    let dtype = want.dtype;
    for n in 0..want.numel() {
        let (got, want) = (element(got, n), element(want, n));
        assert!(
            close(got, want, dtype, has_f32),
            "{what}[{n}]: {got:?}, expected {want:?}\n{graph}\n{}\n{}\n{:#?}",
            lowered.plan.kernels.iter().map(ToString::to_string).collect::<String>(),
            lowered.code.iter().map(|k| k.code.as_str()).collect::<String>(),
            lowered.plan.steps
        );
    }
}

/// The buffers that a step touches.
fn touched(step: &Step) -> Vec<usize> {
    let mut found = Vec::new();
    step.touched(&mut |id: BufferId| found.push(id.index()));
    found
}

/// The output (or the arena), first byte and end in it, first and last step.
type Span = (Option<usize>, usize, usize, usize, usize);

/// No two buffers that are in use at once share memory (but for a kernel's result in the place of an operand that
/// it was the last to read), every one lies inside what it was given, and the arena is no larger than all
/// temporaries side by side.
pub fn check_memory(plan: &Plan) {
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; plan.buffers.len()];
    for (s, step) in plan.steps.iter().enumerate() {
        touched(step).into_iter().for_each(|b| lives[b].get_or_insert((s, s)).1 = s);
        // An epilogue runs together with its product.
        if step.has_epilogue() {
            touched(&plan.steps[s + 1]).into_iter().for_each(|b| lives[b].get_or_insert((s, s)).1 = s + 1);
        }
    }
    for Bands { first, steps, .. } in &plan.bands {
        for b in plan.steps[*first..first + steps].iter().flat_map(touched) {
            let (from, to) = lives[b].unwrap();
            lives[b] = Some((from.min(*first), to.max(first + steps - 1)));
        }
    }
    let mut spans: Vec<Span> = Vec::new();
    let mut side_by_side = 0;
    for (buffer, life) in plan.buffers.iter().zip(&lives) {
        let (Some((first, last)), bytes) = (*life, buffer.ty.bytes) else { continue };
        match buffer.place {
            Place::Input(_) => {}
            // Outputs stay.
            Place::Output(k) => spans.push((Some(k), 0, bytes, first, usize::MAX)),
            Place::BeforeOutput { output, offset } => {
                let whole = plan.buffers[plan.outputs[output].index()].ty.bytes;
                assert!(offset.is_multiple_of(64) && offset + bytes <= whole, "outside of output {output}");
                spans.push((Some(output), offset, offset + bytes, first, last));
            }
            Place::Arena { offset } => {
                assert!(
                    offset.is_multiple_of(64) && offset + bytes <= plan.arena_bytes,
                    "outside of the arena"
                );
                side_by_side += bytes.next_multiple_of(64);
                spans.push((None, offset, offset + bytes, first, last));
            }
            Place::Band { offset, row_bytes } => {
                let inside = |b: &&Bands| b.first <= first && last < b.first + b.steps;
                let bands = plan.bands.iter().find(inside).expect("it is gone after the bands");
                let m = plan.steps[bands.first].product().expect("bands begin with a product").m;
                let before = (bands.count - 1) * bands.rows;
                assert!(before < m);
                let end = offset + (m - before).max(bands.rows.min(m)) * row_bytes;
                assert!(offset.is_multiple_of(64) && end <= bands.bytes, "outside of a band");
            }
        }
    }
    assert!(plan.arena_bytes <= side_by_side, "{} of {side_by_side} bytes", plan.arena_bytes);
    for (i, a) in spans.iter().enumerate() {
        for b in &spans[..i] {
            let shares = a.0 == b.0 && a.1 < b.2 && b.1 < a.2;
            let at_once = a.3 <= b.4 && b.3 <= a.4;
            let heir = |from: &Span, to: &Span| {
                let epilogue = plan.steps[to.3].has_epilogue();
                let read_by = to.3 + usize::from(epilogue);
                from.4 == read_by
                    && (from.1, from.2) == (to.1, to.2)
                    && matches!(plan.steps[read_by], Step::Launch(_))
            };
            assert!(
                !shares || !at_once || heir(a, b) || heir(b, a),
                "{a:?} and {b:?} overlap\n{:#?}",
                plan.steps
            );
        }
    }
}

/// The bits of everything that a plan gives and writes back.
pub fn bits(graph: &Graph, options: &Options, inputs: &[Argument]) -> Option<Vec<u64>> {
    let lowered = lower(graph, options).unwrap();
    let compiled = compile(&lowered.code, &*options.target)?;
    let mut run = Run::new(&lowered, graph, options, inputs);
    run.run(&compiled).unwrap();
    let mut bits = Vec::new();
    let values = graph.outputs.iter().zip(&run.outputs);
    let written = graph.inputs.iter().zip(&run.inputs);
    for (value, memory) in values.chain(written) {
        let ty = graph.ty(*value).as_tensor().unwrap();
        bits.extend((0..ty.shape.numel()).map(|at| memory.read(at, ty.dtype).to_bits()));
    }
    Some(bits)
}

/// Lowers a graph; runs its plan by definition, and compiled; and compares both with the reference evaluator.
pub fn check_run(graph: &Graph, options: &Options, inputs: &[Argument]) -> Plan {
    graph.verify(Stage::Prims, "the test").unwrap();
    let lowered = lower(graph, options).unwrap();
    check_lowered(&lowered, graph, options, inputs, compile(&lowered.code, &*options.target).as_ref());
    lowered.plan
}

/// The same for a graph that was lowered and compiled before.
pub fn check_lowered(
    lowered: &Lowered,
    graph: &Graph,
    options: &Options,
    inputs: &[Argument],
    compiled: Option<&Compiled>,
) {
    check_memory(&lowered.plan);
    let strides: Vec<Strides> = options.input_layouts.iter().map(|layout| layout.strides.clone()).collect();
    // As it lies in memory: elements of expanded inputs are one.
    let mut inputs = inputs.to_vec();
    for (input, strides) in inputs.iter_mut().zip(&strides) {
        if let Argument::Tensor(t) = input {
            let at = positions(&t.shape, strides);
            let last: HashMap<i64, usize> = at.iter().enumerate().map(|(n, place)| (*place, n)).collect();
            *t = t.take(t.shape.clone(), at.iter().map(|place| last[place]));
        }
    }
    let wanted = kiln_testkit::evaluate(graph, &inputs).map_err(|error| error.to_string());
    let both = |what: &str, got: Result<kiln_testkit::Outcome, String>| match (&wanted, got) {
        (Ok(wanted), Ok(got)) => {
            let sides = [("output", &wanted.outputs, &got.outputs), ("input", &wanted.inputs, &got.inputs)];
            for (side, want, got) in sides {
                for (n, pair) in want.iter().zip(got).enumerate() {
                    if let (Argument::Tensor(want), Argument::Tensor(got)) = pair {
                        compare(&format!("{what}: {side} {n}"), got, want, lowered, graph);
                    }
                }
            }
        }
        (Err(want), Err(got)) => assert!(want.contains(&got), "{what}: {got}, expected {want}"),
        (want, got) => panic!("{what}: expected {want:?}, got {got:?}\n{graph}"),
    };
    let size: usize =
        graph.nodes.iter().map(|n| graph.ty(n.outs[0]).as_tensor().map_or(0, |t| t.shape.numel())).sum();
    // Element by element takes its time.
    if size <= 60_000 {
        both("by definition", interpret(&lowered.plan, graph, &strides, &inputs));
        let plain = Options { target: Arc::new(Interpreter), ..options.clone() };
        let plain = lower(graph, &plain).unwrap();
        check_memory(&plain.plan);
        both("for an interpreter", interpret(&plain.plan, graph, &strides, &inputs));
    }
    let Some(compiled) = compiled else { return };
    let mut run = Run::new(lowered, graph, options, &inputs);
    let done = run.run(compiled).map(|()| {
        let view = |place: Place, ty: &TensorTy, strides: &Strides| {
            let buffer = lowered.plan.buffers.iter().position(|buffer| buffer.place == place)?;
            let at = BufferRef { buffer: BufferId(buffer as u32), offset: 0 };
            Some(run.array(&ViewRef { at, ty: ty.clone(), strides: strides.clone() }))
        };
        let outputs = graph.outputs.iter().enumerate().filter_map(|(k, &v)| {
            let ty = graph.ty(v).as_tensor()?;
            view(Place::Output(k), ty, &ty.shape.contiguous_strides())
        });
        let after = inputs.iter().enumerate().map(|(i, input)| match input {
            Argument::Tensor(t) => {
                view(Place::Input(i), &t.ty(), &strides[i]).map_or(input.clone(), Into::into)
            }
            other => other.clone(),
        });
        kiln_testkit::Outcome { outputs: outputs.map(Into::into).collect(), inputs: after.collect() }
    });
    both("compiled", done);
}

/// A small random generator.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = self.0 ^ (self.0 >> 33);
        x.wrapping_mul(0xff51afd7ed558ccd) >> 17
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn float(&mut self) -> f64 {
        f64::from(((self.next() % 4001) as f64 / 1000.0 - 2.0) as f32)
    }

    pub fn value(&mut self, ty: &Ty) -> Argument {
        let number = |this: &mut Random, dtype: DType| match dtype {
            DType::Bool => Scalar::Bool(this.below(2) == 1),
            dtype if dtype.is_float() => Scalar::Float(dtype.round(this.float())),
            dtype => Scalar::Int(dtype.wrap(this.below(7) as i64 - 3)),
        };
        match ty {
            Ty::Scalar(kind) => Argument::Scalar(number(self, kind.dtype())),
            Ty::Tensor(t) if t.dtype.is_float() => {
                Array::floats(t.dtype, t.shape.clone(), |_| number(self, t.dtype).as_f64()).into()
            }
            Ty::Tensor(t) => Array::ints(t.dtype, t.shape.clone(), |_| number(self, t.dtype).as_i64()).into(),
            Ty::List(_) => panic!("lists are packed in the graph"),
        }
    }

    pub fn inputs(&mut self, graph: &Graph) -> Vec<Argument> {
        graph.inputs.iter().map(|&v| self.value(graph.ty(v))).collect()
    }
}

/// Checks a graph given as text, on the machine's best instruction set.
pub fn check_text(text: &str) -> Plan {
    check_strided(text, &[])
}

/// The same with strides for some inputs.
pub fn check_strided(text: &str, strides: &[(usize, &[isize])]) -> Plan {
    let graph: Graph = text.parse().unwrap();
    let mut options = Options::dense(&graph, C::new(best_isa()));
    for (input, strides) in strides {
        Arc::make_mut(&mut options.input_layouts)[*input] = Layout { strides: Strides::from_slice(strides) };
    }
    let inputs = Random(text.len() as u64).inputs(&graph);
    check_run(&graph, &options, &inputs)
}
