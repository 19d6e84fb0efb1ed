//! Index expressions as C: what is fixed for an item goes into pointers, strides and divisors are arguments.

use kiln_plan::index::{AxisId, Index, Term};

use super::{Emitter, Level};

/// What has a name as the last of some positions: a number where it stands in the kernel, or whatever is the same for
/// the same positions, where no other sizes will have this text.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Last<'k> {
    At(*const i64),
    Of(&'k Index, i64),
}

impl<'k> Emitter<'k> {
    /// Whether a term stays the same within an item (and so belongs into the pointer).
    pub(super) fn is_fixed(&self, term: &Term) -> bool {
        let moves = |a: AxisId| self.kernel.axes[a].inner || a == self.kernel.vector_axis();
        match term {
            Term::Axis(a) => !moves(*a),
            Term::Value(v, _) => matches!(self.levels[*v], Level::Call | Level::Item),
            Term::Div(inner, _) | Term::Mod(inner, _) | Term::Clamp(inner, _) | Term::Abs(inner) => {
                inner.terms.iter().all(|(t, _)| self.is_fixed(t))
            }
        }
    }

    /// Whether lanes have integers of their own that were computed, be it inside of quotients.
    pub(super) fn has_lane_values(&self, index: &Index) -> bool {
        let mut found = false;
        index.for_each_value(&mut |value| found |= self.lane_varies[value]);
        found
    }

    /// The name of the factor of a term of access `access`.
    pub(super) fn stride(&mut self, access: usize, term: usize, factor: &'k i64) -> String {
        if let Some(name) = self.stride_names.get(&(access, term)) {
            return name.clone();
        }
        let name = format!("t{}", self.stride_names.len());
        let name = self.number(name, factor);
        self.stride_names.insert((access, term), name.clone());
        name
    }

    /// The parts of an index for which `wanted` holds, as C. Lane `lane` of the vector axis.
    pub(super) fn index_text(
        &mut self,
        access: usize,
        index: &'k Index,
        lane: Option<&str>,
        wanted: &dyn Fn(&Emitter<'_>, &Term) -> bool,
    ) -> String {
        let mut parts = Vec::new();
        for (t, (term, factor)) in index.terms.iter().enumerate() {
            if !wanted(self, term) {
                continue;
            }
            let text = self.term_text(term, lane);
            // Whether neighbours lie side by side is part of the text.
            let is_vector = *term == Term::Axis(self.kernel.vector_axis());
            parts.push(match factor {
                1 if is_vector => text,
                -1 if is_vector => format!("-{text}"),
                _ => format!("{text} * {}", self.stride(access, t, factor)),
            });
        }
        if parts.is_empty() { "0".into() } else { parts.join(" + ") }
    }

    pub(super) fn term_text(&mut self, term: &'k Term, lane: Option<&str>) -> String {
        match term {
            Term::Axis(a) => match lane {
                Some(l) if *a == self.kernel.vector_axis() => format!("(j + {l})"),
                _ => self.axis_name(*a),
            },
            Term::Value(v, _) => match lane {
                Some(l) => format!("v{v}[{l}]"),
                None => format!("v{v}[0]"),
            },
            Term::Div(inner, d) => {
                format!("(({}) / {})", self.inner_index(inner, lane), self.inner_number(d))
            }
            Term::Mod(inner, d) => {
                format!("(({}) % {})", self.inner_index(inner, lane), self.inner_number(d))
            }
            Term::Clamp(inner, most) => {
                format!("kiln_clamp({}, {})", self.inner_index(inner, lane), self.last_position(inner, most))
            }
            Term::Abs(inner) => format!("kiln_size({})", self.inner_index(inner, lane)),
        }
    }

    /// A number inside a quotient. As a part of the text it is quick: a known divisor is a multiplication.
    pub(super) fn inner_number(&mut self, number: &'k i64) -> String {
        let Some(names) = &self.inner_names else { return number.to_string() };
        if let Some(name) = names.get(&std::ptr::from_ref(number)) {
            return name.clone();
        }
        let name = self.number(format!("d{}", names.len()), number);
        self.inner_names.get_or_insert_default().insert(std::ptr::from_ref(number), name.clone());
        name
    }

    /// The last position that `inner` may be. It is no divisor, so nothing is gained by having it in the text. Taps of a
    /// column share a name, so that which lane gets what is worked out once for all lines of a window.
    pub(super) fn last_position(&mut self, inner: &'k Index, most: &'k i64) -> String {
        let last = match self.inner_names {
            Some(_) => Last::At(most),
            None => Last::Of(inner, *most),
        };
        let number = self.numbers[&std::ptr::from_ref(most)];
        if let Some((name, first)) = self.last_names.get(&last) {
            if number != *first {
                self.twins.push((number, *first));
            }
            return name.clone();
        }
        let name = self.number(format!("m{}", self.last_names.len()), most);
        self.last_names.insert(last, (name.clone(), number));
        name
    }

    pub(super) fn inner_index(&mut self, index: &'k Index, lane: Option<&str>) -> String {
        let mut parts: Vec<String> = Vec::with_capacity(index.terms.len() + 1);
        for (term, factor) in &index.terms {
            parts.push(format!("{} * {}", self.term_text(term, lane), self.inner_number(factor)));
        }
        if index.constant != 0 || parts.is_empty() {
            parts.push(self.inner_number(&index.constant));
        }
        parts.join(" + ")
    }
}
