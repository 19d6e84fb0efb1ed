//! Memory: what is no view shares none with its operands, and no result depends on what lay there before.

use kiln::ir::{Class, Op, Row, Sample, SampleArg};
use kiln::tensor::{Arg, DType, Output, run_op};
use kiln::{Device, Tensor};
use kiln_tensor::internal::TensorState;
use kiln_testkit::{Rng, random_array};

/// The bytes that a tensor's elements may lie in.
fn range(t: &Tensor) -> (usize, usize) {
    let ready = t.ready().unwrap();
    let start = ready.pointer() as usize;
    let reach: usize = ready
        .layout()
        .shape
        .iter()
        .zip(&ready.layout().strides)
        .map(|(&n, &s)| n.saturating_sub(1) * s.unsigned_abs())
        .sum();
    (start, start + (reach + 1) * t.dtype().size())
}

fn share(x: &Tensor, y: &Tensor) -> bool {
    let ((a, b), (c, d)) = (range(x), range(y));
    x.numel() > 0 && y.numel() > 0 && a < d && c < b
}

/// Methods that PyTorch documents as returning new memory.
type Method = (&'static str, fn(&Tensor) -> kiln::Result<Tensor>);
const METHODS: &[Method] = &[
    ("repeat", |x| x.repeat(vec![1; x.rank()])),
    ("repeat of a new dim", |x| x.repeat(vec![2; x.rank() + 1])),
    ("repeat once in a new dim", |x| x.repeat(vec![1; x.rank() + 1])),
    ("tile", |x| x.tile([1])),
    ("tile twice", |x| x.tile([2])),
    ("repeat_interleave", |x| x.repeat_interleave(1, 0)),
    ("repeat_interleave thrice", |x| x.repeat_interleave(3, -1)),
    ("cat of one", |x| Tensor::cat([x], 0)),
    ("stack of one", |x| Tensor::stack([x], 0)),
    ("roll", |x| x.roll(0, 0)),
    ("roll_all", |x| x.roll_all(0)),
    ("flip", |x| x.flip(0)),
    ("pad", |x| x.pad(&[0, 0], 0.0)),
    ("replication_pad", |x| x.replication_pad(&[0, 0])),
    ("index_select", |x| x.index_select(0, &Tensor::from_slice(&[0i64])?)),
    ("gather", |x| x.gather(0, &x.zeros_like()?.to_dtype(DType::I64)?)),
    ("take", |x| x.take(&Tensor::from_slice(&[0i64])?)),
    ("clamp", |x| x.clamp(-1e9, 1e9)),
    ("relu", |x| x.abs()?.relu()),
    ("sum", |x| x.sum()),
    ("amax", |x| x.amax_dim(0, true)),
    ("max", |x| Ok(x.max_dim(0, true)?.0)),
    ("sort", |x| Ok(x.sort(0, false)?.0)),
    ("topk", |x| Ok(x.topk(1, 0, true)?.0)),
    ("median", |x| x.median()),
    ("cumsum", |x| x.cumsum(0)),
    ("nan_to_num", |x| x.nan_to_num(None, None, None)),
    ("masked_fill", |x| x.masked_fill(&x.ne(x)?, 1.0)),
    ("masked_select", |x| x.masked_select(&x.eq(x)?)),
    ("where", |x| x.eq(x)?.where_self(x, x)),
    ("round", |x| x.round_decimals(0)),
    ("index_add", |x| x.index_add(0, &Tensor::from_slice(&[0i64])?, &x.slice(0, 0, 1, 1)?)),
    ("index_fill", |x| x.index_fill(0, &Tensor::from_slice(&[0i64])?, 1.0)),
    ("scatter", |x| x.scatter_value(0, &x.zeros_like()?.to_dtype(DType::I64)?, 1.0)),
    ("slice_scatter", |x| x.slice_scatter(&x.slice(0, 0, 1, 1)?, 0, 0, 1, 1)),
    ("clone", |x| x.clone_tensor()),
    ("add", |x| x.add(0.0)),
];

#[test]
fn methods_that_are_no_views_own_their_memory() {
    for shape in [&[1usize][..], &[3], &[1, 1], &[1, 3], &[3, 1], &[2, 3]] {
        for (name, method) in METHODS {
            let x = Tensor::rand(shape, &Device::Cpu).unwrap();
            let before = x.to_vec::<f32>().unwrap();
            let y = method(&x).unwrap_or_else(|error| panic!("{name} of {shape:?}: {error}"));
            assert!(!share(&x, &y), "{name} of {shape:?} shares memory");
            y.fill_(9.0).unwrap();
            assert_eq!(x.to_vec::<f32>().unwrap(), before, "{name} of {shape:?}");
        }
    }
}

fn operands(rng: &mut Rng, sample: &Sample, dtype: DType) -> Vec<Result<Tensor, kiln::Scalar>> {
    let mut tensor = |dtype: DType, shape: &kiln::Shape, domain| {
        let array = random_array(rng, &kiln::ir::TensorTy::new(dtype, shape), domain);
        let wide = if dtype.is_float() {
            Tensor::from_vec((0..array.numel()).map(|i| array.float(i)).collect::<Vec<f64>>(), shape)
        } else {
            Tensor::from_vec((0..array.numel()).map(|i| array.int(i)).collect::<Vec<i64>>(), shape)
        };
        Ok(wide.unwrap().to_dtype(dtype).unwrap())
    };
    let operand = |arg: &SampleArg| match arg {
        SampleArg::Tensor(shape, domain) => tensor(dtype, shape, *domain),
        SampleArg::Fixed(dtype, shape, domain) => tensor(*dtype, shape, *domain),
        SampleArg::Number(x) => Err(*x),
    };
    sample.args.iter().map(operand).collect()
}

/// Leaves bytes of a kind behind in the memory that small tensors get next.
fn poison(byte: u8) {
    let sizes = (0..10).map(|i| 1usize << i);
    let kept: Vec<Tensor> = sizes
        .flat_map(|size| [size, size, size, size])
        .map(|size| Tensor::from_bytes(&vec![byte; size * 8], [size], DType::I64).unwrap())
        .collect();
    drop(kept);
}

/// Rows whose results are chance, or no tensors.
fn is_plain(row: &Row) -> bool {
    !matches!(row.class, Class::List | Class::Constant | Class::Random)
}

/// Every row, every dtype, samples of few elements: twice the same bits, whatever lay in the memory before; and
/// results of what is no view lie elsewhere than operands.
#[test]
fn results_depend_on_operands_alone() {
    for row in Op::ROWS.iter().filter(|row| is_plain(row)) {
        for (i, sample) in row.sample_calls().iter().enumerate() {
            for &dtype in sample.dtypes {
                let small = |arg: &SampleArg| match arg {
                    SampleArg::Tensor(shape, _) | SampleArg::Fixed(_, shape, _) => shape.numel() <= 64,
                    SampleArg::Number(_) => true,
                };
                if !sample.args.iter().all(small) {
                    continue;
                }
                let operands = operands(&mut Rng::new(i as u64), sample, dtype);
                let args: Vec<Arg<'_>> = operands
                    .iter()
                    .map(|operand| match operand {
                        Ok(tensor) => Arg::Tensor(tensor),
                        Err(number) => Arg::Number(*number),
                    })
                    .collect();
                let run = |byte: u8| {
                    poison(byte);
                    match run_op(&sample.op, &args) {
                        Ok(Output::Tensor(y)) => Some(y),
                        _ => None,
                    }
                };
                let (Some(first), Some(second)) = (run(0xff), run(0x5a)) else { continue };
                let what = format!("{} of {dtype}, sample {i}", row.name);
                assert_eq!(first.to_bytes().unwrap(), second.to_bytes().unwrap(), "{what}");
                if row.class != Class::View {
                    for operand in operands.iter().flatten() {
                        assert!(!share(operand, &first), "{what} shares memory");
                    }
                }
            }
        }
    }
}
