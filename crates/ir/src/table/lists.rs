//! Rows: lists of tensors.

#[doc(hidden)]
#[macro_export]
macro_rules! rows_lists {
    ($callback:ident [$($rows:tt)*]) => {
        $callback! {
            $($rows)*

            /// Tensors as one list, for the foreach_* forms
            [list list _none] "list" List (tensors) () {}
                { ty: types::list, grad: Grad::NotDifferentiable("lists of tensors are for optimizers, which run without gradients"),
                  variadic: true, eval: Eval::Structural, samples: samples::none };
            /// One tensor of a list
            [list list_get _none] "list_get" ListGet (list) () { index: usize }
                { ty: types::list_get, grad: Grad::NotDifferentiable("lists of tensors are for optimizers, which run without gradients"),
                  eval: Eval::Structural, samples: samples::none };

            // ---- not of this table -----------------------------------------------------------------------------

            /// An op that somebody registered
            [custom custom _none] "custom" Custom (tensors) () { op: Custom }
                { ty: custom::types, grad: Grad::Fn(custom::gradient), variadic: true, eval: Eval::Structural, samples: samples::none };
            /// A body of ops, step by step along sequences
            [custom scan _none] "scan" Scan (tensors) () { body: Body, carries: usize, inputs: usize, length: usize, dtype: DType, order: Order, saves: bool }
                { ty: scan::types, grad: Grad::Fn(scan::gradient), variadic: true, eval: Eval::Structural,
                  sizes: &["length"], samples: samples::none };
        }
    };
}
