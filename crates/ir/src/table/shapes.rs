//! Rows: views, indexing, joining.

#[doc(hidden)]
#[macro_export]
macro_rules! rows_shapes {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_creation! { $callback [
            $($rows)*

            /// The same elements in another shape
            [view reshape _none] "reshape" Reshape (x) () { shape: Shape }
                { ty: types::reshape, grad: Grad::Fn(gradient::reshape), eval: Eval::Structural, samples: samples::reshape };
            /// Dims in another order
            [view permute _none] "permute" Permute (x) () { dims: Dims }
                { ty: types::permute, grad: Grad::Fn(gradient::permute), eval: Eval::Structural, samples: samples::permute };
            /// Two dims swapped
            [view transpose _none] "transpose" Transpose (x) () { dim0: usize, dim1: usize }
                { ty: types::transpose, grad: Grad::Fn(gradient::transpose), level: Level::Composite,
                  decompose: Some(decompose::transpose), eval: Eval::Structural, samples: samples::transpose };
            /// Dims of size 1 repeated, new leading dims added
            [view expand _none] "expand" Expand (x) () { shape: Shape }
                { ty: types::expand, grad: Grad::Fn(gradient::expand), eval: Eval::Structural, samples: samples::expand };
            /// Elements start, start + step, … before end of one dim
            [view slice _none] "slice" Slice (x) () { dim: usize, start: usize, end: usize, step: usize }
                { ty: types::slice, grad: Grad::Fn(gradient::slice), eval: Eval::Structural, samples: samples::slice };
            /// The same elements, cut off from the gradient
            [view detach _none] "detach" Detach (x) () {}
                { ty: types::same, grad: Grad::Zero, decompose: Some(decompose::identity), level: Level::Composite,
                  eval: Eval::Structural, samples: samples::unary };
            /// x with the elements of a slice replaced by src
            [index slice_scatter _none] "slice_scatter" SliceScatter (x, src) () { dim: usize, start: usize, end: usize, step: usize }
                { ty: types::slice_scatter, grad: Grad::Fn(gradient::slice_scatter), eval: Eval::Structural,
                  samples: samples::slice_scatter };
            /// Tensors joined along one dim
            [index cat _none] "cat" Cat (tensors) () { dim: usize }
                { ty: types::cat, grad: Grad::Fn(gradient::cat), variadic: true, eval: Eval::Structural, samples: samples::cat };
            /// The elements of x at index along one dim
            [index gather _none] "gather" Gather (x, index) () { dim: usize }
                { ty: types::gather, grad: Grad::Fn(gradient::gather), saves: Saves::Inputs, eval: Eval::Structural,
                  samples: samples::gather };
            /// zeros of a shape, with src added at index along one dim
            [index gather_backward _none] "gather_backward" GatherBackward (src, index) () { dim: usize, size: usize }
                { ty: types::gather_backward, grad: Grad::Fn(gradient::gather_backward), saves: Saves::Inputs,
                  eval: Eval::Structural, samples: samples::gather_backward };
        ]}
    };
}
