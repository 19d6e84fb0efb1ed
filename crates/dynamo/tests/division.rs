//! Integers divided by zero are an error of compiled programs too, and leave the operands as they were.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_dynamo::{Backend, Compile};
use kiln_ir::Why;
use kiln_tensor::{Result, Tensor};

#[test]
fn division_by_zero_is_an_error_in_a_compiled_program() -> Result<()> {
    for backend in [Backend::AotEager, Backend::Inductor] {
        let region = Compile::new().backend(backend).region();
        let run = |x: &Tensor, y: &Tensor| region.run(|| x.floor_divide(y)?.add(1)?.to_vec::<i64>());
        let x = Tensor::from_slice(&[7i64, -7, 9])?;
        assert_eq!(run(&x, &Tensor::from_slice(&[2i64, 2, -2])?)?, [4, -3, -4]);
        let error = run(&x, &Tensor::from_slice(&[1i64, 1, 0])?).unwrap_err();
        assert_eq!(error.why(), Some(&Why::Division { x: 9, y: 0 }), "{error}");
        assert!(error.to_string().contains("floor_divide"), "{error}");
        assert_eq!(x.to_vec::<i64>()?, [7, -7, 9]);
        assert_eq!(run(&x, &Tensor::from_slice(&[1i64, 1, 1])?)?, [8, -6, 10]);
    }
    Ok(())
}
