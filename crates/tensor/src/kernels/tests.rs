//! Every kernel against naive loops: strided, broadcast, transposed, empty, 0-d, odd tails, in place.

use super::nll::IndexOutOfRange;
use super::pointwise::Unsupported;
use super::*;
use kiln_ir::math::{Function, Width};
use kiln_ir::{DType, bf16, f16};

/// Memory for one operand, elements held as f64 or i64 patterns.
#[derive(Clone, Debug)]
struct Array {
    dtype: DType,
    shape: Vec<usize>,
    strides: Vec<isize>,
    start: usize,
    memory: Vec<u64>,
}

/// A value of any dtype: floats by value, integers exactly.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Item {
    Int(i64),
    Float(f64),
}

impl Item {
    fn float(self) -> f64 {
        match self {
            Item::Int(i) => i as f64,
            Item::Float(f) => f,
        }
    }

    fn int(self) -> i64 {
        match self {
            Item::Int(i) => i,
            Item::Float(f) => f as i64,
        }
    }

    fn same(self, other: Item) -> bool {
        match (self, other) {
            (Item::Float(a), Item::Float(b)) => a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(),
            (a, b) => a == b,
        }
    }
}

/// How an operand of a logical shape lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Contiguous,
    Reversed,
    Gaps,
    Scalar,
    Row,
    Backwards,
}

const LAYOUTS: [Layout; 6] =
    [Layout::Contiguous, Layout::Reversed, Layout::Gaps, Layout::Scalar, Layout::Row, Layout::Backwards];

impl Array {
    fn new(dtype: DType, shape: &[usize], layout: Layout, seed: u64) -> Array {
        let rank = shape.len();
        let mut strides = vec![0isize; rank];
        let mut step = match layout {
            Layout::Gaps => 3,
            _ => 1,
        };
        let order: Vec<usize> =
            if layout == Layout::Reversed { (0..rank).collect() } else { (0..rank).rev().collect() };
        for (k, &d) in order.iter().enumerate() {
            let broadcast = layout == Layout::Scalar || (layout == Layout::Row && k > 0);
            strides[d] = if broadcast { 0 } else { step };
            if !broadcast {
                step *= shape[d].max(1) as isize;
            }
        }
        let mut start = 0;
        if layout == Layout::Backwards && rank > 0 {
            start = strides[rank - 1] as usize * (shape[rank - 1].max(1) - 1);
            strides[rank - 1] = -strides[rank - 1];
        }
        let elements = step as usize + 1;
        let mut array = Array { dtype, shape: shape.to_vec(), strides, start, memory: vec![0; elements + 1] };
        let mut state = seed.wrapping_mul(0x9e3779b97f4a7c15) | 1;
        for i in 0..elements {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let float = (state >> 40) as f64 / 2e6 - 4.0;
            let item = match dtype {
                DType::Bool => Item::Int((state >> 33 & 1) as i64),
                DType::I64 if state.is_multiple_of(17) => Item::Int((1 << 62) + (state >> 20) as i64),
                dtype if !dtype.is_float() => Item::Int(dtype.wrap((state >> 50) as i64 - 8000)),
                _ if state.is_multiple_of(97) => Item::Float(f64::NAN),
                // Subnormal halves, and some that become infinite.
                _ if dtype.is_narrow() && state.is_multiple_of(31) => Item::Float(dtype.round(float * 1e-6)),
                _ if dtype.is_narrow() && state.is_multiple_of(37) => Item::Float(dtype.round(float * 2e4)),
                dtype => Item::Float(dtype.round(float)),
            };
            array.write(i, item);
        }
        array
    }

    fn base(&mut self) -> *mut u8 {
        self.memory.as_mut_ptr().cast()
    }

    fn operand(&mut self) -> Operand<'_> {
        let ptr = self.base().wrapping_add(self.start * self.dtype.size());
        Operand { ptr, dtype: self.dtype, shape: &self.shape, strides: &self.strides }
    }

    fn write(&mut self, element: usize, item: Item) {
        let ptr = self.base();
        // SAFETY: the memory has room for 8 bytes an element.
        unsafe {
            match self.dtype {
                DType::Bool | DType::U8 => ptr.add(element).write(item.int() as u8),
                DType::I8 => ptr.cast::<i8>().add(element).write(item.int() as i8),
                DType::I16 => ptr.cast::<i16>().add(element).write(item.int() as i16),
                DType::I32 => ptr.cast::<i32>().add(element).write(item.int() as i32),
                DType::I64 => ptr.cast::<i64>().add(element).write(item.int()),
                DType::F16 => ptr.cast::<f16>().add(element).write(f16::from_f64(item.float())),
                DType::BF16 => ptr.cast::<bf16>().add(element).write(bf16::from_f64(item.float())),
                DType::F32 => ptr.cast::<f32>().add(element).write(item.float() as f32),
                DType::F64 => ptr.cast::<f64>().add(element).write(item.float()),
            }
        }
    }

    fn read(&self, element: usize) -> Item {
        let ptr: *const u8 = self.memory.as_ptr().cast();
        // SAFETY: the memory has room for 8 bytes an element.
        unsafe {
            match self.dtype {
                DType::Bool | DType::U8 => Item::Int(i64::from(ptr.add(element).read())),
                DType::I8 => Item::Int(i64::from(ptr.cast::<i8>().add(element).read())),
                DType::I16 => Item::Int(i64::from(ptr.cast::<i16>().add(element).read())),
                DType::I32 => Item::Int(i64::from(ptr.cast::<i32>().add(element).read())),
                DType::F16 => Item::Float(ptr.cast::<f16>().add(element).read().to_f64()),
                DType::BF16 => Item::Float(ptr.cast::<bf16>().add(element).read().to_f64()),
                DType::I64 => Item::Int(ptr.cast::<i64>().add(element).read()),
                DType::F32 => Item::Float(f64::from(ptr.cast::<f32>().add(element).read())),
                DType::F64 => Item::Float(ptr.cast::<f64>().add(element).read()),
            }
        }
    }

    /// The logical elements in row-major order.
    fn items(&self) -> Vec<Item> {
        (0..self.shape.iter().product())
            .map(|mut i: usize| {
                let mut at = self.start as isize;
                for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
                    at += (i % size) as isize * stride;
                    i /= size;
                }
                self.read(at as usize)
            })
            .collect()
    }
}

const SHAPES: &[&[usize]] =
    &[&[], &[0], &[1], &[7], &[1000], &[3, 0, 2], &[5, 3], &[33, 70], &[2, 3, 5], &[4, 1, 130], &[70, 600]];

fn expect(what: &str, got: &Array, expected: &[Item]) {
    for (i, (got, expected)) in got.items().into_iter().zip(expected).enumerate() {
        assert!(got.same(*expected), "{what}: element {i}: {got:?}, not {expected:?}");
    }
}

/// Runs a kernel over all shapes and layouts of its inputs and output.
fn sweep(
    what: &str,
    out: DType,
    inputs: &[DType],
    kernel: impl Fn(&Operand, &[&Operand]),
    naive: impl Fn(&[Item]) -> Item,
) {
    for &shape in SHAPES {
        for (k, &layout) in LAYOUTS.iter().enumerate() {
            let mut arrays: Vec<Array> = inputs
                .iter()
                .enumerate()
                .map(|(i, &dtype)| {
                    Array::new(dtype, shape, LAYOUTS[(k + i * 5) % LAYOUTS.len()], (k + i) as u64 + 1)
                })
                .collect();
            let out_layout = match layout {
                Layout::Scalar | Layout::Row => Layout::Contiguous,
                other => other,
            };
            let mut result = Array::new(out, shape, out_layout, 99);
            let columns: Vec<Vec<Item>> = arrays.iter().map(Array::items).collect();
            let expected: Vec<Item> = (0..shape.iter().product())
                .map(|i| naive(&columns.iter().map(|c| c[i]).collect::<Vec<_>>()))
                .collect();
            let operands: Vec<Operand> = arrays.iter_mut().map(Array::operand).collect();
            kernel(&result.operand(), &operands.iter().collect::<Vec<_>>());
            expect(&format!("{what} {shape:?} {layout:?}"), &result, &expected);
        }
    }
}

#[test]
fn float_functions() {
    float_functions_of(&[DType::F32, DType::F64]);
}

#[test]
fn half_functions() {
    float_functions_of(&[DType::F16, DType::BF16]);
}

fn float_functions_of(dtypes: &[DType]) {
    for &function in Function::ALL {
        for &dtype in dtypes {
            let width = if dtype == DType::F64 { Width::F64 } else { Width::F32 };
            sweep(
                function.name(),
                dtype,
                &vec![dtype; function.arity()],
                // SAFETY: operands made for this call.
                |out, inputs| unsafe { pointwise(function, out, inputs).unwrap() },
                |args| {
                    let args: Vec<f64> = args.iter().map(|a| a.float()).collect();
                    Item::Float(dtype.round(function.eval(width, &args)))
                },
            );
        }
    }
}

#[test]
fn integer_functions() {
    type Naive = fn(&[i64]) -> i64;
    let cases: &[(Function, Naive)] = &[
        (Function::Add, |a| a[0].wrapping_add(a[1])),
        (Function::Sub, |a| a[0].wrapping_sub(a[1])),
        (Function::Mul, |a| a[0].wrapping_mul(a[1])),
        (Function::Neg, |a| a[0].wrapping_neg()),
        (Function::Abs, |a| a[0].wrapping_abs()),
        (Function::Relu, |a| a[0].max(0)),
        (Function::Maximum, |a| a[0].max(a[1])),
        (Function::Minimum, |a| a[0].min(a[1])),
        (Function::AddAlpha, |a| a[0].wrapping_add(a[1].wrapping_mul(a[2]))),
        (Function::SubAlpha, |a| a[0].wrapping_sub(a[1].wrapping_mul(a[2]))),
    ];
    for (function, naive) in cases {
        for dtype in DType::ALL.into_iter().filter(|d| d.computing() == DType::I64) {
            sweep(
                function.name(),
                dtype,
                &vec![dtype; function.arity()],
                // SAFETY: operands made for this call.
                |out, inputs| unsafe { pointwise(*function, out, inputs).unwrap() },
                |args| Item::Int(dtype.wrap(naive(&args.iter().map(|a| a.int()).collect::<Vec<_>>()))),
            );
        }
    }
}

#[test]
fn integer_power() {
    for (base, exponent, expected) in [
        (3, 4, 81),
        (-2, 63, i64::MIN),
        (10, 20, 10i64.wrapping_pow(20)),
        (0, 0, 1),
        (2, -1, 0),
        (-1, -3, -1),
    ] {
        let mut arrays = [base, exponent, 0].map(|v| {
            let mut array = Array::new(DType::I64, &[], Layout::Contiguous, 1);
            array.write(0, Item::Int(v));
            array
        });
        let [base, exponent, out] = &mut arrays;
        // SAFETY: operands made for this call.
        unsafe { pointwise(Function::Pow, &out.operand(), &[&base.operand(), &exponent.operand()]).unwrap() };
        assert_eq!(out.read(0), Item::Int(expected));
    }
}

#[test]
fn unsupported_functions_say_so() {
    let mut array = Array::new(DType::I64, &[3], Layout::Contiguous, 1);
    let operand = array.operand();
    // SAFETY: operands made for this call.
    let error = unsafe { pointwise(Function::Exp, &operand, &[&operand]) }.unwrap_err();
    assert_eq!(error, Unsupported { function: "exp", dtype: DType::I64 });
}

#[test]
fn comparisons() {
    type Naive = fn(f64, f64) -> bool;
    let cases: [(Comparison, Naive); 6] = [
        (Comparison::Eq, |a, b| a == b),
        (Comparison::Ne, |a, b| a != b),
        (Comparison::Lt, |a, b| a < b),
        (Comparison::Le, |a, b| a <= b),
        (Comparison::Gt, |a, b| a > b),
        (Comparison::Ge, |a, b| a >= b),
    ];
    for (comparison, naive) in cases {
        for dtype in DType::ALL {
            sweep(
                "compare",
                DType::Bool,
                &[dtype, dtype],
                // SAFETY: operands made for this call.
                |out, inputs| unsafe { compare(comparison, out, inputs[0], inputs[1]) },
                |args| Item::Int(i64::from(naive(args[0].float(), args[1].float()))),
            );
        }
    }
}

#[test]
fn logic_and_where() {
    for (connective, arity) in [(Logical::And, 2), (Logical::Not, 1)] {
        sweep(
            "logical",
            DType::Bool,
            &vec![DType::Bool; arity],
            // SAFETY: operands made for this call.
            |out, inputs| unsafe { logical(connective, out, inputs) },
            |args| {
                let a = args[0].int();
                Item::Int(match connective {
                    Logical::And => a & args[1].int(),
                    Logical::Not => 1 - a,
                })
            },
        );
    }
    for dtype in DType::ALL {
        sweep(
            "where",
            dtype,
            &[DType::Bool, dtype, dtype],
            // SAFETY: operands made for this call.
            |out, inputs| unsafe { select(out, inputs[0], inputs[1], inputs[2]) },
            |args| if args[0].int() != 0 { args[1] } else { args[2] },
        );
    }
}

#[test]
fn casts_between_all_dtypes() {
    for from in DType::ALL {
        for to in DType::ALL {
            sweep(
                "convert",
                to,
                &[from],
                // SAFETY: operands made for this call.
                |out, inputs| unsafe { convert(out, inputs[0]) },
                |args| match (args[0], to) {
                    (Item::Int(i), DType::Bool) => Item::Int(i64::from(i != 0)),
                    (Item::Float(f), DType::Bool) => Item::Int(i64::from(f != 0.0)),
                    (Item::Int(i), to) if to.computing() == DType::F32 => {
                        Item::Float(to.round(f64::from(i as f32)))
                    }
                    (item, to) if to.is_float() => Item::Float(to.round(item.float())),
                    (item, to) => Item::Int(to.wrap(item.int())),
                },
            );
        }
    }
}

#[test]
fn in_place() {
    for shape in [&[1][..], &[7], &[1000], &[33, 70], &[300, 400]] {
        for layout in [Layout::Contiguous, Layout::Reversed, Layout::Gaps] {
            let mut x = Array::new(DType::F32, shape, layout, 1);
            let mut y = Array::new(DType::F32, shape, Layout::Contiguous, 2);
            let expected: Vec<Item> = (x.items().iter().zip(y.items()))
                .map(|(a, b)| Item::Float(f64::from(a.float() as f32 * b.float() as f32)))
                .collect();
            // SAFETY: the output is the first input.
            unsafe {
                let out = x.operand();
                pointwise(Function::Mul, &out, &[&out, &y.operand()]).unwrap();
            }
            expect("mul_", &x, &expected);
        }
    }
}

#[test]
fn large_operands_use_threads() {
    for (shape, layout) in
        [(&[700, 300][..], Layout::Row), (&[300, 700], Layout::Reversed), (&[5000, 20], Layout::Row)]
    {
        let mut x = Array::new(DType::F32, shape, Layout::Contiguous, 1);
        let mut y = Array::new(DType::F32, shape, layout, 2);
        let mut out = Array::new(DType::F32, shape, Layout::Contiguous, 3);
        let expected: Vec<Item> = (x.items().iter().zip(y.items()))
            .map(|(a, b)| Item::Float(f64::from(a.float() as f32 + b.float() as f32)))
            .collect();
        // SAFETY: operands made for this call.
        unsafe { pointwise(Function::Add, &out.operand(), &[&x.operand(), &y.operand()]).unwrap() };
        expect("add", &out, &expected);
        // SAFETY: operands made for this call.
        unsafe { convert(&out.operand(), &y.operand()) };
        expect("copy", &out, &y.items());
    }
}

#[test]
fn fill_and_arange() {
    let mut x = Array::new(DType::F32, &[4, 33], Layout::Gaps, 1);
    // SAFETY: operands made for this call.
    unsafe { fill(&x.operand(), u64::from(2.5f32.to_bits())) };
    expect("fill", &x, &vec![Item::Float(2.5); 132]);
    let mut y = Array::new(DType::I64, &[5], Layout::Gaps, 1);
    // SAFETY: operands made for this call.
    unsafe { arange(&y.operand(), 3.0, 2.0) };
    expect("arange", &y, &[3, 5, 7, 9, 11].map(Item::Int));
    let mut z = Array::new(DType::F32, &[3], Layout::Contiguous, 1);
    // SAFETY: operands made for this call.
    unsafe { arange(&z.operand(), 0.5, 0.25) };
    expect("arange", &z, &[0.5, 0.75, 1.0].map(Item::Float));
}

/// Reduces naively: the items of each output, in input order.
fn groups(input: &Array, dims: &[usize]) -> (Vec<usize>, Vec<Vec<Item>>) {
    let kept: Vec<usize> = (0..input.shape.len()).filter(|d| !dims.contains(d)).collect();
    let out_shape: Vec<usize> = kept.iter().map(|&d| input.shape[d]).collect();
    let mut groups = vec![Vec::new(); out_shape.iter().product()];
    for (i, item) in input.items().into_iter().enumerate() {
        let mut index = vec![0; input.shape.len()];
        let mut rest = i;
        for d in (0..input.shape.len()).rev() {
            index[d] = rest % input.shape[d];
            rest /= input.shape[d];
        }
        groups[kept.iter().fold(0, |at, &d| at * input.shape[d] + index[d])].push(item);
    }
    (out_shape, groups)
}

/// The largest relative error of one rounding to a half.
fn half_unit(dtype: DType) -> f64 {
    if dtype == DType::F16 { 1.0 / 2048.0 } else { 1.0 / 256.0 }
}

fn check_reduce(reduction: Reduction, dtype: DType, shape: &[usize], layout: Layout, dims: &[usize]) {
    let mut input = Array::new(dtype, shape, layout, 5);
    let totals = matches!(reduction, Reduction::Sum | Reduction::Prod);
    if dtype.is_float() && totals {
        for i in 0..input.memory.len() - 1 {
            if !input.read(i).float().is_finite() {
                input.write(i, Item::Float(1.5));
            }
        }
    }
    let (out_shape, groups) = groups(&input, dims);
    let counted = !dtype.is_float() && totals;
    let out_dtype = if counted { DType::I64 } else { dtype };
    let mut out = Array::new(out_dtype, &out_shape, Layout::Contiguous, 1);
    // SAFETY: operands made for this call.
    unsafe { reduce(reduction, &out.operand(), &input.operand(), dims) };
    for (got, items) in out.items().into_iter().zip(groups) {
        let what = format!("{reduction:?} {dtype:?} {shape:?} {layout:?} {dims:?}");
        match (reduction, got) {
            (Reduction::Sum, Item::Int(got)) => {
                assert_eq!(got, items.iter().fold(0i64, |a, x| a.wrapping_add(x.int())), "{what}");
            }
            (Reduction::Sum, Item::Float(got)) => {
                let exact: f64 = items.iter().map(|x| x.float()).sum();
                let size: f64 = items.iter().map(|x| x.float().abs()).sum();
                let epsilon = match dtype {
                    DType::F64 => 1e-12,
                    DType::F32 => 3e-7,
                    // Added up in f32, rounded once.
                    _ => 3e-7 + half_unit(dtype),
                };
                let right = (got - exact).abs() <= epsilon * size || got == dtype.round(exact);
                assert!(right, "{what}: {got}, not {exact}");
            }
            (Reduction::Prod, Item::Int(got)) => {
                assert_eq!(got, items.iter().fold(1i64, |a, x| a.wrapping_mul(x.int())), "{what}");
            }
            (Reduction::Prod, Item::Float(got)) => {
                let exact: f64 = items.iter().map(|x| x.float()).product();
                let epsilon = if dtype.is_narrow() { half_unit(dtype) } else { 1e-6 };
                let close = got == dtype.round(exact) || (got - exact).abs() <= epsilon * exact.abs();
                assert!(close || (got.is_nan() && exact.is_nan()), "{what}: {got}, not {exact}");
            }
            (Reduction::Amin, Item::Int(got)) => {
                let most = dtype.wrap(if dtype == DType::Bool { 1 } else { i64::MAX });
                assert_eq!(got, items.iter().map(|x| x.int()).min().unwrap_or(most), "{what}");
            }
            (Reduction::Amin, Item::Float(got)) => {
                let nan = items.iter().any(|x| x.float().is_nan());
                let smallest = items.iter().map(|x| x.float()).fold(f64::INFINITY, f64::min);
                assert!(if nan { got.is_nan() } else { got == smallest }, "{what}: {got}, not {smallest}");
            }
            (Reduction::Amax, Item::Int(got)) => {
                let least = dtype.wrap(if dtype == DType::Bool { 0 } else { i64::MIN });
                assert_eq!(got, items.iter().map(|x| x.int()).max().unwrap_or(least), "{what}");
            }
            (Reduction::Amax, Item::Float(got)) => {
                let nan = items.iter().any(|x| x.float().is_nan());
                let largest = items.iter().map(|x| x.float()).fold(f64::NEG_INFINITY, f64::max);
                assert!(if nan { got.is_nan() } else { got == largest }, "{what}: {got}, not {largest}");
            }
        }
    }
}

#[test]
fn reductions() {
    let shapes: &[(&[usize], &[&[usize]])] = &[
        (&[], &[&[]]),
        (&[7], &[&[0], &[]]),
        (&[5000], &[&[0]]),
        (&[0, 3], &[&[0], &[1], &[0, 1]]),
        (&[33, 70], &[&[0], &[1], &[0, 1], &[]]),
        (&[6, 5, 40], &[&[0], &[1], &[2], &[0, 2], &[1, 2], &[0, 1], &[0, 1, 2]]),
        (&[3, 2, 5, 4], &[&[1, 3], &[0, 2]]),
    ];
    for reduction in [Reduction::Sum, Reduction::Amax, Reduction::Amin, Reduction::Prod] {
        for dtype in DType::ALL {
            for (shape, sets) in shapes {
                for dims in *sets {
                    for layout in LAYOUTS {
                        check_reduce(reduction, dtype, shape, layout, dims);
                    }
                }
            }
        }
    }
}

#[test]
fn large_reductions() {
    for dtype in [DType::F32, DType::F64, DType::I64, DType::BF16, DType::I8] {
        check_reduce(Reduction::Sum, dtype, &[200_001], Layout::Contiguous, &[0]);
        check_reduce(Reduction::Sum, dtype, &[300, 1100], Layout::Contiguous, &[0]);
        check_reduce(Reduction::Sum, dtype, &[300, 1100], Layout::Contiguous, &[1]);
        check_reduce(Reduction::Sum, dtype, &[300, 1100], Layout::Reversed, &[0]);
        check_reduce(Reduction::Amax, dtype, &[2500, 40], Layout::Gaps, &[0]);
    }
}

#[test]
fn results_do_not_depend_on_threads() {
    let bits = |threads: usize| {
        kiln_runtime::threads::set_count(threads);
        let mut x = Array::new(DType::F32, &[600, 700], Layout::Contiguous, 8);
        for i in 0..420_000 {
            let value = x.read(i).float();
            x.write(i, Item::Float(if value.is_nan() { 0.1 } else { value }));
        }
        let mut all = Array::new(DType::F32, &[], Layout::Contiguous, 1);
        let mut columns = Array::new(DType::F32, &[700], Layout::Contiguous, 1);
        // SAFETY: operands made for this call.
        unsafe {
            reduce(Reduction::Sum, &all.operand(), &x.operand(), &[0, 1]);
            reduce(Reduction::Sum, &columns.operand(), &x.operand(), &[0]);
        }
        (all.memory[0], columns.memory)
    };
    let one = bits(1);
    assert_eq!(one, bits(2));
    assert_eq!(one, bits(3));
}

/// An array without NaN.
fn finite(dtype: DType, shape: &[usize], layout: Layout, seed: u64) -> Array {
    let mut array = Array::new(dtype, shape, layout, seed);
    for i in 0..array.memory.len() - 1 {
        // Not too large either for the logarithm of a softmax in half precision.
        if !array.read(i).float().abs().lt(&100.0) {
            array.write(i, Item::Float(-1.25));
        }
    }
    array
}

/// The lines of items along a dim: for each, the positions of its elements in row-major order.
fn line_positions(shape: &[usize], dim: usize) -> Vec<Vec<usize>> {
    let inner: usize = shape[dim + 1..].iter().product();
    let outer: usize = shape[..dim].iter().product();
    let length = shape[dim];
    (0..outer * inner)
        .map(|l| (0..length).map(|k| (l / inner * length + k) * inner + l % inner).collect())
        .collect()
}

#[test]
fn softmax_and_its_logarithm() {
    for dtype in DType::ALL.into_iter().filter(|d| d.is_float()) {
        let tolerance = match dtype {
            DType::F64 => 1e-14,
            DType::F32 => 1e-6,
            _ => 1e-6 + half_unit(dtype),
        };
        for (shape, dim) in
            [(&[5][..], 0), (&[6, 33], 1), (&[6, 33], 0), (&[3, 4, 5], 1), (&[40, 3000], 1), (&[2, 1], 1)]
        {
            for layout in [Layout::Contiguous, Layout::Reversed, Layout::Gaps, Layout::Backwards] {
                for logarithm in [false, true] {
                    let mut x = finite(dtype, shape, layout, 3);
                    let mut y = Array::new(dtype, shape, Layout::Contiguous, 1);
                    // SAFETY: operands made for this call.
                    unsafe { softmax(logarithm, &y.operand(), &x.operand(), dim) };
                    let (x_items, y_items) = (x.items(), y.items());
                    for line in line_positions(shape, dim) {
                        let largest = line.iter().map(|&i| x_items[i].float()).fold(f64::MIN, f64::max);
                        let total: f64 = line.iter().map(|&i| (x_items[i].float() - largest).exp()).sum();
                        let p = |i: usize| (x_items[i].float() - largest).exp() / total;
                        for &i in &line {
                            let expected = if logarithm { p(i).ln() } else { p(i) };
                            assert!(
                                (y_items[i].float() - expected).abs() <= tolerance * expected.abs().max(8.0),
                                "{shape:?} {layout:?}"
                            );
                        }
                    }
                    // SAFETY: in place.
                    unsafe {
                        let operand = x.operand();
                        softmax(logarithm, &operand, &operand, dim);
                    }
                    expect("softmax in place", &x, &y_items);
                }
            }
        }
    }
}

#[test]
fn softmax_of_empty_and_scalar() {
    let mut x = finite(DType::F32, &[], Layout::Contiguous, 3);
    let mut y = Array::new(DType::F32, &[], Layout::Contiguous, 1);
    // SAFETY: operands made for this call.
    unsafe { softmax(false, &y.operand(), &x.operand(), 0) };
    assert_eq!(y.read(0), Item::Float(1.0));
    let mut empty = Array::new(DType::F32, &[0, 4], Layout::Contiguous, 3);
    // SAFETY: operands made for this call.
    unsafe {
        let operand = empty.operand();
        softmax(true, &operand, &operand, 1);
    }
}

#[test]
fn nll_gathers_and_checks() {
    let mut input = finite(DType::F32, &[3, 4], Layout::Gaps, 3);
    let mut target = Array::new(DType::I64, &[3], Layout::Contiguous, 1);
    let mut weight = finite(DType::F32, &[4], Layout::Contiguous, 7);
    let [mut losses, mut weights] = [(); 2].map(|()| Array::new(DType::F32, &[3], Layout::Contiguous, 1));
    for (i, t) in [2, -100, 0].into_iter().enumerate() {
        target.write(i, Item::Int(t));
    }
    // SAFETY: operands made for this call.
    unsafe {
        nll_forward(
            &losses.operand(),
            &weights.operand(),
            &input.operand(),
            &target.operand(),
            Some(&weight.operand()),
            -100,
        )
        .unwrap();
    }
    let (x, w) = (input.items(), weight.items());
    let loss =
        |row: usize, t: usize| Item::Float(f64::from(-(w[t].float() as f32 * x[row * 4 + t].float() as f32)));
    expect("losses", &losses, &[loss(0, 2), Item::Float(0.0), loss(2, 0)]);
    expect("weights", &weights, &[w[2], Item::Float(0.0), w[0]]);

    target.write(1, Item::Int(4));
    // SAFETY: operands made for this call.
    let error = unsafe {
        nll_forward(&losses.operand(), &weights.operand(), &input.operand(), &target.operand(), None, -100)
    };
    assert_eq!(error, Err(IndexOutOfRange { row: 1, target: 4, classes: 4 }));
}
