//! Closures in processes of their own: every way to end, and that nothing is left of them. The tests take turns, because
//! other threads must be idle at a fork; they wait for each other at a lock of `std`, as the module's note asks.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::fs;
use std::hint::{black_box, spin_loop};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kiln_runtime::isolate::{Fate, Limits, is_isolated, isolate};
use kiln_runtime::owner::OwnerLock;
use kiln_runtime::{Args, Buffer, Compiler, Kernel, KernelCache, Origin, Source, parallel_for, threads};

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Time enough for everything that ends.
const LIMITS: Limits = Limits::of(Duration::from_secs(60));
/// And memory for everything that is not greedy.
const BOUNDED: Limits = Limits { memory: Some(256 << 20), ..LIMITS };

fn fate(limits: &Limits, body: impl FnOnce() -> Vec<u8>) -> Fate {
    isolate(limits, body).unwrap()
}

/// A private folder, removed at the end of the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kiln-isolate-test-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn results_of_all_sizes() {
    let _turn = turn();
    for length in [0, 1, 1 << 16, 10_000_000] {
        let expected: Vec<u8> = (0..length).map(|at: usize| (at % 251) as u8).collect();
        let made = fate(&LIMITS, || (0..length).map(|at: usize| (at % 251) as u8).collect());
        assert!(made == Fate::Returned(expected), "{length} bytes");
    }
    assert!(!is_isolated());
    assert_eq!(fate(&LIMITS, || vec![is_isolated().into()]), Fate::Returned(vec![1]));
}

#[test]
fn the_child_changes_nothing_here() {
    let _turn = turn();
    struct Bomb<'a>(&'a AtomicUsize);
    impl Drop for Bomb<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let drops = AtomicUsize::new(0);
    let kept = Bomb(&drops);
    let ended = fate(&LIMITS, || {
        drops.fetch_add(100, Ordering::Relaxed);
        vec![drops.load(Ordering::Relaxed) as u8]
    });
    assert_eq!(ended, Fate::Returned(vec![100]));
    assert_eq!(drops.load(Ordering::Relaxed), 0);
    drop(kept);
    assert_eq!(drops.load(Ordering::Relaxed), 1);
}

#[test]
fn panics_with_their_messages() {
    let _turn = turn();
    assert_eq!(fate(&LIMITS, || panic!("text")), Fate::Panicked("text".into()));
    assert_eq!(fate(&LIMITS, || panic!("number {}", 7)), Fate::Panicked("number 7".into()));
    let odd = fate(&LIMITS, || std::panic::panic_any(7));
    assert_eq!(odd, Fate::Panicked("a value that is no text".into()));
    let on_a_worker = fate(&LIMITS, || {
        parallel_for(100, 1, |begin, end| assert!(!(begin..end).contains(&99), "item 99"));
        vec![]
    });
    assert_eq!(on_a_worker, Fate::Panicked("item 99".into()));
}

/// Reads or writes where nothing is.
fn touch(address: usize) -> Vec<u8> {
    // SAFETY: none: it is what the test is about, in a process that has nothing to lose.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(black_box(address)).write_volatile(1) };
    vec![]
}

#[test]
fn signals_have_names() {
    let _turn = turn();
    // With a limit on memory, which is not why they die.
    for (signal, name) in [(libc::SIGILL, "SIGILL"), (libc::SIGABRT, "SIGABRT"), (libc::SIGFPE, "SIGFPE")] {
        // SAFETY: no pointers.
        let ended = fate(&BOUNDED, || vec![unsafe { libc::raise(signal) } as u8]);
        assert_eq!((&ended, ended.signal_name()), (&Fate::Killed(signal), Some(name)));
        assert_eq!(ended.to_string(), format!("killed by {name}"));
    }
    assert_eq!(fate(&BOUNDED, || touch(8)), Fate::Killed(libc::SIGSEGV));
    assert_eq!(fate(&BOUNDED, || std::process::abort()), Fate::Killed(libc::SIGABRT));
    #[allow(unconditional_recursion, reason = "it is to use up the stack")]
    fn deeper(depth: usize) -> usize {
        black_box(deeper(black_box(depth + 1))) + 1
    }
    // Rust's own handler of overflows aborts.
    assert_eq!(fate(&BOUNDED, || vec![deeper(0) as u8]), Fate::Killed(libc::SIGABRT));
    assert_eq!(fate(&LIMITS, || std::process::exit(3)), Fate::Exited(3));
}

/// Whether a process is there and not only waiting to be reaped by whoever does that.
fn lives(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn dies(pid: &str) -> bool {
    let start = Instant::now();
    while lives(pid) && start.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(1));
    }
    !lives(pid)
}

fn forever() -> Vec<u8> {
    loop {
        std::thread::sleep(Duration::from_secs(100));
    }
}

/// What the child wrote there.
fn number_in(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

#[test]
fn a_hang_ends_with_all_it_started() {
    let _turn = turn();
    let folder = Folder::new("hang");
    let limits = Limits::of(Duration::from_secs(1));
    let pid_file = folder.0.join("pid");
    for hangs in [true, false] {
        let start = Instant::now();
        let ended = fate(&limits, || {
            #[allow(clippy::zombie_processes, reason = "it is to outlive its parent, if it can")]
            let sleep = Command::new("sleep").arg("100").stdout(Stdio::null()).spawn().unwrap();
            fs::write(&pid_file, sleep.id().to_string()).unwrap();
            assert!(lives(&sleep.id().to_string()));
            if hangs { forever() } else { vec![] }
        });
        assert_eq!(ended, if hangs { Fate::TimedOut } else { Fate::Returned(vec![]) });
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        assert!(dies(&number_in(&pid_file)));
    }
}

#[test]
fn a_child_without_its_pipes_is_not_forgotten() {
    let _turn = turn();
    let close_all = || {
        for descriptor in 0..100 {
            // SAFETY: what belongs to the descriptors is not used in this process any more.
            unsafe { libc::close(descriptor) };
        }
    };
    let short = Limits::of(Duration::from_millis(50));
    let start = Instant::now();
    let hangs = || {
        close_all();
        forever()
    };
    assert_eq!(fate(&short, hangs), Fate::TimedOut);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let returns = || {
        close_all();
        vec![1]
    };
    assert_eq!(fate(&LIMITS, returns), Fate::Exited(0));
}

#[test]
fn a_compiler_that_hangs_ends_with_the_child() {
    let _turn = turn();
    let folder = Folder::new("compiler");
    let (script, pid_file) = (folder.0.join("slow-cc"), folder.0.join("pid"));
    // The driver is a shell, which waits for a child of its own.
    let text = format!("#!/bin/sh\nsleep 100 &\necho $! > {}\nwait\n", pid_file.display());
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
    let compile = |time_limit: Duration| {
        let compiler = Compiler::named(script.to_str().unwrap()).unwrap().with_time_limit(time_limit);
        let error = compiler.compile_shared("", &[], &folder.0.join("k.so")).unwrap_err();
        error.to_string().into_bytes()
    };
    assert_eq!(
        fate(&Limits::of(Duration::from_secs(1)), || compile(Duration::from_secs(60))),
        Fate::TimedOut
    );
    assert!(dies(&number_in(&pid_file)));
    // Its own time limit works there, too, and what the driver leaves behind ends with the child.
    fs::remove_file(&pid_file).unwrap();
    let ended = fate(&LIMITS, || compile(Duration::from_secs(1)));
    let Fate::Returned(error) = ended else { panic!("{ended}") };
    assert!(String::from_utf8(error).unwrap().contains("ran longer"));
    assert!(dies(&number_in(&pid_file)));
}

#[test]
fn out_of_memory_in_every_way() {
    let _turn = turn();
    // Rust: at once, and little by little.
    assert_eq!(fate(&BOUNDED, || black_box(vec![1; 4 << 30])), Fate::OutOfMemory);
    let hoard = || {
        let mut all: Vec<Vec<u8>> = Vec::new();
        loop {
            all.push(black_box(vec![1; 1 << 12]));
        }
    };
    assert_eq!(fate(&BOUNDED, hoard), Fate::OutOfMemory);
    // The storage pool, with large and small blocks, and more than there could ever be.
    for bytes in [16 << 20, 100, 1 << 45] {
        let take = || {
            let mut all = Vec::new();
            loop {
                all.push(Buffer::alloc(bytes).expect("as much as there is"));
            }
        };
        assert_eq!(fate(&BOUNDED, take), Fate::OutOfMemory, "{bytes}");
    }
    // On a worker's thread.
    let on_a_worker = || {
        threads::set_count(4);
        parallel_for(100, 1, |_, _| _ = black_box(vec![1u8; 4 << 30]));
        vec![]
    };
    assert_eq!(fate(&BOUNDED, on_a_worker), Fate::OutOfMemory);
}

#[test]
fn what_fits_is_given() {
    let _turn = turn();
    // The limit is on what comes on top, whatever there is already.
    let here = black_box(vec![1u8; 300 << 20]);
    let modest = || {
        threads::set_count(8);
        let all: Vec<Buffer> = (0..10).map(|_| Buffer::alloc(16 << 20).unwrap()).collect();
        parallel_for(all.len(), 1, |begin, end| {
            for buffer in &all[begin..end] {
                // SAFETY: each buffer is one thread's.
                unsafe { buffer.as_ptr().write_bytes(7, buffer.bytes()) };
            }
        });
        vec![here[0]]
    };
    assert_eq!(fate(&BOUNDED, modest), Fate::Returned(vec![1]));
    // Who can do without has not failed.
    let patient = || {
        vec![Buffer::alloc(1 << 30).is_err().into(), Vec::<u8>::new().try_reserve(1 << 30).is_err().into()]
    };
    assert_eq!(fate(&BOUNDED, patient), Fate::Returned(vec![1, 1]));
}

/// A region in which so many threads meet: it ends if they all come.
fn meet(threads: usize) {
    let there = AtomicUsize::new(0);
    parallel_for(threads, 1, |_, _| {
        there.fetch_add(1, Ordering::Relaxed);
        while there.load(Ordering::Relaxed) < threads {
            std::thread::yield_now();
        }
    });
}

#[test]
fn regions_have_workers_there() {
    let _turn = turn();
    let before = threads::count();
    threads::set_count(4);
    meet(4);
    let regions = || {
        (0..20).for_each(|_| meet(4));
        vec![]
    };
    assert_eq!(fate(&LIMITS, regions), Fate::Returned(vec![]));
    // Forked inside a region, on whichever thread.
    parallel_for(4, 1, |_, _| assert_eq!(fate(&LIMITS, regions), Fate::Returned(vec![])));
    meet(4);
    threads::set_count(before);
}

#[test]
fn regions_that_run_at_the_fork() {
    let _turn = turn();
    let before = threads::count();
    threads::set_count(3);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                parallel_for(3, 1, |_, _| (0..100).for_each(|_| spin_loop()));
            }
        });
        for round in 0..50 {
            let ended = fate(&Limits::of(Duration::from_secs(20)), || {
                (0..5).for_each(|_| meet(3));
                vec![]
            });
            assert_eq!(ended, Fate::Returned(vec![]), "round {round}");
        }
        done.store(true, Ordering::Relaxed);
    });
    threads::set_count(before);
}

#[test]
fn owner_locks_are_kept_apart_there() {
    let _turn = turn();
    let lock = OwnerLock::new(0u64);
    assert!(lock.own());
    *lock.lock() += 1;
    let ended = fate(&LIMITS, || {
        // SAFETY: this command takes no pointers. That the process is registered for it is inherited.
        let barrier =
            unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) };
        std::thread::scope(|scope| {
            scope.spawn(|| (0..1000).for_each(|_| *lock.lock() += 1));
            (0..1000).for_each(|_| *lock.lock() += 1);
        });
        vec![(barrier == 0).into(), (*lock.lock() == 2001).into()]
    });
    assert_eq!(ended, Fate::Returned(vec![1, 1]));
    assert_eq!(*lock.lock(), 1);
}

#[test]
fn kernels_are_compiled_there_and_found_here() {
    let _turn = turn();
    let folder = Folder::new("kernels");
    let source = Source::new(
        "int twice(char *const *bufs, const long *ints, const double *scalars, long begin, long end, char *scratch) {
            for (long i = begin; i < end; i++) ((float *)bufs[0])[i] *= 2.0f;
            return 0;
        }",
        &["-O1"],
    );
    let load = || {
        let loaded = KernelCache::at(&folder.0).load(&source).unwrap();
        let kernel = Kernel::new(loaded.library, "twice").unwrap();
        let mut x = vec![1.5f32; 10_000];
        let args = Args { bufs: &[x.as_mut_ptr().cast()], ints: &[], scalars: &[] };
        // SAFETY: the kernel touches x[begin..end] only.
        assert_eq!(unsafe { kernel.launch(&args, 10_000, 64, 0) }, 0);
        assert!(x.iter().all(|x| *x == 3.0));
        loaded.origin
    };
    let there = || vec![(load() == Origin::Compiler).into()];
    assert_eq!(fate(&BOUNDED, there), Fate::Returned(vec![1]));
    assert_eq!(fate(&BOUNDED, there), Fate::Returned(vec![0]));
    assert_eq!(load(), Origin::Disk);
}

/// A kernel that does nothing.
const NOTHING: &str =
    "int nothing(char *const *bufs, const long *ints, const double *scalars, long begin, long end, char *scratch)
     { return 0; }";

#[test]
#[ignore = "started by the test below, with a compiler of its own"]
fn a_fork_while_the_compiler_is_asked() {
    // Where there was no cache, a thread asks the compiler who it is.
    let cache = KernelCache::global();
    let is_asked = PathBuf::from(std::env::var_os("KILN_TEST_ASKED").unwrap());
    while !is_asked.exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let there = || {
        cache.load(&Source::new(NOTHING, &["-O1"])).unwrap();
        vec![]
    };
    assert_eq!(fate(&Limits::of(Duration::from_secs(20)), there), Fate::Returned(vec![]));
}

#[test]
fn a_compiler_that_is_being_asked_is_waited_for() {
    let _turn = turn();
    let folder = Folder::new("asked");
    let script = folder.0.join("thoughtful-cc");
    let text = "#!/bin/sh
        case $1 in --version) touch \"$KILN_TEST_ASKED\"; sleep 0.5 ;; esac
        exec cc \"$@\"";
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "a_fork_while_the_compiler_is_asked"])
        .env("KILN_CC", &script)
        .env("KILN_TEST_ASKED", folder.0.join("asked"))
        .env("KILN_CACHE_DIR", folder.0.join("cache"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn words_are_heard_and_forgotten() {
    let _turn = turn();
    let line = "memory is not what this is about".repeat(100);
    let talk = |lines: usize| {
        // SAFETY: the bytes of a string. Printed as C does: macros would leave it to the test's own buffer.
        (0..lines).for_each(|_| _ = unsafe { libc::write(2, line.as_ptr().cast(), line.len()) });
        panic!("said")
    };
    assert_eq!(fate(&LIMITS, || talk(10_000)), Fate::Panicked("said".into()));
    let endless = || loop {
        talk(usize::MAX);
    };
    assert_eq!(fate(&Limits::of(Duration::from_millis(200)), endless), Fate::TimedOut);
}

#[test]
#[ignore = "started by the test below, which reads what it prints"]
fn a_child_that_prints() {
    let aloud = Limits { prints: true, ..BOUNDED };
    // Buffered, because no line ends here.
    print!("first;");
    let ended = fate(&aloud, || {
        io::stderr().write_all(b"complaint;").unwrap();
        print!("second;");
        std::process::exit(3)
    });
    assert_eq!(ended, Fate::Exited(3));
    assert_eq!(fate(&aloud, || panic!("reason;")), Fate::Panicked("reason;".into()));
    assert_eq!(fate(&aloud, || black_box(vec![1; 4 << 30])), Fate::OutOfMemory);
}

#[test]
fn what_a_child_prints_is_seen_once() {
    let _turn = turn();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "a_child_that_prints"])
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(output.status.success(), "{out}\n{err}");
    for (text, all) in [("first;", &out), ("second;", &out), ("complaint;", &err), ("reason;", &err)] {
        assert_eq!(all.matches(text).count(), 1, "{text}: {all}");
    }
}

#[test]
fn children_of_children() {
    let _turn = turn();
    let ended = fate(&LIMITS, || match fate(&LIMITS, || panic!("deep")) {
        Fate::Panicked(text) => text.into_bytes(),
        _ => vec![],
    });
    assert_eq!(ended, Fate::Returned(b"deep".to_vec()));
}

#[test]
fn several_at_once() {
    let _turn = turn();
    std::thread::scope(|scope| {
        for mine in 0..4 {
            scope.spawn(move || {
                for round in 0..10 {
                    assert_eq!(fate(&LIMITS, || vec![mine, round]), Fate::Returned(vec![mine, round]));
                }
            });
        }
    });
}

#[test]
fn many_in_a_row_leave_nothing() {
    let _turn = turn();
    let open = || fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    let start = Instant::now();
    for round in 0..200u8 {
        let ended = fate(&BOUNDED, || if round % 3 == 0 { panic!("third") } else { vec![round] });
        assert_eq!(matches!(ended, Fate::Panicked(_)), round % 3 == 0, "{ended}");
    }
    let each = start.elapsed() / 200;
    assert_eq!(open(), before);
    // SAFETY: asks for any child, without waiting, and where nothing is written.
    let (child, error) =
        unsafe { (libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG), *libc::__errno_location()) };
    assert_eq!((child, error), (-1, libc::ECHILD));
    assert!(each < Duration::from_millis(50), "{each:?}");
}
