//! A runner for plans, single-threaded, and comparison with the naive evaluator.
#![allow(dead_code, reason = "each test binary uses a part")]

pub mod naive;

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_inductor::{
    Bands, BatchRef, BufferRef, Epilogue, KernelSource, Layout, MatrixRef, OnPlanes, Options, Place, Plan,
    Step, ViewRef, lower,
};
use kiln_ir::math::c::{CIsa, FLAGS};
use kiln_ir::{DType, Graph, Op, Scalar, Shape, Stage, Strides, Ty, bf16, f16};
use naive::{Tensor, Val};

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

/// The number that these bytes are.
fn decode(bytes: &[u8], dtype: DType) -> Scalar {
    let mut element = [0; 8];
    element[..bytes.len()].copy_from_slice(bytes);
    let element = u64::from_le_bytes(element);
    match dtype {
        DType::F16 => Scalar::Float(f16::from_bits(element as u16).to_f64()),
        DType::BF16 => Scalar::Float(bf16::from_bits(element as u16).to_f64()),
        DType::F32 => Scalar::Float(f64::from(f32::from_bits(element as u32))),
        DType::F64 => Scalar::Float(f64::from_bits(element)),
        DType::Bool => {
            assert!(element <= 1, "a truth value is {element}");
            Scalar::Bool(element == 1)
        }
        integer => Scalar::Int(integer.wrap(element as i64)),
    }
}

fn positions(shape: &Shape, strides: &Strides) -> Vec<usize> {
    let mut out = Vec::with_capacity(shape.numel());
    for mut n in 0..shape.numel() {
        let mut at = 0;
        for d in (0..shape.rank()).rev() {
            at += (n % shape[d]) as isize * strides[d];
            n /= shape[d];
        }
        out.push(at as usize);
    }
    out
}

/// The best instruction set of this machine, or the one that `KILN_ISA` asks for.
pub fn best_isa() -> CIsa {
    let best = detect();
    match std::env::var("KILN_ISA").as_deref() {
        Ok("avx2") => best.max(CIsa::Avx2),
        Ok("plain") => CIsa::Plain,
        _ => best,
    }
}

fn detect() -> CIsa {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
        {
            return CIsa::Avx512;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return CIsa::Avx2;
        }
    }
    CIsa::Plain
}

pub type KernelFn = unsafe extern "C" fn(*const *mut u8, *const i64, *const u64, i64, i64, *mut u8) -> i32;

/// Compiled kernels of a plan, by name. `None` without a C compiler.
pub struct Compiled {
    pub libraries: Vec<libloading::Library>,
    pub kernels: Vec<KernelFn>,
    folder: PathBuf,
}

impl Drop for Compiled {
    fn drop(&mut self) {
        self.libraries.clear();
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

pub fn compile(plan: &Plan) -> Option<Compiled> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("kiln-inductor-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut shards: HashMap<usize, Vec<&KernelSource>> = HashMap::new();
    for kernel in &plan.kernels {
        shards.entry(kernel.lanes).or_default().push(kernel);
    }
    let mut libraries = Vec::new();
    let mut found: HashMap<String, KernelFn> = HashMap::new();
    for (lanes, kernels) in shards {
        let (source, object) = (folder.join(format!("k{lanes}.c")), folder.join(format!("k{lanes}.so")));
        std::fs::write(&source, KernelSource::shard(&kernels, plan.isa)).unwrap();
        let output = Command::new(compiler())
            .args(FLAGS)
            .args(plan.isa.flags())
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
        libraries.push(library);
    }
    let kernels = plan.kernels.iter().map(|k| found[&k.name]).collect();
    Some(Compiled { libraries, kernels, folder })
}

/// A plan with its memory.
pub struct Run<'p> {
    pub plan: &'p Plan,
    pub inputs: Vec<Memory>,
    pub outputs: Vec<Memory>,
    pub arena: Memory,
    scalars: Vec<Scalar>,
    results: Vec<Scalar>,
    /// The memory of a band, and the first of its rows.
    band: Option<(Memory, usize)>,
}

impl<'p> Run<'p> {
    pub fn new(plan: &'p Plan, graph: &Graph, options: &Options, inputs: &[Val]) -> Run<'p> {
        let mut memories = Vec::new();
        let mut scalars = Vec::new();
        for (i, input) in inputs.iter().enumerate() {
            let (mut memory, mut scalar) = (Memory::new(0), Scalar::Int(0));
            match input {
                Val::Tensor(t) => {
                    let at = positions(&t.shape, &options.input_layouts[i].strides);
                    memory = Memory::new(at.iter().max().map_or(0, |m| (m + 1) * t.dtype.size()));
                    for (&at, &x) in at.iter().zip(&t.data) {
                        memory.write(at, t.dtype, x);
                    }
                }
                Val::Scalar(s) => scalar = *s,
                Val::List(_) => panic!("lists are packed in the graph"),
            }
            memories.push(memory);
            scalars.push(scalar);
        }
        let bytes = |v: &kiln_ir::Value| graph.ty(*v).as_tensor().unwrap().bytes();
        let outputs = graph.outputs.iter().map(|v| Memory::new(bytes(v))).collect();
        let results = vec![Scalar::Int(0); plan.scalars.len()];
        let arena = Memory::new(plan.arena_bytes);
        Run { plan, inputs: memories, outputs, arena, scalars, results, band: None }
    }

    pub fn pointer(&mut self, at: BufferRef) -> *mut u8 {
        let buffer = &self.plan.buffers[at.buffer.index()];
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

    fn element(&mut self, at: BufferRef, dtype: DType, element: i64) -> *mut u8 {
        self.pointer(at).wrapping_offset(element as isize * dtype.size() as isize)
    }

    fn read(&mut self, at: BufferRef, dtype: DType, element: i64) -> Scalar {
        let p = self.element(at, dtype, element);
        // SAFETY: plans stay inside their buffers; the fences check writes.
        decode(unsafe { std::slice::from_raw_parts(p, dtype.size()) }, dtype)
    }

    fn write(&mut self, at: BufferRef, dtype: DType, element: i64, x: Scalar) {
        let p = self.element(at, dtype, element);
        let bytes = x.to_element(dtype).to_le_bytes();
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), p, dtype.size()) };
    }

    /// Runs all steps; the text of a failed check is the error.
    pub fn run(&mut self, compiled: &Compiled) -> Result<(), String> {
        let given = self.scalars.clone();
        self.plan.eval_scalars(&|i| given[i], &mut self.results);
        let steps = &self.plan.steps;
        let mut s = 0;
        while s < steps.len() {
            if let Some(bands) = self.plan.bands.iter().find(|bands| bands.first == s) {
                self.together(bands, compiled)?;
                s += bands.steps;
                continue;
            }
            s += match (&steps[s], steps.get(s + 1)) {
                (product @ Step::Gemm { epilogue: Some(epilogue), .. }, Some(kernel)) => {
                    self.bands(product, *epilogue, kernel, compiled)?;
                    2
                }
                (convolution @ Step::Convolution { epilogue: Some(on), .. }, Some(kernel)) => {
                    self.planes(convolution, on, kernel, compiled)?;
                    2
                }
                (step, _) => {
                    self.step(step, None, compiled)?;
                    1
                }
            };
        }
        self.inputs.iter().chain(&self.outputs).for_each(Memory::check);
        self.arena.check();
        Ok(())
    }

    /// Steps that run together, band after band, the last one first, each in fresh memory.
    fn together(&mut self, bands: &Bands, compiled: &Compiled) -> Result<(), String> {
        let steps = &self.plan.steps[bands.first..bands.first + bands.steps];
        let (batch, all) = match &steps[0] {
            Step::Gemm { m, .. } => (1, *m),
            Step::Bmm { batch, m, .. } => (*batch, *m),
            other => panic!("bands begin with a product: {other:?}"),
        };
        for (matrix, band) in (0..batch * bands.count).rev().map(|i| (i / bands.count, i % bands.count)) {
            let from = band * bands.rows;
            let to = if band + 1 == bands.count { all } else { from + bands.rows };
            let row = matrix * all + from;
            self.band = Some((Memory::new(bands.bytes), row));
            let mut kernels = bands.kernels.iter();
            for step in steps {
                match step {
                    Step::Kernel { items, .. } => {
                        let Epilogue { rows, items: per } = kernels.next().unwrap();
                        let item = |row: usize| match row == batch * all {
                            true => *items,
                            false => {
                                assert!(row.is_multiple_of(*rows));
                                (row / rows) as i64 * per
                            }
                        };
                        let range = (item(row), item(matrix * all + to));
                        self.step(step, Some(range), compiled)?;
                    }
                    product => {
                        let mut part = one_of(product, matrix);
                        if let Step::Gemm { m, lhs, dst, .. } = &mut part {
                            *m = to - from;
                            lhs.at.offset += from as i64 * lhs.row;
                            dst.at.offset += from as i64 * dst.row;
                        }
                        self.step(&part, None, compiled)?;
                    }
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
        product: &Step,
        epilogue: Epilogue,
        kernel: &Step,
        compiled: &Compiled,
    ) -> Result<(), String> {
        let (Step::Gemm { m: all, .. }, Step::Kernel { items, .. }) = (product, kernel) else {
            panic!("an epilogue is a kernel after a product")
        };
        for band in (0..all.div_ceil(epilogue.rows)).rev() {
            let (begin, end) = (band * epilogue.rows, all.min(&((band + 1) * epilogue.rows)).to_owned());
            let mut part = product.clone();
            if let Step::Gemm { m, lhs, dst, .. } = &mut part {
                *m = end - begin;
                lhs.at.offset += begin as i64 * lhs.row;
                dst.at.offset += begin as i64 * dst.row;
            }
            self.step(&part, None, compiled)?;
            let first = band as i64 * epilogue.items;
            let until = if end == *all { *items } else { first + epilogue.items };
            self.step(kernel, Some((first, until)), compiled)?;
        }
        Ok(())
    }

    /// A convolution and its epilogue, plane after plane and part after part of it, the last one first.
    fn planes(
        &mut self,
        convolution: &Step,
        on: &OnPlanes,
        kernel: &Step,
        compiled: &Compiled,
    ) -> Result<(), String> {
        let Step::Convolution { x, weight, .. } = convolution else {
            panic!("planes are those of a convolution")
        };
        for plane in (0..x.shape[0] * weight.shape[0]).rev() {
            let cut = on.pixels / 3;
            for pixels in [cut..on.pixels, 0..cut] {
                self.convolve(convolution, plane, pixels.clone());
                let mut part = kernel.clone();
                let Step::Kernel { bufs, ints, .. } = &mut part else { panic!("an epilogue is a kernel") };
                (ints[on.length], ints[on.width], ints[on.blocks]) =
                    (pixels.len() as i64, pixels.len() as i64, 1);
                let (first, item) = match on.is_one_loop {
                    true => (plane * on.pixels + pixels.start, 0),
                    false => (pixels.start, plane as i64),
                };
                bufs.iter_mut().zip(&on.steps).for_each(|(at, step)| at.offset += first as i64 * step);
                if !pixels.is_empty() {
                    self.step(&part, Some((item, item + 1)), compiled)?;
                }
            }
        }
        Ok(())
    }

    /// Pixels of a plane, by the definition.
    fn convolve(&mut self, step: &Step, plane: usize, pixels: std::ops::Range<usize>) {
        let Step::Convolution { op, x, weight, dst, dtype, .. } = step else { panic!("{step:?}") };
        let Op::Convolution { stride, padding, dilation, groups: 1 } = op else { panic!("{op:?}") };
        let (image, filter) = (plane / weight.shape[0], plane % weight.shape[0]);
        let out = |d: usize| {
            let window = dilation[d] * (weight.shape[2 + d] - 1) + 1;
            (x.shape[2 + d] + 2 * padding[d] - window) / stride[d] + 1
        };
        let (height, width) = (out(0), out(1));
        let at = |view: &ViewRef, index: [usize; 4]| -> i64 {
            index.iter().zip(&view.strides).map(|(&i, &stride)| i as i64 * stride as i64).sum()
        };
        for pixel in pixels {
            let mut sum = 0.0;
            for c in 0..weight.shape[1] {
                for (r, s) in (0..weight.shape[2]).flat_map(|r| (0..weight.shape[3]).map(move |s| (r, s))) {
                    let row = (pixel / width * stride[0] + r * dilation[0]).checked_sub(padding[0]);
                    let column = (pixel % width * stride[1] + s * dilation[1]).checked_sub(padding[1]);
                    let (Some(row), Some(column)) = (row, column) else { continue };
                    if row < x.shape[2] && column < x.shape[3] {
                        let image = self.read(x.at, *dtype, at(x, [image, c, row, column])).as_f64();
                        sum += image * self.read(weight.at, *dtype, at(weight, [filter, c, r, s])).as_f64();
                    }
                }
            }
            let place = BufferRef { buffer: *dst, offset: 0 };
            self.write(place, *dtype, (plane * height * width + pixel) as i64, Scalar::Float(sum));
        }
    }

    fn step(&mut self, step: &Step, range: Option<(i64, i64)>, compiled: &Compiled) -> Result<(), String> {
        match step {
            Step::Kernel { kernel, bufs, ints, scalars, items, scratch_bytes, checks, .. } => {
                let bufs: Vec<*mut u8> = bufs.iter().map(|&b| self.pointer(b)).collect();
                let given = &self.scalars;
                let scalars: Vec<u64> = scalars
                    .iter()
                    .map(|&s| Plan::scalar(s, &|i| given[i], &self.results).to_bits())
                    .collect();
                let mut scratch = Memory::new(*scratch_bytes);
                let function = compiled.kernels[*kernel];
                // In three ranges, as threads would.
                let (begin, end) = range.unwrap_or((0, *items));
                let cuts = [begin, begin + (end - begin) / 3, begin + (end - begin) / 2, end];
                let mut failed = 0;
                for pair in cuts.windows(2) {
                    // SAFETY: the plan gives every kernel the arguments it was written for.
                    let status = unsafe {
                        function(
                            bufs.as_ptr(),
                            ints.as_ptr(),
                            scalars.as_ptr(),
                            pair[0],
                            pair[1],
                            scratch.pointer(),
                        )
                    };
                    failed = if status != 0 { status } else { failed };
                }
                scratch.check();
                match failed {
                    0 => Ok(()),
                    code => Err(checks[code as usize - 1].op.to_string()),
                }
            }
            Step::Gemm { m, n, k, lhs, rhs, dst, accumulate, dtype, constant: _, epilogue: _ } => {
                let at = |x: &MatrixRef, i: usize, j: usize| i as i64 * x.row + j as i64 * x.column;
                for i in 0..*m {
                    for j in 0..*n {
                        let (mut float, mut int) = (0.0, 0i64);
                        for l in 0..*k {
                            let x = self.read(lhs.at, *dtype, at(lhs, i, l));
                            let y = self.read(rhs.at, *dtype, at(rhs, l, j));
                            float += x.as_f64() * y.as_f64();
                            int = int.wrapping_add(x.as_i64().wrapping_mul(y.as_i64()));
                        }
                        let old = self.read(dst.at, *dtype, at(dst, i, j));
                        let sum = match (dtype.is_float(), accumulate) {
                            (true, false) => Scalar::Float(float),
                            (true, true) => Scalar::Float(old.as_f64() + float),
                            (false, false) => Scalar::Int(int),
                            (false, true) => Scalar::Int(old.as_i64().wrapping_add(int)),
                        };
                        self.write(dst.at, *dtype, at(dst, i, j), sum);
                    }
                }
                Ok(())
            }
            Step::Bmm { batch, .. } => {
                (0..*batch).try_for_each(|b| self.step(&one_of(step, b), None, compiled))
            }
            Step::Copy { src, dst } => {
                let (from, to) = (&self.plan.buffers[src.index()].ty, &self.plan.buffers[dst.index()].ty);
                let (a, b) = (positions(&from.shape, &from.strides), positions(&to.shape, &to.strides));
                let dtype = from.dtype;
                for (a, b) in a.into_iter().zip(b) {
                    let x = self.read(BufferRef { buffer: *src, offset: 0 }, dtype, a as i64);
                    self.write(BufferRef { buffer: *dst, offset: 0 }, dtype, b as i64, x);
                }
                Ok(())
            }
            Step::Fallback { op: Op::GatherBackward { dim, .. }, args, outs, .. } => {
                let out = &self.plan.buffers[outs[0].index()].ty;
                let at = BufferRef { buffer: outs[0], offset: 0 };
                for n in 0..out.shape.numel() {
                    self.write(at, out.dtype, n as i64, Scalar::Float(0.0));
                }
                let (src, index) = (
                    positions(&args[0].shape, &args[0].strides),
                    positions(&args[1].shape, &args[1].strides),
                );
                for (n, (s, i)) in src.into_iter().zip(index).enumerate() {
                    let mut rest = n;
                    let mut to = 0;
                    for d in (0..out.shape.rank()).rev() {
                        let own = rest % args[0].shape[d];
                        rest /= args[0].shape[d];
                        let own = if d == *dim {
                            self.read(args[1].at, DType::I64, i as i64).as_i64() as usize
                        } else {
                            own
                        };
                        to += own as isize * out.strides[d];
                    }
                    let x = self.read(args[0].at, out.dtype, s as i64).as_f64()
                        + self.read(at, out.dtype, to as i64).as_f64();
                    self.write(at, out.dtype, to as i64, Scalar::Float(x));
                }
                Ok(())
            }
            Step::Convolution { x, weight, dst, .. } => {
                let planes = x.shape[0] * weight.shape[0];
                let pixels = self.plan.buffers[dst.index()].ty.shape.numel() / planes.max(1);
                (0..planes).for_each(|plane| self.convolve(step, plane, 0..pixels));
                Ok(())
            }
            Step::Random { .. } | Step::Fallback { .. } | Step::Eager { .. } => {
                panic!("not run here: {step:?}")
            }
        }
    }
}

/// The product of one matrix of a batch.
fn one_of(product: &Step, b: usize) -> Step {
    let Step::Bmm { m, n, k, lhs, rhs, dst, dtype, .. } = product else { return product.clone() };
    let dst = BufferRef { buffer: *dst, offset: (b * m * n) as i64 };
    Step::Gemm {
        m: *m,
        n: *n,
        k: *k,
        lhs: nth(lhs, b),
        rhs: nth(rhs, b),
        dst: MatrixRef { at: dst, row: *n as i64, column: 1 },
        accumulate: false,
        dtype: *dtype,
        constant: false,
        epilogue: None,
    }
}

/// One matrix of a batch.
fn nth(batch: &BatchRef, mut number: usize) -> MatrixRef {
    let mut matrix = batch.matrix;
    assert!(number < batch.sizes.numel());
    for (size, stride) in batch.sizes.iter().zip(&batch.strides).rev() {
        matrix.at.offset += (number % size) as i64 * *stride as i64;
        number /= size;
    }
    matrix
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

fn compare(
    what: &str,
    memory: &Memory,
    shape: &Shape,
    strides: &Strides,
    want: &Tensor,
    plan: &Plan,
    graph: &Graph,
) {
    let types = graph.nodes.iter().flat_map(|n| n.args.iter().chain(&n.outs));
    let has_f32 = types.filter_map(|&v| graph.ty(v).as_tensor()).any(|t| t.dtype.computing() == DType::F32);
    for (n, at) in positions(shape, strides).into_iter().enumerate() {
        let got = memory.read(at, want.dtype);
        assert!(
            close(got, want.data[n], want.dtype, has_f32),
            "{what}[{n}]: {got:?}, expected {:?}\n{graph}\n{}\n{}\n{:#?}",
            want.data[n],
            plan.kernels.iter().map(|k| k.loops.as_str()).collect::<String>(),
            plan.kernels.iter().map(|k| k.code.as_str()).collect::<String>(),
            plan.steps
        );
    }
}

/// The buffers that a step touches.
fn touched(step: &Step) -> Vec<usize> {
    let buffers: Vec<kiln_inductor::BufferId> = match step {
        Step::Kernel { bufs, .. } => bufs.iter().map(|b| b.buffer).collect(),
        Step::Gemm { lhs, rhs, dst, .. } => [lhs, rhs, dst].iter().map(|m| m.at.buffer).collect(),
        Step::Bmm { lhs, rhs, dst, .. } => vec![lhs.matrix.at.buffer, rhs.matrix.at.buffer, *dst],
        Step::Random { buffer, .. } => vec![*buffer],
        Step::Copy { src, dst } => vec![*src, *dst],
        Step::Convolution { x, weight, dst, .. } => vec![x.at.buffer, weight.at.buffer, *dst],
        Step::Fallback { args, outs, .. } => args.iter().map(|a| a.at.buffer).chain(outs.clone()).collect(),
        Step::Eager { args, outs, .. } => {
            args.iter().chain(outs.iter().map(|(_, out)| out)).map(|v| v.at.buffer).collect()
        }
    };
    buffers.into_iter().map(|b| b.index()).collect()
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
                let m = match plan.steps[bands.first] {
                    Step::Gemm { m, .. } | Step::Bmm { m, .. } => m,
                    _ => panic!("bands begin with a product"),
                };
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
                    && matches!(plan.steps[read_by], Step::Kernel { .. })
            };
            assert!(
                !shares || !at_once || heir(a, b) || heir(b, a),
                "{a:?} and {b:?} overlap\n{:#?}",
                plan.steps
            );
        }
    }
}

/// Lowers, compiles and runs a graph and compares with the naive evaluator. Returns the plan.
pub fn check_run(graph: &Graph, options: &Options, inputs: &[Val]) -> Plan {
    graph.verify(Stage::Prims, "the test").unwrap();
    let plan = lower(graph, options).unwrap();
    check_memory(&plan);
    let Some(compiled) = compile(&plan) else { return plan };
    let mut run = Run::new(&plan, graph, options, inputs);
    // As it lies in memory: elements of expanded inputs are one.
    let mut inputs = inputs.to_vec();
    for (i, input) in inputs.iter_mut().enumerate() {
        if let Val::Tensor(t) = input {
            for (n, at) in positions(&t.shape, &options.input_layouts[i].strides).into_iter().enumerate() {
                t.data[n] = run.inputs[i].read(at, t.dtype);
            }
        }
    }
    let wanted = naive::evaluate(graph, &inputs);
    let done = run.run(&compiled);
    let (outputs, writes) = match (wanted, done) {
        (Ok(wanted), Ok(())) => wanted,
        (Err(want), Err(got)) => {
            assert_eq!(want, got);
            return plan;
        }
        (want, got) => panic!("expected {:?}, got {got:?}\n{graph}", want.map(|_| ())),
    };
    for (k, want) in outputs.iter().enumerate() {
        compare(
            &format!("output {k}"),
            &run.outputs[k],
            &want.shape,
            &want.shape.contiguous_strides(),
            want,
            &plan,
            graph,
        );
    }
    for (write, want) in graph.writes.iter().zip(&writes) {
        let i = graph.inputs.iter().position(|&v| v == write.target).unwrap();
        compare(
            &format!("input {i}"),
            &run.inputs[i],
            &want.shape,
            &options.input_layouts[i].strides,
            want,
            &plan,
            graph,
        );
    }
    plan
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

    pub fn value(&mut self, ty: &Ty) -> Val {
        let number = |this: &mut Random, dtype: DType| match dtype {
            DType::Bool => Scalar::Bool(this.below(2) == 1),
            dtype if dtype.is_float() => Scalar::Float(dtype.round(this.float())),
            dtype => Scalar::Int(dtype.wrap(this.below(7) as i64 - 3)),
        };
        match ty {
            Ty::Scalar(kind) => Val::Scalar(number(self, kind.dtype())),
            Ty::Tensor(t) => Val::Tensor(Tensor {
                dtype: t.dtype,
                shape: t.shape.clone(),
                data: (0..t.shape.numel()).map(|_| number(self, t.dtype)).collect(),
            }),
            Ty::List(_) => panic!("lists are packed in the graph"),
        }
    }

    pub fn inputs(&mut self, graph: &Graph) -> Vec<Val> {
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
    let mut options = Options::dense(&graph, best_isa(), 2);
    for (input, strides) in strides {
        Arc::make_mut(&mut options.input_layouts)[*input] = Layout { strides: Strides::from_slice(strides) };
    }
    let inputs = Random(text.len() as u64).inputs(&graph);
    check_run(&graph, &options, &inputs)
}
