//! Calls of the op table's samples: operands of a dtype, a layout and a magnitude.

use kiln_ir::{Domain, Row, Sample, SampleArg, Shape};
use kiln_tensor::hook::{Arg, Output};
use kiln_tensor::{DType, Result, Tensor, run_op};
use kiln_testkit::Rng;

/// Whether sweeps that are sampled in everyday tests run whole.
pub fn whole() -> bool {
    std::env::var_os("KILN_WHOLE").is_some_and(|value| value != "0")
}

/// How an operand lies in memory.
#[derive(Copy, Clone, PartialEq, Debug)]
pub enum Layout {
    Contiguous,
    /// Dims in reverse order in memory; every second element for one dim.
    Strided,
    /// The first dim is one row repeated.
    Expanded,
}

pub const LAYOUTS: [Layout; 3] = [Layout::Contiguous, Layout::Strided, Layout::Expanded];

pub fn dense(rng: &mut Rng, dtype: DType, shape: &Shape, domain: Domain) -> Result<Tensor> {
    let away = |x: f64| if x < 0.0 { x - 0.25 } else { x + 0.25 };
    let n = shape.numel();
    let floats = |rng: &mut Rng| -> Vec<f64> {
        (0..n)
            .map(|_| match domain {
                Domain::Any => rng.normal(),
                Domain::Positive => away(rng.normal().abs()),
                Domain::NonZero => away(rng.normal()),
                Domain::Between(low, high) => {
                    low + (high - low) * rng.below(1 << 20) as f64 / f64::from(1 << 20)
                }
                Domain::Index(bound) | Domain::Distinct(bound) => rng.below(bound) as f64,
            })
            .collect()
    };
    match (dtype, domain) {
        (DType::Bool, _) => Tensor::from_vec((0..n).map(|_| rng.one_in(2)).collect(), shape),
        (dtype, _) if dtype.is_float() => Tensor::from_vec(floats(rng), shape)?.to_dtype(dtype),
        (DType::I64, Domain::Index(bound)) => {
            Tensor::from_vec((0..n).map(|_| rng.below(bound) as i64).collect(), shape)
        }
        (_, Domain::Distinct(bound)) => {
            let order = rng.permutation(bound);
            Tensor::from_vec((0..n).map(|i| order[i % bound] as i64).collect(), shape)?.to_dtype(dtype)
        }
        (_, Domain::Any) => {
            // Beyond what a float holds, too.
            let large = [i64::MAX, i64::MIN, (1 << 53) + 1];
            let pick =
                |rng: &mut Rng| if rng.one_in(8) { *rng.pick(&large) } else { rng.below(9) as i64 - 4 };
            // Narrower integers take what these wrap to.
            Tensor::from_vec((0..n).map(|_| pick(rng)).collect(), shape)?.to_dtype(dtype)
        }
        (_, Domain::Between(low, high)) => {
            let (low, high) = (low.ceil() as i64, high.floor() as i64);
            let pick = |rng: &mut Rng| low + rng.below((high - low + 1).max(1) as usize) as i64;
            Tensor::from_vec((0..n).map(|_| pick(rng)).collect(), shape)?.to_dtype(dtype)
        }
        _ => Tensor::from_vec((0..n).map(|_| rng.below(4) as i64 + 1).collect(), shape)?.to_dtype(dtype),
    }
}

pub fn operand(rng: &mut Rng, dtype: DType, shape: &Shape, domain: Domain, layout: Layout) -> Result<Tensor> {
    let rank = shape.rank();
    let reversed: Vec<i64> = (0..rank as i64).rev().collect();
    match layout {
        Layout::Strided if rank > 1 => {
            let memory: Shape = shape.iter().rev().copied().collect();
            dense(rng, dtype, &memory, domain)?.permute(&reversed[..])
        }
        Layout::Strided if rank == 1 => {
            dense(rng, dtype, &Shape::from([2 * shape[0]]), domain)?.slice(0, 0, i64::MAX, 2)
        }
        Layout::Expanded if rank > 0 && shape[0] > 0 => {
            let mut row = shape.clone();
            row[0] = 1;
            dense(rng, dtype, &row, domain)?.expand(shape)
        }
        _ => dense(rng, dtype, shape, domain),
    }
}

/// A sample with its operands.
pub struct Case {
    pub row: &'static Row,
    pub sample: Sample,
    pub layout: Layout,
    pub tensors: Vec<Option<Tensor>>,
}

impl Case {
    pub fn new(
        row: &'static Row,
        sample: &Sample,
        dtype: DType,
        layout: Layout,
        gradients: bool,
        seed: u64,
    ) -> Result<Case> {
        let mut rng = Rng::new(seed);
        let mut tensors = Vec::new();
        for arg in &sample.args {
            tensors.push(match arg {
                SampleArg::Tensor(shape, domain) => Some(operand(&mut rng, dtype, shape, *domain, layout)?),
                SampleArg::Fixed(dtype, shape, domain) => {
                    Some(operand(&mut rng, *dtype, shape, *domain, layout)?)
                }
                SampleArg::Number(_) => None,
            });
        }
        for tensor in tensors.iter().flatten().filter(|t| gradients && t.dtype().is_float()) {
            tensor.requires_grad_(true)?;
        }
        Ok(Case { row, sample: sample.clone(), layout, tensors })
    }

    /// The same call on the same numbers in f64.
    pub fn exact(&self) -> Result<Case> {
        let wide = |tensor: &Option<Tensor>| match tensor {
            // A leaf of its own, for gradients of its own.
            Some(tensor) if tensor.dtype().is_float() => {
                let own = tensor.detach()?;
                let wide = if own.dtype() == DType::F32 { own.to_dtype(DType::F64)? } else { own };
                wide.requires_grad_(tensor.requires_grad())?;
                Ok(Some(wide))
            }
            other => Ok(other.clone()),
        };
        let tensors = self.tensors.iter().map(wide).collect::<Result<_>>()?;
        Ok(Case { row: self.row, sample: self.sample.clone(), layout: self.layout, tensors })
    }

    /// The operands, tensors and numbers.
    pub fn args(&self) -> Vec<Arg<'_>> {
        self.sample
            .args
            .iter()
            .zip(&self.tensors)
            .map(|(arg, tensor)| match (arg, tensor) {
                (SampleArg::Number(x), _) => Arg::Number(*x),
                (_, Some(tensor)) => Arg::Tensor(tensor),
                (_, None) => unreachable!("made in new"),
            })
            .collect()
    }

    pub fn run(&self) -> Result<Tensor> {
        match run_op(&self.sample.op, &self.args())? {
            Output::Tensor(t) => Ok(t),
            Output::List(_) => unreachable!("no sample makes a list"),
        }
    }
}
