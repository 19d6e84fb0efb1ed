//! Rows: pointwise functions and activations.

#[doc(hidden)]
#[macro_export]
macro_rules! rows_functions {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_reductions! { $callback [
            $($rows)*

            /// eˣ
            [pointwise exp exp_] "exp" Exp (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::exp), saves: Saves::Outputs,
                  eval: Eval::float(|a| a[0].exp()), function: Some(Function::Exp), samples: samples::unary };
            /// Natural logarithm
            [pointwise log log_] "log" Log (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::log), saves: Saves::Inputs,
                  eval: Eval::float(|a| a[0].ln()), function: Some(Function::Log), samples: samples::unary_positive };
            /// Square root
            [pointwise sqrt sqrt_] "sqrt" Sqrt (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::sqrt), saves: Saves::Outputs,
                  eval: Eval::float(|a| a[0].sqrt()), function: Some(Function::Sqrt), samples: samples::unary_positive };
            /// 1 / √x
            [pointwise rsqrt rsqrt_] "rsqrt" Rsqrt (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::rsqrt), saves: Saves::Outputs,
                  decompose: Some(decompose::rsqrt), eval: Eval::float(|a| 1.0 / a[0].sqrt()),
                  function: Some(Function::Rsqrt), samples: samples::unary_positive };
            /// Hyperbolic tangent
            [pointwise tanh tanh_] "tanh" Tanh (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::tanh), saves: Saves::Outputs,
                  eval: Eval::float(|a| a[0].tanh()), function: Some(Function::Tanh), samples: samples::unary };
            /// Error function
            [pointwise erf erf_] "erf" Erf (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::erf), saves: Saves::Inputs,
                  eval: Eval::float(|a| erf(a[0])), function: Some(Function::Erf), samples: samples::unary };
            /// 1 / (1 + e⁻ˣ)
            [pointwise sigmoid sigmoid_] "sigmoid" Sigmoid (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::sigmoid), saves: Saves::Outputs,
                  eval: Eval::float(|a| 1.0 / (1.0 + (-a[0]).exp())), function: Some(Function::Sigmoid), samples: samples::unary };
            /// max(x, 0)
            [pointwise relu relu_] "relu" Relu (x) () {}
                { ty: types::arithmetic_not_bool, grad: Grad::Fn(gradient::relu), saves: Saves::Outputs,
                  decompose: Some(decompose::relu), eval: Eval::both(|a| nan_max(a[0], 0.0), |a| a[0].max(0)),
                  function: Some(Function::Relu), samples: samples::unary_not_bool };
            /// x · Φ(x), by the error function or by tanh
            [activation gelu gelu_] "gelu" Gelu (x) () { approximate: Approximate }
                { ty: types::float_only, grad: Grad::Fn(gradient::gelu), saves: Saves::Inputs,
                  decompose: Some(decompose::gelu), eval: Eval::float_op(eval_gelu), function: Some(Function::Gelu), samples: samples::gelu };
        ]}
    };
}
