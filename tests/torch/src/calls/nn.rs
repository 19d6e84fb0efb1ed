//! Products, convolutions, pooling, norms, losses and attention.

use kiln::{Attention, BatchNorm, ConvTranspose, CrossEntropy, Interpolation, Padding, Pool, Resize, Tensor};

use super::{Outputs, Run, one, two};
use crate::args::{Args, Outcome, Value, unmapped};

fn padding<const N: usize>(a: &Args) -> Outcome<Padding<N>> {
    Ok(match a.get(4, "padding") {
        Some(Value::Text(text)) if text == "same" => Padding::Same,
        Some(Value::Text(_)) => Padding::Valid,
        _ => Padding::Size(a.window(4, "padding", [0; N])?),
    })
}

fn transposed<const N: usize>(a: &Args) -> Outcome<ConvTranspose<N>> {
    Ok(ConvTranspose {
        stride: a.window(3, "stride", [1; N])?,
        padding: a.window(4, "padding", [0; N])?,
        output_padding: a.window(5, "output_padding", [0; N])?,
        groups: a.size(6, "groups", 1)?,
        dilation: a.window(7, "dilation", [1; N])?,
    })
}

fn max_pool<const N: usize>(a: &Args) -> Outcome<Pool<N>> {
    let kernel = a.window(1, "kernel_size", [1; N])?;
    Ok(Pool {
        stride: a.window(2, "stride", kernel)?,
        padding: a.window(3, "padding", [0; N])?,
        dilation: a.window(4, "dilation", [1; N])?,
        ceil_mode: a.flag(5, "ceil_mode", false)?,
        ..Pool::new(kernel)
    })
}

fn avg_pool<const N: usize>(a: &Args) -> Outcome<Pool<N>> {
    let kernel = a.window(1, "kernel_size", [1; N])?;
    Ok(Pool {
        stride: a.window(2, "stride", kernel)?,
        padding: a.window(3, "padding", [0; N])?,
        ceil_mode: a.flag(4, "ceil_mode", false)?,
        count_include_pad: a.flag(5, "count_include_pad", true)?,
        ..Pool::new(kernel)
    })
}

fn interpolate(a: &Args, mode: Interpolation) -> Outcome<Outputs> {
    a.get(3, "mode");
    let x = a.x()?;
    if x.rank() != 4 {
        return unmapped("images of other than two dims");
    }
    let to = match (a.ints_or(1, "size")?, a.get(2, "scale_factor")) {
        (Some(size), None) => match size[..] {
            [both] => Resize::Size([both as usize; 2]),
            [height, width] => Resize::Size([height as usize, width as usize]),
            _ => return unmapped("a size of other than two dims"),
        },
        (None, Some(Value::Number(scale))) => Resize::Scale([scale.as_f64(); 2]),
        _ => return unmapped("a scale for each dim"),
    };
    one(x.interpolate(to, mode))
}

fn options(a: &Args) -> Outcome<CrossEntropy<'_>> {
    Ok(CrossEntropy {
        weight: a.tensor_or(2, "weight")?,
        ignore_index: a.int(usize::MAX, "ignore_index", -100)?,
        reduction: a.reduction()?,
        label_smoothing: a.float(usize::MAX, "label_smoothing", 0.0)?,
    })
}

fn batch_norm(a: &Args) -> Outcome<Outputs> {
    let running = match (a.tensor_or(1, "running_mean")?, a.tensor_or(2, "running_var")?) {
        (Some(mean), Some(variance)) => Some((mean, variance)),
        (None, None) => None,
        _ => return unmapped("one running statistic"),
    };
    one(a.x()?.batch_norm(BatchNorm {
        running,
        weight: a.tensor_or(3, "weight")?,
        bias: a.tensor_or(4, "bias")?,
        training: a.flag(5, "training", false)?,
        momentum: a.float(6, "momentum", 0.1)?,
        eps: a.float(7, "eps", 1e-5)?,
    }))
}

/// Only with factors of 1: Kiln writes the others as products of their own.
fn no_factors(a: &Args) -> Outcome<()> {
    match (a.float(usize::MAX, "beta", 1.0)?, a.float(usize::MAX, "alpha", 1.0)?) {
        (1.0, 1.0) => Ok(()),
        _ => unmapped("factors"),
    }
}

/// The calls.
pub const CALLS: &[(&str, Run)] = &[
    ("mm", |a| one(a.x()?.mm(a.tensor(1, "mat2")?))),
    ("bmm", |a| one(a.x()?.bmm(a.tensor(1, "mat2")?))),
    ("matmul", |a| one(a.x()?.matmul(a.tensor(1, "other")?))),
    ("__rmatmul__", |a| one(a.tensor(1, "other")?.matmul(a.x()?))),
    ("mv", |a| one(a.x()?.mv(a.tensor(1, "vec")?))),
    ("dot", |a| one(a.x()?.dot(a.tensor(1, "other")?))),
    ("outer", |a| one(a.x()?.outer(a.tensor(1, "vec2")?))),
    ("addmm", |a| {
        no_factors(a)?;
        one(a.x()?.addmm(a.tensor(1, "mat1")?, a.tensor(2, "mat2")?))
    }),
    ("baddbmm", |a| {
        let (beta, alpha) = (a.number(3, "beta", 1i64)?, a.number(4, "alpha", 1i64)?);
        one(a.x()?.baddbmm_scaled(a.tensor(1, "batch1")?, a.tensor(2, "batch2")?, beta, alpha))
    }),
    ("einsum", |a| one(Tensor::einsum(&a.text(1, "equation", "")?, &a.tensors(0, "tensors")?))),
    ("nn.functional.linear", |a| one(a.x()?.linear(a.tensor(1, "weight")?, a.tensor_or(2, "bias")?))),
    ("nn.functional.conv1d", |a| {
        let (weight, bias) = (a.tensor(1, "weight")?, a.tensor_or(2, "bias")?);
        let (stride, dilation) = (a.window(3, "stride", [1])?, a.window(5, "dilation", [1])?);
        one(a.x()?.conv1d(weight, bias, stride, padding::<1>(a)?, dilation, a.size(6, "groups", 1)?))
    }),
    ("nn.functional.conv2d", |a| {
        let (weight, bias) = (a.tensor(1, "weight")?, a.tensor_or(2, "bias")?);
        let (stride, dilation) = (a.window(3, "stride", [1; 2])?, a.window(5, "dilation", [1; 2])?);
        one(a.x()?.conv2d(weight, bias, stride, padding::<2>(a)?, dilation, a.size(6, "groups", 1)?))
    }),
    ("nn.functional.conv_transpose1d", |a| {
        one(a.x()?.conv_transpose1d(a.tensor(1, "weight")?, a.tensor_or(2, "bias")?, transposed(a)?))
    }),
    ("nn.functional.conv_transpose2d", |a| {
        one(a.x()?.conv_transpose2d(a.tensor(1, "weight")?, a.tensor_or(2, "bias")?, transposed(a)?))
    }),
    ("nn.functional.max_pool1d", |a| {
        if a.flag(6, "return_indices", false)? {
            unmapped("indices of one dim")
        } else {
            one(a.x()?.max_pool1d(max_pool(a)?))
        }
    }),
    ("nn.functional.max_pool2d", |a| {
        if a.flag(6, "return_indices", false)? {
            two(a.x()?.max_pool2d_with_indices(max_pool(a)?))
        } else {
            one(a.x()?.max_pool2d(max_pool(a)?))
        }
    }),
    ("nn.functional.avg_pool1d", |a| one(a.x()?.avg_pool1d(avg_pool(a)?))),
    ("nn.functional.avg_pool2d", |a| one(a.x()?.avg_pool2d(avg_pool(a)?))),
    ("nn.functional.adaptive_avg_pool1d", |a| {
        one(a.x()?.adaptive_avg_pool1d(a.window(1, "output_size", [1])?[0]))
    }),
    ("nn.functional.adaptive_avg_pool2d", |a| match a.get(1, "output_size") {
        Some(Value::List(items)) if items.iter().any(|item| matches!(item, Value::Nothing)) => {
            unmapped("a size that stays")
        }
        _ => one(a.x()?.adaptive_avg_pool2d(a.window(1, "output_size", [1; 2])?)),
    }),
    ("nn.functional.interpolate.nearest", |a| interpolate(a, Interpolation::Nearest)),
    ("nn.functional.upsample_nearest", |a| interpolate(a, Interpolation::Nearest)),
    ("nn.functional.interpolate.bilinear", |a| {
        let align_corners = a.flag(4, "align_corners", false)?;
        interpolate(a, Interpolation::Bilinear { align_corners })
    }),
    ("nn.functional.upsample_bilinear", |a| interpolate(a, Interpolation::Bilinear { align_corners: true })),
    ("nn.functional.layer_norm", |a| {
        let shape = a.sizes(1, "normalized_shape")?;
        let (weight, bias) = (a.tensor_or(2, "weight")?, a.tensor_or(3, "bias")?);
        one(a.x()?.layer_norm(&shape, weight, bias, a.float(4, "eps", 1e-5)?))
    }),
    ("nn.functional.rms_norm", |a| {
        let eps = a.number_or(3, "eps")?.map(|eps| eps.as_f64());
        one(a.x()?.rms_norm(&a.sizes(1, "normalized_shape")?, a.tensor_or(2, "weight")?, eps))
    }),
    ("nn.functional.group_norm", |a| {
        let (weight, bias) = (a.tensor_or(2, "weight")?, a.tensor_or(3, "bias")?);
        one(a.x()?.group_norm(a.size(1, "num_groups", 1)?, weight, bias, a.float(4, "eps", 1e-5)?))
    }),
    ("nn.functional.batch_norm", batch_norm),
    ("nn.functional.scaled_dot_product_attention", |a| {
        let options = Attention {
            mask: a.tensor_or(3, "attn_mask")?,
            dropout: a.float(4, "dropout_p", 0.0)?,
            causal: a.flag(5, "is_causal", false)?,
            scale: a.number_or(6, "scale")?.map(|scale| scale.as_f64()),
            grouped: a.flag(7, "enable_gqa", false)?,
        };
        if options.dropout > 0.0 {
            return unmapped("random numbers");
        }
        one(a.x()?.scaled_dot_product_attention(a.tensor(1, "key")?, a.tensor(2, "value")?, options))
    }),
    ("nn.functional.mse_loss", |a| one(a.x()?.mse_loss(a.tensor(1, "target")?, a.reduction()?))),
    ("nn.functional.l1_loss", |a| one(a.x()?.l1_loss(a.tensor(1, "target")?, a.reduction()?))),
    ("nn.functional.smooth_l1_loss", |a| {
        let beta = a.float(usize::MAX, "beta", 1.0)?;
        one(a.x()?.smooth_l1_loss(a.tensor(1, "target")?, beta, a.reduction()?))
    }),
    ("nn.functional.huber_loss", |a| {
        let delta = a.float(usize::MAX, "delta", 1.0)?;
        one(a.x()?.huber_loss(a.tensor(1, "target")?, delta, a.reduction()?))
    }),
    ("nn.functional.binary_cross_entropy", |a| {
        let weight = a.tensor_or(2, "weight")?;
        one(a.x()?.binary_cross_entropy(a.tensor(1, "target")?, weight, a.reduction()?))
    }),
    ("nn.functional.binary_cross_entropy_with_logits", |a| {
        let (weight, positive) = (a.tensor_or(2, "weight")?, a.tensor_or(usize::MAX, "pos_weight")?);
        let target = a.tensor(1, "target")?;
        one(a.x()?.binary_cross_entropy_with_logits(target, weight, positive, a.reduction()?))
    }),
    ("nn.functional.kl_div", |a| {
        let log_target = a.flag(usize::MAX, "log_target", false)?;
        one(a.x()?.kl_div(a.tensor(1, "target")?, log_target, a.reduction()?))
    }),
    ("nn.functional.cosine_similarity", |a| {
        one(a.x()?.cosine_similarity(a.tensor(1, "x2")?, a.int(2, "dim", 1)?, a.float(3, "eps", 1e-8)?))
    }),
    ("nn.functional.nll_loss", |a| one(a.x()?.nll_loss_with(a.tensor(1, "target")?, options(a)?))),
    ("nn.functional.cross_entropy", |a| one(a.x()?.cross_entropy_of(a.tensor(1, "target")?, options(a)?))),
];
