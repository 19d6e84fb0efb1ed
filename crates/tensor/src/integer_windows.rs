//! Convolutions and averages of integers: their windows as views, then exact products and sums. Float kernels would
//! lose digits, and nobody trains with integers, so there is no row for them.

use kiln_ir::{DType, Error, Loc, Op, Result, ScalarKind, Shape, Sizes, Ty, Why};

use crate::Tensor;
use crate::conv::ConvTranspose;
use crate::pool::Pool;

/// Whether elements are integers; truth values are none.
pub(crate) fn are_integers(t: &Tensor) -> bool {
    t.dtype().kind() == ScalarKind::Int
}

/// The shape that a float op's rule gives for operands of these shapes, or its error.
fn shape_of(op: &Op, name: &str, operands: &[&Tensor], loc: Loc) -> Result<Shape> {
    let tys: Vec<Ty> = operands.iter().map(|t| Ty::tensor(DType::F64, t.shape())).collect();
    let shown = || operands.iter().map(|t| t.ty().into()).collect::<Vec<Ty>>();
    let results = op.infer(&tys).map_err(|why| op.error(&shown(), why, loc).named(name))?;
    let result = results.first().and_then(Ty::as_tensor);
    result.map(|ty| ty.shape.clone()).ok_or_else(|| Error::bug(format!("{name} gives no tensor")))
}

impl Tensor {
    /// Dims from `first` on replaced by their windows, whose elements are new last dims, in order.
    fn windows(&self, kernel: &[usize], stride: &[usize], dilation: &[usize]) -> Result<Tensor> {
        let mut windows = self.clone();
        for (d, &taps) in kernel.iter().enumerate() {
            let reach = dilation[d] * (taps - 1) + 1;
            windows = windows.unfold(d as i64 + 2, reach, stride[d])?.slice(-1, 0, i64::MAX, dilation[d])?;
        }
        Ok(windows)
    }

    /// A convolution of integers, exact but for wrapping.
    pub(crate) fn convolve_integers<const N: usize>(
        &self,
        name: &str,
        (weight, bias): (&Tensor, Option<&Tensor>),
        (stride, padding, dilation): ([usize; N], [usize; N], [usize; N]),
        groups: usize,
        loc: Loc,
    ) -> Result<Tensor> {
        let op = Op::Convolution {
            stride: Sizes::from(stride),
            padding: Sizes::from(padding),
            dilation: Sizes::from(dilation),
            groups,
        };
        for (argument, t) in [("weight", Some(weight)), ("bias", bias)] {
            if let Some(got) = t.map(Tensor::dtype).filter(|&dtype| dtype != self.dtype()) {
                let why = Why::DType { argument, expected: self.dtype().name(), got };
                return Err(Error::op(name, why, loc));
            }
        }
        let operands: Vec<&Tensor> = [self, weight].into_iter().chain(bias).collect();
        let shape = shape_of(&op, name, &operands, loc)?;
        let (batch, out) = (shape[0], shape[1]);
        let kernel = &weight.shape()[2..];
        let widths: Vec<i64> = padding.iter().rev().flat_map(|&width| [width as i64; 2]).collect();
        // [batch, groups, channels, places…, taps…] → [groups, batch · places, channels · taps]
        let windows = self.pad(&widths, 0i64)?.windows(kernel, &stride, &dilation)?;
        let mut apart = windows.shape().to_vec();
        apart.splice(1..2, [groups, windows.shape()[1] / groups]);
        let mut order: Vec<i64> = vec![1, 0];
        order.extend((0..N as i64).map(|d| d + 3));
        order.push(2);
        order.extend((0..N as i64).map(|d| d + 3 + N as i64));
        let places: usize = shape[2..].iter().product();
        let taps = weight.shape()[1..].iter().product::<usize>();
        let rows =
            windows.reshape(&apart[..])?.permute(&order[..])?.reshape([groups, batch * places, taps])?;
        let columns = weight.reshape([groups, out / groups, taps])?.transpose(1, 2)?;
        let products = rows.bmm(&columns)?.reshape([groups, batch, places, out / groups])?;
        let result = products.permute([1, 0, 3, 2])?.reshape(&shape)?;
        let Some(bias) = bias else { return Ok(result) };
        let mut column = vec![1usize; N + 1];
        column[0] = out;
        result.add(&bias.reshape(&column[..])?)
    }

    /// A transposed convolution of integers: the convolution of the images, spread out by the stride, with the
    /// filters turned round.
    pub(crate) fn convolve_integers_back<const N: usize>(
        &self,
        name: &str,
        weight: &Tensor,
        options: ConvTranspose<N>,
        loc: Loc,
    ) -> Result<Tensor> {
        let ConvTranspose { stride, padding, output_padding, dilation, groups } = options;
        let (own, kernel) = (self.shape(), weight.shape());
        if groups == 0 || own[1] != kernel[0] || !own[1].is_multiple_of(groups) {
            let why = Why::sizes("the channels of x and weight", own[1], kernel[0]);
            return Err(Error::op(name, why, loc));
        }
        let mut spread = self.clone();
        let mut widths = Vec::new();
        for d in 0..N {
            let (at, shape) = (d as i64 + 2, spread.shape());
            let mut single = shape.to_vec();
            single.insert(d + 3, 1);
            let mut gaps = vec![0i64; 2 * (N - d)];
            gaps[2 * (N - 1 - d) + 1] = stride[d] as i64 - 1;
            let mut line = shape.to_vec();
            line[d + 2] *= stride[d];
            spread = spread.reshape(&single[..])?.pad(&gaps, 0i64)?.reshape(&line[..])?;
            spread = spread.narrow(at, 0, (shape[d + 2].saturating_sub(1)) * stride[d] + 1)?;
            let reach = (dilation[d] * (kernel[d + 2].saturating_sub(1))) as i64 - padding[d] as i64;
            widths.splice(0..0, [reach, reach + output_padding[d] as i64]);
        }
        let spread = spread.pad(&widths, 0i64)?;
        let mut apart = kernel.to_vec();
        apart.splice(0..1, [groups, own[1] / groups]);
        let mut order: Vec<i64> = vec![0, 2, 1];
        order.extend((0..N as i64).map(|d| d + 3));
        let mut whole = kernel.to_vec();
        (whole[0], whole[1]) = (kernel[1] * groups, own[1] / groups);
        let turned = weight.reshape(&apart[..])?.permute(&order[..])?.reshape(&whole[..])?;
        let turned = turned.flip(&(2..N as i64 + 2).collect::<Vec<_>>()[..])?;
        spread.convolve_integers(name, (&turned, None), ([1; N], [0; N], dilation), groups, loc)
    }

    /// Averages of integers, truncated.
    pub(crate) fn average_integers(&self, pool: Pool<2>, op: &Op, loc: Loc) -> Result<Tensor> {
        let own = self.shape();
        let shape = shape_of(op, "avg_pool2d", &[self], loc)?;
        let (mut widths, mut counts) = (Vec::new(), Vec::new());
        for d in 0..2 {
            let (size, kernel, stride, padding) =
                (own[d + 2], pool.kernel[d], pool.stride[d], pool.padding[d]);
            let places = shape[d + 2];
            let end = (places.saturating_sub(1)) * stride + kernel;
            widths.splice(0..0, [padding as i64, end as i64 - (size + padding) as i64]);
            let counted = |at: usize| {
                let (first, last) = (at * stride, (at * stride + kernel).min(size + 2 * padding));
                if pool.count_include_pad {
                    return last - first;
                }
                last.min(size + padding).saturating_sub(first.max(padding))
            };
            counts.push((0..places).map(|at| counted(at) as i64).collect::<Vec<_>>());
        }
        let windows = self.pad(&widths, 0i64)?.windows(&pool.kernel, &pool.stride, &[1, 1])?;
        let divisors = counts[0].iter().flat_map(|h| counts[1].iter().map(move |w| h * w)).collect();
        let divisors = Tensor::from_vec::<i64>(divisors, [shape[2], shape[3]])?;
        windows.sum_dim([-2, -1], false)?.div_trunc(&divisors)?.to_dtype(self.dtype())
    }
}
