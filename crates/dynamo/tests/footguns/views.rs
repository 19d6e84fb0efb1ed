//! Changes in place through views while gradients are recorded.

use kiln_tensor::{IndexOp, Result, Tensor, no_grad};

use crate::lab::{CPU, as_eager, check, leaf, matrix, one_graph, t};

/// The buffer of a recurrent loop: `outputs[t] = h`.
#[test]
fn rows_of_a_buffer_are_assigned() -> Result<()> {
    one_graph(check(|lab| {
        let w = leaf(&[0.5, -0.25, 1.5]);
        for call in 1..4 {
            w.set_grad(None);
            let x = matrix(4, 3).mul(call)?;
            let outputs = lab.run(|| {
                let outputs = Tensor::zeros([4, 3], &CPU)?;
                let mut h = w.mul(0.1)?;
                for step in 0..4 {
                    h = (&h * &w + &x.i(step)?).tanh().ok()?;
                    outputs.set_i(step, &h)?;
                }
                outputs.mul(&outputs)?.sum()?.backward()?;
                outputs.detach()
            })?;
            lab.see("outputs", &outputs)?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })?);
    Ok(())
}

#[test]
fn a_buffer_leaves_and_is_differentiated_outside() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[0.5, -0.25]);
        for call in 0..3 {
            let buffer = lab.run(|| {
                let buffer = Tensor::zeros([2, 2], &CPU)?;
                buffer.set_i(call % 2, &w.exp()?)?;
                Ok(buffer)
            })?;
            lab.say("requires a gradient", buffer.requires_grad());
            buffer.mul(&matrix(2, 2))?.sum()?.backward()?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn views_follow_their_base() -> Result<()> {
    one_graph(check(|lab| {
        let w = leaf(&[1.0, 2.0, 3.0, 4.0]);
        for call in 1..4 {
            w.set_grad(None);
            let row = lab.run(|| {
                let y = w.mul(call)?;
                let (front, square) = (y.narrow(0, 0, 2)?, y.reshape([2, 2])?);
                let row = square.i(0)?;
                front.mul_(&w.narrow(0, 2, 2)?)?;
                y.mul_(2.0)?;
                (&row * &square.i(1)?).ok()?.sum()?.backward()?;
                row.detach()
            })?;
            lab.see("row", &row)?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })?);
    Ok(())
}

/// A view leaves the region and is changed outside, and the other way round.
#[test]
fn views_across_the_border() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0, 3.0, 4.0]);
        for _ in 0..3 {
            w.set_grad(None);
            let (buffer, part) = lab.run(|| {
                let buffer = t(&[1.0, 1.0, 1.0, 1.0]).mul(2.0)?;
                let part = buffer.narrow(0, 1, 2)?;
                Ok((buffer, part))
            })?;
            part.mul_(&w.narrow(0, 0, 2)?)?;
            lab.say("the buffer", buffer.requires_grad());
            let other = buffer.narrow(0, 2, 2)?;
            lab.run(|| other.mul_(&w.narrow(0, 2, 2)?).map(drop))?;
            lab.see("the buffer", &buffer)?;
            buffer.sum()?.backward()?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

#[test]
fn what_is_cut_off_or_unrecorded() -> Result<()> {
    as_eager(|lab| {
        let w = leaf(&[1.0, 2.0]);
        for _ in 0..2 {
            w.set_grad(None);
            lab.run(|| {
                let y = w.mul(3.0)?;
                let unrecorded = {
                    let _guard = no_grad();
                    y.narrow(0, 0, 1)?
                };
                lab.outcome("unrecorded", unrecorded.mul_(&w.narrow(0, 0, 1)?));
                let apart = w.detach()?.mul(1.0)?;
                apart.detach()?.mul_(&w)?;
                lab.say("apart", apart.requires_grad());
                y.sum()?.backward()
            })?;
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}

/// An input whose elements share memory can't be written back as a whole: nothing may happen twice.
#[test]
fn a_row_of_an_expanded_input_is_changed() -> Result<()> {
    as_eager(|lab| {
        let (narrow, other) = (matrix(1, 3), t(&[1.0, 2.0]));
        let wide = narrow.expand([2, 3])?;
        for _ in 0..3 {
            lab.run(|| {
                other.add_(&other)?;
                wide.i(1)?.mul_(3.0).map(drop)
            })?;
            lab.see("narrow", &narrow)?;
            lab.see("other", &other)?;
        }
        Ok(())
    })
}

/// A change off the tape gives views a new place on it: what a pass before used up is not theirs any more.
#[test]
fn views_are_renewed_after_a_change_off_the_tape() -> Result<()> {
    as_eager(|lab| {
        for read in 0..3 {
            let w = leaf(&[1.0, 2.0, 3.0, 4.0]);
            let (row, part) = lab.run(|| {
                let row = w.reshape([2, 2])?.i(0)?;
                let part = row.narrow(0, 0, 1)?;
                if read == 1 {
                    row.sum()?.backward()?;
                }
                {
                    let _guard = no_grad();
                    part.sub_(0.5)?;
                }
                if read == 2 {
                    part.exp()?.sum()?.backward()?;
                }
                Ok((row, part))
            })?;
            lab.outcome("row", row.sum()?.backward());
            lab.outcome("part", part.sum()?.backward());
            lab.see_grad("w", &w)?;
        }
        Ok(())
    })
}
