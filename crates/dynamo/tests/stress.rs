//! Compiled functions and other threads: lazy tensors read, cloned and dropped elsewhere while their run goes
//! on, one region called by many threads. `KILN_STRESS=n` runs it all n times as long.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use kiln_dynamo::{Backend, Compile};
use kiln_tensor::{Device, Result, Tensor};

const CPU: Device = Device::Cpu;

fn rounds(usual: usize) -> usize {
    usual * std::env::var("KILN_STRESS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize)
}

/// A stream of random numbers of its own for each seed (xorshift).
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % n
    }
}

/// Reads, keeps, clones and drops what comes, and checks every value that it looks at.
fn meddle(tensors: Receiver<(Tensor, f32)>, mut random: Random) -> usize {
    let mut kept: Vec<(Tensor, f32)> = Vec::new();
    let mut read = 0;
    for (tensor, value) in tensors {
        match random.below(4) {
            0 => drop(tensor),
            1 => kept.push((tensor.clone(), value)),
            2 => (0..random.below(20)).for_each(|_| drop(tensor.clone())),
            _ => kept.push((tensor, value)),
        }
        while kept.len() > random.below(8) {
            let (tensor, value) = kept.swap_remove(random.below(kept.len()));
            let got = tensor.to_vec::<f32>().expect("a tensor of a run that goes well");
            assert!(got.iter().all(|&x| x == value), "{got:?} instead of {value}");
            read += 1;
        }
    }
    read
}

#[test]
fn other_threads_read_what_a_run_has_not_computed() {
    for &backend in Backend::ALL {
        let region = Compile::new().backend(backend).region();
        let read = std::thread::scope(|scope| {
            let (senders, readers): (Vec<SyncSender<_>>, Vec<_>) = (0..2)
                .map(|seed| {
                    let (sender, receiver) = sync_channel(2);
                    (sender, scope.spawn(move || meddle(receiver, Random::new(seed + 1))))
                })
                .unzip();
            let mut random = Random::new(99);
            let x = Tensor::ones([5], &CPU).expect("a small tensor fits");
            for round in 0..rounds(1000) {
                let c = (round % 100) as f32;
                let (cut, to) = (random.below(4), &senders[random.below(2)]);
                // Now and then the run waits until the other thread has had it.
                let wait = random.below(4) == 0;
                let share = |at: usize, tensor: &Tensor, value: f32| {
                    let message = (tensor.clone(), value);
                    if cut != at && cut != 3 {
                        return;
                    }
                    if wait { to.send(message).expect("readers listen") } else { drop(to.try_send(message)) }
                };
                let last = region
                    .run(|| -> Result<Tensor> {
                        let a = (&x * c).ok()?;
                        share(0, &a, c);
                        let b = (&a + 1.0).ok()?;
                        share(1, &b, c + 1.0);
                        let e = (&b * 2.0).ok()?;
                        share(2, &e, 2.0 * c + 2.0);
                        drop((a, b));
                        (&e - 1.0).ok()
                    })
                    .expect("nothing in it can fail");
                assert_eq!(last.to_vec::<f32>().expect("ready"), [2.0 * c + 1.0; 5]);
            }
            drop(senders);
            readers.into_iter().map(|reader| reader.join().expect("no reader panics")).sum::<usize>()
        });
        assert!(read > 0, "{backend}: no tensor came to a reader");
    }
}

#[test]
fn a_change_in_place_happens_once_whoever_asks_for_it() -> Result<()> {
    for &backend in Backend::ALL {
        let region = Compile::new().backend(backend).region();
        let total = Tensor::zeros([7], &CPU)?;
        let done = AtomicBool::new(false);
        let calls = rounds(1000);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut last = 0.0;
                    while !done.load(Ordering::Relaxed) {
                        // Touching the memory finishes the run that has changes of it pending.
                        let now = total.to_vec::<f32>().expect("it is ready");
                        assert!(now.iter().all(|&x| x == now[0]), "half a change: {now:?}");
                        assert!(now[0] >= last, "{} after {last}", now[0]);
                        last = now[0];
                    }
                });
            }
            let mut random = Random::new(3);
            for _ in 0..calls {
                let _ = region.run(|| -> Result<()> {
                    total.add_(1.0)?;
                    (0..random.below(50)).for_each(|_| std::hint::spin_loop());
                    total.add_(1.0)?;
                    Ok(())
                });
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(total.to_vec::<f32>()?, [2.0 * calls as f32; 7], "{backend}");
    }
    Ok(())
}

#[test]
fn one_region_serves_many_threads() -> Result<()> {
    let region = Compile::new().region();
    let shared = Tensor::zeros([3, 4], &CPU)?;
    let column = shared.narrow(1, 1, 2)?;
    let failures = AtomicUsize::new(0);
    let calls = rounds(300);
    std::thread::scope(|scope| {
        for seed in 0..3u64 {
            let (region, shared, column, failures) = (&region, &shared, &column, &failures);
            scope.spawn(move || {
                let mut random = Random::new(seed + 11);
                let own = Tensor::zeros([16], &CPU).expect("a small tensor fits");
                for call in 0..calls {
                    let out = region.run(|| -> Result<Tensor> {
                        own.add_(1.0)?;
                        (&own * 3.0).ok()
                    });
                    let out = out.and_then(|out| out.to_vec::<f32>()).expect("nothing in it can fail");
                    assert_eq!(out, [3.0 * (call + 1) as f32; 16]);
                    // Memory that all change, through the base and through a view of it.
                    let target = if random.below(2) == 0 { shared } else { column };
                    let outcome = catch_unwind(AssertUnwindSafe(|| {
                        region.run(|| -> Result<()> {
                            target.add_(1.0)?;
                            target.sub_(1.0)?;
                            if call % 50 == 49 {
                                std::panic::panic_any("on purpose");
                            }
                            Ok(())
                        })
                    }));
                    match outcome {
                        Ok(outcome) => outcome.expect("nothing in it can fail"),
                        Err(payload) => {
                            assert_eq!(payload.downcast_ref::<&str>(), Some(&"on purpose"));
                            failures.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    assert_eq!(failures.into_inner(), 3 * (calls / 50));
    assert_eq!(shared.to_vec::<f32>()?, [0.0; 12]);
    Ok(())
}
