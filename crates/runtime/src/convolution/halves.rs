//! Direct convolutions of halves: a few planes at a time are widened, sums are of f32, and results are rounded once.

use super::direct::{self, Either, Halves, narrow, widen};
use super::{Geometry, OnFinished};
use crate::halves::Half;
use crate::pool::{AllocError, Buffer};

/// Which of the three, with its operands.
#[derive(Debug, Clone, Copy)]
pub enum Operands<T> {
    /// The input and the filters, perhaps a bias.
    Forward(*const T, *const T, Option<*const T>),
    /// The result's gradient and the filters.
    InputGradient(*const T, *const T),
    /// The input and the result's gradient.
    WeightGradient(*const T, *const T),
}

/// Whether a convolution of halves and its gradients can be had without operands of f32.
pub fn is_for_halves(g: &Geometry) -> bool {
    g.is_direct()
}

/// A convolution that [`is_for_halves`], or one of its gradients.
///
/// # Safety
/// That of [`forward`](super::forward) and of the gradients.
pub unsafe fn of_halves(
    g: &Geometry,
    half: Half,
    out: *mut u16,
    operands: Operands<u16>,
) -> Result<(), AllocError> {
    let filters = g.filters * (g.channels / g.groups.max(1)) * g.taps();
    let floats = |count: usize| Buffer::alloc((count * size_of::<f32>()).max(1));
    let planes = |at: *const u16| Halves { half, at: at.cast_mut(), bias: None };
    let out_planes = planes(out);
    // SAFETY: the caller's promise is passed on; buffers have room for what they are named after.
    unsafe {
        let wide = |from: *const u16, count: usize| -> Result<Buffer, AllocError> {
            let to = floats(count)?;
            widen(half, from, to.as_ptr().cast(), count);
            Ok(to)
        };
        match operands {
            Operands::Forward(x, weight, bias) => {
                let weight = wide(weight, filters)?;
                let bias = bias.map(|bias| wide(bias, g.filters)).transpose()?;
                let area = g.output[0] * g.output[1];
                let bias =
                    bias.as_ref().map(|bias| (area, bias.as_ptr().cast::<f32>().cast_const(), g.filters));
                let out = Halves { bias, ..out_planes };
                direct::forward(g, out, planes(x), weight.as_ptr().cast(), None)
            }
            Operands::InputGradient(grad, weight) => {
                let weight = wide(weight, filters)?;
                direct::input_gradient(g, out_planes, planes(grad), weight.as_ptr().cast())
            }
            Operands::WeightGradient(x, grad) => {
                let sums = floats(filters)?;
                direct::weight_gradient(g, sums.as_ptr().cast::<f32>(), planes(x), planes(grad))?;
                narrow(half, sums.as_ptr().cast(), out, filters);
                Ok(())
            }
        }
    }
}

/// The sums of one that [`is_for_halves`], of halves with kernels of f32.
///
/// # Safety
/// That of [`forward_with`](super::forward_with()).
pub(crate) unsafe fn sums_of_halves(
    g: &Geometry,
    half: Half,
    out: *mut f32,
    x: *const u16,
    weight: *const f32,
    then: Option<OnFinished<'_>>,
) -> Result<(), AllocError> {
    let x = Either::Halves(Halves { half, at: x.cast_mut(), bias: None });
    // SAFETY: the caller's promise is passed on.
    unsafe { direct::forward(g, Either::Floats(out), x, weight, then) }
}
