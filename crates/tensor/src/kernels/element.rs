//! The Rust types of the dtypes, and conversion between them.

/// A Rust type that holds elements of one dtype. `bool` is held as a byte, so that any memory is valid.
pub(super) trait Element: Copy + PartialOrd + Send + Sync + 'static {
    /// From a boolean.
    fn from_bool(x: Bool) -> Self;
    /// From an integer.
    fn from_i64(x: i64) -> Self;
    /// From a single.
    fn from_f32(x: f32) -> Self;
    /// From a double.
    fn from_f64(x: f64) -> Self;
    /// To another element type: as C converts, but a float outside the integers' range saturates and NaN
    /// becomes 0; everything but zero is true.
    fn cast<T: Element>(self) -> T;
}

/// A boolean in memory: a byte, 0 or 1.
pub(super) type Bool = u8;

macro_rules! element {
    ($ty:ty, $name:ident, $bool:expr, $i64:expr, $f32:expr, $f64:expr) => {
        impl Element for $ty {
            #[inline(always)]
            fn from_bool(x: Bool) -> $ty {
                $bool(x)
            }
            #[inline(always)]
            fn from_i64(x: i64) -> $ty {
                $i64(x)
            }
            #[inline(always)]
            fn from_f32(x: f32) -> $ty {
                $f32(x)
            }
            #[inline(always)]
            fn from_f64(x: f64) -> $ty {
                $f64(x)
            }
            #[inline(always)]
            fn cast<T: Element>(self) -> T {
                T::$name(self)
            }
        }
    };
}

element!(Bool, from_bool, |x| x, |x| Bool::from(x != 0), |x| Bool::from(x != 0.0), |x| Bool::from(x != 0.0));
element!(i64, from_i64, i64::from, |x| x, |x| x as i64, |x| x as i64);
element!(f32, from_f32, f32::from, |x| x as f32, |x| x, |x| x as f32);
element!(f64, from_f64, f64::from, |x| x as f64, f64::from, |x| x);
