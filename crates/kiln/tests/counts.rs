//! Promises that are numbers: kernels, bytes moved, graphs, breaks, recompiles, allocations.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};

use kiln::nn::seq;
use kiln::prelude::*;
use kiln::{Region, Result};

const CPU: Device = Device::Cpu;

/// The system's allocator; counts the calls of a thread that asks for it.
struct Counted;

thread_local! {
    static COUNT: Cell<Option<usize>> = const { Cell::new(None) };
}

fn note() {
    // Absent while a thread ends; nothing is counted then.
    let _ = COUNT.try_with(|count| count.set(count.get().map(|n| n + 1)));
}

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

fn allocations<T>(body: impl FnOnce() -> T) -> usize {
    COUNT.set(Some(0));
    drop(body());
    COUNT.replace(None).unwrap_or(0)
}

/// The random stream is the process's: tests take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// An optimizer step that is one graph of one kernel and moves so many bytes a parameter.
fn check_step(optimizer: &dyn Optimizer, bytes: usize) -> Result<()> {
    let region = Compile::new().fullgraph(true).region();
    for _ in 0..4 {
        region.run(|| optimizer.step())?;
    }
    let explanation = region.explain();
    let count: usize = optimizer.parameters().iter().map(Tensor::numel).sum();
    assert_eq!(explanation.graphs.len(), 1, "{explanation}");
    assert!(explanation.recompiles.is_empty() && explanation.fallbacks.is_empty(), "{explanation}");
    let graph = &explanation.graphs[0];
    assert_eq!((&graph.interpreted, graph.kernels, graph.library_calls), (&None, 1, 0), "{explanation}");
    assert!(graph.fallbacks.is_empty(), "{explanation}");
    assert_eq!(graph.bytes_read + graph.bytes_written, bytes * count, "{explanation}");
    assert_eq!(graph.arena_bytes, 0, "{explanation}");
    Ok(())
}

#[test]
fn the_recipe_is_one_kernel_of_28_bytes_a_parameter() -> Result<()> {
    let _turn = turn();
    let linear = nn::Linear::options().bias(false).device(&CPU);
    let model = nn::Sequential::from_iter((0..10).map(|_| linear.build(32, 32)))?;
    model.forward(&Tensor::rand([32], &CPU)?)?.sum()?.backward()?;
    // Reads parameter, gradient and both moments, writes parameter and moments: seven floats.
    check_step(&optim::Adam::new(model.parameters(), 0.01)?, 28)?;
    check_step(&optim::AdamW::new(model.parameters(), 0.01)?, 28)?;
    // Parameter, gradient and momentum; parameter and momentum.
    check_step(&optim::SGD::options().lr(0.01).momentum(0.9).build(model.parameters())?, 20)
}

#[test]
fn adam_over_a_thousand_tensors_is_one_kernel() -> Result<()> {
    let _turn = turn();
    let mut parameters = Vec::new();
    for i in 0..1000 {
        // Odd lengths: no two tails are alike.
        let p = Tensor::randn([8, 1 + i % 13], &CPU)?;
        p.requires_grad_(true)?;
        p.set_grad(Some(Tensor::ones([8, 1 + i % 13], &CPU)?));
        parameters.push(p);
    }
    check_step(&optim::Adam::new(parameters, 0.01)?, 28)
}

/// Some parameters with gradients.
fn parameters() -> Result<Vec<Tensor>> {
    let parameter = |i: usize| -> Result<Tensor> {
        let p = Tensor::randn([3, 5 + i], &CPU)?;
        p.requires_grad_(true)?;
        p.set_grad(Some(Tensor::randn([3, 5 + i], &CPU)?));
        Ok(p)
    };
    (0..3).map(parameter).collect()
}

type Make = fn(Vec<Tensor>) -> Result<Box<dyn Optimizer>>;

/// Every optimizer, with the options that make it do most.
const OPTIMIZERS: [(&str, Make); 9] = [
    ("SGD", |p| Ok(Box::new(optim::SGD::options().momentum(0.9).weight_decay(0.1).build(p)?))),
    ("Adam", |p| Ok(Box::new(optim::Adam::options().amsgrad(true).weight_decay(0.1).build(p)?))),
    ("AdamW", |p| Ok(Box::new(optim::AdamW::new(p, 0.01)?))),
    ("RMSprop", |p| {
        Ok(Box::new(optim::RMSprop::options().momentum(0.9).centered(true).weight_decay(0.1).build(p)?))
    }),
    ("Adagrad", |p| Ok(Box::new(optim::Adagrad::options().lr_decay(0.1).weight_decay(0.1).build(p)?))),
    ("Adadelta", |p| Ok(Box::new(optim::Adadelta::options().weight_decay(0.1).build(p)?))),
    ("Adamax", |p| Ok(Box::new(optim::Adamax::options().weight_decay(0.1).build(p)?))),
    ("NAdam", |p| Ok(Box::new(optim::NAdam::options().weight_decay(0.1).build(p)?))),
    // Its sixth step is the first that adapts: all steps are the same ops.
    ("RAdam", |p| {
        Ok(Box::new(optim::RAdam::options().weight_decay(0.1).decoupled_weight_decay(true).build(p)?))
    }),
];

#[test]
fn every_optimizer_is_one_kernel() -> Result<()> {
    let _turn = turn();
    for (name, make) in OPTIMIZERS {
        manual_seed(1);
        let eager = parameters()?;
        manual_seed(1);
        let compiled = parameters()?;
        let (by_hand, optimizer) = (make(eager.clone())?, make(compiled.clone())?);
        let region = Compile::new().fullgraph(true).region();
        for _ in 0..8 {
            by_hand.step()?;
            region.run(|| optimizer.step())?;
        }
        for (a, b) in eager.iter().zip(&compiled) {
            assert_eq!(a.to_vec::<f32>()?, b.to_vec::<f32>()?, "{name}");
        }
        let explanation = region.explain();
        assert_eq!(explanation.graphs.len(), 1, "{name}: {explanation}");
        assert!(
            explanation.recompiles.is_empty() && explanation.fallbacks.is_empty(),
            "{name}: {explanation}"
        );
        let graph = &explanation.graphs[0];
        assert!(graph.interpreted.is_none() && graph.fallbacks.is_empty(), "{name}: {explanation}");
        assert_eq!((graph.kernels, graph.library_calls), (1, 0), "{name}: {explanation}");
    }
    Ok(())
}

#[test]
fn no_schedule_recompiles_any_optimizer() -> Result<()> {
    use optim::lr_scheduler::*;
    let _turn = turn();
    let schedules: [(&str, fn() -> Box<dyn Schedule>); 9] = [
        ("StepLR", || Box::new(StepLR::new(2).gamma(0.5))),
        ("MultiStepLR", || Box::new(MultiStepLR::new(&[1, 3]))),
        ("ExponentialLR", || Box::new(ExponentialLR::new(0.9))),
        ("CosineAnnealingLR", || Box::new(CosineAnnealingLR::new(3))),
        ("LinearLR", || Box::new(LinearLR::new().total_iters(3))),
        ("LambdaLR", || Box::new(LambdaLR::new(|epoch| 0.9f64.powi(epoch as i32)))),
        ("OneCycleLR", || Box::new(OneCycleLR::new(0.1, 6).cycle_momentum(false))),
        ("OneCycleLR with momentum", || Box::new(OneCycleLR::new(0.1, 6))),
        ("SequentialLR", || Box::new(SequentialLR::new(ConstantLR::new()).then(3, ExponentialLR::new(0.5)))),
    ];
    for (name, make) in OPTIMIZERS {
        for (schedule_name, schedule) in schedules {
            let optimizer = make(parameters()?)?;
            if schedule().momentum(0).is_some() && optimizer.momenta().is_empty() {
                continue;
            }
            let scheduler = schedule().on(&optimizer)?;
            let region = Compile::new().fullgraph(true).region();
            let mut lrs = Vec::new();
            for _ in 0..5 {
                region.run(|| optimizer.step())?;
                lrs.push(optimizer.lr());
                scheduler.step()?;
            }
            assert!(lrs.iter().any(|lr| *lr != lrs[0]), "{schedule_name} turns the learning rate: {lrs:?}");
            let explanation = region.explain();
            assert_eq!(explanation.graphs.len(), 1, "{name}, {schedule_name}: {explanation}");
            assert!(explanation.recompiles.is_empty(), "{name}, {schedule_name}: {explanation}");
        }
        let optimizer = make(parameters()?)?;
        let scheduler = ReduceLROnPlateau::new().patience(0).on(&optimizer)?;
        let region = Compile::new().fullgraph(true).region();
        for _ in 0..5 {
            region.run(|| optimizer.step())?;
            scheduler.step(1.0);
        }
        let explanation = region.explain();
        assert!(explanation.graphs.len() == 1 && explanation.recompiles.is_empty(), "{name}: {explanation}");
    }
    Ok(())
}

/// A convolutional network in training, with clipped gradients, a schedule and a hook: one graph, and what eager
/// mode computes.
#[test]
fn a_step_of_many_layers_is_one_graph() -> Result<()> {
    use nn::{BatchNorm2d, ClipNorm, Conv2d, Flatten, Linear, MaxPool2d, ReLU};
    use optim::lr_scheduler::{ExponentialLR, Schedule};
    let _turn = turn();
    let make = || -> Result<_> {
        manual_seed(7);
        let model = seq![
            // Without a bias, which the norm takes away again: its gradient would be rounding alone.
            Conv2d::options().padding(1).bias(false).build(2, 4, 3)?,
            BatchNorm2d::options().momentum(None).build(4)?,
            ReLU,
            MaxPool2d::new(2),
            Flatten::default(),
            Linear::new(4 * 3 * 3, 5)?
        ];
        let optimizer = optim::RMSprop::options().lr(1e-3).build(model.parameters())?;
        Ok((model, optimizer))
    };
    manual_seed(3);
    let (x, y) = (Tensor::randn([4, 2, 6, 6], &CPU)?, Tensor::from_slice(&[0i64, 3, 1, 4])?);
    let step = |model: &nn::Sequential, optimizer: &optim::RMSprop| -> Result<Tensor> {
        optimizer.zero_grad();
        let loss = model.forward(&x)?.cross_entropy(&y)?;
        loss.backward()?;
        nn::clip_grad_norm_(&model.parameters(), 0.5, ClipNorm::default())?;
        nn::clip_grad_value_(&model.parameters(), 0.2)?;
        optimizer.step()?;
        Ok(loss)
    };
    let ((eager, by_hand), (model, optimizer)) = (make()?, make()?);
    let (first, second) = (ExponentialLR::new(0.9).on(&by_hand)?, ExponentialLR::new(0.9).on(&optimizer)?);
    model.register_forward_hook(|_, y| Ok(Some(y.mul(2.0)?)))?;
    eager.register_forward_hook(|_, y| Ok(Some(y.mul(2.0)?)))?;
    let region = Compile::new().fullgraph(true).region();
    for i in 0..6 {
        let want = step(&eager, &by_hand)?.item::<f32>()?;
        let got = region.run(|| step(&model, &optimizer))?.item::<f32>()?;
        assert!((got - want).abs() <= 1e-4 * want.abs().max(1.0), "step {i}: {got} instead of {want}");
        first.step()?;
        second.step()?;
    }
    for ((name, a), (_, b)) in eager.state_dict().iter().zip(model.state_dict().iter()) {
        for (a, b) in a.to_vec_cast::<f64>()?.iter().zip(b.to_vec_cast::<f64>()?) {
            assert!((a - b).abs() <= 1e-3 * b.abs().max(1.0), "{name}: {a} instead of {b}");
        }
    }
    let explanation = region.explain();
    assert!(explanation.graphs.len() == 1 && explanation.recompiles.is_empty(), "{explanation}");
    Ok(())
}

/// A model that is converted between calls keeps its tensors: the compiled program sees the other dtype.
#[test]
fn conversion_is_seen_by_a_compiled_model() -> Result<()> {
    let _turn = turn();
    let model = nn::Linear::new(4, 3)?;
    let compiled = (&model).compile();
    let x = Tensor::randn([2, 4], &CPU)?;
    for dtype in [DType::F32, DType::F64, DType::F32, DType::F64] {
        model.to(dtype)?;
        let x = x.to_dtype(dtype)?;
        let (got, want) = (compiled.forward(&x)?, model.forward(&x)?);
        assert_eq!((got.dtype(), got.to_vec_cast::<f64>()?), (dtype, want.to_vec_cast::<f64>()?));
    }
    // In the middle of a call, too: what was recorded before does not hold for what comes after.
    let region = Compile::new().region();
    for _ in 0..3 {
        model.to(DType::F32)?;
        let (first, second) = region.run(|| {
            let first = model.forward(&x)?;
            model.to(DType::F64)?;
            Ok::<_, kiln::Error>((first, model.forward(&x.to_dtype(DType::F64)?)?))
        })?;
        assert_eq!((first.dtype(), second.dtype()), (DType::F32, DType::F64));
        for (a, b) in first.to_vec_cast::<f64>()?.iter().zip(second.to_vec_cast::<f64>()?) {
            assert!((a - b).abs() < 1e-5, "{a} and {b}");
        }
    }
    Ok(())
}

struct Training {
    model: Box<dyn Fn(&Tensor) -> Result<Tensor>>,
    optimizer: optim::Adam,
    x: Tensor,
    y: Tensor,
}

impl Training {
    /// A small classifier from seed 3: two of them start from the same numbers.
    fn new() -> Result<Training> {
        manual_seed(3);
        let model = seq![
            nn::Linear::new(32, 32)?,
            nn::Gelu::default(),
            nn::Linear::new(32, 32)?,
            nn::Gelu::default(),
            nn::Linear::new(32, 10)?
        ];
        let optimizer = optim::Adam::new(model.parameters(), 0.01)?;
        let x = Tensor::randn([16, 32], &CPU)?;
        let y = Tensor::from_vec((0..16).map(|i| (i * 7 % 10) as i64).collect(), [16])?;
        Ok(Training { model: Box::new(move |x| model.forward(x)), optimizer, x, y })
    }

    fn step(&self) -> Result<Tensor> {
        self.optimizer.zero_grad();
        let loss = (self.model)(&self.x)?.cross_entropy(&self.y)?;
        loss.backward()?;
        self.optimizer.step()?;
        Ok(loss)
    }
}

#[test]
fn a_training_step_is_one_graph() -> Result<()> {
    let _turn = turn();
    let (eager, compiled) = (Training::new()?, Training::new()?);
    let region = Compile::new().fullgraph(true).region();
    let mut first = None;
    for step in 0..20 {
        let want = eager.step()?.item::<f32>()?;
        let got = region.run(|| compiled.step())?.item::<f32>()?;
        assert!((got - want).abs() <= 1e-5 * want.abs().max(1.0), "step {step}: {got} instead of {want}");
        first.get_or_insert(want);
    }
    let last = eager.step()?.item::<f32>()?;
    assert!(last < 0.5 * first.unwrap_or(0.0), "the network learns: {last}");
    for (a, b) in compiled.optimizer.parameters().iter().zip(eager.optimizer.parameters()) {
        let b = b.to_vec::<f32>()?;
        assert!(
            a.to_vec::<f32>()?.iter().zip(b).all(|(a, b)| (a - b).abs() < 0.02),
            "within two steps' updates"
        );
    }
    let explanation = region.explain();
    assert_eq!(explanation.graphs.len(), 1, "{explanation}");
    assert!(explanation.breaks.is_empty() && explanation.recompiles.is_empty(), "{explanation}");
    assert!(explanation.fallbacks.is_empty(), "{explanation}");
    let graph = &explanation.graphs[0];
    assert!(graph.interpreted.is_none() && graph.fallbacks.is_empty(), "{explanation}");
    // The tape is used up inside: nothing is kept for a backward that can't come.
    assert!(!graph.has_backward && graph.bytes_saved == 0, "{explanation}");
    Ok(())
}

fn chain(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let mut z = x.mul(1.0)?;
    for _ in 0..249 {
        z = z.add(y)?;
        z = z.mul(0.5)?;
    }
    z.add(1.0)
}

#[test]
fn replay_asks_for_no_memory() -> Result<()> {
    let _turn = turn();
    let (x, y) = (Tensor::rand([1], &CPU)?, Tensor::rand([1], &CPU)?);
    let region: Region = Compile::new().region();
    for _ in 0..5 {
        region.run(|| chain(&x, &y))?;
    }
    let explanation = region.explain();
    assert_eq!((explanation.graphs.len(), explanation.graphs[0].nodes), (1, 500), "{explanation}");
    for call in 0..3 {
        let count = allocations(|| region.run(|| chain(&x, &y)));
        assert_eq!(count, 0, "allocations in call {call}");
    }
    Ok(())
}

#[test]
fn an_optimizer_step_asks_for_little_memory() -> Result<()> {
    let _turn = turn();
    let p = Tensor::randn([64], &CPU)?;
    p.requires_grad_(true)?;
    p.set_grad(Some(Tensor::ones([64], &CPU)?));
    let optimizer = optim::SGD::options().lr(0.1).momentum(0.9).build(vec![p])?;
    let region = Compile::new().region();
    for _ in 0..5 {
        region.run(|| optimizer.step())?;
    }
    let count = allocations(|| region.run(|| optimizer.step()));
    // The handful of lists of the optimizer itself.
    assert!(count <= 16, "{count} allocations");
    Ok(())
}

/// A step with convolutions, which are library calls inside the program: their tables of offsets come from the
/// storage pool as everything else does.
#[test]
fn a_training_step_with_convolutions_asks_for_little_memory() -> Result<()> {
    use nn::{Conv2d, Flatten, Linear, MaxPool2d, ReLU};
    let _turn = turn();
    manual_seed(5);
    let model = seq![
        Conv2d::options().padding(1).build(2, 4, 3)?,
        ReLU,
        MaxPool2d::new(2),
        Conv2d::options().padding(1).stride(2).build(4, 4, 3)?,
        Flatten::default(),
        Linear::new(4 * 4 * 4, 5)?
    ];
    let (x, y) = (Tensor::randn([4, 2, 16, 16], &CPU)?, Tensor::from_slice(&[0i64, 3, 1, 4])?);
    let optimizer = optim::SGD::new(model.parameters(), 0.01)?;
    let region = Compile::new().fullgraph(true).region();
    let step = || -> Result<()> {
        optimizer.zero_grad();
        model.forward(&x)?.cross_entropy(&y)?.backward()?;
        optimizer.step()
    };
    for _ in 0..5 {
        region.run(step)?;
    }
    let explanation = region.explain();
    assert_eq!(explanation.graphs.len(), 1, "{explanation}");
    let counts: Vec<usize> = (0..3).map(|_| allocations(|| region.run(step))).collect();
    // Lists of the optimizer and attributes of the ops that the layers ask for; of the program itself at most one
    // a library call.
    assert!(counts.iter().all(|&count| count <= 26), "{counts:?} allocations");
    let region = Compile::new().fullgraph(true).region();
    let forward = || {
        let _mode = no_grad();
        model.forward(&x)
    };
    for _ in 0..5 {
        region.run(forward)?;
    }
    let counts: Vec<usize> = (0..3).map(|_| allocations(|| region.run(forward))).collect();
    // Five for the attributes and operands of each convolution, nine for the pool's.
    assert!(counts.iter().all(|&count| count <= 2 * 5 + 9 + 1), "{counts:?} allocations");
    Ok(())
}

/// What the first call of a program costs: allocations, kernel launches, different kernels.
struct FirstCall {
    allocations: usize,
    launches: usize,
    kernels: usize,
}

fn first_call(name: &str, program: impl Fn() -> Result<Vec<Tensor>>) -> Result<FirstCall> {
    let region = Compile::new().fullgraph(true).region();
    let mut outcome = Ok(Vec::new());
    let allocations = allocations(|| outcome = region.run(&program));
    outcome?;
    let explanation = region.explain();
    assert_eq!(explanation.graphs.len(), 1, "{name}: {explanation}");
    let graph = &explanation.graphs[0];
    assert_eq!(graph.interpreted, None, "{name}");
    let names: BTreeSet<&str> = graph.steps.iter().map(|step| step.name.as_str()).collect();
    Ok(FirstCall { allocations, launches: graph.kernels, kernels: names.len() })
}

/// A cell of a recurrent network written by hand, unrolled, with its gradients.
fn unrolled(steps: usize) -> Result<Vec<Tensor>> {
    let xs = Tensor::ones([steps, 4, 8], &CPU)?;
    let (of_x, of_h) = (Tensor::ones([8, 32], &CPU)?, Tensor::ones([8, 32], &CPU)?);
    of_x.requires_grad_(true)?;
    of_h.requires_grad_(true)?;
    let (mut h, mut c) = (Tensor::zeros([4, 8], &CPU)?, Tensor::zeros([4, 8], &CPU)?);
    let mut all = Vec::new();
    for step in 0..steps {
        let gates = xs.select(0, step as i64)?.matmul(&of_x)?.add(&h.matmul(&of_h)?)?;
        let gates = gates.chunk(4, 1)?;
        c = gates[1].sigmoid()?.mul(&c)?.add(&gates[0].sigmoid()?.mul(&gates[2].tanh()?)?)?;
        h = gates[3].sigmoid()?.mul(&c.tanh()?)?;
        all.push(h.clone());
    }
    Tensor::stack(&all, 0)?.square()?.mean()?.backward()?;
    Ok([of_x.grad(), of_h.grad()].into_iter().flatten().collect())
}

/// One op after the other, of ten kinds.
fn chained(ops: usize) -> Result<Vec<Tensor>> {
    let (x, w) = (Tensor::ones([4, 32], &CPU)?, Tensor::ones([4, 32], &CPU)?);
    let mut y = x.clone();
    for i in 0..ops {
        y = match i % 10 {
            0 => y.mul(&w)?,
            1 => y.add(&x)?,
            2 => y.tanh()?,
            3 => y.mul(0.5)?,
            4 => y.sigmoid()?,
            5 => y.sub(&x)?,
            6 => y.abs()?,
            7 => y.add(0.1)?,
            8 => y.maximum(&w)?,
            _ => y.neg()?,
        };
    }
    Ok(vec![y.sum()?])
}

/// A sum of terms that all read the same tensors.
fn summed(terms: usize) -> Result<Vec<Tensor>> {
    let (x, w) = (Tensor::ones([4, 32], &CPU)?, Tensor::ones([4, 32], &CPU)?);
    let mut total = x.mul(0.0)?;
    for _ in 0..terms {
        total = total.add(&x.mul(0.5)?.add(&w)?.tanh()?.mul(&total)?)?;
    }
    Ok(vec![total.sum()?])
}

/// Rows of a tensor, and windows that meet, with its gradient.
fn rows_and_windows(rows: usize) -> Result<Vec<Tensor>> {
    let x = Tensor::ones([rows, 32], &CPU)?;
    x.requires_grad_(true)?;
    let mut total = x.select(0, 0)?.tanh()?;
    for row in 1..rows {
        total = total.add(&x.select(0, row as i64)?.tanh()?)?;
        total = total.mul(&x.narrow(0, row - 1, 2)?.sum_dim(0, false)?)?;
    }
    total.sum()?.backward()?;
    Ok(x.grad().into_iter().collect())
}

/// Twice the ops are twice the work, and equal bodies have equal kernels: what a loop adds to a graph by going on is no
/// new kernel.
#[test]
fn first_calls_grow_with_the_number_of_ops() -> Result<()> {
    let _turn = turn();
    type Program = fn(usize) -> Result<Vec<Tensor>>;
    let programs: [(&str, Program, usize); 4] = [
        ("unrolled", unrolled, 24),
        ("chained", chained, 1600),
        ("summed", summed, 200),
        ("rows and windows", rows_and_windows, 60),
    ];
    for (name, program, size) in programs {
        let once = first_call(name, || program(size))?;
        let twice = first_call(name, || program(2 * size))?;
        let ratio = twice.allocations as f64 / once.allocations as f64;
        assert!(ratio < 2.3, "{name}: {} allocations, then {}", once.allocations, twice.allocations);
        assert!(
            twice.launches <= 2 * once.launches + 4,
            "{name}: {} launches, then {}",
            once.launches,
            twice.launches
        );
        assert!(
            twice.kernels <= once.kernels + 4,
            "{name}: {} kernels, then {}",
            once.kernels,
            twice.kernels
        );
    }
    Ok(())
}
