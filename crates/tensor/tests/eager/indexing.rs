//! Indexing, picking and placing: values as PyTorch gives them, views that stay views, errors that say what.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_tensor::{DType, Device, Ellipsis, Error, IndexOp, Indexer, NewAxis, Result, ScatterReduce, Tensor};

const CPU: Device = Device::Cpu;

fn ramp(shape: &[usize]) -> Result<Tensor> {
    let n = shape.iter().product::<usize>() as i64;
    Tensor::arange(0, n, &CPU)?.to_dtype(DType::F32)?.reshape(shape)
}

/// The gradient of Σ i·yᵢ, i counted from 1.
fn gradient(x: &Tensor, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Vec<f32>> {
    let x = x.detach()?.clone_tensor()?;
    x.requires_grad_(true)?;
    let y = f(&x)?;
    let weights = Tensor::arange(1, y.numel() as i64 + 1, &CPU)?.to_dtype(DType::F32)?.reshape(y.shape())?;
    y.mul(&weights)?.sum()?.backward()?;
    x.grad().unwrap().to_vec()
}

#[test]
fn ranges_and_integers_are_views() -> Result<()> {
    let x = ramp(&[2, 3, 4])?;
    let part = x.i((1, Ellipsis, Indexer::range(1, -1)))?;
    assert_eq!(part.to_vec2::<f32>()?, [[13.0, 14.0], [17.0, 18.0], [21.0, 22.0]]);
    part.fill_(0.0)?;
    assert_eq!(x.i((1, 0))?.to_vec::<f32>()?, [12.0, 0.0, 0.0, 15.0]);
    assert_eq!(x.i((.., Indexer::from(..).by(2), -1))?.to_vec::<f32>()?, [3.0, 11.0, 15.0, 23.0]);
    assert_eq!(x.i((.., NewAxis, 0..=1))?.shape().to_vec(), [2, 1, 2, 4]);
    assert_eq!(x.i((.., 5..9))?.shape().to_vec(), [2, 0, 4]);
    assert_eq!(x.i(&[Indexer::Select(0), Indexer::Ellipsis][..])?.shape().to_vec(), [3, 4]);
    Ok(())
}

#[test]
fn index_tensors_stand_where_pytorch_puts_them() -> Result<()> {
    let x = ramp(&[2, 3, 4])?;
    let negative = Tensor::new(&[-1i64, 0, 1], &CPU)?;
    let apart = x.i((&Tensor::new(&[1i64, 0], &CPU)?, .., &Tensor::new(&[3i64, -4], &CPU)?))?;
    assert_eq!(apart.to_vec2::<f32>()?, [[15.0, 19.0, 23.0], [0.0, 4.0, 8.0]]);
    let beside = x.i((.., &negative, &Tensor::new(&[[3i64], [1]], &CPU)?))?;
    assert_eq!(beside.shape().to_vec(), [2, 2, 3]);
    assert_eq!(beside.to_vec::<f32>()?[..6], [11.0, 3.0, 7.0, 9.0, 1.0, 5.0]);
    assert_eq!(x.i(&x.gt(20.5)?)?.to_vec::<f32>()?, [21.0, 22.0, 23.0]);
    let twice = gradient(&ramp(&[3])?, |x| x.i(&Tensor::new(&[2i64, 2, 0], &CPU)?))?;
    assert_eq!(twice, [3.0, 0.0, 3.0]);
    Ok(())
}

/// Before anything is changed, and whatever else is empty.
#[test]
fn every_index_is_checked() -> Result<()> {
    let x = ramp(&[2, 3, 4])?;
    let at = |places: &[i64]| Tensor::from_slice(places);
    for bad in [-3, 2] {
        let (first, last) = (at(&[0, bad])?, at(&[1, 1])?);
        for error in [
            x.index(&[Some(&first), None, Some(&last)]).unwrap_err(),
            x.index_put(&[Some(&first), None, Some(&last)], 1.0, false).unwrap_err(),
            x.index_put_(&[Some(&first), None, Some(&last)], 1.0, true).map(drop).unwrap_err(),
            ramp(&[2, 0])?.index(&[Some(&first)]).unwrap_err(),
        ] {
            assert!(error.to_string().contains(&bad.to_string()), "{error}");
        }
    }
    assert_eq!(x.to_vec::<f32>()?, ramp(&[2, 3, 4])?.to_vec::<f32>()?);
    assert_eq!(x.index(&[Some(&at(&[])?), None, Some(&at(&[3])?)])?.shape().to_vec(), [0, 3]);
    // In place, through a view, and from the tensor's own memory.
    let turned = x.transpose(0, 2)?;
    turned.index_put_(&[Some(&at(&[-1, 0])?)], &x.i((.., .., 0..1))?.transpose(0, 2)?, false)?;
    assert_eq!(x.i((0, 1))?.to_vec::<f32>()?, [4.0, 5.0, 6.0, 4.0]);
    x.index_put_(&[None, Some(&at(&[2, 2, 2])?)], 1.0, true)?;
    assert_eq!(x.i((1, 2))?.to_vec::<f32>()?, [23.0, 24.0, 25.0, 23.0]);
    Ok(())
}

#[test]
fn values_are_set_in_place() -> Result<()> {
    let x = ramp(&[2, 3])?;
    x.set_i((.., 1..), -5)?;
    assert_eq!(x.to_vec::<f32>()?, [0.0, -5.0, -5.0, 3.0, -5.0, -5.0]);
    x.set_i(&x.lt(0.0)?, 3.5)?;
    assert_eq!(x.to_vec::<f32>()?, [0.0, 3.5, 3.5, 3.0, 3.5, 3.5]);
    x.set_i((&Tensor::new(&[1i64, -2], &CPU)?, 0), &Tensor::new(&[7i64, 8], &CPU)?)?;
    assert_eq!(x.to_vec::<f32>()?, [8.0, 3.5, 3.5, 7.0, 3.5, 3.5]);
    x.set_i(&Tensor::new(&[false, true], &CPU)?, &Tensor::new(&[1.0f32, 2.0, 3.0], &CPU)?)?;
    assert_eq!(x.to_vec::<f32>()?[3..], [1.0, 2.0, 3.0]);
    Ok(())
}

#[test]
fn views_by_strides_diagonals_and_windows_share_memory() -> Result<()> {
    let x = ramp(&[3, 4])?;
    x.as_strided(&[2, 2], &[5, 1], 1)?.mul_(10.0)?;
    assert_eq!(x.to_vec::<f32>()?[..8], [0.0, 10.0, 20.0, 3.0, 4.0, 5.0, 60.0, 70.0]);
    x.diagonal(0, 0, 1)?.fill_(-1.0)?;
    x.unfold(1, 2, 2)?.select(1, 1)?.add_(100.0)?;
    assert_eq!(x.i((2, ..))?.to_vec::<f32>()?, [8.0, 9.0, 99.0, 111.0]);
    // Elements that share a place are not changed in place.
    assert!(x.unfold(1, 3, 1)?.add_(1.0).is_err());
    assert!(x.t()?.as_strided(&[2], &[1], 0).is_err());
    let overlapping = gradient(&ramp(&[5])?, |x| x.as_strided(&[2, 3], &[2, 1], 0))?;
    assert_eq!(overlapping, [1.0, 2.0, 7.0, 5.0, 6.0]);
    Ok(())
}

#[test]
fn scatters_reduce_and_place() -> Result<()> {
    let (x, index) = (ramp(&[3])?, Tensor::new(&[0i64, 0, 2], &CPU)?);
    let src = Tensor::new(&[2.0f32, 3.0, 4.0], &CPU)?;
    let mean = |own| x.scatter_reduce(0, &index, &src, ScatterReduce::Mean, own)?.to_vec::<f32>();
    assert_eq!(mean(true)?, [5.0 / 3.0, 1.0, 3.0]);
    assert_eq!(mean(false)?, [2.5, 1.0, 4.0]);
    // Where index is smaller than src, its corner is used; the rest gets no gradient.
    let wide = ramp(&[2, 3])?;
    let corner = Tensor::new(&[[1i64, 1]], &CPU)?;
    assert_eq!(gradient(&wide, |src| wide.scatter_add(1, &corner, src))?, [2.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
    let table = ramp(&[3, 2])?;
    let picks = Tensor::new(&[1i64, 1, 2], &CPU)?;
    assert_eq!(gradient(&table, |t| t.embedding_padded(&picks, -1))?, [0.0, 0.0, 4.0, 6.0, 0.0, 0.0]);
    // In place, only the places named change, whatever the layout.
    let columns = ramp(&[3, 2])?;
    columns.t()?.index_copy_(1, &Tensor::new(&[2i64], &CPU)?, &Tensor::zeros([2, 1], &CPU)?)?;
    assert_eq!(columns.to_vec::<f32>()?, [0.0, 1.0, 2.0, 3.0, 0.0, 0.0]);
    columns.index_add_(0, &picks, &columns)?;
    assert_eq!(columns.to_vec::<f32>()?, [0.0, 1.0, 4.0, 7.0, 0.0, 0.0]);
    Ok(())
}

#[test]
fn a_bad_index_says_which_and_changes_nothing() -> Result<()> {
    let x = ramp(&[3, 4])?;
    let before = x.to_vec::<f32>()?;
    let bad = Tensor::new(&[0i64, 3], &CPU)?;
    let negative = Tensor::new(&[0i64, -1], &CPU)?;
    let check = |result: Result<()>, op: &str, index: i64, size: usize| {
        let Err(Error::Op(error)) = result else { panic!("{op} took index {index}") };
        assert_eq!(error.op, op);
        assert_eq!(error.why, kiln_ir::Why::Index { index, size }, "{op}");
        assert!(error.loc.is_known(), "{op}");
    };
    let ones = Tensor::ones([2, 4], &CPU)?;
    check(x.index_select(0, &bad).map(drop), "index_select", 3, 3);
    check(x.index_select(0, &negative).map(drop), "index_select", -1, 3);
    check(x.index_add_(0, &bad, &ones).map(drop), "index_add", 3, 3);
    check(x.index_copy_(0, &negative, &ones).map(drop), "index_copy", -1, 3);
    check(x.i((.., &Tensor::new(&[-5i64], &CPU)?)).map(drop), "index", -5, 4);
    check(x.set_i((&bad, 0), 1.0), "index_put", 3, 3);
    check(x.i((1, 4)).map(drop), "select", 4, 4);
    check(x.embedding(&bad).map(drop), "embedding", 3, 3);
    check(bad.one_hot(3).map(drop), "one_hot", 3, 3);
    check(x.take(&Tensor::new(&[12i64], &CPU)?).map(drop), "take", 12, 12);
    let wide = Tensor::new(&[[0i64, 4]], &CPU)?;
    check(x.scatter_(1, &wide, &ones.narrow(0, 0, 1)?.narrow(1, 0, 2)?).map(drop), "scatter", 4, 4);
    check(x.gather(1, &wide).map(drop), "gather", 4, 4);
    assert!(x.masked_scatter_(&x.ge(0.0)?, &ones).is_err(), "too few elements");
    assert_eq!(x.to_vec::<f32>()?, before);
    Ok(())
}
