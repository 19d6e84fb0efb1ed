//! `set_data`, again and again: old data is freed, and nobody who looks at it loses it. One test, since it measures
//! the process's memory.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_runtime::pool;
use kiln_tensor::internal::TensorState;
use kiln_tensor::{DType, Device, Result, Tensor, TensorList, foreach};

const COUNT: usize = 1 << 18;

fn filled(number: f64) -> Result<Tensor> {
    Tensor::full_of([COUNT], number, DType::F32, &Device::Cpu)
}

#[test]
fn replaced_data_is_freed() -> Result<()> {
    let x = filled(0.0)?;
    x.requires_grad_(true)?;
    // The first two stay as long as the tensor.
    (0..3).try_for_each(|i| x.set_data(&filled(f64::from(i))?))?;
    let before = pool::stats().live_bytes;
    for i in 0..1000 {
        x.set_data(&filled(f64::from(i % 7))?)?;
        assert_eq!(x.dtype(), DType::F32);
    }
    assert_eq!(pool::stats().live_bytes, before, "a thousand times a megabyte");

    // What others hold is theirs: views, copies of the handle, results.
    let old = x.detach()?;
    let want = old.to_vec::<f32>()?;
    let weak = old.ready()?.storage().clone();
    x.set_data(&filled(9.0)?)?;
    assert_eq!((old.to_vec::<f32>()?, weak.references()), (want, 2));
    drop(old);
    assert_eq!(weak.references(), 1);

    // Every way to compute with it: dense, broadcast, in place, by lists, with gradients.
    for i in 0..5 {
        let number = f64::from(i);
        x.set_data(&filled(number)?)?;
        let doubled = x.add(&x)?;
        assert_eq!(doubled.to_vec::<f32>()?[COUNT - 1], 2.0 * number as f32);
        let row = Tensor::full_of([2, 1], 1.0, DType::F32, &Device::Cpu)?;
        assert_eq!(x.add(&row)?.to_vec::<f32>()?[COUNT], number as f32 + 1.0);
        x.set_grad(None);
        x.mul(&x)?.sum()?.backward()?;
        assert_eq!(x.grad().unwrap().to_vec::<f32>()?[3], 2.0 * number as f32);
        let off = kiln_tensor::no_grad();
        x.add_(1.0)?;
        foreach::mul_(&TensorList::new(vec![x.clone()]), 2.0)?;
        assert_eq!(x.to_vec::<f32>()?[5], 2.0 * (number as f32 + 1.0));
        assert_eq!(x.slice(0, 0, 3, 1)?.to_vec::<f32>()?, [2.0 * (number as f32 + 1.0); 3]);
        drop(off);
    }

    // Readers on other threads see one version or the other, of other sizes, whenever it happens.
    let shared = Tensor::full_of([100], 1.0, DType::F32, &Device::Cpu)?;
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..2000 {
                    // An op may find that its operand was given other data meanwhile.
                    let seen = match shared.add(1.0) {
                        Ok(sum) => sum.to_vec::<f32>().unwrap(),
                        Err(error) => {
                            assert!(error.to_string().contains("given other data"), "{error}");
                            continue;
                        }
                    };
                    let expected = if seen.len() == 100 { 2.0 } else { 3.0 };
                    assert!(seen.len() >= 50 && seen.iter().all(|x| *x == expected), "{seen:?}");
                }
            });
        }
        for i in 0..2000 {
            let (count, number) = if i % 2 == 0 { (50, 2.0) } else { (100, 1.0) };
            let data = Tensor::full_of([count], number, DType::F32, &Device::Cpu).unwrap();
            shared.set_data(&data).unwrap();
        }
    });
    Ok(())
}
