//! Scatters as loops: elements that are put, or added, where an index says.
//!
//! ```text
//! %3 = index_add(%0, %1, %2) {dim: 0}      →      store b3[i0*64 + i1] <- %0           (a kernel before)
//!
//!                                                 %0 = load b1[i1]                     (i0: outer, i1: inner)
//!                                                 %1 = bounded(%0, 1000, 1)
//!                                                 %2 = load b2[i0 + i1*64]
//!                                                 store b3[i0 + %1<1000*64] += %2
//! ```
//!
//! What surrounds the elements is put into the result first, and they go there by a kernel that computes them and
//! their index on the way. The dim along which they go is an inner one, gone through in order; items differ in the
//! other dims, so they never meet, and sums are taken in eager's order. Halves are added up in single precision
//! and rounded once, like there.
//!
//! With one index a line (the gradient of a pick) it is no scatter but a choice, element by element, which is computed
//! wherever the result is needed:
//!
//! ```text
//! %2 = gather_backward(%0, %1)      →      %2 = where(position == %1, %0 + 0, 0)
//! ```
//!
//! What goes to a window (`slice_add`) has its place before anything runs: elements never meet, nothing is checked, and
//! no order is kept. A chain of such sums lies in one buffer, so that every part costs what it holds.
//!
//! Many elements in few columns would leave threads without work, and stay with the library; so does what goes into an
//! input that is written back (`windows`), where nothing may be changed before all indices are checked.

use std::borrow::Cow;

use kiln_ir::{
    Class, DType, Def, Fault, Graph, Node, Op, Scalar, ScalarKind, Shape, TensorTy, Ty, Value, planted,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::fuse::live_nodes;
use crate::lower::{Lowering, Space, Stop, apart, is_library};
use crate::rewrite::windows::into_inputs;
use crate::{Layout, WhyNot};
use kiln_plan::index::{Index, Term};
use kiln_plan::loops::ExprKind;
use kiln_plan::signature;
use kiln_prims::forms::replace;

/// Of so many elements a second thread is worth its start.
const LARGE: usize = 2 * signature::CHUNK as usize;
/// With fewer pieces than this threads would be without work.
const FEWEST_PIECES: usize = 4;
/// Columns of a piece.
const COLUMNS: usize = 64;

/// Where the elements of a value go.
#[derive(Clone, Debug)]
pub(crate) struct Scatter {
    /// What they are put into.
    of: Value,
    dim: usize,
    to: To,
    /// The size that indices must be below.
    size: i64,
    pub adds: bool,
    /// Whether another step checks the same indices.
    is_checked: bool,
}

/// To which places along a dim.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum To {
    /// What an index says.
    Index(Value),
    /// `start`, `start + step`, …
    Window { start: usize, step: usize },
}

/// The scatters of a graph that are loops.
#[derive(Clone, Default, Debug)]
pub(crate) struct Scatters {
    /// By the value that is scattered.
    by_value: FxHashMap<Value, Scatter>,
    /// Their results.
    results: FxHashSet<Value>,
    /// Values that nobody needs but as the surroundings of a scatter, made by a library step: it puts them there.
    bases: FxHashMap<Value, Value>,
    /// By such a value, the last of the scatters that it is put into one after the other.
    lasts: FxHashMap<Value, Value>,
}

/// A scatter: what surrounds the elements (zeros, if there is nothing), their places, the elements.
struct Call {
    base: Option<Value>,
    to: To,
    src: Value,
    dim: usize,
    adds: bool,
}

impl Call {
    fn of(node: &Node) -> Option<Call> {
        let (dim, adds) = match node.op {
            Op::IndexAdd { dim } | Op::ScatterAdd { dim } => (dim, true),
            Op::IndexCopy { dim } | Op::Scatter { dim } => (dim, false),
            Op::GatherBackward { dim, .. } => {
                let [src, index] = node.args[..] else { return None };
                return Some(Call { base: None, to: To::Index(index), src, dim, adds: true });
            }
            Op::SliceAdd { dim, start, step, .. } => {
                let [base, src] = node.args[..] else { return None };
                return Some(Call { base: Some(base), to: To::Window { start, step }, src, dim, adds: true });
            }
            _ => return None,
        };
        let [base, index, src] = node.args[..] else { return None };
        Some(Call { base: Some(base), to: To::Index(index), src, dim, adds })
    }

    /// Whether its places are sure to be inside.
    fn is_checked(&self, graph: &Graph, known: &FxHashSet<(Value, usize)>, size: usize) -> bool {
        match self.to {
            To::Index(index) => known.contains(&(bare(graph, index), size)),
            To::Window { .. } => true,
        }
    }

    /// How its result is had, or why it is a library's.
    fn form(&self, graph: &Graph, node: &Node) -> Result<Form, &'static str> {
        let shape = |value: Value| graph.tensor_of(value).shape.clone();
        let (from, to) = (shape(self.src), shape(node.outs[0]));
        let dtype = graph.ty(node.outs[0]).as_tensor().map_or(DType::F32, |ty| ty.dtype);
        let others = (0..to.rank()).filter(|&d| d != self.dim);
        if to.rank() == 0 || from.numel() == 0 || to.numel() == 0 {
            return Err("it has no elements, or no dims");
        }
        if let To::Window { .. } = self.to {
            return if dtype == DType::Bool { Err(TRUTHS) } else { Ok(Form::Loops) };
        }
        let lines_fit = others.clone().all(|d| from[d] == to[d]);
        if from[self.dim] == 1 {
            return if lines_fit { Ok(Form::Choice) } else { Err("it has one index for some of the lines") };
        }
        let (rows, columns): (usize, usize) =
            (from[..self.dim].iter().product(), from[self.dim + 1..].iter().product());
        let has_few = from.numel() >= LARGE && rows * columns.div_ceil(COLUMNS) < FEWEST_PIECES;
        if has_few || Space::of(&from, &[self.dim]).is_tall() {
            return Err("its columns are too few for threads to share");
        }
        match (self.adds, dtype) {
            (true, DType::Bool) => Err(TRUTHS),
            (true, DType::F16 | DType::BF16) => Ok(Form::Wide),
            _ => Ok(Form::Loops),
        }
    }
}

const TRUTHS: &str = "truth values are added up as integers";

/// How the result of a scatter is had.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Form {
    /// By a choice for every element.
    Choice,
    /// By a scatter in single precision, rounded.
    Wide,
    /// By a scatter in loops.
    Loops,
}

/// The value behind views that leave out no element.
fn bare(graph: &Graph, mut value: Value) -> Value {
    while let Some(node) = graph.producer(value)
        && let Op::Reshape { .. } | Op::Expand { .. } = node.op
    {
        value = node.args[0];
    }
    value
}

/// By value, whether all of its elements are computed for certain: somebody needs it as a whole, and not a slice of it.
fn computed_whole(graph: &Graph) -> Vec<bool> {
    let mut whole = vec![false; graph.value_count()];
    let leaving = graph.outputs.iter().chain(graph.writes.iter().map(|write| &write.value));
    leaving.for_each(|value| whole[value.index()] = true);
    for (node, live) in graph.nodes.iter().zip(live_nodes(graph)).rev() {
        let of = node.outs[0];
        let has_elements = graph.ty(of).as_tensor().is_some_and(|ty| ty.shape.numel() > 0);
        let is_step = live && is_library(graph, node) && Call::of(node).is_none();
        let is_needed = whole[of.index()] && has_elements;
        if !is_step && !is_needed {
            continue;
        }
        let read = match node.op {
            Op::Gather { .. } | Op::SliceScatter { .. } => &node.args[1..],
            Op::Reshape { .. } | Op::Expand { .. } | Op::Permute { .. } | Op::Flip { .. } => &node.args[..],
            Op::Sum { .. } | Op::Amax { .. } | Op::Cumsum { .. } | Op::Cumprod { .. } => &node.args[..],
            Op::Cat { .. } => &node.args[..],
            ref op if is_step || op.row().class == Class::Pointwise || Call::of(node).is_some() => {
                &node.args[..]
            }
            _ => continue,
        };
        read.iter().for_each(|arg| whole[arg.index()] = true);
    }
    whole
}

/// What is gathered by for certain: an index, and the size it is checked against.
fn checks(graph: &Graph) -> FxHashSet<(Value, usize)> {
    let whole = computed_whole(graph);
    let check = |node: &Node| match node.op {
        Op::Gather { dim } if whole[node.outs[0].index()] => {
            let size = *graph.ty(node.args[0]).as_tensor()?.shape.get(dim)?;
            let some = graph.ty(node.outs[0]).as_tensor()?.shape.numel() > 0;
            some.then(|| (bare(graph, node.args[1]), size))
        }
        _ => None,
    };
    graph.nodes.iter().filter_map(check).collect()
}

/// Makes choices of the scatters that are some, and values of their own of what others scatter.
pub(crate) fn take_apart<'g>(graph: Cow<'g, Graph>, layouts: &[Layout]) -> Cow<'g, Graph> {
    if !graph.nodes.iter().any(|node| Call::of(node).is_some()) {
        return graph;
    }
    let windows = into_inputs(&graph, layouts);
    let (known, whole) = (checks(&graph), computed_whole(&graph));
    let found = |node: &Node| {
        let call = Call::of(node).filter(|_| !windows.contains_key(&node.outs[0]))?;
        let form = call.form(&graph, node).ok()?;
        let to = graph.ty(node.outs[0]).as_tensor()?;
        let is_checked = call.is_checked(&graph, &known, to.shape[call.dim]);
        // Of choices of which only a part is needed, only that part's indices would be checked.
        if form == Form::Choice && !is_checked && !whole[node.outs[0].index()] {
            return None;
        }
        Some((call, form, is_checked))
    };
    let emit =
        |result: &mut Graph, node: &Node, args: &[Value], (call, form, is_checked): (Call, Form, bool)| {
            let at = |value: Value| node.args.iter().position(|&arg| arg == value).map_or(value, |a| args[a]);
            let to = match call.to {
                To::Index(index) => To::Index(at(index)),
                window => window,
            };
            let call = Call { base: call.base.map(at), to, src: at(call.src), ..call };
            let mut rewrite = Rewrite { ty: graph.tensor_of(node.outs[0]).clone(), graph: result, node };
            match form {
                Form::Choice => match call.to {
                    To::Index(index) => rewrite.choice(&call, index, is_checked),
                    To::Window { .. } => rewrite.set_apart(&call, false),
                },
                Form::Wide => rewrite.set_apart(&call, true),
                Form::Loops => rewrite.set_apart(&call, false),
            }
        };
    let replaced = replace(&graph, found, emit);
    replaced.map_or(graph, Cow::Owned)
}

/// Nodes in place of a scatter.
struct Rewrite<'a> {
    graph: &'a mut Graph,
    node: &'a Node,
    /// The result's type.
    ty: TensorTy,
}

impl Rewrite<'_> {
    fn push(&mut self, op: Op, args: &[Value], ty: Ty) -> Value {
        self.graph.push(op, args, [ty], false, self.node.loc)[0]
    }

    fn result(&self) -> TensorTy {
        self.ty.clone()
    }

    /// A tensor's type beside the result.
    fn of(&self, dtype: DType, shape: &Shape) -> Ty {
        Ty::Tensor(TensorTy { dtype, shape: shape.clone(), ..self.result() })
    }

    fn number(&mut self, value: Scalar) -> Value {
        let kind = if matches!(value, Scalar::Float(_)) { ScalarKind::Float } else { ScalarKind::Int };
        self.push(Op::Constant { value }, &[], Ty::Scalar(kind))
    }

    fn zero(&mut self) -> Value {
        let is_float = self.result().dtype.is_float();
        self.number(if is_float { Scalar::Float(0.0) } else { Scalar::Int(0) })
    }

    /// A value of this shape, seen as one of the result's.
    fn spread(&mut self, value: Value, dtype: DType, line: &Shape) -> Value {
        let shape = self.result().shape;
        let ty = self.of(dtype, line);
        let value = self.push(Op::Reshape { shape: line.clone() }, &[value], ty);
        let ty = self.of(dtype, &shape);
        self.push(Op::Expand { shape }, &[value], ty)
    }

    /// The numbers of a dim.
    fn positions(&mut self, count: usize) -> Value {
        let (start, step) = (self.number(Scalar::Int(0)), self.number(Scalar::Int(1)));
        let op = Op::Arange { len: count, dtype: DType::I64, device: self.result().device };
        let ty = self.of(DType::I64, &Shape::from([count]));
        self.push(op, &[start, step], ty)
    }

    /// `where(position == index, base + src, base)`
    fn choice(&mut self, call: &Call, mut index: Value, is_checked: bool) -> Value {
        let TensorTy { dtype, shape, .. } = self.result();
        let size = shape[call.dim];
        let (mut once, mut line) = (shape.clone(), shape.clone());
        once[call.dim] = 1;
        (0..shape.rank()).filter(|&d| d != call.dim).for_each(|d| line[d] = 1);
        let is_slice = matches!(self.node.op, Op::IndexAdd { .. } | Op::IndexCopy { .. });
        let own: Shape = if is_slice { shape.iter().map(|_| 1).collect() } else { once };
        if !is_checked {
            // What is gathered from 0, 1, … is the index itself.
            let flat = Shape::from([own.numel()]);
            let all = self.positions(size);
            let ty = self.of(DType::I64, &flat);
            index = self.push(Op::Reshape { shape: flat }, &[index], ty.clone());
            index = self.push(Op::Gather { dim: 0 }, &[all, index], ty);
        }
        let index = self.spread(index, DType::I64, &own);
        let all = self.positions(size);
        let position = self.spread(all, DType::I64, &line);
        let ty = self.of(dtype, &shape);
        let src = self.push(Op::Expand { shape: shape.clone() }, &[call.src], ty.clone());
        let mask = self.of(DType::Bool, &shape);
        let is_there = self.push(Op::Eq {}, &[position, index], mask);
        let base = match call.base {
            Some(base) => base,
            None => self.zero(),
        };
        let adds = call.adds && !planted(Fault::ScatterForgetsBase);
        let new = if adds { self.push(Op::Add {}, &[src, base], ty.clone()) } else { src };
        self.push(Op::Where {}, &[is_there, new, base], ty)
    }

    /// A scatter of a value that nobody else has.
    fn set_apart(&mut self, call: &Call, is_wide: bool) -> Value {
        let TensorTy { dtype, shape, device } = self.result();
        let wide = if is_wide { DType::F32 } else { dtype };
        let whole = self.of(wide, &shape);
        let from = self.graph.tensor_of(call.src).shape.clone();
        let base = match call.base {
            Some(base) if is_wide => self.push(Op::To { dtype: wide }, &[base], whole.clone()),
            Some(base) => base,
            None => {
                let zero = self.zero();
                self.push(Op::Full { shape: shape.clone(), dtype: wide, device }, &[zero], whole.clone())
            }
        };
        let ty = self.of(wide, &from);
        let src = self.push(Op::To { dtype: wide }, &[call.src], ty);
        let op = match self.node.op {
            Op::GatherBackward { dim, .. } => Op::ScatterAdd { dim },
            ref op => op.clone(),
        };
        let made = match call.to {
            To::Index(index) => self.push(op, &[base, index, src], whole),
            To::Window { .. } => self.push(op, &[base, src], whole),
        };
        if is_wide {
            let ty = self.of(dtype, &shape);
            self.push(Op::To { dtype }, &[made], ty)
        } else {
            made
        }
    }
}

impl Scatters {
    /// The scatters of a graph whose elements are values of their own ([`take_apart`]), and why others are not loops.
    /// What goes into an input is none.
    pub fn find(graph: &Graph, windows: &FxHashMap<Value, usize>) -> (Scatters, Vec<WhyNot>) {
        let (mut found, mut why_not) = (Scatters::default(), Vec::new());
        if !graph.nodes.iter().any(|node| Call::of(node).is_some()) {
            return (found, why_not);
        }
        let mut uses = vec![0usize; graph.value_count()];
        let leaving = graph.outputs.iter().chain(graph.writes.iter().map(|write| &write.value));
        graph.nodes.iter().flat_map(|node| &node.args).chain(leaving).for_each(|v| uses[v.index()] += 1);
        let known = checks(graph);
        for node in &graph.nodes {
            let of = node.outs[0];
            let Some(call) = Call::of(node) else { continue };
            match call.form(graph, node) {
                Ok(Form::Loops) => {}
                Ok(Form::Choice | Form::Wide) => continue,
                Err(reason) => {
                    why_not.push(WhyNot::Scatter { value: of, reason });
                    continue;
                }
            }
            let is_own = uses[call.src.index()] == 1
                && graph.producer(call.src).is_some_and(|from| matches!(from.op, Op::To { .. }));
            let (Some(base), Some(ty)) = (call.base, graph.ty(of).as_tensor()) else { continue };
            if !is_own || windows.contains_key(&of) {
                continue;
            }
            let size = ty.shape[call.dim];
            let is_checked = call.is_checked(graph, &known, size);
            let Call { to, src, dim, adds, .. } = call;
            found.by_value.insert(src, Scatter { of, dim, to, size: size as i64, adds, is_checked });
            let is_made = graph.producer(base).is_some_and(|from| {
                is_library(graph, from) || matches!(from.op, Op::Cat { .. } | Op::SliceScatter { .. })
            });
            if is_made && uses[base.index()] == 1 {
                found.bases.insert(base, of);
            }
            found.results.insert(of);
        }
        // From the end of each chain.
        let mut bases: Vec<(Value, Value)> = found.bases.iter().map(|(&base, &of)| (base, of)).collect();
        bases.sort_unstable_by_key(|&(base, _)| std::cmp::Reverse(base));
        for (base, of) in bases {
            found.lasts.insert(base, found.last(of));
        }
        (found, why_not)
    }

    /// Whether a value is the result of a scatter in loops.
    pub fn makes(&self, value: Value) -> bool {
        self.results.contains(&value)
    }

    /// The scatter of a value's elements.
    pub fn get(&self, value: Value) -> Option<&Scatter> {
        self.by_value.get(&value)
    }

    /// Whether a value goes to places that are computed.
    pub fn is_ordered(&self, value: Value) -> bool {
        self.get(value).is_some_and(|scatter| matches!(scatter.to, To::Index(_)))
    }

    /// Where a library step puts a value that nobody needs but as what surrounds a scatter.
    pub fn surrounded(&self, value: Value) -> Option<Value> {
        self.bases.get(&value).copied()
    }

    /// The value in whose memory this one is.
    pub fn last(&self, value: Value) -> Value {
        self.lasts.get(&value).copied().unwrap_or(value)
    }
}

impl Lowering<'_> {
    /// Where the element of a root at this index goes along the dim of its scatter, if it is scattered.
    pub(crate) fn scattered(&mut self, root: Value, index: &[Index]) -> Result<Option<Index>, Stop> {
        let Some(scatter) = self.cx.scatters.get(root).cloned() else { return Ok(None) };
        let shape = self.tensor(root).shape;
        let by = match scatter.to {
            To::Index(by) => by,
            To::Window { start, step } => {
                return Ok(Some(index[scatter.dim].scaled(step as i64, start as i64)));
            }
        };
        if Space::of(&shape, &[scatter.dim]) != *self.space {
            return Err(apart(root, scatter.of));
        }
        let node = self.cx.graph.producer(scatter.of);
        if let Def::Node { node, .. } = self.cx.graph.def(scatter.of) {
            self.nodes.insert(node);
        }
        let is_slice = self.tensor(by).shape.rank() == 1 && shape.rank() > 1;
        let own = if is_slice { &index[scatter.dim..=scatter.dim] } else { index };
        let at = self.at(by, own)?;
        if let Some(place) = self.place_of(at, scatter.size)
            && matches!(place.terms[..], [(Term::Value(..), 1)])
        {
            // It was checked before.
            return Ok(Some(place));
        }
        let code = match node {
            Some(node) if !scatter.is_checked => self.check(node.op.name(), scatter.size, node.loc),
            _ => 0,
        };
        let bounded = ExprKind::Bounded { value: at, size: scatter.size, code };
        let bounded = self.builder.push(DType::I64, bounded);
        Ok(Some(Index::value(bounded, scatter.size)))
    }

    /// The loops of a root that is lowered by itself.
    pub(crate) fn own_space(scatters: &Scatters, root: Value, shape: &Shape) -> Space {
        match scatters.get(root) {
            Some(Scatter { to: To::Index(_), dim, .. }) => Space::of(shape, &[*dim]),
            _ => Space::of(shape, &[]),
        }
    }
}

impl Scatter {
    /// The element that one at `index`, which goes to `place` along the scatter's dim, goes to.
    pub fn target(&self, index: &[Index], place: &Index, strides: &[isize]) -> Index {
        let mut target = Index::default();
        for (d, (own, &stride)) in index.iter().zip(strides).enumerate() {
            target.add_scaled(if d == self.dim { place } else { own }, stride as i64);
        }
        target
    }
}
