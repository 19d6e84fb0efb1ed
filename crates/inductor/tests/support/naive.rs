//! The plain meaning of prims: every value computed element by element, in double precision rounded to its
//! dtype, or in integers.

use kiln_ir::{DType, Def, Eval, Graph, Node, Op, Scalar, Shape, Ty};

/// A dense tensor of numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub dtype: DType,
    pub shape: Shape,
    pub data: Vec<Scalar>,
}

#[derive(Clone, Debug)]
pub enum Val {
    Tensor(Tensor),
    Scalar(Scalar),
    List(Vec<Tensor>),
}

pub fn cast(x: Scalar, dtype: DType) -> Scalar {
    x.to_dtype(dtype)
}

fn unfold(mut linear: usize, shape: &[usize]) -> Vec<usize> {
    let mut out = vec![0; shape.len()];
    for d in (0..shape.len()).rev() {
        out[d] = linear % shape[d];
        linear /= shape[d];
    }
    out
}

fn fold(index: &[usize], shape: &[usize]) -> usize {
    index.iter().zip(shape).fold(0, |n, (i, s)| n * s + i)
}

fn make(dtype: DType, shape: &Shape, f: impl Fn(&[usize]) -> Scalar) -> Tensor {
    let data = (0..shape.numel()).map(|i| cast(f(&unfold(i, shape)), dtype)).collect();
    Tensor { dtype, shape: shape.clone(), data }
}

impl Tensor {
    pub fn get(&self, index: &[usize]) -> Scalar {
        self.data[fold(index, &self.shape)]
    }
}

fn element(op: &Op, args: &[Scalar], operands: DType, result: DType) -> Scalar {
    let value = match op.row().eval {
        Eval::Pointwise { float, int } => match int {
            Some(int) if !operands.is_float() => {
                Scalar::Int(int(&args.iter().map(|a| a.as_i64()).collect::<Vec<_>>()))
            }
            _ => Scalar::Float(float(&args.iter().map(|a| a.as_f64()).collect::<Vec<_>>())),
        },
        Eval::Compare { float, int } => Scalar::Bool(match operands.is_float() {
            true => float(&args.iter().map(|a| a.as_f64()).collect::<Vec<_>>()),
            false => int(&args.iter().map(|a| a.as_i64()).collect::<Vec<_>>()),
        }),
        Eval::Convert => args[0],
        _ => panic!("{op:?} is not pointwise"),
    };
    cast(value, result)
}

fn pointwise(graph: &Graph, node: &Node, args: &[Val], result: &Ty, row: usize) -> Tensor {
    let (dtype, shape) = match result {
        Ty::Tensor(t) => (t.dtype, t.shape.clone()),
        Ty::List(l) => (l[row].dtype, l[row].shape.clone()),
        Ty::Scalar(_) => unreachable!(),
    };
    let skip = usize::from(matches!(node.op, Op::Where {}));
    let tensor = |v: &Val| match v {
        Val::Tensor(t) => Some(t.clone()),
        Val::List(l) => Some(l[row].clone()),
        Val::Scalar(_) => None,
    };
    let found = args.iter().skip(skip).find_map(tensor).map(|t| t.dtype);
    let operands = match node.op.row().eval {
        Eval::Compare { .. } => found.unwrap_or(dtype),
        Eval::Convert => args.iter().find_map(tensor).map_or(dtype, |t| t.dtype),
        _ => dtype,
    };
    let _ = graph;
    let parts: Vec<Result<Tensor, Scalar>> = args
        .iter()
        .enumerate()
        .map(|(i, a)| {
            let wanted = if i < skip { DType::Bool } else { operands };
            match a {
                // Floats that are numbers are not rounded to halves.
                Val::Scalar(s) if wanted.is_float() => Err(cast(*s, wanted.computing())),
                Val::Scalar(s) => Err(cast(*s, wanted)),
                other => Ok(tensor(other).unwrap()),
            }
        })
        .collect();
    let data = (0..shape.numel())
        .map(|i| {
            let xs: Vec<Scalar> =
                parts.iter().map(|p| p.as_ref().map_or_else(|s| *s, |t| t.data[i])).collect();
            element(&node.op, &xs, operands, dtype)
        })
        .collect();
    Tensor { dtype, shape, data }
}

/// Every value of the graph; `Err` where an index is out of range.
pub fn evaluate(graph: &Graph, inputs: &[Val]) -> Result<(Vec<Tensor>, Vec<Tensor>), String> {
    let mut values: Vec<Option<Val>> = vec![None; graph.value_count()];
    for (&v, input) in graph.inputs.iter().zip(inputs) {
        values[v.index()] = Some(input.clone());
    }
    for node in &graph.nodes {
        let args: Vec<Val> = node.args.iter().map(|a| values[a.index()].clone().unwrap()).collect();
        let out = graph.ty(node.outs[0]);
        let value = compute(graph, node, &args, out)?;
        values[node.outs[0].index()] = Some(value);
    }
    let tensor = |v: kiln_ir::Value| match &values[v.index()] {
        Some(Val::Tensor(t)) => t.clone(),
        other => panic!("not a tensor: {other:?}"),
    };
    let outputs = graph.outputs.iter().map(|&v| tensor(v)).collect();
    let written = |w: &kiln_ir::Write| match (&values[w.value.index()], w.element) {
        (Some(Val::List(items)), Some(i)) => items[i as usize].clone(),
        _ => tensor(w.value),
    };
    let writes = graph.writes.iter().map(written).collect();
    let _: Option<Def> = None;
    Ok((outputs, writes))
}

fn compute(graph: &Graph, node: &Node, args: &[Val], out: &Ty) -> Result<Val, String> {
    let t = |i: usize| match &args[i] {
        Val::Tensor(t) => t,
        other => panic!("{:?}: {other:?}", node.op),
    };
    let s = |i: usize| match &args[i] {
        Val::Scalar(s) => *s,
        other => panic!("{:?}: {other:?}", node.op),
    };
    if let (Op::Constant { value }, _) = (&node.op, out) {
        return Ok(Val::Scalar(*value));
    }
    let ty = match out {
        Ty::Scalar(kind) => {
            let xs: Vec<Scalar> = (0..args.len()).map(s).collect();
            let operands = xs.iter().map(|x| x.kind()).max().unwrap().dtype();
            let operands =
                if matches!(node.op.row().eval, Eval::Compare { .. }) { operands } else { kind.dtype() };
            return Ok(Val::Scalar(element(&node.op, &xs, operands, kind.dtype())));
        }
        Ty::List(items) => {
            if let Op::List {} = node.op {
                return Ok(Val::List((0..args.len()).map(|i| t(i).clone()).collect()));
            }
            return Ok(Val::List((0..items.len()).map(|r| pointwise(graph, node, args, out, r)).collect()));
        }
        Ty::Tensor(ty) => ty.clone(),
    };
    let (dtype, shape) = (ty.dtype, &ty.shape);
    let result = match &node.op {
        Op::ListGet { index } => match &args[0] {
            Val::List(l) => l[*index].clone(),
            other => panic!("{other:?}"),
        },
        Op::Reshape { .. } => Tensor { dtype, shape: shape.clone(), data: t(0).data.clone() },
        Op::Permute { dims } => make(dtype, shape, |i| {
            let mut from = vec![0; i.len()];
            for (k, &d) in dims.iter().enumerate() {
                from[d] = i[k];
            }
            t(0).get(&from)
        }),
        Op::Expand { .. } => make(dtype, shape, |i| {
            let from = &t(0).shape;
            let lead = shape.rank() - from.rank();
            let index: Vec<usize> =
                (0..from.rank()).map(|d| if from[d] == 1 { 0 } else { i[d + lead] }).collect();
            t(0).get(&index)
        }),
        Op::Slice { dim, start, step, .. } => make(dtype, shape, |i| {
            let mut from = i.to_vec();
            from[*dim] = start + i[*dim] * step;
            t(0).get(&from)
        }),
        Op::SliceScatter { dim, start, end, step } => make(dtype, shape, |i| {
            let at = i[*dim];
            if at >= *start && at < *end && (at - start) % step == 0 {
                let mut from = i.to_vec();
                from[*dim] = (at - start) / step;
                return t(1).get(&from);
            }
            t(0).get(i)
        }),
        Op::Cat { dim } => make(dtype, shape, |i| {
            let mut from = i.to_vec();
            for k in 0..args.len() {
                let size = t(k).shape[*dim];
                if from[*dim] < size {
                    return t(k).get(&from);
                }
                from[*dim] -= size;
            }
            unreachable!()
        }),
        Op::Gather { dim } => {
            let size = t(0).shape[*dim];
            if t(1).data.iter().any(|i| i.as_i64() < 0 || i.as_i64() >= size as i64) {
                return Err("gather".into());
            }
            make(dtype, shape, |i| {
                let mut from = i.to_vec();
                from[*dim] = t(1).get(i).as_i64() as usize;
                t(0).get(&from)
            })
        }
        Op::GatherBackward { dim, .. } => {
            let mut sum = vec![0.0; shape.numel()];
            for n in 0..t(0).data.len() {
                let mut at = unfold(n, &t(0).shape);
                at[*dim] = t(1).get(&at).as_i64() as usize;
                sum[fold(&at, shape)] += t(0).data[n].as_f64();
            }
            make(dtype, shape, |i| Scalar::Float(sum[fold(i, shape)]))
        }
        Op::MaxPool2dIndices { kernel, stride, padding, dilation, .. } => make(dtype, shape, |i| {
            let x = t(0);
            let mut best: Option<(f64, usize)> = None;
            for tap in 0..kernel[0] * kernel[1] {
                let tap = [tap / kernel[1], tap % kernel[1]];
                // Positions before the first element wrap around, and are behind the last.
                let at =
                    [0, 1].map(|d| (i[d + 2] * stride[d] + tap[d] * dilation[d]).wrapping_sub(padding[d]));
                if at[0] < x.shape[2] && at[1] < x.shape[3] {
                    let found = x.get(&[i[0], i[1], at[0], at[1]]).as_f64();
                    if best.is_none_or(|(largest, _)| found > largest || found.is_nan()) {
                        best = Some((found, at[0] * x.shape[3] + at[1]));
                    }
                }
            }
            Scalar::Int(best.map_or(0, |(_, place)| place as i64))
        }),
        Op::AvgPool2dBackward { .. }
        | Op::AdaptiveAvgPool2d { .. }
        | Op::AdaptiveAvgPool2dBackward { .. } => {
            let (x, is_forward) = (t(0), matches!(node.op, Op::AdaptiveAvgPool2d { .. }));
            let (planes, windows) = if is_forward { (&x.shape, shape) } else { (shape, &x.shape) };
            let pair = |shape: &Shape| [shape[2], shape[3]];
            let axes = kiln_ir::table::resample::axes(&node.op, pair(planes), pair(windows)).unwrap();
            let weight = |d: usize, window: usize, at: usize| {
                let (first, weights) = &axes[d].taps[window];
                at.checked_sub(*first).and_then(|tap| weights.get(tap)).copied().unwrap_or(0.0)
            };
            make(dtype, shape, |i| {
                let sum = (0..x.shape[2] * x.shape[3]).map(|n| {
                    let at = [n / x.shape[3], n % x.shape[3]];
                    let share = |d: usize| match is_forward {
                        true => weight(d, i[d + 2], at[d]),
                        false => weight(d, at[d], i[d + 2]),
                    };
                    share(0) * share(1) * x.get(&[i[0], i[1], at[0], at[1]]).as_f64()
                });
                Scalar::Float(sum.sum())
            })
        }
        Op::IndexAdd { dim } | Op::ScatterAdd { dim } | Op::IndexCopy { dim } | Op::Scatter { dim } => {
            let adds = matches!(node.op, Op::IndexAdd { .. } | Op::ScatterAdd { .. });
            let mut made = t(0).clone();
            for n in 0..t(2).data.len() {
                let mut at = unfold(n, &t(2).shape);
                let index = if t(1).shape.rank() == at.len() { t(1).get(&at) } else { t(1).get(&[at[*dim]]) };
                if !(0..shape[*dim] as i64).contains(&index.as_i64()) {
                    return Err(node.op.name().into());
                }
                at[*dim] = index.as_i64() as usize;
                let (old, new) = (made.get(&at), t(2).data[n]);
                made.data[fold(&at, shape)] = match (adds, dtype.is_float()) {
                    (false, _) => new,
                    (true, true) => Scalar::Float(old.as_f64() + new.as_f64()),
                    (true, false) => Scalar::Int(old.as_i64().wrapping_add(new.as_i64())),
                };
            }
            make(dtype, shape, |i| made.get(i))
        }
        Op::Cumsum { dim, .. } | Op::Cumprod { dim } => make(dtype, shape, |i| {
            let from_end = matches!(node.op, Op::Cumsum { reverse: true, .. });
            let up_to = if from_end { i[*dim]..shape[*dim] } else { 0..i[*dim] + 1 };
            let elements = up_to.map(|n| {
                let mut at = i.to_vec();
                at[*dim] = n;
                t(0).get(&at)
            });
            match (&node.op, dtype.is_float()) {
                (Op::Cumsum { .. }, true) => Scalar::Float(elements.map(|x| x.as_f64()).sum()),
                (Op::Cumsum { .. }, false) => {
                    Scalar::Int(elements.fold(0i64, |a, x| a.wrapping_add(x.as_i64())))
                }
                (_, true) => Scalar::Float(elements.map(|x| x.as_f64()).product()),
                (_, false) => Scalar::Int(elements.fold(1i64, |a, x| a.wrapping_mul(x.as_i64()))),
            }
        }),
        Op::Full { .. } => make(dtype, shape, |_| s(0)),
        Op::Arange { .. } => make(dtype, shape, |i| match dtype {
            dtype if !dtype.is_float() => Scalar::Int(s(0).as_i64() + i[0] as i64 * s(1).as_i64()),
            _ => Scalar::Float(s(0).as_f64() + i[0] as f64 * s(1).as_f64()),
        }),
        Op::Sum { dims, .. } | Op::Amax { dims, .. } => {
            let from = t(0);
            let is_sum = matches!(node.op, Op::Sum { .. });
            let mut acc: Vec<Option<Scalar>> = vec![None; shape.numel()];
            for (n, &x) in from.data.iter().enumerate() {
                let at = unfold(n, &from.shape);
                let kept: Vec<usize> = (0..at.len()).filter(|d| !dims.contains(d)).map(|d| at[d]).collect();
                let slot = &mut acc[fold(&kept, shape)];
                *slot = Some(match (*slot, is_sum, dtype.is_float()) {
                    (None, ..) => x,
                    (Some(a), true, true) => Scalar::Float(a.as_f64() + x.as_f64()),
                    (Some(a), true, false) => Scalar::Int(a.as_i64().wrapping_add(x.as_i64())),
                    (Some(a), false, true) if a.as_f64().is_nan() || x.as_f64() <= a.as_f64() => a,
                    (Some(_), false, true) => x,
                    (Some(a), false, false) => Scalar::Int(a.as_i64().max(x.as_i64())),
                });
            }
            make(dtype, shape, |i| acc[fold(i, shape)].unwrap_or(Scalar::Int(0)))
        }
        Op::Argmax { dim, keepdim: false } | Op::Argmin { dim, keepdim: false } => make(dtype, shape, |i| {
            let is_before = |a: Scalar, b: Scalar| match (&node.op, a, b) {
                _ if a.as_f64().is_nan() => !b.as_f64().is_nan(),
                (Op::Argmax { .. }, Scalar::Float(a), Scalar::Float(b)) => a > b,
                (Op::Argmax { .. }, a, b) => a.as_i64() > b.as_i64(),
                (_, a, b) => a.as_f64() < b.as_f64(),
            };
            let element = |n: usize| {
                let mut at = i.to_vec();
                at.insert(*dim, n);
                t(0).get(&at)
            };
            let better = |best: usize, n: usize| if is_before(element(n), element(best)) { n } else { best };
            Scalar::Int((0..t(0).shape[*dim]).reduce(better).unwrap() as i64)
        }),
        Op::Mm {} => make(dtype, shape, |i| {
            let k = t(0).shape[1];
            match dtype.is_float() {
                true => Scalar::Float(
                    (0..k).map(|k| t(0).get(&[i[0], k]).as_f64() * t(1).get(&[k, i[1]]).as_f64()).sum(),
                ),
                false => Scalar::Int((0..k).fold(0i64, |n, k| {
                    n.wrapping_add(t(0).get(&[i[0], k]).as_i64().wrapping_mul(t(1).get(&[k, i[1]]).as_i64()))
                })),
            }
        }),
        Op::Bmm {} => make(dtype, shape, |i| {
            let product =
                |k: usize| t(0).get(&[i[0], i[1], k]).as_f64() * t(1).get(&[i[0], k, i[2]]).as_f64();
            Scalar::Float((0..t(0).shape[2]).map(product).sum())
        }),
        Op::Convolution { stride, padding, dilation, groups: 1 } => make(dtype, shape, |i| {
            let (x, weight) = (t(0), t(1));
            let mut sum = 0.0;
            for tap in 0..weight.shape[1..].iter().product() {
                let tap = unfold(tap, &weight.shape[1..]);
                let at = |d: usize| (i[2 + d] * stride[d] + tap[1 + d] * dilation[d]).checked_sub(padding[d]);
                if let (Some(row), Some(column)) = (at(0), at(1))
                    && row < x.shape[2]
                    && column < x.shape[3]
                {
                    let weight = weight.get(&[i[1], tap[0], tap[1], tap[2]]).as_f64();
                    sum += x.get(&[i[0], tap[0], row, column]).as_f64() * weight;
                }
            }
            Scalar::Float(sum)
        }),
        _ => pointwise(graph, node, args, out, 0),
    };
    Ok(Val::Tensor(result))
}
