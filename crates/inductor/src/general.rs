//! Plans for many sizes: graphs of one form have plans of one form, which differ in their numbers.
//!
//! What sizes decide is apart from what follows from them. Extents of loops, factors in index expressions, shapes
//! and strides of buffers, offsets of views, sizes of products and the numbers that were computed from sizes
//! (1 / n of a mean) are *numbers*: whoever knows how each depends on the sizes puts others in their place
//! ([`General::each_number`]). The arguments of kernels, bytes, and the places of temporaries follow from them and
//! are worked out again ([`General::settle`]), by the very code that made them at first.

use std::sync::Arc;

use kiln_ir::{Fault, Graph, Op, Scalar, Shape, Strides, planted};

use crate::assemble::{Assembled, Loops};
use crate::c::KernelSource;
use crate::memory::temporaries::{InPlace, place_temporaries};
use crate::options::Options;
use crate::schedule::bands;
use crate::schedule::epilogue;
use crate::{LowerError, assembled};
use kiln_plan::{
    BufferPlan, BufferRef, BufferTy, Call, Launch, OneByOne, Place, Plan, Report, ScalarRef, Step, ViewRef,
};

/// What becomes of the numbers of a plan: each is passed, in a fixed order, and replaced by what is returned.
pub trait Numbers {
    /// A size, or what was computed from sizes.
    fn int(&mut self, number: i64) -> i64;
    /// A number of the program text that may have been computed from sizes.
    fn float(&mut self, number: f64) -> f64;
}

/// A plan whose numbers can be exchanged. See the [module](self).
#[derive(Clone, Debug)]
pub struct General {
    plan: Plan,
    /// By step, the loops of its kernel.
    loops: Vec<Option<Loops>>,
    in_place: Arc<[InPlace]>,
    /// By kernel, its text.
    code: Arc<[KernelSource]>,
    options: Options,
}

/// A plan's form: everything but its numbers and what follows from them.
#[derive(PartialEq, Debug)]
pub struct Form {
    plan: Plan,
    loops: Vec<Option<Loops>>,
    in_place: Arc<[InPlace]>,
    code: Arc<[KernelSource]>,
}

/// Takes all numbers away, so that what is left can be compared.
pub struct Wipe;

impl Numbers for Wipe {
    fn int(&mut self, _: i64) -> i64 {
        0
    }
    fn float(&mut self, _: f64) -> f64 {
        0.0
    }
}

impl General {
    /// Lowers a graph of prims for any sizes: no size is part of a kernel's text.
    pub fn lower(graph: &Graph, options: &Options) -> Result<General, LowerError> {
        let options = Options { general: true, ..options.clone() };
        let Assembled { plan, code, loops, in_place, refused_scatters: _ } = assembled(graph, &options, &[])?;
        Ok(General { plan, loops, in_place: in_place.into(), code: code.into(), options })
    }

    /// The text of its kernels.
    pub fn code(&self) -> &[KernelSource] {
        &self.code
    }

    /// The plan for the sizes it has now.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The chunks that long reductions go in.
    pub fn chunks(&self) -> impl Iterator<Item = i64> {
        self.loops.iter().flatten().filter_map(|loops| loops.kernel.chunk)
    }

    /// Drops the report, which no other sizes need.
    pub fn without_report(mut self) -> General {
        self.plan.report = Report::default();
        self
    }

    /// What is left when numbers are not looked at. Plans of equal forms differ in their numbers alone.
    pub fn form(&self) -> Form {
        let General { mut plan, mut loops, in_place, code, .. } = self.clone().without_report();
        each_number(&mut plan, &mut loops, &mut Wipe);
        plan.arena_bytes = 0;
        plan.bands.clear();
        for buffer in &mut plan.buffers {
            if let Place::Arena { .. } | Place::BeforeOutput { .. } | Place::Band { .. } = buffer.place {
                buffer.place = Place::Arena { offset: 0 };
            }
            Arc::make_mut(&mut buffer.ty).bytes = 0;
        }
        // What a kernel's first use has is as good as any.
        plan.kernels.clear();
        for (step, loops) in plan.steps.iter_mut().zip(&loops) {
            match step {
                Step::Launch(launch) if loops.is_some() => launch.numbers.clear(),
                Step::Call(call) => (call.free, call.then) = (0..0, None),
                Step::Launch(_) | Step::OneByOne(_) => {}
            }
        }
        Form { plan, loops, in_place, code }
    }

    /// Exchanges the numbers.
    pub fn each_number(&mut self, numbers: &mut dyn Numbers) {
        each_number(&mut self.plan, &mut self.loops, numbers);
    }

    /// Works out what follows from the numbers.
    pub fn settle(&mut self) {
        let General { plan, loops, in_place, code, options } = self;
        for (step, loops) in plan.steps.iter_mut().zip(&*loops) {
            let (Step::Launch(launch), Some(loops)) = (step, loops) else { continue };
            debug_assert_eq!(options.target.emit(&loops.kernel), code[launch.kernel]);
            let before = std::mem::replace(&mut launch.numbers, loops.kernel.numbers());
            if planted(Fault::ExtentFrozen) {
                launch.numbers[0] = before[0];
            }
        }
        if options.target.runs_together() {
            epilogue::connect(&mut plan.steps, loops);
            let machine = options.target.machine();
            (plan.bands, _) = bands::connect(&mut plan.steps, loops, &mut plan.buffers, in_place, machine);
        }
        let Plan { buffers, steps, bands, outputs, .. } = plan;
        (plan.arena_bytes, _) = place_temporaries(buffers, steps, bands, outputs.len(), in_place);
    }
}

fn each_number(plan: &mut Plan, loops: &mut [Option<Loops>], numbers: &mut dyn Numbers) {
    plan.buffers.iter_mut().for_each(|buffer| change_buffer(buffer, numbers));
    for scalar in &mut plan.scalars {
        change_op(&mut scalar.op, numbers);
        scalar.args.iter_mut().for_each(|arg| change_scalar(arg, numbers));
    }
    for (step, loops) in plan.steps.iter_mut().zip(loops) {
        match step {
            Step::Launch(Launch { kernel: _, numbers: own, bufs, rows, scalars, checks, coarser: _ }) => {
                bufs.iter_mut().for_each(|at| change_place(at, numbers));
                scalars.iter_mut().for_each(|scalar| change_scalar(scalar, numbers));
                checks.iter_mut().for_each(|check| check.size = numbers.int(check.size));
                match loops {
                    Some(loops) => loops.kernel.change_numbers(&mut |number| *number = numbers.int(*number)),
                    None => own.iter_mut().chain(rows).for_each(|n| *n = numbers.int(*n)),
                }
            }
            Step::Call(Call { op, args, scalars, outs, free: _, constant: _, then: _, loc: _ }) => {
                change_op(op, numbers);
                args.iter_mut().chain(outs).for_each(|view| change_view(view, numbers));
                scalars.iter_mut().for_each(|scalar| change_scalar(scalar, numbers));
            }
            // There are none: nothing was refused.
            Step::OneByOne(OneByOne { graph: _, args, scalars, outs }) => {
                let outs = outs.iter_mut().map(|(_, out)| out);
                args.iter_mut().chain(outs).for_each(|view| change_view(view, numbers));
                scalars.iter_mut().for_each(|scalar| change_scalar(scalar, numbers));
            }
        }
    }
}

fn change_size(size: &mut usize, numbers: &mut dyn Numbers) {
    *size = numbers.int(*size as i64) as usize;
}

fn change_shape(shape: &mut Shape, strides: &mut Strides, numbers: &mut dyn Numbers) {
    shape.iter_mut().for_each(|size| change_size(size, numbers));
    strides.iter_mut().for_each(|stride| *stride = numbers.int(*stride as i64) as isize);
}

fn change_buffer(buffer: &mut BufferPlan, numbers: &mut dyn Numbers) {
    let BufferTy { dtype, mut shape, mut strides, bytes: _ } = (*buffer.ty).clone();
    change_shape(&mut shape, &mut strides, numbers);
    // Neighbours share what they hold; most of it has no size that changes.
    if shape != buffer.ty.shape || strides != buffer.ty.strides {
        let bytes = shape.numel() * dtype.size();
        buffer.ty = Arc::new(BufferTy { dtype, shape, strides, bytes });
    }
}

fn change_place(at: &mut BufferRef, numbers: &mut dyn Numbers) {
    at.offset = numbers.int(at.offset);
}

fn change_view(view: &mut ViewRef, numbers: &mut dyn Numbers) {
    change_place(&mut view.at, numbers);
    change_shape(&mut view.ty.shape, &mut view.strides, numbers);
}

fn change_scalar(scalar: &mut ScalarRef, numbers: &mut dyn Numbers) {
    if let ScalarRef::Constant(constant) = scalar {
        *constant = match *constant {
            Scalar::Int(n) => Scalar::Int(numbers.int(n)),
            Scalar::Float(x) => Scalar::Float(numbers.float(x)),
            Scalar::Bool(b) => Scalar::Bool(b),
        };
    }
}

fn change_op(op: &mut Op, numbers: &mut dyn Numbers) {
    op.each_number(&mut |_, number| *number = numbers.int(*number));
}
