//! Views as strides: where the elements of a value lie in the buffer of another, if strides can say it.

use kiln_ir::{Def, Graph, Op, Shape, Strides, Value};
use rustc_hash::FxHashSet;

use crate::Layout;

/// A value as a strided look at a stored value or an input.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct View {
    pub base: Value,
    pub offset: i64,
    pub strides: Strides,
}

/// The base of a value that strides can describe. `stored` values are dense and end the search; a reshape that
/// strides can't express makes the value its own base.
pub(crate) fn view_of(graph: &Graph, layouts: &[Layout], stored: &FxHashSet<Value>, value: Value) -> View {
    let shape = |v: Value| graph.tensor_of(v).shape.clone();
    let dense = |v: Value| View { base: v, offset: 0, strides: shape(v).contiguous_strides() };
    if stored.contains(&value) {
        return dense(value);
    }
    let node = match graph.def(value) {
        Def::Input(number) => {
            return View { base: value, offset: 0, strides: layouts[number as usize].strides.clone() };
        }
        Def::Node { node, .. } => &graph.nodes[node as usize],
    };
    let Some(&x) = node.args.first() else { return dense(value) };
    match &node.op {
        Op::Permute { dims } => {
            let mut view = view_of(graph, layouts, stored, x);
            view.strides = dims.iter().map(|&d| view.strides[d]).collect();
            view
        }
        Op::Expand { shape: to } => {
            let mut view = view_of(graph, layouts, stored, x);
            let from = shape(x);
            let lead = to.rank() - from.rank();
            view.strides =
                (0..to.rank())
                    .map(|d| {
                        if d < lead || (from[d - lead] == 1 && to[d] != 1) {
                            0
                        } else {
                            view.strides[d - lead]
                        }
                    })
                    .collect();
            view
        }
        Op::Slice { dim, start, step, .. } => {
            let mut view = view_of(graph, layouts, stored, x);
            view.offset += view.strides[*dim] as i64 * *start as i64;
            view.strides[*dim] *= *step as isize;
            view
        }
        Op::Reshape { shape: to } => {
            let view = view_of(graph, layouts, stored, x);
            match reshaped(&shape(x), &view.strides, to) {
                Some(strides) => View { strides, ..view },
                None => dense(value),
            }
        }
        _ => dense(value),
    }
}

/// A value `[batch, rows, columns]` as matrices of a stored value or an input: beside what a [`View`] can say, the
/// batch may be several dims that lie anyhow.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct BatchView {
    pub base: Value,
    pub offset: i64,
    pub sizes: Shape,
    pub strides: Strides,
    pub row: isize,
    pub column: isize,
}

impl BatchView {
    fn of(view: View, shape: &Shape) -> BatchView {
        let batch = shape.rank() - 2;
        BatchView {
            base: view.base,
            offset: view.offset,
            sizes: shape[..batch].into(),
            strides: Strides::from_slice(&view.strides[..batch]),
            row: view.strides[batch],
            column: view.strides[batch + 1],
        }
    }
}

/// The matrices behind an operand of a batched product. They are found where they lie if they are in memory
/// anyhow, by `is_there`, and have rows or columns of neighbouring elements; else the value is stored.
pub(crate) fn batch_of(
    graph: &Graph,
    layouts: &[Layout],
    stored: &FxHashSet<Value>,
    is_there: &dyn Fn(Value) -> bool,
    value: Value,
) -> BatchView {
    let shape = |v: Value| graph.tensor_of(v).shape.clone();
    let view = view_of(graph, layouts, stored, value);
    if !is_there(view.base) {
        let mut from = value;
        // Whether rows and columns have changed places on the way.
        let mut turned = false;
        while let Some(node) = graph.producer(from) {
            let (to, rank) = (shape(from), shape(from).rank());
            let Some(&x) = node.args.first() else { break };
            let before = shape(x);
            if before.numel() == 0 {
                break;
            }
            match &node.op {
                Op::Reshape { .. } if before.rank() >= 2 && before[before.rank() - 2..] == to[rank - 2..] => {
                }
                Op::Permute { dims } if dims[..rank - 2].iter().enumerate().all(|(d, &of)| d == of) => {
                    turned ^= dims[rank - 1] != rank - 1;
                }
                _ => break,
            }
            from = x;
            let behind = view_of(graph, layouts, stored, from);
            if is_there(behind.base) {
                let mut found = BatchView::of(behind, &before);
                if turned {
                    std::mem::swap(&mut found.row, &mut found.column);
                }
                if found.row == 1 || found.column == 1 {
                    return found;
                }
                break;
            }
        }
    }
    BatchView::of(view, &shape(value))
}

/// Strides of a reshape, if there are any.
pub(crate) fn reshaped(from: &Shape, strides: &Strides, to: &Shape) -> Option<Strides> {
    if from.numel() == 0 {
        return Some(to.contiguous_strides());
    }
    // Dims of size 1 have no say; runs of dims that lie end to end are one.
    let mut runs: Vec<(usize, isize)> = Vec::new();
    for d in (0..from.rank()).filter(|&d| from[d] != 1) {
        match runs.last_mut() {
            Some((size, stride)) if *stride == strides[d] * from[d] as isize => {
                *size *= from[d];
                *stride = strides[d];
            }
            _ => runs.push((from[d], strides[d])),
        }
    }
    let mut out = to.contiguous_strides();
    let mut left = runs.pop();
    for d in (0..to.rank()).rev() {
        if to[d] == 1 {
            continue;
        }
        while let Some((1, _)) = left {
            left = runs.pop();
        }
        let (size, stride) = left?;
        if size % to[d] != 0 {
            return None;
        }
        out[d] = stride;
        left = Some((size / to[d], stride * to[d] as isize));
    }
    Some(out)
}

/// Whether strides describe a dense tensor in some order of its dims.
pub(crate) fn is_dense(shape: &Shape, strides: &Strides) -> bool {
    let mut dims: Vec<(isize, usize)> =
        (0..shape.rank()).filter(|&d| shape[d] != 1).map(|d| (strides[d], shape[d])).collect();
    dims.sort_unstable();
    let mut expected = 1;
    dims.into_iter().all(|(stride, size)| {
        let fits = stride == expected;
        expected *= size as isize;
        fits
    })
}

/// Whether strides are row-major (dims of size 1 don't matter).
pub(crate) fn is_row_major(shape: &Shape, strides: &Strides) -> bool {
    let want = shape.contiguous_strides();
    shape.numel() == 0 || (0..shape.rank()).all(|d| shape[d] == 1 || strides[d] == want[d])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reshapes_have_strides_where_runs_allow() {
        let check = |from: &[usize], strides: &[isize], to: &[usize], want: Option<&[isize]>| {
            let got = reshaped(&from.into(), &Strides::from_slice(strides), &to.into());
            assert_eq!(got.as_deref(), want, "{from:?} {strides:?} to {to:?}");
        };
        check(&[4, 6], &[6, 1], &[24], Some(&[1]));
        check(&[4, 6], &[6, 1], &[2, 2, 3, 2], Some(&[12, 6, 2, 1]));
        check(&[4, 6], &[1, 4], &[24], None);
        check(&[4, 6], &[1, 4], &[2, 2, 6], Some(&[2, 1, 4]));
        check(&[4, 1], &[9, 0], &[4], Some(&[9]));
    }
}
