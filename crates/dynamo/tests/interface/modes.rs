//! What the modes and the other options change, and that results stay.

use std::sync::Mutex;

use kiln_dynamo::{Compile, Mode, OptimizationLevel, Progress, on_progress};
use kiln_tensor::{DType, Device, Error, Result, Tensor, TensorList, foreach};

use crate::{leaf, t};

fn program(x: &Tensor) -> Result<Vec<f32>> {
    let rows = x.mul(3.0)?.tanh()?.exp()?;
    let scaled = rows.div(&rows.sum_dim([1], true)?)?;
    scaled.add(&x.sigmoid()?)?.to_vec()
}

#[test]
fn every_mode_and_option_gives_the_same() -> Result<()> {
    let data: Vec<f32> = (0..600).map(|i| (i as f32 * 0.37).sin()).collect();
    let x = Tensor::from_vec(data, [20, 30])?;
    let want = program(&x)?;
    for text in [
        "mode=default",
        "mode=reduce-overhead",
        "mode=max-autotune",
        "mode=training",
        "mode=evaluation",
        "optimization_level=O0",
        "optimization_level=O2",
        "optimization_level=O3",
        "options.max_fusion_size=0, options.max_inlined_ops=1",
        "options.stages=false",
        "options.unroll=2",
        "options.unroll=4, options.isa=avx2",
        "options.opt_level=0",
        "options.isa=avx2",
        "options.isa=plain",
        "options.keep_text=false",
        "dynamic=true, backend=graph, device=cpu",
        "disable=true",
    ] {
        let region = text.parse::<Compile>()?.region();
        for _ in 0..3 {
            let got = region.run(|| program(&x))?;
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6;
            assert!(got.iter().zip(&want).all(close), "{text}: {}", region.explain());
        }
    }
    Ok(())
}

#[test]
fn fusion_options_change_the_kernels() -> Result<()> {
    let kernels = |text: &str| -> Result<usize> {
        let region = text.parse::<Compile>()?.region();
        let x = Tensor::ones([4, 5], &Device::Cpu)?;
        let (y, z) = region.run(|| Ok::<_, Error>((x.exp()?.sum()?, x.neg()?)))?;
        drop((y, z));
        Ok(region.explain().kernels())
    };
    assert!(kernels("options.max_fusion_size=0")? > kernels("")?);
    Ok(())
}

#[test]
fn evaluation_keeps_nothing_for_backward() -> Result<()> {
    let w = leaf(&[1.0, 2.0]);
    let body = || w.exp()?.mul(&w);
    let training = Compile::new().mode(Mode::Training).region();
    assert!(training.run(body)?.requires_grad());
    assert!(training.explain().graphs[0].has_backward);
    // Disabled or inside another compiled function it means the same.
    for options in ["mode=evaluation", "mode=evaluation, disable=true"] {
        let region = options.parse::<Compile>()?.region();
        for _ in 0..2 {
            assert!(!region.run(body)?.requires_grad(), "{options}");
            let outer = Compile::new().region();
            assert!(!outer.run(|| region.run(body))?.requires_grad(), "{options}");
        }
        assert!(region.explain().graphs.iter().all(|graph| !graph.has_backward));
    }
    assert!(body()?.requires_grad(), "the mode ends with the call");
    Ok(())
}

#[test]
fn reduce_overhead_sees_inputs_that_move() -> Result<()> {
    let region = Compile::new().mode(Mode::ReduceOverhead).region();
    let weights = [t(&[1.0, 2.0, 3.0]), t(&[-1.0, 0.5, 0.0])];
    let mut kept = Vec::new();
    for call in 0..6 {
        // Other weights, a new input and a result that stays: no table of pointers may be stale.
        let w = &weights[call / 2 % 2];
        let x = t(&[call as f32, 1.0, 2.0]);
        let y = region.run(|| x.mul(w)?.softmax(0)?.add(&x))?;
        let want = x.mul(w)?.softmax(0)?.add(&x)?.to_vec::<f32>()?;
        kept.push((y, want));
    }
    for (y, want) in kept {
        for (got, want) in y.to_vec::<f32>()?.iter().zip(want) {
            assert!((got - want).abs() < 1e-6);
        }
    }
    assert_eq!(region.explain().graphs.len(), 1);
    // A list of many tensors, changed in place, some of them replaced on the way.
    let region = Compile::new().mode(Mode::ReduceOverhead).region();
    let mut tensors: Vec<Tensor> = (0..50).map(|i| t(&vec![i as f32; i % 7 + 1])).collect();
    for call in 0..5 {
        if call == 3 {
            tensors[7] = t(&[100.0]);
        }
        region.run(|| foreach::add_(&TensorList::new(tensors.clone()), 1.0))?;
    }
    assert_eq!(tensors[7].to_vec::<f32>()?, [102.0]);
    assert_eq!(tensors[13].to_vec::<f32>()?, [18.0; 7]);
    Ok(())
}

#[test]
fn reduce_overhead_from_several_threads() -> Result<()> {
    let region = Compile::new().mode(Mode::ReduceOverhead).region();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let region = &region;
            scope.spawn(move || {
                for call in 0..50 {
                    let x = t(&vec![(thread * 100 + call) as f32; 300]);
                    let y = region.run(|| x.mul(2.0)?.sum()?.add(&x)).unwrap();
                    let value = (thread * 100 + call) as f32;
                    assert_eq!(y.to_vec::<f32>().unwrap()[17], 600.0 * value + value);
                }
            });
        }
    });
    Ok(())
}

#[test]
fn max_autotune_tells_what_it_chose() -> Result<()> {
    let region = Compile::new().optimization_level(OptimizationLevel::O3).region();
    let x = Tensor::ones([64, 512], &Device::Cpu)?;
    let body = || x.tanh()?.exp()?.sigmoid()?.softmax(1);
    for _ in 0..2 {
        region.run(body)?;
    }
    let explanation = region.explain();
    if kiln_runtime::Compiler::find().is_err() {
        return Ok(());
    }
    assert!(!explanation.graphs[0].tuned.is_empty(), "{explanation}");
    assert!(explanation.graphs[0].times().iter().any(|(stage, _)| *stage == "autotune"));
    // What was measured is remembered: nothing is measured again.
    if kiln_runtime::KernelCache::global().directory().is_ok() {
        let again = Compile::new().mode(Mode::MaxAutotune).explain(body)?;
        assert!(!again.to_string().contains("measured"), "{again}");
        assert_eq!(again.graphs[0].compiled_kernels, 0, "{again}");
    }
    Ok(())
}

/// Plans with and without small products in their kernels are compared; whichever wins gives eager's results.
#[test]
fn max_autotune_compares_products() -> Result<()> {
    let x = Tensor::randn([3, 3], &Device::Cpu)?;
    let body = || x.matmul(&x)?.tanh()?.matmul(&x)?.add(&x);
    let eager = body()?.to_vec::<f32>()?;
    for _ in 0..2 {
        let region = Compile::new().mode(Mode::MaxAutotune).option("autotune_ms", 20)?.region();
        for _ in 0..2 {
            let compiled = region.run(body)?.to_vec::<f32>()?;
            assert!(eager.iter().zip(&compiled).all(|(a, b)| (a - b).abs() <= 1e-5 * (1.0 + a.abs())));
        }
    }
    let inline = Compile::new().option("max_inline_product", 8)?.explain(body)?;
    let library = Compile::new().option("max_inline_product", 0)?.explain(body)?;
    assert!(
        !inline.to_string().contains("gemm") && library.to_string().contains("gemm"),
        "{inline}{library}"
    );
    Ok(())
}

#[test]
fn long_work_says_how_far_it_is() -> Result<()> {
    static SEEN: Mutex<Vec<Progress>> = Mutex::new(Vec::new());
    on_progress(|progress| SEEN.lock().unwrap().push(progress.clone()));
    // A size that no process before had, so that nothing is remembered of it.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let x = Tensor::ones([32, 1000 + now.as_nanos() as usize / 1000 % 100_000], &Device::Cpu)?;
    let body = || x.exp()?.tanh()?.sum_dim([0], false)?.sigmoid();
    Compile::new().mode(Mode::MaxAutotune).option("autotune_ms", 20)?.explain(body)?;
    on_progress(|_| {});
    if kiln_runtime::Compiler::find().is_err() {
        return Ok(());
    }
    let seen = SEEN.lock().unwrap();
    assert!(!seen.is_empty());
    assert!(seen.iter().all(|progress| progress.done <= progress.total && progress.total > 0), "{seen:?}");
    Ok(())
}

/// What goes on with the rows of a product as they are finished gives the bits of what runs afterwards.
#[test]
fn epilogues_of_products_change_no_bit() -> Result<()> {
    for (m, n, k) in
        [(512, 256, 96), (512, 1024, 256), (515, 130, 65), (1024, 16, 300), (7, 9, 3), (64, 64, 0)]
    {
        for double in [false, true] {
            let tensor = |rows: usize, columns: usize, seed: f64| {
                let data = (0..rows * columns).map(|i| (i as f64 * seed).sin()).collect::<Vec<f64>>();
                let t = Tensor::from_vec(data, [rows, columns])?;
                if double { Ok(t) } else { t.to_dtype(DType::F32) }
            };
            let (x, w) = (tensor(m, k, 0.37)?, tensor(k, n, 0.73)?);
            let (v, u) = (tensor(k, n, 0.71)?, tensor(k, n, 0.69)?);
            let (bias, other) = (tensor(1, n, 0.11)?, tensor(m, n, 0.19)?);
            let layer = || -> Result<Vec<Tensor>> {
                let product = x.matmul(&w)?;
                let wide = product.add(&bias)?.gelu()?;
                let residual = x.matmul(&v)?.add(&other)?;
                // The product itself, too, and a row at a time.
                Ok(vec![wide.mul(2.0)?, residual, product, x.matmul(&u)?.softmax(1)?])
            };
            let want = layer()?;
            for mode in ["mode=default", "mode=reduce-overhead"] {
                let region = mode.parse::<Compile>()?.region();
                for _ in 0..3 {
                    let got = region.run(layer)?;
                    // Softmax sums in another order.
                    for (got, want) in got.iter().zip(&want).take(3) {
                        let same = |(a, b): (f64, f64)| a.to_bits() == b.to_bits();
                        let (got, want): (Vec<f64>, Vec<f64>) =
                            (got.to_dtype(DType::F64)?.to_vec()?, want.to_dtype(DType::F64)?.to_vec()?);
                        assert!(got.into_iter().zip(want).all(same), "{m} {n} {k}: {}", region.explain());
                    }
                    let close = |(a, b): (f64, f64)| (a - b).abs() <= 1e-6;
                    let (got, want): (Vec<f64>, Vec<f64>) =
                        (got[3].to_dtype(DType::F64)?.to_vec()?, want[3].to_dtype(DType::F64)?.to_vec()?);
                    assert!(got.into_iter().zip(want).all(close), "{m} {n} {k}: {}", region.explain());
                }
            }
        }
    }
    Ok(())
}

/// Products and what lies between them give the same bits in bands of rows.
#[test]
fn bands_change_no_bit() -> Result<()> {
    for (b, t, s, d) in [(3, 333, 301, 24), (1, 641, 640, 33), (2, 1024, 300, 64), (40, 5, 6000, 8)] {
        for double in [false, true] {
            let tensor = |rows: usize, columns: usize, seed: f64| {
                let data = (0..b * rows * columns).map(|i| (i as f64 * seed).sin()).collect::<Vec<f64>>();
                let t = Tensor::from_vec(data, [b, rows, columns])?;
                if double { Ok(t) } else { t.to_dtype(DType::F32) }
            };
            let (q, k, v) = (tensor(t, d, 0.37)?, tensor(s, d, 0.73)?, tensor(s, d, 0.71)?);
            let mask = tensor(t, s, 0.3)?.narrow(0, 0, 1)?.gt(0.0)?;
            let mixed = || -> Result<Tensor> {
                let scores = q.matmul(&k.transpose(1, 2)?)?;
                mask.where_self(&scores.mul(0.1)?.tanh()?, -0.5)?.matmul(&v)
            };
            let want: Vec<f64> = mixed()?.to_dtype(DType::F64)?.to_vec()?;
            for mode in ["mode=default", "mode=reduce-overhead"] {
                let region = mode.parse::<Compile>()?.region();
                for _ in 0..3 {
                    let got: Vec<f64> = region.run(mixed)?.to_dtype(DType::F64)?.to_vec()?;
                    let same = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits();
                    assert!(got.iter().zip(&want).all(same), "{b} {t} {s} {d}: {}", region.explain());
                }
            }
        }
    }
    Ok(())
}
