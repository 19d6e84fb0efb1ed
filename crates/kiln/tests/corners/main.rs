//! The corners of ops: small integers and numbers they can't hold, single numbers and no elements, memory that must
//! not be shared, memory that nobody has written, and calls that PyTorch takes. Each sweeps a class, eagerly and
//! compiled.

#![allow(clippy::unwrap_used)] // a test may panic

mod memory;
mod numbers;
mod windows;
mod zero_dims;

use kiln::{Backend, Compile, DType, Result, Tensor};

/// What a function returns: eagerly, by the passes with eager kernels, and compiled.
fn everywhere(what: &str, f: impl Fn() -> Result<Vec<Tensor>>) -> Vec<Tensor> {
    let eager = f().unwrap_or_else(|error| panic!("{what}: {error}"));
    for backend in [Backend::AotEager, Backend::Inductor] {
        let region = Compile::new().backend(backend).region();
        let other = region.run(&f).unwrap_or_else(|error| panic!("{what}, {backend:?}: {error}"));
        assert_eq!(eager.len(), other.len());
        for (i, (a, b)) in eager.iter().zip(&other).enumerate() {
            assert_eq!(a.ty(), b.ty(), "{what}, {backend:?}, result {i}");
            assert_eq!(
                a.to_bytes().unwrap(),
                b.to_bytes().unwrap(),
                "{what}, {backend:?}, result {i}: {a} and {b}"
            );
        }
    }
    eager
}

/// Elements as integers.
fn ints(t: &Tensor) -> Vec<i64> {
    t.to_dtype(DType::I64).unwrap().to_vec::<i64>().unwrap()
}

/// Elements as doubles.
fn floats(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap()
}
