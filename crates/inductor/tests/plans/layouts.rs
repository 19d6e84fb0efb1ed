//! Random programs of views, places and reductions over matrices that are larger than a tile, in every layout and dtype:
//! loops that are turned in tiles, go from the end to the beginning, or along lines that are mirrored or clamped.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::sync::Arc;

use kiln_inductor::{C, Layout, Options, Tuning};
use kiln_ir::math::c::Isa;
use kiln_ir::{DType, Device, Dims, EmitExt, Graph, Scalar, Shape, Strides, Ty, Value};
use kiln_testkit::Array;

use crate::support::{Random, best_isa, check_run};

/// Around the size of a tile, and of whole and broken vectors.
const SIZES: [usize; 7] = [31, 32, 33, 40, 48, 67, 71];
const LARGEST: usize = 20_000;

struct Program {
    random: Random,
    graph: Graph,
    x: Value,
}

impl Program {
    fn shape(&self, of: Value) -> Shape {
        self.graph.ty(of).as_tensor().unwrap().shape.clone()
    }

    fn int(&mut self, number: usize) -> Value {
        self.graph.number(Scalar::Int(number as i64)).unwrap()
    }

    fn places(&mut self, start: i64, step: usize, len: usize) -> Value {
        let start = self.graph.number(Scalar::Int(start)).unwrap();
        let step = self.int(step);
        self.graph.arange(start, step, len, DType::I64, Device::Cpu).unwrap()
    }

    /// Along a dim, the elements at these places.
    fn picked(&mut self, x: Value, places: Value, dim: usize) -> Value {
        let (mut shape, len) = (self.shape(x), self.shape(places)[0]);
        shape[dim] = len;
        let aligned: Shape = (0..shape.rank()).map(|d| if d == dim { len } else { 1 }).collect();
        let places = self.graph.reshape(places, aligned).unwrap();
        let places = self.graph.expand(places, shape).unwrap();
        self.graph.gather(x, places, dim).unwrap()
    }

    /// `last − |last − |place||`
    fn mirrored(&mut self, places: Value, last: usize) -> Value {
        let last = self.int(last);
        let distance = self.graph.abs(places).unwrap();
        let from_end = self.graph.sub(last, distance).unwrap();
        let distance = self.graph.abs(from_end).unwrap();
        self.graph.sub(last, distance).unwrap()
    }

    fn step(&mut self) {
        let (x, shape) = (self.x, self.shape(self.x));
        let dim = self.random.below(shape.rank());
        let dtype = self.graph.ty(x).as_tensor().unwrap().dtype;
        self.x = match self.random.below(9) {
            0 => self.graph.flip(x, Dims::from([dim])).unwrap(),
            1 => {
                let mut dims: Vec<usize> = (0..shape.rank()).collect();
                dims.swap(dim, shape.rank() - 1 - dim);
                self.graph.permute(x, Dims::from(dims)).unwrap()
            }
            2 => {
                let (start, step) = (self.random.below(3), 1 + self.random.below(3));
                self.graph.slice(x, dim, start, shape[dim], step).unwrap()
            }
            3 => {
                let (before, after) = (self.random.below(shape[dim]), self.random.below(shape[dim]));
                let places = self.places(-(before as i64), 1, shape[dim] + before + after);
                let places = self.mirrored(places, shape[dim] - 1);
                self.picked(x, places, dim)
            }
            4 => {
                let (before, after) = (self.random.below(40), self.random.below(40));
                let places = self.places(-(before as i64), 1, shape[dim] + before + after);
                let (zero, last) = (self.int(0), self.int(shape[dim] - 1));
                let places = self.graph.maximum(places, zero).unwrap();
                let places = self.graph.minimum(places, last).unwrap();
                self.picked(x, places, dim)
            }
            5 => {
                // Any strides.
                let (rows, columns) = (SIZES[self.random.below(7)], SIZES[self.random.below(7)]);
                let steps = [1 + self.random.below(9), 1 + self.random.below(9)];
                let numel = shape.numel();
                if (rows - 1) * steps[0] + (columns - 1) * steps[1] + 3 > numel {
                    return;
                }
                let down = self.places(2, steps[0], rows);
                let across = self.places(0, steps[1], columns);
                let down = self.graph.reshape(down, Shape::from([rows, 1])).unwrap();
                let down = self.graph.expand(down, Shape::from([rows, columns])).unwrap();
                let across = self.graph.reshape(across, Shape::from([1, columns])).unwrap();
                let across = self.graph.expand(across, Shape::from([rows, columns])).unwrap();
                let places = self.graph.add(down, across).unwrap();
                let places = self.graph.reshape(places, Shape::from([rows * columns])).unwrap();
                let flat = self.graph.reshape(x, Shape::from([numel])).unwrap();
                let picked = self.graph.gather(flat, places, 0).unwrap();
                self.graph.reshape(picked, Shape::from([rows, columns])).unwrap()
            }
            6 if dtype != DType::Bool => {
                let reduced = self.graph.amax(x, Dims::from([dim]), false).unwrap();
                let kept = shape.reduced(&Dims::from([dim]), true);
                let reduced = self.graph.reshape(reduced, kept).unwrap();
                let spread = self.graph.expand(reduced, shape).unwrap();
                self.graph.sub(x, spread).unwrap()
            }
            7 if matches!(dtype, DType::F32 | DType::F64 | DType::I64) => {
                let small = if dtype.is_float() { self.graph.tanh(x).unwrap() } else { x };
                let reverse = self.random.below(2) == 0;
                self.graph.cumsum(small, dim, reverse).unwrap()
            }
            _ => {
                let turned = self.graph.flip(x, Dims::from([dim])).unwrap();
                self.graph.maximum(x, turned).unwrap()
            }
        };
        if self.shape(self.x).numel() > LARGEST {
            self.x = x;
        }
    }
}

/// Dense in some order of the dims, at times with gaps.
fn layout(random: &mut Random, shape: &Shape) -> Strides {
    let mut order: Vec<usize> = (0..shape.rank()).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i + 1));
    }
    let mut strides: Strides = shape.contiguous_strides();
    let mut next = 1 + random.below(8) / 7;
    for &d in order.iter().rev() {
        strides[d] = next as isize;
        next *= shape[d];
    }
    strides
}

fn check_seed(seed: u64, isa: Isa) {
    let mut random = Random(seed * 6271 + 5);
    let dtype = DType::ALL[random.below(DType::ALL.len())];
    let mut shape: Shape = (0..2).map(|_| SIZES[random.below(SIZES.len())]).collect();
    if random.below(3) == 0 {
        shape = [[2, 3][random.below(2)]].into_iter().chain(shape.iter().copied()).collect();
    }
    let mut graph = Graph::new();
    let inputs: Vec<Value> = (0..2).map(|_| graph.input(Ty::tensor(dtype, shape.clone()))).collect();
    let layouts: Vec<Layout> =
        inputs.iter().map(|_| Layout { strides: layout(&mut random, &shape) }).collect();
    let x = graph.maximum(inputs[0], inputs[1]).unwrap();
    let mut program = Program { random, graph, x: inputs[0] };
    for _ in 0..1 + program.random.below(5) {
        program.step();
    }
    let Program { mut graph, x: made, mut random } = program;
    graph.outputs.extend([made, x]);
    let values = random.inputs(&graph);
    let options = Options {
        input_layouts: layouts.into(),
        target: Arc::new(C::new(isa)),
        tuning: Tuning::DEFAULT,
        constants: false,
        general: seed.is_multiple_of(5),
    };
    check_run(&graph, &options, &values);
}

#[test]
fn random_layouts() {
    for seed in 0..80 {
        let isa = match seed % 4 {
            0 => Isa::Plain,
            1 if best_isa() != Isa::Plain => Isa::Avx2,
            _ => best_isa(),
        };
        let result = std::panic::catch_unwind(|| check_seed(seed, isa));
        assert!(result.is_ok(), "seed {seed} on {isa:?}");
    }
}

/// What no integer is near, and what is next to the largest ones.
#[test]
fn floats_out_of_range_become_integers() {
    let numbers = [
        0.0,
        -0.0,
        0.9,
        -0.9,
        1.5,
        -1.5,
        127.5,
        255.9,
        -128.9,
        32767.5,
        65535.9,
        2147483520.0,
        2147483648.0,
        -2147483648.0,
        -2147483904.0,
        9.223371e18,
        i64::MAX as f64,
        i64::MIN as f64,
        1e30,
        -1e30,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
    ];
    for from in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        for to in DType::ALL.into_iter().filter(|to| !to.is_float()) {
            let text =
                format!("graph(%0: {from}[46]) {{ %1 = to(%0) {{dtype: {to}}} : {to}[46] return %1 }}");
            let graph: Graph = text.parse().unwrap();
            let x = Array::floats(from, Shape::from([46]), |n| from.round(numbers[n % numbers.len()]));
            for isa in [Isa::Plain, Isa::Avx2, best_isa()] {
                if isa == Isa::Plain || best_isa() != Isa::Plain {
                    check_run(&graph, &Options::dense(&graph, C::new(isa)), &[x.clone().into()]);
                }
            }
        }
    }
}
