//! Shapes and views: methods that look at the same elements in another way, cut or turn them.

mod padding;
mod repeating;

use kiln_ir::{Dims, Error, Loc, Op, Pairs, Result, Shape, Why};

use crate::dispatch::dispatch_tensor;
use crate::hook::Arg;
use crate::host::reserve;
use crate::methods::{fill_in, normalise_dim, normalise_dims};
use crate::{IntoDims, IntoShape, Tensor};

fn number(op: &str, argument: &'static str, expected: &'static str, got: f64, loc: Loc) -> Error {
    Error::op(op, Why::Number { argument, expected, got }, loc)
}

impl Tensor {
    fn reshaped(&self, shape: Shape, loc: Loc) -> Result<Tensor> {
        self.unary(Op::Reshape { shape }, loc)
    }

    fn sliced(&self, dim: usize, start: usize, end: usize, loc: Loc) -> Result<Tensor> {
        self.unary(Op::Slice { dim, start, end, step: 1 }, loc)
    }

    /// The same memory in another shape; one size may be −1. An error where the elements don't lie together as
    /// the shape asks: [`reshape`](Tensor::reshape) copies then.
    #[track_caller]
    pub fn view(&self, shape: impl IntoShape) -> Result<Tensor> {
        let loc = Loc::caller();
        let shape = fill_in(&self.shape(), &shape.into_sizes(), loc).map_err(|e| e.named("view"))?;
        let op = Op::Reshape { shape };
        // The type rule speaks first: a wrong number of elements is the better message.
        let ty = self.ty().into();
        op.infer(std::slice::from_ref(&ty))
            .map_err(|why| op.error(std::slice::from_ref(&ty), why, loc).named("view"))?;
        match self.layout()?.view(&op) {
            Some(_) => self.unary(op, loc),
            None => Err(op.error(&[ty], Why::NoView, loc).named("view")),
        }
    }

    /// [`view`](Tensor::view) in another tensor's shape.
    #[track_caller]
    pub fn view_as(&self, other: &Tensor) -> Result<Tensor> {
        self.view(other.shape())
    }

    /// [`reshape`](Tensor::reshape) to another tensor's shape.
    #[track_caller]
    pub fn reshape_as(&self, other: &Tensor) -> Result<Tensor> {
        self.reshape(other.shape())
    }

    /// [`expand`](Tensor::expand) to another tensor's shape.
    #[track_caller]
    pub fn expand_as(&self, other: &Tensor) -> Result<Tensor> {
        self.expand(other.shape())
    }

    /// Repeated to a shape as arithmetic would repeat it, as a view.
    #[track_caller]
    pub fn broadcast_to(&self, shape: impl IntoShape) -> Result<Tensor> {
        self.expand(shape).map_err(|e| e.named("broadcast_to"))
    }

    /// Dims `start..=end` as one.
    #[track_caller]
    pub fn flatten_dims(&self, start: i64, end: i64) -> Result<Tensor> {
        let (loc, own) = (Loc::caller(), self.shape());
        let first = normalise_dim("flatten", start, own.rank(), loc)?;
        let last = normalise_dim("flatten", end, own.rank(), loc)?;
        if own.rank() == 0 {
            return self.reshaped(Shape::from(1), loc);
        }
        if first > last {
            return Err(number("flatten", "end", "a dim at or after start", end as f64, loc));
        }
        let middle = own[first..=last].iter().product();
        self.reshaped(
            own[..first].iter().copied().chain([middle]).chain(own[last + 1..].iter().copied()).collect(),
            loc,
        )
    }

    /// One dim as several; one size may be −1.
    #[track_caller]
    pub fn unflatten(&self, dim: i64, sizes: impl IntoShape) -> Result<Tensor> {
        let (loc, own) = (Loc::caller(), self.shape());
        let dim = normalise_dim("unflatten", dim, own.rank(), loc)?;
        let size = own.get(dim).copied().unwrap_or(1);
        let parts =
            fill_in(&Shape::from(size), &sizes.into_sizes(), loc).map_err(|e| e.named("unflatten"))?;
        let lead = own[..dim.min(own.rank())].iter();
        let rest = own.iter().skip(dim + 1);
        self.reshaped(lead.chain(parts.iter()).chain(rest).copied().collect(), loc)
            .map_err(|e| e.named("unflatten"))
    }

    /// Without its dims of size 1, as a view.
    #[track_caller]
    pub fn squeeze_all(&self) -> Result<Tensor> {
        self.reshaped(self.shape().iter().copied().filter(|&size| size != 1).collect(), Loc::caller())
    }

    /// Dims moved from `source` to `destination`, the others in their order, as a view.
    #[track_caller]
    pub fn movedim(&self, source: impl IntoDims, destination: impl IntoDims) -> Result<Tensor> {
        let (loc, rank) = (Loc::caller(), self.rank());
        let from = normalise_dims("movedim", source, rank, loc)?;
        let to = normalise_dims("movedim", destination, rank, loc)?;
        if from.len() != to.len() {
            let why = Why::sizes("the number of source and destination dims", from.len(), to.len());
            return Err(Error::op("movedim", why, loc));
        }
        for dims in [&from, &to] {
            if let Some(i) = (0..dims.len()).find(|&i| dims[..i].contains(&dims[i])) {
                return Err(Error::op("movedim", Why::DimTwice { dim: dims[i] }, loc));
            }
        }
        let mut rest = (0..rank).filter(|d| !from.contains(d));
        let dims: Option<Dims> = (0..rank)
            .map(|d| match to.iter().position(|&place| place == d) {
                Some(k) => Some(from[k]),
                None => rest.next(),
            })
            .collect();
        let dims = dims.ok_or_else(|| Error::bug("dims that are not moved have no place"))?;
        self.unary(Op::Permute { dims }, loc)
    }

    /// Two dims swapped, as a view; the same as [`transpose`](Tensor::transpose).
    #[track_caller]
    pub fn swapaxes(&self, dim0: i64, dim1: i64) -> Result<Tensor> {
        self.transpose(dim0, dim1)
    }

    /// The slices of a dim, without it, as views.
    #[track_caller]
    pub fn unbind(&self, dim: i64) -> Result<Vec<Tensor>> {
        let (loc, mut shape) = (Loc::caller(), self.shape());
        let dim = known_dim(self, "unbind", dim, loc)?;
        let count = shape.remove(dim);
        parts("unbind", count, loc, |i| self.sliced(dim, i, i + 1, loc)?.reshaped(shape.clone(), loc))
    }

    /// Parts of `size` along a dim, the last one smaller if need be, as views.
    #[track_caller]
    pub fn split(&self, size: usize, dim: i64) -> Result<Vec<Tensor>> {
        let loc = Loc::caller();
        let dim = known_dim(self, "split", dim, loc)?;
        let total = self.shape()[dim];
        if size == 0 && total > 0 {
            return Err(number("split", "size", "1 or more", 0.0, loc));
        }
        let count = if total == 0 { 1 } else { total.div_ceil(size) };
        let start = |i: usize| i.saturating_mul(size).min(total);
        parts("split", count, loc, |i| self.sliced(dim, start(i), start(i + 1), loc))
    }

    /// Parts of these sizes along a dim, as views.
    #[track_caller]
    pub fn split_sizes(&self, sizes: &[usize], dim: i64) -> Result<Vec<Tensor>> {
        let loc = Loc::caller();
        let dim = known_dim(self, "split", dim, loc)?;
        let (total, want) = (self.shape()[dim], sizes.iter().fold(0usize, |a, &b| a.saturating_add(b)));
        if total != want {
            let why = Why::sizes("the sum of the sizes and the size of the dim", want, total);
            return Err(self.refusal("split", why, loc));
        }
        let mut start = 0;
        sizes
            .iter()
            .map(|&size| {
                start += size;
                self.sliced(dim, start - size, start, loc)
            })
            .collect()
    }

    /// At most `chunks` parts of one size along a dim (the last one smaller if need be), as views.
    #[track_caller]
    pub fn chunk(&self, chunks: usize, dim: i64) -> Result<Vec<Tensor>> {
        let loc = Loc::caller();
        let at = known_dim(self, "chunk", dim, loc)?;
        if chunks == 0 {
            return Err(number("chunk", "chunks", "1 or more", 0.0, loc));
        }
        let total = self.shape()[at];
        match total {
            0 => parts("chunk", chunks, loc, |_| self.sliced(at, 0, 0, loc)),
            _ => self.split(total.div_ceil(chunks), dim),
        }
    }

    /// The elements of dims in reverse order.
    #[track_caller]
    pub fn flip(&self, dims: impl IntoDims) -> Result<Tensor> {
        let loc = Loc::caller();
        self.unary(Op::Flip { dims: normalise_dims("flip", dims, self.rank(), loc)? }, loc)
    }

    /// The elements for which index `dim2` − index `dim1` is `offset`, as a new last dim; a view.
    #[track_caller]
    pub fn diagonal(&self, offset: i64, dim1: i64, dim2: i64) -> Result<Tensor> {
        let (loc, rank) = (Loc::caller(), self.rank());
        let dim1 = normalise_dim("diagonal", dim1, rank, loc)?;
        let dim2 = normalise_dim("diagonal", dim2, rank, loc)?;
        self.unary(Op::Diagonal { offset, dim1, dim2 }, loc)
    }

    /// This tensor with a diagonal replaced by `src`.
    #[track_caller]
    pub fn diagonal_scatter(&self, src: &Tensor, offset: i64, dim1: i64, dim2: i64) -> Result<Tensor> {
        let (loc, rank) = (Loc::caller(), self.rank());
        let dim1 = normalise_dim("diagonal_scatter", dim1, rank, loc)?;
        let dim2 = normalise_dim("diagonal_scatter", dim2, rank, loc)?;
        let op = Op::DiagonalScatter { offset, dim1, dim2 };
        dispatch_tensor(&op, &[Arg::Tensor(self), Arg::Tensor(src)], false, loc)
    }

    /// Zeros with the last dim as a diagonal of two new dims.
    #[track_caller]
    pub fn diag_embed(&self, offset: i64, dim1: i64, dim2: i64) -> Result<Tensor> {
        let (loc, rank) = (Loc::caller(), self.rank() + 1);
        let dim1 = normalise_dim("diag_embed", dim1, rank, loc)?;
        let dim2 = normalise_dim("diag_embed", dim2, rank, loc)?;
        self.unary(Op::DiagEmbed { offset, dim1, dim2 }, loc)
    }

    /// The sum of a matrix's diagonal.
    #[track_caller]
    pub fn trace(&self) -> Result<Tensor> {
        let loc = Loc::caller();
        match self.rank() {
            2 => {
                let diagonal = self.unary(Op::Diagonal { offset: 0, dim1: 0, dim2: 1 }, loc)?;
                diagonal.unary(Op::Sum { dims: Dims::from(0), keepdim: false }, loc)
            }
            got => {
                let why = Why::Rank { argument: "x", expected: "2", got };
                Err(self.refusal("trace", why, loc))
            }
        }
    }

    /// Matrices with zeros above a diagonal.
    #[track_caller]
    pub fn tril(&self, diagonal: i64) -> Result<Tensor> {
        self.unary(Op::Tril { diagonal }, Loc::caller())
    }

    /// Matrices with zeros below a diagonal.
    #[track_caller]
    pub fn triu(&self, diagonal: i64) -> Result<Tensor> {
        self.unary(Op::Triu { diagonal }, Loc::caller())
    }

    /// Windows of `size` along a dim, `step` apart, as a new last dim; a view.
    #[track_caller]
    pub fn unfold(&self, dim: i64, size: usize, step: usize) -> Result<Tensor> {
        let loc = Loc::caller();
        if self.rank() == 0 {
            let dim = normalise_dim("unfold", dim, 0, loc)?;
            return self
                .reshaped(Shape::from(1), loc)?
                .unary(Op::Unfold { dim, size, step }, loc)?
                .squeeze(0);
        }
        let dim = normalise_dim("unfold", dim, self.rank(), loc)?;
        self.unary(Op::Unfold { dim, size, step }, loc)
    }

    /// A view by sizes, strides and offset, in elements from this tensor's first. The tensor must be row-major
    /// ([`contiguous`](Tensor::contiguous)): strides of other layouts would say something about memory that
    /// compiled code is free to lay out differently.
    #[track_caller]
    pub fn as_strided(&self, sizes: &[usize], strides: &[usize], offset: usize) -> Result<Tensor> {
        let loc = Loc::caller();
        let op = Op::AsStrided { view: Pairs::new(sizes, strides), offset };
        same_length(sizes, strides, "as_strided", loc)?;
        if self.is_contiguous()? {
            self.unary(op, loc)
        } else {
            let expected = "contiguous (call contiguous() first)";
            Err(op.error(&[self.ty().into()], Why::Operand { argument: "the tensor", expected }, loc))
        }
    }

    /// This tensor with the elements of an [`as_strided`](Tensor::as_strided) view replaced by `src`.
    #[track_caller]
    pub fn as_strided_scatter(
        &self,
        src: &Tensor,
        sizes: &[usize],
        strides: &[usize],
        offset: usize,
    ) -> Result<Tensor> {
        let loc = Loc::caller();
        same_length(sizes, strides, "as_strided_scatter", loc)?;
        let op = Op::AsStridedScatter { view: Pairs::new(sizes, strides), offset };
        dispatch_tensor(&op, &[Arg::Tensor(self), Arg::Tensor(src)], false, loc)
    }

    /// This tensor with one slice of a dim replaced by `src`.
    #[track_caller]
    pub fn select_scatter(&self, src: &Tensor, dim: i64, index: i64) -> Result<Tensor> {
        let (loc, shape) = (Loc::caller(), self.shape());
        let dim = known_dim(self, "select_scatter", dim, loc)?;
        let (size, mut slice) = (shape[dim], shape.clone());
        let at = if index < 0 { index.saturating_add(size as i64) } else { index };
        if !(0..size as i64).contains(&at) {
            let why = Why::Index { index, size };
            return Err(self.refusal("select_scatter", why, loc));
        }
        slice.remove(dim);
        if src.shape() != slice {
            let why = Why::shape("src", slice, src.shape());
            return Err(Op::Detach {}
                .error(&[self.ty().into(), src.ty().into()], why, loc)
                .named("select_scatter"));
        }
        slice.insert(dim, 1);
        let (start, end) = (at as usize, at as usize + 1);
        let op = Op::SliceScatter { dim, start, end, step: 1 };
        dispatch_tensor(&op, &[Arg::Tensor(self), Arg::Tensor(&src.reshaped(slice, loc)?)], false, loc)
    }

    /// Coordinates of a grid: tensor `i` broadcast along all dims but dim `i` (indexing "ij"); views.
    #[track_caller]
    pub fn meshgrid(lines: &[&Tensor]) -> Result<Vec<Tensor>> {
        let loc = Loc::caller();
        if let Some(t) = lines.iter().find(|t| t.rank() > 1) {
            let why = Why::Rank { argument: "tensors", expected: "0 or 1", got: t.rank() };
            return Err(Error::op("meshgrid", why, loc));
        }
        let shape: Shape = lines.iter().map(|t| t.numel()).collect();
        lines
            .iter()
            .enumerate()
            .map(|(i, line)| {
                let mut own: Shape = vec![1; lines.len()].into();
                own[i] = shape[i];
                line.reshaped(own, loc)?.unary(Op::Expand { shape: shape.clone() }, loc)
            })
            .collect()
    }

    /// [.., C·r², H, W] as [.., C, H·r, W·r]: channels become pixels.
    #[track_caller]
    pub fn pixel_shuffle(&self, factor: usize) -> Result<Tensor> {
        let loc = Loc::caller();
        let (lead, [c, h, w]) = self.image("pixel_shuffle", loc)?;
        let square = factor.saturating_mul(factor);
        if factor == 0 || !c.is_multiple_of(square) {
            return Err(number(
                "pixel_shuffle",
                "channels",
                "a multiple of the factor's square",
                c as f64,
                loc,
            ));
        }
        let split = [c / square, factor, factor, h, w];
        let joined = [c / square, h.saturating_mul(factor), w.saturating_mul(factor)];
        self.reordered(&lead, split, [0, 3, 1, 4, 2], joined, loc)
    }

    /// [.., C, H·r, W·r] as [.., C·r², H, W]: pixels become channels.
    #[track_caller]
    pub fn pixel_unshuffle(&self, factor: usize) -> Result<Tensor> {
        let loc = Loc::caller();
        let (lead, [c, h, w]) = self.image("pixel_unshuffle", loc)?;
        if factor == 0 || !h.is_multiple_of(factor) || !w.is_multiple_of(factor) {
            let odd = if factor == 0 || !h.is_multiple_of(factor) { h } else { w };
            return Err(number(
                "pixel_unshuffle",
                "height and width",
                "multiples of the factor",
                odd as f64,
                loc,
            ));
        }
        let split = [c, h / factor, factor, w / factor, factor];
        let joined = [c.saturating_mul(factor).saturating_mul(factor), h / factor, w / factor];
        self.reordered(&lead, split, [0, 2, 4, 1, 3], joined, loc)
    }

    /// The dims behind the leading ones split, put in another order and joined.
    fn reordered(
        &self,
        lead: &[usize],
        split: [usize; 5],
        order: [usize; 5],
        joined: [usize; 3],
        loc: Loc,
    ) -> Result<Tensor> {
        let n = lead.len();
        let dims = (0..n).chain(order.map(|d| n + d)).collect();
        let split = self.reshaped(lead.iter().copied().chain(split).collect(), loc)?;
        let turned = split.unary(Op::Permute { dims }, loc)?;
        turned.reshaped(lead.iter().copied().chain(joined).collect(), loc)
    }

    /// Leading sizes, then channels, height and width.
    fn image(&self, op: &str, loc: Loc) -> Result<(Vec<usize>, [usize; 3])> {
        match &self.shape()[..] {
            [lead @ .., c, h, w] => Ok((lead.to_vec(), [*c, *h, *w])),
            short => {
                let why = Why::Rank { argument: "x", expected: "3 or more", got: short.len() };
                Err(self.refusal(op, why, loc))
            }
        }
    }
}

/// So many tensors, if there is memory for a list of them: empty ones cost nothing else.
fn parts(op: &str, count: usize, loc: Loc, part: impl Fn(usize) -> Result<Tensor>) -> Result<Vec<Tensor>> {
    let mut all = reserve(count, op, loc)?;
    for i in 0..count {
        all.push(part(i)?);
    }
    Ok(all)
}

/// A dim that is there: a 0-d tensor has none to cut.
pub(crate) fn known_dim(t: &Tensor, op: &str, dim: i64, loc: Loc) -> Result<usize> {
    match t.rank() {
        0 => Err(t.refusal(op, Why::Dim { dim, rank: 0 }, loc)),
        rank => normalise_dim(op, dim, rank, loc),
    }
}

fn same_length(sizes: &[usize], strides: &[usize], op: &str, loc: Loc) -> Result<()> {
    if sizes.len() == strides.len() {
        Ok(())
    } else {
        let why = Why::sizes("the number of sizes and of strides", sizes.len(), strides.len());
        Err(Error::op(op, why, loc))
    }
}
