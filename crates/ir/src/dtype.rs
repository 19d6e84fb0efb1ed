//! Element types, devices and host scalars.

use std::fmt;

/// The type of a tensor's elements.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DType {
    /// One byte, 0 or 1.
    Bool,
    /// 64-bit signed integer.
    I64,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

impl DType {
    /// Every dtype, in promotion order.
    pub const ALL: [DType; 4] = [DType::Bool, DType::I64, DType::F32, DType::F64];

    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::Bool => 1,
            DType::F32 => 4,
            DType::I64 | DType::F64 => 8,
        }
    }

    /// Whether this is a floating-point type (the only ones that have gradients).
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64)
    }

    /// The name used in text form: `bool`, `i64`, `f32`, `f64`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::I64 => "i64",
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
            DType::I64 => ScalarKind::Int,
            DType::F32 | DType::F64 => ScalarKind::Float,
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
scalar_from!(bool => Bool as bool, i64 => Int as i64, i32 => Int as i64, f32 => Float as f64, f64 => Float as f64);
