//! Changes in place through views, on the tape: base, view and other views have the gradients that PyTorch gives.
//! Each case has an out-of-place twin that says the same by `slice_scatter` or by hand.

#![allow(clippy::unwrap_used)] // a test may panic

use std::sync::Arc;

use kiln_tensor::{Device, IndexOp, Result, Tensor, no_grad};

fn leaf(data: &[f32], shape: &[usize]) -> Result<Tensor> {
    let x = Tensor::from_vec(data.to_vec(), shape.to_vec())?;
    x.requires_grad_(true)?;
    Ok(x)
}

fn grad(x: &Tensor) -> Vec<f32> {
    x.grad().map_or_else(Vec::new, |grad| grad.to_vec().unwrap())
}

#[test]
fn rows_are_assigned() -> Result<()> {
    // outputs[t] = h, the buffer of a recurrent loop.
    let x = leaf(&[1.0, 2.0, 3.0], &[3])?;
    let outputs = Tensor::zeros([2, 3], &Device::Cpu)?;
    let mut h = x.mul(1.0)?;
    for t in 0..2 {
        h = h.mul(&x)?;
        outputs.set_i(t, &h)?;
    }
    assert!(outputs.requires_grad() && !outputs.is_leaf());
    assert_eq!(outputs.to_vec::<f32>()?, [1.0, 4.0, 9.0, 1.0, 8.0, 27.0]);
    let weights = Tensor::from_vec(vec![1.0f32, 1.0, 1.0, 10.0, 10.0, 10.0], [2, 3])?;
    outputs.mul(&weights)?.sum()?.backward()?;
    // d(x² + 10 x³) = 2x + 30x²
    assert_eq!(grad(&x), [32.0, 124.0, 276.0]);
    Ok(())
}

#[test]
fn what_is_overwritten_gets_no_gradient() -> Result<()> {
    let (x, w) = (leaf(&[1.0, 2.0, 3.0, 4.0], &[2, 2])?, leaf(&[5.0, 6.0], &[2])?);
    let y = x.mul(2.0)?;
    y.set_i(0, &w)?;
    y.i((.., 1))?.mul_(3.0)?;
    assert_eq!(y.to_vec::<f32>()?, [5.0, 18.0, 6.0, 24.0]);
    y.sum()?.backward()?;
    assert_eq!(grad(&x), [0.0, 0.0, 2.0, 6.0]);
    assert_eq!(grad(&w), [1.0, 3.0]);
    Ok(())
}

#[test]
fn other_views_see_the_change() -> Result<()> {
    let x = leaf(&[1.0, 2.0, 3.0, 4.0], &[4])?;
    let y = x.mul(1.0)?;
    let (first, matrix) = (y.narrow(0, 0, 2)?, y.reshape([2, 2])?);
    let row = matrix.i(0)?;
    first.mul_(&x.narrow(0, 2, 2)?)?; // [1·3, 2·4]
    assert_eq!(row.to_vec::<f32>()?, [3.0, 8.0]);
    (&row * &matrix.i(1)?).ok()?.sum()?.backward()?; // x0·x2·x2 + x1·x3·x3
    assert_eq!(grad(&x), [9.0, 16.0, 6.0, 16.0]);
    Ok(())
}

#[test]
fn the_base_is_changed_and_its_view_read() -> Result<()> {
    let x = leaf(&[1.0, 2.0], &[2])?;
    let y = x.mul(1.0)?;
    let view = y.i(1)?;
    y.mul_(&x)?; // x²
    view.mul(10.0)?.backward()?;
    assert_eq!(grad(&x), [0.0, 40.0]);
    Ok(())
}

#[test]
fn a_view_of_something_without_a_gradient_gets_one() -> Result<()> {
    let x = leaf(&[2.0], &[1])?;
    let buffer = Tensor::zeros([3], &Device::Cpu)?;
    let (left, right) = (buffer.narrow(0, 0, 2)?, buffer.narrow(0, 1, 2)?);
    assert!(!right.requires_grad());
    left.add_(&x)?;
    assert!(buffer.requires_grad() && right.requires_grad() && !right.is_leaf());
    right.mul_(&x)?; // [x, x·x, 0]
    left.sum()?.backward()?;
    assert_eq!(grad(&x), [1.0 + 4.0]);
    assert_eq!(buffer.to_vec::<f32>()?, [2.0, 4.0, 0.0]);
    Ok(())
}

#[test]
fn transposed_and_strided_windows() -> Result<()> {
    let (x, w) = (leaf(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?, leaf(&[1.0, -1.0], &[2])?);
    let y = x.mul(1.0)?;
    y.t()?.i(1)?.copy_(&w)?; // the second column
    y.sum()?.backward()?;
    assert_eq!(grad(&x), [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]);
    assert_eq!(grad(&w), [1.0, 1.0]);
    Ok(())
}

#[test]
fn filling_a_window_ends_its_gradient() -> Result<()> {
    let x = leaf(&[1.0, 2.0, 3.0], &[3])?;
    let y = x.mul(&x)?;
    y.narrow(0, 0, 1)?.zero_()?;
    y.sum()?.backward()?;
    assert_eq!(grad(&x), [0.0, 4.0, 6.0]);
    Ok(())
}

#[test]
fn changes_off_the_tape_leave_histories() -> Result<()> {
    let x = leaf(&[1.0, 2.0], &[2])?;
    let y = x.mul(3.0)?;
    let view = y.i(0)?;
    {
        let _guard = no_grad();
        y.mul_(100.0)?;
    }
    assert_eq!(view.to_vec::<f32>()?, [300.0]);
    view.backward()?;
    assert_eq!(grad(&x), [3.0, 0.0]);
    Ok(())
}

#[test]
fn what_is_refused() -> Result<()> {
    let x = leaf(&[1.0, 2.0], &[2])?;
    let error = |result: Result<&Tensor>| result.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error(x.i(0)?.mul_(2.0)).contains("a leaf that requires a gradient"));
    let y = x.mul(1.0)?;
    let view = {
        let _guard = no_grad();
        y.i(0)?
    };
    assert!(error(view.mul_(&x.i(0)?)).contains("a view made under no_grad"));
    // What is cut off is a tensor of its own.
    let detached = y.detach()?;
    detached.mul_(&x)?;
    assert!(detached.requires_grad());
    assert_eq!(y.to_vec::<f32>()?, [1.0, 4.0]);
    let expanded = y.i(0)?.expand([2])?;
    assert!(error(expanded.mul_(2.0)).contains("several of its elements share memory"));
    Ok(())
}

#[test]
fn what_backward_needs_is_not_overwritten_unseen() -> Result<()> {
    let x = leaf(&[1.0, 2.0], &[2])?;
    let y = x.exp()?; // its gradient reads the result
    y.i(0)?.mul_(2.0)?;
    let error = y.sum()?.backward().err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("backward of exp: a tensor saved for backward was changed in place"), "{error}");
    Ok(())
}

#[test]
fn memory_is_given_back() -> Result<()> {
    // A base knows its views' nodes and a view its base: no ring may come of it.
    let x = leaf(&[1.0; 64], &[64])?;
    let token = Arc::new(());
    let watch = |tensor: &Tensor| {
        let token = token.clone();
        tensor.register_hook(move |_| {
            let _ = &token;
            Ok(None)
        })
    };
    {
        let y = x.mul(2.0)?;
        watch(&y)?;
        let view = y.narrow(0, 0, 8)?;
        view.mul_(&y.narrow(0, 8, 8)?)?;
        watch(&view)?;
        let again = y.narrow(0, 4, 8)?;
        again.add_(&view)?;
        watch(&again)?;
        watch(&y)?;
        assert_eq!(Arc::strong_count(&token), 5);
    }
    assert_eq!(Arc::strong_count(&token), 1);
    Ok(())
}
