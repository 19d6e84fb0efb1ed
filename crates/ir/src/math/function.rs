//! The closed list of scalar functions on floats, and the one match that evaluates them.

use super::lane::{Lane, Libm, Width};
use super::scalar::{ScalarF32, ScalarF64};
use super::{composite, error_function, exponential, hyperbolic, logarithm};

macro_rules! functions {
    ($($(#[$doc:meta])* $variant:ident $name:literal $arity:literal)*) => {
        /// A scalar function of floats of one format.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Function { $($(#[$doc])* $variant),* }

        impl Function {
            /// Every function.
            pub const ALL: &[Function] = &[$(Function::$variant),*];

            /// Its name, as in PyTorch and in generated text.
            pub const fn name(self) -> &'static str {
                match self { $(Function::$variant => $name),* }
            }

            /// How many arguments it takes.
            pub const fn arity(self) -> usize {
                match self { $(Function::$variant => $arity),* }
            }
        }
    };
}

functions! {
    /// a + b.
    Add "add" 2
    /// a − b.
    Sub "sub" 2
    /// a · b.
    Mul "mul" 2
    /// a / b.
    Div "div" 2
    /// −x.
    Neg "neg" 1
    /// |x|.
    Abs "abs" 1
    /// x · x.
    Square "square" 1
    /// √x.
    Sqrt "sqrt" 1
    /// 1 / √x.
    Rsqrt "rsqrt" 1
    /// 1 / x.
    Reciprocal "reciprocal" 1
    /// eˣ.
    Exp "exp" 1
    /// eˣ − 1.
    Expm1 "expm1" 1
    /// 2ˣ.
    Exp2 "exp2" 1
    /// log x.
    Log "log" 1
    /// log(1 + x).
    Log1p "log1p" 1
    /// log₂ x.
    Log2 "log2" 1
    /// log₁₀ x.
    Log10 "log10" 1
    /// sin x.
    Sin "sin" 1
    /// cos x.
    Cos "cos" 1
    /// tan x.
    Tan "tan" 1
    /// The angle whose sine is x.
    Asin "asin" 1
    /// The angle whose cosine is x.
    Acos "acos" 1
    /// The angle whose tangent is x.
    Atan "atan" 1
    /// The angle of the point (y, x): arguments y, x.
    Atan2 "atan2" 2
    /// sinh x.
    Sinh "sinh" 1
    /// cosh x.
    Cosh "cosh" 1
    /// tanh x.
    Tanh "tanh" 1
    /// The number whose sinh is x.
    Asinh "asinh" 1
    /// The number ≥ 0 whose cosh is x.
    Acosh "acosh" 1
    /// The number whose tanh is x.
    Atanh "atanh" 1
    /// erf x.
    Erf "erf" 1
    /// 1 − erf x.
    Erfc "erfc" 1
    /// The number whose erf is x.
    Erfinv "erfinv" 1
    /// 1 / (1 + e⁻ˣ).
    Sigmoid "sigmoid" 1
    /// gelu, erf form.
    Gelu "gelu" 1
    /// gelu, tanh form.
    GeluTanh "gelu_tanh" 1
    /// max(x, 0).
    Relu "relu" 1
    /// Largest integer ≤ x.
    Floor "floor" 1
    /// Smallest integer ≥ x.
    Ceil "ceil" 1
    /// Nearest integer, ties to even.
    Round "round" 1
    /// The integer part.
    Trunc "trunc" 1
    /// |x| with the sign of y.
    Copysign "copysign" 2
    /// The rest of x / y that has the sign of x.
    Fmod "fmod" 2
    /// The rest of x / y that has the sign of y.
    Remainder "remainder" 2
    /// ⌊x / y⌋.
    FloorDivide "floor_divide" 2
    /// The integer part of x / y.
    DivTrunc "div_trunc" 2
    /// The larger argument, NaN winning.
    Maximum "maximum" 2
    /// The smaller argument, NaN winning.
    Minimum "minimum" 2
    /// xʸ.
    Pow "pow" 2
    /// Interpolation between (a, b) by weight: arguments a, b, weight.
    Lerp "lerp" 3
    /// x + value·a·b: arguments x, a, b, value.
    Addcmul "addcmul" 4
    /// x + value·a/b: arguments x, a, b, value.
    Addcdiv "addcdiv" 4
    /// x + alpha·y: arguments x, y, alpha.
    AddAlpha "add_alpha" 3
    /// x − alpha·y: arguments x, y, alpha.
    SubAlpha "sub_alpha" 3
}

impl Function {
    /// Applies the function in a context. Panics unless there are [`Function::arity`] arguments.
    #[inline(always)]
    pub fn apply<L: Lane>(self, cx: &mut L, args: &[L::F]) -> L::F {
        match self {
            Function::Add => cx.add(args[0], args[1]),
            Function::Sub => cx.sub(args[0], args[1]),
            Function::Mul => cx.mul(args[0], args[1]),
            Function::Div => cx.div(args[0], args[1]),
            Function::Neg => cx.neg(args[0]),
            Function::Abs => cx.abs(args[0]),
            Function::Square => cx.mul(args[0], args[0]),
            Function::Sqrt => cx.sqrt(args[0]),
            Function::Rsqrt => composite::rsqrt(cx, args[0]),
            Function::Reciprocal => composite::reciprocal(cx, args[0]),
            Function::Exp => exponential::exp(cx, args[0]),
            Function::Expm1 => exponential::expm1(cx, args[0]),
            Function::Exp2 => exponential::exp2(cx, args[0]),
            Function::Log => logarithm::log(cx, args[0]),
            Function::Log1p => logarithm::log1p(cx, args[0]),
            Function::Log2 => cx.libm(Libm::Log2, args),
            Function::Log10 => cx.libm(Libm::Log10, args),
            Function::Sin => cx.libm(Libm::Sin, args),
            Function::Cos => cx.libm(Libm::Cos, args),
            Function::Tan => cx.libm(Libm::Tan, args),
            Function::Asin => cx.libm(Libm::Asin, args),
            Function::Acos => cx.libm(Libm::Acos, args),
            Function::Atan => cx.libm(Libm::Atan, args),
            Function::Atan2 => cx.libm(Libm::Atan2, args),
            Function::Sinh => cx.libm(Libm::Sinh, args),
            Function::Cosh => cx.libm(Libm::Cosh, args),
            Function::Tanh => exponential::tanh(cx, args[0]),
            Function::Asinh => hyperbolic::asinh(cx, args[0]),
            Function::Acosh => hyperbolic::acosh(cx, args[0]),
            Function::Atanh => hyperbolic::atanh(cx, args[0]),
            Function::Erf => error_function::erf(cx, args[0]),
            Function::Erfc => error_function::erfc(cx, args[0]),
            Function::Erfinv => error_function::erfinv(cx, args[0]),
            Function::Sigmoid => exponential::sigmoid(cx, args[0]),
            Function::Gelu => error_function::gelu(cx, args[0]),
            Function::GeluTanh => error_function::gelu_tanh(cx, args[0]),
            Function::Relu => composite::relu(cx, args[0]),
            Function::Floor => cx.floor(args[0]),
            Function::Ceil => composite::ceil(cx, args[0]),
            Function::Round => cx.round_ties_even(args[0]),
            Function::Trunc => composite::trunc(cx, args[0]),
            Function::Copysign => composite::copysign(cx, args[0], args[1]),
            Function::Fmod => cx.libm(Libm::Fmod, args),
            Function::Remainder => composite::remainder(cx, args[0], args[1]),
            Function::FloorDivide => composite::floor_divide(cx, args[0], args[1]),
            Function::DivTrunc => composite::div_trunc(cx, args[0], args[1]),
            Function::Maximum => composite::maximum(cx, args[0], args[1]),
            Function::Minimum => composite::minimum(cx, args[0], args[1]),
            Function::Pow => cx.libm(Libm::Pow, args),
            Function::Lerp => composite::lerp(cx, args[0], args[1], args[2]),
            Function::Addcmul => composite::addcmul(cx, args[0], args[1], args[2], args[3]),
            Function::Addcdiv => composite::addcdiv(cx, args[0], args[1], args[2], args[3]),
            Function::AddAlpha => composite::add_alpha(cx, args[0], args[1], args[2]),
            Function::SubAlpha => composite::sub_alpha(cx, args[0], args[1], args[2]),
        }
    }

    /// Whether it calls the C library, element by element.
    pub const fn calls_library(self) -> bool {
        matches!(
            self,
            Function::Sin
                | Function::Cos
                | Function::Tan
                | Function::Asin
                | Function::Acos
                | Function::Atan
                | Function::Atan2
                | Function::Sinh
                | Function::Cosh
                | Function::Log2
                | Function::Log10
                | Function::Fmod
                | Function::Remainder
                | Function::FloorDivide
                | Function::Pow
        )
    }

    /// Evaluates on `f32`.
    #[inline(always)]
    pub fn eval_f32(self, args: &[f32]) -> f32 {
        self.apply(&mut ScalarF32, args)
    }

    /// Evaluates on `f64`.
    #[inline(always)]
    pub fn eval_f64(self, args: &[f64]) -> f64 {
        self.apply(&mut ScalarF64, args)
    }

    /// Evaluates in a format, on numbers of that format held as `f64`.
    pub fn eval(self, width: Width, args: &[f64]) -> f64 {
        match width {
            Width::F64 => self.eval_f64(args),
            Width::F32 => {
                let mut narrow = [0f32; 4];
                for (narrow, wide) in narrow.iter_mut().zip(args) {
                    *narrow = *wide as f32;
                }
                f64::from(self.eval_f32(&narrow[..args.len()]))
            }
        }
    }
}
