//! Narrow dtypes: what memory holds, how integers wrap and halves round, and what is added up in a wider type.

use kiln_tensor::{DType, Device, Element, Result, Scalar, Tensor, bf16, f16, manual_seed};

const CPU: Device = Device::Cpu;

fn survives<T: Element + PartialEq + std::fmt::Debug + Into<Scalar>>(data: &[T]) -> Result<()> {
    let x = Tensor::from_vec(data.to_vec(), data.len())?;
    assert_eq!(x.dtype(), T::DTYPE);
    assert_eq!(x.to_vec::<T>()?, data);
    assert_eq!(x.select(0, 1)?.item::<T>()?, data[1]);
    let full = Tensor::full_of([3], data[1], T::DTYPE, &CPU)?;
    assert_eq!(full.to_vec::<T>()?, [data[1]; 3]);
    full.write_slice(&[data[0], data[1], data[2]])?;
    assert_eq!(full.to_vec::<T>()?, data[..3]);
    // Every value of the narrow dtypes is a value of its computing type.
    assert_eq!(x.to_dtype(T::DTYPE.computing())?.to_dtype(T::DTYPE)?.to_vec::<T>()?, data);
    Ok(())
}

#[test]
fn host_data_goes_in_and_comes_back() -> Result<()> {
    survives(&[0u8, 7, 255])?;
    survives(&[i8::MIN, -1, i8::MAX])?;
    survives(&[i16::MIN, -1, i16::MAX])?;
    survives(&[i32::MIN, -1, i32::MAX])?;
    survives(&[f16::from_f32(0.1), f16::MAX, f16::from_bits(1), f16::NEG_INFINITY])?;
    survives(&[bf16::from_f32(0.1), bf16::MAX, bf16::from_bits(1), bf16::NEG_INFINITY])
}

#[test]
fn integers_wrap_to_their_width() -> Result<()> {
    let x = Tensor::from_slice(&[200u8, 100, 3])?;
    assert_eq!(x.add(100)?.to_vec::<u8>()?, [44, 200, 103]);
    assert_eq!(x.mul(&x)?.to_vec::<u8>()?, [64, 16, 9]);
    assert_eq!(x.neg()?.to_vec::<u8>()?, [56, 156, 253]);
    assert_eq!(x.pow(2)?.to_vec::<u8>()?, [64, 16, 9]);
    // As PyTorch has it, a number is wrapped to the tensor's dtype before it is compared.
    assert_eq!(x.eq(256 + 100)?.to_vec::<bool>()?, [false, true, false]);
    let y = Tensor::from_slice(&[-128i8, 127, -1])?;
    assert_eq!(y.abs()?.to_vec::<i8>()?, [-128, 127, 1]);
    assert_eq!(y.add(&x)?.to_vec::<i16>()?, [72, 227, 2]);
    assert_eq!(y.add(1)?.to_vec::<i8>()?, [-127, -128, 0]);
    y.add_(&y)?;
    assert_eq!(y.to_vec::<i8>()?, [0, -2, -2]);
    let wide = Tensor::from_slice(&[70000i64, -1, 1 << 40])?;
    assert_eq!(wide.to_dtype(DType::I16)?.to_vec::<i16>()?, [4464, -1, 0]);
    assert_eq!(wide.to_dtype(DType::U8)?.to_vec_cast::<i64>()?, [112, 255, 0]);
    let floats = Tensor::from_slice(&[300.7f32, -1.5, 1e20])?;
    assert_eq!(floats.to_dtype(DType::U8)?.to_vec::<u8>()?, [44, 255, 255]);
    Ok(())
}

#[test]
fn halves_round_to_nearest_even() -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 65519.0, 65520.0, 1e-8])?;
    let halves = x.to_dtype(DType::F16)?.to_vec_cast::<f32>()?;
    assert_eq!(halves, [1.0, 1.0 + 2.0 / 1024.0, 65504.0, f32::INFINITY, 0.0]);
    let brains = x.to_dtype(DType::BF16)?.to_vec_cast::<f32>()?;
    assert_eq!(brains[..4], [1.0, 1.0, 65536.0, 65536.0]);
    // A number takes part as it is: 1e5 alone would be infinite.
    let small = Tensor::from_slice(&[f16::from_f32(0.125)])?;
    assert_eq!(small.mul(1e5)?.to_vec_cast::<f32>()?, [12496.0]);
    assert_eq!(small.lt(1e5)?.to_vec::<bool>()?, [true]);
    let nan = Tensor::from_slice(&[f32::NAN])?;
    assert!(nan.to_dtype(DType::F16)?.item::<f32>()?.is_nan());
    assert!(nan.to_dtype(DType::BF16)?.item::<f32>()?.is_nan());
    Ok(())
}

#[test]
fn sums_are_added_up_in_a_wider_type() -> Result<()> {
    let ones = Tensor::full_of([4, 30000], 1, DType::F16, &CPU)?;
    assert_eq!(ones.mean()?.item::<f32>()?, 1.0);
    assert_eq!(ones.sum_dim(1, false)?.to_vec_cast::<f32>()?, [30000.0; 4]);
    assert!(ones.sum()?.item::<f32>()?.is_infinite());
    let bytes = Tensor::full_of([1000], 200, DType::U8, &CPU)?;
    assert_eq!((bytes.sum()?.dtype(), bytes.sum()?.item::<i64>()?), (DType::I64, 200_000));
    let rows = Tensor::full_of([2, 4096], 0.5, DType::BF16, &CPU)?;
    let product = rows.mm(&rows.t()?)?;
    assert_eq!((product.dtype(), product.to_vec_cast::<f32>()?), (DType::BF16, vec![1024.0; 4]));
    let p = rows.softmax(1)?;
    assert_eq!(p.to_vec_cast::<f32>()?, vec![1.0 / 4096.0; 8192]);
    Ok(())
}

#[test]
fn random_halves_are_rounded_singles() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        manual_seed(3);
        let single = Tensor::rand([1000], &CPU)?.to_dtype(dtype)?;
        manual_seed(3);
        let half = Tensor::rand_of([1000], dtype, &CPU)?;
        assert_eq!(half.dtype(), dtype);
        assert_eq!(half.to_vec_cast::<f32>()?, single.to_vec_cast::<f32>()?);
    }
    Ok(())
}

#[test]
fn gradients_have_the_operands_dtype() -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32, -2.0, 3.0])?.to_dtype(DType::BF16)?;
    x.requires_grad_(true)?;
    let y = x.mul(&x)?.to_dtype(DType::F32)?.sum()?;
    y.backward()?;
    let gradient = x.grad().expect("a leaf has its gradient");
    assert_eq!((gradient.dtype(), gradient.to_vec_cast::<f32>()?), (DType::BF16, vec![2.0, -4.0, 6.0]));
    Ok(())
}

#[test]
fn printing_names_the_dtype() -> Result<()> {
    assert_eq!(Tensor::from_slice(&[1u8, 200])?.to_string(), "tensor([  1, 200], dtype=u8)");
    let halves = Tensor::from_slice(&[f16::from_f32(0.5), f16::from_f32(-2.0)])?;
    assert_eq!(halves.to_string(), "tensor([ 0.5000, -2.0000], dtype=f16)");
    Ok(())
}

/// Nothing is converted unasked, whatever the values: every pair of dtypes.
#[test]
fn host_reads_convert_only_where_asked() -> Result<()> {
    fn reads<T: Element>(x: &Tensor) -> Result<()> {
        let (own, wanted) = (x.dtype(), T::DTYPE);
        let text = |error: kiln_tensor::Error| error.to_string();
        assert_eq!(x.to_vec::<T>().is_ok(), own == wanted, "{own} as {wanted}");
        if own != wanted {
            let error = x.to_vec::<T>().err().map(text).unwrap_or_default();
            assert!(
                error.contains(&format!("the tensor holds {own}, not {wanted} (convert with to_vec_cast)"))
            );
            assert!(error.contains("dtypes.rs:"), "{error}");
        }
        assert!(x.to_vec_cast::<T>().is_ok());
        // 1 is in every type; a float is no integer.
        let fits = own.is_float() <= wanted.is_float();
        assert_eq!(x.select(0, 0)?.item::<T>().is_ok(), fits, "{own} as {wanted}");
        Ok(())
    }
    for dtype in DType::ALL {
        let x = Tensor::from_slice(&[1i64, 0])?.to_dtype(dtype)?;
        reads::<bool>(&x)?;
        reads::<u8>(&x)?;
        reads::<i8>(&x)?;
        reads::<i16>(&x)?;
        reads::<i32>(&x)?;
        reads::<i64>(&x)?;
        reads::<f16>(&x)?;
        reads::<bf16>(&x)?;
        reads::<f32>(&x)?;
        reads::<f64>(&x)?;
    }
    let item = |value: i64| Tensor::new(&value, &Device::Cpu);
    assert!(item(1 << 53)?.item::<f64>().is_ok() && item((1 << 53) + 1)?.item::<f64>().is_err());
    assert!(item(-1)?.item::<u8>().is_err() && item(2)?.item::<bool>().is_err());
    assert!(item(i64::MAX)?.item::<f64>().is_err() && item(i64::MIN)?.item::<f32>().is_ok());
    Ok(())
}
