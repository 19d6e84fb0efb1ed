//! Eager tensors: arithmetic, views, in-place changes, autograd, errors.

use kiln_tensor::{DType, Device, Result, Shape, Tensor, TensorList, foreach, manual_seed, no_grad};

const CPU: Device = Device::Cpu;

fn t(data: &[f32]) -> Tensor {
    Tensor::from_slice(data).expect("a slice fits its own shape")
}

#[test]
fn operators_and_scalars() -> Result<()> {
    let x = t(&[1.0, 2.0, 3.0]);
    let y = ((&x * 2.0 + 1.0) / &x - 1).ok()?;
    assert_eq!(y.to_vec::<f32>()?, [2.0, 1.5, 7.0 / 3.0 - 1.0]);
    assert_eq!((1.0 - &x).ok()?.to_vec::<f32>()?, [0.0, -1.0, -2.0]);
    assert_eq!((1.0 - x.clone()).ok()?.to_vec::<f32>()?, [0.0, -1.0, -2.0]);
    assert_eq!(x.pow(2.0)?.sum()?.item::<f32>()?, 14.0);
    Ok(())
}

#[test]
fn promotion_and_broadcasting() -> Result<()> {
    let i = Tensor::from_slice(&[1i64, 2, 3])?;
    assert_eq!(i.add(1)?.dtype(), DType::I64);
    assert_eq!(i.add(0.5)?.to_vec::<f32>()?, [1.5, 2.5, 3.5]);
    assert_eq!(i.div(2)?.to_vec::<f32>()?, [0.5, 1.0, 1.5]);
    assert_eq!(i.gt(1)?.to_vec::<bool>()?, [false, true, true]);
    let column = t(&[1.0, 2.0]).reshape([2, 1])?;
    let sum = column.add(&t(&[10.0, 20.0, 30.0]))?;
    assert_eq!(sum.shape(), Shape::from([2, 3]));
    assert_eq!(sum.to_vec::<f32>()?, [11.0, 21.0, 31.0, 12.0, 22.0, 32.0]);
    Ok(())
}

#[test]
fn views_share_memory_and_copies_do_not() -> Result<()> {
    let x = Tensor::arange(0, 6, &CPU)?.to_dtype(DType::F32)?.reshape([2, 3])?;
    let row = x.select(0, 1)?;
    row.mul_(10.0)?;
    assert_eq!(x.to_vec::<f32>()?, [0.0, 1.0, 2.0, 30.0, 40.0, 50.0]);
    assert_eq!(x.t()?.to_vec::<f32>()?, [0.0, 30.0, 1.0, 40.0, 2.0, 50.0]);
    assert_eq!(x.t()?.reshape([6])?.to_vec::<f32>()?, [0.0, 30.0, 1.0, 40.0, 2.0, 50.0]);
    let square = Tensor::arange(0, 9, &CPU)?.reshape([3, 3])?;
    square.copy_(&square.t()?)?;
    assert_eq!(square.to_vec::<i64>()?, [0, 3, 6, 1, 4, 7, 2, 5, 8]);
    Ok(())
}

#[test]
fn gradients_flow_and_accumulate() -> Result<()> {
    let (x, w) = (t(&[1.0, 2.0, 3.0]), t(&[0.5, -1.0, 2.0]));
    x.requires_grad_(true)?;
    w.requires_grad_(true)?;
    let loss = (&x * &w).tanh().sum().ok()?;
    loss.backward()?;
    let slope = |a: f32, b: f32| b * (1.0 - (a * b).tanh().powi(2));
    for (got, want) in
        x.grad().unwrap().to_vec::<f32>()?.iter().zip([slope(1.0, 0.5), slope(2.0, -1.0), slope(3.0, 2.0)])
    {
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    }
    let before = w.grad().unwrap().to_vec::<f32>()?;
    (&x * &w).tanh().sum().ok()?.backward()?;
    let after = w.grad().unwrap().to_vec::<f32>()?;
    assert!(before.iter().zip(&after).all(|(b, a)| (2.0 * b - a).abs() < 1e-6));
    Ok(())
}

#[test]
fn linear_and_cross_entropy() -> Result<()> {
    manual_seed(3);
    let x = Tensor::randn([5, 4], &CPU)?;
    let w = Tensor::randn([3, 4], &CPU)?;
    let b = Tensor::randn([3], &CPU)?;
    for p in [&w, &b] {
        p.requires_grad_(true)?;
    }
    let target = Tensor::from_slice(&[0i64, 2, 1, 1, 0])?;
    let loss = x.linear(&w, Some(&b))?.cross_entropy(&target)?;
    loss.backward()?;
    assert_eq!(w.grad().unwrap().shape(), Shape::from([3, 4]));
    let total: f32 = b.grad().unwrap().to_vec::<f32>()?.iter().sum();
    assert!(total.abs() < 1e-6, "gradients of the scores sum to zero, got {total}");
    Ok(())
}

#[test]
fn lists_change_their_tensors() -> Result<()> {
    let (a, b) = (t(&[1.0, 2.0]), t(&[3.0]));
    let list = TensorList::new(vec![a.clone(), b.clone()]);
    foreach::add_scaled_(&list, &foreach::mul(&list, 2.0)?, 10.0)?;
    assert_eq!(a.to_vec::<f32>()?, [21.0, 42.0]);
    assert_eq!(b.to_vec::<f32>()?, [63.0]);
    Ok(())
}

#[test]
fn errors_name_op_shapes_and_line() -> Result<()> {
    let (x, w) = (Tensor::zeros([32, 10], &CPU)?, Tensor::zeros([5, 20], &CPU)?);
    w.set_label("layers.3.fc.weight");
    let error = x.linear(&w, None).unwrap_err().to_string();
    let line = line!() - 1;
    assert_eq!(
        error,
        format!(
            "linear: f32[32, 10] × f32[5, 20]: inner sizes 10 and 20 differ, at layers.3.fc, basics.rs:{line}"
        )
    );
    let check = |result: Result<Tensor>, want: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with(want), "{error}");
    };
    check(x.add(&w), "add: f32[32, 10] × f32[5, 20]: shapes [32, 10] and [5, 20] don't broadcast together");
    check(x.sum_dim(2, false), "sum: dim 2 is out of range for a tensor with 2 dims");
    check(
        Tensor::zeros([usize::MAX, 2], &CPU),
        "full: float: shape [18446744073709551615, 2] has too many elements",
    );
    check(Tensor::zeros([1 << 45], &CPU), "full: can't allocate 140737488355328 bytes");
    check(Tensor::zeros([1], &Device::Cuda(0)), "full: cuda:0 is not available");
    Ok(())
}

#[test]
fn in_place_rules() -> Result<()> {
    let x = t(&[1.0, 2.0]);
    assert!(x.add_(&Tensor::zeros([3, 2], &CPU)?).unwrap_err().to_string().contains("can't be written into"));
    assert!(
        Tensor::from_slice(&[1i64])?.add_(0.5).unwrap_err().to_string().contains("can't be written into")
    );
    assert!(Tensor::zeros([1], &CPU)?.expand([4])?.add_(1.0).unwrap_err().to_string().contains("expanded"));
    x.requires_grad_(true)?;
    assert!(x.mul_(2.0).unwrap_err().to_string().contains("leaf"));
    {
        let _guard = no_grad();
        x.mul_(2.0)?;
    }
    assert_eq!(x.to_vec::<f32>()?, [2.0, 4.0]);
    let y = x.exp()?;
    let z = y.mul(&y)?;
    {
        let _guard = no_grad();
        y.add_(1.0)?;
    }
    assert!(z.sum()?.backward().unwrap_err().to_string().contains("changed in place"));
    assert!(x.grad().is_none());
    let loss = x.exp()?.sum()?;
    loss.backward()?;
    assert!(loss.backward().unwrap_err().to_string().contains("freed"));
    Ok(())
}

#[test]
fn empty_and_zero_dim_tensors() -> Result<()> {
    let empty = Tensor::zeros([0, 3], &CPU)?;
    assert_eq!(empty.add(1.0)?.to_vec::<f32>()?, Vec::<f32>::new());
    assert_eq!(empty.sum()?.item::<f32>()?, 0.0);
    assert_eq!(empty.softmax(-1)?.shape(), Shape::from([0, 3]));
    assert_eq!(Tensor::zeros((), &CPU)?.exp()?.item::<f32>()?, 1.0);
    assert_eq!(empty.t()?.mm(&Tensor::zeros([0, 2], &CPU)?)?.to_vec::<f32>()?, vec![0.0; 6]);
    Ok(())
}

#[test]
fn printing_reads_like_pytorch() -> Result<()> {
    let x = Tensor::from_vec(vec![1.0f32, 2.5, -3.0, 4.0], [2, 2])?;
    assert_eq!(x.to_string(), "tensor([[ 1.0000,  2.5000],\n        [-3.0000,  4.0000]])");
    assert_eq!(Tensor::arange(0, 3, &CPU)?.to_string(), "tensor([0, 1, 2])");
    Ok(())
}

#[test]
fn data_is_replaced_and_the_tensor_stays() -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32, 2.0])?;
    x.requires_grad_(true)?;
    let same = x.clone();
    let y = x.mul(&x)?.sum()?;
    x.set_data(&Tensor::from_slice(&[3.0f64, 4.0, 5.0])?)?;
    assert_eq!((same.dtype(), same.to_vec_cast::<f64>()?), (DType::F64, vec![3.0, 4.0, 5.0]));
    assert!(same.same(&x) && same.requires_grad() && same.is_leaf());
    x.mul(&x)?.sum()?.backward()?;
    assert_eq!(x.grad().map(|g| g.to_vec_cast::<f64>()).transpose()?, Some(vec![6.0, 8.0, 10.0]));
    // What was computed before keeps what it was computed from.
    assert_eq!(y.item::<f32>()?, 5.0);
    assert!(y.set_data(&x).is_err(), "not a leaf");
    assert!(x.set_data(&Tensor::from_slice(&[1i64])?).is_err(), "integers have no gradient");

    // Readers see one or the other, whenever it happens.
    let shared = Tensor::from_slice(&[1.0f32; 100])?;
    let (one, two) = (Tensor::from_slice(&[1.0f32; 100])?, Tensor::from_slice(&[2.0f32; 50])?);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let seen = shared.to_vec::<f32>().expect("ready");
                    assert!(seen == [1.0; 100] || seen == [2.0; 50]);
                }
            });
        }
        for i in 0..500 {
            shared.set_data(if i % 2 == 0 { &two } else { &one }).expect("a leaf");
        }
    });
    Ok(())
}

#[test]
fn bytes_are_what_files_hold() -> Result<()> {
    let x = Tensor::from_bytes(&[0, 1, 2, 255], [2, 2], DType::Bool)?;
    assert_eq!(x.to_vec::<bool>()?, [false, true, true, true]);
    assert_eq!(x.t()?.to_bytes()?, [0, 1, 1, 1]);
    assert_eq!(Tensor::from_slice(&[1.0f32, -2.0])?.to_bytes()?, [0, 0, 128, 63, 0, 0, 0, 192]);
    assert!(Tensor::from_bytes(&[0; 7], [2], DType::F32).is_err());
    assert_eq!(Tensor::from_bytes(&[], [0, 2], DType::F64)?.shape().to_vec(), [0, 2]);
    Ok(())
}
