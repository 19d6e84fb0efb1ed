//! Kernels that work element by element: functions, comparisons, casts, fills.

use kiln_ir::math::{Function, Width};
use kiln_ir::{DType, bf16, f16};

use super::{Array, Item, LAYOUTS, Layout, expect, sweep};
use crate::kernels::pointwise::Unsupported;
use crate::kernels::*;

#[test]
fn float_functions() {
    float_functions_of(&[DType::F32, DType::F64]);
}

#[test]
fn half_functions() {
    float_functions_of(&[DType::F16, DType::BF16]);
}

fn float_functions_of(dtypes: &[DType]) {
    for &function in Function::ALL {
        for &dtype in dtypes {
            let width = if dtype == DType::F64 { Width::F64 } else { Width::F32 };
            sweep(
                function.name(),
                dtype,
                &vec![dtype; function.arity()],
                // SAFETY: operands made for this call.
                |out, inputs| unsafe { pointwise(function, out, inputs).unwrap() },
                |args| {
                    let args: Vec<f64> = args.iter().map(|a| a.float()).collect();
                    Item::Float(dtype.round(function.eval(width, &args)))
                },
            );
        }
    }
}

#[test]
fn integer_functions() {
    type Naive = fn(&[i64]) -> i64;
    let cases: &[(Function, Naive)] = &[
        (Function::Add, |a| a[0].wrapping_add(a[1])),
        (Function::Sub, |a| a[0].wrapping_sub(a[1])),
        (Function::Mul, |a| a[0].wrapping_mul(a[1])),
        (Function::Neg, |a| a[0].wrapping_neg()),
        (Function::Abs, |a| a[0].wrapping_abs()),
        (Function::Relu, |a| a[0].max(0)),
        (Function::Maximum, |a| a[0].max(a[1])),
        (Function::Minimum, |a| a[0].min(a[1])),
        (Function::AddAlpha, |a| a[0].wrapping_add(a[1].wrapping_mul(a[2]))),
        (Function::SubAlpha, |a| a[0].wrapping_sub(a[1].wrapping_mul(a[2]))),
    ];
    for (function, naive) in cases {
        for dtype in DType::ALL.into_iter().filter(|d| d.computing() == DType::I64) {
            sweep(
                function.name(),
                dtype,
                &vec![dtype; function.arity()],
                // SAFETY: operands made for this call.
                |out, inputs| unsafe { pointwise(*function, out, inputs).unwrap() },
                |args| Item::Int(dtype.wrap(naive(&args.iter().map(|a| a.int()).collect::<Vec<_>>()))),
            );
        }
    }
}

#[test]
fn rare_arguments_among_others() {
    for dtype in [DType::F32, DType::F64] {
        let width = if dtype == DType::F64 { Width::F64 } else { Width::F32 };
        for function in Function::ALL.iter().copied().filter(|f| f.has_rare()) {
            for in_place in [false, true] {
                let mut arrays: Vec<Array> = (0..function.arity() as u64)
                    .map(|i| Array::new(dtype, &[5, 1000], Layout::Contiguous, 1 + i))
                    .collect();
                // Blocks without any, with one at either end, and with nothing else.
                for at in [255, 256, 999, 1000, 4999].into_iter().chain(2000..2600) {
                    arrays[0].write(at, Item::Float(dtype.round(3e25 + at as f64 * 1e22)));
                }
                let columns: Vec<Vec<Item>> = arrays.iter().map(Array::items).collect();
                let expected: Vec<Item> = (0..5000)
                    .map(|i| {
                        let args: Vec<f64> = columns.iter().map(|column| column[i].float()).collect();
                        Item::Float(function.eval(width, &args))
                    })
                    .collect();
                let mut result = Array::new(dtype, &[5, 1000], Layout::Contiguous, 99);
                let operands: Vec<Operand> = arrays.iter_mut().map(Array::operand).collect();
                let out = if in_place { &operands[0] } else { &result.operand() };
                // SAFETY: the output is the first input or apart from all.
                unsafe { pointwise(function, out, &operands.iter().collect::<Vec<_>>()).unwrap() };
                let got = if in_place { &arrays[0] } else { &result };
                expect(function.name(), got, &expected);
            }
        }
    }
}

#[test]
fn divisions_of_integers() {
    use kiln_ir::Division;
    for dtype in DType::ALL.into_iter().filter(|d| d.computing() == DType::I64 && *d != DType::Bool) {
        for layout in LAYOUTS {
            for division in [Division::FloorDivide, Division::DivTrunc, Division::Remainder, Division::Fmod] {
                for seed in 1..5 {
                    let mut x = Array::new(dtype, &[7, 70], Layout::Gaps, seed);
                    let mut y = Array::new(dtype, &[7, 70], layout, seed + 5);
                    for i in 0..y.memory.len() - 1 {
                        if y.read(i).int() == 0 {
                            y.write(i, Item::Int(7));
                        }
                    }
                    let expected: Vec<Item> = (x.items().iter().zip(y.items()))
                        .map(|(x, y)| Item::Int(dtype.wrap(division.checked(x.int(), y.int()).unwrap())))
                        .collect();
                    let mut result = Array::new(dtype, &[7, 70], Layout::Reversed, 99);
                    // SAFETY: operands made for this call.
                    unsafe { divide(division, &result.operand(), &x.operand(), &y.operand()) }.unwrap();
                    expect(division.name(), &result, &expected);
                }
            }
        }
    }
}

#[test]
fn a_division_without_result_writes_nothing() {
    use kiln_ir::Division;
    for (divisor, x, division) in [
        (0, 5, Division::Remainder),
        (0, 5, Division::FloorDivide),
        (-1, i64::MIN, Division::FloorDivide),
        (-1, i64::MIN, Division::DivTrunc),
    ] {
        for layout in [Layout::Scalar, Layout::Contiguous] {
            let mut values = Array::new(DType::I64, &[300], Layout::Contiguous, 1);
            values.write(250, Item::Int(x));
            let mut by = Array::new(DType::I64, &[300], layout, 2);
            (0..by.memory.len() - 1).for_each(|i| by.write(i, Item::Int(divisor)));
            let before = values.items();
            // SAFETY: the output is the first input.
            let done = unsafe {
                let out = values.operand();
                divide(division, &out, &out, &by.operand())
            };
            let first = if divisor == 0 { before[0].int() } else { x };
            assert_eq!(done, Err((first, divisor)), "{division:?}");
            expect("untouched", &values, &before);
        }
    }
}

#[test]
fn integer_power() {
    for (base, exponent, expected) in [
        (3, 4, 81),
        (-2, 63, i64::MIN),
        (10, 20, 10i64.wrapping_pow(20)),
        (0, 0, 1),
        (2, -1, 0),
        (-1, -3, -1),
    ] {
        let mut arrays = [base, exponent, 0].map(|v| {
            let mut array = Array::new(DType::I64, &[], Layout::Contiguous, 1);
            array.write(0, Item::Int(v));
            array
        });
        let [base, exponent, out] = &mut arrays;
        // SAFETY: operands made for this call.
        unsafe { pointwise(Function::Pow, &out.operand(), &[&base.operand(), &exponent.operand()]).unwrap() };
        assert_eq!(out.read(0), Item::Int(expected));
    }
}

#[test]
fn unsupported_functions_say_so() {
    let mut array = Array::new(DType::I64, &[3], Layout::Contiguous, 1);
    let operand = array.operand();
    // SAFETY: operands made for this call.
    let error = unsafe { pointwise(Function::Exp, &operand, &[&operand]) }.unwrap_err();
    assert_eq!(error, Unsupported { function: "exp", dtype: DType::I64 });
}

#[test]
fn comparisons() {
    type Naive = fn(f64, f64) -> bool;
    let cases: [(Comparison, Naive); 6] = [
        (Comparison::Eq, |a, b| a == b),
        (Comparison::Ne, |a, b| a != b),
        (Comparison::Lt, |a, b| a < b),
        (Comparison::Le, |a, b| a <= b),
        (Comparison::Gt, |a, b| a > b),
        (Comparison::Ge, |a, b| a >= b),
    ];
    for (comparison, naive) in cases {
        for dtype in DType::ALL {
            sweep(
                "compare",
                DType::Bool,
                &[dtype, dtype],
                // SAFETY: operands made for this call.
                |out, inputs| unsafe { compare(comparison, out, inputs[0], inputs[1]) },
                |args| Item::Int(i64::from(naive(args[0].float(), args[1].float()))),
            );
        }
    }
}

#[test]
fn logic_and_where() {
    for (connective, arity) in [(Logical::And, 2), (Logical::Not, 1)] {
        sweep(
            "logical",
            DType::Bool,
            &vec![DType::Bool; arity],
            // SAFETY: operands made for this call.
            |out, inputs| unsafe { logical(connective, out, inputs) },
            |args| {
                let a = args[0].int();
                Item::Int(match connective {
                    Logical::And => a & args[1].int(),
                    Logical::Not => 1 - a,
                })
            },
        );
    }
    for dtype in DType::ALL {
        sweep(
            "where",
            dtype,
            &[DType::Bool, dtype, dtype],
            // SAFETY: operands made for this call.
            |out, inputs| unsafe { select(out, inputs[0], inputs[1], inputs[2]) },
            |args| if args[0].int() != 0 { args[1] } else { args[2] },
        );
    }
}

#[test]
fn casts_between_all_dtypes() {
    for from in DType::ALL {
        for to in DType::ALL {
            sweep(
                "convert",
                to,
                &[from],
                // SAFETY: operands made for this call.
                |out, inputs| unsafe { convert(out, inputs[0]) },
                |args| match (args[0], to) {
                    (Item::Int(i), DType::Bool) => Item::Int(i64::from(i != 0)),
                    (Item::Float(f), DType::Bool) => Item::Int(i64::from(f != 0.0)),
                    (Item::Int(i), to) if to.computing() == DType::F32 => {
                        Item::Float(to.round(f64::from(i as f32)))
                    }
                    (item, to) if to.is_float() => Item::Float(to.round(item.float())),
                    (item, to) => Item::Int(to.wrap(item.int())),
                },
            );
        }
    }
}

#[test]
fn in_place() {
    for shape in [&[1][..], &[7], &[1000], &[33, 70], &[300, 400]] {
        for layout in [Layout::Contiguous, Layout::Reversed, Layout::Gaps] {
            let mut x = Array::new(DType::F32, shape, layout, 1);
            let mut y = Array::new(DType::F32, shape, Layout::Contiguous, 2);
            let expected: Vec<Item> = (x.items().iter().zip(y.items()))
                .map(|(a, b)| Item::Float(f64::from(a.float() as f32 * b.float() as f32)))
                .collect();
            // SAFETY: the output is the first input.
            unsafe {
                let out = x.operand();
                pointwise(Function::Mul, &out, &[&out, &y.operand()]).unwrap();
            }
            expect("mul_", &x, &expected);
        }
    }
}

#[test]
fn large_operands_use_threads() {
    for (shape, layout) in
        [(&[700, 300][..], Layout::Row), (&[300, 700], Layout::Reversed), (&[5000, 20], Layout::Row)]
    {
        let mut x = Array::new(DType::F32, shape, Layout::Contiguous, 1);
        let mut y = Array::new(DType::F32, shape, layout, 2);
        let mut out = Array::new(DType::F32, shape, Layout::Contiguous, 3);
        let expected: Vec<Item> = (x.items().iter().zip(y.items()))
            .map(|(a, b)| Item::Float(f64::from(a.float() as f32 + b.float() as f32)))
            .collect();
        // SAFETY: operands made for this call.
        unsafe { pointwise(Function::Add, &out.operand(), &[&x.operand(), &y.operand()]).unwrap() };
        expect("add", &out, &expected);
        // SAFETY: operands made for this call.
        unsafe { convert(&out.operand(), &y.operand()) };
        expect("copy", &out, &y.items());
    }
}

#[test]
fn fill_and_arange() {
    let mut x = Array::new(DType::F32, &[4, 33], Layout::Gaps, 1);
    // SAFETY: operands made for this call.
    unsafe { fill(&x.operand(), u64::from(2.5f32.to_bits())) };
    expect("fill", &x, &vec![Item::Float(2.5); 132]);
    let mut y = Array::new(DType::I64, &[5], Layout::Gaps, 1);
    // SAFETY: operands made for this call.
    unsafe { arange(&y.operand(), 3.0, 2.0) };
    expect("arange", &y, &[3, 5, 7, 9, 11].map(Item::Int));
    let mut z = Array::new(DType::F32, &[3], Layout::Contiguous, 1);
    // SAFETY: operands made for this call.
    unsafe { arange(&z.operand(), 0.5, 0.25) };
    expect("arange", &z, &[0.5, 0.75, 1.0].map(Item::Float));
    // Halves that lie side by side are rounded as others are: from f64 to f32, and then once more.
    for dtype in [DType::F16, DType::BF16] {
        let made = |layout| {
            let mut x = Array::new(dtype, &[1300], layout, 1);
            // SAFETY: operands made for this call.
            unsafe { arange(&x.operand(), 0.3, 0.007) };
            x
        };
        let rounded = |i: usize| {
            let x = (0.3 + i as f64 * 0.007) as f32;
            if dtype == DType::F16 { f16::from_f32(x).to_f64() } else { bf16::from_f32(x).to_f64() }
        };
        let items: Vec<Item> = (0..1300).map(|i| Item::Float(rounded(i))).collect();
        expect("arange", &made(Layout::Contiguous), &items);
        expect("arange", &made(Layout::Gaps), &items);
    }
}
