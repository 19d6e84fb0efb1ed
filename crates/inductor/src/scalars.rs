//! Ops on numbers: run on the host before the steps, in f64, i64 or bool, with the mathematics of the kernels.

use kiln_ir::math::Function;
use kiln_ir::{Def, Graph, Op, Scalar, ScalarKind, Ty, Value};
use rustc_hash::FxHashMap;

use crate::plan::{Plan, ScalarOp, ScalarRef};

/// Collects the numbers that steps need.
pub(crate) struct Scalars<'g> {
    graph: &'g Graph,
    pub ops: Vec<ScalarOp>,
    known: FxHashMap<(Value, ScalarKind), ScalarRef>,
}

impl<'g> Scalars<'g> {
    pub fn new(graph: &'g Graph) -> Scalars<'g> {
        Scalars { graph, ops: Vec::new(), known: FxHashMap::default() }
    }

    /// The number `value`, converted to `kind`.
    pub fn get(&mut self, value: Value, kind: ScalarKind) -> ScalarRef {
        if let Some(&known) = self.known.get(&(value, kind)) {
            return known;
        }
        let own = match self.graph.ty(value) {
            Ty::Scalar(own) => *own,
            Ty::Tensor(_) | Ty::List(_) => kind,
        };
        let result = if own != kind {
            let from = self.get(value, own);
            match from {
                ScalarRef::Constant(c) => ScalarRef::Constant(c.to_kind(kind)),
                from => self.push(Op::To { dtype: kind.dtype() }, vec![from], kind),
            }
        } else {
            match self.graph.def(value) {
                Def::Input(number) => ScalarRef::Input(number as usize),
                Def::Node { node, .. } => {
                    let node = &self.graph.nodes[node as usize];
                    if let Op::Constant { value } = node.op {
                        ScalarRef::Constant(value)
                    } else {
                        let kinds = operand_kinds(self.graph, &node.op, &node.args, kind);
                        let args = node.args.iter().zip(kinds).map(|(&a, k)| self.get(a, k)).collect();
                        self.push(node.op.clone(), args, kind)
                    }
                }
            }
        };
        self.known.insert((value, kind), result);
        result
    }

    fn push(&mut self, op: Op, args: Vec<ScalarRef>, kind: ScalarKind) -> ScalarRef {
        self.ops.push(ScalarOp { op, args, kind });
        ScalarRef::Computed(self.ops.len() - 1)
    }
}

/// The kinds that an op's operands are converted to.
fn operand_kinds(graph: &Graph, op: &Op, args: &[Value], result: ScalarKind) -> Vec<ScalarKind> {
    let own: Vec<ScalarKind> = args
        .iter()
        .map(|&a| match graph.ty(a) {
            Ty::Scalar(kind) => *kind,
            Ty::Tensor(_) | Ty::List(_) => ScalarKind::Float,
        })
        .collect();
    let widest = own.iter().copied().max().unwrap_or(result);
    match op {
        Op::Eq {} | Op::Ne {} | Op::Lt {} | Op::Le {} | Op::Gt {} | Op::Ge {} => vec![widest; args.len()],
        Op::LogicalAnd {} | Op::LogicalNot {} => vec![ScalarKind::Bool; args.len()],
        Op::Where {} => vec![ScalarKind::Bool, result, result],
        Op::To { .. } => own,
        _ => vec![result; args.len()],
    }
}

fn evaluate(op: &Op, args: &[Scalar], kind: ScalarKind) -> Scalar {
    let x = args.first().copied().unwrap_or(Scalar::Int(0));
    let y = args.get(1).copied().unwrap_or(x);
    let compare = |order: &dyn Fn(std::cmp::Ordering) -> bool, unordered: bool| {
        let (a, b) = (x, y);
        let result = match (a, b) {
            (Scalar::Int(a), Scalar::Int(b)) => Some(a.cmp(&b)),
            (a, b) => a.as_f64().partial_cmp(&b.as_f64()),
        };
        Scalar::Bool(result.map_or(unordered, order))
    };
    let function = |f: Function| {
        let mut values = [0.0; 4];
        for (slot, arg) in values.iter_mut().zip(args) {
            *slot = arg.as_f64();
        }
        Scalar::Float(f.eval_f64(&values[..f.arity()]))
    };
    let arithmetic = |f: Function, int: fn(i64, i64) -> i64| match (x, y) {
        (Scalar::Float(_), _) | (_, Scalar::Float(_)) => function(f),
        (a, b) => Scalar::Int(int(a.as_i64(), b.as_i64())),
    };
    let result = match op {
        Op::Add {} => arithmetic(Function::Add, i64::wrapping_add),
        Op::Sub {} => arithmetic(Function::Sub, i64::wrapping_sub),
        Op::Mul {} => arithmetic(Function::Mul, i64::wrapping_mul),
        Op::Maximum {} => arithmetic(Function::Maximum, i64::max),
        Op::Minimum {} => arithmetic(Function::Minimum, i64::min),
        Op::Pow {} => arithmetic(Function::Pow, int_pow),
        Op::Neg {} => arithmetic(Function::Neg, |a, _| a.wrapping_neg()),
        Op::Abs {} => arithmetic(Function::Abs, |a, _| a.wrapping_abs()),
        Op::Div {} => function(Function::Div),
        Op::Exp {} => function(Function::Exp),
        Op::Log {} => function(Function::Log),
        Op::Sqrt {} => function(Function::Sqrt),
        Op::Tanh {} => function(Function::Tanh),
        Op::Erf {} => function(Function::Erf),
        Op::Sigmoid {} => function(Function::Sigmoid),
        Op::Eq {} => compare(&|o| o.is_eq(), false),
        Op::Ne {} => compare(&|o| o.is_ne(), true),
        Op::Lt {} => compare(&|o| o.is_lt(), false),
        Op::Le {} => compare(&|o| o.is_le(), false),
        Op::Gt {} => compare(&|o| o.is_gt(), false),
        Op::Ge {} => compare(&|o| o.is_ge(), false),
        Op::LogicalAnd {} => Scalar::Bool(x.as_bool() && y.as_bool()),
        Op::LogicalNot {} => Scalar::Bool(!x.as_bool()),
        Op::Where {} => {
            if x.as_bool() {
                y
            } else {
                args.get(2).copied().unwrap_or(y)
            }
        }
        // Numbers of the program text and conversions: the value itself.
        _ => x,
    };
    match op {
        // A conversion to f32 rounds to it.
        Op::To { dtype: kiln_ir::DType::F32 } => Scalar::Float(f64::from(result.as_f64() as f32)),
        _ => result.to_kind(kind),
    }
}

fn int_pow(base: i64, exponent: i64) -> i64 {
    match (base, exponent) {
        (1, _) => 1,
        (-1, e) => 1 - 2 * (e & 1),
        (_, e) if e < 0 => 0,
        (b, e) => {
            let (mut result, mut b, mut e) = (1i64, b, e);
            while e > 0 {
                if e & 1 == 1 {
                    result = result.wrapping_mul(b);
                }
                b = b.wrapping_mul(b);
                e >>= 1;
            }
            result
        }
    }
}

impl Plan {
    /// Runs the ops on numbers. `inputs` gives the number that is the graph input of a number; `results` must
    /// have the length of [`Plan::scalars`].
    pub fn eval_scalars(&self, inputs: &dyn Fn(usize) -> Scalar, results: &mut [Scalar]) {
        for (i, step) in self.scalars.iter().enumerate() {
            let mut args = [Scalar::Int(0); 4];
            for (slot, arg) in args.iter_mut().zip(&step.args) {
                *slot = Plan::scalar(*arg, inputs, &results[..i]);
            }
            results[i] = evaluate(&step.op, &args[..step.args.len().min(4)], step.kind);
        }
    }

    /// The number that a step needs.
    pub fn scalar(scalar: ScalarRef, inputs: &dyn Fn(usize) -> Scalar, results: &[Scalar]) -> Scalar {
        match scalar {
            ScalarRef::Input(number) => inputs(number),
            ScalarRef::Constant(value) => value,
            ScalarRef::Computed(at) => results[at],
        }
    }
}
