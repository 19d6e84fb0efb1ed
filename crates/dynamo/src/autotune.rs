//! Mode `max-autotune`: first plans are compared that leave small matrix products to the library, or make them part
//! of kernels; then each kernel of the better one is made in several forms, which are timed on memory like the
//! program's, and the quickest is taken. All forms of a kernel compute the same, so the choice is only one of time.
//! Choices are remembered beside the kernel cache: the next process does not measure again.

use std::time::{Duration, Instant};

use kiln_inductor::Lowered;
use kiln_ir::{DType, Graph, Layout, Scalar, Ty};
use kiln_plan::{Arguments, Place, Plan, Step};
use kiln_runtime::{Callable, KernelCache, threads};
use kiln_tensor::internal::TensorState;
use kiln_tensor::{Device, Tensor};

use crate::compiling::target;
use crate::graph_cache::Outline;
use crate::kernels::{self, Build};
use crate::options::Mode;
use crate::progress;
use crate::segment::LoadedGraph;
use crate::settings::{Numerics, OptLevel, Settings};

/// Inputs of more bytes than this are not copied to measure on.
const MOST_BYTES: usize = 2 << 30;
/// Measured at most so often.
const MOST_ROUNDS: usize = 15;
/// Another form must take less than this share of the time to be taken.
const WORTH: f64 = 0.97;

/// How the kernels of one form differ from the usual one.
#[derive(Copy, Clone, PartialEq)]
enum Form {
    Usual,
    /// Compiled with another level of the C compiler.
    Level(OptLevel),
    /// Cut into stages where the usual form is not, or the other way round.
    Stages(bool),
    /// Another number of vectors at a time in loops over independent elements.
    Unroll(usize),
    /// Larger pieces for each thread.
    Coarser(i64),
}

/// Pieces so large that one thread gets everything.
const SERIAL: i64 = i64::MAX;

impl Form {
    fn name(self) -> String {
        match self {
            Form::Usual => "the default form".into(),
            Form::Level(level) => level.flag().into(),
            Form::Stages(true) => "in stages".into(),
            Form::Stages(false) => "without stages".into(),
            Form::Unroll(1) => "one vector at a time".into(),
            Form::Unroll(vectors) => format!("{vectors} vectors at a time"),
            Form::Coarser(SERIAL) => "on one thread".into(),
            Form::Coarser(factor) => format!("{factor}× larger chunks per thread"),
        }
    }
}

/// A plan with the forms that were chosen.
pub(crate) struct Tuned {
    pub(crate) plan: Plan,
    pub(crate) kernels: Vec<Callable>,
    /// How many kernels had to be compiled for it.
    pub(crate) compiled: usize,
    /// What was chosen, in words.
    pub(crate) notes: Vec<String>,
}

/// Sizes up to which products are tried as parts of kernels.
const PRODUCTS: [usize; 3] = [0, 16, 64];

/// A plan, and how it was chosen if there was a choice.
pub(crate) struct Chosen {
    pub(crate) lowered: Lowered,
    /// Up to which size products are parts of its kernels.
    pub(crate) products: usize,
    pub(crate) compiled: usize,
    pub(crate) note: Option<String>,
}

/// Chooses up to which size products are parts of kernels, by whole plans: `usual` or one that `lower` makes.
pub(crate) fn choose_products(
    graph: &Graph,
    usual: Lowered,
    settings: &Settings,
    lower: &dyn Fn(&Settings) -> Result<Lowered, String>,
) -> Chosen {
    let (mut compiled, products) = (0, settings.max_inline_product);
    if settings.numerics == Numerics::Strict {
        // A product adds up in another order than the library's.
        return Chosen { lowered: usual, products, compiled, note: None };
    }
    let chosen = choose_plan(graph, &usual, settings, lower, &mut compiled);
    match chosen {
        Ok(Some((lowered, products))) => {
            let note = format!("matrix products up to {products} are inlined into kernels");
            Chosen { lowered, products, compiled, note: Some(note) }
        }
        Ok(None) => Chosen { lowered: usual, products, compiled, note: None },
        Err(reason) => Chosen {
            lowered: usual,
            products,
            compiled,
            note: Some(format!("inlining products was not tried: {reason}")),
        },
    }
}

/// Another plan than the usual one, if it is quicker, and up to which size products are parts of its kernels.
fn choose_plan(
    graph: &Graph,
    usual: &Lowered,
    settings: &Settings,
    lower: &dyn Fn(&Settings) -> Result<Lowered, String>,
    compiled: &mut usize,
) -> Result<Option<(Lowered, usize)>, String> {
    let mut plans = vec![(settings.max_inline_product, usual.clone())];
    for products in PRODUCTS.into_iter().filter(|products| *products != settings.max_inline_product) {
        let plan = lower(&Settings { max_inline_product: products, ..settings.clone() })?;
        if plans.iter().all(|(_, other)| library_steps(other) != library_steps(&plan)) {
            plans.push((products, plan));
        }
    }
    if plans.len() == 1 {
        return Ok(None);
    }
    // Steps of the library's are the difference between the plans: the graph says which.
    let sizes: Vec<usize> = plans.iter().map(|(products, _)| *products).collect();
    let key = format!("{}\nproducts {sizes:?}\n{graph}", key(usual, &[], settings));
    let cache = KernelCache::global();
    let remembered = cache.remark(&key).and_then(|text| text.trim().parse::<usize>().ok());
    let best = match remembered.filter(|best| *best < plans.len()) {
        Some(best) => best,
        None => {
            let build = settings.build();
            let mut programs = Vec::new();
            for (number, (_, plan)) in plans.iter().enumerate() {
                let loading = kernels::load(&plan.code, build)?;
                if let Some((_, reason)) = loading.refused.first() {
                    return Err(format!("compile: {reason}"));
                }
                *compiled += loading.compiled;
                let kernels = loading.find(&plan.code)?;
                let mut program = kernels::bind(&Outline::of(graph)?, &plan.plan, &kernels, Mode::Default)?;
                program.executable = program.executable.timed();
                programs.push((number, program));
            }
            let timed = rounds(graph, &usual.plan, &programs, settings)?;
            let total = |(_, times): &(usize, Vec<Duration>)| times.iter().sum::<Duration>();
            let least = timed.iter().min_by_key(|times| total(times));
            let worth = total(&timed[0]).mul_f64(WORTH);
            let best = least.filter(|times| total(times) < worth).map_or(0, |(number, _)| *number);
            cache.keep_remark(&key, &best.to_string());
            best
        }
    };
    if best == 0 {
        return Ok(None);
    }
    let (products, plan) = plans.swap_remove(best);
    // What was remembered may be of another process.
    *compiled += kernels::load(&plan.code, settings.build())?.compiled;
    Ok(Some((plan, products)))
}

/// How many steps are products of the library's.
fn library_steps(lowered: &Lowered) -> usize {
    lowered.plan.steps.iter().filter(|step| !matches!(step, Step::Launch(_))).count()
}

/// Chooses the form of each kernel of a plan. `lower` makes the plan anew with another tuning.
pub(crate) fn tune(
    graph: &Graph,
    usual: &Lowered,
    kernels: Vec<Callable>,
    settings: &Settings,
    lower: &dyn Fn(&Settings) -> Result<Lowered, String>,
) -> Tuned {
    let mut tuned = Tuned { plan: usual.plan.clone(), kernels, compiled: 0, notes: Vec::new() };
    let forms = forms(usual, settings);
    let key = key(usual, &forms, settings);
    let remembered = KernelCache::global().remark(&key).and_then(|text| parse(&text, &usual.plan, &forms));
    let mut candidates = Vec::new();
    for &form in &forms {
        let is_wanted = remembered.as_ref().is_none_or(|chosen| chosen.iter().any(|&f| forms[f] == form));
        let made = if is_wanted { steps(usual, form, settings, lower, &mut tuned) } else { Ok(None) };
        match made {
            Ok(steps) => candidates.push(steps),
            Err(reason) => {
                tuned.notes.push(format!("nothing was tuned: {reason}"));
                return tuned;
            }
        }
    }
    let chosen = match remembered {
        Some(chosen) => chosen,
        None => match measure(graph, &tuned, &candidates, settings) {
            Ok((chosen, notes)) => {
                let text: Vec<String> = chosen.iter().map(usize::to_string).collect();
                KernelCache::global().keep_remark(&key, &text.join(" "));
                tuned.notes.extend(notes);
                chosen
            }
            Err(reason) => {
                tuned.notes.push(format!("nothing was tuned: {reason}"));
                return tuned;
            }
        },
    };
    for (i, &form) in chosen.iter().enumerate() {
        if let Some(Some(steps)) = candidates.get(form)
            && forms[form] != Form::Usual
        {
            tuned.plan.steps[i] = steps[i].clone();
            tuned.notes.push(format!("{}: {}", usual.plan.report.steps[i].name, forms[form].name()));
        }
    }
    if tuned.notes.is_empty() {
        tuned.notes.push("the default forms are the fastest".into());
    }
    tuned
}

/// What each launch of a plan passes; others pass nothing.
fn arguments(lowered: &Lowered) -> impl Iterator<Item = Option<Arguments>> {
    lowered.plan.steps.iter().map(|step| match step {
        Step::Launch(launch) => {
            let (kernel, source) = (&lowered.plan.kernels[launch.kernel], &lowered.code[launch.kernel]);
            Some(source.signature.arguments(kernel, launch, threads::count()))
        }
        Step::Call(_) | Step::OneByOne(_) => None,
    })
}

/// The forms that may differ for some kernel of the plan.
fn forms(usual: &Lowered, settings: &Settings) -> Vec<Form> {
    let mut forms = vec![Form::Usual];
    let levels = [OptLevel::O1, OptLevel::O2, OptLevel::O3].into_iter();
    forms.extend(levels.filter(|level| *level != settings.opt_level).map(Form::Level));
    forms.push(Form::Stages(!settings.stages));
    forms.extend([1, 2, 4].into_iter().filter(|vectors| *vectors != settings.unroll).map(Form::Unroll));
    if threads::count() > 1 && arguments(usual).flatten().any(|passed| passed.items > passed.grain) {
        forms.extend([Form::Coarser(4), Form::Coarser(SERIAL)]);
    }
    forms
}

/// The steps of a plan with all kernels in one form; `None` if that is no other form. Kernels that are not
/// among the plan's are added to those of `tuned`.
fn steps(
    usual: &Lowered,
    form: Form,
    settings: &Settings,
    lower: &dyn Fn(&Settings) -> Result<Lowered, String>,
    tuned: &mut Tuned,
) -> Result<Option<Vec<Step>>, String> {
    let (other, level) = match form {
        Form::Usual => return Ok(Some(usual.plan.steps.clone())),
        Form::Coarser(factor) => {
            let mut steps = usual.plan.steps.clone();
            for step in &mut steps {
                if let Step::Launch(launch) = step {
                    launch.coarser = factor;
                }
            }
            return Ok(Some(steps));
        }
        Form::Level(level) => (usual.clone(), level),
        Form::Stages(stages) => (lower(&Settings { stages, ..settings.clone() })?, settings.opt_level),
        Form::Unroll(unroll) => (lower(&Settings { unroll, ..settings.clone() })?, settings.opt_level),
    };
    let same_text = other.code.iter().map(|k| &k.name).eq(usual.code.iter().map(|k| &k.name));
    let aligned =
        other.plan.steps.len() == usual.plan.steps.len() && other.plan.buffers == usual.plan.buffers;
    if !aligned || (same_text && level == settings.opt_level) {
        return Ok(None);
    }
    let build = Build { level, ..settings.build() };
    let loading = kernels::load(&other.code, build)?;
    if let Some((_, reason)) = loading.refused.first() {
        return Err(format!("compile: {reason}"));
    }
    tuned.compiled += loading.compiled;
    let first = tuned.kernels.len();
    tuned.kernels.extend(loading.find(&other.code)?);
    tuned.plan.kernels.extend(other.plan.kernels);
    let mut steps = other.plan.steps;
    for step in &mut steps {
        if let Step::Launch(launch) = step {
            launch.kernel += first;
        }
    }
    Ok(Some(steps))
}

/// What a choice is remembered by: everything that it may depend on.
fn key(usual: &Lowered, forms: &[Form], settings: &Settings) -> String {
    let Build { level, sanitize, .. } = settings.build();
    let mut key = format!(
        "autotune 4: {} threads, {:?}, {}, {}",
        threads::count(),
        target(settings, false).machine,
        level.flag(),
        sanitize.name(),
    );
    for form in forms {
        key += &format!(", {}", form.name());
    }
    for (step, passed) in usual.plan.steps.iter().zip(arguments(usual)) {
        if let (Step::Launch(launch), Some(Arguments { ints, items, grain, .. })) = (step, passed) {
            key += &format!("\n{} {items} {grain} {ints:?}", usual.code[launch.kernel].name);
        }
    }
    key
}

fn parse(text: &str, usual: &Plan, forms: &[Form]) -> Option<Vec<usize>> {
    let chosen: Vec<usize> = text.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>()?;
    let fits = chosen.len() == usual.steps.len() && chosen.iter().all(|form| *form < forms.len());
    fits.then_some(chosen)
}

/// The quickest form of each step.
fn measure(
    graph: &Graph,
    tuned: &Tuned,
    candidates: &[Option<Vec<Step>>],
    settings: &Settings,
) -> Result<(Vec<usize>, Vec<String>), String> {
    let mut programs: Vec<(usize, LoadedGraph)> = Vec::new();
    for (form, steps) in candidates.iter().enumerate() {
        let Some(steps) = steps else { continue };
        let plan = Plan { steps: steps.clone(), ..tuned.plan.clone() };
        let mut program = kernels::bind(&Outline::of(graph)?, &plan, &tuned.kernels, Mode::Default)?;
        program.executable = program.executable.timed();
        programs.push((form, program));
    }
    let timed = rounds(graph, &tuned.plan, &programs, settings)?;
    let mut chosen = vec![0; tuned.plan.steps.len()];
    let mut notes = Vec::new();
    let (mut before, mut after) = (Duration::ZERO, Duration::ZERO);
    for (step, best) in chosen.iter_mut().enumerate() {
        let usual = timed[0].1[step];
        let quickest = timed.iter().min_by_key(|(_, times)| times[step]);
        let is_kernel = matches!(tuned.plan.steps[step], Step::Launch(_));
        let (form, time) = match quickest {
            Some((form, times)) if is_kernel && times[step].as_secs_f64() < usual.as_secs_f64() * WORTH => {
                (*form, times[step])
            }
            _ => (0, usual),
        };
        *best = form;
        before += usual;
        after += time;
    }
    notes.push(format!("{before:.1?} per call with the default forms, {after:.1?} with the chosen ones"));
    Ok((chosen, notes))
}

/// The least time of each step of each program.
type Times = Vec<(usize, Vec<Duration>)>;

fn rounds(
    graph: &Graph,
    plan: &Plan,
    programs: &[(usize, LoadedGraph)],
    settings: &Settings,
) -> Result<Times, String> {
    // Zeros are indices that are always there; ones can be divided by.
    run_rounds(graph, plan, programs, settings, 0).or_else(|_| run_rounds(graph, plan, programs, settings, 1))
}

fn run_rounds(
    graph: &Graph,
    plan: &Plan,
    programs: &[(usize, LoadedGraph)],
    settings: &Settings,
    integer: i64,
) -> Result<Times, String> {
    let inputs = inputs(graph, plan, integer)?;
    let number = |i: usize| match graph.inputs.get(i).map(|v| graph.ty(*v)) {
        Some(Ty::Scalar(kind)) => Some(Scalar::Int(1).to_kind(*kind)),
        Some(Ty::Tensor(_) | Ty::List(_)) | None => None,
    };
    let budget = Duration::from_millis(settings.autotune_ms as u64);
    let begin = Instant::now();
    let mut least: Times = programs.iter().map(|(number, _)| (*number, Vec::new())).collect();
    for round in 0..MOST_ROUNDS {
        progress::tell("measuring forms of kernels", round, MOST_ROUNDS);
        for ((_, program), (_, least)) in programs.iter().zip(&mut least) {
            let mut scalars = Vec::new();
            program.executable.numbers().fill(&number, &mut scalars).map_err(|error| error.to_string())?;
            let mut results = Vec::new();
            let run = program.executable.run(inputs.iter().map(Option::as_ref), &scalars, &mut results);
            run.map_err(|_| "the program does not run on made-up inputs".to_string())?;
            let times = program.executable.times();
            least.resize(times.len(), Duration::MAX);
            for (least, time) in least.iter_mut().zip(times) {
                *least = time.min(*least);
            }
        }
        // The first round finds cold caches.
        if round > 0 && begin.elapsed() > budget {
            break;
        }
    }
    progress::tell("measuring forms of kernels", MOST_ROUNDS, MOST_ROUNDS);
    Ok(least)
}

/// Tensors that lie as the program's inputs do.
fn inputs(graph: &Graph, plan: &Plan, integer: i64) -> Result<Vec<Option<Tensor>>, String> {
    let mut bytes = 0;
    let mut made: Vec<Option<Tensor>> = vec![None; graph.inputs.len()];
    for buffer in &plan.buffers {
        let Place::Input(i) = buffer.place else { continue };
        let buffer = &buffer.ty;
        let layout = Layout { shape: buffer.shape.clone(), strides: buffer.strides.clone(), offset: 0 };
        let last = buffer.shape.iter().zip(buffer.strides.iter());
        let reach: isize = last.map(|(&size, &stride)| (size as isize - 1).max(0) * stride).sum();
        if buffer.strides.iter().any(|&stride| stride < 0) {
            return Err("an input has negative strides".into());
        }
        let count = reach as usize + 1;
        bytes += count * buffer.dtype.size();
        if bytes > MOST_BYTES {
            return Err("the inputs are too large to measure on copies".into());
        }
        let value = match buffer.dtype {
            DType::F16 | DType::BF16 | DType::F32 | DType::F64 => 0.5,
            _ => integer as f64,
        };
        let tensor = Tensor::full_of([count], value, buffer.dtype, &Device::Cpu);
        let tensor = tensor.map_err(|error| error.to_string())?;
        let ready = tensor.ready().map_err(|error| error.to_string())?;
        let ready = ready.with_layout(layout).map_err(|error| error.to_string())?;
        made[i] = Some(Tensor::from_ready(ready));
    }
    Ok(made)
}
