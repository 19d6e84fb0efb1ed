//! The walk over the places that indices pick.

use std::sync::Mutex;

use crate::kernels::{Picks, outside};

/// The place that each index picks, one by one.
fn naive(index: &[i64], shape: &[usize], strides: &[isize], dim: usize) -> Vec<isize> {
    let place = |(i, &pick): (usize, &i64)| {
        let (mut rest, mut place) = (i, 0);
        for d in (0..shape.len()).rev() {
            let at = if d == dim { pick as isize } else { (rest % shape[d]) as isize };
            place += at * strides[d];
            rest /= shape[d];
        }
        place
    };
    index.iter().enumerate().map(place).collect()
}

#[test]
fn every_index_picks_its_place_once() {
    let cases: &[(&[usize], &[usize])] = &[
        (&[], &[]),
        (&[5], &[9]),
        (&[5], &[0]),
        (&[3, 0], &[2, 0]),
        (&[4, 6], &[4, 6]),
        (&[4, 6], &[3, 1]),
        (&[7, 5, 9], &[7, 3, 9]),
        (&[7, 5, 9], &[6, 1, 8]),
        (&[2, 3, 4, 5], &[2, 3, 4, 5]),
        (&[2, 3, 4, 5], &[1, 3, 2, 5]),
        (&[120, 150], &[120, 150]),
        (&[2, 12_000], &[2, 12_000]),
    ];
    for &(sizes, shape) in cases {
        for dim in 0..shape.len().max(1) {
            let size = sizes.get(dim).copied().unwrap_or(1).max(1);
            let n: usize = shape.iter().product();
            let index: Vec<i64> = (0..n).map(|i| (i * 7919 / 3 % size) as i64).collect();
            let mut dense = vec![1isize; sizes.len()];
            for d in (1..sizes.len()).rev() {
                dense[d - 1] = dense[d] * sizes[d].max(1) as isize;
            }
            let turned: Vec<isize> = dense.iter().rev().map(|stride| -stride).collect();
            // Places of a broadcast tensor meet by themselves, and nothing is put there.
            for (strides, meet) in
                [(&dense, false), (&dense, true), (&turned, false), (&vec![0; sizes.len()], false)]
            {
                for threads in [1, 3] {
                    kiln_runtime::threads::set_count(threads);
                    let seen = Mutex::new(vec![Vec::new(); n]);
                    let turn = std::sync::atomic::AtomicUsize::new(0);
                    Picks { index: &index, shape, strides, dim }.each(meet, |place, i| {
                        let turn = turn.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        seen.lock().expect("no panic")[i].push((place, turn, std::thread::current().id()));
                    });
                    let seen = seen.into_inner().expect("no panic");
                    let what = format!("{sizes:?} {shape:?} {dim} {strides:?} {meet}");
                    assert!(seen.iter().all(|calls| calls.len() == 1), "{what}");
                    let places: Vec<isize> = seen.iter().map(|calls| calls[0].0).collect();
                    assert_eq!(places, naive(&index, shape, strides, dim), "{what}");
                    if meet {
                        // Those of one place are one thread's, in order.
                        let mut last = std::collections::HashMap::new();
                        for calls in &seen {
                            let (place, turn, thread) = calls[0];
                            if let Some((before, other)) = last.insert(place, (turn, thread)) {
                                assert!(before < turn && other == thread, "{what}");
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn the_first_bad_index_is_found() {
    let mut index = vec![3i64; 10_000];
    assert_eq!(outside(&index, 4), None);
    assert_eq!(outside(&[], 0), None);
    assert_eq!(outside(&index, 3), Some(3));
    index[9_000] = -1;
    index[9_500] = 4;
    assert_eq!(outside(&index, 4), Some(-1));
}
