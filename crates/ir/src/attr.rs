//! Attributes: what shapes an op's code (a dim, a dtype, a reduction), as opposed to the numbers that are
//! operands. Each kind prints and parses back.

use crate::{DType, Device, Dims, Scalar, Shape};

/// How a loss is reduced.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Reduction {
    /// One loss per sample.
    None,
    /// The mean over the samples.
    Mean,
    /// The sum over the samples.
    Sum,
}

/// Which form of GELU.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default)]
pub enum Approximate {
    /// The exact form, with the error function.
    #[default]
    None,
    /// The approximation with tanh.
    Tanh,
}

/// A division of integers that rounds, or its rest.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Division {
    /// The quotient rounded down.
    FloorDivide,
    /// The quotient rounded towards zero.
    DivTrunc,
    /// The rest with the sign of the divisor.
    Remainder,
    /// The rest with the sign of the dividend.
    Fmod,
}

impl Division {
    /// Every one of them.
    pub const ALL: [Division; 4] =
        [Division::FloorDivide, Division::DivTrunc, Division::Remainder, Division::Fmod];

    /// Its name, that of the op it belongs to.
    pub const fn name(self) -> &'static str {
        match self {
            Division::FloorDivide => "floor_divide",
            Division::DivTrunc => "div_trunc",
            Division::Remainder => "remainder",
            Division::Fmod => "fmod",
        }
    }

    /// The result; `None` for a division by zero and for a quotient that does not fit.
    #[inline(always)]
    pub const fn checked(self, x: i64, y: i64) -> Option<i64> {
        if y == 0 {
            return None;
        }
        match self {
            // The rest of a division by −1 is 0, whether or not the quotient fits.
            Division::Remainder | Division::Fmod if y == -1 => Some(0),
            Division::FloorDivide | Division::DivTrunc if y == -1 && x == i64::MIN => None,
            Division::DivTrunc => Some(x / y),
            Division::Fmod => Some(x % y),
            Division::FloorDivide => {
                let quotient = x / y;
                Some(if x % y != 0 && (x < 0) != (y < 0) { quotient - 1 } else { quotient })
            }
            Division::Remainder => {
                let rest = x % y;
                Some(if rest != 0 && (rest < 0) != (y < 0) { rest + y } else { rest })
            }
        }
    }
}

impl Attribute for Division {
    fn print(&self) -> String {
        self.name().to_string()
    }
    fn parse(text: &str) -> Option<Division> {
        Division::ALL.into_iter().find(|division| division.name() == text)
    }
}

/// What becomes of several values that meet at one place.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum ScatterReduce {
    /// Their sum.
    Sum,
    /// Their product.
    Prod,
    /// Their mean (of integers: rounded down).
    Mean,
    /// The largest; NaN if there is one.
    Amax,
    /// The smallest; NaN if there is one.
    Amin,
}

/// Two numbers for each dim: sizes with their strides, widths before with widths after.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Pairs(Box<[(usize, usize)]>);

impl Pairs {
    /// The numbers of both lists, side by side (as far as the shorter one goes).
    pub fn new(firsts: &[usize], seconds: &[usize]) -> Pairs {
        Pairs(firsts.iter().copied().zip(seconds.iter().copied()).collect())
    }

    /// The first numbers.
    pub fn firsts(&self) -> Shape {
        self.0.iter().map(|pair| pair.0).collect()
    }

    /// The second numbers.
    pub fn seconds(&self) -> Shape {
        self.0.iter().map(|pair| pair.1).collect()
    }
}

/// A kind of attribute: how it prints, and how that text is read.
pub trait Attribute: Sized {
    /// The text form.
    fn print(&self) -> String;
    /// Reads the text form.
    fn parse(text: &str) -> Option<Self>;
    /// Calls `change` for every number in it, in order. Dims of a tensor are not numbers in this sense.
    fn each_number(&mut self, _change: &mut dyn FnMut(&mut i64)) {}
}

/// [`Attribute::each_number`] of a size.
fn change_size(size: &mut usize, change: &mut dyn FnMut(&mut i64)) {
    let mut number = *size as i64;
    change(&mut number);
    *size = number as usize;
}

impl Attribute for bool {
    fn print(&self) -> String {
        self.to_string()
    }
    fn parse(text: &str) -> Option<bool> {
        text.parse().ok()
    }
}

impl Attribute for usize {
    fn print(&self) -> String {
        self.to_string()
    }
    fn parse(text: &str) -> Option<usize> {
        text.parse().ok()
    }
    fn each_number(&mut self, change: &mut dyn FnMut(&mut i64)) {
        change_size(self, change);
    }
}

impl Attribute for i64 {
    fn print(&self) -> String {
        self.to_string()
    }
    fn parse(text: &str) -> Option<i64> {
        text.parse().ok()
    }
    fn each_number(&mut self, change: &mut dyn FnMut(&mut i64)) {
        change(self);
    }
}

fn parse_list(text: &str) -> Option<Vec<usize>> {
    let inner = text.strip_prefix('[')?.strip_suffix(']')?.trim();
    if inner.is_empty() {
        return Some(Vec::new());
    }
    inner.split(',').map(|n| n.trim().parse().ok()).collect()
}

impl Attribute for Shape {
    fn print(&self) -> String {
        self.to_string()
    }
    fn parse(text: &str) -> Option<Shape> {
        parse_list(text).map(Shape::from)
    }
    fn each_number(&mut self, change: &mut dyn FnMut(&mut i64)) {
        self.iter_mut().for_each(|size| change_size(size, change));
    }
}

impl Attribute for Pairs {
    fn print(&self) -> String {
        self.0.iter().flat_map(|pair| [pair.0, pair.1]).collect::<Shape>().to_string()
    }
    fn parse(text: &str) -> Option<Pairs> {
        let numbers = parse_list(text)?;
        let pairs = numbers.chunks_exact(2);
        pairs.remainder().is_empty().then(|| Pairs(pairs.map(|pair| (pair[0], pair[1])).collect()))
    }
    fn each_number(&mut self, change: &mut dyn FnMut(&mut i64)) {
        self.0.iter_mut().flat_map(|(a, b)| [a, b]).for_each(|size| change_size(size, change));
    }
}

/// A few numbers, one for each dim of a window or an image. Ops with several such lists stay small this way.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Sizes(Box<[usize]>);

impl std::ops::Deref for Sizes {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.0
    }
}

impl From<&[usize]> for Sizes {
    fn from(sizes: &[usize]) -> Sizes {
        Sizes(sizes.into())
    }
}

impl<const N: usize> From<[usize; N]> for Sizes {
    fn from(sizes: [usize; N]) -> Sizes {
        Sizes(Box::new(sizes))
    }
}

impl From<&Shape> for Sizes {
    fn from(shape: &Shape) -> Sizes {
        Sizes(shape[..].into())
    }
}

impl From<&Sizes> for Shape {
    fn from(sizes: &Sizes) -> Shape {
        Shape::from(&sizes[..])
    }
}

impl FromIterator<usize> for Sizes {
    fn from_iter<I: IntoIterator<Item = usize>>(sizes: I) -> Sizes {
        Sizes(sizes.into_iter().collect())
    }
}

impl Attribute for Sizes {
    fn print(&self) -> String {
        Shape::from(self).to_string()
    }
    fn parse(text: &str) -> Option<Sizes> {
        parse_list(text).map(|list| Sizes(list.into()))
    }
    fn each_number(&mut self, change: &mut dyn FnMut(&mut i64)) {
        self.0.iter_mut().for_each(|size| change_size(size, change));
    }
}

impl Attribute for Dims {
    fn print(&self) -> String {
        self.to_string()
    }
    fn parse(text: &str) -> Option<Dims> {
        parse_list(text).map(Dims::from)
    }
}

impl Attribute for DType {
    fn print(&self) -> String {
        self.name().to_string()
    }
    fn parse(text: &str) -> Option<DType> {
        DType::from_name(text)
    }
}

impl Attribute for Device {
    fn print(&self) -> String {
        self.to_string()
    }
    fn parse(text: &str) -> Option<Device> {
        text.parse().ok()
    }
}

impl Attribute for Scalar {
    fn print(&self) -> String {
        self.to_string()
    }
    fn parse(text: &str) -> Option<Scalar> {
        match text {
            "true" => Some(Scalar::Bool(true)),
            "false" => Some(Scalar::Bool(false)),
            "nan" => Some(Scalar::Float(f64::NAN)),
            "inf" => Some(Scalar::Float(f64::INFINITY)),
            "-inf" => Some(Scalar::Float(f64::NEG_INFINITY)),
            _ => match text.parse::<i64>() {
                Ok(i) => Some(Scalar::Int(i)),
                Err(_) => text.parse().ok().map(Scalar::Float),
            },
        }
    }
}

impl Attribute for Reduction {
    fn print(&self) -> String {
        match self {
            Reduction::None => "none",
            Reduction::Mean => "mean",
            Reduction::Sum => "sum",
        }
        .to_string()
    }
    fn parse(text: &str) -> Option<Reduction> {
        match text {
            "none" => Some(Reduction::None),
            "mean" => Some(Reduction::Mean),
            "sum" => Some(Reduction::Sum),
            _ => None,
        }
    }
}

impl Attribute for Approximate {
    fn print(&self) -> String {
        match self {
            Approximate::None => "none",
            Approximate::Tanh => "tanh",
        }
        .to_string()
    }
    fn parse(text: &str) -> Option<Approximate> {
        match text {
            "none" => Some(Approximate::None),
            "tanh" => Some(Approximate::Tanh),
            _ => None,
        }
    }
}

impl Attribute for ScatterReduce {
    fn print(&self) -> String {
        match self {
            ScatterReduce::Sum => "sum",
            ScatterReduce::Prod => "prod",
            ScatterReduce::Mean => "mean",
            ScatterReduce::Amax => "amax",
            ScatterReduce::Amin => "amin",
        }
        .to_string()
    }
    fn parse(text: &str) -> Option<ScatterReduce> {
        match text {
            "sum" => Some(ScatterReduce::Sum),
            "prod" => Some(ScatterReduce::Prod),
            "mean" => Some(ScatterReduce::Mean),
            "amax" => Some(ScatterReduce::Amax),
            "amin" => Some(ScatterReduce::Amin),
            _ => None,
        }
    }
}
