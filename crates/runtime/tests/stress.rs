//! Pool, threads and owner lock under many threads: seeded random programs whose results can be checked.
//! `KILN_STRESS=n` runs them n times as long.

use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;

use kiln_runtime::owner::OwnerLock;
use kiln_runtime::pool::{self, AllocError, Buffer};
use kiln_runtime::threads::{self, parallel_for};
use parking_lot::Mutex;

/// The pool and the threads are the process's: tests that count, or take all memory, take turns.
static TURN: Mutex<()> = Mutex::new(());

fn rounds(usual: usize) -> usize {
    usual * std::env::var("KILN_STRESS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize)
}

/// A stream of random numbers of its own for each seed (xorshift).
struct Random(u64);

impl Random {
    fn new(seed: usize) -> Random {
        Random((seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    /// Sizes of all kinds: those of the threads' own lists, those of the shared lists, mapped ones.
    fn size(&mut self) -> usize {
        match self.below(100) {
            0 => (2 << 20) + self.below(4 << 20),
            1..10 => 4097 + self.below(100_000),
            10..50 => 1 + self.below(4096),
            // Few classes, so that blocks change hands often.
            _ => 1 + self.below(256),
        }
    }
}

/// Runs a body on several threads and waits until they are gone for good: a thread gives the blocks that it
/// keeps for itself back when it ends, which a scope alone does not wait for.
fn on_threads(threads: usize, body: impl Fn(usize) + Sync) {
    std::thread::scope(|scope| {
        let body = &body;
        let handles: Vec<_> = (0..threads).map(|me| scope.spawn(move || body(me))).collect();
        handles.into_iter().for_each(|handle| handle.join().expect("no thread panics"));
    });
}

/// A buffer filled with a word that no other living buffer has.
struct Marked {
    buffer: Buffer,
    mark: u64,
}

impl Marked {
    fn new(bytes: usize, mark: u64) -> Result<Marked, AllocError> {
        let marked = Marked { buffer: Buffer::alloc(bytes)?, mark };
        for at in marked.places() {
            // SAFETY: within the buffer, which is this value's alone.
            unsafe { marked.buffer.as_ptr().add(at).write(marked.byte(at)) };
        }
        Ok(marked)
    }

    /// Every byte of a small buffer; of a large one the first, the last and one of each page.
    fn places(&self) -> impl Iterator<Item = usize> + use<> {
        let bytes = self.buffer.bytes();
        let step = if bytes <= 4096 { 1 } else { 4096 };
        (0..bytes).step_by(step).chain([bytes - 1])
    }

    fn byte(&self, at: usize) -> u8 {
        self.mark.to_le_bytes()[at % 8]
    }

    fn check(&self) {
        for at in self.places() {
            // SAFETY: within the buffer; `new` wrote this byte.
            let byte = unsafe { self.buffer.as_ptr().add(at).read() };
            assert_eq!(byte, self.byte(at), "byte {at} of {} has another owner", self.buffer.bytes());
        }
    }
}

#[test]
fn every_block_has_one_owner_wherever_it_is_freed() {
    let _turn = TURN.lock();
    let before = pool::stats().live_bytes;
    let marks = AtomicU64::new(1);
    const THREADS: usize = 4;
    for generation in 0..rounds(3) {
        let (senders, receivers): (Vec<_>, Vec<_>) =
            (0..THREADS).map(|_| channel::<Marked>()).map(|(s, r)| (s, Mutex::new(r))).unzip();
        on_threads(THREADS, |me| {
            let (senders, receiver) = (senders.clone(), receivers[me].lock());
            let mut random = Random::new(generation * THREADS + me);
            let mut mine: Vec<Marked> = Vec::new();
            for _ in 0..3000 {
                // Marks differ in every byte's neighbourhood, not only in the lowest.
                let mark = marks.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let new = Marked::new(random.size(), mark).expect("there is memory for this");
                match random.below(3) {
                    0 => mine.push(new),
                    // Freed there, or by this test's thread if that one is done.
                    1 => drop(senders[random.below(THREADS)].send(new)),
                    _ => new.check(),
                }
                mine.extend(receiver.try_iter().take(random.below(3)));
                while mine.len() > 60 + random.below(40) {
                    let old = mine.swap_remove(random.below(mine.len()));
                    old.check();
                }
                if random.below(2000) == 0 {
                    pool::clear();
                }
            }
            mine.iter().chain(&receiver.try_iter().collect::<Vec<_>>()).for_each(Marked::check);
        });
    }
    assert_eq!(pool::stats().live_bytes, before, "all blocks are free again");
}

#[test]
fn exhaustion_is_an_error_and_passes() {
    let _turn = TURN.lock();
    let before = pool::stats().live_bytes;
    let third = pool::machine_bytes() / 3;
    let refused = AtomicUsize::new(0);
    on_threads(4, |me| {
        let mut random = Random::new(me);
        let mut large: Vec<Buffer> = Vec::new();
        for round in 0..rounds(100) {
            match Buffer::alloc(third) {
                // Never touched: it is a promise, not memory.
                Ok(buffer) => large.push(buffer),
                Err(AllocError::Exhausted { requested, .. }) => {
                    assert_eq!(requested, third);
                    refused.fetch_add(1, Ordering::Relaxed);
                    large.clear();
                }
                Err(error) => panic!("{error}"),
            }
            // Small ones are had all the while, if need be from what the caches give up.
            if let Ok(small) = Marked::new(random.size() % 5000 + 1, round as u64) {
                small.check();
            }
            if random.below(3) == 0 {
                large.clear();
            }
        }
    });
    assert!(refused.into_inner() > 0, "memory never ran out");
    assert_eq!(pool::stats().live_bytes, before);
    Marked::new(1 << 20, 5).expect("there is memory again").check();
    pool::clear();
}

/// Takes a little time.
fn dawdle(turns: usize) {
    for _ in 0..turns {
        std::hint::spin_loop();
    }
}

/// Counts each item of a region.
fn visit(items: usize, grain: usize, nested: usize, hits: &[AtomicUsize]) {
    parallel_for(items, grain, |begin, end| {
        for hit in &hits[begin..end] {
            hit.fetch_add(1, Ordering::Relaxed);
        }
        // Others may be through with theirs long before.
        dawdle((begin * 7919) % 400);
        let inner = AtomicUsize::new(0);
        parallel_for(nested, 1, |b, e| _ = inner.fetch_add(e - b, Ordering::Relaxed));
        assert_eq!(inner.into_inner(), nested);
    });
}

#[test]
fn regions_of_many_threads_cover_every_item_once() {
    let _turn = TURN.lock();
    let usual = threads::count();
    on_threads(4, |me| {
        let mut random = Random::new(me);
        for _ in 0..rounds(1000) {
            let (items, grain) = (1 + random.below(300), 1 + random.below(9));
            let hits: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            visit(items, grain, random.below(5), &hits);
            assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1), "{items} by {grain}");
            match random.below(40) {
                0 => _ = threads::set_count(1 + random.below(6)),
                // Long enough for the workers to go to sleep.
                1 => std::thread::sleep(std::time::Duration::from_micros(100)),
                _ => {}
            }
        }
    });
    threads::set_count(usual);
}

/// A payload that panics once more when it is dropped.
struct Bomb(AtomicBool);

impl Drop for Bomb {
    fn drop(&mut self) {
        if *self.0.get_mut() {
            panic!("a payload went off");
        }
    }
}

#[test]
fn panics_in_regions_reach_their_caller_only() {
    let _turn = TURN.lock();
    let usual = threads::set_count(threads::count().max(3));
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    on_threads(3, |me| {
        let mut random = Random::new(me);
        for round in 0..rounds(400) {
            let items = 2 + random.below(60);
            let (first, second) = (random.below(items), random.below(items));
            // The region uses the caller's stack: it must not end before all threads have left it.
            let canary: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(me + 1)).collect();
            let caught = catch_unwind(AssertUnwindSafe(|| {
                parallel_for(items, 1, |begin, end| {
                    for (at, item) in (begin..end).zip(&canary[begin..end]) {
                        assert_eq!(item.swap(0, Ordering::Relaxed), me + 1, "item {at} again");
                        dawdle((at * 7919) % 2000);
                        if at == first || at == second {
                            panic_any(Bomb(AtomicBool::new(true)));
                        }
                    }
                });
            }));
            match caught.expect_err("it panics").downcast::<Bomb>() {
                Ok(mut bomb) => *bomb.0.get_mut() = false,
                Err(_) => panic!("round {round}: another panic than the one thrown"),
            }
            drop(canary);
            let hits: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            visit(items, 1, 0, &hits);
            assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
        }
    });
    std::panic::set_hook(hook);
    threads::set_count(usual);
}

#[test]
fn an_owner_lock_loses_nothing_while_owners_change() {
    let lock = OwnerLock::new([0u64; 2]);
    let steps = rounds(20_000);
    let owned = AtomicUsize::new(0);
    on_threads(3, |me| {
        let mut random = Random::new(me);
        let bump = |both: &mut [u64; 2], turns: usize| {
            assert_eq!(both[0], both[1], "somebody else is inside");
            both[0] += 1;
            std::hint::black_box(&mut *both);
            dawdle(turns);
            both[1] += 1;
        };
        let mut left = steps;
        while left > 0 {
            let own = lock.own();
            owned.fetch_add(usize::from(own), Ordering::Relaxed);
            // An owner stays for a while; a stranger, whose way in is long, comes rarely.
            for _ in 0..if own { random.below(400) } else { random.below(4) } {
                let turns = random.below(8) * random.below(20);
                match random.below(3) {
                    0 => bump(&mut lock.lock(), turns),
                    1 => match lock.lock_own() {
                        Some(mut both) => {
                            assert!(lock.lock_own().is_none() && lock.lock_unless_inside().is_none());
                            bump(&mut both, turns);
                        }
                        None => continue,
                    },
                    _ => match lock.lock_unless_inside() {
                        Some(mut both) => bump(&mut both, turns),
                        None => unreachable!("nobody here is inside"),
                    },
                }
                left = left.saturating_sub(1);
                if left == 0 {
                    break;
                }
            }
            if own {
                lock.disown();
                std::thread::yield_now();
            }
        }
    });
    assert!(owned.into_inner() > 3, "ownership never moved");
    assert_eq!(*lock.lock(), [3 * steps as u64; 2]);
}
