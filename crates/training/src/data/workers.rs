//! Threads that make numbered things ahead of their turn: taken in order, a bounded number at a time.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

use parking_lot::{Condvar, Mutex};

/// What makes number `n`; it may give up early once the flag is set, since nobody wants the result any more.
pub(super) type Make<T> = dyn Fn(usize, &AtomicBool) -> T + Send + Sync;

/// Threads at work on a range of numbers.
pub(super) struct Crew<T> {
    shared: Arc<Shared<T>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    /// Something was made, or a thread ended.
    made: Condvar,
    /// Something was taken, so that there is room for more.
    room: Condvar,
    stop: AtomicBool,
    /// How many may be made ahead of the one that is taken next.
    window: usize,
}

struct State<T> {
    /// The next one to make, and where the range ends.
    next: usize,
    end: usize,
    /// The next one to take.
    wanted: usize,
    made: HashMap<usize, T>,
    threads: usize,
}

impl<T: Send + 'static> Crew<T> {
    /// Starts up to `threads` threads, fewer if the system has no more; `None` if it has none at all.
    pub(super) fn start(
        threads: usize,
        range: Range<usize>,
        window: usize,
        make: Arc<Make<T>>,
    ) -> Option<Crew<T>> {
        let state = State {
            next: range.start,
            end: range.end,
            wanted: range.start,
            made: HashMap::new(),
            threads: 0,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            made: Condvar::new(),
            room: Condvar::new(),
            stop: AtomicBool::new(false),
            window: window.max(1),
        });
        let mut crew = Crew { shared, threads: Vec::new() };
        for number in 0..threads.min(range.len()) {
            let (shared, make) = (crew.shared.clone(), make.clone());
            shared.state.lock().threads += 1;
            let counted = Counted(shared);
            let started =
                Builder::new().name(format!("kiln-data-{number}")).spawn(move || counted.0.work(&*make));
            match started {
                Ok(thread) => crew.threads.push(thread),
                Err(_) => break,
            }
        }
        (!crew.threads.is_empty()).then_some(crew)
    }

    /// The next one in order; `None` if there is no other, or if the thread that was at it is gone.
    pub(super) fn take(&self) -> Option<T> {
        let mut state = self.shared.state.lock();
        let wanted = state.wanted;
        loop {
            if let Some(thing) = state.made.remove(&wanted) {
                state.wanted += 1;
                self.shared.room.notify_all();
                return Some(thing);
            }
            if wanted >= state.end || state.threads == 0 {
                state.wanted += 1;
                return None;
            }
            self.shared.made.wait(&mut state);
        }
    }
}

impl<T> Shared<T> {
    fn work(&self, make: &Make<T>) {
        while let Some(number) = self.claim() {
            let thing = make(number, &self.stop);
            self.state.lock().made.insert(number, thing);
            self.made.notify_all();
        }
    }

    /// The number to make next, once there is room for it.
    fn claim(&self) -> Option<usize> {
        let mut state = self.state.lock();
        loop {
            if state.next >= state.end || self.stop.load(Ordering::Relaxed) {
                return None;
            }
            // What is wanted next is always within the window, so somebody can go on.
            if state.next < state.wanted + self.window {
                state.next += 1;
                return Some(state.next - 1);
            }
            self.room.wait(&mut state);
        }
    }
}

/// A thread that counts as long as it is there, however it ends.
struct Counted<T>(Arc<Shared<T>>);

impl<T> Drop for Counted<T> {
    fn drop(&mut self) {
        self.0.state.lock().threads -= 1;
        self.0.made.notify_all();
    }
}

impl<T> Drop for Crew<T> {
    fn drop(&mut self) {
        {
            // Under the lock: a thread that has just looked at the flag is asleep before it is woken.
            let _state = self.shared.state.lock();
            self.shared.stop.store(true, Ordering::Relaxed);
        }
        self.shared.room.notify_all();
        for thread in self.threads.drain(..) {
            // A panic has been told where it was missed.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    #[test]
    fn everything_comes_in_order() {
        for threads in [1, 2, 5] {
            let make = |number: usize, _: &AtomicBool| {
                std::thread::sleep(Duration::from_micros((number as u64 * 37) % 300));
                number
            };
            let crew = Crew::start(threads, 3..60, 4, Arc::new(make)).expect("threads");
            for expected in 3..60 {
                assert_eq!(crew.take(), Some(expected));
            }
            assert_eq!(crew.take(), None);
        }
    }

    #[test]
    fn no_more_than_the_window_is_made_ahead() {
        let (made, greatest) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (count, most) = (made.clone(), greatest.clone());
        let make = move |number: usize, _: &AtomicBool| {
            count.fetch_add(1, Ordering::SeqCst);
            most.fetch_max(number, Ordering::SeqCst);
        };
        let crew = Crew::start(3, 0..100, 5, Arc::new(make)).expect("threads");
        for taken in 0..10 {
            std::thread::sleep(Duration::from_millis(5));
            assert!(greatest.load(Ordering::SeqCst) < taken + 5);
            crew.take();
        }
        drop(crew);
        assert!(made.load(Ordering::SeqCst) <= 15);
    }

    #[test]
    fn who_dies_leaves_a_gap_and_no_hang() {
        let make = |number: usize, _: &AtomicBool| {
            assert!(number < 2, "beyond");
            number
        };
        let crew = Crew::start(1, 0..5, 2, Arc::new(make)).expect("a thread");
        let taken: Vec<Option<usize>> = (0..5).map(|_| crew.take()).collect();
        assert_eq!(taken, [Some(0), Some(1), None, None, None]);
    }
}
