//! Whether loops are well formed, and where they go in memory.

use crate::check::{Checked, holds};
use crate::index::{Index, Term};
use crate::loops::{ExprKind, Kernel, Mode, Store};

/// One access of a kernel's.
pub(crate) struct Access {
    /// Which of the step's buffers.
    pub buffer: usize,
    /// The first and last element, counted from where the buffer begins; `None` if there are none.
    pub range: Option<(i128, i128)>,
    pub is_write: bool,
}

/// No loop has more steps, nor all of a kernel's together.
const MOST: i128 = 1 << 56;

/// Checks the numbers of a kernel's loops, and tells where they go. `rows` are the elements of a table's.
pub(crate) fn accesses(kernel: &Kernel, rows: &[i64], tell: &mut dyn FnMut(Access) -> Checked) -> Checked {
    sizes(kernel)?;
    if kernel.mode == Mode::Table {
        return table(kernel, rows, tell);
    }
    if kernel.axes.iter().any(|axis| !axis.inner && axis.extent == 0) {
        return Ok(());
    }
    for expr in &kernel.exprs {
        if let ExprKind::Load { buffer, index } = &expr.kind {
            tell(Access { buffer: *buffer, range: range(kernel, index), is_write: false })?;
        }
    }
    for store in &kernel.stores {
        let mut reach = range(kernel, &store.index);
        if let (ExprKind::Fold(..), Some(parts)) = (&kernel.exprs[store.value].kind, kernel.parts) {
            // Part after part, a row of columns each.
            reach = Some((0, i128::from(parts) * i128::from(kernel.count(true)) - 1));
        }
        if store.adds {
            tell(Access { buffer: store.buffer, range: None, is_write: false })?;
        }
        tell(Access { buffer: store.buffer, range: reach, is_write: true })?;
    }
    Ok(())
}

/// The accesses of a kernel over a table, row after row.
fn table(kernel: &Kernel, rows: &[i64], tell: &mut dyn FnMut(Access) -> Checked) -> Checked {
    for (row, &count) in rows.iter().enumerate() {
        holds((0..1 << 40).contains(&count), || "a row of no length".into())?;
        let range = (count > 0).then(|| (0, i128::from(count) - 1));
        let first = row * kernel.buffers.len();
        for expr in &kernel.exprs {
            if let ExprKind::Load { buffer, .. } = &expr.kind {
                tell(Access { buffer: first + buffer, range, is_write: false })?;
            }
        }
        for store in &kernel.stores {
            tell(Access { buffer: first + store.buffer, range, is_write: true })?;
        }
    }
    Ok(())
}

/// Checks that everything that a kernel mentions is there, in order.
pub(crate) fn well_formed(kernel: &Kernel) -> Checked {
    let axes = kernel.axes.len();
    let inner = kernel.axes.iter().filter(|axis| axis.inner).count();
    let sorted = kernel.axes.windows(2).all(|pair| !pair[0].inner || pair[1].inner);
    let has_axes = match kernel.mode {
        Mode::Map => axes > 0 && inner == 0,
        Mode::Rows => inner > 0,
        Mode::Columns => axes > inner && inner > 0,
        Mode::Table => axes == 1 && inner == 0,
    };
    holds(sorted && has_axes, || "axes of another mode".into())?;
    holds(kernel.chunk.is_none() || axes > inner && inner > 0, || "chunks of nothing".into())?;
    holds(kernel.parts.is_none_or(|parts| (1..1 << 20).contains(&parts)), || "no parts".into())?;
    let has_folds = kernel.exprs.iter().any(|expr| matches!(expr.kind, ExprKind::Fold(..)));
    holds(!has_folds || kernel.parts.is_some() && kernel.mode == Mode::Rows, || {
        "folds without parts".into()
    })?;
    for (id, expr) in kernel.exprs.iter().enumerate() {
        let there = match &expr.kind {
            ExprKind::Scalar(scalar) => *scalar < kernel.scalars.len(),
            ExprKind::Load { buffer, index } => *buffer < kernel.buffers.len() && index_fits(index, axes, id),
            ExprKind::Position(index) => index_fits(index, axes, id),
            ExprKind::Apply(op, args) => args.iter().all(|arg| *arg < id) && args.len() == op.operands(),
            ExprKind::Reduce(_, arg) => *arg < id && inner > 0,
            ExprKind::Fold(_, arg) | ExprKind::Scan(_, arg) | ExprKind::Narrow(_, arg) => *arg < id,
            ExprKind::Bounded { value, code, .. } => *value < id && *code < 1 << 20,
            ExprKind::Literal(_) => true,
        };
        holds(there, || format!("%{id} needs what is not there"))?;
    }
    let count = kernel.exprs.len();
    let store_fits = |store: &Store| {
        store.buffer < kernel.buffers.len() && store.value < count && index_fits(&store.index, axes, count)
    };
    holds(kernel.stores.iter().all(store_fits), || "a store of what is not there".into())
}

fn index_fits(index: &Index, axes: usize, exprs: usize) -> bool {
    index.terms.iter().all(|(term, _)| match term {
        Term::Axis(axis) => *axis < axes,
        Term::Value(value, _) => *value < exprs,
        Term::Div(inner, _) | Term::Mod(inner, _) | Term::Clamp(inner, _) | Term::Abs(inner) => {
            index_fits(inner, axes, exprs)
        }
    })
}

/// Checks what kernels divide by, and that sizes can be multiplied.
fn sizes(kernel: &Kernel) -> Checked {
    let wrong = || "sizes that no tensor has".to_string();
    holds(kernel.chunk.is_none_or(|chunk| (1..1 << 40).contains(&chunk)), wrong)?;
    let mut product: i128 = 1;
    for axis in &kernel.axes {
        holds((0..1 << 40).contains(&axis.extent), wrong)?;
        product *= i128::from(axis.extent.max(1));
        holds(product <= MOST, wrong)?;
    }
    fn divisors(index: &Index) -> bool {
        index.terms.iter().all(|(term, factor)| {
            let number = |number: i64| number.unsigned_abs() < 1 << 40;
            number(*factor)
                && match term {
                    Term::Axis(_) => true,
                    Term::Value(_, size) => number(*size),
                    Term::Div(inner, by) | Term::Mod(inner, by) => *by > 0 && number(*by) && divisors(inner),
                    Term::Clamp(inner, most) => (0..1 << 40).contains(most) && divisors(inner),
                    Term::Abs(inner) => divisors(inner),
                }
        })
    }
    let of_expr = |kind: &ExprKind| match kind {
        ExprKind::Load { index, .. } | ExprKind::Position(index) => divisors(index),
        ExprKind::Bounded { size, .. } => (0..1 << 40).contains(size),
        _ => true,
    };
    let fit = kernel.exprs.iter().all(|expr| of_expr(&expr.kind))
        && kernel.stores.iter().all(|store| divisors(&store.index));
    holds(fit, wrong)
}

/// The first and last value of an index without its constant, which is part of the place where a buffer begins; `None`
/// if loops that it needs don't run.
fn range(kernel: &Kernel, index: &Index) -> Option<(i128, i128)> {
    let (mut low, mut high) = (0, 0);
    for (term, factor) in &index.terms {
        let (first, last) = match term {
            Term::Axis(axis) => (0, i128::from(kernel.axes[*axis].extent) - 1),
            Term::Value(value, size) => match &kernel.exprs[*value].kind {
                ExprKind::Bounded { size, .. } => (0, i128::from((*size).max(1)) - 1),
                _ => (0, i128::from((*size).max(1)) - 1),
            },
            Term::Div(inner, by) => {
                let (first, last) = whole(kernel, inner)?;
                (first.div_euclid(i128::from(*by)), last.div_euclid(i128::from(*by)))
            }
            Term::Mod(inner, by) => {
                whole(kernel, inner)?;
                (0, i128::from(*by) - 1)
            }
            Term::Clamp(inner, most) => {
                let (first, last) = whole(kernel, inner)?;
                let most = i128::from(*most);
                (first.clamp(0, most), last.clamp(0, most))
            }
            Term::Abs(inner) => {
                let (first, last) = whole(kernel, inner)?;
                (first.max(-last).max(0), first.abs().max(last.abs()))
            }
        };
        if first > last {
            return None;
        }
        let ends = [first, last].map(|end| end * i128::from(*factor));
        low += ends[0].min(ends[1]);
        high += ends[0].max(ends[1]);
    }
    Some((low, high))
}

/// The same with the constant.
fn whole(kernel: &Kernel, index: &Index) -> Option<(i128, i128)> {
    let constant = i128::from(index.constant);
    range(kernel, index).map(|(low, high)| (low + constant, high + constant))
}
