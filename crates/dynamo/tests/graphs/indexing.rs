//! Indexing in compiled code: the same values as eager code, changes through views, errors with their facts and
//! nothing changed, random numbers from the same stream.

#![allow(clippy::unwrap_used)] // a test may panic

use std::sync::Mutex;

use kiln_dynamo::{Backend, Compile};
use kiln_ir::Why;
use kiln_tensor::{DType, Device, Ellipsis, Error, IndexOp, Result, Tensor, manual_seed};

const CPU: Device = Device::Cpu;

fn ramp(shape: &[usize]) -> Result<Tensor> {
    let n = shape.iter().product::<usize>() as i64;
    Tensor::arange(0, n, &CPU)?.to_dtype(DType::F32)?.reshape(shape)
}

/// Runs a program on its own copy of `x`, eagerly and compiled (twice): results and what became of `x` agree.
/// Returns how many breaks there were.
fn agree(what: &str, x: &Tensor, program: impl Fn(&Tensor) -> Result<Tensor>) -> usize {
    // The random stream is the process's.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let copy = || x.clone_tensor().unwrap();
    let eager = copy();
    manual_seed(3);
    let want = program(&eager).unwrap();
    let mut breaks = 0;
    for backend in [Backend::Inductor, Backend::AotEager] {
        let region = Compile::new().backend(backend).region();
        for _ in 0..2 {
            let compiled = copy();
            manual_seed(3);
            let got = region.run(|| program(&compiled)).unwrap();
            assert_eq!(
                got.to_vec_cast::<f64>().unwrap(),
                want.to_vec_cast::<f64>().unwrap(),
                "{what} {backend}"
            );
            assert_eq!(
                compiled.to_vec::<f32>().unwrap(),
                eager.to_vec::<f32>().unwrap(),
                "{what} {backend}, x"
            );
        }
        let explained = region.explain();
        breaks = explained.breaks.len();
        for graph in &explained.graphs {
            assert_eq!(graph.interpreted, None, "{what} {backend}");
        }
    }
    breaks
}

#[test]
fn changes_through_views_reach_their_base() -> Result<()> {
    let x = ramp(&[4, 6])?;
    let none = |what: &str, program: &dyn Fn(&Tensor) -> Result<Tensor>| {
        assert_eq!(agree(what, &x, program), 0, "{what} breaks");
    };
    none("as_strided", &|x| {
        x.as_strided(&[3, 2], &[7, 1], 2)?.mul_(10.0)?;
        x.add(1.0)
    });
    none("diagonal", &|x| {
        let line = x.diagonal(1, 0, 1)?;
        line.add_(100.0)?;
        x.mul(&line.sum()?)
    });
    none("unfold", &|x| {
        x.unfold(1, 2, 3)?.i((.., 1, ..))?.fill_(-1.0)?;
        x.flip([0, 1])?.reshape([3, 8])
    });
    none("set_i", &|x| {
        let rows = Tensor::arange(0, 2, &CPU)?;
        x.set_i((&rows, 1..3), -7.0)?;
        x.set_i(&x.lt(0.0)?, 0.5)?;
        x.i((Ellipsis, &rows))
    });
    none("index_add_", &|x| {
        x.index_add_(0, &Tensor::arange(1, 3, &CPU)?, &x.narrow(0, 0, 2)?.mul(2.0)?)?;
        x.tril(0)?.roll(2, 1)
    });
    none("pads", &|x| {
        let wide = x.mul(2.0)?.reflection_pad(&[2, 1, 0, 3])?.pad(&[1, 1], 0.25)?;
        wide.unfold(0, 3, 2)?.sum_dim(-1, false)
    });
    Ok(())
}

#[test]
fn gradients_of_indexing_are_compiled() -> Result<()> {
    let index = Tensor::new(&[[0i64, 3], [1, 3]], &CPU)?;
    let loss = |weight: &Tensor| {
        let picked = weight.embedding_padded(&index, 1)?;
        let more = weight.i((&index, &Tensor::new(&[2i64, -1], &CPU)?))?;
        let placed = weight.index_select(1, &index.flatten()?)?.scatter_add(0, &index, &more)?;
        picked.mul(&picked)?.sum()?.add(&placed.mul(&placed)?.sum()?)
    };
    let run = |compiled: bool| -> Result<Vec<f32>> {
        let weight = ramp(&[4, 5])?;
        weight.requires_grad_(true)?;
        if compiled {
            Compile::new().region().run(|| loss(&weight)?.backward())?
        } else {
            loss(&weight)?.backward()?
        }
        weight.grad().unwrap().to_vec()
    };
    assert_eq!(run(true)?, run(false)?);
    Ok(())
}

#[test]
fn sizes_that_depend_on_values_break_the_graph() -> Result<()> {
    let breaks =
        agree("masked_select", &ramp(&[3, 3])?, |x| x.mul(2.0)?.masked_select(&x.gt(3.5)?)?.add(1.0));
    assert!(breaks > 0);
    Ok(())
}

#[test]
fn random_numbers_are_eager_codes() -> Result<()> {
    agree("random", &ramp(&[4])?, |x| {
        let order = Tensor::randperm(4, &CPU)?;
        let coins = Tensor::full([4], 0.5, &CPU)?.bernoulli()?;
        let dice = Tensor::randint(1, 7, [4], &CPU)?.to_dtype(DType::F32)?;
        x.i(&order)?.mul(&coins)?.add(&dice)
    });
    Ok(())
}

#[test]
fn a_bad_index_is_eager_codes_error_and_changes_nothing() -> Result<()> {
    type Program = fn(&Tensor, &Tensor) -> Result<Tensor>;
    let programs: [(&str, Program); 6] = [
        ("index_select", |x, bad| x.add_(1.0)?.index_select(0, bad)?.mul(2.0)),
        ("index_add", |x, bad| x.add_(1.0)?.index_add(0, bad, &x.narrow(0, 0, 2)?)),
        ("scatter", |x, bad| x.add_(1.0)?.scatter(0, &bad.reshape([2, 1])?, &x.narrow(0, 0, 2)?)),
        ("index", |x, bad| x.add_(1.0)?.i((bad, 1))),
        ("embedding", |x, bad| x.add_(1.0)?.embedding(bad)),
        ("one_hot", |x, bad| x.add_(1.0)?.add(&bad.one_hot(4)?.sum()?)),
    ];
    for (name, program) in programs {
        let bad = Tensor::new(&[0i64, 9], &CPU)?;
        let (eager, compiled) = (ramp(&[4, 3])?, ramp(&[4, 3])?);
        let want = program(&eager, &bad).unwrap_err();
        let got = Compile::new().region().run(|| program(&compiled, &bad)?.to_vec::<f32>()).unwrap_err();
        for error in [want, got] {
            let Error::Op(error) = error else { panic!("{name}: {error}") };
            assert_eq!(error.why, Why::Index { index: 9, size: 4 }, "{name}");
            assert!(error.loc.is_known(), "{name}");
        }
        assert_eq!(compiled.to_vec::<f32>()?, eager.to_vec::<f32>()?, "{name}");
    }
    Ok(())
}

/// Rows go straight into caches, layer after layer; an index out of range is found before anything is changed.
#[test]
fn rows_of_caches() -> Result<()> {
    let caches = || -> Result<Vec<Tensor>> { (0..4).map(|_| ramp(&[2, 5, 3])).collect() };
    let program = |caches: &[Tensor], at: &Tensor, x: &Tensor| -> Result<Tensor> {
        let mut x = x.exp()?;
        for pair in caches.chunks(2) {
            pair[0].index_copy_(1, at, &x)?;
            pair[1].index_copy_(1, at, &x.neg()?)?;
            x = x.add(&pair[0].mul(&pair[1])?.amax_dim(1, true)?)?;
        }
        caches[0].narrow(1, 0, 1)?.copy_(&x)?;
        Ok(x)
    };
    let region = Compile::new().region();
    let (eager, compiled) = (caches()?, caches()?);
    for (call, row) in [1i64, 4, 2, 9, 3, -1, 0].into_iter().enumerate() {
        let (at, x) = (Tensor::arange(row, row + 1, &CPU)?, ramp(&[2, 1, 3])?.mul(0.1)?.sub(call as f64)?);
        // Eager code has changed nothing either: the first step refuses.
        let want = program(&eager, &at, &x);
        let got = region.run(|| program(&compiled, &at, &x));
        match (want, got) {
            (Ok(want), Ok(got)) => assert_eq!(got.to_vec::<f32>()?, want.to_vec::<f32>()?),
            (Err(want), Err(got)) => {
                assert!(!(0..5).contains(&row));
                assert_eq!(got.to_string(), want.to_string());
            }
            (want, got) => panic!("row {row}: {want:?}, compiled {got:?}"),
        }
        for (eager, compiled) in eager.iter().zip(&compiled) {
            assert_eq!(compiled.to_vec::<f32>()?, eager.to_vec::<f32>()?, "row {row}");
        }
    }
    Ok(())
}
