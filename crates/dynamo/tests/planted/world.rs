//! The big program: a training step with everything that compilers get wrong, as one graph of some five hundred ops.
//!
//! A step trains a small language model (`text`), whose gradients go into a list optimizer (`lists`), runs pictures
//! through convolutions whose results leave with gradients (`pictures`), and does a bit of everything else to tables of
//! numbers (`tables`). Sizes are small and odd; one vector is long enough for chunks and threads.

use kiln_tensor::{DType, Device, Result, Tensor, no_grad};

use crate::lists::Optimizer;
use crate::pictures::Pictures;
use crate::tables::Tables;
use crate::text::Text;

pub const CPU: Device = Device::Cpu;

/// Numbers between −1 and 1 that look random.
pub fn numbers(seed: u64, shape: &[usize]) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    Tensor::from_vec((0..shape.iter().product()).map(|_| next()).collect::<Vec<f32>>(), shape)
}

/// Whole numbers from 0 to below `end` that look random.
pub fn whole(seed: u64, shape: &[usize], end: i64) -> Result<Tensor> {
    numbers(seed, shape)?.add(1.0)?.mul(end as f64 / 2.0)?.floor()?.to_dtype(DType::I64)?.clamp_max(end - 1)
}

/// A tensor that wants a gradient.
pub fn parameter(seed: u64, shape: &[usize], scale: f64) -> Result<Tensor> {
    let leaf = numbers(seed, shape)?.mul(scale)?;
    leaf.requires_grad_(true)?;
    Ok(leaf)
}

/// What was seen of a tensor.
pub struct Note {
    pub name: String,
    pub dtype: DType,
    pub values: Vec<f64>,
}

/// What is seen of a run, in order.
#[derive(Default)]
pub struct Notes(pub Vec<Note>);

impl Notes {
    pub fn see(&mut self, name: impl Into<String>, tensor: &Tensor) -> Result<()> {
        let note = Note { name: name.into(), dtype: tensor.dtype(), values: tensor.to_vec_cast::<f64>()? };
        self.0.push(note);
        Ok(())
    }
}

/// Results under their names.
pub type Results = Vec<(&'static str, Tensor)>;

/// Everything the program works on.
pub struct World {
    pub text: Text,
    pub optimizer: Optimizer,
    pub pictures: Pictures,
    pub tables: Tables,
}

/// What a step gives.
pub struct Step {
    pub results: Results,
    /// Two results of one type that gradients are going to arrive for.
    pub leaving: [Tensor; 2],
}

impl World {
    pub fn new() -> Result<World> {
        let text = Text::new(5)?;
        let optimizer = Optimizer::new(&text.parameters())?;
        Ok(World { text, optimizer, pictures: Pictures::new()?, tables: Tables::new()? })
    }

    /// One step, all of it one graph. `rate` is another number in every call.
    pub fn step(&self, rate: f64) -> Result<Step> {
        let mut results = vec![("loss", self.text.train()?)];
        results.extend(self.optimizer.step(&self.text.parameters(), rate)?);
        let leaving = self.pictures.features()?;
        results.extend(self.tables.all(rate)?);
        Ok(Step { results, leaving })
    }

    /// One step, run by `run` (eagerly, or compiled), and what it left behind.
    pub fn call(
        &self,
        run: &dyn Fn(&dyn Fn() -> Result<Step>) -> Result<Step>,
        rate: f64,
        notes: &mut Notes,
    ) -> Result<()> {
        let gone = self.text.parameters().into_iter().chain(self.pictures.parameters());
        gone.chain([self.tables.slope.clone()]).for_each(|parameter| parameter.set_grad(None));
        let Step { results, leaving: [one, other] } = run(&|| self.step(rate))?;
        for (name, result) in &results {
            notes.see(*name, result)?;
        }
        // The gradients that go on outside.
        notes.see("features", &one)?;
        notes.see("gated", &other)?;
        let weight = |seed| numbers(seed, &one.shape());
        one.mul(&weight(1)?)?.sum()?.add(&other.mul(&weight(2)?)?.sum()?)?.backward()?;
        let _guard = no_grad();
        let named = |name: &'static str, all: Vec<Tensor>| {
            all.into_iter().enumerate().map(move |(i, tensor)| (format!("{name} {i}"), tensor))
        };
        let grads = |all: Vec<Tensor>| all.iter().filter_map(Tensor::grad).collect::<Vec<_>>();
        let seen = named("text gradient", grads(self.text.parameters()))
            .chain(named("picture gradient", grads(self.pictures.parameters())))
            .chain(named("slope gradient", grads(vec![self.tables.slope.clone()])))
            .chain(named("optimizer", self.optimizer.state()))
            .chain(named("picture state", self.pictures.state()))
            .chain(named("table", self.tables.state()));
        seen.into_iter().try_for_each(|(name, tensor)| notes.see(name, &tensor))
    }
}
