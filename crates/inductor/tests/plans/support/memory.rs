//! Memory between fences, and the check that a plan's buffers don't get into each other's way.

use kiln_ir::{DType, Scalar};
use kiln_plan::{Bands, BufferId, Place, Plan, Step};
use kiln_testkit::plan::decode;

use super::compile::sanitizer;

/// Bytes put around every allocation, to see writes outside of it.
const FENCE: usize = 128;
const CANARY: u8 = 0xA5;

/// Memory aligned to 64 bytes with a fence on either side; with the address sanitizer it is a bare allocation,
/// whose ends the sanitizer guards.
pub struct Memory {
    bytes: Box<[u8]>,
    start: usize,
    len: usize,
    bare: bool,
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bare {
            let bytes = Box::leak(std::mem::take(&mut self.bytes));
            // SAFETY: allocated in `new` with this layout, and not freed by the box.
            unsafe { std::alloc::dealloc(bytes.as_mut_ptr(), Memory::layout(self.len)) };
        }
    }
}

impl Memory {
    pub fn new(len: usize) -> Memory {
        if len > 0 && sanitizer().iter().any(|flag| flag.contains("address")) {
            // SAFETY: the layout is not empty; the memory is filled before it is read.
            let bytes = unsafe {
                let pointer = std::alloc::alloc(Memory::layout(len));
                pointer.write_bytes(0xEE, len);
                Box::from_raw(std::ptr::slice_from_raw_parts_mut(pointer, len))
            };
            return Memory { bytes, start: 0, len, bare: true };
        }
        let mut bytes = vec![CANARY; len + 2 * FENCE + 64].into_boxed_slice();
        let start = (bytes.as_ptr() as usize + FENCE).next_multiple_of(64) - bytes.as_ptr() as usize;
        bytes[start..start + len].fill(0xEE);
        Memory { bytes, start, len, bare: false }
    }

    fn layout(len: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(len, 64).unwrap()
    }

    pub fn pointer(&mut self) -> *mut u8 {
        self.bytes[self.start..].as_mut_ptr()
    }

    pub fn address(&self) -> *const u8 {
        self.bytes[self.start..].as_ptr()
    }

    pub fn check(&self) {
        let outside = self.bytes[..self.start].iter().chain(&self.bytes[self.start + self.len..]);
        assert!(outside.copied().all(|b| b == CANARY), "a kernel wrote outside its buffer");
    }

    pub fn write(&mut self, at: usize, dtype: DType, value: Scalar) {
        let at = self.start + at * dtype.size();
        let element = value.to_element(dtype).to_le_bytes();
        self.bytes[at..at + dtype.size()].copy_from_slice(&element[..dtype.size()]);
    }

    pub fn read(&self, at: usize, dtype: DType) -> Scalar {
        let at = self.start + at * dtype.size();
        decode(&self.bytes[at..at + dtype.size()], dtype)
    }
}

/// The buffers that a step touches.
fn touched(step: &Step) -> Vec<usize> {
    let mut found = Vec::new();
    step.touched(&mut |id: BufferId| found.push(id.index()));
    found
}

/// The output (or the arena), first byte and end in it, first and last step.
type Span = (Option<usize>, usize, usize, usize, usize);

/// No two buffers that are in use at once share memory (but for a kernel's result in the place of an operand that
/// it was the last to read), every one lies inside what it was given, and the arena is no larger than all
/// temporaries side by side.
pub fn check_memory(plan: &Plan) {
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; plan.buffers.len()];
    for (s, step) in plan.steps.iter().enumerate() {
        touched(step).into_iter().for_each(|b| lives[b].get_or_insert((s, s)).1 = s);
        // An epilogue runs together with its product.
        if step.has_epilogue() {
            touched(&plan.steps[s + 1]).into_iter().for_each(|b| lives[b].get_or_insert((s, s)).1 = s + 1);
        }
    }
    for Bands { first, steps, .. } in &plan.bands {
        for b in plan.steps[*first..first + steps].iter().flat_map(touched) {
            let (from, to) = lives[b].unwrap();
            lives[b] = Some((from.min(*first), to.max(first + steps - 1)));
        }
    }
    let mut spans: Vec<Span> = Vec::new();
    let mut side_by_side = 0;
    for (buffer, life) in plan.buffers.iter().zip(&lives) {
        let (Some((first, last)), bytes) = (*life, buffer.ty.bytes) else { continue };
        match buffer.place {
            Place::Input(_) => {}
            // Outputs stay.
            Place::Output(k) => spans.push((Some(k), 0, bytes, first, usize::MAX)),
            Place::BeforeOutput { output, offset } => {
                let whole = plan.buffers[plan.outputs[output].index()].ty.bytes;
                assert!(offset.is_multiple_of(64) && offset + bytes <= whole, "outside of output {output}");
                spans.push((Some(output), offset, offset + bytes, first, last));
            }
            Place::Arena { offset } => {
                assert!(
                    offset.is_multiple_of(64) && offset + bytes <= plan.arena_bytes,
                    "outside of the arena"
                );
                side_by_side += bytes.next_multiple_of(64);
                spans.push((None, offset, offset + bytes, first, last));
            }
            Place::Band { offset, row_bytes } => {
                let inside = |b: &&Bands| b.first <= first && last < b.first + b.steps;
                let bands = plan.bands.iter().find(inside).expect("it is gone after the bands");
                let m = plan.steps[bands.first].product().expect("bands begin with a product").m;
                let before = (bands.count - 1) * bands.rows;
                assert!(before < m);
                let end = offset + (m - before).max(bands.rows.min(m)) * row_bytes;
                assert!(offset.is_multiple_of(64) && end <= bands.bytes, "outside of a band");
            }
        }
    }
    assert!(plan.arena_bytes <= side_by_side, "{} of {side_by_side} bytes", plan.arena_bytes);
    for (i, a) in spans.iter().enumerate() {
        for b in &spans[..i] {
            let shares = a.0 == b.0 && a.1 < b.2 && b.1 < a.2;
            let at_once = a.3 <= b.4 && b.3 <= a.4;
            let heir = |from: &Span, to: &Span| {
                let epilogue = plan.steps[to.3].has_epilogue();
                let read_by = to.3 + usize::from(epilogue);
                from.4 == read_by
                    && (from.1, from.2) == (to.1, to.2)
                    && matches!(plan.steps[read_by], Step::Launch(_))
            };
            assert!(
                !shares || !at_once || heir(a, b) || heir(b, a),
                "{a:?} and {b:?} overlap\n{:#?}",
                plan.steps
            );
        }
    }
}
