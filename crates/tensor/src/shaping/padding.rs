//! Padding: elements before and after those of the last dims.

use kiln_ir::{Loc, Op, Pairs, Result, Scalar, Why};

use crate::Tensor;
use crate::dispatch::dispatch_tensor;
use crate::hook::Arg;
use crate::methods::Operand;

impl Tensor {
    /// `value` before and after the elements of the last dims: widths in pairs (before, after), the last dim's
    /// first, as PyTorch takes them. Negative widths cut off.
    ///
    /// ```
    /// # use kiln_tensor::{Device, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let x = Tensor::new(&[[1.0f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
    /// assert_eq!(x.pad(&[1, 0], 9.0)?.to_vec::<f32>()?, [9.0, 1.0, 2.0, 9.0, 3.0, 4.0]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn pad(&self, widths: &[i64], value: impl Into<Scalar>) -> Result<Tensor> {
        let loc = Loc::caller();
        let (inner, widths) = self.widths("constant_pad_nd", widths, loc)?;
        let op = Op::ConstantPadNd { widths };
        dispatch_tensor(&op, &[Arg::Tensor(&inner), Operand::from(value.into()).arg()], false, loc)
    }

    /// [`pad`](Tensor::pad) with the elements mirrored at both ends, without the outermost ones.
    #[track_caller]
    pub fn reflection_pad(&self, widths: &[i64]) -> Result<Tensor> {
        let loc = Loc::caller();
        let (inner, widths) = self.widths("reflection_pad", widths, loc)?;
        inner.unary(Op::ReflectionPad { widths }, loc)
    }

    /// [`pad`](Tensor::pad) with the outermost elements repeated.
    #[track_caller]
    pub fn replication_pad(&self, widths: &[i64]) -> Result<Tensor> {
        let loc = Loc::caller();
        // Where a negative width leaves nothing, what the other end repeats is the last element cut off.
        let shape = self.shape();
        let mut widths = widths.to_vec();
        for (pair, &size) in widths.chunks_exact_mut(2).zip(shape.iter().rev()) {
            let most = size as i64 - 1;
            for (cut, other) in [(0, 1), (1, 0)] {
                if most >= 0 && pair[cut] < -most && pair[other] > -most - 1 - pair[cut] {
                    (pair[cut], pair[other]) = (-most, pair[other] + pair[cut] + most);
                }
            }
        }
        let (inner, widths) = self.widths("replication_pad", &widths, loc)?;
        inner.unary(Op::ReplicationPad { widths }, loc)
    }

    /// What negative widths leave of the tensor, and the widths before and after each dim.
    fn widths(&self, op: &str, widths: &[i64], loc: Loc) -> Result<(Tensor, Pairs)> {
        let shape = self.shape();
        let rank = shape.rank();
        if !widths.len().is_multiple_of(2) || widths.len() / 2 > rank {
            let why = Why::sizes("the number of widths and twice the rank", widths.len(), 2 * rank);
            return Err(self.refusal(op, why, loc));
        }
        let (mut before, mut after) = (vec![0; rank], vec![0; rank]);
        let mut inner = self.clone();
        for (i, pair) in widths.chunks(2).enumerate() {
            let d = rank - 1 - i;
            let cut = |width: i64| width.min(0).unsigned_abs() as usize;
            let (first, last) = (cut(pair[0]), cut(pair[1]));
            if first.saturating_add(last) > shape[d] {
                let why = Why::Index { index: pair[0].min(pair[1]), size: shape[d] };
                return Err(self.refusal(op, why, loc));
            }
            if first + last > 0 {
                inner = inner.sliced(d, first, shape[d] - last, loc)?;
            }
            (before[d], after[d]) = (pair[0].max(0) as usize, pair[1].max(0) as usize);
        }
        Ok((inner, Pairs::new(&before, &after)))
    }
}
