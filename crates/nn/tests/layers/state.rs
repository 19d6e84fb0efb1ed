//! State dicts, files, resuming, hooks, conversion, initialisers, clipping.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use kiln_nn::optim::lr_scheduler::{CosineAnnealingLR, Schedule};
use kiln_nn::optim::{Adam, NAdam, Optimizer, SGD};
use kiln_nn::*;
use kiln_tensor::{DType, Device, Result, Tensor, f16, get_rng_state, manual_seed, set_rng_state};

const CPU: Device = Device::Cpu;

/// A folder of this test, empty.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("kiln-nn-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn message<T>(result: Result<T>) -> String {
    result.err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn states_report_what_does_not_fit() -> Result<()> {
    let _turn = crate::turn();
    let model = seq![Linear::new(3, 4)?, BatchNorm1d::new(4)?, ReLU, Linear::new(4, 2)?];
    let state = model.state_dict();
    assert_eq!(
        state.names().collect::<Vec<_>>(),
        [
            "0.weight",
            "0.bias",
            "1.weight",
            "1.bias",
            "1.running_mean",
            "1.running_var",
            "1.num_batches_tracked",
            "3.weight",
            "3.bias"
        ]
    );
    let mut other = state.copied()?;
    other.remove("1.bias");
    other.insert("4.weight", Tensor::zeros([1], &CPU)?);
    other.insert("0.bias", Tensor::ones([4], &CPU)?);
    let before = model.state_dict().copied()?;
    let error = message(model.load_state_dict(&other, true));
    assert!(error.contains("missing: 1.bias") && error.contains("unexpected: 4.weight"), "{error}");
    let same = |a: &StateDict, b: &StateDict| -> Result<bool> {
        a.iter().try_fold(true, |same, (name, tensor)| {
            Ok(same && tensor.to_bytes()? == b.get(name).expect("the name").to_bytes()?)
        })
    };
    assert!(same(&before, &model.state_dict())?, "a refused state changes nothing");
    let report = model.load_state_dict(&other, false)?;
    assert_eq!((report.missing, report.unexpected), (vec!["1.bias".into()], vec!["4.weight".into()]));
    assert_eq!(model.state_dict().get("0.bias").expect("it").to_vec::<f32>()?, [1.0; 4]);
    // Another shape is refused even then.
    other.insert("3.bias", Tensor::zeros([3], &CPU)?);
    let error = message(model.load_state_dict(&other, false));
    assert!(error.contains("3.bias: the state has [3], the module [2]"), "{error}");
    // Another dtype is converted.
    let halves = Linear::options().dtype(DType::F16).build(3, 4)?;
    halves.load_state_dict(&model.state_dict().below("0."), true)?;
    assert_eq!(halves.bias.as_ref().expect("a bias").to_vec::<f16>()?, [f16::ONE; 4]);

    #[derive(Module)]
    struct Masked {
        kept: Buffer,
        mask: Buffer,
    }
    let masked = Masked {
        kept: Buffer::new(Tensor::ones([1], &CPU)?),
        mask: Buffer::transient(Tensor::ones([1], &CPU)?),
    };
    assert_eq!(masked.state_dict().names().collect::<Vec<_>>(), ["kept"]);
    assert_eq!(masked.named_buffers().len(), 2);
    Ok(())
}

/// A table and a head that are one tensor, as language models have them.
#[derive(Module)]
struct Tied {
    table: Embedding,
    head: Linear,
}

#[test]
fn tied_weights_need_one_of_their_names() -> Result<()> {
    let _turn = crate::turn();
    let tied = || -> Result<Tied> {
        let table = Embedding::new(3, 2)?;
        let head = Linear::from_parts(table.weight.clone(), None);
        Ok(Tied { table, head })
    };
    let (source, folder) = (tied()?, folder("tied"));
    let both = source.state_dict();
    assert_eq!(both.names().collect::<Vec<_>>(), ["table.weight", "head.weight"]);
    let want = source.table.weight.to_vec::<f32>()?;
    let without = |name: &str| {
        let mut state = both.clone();
        state.remove(name);
        state
    };
    let [table, head] = ["head.weight", "table.weight"].map(without);
    // As PyTorch and Hugging Face write them, in memory and through both kinds of files.
    for state in [both.copied()?, table.copied()?, head.copied()?] {
        safetensors::save(&state, folder.join("tied.safetensors"))?;
        torch_file::save(&state, folder.join("tied.pt"))?;
        let read =
            [safetensors::load(folder.join("tied.safetensors"))?, torch_file::load(folder.join("tied.pt"))?];
        for (state, strict) in read.iter().chain([&state]).flat_map(|state| [(state, true), (state, false)]) {
            let model = tied()?;
            assert!(model.load_state_dict(state, strict)?.is_clean());
            assert_eq!(model.head.weight.to_vec::<f32>()?, want);
            assert!(model.head.weight.same(&model.table.weight), "still one tensor");
        }
    }
    // The file has the tensor once, and whoever reads it gets it once.
    torch_file::save(&both, folder.join("both.pt"))?;
    torch_file::save(&table, folder.join("one.pt"))?;
    let size = |name: &str| std::fs::metadata(folder.join(name)).expect("the file").len();
    assert!(size("both.pt") < size("one.pt") + 200, "{} {}", size("both.pt"), size("one.pt"));
    assert_eq!(torch_file::load(folder.join("both.pt"))?.len(), 2);

    // Two different values.
    let model = tied()?;
    let before = model.table.weight.to_vec::<f32>()?;
    let mut other = both.copied()?;
    other.insert("head.weight", Tensor::ones([3, 2], &CPU)?);
    let error = message(model.load_state_dict(&other, true));
    assert!(error.contains("table.weight and head.weight are tied in the module"), "{error}");
    assert_eq!(model.table.weight.to_vec::<f32>()?, before);
    let report = model.load_state_dict(&other, false)?;
    assert_eq!(report.conflicting, [("table.weight".to_string(), "head.weight".to_string())]);
    assert_eq!(model.table.weight.to_vec::<f32>()?, [1.0; 6], "the last one stays, as in PyTorch");
    // None of the names: all of them are missing.
    let error = message(model.load_state_dict(&StateDict::new(), true));
    assert!(error.contains("missing: table.weight, head.weight"), "{error}");
    std::fs::remove_dir_all(&folder).expect("the folder");
    Ok(())
}

#[test]
fn files_keep_every_dtype() -> Result<()> {
    let _turn = crate::turn();
    let folder = folder("dtypes");
    let mut state = StateDict::new();
    for dtype in DType::ALL {
        let values = Tensor::from_vec(vec![0.0f64, 1.0, 2.0, 100.0, 0.5, 3.0], [2, 3])?.to_dtype(dtype)?;
        state.insert(&format!("{dtype}"), values.clone());
        state.insert(&format!("turned {dtype}"), values.t()?);
    }
    state.insert("scalar", Tensor::from_vec(vec![-7i64], [0usize; 0])?);
    state.insert("empty", Tensor::zeros([0, 3], &CPU)?);
    let path = folder.join("all.safetensors");
    let metadata = safetensors::Metadata::from([("format".to_string(), "pt".to_string())]);
    safetensors::save_with(&state, &metadata, &path)?;
    let file = safetensors::SafeTensorsFile::open(&path)?;
    assert_eq!((file.metadata(), file.names().len()), (&metadata, state.len()));
    let index = safetensors::save_sharded(&state, &folder, 100)?;
    assert!(std::fs::read_dir(&folder).expect("a folder").count() > 4, "several shards");
    for loaded in [safetensors::load(&path)?, safetensors::load(&index)?] {
        assert_eq!(loaded.len(), state.len());
        for (name, tensor) in state.iter() {
            let got = loaded.get(name).expect("the name");
            assert_eq!((got.ty(), got.to_bytes()?), (tensor.ty(), tensor.to_bytes()?), "{name}");
        }
    }
    std::fs::remove_dir_all(&folder).expect("the folder");
    Ok(())
}

#[test]
fn broken_files_are_errors() -> Result<()> {
    let _turn = crate::turn();
    let folder = folder("broken");
    let path = folder.join("file.safetensors");
    let mut state = StateDict::new();
    state.insert("a", Tensor::from_slice(&[1.0f32, 2.0, 3.0])?);
    state.insert("b", Tensor::from_slice(&[4i64])?);
    safetensors::save(&state, &path)?;
    let good = std::fs::read(&path).expect("the file");
    // Every byte changed, every length cut: an error or tensors, never a panic.
    let mut refused = 0;
    for at in 0..good.len() {
        for bits in [0xff, 0x01, 0x80] {
            let mut bad = good.clone();
            bad[at] ^= bits;
            std::fs::write(&path, &bad).expect("the file");
            refused += usize::from(safetensors::load(&path).is_err());
        }
        std::fs::write(&path, &good[..at]).expect("the file");
        assert!(safetensors::load(&path).is_err(), "cut at {at}");
    }
    assert!(refused > good.len(), "{refused}");
    assert!(message(safetensors::load(folder.join("none"))).contains("none"));
    let index = folder.join("model.safetensors.index.json");
    std::fs::write(&index, r#"{"weight_map": {"a": "../file.safetensors"}}"#).expect("the file");
    assert!(message(safetensors::load(&index)).contains("not a file name in this folder"));
    std::fs::write(&index, "[]").expect("the file");
    assert!(safetensors::load(&index).is_err());
    // Nothing is left beside a file that could not be written.
    std::fs::create_dir(folder.join("taken")).expect("a folder");
    assert!(safetensors::save(&state, folder.join("taken")).is_err());
    let left = std::fs::read_dir(&folder).expect("a folder").flatten();
    assert!(left.into_iter().all(|entry| !entry.file_name().to_string_lossy().ends_with(".part")));
    std::fs::remove_dir_all(&folder).expect("the folder");
    Ok(())
}

#[test]
fn pytorchs_files_are_read() -> Result<()> {
    let _turn = crate::turn();
    use torch_file::Value;
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoint.pt");
    let all = torch_file::load_value(&path)?;
    let tensor = |value: Option<&Value>| match value {
        Some(Value::Tensor(tensor)) => tensor.clone(),
        _ => panic!("a tensor"),
    };
    let state = all.get("model").and_then(Value::state_dict).expect("a state");
    let model = seq![Linear::new(3, 2)?, BatchNorm1d::new(2)?];
    model.load_state_dict(&state, true)?;
    assert_eq!(state.get("0.weight").expect("it").to_vec::<f32>()?, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(state.get("0.bias").expect("it").to_vec::<f32>()?, [6.0, 7.0]);
    let Some(Value::List(kinds)) = all.get("kinds") else { panic!("a list") };
    let kinds: Vec<Tensor> = kinds.iter().map(|kind| tensor(Some(kind))).collect();
    let dtypes: Vec<DType> = kinds.iter().map(Tensor::dtype).collect();
    let others: Vec<DType> = DType::ALL.into_iter().filter(|dtype| *dtype != DType::F32).collect();
    assert_eq!(dtypes, others);
    assert!(kinds[1..].iter().all(|t| t.to_vec_cast::<f64>().is_ok_and(|v| v == [0.0, 1.0, 2.0])));
    assert_eq!(kinds[0].to_vec::<bool>()?, [false, true, true]);
    let turned = tensor(all.get("turned"));
    assert_eq!(turned.shape().to_vec(), [4, 3]);
    assert_eq!(turned.to_vec::<f32>()?[..4], [0.0, 4.0, 8.0, 1.0]);
    assert_eq!(tensor(all.get("part")).to_vec::<f32>()?, [4.0, 5.0, 6.0, 7.0]);
    assert_eq!(tensor(all.get("parameter")).to_vec::<f32>()?, [0.0, 1.0]);
    assert_eq!(tensor(all.get("empty")).shape().to_vec(), [0, 3]);
    assert!(matches!(all.get("epoch"), Some(Value::Int(3))));
    assert!(matches!(all.get("large"), Some(Value::Int(number)) if *number == 1 << 40));
    assert!(matches!(all.get("negative"), Some(Value::Int(-7))));
    assert!(matches!(all.get("loss"), Some(Value::Float(loss)) if *loss == 0.5));
    assert!(matches!(all.get("name"), Some(Value::Text(name)) if &**name == "run"));
    assert!(matches!(all.get("flags"), Some(Value::List(flags)) if flags.len() == 3));
    assert!(message(torch_file::load(&path)).contains("not a dict of named tensors"));

    let folder = folder("torch");
    let mut state = StateDict::new();
    kinds.iter().for_each(|t| state.insert(&t.dtype().to_string(), t.clone()));
    state.insert("turned", turned);
    state.insert("scalar", Tensor::from_vec(vec![1.5f64], [0usize; 0])?);
    state.insert("empty", Tensor::zeros([0, 3], &CPU)?);
    torch_file::save(&state, folder.join("state.pt"))?;
    // For a look at it by PyTorch itself.
    if let Some(path) = std::env::var_os("KILN_KEEP_PT") {
        torch_file::save(&state, path)?;
    }
    let loaded = torch_file::load(folder.join("state.pt"))?;
    for (name, tensor) in state.iter() {
        let got = loaded.get(name).expect("the name");
        assert_eq!((got.ty(), got.to_bytes()?), (tensor.ty(), tensor.to_bytes()?), "{name}");
    }
    std::fs::remove_dir_all(&folder).expect("the folder");
    Ok(())
}

/// A small network with everything that has a state: parameters, running statistics, dropout.
struct Run<O> {
    model: Sequential,
    optimizer: O,
}

impl<O: Optimizer> Run<O> {
    fn new(make: impl Fn(Vec<Tensor>) -> Result<O>) -> Result<Run<O>> {
        let model =
            seq![Linear::new(6, 8)?, BatchNorm1d::new(8)?, ReLU, Dropout::new(0.3)?, Linear::new(8, 3)?];
        let optimizer = make(model.parameters())?;
        Ok(Run { model, optimizer })
    }

    fn step(&self, x: &Tensor) -> Result<f32> {
        self.optimizer.zero_grad();
        let y = self.model.forward(x)?;
        let loss = y.mul(&y)?.mean()?;
        loss.backward()?;
        self.optimizer.step()?;
        loss.item::<f32>()
    }
}

fn resume<O: Optimizer>(name: &str, make: impl Fn(Vec<Tensor>) -> Result<O>) -> Result<()> {
    let folder = folder(name);
    let path = folder.join("checkpoint.safetensors");
    manual_seed(11);
    let x = Tensor::randn([5, 6], &CPU)?;
    let first = Run::new(&make)?;
    let schedule = CosineAnnealingLR::new(12).on(&first.optimizer)?;
    for _ in 0..5 {
        first.step(&x)?;
        schedule.step()?;
    }
    let mut all = StateDict::new();
    all.extend_prefixed("model.", first.model.state_dict());
    all.extend_prefixed("optimizer.", first.optimizer.state_dict()?);
    all.extend_prefixed("scheduler.", schedule.state_dict()?);
    safetensors::save(&all, &path)?;
    let random = get_rng_state();
    let mut want = Vec::new();
    for _ in 0..5 {
        want.push(first.step(&x)?);
        schedule.step()?;
    }
    let second = Run::new(&make)?;
    let again = CosineAnnealingLR::new(12).on(&second.optimizer)?;
    let all = safetensors::load(&path)?;
    second.model.load_state_dict(&all.below("model."), true)?;
    second.optimizer.load_state_dict(&all.below("optimizer."))?;
    again.load_state_dict(&all.below("scheduler."))?;
    set_rng_state(random);
    for want in want {
        assert_eq!(second.step(&x)?.to_bits(), want.to_bits(), "{name}");
        again.step()?;
    }
    for ((name, a), (_, b)) in first.model.state_dict().iter().zip(second.model.state_dict().iter()) {
        assert_eq!(a.to_bytes()?, b.to_bytes()?, "{name}");
    }
    std::fs::remove_dir_all(&folder).expect("the folder");
    Ok(())
}

#[test]
fn resuming_is_exact() -> Result<()> {
    let _turn = crate::turn();
    resume("adam", |p| Adam::options().lr(0.01).amsgrad(true).build(p))?;
    resume("sgd", |p| SGD::options().lr(0.1).momentum(0.9).dampening(0.1).build(p))?;
    resume("nadam", |p| NAdam::options().momentum_decay(0.1).build(p))
}

#[test]
fn optimizer_states_are_checked() -> Result<()> {
    let _turn = crate::turn();
    let make = |n: usize| -> Result<Adam> {
        let p = Tensor::ones([n], &CPU)?;
        p.requires_grad_(true)?;
        p.set_grad(Some(Tensor::ones([n], &CPU)?));
        Adam::new(vec![p], 0.1)
    };
    let (a, b) = (make(2)?, make(3)?);
    a.step()?;
    let state = a.state_dict()?;
    assert!(state.get("state.0.exp_avg").is_some() && state.get("param_groups.0.betas.0").is_some());
    let error = message(b.load_state_dict(&state));
    assert!(error.contains("state.0.exp_avg has shape [2], but its parameter [3]"), "{error}");
    assert!(message(b.load_state_dict(&StateDict::new())).contains("the state has no param_groups.0.lr"));
    Ok(())
}

#[test]
fn hooks_see_and_change_what_passes() -> Result<()> {
    let _turn = crate::turn();
    let model = seq![Linear::new(2, 2)?, ReLU];
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = seen.clone();
    let handles: Vec<ForwardHook> = {
        let mut handles = Vec::new();
        model.for_each_module(&mut |name, module| {
            let (name, log) = (name.to_string(), log.clone());
            let hook = move |_: &Tensor, y: &Tensor| {
                log.lock().expect("one thread").push((name.clone(), y.shape().to_vec()));
                Ok(None)
            };
            handles.extend(module.hooks().map(|hooks| hooks.register(hook)));
        });
        handles
    };
    // A plain activation has no place for hooks, and says how to get one.
    assert_eq!(handles.len(), 2);
    assert!(message(ReLU.register_forward_hook(|_, _| Ok(None))).contains("wrap it in `Hooked`"));
    let x = Tensor::ones([3, 2], &CPU)?;
    let plain = model.forward(&x)?.to_vec::<f32>()?;
    assert_eq!(*seen.lock().expect("one thread"), [("0".into(), vec![3, 2]), (String::new(), vec![3, 2])]);
    handles.into_iter().for_each(ForwardHook::remove);
    let pre = model.register_forward_pre_hook(|x| Ok(Some(x.mul(0.0)?)))?;
    let post = model.register_forward_hook(|x, y| {
        assert_eq!(x.to_vec::<f32>()?, [0.0; 6]);
        Ok(Some(y.add(10.0)?))
    })?;
    assert!(model.forward(&x)?.to_vec::<f32>()?.iter().all(|&y| y >= 10.0));
    pre.remove();
    post.remove();
    assert_eq!(model.forward(&x)?.to_vec::<f32>()?, plain);
    assert_eq!(seen.lock().expect("one thread").len(), 2);
    Ok(())
}

#[test]
fn conversion_keeps_the_tensors() -> Result<()> {
    let _turn = crate::turn();
    let model = seq![Linear::new(3, 4)?, BatchNorm1d::new(4)?];
    let (before, sgd) = (model.parameters(), SGD::new(model.parameters(), 0.5)?);
    let x = Tensor::ones([2, 3], &CPU)?;
    model.forward(&x)?.sum()?.backward()?;
    model.to(DType::F64)?;
    assert!(model.parameters().iter().zip(&before).all(|(a, b)| a.same(b) && a.dtype() == DType::F64));
    assert!(before.iter().all(|p| p.grad().is_some_and(|g| g.dtype() == DType::F64) && p.requires_grad()));
    let state = model.state_dict();
    assert_eq!(state.get("1.running_mean").map(Tensor::dtype), Some(DType::F64));
    assert_eq!(state.get("1.num_batches_tracked").map(Tensor::dtype), Some(DType::I64));
    let old = before[0].to_vec_cast::<f64>()?;
    before[0].set_grad(Some(Tensor::full_of([4, 3], 2.0, DType::F64, &CPU)?));
    sgd.step()?;
    let new = before[0].to_vec_cast::<f64>()?;
    assert!(
        old.iter().zip(&new).all(|(old, new)| (old - 1.0 - new).abs() < 1e-12),
        "the optimizer has them too"
    );
    let y = model.forward(&x.to_dtype(DType::F64)?)?;
    assert_eq!(y.dtype(), DType::F64);
    assert!(message(model.to(DType::I64)).contains("floating point"));
    Ok(())
}

#[test]
fn modules_have_names() -> Result<()> {
    let _turn = crate::turn();
    let layer = TransformerEncoderLayer::options().dim_feedforward(4).build(4, 2)?;
    let names: Vec<String> =
        layer.named_modules().into_iter().map(|(name, kind)| format!("{name}:{kind}")).collect();
    assert_eq!(
        names[..4],
        [
            ":TransformerEncoderLayer",
            "self_attn:MultiheadAttention",
            "self_attn.out_proj:NonDynamicallyQuantizableLinear",
            "linear1:Linear"
        ]
    );
    let lstm = LSTM::options().bidirectional(true).build(2, 3)?;
    let names: Vec<String> = lstm.named_parameters().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names[3..5], ["bias_hh_l0", "weight_ih_l0_reverse"]);
    let mut list: ModuleList = ModuleList::default();
    list.push(Box::new(ReLU));
    list.push(Box::new(ReLU));
    assert_eq!(list.to_string(), "ModuleList(\n  (0-1): 2 x ReLU()\n)");
    let dict: ModuleDict<Linear> = [("a".to_string(), Linear::new(1, 1)?)].into_iter().collect();
    assert_eq!(dict.named_parameters()[0].0, "a.weight");
    assert!(dict.get("a").is_some() && dict.get("b").is_none());
    Ok(())
}

#[test]
fn initialisers_draw_as_they_say() -> Result<()> {
    let _turn = crate::turn();
    manual_seed(5);
    let moments = |t: &Tensor| -> Result<(f64, f64)> {
        let values = t.to_vec_cast::<f64>()?;
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let square = values.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / values.len() as f64;
        Ok((mean, square.sqrt()))
    };
    let close = |got: (f64, f64), mean: f64, std: f64| {
        assert!((got.0 - mean).abs() < 0.05 * std && (got.1 - std).abs() < 0.05 * std, "{got:?}");
    };
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let t = Tensor::full_of([100, 80], 0.0, dtype, &CPU)?;
        init::normal_(&t, 3.0, 2.0)?;
        close(moments(&t)?, 3.0, 2.0);
        init::kaiming_normal_(&t, init::Nonlinearity::Relu, init::Fan::Out)?;
        close(moments(&t)?, 0.0, (2.0f64 / 100.0).sqrt());
        init::xavier_normal_(&t, 2.0)?;
        close(moments(&t)?, 0.0, 2.0 * (2.0f64 / 180.0).sqrt());
        init::trunc_normal_(&t, 1.0, 2.0, 0.0, 3.0)?;
        assert!(t.to_vec_cast::<f64>()?.iter().all(|x| (0.0..=3.0).contains(x)));
        // From −½ to 1 deviations: known moments of a normal distribution cut there.
        close(moments(&t)?, 1.0 + 2.0 * 0.206_63, 2.0 * 0.415_66);
        init::orthogonal_(&t, 1.5)?;
        let t = t.to_dtype(DType::F64)?;
        let product = t.t()?.mm(&t)?.to_vec_cast::<f64>()?;
        let tolerance = if dtype == DType::BF16 { 0.05 } else { 1e-5 };
        for (i, x) in product.iter().enumerate() {
            let want = if i % 81 == 0 { 2.25 } else { 0.0 };
            assert!((x - want).abs() < tolerance, "{i}: {x}");
        }
    }
    let conv = Conv2d::new(4, 8, 3)?;
    assert!(conv.weight.to_vec_cast::<f64>()?.iter().all(|x| x.abs() <= 1.0 / 6.0));
    let lstm = LSTM::new(3, 16)?;
    assert!(lstm.parameters()[0].to_vec_cast::<f64>()?.iter().all(|x| x.abs() <= 0.25));
    let t = Tensor::zeros([2, 3], &CPU)?;
    init::eye_(&t)?;
    assert_eq!(t.to_vec::<f32>()?, [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
    Ok(())
}

#[test]
fn gradients_are_clipped_as_pytorch_clips_them() -> Result<()> {
    let _turn = crate::turn();
    let parameter = |grad: &[f32]| -> Result<Tensor> {
        let p = Tensor::zeros([grad.len()], &CPU)?;
        p.requires_grad_(true)?;
        p.set_grad(Some(Tensor::from_slice(grad)?));
        Ok(p)
    };
    let grads = |ps: &[Tensor]| -> Result<Vec<f32>> {
        ps.iter()
            .map(|p| p.grad().expect("a gradient").to_vec::<f32>())
            .collect::<Result<Vec<_>>>()
            .map(|v| v.concat())
    };
    let without = Tensor::zeros([1], &CPU)?;
    let params = [parameter(&[3.0])?, parameter(&[0.0, -4.0])?, without];
    let norm = clip_grad_norm_(&params, 10.0, ClipNorm::default())?;
    assert_eq!((norm.item::<f32>()?, grads(&params[..2])?), (5.0, vec![3.0, 0.0, -4.0]));
    clip_grad_norm_(&params, 1.0, ClipNorm::default())?;
    for (got, want) in grads(&params[..2])?.iter().zip([0.6, 0.0, -0.8]) {
        assert!((got - want).abs() < 1e-6, "{got}");
    }
    let largest = ClipNorm { norm_type: f64::INFINITY, ..ClipNorm::default() };
    assert!((clip_grad_norm_(&params, 0.4, largest)?.item::<f64>()? - 0.8).abs() < 1e-6);
    clip_grad_value_(&params, 0.35)?;
    for (got, want) in grads(&params[..2])?.iter().zip([0.3, 0.0, -0.35]) {
        assert!((got - want).abs() < 1e-5, "{got}");
    }
    params[0].set_grad(Some(Tensor::from_slice(&[f32::INFINITY])?));
    let strict = ClipNorm { error_if_nonfinite: true, ..ClipNorm::default() };
    assert!(message(clip_grad_norm_(&params, 1.0, strict)).contains("must be finite"));
    assert_eq!(clip_grad_norm_(&[], 1.0, ClipNorm::default())?.item::<f32>()?, 0.0);
    Ok(())
}
