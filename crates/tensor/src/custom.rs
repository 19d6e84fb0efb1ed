//! Ops that users add: captured as one node, compiled as one step, differentiated by ops of their own.

use kiln_ir::{Custom, CustomRow, CustomType, Error, Loc, Op, Result, TensorTy, Ty, Why};

use crate::dispatch::{clone_of, dispatch_tensor};
use crate::hook::{Arg, Scope};
use crate::tensor::Ready;
use crate::{Tensor, no_grad};

type Kernel = Box<dyn Fn(&[Tensor]) -> Result<Tensor> + Send + Sync>;

/// An op of your own. To compiled code it is a box: it is captured as one op, whatever its kernel does, and runs as one
/// step of the compiled program.
///
/// A type rule says what comes out for what goes in, without computing anything. The kernel computes it, from tensors that
/// it must not change. Where gradients are to pass, each operand that has one needs an op that computes it: from the op's
/// operands, its result, and the gradient of the result, in this order.
///
/// ```
/// use kiln_tensor::{CustomOp, Result, Tensor};
/// # fn main() -> Result<()> {
/// let slope = CustomOp::new("mine::softcap_backward")
///     .types(|tys| Ok(tys[0].clone()))
///     .kernel(|args| args[2].mul(&args[1].square()?.rsub(1.0)?))
///     .register()?;
/// let softcap = CustomOp::new("mine::softcap")
///     .types(|tys| Ok(tys[0].clone()))
///     .kernel(|args| args[0].tanh())
///     .gradient(0, &slope)
///     .register()?;
///
/// let x = Tensor::from_slice(&[0.0f32, 1.0])?.requires_grad_(true)?.clone();
/// let y = softcap.call(&[&x])?;
/// y.sum()?.backward()?;
/// assert_eq!(x.grad().expect("registered").to_vec::<f32>()?, [1.0, 0.41997433]);
/// # Ok(()) }
/// ```
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct CustomOp(Custom);

/// What an op of your own is to be: see [`CustomOp`].
pub struct CustomOpBuilder {
    name: String,
    ty: Option<CustomType>,
    kernel: Option<Kernel>,
    gradients: Vec<Option<Custom>>,
}

impl CustomOp {
    /// An op with this name, which has a namespace: `mine::softcap`.
    #[expect(clippy::new_ret_no_self, reason = "it is made in parts")]
    pub fn new(name: &str) -> CustomOpBuilder {
        CustomOpBuilder { name: name.to_string(), ty: None, kernel: None, gradients: Vec::new() }
    }

    /// The op that was registered with this name.
    pub fn find(name: &str) -> Option<CustomOp> {
        Custom::find(name).map(CustomOp)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.0.row().name
    }

    /// Calls it.
    #[track_caller]
    pub fn call(self, args: &[&Tensor]) -> Result<Tensor> {
        let args: Vec<Arg<'_>> = args.iter().map(|&arg| Arg::Tensor(arg)).collect();
        dispatch_tensor(&Op::Custom { op: self.0 }, &args, false, Loc::caller())
    }
}

impl CustomOpBuilder {
    /// The type of the result from those of the operands. An error is told to the user who called the op.
    pub fn types(
        mut self,
        ty: impl Fn(&[TensorTy]) -> Result<TensorTy, String> + Send + Sync + 'static,
    ) -> CustomOpBuilder {
        self.ty = Some(Box::new(ty));
        self
    }

    /// What computes the result. It runs without a tape, and is not captured.
    pub fn kernel(
        mut self,
        kernel: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> CustomOpBuilder {
        self.kernel = Some(Box::new(kernel));
        self
    }

    /// The op that computes the gradient of an operand.
    pub fn gradient(mut self, operand: usize, op: &CustomOp) -> CustomOpBuilder {
        self.gradients.resize(self.gradients.len().max(operand + 1), None);
        self.gradients[operand] = Some(op.0);
        self
    }

    /// Makes it known, for the rest of the process.
    pub fn register(self) -> Result<CustomOp> {
        let lacks = |what: &str| Error::State(format!("custom op {:?} has no {what}", self.name));
        let ty = self.ty.ok_or_else(|| lacks("type rule"))?;
        let kernel = self.kernel.ok_or_else(|| lacks("kernel"))?;
        let (name, gradients) = (self.name.leak(), self.gradients);
        Custom::register(CustomRow { name, ty, gradients, kernel: Box::new(kernel) }).map(CustomOp)
    }
}

/// Runs a custom op's kernel: the result, in memory of its own.
pub(crate) fn run(op: Custom, args: &[Tensor], tys: &[Ty], result: &TensorTy, loc: Loc) -> Result<Ready> {
    let (_eager, _mode) = (Scope::suspend(), no_grad());
    let kernel = op.row().kernel.downcast_ref::<Kernel>();
    let kernel =
        kernel.ok_or_else(|| Error::bug(format!("{} has a kernel of another crate", op.row().name)))?;
    let made = kernel(args)?;
    let ready = made.ready()?.clone();
    if ready.ty() != *result {
        let why = Why::Other(format!("its kernel returned {}, its type rule says {result}", ready.ty()));
        return Err(Op::Custom { op }.error(tys, why, loc));
    }
    // Whoever else has it must not see what becomes of it, and the other way round.
    let is_own = ready.storage.references() == 2 && made.references() == 1 && ready.layout.is_contiguous();
    if is_own && ready.layout.offset == 0 {
        Ok(ready)
    } else {
        Ok(clone_of(&made, false, loc)?.ready()?.clone())
    }
}
