//! Tensors of devices other than the CPU: their eager ops, and copies from one device to another.
//!
//! Their memory is an [engine's](kiln_runtime::engine). Their ops are run by a [`DeviceBackend`] that a crate above
//! registers; one that it can't run goes by its decomposition, or through the CPU.

use std::sync::OnceLock;

use kiln_ir::{Device, Error, Loc, Op, Result, TensorTy, Ty, Why};
use kiln_runtime::{engine, warn};

use crate::Tensor;
use crate::autograd::{Context, Function};
use crate::create::allocate;
use crate::dispatch::execute_tensor;
use crate::graph::GraphValue;
use crate::hook::{self, Arg, Scope};
use crate::storage::Guard;
use crate::tensor::Ready;

/// Runs the ops of a device.
pub trait DeviceBackend: Send + Sync {
    /// Runs an op on values that have these types, tensors of the device and numbers: into fresh memory, or into the
    /// first operand, whose dtype the result is converted to. `None`: it has no way to run it.
    fn run(&self, op: &Op, args: &[GraphValue], in_place: bool, loc: Loc) -> Result<Option<Done>>;
}

/// What became of an op.
pub enum Done {
    /// Its result, in memory of its own.
    Result(Ready),
    /// It is in the first operand.
    InPlace,
    /// An operand holds what it must not, and nothing was changed. What it is the CPU can say.
    Refused,
}

const MOST: usize = 16;
static BACKENDS: [OnceLock<Box<dyn DeviceBackend>>; MOST] = [const { OnceLock::new() }; MOST];

fn place(device: Device) -> Option<&'static OnceLock<Box<dyn DeviceBackend>>> {
    match device {
        Device::Cpu => None,
        Device::Cuda(number) => BACKENDS.get(usize::from(number)),
    }
}

/// Gives a device what runs its ops, once and for all. Says whether it had nothing before.
pub fn register(device: Device, backend: Box<dyn DeviceBackend>) -> bool {
    place(device).is_some_and(|place| place.set(backend).is_ok())
}

/// Whether tensors can be there.
pub fn is_available(device: Device) -> bool {
    device == Device::Cpu || engine::of(device).is_some()
}

/// An op as eager code calls it, on operands of the types that it was checked with.
pub(crate) struct Job<'a> {
    pub(crate) op: &'a Op,
    pub(crate) args: &'a [Arg<'a>],
    pub(crate) tys: &'a [Ty],
    pub(crate) result: &'a TensorTy,
    pub(crate) loc: Loc,
}

impl Job<'_> {
    fn values(&self) -> Result<Vec<GraphValue>> {
        let value = |(arg, ty): (&Arg<'_>, &Ty)| match arg {
            // As it is now: its data may be replaced at any time.
            Arg::Tensor(t) => {
                let ready = t.ready_as(Some(ty), self.op, self.loc)?.clone();
                Ok(GraphValue::Tensor(Tensor::from_ready(ready)))
            }
            Arg::Number(x) => Ok(GraphValue::Number(*x)),
            Arg::List(_) => Err(Error::bug(format!("a list is an operand of {}", self.op.name()))),
        };
        self.args.iter().zip(self.tys).map(value).collect()
    }

    fn run(&self, values: &[GraphValue], in_place: bool) -> Result<Option<Done>> {
        let _eager = Scope::suspend();
        match place(self.result.device).and_then(OnceLock::get) {
            Some(backend) => backend.run(self.op, values, in_place, self.loc),
            None => Ok(None),
        }
    }

    /// Into fresh memory; `None`: by its decomposition.
    pub(crate) fn compute(&self) -> Result<Option<Ready>> {
        let values = self.values()?;
        match self.run(&values, false)? {
            Some(Done::Result(ready)) => Ok(Some(ready)),
            Some(Done::Refused) => self.on_cpu(&values).map(Some),
            Some(Done::InPlace) => Err(Error::bug(format!("{} changed its operand", self.op.name()))),
            None if self.op.row().decompose.is_some() => Ok(None),
            None => {
                let (name, device) = (self.op.name(), self.result.device);
                warn::once(&format!("{name} on {device}"), || {
                    format!("{name} has no form for {device}: it runs on the CPU, with copies there and back")
                });
                self.on_cpu(&values).map(Some)
            }
        }
    }

    /// Into the first operand; false: its result has to be computed, and put there.
    pub(crate) fn compute_in_place(&self) -> Result<bool> {
        let values = self.values()?;
        match self.run(&values, true)? {
            Some(Done::Refused) => self.on_cpu(&values).map(|_| false),
            done => Ok(done.is_some()),
        }
    }

    /// On the CPU, with copies there and back.
    fn on_cpu(&self, values: &[GraphValue]) -> Result<Ready> {
        let name = self.op.name();
        let mut copies = Vec::with_capacity(values.len());
        for value in values {
            copies.push(match value {
                GraphValue::Tensor(t) => {
                    GraphValue::Tensor(Tensor::from_ready(moved(t, Device::Cpu, name, self.loc)?))
                }
                other => other.clone(),
            });
        }
        let args: Vec<Arg<'_>> = copies.iter().map(GraphValue::arg).collect();
        let result = execute_tensor(&self.op.clone().on(Device::Cpu), &args, self.loc)?;
        moved(&result, self.result.device, name, self.loc)
    }
}

/// A dense copy of a tensor on another device.
pub(crate) fn moved(tensor: &Tensor, to: Device, what: &str, loc: Loc) -> Result<Ready> {
    let ready = tensor.ready()?.clone();
    let tensor = Tensor::from_ready(ready.clone());
    let dense = if ready.layout.is_contiguous() {
        ready
    } else {
        execute_tensor(&Op::Clone {}, &[Arg::Tensor(&tensor)], loc)?.ready()?.clone()
    };
    let out = allocate(&TensorTy { device: to, ..dense.ty() }, what, loc)?;
    copy(&dense, &out)?;
    Ok(out)
}

/// Copies the elements of one dense tensor into another of its shape and dtype, on another device.
fn copy(from: &Ready, to: &Ready) -> Result<()> {
    let bytes = from.layout.shape.numel() * from.dtype.size();
    if bytes == 0 {
        return Ok(());
    }
    let _lock = Guard::lock([(&from.storage, false), (&to.storage, true)].into_iter());
    match (engine::of(from.device), engine::of(to.device)) {
        (None, None) => Err(Error::bug("a copy from the CPU to the CPU".to_string())),
        (None, Some(engine)) => {
            // SAFETY: both are dense and have so many bytes; the lock is held until the source may change.
            to.storage.complete_at(unsafe { engine.upload(from.pointer(), to.pointer(), bytes)? });
            Ok(())
        }
        (Some(engine), None) => {
            from.storage.wait()?;
            // SAFETY: as above; it is done when this returns.
            unsafe { engine.download(from.pointer(), to.pointer(), bytes) }
        }
        (Some(source), Some(target)) => {
            from.storage.wait()?;
            let mut host = crate::host::reserve::<u8>(bytes, "to", Loc::UNKNOWN)?;
            // SAFETY: there is room for so many bytes, which the download fills; both tensors are dense and have as many.
            unsafe {
                source.download(from.pointer(), host.as_mut_ptr(), bytes)?;
                host.set_len(bytes);
                to.storage.complete_at(target.upload(host.as_ptr(), to.pointer(), bytes)?);
            }
            Ok(())
        }
    }
}

/// A copy to another device; gradients go the way back.
struct To(Device);

impl Function for To {
    fn name(&self) -> &str {
        "to"
    }

    fn forward(&mut self, _: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let to = std::mem::replace(&mut self.0, inputs[0].device());
        Ok(vec![Tensor::from_ready(moved(inputs[0], to, "to", Loc::UNKNOWN)?)])
    }

    fn backward(&self, _: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(grads[0].to(&self.0)?)])
    }
}

/// A tensor that nobody has seen yet, where it is to be.
pub(crate) fn placed(fresh: Tensor, device: Device, what: &str, loc: Loc) -> Result<Tensor> {
    if device == Device::Cpu { Ok(fresh) } else { Ok(Tensor::from_ready(moved(&fresh, device, what, loc)?)) }
}

/// A tensor on another device, on the tape.
pub(crate) fn transfer(tensor: &Tensor, to: Device, loc: Loc) -> Result<Tensor> {
    hook::host_access(tensor, hook::Access::Read, "to", loc)?;
    if !is_available(to) {
        return Err(Op::Detach {}.error(&[tensor.ty().into()], Why::Device { device: to }, loc).named("to"));
    }
    let _eager = Scope::suspend();
    To(to).apply(&[tensor])
}
