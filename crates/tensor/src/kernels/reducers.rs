//! What reductions compute, for each dtype: lanes of elements, totals of lanes, results.

use super::element::{Bool, Element};

/// A reduction of one dtype.
pub(super) trait Reducer: 'static {
    /// Elements.
    type In: Element;
    /// What a vector lane accumulates over a short stretch.
    type Lane: Copy + Send + Sync;
    /// What stretches are joined in.
    type Total: Copy + Send + Sync;
    /// The result.
    type Out: Element;
    /// The lane of nothing.
    const LANE: Self::Lane;
    /// The total of nothing.
    const TOTAL: Self::Total;
    /// One more element.
    fn step(lane: Self::Lane, x: Self::In) -> Self::Lane;
    /// Two lanes in one.
    fn merge(a: Self::Lane, b: Self::Lane) -> Self::Lane;
    /// A lane as a total.
    fn widen(lane: Self::Lane) -> Self::Total;
    /// Two totals in one.
    fn join(a: Self::Total, b: Self::Total) -> Self::Total;
    /// The result.
    fn finish(total: Self::Total) -> Self::Out;
}

macro_rules! reducer {
    ($name:ident: $in:ty, $lane:ty, $total:ty, $out:ty;
     $zero_lane:expr, $zero_total:expr; |$x:ident| $lift:expr; |$a:ident, $b:ident| $join:expr) => {
        pub(super) struct $name;
        impl Reducer for $name {
            type In = $in;
            type Lane = $lane;
            type Total = $total;
            type Out = $out;
            const LANE: $lane = $zero_lane;
            const TOTAL: $total = $zero_total;
            #[inline(always)]
            fn step($a: $lane, $x: $in) -> $lane {
                let $b: $lane = $lift;
                $join
            }
            #[inline(always)]
            fn merge($a: $lane, $b: $lane) -> $lane {
                $join
            }
            #[inline(always)]
            fn widen(lane: $lane) -> $total {
                lane as $total
            }
            #[inline(always)]
            fn join($a: $total, $b: $total) -> $total {
                $join
            }
            #[inline(always)]
            fn finish(total: $total) -> $out {
                total as $out
            }
        }
    };
}

reducer!(SumF32: f32, f32, f64, f32; 0.0, 0.0; |x| x; |a, b| a + b);
reducer!(SumF64: f64, f64, f64, f64; 0.0, 0.0; |x| x; |a, b| a + b);
reducer!(NansumF32: f32, f32, f64, f32; 0.0, 0.0; |x| if x.is_nan() { 0.0 } else { x }; |a, b| a + b);
reducer!(NansumF64: f64, f64, f64, f64; 0.0, 0.0; |x| if x.is_nan() { 0.0 } else { x }; |a, b| a + b);
reducer!(SumI64: i64, i64, i64, i64; 0, 0; |x| x; |a, b| a.wrapping_add(b));
reducer!(CountBool: Bool, i64, i64, i64; 0, 0; |x| i64::from(x); |a, b| a + b);
// A NaN in `a` stays because no comparison with it holds, one in `b` is taken up.
reducer!(AmaxF32: f32, f32, f32, f32; f32::NEG_INFINITY, f32::NEG_INFINITY; |x| x;
    |a, b| if (b > a) | b.is_nan() { b } else { a });
reducer!(AmaxF64: f64, f64, f64, f64; f64::NEG_INFINITY, f64::NEG_INFINITY; |x| x;
    |a, b| if (b > a) | b.is_nan() { b } else { a });
reducer!(AmaxI64: i64, i64, i64, i64; i64::MIN, i64::MIN; |x| x; |a, b| if b > a { b } else { a });
reducer!(AmaxBool: Bool, Bool, Bool, Bool; 0, 0; |x| x; |a, b| a | b);
reducer!(AminF32: f32, f32, f32, f32; f32::INFINITY, f32::INFINITY; |x| x;
    |a, b| if (b < a) | b.is_nan() { b } else { a });
reducer!(AminF64: f64, f64, f64, f64; f64::INFINITY, f64::INFINITY; |x| x;
    |a, b| if (b < a) | b.is_nan() { b } else { a });
reducer!(AminI64: i64, i64, i64, i64; i64::MAX, i64::MAX; |x| x; |a, b| if b < a { b } else { a });
reducer!(AminBool: Bool, Bool, Bool, Bool; 1, 1; |x| x; |a, b| a & b);
// In f64, so that large and small factors of f32 may come in any order.
reducer!(ProdF32: f32, f64, f64, f32; 1.0, 1.0; |x| f64::from(x); |a, b| a * b);
reducer!(ProdF64: f64, f64, f64, f64; 1.0, 1.0; |x| x; |a, b| a * b);
reducer!(ProdI64: i64, i64, i64, i64; 1, 1; |x| x; |a, b| a.wrapping_mul(b));
reducer!(ProdBool: Bool, i64, i64, i64; 1, 1; |x| i64::from(x); |a, b| a * b);

// The maximum of numbers: one instruction, where NaN may or may not show.
reducer!(LargestF32: f32, f32, f32, f32; f32::NEG_INFINITY, f32::NEG_INFINITY; |x| x;
    |a, b| if b > a { b } else { a });
reducer!(LargestF64: f64, f64, f64, f64; f64::NEG_INFINITY, f64::NEG_INFINITY; |x| x;
    |a, b| if b > a { b } else { a });
