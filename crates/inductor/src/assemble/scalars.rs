//! Ops on numbers: run on the host before the steps, in f64, i64 or bool ([`Op::fold`]).

use kiln_ir::{Def, Graph, Op, ScalarKind, Ty, Value};
use rustc_hash::FxHashMap;

use kiln_plan::{ScalarOp, ScalarRef};

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
