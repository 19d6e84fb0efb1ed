//! The verifier: what must hold of a graph at each stage. It runs between all passes in debug builds and tests.

use std::fmt;

use crate::{Class, DType, Def, Error, Graph, ListTy, Node, Op, Result, Ty};

/// The stages of a graph's life; each allows less than the one before.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Stage {
    /// As the user wrote it: ops may change operands in place.
    Captured,
    /// No op changes anything; changes to inputs are write-backs.
    Functional,
    /// Only prims, with operands of one dtype and shape.
    Prims,
}

/// A graph that breaks the rules: the pass that made it, every violation, and the graph.
#[derive(Debug)]
pub struct VerifyError {
    /// The pass after which it was found.
    pub pass: String,
    /// What is wrong, one line each.
    pub violations: Vec<String>,
    /// The graph's text.
    pub graph: String,
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "after {}: the graph violates {} rule(s); this is a bug in Kiln",
            self.pass,
            self.violations.len()
        )?;
        for violation in &self.violations {
            writeln!(f, "  - {violation}")?;
        }
        f.write_str(&self.graph)
    }
}

impl Graph {
    /// Checks every rule of `stage`; `pass` names who made the graph.
    pub fn verify(&self, stage: Stage, pass: &str) -> Result<()> {
        let mut violations = Vec::new();
        for (i, node) in self.nodes.iter().enumerate() {
            self.verify_node(i, node, stage, &mut violations);
        }
        for &value in self.outputs.iter().chain(self.writes.iter().map(|w| &w.value)) {
            if value.index() >= self.value_count() {
                violations.push(format!("%{} is returned but not defined", value.0));
            }
        }
        for write in &self.writes {
            if !matches!(self.def(write.target), Def::Input(_)) {
                violations.push(format!("write to %{}, which is not an input", write.target.0));
            }
            let same = match (write.element, self.ty(write.value)) {
                (None, written) => written == self.ty(write.target),
                (Some(i), Ty::List(items)) => items.get(i as usize) == self.ty(write.target).as_tensor(),
                (Some(_), _) => false,
            };
            if !same {
                violations
                    .push(format!("write of %{} changes the type of %{}", write.value.0, write.target.0));
            }
        }
        if violations.is_empty() {
            Ok(())
        } else {
            let graph = self.to_string();
            Err(Error::Verify(Box::new(VerifyError { pass: pass.to_string(), violations, graph })))
        }
    }

    fn verify_node(&self, index: usize, node: &Node, stage: Stage, violations: &mut Vec<String>) {
        let name = node.op.name();
        let first_out = node.outs.first().map_or(0, |v| v.0);
        let mut fail = |message: String| violations.push(format!("%{first_out} = {name}: {message}"));
        for &arg in &node.args {
            let defined = arg.index() < self.value_count()
                && match self.def(arg) {
                    Def::Input(_) => true,
                    Def::Node { node, .. } => (node as usize) < index,
                };
            if !defined {
                return fail(format!("operand %{} is not defined before", arg.0));
            }
        }
        let tys: Vec<Ty> = node.args.iter().map(|&v| self.ty(v).clone()).collect();
        let outs: Vec<&Ty> = node.outs.iter().map(|&v| self.ty(v)).collect();
        let inferred = node.op.infer(&tys);
        let is_typed = inferred.is_ok();
        match inferred {
            Err(why) => fail(why.to_string()),
            Ok(_) if node.in_place => {
                if stage != Stage::Captured {
                    fail("changes its operand in place".into());
                }
            }
            Ok(want) if !want.iter().eq(outs.iter().copied()) => {
                fail(format!("results are {outs:?}, the type rule says {want:?}"));
            }
            Ok(_) => {}
        }
        if stage == Stage::Prims
            && is_typed
            && let Err(message) = self.prim_form(node)
        {
            fail(message);
        }
    }

    /// Whether a node is in the form inductor lowers: a prim, with optional operands only where its row says so;
    /// pointwise operands are tensors of the result's shape or numbers, all of one dtype.
    pub fn prim_form(&self, node: &Node) -> Result<(), String> {
        let row = node.op.row();
        let tys: Vec<Ty> = node.args.iter().map(|&arg| self.ty(arg).clone()).collect();
        let is_more = !row.variadic && row.prim.is_none() && node.args.len() > row.args.len();
        if !node.op.is_prim(&tys) || is_more {
            return Err("is not a prim".into());
        }
        if row.class != Class::Pointwise {
            return Ok(());
        }
        let out = self.ty(node.outs[0]);
        let mut dtype: Option<DType> = None;
        for (i, &arg) in node.args.iter().enumerate() {
            let ty = self.ty(arg);
            let fits = match (ty, out) {
                (Ty::Scalar(_), _) => true,
                (Ty::Tensor(a), Ty::Tensor(b)) => a.shape == b.shape,
                (Ty::List(a), Ty::List(b)) => {
                    let alike = |run: std::ops::Range<usize>| a[run.start].shape == b[run.start].shape;
                    a.len() == b.len() && ListTy::common_runs(&[a, b]).into_iter().all(alike)
                }
                _ => false,
            };
            if !fits {
                return Err(format!("operand %{} is {ty}, the result {out}", arg.0));
            }
            let is_condition = matches!(node.op, Op::Where {}) && i == 0;
            if is_condition || ty.is_scalar() {
                continue;
            }
            for item in ty.as_tensor().into_iter().chain(ty.as_list().and_then(|l| l.first())) {
                if dtype.is_some_and(|d| d != item.dtype) {
                    return Err("operands of different dtypes".into());
                }
                dtype = Some(item.dtype);
            }
        }
        Ok(())
    }
}
