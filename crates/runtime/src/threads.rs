//! The thread pool: one for the whole process, made for regions of a few microseconds.
//!
//! [Note: how a region runs]
//! A region is one call of [`parallel_for`]. Every worker has a line of memory of its own: the job, where the worker's
//! share stands, and a phase. The caller writes the job into the lines of the workers it wants and *calls* them, takes
//! part as thread 0, and once nothing is left to claim *dismisses* whoever has not come yet; it then waits only for those
//! who are *inside* until they are *done*. A worker that wakes too late finds itself dismissed, so a sleeping or
//! descheduled worker never holds a caller up. Coming and dismissing are one compare-and-swap of the phase by each of
//! the two, so that exactly one of them happens. No two workers write the same line: on many cores, a word that all of
//! them change would pass from one to the next, at a tenth of a microsecond each.
//!
//! Each thread owns a contiguous share of the items, which it takes chunk by chunk; whoever finishes
//! first helps the others. Repeated regions over the same data thus stay with the same core's cache, and
//! an uneven load is still balanced. Nothing is allocated per region.
//!
//! Nested regions, and regions while another user thread runs one, run on the calling thread alone.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicUsize, Ordering, fence};
use std::thread::{Builder, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::cpu::machine;

/// The most threads a region may use.
pub const MAX_THREADS: usize = 256;

/// Elements worth a thread's while, where each is loaded, computed with a few operations and stored: with fewer, waking
/// the thread takes longer than the work. Half of them are where they take more. No result depends on it.
pub const GRAIN: usize = 1 << 14;

/// Chunks per thread: enough to even out a load, few enough to keep claiming cheap.
const CHUNKS_PER_THREAD: usize = 4;
/// How long an idle worker looks for the next region before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// Number of threads regions use: `KILN_NUM_THREADS`, else the cores available to the process.
pub fn count() -> usize {
    match COUNT.load(Ordering::Relaxed) {
        0 => set_count(default_count()),
        count => count,
    }
}

/// Makes later regions use `threads` threads, clamped to `1..=MAX_THREADS`; returns the number taken.
pub fn set_count(threads: usize) -> usize {
    let threads = threads.clamp(1, MAX_THREADS);
    COUNT.store(threads, Ordering::Relaxed);
    threads
}

fn default_count() -> usize {
    let cores = machine().cores;
    let Ok(text) = std::env::var("KILN_NUM_THREADS") else { return cores };
    match text.trim().parse::<usize>() {
        Ok(threads) if threads > 0 => threads,
        _ => {
            crate::warn::once("KILN_NUM_THREADS", || {
                format!("KILN_NUM_THREADS={text} is not a positive number; using one thread per core")
            });
            cores
        }
    }
}

/// Calls `body(begin, end)` for ranges that together cover `0..items` exactly once, on several threads.
///
/// Every range begins at a multiple of `grain` and is no shorter than `grain`, but for the last one.
/// A panic in `body` reaches the caller once all threads have left the region.
pub fn parallel_for<F: Fn(usize, usize) + Sync>(items: usize, grain: usize, body: F) {
    if items == 0 {
        return;
    }
    let grain = grain.max(1);
    let units = items.div_ceil(grain);
    let threads = if units == 1 { 1 } else { count().min(units) };
    if threads == 1 || INSIDE.get() {
        return body(0, items);
    }
    let Some(region) = Region::enter() else { return body(0, items) };
    region.run(threads, Job { run: call::<F>, body: (&raw const body).cast(), items, grain, units, threads });
}

/// A value with raw pointers that the threads of a region share; each thread uses its own part of the memory.
pub(crate) struct Shared<T>(pub T);

// SAFETY: sharing the pointers is harmless; their use is unsafe code that has to keep the parts disjoint.
unsafe impl<T: Copy> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    /// The value; a method, so that closures capture the whole wrapper.
    pub(crate) fn get(&self) -> T {
        self.0
    }
}

/// # Safety
/// `body` points to a live `F`.
unsafe fn call<F: Fn(usize, usize) + Sync>(body: *const (), begin: usize, end: usize) {
    // SAFETY: `parallel_for` keeps the closure alive until the region is over, and `F: Sync`.
    unsafe { (*body.cast::<F>())(begin, end) }
}

thread_local! {
    /// Whether this thread is running a region's body.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

#[derive(Clone, Copy)]
struct Job {
    run: unsafe fn(*const (), usize, usize),
    body: *const (),
    items: usize,
    grain: usize,
    units: usize,
    threads: usize,
}

impl Job {
    const NONE: Job =
        Job { run: |_, _, _| (), body: std::ptr::null(), items: 0, grain: 1, units: 0, threads: 1 };

    /// The first unit of a thread's own share.
    fn share(&self, thread: usize) -> usize {
        let (each, rest) = (self.units / self.threads, self.units % self.threads);
        each * thread + rest.min(thread)
    }

    /// Claims chunks, first from the thread's own share, then from the others', until none is left.
    fn work(&self, pool: &Pool, thread: usize) {
        let chunk = (self.units / (self.threads * CHUNKS_PER_THREAD)).max(1);
        for turn in 0..self.threads {
            let owner = (thread + turn) % self.threads;
            let end = self.share(owner + 1);
            loop {
                let next = &pool.slots[owner].next;
                // Looking first keeps finished shares from being written over and over.
                if next.load(Ordering::Relaxed) >= end || pool.panicked.load(Ordering::Relaxed) {
                    break;
                }
                let first = next.fetch_add(chunk, Ordering::Relaxed);
                if first >= end {
                    break;
                }
                let last = (first + chunk).min(end);
                // SAFETY: the caller keeps the closure alive while any thread is inside the region.
                unsafe { (self.run)(self.body, first * self.grain, (last * self.grain).min(self.items)) }
            }
        }
    }

    /// `work`, with a panic kept for the caller.
    fn work_guarded(&self, pool: &Pool, thread: usize) {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| self.work(pool, thread))) {
            let mut first = pool.payload.lock();
            match *first {
                None => *first = Some(payload),
                // Not dropped: a payload may panic when it is, and nothing may unwind out of a region that
                // other threads are in.
                Some(_) => std::mem::forget(payload),
            }
            drop(first);
            pool.panicked.store(true, Ordering::Relaxed);
        }
    }
}

/// What a worker is doing, as it and the caller see it.
mod phase {
    /// Nothing; the caller may change the job.
    pub const IDLE: u8 = 0;
    /// It may come and work.
    pub const CALLED: u8 = 1;
    /// It works.
    pub const INSIDE: u8 = 2;
}

/// One thread's own line.
#[repr(C, align(128))]
struct Slot {
    /// Written by the holder of `busy` while the phase is idle; read by a worker that is inside.
    job: UnsafeCell<Job>,
    /// The first unit of the thread's share that nobody has claimed.
    next: AtomicUsize,
    phase: AtomicU8,
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Slot {
    const fn new() -> Slot {
        Slot {
            job: UnsafeCell::new(Job::NONE),
            next: AtomicUsize::new(0),
            phase: AtomicU8::new(phase::IDLE),
            asleep: AtomicBool::new(false),
            thread: OnceLock::new(),
        }
    }

    /// The worker comes, if it is called.
    fn enter(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == phase::CALLED && self.leaves(phase::CALLED, phase::INSIDE)
    }

    /// Waits for a call and comes.
    fn wait(&self) {
        loop {
            let start = Instant::now();
            while start.elapsed() < SPIN {
                for _ in 0..16 {
                    if self.enter() {
                        return;
                    }
                    spin_loop();
                }
            }
            self.asleep.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            while self.asleep.load(Ordering::Relaxed) {
                if self.enter() {
                    self.asleep.store(false, Ordering::Relaxed);
                    return;
                }
                std::thread::park();
            }
        }
    }

    /// Waits until the worker is not inside, and keeps it from coming.
    fn dismiss(&self) {
        let mut turns = 0u32;
        loop {
            match self.phase.load(Ordering::Acquire) {
                phase::IDLE => return,
                phase::CALLED if self.leaves(phase::CALLED, phase::IDLE) => return,
                _ => turns += 1,
            }
            // On a crowded machine the worker may be waiting for this very core.
            if turns.is_multiple_of(1024) { std::thread::yield_now() } else { spin_loop() }
        }
    }

    /// Whether the phase was `from`; it is `to` then.
    fn leaves(&self, from: u8, to: u8) -> bool {
        self.phase.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
}

struct Pool {
    /// Held by the one thread whose region is running.
    busy: AtomicBool,
    panicked: AtomicBool,
    payload: Mutex<Option<Box<dyn Any + Send>>>,
    slots: [Slot; MAX_THREADS],
}

// SAFETY: jobs are the only fields that are not Sync by themselves; the protocol in the note orders every write before
// the phase that lets a worker read it, and every read before the phase that lets it be written.
unsafe impl Sync for Pool {}

/// The number of threads; 0 until somebody asks.
static COUNT: AtomicUsize = AtomicUsize::new(0);

static FIRST: Pool = Pool::new();
/// The process's pool: the first, unless the process was forked from one that has it.
static POOL: AtomicPtr<Pool> = AtomicPtr::new((&raw const FIRST).cast_mut());

fn pool() -> &'static Pool {
    // SAFETY: a static, or one of `after_fork`, which is never freed; only ever shared.
    unsafe { &*POOL.load(Ordering::Acquire) }
}

/// Gives a forked child, which has none of the workers, a pool of its own; they start with the first region. The old
/// one stays as the fork found it: a worker may be counted in a region that it will never leave.
#[cfg(target_os = "linux")]
pub(crate) fn after_fork() {
    POOL.store(Box::leak(Box::new(Pool::new())), Ordering::Release);
    INSIDE.set(false);
}

/// The right to run a region of a pool; given back on drop.
struct Region(&'static Pool);

impl Region {
    fn enter() -> Option<Region> {
        let pool = pool();
        pool.busy.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).ok()?;
        INSIDE.set(true);
        Some(Region(pool))
    }

    fn run(&self, threads: usize, mut job: Job) {
        let pool = self.0;
        job.threads = pool.spawn(threads);
        pool.slots[0].next.store(job.share(0), Ordering::Relaxed);
        let workers = &pool.slots[1..job.threads];
        // All shares first: whoever comes early helps the others.
        for (slot, thread) in workers.iter().zip(1..) {
            // SAFETY: `busy` is ours, and the last region left every worker idle.
            unsafe { *slot.job.get() = job };
            slot.next.store(job.share(thread), Ordering::Relaxed);
        }
        workers.iter().for_each(|slot| slot.phase.store(phase::CALLED, Ordering::Release));
        // Between the calls and the looks at who sleeps, as a worker has one between saying that it sleeps and its last
        // look: one of the two sees the other, so no wake-up is lost.
        fence(Ordering::SeqCst);
        for slot in workers {
            if slot.asleep.load(Ordering::Relaxed) && slot.asleep.swap(false, Ordering::Relaxed) {
                slot.thread.get().expect("a sleeping worker has a handle").unpark();
            }
        }

        job.work_guarded(pool, 0);

        workers.iter().for_each(Slot::dismiss);
        if pool.panicked.load(Ordering::Relaxed) {
            pool.panicked.store(false, Ordering::Relaxed);
            let payload = pool.payload.lock().take();
            if let Some(payload) = payload {
                resume_unwind(payload);
            }
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        INSIDE.set(false);
        self.0.busy.store(false, Ordering::Release);
    }
}

impl Pool {
    const fn new() -> Pool {
        Pool {
            busy: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            payload: Mutex::new(None),
            slots: [const { Slot::new() }; MAX_THREADS],
        }
    }

    /// Makes sure that workers `1..threads` run; returns how many threads there really are.
    ///
    /// Only called by the holder of `busy`.
    fn spawn(&'static self, threads: usize) -> usize {
        for index in 1..threads {
            let slot = &self.slots[index];
            if slot.thread.get().is_some() {
                continue;
            }
            let started = Builder::new().name(format!("kiln-{index}")).spawn(move || self.worker(index));
            match started {
                Ok(handle) => slot.thread.get_or_init(|| handle.thread().clone()),
                // The system has no more threads to give: the ones there are do the work.
                Err(_) => return index,
            };
        }
        threads
    }

    fn worker(&self, index: usize) -> ! {
        INSIDE.set(true);
        let slot = &self.slots[index];
        loop {
            slot.wait();
            // SAFETY: inside, so the job was published and stays until this worker is done.
            let job = unsafe { *slot.job.get() };
            job.work_guarded(self, index);
            slot.phase.store(phase::IDLE, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn covers(items: usize, grain: usize) {
        let hits: Vec<AtomicU32> = (0..items).map(|_| AtomicU32::new(0)).collect();
        parallel_for(items, grain, |begin, end| {
            assert!(begin < end && end <= items);
            assert_eq!(begin % grain.max(1), 0);
            assert!(end - begin >= grain || end == items);
            hits[begin..end].iter().for_each(|hit| _ = hit.fetch_add(1, Ordering::Relaxed));
        });
        assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1), "{items} by {grain}");
    }

    #[test]
    fn every_item_exactly_once() {
        for threads in [1, 2, 3, 7] {
            set_count(threads);
            for items in [0, 1, 2, 3, 63, 64, 1000, 4097] {
                for grain in [0, 1, 3, 64, 5000] {
                    covers(items, grain);
                }
            }
        }
        set_count(default_count());
    }

    #[test]
    fn many_regions_after_sleep() {
        for round in 0..200 {
            covers(257, 1);
            if round % 50 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }

    #[test]
    fn nested_regions_run_inline() {
        let total = AtomicUsize::new(0);
        parallel_for(8, 1, |begin, end| {
            for _ in begin..end {
                parallel_for(10, 1, |b, e| _ = total.fetch_add(e - b, Ordering::Relaxed));
            }
        });
        assert_eq!(total.into_inner(), 80);
    }

    #[test]
    fn several_user_threads_at_once() {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..200).for_each(|_| covers(100, 3)));
            }
        });
    }

    #[test]
    fn panics_reach_the_caller_and_the_pool_survives() {
        for at in [0, 99] {
            let caught = catch_unwind(|| {
                parallel_for(100, 1, |begin, end| {
                    if (begin..end).contains(&at) {
                        panic!("item {at}");
                    }
                })
            });
            let payload = caught.expect_err("the panic must arrive");
            assert_eq!(payload.downcast_ref::<String>(), Some(&format!("item {at}")));
            covers(100, 1);
        }
    }
}
