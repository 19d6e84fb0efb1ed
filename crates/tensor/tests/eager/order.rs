//! Extrema with positions, sorting, scans, distinct elements, and the divisions of integers that have no result.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_ir::Why;
use kiln_tensor::{Result, Tensor};

fn t(data: &[f32]) -> Tensor {
    Tensor::from_slice(data).unwrap()
}

#[test]
fn extrema_come_with_their_first_position_and_nan_wins() -> Result<()> {
    let x = Tensor::from_vec(vec![3.0f32, 1.0, 3.0, 2.0, f32::NAN, 5.0], [2, 3])?;
    let (values, at) = x.max_dim(1, false)?;
    assert_eq!(at.to_vec::<i64>()?, [0, 1]);
    assert_eq!(values.to_vec::<f32>()?[0], 3.0);
    assert!(values.to_vec::<f32>()?[1].is_nan());
    let (values, at) = x.min_dim(-1, true)?;
    assert_eq!((at.to_vec::<i64>()?, &at.shape()[..]), (vec![1, 1], &[2, 1][..]));
    assert_eq!(values.to_vec::<f32>()?[0], 1.0);
    assert_eq!(t(&[1.0, 7.0, 7.0]).argmax()?.item::<i64>()?, 1);
    assert!(Tensor::from_vec(Vec::<f32>::new(), [0])?.argmax().is_err());
    Ok(())
}

#[test]
fn the_gradient_of_a_maximum_goes_to_its_position() -> Result<()> {
    let x = t(&[2.0, 5.0, 5.0]);
    x.requires_grad_(true)?;
    x.max_dim(0, false)?.0.backward()?;
    assert_eq!(x.grad().unwrap().to_vec::<f32>()?, [0.0, 1.0, 0.0]);
    let y = t(&[2.0, 5.0, 5.0]);
    y.requires_grad_(true)?;
    y.max()?.backward()?;
    assert_eq!(y.grad().unwrap().to_vec::<f32>()?, [0.0, 0.5, 0.5]);
    Ok(())
}

#[test]
fn sorting_is_stable_and_puts_nan_last() -> Result<()> {
    let x = t(&[2.0, f32::NAN, 1.0, 2.0, -1.0]);
    assert_eq!(x.argsort(0, false)?.to_vec::<i64>()?, [4, 2, 0, 3, 1]);
    assert_eq!(x.argsort(0, true)?.to_vec::<i64>()?, [1, 0, 3, 2, 4]);
    assert_eq!(x.sort(0, false)?.0.to_vec::<f32>()?[..4], [-1.0, 1.0, 2.0, 2.0]);
    let (values, at) = t(&[2.0, 9.0, 1.0, 2.0]).topk(3, 0, true)?;
    assert_eq!((values.to_vec::<f32>()?, at.to_vec::<i64>()?), (vec![9.0, 2.0, 2.0], vec![1, 0, 3]));
    assert_eq!(t(&[2.0, 9.0, 1.0]).topk(1, 0, false)?.0.to_vec::<f32>()?, [1.0]);
    assert!(t(&[1.0]).topk(2, 0, true).is_err());
    assert_eq!(t(&[4.0, 1.0, 3.0, 2.0]).median()?.item::<f32>()?, 2.0);
    let columns = Tensor::from_vec((0..40_000).map(|i| (i * 7919 % 40_009) as f32).collect(), [200, 200])?;
    let sorted = columns.sort(0, false)?.0.t()?.to_vec::<f32>()?;
    assert!(sorted.chunks(200).all(|column| column.is_sorted()));
    Ok(())
}

#[test]
fn products_of_zeros_have_gradients() -> Result<()> {
    let x = t(&[2.0, 0.0, 3.0, 4.0]);
    x.requires_grad_(true)?;
    x.prod()?.backward()?;
    assert_eq!(x.grad().unwrap().to_vec::<f32>()?, [0.0, 24.0, 0.0, 0.0]);
    let y = t(&[2.0, 0.0, 3.0, 0.0, 5.0]);
    y.requires_grad_(true)?;
    y.cumprod(0)?.sum()?.backward()?;
    assert_eq!(y.grad().unwrap().to_vec::<f32>()?, [1.0, 8.0, 0.0, 0.0, 0.0]);
    Ok(())
}

#[test]
fn distinct_elements() -> Result<()> {
    let unique = Tensor::from_vec(vec![3i64, 1, 3, 2], [2, 2])?.unique()?;
    assert_eq!(unique.values.to_vec::<i64>()?, [1, 2, 3]);
    assert_eq!(unique.inverse.to_vec::<i64>()?, [2, 0, 2, 1]);
    assert_eq!(&unique.inverse.shape()[..], [2, 2]);
    assert_eq!(unique.counts.to_vec::<i64>()?, [1, 1, 2]);
    Ok(())
}

#[test]
fn integers_divide_like_pytorch_and_never_by_zero() -> Result<()> {
    let (x, y) = (Tensor::from_slice(&[7i64, -7, 7, -7])?, Tensor::from_slice(&[3i64, 3, -3, -3])?);
    assert_eq!(x.floor_divide(&y)?.to_vec::<i64>()?, [2, -3, -3, 2]);
    assert_eq!(x.div_trunc(&y)?.to_vec::<i64>()?, [2, -2, -2, 2]);
    assert_eq!(x.remainder(&y)?.to_vec::<i64>()?, [1, 2, -2, -1]);
    assert_eq!(x.fmod(&y)?.to_vec::<i64>()?, [1, -1, 1, -1]);
    let zero = Tensor::from_slice(&[1i64, 0, 1, 1])?;
    let error = x.floor_divide_(&zero).err().unwrap();
    assert_eq!(error.why(), Some(&Why::Division { x: -7, y: 0 }));
    assert_eq!(x.to_vec::<i64>()?, [7, -7, 7, -7], "the operand is as it was");
    let least = Tensor::from_slice(&[i64::MIN])?;
    assert!(least.floor_divide(-1).is_err());
    assert_eq!(least.remainder(-1)?.to_vec::<i64>()?, [0]);
    assert!(x.remainder(0).is_err());
    assert_eq!(t(&[1.0, -1.0]).floor_divide(0.0)?.to_vec::<f32>()?, [f32::INFINITY, f32::NEG_INFINITY]);
    Ok(())
}
