//! Element types, devices and host scalars.

use std::fmt;

use half::{bf16, f16};

/// The type of a tensor's elements.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DType {
    /// One byte, 0 or 1.
    Bool,
    /// 8-bit unsigned integer.
    U8,
    /// 8-bit signed integer.
    I8,
    /// 16-bit signed integer.
    I16,
    /// 32-bit signed integer.
    I32,
    /// 64-bit signed integer.
    I64,
    /// IEEE half precision.
    F16,
    /// The upper half of a single: its range, 8 bits of precision.
    BF16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

impl DType {
    /// Every dtype, in promotion order.
    pub const ALL: [DType; 10] = [
        DType::Bool,
        DType::U8,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::F16,
        DType::BF16,
        DType::F32,
        DType::F64,
    ];

    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::Bool | DType::U8 | DType::I8 => 1,
            DType::I16 | DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::F32 => 4,
            DType::I64 | DType::F64 => 8,
        }
    }

    /// Whether this is a floating-point type (the only ones that have gradients).
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
    }

    /// The type in which elements are computed: memory holds the natural type, arithmetic has truth values,
    /// i64 for all integers, f32 (for halves too) and f64. Results are wrapped or rounded to the natural type
    /// by [`DType::wrap`] and [`DType::round`].
    pub const fn computing(self) -> DType {
        match self {
            DType::Bool => DType::Bool,
            DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => DType::I64,
            DType::F16 | DType::BF16 | DType::F32 => DType::F32,
            DType::F64 => DType::F64,
        }
    }

    /// Whether elements are computed in a wider type than memory holds.
    pub const fn is_narrow(self) -> bool {
        self.computing() as u8 != self as u8
    }

    /// Whether every value of `other` is a value of this dtype.
    pub fn holds(self, other: DType) -> bool {
        use DType::{BF16, Bool, F16, F32, F64, I8, I16, I32, I64, U8};
        match other {
            Bool => true,
            U8 => matches!(self, U8 | I16 | I32 | I64 | F16 | BF16 | F32 | F64),
            I8 => matches!(self, I8 | I16 | I32 | I64 | F16 | BF16 | F32 | F64),
            I16 => matches!(self, I16 | I32 | I64 | F32 | F64),
            I32 => matches!(self, I32 | I64 | F64),
            I64 => self == I64,
            F16 => matches!(self, F16 | F32 | F64),
            BF16 => matches!(self, BF16 | F32 | F64),
            F32 => matches!(self, F32 | F64),
            F64 => self == F64,
        }
    }

    /// An integer as this dtype holds it: wrapped to its width; truth values are 0 and 1. Floats leave it.
    pub const fn wrap(self, x: i64) -> i64 {
        match self {
            DType::Bool => (x != 0) as i64,
            DType::U8 => x as u8 as i64,
            DType::I8 => x as i8 as i64,
            DType::I16 => x as i16 as i64,
            DType::I32 => x as i32 as i64,
            DType::I64 | DType::F16 | DType::BF16 | DType::F32 | DType::F64 => x,
        }
    }

    /// The least and the greatest integer that a narrow integer dtype holds; the others need no limits.
    pub const fn narrow_range(self) -> Option<(i64, i64)> {
        match self {
            DType::U8 => Some((0, u8::MAX as i64)),
            DType::I8 => Some((i8::MIN as i64, i8::MAX as i64)),
            DType::I16 => Some((i16::MIN as i64, i16::MAX as i64)),
            DType::I32 => Some((i32::MIN as i64, i32::MAX as i64)),
            DType::Bool | DType::I64 | DType::F16 | DType::BF16 | DType::F32 | DType::F64 => None,
        }
    }

    /// A double rounded to this dtype's precision, to nearest even. Halves are rounded by way of f32, in which
    /// they are computed. Integers leave it.
    pub fn round(self, x: f64) -> f64 {
        match self {
            DType::F16 => f16::from_f32(x as f32).to_f64(),
            DType::BF16 => bf16::from_f32(x as f32).to_f64(),
            DType::F32 => f64::from(x as f32),
            DType::Bool | DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 | DType::F64 => x,
        }
    }

    /// The name used in text form: `bool`, `i64`, `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::U8 => "u8",
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
        }
    }

    /// The dtype with this name.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }

    /// The kind of number that has this dtype's category.
    pub const fn kind(self) -> ScalarKind {
        match self {
            DType::Bool => ScalarKind::Bool,
            DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => ScalarKind::Int,
            DType::F16 | DType::BF16 | DType::F32 | DType::F64 => ScalarKind::Float,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where a tensor lives.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default)]
pub enum Device {
    /// Main memory and the CPU's cores.
    #[default]
    Cpu,
    /// A CUDA device by index.
    Cuda(u8),
}

impl Device {
    /// The best device that this build of Kiln can use.
    pub fn best() -> Device {
        Device::Cpu
    }
}

/// A text that names no device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is no device: write `cpu`, `cuda` or `cuda:1`")]
pub struct NoDevice(String);

/// As PyTorch writes them.
///
/// ```
/// use kiln_ir::Device;
/// assert_eq!("cuda:1".parse(), Ok(Device::Cuda(1)));
/// assert_eq!("cuda".parse::<Device>().unwrap().to_string(), "cuda:0");
/// assert_eq!("gpu".parse::<Device>().unwrap_err().to_string(), "`gpu` is no device: write `cpu`, `cuda` or `cuda:1`");
/// ```
impl std::str::FromStr for Device {
    type Err = NoDevice;

    fn from_str(text: &str) -> Result<Device, NoDevice> {
        let index = match text.split_once(':') {
            None if text == "cuda" => Some(0),
            Some(("cuda", index)) => index.parse().ok(),
            None if text == "cpu" => return Ok(Device::Cpu),
            _ => None,
        };
        index.map(Device::Cuda).ok_or_else(|| NoDevice(text.into()))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// The category of a number: what type promotion looks at.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ScalarKind {
    /// Truth values.
    Bool,
    /// Integers.
    Int,
    /// Floating-point numbers.
    Float,
}

impl ScalarKind {
    /// The name used in text form.
    pub const fn name(self) -> &'static str {
        match self {
            ScalarKind::Bool => "boolean",
            ScalarKind::Int => "int",
            ScalarKind::Float => "float",
        }
    }

    /// The dtype in which numbers of this kind are computed when no tensor says otherwise.
    pub const fn dtype(self) -> DType {
        match self {
            ScalarKind::Bool => DType::Bool,
            ScalarKind::Int => DType::I64,
            ScalarKind::Float => DType::F64,
        }
    }
}

/// A host number that takes part in tensor arithmetic: `x * 2.0`.
#[derive(Copy, Clone, PartialEq, Debug)]
pub enum Scalar {
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A floating-point number.
    Float(f64),
}

impl Scalar {
    /// The number's kind.
    pub const fn kind(self) -> ScalarKind {
        match self {
            Scalar::Bool(_) => ScalarKind::Bool,
            Scalar::Int(_) => ScalarKind::Int,
            Scalar::Float(_) => ScalarKind::Float,
        }
    }

    /// The value as a double.
    pub const fn as_f64(self) -> f64 {
        match self {
            Scalar::Bool(b) => b as u8 as f64,
            Scalar::Int(i) => i as f64,
            Scalar::Float(x) => x,
        }
    }

    /// The value as an integer, truncated towards zero.
    pub const fn as_i64(self) -> i64 {
        match self {
            Scalar::Bool(b) => b as i64,
            Scalar::Int(i) => i,
            Scalar::Float(x) => x as i64,
        }
    }

    /// Whether the value is not zero.
    pub const fn as_bool(self) -> bool {
        match self {
            Scalar::Bool(b) => b,
            Scalar::Int(i) => i != 0,
            Scalar::Float(x) => x != 0.0,
        }
    }

    /// The number converted to another kind.
    pub const fn to_kind(self, kind: ScalarKind) -> Scalar {
        match kind {
            ScalarKind::Bool => Scalar::Bool(self.as_bool()),
            ScalarKind::Int => Scalar::Int(self.as_i64()),
            ScalarKind::Float => Scalar::Float(self.as_f64()),
        }
    }

    /// The number as a dtype holds it: of the dtype's kind, rounded to its precision or wrapped to its width
    /// (a float first saturates as an i64).
    pub fn to_dtype(self, dtype: DType) -> Scalar {
        match self.to_kind(dtype.kind()) {
            Scalar::Float(x) => Scalar::Float(dtype.round(x)),
            Scalar::Int(i) => Scalar::Int(dtype.wrap(i)),
            truth @ Scalar::Bool(_) => truth,
        }
    }

    /// The bytes of one element of a dtype, little end first.
    pub fn to_element(self, dtype: DType) -> u64 {
        let float = || self.as_f64() as f32;
        match dtype {
            DType::Bool => u64::from(self.as_bool()),
            DType::U8 | DType::I8 => u64::from(self.as_i64() as u8),
            DType::I16 => u64::from(self.as_i64() as u16),
            DType::I32 => u64::from(self.as_i64() as u32),
            DType::I64 => self.as_i64() as u64,
            DType::F16 => u64::from(f16::from_f32(float()).to_bits()),
            DType::BF16 => u64::from(bf16::from_f32(float()).to_bits()),
            DType::F32 => u64::from(float().to_bits()),
            DType::F64 => self.as_f64().to_bits(),
        }
    }

    /// The number of a kind with these bits: what [`Scalar::to_bits`] gives for it.
    pub const fn from_bits(bits: u64, kind: ScalarKind) -> Scalar {
        match kind {
            ScalarKind::Float => Scalar::Float(f64::from_bits(bits)),
            ScalarKind::Int => Scalar::Int(bits as i64),
            ScalarKind::Bool => Scalar::Bool(bits != 0),
        }
    }

    /// The 64 bits a kernel receives: the integer or the double's bit pattern.
    pub const fn to_bits(self) -> u64 {
        match self {
            Scalar::Bool(b) => b as u64,
            Scalar::Int(i) => i as u64,
            Scalar::Float(x) => x.to_bits(),
        }
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::Bool(b) => write!(f, "{b}"),
            Scalar::Int(i) => write!(f, "{i}"),
            Scalar::Float(x) if x.is_nan() => f.write_str("nan"),
            Scalar::Float(x) if x.is_infinite() => f.write_str(if *x > 0.0 { "inf" } else { "-inf" }),
            Scalar::Float(x) => write!(f, "{x:?}"),
        }
    }
}

macro_rules! scalar_from {
    ($($from:ty => $variant:ident as $to:ty),* $(,)?) => {
        $(impl From<$from> for Scalar {
            fn from(x: $from) -> Scalar {
                Scalar::$variant(x as $to)
            }
        })*
    };
}
scalar_from!(
    bool => Bool as bool,
    u8 => Int as i64,
    i8 => Int as i64,
    i16 => Int as i64,
    i32 => Int as i64,
    i64 => Int as i64,
    f32 => Float as f64,
    f64 => Float as f64,
);

impl From<f16> for Scalar {
    fn from(x: f16) -> Scalar {
        Scalar::Float(x.to_f64())
    }
}

impl From<bf16> for Scalar {
    fn from(x: bf16) -> Scalar {
        Scalar::Float(x.to_f64())
    }
}
