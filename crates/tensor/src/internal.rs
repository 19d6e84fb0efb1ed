//! What runs do with tensors and lists: mark them, make them ready, put them on the tape. For the crates of the
//! compiler; `kiln` does not hand it on, so that a user's program can't take a tensor out from under its run.

use kiln_ir::Result;

use crate::hook::Tag;
use crate::tensor::{Ready, Seen};
use crate::{Tensor, TensorList};

/// A trait that hands on methods the type keeps to this crate.
macro_rules! opened {
    ($(#[$doc:meta])* trait $State:ident for $Type:ident;
    made by { $($(#[$made_doc:meta])* fn $made:ident($($made_arg:ident: $MadeArg:ty),*);)* }
    methods {
        $($(#[$method_doc:meta])* fn $method:ident(&self $(, $arg:ident: $Arg:ty)*) $(-> $Returned:ty)?;)*
    }) => {
        $(#[$doc])*
        pub trait $State: Sized {
            $($(#[$made_doc])* fn $made($($made_arg: $MadeArg),*) -> Self;)*
            $($(#[$method_doc])* fn $method(&self $(, $arg: $Arg)*) $(-> $Returned)?;)*
        }

        impl $State for $Type {
            $(
                #[inline]
                fn $made($($made_arg: $MadeArg),*) -> $Type {
                    $Type::$made($($made_arg),*)
                }
            )*
            $(
                #[inline]
                fn $method(&self $(, $arg: $Arg)*) $(-> $Returned)? {
                    self.$method($($arg),*)
                }
            )*
        }
    };
}

opened! {
    /// The state of a tensor: ready or lazy, whose it is, what it is to autograd.
    trait TensorState for Tensor;
    made by {
        /// A tensor that is ready.
        fn from_ready(ready: Ready);
        /// A tensor that the run named in the tag will make ready.
        fn lazy(tag: Tag, requires_grad: bool);
    }
    methods {
        /// Makes a lazy tensor ready; one that is stays as it is. For the run that made it.
        fn publish(&self, ready: Ready);
        /// The ready state, if it is ready.
        fn try_ready(&self) -> Option<Seen<'_>>;
        /// The ready state; makes the tensor's run finish first if need be.
        fn ready(&self) -> Result<Seen<'_>>;
        /// The run that knows this tensor, and its number there.
        fn tag(&self) -> Tag;
        /// Sets the tag.
        fn set_tag(&self, tag: Tag);
        /// How many handles to this tensor there are; `usize::MAX` for "more than one" where only the thread of a run in
        /// progress knows.
        fn references(&self) -> usize;
        /// Asks for the tensor's own state to be near when its turn comes.
        fn prefetch(&self);
        /// Sets whether gradients are wanted, without any check: for runs, which know.
        fn mark_requires_grad(&self, on: bool);
        /// What `requires_grad_` does to a leaf, without any check: for runs, which know.
        fn mark_leaf(&self, on: bool);
        /// Sets the flag of a leaf that a run is yet to make: for that run.
        fn mark_lazy_leaf(&self, on: bool);
        /// Becomes what `other` is: its memory, its place on the tape. Only for a lazy tensor whose run was executed op by
        /// op.
        fn adopt(&self, other: &Self) -> Result<()>;
        /// From now on the tensor is a view of another, or of what that one is a view of, and its history is true.
        fn become_view_of(&self, other: &Self);
        /// Has the tape keep the gradient that `retain_grad` asked for: for a run that executed a recording op by op.
        fn watch_for_retained(&self);
        /// Whether a hook waits for this leaf's gradient.
        fn has_hooks(&self) -> bool;
    }
}

opened! {
    /// The state of a list of tensors.
    trait ListState for TensorList;
    made by {
        /// A list that a run will make.
        fn lazy(tag: Tag);
    }
    methods {
        /// Gives a lazy list its tensors.
        fn publish(&self, tensors: Vec<Tensor>);
        /// The tensors, unless the list is still lazy.
        fn try_items(&self) -> Option<&[Tensor]>;
        /// The tensors in order, each asked for from memory a little before its turn: the elements of a long list are
        /// scattered, and going from one to the next would wait for every one of them. Empty while lazy.
        fn walk(&self) -> impl Iterator<Item = &Tensor>;
        /// The run that knows this list.
        fn tag(&self) -> Tag;
        /// Sets the tag.
        fn set_tag(&self, tag: Tag);
        /// How many handles to this list there are.
        fn references(&self) -> usize;
    }
}
