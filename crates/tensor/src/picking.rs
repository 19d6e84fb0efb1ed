//! Picking and placing elements by index tensors and masks, under PyTorch's names.

use kiln_ir::{DType, Dims, Error, Loc, Op, Result, Scalar, ScalarKind, ScatterReduce, Shape, Why};

use crate::Tensor;
use crate::dispatch::dispatch_tensor;
use crate::hook::Arg;
use crate::host::read;
use crate::indexing::{Indexer, by_index, place};
use crate::methods::{Operand, normalise_dim};

/// An index tensor in the dtype of indices.
fn indices(index: &Tensor) -> Result<Tensor> {
    match index.dtype().kind() {
        ScalarKind::Int => index.to_dtype(DType::I64),
        // The rule says what it wants instead.
        ScalarKind::Bool | ScalarKind::Float => Ok(index.clone()),
    }
}

/// A single number as one element of one dim; PyTorch's indexing by a dim takes both for the same.
fn line(t: &Tensor, loc: Loc) -> Result<Tensor> {
    if t.rank() == 0 { t.unary(Op::Reshape { shape: Shape::from(1) }, loc) } else { Ok(t.clone()) }
}

impl Tensor {
    /// An op along a dim of this tensor and two others, in place or not.
    fn placed(&self, op: Op, index: &Tensor, src: &Tensor, in_place: bool, loc: Loc) -> Result<Tensor> {
        let index = indices(index)?;
        if self.rank() > 0 && index.rank() > 0 && src.rank() > 0 {
            return dispatch_tensor(&op, &[self, &index, src].map(Arg::Tensor), in_place, loc);
        }
        // In place, the line is a view of this tensor.
        let lines = [line(self, loc)?, line(&index, loc)?, line(src, loc)?];
        let [x, index, src] = &lines;
        let placed = dispatch_tensor(&op, &[x, index, src].map(Arg::Tensor), in_place, loc)?;
        if self.rank() == 0 { placed.unary(Op::Reshape { shape: Shape::scalar() }, loc) } else { Ok(placed) }
    }

    /// The elements at `index` (integers, as many dims) along a dim.
    #[track_caller]
    pub fn gather(&self, dim: i64, index: &Tensor) -> Result<Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("gather", dim, self.rank(), loc)?;
        let index = indices(index)?;
        let op = Op::Gather { dim };
        if index.numel() == 0 && index.rank() != self.rank() {
            // Nothing is picked, whatever the dims.
            return Tensor::full_in(index.shape(), 0i64, self.dtype(), self.device(), loc);
        }
        if self.rank() > 0 && index.rank() > 0 {
            return dispatch_tensor(&op, &[self, &index].map(Arg::Tensor), false, loc);
        }
        let (x, places) = (line(self, loc)?, line(&index, loc)?);
        let picked = dispatch_tensor(&op, &[&x, &places].map(Arg::Tensor), false, loc)?;
        picked.unary(Op::Reshape { shape: index.shape() }, loc)
    }

    /// The slices at `index` (one dim, i64) along a dim.
    #[track_caller]
    pub fn index_select(&self, dim: i64, index: &Tensor) -> Result<Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("index_select", dim, self.rank(), loc)?;
        let index = line(&indices(index)?, loc)?;
        let op = Op::IndexSelect { dim };
        if self.rank() > 0 {
            return dispatch_tensor(&op, &[self, &index].map(Arg::Tensor), false, loc);
        }
        if index.numel() != 1 {
            let why = Why::Count { what: "index for a 0-d tensor", expected: 1, got: index.numel() };
            return Err(op.error(&[self.ty().into(), index.ty().into()], why, loc));
        }
        let picked = dispatch_tensor(&op, &[&line(self, loc)?, &index].map(Arg::Tensor), false, loc)?;
        picked.unary(Op::Reshape { shape: Shape::scalar() }, loc)
    }

    /// With the slices of `src` added at `index` (one dim, i64) along a dim.
    #[track_caller]
    pub fn index_add(&self, dim: i64, index: &Tensor, src: &Tensor) -> Result<Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("index_add", dim, self.rank(), loc)?;
        self.placed(Op::IndexAdd { dim }, index, src, false, loc)
    }

    /// Adds the slices of `src` at `index` (one dim, i64) along a dim, in place.
    #[track_caller]
    pub fn index_add_(&self, dim: i64, index: &Tensor, src: &Tensor) -> Result<&Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("index_add_", dim, self.rank(), loc)?;
        self.placed(Op::IndexAdd { dim }, index, src, true, loc)?;
        Ok(self)
    }

    /// With the slices of `src` at `index` (one dim, i64) along a dim.
    #[track_caller]
    pub fn index_copy(&self, dim: i64, index: &Tensor, src: &Tensor) -> Result<Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("index_copy", dim, self.rank(), loc)?;
        self.placed(Op::IndexCopy { dim }, index, src, false, loc)
    }

    /// Puts the slices of `src` at `index` (one dim, i64) along a dim, in place.
    #[track_caller]
    pub fn index_copy_(&self, dim: i64, index: &Tensor, src: &Tensor) -> Result<&Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("index_copy_", dim, self.rank(), loc)?;
        self.placed(Op::IndexCopy { dim }, index, src, true, loc)?;
        Ok(self)
    }

    /// Slices filled with a number, for `index` along `dim`.
    fn filled(&self, dim: usize, index: &Tensor, value: Scalar, loc: Loc) -> Result<(Tensor, Tensor)> {
        let mut ty = self.ty();
        let size = ty.shape.get(dim).copied().unwrap_or(1);
        // Unlike index_copy, index_fill counts negative places from the end.
        let index = line(&indices(index)?, loc)?.unary(Op::CheckedIndex { size }, loc)?;
        if let Some(size) = ty.shape.get_mut(dim) {
            *size = index.numel();
        }
        let one = Tensor::full_in(Shape::scalar(), value, ty.dtype, ty.device, loc)?;
        Ok((one.unary(Op::Expand { shape: ty.shape }, loc)?, index))
    }

    /// With a number in all elements of the slices at `index` (one dim, i64) along a dim.
    #[track_caller]
    pub fn index_fill(&self, dim: i64, index: &Tensor, value: impl Into<Scalar>) -> Result<Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("index_fill", dim, self.rank(), loc)?;
        let fill = self.filled(dim, index, value.into(), loc);
        fill.and_then(|(src, index)| self.placed(Op::IndexCopy { dim }, &index, &src, false, loc))
            .map_err(|e| e.named("index_fill"))
    }

    /// Puts a number in all elements of the slices at `index` (one dim, i64) along a dim, in place.
    #[track_caller]
    pub fn index_fill_(&self, dim: i64, index: &Tensor, value: impl Into<Scalar>) -> Result<&Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("index_fill_", dim, self.rank(), loc)?;
        let fill = self.filled(dim, index, value.into(), loc);
        fill.and_then(|(src, index)| self.placed(Op::IndexCopy { dim }, &index, &src, true, loc))
            .map_err(|e| e.named("index_fill_"))?;
        Ok(self)
    }

    /// The part of `src` that an index tensor of another shape uses.
    fn corner(src: &Tensor, index: &Tensor, loc: Loc) -> Result<Tensor> {
        let (have, want) = (src.shape(), index.shape());
        let mut part = src.clone();
        if have.rank() == want.rank() {
            for d in (0..have.rank()).filter(|&d| want[d] < have[d]) {
                part = part.unary(Op::Slice { dim: d, start: 0, end: want[d], step: 1 }, loc)?;
            }
        }
        Ok(part)
    }

    /// With the elements of `src` at `index` (i64, as many dims) along a dim. Where several meet, the last one
    /// stays.
    #[track_caller]
    pub fn scatter(&self, dim: i64, index: &Tensor, src: &Tensor) -> Result<Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("scatter", dim, self.rank(), loc)?;
        self.placed(Op::Scatter { dim }, index, &Tensor::corner(src, index, loc)?, false, loc)
    }

    /// [`scatter`](Tensor::scatter) in place.
    #[track_caller]
    pub fn scatter_(&self, dim: i64, index: &Tensor, src: &Tensor) -> Result<&Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("scatter_", dim, self.rank(), loc)?;
        self.placed(Op::Scatter { dim }, index, &Tensor::corner(src, index, loc)?, true, loc)?;
        Ok(self)
    }

    /// With a number at `index` (i64, as many dims) along a dim.
    #[track_caller]
    pub fn scatter_value(&self, dim: i64, index: &Tensor, value: impl Into<Scalar>) -> Result<Tensor> {
        let (loc, ty) = (Loc::caller(), self.ty());
        let dim = normalise_dim("scatter", dim, self.rank(), loc)?;
        let one = Tensor::full_in(Shape::scalar(), value, ty.dtype, ty.device, loc)?;
        let src = one.unary(Op::Expand { shape: index.shape() }, loc)?;
        self.placed(Op::Scatter { dim }, index, &src, false, loc)
    }

    /// With the elements of `src` added at `index` (i64, as many dims) along a dim.
    #[track_caller]
    pub fn scatter_add(&self, dim: i64, index: &Tensor, src: &Tensor) -> Result<Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("scatter_add", dim, self.rank(), loc)?;
        self.placed(Op::ScatterAdd { dim }, index, &Tensor::corner(src, index, loc)?, false, loc)
    }

    /// [`scatter_add`](Tensor::scatter_add) in place.
    #[track_caller]
    pub fn scatter_add_(&self, dim: i64, index: &Tensor, src: &Tensor) -> Result<&Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("scatter_add_", dim, self.rank(), loc)?;
        self.placed(Op::ScatterAdd { dim }, index, &Tensor::corner(src, index, loc)?, true, loc)?;
        Ok(self)
    }

    /// With the elements of `src` that meet at an index along a dim reduced to one, this tensor's own included
    /// or not.
    #[track_caller]
    pub fn scatter_reduce(
        &self,
        dim: i64,
        index: &Tensor,
        src: &Tensor,
        reduce: ScatterReduce,
        include_self: bool,
    ) -> Result<Tensor> {
        let loc = Loc::caller();
        let dim = normalise_dim("scatter_reduce", dim, self.rank(), loc)?;
        let op = Op::ScatterReduce { dim, reduce, include_self };
        self.placed(op, index, &Tensor::corner(src, index, loc)?, false, loc)
    }

    /// The elements at `index` (i64, any shape), counted in row-major order; negative ones from the end.
    #[track_caller]
    pub fn take(&self, index: &Tensor) -> Result<Tensor> {
        let loc = Loc::caller();
        let flat = self.unary(Op::Reshape { shape: Shape::from(self.numel()) }, loc)?;
        let index = indices(index)?;
        let op = Op::Index { dims: Dims::from(0) };
        dispatch_tensor(&op, &[Arg::Tensor(&flat), Arg::Tensor(&index)], false, loc)
            .map_err(|e| e.named("take"))
    }

    /// The rows of this table at `index` (i64, any shape).
    #[track_caller]
    pub fn embedding(&self, index: &Tensor) -> Result<Tensor> {
        let index = indices(index)?;
        let op = Op::Embedding { padding_idx: -1 };
        dispatch_tensor(&op, &[Arg::Tensor(self), Arg::Tensor(&index)], false, Loc::caller())
    }

    /// The rows of this table at `index` (i64, any shape); row `padding_idx` (negative: from the end) gets no
    /// gradient.
    #[track_caller]
    pub fn embedding_padded(&self, index: &Tensor, padding_idx: i64) -> Result<Tensor> {
        let (loc, rows) = (Loc::caller(), self.shape().first().copied().unwrap_or(0));
        let at = if padding_idx < 0 { padding_idx + rows as i64 } else { padding_idx };
        if !(0..rows as i64).contains(&at) {
            let why = Why::Index { index: padding_idx, size: rows };
            return Err(self.refusal("embedding", why, loc));
        }
        let index = indices(index)?;
        let op = Op::Embedding { padding_idx: at };
        dispatch_tensor(&op, &[Arg::Tensor(self), Arg::Tensor(&index)], false, loc)
    }

    /// 1 at each class number of this tensor (i64), 0 at the other `classes`, in a new last dim.
    #[track_caller]
    pub fn one_hot(&self, classes: usize) -> Result<Tensor> {
        let loc = Loc::caller();
        indices(self)?.unary(Op::OneHot { classes }, loc)
    }

    /// With the elements of `src`, one after the other, where the mask (bool, broadcast) holds.
    #[track_caller]
    pub fn masked_scatter(&self, mask: &Tensor, src: &Tensor) -> Result<Tensor> {
        let (loc, own) = (Loc::caller(), self.shape());
        let wide = match kiln_ir::broadcast(&own, &mask.shape()) {
            Some(shape) if shape != own => self.unary(Op::Expand { shape }, loc)?,
            _ => self.clone(),
        };
        let args = [&wide, mask, src].map(Arg::Tensor);
        dispatch_tensor(&Op::MaskedScatter {}, &args, false, loc)
    }

    /// [`masked_scatter`](Tensor::masked_scatter) in place.
    #[track_caller]
    pub fn masked_scatter_(&self, mask: &Tensor, src: &Tensor) -> Result<&Tensor> {
        let args = [Arg::Tensor(self), Arg::Tensor(mask), Arg::Tensor(src)];
        dispatch_tensor(&Op::MaskedScatter {}, &args, true, Loc::caller())?;
        Ok(self)
    }

    /// The positions of the elements that are not zero, one row of coordinates each: i64, [count, dims]. The size
    /// depends on values: in compiled code this is a graph break.
    #[track_caller]
    pub fn nonzero(&self) -> Result<Tensor> {
        let loc = Loc::caller();
        let places = self.nonzero_places("nonzero", loc)?;
        let (shape, count) = (self.shape(), places.len());
        if shape.rank() == 1 {
            return Tensor::from_vec(places, [count, 1]);
        }
        let mut rows = vec![0; count * shape.rank()];
        for (row, &place) in rows.chunks_exact_mut(shape.rank().max(1)).zip(&places) {
            let mut rest = place as usize;
            for (coordinate, &size) in row.iter_mut().zip(shape.iter()).rev() {
                *coordinate = (rest % size) as i64;
                rest /= size;
            }
        }
        Tensor::from_vec(rows, [count, shape.rank()])
    }

    /// The row-major positions of the elements that are not zero.
    fn nonzero_places(&self, what: &'static str, loc: Loc) -> Result<Vec<i64>> {
        let flags = read::<bool>(self, what, loc)?;
        let count = flags.iter().map(|&flag| usize::from(flag)).sum::<usize>();
        // Written without a branch, which no processor could foresee: the last write may be one too many.
        let mut places = vec![0; count + 1];
        let mut found = 0;
        for (at, &flag) in flags.iter().enumerate() {
            places[found] = at as i64;
            found += usize::from(flag);
        }
        places.truncate(count);
        Ok(places)
    }

    /// The coordinates of the elements that are not zero, one list for each dim.
    pub(crate) fn nonzero_columns(&self, what: &'static str, loc: Loc) -> Result<Vec<Vec<i64>>> {
        let places = self.nonzero_places(what, loc)?;
        let shape = self.shape();
        if shape.rank() == 1 {
            return Ok(vec![places]);
        }
        let mut columns = vec![Vec::with_capacity(places.len()); shape.rank()];
        for place in places {
            let mut rest = place as usize;
            for (column, &size) in columns.iter_mut().zip(shape.iter()).rev() {
                column.push((rest % size) as i64);
                rest /= size;
            }
        }
        Ok(columns)
    }

    /// The elements where the mask (bool, broadcast) holds, in one dim. The size depends on values: in compiled
    /// code this is a graph break.
    #[track_caller]
    pub fn masked_select(&self, mask: &Tensor) -> Result<Tensor> {
        let (loc, own, other) = (Loc::caller(), self.shape(), mask.shape());
        let fail = |why| {
            Err(Op::Detach {}.error(&[self.ty().into(), mask.ty().into()], why, loc).named("masked_select"))
        };
        if mask.dtype() != DType::Bool {
            return fail(Why::DType { argument: "mask", expected: "bool", got: mask.dtype() });
        }
        let Some(shape) = kiln_ir::broadcast(&own, &other) else {
            return fail(Why::Broadcast { left: own, right: other });
        };
        let wide = mask.unary(Op::Expand { shape: shape.clone() }, loc)?;
        let line = wide.unary(Op::Reshape { shape: Shape::from(shape.numel()) }, loc)?;
        let places = line.nonzero_places("masked_select", loc)?;
        let x = self.unary(Op::Expand { shape: shape.clone() }, loc)?;
        let x = x.unary(Op::Reshape { shape: Shape::from(shape.numel()) }, loc)?;
        let count = places.len();
        x.index_select(0, &Tensor::from_vec(places, [count])?)
    }

    /// The elements at index tensors (i64, broadcast together; negative ones count from the end), one for each
    /// dim that has one. Their common shape stands where the first indexed dim was if the indexed dims are
    /// neighbours, else in front. [`IndexOp::i`](crate::IndexOp::i) is the general form.
    #[track_caller]
    pub fn index(&self, index: &[Option<&Tensor>]) -> Result<Tensor> {
        let loc = Loc::caller();
        let (dims, tensors) = self.indexed(index, loc)?;
        if tensors.is_empty() {
            return Ok(self.clone());
        }
        let args: Vec<Arg<'_>> = [self].into_iter().chain(&tensors).map(Arg::Tensor).collect();
        dispatch_tensor(&Op::Index { dims }, &args, false, loc)
    }

    /// With `values` (broadcast) put at index tensors, or added to what is there.
    #[track_caller]
    pub fn index_put<'a>(
        &self,
        index: &[Option<&Tensor>],
        values: impl Into<Operand<'a>>,
        accumulate: bool,
    ) -> Result<Tensor> {
        let loc = Loc::caller();
        let (dims, tensors) = self.indexed(index, loc)?;
        self.put(dims, &tensors, &values.into(), accumulate, false, loc)
    }

    /// Puts `values` (broadcast) at index tensors, or adds them to what is there, in place.
    #[track_caller]
    pub fn index_put_<'a>(
        &self,
        index: &[Option<&Tensor>],
        values: impl Into<Operand<'a>>,
        accumulate: bool,
    ) -> Result<&Tensor> {
        let loc = Loc::caller();
        let (dims, tensors) = self.indexed(index, loc)?;
        self.put(dims, &tensors, &values.into(), accumulate, true, loc)?;
        Ok(self)
    }

    fn indexed(&self, index: &[Option<&Tensor>], loc: Loc) -> Result<(Dims, Vec<Tensor>)> {
        let index = index.iter().map(|t| t.map_or_else(|| Indexer::from(..), Indexer::from));
        let place = place(self, &index.collect::<Vec<_>>(), loc)?;
        by_index(&place.tensors, loc)
    }

    pub(crate) fn put(
        &self,
        dims: Dims,
        tensors: &[Tensor],
        values: &Operand<'_>,
        accumulate: bool,
        in_place: bool,
        loc: Loc,
    ) -> Result<Tensor> {
        let ty = self.ty();
        if dims.is_empty() {
            return Err(Error::op("index_put", Why::Arity { expected: "1 or more".into(), got: 0 }, loc));
        }
        let values = match values {
            Operand::Tensor(t) => (*t).clone(),
            Operand::Number(x) => Tensor::full_in(Shape::scalar(), *x, ty.dtype, ty.device, loc)?,
        };
        let args: Vec<Arg<'_>> = [self, &values].into_iter().chain(tensors).map(Arg::Tensor).collect();
        dispatch_tensor(&Op::IndexPut { dims, accumulate }, &args, in_place, loc)
    }
}
