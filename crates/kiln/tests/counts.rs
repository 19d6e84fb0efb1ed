//! Promises that are numbers: kernels, bytes moved, graphs, breaks, recompiles, allocations.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
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
