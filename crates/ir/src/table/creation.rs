//! Rows: creation and random numbers.

#[doc(hidden)]
#[macro_export]
macro_rules! rows_creation {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_nn! { $callback [
            $($rows)*

            /// A number of the program text
            [constant constant _none] "constant" Constant () () { value: Scalar }
                { ty: types::constant, grad: Grad::Zero, eval: Eval::Structural, samples: samples::none };
            /// A tensor filled with one number
            [create full _none] "full" Full (value) () { shape: Shape, dtype: DType, device: Device }
                { ty: types::full, grad: Grad::Zero, eval: Eval::Structural,
                  sizes: &["shape"], samples: samples::full };
            /// start, start + step, …
            [create arange _none] "arange" Arange (start, step) () { len: usize, dtype: DType, device: Device }
                { ty: types::arange, grad: Grad::Zero, scalar_class: Some(arange_class), eval: Eval::Structural,
                  sizes: &["len"], samples: samples::arange };
            /// Uniform random numbers in [0, 1)
            [random rand _none] "rand" Rand (seed, offset) () { shape: Shape, dtype: DType, device: Device }
                { ty: types::random, grad: Grad::Zero, decompose: Some(decompose::random), eval: Eval::Structural,
                  prim: Some(|op, _| matches!(op, Op::Rand { dtype, .. } if !dtype.is_narrow())), kernel: true, refuses: Refuses::Nothing, sizes: &["shape"], samples: samples::none };
            /// Standard normal random numbers
            [random randn _none] "randn" Randn (seed, offset) () { shape: Shape, dtype: DType, device: Device }
                { ty: types::random, grad: Grad::Zero, decompose: Some(decompose::random), eval: Eval::Structural,
                  prim: Some(|op, _| matches!(op, Op::Randn { dtype, .. } if !dtype.is_narrow())), kernel: true, refuses: Refuses::Nothing, sizes: &["shape"], samples: samples::none };
            /// Uniform random numbers in [low, high)
            [random uniform _none] "uniform" Uniform (low, high, seed, offset) () { shape: Shape, dtype: DType, device: Device }
                { ty: types::uniform, grad: Grad::Zero, decompose: Some(decompose::uniform),
                  eval: Eval::Structural, kernel: true, sizes: &["shape"], samples: samples::none };
        ]}
    };
}
