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
                  function: Some(Function::Add), prim: Some(|_, args| args.len() == 2), samples: samples::binary };
            /// x − alpha · y
            [pointwise sub sub_] "sub" Sub (x, y) (alpha) {}
                { ty: types::arithmetic_not_bool, grad: Grad::Fn(gradient::sub), decompose: Some(decompose::sub),
                  eval: Eval::both(|a| a[0] - alpha(a) * a[1], |a| a[0].wrapping_sub(alpha_int(a).wrapping_mul(a[1]))),
                  function: Some(Function::Sub),
                  prim: Some(|_, args| args.len() == 2), samples: samples::binary_not_bool };
            /// x · y
            [pointwise mul mul_] "mul" Mul (x, y) () {}
                { ty: types::arithmetic, grad: rule!(|g, x, y| [g * y, g * x]),
                  eval: Eval::both(|a| a[0] * a[1], |a| a[0].wrapping_mul(a[1])), function: Some(Function::Mul), samples: samples::binary };
            /// x / y, true division: integers are divided as floats
            [pointwise div div_] "div" Div (x, y) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x, y| { let share = g / y; [share, -(share * (x / y))] }),
                  eval: Eval::float(|a| a[0] / a[1]), function: Some(Function::Div), samples: samples::division };
            /// x raised to the power y
            [pointwise pow pow_] "pow" Pow (x, y) () {}
                { ty: types::power,
                  grad: rule!(|g, x, y; power| [
                      // y = 0 is flat even where x is 0, and x = 0 where y ≥ 0.
                      y.eq(0.0).where_(0.0, g * (x.pow(y - 1.0) * y)),
                      x.eq(0.0).logical_and(y.ge(0.0)).where_(0.0, g * (power * x.log())),
                  ]),
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
                { ty: types::arithmetic_not_bool, grad: rule!(|g, _x| [-g]),
                  eval: Eval::both(|a| -a[0], |a| a[0].wrapping_neg()), function: Some(Function::Neg), samples: samples::unary_not_bool };
            /// |x|
            [pointwise abs abs_] "abs" Abs (x) () {}
                { ty: types::arithmetic_not_bool, grad: rule!(|g, x| [x.gt(0.0).where_(g, x.lt(0.0).where_(-g, 0.0))]),
                  eval: Eval::both(|a| a[0].abs(), |a| a[0].wrapping_abs()), function: Some(Function::Abs), samples: samples::unary_not_bool };
            /// 1 / x
            [pointwise reciprocal reciprocal_] "reciprocal" Reciprocal (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, _x; y| [-(g * (y * y))]),
                  decompose: steps!(|x| 1.0 / x), eval: Eval::float(|a| 1.0 / a[0]), function: Some(Function::Reciprocal), samples: samples::unary };

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
                { ty: types::float_only, grad: rule!(|g, x, end, weight| [g - g * weight, g * weight, g * (end - x)]),
                  decompose: Some(decompose::lerp), eval: Eval::float(|a| a[0] + a[2] * (a[1] - a[0])),
                  function: Some(Function::Lerp), samples: samples::lerp };
            /// x + value · a · b
            [pointwise addcmul addcmul_] "addcmul" Addcmul (x, a, b, value) () {}
                { ty: types::addcmul, grad: rule!(|g, _x, a, b, value| [g, g * value * b, g * value * a, g * (a * b)]),
                  decompose: Some(decompose::addcmul), eval: Eval::both(|a| a[0] + a[3] * a[1] * a[2],
                  |a| a[0].wrapping_add(a[3].wrapping_mul(a[1]).wrapping_mul(a[2]))), function: Some(Function::Addcmul), samples: samples::addcmul };
            /// x + value · a / b
            [pointwise addcdiv addcdiv_] "addcdiv" Addcdiv (x, a, b, value) () {}
                { ty: types::float_only, grad: rule!(|g, _x, a, b, value| [g, g * value / b, -(g * value / b * (a / b)), g * (a / b)]),
                  decompose: steps!(|x, a, b, value| x + value * a / b), eval: Eval::float(|a| a[0] + a[3] * a[1] / a[2]),
                  function: Some(Function::Addcdiv), samples: samples::addcdiv };

            // ---- pointwise: conversion and copying -------------------------------------------------------------

            /// Converts to another dtype
            [convert to to_] "to" To (x) () { dtype: DType }
                { ty: types::convert, grad: rule!(|g, _x| [g]), eval: Eval::Convert, samples: samples::convert };
            /// A copy with its own memory
            [pointwise clone_tensor clone_tensor_] "clone" Clone (x) () {}
                { ty: types::same, grad: rule!(|g, _x| [g]), decompose: Some(decompose::identity),
                  eval: Eval::both(|a| a[0], |a| a[0]), kernel: true, samples: samples::unary };
            /// The values of src, converted and broadcast to x
            [copy copy copy_] "copy" Copy (x, src) () {}
                { ty: types::copy, grad: Grad::Fn(gradient::copy), decompose: Some(decompose::copy),
                  eval: Eval::both(|a| a[1], |a| a[1]), kernel: true, samples: samples::copy };
        ]}
    };
}
