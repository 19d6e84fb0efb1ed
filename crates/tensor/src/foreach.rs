//! Pointwise ops over whole lists of tensors, made from the op table: `foreach::mul_(&params, 0.9)`. While a
//! program is captured each is one node, however long the list; optimizers are written with these.

use std::ops::Range;

use parking_lot::Mutex;

use kiln_ir::{Error, Layout, Loc, Op, Result, Scalar, Shape, Why};
use kiln_runtime::{parallel_for, threads};

use crate::autograd::{grad_enabled, no_grad};
use crate::dispatch::dispatch;
use crate::hook::{self, Arg, Output};
use crate::tensor::Ready;
use crate::{Tensor, TensorList};

/// The second operand of a list op: a list or one number for all.
pub enum ListOperand<'a> {
    /// A list of the same length.
    List(&'a TensorList),
    /// A number.
    Number(Scalar),
}

impl ListOperand<'_> {
    fn arg(&self) -> Arg<'_> {
        match self {
            ListOperand::List(l) => Arg::List(l),
            ListOperand::Number(x) => Arg::Number(*x),
        }
    }
}

impl<'a> From<&'a TensorList> for ListOperand<'a> {
    fn from(l: &'a TensorList) -> ListOperand<'a> {
        ListOperand::List(l)
    }
}

impl<T: Into<Scalar>> From<T> for ListOperand<'_> {
    fn from(x: T) -> Self {
        ListOperand::Number(x.into())
    }
}

fn list(output: Output, op: &Op, loc: Loc) -> Result<TensorList> {
    match output {
        Output::List(l) => Ok(l),
        Output::Tensor(_) => {
            Err(Error::op(op.name(), Why::Operand { argument: "x", expected: "a list" }, loc))
        }
    }
}

macro_rules! define_foreach {
    ($( $(#[doc = $doc:literal])*
        [$class:ident $method:ident $inplace:ident] $name:literal $Variant:ident
        ($($arg:ident),*) ($($optional:ident),*) { $($attr:ident : $AttrTy:ty),* } $body:tt;
    )*) => {
        $( foreach! { $(#[doc = $doc])* [$class $method $inplace] $Variant ($($arg),*) } )*
    };
}
macro_rules! foreach {
    ($(#[doc = $doc:literal])* [pointwise $method:ident $inplace:ident] $Variant:ident ($x:ident $(, $arg:ident)*)) => {
        $(#[doc = $doc])*
        ///
        /// For every tensor of the list.
        #[track_caller]
        #[allow(clippy::extra_unused_lifetimes, reason = "ops of one operand have none to borrow")]
        pub fn $method<'a>($x: &TensorList $(, $arg: impl Into<ListOperand<'a>>)*) -> Result<TensorList> {
            let (op, loc) = (Op::$Variant {}, Loc::caller());
            $(let $arg = $arg.into();)*
            list(dispatch(&op, &[Arg::List($x) $(, $arg.arg())*], false, loc)?, &op, loc)
        }

        $(#[doc = $doc])*
        ///
        /// For every tensor of the list, in place.
        #[track_caller]
        #[allow(clippy::extra_unused_lifetimes, reason = "as above")]
        pub fn $inplace<'a>($x: &TensorList $(, $arg: impl Into<ListOperand<'a>>)*) -> Result<()> {
            let (op, loc) = (Op::$Variant {}, Loc::caller());
            $(let $arg = $arg.into();)*
            dispatch(&op, &[Arg::List($x) $(, $arg.arg())*], true, loc).map(drop)
        }
    };
    ($($other:tt)*) => {};
}
kiln_ir::op_table!(define_foreach);

/// x + alpha · y, for every tensor of the list, in place.
#[track_caller]
pub fn add_scaled_<'a>(
    x: &TensorList,
    y: impl Into<ListOperand<'a>>,
    alpha: impl Into<Scalar>,
) -> Result<()> {
    dispatch(&Op::Add {}, &[Arg::List(x), y.into().arg(), Arg::Number(alpha.into())], true, Loc::caller())
        .map(drop)
}

/// x + alpha · y, for every tensor of the list.
#[track_caller]
pub fn add_scaled<'a>(
    x: &TensorList,
    y: impl Into<ListOperand<'a>>,
    alpha: impl Into<Scalar>,
) -> Result<TensorList> {
    let (op, loc) = (Op::Add {}, Loc::caller());
    list(dispatch(&op, &[Arg::List(x), y.into().arg(), Arg::Number(alpha.into())], false, loc)?, &op, loc)
}

/// Each tensor of the list takes the values of the other list's.
#[track_caller]
pub fn copy_<'a>(x: &TensorList, src: impl Into<ListOperand<'a>>) -> Result<()> {
    dispatch(&Op::Copy {}, &[Arg::List(x), src.into().arg()], true, Loc::caller()).map(drop)
}

/// Elements of a list that a thread's caches hold, together with those of a few other lists.
const PIECE: usize = 1 << 16;
/// Tensors are cut at multiples of this many elements.
const CUT: usize = 1 << 12;

/// Some elements of the tensors at one place of several lists.
struct Part {
    at: usize,
    begin: usize,
    count: usize,
}

/// Runs `body`, which takes lists through several list ops off the tape, on pieces of them: each piece goes
/// through all the ops before the next one does, and the caches keep what one op leaves for the next. The tensors
/// of a piece are those of the lists, or flat views of some of their elements; no piece has two of one tensor.
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
    let run = |piece: &[Part]| {
        let list = |items: &&[Tensor]| piece.iter().map(|part| part.of(&items[part.at])).collect();
        body(&items.iter().map(list).collect::<Vec<TensorList>>())
    };
    let Some(shares) = shares(&sizes, threads::count()) else {
        // Each op is shared out instead.
        return Some(cut(&sizes, 0..sizes.len(), PIECE * threads::count()).iter().try_for_each(|p| run(p)));
    };
    let failed = Mutex::new(None);
    parallel_for(shares.len(), 1, |begin, end| {
        let _off = no_grad();
        for share in &shares[begin..end] {
            for piece in cut(&sizes, share.clone(), PIECE) {
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
    if sizes.iter().sum::<usize>() <= PIECE * threads::count() {
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Lists of a few tensors, of which some are cut and some share a piece.
    fn lists() -> Result<[TensorList; 2]> {
        let large = 2 * PIECE * threads::count() + 12345;
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
            assert!(elements > 0 && elements <= PIECE * threads::count());
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
