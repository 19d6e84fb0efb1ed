//! What a parallel region and a kernel call cost beside the work in them. Timings want a quiet machine, so they
//! are not part of the usual run: `cargo test -p kiln-runtime --test overhead -- --ignored --nocapture`.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kiln_runtime::{Args, Kernel, KernelCache, Source, parallel_for, threads};

/// The least time of a call in many short rounds: what others do on the machine only adds.
fn least(mut call: impl FnMut()) -> Duration {
    const CALLS: u32 = 50;
    let round = |call: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..CALLS).for_each(|_| call());
        start.elapsed() / CALLS
    };
    (0..2000).map(|_| round(&mut call)).min().unwrap()
}

#[test]
#[ignore = "a timing"]
fn a_parallel_region() {
    let threads = threads::count();
    let region = || parallel_for(threads, 1, |begin, end| _ = black_box((begin, end)));
    let time = least(region);
    println!("a region of {threads} threads: {time:?}");
    assert!(time <= Duration::from_micros(5), "{time:?}");
    // All threads take part, because each waits for the others.
    let meet = || {
        let there = AtomicUsize::new(0);
        parallel_for(threads, 1, |_, _| {
            there.fetch_add(1, Ordering::Relaxed);
            while there.load(Ordering::Relaxed) < threads {
                std::hint::spin_loop();
            }
        });
    };
    let time = least(meet);
    println!("a region in which {threads} threads meet: {time:?}");
    assert!(time <= Duration::from_micros(5), "{time:?}");
    // The caller does not wait for workers that sleep: it pays for waking them, no more.
    let mut asleep = Duration::MAX;
    for _ in 0..200 {
        std::thread::sleep(Duration::from_millis(1));
        let start = Instant::now();
        region();
        asleep = asleep.min(start.elapsed());
    }
    println!("the same after a pause, workers asleep: {asleep:?}");
    assert!(asleep <= Duration::from_micros(50), "{asleep:?}");
}

#[test]
#[ignore = "a timing"]
fn a_kernel_call() {
    const TEXT: &str = "
        int one(char *const *bufs, const long *ints, const double *scalars, long begin, long end, char *scratch) {
            for (long i = begin; i < end; i++) ((float *)bufs[0])[i] += 1.0f;
            return 0;
        }";
    let folder = std::env::temp_dir().join(format!("kiln-overhead-{}", std::process::id()));
    let library = KernelCache::at(&folder).load(&Source::new(TEXT, &["-O2"])).unwrap().library;
    std::fs::remove_dir_all(&folder).unwrap();
    let kernel = Kernel::new(library, "one").unwrap();
    let mut values = [0.0f32; 4096];
    let bufs = [values.as_mut_ptr().cast::<u8>()];
    let args = Args { bufs: &bufs, ints: &[], scalars: &[] };
    for (scratch, limit) in [(0, 1000), (4096, 1000)] {
        // SAFETY: the kernel changes eight floats of a buffer that has them.
        let time = least(|| assert_eq!(unsafe { kernel.launch(black_box(&args), 8, 8, scratch) }, 0));
        println!("a call on one thread, {scratch} bytes of scratch: {time:?}");
        assert!(time <= Duration::from_nanos(limit), "{time:?}");
    }
    // SAFETY: as above, over all of them.
    let time = least(|| assert_eq!(unsafe { kernel.launch(black_box(&args), 4096, 1024, 0) }, 0));
    println!("a call on {} threads: {time:?}", threads::count());
    assert!(time <= Duration::from_micros(7), "{time:?}");
}
