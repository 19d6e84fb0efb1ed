//! Random graphs of prims: whatever the generator makes must run and give what the naive evaluator gives.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, reason = "a test")]

use crate::support;

use kiln_inductor::{C, Layout, Options, Tuning};
use kiln_ir::math::c::Isa;
use kiln_ir::{DType, Device, Dims, EmitExt, Graph, Scalar, Shape, Strides, Ty, Value};
use support::{Random, best_isa, check_run};

struct Generator {
    random: Random,
    graph: Graph,
    tensors: Vec<Value>,
}

const SIZES: [usize; 9] = [1, 2, 3, 4, 5, 7, 16, 17, 33];

impl Generator {
    fn shape(&mut self) -> Shape {
        let rank = self.random.below(4);
        let mut shape: Shape = (0..rank).map(|_| SIZES[self.random.below(SIZES.len())]).collect();
        while shape.numel() > 3000 {
            let last = shape.rank() - 1;
            shape[last] = 2;
            shape[0] = shape[0].min(7);
            if shape.numel() > 3000 {
                shape = Shape::from([17, 33]);
            }
        }
        if self.random.below(40) == 0 && rank > 0 {
            shape[0] = 0;
        }
        shape
    }

    fn dtype(&mut self) -> DType {
        // Halves are rounded where values are stored, so what deep graphs of them give depends on the plan.
        let narrow = [DType::I32, DType::I16, DType::I8, DType::U8][self.random.below(4)];
        [DType::F32, DType::F32, DType::F32, DType::F64, DType::I64, DType::Bool, narrow]
            [self.random.below(7)]
    }

    fn pick(&mut self) -> Value {
        // Later values are likelier, so that graphs get deep.
        let n = self.tensors.len();
        let at = self.random.below(n).max(self.random.below(n));
        self.tensors[at]
    }

    fn ty(&self, v: Value) -> (DType, Shape) {
        let t = self.graph.ty(v).as_tensor().unwrap();
        (t.dtype, t.shape.clone())
    }

    /// Converted without hanging on the last bit: floats become integers by a comparison.
    fn convert(&mut self, v: Value, dtype: DType) -> Value {
        let own = self.ty(v).0;
        if own == dtype {
            return v;
        }
        if own.is_float() && !dtype.is_float() {
            let bound = self.graph.number(0.1234567).unwrap();
            let flag = self.graph.lt(v, bound).unwrap();
            return if dtype == DType::Bool { flag } else { self.graph.to(flag, dtype).unwrap() };
        }
        self.graph.to(v, dtype).unwrap()
    }

    /// A tensor of a given type, made from what is there.
    fn like(&mut self, dtype: DType, shape: &Shape) -> Value {
        let candidates: Vec<Value> =
            self.tensors.iter().copied().filter(|&v| self.ty(v).1 == *shape).collect();
        if !candidates.is_empty() && self.random.below(4) > 0 {
            let v = candidates[self.random.below(candidates.len())];
            return self.convert(v, dtype);
        }
        let v = self.pick();
        let (_, from) = self.ty(v);
        let v = self.convert(v, dtype);
        if from.numel() == shape.numel() {
            return self.graph.reshape(v, shape.clone()).unwrap();
        }
        if kiln_ir::broadcast(&from, shape).as_ref() == Some(shape) {
            return self.graph.expand(v, shape.clone()).unwrap();
        }
        let number = self.random.float();
        let number = self.graph.number(number).unwrap();
        self.graph.full(number, shape.clone(), dtype, Device::Cpu).unwrap()
    }

    fn step(&mut self) {
        let x = self.pick();
        let (dtype, shape) = self.ty(x);
        let made = match self.random.below(28) {
            0..=5 => {
                let y = self.like(dtype, &shape);
                match (self.random.below(5), dtype) {
                    (0, _) => self.graph.add(x, y),
                    (1, DType::Bool) => self.graph.logical_and(x, y),
                    (1, _) => self.graph.sub(x, y),
                    (2, _) => self.graph.mul(x, y),
                    (3, _) => self.graph.maximum(x, y),
                    _ => self.graph.minimum(x, y),
                }
            }
            6 => {
                let x = if dtype.is_float() { self.convert(x, DType::I64) } else { x };
                let dtype = self.ty(x).0;
                let y = self.like(dtype, &shape);
                match self.random.below(4) {
                    0 => self.graph.lt(x, y),
                    1 => self.graph.ge(x, y),
                    2 => EmitExt::eq(&mut self.graph, x, y),
                    _ => EmitExt::ne(&mut self.graph, x, y),
                }
            }
            7..=9 => {
                let x = if dtype.is_float() { x } else { self.graph.to(x, DType::F32).unwrap() };
                match self.random.below(6) {
                    0 => self.graph.tanh(x),
                    1 => self.graph.sigmoid(x),
                    2 => self.graph.erf(x),
                    3 => {
                        let small = self.graph.tanh(x).unwrap();
                        self.graph.exp(small)
                    }
                    4 => {
                        let positive = self.graph.sigmoid(x).unwrap();
                        self.graph.log(positive)
                    }
                    _ => {
                        let positive = self.graph.sigmoid(x).unwrap();
                        self.graph.sqrt(positive)
                    }
                }
            }
            10 => {
                let c = self.like(DType::Bool, &shape);
                let y = self.like(dtype, &shape);
                self.graph.where_(c, x, y)
            }
            11 => {
                let number = self.random.float();
                let number = match dtype {
                    dtype if dtype.computing() == DType::I64 => {
                        self.graph.number(Scalar::Int(number as i64)).unwrap()
                    }
                    DType::Bool => self.graph.number(Scalar::Bool(number > 0.0)).unwrap(),
                    _ => self.graph.number(number).unwrap(),
                };
                self.graph.mul(x, number)
            }
            12..=15 if shape.rank() > 0 && shape.numel() > 0 => {
                let mut dims: Vec<usize> = (0..shape.rank()).filter(|_| self.random.below(2) == 0).collect();
                if dims.is_empty() {
                    dims.push(self.random.below(shape.rank()));
                }
                let reduced = if self.random.below(2) == 0 {
                    let x = if dtype.is_float() { x } else { self.graph.to(x, DType::I64).unwrap() };
                    self.graph.sum(x, Dims::from(dims.clone()), false).unwrap()
                } else {
                    self.graph.amax(x, Dims::from(dims.clone()), false).unwrap()
                };
                self.tensors.push(reduced);
                // Usually spread again, as softmax and norms do.
                if self.random.below(3) > 0 {
                    let kept = self.graph.reshape(reduced, shape.reduced(&Dims::from(dims), true)).unwrap();
                    let spread = self.graph.expand(kept, shape.clone()).unwrap();
                    let own = self.ty(spread).0;
                    let x = if own == dtype { x } else { self.graph.to(x, own).unwrap() };
                    self.graph.add(x, spread)
                } else {
                    Ok(reduced)
                }
            }
            16 if shape.rank() > 1 => {
                let mut dims: Vec<usize> = (0..shape.rank()).collect();
                for i in (1..dims.len()).rev() {
                    dims.swap(i, self.random.below(i + 1));
                }
                self.graph.permute(x, Dims::from(dims))
            }
            17 if shape.rank() > 0 && shape.numel() > 0 => {
                let dim = self.random.below(shape.rank());
                let start = self.random.below(shape[dim]);
                let end = start + 1 + self.random.below(shape[dim] - start);
                let step = 1 + self.random.below(2);
                let part = self.graph.slice(x, dim, start, end, step).unwrap();
                if self.random.below(3) == 0 {
                    let (_, window) = self.ty(part);
                    let src = self.like(dtype, &window);
                    self.graph.slice_scatter(x, src, dim, start, end, step)
                } else {
                    Ok(part)
                }
            }
            18 if shape.rank() > 0 => {
                let dim = self.random.below(shape.rank());
                let mut other = shape.clone();
                other[dim] = 1 + self.random.below(5);
                let y = self.like(dtype, &other);
                self.graph.cat(&[x, y, x], dim)
            }
            19 if shape.rank() > 0 && shape.numel() > 0 => {
                let dim = self.random.below(shape.rank());
                let index = self.like(DType::I64, &shape);
                let zero = self.graph.number(Scalar::Int(0)).unwrap();
                let most = self.graph.number(Scalar::Int(shape[dim] as i64 - 1)).unwrap();
                let index = self.graph.maximum(index, zero).unwrap();
                let index = self.graph.minimum(index, most).unwrap();
                self.graph.gather(x, index, dim)
            }
            24 | 25 if shape.rank() > 0 && shape.numel() > 0 => {
                let (dim, reverse) = (self.random.below(shape.rank()), self.random.below(2) == 0);
                let x = if dtype.is_float() { self.graph.tanh(x).unwrap() } else { x };
                match (self.random.below(3), dtype.is_float()) {
                    (0, false) => self.graph.cumprod(x, dim),
                    (0, true) => {
                        // Near one: products of many stay what numbers can be.
                        let small = self.graph.number(0.01).unwrap();
                        let one = self.graph.number(1.0).unwrap();
                        let near = self.graph.mul(x, small).unwrap();
                        let near = self.graph.add(near, one).unwrap();
                        self.graph.cumprod(near, dim)
                    }
                    _ => self.graph.cumsum(x, dim, reverse),
                }
            }
            26 | 27 if shape.rank() > 0 && shape.numel() > 0 && dtype != DType::Bool => {
                let dim = self.random.below(shape.rank());
                let mut from = shape.clone();
                from[dim] = 1 + self.random.below(2 * shape[dim]);
                let is_slice = self.random.below(2) == 0;
                let places = if is_slice { Shape::from([from[dim]]) } else { from.clone() };
                let index = self.like(DType::I64, &places);
                let zero = self.graph.number(Scalar::Int(0)).unwrap();
                let most = self.graph.number(Scalar::Int(shape[dim] as i64 - 1)).unwrap();
                let index = self.graph.maximum(index, zero).unwrap();
                let index = self.graph.minimum(index, most).unwrap();
                let src = self.like(dtype, &from);
                match (is_slice, self.random.below(3)) {
                    (true, _) => self.graph.index_add(x, index, src, dim),
                    (false, 0) => self.graph.scatter(x, index, src, dim),
                    (false, _) => self.graph.scatter_add(x, index, src, dim),
                }
            }
            20 => {
                let n = shape.numel();
                let (start, step) =
                    (self.graph.number(Scalar::Int(2)).unwrap(), self.graph.number(Scalar::Int(3)).unwrap());
                let kind = if dtype == DType::Bool { DType::I64 } else { dtype };
                let row = self.graph.arange(start, step, n, kind, Device::Cpu).unwrap();
                self.graph.reshape(row, shape)
            }
            21 if shape.rank() == 2 && dtype != DType::Bool && !dtype.is_narrow() => {
                let y = self.graph.permute(x, Dims::from([1, 0])).unwrap();
                let sigmoid = if dtype.is_float() { self.graph.sigmoid(y).unwrap() } else { y };
                let product = self.graph.mm(x, sigmoid).unwrap();
                if dtype.is_float() { self.graph.tanh(product) } else { Ok(product) }
            }
            22 if shape.numel() > 0 => {
                // A list op over a few tensors of equal dtype.
                let items: Vec<Value> = self
                    .tensors
                    .iter()
                    .copied()
                    .filter(|&v| self.ty(v).0 == dtype && dtype.is_float())
                    .take(4)
                    .collect();
                if items.len() < 2 {
                    return;
                }
                let list = self.graph.list(&items).unwrap();
                let other = self.graph.list(&items).unwrap();
                let number = self.graph.number(0.25).unwrap();
                let scaled = self.graph.mul(list, number).unwrap();
                let sum = self.graph.add(scaled, other).unwrap();
                let bent = self.graph.tanh(sum).unwrap();
                for i in 0..items.len() {
                    let from = if i % 2 == 0 { bent } else { sum };
                    let one = self.graph.list_get(from, i).unwrap();
                    if self.graph.ty(one).as_tensor().is_some() {
                        self.tensors.push(one);
                    }
                }
                return;
            }
            _ => {
                let flat = Shape::from([shape.numel()]);
                self.graph.reshape(x, flat)
            }
        };
        let Ok(value) = made else { return };
        if self.graph.ty(value).as_tensor().is_some_and(|t| t.shape.numel() <= 20_000) {
            self.tensors.push(value);
        }
    }
}

fn layout(random: &mut Random, shape: &Shape) -> Strides {
    match random.below(4) {
        // Transposed.
        0 => {
            let reversed: Shape = shape.iter().rev().copied().collect();
            reversed.contiguous_strides().into_iter().rev().collect()
        }
        // With gaps.
        1 => shape.contiguous_strides().iter().map(|s| s * 2).collect(),
        // Repeated along the first dim.
        2 if shape.rank() > 0 && random.below(2) == 0 => {
            let mut strides = shape.contiguous_strides();
            strides[0] = 0;
            strides
        }
        _ => shape.contiguous_strides(),
    }
}

fn check_seed(seed: u64, isa: Isa) {
    let mut g = Generator { random: Random(seed * 7919 + 13), graph: Graph::new(), tensors: Vec::new() };
    let inputs = 2 + g.random.below(3);
    for _ in 0..inputs {
        let (dtype, shape) = (g.dtype(), g.shape());
        let v = g.graph.input(Ty::tensor(dtype, shape));
        g.tensors.push(v);
    }
    for _ in 0..4 + g.random.below(14) {
        g.step();
    }
    let outputs = 1 + g.random.below(3);
    for _ in 0..outputs {
        let v = g.pick();
        g.graph.outputs.push(v);
    }
    let mut layouts: Vec<Layout> = Vec::new();
    for i in 0..inputs {
        let v = g.graph.inputs[i];
        let shape = g.ty(v).1;
        layouts.push(Layout { strides: layout(&mut g.random, &shape) });
    }
    // Some inputs are written back.
    for (i, layout) in layouts.iter().enumerate() {
        let target = g.graph.inputs[i];
        let (dtype, shape) = g.ty(target);
        let overlaps = layout.strides.iter().zip(shape.iter()).any(|(s, n)| *s == 0 && *n > 1);
        let values: Vec<Value> =
            g.tensors.iter().copied().filter(|&v| g.ty(v) == (dtype, shape.clone())).collect();
        if !overlaps && g.random.below(2) == 0 && !values.is_empty() {
            let value = values[g.random.below(values.len())];
            if value != target {
                g.graph.writes.push(kiln_ir::Write::whole(target, value));
            }
        }
    }
    let options = Options {
        input_layouts: layouts.into(),
        target: std::sync::Arc::new(C { unroll: [1, 2, 1, 4][seed as usize % 4], ..C::new(isa) }),
        tuning: Tuning::DEFAULT,
        constants: false,
        general: false,
    };
    let values = g.random.inputs(&g.graph);
    check_run(&g.graph, &options, &values);
}

/// Seeds from the environment allow longer runs: `KILN_SEEDS=1000..2000`.
fn seeds() -> std::ops::Range<u64> {
    let range = std::env::var("KILN_SEEDS").unwrap_or_default();
    match range.split_once("..") {
        Some((a, b)) => a.parse().unwrap()..b.parse().unwrap(),
        None => 0..60,
    }
}

#[test]
fn random_graphs() {
    for seed in seeds() {
        let result = std::panic::catch_unwind(|| check_seed(seed, best_isa()));
        assert!(result.is_ok(), "seed {seed}");
    }
}

#[test]
fn random_graphs_avx2_and_plain() {
    for seed in seeds().step_by(3) {
        let isa = if seed % 2 == 0 && best_isa() != Isa::Plain { Isa::Avx2 } else { Isa::Plain };
        let result = std::panic::catch_unwind(|| check_seed(seed + 10_000, isa));
        assert!(result.is_ok(), "seed {} on {isa:?}", seed + 10_000);
    }
}
