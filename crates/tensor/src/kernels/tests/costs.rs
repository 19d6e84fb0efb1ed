//! What scalar functions take, as the rows' numbers of instructions say it.
//!
//! `cargo test --release -p kiln-tensor costs -- --ignored --nocapture` prints the table that the numbers come from.

use super::super::{Operand, pointwise};
use kiln_ir::DType;
use kiln_ir::math::Function;
use std::time::Instant;

/// Elements that stay in the first-level cache, and too few for a second thread.
const COUNT: usize = 1024;

/// Nanoseconds that the quickest of many calls takes.
fn time(function: Function, dtype: DType) -> f64 {
    let size = dtype.size();
    let mut memory = vec![0u64; 5 * COUNT];
    let base: *mut u8 = memory.as_mut_ptr().cast();
    for i in 0..4 * COUNT {
        // Inside all domains, and with quotients of ordinary size.
        let value = 0.05 + 0.9 * ((i * 7919) % 10_007) as f64 / 10_007.0;
        let at = base.wrapping_add((COUNT + i) * size);
        // SAFETY: the memory has five times as many elements of eight bytes.
        unsafe {
            match dtype {
                DType::F64 => at.cast::<f64>().write(value),
                _ => at.cast::<f32>().write(value as f32),
            }
        }
    }
    let operand = |place: usize| Operand {
        ptr: base.wrapping_add(place * COUNT * size),
        dtype,
        shape: &[COUNT],
        strides: &[1],
    };
    let (out, inputs) = (operand(0), [1, 2, 3, 4].map(operand));
    let inputs: Vec<&Operand> = inputs[..function.arity()].iter().collect();
    (0..2000)
        .map(|_| {
            let start = Instant::now();
            // SAFETY: dense operands that don't overlap.
            unsafe { pointwise(function, &out, &inputs) }.unwrap();
            start.elapsed().as_nanos() as f64
        })
        .fold(f64::INFINITY, f64::min)
}

/// What is more than a product takes: two vectors are loaded, multiplied and stored in the time of six instructions,
/// which makes exp the 16 that it has.
fn instructions(function: Function, dtype: DType) -> f64 {
    (6.0 * (time(function, dtype) / time(Function::Mul, dtype) - 1.0) + 1.0).max(1.0)
}

#[test]
#[ignore = "measures"]
fn costs() {
    let mut table = String::from("function          row    f32    f64\n");
    for &function in Function::ALL {
        let [f32, f64] = [DType::F32, DType::F64].map(|dtype| instructions(function, dtype).round());
        table += &format!("{:16} {:4} {f32:6} {f64:6}\n", function.name(), function.instructions());
    }
    std::io::Write::write_all(&mut std::io::stdout(), table.as_bytes()).unwrap();
}
