//! Pointwise ops over whole lists of tensors, made from the op table: `foreach::mul_(&params, 0.9)`. While a
//! program is captured each is one node, however long the list; optimizers are written with these.

use kiln_ir::{Error, Layout, Loc, Op, Result, Scalar, Shape, Why};
use kiln_runtime::threads;

use crate::autograd::grad_enabled;
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

/// Lists that are about to pass through several list ops, off the tape, cut into pieces: each piece can go
/// through all the ops before the next one does, and the caches keep what one op leaves for the next. The tensors
/// of a piece are those of the lists, or flat views of some of their elements; no piece has two of one tensor.
///
/// `None` if the lists are best taken whole: while a program is recorded or gradients are, if they are small, or
/// unless the tensors at each place are dense and of one shape.
pub fn pieces(lists: &[&TensorList]) -> Option<impl Iterator<Item = Vec<TensorList>> + use<>> {
    if grad_enabled() || hook::with_current(|recorder| recorder.is_some()) {
        return None;
    }
    let items = lists.iter().map(|list| list.try_items()).collect::<Option<Vec<&[Tensor]>>>()?;
    let first = *items.first()?;
    if items.iter().any(|items| items.len() != first.len()) {
        return None;
    }
    let room = PIECE * threads::count();
    let (mut pieces, mut piece, mut left) = (Vec::new(), Vec::new(), room);
    for (at, model) in first.iter().enumerate() {
        let model = model.try_ready()?;
        for items in &items {
            let ready = items[at].try_ready()?;
            if ready.layout.shape != model.layout.shape || !ready.layout.is_contiguous() {
                return None;
            }
        }
        let (mut begin, numel) = (0, model.layout.shape.numel());
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
    let lists: Vec<TensorList> = lists.iter().map(|&list| list.clone()).collect();
    (pieces.len() > 1).then(|| {
        pieces.into_iter().map(move |piece| {
            let list = |list: &TensorList| {
                let items = list.try_items().unwrap_or_default();
                piece.iter().map(|part| part.of(&items[part.at])).collect()
            };
            lists.iter().map(list).collect()
        })
    })
}

impl Part {
    fn of(&self, tensor: &Tensor) -> Tensor {
        match tensor.try_ready() {
            Some(ready) if self.count < ready.layout.shape.numel() => {
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
    use super::*;
    use crate::no_grad;

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

    #[test]
    fn pieces_are_the_whole() -> Result<()> {
        let _off = no_grad();
        let ([x, y], [whole_x, whole_y]) = (lists()?, lists()?);
        ops([&whole_x, &whole_y])?;
        let mut count = 0;
        for piece in pieces(&[&x, &y]).expect("large, dense and off the tape") {
            let [x, y] = &piece[..] else { panic!("as many lists as there were") };
            let total = |list: &TensorList| list.items().map(|items| items.iter().map(Tensor::numel).sum());
            let elements: usize = total(x)?;
            assert!(elements > 0 && elements <= PIECE * threads::count());
            assert_eq!(elements, total(y)?);
            ops([x, y])?;
            count += 1;
        }
        assert!(count > 4, "{count}");
        for (list, whole) in [(x, whole_x), (y, whole_y)] {
            for (tensor, whole) in list.items()?.iter().zip(whole.items()?) {
                assert!(tensor.to_vec::<f32>()? == whole.to_vec::<f32>()?, "{}", tensor.ty());
            }
        }
        Ok(())
    }

    #[test]
    fn what_does_not_fit_together_stays_whole() -> Result<()> {
        let [x, y] = lists()?;
        assert!(pieces(&[&x, &y]).is_none(), "gradients are recorded");
        let _off = no_grad();
        assert!(pieces(&[]).is_none());
        let one = |i: usize| Ok::<_, Error>(TensorList::new(vec![x.get(i)?]));
        assert!(pieces(&[&one(1)?]).is_some());
        assert!(pieces(&[&one(0)?]).is_none(), "small");
        assert!(pieces(&[&one(1)?, &one(5)?]).is_none(), "of two shapes");
        assert!(pieces(&[&x, &one(1)?]).is_none(), "of two lengths");
        let turned = x.get(5)?.transpose(0, 1)?;
        assert!(pieces(&[&TensorList::new(vec![turned])]).is_none(), "not dense");
        Ok(())
    }
}
