//! Evaluation of what is not element by element: views, reductions, products, picks, creation and losses,
//! each as its definition in plain loops.

mod indexing;
mod nn;
mod order;
mod recurrent;

use kiln_ir::{DType, Dims, Op, Reduction, Shape, Why, broadcast};

use crate::{Array, Data, Precision, philox};

type Result<T> = std::result::Result<T, Why>;

/// Calls `f` with every coordinate of a shape, in row-major order.
pub(crate) fn coordinates(shape: &[usize], mut f: impl FnMut(&[usize])) {
    let mut at = vec![0; shape.len()];
    for _ in 0..shape.iter().product() {
        f(&at);
        for d in (0..shape.len()).rev() {
            at[d] += 1;
            if at[d] < shape[d] {
                break;
            }
            at[d] = 0;
        }
    }
}

/// The row-major position of a coordinate.
pub(crate) fn position(shape: &[usize], at: &[usize]) -> usize {
    shape.iter().zip(at).fold(0, |p, (&size, &i)| p * size + i)
}

/// The elements of `x` at the coordinates that `source` names for each coordinate of the result.
pub(crate) fn pick(x: &Array, shape: &Shape, mut source: impl FnMut(&[usize]) -> Vec<usize>) -> Array {
    let mut positions = Vec::with_capacity(shape.numel());
    coordinates(shape, |at| positions.push(position(&x.shape, &source(at))));
    x.take(shape.clone(), positions.into_iter())
}

/// Repeats dims of size 1 and adds leading dims.
pub(crate) fn expand(x: &Array, shape: &Shape) -> Array {
    if x.shape == *shape {
        return x.clone();
    }
    debug_assert_eq!(broadcast(&x.shape, shape).as_ref(), Some(shape));
    let lead = shape.rank() - x.shape.rank();
    pick(x, shape, |at| {
        x.shape.iter().zip(&at[lead..]).map(|(&size, &i)| if size == 1 { 0 } else { i }).collect()
    })
}

pub(crate) fn evaluate(
    op: &Op,
    args: &[Array],
    shape: &Shape,
    dtype: DType,
    precision: Precision,
) -> Result<Array> {
    let rounded = |array: Array| array.convert(dtype, precision);
    Ok(match op {
        Op::Constant { value } => Array::from(*value),
        Op::Detach {} => args[0].clone(),
        Op::Reshape { .. } => args[0].take(shape.clone(), 0..args[0].numel()),
        Op::Expand { .. } => expand(&args[0], shape),
        Op::Permute { dims } => pick(&args[0], shape, |at| {
            let mut from = at.to_vec();
            dims.iter().zip(at).for_each(|(&d, &i)| from[d] = i);
            from
        }),
        Op::Transpose { dim0, dim1 } => pick(&args[0], shape, |at| {
            let mut from = at.to_vec();
            from.swap(*dim0, *dim1);
            from
        }),
        Op::Slice { dim, start, step, .. } => pick(&args[0], shape, |at| {
            let mut from = at.to_vec();
            from[*dim] = start + step * at[*dim];
            from
        }),
        Op::SliceScatter { dim, start, end, step } => {
            let (x, src) = (&args[0], &args[1]);
            let joined = join(x, src);
            let mut positions = Vec::with_capacity(x.numel());
            coordinates(shape, |at| {
                let i = at[*dim];
                let inside = i >= *start && i < *end && (i - start).is_multiple_of(*step);
                positions.push(if inside {
                    let mut from = at.to_vec();
                    from[*dim] = (i - start) / step;
                    x.numel() + position(&src.shape, &from)
                } else {
                    position(&x.shape, at)
                });
            });
            joined.take(shape.clone(), positions.into_iter())
        }
        Op::Cat { dim } => {
            let parts: Vec<Array> = args.iter().map(|a| a.convert(dtype, precision)).collect();
            let mut joined = parts[0].clone();
            parts[1..].iter().for_each(|part| joined = join(&joined, part));
            let mut positions = Vec::with_capacity(shape.numel());
            coordinates(shape, |at| {
                let (mut base, mut from) = (0, at.to_vec());
                for part in &parts {
                    if from[*dim] < part.shape[*dim] {
                        return positions.push(base + position(&part.shape, &from));
                    }
                    from[*dim] -= part.shape[*dim];
                    base += part.numel();
                }
            });
            joined.take(shape.clone(), positions.into_iter())
        }
        Op::Gather { dim } => {
            let (x, index) = (&args[0], &args[1]);
            check_index(index, x.shape[*dim])?;
            pick(x, shape, |at| {
                let mut from = at.to_vec();
                from[*dim] = index.int(position(shape, at)) as usize;
                from
            })
        }
        Op::GatherBackward { dim, size } => {
            let (src, index) = (&args[0], &args[1]);
            check_index(index, *size)?;
            let (mut float, mut int) = (vec![0.0; shape.numel()], vec![0i64; shape.numel()]);
            coordinates(&src.shape, |at| {
                let from = position(&src.shape, at);
                let mut to = at.to_vec();
                to[*dim] = index.int(from) as usize;
                let to = position(shape, &to);
                float[to] += src.float(from);
                int[to] = int[to].wrapping_add(src.int(from));
            });
            rounded(numbers(dtype, shape, float, int))
        }
        Op::Sum { dims, .. } => rounded(sum(&args[0], shape, dims)),
        Op::Mean { dims, .. } => {
            let count: usize = dims.iter().map(|&d| args[0].shape[d]).product();
            let total = sum(&args[0], shape, dims);
            rounded(Array::floats(dtype, shape, |i| total.float(i) / count as f64))
        }
        Op::Amax { dims, .. } => largest(&args[0], shape, dims),
        Op::Softmax { dim } | Op::LogSoftmax { dim } => {
            let log = matches!(op, Op::LogSoftmax { .. });
            rounded(softmax(&args[0], *dim, log))
        }
        Op::Mm {} => rounded(product(&args[0], &args[1], None, dtype)),
        Op::Addmm {} => rounded(product(&args[1], &args[2], Some(&expand(&args[0], shape)), dtype)),
        Op::Linear {} => {
            let (x, weight) = (&args[0], &args[1]);
            let inner = weight.shape[1];
            let rows = x.shape[..x.shape.rank() - 1].iter().product();
            let flat = x.take(Shape::from([rows, inner]), 0..x.numel());
            let turned = pick(weight, &Shape::from([inner, weight.shape[0]]), |at| vec![at[1], at[0]]);
            let wide = Shape::from([rows, weight.shape[0]]);
            let bias = args.get(2).map(|bias| expand(bias, &wide));
            let result = rounded(product(&flat, &turned, bias.as_ref(), dtype));
            result.take(shape.clone(), 0..shape.numel())
        }
        Op::Full { .. } => expand(&args[0].convert(dtype, precision), shape),
        Op::Arange { .. } => {
            if dtype.is_float() {
                rounded(Array::floats(dtype, shape, |i| args[0].float(0) + i as f64 * args[1].float(0)))
            } else {
                rounded(Array::ints(dtype, shape, |i| {
                    args[0].int(0).wrapping_add((i as i64).wrapping_mul(args[1].int(0)))
                }))
            }
        }
        Op::Rand { .. } | Op::Randn { .. } => {
            let (seed, offset) = (args[0].int(0) as u64, args[1].int(0) as u64);
            let element = if matches!(op, Op::Rand { .. }) { philox::uniform } else { philox::normal };
            rounded(Array::floats(dtype, shape, |i| element(dtype, seed, offset, i)))
        }
        Op::Uniform { .. } => {
            let (low, high) = (args[0].float(0), args[1].float(0));
            let (seed, offset) = (args[2].int(0) as u64, args[3].int(0) as u64);
            rounded(Array::floats(dtype, shape, |i| {
                low + (high - low) * philox::uniform(dtype, seed, offset, i)
            }))
        }
        Op::BitwiseNot {} => Array::ints(dtype, shape, |i| match dtype {
            DType::Bool => 1 - args[0].int(i),
            _ => !args[0].int(i),
        }),
        Op::IntegerDivision { division } => {
            let (x, y) = (expand(&args[0], shape), expand(&args[1], shape));
            let results: Option<Vec<i64>> =
                (0..shape.numel()).map(|i| division.checked(x.int(i), y.int(i))).collect();
            let results = results.ok_or(Why::Division { x: 0, y: 0 })?;
            Array::ints(dtype, shape, |i| results[i])
        }
        Op::MaskedFill {} => {
            let (x, mask) = (expand(&args[0], shape), expand(&args[1], shape));
            let value = expand(&args[2].convert(dtype, precision), shape);
            let joined = join(&x, &value);
            let at = (0..shape.numel()).map(|i| if mask.int(i) != 0 { shape.numel() + i } else { i });
            joined.take(shape.clone(), at)
        }
        Op::FullLike { .. } => expand(&args[1].convert(dtype, precision), shape),
        Op::ZerosLike { .. } => Array::ints(DType::I64, shape, |_| 0).convert(dtype, precision),
        Op::OnesLike { .. } => Array::ints(DType::I64, shape, |_| 1).convert(dtype, precision),
        Op::Prelu {} => {
            let (x, weight) = (&args[0], &args[1]);
            let mut channel = Vec::with_capacity(x.numel());
            coordinates(shape, |at| channel.push(if weight.numel() == 1 { 0 } else { at[1] }));
            rounded(Array::floats(dtype, shape, |i| match x.float(i) {
                v if v > 0.0 => v,
                v => weight.float(channel[i]) * v,
            }))
        }
        Op::NllLoss { reduction, ignore_index } => {
            rounded(nll_loss(&args[0], &args[1], shape, *reduction, *ignore_index)?)
        }
        Op::CrossEntropy { reduction, ignore_index } => {
            let log_probability = softmax(&args[0], args[0].shape.rank() - 1, true);
            rounded(nll_loss(&log_probability, &args[1], shape, *reduction, *ignore_index)?)
        }
        other => match nn::evaluate(other, args, shape, dtype)
            .or_else(|| recurrent::evaluate(other, args, shape))
        {
            Some(array) => rounded(array),
            None => match order::evaluate(other, args, shape, dtype, precision)? {
                Some(array) => array,
                None => return indexing::evaluate(other, args, shape, dtype, precision),
            },
        },
    })
}

pub(crate) fn numbers(dtype: DType, shape: &Shape, float: Vec<f64>, int: Vec<i64>) -> Array {
    if dtype.is_float() {
        Array::floats(dtype, shape, |i| float[i])
    } else {
        Array::ints(dtype, shape, |i| int[i])
    }
}

/// The elements of `a`, then those of `b`, in one dim.
fn join(a: &Array, b: &Array) -> Array {
    let data = match (&a.data, &b.data) {
        (Data::Float(x), Data::Float(y)) => Data::Float([&x[..], y].concat()),
        (Data::Int(x), Data::Int(y)) => Data::Int([&x[..], y].concat()),
        _ => Data::Float(
            (0..a.numel()).map(|i| a.float(i)).chain((0..b.numel()).map(|i| b.float(i))).collect(),
        ),
    };
    Array { dtype: a.dtype, device: a.device, shape: Shape::from([a.numel() + b.numel()]), data }
}

pub(crate) fn check_index(index: &Array, size: usize) -> Result<()> {
    match (0..index.numel()).map(|i| index.int(i)).find(|&i| i < 0 || i >= size as i64) {
        Some(index) => Err(Why::Index { index, size }),
        None => Ok(()),
    }
}

/// For each element of `x`, the position of the result of a reduction over `dims` that it belongs to.
fn groups(x: &Array, dims: &Dims) -> Vec<usize> {
    let kept = x.shape.reduced(dims, true);
    let mut group = Vec::with_capacity(x.numel());
    coordinates(&x.shape, |at| {
        let at: Vec<usize> =
            at.iter().zip(kept.iter()).map(|(&i, &size)| if size == 1 { 0 } else { i }).collect();
        group.push(position(&kept, &at));
    });
    group
}

fn sum(x: &Array, shape: &Shape, dims: &Dims) -> Array {
    let dtype = if x.dtype.is_float() { DType::F64 } else { DType::I64 };
    if dims.is_empty() {
        return x.convert(dtype, Precision::Exact);
    }
    let (mut float, mut int) = (vec![0.0; shape.numel()], vec![0i64; shape.numel()]);
    for (i, group) in groups(x, dims).into_iter().enumerate() {
        float[group] += x.float(i);
        int[group] = int[group].wrapping_add(x.int(i));
    }
    numbers(dtype, shape, float, int)
}

fn largest(x: &Array, shape: &Shape, dims: &Dims) -> Array {
    let mut best: Vec<Option<usize>> = vec![None; shape.numel()];
    for (i, group) in groups(x, dims).into_iter().enumerate() {
        let wins = match best[group] {
            None => true,
            Some(b) => match &x.data {
                Data::Int(v) => v[i] > v[b],
                Data::Float(v) => !v[b].is_nan() && (v[i].is_nan() || v[i] > v[b]),
            },
        };
        if wins {
            best[group] = Some(i);
        }
    }
    // The type rule leaves no group without elements.
    x.take(shape.clone(), best.into_iter().map(|b| b.unwrap_or(0)))
}

fn softmax(x: &Array, dim: usize, log: bool) -> Array {
    let dims = if x.shape.rank() == 0 { Dims::default() } else { Dims::from(dim) };
    if x.numel() == 0 {
        return x.clone();
    }
    let kept = x.shape.reduced(&dims, true);
    let top = expand(&largest(x, &kept, &dims), &x.shape);
    let e = Array::floats(DType::F64, &x.shape, |i| (x.float(i) - top.float(i)).exp());
    let total = expand(&sum(&e, &kept, &dims), &x.shape);
    Array::floats(DType::F64, &x.shape, |i| {
        if log { x.float(i) - top.float(i) - total.float(i).ln() } else { e.float(i) / total.float(i) }
    })
}

fn product(x: &Array, y: &Array, plus: Option<&Array>, dtype: DType) -> Array {
    let (m, k, n) = (x.shape[0], x.shape[1], y.shape[1]);
    let shape = Shape::from([m, n]);
    let (mut float, mut int) = (vec![0.0; m * n], vec![0i64; m * n]);
    for i in 0..m {
        for j in 0..n {
            let at = i * n + j;
            for p in 0..k {
                float[at] += x.float(i * k + p) * y.float(p * n + j);
                int[at] = int[at].wrapping_add(x.int(i * k + p).wrapping_mul(y.int(p * n + j)));
            }
            if let Some(plus) = plus {
                float[at] += plus.float(at);
                int[at] = int[at].wrapping_add(plus.int(at));
            }
        }
    }
    numbers(dtype, &shape, float, int)
}

fn nll_loss(
    input: &Array,
    target: &Array,
    shape: &Shape,
    reduction: Reduction,
    ignore: i64,
) -> Result<Array> {
    let classes = input.shape[input.shape.rank() - 1];
    let (mut losses, mut count) = (Vec::new(), 0.0);
    for row in 0..target.numel() {
        let class = target.int(row);
        if class == ignore {
            losses.push(0.0);
            continue;
        }
        if class < 0 || class >= classes as i64 {
            return Err(Why::Index { index: class, size: classes });
        }
        losses.push(-input.float(row * classes + class as usize));
        count += 1.0;
    }
    let total = losses.iter().fold(0.0, |a, b| a + b);
    Ok(Array::floats(DType::F64, shape, |i| match reduction {
        Reduction::None => losses[i],
        Reduction::Sum => total,
        Reduction::Mean => total / count,
    }))
}
