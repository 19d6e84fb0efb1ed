//! Convolutions as steps of programs: with kernels that are transformed once for as long as they stay the same, and
//! with an *epilogue*, the kernel of the next step, which runs on what is finished while that is in the cache.
//!
//! What is finished is some pixels of some planes. The epilogue's loops go along the pixels of a plane, or through
//! all planes in one; so a part is the same kernel with buffers that begin at the part's first pixel, and a shorter
//! loop. Pixels are computed as by the whole kernel: no bit changes.

use std::sync::atomic::{AtomicI32, Ordering};

use smallvec::SmallVec;

use crate::convolution::{self, Constant, Direct, Finished, Geometry, OnFinished};
use crate::halves::Half;
use crate::kept::{Contents, Form, Kept, Operand};
use crate::kernel::{Args, Kernel};
use crate::pool::{self, AllocError};
use crate::program::Element;
use crate::threads::Shared;

/// A forward convolution of dense tensors.
#[derive(Debug)]
pub(crate) struct Convolution {
    /// Sizes.
    pub geometry: Geometry,
    /// Element type: a float.
    pub element: Element,
    /// If the input is halves: their format.
    pub half: Option<Half>,
    /// The buffer of the result.
    pub dst: usize,
    /// The input: buffer and first element.
    pub x: (usize, isize),
    /// The kernels: buffer and first element.
    pub weight: (usize, isize),
    /// A buffer in which it may work, and how many bytes of it.
    pub free: (usize, usize),
    /// If the kernels are a constant of the program: which one, and what is made from it.
    pub constant: Option<(usize, Kept)>,
    /// How the next step, a kernel, goes on with what is finished.
    pub epilogue: Option<OnPlanes>,
}

/// How a kernel runs on parts of planes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OnPlanes {
    /// Pixels of a plane.
    pub pixels: usize,
    /// Whether one loop goes through all planes; else each plane is an item.
    pub is_one_loop: bool,
    /// By buffer, bytes from one pixel to the next.
    pub steps: Vec<isize>,
    /// Which integers are the loop's length, how much of it an item is, and how many items that makes.
    pub ints: [usize; 3],
}

/// The epilogue with what it is called with.
pub(crate) struct Epilogue<'a> {
    pub on: &'a OnPlanes,
    pub kernel: &'a Kernel,
    pub args: Args<'a>,
    pub scratch_bytes: usize,
}

impl Epilogue<'_> {
    /// Runs the kernel on a part. Returns its status.
    ///
    /// # Safety
    /// That of [`Kernel::launch`], for this part.
    unsafe fn run(&self, part: &Finished) -> i32 {
        let OnPlanes { pixels, is_one_loop, steps, ints: [length, width, blocks] } = self.on;
        let count = part.pixels.len() as i64;
        if count == 0 {
            return 0;
        }
        let mut ints: SmallVec<[i64; 64]> = SmallVec::from_slice(self.args.ints);
        (ints[*length], ints[*width], ints[*blocks]) = (count, count, 1);
        let run = |first: usize, items: [usize; 2]| {
            let shifted = self.args.bufs.iter().zip(steps);
            let bufs: SmallVec<[*mut u8; 32]> =
                shifted.map(|(buffer, step)| buffer.wrapping_offset(first as isize * step)).collect();
            let args = Args { bufs: &bufs, ints: &ints, scalars: self.args.scalars };
            // SAFETY: the caller's promise is passed on.
            unsafe { self.kernel.run(&args, items[0] as i64, items[1] as i64, self.scratch_bytes) }
        };
        if *is_one_loop {
            let each = part.planes.clone().map(|plane| run(plane * pixels + part.pixels.start, [0, 1]));
            each.fold(0, |first, code| if first == 0 { code } else { first })
        } else {
            run(part.pixels.start, [part.planes.start, part.planes.end])
        }
    }
}

/// Why a convolution failed.
pub(crate) enum Failed {
    Memory(AllocError),
    /// The epilogue returned this.
    Epilogue(i32),
}

impl Convolution {
    /// Computes it, with its epilogue if there is one.
    ///
    /// # Safety
    /// That of [`convolution::forward`] for the buffers behind `pointers`; nobody uses what is free; the contents are
    /// those of the kernels, if these are constant. The epilogue may run on what is finished.
    pub(crate) unsafe fn run(
        &self,
        pointers: &[*mut u8],
        contents: &[Contents],
        epilogue: Option<&Epilogue<'_>>,
    ) -> Result<(), Failed> {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            match self.element {
                Element::F64 => self.run_as::<f64>(pointers, contents, epilogue),
                Element::F32 | Element::I64 => self.run_as::<f32>(pointers, contents, epilogue),
            }
        }
    }

    /// # Safety
    /// That of [`Convolution::run`]; elements are of type `T`.
    unsafe fn run_as<T: Direct>(
        &self,
        pointers: &[*mut u8],
        contents: &[Contents],
        epilogue: Option<&Epilogue<'_>>,
    ) -> Result<(), Failed> {
        let first = |(buffer, offset): (usize, isize)| pointers[buffer].cast::<T>().wrapping_offset(offset);
        let (out, x, weight) = (first((self.dst, 0)), first(self.x), first(self.weight));
        // What is kept lies in no memory that is lent.
        let kernels = match &self.constant {
            Some((number, kept)) => {
                // SAFETY: the caller's promise about the kernels.
                let make = || unsafe { convolution::transformed(&self.geometry, weight) };
                let Geometry { filters, channels, .. } = self.geometry;
                let form = Form::Filtering { filters, channels };
                let operand = Operand { contents: contents[*number], address: weight.addr(), form };
                kept.get(operand, make).map_err(Failed::Memory)?
            }
            None => None,
        };
        let constant = self.constant.is_some().then_some(Constant(kernels.as_deref().map(|made| &**made)));
        let status = AtomicI32::new(0);
        let shared = Shared(epilogue);
        let then = |part: Finished| {
            if let Some(epilogue) = shared.get() {
                // SAFETY: the caller promises that the epilogue may run on what is finished.
                let code = unsafe { epilogue.run(&part) };
                if code != 0 {
                    status.store(code, Ordering::Relaxed);
                }
            }
        };
        let then: Option<OnFinished<'_>> = if epilogue.is_some() { Some(&then) } else { None };
        let (buffer, bytes) = self.free;
        let body = || {
            // SAFETY: the caller's promise is passed on.
            unsafe {
                match self.half {
                    Some(half) => {
                        let x = pointers[self.x.0].cast::<u16>().wrapping_offset(self.x.1);
                        convolution::sums_of_halves(&self.geometry, half, out.cast(), x, weight.cast(), then)
                    }
                    None => convolution::forward_with(&self.geometry, out, x, weight, constant, then),
                }
            }
        };
        // SAFETY: nobody uses what is free; what the convolution makes for itself is gone when it is done.
        unsafe { pool::lend(pointers[buffer], bytes, body) }.map_err(Failed::Memory)?;
        match status.into_inner() {
            0 => Ok(()),
            code => Err(Failed::Epilogue(code)),
        }
    }
}

/// Whether kernels of such a convolution are worth keeping in another form, where they are constant.
pub(crate) fn is_kept(geometry: &Geometry, element: Element) -> bool {
    element == Element::F32 && convolution::is_transformed::<f32>(geometry)
}
