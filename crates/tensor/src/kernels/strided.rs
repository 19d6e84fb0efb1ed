//! Moving elements that lie apart into a block and back.

/// Copies n elements of `size` bytes, `stride` bytes apart, into a block.
///
/// # Safety
/// The elements can be read and the block has room for them.
pub(super) unsafe fn gather(block: *mut u8, memory: *const u8, stride: isize, n: usize, size: usize) {
    #[inline(always)]
    unsafe fn typed<T: Copy>(block: *mut u8, memory: *const u8, stride: isize, n: usize) {
        let block: *mut T = block.cast();
        // SAFETY: the caller's promise.
        unsafe {
            if stride == size_of::<T>() as isize {
                std::ptr::copy_nonoverlapping(memory.cast(), block, n);
            } else if stride == 0 {
                let value = memory.cast::<T>().read();
                for i in 0..n {
                    block.add(i).write(value);
                }
            } else if stride == -(size_of::<T>() as isize) {
                let memory = memory.cast::<T>();
                for i in 0..n {
                    block.add(i).write(memory.sub(i).read());
                }
            } else {
                for i in 0..n {
                    block.add(i).write(memory.offset(i as isize * stride).cast::<T>().read());
                }
            }
        }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match size {
            1 => typed::<u8>(block, memory, stride, n),
            2 => typed::<u16>(block, memory, stride, n),
            4 => typed::<u32>(block, memory, stride, n),
            _ => typed::<u64>(block, memory, stride, n),
        }
    }
}

/// Copies a block to n elements of `size` bytes, `stride` bytes apart.
///
/// # Safety
/// The block has n elements and the memory can be written.
pub(super) unsafe fn scatter(memory: *mut u8, stride: isize, block: *const u8, n: usize, size: usize) {
    #[inline(always)]
    unsafe fn typed<T: Copy>(memory: *mut u8, stride: isize, block: *const u8, n: usize) {
        let block: *const T = block.cast();
        // SAFETY: the caller's promise.
        unsafe {
            if stride == size_of::<T>() as isize {
                std::ptr::copy_nonoverlapping(block, memory.cast(), n);
            } else {
                for i in 0..n {
                    memory.offset(i as isize * stride).cast::<T>().write(block.add(i).read());
                }
            }
        }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match size {
            1 => typed::<u8>(memory, stride, block, n),
            2 => typed::<u16>(memory, stride, block, n),
            4 => typed::<u32>(memory, stride, block, n),
            _ => typed::<u64>(memory, stride, block, n),
        }
    }
}
