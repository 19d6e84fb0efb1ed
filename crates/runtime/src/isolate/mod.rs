//! A closure in a process of its own: to its caller a crash, a hang or too much memory is a value, like a result.
//! Made for looking for the smallest program that fails, where most candidates fail in some way of their own.
//!
//! ```
//! use std::time::Duration;
//!
//! use kiln_runtime::isolate::{Fate, Limits, isolate};
//!
//! # if !cfg!(target_os = "linux") { return Ok(()) }
//! let limits = Limits { memory: Some(1 << 30), ..Limits::of(Duration::from_secs(10)) };
//! assert_eq!(isolate(&limits, || vec![1, 2, 3])?, Fate::Returned(vec![1, 2, 3]));
//! assert_eq!(isolate(&limits, || panic!("item {}", 7))?, Fate::Panicked("item 7".into()));
//! assert_eq!(isolate(&limits, || std::process::abort())?.to_string(), "killed by SIGABRT");
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! It takes 0.3 ms in a small process; the tables of memory that a fork copies add up to 40 ms for each GiB that is in
//! use here.
//!
//! [Note: what a fork leaves behind]
//! The child has a copy of all memory, but only one thread, its caller's. What is set right for it:
//!
//! - **The thread pool.** The workers are gone, and one that was about to leave a region would be waited for without
//!   end. So the child gets a new pool, whose workers start with its first region.
//! - **The C compiler.** `KernelCache::global` asks it who it is on a thread that holds a lock meanwhile; the parent
//!   waits for the answer before it forks. Compilers that the child starts stay in its process group, which is
//!   killed as a whole when the child ends, however it ends.
//! - **Files.** Names of temporary files hold the process's number or the system's random numbers, and the cache on disk
//!   is made for many processes: what one child compiles, the parent and the next child find there. A child that is
//!   killed while it compiles leaves a folder in the cache, which goes like every leftover.
//!
//! What a caller has to respect:
//!
//! - **Other threads must be idle**: asleep, or waiting for a channel or a `std` lock. A lock that another thread holds
//!   at the fork (of a storage, of the kernel cache, of the panic hook while it panics) stays locked in the child,
//!   which then runs until its time is over; threads that wait for a `parking_lot` lock stay in its queue. Where the
//!   thread pool itself stands does not matter.
//! - **The body may use what lies on the heap, on its own thread's stack and on the main thread's.** The stacks of other
//!   threads are given to the threads that the child starts, so it must not use what a scoped thread borrowed there.
//! - **Other devices don't survive a fork**: their drivers refuse to work in the child.
//! - Random number generators go on from the same state in every child. Files that were open share their position with
//!   the parent.
//!
//! [Note: what counts as out of memory]
//! The limit is on private memory that can be written (`RLIMIT_DATA`), stacks of new threads included. One on the
//! address space (`RLIMIT_AS`) would count what is only reserved: 64 MiB for the heap of each thread, far more for a
//! device or a sanitizer. Each compiler that the child starts has the same limit for itself.
//!
//! That memory was refused is read from the child's standard error, which the parent listens to: Rust writes a line
//! there before it aborts, and so does the storage pool when it returns an error. Kernels have no other memory than the
//! pool's. What goes on after a refusal and returns has returned; what panics, dies or exits afterwards was out of
//! memory. A process that the system itself ends for want of memory was killed by `SIGKILL`.

#[cfg(target_os = "linux")]
mod linux;

use std::fmt;
use std::io;
use std::time::Duration;

/// What a child may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Time, as the clock on the wall has it.
    pub time: Duration,
    /// Bytes of memory besides what the process has when it forks; see the [module](self) for what is counted.
    pub memory: Option<usize>,
    /// Whether what it prints is seen. If not, panic hooks are not called either.
    pub prints: bool,
}

impl Limits {
    /// A limit to the time; as much memory as there is, and nothing it prints is seen.
    pub const fn of(time: Duration) -> Limits {
        Limits { time, memory: None, prints: false }
    }
}

/// What became of a child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// It returned these bytes.
    Returned(Vec<u8>),
    /// It panicked, with this message.
    Panicked(String),
    /// A signal ended it: [`signal_name`](Fate::signal_name).
    Killed(i32),
    /// It was still running when its time was over.
    TimedOut,
    /// It panicked, died or exited after it had been refused memory.
    OutOfMemory,
    /// It ended its process itself, with this code.
    Exited(i32),
}

/// The signals that end processes, by name.
const SIGNALS: &[(i32, &str)] = &[
    (libc::SIGHUP, "SIGHUP"),
    (libc::SIGINT, "SIGINT"),
    (libc::SIGQUIT, "SIGQUIT"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGTRAP, "SIGTRAP"),
    (libc::SIGABRT, "SIGABRT"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGKILL, "SIGKILL"),
    (libc::SIGUSR1, "SIGUSR1"),
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGUSR2, "SIGUSR2"),
    (libc::SIGPIPE, "SIGPIPE"),
    (libc::SIGALRM, "SIGALRM"),
    (libc::SIGTERM, "SIGTERM"),
    (libc::SIGXCPU, "SIGXCPU"),
    (libc::SIGXFSZ, "SIGXFSZ"),
    (libc::SIGSYS, "SIGSYS"),
];

impl Fate {
    /// The name of the signal that ended it.
    pub fn signal_name(&self) -> Option<&'static str> {
        let Fate::Killed(signal) = self else { return None };
        let named = SIGNALS.iter().find(|(number, _)| number == signal);
        Some(named.map_or("an unusual signal", |(_, name)| name))
    }
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fate::Returned(bytes) => write!(f, "returned {} bytes", bytes.len()),
            Fate::Panicked(message) => write!(f, "panicked: {message}"),
            Fate::Killed(_) => write!(f, "killed by {}", self.signal_name().unwrap_or_default()),
            Fate::TimedOut => f.write_str("timed out"),
            Fate::OutOfMemory => f.write_str("out of memory"),
            Fate::Exited(code) => write!(f, "exited with code {code}"),
        }
    }
}

/// Runs `body` in a forked child, and waits until it has ended or its time is over. Nothing that it does, short of
/// writing files, changes this process; no process that it started in its group is left.
///
/// An error means that the child could not be started or was lost; on systems other than Linux it always is
/// [`Unsupported`](io::ErrorKind::Unsupported). The [module](self) says what other threads may be doing meanwhile.
pub fn isolate(limits: &Limits, body: impl FnOnce() -> Vec<u8>) -> io::Result<Fate> {
    #[cfg(target_os = "linux")]
    return linux::isolate(limits, body);
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (limits, body);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Whether this process is such a child.
pub fn is_isolated() -> bool {
    #[cfg(target_os = "linux")]
    return linux::is_isolated();
    #[cfg(not(target_os = "linux"))]
    false
}

/// The storage pool was refused memory: the child's parent hears of it.
#[cold]
pub(crate) fn memory_refused() {
    #[cfg(target_os = "linux")]
    linux::memory_refused();
}
