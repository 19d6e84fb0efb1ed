//! `index` and `index_put`: elements at several index tensors, one for each of some dims.

use std::mem::MaybeUninit;

use kiln_ir::{DType, Dims, Layout, Op, Result, Shape, TensorTy, Ty};

use super::indexing::{Number, with_number};
use super::{Input, Job, elements};
use crate::create::allocate;
use crate::host::reserve;
use crate::kernels::{Offsets, Places, transfer};
use crate::tensor::Ready;

/// How a result's dims follow from those of what is indexed: of the others, so many stand before the index tensors' common
/// ones.
struct Parts {
    before: usize,
    rest: Dims,
}

impl Parts {
    fn of(dims: &Dims, rank: usize) -> Parts {
        let neighbours = dims.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        let rest = (0..rank).filter(|d| !dims.contains(d)).collect();
        Parts { before: if neighbours { dims[0] } else { 0 }, rest }
    }

    /// The index tensors' common dims among a result's.
    fn common(&self, result: &Shape) -> std::ops::Range<usize> {
        self.before..self.before + result.rank() - self.rest.len()
    }
}

/// Sizes and strides of some dims.
fn pairs(layout: &Layout, dims: impl IntoIterator<Item = usize>) -> Vec<(usize, isize)> {
    dims.into_iter().map(|d| (layout.shape[d], layout.strides[d])).collect()
}

impl Job<'_> {
    /// An index tensor for a dim of this size, checked, negative ones counted from the end.
    fn wrapped(&self, index: &Ready, size: usize) -> Result<Ready> {
        let own = allocate(&TensorTy::new(DType::I64, &index.layout.shape), self.op.name(), self.loc)?;
        self.checked_index(&own, index, size)?;
        Ok(own)
    }

    /// Where the elements that the index tensors pick lie in a tensor, if there are any; all indices are checked.
    fn picked(
        &self,
        layout: &Layout,
        dims: &Dims,
        indices: &[Input],
        result: &Shape,
    ) -> Result<Option<Places>> {
        let parts = Parts::of(dims, layout.shape.rank());
        let common = Shape::from(&result[parts.common(result)]);
        let mut picks: Vec<isize> = reserve(common.numel(), self.op.name(), self.loc)?;
        picks.resize(common.numel(), 0);
        for (i, &d) in dims.iter().enumerate() {
            let own = self.wrapped(self.tensor(indices, i)?, layout.shape[d])?;
            let wide = match own.layout.view(&Op::Expand { shape: common.clone() }) {
                Some(layout) if own.layout.shape != common => self.dense(&Ready { layout, ..own })?,
                _ => own,
            };
            // SAFETY: fresh and dense, i64, of the common shape.
            let places = unsafe { elements::<i64>(&wide, picks.len()) };
            for (pick, &place) in picks.iter_mut().zip(places) {
                *pick += place as isize * layout.strides[d];
            }
        }
        if result.contains(&0) {
            return Ok(None);
        }
        let (before, behind) = parts.rest.split_at(parts.before);
        let of = |dims: &[usize]| Offsets::of(&pairs(layout, dims.iter().copied()));
        Ok(Some(Places { before: of(before), picks: Offsets::Table(picks), behind: of(behind) }))
    }

    pub(super) fn index(&self, out: &Ready, inputs: &[Input], dims: &Dims) -> Result<()> {
        let x = self.tensor(inputs, 0)?;
        if let [dim] = dims[..] {
            let index = self.wrapped(self.tensor(inputs, 1)?, x.layout.shape[dim])?;
            return self.slices_at(out, x, &index, dim);
        }
        let places = self.picked(&x.layout, dims, &inputs[1..], &out.layout.shape)?;
        let Some(places) = places else { return Ok(()) };
        let (to, from, lined) = (out.pointer(), x.pointer().cast_const(), places.lined_up());
        macro_rules! pick {
            ($ty:ty) => {{
                let to = to.cast::<MaybeUninit<$ty>>();
                // SAFETY: indices were checked, so places lie in `x`; `out` is fresh, dense and has as many elements.
                unsafe {
                    transfer((to, &lined), (from.cast(), &places), true, |_, x: $ty| MaybeUninit::new(x))
                }
            }};
        }
        match x.dtype.size() {
            1 => pick!(u8),
            2 => pick!(u16),
            4 => pick!(u32),
            _ => pick!(u64),
        }
        Ok(())
    }

    /// `out` is dense.
    pub(super) fn index_put(
        &self,
        out: &Ready,
        inputs: &[Input],
        dims: &Dims,
        accumulate: bool,
    ) -> Result<()> {
        let (x, values) = (self.tensor(inputs, 0)?, self.tensor(inputs, 1)?);
        let picked: Vec<Ty> = self.tys.iter().take(1).chain(&self.tys[2..]).cloned().collect();
        let window = Op::Index { dims: dims.clone() }.infer(&picked);
        let window = window.map_err(|why| self.op.error(self.tys, why, self.loc))?;
        let window = window[0].as_tensor().map(|ty| ty.shape.clone()).unwrap_or_default();
        let spread = |values: &Ready| match values.layout.view(&Op::Expand { shape: window.clone() }) {
            Some(layout) => Ready { layout, ..values.clone() },
            None => values.clone(),
        };
        if let [dim] = dims[..] {
            let index = self.wrapped(self.tensor(inputs, 2)?, out.layout.shape[dim])?;
            return self.write_slices(out, x, (&index, &spread(values)), dim, accumulate);
        }
        let places = self.picked(&out.layout, dims, &inputs[2..], &window)?;
        self.start_from(out, x);
        let Some(places) = places else { return Ok(()) };
        let work = if accumulate { self.workspace(out)? } else { out.clone() };
        let values = spread(&self.operand_in(values, work.dtype)?);
        let common = Parts::of(dims, out.layout.shape.rank()).common(&window);
        let of = |dims: std::ops::Range<usize>| Offsets::of(&pairs(&values.layout, dims));
        let from = Places {
            before: of(0..common.start),
            picks: of(common.clone()),
            behind: of(common.end..window.rank()),
        };
        let (to, source) = (work.pointer(), values.pointer().cast_const());
        // SAFETY: indices were checked, so places lie in `work`, which is `out` or fresh; `values` has as many elements, all
        // of one dtype.
        unsafe {
            if accumulate {
                with_number!(work.dtype, T => {
                    transfer((to.cast::<T>(), &places), (source.cast::<T>(), &from), false, Number::plus);
                });
            } else {
                macro_rules! put {
                    ($ty:ty) => {
                        transfer((to.cast::<$ty>(), &places), (source.cast(), &from), false, |_, x: $ty| x)
                    };
                }
                match work.dtype.size() {
                    1 => put!(u8),
                    2 => put!(u16),
                    4 => put!(u32),
                    _ => put!(u64),
                }
            }
        }
        Job::finish(out, &work);
        Ok(())
    }
}
