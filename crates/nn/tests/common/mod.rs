//! Reading fixtures and comparing numbers.

use kiln_tensor::{DType, Result, Tensor};
use serde_json::Value;

/// The two dtypes: the fixture's key, and the tolerance, relative to the largest number compared.
pub const DTYPES: [(&str, DType, f64); 2] = [("f32", DType::F32, 1e-5), ("f64", DType::F64, 1e-12)];

/// The numbers of a JSON list.
pub fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
}

/// A tensor of these numbers.
pub fn tensor(data: &[f64], shape: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::from_vec(data.to_vec(), shape)?.to_dtype(dtype)
}

/// Panics unless all numbers are equal within the tolerance.
#[track_caller]
pub fn assert_close(got: &Tensor, want: &[f64], tolerance: f64, what: &str) -> Result<()> {
    let got = got.to_vec_cast::<f64>()?;
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance * w.abs().max(0.1), "{what}: element {i} is {g}, not {w}");
    }
    Ok(())
}
