//! Elements repeated and rolled along dims.

use kiln_ir::{Error, Loc, Op, Result, Shape, Why};

use super::{known_dim, number};
use crate::dispatch::dispatch_tensor;
use crate::hook::Arg;
use crate::host::reserve;
use crate::{IntoDims, Tensor};

impl Tensor {
    /// The whole tensor repeated this many times along each dim; more counts than dims add leading dims.
    #[track_caller]
    pub fn repeat(&self, counts: impl Into<Shape>) -> Result<Tensor> {
        let counts = counts.into();
        let (loc, own) = (Loc::caller(), self.shape());
        let Some(lead) = counts.len().checked_sub(own.rank()) else {
            let why = Why::sizes("the number of counts and of dims", counts.len(), own.rank());
            return Err(self.refusal("repeat", why, loc));
        };
        let sizes: Vec<usize> = vec![1; lead].into_iter().chain(own.iter().copied()).collect();
        if counts.iter().all(|&count| count == 1) {
            return self.reshaped(Shape::from(sizes), loc)?.unary(Op::Clone {}, loc);
        }
        // Each dim becomes two, the copies and their elements.
        let apart = sizes.iter().flat_map(|&size| [1, size]).collect();
        let wide = counts.iter().zip(&sizes).flat_map(|(&count, &size)| [count, size]).collect();
        let whole = counts.iter().zip(&sizes).map(|(&count, &size)| count.saturating_mul(size)).collect();
        self.repeated(apart, wide, whole, loc).map_err(|e| e.named("repeat"))
    }

    /// Expanded, then copied: a reshape alone would be a view where copies of one element lie side by side.
    fn repeated(&self, apart: Shape, wide: Shape, whole: Shape, loc: Loc) -> Result<Tensor> {
        let wide = self.reshaped(apart, loc)?.unary(Op::Expand { shape: wide }, loc)?;
        wide.unary(Op::Clone {}, loc)?.reshaped(whole, loc)
    }

    /// [`repeat`](Tensor::repeat) with counts for the last dims only.
    #[track_caller]
    pub fn tile(&self, counts: impl Into<Shape>) -> Result<Tensor> {
        let counts = counts.into();
        let missing = self.rank().saturating_sub(counts.len());
        let all: Vec<usize> = vec![1; missing].into_iter().chain(counts.iter().copied()).collect();
        self.repeat(all).map_err(|e| e.named("tile"))
    }

    /// Each slice of a dim `count` times in a row.
    #[track_caller]
    pub fn repeat_interleave(&self, count: usize, dim: i64) -> Result<Tensor> {
        let (loc, own) = (Loc::caller(), self.shape());
        let dim = known_dim(self, "repeat_interleave", dim, loc)?;
        let (mut apart, mut wide, mut whole) = (own.clone(), own.clone(), own);
        apart.insert(dim + 1, 1);
        wide.insert(dim + 1, count);
        whole[dim] = whole[dim].saturating_mul(count);
        self.repeated(apart, wide, whole, loc).map_err(|e| e.named("repeat_interleave"))
    }

    /// Each slice of a dim as many times as `counts` (i64, one per slice) says. The size of the result depends on
    /// values: in compiled code this is a graph break.
    #[track_caller]
    pub fn repeat_interleave_each(&self, counts: &Tensor, dim: i64) -> Result<Tensor> {
        let loc = Loc::caller();
        let at = known_dim(self, "repeat_interleave", dim, loc)?;
        let values = crate::host::read::<i64>(counts, "repeat_interleave", loc)?;
        let size = self.shape()[at];
        if values.len() != size {
            let why = Why::sizes("the number of counts and the size of the dim", values.len(), size);
            return Err(Error::op("repeat_interleave", why, loc));
        }
        if let Some(&bad) = values.iter().find(|&&count| count < 0) {
            return Err(number("repeat_interleave", "counts", "0 or more", bad as f64, loc));
        }
        let total = values.iter().fold(0usize, |total, &count| total.saturating_add(count as usize));
        let mut picks: Vec<i64> = reserve(total, "repeat_interleave", loc)?;
        for (i, &count) in values.iter().enumerate() {
            picks.resize(picks.len() + count as usize, i as i64);
        }
        self.index_select(dim, &Tensor::from_slice(&picks)?)
    }

    /// Elements shifted along dims; what falls off one end comes back at the other.
    ///
    /// ```
    /// # use kiln_tensor::{Device, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let x = Tensor::new(&[[1i64, 2], [3, 4]], &Device::Cpu)?;
    /// assert_eq!(x.roll(1, 1)?.to_vec::<i64>()?, [2, 1, 4, 3]);
    /// assert_eq!(x.roll([1, 1], [0, 1])?.to_vec::<i64>()?, [4, 3, 2, 1]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn roll(&self, shifts: impl IntoDims, dims: impl IntoDims) -> Result<Tensor> {
        let loc = Loc::caller();
        let (shifts, dims) = (shifts.into_dims(), dims.into_dims());
        if shifts.len() != dims.len() || dims.is_empty() {
            let why = Why::sizes("the number of shifts and of dims", shifts.len(), dims.len());
            return Err(Error::op("roll", why, loc));
        }
        let mut rolled = self.clone();
        for (&shift, &dim) in shifts.iter().zip(&dims) {
            rolled = rolled.rolled(shift, dim, loc)?;
        }
        Ok(rolled)
    }

    fn rolled(&self, shift: i64, dim: i64, loc: Loc) -> Result<Tensor> {
        let dim = known_dim(self, "roll", dim, loc)?;
        let size = self.shape()[dim];
        if size == 0 || shift.rem_euclid(size as i64) == 0 {
            return self.unary(Op::Clone {}, loc);
        }
        let cut = size - shift.rem_euclid(size as i64) as usize;
        let (tail, head) = (self.sliced(dim, cut, size, loc)?, self.sliced(dim, 0, cut, loc)?);
        dispatch_tensor(&Op::Cat { dim }, &[Arg::Tensor(&tail), Arg::Tensor(&head)], false, loc)
    }

    /// Elements shifted along all of them, as if they were one dim.
    #[track_caller]
    pub fn roll_all(&self, shift: i64) -> Result<Tensor> {
        self.flatten()?.roll(shift, 0)?.reshape(self.shape())
    }
}
