//! C for single expressions.

use std::fmt::Write;

use kiln_ir::math::{Function, Width, c};
use kiln_ir::{DType, Fault, planted};

use super::narrow::wrapped;
use super::{Emitter, Level, memory_type, suffix, vector_type};
use kiln_plan::index::{ExprId, Index, Term};
use kiln_plan::loops::{ExprKind, Mode, Operation, Reduction, Scan};

fn width(dtype: DType) -> Option<Width> {
    match dtype.computing() {
        DType::F32 => Some(Width::F32),
        DType::F64 => Some(Width::F64),
        _ => None,
    }
}

impl<'k> Emitter<'k> {
    fn ty(&self, dtype: DType) -> &'static str {
        vector_type(dtype, self.mask)
    }

    /// A scalar in memory as a vector of equal lanes.
    pub(super) fn splat(&self, dtype: DType, scalar: &str) -> String {
        match dtype {
            DType::Bool => format!("kiln_splat_mask{}({scalar})", self.mask * 8),
            _ => format!("kiln_splat_{}({scalar})", suffix(dtype)),
        }
    }

    /// A scalar as it comes from memory as a vector of equal lanes.
    pub(super) fn splat_memory(&self, dtype: DType, scalar: &str) -> String {
        match dtype {
            DType::F16 | DType::BF16 => format!("kiln_one_{dtype}({scalar})"),
            other => self.splat(other.computing(), scalar),
        }
    }

    /// A vector as it comes from memory (`u8v` for truth values) as a value.
    pub(super) fn as_value(&self, dtype: DType, vector: &str) -> String {
        match (dtype, self.mask) {
            (narrow, _) if narrow.is_narrow() => format!("kiln_widen_{narrow}({vector})"),
            (DType::Bool, 4) => format!("kiln_mask_f32_from_bool({vector})"),
            (DType::Bool, _) => format!("kiln_mask_f64_from_bool({vector})"),
            _ => vector.into(),
        }
    }

    pub(super) fn as_memory(&self, dtype: DType, vector: &str) -> String {
        match (dtype, self.mask) {
            (narrow, _) if narrow.is_narrow() => format!("kiln_shorten_{narrow}({vector})"),
            (DType::Bool, 4) => format!("kiln_bool_from_mask_f32({vector})"),
            (DType::Bool, _) => format!("kiln_bool_from_mask_f64({vector})"),
            _ => vector.into(),
        }
    }

    /// A mask with lanes of `bytes` bytes made to fit this kernel's masks.
    fn own_mask(&self, bytes: usize, text: String) -> String {
        match (bytes, self.mask) {
            (8, 4) => format!("kiln_narrow_mask({text})"),
            (4, 8) => format!("kiln_widen_mask({text})"),
            _ => text,
        }
    }

    /// This kernel's mask made to fit lanes of `bytes` bytes.
    fn mask_for(&self, bytes: usize, name: &str) -> String {
        match (self.mask, bytes) {
            (4, 8) => format!("kiln_widen_mask({name})"),
            (8, 4) => format!("kiln_narrow_mask({name})"),
            _ => name.into(),
        }
    }

    fn call(&mut self, function: Function, width: Width, args: &[String]) -> String {
        self.functions.push((function, width));
        let name = match function {
            Function::Erf if planted(Fault::UnknownFunction) => "kiln_error_function".into(),
            _ => c::function_name(function, width),
        };
        format!("{name}({})", args.join(", "))
    }

    pub(super) fn identity(&self, reduction: Reduction, dtype: DType) -> String {
        match (reduction, dtype.computing()) {
            (Reduction::Max, _) if planted(Fault::MaximumFromZero) => format!("({}){{0}}", self.ty(dtype)),
            (Reduction::Sum, _) | (Reduction::Max, DType::Bool) => format!("({}){{0}}", self.ty(dtype)),
            (Reduction::Max, DType::F32) => "kiln_splat_f32(-__builtin_inff())".into(),
            (Reduction::Max, DType::F64) => "kiln_splat_f64(-__builtin_inf())".into(),
            (Reduction::Max, _) => "kiln_splat_i64(-0x7fffffffffffffffLL - 1)".into(),
        }
    }

    pub(super) fn combine(&mut self, reduction: Reduction, dtype: DType, a: &str, b: &str) -> String {
        let op = match reduction {
            Reduction::Sum => Operation::Add,
            Reduction::Max => Operation::Maximum,
        };
        self.apply(op, dtype, dtype, &[a.into(), b.into()])
    }

    /// All lanes of `vector` combined, in every lane; `before` gets the statements that halve it step by step.
    pub(super) fn across(
        &mut self,
        reduction: Reduction,
        dtype: DType,
        vector: &str,
        before: &mut String,
    ) -> String {
        if (reduction, dtype) == (Reduction::Max, DType::Bool) {
            let any: Vec<String> = (0..self.lanes).map(|l| format!("{vector}[{l}]")).collect();
            return self.splat(dtype, &any.join(" | "));
        }
        let mut half = self.lanes / 2;
        while half > 0 {
            let other = format!("kiln_turn{half}_{}({vector})", suffix(dtype));
            let text = self.combine(reduction, dtype, vector, &other);
            before.push_str(&format!("        {vector} = {text};\n"));
            half /= 2;
        }
        self.splat(dtype, &format!("{vector}[0]"))
    }

    /// `value` where lanes are live, else the identity of the reduction.
    pub(super) fn masked(&self, reduction: Reduction, dtype: DType, value: &str) -> String {
        let identity = self.identity(reduction, dtype);
        match dtype {
            _ if planted(Fault::TailNotMasked) => value.into(),
            DType::F32 => format!("kiln_select_f32(kiln_live32(count), {value}, {identity})"),
            DType::F64 => format!("kiln_select_f64(kiln_live64(count), {value}, {identity})"),
            DType::Bool => format!("({value} & kiln_live{}(count))", self.mask * 8),
            _ => format!("kiln_select_i64(kiln_live64(count), {value}, {identity})"),
        }
    }

    /// `dtype` is the result's, `operands` the operands' (they differ in comparisons and conversions).
    pub(super) fn apply(&mut self, op: Operation, dtype: DType, operands: DType, args: &[String]) -> String {
        let x = args[0].as_str();
        let y = args.get(1).map_or("", String::as_str);
        let function = |f: Function, this: &mut Self, w: Width| this.call(f, w, args);
        if let Some(w) = width(operands) {
            let s = suffix(operands);
            let (mask_bytes, infix) = (operands.size(), |symbol: &str| format!("{x} {symbol} {y}"));
            return match op {
                Operation::Add => infix("+"),
                Operation::Sub => infix("-"),
                Operation::Mul => infix("*"),
                Operation::Div => infix("/"),
                Operation::Neg => format!("-{x}"),
                Operation::Abs => format!("kiln_absolute_{s}({x})"),
                Operation::Sqrt => format!("kiln_root_{s}({x})"),
                Operation::Pow => function(Function::Pow, self, w),
                Operation::Maximum => function(Function::Maximum, self, w),
                Operation::Minimum => function(Function::Minimum, self, w),
                Operation::Call(f) => function(f, self, w),
                Operation::Eq => self.own_mask(mask_bytes, infix("==")),
                Operation::Ne => self.own_mask(mask_bytes, infix("!=")),
                Operation::Lt => self.own_mask(mask_bytes, infix("<")),
                Operation::Le => self.own_mask(mask_bytes, infix("<=")),
                Operation::Gt => self.own_mask(mask_bytes, infix(">")),
                Operation::Ge => self.own_mask(mask_bytes, infix(">=")),
                Operation::Where => {
                    let mask = self.mask_for(operands.size(), x);
                    format!("kiln_select_{s}({mask}, {y}, {})", args[2])
                }
                // Floats have no bits: the type rules let none through.
                Operation::Convert
                | Operation::And
                | Operation::Not
                | Operation::BitAnd
                | Operation::BitOr
                | Operation::BitXor
                | Operation::ShiftLeft
                | Operation::ShiftRight => self.convert(operands, dtype, x),
            };
        }
        if operands == DType::I64 {
            let wrapping = |symbol: &str| format!("(i64v)((u64v){x} {symbol} (u64v){y})");
            let compare = |symbol: &str| self.own_mask(8, format!("{x} {symbol} {y}"));
            return match op {
                Operation::Add => wrapping("+"),
                Operation::Sub if planted(Fault::IntegersSubtractedBackwards) => {
                    format!("(i64v)((u64v){y} - (u64v){x})")
                }
                Operation::Sub => wrapping("-"),
                Operation::Mul => wrapping("*"),
                Operation::Neg => format!("(i64v)((u64v){{0}} - (u64v){x})"),
                Operation::Abs => format!("kiln_select_i64({x} < 0, (i64v)((u64v){{0}} - (u64v){x}), {x})"),
                Operation::Maximum => format!("kiln_select_i64({x} > {y}, {x}, {y})"),
                Operation::Minimum => format!("kiln_select_i64({x} < {y}, {x}, {y})"),
                Operation::Pow => format!("kiln_pow_i64({x}, {y})"),
                Operation::BitAnd => format!("({x} & {y})"),
                Operation::BitOr => format!("({x} | {y})"),
                Operation::BitXor => format!("({x} ^ {y})"),
                // All bits leave by a shift of 64 places or of fewer than none.
                Operation::ShiftLeft => {
                    format!(
                        "kiln_select_i64((u64v){y} < 64, (i64v)((u64v){x} << ((u64v){y} & 63)), (i64v){{0}})"
                    )
                }
                Operation::ShiftRight => {
                    format!("({x} >> kiln_select_i64((u64v){y} < 64, {y}, kiln_splat_i64(63)))")
                }
                Operation::Eq => compare("=="),
                Operation::Ne => compare("!="),
                Operation::Lt => compare("<"),
                Operation::Le => compare("<="),
                Operation::Gt => compare(">"),
                Operation::Ge => compare(">="),
                Operation::Where => format!("kiln_select_i64({}, {y}, {})", self.mask_for(8, x), args[2]),
                // Lowering converts operands of real functions to floats first.
                Operation::Div
                | Operation::Call(_)
                | Operation::Sqrt
                | Operation::Convert
                | Operation::And
                | Operation::Not => self.convert(operands, dtype, x),
            };
        }
        match op {
            Operation::Add | Operation::Maximum | Operation::BitOr => format!("({x} | {y})"),
            Operation::Mul | Operation::Minimum | Operation::And | Operation::BitAnd => {
                format!("({x} & {y})")
            }
            Operation::Sub | Operation::Ne | Operation::BitXor => format!("({x} ^ {y})"),
            Operation::Eq => format!("~({x} ^ {y})"),
            Operation::Lt => format!("(~{x} & {y})"),
            Operation::Le => format!("(~{x} | {y})"),
            Operation::Gt => format!("({x} & ~{y})"),
            Operation::Ge => format!("({x} | ~{y})"),
            Operation::Not => format!("~{x}"),
            Operation::Where => format!("(({x} & {y}) | (~{x} & {}))", args[2]),
            Operation::ShiftLeft
            | Operation::ShiftRight
            | Operation::Neg
            | Operation::Abs
            | Operation::Div
            | Operation::Pow
            | Operation::Call(_)
            | Operation::Sqrt
            | Operation::Convert => self.convert(operands, dtype, x),
        }
    }

    fn convert(&self, from: DType, to: DType, x: &str) -> String {
        match (from, to) {
            (a, b) if a == b => x.into(),
            (DType::Bool, DType::I64) if planted(Fault::TrueIsMinusOne) => self.mask_for(8, x),
            (DType::Bool, DType::I64) => format!("({} & 1)", self.mask_for(8, x)),
            (DType::Bool, float) => {
                let s = suffix(float);
                format!(
                    "kiln_select_{s}({}, kiln_splat_{s}(1), kiln_splat_{s}(0))",
                    self.mask_for(float.size(), x)
                )
            }
            (from, DType::Bool) => self.own_mask(from.size(), format!("({x} != 0)")),
            (DType::F32, DType::F64) => format!("kiln_f64_from_f32({x})"),
            (DType::F32 | DType::F64, DType::I64) => format!("kiln_i64_from_{}({x})", suffix(from)),
            (_, to) => format!("__builtin_convertvector({x}, {})", self.ty(to)),
        }
    }

    /// The text that computes an expression, operands under their names. May need statements before it.
    pub(super) fn expression(&mut self, id: ExprId, before: &mut String, indent: &str) -> String {
        let kernel = self.kernel;
        let dtype = kernel.exprs[id].dtype;
        match &kernel.exprs[id].kind {
            ExprKind::Scalar(s) => match dtype {
                DType::F32 => format!("kiln_splat_f32((float)kiln_number(scalars[{s}]))"),
                DType::F64 => format!("kiln_splat_f64(kiln_number(scalars[{s}]))"),
                DType::Bool => self.splat(DType::Bool, &format!("scalars[{s}] != 0")),
                _ => format!("kiln_splat_i64((long long)scalars[{s}])"),
            },
            ExprKind::Literal(number) => self.splat(dtype, &number.to_string()),
            ExprKind::Load { buffer, index } => self.load(id, *buffer, index, before, indent),
            ExprKind::Narrow(dtype @ (DType::F16 | DType::BF16), arg) => {
                self.half(id, *dtype, &format!("kiln_shorten_{dtype}(v{arg})"), before, indent)
            }
            ExprKind::Narrow(dtype, arg) => wrapped(*dtype, &format!("v{arg}")),
            ExprKind::Position(index) => self.position(id, index, before, indent),
            ExprKind::Apply(op, args) => {
                let operands = match op {
                    Operation::Where => kernel.exprs[args[1]].dtype,
                    _ => kernel.exprs[args[0]].dtype,
                };
                let names: Vec<String> = args.iter().map(|a| format!("v{a}")).collect();
                let text = self.apply(*op, dtype, operands, &names);
                if *op == Operation::Pow && dtype.is_float() && self.levels[args[1]] == Level::Call {
                    return self.power(id, [args[0], args[1]], &text, before, indent);
                }
                text
            }
            ExprKind::Reduce(..) | ExprKind::Fold(..) => format!("v{id}"),
            ExprKind::Scan(scan, arg) => self.scan(id, *scan, *arg, before, indent),
            ExprKind::Bounded { value, size, code } => {
                let size = self.stride(id, usize::MAX, size);
                let name = format!("x{id}");
                // Another kernel reports it.
                let report = if *code == 0 { String::new() } else { format!(" *status = {code};") };
                if !self.lane_varies[id] {
                    before.push_str(&format!(
                        "{indent}long long {name} = v{value}[0];\n{indent}if ((unsigned long){name} >= (unsigned long){size}) {{ {name} = 0;{report} }}\n"
                    ));
                    return format!("kiln_splat_i64({name})");
                }
                before.push_str(&format!(
                    "{indent}i64v {name} = v{value};\n{indent}if (kiln_outside({name}, {size}, count)) {{\n{indent}for (long l = 0; l < count; l++) if ((unsigned long){name}[l] >= (unsigned long){size}) {{ {name}[l] = 0;{report} }}\n{indent}}}\n"
                ));
                name
            }
        }
    }

    /// A power with one exponent for all elements: the usual ones are had for less, bit for bit.
    fn power(
        &mut self,
        id: ExprId,
        [x, y]: [ExprId; 2],
        text: &str,
        before: &mut String,
        indent: &str,
    ) -> String {
        let dtype = self.kernel.exprs[id].dtype;
        let (ty, scalar, s) = (self.ty(dtype), memory_type(dtype), suffix(dtype));
        let _ = write!(
            before,
            "{indent}{ty} x{id};
{indent}{{
{indent}const {scalar} exponent = v{y}[0];
{indent}if (exponent == 2) x{id} = v{x} * v{x};
{indent}else if (exponent == 1) x{id} = v{x};
{indent}else if (exponent == 0) x{id} = kiln_splat_{s}(1);
{indent}else if (exponent == -1) x{id} = 1 / v{x};
{indent}else x{id} = {text};
{indent}}}
"
        );
        format!("x{id}")
    }

    fn position(&mut self, id: ExprId, index: &'k Index, before: &mut String, indent: &str) -> String {
        let constant = self.stride(id, usize::MAX, &index.constant);
        let (suffix, ty, cast) = match self.kernel.exprs[id].dtype {
            DType::F32 => ("f32", "f32v", "(float)"),
            _ => ("i64", "i64v", ""),
        };
        if !self.lane_varies[id] {
            let text = self.index_text(id, index, None, &|_, _| true);
            return format!("kiln_splat_{suffix}({text} + {constant})");
        }
        let vector = self.kernel.vector_axis();
        let plain = index.terms.iter().all(|(t, _)| matches!(t, Term::Axis(_)));
        if plain {
            let text = self.index_text(id, index, None, &|_, _| true);
            let along = index.terms.iter().position(|(t, factor)| *t == Term::Axis(vector) && *factor != 1);
            let step = along.map(|t| format!(" * {cast}{}", self.stride(id, t, &index.terms[t].1)));
            return format!("kiln_iota_{suffix}(){} + {cast}({text} + {constant})", step.unwrap_or_default());
        }
        if suffix == "f32"
            && let Some((inner, by, factor)) = index.divided(vector)
        {
            let (first, by) = (self.inner_index(inner, None), self.inner_number(by));
            let factor = self.stride(id, 0, factor);
            return format!("kiln_quotient_f32({first}, {by}) * (float){factor} + (float){constant}");
        }
        let lanes: Vec<String> = (0..self.lanes)
            .map(|lane| {
                let text = self.index_text(id, index, Some(&lane.to_string()), &|_, _| true);
                format!("{text} + {constant}")
            })
            .collect();
        let name = format!("x{id}");
        before.push_str(&format!("{indent}const {ty} {name} = {{{}}};\n", lanes.join(", ")));
        name
    }

    /// The scans among these expressions.
    pub(super) fn scans(&self, ids: &[ExprId]) -> Vec<(ExprId, Scan)> {
        let scan = |&id: &ExprId| match self.kernel.exprs[id].kind {
            ExprKind::Scan(scan, _) => Some((id, scan)),
            _ => None,
        };
        ids.iter().filter_map(scan).collect()
    }

    /// What a scan begins with, in every column.
    pub(super) fn scan_start(&self, scan: Scan, dtype: DType) -> String {
        self.splat(dtype, &scan.start().to_string())
    }

    /// One step of a scan. What it carries along is `*s`: a vector with a lane for each column, or, along rows, a
    /// number that goes from lane to lane.
    fn scan(&mut self, id: ExprId, scan: Scan, arg: ExprId, before: &mut String, indent: &str) -> String {
        let dtype = self.kernel.exprs[id].dtype;
        let operation = match scan {
            Scan::Sum => Operation::Add,
            Scan::Product => Operation::Mul,
        };
        if self.kernel.mode == Mode::Columns {
            let next = self.apply(operation, dtype, dtype, &[format!("*s{id}"), format!("v{arg}")]);
            let end = if planted(Fault::MissingSemicolon) { "" } else { ";" };
            before.push_str(&format!("{indent}*s{id} = {next}{end}\n"));
            return format!("*s{id}");
        }
        let symbol = if scan == Scan::Sum { "+" } else { "*" };
        let next = |carried: &str, lane: &str| {
            if dtype.is_float() {
                format!("{carried} {symbol} v{arg}[{lane}]")
            } else {
                format!(
                    "(long long)((unsigned long long){carried} {symbol} (unsigned long long)v{arg}[{lane}])"
                )
            }
        };
        let (ty, scalar, lanes) = (self.ty(dtype), memory_type(dtype), self.lanes);
        // A whole vector is put together in registers.
        let carried = |lane: usize| if lane == 0 { format!("*s{id}") } else { format!("e{}", lane - 1) };
        let steps: Vec<String> =
            (0..lanes).map(|lane| format!("e{lane} = {}", next(&carried(lane), &lane.to_string()))).collect();
        let all: Vec<String> = (1..=lanes).map(carried).collect();
        let (steps, all, last, each) =
            (steps.join(", "), all.join(", "), carried(lanes), next("carried", "l"));
        let _ = write!(
            before,
            "{indent}{ty} x{id} = v{arg};
{indent}if (count == KILN_LANES) {{ const {scalar} {steps}; x{id} = ({ty}){{{all}}}; *s{id} = {last}; }}
{indent}else {{ {scalar} carried = *s{id}; for (long l = 0; l < count; l++) x{id}[l] = carried = {each}; *s{id} = carried; }}
"
        );
        format!("x{id}")
    }
}
