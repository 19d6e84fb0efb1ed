//! Convolutions and averages of integers against those of doubles, and transposed convolutions against plain loops.

use kiln::{ConvTranspose, DType, Device, Padding, Pool, Tensor};

use crate::{everywhere, floats, ints};

fn pair(shape: &[usize], dtype: DType) -> (Tensor, Tensor) {
    let whole = Tensor::randint(-4, 5, shape, &Device::Cpu).unwrap();
    let whole = if dtype == DType::U8 { whole.abs().unwrap() } else { whole };
    (whole.to_dtype(dtype).unwrap(), whole.to_dtype(DType::F64).unwrap())
}

fn same(what: &str, whole: &Tensor, float: &Tensor, dtype: DType) {
    assert_eq!((whole.dtype(), whole.shape()), (dtype, float.shape()), "{what}");
    // Means are rounded: 9 / 9 may come out a little below 1.
    let whole_part = |x: f64| if (x - x.round()).abs() < 1e-9 { x.round() } else { x } as i64;
    let want: Vec<i64> = floats(float).into_iter().map(|x| dtype.wrap(whole_part(x))).collect();
    assert_eq!(ints(whole), want, "{what}");
}

#[test]
fn integer_convolutions_are_exact() {
    kiln::manual_seed(1);
    for dtype in [DType::I64, DType::I32, DType::I16, DType::I8, DType::U8] {
        for (stride, padding, dilation, groups) in [(1, 0, 1, 1), (2, 1, 1, 2), (3, 2, 2, 1), (1, 2, 3, 2)] {
            let what = format!("{dtype} {stride} {padding} {dilation} {groups}");
            let ((x, x_float), (w, w_float)) = (pair(&[2, 4, 11], dtype), pair(&[6, 4 / groups, 3], dtype));
            let (b, b_float) = pair(&[6], dtype);
            let whole =
                everywhere(&what, || Ok(vec![x.conv1d(&w, Some(&b), stride, padding, dilation, groups)?]));
            let float = x_float.conv1d(&w_float, Some(&b_float), stride, padding, dilation, groups).unwrap();
            same(&what, &whole[0], &float, dtype);

            let ((x, x_float), (w, w_float)) = (pair(&[4, 9, 8], dtype), pair(&[6, 4 / groups, 3, 2], dtype));
            let whole = x.conv2d(&w, None, stride, padding, dilation, groups).unwrap();
            let float = x_float.conv2d(&w_float, None, stride, padding, dilation, groups).unwrap();
            same(&what, &whole, &float, dtype);

            let options = ConvTranspose {
                stride: [stride, 1],
                padding: [padding, 0],
                output_padding: [stride - 1, 0],
                dilation: [dilation, 1],
                groups,
            };
            let ((x, x_float), (w, w_float)) = (pair(&[2, 4, 5, 4], dtype), pair(&[4, 3, 3, 2], dtype));
            let (b, b_float) = pair(&[3 * groups], dtype);
            let whole = x.conv_transpose2d(&w, Some(&b), options).unwrap();
            let float = x_float.conv_transpose2d(&w_float, Some(&b_float), options).unwrap();
            same(&what, &whole, &float, dtype);
        }
        let ((x, x_float), (w, w_float)) = (pair(&[1, 2, 7], dtype), pair(&[2, 2, 4], dtype));
        let whole = x.conv1d(&w, None, 1, Padding::Same, 1, 1).unwrap();
        let float = x_float.conv1d(&w_float, None, 1, Padding::Same, 1, 1).unwrap();
        same("same", &whole, &float, dtype);
    }
    let x = Tensor::full_of([1, 2, 4], 1, DType::I64, &Device::Cpu).unwrap();
    let wrong = Tensor::full_of([1, 3, 2], 1, DType::I64, &Device::Cpu).unwrap();
    let error = x.conv1d(&wrong, None, 1, 0, 1, 1).unwrap_err().to_string();
    assert!(error.contains("conv1d") && error.contains("i64[1, 2, 4]"), "{error}");
}

#[test]
fn integer_averages_are_truncated() {
    kiln::manual_seed(2);
    let cases = [(2, 2, 0), (3, 1, 1), (3, 2, 1), (4, 3, 2)];
    for (kernel, stride, padding) in cases {
        for (ceil_mode, count_include_pad) in [(false, false), (false, true), (true, false), (true, true)] {
            let pool = Pool {
                stride: [stride, stride],
                padding: [padding, padding],
                ceil_mode,
                count_include_pad,
                ..Pool::new(kernel)
            };
            let (x, float) = pair(&[2, 3, 9, 8], DType::I64);
            let what = format!("{pool:?}");
            let whole = everywhere(&what, || Ok(vec![x.avg_pool2d(pool)?]));
            same(&what, &whole[0], &float.avg_pool2d(pool).unwrap(), DType::I64);
        }
    }
    let x = Tensor::from_vec(vec![-3i64, -4, 5, 6, 9], [1, 5]).unwrap();
    let pool = Pool { padding: [1], ceil_mode: true, count_include_pad: false, ..Pool::new(2) };
    assert_eq!(ints(&x.avg_pool1d(pool).unwrap()), [-3, 0, 7]);
}

#[test]
fn integers_are_resized_as_floats_are() {
    use kiln::{Interpolation, Resize};
    kiln::manual_seed(3);
    let sizes = [[3, 3], [5, 5], [1, 9], [4, 4], [8, 12], [7, 2]].map(Resize::Size);
    let scales = [[0.5, 0.75], [1.5, 2.0], [2.3, 1.0], [0.3, 3.7]].map(Resize::Scale);
    for to in sizes.into_iter().chain(scales) {
        for dtype in [DType::U8, DType::I16, DType::I64] {
            let (x, float) = pair(&[2, 3, 4, 5], dtype);
            let what = format!("{to:?} of {dtype}");
            let whole = everywhere(&what, || Ok(vec![x.interpolate(to, Interpolation::Nearest)?]));
            same(&what, &whole[0], &float.interpolate(to, Interpolation::Nearest).unwrap(), dtype);
        }
    }
}

/// out[o] += x[i] · w[k] where o = i · stride − padding + k · dilation.
fn naive(x: &[f64], w: &[f64], options: ConvTranspose<1>) -> Vec<f64> {
    let ([stride], [padding], [extra], [dilation]) =
        (options.stride, options.padding, options.output_padding, options.dilation);
    let size = (x.len() - 1) * stride + dilation * (w.len() - 1) + extra + 1 - 2 * padding;
    let mut out = vec![0.0; size];
    for (i, x) in x.iter().enumerate() {
        for (k, w) in w.iter().enumerate() {
            if let Some(place) = (i * stride + k * dilation).checked_sub(padding).filter(|&o| o < size) {
                out[place] += x * w;
            }
        }
    }
    out
}

/// More may be added at the end than a stride, where the dilation is larger.
#[test]
fn output_padding_goes_up_to_the_dilation() {
    let (x, w) = ([1.0f64, -2.0, 3.0, 5.0], [2.0f64, 7.0, -1.0]);
    let images = Tensor::from_slice(&x).unwrap().reshape([1, 1, 4]).unwrap();
    let filters = Tensor::from_slice(&w).unwrap().reshape([1, 1, 3]).unwrap();
    images.requires_grad_(true).unwrap();
    for stride in 1..=3 {
        for dilation in 1..=4 {
            for padding in 0..=2 {
                for extra in 0..stride.max(dilation) {
                    let options = ConvTranspose {
                        stride: [stride],
                        padding: [padding],
                        output_padding: [extra],
                        dilation: [dilation],
                        groups: 1,
                    };
                    let got = images.conv_transpose1d(&filters, None, options).unwrap();
                    assert_eq!(floats(&got), naive(&x, &w, options), "{options:?}");
                    let whole = images.detach().unwrap().to_dtype(DType::I64).unwrap();
                    let filters = filters.to_dtype(DType::I64).unwrap();
                    assert_eq!(
                        floats(&whole.conv_transpose1d(&filters, None, options).unwrap()),
                        floats(&got)
                    );
                    got.sum().unwrap().backward().unwrap();
                }
            }
        }
    }
    let options =
        ConvTranspose { output_padding: [3], dilation: [2], stride: [3], ..ConvTranspose::default() };
    assert!(images.conv_transpose1d(&filters, None, options).is_err());
}
