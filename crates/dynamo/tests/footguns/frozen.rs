//! Nothing of the first call is frozen into later ones: constants, branches, shapes, state, random numbers.

use std::cell::{Cell, RefCell};

use kiln_tensor::{DType, Result, Tensor, manual_seed};

use crate::lab::{CPU, as_eager, check, leaf, matrix, t};

#[test]
fn constants_are_not_frozen() -> Result<()> {
    let explanations = check(|lab| {
        let x = t(&[1.0, -2.0, 3.0]);
        for k in [2.0, 3.0, -1.0, f64::NAN, f64::INFINITY, 0.0, 1.0] {
            lab.see("product and sum", &lab.run(|| ((&x * k + k) / 2.0).ok())?)?;
            lab.see("full", &lab.run(|| Tensor::full([2, 2], k, &CPU))?)?;
        }
        Ok(())
    })?;
    for (_, explanation) in explanations {
        assert_eq!(explanation.recompiles.len(), 1, "{explanation}"); // the two programs
    }
    Ok(())
}

#[test]
fn integers_stay_integers() -> Result<()> {
    as_eager(|lab| {
        let x = Tensor::from_slice(&[1i64, -7, (1 << 60) + 1])?;
        for k in [3i64, -5, (1 << 53) + 1, i64::MAX] {
            let y = lab.run(|| Ok((x.add(k)?, x.mul(k)?, x.eq(k)?, x.sum()?)))?;
            lab.say("sums", format!("{:?}", y.0.to_vec::<i64>()?));
            lab.say("products", format!("{:?}", y.1.to_vec::<i64>()?));
            lab.say("equal", format!("{:?}", y.2.to_vec::<bool>()?));
            lab.say("sum", y.3.item::<i64>()?);
        }
        Ok(())
    })
}

#[test]
fn exponents_that_change_the_code() -> Result<()> {
    as_eager(|lab| {
        let x = leaf(&[0.5, 1.0, 2.5]);
        for k in [2.0, 3.0, 0.5, -0.5, -1.0, 1.0, 0.0, 1.7, 2.0, 2.2] {
            x.set_grad(None);
            lab.run(|| x.pow(k)?.sum()?.backward())?;
            lab.see_grad("gradient", &x)?;
        }
        Ok(())
    })
}

#[test]
fn branches_on_host_values_are_taken_anew() -> Result<()> {
    as_eager(|lab| {
        let x = t(&[1.0, 2.0]);
        for flag in [true, false, true, true, false] {
            lab.see("y", &lab.run(|| if flag { x.add(1.0) } else { x.mul(3.0) })?)?;
        }
        Ok(())
    })
}

#[test]
fn branches_on_elements_are_taken_anew() -> Result<()> {
    as_eager(|lab| {
        for first in [1.0, -1.0, 2.0, -3.0, 0.0] {
            let x = t(&[first, 2.0]);
            let y = lab.run(|| {
                let doubled = x.mul(2.0)?;
                if doubled.sum()?.item::<f32>()? > 4.0 { doubled.add(&x) } else { doubled.neg() }
            })?;
            lab.see("y", &y)?;
        }
        Ok(())
    })
}

#[test]
fn shapes_are_not_frozen() -> Result<()> {
    as_eager(|lab| {
        for n in [3, 5, 1, 0, 3, 8, 5] {
            let x = matrix(2, n);
            let y = lab.run(|| {
                let size = x.size(1)? as f64;
                ((&x * size).ok()?.sum_dim(0, true)? + &x).ok()
            })?;
            lab.see("y", &y)?;
        }
        Ok(())
    })
}

#[test]
fn dtypes_and_strides_are_not_frozen() -> Result<()> {
    as_eager(|lab| {
        let x = matrix(3, 3);
        let wide = matrix(3, 6);
        let inputs = [
            x.clone(),
            x.t()?,
            wide.slice(1, 0, 6, 2)?,
            x.select(0, 1)?.expand([3, 3])?,
            x.to_dtype(DType::F64)?,
        ];
        for _ in 0..2 {
            for x in &inputs {
                let y = lab.run(|| (x * 2.0 + 1.0).ok())?;
                lab.see("y", &y)?;
                lab.say("dtype", y.dtype());
            }
        }
        Ok(())
    })
}

#[test]
fn learning_rates_do_not_recompile() -> Result<()> {
    let explanations = check(|lab| {
        let (p, g) = (t(&[1.0, 2.0, 3.0]), t(&[0.1, -0.2, 0.3]));
        for step in 1..=1000 {
            let lr = 0.1 / f64::from(step);
            lab.run(|| p.add_scaled_(&g, -lr).map(drop))?;
        }
        lab.see("p", &p)
    })?;
    for (_, explanation) in explanations {
        assert!(explanation.recompiles.is_empty() && explanation.graphs.len() == 1, "{explanation}");
    }
    Ok(())
}

#[test]
fn train_and_eval() -> Result<()> {
    as_eager(|lab| {
        let x = matrix(4, 8);
        for training in [true, false, true, false] {
            let y = lab.run(|| {
                if training {
                    (x.mul(&Tensor::rand([4, 8], &CPU)?.gt(0.5)?)? * 2.0).ok()
                } else {
                    Ok(x.clone())
                }
            })?;
            lab.see("y", &y)?;
        }
        Ok(())
    })
}

#[test]
fn closure_state_changes_between_calls() -> Result<()> {
    as_eager(|lab| {
        let (scale, weights) = (Cell::new(1.0), RefCell::new(vec![t(&[1.0, 2.0])]));
        for round in 0..4 {
            let y = lab.run(|| {
                scale.set(scale.get() + 1.0);
                let mut y = t(&[1.0, 1.0]);
                for w in weights.borrow().iter() {
                    y = (y * w * scale.get()).ok()?;
                }
                Ok(y)
            })?;
            lab.see("y", &y)?;
            weights.borrow_mut().push(t(&[0.5, round as f32]));
        }
        // Replaced by another tensor of the same type: it is the new one that counts.
        weights.borrow_mut().truncate(1);
        for k in 0..3 {
            weights.borrow_mut()[0] = t(&[k as f32, 7.0]);
            lab.see("y", &lab.run(|| weights.borrow()[0].add(1.0))?)?;
        }
        Ok(())
    })
}

#[test]
fn the_random_stream_goes_on_as_in_eager() -> Result<()> {
    as_eager(|lab| {
        let body = || {
            let (a, b) = (Tensor::rand([7], &CPU)?, Tensor::rand([7], &CPU)?);
            Ok((a, b, Tensor::randn([3, 3], &CPU)?, Tensor::uniform([5], -1.0, 2.0, &CPU)?))
        };
        for seed in [1, 1, 2] {
            manual_seed(seed);
            for _ in 0..2 {
                let (a, b, c, d) = lab.run(body)?;
                assert_ne!(a.to_vec::<f32>()?, b.to_vec::<f32>()?);
                for x in [a, b, c, d] {
                    lab.see("inside", &x)?;
                }
            }
            lab.see("after", &Tensor::rand([4], &CPU)?)?;
        }
        // Half-way, too: a break must not take numbers twice.
        let y = lab.run(|| {
            let a = Tensor::rand_of([5], DType::F64, &CPU)?;
            let scale = a.sum()?.item::<f64>()?;
            (Tensor::randn([5], &CPU)? * scale + &a).ok()
        })?;
        lab.see("with a break", &y)?;
        lab.see("integers", &lab.run(|| Tensor::randint(-3, 9, [20], &CPU))?)
    })
}
