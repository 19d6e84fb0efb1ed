//! THE OP TABLE: one row per operator, the single place that says what it is.
//!
//! A row reads
//!
//! ```text
//! /// What it computes.
//! [class method in-place-method] "name" Variant (operands) (optional operands) { attributes }
//!     { ty: type rule, grad: gradient, … };
//! ```
//!
//! Names and semantics are PyTorch's. Everything else is derived from these rows: the [`Op`](crate::Op) enum,
//! printer and parser, the emitter's builder methods, the methods of `Tensor`, `docs/ops.md` and the sweep
//! tests. Operands are tensors or numbers known at run time; attributes are what shapes the code. Every
//! pointwise row also exists over lists of tensors, under the name `foreach_…`.
//!
//! `op_table!(callback)` hands all rows to a macro named `callback`.

/// Hands every row of the op table to the macro `$callback`. See the [module](crate::table) for the grammar.
#[macro_export]
macro_rules! op_table {
    ($callback:ident) => {
        $callback! {
            // ---- pointwise: arithmetic -------------------------------------------------------------------

            /// x + alpha · y
            [pointwise add add_] "add" Add (x, y) (alpha) {}
                { ty: types::arithmetic, grad: Grad::Fn(gradient::add), decompose: Some(decompose::add),
                  eval: Eval::both(|a| a[0] + alpha(a) * a[1], |a| a[0].wrapping_add(alpha_int(a).wrapping_mul(a[1]))),
                  samples: samples::binary };
            /// x − alpha · y
            [pointwise sub sub_] "sub" Sub (x, y) (alpha) {}
                { ty: types::arithmetic_not_bool, grad: Grad::Fn(gradient::sub), decompose: Some(decompose::sub),
                  eval: Eval::both(|a| a[0] - alpha(a) * a[1], |a| a[0].wrapping_sub(alpha_int(a).wrapping_mul(a[1]))),
                  samples: samples::binary_not_bool };
            /// x · y
            [pointwise mul mul_] "mul" Mul (x, y) () {}
                { ty: types::arithmetic, grad: Grad::Fn(gradient::mul), saves: Saves::Inputs,
                  eval: Eval::both(|a| a[0] * a[1], |a| a[0].wrapping_mul(a[1])), samples: samples::binary };
            /// x / y, true division: integers are divided as floats
            [pointwise div div_] "div" Div (x, y) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::div), saves: Saves::Inputs,
                  eval: Eval::float(|a| a[0] / a[1]), samples: samples::division };
            /// x raised to the power y
            [pointwise pow pow_] "pow" Pow (x, y) () {}
                { ty: types::power, grad: Grad::Fn(gradient::pow), saves: Saves::InputsAndOutputs,
                  scalar_class: Some(power_class), eval: Eval::both(|a| a[0].powf(a[1]), |a| int_pow(a[0], a[1])),
                  samples: samples::power };
            /// The larger of x and y; NaN if either is NaN
            [pointwise maximum maximum_] "maximum" Maximum (x, y) () {}
                { ty: types::arithmetic, grad: Grad::Fn(gradient::maximum), saves: Saves::Inputs,
                  eval: Eval::both(|a| nan_max(a[0], a[1]), |a| a[0].max(a[1])), samples: samples::binary };
            /// The smaller of x and y; NaN if either is NaN
            [pointwise minimum minimum_] "minimum" Minimum (x, y) () {}
                { ty: types::arithmetic, grad: Grad::Fn(gradient::minimum), saves: Saves::Inputs,
                  eval: Eval::both(|a| -nan_max(-a[0], -a[1]), |a| a[0].min(a[1])), samples: samples::binary };
            /// −x
            [pointwise neg neg_] "neg" Neg (x) () {}
                { ty: types::arithmetic_not_bool, grad: Grad::Fn(gradient::neg),
                  eval: Eval::both(|a| -a[0], |a| a[0].wrapping_neg()), samples: samples::unary_not_bool };
            /// |x|
            [pointwise abs abs_] "abs" Abs (x) () {}
                { ty: types::arithmetic_not_bool, grad: Grad::Fn(gradient::abs), saves: Saves::Inputs,
                  eval: Eval::both(|a| a[0].abs(), |a| a[0].wrapping_abs()), samples: samples::unary_not_bool };
            /// 1 / x
            [pointwise reciprocal reciprocal_] "reciprocal" Reciprocal (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::reciprocal), saves: Saves::Outputs,
                  decompose: Some(decompose::reciprocal), eval: Eval::float(|a| 1.0 / a[0]), samples: samples::unary };

            // ---- pointwise: functions --------------------------------------------------------------------

            /// eˣ
            [pointwise exp exp_] "exp" Exp (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::exp), saves: Saves::Outputs,
                  eval: Eval::float(|a| a[0].exp()), samples: samples::unary };
            /// Natural logarithm
            [pointwise log log_] "log" Log (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::log), saves: Saves::Inputs,
                  eval: Eval::float(|a| a[0].ln()), samples: samples::unary_positive };
            /// Square root
            [pointwise sqrt sqrt_] "sqrt" Sqrt (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::sqrt), saves: Saves::Outputs,
                  eval: Eval::float(|a| a[0].sqrt()), samples: samples::unary_positive };
            /// 1 / √x
            [pointwise rsqrt rsqrt_] "rsqrt" Rsqrt (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::rsqrt), saves: Saves::Outputs,
                  decompose: Some(decompose::rsqrt), eval: Eval::float(|a| 1.0 / a[0].sqrt()),
                  samples: samples::unary_positive };
            /// Hyperbolic tangent
            [pointwise tanh tanh_] "tanh" Tanh (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::tanh), saves: Saves::Outputs,
                  eval: Eval::float(|a| a[0].tanh()), samples: samples::unary };
            /// Error function
            [pointwise erf erf_] "erf" Erf (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::erf), saves: Saves::Inputs,
                  eval: Eval::float(|a| erf(a[0])), samples: samples::unary };
            /// 1 / (1 + e⁻ˣ)
            [pointwise sigmoid sigmoid_] "sigmoid" Sigmoid (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::sigmoid), saves: Saves::Outputs,
                  eval: Eval::float(|a| 1.0 / (1.0 + (-a[0]).exp())), samples: samples::unary };
            /// max(x, 0)
            [pointwise relu relu_] "relu" Relu (x) () {}
                { ty: types::arithmetic_not_bool, grad: Grad::Fn(gradient::relu), saves: Saves::Outputs,
                  decompose: Some(decompose::relu), eval: Eval::both(|a| nan_max(a[0], 0.0), |a| a[0].max(0)),
                  samples: samples::unary_not_bool };
            /// x · Φ(x), by the error function or by tanh
            [activation gelu gelu_] "gelu" Gelu (x) () { approximate: Approximate }
                { ty: types::float_only, grad: Grad::Fn(gradient::gelu), saves: Saves::Inputs,
                  decompose: Some(decompose::gelu), eval: Eval::float_op(eval_gelu), samples: samples::gelu };

            // ---- pointwise: comparison and choice --------------------------------------------------------

            /// x = y
            [pointwise eq eq_] "eq" Eq (x, y) () {}
                { ty: types::compare, grad: Grad::Zero, eval: Eval::compare(|a| a[0] == a[1], |a| a[0] == a[1]),
                  samples: samples::binary };
            /// x ≠ y
            [pointwise ne ne_] "ne" Ne (x, y) () {}
                { ty: types::compare, grad: Grad::Zero, eval: Eval::compare(|a| a[0] != a[1], |a| a[0] != a[1]),
                  samples: samples::binary };
            /// x < y
            [pointwise lt lt_] "lt" Lt (x, y) () {}
                { ty: types::compare, grad: Grad::Zero, eval: Eval::compare(|a| a[0] < a[1], |a| a[0] < a[1]),
                  samples: samples::binary };
            /// x ≤ y
            [pointwise le le_] "le" Le (x, y) () {}
                { ty: types::compare, grad: Grad::Zero, eval: Eval::compare(|a| a[0] <= a[1], |a| a[0] <= a[1]),
                  samples: samples::binary };
            /// x > y
            [pointwise gt gt_] "gt" Gt (x, y) () {}
                { ty: types::compare, grad: Grad::Zero, eval: Eval::compare(|a| a[0] > a[1], |a| a[0] > a[1]),
                  samples: samples::binary };
            /// x ≥ y
            [pointwise ge ge_] "ge" Ge (x, y) () {}
                { ty: types::compare, grad: Grad::Zero, eval: Eval::compare(|a| a[0] >= a[1], |a| a[0] >= a[1]),
                  samples: samples::binary };
            /// Both are not zero
            [pointwise logical_and logical_and_] "logical_and" LogicalAnd (x, y) () {}
                { ty: types::compare, grad: Grad::Zero,
                  eval: Eval::compare(|a| a[0] != 0.0 && a[1] != 0.0, |a| a[0] != 0 && a[1] != 0),
                  samples: samples::binary };
            /// x is zero
            [pointwise logical_not logical_not_] "logical_not" LogicalNot (x) () {}
                { ty: types::compare, grad: Grad::Zero, eval: Eval::compare(|a| a[0] == 0.0, |a| a[0] == 0),
                  samples: samples::unary };
            /// x where the condition holds, else y
            [choice where_ where__] "where" Where (condition, x, y) () {}
                { ty: types::choose, grad: Grad::Fn(gradient::choose), saves: Saves::Inputs,
                  eval: Eval::both(|a| if a[0] != 0.0 { a[1] } else { a[2] }, |a| if a[0] != 0 { a[1] } else { a[2] }),
                  samples: samples::choose };

            // ---- pointwise: the optimizers' ---------------------------------------------------------------

            /// x + weight · (end − x), exact at both ends
            [pointwise lerp lerp_] "lerp" Lerp (x, end, weight) () {}
                { ty: types::float_only, grad: Grad::Fn(gradient::lerp), saves: Saves::Inputs,
                  decompose: Some(decompose::lerp), eval: Eval::float(|a| a[0] + a[2] * (a[1] - a[0])),
                  samples: samples::lerp };
            /// x + value · a · b
            [pointwise addcmul addcmul_] "addcmul" Addcmul (x, a, b, value) () {}
                { ty: types::arithmetic_not_bool, grad: Grad::Fn(gradient::addcmul), saves: Saves::Inputs,
                  decompose: Some(decompose::addcmul), eval: Eval::both(|a| a[0] + a[3] * a[1] * a[2],
                  |a| a[0].wrapping_add(a[3].wrapping_mul(a[1]).wrapping_mul(a[2]))), samples: samples::addcmul };
            /// x + value · a / b
            [pointwise addcdiv addcdiv_] "addcdiv" Addcdiv (x, a, b, value) () {}
                { ty: types::float_only, grad: Grad::Fn(gradient::addcdiv), saves: Saves::Inputs,
                  decompose: Some(decompose::addcdiv), eval: Eval::float(|a| a[0] + a[3] * a[1] / a[2]),
                  samples: samples::addcdiv };

            // ---- pointwise: conversion and copying --------------------------------------------------------

            /// Converts to another dtype
            [convert to to_] "to" To (x) () { dtype: DType }
                { ty: types::convert, grad: Grad::Fn(gradient::convert), eval: Eval::Convert, samples: samples::convert };
            /// A copy with its own memory
            [pointwise clone_tensor clone_tensor_] "clone" Clone (x) () {}
                { ty: types::same, grad: Grad::Fn(gradient::identity), decompose: Some(decompose::identity),
                  eval: Eval::both(|a| a[0], |a| a[0]), samples: samples::unary };
            /// The values of src, converted and broadcast to x
            [copy copy copy_] "copy" Copy (x, src) () {}
                { ty: types::copy, grad: Grad::Fn(gradient::copy), decompose: Some(decompose::copy),
                  eval: Eval::both(|a| a[1], |a| a[1]), samples: samples::copy };

            // ---- reductions -------------------------------------------------------------------------------

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

            // ---- matrix products --------------------------------------------------------------------------

            /// Matrix product of [m, k] and [k, n]
            [contraction mm _none] "mm" Mm (x, y) () {}
                { ty: types::mm, grad: Grad::Fn(gradient::mm), saves: Saves::Inputs, decompose: Some(decompose::contraction),
                  eval: Eval::Structural,
                  samples: samples::mm };
            /// input + x · y
            [contraction addmm _none] "addmm" Addmm (input, x, y) () {}
                { ty: types::addmm, grad: Grad::Fn(gradient::addmm), saves: Saves::Inputs, level: Level::Composite,
                  decompose: Some(decompose::addmm), eval: Eval::Structural, samples: samples::addmm };
            /// x · weightᵀ + bias, over the last dim of x
            [contraction linear _none] "linear" Linear (x, weight) (bias) {}
                { ty: types::linear, grad: Grad::Fn(gradient::linear), saves: Saves::Inputs, level: Level::Composite,
                  decompose: Some(decompose::linear), eval: Eval::Structural, samples: samples::linear };

            // ---- views ------------------------------------------------------------------------------------

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

            // ---- creation and random numbers --------------------------------------------------------------

            /// A number of the program text
            [constant constant _none] "constant" Constant () () { value: Scalar }
                { ty: types::constant, grad: Grad::Zero, eval: Eval::Structural, samples: samples::none };
            /// A tensor filled with one number
            [create full _none] "full" Full (value) () { shape: Shape, dtype: DType, device: Device }
                { ty: types::full, grad: Grad::Zero, eval: Eval::Structural, samples: samples::full };
            /// start, start + step, …
            [create arange _none] "arange" Arange (start, step) () { len: usize, dtype: DType, device: Device }
                { ty: types::arange, grad: Grad::Zero, eval: Eval::Structural, samples: samples::arange };
            /// Uniform random numbers in [0, 1)
            [random rand _none] "rand" Rand (seed, offset) () { shape: Shape, dtype: DType, device: Device }
                { ty: types::random, grad: Grad::Zero, decompose: Some(decompose::random), eval: Eval::Structural, samples: samples::none };
            /// Standard normal random numbers
            [random randn _none] "randn" Randn (seed, offset) () { shape: Shape, dtype: DType, device: Device }
                { ty: types::random, grad: Grad::Zero, decompose: Some(decompose::random), eval: Eval::Structural, samples: samples::none };
            /// Uniform random numbers in [low, high)
            [random uniform _none] "uniform" Uniform (low, high, seed, offset) () { shape: Shape, dtype: DType, device: Device }
                { ty: types::uniform, grad: Grad::Zero, level: Level::Composite, decompose: Some(decompose::uniform),
                  eval: Eval::Structural, samples: samples::none };

            // ---- losses -----------------------------------------------------------------------------------

            /// −input[i, target[i]], reduced over the samples whose target is not ignore_index
            [composite nll_loss _none] "nll_loss" NllLoss (input, target) () { reduction: Reduction, ignore_index: i64 }
                { ty: types::nll_loss, grad: Grad::Fn(gradient::nll_loss), saves: Saves::Inputs, level: Level::Composite,
                  decompose: Some(decompose::nll_loss), eval: Eval::Structural, samples: samples::nll_loss };
            /// nll_loss of log_softmax
            [composite cross_entropy _none] "cross_entropy" CrossEntropy (input, target) () { reduction: Reduction, ignore_index: i64 }
                { ty: types::nll_loss, grad: Grad::Decompose, level: Level::Composite,
                  decompose: Some(decompose::cross_entropy), eval: Eval::Structural, samples: samples::cross_entropy };

            // ---- lists ------------------------------------------------------------------------------------

            /// Tensors as one list, for the foreach_* forms
            [list list _none] "list" List (tensors) () {}
                { ty: types::list, grad: Grad::NotDifferentiable("lists of tensors are for optimizers, which run without gradients"),
                  variadic: true, eval: Eval::Structural, samples: samples::none };
            /// One tensor of a list
            [list list_get _none] "list_get" ListGet (list) () { index: usize }
                { ty: types::list_get, grad: Grad::NotDifferentiable("lists of tensors are for optimizers, which run without gradients"),
                  eval: Eval::Structural, samples: samples::none };
        }
    };
}
