//! Random programs: functional graphs over the whole op table, with inputs. Operands and attributes are
//! drawn at random and kept if the type rule takes them, so that a new row needs nothing here.

use kiln_ir::{
    Approximate, Class, DType, Device, Dims, Domain, Emit, EmitExt, Graph, Op, Reduction, SampleArg, Scalar,
    Shape, TensorTy, Ty, Value, Write, broadcast,
};

use crate::{Argument, Rng, random_argument, random_array};

/// A graph and inputs for it.
#[derive(Clone, PartialEq, Debug)]
pub struct Program {
    /// The graph.
    pub graph: Graph,
    /// One value per input.
    pub inputs: Vec<Argument>,
}

/// Pointwise rows that random programs leave out: `to` has its own step, and integers may not be divided by 0.
const LEFT_OUT: &[&str] = &["to", "floor_divide", "div_trunc", "remainder", "fmod"];

/// Sizes that dims are drawn from; empty ones are rare.
const SIZES: &[usize] = &[1, 1, 2, 3, 3, 4, 5, 7];
/// Tensors stay smaller than this.
const MOST_ELEMENTS: usize = 400;

struct Generator {
    rng: Rng,
    graph: Graph,
    inputs: Vec<Argument>,
}

/// A random functional program of about `nodes` nodes.
pub fn generate(seed: u64, nodes: usize) -> Program {
    let mut g = Generator { rng: Rng::new(seed), graph: Graph::new(), inputs: Vec::new() };
    let shape = g.shape();
    for _ in 0..2 + g.rng.below(3) {
        let dtype = g.dtype();
        // Shapes that broadcast with each other are what makes programs interesting.
        let own = match g.rng.below(4) {
            0 => g.shape(),
            1 => shape.iter().map(|&d| if g.rng.one_in(2) { 1 } else { d }).collect(),
            2 => Shape::from(&shape[g.rng.below(shape.rank() + 1)..]),
            _ => shape.clone(),
        };
        g.input(Ty::tensor(dtype, own));
    }
    g.input(Ty::Scalar(kiln_ir::ScalarKind::Float));
    g.input(Ty::Scalar(kiln_ir::ScalarKind::Int));
    let mut attempts = 0;
    while g.graph.nodes.len() < nodes && attempts < nodes * 40 {
        attempts += 1;
        g.step();
    }
    g.finish()
}

impl Generator {
    fn input(&mut self, ty: Ty) -> Value {
        let value = random_argument(&mut self.rng, &ty);
        self.inputs.push(value);
        self.graph.input(ty)
    }

    fn dtype(&mut self) -> DType {
        match self.rng.below(8) {
            0..4 => DType::F32,
            4 => *self.rng.pick(&[DType::F64, DType::F16, DType::BF16]),
            5 => *self.rng.pick(&[DType::I64, DType::I32, DType::I16, DType::I8, DType::U8]),
            6 => DType::Bool,
            _ => *self.rng.pick(&DType::ALL),
        }
    }

    fn shape(&mut self) -> Shape {
        let rank = self.rng.below(4);
        (0..rank).map(|_| if self.rng.one_in(25) { 0 } else { *self.rng.pick(SIZES) }).collect()
    }

    /// A value whose type fits, preferably a late one.
    fn value(&mut self, fits: impl Fn(&Ty) -> bool) -> Option<Value> {
        let all: Vec<Value> =
            (0..self.graph.value_count() as u32).map(Value).filter(|&v| fits(self.graph.ty(v))).collect();
        match all.len() {
            0 => None,
            n => Some(all[n - 1 - self.rng.below(n).min(self.rng.below(n))]),
        }
    }

    fn tensor(&mut self) -> Option<Value> {
        self.value(|ty| ty.as_tensor().is_some())
    }

    /// A tensor, and its type.
    fn typed(&mut self, fits: impl Fn(&TensorTy) -> bool) -> Option<(Value, TensorTy)> {
        let value = self.value(|ty| ty.as_tensor().is_some_and(&fits))?;
        Some((value, self.graph.tensor_ty(value)))
    }

    fn number(&mut self) -> Option<Value> {
        match self.rng.below(3) {
            0 => self.value(Ty::is_scalar),
            1 => self.graph.number(Scalar::Int(self.rng.below(4) as i64 - 1)).ok(),
            _ => {
                let x = *self.rng.pick(&[0.0, 1.0, -1.0, 0.5, 2.0, 0.1, 3.0]);
                self.graph.number(x).ok()
            }
        }
    }

    /// Adds the op if its type rule takes the operands and the result is small.
    fn emit(&mut self, op: Op, args: &[Value]) -> Option<Value> {
        let tys: Vec<Ty> = args.iter().map(|&v| self.graph.ty(v).clone()).collect();
        let outs = op.infer(&tys).ok()?;
        let small = |t: &TensorTy| t.shape.numel() <= MOST_ELEMENTS && t.shape.rank() <= 4;
        let fine = outs.iter().all(|ty| match ty {
            Ty::Tensor(t) => small(t),
            Ty::List(items) => items.iter().all(small),
            Ty::Scalar(_) => true,
        });
        fine.then(|| Emit::emit(&mut self.graph, op, args).ok())?.map(|outs| outs[0])
    }

    fn step(&mut self) -> Option<Value> {
        match self.rng.below(20) {
            0..=5 => self.pointwise(),
            6 => self.convert(),
            7..=8 => self.view(),
            9..=10 => self.reduction(),
            11 => self.product(),
            12 => self.index(),
            13 => self.creation(),
            14 => self.loss(),
            15 => self.list(),
            _ => self.sample(),
        }
    }

    /// A sample call of any row, on inputs of its own.
    fn sample(&mut self) -> Option<Value> {
        let row = &Op::ROWS[self.rng.below(Op::ROWS.len())];
        let samples = row.sample_calls();
        if samples.is_empty() {
            return None;
        }
        let sample = self.rng.pick(&samples).clone();
        let dtype = *self.rng.pick(sample.dtypes);
        let small = |arg: &SampleArg| match arg {
            SampleArg::Tensor(shape, _) | SampleArg::Fixed(_, shape, _) => shape.numel() <= MOST_ELEMENTS,
            SampleArg::Number(_) => true,
        };
        if !sample.args.iter().all(small) {
            return None;
        }
        let mut args = Vec::new();
        for arg in &sample.args {
            let (ty, domain) = match arg {
                SampleArg::Tensor(shape, domain) => (TensorTy::new(dtype, shape), *domain),
                SampleArg::Fixed(dtype, shape, domain) => (TensorTy::new(*dtype, shape), *domain),
                SampleArg::Number(number) => {
                    args.push(self.graph.number(*number).ok()?);
                    continue;
                }
            };
            let array = random_array(&mut self.rng, &ty, domain);
            self.inputs.push(array.into());
            args.push(self.graph.input(Ty::Tensor(ty)));
        }
        self.emit(sample.op, &args)
    }

    fn pointwise(&mut self) -> Option<Value> {
        let rows: Vec<_> =
            Op::ROWS.iter().filter(|r| r.class == Class::Pointwise && !LEFT_OUT.contains(&r.name)).collect();
        let row = rows[self.rng.below(rows.len())];
        let approximate = if self.rng.one_in(2) { "none" } else { "tanh" };
        let op = Op::parse(row.name, &mut |name| (name == "approximate").then(|| approximate.to_string()))?;
        let first = match self.rng.below(6) {
            0 => self.value(|ty| ty.as_list().is_some()).or_else(|| self.tensor())?,
            1 if self.rng.one_in(3) => self.value(Ty::is_scalar)?,
            _ => self.tensor()?,
        };
        let mut args = Vec::new();
        let main = if row.name == "where" { 1 } else { 0 };
        for i in 0..row.args.len() {
            let arg = match i {
                _ if i == main => first,
                0 => self.value(|ty| ty.as_tensor().is_some_and(|t| t.dtype == DType::Bool))?,
                _ => self.partner(first)?,
            };
            args.push(arg);
        }
        if !row.optional.is_empty() && self.rng.one_in(4) {
            args.push(self.number()?);
        }
        self.emit(op, &args)
    }

    /// An operand that goes together with `first`, mostly.
    fn partner(&mut self, first: Value) -> Option<Value> {
        if self.rng.one_in(5) {
            return self.number();
        }
        let ty = self.graph.ty(first).clone();
        match ty {
            Ty::Tensor(t) => {
                self.value(|ty| ty.as_tensor().is_some_and(|o| broadcast(&t.shape, &o.shape).is_some()))
            }
            Ty::List(items) => self.value(|ty| match ty {
                Ty::List(other) => other.len() == items.len(),
                Ty::Tensor(t) => t.shape.rank() == 0,
                Ty::Scalar(_) => false,
            }),
            Ty::Scalar(_) => self.value(Ty::is_scalar),
        }
    }

    fn convert(&mut self) -> Option<Value> {
        let x = self.value(|_| true)?;
        let dtype = self.dtype();
        self.emit(Op::To { dtype }, &[x])
    }

    fn view(&mut self) -> Option<Value> {
        let (x, ty) = self.typed(|_| true)?;
        let rank = ty.shape.rank();
        let op = match self.rng.below(7) {
            0 => {
                // Flattened, or two neighbours merged, or a dim of size 1 put in.
                let mut shape = ty.shape.clone();
                match self.rng.below(3) {
                    0 => shape = Shape::from([ty.shape.numel()]),
                    1 if rank >= 2 => {
                        let d = self.rng.below(rank - 1);
                        let size = shape.remove(d + 1);
                        shape[d] *= size;
                    }
                    _ => shape.insert(self.rng.below(rank + 1), 1),
                }
                Op::Reshape { shape }
            }
            1 => {
                let mut dims = Dims::all(rank);
                for i in (1..rank).rev() {
                    dims.swap(i, self.rng.below(i + 1));
                }
                Op::Permute { dims }
            }
            2 if rank > 0 => Op::Transpose { dim0: self.rng.below(rank), dim1: self.rng.below(rank) },
            3 => {
                let mut shape: Shape =
                    ty.shape.iter().map(|&d| if d == 1 { *self.rng.pick(SIZES) } else { d }).collect();
                if self.rng.one_in(2) {
                    shape.insert(0, *self.rng.pick(SIZES));
                }
                Op::Expand { shape }
            }
            4..=5 if rank > 0 => {
                let dim = self.rng.below(rank);
                let start = self.rng.below(ty.shape[dim] + 1);
                let end = start + self.rng.below(ty.shape[dim] - start + 1);
                Op::Slice { dim, start, end, step: 1 + self.rng.below(3) }
            }
            _ => Op::Detach {},
        };
        self.emit(op, &[x])
    }

    fn reduction(&mut self) -> Option<Value> {
        let (x, ty) = self.typed(|_| true)?;
        let dims: Dims = (0..ty.shape.rank()).filter(|_| self.rng.one_in(2)).collect();
        let keepdim = self.rng.one_in(2);
        let dim = self.rng.below(ty.shape.rank().max(1));
        let op = match self.rng.below(5) {
            0 => Op::Sum { dims, keepdim },
            1 => Op::Mean { dims, keepdim },
            2 => Op::Amax { dims, keepdim },
            3 => Op::Softmax { dim },
            _ => Op::LogSoftmax { dim },
        };
        self.emit(op, &[x])
    }

    fn product(&mut self) -> Option<Value> {
        let (x, ty) = self.typed(|t| t.shape.rank() >= 1 && t.dtype != DType::Bool)?;
        let (inner, n) = (*ty.shape.last()?, *self.rng.pick(SIZES));
        let bias = Ty::tensor(ty.dtype, [n]);
        if ty.shape.rank() == 2 && self.rng.one_in(2) {
            let y = self.input(Ty::tensor(ty.dtype, [inner, n]));
            if self.rng.one_in(3) {
                let bias = self.input(bias);
                return self.emit(Op::Addmm {}, &[bias, x, y]);
            }
            return self.emit(Op::Mm {}, &[x, y]);
        }
        let weight = self.input(Ty::tensor(ty.dtype, [n, inner]));
        if self.rng.one_in(2) {
            return self.emit(Op::Linear {}, &[x, weight]);
        }
        let bias = self.input(bias);
        self.emit(Op::Linear {}, &[x, weight, bias])
    }

    /// An input of class numbers or indices below `bound`.
    fn indices(&mut self, shape: Shape, bound: usize) -> Value {
        let ty = TensorTy::new(DType::I64, shape);
        let array = random_array(&mut self.rng, &ty, Domain::Index(bound));
        self.inputs.push(array.into());
        self.graph.input(Ty::Tensor(ty))
    }

    fn index(&mut self) -> Option<Value> {
        let (x, ty) = self.typed(|t| t.shape.rank() >= 1)?;
        let dim = self.rng.below(ty.shape.rank());
        let size = ty.shape[dim];
        match self.rng.below(4) {
            0 => {
                let mut args = vec![x];
                for _ in 0..self.rng.below(3) {
                    let fits = |t: &TensorTy| {
                        t.shape.rank() == ty.shape.rank()
                            && (0..t.shape.rank()).all(|d| d == dim || t.shape[d] == ty.shape[d])
                    };
                    args.push(self.typed(fits)?.0);
                }
                self.emit(Op::Cat { dim }, &args)
            }
            1 => {
                let start = self.rng.below(size + 1);
                let end = start + self.rng.below(size - start + 1);
                let step = 1 + self.rng.below(2);
                let src = self.emit(Op::Slice { dim, start, end, step }, &[x])?;
                let other = self.value(|o| o.as_tensor() == Some(&ty))?;
                self.emit(Op::SliceScatter { dim, start, end, step }, &[other, src])
            }
            2 if size > 0 => {
                let mut shape = ty.shape.clone();
                shape[dim] = *self.rng.pick(SIZES);
                let index = self.indices(shape, size);
                self.emit(Op::Gather { dim }, &[x, index])
            }
            _ => {
                let size = *self.rng.pick(SIZES);
                let index = self.indices(ty.shape.clone(), size);
                self.emit(Op::GatherBackward { dim, size }, &[x, index])
            }
        }
    }

    fn creation(&mut self) -> Option<Value> {
        let (shape, dtype, device) = (self.shape(), self.dtype(), Device::Cpu);
        let whole = |g: &mut Generator| g.graph.number(Scalar::Int(g.rng.below(1000) as i64)).ok();
        let op = match self.rng.below(5) {
            0..=1 => {
                let number = self.number()?;
                return self.emit(Op::Full { shape, dtype, device }, &[number]);
            }
            2 => {
                let (start, step) = (self.number()?, self.number()?);
                let len = *self.rng.pick(SIZES);
                return self.emit(Op::Arange { len, dtype, device }, &[start, step]);
            }
            3 if self.rng.one_in(2) => {
                let bounds = [self.number()?, self.number()?, whole(self)?, whole(self)?];
                return self.emit(Op::Uniform { shape, dtype, device }, &bounds);
            }
            3 => Op::Rand { shape, dtype, device },
            _ => Op::Randn { shape, dtype, device },
        };
        let (seed, offset) = (whole(self)?, whole(self)?);
        self.emit(op, &[seed, offset])
    }

    fn loss(&mut self) -> Option<Value> {
        let (x, ty) = self.typed(|t| {
            (1..=2).contains(&t.shape.rank()) && t.dtype.is_float() && t.shape.last().is_some_and(|&n| n > 0)
        })?;
        let reduction = *self.rng.pick(&[Reduction::None, Reduction::Mean, Reduction::Sum]);
        let rows = Shape::from(&ty.shape[..ty.shape.rank() - 1]);
        let target = self.indices(rows, *ty.shape.last()?);
        let ignore_index = if self.rng.one_in(2) { -100 } else { 0 };
        if self.rng.one_in(2) {
            self.emit(Op::NllLoss { reduction, ignore_index }, &[x, target])
        } else {
            self.emit(Op::CrossEntropy { reduction, ignore_index }, &[x, target])
        }
    }

    fn list(&mut self) -> Option<Value> {
        if self.rng.one_in(2)
            && let Some(list) = self.value(|ty| ty.as_list().is_some())
        {
            let len = self.graph.ty(list).as_list()?.len();
            let index = self.rng.below(len);
            return self.emit(Op::ListGet { index }, &[list]);
        }
        let items: Vec<Value> = (0..1 + self.rng.below(3)).map(|_| self.tensor()).collect::<Option<_>>()?;
        let list = self.emit(Op::List {}, &items)?;
        // Lists are there to be worked on.
        let gelu = Op::Gelu { approximate: Approximate::None };
        let op = self.rng.pick(&[Op::Neg {}, Op::Exp {}, Op::Relu {}, gelu, Op::LogicalNot {}]).clone();
        self.emit(op, &[list]).or(Some(list))
    }

    /// What nothing uses is a result; now and then an input is written.
    fn finish(mut self) -> Program {
        let counts = self.graph.use_counts();
        let produced = |g: &Graph, v: Value| g.producer(v).is_some();
        for v in (0..self.graph.value_count() as u32).map(Value) {
            if produced(&self.graph, v) && (counts[v.index()] == 0 || self.rng.one_in(8)) {
                self.graph.outputs.push(v);
            }
        }
        for &target in &self.graph.inputs.clone() {
            let ty = self.graph.ty(target).clone();
            if self.rng.one_in(4)
                && let Some(tensor) = ty.as_tensor()
            {
                let fits = |t: &Ty| t.as_list().is_some_and(|items| items.contains(tensor));
                if let (true, Some(value)) = (self.rng.one_in(2), self.value(fits)) {
                    let element =
                        self.graph.ty(value).as_list().and_then(|l| l.iter().position(|t| t == tensor));
                    self.graph.writes.push(Write { target, value, element: element.map(|i| i as u32) });
                } else if let Some(value) = self.value(|t| *t == ty) {
                    self.graph.writes.push(Write::whole(target, value));
                }
            }
        }
        Program { graph: self.graph, inputs: self.inputs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Evaluator, evaluate};
    use kiln_ir::{Class, Stage};

    #[test]
    fn programs_are_sound_and_cover_the_table() {
        let mut seen = vec![false; Op::ROWS.len()];
        for seed in 0..800 {
            let program = generate(seed, 25);
            program.graph.verify(Stage::Functional, "generate").unwrap();
            program.graph.nodes.iter().for_each(|n| seen[n.op.index()] = true);
            evaluate(&program.graph, &program.inputs).unwrap();
            Evaluator::exact().decomposed().run(&program.graph, &program.inputs).unwrap();
        }
        let missing: Vec<&str> = Op::ROWS
            .iter()
            .zip(&seen)
            .filter(|(row, seen)| !**seen && row.class != Class::Custom)
            .map(|(row, _)| row.name)
            .collect();
        assert!(missing.is_empty(), "rows that no random program uses: {missing:?}");
    }
}
