//! Rows: matrix products and convolution.

#[doc(hidden)]
#[macro_export]
macro_rules! rows_contractions {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_shapes! { $callback [
            $($rows)*

            /// Matrix product of [m, k] and [k, n]
            [contraction mm _none] "mm" Mm (x, y) () {}
                { ty: types::mm, grad: Grad::Fn(gradient::mm), saves: Saves::Inputs, eval: Eval::Structural,
                  samples: samples::mm };
            /// input + x · y
            [contraction addmm _none] "addmm" Addmm (input, x, y) () {}
                { ty: types::addmm, grad: Grad::Fn(gradient::addmm), saves: Saves::Inputs, level: Level::Composite,
                  decompose: Some(decompose::addmm), eval: Eval::Structural, samples: samples::addmm };
            /// x · weightᵀ + bias, over the last dim of x
            [contraction linear _none] "linear" Linear (x, weight) (bias) {}
                { ty: types::linear, grad: Grad::Fn(gradient::linear), saves: Saves::Inputs, level: Level::Composite,
                  decompose: Some(decompose::linear), eval: Eval::Structural, samples: samples::linear };
        ]}
    };
}
