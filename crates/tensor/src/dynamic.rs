//! Dims whose sizes will change from call to call: what a user knows and a compiler can't.

use std::ops::{Bound, RangeBounds};

use kiln_ir::{Error, Loc, Result, Why};

use crate::Tensor;
use crate::methods::normalise_dim;

/// A dim of a tensor that was marked, with the sizes it may have.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct DynamicDim {
    /// Which dim.
    pub dim: usize,
    /// Its least size, 2 or more.
    pub least: usize,
    /// Its largest size.
    pub most: usize,
}

impl Tensor {
    /// Says that a dim will have other sizes in other calls of a compiled function, all within a range that
    /// leaves out 0 and 1: sizes that are new get a plan at once, not when they come for the second time.
    ///
    /// ```
    /// use kiln_tensor::{Device, Result, Tensor};
    /// # fn main() -> Result<()> {
    /// let x = Tensor::ones([8, 3], &Device::Cpu)?;
    /// x.mark_dynamic(0, 2..=64)?;
    /// assert_eq!((x.dynamic_dims()[0].least, x.dynamic_dims()[0].most), (2, 64));
    /// let error = x.mark_dynamic(1, 4..).unwrap_err().to_string();
    /// assert!(error.starts_with("mark_dynamic: size 3 of dim 1 is outside the declared range 4.."), "{error}");
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn mark_dynamic(&self, dim: i64, sizes: impl RangeBounds<usize>) -> Result<()> {
        let loc = Loc::caller();
        let fail = |why| Err(Error::op("mark_dynamic", why, loc));
        let dim = normalise_dim("mark_dynamic", dim, self.rank(), loc)?;
        let Some(&size) = self.shape().get(dim) else { return fail(Why::Dim { dim: dim as i64, rank: 0 }) };
        let least = match sizes.start_bound() {
            Bound::Included(&least) => least,
            Bound::Excluded(&below) => below.saturating_add(1),
            Bound::Unbounded => 2,
        };
        let most = match sizes.end_bound() {
            Bound::Included(&most) => most,
            Bound::Excluded(&above) => above.saturating_sub(1),
            Bound::Unbounded => usize::MAX,
        };
        if least < 2 {
            let expected = "2 or more (sizes 0 and 1 are always specialised)";
            return fail(Why::Number { argument: "the lower bound", expected, got: least as f64 });
        }
        if !(least..=most).contains(&size) {
            let most = (most < usize::MAX).then_some(most);
            return fail(Why::Range { dim, size, least, most });
        }
        self.with_meta(|meta| {
            meta.dynamic.retain(|other| other.dim != dim);
            meta.dynamic.push(DynamicDim { dim, least, most });
            meta.dynamic.sort_unstable_by_key(|mark| mark.dim);
        });
        Ok(())
    }

    /// The dims that were marked.
    pub fn dynamic_dims(&self) -> Vec<DynamicDim> {
        self.slot.record.lock().meta.as_ref().map_or_else(Vec::new, |meta| meta.dynamic.clone())
    }
}
