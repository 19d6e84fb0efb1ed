//! Rows: reductions, scans and order.

#[doc(hidden)]
#[macro_export]
macro_rules! rows_reductions {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_contractions! { $callback [
            $($rows)*

            /// Sum over dims; truth values and integers are summed as i64
            [reduction sum _none] "sum" Sum (x) () { dims: Dims, keepdim: bool }
                { ty: types::sum, grad: Grad::Fn(gradient::sum), decompose: Some(decompose::keepdim),
                  eval: Eval::Reduce, samples: samples::reduction };
            /// Mean over dims
            [reduction mean _none] "mean" Mean (x) () { dims: Dims, keepdim: bool }
                { ty: types::mean, grad: Grad::Fn(gradient::mean), decompose: Some(decompose::mean), level: Level::Composite,
                  eval: Eval::Structural, samples: samples::mean };
            /// Largest element over dims; NaN if there is one
            [reduction amax _none] "amax" Amax (x) () { dims: Dims, keepdim: bool }
                { ty: types::amax, grad: Grad::Fn(gradient::amax), saves: Saves::InputsAndOutputs,
                  decompose: Some(decompose::keepdim), eval: Eval::Reduce, samples: samples::amax };
            /// exp(x) / Σ exp(x) over one dim
            [composite softmax _none] "softmax" Softmax (x) () { dim: usize }
                { ty: types::softmax, grad: Grad::Fn(gradient::softmax), saves: Saves::Outputs, level: Level::Composite,
                  decompose: Some(decompose::softmax), eval: Eval::Structural, samples: samples::softmax };
            /// x − log Σ exp(x) over one dim
            [composite log_softmax _none] "log_softmax" LogSoftmax (x) () { dim: usize }
                { ty: types::softmax, grad: Grad::Fn(gradient::log_softmax), saves: Saves::Outputs, level: Level::Composite,
                  decompose: Some(decompose::log_softmax), eval: Eval::Structural, samples: samples::log_softmax };
        ]}
    };
}
