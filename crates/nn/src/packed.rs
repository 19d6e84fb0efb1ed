//! Batches of sequences of several lengths.

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::{Result, Tensor};

/// A batch of sequences of several lengths, for recurrent layers: they go as far as each sequence goes, and their last
/// states are those at its end. Inside, the sequences lie padded side by side, in the order in which they were given.
///
/// ```
/// use kiln_nn::{Forward, GRU, pack_padded_sequence, pad_packed_sequence};
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let x = Tensor::ones([5, 2, 3], &Device::Cpu)?;
/// let packed = pack_padded_sequence(&x, &[4, 2], false, true)?;
/// let (y, _last) = GRU::new(3, 6)?.forward(&packed)?;
/// let (y, lengths) = pad_packed_sequence(&y, false, 0.0, None)?;
/// assert_eq!((y.shape().to_vec(), lengths), (vec![4, 2, 6], vec![4, 2]));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct PackedSequence {
    /// `[length of the longest, batch, …]`
    padded: Tensor,
    lengths: Vec<usize>,
}

/// Which steps sequences of these lengths have, as `[steps, batch, 1, …]` of this rank; `None` if they have all.
fn steps_there(like: &Tensor, steps: usize, lengths: &[usize]) -> Result<Option<Tensor>> {
    if lengths.iter().all(|length| *length >= steps) {
        return Ok(None);
    }
    let device = like.ty().device;
    let ends = Tensor::from_vec(lengths.iter().map(|length| *length as i64).collect(), [lengths.len()])?;
    let numbers = Tensor::arange(0, steps as i64, &device)?.unsqueeze(1)?;
    let mut there = numbers.lt(&ends.to(&device)?)?;
    while there.rank() < like.rank() {
        there = there.unsqueeze(-1)?;
    }
    Ok(Some(there))
}

impl PackedSequence {
    /// How many steps each sequence has.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// By step, how many sequences have it.
    pub fn batch_sizes(&self) -> Vec<usize> {
        let longest = self.lengths.iter().copied().max().unwrap_or(0);
        let with = |step: usize| self.lengths.iter().filter(|length| **length > step).count();
        (0..longest).map(with).collect()
    }

    /// The elements of all sequences, `[sum of the lengths, …]`: the first of each, the longest sequences first, then
    /// the second of each. PyTorch's `data`.
    #[track_caller]
    pub fn data(&self) -> Result<Tensor> {
        let _behalf = Loc::caller().on_behalf(crate::folder());
        let batch = self.lengths.len();
        let mut order: Vec<usize> = (0..batch).collect();
        order.sort_by_key(|sequence| std::cmp::Reverse(self.lengths[*sequence]));
        let sizes = self.batch_sizes();
        let places = sizes.iter().enumerate().flat_map(|(step, &size)| {
            order[..size].iter().map(move |sequence| (step * batch + sequence) as i64)
        });
        let places: Vec<i64> = places.collect();
        let count = places.len();
        let places = Tensor::from_vec(places, [count])?.to(&self.padded.ty().device)?;
        let mut shape: Vec<i64> = self.padded.shape()[1..].iter().map(|size| *size as i64).collect();
        shape[0] = -1;
        self.padded.reshape(shape)?.index_select(0, &places)
    }

    /// The same lengths with what a function makes of all elements, padding included, `[steps, batch, …]`: an
    /// embedding, for example.
    #[track_caller]
    pub fn map(&self, function: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<PackedSequence> {
        let made = function(&self.padded)?;
        let (before, after) = (self.padded.shape(), made.shape());
        if after.rank() < 2 || after[..2] != before[..2] {
            let why = Why::shape("the result's first two dims", &before[..2], after);
            return Err(Error::op("PackedSequence::map", why, Loc::caller()));
        }
        Ok(self.with_padded(made))
    }

    pub(crate) fn padded(&self) -> &Tensor {
        &self.padded
    }

    pub(crate) fn with_padded(&self, padded: Tensor) -> PackedSequence {
        PackedSequence { padded, lengths: self.lengths.clone() }
    }

    /// The lengths as recurrent ops take them; `None` if all are equal.
    pub(crate) fn lengths_tensor(&self) -> Result<Option<Tensor>> {
        if self.lengths.iter().all(|length| *length == self.lengths[0]) {
            return Ok(None);
        }
        let lengths = self.lengths.iter().map(|length| *length as i64).collect();
        Tensor::from_vec(lengths, [self.lengths.len()])?.to(&self.padded.ty().device).map(Some)
    }
}

/// Packs sequences that lie padded as `[steps, batch, …]`, or `[batch, steps, …]` with `batch_first`. With
/// `enforce_sorted` the longest must come first. What lies behind the ends of sequences has no influence on anything.
#[track_caller]
pub fn pack_padded_sequence(
    x: &Tensor,
    lengths: &[usize],
    batch_first: bool,
    enforce_sorted: bool,
) -> Result<PackedSequence> {
    let loc = Loc::caller();
    let _behalf = loc.on_behalf(crate::folder());
    let fail = |why| Err(Error::op("pack_padded_sequence", why, loc));
    if x.rank() < 2 {
        return fail(Why::Rank { argument: "x", expected: "2 or more", got: x.rank() });
    }
    let steps_first = if batch_first { x.transpose(0, 1)? } else { x.clone() };
    let (steps, batch) = (steps_first.size(0)?, steps_first.size(1)?);
    if lengths.len() != batch {
        return fail(Why::sizes("the number of lengths and the batch size", lengths.len(), batch));
    }
    if let Some(&length) = lengths.iter().find(|length| !(1..=steps).contains(*length)) {
        let expected = "from 1 to the number of steps";
        return fail(Why::Number { argument: "a length", expected, got: length as f64 });
    }
    if enforce_sorted && !lengths.is_sorted_by(|a, b| a >= b) {
        let expected = "sorted, longest first (or enforce_sorted false)";
        return fail(Why::Operand { argument: "lengths", expected });
    }
    let Some(&longest) = lengths.iter().max() else {
        return fail(Why::none("the batch"));
    };
    let part = steps_first.narrow(0, 0, longest)?;
    let padded = match steps_there(&part, longest, lengths)? {
        Some(there) => part.masked_fill(&there.logical_not()?, 0.0)?,
        None => part,
    };
    Ok(PackedSequence { padded, lengths: lengths.to_vec() })
}

/// The sequences side by side, `[steps, batch, …]` or `[batch, steps, …]` with `batch_first`, with `padding_value`
/// behind their ends, and how long they are. There are as many steps as the longest sequence has, or `total_length`.
#[track_caller]
pub fn pad_packed_sequence(
    packed: &PackedSequence,
    batch_first: bool,
    padding_value: f64,
    total_length: Option<usize>,
) -> Result<(Tensor, Vec<usize>)> {
    let loc = Loc::caller();
    let _behalf = loc.on_behalf(crate::folder());
    let longest = packed.padded.size(0)?;
    let total = total_length.unwrap_or(longest);
    if total < longest {
        let (argument, expected) = ("total_length", "at least the length of the longest sequence");
        let why = Why::Number { argument, expected, got: total as f64 };
        return Err(Error::op("pad_packed_sequence", why, loc));
    }
    let mut padded = match steps_there(&packed.padded, longest, &packed.lengths)? {
        Some(there) => packed.padded.masked_fill(&there.logical_not()?, padding_value)?,
        None => packed.padded.clone(),
    };
    if total > longest {
        let mut shape = padded.shape();
        shape[0] = total - longest;
        let ty = padded.ty();
        let behind = Tensor::full_of(shape, padding_value, ty.dtype, &ty.device)?;
        padded = Tensor::cat(&[padded, behind], 0)?;
    }
    let padded = if batch_first { padded.transpose(0, 1)? } else { padded };
    Ok((padded, packed.lengths.clone()))
}
