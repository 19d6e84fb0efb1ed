//! Plans for many sizes: graphs of one form have plans of one form, which differ in their numbers.
//!
//! What sizes decide is apart from what follows from them. Extents of loops, factors in index expressions, shapes
//! and strides of buffers, offsets of views, sizes of products and the numbers that were computed from sizes
//! (1 / n of a mean) are *numbers*: whoever knows how each depends on the sizes puts others in their place
//! ([`General::each_number`]). The arguments of kernels, bytes, and the places of temporaries follow from them and
//! are worked out again ([`General::settle`]), by the very code that made them at first.

use std::sync::Arc;

use kiln_ir::{Graph, Op, Scalar, Shape, Strides};

use crate::assemble::{Assembled, Loops, name_of};
use crate::bands;
use crate::c;
use crate::epilogue;
use crate::options::Options;
use crate::plan::{
    BatchRef, BufferPlan, BufferRef, BufferTy, CheckText, MatrixRef, Place, Plan, ScalarRef, Step, ViewRef,
};
use crate::report::Report;
use crate::temporaries::{InPlace, place_temporaries};
use crate::{LowerError, assembled};

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
    /// By kernel, its name.
    names: Arc<[String]>,
    options: Options,
}

/// A plan's form: everything but its numbers and what follows from them.
#[derive(PartialEq, Debug)]
pub struct Form {
    plan: Plan,
    loops: Vec<Option<Loops>>,
    in_place: Arc<[InPlace]>,
    names: Arc<[String]>,
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
        let Assembled { plan, loops, in_place, refused_scatters: _ } = assembled(graph, &options, &[])?;
        let names = plan.kernels.iter().map(|kernel| kernel.name.clone()).collect();
        Ok(General { plan, loops, in_place: in_place.into(), names, options })
    }

    /// The plan for the sizes it has now.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The chunks that long reductions go in.
    pub fn chunks(&self) -> impl Iterator<Item = i64> {
        self.loops.iter().flatten().filter_map(|loops| loops.kernel.chunk)
    }

    /// Drops the text of kernels and the report, which no other sizes need.
    pub fn without_text(mut self) -> General {
        self.plan.kernels.clear();
        self.plan.report = Report::default();
        self
    }

    /// What is left when numbers are not looked at. Plans of equal forms differ in their numbers alone.
    pub fn form(&self) -> Form {
        let General { mut plan, mut loops, in_place, names, .. } = self.clone().without_text();
        each_number(&mut plan, &mut loops, &mut Wipe);
        plan.arena_bytes = 0;
        plan.bands.clear();
        for buffer in &mut plan.buffers {
            if let Place::Arena { .. } | Place::BeforeOutput { .. } | Place::Band { .. } = buffer.place {
                buffer.place = Place::Arena { offset: 0 };
            }
            Arc::make_mut(&mut buffer.ty).bytes = 0;
        }
        for (step, loops) in plan.steps.iter_mut().zip(&loops) {
            match step {
                Step::Kernel { ints, items, grain, scratch_bytes, .. } if loops.is_some() => {
                    ints.clear();
                    (*items, *grain, *scratch_bytes) = (0, 0, 0);
                }
                Step::Fallback { free, .. } => *free = 0..0,
                Step::Gemm { epilogue, .. } => *epilogue = None,
                Step::Convolution { free, epilogue, .. } => (*free, *epilogue) = (0..0, None),
                _ => {}
            }
        }
        Form { plan, loops, in_place, names }
    }

    /// Exchanges the numbers.
    pub fn each_number(&mut self, numbers: &mut dyn Numbers) {
        each_number(&mut self.plan, &mut self.loops, numbers);
    }

    /// Works out what follows from the numbers.
    pub fn settle(&mut self) {
        let General { plan, loops, in_place, names, options } = self;
        for (step, loops) in plan.steps.iter_mut().zip(&*loops) {
            let (Step::Kernel { kernel, ints, items, grain, scratch_bytes, .. }, Some(loops)) = (step, loops)
            else {
                continue;
            };
            let launch = loops.arguments.of(&loops.kernel, options.threads);
            if cfg!(debug_assertions) {
                let emitted = c::emit(&loops.kernel, options);
                assert_eq!((&name_of(&emitted.code), &emitted.launch), (&names[*kernel], &launch));
            }
            (*ints, *items, *grain, *scratch_bytes) =
                (launch.ints, launch.items, launch.grain, launch.scratch_bytes);
        }
        epilogue::connect(&mut plan.steps, loops);
        (plan.bands, _) = bands::connect(&mut plan.steps, loops, &mut plan.buffers, in_place);
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
            Step::Kernel { kernel: _, bufs, ints, scalars, items, grain, scratch_bytes: _, checks } => {
                bufs.iter_mut().for_each(|at| change_place(at, numbers));
                scalars.iter_mut().for_each(|scalar| change_scalar(scalar, numbers));
                for CheckText { op: _, size, loc: _ } in checks {
                    *size = numbers.int(*size);
                }
                match loops {
                    Some(loops) => loops.kernel.change_numbers(&mut |number| numbers.int(number)),
                    None => {
                        ints.iter_mut().chain([items, grain]).for_each(|n| *n = numbers.int(*n));
                    }
                }
            }
            Step::Gemm { m, n, k, lhs, rhs, dst, accumulate: _, dtype: _, constant: _, epilogue: _ } => {
                [m, n, k].into_iter().for_each(|size| change_size(size, numbers));
                [lhs, rhs, dst].into_iter().for_each(|matrix| change_matrix(matrix, numbers));
            }
            Step::Bmm { batch, m, n, k, lhs, rhs, dst: _, dtype: _ } => {
                [batch, m, n, k].into_iter().for_each(|size| change_size(size, numbers));
                for BatchRef { matrix, sizes, strides } in [lhs, rhs] {
                    change_matrix(matrix, numbers);
                    change_shape(sizes, strides, numbers);
                }
            }
            Step::Convolution { op, x, weight, dst: _, dtype: _, constant: _, free: _, epilogue: _ } => {
                change_op(op, numbers);
                [x, weight].into_iter().for_each(|operand| change_view(operand, numbers));
            }
            Step::Random { distribution: _, buffer: _, seed, offset } => {
                [seed, offset].into_iter().for_each(|scalar| change_scalar(scalar, numbers));
            }
            Step::Copy { src: _, dst: _ } => {}
            Step::Fallback { op, args, outs: _, free: _, loc: _ } => {
                change_op(op, numbers);
                args.iter_mut().for_each(|arg| change_view(arg, numbers));
            }
            // There are none: nothing was refused.
            Step::Eager { graph: _, args, scalars, outs } => {
                args.iter_mut().for_each(|arg| change_view(arg, numbers));
                scalars.iter_mut().for_each(|scalar| change_scalar(scalar, numbers));
                outs.iter_mut().for_each(|(_, out)| change_view(out, numbers));
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

fn change_matrix(MatrixRef { at, row, column }: &mut MatrixRef, numbers: &mut dyn Numbers) {
    change_place(at, numbers);
    [row, column].into_iter().for_each(|n| *n = numbers.int(*n));
}

fn change_view(view: &mut ViewRef, numbers: &mut dyn Numbers) {
    change_place(&mut view.at, numbers);
    change_shape(&mut view.shape, &mut view.strides, numbers);
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
