//! Views, shapes, joining, padding and making tensors.

use kiln::{DType, Device, Tensor};

use super::{Outputs, Run, one, several};
use crate::args::{Args, Outcome, Value, unmapped};

fn dims(a: &Args, at: usize, first: (&str, i64), second: (&str, i64)) -> Outcome<(i64, i64)> {
    Ok((a.int(at, first.0, first.1)?, a.int(at + 1, second.0, second.1)?))
}

fn split(a: &Args) -> Outcome<Outputs> {
    let dim = a.int(2, "dim", 0)?;
    match a.get(1, "split_size_or_sections") {
        Some(Value::List(_)) => several(a.x()?.split_sizes(&a.sizes(1, "split_size")?, dim)),
        _ => several(a.x()?.split(a.size(1, "split_size", 1)?, dim)),
    }
}

fn pad(a: &Args) -> Outcome<Outputs> {
    let widths = a.ints(1, "pad")?;
    match &a.text(2, "mode", "constant")?[..] {
        "constant" => one(a.x()?.pad(&widths, a.number(3, "value", 0i64)?)),
        "reflect" => one(a.x()?.reflection_pad(&widths)),
        "replicate" => one(a.x()?.replication_pad(&widths)),
        other => unmapped(format!("padding by `{other}`")),
    }
}

fn made(a: &Args, tensor: kiln::Result<Tensor>) -> Outcome<Outputs> {
    a.keyword("device");
    a.keyword("layout");
    match a.dtype()? {
        Some(dtype) => one(tensor?.to_dtype(dtype)),
        None => one(tensor),
    }
}

/// The calls.
pub const CALLS: &[(&str, Run)] = &[
    ("reshape", |a| one(a.x()?.reshape(a.shape(1, "shape")?))),
    ("view", |a| {
        let (x, shape) = (a.x()?, a.shape(1, "shape")?);
        if x.shape().iter().zip(x.strides()?.iter()).any(|(&n, &s)| n > 1 && s == 0) {
            return unmapped("an expanded tensor: the sample's result is that of a copy");
        }
        one(x.view(shape))
    }),
    ("reshape_as", |a| one(a.x()?.reshape_as(a.tensor(1, "other")?))),
    ("view_as", |a| one(a.x()?.view_as(a.tensor(1, "other")?))),
    ("expand_as", |a| one(a.x()?.expand_as(a.tensor(1, "other")?))),
    ("permute", |a| one(a.x()?.permute(&a.rest(1, "dims")?[..]))),
    ("transpose", |a| {
        let (first, second) = dims(a, 1, ("dim0", 0), ("dim1", 1))?;
        one(a.x()?.transpose(first, second))
    }),
    ("t", |a| one(a.x()?.t())),
    ("expand", |a| one(a.x()?.expand(a.shape(1, "size")?))),
    ("broadcast_to", |a| one(a.x()?.broadcast_to(a.shape(1, "size")?))),
    ("slice", |a| {
        let dim = a.int(1, "dim", 0)?;
        let (start, end) = (a.int(2, "start", 0)?, a.int(3, "end", i64::MAX)?);
        one(a.x()?.slice(dim, start, end, a.size(4, "step", 1)?))
    }),
    ("slice_scatter", |a| {
        let src = a.tensor(1, "src")?;
        let (dim, start) = (a.int(2, "dim", 0)?, a.size(3, "start", 0)?);
        let end = a.size(4, "end", usize::MAX >> 1)?.min(a.x()?.size(dim)?);
        one(a.x()?.slice_scatter(src, dim, start, end, a.size(5, "step", 1)?))
    }),
    ("narrow", |a| match a.get(2, "start") {
        Some(Value::Tensor(_)) => unmapped("a tensor for `start`"),
        _ => one(a.x()?.narrow(a.int(1, "dim", 0)?, a.size(2, "start", 0)?, a.size(3, "length", 0)?)),
    }),
    ("select", |a| {
        let (dim, index) = dims(a, 1, ("dim", 0), ("index", 0))?;
        one(a.x()?.select(dim, index))
    }),
    ("select_scatter", |a| {
        let src = a.tensor(1, "src")?;
        let (dim, index) = dims(a, 2, ("dim", 0), ("index", 0))?;
        one(a.x()?.select_scatter(src, dim, index))
    }),
    ("unsqueeze", |a| one(a.x()?.unsqueeze(a.int(1, "dim", 0)?))),
    ("squeeze", |a| match a.int_or(1, "dim")? {
        Some(dim) => one(a.x()?.squeeze(dim)),
        None => one(a.x()?.squeeze_all()),
    }),
    ("flatten", |a| {
        let (start, end) = dims(a, 1, ("start_dim", 0), ("end_dim", -1))?;
        one(a.x()?.flatten_dims(start, end))
    }),
    ("unflatten", |a| one(a.x()?.unflatten(a.int(1, "dim", 0)?, a.shape(2, "sizes")?))),
    ("movedim", |a| one(a.x()?.movedim(&a.ints(1, "source")?[..], &a.ints(2, "destination")?[..]))),
    ("unbind", |a| several(a.x()?.unbind(a.int(1, "dim", 0)?))),
    ("split", split),
    ("split.list_args", split),
    ("split_with_sizes", split),
    ("chunk", |a| several(a.x()?.chunk(a.size(1, "chunks", 1)?, a.int(2, "dim", 0)?))),
    ("repeat", |a| {
        let counts = a.rest(1, "repeats")?;
        one(a.x()?.repeat(counts.iter().map(|&n| n as usize).collect::<Vec<_>>()))
    }),
    ("tile", |a| {
        let counts = a.rest(1, "dims")?;
        one(a.x()?.tile(counts.iter().map(|&n| n as usize).collect::<Vec<_>>()))
    }),
    ("repeat_interleave", |a| {
        let (x, dim) = (a.x()?, a.int_or(2, "dim")?);
        let (x, dim) = match dim {
            Some(dim) => (x.clone(), dim),
            None => (x.flatten()?, 0),
        };
        match a.get(1, "repeats") {
            Some(Value::Tensor(counts)) if counts.numel() == x.size(dim)? => {
                one(x.repeat_interleave_each(counts, dim))
            }
            Some(Value::Tensor(_)) => unmapped("one count in a tensor"),
            _ => one(x.repeat_interleave(a.size(1, "repeats", 1)?, dim)),
        }
    }),
    ("roll", |a| {
        let shifts = a.ints(1, "shifts")?;
        match (&shifts[..], a.ints_or(2, "dims")?) {
            ([shift], None) => one(a.x()?.roll_all(*shift)),
            ([shift], Some(dims)) if dims.is_empty() => one(a.x()?.roll_all(*shift)),
            (shifts, Some(dims)) => one(a.x()?.roll(shifts, &dims[..])),
            (_, None) => unmapped("several shifts of all elements"),
        }
    }),
    ("flip", |a| one(a.x()?.flip(&a.rest(1, "dims")?[..]))),
    ("diagonal", |a| {
        let (dim1, dim2) = dims(a, 2, ("dim1", 0), ("dim2", 1))?;
        one(a.x()?.diagonal(a.int(1, "offset", 0)?, dim1, dim2))
    }),
    ("diagonal_scatter", |a| {
        let (dim1, dim2) = dims(a, 3, ("dim1", 0), ("dim2", 1))?;
        one(a.x()?.diagonal_scatter(a.tensor(1, "src")?, a.int(2, "offset", 0)?, dim1, dim2))
    }),
    ("diag_embed", |a| {
        let (dim1, dim2) = dims(a, 2, ("dim1", -2), ("dim2", -1))?;
        one(a.x()?.diag_embed(a.int(1, "offset", 0)?, dim1, dim2))
    }),
    ("trace", |a| one(a.x()?.trace())),
    ("tril", |a| one(a.x()?.tril(a.int(1, "diagonal", 0)?))),
    ("triu", |a| one(a.x()?.triu(a.int(1, "diagonal", 0)?))),
    ("unfold", |a| {
        one(a.x()?.unfold(a.int(1, "dimension", 0)?, a.size(2, "size", 1)?, a.size(3, "step", 1)?))
    }),
    ("as_strided_scatter", |a| {
        if !a.x()?.is_contiguous()? {
            return unmapped("places in memory: Kiln counts elements in order");
        }
        let (sizes, strides) = (a.sizes(2, "size")?, a.sizes(3, "stride")?);
        one(a.x()?.as_strided_scatter(a.tensor(1, "src")?, &sizes, &strides, a.size(4, "storage_offset", 0)?))
    }),
    ("meshgrid.variadic_tensors", |a| match &a.text(usize::MAX, "indexing", "ij")?[..] {
        "ij" => {
            let lines = (0..a.count()).map(|i| a.tensor(i, "tensor")).collect::<Outcome<Vec<_>>>()?;
            several(Tensor::meshgrid(&lines))
        }
        _ => unmapped("indexing xy"),
    }),
    ("cat", |a| {
        a.keyword("memory_format");
        one(Tensor::cat(a.tensors(0, "tensors")?, a.int(1, "dim", 0)?))
    }),
    ("stack", |a| one(Tensor::stack(a.tensors(0, "tensors")?, a.int(1, "dim", 0)?))),
    ("contiguous", |a| {
        a.keyword("memory_format");
        one(a.x()?.contiguous())
    }),
    ("nn.functional.pad.constant", pad),
    ("nn.functional.pad.reflect", pad),
    ("nn.functional.pad.replicate", pad),
    ("nn.functional.pad.replicate_negative", pad),
    ("constant_pad_nd", |a| one(a.x()?.pad(&a.ints(1, "pad")?, a.number(2, "value", 0i64)?))),
    ("nn.functional.pixel_shuffle", |a| one(a.x()?.pixel_shuffle(a.size(1, "upscale_factor", 1)?))),
    ("nn.functional.pixel_unshuffle", |a| one(a.x()?.pixel_unshuffle(a.size(1, "downscale_factor", 1)?))),
    ("eye", |a| {
        let rows = a.size(0, "n", 0)?;
        made(a, Tensor::eye(rows, a.size(1, "m", rows)?, &Device::Cpu))
    }),
    ("full", |a| {
        a.keyword("device");
        let (shape, value) = (a.sizes(0, "size")?, a.number(1, "fill_value", 0i64)?);
        match a.dtype()? {
            Some(dtype) => one(Tensor::full_of(&shape[..], value, dtype, &Device::Cpu)),
            None => one(Tensor::full(&shape[..], value, &Device::Cpu)),
        }
    }),
    ("zeros", |a| made(a, Tensor::full_of(&a.sizes(0, "size")?[..], 0i64, DType::F32, &Device::Cpu))),
    ("ones", |a| made(a, Tensor::full_of(&a.sizes(0, "size")?[..], 1i64, DType::F32, &Device::Cpu))),
];
