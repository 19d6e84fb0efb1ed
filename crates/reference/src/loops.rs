//! The plain meaning of loops: one kernel, element by element, every value rounded to its dtype. Sums are kept in double
//! precision, and nothing runs at the same time as anything else.

use kiln_ir::math::Width;
use kiln_ir::{DType, Scalar};
use kiln_plan::index::{ExprId, Index, Term};
use kiln_plan::loops::{ExprKind, Kernel, Mode, Operation, Reduction, Scan};

/// What a kernel reads and writes: elements of its buffers, and numbers.
pub trait Elements {
    /// An element of a buffer.
    fn read(&self, buffer: usize, element: i64) -> Scalar;
    /// Changes one.
    fn write(&mut self, buffer: usize, element: i64, value: Scalar);
    /// A number, of its kind.
    fn number(&self, scalar: usize) -> Scalar;
}

/// Runs a kernel over all of its loops. Returns its status: the code of an index that was out of range, else 0.
pub fn run_kernel(kernel: &Kernel, elements: &mut dyn Elements) -> usize {
    let inner: Vec<usize> = (0..kernel.axes.len()).filter(|&a| kernel.axes[a].inner).collect();
    let mut this = Interpreter {
        kernel,
        elements,
        depths: kernel.depths(),
        varies: kernel.varies(|a| kernel.axes[a].inner),
        position: vec![0; kernel.axes.len()],
        reduced: vec![None; kernel.exprs.len()],
        scanned: vec![None; kernel.exprs.len()],
        known: vec![None; kernel.exprs.len()],
        folded: vec![Vec::new(); kernel.stores.len()],
        status: 0,
    };
    let rows = kernel.count(false);
    let share = kernel.parts.map_or(rows.max(1), |parts| ((rows + parts - 1) / parts).max(1));
    for row in 0..rows {
        let mut rest = row;
        for a in (0..kernel.axes.len()).rev().filter(|&a| !kernel.axes[a].inner) {
            this.position[a] = rest % kernel.axes[a].extent;
            rest /= kernel.axes[a].extent;
        }
        this.row(&inner, (row / share) as usize);
    }
    this.store_folds();
    this.status
}

struct Interpreter<'a> {
    kernel: &'a Kernel,
    elements: &'a mut dyn Elements,
    depths: Vec<usize>,
    /// Whether an expression changes along the inner axes.
    varies: Vec<bool>,
    position: Vec<i64>,
    /// Reductions of this row.
    reduced: Vec<Option<Scalar>>,
    /// What scans come to so far.
    scanned: Vec<Option<Scalar>>,
    /// Values at this position.
    known: Vec<Option<Scalar>>,
    /// By store of a fold, what each place of each part comes to.
    folded: Vec<Vec<(i64, usize, f64)>>,
    status: usize,
}

impl Interpreter<'_> {
    fn row(&mut self, inner: &[usize], part: usize) {
        let kernel = self.kernel;
        self.reduced.fill(None);
        let passes = self.depths.iter().copied().max().unwrap_or(0);
        for pass in 0..=passes {
            self.scanned.fill(None);
            let reductions: Vec<(ExprId, Reduction, ExprId)> = (0..kernel.exprs.len())
                .filter_map(|id| match kernel.exprs[id].kind {
                    ExprKind::Reduce(reduction, arg) if self.depths[arg] == pass => {
                        Some((id, reduction, arg))
                    }
                    _ => None,
                })
                .collect();
            let stores: Vec<usize> = (0..kernel.stores.len())
                .filter(|&s| self.is_inside(s) && self.store_depth(s) == pass)
                .collect();
            let mut sums: Vec<Option<Scalar>> = vec![None; reductions.len()];
            self.each_inner(inner, 0, &mut |this| {
                this.known.fill(None);
                for ((_, reduction, arg), sum) in reductions.iter().zip(&mut sums) {
                    let value = this.value(*arg);
                    *sum = Some(sum.map_or(value, |sum| combine(*reduction, sum, value)));
                }
                this.store_all(&stores, part);
            });
            for (&(id, reduction, _), sum) in reductions.iter().zip(sums) {
                let dtype = kernel.exprs[id].dtype;
                let none = match reduction {
                    Reduction::Sum => Scalar::Int(0),
                    Reduction::Max if dtype.is_float() => Scalar::Float(f64::NEG_INFINITY),
                    Reduction::Max => Scalar::Int(i64::MIN),
                };
                self.reduced[id] = Some(sum.unwrap_or(none).to_dtype(dtype));
            }
        }
        inner.iter().for_each(|&a| self.position[a] = 0);
        self.known.fill(None);
        let last: Vec<usize> = (0..kernel.stores.len()).filter(|&s| !self.is_inside(s)).collect();
        self.store_all(&last, part);
    }

    /// Several stores. Everything is read before anything is written: what is stored may lie where an operand of
    /// another value did.
    fn store_all(&mut self, stores: &[usize], part: usize) {
        let kernel = self.kernel;
        let mut found: Vec<(usize, i64, Scalar)> = Vec::with_capacity(stores.len());
        for &s in stores {
            let store = &kernel.stores[s];
            found.push((s, self.index(&store.index), self.value(store.value)));
        }
        for (s, at, value) in found {
            self.store(s, at, value, part);
        }
    }

    /// Whether a store happens inside the inner loops.
    fn is_inside(&self, store: usize) -> bool {
        let store = &self.kernel.stores[store];
        let is_fold = matches!(self.kernel.exprs[store.value].kind, ExprKind::Fold(..));
        let mentions =
            (0..self.kernel.axes.len()).any(|a| self.kernel.axes[a].inner && store.index.mentions(a));
        is_fold || mentions || self.varies[store.value] || store.is_scatter()
    }

    fn store_depth(&self, store: usize) -> usize {
        let operands = self.kernel.stores[store].operands();
        operands.into_iter().map(|operand| self.depths[operand]).max().unwrap_or(0)
    }

    fn each_inner(&mut self, inner: &[usize], at: usize, body: &mut dyn FnMut(&mut Self)) {
        let Some(&axis) = inner.get(at) else { return body(self) };
        let extent = self.kernel.axes[axis].extent;
        let range = match self.kernel.chunk.filter(|_| at == 0) {
            Some(chunk) => self.position[0] * chunk..(self.position[0] * chunk + chunk).min(extent),
            None => 0..extent,
        };
        for position in range {
            self.position[axis] = position;
            self.each_inner(inner, at + 1, body);
        }
    }

    fn store(&mut self, number: usize, at: i64, value: Scalar, part: usize) {
        let store = &self.kernel.stores[number];
        if let ExprKind::Fold(reduction, _) = self.kernel.exprs[store.value].kind {
            let value = value.as_f64();
            let folded = &mut self.folded[number];
            match folded.iter_mut().find(|(place, of, _)| (*place, *of) == (at, part)) {
                Some((_, _, sum)) if reduction == Reduction::Sum => *sum += value,
                Some((_, _, most)) => *most = if most.is_nan() || value <= *most { *most } else { value },
                None => folded.push((at, part, value)),
            }
            return;
        }
        let value = if store.adds {
            let old = self.elements.read(store.buffer, at);
            combine(Reduction::Sum, old, value)
        } else {
            value
        };
        self.elements.write(store.buffer, at, value.to_dtype(self.kernel.buffers[store.buffer]));
    }

    /// What rows came to, part after part.
    fn store_folds(&mut self) {
        let columns = self.kernel.count(true);
        for (number, folded) in std::mem::take(&mut self.folded).into_iter().enumerate() {
            let store = &self.kernel.stores[number];
            let ExprKind::Fold(reduction, _) = self.kernel.exprs[store.value].kind else { continue };
            let dtype = self.kernel.buffers[store.buffer];
            let none = if reduction == Reduction::Sum { 0.0 } else { f64::NEG_INFINITY };
            for at in 0..self.kernel.parts.unwrap_or(1) * columns {
                self.elements.write(store.buffer, at, Scalar::Float(none).to_dtype(dtype));
            }
            for (at, part, value) in folded {
                let at = part as i64 * columns + at;
                self.elements.write(store.buffer, at, Scalar::Float(value).to_dtype(dtype));
            }
        }
    }

    fn index(&mut self, index: &Index) -> i64 {
        let mut sum = index.constant;
        for (term, factor) in &index.terms {
            sum += factor
                * match term {
                    Term::Axis(axis) => self.position[*axis],
                    Term::Value(value, _) => self.value(*value).as_i64(),
                    Term::Div(inner, by) => self.index(inner).div_euclid(*by),
                    Term::Mod(inner, by) => self.index(inner).rem_euclid(*by),
                    Term::Clamp(inner, most) => self.index(inner).clamp(0, *most),
                    Term::Abs(inner) => self.index(inner).abs(),
                };
        }
        sum
    }

    fn value(&mut self, id: ExprId) -> Scalar {
        if let Some(value) = self.known[id] {
            return value;
        }
        let expr = &self.kernel.exprs[id];
        let dtype = expr.dtype;
        let value = match &expr.kind {
            ExprKind::Scalar(scalar) => self.elements.number(*scalar),
            ExprKind::Literal(number) => Scalar::Int(*number),
            ExprKind::Load { buffer, index } => {
                let at = self.index(index);
                self.elements.read(*buffer, at)
            }
            ExprKind::Position(index) => Scalar::Int(self.index(index)),
            ExprKind::Apply(operation, args) => {
                let of = self.kernel.exprs[args[args.len() - 1]].dtype;
                let args: Vec<Scalar> = args.iter().map(|&arg| self.value(arg)).collect();
                apply(*operation, &args, of, dtype)
            }
            ExprKind::Reduce(..) => self.reduced[id].unwrap_or(Scalar::Int(0)),
            ExprKind::Fold(_, arg) => self.value(*arg),
            ExprKind::Scan(scan, arg) => {
                let value = self.value(*arg);
                let so_far = self.scanned[id].unwrap_or(Scalar::Int(scan.start()));
                let value = match (scan, dtype.is_float()) {
                    (Scan::Sum, true) => Scalar::Float(so_far.as_f64() + value.as_f64()),
                    (Scan::Product, true) => Scalar::Float(so_far.as_f64() * value.as_f64()),
                    (Scan::Sum, false) => Scalar::Int(so_far.as_i64().wrapping_add(value.as_i64())),
                    (Scan::Product, false) => Scalar::Int(so_far.as_i64().wrapping_mul(value.as_i64())),
                };
                self.scanned[id] = Some(value);
                value
            }
            ExprKind::Narrow(narrow, arg) => self.value(*arg).to_dtype(*narrow),
            ExprKind::Bounded { value, size, code } => {
                let value = self.value(*value).as_i64();
                if (0..*size).contains(&value) {
                    Scalar::Int(value)
                } else {
                    self.status = self.status.max(*code);
                    Scalar::Int(0)
                }
            }
        };
        let value = value.to_dtype(dtype);
        self.known[id] = Some(value);
        value
    }
}

fn combine(reduction: Reduction, a: Scalar, b: Scalar) -> Scalar {
    match (reduction, a, b) {
        (Reduction::Sum, Scalar::Float(a), b) => Scalar::Float(a + b.as_f64()),
        (Reduction::Sum, a, b) => Scalar::Int(a.as_i64().wrapping_add(b.as_i64())),
        (Reduction::Max, Scalar::Float(x), b) => {
            if x.is_nan() || b.as_f64() <= x {
                a
            } else {
                b
            }
        }
        (Reduction::Max, a, b) => Scalar::Int(a.as_i64().max(b.as_i64())),
    }
}

/// An operation on operands of dtype `of`.
fn apply(operation: Operation, args: &[Scalar], of: DType, dtype: DType) -> Scalar {
    let float = |i: usize| args[i].as_f64();
    let int = |i: usize| args[i].as_i64();
    let is_float = of.is_float();
    let arithmetic =
        |floats: f64, ints: i64| if is_float { Scalar::Float(floats) } else { Scalar::Int(ints) };
    let compare = |floats: bool, ints: bool| Scalar::Bool(if is_float { floats } else { ints });
    match operation {
        Operation::Add => arithmetic(float(0) + float(1), int(0).wrapping_add(int(1))),
        Operation::Sub => arithmetic(float(0) - float(1), int(0).wrapping_sub(int(1))),
        Operation::Mul => arithmetic(float(0) * float(1), int(0).wrapping_mul(int(1))),
        Operation::Div => Scalar::Float(float(0) / float(1)),
        Operation::Pow if is_float => {
            let width = if of == DType::F64 { Width::F64 } else { Width::F32 };
            Scalar::Float(kiln_ir::math::Function::Pow.eval(width, &[float(0), float(1)]))
        }
        Operation::Pow => Scalar::Int(match (int(0), int(1)) {
            (1, _) => 1,
            (-1, y) if y < 0 => {
                if y % 2 == 0 {
                    1
                } else {
                    -1
                }
            }
            (_, y) if y < 0 => 0,
            (x, y) => (0..y).fold(1i64, |power, _| power.wrapping_mul(x)),
        }),
        Operation::Maximum => arithmetic(larger(float(0), float(1)), int(0).max(int(1))),
        Operation::Minimum => arithmetic(-larger(-float(0), -float(1)), int(0).min(int(1))),
        Operation::Neg => arithmetic(-float(0), int(0).wrapping_neg()),
        Operation::Abs => arithmetic(float(0).abs(), int(0).wrapping_abs()),
        Operation::Sqrt => Scalar::Float(float(0).sqrt()),
        Operation::Eq => compare(float(0) == float(1), int(0) == int(1)),
        Operation::Ne => compare(float(0) != float(1), int(0) != int(1)),
        Operation::Lt => compare(float(0) < float(1), int(0) < int(1)),
        Operation::Le => compare(float(0) <= float(1), int(0) <= int(1)),
        Operation::Gt => compare(float(0) > float(1), int(0) > int(1)),
        Operation::Ge => compare(float(0) >= float(1), int(0) >= int(1)),
        Operation::And => Scalar::Bool(int(0) != 0 && int(1) != 0),
        Operation::Not => Scalar::Bool(int(0) == 0),
        Operation::BitAnd => Scalar::Int(int(0) & int(1)),
        Operation::BitOr => Scalar::Int(int(0) | int(1)),
        Operation::BitXor => Scalar::Int(int(0) ^ int(1)),
        Operation::ShiftLeft => Scalar::Int(if (0..64).contains(&int(1)) { int(0) << int(1) } else { 0 }),
        Operation::ShiftRight => Scalar::Int(int(0) >> if (0..64).contains(&int(1)) { int(1) } else { 63 }),
        Operation::Where => {
            if int(0) != 0 {
                args[1]
            } else {
                args[2]
            }
        }
        Operation::Convert => args[0].to_dtype(dtype),
        Operation::Call(function) => {
            let width = if of == DType::F64 { Width::F64 } else { Width::F32 };
            Scalar::Float(function.eval(width, &args.iter().map(|arg| arg.as_f64()).collect::<Vec<_>>()))
        }
    }
}

/// The larger of two, NaN winning.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b || a == b && a.is_sign_positive() { a } else { b }
}

/// The kernel of one row of a table: as many elements as the row has.
pub fn row_of(kernel: &Kernel, count: i64) -> Kernel {
    let mut row = kernel.clone();
    if kernel.mode == Mode::Table {
        row.axes[0].extent = count;
    }
    row
}
