//! Scatters and scans in compiled code: loops that are fused with their neighbours, and yet every bit is eager's.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_dynamo::{Backend, Compile, Explanation, Numerics};
use kiln_ir::Why;
use kiln_tensor::{DType, Device, Error, Result, Tensor};

const CPU: Device = Device::Cpu;

/// Numbers that look arbitrary, zeros and negative ones among them.
fn numbers(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / 65536.0 - 128.0) / 37.0
    };
    let data: Vec<f32> = (0..shape.iter().product::<usize>()).map(|_| next()).collect();
    Tensor::new(&data[..], &CPU).unwrap().reshape(shape).unwrap().to_dtype(dtype).unwrap()
}

/// Indices below `size`, many of them twice.
fn indices(shape: &[usize], size: usize, seed: u64) -> Tensor {
    let numbers = numbers(shape, DType::F32, seed).abs().unwrap().mul(1000.0).unwrap();
    let numbers = numbers.to_dtype(DType::I64).unwrap().to_vec::<i64>().unwrap();
    let data: Vec<i64> = numbers.iter().map(|n| n % size as i64).collect();
    Tensor::new(&data[..], &CPU).unwrap().reshape(shape).unwrap()
}

/// Ways in which a tensor may lie in memory.
const LAYOUTS: [&str; 4] = ["dense", "turned", "repeated", "window"];

fn laid(x: &Tensor, layout: &str) -> Tensor {
    let rank = x.shape().rank();
    match layout {
        "turned" if rank > 1 => x.transpose(0, -1).unwrap().contiguous().unwrap().transpose(0, -1).unwrap(),
        "window" => {
            let wide = Tensor::cat([x, x, x], 0).unwrap();
            wide.narrow(0, x.shape()[0], x.shape()[0]).unwrap()
        }
        "repeated" if x.shape()[0] > 0 => x.narrow(0, 0, 1).unwrap().expand(x.shape().clone()).unwrap(),
        _ => x.contiguous().unwrap(),
    }
}

/// Runs a program eagerly and compiled, twice: the bytes are the same. What was compiled.
fn agree(what: &str, program: impl Fn() -> Result<Vec<Tensor>>) -> Explanation {
    let bytes = |made: Vec<Tensor>| -> Vec<Vec<u8>> {
        made.iter().map(|made| made.contiguous().unwrap().to_bytes().unwrap()).collect()
    };
    let want = bytes(program().unwrap());
    let region = Compile::new().backend(Backend::Inductor).region();
    for _ in 0..2 {
        let got = bytes(region.run(&program).unwrap());
        for (r, (got, want)) in got.iter().zip(&want).enumerate() {
            let differs = got.iter().zip(want).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{what}: result {r} of {} bytes", want.len());
            assert_eq!(got.len(), want.len(), "{what}");
        }
    }
    let explained = region.explain();
    for graph in &explained.graphs {
        assert_eq!(graph.interpreted, None, "{what}");
    }
    explained
}

fn has_library_step(explained: &Explanation, op: &str) -> bool {
    explained.graphs.iter().flat_map(|graph| &graph.fallbacks).any(|fallback| fallback.contains(op))
}

type Scatter = fn(&Tensor, i64, &Tensor, &Tensor) -> Result<Tensor>;

const SLICES: [(&str, Scatter); 2] = [
    ("index_add", |x, dim, index, src| x.index_add(dim, index, src)),
    ("index_copy", |x, dim, index, src| x.index_copy(dim, index, src)),
];
const ELEMENTS: [(&str, Scatter); 2] = [
    ("scatter_add", |x, dim, index, src| x.scatter_add(dim, index, src)),
    ("scatter", |x, dim, index, src| x.scatter(dim, index, src)),
];

/// Shapes, dims, and how many elements go along the dim.
const CASES: [(&[usize], usize, usize); 10] = [
    (&[50, 70], 0, 33),
    (&[130, 21], 1, 40),
    (&[9, 11, 13], 1, 17),
    (&[9, 11, 13], 0, 2),
    (&[16, 5, 64], 2, 100),
    (&[64, 300], 1, 1),
    (&[300, 64], 0, 1),
    (&[3, 40], 1, 20),
    (&[40], 0, 70),
    (&[100, 2], 0, 40000),
];

#[test]
fn scatters_are_loops_and_bits_are_eagers() {
    for (case, (shape, dim, count)) in CASES.into_iter().enumerate() {
        let layouts = if case % 3 == 1 { &LAYOUTS[..] } else { &LAYOUTS[..1] };
        for &layout in layouts {
            let mut from = shape.to_vec();
            from[dim] = count;
            let x = laid(&numbers(shape, DType::F32, 1), layout);
            let src = laid(&numbers(&from, DType::F32, 2), layout);
            let lines = laid(&indices(&from, shape[dim], 3), layout);
            let slices = laid(&indices(&[count], shape[dim], 4), layout);
            let all = SLICES.into_iter().map(|op| (op, &slices)).chain(ELEMENTS.map(|op| (op, &lines)));
            for ((name, scatter), index) in all {
                let what = format!("{name} {case} {layout}");
                let explained = agree(&what, || {
                    // Computed on the way, and used on.
                    let (base, values) = (x.neg()?, src.mul(3.0)?.exp()?);
                    let made = scatter(&base, dim as i64, &index.mul(1)?, &values)?;
                    let zeros = Tensor::zeros(shape, &CPU)?;
                    let on_zeros = scatter(&zeros, dim as i64, index, &values.sub(&src)?)?;
                    Ok(vec![made.add(1.0)?, made.clone(), on_zeros, values])
                });
                let columns: usize = from.iter().product::<usize>() / count;
                if layout == "dense" {
                    let is_library = has_library_step(&explained, name);
                    assert_eq!(is_library, columns * count > 32768, "{what}: {:?}", explained.graphs);
                }
            }
        }
    }
}

#[test]
fn scatters_of_all_dtypes() {
    for dtype in DType::ALL {
        // What is a line and how many there are is the same for all: they differ in how they are added.
        let ways = [(0usize, [12usize, 65], 30usize), (1, [65, 12], 30), (1, [65, 12], 1)];
        let ways = if matches!(dtype, DType::F32 | DType::I64) { &ways[..] } else { &ways[..1] };
        for &(dim, shape, count) in ways {
            let mut from = shape;
            from[dim] = count;
            let (x, src) = (numbers(&shape, dtype, 5), numbers(&from, dtype, 6));
            let (lines, slices) = (indices(&from, 12, 7), indices(&[count], 12, 8));
            for (name, scatter) in SLICES.into_iter().chain(ELEMENTS) {
                let index = if name.starts_with("index") { &slices } else { &lines };
                agree(&format!("{name} {dtype} {dim} {count}"), || {
                    let made = scatter(&x, dim as i64, index, &src)?;
                    let zeros = x.zeros_like()?;
                    let twice = scatter(&zeros, dim as i64, index, &src)?;
                    Ok(vec![scatter(&twice, dim as i64, index, &src)?, made])
                });
            }
        }
    }
}

/// Indices for fewer lines than there are: the others stay as they were.
#[test]
fn scatters_into_some_of_the_lines() {
    let (x, src) = (numbers(&[20, 9, 30], DType::F64, 1), numbers(&[15, 9, 25], DType::F64, 2));
    let (index, one) = (indices(&[15, 9, 25], 9, 3), indices(&[15, 1, 25], 9, 3));
    agree("fewer lines", || Ok(vec![x.scatter_add(1, &index, &src)?, x.scatter(1, &index, &src)?]));
    let line = src.narrow(1, 0, 1).unwrap();
    agree("one index", || Ok(vec![x.scatter_add(1, &one, &line)?, x.scatter(1, &one, &line)?]));
}

/// What one scatter makes is what surrounds the next; what a product makes, too.
#[test]
fn scatters_into_what_others_made() {
    let (x, w) = (numbers(&[30, 8], DType::F32, 1), numbers(&[8, 80], DType::F32, 2));
    let (src, index) = (numbers(&[50, 80], DType::F32, 3), indices(&[50], 30, 4));
    let other = indices(&[50], 30, 5);
    let explained = agree("chains", || {
        let product = x.matmul(&w)?;
        let once = product.index_add(0, &index, &src.exp()?)?;
        let twice = once.index_add(0, &other, &src.mul(2.0)?)?.index_copy(0, &index, &src)?;
        let kept = x.matmul(&w)?.tanh()?;
        let again = kept.index_add(0, &index, &kept.index_select(0, &other)?)?;
        Ok(vec![twice.mul(&kept)?, again, kept])
    });
    assert!(!has_library_step(&explained, "index"));
}

/// The gradient of a table that is used twice is added up where the larger part of it is; with strict numerics as it
/// is eagerly.
#[test]
fn gradients_of_a_table_that_is_used_twice() -> Result<()> {
    let (table, tokens) = (numbers(&[800, 70], DType::F32, 1), indices(&[90], 800, 3));
    let run = |compile: Option<Compile>| -> Result<(Vec<f32>, usize)> {
        let table = table.clone_tensor()?;
        table.requires_grad_(true)?;
        let step = || table.embedding(&tokens)?.tanh()?.matmul(&table.t()?)?.sum()?.backward();
        let Some(region) = compile.map(Compile::region) else {
            step()?;
            return Ok((table.grad().unwrap().to_vec()?, 0));
        };
        region.run(step)?;
        let graphs = region.explain().graphs;
        let bytes = graphs.iter().map(|graph| graph.bytes_read + graph.bytes_written).sum();
        Ok((table.grad().unwrap().to_vec()?, bytes))
    };
    let (want, _) = run(None)?;
    let (strict, more) = run(Some(Compile::new().numerics(Numerics::Strict)))?;
    let (got, bytes) = run(Some(Compile::new()))?;
    for made in [strict, got] {
        assert!(made.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 1e-4 * (1.0 + b.abs())));
    }
    assert!(bytes + 4 * 800 * 70 <= more, "{bytes} bytes moved, {more} with strict numerics");
    Ok(())
}

#[test]
fn gradients_of_picking_are_loops() -> Result<()> {
    let (table, logits) = (numbers(&[100, 72], DType::F32, 1), numbers(&[90, 40], DType::F32, 2));
    let (tokens, picks) = (indices(&[4, 25], 100, 3), indices(&[90, 1], 40, 4));
    let some = indices(&[90, 7], 40, 5);
    let loss = |table: &Tensor, logits: &Tensor| -> Result<Tensor> {
        let rows = table.embedding_padded(&tokens, 3)?;
        let picked = logits.log_softmax(1)?.gather(1, &picks)?;
        let more = logits.exp()?.gather(1, &some)?;
        let sum = rows.mul(&rows)?.sum()?.add(&picked.neg()?.mean()?)?;
        sum.add(&more.mul(&more)?.sum()?)
    };
    let run = |compiled: bool| -> Result<(Vec<Vec<f32>>, Vec<String>)> {
        let (table, logits) = (table.clone_tensor()?, logits.clone_tensor()?);
        table.requires_grad_(true)?;
        logits.requires_grad_(true)?;
        let step = || loss(&table, &logits)?.backward();
        let region = Compile::new().region();
        if compiled {
            region.run(step)?
        } else {
            step()?
        };
        let library = region.explain().graphs.iter().flat_map(|graph| graph.fallbacks.clone()).collect();
        Ok((vec![table.grad().unwrap().to_vec()?, logits.grad().unwrap().to_vec()?], library))
    };
    let ((want, _), (got, library)) = (run(false)?, run(true)?);
    assert_eq!(library, Vec::<String>::new());
    for (got, want) in got.iter().zip(&want) {
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * (1.0 + b.abs());
        assert!(got.iter().zip(want).all(near));
    }
    Ok(())
}

#[test]
fn a_bad_index_changes_nothing() -> Result<()> {
    let programs: [(&str, Scatter); 4] = [SLICES[0], SLICES[1], ELEMENTS[0], ELEMENTS[1]];
    for (name, scatter) in programs {
        for count in [1, 40] {
            let good = indices(&[count, 70], 4, 1);
            let good = if name.starts_with("index") { good.narrow(1, 0, 1)?.reshape([count])? } else { good };
            let mut bad = good.to_vec::<i64>()?;
            *bad.last_mut().unwrap() = 9;
            let bad = Tensor::new(&bad[..], &CPU)?.reshape(good.shape().clone())?;
            let src = numbers(&[count, 70], DType::F32, 2);
            let program = |x: &Tensor, y: &Tensor, index: &Tensor| -> Result<Tensor> {
                x.add_(1.0)?;
                let made = scatter(x, 0, index, &src.exp()?)?;
                y.copy_(&made)?;
                x.mul_(2.0)?.sum()
            };
            let start = || -> Result<(Tensor, Tensor)> {
                Ok((numbers(&[4, 70], DType::F32, 3), numbers(&[4, 70], DType::F32, 4)))
            };
            let region = Compile::new().region();
            for index in [&good, &bad, &good] {
                let ((x, y), (u, v)) = (start()?, start()?);
                let want = program(&x, &y, index);
                let got = region.run(|| program(&u, &v, index)?.to_vec::<f32>());
                match (want, got) {
                    (Ok(_), Ok(_)) => {}
                    (Err(Error::Op(want)), Err(Error::Op(got))) => {
                        assert_eq!((&want.why, want.op), (&got.why, got.op), "{name}");
                        assert_eq!(want.why, Why::Index { index: 9, size: 4 }, "{name}");
                    }
                    (want, got) => panic!("{name}: {want:?}, compiled {got:?}"),
                }
                assert_eq!(u.to_vec::<f32>()?, x.to_vec::<f32>()?, "{name} {count}");
                assert_eq!(v.to_vec::<f32>()?, y.to_vec::<f32>()?, "{name} {count}");
            }
        }
    }
    Ok(())
}

/// An index of which a gather reads only a part is not checked by it.
#[test]
fn a_bad_index_is_seen_behind_a_gather_of_a_part() -> Result<()> {
    let (x, y) = (numbers(&[6, 70], DType::F32, 1), numbers(&[6, 70], DType::F32, 2));
    let src = numbers(&[8, 70], DType::F32, 3);
    let (region, apart) = (Compile::new().region(), Compile::new().region());
    for last in [5i64, 6, -1, 2] {
        let index = Tensor::new(&[0i64, 1, 2, 3, 4, 5, 0, last], &CPU)?;
        let program = || -> Result<Vec<f32>> {
            let part = x.index_select(0, &index)?.narrow(0, 0, 2)?.exp()?;
            let made = y.index_add(0, &index, &src.exp()?)?;
            part.sum()?.add(&made)?.to_vec()
        };
        assert_eq!(region.run(program).is_ok(), program().is_ok(), "{last}");
        let lines = index.reshape([1, 8])?;
        let of_a_part = || -> Result<Vec<f32>> {
            let made = x.narrow(1, 0, 8)?.scatter(0, &lines, &src.narrow(0, 0, 1)?.narrow(1, 0, 8)?)?;
            made.narrow(1, 0, 2)?.exp()?.to_vec()
        };
        assert_eq!(apart.run(of_a_part).is_ok(), of_a_part().is_ok(), "{last}");
    }
    Ok(())
}

#[test]
fn scans_are_loops_and_bits_are_eagers() {
    let shapes: [(&[usize], i64); 9] = [
        (&[37], 0),
        (&[5, 70], 0),
        (&[70, 33], 1),
        (&[6, 7, 19], 1),
        (&[6, 7, 19], 0),
        (&[1, 9], 0),
        (&[3, 40000], 1),
        (&[0, 4], 1),
        (&[600, 20], 0),
    ];
    for (shape, dim) in shapes {
        let layouts = if shape.len() == 3 { &LAYOUTS[..] } else { &LAYOUTS[..1] };
        for &layout in layouts {
            let x = laid(&numbers(shape, DType::F32, 1), layout);
            let what = format!("{shape:?} {dim} {layout}");
            let explained = agree(&what, || {
                let sums = x.exp()?.cumsum(dim)?;
                let products = x.mul(0.01)?.add(1.0)?.cumprod(dim)?;
                let behind = x.sub(1.0)?.flip(dim)?.cumsum(dim)?.flip(dim)?;
                Ok(vec![sums.sqrt()?, products.add(&sums)?, behind, x.cumsum(dim)?.mul(2.0)?])
            });
            assert!(!has_library_step(&explained, "cum"), "{what}");
        }
    }
}

#[test]
fn scans_of_all_dtypes() {
    for dtype in DType::ALL {
        let x = numbers(&[20, 35], dtype, 3);
        for dim in [0, 1] {
            agree(&format!("{dtype} {dim}"), || {
                Ok(vec![x.cumsum(dim)?, x.cumprod(dim)?, x.cumsum(dim)?.cumsum(1 - dim)?])
            });
        }
    }
}

/// Scans beside reductions along the same dim, and in both directions.
#[test]
fn scans_between_reductions() -> Result<()> {
    let x = numbers(&[60, 50], DType::F32, 9);
    for dim in [0, 1] {
        let close = |what: &str, program: &dyn Fn() -> Result<Tensor>| -> Result<()> {
            let want = program()?.to_vec::<f32>()?;
            let got = Compile::new().region().run(program)?.to_vec::<f32>()?;
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * (1.0 + b.abs());
            assert!(got.iter().zip(&want).all(near), "{what} {dim}");
            Ok(())
        };
        close("softmax, then the sum so far", &|| {
            x.softmax(dim)?.cumsum(dim)?.lt(0.9)?.to_dtype(DType::F32)
        })?;
        close("the mean of sums", &|| x.cumsum(dim)?.mean_dim(dim, true)?.sub(&x)?.cumsum(dim))?;
        close("the gradient of sums", &|| {
            let x = x.clone_tensor()?;
            x.requires_grad_(true)?;
            let sums = x.exp()?.cumsum(dim)?;
            sums.mul(&sums)?.sum()?.backward()?;
            Ok(x.grad().unwrap())
        })?;
        close("the gradient of products", &|| {
            let x = x.abs()?.add(0.5)?.detach()?;
            x.requires_grad_(true)?;
            x.cumprod(dim)?.log()?.sum()?.backward()?;
            Ok(x.grad().unwrap())
        })?;
    }
    Ok(())
}

/// Plans for many sizes.
#[test]
fn many_sizes() -> Result<()> {
    let region = Compile::new().dynamic(true).region();
    for rows in [7usize, 30, 11, 64, 33, 90, 65, 18, 3, 40] {
        let (src, index) = (numbers(&[rows, 80], DType::F32, rows as u64), indices(&[rows], 50, 4));
        let picks = indices(&[rows, 1], 80, 6);
        let program = || -> Result<Vec<Tensor>> {
            let zeros = Tensor::zeros([50, 80], &CPU)?;
            let sums = zeros.index_add(0, &index, &src.exp()?)?;
            let one = src.mul(0.0)?.scatter_add(1, &picks, &src.narrow(1, 0, 1)?)?;
            Ok(vec![sums, one, src.cumsum(0)?, src.cumsum(1)?.exp()?])
        };
        let (want, got) = (program()?, region.run(program)?);
        for (got, want) in got.iter().zip(&want) {
            assert_eq!(got.to_bytes()?, want.to_bytes()?, "{rows} rows");
        }
    }
    // They would run op by op, and be right all the same.
    assert_eq!(kiln_dynamo::counters().refused, 0, "kernels that the C compiler fails on");
    Ok(())
}
