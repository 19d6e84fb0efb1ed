//! Division of integers: by elements, which may be zero, and by a number, which takes a multiplication.

use super::drive::{Cost, Form, Loop, MAX_INPUTS, drive};
use super::element::Bool;
use super::isa::vectorised;
use super::operand::Operand;
use super::pointwise::{Map, map_loop};
use kiln_ir::{DType, Division};
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// `out = x divided by y` for integers. Returns the first pair that has no result; nothing is written then.
///
/// # Safety
/// The contract of [`Operand`]; all have one integer dtype; overlap as for pointwise kernels.
pub unsafe fn divide(division: Division, out: &Operand, x: &Operand, y: &Operand) -> Result<(), (i64, i64)> {
    debug_assert!(x.dtype == out.dtype && y.dtype == out.dtype && out.dtype.computing() == DType::I64);
    if out.numel() == 0 {
        return Ok(());
    }
    let is_number = y.shape.iter().zip(y.strides).all(|(&size, &stride)| size == 1 || stride == 0);
    // SAFETY: there are elements.
    let inner = match is_number.then(|| unsafe { first(y) }) {
        // Every quotient fits.
        Some(number) if number != 0 && number != -1 => by_number(division),
        _ => {
            // SAFETY: the caller's contract.
            unsafe { check(division, out, x, y) }?;
            by_elements(division)
        }
    };
    // SAFETY: the loop is one for i64; the rest is the caller's contract.
    unsafe { drive(inner, Form::Computing, Cost::Cheap, out, &[x, y]) };
    Ok(())
}

/// Looks for a pair without a result before anything is written, so that a division in place leaves its operand as it
/// was.
///
/// # Safety
/// That of [`divide`].
unsafe fn check(division: Division, out: &Operand, x: &Operand, y: &Operand) -> Result<(), (i64, i64)> {
    let bad: Loop = match division {
        Division::FloorDivide | Division::DivTrunc => map_loop::<NoQuotient, 2>,
        Division::Remainder | Division::Fmod => map_loop::<NoRest, 2>,
    };
    let mut flags = vec![0u8; out.numel()];
    let mut strides: Vec<isize> = vec![1; out.shape.len()];
    for d in (1..out.shape.len()).rev() {
        strides[d - 1] = strides[d] * out.shape[d] as isize;
    }
    let marks = Operand { ptr: flags.as_mut_ptr(), dtype: DType::Bool, shape: out.shape, strides: &strides };
    // SAFETY: the marks are dense, fresh and of out's shape; the rest is the caller's contract.
    unsafe { drive(bad, Form::Computing, Cost::Cheap, &marks, &[x, y]) };
    let Some(at) = flags.iter().position(|&flag| flag != 0) else { return Ok(()) };
    // SAFETY: an element of both, by its row-major index.
    Err(unsafe { (element(x, at), element(y, at)) })
}

/// # Safety
/// The contract of [`Operand`], of an integer dtype; it has this element, counted in row-major order.
unsafe fn element(operand: &Operand, at: usize) -> i64 {
    let mut rest = at;
    let mut offset = 0;
    for (&size, &stride) in operand.shape.iter().zip(operand.strides).rev() {
        offset += (rest % size) as isize * stride;
        rest /= size;
    }
    let ptr = operand.ptr.wrapping_offset(offset * operand.dtype.size() as isize);
    // SAFETY: the caller's promise.
    unsafe {
        match operand.dtype {
            DType::U8 | DType::Bool => i64::from(ptr.read()),
            DType::I8 => i64::from(ptr.cast::<i8>().read()),
            DType::I16 => i64::from(ptr.cast::<i16>().read()),
            DType::I32 => i64::from(ptr.cast::<i32>().read()),
            DType::I64 => ptr.cast::<i64>().read(),
            DType::F16 | DType::BF16 | DType::F32 | DType::F64 => 0,
        }
    }
}

/// # Safety
/// That of [`element`]; there is an element.
unsafe fn first(operand: &Operand) -> i64 {
    // SAFETY: the caller's promise.
    unsafe { element(operand, 0) }
}

fn by_elements(division: Division) -> Loop {
    match division {
        Division::FloorDivide => map_loop::<FloorDivide, 2>,
        Division::DivTrunc => map_loop::<DivTrunc, 2>,
        Division::Remainder => map_loop::<Remainder, 2>,
        Division::Fmod => map_loop::<Fmod, 2>,
    }
}

fn by_number(division: Division) -> Loop {
    match division {
        Division::FloorDivide => number_loop::<FloorDivide>,
        Division::DivTrunc => number_loop::<DivTrunc>,
        Division::Remainder => number_loop::<Remainder>,
        Division::Fmod => number_loop::<Fmod>,
    }
}

/// A number to divide by, as the factor and the shift that do the same (Granlund and Montgomery, "Division by invariant
/// integers using multiplication").
#[derive(Clone, Copy)]
struct Divisor {
    number: i64,
    factor: i64,
    shift: u32,
}

impl Divisor {
    /// For any number but zero.
    fn new(number: i64) -> Divisor {
        let size = number.unsigned_abs();
        // ⌈log₂ size⌉, at least 1.
        let bits = (u64::BITS - (size - 1).leading_zeros()).max(1);
        // 2^(63 + bits)/size is at least 2⁶⁴, which is what the sum in `quotient` stands for: only the rest is kept.
        let factor = ((1u128 << (63 + bits)) / u128::from(size) + 1) as u64 as i64;
        Divisor { number, factor, shift: bits - 1 }
    }

    /// x / number, rounded towards zero; wraps for i64::MIN / −1.
    #[inline(always)]
    fn quotient(self, x: i64) -> i64 {
        let product = ((i128::from(self.factor) * i128::from(x)) >> 64) as i64;
        let quotient = (x.wrapping_add(product) >> self.shift).wrapping_sub(x >> 63);
        let sign = self.number >> 63;
        (quotient ^ sign).wrapping_sub(sign)
    }
}

/// A kind of division, by the quotient that is rounded towards zero.
trait Kind {
    fn of_quotient(x: i64, y: i64, quotient: i64) -> i64;
}

/// Whether a number divides, and is divided, exactly enough as a double: below 2⁵² in size.
#[inline(always)]
fn is_short(x: i64) -> bool {
    (x.wrapping_add(1 << 52) as u64) < 1 << 53
}

/// Whether a rest is on the other side of zero than the divisor.
#[inline(always)]
fn is_against(rest: i64, y: i64) -> bool {
    rest != 0 && (rest ^ y) < 0
}

macro_rules! kinds {
    ($($name:ident: |$x:ident, $y:ident, $quotient:ident, $rest:ident| $body:expr;)*) => {$(
        struct $name;
        impl Kind for $name {
            #[inline(always)]
            fn of_quotient($x: i64, $y: i64, $quotient: i64) -> i64 {
                let $rest = $x.wrapping_sub($quotient.wrapping_mul($y));
                let _ = $rest;
                $body
            }
        }
        impl Map for $name {
            type In = i64;
            type Out = i64;
            const HAS_RARE: bool = true;
            #[inline(always)]
            fn map([a, b, ..]: [i64; MAX_INPUTS]) -> i64 {
                Division::$name.checked(a, b).unwrap_or(0)
            }
            #[inline(always)]
            fn quick([a, b, ..]: [i64; MAX_INPUTS], missed: &mut bool) -> i64 {
                *missed |= !is_short(a) | !is_short(b) | (b == 0);
                // A quotient that isn't whole is further from the next whole number than what rounding adds to it.
                $name::of_quotient(a, b, (a as f64 / b as f64) as i64)
            }
        }
    )*};
}

kinds! {
    FloorDivide: |x, y, quotient, rest| quotient.wrapping_sub(i64::from(is_against(rest, y)));
    DivTrunc: |x, y, quotient, rest| quotient;
    Remainder: |x, y, quotient, rest| if is_against(rest, y) { rest.wrapping_add(y) } else { rest };
    Fmod: |x, y, quotient, rest| rest;
}

vectorised! {
    /// # Safety
    /// That of [`Loop`] for i64 and two inputs; the second one is the same number throughout, and not zero.
    fn number_loop [K: Kind] [K] (out: *mut u8, inputs: &[*const u8; MAX_INPUTS], n: usize) {
        // SAFETY: the caller's promise: n elements each, the output apart from the inputs.
        let (out, x, y) = unsafe {
            (
                from_raw_parts_mut(out.cast::<i64>(), n),
                from_raw_parts(inputs[0].cast::<i64>(), n),
                from_raw_parts(inputs[1].cast::<i64>(), n),
            )
        };
        let Some(&number) = y.first() else { return };
        let divisor = Divisor::new(number);
        for (out, &x) in out.iter_mut().zip(x) {
            *out = K::of_quotient(x, number, divisor.quotient(x));
        }
    }
}

struct NoQuotient;

impl Map for NoQuotient {
    type In = i64;
    type Out = Bool;
    #[inline(always)]
    fn map([a, b, ..]: [i64; MAX_INPUTS]) -> Bool {
        Bool::from((b == 0) | ((b == -1) & (a == i64::MIN)))
    }
}

struct NoRest;

impl Map for NoRest {
    type In = i64;
    type Out = Bool;
    #[inline(always)]
    fn map([_, b, ..]: [i64; MAX_INPUTS]) -> Bool {
        Bool::from(b == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_divide_as_elements_do() {
        let edges: Vec<i64> = (0..63)
            .flat_map(|bit| [-1i64, 0, 1].map(|d| (1i64 << bit) + d))
            .chain([i64::MAX, i64::MIN, i64::MIN + 1, 10, 7, 1_000_000_007, 0x1234_5678_9abc_def0])
            .flat_map(|x| [x, x.wrapping_neg()])
            .collect();
        for &y in edges.iter().filter(|&&y| y != 0) {
            let divisor = Divisor::new(y);
            for &x in &edges {
                let quotient = divisor.quotient(x);
                assert_eq!(quotient, x.wrapping_div(y), "{x} / {y}");
                if (x, y) == (i64::MIN, -1) {
                    continue;
                }
                for (got, division) in [
                    (FloorDivide::of_quotient(x, y, quotient), Division::FloorDivide),
                    (DivTrunc::of_quotient(x, y, quotient), Division::DivTrunc),
                    (Remainder::of_quotient(x, y, quotient), Division::Remainder),
                    (Fmod::of_quotient(x, y, quotient), Division::Fmod),
                ] {
                    assert_eq!(Some(got), division.checked(x, y), "{x} {division:?} {y}");
                }
                let mut missed = false;
                for (got, division) in [
                    (FloorDivide::quick([x, y, y, y], &mut missed), Division::FloorDivide),
                    (DivTrunc::quick([x, y, y, y], &mut missed), Division::DivTrunc),
                    (Remainder::quick([x, y, y, y], &mut missed), Division::Remainder),
                    (Fmod::quick([x, y, y, y], &mut missed), Division::Fmod),
                ] {
                    assert!(missed || Some(got) == division.checked(x, y), "{x} {division:?} {y}");
                }
            }
        }
    }
}
