//! Where gradients end inside a trace: leaves that the program makes (`z.requires_grad_(true)`), and the results of
//! custom functions.
//!
//! ```text
//! z = x.detach()                         %1 = detach(%0)
//! z.requires_grad_(true)                 %2 = detach(%1)      (not on the tape; gradients end here)
//! y = z.exp()                            %3 = exp(%2)
//! ```
//!
//! From then on the variable has another value, equal to the one before: what was computed before has the history
//! that it had.

use smallvec::{SmallVec, smallvec};

use kiln_ir::{Op, Result, Value};

use crate::functionalise::{State, Stored, Translator, bug};
use crate::trace::Variable;

/// What becomes of a view's value when its base was changed and it is made anew.
#[derive(Copy, Clone, PartialEq, Eq)]
pub(crate) enum Remade {
    /// It has its source's history.
    View,
    /// Gradients end in it, as in the one before.
    Root,
    /// The history of the one before, which it can't be given.
    Never,
}

/// A variable that gradients end in.
#[derive(Default)]
pub(crate) struct Root {
    /// All values it has had.
    pub(crate) values: SmallVec<[Value; 1]>,
    /// Whether it is a leaf, and no function's result.
    leaf: bool,
}

impl Translator<'_> {
    /// The values whose gradients together are a variable's: its own or, for a leaf that was changed on the way
    /// (an optimizer step), all that it has had. `made`: as it was when a custom function made it.
    pub(crate) fn wanted(&mut self, variable: Variable, made: bool) -> Result<SmallVec<[Value; 1]>> {
        self.open(variable)?;
        let State::Tensor { base, remade, .. } = self.states[variable as usize] else {
            return Err(bug("a gradient for a list", self.graph.loc));
        };
        if self.bases[base].leaf == Some(variable) {
            return Ok(self.bases[base].leaf_values.clone());
        }
        match self.roots.get(&variable) {
            Some(root) if made || remade == Remade::Root => Ok(root.values.clone()),
            _ => Ok(smallvec![self.read(variable)?]),
        }
    }

    /// Whether a variable is a leaf that requires a gradient.
    pub(crate) fn is_leaf(&self, variable: Variable) -> bool {
        let State::Tensor { base, remade, .. } = self.states[variable as usize] else { return false };
        let whole = self.bases[base].leaf == Some(variable) && self.bases[base].is_leaf;
        whole || (remade == Remade::Root && self.roots.get(&variable).is_some_and(|root| root.leaf))
    }

    /// `retain_grad()`. A view that is made anew would be another value with a gradient of its own.
    pub(crate) fn retain(&mut self, variable: Variable) {
        if let State::Tensor { chain, remade: remade @ Remade::View, .. } =
            &mut self.states[variable as usize]
            && !chain.is_empty()
        {
            *remade = Remade::Never;
        }
    }

    /// Another value of a variable that gradients end in.
    pub(crate) fn add_root(&mut self, variable: Variable, value: Value) {
        self.requires[value.index()] = true;
        self.roots.entry(variable).or_default().values.push(value);
    }

    /// `requires_grad_()` of a leaf.
    pub(crate) fn requires_grad(&mut self, variable: Variable, on: bool) -> Result<()> {
        let value = self.begin_anew(variable, on)?;
        let State::Tensor { base, chain, remade, .. } = &mut self.states[variable as usize] else {
            return Err(bug("a list is told to require a gradient", self.graph.loc));
        };
        if !chain.is_empty() {
            *remade = if on { Remade::Root } else { Remade::View };
            let root = self.roots.entry(variable).or_default();
            root.leaf = true;
            root.values.extend(on.then_some(value));
            return Ok(());
        }
        let base = &mut self.bases[*base];
        base.stored = Stored::Value(value);
        base.is_leaf = on;
        base.leaf = Some(variable);
        base.leaf_values.extend(on.then_some(value));
        Ok(())
    }

    /// A variable is the result of a custom function.
    pub(crate) fn end_history(&mut self, variable: Variable) -> Result<()> {
        let value = self.begin_anew(variable, true)?;
        self.add_root(variable, value);
        if let State::Tensor { base, chain, remade, .. } = &mut self.states[variable as usize] {
            if chain.is_empty() {
                self.bases[*base].stored = Stored::Value(value)
            } else {
                *remade = Remade::Root
            }
        }
        Ok(())
    }

    /// A value equal to a variable's, without history, which a gradient is wanted for or not. Views of the
    /// variable that there are keep the history that they have.
    fn begin_anew(&mut self, variable: Variable, on: bool) -> Result<Value> {
        for view in 0..self.states.len() as Variable {
            if self.is_view_through(view, variable) {
                self.read(view)?;
                if let State::Tensor { recorded, remade, .. } = &mut self.states[view as usize] {
                    if on { *recorded = false } else { *remade = Remade::Never }
                }
            }
        }
        let before = self.read(variable)?;
        self.recording = false;
        let value = self.emit(Op::Detach {}, &[before])?;
        self.requires[value.index()] = on;
        let now = self.clock;
        if let State::Tensor { cached, recorded, .. } = &mut self.states[variable as usize] {
            *cached = Some((now, value));
            *recorded = false;
        }
        Ok(value)
    }

    /// Whether one variable is a view that is made from another, and has its history from there.
    fn is_view_through(&self, view: Variable, through: Variable) -> bool {
        let mut at = view;
        while let State::Tensor { chain, source, remade, .. } = &self.states[at as usize]
            && !chain.is_empty()
            && *remade != Remade::Root
        {
            at = *source;
            if at == through {
                return true;
            }
        }
        false
    }
}
