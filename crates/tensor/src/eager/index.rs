//! `index` and `index_put`: elements at several index tensors, one for each of some dims.

use kiln_ir::{DType, Dims, Layout, Op, Result, Shape, TensorTy, Ty};

use super::indexing::{Number, with_number};
use super::{Input, Job, elements};
use crate::create::allocate;
use crate::host::reserve;
use crate::kernels::{Places, offsets, transfer};
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
            let index = self.tensor(indices, i)?;
            let own = allocate(&TensorTy::new(DType::I64, &index.layout.shape), self.op.name(), self.loc)?;
            self.checked_index(&own, index, layout.shape[d])?;
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
        let dims = |dims: &[usize]| pairs(layout, dims.iter().copied());
        Ok(Some(Places::new(&dims(before), picks, &dims(behind))))
    }

    pub(super) fn index(&self, out: &Ready, inputs: &[Input], dims: &Dims) -> Result<()> {
        let x = self.tensor(inputs, 0)?;
        let places = self.picked(&x.layout, dims, &inputs[1..], &out.layout.shape)?;
        let Some(places) = places else { return Ok(()) };
        let (to, from, lined) = (out.pointer(), x.pointer().cast_const(), places.lined_up());
        macro_rules! pick {
            ($ty:ty) => {
                // SAFETY: indices were checked, so places lie in `x`; `out` is fresh, dense and has as many elements.
                unsafe { transfer((to.cast::<$ty>(), &lined), (from.cast(), &places), true, |_, x: $ty| x) }
            };
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
        let places = self.picked(&out.layout, dims, &inputs[2..], &window)?;
        self.start_from(out, x);
        let Some(places) = places else { return Ok(()) };
        let work = if accumulate { self.workspace(out)? } else { out.clone() };
        let mut values = self.operand_in(values, work.dtype)?;
        if let Some(layout) = values.layout.view(&Op::Expand { shape: window.clone() }) {
            values.layout = layout;
        }
        let common = Parts::of(dims, out.layout.shape.rank()).common(&window);
        let of = |dims: std::ops::Range<usize>| pairs(&values.layout, dims);
        let behind = of(common.end..window.rank());
        let from = Places::new(&of(0..common.start), offsets(&of(common)), &behind);
        let (to, source) = ((work.pointer(), &places), (values.pointer().cast_const(), &from));
        // SAFETY: indices were checked, so places lie in `work`, which is `out` or fresh; `values` has as many elements, all
        // of one dtype.
        unsafe {
            if accumulate {
                with_number!(work.dtype, T => {
                    transfer((to.0.cast::<T>(), to.1), (source.0.cast::<T>(), source.1), false, Number::plus);
                });
            } else {
                macro_rules! put {
                    ($ty:ty) => {
                        transfer(
                            (to.0.cast::<$ty>(), to.1),
                            (source.0.cast::<$ty>(), source.1),
                            false,
                            |_, x| x,
                        )
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
