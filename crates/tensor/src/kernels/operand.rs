//! What kernels work on: strided memory with a dtype.

use kiln_ir::DType;

/// A strided array in memory.
///
/// **Contract of every kernel**: each element that sizes and strides reach from `ptr` lies in live memory
/// of `dtype`, aligned for it, and stays so for the call; booleans are bytes 0 or 1; nobody else writes
/// what a kernel reads, nor touches what it writes.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// The element at index zero. Kernels write through it only where they say so.
    pub ptr: *mut u8,
    /// Type of the elements.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: &'a [usize],
    /// Strides in elements, one per size; 0 where broadcast.
    pub strides: &'a [isize],
}

impl Operand<'_> {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the elements lie one after the other in row-major order.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (&size, &stride) in self.shape.iter().zip(self.strides).rev() {
            if size == 0 {
                return true;
            }
            if size != 1 {
                if stride != expected {
                    return false;
                }
                expected *= size as isize;
            }
        }
        true
    }
}

/// Pointers that the threads of a parallel loop share; each uses its own part of the memory.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T: Copy>(T);

// SAFETY: sharing pointers is harmless; using them is unsafe code that keeps the threads' parts disjoint.
unsafe impl<T: Copy> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    pub(crate) fn new(value: T) -> Shared<T> {
        Shared(value)
    }

    /// The value; a method, so that closures capture the wrapper and not the pointer.
    pub(crate) fn get(&self) -> T {
        self.0
    }
}
