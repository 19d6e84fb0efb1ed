//! Ops that the table does not list: what they are is said at run time, by whoever registers them.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::RwLock;

use crate::gradient::{Cx, Grads};
use crate::types::Rule;
use crate::{Attribute, Error, GradCall, Op, Result, TensorTy, Ty, Why};

/// The type of a custom op's result from those of its operands; the error is what to tell the user.
pub type CustomType = Box<dyn Fn(&[TensorTy]) -> Result<TensorTy, String> + Send + Sync>;

/// What a custom op is.
pub struct CustomRow {
    /// Its name, with a namespace: `mine::softcap`.
    pub name: &'static str,
    /// Its type rule.
    pub ty: CustomType,
    /// By operand, the op that gives its gradient from the operands, the result and the result's gradient.
    pub gradients: Vec<Option<Custom>>,
    /// What runs it, known to the crate that does.
    pub kernel: Box<dyn Any + Send + Sync>,
}

/// A custom op that is registered.
#[derive(Copy, Clone)]
pub struct Custom(&'static CustomRow);

static REGISTERED: RwLock<BTreeMap<&'static str, Custom>> = RwLock::new(BTreeMap::new());

impl Custom {
    /// Makes an op known, for the rest of the process. Its name must have a namespace, so that it is none of the table's,
    /// and must not be taken.
    pub fn register(row: CustomRow) -> Result<Custom> {
        let part = |part: &str| {
            !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.')
        };
        if !row.name.split_once("::").is_some_and(|(space, name)| part(space) && part(name)) {
            return Err(Error::State(format!(
                "custom op {:?}: a name is a namespace and a name of letters, digits and `_`, like \"mine::softcap\"",
                row.name
            )));
        }
        let mut registered = REGISTERED.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        if registered.contains_key(row.name) {
            return Err(Error::State(format!("custom op {:?} is already registered", row.name)));
        }
        let custom = Custom(Box::leak(Box::new(row)));
        registered.insert(custom.0.name, custom);
        Ok(custom)
    }

    /// The op with a name.
    pub fn find(name: &str) -> Option<Custom> {
        REGISTERED.read().unwrap_or_else(|poisoned| poisoned.into_inner()).get(name).copied()
    }

    /// What it is.
    pub fn row(self) -> &'static CustomRow {
        self.0
    }
}

impl PartialEq for Custom {
    fn eq(&self, other: &Custom) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl fmt::Debug for Custom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name)
    }
}

impl Attribute for Custom {
    fn print(&self) -> String {
        self.0.name.to_string()
    }
    fn parse(text: &str) -> Option<Custom> {
        Custom::find(text)
    }
}

pub(crate) fn types(op: &Op, args: &[Ty]) -> Rule {
    let Op::Custom { op } = op else { return Err(Why::Other("no custom op".into())) };
    let tensor = |ty: &Ty| ty.as_tensor().cloned();
    let tensors: Option<Vec<TensorTy>> = args.iter().map(tensor).collect();
    let tensors = tensors.ok_or(Why::Operand { argument: "operands", expected: "tensors" })?;
    crate::types::one((op.0.ty)(&tensors).map_err(Why::Other)?)
}

pub(crate) fn gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (Op::Custom { op }, Some(grad)) = (call.op, call.grads[0]) else {
        return Ok(vec![None; call.inputs.len()]);
    };
    let mut args = call.inputs.to_vec();
    args.extend([call.outputs[0], grad]);
    let mut gradients = Vec::with_capacity(call.inputs.len());
    for i in 0..call.inputs.len() {
        gradients.push(match op.0.gradients.get(i) {
            Some(Some(gradient)) if call.wants(i) => Some(cx.emit(Op::Custom { op: *gradient }, &args)?[0]),
            None if call.wants(i) => {
                let tys: Vec<Ty> = call.inputs.iter().map(|&input| cx.ty(input).clone()).collect();
                let why = Why::NotDifferentiable { reason: "no gradient was registered for it" };
                return Err(call.op.error(&tys, why, crate::Loc::UNKNOWN));
            }
            _ => None,
        });
    }
    Ok(gradients)
}
