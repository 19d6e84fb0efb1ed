//! The fork, and what is done on either side of it.

use std::any::Any;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{Fate, Limits};
use crate::{cache, threads};

/// How long the parent listens before it looks for the child itself. It usually hears at once that the pipe was
/// closed, unless a process that another thread started in the same moment has its end as well.
const LISTEN: Duration = Duration::from_millis(20);

/// The same where the child has closed its pipe, and so is about to end.
const ENDING: Duration = Duration::from_millis(1);

/// So much is read at once, and so often before the parent looks at the clock: a pipe holds less than that.
const PART: usize = 1 << 16;
const PARTS: usize = 16;

/// So much is remembered of what the child writes to its standard error.
const LAST_WORDS: usize = 1 << 16;

/// What Rust writes before it aborts for want of memory.
const ALLOCATION_FAILED: &str = "memory allocation of ";
/// What the storage pool writes when it is refused memory.
const POOL_REFUSED: &str = "kiln: the storage pool was refused memory\n";

static IS_ISOLATED: AtomicBool = AtomicBool::new(false);

pub(super) fn is_isolated() -> bool {
    IS_ISOLATED.load(Ordering::Relaxed)
}

pub(super) fn memory_refused() {
    if is_isolated() {
        // SAFETY: the bytes of a constant. Where the output was closed nobody hears of it.
        unsafe { libc::write(libc::STDERR_FILENO, POOL_REFUSED.as_ptr().cast(), POOL_REFUSED.len()) };
    }
}

pub(super) fn isolate(limits: &Limits, body: impl FnOnce() -> Vec<u8>) -> io::Result<Fate> {
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    let (mut results, to_results) = Ear::new()?;
    let (mut words, to_words) = Ear::new()?;
    let memory = match limits.memory {
        Some(bytes) => Some(private_bytes()?.saturating_add(bytes)),
        None => None,
    };
    cache::settle();
    if limits.prints {
        // What is buffered here must not be printed there, too. A closed output has nothing to lose.
        let _ = io::stdout().flush();
    }
    let start = Instant::now();
    let parent = std::process::id();
    // SAFETY: the child leaves by `_exit`. That it runs ordinary code, though only one thread is left, is what the
    // module's note is about: the C library makes its own locks usable, the child renews the thread pool.
    let pid = check(unsafe { libc::fork() })?;
    if pid == 0 {
        drop((results, words));
        let inheritance =
            Inheritance { parent, null, results: to_results, words: to_words, memory, prints: limits.prints };
        live(inheritance, body);
    }
    let mut child = Child { pid, is_reaped: false };
    // SAFETY: no pointers. Whoever of the two comes first makes the group: neither may run ahead of it.
    unsafe { libc::setpgid(pid, pid) };
    drop((to_results, to_words));

    let heard = child.listen(&mut results, &mut words, start, limits)?;
    let status = child.end()?;
    let last_words = String::from_utf8_lossy(&words.heard);
    let was_refused = [ALLOCATION_FAILED, POOL_REFUSED].iter().any(|text| last_words.contains(text));
    Ok(match heard {
        Heard::Nothing => Fate::TimedOut,
        Heard::Message(RETURNED, bytes) => Fate::Returned(bytes),
        _ if was_refused => Fate::OutOfMemory,
        Heard::Message(_, text) => Fate::Panicked(String::from_utf8_lossy(&text).into_owned()),
        Heard::End => match (status.signal(), status.code()) {
            (Some(signal), _) => Fate::Killed(signal),
            (None, code) => Fate::Exited(code.unwrap_or(-1)),
        },
    })
}

/// Bytes of private memory that can be written, as `RLIMIT_DATA` counts them.
fn private_bytes() -> io::Result<usize> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"));
    let number = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok());
    number.map(|number| number << 10).ok_or_else(|| io::Error::other("/proc/self/status has no VmData"))
}

/// The result of a system call.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

// [Note: what the child says]
//
// A kind (a byte), a length (eight), and so many bytes. What is not whole was never said.

const RETURNED: u8 = 1;
const PANICKED: u8 = 2;
const HEADER: usize = 9;

fn header(kind: u8, length: usize) -> [u8; HEADER] {
    let mut header = [kind; HEADER];
    header[1..].copy_from_slice(&(length as u64).to_le_bytes());
    header
}

/// The kind of a message of which this much has been heard, if it is whole.
fn whole(heard: &[u8]) -> Option<u8> {
    let (header, bytes) = heard.split_first_chunk::<HEADER>()?;
    let length = u64::from_le_bytes(*header.last_chunk()?);
    (bytes.len() as u64 >= length).then_some(header[0])
}

/// What the child gets from its parent.
struct Inheritance {
    parent: u32,
    null: File,
    results: PipeWriter,
    /// For its standard error.
    words: PipeWriter,
    /// The most private bytes.
    memory: Option<usize>,
    prints: bool,
}

/// The child's life.
fn live(mut inheritance: Inheritance, body: impl FnOnce() -> Vec<u8>) -> ! {
    let lived = catch_unwind(AssertUnwindSafe(|| {
        settle_in(&inheritance);
        threads::after_fork();
        if !inheritance.prints {
            // Nobody would read what the hook prints, and a backtrace takes long.
            std::panic::set_hook(Box::new(|_| ()));
        }
        body()
    }));
    let (kind, bytes) = match lived {
        Ok(bytes) => (RETURNED, bytes),
        Err(payload) => {
            let text = message(&*payload).as_bytes().to_vec();
            // Not dropped: it may panic when it is.
            std::mem::forget(payload);
            (PANICKED, text)
        }
    };
    let results = &mut inheritance.results;
    // A parent that does not listen any more needs no answer.
    let _ = results.write_all(&header(kind, bytes.len())).and_then(|()| results.write_all(&bytes));
    // SAFETY: ends the process at once; what its parent registered for the end is the parent's.
    unsafe { libc::_exit(0) }
}

fn message(payload: &(dyn Any + Send)) -> &str {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (None, Some(text)) => text,
        (None, None) => "a value that is no text",
    }
}

/// Makes the process one that can be killed with all it starts, that keeps its limits and leaves no traces.
fn settle_in(inheritance: &Inheritance) {
    IS_ISOLATED.store(true, Ordering::Relaxed);
    let (null, words) = (inheritance.null.as_raw_fd(), inheritance.words.as_raw_fd());
    // SAFETY: numbers only, descriptors that are open or standard, and a struct of this function.
    unsafe {
        libc::setpgid(0, 0);
        // Without its parent nobody limits its time. One that was gone before that can't send anything.
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::getppid() as u32 != inheritance.parent {
            libc::_exit(1);
        }
        libc::dup2(null, libc::STDIN_FILENO);
        if !inheritance.prints {
            libc::dup2(null, libc::STDOUT_FILENO);
        }
        libc::dup2(words, libc::STDERR_FILENO);
        // A crash here is an answer, no reason to fill the disk with what there was in memory.
        let memory = inheritance.memory.map(|bytes| bytes as libc::rlim_t);
        for (resource, most) in [(libc::RLIMIT_DATA, memory), (libc::RLIMIT_CORE, Some(0))] {
            let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            if let Some(most) = most
                && libc::getrlimit(resource, &mut limit) == 0
            {
                limit.rlim_cur = most.min(limit.rlim_max);
                libc::setrlimit(resource, &limit);
            }
        }
    }
}

/// The parent's end of a pipe.
struct Ear {
    pipe: PipeReader,
    heard: Vec<u8>,
    is_open: bool,
}

impl Ear {
    /// It, and the child's end.
    fn new() -> io::Result<(Ear, PipeWriter)> {
        let (pipe, other) = io::pipe()?;
        // SAFETY: the descriptor is open, and the flag takes no pointer.
        check(unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) })?;
        Ok((Ear { pipe, heard: Vec::new(), is_open: true }, other))
    }

    /// Hears all that is in the pipe; returns what is new.
    fn hear(&mut self) -> io::Result<&[u8]> {
        let (before, mut part) = (self.heard.len(), [0; PART]);
        for _ in 0..PARTS {
            if !self.is_open {
                break;
            }
            match self.pipe.read(&mut part) {
                Ok(0) => self.is_open = false,
                Ok(count) => self.heard.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(&self.heard[before..])
    }

    /// For `poll`, which leaves -1 alone.
    fn question(&self) -> libc::pollfd {
        let fd = if self.is_open { self.pipe.as_raw_fd() } else { -1 };
        libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
    }
}

/// What the parent has heard.
enum Heard {
    Message(u8, Vec<u8>),
    /// The child ended without a word.
    End,
    /// Time was over.
    Nothing,
}

/// A child that is killed, with its group, and reaped whatever happens.
struct Child {
    pid: libc::pid_t,
    is_reaped: bool,
}

impl Child {
    /// Waits for its message or its end.
    fn listen(
        &self,
        results: &mut Ear,
        words: &mut Ear,
        start: Instant,
        limits: &Limits,
    ) -> io::Result<Heard> {
        loop {
            // Asked before the pipes are emptied: what it said before it ended is in there. Words come second: what it
            // wrote before its message is in there.
            let has_ended = self.has_ended()?;
            results.hear()?;
            let new = words.hear()?;
            if limits.prints {
                // Nobody hears what a closed output does not take.
                let _ = io::stderr().write_all(new);
            }
            let excess = words.heard.len().saturating_sub(LAST_WORDS);
            words.heard.drain(..excess);

            if let Some(kind) = whole(&results.heard) {
                let mut message = std::mem::take(&mut results.heard);
                message.drain(..HEADER);
                return Ok(Heard::Message(kind, message));
            }
            if has_ended {
                return Ok(Heard::End);
            }
            let Some(left) = limits.time.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) else {
                return Ok(Heard::Nothing);
            };
            let most = left.min(if results.is_open { LISTEN } else { ENDING });
            let mut questions = [results.question(), words.question()];
            let milliseconds = most.as_micros().div_ceil(1000) as libc::c_int;
            // SAFETY: two structs, of this function.
            match check(unsafe { libc::poll(questions.as_mut_ptr(), 2, milliseconds) }) {
                Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
    }

    /// Whether it has ended. It stays to be reaped, so its number, which is its group's, is not another's yet.
    fn has_ended(&self) -> io::Result<bool> {
        let how = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        // SAFETY: plain data, for which zeros are a value, and which the call writes to if there is something to tell.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            check(libc::waitid(libc::P_PID, self.pid as libc::id_t, &mut info, how))?;
            Ok(info.si_pid() == self.pid)
        }
    }

    /// Kills what is left of its group, and reaps it.
    fn end(&mut self) -> io::Result<ExitStatus> {
        // SAFETY: the group is the child's, which has not been reaped.
        unsafe { libc::kill(-self.pid, libc::SIGKILL) };
        self.is_reaped = true;
        let mut status = 0;
        loop {
            // SAFETY: writes to the integer given.
            match check(unsafe { libc::waitpid(self.pid, &mut status, 0) }) {
                Ok(_) => return Ok(ExitStatus::from_raw(status)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.is_reaped {
            // There is an error to return already.
            let _ = self.end();
        }
    }
}
