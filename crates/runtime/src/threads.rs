//! The thread pool: one for the whole process, made for regions of a few microseconds.
//!
//! [Note: how a region runs]
//! A region is one call of [`parallel_for`]. The caller publishes a job, takes part in it as thread 0,
//! and closes it when nothing is left to claim; it then waits only for the workers that joined. A worker
//! that wakes too late finds the region closed and leaves it alone, so a sleeping or descheduled worker
//! never holds a caller up. Joining is an addition to one word that holds the region's number, an open bit, how
//! many threads may take part and how many workers are inside: the word as it was says whether the worker
//! joined the region that it looked at; one that came too late takes its addition back. (Compare-and-swap, tried
//! by fifteen workers at once, costs each of them the failures of the others.) The caller changes the word by
//! additions, too, so that whoever is about to leave is still counted.
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
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
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

/// One thread's own line: where its share stands and how to wake it.
#[repr(align(128))]
struct Slot {
    next: AtomicUsize,
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Slot {
    const fn new() -> Slot {
        Slot { next: AtomicUsize::new(0), asleep: AtomicBool::new(false), thread: OnceLock::new() }
    }
}

#[repr(align(128))]
struct State(AtomicU64);

struct Pool {
    /// Held by the one thread whose region is running.
    busy: AtomicBool,
    state: State,
    /// Written by the holder of `busy` while no worker is inside; read by workers that joined.
    job: UnsafeCell<Job>,
    panicked: AtomicBool,
    payload: Mutex<Option<Box<dyn Any + Send>>>,
    slots: [Slot; MAX_THREADS],
}

// SAFETY: `job` is the only field that is not Sync by itself; the protocol in the note orders every write
// before the state word that lets workers read it, and every read before the word that lets it be written.
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

/// The state word: region number (32 bits) | open (1) | threads that may take part (15) | workers inside (16).
const OPEN: u64 = 1 << 31;
const INSIDE_MASK: u64 = 0xffff;

fn word(region: u64, threads: usize) -> u64 {
    (region << 32) | OPEN | ((threads as u64) << 16)
}
fn region_of(word: u64) -> u64 {
    word >> 32
}
fn threads_of(word: u64) -> usize {
    ((word >> 16) & 0x7fff) as usize
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
        for thread in 0..job.threads {
            pool.slots[thread].next.store(job.share(thread), Ordering::Relaxed);
        }
        // SAFETY: `busy` is ours, and the last region closed and emptied, so no worker reads the job.
        unsafe { *pool.job.get() = job };

        // Only workers that came too late add to a closed region, and take it back: everything but their number is
        // the caller's to change.
        let before = pool.state.0.load(Ordering::Relaxed);
        let next = word(region_of(before).wrapping_add(1), job.threads);
        // Sequentially consistent, as is a worker's `asleep` before its last look at the state: one of
        // the two sees the other, so no wake-up is lost.
        pool.state.0.fetch_add(next.wrapping_sub(before & !INSIDE_MASK), Ordering::SeqCst);
        for slot in &pool.slots[1..job.threads] {
            if slot.asleep.load(Ordering::SeqCst) && slot.asleep.swap(false, Ordering::SeqCst) {
                slot.thread.get().expect("a sleeping worker has a handle").unpark();
            }
        }

        job.work_guarded(pool, 0);

        let mut inside = pool.state.0.fetch_and(!OPEN, Ordering::AcqRel) & INSIDE_MASK;
        let mut turns = 0u32;
        while inside != 0 {
            turns += 1;
            // On a crowded machine the worker may be waiting for this very core.
            if turns.is_multiple_of(1024) {
                std::thread::yield_now()
            } else {
                spin_loop()
            }
            inside = pool.state.0.load(Ordering::Acquire) & INSIDE_MASK;
        }
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
            state: State(AtomicU64::new(0)),
            job: UnsafeCell::new(Job::NONE),
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
        let mut seen = 0;
        loop {
            let state = self.wait(index, seen);
            seen = region_of(state);
            if self.join(state) {
                // SAFETY: joined, so the job was published and stays until this worker leaves.
                let job = unsafe { *self.job.get() };
                job.work_guarded(self, index);
                self.state.0.fetch_sub(1, Ordering::Release);
            }
        }
    }

    /// Waits for an open region other than `seen` that wants this worker.
    fn wait(&self, index: usize, seen: u64) -> u64 {
        let wanted = |state: u64| region_of(state) != seen && state & OPEN != 0 && index < threads_of(state);
        let asleep = &self.slots[index].asleep;
        loop {
            let start = Instant::now();
            while start.elapsed() < SPIN {
                for _ in 0..16 {
                    let state = self.state.0.load(Ordering::Relaxed);
                    if wanted(state) {
                        return state;
                    }
                    spin_loop();
                }
            }
            asleep.store(true, Ordering::SeqCst);
            while asleep.load(Ordering::SeqCst) {
                let state = self.state.0.load(Ordering::SeqCst);
                if wanted(state) {
                    asleep.store(false, Ordering::SeqCst);
                    return state;
                }
                std::thread::park();
            }
        }
    }

    /// Enters the region seen in `state`, unless it has closed since.
    fn join(&self, state: u64) -> bool {
        let now = self.state.0.fetch_add(1, Ordering::Acquire);
        let is_open = region_of(now) == region_of(state) && now & OPEN != 0;
        if !is_open {
            self.state.0.fetch_sub(1, Ordering::Release);
        }
        is_open
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
