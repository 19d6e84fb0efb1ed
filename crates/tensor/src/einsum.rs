//! `einsum`: sums of products named by letters, `"bij,bjk->bik"`. Operands are taken up from left to right,
//! each by one product of stacks of matrices.

use kiln_ir::{DType, Device, Error, Loc, Result, Why};

use crate::Tensor;

/// A dim's name: a letter, or the number of a dim that `...` stands for, counted from the last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Label {
    Ellipsis(usize),
    Letter(char),
}

/// A tensor with the names of its dims.
struct Named {
    tensor: Tensor,
    labels: Vec<Label>,
}

fn fail<T>(text: String, loc: Loc) -> Result<T> {
    Err(Error::op("einsum", Why::Other(text), loc))
}

/// The letters of one operand; `None` in place of `...`.
fn letters(text: &str, equation: &str, loc: Loc) -> Result<Vec<Option<char>>> {
    let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let mut labels = Vec::new();
    let mut rest = text.as_str();
    while let Some(c) = rest.chars().next() {
        if let Some(after) = rest.strip_prefix("...") {
            if labels.contains(&None) {
                return fail(format!("{equation:?} has more than one ... in {text:?}"), loc);
            }
            labels.push(None);
            rest = after;
        } else if c.is_ascii_alphabetic() {
            labels.push(Some(c));
            rest = &rest[1..];
        } else {
            return fail(format!("{equation:?}: {c:?} is neither a letter nor part of ..."), loc);
        }
    }
    Ok(labels)
}

/// The names of a tensor's dims.
fn labels_of(letters: &[Option<char>], rank: usize, equation: &str, loc: Loc) -> Result<Vec<Label>> {
    let named = letters.iter().flatten().count();
    let open = letters.contains(&None);
    if named > rank || (named < rank && !open) {
        return fail(format!("{equation:?} has {named} subscripts for an operand with {rank} dims"), loc);
    }
    let hidden = rank - named;
    let spell = |letter: &Option<char>| match letter {
        Some(c) => vec![Label::Letter(*c)],
        None => (0..hidden).rev().map(Label::Ellipsis).collect(),
    };
    Ok(letters.iter().flat_map(spell).collect())
}

impl Named {
    fn size(&self, label: Label) -> usize {
        let shape = self.tensor.shape();
        self.labels.iter().position(|&l| l == label).map_or(1, |d| shape[d])
    }

    /// With a name that stands twice on one dim only: the diagonal.
    fn without_repeats(mut self) -> Result<Named> {
        loop {
            let twice = (0..self.labels.len())
                .find_map(|j| Some((self.labels[..j].iter().position(|l| *l == self.labels[j])?, j)));
            let Some((i, j)) = twice else { return Ok(self) };
            let size = self.tensor.shape()[i];
            let device = self.tensor.ty().device;
            let line = |d: usize| -> Result<Tensor> {
                let mut shape = vec![1usize; self.labels.len()];
                shape[d] = size;
                Tensor::arange(0, size as i64, &device)?.reshape(&shape[..])
            };
            let diagonal = line(i)?.eq(&line(j)?)?;
            let kept = diagonal.where_self(&self.tensor, &self.tensor.zeros_like()?)?;
            self.tensor = kept.sum_dim(j as i64, false)?;
            self.labels.remove(j);
        }
    }

    /// Summed over the dims that nobody else needs.
    fn without(mut self, keep: impl Fn(Label) -> bool) -> Result<Named> {
        let gone: Vec<i64> =
            (0..self.labels.len()).filter(|&d| !keep(self.labels[d])).map(|d| d as i64).collect();
        if !gone.is_empty() {
            self.tensor = self.tensor.sum_dim(&gone[..], false)?;
            self.labels.retain(|&l| keep(l));
        }
        Ok(self)
    }

    /// Dims in this order; names that are missing are dims of size 1.
    fn arranged(&self, order: &[Label]) -> Result<Tensor> {
        let present: Vec<i64> = order
            .iter()
            .filter_map(|l| self.labels.iter().position(|own| own == l).map(|d| d as i64))
            .collect();
        let sizes: Vec<usize> = order.iter().map(|&l| self.size(l)).collect();
        self.tensor.permute(&present[..])?.reshape(&sizes[..])
    }
}

/// Dims that are broadcast against those of the other operand.
fn spread(tensor: &Tensor, sizes: &[usize]) -> Result<Tensor> {
    if tensor.shape()[..] == *sizes { Ok(tensor.clone()) } else { tensor.expand(sizes) }
}

/// The product of two tensors, summed over the names that are not kept.
fn contract(x: Named, y: Named, keep: impl Fn(Label) -> bool) -> Result<Named> {
    let x = x.without(|l| keep(l) || y.labels.contains(&l))?;
    let y = y.without(|l| keep(l) || x.labels.contains(&l))?;
    let both = |l: &Label| x.labels.contains(l) && y.labels.contains(l);
    let batch: Vec<Label> = x.labels.iter().copied().filter(|l| both(l) && keep(*l)).collect();
    let inner: Vec<Label> = x.labels.iter().copied().filter(|l| both(l) && !keep(*l)).collect();
    let rows: Vec<Label> = x.labels.iter().copied().filter(|l| !both(l)).collect();
    let columns: Vec<Label> = y.labels.iter().copied().filter(|l| !both(l)).collect();
    let larger = |l: Label| if x.size(l) == 1 { y.size(l) } else { x.size(l) };
    let sizes = |labels: &[Label]| -> Vec<usize> { labels.iter().map(|&l| larger(l)).collect() };
    let (b, m, k, n) = (sizes(&batch), sizes(&rows), sizes(&inner), sizes(&columns));
    let count = |s: &[usize]| s.iter().product::<usize>();
    let left = x.arranged(&[&batch[..], &rows, &inner].concat())?;
    let right = y.arranged(&[&batch[..], &inner, &columns].concat())?;
    let left = spread(&left, &[&b[..], &m, &k].concat())?.reshape([count(&b), count(&m), count(&k)])?;
    let right = spread(&right, &[&b[..], &k, &n].concat())?.reshape([count(&b), count(&k), count(&n)])?;
    // Without batch dims it is one product; without inner dims the elements are multiplied.
    let product = match (batch.is_empty(), inner.is_empty()) {
        (_, true) => left.mul(&right)?,
        (true, false) => left.squeeze(0)?.mm(&right.squeeze(0)?)?,
        (false, false) => left.bmm(&right)?,
    };
    let tensor = product.reshape(&[&b[..], &m, &n].concat()[..])?;
    Ok(Named { tensor, labels: [batch, rows, columns].concat() })
}

impl Tensor {
    /// The sum of products that an equation names: `Tensor::einsum("bij,bjk->bik", &[&x, &y])`. Without `->`
    /// the result has the letters that occur once, in alphabetical order. `...` stands for dims that are
    /// broadcast.
    #[track_caller]
    pub fn einsum(equation: &str, operands: &[&Tensor]) -> Result<Tensor> {
        let loc = Loc::caller();
        let (left, right) = match equation.split_once("->") {
            Some((left, right)) => (left, Some(right)),
            None => (equation, None),
        };
        let inputs: Vec<Vec<Option<char>>> =
            left.split(',').map(|part| letters(part, equation, loc)).collect::<Result<_>>()?;
        if inputs.len() != operands.len() || operands.is_empty() {
            let why = Why::Count { what: "operands", expected: inputs.len(), got: operands.len() };
            return Err(Error::op(&format!("einsum {equation:?}"), why, loc));
        }
        let mut named = Vec::new();
        for (letters, &tensor) in inputs.iter().zip(operands) {
            let labels = labels_of(letters, tensor.rank(), equation, loc)?;
            named.push(Named { tensor: tensor.clone(), labels });
        }
        check_sizes(&named, equation, loc)?;
        let all: Vec<Label> = named.iter().flat_map(|n| n.labels.iter().copied()).collect();
        let hidden: Vec<Label> = {
            let most = all.iter().filter_map(|l| if let Label::Ellipsis(d) = l { Some(d + 1) } else { None });
            (0..most.max().unwrap_or(0)).rev().map(Label::Ellipsis).collect()
        };
        let output: Vec<Label> = match right {
            Some(text) => letters(text, equation, loc)?
                .iter()
                .flat_map(|letter| match letter {
                    Some(c) => vec![Label::Letter(*c)],
                    None => hidden.clone(),
                })
                .collect(),
            None => {
                let mut once: Vec<Label> = all
                    .iter()
                    .copied()
                    .filter(|l| matches!(l, Label::Letter(_)) && all.iter().filter(|o| *o == l).count() == 1)
                    .collect();
                once.sort_unstable();
                [hidden, once].concat()
            }
        };
        for (i, label) in output.iter().enumerate() {
            if !all.contains(label) || output[..i].contains(label) {
                return fail(
                    format!(
                        "{equation:?}: each output subscript must appear in the inputs, and only once in the output"
                    ),
                    loc,
                );
            }
        }
        let mut rest = named.into_iter();
        let Some(first) = rest.next() else { return Err(Error::bug("an einsum without operands")) };
        let mut result = first.without_repeats()?;
        let mut later: Vec<Named> = rest.map(Named::without_repeats).collect::<Result<_>>()?;
        while !later.is_empty() {
            let next = later.remove(0);
            let needed = |l: Label| output.contains(&l) || later.iter().any(|n| n.labels.contains(&l));
            result = contract(result, next, needed)?;
        }
        result.without(|l| output.contains(&l))?.arranged(&output)
    }
}

/// Dims of one name have one size; those behind `...` may also be 1.
fn check_sizes(named: &[Named], equation: &str, loc: Loc) -> Result<()> {
    let mut sizes: Vec<(Label, usize)> = Vec::new();
    for n in named {
        for (&label, &size) in n.labels.iter().zip(n.tensor.shape().iter()) {
            match sizes.iter_mut().find(|(known, _)| *known == label) {
                None => sizes.push((label, size)),
                Some((_, known)) if *known == size || size == 1 => {}
                Some((_, known)) if *known == 1 => *known = size,
                Some((_, known)) => {
                    return fail(
                        format!("{equation:?}: one subscript stands for sizes {known} and {size}"),
                        loc,
                    );
                }
            }
        }
    }
    let dtype = |n: &Named| (n.tensor.dtype(), n.tensor.ty().device);
    match named.iter().map(dtype).find(|&(d, v)| (d, v) != dtype(&named[0]) || d == DType::Bool) {
        Some((got, Device::Cpu)) => Err(Error::op(
            "einsum",
            Why::DType { argument: "operands", expected: "numeric and of one dtype", got },
            loc,
        )),
        Some((_, right)) => Err(Error::op("einsum", Why::Devices { left: Device::Cpu, right }, loc)),
        None => Ok(()),
    }
}
