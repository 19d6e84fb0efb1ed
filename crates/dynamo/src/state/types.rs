//! Types and layouts of what a run holds: of what is not computed yet, from its recording.

use smallvec::SmallVec;

use kiln_aot::trace::{GradTarget, Variable};
use kiln_ir::{Class, Error, Layout, Result, TensorTy, Ty};
use kiln_tensor::hook::Arg;
use kiln_tensor::internal::{ListState, TensorState};
use kiln_tensor::{Tensor, TensorList};

use super::State;
use crate::event::{CallEvent, Event, KeyArg, Made};
use crate::region::Site;

impl State {
    pub(crate) fn arg_tys(&self, site: &Site, args: &[Arg<'_>]) -> Result<SmallVec<[Ty; 4]>> {
        args.iter()
            .map(|arg| {
                Ok(match arg {
                    Arg::Number(x) => Ty::Scalar(x.kind()),
                    Arg::Tensor(t) => Ty::Tensor(self.tensor_ty(site, t)?),
                    // A list that the run knows has the type it was recorded with.
                    Arg::List(l) if l.tag().run() == self.id => self.list_ty(site, l)?,
                    Arg::List(l) => match l.try_items() {
                        Some(items) => {
                            Ty::List(items.iter().map(|t| self.tensor_ty(site, t)).collect::<Result<_>>()?)
                        }
                        None => self.list_ty(site, l)?,
                    },
                })
            })
            .collect()
    }

    /// The type of a list that the run made.
    fn list_ty(&self, site: &Site, list: &TensorList) -> Result<Ty> {
        let ty = self.made_ty(site, list.tag().variable()).filter(|ty| ty.as_list().is_some());
        ty.ok_or_else(|| Error::bug("a list without a type"))
    }

    pub(crate) fn tensor_ty(&self, site: &Site, tensor: &Tensor) -> Result<TensorTy> {
        match tensor.try_ready() {
            Some(ready) => Ok(ready.ty()),
            None if tensor.tag().run() == self.id => {
                let ty = self.made_ty(site, tensor.tag().variable());
                ty.and_then(|ty| ty.as_tensor().cloned())
                    .ok_or_else(|| Error::bug("a variable without a type"))
            }
            None => Ok(tensor.ready()?.ty()),
        }
    }

    /// The type of a variable that the run made.
    pub(crate) fn made_ty(&self, site: &Site, variable: Variable) -> Option<Ty> {
        let maker = *self.makers.get(variable as usize)?;
        match &*self.trie(site).node(maker).event {
            Event::Call(CallEvent { made: Made::Variable { ty, .. }, .. }) => Some(ty.clone()),
            // A gradient has its input's type.
            Event::Backward(event) => {
                let (input, ..) =
                    event.targets.iter().find(|(_, target, _)| *target == GradTarget::New(variable))?;
                self.held(*input).and_then(|t| self.tensor_ty(site, t).ok()).map(Ty::Tensor)
            }
            // So has one by request; they are numbered in the order of the inputs.
            Event::Grad(event) => {
                let first = self.makers.iter().position(|&other| other == maker)?;
                let results = event.results(first as Variable);
                let place = results.iter().position(|result| *result == Some(variable))?;
                let input = self.held(*event.key.inputs.get(place)?)?;
                self.tensor_ty(site, input).ok().map(Ty::Tensor)
            }
            _ => None,
        }
    }

    /// How the elements of a variable lie (a variable made here starts at offset 0 of its base).
    pub(crate) fn layout(&self, site: &Site, variable: Variable) -> Option<Layout> {
        if let Some(ready) = self.held(variable).and_then(Tensor::try_ready) {
            return Some(ready.layout().clone());
        }
        let shape = self.made_ty(site, variable)?.as_tensor()?.shape.clone();
        let Event::Call(event) = &*self.trie(site).node(*self.makers.get(variable as usize)?).event else {
            return Some(Layout::contiguous(shape)); // a gradient
        };
        let view = match (event.op.row().class, event.args.first()) {
            (Class::View, Some(KeyArg::Variable(source))) => self.layout(site, *source)?.view(&event.op),
            _ => None,
        };
        Some(view.unwrap_or_else(|| Layout::contiguous(shape)))
    }
}
