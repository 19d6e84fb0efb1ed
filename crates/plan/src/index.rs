//! Index expressions: where in a buffer an access goes, as a function of the loop variables. Views are these
//! expressions and nothing else.

use std::fmt;

/// A loop variable of a kernel.
pub type AxisId = usize;

/// A value of a kernel.
pub type ExprId = usize;

/// What an index is made of.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Term {
    /// A loop variable.
    Axis(AxisId),
    /// A quotient that no splitting of loops removes.
    Div(Box<Index>, i64),
    /// A remainder that no splitting of loops removes.
    Mod(Box<Index>, i64),
    /// An integer computed by the kernel, in `0..size` (a gather).
    Value(ExprId, i64),
    /// An index brought into `0..=most`: below 0 it is 0 (a window that begins before the first element).
    Clamp(Box<Index>, i64),
    /// An index without its sign (a line that is mirrored at its first element).
    Abs(Box<Index>),
}

/// A sum of terms, each with a factor, and a constant. Terms are sorted and distinct, factors are not zero.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Index {
    /// The terms with their factors.
    pub terms: Vec<(Term, i64)>,
    /// The constant.
    pub constant: i64,
}

/// A position that is a quotient `inner / by` plus a constant, `clamped` to `most`.
#[derive(Copy, Clone)]
pub struct Repeats<'a> {
    /// What is divided.
    pub inner: &'a Index,
    /// By what.
    pub by: &'a i64,
    /// The position as a whole.
    pub clamped: &'a Index,
    /// The last one.
    pub most: &'a i64,
}

/// A loop that must be cut in two so that a quotient or remainder becomes a loop variable.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Split {
    /// The loop.
    pub axis: AxisId,
    /// Extent of the new inner loop.
    pub factor: i64,
}

/// The numbers of an index in their order, for readers and for writers.
macro_rules! numbers {
    ($index:ident, $found:ident, $iter:ident, $each:ident $(, $mutable:tt)?) => {
        for (term, factor) in $index.terms.$iter() {
            $found(factor);
            match term {
                Term::Axis(_) => {}
                Term::Value(_, size) => $found(size),
                Term::Div(inner, number) | Term::Mod(inner, number) | Term::Clamp(inner, number) => {
                    inner.$each($found);
                    $found(number);
                }
                Term::Abs(inner) => inner.$each($found),
            }
        }
        $found(&$($mutable)? $index.constant);
    };
}

impl Term {
    /// The smallest and the largest value it may have, given the loops' extents.
    fn range(&self, extents: &[i64]) -> Option<(i64, i64)> {
        Some(match self {
            Term::Axis(axis) => (0, (extents[*axis] - 1).max(0)),
            Term::Value(_, size) => (0, (size - 1).max(0)),
            Term::Div(inner, by) => {
                let (least, most) = inner.range(extents)?;
                (least.div_euclid(*by), most.div_euclid(*by))
            }
            Term::Mod(_, by) => (0, by - 1),
            Term::Clamp(inner, end) => {
                let (least, most) = inner.range(extents)?;
                (least.clamp(0, *end), most.clamp(0, *end))
            }
            Term::Abs(inner) => {
                let (least, most) = inner.range(extents)?;
                (least.max(-most).max(0), least.abs().max(most.abs()))
            }
        })
    }
}

impl Index {
    /// A constant.
    pub fn constant(constant: i64) -> Index {
        Index { terms: Vec::new(), constant }
    }

    /// A loop variable.
    pub fn axis(axis: AxisId) -> Index {
        Index { terms: vec![(Term::Axis(axis), 1)], constant: 0 }
    }

    /// A computed integer in `0..size`.
    pub fn value(value: ExprId, size: i64) -> Index {
        Index { terms: vec![(Term::Value(value, size), 1)], constant: 0 }
    }

    /// This index where it is in `0..=most`, else the nearest that is.
    pub fn clamped(self, most: i64) -> Index {
        Index::term(Term::Clamp(Box::new(self), most))
    }

    /// A non-negative index divided by a number, without cutting loops for it.
    pub fn quotient(&self, by: i64) -> Index {
        let is_exact = self.terms.iter().all(|(_, factor)| factor % by == 0);
        if is_exact {
            Index {
                terms: self.terms.iter().map(|(term, factor)| (term.clone(), factor / by)).collect(),
                constant: self.constant.div_euclid(by),
            }
        } else {
            Index::term(Term::Div(Box::new(self.clone()), by))
        }
    }

    fn term(term: Term) -> Index {
        Index { terms: vec![(term, 1)], constant: 0 }
    }

    /// `self += factor · other`
    pub fn add_scaled(&mut self, other: &Index, factor: i64) {
        self.constant += other.constant * factor;
        for (term, f) in &other.terms {
            self.add_term(term.clone(), f * factor);
        }
    }

    fn add_term(&mut self, term: Term, factor: i64) {
        match self.terms.binary_search_by(|(t, _)| t.cmp(&term)) {
            Ok(at) => {
                self.terms[at].1 += factor;
                if self.terms[at].1 == 0 {
                    self.terms.remove(at);
                }
            }
            Err(at) => {
                if factor != 0 {
                    self.terms.insert(at, (term, factor));
                }
            }
        }
    }

    /// The same with every quotient put together with its remainder again: `x/d·d + x%d` is x.
    pub fn joined(mut self) -> Index {
        let pair = |index: &Index| {
            index.terms.iter().find_map(|(term, factor)| {
                let Term::Div(inner, by) = term else { return None };
                let rest = Term::Mod(inner.clone(), *by);
                let has_rest = |(other, f): &(Term, i64)| *other == rest && f * by == *factor;
                index
                    .terms
                    .iter()
                    .any(has_rest)
                    .then(|| (term.clone(), rest, inner.clone(), *factor, factor / by))
            })
        };
        while let Some((quotient, rest, whole, factor, each)) = pair(&self) {
            self.add_term(quotient, -factor);
            self.add_term(rest, -each);
            self.add_scaled(&whole, each);
        }
        self
    }

    /// This index without its sign, given the loops' extents.
    pub fn magnitude(self, extents: &[i64]) -> Option<Index> {
        let (least, most) = self.range(extents)?;
        Some(match (least >= 0, most <= 0) {
            (true, _) => self,
            (false, true) => self.scaled(-1, 0),
            (false, false) => Index::term(Term::Abs(Box::new(self))),
        })
    }

    /// The smallest and the largest value it may have, given the loops' extents; `None` if that is more than memory
    /// has elements.
    pub fn range(&self, extents: &[i64]) -> Option<(i64, i64)> {
        const MOST: i64 = 1 << 40;
        let (mut least, mut most) = (self.constant, self.constant);
        for (term, factor) in &self.terms {
            let (first, last) = term.range(extents)?;
            let ends = [first.checked_mul(*factor)?, last.checked_mul(*factor)?];
            least = least.checked_add(ends[0].min(ends[1]))?;
            most = most.checked_add(ends[0].max(ends[1]))?;
        }
        (-MOST < least && most < MOST).then_some((least, most))
    }

    /// Whether the index is a position along the loop that is bent: clamped or mirrored, so that it goes on by one
    /// element at most from one to the next, up or down. Where it does, at both ends of a stretch, it does in between.
    pub fn is_bent(&self, axis: AxisId) -> bool {
        self.is_nested(axis) && self.steepest(axis).is_some_and(|step| step == 1)
    }

    /// By how much neighbours along a loop differ at most; `None` if a quotient or remainder decides it.
    fn steepest(&self, axis: AxisId) -> Option<i64> {
        let step = |(term, factor): &(Term, i64)| {
            let step = match term {
                Term::Axis(a) => i64::from(*a == axis),
                Term::Value(..) => 0,
                Term::Div(inner, _) | Term::Mod(inner, _) => {
                    return (!inner.mentions(axis)).then_some(0);
                }
                Term::Clamp(inner, _) | Term::Abs(inner) => inner.steepest(axis)?,
            };
            Some(step * factor.abs())
        };
        self.terms.iter().map(step).sum()
    }

    /// `factor · self + constant`
    pub fn scaled(&self, factor: i64, constant: i64) -> Index {
        let mut out = Index::constant(constant);
        out.add_scaled(self, factor);
        out
    }

    /// The factor of a loop variable (not counting quotients and remainders).
    pub fn factor(&self, axis: AxisId) -> i64 {
        self.terms.iter().find(|(t, _)| *t == Term::Axis(axis)).map_or(0, |(_, f)| *f)
    }

    /// Whether the loop variable occurs, and not only as a plain term.
    pub fn is_nested(&self, axis: AxisId) -> bool {
        self.terms.iter().any(|(term, _)| match term {
            Term::Axis(_) | Term::Value(..) => false,
            Term::Div(inner, _) | Term::Mod(inner, _) | Term::Clamp(inner, _) | Term::Abs(inner) => {
                inner.mentions(axis)
            }
        })
    }

    /// Whether the loop variable occurs (computed integers don't count).
    pub fn mentions(&self, axis: AxisId) -> bool {
        self.terms.iter().any(|(term, _)| match term {
            Term::Axis(a) => *a == axis,
            Term::Value(..) => false,
            Term::Div(inner, _) | Term::Mod(inner, _) | Term::Clamp(inner, _) | Term::Abs(inner) => {
                inner.mentions(axis)
            }
        })
    }

    /// What is clamped, and to what, if that is the only term with the loop variable, neighbouring positions are
    /// neighbouring elements, and loops alone decide about it.
    pub fn border(&self, axis: AxisId) -> Option<(&Index, &i64)> {
        let is_plain = |inner: &Index| inner.terms.iter().all(|(term, _)| matches!(term, Term::Axis(_)));
        let mut found = None;
        for (term, factor) in &self.terms {
            match term {
                Term::Clamp(inner, most) if inner.mentions(axis) => {
                    let fits = found.is_none() && *factor == 1 && is_plain(inner);
                    found = Some(fits.then_some((&**inner, most))?);
                }
                Term::Axis(a) if *a == axis => return None,
                Term::Div(inner, _) | Term::Mod(inner, _) | Term::Abs(inner) if inner.mentions(axis) => {
                    return None;
                }
                Term::Axis(_)
                | Term::Div(..)
                | Term::Mod(..)
                | Term::Value(..)
                | Term::Clamp(..)
                | Term::Abs(_) => {}
            }
        }
        found
    }

    /// What is divided and clamped, if that is the only term with the loop variable, and neighbouring positions have
    /// the same element or neighbours.
    pub fn repeats(&self, axis: AxisId) -> Option<Repeats<'_>> {
        let mut with_axis = self.terms.iter().filter(|(term, _)| match term {
            Term::Axis(a) => *a == axis,
            Term::Value(..) => false,
            Term::Div(inner, _) | Term::Mod(inner, _) | Term::Clamp(inner, _) | Term::Abs(inner) => {
                inner.mentions(axis)
            }
        });
        let (Some((Term::Clamp(clamped, most), 1)), None) = (with_axis.next(), with_axis.next()) else {
            return None;
        };
        let (inner, by, 1) = clamped.divided(axis)? else { return None };
        Some(Repeats { inner, by, clamped, most })
    }

    /// What is divided, by what, and the factor of the quotient, if there is nothing else but a constant, and the loop
    /// variable goes on by one.
    pub fn divided(&self, axis: AxisId) -> Option<(&Index, &i64, &i64)> {
        let [(Term::Div(inner, by), factor)] = &self.terms[..] else { return None };
        let is_plain = inner.terms.iter().all(|(term, _)| matches!(term, Term::Axis(_)));
        (is_plain && inner.factor(axis) == 1).then_some((inner, by, factor))
    }

    /// Calls `f` for every computed integer.
    pub fn for_each_value(&self, f: &mut dyn FnMut(ExprId)) {
        for (term, _) in &self.terms {
            match term {
                Term::Axis(_) => {}
                Term::Value(value, _) => f(*value),
                Term::Div(inner, _) | Term::Mod(inner, _) | Term::Clamp(inner, _) | Term::Abs(inner) => {
                    inner.for_each_value(f);
                }
            }
        }
    }

    /// The index with every loop variable replaced and every computed integer renumbered.
    pub fn map(&self, axis: &dyn Fn(AxisId) -> Index, value: &dyn Fn(ExprId) -> ExprId) -> Index {
        let mut out = Index::constant(self.constant);
        for (term, factor) in &self.terms {
            let mapped = match term {
                Term::Axis(a) => axis(*a),
                Term::Value(v, size) => Index::value(value(*v), *size),
                Term::Div(inner, d) => Index::term(Term::Div(Box::new(inner.map(axis, value)), *d)),
                Term::Mod(inner, d) => Index::term(Term::Mod(Box::new(inner.map(axis, value)), *d)),
                Term::Clamp(inner, most) => inner.map(axis, value).clamped(*most),
                Term::Abs(inner) => Index::term(Term::Abs(Box::new(inner.map(axis, value)))),
            };
            out.add_scaled(&mapped, *factor);
        }
        out
    }

    /// Calls for every number in it, where it stands.
    pub fn each_number<'k>(&'k self, found: &mut dyn FnMut(&'k i64)) {
        numbers!(self, found, iter, each_number);
    }

    /// The same, to change them.
    pub fn change_numbers(&mut self, change: &mut dyn FnMut(&mut i64)) {
        numbers!(self, change, iter_mut, change_numbers, mut);
    }

    /// The largest value, given the loops' extents; `None` if a factor is negative.
    pub fn largest(&self, extents: &[i64]) -> Option<i64> {
        let mut sum = self.constant;
        for (term, factor) in &self.terms {
            if *factor < 0 {
                return None;
            }
            let most = match term {
                Term::Axis(a) => extents[*a] - 1,
                Term::Value(_, size) => size - 1,
                Term::Div(inner, d) => inner.largest(extents)? / d,
                Term::Mod(_, d) => d - 1,
                Term::Clamp(_, most) => *most,
                Term::Abs(_) => {
                    let (least, most) = term.range(extents)?;
                    least.abs().max(most.abs())
                }
            };
            sum += most.max(0) * factor;
        }
        Some(sum)
    }

    /// Parts whose factors are and are not multiples of `d`. The constant is shared out likewise.
    fn part(&self, d: i64) -> (Index, Index) {
        let (mut multiple, mut rest) = (Index::default(), Index::default());
        for (term, factor) in &self.terms {
            let side = if factor % d == 0 { &mut multiple } else { &mut rest };
            side.terms.push((term.clone(), *factor));
        }
        multiple.constant = self.constant.div_euclid(d) * d;
        rest.constant = self.constant.rem_euclid(d);
        (multiple, rest)
    }

    /// The loop to cut so that `rest / d` becomes affine.
    fn split_for(rest: &Index, d: i64, extents: &[i64]) -> Option<Split> {
        rest.terms.iter().find_map(|(term, factor)| match term {
            Term::Axis(axis) if *factor > 0 && d % factor == 0 => {
                let inner = d / factor;
                (inner > 1 && extents[*axis] > inner && extents[*axis] % inner == 0)
                    .then_some(Split { axis: *axis, factor: inner })
            }
            _ => None,
        })
    }

    /// `self / d` and `self % d` for a non-negative index, as plainly as possible; or the loop to cut first.
    pub fn div_mod(&self, d: i64, extents: &[i64]) -> Result<(Index, Index), Split> {
        if d == 1 {
            return Ok((self.clone(), Index::default()));
        }
        let (multiple, rest) = self.part(d);
        let quotient = |i: &Index| Index {
            terms: i.terms.iter().map(|(t, f)| (t.clone(), f / d)).collect(),
            constant: i.constant / d,
        };
        if rest.largest(extents).is_some_and(|most| most < d) {
            return Ok((quotient(&multiple), rest));
        }
        if let Some(split) = Index::split_for(&rest, d, extents) {
            return Err(split);
        }
        if rest.terms.iter().any(|(_, factor)| *factor < 0) {
            // The rest alone may be negative, and quotients round towards zero: the whole index is not.
            let whole = || Box::new(self.clone());
            return Ok((Index::term(Term::Div(whole(), d)), Index::term(Term::Mod(whole(), d))));
        }
        let mut high = quotient(&multiple);
        high.add_term(Term::Div(Box::new(rest.clone()), d), 1);
        Ok((high, Index::term(Term::Mod(Box::new(rest), d))))
    }
}

impl fmt::Display for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for (term, factor) in &self.terms {
            if !first {
                f.write_str(" + ")?;
            }
            first = false;
            match term {
                Term::Axis(a) => write!(f, "i{a}")?,
                Term::Value(v, size) => write!(f, "%{v}<{size}")?,
                Term::Div(inner, d) => write!(f, "({inner})/{d}")?,
                Term::Mod(inner, d) => write!(f, "({inner})%{d}")?,
                Term::Clamp(inner, most) => write!(f, "({inner})<={most}")?,
                Term::Abs(inner) => write!(f, "abs({inner})")?,
            }
            if *factor != 1 {
                write!(f, "*{factor}")?;
            }
        }
        match (first, self.constant) {
            (true, c) => write!(f, "{c}"),
            (false, 0) => Ok(()),
            (false, c) => write!(f, " + {c}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients_of_bounded_sums_are_affine() {
        // i0 < 4, i1 < 5: (i0·5 + i1) / 5 = i0
        let mut index = Index::axis(0).scaled(5, 0);
        index.add_scaled(&Index::axis(1), 1);
        assert_eq!(index.div_mod(5, &[4, 5]), Ok((Index::axis(0), Index::axis(1))));
        assert_eq!(index.to_string(), "i0*5 + i1");
    }

    #[test]
    fn an_index_that_falls_is_divided_whole() {
        // 7 − i0, i0 < 8: its part below 3 would be 1 − i0, which is negative.
        let (high, low) = Index::axis(0).scaled(-1, 7).div_mod(3, &[8]).unwrap();
        assert_eq!((high.to_string(), low.to_string()), ("(i0*-1 + 7)/3".into(), "(i0*-1 + 7)%3".into()));
    }

    #[test]
    fn a_loop_is_cut_where_that_helps() {
        assert_eq!(Index::axis(0).div_mod(3, &[12]), Err(Split { axis: 0, factor: 3 }));
        let (high, low) = Index::axis(0).div_mod(5, &[12]).unwrap();
        assert_eq!((high.to_string(), low.to_string()), ("(i0)/5".into(), "(i0)%5".into()));
    }

    #[test]
    fn quotients_meet_their_remainders() {
        let falling = Index::axis(0).scaled(-1, 23);
        let (high, low) = falling.div_mod(6, &[24]).unwrap();
        let mut linear = high.scaled(6, 0);
        linear.add_scaled(&low, 1);
        assert_eq!((linear.to_string().len() > 9, linear.joined()), (true, falling));
        // Other factors are another number.
        let apart = high.scaled(7, 0);
        let mut linear = apart.clone();
        linear.add_scaled(&low, 1);
        assert_eq!(linear.clone().joined(), linear);
    }

    #[test]
    fn mirrored_lines_are_bent() {
        let extents = [12];
        let near = Index::axis(0).scaled(1, -2).magnitude(&extents).unwrap();
        assert_eq!((near.to_string(), near.range(&extents)), ("abs(i0 + -2)".into(), Some((0, 9))));
        let far = near.scaled(-1, 7).magnitude(&extents).unwrap().scaled(-1, 7);
        assert_eq!(
            (far.to_string(), far.range(&extents)),
            ("abs(abs(i0 + -2)*-1 + 7)*-1 + 7".into(), Some((0, 7)))
        );
        assert!(near.is_bent(0) && far.is_bent(0) && !far.is_bent(1));
        assert!(!near.scaled(2, 0).is_bent(0) && !Index::axis(0).is_bent(0));
        // What has one sign is not bent.
        assert_eq!(Index::axis(0).scaled(-1, 0).magnitude(&extents), Some(Index::axis(0)));
    }
}
