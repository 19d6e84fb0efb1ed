//! Decomposition: a functional graph becomes one of prims only, whose operands all have the dtype in which
//! the op computes and the result's shape.
//!
//! ```text
//! %2 = add(%0, %1) : f32[4, 3]          ; f32[4, 3] and i64[3]
//! ```
//! becomes
//! ```text
//! %2 = to(%1) {dtype: f32} : f32[3]
//! %3 = expand(%2) {shape: [4, 3]} : f32[4, 3]
//! %4 = add(%0, %3) : f32[4, 3]
//! ```
//!
//! Numbers stay numbers: whoever lowers the op converts them to the tensors' dtype. The condition of `where`
//! is broadcast but not converted. An op over lists stays one node; where its elements need different
//! conversions, a list of converted elements takes the operand's place.
//!
//! Halves are computed in f32 and rounded where they are stored, and at the end of every op that is made of others;
//! with [`Rounding::Ops`] they are rounded where eager mode rounds them, by conversions that stand in the graph:
//! ```text
//! %1 = sigmoid(%0) : f16[4]             %1 = to(%0) {dtype: f32} : f32[4]
//! %2 = mul(%0, %1) : f16[4]       →     %2 = sigmoid(%1) : f32[4]
//!                                       %3 = to(%2) {dtype: f16} : f16[4]
//!                                       …
//! ```

use kiln_ir::{
    Class, DType, Emit, EmitExt, Eval, Fault, Graph, Op, Result, Shape, TensorTy, Ty, Value, Values,
    element_by_element, planted, result_dtype,
};
use smallvec::{SmallVec, smallvec};

/// Where results of half precision are rounded.
#[derive(Copy, Clone, Debug, Default)]
pub enum Rounding {
    /// Where they are stored or converted: chains of ops are quicker, and more exact than op by op.
    #[default]
    Stored,
    /// After every op, as in eager mode.
    Ops,
}

/// Lowers every op to prims.
pub fn decompose(graph: &Graph) -> Result<Graph> {
    decompose_rounding(graph, Rounding::Stored)
}

/// [`decompose`] with halves rounded as told.
pub fn decompose_rounding(graph: &Graph, rounding: Rounding) -> Result<Graph> {
    let (room, mut map) = Graph::with_inputs_of(graph);
    let mut lowering = Lowering { graph: room, rounding };
    for node in &graph.nodes {
        lowering.graph.loc = node.loc;
        let args: SmallVec<[Value; 4]> = node.args.iter().map(|v| map[v.index()]).collect();
        let outs = lowering.emit(node.op.clone(), &args)?;
        node.outs.iter().zip(outs).for_each(|(from, to)| map[from.index()] = to);
    }
    let mut result = lowering.graph;
    result.outputs = graph.outputs.iter().map(|v| map[v.index()]).collect();
    result.writes = graph.writes.iter().map(|w| w.renumbered(&map)).collect();
    Ok(result)
}

/// An emitter that lowers whatever it is given, what decompositions emit included.
struct Lowering {
    graph: Graph,
    /// As told, but inside an op halves are not rounded.
    rounding: Rounding,
}

impl Emit for Lowering {
    fn emit(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        match self.rounding {
            // Composites that are library calls round by themselves.
            Rounding::Ops
                if op.computes() && (op.row().class != Class::Composite || op.row().decompose.is_some()) =>
            {
                self.rounded_once(op, args)
            }
            Rounding::Ops | Rounding::Stored => self.lower(op, args),
        }
    }

    fn ty(&self, value: Value) -> &Ty {
        self.graph.ty(value)
    }
}

impl Lowering {
    /// An op whose halves are widened first and rounded once, at its end.
    fn rounded_once(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        let tys: SmallVec<[Ty; 4]> = args.iter().map(|&v| self.ty(v).clone()).collect();
        let out = op.infer(&tys).map_err(|why| op.error(&tys, why, self.graph.loc))?[0].clone();
        let mut halves = tys.iter().chain([&out]).flat_map(dtypes).filter(|&dtype| is_half(dtype));
        let Some(half) = halves.next() else { return self.lower(op, args) };
        if let Ty::List(_) = out
            && tys.iter().chain([&out]).flat_map(dtypes).any(|dtype| dtype != half)
        {
            return element_by_element(self, &op, args);
        }
        // Promotion comes before widening: a tensor that becomes a half is rounded to it.
        let mut widened = self.conform(&op, args, &tys, &out, Extent::Any)?;
        for value in &mut widened {
            if dtypes(self.ty(*value)).any(is_half) {
                *value = self.to(*value, DType::F32)?;
            }
        }
        let told = std::mem::take(&mut self.rounding);
        let values = self.lower(op, &widened);
        self.rounding = told;
        let mut values = values?;
        if dtypes(&out).any(is_half) {
            values[0] = self.graph.emit(Op::To { dtype: half_of(&out, half) }, &values[..1])?[0];
        }
        Ok(values)
    }

    fn lower(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        let outs = self.graph.infer(&op, args)?;
        if let Op::List {} = op {
            let loc = self.graph.loc;
            return Ok(self.graph.push(op, args, outs, false, loc));
        }
        let tys: SmallVec<[Ty; 4]> = args.iter().map(|&v| self.ty(v).clone()).collect();
        let lists = tys.iter().any(|ty| ty.as_list().is_some());
        match op.row().decompose {
            Some(_) if lists && matches!(op, Op::Copy {}) => self.copy_lists(&op, args, &outs[0]),
            Some(_) if !op.is_prim(&tys) => {
                // Promotion looks at all operands at once, the steps of a decomposition at two at a time.
                let conformed = self.conform(&op, args, &tys, &outs[0], Extent::Any)?;
                let mut values = op.decompose(self, &conformed)?.unwrap_or_default();
                // Steps that name a dtype name that of a list's first element.
                if lists && *self.ty(values[0]) != outs[0] {
                    return element_by_element(self, &op, args);
                }
                // The steps of numbers alone know less about the result's kind than the op.
                if let Ty::Scalar(kind) = outs[0]
                    && *self.ty(values[0]) != outs[0]
                {
                    values = self.emit(Op::To { dtype: kind.dtype() }, &values[..1])?;
                }
                Ok(values)
            }
            _ => {
                let conformed = self.conform(&op, args, &tys, &outs[0], Extent::Result)?;
                if conformed.as_slice() != args {
                    return self.graph.emit(op, &conformed);
                }
                let loc = self.graph.loc;
                Ok(self.graph.push(op, args, outs, false, loc))
            }
        }
    }

    /// The operands with promotion and, if asked for, broadcasting made explicit.
    fn conform(
        &mut self,
        op: &Op,
        args: &[Value],
        tys: &[Ty],
        out: &Ty,
        extent: Extent,
    ) -> Result<SmallVec<[Value; 4]>> {
        let mut args: SmallVec<[Value; 4]> = args.into();
        match (op.row().class, out) {
            (Class::Pointwise, Ty::Tensor(out)) if !matches!(op, Op::To { .. }) => {
                let dtype = compute_dtype(op, tys, out);
                for (i, arg) in args.iter_mut().enumerate() {
                    *arg = self.fit(*arg, &target(op, i, dtype, out, extent))?;
                }
            }
            // The usual list: every element is computed in its own dtype and shape.
            (Class::Pointwise, Ty::List(outs))
                if !matches!(op.row().eval, Eval::Compare { .. })
                    && tys.iter().all(|ty| match ty {
                        Ty::List(items) => items == outs,
                        Ty::Scalar(_) => true,
                        Ty::Tensor(_) => false,
                    }) => {}
            (Class::Pointwise, Ty::List(outs)) if !matches!(op, Op::To { .. }) => {
                let dtypes: Vec<DType> = outs
                    .iter()
                    .enumerate()
                    .map(|(n, out)| compute_dtype(op, &element(tys, n), out))
                    .collect();
                for (i, arg) in args.iter_mut().enumerate() {
                    let targets: Vec<Target> = outs
                        .iter()
                        .zip(&dtypes)
                        .map(|(out, &dtype)| target(op, i, dtype, out, extent))
                        .collect();
                    *arg = self.fit_list(*arg, &targets)?;
                }
            }
            // Joined tensors are of one dtype.
            (_, Ty::Tensor(out)) if matches!(op, Op::Cat { .. }) => {
                for arg in &mut args {
                    if self.tensor_ty(*arg).dtype != out.dtype {
                        *arg = self.to(*arg, out.dtype)?;
                    }
                }
            }
            _ => {}
        }
        Ok(args)
    }

    /// A tensor converted (first, while it is small) and repeated; numbers stay as they are.
    fn fit(&mut self, value: Value, target: &Target) -> Result<Value> {
        let Ty::Tensor(have) = self.ty(value).clone() else { return Ok(value) };
        let value = match target.dtype {
            Some(dtype) if have.dtype != dtype => self.to(value, dtype)?,
            _ => value,
        };
        match target.shape {
            Some(shape) if have.shape != *shape => self.expand(value, shape.clone()),
            _ => Ok(value),
        }
    }

    /// A list whose elements fit the targets.
    fn fit_list(&mut self, value: Value, targets: &[Target]) -> Result<Value> {
        let items = match self.ty(value).clone() {
            Ty::Scalar(_) => return Ok(value),
            Ty::List(items) => items,
            Ty::Tensor(_) if targets.iter().all(|t| t.shape.is_none() && *t == targets[0]) => {
                return targets.first().map_or(Ok(value), |target| self.fit(value, target));
            }
            Ty::Tensor(_) => {
                let fitted: Vec<Value> = targets.iter().map(|t| self.fit(value, t)).collect::<Result<_>>()?;
                return self.list(&fitted);
            }
        };
        let converted =
            |(have, target): (&TensorTy, &Target)| target.dtype.filter(|&dtype| dtype != have.dtype);
        let conversions: Vec<Option<DType>> = items.iter().zip(targets).map(converted).collect();
        let same_shapes = items
            .iter()
            .zip(targets)
            .all(|(have, target)| target.shape.is_none_or(|shape| have.shape == *shape));
        match conversions.first() {
            _ if !same_shapes => {}
            None => return Ok(value),
            Some(first) if conversions.iter().any(|c| c != first) => {}
            Some(None) => return Ok(value),
            Some(Some(dtype)) => return self.to(value, *dtype),
        }
        let mut fitted = Vec::with_capacity(items.len());
        for (n, target) in targets.iter().enumerate() {
            let item = self.list_get(value, n)?;
            fitted.push(self.fit(item, target)?);
        }
        self.list(&fitted)
    }

    /// `copy` over lists: its decomposition looks at one tensor's type, so it is said here.
    fn copy_lists(&mut self, op: &Op, args: &[Value], out: &Ty) -> Result<Values> {
        match out {
            Ty::List(outs) if !self.ty(args[1]).is_scalar() => {
                let targets: Vec<Target> = outs
                    .iter()
                    .map(|like| Target { dtype: Some(like.dtype), shape: Some(&like.shape) })
                    .collect();
                Ok(smallvec![self.fit_list(args[1], &targets)?])
            }
            _ => element_by_element(self, op, args),
        }
    }
}

/// The dtypes of a value's tensors.
fn dtypes(ty: &Ty) -> impl Iterator<Item = DType> + '_ {
    let (one, many) = match ty {
        Ty::Tensor(t) => (Some(t.dtype), None),
        Ty::List(items) => (None, Some(items)),
        Ty::Scalar(_) => (None, None),
    };
    one.into_iter().chain(many.into_iter().flat_map(|items| items.iter().map(|t| t.dtype)))
}

fn is_half(dtype: DType) -> bool {
    dtype.is_narrow() && dtype.is_float()
}

/// The half in which a result is; of a list all elements have the same.
fn half_of(out: &Ty, half: DType) -> DType {
    dtypes(out).next().unwrap_or(half)
}

/// Whether operands are repeated to the result's shape.
#[derive(Copy, Clone)]
enum Extent {
    Any,
    Result,
}

/// What an operand has to become; `None` where anything will do.
#[derive(PartialEq)]
struct Target<'a> {
    dtype: Option<DType>,
    shape: Option<&'a Shape>,
}

fn target<'a>(op: &Op, operand: usize, dtype: DType, out: &'a TensorTy, extent: Extent) -> Target<'a> {
    let is_condition = matches!(op, Op::Where {}) && operand == 0;
    let shape = match extent {
        Extent::Any => None,
        Extent::Result => Some(&out.shape),
    };
    Target { dtype: (!is_condition).then_some(dtype), shape }
}

/// The dtype in which a pointwise op computes: the result's, except that comparisons give truth values.
fn compute_dtype(op: &Op, args: &[Ty], out: &TensorTy) -> DType {
    match op.row().eval {
        Eval::Compare { .. } if planted(Fault::ComparedAsIntegers) => result_dtype(&args[..1]),
        Eval::Compare { .. } => result_dtype(args),
        _ => out.dtype,
    }
}

/// The operands' types for element `n` of an op over lists.
fn element(tys: &[Ty], n: usize) -> SmallVec<[Ty; 4]> {
    tys.iter()
        .map(|ty| match ty {
            Ty::List(items) => Ty::Tensor(items[n].clone()),
            other => other.clone(),
        })
        .collect()
}
