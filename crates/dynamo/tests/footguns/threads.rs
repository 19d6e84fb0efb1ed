//! Regions in regions, recursion and threads.

use std::sync::Barrier;

use kiln_dynamo::{Backend, Compile};
use kiln_tensor::{Error, Result, Tensor};

use crate::lab::{CPU, Lab, as_eager, matrix, t, turn};

#[test]
fn nested_regions() -> Result<()> {
    as_eager(|lab| {
        let inner = Compile::new().region();
        let x = t(&[1.0, 2.0]);
        for k in [1.0, 2.0] {
            let y = lab.run(|| {
                let y = inner.run(|| x.add_(k)?.mul(2.0))?;
                inner.run(|| (&y + &x).ok())
            })?;
            lab.see("y", &y)?;
        }
        lab.see("alone", &inner.run(|| x.mul(2.0))?)
    })
}

#[test]
fn recursion() -> Result<()> {
    fn power(lab: &Lab, x: &Tensor, n: usize) -> Result<Tensor> {
        lab.run(|| if n == 0 { Tensor::ones([2], &CPU) } else { (x * &power(lab, x, n - 1)?).ok() })
    }
    as_eager(|lab| {
        let x = t(&[1.5, 2.0]);
        for n in [3, 0, 5, 3] {
            lab.see("power", &power(lab, &x, n)?)?;
        }
        Ok(())
    })
}

#[test]
fn two_threads_in_one_region() -> Result<()> {
    let _turn = turn();
    for &backend in Backend::ALL {
        let region = Compile::new().backend(backend).region();
        let (w, shared) = (matrix(4, 4), matrix(2, 4));
        let want: Vec<f32> = shared.linear(&w, None)?.tanh()?.to_vec()?;
        let meet = Barrier::new(2);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (region, w, shared, want, meet) = (&region, &w, &shared, &want, &meet);
                scope.spawn(move || {
                    let own = t(&[thread as f32; 4]);
                    let views = (own.slice(0, 0, 3, 1).unwrap(), own.slice(0, 1, 4, 1).unwrap());
                    for round in 0..50 {
                        meet.wait();
                        let y = region.run(|| shared.linear(w, None)?.tanh()).unwrap();
                        assert_eq!(&y.to_vec::<f32>().unwrap(), want, "{backend}, round {round}");
                        let (a, b) = region
                            .run(|| {
                                own.add_(1.0)?;
                                let first = own.to_vec::<f32>()?[0];
                                (&own * w).ok()?;
                                Ok::<_, Error>((first, views.1.mul(1.0)?))
                            })
                            .unwrap();
                        let expected = thread as f32 + round as f32 + 1.0;
                        assert_eq!(a, expected);
                        assert_eq!(b.to_vec::<f32>().unwrap(), [expected; 3]);
                        // Views of one storage, while the other thread is in a run, too.
                        let c = region.run(|| {
                            views.0.add_(1.0)?;
                            let c = views.1.mul(1.0)?;
                            views.0.sub_(1.0)?;
                            Ok::<_, Error>(c)
                        });
                        assert_eq!(
                            c.unwrap().to_vec::<f32>().unwrap(),
                            [expected + 1.0, expected + 1.0, expected]
                        );
                    }
                });
            }
        });
    }
    Ok(())
}

#[test]
fn two_threads_train_shared_parameters() -> Result<()> {
    let _turn = turn();
    // `aot_eager` computes first and writes then: two updates at once may become one there.
    for backend in [Backend::Inductor, Backend::Eager] {
        let region = Compile::new().backend(backend).region();
        let w = t(&[0.0; 8]);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        region.run(|| w.add_(1.0).map(drop)).unwrap();
                    }
                });
            }
        });
        // An update is one step that nothing comes between, as an in-place op is in eager.
        assert_eq!(w.to_vec::<f32>()?, [200.0; 8], "{backend}");
    }
    Ok(())
}

#[test]
fn a_lazy_tensor_on_another_thread() -> Result<()> {
    as_eager(|lab| {
        let x = t(&[1.0, 2.0]);
        for k in [1.0, 2.0, 3.0] {
            let y = lab.run(|| {
                let y = x.add_(1.0)?.mul(k)?;
                let there = std::thread::scope(|scope| {
                    scope.spawn(|| -> Result<Vec<f32>> { y.add(1.0)?.to_vec() }).join().unwrap()
                })?;
                lab.say("there", format!("{there:?}"));
                (&y + &x).ok()
            })?;
            lab.see("y", &y)?;
        }
        Ok(())
    })
}

#[test]
fn another_thread_changes_an_input() -> Result<()> {
    as_eager(|lab| {
        let x = t(&[1.0, 2.0]);
        for _ in 0..3 {
            let y = lab.run(|| {
                let y = x.mul(2.0)?;
                std::thread::scope(|scope| scope.spawn(|| x.add_(1.0).map(drop)).join().unwrap())?;
                x.mul_(3.0)?;
                let there = std::thread::scope(|scope| scope.spawn(|| x.to_vec::<f32>()).join().unwrap())?;
                lab.say("there", format!("{there:?}"));
                Ok(y)
            })?;
            lab.see("y", &y)?;
            lab.see("x", &x)?;
        }
        Ok(())
    })
}

#[test]
fn handles_are_dropped_and_kept_by_other_threads() -> Result<()> {
    let _turn = turn();
    for &backend in Backend::ALL {
        let region = Compile::new().backend(backend).region();
        let x = t(&[1.0, 2.0]);
        let (drops, dropped) = std::sync::mpsc::channel::<Tensor>();
        let (keeps, kept) = std::sync::mpsc::channel::<Tensor>();
        let (copies, copied) = std::sync::mpsc::channel::<Tensor>();
        std::thread::scope(|scope| {
            scope.spawn(move || dropped.into_iter().for_each(drop));
            scope.spawn(move || {
                let copy = |t: Tensor| copies.send(t.clone()).unwrap();
                kept.into_iter().for_each(copy);
            });
            for round in 0..50 {
                let mut back = None;
                let (y, z) = region
                    .run(|| {
                        let y = x.mul(2.0)?;
                        drops.send(x.add(1.0)?).unwrap();
                        drops.send(y.clone()).unwrap();
                        let z = y.add(&x)?;
                        keeps.send(z.clone()).unwrap();
                        // Made there, dropped here, or after the call.
                        let copy = copied.recv().unwrap();
                        if round % 2 == 0 {
                            drop(copy);
                        } else {
                            back = Some(copy);
                        }
                        Ok::<_, Error>((y, z.neg()?))
                    })
                    .unwrap();
                assert_eq!(y.to_vec::<f32>().unwrap(), [2.0, 4.0], "{backend}, round {round}");
                assert_eq!(z.to_vec::<f32>().unwrap(), [-3.0, -6.0], "{backend}, round {round}");
                if let Some(back) = back {
                    assert_eq!(back.to_vec::<f32>().unwrap(), [3.0, 6.0], "{backend}, round {round}");
                }
            }
            drop((drops, keeps));
        });
    }
    Ok(())
}
