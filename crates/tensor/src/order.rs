//! Methods: reductions beyond sum, mean and amax; extrema with positions; sorting; scans.
//!
//! What PyTorch returns as values and indices is made of a row that finds the indices and a gather.

use kiln_ir::{DType, Dims, Loc, Op, Result, Scalar, Shape};

use crate::dispatch::dispatch_tensor;
use crate::hook::{self, Arg};
use crate::kernels;
use crate::methods::{normalise_dim, reduced_dims};
use crate::{Element, IntoDims, Tensor};

/// The distinct elements of a tensor.
#[derive(Clone, Debug)]
pub struct Unique {
    /// The distinct elements in order, one-dimensional.
    pub values: Tensor,
    /// For each element of the tensor, where it is among the values (i64, the tensor's shape).
    pub inverse: Tensor,
    /// How often each value occurs (i64).
    pub counts: Tensor,
}

macro_rules! reductions {
    ($($(#[doc = $all_doc:literal])* $all:ident, $(#[doc = $dim_doc:literal])* $by_dim:ident => $Variant:ident;)*) => {
        impl Tensor {$(
            $(#[doc = $all_doc])*
            #[track_caller]
            pub fn $all(&self) -> Result<Tensor> {
                self.unary(Op::$Variant { dims: Dims::all(self.rank()), keepdim: false }, Loc::caller())
            }

            $(#[doc = $dim_doc])*
            #[track_caller]
            pub fn $by_dim(&self, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
                let loc = Loc::caller();
                let dims = reduced_dims(stringify!($all), dims, self.rank(), loc)?;
                self.unary(Op::$Variant { dims, keepdim }, loc)
            }
        )*}
    };
}

reductions! {
    /// The smallest element.
    amin,
    /// The smallest elements over dims.
    amin_dim => Amin;
    /// Whether any element is not zero.
    any,
    /// Whether any element over dims is not zero.
    any_dim => Any;
    /// Whether all elements are not zero.
    all,
    /// Whether all elements over dims are not zero.
    all_dim => All;
    /// The product of all elements.
    prod,
    /// Products over dims.
    prod_dim => Prod;
    /// The sum of all elements that are numbers.
    nansum,
    /// Sums over dims of the elements that are numbers.
    nansum_dim => Nansum;
    /// log Σ exp(x) of all elements.
    logsumexp_all,
    /// log Σ exp(x) over dims.
    logsumexp => Logsumexp;
}

impl Tensor {
    /// How many elements are not zero.
    #[track_caller]
    pub fn count_nonzero(&self) -> Result<Tensor> {
        self.unary(Op::CountNonzero { dims: Dims::all(self.rank()) }, Loc::caller())
    }

    /// How many elements over dims are not zero.
    #[track_caller]
    pub fn count_nonzero_dim(&self, dims: impl IntoDims) -> Result<Tensor> {
        let loc = Loc::caller();
        self.unary(Op::CountNonzero { dims: reduced_dims("count_nonzero", dims, self.rank(), loc)? }, loc)
    }

    /// The variance of all elements, divided by n − 1.
    #[track_caller]
    pub fn var(&self) -> Result<Tensor> {
        self.unary(Op::Var { dims: Dims::all(self.rank()), correction: 1, keepdim: false }, Loc::caller())
    }

    /// Variances over dims, divided by n − `correction`.
    #[track_caller]
    pub fn var_dim(&self, dims: impl IntoDims, correction: i64, keepdim: bool) -> Result<Tensor> {
        let loc = Loc::caller();
        let dims = reduced_dims("var", dims, self.rank(), loc)?;
        self.unary(Op::Var { dims, correction, keepdim }, loc)
    }

    /// The standard deviation of all elements, the root of [`var`](Tensor::var).
    #[track_caller]
    pub fn std(&self) -> Result<Tensor> {
        self.unary(Op::Std { dims: Dims::all(self.rank()), correction: 1, keepdim: false }, Loc::caller())
    }

    /// Standard deviations over dims.
    #[track_caller]
    pub fn std_dim(&self, dims: impl IntoDims, correction: i64, keepdim: bool) -> Result<Tensor> {
        let loc = Loc::caller();
        let dims = reduced_dims("std", dims, self.rank(), loc)?;
        self.unary(Op::Std { dims, correction, keepdim }, loc)
    }

    /// Variances and means over dims.
    #[track_caller]
    pub fn var_mean(&self, dims: impl IntoDims, correction: i64, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let loc = Loc::caller();
        let dims = reduced_dims("var_mean", dims, self.rank(), loc)?;
        let var = self.unary(Op::Var { dims: dims.clone(), correction, keepdim }, loc)?;
        Ok((var, self.unary(Op::Mean { dims, keepdim }, loc)?))
    }

    /// The vector norm of all elements: (Σ |x|^ord)^(1/ord).
    #[track_caller]
    pub fn norm(&self, ord: impl Into<Scalar>) -> Result<Tensor> {
        let dims = Dims::all(self.rank());
        self.unary(Op::LinalgVectorNorm { ord: ord.into(), dims, keepdim: false }, Loc::caller())
    }

    /// Vector norms over dims.
    #[track_caller]
    pub fn norm_dim(&self, ord: impl Into<Scalar>, dims: impl IntoDims, keepdim: bool) -> Result<Tensor> {
        let loc = Loc::caller();
        let dims = reduced_dims("linalg_vector_norm", dims, self.rank(), loc)?;
        self.unary(Op::LinalgVectorNorm { ord: ord.into(), dims, keepdim }, loc)
    }

    /// The smallest and the largest elements over dims.
    #[track_caller]
    pub fn aminmax(&self, dims: impl IntoDims, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let loc = Loc::caller();
        let dims = reduced_dims("aminmax", dims, self.rank(), loc)?;
        let least = self.unary(Op::Amin { dims: dims.clone(), keepdim }, loc)?;
        Ok((least, self.unary(Op::Amax { dims, keepdim }, loc)?))
    }

    /// All elements in one dim.
    /// As numbers, whose places can be compared: truth values are 0 and 1.
    fn ranked(&self) -> Result<Tensor> {
        if self.dtype() == DType::Bool { self.to_dtype(DType::U8) } else { Ok(self.clone()) }
    }

    fn flat(&self, loc: Loc) -> Result<Tensor> {
        self.unary(Op::Reshape { shape: Shape::from([self.numel()]) }, loc)
    }

    /// The position of the largest element in row-major order, the first of several; NaN is the largest.
    #[track_caller]
    pub fn argmax(&self) -> Result<Tensor> {
        let loc = Loc::caller();
        self.flat(loc)?.unary(Op::Argmax { dim: 0, keepdim: false }, loc)
    }

    /// The positions of the largest elements along a dim.
    #[track_caller]
    pub fn argmax_dim(&self, dim: i64, keepdim: bool) -> Result<Tensor> {
        let loc = Loc::caller();
        self.unary(Op::Argmax { dim: normalise_dim("argmax", dim, self.rank(), loc)?, keepdim }, loc)
    }

    /// The position of the smallest element in row-major order, the first of several; NaN is the smallest.
    #[track_caller]
    pub fn argmin(&self) -> Result<Tensor> {
        let loc = Loc::caller();
        self.flat(loc)?.unary(Op::Argmin { dim: 0, keepdim: false }, loc)
    }

    /// The positions of the smallest elements along a dim.
    #[track_caller]
    pub fn argmin_dim(&self, dim: i64, keepdim: bool) -> Result<Tensor> {
        let loc = Loc::caller();
        self.unary(Op::Argmin { dim: normalise_dim("argmin", dim, self.rank(), loc)?, keepdim }, loc)
    }

    /// The elements at positions along a dim, and the positions; the dim goes unless it is kept.
    fn picked(&self, dim: usize, positions: Tensor, keepdim: bool, loc: Loc) -> Result<(Tensor, Tensor)> {
        if self.rank() == 0 {
            return Ok((self.unary(Op::Clone {}, loc)?, positions));
        }
        let args = [Arg::Tensor(self), Arg::Tensor(&positions)];
        let values = dispatch_tensor(&Op::Gather { dim }, &args, false, loc)?;
        if keepdim {
            return Ok((values, positions));
        }
        let shape = self.shape().reduced(&Dims::from(dim), false);
        let values = values.unary(Op::Reshape { shape: shape.clone() }, loc)?;
        Ok((values, positions.unary(Op::Reshape { shape }, loc)?))
    }

    /// The largest element; a gradient is shared between several.
    #[track_caller]
    pub fn max(&self) -> Result<Tensor> {
        let op = Op::Amax { dims: Dims::all(self.rank()), keepdim: false };
        self.unary(op, Loc::caller()).map_err(|e| e.named("max"))
    }

    /// The largest elements along a dim and their positions.
    #[track_caller]
    pub fn max_dim(&self, dim: i64, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let loc = Loc::caller();
        let dim = normalise_dim("max", dim, self.rank(), loc)?;
        let at = self.ranked()?.unary(Op::Argmax { dim, keepdim: true }, loc).map_err(|e| e.named("max"))?;
        self.picked(dim, at, keepdim, loc)
    }

    /// The smallest element; a gradient is shared between several.
    #[track_caller]
    pub fn min(&self) -> Result<Tensor> {
        let op = Op::Amin { dims: Dims::all(self.rank()), keepdim: false };
        self.unary(op, Loc::caller()).map_err(|e| e.named("min"))
    }

    /// The smallest elements along a dim and their positions.
    #[track_caller]
    pub fn min_dim(&self, dim: i64, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let loc = Loc::caller();
        let dim = normalise_dim("min", dim, self.rank(), loc)?;
        let at = self.ranked()?.unary(Op::Argmin { dim, keepdim: true }, loc).map_err(|e| e.named("min"))?;
        self.picked(dim, at, keepdim, loc)
    }

    /// The median of all elements, the lower of two; NaN if there is one.
    #[track_caller]
    pub fn median(&self) -> Result<Tensor> {
        let loc = Loc::caller();
        let flat = self.flat(loc)?;
        let at = flat.unary(Op::MedianIndex { dim: 0, keepdim: true }, loc).map_err(|e| e.named("median"))?;
        let (value, _) = flat.detach()?.picked(0, at, false, loc)?;
        // Elements that are equal share the gradient.
        let hit = flat.eq(&value)?.maximum(&flat.isnan()?.logical_and(&value.isnan()?)?)?;
        let others = Scalar::Float(f64::NEG_INFINITY);
        if flat.dtype().is_float() { hit.where_self(&flat, others)?.max() } else { Ok(value) }
    }

    /// The medians along a dim and their positions.
    #[track_caller]
    pub fn median_dim(&self, dim: i64, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let loc = Loc::caller();
        let dim = normalise_dim("median", dim, self.rank(), loc)?;
        let at = self.unary(Op::MedianIndex { dim, keepdim: true }, loc).map_err(|e| e.named("median"))?;
        self.picked(dim, at, keepdim, loc)
    }

    /// The order that sorts a dim; equal elements stay in order, NaN is the largest.
    #[track_caller]
    pub fn argsort(&self, dim: i64, descending: bool) -> Result<Tensor> {
        let loc = Loc::caller();
        self.unary(Op::Argsort { dim: normalise_dim("argsort", dim, self.rank(), loc)?, descending }, loc)
    }

    /// The elements of a dim in order, and where they were; equal elements stay in order.
    #[track_caller]
    pub fn sort(&self, dim: i64, descending: bool) -> Result<(Tensor, Tensor)> {
        let loc = Loc::caller();
        let dim = normalise_dim("sort", dim, self.rank(), loc)?;
        let at = self.unary(Op::Argsort { dim, descending }, loc).map_err(|e| e.named("sort"))?;
        self.picked(dim, at, true, loc)
    }

    /// The `k` largest (or smallest) elements of a dim in order, and where they were.
    #[track_caller]
    pub fn topk(&self, k: usize, dim: i64, largest: bool) -> Result<(Tensor, Tensor)> {
        let loc = Loc::caller();
        let dim = normalise_dim("topk", dim, self.rank(), loc)?;
        let at = self.unary(Op::TopkIndex { k, dim, largest }, loc).map_err(|e| e.named("topk"))?;
        self.picked(dim, at, true, loc)
    }

    /// The largest elements of a dim up to each, and where they are; NaN is the largest.
    #[track_caller]
    pub fn cummax(&self, dim: i64) -> Result<(Tensor, Tensor)> {
        let loc = Loc::caller();
        let dim = normalise_dim("cummax", dim, self.rank(), loc)?;
        let at = self.unary(Op::CummaxIndex { dim }, loc).map_err(|e| e.named("cummax"))?;
        self.picked(dim, at, true, loc)
    }

    /// The smallest elements of a dim up to each, and where they are; NaN is the smallest.
    #[track_caller]
    pub fn cummin(&self, dim: i64) -> Result<(Tensor, Tensor)> {
        let loc = Loc::caller();
        let dim = normalise_dim("cummin", dim, self.rank(), loc)?;
        let at = self.unary(Op::CumminIndex { dim }, loc).map_err(|e| e.named("cummin"))?;
        self.picked(dim, at, true, loc)
    }

    /// Sums of all elements of a dim up to each.
    #[track_caller]
    pub fn cumsum(&self, dim: i64) -> Result<Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("cumsum", dim, self.rank(), loc)?;
        self.unary(Op::Cumsum { dim, reverse: false }, loc)
    }

    /// Products of all elements of a dim up to each.
    #[track_caller]
    pub fn cumprod(&self, dim: i64) -> Result<Tensor> {
        let loc = Loc::caller();
        self.unary(Op::Cumprod { dim: normalise_dim("cumprod", dim, self.rank(), loc)? }, loc)
    }

    /// log Σ exp of all elements of a dim up to each.
    #[track_caller]
    pub fn logcumsumexp(&self, dim: i64) -> Result<Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("logcumsumexp", dim, self.rank(), loc)?;
        self.unary(Op::Logcumsumexp { dim, reverse: false }, loc)
    }

    /// The distinct elements in order. How many there are depends on the values, so this reads them.
    #[track_caller]
    pub fn unique(&self) -> Result<Unique> {
        let loc = Loc::caller();
        match self.dtype() {
            DType::F32 => self.unique_of::<f32>(loc),
            DType::F64 => self.unique_of::<f64>(loc),
            DType::I64 => self.unique_of::<i64>(loc),
            DType::Bool => self.unique_of::<bool>(loc),
            narrow => {
                let wide = self.to_dtype(narrow.computing())?.unique()?;
                Ok(Unique { values: wide.values.to_dtype(narrow)?, ..wide })
            }
        }
    }

    fn unique_of<T: Element>(&self, loc: Loc) -> Result<Unique> {
        let data = crate::host::read::<T>(self, "unique", loc)?;
        let _eager = hook::Scope::suspend();
        // SAFETY: the elements of the vector, which are of T's dtype.
        let found = unsafe { kernels::distinct(T::DTYPE, data.as_ptr().cast(), data.len()) };
        let values: Vec<T> = found.firsts.iter().map(|&at| data[at]).collect();
        let len = values.len();
        Ok(Unique {
            values: Tensor::from_vec(values, [len])?,
            inverse: Tensor::from_vec(found.inverse, self.shape())?,
            counts: Tensor::from_vec(found.counts, [len])?,
        })
    }
}
