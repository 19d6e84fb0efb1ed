//! The types of a list's elements, kept as runs of equal ones: a list of a thousand parameters mostly has a few
//! types, and whoever asks about it asks once for each of them.

use std::fmt;
use std::ops::{Index, Range};
use std::sync::Arc;

use crate::TensorTy;

/// The types of a list's elements. Two that are equal have equal runs.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct ListTy(Arc<[Run]>);

#[derive(Clone, PartialEq, Eq, Hash)]
struct Run {
    ty: TensorTy,
    /// The element behind the run's last one.
    end: usize,
}

impl ListTy {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.0.last().map_or(0, |run| run.end)
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The type of an element, if there are so many.
    pub fn get(&self, index: usize) -> Option<&TensorTy> {
        let run = match &*self.0 {
            [only] => usize::from(index >= only.end),
            runs => runs.partition_point(|run| run.end <= index),
        };
        self.0.get(run).map(|run| &run.ty)
    }

    /// The type of the first element.
    pub fn first(&self) -> Option<&TensorTy> {
        self.0.first().map(|run| &run.ty)
    }

    /// The type of every element.
    pub fn iter(&self) -> impl Iterator<Item = &TensorTy> + Clone {
        self.runs().flat_map(|(ty, range)| std::iter::repeat_n(ty, range.len()))
    }

    /// Runs of equal elements, in order: their type, and which they are.
    pub fn runs(&self) -> impl Iterator<Item = (&TensorTy, Range<usize>)> + Clone {
        let starts = std::iter::once(0).chain(self.0.iter().map(|run| run.end));
        self.0.iter().zip(starts).map(|(run, start)| (&run.ty, start..run.end))
    }

    /// The types that occur, each run's once.
    pub fn kinds(&self) -> impl Iterator<Item = &TensorTy> + Clone {
        self.0.iter().map(|run| &run.ty)
    }

    /// Whether some element has this type.
    pub fn contains(&self, ty: &TensorTy) -> bool {
        self.kinds().any(|kind| kind == ty)
    }

    /// Runs of elements over which none of these lists, all of one length, changes its type.
    pub fn common_runs(lists: &[&ListTy]) -> Vec<Range<usize>> {
        let mut ends: Vec<usize> = lists.iter().flat_map(|list| list.0.iter().map(|run| run.end)).collect();
        ends.sort_unstable();
        ends.dedup();
        let starts = std::iter::once(0).chain(ends.iter().copied());
        starts.zip(&ends).map(|(start, &end)| start..end).collect()
    }
}

/// Puts the types of a list together, run by run.
#[derive(Default)]
pub struct ListTyBuilder(Vec<Run>);

impl ListTyBuilder {
    /// Adds `count` elements of a type.
    pub fn push(&mut self, ty: &TensorTy, count: usize) {
        match self.0.last_mut() {
            _ if count == 0 => {}
            Some(last) if last.ty == *ty => last.end += count,
            last => {
                let end = last.map_or(0, |last| last.end) + count;
                self.0.push(Run { ty: ty.clone(), end });
            }
        }
    }

    /// Adds another element of the type that was added last.
    pub(crate) fn again(&mut self) {
        if let Some(last) = self.0.last_mut() {
            last.end += 1;
        }
    }

    /// The list.
    pub fn finish(self) -> ListTy {
        ListTy(self.0.into())
    }
}

impl Index<usize> for ListTy {
    type Output = TensorTy;

    fn index(&self, index: usize) -> &TensorTy {
        match self.get(index) {
            Some(ty) => ty,
            None => panic!("element {index} of a list of {}", self.len()),
        }
    }
}

impl FromIterator<TensorTy> for ListTy {
    fn from_iter<I: IntoIterator<Item = TensorTy>>(items: I) -> ListTy {
        let mut list = ListTyBuilder::default();
        items.into_iter().for_each(|ty| list.push(&ty, 1));
        list.finish()
    }
}

impl fmt::Display for ListTy {
    /// `list(10 x f32[1024, 1024], 2 x f32[8])`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("list(")?;
        for (i, (ty, range)) in self.runs().enumerate() {
            write!(f, "{}{} x {ty}", if i > 0 { ", " } else { "" }, range.len())?;
        }
        f.write_str(")")
    }
}

impl fmt::Debug for ListTy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn list(lengths: &[usize]) -> ListTy {
        lengths.iter().map(|&n| TensorTy::new(DType::F32, [n])).collect()
    }

    #[test]
    fn elements_are_where_they_were_put() {
        for lengths in [&[][..], &[4], &[4, 4, 4], &[4, 4, 5, 4, 4, 6]] {
            let list = list(lengths);
            assert_eq!(list.len(), lengths.len());
            let each: Vec<usize> = list.iter().map(|ty| ty.shape[0]).collect();
            assert_eq!(each, lengths);
            let by_index: Vec<usize> = (0..lengths.len()).map(|i| list[i].shape[0]).collect();
            assert_eq!(by_index, lengths);
            assert_eq!(list.get(lengths.len()), None);
        }
    }

    #[test]
    fn equal_lists_have_equal_runs_however_they_were_made() {
        let mut builder = ListTyBuilder::default();
        builder.push(&TensorTy::new(DType::F32, [4]), 1);
        builder.push(&TensorTy::new(DType::F32, [4]), 2);
        builder.push(&TensorTy::new(DType::F32, [9]), 0);
        builder.again();
        builder.push(&TensorTy::new(DType::F32, [5]), 1);
        assert_eq!(builder.finish(), list(&[4, 4, 4, 4, 5]));
        assert_eq!(list(&[4, 4, 5]).to_string(), "list(2 x f32[4], 1 x f32[5])");
    }

    #[test]
    fn common_runs_end_where_any_list_changes() {
        let (a, b) = (list(&[1, 1, 1, 2, 2]), list(&[3, 4, 4, 4, 4]));
        assert_eq!(ListTy::common_runs(&[&a, &b]), [0..1, 1..3, 3..5]);
        assert_eq!(ListTy::common_runs(&[&list(&[])]), []);
    }
}
