//! Single numbers, empty tensors, indices of other dtypes and masks, where PyTorch takes them. The results are
//! PyTorch's.

use kiln::{CrossEntropy, DType, Device, Reduction, ScatterReduce, Tensor};

use crate::{everywhere, floats, ints};

fn number(x: f64) -> Tensor {
    Tensor::full_of((), x, DType::F64, &Device::Cpu).unwrap()
}

fn index(places: &[i64]) -> Tensor {
    Tensor::from_slice(places).unwrap()
}

#[test]
fn a_single_number_is_indexed_like_a_line_of_one() {
    let (x, src, zero) = (number(2.0), number(5.0), index(&[0]).reshape(kiln::Shape::scalar()).unwrap());
    let line = index(&[0]);
    let all = everywhere("0-d", || {
        let mut all = Vec::new();
        for at in [&line, &zero] {
            all.push(x.index_select(0, at)?);
            all.push(x.index_add(0, at, &src)?);
            all.push(x.index_copy(-1, at, &src)?);
            all.push(x.index_fill(0, at, 5.0)?);
            all.push(x.scatter(0, at, &src)?);
            all.push(x.scatter_value(0, at, 5.0)?);
            all.push(x.scatter_add(0, at, &src)?);
            for reduce in [ScatterReduce::Sum, ScatterReduce::Prod, ScatterReduce::Amax, ScatterReduce::Mean]
            {
                all.push(x.scatter_reduce(0, at, &src, reduce, true)?);
            }
            all.push(x.gather(0, at)?.reshape(kiln::Shape::scalar())?);
        }
        all.push(x.unfold(0, 1, 1)?.reshape(kiln::Shape::scalar())?);
        Ok(all)
    });
    let want = [2.0, 7.0, 5.0, 5.0, 5.0, 5.0, 7.0, 7.0, 10.0, 5.0, 3.5, 2.0];
    let got: Vec<f64> = all.iter().map(|t| floats(t)[0]).collect();
    assert_eq!(got, [&want[..], &want[..], &[2.0]].concat());
    assert!(all.iter().all(|t| t.rank() == 0));
    // In place it is the number itself that changes.
    x.index_add_(0, &line, &src).unwrap();
    x.scatter_add_(0, &zero, &src).unwrap();
    assert_eq!(floats(&x), [12.0]);
    x.index_fill_(0, &index(&[-1]), 1.0).unwrap();
    assert_eq!(floats(&x), [1.0]);
    assert!(x.index_select(0, &index(&[0, 0])).is_err());
}

#[test]
fn gradients_reach_single_numbers() {
    let (x, src) = (number(2.0), number(5.0));
    x.requires_grad_(true).unwrap();
    src.requires_grad_(true).unwrap();
    let y = x.index_add(0, &index(&[0]), &src).unwrap().mul(3.0).unwrap();
    y.add(&x.gather(0, &index(&[0, 0])).unwrap().sum().unwrap()).unwrap().backward().unwrap();
    assert_eq!((floats(&x.grad().unwrap()), floats(&src.grad().unwrap())), (vec![5.0], vec![3.0]));
}

#[test]
fn topk_of_a_single_number_is_that_number() {
    for k in [0, 1] {
        let x = number(2.0);
        let all = everywhere("topk", || x.topk(k, 0, true).map(|(values, at)| vec![values, at]));
        assert_eq!((floats(&all[0]), ints(&all[1])), (vec![2.0], vec![0]));
    }
    assert!(number(2.0).topk(2, 0, true).is_err());
}

#[test]
fn indices_have_any_integer_dtype() {
    let x = Tensor::from_slice(&[1.0f64, 2.0, 3.0, 4.0]).unwrap();
    for dtype in [DType::U8, DType::I8, DType::I16, DType::I32, DType::I64] {
        let at = index(&[2, 0]).to_dtype(dtype).unwrap();
        let all = everywhere(&format!("indices of {dtype}"), || {
            Ok(vec![x.gather(0, &at)?, x.index_select(0, &at)?, x.take(&at)?, x.index(&[Some(&at)])?])
        });
        assert!(all.iter().all(|t| floats(t) == [3.0, 1.0]), "{dtype}");
    }
    // No indices pick nothing, whatever their dims.
    let none = Tensor::full_of([2, 0], 0, DType::I64, &Device::Cpu).unwrap();
    assert_eq!(x.gather(0, &none).unwrap().shape().to_vec(), [2, 0]);
}

#[test]
fn index_fill_counts_from_the_end() {
    let x = Tensor::from_vec((0..6).collect::<Vec<i64>>(), [2, 3]).unwrap();
    let at = index(&[-1, 0]);
    let all = everywhere("index_fill", || Ok(vec![x.index_fill(1, &at, 9)?]));
    assert_eq!(ints(&all[0]), [9, 1, 9, 9, 4, 9]);
    let error = x.index_fill(1, &index(&[-4]), 9).unwrap_err().to_string();
    assert!(error.contains("index_fill"), "{error}");
}

#[test]
fn masks_put_where_they_hold() {
    let x = Tensor::from_vec((0..6).map(f64::from).collect::<Vec<f64>>(), [2, 3]).unwrap();
    let mask = Tensor::from_vec(vec![true, false, true, false, true, false], [2, 3]).unwrap();
    let column = Tensor::from_slice(&[false, true, true]).unwrap();
    let values = Tensor::from_slice(&[10.0f64, 20.0, 30.0]).unwrap();
    let all = everywhere("index_put", || {
        Ok(vec![
            x.index_put(&[Some(&mask)], &values, false)?,
            x.index_put(&[Some(&mask)], &values, true)?,
            x.index_put(&[None, Some(&column)], 7.0, false)?,
            x.index(&[None, Some(&column)])?,
        ])
    });
    assert_eq!(floats(&all[0]), [10.0, 1.0, 20.0, 3.0, 30.0, 5.0]);
    assert_eq!(floats(&all[1]), [10.0, 1.0, 22.0, 3.0, 34.0, 5.0]);
    assert_eq!(floats(&all[2]), [0.0, 7.0, 7.0, 3.0, 7.0, 7.0]);
    assert_eq!(floats(&all[3]), [1.0, 2.0, 4.0, 5.0]);
    let wrong = Tensor::from_slice(&[true, false]).unwrap();
    assert!(x.index_put(&[None, Some(&wrong)], 7.0, false).is_err());
}

#[test]
fn cat_takes_empty_lines() {
    let empty = |dtype| Tensor::full_of([0], 0, dtype, &Device::Cpu).unwrap();
    let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2]).unwrap();
    let (old, wide) = (empty(DType::F32), empty(DType::F64));
    let all = everywhere("cat", || {
        Ok(vec![
            Tensor::cat([&old, &x], 1)?,
            Tensor::cat([&x, &old, &x], 0)?,
            Tensor::cat([&wide, &x], -1)?,
            Tensor::cat([&old, &old], 0)?,
        ])
    });
    let shapes: Vec<Vec<usize>> = all.iter().map(|t| t.shape().to_vec()).collect();
    assert_eq!(shapes, [vec![2, 2], vec![4, 2], vec![2, 2], vec![0]]);
    assert_eq!(all[2].dtype(), DType::F64);
    assert_eq!(floats(&all[1]), [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn truth_values_have_extremes() {
    let x = Tensor::from_vec(vec![false, true, true, true, false, false], [2, 3]).unwrap();
    let all = everywhere("bool", || {
        let ((most, high), (least, low)) = (x.max_dim(1, false)?, x.min_dim(0, true)?);
        Ok(vec![most, high, least, low, x.max()?, x.min()?, x.clamp_min(&x)?])
    });
    assert_eq!((ints(&all[0]), ints(&all[1])), (vec![1, 1], vec![1, 0]));
    assert_eq!((ints(&all[2]), ints(&all[3])), (vec![0, 0, 0], vec![0, 1, 1]));
    assert!(all.iter().enumerate().all(|(i, t)| (t.dtype() == DType::Bool) != [1, 3].contains(&i)));
}

#[test]
fn a_weight_of_one_dim_is_one_row() {
    let x = Tensor::from_vec(vec![1.0f64, 2.0, 3.0, 4.0], [2, 2]).unwrap();
    let (row, bias) = (Tensor::from_slice(&[10.0f64, 1.0]).unwrap(), number(0.5));
    let all = everywhere("linear", || Ok(vec![x.linear(&row, None)?, x.linear(&row, Some(&bias))?]));
    assert_eq!((floats(&all[0]), floats(&all[1])), (vec![12.0, 34.0], vec![12.5, 34.5]));
}

/// Losses over pictures are those over their pixels.
#[test]
fn class_losses_have_dims_beyond() {
    let scores = Tensor::rand([2, 3, 4, 5], &Device::Cpu).unwrap();
    let target = Tensor::randint(0, 3, [2, 4, 5], &Device::Cpu).unwrap();
    let rows = scores.permute([0, 2, 3, 1]).unwrap().reshape([40, 3]).unwrap();
    let line = target.reshape([40]).unwrap();
    for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
        let options = CrossEntropy { reduction, ..CrossEntropy::default() };
        let losses = || {
            Ok::<_, kiln::Error>([
                (scores.nll_loss(&target, reduction)?, rows.nll_loss(&line, reduction)?),
                (
                    scores.cross_entropy_with(&target, reduction, -100)?,
                    scores.cross_entropy_of(&target, options)?,
                ),
            ])
        };
        for pairs in [losses().unwrap(), kiln::Compile::new().region().run(losses).unwrap()] {
            for (got, want) in &pairs {
                let close = floats(got).iter().zip(floats(want)).all(|(g, w)| (g - w).abs() < 1e-5);
                assert!(close, "{reduction:?}: {got} instead of {want}");
            }
        }
    }
    assert_eq!(scores.cross_entropy(&target).unwrap().rank(), 0);
}

#[test]
fn no_classes_hold_no_class() {
    let classes = index(&[0, 1]);
    assert!(classes.one_hot(0).is_err());
    let region = kiln::Compile::new().region();
    assert!(region.run(|| classes.one_hot(0)?.to_vec::<i64>()).is_err());
    let none = Tensor::full_of([0], 0, DType::I64, &Device::Cpu).unwrap();
    let all = everywhere("one_hot", || Ok(vec![none.one_hot(0)?, none.one_hot(3)?]));
    assert_eq!((all[0].shape().to_vec(), all[1].shape().to_vec()), (vec![0, 0], vec![0, 3]));
}

#[test]
fn masked_scatter_broadcasts_both() {
    let x = Tensor::from_slice(&[1i64, 2]).unwrap();
    let mask = Tensor::from_vec(vec![true, false, false, true], [2, 2]).unwrap();
    let src = index(&[7, 8]);
    let all = everywhere("masked_scatter", || Ok(vec![x.masked_scatter(&mask, &src)?]));
    assert_eq!(ints(&all[0]), [7, 2, 1, 8]);
}

#[test]
fn replication_repeats_what_a_cut_left_last() {
    let x = index(&[1, 2, 3, 4]).reshape([1, 4]).unwrap();
    let all = everywhere("pad", || {
        Ok(vec![x.replication_pad(&[-4, 5])?, x.replication_pad(&[2, -4])?, x.replication_pad(&[-1, 2])?])
    });
    assert_eq!((ints(&all[0]), ints(&all[1])), (vec![4; 5], vec![1; 2]));
    assert_eq!(ints(&all[2]), [2, 3, 4, 4, 4]);
    assert!(x.replication_pad(&[-5, 1]).is_err());
}
