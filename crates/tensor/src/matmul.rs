//! Products of vectors, matrices and stacks of matrices.

use kiln_ir::{Error, Loc, Op, Result, Scalar, Why};

use crate::Tensor;
use crate::composed::composed_of;
use crate::dispatch::dispatch_tensor;
use crate::hook::Arg;

impl Tensor {
    fn product(&self, op: Op, other: &Tensor, loc: Loc) -> Result<Tensor> {
        dispatch_tensor(&op, &[Arg::Tensor(self), Arg::Tensor(other)], false, loc)
    }

    fn check_rank(&self, op: &str, argument: &'static str, rank: usize, loc: Loc) -> Result<()> {
        let expected = if rank == 1 { "1" } else { "2" };
        match self.rank() {
            got if got == rank => Ok(()),
            got => Err(Error::op(op, Why::Rank { argument, expected, got }, loc)),
        }
    }

    /// Matrix products of two stacks `[b, m, k]` and `[b, k, n]`.
    #[track_caller]
    pub fn bmm(&self, other: &Tensor) -> Result<Tensor> {
        self.product(Op::Bmm {}, other, Loc::caller())
    }

    /// This tensor + x · y, for stacks of matrices.
    #[track_caller]
    pub fn baddbmm(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let args = [Arg::Tensor(self), Arg::Tensor(x), Arg::Tensor(y)];
        dispatch_tensor(&Op::Baddbmm {}, &args, false, Loc::caller())
    }

    /// beta · this tensor + alpha · (x · y), for stacks of matrices. With beta 0 this tensor's values don't
    /// count, not even NaN.
    #[track_caller]
    pub fn baddbmm_scaled(
        &self,
        x: &Tensor,
        y: &Tensor,
        beta: impl Into<Scalar>,
        alpha: impl Into<Scalar>,
    ) -> Result<Tensor> {
        // The factors are the tensors': those of integers are truncated.
        let factor = |x: Scalar| if self.dtype().is_float() { x } else { Scalar::Int(x.as_i64()) };
        let (beta, alpha) = (factor(beta.into()), factor(alpha.into()));
        composed_of([self, x, y], |[own, x, y]| {
            let product = x.bmm(y)?.mul(alpha)?;
            if beta.as_f64() == 0.0 { own.zeros_like()?.add(&product) } else { own.mul(beta)?.add(&product) }
        })
    }

    /// The matrix product over the last two dims, the dims before them broadcast. A tensor of one dim is a
    /// vector: a row on the left, a column on the right, and that dim goes away.
    #[track_caller]
    pub fn matmul(&self, other: &Tensor) -> Result<Tensor> {
        self.product(Op::Matmul {}, other, Loc::caller())
    }

    /// A matrix times a vector.
    #[track_caller]
    pub fn mv(&self, vector: &Tensor) -> Result<Tensor> {
        let loc = Loc::caller();
        self.check_rank("mv", "x", 2, loc)?;
        vector.check_rank("mv", "vector", 1, loc)?;
        self.product(Op::Matmul {}, vector, loc).map_err(|e| e.named("mv"))
    }

    /// The sum of the products of two vectors' elements.
    #[track_caller]
    pub fn dot(&self, other: &Tensor) -> Result<Tensor> {
        let loc = Loc::caller();
        self.check_rank("dot", "x", 1, loc)?;
        other.check_rank("dot", "y", 1, loc)?;
        self.product(Op::Matmul {}, other, loc).map_err(|e| e.named("dot"))
    }

    /// The products of all pairs of two vectors' elements.
    #[track_caller]
    pub fn outer(&self, other: &Tensor) -> Result<Tensor> {
        let loc = Loc::caller();
        self.check_rank("outer", "x", 1, loc)?;
        other.check_rank("outer", "y", 1, loc)?;
        self.reshape([-1, 1])?.product(Op::Mul {}, other, loc)
    }
}
