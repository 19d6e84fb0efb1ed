//! What errors say: what was expected, what was given, and where.

#![allow(clippy::unwrap_used, reason = "a test")]

use kiln_tensor::{ConvTranspose, DType, Device, Padding, Pool, Result, Tensor};

fn of(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, &Device::Cpu).unwrap()
}

#[test]
fn errors_name_what_was_expected_and_given() {
    let told = |result: Result<Tensor>| match result {
        Ok(_) => "no error".to_string(),
        Err(error) => error.to_string().split(", at reasons.rs").next().unwrap_or_default().to_string(),
    };
    let (x, image) = (of(&[2, 3]), of(&[1, 4, 5, 5]));
    let (index, filters) = (Tensor::full([3, 3], 0i64, &Device::Cpu).unwrap(), of(&[6, 2, 3, 3]));
    let picked = |(values, _): (Tensor, Tensor)| values;
    let lines = of(&[1, 2, 4]);
    let back = |padding, output_padding| {
        let options =
            ConvTranspose { padding: [padding], output_padding: [output_padding], ..Default::default() };
        lines.conv_transpose1d(&of(&[2, 1, 3]), None, options)
    };
    let cases = [
        (x.topk(4, 1, true).map(picked), "topk: f32[2, 3]: k must be at most 3 (the size of dim 1), got 4"),
        (x.unfold(1, 4, 1), "unfold: f32[2, 3]: size must be at most 3 (the size of dim 1), got 4"),
        (x.narrow(1, 1, 3), "narrow: f32[2, 3]: the slice 1..4 is out of range for dim 1 of size 3"),
        (
            x.gather(1, &index),
            "gather: f32[2, 3] × i64[3, 3]: the size of index must be at most 2 (the size of x in dim 0), got 3",
        ),
        (
            x.reflection_pad(&[3, 0]),
            "reflection_pad: f32[2, 3]: padding must be at most 2 (less than the size of dim 1), got 3",
        ),
        (
            image.avg_pool2d(Pool::new(3).padding(2)),
            "avg_pool2d: f32[1, 4, 5, 5]: padding must be at most 1 (half the window), got 2",
        ),
        (
            image.avg_pool2d(Pool::new(7)),
            "avg_pool2d: f32[1, 4, 5, 5]: a kernel of size 7 is larger than the padded input (input size 5)",
        ),
        (
            image.avg_pool2d(Pool::new(2).dilation(2)),
            "avg_pool2d: dilation must be 1 (max_pool2d takes others), got 2",
        ),
        (
            image.group_norm(3, None, None, 1e-5),
            "group_norm: f32[1, 4, 5, 5] × float: the channels of x (4) must be divisible by groups (3)",
        ),
        (
            image.conv2d(&filters, None, 2, Padding::Same, 1, 1),
            "conv2d: stride must be 1 with padding 'same', got 2",
        ),
        (
            back(0, 1),
            "conv_transpose1d: output_padding must be at most 0 (less than stride or dilation), got 1",
        ),
        (back(3, 0), "conv_transpose1d: padding must be at most 2 (more leaves no output), got 3"),
        (
            x.layer_norm(&[2], None, None, 1e-5),
            "layer_norm: the last dims of x must have shape [2], got [2, 3]",
        ),
        (x.glu(1), "glu: the size of the dim that is halved must be even and not 0, got 3"),
        (x.reshape([-1, -1]), "reshape: f32[2, 3]: -1 appears twice"),
        (
            x.t().and_then(|t| t.view([6])),
            "view: f32[3, 2]: the strides don't allow this shape without a copy (use reshape)",
        ),
        (
            x.t().and_then(|t| t.as_strided(&[2], &[1], 0)),
            "as_strided: f32[3, 2]: the tensor must be contiguous (call contiguous() first)",
        ),
        (Tensor::from_bytes(&[0; 7], [2], DType::F32), "from_bytes: expected 8 bytes, got 7"),
        (
            x.mul(2.0).and_then(|y| y.item::<f32>()).map(|_| x.clone()),
            "item: f32[2, 3]: expected 1 element, got 6",
        ),
        (
            x.mark_dynamic(0, 1..4).map(|()| x.clone()),
            "mark_dynamic: the lower bound must be 2 or more (sizes 0 and 1 are always specialised), got 1",
        ),
        (
            x.mark_dynamic(1, 4..=9).map(|()| x.clone()),
            "mark_dynamic: size 3 of dim 1 is outside the declared range 4..=9",
        ),
    ];
    let wrong: Vec<String> = cases
        .into_iter()
        .map(|(result, want)| (told(result), want))
        .filter(|(got, want)| got != want)
        .map(|(got, want)| format!("{got}\n  instead of\n{want}"))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}
