//! Absurd arguments: every row with each of its numbers moved to absurd places, and every method that takes a size, a
//! dim or a count. Each call ends in a result or an error, forward and backward, never in a panic, and never in memory
//! that the machine does not have: the allocator of this test refuses large pieces, which ends the process wherever a
//! refusal is not handled.

#![allow(clippy::unwrap_used, clippy::print_stderr)] // a test may panic, and print what it does
#![allow(clippy::needless_borrows_for_generic_args)] // every form of an argument

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kiln_ir::{Class, Op, Row, SampleArg};
use kiln_tensor::hook::{Arg, Output};
use kiln_tensor::{
    ConvTranspose, DType, Device, Error, IndexOp, Indexer, Interpolation, Pool, Result, Shape, Tensor, run_op,
};

/// Refuses what no call of this test needs.
struct Small;

const MOST_BYTES: usize = 1 << 28;

// SAFETY: what is not refused is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Small {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > MOST_BYTES {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > MOST_BYTES {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Small = Small;

const CPU: Device = Device::Cpu;
const SIZES: [usize; 8] = [0, 1, 3, 65, 1 << 40, 1 << 62, i64::MAX as usize, usize::MAX];
const DIMS: [i64; 9] = [i64::MIN, i64::MIN + 1, -65, -5, -1, 0, 64, 1 << 40, i64::MAX];
/// Larger results (views of one element) are not added up.
const MOST_ELEMENTS: usize = 1 << 20;

/// Runs a call and, where it has a result, its backward; `None`, or what is wrong.
fn outcome(call: impl FnOnce() -> Result<Vec<Tensor>>) -> Option<String> {
    let run = || {
        let Ok(results) = call() else { return };
        for y in results.iter().filter(|y| y.numel() <= MOST_ELEMENTS) {
            let _text = y.to_string();
            if y.requires_grad() {
                let _error = y.sum().and_then(|y| y.backward());
            }
        }
    };
    catch_unwind(AssertUnwindSafe(run)).err()?;
    Some(PANIC.take())
}

thread_local! {
    /// What this thread's last panic said, and where.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

fn catch_panics() {
    std::panic::set_hook(Box::new(|info| PANIC.set(info.to_string())));
}

/// What is going on when the process ends: `KILN_SWEEP=1` prints every call first.
fn say(call: &str) {
    if std::env::var_os("KILN_SWEEP").is_some() {
        eprintln!("{call}");
    }
}

fn leaf(shape: impl Into<Shape>) -> Tensor {
    let x = Tensor::ones(shape, &CPU).unwrap();
    x.requires_grad_(true).unwrap();
    x
}

fn operands(args: &[SampleArg], dtype: DType) -> Vec<Result<Tensor, kiln_ir::Scalar>> {
    let tensor = |dtype, shape: &Shape| {
        let x = Tensor::full_of(shape, 1, dtype, &CPU).unwrap();
        if dtype.is_float() {
            x.requires_grad_(true).unwrap();
        }
        x
    };
    args.iter()
        .map(|arg| match arg {
            SampleArg::Tensor(shape, _) => Ok(tensor(dtype, shape)),
            SampleArg::Fixed(dtype, shape, _) => Ok(tensor(*dtype, shape)),
            SampleArg::Number(x) => Err(*x),
        })
        .collect()
}

fn run(op: &Op, args: &[Result<Tensor, kiln_ir::Scalar>]) -> Result<Vec<Tensor>> {
    let args: Vec<Arg<'_>> = args
        .iter()
        .map(|arg| match arg {
            Ok(tensor) => Arg::Tensor(tensor),
            Err(number) => Arg::Number(*number),
        })
        .collect();
    match run_op(op, &args)? {
        Output::Tensor(y) => Ok(vec![y]),
        Output::List(_) => Ok(Vec::new()),
    }
}

fn check(failures: &[String]) {
    drop(std::panic::take_hook());
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_row_with_absurd_attributes() {
    catch_panics();
    let rows =
        Op::ROWS.iter().filter(|row| !matches!(row.class, Class::List | Class::Constant | Class::Custom));
    let (mut failures, mut calls) = (Vec::new(), 0);
    for row in rows {
        let samples = row.sample_calls();
        let dtype = |dtypes: &[DType]| *dtypes.iter().find(|d| **d == DType::F32).unwrap_or(&dtypes[0]);
        // The largest samples: with most dims there is most to go wrong.
        let mut samples: Vec<_> = samples.into_iter().filter(|s| !s.dtypes.is_empty()).collect();
        let rank = |arg: &SampleArg| match arg {
            SampleArg::Tensor(shape, _) | SampleArg::Fixed(_, shape, _) => shape.rank(),
            SampleArg::Number(_) => 0,
        };
        samples.sort_by_key(|s| std::cmp::Reverse(s.args.first().map_or(0, rank)));
        for sample in samples.iter().take(3) {
            let mut numbers = 0;
            sample.op.clone().each_number(&mut |_, _| numbers += 1);
            for at in 0..numbers {
                for value in DIMS.iter().copied().chain([2, 3, 1 << 62]) {
                    let (mut op, mut i) = (sample.op.clone(), 0);
                    op.each_number(&mut |_, number| {
                        if i == at {
                            *number = value;
                        }
                        i += 1;
                    });
                    let text = format!("{} {:?}", op.name(), op.attributes());
                    say(&text);
                    calls += 1;
                    let args = operands(&sample.args, dtype(sample.dtypes));
                    if let Some(panic) = outcome(|| run(&op, &args)) {
                        failures.push(format!("{text}: {panic}"));
                    }
                }
            }
        }
        whole_shapes(row, &mut failures);
    }
    check(&failures);
    assert!(calls > 2000, "{calls}");
}

/// Operands without elements and with large sizes, and with as many dims as there may be.
fn whole_shapes(row: &Row, failures: &mut Vec<String>) {
    for sample in row.sample_calls().iter().take(2) {
        for shape in [Shape::from([0, 1 << 40]), Shape::from([1 << 40, 0]), Shape::from(vec![1; 64])] {
            let mut args = sample.args.clone();
            for arg in &mut args {
                if let SampleArg::Tensor(own, _) = arg {
                    *own = shape.clone();
                }
            }
            let dtype = *sample.dtypes.iter().find(|d| **d == DType::F32).unwrap_or(&sample.dtypes[0]);
            let text = format!("{} {:?} of {shape}", sample.op.name(), sample.op.attributes());
            say(&text);
            let args = operands(&args, dtype);
            if let Some(panic) = outcome(|| run(&sample.op, &args)) {
                failures.push(format!("{text}: {panic}"));
            }
        }
    }
}

macro_rules! sweep {
    ($failures:ident, $values:expr, |$value:ident| $($call:expr);* $(;)?) => {
        for $value in $values {
            $(
                let text = format!("{} with {} = {}", stringify!($call), stringify!($value), $value);
                say(&text);
                if let Some(panic) = outcome(|| -> Result<Vec<Tensor>> { $call.map(Results::all) }) {
                    $failures.push(format!("{text}: {panic}"));
                }
            )*
        }
    };
}

/// What a method gives, as a list.
trait Results {
    fn all(self) -> Vec<Tensor>;
}
impl Results for Tensor {
    fn all(self) -> Vec<Tensor> {
        vec![self]
    }
}
impl Results for &Tensor {
    fn all(self) -> Vec<Tensor> {
        vec![self.clone()]
    }
}
impl Results for Vec<Tensor> {
    fn all(self) -> Vec<Tensor> {
        self
    }
}
impl Results for (Tensor, Tensor) {
    fn all(self) -> Vec<Tensor> {
        vec![self.0, self.1]
    }
}
impl Results for usize {
    fn all(self) -> Vec<Tensor> {
        Vec::new()
    }
}

#[test]
fn every_method_with_absurd_sizes() {
    catch_panics();
    let mut failures = Vec::new();
    sweep!(failures, SIZES, |n|
        Tensor::zeros(n, &CPU);
        Tensor::ones((n, n), &CPU);
        Tensor::ones((0, n), &CPU);
        Tensor::full([n, 2, n], true, &CPU);
        Tensor::zeros(vec![1; n.min(100_000)], &CPU);
        Tensor::from_vec(vec![1.0f32], vec![1; n.min(100_000)]);
        Tensor::from_vec(Vec::<f32>::new(), [0, n]);
        Tensor::from_vec(Vec::<f32>::new(), [n, n]);
        Tensor::from_bytes(&[], [n, 0], DType::F32);
        Tensor::eye(n, n, &CPU);
        Tensor::linspace(0.0, 1.0, n, &CPU);
        Tensor::rand([n], &CPU);
        Tensor::randn((n, 3), (DType::F64, &CPU));
        Tensor::uniform([n], 0.0, 1.0, &CPU);
        Tensor::randint(0, 5, [n], &CPU);
        Tensor::randint(i64::MIN, i64::MAX, [n], &CPU);
        Tensor::randperm(n, &CPU);
        Tensor::arange(0, n as i64, &CPU);
    );
    let shapes: [&[usize]; 7] =
        [&[2, 4, 6, 6], &[1, 0, 4, 4], &[0, 4, 0], &[1, 9, 0, 3], &[1; 64], &[1 << 40, 0], &[0, 1 << 40, 2]];
    for x in shapes.map(leaf) {
        let counts = |n: usize| Tensor::full([x.shape()[0]], n as i64, &CPU);
        sweep!(failures, SIZES, |n|
            x.chunk(n, 0);
            x.chunk(n, -1);
            x.split(n, 1);
            x.split_sizes(&[n, n], 1);
            x.narrow(1, n, n);
            x.narrow(1, 0, n);
            x.slice(1, 0, i64::MAX, n);
            x.slice_scatter(&x, 1, 0, n, n);
            x.slice_scatter(&x, 1, n, n, 1);
            x.repeat([n, n, n, n, n]);
            x.repeat([1, n, 1, 1]);
            x.tile([n]);
            x.repeat_interleave(n, 1);
            x.repeat_interleave_each(&counts(n)?, 0);
            x.reshape([n, n]);
            x.reshape((n, -1, n));
            x.view((-1, n));
            x.expand([n, n, n, n, n, n]);
            x.expand(vec![1; n.min(100_000)]);
            x.broadcast_to((n, 2, 4, 6, 6));
            x.unflatten(1, (n, n));
            x.unfold(1, n, 1);
            x.unfold(1, 1, n);
            x.as_strided(&[n, n], &[n, n], n);
            x.as_strided(&[2], &[n], 0);
            x.as_strided_scatter(&x, &[2], &[n], n);
            x.pixel_shuffle(n);
            x.pixel_unshuffle(n);
            x.topk(n, -1, true);
            x.to_dtype(DType::I64)?.one_hot(n);
            x.group_norm(n, None, None, 1e-5);
            x.layer_norm(&[n], None, None, 1e-5);
            x.layer_norm(&[n, n, n], None, None, 1e-5);
            x.rms_norm(&[n], None, None);
            x.adaptive_avg_pool2d([n, n]);
            x.adaptive_avg_pool2d([1, n]);
            x.adaptive_avg_pool1d(n);
            x.max_pool2d(Pool::new(n));
            x.max_pool2d(Pool::new(2).stride(n));
            x.max_pool2d(Pool::new(2).padding(n));
            x.max_pool2d(Pool::new(2).dilation(n));
            x.max_pool2d(Pool::new(n).stride(n).padding(n).dilation(n).ceil_mode(true));
            x.avg_pool2d(Pool::new(n));
            x.avg_pool2d(Pool::new(2).stride(n).ceil_mode(true));
            x.avg_pool2d(Pool::new(n).padding(n));
            x.max_pool1d(Pool::new(n).padding(n));
            x.avg_pool1d(Pool::new(n).stride(n));
            x.interpolate([n, n], Interpolation::Nearest);
            x.interpolate([n, 3], Interpolation::Bilinear { align_corners: true });
            x.interpolate(n as f64, Interpolation::Nearest);
            x.conv2d(&leaf([2, 4, 2, 2]), None, n, 0, 1, 1);
            x.conv2d(&leaf([2, 4, 2, 2]), None, 1, n, 1, 1);
            x.conv2d(&leaf([2, 4, 2, 2]), None, 1, 0, n, 1);
            x.conv2d(&leaf([2, 4, 2, 2]), None, n, n, n, n);
            x.conv2d(&leaf([2, 0, 2, 2]), None, 1, 0, 1, n);
            x.conv_transpose2d(&leaf([4, 2, 2, 2]), None, ConvTranspose { stride: [n; 2], ..Default::default() });
            x.conv_transpose2d(&leaf([4, 2, 2, 2]), None, ConvTranspose { padding: [n; 2], ..Default::default() });
            x.conv_transpose2d(&leaf([4, 2, 2, 2]), None, ConvTranspose { dilation: [n; 2], ..Default::default() });
            x.conv_transpose2d(&leaf([4, 2, 2, 2]), None, ConvTranspose { output_padding: [n; 2], stride: [n; 2], ..Default::default() });
            x.conv_transpose2d(&leaf([4, 2, 2, 2]), None, ConvTranspose { groups: n, ..Default::default() });
            x.i(Indexer::range(0, i64::MAX).by(n));
            x.i((.., n as i64));
            x.i(n..);
        );
        sweep!(failures, DIMS, |d|
            x.sum_dim(d, false);
            x.sum_dim([d, d], true);
            x.mean_dim(&[d], true);
            x.amax_dim(d, false);
            x.prod_dim(d, false);
            x.var_dim(d, 1, false);
            x.var_dim(0, d, false);
            x.std_dim(0, d, true);
            x.norm_dim(2.0, d, false);
            x.norm_dim(d as f64, 0, false);
            x.argmax_dim(d, false);
            x.max_dim(d, true);
            x.median_dim(d, true);
            x.sort(d, true);
            x.topk(1, d, false);
            x.cumsum(d);
            x.cumprod(d);
            x.logcumsumexp(d);
            x.softmax(d);
            x.log_softmax(d);
            x.logsumexp(d, false);
            x.permute([d, 0, 1, 2]);
            x.permute(&[d]);
            x.transpose(d, 0);
            x.movedim(d, 0);
            x.movedim(0, d);
            x.unsqueeze(d);
            x.squeeze(d);
            x.flatten_dims(d, -1);
            x.flatten_dims(0, d);
            x.unbind(d);
            x.chunk(2, d);
            x.split(2, d);
            x.select(d, 0);
            x.select(0, d);
            x.select_scatter(&x, d, 0);
            x.select_scatter(&x.select(0, 0)?, 0, d);
            x.slice(d, 0, 1, 1);
            x.slice(0, d, i64::MAX, 1);
            x.slice(0, i64::MIN, d, 1);
            x.narrow(d, 0, 1);
            x.roll(d, 0);
            x.roll(1, d);
            x.roll([d, d], [0, 1]);
            x.roll_all(d);
            x.flip(d);
            x.diagonal(d, 0, 1);
            x.diagonal(0, d, 1);
            x.diag_embed(d, -1, -2);
            x.diag_embed(0, d, 0);
            x.diagonal_scatter(&x, d, 0, 1);
            x.tril(d);
            x.triu(d);
            x.unfold(d, 1, 1);
            x.repeat_interleave(2, d);
            x.pad(&[d, d], 0.0);
            x.pad(&[0, d], 0.0);
            x.reflection_pad(&[d, d]);
            x.replication_pad(&[d, 0]);
            x.reshape([d, -1]);
            x.reshape((d, d));
            x.expand([d, d, d, d, d]);
            x.unflatten(d, [2, 2]);
            x.unflatten(0, [d, d]);
            x.gather(d, &Tensor::full([1, 1, 1, 1], d, &CPU)?);
            x.index_select(d, &Tensor::full([2], d, &CPU)?);
            x.index_select(0, &Tensor::full([2], d, &CPU)?);
            x.index_add(0, &Tensor::full([2], d, &CPU)?, &x);
            x.index_fill(0, &Tensor::full([2], d, &CPU)?, d);
            x.scatter(0, &Tensor::full([1, 1, 1, 1], d, &CPU)?, &x);
            x.take(&Tensor::full([2], d, &CPU)?);
            x.embedding(&Tensor::full([2], d, &CPU)?);
            x.embedding_padded(&Tensor::full([2], 0, &CPU)?, d);
            x.nll_loss(&Tensor::full([2, 6, 6], d, &CPU)?, kiln_tensor::Reduction::Mean);
            x.cross_entropy(&Tensor::full([2], d, &CPU)?);
            x.repeat_interleave_each(&Tensor::full([x.shape()[0]], d, &CPU)?, 0);
            x.glu(d);
            x.cosine_similarity(&x, d, 1e-8);
            Tensor::cat(&[&x, &x], d);
            Tensor::stack([&x, &x], d);
            x.i(d);
            x.i((.., Indexer::range(d, d)));
            x.size(d);
            x.to_vec2::<f32>().map(|rows| rows.len());
            x.to_vec3::<f32>().map(|blocks| blocks.len());
            Tensor::arange(d, i64::MAX, &CPU);
            Tensor::arange(i64::MIN, d, &CPU);
            Tensor::randint(d, i64::MAX, [3], &CPU);
            Tensor::randint(i64::MIN, d, [3], &CPU);
            Tensor::arange_step(d as f64, 1e300, 1.0, &CPU);
            Tensor::linspace(d as f64, f64::NAN, 5, &CPU);
            x.round_decimals(d.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32);
        );
    }
    check(&failures);
}

/// 64 dims work, 65 are an error that says so, wherever a shape comes from.
#[test]
fn tensors_have_at_most_64_dims() -> Result<()> {
    let most = Tensor::ones(vec![1; 64], &CPU)?;
    assert!(most.add(1.0)?.to_string().contains("2."));
    let too_many = [
        Tensor::ones(vec![1; 65], &CPU),
        Tensor::from_vec(vec![1.0f32], vec![1; 65]),
        Tensor::from_bytes(&[0; 4], vec![1; 65], DType::F32),
        most.unsqueeze(0),
        most.reshape(vec![1; 65]),
        most.expand(vec![1; 65]),
        Tensor::stack([&most], 0),
        Tensor::ones(vec![1; 100_000], &CPU),
    ];
    for result in too_many {
        let error = result.err().map(|e: Error| e.to_string()).unwrap_or_default();
        assert!(
            error.contains("a tensor can have at most 64 dims") && error.contains("absurd.rs:"),
            "{error}"
        );
    }
    Ok(())
}

/// A wide range has all 64 bits, and no number outside.
#[test]
fn wide_random_integers() -> Result<()> {
    kiln_tensor::manual_seed(5);
    for (low, high) in
        [(i64::MIN, i64::MAX), (0, i64::MAX), (-3, 1 << 62), (i64::MIN, 0), (-(1 << 40), 1 << 40)]
    {
        let drawn = Tensor::randint(low, high, [4000], &CPU)?.to_vec::<i64>()?;
        assert!(drawn.iter().all(|x| (low..high).contains(x)), "{low}..{high}");
        let (low, high) = (i128::from(low), i128::from(high));
        // Every eighth of the range is met, and the lowest bits are not all alike.
        let eighth = |x: &i64| (i128::from(*x) - low) * 8 / (high - low);
        let counts = (0..8).map(|k| drawn.iter().filter(|x| eighth(x) == k).count());
        assert!(
            counts.clone().all(|n| (350..650).contains(&n)),
            "{low}..{high}: {:?}",
            counts.collect::<Vec<_>>()
        );
        let odd = drawn.iter().filter(|x| *x & 1 == 1).count();
        assert!((1800..2200).contains(&odd), "{low}..{high}: {odd} odd");
    }
    Ok(())
}

#[test]
fn a_step_that_fails_is_the_error_of_its_op() {
    let x = Tensor::zeros([1, 1], (DType::I64, Device::Cpu)).unwrap().expand([3usize, 1 << 40]).unwrap();
    let error = x.logsumexp(1, false).unwrap_err().to_string();
    assert!(error.contains("logsumexp"), "{error}");
    let x = x.to_dtype(DType::F32);
    assert!(x.is_err(), "no such memory");
}

/// Where one dim of a result is empty, nobody goes along the other one.
#[test]
fn gradients_of_empty_pictures() -> Result<()> {
    for empty in [[0, 1 << 40], [1 << 40, 0]] {
        let x = Tensor::ones([1, 2, 3, 4], &CPU)?;
        x.requires_grad_(true)?;
        x.adaptive_avg_pool2d(empty)?.sum()?.backward()?;
        assert_eq!(x.grad().map(|grad| grad.to_vec::<f32>()).transpose()?, Some(vec![0.0; 24]));
    }
    Ok(())
}
