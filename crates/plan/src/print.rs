//! Loop kernels as text.

use std::fmt;

use crate::loops::{ExprKind, Kernel};

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |items: Vec<String>| items.join(", ");
        write!(f, "{}", self.mode.name())?;
        if let Some(chunk) = self.chunk {
            write!(f, " chunk {chunk}")?;
        }
        if let Some(parts) = self.parts {
            write!(f, " parts {parts}")?;
        }
        let axes = self.axes.iter().enumerate();
        let axes =
            axes.map(|(i, a)| format!("i{i}: {} {}", if a.inner { "inner" } else { "outer" }, a.extent));
        write!(f, " ({})", list(axes.collect()))?;
        let buffers = self.buffers.iter().enumerate().map(|(i, b)| format!("b{i}: {b}"));
        write!(f, " ({})", list(buffers.collect()))?;
        let scalars = self.scalars.iter().enumerate().map(|(i, s)| format!("s{i}: {}", s.name()));
        writeln!(f, " ({}) {{", list(scalars.collect()))?;
        for (id, expr) in self.exprs.iter().enumerate() {
            let line = format!("  %{id} = {} : {}", expr.kind, expr.dtype);
            if expr.loc.is_known() {
                writeln!(f, "{line:<72} ; {}", expr.loc)?
            } else {
                writeln!(f, "{line}")?
            }
        }
        for store in &self.stores {
            let how = if store.adds { "+=" } else { "<-" };
            writeln!(f, "  store b{}[{}] {how} %{}", store.buffer, store.index, store.value)?;
        }
        writeln!(f, "}}")
    }
}

impl fmt::Display for ExprKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExprKind::Scalar(s) => write!(f, "scalar s{s}"),
            ExprKind::Literal(number) => write!(f, "literal {number}"),
            ExprKind::Load { buffer, index } => write!(f, "load b{buffer}[{index}]"),
            ExprKind::Position(index) => write!(f, "position [{index}]"),
            ExprKind::Apply(op, args) => {
                let args: Vec<String> = args.iter().map(|arg| format!("%{arg}")).collect();
                write!(f, "{}({})", op.name(), args.join(", "))
            }
            ExprKind::Reduce(reduction, arg) => write!(f, "{}(%{arg})", reduction.name()),
            ExprKind::Fold(reduction, arg) => write!(f, "fold_{}(%{arg})", reduction.name()),
            ExprKind::Scan(scan, arg) => write!(f, "{}(%{arg})", scan.name()),
            ExprKind::Narrow(dtype, arg) => write!(f, "narrow(%{arg}, {dtype})"),
            ExprKind::Bounded { value, size, code } => write!(f, "bounded(%{value}, {size}, {code})"),
        }
    }
}
