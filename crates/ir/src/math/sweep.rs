//! The accuracy of every function over f32, as `docs/numerics.md` tells it.
//!
//! The test goes over f32 in wide strides and holds every function to what the page says. The page is made from a
//! dense sweep, about a minute's work: `BLESS=1 cargo test -p kiln-ir documented_accuracy`. Bit patterns are what is
//! counted, so all magnitudes are swept alike.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Function;

/// The stride of the page.
const DENSE: u64 = 499;

/// The stride of the test: its numbers are among those of the page.
const WIDE: u64 = 200 * DENSE;

/// What a function is compared with: doubles, exact or good to their last places.
enum Reference {
    One(fn(f64) -> f64),
    Two(fn(f64, f64) -> f64),
    /// Of one argument; the error is counted in units of the argument, since the function cancels.
    OfArgument(fn(f64) -> f64),
    /// Made of operations that each round once: the formula is the definition.
    Formula,
}

const ROOT_HALF: f64 = std::f64::consts::FRAC_1_SQRT_2;

macro_rules! define_reference {
    ($($(#[$doc:meta])* $variant:ident $name:literal $instructions:literal $($rare:ident)? |$cx:ident $(, $arg:ident)*| $body:expr;
        exact $exact:expr $(, integers |$($i:ident),*| $integer:expr)?;
    )*) => {
        fn reference(function: Function) -> Reference {
            use Reference::{Formula, OfArgument, One, Two};
            match function { $(Function::$variant => $exact,)* }
        }
    };
}
crate::scalar_functions!(define_reference);

/// Distance from the exact value in units in the last place of an f32 as large as `unit_of`; half a unit is as
/// near as an f32 can be. What is too large for f32 counts as the power of two that follows the largest.
fn ulps(got: f32, exact: f64, unit_of: f64) -> f64 {
    if exact.is_nan() || got.is_nan() {
        return if exact.is_nan() && got.is_nan() { 0.0 } else { f64::INFINITY };
    }
    let beyond = 128f64.exp2();
    let bounded = |x: f64| x.clamp(-beyond, beyond);
    let exponent = if unit_of == 0.0 { -126 } else { (exponent(unit_of)).clamp(-126, 127) };
    ((bounded(f64::from(got)) - bounded(exact)) / f64::from(exponent - 23).exp2()).abs()
}

/// ⌊log₂|x|⌋ of a normal double.
fn exponent(x: f64) -> i32 {
    (x.to_bits() >> 52 & 0x7ff) as i32 - 1023
}

/// The largest error and where it was.
#[derive(Copy, Clone, Default)]
struct Worst {
    ulps: f64,
    at: [f32; 2],
}

impl Worst {
    fn note(&mut self, ulps: f64, at: [f32; 2]) {
        if ulps > self.ulps {
            *self = Worst { ulps, at };
        }
    }
}

/// Every `stride`th bit pattern of a part of f32. The second argument of two goes its own way.
fn sweep(function: Function, patterns: std::ops::Range<u64>, stride: u64) -> Worst {
    let mut worst = Worst::default();
    let first = patterns.start.next_multiple_of(stride);
    for bits in (first..patterns.end).step_by(stride as usize) {
        let x = f32::from_bits(bits as u32);
        match reference(function) {
            Reference::One(exact) => {
                let exact = exact(f64::from(x));
                worst.note(ulps(function.eval_f32(&[x]), exact, exact), [x, 0.0]);
            }
            Reference::OfArgument(exact) => {
                let exact = exact(f64::from(x));
                worst.note(ulps(function.eval_f32(&[x]), exact, f64::from(x)), [x, 0.0]);
            }
            Reference::Two(exact) => {
                // All magnitudes, and then one near the first argument's, where results are not 0 or ∞.
                let mixed = (bits as u32).wrapping_mul(0x9e37_79b9).rotate_left(13).wrapping_mul(0x85eb_ca6b);
                let near = 0x3f80_0000 + (mixed % 0x0300_0000) - 0x0180_0000;
                for y in [f32::from_bits(mixed), f32::from_bits(near | mixed & 0x8000_0000)] {
                    let exact = exact(f64::from(x), f64::from(y));
                    worst.note(ulps(function.eval_f32(&[x, y]), exact, exact), [x, y]);
                }
            }
            Reference::Formula => return worst,
        }
    }
    worst
}

/// Where sweeps over all numbers found more than those in strides.
const FOUND: &[(Function, f32)] = &[(Function::Erf, 0.21658477)];

/// The worst of each function, threads sharing the parts.
fn measure(stride: u64) -> BTreeMap<&'static str, Worst> {
    const PART: u64 = 1 << 27;
    let measured: Vec<Function> =
        Function::ALL.iter().copied().filter(|&f| !matches!(reference(f), Reference::Formula)).collect();
    let parts = measured.len() as u64 * ((1 << 32) / PART);
    let (next, worst) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()));
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let part = next.fetch_add(1, Ordering::Relaxed);
                    if part >= parts {
                        return;
                    }
                    let function = measured[part as usize % measured.len()];
                    let start = part / measured.len() as u64 * PART;
                    let found = sweep(function, start..start + PART, stride);
                    let mut worst = worst.lock().unwrap();
                    let known: &mut Worst = worst.entry(function.name()).or_default();
                    known.note(found.ulps, found.at);
                }
            });
        }
    });
    let mut worst = worst.into_inner().unwrap();
    for &(function, x) in FOUND {
        let bits = u64::from(x.to_bits());
        let found = sweep(function, bits..bits + 1, 1);
        worst.entry(function.name()).or_default().note(found.ulps, found.at);
    }
    worst
}

const START: &str = "<!-- accuracy: from the test documented_accuracy -->\n";
const END: &str = "<!-- accuracy ends -->\n";

fn table(worst: &BTreeMap<&'static str, Worst>) -> String {
    let mut text = String::from("| function | largest error in ulp | at | |\n|---|---|---|---|\n");
    for &function in Function::ALL {
        let Some(worst) = worst.get(function.name()) else { continue };
        let note = match reference(function) {
            Reference::OfArgument(_) => "in ulp of x, since it cancels left of 0",
            _ if worst.ulps == 0.0 => "exact",
            _ if worst.ulps <= 0.5 => "correctly rounded",
            _ => "",
        };
        let at = match (worst.ulps, function.arity()) {
            (0.0, _) => String::new(),
            (_, 1) => format!("{:e}", worst.at[0]),
            _ => format!("{:e}, {:e}", worst.at[0], worst.at[1]),
        };
        // Rounded up: the page promises.
        let ulps = (worst.ulps * 100.0).ceil() / 100.0;
        text += &format!("| `{}` | {ulps:.2} | {at} | {note} |\n", function.name());
    }
    text
}

#[test]
fn documented_accuracy() {
    let bless = std::env::var_os("BLESS").is_some_and(|bless| bless == "1");
    let worst = measure(if bless { DENSE } else { WIDE });
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/numerics.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (before, rest) = page.split_once(START).expect("the page has a table");
    let (old, after) = rest.split_once(END).expect("the table ends");
    if bless {
        std::fs::write(path, format!("{before}{START}{}{END}{after}", table(&worst))).unwrap();
        return;
    }
    let mut rows = old.lines().skip(2).map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
    for &function in Function::ALL.iter().filter(|f| worst.contains_key(f.name())) {
        let row = rows.next().unwrap_or_default();
        assert_eq!(row.get(1), Some(&format!("`{}`", function.name()).as_str()), "the page's rows");
        let promised: f64 = row[2].parse().unwrap();
        let Worst { ulps, at } = worst[function.name()];
        assert!(ulps <= promised, "{}{at:?}: {ulps} ulp, docs/numerics.md says {promised}", function.name());
    }
    assert_eq!(rows.next(), None, "rows of functions that are not there");
}
