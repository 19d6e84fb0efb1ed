//! `kiln train gpt`: a character GPT, from random weights to text that looks like ours.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use clap::Args;
use kiln::data::Random;
use kiln::models::{Gpt2, Gpt2Config, KvCache};
use kiln::nn::{ClipNorm, clip_grad_norm_};
use kiln::optim::AdamW;
use kiln::optim::lr_scheduler::{LambdaLR, Schedule, Scheduler};
use kiln::prelude::*;
use kiln::training::{Checkpoint, History, Meter, Plot, Position};
use kiln::{Region, Result};

use super::text::{Text, Windows};
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
    #[arg(long, default_value = "kiln-train-gpt", value_name = "FOLDER")]
    out: PathBuf,
    /// About how long to train: the first steps are timed, and as many are taken as fit
    #[arg(long, default_value_t = 2.0, value_parser = crate::minutes)]
    minutes: f64,
    /// How many steps to train, instead of a time: the same numbers on every run. With --resume those before count
    #[arg(long, value_parser = crate::positive)]
    steps: Option<usize>,
    /// Learn from this file instead of Kiln's documentation
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Blocks of the model
    #[arg(long, default_value_t = 4, value_parser = crate::positive)]
    layers: usize,
    /// Size of a character's vector; a multiple of the heads
    #[arg(long, default_value_t = 96, value_parser = crate::positive)]
    width: usize,
    /// Heads of the attention
    #[arg(long, default_value_t = 4, value_parser = crate::positive)]
    heads: usize,
    /// Characters that the model sees at once
    #[arg(long, default_value_t = 64, value_parser = crate::positive)]
    context: usize,
    /// Stretches of text in a step
    #[arg(long, default_value_t = 16, value_parser = crate::positive)]
    batch_size: usize,
    /// The largest learning rate
    #[arg(long, default_value_t = 8e-3)]
    lr: f64,
    /// Probability of dropout: for texts that are small beside the time they are trained for
    #[arg(long, default_value_t = 0.1)]
    dropout: f64,
    /// Threads that prepare batches
    #[arg(long, default_value_t = 1)]
    workers: usize,
    /// What the sample begins with
    #[arg(long, default_value = "## The ")]
    prompt: String,
    /// Characters to sample at the end
    #[arg(long, default_value_t = 400)]
    sample: usize,
    /// Below 1 the sample is more certain, above 1 more daring
    #[arg(long, default_value_t = 0.7)]
    temperature: f64,
}

/// Steps of warm-up, and after how many the number of steps is chosen.
const WARM_UP: u64 = 60;
const TIMED: std::ops::Range<u64> = 5..20;
/// The learning rate ends at this share of the largest one.
const FINAL: f64 = 0.05;
/// How often the model is validated.
const VALIDATIONS: u64 = 10;
const VALIDATION_BATCHES: usize = 8;
const CLIP: f64 = 1.0;
const PLOT: &str = "loss.svg";

/// The size of a character GPT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CharGpt {
    /// Number of different characters.
    pub characters: usize,
    /// Blocks.
    pub layers: usize,
    /// Size of a vector.
    pub width: usize,
    pub heads: usize,
    /// Characters it sees at once.
    pub context: usize,
}

impl CharGpt {
    /// A new model.
    pub fn build(self, dropout: f64) -> Result<Gpt2> {
        Gpt2::new(Gpt2Config {
            vocab_size: self.characters,
            n_positions: self.context,
            n_embd: self.width,
            n_layer: self.layers,
            n_head: self.heads,
            embd_pdrop: dropout,
            resid_pdrop: dropout,
            attn_pdrop: 0.0,
            ..Gpt2Config::small()
        })
    }
}

/// What a checkpoint must agree about with the run that goes on from it.
fn plan(size: CharGpt, options: &Options) -> String {
    let CharGpt { characters, layers, width, heads, context } = size;
    let (batch, seed) = (options.batch_size, options.common.seed);
    format!(
        "{characters} characters, {layers} layers, width {width}, {heads} heads, {batch} × {context}, seed {seed}"
    )
}

/// Model, optimizer and schedule.
struct Learner {
    model: Gpt2,
    optimizer: Arc<AdamW>,
    scheduler: Scheduler<Arc<AdamW>>,
    /// How many steps there will be; the schedule asks when the warm-up is over.
    total: Arc<AtomicU64>,
    step: Region,
    validation: Region,
}

impl Learner {
    fn new(options: &Options, size: CharGpt) -> Result<Learner> {
        manual_seed(options.common.seed);
        let model = size.build(options.dropout)?;
        // Matrices decay, vectors (biases, norms) don't.
        let (matrices, vectors): (Vec<Tensor>, Vec<Tensor>) =
            model.parameters().into_iter().partition(|parameter| parameter.rank() >= 2);
        let adam = AdamW::options().lr(options.lr).betas(0.9, 0.99);
        let optimizer = Arc::new(AdamW::from_groups([
            optim::ParamGroup::new(matrices, adam.clone().weight_decay(0.1)),
            optim::ParamGroup::new(vectors, adam.weight_decay(0.0)),
        ])?);
        let total = Arc::new(AtomicU64::new(options.steps.map_or(u64::MAX, |steps| steps as u64)));
        let scheduler = schedule(&total).on(optimizer.clone())?;
        let (step, validation) = (options.common.region("train_step"), options.common.region("validation"));
        Ok(Learner { model, optimizer, scheduler, total, step, validation })
    }

    fn checkpoint(&self) -> Checkpoint<'_> {
        Checkpoint::of(&self.model).optimizer(&self.optimizer).scheduler(&self.scheduler)
    }

    /// One training step, one graph: forward, backward, clipping and AdamW.
    fn train(&self, ids: &Tensor) -> Result<f64> {
        let parameters = self.optimizer.parameters();
        let loss = self.step.run(|| {
            self.optimizer.zero_grad();
            let loss = self.model.loss(ids, ids)?;
            loss.backward()?;
            clip_grad_norm_(&parameters, CLIP, ClipNorm::default())?;
            self.optimizer.step()?;
            loss.detach()
        })?;
        self.scheduler.step()?;
        loss.item::<f64>()
    }

    /// The mean loss of these batches, without dropout.
    fn validate(&self, batches: &[Tensor]) -> Result<f64> {
        self.model.eval();
        let _off = no_grad();
        let mut sum = 0.0;
        for ids in batches {
            sum += self.validation.run(|| self.model.loss(ids, ids))?.item::<f64>()?;
        }
        self.model.train();
        Ok(sum / batches.len().max(1) as f64)
    }
}

/// The learning rate over as many steps as are planned.
fn schedule(total: &Arc<AtomicU64>) -> LambdaLR {
    let total = total.clone();
    LambdaLR::new(move |step| share(step, total.load(Ordering::Relaxed)))
}

/// The share of the learning rate at a step: a line up, then a cosine down.
fn share(step: u64, total: u64) -> f64 {
    let warm_up = WARM_UP.min(total / 10).max(1);
    if step < warm_up {
        return (step + 1) as f64 / (warm_up + 1) as f64;
    }
    let part = (step - warm_up) as f64 / total.saturating_sub(warm_up).max(1) as f64;
    FINAL + (1.0 - FINAL) * 0.5 * (1.0 + (std::f64::consts::PI * part.min(1.0)).cos())
}

/// Trains, tells, samples.
pub fn run(options: &Options) -> Done {
    let text = Text::read(options.text.as_deref())?;
    let prompt = text.encode(&options.prompt).map_err(|character| Failure::Character { character })?;
    let folder = Folder::new(&options.out)?;
    let Options { layers, width, heads, context, .. } = *options;
    let size = CharGpt { characters: text.characters.len(), layers, width, heads, context };
    if text.training.len() < context + 1 || text.validation.len() < context || context < 2 {
        return Err(Failure::Text {
            path: options.text.as_ref().map_or("the text".into(), |path| path.display().to_string()),
            reason: format!("too short for a context of {context} (the context is at least 2)"),
        });
    }

    let mut learner = Learner::new(options, size)?;
    let (position, history) = begin(options, &mut learner, size, &folder)?;
    let windows = Windows { tokens: text.training.clone(), length: context };
    let loader = DataLoader::options().batch_size(options.batch_size).shuffle(true).drop_last(true);
    let loader = loader.seed(options.common.seed).workers(options.workers).build(windows)?;
    if loader.is_empty() {
        let reason = format!("fewer than {} sequences of {context} characters", options.batch_size);
        return Err(Failure::Text { path: "the text".into(), reason });
    }
    let parameters: usize = learner.model.parameters().iter().map(Tensor::numel).sum();
    output::print(&format!(
        "{parameters} parameters, {} characters of text; batch {}, sequence {context}, vocabulary {}; {}\n",
        text.training.len() + text.validation.len(),
        options.batch_size,
        size.characters,
        options.common.describe(),
    ))?;

    let total = learner.total.load(Ordering::Relaxed);
    if position.step >= total {
        output::print(&finished("steps", position.step, &folder))?;
        return sample(options, &learner, &text, prompt);
    }
    if options.common.resume {
        output::print(&format!("resuming after step {} of {total}\n", position.step))?;
    }
    let mut training = Training { options, size, learner: &learner, folder: &folder, history, position };
    let validation = validation_batches(&text.validation, context, options.batch_size)?;
    training.run(&loader, &validation)?;
    output::print(&folder.told(PLOT))?;
    sample(options, &learner, &text, prompt)
}

/// Where to begin: at the start, or at a checkpoint. If more steps are planned now, the learning rate is that of a run
/// that was planned like this.
fn begin(
    options: &Options,
    learner: &mut Learner,
    size: CharGpt,
    folder: &Folder,
) -> Result<(Position, History), Failure> {
    let columns = ["step", "loss", "validation", "lr", "tokens_per_second"];
    if !options.common.resume {
        return Ok((Position::default(), History::new(columns)));
    }
    let path = folder.checkpoint();
    let saved = Checkpoint::position(&path)?;
    let note = |name: &str| saved.notes.get(name).cloned().unwrap_or_default();
    let this = plan(size, options);
    if note("plan") != this {
        let reason = format!("the checkpoint is from {}, this run is {this}", note("plan"));
        return Err(Failure::Resume { path: path.display().to_string(), reason });
    }
    let planned = note("steps").parse().unwrap_or(saved.step);
    let total = options.steps.map_or(planned, |steps| steps as u64);
    learner.total.store(total, Ordering::Relaxed);
    let position = learner.checkpoint().load(&path)?;
    if total != planned && position.step < total {
        learner.scheduler = stepped(schedule(&learner.total), &learner.optimizer, position.step)?;
    }
    let mut history = History::load_csv(folder.metrics())?;
    history.truncate(position.step as f64);
    Ok((position, history))
}

/// Stretches of the text that was held out, evenly spread: the same ones each time.
fn validation_batches(tokens: &[i64], context: usize, batch: usize) -> Result<Vec<Tensor>> {
    let (count, last) = (VALIDATION_BATCHES * batch, tokens.len() - context);
    let start = |n: usize| n * last / (count - 1).max(1);
    let stretches: Vec<i64> =
        (0..count).flat_map(|n| tokens[start(n)..start(n) + context].to_vec()).collect();
    let all = Tensor::from_vec(stretches, [count, context])?;
    (0..VALIDATION_BATCHES).map(|n| all.narrow(0, n * batch, batch)?.contiguous()).collect()
}

/// A loop on its way.
struct Training<'a> {
    options: &'a Options,
    size: CharGpt,
    learner: &'a Learner,
    folder: &'a Folder,
    history: History,
    position: Position,
}

impl Training<'_> {
    fn run(&mut self, loader: &DataLoader<Windows, Tensor>, validation: &[Tensor]) -> Done {
        let tokens = (self.options.batch_size * self.options.context) as u64;
        let (first, learner) = (self.position.step, self.learner);
        let mut meter = Meter::new("characters").done_before(first);
        let progress = Progress::bar(100);
        progress.says("compiling");
        let mut timed = Instant::now();
        let mut batches = loader.epoch_from(self.position.epoch, self.position.batch as usize);
        let mut sum = Mean::default();
        loop {
            let total = learner.total.load(Ordering::Relaxed);
            if self.position.step >= total {
                break;
            }
            let Some(ids) = batches.next() else {
                (self.position.epoch, self.position.batch) = (self.position.epoch + 1, 0);
                batches = loader.iter();
                continue;
            };
            let lr = learner.optimizer.lr();
            let loss = learner.train(&ids?)?;
            self.position.step += 1;
            self.position.batch += 1;
            meter.step(tokens);
            sum.add(loss);
            let step = self.position.step;

            // Compiling is over after a few steps; then the time of a step is known.
            if total == u64::MAX && step == TIMED.start {
                timed = Instant::now();
            }
            if total == u64::MAX && step == TIMED.end {
                let each = timed.elapsed().as_secs_f64() / (TIMED.end - TIMED.start) as f64;
                let rest = (self.options.minutes * 60.0 - meter.elapsed().as_secs_f64()) / each;
                // Validations take their time, too; below the warm-up there would be nothing to learn with.
                let steps = (step + (rest.max(0.0) * 0.95) as u64).max(2 * WARM_UP).next_multiple_of(10);
                learner.total.store(steps, Ordering::Relaxed);
                let line = format!("{steps} steps fit into {} minutes\n", self.options.minutes);
                progress.hidden(|| output::print(&line))?;
            }
            let total = learner.total.load(Ordering::Relaxed);
            if total != u64::MAX {
                meter.set_steps(total);
                progress.at(step, total);
                progress.says(&format!("{meter}, loss {:.3}", sum.mean()));
            }
            let every = if total == u64::MAX { u64::MAX } else { (total / VALIDATIONS).max(1) };
            let mut validated = None;
            if step.is_multiple_of(every) || step == total {
                let loss = learner.validate(validation)?;
                validated = Some(loss);
                let line = format!(
                    "step {step:>5}   loss {:.3}   validation {loss:.3}{}\n",
                    sum.take(),
                    speed(&meter, "characters")
                );
                progress.hidden(|| output::print(&line))?;
            }
            self.history.push([Some(step as f64), Some(loss), validated, Some(lr), meter.rate()]);
            if validated.is_some() {
                self.save(total)?;
            }
        }
        drop(progress);
        output::print(&format!(
            "trained for {:.0} s; {}\n",
            meter.elapsed().as_secs_f64(),
            compiled(&learner.step.explain())
        ))?;
        Ok(())
    }

    /// Everything as of now: whoever is stopped can go on from here.
    fn save(&mut self, total: u64) -> Result<()> {
        let notes = [("plan", plan(self.size, self.options)), ("steps", total.to_string())];
        self.position.notes.extend(notes.map(|(name, text)| (name.to_string(), text)));
        self.history.save_csv(self.folder.metrics())?;
        Plot::new("A character GPT learns Kiln's documentation")
            .labels("step", "cross-entropy a character")
            .line("training", self.history.curve("loss"))
            .line("validation", self.history.curve("validation"))
            .save(self.folder.plot(PLOT))?;
        // Last: rows that it does not know are cut off, but none may be missing.
        self.learner.checkpoint().save(self.folder.checkpoint(), &self.position)
    }
}

/// The mean of the losses since the last line.
#[derive(Default)]
struct Mean {
    sum: f64,
    count: usize,
}

impl Mean {
    fn add(&mut self, number: f64) {
        self.sum += number;
        self.count += 1;
    }

    fn mean(&self) -> f64 {
        self.sum / self.count.max(1) as f64
    }

    fn take(&mut self) -> f64 {
        let mean = self.mean();
        *self = Mean::default();
        mean
    }
}

/// Lets the model write: one character at a time, with the keys and values of those before in a cache.
fn sample(options: &Options, learner: &Learner, text: &Text, prompt: Vec<i64>) -> Done {
    if options.sample == 0 {
        return Ok(());
    }
    let model = &learner.model;
    model.eval();
    let cache = KvCache::new(model, 1, options.context)?;
    let region = options.common.region("decode");
    let mut random = Random::new(options.common.seed);
    let mut tokens = if prompt.is_empty() { vec![0] } else { prompt };
    // The cache must have room for one more.
    let mut unseen: Vec<i64> = tokens[tokens.len().saturating_sub(options.context - 1)..].to_vec();
    let (before, start) = (tokens.len(), Instant::now());
    for _ in 0..options.sample {
        if cache.len() + unseen.len() > options.context {
            // Full: the last half is read again, from the first place on.
            cache.clear()?;
            unseen = tokens[tokens.len() - options.context.div_ceil(2)..].to_vec();
        }
        let count = unseen.len();
        let ids = Tensor::from_vec(std::mem::take(&mut unseen), [1, count])?;
        let logits = region.run(|| model.decode(&ids, &cache))?.to_vec::<f32>()?;
        let next = draw(&logits, options.temperature, &mut random);
        tokens.push(next);
        unseen.push(next);
    }
    let seconds = start.elapsed().as_secs_f64();
    let written = text.decode(&tokens);
    output::print(&format!(
        "\na sample at temperature {} ({:.0} characters/s):\n\n{written}\n",
        options.temperature,
        (tokens.len() - before) as f64 / seconds
    ))?;
    Ok(())
}

/// A token by chance, as likely as its logit over the temperature says; the likeliest at temperature 0.
fn draw(logits: &[f32], temperature: f64, random: &mut Random) -> i64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: &f32| {
        if temperature > 0.0 {
            (f64::from(logit - largest) / temperature).exp()
        } else {
            f64::from(u8::from(*logit == largest))
        }
    };
    let mut left = random.uniform_f64() * logits.iter().map(weight).sum::<f64>();
    let mut last = 0;
    for (token, weight) in logits.iter().map(weight).enumerate().filter(|(_, weight)| *weight > 0.0) {
        last = token;
        left -= weight;
        if left < 0.0 {
            break;
        }
    }
    last as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_goes_up_and_down() {
        assert!((share(0, 1000) - 1.0 / 61.0).abs() < 1e-12);
        assert_eq!(share(60, 1000), 1.0);
        assert!(share(500, 1000) < share(200, 1000));
        assert!((share(1000, 1000) - FINAL).abs() < 1e-12);
        // While the number of steps is not known, it is as if there were no end.
        assert_eq!(share(10, u64::MAX), share(10, 1000));
        assert!(share(0, 1).is_finite() && share(3, 1).is_finite());
    }

    #[test]
    fn draws_follow_the_logits() {
        let mut random = Random::new(0);
        let logits = [0.0, 3f32.ln(), f32::NEG_INFINITY];
        let mut counts = [0; 3];
        for _ in 0..4000 {
            counts[draw(&logits, 1.0, &mut random) as usize] += 1;
        }
        assert!((900..1100).contains(&counts[0]) && counts[2] == 0, "{counts:?}");
        assert!((0..50).all(|_| draw(&logits, 0.0, &mut random) == 1));
        let cold = (0..1000).filter(|_| draw(&logits, 0.25, &mut random) == 0).count();
        assert!(cold < 40, "{cold}");
    }
}
