//! Pointwise kernels: scalar functions, comparisons, logic and `where`.
//!
//! All operands of a call have one shape (broadcast by stride 0) and, but for the booleans of comparisons
//! and conditions, one dtype; of a function and a comparison an input may also have the computing type of that
//! dtype. The output may be the same elements as an input; otherwise it overlaps none.

use super::drive::{Cost, Form, Loop, Loops, MAX_INPUTS, Row, drive, drive_rows};
use super::element::{Bool, Element};
use super::isa::vectorised;
use super::operand::Operand;
use kiln_ir::DType;
use kiln_ir::math::{Function, QuickF32, QuickF64};
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// A function that a dtype doesn't have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{function} is not defined for {dtype}")]
pub struct Unsupported {
    /// The function's name.
    pub function: &'static str,
    /// The dtype it was asked for.
    pub dtype: DType,
}

/// A function of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bits {
    /// Set in both.
    And,
    /// Set in either.
    Or,
    /// Set in one only.
    Xor,
    /// Moved up.
    Left,
    /// Moved down.
    Right,
}

/// A comparison of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Comparison {
    /// a = b.
    Eq,
    /// a ≠ b; true for NaN.
    Ne,
    /// a < b.
    Lt,
    /// a ≤ b.
    Le,
    /// a > b.
    Gt,
    /// a ≥ b.
    Ge,
}

/// A connective of booleans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Logical {
    /// a and b.
    And,
    /// not a.
    Not,
}

/// `out = function(inputs…)`: floats have every function; integers have the arithmetic ones, wrapping, with
/// `pow` for exponents ≥ 0 (a negative one gives what the integer quotient 1/xⁿ is); bool has add and
/// maximum (or), mul and minimum (and).
///
/// Scalars such as alpha are inputs of the compute dtype with strides 0, in [`Function`]'s order.
///
/// # Safety
/// The contract of [`Operand`]; all dtypes are equal; overlap as the module says.
pub unsafe fn pointwise(function: Function, out: &Operand, inputs: &[&Operand]) -> Result<(), Unsupported> {
    debug_assert_eq!(inputs.len(), function.arity());
    debug_assert!(inputs.iter().all(|i| i.dtype.computing() == out.dtype.computing()));
    let unsupported = Unsupported { function: function.name(), dtype: out.dtype };
    let inner = function_loops(function, out.dtype).ok_or(unsupported)?;
    // SAFETY: the loop is one for the computing type; the rest is the caller's contract.
    unsafe { drive(inner, Form::Computing, cost(function), out, inputs) };
    Ok(())
}

/// [`pointwise`] for each of several dense calls on floats, threads sharing the work of all of them.
///
/// # Safety
/// Each row's operands have as many elements of its dtype as it says, and overlap as the module says; no row's
/// output overlaps another row's operands.
pub unsafe fn pointwise_rows(function: Function, rows: &[Row]) {
    debug_assert!(rows.iter().all(|row| row.dtype.is_float()));
    let inner = |dtype| float_loops(function, dtype);
    // SAFETY: the loops are those for the rows' dtypes; the rest is the caller's contract.
    unsafe { drive_rows(inner, cost(function), function.arity(), rows) };
}

/// The loops of a function for the type that a dtype is computed in, if it has one there.
pub(super) fn function_loops(function: Function, dtype: DType) -> Option<Loops> {
    match dtype.computing() {
        DType::F32 => Some(f32_loops(function)),
        DType::F64 => Some(f64_loops(function)),
        DType::Bool => bool_loop(function).map(Loops::from),
        _ => i64_loop(function).map(Loops::from),
    }
}

/// The loops for the type that a float dtype is computed in.
pub(super) fn float_loops(function: Function, dtype: DType) -> Loops {
    match dtype {
        DType::F64 => f64_loops(function),
        _ => f32_loops(function),
    }
}

/// `out = left ? right`, a bool.
///
/// # Safety
/// The contract of [`Operand`]; the inputs have one dtype, the output is bool; overlap as the module says.
pub unsafe fn compare(comparison: Comparison, out: &Operand, left: &Operand, right: &Operand) {
    debug_assert!(out.dtype == DType::Bool && left.dtype.computing() == right.dtype.computing());
    let inner = comparison_loop(comparison, left.dtype);
    // SAFETY: the loop is one for the computing type; the rest is the caller's contract.
    unsafe { drive(inner, Form::Computing, Cost::Cheap, out, &[left, right]) }
}

/// The loop that compares elements of the type that a dtype is computed in.
pub(super) fn comparison_loop(comparison: Comparison, dtype: DType) -> Loop {
    match dtype.computing() {
        DType::F32 => compare_loop::<f32>(comparison),
        DType::F64 => compare_loop::<f64>(comparison),
        DType::Bool => compare_loop::<Bool>(comparison),
        _ => compare_loop::<i64>(comparison),
    }
}

/// `out = connective(inputs…)` on booleans; `Not` takes one input.
///
/// # Safety
/// The contract of [`Operand`]; everything is bool; overlap as the module says.
pub unsafe fn logical(connective: Logical, out: &Operand, inputs: &[&Operand]) {
    let inner = logical_loop(connective);
    // SAFETY: the loop is one for bool; the rest is the caller's contract.
    unsafe { drive(inner, Form::Memory, Cost::Cheap, out, inputs) }
}

pub(super) fn logical_loop(connective: Logical) -> Loop {
    match connective {
        Logical::And => map_loop::<And, 2>,
        Logical::Not => map_loop::<Not, 1>,
    }
}

/// `out = left ? right`, bit by bit; shifts by less than 0 or more than 63 places move every bit out.
///
/// # Safety
/// The contract of [`Operand`]; all dtypes are equal, bool (no shifts) or integers; overlap as the module says.
pub unsafe fn bits(function: Bits, out: &Operand, left: &Operand, right: &Operand) {
    debug_assert!(left.dtype == out.dtype && right.dtype == out.dtype);
    let inner = bits_loop(function, out.dtype);
    // SAFETY: the loop is one for this dtype; the rest is the caller's contract.
    unsafe { drive(inner, Form::Computing, Cost::Cheap, out, &[left, right]) }
}

/// The loop for the type that a dtype is computed in.
pub(super) fn bits_loop(function: Bits, dtype: DType) -> Loop {
    match (function, dtype) {
        (Bits::And, DType::Bool) => map_loop::<And, 2>,
        (Bits::Or, DType::Bool) => map_loop::<Or, 2>,
        (Bits::Xor, DType::Bool) => map_loop::<Xor, 2>,
        (Bits::And, _) => map_loop::<IntAnd, 2>,
        (Bits::Or, _) => map_loop::<IntOr, 2>,
        (Bits::Xor, _) => map_loop::<IntXor, 2>,
        (Bits::Left, _) => map_loop::<IntLeft, 2>,
        (Bits::Right, _) => map_loop::<IntRight, 2>,
    }
}

/// `out = condition ? a : b`, PyTorch's `where`.
///
/// # Safety
/// The contract of [`Operand`]; `condition` is bool, the others have one dtype; overlap as the module says.
pub unsafe fn select(out: &Operand, condition: &Operand, a: &Operand, b: &Operand) {
    debug_assert!(condition.dtype == DType::Bool && a.dtype == out.dtype && b.dtype == out.dtype);
    let inner = choice_loop(out.dtype);
    // SAFETY: the loop is one for elements of this size; the rest is the caller's contract.
    unsafe { drive(inner, Form::Memory, Cost::Cheap, out, &[condition, a, b]) }
}

/// The loop of `where` for elements of a dtype as they are in memory.
pub(super) fn choice_loop(dtype: DType) -> Loop {
    match dtype.size() {
        1 => select_loop::<u8>,
        2 => select_loop::<u16>,
        4 => select_loop::<u32>,
        _ => select_loop::<u64>,
    }
}

pub(super) fn cost(function: Function) -> Cost {
    // Functions of a few instructions are as quick as memory.
    match function.instructions() {
        0..16 => Cost::Cheap,
        _ => Cost::Costly,
    }
}

/// The arithmetic of optimizers.
macro_rules! in_place_table {
    ($function:expr, $inner:ident) => {
        in_place_table!($function, $inner: Add Sub Mul Div Lerp Addcmul Addcdiv AddAlpha SubAlpha)
    };
    ($function:expr, $inner:ident: $($variant:ident)*) => {
        match $function {
            $(Function::$variant => Some(change_loop::<
                $inner<{ Function::$variant as usize }>,
                { Function::$variant.arity() },
            > as Loop),)*
            _ => None,
        }
    };
}

/// A function of up to four elements, as a type.
///
/// A type rather than a closure: closures are not reliably inlined into the loops of each instruction set.
pub(super) trait Map {
    /// Its arguments' type.
    type In: Copy;
    /// Its result's type.
    type Out;
    /// Whether it has arguments that [`Map::quick`] is wrong for.
    const HAS_RARE: bool = false;
    /// Its value; only the first arguments are meaningful, as many as it has.
    fn map(args: [Self::In; MAX_INPUTS]) -> Self::Out;
    /// Its value, or a wrong one and `missed` set.
    #[inline(always)]
    fn quick(args: [Self::In; MAX_INPUTS], _missed: &mut bool) -> Self::Out {
        Self::map(args)
    }
}

/// Elements of a function with rare arguments that are computed again if one of them is such.
const AGAIN: usize = 256;

// Slices as parameters are what tells the compiler that nothing overlaps, also after inlining.

#[inline(always)]
fn each1<M: Map>(out: &mut [M::Out], a: &[M::In]) {
    if const { M::HAS_RARE } {
        for (out, a) in out.chunks_mut(AGAIN).zip(a.chunks(AGAIN)) {
            let mut missed = false;
            for (out, &a) in out.iter_mut().zip(a) {
                *out = M::quick([a, a, a, a], &mut missed);
            }
            if missed {
                for (out, &a) in out.iter_mut().zip(a) {
                    *out = M::map([a, a, a, a]);
                }
            }
        }
        return;
    }
    for (out, &a) in out.iter_mut().zip(a) {
        *out = M::map([a, a, a, a]);
    }
}

#[inline(always)]
fn each2<M: Map>(out: &mut [M::Out], a: &[M::In], b: &[M::In]) {
    if const { M::HAS_RARE } {
        for ((out, a), b) in out.chunks_mut(AGAIN).zip(a.chunks(AGAIN)).zip(b.chunks(AGAIN)) {
            let mut missed = false;
            for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
                *out = M::quick([a, b, b, b], &mut missed);
            }
            if missed {
                for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
                    *out = M::map([a, b, b, b]);
                }
            }
        }
        return;
    }
    for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
        *out = M::map([a, b, b, b]);
    }
}

#[inline(always)]
fn each3<M: Map>(out: &mut [M::Out], a: &[M::In], b: &[M::In], c: &[M::In]) {
    for (((out, &a), &b), &c) in out.iter_mut().zip(a).zip(b).zip(c) {
        *out = M::map([a, b, c, c]);
    }
}

#[inline(always)]
fn each4<M: Map>(out: &mut [M::Out], a: &[M::In], b: &[M::In], c: &[M::In], d: &[M::In]) {
    for ((((out, &a), &b), &c), &d) in out.iter_mut().zip(a).zip(b).zip(c).zip(d) {
        *out = M::map([a, b, c, d]);
    }
}

vectorised! {
    /// # Safety
    /// That of [`Loop`], for the types of M and N inputs.
    pub(super) fn map_loop [M: Map, const N: usize] [M, N]
        (out: *mut u8, inputs: &[*const u8; MAX_INPUTS], n: usize)
    {
        const { assert!(N <= 2 || !M::HAS_RARE, "only loops of up to two inputs look for rare arguments") };
        // SAFETY: the caller's promise: n elements each, the output apart from the inputs.
        unsafe {
            let out = from_raw_parts_mut(out.cast::<M::Out>(), n);
            let a = from_raw_parts(inputs[0].cast::<M::In>(), n);
            if N == 1 {
                return each1::<M>(out, a);
            }
            let b = from_raw_parts(inputs[1].cast::<M::In>(), n);
            if N == 2 {
                return each2::<M>(out, a, b);
            }
            let c = from_raw_parts(inputs[2].cast::<M::In>(), n);
            if N == 3 {
                return each3::<M>(out, a, b, c);
            }
            each4::<M>(out, a, b, c, from_raw_parts(inputs[3].cast::<M::In>(), n));
        }
    }
}

#[inline(always)]
fn change2<M: Map<Out = <M as Map>::In>>(out: &mut [M::In], b: &[M::In]) {
    for (out, &b) in out.iter_mut().zip(b) {
        *out = M::map([*out, b, b, b]);
    }
}

#[inline(always)]
fn change3<M: Map<Out = <M as Map>::In>>(out: &mut [M::In], b: &[M::In], c: &[M::In]) {
    for ((out, &b), &c) in out.iter_mut().zip(b).zip(c) {
        *out = M::map([*out, b, c, c]);
    }
}

#[inline(always)]
fn change4<M: Map<Out = <M as Map>::In>>(out: &mut [M::In], b: &[M::In], c: &[M::In], d: &[M::In]) {
    for (((out, &b), &c), &d) in out.iter_mut().zip(b).zip(c).zip(d) {
        *out = M::map([*out, b, c, d]);
    }
}

vectorised! {
    /// # Safety
    /// That of [`Loops::in_place`], for the type of M and N inputs, two or more.
    fn change_loop [M: Map<Out = <M as Map>::In>, const N: usize] [M, N]
        (out: *mut u8, inputs: &[*const u8; MAX_INPUTS], n: usize)
    {
        // SAFETY: the caller's promise: n elements each, the first input the output, the others apart from it.
        unsafe {
            let out = from_raw_parts_mut(out.cast::<M::In>(), n);
            let b = from_raw_parts(inputs[1].cast::<M::In>(), n);
            if N == 2 {
                return change2::<M>(out, b);
            }
            let c = from_raw_parts(inputs[2].cast::<M::In>(), n);
            if N == 3 {
                return change3::<M>(out, b, c);
            }
            change4::<M>(out, b, c, from_raw_parts(inputs[3].cast::<M::In>(), n));
        }
    }
}

/// The function with this position in [`Function::ALL`], on f32.
struct OnF32<const F: usize>;

impl<const F: usize> Map for OnF32<F> {
    type In = f32;
    type Out = f32;
    const HAS_RARE: bool = Function::ALL[F].has_rare();
    #[inline(always)]
    fn map(args: [f32; MAX_INPUTS]) -> f32 {
        const { Function::ALL[F] }.eval_f32(&args[..const { Function::ALL[F].arity() }])
    }
    #[inline(always)]
    fn quick(args: [f32; MAX_INPUTS], missed: &mut bool) -> f32 {
        let mut cx = QuickF32::default();
        let result = const { Function::ALL[F] }.apply(&mut cx, &args[..const { Function::ALL[F].arity() }]);
        *missed |= cx.missed;
        result
    }
}

/// The function with this position in [`Function::ALL`], on f64.
struct OnF64<const F: usize>;

impl<const F: usize> Map for OnF64<F> {
    type In = f64;
    type Out = f64;
    const HAS_RARE: bool = Function::ALL[F].has_rare();
    #[inline(always)]
    fn map(args: [f64; MAX_INPUTS]) -> f64 {
        const { Function::ALL[F] }.eval_f64(&args[..const { Function::ALL[F].arity() }])
    }
    #[inline(always)]
    fn quick(args: [f64; MAX_INPUTS], missed: &mut bool) -> f64 {
        let mut cx = QuickF64::default();
        let result = const { Function::ALL[F] }.apply(&mut cx, &args[..const { Function::ALL[F].arity() }]);
        *missed |= cx.missed;
        result
    }
}

/// The function with this position in [`Function::ALL`], on i64, where it has such a form.
struct OnI64<const F: usize>;

macro_rules! integer_loop {
    ($variant:ident) => {
        None
    };
    ($variant:ident $integer:expr) => {
        Some(map_loop::<OnI64<{ Function::$variant as usize }>, { Function::$variant.arity() }>)
    };
}

macro_rules! define_loops {
    ($($(#[$doc:meta])* $variant:ident $name:literal $instructions:literal $($rare:ident)? |$cx:ident $(, $arg:ident)*| $body:expr;
        exact $exact:expr $(, integers |$($i:ident),*| $integer:expr)?;
    )*) => {
        fn f32_loops(function: Function) -> Loops {
            let apart: Loop = match function {
                $(Function::$variant => map_loop::<
                    OnF32<{ Function::$variant as usize }>,
                    { Function::$variant.arity() },
                >,)*
            };
            Loops { apart, in_place: in_place_table!(function, OnF32) }
        }

        fn f64_loops(function: Function) -> Loops {
            let apart: Loop = match function {
                $(Function::$variant => map_loop::<
                    OnF64<{ Function::$variant as usize }>,
                    { Function::$variant.arity() },
                >,)*
            };
            Loops { apart, in_place: in_place_table!(function, OnF64) }
        }

        fn i64_loop(function: Function) -> Option<Loop> {
            match function { $(Function::$variant => integer_loop!($variant $($integer)?),)* }
        }

        $($(impl Map for OnI64<{ Function::$variant as usize }> {
            type In = i64;
            type Out = i64;
            #[inline(always)]
            fn map([$($i,)* ..]: [i64; MAX_INPUTS]) -> i64 {
                $integer
            }
        })?)*
    };
}
kiln_ir::scalar_functions!(define_loops);

vectorised! {
    /// # Safety
    /// That of [`Loop`].
    fn select_loop [T: Mask] [T] (out: *mut u8, inputs: &[*const u8; MAX_INPUTS], n: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let condition = from_raw_parts(inputs[0], n);
            let a = from_raw_parts(inputs[1].cast::<T>(), n);
            let b = from_raw_parts(inputs[2].cast::<T>(), n);
            choose(from_raw_parts_mut(out.cast::<T>(), n), condition, a, b);
        }
    }
}

#[inline(always)]
fn choose<T: Mask>(out: &mut [T], condition: &[Bool], a: &[T], b: &[T]) {
    for (((out, &condition), &a), &b) in out.iter_mut().zip(condition).zip(a).zip(b) {
        *out = T::choose(condition, a, b);
    }
}

/// The bits of an element.
trait Mask: Copy {
    /// `condition ? a : b`, by bits: of a branch the compiler makes a choice of addresses, which no vector can follow.
    fn choose(condition: Bool, a: Self, b: Self) -> Self;
}

macro_rules! masks {
    ($($ty:ty)*) => {$(
        impl Mask for $ty {
            #[inline(always)]
            fn choose(condition: Bool, a: $ty, b: $ty) -> $ty {
                let mask = <$ty>::from(condition != 0).wrapping_neg();
                b ^ ((a ^ b) & mask)
            }
        }
    )*};
}
masks!(u8 u16 u32 u64);

macro_rules! maps {
    ($($name:ident: $in:ty => $out:ty, |$a:ident, $b:ident, $c:ident| $body:expr;)*) => {$(
        struct $name;
        impl Map for $name {
            type In = $in;
            type Out = $out;
            #[inline(always)]
            fn map([$a, $b, $c, _]: [$in; MAX_INPUTS]) -> $out {
                let _ = ($a, $b, $c);
                $body
            }
        }
    )*};
}

maps! {
    And: Bool => Bool, |a, b, c| a & b;
    Or: Bool => Bool, |a, b, c| a | b;
    Not: Bool => Bool, |a, b, c| a ^ 1;
    Same: Bool => Bool, |a, b, c| a;
    Xor: Bool => Bool, |a, b, c| a ^ b;
    IntAnd: i64 => i64, |a, b, c| a & b;
    IntOr: i64 => i64, |a, b, c| a | b;
    IntXor: i64 => i64, |a, b, c| a ^ b;
    IntLeft: i64 => i64, |a, b, c| if (0..64).contains(&b) { a << b } else { 0 };
    IntRight: i64 => i64, |a, b, c| a >> if (0..64).contains(&b) { b } else { 63 };
}

/// Wrapping power; for a negative exponent the integer part of the exact value, and 0 for base 0.
fn int_pow(base: i64, exponent: i64) -> i64 {
    if exponent < 0 {
        return match base {
            1 => 1,
            -1 if exponent % 2 == 0 => 1,
            -1 => -1,
            _ => 0,
        };
    }
    let (mut result, mut square, mut bits) = (1i64, base, exponent);
    while bits > 0 {
        if bits & 1 == 1 {
            result = result.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        bits >>= 1;
    }
    result
}

fn bool_loop(function: Function) -> Option<Loop> {
    match function {
        Function::Add | Function::Maximum => Some(map_loop::<Or, 2>),
        Function::Mul | Function::Minimum => Some(map_loop::<And, 2>),
        Function::Sign => Some(map_loop::<Same, 1>),
        Function::NanToNum => Some(map_loop::<Same, 4>),
        _ => None,
    }
}

macro_rules! comparisons {
    ($($name:ident $symbol:tt)*) => {
        $(
            struct $name<T>(std::marker::PhantomData<T>);
            impl<T: Element> Map for $name<T> {
                type In = T;
                type Out = Bool;
                #[inline(always)]
                fn map([a, b, _, _]: [T; MAX_INPUTS]) -> Bool {
                    Bool::from(a $symbol b)
                }
            }
        )*

        fn compare_loop<T: Element>(comparison: Comparison) -> Loop {
            match comparison {
                $(Comparison::$name => map_loop::<$name<T>, 2>,)*
            }
        }
    };
}

comparisons! { Eq == Ne != Lt < Le <= Gt > Ge >= }
