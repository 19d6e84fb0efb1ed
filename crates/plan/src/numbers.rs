//! The numbers of a run: graph inputs, constants, and what is computed from them on the host before the steps.

use kiln_ir::{Error, Loc, Result, Scalar, Why};
use smallvec::SmallVec;

use crate::plan::{ScalarOp, ScalarRef};

/// The numbers that a program's steps take, each once.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Numbers {
    /// Those that steps take.
    table: Vec<ScalarRef>,
    /// The ops that compute some of them, in order.
    computed: Vec<ScalarOp>,
}

impl Numbers {
    /// None yet; these ops compute those that are asked for.
    pub fn new(computed: Vec<ScalarOp>) -> Numbers {
        Numbers { table: Vec::new(), computed }
    }

    /// The position of a number in what [`Numbers::fill`] gives.
    pub fn position(&mut self, number: ScalarRef) -> usize {
        match self.table.iter().position(|&known| known == number) {
            Some(at) => at,
            None => {
                self.table.push(number);
                self.table.len() - 1
            }
        }
    }

    /// Works out all numbers; `input` gives the number that a graph input is.
    pub fn values(
        &self,
        input: &dyn Fn(usize) -> Option<Scalar>,
        found: &mut dyn FnMut(Scalar),
    ) -> Result<()> {
        let mut computed: SmallVec<[Scalar; 16]> = SmallVec::new();
        let value = |number: &ScalarRef, computed: &[Scalar]| match number {
            ScalarRef::Input(i) => {
                input(*i).ok_or_else(|| Error::bug(format!("input {i} of a program is no number")))
            }
            ScalarRef::Constant(x) => Ok(*x),
            ScalarRef::Computed(i) => Ok(computed[*i]),
        };
        for step in &self.computed {
            let mut args: SmallVec<[Scalar; 4]> = SmallVec::with_capacity(step.args.len());
            for number in &step.args {
                args.push(value(number, &computed)?);
            }
            let result = step.op.fold(&args).ok_or_else(|| {
                Error::op(
                    step.op.name(),
                    Why::Operand { argument: "an operand", expected: "a tensor" },
                    Loc::UNKNOWN,
                )
            })?;
            computed.push(result.to_kind(step.kind));
        }
        for number in &self.table {
            found(value(number, &computed)?);
        }
        Ok(())
    }

    /// The same as bit patterns.
    pub fn fill(&self, input: &dyn Fn(usize) -> Option<Scalar>, bits: &mut Vec<u64>) -> Result<()> {
        bits.clear();
        self.values(input, &mut |number| bits.push(number.to_bits()))
    }
}
