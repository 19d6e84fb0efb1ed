//! Times of the runtime's own parts: `cargo bench -p kiln-runtime`.
#![allow(clippy::print_stdout)]

use std::time::{Duration, Instant};

use kiln_runtime::convolution::{self, Geometry};
use kiln_runtime::gemm::{Matrix, Shape, gemm_f32};
use kiln_runtime::halves::{self, Half, Results};
use kiln_runtime::pool::Buffer;
use kiln_runtime::{Args, Kernel, KernelCache, Source, random, threads};

/// The best and the median time of `runs` runs, in nanoseconds.
fn time(runs: usize, mut body: impl FnMut()) -> (f64, f64) {
    let mut times: Vec<f64> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            body();
            start.elapsed().as_secs_f64() * 1e9
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[0], times[runs / 2])
}

fn regions() {
    let work =
        |n: usize| (0..n).for_each(|_| threads::parallel_for(2, 1, |b, _| _ = std::hint::black_box(b)));
    work(1000);
    let (best, median) = time(100, || work(100));
    println!("empty region: best {:.0} ns, median {:.0} ns", best / 100.0, median / 100.0);
    let spin = |until: f64| {
        let start = Instant::now();
        while start.elapsed().as_secs_f64() < until {}
    };
    // Two ranges of 5 us each on two threads: what is above 5 us is the region's cost.
    let (best, median) = time(2000, || threads::parallel_for(2, 1, |_, _| spin(5e-6)));
    println!("region of 2 x 5 us: best {best:.0} ns, median {median:.0} ns");
    let mut woken: Vec<f64> = (0..50)
        .map(|_| {
            std::thread::sleep(Duration::from_millis(1));
            time(1, || threads::parallel_for(2, 1, |_, _| spin(100e-6))).0
        })
        .collect();
    woken.sort_by(f64::total_cmp);
    println!("region of 2 x 100 us, workers asleep: best {:.0} ns, median {:.0} ns", woken[0], woken[25]);
}

fn pool() {
    let (best, median) = time(100, || (0..1000).for_each(|_| _ = std::hint::black_box(Buffer::alloc(256))));
    println!("pool hit and give back: best {:.1} ns, median {:.1} ns", best / 1000.0, median / 1000.0);
}

fn fills() {
    let mut values = vec![0f32; 1 << 20];
    let (best, _) = time(50, || random::fill_uniform_f32(&mut values, 1, 0, 0.0, 1.0));
    println!("uniform, 1 Mi f32: {:.0} us", best / 1e3);
    let (best, _) = time(50, || random::fill_normal_f32(&mut values, 1, 0, 0.0, 1.0));
    println!("normal, 1 Mi f32: {:.0} us", best / 1e3);
}

fn products() {
    let shapes = [
        (2048, 2048, 2048),
        (512, 8192, 256),
        (512, 256, 8192),
        (512, 3136, 576),
        (64, 256, 256),
        (256, 256, 64),
        (64, 10, 256),
        (10, 256, 64),
        (16, 256, 256),
        (8, 256, 256),
        (4, 256, 256),
        (1, 1024, 1024),
        (1, 256, 256),
    ];
    for (m, n, k) in shapes {
        let mut values = vec![0f32; m * k + k * n + m * n];
        random::fill_uniform_f32(&mut values, 1, 0, -1.0, 1.0);
        let lhs = values.as_mut_ptr();
        let (rhs, dst) = (lhs.wrapping_add(m * k), lhs.wrapping_add(m * k + k * n));
        for layout in ["NN", "NT", "TN"] {
            let [im, ik, in_] = [m, k, n].map(|size| size as isize);
            let lhs = if layout == "TN" { Matrix::new(lhs, 1, im) } else { Matrix::new(lhs, ik, 1) };
            let rhs = if layout == "NT" { Matrix::new(rhs, 1, ik) } else { Matrix::new(rhs, in_, 1) };
            let shape = Shape { m, n, k };
            let runs = (40_000_000_000 / (2 * m * n * k)).clamp(9, 3000);
            // SAFETY: the three matrices lie side by side in `values`.
            let (best, median) =
                time(runs, || unsafe { gemm_f32(shape, Matrix::new(dst, in_, 1), false, lhs, rhs) });
            let flops = 2.0 * (m * n * k) as f64;
            println!(
                "gemm {m}x{n}x{k} {layout}: best {:.1} us {:.0} GFLOP/s, median {:.1} us {:.0} GFLOP/s",
                best / 1e3,
                flops / best,
                median / 1e3,
                flops / median
            );
        }
    }
}

/// Products of halves, rounded: `KILN_ISA=avx512` takes vectors where there are tiles.
fn halves() {
    println!("pairs of bf16: {:?}", kiln_runtime::cpu::pairs());
    let shapes = [
        (256, 256, 256),
        (1024, 1024, 1024),
        (4096, 1024, 1024),
        (1000, 1001, 999),
        (64, 1024, 1024),
        (16, 4096, 1024),
        (4, 4096, 1024),
        (1, 4096, 1024),
    ];
    for (m, n, k) in shapes {
        let mut floats = vec![0f32; m * k + k * n + m * n];
        random::fill_uniform_f32(&mut floats, 1, 0, -1.0, 1.0);
        for half in [Half::Bf16, Half::F16] {
            let mut values: Vec<u16> = match half {
                Half::Bf16 => floats.iter().map(|x| (x.to_bits() >> 16) as u16).collect(),
                // Of any sign, between a half and one.
                Half::F16 => floats.iter().map(|x| (x.to_bits() >> 16) as u16 & 0x83ff | 0x3800).collect(),
            };
            // An address, so that threads may share it.
            let address = values.as_mut_ptr() as usize;
            for layout in ["NN", "NT", "TN"] {
                let product = |_| {
                    let lhs = address as *mut u16;
                    let (rhs, dst) = (lhs.wrapping_add(m * k), lhs.wrapping_add(m * k + k * n));
                    let [im, ik, in_] = [m, k, n].map(|size| size as isize);
                    let lhs = if layout == "TN" { Matrix::new(lhs, 1, im) } else { Matrix::new(lhs, ik, 1) };
                    let rhs = if layout == "NT" { Matrix::new(rhs, 1, ik) } else { Matrix::new(rhs, in_, 1) };
                    halves::Product {
                        results: Results::Rounded(Matrix::new(dst, in_, 1)),
                        start: None,
                        lhs,
                        rhs,
                    }
                };
                let runs = (20_000_000_000 / (2 * m * n * k)).clamp(9, 1000);
                let (best, median) = time(runs, || {
                    // SAFETY: the three matrices lie side by side in `values`.
                    let done = unsafe { halves::products(half, 1, Shape { m, n, k }, &product) };
                    done.expect("there is memory");
                });
                let flops = 2.0 * (m * n * k) as f64;
                println!(
                    "{half:?} {m}x{n}x{k} {layout}: best {:.1} us {:.0} GFLOP/s, median {:.1} us",
                    best / 1e3,
                    flops / best,
                    median / 1e3
                );
            }
        }
    }
}

/// The convolutions of ResNet18 at batch 8 and pictures of 112×112, forward and both gradients.
fn convolutions() {
    // Channels, filters, size of the input, kernel, stride.
    let layers = [
        (3, 64, 112, 7, 2),
        (64, 64, 28, 3, 1),
        (64, 128, 28, 3, 2),
        (64, 128, 28, 1, 2),
        (128, 128, 14, 3, 1),
        (256, 256, 7, 3, 1),
        (256, 512, 7, 3, 2),
        (512, 512, 4, 3, 1),
    ];
    for (channels, filters, size, kernel, stride) in layers {
        let padding = kernel / 2;
        let output = (size + 2 * padding - kernel) / stride + 1;
        let g = Geometry {
            batch: 8,
            channels,
            filters,
            input: [size; 2],
            output: [output; 2],
            kernel: [kernel; 2],
            stride: [stride; 2],
            padding: [padding; 2],
            dilation: [1; 2],
            groups: 1,
        };
        let sizes =
            [8 * channels * size * size, filters * channels * kernel * kernel, 8 * filters * output * output];
        let flops = 2.0 * (sizes[1] * 8 * output * output) as f64;
        // Several copies in turn, so that operands come from memory, as they do in a network.
        let copies = (12_000_000 / sizes.iter().sum::<usize>()).max(2);
        let mut all: Vec<[Vec<f32>; 3]> = (0..copies)
            .map(|seed| {
                sizes.map(|size| {
                    let mut values = vec![0f32; size];
                    random::fill_uniform_f32(&mut values, seed as u64, 0, -1.0, 1.0);
                    values
                })
            })
            .collect();
        let mut turn = 0;
        let mut next = || {
            turn += 1;
            all[turn % copies].each_mut().map(|values| values.as_mut_ptr())
        };
        let mut line = format!("conv {channels}->{filters} {size}x{size} {kernel}x{kernel}/{stride}:");
        for name in ["forward", "input", "weight"] {
            let (best, median) = time(30, || {
                let [x, weight, out] = next();
                // SAFETY: dense tensors of these sizes.
                let done = unsafe {
                    match name {
                        "forward" => convolution::forward(&g, out, x, weight),
                        "input" => convolution::input_gradient(&g, x, out, weight),
                        _ => convolution::weight_gradient(&g, weight, x, out),
                    }
                };
                done.expect("memory");
            });
            line += &format!(
                " {name} {:.2} ms {:.0} GFLOP/s (median {:.0})",
                best / 1e6,
                flops / best,
                flops / median
            );
        }
        println!("{line}");
    }
}

fn kernels() {
    let folder = std::env::temp_dir().join(format!("kiln-bench-{}", std::process::id()));
    let cache = KernelCache::at(&folder);
    let text = |number: usize| {
        format!(
            "typedef float lanes __attribute__((vector_size(64), aligned(4)));
            int kernel(char *const *bufs, const long *ints, const double *scalars, long begin, long end, char *s) {{
                float *x = (float *)bufs[0], *y = (float *)bufs[1], *z = (float *)bufs[2];
                long i = begin;
                for (; i + 16 <= end; i += 16) *(lanes *)(z + i) = *(lanes *)(x + i) * *(lanes *)(y + i) + {number}.0f;
                for (; i < end; i++) z[i] = x[i] * y[i] + {number}.0f;
                return 0;
            }}"
        )
    };
    for flag in ["-O1", "-O2"] {
        let mut number = 0;
        let (best, median) = time(15, || {
            number += 1;
            cache.load(&Source::new(text(number), &[flag])).expect("a C compiler");
        });
        println!("compile and load, {flag}: best {:.1} ms, median {:.1} ms", best / 1e6, median / 1e6);
    }
    let fresh: Vec<Source> = (100..108).map(|number| Source::new(text(number), &["-O1"])).collect();
    let (all, _) =
        time(1, || cache.load_many(&fresh).into_iter().for_each(|loaded| _ = loaded.expect("a C compiler")));
    println!("compile and load 8 sources: {:.1} ms", all / 1e6);
    let (best, median) = time(15, || _ = KernelCache::at(&folder).load(&fresh[0]));
    println!("load from disk: best {:.0} us, median {:.0} us", best / 1e3, median / 1e3);
    let (best, median) = time(1000, || _ = cache.load(&fresh[0]));
    println!("load from memory: best {best:.0} ns, median {median:.0} ns");

    let kernel =
        Kernel::new(cache.load(&fresh[0]).expect("loaded before").library, "kernel").expect("defined");
    let mut values = vec![0f32; 3 << 16];
    let start = values.as_mut_ptr();
    let bufs = [start, start.wrapping_add(1 << 16), start.wrapping_add(2 << 16)].map(|p| p.cast::<u8>());
    let args = Args { bufs: &bufs, ints: &[], scalars: &[] };
    for (items, scratch) in [(1, 0), (1, 4096), (1 << 16, 0)] {
        // SAFETY: three buffers of 2^16 floats.
        let launch = || unsafe { kernel.launch(&args, items, 1 << 14, scratch) };
        let (best, median) = time(100, || (0..100).for_each(|_| assert_eq!(launch(), 0)));
        println!(
            "launch of {items} items, {scratch} bytes of scratch: best {:.0} ns, median {:.0} ns",
            best / 100.0,
            median / 100.0
        );
    }
    std::fs::remove_dir_all(folder).expect("the folder is ours");
}

fn main() {
    println!("{} threads", threads::count());
    let parts: [(&str, fn()); 7] = [
        ("kernels", kernels),
        ("regions", regions),
        ("pool", pool),
        ("fills", fills),
        ("products", products),
        ("halves", halves),
        ("convolutions", convolutions),
    ];
    // `cargo bench -p kiln-runtime -- products` runs one of them.
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    for (_, run) in parts.iter().filter(|(name, _)| wanted.is_empty() || wanted.iter().any(|w| w == name)) {
        run();
    }
}
