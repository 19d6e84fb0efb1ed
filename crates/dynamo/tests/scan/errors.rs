//! What a scan's body can't do, and how it is told.

use kiln_dynamo::{Scan, compile, scan, while_loop};
use kiln_tensor::{DType, Device, GradOptions, Result, Tensor, grad};

fn refused<T>(result: Result<T>, parts: &[&str]) {
    let text = match result {
        Ok(_) => panic!("not refused"),
        Err(error) => error.to_string(),
    };
    for part in parts.iter().chain(&["errors.rs:"]) {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
}

#[test]
fn what_a_body_can_not_do() -> Result<()> {
    let h = Tensor::ones([3], &Device::Cpu)?;
    let xs = Tensor::ones([4, 3], &Device::Cpu)?;
    let w = Tensor::ones([3], &Device::Cpu)?;
    let all = || -> Result<()> {
        refused(scan(&h, &xs, |h, x| Ok((h.add_(&x)?.clone(), ()))), &["add_", "in place"]);
        refused(scan(&h, &xs, |h, x| Ok((h, x.narrow(0, 0, 1)?.zero_()?.clone()))), &["in place"]);
        refused(
            scan(&h, &xs, |h, _| {
                w.mul_(2.0)?;
                Ok((h, ()))
            }),
            &["mul_", "in place"],
        );
        refused(
            scan(&h, &xs, |h, x| {
                x.sum()?.item::<f32>()?;
                Ok((h, ()))
            }),
            &["item", "no values"],
        );
        refused(
            scan(&h, &xs, |h, x| {
                x.sum()?.backward()?;
                Ok((h, ()))
            }),
            &["backward"],
        );
        refused(
            scan(&h, &xs, |h, x| {
                grad(&[&x.sum()?], &[&x], &[], GradOptions::default())?;
                Ok((h, ()))
            }),
            &["grad"],
        );
        refused(
            scan(&h, &xs, |h, _| Ok((h.add(&Tensor::rand([3], &Device::Cpu)?)?, ()))),
            &["random numbers"],
        );
        refused(scan(&h, &xs, |h, _| Ok((h.sum()?, ()))), &["f32[3] before a step", "f32[] after"]);
        refused(scan(&h, &xs, |h, _| Ok((h.to_dtype(DType::F64)?, ()))), &["f64[3] after"]);
        refused(scan(&h, &xs, |h, x| Ok((h.matmul(&x.reshape([1, 3])?)?, ()))), &["matmul"]);
        refused(
            scan(&vec![h.clone()], &xs, |h, _| Ok((Vec::from([h[0].clone(), h[0].clone()]), ()))),
            &["carry"],
        );
        refused(scan(&h, &(), |h, ()| Ok((h, ()))), &["length"]);
        refused(Scan::new().length(3).run(&h, &xs, |h, _| Ok((h, ()))), &["3", "4"]);
        refused(scan(&h, &Tensor::full((), 1.0, &Device::Cpu)?, |h, _| Ok((h, ()))), &["scan", "dims"]);
        refused(
            Scan::new().length(usize::MAX).run(&h, &(), |h, ()| Ok((h.clone(), h))),
            &["too many elements"],
        );
        refused(while_loop(&h, 3, |h| h.gt(1.0), |h| h.add(1.0)), &["while_loop", "condition"]);
        refused(while_loop(&h, 3, |h| h.sum()?.gt(1.0), |h| h.sum()), &["while_loop", "before a step"]);
        Ok(())
    };
    all()?;
    compile(all)()?;
    // Nothing was changed by what was refused.
    for tensor in [&h, &w] {
        assert_eq!(tensor.to_vec::<f32>()?, [1.0; 3]);
    }
    Ok(())
}

#[test]
fn an_index_out_of_range_is_told_where_the_scan_is() -> Result<()> {
    let table = Tensor::ones([3, 2], &Device::Cpu)?;
    let zero = Tensor::zeros([2], &Device::Cpu)?;
    let run = |indices: &Tensor| {
        scan(&zero, indices, |sum, i| Ok((sum.add(&table.index_select(0, &i)?.sum_dim(0, false)?)?, ())))
    };
    let indices = |last: i64| Tensor::from_slice(&[0, 1, last])?.reshape([3, 1]);
    assert_eq!(run(&indices(2)?)?.0.to_vec::<f32>()?, [3.0; 2]);
    refused(run(&indices(5)?), &["index 5", "size 3"]);
    let compiled = compile(run);
    assert_eq!(compiled(&indices(2)?)?.0.to_vec::<f32>()?, [3.0; 2]);
    refused(compiled(&indices(5)?), &["index 5", "size 3"]);
    Ok(())
}

/// A tensor of the body has no value after it, and says so.
#[test]
fn what_leaves_a_body_by_the_back_door() -> Result<()> {
    let kept = std::cell::RefCell::new(None);
    let h = Tensor::ones([3], &Device::Cpu)?;
    let (last, ()) = Scan::new().length(2).run(&h, &(), |h, ()| {
        let next = h.add(1.0)?;
        *kept.borrow_mut() = Some(next.clone());
        Ok((next, ()))
    })?;
    assert_eq!(last.to_vec::<f32>()?, [3.0; 3]);
    let kept = kept.take().map(|tensor| tensor.to_vec::<f32>());
    assert!(kept.is_some_and(|values| values.is_err()));
    Ok(())
}
