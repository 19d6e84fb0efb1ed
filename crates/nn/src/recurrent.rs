//! Recurrent layers: RNN, GRU and LSTM, of several layers, in one or both directions. A direction of a layer is a product
//! of all inputs and one op for all steps.

use std::fmt;
use std::marker::PhantomData;

use kiln_ir::table::recurrent::Cell;
use kiln_ir::{Error, Loc, Op, Why};
use kiln_tensor::hook::{Arg, Output};
use kiln_tensor::{DType, Device, Result, Tensor, grad_enabled, run_op};

use crate::display::{python_bool, python_float};
use crate::options::setters;
use crate::packed::PackedSequence;
use crate::{Forward, Module, Parameter, Training, Visitor, init};

/// What an [`RNN`] applies in every step.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum Nonlinearity {
    /// The hyperbolic tangent.
    #[default]
    Tanh,
    /// max(x, 0).
    Relu,
}

/// The options of a recurrent layer `L`, with PyTorch's names and defaults: `LSTM::options().num_layers(2).build(4, 6)`.
#[derive(Debug)]
pub struct RecurrentOptions<L> {
    num_layers: usize,
    bias: bool,
    batch_first: bool,
    dropout: f64,
    bidirectional: bool,
    proj_size: usize,
    nonlinearity: Nonlinearity,
    dtype: DType,
    device: Device,
    layer: PhantomData<fn() -> L>,
}

// Derived, it would ask for layers that can be cloned.
impl<L> Clone for RecurrentOptions<L> {
    fn clone(&self) -> RecurrentOptions<L> {
        RecurrentOptions { layer: PhantomData, ..*self }
    }
}

impl<L> Default for RecurrentOptions<L> {
    fn default() -> RecurrentOptions<L> {
        RecurrentOptions {
            num_layers: 1,
            bias: true,
            batch_first: false,
            dropout: 0.0,
            bidirectional: false,
            proj_size: 0,
            nonlinearity: Nonlinearity::Tanh,
            dtype: DType::F32,
            device: Device::Cpu,
            layer: PhantomData,
        }
    }
}

setters!(RecurrentOptions<L> {
    /// Layers on top of each other, one by default.
    num_layers: usize,
    /// Whether there are biases; there are by default.
    bias: bool,
    /// Whether inputs and outputs are `[batch, length, size]` instead of `[length, batch, size]`; not by default.
    batch_first: bool,
    /// Probability of dropout between layers in training, 0 by default.
    dropout: f64,
    /// Whether there is a second direction, from the end; not by default.
    bidirectional: bool,
});

impl RecurrentOptions<LSTM> {
    /// Size of the outputs and hidden states as projections of the hidden size; 0, the default, for none.
    pub fn proj_size(mut self, proj_size: usize) -> Self {
        self.proj_size = proj_size;
        self
    }
}

impl RecurrentOptions<RNN> {
    /// What is applied in every step; tanh by default.
    pub fn nonlinearity(mut self, nonlinearity: Nonlinearity) -> Self {
        self.nonlinearity = nonlinearity;
        self
    }
}

/// The parameters of one direction of one layer.
struct Direction {
    /// `[gates · hidden, input]`
    weight_ih: Parameter,
    /// `[gates · hidden, outputs]`
    weight_hh: Parameter,
    /// Both `[gates · hidden]`.
    biases: Option<(Parameter, Parameter)>,
    /// `[outputs, hidden]`, where outputs are projected.
    weight_hr: Option<Parameter>,
}

/// What a recurrent layer of any kind is made of.
struct Recurrent<L> {
    cell: Cell,
    directions: Vec<Direction>,
    training: Training,
    options: RecurrentOptions<L>,
    input_size: usize,
    hidden_size: usize,
}

/// The initial states of a call: hidden states and, of an LSTM, cells; zeros where there are none.
type States<'a> = Option<(&'a Tensor, Option<&'a Tensor>)>;

impl<L> Recurrent<L> {
    /// Parameters drawn from U(−1/√hidden, 1/√hidden), as PyTorch does.
    fn build(
        name: &str,
        cell: Cell,
        options: &RecurrentOptions<L>,
        [input_size, hidden_size]: [usize; 2],
        loc: Loc,
    ) -> Result<Recurrent<L>> {
        let fail =
            |argument, expected, got: f64| Err(Error::op(name, Why::Number { argument, expected, got }, loc));
        if hidden_size == 0 {
            return fail("hidden_size", "1 or more", 0.0);
        }
        if options.num_layers == 0 {
            return fail("num_layers", "1 or more", 0.0);
        }
        if !(0.0..=1.0).contains(&options.dropout) {
            return fail("dropout", "between 0 and 1", options.dropout);
        }
        if options.proj_size >= hidden_size {
            return fail("proj_size", "smaller than hidden_size", options.proj_size as f64);
        }
        let bound = 1.0 / (hidden_size as f64).sqrt();
        let draw = |shape: &[usize]| -> Result<Parameter> {
            Parameter::new(init::uniform(shape, -bound, bound, options.dtype, &options.device)?)
        };
        let sides = if options.bidirectional { 2 } else { 1 };
        let rows = hidden_size.saturating_mul(cell.gates());
        let outputs = if options.proj_size > 0 { options.proj_size } else { hidden_size };
        let mut directions = Vec::new();
        for layer in 0..options.num_layers {
            let columns = if layer == 0 { input_size } else { outputs.saturating_mul(sides) };
            for _ in 0..sides {
                directions.push(Direction {
                    weight_ih: draw(&[rows, columns])?,
                    weight_hh: draw(&[rows, outputs])?,
                    biases: if options.bias { Some((draw(&[rows])?, draw(&[rows])?)) } else { None },
                    weight_hr: if options.proj_size > 0 {
                        Some(draw(&[outputs, hidden_size])?)
                    } else {
                        None
                    },
                });
            }
        }
        let (training, options) = (Training::default(), options.clone());
        Ok(Recurrent { cell, directions, training, options, input_size, hidden_size })
    }

    fn sides(&self) -> usize {
        if self.options.bidirectional { 2 } else { 1 }
    }

    /// Columns of a direction's outputs.
    fn outputs(&self) -> usize {
        if self.options.proj_size > 0 { self.options.proj_size } else { self.hidden_size }
    }

    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.training(&self.training);
        for (i, direction) in self.directions.iter().enumerate() {
            let reverse = if i % self.sides() == 1 { "_reverse" } else { "" };
            let name = |kind: &str| format!("{kind}_l{}{reverse}", i / self.sides());
            visitor.parameter(&name("weight_ih"), &direction.weight_ih);
            visitor.parameter(&name("weight_hh"), &direction.weight_hh);
            if let Some((input, hidden)) = &direction.biases {
                visitor.parameter(&name("bias_ih"), input);
                visitor.parameter(&name("bias_hh"), hidden);
            }
            if let Some(projection) = &direction.weight_hr {
                visitor.parameter(&name("weight_hr"), projection);
            }
        }
    }

    fn describe(&self) -> String {
        let mut text = format!("{}, {}", self.input_size, self.hidden_size);
        let options = &self.options;
        if options.proj_size != 0 {
            text += &format!(", proj_size={}", options.proj_size);
        }
        if options.num_layers != 1 {
            text += &format!(", num_layers={}", options.num_layers);
        }
        if !options.bias {
            text += &format!(", bias={}", python_bool(false));
        }
        if options.batch_first {
            text += &format!(", batch_first={}", python_bool(true));
        }
        if options.dropout != 0.0 {
            text += &format!(", dropout={}", python_float(options.dropout));
        }
        if options.bidirectional {
            text += &format!(", bidirectional={}", python_bool(true));
        }
        text
    }

    /// All layers of a sequence, or of a batch of them that are equally long.
    fn run(
        &self,
        name: &str,
        x: &Tensor,
        states: States<'_>,
        loc: Loc,
    ) -> Result<(Tensor, Tensor, Option<Tensor>)> {
        let rank = x.rank();
        if !matches!(rank, 2 | 3) {
            return Err(Error::op(name, Why::Rank { argument: "x", expected: "2 or 3", got: rank }, loc));
        }
        // As [length, batch, size].
        let steps = match (rank, self.options.batch_first) {
            (2, _) => x.unsqueeze(1)?,
            (_, true) => x.transpose(0, 1)?,
            (_, false) => x.clone(),
        };
        let whole = |state: &Tensor| {
            if rank == 2 && state.rank() == 2 { state.unsqueeze(1) } else { Ok(state.clone()) }
        };
        let states = match states {
            Some((hidden, cell)) => Some((whole(hidden)?, cell.map(whole).transpose()?)),
            None => None,
        };
        let states = states.as_ref().map(|(hidden, cell)| (hidden, cell.as_ref()));
        let (output, hidden, cell) = self.layers(name, steps, None, states, loc)?;
        let output = match (rank, self.options.batch_first) {
            (2, _) => output.squeeze(1)?,
            (_, true) => output.transpose(0, 1)?,
            (_, false) => output,
        };
        let single = |state: Tensor| if rank == 2 { state.squeeze(1) } else { Ok(state) };
        Ok((output, single(hidden)?, cell.map(single).transpose()?))
    }

    /// All layers of sequences of several lengths.
    fn run_packed(
        &self,
        name: &str,
        x: &PackedSequence,
        states: States<'_>,
        loc: Loc,
    ) -> Result<(PackedSequence, Tensor, Option<Tensor>)> {
        let lengths = x.lengths_tensor()?;
        let (output, hidden, cell) = self.layers(name, x.padded().clone(), lengths.as_ref(), states, loc)?;
        Ok((x.with_padded(output), hidden, cell))
    }

    /// All layers of `[length, batch, size]`. `states` are `[layers · directions, batch, …]`. Gives the outputs of the
    /// last layer, and the last hidden states and cells of all.
    fn layers(
        &self,
        name: &str,
        mut x: Tensor,
        lengths: Option<&Tensor>,
        states: States<'_>,
        loc: Loc,
    ) -> Result<(Tensor, Tensor, Option<Tensor>)> {
        let shape = x.shape();
        let &[length, batch, size] = &shape[..] else {
            return Err(Error::op(name, Why::Rank { argument: "x", expected: "3", got: shape.rank() }, loc));
        };
        if size != self.input_size {
            let why = Why::sizes("the last dim of x and input_size", size, self.input_size);
            return Err(Error::op(name, why, loc));
        }
        if length == 0 {
            return Err(Error::op(name, Why::none("the length of the sequence"), loc));
        }
        let ty = x.ty();
        let initial = |state: Option<&Tensor>, argument: &'static str, columns: usize| {
            let shape = [self.directions.len(), batch, columns];
            match state {
                Some(state) if state.shape()[..] == shape => Ok(state.clone()),
                Some(state) => Err(Error::op(name, Why::shape(argument, shape, state.shape()), loc)),
                None => Tensor::full_of(shape, 0.0, ty.dtype, &ty.device),
            }
        };
        let hidden = initial(states.map(|s| s.0), "the initial hidden state", self.outputs())?;
        let cell = match self.cell {
            Cell::Lstm => {
                Some(initial(states.and_then(|s| s.1), "the initial cell state", self.hidden_size)?)
            }
            Cell::Gru | Cell::Tanh | Cell::Relu => None,
        };
        let (mut last_hidden, mut last_cell) = (Vec::new(), Vec::new());
        for (i, layer) in self.directions.chunks(self.sides()).enumerate() {
            if i > 0 {
                x = x.dropout(self.options.dropout, self.training.get())?;
            }
            let mut sides = Vec::with_capacity(2);
            for (side, direction) in layer.iter().enumerate() {
                let at = (i * self.sides() + side) as i64;
                let cell = cell.as_ref().map(|cell| cell.select(0, at)).transpose()?;
                let pass = Pass { cell: self.cell, reverse: side == 1, lengths };
                let ran = direction.run(&pass, &x, &hidden.select(0, at)?, cell.as_ref())?;
                sides.push(ran.outputs);
                last_hidden.push(ran.hidden);
                last_cell.extend(ran.cell);
            }
            x = match &sides[..] {
                [one] => one.clone(),
                sides => Tensor::cat(sides, -1)?,
            };
        }
        let cell = if cell.is_some() { Some(Tensor::stack(&last_cell, 0)?) } else { None };
        Ok((x, Tensor::stack(&last_hidden, 0)?, cell))
    }
}

/// How a direction runs.
struct Pass<'a> {
    cell: Cell,
    reverse: bool,
    lengths: Option<&'a Tensor>,
}

/// What a direction gives: the outputs of all steps, and the last states.
struct Ran {
    outputs: Tensor,
    hidden: Tensor,
    cell: Option<Tensor>,
}

impl Direction {
    /// All steps, from the end if it runs in reverse.
    fn run(&self, pass: &Pass<'_>, x: &Tensor, hidden: &Tensor, cell: Option<&Tensor>) -> Result<Ran> {
        let (length, reverse) = (x.size(0)?, pass.reverse);
        // Only gru has to know the hidden part's bias: what r is multiplied with contains it.
        let (bias, inner) = match (&self.biases, pass.cell) {
            (Some((input, hidden)), Cell::Gru) => {
                (Some(input.tensor().clone()), Some(hidden.tensor().clone()))
            }
            (Some((input, hidden)), _) => (Some(input.add(hidden.tensor())?), None),
            (None, Cell::Gru) => {
                let ty = x.ty();
                (None, Some(Tensor::full_of([self.weight_hh.size(0)?], 0.0, ty.dtype, &ty.device)?))
            }
            (None, _) => (None, None),
        };
        // The inputs' part of the gates, for all steps at once.
        let gates = x.linear(&self.weight_ih, bias.as_ref())?;
        let operands = [
            Some(&gates),
            Some(hidden),
            cell,
            Some(self.weight_hh.tensor()),
            inner.as_ref(),
            self.weight_hr.as_ref().map(Parameter::tensor),
            pass.lengths,
        ];
        let operands: Vec<&Tensor> = operands.into_iter().flatten().collect();
        let keep = grad_enabled() && operands.iter().any(|t| t.requires_grad());
        let op = match (pass.cell, &self.weight_hr) {
            (Cell::Lstm, None) => Op::Lstm { reverse, keep },
            (Cell::Lstm, Some(_)) => Op::LstmProjected { reverse, keep },
            (Cell::Gru, _) => Op::Gru { reverse, keep },
            (Cell::Tanh, _) => Op::Rnn { relu: false, reverse },
            (Cell::Relu, _) => Op::Rnn { relu: true, reverse },
        };
        let args: Vec<Arg<'_>> = operands.into_iter().map(Arg::Tensor).collect();
        let Output::Tensor(trace) = run_op(&op, &args)? else {
            return Err(Error::bug("a recurrent layer gives a list"));
        };
        let columns = hidden.size(-1)?;
        let outputs = trace.narrow(2, 0, columns)?.narrow(0, usize::from(!reverse), length)?;
        let last = trace.select(0, if reverse { 0 } else { length as i64 })?;
        let last_cell = cell.map(|cell| last.narrow(1, columns, cell.size(-1)?)).transpose()?;
        Ok(Ran { outputs, hidden: last.narrow(1, 0, columns)?, cell: last_cell })
    }
}

macro_rules! recurrent {
    ($(#[$doc:meta])* $Type:ident, |$options:ident| $cell:expr) => {
        $(#[$doc])*
        pub struct $Type(Recurrent<$Type>);

        impl $Type {
            /// With default options: one layer, one direction.
            #[track_caller]
            pub fn new(input_size: usize, hidden_size: usize) -> Result<$Type> {
                $Type::options().build(input_size, hidden_size)
            }

            /// Options, from which any number of layers can be built.
            pub fn options() -> RecurrentOptions<$Type> {
                RecurrentOptions::default()
            }
        }

        impl RecurrentOptions<$Type> {
            /// A layer, its parameters drawn from U(−1/√hidden_size, 1/√hidden_size) as PyTorch does.
            #[track_caller]
            pub fn build(&self, input_size: usize, hidden_size: usize) -> Result<$Type> {
                let loc = Loc::caller();
                let _behalf = loc.on_behalf(crate::folder());
                let $options = self;
                Ok($Type(Recurrent::build(stringify!($Type), $cell, self, [input_size, hidden_size], loc)?))
            }
        }

        impl Module for $Type {
            fn visit(&self, visitor: &mut dyn Visitor) {
                self.0.visit(visitor);
            }
            fn type_name(&self) -> &'static str {
                stringify!($Type)
            }
            fn extra_repr(&self) -> String {
                self.0.describe()
            }
        }

        impl fmt::Display for $Type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                crate::fmt_module(self, f)
            }
        }
    };
}
recurrent! {
    /// Long short-term memory. `forward` of a sequence, padded or packed, gives the outputs and the last hidden and cell
    /// states; of a sequence and both states it starts from those.
    ///
    /// ```
    /// use kiln_nn::{Forward, LSTM};
    /// use kiln_tensor::{Device, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let lstm = LSTM::options().num_layers(2).batch_first(true).build(4, 6)?;
    /// let (y, (hidden, cell)) = lstm.forward(&Tensor::ones([3, 5, 4], &Device::Cpu)?)?;
    /// assert_eq!(y.shape().to_vec(), [3, 5, 6]);
    /// assert_eq!((hidden.shape().to_vec(), cell.shape().to_vec()), (vec![2, 3, 6], vec![2, 3, 6]));
    /// # Ok(()) }
    /// ```
    LSTM, |_options| Cell::Lstm
}
recurrent! {
    /// Gated recurrent units. `forward` of a sequence, padded or packed, gives the outputs and the last hidden states; of
    /// a sequence and hidden states it starts from those.
    GRU, |_options| Cell::Gru
}
recurrent! {
    /// An Elman network with tanh or relu. `forward` of a sequence, padded or packed, gives the outputs and the last
    /// hidden states; of a sequence and hidden states it starts from those.
    RNN, |options| match options.nonlinearity {
        Nonlinearity::Tanh => Cell::Tanh,
        Nonlinearity::Relu => Cell::Relu,
    }
}

/// `Forward` of sequences of a kind, alone and with initial states.
macro_rules! forward {
    ($Type:ident, $Sequence:ty, $run:ident, $States:ty, |$states:ident| $given:expr, |$hidden:ident, $cell:ident| $last:expr) => {
        impl Forward<$Sequence> for $Type {
            type Output = ($Sequence, $States);
            #[track_caller]
            fn forward(&self, x: &$Sequence) -> Result<Self::Output> {
                let loc = Loc::caller();
                let _behalf = loc.on_behalf(crate::folder());
                let (output, $hidden, $cell) = self.0.$run(stringify!($Type), x, None, loc)?;
                Ok((output, $last))
            }
        }

        impl Forward<($Sequence, $States)> for $Type {
            type Output = ($Sequence, $States);
            #[track_caller]
            fn forward(&self, (x, $states): &($Sequence, $States)) -> Result<Self::Output> {
                let loc = Loc::caller();
                let _behalf = loc.on_behalf(crate::folder());
                let (output, $hidden, $cell) = self.0.$run(stringify!($Type), x, Some($given), loc)?;
                Ok((output, $last))
            }
        }
    };
    ($Type:ident, $States:ty, |$states:ident| $given:expr, |$hidden:ident, $cell:ident| $last:expr) => {
        forward!($Type, Tensor, run, $States, |$states| $given, |$hidden, $cell| $last);
        forward!($Type, PackedSequence, run_packed, $States, |$states| $given, |$hidden, $cell| $last);
    };
}
forward!(LSTM, (Tensor, Tensor), |states| (&states.0, Some(&states.1)), |hidden, cell| {
    let cell = cell.ok_or_else(|| Error::bug("an LSTM without a cell"))?;
    (hidden, cell)
});
forward!(GRU, Tensor, |hidden| (hidden, None), |hidden, _cell| hidden);
forward!(RNN, Tensor, |hidden| (hidden, None), |hidden, _cell| hidden);
