//! Rows by iteration: `for row in &x`.

use std::iter::FusedIterator;

use kiln_ir::{Error, Loc, Result, Why};

use crate::Tensor;

/// The slices of a tensor's first dim, in order, as views: see [`Tensor::iter`].
pub struct Rows<'a> {
    tensor: &'a Tensor,
    next: usize,
    end: usize,
    loc: Loc,
    /// A 0-d tensor has no rows: told once.
    error: Option<Error>,
}

impl Iterator for Rows<'_> {
    type Item = Result<Tensor>;

    fn next(&mut self) -> Option<Result<Tensor>> {
        if let Some(error) = self.error.take() {
            return Some(Err(error));
        }
        let at = self.next;
        (at < self.end).then(|| {
            self.next += 1;
            self.tensor.select_at(0, at as i64, self.loc)
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.end - self.next + usize::from(self.error.is_some());
        (left, Some(left))
    }
}

impl ExactSizeIterator for Rows<'_> {}
impl FusedIterator for Rows<'_> {}

impl<'a> IntoIterator for &'a Tensor {
    type Item = Result<Tensor>;
    type IntoIter = Rows<'a>;

    #[track_caller]
    fn into_iter(self) -> Rows<'a> {
        let loc = Loc::caller();
        let shape = self.shape();
        let error = shape
            .is_empty()
            .then(|| Error::op("iter", Why::Rank { argument: "x", expected: "1 or more", got: 0 }, loc));
        Rows { tensor: self, next: 0, end: shape.first().copied().unwrap_or(0), loc, error }
    }
}

impl Tensor {
    /// The slices of the first dim, in order, as views; `for row in &x` is the same. An error for a 0-d tensor.
    ///
    /// ```
    /// # use kiln_tensor::{Device, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let x = Tensor::new(&[[1i64, 2], [3, 4]], &Device::Cpu)?;
    /// for (i, row) in x.iter()?.enumerate() {
    ///     assert_eq!(row?.to_vec::<i64>()?[0], 2 * i as i64 + 1);
    /// }
    /// for row in &x {
    ///     row?.mul_(10)?; // a view: x itself is changed
    /// }
    /// assert_eq!(x.to_vec::<i64>()?, [10, 20, 30, 40]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn iter(&self) -> Result<Rows<'_>> {
        let mut rows = self.into_iter();
        match rows.error.take() {
            Some(error) => Err(error),
            None => Ok(rows),
        }
    }
}
