//! Calls of the sweep that are no rows of the op table: results whose size depends on values, several results, and
//! what is put together from rows.

use kiln::ir::{Domain, Op, SampleArg, Scalar};
use kiln::tensor::{Arg, Attention, Output, Result, Tensor, run_op};
use kiln::{DType, Device, Shape};

/// A method under PyTorch's name, or the one that `benches/torch_ops.py` knows it by.
#[derive(Debug)]
pub struct Method {
    pub name: &'static str,
    /// The operands for a call of about so many elements.
    pub args: fn(usize) -> Vec<SampleArg>,
    pub call: fn(&[Arg<'_>]) -> Result<Vec<Tensor>>,
    pub gradient: bool,
}

pub const METHODS: &[Method] = &[
    Method {
        name: "nonzero",
        args: |n| vec![mask(&[n])],
        call: |a| one(first(a).nonzero()),
        gradient: false,
    },
    Method {
        name: "masked_select",
        args: |n| vec![float(&[n]), mask(&[n])],
        call: |a| one(first(a).masked_select(nth(a, 1))),
        gradient: true,
    },
    Method {
        name: "randperm",
        args: |n| vec![SampleArg::Number(Scalar::Int(n as i64))],
        call: |a| one(Tensor::randperm(whole(a, 0), &Device::Cpu)),
        gradient: false,
    },
    Method {
        name: "sort",
        args: |n| vec![float(&square(n))],
        call: |a| first(a).sort(-1, false).map(|(x, i)| vec![x, i]),
        gradient: true,
    },
    Method {
        name: "topk",
        args: |n| vec![float(&square(n))],
        call: |a| first(a).topk(8, -1, true).map(|(x, i)| vec![x, i]),
        gradient: true,
    },
    Method {
        name: "max_dim",
        args: |n| vec![float(&square(n))],
        call: |a| first(a).max_dim(1, false).map(|(x, i)| vec![x, i]),
        gradient: true,
    },
    Method {
        name: "unique",
        args: |n| vec![SampleArg::Fixed(DType::I64, Shape::from([n]), Domain::Index(1000))],
        call: |a| first(a).unique().map(|found| vec![found.values]),
        gradient: false,
    },
    Method {
        name: "stack_first",
        args: |n| vec![float(&square(n / 2)), float(&square(n / 2))],
        call: |a| one(Tensor::stack([first(a), nth(a, 1)], 0)),
        gradient: true,
    },
    Method {
        name: "stack_last",
        args: |n| vec![float(&square(n / 2)), float(&square(n / 2))],
        call: |a| one(Tensor::stack([first(a), nth(a, 1)], -1)),
        gradient: true,
    },
    Method {
        name: "roll",
        args: |n| vec![float(&square(n))],
        call: |a| one(first(a).roll([3, 5], [0, 1])),
        gradient: true,
    },
    Method {
        name: "repeat",
        args: |n| vec![float(&square(n / 4))],
        call: |a| one(first(a).repeat([2, 2])),
        gradient: true,
    },
    Method {
        name: "repeat_interleave",
        args: |n| vec![float(&square(n / 4))],
        call: |a| one(first(a).repeat_interleave(4, 1)),
        gradient: true,
    },
    Method {
        name: "heads",
        args: |n| vec![float(&[n.div_ceil(64 * 8 * 64), 64, 8, 64])],
        call: |a| one(first(a).permute([0, 2, 1, 3])?.contiguous()),
        gradient: true,
    },
    Method {
        name: "to_channels_last",
        args: |n| vec![float(&image(n))],
        call: |a| one(first(a).permute([0, 2, 3, 1])?.contiguous()),
        gradient: false,
    },
    Method {
        name: "from_channels_last",
        args: |n| vec![float(&[image(n)[0], image(n)[2], image(n)[3], image(n)[1]])],
        call: |a| one(first(a).permute([0, 3, 1, 2])?.contiguous()),
        gradient: false,
    },
    Method {
        name: "scaled_dot_product_attention",
        args: |n| (0..3).map(|_| float(&[n.div_ceil(16 * 64 * 8).min(4), 8, side(n / 64), 64])).collect(),
        call: |a| one(first(a).scaled_dot_product_attention(nth(a, 1), nth(a, 2), Attention::default())),
        gradient: true,
    },
    Method {
        name: "depthwise_3x3",
        args: |n| depthwise(n, 3),
        call: |a| depthwise_call(a, 1),
        gradient: true,
    },
    Method {
        name: "depthwise_7x7",
        args: |n| depthwise(n, 7),
        call: |a| depthwise_call(a, 3),
        gradient: true,
    },
];

fn float(shape: &[usize]) -> SampleArg {
    SampleArg::Tensor(Shape::from(shape), Domain::Any)
}

fn mask(shape: &[usize]) -> SampleArg {
    SampleArg::Fixed(DType::Bool, Shape::from(shape), Domain::Any)
}

/// The larger side of a rectangle of about so many elements, a power of two.
fn side(elements: usize) -> usize {
    1 << elements.max(1).ilog2().div_ceil(2)
}

fn square(elements: usize) -> [usize; 2] {
    [elements / side(elements), side(elements)]
}

/// Images: batch, channels, height, width.
fn image(elements: usize) -> [usize; 4] {
    let side = side(elements / 32).min(64);
    [(elements / (32 * side * side)).max(1), 32, side, side]
}

fn depthwise(elements: usize, kernel: usize) -> Vec<SampleArg> {
    vec![float(&image(elements)), float(&[32, 1, kernel, kernel])]
}

fn depthwise_call(args: &[Arg<'_>], padding: usize) -> Result<Vec<Tensor>> {
    let two = |n: usize| kiln::ir::Sizes::from([n, n]);
    let op = Op::Convolution { stride: two(1), padding: two(padding), dilation: two(1), groups: 32 };
    match run_op(&op, args)? {
        Output::Tensor(y) => Ok(vec![y]),
        Output::List(_) => Ok(Vec::new()),
    }
}

fn one(y: Result<Tensor>) -> Result<Vec<Tensor>> {
    y.map(|y| vec![y])
}

fn first<'a>(args: &'a [Arg<'_>]) -> &'a Tensor {
    nth(args, 0)
}

#[allow(clippy::panic, reason = "the table above gives what it takes")]
fn nth<'a>(args: &'a [Arg<'_>], i: usize) -> &'a Tensor {
    match &args[i] {
        Arg::Tensor(tensor) => tensor,
        _ => panic!("operand {i} is a tensor"),
    }
}

fn whole(args: &[Arg<'_>], i: usize) -> usize {
    match &args[i] {
        Arg::Number(number) => number.as_i64() as usize,
        _ => 0,
    }
}
