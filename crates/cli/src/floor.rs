//! Floors: hand-written loops with a case's memory streams, against which its compiled code is measured.
//!
//! They run on Kiln's threads, over buffers of Kiln's pool, with the machine's widest vectors, and do what
//! the case cannot avoid: read every operand once and write every result once. For the small network that
//! is its matrix products and its optimizer step.

use std::sync::Arc;

use kiln_runtime::gemm::{Matrix, Shape, gemm_f32};
use kiln_runtime::{AllocError, Buffer, Isa, cpu, parallel_for};

use crate::cases::{Case, MATRIX, OptimizerKind};

/// Elements a thread works on at a time.
const PIECE: usize = 1 << 14;

/// A loop, ready to be timed.
pub type Floor = Box<dyn FnMut()>;

/// The floor of a case; a case of pure overhead has none.
pub fn of(case: Case) -> Result<Option<Floor>, AllocError> {
    match case {
        Case::Optimizer { kind, layers, size } => {
            let lengths = vec![size * size; layers];
            Ok(Some(match kind {
                OptimizerKind::Adam | OptimizerKind::Adamw => adam(lengths)?,
                OptimizerKind::Sgd => sgd(lengths)?,
            }))
        }
        Case::MlpTrain => Ok(Some(mlp(256, 10, 64)?)),
        Case::Softmax | Case::Chain10 | Case::LnGelu => Ok(Some(copy(MATRIX.iter().product())?)),
        Case::Sum0 => Ok(Some(read(MATRIX.iter().product())?)),
        Case::GptTrain | Case::GptTrainBf16 | Case::NetworkTrain(_) => Ok(None),
        Case::LstmTrain { .. }
        | Case::TransformerTrain { .. }
        | Case::Resnet18Latency
        | Case::GptLatency
        | Case::GptGrowing
        | Case::Matmul { .. }
        | Case::ConvResnet18
        | Case::OpOverhead
        | Case::Overhead => Ok(None),
    }
}

/// One operand of a step over a list of tensors: a buffer for each.
struct Stream(Vec<Buffer>);

impl Stream {
    fn new(lengths: &[usize], value: f32) -> Result<Stream, AllocError> {
        let buffers = lengths.iter().map(|&length| {
            let buffer = Buffer::alloc(length * size_of::<f32>())?;
            // SAFETY: the buffer is ours alone, aligned, and has room for `length` floats.
            unsafe {
                let start = buffer.as_ptr().cast::<f32>();
                (0..length).for_each(|i| start.add(i).write(value + i as f32 * 1e-9));
            }
            Ok(buffer)
        });
        Ok(Stream(buffers.collect::<Result<_, AllocError>>()?))
    }

    /// A part of one tensor.
    ///
    /// # Safety
    /// Nobody else uses that part while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "the caller keeps the parts apart")]
    unsafe fn part(&self, piece: &Piece) -> &mut [f32] {
        let start = self.0[piece.tensor].as_ptr().cast::<f32>();
        // SAFETY: pieces lie within their tensors, whose elements are all set; apart from others' by promise.
        unsafe { std::slice::from_raw_parts_mut(start.add(piece.begin), piece.length) }
    }
}

/// A stretch of one tensor.
struct Piece {
    tensor: usize,
    begin: usize,
    length: usize,
}

fn pieces(lengths: &[usize]) -> Vec<Piece> {
    let of_tensor = |(tensor, &all): (usize, &usize)| {
        (0..all)
            .step_by(PIECE)
            .map(move |begin| Piece { tensor, begin, length: PIECE.min(all - begin) })
            .collect::<Vec<_>>()
    };
    lengths.iter().enumerate().flat_map(of_tensor).collect()
}

/// A loop body, compiled for each instruction set and chosen at run time.
macro_rules! vectorised {
    (fn $name:ident($($arg:ident: $ty:ty),*) $body:block) => {
        #[inline]
        fn $name(isa: Isa, $($arg: $ty),*) {
            #[inline(always)]
            fn plain($($arg: $ty),*) $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
                fn avx512($($arg: $ty),*) {
                    plain($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) {
                    plain($($arg),*)
                }
                match isa {
                    // SAFETY: `Isa` names only what the machine has.
                    Isa::Avx512 => unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Isa::Avx2 => unsafe { avx2($($arg),*) },
                    Isa::Plain => plain($($arg),*),
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            {
                let _ = isa;
                plain($($arg),*)
            }
        }
    };
}

vectorised! {
    fn adam_loop(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
        let (beta1, beta2, step, scale, eps) = (0.9f32, 0.999f32, 0.01f32, 1.0f32, 1e-8f32);
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            *m += (*g - *m) * (1.0 - beta1);
            *v = *v * beta2 + *g * *g * (1.0 - beta2);
            *p -= step * (*m / (v.sqrt() * scale + eps));
        }
    }
}

vectorised! {
    fn sgd_loop(p: &mut [f32], g: &[f32], buf: &mut [f32]) {
        for ((p, g), buf) in p.iter_mut().zip(g).zip(buf) {
            *buf = *buf * 0.9 + *g;
            *p -= 0.01 * *buf;
        }
    }
}

vectorised! {
    fn copy_loop(y: &mut [f32], x: &[f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = *x * 0.5 + 1.0;
        }
    }
}

vectorised! {
    fn sum_loop(x: &[f32]) {
        let mut sums = [0.0f32; 64];
        for chunk in x.chunks_exact(64) {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *sum += *x * *x;
            }
        }
        std::hint::black_box(sums);
    }
}

/// Reads x.
fn read(length: usize) -> Result<Floor, AllocError> {
    let x = Stream::new(&[length], 0.1)?;
    let (pieces, isa) = (pieces(&[length]), cpu::isa());
    Ok(Box::new(move || {
        parallel_for(pieces.len(), 1, |begin, end| {
            for piece in &pieces[begin..end] {
                // SAFETY: every piece is worked on by one thread.
                unsafe { sum_loop(isa, x.part(piece)) };
            }
        });
    }))
}

/// Reads p, g, m, v; writes p, m, v.
fn adam(lengths: Vec<usize>) -> Result<Floor, AllocError> {
    let p = Arc::new(Stream::new(&lengths, 0.1)?);
    adam_of(p, lengths)
}

fn adam_of(p: Arc<Stream>, lengths: Vec<usize>) -> Result<Floor, AllocError> {
    let new = |value: f32| Stream::new(&lengths, value);
    let (g, m, v) = (new(1e-3)?, new(1e-3)?, new(1e-6)?);
    let (pieces, isa) = (pieces(&lengths), cpu::isa());
    Ok(Box::new(move || {
        parallel_for(pieces.len(), 1, |begin, end| {
            for piece in &pieces[begin..end] {
                // SAFETY: every piece is worked on by one thread, and the streams are different buffers.
                unsafe { adam_loop(isa, p.part(piece), g.part(piece), m.part(piece), v.part(piece)) };
            }
        });
    }))
}

/// Reads p, g, buf; writes p, buf.
fn sgd(lengths: Vec<usize>) -> Result<Floor, AllocError> {
    let p = Arc::new(Stream::new(&lengths, 0.1)?);
    sgd_of(p, lengths)
}

fn sgd_of(p: Arc<Stream>, lengths: Vec<usize>) -> Result<Floor, AllocError> {
    let new = |value: f32| Stream::new(&lengths, value);
    let (g, buf) = (new(1e-3)?, new(1e-3)?);
    let (pieces, isa) = (pieces(&lengths), cpu::isa());
    Ok(Box::new(move || {
        parallel_for(pieces.len(), 1, |begin, end| {
            for piece in &pieces[begin..end] {
                // SAFETY: every piece is worked on by one thread, and the streams are different buffers.
                unsafe { sgd_loop(isa, p.part(piece), g.part(piece), buf.part(piece)) };
            }
        });
    }))
}

/// Reads x, writes y.
fn copy(length: usize) -> Result<Floor, AllocError> {
    copy_to(Arc::new(Stream::new(&[length], 0.0)?), length)
}

fn copy_to(y: Arc<Stream>, length: usize) -> Result<Floor, AllocError> {
    let x = Stream::new(&[length], 0.1)?;
    let (pieces, isa) = (pieces(&[length]), cpu::isa());
    Ok(Box::new(move || {
        parallel_for(pieces.len(), 1, |begin, end| {
            for piece in &pieces[begin..end] {
                // SAFETY: every piece is worked on by one thread, and the streams are different buffers.
                unsafe { copy_loop(isa, y.part(piece), x.part(piece)) };
            }
        });
    }))
}

/// The matrix products of forward and backward, and the Adam step, of layers width → width → width → classes.
fn mlp(width: usize, classes: usize, batch: usize) -> Result<Floor, AllocError> {
    let layers = [(width, width), (width, width), (width, classes)];
    let lengths: Vec<usize> = layers.iter().flat_map(|&(from, to)| [from * to, to]).collect();
    let weights = Stream::new(&layers.map(|(from, to)| from * to), 0.01)?;
    let gradients = Stream::new(&layers.map(|(from, to)| from * to), 0.0)?;
    // Activations before and after each layer, and their gradients.
    let activations = Stream::new(&[batch * width, batch * width, batch * width, batch * classes], 0.1)?;
    let backward = Stream::new(&[batch * width, batch * width, batch * width, batch * classes], 0.1)?;
    let mut update = adam(lengths)?;
    let row_major = |stream: &Stream, index: usize, columns: usize| {
        Matrix::new(stream.0[index].as_ptr().cast::<f32>(), columns as isize, 1)
    };
    let turned = |m: Matrix<f32>| Matrix::new(m.pointer, m.column, m.row);
    Ok(Box::new(move || {
        for (i, &(from, to)) in layers.iter().enumerate() {
            let (x, y) = (row_major(&activations, i, from), row_major(&activations, i + 1, to));
            let weight = row_major(&weights, i, from);
            // SAFETY: all are matrices of these sizes in buffers of their own.
            unsafe { gemm_f32(Shape { m: batch, n: to, k: from }, y, false, x, turned(weight)) };
        }
        for (i, &(from, to)) in layers.iter().enumerate().rev() {
            let (x, dy) = (row_major(&activations, i, from), row_major(&backward, i + 1, to));
            let (weight, gradient) = (row_major(&weights, i, from), row_major(&gradients, i, from));
            // SAFETY: all are matrices of these sizes in buffers of their own.
            unsafe { gemm_f32(Shape { m: to, n: from, k: batch }, gradient, false, turned(dy), x) };
            if i > 0 {
                let dx = row_major(&backward, i, from);
                // SAFETY: as above.
                unsafe { gemm_f32(Shape { m: batch, n: from, k: to }, dx, false, dy, weight) };
            }
        }
        update();
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_every_element_once() {
        let lengths = [PIECE * 2 + 5, 0, 1, PIECE];
        let mut seen: Vec<Vec<u8>> = lengths.iter().map(|&length| vec![0; length]).collect();
        for piece in pieces(&lengths) {
            seen[piece.tensor][piece.begin..piece.begin + piece.length]
                .iter_mut()
                .for_each(|hits| *hits += 1);
        }
        assert!(seen.iter().flatten().all(|hits| *hits == 1));
    }

    #[test]
    fn every_instruction_set_computes_the_same() {
        let run = |isa: Isa| {
            let g: Vec<f32> = (0..37).map(|i| i as f32 * 0.01 - 0.2).collect();
            let (mut p, mut m, mut v) = (vec![1.0f32; 37], vec![0.1f32; 37], vec![0.01f32; 37]);
            adam_loop(isa, &mut p, &g, &mut m, &mut v);
            (p, m, v)
        };
        let best = Isa::detect();
        for isa in [Isa::Avx512, Isa::Avx2].into_iter().filter(|isa| *isa >= best) {
            assert_eq!(run(isa), run(Isa::Plain));
        }
    }

    /// All elements of a stream's tensors.
    fn values(stream: &Stream, lengths: &[usize]) -> Vec<f32> {
        // SAFETY: the floor that writes them is not running.
        pieces(lengths).iter().flat_map(|piece| unsafe { stream.part(piece).to_vec() }).collect()
    }

    /// Every element of every tensor is written, with what one plain loop over all of them makes of it.
    #[test]
    fn floors_write_what_they_are_named_for() {
        let lengths = vec![PIECE + 100, 7];
        let stream = |value| Arc::new(Stream::new(&lengths, value).unwrap());
        let begin = |value| values(&stream(value), &lengths);
        let (g, mut p, mut m, mut v) = (begin(1e-3), begin(0.1), begin(1e-3), begin(1e-6));
        adam_loop(Isa::Plain, &mut p, &g, &mut m, &mut v);
        let written = stream(0.1);
        adam_of(written.clone(), lengths.clone()).unwrap()();
        assert!(p.len() == PIECE + 107 && p != begin(0.1) && values(&written, &lengths) == p);
        let (mut p, mut buf) = (begin(0.1), begin(1e-3));
        sgd_loop(Isa::Plain, &mut p, &g, &mut buf);
        let written = stream(0.1);
        sgd_of(written.clone(), lengths.clone()).unwrap()();
        assert!(p != begin(0.1) && values(&written, &lengths) == p);
        let mut y = begin(0.0);
        copy_loop(Isa::Plain, &mut y, &begin(0.1));
        let written = stream(0.0);
        copy_to(written.clone(), lengths[0]).unwrap()();
        assert_eq!(values(&written, &lengths[..1]), y[..lengths[0]]);
    }

    /// Cases have the floor of what they can't avoid; the others are compared with nothing.
    #[test]
    fn floors_are_of_cases() {
        let layers = |kind| Case::Optimizer { kind, layers: 2, size: 8 };
        for case in [layers(OptimizerKind::Adam), layers(OptimizerKind::Sgd), Case::MlpTrain] {
            of(case).unwrap().expect("a floor")();
        }
        assert!(of(Case::Overhead).unwrap().is_none());
    }
}
