//! A parameter that gets other data before every call: a compiled step computes with what it has now, as eager does.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln::prelude::*;
use kiln::{Backend, Result};

#[test]
fn a_compiled_step_sees_the_data_of_now() -> Result<()> {
    for backend in [Backend::Eager, Backend::AotEager, Backend::Inductor] {
        let weight = Tensor::full_of([3, 4], 0.0, DType::F32, &Device::Cpu)?;
        weight.requires_grad_(true)?;
        let x = Tensor::full_of([2, 4], 1.0, DType::F32, &Device::Cpu)?;
        let region = Compile::new().backend(backend).region();
        for i in 1..=6 {
            let number = i as f32;
            weight.set_data(&Tensor::full_of([3, 4], f64::from(number), DType::F32, &Device::Cpu)?)?;
            weight.set_grad(None);
            let loss = region.run(|| {
                let loss = x.matmul(&weight.t()?)?.square()?.sum()?;
                loss.backward()?;
                loss.detach()
            })?;
            // Six results of 4 · number each.
            assert_eq!(loss.item::<f32>()?, 6.0 * (4.0 * number).powi(2), "{backend}, call {i}");
            let gradient = weight.grad().unwrap().to_vec::<f32>()?;
            assert_eq!(gradient, [2.0 * 2.0 * 4.0 * number; 12], "{backend}, call {i}");
            // In place, on the data of now.
            region.run(|| {
                let _off = no_grad();
                weight.mul_(2.0).map(drop)
            })?;
            assert_eq!(weight.to_vec::<f32>()?, [2.0 * number; 12], "{backend}, call {i}");
        }
        let explained = region.explain();
        assert!(explained.breaks.is_empty() && explained.recompiles.len() <= 1, "{backend}: {explained}");
    }
    Ok(())
}
