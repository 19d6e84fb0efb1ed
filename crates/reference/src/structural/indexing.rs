//! Evaluation of what picks and places elements: strided views, diagonals, windows, padding, scatters and
//! index tensors, each as its definition in plain loops.

use kiln_ir::{DType, Op, ScatterReduce, Shape, Why, broadcast};

use crate::structural::{check_index, coordinates, expand, numbers, pick, position};
use crate::{Array, Precision};

type Result<T> = std::result::Result<T, Why>;

pub(crate) fn evaluate(
    op: &Op,
    args: &[Array],
    shape: &Shape,
    dtype: DType,
    precision: Precision,
) -> Result<Array> {
    let rounded = |array: Array| array.convert(dtype, precision);
    Ok(match op {
        Op::AsStrided { view, offset } => {
            args[0].take(shape.clone(), strided(shape, &view.seconds(), *offset).into_iter())
        }
        Op::AsStridedScatter { view, offset } => {
            replaced(&args[0], &args[1], &strided(&view.firsts(), &view.seconds(), *offset))
        }
        Op::Diagonal { offset, dim1, dim2 } => {
            pick(&args[0], shape, |at| on_diagonal(at, *offset, *dim1, *dim2))
        }
        Op::DiagonalScatter { offset, dim1, dim2 } => {
            let mut places = Vec::new();
            coordinates(&args[1].shape, |at| {
                places.push(position(shape, &on_diagonal(at, *offset, *dim1, *dim2)));
            });
            replaced(&args[0], &args[1], &places)
        }
        Op::DiagEmbed { offset, dim1, dim2 } => {
            let mut places = Vec::new();
            coordinates(&args[0].shape, |at| {
                places.push(position(shape, &on_diagonal(at, *offset, *dim1, *dim2)));
            });
            replaced(&zeros(dtype, shape), &args[0], &places)
        }
        Op::Unfold { dim, step, .. } => pick(&args[0], shape, |at| {
            let (window, rest) = at.split_last().map_or((0, at), |(w, rest)| (*w, rest));
            let mut from = rest.to_vec();
            from[*dim] = rest[*dim] * step + window;
            from
        }),
        Op::Flip { dims } => pick(&args[0], shape, |at| {
            let mut from = at.to_vec();
            dims.iter().for_each(|&d| from[d] = shape[d] - 1 - at[d]);
            from
        }),
        Op::Tril { diagonal } | Op::Triu { diagonal } => {
            let lower = matches!(op, Op::Tril { .. });
            let mut places = Vec::new();
            coordinates(shape, |at| {
                let (row, column) = (at[at.len() - 2] as i64, at[at.len() - 1] as i64);
                let outside = if lower { column - row > *diagonal } else { column - row < *diagonal };
                if outside {
                    places.push(position(shape, at));
                }
            });
            replaced(&args[0], &zeros(dtype, &Shape::from(places.len())), &places)
        }
        Op::ConstantPadNd { widths } => {
            let before = widths.firsts();
            let filled = expand(&args[1].convert(dtype, precision), shape);
            let mut places = Vec::new();
            coordinates(&args[0].shape, |at| {
                let at: Vec<usize> = at.iter().zip(before.iter()).map(|(i, b)| i + b).collect();
                places.push(position(shape, &at));
            });
            replaced(&filled, &args[0], &places)
        }
        Op::ReflectionPad { widths } | Op::ReplicationPad { widths } => {
            let before = widths.firsts();
            let mirrored = matches!(op, Op::ReflectionPad { .. });
            let sizes = args[0].shape.clone();
            pick(&args[0], shape, |at| {
                (0..at.len())
                    .map(|d| {
                        let (i, last) = (at[d] as i64 - before[d] as i64, sizes[d] as i64 - 1);
                        let from = match (i, mirrored) {
                            (i, true) if i < 0 => -i,
                            (i, true) if i > last => 2 * last - i,
                            (i, _) => i.clamp(0, last.max(0)),
                        };
                        from as usize
                    })
                    .collect()
            })
        }
        Op::IndexSelect { dim } => {
            check_index(&args[1], args[0].shape[*dim])?;
            pick(&args[0], shape, |at| {
                let mut from = at.to_vec();
                from[*dim] = args[1].int(at[*dim]) as usize;
                from
            })
        }
        Op::SliceAdd { dim, start, step, .. } => {
            let mut places = Vec::with_capacity(args[1].numel());
            coordinates(&args[1].shape, |at| {
                let mut to = at.to_vec();
                to[*dim] = start + step * at[*dim];
                places.push(position(shape, &to));
            });
            rounded(reduced(&args[0], &args[1], &places, ScatterReduce::Sum, true))
        }
        Op::IndexAdd { dim } | Op::IndexCopy { dim } => {
            let (x, index, src) = (&args[0], &args[1], &args[2]);
            check_index(index, x.shape[*dim])?;
            let mut places = Vec::new();
            coordinates(&src.shape, |at| {
                let mut to = at.to_vec();
                to[*dim] = index.int(at[*dim]) as usize;
                places.push(position(shape, &to));
            });
            match op {
                Op::IndexAdd { .. } => rounded(reduced(x, src, &places, ScatterReduce::Sum, true)),
                _ => replaced(x, src, &places),
            }
        }
        Op::Scatter { dim } => replaced(&args[0], &args[2], &scatter_places(args, *dim)?),
        Op::ScatterAdd { dim } => {
            rounded(reduced(&args[0], &args[2], &scatter_places(args, *dim)?, ScatterReduce::Sum, true))
        }
        Op::ScatterReduce { dim, reduce, include_self } => {
            rounded(reduced(&args[0], &args[2], &scatter_places(args, *dim)?, *reduce, *include_self))
        }
        Op::CheckedIndex { size } => wrapped(&args[0], *size)?,
        Op::Index { dims } => {
            let places = indexed(&args[0], &args[1..], dims, shape)?;
            args[0].take(shape.clone(), places.into_iter())
        }
        Op::IndexPut { dims, accumulate } => {
            let window = window(&args[0].shape, &args[2..], dims)?;
            let places = indexed(&args[0], &args[2..], dims, &window)?;
            let values = expand(&args[1], &window);
            if *accumulate {
                rounded(reduced(&args[0], &values, &places, ScatterReduce::Sum, true))
            } else {
                replaced(&args[0], &values, &places)
            }
        }
        Op::Embedding { .. } => {
            check_index(&args[1], args[0].shape[0])?;
            let width = args[0].shape[1];
            let rows = (0..args[1].numel()).map(|i| args[1].int(i) as usize);
            args[0].take(shape.clone(), rows.flat_map(|row| row * width..(row + 1) * width))
        }
        Op::OneHot { classes } => {
            check_index(&args[0], *classes)?;
            Array::ints(dtype, shape, |i| i64::from(args[0].int(i / classes) == (i % classes) as i64))
        }
        Op::MaskedScatter {} => {
            let places = holds(&args[1], shape);
            if places.len() > args[2].numel() {
                return Err(Why::sizes(
                    "places in the mask and elements of src",
                    places.len(),
                    args[2].numel(),
                ));
            }
            replaced(&args[0], &args[2], &places)
        }
        Op::MaskedScatterBackward { .. } => {
            let places = holds(&args[1], &args[0].shape);
            let picked = args[0].take(Shape::from(places.len()), places.iter().copied());
            let first: Vec<usize> = (0..places.len().min(shape.numel())).collect();
            replaced(&zeros(dtype, shape), &picked, &first)
        }
        other => return Err(Why::Other(format!("the evaluator has no definition of {}", other.name()))),
    })
}

fn zeros(dtype: DType, shape: &Shape) -> Array {
    let (float, int) = (vec![0.0; shape.numel()], vec![0; shape.numel()]);
    numbers(dtype, shape, float, int)
}

/// The positions of a strided view's elements.
fn strided(shape: &Shape, strides: &Shape, offset: usize) -> Vec<usize> {
    let mut places = Vec::new();
    coordinates(shape, |at| {
        places.push(offset + at.iter().zip(strides.iter()).map(|(i, s)| i * s).sum::<usize>());
    });
    places
}

/// The coordinate of an element of a diagonal, which is the last dim of `at`.
fn on_diagonal(at: &[usize], offset: i64, dim1: usize, dim2: usize) -> Vec<usize> {
    let along = at.last().copied().unwrap_or(0);
    let mut rest = at.iter();
    (0..at.len() + 1)
        .map(|d| match d {
            d if d == dim1 => along + offset.min(0).unsigned_abs() as usize,
            d if d == dim2 => along + offset.max(0) as usize,
            _ => rest.next().copied().unwrap_or(0),
        })
        .collect()
}

/// `x` with element `i` of `src` at `places[i]`.
fn replaced(x: &Array, src: &Array, places: &[usize]) -> Array {
    let mut float: Vec<f64> = (0..x.numel()).map(|i| x.float(i)).collect();
    let mut int: Vec<i64> = (0..x.numel()).map(|i| x.int(i)).collect();
    for (i, &place) in places.iter().enumerate() {
        float[place] = src.float(i);
        int[place] = src.int(i);
    }
    numbers(x.dtype, &x.shape, float, int)
}

/// `x` with the elements of `src` that meet at a place reduced, in their order.
fn reduced(x: &Array, src: &Array, places: &[usize], reduce: ScatterReduce, include_self: bool) -> Array {
    let mut met: Vec<Vec<usize>> = vec![Vec::new(); x.numel()];
    places.iter().enumerate().for_each(|(i, &place)| met[place].push(i));
    let (mut float, mut int) = (Vec::new(), Vec::new());
    for (place, sources) in met.iter().enumerate() {
        let own = include_self || sources.is_empty();
        let mut floats: Vec<f64> = if own { vec![x.float(place)] } else { Vec::new() };
        let mut ints: Vec<i64> = if own { vec![x.int(place)] } else { Vec::new() };
        floats.extend(sources.iter().map(|&i| src.float(i)));
        ints.extend(sources.iter().map(|&i| src.int(i)));
        let count = ints.len();
        let extreme = |sign: f64| {
            floats.iter().fold(sign * f64::NEG_INFINITY, |a: f64, &b| {
                if a.is_nan() || b.is_nan() { f64::NAN } else { sign * (sign * a).max(sign * b) }
            })
        };
        let total = ints.iter().fold(0i64, |a, &b| a.wrapping_add(b));
        let (f, i) = match reduce {
            ScatterReduce::Sum => (floats.iter().sum(), total),
            ScatterReduce::Mean => {
                (floats.iter().sum::<f64>() / count as f64, total.div_euclid(count as i64))
            }
            ScatterReduce::Prod => {
                (floats.iter().product(), ints.iter().fold(1i64, |a, &b| a.wrapping_mul(b)))
            }
            ScatterReduce::Amax => (extreme(1.0), ints.iter().copied().max().unwrap_or(0)),
            ScatterReduce::Amin => (extreme(-1.0), ints.iter().copied().min().unwrap_or(0)),
        };
        float.push(f);
        int.push(if x.dtype == DType::Bool { i64::from(i != 0) } else { i });
    }
    numbers(x.dtype, &x.shape, float, int)
}

fn scatter_places(args: &[Array], dim: usize) -> Result<Vec<usize>> {
    check_index(&args[1], args[0].shape[dim])?;
    let mut places = Vec::new();
    coordinates(&args[1].shape, |at| {
        let mut to = at.to_vec();
        to[dim] = args[1].int(position(&args[1].shape, at)) as usize;
        places.push(position(&args[0].shape, &to));
    });
    Ok(places)
}

fn wrapped(index: &Array, size: usize) -> Result<Array> {
    let whole = size as i64;
    match (0..index.numel()).map(|i| index.int(i)).find(|&i| i < -whole || i >= whole) {
        Some(index) => Err(Why::Index { index, size }),
        None => Ok(Array::ints(index.dtype, &index.shape, |i| index.int(i).rem_euclid(whole.max(1)))),
    }
}

fn common(indices: &[Array]) -> Result<Shape> {
    indices.iter().try_fold(Shape::scalar(), |left, index| {
        broadcast(&left, &index.shape).ok_or_else(|| Why::Broadcast { left, right: index.shape.clone() })
    })
}

fn neighbours(dims: &[usize]) -> bool {
    dims.windows(2).all(|pair| pair[0] + 1 == pair[1])
}

/// The shape of the elements at several index tensors.
fn window(shape: &Shape, indices: &[Array], dims: &[usize]) -> Result<Shape> {
    let common = common(indices)?;
    let mut out = Vec::new();
    if !neighbours(dims) {
        out.extend(common.iter().copied());
    }
    for d in 0..shape.rank() {
        if !dims.contains(&d) {
            out.push(shape[d]);
        } else if d == dims[0] && neighbours(dims) {
            out.extend(common.iter().copied());
        }
    }
    Ok(Shape::from(out))
}

/// Positions in `x` of the elements that the index tensors name, for each coordinate of the result.
fn indexed(x: &Array, indices: &[Array], dims: &[usize], shape: &Shape) -> Result<Vec<usize>> {
    let common = common(indices)?;
    let mut spread = Vec::new();
    for (index, &dim) in indices.iter().zip(dims) {
        spread.push(expand(&wrapped(index, x.shape[dim])?, &common));
    }
    let first = if neighbours(dims) { dims[0] } else { 0 };
    let mut places = Vec::new();
    coordinates(shape, |at| {
        let picked = position(&common, &at[first..first + common.rank()]);
        let mut rest = at[..first].iter().chain(&at[first + common.rank()..]);
        let from: Vec<usize> = (0..x.shape.rank())
            .map(|d| match dims.iter().position(|&own| own == d) {
                Some(k) => spread[k].int(picked) as usize,
                None => rest.next().copied().unwrap_or(0),
            })
            .collect();
        places.push(position(&x.shape, &from));
    });
    Ok(places)
}

/// The positions where a mask, broadcast to a shape, holds.
fn holds(mask: &Array, shape: &Shape) -> Vec<usize> {
    let wide = expand(mask, shape);
    (0..wide.numel()).filter(|&i| wide.int(i) != 0).collect()
}
