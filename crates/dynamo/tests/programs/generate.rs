//! Random programs: every step is tried eagerly before it is kept.

use std::collections::BTreeMap;

use kiln_ir::Why;
use kiln_tensor::internal::TensorState;
use kiln_tensor::{DType, Tensor, manual_seed, no_grad};
use kiln_testkit::Rng;

use crate::program::{Beside, CALLS, Do, Id, Input, Kind, Program, Size, Step, View};
use crate::world::{BINARY, UNARY, Variables, World, perform, sizes};

/// Halves are not among them: fused code keeps them in f32, so comparisons of them may go either way.
const NARROW: [DType; 4] = [DType::I32, DType::I16, DType::I8, DType::U8];

/// How much is known of a variable's rounding: comparisons and kinks are only asked of what both worlds
/// compute bit for bit.
#[derive(Copy, Clone, PartialEq, PartialOrd)]
enum Exact {
    No,
    /// Element by element from exact numbers.
    Bits,
    /// Small multiples of a power of two: sums are exact in any order.
    Whole,
}

struct Generator {
    rng: Rng,
    program: Program,
    /// A world in which every step is tried.
    world: World,
    variables: Variables,
    exact: BTreeMap<Id, Exact>,
    next: Id,
}

const FLOAT_SHAPES: &[&[Size]] = {
    use Size::{Changing as N, Fixed as F};
    &[
        &[],
        &[F(3)],
        &[N],
        &[N, F(4)],
        &[F(3), F(4)],
        &[F(4), F(3)],
        &[F(4), F(4)],
        &[F(2), N, F(3)],
        &[F(0)],
        &[N, F(1)],
        &[F(33)],
        &[F(5), F(17)],
        &[F(1), F(4)],
    ]
};

impl Generator {
    fn new(seed: u64) -> Generator {
        let mut rng = Rng::new(seed);
        let n = *rng.pick(&[3, 4, 6]);
        let sizes =
            if rng.one_in(3) { vec![n, n + rng.below(3), *rng.pick(&[1, n, 5, 0])] } else { vec![n; CALLS] };
        let program = Program { inputs: Vec::new(), steps: Vec::new(), outside: None, sizes };
        Generator {
            rng,
            program,
            world: World::new(None),
            variables: Variables::new(),
            exact: BTreeMap::new(),
            next: 0,
        }
    }

    fn shape(&mut self) -> Vec<Size> {
        self.rng.pick(FLOAT_SHAPES).to_vec()
    }

    fn dtype(&mut self) -> DType {
        let narrow = *self.rng.pick(&NARROW);
        let dtypes = [DType::F32, DType::F32, DType::F32, DType::F32, DType::F64, DType::I64, DType::Bool];
        if self.rng.one_in(9) { narrow } else { *self.rng.pick(&dtypes) }
    }

    fn word(&mut self, words: &[&'static str]) -> &'static str {
        words[self.rng.below(words.len())]
    }

    fn number(&mut self) -> f64 {
        *self.rng.pick(&[0.5, 2.0, -1.0, 0.25, 1.0, 0.0, 3.0, -0.5])
    }

    fn inputs(&mut self) {
        let count = 4 + self.rng.below(4);
        let n = self.program.sizes[0];
        for _ in 0..count {
            let id = self.program.inputs.len();
            let input = match self.rng.below(12) {
                0..3 => {
                    let shape = self.shape();
                    let dtype = if self.rng.one_in(5) { DType::F64 } else { DType::F32 };
                    Input::Leaf(dtype, sizes(&shape, n))
                }
                3 => match (0..id).find(|&i| matches!(self.program.inputs[i], Input::Leaf(..))) {
                    Some(leaf) => Input::Computed(leaf),
                    None => Input::Labels(Size::Changing),
                },
                4..6 => Input::Kept(self.dtype(), sizes(&self.shape(), n)),
                6..9 => Input::Fresh(self.dtype(), self.shape()),
                9 => Input::Labels(*self.rng.pick(&[Size::Changing, Size::Fixed(3), Size::Fixed(4)])),
                _ if id > 0 => Input::View(self.rng.below(id), self.view()),
                _ => Input::Fresh(DType::F32, self.shape()),
            };
            self.program.inputs.push(input);
        }
        self.next = self.program.inputs.len();
        self.variables = self.world.inputs(&self.program, 0).expect("inputs can be made");
        self.exact = self.variables.keys().map(|&id| (id, Exact::Whole)).collect();
    }

    fn view(&mut self) -> View {
        let dim = self.rng.below(3) as i64 - 1;
        match self.rng.below(13) {
            0..3 => View::Transpose,
            3 => View::Flatten,
            4..7 => View::Slice {
                dim,
                start: self.rng.below(2) as i64,
                end: *self.rng.pick(&[2, 3, 100]),
                step: *self.rng.pick(&[1, 1, 2]),
            },
            7 => View::Select { dim, index: self.rng.below(3) as i64 - 1 },
            8 => View::Unsqueeze(dim),
            9 => View::Expand(2),
            10 => View::Permute,
            11 => View::Detach,
            _ => View::Contiguous,
        }
    }

    fn any(&mut self) -> Id {
        let ids: Vec<Id> = self.variables.keys().copied().collect();
        // Recent ones more often.
        if self.rng.one_in(2) {
            ids[ids.len() - 1 - self.rng.below(ids.len().min(4))]
        } else {
            *self.rng.pick(&ids)
        }
    }

    fn beside(&mut self, x: Id) -> Beside {
        match self.rng.below(5) {
            0 => Beside::Float(self.number()),
            1 => Beside::Int(self.rng.below(5) as i64 - 1),
            _ => {
                // Something that broadcasts, if it can be found.
                let shape = self.variables[&x].shape();
                let mut found = self.any();
                for _ in 0..6 {
                    if kiln_ir::broadcast(&shape, &self.variables[&found].shape()).is_some() {
                        break;
                    }
                    found = self.any();
                }
                Beside::Tensor(found)
            }
        }
    }

    fn of_shape(&mut self, fits: impl Fn(&Tensor) -> bool) -> Id {
        for _ in 0..12 {
            let id = self.any();
            if fits(&self.variables[&id]) {
                return id;
            }
        }
        self.any()
    }

    fn float(&mut self) -> Id {
        self.of_shape(|t| t.dtype().is_float())
    }

    fn step(&mut self) -> Do {
        let x = self.any();
        let dim = self.rng.below(3) as i64 - 1;
        match self.rng.below(68) {
            0..4 => Do::Unary(self.word(UNARY), x),
            4..12 => Do::Binary(self.word(BINARY), x, self.beside(x)),
            12 => Do::Reversed(self.word(&["+", "-", "*", "/"]), self.number(), x),
            13 => Do::InPlaceUnary(self.word(UNARY), x),
            14..20 => {
                let op = if self.rng.one_in(4) { "copy" } else { self.word(&BINARY[..6]) };
                Do::InPlace(op, x, self.beside(x))
            }
            20 => {
                let x = self.float();
                let shape = self.variables[&x].shape();
                let (a, b) = (self.of_shape(|t| t.shape() == shape), self.of_shape(|t| t.shape() == shape));
                Do::Addcmul {
                    x,
                    a,
                    b,
                    value: self.number(),
                    divide: self.rng.one_in(3),
                    in_place: self.rng.one_in(2),
                }
            }
            21 => {
                let x = self.float();
                let ty = self.variables[&x].ty();
                Do::Lerp { x, end: self.of_shape(|t| t.ty() == ty), weight: self.number() }
            }
            22 => Do::Where { condition: self.of_shape(|t| t.dtype() == DType::Bool), x, y: self.beside(x) },
            23..30 => Do::View(x, self.view()),
            30..34 => {
                let op = self.word(&["sum", "sum", "mean", "amax"]);
                let dim = if self.rng.one_in(3) { None } else { Some(dim) };
                Do::Reduce { op, x, dim, keepdim: self.rng.one_in(2) }
            }
            34 => Do::Softmax { x: self.float(), dim, log: self.rng.one_in(2) },
            35..37 => {
                let x = self.of_shape(|t| t.rank() == 2 && t.dtype().is_float());
                let ty = self.variables[&x].ty();
                let fits = move |t: &Tensor| {
                    t.dtype() == ty.dtype
                        && t.rank() == 2
                        && ty.shape.rank() == 2
                        && t.shape()[0] == ty.shape[1]
                };
                Do::Mm(x, self.of_shape(fits))
            }
            37..40 => {
                let x = self.of_shape(|t| t.rank() >= 1 && t.dtype().is_float());
                let ty = self.variables[&x].ty();
                let fits = move |t: &Tensor| {
                    t.dtype() == ty.dtype && t.rank() == 2 && t.shape().last() == ty.shape.last()
                };
                let w = self.of_shape(fits);
                let out = self.variables[&w].ty();
                let bias = self.of_shape(move |t| {
                    t.dtype() == out.dtype && t.rank() == 1 && t.shape().first() == out.shape.first()
                });
                Do::Linear(x, w, self.rng.one_in(2).then_some(bias))
            }
            40 => {
                let shape = self.variables[&x].shape();
                let y = self.of_shape(|t| t.rank() == shape.rank());
                Do::Cat(vec![x, y, x][..2 + self.rng.below(2)].to_vec(), dim)
            }
            41 => {
                let shape = self.variables[&x].shape();
                Do::Stack(vec![x, self.of_shape(|t| t.shape() == shape)])
            }
            42 => {
                let dtype = self.dtype();
                Do::To(x, dtype)
            }
            43 => Do::Gather { x, dim },
            44 => Do::SliceScatter { x, dim },
            45 => {
                let labels = self.of_shape(|t| t.dtype() == DType::I64 && t.rank() == 1);
                let count = self.variables[&labels].numel();
                let scores = self.of_shape(|t| {
                    t.dtype().is_float() && t.rank() == 2 && t.shape()[0] == count && t.shape()[1] > 1
                });
                Do::Loss { scores, labels }
            }
            46..48 => {
                let list = vec![x, self.any()];
                let in_place = self.rng.one_in(2);
                let op = match (in_place, self.rng.one_in(4)) {
                    (true, true) => "copy",
                    (true, false) => self.word(&BINARY[..6]),
                    (false, true) => self.word(UNARY),
                    (false, false) => self.word(&BINARY[..6]),
                };
                let other = if self.rng.one_in(2) {
                    let shapes: Vec<_> = list.iter().map(|id| self.variables[id].shape()).collect();
                    Some(shapes.iter().map(|s| self.of_shape(|t| t.shape() == *s)).collect())
                } else {
                    None
                };
                Do::Foreach { op, list, number: self.number(), other, in_place }
            }
            48 => Do::Random(self.word(&["rand", "randn", "uniform"]), self.shape()),
            49 => {
                if self.rng.one_in(3) {
                    Do::Arange(*self.rng.pick(&[Size::Changing, Size::Fixed(4)]))
                } else {
                    Do::Full(self.shape(), self.number())
                }
            }
            50 => Do::Branch { x: self.of_shape(|t| t.dtype() == DType::I64), limit: self.number() },
            51 => {
                if self.rng.one_in(3) {
                    Do::HostWrite(x, self.number())
                } else {
                    Do::Read(x)
                }
            }
            52 => Do::Drop(x),
            53..56 => Do::Backward { x: self.of_shape(|t| t.requires_grad()), retain: self.rng.one_in(2) },
            58..60 => {
                let x = self.of_shape(|t| t.requires_grad());
                Do::BackwardAll { x, y: self.of_shape(|t| t.requires_grad()), retain: self.rng.one_in(2) }
            }
            60..63 => {
                let x = self.of_shape(|t| t.requires_grad());
                let ty = self.variables[&x].ty();
                let kind = *self.rng.pick(&[Kind::Reverse, Kind::Product, Kind::TanhOfSum]);
                Do::Custom { x, y: self.of_shape(move |t| t.ty() == ty), kind }
            }
            63..65 => {
                Do::RequiresGrad(self.of_shape(|t| t.dtype().is_float() && t.is_leaf()), !self.rng.one_in(4))
            }
            // Of what was made just now: nothing has used it yet.
            65..67 => Do::RetainGrad(self.variables.keys().last().copied().unwrap_or(x)),
            67 => Do::Hook(self.of_shape(|t| t.requires_grad() && t.is_leaf())),
            56 => Do::ZeroGrad(self.of_shape(|t| t.requires_grad() && t.is_leaf())),
            _ => Do::UseGrad(self.of_shape(|t| t.grad().is_some())),
        }
    }

    /// How exact the result of a step is; `None` if it asks too much of what it reads.
    fn judge(&self, what: &Do) -> Option<Exact> {
        use Exact::{Bits, No, Whole};
        let of = |id: &Id| self.exact.get(id).copied().unwrap_or(No);
        let ints = |id: &Id| self.variables.get(id).is_some_and(|t| !t.dtype().is_float());
        let beside = |y: &Beside| if let Beside::Tensor(id) = y { of(id) } else { Whole };
        let least = |a: Exact, b: Exact| if a < b { a } else { b };
        // A kink or a jump: only where both worlds stand at the very same point.
        let sharp = |e: Exact| (e > No).then_some(e);
        match what {
            Do::Unary(op, x) | Do::InPlaceUnary(op, x) => match *op {
                "neg" | "clone_tensor" => Some(of(x)),
                "abs" | "relu" | "logical_not" => sharp(of(x)),
                _ => Some(No),
            },
            Do::Binary(op, x, y) | Do::InPlace(op, x, y) => {
                let e = least(of(x), beside(y));
                match *op {
                    "copy" => Some(beside(y)),
                    "add" | "sub" => Some(e),
                    "mul" => Some(least(e, Bits)),
                    "div" | "pow" => Some(No),
                    _ => sharp(e),
                }
            }
            Do::Reversed(op, _, x) => Some(if *op == "/" { No } else { least(of(x), Bits) }),
            Do::Addcmul { .. } | Do::Lerp { .. } => Some(No),
            Do::Where { condition, x, y } => sharp(of(condition)).map(|_| least(of(x), beside(y))),
            Do::View(x, _) | Do::Drop(x) | Do::Read(x) => Some(of(x)),
            Do::Reduce { op, x, .. } => match *op {
                "amax" => sharp(of(x)),
                "sum" if of(x) == Whole || ints(x) => Some(Bits),
                _ => Some(No),
            },
            Do::Softmax { .. } | Do::Loss { .. } | Do::UseGrad(_) => Some(No),
            Do::Mm(x, y) | Do::Linear(x, y, _) => Some(if least(of(x), of(y)) == Whole { Bits } else { No }),
            Do::Cat(ids, _) | Do::Stack(ids) => ids.iter().map(of).reduce(least),
            Do::To(x, dtype) if dtype.is_float() => Some(of(x)),
            Do::To(x, _) | Do::Gather { x, .. } | Do::Branch { x, .. } => sharp(of(x)),
            Do::SliceScatter { x, .. } => Some(of(x)),
            Do::Foreach { op, list, other, .. } => {
                let e = list.iter().chain(other.iter().flatten()).map(of).reduce(least).unwrap_or(No);
                match *op {
                    "neg" | "clone_tensor" | "add" | "sub" | "copy" => Some(e),
                    "mul" => Some(least(e, Bits)),
                    "abs" | "relu" | "logical_not" | "maximum" | "minimum" => sharp(e),
                    _ => Some(No),
                }
            }
            Do::Random("rand", _) => Some(Bits),
            Do::Random(..) => Some(No),
            Do::Full(..) | Do::Arange(_) | Do::HostWrite(..) => Some(Whole),
            Do::Backward { .. } | Do::ZeroGrad(_) | Do::BackwardAll { .. } => Some(Whole),
            Do::RequiresGrad(..) | Do::RetainGrad(_) | Do::Hook(_) => Some(Whole),
            Do::Custom { x, kind: Kind::Reverse, .. } => Some(of(x)),
            Do::Custom { .. } => Some(No),
        }
    }

    /// The variables a step changes in place.
    fn changed(what: &Do) -> Vec<Id> {
        match what {
            Do::InPlaceUnary(_, x) | Do::InPlace(_, x, _) | Do::HostWrite(x, _) => vec![*x],
            Do::Addcmul { x, in_place: true, .. } => vec![*x],
            Do::Foreach { list, in_place: true, .. } => list.clone(),
            _ => Vec::new(),
        }
    }

    fn try_step(&mut self) {
        let what = self.step();
        let Some(exact) = self.judge(&what) else { return };
        let step = Step { out: self.next, no_grad: self.rng.one_in(6), what };
        let mut variables = self.variables.clone();
        let storage = |t: &Tensor| t.try_ready().map(|ready| ready.storage().address());
        let outcome = {
            let _guard = step.no_grad.then(no_grad);
            perform(&step, &mut variables, 0, self.program.sizes[0], &mut Vec::new())
        };
        match outcome {
            // A few steps that fail stay: programs may go on after an error.
            Err(error) => {
                let deferred = matches!(
                    error.why(),
                    Some(
                        Why::Version { .. }
                            | Why::Freed
                            | Why::Index { .. }
                            | Why::Lost
                            | Why::Independent { .. }
                            | Why::NoView
                            | Why::NotCaptured { .. }
                            | Why::Other(_)
                    )
                );
                if deferred || !self.rng.one_in(25) {
                    return;
                }
            }
            Ok(()) => {
                let fresh: Vec<Id> = variables.keys().copied().filter(|&id| id >= self.next).collect();
                let changed = Generator::changed(&step.what);
                let touched: Vec<Id> = fresh.iter().chain(&changed).copied().collect();
                let wild = |t: &Tensor| {
                    t.numel() > 400
                        || (t.dtype().is_float()
                            && t.to_vec_cast::<f64>().unwrap().iter().any(|x| x.abs() > 64.0))
                };
                if fresh.iter().any(|id| wild(&variables[id])) {
                    return;
                }
                let places: Vec<_> = changed.iter().map(|id| storage(&self.variables[id])).collect();
                self.variables = variables;
                for id in fresh {
                    self.exact.insert(id, exact);
                }
                for (id, t) in &self.variables {
                    if places.contains(&storage(t)) || touched.contains(id) {
                        let e = self.exact.entry(*id).or_insert(exact);
                        if exact < *e {
                            *e = exact;
                        }
                    }
                }
            }
        }
        self.next += 2;
        self.program.steps.push(step);
    }

    fn finish(mut self) -> Program {
        if self.rng.one_in(2) {
            let candidates: Vec<Id> =
                self.variables.iter().filter(|(_, t)| t.requires_grad()).map(|(&id, _)| id).collect();
            if !candidates.is_empty() {
                self.program.outside = Some(*self.rng.pick(&candidates));
            }
        }
        self.program
    }
}

pub fn generate(seed: u64) -> Program {
    manual_seed(100);
    let mut generator = Generator::new(seed);
    generator.inputs();
    let steps = 3 + generator.rng.below(22);
    for _ in 0..steps * 4 {
        if generator.program.steps.len() < steps {
            generator.try_step();
        }
    }
    generator.finish()
}
