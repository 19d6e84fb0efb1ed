//! Images: convolutions, norms with running statistics, up and down sampling, patches.

use kiln::prelude::*;
use kiln::tensor::{Attention, BatchNorm, Interpolation, Pool};
use kiln::{Reduction, Result};

use super::{CPU, constant, programs, weight};
use crate::{Record, Step};

programs!("vision":
    convolutional_classifier, residual_network, u_net, depthwise_separable, vision_transformer,
    denoising_autoencoder, super_resolution, diffusion, style_transfer, saliency_map,
);

/// Scale, shift, running mean and running variance of batch norm.
struct Norm {
    scale: Tensor,
    shift: Tensor,
    running: [Tensor; 2],
}

impl Norm {
    fn new(channels: usize) -> Result<Norm> {
        let running = [Tensor::zeros([channels], &CPU)?, Tensor::ones([channels], &CPU)?];
        Ok(Norm { scale: constant([channels], 1.0)?, shift: constant([channels], 0.0)?, running })
    }

    fn parameters(&self) -> Vec<Tensor> {
        vec![self.scale.clone(), self.shift.clone()]
    }

    fn forward(&self, x: &Tensor, training: bool) -> Result<Tensor> {
        x.batch_norm(BatchNorm {
            running: Some((&self.running[0], &self.running[1])),
            weight: Some(&self.scale),
            bias: Some(&self.shift),
            training,
            ..BatchNorm::default()
        })
    }
}

/// Convolution, batch norm, pooling, twice; then a linear layer. Evaluated at the end by the running statistics.
fn convolutional_classifier(step: &Step) -> Result<Record> {
    let (first, second) = (weight([6, 1, 3, 3], 0.3)?, weight([8, 6, 3, 3], 0.2)?);
    let (norms, head) = ([Norm::new(6)?, Norm::new(8)?], nn::Linear::new(8 * 4, 4)?);
    let (x, y) = (Tensor::randn([6, 1, 8, 8], &CPU)?, Tensor::randint(0, 4, [6], &CPU)?);
    let forward = |training: bool| {
        let h = norms[0].forward(&x.conv2d(&first, None, 1, 1, 1, 1)?, training)?.relu()?;
        let h =
            norms[1].forward(&h.max_pool2d(Pool::new(2))?.conv2d(&second, None, 1, 1, 1, 1)?, training)?;
        head.forward(&h.relu()?.avg_pool2d(Pool::new(2))?.flatten_dims(1, -1)?)
    };
    let own = vec![first.clone(), second.clone()];
    let inner = norms.iter().flat_map(Norm::parameters).collect();
    let optimizer = optim::SGD::options().lr(0.05).momentum(0.9);
    let optimizer = optimizer.build([own, inner, head.parameters()].concat())?;
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let loss = forward(true)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    let scores = step.another("evaluate").run(|| {
        let _guard = no_grad();
        forward(false)
    })?;
    record.tensor("scores", &scores)?;
    record.tensors("running", &norms[1].running)?;
    Ok(record)
}

/// Blocks that add to what comes in; one halves the image.
fn residual_network(step: &Step) -> Result<Record> {
    let filters = (0..4).map(|_| weight([6, 6, 3, 3], 0.15)).collect::<Result<Vec<_>>>()?;
    let norms = (0..4).map(|_| Norm::new(6)).collect::<Result<Vec<_>>>()?;
    let (shortcut, head) = (weight([6, 6, 1, 1], 0.4)?, weight([3, 6], 0.4)?);
    let (x, y) = (Tensor::randn([4, 6, 8, 8], &CPU)?, Tensor::randint(0, 3, [4], &CPU)?);
    let inner = norms.iter().flat_map(Norm::parameters).collect();
    let parameters = [filters.clone(), inner, vec![shortcut.clone(), head.clone()]].concat();
    let optimizer = optim::Adam::new(parameters, 0.01)?;
    let mut record = Record::new();
    for _ in 0..3 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let mut h = x.clone();
            for (block, stride) in [1, 2].into_iter().enumerate() {
                let inner = h.conv2d(&filters[2 * block], None, stride, 1, 1, 1)?;
                let inner = norms[2 * block].forward(&inner, true)?.relu()?;
                let inner = inner.conv2d(&filters[2 * block + 1], None, 1, 1, 1, 1)?;
                let inner = norms[2 * block + 1].forward(&inner, true)?;
                let outer = if stride == 1 { h } else { h.conv2d(&shortcut, None, stride, 0, 1, 1)? };
                h = (inner + outer).relu().ok()?;
            }
            let loss = h.mean_dim([2, 3], false)?.linear(&head, None)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("filters", &filters)?;
    record.tensors("running", norms.iter().flat_map(|norm| &norm.running))?;
    Ok(record)
}

/// Down by pooling, up by interpolation, joined with what was before: a mask for each pixel.
fn u_net(step: &Step) -> Result<Record> {
    let (down, bottom) = (weight([4, 1, 3, 3], 0.4)?, weight([8, 4, 3, 3], 0.2)?);
    let (up, out) = (weight([4, 12, 3, 3], 0.2)?, weight([1, 4, 1, 1], 0.5)?);
    let images = Tensor::rand([3, 1, 8, 8], &CPU)?;
    let masks = images.gt(0.5)?.to_dtype(DType::F32)?;
    let optimizer = optim::Adam::new(vec![down.clone(), bottom.clone(), up.clone(), out.clone()], 0.02)?;
    let conv = |x: &Tensor, w: &Tensor| x.conv2d(w, None, 1, 1, 1, 1)?.relu();
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let before = conv(&images, &down)?;
            let deep = conv(&before.max_pool2d(Pool::new(2))?, &bottom)?;
            let deep = deep.interpolate(2.0, Interpolation::Bilinear { align_corners: false })?;
            let joined = conv(&Tensor::cat([&before, &deep], 1)?, &up)?;
            let scores = joined.conv2d(&out, None, 1, 0, 1, 1)?;
            let loss = scores.binary_cross_entropy_with_logits(&masks, None, None, Reduction::Mean)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("filters", [&down, &bottom, &up, &out])?;
    Ok(record)
}

/// One filter for each channel, then a mix of channels, as in small networks for phones.
fn depthwise_separable(step: &Step) -> Result<Record> {
    let (depthwise, pointwise) = (weight([6, 1, 3, 3], 0.4)?, weight([10, 6, 1, 1], 0.4)?);
    let (x, y) = (Tensor::randn([4, 6, 9, 9], &CPU)?, Tensor::randint(0, 10, [4], &CPU)?);
    let optimizer = optim::AdamW::new(vec![depthwise.clone(), pointwise.clone()], 0.02)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let h = x.conv2d(&depthwise, None, 2, 1, 1, 6)?.relu6()?;
            let h = h.conv2d(&pointwise, None, 1, 0, 1, 1)?.hardswish()?;
            let loss = h.adaptive_avg_pool2d(1)?.flatten_dims(1, -1)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("filters", [&depthwise, &pointwise])?;
    Ok(record)
}

/// Images cut into patches by reshapes, a class token in front, one block of attention.
fn vision_transformer(step: &Step) -> Result<Record> {
    let (embed, qkv) = (nn::Linear::new(4 * 4, 16)?, nn::Linear::new(16, 48)?);
    let (out, head) = (nn::Linear::new(16, 16)?, nn::Linear::new(16, 3)?);
    let (token, positions) = (weight([1, 1, 16], 0.2)?, weight([1, 5, 16], 0.2)?);
    let (images, y) = (Tensor::rand([4, 8, 8], &CPU)?, Tensor::randint(0, 3, [4], &CPU)?);
    let layers = [embed.parameters(), qkv.parameters(), out.parameters(), head.parameters()].concat();
    let optimizer = optim::AdamW::new([layers, vec![token.clone(), positions.clone()]].concat(), 0.01)?;
    let mut record = Record::new();
    for _ in 0..3 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let patches = images.view([4, 2, 4, 2, 4])?.permute([0, 1, 3, 2, 4])?.reshape([4, 4, 16])?;
            let x = Tensor::cat([&token.expand([4, 1, 16])?, &embed.forward(&patches)?], 1)?;
            let x = (x + &positions).ok()?;
            let heads = qkv.forward(&x.layer_norm(&[16], None, None, 1e-5)?)?;
            let heads = heads.view([4, 5, 3, 2, 8])?.permute([2, 0, 3, 1, 4])?.unbind(0)?;
            let seen = heads[0].scaled_dot_product_attention(&heads[1], &heads[2], Attention::default())?;
            let x = (x + out.forward(&seen.transpose(1, 2)?.reshape([4, 5, 16])?)?).ok()?;
            let loss = head.forward(&x.select(1, 0)?)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&token, &positions, &*qkv.weight])?;
    Ok(record)
}

/// Noise is added in the step; the decoder is a transposed convolution.
fn denoising_autoencoder(step: &Step) -> Result<Record> {
    let (encode, decode) = (weight([6, 1, 3, 3], 0.3)?, weight([6, 1, 4, 4], 0.2)?);
    let images = Tensor::rand([4, 1, 8, 8], &CPU)?;
    let optimizer = optim::Adam::new(vec![encode.clone(), decode.clone()], 0.02)?;
    let transpose = kiln::tensor::ConvTranspose { stride: [2, 2], padding: [1, 1], ..Default::default() };
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let noisy = (&images + images.randn_like()? * 0.2).clamp(0.0, 1.0).ok()?;
            let code = noisy.conv2d(&encode, None, 2, 1, 1, 1)?.silu()?;
            let restored = code.conv_transpose2d(&decode, None, transpose)?.sigmoid()?;
            let loss = restored.mse_loss(&images, Reduction::Mean)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("filters", [&encode, &decode])?;
    Ok(record)
}

/// Channels become pixels; the target is the image itself, the input its half.
fn super_resolution(step: &Step) -> Result<Record> {
    let (first, second) = (weight([8, 1, 3, 3], 0.3)?, weight([4, 8, 3, 3], 0.2)?);
    let large = Tensor::rand([2, 1, 12, 12], &CPU)?;
    let optimizer = optim::Adam::new(vec![first.clone(), second.clone()], 0.01)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let small = large.avg_pool2d(Pool::new(2))?;
            let h = small.reflection_pad(&[1, 1, 1, 1])?.conv2d(&first, None, 1, 0, 1, 1)?.relu()?;
            let residual = h.conv2d(&second, None, 1, 1, 1, 1)?.pixel_shuffle(2)?;
            let guess = (small.interpolate(2.0, Interpolation::Nearest)? + residual).ok()?;
            let loss = guess.l1_loss(&large, Reduction::Mean)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("filters", [&first, &second])?;
    Ok(record)
}

/// A denoiser is trained at random times of a diffusion, then a point is sampled from noise, step by step.
fn diffusion(step: &Step) -> Result<Record> {
    let model = nn::seq![nn::Linear::new(3, 24)?, nn::Tanh, nn::Linear::new(24, 2)?];
    let betas = Tensor::linspace(1e-2, 0.3, 8, &CPU)?;
    let kept = betas.rsub(1.0)?.cumprod(0)?;
    let optimizer = optim::Adam::new(model.parameters(), 0.02)?;
    let mut record = Record::new();
    for _ in 0..6 {
        let x = (Tensor::randn([16, 2], &CPU)? * 0.1 + 1.0).ok()?;
        let loss = step.run(|| {
            let time = Tensor::randint(0, 8, [16, 1], &CPU)?;
            let (noise, share) = (x.randn_like()?, kept.take(&time)?);
            let noisy = (&x * share.sqrt()? + &noise * (1.0 - &share).sqrt()).ok()?;
            optimizer.zero_grad();
            let input = Tensor::cat([&noisy, &time.to_dtype(DType::F32)?.div(8.0)?], 1)?;
            let loss = model.forward(&input)?.mse_loss(&noise, Reduction::Mean)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    let (sample, _guard) = (step.another("sample"), no_grad());
    let mut x = Tensor::randn([4, 2], &CPU)?;
    for time in (0..8).rev() {
        x = sample.run(|| {
            let (beta, share) = (betas.i(time)?, kept.i(time)?);
            let input = Tensor::cat([&x, &Tensor::full([4, 1], time as f64 / 8.0, &CPU)?], 1)?;
            let noise = model.forward(&input)?;
            let mean = (&x - noise * &beta / (1.0 - &share).sqrt()) / (1.0 - &beta).sqrt();
            if time == 0 { mean.ok() } else { (mean + x.randn_like()? * beta.sqrt()?).ok() }
        })?;
    }
    record.tensor("samples", &x)?;
    Ok(record)
}

/// The image is what is trained: Gram matrices of features shall be another image's.
fn style_transfer(step: &Step) -> Result<Record> {
    let filters = Tensor::randn([6, 3, 3, 3], &CPU)?.mul(0.2)?;
    let features = |image: &Tensor| image.conv2d(&filters, None, 1, 1, 1, 1)?.relu();
    let gram = |f: &Tensor| {
        let rows = f.view([6, -1])?;
        rows.mm(&rows.t()?)?.div(rows.numel() as f64)
    };
    let (content, style) = (Tensor::rand([1, 3, 8, 8], &CPU)?, Tensor::rand([1, 3, 8, 8], &CPU)?);
    let (content_features, style_gram) = (features(&content)?, gram(&features(&style)?)?);
    let image = content.clone_tensor()?;
    image.requires_grad_(true)?;
    let optimizer = optim::Adam::new(vec![image.clone()], 0.05)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let own = features(&image)?;
            let style_loss = gram(&own)?.mse_loss(&style_gram, Reduction::Sum)?;
            let smooth = (image.i((.., .., 1..))? - image.i((.., .., ..-1))?).abs().mean();
            let loss = own.mse_loss(&content_features, Reduction::Mean)? + style_loss * 10.0 + smooth * 0.1;
            let loss = loss.ok()?;
            loss.backward()?;
            optimizer.step()?;
            let _guard = no_grad();
            image.clamp_(0.0, 1.0)?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("image", &image)?;
    Ok(record)
}

/// Which pixels matter for the class: the gradient of a score with respect to the image.
fn saliency_map(step: &Step) -> Result<Record> {
    let model = nn::seq![nn::Linear::new(36, 16)?, nn::Relu, nn::Linear::new(16, 5)?];
    model.requires_grad_(false)?;
    let mut record = Record::new();
    for _ in 0..3 {
        let image = Tensor::rand([6, 6], &CPU)?;
        image.requires_grad_(true)?;
        let (class, map) = step.run(|| {
            let scores = model.forward(&image.flatten()?)?;
            let class = scores.argmax()?;
            scores.index_select(0, &class.view([1])?)?.sum()?.backward()?;
            let map = super::gradient(&image)?.abs()?;
            Ok::<_, kiln::Error>((class, map.div(&map.amax()?)?))
        })?;
        record.tensor("class", &class)?;
        record.tensor("map", &map)?;
    }
    Ok(record)
}
