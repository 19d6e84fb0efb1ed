//! Iteration spaces: what a kernel goes through, as runs of dims that are kept or reduced.

use kiln_ir::Shape;
use kiln_plan::loops::Axis;

use crate::schedule::is_tall;

/// A run of dims, all kept or all reduced.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    pub count: i64,
    pub inner: bool,
    /// Whether it is gone through from the end.
    pub reversed: bool,
}

/// The iteration space of a kernel: segments in the order of the tensors' dims, none of count 1.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Space(pub Vec<Segment>);

impl Space {
    /// The space of a tensor whose `dims` are reduced.
    pub fn of(shape: &Shape, dims: &[usize]) -> Space {
        let mut segments: Vec<Segment> = Vec::new();
        for (d, &size) in shape.iter().enumerate().filter(|(_, size)| **size != 1) {
            let inner = dims.contains(&d);
            match segments.last_mut() {
                Some(last) if last.inner == inner => last.count *= size as i64,
                _ => segments.push(Segment { count: size as i64, inner, reversed: false }),
            }
        }
        Space(segments)
    }

    /// The same, its inner dims gone through from the end.
    pub fn reversed(mut self) -> Space {
        self.0.iter_mut().for_each(|segment| segment.reversed = segment.inner);
        self
    }

    pub fn is_reversed(&self) -> bool {
        self.0.iter().any(|segment| segment.reversed)
    }

    pub fn has_inner(&self) -> bool {
        self.0.iter().any(|s| s.inner)
    }

    pub fn count(&self, wanted: impl Fn(&Segment) -> bool) -> i64 {
        self.0.iter().filter(|s| wanted(s)).map(|s| s.count).product()
    }

    pub fn outer(&self) -> i64 {
        self.count(|s| !s.inner)
    }

    pub fn inner(&self) -> i64 {
        self.count(|s| s.inner)
    }

    pub fn total(&self) -> i64 {
        self.count(|_| true)
    }

    /// Whether its reductions are cut into chunks.
    pub fn is_tall(&self) -> bool {
        self.has_inner() && is_tall(self.outer(), self.inner())
    }

    /// The space that serves kernels of both spaces, if there is one.
    pub fn join(&self, other: &Space) -> Option<Space> {
        match (self.has_inner(), other.has_inner()) {
            (false, false) | (true, true) => (self == other).then(|| self.clone()),
            (true, false) => {
                let fits = other.total() == self.total() || other.total() == self.outer();
                fits.then(|| self.clone())
            }
            (false, true) => other.join(self),
        }
    }
}

impl Space {
    pub(super) fn axes(&self) -> Vec<Axis> {
        self.0.iter().map(|s| Axis { extent: s.count, inner: s.inner }).collect()
    }
}
