//! The scalar functions on floats, and the one match that evaluates them.

use super::lane::{Lane, Width};
use super::scalar::{ScalarF32, ScalarF64};
use super::{
    activation, arcs, composite, error_function, exponential, gamma, hyperbolic, logarithm, power,
    trigonometric,
};

/// A function of the C library, which Rust's standard library has, too.
macro_rules! library {
    ($cx:ident, $name:literal, |$($x:ident),*| $body:expr) => {
        $cx.libm(
            $crate::math::Libm::new(
                [concat!($name, "f"), $name],
                |args: &[f32]| { let [$($x),*] = first(args); $body },
                |args: &[f64]| { let [$($x),*] = first(args); $body },
            ),
            &[$($x),*],
        )
    };
}
pub(super) use library;

/// The first arguments.
#[inline(always)]
pub(super) fn first<F: Copy, const N: usize>(args: &[F]) -> [F; N] {
    std::array::from_fn(|i| args[i])
}

macro_rules! define_functions {
    ($($(#[$doc:meta])* $variant:ident $name:literal $instructions:literal $($rare:ident)? |$cx:ident $(, $arg:ident)*| $body:expr;
        exact $exact:expr $(, integers |$($i:ident),*| $integer:expr)?;
    )*) => {
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
                match self { $(Function::$variant => [$(stringify!($arg)),*].len()),* }
            }

            /// What it takes, in vector instructions.
            pub const fn instructions(self) -> usize {
                match self { $(Function::$variant => $instructions),* }
            }

            /// Whether it has a [rare part](crate::math::Rare).
            pub const fn has_rare(self) -> bool {
                match self { $(Function::$variant => matches!(stringify!($($rare)?).as_bytes(), b"rare")),* }
            }

            /// Applies the function in a context. Panics unless there are [`Function::arity`] arguments.
            #[inline(always)]
            pub fn apply<L: Lane>(self, cx: &mut L, args: &[L::F]) -> L::F {
                match self {
                    $(Function::$variant => {
                        let ($cx, [$($arg),*]) = (cx, first(args));
                        $body
                    })*
                }
            }
        }
    };
}
crate::scalar_functions!(define_functions);

/// What so many vector instructions cost, in bytes that memory could have moved meanwhile.
pub const fn cost(instructions: usize) -> i64 {
    (instructions / 8) as i64
}

impl Function {
    /// What one element costs, in bytes that memory could have moved meanwhile.
    pub const fn cost(self) -> i64 {
        cost(self.instructions())
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
