//! What a scan is: its body, again and again.

use kiln_ir::{Error, Op, Order, Result, Scalar, ScalarKind, Shape, Ty};

use crate::{Argument, Array, Data, Evaluator};

impl Evaluator {
    pub(crate) fn scan(&self, op: &Op, args: &[&Argument]) -> Result<Argument> {
        let &Op::Scan { ref body, carries, inputs, length, dtype, order, saves } = op else {
            return Err(Error::bug("no scan"));
        };
        let tensor =
            |i: usize| args[i].as_tensor().ok_or_else(|| Error::bug("an operand of a scan is no tensor"));
        let mut carried: Vec<Array> = (0..carries).map(|i| tensor(i).cloned()).collect::<Result<_>>()?;
        // By carry and by what a step gives: one array for each element of the sequences.
        let mut before: Vec<Vec<Array>> = vec![Vec::new(); carries];
        let mut given: Vec<Vec<Array>> = vec![Vec::new(); body.outputs.len() - carries];
        for turn in 0..length {
            let t = if order == Order::Backward { length - 1 - turn } else { turn };
            before.iter_mut().zip(&carried).for_each(|(all, one)| all.push(one.clone()));
            if order == Order::While && carried[0].int(0) == 0 {
                continue;
            }
            let mut step: Vec<Argument> = carried.iter().cloned().map(Argument::from).collect();
            for i in carries..carries + inputs {
                let whole = tensor(i)?;
                let shape: Shape = whole.shape[1..].into();
                let first = t * shape.numel();
                step.push(whole.take(shape.clone(), first..first + shape.numel()).into());
            }
            for (i, &input) in body.inputs.iter().enumerate().skip(carries + inputs) {
                step.push(match body.ty(input) {
                    Ty::Scalar(kind) => Argument::Scalar(number(tensor(i)?, *kind)),
                    Ty::Tensor(_) | Ty::List(_) => tensor(i)?.clone().into(),
                });
            }
            let results = self.run(body, &step)?.outputs;
            let results: Option<Vec<Array>> = results.iter().map(|r| r.as_tensor().cloned()).collect();
            let results = results.ok_or_else(|| Error::bug("a result of a scan's body is no tensor"))?;
            carried = results[..carries].to_vec();
            given.iter_mut().zip(&results[carries..]).for_each(|(all, one)| all.push(one.clone()));
        }
        let in_order = |mut all: Vec<Array>| {
            if order == Order::Backward {
                all.reverse();
            }
            all
        };
        let ty = |i: usize| body.tensor_of(body.outputs[i]).dtype;
        let mut parts: Vec<Array> = carried;
        parts.retain(|part| part.dtype == dtype);
        let given = given.into_iter().enumerate().filter(|(i, _)| ty(carries + i) == dtype);
        parts.extend(given.flat_map(|(_, all)| in_order(all)));
        let before = before.into_iter().enumerate().filter(|(i, _)| saves && ty(*i) == dtype);
        parts.extend(before.flat_map(|(_, all)| in_order(all)));
        let elements = |part: &Array| 0..part.numel();
        let flat = if dtype.is_float() {
            let all = parts.iter().flat_map(|part| elements(part).map(|i| part.float(i)));
            Data::Float(all.collect())
        } else {
            Data::Int(parts.iter().flat_map(|part| elements(part).map(|i| part.int(i))).collect())
        };
        let count = parts.iter().map(Array::numel).sum::<usize>();
        Ok(Array { dtype, device: kiln_ir::Device::Cpu, shape: Shape::from([count]), data: flat }.into())
    }
}

fn number(array: &Array, kind: ScalarKind) -> Scalar {
    match kind {
        ScalarKind::Bool => Scalar::Bool(array.int(0) != 0),
        ScalarKind::Int => Scalar::Int(array.int(0)),
        ScalarKind::Float => Scalar::Float(array.float(0)),
    }
}
