//! Eager execution of recurrent layers.

use kiln_ir::table::recurrent::{Cell, Sequence};
use kiln_ir::{DType, Error, Result, Shape, Why};
use smallvec::SmallVec;

use super::{Input, Job};
use crate::kernels::recurrent::{Gradient, Layer, Number, backward, forward};
use crate::tensor::Ready;

impl Job<'_> {
    /// A layer's trace, or its slopes.
    pub(super) fn recurrent(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        match out.dtype {
            DType::F32 => self.recurrent_of::<f32>(out, inputs),
            DType::F64 => self.recurrent_of::<f64>(out, inputs),
            got => {
                let why = Why::DType { argument: "x", expected: "f32 or f64", got };
                Err(self.op.error(self.tys, why, self.loc))
            }
        }
    }

    fn recurrent_of<T: Number>(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let mut operands: SmallVec<[Ready; 6]> = SmallVec::new();
        for i in 0..inputs.len() {
            operands.push(self.dense(self.tensor(inputs, i)?)?);
        }
        let shapes: SmallVec<[&Shape; 6]> = operands.iter().map(|t| &t.layout.shape).collect();
        let sequence = Sequence::of(self.op, &shapes);
        let s = sequence.ok_or_else(|| Error::bug("a recurrent layer of other shapes"))?;
        let at = |i: usize| operands[i].pointer().cast::<T>().cast_const();
        let lengths =
            operands.get(Sequence::lengths_at(self.op)).map(|t| t.pointer().cast::<i64>().cast_const());
        let to = out.pointer().cast::<T>();
        let none = std::ptr::null();
        let done = if Sequence::is_gradient(self.op) {
            let projection = if s.projected { at(3) } else { none };
            let of = Gradient { grad: at(0), trace: at(1), weight: at(2), projection, lengths };
            // SAFETY: all are dense, of one dtype, and locked for reading or fresh, `out` is fresh; the type rule
            // checked that the sizes fit together.
            unsafe { backward(&s, to, of) }
        } else {
            let (cell, weight, bias) = match s.cell {
                Cell::Lstm => (at(2), at(3), none),
                Cell::Gru => (none, at(2), at(3)),
                Cell::Tanh | Cell::Relu => (none, at(2), none),
            };
            let projection = if s.projected { at(4) } else { none };
            let layer = Layer { x: at(0), hidden: at(1), cell, weight, bias, projection, lengths };
            // SAFETY: as above.
            unsafe { forward(&s, to, layer) }
        };
        done.map_err(|error| self.memory(error))
    }
}
