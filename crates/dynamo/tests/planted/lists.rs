//! A list optimizer: Adam on copies of the parameters, with clipping, one copy that lies transposed and one in double
//! precision.

use kiln_tensor::{DType, Result, Tensor, TensorList, foreach, no_grad};

use crate::world::Results;

/// See the [module](self).
pub struct Optimizer {
    copies: Vec<Tensor>,
    first: Vec<Tensor>,
    second: Vec<Tensor>,
}

impl Optimizer {
    pub fn new(parameters: &[Tensor]) -> Result<Optimizer> {
        let _guard = no_grad();
        let copy = |(i, parameter): (usize, &Tensor)| match (i, parameter.rank()) {
            (0, _) => parameter.to_dtype(DType::F64),
            (_, 2) if i % 3 == 0 => parameter.t()?.add(0.0)?.contiguous()?.t(),
            _ => parameter.add(0.0),
        };
        let zeros = || parameters.iter().map(Tensor::zeros_like).collect::<Result<Vec<_>>>();
        Ok(Optimizer {
            copies: parameters.iter().enumerate().map(copy).collect::<Result<_>>()?,
            first: zeros()?,
            second: zeros()?,
        })
    }

    pub fn state(&self) -> Vec<Tensor> {
        self.copies.iter().chain(&self.first).chain(&self.second).cloned().collect()
    }

    pub fn step(&self, parameters: &[Tensor], rate: f64) -> Result<Results> {
        let _guard = no_grad();
        let grads: Vec<Tensor> = parameters.iter().filter_map(Tensor::grad).collect();
        let squares = grads.iter().map(|grad| grad.mul(grad)?.sum()).collect::<Result<Vec<_>>>()?;
        let norm = Tensor::stack(&squares, 0)?.sum()?.sqrt()?;
        let clip = norm.add(1e-6)?.reciprocal()?.clamp_max(1.0)?;
        let grads: TensorList =
            grads.iter().map(|grad| grad.mul(&clip)).collect::<Result<Vec<_>>>()?.into_iter().collect();
        let [copies, first, second] =
            [&self.copies, &self.first, &self.second].map(|list| TensorList::new(list.clone()));
        foreach::mul_(&first, 0.9)?;
        foreach::add_scaled_(&first, &grads, 0.1)?;
        foreach::mul_(&second, 0.99)?;
        foreach::addcmul_(&second, &grads, &grads, 0.01)?;
        let root = foreach::sqrt(&second)?;
        foreach::add_(&root, 1e-3)?;
        foreach::mul_(&copies, 1.0 - 0.1 * rate)?;
        foreach::addcdiv_(&copies, &first, &root, -rate)?;
        foreach::add_scaled_(&copies, &TensorList::new(parameters.to_vec()), 0.1 * rate)?;
        Ok(vec![("norm", norm)])
    }
}
