//! The rewriter: a graph is built anew, node by node; before a node is added, the rules get a chance to say
//! it in a simpler way, and an equal node that is already there takes its place.

use kiln_ir::{Class, Emit, Graph, Op, Result, Scalar, Ty, Value, Values};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

/// A call that a rule looks at. Its operands are simplified already.
pub struct Call<'a> {
    /// The op.
    pub op: &'a Op,
    /// Its operands.
    pub args: &'a [Value],
    /// The type of its result.
    pub out: &'a Ty,
}

/// A named rewrite rule.
///
/// The law of rules: the right side gives the same bits as the left for *every* input, NaN, infinities and
/// negative zero included (NaNs count as equal), and is never more work.
pub struct Rule {
    /// The rule's name, for logs and tests.
    pub name: &'static str,
    /// `left → right`, in words of the field.
    pub law: &'static str,
    /// Emits the right side and returns its value, or `None` if the rule does not apply. A value of another
    /// type than the call's counts as `None`.
    pub apply: fn(&mut Rewriter<'_>, &Call<'_>) -> Result<Option<Value>>,
    /// Graphs on which the rule fires; the property test runs them with and without it.
    pub examples: &'static [&'static str],
}

/// What makes two nodes the same: op, attributes, operands.
type Key = (usize, Vec<(&'static str, String)>, SmallVec<[Value; 4]>);

/// Builds a graph under rules.
pub struct Rewriter<'r> {
    /// The graph so far.
    pub graph: Graph,
    rules: &'r [&'r [Rule]],
    known: FxHashMap<Key, Value>,
    fired: Vec<&'static str>,
    /// The rule that is not used.
    pub(crate) without: &'static str,
}

impl<'r> Rewriter<'r> {
    /// A rewriter with an empty graph.
    pub fn new(rules: &'r [&'r [Rule]]) -> Rewriter<'r> {
        Rewriter { graph: Graph::new(), rules, known: FxHashMap::default(), fired: Vec::new(), without: "" }
    }

    /// The rules that fired, in order.
    pub fn fired(&self) -> &[&'static str] {
        &self.fired
    }

    /// The op and the operands that make a value, unless it is an input.
    pub fn producer(&self, value: Value) -> Option<(Op, SmallVec<[Value; 4]>)> {
        self.graph.producer(value).map(|node| (node.op.clone(), node.args.clone()))
    }

    /// The operand of the op that makes a value, if that op has one operand and is accepted by `is`.
    pub fn through(&self, value: Value, is: impl Fn(&Op) -> bool) -> Option<Value> {
        let node = self.graph.producer(value)?;
        (node.args.len() == 1 && is(&node.op)).then(|| node.args[0])
    }

    /// The number that a value is known to be.
    pub fn constant(&self, value: Value) -> Option<Scalar> {
        match self.graph.producer(value)?.op {
            Op::Constant { value } => Some(value),
            _ => None,
        }
    }
}

impl Emit for Rewriter<'_> {
    fn emit(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        let outs = self.graph.infer(&op, args)?;
        let rules = self.rules;
        let without = self.without;
        for rule in rules.iter().flat_map(|theme| theme.iter()).filter(|rule| rule.name != without) {
            let call = Call { op: &op, args, out: &outs[0] };
            if let Some(value) = (rule.apply)(self, &call)?
                && *self.ty(value) == outs[0]
            {
                self.fired.push(rule.name);
                return Ok(smallvec![value]);
            }
        }
        if op.row().class == Class::Random {
            return self.graph.emit(op, args);
        }
        let key: Key = match op {
            // Long lists are taken apart into thousands of elements: the number says it without text.
            Op::ListGet { index } => {
                let element = args.iter().copied().chain([Value(index as u32)]).collect();
                (op.index(), Vec::new(), element)
            }
            _ => (op.index(), op.attributes(), args.into()),
        };
        if let Some(&value) = self.known.get(&key) {
            return Ok(smallvec![value]);
        }
        let loc = self.graph.loc;
        let outs = self.graph.push(op, args, outs, false, loc);
        self.known.insert(key, outs[0]);
        Ok(outs)
    }

    fn ty(&self, value: Value) -> &Ty {
        self.graph.ty(value)
    }
}
