//! The modules of the fixture, by name: how Kiln makes them and how they are called.

use kiln_nn::*;
use kiln_tensor::{DType, Interpolation, Padding, Pool, Result, Tensor};

type Call = Box<dyn Fn(&dyn Module, &[Tensor]) -> Result<Vec<Tensor>>>;

/// A module, and how it is called.
pub struct Built {
    pub module: Box<dyn Module>,
    pub call: Call,
}

/// A module from one tensor to one.
fn layer(layer: impl Layer + 'static) -> Result<Built> {
    with(layer, |layer, x| Ok(vec![layer.forward_from(&x[0], kiln_ir::Loc::UNKNOWN)?]))
}

/// Shares the module with its call.
fn with<M: Module + 'static>(
    module: M,
    call: impl Fn(&M, &[Tensor]) -> Result<Vec<Tensor>> + 'static,
) -> Result<Built> {
    let module = std::sync::Arc::new(module);
    let own = module.clone();
    Ok(Built { module: Box::new(module), call: Box::new(move |_, inputs| call(&own, inputs)) })
}

fn loss<M: Forward<(Tensor, Tensor), Output = Tensor> + Module + 'static>(module: M) -> Result<Built> {
    with(module, |loss, x| Ok(vec![loss.forward(&(x[0].clone(), x[1].clone()))?]))
}

fn loss3<M: Forward<(Tensor, Tensor, Tensor), Output = Tensor> + Module + 'static>(
    module: M,
) -> Result<Built> {
    with(module, |loss, x| Ok(vec![loss.forward(&(x[0].clone(), x[1].clone(), x[2].clone()))?]))
}

fn lstm(module: LSTM) -> Result<Built> {
    with(module, |lstm, x| {
        let (y, (h, c)) = match x {
            [x] => lstm.forward(x)?,
            [x, h, c] => lstm.forward(&(x.clone(), (h.clone(), c.clone())))?,
            _ => panic!("one or three inputs"),
        };
        Ok(vec![y, h, c])
    })
}

fn recurrent<M>(module: M) -> Result<Built>
where
    M: Forward<Tensor, Output = (Tensor, Tensor)>
        + Forward<(Tensor, Tensor), Output = (Tensor, Tensor)>
        + Module
        + 'static,
{
    with(module, |module, x| {
        let (y, h) = match x {
            [x] => Forward::<Tensor>::forward(module, x)?,
            [x, h] => module.forward(&(x.clone(), h.clone()))?,
            _ => panic!("one or two inputs"),
        };
        Ok(vec![y, h])
    })
}

/// The first input packed, the others the initial states; padded again with 0.5.
fn packed<M, S: 'static>(
    module: M,
    lengths: &'static [usize],
    batch_first: bool,
    states: fn(&[Tensor]) -> Option<S>,
    last: fn(S) -> Vec<Tensor>,
) -> Result<Built>
where
    M: Forward<PackedSequence, Output = (PackedSequence, S)>
        + Forward<(PackedSequence, S), Output = (PackedSequence, S)>
        + Module
        + 'static,
{
    with(module, move |module, x| {
        let packed = pack_padded_sequence(&x[0], lengths, batch_first, false)?;
        let (y, end) = match states(&x[1..]) {
            Some(states) => module.forward(&(packed, states))?,
            None => Forward::<PackedSequence>::forward(module, &packed)?,
        };
        let (y, got) = pad_packed_sequence(&y, batch_first, 0.5, None)?;
        assert_eq!(got, lengths);
        Ok(std::iter::once(y).chain(last(end)).collect())
    })
}

fn packed_lstm(module: LSTM, lengths: &'static [usize], batch_first: bool) -> Result<Built> {
    let states = |x: &[Tensor]| Some((x.first()?.clone(), x.get(1)?.clone()));
    packed(module, lengths, batch_first, states, |(h, c)| vec![h, c])
}

fn packed_one<M>(module: M, lengths: &'static [usize]) -> Result<Built>
where
    M: Forward<PackedSequence, Output = (PackedSequence, Tensor)>
        + Forward<(PackedSequence, Tensor), Output = (PackedSequence, Tensor)>
        + Module
        + 'static,
{
    packed(module, lengths, false, |x| x.first().cloned(), |h| vec![h])
}

fn attention(
    module: MultiheadAttention,
    call: impl Fn(&MultiheadAttention, &[Tensor]) -> Result<(Tensor, Option<Tensor>)> + 'static,
) -> Result<Built> {
    with(module, move |module, x| {
        let (y, weights) = call(module, x)?;
        Ok(std::iter::once(y).chain(weights).collect())
    })
}

fn three(module: &MultiheadAttention, x: &[Tensor]) -> Result<(Tensor, Option<Tensor>)> {
    module.forward(&(x[0].clone(), x[1].clone(), x[2].clone()))
}

pub fn build(name: &str, dtype: DType) -> Result<Built> {
    let number = |values: &[f64]| Tensor::from_slice(values)?.to_dtype(dtype);
    let transformer = || TransformerOptions::default().dim_feedforward(5).dropout(0.0).dtype(dtype);
    match name {
        "linear" => layer(Linear::options().dtype(dtype).build(4, 3)?),
        "conv1d" => layer(Conv1d::options().dtype(dtype).build(4, 3, 3)?),
        "conv1d_options" => {
            let options = Conv1d::options().stride(2).padding(2).dilation(2).groups(2).bias(false);
            layer(options.dtype(dtype).build(4, 6, 3)?)
        }
        "conv1d_circular" => {
            let options = Conv1d::options().padding(2).padding_mode(PaddingMode::Circular);
            layer(options.dtype(dtype).build(4, 2, 3)?)
        }
        "conv2d" => layer(Conv2d::options().dtype(dtype).build(4, 3, 3)?),
        "conv2d_options" => {
            let options = Conv2d::options().stride([2, 1]).padding([1, 2]).dilation([1, 2]).groups(4);
            layer(options.dtype(dtype).build(4, 4, [3, 2])?)
        }
        "conv2d_same" => {
            layer(Conv2d::options().padding(Padding::Same).bias(false).dtype(dtype).build(4, 2, [3, 2])?)
        }
        "conv2d_reflect" => {
            let options = Conv2d::options().padding([2, 1]).padding_mode(PaddingMode::Reflect);
            layer(options.dtype(dtype).build(4, 2, 3)?)
        }
        "conv2d_replicate_same" => {
            let options = Conv2d::options().padding(Padding::Same).padding_mode(PaddingMode::Replicate);
            layer(options.dtype(dtype).build(4, 2, [4, 3])?)
        }
        "conv_transpose1d" => {
            let options = ConvTranspose1d::options().stride(2).padding(1).output_padding(1);
            layer(options.dtype(dtype).build(4, 3, 3)?)
        }
        "conv_transpose2d" => {
            let options = ConvTranspose2d::options().stride(2).padding(1).output_padding(1).groups(2);
            layer(options.dilation([1, 2]).bias(false).dtype(dtype).build(4, 2, 3)?)
        }
        "batch_norm1d" => layer(BatchNorm1d::options().dtype(dtype).build(4)?),
        "batch_norm1d_lengths" => {
            layer(BatchNorm1d::options().eps(0.01).momentum(Some(0.3)).dtype(dtype).build(4)?)
        }
        "batch_norm1d_average" => layer(BatchNorm1d::options().momentum(None).dtype(dtype).build(4)?),
        "batch_norm2d" => layer(BatchNorm2d::options().dtype(dtype).build(4)?),
        "batch_norm2d_plain" => {
            let options = BatchNorm2d::options().affine(false).track_running_stats(false);
            layer(options.dtype(dtype).build(4)?)
        }
        "layer_norm" => layer(LayerNorm::options().dtype(dtype).build([6])?),
        "layer_norm_shape" => layer(LayerNorm::options().eps(0.01).bias(false).dtype(dtype).build([5, 4])?),
        "layer_norm_plain" => layer(LayerNorm::options().elementwise_affine(false).dtype(dtype).build([4])?),
        "group_norm" => layer(GroupNorm::options().dtype(dtype).build(2, 4)?),
        "group_norm_plain" => layer(GroupNorm::options().affine(false).eps(0.1).dtype(dtype).build(4, 4)?),
        // The eps that stands for none differs by dtype; the fixture is of f64.
        "rms_norm" => layer(RMSNorm::options().dtype(dtype).build([6])?),
        "rms_norm_eps" => layer(RMSNorm::options().eps(Some(0.01)).dtype(dtype).build([5, 4])?),
        "embedding" => layer(Embedding::options().dtype(dtype).build(5, 3)?),
        "embedding_padding" => layer(Embedding::options().padding_idx(Some(-1)).dtype(dtype).build(5, 3)?),
        "max_pool1d" => layer(MaxPool1d::with(Pool::new(3).stride(2).padding(1))),
        "max_pool2d" => layer(MaxPool2d::new(2)),
        "max_pool2d_options" => {
            let pool = Pool::new([3, 2]).stride([2, 1]).padding(1).dilation([1, 2]).ceil_mode(true);
            layer(MaxPool2d::with(pool))
        }
        "avg_pool1d" => layer(AvgPool1d::with(Pool::new(3).stride(2).padding(1))),
        "avg_pool2d" => {
            let pool = Pool::new([3, 2]).stride(2).padding(1).count_include_pad(false).ceil_mode(true);
            layer(AvgPool2d::with(pool))
        }
        "adaptive_avg_pool1d" => layer(AdaptiveAvgPool1d::new(3)),
        "adaptive_avg_pool2d" => layer(AdaptiveAvgPool2d::new([3, 2])),
        "flatten" => layer(Flatten::default()),
        "permute" => layer(Permute::new(&[0, 2, -1, 1])),
        "stochastic_depth" => layer(StochasticDepth::new(1.0)?),
        "layer_norm2d" => layer(LayerNorm2d::options().eps(0.01).dtype(dtype).build(4)?),
        "squeeze_excitation" => {
            let squeezed = SqueezeExcitation::with(4, 2, SiLU, Sigmoid)?;
            squeezed.to(dtype)?;
            layer(squeezed)
        }
        "unflatten" => layer(Unflatten::new(1, &[2, 2])),
        "upsample_nearest" => layer(Upsample::new(2.0, Interpolation::Nearest)),
        "upsample_bilinear" => layer(Upsample::new([5, 4], Interpolation::Bilinear { align_corners: true })),
        "pixel_shuffle" => layer(PixelShuffle { upscale_factor: 2 }),
        "pixel_unshuffle" => layer(PixelUnshuffle { downscale_factor: 2 }),
        "relu" => layer(ReLU),
        "relu6" => layer(ReLU6),
        "elu" => layer(ELU::new(0.7)),
        "celu" => layer(CELU::new(1.5)),
        "selu" => layer(SELU),
        "gelu" => layer(GELU),
        "gelu_tanh" => layer(Gelu::tanh()),
        "silu" => layer(SiLU),
        "mish" => layer(Mish),
        "leaky_relu" => layer(LeakyReLU::new(0.2)),
        "hardtanh" => layer(Hardtanh::new(-2.0, 1.5)),
        "hardsigmoid" => layer(Hardsigmoid),
        "hardswish" => layer(Hardswish),
        "hardshrink" => layer(Hardshrink::new(0.7)),
        "softshrink" => layer(Softshrink::new(0.3)),
        "tanhshrink" => layer(Tanhshrink),
        "softsign" => layer(Softsign),
        "softplus" => layer(Softplus::new(2.0, 3.0)),
        "log_sigmoid" => layer(LogSigmoid),
        "sigmoid" => layer(Sigmoid),
        "tanh" => layer(Tanh),
        "threshold" => layer(Threshold { threshold: 0.5, value: -2.0 }),
        "glu" => layer(GLU::new(1)),
        "softmin" => layer(Softmin::new(1)),
        "softmax" => layer(Softmax { dim: 1 }),
        "log_softmax" => layer(LogSoftmax { dim: -1 }),
        "identity" => layer(Identity),
        "prelu" => layer(PReLU::options().num_parameters(4).dtype(dtype).build()?),
        "prelu_one" => layer(PReLU::options().num_parameters(1).dtype(dtype).build()?),
        "lstm" => lstm(LSTM::options().dtype(dtype).build(3, 4)?),
        "lstm_full" => {
            let options = LSTM::options().num_layers(2).batch_first(true).bidirectional(true);
            lstm(options.dtype(dtype).build(3, 4)?)
        }
        "lstm_unbatched" => lstm(LSTM::options().bias(false).dtype(dtype).build(3, 4)?),
        "gru" => recurrent(GRU::options().dtype(dtype).build(3, 4)?),
        "gru_full" => {
            let options = GRU::options().num_layers(2).batch_first(true).bidirectional(true);
            recurrent(options.dtype(dtype).build(3, 4)?)
        }
        "rnn" => recurrent(RNN::options().num_layers(2).dtype(dtype).build(3, 4)?),
        "lstm_projected" => {
            let options = LSTM::options().num_layers(2).proj_size(2).bidirectional(true);
            lstm(options.dtype(dtype).build(3, 5)?)
        }
        "lstm_one_step" => lstm(LSTM::options().proj_size(33).dtype(dtype).build(3, 40)?),
        "gru_no_bias" => recurrent(GRU::options().bias(false).dtype(dtype).build(3, 4)?),
        "rnn_relu" => {
            let options = RNN::options().nonlinearity(Nonlinearity::Relu).bidirectional(true).bias(false);
            recurrent(options.dtype(dtype).build(3, 4)?)
        }
        "lstm_packed" => {
            let options = LSTM::options().num_layers(2).bidirectional(true).dtype(dtype);
            packed_lstm(options.build(3, 4)?, &[2, 4, 1], false)
        }
        "lstm_projected_packed" => {
            let options = LSTM::options().proj_size(2).batch_first(true).dtype(dtype);
            packed_lstm(options.build(3, 5)?, &[4, 2, 3], true)
        }
        "gru_packed" => {
            let options = GRU::options().num_layers(2).bidirectional(true).dtype(dtype);
            packed_one(options.build(3, 4)?, &[4, 1, 3])
        }
        "rnn_packed" => packed_one(RNN::options().bidirectional(true).dtype(dtype).build(3, 4)?, &[3, 3]),
        "rnn_relu_packed" => {
            let options = RNN::options().nonlinearity(Nonlinearity::Relu).dtype(dtype);
            packed_one(options.build(3, 4)?, &[1, 4])
        }
        "attention" => attention(MultiheadAttention::options().dtype(dtype).build(6, 2)?, three),
        "attention_batch_first" => {
            let options = MultiheadAttention::options().bias(false).batch_first(true).dtype(dtype);
            attention(options.build(6, 3)?, |module, x| {
                let call = AttentionCall { average_attn_weights: false, ..AttentionCall::default() };
                module.attend(&x[0], &x[1], &x[2], call)
            })
        }
        "attention_sizes" => {
            let options = MultiheadAttention::options().kdim(Some(4)).vdim(Some(5)).dtype(dtype);
            attention(options.build(6, 2)?, three)
        }
        "attention_masks" => {
            let options = MultiheadAttention::options().batch_first(true).dtype(dtype);
            attention(options.build(6, 2)?, |module, x| {
                let call = AttentionCall {
                    key_padding_mask: Some(&x[1]),
                    attn_mask: Some(&x[2]),
                    need_weights: false,
                    ..AttentionCall::default()
                };
                module.attend(&x[0], &x[0], &x[0], call)
            })
        }
        "attention_one" => attention(MultiheadAttention::options().dtype(dtype).build(6, 2)?, |module, x| {
            module.attend(&x[0], &x[0], &x[0], AttentionCall::default())
        }),
        "encoder_layer" => layer(transformer().encoder_layer(6, 2)?),
        "encoder_layer_options" => {
            let options = transformer().activation(TransformerActivation::Gelu).layer_norm_eps(0.01);
            let options = options.batch_first(true).norm_first(true).bias(false);
            with(options.encoder_layer(6, 3)?, |module, x| {
                Ok(vec![module.encode(&x[0], Masks { mask: Some(&x[1]), ..Masks::default() })?])
            })
        }
        "decoder_layer" => loss(transformer().decoder_layer(6, 2)?),
        "decoder_layer_options" => {
            let options = transformer().activation(TransformerActivation::Gelu).batch_first(true);
            with(options.norm_first(true).decoder_layer(6, 3)?, |module, x| {
                // The mask of the fixture is the causal one.
                Ok(vec![module.decode(&x[0], &x[1], Masks::causal(), Masks::default())?])
            })
        }
        "encoder" => layer(TransformerEncoder {
            layers: vec![transformer().encoder_layer(6, 2)?, transformer().encoder_layer(6, 2)?],
            norm: Some(LayerNorm::options().dtype(dtype).build([6])?),
        }),
        "cross_entropy" | "cross_entropy_probabilities" => loss(CrossEntropyLoss::new()),
        "cross_entropy_options" => {
            let options = CrossEntropyLoss::new().weight(number(&[1.0, 0.5, 2.0])?).label_smoothing(0.1);
            loss(options.ignore_index(1).reduction(Reduction::Sum))
        }
        "cross_entropy_images" => loss(CrossEntropyLoss::new().reduction(Reduction::None)),
        "nll" => loss(NLLLoss::new().weight(number(&[1.0, 0.5, 2.0])?)),
        "mse" => loss(MSELoss::new()),
        "l1" => loss(L1Loss::new().reduction(Reduction::Sum)),
        "smooth_l1" => loss(SmoothL1Loss::new().beta(0.5)),
        "huber" => loss(HuberLoss::new().reduction(Reduction::None).delta(0.7)),
        "bce" => loss(BCELoss::new()),
        "bce_logits" => loss(BCEWithLogitsLoss::new().pos_weight(number(&[1.0, 2.0, 0.5, 1.0])?)),
        "kl_div" => loss(KLDivLoss::new().batchmean(true)),
        "kl_div_log" => loss(KLDivLoss::new().log_target(true)),
        "soft_margin" => loss(SoftMarginLoss::new()),
        "hinge_embedding" => loss(HingeEmbeddingLoss::new().margin(0.5)),
        "poisson" => loss(PoissonNLLLoss::new().full(true)),
        "poisson_plain" => loss(PoissonNLLLoss::new().log_input(false)),
        "margin_ranking" => loss3(MarginRankingLoss::new().margin(0.3)),
        "cosine_embedding" => loss3(CosineEmbeddingLoss::new().margin(0.2)),
        "triplet_margin" => loss3(TripletMarginLoss::new().margin(2.0)),
        other => panic!("unknown case {other}"),
    }
}
