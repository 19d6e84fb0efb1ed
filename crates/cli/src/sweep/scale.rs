//! A sample call at the size where its time matters. Samples are small; which of their sizes grow together is asked of
//! the row's type rule, so that a new row is measured without a word about it here.
//!
//! ```text
//! mm of [3, 5] and [5, 2]: three groups, {3}, {5, 5} and {2}; at 1024 elements: [24, 24] and [24, 24]
//! ```

use kiln::ir::{Domain, Op, Sample, SampleArg, Shape, Ty};

/// What groups of sizes start from: the sizes in use have a small odd factor (768, 1536), and tails are met too.
const START: i64 = 3;

/// A call with other sizes than the sample's.
pub struct Scaled {
    pub op: Op,
    pub args: Vec<SampleArg>,
    /// The result's type with the dtype under test.
    pub result: Ty,
}

/// Where a number stands.
#[derive(Copy, Clone, PartialEq)]
enum Kind {
    /// A dim of an operand, counted from the last.
    Dim { arg: usize, from_last: usize },
    /// An attribute that is a size.
    Size,
    /// An attribute that goes with sizes, but is none.
    Place,
}

/// All sizes of a call, in one list.
struct Sizes<'a> {
    sample: &'a Sample,
    dtype: kiln::DType,
    kinds: Vec<Kind>,
    numbers: Vec<i64>,
}

impl<'a> Sizes<'a> {
    fn of(sample: &'a Sample, dtype: kiln::DType) -> Sizes<'a> {
        let mut all = Sizes { sample, dtype, kinds: Vec::new(), numbers: Vec::new() };
        for (arg, operand) in sample.args.iter().enumerate() {
            let (SampleArg::Tensor(shape, _) | SampleArg::Fixed(_, shape, _)) = operand else { continue };
            for (dim, &size) in shape.iter().enumerate() {
                all.kinds.push(Kind::Dim { arg, from_last: shape.rank() - dim });
                all.numbers.push(size as i64);
            }
        }
        let (row, mut op) = (sample.op.row(), sample.op.clone());
        op.each_number(&mut |name, number| {
            let kind = if row.sizes.contains(&name) { Kind::Size } else { Kind::Place };
            if sample.op.goes_with_sizes(name) {
                all.kinds.push(kind);
                all.numbers.push(*number);
            }
        });
        all
    }

    /// The call with these numbers, if the row's type rule accepts it.
    fn call(&self, numbers: &[i64]) -> Option<Scaled> {
        let mut next = numbers.iter().copied();
        let mut resized = |shape: &Shape| -> Option<Shape> {
            (0..shape.rank()).map(|_| next.next().map(|size| size as usize)).collect()
        };
        let mut args = Vec::new();
        for arg in &self.sample.args {
            args.push(match arg {
                SampleArg::Tensor(shape, domain) => {
                    SampleArg::Tensor(resized(shape)?, self.bound(*domain, numbers))
                }
                SampleArg::Fixed(dtype, shape, domain) => {
                    SampleArg::Fixed(*dtype, resized(shape)?, self.bound(*domain, numbers))
                }
                SampleArg::Number(number) => SampleArg::Number(*number),
            });
        }
        let mut op = self.sample.op.clone();
        op.each_number(&mut |name, number| {
            if self.sample.op.goes_with_sizes(name)
                && let Some(new) = next.next()
            {
                *number = new;
            }
        });
        let tys: Vec<Ty> = args.iter().map(|arg| ty(arg, self.dtype)).collect();
        let result = op.infer(&tys).ok()?.first()?.clone();
        Some(Scaled { op, args, result })
    }

    /// Indices below a size of the sample's stay below what became of it.
    fn bound(&self, domain: Domain, numbers: &[i64]) -> Domain {
        let grown = |bound: usize| {
            let same = self.numbers.iter().zip(numbers).filter(|(old, _)| **old == bound as i64);
            same.map(|(_, new)| *new as usize).min().unwrap_or(bound)
        };
        match domain {
            Domain::Index(bound) => Domain::Index(grown(bound)),
            Domain::Distinct(bound) => Domain::Distinct(grown(bound)),
            other => other,
        }
    }

    /// The elements of the result.
    fn results(&self, numbers: &[i64]) -> Option<usize> {
        self.call(numbers).map(|call| elements(&call.result))
    }

    /// The sizes that grow with the one at `i`: the fewest that the type rule accepts without a smaller result (a
    /// window's size makes it smaller).
    fn group(&self, i: usize) -> Option<Vec<usize>> {
        let before = self.results(&self.numbers)?;
        let fits = |group: &Vec<usize>| {
            self.results(&with(&self.numbers, group, 2)).is_some_and(|after| after >= before)
        };
        let others = |chosen: &dyn Fn(usize) -> bool| -> Vec<usize> {
            (0..self.numbers.len()).filter(|&j| j == i || chosen(j)).collect()
        };
        let alone = vec![i];
        if self.numbers[i] == 1 {
            // A dim of size 1 is there to be broadcast, except in the first operand.
            return (matches!(self.kinds[i], Kind::Dim { arg: 0, .. }) && fits(&alone)).then_some(alone);
        }
        if self.results(&with(&self.numbers, &alone, 2)).is_some_and(|after| after < before) {
            return None;
        }
        let equal = |j: usize| self.numbers[j] == self.numbers[i];
        let place = |kind: Kind| match kind {
            Kind::Dim { from_last, .. } => Some(from_last),
            Kind::Size | Kind::Place => None,
        };
        let aligned = |j: usize| {
            equal(j) && place(self.kinds[j]).is_some() && place(self.kinds[j]) == place(self.kinds[i])
        };
        let mut candidates =
            vec![alone, others(&aligned), others(&equal), others(&|j| self.kinds[j] == Kind::Place)];
        candidates.extend((0..self.numbers.len()).filter(|&j| j != i).map(|j| vec![i, j]));
        candidates.into_iter().find(fits)
    }

    fn groups(&self) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for i in (0..self.numbers.len()).filter(|&i| self.kinds[i] != Kind::Place) {
            if !groups.iter().flatten().any(|&member| member == i) {
                groups.extend(self.group(i));
            }
        }
        groups
    }
}

fn with(numbers: &[i64], group: &[usize], factor: i64) -> Vec<i64> {
    let mut numbers = numbers.to_vec();
    group.iter().for_each(|&i| numbers[i] *= factor);
    numbers
}

/// An operand's type, given the dtype under test.
pub fn ty(arg: &SampleArg, dtype: kiln::DType) -> Ty {
    match arg {
        SampleArg::Tensor(shape, _) => Ty::tensor(dtype, shape),
        SampleArg::Fixed(dtype, shape, _) => Ty::tensor(*dtype, shape),
        SampleArg::Number(x) => Ty::Scalar(x.kind()),
    }
}

fn elements(ty: &Ty) -> usize {
    ty.as_tensor().map_or(1, |ty| ty.shape.numel())
}

/// The elements that a call puts somewhere, where one value stands for all of them and so no operand has as many.
fn placed(op: &Op, tys: &[Ty]) -> usize {
    let (Op::IndexPut { dims, .. }, [x, _value, indices @ ..]) = (op, tys) else { return 0 };
    let picked: Vec<Ty> = std::iter::once(x).chain(indices).cloned().collect();
    let places = Op::Index { dims: dims.clone() }.infer(&picked);
    places.ok().and_then(|tys| tys.first().map(elements)).unwrap_or(0)
}

/// The sample with its sizes doubled group by group, the smallest first, while no tensor has more than so many
/// elements.
pub fn scaled(sample: &Sample, dtype: kiln::DType, most: usize) -> Option<Scaled> {
    let sizes = Sizes::of(sample, dtype);
    let groups = sizes.groups();
    let mut numbers = sizes.numbers.clone();
    for group in &groups {
        let mut start = numbers.clone();
        group.iter().for_each(|&i| start[i] = START);
        if group.iter().all(|&i| numbers[i] == numbers[group[0]]) && sizes.call(&start).is_some() {
            numbers = start;
        }
    }
    let tensors = |numbers: &[i64]| -> Vec<usize> {
        let Some(call) = sizes.call(numbers) else { return Vec::new() };
        let tys: Vec<Ty> = call.args.iter().map(|arg| ty(arg, dtype)).collect();
        tys.iter().chain([&call.result]).map(elements).chain([placed(&call.op, &tys)]).collect()
    };
    // Sizes that no tensor has (a number of classes) would grow for ever.
    let grows = |from: &[i64], to: &[i64]| {
        let (before, after) = (tensors(from), tensors(to));
        after.iter().sum::<usize>() > before.iter().sum() && after.iter().all(|&elements| elements <= most)
    };
    // The last of several small ones: memory's innermost dims are rarely the shortest.
    let smallest_first = |numbers: &[i64]| {
        let mut order: Vec<&Vec<usize>> = groups.iter().rev().collect();
        order.sort_by_key(|group| numbers[group[0]]);
        order
    };
    while let Some(next) = smallest_first(&numbers)
        .into_iter()
        .map(|group| with(&numbers, group, 2))
        .find(|next| grows(&numbers, next))
    {
        numbers = next;
    }
    // What is picked by places grows with what it is picked from.
    let places: Vec<usize> = (0..numbers.len()).filter(|&i| sizes.kinds[i] == Kind::Place).collect();
    while grows(&numbers, &with(&numbers, &places, 2)) {
        numbers = with(&numbers, &places, 2);
    }
    sizes.call(&numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln::DType;

    fn shapes(row: &str, sample: usize, most: usize) -> Vec<Vec<usize>> {
        let row = Op::ROWS.iter().find(|other| other.name == row).expect("a row");
        let call = scaled(&row.sample_calls()[sample], DType::F32, most).expect("a sample scales");
        let shape = |arg: &SampleArg| ty(arg, DType::F32).as_tensor().map(|ty| ty.shape.to_vec());
        call.args.iter().filter_map(shape).collect()
    }

    #[test]
    fn sizes_that_belong_together_grow_together() {
        assert_eq!(shapes("mm", 1, 1 << 10), [[24, 24], [24, 24]]);
        assert_eq!(shapes("add", 2, 1 << 10), [vec![24, 24], vec![24]]);
        assert_eq!(shapes("layer_norm", 1, 1 << 10)[1..], [vec![24]]);
        // One value for many places: these count.
        let puts = Op::ROWS.iter().find(|row| row.name == "index_put").expect("a row").sample_calls();
        let rank = |arg: &SampleArg| ty(arg, DType::F32).as_tensor().map(|ty| ty.shape.rank());
        let broadcast =
            puts.iter().find(|put| rank(&put.args[1]) == Some(0) && rank(&put.args[2]) == Some(1));
        let call = scaled(broadcast.expect("a sample"), DType::F32, 1 << 10).expect("a sample scales");
        let tys: Vec<Ty> = call.args.iter().map(|arg| ty(arg, DType::F32)).collect();
        assert_eq!(placed(&call.op, &tys), 24 * 24);
        // A window's size stays.
        assert_eq!(shapes("convolution", 0, 1 << 10)[1][2..], [3, 3]);
    }

    #[test]
    fn most_samples_of_every_row_scale() {
        for row in Op::ROWS {
            let samples = row.sample_calls();
            if samples.is_empty() {
                continue;
            }
            let largest = samples.iter().filter_map(|sample| {
                let dtype = *sample.dtypes.first()?;
                let call = scaled(sample, dtype, 1 << 18)?;
                let operands = call.args.iter().map(|arg| elements(&ty(arg, dtype)));
                operands.chain([elements(&call.result)]).max()
            });
            let largest = largest.max().unwrap_or(0);
            assert!(largest > 1 << 16, "{}: its largest sample has {largest} elements", row.name);
        }
    }
}
