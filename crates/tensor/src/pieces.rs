//! Long lists in pieces: optimizers take a part of each list that fits the caches through all their ops, then
//! the next part.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use kiln_ir::{Layout, Loc, Result, Shape, TensorTy};
use kiln_runtime::{machine, parallel_for, threads};

use crate::autograd::{grad_enabled, no_grad, run_backward};
use crate::dense::HeldCall;
use crate::dispatch::{execute, hold};
use crate::hook::{self, Access, Arg, Call, GradRequest, Output, Recorder};
use crate::tensor::Ready;
use crate::{Tensor, TensorList};

/// Elements of a list that a thread's caches hold, together with those of a few other lists: of f32 they fill the core's
/// own.
fn longest() -> usize {
    machine().l2 / size_of::<f32>()
}

/// Tensors are cut at multiples of this many elements.
const CUT: usize = 1 << 12;

/// Some elements of the tensors at one place of several lists.
struct Part {
    at: usize,
    begin: usize,
    count: usize,
}

/// Runs `body`, which takes lists through several list ops off the tape, on pieces of them: each piece goes
/// through all the ops before the next one does, and the caches keep what one op leaves for the next (see
/// [`Together`]). The tensors of a piece are those of the lists, or flat views of some of their elements; no piece
/// has two of one tensor.
/// Where the tensors can be shared out evenly, each thread takes its own through all pieces, without waiting
/// for the others after every op.
///
/// `None`, and nothing was done, if the lists are best taken whole: while a program is recorded or gradients are,
/// if they are small, unless the tensors at each place are dense and of one shape, and if two of a list share
/// their memory. The first error stops the pieces that have not begun.
pub fn each_piece(
    lists: &[&TensorList],
    body: impl Fn(&[TensorList]) -> Result<()> + Sync,
) -> Option<Result<()>> {
    if grad_enabled() || hook::with_current(|recorder| recorder.is_some()) {
        return None;
    }
    let items = lists.iter().map(|list| list.try_items()).collect::<Option<Vec<&[Tensor]>>>()?;
    let sizes = sizes(&items)?;
    // Runs of other threads that have the memory in use finish first.
    if let Err(error) = lists.iter().try_for_each(|list| hook::settle(&[Arg::List(list)])) {
        return Some(Err(error));
    }
    let run = |piece: &[Part]| {
        let list = |items: &&[Tensor]| piece.iter().map(|part| part.of(&items[part.at])).collect();
        together(|| body(&items.iter().map(list).collect::<Vec<TensorList>>()))
    };
    let Some(shares) = shares(&sizes, threads::count()) else {
        // Each op is shared out instead.
        return Some(
            cut(&sizes, 0..sizes.len(), longest() * threads::count()).iter().try_for_each(|p| run(p)),
        );
    };
    let failed = Mutex::new(None);
    parallel_for(shares.len(), 1, |begin, end| {
        let _off = no_grad();
        for share in &shares[begin..end] {
            for piece in cut(&sizes, share.clone(), longest()) {
                if failed.lock().is_some() {
                    return;
                }
                if let Err(error) = run(&piece) {
                    failed.lock().get_or_insert(error);
                }
            }
        }
    });
    Some(failed.into_inner().map_or(Ok(()), Err))
}

/// The number of elements at each place, if the lists can be cut and it pays.
fn sizes(items: &[&[Tensor]]) -> Option<Vec<usize>> {
    let first = *items.first()?;
    if items.iter().any(|items| items.len() != first.len()) {
        return None;
    }
    let mut sizes = Vec::with_capacity(first.len());
    for (at, model) in first.iter().enumerate() {
        let model = model.try_ready()?;
        for items in items {
            let ready = items[at].try_ready()?;
            if ready.layout.shape != model.layout.shape || !ready.layout.is_contiguous() {
                return None;
            }
        }
        sizes.push(model.layout.shape.numel());
    }
    if sizes.iter().sum::<usize>() <= longest() * threads::count() {
        return None;
    }
    for items in items {
        let address = |tensor: &Tensor| tensor.try_ready().map_or(0, |ready| ready.storage.address());
        let mut addresses: Vec<usize> = items.iter().map(address).collect();
        addresses.sort_unstable();
        if addresses.windows(2).any(|pair| pair[0] == pair[1]) {
            return None;
        }
    }
    Some(sizes)
}

/// Stretches of about equal size, one for each thread; `None` if whole tensors can't be shared out like that.
/// Two threads on parts of one tensor would wait for each other: a change locks it.
fn shares(sizes: &[usize], threads: usize) -> Option<Vec<Range<usize>>> {
    let total: usize = sizes.iter().sum();
    let (mut shares, mut begin, mut done) = (Vec::with_capacity(threads), 0, 0);
    for (at, &size) in sizes.iter().enumerate() {
        done += size;
        if done * threads >= total * (shares.len() + 1) {
            shares.push(begin..at + 1);
            begin = at + 1;
        }
    }
    let largest = shares.iter().map(|share| sizes[share.clone()].iter().sum::<usize>()).max()?;
    (shares.len() == threads && largest * threads <= total + total / 8).then_some(shares)
}

/// The tensors at some places, cut into pieces of at most `room` elements.
fn cut(sizes: &[usize], places: Range<usize>, room: usize) -> Vec<Vec<Part>> {
    let (mut pieces, mut piece, mut left) = (Vec::new(), Vec::new(), room);
    for at in places {
        let (mut begin, numel) = (0, sizes[at]);
        while begin < numel {
            let rest = numel - begin;
            let count = if rest <= left { rest } else { left / CUT * CUT };
            if count > 0 {
                piece.push(Part { at, begin, count });
            }
            begin += count;
            left -= count;
            if begin < numel {
                pieces.push(std::mem::take(&mut piece));
                left = room;
            }
        }
    }
    pieces.push(piece);
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

impl Part {
    fn of(&self, tensor: &Tensor) -> Tensor {
        match tensor.try_ready() {
            // Less than the whole, which is still what was cut: data may be replaced at any time.
            Some(ready)
                if self.count < ready.layout.shape.numel()
                    && self.begin + self.count <= ready.layout.shape.numel()
                    && ready.layout.is_contiguous() =>
            {
                let offset = ready.layout.offset + self.begin;
                let layout = Layout { offset, ..Layout::contiguous(Shape::from([self.count])) };
                Tensor::from_ready(Ready { layout, view_version: None, ..ready.clone() })
            }
            _ => tensor.clone(),
        }
    }
}

/// Runs `body`; its list ops run together.
fn together(body: impl FnOnce() -> Result<()>) -> Result<()> {
    let pending = Arc::new(Together::default());
    let done = {
        let _scope = hook::Scope::enter(pending.clone());
        body()
    };
    // What came before an error has happened.
    pending.run();
    done
}

/// Takes list ops and runs them later, together, a block of elements at a time: the second op finds in the
/// first-level cache what the first one left. Whatever is not a dense list op finds them done.
#[derive(Default)]
struct Together(Mutex<Vec<Vec<HeldCall>>>);

impl Together {
    /// Runs what has come so far.
    fn run(&self) {
        let steps = std::mem::take(&mut *self.0.lock());
        HeldCall::run_all(&steps);
    }
}

impl Recorder for Together {
    fn call(&self, call: &Call<'_>) -> Result<Output> {
        if let Some((held, output)) = hold(call)? {
            self.0.lock().push(held);
            return Ok(output);
        }
        self.run();
        let _eager = hook::Scope::suspend();
        execute(call)
    }

    fn backward(&self, request: &GradRequest<'_>) -> Result<()> {
        self.run();
        let _eager = hook::Scope::suspend();
        run_backward(request)
    }

    fn access(&self, _: &Tensor, _: Access, _: &'static str, _: Loc) -> Result<()> {
        self.run();
        Ok(())
    }

    fn ty(&self, _: &Tensor) -> Option<TensorTy> {
        None
    }

    fn layout(&self, _: &Tensor) -> Option<Layout> {
        None
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }

    fn force(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kiln_ir::{DType, Error};

    use super::*;
    use crate::foreach::{add_scaled_, mul_, sqrt};

    /// Lists of a few tensors, of which some are cut and some share a piece.
    fn lists() -> Result<[TensorList; 2]> {
        let large = 2 * longest() * threads::count() + 12345;
        let shapes: [&[usize]; 6] = [&[5], &[large], &[0, 3], &[7, 9001], &[], &[large / 3, 3]];
        let list = |step: usize| -> Result<TensorList> {
            let tensor = |shape: &&[usize]| {
                let elements = 0..shape.iter().product();
                let elements: Vec<f32> = elements.map(|i: usize| (i * step % 997) as f32).collect();
                Tensor::from_slice(&elements)?.reshape(*shape)
            };
            shapes.iter().map(tensor).collect()
        };
        Ok([list(3)?, list(7)?])
    }

    fn ops([x, y]: [&TensorList; 2]) -> Result<()> {
        mul_(x, 0.9)?;
        add_scaled_(x, y, 3.0)?;
        let root = sqrt(x)?;
        add_scaled_(y, &root, -0.5)
    }

    /// Both lists in pieces and whole; returns how many pieces there were.
    fn check([x, y]: [&TensorList; 2], [whole_x, whole_y]: [&TensorList; 2]) -> Result<usize> {
        ops([whole_x, whole_y])?;
        let count = AtomicUsize::new(0);
        let done = each_piece(&[x, y], |piece| {
            let [x, y] = piece else { panic!("as many lists as there were") };
            let total = |list: &TensorList| list.items().map(|items| items.iter().map(Tensor::numel).sum());
            let elements: usize = total(x)?;
            assert!(elements > 0 && elements <= longest() * threads::count());
            assert_eq!(elements, total(y)?);
            count.fetch_add(1, Ordering::Relaxed);
            ops([x, y])
        });
        done.expect("large, dense and off the tape")?;
        for (list, whole) in [(x, whole_x), (y, whole_y)] {
            for (tensor, whole) in list.items()?.iter().zip(whole.items()?) {
                assert!(tensor.to_vec::<f32>()? == whole.to_vec::<f32>()?, "{}", tensor.ty());
            }
        }
        Ok(count.into_inner())
    }

    #[test]
    fn pieces_are_the_whole() -> Result<()> {
        let _off = no_grad();
        let ([x, y], [whole_x, whole_y]) = (lists()?, lists()?);
        let count = check([&x, &y], [&whole_x, &whole_y])?;
        assert!(count > 4, "{count}");
        // One tensor alone can't be shared out.
        let one = |list: &TensorList| Ok::<_, Error>(TensorList::new(vec![list.get(1)?]));
        let count = check([&one(&x)?, &one(&y)?], [&one(&whole_x)?, &one(&whole_y)?])?;
        assert!(count > 2, "{count}");
        Ok(())
    }

    /// Ops whose results differ if blocks are taken where they must not be.
    #[test]
    fn blocks_are_taken_where_no_element_can_tell() -> Result<()> {
        let _off = no_grad();
        let n = 5000;
        let memory = || Tensor::from_slice(&(0..n + 1).map(|i| (i % 89) as f32).collect::<Vec<_>>());
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let run = |whole: bool| -> Result<Vec<Vec<f32>>> {
                let a = memory()?.to_dtype(dtype)?;
                // The one begins an element after the other; and there are two of one memory.
                let (x, shifted) = (a.slice(0, 0, n, 1)?, a.slice(0, 1, n + 1, 1)?);
                let b = memory()?.to_dtype(dtype)?;
                let (list, other) = (TensorList::new(vec![x]), TensorList::new(vec![shifted]));
                let (single, same) = (TensorList::new(vec![b.clone()]), TensorList::new(vec![b.clone()]));
                let mut kept = Vec::new();
                let mut body = || -> Result<()> {
                    mul_(&list, 0.5)?;
                    let copies = sqrt(&other)?;
                    add_scaled_(&list, &copies, 2.0)?;
                    mul_(&single, &same)?;
                    add_scaled_(&single, &same, -0.25)?;
                    // Read by the host in the middle.
                    kept.push(single.get(0)?.to_dtype(DType::F32)?.to_vec::<f32>()?);
                    add_scaled_(&single, &TensorList::new(vec![a.clone()]), 1.0)?;
                    sqrt(&single).map(drop)
                };
                if whole {
                    body()?
                } else {
                    together(body)?
                }
                kept.push(a.to_dtype(DType::F32)?.to_vec()?);
                kept.push(b.to_dtype(DType::F32)?.to_vec()?);
                Ok(kept)
            };
            assert!(run(false)? == run(true)?, "{dtype}");
        }
        Ok(())
    }

    #[test]
    fn what_came_before_an_error_has_happened() -> Result<()> {
        let _off = no_grad();
        let x = Tensor::from_slice(&[1.0f32, 2.0])?;
        let list = TensorList::new(vec![x.clone()]);
        let done = together(|| {
            mul_(&list, 3.0)?;
            add_scaled_(&list, &TensorList::new(vec![Tensor::from_slice(&[1.0f32; 3])?]), 1.0)?;
            mul_(&list, 100.0)
        });
        assert!(done.is_err());
        assert_eq!(x.to_vec::<f32>()?, [3.0, 6.0]);
        Ok(())
    }

    #[test]
    fn tensors_are_shared_out_evenly_or_not_at_all() {
        assert_eq!(shares(&[5; 10], 2), Some(vec![0..5, 5..10]));
        assert_eq!(shares(&[4, 4, 4, 1, 1, 1, 1], 4), Some(vec![0..1, 1..2, 2..3, 3..7]));
        assert_eq!(shares(&[0, 7, 0, 7, 0], 2), Some(vec![0..2, 2..4]));
        assert_eq!(shares(&[1, 9], 2), None);
        assert_eq!(shares(&[9], 2), None);
    }

    #[test]
    fn an_error_in_one_piece_is_the_lists() -> Result<()> {
        let _off = no_grad();
        let [x, y] = lists()?;
        let done = each_piece(&[&x], |piece| add_scaled_(&piece[0], &y, 1.0));
        assert!(done.expect("large").is_err());
        Ok(())
    }

    #[test]
    fn what_does_not_fit_together_stays_whole() -> Result<()> {
        let [x, y] = lists()?;
        let cut = |lists: &[&TensorList]| each_piece(lists, |_| Ok(())).is_some();
        assert!(!cut(&[&x, &y]), "gradients are recorded");
        let _off = no_grad();
        assert!(!cut(&[]));
        let one = |i: usize| Ok::<_, Error>(TensorList::new(vec![x.get(i)?]));
        assert!(cut(&[&one(1)?]));
        assert!(!cut(&[&one(0)?]), "small");
        assert!(!cut(&[&one(1)?, &one(5)?]), "of two shapes");
        assert!(!cut(&[&x, &one(1)?]), "of two lengths");
        let turned = x.get(5)?.transpose(0, 1)?;
        assert!(!cut(&[&TensorList::new(vec![turned])]), "not dense");
        assert!(!cut(&[&TensorList::new(vec![x.get(1)?, x.get(1)?])]), "the same twice");
        Ok(())
    }
}
