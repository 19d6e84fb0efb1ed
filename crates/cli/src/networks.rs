//! The cases that train networks over pictures: forward, the sum's backward and SGD.

use std::fmt;

use kiln::Result;
use kiln::models::{convnext_tiny, efficientnet_b0, mobilenet_v2, resnet18};
use kiln::prelude::*;

use crate::cases::Workload;

/// A network.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Network {
    Resnet18,
    MobilenetV2,
    EfficientnetB0,
    ConvnextTiny,
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Network::Resnet18 => "resnet18_train",
            Network::MobilenetV2 => "mobilenet_v2_train",
            Network::EfficientnetB0 => "efficientnet_b0_train",
            Network::ConvnextTiny => "convnext_tiny_train",
        })
    }
}

impl Network {
    /// A training step over some pictures.
    pub fn train(self, device: &Device) -> Result<Workload> {
        match self {
            Network::Resnet18 => train(resnet18(1000)?, [8, 112], device),
            Network::MobilenetV2 => train(mobilenet_v2(1000)?, [16, 112], device),
            Network::EfficientnetB0 => train(efficientnet_b0(1000)?, [16, 112], device),
            Network::ConvnextTiny => train(convnext_tiny(1000)?, [8, 64], device),
        }
    }
}

fn train(
    model: impl Module + Forward<Output = Tensor> + 'static,
    [batch, pixels]: [usize; 2],
    device: &Device,
) -> Result<Workload> {
    let state = model.parameters();
    let opt = optim::SGD::new(model.parameters(), 0.01)?;
    let x = Tensor::randn([batch, 3, pixels, pixels], device)?;
    let reads = [model.buffers(), vec![x.clone()]].concat();
    let step = move || {
        opt.zero_grad();
        model.forward(&x)?.sum()?.backward()?;
        opt.step()?;
        Ok(None)
    };
    Ok(Workload::new(step, state).reading(reads))
}
