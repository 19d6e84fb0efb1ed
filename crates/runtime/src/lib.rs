//! Kiln's runtime: what compiled and eager code run on. It runs plans, and knows nothing of tensors.
//!
//! | module      | what it is                                                        |
//! |-------------|-------------------------------------------------------------------|
//! | [`pool`]    | the caching storage pool: [`Buffer`]                              |
//! | [`threads`] | the one thread pool: [`parallel_for`]                             |
//! | [`scratch`] | memory a thread keeps for itself                                  |
//! | [`cpu`]     | caches, cores and vector instructions: [`machine`]                |
//! | [`gemm`]    | matrix products over strided memory                               |
//! | [`halves`]  | matrix products of f16 and bf16                                   |
//! | [`contract`] | products of matrices that lie at sums of offsets                 |
//! | [`convolution`] | convolution and its two gradients                             |
//! | [`random`]  | Philox                                                            |
//! | [`cc`]      | the C compiler                                                    |
//! | [`cache`]   | the kernel cache, memory then disk: [`KernelCache`]               |
//! | [`directory`] | the cache on disk: whose it may be, what goes when it is full      |
//! | [`kernel`]  | the signature of compiled functions and their launch: [`Kernel`]  |
//! | [`program`] | plans, prepared to run                                            |
//! | [`engine`]  | other devices: their memory, and how plans run there              |
//! | [`isolate`] | a closure in a process of its own, with limits                    |
//! | [`owner`]   | a lock for data that one thread uses almost always                |
//! | [`sync`]    | atomics, or the model checker's in their place                    |
//! | [`warn`]    | warnings, each given once                                         |
//!
//! A kernel from C text to its result:
//!
//! ```
//! use kiln_runtime::{Args, Kernel, KernelCache, Source};
//!
//! let text = "int twice(char *const *bufs, const long *ints, const double *scalars,
//!                       long begin, long end, char *scratch) {
//!     float *x = (float *)bufs[0];
//!     for (long i = begin; i < end; i++) x[i] = 2.0f * x[i];
//!     return 0;
//! }";
//! # let folder = std::env::temp_dir().join(format!("kiln-doc-{}", std::process::id()));
//! # let cache = KernelCache::at(&folder);
//! # #[cfg(any())]
//! let cache = KernelCache::global();
//! let loaded = cache.load(&Source::new(text, &["-O2"]))?;
//! let twice = Kernel::new(loaded.library, "twice").expect("the text defines it");
//!
//! let mut x = vec![1.5f32; 1000];
//! let args = Args { bufs: &[x.as_mut_ptr().cast()], ints: &[], scalars: &[] };
//! // SAFETY: the kernel touches x[begin..end] only.
//! let status = unsafe { twice.launch(&args, 1000, 256, 0) };
//! assert_eq!((status, x[999]), (0, 3.0));
//! # std::fs::remove_dir_all(folder).ok();
//! # Ok::<(), kiln_runtime::CacheError>(())
//! ```

mod bands;
mod bind;
pub mod cache;
pub mod cc;
pub mod contract;
pub mod convolution;
mod convolve;
pub mod cpu;
pub mod directory;
pub mod engine;
pub mod gemm;
mod guard;
pub mod halves;
pub mod isolate;
pub mod kept;
pub mod kernel;
mod lanes;
mod list;
pub mod object;
pub mod owner;
mod panel;
pub mod pool;
pub mod program;
pub mod random;
pub mod scratch;
mod seal;
pub mod sync;
#[cfg(test)]
mod testing;
pub mod threads;
#[cfg(target_arch = "x86_64")]
mod tile;
pub mod warn;
#[cfg(target_arch = "x86_64")]
mod winograd;

pub use bind::Callable;
pub use cache::{CacheError, KernelCache, Library, Loaded, Origin, Source};
pub use cc::{CcError, Compiler, Sanitize};
pub use cpu::{Isa, Machine, machine, prefetch};
pub use kernel::{Args, Kernel, KernelFn, WeakKernel};
pub use pool::{AllocError, Buffer};
pub use threads::parallel_for;
