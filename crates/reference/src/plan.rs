//! Plans, run by their definition: kernels by [`run_kernel`], calls by the reference evaluator, one step after the other.
//! What bands and epilogues say of the order of things is not looked at: it changes no result.

use kiln_ir::{DType, EmitExt, Graph, Result, Scalar, ScalarKind, Shape, Strides, Ty, Value, bf16, f16};
use kiln_plan::{BufferRef, Launch, Numbers, OneByOne, Place, Plan, ScalarRef, Step, ViewRef};

use crate::loops::{Elements, row_of, run_kernel};
use crate::{Argument, Array, Data, Evaluator, Outcome};

/// Positions of a tensor's elements, in row-major order.
pub fn positions(shape: &Shape, strides: &Strides) -> Vec<i64> {
    let position = |mut n: usize| {
        let mut at = 0;
        for d in (0..shape.rank()).rev() {
            at += (n % shape[d]) as i64 * strides[d] as i64;
            n /= shape[d];
        }
        at
    };
    (0..shape.numel()).map(position).collect()
}

/// The number that these bytes are.
pub fn decode(bytes: &[u8], dtype: DType) -> Scalar {
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

/// Memory that a plan's steps read and write, element by element.
pub trait Memory {
    /// The element so many behind a place.
    fn read(&self, at: BufferRef, dtype: DType, element: i64) -> Scalar;
    /// Changes it.
    fn write(&mut self, at: BufferRef, dtype: DType, element: i64, value: Scalar);

    /// A tensor, dense.
    fn array(&self, view: &ViewRef) -> Array {
        let ViewRef { at, ty, strides } = view;
        let found: Vec<Scalar> =
            positions(&ty.shape, strides).into_iter().map(|n| self.read(*at, ty.dtype, n)).collect();
        if ty.dtype.is_float() {
            Array::floats(ty.dtype, ty.shape.clone(), |i| found[i].as_f64())
        } else {
            Array::ints(ty.dtype, ty.shape.clone(), |i| found[i].as_i64())
        }
    }

    /// Puts a dense tensor where a view is.
    fn put(&mut self, view: &ViewRef, array: &Array) {
        let ViewRef { at, ty, strides } = view;
        for (i, n) in positions(&ty.shape, strides).into_iter().enumerate() {
            let value = match &array.data {
                Data::Float(x) => Scalar::Float(x[i]),
                Data::Int(x) => Scalar::Int(x[i]),
            };
            self.write(*at, ty.dtype, n, value);
        }
    }
}

/// Runs a step that is no launch by the reference evaluator. `number` gives a number.
pub fn run_call(
    step: &Step,
    memory: &mut (impl Memory + ?Sized),
    number: &dyn Fn(ScalarRef) -> Scalar,
) -> Result<()> {
    match step {
        Step::Launch(_) => Ok(()),
        Step::Call(call) => {
            let tys = call.types();
            let tensors =
                call.args.iter().zip(&tys).map(|(view, ty)| {
                    Argument::Tensor(Array { shape: ty.shape.clone(), ..memory.array(view) })
                });
            let numbers = call.scalars.iter().map(|&scalar| Argument::Scalar(number(scalar)));
            let args: Vec<Argument> = tensors.chain(numbers).collect();
            let mut graph = Graph::new();
            let mut inputs: Vec<Value> = args.iter().map(|arg| graph.input(arg.ty())).collect();
            graph.loc = call.loc;
            if call.widens() {
                // Sums that are not rounded.
                for input in &mut inputs {
                    *input = graph.to(*input, DType::F32)?;
                }
            }
            graph.outputs = kiln_ir::Emit::emit(&mut graph, call.op.clone(), &inputs)?.to_vec();
            let outcome = Evaluator::default().run(&graph, &args)?;
            for (out, result) in call.outs.iter().zip(&outcome.outputs) {
                if let Argument::Tensor(array) = result {
                    memory.put(out, array);
                }
            }
            Ok(())
        }
        Step::OneByOne(OneByOne { graph, args, scalars, outs }) => {
            let tensors = args.iter().map(|view| Argument::Tensor(memory.array(view)));
            let numbers = scalars.iter().map(|&scalar| Argument::Scalar(number(scalar)));
            let inputs: Vec<Argument> = tensors.chain(numbers).collect();
            let outcome = Evaluator::default().run(graph, &inputs)?;
            for (result, out) in outs {
                if let Argument::Tensor(array) = &outcome.outputs[*result] {
                    memory.put(out, array);
                }
            }
            Ok(())
        }
    }
}

/// The memory of a plan that is interpreted.
struct Bytes<'p> {
    plan: &'p Plan,
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
    arena: Vec<u8>,
    /// By buffer, those that are there for one band only: here as a whole.
    bands: Vec<Vec<u8>>,
}

impl Bytes<'_> {
    /// The memory of a buffer, and its first byte there.
    fn region(&self, at: BufferRef) -> (&Vec<u8>, usize) {
        match self.plan.buffers[at.buffer.index()].place {
            Place::Input(i) => (&self.inputs[i], 0),
            Place::Output(k) => (&self.outputs[k], 0),
            Place::BeforeOutput { output, offset } => (&self.outputs[output], offset),
            Place::Arena { offset } => (&self.arena, offset),
            Place::Band { .. } => (&self.bands[at.buffer.index()], 0),
        }
    }

    fn region_mut(&mut self, at: BufferRef) -> (&mut Vec<u8>, usize) {
        match self.plan.buffers[at.buffer.index()].place {
            Place::Input(i) => (&mut self.inputs[i], 0),
            Place::Output(k) => (&mut self.outputs[k], 0),
            Place::BeforeOutput { output, offset } => (&mut self.outputs[output], offset),
            Place::Arena { offset } => (&mut self.arena, offset),
            Place::Band { .. } => (&mut self.bands[at.buffer.index()], 0),
        }
    }
}

impl Memory for Bytes<'_> {
    fn read(&self, at: BufferRef, dtype: DType, element: i64) -> Scalar {
        let (region, first) = self.region(at);
        let byte = first + (at.offset + element) as usize * dtype.size();
        decode(&region[byte..byte + dtype.size()], dtype)
    }

    fn write(&mut self, at: BufferRef, dtype: DType, element: i64, value: Scalar) {
        let (region, first) = self.region_mut(at);
        let byte = first + (at.offset + element) as usize * dtype.size();
        let bytes = value.to_element(dtype).to_le_bytes();
        region[byte..byte + dtype.size()].copy_from_slice(&bytes[..dtype.size()]);
    }
}

/// What a kernel sees of a plan's memory.
struct Seen<'a, M: Memory + ?Sized> {
    memory: &'a mut M,
    bufs: &'a [BufferRef],
    dtypes: &'a [DType],
    scalars: Vec<Scalar>,
}

impl<M: Memory + ?Sized> Elements for Seen<'_, M> {
    fn read(&self, buffer: usize, element: i64) -> Scalar {
        self.memory.read(self.bufs[buffer], self.dtypes[buffer], element)
    }

    fn write(&mut self, buffer: usize, element: i64, value: Scalar) {
        self.memory.write(self.bufs[buffer], self.dtypes[buffer], element, value);
    }

    fn number(&self, scalar: usize) -> Scalar {
        self.scalars[scalar]
    }
}

/// Runs a launch by its loops. Returns its status.
pub fn run_launch(
    plan: &Plan,
    launch: &Launch,
    memory: &mut (impl Memory + ?Sized),
    number: &dyn Fn(ScalarRef) -> Scalar,
) -> usize {
    let kernel = plan.kernel(launch);
    let scalars: Vec<Scalar> = launch.scalars.iter().map(|&scalar| number(scalar)).collect();
    let columns = kernel.buffers.len();
    let mut run = |kernel: &kiln_plan::loops::Kernel, bufs: &[BufferRef]| {
        let mut seen = Seen { memory: &mut *memory, bufs, dtypes: &kernel.buffers, scalars: scalars.clone() };
        run_kernel(kernel, &mut seen)
    };
    if launch.rows.is_empty() {
        return run(&kernel, &launch.bufs);
    }
    let rows = launch.rows.iter().zip(launch.bufs.chunks(columns));
    rows.map(|(&count, bufs)| run(&row_of(&kernel, count), bufs)).max().unwrap_or(0)
}

/// The numbers of a plan's steps, given those that are inputs.
pub fn numbers_of<'a>(
    plan: &Plan,
    input: &'a dyn Fn(usize) -> Scalar,
) -> Result<impl Fn(ScalarRef) -> Scalar + use<'a>> {
    let mut numbers = Numbers::new(plan.scalars.clone());
    let computed: Vec<usize> =
        (0..plan.scalars.len()).map(|i| numbers.position(ScalarRef::Computed(i))).collect();
    let mut found = Vec::new();
    numbers.values(&|i| Some(input(i)), &mut |number| found.push(number))?;
    Ok(move |number: ScalarRef| match number {
        ScalarRef::Input(i) => input(i),
        ScalarRef::Constant(x) => x,
        ScalarRef::Computed(i) => found[computed[i]],
    })
}

/// Runs the plan of a graph, whose inputs have these strides. A failed check is the error: the op whose operand was out of
/// range.
pub fn interpret(
    plan: &Plan,
    graph: &Graph,
    strides: &[Strides],
    inputs: &[Argument],
) -> std::result::Result<Outcome, String> {
    let mut memory = Bytes {
        plan,
        inputs: vec![Vec::new(); inputs.len()],
        outputs: graph.outputs.iter().map(|&v| vec![0xEE; bytes(graph.ty(v))]).collect(),
        arena: vec![0xEE; plan.arena_bytes],
        bands: plan
            .buffers
            .iter()
            .map(|buffer| {
                if matches!(buffer.place, Place::Band { .. }) {
                    vec![0xEE; buffer.ty.bytes]
                } else {
                    Vec::new()
                }
            })
            .collect(),
    };
    let whole = |i: usize| -> Option<ViewRef> {
        let id = plan.buffers.iter().position(|buffer| buffer.place == Place::Input(i))?;
        let at = BufferRef { buffer: kiln_plan::BufferId(id as u32), offset: 0 };
        let ty = graph.ty(graph.inputs[i]).as_tensor()?.clone();
        Some(ViewRef { at, ty, strides: strides[i].clone() })
    };
    for (i, input) in inputs.iter().enumerate() {
        if let (Argument::Tensor(array), Some(view)) = (input, whole(i)) {
            let last = positions(&array.shape, &strides[i]).into_iter().max();
            memory.inputs[i] = vec![0; last.map_or(0, |last| (last as usize + 1) * array.dtype.size())];
            memory.put(&view, array);
        }
    }
    let input = |i: usize| match &inputs[i] {
        Argument::Scalar(number) => *number,
        Argument::Tensor(_) | Argument::List(_) => Scalar::Int(0),
    };
    let number = numbers_of(plan, &input).map_err(|error| error.to_string())?;
    for step in &plan.steps {
        if let Step::Launch(launch) = step {
            let status = run_launch(plan, launch, &mut memory, &number);
            if status > 0 {
                return Err(launch.checks[status - 1].op.to_string());
            }
        } else {
            run_call(step, &mut memory, &number).map_err(|error| error.to_string())?;
        }
    }
    let dense = |k: usize| {
        let at = BufferRef { buffer: plan.outputs[k], offset: 0 };
        graph.ty(graph.outputs[k]).as_tensor().map(|ty| ViewRef::dense(at, ty.clone()))
    };
    let outputs = (0..graph.outputs.len()).filter_map(dense).map(|view| memory.array(&view).into()).collect();
    let after = inputs.iter().enumerate().map(|(i, input)| match (input, whole(i)) {
        (Argument::Tensor(_), Some(view)) => memory.array(&view).into(),
        _ => input.clone(),
    });
    Ok(Outcome { outputs, inputs: after.collect() })
}

fn bytes(ty: &Ty) -> usize {
    match ty {
        Ty::Tensor(ty) => ty.bytes(),
        Ty::Scalar(ScalarKind::Bool | ScalarKind::Int | ScalarKind::Float) | Ty::List(_) => 0,
    }
}
