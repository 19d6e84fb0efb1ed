//! Recurrent layers: RNN, GRU and LSTM, of several layers, in one or both directions.

use std::fmt;
use std::marker::PhantomData;

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::{DType, Device, Result, Tensor};

use crate::display::{python_bool, python_float};
use crate::options::setters;
use crate::{Forward, Module, Parameter, Training, Visitor, init};

/// The options of a recurrent layer `L`, with PyTorch's names and defaults: `LSTM::options().num_layers(2).build(4, 6)`.
#[derive(Debug)]
pub struct RecurrentOptions<L> {
    num_layers: usize,
    bias: bool,
    batch_first: bool,
    dropout: f64,
    bidirectional: bool,
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

/// The parameters of one direction of one layer.
struct Direction {
    /// `[gates · hidden, input]`
    weight_ih: Parameter,
    /// `[gates · hidden, hidden]`
    weight_hh: Parameter,
    /// Both `[gates · hidden]`.
    biases: Option<(Parameter, Parameter)>,
}

/// What a recurrent layer of any kind is made of.
struct Recurrent<L> {
    directions: Vec<Direction>,
    training: Training,
    options: RecurrentOptions<L>,
    input_size: usize,
    hidden_size: usize,
}

impl<L> Recurrent<L> {
    /// Parameters drawn from U(−1/√hidden, 1/√hidden), as PyTorch does.
    fn build(
        name: &str,
        options: &RecurrentOptions<L>,
        [input_size, hidden_size, gates]: [usize; 3],
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
        let bound = 1.0 / (hidden_size as f64).sqrt();
        let draw = |shape: &[usize]| -> Result<Parameter> {
            Parameter::new(init::uniform(shape, -bound, bound, options.dtype, &options.device)?)
        };
        let sides = if options.bidirectional { 2 } else { 1 };
        let rows = hidden_size.saturating_mul(gates);
        let mut directions = Vec::new();
        for layer in 0..options.num_layers {
            let columns = if layer == 0 { input_size } else { hidden_size.saturating_mul(sides) };
            for _ in 0..sides {
                directions.push(Direction {
                    weight_ih: draw(&[rows, columns])?,
                    weight_hh: draw(&[rows, hidden_size])?,
                    biases: if options.bias { Some((draw(&[rows])?, draw(&[rows])?)) } else { None },
                });
            }
        }
        Ok(Recurrent {
            directions,
            training: Training::default(),
            options: options.clone(),
            input_size,
            hidden_size,
        })
    }

    fn sides(&self) -> usize {
        if self.options.bidirectional { 2 } else { 1 }
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
        }
    }

    fn describe(&self) -> String {
        let mut text = format!("{}, {}", self.input_size, self.hidden_size);
        let options = &self.options;
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

    /// Runs all layers. `states` are tensors `[layers · directions, batch, hidden]` (without `batch` for one
    /// sequence); zeros where there are none. `cell` makes new states from a step's input and the old states; the
    /// first of them is the output. Gives the outputs of the last layer and the last states.
    fn run(
        &self,
        name: &str,
        x: &Tensor,
        states: Option<Vec<Tensor>>,
        count: usize,
        loc: Loc,
        cell: &dyn Fn(&Direction, &Tensor, &[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let rank = x.rank();
        if !matches!(rank, 2 | 3) {
            return Err(Error::op(name, Why::Rank { argument: "x", expected: "2 or 3", got: rank }, loc));
        }
        let size = x.size(-1)?;
        if size != self.input_size {
            let why = Why::sizes("the last dim of x and input_size", size, self.input_size);
            return Err(Error::op(name, why, loc));
        }
        // As [length, batch, size].
        let mut x = match (rank, self.options.batch_first) {
            (2, _) => x.unsqueeze(1)?,
            (_, true) => x.transpose(0, 1)?,
            (_, false) => x.clone(),
        };
        let (length, batch) = (x.size(0)?, x.size(1)?);
        if length == 0 {
            return Err(Error::op(name, Why::none("the length of the sequence"), loc));
        }
        let shape = [self.directions.len(), batch, self.hidden_size];
        let states = match states {
            Some(states) => states
                .iter()
                .map(|state| {
                    let state =
                        if rank == 2 && state.rank() == 2 { state.unsqueeze(1)? } else { state.clone() };
                    if state.shape()[..] == shape {
                        Ok(state)
                    } else {
                        let why = Why::shape("the initial state", shape, state.shape());
                        Err(Error::op(name, why, loc))
                    }
                })
                .collect::<Result<Vec<_>>>()?,
            None => {
                let ty = x.ty();
                let zeros = Tensor::full_of(shape, 0.0, ty.dtype, &ty.device)?;
                vec![zeros; count]
            }
        };
        let mut last: Vec<Vec<Tensor>> = vec![Vec::new(); count];
        for (i, layer) in self.directions.chunks(self.sides()).enumerate() {
            if i > 0 {
                x = x.dropout(self.options.dropout, self.training.get())?;
            }
            let mut sides = Vec::with_capacity(2);
            for (side, direction) in layer.iter().enumerate() {
                let at = (i * self.sides() + side) as i64;
                let start: Vec<Tensor> = states.iter().map(|s| s.select(0, at)).collect::<Result<_>>()?;
                let (outputs, end) = direction.run(&x, side == 1, start, cell)?;
                sides.push(outputs);
                last.iter_mut().zip(end).for_each(|(all, state)| all.push(state));
            }
            x = match &sides[..] {
                [one] => one.clone(),
                sides => Tensor::cat(sides, -1)?,
            };
        }
        let output = match (rank, self.options.batch_first) {
            (2, _) => x.squeeze(1)?,
            (_, true) => x.transpose(0, 1)?,
            (_, false) => x,
        };
        let last = last.iter().map(|all| {
            let state = Tensor::stack(all, 0)?;
            if rank == 2 { state.squeeze(1) } else { Ok(state) }
        });
        Ok((output, last.collect::<Result<_>>()?))
    }
}

impl Direction {
    fn bias(&self, hidden: bool) -> Option<&Tensor> {
        self.biases.as_ref().map(|(i, h)| if hidden { h.tensor() } else { i.tensor() })
    }

    /// The hidden state's part of the gates.
    fn hidden_part(&self, hidden: &Tensor) -> Result<Tensor> {
        hidden.linear(&self.weight_hh, self.bias(true))
    }

    /// All steps, from the end if `reverse`: the outputs `[length, batch, hidden]` and the last states.
    fn run(
        &self,
        x: &Tensor,
        reverse: bool,
        mut states: Vec<Tensor>,
        cell: &dyn Fn(&Direction, &Tensor, &[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        // The input's part of the gates for all steps at once.
        let gates = x.linear(&self.weight_ih, self.bias(false))?;
        let steps = gates.unbind(0)?;
        let mut outputs = Vec::with_capacity(steps.len());
        let mut step = |x: &Tensor| -> Result<()> {
            states = cell(self, x, &states)?;
            outputs.push(states[0].clone());
            Ok(())
        };
        if reverse {
            steps.iter().rev().try_for_each(&mut step)?
        } else {
            steps.iter().try_for_each(&mut step)?
        }
        if reverse {
            outputs.reverse();
        }
        Ok((Tensor::stack(&outputs, 0)?, states))
    }
}

/// Equal parts of the last dim.
fn parts<const N: usize>(gates: &Tensor) -> Result<[Tensor; N]> {
    let size = gates.size(-1)? / N;
    let mut parts = [const { None }; N];
    for (i, part) in parts.iter_mut().enumerate() {
        *part = Some(gates.narrow(-1, i * size, size)?);
    }
    Ok(parts.map(|part| part.unwrap_or_else(|| gates.clone())))
}

fn lstm_cell(direction: &Direction, x: &Tensor, states: &[Tensor]) -> Result<Vec<Tensor>> {
    let [input, forget, cell, output] = parts(&x.add(&direction.hidden_part(&states[0])?)?)?;
    let kept = forget.sigmoid()?.mul(&states[1])?;
    let cell = kept.add(&input.sigmoid()?.mul(&cell.tanh()?)?)?;
    Ok(vec![output.sigmoid()?.mul(&cell.tanh()?)?, cell])
}

fn gru_cell(direction: &Direction, x: &Tensor, states: &[Tensor]) -> Result<Vec<Tensor>> {
    let [reset, update, new] = parts(x)?;
    let [hidden_reset, hidden_update, hidden_new] = parts(&direction.hidden_part(&states[0])?)?;
    let reset = reset.add(&hidden_reset)?.sigmoid()?;
    let update = update.add(&hidden_update)?.sigmoid()?;
    let new = new.add(&reset.mul(&hidden_new)?)?.tanh()?;
    // (1 − update) · new + update · old
    Ok(vec![new.add(&update.mul(&states[0].sub(&new)?)?)?])
}

fn rnn_cell(direction: &Direction, x: &Tensor, states: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(vec![x.add(&direction.hidden_part(&states[0])?)?.tanh()?])
}

macro_rules! recurrent {
    ($(#[$doc:meta])* $Type:ident, $gates:literal) => {
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
                let sizes = [input_size, hidden_size, $gates];
                Ok($Type(Recurrent::build(stringify!($Type), self, sizes, loc)?))
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
    /// Long short-term memory. `forward` of a sequence gives the outputs and the last hidden and cell states; of a
    /// sequence and both states it starts from those.
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
    LSTM, 4
}
recurrent! {
    /// Gated recurrent units. `forward` of a sequence gives the outputs and the last hidden states; of a sequence
    /// and hidden states it starts from those.
    GRU, 3
}
recurrent! {
    /// An Elman network with tanh. `forward` of a sequence gives the outputs and the last hidden states; of a
    /// sequence and hidden states it starts from those.
    RNN, 1
}

impl LSTM {
    fn run(&self, x: &Tensor, states: Option<Vec<Tensor>>, loc: Loc) -> Result<(Tensor, (Tensor, Tensor))> {
        let _behalf = loc.on_behalf(crate::folder());
        let (output, mut last) = self.0.run("LSTM", x, states, 2, loc, &lstm_cell)?;
        let cell = last.remove(1);
        Ok((output, (last.remove(0), cell)))
    }
}

impl Forward for LSTM {
    type Output = (Tensor, (Tensor, Tensor));
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Self::Output> {
        self.run(x, None, Loc::caller())
    }
}

impl Forward<(Tensor, (Tensor, Tensor))> for LSTM {
    type Output = (Tensor, (Tensor, Tensor));
    #[track_caller]
    fn forward(&self, (x, (hidden, cell)): &(Tensor, (Tensor, Tensor))) -> Result<Self::Output> {
        self.run(x, Some(vec![hidden.clone(), cell.clone()]), Loc::caller())
    }
}

macro_rules! one_state {
    ($Type:ident, $cell:ident) => {
        impl $Type {
            fn run(&self, x: &Tensor, states: Option<Vec<Tensor>>, loc: Loc) -> Result<(Tensor, Tensor)> {
                let _behalf = loc.on_behalf(crate::folder());
                let (output, mut last) = self.0.run(stringify!($Type), x, states, 1, loc, &$cell)?;
                Ok((output, last.remove(0)))
            }
        }

        impl Forward for $Type {
            type Output = (Tensor, Tensor);
            #[track_caller]
            fn forward(&self, x: &Tensor) -> Result<Self::Output> {
                self.run(x, None, Loc::caller())
            }
        }

        impl Forward<(Tensor, Tensor)> for $Type {
            type Output = (Tensor, Tensor);
            #[track_caller]
            fn forward(&self, (x, hidden): &(Tensor, Tensor)) -> Result<Self::Output> {
                self.run(x, Some(vec![hidden.clone()]), Loc::caller())
            }
        }
    };
}
one_state!(GRU, gru_cell);
one_state!(RNN, rnn_cell);
