//! Changes in place: a variable gets a new value, through the views that it is made by, into its base.

use kiln_ir::{Dims, EmitExt, Error, Fault, Op, Result, Ty, Value, Why, planted, refold};

use super::{Base, State, Stored, Translator, bug};
use crate::trace::{TraceArg, Variable};

impl Translator<'_> {
    /// An in-place op.
    pub(super) fn change(&mut self, op: &Op, args: &[TraceArg], target: Variable) -> Result<()> {
        let values = self.args(args)?;
        self.check_history(target)?;
        let want = self.graph.ty(values[0]).clone();
        let mut value = self.emit(op.clone(), &values)?;
        let have = self.graph.ty(value).clone();
        if have != want {
            // The result is stored in the target's dtype.
            let dtype = match &want {
                Ty::Tensor(t) => t.dtype,
                Ty::List(items) if items.kinds().all(|t| t.dtype == items[0].dtype) => items[0].dtype,
                _ => return Err(bug("an in-place op over a list of several dtypes", self.graph.loc)),
            };
            value = self.emit(Op::To { dtype }, &[value])?;
        }
        self.write(target, value)
    }

    /// A change that is not recorded (under `no_grad`, or through a detached view) gives a tensor new values and
    /// leaves it its history. For leaves that is what `leaf_values` are for; in the middle of a tape it can't be
    /// said in a functional graph.
    fn check_history(&mut self, target: Variable) -> Result<()> {
        let targets: Vec<Variable> = match &self.states[target as usize] {
            State::Packed { items, .. } => items.to_vec(),
            _ => vec![target],
        };
        for target in targets {
            // An element of a list has no history.
            if let State::Tensor { base, .. } = self.states[target as usize]
                && let Base { stored: Stored::Value(whole), is_leaf: false, .. } = self.bases[base]
                && self.requires[whole.index()]
            {
                let part = self.read(target)?;
                if !(self.recording && self.requires[part.index()]) {
                    let reason = "a value in the middle of a tape is changed without being recorded";
                    return Err(Error::op("functionalise", Why::NotCaptured { reason }, self.graph.loc));
                }
            }
        }
        Ok(())
    }

    /// Gives a variable a new value, through its base.
    pub(crate) fn write(&mut self, variable: Variable, value: Value) -> Result<()> {
        self.clock += 1;
        match self.states[variable as usize].clone() {
            State::Unset => Err(bug("a variable is changed before it is made", self.graph.loc)),
            State::Made(_) => {
                self.states[variable as usize] = State::Made(value);
                Ok(())
            }
            State::Packed { items, .. } => {
                for (i, &item) in items.iter().enumerate() {
                    match &self.states[item as usize] {
                        State::Tensor { base, chain, .. } if chain.is_empty() => {
                            let base = *base;
                            self.store(base, Stored::Element(value, i));
                        }
                        _ => {
                            let element = self.emit(Op::ListGet { index: i }, &[value])?;
                            self.write(item, element)?;
                        }
                    }
                }
                self.states[variable as usize] = State::Packed { items, cached: Some((self.clock, value)) };
                Ok(())
            }
            State::Tensor { base, chain, .. } => {
                // What each step of the chain reads, outermost first; then back through the chain.
                let mut sources = vec![self.base_value(base)?];
                for op in chain.iter().take(chain.len().saturating_sub(1)) {
                    let last = sources[sources.len() - 1];
                    sources.push(self.emit(op.clone(), &[last])?);
                }
                let mut value = value;
                // A leaf has no history, whatever it is made of.
                let recording = self.recording;
                self.recording &= !self.bases[base].is_leaf;
                for (op, source) in chain.iter().zip(sources).rev() {
                    value = self.scatter(op, source, value)?;
                }
                self.recording = recording;
                self.store(base, Stored::Value(value));
                Ok(())
            }
        }
    }

    fn store(&mut self, base: usize, stored: Stored) {
        self.bases[base].stored = stored;
        self.bases[base].changed = self.clock;
        self.bases[base].written = true;
        if let (Stored::Value(value), true) = (stored, self.bases[base].is_leaf) {
            self.requires[value.index()] = true;
            self.bases[base].leaf_values.push(value);
        }
    }

    /// The source of a view op after the view was given `value`.
    fn scatter(&mut self, op: &Op, source: Value, value: Value) -> Result<Value> {
        let shape = self.graph.tensor_ty(source).shape;
        match op {
            Op::Reshape { .. } => self.emit(Op::Reshape { shape }, &[value]),
            Op::Permute { dims } => {
                let mut back = Dims::all(dims.len());
                for (i, &d) in dims.iter().enumerate() {
                    back[d] = i;
                }
                self.emit(Op::Permute { dims: back }, &[value])
            }
            Op::Transpose { .. } => self.emit(op.clone(), &[value]),
            Op::Slice { dim, start, end, step } => {
                let early = usize::from(planted(Fault::ChangedRowBefore) && *start > 0);
                let (dim, start, end, step) = (*dim, *start - early, *end - early, *step);
                self.emit(Op::SliceScatter { dim, start, end, step }, &[source, value])
            }
            Op::AsStrided { view, offset } => {
                let (view, offset) = (view.clone(), *offset);
                self.emit(Op::AsStridedScatter { view, offset }, &[source, value])
            }
            Op::Diagonal { offset, dim1, dim2 } => {
                let (offset, dim1, dim2) = (*offset, *dim1, *dim2);
                self.emit(Op::DiagonalScatter { offset, dim1, dim2 }, &[source, value])
            }
            Op::Unfold { dim, size, step } => {
                // Windows that overlap are not changed in place, so every element has one place.
                let (lined, positions) = refold(&mut self.graph, value, *dim, (*size, *step))?;
                self.note();
                self.emit(Op::IndexCopy { dim: *dim }, &[source, positions, lined])
            }
            Op::Detach {} => Ok(value),
            other => Err(bug(&format!("a change through {} has no inverse", other.name()), self.graph.loc)),
        }
    }
}
