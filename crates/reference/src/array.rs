//! Arrays: dense values in double precision or 64-bit integers, with the dtype they stand for.

use kiln_ir::{DType, Device, Scalar, Shape, TensorTy, Ty};

/// How results are rounded.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub enum Precision {
    /// To the value's dtype, after each op.
    #[default]
    Rounded,
    /// Not at all: floats are computed and kept in double precision.
    Exact,
}

/// The elements of an array, in row-major order.
#[derive(Clone, PartialEq, Debug)]
pub enum Data {
    /// Of floats.
    Float(Vec<f64>),
    /// Of integers and truth values (0 and 1).
    Int(Vec<i64>),
}

/// A dense tensor.
#[derive(Clone, PartialEq, Debug)]
pub struct Array {
    /// The dtype it stands for.
    pub dtype: DType,
    /// Where it would live.
    pub device: Device,
    /// Its sizes.
    pub shape: Shape,
    /// Its elements.
    pub data: Data,
}

/// A value of a program: what a graph takes and returns.
#[derive(Clone, PartialEq, Debug)]
pub enum Argument {
    /// A tensor.
    Tensor(Array),
    /// A number.
    Scalar(Scalar),
    /// A list of tensors.
    List(Vec<Array>),
}

impl Array {
    /// An array whose element `i` is `element(i)`.
    pub fn floats(dtype: DType, shape: impl Into<Shape>, element: impl FnMut(usize) -> f64) -> Array {
        let shape = shape.into();
        let data = Data::Float((0..shape.numel()).map(element).collect());
        Array { dtype, device: Device::Cpu, shape, data }
    }

    /// An integer or truth-value array whose element `i` is `element(i)`.
    pub fn ints(dtype: DType, shape: impl Into<Shape>, element: impl FnMut(usize) -> i64) -> Array {
        let shape = shape.into();
        let data = Data::Int((0..shape.numel()).map(element).collect());
        Array { dtype, device: Device::Cpu, shape, data }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// The array's type.
    pub fn ty(&self) -> TensorTy {
        TensorTy { dtype: self.dtype, device: self.device, shape: self.shape.clone() }
    }

    /// Element `i` as a double.
    pub fn float(&self, i: usize) -> f64 {
        match &self.data {
            Data::Float(x) => x[i],
            Data::Int(x) => x[i] as f64,
        }
    }

    /// Element `i` as an integer, truncated towards zero.
    pub fn int(&self, i: usize) -> i64 {
        match &self.data {
            Data::Float(x) => x[i] as i64,
            Data::Int(x) => x[i],
        }
    }

    /// The elements at these positions, in another shape.
    pub fn take(&self, shape: Shape, positions: impl Iterator<Item = usize>) -> Array {
        let data = match &self.data {
            Data::Float(x) => Data::Float(positions.map(|i| x[i]).collect()),
            Data::Int(x) => Data::Int(positions.map(|i| x[i]).collect()),
        };
        Array { dtype: self.dtype, device: self.device, shape, data }
    }

    /// Converted to another dtype, as `to` does.
    pub fn convert(&self, dtype: DType, precision: Precision) -> Array {
        let data = match (&self.data, dtype) {
            (Data::Float(x), dtype) if dtype.is_float() => {
                Data::Float(x.iter().map(|&x| round(x, dtype, precision)).collect())
            }
            (Data::Float(x), DType::Bool) => Data::Int(x.iter().map(|&x| i64::from(x != 0.0)).collect()),
            (Data::Float(x), dtype) => Data::Int(x.iter().map(|&x| dtype.wrap(x as i64)).collect()),
            // Straight to single precision: by way of a double it would be rounded twice.
            (Data::Int(x), dtype) if dtype.computing() == DType::F32 && precision == Precision::Rounded => {
                Data::Float(x.iter().map(|&x| dtype.round(f64::from(x as f32))).collect())
            }
            (Data::Int(x), dtype) if dtype.is_float() => Data::Float(x.iter().map(|&x| x as f64).collect()),
            (Data::Int(x), dtype) => Data::Int(x.iter().map(|&x| dtype.wrap(x)).collect()),
        };
        Array { dtype, device: self.device, shape: self.shape.clone(), data }
    }
}

/// A number as a 0-d array of its kind's dtype.
impl From<Scalar> for Array {
    fn from(number: Scalar) -> Array {
        match number {
            Scalar::Float(x) => Array::floats(DType::F64, (), |_| x),
            Scalar::Int(x) => Array::ints(DType::I64, (), |_| x),
            Scalar::Bool(x) => Array::ints(DType::Bool, (), |_| i64::from(x)),
        }
    }
}

impl Argument {
    /// The value's type.
    pub fn ty(&self) -> Ty {
        match self {
            Argument::Tensor(array) => Ty::Tensor(array.ty()),
            Argument::Scalar(number) => Ty::Scalar(number.kind()),
            Argument::List(items) => Ty::List(items.iter().map(Array::ty).collect()),
        }
    }

    /// The tensor, if it is one.
    pub fn as_tensor(&self) -> Option<&Array> {
        match self {
            Argument::Tensor(array) => Some(array),
            Argument::Scalar(_) | Argument::List(_) => None,
        }
    }
}

impl From<Array> for Argument {
    fn from(array: Array) -> Argument {
        Argument::Tensor(array)
    }
}

/// A double rounded to a dtype.
pub fn round(x: f64, dtype: DType, precision: Precision) -> f64 {
    match precision {
        Precision::Rounded => dtype.round(x),
        Precision::Exact => x,
    }
}

/// How far two right results of a dtype may lie apart, relative to the largest involved: a few units in the
/// last place, for compiled code keeps halves in f32 between the ops it fuses and adds up in another order.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
        DType::F32 => 1e-5,
        DType::F64 => 1e-12,
        DType::Bool | DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => 0.0,
    }
}

/// Says where two values differ by more than `tolerance` (relative, and absolute below 1); tolerance 0 asks
/// for the same bits, except that one NaN is as good as another.
pub fn difference(want: &Argument, got: &Argument, tolerance: f64) -> Option<String> {
    if want.ty() != got.ty() {
        return Some(format!("types differ: {} and {}", want.ty(), got.ty()));
    }
    match (want, got) {
        (Argument::Tensor(a), Argument::Tensor(b)) => arrays(a, b, tolerance),
        (Argument::Scalar(a), Argument::Scalar(b)) => arrays(&Array::from(*a), &Array::from(*b), tolerance),
        (Argument::List(a), Argument::List(b)) => a
            .iter()
            .zip(b)
            .enumerate()
            .find_map(|(i, (a, b))| Some(format!("in tensor {i}: {}", arrays(a, b, tolerance)?))),
        _ => Some("values of different kinds".into()),
    }
}

fn arrays(want: &Array, got: &Array, tolerance: f64) -> Option<String> {
    (0..want.numel()).find_map(|i| {
        let same = match (&want.data, &got.data) {
            (Data::Int(a), Data::Int(b)) => a[i] == b[i],
            _ => {
                let (a, b) = (want.float(i), got.float(i));
                (a.is_nan() && b.is_nan())
                    || a.to_bits() == b.to_bits()
                    || (tolerance > 0.0 && (a - b).abs() <= tolerance * a.abs().max(b.abs()).max(1.0))
            }
        };
        let (a, b) = (want.float(i), got.float(i));
        (!same).then(|| format!("element {i} of {}: {a:?} and {b:?}", want.ty()))
    })
}
