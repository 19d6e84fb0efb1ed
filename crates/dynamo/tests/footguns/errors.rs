//! Breaks, errors, early returns and panics in the middle of a call.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kiln_dynamo::{Backend, Compile};
use kiln_tensor::{Error, GradOptions, Result, Tensor, TensorList, foreach};

use crate::lab::{CPU, Lab, as_eager, check, leaf, matrix, one_graph, reason, t, training_step, turn};

#[test]
fn values_in_the_middle_are_right() -> Result<()> {
    let explanations = check(|lab| {
        for k in [1.0f32, 2.0, 3.0] {
            let x = t(&[k, 2.0]);
            let y = lab.run(|| {
                x.add_(1.0)?;
                let total = x.sum()?.item::<f32>()?;
                lab.say("total", total);
                lab.see("x", &x)?;
                x.mul(f64::from(total))
            })?;
            lab.see("y", &y)?;
        }
        Ok(())
    })?;
    for (_, explanation) in explanations {
        assert_eq!(explanation.breaks.len(), 1, "{explanation}");
        assert!(explanation.breaks[0].loc.to_string().contains("errors.rs:"), "{explanation}");
    }
    Ok(())
}

#[test]
fn fullgraph_names_the_line_that_breaks() -> Result<()> {
    let _turn = turn();
    for &backend in Backend::ALL {
        let region = Compile::new().backend(backend).fullgraph(true).region();
        let x = t(&[1.0, 2.0]);
        let error = region.run(|| x.mul(2.0)?.sum()?.item::<f32>()).unwrap_err(); // this line
        let text = error.to_string();
        assert!(text.contains(&format!("errors.rs:{}", line!() - 2)), "{text}");
        // And the region is as good as new.
        let y: Tensor = region.run(|| x.mul(2.0))?;
        assert_eq!(y.to_vec::<f32>()?, [2.0, 4.0]);
    }
    Ok(())
}

#[test]
fn printing_in_the_middle() -> Result<()> {
    as_eager(|lab| {
        let x = t(&[1.5, 2.0]);
        for k in [1.0, 2.0] {
            let y = lab.run(|| {
                let y = x.mul(k)?;
                lab.say("printed", &y);
                lab.say("type", format!("{} {} {}", y.shape(), y.dtype(), y.numel()));
                y.add(1.0)
            })?;
            lab.see("y", &y)?;
        }
        Ok(())
    })
}

#[test]
fn shapes_of_lazy_tensors_do_not_break() -> Result<()> {
    let explanations = check(|lab| {
        for rows in [2, 3] {
            let x = matrix(rows, 4);
            let y = lab.run(|| {
                let y = x.t()?.slice(0, 1, 3, 1)?;
                let z = Tensor::cat([&y, &y], 1)?;
                lab.say("shape", format!("{} {} {:?}", z.shape(), z.rank(), z.size(-1)?));
                z.reshape([z.numel() as i64])
            })?;
            lab.see("y", &y)?;
        }
        Ok(())
    })?;
    for (_, explanation) in explanations {
        assert!(explanation.breaks.is_empty() && explanation.fallbacks.is_empty(), "{explanation}");
    }
    Ok(())
}

#[test]
fn a_panic_in_the_middle() -> Result<()> {
    as_eager(|lab| {
        let x = t(&[1.0, 2.0]);
        let w = leaf(&[1.0, 2.0]);
        let kept: RefCell<Option<Tensor>> = RefCell::default();
        for round in 0..3 {
            w.set_grad(None);
            let caught = catch_unwind(AssertUnwindSafe(|| {
                lab.run(|| {
                    x.add_(1.0)?;
                    let y = x.mul(3.0)?;
                    *kept.borrow_mut() = Some(y.clone());
                    (&w * &y).ok()?.sum()?.backward()?;
                    if round == 1 {
                        std::panic::resume_unwind(Box::new("on purpose"));
                    }
                    x.mul_(2.0)?;
                    Ok(y)
                })
            }));
            lab.say("caught", caught.is_err());
            lab.see("x", &x)?;
            lab.see("kept", kept.borrow().as_ref().unwrap())?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn an_early_return_in_the_middle() -> Result<()> {
    as_eager(|lab| {
        let (x, bad) = (t(&[1.0, 2.0]), t(&[1.0, 2.0, 3.0]));
        for round in 0..3 {
            let outcome = lab.run(|| {
                x.add_(1.0)?;
                if round == 1 {
                    return Err(Error::State("enough".into()));
                }
                let y = x.mul(2.0)?;
                y.add_(&bad)?;
                x.zero_()?;
                Ok(())
            });
            lab.outcome("outcome", outcome);
            lab.see("x", &x)?;
        }
        lab.see("still usable", &lab.run(|| x.mul(4.0))?)
    })
}

#[test]
fn errors_of_ops_are_those_of_eager() -> Result<()> {
    as_eager(|lab| {
        let (x, y, w) = (matrix(2, 3), matrix(4, 5), leaf(&[1.0, 2.0]));
        let i = Tensor::from_slice(&[1i64, 2])?;
        for _ in 0..2 {
            lab.outcome("mm", lab.run(|| x.mm(&y)));
            lab.outcome("add", lab.run(|| x.mul(2.0)?.add(&y)));
            lab.outcome("reshape", lab.run(|| x.mul(2.0)?.reshape([7])));
            lab.outcome("dim", lab.run(|| x.mul(2.0)?.sum_dim(5, false)));
            lab.outcome("in place", lab.run(|| i.mul(2)?.add_(0.5).map(drop)));
            lab.outcome("leaf", lab.run(|| w.add_(1.0).map(drop)));
            lab.outcome("expanded", lab.run(|| x.select(0, 0)?.expand([2, 3])?.add_(1.0).map(drop)));
            lab.outcome("view", lab.run(|| w.mul(2.0)?.slice(0, 0, 1, 1)?.add_(1.0).map(drop)));
            lab.outcome("no gradient", lab.run(|| x.sum()?.backward()));
            lab.outcome("not a number", lab.run(|| w.mul(2.0)?.backward()));
            lab.outcome("lists", lab.run(|| foreach::add_(&Tensor::list([&x, &y]), &Tensor::list([&y, &x]))));
            lab.outcome("item", lab.run(|| x.mul(2.0)?.item::<f32>()));
            lab.see("x", &x)?;
            lab.see("y", &y)?;
        }
        Ok(())
    })
}

#[test]
fn a_program_may_go_on_after_an_error() -> Result<()> {
    as_eager(|lab| {
        let (x, y) = (matrix(2, 3), matrix(4, 5));
        for round in 0..4 {
            let z = lab.run(|| {
                let before = x.mul(2.0)?;
                // x is known by now, y is not: the failed op must leave no trace of it.
                let failed = if round % 2 == 0 {
                    before.mm(&y).is_err()
                } else {
                    foreach::add(&Tensor::list([&y]), &Tensor::list([&x])).is_err()
                };
                assert!(failed);
                y.add_(1.0)?;
                (&before.sum()? + &y).ok()
            })?;
            lab.see("z", &z)?;
            lab.see("y", &y)?;
        }
        // The same recording with another y must not fit.
        let y = matrix(5, 4);
        let z = lab.run(|| {
            let before = x.mul(2.0)?;
            assert!(before.mm(&y.t()?).is_err());
            y.add_(1.0)?;
            (&before.sum()? + &y).ok()
        })?;
        lab.see("z", &z)
    })
}

#[test]
fn indices_out_of_range() -> Result<()> {
    as_eager(|lab| {
        let x = matrix(3, 4);
        let (before, after, direct) = (t(&[1.0, 2.0]), t(&[1.0, 2.0]), Tensor::zeros([3, 2], &CPU)?);
        for k in [1i64, 7, 2, -1, 0] {
            let index = Tensor::from_vec(vec![0, 1, 2, 3, k, 0], [3, 2])?;
            let outcome = lab.run(|| {
                before.add_(1.0)?;
                let y = x.gather(1, &index)?;
                after.mul_(2.0)?;
                Ok(y)
            });
            lab.outcome("gather", outcome);
            lab.see("before", &before)?;
            lab.see("after", &after)?;
            lab.outcome("into an input", lab.run(|| direct.copy_(&x.gather(1, &index)?).map(drop)));
            lab.see("direct", &direct)?;
            let outcome = lab.run(|| direct.add_(&x.gather(1, &index)?).map(drop));
            lab.outcome("added to an input", outcome.map_err(reason));
            lab.see("direct", &direct)?;
        }
        Ok(())
    })
}

#[test]
fn a_class_out_of_range_in_a_training_step() -> Result<()> {
    for keep in [false, true] {
        check(|lab| {
            let params = [matrix(6, 4), t(&[0.1; 6]), matrix(3, 6)];
            for p in &params {
                p.requires_grad_(true)?;
            }
            let momenta: TensorList = params.iter().map(|p| p.detach().unwrap().mul(0.0).unwrap()).collect();
            let x = matrix(5, 4);
            for class in [0i64, 1, 3, 2, -7, -100, 0] {
                let y = Tensor::from_slice(&[0i64, 1, 2, class, 1])?;
                let outcome = lab.run(|| training_step(&params, &momenta, &x, &y, keep));
                if let Ok(loss) = &outcome {
                    lab.see("loss", loss)?;
                }
                lab.outcome("step", outcome);
                for (p, m) in params.iter().zip(momenta.items()?) {
                    lab.see("parameter", p)?;
                    lab.see("momentum", m)?;
                    lab.see_grad("gradient", p)?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// What eager mode refuses because a saved tensor was changed in place, compiled code refuses as well, at the same
/// place and with the same error; what it accepts is compiled.
#[test]
fn tensors_that_were_changed_after_they_were_saved() -> Result<()> {
    type Program = fn(&Lab, &Tensor, &Tensor) -> Result<()>;
    let refused: [(&str, Program); 6] = [
        ("an operand", |lab, x, w| {
            let y = x.mm(w)?;
            x.mul_(0.5)?;
            lab.outcome("backward", y.sum()?.backward());
            Ok(())
        }),
        ("a result", |lab, _, w| {
            let y = w.tanh()?;
            y.add_(1.0)?;
            lab.outcome("backward", y.sum()?.backward());
            Ok(())
        }),
        ("an operand, through a view", |lab, x, w| {
            let y = x.mul(w)?;
            x.select(0, 1)?.mul_(2.0)?;
            lab.outcome("backward", y.sum()?.backward());
            Ok(())
        }),
        ("what a part of a composite saved", |lab, _, w| {
            let x = w.mul(1.0)?;
            let y = x.tanhshrink()?;
            let z = x.square()?;
            x.add_(1.0)?;
            lab.outcome("backward", y.add(&z)?.sum()?.backward());
            Ok(())
        }),
        ("by request", |lab, x, w| {
            let y = x.mm(w)?;
            x.mul_(0.5)?;
            let options = GradOptions::default();
            lab.outcome("grad", kiln_tensor::grad(&[&y.sum()?], &[w], &[], options));
            Ok(())
        }),
        ("the target's new value", |lab, x, w| {
            let y = w.mul(1.0)?;
            y.sigmoid_()?;
            y.mul_(x)?;
            lab.outcome("backward", y.sum()?.backward());
            Ok(())
        }),
    ];
    let accepted: [(&str, Program); 4] = [
        ("an operand that no gradient needs", |_, x, w| {
            let y = x.add(w)?;
            x.mul_(0.5)?;
            y.sum()?.backward()
        }),
        ("an operand by a number", |_, _, w| {
            let y = w.mul(1.0)?;
            let z = y.mul(3.0)?;
            y.mul_(0.5)?;
            z.sum()?.backward()
        }),
        ("the old value of a target", |_, x, w| {
            let y = w.mul(1.0)?;
            y.square_()?;
            y.mul_(2.0)?;
            y.add(x)?.sum()?.backward()
        }),
        ("a frozen matrix's other operand", |_, x, w| {
            let hidden = w.mul(2.0)?;
            let y = hidden.mm(x)?;
            hidden.mul_(0.5)?;
            y.sum()?.backward()
        }),
    ];
    for (programs, accepts) in [(&refused[..], false), (&accepted[..], true)] {
        for (name, program) in programs {
            let explanations = check(|lab| {
                let w = matrix(3, 3);
                w.requires_grad_(true)?;
                for round in 0..3 {
                    let x = matrix(3, 3).add(f64::from(round))?;
                    lab.run(|| program(lab, &x, &w))?;
                    lab.see("x", &x)?;
                    lab.see_grad(name, &w)?;
                }
                Ok(())
            })?;
            if accepts {
                one_graph(explanations);
            }
        }
    }
    Ok(())
}

/// A closure may handle the error of `backward()` and go on.
#[test]
fn errors_of_backward_can_be_handled() -> Result<()> {
    as_eager(|lab| {
        let w = matrix(3, 3);
        w.requires_grad_(true)?;
        for _ in 0..3 {
            let y = lab.run(|| {
                let y = w.mul(2.0)?;
                // Not a single number.
                lab.outcome("of a matrix", y.backward());
                lab.outcome("of a constant", matrix(1, 1).sum()?.backward());
                let loss = y.sum()?;
                loss.backward()?;
                // The tape was used up.
                lab.outcome("again", loss.backward());
                let other = w.mul(3.0)?.sum()?;
                lab.outcome("another", other.backward());
                y.detach()
            })?;
            lab.see("y", &y)?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}
