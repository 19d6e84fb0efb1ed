//! Memory: results of their own, aliases, changes in place, state kept across calls.

use kiln_dynamo::Compile;
use kiln_tensor::{Result, Tensor, TensorList, foreach};

use crate::lab::{CPU, as_eager, leaf, matrix, t};

#[test]
fn results_keep_their_values_when_called_again() -> Result<()> {
    as_eager(|lab| {
        let mut kept = Vec::new();
        for k in 0..4 {
            let x = t(&[k as f32, 1.0, 2.0]);
            let (a, b) = lab.run(|| Ok((x.mul(2.0)?, x.exp()?.sum()?)))?;
            kept.extend([a, b]);
        }
        kept.iter().try_for_each(|y| lab.see("kept", y))
    })
}

#[test]
fn results_have_memory_of_their_own() -> Result<()> {
    as_eager(|lab| {
        let x = t(&[1.0, 2.0, 3.0]);
        for _ in 0..2 {
            let (a, b, c, d) =
                lab.run(|| Ok((x.clone_tensor()?, x.clone_tensor()?, x.mul(1.0)?, x.detach()?.add(0.0)?)))?;
            a.add_(1.0)?;
            b.mul_(5.0)?;
            c.zero_()?;
            d.sub_(1.0)?;
            for y in [&a, &b, &c, &d, &x] {
                lab.see("y", y)?;
            }
        }
        Ok(())
    })
}

#[test]
fn results_that_share_memory_still_do() -> Result<()> {
    as_eager(|lab| {
        let x = matrix(2, 3);
        for _ in 0..2 {
            let (y, row, flat, view) = lab.run(|| {
                let y = x.mul(2.0)?;
                Ok((y.clone(), y.select(0, 1)?, y.flatten()?, x.t()?))
            })?;
            row.fill_(9.0)?;
            view.slice(0, 0, 1, 1)?.add_(1.0)?;
            for z in [&y, &row, &flat, &x, &view] {
                lab.see("z", z)?;
            }
        }
        Ok(())
    })
}

#[test]
fn contiguous_is_the_same_tensor_where_it_can_be() -> Result<()> {
    as_eager(|lab| {
        let x = matrix(2, 3);
        for _ in 0..2 {
            let (y, z) = lab.run(|| {
                let y = x.mul(2.0)?;
                y.contiguous()?.add_(1.0)?;
                let z = y.t()?;
                z.contiguous()?.add_(100.0)?;
                Ok((y, z))
            })?;
            lab.see("y", &y)?;
            lab.see("z", &z)?;
            x.t()?.contiguous()?.add_(1.0)?;
            lab.run(|| x.contiguous()?.add_(1.0).map(drop))?;
            lab.see("x", &x)?;
        }
        Ok(())
    })
}

#[test]
fn one_tensor_passed_twice() -> Result<()> {
    as_eager(|lab| {
        let f = |a: &Tensor, b: &Tensor| {
            a.add_(1.0)?;
            (a * b).ok()
        };
        let (x, y) = (t(&[1.0, 2.0]), t(&[3.0, 4.0]));
        for (a, b) in [(&x, &y), (&x, &x), (&y, &x), (&y, &y), (&x, &x)] {
            lab.see("product", &lab.run(|| f(a, b))?)?;
            lab.see("x", &x)?;
            lab.see("y", &y)?;
        }
        Ok(())
    })
}

#[test]
fn two_views_of_one_storage() -> Result<()> {
    as_eager(|lab| {
        let base = t(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let (a, b) = (base.slice(0, 0, 4, 1)?, base.slice(0, 2, 6, 1)?);
        for round in 0..3 {
            lab.see("read", &lab.run(|| (&a * &b + &base.slice(0, 1, 5, 1)?).ok())?)?;
            lab.see("written first", &lab.run(|| a.add_(1.0)?.mul(&b))?)?;
            lab.see(
                "written last",
                &lab.run(|| {
                    let y = b.mul(2.0)?;
                    a.copy_(&y)?;
                    (&y + &b).ok()
                })?,
            )?;
            // The second view arrives with the op that writes through a view of the first.
            lab.see(
                "arriving",
                &lab.run(|| {
                    let inner = a.slice(0, 1, 4, 1)?;
                    inner.add_(&b.slice(0, 0, 3, 1)?)?;
                    b.mul(1.0)
                })?,
            )?;
            let outside = b.slice(0, 0, 3, 1)?;
            lab.see(
                "arriving by itself",
                &lab.run(|| {
                    let inner = a.slice(0, 1, 4, 1)?;
                    inner.add_(&outside)?;
                    b.mul(1.0)
                })?,
            )?;
            lab.see(
                "list",
                &lab.run(|| {
                    foreach::add_(&TensorList::new(vec![a.clone(), b.clone()]), 1.0)?;
                    a.add(&b)
                })?,
            )?;
            lab.see("base", &base)?;
            // The same program on views that do not share.
            let (a, b) = (t(&[round as f32; 4]), t(&[1.0, 2.0, 3.0, 4.0]));
            lab.see("apart", &lab.run(|| a.add_(1.0)?.mul(&b))?)?;
        }
        Ok(())
    })
}

#[test]
fn the_base_is_written_and_an_outer_view_read() -> Result<()> {
    as_eager(|lab| {
        let base = matrix(3, 4);
        let column = base.select(1, 2)?;
        for _ in 0..3 {
            lab.see(
                "y",
                &lab.run(|| {
                    base.mul_(2.0)?;
                    column.add(1.0)
                })?,
            )?;
            lab.see(
                "z",
                &lab.run(|| {
                    column.add_(1.0)?;
                    base.sum()
                })?,
            )?;
            lab.see(
                "both",
                &lab.run(|| {
                    let before = column.mul(1.0)?;
                    base.t()?.slice(0, 2, 3, 1)?.zero_()?;
                    (&before + &column).ok()
                })?,
            )?;
            lab.see("base", &base)?;
        }
        Ok(())
    })
}

#[test]
fn a_view_of_an_input_is_changed() -> Result<()> {
    as_eager(|lab| {
        let x = matrix(4, 5);
        for _ in 0..3 {
            let y = lab.run(|| {
                let before = x.sum()?;
                x.select(0, 1)?.mul_(2.0)?;
                let row = x.slice(0, 2, 4, 1)?;
                row.t()?.slice(0, 0, 2, 1)?.add_(&t(&[1.0, 2.0]))?;
                x.flatten()?.slice(0, 0, 20, 7)?.fill_(-1.0)?;
                (&x.sum()? - &before + &row).ok()
            })?;
            lab.see("y", &y)?;
            lab.see("x", &x)?;
        }
        Ok(())
    })
}

#[test]
fn inputs_change_places() -> Result<()> {
    as_eager(|lab| {
        let (a, b, c) = (t(&[1.0, 2.0, 3.0]), t(&[4.0, 5.0, 6.0]), t(&[7.0, 8.0, 9.0]));
        let square = matrix(3, 3);
        for _ in 0..3 {
            lab.run(|| {
                let first = a.clone_tensor()?;
                a.copy_(&b)?;
                b.copy_(&c)?;
                c.copy_(&first)?;
                square.copy_(&square.t()?)?;
                square.slice(0, 0, 2, 1)?.copy_(&square.slice(0, 1, 3, 1)?)?;
                square.add_(&square.sum_dim(1, true)?)?;
                Ok(())
            })?;
            for x in [&a, &b, &c, &square] {
                lab.see("x", x)?;
            }
        }
        Ok(())
    })
}

#[test]
fn host_writes_between_ops_are_in_order() -> Result<()> {
    as_eager(|lab| {
        let x = t(&[1.0, 2.0]);
        for k in 0..3 {
            let (y, z, w) = lab.run(|| {
                let y = x.mul(2.0)?;
                x.write_slice(&[k as f32, 10.0])?;
                let z = x.mul(2.0)?;
                x.add_(1.0)?;
                let seen = x.to_vec::<f32>()?;
                x.add_(f64::from(seen[0]))?;
                Ok((y, z, x.mul(1.0)?))
            })?;
            for v in [&y, &z, &w, &x] {
                lab.see("v", v)?;
            }
        }
        Ok(())
    })
}

#[test]
fn state_kept_across_calls() -> Result<()> {
    as_eager(|lab| {
        let w = matrix(4, 4);
        let mut h = Tensor::zeros([4], &CPU)?;
        let mut history = Vec::new();
        for step in 0..10 {
            let x = t(&[step as f32, 1.0, -1.0, 0.5]);
            h = lab.run(|| (h.linear(&w, None)? + &x).tanh().ok())?;
            history.push(h.clone());
        }
        history.iter().try_for_each(|h| lab.see("h", h))
    })
}

#[test]
fn results_outlive_their_region() -> Result<()> {
    as_eager(|lab| {
        let kept = {
            let region = Compile::new().region();
            let w = leaf(&[1.0, 2.0]);
            let y = if lab.region.is_some() { region.run(|| (&w * 3.0).ok())? } else { (&w * 3.0).ok()? };
            (w, y)
        };
        lab.see("y", &kept.1)?;
        kept.1.sum()?.backward()?;
        lab.see_grad("w", &kept.0)
    })
}

#[test]
fn one_tensor_in_two_regions() -> Result<()> {
    as_eager(|lab| {
        let other = Compile::new().region();
        let x = t(&[1.0, 2.0]);
        for _ in 0..3 {
            let y = lab.run(|| x.add_(1.0)?.mul(2.0))?;
            let z = if lab.region.is_some() {
                other.run(|| x.mul_(3.0)?.add(&y))?
            } else {
                x.mul_(3.0)?.add(&y)?
            };
            lab.see("z", &lab.run(|| z.sub(&x))?)?;
            lab.see("x", &x)?;
        }
        Ok(())
    })
}

#[test]
fn lists_whose_elements_share_memory() -> Result<()> {
    as_eager(|lab| {
        let x = matrix(3, 3);
        for _ in 0..2 {
            lab.run(|| {
                // Eager goes element by element: the second sees what the first wrote.
                foreach::add_(&Tensor::list([&x, &x.t()?]), &Tensor::list([&x.t()?, &x]))?;
                let (y, z) = (x.mul(0.5)?, x.mul(0.25)?);
                foreach::mul_(&Tensor::list([&y, &z]), &Tensor::list([&z, &y]))?;
                x.copy_(&z)?;
                Ok(())
            })?;
            lab.see("x", &x)?;
        }
        Ok(())
    })
}

#[test]
fn empty_and_0d_tensors() -> Result<()> {
    as_eager(|lab| {
        let (empty, number) = (Tensor::zeros([2, 0, 3], &CPU)?, Tensor::full([0; 0], 2.0, &CPU)?);
        for _ in 0..2 {
            let results = lab.run(|| {
                empty.add_(1.0)?;
                number.mul_(2.0)?;
                Ok([
                    empty.sum()?,
                    empty.mean_dim(-1, true)?,
                    empty.sum_dim(1, false)?,
                    (&number + &empty).ok()?,
                    number.exp()?,
                ])
            })?;
            for y in &results {
                lab.see("y", y)?;
            }
            lab.outcome("size", lab.run(|| number.size(0)));
        }
        lab.see("number", &number)
    })
}

#[test]
fn a_window_lies_over_what_surrounds_it() -> Result<()> {
    as_eager(|lab| {
        let x = matrix(4, 4);
        for _ in 0..2 {
            let (sums, patched) = lab.run(|| {
                let y = x.t()?;
                let sums = y.sum_dim(-1, true)?;
                Ok((sums, y.slice_scatter(&y.narrow(0, 0, 1)?.neg()?, 0, 1, 2, 1)?))
            })?;
            lab.see("sums", &sums)?;
            lab.see("patched", &patched)?;
        }
        Ok(())
    })
}

#[test]
fn an_input_written_through_a_reshaped_view_by_a_library_step() -> Result<()> {
    as_eager(|lab| {
        let x = Tensor::from_slice(&[2i64, 0, 1])?;
        let on = Tensor::from_slice(&[true])?;
        for _ in 0..3 {
            let picked = lab.run(|| {
                let row = x.unsqueeze(0)?;
                row.copy_(&on.sub(&x)?)?;
                x.gather(0, &x.gt(0)?.to_dtype(kiln_tensor::DType::I64)?)
            })?;
            lab.see("picked", &picked)?;
            lab.see("written", &x)?;
        }
        Ok(())
    })
}
