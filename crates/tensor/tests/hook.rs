//! Nothing bypasses the recorder hook: a recorder that writes everything down and then executes it sees every
//! op, in-place op, list op, creation, backward, host read and host write, and everything still gives what it
//! gives without a recorder.

#![allow(clippy::unwrap_used)] // a test may panic

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use kiln_ir::{Layout, Loc, Op, SampleArg, TensorTy};
use kiln_tensor::hook::{Access, Arg, Call, GradRequest, Output, Recorder, Scope};
use kiln_tensor::{
    DType, Device, Reduction, Result, Tensor, TensorList, autograd, execute, foreach, no_grad, run_op,
};

const CPU: Device = Device::Cpu;

/// Writes down what passes and executes it.
#[derive(Default)]
struct Log(Mutex<Vec<String>>);

impl Log {
    fn note(&self, entry: String) {
        self.0.lock().unwrap().push(entry);
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Recorder for Log {
    fn call(&self, call: &Call<'_>) -> Result<Output> {
        let list = call.args.iter().any(|arg| matches!(arg, Arg::List(_)));
        let (prefix, suffix) = (if list { "foreach_" } else { "" }, if call.in_place { "_" } else { "" });
        self.note(format!("{prefix}{}{suffix}", call.op.name()));
        assert!(call.loc.to_string().contains("hook.rs"), "{} is put down to {}", call.op.name(), call.loc);
        let _eager = Scope::suspend();
        execute(call)
    }

    fn backward(&self, request: &GradRequest<'_>) -> Result<()> {
        self.note("backward".into());
        assert!(request.loc.to_string().contains("hook.rs"), "{}", request.loc);
        autograd::run_backward(request)
    }

    fn access(&self, _: &Tensor, access: Access, what: &'static str, _: Loc) -> Result<()> {
        self.note(format!("{access:?} {what}"));
        Ok(())
    }

    fn ty(&self, _: &Tensor) -> Option<TensorTy> {
        None
    }

    fn layout(&self, _: &Tensor) -> Option<Layout> {
        None
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }

    fn force(&self) -> Result<()> {
        Ok(())
    }
}

/// What passes the hook while `body` runs.
fn seen<T>(body: impl FnOnce() -> Result<T>) -> (T, Vec<String>) {
    let log = Arc::new(Log::default());
    let result = {
        let _scope = Scope::enter(log.clone());
        body().unwrap()
    };
    (result, log.take())
}

#[track_caller]
fn passes<T>(want: &[&str], body: impl FnOnce() -> Result<T>) -> T {
    let (result, entries) = seen(body);
    assert_eq!(entries, want);
    result
}

fn t(data: &[f32]) -> Tensor {
    Tensor::from_slice(data).unwrap()
}

fn matrix(rows: usize, columns: usize) -> Tensor {
    Tensor::from_vec((0..rows * columns).map(|i| i as f32 * 0.25 - 1.0).collect(), [rows, columns]).unwrap()
}

/// Every row of the table, on every sample and dtype, by its operands.
#[test]
fn every_row_of_the_table() -> Result<()> {
    let mut rows = BTreeSet::new();
    for row in Op::ROWS {
        for sample in row.sample_calls() {
            for &dtype in sample.dtypes {
                let tensor =
                    |dtype: DType, shape: &kiln_ir::Shape| Tensor::full_of(shape.clone(), 1, dtype, &CPU);
                let mut tensors = Vec::new();
                for arg in &sample.args {
                    match arg {
                        SampleArg::Tensor(shape, _) => tensors.push(Some(tensor(dtype, shape)?)),
                        SampleArg::Fixed(dtype, shape, _) => tensors.push(Some(tensor(*dtype, shape)?)),
                        SampleArg::Number(_) => tensors.push(None),
                    }
                }
                let args: Vec<Arg<'_>> = sample
                    .args
                    .iter()
                    .zip(&tensors)
                    .map(|(arg, tensor)| match (arg, tensor) {
                        (SampleArg::Number(x), _) => Arg::Number(*x),
                        (_, Some(tensor)) => Arg::Tensor(tensor),
                        (_, None) => unreachable!("made above"),
                    })
                    .collect();
                passes(&[row.name], || run_op(&sample.op, &args).map(drop));
                rows.insert(row.name);
            }
        }
    }
    let without: Vec<&str> =
        Op::ROWS.iter().map(|row| row.name).filter(|name| !rows.contains(name)).collect();
    assert_eq!(
        without,
        ["constant", "rand", "randn", "uniform", "list", "list_get", "custom", "scan"],
        "rows without samples"
    );
    Ok(())
}

/// Whether an op takes an f32 tensor and `further` operands of this type: some want numbers, some no floats.
fn takes(name: &str, x: &TensorTy, further: usize, operand: &kiln_ir::Ty) -> bool {
    let op = Op::parse(name, &mut |_| None).unwrap();
    let mut tys = vec![kiln_ir::Ty::Tensor(x.clone())];
    tys.resize(1 + further, operand.clone());
    op.infer(&tys).is_ok()
}

macro_rules! pointwise_methods {
    ($( $(#[doc = $doc:literal])*
        [$class:ident $method:ident $inplace:ident] $name:literal $Variant:ident
        ($($arg:ident),*) ($($optional:ident),*) { $($attr:ident : $AttrTy:ty),* } $body:tt;
    )*) => {
        $( pointwise_method! { [$class $method $inplace] $name ($($arg),*) } )*
    };
}
macro_rules! pointwise_method {
    ([pointwise $method:ident $inplace:ident] $name:literal ($x:ident $(, $arg:ident)*)) => {
        {
            let (x, in_place) = (t(&[0.5, 0.25]), concat!($name, "_"));
            // Tensors and numbers as further operands; as methods, in place, of expressions, over lists.
            $( let $arg = t(&[0.5, 1.0]); )*
            let further: &[&str] = &[$(stringify!($arg)),*];
            let further = further.len();
            let tensor = x.ty();
            if !matches!($name, "addcmul" | "addcdiv") && takes($name, &tensor, further, &tensor.clone().into()) {
                passes(&[$name], || x.$method($(&$arg),*));
                passes(&[in_place], || t(&[0.5, 0.25]).$inplace($(&$arg),*).map(drop));
            }
            let number = kiln_ir::Ty::Scalar(kiln_ir::ScalarKind::Float);
            if !matches!($name, "lerp" | "addcmul" | "addcdiv") && takes($name, &tensor, further, &number) {
                passes(&[$name], || x.$method($( { let _ = &$arg; 0.5 } ),*));
                passes(&[in_place], || t(&[0.5, 0.25]).$inplace($( { let _ = &$arg; 0.5 } ),*).map(drop));
                let list = || Tensor::list([&x, &x]);
                $( let $arg = Tensor::list([&$arg, &$arg]); )*
                if takes($name, &tensor, further, &tensor.clone().into()) {
                    passes(&[concat!("foreach_", $name)], || foreach::$method(&list(), $(&$arg),*));
                }
                passes(&[concat!("foreach_", $name, "_")], || {
                    foreach::$inplace(&Tensor::list([&t(&[0.5, 0.25]), &t(&[0.5])]), $( { let _ = &$arg; 0.5 } ),*)
                });
            }
        }
    };
    ($($other:tt)*) => {};
}

#[test]
fn pointwise_methods_and_their_list_forms() {
    kiln_ir::op_table!(pointwise_methods);
    let (x, y, z) = (t(&[0.5, 0.25]), t(&[1.0, 2.0]), t(&[3.0, 4.0]));
    let lists = || (Tensor::list([&x, &x]), Tensor::list([&y, &y]), Tensor::list([&z, &z]));
    passes(&["addcmul"], || x.addcmul(&y, &z, 0.5));
    passes(&["addcdiv"], || x.addcdiv(&y, &z, 0.5));
    passes(&["addcmul_"], || t(&[1.0, 1.0]).addcmul_(&y, &z, 0.5).map(drop));
    passes(&["addcdiv_"], || t(&[1.0, 1.0]).addcdiv_(&y, &z, 0.5).map(drop));
    let fresh = || Tensor::list([&t(&[1.0, 1.0]), &t(&[2.0, 2.0])]);
    let (a, b, c) = lists();
    passes(&["foreach_lerp"], || foreach::lerp(&a, &b, 0.5));
    passes(&["foreach_lerp_"], || foreach::lerp_(&fresh(), &b, 0.5));
    passes(&["foreach_addcmul"], || foreach::addcmul(&a, &b, &c, 0.5));
    passes(&["foreach_addcmul_"], || foreach::addcmul_(&fresh(), &b, &c, 0.5));
    passes(&["foreach_addcdiv"], || foreach::addcdiv(&a, &b, &c, 0.5));
    passes(&["foreach_addcdiv_"], || foreach::addcdiv_(&fresh(), &b, &c, 0.5));
    passes(&["foreach_add"], || foreach::add_scaled(&a, &b, 0.5));
    passes(&["foreach_add_"], || foreach::add_scaled_(&fresh(), &b, 0.5));
    passes(&["foreach_copy_"], || foreach::copy_(&fresh(), &b));
    passes(&["foreach_copy_"], || foreach::copy_(&fresh(), 0));
}

#[test]
fn operators_and_expressions() {
    let x = t(&[1.0, 2.0]);
    passes(&["add", "sub", "mul", "div"], || ((((&x + 1.0) - 2) * &x) / &x).ok());
    passes(&["add", "sub", "mul", "div"], || (1.0 / (2.0 * (3 - (4 + &x)))).ok());
    passes(&["neg", "neg", "add"], || (-(-&x) + x.clone()).ok());
    passes(&["mul", "tanh", "exp", "sum"], || (&x * 2.0).tanh().exp().sum().ok());
    passes(&["mul", "gelu", "softmax", "mean"], || (&x * 2.0).gelu().softmax(0).mean().ok());
    passes(&["mul", "maximum", "lerp"], || (&x * 2.0).maximum(0.5).lerp(&x, 0.25).ok());
}

#[test]
fn the_other_methods() {
    let (x, m, square) = (t(&[1.0, 2.0]), matrix(2, 3), matrix(3, 3));
    let (index, labels) = (Tensor::from_slice(&[0i64, 1]).unwrap(), Tensor::from_slice(&[0i64, 2]).unwrap());
    let truth = x.gt(1.5).unwrap();
    passes(&["add"], || x.add_scaled(&x, 0.5));
    passes(&["add_"], || t(&[1.0, 2.0]).add_scaled_(&x, 0.5).map(drop));
    passes(&["gelu", "gelu"], || (x.gelu()?, x.gelu_tanh()).1);
    passes(&["where", "where"], || (truth.where_self(&x, 0.0)?, truth.where_self(1.0, &x)).1);
    passes(&["to"], || x.to_dtype(DType::F64));
    passes(&["copy_", "copy_", "copy_"], || {
        let y = t(&[0.0, 0.0]);
        y.copy_(&x)?;
        y.fill_(3.0)?;
        y.zero_().map(drop)
    });
    passes(&["sum", "sum", "mean", "mean", "amax", "amax"], || {
        let _ = (m.sum()?, m.sum_dim(0, true)?, m.mean()?, m.mean_dim([0, 1], false)?, m.amax()?);
        m.amax_dim(-1, false)
    });
    passes(&["softmax", "log_softmax"], || (m.softmax(0)?, m.log_softmax(1)).1);
    passes(&["mm", "addmm", "linear", "linear"], || {
        let _ = (m.mm(&square)?, m.addmm(&m, &square)?, m.linear(&square, None)?);
        m.linear(&square, Some(&t(&[1.0, 2.0, 3.0])))
    });
    passes(&["reshape", "permute", "transpose", "transpose", "expand", "slice", "slice"], || {
        let _ = (
            m.reshape([3, 2])?,
            m.permute([1, 0])?,
            m.transpose(0, 1)?,
            m.t()?,
            x.expand([2, 2])?,
            m.slice(0, 0, 1, 1)?,
        );
        m.narrow(1, 0, 2)
    });
    passes(&["slice", "reshape", "reshape", "reshape", "reshape", "clone", "detach"], || {
        let row = m.select(0, 1)?;
        row.unsqueeze(0)?.squeeze(0)?;
        m.flatten()?;
        m.clone_tensor()?;
        m.detach()
    });
    passes(&["transpose", "clone"], || m.t()?.contiguous());
    passes(&["slice_scatter", "gather", "cat", "reshape", "reshape", "cat"], || {
        m.slice_scatter(&matrix(1, 3), 0, 0, 1, 1)?;
        x.gather(0, &index)?;
        Tensor::cat([&x, &x], 0)?;
        Tensor::stack([&x, &x], 0)
    });
    passes(&["nll_loss", "cross_entropy", "cross_entropy"], || {
        m.nll_loss(&labels, Reduction::Mean)?;
        m.cross_entropy(&labels)?;
        m.cross_entropy_with(&labels, Reduction::Sum, 0)
    });
}

#[test]
fn creation() {
    let x = t(&[1.0]);
    passes(&["full"; 6], || {
        let _ = (
            Tensor::full([2], 1.0, &CPU)?,
            Tensor::full_of([2], 1, DType::F64, &CPU)?,
            Tensor::zeros([2], &CPU)?,
        );
        let _ = (Tensor::ones([2], &CPU)?, x.zeros_like()?);
        x.ones_like()
    });
    passes(&["arange", "arange"], || {
        Tensor::arange(0, 3, &CPU)?;
        Tensor::arange_step(0.0, 1.0, 0.25, &CPU)
    });
    passes(&["rand", "rand", "randn", "randn", "uniform"], || {
        let _ =
            (Tensor::rand([2], &CPU)?, Tensor::rand_of([2], DType::F64, &CPU)?, Tensor::randn([2], &CPU)?);
        Tensor::randn_of([2], DType::F64, &CPU)?;
        Tensor::uniform([2], 0.0, 1.0, &CPU)
    });
    passes(&["rand", "mul", "to", "add"], || Tensor::randint(0, 3, [2], &CPU));
    // Host data becomes an input by being used: making it is no op.
    passes(&[], || (Tensor::from_slice(&[1.0f32])?, Tensor::from_vec(vec![1i64, 2], [2])).1);
}

#[test]
fn host_reads_and_writes() {
    let x = t(&[1.0, 2.0]);
    passes(&["Read to_vec"], || x.to_vec::<f32>());
    passes(&["Read to_vec_cast"], || x.to_vec_cast::<i64>());
    passes(&["Read item"], || t(&[1.0]).item::<f32>());
    passes(&["Print printing"], || Ok(x.to_string()));
    passes(&["Write write_slice"], || x.write_slice(&[3.0f32, 4.0]));
    passes(&["State requires_grad_"], || x.requires_grad_(true).map(drop));
    // The type is no element: nothing needs to be computed for it.
    passes(&[], || Ok((x.shape(), x.dtype(), x.numel(), x.rank(), format!("{x:?}"), x.size(0)?)));
}

#[test]
fn backward_is_one_entry() {
    let w = t(&[1.0, 2.0]);
    w.requires_grad_(true).unwrap();
    passes(&["mul", "sum", "backward"], || (&w * &w).ok()?.sum()?.backward());
    passes(&["mul", "backward"], || (&w * 2.0).ok()?.backward_with(Some(&t(&[1.0, 1.0])), true));
    assert_eq!(w.grad().unwrap().to_vec::<f32>().unwrap(), [4.0, 6.0]);
    // The mode is told along with every op.
    let (y, _) = seen(|| {
        let _guard = no_grad();
        w.mul(2.0)
    });
    assert!(!y.requires_grad());
}

#[test]
fn lists_of_results() {
    let x = t(&[1.0, 2.0]);
    passes(&["foreach_mul"], || {
        let doubled: TensorList = foreach::mul(&Tensor::list([&x, &x]), 2.0)?;
        doubled.get(1)
    });
}

#[test]
fn a_recorder_outlives_scopes_that_end_out_of_order() {
    std::thread::spawn(|| {
        let first = Arc::new(Log::default());
        let known = Arc::downgrade(&first);
        let outer = Scope::enter(first);
        let inner = Scope::enter(Arc::new(Log::default()));
        drop(outer);
        assert!(known.upgrade().is_some(), "the inner scope goes back to it");
        drop(inner);
        // Recorded by the first one, which is there.
        assert_eq!(Tensor::ones([2], &CPU).unwrap().to_vec::<f32>().unwrap(), [1.0; 2]);
    })
    .join()
    .unwrap();
}
