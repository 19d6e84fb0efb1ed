//! Making tensors: from numbers, from host data, from random streams.

use kiln_ir::{DType, Device, Error, Layout, Loc, MOST_DIMS, Op, Result, Scalar, Shape, TensorTy, Why};
use kiln_runtime::pool::Buffer;

use crate::dispatch::dispatch_tensor;
use crate::hook::Arg;
use crate::host::{Element, reserve};
use crate::kernels::{self, Operand};
use crate::storage::Storage;
use crate::tensor::Ready;
use crate::{Tensor, TensorOptions, device, random};

/// Fresh row-major memory for a tensor of this type, its elements not yet set.
pub(crate) fn allocate(ty: &TensorTy, op: &str, loc: Loc) -> Result<Ready> {
    let buffer = Buffer::alloc_on(ty.device, ty.bytes())
        .ok_or_else(|| Error::op(op, Why::Device { device: ty.device }, loc))?
        .map_err(|e| Error::op(op, Why::Memory { bytes: ty.bytes(), reason: e.to_string() }, loc))?;
    Ok(Ready {
        storage: Storage::new(buffer),
        layout: Layout::contiguous(ty.shape.clone()),
        dtype: ty.dtype,
        device: ty.device,
        view_version: None,
    })
}

/// Whether there may be a tensor of this shape: for shapes that no op's type rule looks at.
pub(crate) fn check_rank(shape: &Shape, op: &str, loc: Loc) -> Result<()> {
    match shape.rank() {
        0..=MOST_DIMS => Ok(()),
        rank => Err(Error::op(op, Why::TooManyDims { rank }, loc)),
    }
}

/// [`allocate`] with a tensor's type.
pub(crate) fn allocate_like(model: &Ready, op: &str, loc: Loc) -> Result<Ready> {
    let bytes = model.layout.shape.numel() * model.dtype.size();
    let buffer =
        Buffer::alloc(bytes).map_err(|e| Error::op(op, Why::Memory { bytes, reason: e.to_string() }, loc))?;
    Ok(Ready {
        storage: Storage::new(buffer),
        layout: Layout::contiguous(Shape::from(&model.layout.shape[..])),
        dtype: model.dtype,
        device: model.device,
        view_version: None,
    })
}

/// A tensor of this type that is one number everywhere, which is in memory once.
pub(crate) fn spread(ty: &TensorTy, value: Scalar, loc: Loc) -> Result<Ready> {
    let mut ready = allocate(&TensorTy::new(ty.dtype, ()), "full", loc)?;
    let one = Operand { ptr: ready.pointer(), dtype: ty.dtype, shape: &[], strides: &[] };
    // SAFETY: fresh memory of one element.
    unsafe { kernels::fill(&one, value.to_element(ty.dtype)) };
    ready.layout =
        Layout { strides: ty.shape.iter().map(|_| 0).collect(), shape: ty.shape.clone(), offset: 0 };
    Ok(ready)
}

impl Tensor {
    pub(crate) fn full_in(
        shape: Shape,
        value: impl Into<Scalar>,
        dtype: DType,
        device: Device,
        loc: Loc,
    ) -> Result<Tensor> {
        let op = Op::Full { shape, dtype, device };
        dispatch_tensor(&op, &[Arg::Number(value.into())], false, loc)
    }

    /// A 0-d tensor of the number's own dtype.
    pub(crate) fn scalar(value: Scalar, loc: Loc) -> Result<Tensor> {
        Tensor::full_in(Shape::scalar(), value, value.kind().dtype(), Device::Cpu, loc)
    }

    /// A tensor filled with a number: f32 for floats, i64 for integers, bool for bools, unless the options
    /// (`&device`, `dtype`, `(dtype, &device)`) name a dtype.
    #[track_caller]
    pub fn full(
        shape: impl Into<Shape>,
        value: impl Into<Scalar>,
        options: impl Into<TensorOptions>,
    ) -> Result<Tensor> {
        let (value, options) = (value.into(), options.into());
        let usual = match value {
            Scalar::Float(_) => DType::F32,
            other => other.kind().dtype(),
        };
        Tensor::full_in(shape.into(), value, options.dtype_or(usual), options.device(), Loc::caller())
    }

    /// A tensor of a dtype filled with a number.
    #[track_caller]
    pub fn full_of(
        shape: impl Into<Shape>,
        value: impl Into<Scalar>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        Tensor::full_in(shape.into(), value, dtype, *device, Loc::caller())
    }

    /// Zeros, f32 unless the options name a dtype: `Tensor::zeros((2, 3), &device)`,
    /// `Tensor::zeros([2, 3], (DType::I64, &device))`.
    #[track_caller]
    pub fn zeros(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let options = options.into();
        Tensor::full_in(shape.into(), 0.0, options.dtype_or(DType::F32), options.device(), Loc::caller())
    }

    /// Ones, f32 unless the options name a dtype.
    #[track_caller]
    pub fn ones(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let options = options.into();
        Tensor::full_in(shape.into(), 1.0, options.dtype_or(DType::F32), options.device(), Loc::caller())
    }

    /// Zeros of this tensor's type.
    #[track_caller]
    pub fn zeros_like(&self) -> Result<Tensor> {
        let ty = self.ty();
        Tensor::full_in(ty.shape, 0.0, ty.dtype, ty.device, Loc::caller())
    }

    /// Ones of this tensor's type.
    #[track_caller]
    pub fn ones_like(&self) -> Result<Tensor> {
        let ty = self.ty();
        Tensor::full_in(ty.shape, 1.0, ty.dtype, ty.device, Loc::caller())
    }

    /// A tensor whose elements have yet to be written (they are zeros), f32.
    #[track_caller]
    pub fn empty(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        Tensor::zeros(shape, options)
    }

    /// Ones on the diagonal of a matrix of zeros, f32.
    #[track_caller]
    pub fn eye(rows: usize, columns: usize, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let (loc, options) = (Loc::caller(), options.into());
        let line = |len: usize, shape: [usize; 2]| {
            let op = Op::Arange { len, dtype: DType::I64, device: options.device() };
            let ends = [Arg::Number(Scalar::Int(0)), Arg::Number(Scalar::Int(1))];
            dispatch_tensor(&op, &ends, false, loc)?.unary(Op::Reshape { shape: shape.into() }, loc)
        };
        let (row, column) = (line(rows, [rows, 1])?, line(columns, [1, columns])?);
        let same = dispatch_tensor(&Op::Eq {}, &[Arg::Tensor(&row), Arg::Tensor(&column)], false, loc)?;
        same.unary(Op::To { dtype: options.dtype_or(DType::F32) }, loc)
    }

    /// `steps` numbers from start to end, both included, evenly spaced, f32.
    #[track_caller]
    pub fn linspace(start: f64, end: f64, steps: usize, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let (loc, options) = (Loc::caller(), options.into());
        let (first, last) = (start as f32, end as f32);
        let step = if steps > 1 { (last - first) / (steps - 1) as f32 } else { 0.0 };
        // From both ends to the middle, so that both ends are exact.
        let ramp = |from: f32, step: f32| {
            let op = Op::Arange { len: steps, dtype: DType::F32, device: options.device() };
            let ends = [Arg::Number(Scalar::Float(0.0)), Arg::Number(Scalar::Float(1.0))];
            let count = dispatch_tensor(&op, &ends, false, loc)?;
            let scaled =
                dispatch_tensor(&Op::Mul {}, &[Arg::Tensor(&count), Arg::Number(step.into())], false, loc)?;
            dispatch_tensor(&Op::Add {}, &[Arg::Tensor(&scaled), Arg::Number(from.into())], false, loc)
        };
        let half = steps / 2;
        let from_start = ramp(first, step)?.unary(Op::Slice { dim: 0, start: 0, end: half, step: 1 }, loc)?;
        let from_end =
            ramp(last, -step)?.unary(Op::Slice { dim: 0, start: 0, end: steps - half, step: 1 }, loc)?;
        let from_end = from_end.unary(Op::Flip { dims: 0.into() }, loc)?;
        // A single number is the start.
        let line = match steps {
            1 => ramp(first, 0.0)?,
            _ => {
                let parts = [Arg::Tensor(&from_start), Arg::Tensor(&from_end)];
                dispatch_tensor(&Op::Cat { dim: 0 }, &parts, false, loc)?
            }
        };
        line.to_dtype(options.dtype_or(DType::F32))
    }

    /// The integers `start..end`, i64.
    #[track_caller]
    pub fn arange(start: i64, end: i64, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let options = options.into();
        let len = if end > start { end.wrapping_sub(start) as u64 as usize } else { 0 };
        let op = Op::Arange { len, dtype: options.dtype_or(DType::I64), device: options.device() };
        dispatch_tensor(
            &op,
            &[Arg::Number(Scalar::Int(start)), Arg::Number(Scalar::Int(1))],
            false,
            Loc::caller(),
        )
    }

    /// start, start + step, … before end, f32.
    #[track_caller]
    pub fn arange_step(start: f64, end: f64, step: f64, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let (loc, options) = (Loc::caller(), options.into());
        let steps = ((end - start) / step).ceil();
        if step == 0.0 || !steps.is_finite() || steps < 0.0 {
            let why = Why::Number { argument: "step", expected: "nonzero and towards end", got: step };
            return Err(Error::op("arange", why, loc));
        }
        let dtype = options.dtype_or(DType::F32);
        let op = Op::Arange { len: steps as usize, dtype, device: options.device() };
        dispatch_tensor(
            &op,
            &[Arg::Number(Scalar::Float(start)), Arg::Number(Scalar::Float(step))],
            false,
            loc,
        )
    }

    fn random(op: Op, bounds: &[Arg<'_>], shape: &Shape, dtype: DType, loc: Loc) -> Result<Tensor> {
        let (seed, offset) = random::advance(shape.checked_numel().unwrap_or(0), dtype);
        let mut args = bounds.to_vec();
        args.extend([Arg::Number(Scalar::Int(seed as i64)), Arg::Number(Scalar::Int(offset as i64))]);
        dispatch_tensor(&op, &args, false, loc)
    }

    /// Uniform random numbers in [0, 1), f32.
    #[track_caller]
    pub fn rand(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let (shape, options) = (shape.into(), options.into());
        let (dtype, device) = (options.dtype_or(DType::F32), options.device());
        let op = Op::Rand { shape: shape.clone(), dtype, device };
        Tensor::random(op, &[], &shape, dtype, Loc::caller())
    }

    /// Uniform random numbers in [0, 1) of a dtype.
    #[track_caller]
    pub fn rand_of(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
        Tensor::rand(shape, (dtype, device))
    }

    /// Standard normal random numbers, f32.
    #[track_caller]
    pub fn randn(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let (shape, options) = (shape.into(), options.into());
        let (dtype, device) = (options.dtype_or(DType::F32), options.device());
        let op = Op::Randn { shape: shape.clone(), dtype, device };
        Tensor::random(op, &[], &shape, dtype, Loc::caller())
    }

    /// Standard normal random numbers of a dtype.
    #[track_caller]
    pub fn randn_of(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
        Tensor::randn(shape, (dtype, device))
    }

    /// Uniform random numbers in [low, high), f32.
    #[track_caller]
    pub fn uniform(
        shape: impl Into<Shape>,
        low: f64,
        high: f64,
        options: impl Into<TensorOptions>,
    ) -> Result<Tensor> {
        let (shape, options) = (shape.into(), options.into());
        let (dtype, device) = (options.dtype_or(DType::F32), options.device());
        let op = Op::Uniform { shape: shape.clone(), dtype, device };
        let bounds = [Arg::Number(Scalar::Float(low)), Arg::Number(Scalar::Float(high))];
        Tensor::random(op, &bounds, &shape, dtype, Loc::caller())
    }

    /// Random integers in `low..high`, i64.
    #[track_caller]
    pub fn randint(
        low: i64,
        high: i64,
        shape: impl Into<Shape>,
        options: impl Into<TensorOptions>,
    ) -> Result<Tensor> {
        let (loc, options) = (Loc::caller(), options.into());
        if low >= high {
            let why = Why::Number { argument: "high", expected: "greater than low", got: high as f64 };
            return Err(Error::op("randint", why, loc));
        }
        let (shape, device) = (shape.into(), options.device());
        let op = Op::Rand { shape: shape.clone(), dtype: DType::F64, device };
        let unit = Tensor::random(op, &[], &shape, DType::F64, loc)?;
        // A sum that wraps is the right one: the offsets of high and low differ by less than 2⁶⁴.
        let range = high.wrapping_sub(low) as u64;
        if range <= 1 << 32 {
            let drawn = unit.mul(range as f64)?.to_dtype(DType::I64)?.add(low)?;
            return drawn.to_dtype(options.dtype_or(DType::I64));
        }
        // 53 bits of a float are too few: two halves of 32, the upper one without its first bit where that is
        // enough, since integers have a sign.
        let halves = |unit: &Tensor, bits: u32| unit.mul((1u64 << bits) as f64)?.to_dtype(DType::I64);
        let op = Op::Rand { shape: shape.clone(), dtype: DType::F64, device };
        let other = Tensor::random(op, &[], &shape, DType::F64, loc)?;
        let upper = if range <= 1 << 63 { 31 } else { 32 };
        let word = halves(&other, upper)?.mul(1i64 << 32)?.add(&halves(&unit, 32)?)?;
        let offset = match i64::try_from(range) {
            Ok(range) => word.remainder(range)?,
            Err(_) if range == 1 << 63 => word,
            // Below the range, as numbers without a sign, or once beyond it.
            Err(_) => {
                let below = word.add(i64::MIN)?.lt((range as i64).wrapping_add(i64::MIN))?;
                below.where_self(&word, &word.sub(range as i64)?)?
            }
        };
        offset.add(low)?.to_dtype(options.dtype_or(DType::I64))
    }

    /// The integers `0..n` in random order, i64.
    #[track_caller]
    pub fn randperm(n: usize, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let (loc, options) = (Loc::caller(), options.into());
        // Drawn by the host, which runs on every call of compiled code too.
        let mut order: Vec<i64> = reserve(n, "randperm", loc)?;
        let (seed, offset) = random::advance(n, DType::F64);
        order.extend(0..n as i64);
        // A draw is two numbers, for i odd and the even one before it.
        let mut words = [0; 4];
        for i in (1..n).rev() {
            let half = 2 * (i % 2);
            if half == 2 || i + 1 == n {
                words = kiln_runtime::random::philox(offset.wrapping_add(i as u64 / 2), seed);
            }
            let bits = u64::from(words[half]) << 32 | u64::from(words[half + 1]);
            order.swap(i, ((u128::from(bits) * (i as u128 + 1)) >> 64) as usize);
        }
        let order = Tensor::from_data(&order, Shape::from(n), loc)?;
        device::placed(order, options.device(), "randperm", loc)?.to_dtype(options.dtype_or(DType::I64))
    }

    /// 1 with the probability that each element of this (float) tensor says, else 0.
    #[track_caller]
    pub fn bernoulli(&self) -> Result<Tensor> {
        let (loc, ty) = (Loc::caller(), self.ty());
        let op = Op::Rand { shape: ty.shape.clone(), dtype: ty.dtype, device: ty.device };
        let unit = Tensor::random(op, &[], &ty.shape, ty.dtype, loc).map_err(|e| e.named("bernoulli"))?;
        let hit = dispatch_tensor(&Op::Lt {}, &[Arg::Tensor(&unit), Arg::Tensor(self)], false, loc)?;
        hit.unary(Op::To { dtype: ty.dtype }, loc)
    }

    /// Every element becomes 1 with this probability, else 0.
    #[track_caller]
    pub fn bernoulli_(&self, probability: f64) -> Result<&Tensor> {
        let (loc, ty) = (Loc::caller(), self.ty());
        if !(0.0..=1.0).contains(&probability) {
            let why = Why::Number { argument: "probability", expected: "between 0 and 1", got: probability };
            return Err(Error::op("bernoulli_", why, loc));
        }
        let op = Op::Rand { shape: ty.shape.clone(), dtype: DType::F32, device: ty.device };
        let unit = Tensor::random(op, &[], &ty.shape, DType::F32, loc)?;
        let hit =
            dispatch_tensor(&Op::Lt {}, &[Arg::Tensor(&unit), Arg::Number(probability.into())], false, loc)?;
        dispatch_tensor(&Op::Copy {}, &[Arg::Tensor(self), Arg::Tensor(&hit)], true, loc)?;
        Ok(self)
    }

    /// Uniform random numbers in [0, 1), of this tensor's type.
    #[track_caller]
    pub fn rand_like(&self) -> Result<Tensor> {
        let ty = self.ty();
        let op = Op::Rand { shape: ty.shape.clone(), dtype: ty.dtype, device: ty.device };
        Tensor::random(op, &[], &ty.shape, ty.dtype, Loc::caller())
    }

    /// Standard normal random numbers, of this tensor's type.
    #[track_caller]
    pub fn randn_like(&self) -> Result<Tensor> {
        let ty = self.ty();
        let op = Op::Randn { shape: ty.shape.clone(), dtype: ty.dtype, device: ty.device };
        Tensor::random(op, &[], &ty.shape, ty.dtype, Loc::caller())
    }

    /// A 1-d tensor of these elements.
    #[track_caller]
    pub fn from_slice<T: Element>(data: &[T]) -> Result<Tensor> {
        Tensor::from_data(data, Shape::from(data.len()), Loc::caller())
    }

    /// A tensor of these elements, in row-major order.
    #[track_caller]
    pub fn from_vec<T: Element>(data: Vec<T>, shape: impl Into<Shape>) -> Result<Tensor> {
        Tensor::from_data(&data, shape.into(), Loc::caller())
    }

    fn from_data<T: Element>(data: &[T], shape: Shape, loc: Loc) -> Result<Tensor> {
        if shape.checked_numel() != Some(data.len()) {
            return Err(Error::op("from_vec", Why::Numel { from: Shape::from(data.len()), to: shape }, loc));
        }
        check_rank(&shape, "from_vec", loc)?;
        let ready = allocate(&TensorTy::new(T::DTYPE, shape), "from_vec", loc)?;
        // SAFETY: the memory is fresh, dense, as long as `data`, and of its element type.
        unsafe { T::write(data, ready.storage.pointer()) };
        Ok(Tensor::from_ready(ready))
    }
}

/// A 1-d tensor of these elements.
///
/// ```
/// # use kiln_tensor::Tensor;
/// # fn main() -> kiln_tensor::Result<()> {
/// let x = Tensor::from(vec![1i64, 2, 3]);
/// assert_eq!(x.to_vec::<i64>()?, [1, 2, 3]);
/// let y: Tensor = [0.5f32, 1.5].into();
/// assert_eq!(y.dims1()?, 2);
/// # Ok(()) }
/// ```
///
/// # Panics
/// As `Vec` itself does: if there is no memory for a second copy. [`Tensor::from_slice`] returns an error.
impl<T: Element> From<Vec<T>> for Tensor {
    #[track_caller]
    fn from(data: Vec<T>) -> Tensor {
        Tensor::from(&data[..])
    }
}
impl<T: Element, const N: usize> From<[T; N]> for Tensor {
    #[track_caller]
    fn from(data: [T; N]) -> Tensor {
        Tensor::from(&data[..])
    }
}
impl<T: Element> From<&[T]> for Tensor {
    #[track_caller]
    fn from(data: &[T]) -> Tensor {
        match Tensor::from_slice(data) {
            Ok(tensor) => tensor,
            Err(error) => panic!("{error}"),
        }
    }
}
