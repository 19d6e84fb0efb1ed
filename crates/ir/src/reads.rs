//! What a gradient rule reads: found by running it on types alone, so that no row has to say it and none can say
//! it wrongly.

use smallvec::{SmallVec, smallvec};

use crate::{Emit, Error, Grad, GradCall, Graph, Op, Result, Ty, Value, Values, carries_gradient};

/// The values of a call that its gradient rule reads; of the others it looks at the types.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Reads {
    operands: u64,
    /// Whether the result is read.
    pub result: bool,
}

/// The bit of an operand. Those beyond the last bit share it: of many operands all are read or none.
fn bit(operand: usize) -> u64 {
    1 << operand.min(63)
}

impl Reads {
    /// Everything.
    pub const ALL: Reads = Reads { operands: u64::MAX, result: true };

    /// Whether an operand is read.
    pub fn operand(self, i: usize) -> bool {
        self.operands & bit(i) != 0
    }

    /// As a number, if there are few operands: their bits, then the result's.
    pub fn packed(self) -> u16 {
        (self.operands as u16 & 0xff) | u16::from(self.result) << 8
    }

    /// What was packed.
    pub fn unpacked(packed: u16) -> Reads {
        Reads { operands: u64::from(packed & 0xff), result: packed >> 8 & 1 == 1 }
    }

    /// What the rule of an op, or those of its parts, read to give the operands that are needed their gradients.
    pub fn of(op: &Op, operands: &[Ty], result: &Ty, needs: &[bool]) -> Result<Reads> {
        if let Grad::Decompose = op.row().grad {
            return Reads::of_parts(op, operands, needs);
        }
        let mut probe = Probe::new(operands);
        for grad in probe.run(op, result, needs)?.into_iter().flatten() {
            probe.read(grad);
        }
        Ok(probe.reads)
    }
}

impl Reads {
    fn of_parts(op: &Op, operands: &[Ty], needs: &[bool]) -> Result<Reads> {
        let mut graph = Graph::new();
        let inputs: Vec<Value> = operands.iter().map(|ty| graph.input(ty.clone())).collect();
        let Some(parts) = op.decompose(&mut graph, &inputs)? else { return Ok(Reads::default()) };
        let mut needed = vec![false; graph.value_count()];
        inputs.iter().zip(needs).for_each(|(input, &needs)| needed[input.index()] = needs);
        let mut reads = Reads::default();
        for node in &graph.nodes {
            let needs: Vec<bool> = node.args.iter().map(|v| needed[v.index()]).collect();
            if !needs.contains(&true) || matches!(node.op.row().grad, Grad::Zero) {
                continue;
            }
            let tys: Vec<Ty> = node.args.iter().map(|&v| graph.ty(v).clone()).collect();
            let own = Reads::of(&node.op, &tys, graph.ty(node.outs[0]), &needs)?;
            for (_, arg) in node.args.iter().enumerate().filter(|(i, _)| own.operand(*i)) {
                match inputs.iter().position(|input| input == arg) {
                    Some(operand) => reads.operands |= bit(operand),
                    None => reads.result |= *arg == parts[0],
                }
            }
            reads.result |= own.result && node.outs[0] == parts[0];
            node.outs.iter().for_each(|v| needed[v.index()] = carries_gradient(graph.ty(*v)));
        }
        Ok(reads)
    }
}

/// When the values of a rule's run are read for the last time.
#[derive(Clone, Debug, Default)]
pub struct Lifetimes {
    /// The number of an op, from 1, and a value that nobody reads after it; in the order of the ops.
    ends: Vec<(u32, Value)>,
}

impl Lifetimes {
    /// Those of the rule of an op. Values are numbered as they come: operands, result, its gradient, and what the
    /// rule emits.
    pub fn of(op: &Op, operands: &[Ty], result: &Ty, needs: &[bool]) -> Result<Lifetimes> {
        let mut probe = Probe::new(operands);
        let grads = probe.run(op, result, needs)?;
        for grad in grads.into_iter().flatten() {
            probe.last[grad.index()] = u32::MAX;
        }
        let ends = probe.last.iter().zip(0..).filter(|(last, _)| (1..u32::MAX).contains(*last));
        let mut ends: Vec<(u32, Value)> = ends.map(|(&last, value)| (last, Value(value))).collect();
        ends.sort_unstable();
        Ok(Lifetimes { ends })
    }

    /// The values that nobody reads after the op with this number; asked for every op in turn.
    pub fn end_at(&self, from: &mut usize, op: u32) -> impl Iterator<Item = Value> {
        let first = *from;
        while self.ends.get(*from).is_some_and(|(last, _)| *last <= op) {
            *from += 1;
        }
        self.ends[first..*from].iter().map(|(_, value)| *value)
    }
}

/// An emitter that computes types, and notes which of the first values are operands of what is emitted: the
/// operands of the call, then its result, then the result's gradient.
struct Probe {
    tys: Vec<Ty>,
    operands: usize,
    reads: Reads,
    /// How many ops were emitted, and for each value the last of them that reads it.
    emitted: u32,
    last: Vec<u32>,
}

impl Probe {
    fn new(operands: &[Ty]) -> Probe {
        let (count, last) = (operands.len(), vec![0; operands.len()]);
        Probe { tys: operands.to_vec(), operands: count, reads: Reads::default(), emitted: 0, last }
    }

    /// The gradients that the rule of an op gives to operands of the probe's first types.
    fn run(&mut self, op: &Op, result: &Ty, needs: &[bool]) -> Result<Vec<Option<Value>>> {
        let Grad::Fn(rule) = op.row().grad else { return Ok(Vec::new()) };
        let inputs: Vec<Value> = (0..self.operands as u32).map(Value).collect();
        let outputs = [self.push(result.clone())];
        let grads = [Some(self.push(result.clone()))];
        GradCall { op, inputs: &inputs, outputs: &outputs, grads: &grads, needs }.run(self, rule)
    }

    fn push(&mut self, ty: Ty) -> Value {
        self.tys.push(ty);
        self.last.push(0);
        Value(self.tys.len() as u32 - 1)
    }

    fn read(&mut self, value: Value) {
        match value.index() {
            // Numbers are kept in any case.
            i if i < self.operands => self.reads.operands |= bit(i),
            i if i == self.operands => self.reads.result = true,
            _ => {}
        }
    }
}

impl Emit for Probe {
    fn emit(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        self.emitted += 1;
        if let Op::Constant { value } = op {
            return Ok(smallvec![self.push(Ty::Scalar(value.kind()))]);
        }
        let mut tys: SmallVec<[Ty; 4]> = SmallVec::new();
        for &arg in args {
            self.read(arg);
            self.last[arg.index()] = self.emitted;
            tys.push(self.tys[arg.index()].clone());
        }
        let outs = op.infer(&tys).map_err(|why| -> Error { op.error(&tys, why, crate::Loc::UNKNOWN) })?;
        Ok(outs.into_iter().map(|ty| self.push(ty)).collect())
    }

    fn ty(&self, value: Value) -> &Ty {
        &self.tys[value.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SampleArg, TensorTy};

    fn types(args: &[SampleArg], dtype: crate::DType) -> Vec<Ty> {
        let tensor = |dtype, shape: &crate::Shape| Ty::Tensor(TensorTy::new(dtype, shape.clone()));
        args.iter()
            .map(|arg| match arg {
                SampleArg::Tensor(shape, _) => tensor(dtype, shape),
                SampleArg::Fixed(dtype, shape, _) => tensor(*dtype, shape),
                SampleArg::Number(x) => Ty::Scalar(x.kind()),
            })
            .collect()
    }

    /// What rules read for every sample of every row and every choice of wanted gradients.
    fn each(mut check: impl FnMut(&Op, &[Ty], &Ty, &[bool], Reads)) {
        for row in Op::ROWS.iter().filter(|row| matches!(row.grad, Grad::Fn(_))) {
            for sample in row.sample_calls() {
                for &dtype in sample.dtypes.iter().filter(|dtype| dtype.is_float()) {
                    let tys = types(&sample.args, dtype);
                    let Ok(outs) = sample.op.infer(&tys) else { continue };
                    let floats: Vec<usize> =
                        (0..tys.len()).filter(|&i| crate::carries_gradient(&tys[i])).collect();
                    for chosen in 1..1u32 << floats.len().min(4) {
                        let wanted =
                            |i| floats.iter().position(|&f| f == i).is_some_and(|n| chosen >> n & 1 == 1);
                        let needs: Vec<bool> = (0..tys.len()).map(wanted).collect();
                        let reads = Reads::of(&sample.op, &tys, &outs[0], &needs).unwrap();
                        check(&sample.op, &tys, &outs[0], &needs, reads);
                    }
                }
            }
        }
    }

    /// A rule that computes more than it returns would have values saved for nothing.
    #[test]
    fn rules_read_only_what_their_gradients_need() {
        let mut wasteful = std::collections::BTreeSet::new();
        each(|op, tys, out, needs, reads| {
            let mut graph = Graph::new();
            let inputs: Vec<Value> = tys.iter().map(|ty| graph.input(ty.clone())).collect();
            let (y, g) = (graph.input(out.clone()), graph.input(out.clone()));
            let Grad::Fn(rule) = op.row().grad else { return };
            let call = GradCall { op, inputs: &inputs, outputs: &[y], grads: &[Some(g)], needs };
            let grads = call.run(&mut graph, rule).unwrap();
            let mut live = vec![false; graph.value_count()];
            grads.iter().flatten().for_each(|v| live[v.index()] = true);
            for node in graph.nodes.iter().rev().filter(|node| node.op.name() != "constant") {
                if node.outs.iter().any(|v| live[v.index()]) {
                    node.args.iter().for_each(|v| live[v.index()] = true);
                }
            }
            for (i, &input) in inputs.iter().enumerate() {
                if tys[i].as_tensor().is_some() && reads.operand(i) != live[input.index()] {
                    wasteful.insert(format!("{}: operand {i} for {needs:?}", op.name()));
                }
            }
            if reads.result != live[y.index()] {
                wasteful.insert(format!("{}: result for {needs:?}", op.name()));
            }
        });
        assert!(wasteful.is_empty(), "{wasteful:#?}");
    }

    #[test]
    fn known_reads() {
        let f32 = |shape: &[usize]| Ty::Tensor(TensorTy::new(crate::DType::F32, shape));
        let reads = |op: Op, tys: &[Ty], needs: &[bool]| {
            let out = op.infer(tys).unwrap();
            let reads = Reads::of(&op, tys, &out[0], needs).unwrap();
            ((0..tys.len()).filter(|&i| reads.operand(i)).collect::<Vec<_>>(), reads.result)
        };
        let x = || f32(&[3, 3]);
        assert_eq!(reads(Op::Mul {}, &[x(), x()], &[true, true]), (vec![0, 1], false));
        assert_eq!(reads(Op::Mul {}, &[x(), x()], &[true, false]), (vec![1], false));
        assert_eq!(reads(Op::Mm {}, &[x(), x()], &[false, true]), (vec![0], false));
        assert_eq!(reads(Op::Pow {}, &[x(), x()], &[true, false]), (vec![0, 1], false));
        assert_eq!(reads(Op::Tanh {}, &[x()], &[true]), (vec![], true));
        assert_eq!(reads(Op::Add {}, &[x(), x()], &[true, true]), (vec![], false));
    }
}
