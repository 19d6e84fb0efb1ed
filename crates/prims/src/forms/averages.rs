//! Adaptive averages of planes that divide into windows of one size: averages of windows side by side.
//!
//! ```text
//! %1 = adaptive_avg_pool2d(%0) {output: [7, 7]}      →      %1 = avg_pool2d(%0) {kernel: [2, 2], stride: [2, 2]}
//! ```
//!
//! So they are loops wherever such averages are, and their gradients always. Windows of several sizes stay with the
//! library.

use std::borrow::Cow;

use kiln_ir::{Graph, Node, Op, Sizes, Value};

use super::replace;

/// Writes adaptive averages as plain ones where all windows have one size. That depends on more than the form of a
/// graph, so it is not for plans that serve many sizes.
pub fn as_plain(graph: Cow<'_, Graph>) -> Cow<'_, Graph> {
    let found = |node: &Node| {
        let (from, to) = (graph.ty(*node.args.first()?).as_tensor()?, graph.ty(node.outs[0]).as_tensor()?);
        let (whole, parts) = match node.op {
            Op::AdaptiveAvgPool2d { .. } => (&from.shape, &to.shape),
            Op::AdaptiveAvgPool2dBackward { .. } => (&to.shape, &from.shape),
            _ => return None,
        };
        let fits = whole.numel() > 0 && [2, 3].iter().all(|&d| parts[d] > 0 && whole[d] % parts[d] == 0);
        let kernel = fits.then(|| Sizes::from([whole[2] / parts[2], whole[3] / parts[3]]))?;
        let (stride, padding) = (kernel.clone(), Sizes::from([0, 0]));
        Some(match &node.op {
            Op::AdaptiveAvgPool2dBackward { input } => Op::AvgPool2dBackward {
                input: input.clone(),
                kernel,
                stride,
                padding,
                ceil_mode: false,
                count_include_pad: true,
            },
            _ => Op::AvgPool2d { kernel, stride, padding, ceil_mode: false, count_include_pad: true },
        })
    };
    let emit = |result: &mut Graph, node: &Node, args: &[Value], op: Op| {
        result.push(op, args, [graph.ty(node.outs[0]).clone()], node.in_place, node.loc)[0]
    };
    let replaced = replace(&graph, found, emit);
    replaced.map_or(graph, Cow::Owned)
}
