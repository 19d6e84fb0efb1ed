//! Bodies that take several vectors at a time.
//!
//! [Note: several vectors at a time]
//! Each statement is written for all of the vectors before the next one is, so that chains of operations that do not
//! depend on each other stand side by side. Elements are computed, and accumulators added to, in the same order as
//! vector by vector: bits stay what they are.
//!
//! Chains of transcendental functions take some 5 % less time with two vectors, loops that wait for memory rather
//! more, and the C compiler 10 to 29 % more for all of them: so one vector is usual, and `max-autotune` finds out.

use std::collections::BTreeSet;

use super::Emitter;
use super::body::Body;
use kiln_plan::index::ExprId;

/// A body as statements that may be written several times.
pub(super) struct Statements {
    /// The expressions that they compute.
    pub(super) ids: Vec<ExprId>,
    /// Each of them with what stands before it.
    pub(super) list: Vec<String>,
    /// The values of other loops that they take from memory, and those that they compute.
    pub(super) locals: BTreeSet<String>,
}

impl Statements {
    pub(super) fn text(&self) -> String {
        self.list.concat()
    }

    /// The statements for vector `number` from `j` on.
    fn of_vector(&self, statement: &str, number: usize) -> String {
        if number == 0 {
            return statement.to_string();
        }
        let is_own = |word: &str| word == "j" || self.locals.contains(word) || is_temporary(word);
        each_word(statement, &|word| is_own(word).then(|| format!("{word}_{number}")))
    }

    /// All statements for `vectors` vectors.
    fn of_vectors(&self, vectors: usize) -> String {
        let mut out = String::new();
        for number in 1..vectors {
            out.push_str(&format!("    const long j_{number} = j + {number} * KILN_LANES;\n"));
        }
        for statement in &self.list {
            for number in 0..vectors {
                out.push_str(&self.of_vector(statement, number));
            }
        }
        out
    }
}

impl Emitter<'_> {
    /// Writes the body that takes several vectors, if there is to be one, and returns the loop that goes as far as
    /// it can with it: from `j` on until fewer are left before `stop`.
    pub(super) fn several_vectors(
        &mut self,
        name: &str,
        statements: &Statements,
        (more, addresses): (&[String], &[String]),
        stores: &[usize],
        stop: &str,
    ) -> Option<String> {
        let vectors = self.vectors;
        let ids = &statements.ids;
        // Scatters may meet, and what a scan does is not independent.
        let is_ordered =
            stores.iter().any(|&s| self.kernel.stores[s].is_scatter()) || !self.scans(ids).is_empty();
        if vectors < 2 || is_ordered || self.has_borders(ids) {
            return None;
        }
        let text = statements.of_vectors(vectors);
        let body: Body = self.body(&format!("{name}_by{vectors}"), &text, &statements.locals, more);
        Some(format!(
            "for (; j + {vectors} * KILN_LANES <= {stop}; j += {vectors} * KILN_LANES) {}\n",
            body.call("j", "KILN_LANES", addresses)
        ))
    }
}

/// Whether a name is that of a variable inside of a statement: `x7`, `x7_`, `f7`.
fn is_temporary(word: &str) -> bool {
    let number = word.strip_prefix(['x', 'f']).map(|rest| rest.strip_suffix('_').unwrap_or(rest));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit()))
}

/// Replaces those words of a text for which there is another.
pub(super) fn each_word(text: &str, other: &dyn Fn(&str) -> Option<String>) -> String {
    let mut out = String::new();
    let mut word = String::new();
    for c in text.chars().chain(std::iter::once('\0')) {
        if c.is_ascii_alphanumeric() || c == '_' {
            word.push(c);
            continue;
        }
        match other(&word) {
            Some(other) => out.push_str(&other),
            None => out.push_str(&word),
        }
        word.clear();
        if c != '\0' {
            out.push(c);
        }
    }
    out
}
