//! What happens to the units of a row in one step, after the products: loops over a few units each.
//!
//! The operations are those of the decompositions, in their order. Slices as parameters are what tells the compiler
//! that nothing overlaps, also after inlining.

use std::ops::{Mul, Sub};

use kiln_ir::math::Function;
use kiln_runtime::contract::Real;

/// A float with the functions of gates.
pub trait Number: Real + Sub<Output = Self> + Mul<Output = Self> {
    /// One.
    const ONE: Self;
    /// 1 / (1 + e⁻ˣ)
    fn sigmoid(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// The larger of x and zero, x where it is NaN.
    fn relu(self) -> Self;
}

macro_rules! number {
    ($ty:ty, $eval:ident) => {
        impl Number for $ty {
            const ONE: $ty = 1.0;
            #[inline(always)]
            fn sigmoid(self) -> $ty {
                Function::Sigmoid.$eval(&[self])
            }
            #[inline(always)]
            fn tanh(self) -> $ty {
                Function::Tanh.$eval(&[self])
            }
            #[inline(always)]
            fn relu(self) -> $ty {
                Function::Maximum.$eval(&[0.0, self])
            }
        }
    };
}
number!(f32, eval_f32);
number!(f64, eval_f64);

/// A function of a gate, as a type: closures are not reliably inlined into the loops of each instruction set.
pub(super) trait Bend {
    fn of<T: Number>(x: T) -> T;
    /// The slope where the function has this value.
    fn slope<T: Number>(y: T) -> T;
}

pub(super) struct Sigmoid;
pub(super) struct Tanh;
pub(super) struct Relu;

impl Bend for Sigmoid {
    #[inline(always)]
    fn of<T: Number>(x: T) -> T {
        x.sigmoid()
    }
    #[inline(always)]
    fn slope<T: Number>(y: T) -> T {
        y * (T::ONE - y)
    }
}

impl Bend for Tanh {
    #[inline(always)]
    fn of<T: Number>(x: T) -> T {
        x.tanh()
    }
    #[inline(always)]
    fn slope<T: Number>(y: T) -> T {
        T::ONE - y * y
    }
}

impl Bend for Relu {
    #[inline(always)]
    fn of<T: Number>(x: T) -> T {
        x.relu()
    }
    #[inline(always)]
    fn slope<T: Number>(y: T) -> T {
        if y > T::ZERO { T::ONE } else { T::ZERO }
    }
}

/// y = bent(x + y)
#[inline(always)]
pub(super) fn gate<B: Bend, T: Number>(y: &mut [T], x: &[T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = B::of(x + *y);
    }
}

/// y = y + x
#[inline(always)]
pub(super) fn add<T: Number>(y: &mut [T], x: &[T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = *y + x;
    }
}

/// y = y · x
#[inline(always)]
pub(super) fn scale<T: Number>(y: &mut [T], x: &[T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = *y * x;
    }
}

/// y = a · b
#[inline(always)]
pub(super) fn product<T: Number>(y: &mut [T], a: &[T], b: &[T]) {
    for ((y, &a), &b) in y.iter_mut().zip(a).zip(b) {
        *y = a * b;
    }
}

/// y = a · b + c
#[inline(always)]
pub(super) fn product_and<T: Number>(y: &mut [T], a: &[T], b: &[T], c: &[T]) {
    for (((y, &a), &b), &c) in y.iter_mut().zip(a).zip(b).zip(c) {
        *y = a * b + c;
    }
}

/// c = f · c + i · g
#[inline(always)]
pub(super) fn lstm_cell<T: Number>(c: &mut [T], old: &[T], [i, f, g]: [&[T]; 3]) {
    for ((((c, &old), &i), &f), &g) in c.iter_mut().zip(old).zip(i).zip(f).zip(g) {
        *c = f * old + i * g;
    }
}

/// h = o · tanh c
#[inline(always)]
pub(super) fn lstm_output<T: Number>(h: &mut [T], o: &[T], c: &[T]) {
    for ((h, &o), &c) in h.iter_mut().zip(o).zip(c) {
        *h = o * c.tanh();
    }
}

/// n = tanh(x + r · n)
#[inline(always)]
pub(super) fn gru_new<T: Number>(n: &mut [T], x: &[T], r: &[T], inner: &[T]) {
    for (((n, &x), &r), &inner) in n.iter_mut().zip(x).zip(r).zip(inner) {
        *n = (x + r * inner).tanh();
    }
}

/// h = n + z · (h − n)
#[inline(always)]
pub(super) fn gru_output<T: Number>(h: &mut [T], old: &[T], z: &[T], n: &[T]) {
    for (((h, &old), &z), &n) in h.iter_mut().zip(old).zip(z).zip(n) {
        *h = n + z * (old - n);
    }
}

/// y = tanh x
#[inline(always)]
pub(super) fn tanh<T: Number>(y: &mut [T], x: &[T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = x.tanh();
    }
}

/// What goes to a cell inside of a step: to = (to + grad) + output · o · (1 − bent²)
#[inline(always)]
pub(super) fn lstm_inside<T: Number>(to: &mut [T], grad: &[T], output: &[T], o: &[T], bent: &[T]) {
    for ((((to, &grad), &output), &o), &bent) in to.iter_mut().zip(grad).zip(output).zip(o).zip(bent) {
        *to = (*to + grad) + output * o * Tanh::slope(bent);
    }
}

/// s = (a · b + grad) · slope at y
#[inline(always)]
pub(super) fn slope<B: Bend, T: Number>(s: &mut [T], a: &[T], b: &[T], grad: &[T], y: &[T]) {
    for ((((s, &a), &b), &grad), &y) in s.iter_mut().zip(a).zip(b).zip(grad).zip(y) {
        *s = (a * b + grad) * B::slope(y);
    }
}

/// s = (output · (1 − z) + grad) · (1 − n²)
#[inline(always)]
pub(super) fn gru_slope<T: Number>(s: &mut [T], output: &[T], z: &[T], grad: &[T], n: &[T]) {
    for ((((s, &output), &z), &grad), &n) in s.iter_mut().zip(output).zip(z).zip(grad).zip(n) {
        *s = (output * (T::ONE - z) + grad) * Tanh::slope(n);
    }
}

/// s = (output · (old − n) + grad) · z · (1 − z)
#[inline(always)]
pub(super) fn gru_update<T: Number>(s: &mut [T], output: &[T], [old, n]: [&[T]; 2], grad: &[T], z: &[T]) {
    for (((((s, &output), &old), &n), &grad), &z) in s.iter_mut().zip(output).zip(old).zip(n).zip(grad).zip(z)
    {
        *s = (output * (old - n) + grad) * Sigmoid::slope(z);
    }
}

/// s = output · slope at h; zero, whatever the output, where a relu is flat.
#[inline(always)]
pub(super) fn rnn_slope<B: Bend, T: Number>(s: &mut [T], output: &[T], h: &[T]) {
    for ((s, &output), &h) in s.iter_mut().zip(output).zip(h) {
        *s = output * B::slope(h);
    }
}
