//! Timings of whole plans on two threads, printed on demand:
//! `KILN_SPEED=1 cargo test --release -p kiln-inductor --test speed -- --nocapture`.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, reason = "a test")]

mod support;

use std::time::{Duration, Instant};

use kiln_inductor::{Options, Plan, Step, lower};
use kiln_ir::{Graph, Scalar};
use support::{Compiled, Random, Run, best_isa, compile};

const THREADS: i64 = 2;

/// Runs all kernel steps once on two threads that were started before.
fn once(plan: &Plan, compiled: &Compiled, run: &mut Run<'_>) -> Duration {
    let mut jobs = Vec::new();
    for step in &plan.steps {
        let Step::Kernel { kernel, bufs, ints, scalars, items, scratch_bytes, .. } = step else { continue };
        let bufs: Vec<usize> = bufs.iter().map(|&b| run.pointer(b) as usize).collect();
        let scalars: Vec<u64> = scalars
            .iter()
            .map(|&s| Plan::scalar(s, &|_| Scalar::Float(0.5), &[Scalar::Float(0.5); 64]).to_bits())
            .collect();
        jobs.push((compiled.kernels[*kernel], bufs, ints.clone(), scalars, *items, *scratch_bytes));
    }
    let barrier = std::sync::Barrier::new(THREADS as usize);
    let times = std::thread::scope(|scope| {
        let work = |t: i64| {
            let (jobs, barrier) = (&jobs, &barrier);
            move || {
                let mut scratch = support::Memory::new(jobs.iter().map(|j| j.5).max().unwrap_or(0));
                barrier.wait();
                let start = Instant::now();
                for (function, bufs, ints, scalars, items, _) in jobs {
                    let (begin, end) = (items * t / THREADS, items * (t + 1) / THREADS);
                    // SAFETY: the plan gives every kernel the arguments it was written for; ranges are disjoint.
                    unsafe {
                        function(
                            bufs.as_ptr().cast(),
                            ints.as_ptr(),
                            scalars.as_ptr(),
                            begin,
                            end,
                            scratch.pointer(),
                        );
                    }
                    barrier.wait();
                }
                start.elapsed()
            }
        };
        let handles: Vec<_> = (0..THREADS).map(|t| scope.spawn(work(t))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).max()
    });
    times.unwrap()
}

fn measure(name: &str, text: &str) {
    let graph: Graph = text.parse().unwrap();
    let options = Options::dense(&graph, best_isa(), THREADS as usize);
    let start = Instant::now();
    let plan = lower(&graph, &options).unwrap();
    let lowering = start.elapsed();
    let start = Instant::now();
    let Some(compiled) = compile(&plan) else { return };
    let compiling = start.elapsed();
    let mut inputs = Random(1).inputs(&graph);
    // Second moments and the like are not negative.
    for input in &mut inputs {
        if let support::naive::Val::Tensor(t) = input {
            for x in &mut t.data {
                *x = Scalar::Float(x.as_f64().abs());
            }
        }
    }
    let mut run = Run::new(&plan, &graph, &options, &inputs);
    for _ in 0..3 {
        once(&plan, &compiled, &mut run);
    }
    let mut times: Vec<Duration> = (0..25).map(|_| once(&plan, &compiled, &mut run)).collect();
    times.sort();
    println!(
        "{name:>10}: {:8.1} µs (best {:.1}), {} kernels, lowering {:.2} ms, compiling {:.0} ms, {:.1} MB",
        times[12].as_secs_f64() * 1e6,
        times[0].as_secs_f64() * 1e6,
        plan.kernels.len(),
        lowering.as_secs_f64() * 1e3,
        compiling.as_secs_f64() * 1e3,
        plan.report.bytes() as f64 / 1e6
    );
    if std::env::var("KILN_SPEED").as_deref() == Ok("2") {
        for (k, kernel) in plan.kernels.iter().enumerate() {
            let file = std::env::temp_dir().join(format!("kiln-{name}-{k}.c"));
            std::fs::write(file, kernel.source(plan.isa)).unwrap();
            println!("{}\n{}", kernel.loops, kernel.code);
        }
        println!("{}", plan.report);
    }
}

/// `foreach` Adam over n tensors of a shape, as prims.
pub fn adam(n: usize, shape: &str) -> String {
    let inputs: Vec<String> = (0..4 * n).map(|i| format!("%{i}: f32{shape}")).collect();
    let ty = format!("list({n} x f32{shape})");
    let list = |k: usize| (0..n).map(|i| format!("%{}", k * n + i)).collect::<Vec<_>>().join(", ");
    let b = 4 * n; // lr, b1, 1-b1, b2, 1-b2, correction, eps
    let mut text = format!(
        "graph({}, {}) {{\n",
        inputs.join(", "),
        (0..7).map(|i| format!("%{}: float", b + i)).collect::<Vec<_>>().join(", ")
    );
    let l = b + 7;
    for k in 0..4 {
        text += &format!("  %{} = list({}) : {ty}\n", l + k, list(k));
    }
    let (p, g, m, v) = (l, l + 1, l + 2, l + 3);
    let mut next = l + 4;
    let mut op = |text: &mut String, name: &str, x: usize, y: Option<usize>| {
        let args = y.map_or(format!("%{x}"), |y| format!("%{x}, %{y}"));
        *text += &format!("  %{next} = foreach_{name}({args}) : {ty}\n");
        next += 1;
        next - 1
    };
    let t = &mut text;
    let m1 = op(t, "mul", m, Some(b + 1));
    let m2 = op(t, "mul", g, Some(b + 2));
    let m3 = op(t, "add", m1, Some(m2));
    let v1 = op(t, "mul", v, Some(b + 3));
    let g2 = op(t, "mul", g, Some(b + 4));
    let g3 = op(t, "mul", g2, Some(g));
    let v3 = op(t, "add", v1, Some(g3));
    let root = op(t, "sqrt", v3, None);
    let d1 = op(t, "div", root, Some(b + 5));
    let d2 = op(t, "add", d1, Some(b + 6));
    let s1 = op(t, "mul", m3, Some(b));
    let s2 = op(t, "div", s1, Some(d2));
    let p2 = op(t, "sub", p, Some(s2));
    let mut writes = String::new();
    for (k, from) in [(0, p2), (2, m3), (3, v3)] {
        for i in 0..n {
            text += &format!("  %{next} = list_get(%{from}) {{index: {i}}} : f32{shape}\n");
            writes += &format!("  write %{} <- %{next}\n", k * n + i);
            next += 1;
        }
    }
    text + &writes + "  return\n}"
}

#[test]
fn speeds() {
    if std::env::var("KILN_SPEED").is_err() {
        return;
    }
    let shape = "[4096, 1024]";
    measure(
        "softmax",
        "graph(%0: f32[4096, 1024]) {
  %1 = amax(%0) {dims: [1], keepdim: false} : f32[4096]
  %2 = reshape(%1) {shape: [4096, 1]} : f32[4096, 1]
  %3 = expand(%2) {shape: [4096, 1024]} : f32[4096, 1024]
  %4 = sub(%0, %3) : f32[4096, 1024]
  %5 = exp(%4) : f32[4096, 1024]
  %6 = sum(%5) {dims: [1], keepdim: false} : f32[4096]
  %7 = reshape(%6) {shape: [4096, 1]} : f32[4096, 1]
  %8 = expand(%7) {shape: [4096, 1024]} : f32[4096, 1024]
  %9 = div(%5, %8) : f32[4096, 1024]
  return %9
}",
    );
    measure(
        "chain10",
        &format!(
            "graph(%0: f32{shape}, %1: float, %2: float, %3: float) {{
  %4 = mul(%0, %1) : f32{shape}
  %5 = add(%4, %2) : f32{shape}
  %6 = tanh(%5) : f32{shape}
  %7 = mul(%6, %0) : f32{shape}
  %8 = sigmoid(%7) : f32{shape}
  %9 = add(%8, %0) : f32{shape}
  %10 = exp(%9) : f32{shape}
  %11 = sub(%10, %2) : f32{shape}
  %12 = maximum(%11, %3) : f32{shape}
  %13 = sqrt(%12) : f32{shape}
  %14 = mul(%13, %3) : f32{shape}
  %15 = add(%14, %0) : f32{shape}
  return %15
}}"
        ),
    );
    measure(
        "sum0",
        &format!(
            "graph(%0: f32{shape}) {{
  %1 = mul(%0, %0) : f32{shape}
  %2 = sum(%1) {{dims: [0], keepdim: false}} : f32[1024]
  return %2
}}"
        ),
    );
    measure(
        "sum",
        &format!(
            "graph(%0: f32{shape}) {{
  %1 = mul(%0, %0) : f32{shape}
  %2 = sum(%1) {{dims: [0, 1], keepdim: false}} : f32[]
  return %2
}}"
        ),
    );
    // Sums along rows and over rows of the same operands.
    let golden = include_str!("golden/layer_norm_gradient.kir");
    let gradient = golden.split_once('\n').unwrap().1.split_once("; ----").unwrap().0;
    measure("norm", gradient);
    measure("norm large", &gradient.replace("512", "4096").replace("384", "1024"));
    measure("adam", &adam(10, "[1024, 1024]"));
    measure("adam1000", &adam(1000, "[128, 128]"));
}
