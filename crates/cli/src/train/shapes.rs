//! `kiln train shapes`: a convolutional network learns to tell pictures of shapes apart.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use kiln::nn::{AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential, seq};
use kiln::optim::AdamW;
use kiln::optim::lr_scheduler::{OneCycleLR, Schedule, Scheduler};
use kiln::prelude::*;
use kiln::training::{Checkpoint, History, Meter, Plot, Position};
use kiln::{Region, Result};

use super::pictures::{NAMES, Pictures, SIDE, show};
use super::{Common, Folder, compiled, finished, speed, stepped};
use crate::failure::{Done, Failure};
use crate::output;
use crate::progress::Progress;

/// How to train it.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    common: Common,
    /// Where metrics, plot and checkpoint go
    #[arg(long, default_value = "kiln-train-shapes", value_name = "FOLDER")]
    out: PathBuf,
    /// How often to go through all pictures: 8 times, or as often as the run that is resumed
    #[arg(long, value_parser = crate::positive)]
    epochs: Option<usize>,
    /// Pictures to learn from; a fifth as many are held out
    #[arg(long, default_value_t = 6000, value_parser = crate::positive)]
    pictures: usize,
    /// Pictures in a step
    #[arg(long, default_value_t = 64, value_parser = crate::positive)]
    batch_size: usize,
    /// The largest learning rate
    #[arg(long, default_value_t = 6e-3)]
    lr: f64,
    /// Threads that draw pictures while the network learns
    #[arg(long, default_value_t = 2)]
    workers: usize,
}

const PLOT: &str = "accuracy.svg";
const EPOCHS: u64 = 8;
/// Pictures that are shown in the end.
const SHOWN: usize = 3;

type Loader = DataLoader<Pictures, (Tensor, Tensor)>;

/// Three convolutions, each behind a norm and before a pooling, and a linear layer.
fn network() -> Result<Sequential> {
    let conv = |from, to| Conv2d::options().padding(1).bias(false).build(from, to, 3);
    Ok(seq![
        conv(1, 16)?,
        BatchNorm2d::new(16)?,
        ReLU,
        MaxPool2d::new(2),
        conv(16, 32)?,
        BatchNorm2d::new(32)?,
        ReLU,
        MaxPool2d::new(2),
        conv(32, 64)?,
        BatchNorm2d::new(64)?,
        ReLU,
        AdaptiveAvgPool2d::new(1),
        Flatten::default(),
        Linear::new(64, NAMES.len())?,
    ])
}

/// Network, optimizer and schedule.
struct Learner {
    model: Sequential,
    optimizer: Arc<AdamW>,
    scheduler: Scheduler<Arc<AdamW>>,
    step: Region,
    evaluation: Region,
}

/// One cycle of so many steps.
fn schedule(options: &Options, steps: u64) -> OneCycleLR {
    OneCycleLR::new(options.lr, steps.saturating_add(1))
}

/// Sums over pictures.
#[derive(Default)]
struct Score {
    loss: f64,
    right: i64,
    pictures: usize,
}

impl Score {
    fn add(&mut self, loss: &Tensor, right: &Tensor, pictures: usize) -> Result<()> {
        self.loss += loss.item::<f64>()? * pictures as f64;
        self.right += right.item::<i64>()?;
        self.pictures += pictures;
        Ok(())
    }

    fn loss(&self) -> f64 {
        self.loss / self.pictures.max(1) as f64
    }

    fn accuracy(&self) -> f64 {
        self.right as f64 / self.pictures.max(1) as f64
    }
}

impl Learner {
    fn new(options: &Options, steps: u64) -> Result<Learner> {
        manual_seed(options.common.seed);
        let model = network()?;
        let optimizer = Arc::new(AdamW::new(model.parameters(), options.lr)?);
        let scheduler = schedule(options, steps).on(optimizer.clone())?;
        let (step, evaluation) = (options.common.region("train_step"), options.common.region("evaluation"));
        Ok(Learner { model, optimizer, scheduler, step, evaluation })
    }

    fn checkpoint(&self) -> Checkpoint<'_> {
        Checkpoint::of(&self.model).optimizer(&self.optimizer).scheduler(&self.scheduler)
    }

    /// The loss, and how many of the guesses are right.
    fn judge(&self, x: &Tensor, y: &Tensor) -> Result<(Tensor, Tensor)> {
        let logits = self.model.forward(x)?;
        let right = logits.argmax_dim(-1, false)?.eq(y)?.sum()?;
        Ok((logits.cross_entropy(y)?, right))
    }

    /// One training step, one graph.
    fn train(&self, x: &Tensor, y: &Tensor, score: &mut Score) -> Result<()> {
        let (loss, right) = self.step.run(|| {
            self.optimizer.zero_grad();
            let (loss, right) = self.judge(x, y)?;
            loss.backward()?;
            self.optimizer.step()?;
            Ok::<_, kiln::Error>((loss.detach()?, right))
        })?;
        self.scheduler.step()?;
        score.add(&loss, &right, x.size(0)?)
    }

    /// What it makes of pictures that it has not learnt from.
    fn evaluate(&self, loader: &Loader) -> Result<Score> {
        self.model.eval();
        let _off = no_grad();
        let mut score = Score::default();
        // Always the same epoch: the same noise.
        for batch in loader.epoch_from(0, 0) {
            let (x, y) = batch?;
            let (loss, right) = self.evaluation.run(|| self.judge(&x, &y))?;
            score.add(&loss, &right, x.size(0)?)?;
        }
        self.model.train();
        Ok(score)
    }
}

/// Trains, tells, shows.
pub fn run(options: &Options) -> Done {
    let folder = Folder::new(&options.out)?;
    // The last batch to learn from is left out where it is smaller: an epoch is one graph, and the next one has
    // other pictures in it.
    let loader = |count: usize, seed: u64, shuffle: bool| -> Result<Loader> {
        let loader = DataLoader::options().batch_size(options.batch_size).workers(options.workers);
        loader.shuffle(shuffle).drop_last(shuffle).seed(options.common.seed).build(Pictures { count, seed })
    };
    let seed = options.common.seed.wrapping_mul(2);
    let training = loader(options.pictures, seed, true)?;
    let held_out = loader(options.pictures.div_ceil(5).max(SHOWN), seed.wrapping_add(1), false)?;
    if training.is_empty() {
        let reason =
            format!("{} pictures are fewer than a batch of {}", options.pictures, options.batch_size);
        return Err(Failure::Text { path: "shapes".into(), reason });
    }
    let planned = if options.common.resume { Some(planned(options, &folder)?) } else { None };
    let epochs = options.epochs.map_or(planned.unwrap_or(EPOCHS), |epochs| epochs as u64);
    let steps = epochs.saturating_mul(training.len() as u64);
    let mut learner = Learner::new(options, steps)?;
    let parameters: usize = learner.model.parameters().iter().map(Tensor::numel).sum();
    output::print(&format!(
        "{parameters} parameters, {} training pictures of {SIDE} × {SIDE}, {} held out; batch {}, {} workers; {}\n",
        options.pictures,
        held_out.dataset().len(),
        options.batch_size,
        options.workers,
        options.common.describe(),
    ))?;
    let (mut position, mut history) = match planned {
        Some(planned) => resume(options, &mut learner, &folder, steps, planned != epochs)?,
        None => (Position::default(), History::new(COLUMNS)),
    };
    if position.epoch >= epochs {
        output::print(&finished("epochs", position.epoch, &folder))?;
        return show_some(&learner, &held_out, options);
    }
    if planned.is_some() {
        output::print(&format!("resuming after epoch {} of {epochs}\n", position.epoch))?;
    }

    let mut meter = Meter::new("pictures").done_before(position.step);
    meter.set_steps(steps);
    while position.epoch < epochs {
        let progress = Progress::bar(training.len());
        progress.says("compiling");
        let mut score = Score::default();
        for batch in training.epoch_from(position.epoch, 0) {
            let (x, y) = batch?;
            learner.train(&x, &y, &mut score)?;
            position.step += 1;
            meter.step(x.size(0)? as u64);
            progress.step();
            progress.says(&format!("{meter}, loss {:.3}", score.loss()));
        }
        drop(progress);
        let found = learner.evaluate(&held_out)?;
        position.epoch += 1;
        history.push(
            [position.epoch as f64, score.loss(), score.accuracy(), found.loss(), found.accuracy()].map(Some),
        );
        output::print(&format!(
            "epoch {:>2}   loss {:.3}   accuracy {:5.1} %   held out {:5.1} %{}\n",
            position.epoch,
            score.loss(),
            100.0 * score.accuracy(),
            100.0 * found.accuracy(),
            speed(&meter, "pictures")
        ))?;
        save(&learner, &folder, &history, &mut position, options, epochs)?;
    }
    output::print(&format!(
        "trained for {:.0} s; {}\n{}",
        meter.elapsed().as_secs_f64(),
        compiled(&learner.step.explain()),
        folder.told(PLOT)
    ))?;
    show_some(&learner, &held_out, options)
}

const COLUMNS: [&str; 5] = ["epoch", "loss", "accuracy", "held_out_loss", "held_out_accuracy"];

/// What a checkpoint must agree about with the run that goes on from it.
fn plan(options: &Options) -> String {
    let Options { pictures, batch_size, .. } = options;
    format!("{pictures} pictures by {batch_size}, seed {}", options.common.seed)
}

/// How many epochs the run was to have whose checkpoint is in the folder.
fn planned(options: &Options, folder: &Folder) -> Result<u64, Failure> {
    let path = folder.checkpoint();
    let saved = Checkpoint::position(&path)?;
    let note = |name: &str| saved.notes.get(name).cloned().unwrap_or_default();
    if note("plan") != plan(options) {
        let reason = format!("the checkpoint is from {}, this run is {}", note("plan"), plan(options));
        return Err(Failure::Resume { path: path.display().to_string(), reason });
    }
    Ok(note("epochs").parse().unwrap_or(saved.epoch))
}

/// Goes to where the checkpoint is. If the plan is now another one, the learning rate's cycle is stretched to it: it
/// goes on as if the run had been planned like this.
fn resume(
    options: &Options,
    learner: &mut Learner,
    folder: &Folder,
    steps: u64,
    stretched: bool,
) -> Result<(Position, History), Failure> {
    let position = learner.checkpoint().load(folder.checkpoint())?;
    if stretched && position.step < steps {
        learner.scheduler = stepped(schedule(options, steps), &learner.optimizer, position.step)?;
    }
    let mut history = History::load_csv(folder.metrics())?;
    history.truncate(position.epoch as f64);
    Ok((position, history))
}

fn save(
    learner: &Learner,
    folder: &Folder,
    history: &History,
    position: &mut Position,
    options: &Options,
    epochs: u64,
) -> Result<()> {
    let notes = [("plan", plan(options)), ("epochs", epochs.to_string())];
    position.notes.extend(notes.map(|(name, text)| (name.to_string(), text)));
    history.save_csv(folder.metrics())?;
    Plot::new("A small network learns shapes")
        .labels("epoch", "accuracy")
        .line("training", history.curve("accuracy"))
        .line("held out", history.curve("held_out_accuracy"))
        .save(folder.plot(PLOT))?;
    // Last: rows that it does not know are cut off, but none may be missing.
    learner.checkpoint().save(folder.checkpoint(), position)
}

/// A few pictures beside each other, with what the network says they are.
fn show_some(learner: &Learner, held_out: &Loader, options: &Options) -> Done {
    let Some(batch) = held_out.epoch_from(0, 0).next() else { return Ok(()) };
    let (x, y) = batch?;
    learner.model.eval();
    let _off = no_grad();
    let guesses = learner.model.forward(&x)?.argmax_dim(-1, false)?.to_vec::<i64>()?;
    let truths = y.to_vec::<i64>()?;
    let shown = SHOWN.min(truths.len());
    // Not always the same kinds.
    let first = (options.common.seed as usize) % (truths.len() - shown + 1);
    let pictures: Vec<Vec<String>> =
        (first..first + shown).map(|n| Ok(show(&x.select(0, n as i64)?.to_vec()?))).collect::<Result<_>>()?;
    let mut text = String::from("\n");
    for line in 0..SIDE / 2 {
        let row: Vec<&str> = pictures.iter().map(|picture| picture[line].as_str()).collect();
        text.extend([row.join("   ").trim_end(), "\n"]);
    }
    let name = |label: i64| usize::try_from(label).ok().and_then(|label| NAMES.get(label)).unwrap_or(&"?");
    let told = (first..first + shown).map(|n| {
        let verdict =
            if guesses[n] == truths[n] { "right".into() } else { format!("it is a {}", name(truths[n])) };
        format!("{:width$}", format!("{}: {verdict}", name(guesses[n])), width = SIDE + 3)
    });
    text.push_str(told.collect::<String>().trim_end());
    output::print(&text)?;
    Ok(())
}
