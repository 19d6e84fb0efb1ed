//! Every kernel against naive loops: strided, broadcast, transposed, empty, 0-d, odd tails, in place.

mod costs;
mod lines;
mod moving;
mod order;
mod picks;
mod pointwise;
mod resample;

use kiln_ir::{DType, bf16, f16};

use super::Operand;

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

const SHAPES: &[&[usize]] = &[
    &[],
    &[0],
    &[1],
    &[7],
    &[1000],
    &[3, 0, 2],
    &[5, 3],
    &[33, 70],
    &[2, 3, 5],
    &[4, 1, 130],
    &[40, 600],
    &[19, 5, 140],
];

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
