//! The loop IR: one kernel as data, a closed set.
//!
//! ```text
//! kernel   = buffers, scalars, axes, expressions in order, stores
//! axis     = outer (kept, parallel) | inner (reduced or passed over several times), with an extent
//! expr     = scalar | literal | load buffer[index] | position index | operation(exprs)
//!          | narrow(expr, dtype)                      rounded or wrapped as a narrow dtype holds it
//!          | sum(expr) | max(expr)                    over all inner axes
//!          | fold_sum(expr) | fold_max(expr)          over all outer axes
//!          | scan_sum(expr) | scan_product(expr)      over the inner axes so far
//!          | bounded(expr, size)                      an index checked against a size
//! store    = buffer[index] <- expr | buffer[index] += expr
//! ```
//!
//! There are no statements and no explicit passes: an expression that mentions an inner axis lives inside the
//! inner loops, any other outside, and a store or reduction of something that needs a reduction comes in a
//! later pass over the inner loops than that reduction ([`Kernel::depths`]).
//!
//! A store at a computed index is a scatter: it may meet the same element again further along the inner axes. Where
//! there is one, or a scan, inner loops run in order ([`Kernel::is_ordered`]); outer ones never meet.
//!
//! A fold goes the other way: what every row adds to a column. Scheduled, it is only stored, and the items of its
//! kernel are parts of the rows, each with sums of its own ([`Kernel::parts`]); a second kernel adds them up.

use std::hash::{Hash, Hasher};

use kiln_ir::math::{self, Function};
use kiln_ir::{DType, Loc, ScalarKind};
use smallvec::SmallVec;

use crate::index::{AxisId, ExprId, Index};

/// The operations on elements: name in text, operands, and vector instructions.
macro_rules! operations {
    ($($variant:ident $name:literal $operands:literal $instructions:expr;)*) => {
        /// An operation on elements. Operands have been converted to the dtype it computes in.
        #[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
        #[allow(missing_docs, reason = "the names say it")]
        pub enum Operation {
            $($variant,)*
            /// A function of floats.
            Call(Function),
        }

        impl Operation {
            /// Every operation that is not a call.
            pub const PLAIN: &[Operation] = &[$(Operation::$variant),*];

            /// Its name in text.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Operation::$variant => $name,)*
                    Operation::Call(function) => function.name(),
                }
            }

            /// How many operands it has.
            pub const fn operands(self) -> usize {
                match self {
                    $(Operation::$variant => $operands,)*
                    Operation::Call(function) => function.arity(),
                }
            }

            /// What it takes, in vector instructions.
            pub const fn instructions(self) -> usize {
                match self {
                    $(Operation::$variant => $instructions,)*
                    Operation::Call(function) => function.instructions(),
                }
            }
        }
    };
}
operations! {
    Add "add" 2 1;
    Sub "sub" 2 1;
    Mul "mul" 2 1;
    Div "div" 2 Function::Div.instructions();
    Pow "pow" 2 Function::Pow.instructions();
    Maximum "maximum" 2 Function::Maximum.instructions();
    Minimum "minimum" 2 Function::Minimum.instructions();
    Neg "neg" 1 1;
    Abs "abs" 1 1;
    Sqrt "sqrt" 1 Function::Sqrt.instructions();
    Eq "eq" 2 1;
    Ne "ne" 2 1;
    Lt "lt" 2 1;
    Le "le" 2 1;
    Gt "gt" 2 1;
    Ge "ge" 2 1;
    And "and" 2 1;
    Not "not" 1 1;
    BitAnd "bit_and" 2 1;
    BitOr "bit_or" 2 1;
    BitXor "bit_xor" 2 1;
    ShiftLeft "shift_left" 2 4;
    ShiftRight "shift_right" 2 4;
    Where "where" 3 3;
    Convert "convert" 1 3;
}

impl Operation {
    /// What one element costs, in bytes that memory could have moved meanwhile.
    pub const fn cost(self) -> i64 {
        math::cost(self.instructions())
    }

    /// The operation with this name.
    pub fn from_name(name: &str) -> Option<Operation> {
        let plain = Operation::PLAIN.iter().copied().find(|op| op.name() == name);
        let call = || Function::ALL.iter().find(|f| f.name() == name).map(|f| Operation::Call(*f));
        plain.or_else(call)
    }
}

/// How a reduction combines.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Reduction {
    /// Sum.
    Sum,
    /// Largest element, NaN winning.
    Max,
}

impl Reduction {
    /// Both.
    pub const ALL: [Reduction; 2] = [Reduction::Sum, Reduction::Max];

    /// Its name in text.
    pub const fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Max => "max",
        }
    }

    /// The one with this name.
    pub fn from_name(name: &str) -> Option<Reduction> {
        Reduction::ALL.into_iter().find(|reduction| reduction.name() == name)
    }
}

/// What is carried along the inner axes.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Scan {
    /// The sum so far.
    Sum,
    /// The product so far.
    Product,
}

impl Scan {
    /// What it begins with.
    pub const fn start(self) -> i64 {
        match self {
            Scan::Sum => 0,
            Scan::Product => 1,
        }
    }

    /// Both.
    pub const ALL: [Scan; 2] = [Scan::Sum, Scan::Product];

    /// Its name in text.
    pub const fn name(self) -> &'static str {
        match self {
            Scan::Sum => "scan_sum",
            Scan::Product => "scan_product",
        }
    }

    /// The one with this name.
    pub fn from_name(name: &str) -> Option<Scan> {
        Scan::ALL.into_iter().find(|scan| scan.name() == name)
    }
}

/// What an expression computes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum ExprKind {
    /// A run-time number, already of the dtype's kind.
    Scalar(usize),
    /// A small number of the kernel's text.
    Literal(i64),
    /// An element of a buffer.
    Load {
        /// Which buffer.
        buffer: usize,
        /// Which element.
        index: Index,
    },
    /// The value of an index expression, as i64.
    Position(Index),
    /// An operation.
    Apply(Operation, SmallVec<[ExprId; 3]>),
    /// A reduction over all inner axes.
    Reduce(Reduction, ExprId),
    /// A reduction over all outer axes.
    Fold(Reduction, ExprId),
    /// What elements up to this one come to, in the order of the inner axes.
    Scan(Scan, ExprId),
    /// A value as a narrow dtype holds it: an integer wrapped to its width, a float rounded to its precision.
    Narrow(DType, ExprId),
    /// An index that must be in `0..size`: if it is not, the kernel reports `code` and uses 0.
    Bounded {
        /// The index.
        value: ExprId,
        /// The size of the dim.
        size: i64,
        /// What the kernel returns if it is out of range; 0 if another one reports it.
        code: usize,
    },
}

impl ExprKind {
    /// The same of other expressions.
    fn renamed(&self, rename: &dyn Fn(ExprId) -> ExprId) -> ExprKind {
        let moved = |index: &Index| index.map(&Index::axis, &rename);
        match self {
            ExprKind::Scalar(_) | ExprKind::Literal(_) => self.clone(),
            ExprKind::Load { buffer, index } => ExprKind::Load { buffer: *buffer, index: moved(index) },
            ExprKind::Position(index) => ExprKind::Position(moved(index)),
            ExprKind::Apply(op, args) => ExprKind::Apply(*op, args.iter().map(|&arg| rename(arg)).collect()),
            ExprKind::Reduce(reduction, arg) => ExprKind::Reduce(*reduction, rename(*arg)),
            ExprKind::Fold(reduction, arg) => ExprKind::Fold(*reduction, rename(*arg)),
            ExprKind::Scan(scan, arg) => ExprKind::Scan(*scan, rename(*arg)),
            ExprKind::Narrow(dtype, arg) => ExprKind::Narrow(*dtype, rename(*arg)),
            ExprKind::Bounded { value, size, code } => {
                ExprKind::Bounded { value: rename(*value), size: *size, code: *code }
            }
        }
    }
}

/// An expression with its dtype: one that elements are computed in. Loads widen and stores narrow.
#[derive(Clone, Debug)]
pub struct Expr {
    /// Element type.
    pub dtype: DType,
    /// What it computes.
    pub kind: ExprKind,
    /// The line of the user's program that asked for it first. It is no part of what an expression is: equal loops of
    /// different lines are one kernel.
    pub loc: Loc,
}

impl PartialEq for Expr {
    fn eq(&self, other: &Expr) -> bool {
        (self.dtype, &self.kind) == (other.dtype, &other.kind)
    }
}

impl Eq for Expr {}

impl Hash for Expr {
    fn hash<H: Hasher>(&self, hash: &mut H) {
        (self.dtype, &self.kind).hash(hash);
    }
}

/// Puts an expression's value into memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Store {
    /// Which buffer.
    pub buffer: usize,
    /// Which element.
    pub index: Index,
    /// The value.
    pub value: ExprId,
    /// Whether it is added to what is there.
    pub adds: bool,
}

impl Store {
    /// Whether the place is computed: another element may go there, too.
    pub fn is_scatter(&self) -> bool {
        let mut found = false;
        self.index.for_each_value(&mut |_| found = true);
        found
    }

    /// The value, and what the place is computed from.
    pub fn operands(&self) -> SmallVec<[ExprId; 2]> {
        let mut out = SmallVec::from_slice(&[self.value]);
        self.index.for_each_value(&mut |value| out.push(value));
        out
    }
}

/// A loop.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Axis {
    /// How often it runs.
    pub extent: i64,
    /// Whether it is an inner loop.
    pub inner: bool,
}

/// How a kernel runs its loops.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    /// No inner axes; vectors along the last outer axis.
    Map,
    /// Vectors along the last inner axis; one row per item.
    Rows,
    /// Vectors along the last outer axis; inner loops are serial.
    Columns,
    /// Like [`Mode::Map`] over one axis, for every row of a table of pointers.
    Table,
}

impl Mode {
    /// Every one.
    pub const ALL: [Mode; 4] = [Mode::Map, Mode::Rows, Mode::Columns, Mode::Table];

    /// Its name in text.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Map => "map",
            Mode::Rows => "rows",
            Mode::Columns => "columns",
            Mode::Table => "table",
        }
    }
}

/// One kernel.
#[derive(Clone, PartialEq, Debug)]
pub struct Kernel {
    /// How the loops run.
    pub mode: Mode,
    /// Axis 0 counts chunks of this many steps of the first inner axis.
    pub chunk: Option<i64>,
    /// Items are so many equal parts of the rows, and stores of folds have a place for each part.
    pub parts: Option<i64>,
    /// The loops: outer ones first, each kind in order.
    pub axes: Vec<Axis>,
    /// Dtypes of the buffers.
    pub buffers: Vec<DType>,
    /// Kinds of the run-time numbers.
    pub scalars: Vec<ScalarKind>,
    /// The expressions; operands come first.
    pub exprs: Vec<Expr>,
    /// The stores.
    pub stores: Vec<Store>,
}

/// The numbers of a kernel in their order, for readers and for writers.
macro_rules! numbers {
    ($kernel:ident, $found:ident, $iter:ident, $each:ident $(, $mutable:tt)?) => {
        $kernel.axes.$iter().for_each(|axis| $found(&$($mutable)? axis.extent));
        $kernel.chunk.$iter().for_each(&mut *$found);
        for expr in $kernel.exprs.$iter() {
            match &$($mutable)? expr.kind {
                ExprKind::Load { buffer: _, index } | ExprKind::Position(index) => index.$each($found),
                ExprKind::Bounded { value: _, size, code: _ } => $found(size),
                ExprKind::Scalar(_)
                | ExprKind::Literal(_)
                | ExprKind::Apply(..)
                | ExprKind::Reduce(..)
                | ExprKind::Fold(..)
                | ExprKind::Scan(..)
                | ExprKind::Narrow(..) => {}
            }
        }
        $kernel.stores.$iter().for_each(|store| store.index.$each($found));
    };
}

impl Kernel {
    /// A kernel without anything in it.
    pub fn empty(mode: Mode) -> Kernel {
        Kernel {
            mode,
            chunk: None,
            parts: None,
            axes: Vec::new(),
            buffers: Vec::new(),
            scalars: Vec::new(),
            exprs: Vec::new(),
            stores: Vec::new(),
        }
    }

    /// The axis along which vectors lie.
    pub fn vector_axis(&self) -> AxisId {
        match self.mode {
            Mode::Rows => self.axes.len() - 1,
            Mode::Map | Mode::Columns | Mode::Table => self.outer() - 1,
        }
    }

    /// Number of outer axes.
    pub fn outer(&self) -> usize {
        self.axes.iter().filter(|a| !a.inner).count()
    }

    /// What an element costs, next to one that is loaded, computed with a few operations and stored.
    pub fn cost(&self) -> i64 {
        let instructions = |expr: &Expr| match &expr.kind {
            ExprKind::Apply(operation, _) => operation.instructions(),
            _ => 0,
        };
        1 + (self.exprs.iter().map(instructions).sum::<usize>() / 8) as i64
    }

    /// The numbers of its loops, in the order of [`Kernel::each_number`].
    pub fn numbers(&self) -> Vec<i64> {
        let mut numbers = Vec::new();
        self.each_number(&mut |number| numbers.push(*number));
        numbers
    }

    /// Product of the outer or inner extents.
    pub fn count(&self, inner: bool) -> i64 {
        self.axes.iter().filter(|a| a.inner == inner).map(|a| a.extent).product()
    }

    /// Whether inner loops must run one step after the other.
    pub fn is_ordered(&self) -> bool {
        self.stores.iter().any(Store::is_scatter) || self.has_scans()
    }

    /// Whether something is carried along the inner axes.
    pub fn has_scans(&self) -> bool {
        self.exprs.iter().any(|expr| matches!(expr.kind, ExprKind::Scan(..)))
    }

    /// Direct operands of an expression, those of its index included.
    pub fn operands(&self, expr: ExprId) -> SmallVec<[ExprId; 3]> {
        let mut out = SmallVec::new();
        match &self.exprs[expr].kind {
            ExprKind::Scalar(_) | ExprKind::Literal(_) => {}
            ExprKind::Load { index, .. } | ExprKind::Position(index) => {
                index.for_each_value(&mut |v| out.push(v))
            }
            ExprKind::Apply(_, args) => out.extend(args.iter().copied()),
            ExprKind::Reduce(_, arg)
            | ExprKind::Fold(_, arg)
            | ExprKind::Scan(_, arg)
            | ExprKind::Narrow(_, arg) => out.push(*arg),
            ExprKind::Bounded { value, .. } => out.push(*value),
        }
        out
    }

    /// Calls for every number of the loops, where it stands: extents, and those of indices and checks. What is part
    /// of the expressions (a literal) is none of them.
    pub fn each_number<'k>(&'k self, found: &mut dyn FnMut(&'k i64)) {
        numbers!(self, found, iter, each_number);
    }

    /// The same, to change them.
    pub fn change_numbers(&mut self, change: &mut dyn FnMut(&mut i64)) {
        numbers!(self, change, iter_mut, change_numbers, mut);
    }

    fn index_of(&self, expr: ExprId) -> Option<&Index> {
        match &self.exprs[expr].kind {
            ExprKind::Load { index, .. } | ExprKind::Position(index) => Some(index),
            ExprKind::Scalar(_)
            | ExprKind::Literal(_)
            | ExprKind::Apply(..)
            | ExprKind::Reduce(..)
            | ExprKind::Fold(..)
            | ExprKind::Scan(..)
            | ExprKind::Narrow(..)
            | ExprKind::Bounded { .. } => None,
        }
    }

    /// For every expression, whether its value changes along any of the axes for which `along` holds.
    pub fn varies(&self, along: impl Fn(AxisId) -> bool) -> Vec<bool> {
        // A reduction swallows the inner axes, so the outer ones are followed separately.
        let (mut any, mut outer) =
            (Vec::with_capacity(self.exprs.len()), Vec::<bool>::with_capacity(self.exprs.len()));
        let mentions = |id: ExprId, wanted: &dyn Fn(AxisId) -> bool| {
            self.index_of(id).is_some_and(|i| (0..self.axes.len()).any(|a| wanted(a) && i.mentions(a)))
        };
        for id in 0..self.exprs.len() {
            let operands = self.operands(id);
            let is_reduction = matches!(self.exprs[id].kind, ExprKind::Reduce(..));
            let through_outer = operands.iter().any(|&o| outer[o]);
            let through = if is_reduction { through_outer } else { operands.iter().any(|&o| any[o]) };
            // A scan goes on even where what it adds up stays the same.
            let is_scan = matches!(self.exprs[id].kind, ExprKind::Scan(..))
                && (0..self.axes.len()).any(|a| self.axes[a].inner && along(a));
            any.push(through || is_scan || mentions(id, &along));
            outer.push(through_outer || mentions(id, &|a| along(a) && !self.axes[a].inner));
        }
        any
    }

    /// For every expression the number of passes over the inner loops that must be complete before it can be
    /// computed. A reduction of something of depth d happens in pass d and has depth d + 1.
    pub fn depths(&self) -> Vec<usize> {
        let mut out: Vec<usize> = Vec::with_capacity(self.exprs.len());
        for id in 0..self.exprs.len() {
            let below = self.operands(id).iter().map(|&o| out[o]).max().unwrap_or(0);
            out.push(below + usize::from(matches!(self.exprs[id].kind, ExprKind::Reduce(..))));
        }
        out
    }

    /// Bytes per lane of the widest element. An integer that is the same in all lanes takes no room in vectors; a
    /// float does, since its functions work on registers.
    pub fn widest(&self) -> usize {
        let varies = self.varies(|axis| axis == self.vector_axis());
        let exprs = self.exprs.iter().zip(varies).filter(|(e, varies)| *varies || e.dtype.is_float());
        let exprs = exprs.map(|(e, _)| e.dtype.size());
        exprs.chain(self.stores.iter().map(|store| self.buffers[store.buffer].size())).max().unwrap_or(4)
    }

    /// Drops expressions that nothing needs and numbers the rest anew; buffers and scalars likewise. Returns
    /// the old numbers of the kept buffers and scalars.
    pub fn prune(&mut self) -> (Vec<usize>, Vec<usize>) {
        let mut used = vec![false; self.exprs.len()];
        for store in &self.stores {
            store.operands().into_iter().for_each(|operand| used[operand] = true);
        }
        for id in (0..self.exprs.len()).rev() {
            if used[id] {
                for operand in self.operands(id) {
                    used[operand] = true;
                }
            }
        }
        let (mut buffers, mut scalars) = (Vec::new(), Vec::new());
        let number = |list: &mut Vec<usize>, old: usize| match list.iter().position(|&b| b == old) {
            Some(at) => at,
            None => {
                list.push(old);
                list.len() - 1
            }
        };
        let mut renamed = vec![usize::MAX; self.exprs.len()];
        let mut kept = Vec::new();
        for (id, expr) in self.exprs.iter().enumerate().filter(|(id, _)| used[*id]) {
            let mut kind = expr.kind.renamed(&|e| renamed[e]);
            match &mut kind {
                ExprKind::Scalar(scalar) => *scalar = number(&mut scalars, *scalar),
                ExprKind::Load { buffer, .. } => *buffer = number(&mut buffers, *buffer),
                _ => {}
            }
            renamed[id] = kept.len();
            kept.push(Expr { dtype: expr.dtype, kind, loc: expr.loc });
        }
        for store in &mut self.stores {
            store.buffer = number(&mut buffers, store.buffer);
            store.index = store.index.map(&Index::axis, &|e| renamed[e]);
            store.value = renamed[store.value];
        }
        self.exprs = kept;
        self.buffers = buffers.iter().map(|&b| self.buffers[b]).collect();
        self.scalars = scalars.iter().map(|&s| self.scalars[s]).collect();
        (buffers, scalars)
    }

    /// Puts expressions in an order in which operands come first again.
    pub fn sort_operands(&mut self) {
        fn visit(kernel: &Kernel, e: ExprId, places: &mut [Option<ExprId>], order: &mut Vec<ExprId>) {
            if places[e].is_some() {
                return;
            }
            for operand in kernel.operands(e) {
                visit(kernel, operand, places, order);
            }
            places[e] = Some(order.len());
            order.push(e);
        }
        let (mut places, mut order) = (vec![None; self.exprs.len()], Vec::new());
        for e in 0..self.exprs.len() {
            visit(self, e, &mut places, &mut order);
        }
        let rename = |e: ExprId| places[e].unwrap_or(e);
        let moved = order
            .iter()
            .map(|&old| Expr { kind: self.exprs[old].kind.renamed(&rename), ..self.exprs[old].clone() });
        self.exprs = moved.collect();
        for store in &mut self.stores {
            store.index = store.index.map(&Index::axis, &rename);
            store.value = rename(store.value);
        }
    }
}
