//! Small pictures through convolutions, norms and pooling, and a gate: two results that leave with gradients.

use kiln_tensor::{BatchNorm, DType, Pool, Result, Tensor, no_grad};

use crate::world::{numbers, parameter};

struct Norm {
    running: [Tensor; 2],
    scale: [Tensor; 2],
}

impl Norm {
    fn new(seed: u64, channels: usize) -> Result<Norm> {
        Ok(Norm {
            running: [numbers(seed, &[channels])?, numbers(seed + 1, &[channels])?.add(2.0)?],
            scale: [parameter(seed + 2, &[channels], 1.0)?, parameter(seed + 3, &[channels], 0.2)?],
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.batch_norm(BatchNorm {
            running: Some((&self.running[0], &self.running[1])),
            weight: Some(&self.scale[0]),
            bias: Some(&self.scale[1]),
            training: true,
            ..BatchNorm::default()
        })
    }
}

/// See the [module](self).
pub struct Pictures {
    images: Tensor,
    first: [Tensor; 2],
    first_norm: Norm,
    second: Tensor,
    second_norm: Norm,
    head: [Tensor; 2],
    gate: Tensor,
    shift: Tensor,
    /// In half precision, and changed by every call.
    state: Tensor,
}

impl Pictures {
    pub fn new() -> Result<Pictures> {
        Ok(Pictures {
            images: numbers(300, &[5, 3, 12, 12])?,
            first: [parameter(301, &[6, 3, 3, 3], 0.4)?, parameter(302, &[6], 0.1)?],
            first_norm: Norm::new(310, 6)?,
            second: parameter(303, &[8, 6, 3, 3], 0.3)?,
            second_norm: Norm::new(320, 8)?,
            head: [parameter(304, &[8, 8], 0.5)?, parameter(305, &[8], 0.1)?],
            gate: parameter(306, &[5, 8], 1.0)?,
            shift: parameter(307, &[8], 0.5)?,
            state: numbers(308, &[5, 8])?.to_dtype(DType::BF16)?,
        })
    }

    pub fn parameters(&self) -> Vec<Tensor> {
        let Pictures { first, first_norm, second, second_norm, head, gate, shift, .. } = self;
        let lists = [first, &first_norm.scale, &second_norm.scale, head];
        lists.into_iter().flatten().chain([second, gate, shift]).cloned().collect()
    }

    pub fn state(&self) -> Vec<Tensor> {
        let running = [&self.first_norm.running, &self.second_norm.running];
        running.into_iter().flatten().chain([&self.state]).cloned().collect()
    }

    /// What is seen in the pictures, and what the gate lets through.
    pub fn features(&self) -> Result<[Tensor; 2]> {
        let x = self.images.conv2d(&self.first[0], Some(&self.first[1]), 2, [1, 1], 1, 1)?;
        let x = self.first_norm.forward(&x)?.relu()?.max_pool2d(Pool::new(2).stride(1))?;
        let x = x.conv2d(&self.second, None, 1, [1, 1], 1, 1)?;
        let x = self.second_norm.forward(&x)?.silu()?;
        let x = x.avg_pool2d(Pool::new(2).stride(2).padding(1).count_include_pad(false))?;
        let features = x.mean_dim([2, 3], false)?.linear(&self.head[0], Some(&self.head[1]))?.tanh()?;

        // What the gate saves in half precision is changed before the backward pass.
        let open = self.state.to_dtype(DType::F32)?.mul(&self.gate)?.sigmoid()?;
        let scale = {
            let _guard = no_grad();
            self.gate.mul(&self.gate)?.mean()?.add(0.5)?
        };
        let gated = open.add(&self.shift)?.mul(&scale)?.softmax(-1)?.add(&self.shift.square()?)?;
        let _guard = no_grad();
        self.state.mul_(0.5)?.add_(0.125)?;
        Ok([features, gated])
    }
}
