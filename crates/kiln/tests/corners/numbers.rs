//! Numbers that meet small integers: limits keep their meaning, everything else wraps as PyTorch's does.

use kiln::ir::{Class, Op, Scalar, Ty};
use kiln::tensor::{Arg, Output, run_op};
use kiln::{DType, Device, Tensor};

use crate::{everywhere, floats, ints};

const SMALL: [DType; 4] = [DType::U8, DType::I8, DType::I16, DType::I32];
const NUMBERS: [i64; 12] =
    [-3_000_000_000, -70_000, -300, -129, -5, 0, 3, 127, 255, 300, 70_000, 3_000_000_000];

fn elements(dtype: DType) -> (Vec<i64>, Tensor) {
    let (least, most) = dtype.narrow_range().unwrap();
    let values = vec![least, least + 1, 0, 1, 2, 5, 44, 100, most - 1, most];
    let tensor = Tensor::from_slice(&values).unwrap().to_dtype(dtype).unwrap();
    (values, tensor)
}

#[test]
fn limits_keep_their_meaning() {
    for dtype in SMALL {
        let (values, x) = elements(dtype);
        let (least, most) = dtype.narrow_range().unwrap();
        let all = everywhere(&format!("limits of {dtype}"), || {
            let mut all = Vec::new();
            for n in NUMBERS {
                all.extend([x.clamp_min(n)?, x.maximum(n)?, x.clamp_max(n)?, x.minimum(n)?]);
                all.extend([x.clamp(n, n + 50)?, x.hardtanh(n, n + 50)?]);
            }
            all.push(x.relu6()?);
            Ok(all)
        });
        let limited = |low: i64, high: i64| {
            let near = |n: i64| n.clamp(least, most);
            values.iter().map(|&x| x.max(near(low)).min(near(high))).collect::<Vec<i64>>()
        };
        for (n, got) in NUMBERS.into_iter().zip(all.chunks(6)) {
            let wanted = [limited(n, most), limited(least, n), limited(n, n + 50)];
            for (i, want) in wanted.iter().enumerate() {
                assert_eq!(ints(&got[2 * i]), *want, "{dtype} and {n}, {i}");
                assert_eq!(ints(&got[2 * i + 1]), *want, "{dtype} and {n}, {i}");
            }
        }
        assert_eq!(ints(all.last().unwrap()), limited(0, 6));
    }
}

/// Pointwise rows of an element and a number.
fn rows() -> impl Iterator<Item = Op> {
    let of_two = Op::ROWS.iter().filter(|row| row.class == Class::Pointwise && row.args.len() == 2);
    of_two.filter_map(|row| Op::parse(row.name, &mut |_| None))
}

/// `op(x, n)` is `op(x, n as an element)`: every row, whatever the number.
#[test]
fn other_numbers_wrap_to_elements() {
    let call = |op: &Op, args: &[Arg<'_>]| match run_op(op, args) {
        Ok(Output::Tensor(y)) => Ok(y),
        Ok(Output::List(_)) => unreachable!("no lists were given"),
        Err(error) => Err(error),
    };
    for dtype in SMALL {
        let (_, x) = elements(dtype);
        let tys = [Ty::from(x.ty()), Ty::from(x.ty())];
        // What makes floats of integers takes numbers as floats.
        let stays = |op: &Op| {
            let result = op.infer(&tys).ok().and_then(|tys| tys[0].as_tensor().map(|ty| ty.dtype));
            result.is_some_and(|dtype| !dtype.is_float())
        };
        let mut ops: Vec<Op> = rows().filter(|op| stays(op) && !op.takes_limits()).collect();
        // Limits have the other rule, and truth values ask only whether a number is zero.
        ops.retain(|op| !op.name().starts_with("clamp") && !op.name().starts_with("logical"));
        // Division by zero is an error; numbers that wrap to zero are left out there.
        let fits = |op: &Op, n: i64| {
            let divides = ["floor_divide", "div_trunc", "remainder", "fmod"].contains(&op.name());
            !divides || (dtype.wrap(n) != 0 && dtype.wrap(n) != -1)
        };
        assert!(ops.len() > 15, "{} rows", ops.len());
        let all = everywhere(&format!("numbers and {dtype}"), || {
            let mut all = Vec::new();
            for op in &ops {
                for n in NUMBERS.into_iter().filter(|&n| fits(op, n)) {
                    all.push(call(op, &[Arg::Tensor(&x), Arg::Number(Scalar::Int(n))])?);
                }
            }
            Ok(all)
        });
        let mut all = all.iter();
        for op in &ops {
            for n in NUMBERS.into_iter().filter(|&n| fits(op, n)) {
                let element = Tensor::full_of((), dtype.wrap(n), dtype, &Device::Cpu).unwrap();
                let want = call(op, &[Arg::Tensor(&x), Arg::Tensor(&element)]).unwrap();
                let got = all.next().unwrap();
                assert_eq!(got.ty(), want.ty(), "{} of {dtype} and {n}", op.name());
                let same = floats(got).iter().zip(floats(&want)).all(|(g, w)| g.to_bits() == w.to_bits());
                assert!(same, "{} of {dtype} and {n}: {got} instead of {want}", op.name());
            }
        }
    }
}

#[test]
fn fillings_take_any_number() {
    let mask = Tensor::from_slice(&[true, false, true]).unwrap();
    for dtype in DType::ALL {
        let x = Tensor::from_slice(&[1i64, 0, 2]).unwrap().to_dtype(dtype).unwrap();
        let all = everywhere(&format!("fillings of {dtype}"), || {
            Ok(vec![x.masked_fill(&mask, 2.75)?, x.masked_fill(&mask, 10)?, x.masked_fill(&mask, true)?])
        });
        let want = |n: f64| Tensor::full_of((), n, dtype, &Device::Cpu).map(|t| floats(&t)[0]).unwrap();
        for (got, n) in all.iter().zip([2.75, 10.0, 1.0]) {
            let got = floats(got);
            assert_eq!((got[0], got[2]), (want(n), want(n)), "{dtype} and {n}");
            assert_eq!(got[1], 0.0);
        }
    }
}

#[test]
fn two_numbers_make_a_tensor_of_the_default_dtype() {
    let mask = Tensor::from_slice(&[true, false]).unwrap();
    let all = everywhere("where", || {
        Ok(vec![
            mask.where_self(0.5, 2.0)?,
            mask.where_self(1, 2)?,
            mask.where_self(true, 0.5)?,
            mask.where_self(true, false)?,
        ])
    });
    let dtypes: Vec<DType> = all.iter().map(Tensor::dtype).collect();
    assert_eq!(dtypes, [DType::F32, DType::I64, DType::F32, DType::Bool]);
    assert_eq!(floats(&all[0]), [0.5, 2.0]);
}

#[test]
fn integers_have_addcmul() {
    for dtype in SMALL.into_iter().chain([DType::I64]) {
        let t = |x: [i64; 3]| Tensor::from_slice(&x).unwrap().to_dtype(dtype).unwrap();
        let (x, a, b) = (t([1, 2, 3]), t([4, 5, 6]), t([7, 8, 9]));
        let all = everywhere(&format!("addcmul of {dtype}"), || {
            Ok(vec![x.addcmul(&a, &b, 2.5)?, x.addcmul(&a, &b, -1)?, x.addcmul(&a, &b, 1000)?])
        });
        for (got, value) in all.iter().zip([2, -1, 1000]) {
            let want = [1 + value * 28, 2 + value * 40, 3 + value * 54].map(|n: i64| dtype.wrap(n));
            assert_eq!((got.dtype(), ints(got)), (dtype, want.to_vec()), "{value}");
        }
    }
}
