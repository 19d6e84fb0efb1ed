//! The text writer: operations become nodes, nodes become C statements.
//!
//! Nodes are shared (equal operations are one node). One that is named or used more than once becomes
//! a named temporary, any other is written inside the expression that uses it.

use super::super::lane::{InDouble, Lane, Libm, Rare, Table, Whole, Width};
use super::{DOUBLES, Names, names};
use std::collections::HashMap;
use std::fmt::Write;

/// A value of the text being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Node(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Float,
    Int,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Operation {
    Parameter(String),
    /// Bits of the f64, so that nodes compare and hash.
    Constant(u64),
    IntConstant(i64),
    Negate,
    Complement,
    Infix(&'static str),
    Shift(&'static str, u32),
    Call(&'static str),
    Library(Libm),
    /// A rare part: the mask, the common value, the arguments.
    Rare(&'static str),
    InDouble(&'static str),
    Lookup(Table),
    Cast,
}

/// A longer one gets a temporary, so that statements stay readable.
const LONGEST_EXPRESSION: usize = 72;

/// Writes the operations down as C for the format of `BITS` bits (32 or 64).
#[derive(Clone, Debug)]
pub struct CText<const BITS: usize> {
    vectors: Names,
    /// Texts that must come before: tables, rare parts, functions over doubles.
    definitions: Vec<String>,
    nodes: Vec<(Kind, Operation, Vec<Node>)>,
    shared: HashMap<(Kind, Operation, Vec<Node>), Node>,
    names: HashMap<Node, String>,
}

impl<const BITS: usize> Default for CText<BITS> {
    fn default() -> CText<BITS> {
        CText::new()
    }
}

impl<const BITS: usize> CText<BITS> {
    /// An empty text.
    pub fn new() -> CText<BITS> {
        CText::over(names(Self::width()))
    }

    fn over(vectors: Names) -> CText<BITS> {
        CText {
            vectors,
            definitions: Vec::new(),
            nodes: Vec::new(),
            shared: HashMap::new(),
            names: HashMap::new(),
        }
    }

    /// A function of this text's arguments, behind what it needs. `kind` is what it is declared as.
    pub(super) fn definition(&self, kind: &str, name: &str, parameters: &[&str], result: Node) -> String {
        let vector = self.vectors.vector;
        let list: Vec<String> = parameters.iter().map(|p| format!("{vector} {p}")).collect();
        let mut out = self.definitions.concat();
        let _ =
            write!(out, "{kind} {vector} {name}({}) {{\n{}}}\n", list.join(", "), self.statements(result));
        out
    }

    /// Puts a definition before this text, which other texts may have put there, too.
    fn define(&mut self, name: &str, text: &str) {
        let text = format!("#ifndef KILN_HAS_{name}\n#define KILN_HAS_{name}\n{text}#endif\n");
        if !self.definitions.contains(&text) {
            self.definitions.push(text);
        }
    }

    const fn width() -> Width {
        if BITS == 32 { Width::F32 } else { Width::F64 }
    }

    /// A value that the surrounding text holds under this identifier.
    pub fn parameter(&mut self, identifier: &str) -> Node {
        self.node(Kind::Float, Operation::Parameter(identifier.to_string()), &[])
    }

    fn node(&mut self, kind: Kind, operation: Operation, args: &[Node]) -> Node {
        let key = (kind, operation, args.to_vec());
        if let Some(&node) = self.shared.get(&key) {
            return node;
        }
        let node = Node(self.nodes.len() as u32);
        self.nodes.push(key.clone());
        self.shared.insert(key, node);
        node
    }

    fn float(&mut self, operation: Operation, args: &[Node]) -> Node {
        self.node(Kind::Float, operation, args)
    }

    fn integer(&mut self, operation: Operation, args: &[Node]) -> Node {
        self.node(Kind::Int, operation, args)
    }

    /// The statements that compute `result`, ending in a return.
    pub fn statements(&self, result: Node) -> String {
        let mut uses = vec![0u32; self.nodes.len()];
        uses[result.0 as usize] = 1;
        for index in (0..=result.0 as usize).rev() {
            if uses[index] > 0 {
                for arg in &self.nodes[index].2 {
                    uses[arg.0 as usize] += 1;
                }
            }
        }
        let mut writer = Writer { text: self, names: self.vectors, temporaries: HashMap::new() };
        let mut taken: HashMap<String, u32> = HashMap::new();
        for (_, operation, _) in &self.nodes {
            if let Operation::Parameter(name) = operation {
                taken.insert(name.clone(), 1);
            }
        }
        let mut out = String::new();
        for index in 0..result.0 {
            let node = Node(index);
            let (kind, operation, _) = &self.nodes[index as usize];
            let leaf = matches!(
                operation,
                Operation::Parameter(_) | Operation::Constant(_) | Operation::IntConstant(_)
            );
            if leaf || uses[index as usize] == 0 {
                continue;
            }
            let expression = writer.expression(node);
            let wanted = self.names.contains_key(&node)
                || uses[index as usize] > 1
                || expression.len() > LONGEST_EXPRESSION;
            if !wanted {
                continue;
            }
            let base = self.names.get(&node).map_or("t", String::as_str);
            let count = taken.entry(base.to_string()).or_insert(0);
            let name = if *count == 0 { base.to_string() } else { format!("{base}{count}") };
            *count += 1;
            let ty = match kind {
                Kind::Float => writer.names.vector,
                Kind::Int => writer.names.int,
            };
            let _ = writeln!(out, "    const {ty} {name} = {expression};");
            writer.temporaries.insert(node, name);
        }
        let _ = writeln!(out, "    return {};", writer.vector(result));
        out
    }
}

struct Writer<'a, const BITS: usize> {
    text: &'a CText<BITS>,
    names: Names,
    temporaries: HashMap<Node, String>,
}

impl<const BITS: usize> Writer<'_, BITS> {
    /// The expression that computes a node, ignoring its temporary.
    fn expression(&self, node: Node) -> String {
        let (kind, operation, args) = &self.text.nodes[node.0 as usize];
        let suffix = self.names.suffix;
        match operation {
            Operation::Parameter(name) => name.clone(),
            Operation::Constant(bits) => literal(f64::from_bits(*bits), CText::<BITS>::width()),
            Operation::IntConstant(value) => int_literal(*value, CText::<BITS>::width()),
            Operation::Negate => format!("-{}", self.operand(args[0])),
            Operation::Complement => format!("~{}", self.operand(args[0])),
            Operation::Infix(symbol) => {
                // One side of an infix operation may be a scalar literal, not both.
                let both = self.is_constant(args[0]) && self.is_constant(args[1]);
                let left = if both { self.vector(args[0]) } else { self.operand(args[0]) };
                format!("{left} {symbol} {}", self.operand(args[1]))
            }
            Operation::Shift(symbol, by) => format!("{} {symbol} {by}", self.operand(args[0])),
            Operation::Call(name) => {
                let args: Vec<String> = args.iter().map(|&a| self.vector(a)).collect();
                format!("kiln_{name}_{suffix}({})", args.join(", "))
            }
            Operation::Library(function) => {
                let args: Vec<String> = args.iter().map(|&a| self.vector(a)).collect();
                format!(
                    "KILN_EACH{}({}, {}, {})",
                    args.len(),
                    self.names.vector,
                    function.name(CText::<BITS>::width()),
                    args.join(", ")
                )
            }
            // The rest is computed only where some lane needs it.
            Operation::Rare(name) => {
                let mask = self.vector(args[0]);
                let all: Vec<String> = args[2..].iter().map(|&a| self.vector(a)).collect();
                format!(
                    "KILN_RARELY_{suffix}({mask}, kiln_{name}_{suffix}({}), {})",
                    all.join(", "),
                    self.vector(args[1])
                )
            }
            Operation::InDouble(name) => {
                let all: Vec<String> = args.iter().map(|&a| self.vector(a)).collect();
                format!("KILN_IN_DOUBLE{}(kiln_{name}_{}, {})", args.len(), DOUBLES.suffix, all.join(", "))
            }
            Operation::Lookup(table) => {
                let Names { vector, int, .. } = self.names;
                format!(
                    "KILN_LOOKUP({vector}, kiln_{}, ({int}){} & {})",
                    table.name,
                    self.operand(args[0]),
                    table.values.len() - 1
                )
            }
            Operation::Cast => {
                let ty = match kind {
                    Kind::Float => self.names.vector,
                    Kind::Int => self.names.int,
                };
                let inside =
                    if self.is_constant(args[0]) { self.vector(args[0]) } else { self.operand(args[0]) };
                format!("({ty}){inside}")
            }
        }
    }

    fn is_constant(&self, node: Node) -> bool {
        matches!(self.text.nodes[node.0 as usize].1, Operation::Constant(_) | Operation::IntConstant(_))
    }

    /// A node as an operand of an infix or prefix operation.
    fn operand(&self, node: Node) -> String {
        if let Some(name) = self.temporaries.get(&node) {
            return name.clone();
        }
        let text = self.expression(node);
        match self.text.nodes[node.0 as usize].1 {
            Operation::Negate
            | Operation::Complement
            | Operation::Infix(_)
            | Operation::Shift(..)
            | Operation::Cast => format!("({text})"),
            Operation::Constant(bits) if f64::from_bits(bits) < 0.0 => format!("({text})"),
            Operation::Parameter(_)
            | Operation::Constant(_)
            | Operation::IntConstant(_)
            | Operation::Call(_)
            | Operation::Library(_)
            | Operation::Rare(_)
            | Operation::InDouble(_)
            | Operation::Lookup(_) => text,
        }
    }

    /// A node where a vector is required.
    fn vector(&self, node: Node) -> String {
        if let Some(name) = self.temporaries.get(&node) {
            return name.clone();
        }
        let text = self.expression(node);
        match self.text.nodes[node.0 as usize].1 {
            Operation::Constant(_) => format!("kiln_splat_{}({text})", self.names.suffix),
            Operation::IntConstant(_) => format!("(({}){{0}} + {text})", self.names.int),
            _ => text,
        }
    }
}

/// A C literal for exactly this number, once rounded to the format.
pub(super) fn literal(value: f64, width: Width) -> String {
    match width {
        _ if value.is_nan() && width == Width::F32 => "__builtin_nanf(\"\")".to_string(),
        _ if value.is_nan() => "__builtin_nan(\"\")".to_string(),
        Width::F32 if value.is_infinite() => format!("{}__builtin_inff()", sign(value)),
        Width::F64 if value.is_infinite() => format!("{}__builtin_inf()", sign(value)),
        // Debug prints the shortest decimal that reads back as the same number.
        Width::F32 => format!("{:?}f", value as f32),
        Width::F64 => format!("{value:?}"),
    }
}

fn sign(value: f64) -> &'static str {
    if value < 0.0 { "-" } else { "" }
}

fn int_literal(value: i64, width: Width) -> String {
    match width {
        Width::F32 if value == i64::from(i32::MIN) => "(-2147483647 - 1)".to_string(),
        Width::F32 if value.abs() > 4096 => format!("{value:#x}"),
        Width::F32 => value.to_string(),
        Width::F64 if value == i64::MIN => "(-9223372036854775807LL - 1)".to_string(),
        Width::F64 if value.unsigned_abs() > 4096 => format!("{value:#x}LL"),
        Width::F64 => format!("{value}LL"),
    }
}

/// Names of a function's arguments, by how many there are.
pub(super) const PARAMETERS: [&[&str]; 5] =
    [&[], &["x"], &["x", "y"], &["x", "y", "z"], &["x", "a", "b", "value"]];

/// A text over doubles for floats, ready to be put before the text of a float's function.
fn in_double<B: InDouble<N>, const N: usize>() -> String {
    let mut cx = CText::<64>::over(DOUBLES);
    let args = std::array::from_fn(|i| cx.parameter(PARAMETERS[N][i]));
    let result = B::body(&mut cx, args, Width::F32);
    let name = format!("kiln_{}_{}", B::NAME, DOUBLES.suffix);
    cx.definition("KILN_INLINE", &name, PARAMETERS[N], result)
}

macro_rules! in_double {
    (64) => {
        fn in_double<B: InDouble<N>, const N: usize>(&mut self, args: [Node; N]) -> Node {
            B::body(self, args, Width::F64)
        }
    };
    (32) => {
        fn in_double<B: InDouble<N>, const N: usize>(&mut self, args: [Node; N]) -> Node {
            self.define(B::NAME, &in_double::<B, N>());
            self.float(Operation::InDouble(B::NAME), &args)
        }
    };
}

macro_rules! text_lane {
    ($bits:tt, $width:expr) => {
        impl Lane for CText<$bits> {
            type F = Node;
            type I = Node;
            type M = Node;
            const WIDTH: Width = $width;

            fn constant(&mut self, value: f64) -> Node {
                let rounded = match $width {
                    Width::F32 => f64::from(value as f32),
                    Width::F64 => value,
                };
                self.float(Operation::Constant(rounded.to_bits()), &[])
            }
            fn int(&mut self, value: i64) -> Node {
                self.integer(Operation::IntConstant(value), &[])
            }
            fn name(&mut self, name: &str, value: Node) -> Node {
                self.names.entry(value).or_insert_with(|| name.to_string());
                value
            }
            fn add(&mut self, a: Node, b: Node) -> Node {
                self.float(Operation::Infix("+"), &[a, b])
            }
            fn sub(&mut self, a: Node, b: Node) -> Node {
                self.float(Operation::Infix("-"), &[a, b])
            }
            fn mul(&mut self, a: Node, b: Node) -> Node {
                self.float(Operation::Infix("*"), &[a, b])
            }
            fn div(&mut self, a: Node, b: Node) -> Node {
                self.float(Operation::Infix("/"), &[a, b])
            }
            fn neg(&mut self, a: Node) -> Node {
                self.float(Operation::Negate, &[a])
            }
            fn abs(&mut self, a: Node) -> Node {
                self.float(Operation::Call("absolute"), &[a])
            }
            fn sqrt(&mut self, a: Node) -> Node {
                self.float(Operation::Call("root"), &[a])
            }
            fn fma(&mut self, a: Node, b: Node, c: Node) -> Node {
                self.float(Operation::Call("fma"), &[a, b, c])
            }
            fn min(&mut self, a: Node, b: Node) -> Node {
                self.float(Operation::Call("min"), &[a, b])
            }
            fn max(&mut self, a: Node, b: Node) -> Node {
                self.float(Operation::Call("max"), &[a, b])
            }
            fn floor(&mut self, a: Node) -> Node {
                self.float(Operation::Call("round_down"), &[a])
            }
            fn round_ties_even(&mut self, a: Node) -> Node {
                self.float(Operation::Call("round_even"), &[a])
            }
            fn libm(&mut self, function: Libm, args: &[Node]) -> Node {
                self.float(Operation::Library(function), args)
            }
            fn rarely<R: Rare<N>, const N: usize>(
                &mut self,
                mask: Node,
                common: Node,
                args: [Node; N],
            ) -> Node {
                let mut cx = CText::<$bits>::over(self.vectors);
                let parameters = std::array::from_fn(|i| cx.parameter(PARAMETERS[N][i]));
                let result = R::body(&mut cx, parameters);
                let name = format!("{}_{}", R::NAME, self.vectors.suffix);
                let text = cx.definition("KILN_RARE", &format!("kiln_{name}"), PARAMETERS[N], result);
                self.define(&name, &text);
                let mut all = vec![mask, common];
                all.extend(args);
                self.float(Operation::Rare(R::NAME), &all)
            }
            in_double!($bits);
            fn lookup(&mut self, table: Table, index: Node) -> Node {
                let numbers: Vec<String> = table.values.iter().map(|n| format!("{n}u")).collect();
                let text =
                    format!("static const unsigned kiln_{}[] = {{{}}};\n", table.name, numbers.join(", "));
                self.define(table.name, &text);
                self.float(Operation::Lookup(table), &[index])
            }
            fn bits(&mut self, a: Node) -> Node {
                self.integer(Operation::Cast, &[a])
            }
            fn bits_to_float(&mut self, a: Node) -> Node {
                self.float(Operation::Cast, &[a])
            }
            fn int_add(&mut self, a: Node, b: Node) -> Node {
                self.integer(Operation::Infix("+"), &[a, b])
            }
            fn int_sub(&mut self, a: Node, b: Node) -> Node {
                self.integer(Operation::Infix("-"), &[a, b])
            }
            fn int_and(&mut self, a: Node, b: Node) -> Node {
                self.integer(Operation::Infix("&"), &[a, b])
            }
            fn int_or(&mut self, a: Node, b: Node) -> Node {
                self.integer(Operation::Infix("|"), &[a, b])
            }
            fn shl(&mut self, a: Node, by: u32) -> Node {
                self.integer(Operation::Shift("<<", by), &[a])
            }
            fn shr(&mut self, a: Node, by: u32) -> Node {
                self.integer(Operation::Shift(">>", by), &[a])
            }
            fn lt(&mut self, a: Node, b: Node) -> Node {
                self.integer(Operation::Infix("<"), &[a, b])
            }
            fn le(&mut self, a: Node, b: Node) -> Node {
                self.integer(Operation::Infix("<="), &[a, b])
            }
            fn gt(&mut self, a: Node, b: Node) -> Node {
                self.integer(Operation::Infix(">"), &[a, b])
            }
            fn ge(&mut self, a: Node, b: Node) -> Node {
                self.integer(Operation::Infix(">="), &[a, b])
            }
            fn eq(&mut self, a: Node, b: Node) -> Node {
                self.integer(Operation::Infix("=="), &[a, b])
            }
            fn ne(&mut self, a: Node, b: Node) -> Node {
                self.integer(Operation::Infix("!="), &[a, b])
            }
            fn and(&mut self, a: Node, b: Node) -> Node {
                self.integer(Operation::Infix("&"), &[a, b])
            }
            fn or(&mut self, a: Node, b: Node) -> Node {
                self.integer(Operation::Infix("|"), &[a, b])
            }
            fn not(&mut self, a: Node) -> Node {
                self.integer(Operation::Complement, &[a])
            }
            fn select(&mut self, mask: Node, a: Node, b: Node) -> Node {
                self.float(Operation::Call("select"), &[mask, a, b])
            }
            fn scale(&mut self, a: Node, n: Whole<Node, Node>) -> Node {
                // One instruction under AVX-512; the prelude has the general form for the others.
                self.float(Operation::Call("scale"), &[a, n.float, n.int])
            }
        }
    };
}

text_lane!(32, Width::F32);
text_lane!(64, Width::F64);
