//! Whether a kernel is the one that its loops have, its arguments follow from them, and where they go in memory.

use std::collections::HashMap;

use kiln_ir::{DType, ScalarKind};

use crate::assemble::name_of;
use crate::c::{self, Arguments, Launch};
use crate::check::{Checked, holds};
use crate::index::{Index, Term};
use crate::loops::{ExprKind, Kernel, Mode, Operation};
use crate::options::Options;
use crate::plan::KernelSource;

/// A kernel, with what its uses are checked by.
pub(crate) struct Known {
    kernel: Kernel,
    arguments: Arguments,
    /// The numbers of the loops that it was first used with.
    numbers: Vec<i64>,
    /// Numbers that are no arguments since others, which are, are always the same: which, and as which.
    twins: Vec<(usize, usize)>,
}

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

impl Known {
    /// Writes the kernel again, from its loops.
    pub(crate) fn new(source: &KernelSource, options: &Options) -> Checked<Known> {
        let wrong = |what: &str| format!("kernel {}: {what}", source.name);
        let kernel: Kernel = source.loops.parse().map_err(|_| wrong("no loops"))?;
        well_formed(&kernel).map_err(|what| wrong(&what))?;
        let emitted = c::emit(&kernel, options);
        let comment = source.code.strip_prefix("/*\n").and_then(|code| code.split_once(" */\n"));
        let is_it = comment.is_some_and(|(comment, code)| {
            !comment.contains("*/") && code == emitted.code.replace("KERNEL", &source.name)
        });
        let same = is_it
            && source.name == name_of(&emitted.code)
            && source.lanes == emitted.lanes
            && source.functions == emitted.functions
            && source.needs_libm == emitted.functions.iter().any(|(function, _)| function.calls_library());
        holds(same, || wrong("another text than that of its loops"))?;
        let mut numbers = Vec::new();
        kernel.each_number(&mut |number| numbers.push(*number));
        let twins = twins(&kernel, &emitted.arguments);
        Ok(Known { kernel, arguments: emitted.arguments, numbers, twins })
    }

    pub(crate) fn scalars(&self) -> &[ScalarKind] {
        &self.kernel.scalars
    }

    /// Dtypes of its buffers: of a row's, where it goes through a table.
    pub(crate) fn buffers(&self) -> &[DType] {
        &self.kernel.buffers
    }

    /// The largest code that it may return.
    pub(crate) fn codes(&self) -> usize {
        let code = |kind: &ExprKind| if let ExprKind::Bounded { code, .. } = kind { *code } else { 0 };
        self.kernel.exprs.iter().map(|expr| code(&expr.kind)).max().unwrap_or(0)
    }

    /// Which arguments say how long its innermost loop is, and how it is cut.
    pub(crate) fn blocks(&self) -> Option<[usize; 3]> {
        self.arguments.blocks(self.kernel.vector_axis())
    }

    /// Checks the arguments of a use (integers, items, grain, scratch) and tells where it goes.
    pub(crate) fn accesses(
        &self,
        bufs: usize,
        launch: (&[i64], i64, i64, usize),
        options: &Options,
        tell: &mut dyn FnMut(Access) -> Checked,
    ) -> Checked {
        let wrong = || "arguments that don't follow from the loops".to_string();
        let (ints, items, grain, scratch_bytes) = launch;
        let own = self.arguments.count();
        let (own, chunks) = ints.split_at_checked(own).ok_or_else(wrong)?;
        let mut numbers = self.numbers.clone();
        self.arguments.each_number(own, &mut |number, value| numbers[number] = value);
        self.twins.iter().for_each(|&(number, as_this)| numbers[number] = numbers[as_this]);
        let mut kernel = self.kernel.clone();
        let mut given = numbers.into_iter();
        kernel.change_numbers(&mut |old| given.next().unwrap_or(old));
        sizes(&kernel)?;
        let expected = self.arguments.of(&kernel, options.threads);
        if kernel.mode == Mode::Table {
            let columns = kernel.buffers.len();
            let fits = own == expected.ints
                && scratch_bytes == expected.scratch_bytes
                && grain > 0
                && columns > 0
                && bufs.is_multiple_of(columns)
                && chunks.len() as i128 == 3 * i128::from(items);
            holds(fits, wrong)?;
            return table(&kernel, bufs, chunks, tell);
        }
        let found = Launch { ints: ints.to_vec(), items, grain, scratch_bytes };
        holds(found == expected && bufs == kernel.buffers.len(), wrong)?;
        if kernel.axes.iter().any(|axis| !axis.inner && axis.extent == 0) {
            return Ok(());
        }
        for expr in &kernel.exprs {
            if let ExprKind::Load { buffer, index } = &expr.kind {
                tell(Access { buffer: *buffer, range: range(&kernel, index), is_write: false })?;
            }
        }
        for store in &kernel.stores {
            let mut reach = range(&kernel, &store.index);
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
}

/// The same position clamped to the same number is one argument, however often it is needed.
fn twins(kernel: &Kernel, arguments: &Arguments) -> Vec<(usize, usize)> {
    let (mut places, mut count) = (HashMap::new(), 0);
    kernel.each_number(&mut |number| {
        places.insert(std::ptr::from_ref(number), count);
        count += 1;
    });
    let mut is_argument = vec![false; count];
    arguments.each_number(&vec![0; arguments.count()], &mut |number, _| is_argument[number] = true);
    fn clamps<'k>(index: &'k Index, found: &mut Vec<(&'k Index, &'k i64)>) {
        for (term, _) in &index.terms {
            match term {
                Term::Axis(_) | Term::Value(..) => {}
                Term::Div(inner, _) | Term::Mod(inner, _) => clamps(inner, found),
                Term::Clamp(inner, most) => {
                    clamps(inner, found);
                    found.push((inner, most));
                }
            }
        }
    }
    let mut found = Vec::new();
    for expr in &kernel.exprs {
        if let ExprKind::Load { index, .. } | ExprKind::Position(index) = &expr.kind {
            clamps(index, &mut found);
        }
    }
    kernel.stores.iter().for_each(|store| clamps(&store.index, &mut found));
    let place = |most: &i64| places.get(&std::ptr::from_ref(most)).copied();
    let known: HashMap<(&Index, i64), usize> = found
        .iter()
        .filter_map(|(inner, most)| Some(((*inner, **most), place(most).filter(|at| is_argument[*at])?)))
        .collect();
    let twin = |(inner, most): &(&Index, &i64)| {
        let at = place(most).filter(|at| !is_argument[*at])?;
        Some((at, *known.get(&(*inner, **most))?))
    };
    found.iter().filter_map(twin).collect()
}

/// The accesses of a kernel over a table: piece after piece, each of a row.
fn table(kernel: &Kernel, bufs: usize, chunks: &[i64], tell: &mut dyn FnMut(Access) -> Checked) -> Checked {
    let columns = kernel.buffers.len();
    for chunk in chunks.chunks_exact(3) {
        let [row, at, count] = [chunk[0], chunk[1], chunk[2]];
        let fits = row >= 0 && (row as usize) < bufs / columns && at >= 0 && (0..1 << 40).contains(&count);
        holds(fits, || "a piece of no row".into())?;
        let range = (count > 0).then(|| (i128::from(at), i128::from(at) + i128::from(count) - 1));
        let first = row as usize * columns;
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
fn well_formed(kernel: &Kernel) -> Checked {
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
            ExprKind::Apply(op, args) => args.iter().all(|arg| *arg < id) && args.len() == operands(*op),
            ExprKind::Reduce(_, arg) => *arg < id && inner > 0,
            ExprKind::Fold(_, arg) | ExprKind::Scan(_, arg) | ExprKind::Narrow(_, arg) => *arg < id,
            ExprKind::Bounded { value, code, .. } => *value < id && *code < 1 << 20,
            ExprKind::Literal(_) => true,
        };
        holds(there, || format!("%{id} needs what is not there"))?;
    }
    let count = kernel.exprs.len();
    let store_fits = |store: &crate::loops::Store| {
        store.buffer < kernel.buffers.len() && store.value < count && index_fits(&store.index, axes, count)
    };
    holds(kernel.stores.iter().all(store_fits), || "a store of what is not there".into())
}

fn operands(op: Operation) -> usize {
    match op {
        Operation::Neg | Operation::Abs | Operation::Sqrt | Operation::Not | Operation::Convert => 1,
        Operation::Where => 3,
        Operation::Call(function) => function.arity(),
        _ => 2,
    }
}

fn index_fits(index: &Index, axes: usize, exprs: usize) -> bool {
    index.terms.iter().all(|(term, _)| match term {
        Term::Axis(axis) => *axis < axes,
        Term::Value(value, _) => *value < exprs,
        Term::Div(inner, _) | Term::Mod(inner, _) | Term::Clamp(inner, _) => index_fits(inner, axes, exprs),
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
