//! Finding things in images: boxes, suppression, results whose size depends on values.

use kiln::Result;
use kiln::prelude::*;

use super::{CPU, programs, weight};
use crate::{Record, Step};

programs!("detection":
    boxes_above_threshold, suppression_on_the_host, suppression_without_host, box_regression, focal_loss,
    connected_components, confusion_matrix, region_crops,
);

/// Random boxes as left, top, right, bottom.
fn boxes(count: usize) -> Result<Tensor> {
    let corner = Tensor::rand([count, 2], &CPU)?.mul(8.0)?;
    let size = (Tensor::rand([count, 2], &CPU)? * 4.0 + 1.0).ok()?;
    Tensor::cat([&corner, &(&corner + size).ok()?], 1)
}

/// How much of each pair of boxes is common to both.
fn overlap(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let area = |t: &Tensor| (t.i((.., 2))? - t.i((.., 0))?).ok()?.mul(&t.i((.., 3))?.sub(&t.i((.., 1))?)?);
    let start = a.i((.., NewAxis, ..2))?.maximum(&b.i((NewAxis, .., ..2))?)?;
    let end = a.i((.., NewAxis, 2..))?.minimum(&b.i((NewAxis, .., 2..))?)?;
    let common = (end - start).clamp_min(0.0).ok()?.prod_dim(2, false)?;
    let all = (area(a)?.unsqueeze(1)? + area(b)?.unsqueeze(0)? - &common).ok()?;
    common.div(&all)
}

/// Keeps the boxes whose score is high enough: how many they are is known only then.
fn boxes_above_threshold(step: &Step) -> Result<Record> {
    let (head, mut record) = (Tensor::randn([5, 8], &CPU)?.mul(0.4)?, Record::new());
    for _ in 0..4 {
        let features = Tensor::randn([12, 8], &CPU)?;
        let (kept, scores) = step.run(|| {
            let out = features.linear(&head, None)?;
            let scores = out.select(1, 0)?.sigmoid()?;
            let index = scores.gt(0.6)?.nonzero()?.squeeze(1)?;
            let boxes = out.i((.., 1..))?.index_select(0, &index)?.exp()?;
            Ok::<_, kiln::Error>((boxes, scores.index_select(0, &index)?))
        })?;
        record.integer("count", kept.size(0)?);
        record.tensors("kept", [&kept, &scores])?;
    }
    Ok(record)
}

/// Overlaps are computed in the step; which boxes stay is decided on the host after it.
fn suppression_on_the_host(step: &Step) -> Result<Record> {
    let mut record = Record::new();
    for _ in 0..3 {
        let (boxes, scores) = (boxes(10)?, Tensor::rand([10], &CPU)?);
        let (overlaps, order) = step.run(|| {
            let order = scores.argsort(0, true)?;
            let sorted = boxes.index_select(0, &order)?;
            Ok::<_, kiln::Error>((overlap(&sorted, &sorted)?, order))
        })?;
        let (overlaps, order) = (overlaps.to_vec2::<f32>()?, order.to_vec::<i64>()?);
        let mut kept: Vec<usize> = Vec::new();
        for (i, row) in overlaps.iter().enumerate() {
            if kept.iter().all(|&k| row[k] < 0.2) {
                kept.push(i);
            }
        }
        record.integer("count", kept.len());
        kept.iter().for_each(|&i| record.integer("kept", order[i] as usize));
    }
    Ok(record)
}

/// The same loop without the host: a box stays unless a better one that stays covers it.
fn suppression_without_host(step: &Step) -> Result<Record> {
    let mut record = Record::new();
    for _ in 0..3 {
        let (boxes, scores) = (boxes(8)?, Tensor::rand([8], &CPU)?);
        let (kept, order) = step.run(|| {
            let order = scores.argsort(0, true)?;
            let sorted = boxes.index_select(0, &order)?;
            let covers = overlap(&sorted, &sorted)?.ge(0.2)?.triu(1)?;
            let kept = Tensor::full_of([8], true, DType::Bool, &CPU)?;
            for i in 0..8 {
                let gone = covers.select(0, i)?.logical_and(&kept.select(0, i)?)?;
                kept.copy_(&kept.logical_and(&gone.logical_not()?)?)?;
            }
            Ok::<_, kiln::Error>((kept, order))
        })?;
        record.tensors("kept", [&kept, &order])?;
    }
    Ok(record)
}

/// Boxes are trained by one minus their overlap with the target.
fn box_regression(step: &Step) -> Result<Record> {
    let (layer, x, target) = (nn::Linear::new(6, 4)?, Tensor::randn([8, 6], &CPU)?, boxes(8)?);
    let optimizer = optim::Adam::new(layer.parameters(), 0.05)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let out = layer.forward(&x)?;
            let centre = (out.i((.., ..2))? * 4.0 + 6.0).ok()?;
            let half = out.i((.., 2..))?.softplus(1.0, 20.0)?;
            let guess = Tensor::cat([&(&centre - &half).ok()?, &(&centre + &half).ok()?], 1)?;
            let common = overlap(&guess, &target)?.diagonal(0, 0, 1)?;
            let near = guess.smooth_l1_loss(&target, 1.0, Reduction::Mean)?;
            let loss = ((1.0 - &common).mean() + near * 0.5).ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("weight", &layer.weight)?;
    Ok(record)
}

/// Easy samples count less.
fn focal_loss(step: &Step) -> Result<Record> {
    let (w, x) = (weight([5, 8], 0.3)?, Tensor::randn([16, 8], &CPU)?);
    let target = Tensor::rand([16, 5], &CPU)?.lt(0.1)?.to_dtype(DType::F32)?;
    let optimizer = optim::SGD::options().lr(0.5).momentum(0.9).build(vec![w.clone()])?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let scores = x.linear(&w, None)?;
            let plain = scores.binary_cross_entropy_with_logits(&target, None, None, Reduction::None)?;
            let p = scores.sigmoid()?;
            let right = (&p * &target + (1.0 - &p) * (1.0 - &target)).ok()?;
            let balance = target.mul(0.5)?.add(0.25)?;
            let loss = (balance * (1.0 - &right).square() * plain).sum().ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("w", &w)?;
    Ok(record)
}

/// Labels spread to neighbours until nothing changes; the host asks after each sweep.
fn connected_components(step: &Step) -> Result<Record> {
    let there = Tensor::rand([8, 8], &CPU)?.lt(0.55)?;
    let mut labels = there.where_self(&Tensor::arange(1, 65, &CPU)?.view([8, 8])?, 0)?;
    let mut sweeps = 0;
    loop {
        let (next, changed) = step.run(|| {
            let padded = labels.pad(&[1, 1, 1, 1], 0)?;
            let mut next = labels.clone();
            for (row, column) in [(0, 1), (2, 1), (1, 0), (1, 2)] {
                next = next.maximum(&padded.i((row..row + 8, column..column + 8))?)?;
            }
            let next = there.where_self(&next, 0)?;
            Ok::<_, kiln::Error>((next.clone(), next.ne(&labels)?.any()?))
        })?;
        labels = next;
        sweeps += 1;
        if !changed.item::<bool>()? {
            break;
        }
    }
    let mut record = Record::new();
    record.integer("sweeps", sweeps);
    record.tensor("labels", &labels)?;
    record.integer("components", labels.unique()?.values.numel());
    Ok(record)
}

/// Counts of true and guessed classes, added up over batches.
fn confusion_matrix(step: &Step) -> Result<Record> {
    let (w, matrix) = (Tensor::randn([4, 6], &CPU)?, Tensor::full_of([16], 0, DType::I64, &CPU)?);
    let mut record = Record::new();
    for _ in 0..4 {
        let (x, y) = super::samples(20, 6, 4)?;
        let accuracy = step.run(|| {
            let guess = x.linear(&w, None)?.argmax_dim(1, false)?;
            let cell = (&y * 4 + &guess).ok()?;
            matrix.index_add_(0, &cell, &cell.ones_like()?)?;
            let table = matrix.view([4, 4])?;
            table.trace()?.to_dtype(DType::F32)?.div(&table.sum()?)
        })?;
        record.tensor("accuracy", &accuracy)?;
    }
    record.tensor("matrix", &matrix)?;
    Ok(record)
}

/// A crop around the brightest point: its place is read by the host in the middle of the step.
fn region_crops(step: &Step) -> Result<Record> {
    let filters = Tensor::randn([2, 1, 3, 3], &CPU)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let image = Tensor::rand([1, 1, 12, 12], &CPU)?;
        let crop = step.run(|| {
            let heat = image.conv2d(&filters, None, 1, 1, 1, 1)?.amax_dim(1, false)?.view([12, 12])?;
            let at = heat.argmax()?.item::<i64>()? as usize;
            let (row, column) = ((at / 12).min(8), (at % 12).min(8));
            let crop = image.i((0, 0, row..row + 4, column..column + 4))?;
            (&crop - crop.mean()?).ok()?.div(&crop.std()?)
        })?;
        record.tensor("crop", &crop)?;
    }
    Ok(record)
}
