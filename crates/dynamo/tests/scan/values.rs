//! What scans compute, beside loops that are written by hand.

use kiln_dynamo::{Compile, Scan, compile, scan, while_loop};
use kiln_tensor::{DType, Device, Result, Tensor, no_grad};

/// A cell as users write it.
pub fn cell(h: &Tensor, x: &Tensor, w: &Tensor, u: &Tensor, b: &Tensor) -> Result<Tensor> {
    h.matmul(w)?.add(&x.matmul(u)?)?.add(b)?.tanh()
}

pub struct Weights {
    pub w: Tensor,
    pub u: Tensor,
    pub b: Tensor,
}

/// Elements that look random and are the same in every test, whatever other tests draw meanwhile.
pub fn elements(shape: &[usize], seed: usize, dtype: DType) -> Result<Tensor> {
    let count = shape.iter().product::<usize>();
    let angles = Tensor::arange(0, count as i64, DType::F64)?.add(seed as f64)?.square()?;
    angles.mul(1.7)?.sin()?.reshape(shape)?.to_dtype(dtype)
}

pub fn weights(dtype: DType) -> Result<Weights> {
    let make = |shape: &[usize], seed| elements(shape, seed, DType::F64)?.mul(0.6)?.to_dtype(dtype);
    Ok(Weights { w: make(&[4, 4], 1)?, u: make(&[3, 4], 2)?, b: make(&[4], 3)? })
}

pub fn sequence(length: usize, dtype: DType) -> Result<(Tensor, Tensor)> {
    Ok((elements(&[2, 4], length, dtype)?, elements(&[length, 2, 3], length + 4, dtype)?))
}

fn by_scan(h: &Tensor, xs: &Tensor, p: &Weights) -> Result<(Tensor, Tensor)> {
    scan(h, xs, |h, x| {
        let h = cell(&h, &x, &p.w, &p.u, &p.b)?;
        Ok((h.clone(), h))
    })
}

fn by_hand(h: &Tensor, xs: &Tensor, p: &Weights) -> Result<(Tensor, Vec<Tensor>)> {
    let (mut h, mut ys) = (h.clone(), Vec::new());
    for x in xs {
        h = cell(&h, &x?, &p.w, &p.u, &p.b)?;
        ys.push(h.clone());
    }
    Ok((h, ys))
}

fn same(a: &Tensor, b: &Tensor, what: &str) -> Result<()> {
    assert_eq!(a.ty(), b.ty(), "{what}");
    let tolerance = match a.dtype() {
        DType::F64 => 1e-14,
        DType::F32 => 1e-6,
        _ => 0.0,
    };
    let (a, b) = (a.to_dtype(DType::F64)?.to_vec::<f64>()?, b.to_dtype(DType::F64)?.to_vec::<f64>()?);
    for (a, b) in a.iter().zip(&b) {
        assert!((a - b).abs() <= tolerance * b.abs().max(1.0), "{what}: {a} is not {b}");
    }
    Ok(())
}

#[test]
fn a_scan_is_the_loop_that_is_written_by_hand() -> Result<()> {
    let _mode = no_grad();
    let compiled = compile(|h: &Tensor, xs: &Tensor, w: &Weights| by_scan(h, xs, w));
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let p = weights(dtype)?;
        for length in [0, 1, 2, 7] {
            let (h, xs) = sequence(length, dtype)?;
            let (want, ys) = by_hand(&h, &xs, &p)?;
            for (what, (last, stacked)) in
                [("eager", by_scan(&h, &xs, &p)?), ("compiled", compiled(&h, &xs, &p)?)]
            {
                let what = format!("{what} {dtype} {length}");
                same(&last, &want, &what)?;
                assert_eq!(stacked.shape()[..], [length, 2, 4]);
                for (t, y) in ys.iter().enumerate() {
                    same(&stacked.select(0, t as i64)?, y, &what)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn backwards_and_without_elements() -> Result<()> {
    let xs = Tensor::from_slice(&[1.0f64, 2.0, 3.0])?;
    let zero = Tensor::full((), 0.0, (DType::F64, Device::Cpu))?;
    let step = |sum: Tensor, x: Tensor| {
        let sum = sum.mul(10.0)?.add(&x)?;
        Ok((sum.clone(), sum))
    };
    let (last, sums) = Scan::new().reverse().run(&zero, &xs, step)?;
    assert_eq!(sums.to_vec::<f64>()?, [321.0, 32.0, 3.0]);
    assert_eq!(last.item::<f64>()?, 321.0);
    let (last, ()) = Scan::new().length(4).run(&zero, &(), |x, ()| Ok((x.add(1.5)?, ())))?;
    assert_eq!(last.item::<f64>()?, 6.0);
    Ok(())
}

#[test]
fn views_and_strides() -> Result<()> {
    let _mode = no_grad();
    let p = weights(DType::F32)?;
    let (h, _) = sequence(1, DType::F32)?;
    // Batch first, every other step, backwards in memory, and one element for all steps.
    let whole = elements(&[2, 12, 3], 8, DType::F32)?;
    let thin = elements(&[2, 3], 9, DType::F32)?.unsqueeze(0)?.expand([5, 2, 3])?;
    let turned = elements(&[3, 2, 6], 10, DType::F32)?.permute([2, 1, 0])?;
    let wt = Weights { w: p.w.t()?.contiguous()?.t()?, u: p.u.clone(), b: p.b.clone() };
    for xs in [whole.transpose(0, 1)?, whole.transpose(0, 1)?.narrow(0, 3, 5)?, thin, turned] {
        for p in [&p, &wt] {
            let (want, _) = by_hand(&h, &xs, p)?;
            same(&by_scan(&h, &xs, p)?.0, &want, "strides")?;
            let compiled = compile(|h: &Tensor, xs: &Tensor| by_scan(h, xs, p));
            same(&compiled(&h, &xs)?.0, &want, "compiled strides")?;
        }
    }
    Ok(())
}

/// Carries of several types, structures, what is given unchanged, and results that are the same tensor.
#[test]
fn structures_of_several_types() -> Result<()> {
    let xs = Tensor::arange(0, 5, DType::I64)?;
    let weights = Tensor::from_slice(&[0.5f32, 1.0, 1.5, 2.0, 2.5])?;
    let run = || -> Result<Vec<Vec<f64>>> {
        let count = Tensor::full((), 0, (DType::I64, Device::Cpu))?;
        let sum = Tensor::full([2], 0.0, (DType::F32, Device::Cpu))?;
        let wide = Tensor::full([1], 1.0, (DType::F64, Device::Cpu))?;
        let same = Tensor::full([3], 7.0, (DType::F32, Device::Cpu))?;
        let init = ((count, sum), vec![wide, same]);
        let ((a, b), c) =
            scan(&init, &[xs.to_dtype(DType::F32)?, weights.clone()], |((count, sum), rest), [x, w]| {
                let next = count.add(1)?;
                let total = sum.add(&x.mul(&w)?)?.add(&next.to_dtype(DType::F32)?)?;
                let wide = rest[0].mul(2.0)?.add(&total.sum()?.to_dtype(DType::F64)?)?;
                Ok((
                    ((next, total.clone()), vec![wide, rest[1].clone()]),
                    (Some(total), (x, count.clone(), count)),
                ))
            })
            .map(|((carries, rest), (given, (x, count, again)))| {
                ((carries, rest), vec![given, Some(x), Some(count), Some(again), None])
            })?;
        let all = [a.0, a.1].into_iter().chain(b).chain(c.into_iter().flatten());
        all.map(|t| t.to_dtype(DType::F64)?.to_vec::<f64>()).collect()
    };
    let want = {
        let (mut count, mut sum, mut wide) = (0.0, 0.0, 1.0);
        let (mut totals, mut counts) = (Vec::new(), Vec::new());
        for i in 0..5 {
            counts.push(count);
            count += 1.0;
            sum += f64::from(i) * (0.5 + 0.5 * f64::from(i)) + count;
            wide = wide * 2.0 + 2.0 * sum;
            totals.extend([sum, sum]);
        }
        let xs = vec![0.0, 1.0, 2.0, 3.0, 4.0];
        vec![vec![count], vec![sum; 2], vec![wide], vec![7.0; 3], totals, xs, counts.clone(), counts]
    };
    assert_eq!(run()?, want);
    assert_eq!(compile(run)()?, want);
    Ok(())
}

#[test]
fn a_scan_in_a_scan() -> Result<()> {
    let xs = Tensor::arange(0, 6, DType::F64)?.reshape([2, 3])?;
    let run = |xs: &Tensor| {
        let zero = Tensor::full((), 1.0, (DType::F64, Device::Cpu))?;
        scan(&zero, xs, |outer, row| {
            let (inner, steps) = scan(&outer, &row, |inner, x| {
                let next = inner.mul(0.5)?.add(&x.mul(&outer)?)?;
                Ok((next.clone(), next))
            })?;
            Ok((inner, steps))
        })
    };
    let (mut outer, mut want) = (1.0, Vec::new());
    for row in [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] {
        let mut inner: f64 = outer;
        for x in row {
            inner = inner * 0.5 + x * outer;
            want.push(inner);
        }
        outer = inner;
    }
    let compiled = compile(run);
    for (last, steps) in [run(&xs)?, compiled(&xs)?, compiled(&xs)?] {
        assert_eq!(steps.shape()[..], [2, 3]);
        assert_eq!(steps.to_vec::<f64>()?, want);
        assert_eq!(last.item::<f64>()?, outer);
    }
    Ok(())
}

/// Numbers are operands: another one needs no other body, and is never a stale one.
#[test]
fn numbers_change_from_call_to_call() -> Result<()> {
    use std::cell::Cell;
    let (rate, times) = (Cell::new(0.5), Cell::new(3i64));
    let f = compile(|xs: &Tensor| {
        let init = Tensor::full([2], 1.0, (DType::F64, Device::Cpu))?;
        let (last, ()) = scan(&init, xs, |w, x| {
            let step = w.mul(&x)?.mul(rate.get())?.add(times.get())?;
            Ok((w.sub(&step)?, ()))
        })?;
        Ok(last)
    });
    let xs = Tensor::from_slice(&[1.0f64, 2.0, 3.0])?;
    for (r, n) in [(0.5, 3), (0.25, 3), (0.125, -7), (2.0, 0)] {
        rate.set(r);
        times.set(n);
        let mut want = 1.0;
        for x in [1.0, 2.0, 3.0] {
            want -= want * x * r + n as f64;
        }
        assert_eq!(f(&xs)?.to_vec::<f64>()?, [want; 2]);
    }
    assert_eq!(f.explain().graphs.len(), 1, "{}", f.explain());
    Ok(())
}

#[test]
fn any_number_of_steps_is_one_graph() -> Result<()> {
    let p = weights(DType::F32)?;
    let f = Compile::new().function(|h: &Tensor, xs: &Tensor| by_scan(h, xs, &p));
    let _mode = no_grad();
    for length in (3..23).chain([1, 64]) {
        let (h, xs) = sequence(length, DType::F32)?;
        let (last, _) = f(&h, &xs)?;
        same(&last, &by_hand(&h, &xs, &p)?.0, &length.to_string())?;
    }
    let explanation = f.explain();
    assert!(explanation.recompiles.len() <= 2, "{explanation}");
    assert!(explanation.breaks.is_empty(), "{explanation}");
    Ok(())
}

/// What a body computes from what it captured alone is computed once; what it makes it may change.
#[test]
fn what_is_the_same_in_every_step() -> Result<()> {
    let w = Tensor::from_slice(&[1.0f64, 2.0, 3.0, 4.0])?.reshape([2, 2])?;
    let run = |xs: &Tensor| {
        let zero = Tensor::zeros([2], (DType::F64, Device::Cpu))?;
        scan(&zero, xs, |h, x| {
            let fresh = h.add(&x)?;
            fresh.narrow(0, 0, 1)?.mul_(10.0)?;
            let doubled = w.mul(2.0)?.t()?.sum_dim(0, false)?;
            Ok((fresh.add(&doubled)?, w.t()?))
        })
    };
    let xs = Tensor::from_slice(&[1.0f64, 2.0])?;
    let compiled = compile(run);
    for (last, stacked) in [run(&xs)?, compiled(&xs)?] {
        let (mut a, mut b) = (0.0, 0.0);
        for x in [1.0, 2.0] {
            (a, b) = ((a + x) * 10.0 + 6.0, b + x + 14.0);
        }
        assert_eq!(last.to_vec::<f64>()?, [a, b]);
        assert_eq!(stacked.to_vec::<f64>()?, [1.0, 3.0, 2.0, 4.0, 1.0, 3.0, 2.0, 4.0]);
    }
    Ok(())
}

#[test]
fn a_loop_with_a_bound() -> Result<()> {
    let newton = |a: &Tensor| {
        let counter = Tensor::full((), 0, (DType::I64, Device::Cpu))?;
        let condition = |(x, _): (Tensor, Tensor)| x.square()?.sub(a)?.abs()?.amax()?.gt(1e-12);
        while_loop(&(a.clone(), counter), 50, condition, |(x, n)| {
            Ok((x.add(&a.div(&x)?)?.mul(0.5)?, n.add(1)?))
        })
    };
    let a = Tensor::from_slice(&[2.0f64, 9.0, 1e4])?;
    let compiled = compile(newton);
    for (root, steps) in [newton(&a)?, compiled(&a)?] {
        for (root, want) in root.to_vec::<f64>()?.iter().zip([2f64.sqrt(), 3.0, 100.0]) {
            assert!((root - want).abs() < 1e-12);
        }
        let steps = steps.item::<i64>()?;
        assert!((5..30).contains(&steps), "{steps}");
    }
    // Not once, and not more often than allowed.
    let x = Tensor::from_slice(&[1.0f32])?;
    let run = |limit| while_loop(&x, limit, |x| x.sum()?.lt(1e6), |x| x.mul(2.0));
    assert_eq!(run(0)?.to_vec::<f32>()?, [1.0]);
    assert_eq!(run(3)?.to_vec::<f32>()?, [8.0]);
    assert_eq!(while_loop(&x, 9, |x| x.sum()?.lt(0.0), |x| x.mul(2.0))?.to_vec::<f32>()?, [1.0]);
    Ok(())
}

/// A compiled function in a body is part of it; a body without carries is a map.
#[test]
fn compiled_functions_in_a_body() -> Result<()> {
    let twice = compile(|x: &Tensor| x.mul(2.0));
    let map = |xs: &Tensor| scan(&(), xs, |(), x| Ok(((), twice(&x)?.add(1.0)?)));
    let xs = Tensor::from_slice(&[1.0f64, 2.0, 3.0])?;
    let compiled = compile(map);
    for ((), mapped) in [map(&xs)?, compiled(&xs)?] {
        assert_eq!(mapped.to_vec::<f64>()?, [3.0, 5.0, 7.0]);
    }
    Ok(())
}

#[test]
fn threads_scan_at_once() -> Result<()> {
    let p = weights(DType::F64)?;
    let (h, xs) = sequence(9, DType::F64)?;
    let want = by_scan(&h, &xs, &p)?.1.to_vec::<f64>()?;
    std::thread::scope(|scope| {
        let one = || {
            for _ in 0..20 {
                let got = by_scan(&h, &xs, &p).and_then(|(_, ys)| ys.to_vec::<f64>());
                assert!(got.is_ok_and(|got| got == want));
            }
        };
        let all = [scope.spawn(one), scope.spawn(one), scope.spawn(one)];
        all.into_iter().for_each(|thread| assert!(thread.join().is_ok()));
    });
    Ok(())
}

/// A program with a scan is a text like any other, and what it says is checked as for any other.
#[test]
fn a_scan_is_text() -> Result<()> {
    let body = r#""graph(%0: f32[2], %1: f32[2], %2: float) { %3 = mul(%0, %2) : f32[2] %4 = add(%3, %1) : f32[2] return %4, %4 }""#;
    let text = |length: usize| {
        format!(
            "h: f32[2] leaf
xs: f32[{length}, 2]
rate: f64[]
flat = scan(h, xs, rate) {{body: {body}, carries: 1, inputs: 1, length: {length}, dtype: f32, order: forward, saves: false}}
loss = sum(flat) {{dims: [0], keepdim: false}}
g, = grad(loss of h)
live flat, g
data rate 0.5"
        )
    };
    let case = kiln_repro::Case::from_text(&text(4), &[])?;
    let (again, beside) = case.to_text()?;
    assert!(again.contains("%3 = mul(%0, %2)"), "{again}");
    assert_eq!(kiln_dynamo::reproduce(&case)?, None);
    assert_eq!(kiln_dynamo::reproduce(&kiln_repro::Case::from_text(&again, &beside)?)?, None);
    Ok(())
}
