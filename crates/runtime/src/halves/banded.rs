//! Products of which some rows are computed at a time, on one thread, with a right operand that is packed once for all
//! of them.

use super::{Format, Matrix, Packed, Part, Plan, Product, Results, Set, Shape};

/// How a product's bands of rows are computed.
pub(crate) struct Banded {
    plan: Plan,
    panels: usize,
    /// Words of a panel.
    size: usize,
}

impl Banded {
    /// For products of this shape, of which there are at most `shape.m` rows at a time.
    pub(crate) fn new(formats: [Format; 2], shape: Shape) -> Banded {
        Banded::with(Set::of_machine(), formats, shape)
    }

    pub(super) fn with(set: Set, formats: [Format; 2], shape: Shape) -> Banded {
        // Nothing is cut of what is empty.
        let some = Shape { m: shape.m.max(1), n: shape.n.max(1), ..shape };
        let plan = Plan::new(formats, set, 1, some);
        let (kernel, panels) = (plan.kernel, shape.n.div_ceil(plan.kernel.width));
        let height = shape.m.max(1).next_multiple_of(kernel.rows());
        let plan = Plan {
            formats,
            shape,
            is_turned: false,
            height,
            group: panels.max(1),
            row_blocks: 1,
            groups: 1,
            ..plan
        };
        Banded { plan, panels, size: kernel.depth(shape.k) * kernel.width }
    }

    /// Bytes of the packed panels, and of their least exponents.
    fn room(&self) -> [usize; 2] {
        [self.panels * self.size * size_of::<u32>(), self.panels * size_of::<u16>()]
            .map(|bytes| bytes.next_multiple_of(64))
    }

    /// Bytes of memory that it needs, which begins with a cache line.
    pub(crate) fn bytes(&self) -> usize {
        self.room().into_iter().chain(self.plan.room()).sum()
    }

    /// Packs the right operand.
    ///
    /// # Safety
    /// It is readable; there is so much memory as [`bytes`](Self::bytes) says.
    pub(crate) unsafe fn pack(&self, rhs: Matrix<u16>, memory: *mut u8) {
        let [bytes, _] = self.room();
        for number in 0..self.panels {
            // No rows: only the right operand is read.
            let product = Product {
                results: Results::Sums(Matrix::new(std::ptr::null_mut(), 0, 0)),
                start: None,
                lhs: rhs,
                rhs,
            };
            let (panel, least) = (memory.cast::<u32>(), memory.wrapping_add(bytes).cast::<u16>());
            // SAFETY: the caller's promise is passed on; each panel has its own room.
            unsafe {
                least.add(number).write(0);
                let to = (panel.add(number * self.size), &mut *least.add(number));
                self.plan.run(product, Part::Panel { number, to });
            }
        }
    }

    /// Computes so many rows, at most those that were said before.
    ///
    /// # Safety
    /// That of [`products`](super::products()); the memory is as [`pack`](Self::pack) left it.
    pub(crate) unsafe fn rows(&self, product: Product, m: usize, memory: *mut u8) {
        let Banded { plan, panels, size } = *self;
        let [bytes, more] = self.room();
        if m == 0 || panels == 0 {
            return;
        }
        let plan = Plan { shape: Shape { m, ..plan.shape }, ..plan };
        let scratch = memory.wrapping_add(bytes + more);
        // SAFETY: the caller's promise is passed on; `pack` wrote the exponents.
        unsafe {
            let least = std::slice::from_raw_parts(memory.wrapping_add(bytes).cast::<u16>(), panels);
            let packed = Some(Packed { first: 0, words: memory.cast(), size, least });
            plan.run(product, Part::Block { at: [0, 0], packed, scratch });
        }
    }
}
