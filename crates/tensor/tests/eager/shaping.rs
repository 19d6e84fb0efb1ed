//! Shapes, creation and printing: values and text as PyTorch gives them.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_tensor::{DType, Device, Result, Tensor, manual_seed};

const CPU: Device = Device::Cpu;

fn ramp(shape: &[usize]) -> Result<Tensor> {
    let n = shape.iter().product::<usize>() as i64;
    Tensor::arange(0, n, &CPU)?.to_dtype(DType::F32)?.reshape(shape)
}

#[test]
fn parts_and_joins() -> Result<()> {
    let x = ramp(&[5, 2])?;
    let sizes = |parts: Vec<Tensor>| parts.iter().map(|p| p.shape()[0]).collect::<Vec<_>>();
    assert_eq!(sizes(x.split(2, 0)?), [2, 2, 1]);
    assert_eq!(sizes(x.chunk(4, 0)?), [2, 2, 1]);
    assert_eq!(sizes(x.split_sizes(&[1, 4], 0)?), [1, 4]);
    assert!(x.split_sizes(&[1, 3], 0).is_err());
    assert_eq!(x.unbind(1)?[1].to_vec::<f32>()?, [1.0, 3.0, 5.0, 7.0, 9.0]);
    let [a, b] = &Tensor::meshgrid(&[&ramp(&[2])?, &ramp(&[3])?])?[..] else { panic!("two grids") };
    assert_eq!(a.to_vec2::<f32>()?, [[0.0; 3], [1.0; 3]]);
    assert_eq!(b.to_vec2::<f32>()?, [[0.0, 1.0, 2.0]; 2]);
    Ok(())
}

#[test]
fn repeats_turns_and_pads() -> Result<()> {
    let x = ramp(&[2, 2])?;
    assert_eq!(x.repeat([1, 2])?.to_vec2::<f32>()?, [[0.0, 1.0, 0.0, 1.0], [2.0, 3.0, 2.0, 3.0]]);
    assert_eq!(x.repeat_interleave(2, 1)?.to_vec2::<f32>()?, [[0.0, 0.0, 1.0, 1.0], [2.0, 2.0, 3.0, 3.0]]);
    assert_eq!(x.roll(1, 1)?.to_vec::<f32>()?, [1.0, 0.0, 3.0, 2.0]);
    assert_eq!(x.flip(0)?.to_vec::<f32>()?, [2.0, 3.0, 0.0, 1.0]);
    assert_eq!(x.pad(&[1, -1], 9.0)?.to_vec::<f32>()?, [9.0, 0.0, 9.0, 2.0]);
    assert_eq!(ramp(&[3])?.reflection_pad(&[2, 1])?.to_vec::<f32>()?, [2.0, 1.0, 0.0, 1.0, 2.0, 1.0]);
    assert!(ramp(&[3])?.reflection_pad(&[3, 0]).is_err());
    assert_eq!(ramp(&[2])?.replication_pad(&[2, 1])?.to_vec::<f32>()?, [0.0, 0.0, 0.0, 1.0, 1.0]);
    assert_eq!(ramp(&[1, 4, 1, 1])?.pixel_shuffle(2)?.shape().to_vec(), [1, 1, 2, 2]);
    let image = ramp(&[1, 3, 4, 6])?;
    assert_eq!(image.pixel_unshuffle(2)?.pixel_shuffle(2)?.to_vec::<f32>()?, image.to_vec::<f32>()?);
    assert_eq!(ramp(&[2, 3, 4])?.movedim([0, 1], [-1, 0])?.shape().to_vec(), [3, 4, 2]);
    Ok(())
}

#[test]
fn view_refuses_where_reshape_copies() -> Result<()> {
    let turned = ramp(&[2, 3])?.t()?;
    assert!(turned.view([6]).unwrap_err().to_string().contains("use reshape"));
    assert_eq!(turned.reshape([6])?.to_vec::<f32>()?, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    assert!(turned.view([-1, 1, 2]).is_ok());
    Ok(())
}

#[test]
fn creation() -> Result<()> {
    assert_eq!(Tensor::eye(2, 3, &CPU)?.to_vec2::<f32>()?, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]);
    assert_eq!(Tensor::linspace(1.0, 2.0, 5, &CPU)?.to_vec1::<f32>()?, [1.0, 1.25, 1.5, 1.75, 2.0]);
    assert_eq!(Tensor::linspace(3.0, 1.0, 1, &CPU)?.to_vec1::<f32>()?, [3.0]);
    let deep = Tensor::new(&[[[1i64], [2]], [[3], [4]]], &CPU)?;
    assert_eq!(deep.to_vec3::<i64>()?, [[[1], [2]], [[3], [4]]]);
    assert_eq!(Tensor::new(&2.5f64, &CPU)?.item::<f64>()?, 2.5);
    assert!(Tensor::new(&vec![vec![1.0f32], vec![]], &CPU).is_err());
    assert!(deep.to_vec2::<i64>().is_err());
    Ok(())
}

#[test]
fn random_integers_orders_and_coins() -> Result<()> {
    manual_seed(7);
    let mut order = Tensor::randperm(100, &CPU)?.to_vec::<i64>()?;
    assert_ne!(order, (0..100).collect::<Vec<_>>());
    order.sort_unstable();
    assert_eq!(order, (0..100).collect::<Vec<_>>());
    let coins = Tensor::full([2000], 0.3, &CPU)?.bernoulli()?;
    let share = coins.mean()?.item::<f64>()?;
    assert!((share - 0.3).abs() < 0.05, "{share}");
    let sure = Tensor::zeros([9], &CPU)?;
    assert_eq!(sure.bernoulli_(1.0)?.to_vec::<f32>()?, [1.0; 9]);
    Ok(())
}

#[test]
fn printing_is_pytorchs() -> Result<()> {
    let check = |t: Result<Tensor>, want: &str| assert_eq!(t.unwrap().to_string(), want);
    check(Tensor::new(&[1.0f32, 2.5, -3.25e-5], &CPU), "tensor([ 1.0000e+00,  2.5000e+00, -3.2500e-05])");
    check(Tensor::new(&[-1.0f32, f32::INFINITY, 0.0, f32::NAN], &CPU), "tensor([-1., inf,  0., nan])");
    check(Tensor::new(&[true, false], &CPU), "tensor([ True, False])");
    check(Tensor::zeros([0, 3], &CPU), "tensor([], size=[0, 3])");
    check(Tensor::full_of([0], 0, DType::I64, &CPU), "tensor([], dtype=i64)");
    check(Tensor::new(&[0.5f64], &CPU), "tensor([0.5000], dtype=f64)");
    check(Tensor::arange(0, 2002, &CPU), "tensor([   0,    1,    2,  ..., 1999, 2000, 2001])");
    let long = Tensor::arange(0, 30, &CPU)?.to_string();
    let lines: Vec<&str> = long.lines().collect();
    assert_eq!(lines.len(), 2);
    assert!(lines[0].ends_with("15, 16, 17,") && lines[1].starts_with("        18, 19"), "{long}");
    let blocks = ramp(&[2, 1, 2])?.to_string();
    assert_eq!(blocks, "tensor([[[0., 1.]],\n\n        [[2., 3.]]])");
    let rows = Tensor::arange(0, 2000, &CPU)?.reshape([1000, 2])?.to_string();
    assert!(rows.contains("[   4,    5],\n        ...,\n        [1994, 1995],"), "{rows}");
    let x = Tensor::new(&[1.5f32], &CPU)?;
    x.requires_grad_(true)?;
    assert_eq!(x.to_string(), "tensor([1.5000], requires_grad=True)");
    assert_eq!(x.mul(2.0)?.to_string(), "tensor([3.], grad_fn=<mul>)");
    assert_eq!(format!("{x:?}"), "Tensor(f32[1])");
    Ok(())
}

/// What is wrong with a `cat` is the dim, the shapes and which tensor.
#[test]
fn joining_says_which_tensor_does_not_fit() -> Result<()> {
    let ones = |shape: &[usize]| Tensor::ones(shape, &CPU);
    let (a, b) = (ones(&[2, 3])?, ones(&[2, 4])?);
    let error = Tensor::cat([&a, &a, &b], 0).unwrap_err().to_string();
    assert!(
        error.contains(
            "tensor 2 has shape [2, 4], which can't be joined to [2, 3] along dim 0: the other sizes differ"
        ),
        "{error}"
    );
    let error = Tensor::cat([&a, &ones(&[2])?], 1).unwrap_err().to_string();
    assert!(
        error.contains(
            "tensor 1 has shape [2], which can't be joined to [2, 3] along dim 1: the ranks differ"
        ),
        "{error}"
    );
    assert!(!error.contains("broadcast") && error.contains("shaping.rs:"), "{error}");
    Ok(())
}

#[test]
fn triangles_and_turns_of_any_layout() -> Result<()> {
    for shape in [&[5, 7][..], &[7, 5], &[3, 4, 4], &[0, 3], &[3, 0], &[2, 0, 3], &[1, 1], &[40, 70]] {
        let rank = shape.len() as i64;
        let square = ramp(shape)?.add(1)?;
        let turned = square.transpose(rank - 1, rank - 2)?.contiguous()?.transpose(rank - 1, rank - 2)?;
        let (rows, columns) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        for x in [square.clone(), turned, square.to_dtype(DType::BF16)?, square.to_dtype(DType::U8)?] {
            let all = x.to_vec_cast::<f64>()?;
            for diagonal in [0, 1, -1, 3, -4, 1000, -1000, i64::MAX, i64::MIN] {
                let kept = |keep: fn(i64, i64) -> bool| -> Vec<f64> {
                    let place = |i: usize| ((i / columns % rows) as i64, (i % columns) as i64);
                    let element = |(i, &x): (usize, &f64)| {
                        let (row, column) = place(i);
                        if keep(column - row, diagonal) { x } else { 0.0 }
                    };
                    all.iter().enumerate().map(element).collect()
                };
                assert_eq!(x.tril(diagonal)?.to_vec_cast::<f64>()?, kept(|at, edge| at <= edge));
                assert_eq!(x.triu(diagonal)?.to_vec_cast::<f64>()?, kept(|at, edge| at >= edge));
            }
            let flipped = x.flip(rank - 1)?.to_vec_cast::<f64>()?;
            let backwards = all.chunks(columns.max(1)).flat_map(|row| row.iter().rev().copied());
            assert_eq!(flipped, backwards.collect::<Vec<_>>());
        }
    }
    Ok(())
}
