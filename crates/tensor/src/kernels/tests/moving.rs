//! Kernels that move elements against naive loops: padding, slices at indices, masks, numbers repeated.

use kiln_ir::DType;

use super::{Array, Item, LAYOUTS, Layout, SHAPES, expect};
use crate::kernels::{Filling, Offsets, Places, Slices, collect, convert, count, pad, spread, transfer};

const DTYPES: [DType; 5] = [DType::U8, DType::BF16, DType::F32, DType::I64, DType::Bool];

#[test]
fn padding_puts_rows_side_by_side() {
    // Sizes, widths before, widths after.
    let cases: &[(&[usize], &[usize], &[usize])] = &[
        (&[], &[], &[]),
        (&[5], &[2], &[1]),
        (&[5], &[4], &[4]),
        (&[70_000], &[3], &[4]),
        (&[4, 37], &[0, 3], &[0, 0]),
        (&[4, 37], &[3, 0], &[1, 0]),
        (&[3, 4], &[1, 2], &[2, 3]),
        (&[2, 3, 17], &[0, 2, 5], &[1, 0, 16]),
        (&[2, 3, 4, 5], &[0, 2, 0, 0], &[0, 1, 0, 0]),
        (&[60, 2, 300], &[0, 1, 1], &[0, 1, 1]),
        (&[3, 0], &[0, 0], &[1, 0]),
    ];
    for &(shape, before, after) in cases {
        for dtype in DTYPES {
            for filling in [Filling::Element(1), Filling::Mirrored, Filling::Repeated] {
                let mut x = Array::new(dtype, shape, Layout::Contiguous, 3);
                let wide: Vec<usize> = (0..shape.len()).map(|d| before[d] + shape[d] + after[d]).collect();
                let mut out = Array::new(dtype, &wide, Layout::Contiguous, 4);
                let mut one = Array::new(dtype, &[], Layout::Contiguous, 4);
                // SAFETY: the least significant byte of the only element.
                unsafe { one.base().cast::<u64>().write(1) };
                let (items, number) = (x.items(), one.items()[0]);
                let naive = |mut i: usize| {
                    let (mut at, mut step) = (Some(0), 1);
                    for d in (0..shape.len()).rev() {
                        let place = (i % wide[d]) as i64 - before[d] as i64;
                        let last = shape[d] as i64 - 1;
                        let from = match filling {
                            Filling::Element(_) => (0..=last).contains(&place).then_some(place),
                            Filling::Mirrored => Some((last - (last - place).abs()).abs().min(place.abs())),
                            Filling::Repeated => Some(place.max(0).min(last)),
                        };
                        at = at.zip(from).map(|(at, from)| at + from as usize * step);
                        (i, step) = (i / wide[d], step * shape[d]);
                    }
                    at.map_or(number, |at| items[at])
                };
                // Mirrored once at either end.
                if filling != Filling::Element(1) && items.is_empty() && !wide.contains(&0) {
                    continue;
                }
                let expected: Vec<Item> = (0..wide.iter().product()).map(naive).collect();
                // SAFETY: operands made for this call, with these widths between them.
                unsafe { pad(&out.operand(), &x.operand(), before, filling) };
                expect(&format!("{filling:?} {dtype:?} {shape:?} {before:?}"), &out, &expected);
            }
        }
    }
}

#[test]
fn one_number_fills_an_array() {
    for dtype in DTYPES {
        for (&shape, layout) in SHAPES.iter().zip(LAYOUTS.iter().cycle()) {
            let mut number = Array::new(dtype, shape, Layout::Scalar, 5);
            let layout = if [Layout::Scalar, Layout::Row].contains(layout) { Layout::Gaps } else { *layout };
            let mut out = Array::new(dtype, shape, layout, 6);
            let expected = number.items();
            // SAFETY: operands made for this call.
            unsafe { convert(&out.operand(), &number.operand()) };
            expect(&format!("{dtype:?} {shape:?} {layout:?}"), &out, &expected);
        }
    }
}

#[test]
fn slices_are_written_in_the_order_of_their_picks() {
    // Blocks, their slices, elements of a slice, picks.
    let cases = [(1, 5, 1, 9), (7, 3, 1, 40), (3, 8, 5, 4), (1, 100, 700, 50), (40, 6, 33, 20), (2, 3, 4, 0)];
    for (outer, size, inner, n) in cases {
        let picks: Vec<i64> = (0..n).map(|i| (i * 7919 / 3 % size) as i64).collect();
        let from: Vec<f32> = (0..outer * n * inner).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut naive = vec![[1f32; 2]; outer * size * inner];
        for (i, &x) in from.iter().enumerate() {
            let (block, pick, element) = (i / inner / n, picks[i / inner % n] as usize, i % inner);
            let [sum, last] = &mut naive[(block * size + pick) * inner + element];
            (*sum, *last) = (*sum + x, x);
        }
        for threads in [1, 3] {
            kiln_runtime::threads::set_count(threads);
            let slices = Slices { picks: &picks, outer, size, inner };
            let mut got = [vec![1f32; naive.len()], vec![1f32; naive.len()]];
            // SAFETY: arrays of these sizes, and picks below `size`.
            unsafe {
                slices.write(got[0].as_mut_ptr(), from.as_ptr(), |a, b| a + b);
                slices.write(got[1].as_mut_ptr(), from.as_ptr(), |_, b| b);
            }
            for (i, got) in got.iter().enumerate() {
                assert!(
                    got.iter().zip(&naive).all(|(got, naive)| *got == naive[i]),
                    "{outer} {size} {inner} {n}"
                );
            }
        }
    }
}

#[test]
fn masks_spread_and_collect() {
    for n in [0usize, 1, 7, 300, 5000] {
        for every in [1, 2, 3, 7919] {
            let mask: Vec<u8> = (0..n).map(|i| u8::from(i * i % every == 1 % every)).collect();
            let places: Vec<usize> = (0..n).filter(|&i| mask[i] != 0).collect();
            assert_eq!(count(&mask), places.len());
            let x: Vec<u16> = (0..n).map(|i| i as u16 + 1).collect();
            for room in [places.len(), places.len() / 2, places.len() + 3] {
                let mut to = vec![0u16; room];
                // SAFETY: as many elements as the mask, and this room.
                let found = unsafe { collect(&mask, to.as_mut_ptr(), x.as_ptr(), room) };
                assert_eq!(found, places.len().min(room));
                assert!(to[..found].iter().zip(&places).all(|(&to, &at)| to == x[at]), "{n} {every} {room}");
            }
            if !places.is_empty() {
                let mut to = vec![0u16; n];
                // SAFETY: as many elements as the mask, and one for each place.
                unsafe { spread(&mask, to.as_mut_ptr(), x.as_ptr(), places.len()) };
                let mut expected = vec![0u16; n];
                places.iter().zip(&x).for_each(|(&at, &x)| expected[at] = x);
                assert_eq!(to, expected, "{n} {every}");
            }
        }
    }
}

type Dims = &'static [(usize, isize)];

#[test]
fn places_are_read_and_changed_one_pick_after_the_other() {
    // Dims (size, stride) before and behind the picks, and how many picks.
    let cases: &[(Dims, Dims, usize)] = &[
        (&[], &[], 9),
        (&[], &[(70, 1)], 40),
        (&[(3, 500)], &[(4, 1)], 7),
        (&[(2, 900), (2, 450)], &[(1, 7), (3, 20), (5, 1)], 11),
        (&[], &[(3, 1), (5, 3)], 6),
        (&[(3, 500)], &[(40, 0)], 5),
        (&[(0, 1)], &[(4, 1)], 3),
        (&[(2, 400)], &[(0, 1)], 3),
        (&[], &[(4, 1)], 0),
    ];
    for &(before, behind, n) in cases {
        let picks: Vec<isize> = (0..n).map(|i| (i * i % 5 * 75) as isize).collect();
        let at = Places {
            before: Offsets::of(before),
            picks: Offsets::Table(picks.clone()),
            behind: Offsets::of(behind),
        };
        let offsets = |dims: &[(usize, isize)]| {
            let step = |all: Vec<isize>, &(size, stride): &(usize, isize)| -> Vec<isize> {
                all.iter().flat_map(|at| (0..size as isize).map(move |i| at + i * stride)).collect()
            };
            dims.iter().fold(vec![0], step)
        };
        let all: Vec<usize> = offsets(before)
            .iter()
            .flat_map(|b| picks.iter().map(move |p| b + p))
            .flat_map(|p| offsets(behind).into_iter().map(move |o| (p + o) as usize))
            .collect();
        let x: Vec<f32> = (0..2000).map(|i| (i as f32 * 0.71).cos()).collect();
        let values: Vec<f32> = (0..all.len()).map(|i| (i as f32 * 0.37).sin()).collect();
        for threads in [1, 3] {
            kiln_runtime::threads::set_count(threads);
            let mut picked = vec![0f32; all.len()];
            let lined = at.lined_up();
            // SAFETY: places below 2000, and as many elements as places.
            unsafe { transfer((picked.as_mut_ptr(), &lined), (x.as_ptr(), &at), true, |_, x: f32| x) };
            assert!(
                picked.iter().zip(&all).all(|(got, &place)| *got == x[place]),
                "{before:?} {behind:?} {n}"
            );
            // Where several meet in one row, threads would: only the picks may.
            if behind.iter().any(|(_, stride)| *stride == 0) {
                continue;
            }
            let (mut sums, mut naive) = (x.clone(), x.clone());
            all.iter().zip(&values).for_each(|(&place, value)| naive[place] += value);
            // SAFETY: as above.
            unsafe { transfer((sums.as_mut_ptr(), &at), (values.as_ptr(), &lined), false, |a, b| a + b) };
            assert_eq!(sums, naive, "{before:?} {behind:?} {n}");
        }
    }
}

#[test]
fn lines_become_rows_and_rows_lines() {
    for dtype in DTYPES {
        for (rows, n) in [(1, 2), (9, 2), (50, 3), (300, 4), (70, 5), (3, 40)] {
            // Lines beside each other: the element of row r and column c is in line c.
            let mut lines = Array::new(dtype, &[n, rows], Layout::Contiguous, 7);
            let expected: Vec<Item> = {
                let items = lines.items();
                (0..rows * n).map(|i| items[i % n * rows + i / n]).collect()
            };
            let mut out = Array::new(dtype, &[rows, n], Layout::Contiguous, 8);
            let turned = crate::kernels::Operand {
                ptr: lines.base(),
                dtype,
                shape: &[rows, n],
                strides: &[1, rows as isize],
            };
            // SAFETY: operands made for this call.
            unsafe { convert(&out.operand(), &turned) };
            expect(&format!("{dtype:?} {rows} × {n}"), &out, &expected);
            // And back.
            let mut back = Array::new(dtype, &[n, rows], Layout::Contiguous, 9);
            let turned = crate::kernels::Operand {
                ptr: out.base(),
                dtype,
                shape: &[n, rows],
                strides: &[1, n as isize],
            };
            let expected = lines.items();
            // SAFETY: operands made for this call.
            unsafe { convert(&back.operand(), &turned) };
            expect(&format!("{dtype:?} {n} × {rows}"), &back, &expected);
        }
    }
}

#[test]
fn elements_are_repeated_along_rows() {
    for dtype in DTYPES {
        for (rows, n) in [(1, 9), (9, 1), (40, 3), (20, 500)] {
            let mut x = Array::new(dtype, &[rows], Layout::Contiguous, 7);
            let expected: Vec<Item> = x.items().into_iter().flat_map(|item| vec![item; n]).collect();
            let mut out = Array::new(dtype, &[rows, n], Layout::Contiguous, 8);
            let wide = crate::kernels::Operand { ptr: x.base(), dtype, shape: &[rows, n], strides: &[1, 0] };
            // SAFETY: operands made for this call.
            unsafe { convert(&out.operand(), &wide) };
            expect(&format!("{dtype:?} {rows} × {n}"), &out, &expected);
        }
    }
}
