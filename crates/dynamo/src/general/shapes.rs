//! How the sizes of a recording depend on each other: each is a polynomial of a few that change freely.
//!
//! Recordings of one form differ in the sizes of inputs and in attributes that are sizes or places. A size that
//! was the same in all of them is a constant. One that changed is fitted as c · ∏ symbols + d to all recordings
//! there are; where nothing fits it becomes a symbol of its own. What was found is a guess about the program, so
//! it is checked on every call ([`Shapes::bind`]): a size that is not what it should be means that the guess is
//! made again from more recordings, or that this call has a plan of its own.

use std::fmt;

use kiln_ir::Row;
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use super::fit::{MOST_SYMBOLS, Point, Polynomial};
use crate::event::Event;
use crate::guard::Guard;
use crate::trie::Trie;

/// A number of a recording that its form does not tell.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) struct Slot {
    pub(crate) value: i64,
    /// Whether something has this size: 0 and 1 have a meaning of their own then.
    is_size: bool,
    /// Whether it is an input's, not an attribute's.
    is_input: bool,
}

impl Slot {
    fn of_input(value: i64) -> Slot {
        Slot { value, is_size: true, is_input: true }
    }

    /// Of a number in an op's attribute, if that is a size or a place.
    fn of_attribute(row: &Row, name: &str, value: i64) -> Option<Slot> {
        let is_size = row.sizes.contains(&name);
        (is_size || row.places.contains(&name)).then_some(Slot { value, is_size, is_input: false })
    }
}

/// The slots of an input, in order; `change` may exchange the numbers.
fn each_slot_of_guard(guard: &Guard, change: &mut dyn FnMut(Slot) -> i64) -> Guard {
    let (mut shape, mut strides) = (guard.shape.clone(), guard.strides.clone());
    for size in shape.iter_mut() {
        *size = change(Slot::of_input(*size as i64)) as usize;
    }
    if strides == guard.shape.contiguous_strides() {
        strides = shape.contiguous_strides();
    } else {
        for stride in &mut strides {
            *stride = change(Slot::of_input(*stride as i64)) as isize;
        }
    }
    guard.resized(shape, strides)
}

/// The event with other numbers in its slots, as `change` says. What it made is left as it was.
pub(crate) fn with_slots(event: &Event, change: &mut dyn FnMut(Slot) -> i64) -> Event {
    let mut event = event.clone();
    event.guards_mut().iter_mut().for_each(|guard| *guard = each_slot_of_guard(guard, change));
    if let Event::Call(call) = &mut event {
        let row = call.op.row();
        call.op.each_number(&mut |name, number| {
            if let Some(slot) = Slot::of_attribute(row, name, *number) {
                *number = change(slot);
            }
        });
    }
    event
}

/// Calls for every slot of the segment that ends at a node, in the order of [`with_slots`], and with what it is
/// called.
fn each_slot(trie: &Trie, at: u32, found: &mut dyn FnMut(Slot, fmt::Arguments<'_>)) {
    let mut input = 0;
    for index in trie.path(at) {
        let event = &*trie.node(index).event;
        for guard in event.guards() {
            for (dim, &size) in guard.shape.iter().enumerate() {
                found(Slot::of_input(size as i64), format_args!("dim {dim} of input {input}"));
            }
            if guard.strides != guard.shape.contiguous_strides() {
                for (dim, &stride) in guard.strides.iter().enumerate() {
                    found(Slot::of_input(stride as i64), format_args!("stride {dim} of input {input}"));
                }
            }
            input += 1;
        }
        if let Event::Call(call) = event
            && !call.op.row().attributes.is_empty()
        {
            call.op.clone().each_number(&mut |name, number| {
                if let Some(slot) = Slot::of_attribute(call.op.row(), name, *number) {
                    found(slot, format_args!("{name} of {} at {}", call.op.name(), call.loc));
                }
            });
        }
    }
}

/// The slots of the segment that ends at a node.
pub(crate) fn slots(trie: &Trie, at: u32) -> Vec<Slot> {
    let mut slots = Vec::new();
    each_slot(trie, at, &mut |slot, _| slots.push(slot));
    slots
}

/// What the slots of a segment are called.
pub(crate) fn names(trie: &Trie, at: u32) -> Vec<String> {
    let mut names = Vec::new();
    each_slot(trie, at, &mut |_, name| names.push(name.to_string()));
    names
}

/// What a symbol stands for: the number in a slot, counted in units.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
struct Symbol {
    slot: usize,
    unit: i64,
}

/// See the [module](self).
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Shapes {
    symbols: SmallVec<[Symbol; MOST_SYMBOLS]>,
    /// By slot.
    numbers: Vec<(Polynomial, bool)>,
}

impl Shapes {
    /// The simplest rule that all recordings follow. `None` if too many sizes change freely, or if one that
    /// changes was 0 or 1 once.
    pub(crate) fn fit(recordings: &[Vec<Slot>]) -> Option<Shapes> {
        let first = recordings.first()?;
        if recordings.iter().any(|slots| slots.len() != first.len()) {
            return None;
        }
        let numbers = first.iter().map(|slot| (Polynomial::default(), slot.is_size)).collect();
        let mut shapes = Shapes { symbols: SmallVec::new(), numbers };
        // What can be a symbol of an input's is.
        let (inputs, attributes): (Vec<usize>, Vec<usize>) =
            (0..first.len()).partition(|&slot| first[slot].is_input);
        for slot in inputs.into_iter().chain(attributes) {
            let values: SmallVec<[i64; 8]> = recordings.iter().map(|slots| slots[slot].value).collect();
            let is_size = first[slot].is_size;
            if values.iter().all(|value| *value == values[0]) {
                shapes.numbers[slot].0 = Polynomial::constant(values[0]);
                continue;
            }
            if is_size && values.iter().any(|value| *value < 2) {
                return None;
            }
            let number = match shapes.rule(recordings, &values) {
                Some(number) => number,
                None => {
                    if shapes.symbols.len() == MOST_SYMBOLS {
                        return None;
                    }
                    shapes.symbols.push(Symbol { slot, unit: 1 });
                    Polynomial::symbol(shapes.symbols.len() - 1, 1)
                }
            };
            shapes.numbers[slot].0 = number;
        }
        (!shapes.symbols.is_empty()).then_some(shapes)
    }

    /// How a slot that had these values in the recordings follows from the symbols there are, if it does.
    fn rule(&mut self, recordings: &[Vec<Slot>], values: &[i64]) -> Option<Polynomial> {
        let points: Vec<Point> = recordings.iter().map(|slots| self.point(slots)).collect::<Option<_>>()?;
        let count = self.symbols.len();
        let all = 0..count;
        let mut products: Vec<SmallVec<[usize; 3]>> =
            all.clone().map(|a| SmallVec::from_slice(&[a])).collect();
        products.extend(all.clone().flat_map(|a| (0..=a).map(move |b| SmallVec::from_slice(&[a, b]))));
        if count == MOST_SYMBOLS {
            products.push(SmallVec::from_slice(&[0, 1, 2]));
        }
        // Sizes may be strides of 10⁹, and there are three at most.
        let at = |product: &[usize], point: &Point| -> i128 {
            product.iter().map(|&s| i128::from(point[s])).product()
        };
        let values: Vec<i128> = values.iter().map(|&value| i128::from(value)).collect();
        let number = |x: i128| i64::try_from(x).ok();
        // c · ∏, then ∏ + d, then c · ∏ + d. Of two recordings the last says nothing.
        for product in &products {
            let (numerator, denominator) = (values[0], at(product, &points[0]));
            let scaled = points.iter().zip(&values).all(|(point, &value)| {
                value.checked_mul(denominator) == numerator.checked_mul(at(product, point))
            });
            if !scaled || denominator == 0 || numerator == 0 {
                continue;
            }
            if numerator % denominator == 0 {
                return Some(Polynomial::product(product, number(numerator / denominator)?, 0));
            }
            // A part of a size: the size is counted in such parts from now on.
            if let ([symbol], 0) = (product.as_slice(), denominator % numerator) {
                self.divide(*symbol, number(denominator / numerator)?);
                return Some(Polynomial::symbol(*symbol, 1));
            }
        }
        for product in &products {
            let constant = values[0] - at(product, &points[0]);
            if points.iter().zip(&values).all(|(point, &value)| value - at(product, point) == constant) {
                return Some(Polynomial::product(product, 1, number(constant)?));
            }
        }
        if recordings.len() < 3 {
            return None;
        }
        products.iter().find_map(|product| {
            let (a, b) = (at(product, &points[0]), points.iter().map(|p| at(product, p)));
            let other = b.zip(&values).find(|(b, _)| *b != a)?;
            let (rise, run) = (other.1 - values[0], other.0 - a);
            if rise % run != 0 {
                return None;
            }
            let (factor, constant) = (rise / run, values[0] - rise / run * a);
            let holds = |(point, &value): (&Point, &i128)| value == factor * at(product, point) + constant;
            let found = points.iter().zip(&values).all(holds);
            found.then_some(Polynomial::product(product, number(factor)?, number(constant)?))
        })
    }

    /// Counts a symbol in units that are larger by this factor.
    fn divide(&mut self, symbol: usize, unit: i64) {
        self.symbols[symbol].unit *= unit;
        for (number, _) in &mut self.numbers {
            *number = std::mem::take(number).in_units(symbol, unit);
        }
    }

    /// The same in the largest units that all recordings are multiples of; `None` if that is what it is.
    pub(crate) fn coarser(&self, recordings: &[Vec<Slot>]) -> Option<Shapes> {
        let points: Vec<Point> = recordings.iter().map(|slots| self.point(slots)).collect::<Option<_>>()?;
        let mut coarse = self.clone();
        for symbol in 0..self.symbols.len() {
            let unit = points.iter().fold(0, |unit, point| common_divisor(unit, point[symbol]));
            if unit > 1 {
                coarse.divide(symbol, unit);
            }
        }
        (coarse != *self).then_some(coarse)
    }

    /// The values of the symbols; `None` if a size is no multiple of its unit.
    fn point(&self, slots: &[Slot]) -> Option<Point> {
        let value = |symbol: &Symbol| {
            let number = slots.get(symbol.slot)?.value;
            (number % symbol.unit == 0).then_some(number / symbol.unit)
        };
        self.symbols.iter().map(value).collect()
    }

    /// The values of the symbols in a recording, if it follows the rules.
    pub(crate) fn bind(&self, slots: &[Slot]) -> Option<Point> {
        if slots.len() != self.numbers.len() {
            return None;
        }
        let point = self.point(slots)?;
        let fits = |(slot, (number, is_size)): (&Slot, &(Polynomial, bool))| {
            number.at(&point) == Some(slot.value) && (!is_size || number.is_constant() || slot.value >= 2)
        };
        slots.iter().zip(&self.numbers).all(fits).then_some(point)
    }

    /// The slots at a point; `None` if there is no such recording.
    pub(crate) fn at(&self, point: &Point) -> Option<Vec<i64>> {
        let value = |(number, is_size): &(Polynomial, bool)| {
            let value = number.at(point)?;
            let allowed = number.is_constant() || value >= if *is_size { 2 } else { 0 };
            allowed.then_some(value)
        };
        self.numbers.iter().map(value).collect()
    }

    /// What changes freely and what follows from it, given the slots' names.
    pub(crate) fn words(&self, names: &[String]) -> (Vec<String>, Vec<String>) {
        let name = |slot: usize| names.get(slot).map_or("?", |name| name.as_str());
        let symbols = self.symbols.iter().enumerate().map(|(s, symbol)| match symbol.unit {
            1 => format!("s{s} = {}", name(symbol.slot)),
            unit => format!("s{s} = {} / {unit}", name(symbol.slot)),
        });
        let own: Vec<usize> = self.symbols.iter().map(|symbol| symbol.slot).collect();
        let rules = self
            .numbers
            .iter()
            .enumerate()
            .filter(|(slot, (number, _))| !number.is_constant() && !own.contains(slot));
        let mut rules: Vec<String> =
            rules.map(|(slot, (number, _))| format!("{} = {number}", name(slot))).collect();
        let mut seen = FxHashSet::default();
        rules.retain(|rule| seen.insert(rule.clone()));
        (symbols.collect(), rules)
    }

    /// How many sizes change freely.
    pub(crate) fn symbols(&self) -> usize {
        self.symbols.len()
    }
}

fn common_divisor(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording(values: &[i64]) -> Vec<Slot> {
        values.iter().map(|&value| Slot::of_input(value)).collect()
    }

    #[track_caller]
    fn check(recordings: &[&[i64]], symbols: usize, fits: &[i64], fails: &[i64]) {
        let recordings: Vec<Vec<Slot>> = recordings.iter().map(|values| recording(values)).collect();
        let shapes = Shapes::fit(&recordings).expect("a rule");
        assert_eq!(shapes.symbols(), symbols, "{shapes:?}");
        let point = shapes.bind(&recording(fits)).expect("follows the rule");
        assert_eq!(shapes.at(&point).as_deref(), Some(fits));
        assert_eq!(shapes.bind(&recording(fails)), None);
    }

    #[test]
    fn sizes_follow_each_other() {
        check(&[&[4, 64, 4], &[6, 64, 6]], 1, &[9, 64, 9], &[9, 64, 10]);
        check(&[&[4, 64, 256], &[6, 64, 384]], 1, &[9, 64, 576], &[9, 64, 577]);
        check(&[&[4, 7, 5], &[6, 7, 7]], 1, &[9, 7, 10], &[9, 7, 9]);
        check(&[&[4, 3, 12], &[6, 7, 42]], 2, &[7, 9, 63], &[7, 9, 64]);
        check(&[&[4, 11], &[6, 15], &[7, 17]], 1, &[10, 23], &[10, 24]);
        check(&[&[32, 2], &[48, 3]], 1, &[80, 5], &[81, 5]);
    }

    #[test]
    fn sizes_that_follow_nothing_are_free() {
        check(&[&[4, 9], &[6, 5]], 2, &[8, 3], &[8, 1]);
        assert_eq!(Shapes::fit(&[recording(&[4, 1]), recording(&[6, 2])]), None);
        assert_eq!(Shapes::fit(&[recording(&[2, 9, 5, 8]), recording(&[3, 2, 9, 7])]), None);
    }
}
