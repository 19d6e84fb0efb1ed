//! The methods of [`Tensor`]: those of pointwise rows are made from the op table, the others take their
//! attributes in the form users write them (negative dims, one dim or several).

use kiln_ir::{Approximate, DType, Dims, Error, Loc, Op, Reduction, Result, Scalar, Shape, Ty, Why};
use smallvec::SmallVec;

use crate::dispatch::{dispatch_in_place, dispatch_tensor};
use crate::hook::Arg;
use crate::{CrossEntropy, IntoDims, IntoShape, Tensor, TensorList, TensorOptions, device};

/// The second operand of an op: a tensor or a number.
pub enum Operand<'a> {
    /// A tensor.
    Tensor(&'a Tensor),
    /// A number.
    Number(Scalar),
}

impl<'a> Operand<'a> {
    pub(crate) fn arg(&self) -> Arg<'_> {
        match self {
            Operand::Tensor(t) => Arg::Tensor(t),
            Operand::Number(x) => Arg::Number(*x),
        }
    }
}

impl<'a> From<&'a Tensor> for Operand<'a> {
    fn from(t: &'a Tensor) -> Operand<'a> {
        Operand::Tensor(t)
    }
}

impl<T: Into<Scalar>> From<T> for Operand<'_> {
    fn from(x: T) -> Self {
        Operand::Number(x.into())
    }
}

/// A dim in `0..rank` from one that may be negative. A 0-d tensor has dim 0 and −1, like PyTorch's.
pub(crate) fn normalise_dim(op: &str, dim: i64, rank: usize, loc: Loc) -> Result<usize> {
    let count = rank.max(1) as i64;
    match dim {
        d if (0..count).contains(&d) => Ok(d as usize),
        d if (-count..0).contains(&d) => Ok((d + count) as usize),
        _ => Err(Error::op(op, Why::Dim { dim, rank }, loc)),
    }
}

pub(crate) fn normalise_dims(op: &str, dims: impl IntoDims, rank: usize, loc: Loc) -> Result<Dims> {
    let mut all = Dims::default();
    for dim in dims.into_dims() {
        let dim = normalise_dim(op, dim, rank, loc)?;
        if rank > 0 {
            all.push(dim);
        }
    }
    Ok(all)
}

/// Dims of a reduction, in order.
pub(crate) fn reduced_dims(op: &str, dims: impl IntoDims, rank: usize, loc: Loc) -> Result<Dims> {
    let mut dims = normalise_dims(op, dims, rank, loc)?;
    dims.sort_unstable();
    Ok(dims)
}

impl Tensor {
    pub(crate) fn unary(&self, op: Op, loc: Loc) -> Result<Tensor> {
        dispatch_tensor(&op, &[Arg::Tensor(self)], false, loc)
    }

    /// Why a method refuses this tensor, where it finds out before there is an op.
    pub(crate) fn refusal(&self, method: &str, why: Why, loc: Loc) -> Error {
        Op::Detach {}.error(&[self.ty().into()], why, loc).named(method)
    }
}

macro_rules! define_methods {
    ($( $(#[doc = $doc:literal])*
        [$class:ident $method:ident $inplace:ident] $name:literal $Variant:ident
        ($first:tt $($rest:tt)*) ($($optional:ident),*) { $($attr:ident : $AttrTy:ty),* } $body:tt;
    )*) => {
        $( method! { $(#[doc = $doc])* [$class $method $inplace] $Variant ($first $($rest)*) } )*
    };
    ($($rest:tt)*) => { compile_rows! { $($rest)* } };
}
/// Rows with no operands at all (`constant`) don't fit the pattern above; they have no method.
macro_rules! compile_rows {
    ($( $(#[doc = $doc:literal])*
        [$class:ident $method:ident $inplace:ident] $name:literal $Variant:ident
        ($($arg:ident),*) ($($optional:ident),*) { $($attr:ident : $AttrTy:ty),* } $body:tt;
    )*) => {
        $( method! { $(#[doc = $doc])* [$class $method $inplace] $Variant ($($arg),*) } )*
    };
}
macro_rules! method {
    ($(#[doc = $doc:literal])* [pointwise $method:ident $inplace:ident] $Variant:ident ($x:ident $(, $arg:ident)*)) => {
        impl Tensor {
            $(#[doc = $doc])*
            #[track_caller]
            #[allow(clippy::extra_unused_lifetimes, reason = "ops of one operand have none to borrow")]
            pub fn $method<'a>(&self $(, $arg: impl Into<Operand<'a>>)*) -> Result<Tensor> {
                $(let $arg = $arg.into();)*
                dispatch_tensor(&Op::$Variant {}, &[Arg::Tensor(self) $(, $arg.arg())*], false, Loc::caller())
            }

            $(#[doc = $doc])*
            ///
            /// In place.
            #[track_caller]
            #[allow(clippy::extra_unused_lifetimes, reason = "as above")]
            pub fn $inplace<'a>(&self $(, $arg: impl Into<Operand<'a>>)*) -> Result<&Tensor> {
                $(let $arg = $arg.into();)*
                dispatch_in_place(&Op::$Variant {}, &[Arg::Tensor(self) $(, $arg.arg())*], Loc::caller())?;
                Ok(self)
            }
        }
    };
    ($($other:tt)*) => {};
}
kiln_ir::op_table!(define_methods);

impl Tensor {
    /// x + alpha · y
    #[track_caller]
    pub fn add_scaled<'a>(&self, y: impl Into<Operand<'a>>, alpha: impl Into<Scalar>) -> Result<Tensor> {
        dispatch_tensor(
            &Op::Add {},
            &[Arg::Tensor(self), y.into().arg(), Arg::Number(alpha.into())],
            false,
            Loc::caller(),
        )
    }

    /// x + alpha · y, in place.
    #[track_caller]
    pub fn add_scaled_<'a>(&self, y: impl Into<Operand<'a>>, alpha: impl Into<Scalar>) -> Result<&Tensor> {
        dispatch_in_place(
            &Op::Add {},
            &[Arg::Tensor(self), y.into().arg(), Arg::Number(alpha.into())],
            Loc::caller(),
        )?;
        Ok(self)
    }

    /// Gaussian error linear unit, exact form.
    #[track_caller]
    pub fn gelu(&self) -> Result<Tensor> {
        self.unary(Op::Gelu { approximate: Approximate::None }, Loc::caller())
    }

    /// Gaussian error linear unit, approximated with tanh.
    #[track_caller]
    pub fn gelu_tanh(&self) -> Result<Tensor> {
        self.unary(Op::Gelu { approximate: Approximate::Tanh }, Loc::caller())
    }

    /// `x` where this bool tensor is true, else `y`.
    #[track_caller]
    pub fn where_self<'a>(&self, x: impl Into<Operand<'a>>, y: impl Into<Operand<'a>>) -> Result<Tensor> {
        dispatch_tensor(
            &Op::Where {},
            &[Arg::Tensor(self), x.into().arg(), y.into().arg()],
            false,
            Loc::caller(),
        )
    }

    /// As another dtype, on another device, or both: `x.to(DType::F16)?`, `x.to(&device)?`, `x.to(&other)?`. The tensor
    /// itself if nothing changes.
    ///
    /// ```
    /// # use kiln_tensor::{DType, Device, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let x = Tensor::from_slice(&[1.5f32, 2.0])?;
    /// assert_eq!(x.to((DType::I64, &Device::Cpu))?.to_vec::<i64>()?, [1, 2]);
    /// assert!(x.to(&Device::Cpu)?.same(&x));
    /// assert!(x.to(&Device::Cuda(0)).unwrap_err().to_string().contains("cuda:0 is not available"));
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn to(&self, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let options = options.into();
        let own = self.ty();
        match options.device {
            // Converted where it is narrower: less is copied.
            Some(device) if device != own.device => match options.dtype {
                Some(dtype) if dtype.size() < own.dtype.size() => {
                    device::transfer(&self.to_dtype(dtype)?, device, Loc::caller())
                }
                dtype => device::transfer(self, device, Loc::caller())?.to_dtype(dtype.unwrap_or(own.dtype)),
            },
            _ => self.to_dtype(options.dtype_or(own.dtype)),
        }
    }

    /// Converted to another dtype; the tensor itself if it has it already.
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<Tensor> {
        if self.dtype() == dtype { Ok(self.clone()) } else { self.unary(Op::To { dtype }, Loc::caller()) }
    }

    /// Takes the values of `src`, converted and broadcast.
    #[track_caller]
    pub fn copy_<'a>(&self, src: impl Into<Operand<'a>>) -> Result<&Tensor> {
        dispatch_in_place(&Op::Copy {}, &[Arg::Tensor(self), src.into().arg()], Loc::caller())?;
        Ok(self)
    }

    /// Every element becomes `value`.
    #[track_caller]
    pub fn fill_(&self, value: impl Into<Scalar>) -> Result<&Tensor> {
        dispatch_in_place(&Op::Copy {}, &[Arg::Tensor(self), Arg::Number(value.into())], Loc::caller())?;
        Ok(self)
    }

    /// Every element becomes zero.
    #[track_caller]
    pub fn zero_(&self) -> Result<&Tensor> {
        dispatch_in_place(&Op::Copy {}, &[Arg::Tensor(self), Arg::Number(Scalar::Int(0))], Loc::caller())?;
        Ok(self)
    }

    /// The sum of all elements.
    #[track_caller]
    pub fn sum(&self) -> Result<Tensor> {
        self.unary(Op::Sum { dims: Dims::all(self.rank()), keepdim: false }, Loc::caller())
    }

    /// Sums over dims.
    #[track_caller]
    pub fn sum_dim(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        let loc = Loc::caller();
        self.unary(Op::Sum { dims: reduced_dims("sum", dims, self.rank(), loc)?, keepdim }, loc)
    }

    /// The mean of all elements.
    #[track_caller]
    pub fn mean(&self) -> Result<Tensor> {
        self.unary(Op::Mean { dims: Dims::all(self.rank()), keepdim: false }, Loc::caller())
    }

    /// Means over dims.
    #[track_caller]
    pub fn mean_dim(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        let loc = Loc::caller();
        self.unary(Op::Mean { dims: reduced_dims("mean", dims, self.rank(), loc)?, keepdim }, loc)
    }

    /// The largest element.
    #[track_caller]
    pub fn amax(&self) -> Result<Tensor> {
        self.unary(Op::Amax { dims: Dims::all(self.rank()), keepdim: false }, Loc::caller())
    }

    /// The largest elements over dims.
    #[track_caller]
    pub fn amax_dim(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        let loc = Loc::caller();
        self.unary(Op::Amax { dims: reduced_dims("amax", dims, self.rank(), loc)?, keepdim }, loc)
    }

    /// exp(x) / Σ exp(x) along a dim.
    #[track_caller]
    pub fn softmax(&self, dim: i64) -> Result<Tensor> {
        let loc = Loc::caller();
        self.unary(Op::Softmax { dim: normalise_dim("softmax", dim, self.rank(), loc)? }, loc)
    }

    /// x − log Σ exp(x) along a dim.
    #[track_caller]
    pub fn log_softmax(&self, dim: i64) -> Result<Tensor> {
        let loc = Loc::caller();
        self.unary(Op::LogSoftmax { dim: normalise_dim("log_softmax", dim, self.rank(), loc)? }, loc)
    }

    /// Matrix product of two matrices.
    #[track_caller]
    pub fn mm(&self, other: &Tensor) -> Result<Tensor> {
        dispatch_tensor(&Op::Mm {}, &[Arg::Tensor(self), Arg::Tensor(other)], false, Loc::caller())
    }

    /// This tensor + x · y.
    #[track_caller]
    pub fn addmm(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        dispatch_tensor(
            &Op::Addmm {},
            &[Arg::Tensor(self), Arg::Tensor(x), Arg::Tensor(y)],
            false,
            Loc::caller(),
        )
    }

    /// x · weightᵀ + bias, over the last dim. A weight of one dim is one row, and the last dim goes away.
    #[track_caller]
    pub fn linear(&self, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let loc = Loc::caller();
        if weight.rank() == 1 {
            let product = self.matmul(weight).map_err(|e| e.named("linear"))?;
            return bias.map_or_else(|| Ok(product.clone()), |bias| product.add(bias));
        }
        match bias {
            None => dispatch_tensor(&Op::Linear {}, &[Arg::Tensor(self), Arg::Tensor(weight)], false, loc),
            Some(bias) => {
                let args = [Arg::Tensor(self), Arg::Tensor(weight), Arg::Tensor(bias)];
                dispatch_tensor(&Op::Linear {}, &args, false, loc)
            }
        }
    }

    /// The same elements in another shape; one size may be −1. A view where the elements lie together.
    #[track_caller]
    pub fn reshape(&self, shape: impl IntoShape) -> Result<Tensor> {
        let loc = Loc::caller();
        let shape = fill_in(&self.shape(), &shape.into_sizes(), loc)?;
        self.unary(Op::Reshape { shape }, loc)
    }

    /// Dims in another order, as a view.
    #[track_caller]
    pub fn permute(&self, dims: impl IntoDims) -> Result<Tensor> {
        let loc = Loc::caller();
        self.unary(Op::Permute { dims: normalise_dims("permute", dims, self.rank(), loc)? }, loc)
    }

    /// Two dims swapped, as a view.
    #[track_caller]
    pub fn transpose(&self, dim0: i64, dim1: i64) -> Result<Tensor> {
        let (loc, rank) = (Loc::caller(), self.rank());
        let (dim0, dim1) =
            (normalise_dim("transpose", dim0, rank, loc)?, normalise_dim("transpose", dim1, rank, loc)?);
        if rank == 0 {
            return Ok(self.clone());
        }
        self.unary(Op::Transpose { dim0, dim1 }, loc)
    }

    /// A matrix transposed, as a view; fewer dims are left as they are.
    #[track_caller]
    pub fn t(&self) -> Result<Tensor> {
        let loc = Loc::caller();
        match self.rank() {
            0 | 1 => Ok(self.clone()),
            2 => self.unary(Op::Transpose { dim0: 0, dim1: 1 }, loc),
            got => {
                let why = Why::Rank { argument: "x", expected: "2 or fewer", got };
                Err(Op::Transpose { dim0: 0, dim1: 1 }.error(&[self.ty().into()], why, loc).named("t"))
            }
        }
    }

    /// Dims of size 1 repeated, new leading dims added, as a view. −1 keeps a size.
    #[track_caller]
    pub fn expand(&self, shape: impl IntoShape) -> Result<Tensor> {
        let (loc, own) = (Loc::caller(), self.shape());
        let sizes = shape.into_sizes();
        let lead = sizes.len() as i64 - own.rank() as i64;
        let shape = sizes
            .iter()
            .enumerate()
            .map(|(i, &size)| match size {
                -1 if i as i64 >= lead => Ok(own[(i as i64 - lead) as usize]),
                size if size >= 0 => Ok(size as usize),
                size => Err(Error::op(
                    "expand",
                    Why::Number { argument: "a size", expected: "0 or more", got: size as f64 },
                    loc,
                )),
            })
            .collect::<Result<Vec<usize>>>()?;
        self.unary(Op::Expand { shape: Shape::from(shape) }, loc)
    }

    /// Elements `start..end` of a dim in steps, as a view. Negative positions count from the end; positions
    /// beyond the end are cut off.
    #[track_caller]
    pub fn slice(&self, dim: i64, start: i64, end: i64, step: usize) -> Result<Tensor> {
        let loc = Loc::caller();
        let shape = self.shape();
        let dim = normalise_dim("slice", dim, shape.rank(), loc)?;
        let Some(&size) = shape.get(dim) else {
            return Err(Op::Slice { dim, start: 0, end: 0, step }.error(
                &[self.ty().into()],
                Why::Dim { dim: dim as i64, rank: 0 },
                loc,
            ));
        };
        let clamp =
            |i: i64| (if i < 0 { i.saturating_add(size as i64) } else { i }).clamp(0, size as i64) as usize;
        let (start, end) = (clamp(start), clamp(end));
        self.unary(Op::Slice { dim, start, end: end.max(start), step }, loc)
    }

    /// `length` elements of a dim from `start`, as a view.
    #[track_caller]
    pub fn narrow(&self, dim: i64, start: usize, length: usize) -> Result<Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("narrow", dim, self.rank(), loc)?;
        self.unary(Op::Slice { dim, start, end: start.saturating_add(length), step: 1 }, loc)
            .map_err(|e| e.named("narrow"))
    }

    /// One element of a dim, which goes away, as a view.
    #[track_caller]
    pub fn select(&self, dim: i64, index: i64) -> Result<Tensor> {
        let loc = Loc::caller();
        self.select_at(normalise_dim("select", dim, self.rank(), loc)?, index, loc)
    }

    pub(crate) fn select_at(&self, dim: usize, index: i64, loc: Loc) -> Result<Tensor> {
        let mut shape = self.shape();
        let size = shape.get(dim).copied().unwrap_or(0);
        let at = if index < 0 { index.saturating_add(size as i64) } else { index };
        if !(0..size as i64).contains(&at) {
            return Err(Op::Neg {}
                .error(&[self.ty().into()], Why::Index { index, size }, loc)
                .named("select"));
        }
        let row = self.unary(Op::Slice { dim, start: at as usize, end: at as usize + 1, step: 1 }, loc)?;
        shape.remove(dim);
        row.unary(Op::Reshape { shape }, loc)
    }

    /// A new dim of size 1, as a view.
    #[track_caller]
    pub fn unsqueeze(&self, dim: i64) -> Result<Tensor> {
        let loc = Loc::caller();
        let mut shape = self.shape();
        let dim = normalise_dim("unsqueeze", dim, shape.rank() + 1, loc)?;
        shape.insert(dim, 1);
        self.unary(Op::Reshape { shape }, loc)
    }

    /// Without a dim of size 1, as a view; a dim of another size stays.
    #[track_caller]
    pub fn squeeze(&self, dim: i64) -> Result<Tensor> {
        let loc = Loc::caller();
        let mut shape = self.shape();
        let dim = normalise_dim("squeeze", dim, shape.rank(), loc)?;
        if shape.get(dim) != Some(&1) {
            return Ok(self.clone());
        }
        shape.remove(dim);
        self.unary(Op::Reshape { shape }, loc)
    }

    /// All elements in one dim.
    #[track_caller]
    pub fn flatten(&self) -> Result<Tensor> {
        self.unary(Op::Reshape { shape: Shape::from(self.numel()) }, Loc::caller())
    }

    /// With row-major memory of its own, unless it has that already.
    #[track_caller]
    pub fn contiguous(&self) -> Result<Tensor> {
        let loc = Loc::caller();
        if self.is_contiguous()? { Ok(self.clone()) } else { self.unary(Op::Clone {}, loc) }
    }

    /// This tensor with the elements of a slice replaced by `src`.
    #[track_caller]
    pub fn slice_scatter(
        &self,
        src: &Tensor,
        dim: i64,
        start: usize,
        end: usize,
        step: usize,
    ) -> Result<Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("slice_scatter", dim, self.rank(), loc)?;
        let op = Op::SliceScatter { dim, start, end, step };
        dispatch_tensor(&op, &[Arg::Tensor(self), Arg::Tensor(src)], false, loc)
    }

    /// Tensors joined along a dim: a list of tensors or of references to them. Empty ones of one dim join with any,
    /// as in PyTorch: only their dtype counts.
    ///
    /// ```
    /// # use kiln_tensor::Tensor;
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let (a, b) = (Tensor::from(vec![1.0f32]), Tensor::from([2.0f32, 3.0]));
    /// assert_eq!(Tensor::cat(&[&a, &b], 0)?.to_vec::<f32>()?, [1.0, 2.0, 3.0]);
    /// let parts = vec![a, b];
    /// assert_eq!(Tensor::cat(&parts, 0)?.dims1()?, 3);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn cat<T: AsRef<Tensor>>(tensors: impl IntoIterator<Item = T>, dim: i64) -> Result<Tensor> {
        let loc = Loc::caller();
        let given: SmallVec<[T; 4]> = tensors.into_iter().collect();
        let mut tensors: SmallVec<[&Tensor; 4]> = given.iter().map(AsRef::as_ref).collect();
        let rank = tensors.iter().map(|t| t.rank()).find(|&rank| rank != 1);
        let rank = rank.unwrap_or(tensors.len().min(1));
        let mut dtype = None;
        if rank != 1 && tensors.iter().any(|t| t.rank() == 1 && t.numel() == 0) {
            let tys: Vec<Ty> = tensors.iter().map(|t| t.ty().into()).collect();
            dtype = Some(kiln_ir::result_dtype(&tys));
            tensors.retain(|t| t.rank() != 1 || t.numel() > 0);
        }
        let dim = normalise_dim("cat", dim, rank, loc)?;
        let args: SmallVec<[Arg<'_>; 4]> = tensors.iter().map(|t| Arg::Tensor(t)).collect();
        let joined = dispatch_tensor(&Op::Cat { dim }, &args, false, loc)?;
        dtype.map_or_else(|| Ok(joined.clone()), |dtype| joined.to_dtype(dtype))
    }

    /// Tensors of one shape joined along a new dim.
    #[track_caller]
    pub fn stack<T: AsRef<Tensor>>(tensors: impl IntoIterator<Item = T>, dim: i64) -> Result<Tensor> {
        let loc = Loc::caller();
        let mut rows = Vec::new();
        let mut at = 0;
        for t in tensors {
            let t = t.as_ref();
            let mut shape = t.shape();
            at = normalise_dim("stack", dim, shape.rank() + 1, loc)?;
            shape.insert(at, 1);
            rows.push(t.unary(Op::Reshape { shape }, loc)?);
        }
        let args: Vec<Arg<'_>> = rows.iter().map(Arg::Tensor).collect();
        dispatch_tensor(&Op::Cat { dim: at }, &args, false, loc).map_err(|e| e.named("stack"))
    }

    /// −x[i, target[i]], with PyTorch's `ignore_index` −100.
    #[track_caller]
    pub fn nll_loss(&self, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
        if self.rank() != 2 {
            return self.nll_loss_with(target, CrossEntropy { reduction, ..CrossEntropy::default() });
        }
        let op = Op::NllLoss { reduction, ignore_index: -100 };
        dispatch_tensor(&op, &[Arg::Tensor(self), Arg::Tensor(target)], false, Loc::caller())
    }

    /// The mean cross-entropy of these scores and class numbers, with PyTorch's `ignore_index` −100.
    #[track_caller]
    pub fn cross_entropy(&self, target: &Tensor) -> Result<Tensor> {
        self.cross_entropy_with(target, Reduction::Mean, -100)
    }

    /// Cross-entropy with all options.
    #[track_caller]
    pub fn cross_entropy_with(
        &self,
        target: &Tensor,
        reduction: Reduction,
        ignore_index: i64,
    ) -> Result<Tensor> {
        if self.rank() != 2 {
            let options = CrossEntropy { reduction, ignore_index, ..CrossEntropy::default() };
            return self.cross_entropy_of(target, options);
        }
        let op = Op::CrossEntropy { reduction, ignore_index };
        dispatch_tensor(&op, &[Arg::Tensor(self), Arg::Tensor(target)], false, Loc::caller())
    }

    /// A list of tensors as one operand, for [`crate::foreach`].
    pub fn list<T: AsRef<Tensor>>(tensors: impl IntoIterator<Item = T>) -> TensorList {
        tensors.into_iter().map(|t| t.as_ref().clone()).collect()
    }
}

/// A shape with its −1 worked out.
pub(crate) fn fill_in(from: &Shape, sizes: &[i64], loc: Loc) -> Result<Shape> {
    let mut shape: Shape = sizes.iter().map(|&n| n.max(0) as usize).collect();
    let holes: Vec<usize> = (0..sizes.len()).filter(|&i| sizes[i] == -1).collect();
    let fail = |why| {
        Err(Op::Reshape { shape: shape.clone() }.error(&[kiln_ir::Ty::tensor(DType::F32, from)], why, loc))
    };
    if let Some(&bad) = sizes.iter().find(|&&n| n < -1) {
        return fail(Why::Number { argument: "a size", expected: "-1 or more", got: bad as f64 });
    }
    match holes[..] {
        [] => {}
        [hole] => {
            let others = (0..sizes.len()).filter(|&i| i != hole);
            let known = others.fold(1usize, |known, i| known.saturating_mul(shape[i]));
            if known == 0 || !from.numel().is_multiple_of(known) {
                return fail(Why::Numel { from: from.clone(), to: shape.clone() });
            }
            shape[hole] = from.numel() / known;
        }
        _ => return fail(Why::Twice { what: "-1".into() }),
    }
    Ok(shape)
}
