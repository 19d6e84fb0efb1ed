//! Storages, locks and counts under many threads: seeded random programs whose results can be checked.
//! `KILN_STRESS=n` runs them n times as long.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use kiln_runtime::pool::Buffer;

use crate::hook::Tag;
use crate::storage::{Guard, Room, Storage, Use};
use crate::{DType, Device, Kept, Spare, Tensor, TensorList, foreach};

fn rounds(usual: usize) -> usize {
    usual * std::env::var("KILN_STRESS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize)
}

/// A stream of random numbers of its own for each seed (xorshift).
struct Random(u64);

impl Random {
    fn new(seed: usize) -> Random {
        Random((seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % n
    }
}

/// Runs a body on several threads; ends the process if they don't come to an end, since threads that wait for
/// each other would do so for ever.
fn on_threads<R: Send>(threads: usize, body: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let (done, waiting) = channel::<()>();
    let limit = Duration::from_secs(100 * rounds(1) as u64);
    let watch = std::thread::spawn(move || {
        if waiting.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            std::process::abort();
        }
    });
    let results = std::thread::scope(|scope| {
        let body = &body;
        let handles: Vec<_> = (0..threads).map(|me| scope.spawn(move || body(me))).collect();
        handles.into_iter().map(|handle| handle.join().expect("no thread panics")).collect()
    });
    drop(done);
    watch.join().expect("the watch does not panic");
    results
}

#[test]
fn no_change_of_overlapping_views_is_lost() {
    const SIDE: usize = 8;
    for dtype in [DType::F32, DType::I64] {
        let base = Tensor::full_of([SIDE, SIDE], 0, dtype, &Device::Cpu).expect("a small tensor fits");
        let before = base.ready().expect("ready").storage.version();
        let tallies = on_threads(4, |me| {
            let mut random = Random::new(me);
            let mut tally = [[0usize; SIDE]; SIDE];
            let mut changes = 0;
            for _ in 0..rounds(1500) {
                // A rectangle, as it is or turned; whole rows are dense.
                let (top, left) =
                    (random.below(SIDE), if random.below(2) == 0 { 0 } else { random.below(SIDE) });
                let height = 1 + random.below(SIDE - top);
                let width = if left == 0 { SIDE } else { 1 + random.below(SIDE - left) };
                let part =
                    || -> crate::Result<Tensor> { base.narrow(0, top, height)?.narrow(1, left, width) };
                let part = part().expect("inside");
                let times = match random.below(4) {
                    0 => {
                        part.t().and_then(|turned| turned.add_(1).map(|_| ())).expect("it fits");
                        1
                    }
                    1 => {
                        // Both elements of the list are the same memory: one after the other.
                        let both = TensorList::new(vec![part.clone(), part.clone()]);
                        foreach::add_(&both, 1).expect("it fits");
                        2
                    }
                    2 => {
                        // A change that reads another view of the same memory, times nothing.
                        part.add_(1).expect("it fits");
                        let shifted = base.narrow(0, 0, height).and_then(|t| t.narrow(1, 0, width));
                        part.add_(&(&shifted.expect("inside") * 0).ok().expect("it fits")).expect("it fits");
                        changes += 1;
                        1
                    }
                    _ => {
                        part.add_(1).expect("it fits");
                        1
                    }
                };
                changes += times;
                for row in &mut tally[top..top + height] {
                    row[left..left + width].iter_mut().for_each(|count| *count += times);
                }
            }
            (tally, changes)
        });
        let found = base.to_vec_cast::<f64>().expect("ready");
        for (at, &found) in found.iter().enumerate() {
            let wanted: usize = tallies.iter().map(|(tally, _)| tally[at / SIDE][at % SIDE]).sum();
            assert_eq!(found, wanted as f64, "element {at}, {dtype}");
        }
        let changes: usize = tallies.iter().map(|(_, changes)| changes).sum();
        assert_eq!(base.ready().expect("ready").storage.version(), before + changes as u64, "{dtype}");
    }
}

#[test]
fn whoever_reads_sees_whole_changes_and_nobody_waits_for_ever() {
    // All elements of a tensor are equal, between any two ops.
    let tensors: Vec<Tensor> = (0..6)
        .map(|i| Tensor::full([3000], i as i64 + 1, &Device::Cpu).expect("a small tensor fits"))
        .collect();
    let even = |what: &str, tensor: &Tensor| {
        let all = tensor.to_vec::<i64>().expect("ready");
        assert!(all.iter().all(|x| *x == all[0]), "{what}: half a change was seen");
    };
    on_threads(4, |me| {
        let mut random = Random::new(me);
        for _ in 0..rounds(800) {
            let mut pick = || &tensors[random.below(6)];
            let (a, b, c) = (pick(), pick(), pick());
            match random.below(6) {
                0 => _ = a.copy_(b).expect("it fits"),
                1 => _ = a.add_(b).expect("it fits"),
                2 => even("a sum", &(a + b).ok().expect("it fits")),
                3 => even("a tensor", a),
                4 => {
                    let rows = |list: [&Tensor; 3]| TensorList::new(list.map(Tensor::clone).to_vec());
                    foreach::add_(&rows([a, b, c]), &rows([b, c, a])).expect("they fit");
                }
                _ => {
                    let larger = a.maximum(b).and_then(|larger| larger.sub(c)).expect("they fit");
                    even("a difference", &larger);
                }
            }
        }
    });
    tensors.iter().for_each(|tensor| even("the end", tensor));
}

/// A storage whose lock guards two counters that are always equal.
struct Guarded {
    storage: Storage,
    counters: [AtomicU64; 2],
}

impl Guarded {
    fn look(&self, write: bool) {
        let [a, b] = &self.counters;
        let now = a.load(Ordering::Relaxed);
        assert_eq!(now, b.load(Ordering::Relaxed), "a lock was not held");
        if write {
            // Not atomic as a whole: without the lock, counts are lost.
            a.store(now + 1, Ordering::Relaxed);
            std::thread::yield_now();
            b.store(now + 1, Ordering::Relaxed);
        }
    }
}

#[test]
fn locks_of_many_storages_exclude_and_never_deadlock() {
    let all: Vec<Guarded> = (0..7)
        .map(|_| Guarded {
            storage: Storage::new(Buffer::alloc(8).expect("there is memory for this")),
            counters: Default::default(),
        })
        .collect();
    let written = on_threads(4, |me| {
        let mut random = Random::new(me);
        let mut written = [(0u64, 0u64); 7];
        let mut room = Room::default();
        for _ in 0..rounds(2000) {
            // In any order, some of them several times, in different roles.
            let uses: Vec<(usize, bool)> =
                (0..1 + random.below(9)).map(|_| (random.below(7), random.below(3) == 0)).collect();
            let locks = || uses.iter().map(|&(at, write)| (&all[at].storage, write));
            let roles: [Option<bool>; 7] = std::array::from_fn(|at| {
                uses.iter().filter(|used| used.0 == at).map(|used| used.1).reduce(|a, b| a | b)
            });
            let mut look = |versions: bool| {
                for (at, role) in roles.iter().enumerate() {
                    let Some(write) = *role else { continue };
                    all[at].look(write);
                    written[at].0 += u64::from(write);
                    written[at].1 += u64::from(write && versions);
                }
            };
            match random.below(3) {
                0 => {
                    let _guard = Guard::lock(locks());
                    look(false);
                }
                1 => {
                    let mut listed = room.list();
                    listed.extend(locks());
                    let locked = room.lock(listed, &[], &mut Vec::new());
                    look(true);
                    match random.below(2) {
                        0 => room.release(locked),
                        _ => drop(locked),
                    }
                }
                _ => {
                    // All of one call, so that every one of them may be locked together.
                    let mut uses: Vec<Use<'_>> =
                        locks().map(|(storage, write)| Use { storage, row: 0, write }).collect();
                    let _guard = Guard::lock_rows(&mut uses).expect("one call is in its own way nowhere");
                    look(false);
                }
            }
        }
        written
    });
    for (at, guarded) in all.iter().enumerate() {
        let [total, versions] =
            [0, 1].map(|i| -> u64 { written.iter().map(|w| if i == 0 { w[at].0 } else { w[at].1 }).sum() });
        assert_eq!(guarded.counters[0].load(Ordering::Relaxed), total);
        assert_eq!(guarded.storage.version(), versions, "a change was not counted");
    }
}

/// What a run hands to other threads.
enum Sent {
    Tensor(Tensor, Tag),
    Spare(Spare),
}

/// Clones, keeps and drops what comes. A slot that served again while somebody has it shows another tag.
fn meddle(sent: &Receiver<Sent>, storage: &Storage, random: &mut Random) {
    let mut kept: Vec<(Tensor, Tag)> = Vec::new();
    let check = |tensor: &Tensor, tag: Tag| {
        assert_eq!(tensor.tag(), tag, "the slot was given away");
        if let Some(ready) = tensor.try_ready() {
            assert_eq!(ready.storage.address(), storage.address());
        }
    };
    for sent in sent {
        match sent {
            Sent::Spare(spare) if random.below(2) == 0 => drop(spare),
            Sent::Spare(spare) => {
                // It is this thread's now.
                let (user, own) = spare.renew(Tag::new(9, 9), false);
                drop(user.clone());
                if random.below(2) == 0 {
                    kept.push((user, Tag::new(9, 9)));
                }
                assert!(own.release().is_ok());
            }
            Sent::Tensor(tensor, tag) => {
                check(&tensor, tag);
                (0..random.below(6)).for_each(|_| drop(tensor.clone()));
                (0..random.below(3)).for_each(|_| kept.push((tensor.clone(), tag)));
                if random.below(2) == 0 {
                    kept.push((tensor, tag));
                }
            }
        }
        while kept.len() > random.below(12) {
            let (tensor, tag) = kept.swap_remove(random.below(kept.len()));
            check(&tensor, tag);
        }
    }
}

/// A run: makes tensors, gives handles away, lets go of them some time later.
fn lead(to: &[Sender<Sent>], model: &Tensor, me: usize) {
    let mut random = Random::new(me);
    let mut held: Vec<(Option<Tensor>, Kept, Tag)> = Vec::new();
    let mut spares: Vec<Spare> = Vec::new();
    for number in 0..rounds(6000) as u32 {
        let tag = Tag::new(me as u32 + 1, number);
        let (user, kept) = match spares.pop() {
            Some(spare) => spare.renew(tag, false),
            None => Kept::lazy(tag, false),
        };
        for _ in 0..random.below(3) {
            to[random.below(to.len())].send(Sent::Tensor(user.clone(), tag)).expect("they listen");
        }
        (0..random.below(4)).for_each(|_| drop(user.clone()));
        held.push(((random.below(2) == 0).then_some(user), kept, tag));
        while held.len() > random.below(10) {
            let (user, kept, tag) = held.swap_remove(random.below(held.len()));
            assert_eq!(kept.tag(), tag);
            if user.is_some() {
                assert!(kept.is_shared() && kept.references() >= 2);
            }
            if random.below(2) == 0 {
                kept.publish(model.ready().expect("ready").clone());
            }
            let user = user.filter(|_| random.below(2) == 0);
            match (kept.release(), &user) {
                (Ok(Some(_)), Some(_)) => panic!("a tensor in use is no spare"),
                (Ok(Some(spare)), None) if random.below(8) == 0 => {
                    to[random.below(to.len())].send(Sent::Spare(spare)).expect("they listen");
                }
                (Ok(Some(spare)), None) => spares.push(spare),
                (Ok(None), _) => {}
                (Err(_), _) => panic!("this thread has the bias"),
            }
            if let Some(user) = user {
                assert_eq!(user.tag(), tag);
                let _ = to[random.below(to.len())].send(Sent::Tensor(user, tag));
            }
        }
    }
}

#[test]
fn biased_counts_come_out_whoever_clones_and_drops() {
    let model = Tensor::zeros([4], &Device::Cpu).expect("a small tensor fits");
    let storage = model.ready().expect("ready").storage.clone();
    let before = storage.references();
    on_threads(2, |me| {
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..2).map(|_| channel()).unzip();
        let (model, storage) = (&model, &storage);
        std::thread::scope(|scope| {
            let listeners: Vec<_> = receivers
                .into_iter()
                .enumerate()
                .map(|(i, sent)| {
                    scope.spawn(move || meddle(&sent, storage, &mut Random::new(10 * me + i + 7)))
                })
                .collect();
            lead(&senders, model, me);
            drop(senders);
            listeners.into_iter().for_each(|listener| listener.join().expect("no listener panics"));
        });
    });
    // Every slot that was made ready had a handle to it: none was forgotten, none let go of twice.
    assert_eq!(storage.references(), before);
}

#[test]
fn a_lazy_tensor_is_made_ready_once() {
    for round in 0..rounds(150) {
        let offers: Vec<Tensor> =
            (0..3).map(|i| Tensor::full([2], i as i64, &Device::Cpu).expect("a small tensor fits")).collect();
        let lazy = Tensor::lazy(Tag::new(1, round as u32), false);
        let arrived = AtomicUsize::new(0);
        let seen = on_threads(3, |me| {
            arrived.fetch_add(1, Ordering::Relaxed);
            while arrived.load(Ordering::Relaxed) < 3 {
                std::hint::spin_loop();
            }
            lazy.publish(offers[me].ready().expect("ready").clone());
            // The one that came too late may still see it lazy, for a moment.
            while lazy.is_lazy() {
                std::hint::spin_loop();
            }
            lazy.to_vec::<i64>().expect("ready")
        });
        assert!(seen.iter().all(|one| *one == seen[0]), "{seen:?}");
        let handles = || offers.iter().map(|offer| offer.ready().expect("ready").storage.references());
        assert_eq!(handles().sum::<usize>(), 4, "one of them is taken, the others are not");
        drop(lazy);
        assert_eq!(handles().sum::<usize>(), 3);
    }
}
