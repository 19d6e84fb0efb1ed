//! Bands: products and the kernels between them run together on a few rows at a time, so that what lies between
//! (the scores and weights of attention) is never there as a whole, but in a thread's own memory, one band of it.
//!
//! Nothing here knows attention. A group of steps that follow each other is taken if every step makes its rows from
//! the same rows of what the others made: products with the rows on the left, kernels that go through all of it in
//! order. The steps stay what they are; [`Bands`] says that they go together, and [`Place::Band`] which buffers are
//! there for one band only. Rows don't depend on each other, so no bit changes.

use rustc_hash::{FxHashMap, FxHashSet};

use kiln_ir::Op;

use crate::WhyNot;
use crate::assemble::Loops;
use crate::memory::temporaries::InPlace;
use crate::schedule::epilogue;
use kiln_plan::{
    Bands, BufferId, BufferPlan, BufferRef, Epilogue, Launch, Machine, Place, Product, Step, ViewRef,
    signature,
};

/// Rows of a band: with fewer of them products are slow, with more there are no more savings.
const FEWEST: usize = 32;
const MOST: usize = 128;
/// So many rows too many go into the last band: products of so few are computed in another way.
const FEW: usize = 16;
/// There are so many bands at least, if that leaves enough rows to each: every core gets some.
const BANDS: usize = 32;
/// How often what lies between would go through memory otherwise (it is written, read, written in place and read), and
/// how much more it is worth that it takes no memory.
const PASSES: usize = 8;
/// So many steps are looked at for one group, so that the search takes no longer in long programs.
const WINDOW: usize = 64;

/// What bands are measured by, in bytes.
struct Sizes {
    /// Less than this between the products stays in the caches anyhow.
    smallest: usize,
    /// A band: half of a core's own cache at most, beside what the products read.
    band: usize,
    /// What stays in a core's own cache from band to band.
    kept: usize,
    /// The same where there is no batch: what all rows are multiplied with is a layer's weights, mostly, for which one
    /// large product is best.
    kept_weights: usize,
    /// Rows so long that a band of them would not stay in any cache, and that every thread would need this much.
    largest: usize,
}

impl Sizes {
    fn of(machine: &Machine) -> Sizes {
        let Machine { l2, l3, .. } = *machine;
        Sizes { smallest: l2, band: l2 / 2, kept: l2, kept_weights: l2 / 4, largest: l3 / 2 }
    }
}

fn refusal(reason: &'static str) -> WhyNot {
    WhyNot::Bands { reason }
}

/// A product that runs in bands: of floats.
fn product(step: &Step) -> Option<Product<'_>> {
    step.product().filter(|product| product.out.ty.dtype.is_float())
}

fn is_batched(step: &Step) -> bool {
    matches!(step, Step::Call(call) if matches!(call.op, Op::Bmm {}))
}

/// Whether a tensor is a whole buffer in order.
fn is_in_order(view: &ViewRef) -> bool {
    let mut step = 1;
    let dense = view.ty.shape.iter().zip(&view.strides).rev().all(|(&size, &stride)| {
        let fits = size == 1 || stride == step;
        step *= size as isize;
        fits
    });
    dense && view.at.offset == 0
}

/// What a step reads, and what it writes.
fn accesses(step: &Step, loops: Option<&Loops>) -> (Vec<BufferId>, Vec<BufferId>) {
    match (step, loops) {
        (Step::Launch(launch), Some(loops)) => {
            let writes = loops.kernel.stores.iter().map(|store| launch.bufs[store.buffer].buffer).collect();
            (launch.bufs.iter().map(|slot| slot.buffer).collect(), writes)
        }
        (Step::Call(call), _) => {
            let ids = |views: &[ViewRef]| views.iter().map(|view| view.at.buffer).collect();
            (ids(&call.args), ids(&call.outs))
        }
        // Whatever is not known to be read only.
        (step, _) => {
            let mut all = Vec::new();
            step.touched(&mut |buffer| all.push(buffer));
            (all.clone(), all)
        }
    }
}

/// Steps that make their rows from each other's.
struct Group {
    /// Matrices, and rows of each.
    batch: usize,
    m: usize,
    members: Vec<usize>,
    /// Steps between the members that have nothing to do with them.
    aside: Vec<usize>,
    /// What members make row by row: its columns, and the member that makes it.
    banded: FxHashMap<BufferId, (usize, usize)>,
    /// By kernel among the members.
    kernels: Vec<(usize, Epilogue)>,
    /// What members touch, and what they write.
    touched: FxHashSet<BufferId>,
    written: FxHashSet<BufferId>,
    /// Members that go on with what others made.
    readers: Vec<usize>,
    /// Why the group ends where it does.
    end: Option<&'static str>,
}

/// What a step is to a group.
enum Joined {
    Yes,
    Apart,
    No(&'static str),
}

impl Group {
    /// The group that begins with a product. With `around`, steps that have nothing to do with it may lie between.
    fn grow(steps: &[Step], loops: &[Option<Loops>], first: usize, around: bool) -> Option<Group> {
        let Product { batch, m, .. } = product(&steps[first])?;
        let mut group = Group {
            batch,
            m,
            members: Vec::new(),
            aside: Vec::new(),
            banded: FxHashMap::default(),
            kernels: Vec::new(),
            touched: FxHashSet::default(),
            written: FxHashSet::default(),
            readers: Vec::new(),
            end: None,
        };
        group.join(first, &steps[first], None);
        for s in first + 1..steps.len().min(first + WINDOW) {
            let loops = loops[s].as_ref();
            match group.join(s, &steps[s], loops) {
                Joined::Yes => continue,
                Joined::No(reason) => {
                    group.end = Some(reason);
                    break;
                }
                Joined::Apart => {}
            }
            let (reads, writes) = accesses(&steps[s], loops);
            let is_apart = reads.iter().all(|b| !group.written.contains(b))
                && writes.iter().all(|b| !group.touched.contains(b));
            if !is_apart {
                group.end = Some("a step that is no kernel reads it");
                break;
            }
            if !around {
                break;
            }
            group.aside.push(s);
        }
        Some(group)
    }

    fn join(&mut self, s: usize, step: &Step, loops: Option<&Loops>) -> Joined {
        if let Some(product) = product(step) {
            return self.join_product(s, &product);
        }
        let Step::Launch(Launch { bufs, checks, .. }) = step else { return Joined::Apart };
        if !bufs.iter().any(|slot| self.written.contains(&slot.buffer)) {
            return Joined::Apart;
        }
        match loops {
            Some(loops) if checks.is_empty() => self.join_kernel(s, loops, bufs),
            Some(_) => Joined::No("a kernel between them checks indices"),
            None => Joined::No("a kernel of lists reads what lies between"),
        }
    }

    fn join_product(&mut self, s: usize, product: &Product<'_>) -> Joined {
        let [lhs, rhs, dst] = [product.lhs, product.rhs, product.out].map(|view| view.at.buffer);
        let is_first = self.members.is_empty();
        let fits = (product.batch, product.m) == (self.batch, self.m);
        let continues = self.written.contains(&lhs);
        if self.written.contains(&rhs) {
            return Joined::No("a product has all of it as its right operand");
        }
        if continues {
            let columns = self.banded.get(&lhs).map(|(columns, _)| *columns);
            if !fits || !is_in_order(product.lhs) || columns != Some(product.k) {
                return Joined::No("a product reads it in another order");
            }
        } else if !fits || !is_first && self.touched.contains(&dst) {
            return Joined::Apart;
        }
        if self.touched.contains(&dst) {
            return Joined::No("a product writes what another step reads");
        }
        self.touched.extend([lhs, rhs, dst]);
        self.written.insert(dst);
        self.banded.insert(dst, (product.n, s));
        if continues {
            self.readers.push(s);
        }
        self.members.push(s);
        Joined::Yes
    }

    fn join_kernel(&mut self, s: usize, loops: &Loops, bufs: &[BufferRef]) -> Joined {
        let kernel = &loops.kernel;
        let mut columns = None;
        for slot in bufs.iter().filter(|slot| self.written.contains(&slot.buffer)) {
            match self.banded.get(&slot.buffer) {
                Some((wide, _)) if columns.is_none_or(|known| known == *wide) => columns = Some(*wide),
                Some(_) => return Joined::No("a kernel reads rows of different lengths"),
                None => return Joined::No("a kernel reads what another leaves for later"),
            }
        }
        let Some(columns) = columns.filter(|columns| *columns > 0) else { return Joined::Apart };
        let Some((per, span)) = signature::stride(kernel) else {
            return Joined::No("the loops of a kernel don't go along the rows");
        };
        let rows = match epilogue::rows(per, span, columns as i64) {
            Ok(rows) => rows,
            Err(_) => return Joined::No("the items of a kernel end inside of rows"),
        };
        let count = (self.batch * self.m * columns) as i64;
        let in_order = |buffer| epilogue::reads_in_order(kernel, bufs, buffer, span, count);
        if bufs.iter().any(|slot| self.written.contains(&slot.buffer) && !in_order(slot.buffer)) {
            return Joined::No("a kernel reads it in another order");
        }
        let made: Vec<BufferId> = kernel.stores.iter().map(|store| bufs[store.buffer].buffer).collect();
        if made.iter().any(|buffer| self.touched.contains(buffer) && !self.banded.contains_key(buffer)) {
            return Joined::No("a kernel overwrites what another step reads");
        }
        for &buffer in &made {
            // What is stored in another order is there at the end, for others.
            if self.written.insert(buffer) && in_order(buffer) {
                self.banded.insert(buffer, (columns, s));
            }
        }
        self.touched.extend(bufs.iter().map(|slot| slot.buffer));
        self.kernels.push((s, rows));
        self.readers.push(s);
        self.members.push(s);
        Joined::Yes
    }
}

/// A group that runs in bands, and what is there for one band only.
struct Decided {
    bands: Bands,
    scratch: Vec<(BufferId, Place)>,
}

/// The plan as far as it is known, to judge groups by.
struct Judge<'a> {
    steps: &'a [Step],
    buffers: &'a [BufferPlan],
    in_place: FxHashSet<InPlace>,
    sizes: Sizes,
    /// By buffer, the steps that touch it.
    users: Vec<Vec<usize>>,
}

impl<'a> Judge<'a> {
    fn new(
        steps: &'a [Step],
        buffers: &'a [BufferPlan],
        in_place: &[InPlace],
        machine: &Machine,
    ) -> Judge<'a> {
        let mut users = vec![Vec::new(); buffers.len()];
        for (s, step) in steps.iter().enumerate() {
            step.touched(&mut |buffer| {
                if users[buffer.index()].last() != Some(&s) {
                    users[buffer.index()].push(s);
                }
            });
        }
        let in_place = in_place.iter().copied().collect();
        Judge { steps, buffers, in_place, sizes: Sizes::of(machine), users }
    }

    /// The longest part of a group, from its beginning, that is better run in bands; or what speaks against the whole
    /// group.
    fn decide(&self, group: &Group) -> Result<(Decided, usize), WhyNot> {
        let mut why = refusal(group.end.unwrap_or("nothing goes on with its rows"));
        let ends =
            (1..group.members.len()).rev().filter(|&last| group.readers.contains(&group.members[last]));
        for (turn, last) in ends.enumerate() {
            match self.judge(group, &group.members[..=last]) {
                Ok(decided) => return Ok((decided, group.members[last])),
                Err(refused) if turn == 0 => why = refused,
                Err(_) => {}
            }
            if self.most_between(group) < self.sizes.smallest {
                break;
            }
        }
        Err(why)
    }

    /// Bytes that can lie between the members of a group, or of any part of it.
    fn most_between(&self, group: &Group) -> usize {
        let row = |(buffer, (columns, _)): (&BufferId, &(usize, usize))| {
            columns * self.buffers[buffer.index()].ty.dtype.size()
        };
        group.banded.iter().map(row).sum::<usize>() * group.batch * group.m
    }

    fn judge(&self, group: &Group, members: &[usize]) -> Result<Decided, WhyNot> {
        let is_inside = |buffer: BufferId| {
            matches!(self.buffers[buffer.index()].place, Place::Arena { .. } | Place::Band { .. })
                && self.users[buffer.index()].iter().all(|s| members.contains(s))
        };
        let mut inside: Vec<(usize, BufferId, usize)> = group
            .banded
            .iter()
            .filter(|(buffer, _)| is_inside(**buffer))
            .map(|(&buffer, &(columns, made))| (made, buffer, columns))
            .collect();
        inside.sort_unstable();
        if inside.is_empty() {
            return Err(refusal("all that lies between is needed afterwards"));
        }
        // Places for what lies between, each of so many bytes a row; who may takes the place of an operand.
        let mut places: Vec<usize> = Vec::new();
        let mut scratch: Vec<(BufferId, usize)> = Vec::new();
        let mut free: Vec<(BufferId, usize)> = Vec::new();
        for &(made, buffer, columns) in &inside {
            let takes = |from: BufferId| {
                self.in_place.contains(&InPlace { step: made, from, to: buffer })
                    && self.users[from.index()].last() == Some(&made)
            };
            let place = match free.iter().position(|(from, _)| takes(*from)) {
                Some(taken) => free.swap_remove(taken).1,
                None => {
                    places.push(columns * self.buffers[buffer.index()].ty.dtype.size());
                    places.len() - 1
                }
            };
            free.push((buffer, place));
            scratch.push((buffer, place));
        }
        let row: usize = places.iter().sum();
        if row * group.batch * group.m < self.sizes.smallest {
            return Err(refusal("what lies between is small enough for the caches"));
        }
        let kernels: Vec<Epilogue> =
            group.kernels.iter().filter(|(s, _)| members.contains(s)).map(|(_, rows)| *rows).collect();
        let unit = kernels.iter().fold(1, |unit, kernel| common_multiple(unit, kernel.rows));
        if group.batch > 1 && !group.m.is_multiple_of(unit) {
            return Err(refusal("the items of a kernel end in the next matrix"));
        }
        let share = (group.batch * group.m / BANDS).max(FEWEST);
        let rows = (self.sizes.band / row.max(1)).min(share).clamp(FEWEST, MOST) / FEW * FEW;
        let rows = rows.next_multiple_of(unit);
        let count = match group.m / rows {
            0 => 1,
            whole => whole + usize::from(group.m % rows > FEW),
        };
        let most = if count == 1 { group.m } else { rows.max(group.m - (count - 1) * rows) };
        if most * row > self.sizes.largest {
            return Err(refusal("the rows are too long for a core's cache"));
        }
        let operands: usize = members
            .iter()
            .filter_map(|&s| product(&self.steps[s]))
            .map(|product| product.k * product.n * product.out.ty.dtype.size())
            .sum();
        let is_batched = is_batched(&self.steps[members[0]]);
        let is_kept = operands <= if is_batched { self.sizes.kept } else { self.sizes.kept_weights };
        if !(is_kept || is_batched && operands <= PASSES * rows * row) {
            return Err(refusal("the right operands are large, and would be read again for each band"));
        }
        let mut bytes = 0;
        let mut place = |&row_bytes: &usize| {
            let offset = bytes;
            bytes += (row_bytes * most).next_multiple_of(64);
            Place::Band { offset, row_bytes }
        };
        let places: Vec<Place> = places.iter().map(&mut place).collect();
        let scratch = scratch.into_iter().map(|(buffer, place)| (buffer, places[place])).collect();
        let bands = Bands { first: members[0], steps: members.len(), rows, count, kernels, bytes };
        Ok(Decided { bands, scratch })
    }
}

fn common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x.max(1) * b
}

/// An order of the steps in which the next group at or after step `from` is all in a row, if it would run in bands then
/// and is not; and where to look on.
pub(crate) fn gather(
    steps: &[Step],
    loops: &[Option<Loops>],
    buffers: &[BufferPlan],
    in_place: &[InPlace],
    machine: &Machine,
    from: usize,
) -> Option<(Vec<usize>, usize)> {
    let judge = Judge::new(steps, buffers, in_place, machine);
    let mut s = from;
    while s < steps.len() {
        let found = Group::grow(steps, loops, s, true).and_then(|group| {
            let (_, last) = judge.decide(&group).ok()?;
            Some((group, last))
        });
        let Some((group, last)) = found else {
            s += 1;
            continue;
        };
        let aside: Vec<usize> = group.aside.into_iter().filter(|step| *step < last).collect();
        if aside.is_empty() {
            s = last + 1;
            continue;
        }
        let members = group.members.iter().copied().filter(|member| *member <= last);
        let order = (0..s).chain(aside).chain(members).chain(last + 1..steps.len()).collect();
        return Some((order, last + 1));
    }
    None
}

/// Finds the groups that run in bands, and says where their buffers lie; with the reasons for those that don't.
pub(crate) fn connect(
    steps: &mut [Step],
    loops: &[Option<Loops>],
    buffers: &mut [BufferPlan],
    in_place: &[InPlace],
    machine: &Machine,
) -> (Vec<Bands>, Vec<WhyNot>) {
    for buffer in buffers.iter_mut() {
        if let Place::Band { .. } = buffer.place {
            buffer.place = Place::Arena { offset: 0 };
        }
    }
    let judge = Judge::new(steps, buffers, in_place, machine);
    let (mut found, mut why_not) = (Vec::new(), Vec::new());
    let mut s = 0;
    while s < steps.len() {
        let Some(group) = Group::grow(steps, loops, s, false) else {
            s += 1;
            continue;
        };
        match judge.decide(&group) {
            Ok((decided, last)) => {
                found.push(decided);
                s = last + 1;
            }
            Err(why) => {
                // Of a single product nobody expects more than an epilogue.
                if is_batched(&steps[s]) && (group.end.is_some() || group.members.len() > 1) {
                    why_not.push(why);
                }
                s += 1;
            }
        }
    }
    for Decided { bands, scratch } in &found {
        for &(buffer, place) in scratch {
            buffers[buffer.index()].place = place;
        }
        for step in &mut steps[bands.first..bands.first + bands.steps] {
            if let Step::Call(call) = step {
                call.then = None;
            }
        }
    }
    (found.into_iter().map(|decided| decided.bands).collect(), why_not)
}
