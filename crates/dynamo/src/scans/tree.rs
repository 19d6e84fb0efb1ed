//! Structures of tensors: what a scan carries, takes apart and puts together.

use kiln_tensor::Tensor;

/// Tensors in a structure: a tensor, nothing, or tuples, arrays, vectors and options of those.
pub trait Tree: Sized {
    /// Appends its tensors, in order.
    fn flatten(&self, into: &mut Vec<Tensor>);
    /// The same structure with other tensors, as many as it has; `None` if there are fewer.
    fn rebuild(&self, from: &mut dyn Iterator<Item = Tensor>) -> Option<Self>;
}

impl Tree for Tensor {
    fn flatten(&self, into: &mut Vec<Tensor>) {
        into.push(self.clone());
    }
    fn rebuild(&self, from: &mut dyn Iterator<Item = Tensor>) -> Option<Tensor> {
        from.next()
    }
}

impl<T: Tree> Tree for Vec<T> {
    fn flatten(&self, into: &mut Vec<Tensor>) {
        self.iter().for_each(|item| item.flatten(into));
    }
    fn rebuild(&self, from: &mut dyn Iterator<Item = Tensor>) -> Option<Vec<T>> {
        self.iter().map(|item| item.rebuild(from)).collect()
    }
}

impl<T: Tree, const N: usize> Tree for [T; N] {
    fn flatten(&self, into: &mut Vec<Tensor>) {
        self.iter().for_each(|item| item.flatten(into));
    }
    fn rebuild(&self, from: &mut dyn Iterator<Item = Tensor>) -> Option<[T; N]> {
        let items: Option<Vec<T>> = self.iter().map(|item| item.rebuild(from)).collect();
        items?.try_into().ok()
    }
}

impl<T: Tree> Tree for Option<T> {
    fn flatten(&self, into: &mut Vec<Tensor>) {
        self.iter().for_each(|item| item.flatten(into));
    }
    fn rebuild(&self, from: &mut dyn Iterator<Item = Tensor>) -> Option<Option<T>> {
        match self {
            Some(item) => item.rebuild(from).map(Some),
            None => Some(None),
        }
    }
}

macro_rules! tuples {
    ($(($($T:ident $at:tt),*))*) => { $(
        impl<$($T: Tree),*> Tree for ($($T,)*) {
            #[allow(unused_variables, reason = "there is a tuple of nothing")]
            fn flatten(&self, into: &mut Vec<Tensor>) {
                $(self.$at.flatten(into);)*
            }
            #[allow(unused_variables, reason = "there is a tuple of nothing")]
            fn rebuild(&self, from: &mut dyn Iterator<Item = Tensor>) -> Option<($($T,)*)> {
                Some(($(self.$at.rebuild(from)?,)*))
            }
        }
    )* };
}
tuples! { () (A 0) (A 0, B 1) (A 0, B 1, C 2) (A 0, B 1, C 2, D 3) }

/// The tensors of a structure.
pub(super) fn leaves(tree: &impl Tree) -> Vec<Tensor> {
    let mut leaves = Vec::new();
    tree.flatten(&mut leaves);
    leaves
}
