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

/// Numbers are holes: what eager says of one that it refuses is said on replay, too.
#[test]
fn a_number_that_is_refused_on_replay() -> Result<()> {
    for backend in [Backend::Eager, Backend::AotEager, Backend::Inductor] {
        let region = Compile::new().backend(backend).region();
        let x = Tensor::from_slice(&[7i64, -7, 9])?;
        let body = |y: i64| -> Result<Vec<i64>> { x.floor_divide(y)?.add(1)?.to_vec::<i64>() };
        let noise = Tensor::from_slice(&[1f32, 2.0])?;
        for y in [2, 3, 0, 1, 0, 5] {
            let (want, got) = (body(y), region.run(|| body(y)));
            assert_eq!(got.map_err(|e| e.to_string()), want.map_err(|e| e.to_string()), "{backend}, {y}");
        }
        let drop = |p: f64| noise.dropout(p, true).and_then(|y| y.to_vec::<f32>()).map(drop);
        for p in [0.0, 0.5, 1.5, 1.0, -0.1] {
            let (want, got) = (drop(p), region.run(|| drop(p)));
            assert_eq!(got.map_err(|e| e.to_string()), want.map_err(|e| e.to_string()), "{backend}, {p}");
        }
    }
    Ok(())
}
