//! Rows: pointwise arithmetic, comparison, choice, conversion.

#[doc(hidden)]
#[macro_export]
macro_rules! rows_arithmetic {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_rounding! { $callback [
            $($rows)*

            // ---- pointwise: arithmetic -------------------------------------------------------------------------

            /// x + alpha · y
            [pointwise add add_] "add" Add (x, y) (alpha) {}
                { ty: types::arithmetic, grad: Grad::Fn(gradient::add), decompose: Some(decompose::add),
                  eval: Eval::both(|a| a[0] + alpha(a) * a[1], |a| a[0].wrapping_add(alpha_int(a).wrapping_mul(a[1]))),
                  function: Some(Function::Add), samples: samples::binary };
            /// x − alpha · y
            [pointwise sub sub_] "sub" Sub (x, y) (alpha) {}
                { ty: types::arithmetic_not_bool, grad: Grad::Fn(gradient::sub), decompose: Some(decompose::sub),
                  eval: Eval::both(|a| a[0] - alpha(a) * a[1], |a| a[0].wrapping_sub(alpha_int(a).wrapping_mul(a[1]))),
                  function: Some(Function::Sub), samples: samples::binary_not_bool };
            /// x · y
            [pointwise mul mul_] "mul" Mul (x, y) () {}
                { ty: types::arithmetic, grad: Grad::Fn(gradient::mul),
                  eval: Eval::both(|a| a[0] * a[1], |a| a[0].wrapping_mul(a[1])), function: Some(Function::Mul), samples: samples::binary };
            /// x / y, true division: integers are divided as floats
            [pointwise div div_] "div" Div (x, y) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::div),
                  eval: Eval::float(|a| a[0] / a[1]), function: Some(Function::Div), samples: samples::division };
            /// x raised to the power y
            [pointwise pow pow_] "pow" Pow (x, y) () {}
                { ty: types::power, grad: Grad::Fn(gradient::pow),
                  scalar_class: Some(power_class), eval: Eval::both(|a| a[0].powf(a[1]), |a| int_pow(a[0], a[1])),
                  function: Some(Function::Pow), samples: samples::power };
            /// The larger of x and y; NaN if either is NaN
            [pointwise maximum maximum_] "maximum" Maximum (x, y) () {}
                { ty: types::arithmetic, grad: Grad::Fn(gradient::maximum),
                  eval: Eval::both(|a| nan_max(a[0], a[1]), |a| a[0].max(a[1])), function: Some(Function::Maximum), samples: samples::binary };
            /// The smaller of x and y; NaN if either is NaN
            [pointwise minimum minimum_] "minimum" Minimum (x, y) () {}
                { ty: types::arithmetic, grad: Grad::Fn(gradient::minimum),
                  eval: Eval::both(|a| -nan_max(-a[0], -a[1]), |a| a[0].min(a[1])), function: Some(Function::Minimum), samples: samples::binary };
            /// −x
            [pointwise neg neg_] "neg" Neg (x) () {}
                { ty: types::arithmetic_not_bool, grad: Grad::Fn(gradient::neg),
                  eval: Eval::both(|a| -a[0], |a| a[0].wrapping_neg()), function: Some(Function::Neg), samples: samples::unary_not_bool };
            /// |x|
            [pointwise abs abs_] "abs" Abs (x) () {}
                { ty: types::arithmetic_not_bool, grad: Grad::Fn(gradient::abs),
                  eval: Eval::both(|a| a[0].abs(), |a| a[0].wrapping_abs()), function: Some(Function::Abs), samples: samples::unary_not_bool };
            /// 1 / x
            [pointwise reciprocal reciprocal_] "reciprocal" Reciprocal (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::reciprocal),
                  decompose: Some(decompose::reciprocal), eval: Eval::float(|a| 1.0 / a[0]), function: Some(Function::Reciprocal), samples: samples::unary };

            // ---- pointwise: comparison and choice --------------------------------------------------------------

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
                { ty: types::choose, grad: Grad::Fn(gradient::choose),
                  eval: Eval::both(|a| if a[0] != 0.0 { a[1] } else { a[2] }, |a| if a[0] != 0 { a[1] } else { a[2] }),
                  samples: samples::choose };

            // ---- pointwise: the optimizers' --------------------------------------------------------------------

            /// x + weight · (end − x), exact at both ends
            [pointwise lerp lerp_] "lerp" Lerp (x, end, weight) () {}
                { ty: types::float_only, grad: Grad::Fn(gradient::lerp),
                  decompose: Some(decompose::lerp), eval: Eval::float(|a| a[0] + a[2] * (a[1] - a[0])),
                  function: Some(Function::Lerp), samples: samples::lerp };
            /// x + value · a · b
            [pointwise addcmul addcmul_] "addcmul" Addcmul (x, a, b, value) () {}
                { ty: types::addcmul, grad: Grad::Fn(gradient::addcmul),
                  decompose: Some(decompose::addcmul), eval: Eval::both(|a| a[0] + a[3] * a[1] * a[2],
                  |a| a[0].wrapping_add(a[3].wrapping_mul(a[1]).wrapping_mul(a[2]))), function: Some(Function::Addcmul), samples: samples::addcmul };
            /// x + value · a / b
            [pointwise addcdiv addcdiv_] "addcdiv" Addcdiv (x, a, b, value) () {}
                { ty: types::float_only, grad: Grad::Fn(gradient::addcdiv),
                  decompose: Some(decompose::addcdiv), eval: Eval::float(|a| a[0] + a[3] * a[1] / a[2]),
                  function: Some(Function::Addcdiv), samples: samples::addcdiv };

            // ---- pointwise: conversion and copying -------------------------------------------------------------

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
        ]}
    };
}
