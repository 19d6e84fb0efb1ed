//! Kernels: the one signature of compiled functions, and their launch over the thread pool.

use std::marker::PhantomData;
use std::sync::{Arc, Weak};

use kiln_ir::{Fault, planted};
use parking_lot::Mutex;

use crate::cache::Library;
use crate::scratch;
use crate::threads::{Shared, parallel_for};

/// A compiled kernel.
///
/// - `bufs`: the buffers' first bytes.
/// - `ints`: sizes, strides, offsets.
/// - `scalars`: bit patterns of f64 or i64; the kernel knows which.
/// - `begin`, `end`: the range of its outermost loop to run.
/// - `scratch`: memory of the running thread, aligned to 64 bytes.
///
/// Returns 0, or the code of the first data-dependent error it met.
pub type KernelFn = unsafe extern "C" fn(
    bufs: *const *mut u8,
    ints: *const i64,
    scalars: *const u64,
    begin: i64,
    end: i64,
    scratch: *mut u8,
) -> i32;

/// The status of a launch for which there was no scratch memory.
pub const NO_SCRATCH: i32 = i32::MIN;

/// What a kernel is called with.
#[derive(Debug, Clone, Copy)]
pub struct Args<'a> {
    /// The buffers' first bytes.
    pub bufs: &'a [*mut u8],
    /// Sizes, strides, offsets.
    pub ints: &'a [i64],
    /// Bit patterns of f64 or i64.
    pub scalars: &'a [u64],
}

/// A function of a loaded library; keeps the library loaded.
#[derive(Debug, Clone)]
pub struct Kernel {
    library: Arc<Library>,
    function: KernelFn,
}

/// A kernel that is there as long as others keep its library loaded.
#[derive(Debug, Clone)]
pub struct WeakKernel {
    library: Weak<Library>,
    function: KernelFn,
}

impl WeakKernel {
    /// The kernel, if its library is still loaded.
    pub fn upgrade(&self) -> Option<Kernel> {
        self.library.upgrade().map(|library| Kernel { library, function: self.function })
    }

    /// Whether its library is still loaded.
    pub fn is_loaded(&self) -> bool {
        self.library.strong_count() > 0
    }
}

impl Kernel {
    /// The kernel called `name`, if the library has it.
    pub fn new(library: Arc<Library>, name: &str) -> Option<Kernel> {
        let function = library.symbol(name)?;
        Some(Kernel { library, function })
    }

    /// The same kernel, which no longer keeps its library loaded.
    pub fn downgrade(&self) -> WeakKernel {
        WeakKernel { library: Arc::downgrade(&self.library), function: self.function }
    }

    /// The library the kernel is part of.
    pub fn library(&self) -> &Arc<Library> {
        &self.library
    }

    /// Runs the kernel over `0..items`, cut at multiples of `grain` into ranges for the pool's threads; on the
    /// calling thread when `items <= grain`. Each thread has `scratch_bytes` of scratch.
    ///
    /// Returns 0 if all ranges did, else the code of the failing range with the lowest index, which does not
    /// depend on the number of threads; all ranges run in any case.
    ///
    /// # Safety
    /// The arguments are what this kernel expects, its accesses for all of `0..items` are valid, and different
    /// ranges do not touch each other's results.
    pub unsafe fn launch(&self, args: &Args<'_>, items: i64, grain: i64, scratch_bytes: usize) -> i32 {
        if items <= 0 {
            return 0;
        }
        if items <= grain {
            // SAFETY: the caller's promise is passed on.
            return unsafe { self.run(args, 0, items, scratch_bytes) };
        }
        // SAFETY: the caller's promise is passed on.
        let launch = unsafe { self.launch_in_parts(args, scratch_bytes) };
        parallel_for(items as usize, grain.max(1) as usize, |begin, end| {
            let again = i64::from(planted(Fault::ItemTwice) && begin > 0);
            let left_out = i64::from(planted(Fault::ItemSkipped) && begin > 0);
            launch.part(begin as i64 - again + left_out, end as i64)
        });
        launch.status()
    }

    /// A launch whose ranges come one by one, from any threads.
    ///
    /// # Safety
    /// As for [`Kernel::launch`], for all ranges that are going to be [run](Launch::part).
    pub unsafe fn launch_in_parts<'a>(&'a self, args: &'a Args<'a>, scratch_bytes: usize) -> Launch<'a> {
        let pointers = Shared((args.bufs.as_ptr(), args.ints.as_ptr(), args.scalars.as_ptr()));
        Launch {
            kernel: self,
            pointers,
            scratch_bytes,
            first_error: Mutex::new((i64::MAX, 0)),
            args: PhantomData,
        }
    }

    /// Runs the kernel over `begin..end` on the calling thread.
    ///
    /// # Safety
    /// As for [`Kernel::launch`].
    #[inline]
    pub unsafe fn run(&self, args: &Args<'_>, begin: i64, end: i64, scratch_bytes: usize) -> i32 {
        let (bufs, ints, scalars) = (args.bufs.as_ptr(), args.ints.as_ptr(), args.scalars.as_ptr());
        let status = scratch::with(scratch_bytes, |scratch| {
            // SAFETY: the caller's promise is passed on.
            unsafe { (self.function)(bufs, ints, scalars, begin, end, scratch) }
        });
        status.unwrap_or(NO_SCRATCH)
    }
}

/// See [`Kernel::launch_in_parts`].
pub struct Launch<'a> {
    kernel: &'a Kernel,
    pointers: Shared<(*const *mut u8, *const i64, *const u64)>,
    scratch_bytes: usize,
    /// The failing range with the lowest index, and its code.
    first_error: Mutex<(i64, i32)>,
    args: PhantomData<&'a ()>,
}

impl Launch<'_> {
    /// Runs the kernel over `begin..end` on the calling thread.
    pub fn part(&self, begin: i64, end: i64) {
        let (bufs, ints, scalars) = self.pointers.get();
        let status = scratch::with(self.scratch_bytes, |scratch| {
            // SAFETY: promised where the launch was made.
            unsafe { (self.kernel.function)(bufs, ints, scalars, begin, end, scratch) }
        });
        let status = status.unwrap_or(NO_SCRATCH);
        if status != 0 {
            let mut first = self.first_error.lock();
            if begin < first.0 {
                *first = (begin, status);
            }
        }
    }

    /// 0 if all ranges so far returned that, else the code of the failing one with the lowest index.
    pub fn status(&self) -> i32 {
        self.first_error.lock().1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{KernelCache, Source};
    use crate::testing::Folder;

    const SCALE: &str = "
        int scale(char *const *bufs, const long *ints, const double *scalars, long begin, long end, char *scratch) {
            float *x = (float *)bufs[0];
            for (long i = begin; i < end; i++) {
                ((float *)scratch)[0] = x[i];
                x[i] = ((float *)scratch)[0] * (float)scalars[0] + (float)ints[0];
            }
            for (long i = begin; i < end; i++) if (x[i] > 5000.0f) return (int)i;
            return 0;
        }";

    fn scale(folder: &Folder) -> Kernel {
        let cache = KernelCache::at(folder.path());
        let library = cache.load(&Source::new(SCALE, &["-O1"])).unwrap().library;
        assert!(Kernel::new(library.clone(), "other").is_none());
        // The cache goes here: the kernel alone must keep the code alive.
        Kernel::new(library, "scale").unwrap()
    }

    #[test]
    fn launches_cover_the_range_and_report_the_first_error() {
        let folder = Folder::new("kernel");
        let kernel = scale(&folder);
        for (items, grain) in [(0, 1), (1, 1), (1000, 10_000), (10_000, 7)] {
            let mut values: Vec<f32> = (0..items).map(|i| i as f32).collect();
            let bufs = [values.as_mut_ptr().cast::<u8>()];
            let args = Args { bufs: &bufs, ints: &[1], scalars: &[2.0f64.to_bits()] };
            // SAFETY: the kernel reads one buffer of `items` floats, one integer and one number.
            let status = unsafe { kernel.launch(&args, items, grain, 64) };
            assert!(values.iter().enumerate().all(|(i, v)| *v == 2.0 * i as f32 + 1.0));
            assert_eq!(status, if items > 2500 { 2500 } else { 0 });
        }
    }
}
