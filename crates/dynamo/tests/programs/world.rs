//! The worlds in which a program runs: eager, or a region.

use std::collections::BTreeMap;

use kiln_dynamo::{Compile, Region};
use kiln_ir::Why;
use kiln_tensor::{
    Context, DType, Device, Function, GradOptions, Result, Tensor, TensorList, backward_all, foreach,
    manual_seed, no_grad,
};
use kiln_testkit::Rng;

use crate::program::{Beside, Do, Id, Input, Kind, Program, Size, Step, View};

const CPU: Device = Device::Cpu;

pub type Variables = BTreeMap<Id, Tensor>;

/// Numbers change from call to call and stay multiples of 1/8, so that most arithmetic is exact.
pub fn hole(base: f64, call: usize) -> f64 {
    base + 0.125 * call as f64
}

pub fn sizes(shape: &[Size], n: usize) -> Vec<usize> {
    shape.iter().map(|s| if let Size::Fixed(k) = s { *k } else { n }).collect()
}

/// Data that depends on nothing but these numbers: multiples of 1/8 between −2 and 2.
pub fn data(dtype: DType, shape: &[usize], salt: u64) -> Result<Tensor> {
    let mut rng = Rng::new(salt);
    let n = shape.iter().product();
    Ok(match dtype {
        DType::Bool => Tensor::from_vec((0..n).map(|_| rng.one_in(2)).collect(), shape.to_vec())?,
        dtype if dtype.is_float() => {
            let floats: Vec<f64> = (0..n).map(|_| (rng.below(33) as f64 - 16.0) / 8.0).collect();
            Tensor::from_vec(floats, shape.to_vec())?.to_dtype(dtype)?
        }
        integer => {
            let ints: Vec<i64> = (0..n).map(|_| rng.below(9) as i64 - 4).collect();
            Tensor::from_vec(ints, shape.to_vec())?.to_dtype(integer)?
        }
    })
}

pub fn view(x: &Tensor, view: &View) -> Result<Tensor> {
    match view {
        View::Transpose => x.t(),
        View::Flatten => x.flatten(),
        View::Slice { dim, start, end, step } => x.slice(*dim, *start, *end, *step),
        View::Select { dim, index } => x.select(*dim, *index),
        View::Unsqueeze(dim) => x.unsqueeze(*dim),
        View::Expand(n) => {
            let mut shape: Vec<usize> = x.shape().to_vec();
            shape.insert(0, *n as usize);
            x.expand(&shape[..])
        }
        View::Permute => {
            let rank = x.rank() as i64;
            let dims: Vec<i64> = (0..rank).map(|d| (d + rank - 1) % rank.max(1)).collect();
            x.permute(&dims[..])
        }
        View::Detach => x.detach(),
        View::Contiguous => x.contiguous(),
    }
}

macro_rules! unary {
    ($($name:ident $in_place:ident),*) => {
        pub const UNARY: &[&str] = &[$(stringify!($name)),*];
        fn unary(op: &str, x: &Tensor) -> Result<Tensor> {
            match op { $(stringify!($name) => x.$name(),)* _ => unreachable!("{op}") }
        }
        fn unary_in_place(op: &str, x: &Tensor) -> Result<()> {
            match op { $(stringify!($name) => x.$in_place().map(drop),)* _ => unreachable!("{op}") }
        }
        fn foreach_unary(op: &str, x: &TensorList) -> Result<TensorList> {
            match op { $(stringify!($name) => foreach::$name(x),)* _ => unreachable!("{op}") }
        }
    };
}
unary!(neg neg_, abs abs_, relu relu_, clone_tensor clone_tensor_, reciprocal reciprocal_, exp exp_, log log_,
    sqrt sqrt_, rsqrt rsqrt_, tanh tanh_, erf erf_, sigmoid sigmoid_, logical_not logical_not_);

macro_rules! binary {
    ($($name:ident $in_place:ident),*) => {
        pub const BINARY: &[&str] = &[$(stringify!($name)),*];
        fn binary(op: &str, x: &Tensor, y: Operand<'_>) -> Result<Tensor> {
            match (op, y) {
                $((stringify!($name), Operand::Tensor(y)) => x.$name(y),
                (stringify!($name), Operand::Float(y)) => x.$name(y),
                (stringify!($name), Operand::Int(y)) => x.$name(y),)*
                _ => unreachable!("{op}"),
            }
        }
        fn binary_in_place(op: &str, x: &Tensor, y: Operand<'_>) -> Result<()> {
            match (op, y) {
                $((stringify!($name), Operand::Tensor(y)) => x.$in_place(y).map(drop),
                (stringify!($name), Operand::Float(y)) => x.$in_place(y).map(drop),
                (stringify!($name), Operand::Int(y)) => x.$in_place(y).map(drop),)*
                ("copy", Operand::Tensor(y)) => x.copy_(y).map(drop),
                ("copy", Operand::Float(y)) => x.fill_(y).map(drop),
                ("copy", Operand::Int(y)) => x.fill_(y).map(drop),
                _ => unreachable!("{op}"),
            }
        }
        fn foreach_binary(op: &str, x: &TensorList, y: Option<&TensorList>, k: f64) -> Result<TensorList> {
            match (op, y) {
                $((stringify!($name), Some(y)) => foreach::$name(x, y),
                (stringify!($name), None) => foreach::$name(x, k),)*
                _ => unreachable!("{op}"),
            }
        }
        fn foreach_in_place(op: &str, x: &TensorList, y: Option<&TensorList>, k: f64) -> Result<()> {
            match (op, y) {
                $((stringify!($name), Some(y)) => foreach::$in_place(x, y),
                (stringify!($name), None) => foreach::$in_place(x, k),)*
                ("copy", Some(y)) => foreach::copy_(x, y),
                ("copy", None) => foreach::copy_(x, k),
                _ => unreachable!("{op}"),
            }
        }
    };
}
binary!(add add_, sub sub_, mul mul_, div div_, maximum maximum_, minimum minimum_, pow pow_, eq eq_, ne ne_,
    lt lt_, le le_, gt gt_, ge ge_, logical_and logical_and_);

pub enum Operand<'a> {
    Tensor(&'a Tensor),
    Float(f64),
    Int(i64),
}

/// One of the two worlds in which a program runs.
pub struct World {
    pub region: Option<Region>,
    pub kept: BTreeMap<usize, Tensor>,
    /// Everything that calls made, to be looked at again later.
    pub history: Vec<Variables>,
    /// What was seen on the way: values read, errors.
    pub notes: Vec<String>,
}

/// Why a program's run says nothing: eager refuses what compiled finds out later or not at all (a saved tensor
/// was overwritten, an index is out of range).
pub struct Refused;

impl World {
    pub fn new(options: Option<&Compile>) -> World {
        World {
            region: options.map(|options| options.clone().region()),
            kept: BTreeMap::new(),
            history: Vec::new(),
            notes: Vec::new(),
        }
    }

    pub fn inputs(&mut self, program: &Program, call: usize) -> Result<Variables> {
        let n = program.sizes[call];
        let mut variables = Variables::new();
        for (id, input) in program.inputs.iter().enumerate() {
            let salt = id as u64 * 1000;
            let fresh = salt + call as u64 + 1;
            let tensor = match input {
                Input::Leaf(dtype, shape) | Input::Kept(dtype, shape) => match self.kept.get(&id) {
                    Some(t) => t.clone(),
                    None => {
                        let t = data(*dtype, shape, salt)?;
                        if matches!(input, Input::Leaf(..)) {
                            t.requires_grad_(true)?;
                        }
                        self.kept.insert(id, t.clone());
                        t
                    }
                },
                Input::Computed(leaf) => variables[leaf].mul(0.5)?,
                Input::Fresh(dtype, shape) => data(*dtype, &sizes(shape, n), fresh)?,
                Input::Labels(size) => {
                    let mut rng = Rng::new(fresh);
                    let count = sizes(&[*size], n)[0];
                    Tensor::from_vec((0..count).map(|_| rng.below(2) as i64).collect(), [count])?
                }
                Input::View(of, how) => {
                    let base = &variables[of];
                    let _guard = no_grad();
                    view(base, how).unwrap_or_else(|_| base.clone())
                }
            };
            variables.insert(id, tensor);
        }
        Ok(variables)
    }

    /// One call, and what follows it.
    pub fn call(&mut self, program: &Program, call: usize) -> std::result::Result<(), Refused> {
        manual_seed(100 + call as u64);
        let mut variables = self.inputs(program, call).unwrap_or_default();
        let mut notes = Vec::new();
        let mut refused = false;
        let mut body = || -> Result<()> {
            for step in &program.steps {
                let _guard = step.no_grad.then(no_grad);
                if let Err(error) = perform(step, &mut variables, call, program.sizes[call], &mut notes) {
                    refused |= matches!(error.why(), Some(Why::Version { .. } | Why::Index { .. }));
                    notes.push(format!("v{}: {error}", step.out));
                }
            }
            Ok(())
        };
        // A compiled backward may compute again from an input what eager keeps, and then refuses if the input was
        // changed since: an error where eager has none, but never a wrong number.
        let outcome = match &self.region {
            Some(region) => region.run(body),
            None => body(),
        };
        if let Err(error) = outcome {
            notes.push(format!("the call: {error}"));
        }
        if let Some(x) = program.outside.and_then(|id| variables.get(&id)) {
            let outcome = x.sum().and_then(|sum| sum.backward());
            if let Err(error) = &outcome {
                let freed = self.region.is_none() && matches!(error.why(), Some(Why::Freed));
                refused |= freed || matches!(error.why(), Some(Why::Version { .. }));
            }
            notes.push(format!("outside: {}", outcome.is_ok()));
        }
        self.notes.extend(notes);
        self.history.push(variables);
        if refused { Err(Refused) } else { Ok(()) }
    }
}

/// A custom function and a number of this call, which its backward reads.
struct Custom(Kind, f64);

impl Function for Custom {
    fn forward(&mut self, context: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let output = match self.0 {
            Kind::Reverse => return Ok(vec![inputs[0].clone()]),
            Kind::Product => {
                context.save_for_backward(inputs);
                inputs[0].mul(inputs[1])?
            }
            Kind::TanhOfSum => {
                let output = inputs[0].add(inputs[1])?.tanh()?;
                context.save_for_backward(&[&output]);
                output
            }
        };
        Ok(vec![output])
    }

    fn backward(&self, context: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        let (grad, saved) = (&grads[0], context.saved());
        Ok(match self.0 {
            Kind::Reverse => vec![Some(grad.mul(-self.1)?), None],
            Kind::Product => {
                vec![Some(grad.mul(&saved[1])?), Some(grad.mul(&saved[0])?.mul(self.1)?)]
            }
            Kind::TanhOfSum => {
                let slope = (1.0 - &saved[0] * &saved[0]).ok()?;
                let grad = grad.mul(&slope)?;
                vec![Some(grad.clone()), Some(grad)]
            }
        })
    }
}

pub fn perform(step: &Step, v: &mut Variables, call: usize, n: usize, notes: &mut Vec<String>) -> Result<()> {
    macro_rules! get {
        ($id:expr) => {
            match v.get($id) {
                Some(tensor) => tensor.clone(),
                None => return Ok(()), // made by a step that failed or was dropped
            }
        };
    }
    macro_rules! operand {
        ($beside:expr, $slot:ident) => {
            match $beside {
                Beside::Tensor(id) => {
                    $slot = get!(id);
                    Operand::Tensor(&$slot)
                }
                Beside::Float(x) => Operand::Float(hole(*x, call)),
                Beside::Int(x) => Operand::Int(*x + call as i64),
            }
        };
    }
    let slot;
    let made = match &step.what {
        Do::Unary(op, x) => unary(op, &get!(x))?,
        Do::Binary(op, x, y) => {
            let x = get!(x);
            binary(op, &x, operand!(y, slot))?
        }
        Do::Reversed(op, k, x) => {
            let (k, x) = (hole(*k, call), get!(x));
            match *op {
                "+" => (k + &x).ok()?,
                "-" => (k - &x).ok()?,
                "*" => (k * &x).ok()?,
                _ => (k / &x).ok()?,
            }
        }
        Do::InPlaceUnary(op, x) => return unary_in_place(op, &get!(x)),
        Do::InPlace(op, x, y) => {
            let x = get!(x);
            return binary_in_place(op, &x, operand!(y, slot));
        }
        Do::Addcmul { x, a, b, value, divide, in_place } => {
            let (x, a, b, value) = (get!(x), get!(a), get!(b), hole(*value, call));
            match (divide, in_place) {
                (false, false) => x.addcmul(&a, &b, value)?,
                (true, false) => x.addcdiv(&a, &b, value)?,
                (false, true) => return x.addcmul_(&a, &b, value).map(drop),
                (true, true) => return x.addcdiv_(&a, &b, value).map(drop),
            }
        }
        Do::Lerp { x, end, weight } => get!(x).lerp(&get!(end), hole(*weight, call))?,
        Do::Where { condition, x, y } => {
            let (condition, x) = (get!(condition), get!(x));
            match operand!(y, slot) {
                Operand::Tensor(y) => condition.where_self(&x, y)?,
                Operand::Float(y) => condition.where_self(&x, y)?,
                Operand::Int(y) => condition.where_self(&x, y)?,
            }
        }
        Do::View(x, how) => view(&get!(x), how)?,
        Do::Reduce { op, x, dim, keepdim } => {
            let x = get!(x);
            match (*op, dim) {
                ("sum", None) => x.sum()?,
                ("mean", None) => x.mean()?,
                ("amax", None) => x.amax()?,
                ("sum", Some(d)) => x.sum_dim(*d, *keepdim)?,
                ("mean", Some(d)) => x.mean_dim(*d, *keepdim)?,
                (_, Some(d)) => x.amax_dim(*d, *keepdim)?,
                _ => unreachable!("{op}"),
            }
        }
        Do::Softmax { x, dim, log } => {
            if *log {
                get!(x).log_softmax(*dim)?
            } else {
                get!(x).softmax(*dim)?
            }
        }
        Do::Mm(x, y) => get!(x).mm(&get!(y))?,
        Do::Linear(x, w, None) => get!(x).linear(&get!(w), None)?,
        Do::Linear(x, w, Some(b)) => get!(x).linear(&get!(w), Some(&get!(b)))?,
        Do::Cat(ids, dim) => {
            let mut all = Vec::new();
            for id in ids {
                all.push(get!(id));
            }
            Tensor::cat(&all, *dim)?
        }
        Do::Stack(ids) => {
            let mut all = Vec::new();
            for id in ids {
                all.push(get!(id));
            }
            Tensor::stack(&all, 0)?
        }
        Do::To(x, dtype) => get!(x).to_dtype(*dtype)?,
        Do::Gather { x, dim } => {
            let x = get!(x);
            if x.size(*dim)? < 2 {
                return Ok(());
            }
            x.gather(*dim, &x.gt(0)?.to_dtype(DType::I64)?)?
        }
        Do::SliceScatter { x, dim } => {
            let x = get!(x);
            let src = x.narrow(*dim, 0, 1)?.neg()?;
            x.slice_scatter(&src, *dim, 1, 2, 1)?
        }
        Do::Loss { scores, labels } => get!(scores).cross_entropy(&get!(labels))?,
        Do::Foreach { op, list, number, other, in_place } => {
            let pack = |ids: &[Id]| -> Option<TensorList> {
                ids.iter().map(|id| v.get(id).cloned()).collect::<Option<Vec<_>>>().map(TensorList::new)
            };
            let Some(x) = pack(list) else { return Ok(()) };
            let y = match other {
                None => None,
                Some(ids) => match pack(ids) {
                    Some(y) => Some(y),
                    None => return Ok(()),
                },
            };
            let k = hole(*number, call);
            if *in_place {
                return foreach_in_place(op, &x, y.as_ref(), k);
            }
            let made = if UNARY.contains(op) {
                foreach_unary(op, &x)?
            } else {
                foreach_binary(op, &x, y.as_ref(), k)?
            };
            for i in 0..list.len() {
                v.insert(step.out + i, made.get(i)?);
            }
            return Ok(());
        }
        Do::Random(op, shape) => {
            let shape = sizes(shape, n);
            match *op {
                "rand" => Tensor::rand(shape, &CPU)?,
                "randn" => Tensor::randn(shape, &CPU)?,
                _ => Tensor::uniform(shape, -1.0, 1.0, &CPU)?,
            }
        }
        Do::Full(shape, x) => Tensor::full(sizes(shape, n), hole(*x, call), &CPU)?,
        Do::Arange(size) => Tensor::arange(0, sizes(&[*size], n)[0] as i64, &CPU)?,
        Do::Branch { x, limit } => {
            let x = get!(x);
            if x.sum()?.item::<f64>()? > hole(*limit, call) { x.neg()? } else { x.mul(2.0)? }
        }
        Do::Read(x) => {
            let x = get!(x);
            notes.push(format!("v{} {} {:?}", step.out, x.dtype(), x.shape()));
            v.insert(step.out, Tensor::from_vec(x.to_vec_cast::<f64>()?, x.shape())?);
            return Ok(());
        }
        Do::HostWrite(x, k) => {
            let x = get!(x);
            let k = hole(*k, call) as f32;
            return match x.dtype() {
                DType::F32 => x.write_slice(&vec![k; x.numel()]),
                _ => Ok(()),
            };
        }
        Do::Drop(x) => {
            if *x >= 1 {
                v.remove(x);
            }
            return Ok(());
        }
        Do::Backward { x, retain } => return get!(x).sum()?.backward_with(None, *retain),
        Do::BackwardAll { x, y, retain } => {
            let (x, y) = (get!(x).sum()?, get!(y).mean()?);
            let options = GradOptions { retain_graph: Some(*retain), ..GradOptions::default() };
            return backward_all(&[&x, &y], &[], options);
        }
        Do::Custom { x, y, kind } => Custom(*kind, hole(1.0, call)).apply(&[&get!(x), &get!(y)])?,
        Do::RequiresGrad(x, on) => return get!(x).requires_grad_(*on).map(drop),
        Do::RetainGrad(x) => return get!(x).retain_grad(),
        Do::Hook(x) => {
            let x = get!(x);
            return if x.is_leaf() { x.register_hook(|g| g.mul(0.5).map(Some)).map(drop) } else { Ok(()) };
        }
        Do::ZeroGrad(x) => {
            get!(x).set_grad(None);
            return Ok(());
        }
        Do::UseGrad(x) => match get!(x).grad() {
            Some(grad) => grad.mul(2.0)?,
            None => return Ok(()),
        },
    };
    v.insert(step.out, made);
    Ok(())
}
