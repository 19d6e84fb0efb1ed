//! The vocabulary of exact operations in which every scalar function is written.

/// A floating format that the functions are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Width {
    /// IEEE binary32.
    F32,
    /// IEEE binary64.
    F64,
}

impl Width {
    /// Number of explicit mantissa bits: where the exponent field begins.
    pub const fn mantissa_bits(self) -> u32 {
        match self {
            Width::F32 => 23,
            Width::F64 => 52,
        }
    }

    /// Bias of the exponent field.
    pub const fn bias(self) -> i64 {
        match self {
            Width::F32 => 127,
            Width::F64 => 1023,
        }
    }

    /// The bit that holds the sign, as the same-width signed integer with only that bit set.
    pub const fn sign_bit(self) -> i64 {
        match self {
            Width::F32 => i32::MIN as i64,
            Width::F64 => i64::MIN,
        }
    }

    /// 1.5·2^mantissa: adding it rounds a small number to an integer, ties to even, and leaves that
    /// integer in the low bits.
    pub const fn magic(self) -> f64 {
        match self {
            Width::F32 => 12582912.0,
            Width::F64 => 6755399441055744.0,
        }
    }

    /// The bits of [`Width::magic`] in this format.
    pub const fn magic_bits(self) -> i64 {
        match self {
            Width::F32 => 12582912.0f32.to_bits() as i64,
            Width::F64 => 6755399441055744.0f64.to_bits() as i64,
        }
    }

    /// The smallest positive normal number.
    pub const fn min_normal(self) -> f64 {
        match self {
            Width::F32 => f32::MIN_POSITIVE as f64,
            Width::F64 => f64::MIN_POSITIVE,
        }
    }

    /// The exponent below which 2·2^n rounds to zero.
    pub const fn vanishing(self) -> f64 {
        match self {
            Width::F32 => -151.0,
            Width::F64 => -1076.0,
        }
    }

    /// Size in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Width::F32 => 4,
            Width::F64 => 8,
        }
    }
}

/// A function of the C library, and the same on scalars. Its name tells it from others.
#[derive(Clone, Copy, Debug)]
pub struct Libm {
    names: [&'static str; 2],
    pub(super) single: fn(&[f32]) -> f32,
    pub(super) double: fn(&[f64]) -> f64,
}

impl Libm {
    /// Of its C names for f32 and f64, and what it computes.
    pub const fn new(names: [&'static str; 2], single: fn(&[f32]) -> f32, double: fn(&[f64]) -> f64) -> Libm {
        Libm { names, single, double }
    }

    /// The C name for a format: `pow` or `powf`.
    pub const fn name(self, width: Width) -> &'static str {
        match width {
            Width::F32 => self.names[0],
            Width::F64 => self.names[1],
        }
    }
}

impl PartialEq for Libm {
    fn eq(&self, other: &Libm) -> bool {
        self.names == other.names
    }
}

impl Eq for Libm {}

impl std::hash::Hash for Libm {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.names.hash(state);
    }
}

/// Numbers that functions look up: as many as a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Table {
    /// Its name in text.
    pub name: &'static str,
    /// Whole numbers that a double holds.
    pub values: &'static [u64],
}

/// What a function of `N` arguments does for the few arguments that its usual way is wrong for: rarely run, so it may
/// be slow, but must be right.
pub trait Rare<const N: usize> {
    /// Its name in text.
    const NAME: &'static str;
    /// Its value.
    fn body<L: Lane>(cx: &mut L, args: [L::F; N]) -> L::F;
}

/// A function of `N` arguments written for doubles. For floats it is computed in doubles and rounded once, which takes
/// shorter series than doubles need and no numbers in two parts.
pub trait InDouble<const N: usize> {
    /// Its name in text.
    const NAME: &'static str;
    /// Its value, over lanes of doubles, as accurate as `target` needs.
    fn body<L: Lane>(cx: &mut L, args: [L::F; N], target: Width) -> L::F;
}

/// An integral number in both of its forms, as [`Lane::nearest`] gives it.
#[derive(Clone, Copy, Debug)]
pub struct Whole<F, I> {
    /// As a float.
    pub float: F,
    /// As a same-width integer.
    pub int: I,
}

/// A context that performs (or writes down) operations on one floating format.
///
/// Every operation is exact or correctly rounded to nearest-even, and nothing is contracted: a fused
/// multiply-add happens where [`Lane::fma`] says so and nowhere else. A function written against this
/// trait therefore gives the same bits in every instantiation (NaN payloads excepted).
///
/// Functions are written without branches: both sides are computed and [`Lane::select`] picks, so that
/// a loop over a scalar instantiation vectorises. The one exception is [`Lane::rarely`].
pub trait Lane {
    /// A number.
    type F: Copy;
    /// A signed integer as wide as the number.
    type I: Copy;
    /// The outcome of a comparison.
    type M: Copy;
    /// The format.
    const WIDTH: Width;

    /// The constant nearest to `value` in this format.
    fn constant(&mut self, value: f64) -> Self::F;
    /// An integer constant.
    fn int(&mut self, value: i64) -> Self::I;
    /// Gives a value a name where instantiations can show it; changes nothing else.
    fn name(&mut self, _name: &str, value: Self::F) -> Self::F {
        value
    }

    /// a + b.
    fn add(&mut self, a: Self::F, b: Self::F) -> Self::F;
    /// a − b.
    fn sub(&mut self, a: Self::F, b: Self::F) -> Self::F;
    /// a · b.
    fn mul(&mut self, a: Self::F, b: Self::F) -> Self::F;
    /// a / b.
    fn div(&mut self, a: Self::F, b: Self::F) -> Self::F;
    /// −a, also for zeros and NaN.
    fn neg(&mut self, a: Self::F) -> Self::F;
    /// |a|.
    fn abs(&mut self, a: Self::F) -> Self::F;
    /// √a.
    fn sqrt(&mut self, a: Self::F) -> Self::F;
    /// a·b + c, rounded once.
    fn fma(&mut self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a < b ? a : b`; so b where either is NaN, or where both are zeros.
    fn min(&mut self, a: Self::F, b: Self::F) -> Self::F;
    /// `a > b ? a : b`; so b where either is NaN, or where both are zeros.
    fn max(&mut self, a: Self::F, b: Self::F) -> Self::F;
    /// The largest integer ≤ a.
    fn floor(&mut self, a: Self::F) -> Self::F;
    /// The integer nearest to a, ties to even.
    fn round_ties_even(&mut self, a: Self::F) -> Self::F;
    /// A function of the C library, element by element.
    fn libm(&mut self, function: Libm, args: &[Self::F]) -> Self::F;

    /// `mask ? R's value : common`, where the mask is hardly ever set.
    fn rarely<R: Rare<N>, const N: usize>(
        &mut self,
        mask: Self::M,
        common: Self::F,
        args: [Self::F; N],
    ) -> Self::F;
    /// A function that is written for doubles.
    fn in_double<B: InDouble<N>, const N: usize>(&mut self, args: [Self::F; N]) -> Self::F;
    /// The number of a table at an index, of which as many low bits count as the table has places for.
    fn lookup(&mut self, table: Table, index: Self::I) -> Self::F;

    /// The number's bits.
    fn bits(&mut self, a: Self::F) -> Self::I;
    /// The number with these bits.
    fn bits_to_float(&mut self, a: Self::I) -> Self::F;
    /// a + b, wrapping.
    fn int_add(&mut self, a: Self::I, b: Self::I) -> Self::I;
    /// a − b, wrapping.
    fn int_sub(&mut self, a: Self::I, b: Self::I) -> Self::I;
    /// a & b.
    fn int_and(&mut self, a: Self::I, b: Self::I) -> Self::I;
    /// a | b.
    fn int_or(&mut self, a: Self::I, b: Self::I) -> Self::I;
    /// a shifted left.
    fn shl(&mut self, a: Self::I, by: u32) -> Self::I;
    /// a shifted right, copies of the sign coming in.
    fn shr(&mut self, a: Self::I, by: u32) -> Self::I;

    /// a < b.
    fn lt(&mut self, a: Self::F, b: Self::F) -> Self::M;
    /// a ≤ b.
    fn le(&mut self, a: Self::F, b: Self::F) -> Self::M;
    /// a > b.
    fn gt(&mut self, a: Self::F, b: Self::F) -> Self::M;
    /// a ≥ b.
    fn ge(&mut self, a: Self::F, b: Self::F) -> Self::M;
    /// a = b; false where either is NaN.
    fn eq(&mut self, a: Self::F, b: Self::F) -> Self::M;
    /// a ≠ b; true where either is NaN.
    fn ne(&mut self, a: Self::F, b: Self::F) -> Self::M;
    /// a and b.
    fn and(&mut self, a: Self::M, b: Self::M) -> Self::M;
    /// a or b.
    fn or(&mut self, a: Self::M, b: Self::M) -> Self::M;
    /// not a.
    fn not(&mut self, a: Self::M) -> Self::M;
    /// `mask ? a : b`.
    fn select(&mut self, mask: Self::M, a: Self::F, b: Self::F) -> Self::F;

    /// Whether a is NaN.
    #[inline(always)]
    fn is_nan(&mut self, a: Self::F) -> Self::M {
        self.ne(a, a)
    }

    /// The integer nearest to a·b, for |a·b| < 2^(mantissa − 2). NaN gives a NaN float and any integer.
    #[inline(always)]
    fn nearest(&mut self, a: Self::F, b: Self::F) -> Whole<Self::F, Self::I> {
        let magic = self.constant(Self::WIDTH.magic());
        let shifted = self.fma(a, b, magic);
        let shifted = self.name("shifted", shifted);
        let float = self.sub(shifted, magic);
        let float = self.name("n", float);
        let bits = self.bits(shifted);
        let magic_bits = self.int(Self::WIDTH.magic_bits());
        Whole { float, int: self.int_sub(bits, magic_bits) }
    }

    /// A small integer (|a| < 2^(mantissa − 2)) as a float.
    #[inline(always)]
    fn int_to_float(&mut self, a: Self::I) -> Self::F {
        let magic = self.constant(Self::WIDTH.magic());
        let magic_bits = self.int(Self::WIDTH.magic_bits());
        let shifted = self.int_add(a, magic_bits);
        let shifted = self.bits_to_float(shifted);
        self.sub(shifted, magic)
    }

    /// 2^n, for n within the normal exponents.
    #[inline(always)]
    fn power_of_two(&mut self, n: Self::I) -> Self::F {
        let bias = self.int(Self::WIDTH.bias());
        let biased = self.int_add(n, bias);
        let bits = self.shl(biased, Self::WIDTH.mantissa_bits());
        self.bits_to_float(bits)
    }

    /// a·2^n rounded once, for a in [½, 2] and any n whose half is a normal exponent: results may be
    /// denormal, zero or infinite.
    #[inline(always)]
    fn scale(&mut self, a: Self::F, n: Whole<Self::F, Self::I>) -> Self::F {
        // Where the result is zero it comes from zero: processors take a hundred times as long to round down to
        // it, and what a mask hides has such exponents.
        let vanishing = self.constant(Self::WIDTH.vanishing());
        let vanishes = self.lt(n.float, vanishing);
        let zero = self.constant(0.0);
        let a = self.select(vanishes, zero, a);
        // The first product is exact, so only the second one rounds.
        let half = self.shr(n.int, 1);
        let rest = self.int_sub(n.int, half);
        let first = self.power_of_two(half);
        let second = self.power_of_two(rest);
        let scaled = self.mul(a, first);
        self.mul(scaled, second)
    }

    /// |magnitude| with the sign of `sign`, for a magnitude without sign bit.
    #[inline(always)]
    fn with_sign_of(&mut self, magnitude: Self::F, sign: Self::F) -> Self::F {
        let mask = self.int(Self::WIDTH.sign_bit());
        let sign = self.bits(sign);
        let sign = self.int_and(sign, mask);
        let magnitude = self.bits(magnitude);
        let joined = self.int_or(magnitude, sign);
        self.bits_to_float(joined)
    }

    /// −|a|.
    #[inline(always)]
    fn negative_abs(&mut self, a: Self::F) -> Self::F {
        let mask = self.int(Self::WIDTH.sign_bit());
        let bits = self.bits(a);
        let joined = self.int_or(bits, mask);
        self.bits_to_float(joined)
    }

    /// a, its sign turned round where the lowest bit of n is set.
    #[inline(always)]
    fn negate_if_odd(&mut self, a: Self::F, n: Self::I) -> Self::F {
        let sign = self.shl(n, 8 * Self::WIDTH.bytes() as u32 - 1);
        let bits = self.bits(a);
        // The carry out of the highest bit is lost, so adding it is turning it.
        let turned = self.int_add(bits, sign);
        self.bits_to_float(turned)
    }

    /// Whether a whole number is odd; false for those too large to be.
    #[inline(always)]
    fn is_odd(&mut self, a: Self::F) -> Self::M {
        let half = self.constant(0.5);
        let half = self.mul(a, half);
        let whole = self.floor(half);
        self.ne(half, whole)
    }

    /// a + b and what its rounding lost.
    #[inline(always)]
    fn two_sum(&mut self, a: Self::F, b: Self::F) -> (Self::F, Self::F) {
        let sum = self.add(a, b);
        let sum = self.name("sum", sum);
        let b_kept = self.sub(sum, a);
        let a_kept = self.sub(sum, b_kept);
        let b_lost = self.sub(b, b_kept);
        let a_lost = self.sub(a, a_kept);
        let lost = self.add(a_lost, b_lost);
        (sum, self.name("lost", lost))
    }

    /// a · b and what its rounding lost.
    #[inline(always)]
    fn two_product(&mut self, a: Self::F, b: Self::F) -> (Self::F, Self::F) {
        let product = self.mul(a, b);
        let product = self.name("product", product);
        let minus = self.neg(product);
        let lost = self.fma(a, b, minus);
        (product, self.name("lost", lost))
    }

    /// c₀ + c₁x + … by Horner's rule with fma. `name` is for instantiations that show names.
    #[inline(always)]
    fn polynomial(&mut self, name: &str, x: Self::F, coefficients: &[f64]) -> Self::F {
        let mut sum = self.constant(coefficients[coefficients.len() - 1]);
        for &coefficient in coefficients[..coefficients.len() - 1].iter().rev() {
            let coefficient = self.constant(coefficient);
            sum = self.fma(sum, x, coefficient);
            sum = self.name(name, sum);
        }
        sum
    }
}
