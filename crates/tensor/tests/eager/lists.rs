//! List ops run many tensors at once: they must give what the same ops one by one give.

use kiln_tensor::{DType, Device, Result, Tensor, TensorList, foreach};

const CPU: Device = Device::Cpu;

fn tensors(dtypes: &[DType]) -> Result<Vec<Tensor>> {
    let sizes = [0, 1, 2, 700, 40_000, 100_003];
    let each = |(i, &size): (usize, &usize)| Tensor::rand_of([size], dtypes[i % dtypes.len()], &CPU);
    sizes.iter().enumerate().map(each).collect()
}

fn copies(tensors: &[Tensor]) -> Result<Vec<Tensor>> {
    tensors.iter().map(Tensor::clone_tensor).collect()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    let wide = tensor.to_dtype(DType::F64).expect("every dtype converts to f64");
    wide.to_vec().expect("a tensor that is ready can be read")
}

fn assert_same(left: &[Tensor], right: &[Tensor]) {
    assert_eq!(left.len(), right.len());
    for (a, b) in left.iter().zip(right) {
        assert_eq!(a.dtype(), b.dtype());
        assert_eq!(values(a), values(b));
    }
}

#[test]
fn like_one_by_one() -> Result<()> {
    for dtypes in [&[DType::F32][..], &[DType::F64], &[DType::F32, DType::F64]] {
        let (x, y) = (tensors(dtypes)?, tensors(dtypes)?);
        let (one_by_one, list) = (copies(&x)?, TensorList::new(copies(&x)?));
        foreach::addcmul_(&list, &TensorList::new(y.clone()), &TensorList::new(x.clone()), 0.3)?;
        for i in 0..x.len() {
            one_by_one[i].addcmul_(&y[i], &x[i], 0.3)?;
        }
        assert_same(list.items()?, &one_by_one);
        let fresh = foreach::sqrt(&list)?;
        let expected = one_by_one.iter().map(Tensor::sqrt).collect::<Result<Vec<_>>>()?;
        assert_same(fresh.items()?, &expected);
    }
    Ok(())
}

#[test]
fn a_tensor_that_is_twice_in_a_list_changes_twice() -> Result<()> {
    let x = Tensor::ones([50_000], &CPU)?;
    foreach::mul_(&TensorList::new(vec![x.clone(), x.clone()]), 3.0)?;
    assert!(values(&x).iter().all(|&v| v == 9.0));
    Ok(())
}

#[test]
fn order_matters_where_one_element_reads_what_another_writes() -> Result<()> {
    let t: Vec<Tensor> = (0..3).map(|_| Tensor::ones([50_000], &CPU)).collect::<Result<_>>()?;
    // Each takes its neighbour's value as the step before left it: 1 + 1, then 1 + 2.
    let (target, source) = (vec![t[1].clone(), t[2].clone()], vec![t[0].clone(), t[1].clone()]);
    foreach::add_(&TensorList::new(target), &TensorList::new(source))?;
    assert!(values(&t[1]).iter().all(|&v| v == 2.0));
    assert!(values(&t[2]).iter().all(|&v| v == 3.0));
    Ok(())
}

#[test]
fn parts_of_one_storage() -> Result<()> {
    let base = Tensor::ones([60_000], &CPU)?;
    let parts: Vec<Tensor> = (0..3).map(|i| base.narrow(0, i * 20_000, 20_000)).collect::<Result<_>>()?;
    foreach::mul_(&TensorList::new(parts), 2.0)?;
    assert!(values(&base).iter().all(|&v| v == 2.0));
    Ok(())
}

#[test]
fn nothing_changes_if_one_element_may_not() -> Result<()> {
    let (x, y) = (Tensor::ones([4], &CPU)?, Tensor::ones([5], &CPU)?);
    let shapes = foreach::add_(
        &TensorList::new(vec![x.clone(), x.clone()]),
        &TensorList::new(vec![x.clone_tensor()?, y]),
    );
    assert!(shapes.is_err());
    let leaf = Tensor::ones([4], &CPU)?;
    leaf.requires_grad_(true)?;
    assert!(foreach::mul_(&TensorList::new(vec![x.clone(), leaf]), 2.0).is_err());
    assert_eq!(values(&x), [1.0; 4]);
    Ok(())
}

#[test]
fn gradients_flow_through_lists() -> Result<()> {
    let x = Tensor::full([3], 2.0, &CPU)?;
    x.requires_grad_(true)?;
    let squares = foreach::mul(&TensorList::new(vec![x.clone()]), &TensorList::new(vec![x.clone()]))?;
    squares.get(0)?.sum()?.backward()?;
    assert_eq!(x.grad().map(|g| values(&g)), Some(vec![4.0; 3]));
    Ok(())
}
