//! Tensors day by day: dtypes and devices, shapes, dims, rows, reading back.
//!
//! `cargo run -p kiln --example tensors`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln::prelude::*;

/// The example.
pub fn main() -> kiln::Result<()> {
    let device = Device::best();
    let x = Tensor::arange(0, 12, (DType::F32, &device))?.reshape((2, 3, -1))?;
    let (batch, _, columns) = x.dims3()?;
    println!("{}", x.sum_dim(-1, false)?);
    println!("{}", x.mean_dim([0, 2], true)?.reshape(-1)?);
    let (values, indices) = x.max_dim(1, false)?;
    println!("{values}\n{indices}");

    println!("{:?}", x.permute([0, 2, 1])?.reshape((batch * columns, -1))?.shape().to_vec());
    println!("{:?}", Tensor::cat([&x, &x], 1)?.shape().to_vec());
    for row in &x.i((.., 0))? {
        println!("{}", row?.roll(1, 0)?);
    }

    let y = (&x + 1.0).log().ok()?;
    println!("{:.4}", y.max()?.item::<f32>()?);
    println!("{:?}", y.to(DType::I64)?.i((1, 2))?.to_vec::<i64>()?);
    let copy = x.deep_clone()?;
    x.zero_()?;
    println!("{} {}", x.sum()?.item::<f32>()?, copy.sum()?.item::<f32>()?);
    Ok(())
}
