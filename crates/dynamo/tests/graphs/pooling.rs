//! Pooling in compiled code: the very bits of eager code, over windows of all kinds, with NaN, infinities and ties.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_dynamo::{Compile, Numerics};
use kiln_tensor::{DType, Device, Pool, Result, Tensor, manual_seed};

const CPU: Device = Device::Cpu;

/// Small whole numbers, so that many are equal, with NaN and infinities where the dtype has them.
fn numbers(shape: &[usize], dtype: DType, seed: u64) -> Result<Tensor> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % 40
    };
    let number = |n: u64| match n {
        0 | 1 if dtype.is_float() => f64::NAN,
        2 if dtype.is_float() => f64::INFINITY,
        3..12 if dtype.is_float() => f64::NEG_INFINITY,
        n => (n % 9) as f64 - 4.0,
    };
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| number(next())).collect();
    Tensor::from_slice(&values)?.reshape(shape)?.to_dtype(dtype)
}

/// Numbers as bits, so that NaN equals NaN (whatever its sign is) and zeros have signs.
fn bits(tensor: &Tensor) -> Vec<u64> {
    let of = |x: f64| if x.is_nan() { f64::NAN.to_bits() } else { x.to_bits() };
    tensor.to_vec_cast::<f64>().unwrap().into_iter().map(of).collect()
}

/// Runs a program eagerly and compiled and compares the bits. Returns what `explain` says.
fn agree(what: &str, x: &Tensor, program: impl Fn(&Tensor) -> Result<Vec<Tensor>>) -> String {
    let want = program(x).unwrap();
    let region = Compile::new().numerics(Numerics::Strict).region();
    for _ in 0..2 {
        let got = region.run(|| program(x)).unwrap();
        for (k, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got.shape(), want.shape(), "{what}, result {k}");
            assert_eq!(bits(got), bits(want), "{what}, result {k}");
        }
    }
    region.explain().to_string()
}

fn windows() -> Vec<Pool<2>> {
    vec![
        Pool::new(3).stride(2).padding(1),
        Pool::new(2),
        Pool::new(3).stride(1).padding(1),
        Pool::new(5).stride(1).padding(2),
        Pool::new([3, 2]).stride([2, 3]).padding([1, 0]),
        Pool::new([1, 4]).stride([1, 2]).padding([0, 2]),
        Pool::new(3).stride(2).padding(1).ceil_mode(true),
        Pool::new(2).stride(3).padding(1).ceil_mode(true),
        Pool::new(4).stride(1),
        Pool::new(1),
        Pool::new(5).stride(4).padding(2).ceil_mode(true),
    ]
}

/// Windows whose taps are apart.
fn apart() -> Vec<Pool<2>> {
    vec![
        Pool::new(3).stride(2).dilation(2),
        Pool::new([2, 3]).stride(1).dilation([3, 1]),
        Pool::new(3).stride(2).padding(1).dilation(2),
        Pool::new(3).stride(2).dilation(3).ceil_mode(true),
        Pool::new([4, 3]).stride([1, 3]).padding([2, 1]).dilation([1, 3]),
        // Some of these have no tap in the plane.
        Pool::new(2).stride(1).padding(1).dilation([9, 10]),
        Pool::new(2).stride(1).padding(1).dilation([9, 2]),
        Pool::new(2).stride(1).padding(1).dilation([3, 10]),
        Pool::new([2, 4]).stride([2, 1]).padding([1, 2]).dilation([5, 2]).ceil_mode(true),
    ]
}

const SHAPES: &[[usize; 4]] = &[[2, 3, 8, 9], [1, 2, 19, 35], [0, 2, 6, 6]];

/// What dtypes see: all of them in single precision, else one.
fn shapes(dtype: DType) -> &'static [[usize; 4]] {
    if dtype == DType::F32 { SHAPES } else { &SHAPES[..1] }
}

/// Windows that fit planes of a shape: all of them in single precision, else every fourth.
fn fitting(x: &Tensor, windows: Vec<Pool<2>>) -> Vec<Pool<2>> {
    let step = if x.dtype() == DType::F32 { 1 } else { 4 };
    windows.into_iter().step_by(step).filter(|&pool| x.max_pool2d(pool).is_ok()).collect()
}

#[test]
fn largest_elements_and_their_places() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::I64, DType::I32, DType::U8, DType::F16, DType::BF16] {
        for (s, shape) in shapes(dtype).iter().enumerate() {
            let x = numbers(shape, dtype, s as u64)?;
            let mut pools = fitting(&x, windows());
            pools.extend(fitting(&x, apart()));
            let what = format!("{dtype} {shape:?}");
            let said = agree(&what, &x, |x| {
                let mut results = Vec::new();
                for &pool in &pools {
                    let (largest, places) = x.max_pool2d_with_indices(pool)?;
                    results.extend([largest, places]);
                    results.push(x.neg()?.maximum(&x.add(1)?)?.max_pool2d(pool)?.mul(2)?);
                }
                Ok(results)
            });
            assert!(!said.contains("runs eagerly inside"), "{what}\n{said}");
        }
    }
    Ok(())
}

#[test]
fn windows_of_the_library() -> Result<()> {
    let x = numbers(&[2, 3, 12, 17], DType::F32, 9)?;
    let said = agree("the library's", &x, |x| {
        let (largest, places) = x.max_pool2d_with_indices(Pool::new(9).stride(2).padding(4))?;
        let means = x.adaptive_avg_pool2d([5, 4])?;
        Ok(vec![largest, places, means, x.relu()?.max_pool2d(Pool::new(9).stride(1).padding(4))?.add(1.0)?])
    });
    assert!(said.contains("runs eagerly inside"), "{said}");
    Ok(())
}

#[test]
fn means() -> Result<()> {
    manual_seed(8);
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for (s, shape) in shapes(dtype).iter().enumerate() {
            let x = match s % 2 {
                0 => Tensor::randn(&shape[..], &CPU)?.to_dtype(dtype)?,
                _ => numbers(shape, dtype, s as u64)?,
            };
            let pools = fitting(&x, windows());
            agree(&format!("{dtype} {shape:?}"), &x, |x| {
                let mut results = Vec::new();
                for &pool in &pools {
                    results.push(x.avg_pool2d(pool)?);
                    results.push(x.relu()?.avg_pool2d(pool.count_include_pad(false))?.neg()?);
                }
                Ok(results)
            });
        }
    }
    let x = numbers(&[2, 3, 8, 24], DType::F32, 3)?;
    let said = agree("a loop", &x, |x| {
        Ok(vec![x.relu()?.avg_pool2d(Pool::new(3).stride(1).padding(1))?, x.avg_pool2d(Pool::new(4))?])
    });
    assert!(!said.contains("runs eagerly inside"), "{said}");
    Ok(())
}

#[test]
fn lines_and_views() -> Result<()> {
    let x = numbers(&[2, 3, 20], DType::F32, 5)?;
    agree("lines", &x, |x| Ok(vec![x.max_pool1d(Pool::new(3).stride(2).padding(1))?]));
    let x = numbers(&[4, 12, 18], DType::F32, 6)?;
    let pool = Pool::new(3).stride(2).padding(1);
    agree("without a batch", &x, |x| Ok(vec![x.max_pool2d(pool)?]));
    agree("transposed", &x, |x| Ok(vec![x.transpose(-1, -2)?.max_pool2d(pool)?.transpose(0, 1)?.add(1.0)?]));
    agree("flattened", &x, |x| Ok(vec![x.relu()?.max_pool2d(pool)?.flatten()?.mul(3.0)?]));
    agree("summed", &x, |x| Ok(vec![x.ne(x)?.to_dtype(DType::F32)?.max_pool2d(pool)?.sum_dim(-1, false)?]));
    agree("twice", &x, |x| Ok(vec![x.max_pool2d(pool)?.max_pool2d(pool)?]));
    agree("beside what was pooled", &x, |x| {
        let y = x.exp()?;
        Ok(vec![y.max_pool2d(pool)?, y])
    });
    Ok(())
}

#[test]
fn gradients() -> Result<()> {
    manual_seed(4);
    for shape in [[2, 3, 8, 9], [1, 2, 33, 35]] {
        let x = Tensor::randn(&shape[..], &CPU)?;
        let pools = fitting(&x, windows());
        agree(&format!("{shape:?}"), &x, |x| {
            let mut results = Vec::new();
            for &pool in &pools {
                let x = x.detach()?;
                x.requires_grad_(true)?;
                let y = x.relu()?.max_pool2d(pool)?;
                y.mul(&y)?.sum()?.backward()?;
                results.push(x.grad().unwrap());
            }
            Ok(results)
        });
    }
    Ok(())
}

/// What elements get back from the windows that hold them.
#[test]
fn gradients_of_means() -> Result<()> {
    manual_seed(6);
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let shapes = [[2, 3, 8, 14], [1, 2, 19, 35], [0, 2, 6, 6], [1, 1, 5, 7]];
        for (s, shape) in shapes.iter().enumerate().take(if dtype == DType::F32 { 4 } else { 1 }) {
            let x = Tensor::randn(&shape[..], &CPU)?.to_dtype(dtype)?;
            let mut pools = fitting(&x, windows());
            let apart = [
                Pool::new(2).stride(1).padding(1),
                Pool::new([3, 2]).stride([4, 5]),
                Pool::new([3, 2]).stride(2).padding(1),
                Pool::new([5, 4]).stride([3, 2]).padding([1, 2]),
                Pool::new([3, 2]).stride([4, 2]).padding(1).ceil_mode(true),
                Pool::new([2, 1]).stride([3, 1]),
                Pool::new(4).stride(3).padding(2),
                Pool::new(5).stride(3).padding(1).ceil_mode(true),
            ];
            pools.extend(fitting(&x, apart.into()));
            let what = format!("{dtype} {shape:?}");
            agree(&what, &x, |x| {
                let mut results = Vec::new();
                for (k, &pool) in pools.iter().enumerate() {
                    let leaf = || -> Result<Tensor> {
                        let x = x.detach()?;
                        x.requires_grad_(true)?;
                        Ok(x)
                    };
                    let (x, pool) = (leaf()?, pool.count_include_pad(k % 2 == s % 2));
                    let y = x.mul(2.0)?.avg_pool2d(pool)?;
                    y.mul(&numbers(&y.shape(), dtype, k as u64)?)?.sum()?.backward()?;
                    results.push(x.grad().unwrap());
                    // In halves, loops round later.
                    if !dtype.is_narrow() {
                        let (x, pool) = (leaf()?, pool.count_include_pad(k % 2 != s % 2));
                        let y = x.avg_pool2d(pool)?;
                        y.mul(&y)?.sum()?.backward()?;
                        results.push(x.grad().unwrap());
                    }
                }
                Ok(results)
            });
        }
    }
    let x = Tensor::randn([2, 3, 8, 24], &CPU)?;
    let said = agree("a loop", &x, |x| {
        let mut results = Vec::new();
        for pool in [Pool::new(2), Pool::new(3).stride(1).padding(1), Pool::new(4).stride(2).padding(1)] {
            let x = x.detach()?;
            x.requires_grad_(true)?;
            let y = x.relu()?.avg_pool2d(pool)?;
            y.mul(&numbers(&y.shape(), DType::F32, 1)?)?.sum()?.backward()?;
            results.push(x.grad().unwrap());
        }
        Ok(results)
    });
    assert!(!said.contains("runs eagerly inside"), "{said}");
    Ok(())
}

/// Windows that are as large as they must be for so many of them, side by side or not.
#[test]
fn as_many_means_as_asked_for() -> Result<()> {
    manual_seed(7);
    for dtype in [DType::F32, DType::F64, DType::F16] {
        for (shape, output, is_loop) in [
            ([2, 3, 8, 18], [4, 9], true),
            ([2, 3, 8, 18], [8, 18], true),
            ([1, 2, 6, 34], [1, 17], true),
            ([1, 2, 6, 34], [2, 34], true),
            ([1, 2, 21, 21], [3, 3], false),
            ([2, 2, 7, 10], [3, 4], false),
            ([2, 2, 5, 4], [7, 8], false),
        ] {
            let x = Tensor::randn(&shape[..], &CPU)?.to_dtype(dtype)?;
            let what = format!("{dtype} {shape:?} to {output:?}");
            let said = agree(&what, &x, |x| {
                let x = x.detach()?;
                x.requires_grad_(true)?;
                let y = x.adaptive_avg_pool2d(output)?;
                y.mul(&numbers(&y.shape(), dtype, 3)?)?.sum()?.backward()?;
                Ok(vec![y.neg()?.detach()?, x.grad().unwrap()])
            });
            assert_eq!(!said.contains("runs eagerly inside"), is_loop, "{what}\n{said}");
        }
    }
    Ok(())
}

/// Images of sizes that change in the batch, in the plane, and in both: one region for all of each kind.
fn check_many_sizes(compile: &Compile, program: impl Fn(&Tensor) -> Result<Vec<Tensor>>) -> Result<()> {
    for change in [[1, 0, 0], [0, 1, 2], [1, 1, 1]] {
        let region = compile.clone().region();
        for n in [5, 7, 8, 11, 12, 9, 30] {
            let shape = [3 + change[0] * n, 2, 6 + change[1] * n, 9 + change[2] * n];
            let x = Tensor::randn(&shape[..], &CPU)?;
            let (got, want) = (region.run(|| program(&x))?, program(&x)?);
            for (k, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(bits(got), bits(want), "{shape:?}, result {k}");
            }
        }
    }
    // They would run op by op, and be right all the same.
    assert_eq!(kiln_dynamo::counters().refused, 0, "kernels that the C compiler fails on");
    Ok(())
}

/// One graph for many sizes: of batches, and of planes with windows that divide them or don't.
#[test]
fn many_sizes() -> Result<()> {
    manual_seed(5);
    let program = |x: &Tensor| -> Result<Vec<Tensor>> {
        let (largest, places) = x.relu()?.max_pool2d_with_indices(Pool::new(3).stride(2).padding(1))?;
        let means = x.avg_pool2d(Pool::new(3).stride(1).padding(1).count_include_pad(false))?;
        let (apart, where_apart) =
            x.max_pool2d_with_indices(Pool::new(3).stride(2).padding(1).dilation(2))?;
        Ok(vec![largest, places, means.add(x)?, apart, where_apart, x.adaptive_avg_pool2d([3, 3])?])
    };
    check_many_sizes(&Compile::new().dynamic(true), program)
}

/// The same, with gradients.
#[test]
fn gradients_of_many_sizes() -> Result<()> {
    manual_seed(9);
    let program = |x: &Tensor| -> Result<Vec<Tensor>> {
        let pools = [
            Pool::new(3).stride(2).padding(1),
            Pool::new(3).stride(1).padding(1).count_include_pad(false),
            Pool::new(2),
            Pool::new(3).stride(2).ceil_mode(true),
        ];
        let mut results = Vec::new();
        for pool in pools {
            let x = x.detach()?;
            x.requires_grad_(true)?;
            let y = x.avg_pool2d(pool)?;
            y.mul(&y)?.sum()?.backward()?;
            results.push(x.grad().unwrap());
            let x = x.detach()?;
            x.requires_grad_(true)?;
            let y = x.adaptive_avg_pool2d([2, 3])?;
            y.mul(&y)?.sum()?.backward()?;
            results.push(x.grad().unwrap());
        }
        Ok(results)
    };
    check_many_sizes(&Compile::new().dynamic(true).numerics(Numerics::Strict), program)
}
