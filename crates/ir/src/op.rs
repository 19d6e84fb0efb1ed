//! [`Op`] and its [`Row`], made from the op table.

use crate::eval::{
    alpha, alpha_int, arange_class, digamma, erf, erfc, erfinv, eval_gelu, int_pow, lgamma, nan_max,
    power_class, tetragamma, trigamma,
};
use crate::formula::{rule, steps};
use crate::math::Function;
use crate::table::{
    activations, choices, contractions, convolution, functions, indexing, nn, norms, order, padding,
    products, recurrent, reductions, resample, rounding, scatter, shapes,
};
use crate::{
    Approximate, Attribute, Body, Custom, DType, Device, Dims, Division, Emit, Error, Eval, Loc, MOST_DIMS,
    OpError, Order, Pairs, Reduction, Result, Sample, Scalar, ScatterReduce, Shape, Sizes, Ty, Tys, Value,
    Values, Why, custom, decompose, gradient, samples, scan, types,
};

/// What kind of op a row is; passes look at this before they look at the op.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Class {
    /// Element by element, with broadcasting.
    Pointwise,
    /// Over dims.
    Reduction,
    /// Another look at the same elements.
    View,
    /// Picks, places or joins elements.
    Index,
    /// From nothing.
    Create,
    /// From a random stream.
    Random,
    /// Matrix products.
    Contraction,
    /// Several of the above.
    Composite,
    /// A number of the program text.
    Constant,
    /// Packs and unpacks lists.
    List,
    /// Whatever its maker says.
    Custom,
}

macro_rules! class {
    (pointwise) => {
        Class::Pointwise
    };
    (activation) => {
        Class::Pointwise
    };
    (choice) => {
        Class::Pointwise
    };
    (convert) => {
        Class::Pointwise
    };
    (copy) => {
        Class::Pointwise
    };
    (reduction) => {
        Class::Reduction
    };
    (view) => {
        Class::View
    };
    (index) => {
        Class::Index
    };
    (create) => {
        Class::Create
    };
    (random) => {
        Class::Random
    };
    (contraction) => {
        Class::Contraction
    };
    (composite) => {
        Class::Composite
    };
    (constant) => {
        Class::Constant
    };
    (list) => {
        Class::List
    };
    (custom) => {
        Class::Custom
    };
}

/// What an eager kernel may refuse, beside running out of memory.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Refuses {
    /// Nothing: it only computes.
    Nothing,
    /// Some dtypes, but no floats.
    NotFloats,
    /// Values: it checks them, as indices are checked.
    Values,
}

/// A gradient rule: given the call and the gradients of its results, emits the gradients of its operands.
pub type GradFn = fn(&mut dyn Emit, &GradCall<'_>) -> Result<Vec<Option<Value>>>;

/// How an op is differentiated. Never absent.
#[derive(Copy, Clone)]
pub enum Grad {
    /// By this rule.
    Fn(GradFn),
    /// The derivative is zero wherever it exists.
    Zero,
    /// By differentiating its decomposition.
    Decompose,
    /// It has none, for this reason.
    NotDifferentiable(&'static str),
}

/// What a gradient rule sees of the call it differentiates.
pub struct GradCall<'a> {
    /// The op.
    pub op: &'a Op,
    /// Its operands.
    pub inputs: &'a [Value],
    /// Its results.
    pub outputs: &'a [Value],
    /// The gradients of its results; `None` where there is none.
    pub grads: &'a [Option<Value>],
    /// For which operands a gradient is wanted.
    pub needs: &'a [bool],
}

impl GradCall<'_> {
    /// Whether operand `i` is there and wants a gradient.
    pub fn wants(&self, i: usize) -> bool {
        self.needs.get(i).copied().unwrap_or(false)
    }
}

/// A decomposition: emits simpler ops that compute the same.
pub type DecomposeFn = fn(&mut dyn Emit, &Op, &[Value]) -> Result<Values>;

/// One row of the op table.
pub struct Row {
    /// PyTorch's name.
    pub name: &'static str,
    /// What it computes, in a line.
    pub doc: &'static str,
    /// Names of the operands.
    pub args: &'static [&'static str],
    /// Names of the operands that may be left out.
    pub optional: &'static [&'static str],
    /// Names of the attributes.
    pub attributes: &'static [&'static str],
    /// Takes any number of operands.
    pub variadic: bool,
    /// Kind of op.
    pub class: Class,
    /// The calls that inductor lowers although the row has a decomposition; the others are decomposed. Rows without a
    /// decomposition are prims.
    pub prim: Option<fn(&Op, &[Ty]) -> bool>,
    /// Whether eager mode has a kernel of its own for it, besides scalar functions, although it has a decomposition.
    pub kernel: bool,
    /// What its eager kernel may refuse.
    pub refuses: Refuses,
    /// Names of the attributes that are sizes, not ways to compute: graphs for other sizes are the same.
    pub sizes: &'static [&'static str],
    /// Names of those that are places or sizes of something else: they, too, may change with sizes.
    pub places: &'static [&'static str],
    /// Types of the results from the types of the operands.
    pub ty: fn(&Op, &[Ty]) -> Result<Tys, Why>,
    /// Classes of a run-time number that need different code (operand, value); capture keys on the class.
    pub scalar_class: Option<fn(usize, Scalar) -> u8>,
    /// What it computes, element by element.
    pub eval: Eval,
    /// The scalar function of floats that eager and generated kernels apply, for rows that are one.
    pub function: Option<Function>,
    /// Its gradient.
    pub grad: Grad,
    /// Its decomposition.
    pub decompose: Option<DecomposeFn>,
    /// Calls that show what it can do, for the sweep tests.
    pub samples: fn() -> Vec<Sample>,
}

macro_rules! define_ops {
    ($( $(#[doc = $doc:literal])*
        [$class:ident $method:ident $inplace:ident] $name:literal $Variant:ident
        ($($arg:ident),*) ($($optional:ident),*) { $($attr:ident : $AttrTy:ty),* }
        { ty: $ty:expr, grad: $grad:expr $(, $field:ident : $value:expr)* $(,)? };
    )*) => {
        /// An operator with its attributes. One variant per row of the op table.
        // The tag is a number of its own at a fixed place: replay looks at it for every op.
        #[derive(Clone, PartialEq, Debug)]
        #[repr(u16)]
        pub enum Op {
            $( $(#[doc = $doc])* $Variant { $(#[doc = "Attribute."] $attr: $AttrTy),* }, )*
        }

        // A static, not a constant: a constant's closures would be compiled again in every crate that looks at a row.
        static TABLE: [Row; [$(stringify!($Variant)),*].len()] = [
                $( Row {
                    $($field: $value,)*
                    ..Row {
                        name: $name,
                        doc: concat!($($doc),*),
                        args: &[$(stringify!($arg)),*],
                        optional: &[$(stringify!($optional)),*],
                        attributes: &[$(stringify!($attr)),*],
                        variadic: false,
                        class: class!($class),
                        prim: None,
                        kernel: false,
                        refuses: Refuses::Values,
                        sizes: &[],
                        places: &[],
                        ty: $ty,
                        scalar_class: None,
                        eval: Eval::Structural,
                        function: None,
                        grad: $grad,
                        decompose: None,
                        samples: samples::none,
                    }
                }, )*
        ];

        impl Op {
            /// Every row, in the table's order.
            pub const ROWS: &'static [Row] = &TABLE;

            /// This op's index in the table.
            #[inline]
            pub fn index(&self) -> usize {
                #[allow(non_camel_case_types, dead_code)]
                enum Row { $($Variant),* }
                match self { $( Op::$Variant { .. } => Row::$Variant as usize, )* }
            }

            /// The attributes as text: `("dims", "[0]")`.
            pub fn attributes(&self) -> Vec<(&'static str, String)> {
                match self {
                    $( Op::$Variant { $($attr),* } => vec![$((stringify!($attr), Attribute::print($attr))),*], )*
                }
            }

            /// Calls `change` for every number in the attributes, in order, with the attribute's name.
            #[allow(unused_variables, reason = "most ops have no numbers")]
            pub fn each_number(&mut self, change: &mut dyn FnMut(&'static str, &mut i64)) {
                match self {
                    $( Op::$Variant { $($attr),* } => {
                        $( Attribute::each_number($attr, &mut |number| change(stringify!($attr), number)); )*
                    } )*
                }
            }

            /// The op with this name and these attributes (all of them, by name).
            pub fn parse(name: &str, attribute: &mut dyn FnMut(&str) -> Option<String>) -> Option<Op> {
                match name {
                    $( $name => Some(Op::$Variant { $($attr: <$AttrTy as Attribute>::parse(&attribute(stringify!($attr))?)?),* }), )*
                    _ => None,
                }
            }
        }
    };
}
crate::op_table!(define_ops);

impl Op {
    /// The same, making its result on a device, where it makes something from nothing.
    pub fn on(mut self, to: Device) -> Op {
        if let Op::Full { device, .. }
        | Op::Arange { device, .. }
        | Op::Rand { device, .. }
        | Op::Randn { device, .. }
        | Op::Uniform { device, .. } = &mut self
        {
            *device = to;
        }
        self
    }

    /// The op's row.
    #[inline]
    pub fn row(&self) -> &'static Row {
        &Op::ROWS[self.index()]
    }

    /// PyTorch's name, or the name under which it was registered.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Custom { op } => op.row().name,
            _ => self.row().name,
        }
    }

    /// Whether an attribute may change with the sizes of the operands.
    pub fn goes_with_sizes(&self, attribute: &str) -> bool {
        let row = self.row();
        row.sizes.contains(&attribute) || row.places.contains(&attribute)
    }

    /// Whether inductor lowers this call itself, given operands of one dtype and shape.
    pub fn is_prim(&self, args: &[Ty]) -> bool {
        let row = self.row();
        row.decompose.is_none() || row.prim.is_some_and(|holds| holds(self, args))
    }

    /// The types of the results for operands of these types; pointwise ops map over lists.
    pub fn infer(&self, args: &[Ty]) -> Result<Tys, Why> {
        let row = self.row();
        let most = row.args.len() + row.optional.len();
        if !row.variadic && (args.len() < row.args.len() || args.len() > most) {
            let expected = if row.optional.is_empty() {
                most.to_string()
            } else {
                format!("{} to {most}", row.args.len())
            };
            return Err(Why::Arity { expected, got: args.len() });
        }
        let is_list = |ty: &Ty| matches!(ty, Ty::List(_));
        if row.class == Class::Pointwise && args.iter().any(is_list) {
            return types::over_lists(self, args);
        }
        if row.class != Class::List && args.iter().any(is_list) {
            return Err(Why::Operand { argument: "operands", expected: "tensors or numbers" });
        }
        let tys = (row.ty)(self, args)?;
        match tys.first() {
            Some(Ty::Tensor(ty)) if ty.shape.rank() > MOST_DIMS => {
                Err(Why::TooManyDims { rank: ty.shape.rank() })
            }
            _ => Ok(tys),
        }
    }

    /// Whether the op only compares a number with elements and passes one of them on: a number that the dtype can't
    /// hold then stands for the nearest that it can, as a limit does. Everywhere else it wraps.
    pub const fn takes_limits(&self) -> bool {
        matches!(self, Op::Maximum {} | Op::Minimum {} | Op::Clamp {})
    }

    /// A number as an operand of elements of this dtype.
    pub fn number(&self, x: Scalar, dtype: DType) -> Scalar {
        match (dtype.narrow_range(), x) {
            (Some((least, most)), Scalar::Int(x)) if self.takes_limits() => Scalar::Int(x.clamp(least, most)),
            _ => x,
        }
    }

    /// The number that an operand of this class is, where the class tells it.
    pub fn number_of_class(&self, operand: usize, class: u8) -> Option<Scalar> {
        match (self, class) {
            (Op::Arange { .. }, 1) => Some(Scalar::Int(operand as i64)),
            _ => None,
        }
    }

    /// An error about this op on these operands.
    pub fn error(&self, args: &[Ty], why: Why, loc: Loc) -> Error {
        let is_foreach =
            args.iter().any(|ty| matches!(ty, Ty::List(_))) && !matches!(self, Op::ListGet { .. });
        let op = if is_foreach { format!("foreach_{}", self.name()) } else { self.name().to_string() };
        let operands = args.iter().take(6).map(Ty::to_string).collect();
        Error::Op(Box::new(OpError { op, operands, why, module: None, loc }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A size that its row does not name would make another graph for every size.
    #[test]
    fn sizes_are_named_and_there() {
        let names = ["shape", "start", "end", "len", "size", "offset", "input", "output", "view"];
        for row in Op::ROWS {
            let known = |name: &&str| row.sizes.contains(name) || row.places.contains(name);
            for name in row.attributes.iter().filter(|name| names.contains(name)) {
                assert!(known(name), "{}: {name} is neither in sizes nor in places", row.name);
            }
            for name in row.sizes.iter().chain(row.places) {
                assert!(row.attributes.contains(name), "{} has no attribute {name}", row.name);
            }
        }
    }
}
