//! Rows: normalisation, pooling, attention, losses.

#[doc(hidden)]
#[macro_export]
macro_rules! rows_nn {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_lists! { $callback [
            $($rows)*

            /// −input[i, target[i]], reduced over the samples whose target is not ignore_index
            [composite nll_loss _none] "nll_loss" NllLoss (input, target) () { reduction: Reduction, ignore_index: i64 }
                { ty: types::nll_loss, grad: Grad::Fn(gradient::nll_loss), saves: Saves::Inputs, level: Level::Composite,
                  decompose: Some(decompose::nll_loss), eval: Eval::Structural, samples: samples::nll_loss };
            /// nll_loss of log_softmax
            [composite cross_entropy _none] "cross_entropy" CrossEntropy (input, target) () { reduction: Reduction, ignore_index: i64 }
                { ty: types::nll_loss, grad: Grad::Decompose, level: Level::Composite,
                  decompose: Some(decompose::cross_entropy), eval: Eval::Structural, samples: samples::cross_entropy };
        ]}
    };
}
