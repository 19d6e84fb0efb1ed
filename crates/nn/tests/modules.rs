//! Names, printing, the derive, wrappers, and errors that say where.

use std::marker::PhantomData;
use std::sync::Arc;

use expect_test::{Expect, expect};
use kiln_nn::{
    Buffer, CrossEntropyLoss, Forward, Gelu, Identity, Layer, Linear, LogSoftmax, Module, Parameter, Relu,
    Sequential, Sigmoid, Softmax, Tanh, Training, init, seq,
};
use kiln_tensor::{DType, Device, Result, Tensor, manual_seed};

#[derive(Module)]
struct Block {
    fc: Linear,
    act: Gelu,
    proj: Option<Linear>,
}

impl Forward for Block {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.act.forward(&self.fc.forward(x)?)?;
        match &self.proj {
            Some(proj) => proj.forward(&y),
            None => Ok(y),
        }
    }
}

#[derive(Module)]
struct Model {
    embed: Parameter,
    layers: Vec<Block>,
    pair: [Linear; 2],
    #[module(name = "ln_f")]
    scale: Scale,
    running_mean: Buffer,
    head: Box<dyn Layer>,
    shared: Arc<Linear>,
    training: Training,
    #[module(skip)]
    heads: usize,
}

#[derive(Module)]
struct Scale(Parameter, Option<Parameter>);

#[derive(Module)]
struct Wrapper<M, T: Send + Sync = ()> {
    inner: M,
    more: Vec<M>,
    marker: PhantomData<T>,
}

#[derive(Module, Debug)]
#[module(no_display)]
struct Nothing;

#[derive(Module)]
struct Raw {
    r#type: Linear,
}

fn ones(n: usize) -> Result<Tensor> {
    Tensor::ones([n], &Device::Cpu)
}

fn block(size: usize, proj: bool) -> Result<Block> {
    let proj = if proj { Some(Linear::new(size, size)?) } else { None };
    Ok(Block { fc: Linear::new(size, size)?, act: Gelu, proj })
}

fn model() -> Result<Model> {
    let linear = Linear::options().bias(false);
    let shared = Arc::new(linear.build(4, 4)?);
    Ok(Model {
        embed: Parameter::new(ones(4)?)?,
        layers: vec![block(4, false)?, block(4, false)?, block(4, true)?],
        pair: [linear.build(4, 4)?, linear.build(4, 4)?],
        scale: Scale(Parameter::new(ones(4)?)?, None),
        running_mean: Buffer::new(ones(4)?),
        head: Box::new(seq![shared.clone(), Relu]),
        shared,
        training: Training::default(),
        heads: 2,
    })
}

fn names(tensors: Vec<(String, Tensor)>) -> String {
    tensors.into_iter().map(|(name, _)| name).collect::<Vec<_>>().join("\n")
}

#[test]
fn names_are_paths_of_fields() -> Result<()> {
    let model = model()?;
    assert_eq!(model.heads, 2);
    // The shared weight is there once, under the first of its names.
    expect![[r#"
        embed
        layers.0.fc.weight
        layers.0.fc.bias
        layers.1.fc.weight
        layers.1.fc.bias
        layers.2.fc.weight
        layers.2.fc.bias
        layers.2.proj.weight
        layers.2.proj.bias
        pair.0.weight
        pair.1.weight
        ln_f.0
        head.0.weight"#]]
    .assert_eq(&names(model.named_parameters()));
    assert_eq!(model.parameters().len(), 13);
    assert_eq!(names(model.named_buffers()), "running_mean");
    assert_eq!(model.buffers().len(), 1);
    assert_eq!(model.layers[2].fc.weight.label().as_deref(), Some("layers.2.fc.weight"));

    let raw = Raw { r#type: Linear::options().bias(false).build(1, 1)? };
    assert_eq!(names(raw.named_parameters()), "type.weight");
    let generic: Wrapper<Linear> =
        Wrapper { inner: Linear::new(1, 1)?, more: vec![Linear::new(1, 1)?], marker: PhantomData };
    assert_eq!(names(generic.named_parameters()), "inner.weight\ninner.bias\nmore.0.weight\nmore.0.bias");
    assert!(Nothing.parameters().is_empty());
    Ok(())
}

#[test]
fn modules_print_like_pytorchs() -> Result<()> {
    expect![[r#"
        Model(
          (layers): ModuleList(
            (0-1): 2 x Block(
              (fc): Linear(in_features=4, out_features=4, bias=True)
              (act): GELU(approximate='none')
            )
            (2): Block(
              (fc): Linear(in_features=4, out_features=4, bias=True)
              (act): GELU(approximate='none')
              (proj): Linear(in_features=4, out_features=4, bias=True)
            )
          )
          (pair): ModuleList(
            (0-1): 2 x Linear(in_features=4, out_features=4, bias=False)
          )
          (ln_f): Scale()
          (head): Sequential(
            (0): Linear(in_features=4, out_features=4, bias=False)
            (1): ReLU()
          )
          (shared): Linear(in_features=4, out_features=4, bias=False)
        )"#]]
    .assert_eq(&model()?.to_string());

    let mut activations = Sequential::new();
    activations.push(Gelu::tanh());
    activations.push(Tanh);
    activations.push(Sigmoid);
    activations.push(Identity);
    activations.push(Softmax { dim: -1 });
    activations.push_named("last", LogSoftmax { dim: 1 });
    expect![[r#"
        Sequential(
          (0): GELU(approximate='tanh')
          (1): Tanh()
          (2): Sigmoid()
          (3): Identity()
          (4): Softmax(dim=-1)
          (last): LogSoftmax(dim=1)
        )"#]]
    .assert_eq(&activations.to_string());
    assert_eq!(Sequential::new().to_string(), "Sequential()");
    assert_eq!(CrossEntropyLoss::new().to_string(), "CrossEntropyLoss()");
    let boxed: Box<dyn Module> = Box::new(Nothing);
    assert_eq!(boxed.to_string(), "Nothing()");
    Ok(())
}

/// The message, with the line it names replaced if it is the expected one.
#[track_caller]
fn check_error(result: Result<Tensor>, line: u32, expect: Expect) {
    let message = result.err().map_or("no error".to_string(), |error| error.to_string());
    expect.assert_eq(&message.replace(&format!("modules.rs:{line}"), "<this line>"));
}

#[test]
fn errors_say_where() -> Result<()> {
    let x = Tensor::ones([32, 10], &Device::Cpu)?;

    let linear = Linear::new(5, 20)?;
    let (result, line) = (linear.forward(&x), line!());
    check_error(
        result,
        line,
        expect!["linear: f32[32, 10] × f32[20, 5] × f32[20]: inner sizes 10 and 5 differ, at <this line>"],
    );

    // In a list, in a struct, in a box: the module's path, and the line that called the model.
    let model = seq![Identity, seq![Linear::options().bias(false).build(10, 8)?, Linear::new(5, 20)?]];
    let (result, line) = (model.forward(&x), line!());
    check_error(
        result,
        line,
        expect!["linear: f32[32, 8] × f32[20, 5] × f32[20]: inner sizes 8 and 5 differ, at 1.1, <this line>"],
    );
    let model: Box<dyn Layer> = Box::new(model);
    let (result, line) = (model.forward(&x), line!());
    check_error(
        result,
        line,
        expect!["linear: f32[32, 8] × f32[20, 5] × f32[20]: inner sizes 8 and 5 differ, at 1.1, <this line>"],
    );

    // A line of a user's own module stays that line.
    #[derive(Module)]
    struct Own {
        fc: Linear,
    }
    const OWN_LINE: u32 = line!() + 4;
    impl Forward for Own {
        type Output = Tensor;
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            self.fc.forward(x)
        }
    }
    #[derive(Module)]
    struct Layers {
        layers: Sequential,
    }
    let linear = Linear::options().bias(false);
    let layers = (0..4).map(|i| Ok(Own { fc: linear.build(if i == 3 { 5 } else { 10 }, 10)? }));
    let model = Layers { layers: Sequential::from_iter(layers)? };
    model.parameters();
    check_error(
        model.layers.forward(&x),
        OWN_LINE,
        expect!["linear: f32[32, 10] × f32[10, 5]: inner sizes 10 and 5 differ, at layers.3.fc, <this line>"],
    );

    let failed = Sequential::from_iter([Linear::new(2, 2), Linear::new(usize::MAX, 2)]);
    assert!(failed.is_err());
    Ok(())
}

#[test]
fn modules_work_through_pointers() -> Result<()> {
    fn count(module: impl Module) -> usize {
        module.parameters().len()
    }
    let linear = Linear::new(3, 2)?;
    let x = Tensor::ones([3], &Device::Cpu)?;
    let want = linear.forward(&x)?.to_vec::<f32>()?;
    assert_eq!(count(&linear), 2);
    let shared = Arc::new(linear);
    assert_eq!(shared.forward(&x)?.to_vec::<f32>()?, want);
    assert_eq!(count(shared.clone()), 2);
    let boxed: Box<dyn Layer> = Box::new(shared);
    assert_eq!(boxed.forward(&x)?.to_vec::<f32>()?, want);
    assert_eq!(count(&boxed), 2);
    let module: Box<dyn Module> = Box::new(boxed);
    assert_eq!(count(module), 2);
    Ok(())
}

#[test]
fn sequentials_are_collected() -> Result<()> {
    let linear = Linear::options().bias(false).device(&Device::Cpu);
    let model = Sequential::from_iter((0..3).map(|_| linear.build(4, 4)))?;
    assert_eq!(names(model.named_parameters()), "0.weight\n1.weight\n2.weight");
    let collected = (0..3).map(|_| linear.build(4, 4)).collect::<Result<Sequential>>()?;
    assert_eq!(collected.len(), 3);
    assert!(!collected.is_empty() && collected.get(2).is_some() && collected.get(3).is_none());
    let activations = Sequential::from_iter([Relu, Relu])?;
    let x = Tensor::from_slice(&[-1.0f32, 2.0])?;
    assert_eq!(activations.forward(&x)?.to_vec::<f32>()?, [0.0, 2.0]);
    assert_eq!(Sequential::new().forward(&x)?.to_vec::<f32>()?, [-1.0, 2.0]);
    Ok(())
}

#[test]
fn three_inputs_are_a_tuple() -> Result<()> {
    #[derive(Module)]
    struct Bert {
        word: Linear,
        kind: Linear,
    }
    impl Forward<(Tensor, Tensor, Option<Tensor>)> for Bert {
        type Output = (Tensor, Tensor);
        fn forward(&self, (x, kind, mask): &(Tensor, Tensor, Option<Tensor>)) -> Result<(Tensor, Tensor)> {
            let mut y = self.word.forward(x)?.add(&self.kind.forward(kind)?)?;
            if let Some(mask) = mask {
                y = y.mul(mask)?;
            }
            Ok((y.clone(), y.sum()?))
        }
    }
    let model = Bert { word: Linear::new(2, 3)?, kind: Linear::new(1, 3)? };
    let (hidden, pooled) = model.forward(&(ones(2)?, ones(1)?, Some(Tensor::zeros([3], &Device::Cpu)?)))?;
    assert_eq!((hidden.to_vec::<f32>()?, pooled.item::<f32>()?), (vec![0.0; 3], 0.0));
    Ok(())
}

#[test]
fn modes_reach_every_part() -> Result<()> {
    let model = model()?;
    assert!(model.is_training());
    model.eval();
    assert!(!model.is_training() && !model.layers[1].is_training() && !model.training.get());
    model.train();
    assert!(model.layers[2].is_training());

    model.requires_grad_(false)?;
    assert!(model.parameters().iter().all(|p| !p.requires_grad()));
    model.requires_grad_(true)?;
    assert!(model.parameters().iter().all(|p| p.requires_grad() && p.is_leaf()));

    let y = model.layers[0].forward(&ones(4)?)?.sum()?;
    y.backward()?;
    assert!(model.layers[0].fc.weight.grad().is_some());
    model.zero_grad();
    assert!(model.parameters().iter().all(|p| p.grad().is_none()));
    Ok(())
}

#[test]
fn linear_layers_start_as_pytorchs() -> Result<()> {
    manual_seed(0);
    for dtype in [DType::F32, DType::F64] {
        let linear = Linear::options().dtype(dtype).build(64, 256)?;
        assert_eq!((linear.weight.dtype(), linear.in_features(), linear.out_features()), (dtype, 64, 256));
        let weight = linear.weight.to_vec_cast::<f64>()?;
        let bias = linear.bias.as_ref().map_or(Ok(vec![]), |bias| bias.to_vec_cast::<f64>())?;
        for values in [weight, bias] {
            let n = values.len() as f64;
            assert!(values.iter().all(|x| x.abs() <= 0.125));
            let (mean, square) =
                (values.iter().sum::<f64>() / n, values.iter().map(|x| x * x).sum::<f64>() / n);
            assert!(mean.abs() < 0.02, "{mean}");
            // The variance of U(−1/8, 1/8).
            assert!((square - 1.0 / 192.0).abs() < 1e-3, "{square}");
        }
    }
    let empty = Linear::new(0, 2)?;
    assert_eq!(empty.forward(&Tensor::zeros([3, 0], &Device::Cpu)?)?.to_vec::<f32>()?, [0.0; 6]);
    Ok(())
}

#[test]
fn initialisers_keep_their_bounds() -> Result<()> {
    let weight = Parameter::new(Tensor::zeros([30, 20, 2], &Device::Cpu)?)?;
    let largest = |t: &Tensor| {
        Ok::<f64, kiln_tensor::Error>(t.to_vec_cast::<f64>()?.iter().fold(0.0, |m, x| m.max(x.abs())))
    };
    init::uniform_(&weight, -2.0, 2.0)?;
    assert!((1.9..=2.0).contains(&largest(&weight)?));
    init::kaiming_uniform_(&weight, init::Nonlinearity::LeakyRelu(5f64.sqrt()), init::Fan::In)?;
    let bound = 1.0 / 40f64.sqrt();
    assert!((0.95 * bound..=bound).contains(&largest(&weight)?));
    init::kaiming_uniform_(&weight, init::Nonlinearity::Relu, init::Fan::Out)?;
    let bound = (6.0 / 60f64).sqrt();
    assert!((0.95 * bound..=bound).contains(&largest(&weight)?));
    init::xavier_uniform_(&weight, init::Nonlinearity::Tanh.gain())?;
    let bound = 5.0 / 3.0 * (6.0 / 100f64).sqrt();
    assert!((0.95 * bound..=bound).contains(&largest(&weight)?));
    init::constant_(&weight, 3.0)?;
    assert_eq!(weight.to_vec_cast::<f64>()?, [3.0; 1200]);
    init::ones_(&weight)?;
    assert_eq!(weight.to_vec_cast::<f64>()?, [1.0; 1200]);
    init::zeros_(&weight)?;
    assert_eq!(weight.to_vec_cast::<f64>()?, [0.0; 1200]);
    assert!(weight.requires_grad() && weight.is_leaf());

    let error = init::xavier_uniform_(&ones(3)?, 1.0).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(
        error.starts_with("xavier_uniform_: the weight must have 2 or more dims, got 1, at modules.rs:"),
        "{error}"
    );
    Ok(())
}

#[test]
fn parameters_are_leaves() -> Result<()> {
    let x = ones(2)?;
    x.requires_grad_(true)?;
    let parameter = Parameter::new(x.exp()?)?;
    assert!(parameter.is_leaf() && parameter.requires_grad());
    assert_eq!(format!("{parameter:?}"), "Parameter(f32[2])");
    assert!(Parameter::new(Tensor::from_slice(&[1i64])?).is_err());
    Ok(())
}
