//! [`Checkpoint`]: everything a training loop needs to resume, in one file.

use std::collections::BTreeMap;
use std::path::Path;

use kiln_ir::Loc;
use kiln_nn::internal::{MOST_COUNTED, check_state};
use kiln_nn::optim::Optimizer;
use kiln_nn::optim::lr_scheduler::{PlateauScheduler, Scheduler};
use kiln_nn::safetensors::{self, Metadata, SafeTensorsFile};
use kiln_nn::{Module, StateDict};
use kiln_tensor::{Result, RngState, get_rng_state, set_rng_state};

use crate::Error;

/// Something whose state goes into a checkpoint along with the model's and the optimizer's.
pub trait Stateful {
    /// The state, as named tensors.
    fn state_dict(&self) -> Result<StateDict>;

    /// Takes a state over. If it does not fit, nothing is changed.
    fn load_state_dict(&self, state: &StateDict) -> Result<()>;
}

macro_rules! stateful {
    ($($Type:ident),*) => {
        $(impl<O: Optimizer> Stateful for $Type<O> {
            fn state_dict(&self) -> Result<StateDict> {
                self.state_dict()
            }
            fn load_state_dict(&self, state: &StateDict) -> Result<()> {
                self.load_state_dict(state)
            }
        })*
    };
}
stateful!(Scheduler, PlateauScheduler);

/// How far a training loop has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// The epoch it is in, from 0.
    pub epoch: u64,
    /// Batches of that epoch that are done.
    pub batch: u64,
    /// Optimizer steps that are done.
    pub step: u64,
    /// Whatever else the loop wants to find again.
    pub notes: BTreeMap<String, String>,
}

/// A model, its optimizer and whatever else has state, saved and loaded together.
///
/// Along with the position the file holds the random state, so training resumes bit-exactly:
///
/// ```
/// use kiln_nn::optim::lr_scheduler::{CosineAnnealingLR, Schedule};
/// use kiln_training::{Checkpoint, Position};
/// use kiln_nn::{Linear, Module, optim::AdamW};
/// # fn main() -> kiln_tensor::Result<()> {
/// # let path = std::env::temp_dir().join(format!("kiln-checkpoint-{}.safetensors", std::process::id()));
/// let model = Linear::new(4, 2)?;
/// let optimizer = AdamW::new(model.parameters(), 1e-3)?;
/// let scheduler = CosineAnnealingLR::new(100).on(&optimizer)?;
///
/// let checkpoint = Checkpoint::of(&model).optimizer(&optimizer).scheduler(&scheduler);
/// checkpoint.save(&path, &Position { epoch: 2, batch: 17, step: 217, ..Position::default() })?;
/// let position = checkpoint.load(&path)?;
/// assert_eq!((position.epoch, position.batch), (2, 17)); // loader.epoch_from(2, 17)
/// # std::fs::remove_file(&path).expect("the file");
/// # Ok(()) }
/// ```
///
/// It is a safetensors file: `model.*` are the model's names, and [`safetensors::load`] reads it as well.
pub struct Checkpoint<'a> {
    model: &'a dyn Module,
    optimizer: Option<&'a dyn Optimizer>,
    parts: Vec<(String, &'a dyn Stateful)>,
}

/// What a file of ours says of itself.
const FORMAT: (&str, &str) = ("format", "kiln-checkpoint-1");
/// Before the user's notes.
const NOTE: &str = "note.";
const SCHEDULER: &str = "scheduler";

impl<'a> Checkpoint<'a> {
    /// The checkpoint of a model.
    pub fn of(model: &'a dyn Module) -> Checkpoint<'a> {
        Checkpoint { model, optimizer: None, parts: Vec::new() }
    }

    /// With its optimizer.
    pub fn optimizer(mut self, optimizer: &'a dyn Optimizer) -> Checkpoint<'a> {
        self.optimizer = Some(optimizer);
        self
    }

    /// With its learning rate schedule.
    pub fn scheduler(self, scheduler: &'a dyn Stateful) -> Checkpoint<'a> {
        self.part(SCHEDULER, scheduler)
    }

    /// With something else, under a name of its own.
    pub fn part(mut self, name: &str, part: &'a dyn Stateful) -> Checkpoint<'a> {
        self.parts.retain(|(other, _)| other != name);
        self.parts.push((name.to_string(), part));
        self
    }

    /// Writes everything to a file, which appears when it is complete: whoever is stopped while writing still has
    /// the one before.
    pub fn save(&self, path: impl AsRef<Path>, position: &Position) -> Result<()> {
        let mut all = StateDict::new();
        all.extend_prefixed("model.", self.model.state_dict());
        if let Some(optimizer) = self.optimizer {
            all.extend_prefixed("optimizer.", optimizer.state_dict()?);
        }
        for (name, part) in &self.parts {
            all.extend_prefixed(&format!("part.{name}."), part.state_dict()?);
        }
        let RngState { seed, offset } = get_rng_state();
        let mut metadata = Metadata::new();
        metadata.insert(FORMAT.0.into(), FORMAT.1.into());
        let numbers = [
            ("epoch", position.epoch),
            ("batch", position.batch),
            ("step", position.step),
            ("rng_seed", seed),
            ("rng_offset", offset),
        ];
        metadata.extend(numbers.map(|(name, number)| (name.into(), number.to_string())));
        metadata.extend(position.notes.iter().map(|(name, text)| (format!("{NOTE}{name}"), text.clone())));
        safetensors::save_with(&all, &metadata, path)
    }

    /// The position in a file, without loading anything.
    pub fn position(path: impl AsRef<Path>) -> Result<Position> {
        let path = path.as_ref();
        Ok(read_metadata(path, SafeTensorsFile::open(path)?.metadata())?.0)
    }

    /// Takes everything over from a file, the random stream's state too, and says how far the loop had come. If
    /// something does not fit, nothing is changed.
    #[track_caller]
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Position> {
        let (path, loc) = (path.as_ref(), Loc::caller());
        let file = SafeTensorsFile::open(path)?;
        let (position, random) = read_metadata(path, file.metadata())?;
        let all = file.state_dict()?;
        let has = |prefix: &str| all.names().any(|name| name.starts_with(prefix));
        let missing = |part: &str| Error::Missing { path: path.into(), part: part.into(), loc };

        let values = all.below("model.");
        check_state(&self.model.state_dict(), &values, true, self.model.type_name(), loc)?;
        if self.optimizer.is_some() && !has("optimizer.") {
            return Err(missing("optimizer").into());
        }
        if let Some((name, _)) = self.parts.iter().find(|(name, _)| !has(&format!("part.{name}."))) {
            return Err(missing(name).into());
        }
        // Each part is whole or unchanged; those before one that refuses get back what they had.
        let mut before: Vec<(&dyn Stateful, StateDict)> = Vec::new();
        let mut load_parts = || -> Result<()> {
            for (name, part) in &self.parts {
                let state = part.state_dict()?.copied()?;
                part.load_state_dict(&all.below(&format!("part.{name}.")))?;
                before.push((*part, state));
            }
            match self.optimizer {
                Some(optimizer) => optimizer.load_state_dict(&all.below("optimizer.")),
                None => Ok(()),
            }
        };
        if let Err(error) = load_parts() {
            for (part, state) in before {
                part.load_state_dict(&state)?;
            }
            return Err(error);
        }
        self.model.load_state_dict(&values, true)?;
        set_rng_state(random);
        Ok(position)
    }
}

fn read_metadata(path: &Path, metadata: &Metadata) -> Result<(Position, RngState), Error> {
    let fail = |why: String| Error::Checkpoint { path: path.into(), why };
    if metadata.get(FORMAT.0).map(String::as_str) != Some(FORMAT.1) {
        return Err(fail("not a training checkpoint".into()));
    }
    let number = |name: &str| {
        let text = metadata.get(name).ok_or_else(|| fail(format!("the metadata has no {name}")))?;
        text.parse::<u64>().map_err(|error| fail(format!("bad {name} {text:?}: {error}")))
    };
    let count = |name: &str| match number(name)? {
        count if count <= MOST_COUNTED => Ok(count),
        count => Err(fail(format!("implausible {name}: {count}"))),
    };
    let notes =
        metadata.iter().filter_map(|(name, text)| Some((name.strip_prefix(NOTE)?.into(), text.clone())));
    let position = Position {
        epoch: count("epoch")?,
        batch: count("batch")?,
        step: count("step")?,
        notes: notes.collect(),
    };
    Ok((position, RngState { seed: number("rng_seed")?, offset: number("rng_offset")? }))
}
