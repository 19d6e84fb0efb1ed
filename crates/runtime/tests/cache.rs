//! The kernel cache against real files and processes; every test has a directory of its own.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use kiln_runtime::directory::{Contents, Refused};
use kiln_runtime::{Args, CacheError, CcError, Kernel, KernelCache, Origin, Source, warn};

/// Files that a process makes with its first kernel: the key, and what the compiler says of itself.
const OWN: usize = 2;

/// A private directory, removed at the end of the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kiln-cache-test-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        Folder(path)
    }

    fn files(&self, ending: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.to_string_lossy().ends_with(ending)).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A kernel that writes `number` to its first buffer.
fn source(number: i32) -> Source {
    let text = format!(
        "int kernel(char *const *bufs, const long *ints, const double *scalars, long begin, long end, char *scratch)
         {{ *(int *)bufs[0] = {number}; return 0; }}"
    );
    Source::new(text, &["-O1"])
}

/// Loads the kernel of `number`, checks that it is the one, and says where it came from.
fn load(cache: &KernelCache, number: i32) -> Origin {
    let loaded = cache.load(&source(number)).unwrap();
    run(Kernel::new(loaded.library, "kernel").unwrap(), number);
    loaded.origin
}

fn run(kernel: Kernel, number: i32) {
    let mut result = 0i32;
    let args = Args { bufs: &[(&raw mut result).cast()], ints: &[], scalars: &[] };
    // SAFETY: the kernel writes one int to its first buffer.
    assert_eq!(unsafe { kernel.launch(&args, 1, 1, 0) }, 0);
    assert_eq!(result, number);
}

#[test]
fn compiler_then_memory_then_disk() {
    let folder = Folder::new("origins");
    let cache = KernelCache::at(&folder.0);
    assert_eq!(load(&cache, 1), Origin::Compiler);
    assert_eq!(load(&cache, 1), Origin::Memory);
    assert_eq!(load(&cache, 2), Origin::Compiler);
    assert_eq!(load(&KernelCache::at(&folder.0), 1), Origin::Disk);
    // Other flags are another kernel.
    let other = Source::new(source(1).text, &["-O2"]);
    assert_eq!(cache.load(&other).unwrap().origin, Origin::Compiler);
    // An object and its text for each of the three, and nothing else.
    let own = folder.files("key").len() + folder.files(".txt").len();
    assert_eq!(
        (folder.files(".so").len(), folder.files(".c").len(), folder.files("").len()),
        (3, 3, 6 + own)
    );
}

#[test]
fn many_at_once() {
    let folder = Folder::new("many");
    let cache = KernelCache::at(&folder.0);
    load(&cache, 3);
    let sources: Vec<Source> = [0, 1, 2, 3, 4, 0].map(source).into();
    let mut bad = sources.clone();
    bad.push(Source::new("not C", &[]));
    let results = cache.load_many(&bad);
    for (result, number) in results.iter().zip([0, 1, 2, 3, 4, 0]) {
        run(Kernel::new(result.as_ref().unwrap().library.clone(), "kernel").unwrap(), number);
    }
    assert_eq!(results[3].as_ref().unwrap().origin, Origin::Memory);
    let Err(CacheError::Compiler(CcError::Failed { saved_source, stderr, .. })) = &results[6] else {
        panic!("{:?}", results[6])
    };
    assert!(saved_source.exists() && stderr.contains("error"));
    assert!(cache.load_many(&[]).is_empty());
}

/// Another file in the place of one that may be loaded: what is loaded must not change under the program.
fn replace(path: &Path, bytes: &[u8]) {
    let draft = path.with_extension("draft");
    fs::write(&draft, bytes).unwrap();
    fs::rename(draft, path).unwrap();
}

#[test]
fn damaged_objects_are_rebuilt() {
    let folder = Folder::new("damaged");
    let damages: [fn(&mut Vec<u8>); 5] = [
        |bytes| bytes[700] ^= 1,
        |bytes| bytes.truncate(bytes.len() / 2),
        |bytes| bytes.truncate(bytes.len() - 1),
        |bytes| bytes.clear(),
        |bytes| *bytes.last_mut().unwrap() ^= 1,
    ];
    for damage in damages {
        load(&KernelCache::at(&folder.0), 7);
        let path = &folder.files(".so")[0];
        let mut bytes = fs::read(path).unwrap();
        damage(&mut bytes);
        replace(path, &bytes);
        assert_eq!(load(&KernelCache::at(&folder.0), 7), Origin::Compiler);
        assert_eq!(load(&KernelCache::at(&folder.0), 7), Origin::Disk);
    }
}

fn refused(path: &Path) -> Refused {
    let cache = KernelCache::at(path);
    // It works all the same, from a temporary folder.
    assert_eq!(load(&cache, 8), Origin::Compiler);
    assert_eq!(load(&cache, 8), Origin::Memory);
    cache.directory().unwrap_err().clone()
}

#[test]
fn unsafe_directories_are_refused() {
    let before = warn::set_sink(|_| {});
    let folder = Folder::new("refused");
    let (open, link, file) = (folder.0.join("open"), folder.0.join("link"), folder.0.join("file"));
    fs::create_dir(&open).unwrap();
    for mode in [0o777, 0o770, 0o702] {
        fs::set_permissions(&open, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(refused(&open), Refused::Writable { path: open.clone(), mode });
    }
    fs::set_permissions(&open, fs::Permissions::from_mode(0o700)).unwrap();
    symlink(&open, &link).unwrap();
    assert_eq!(refused(&link), Refused::Symlink(link.clone()));
    assert_eq!(refused(&link.join("")), Refused::Symlink(link.clone()));
    fs::write(&file, "").unwrap();
    assert_eq!(refused(&file), Refused::NotADirectory(file.clone()));
    assert!(matches!(refused(&file.join("below")), Refused::Unusable { .. }));
    assert!(fs::read_dir(&open).unwrap().next().is_none());
    warn::set_sink(before);
    assert!(warn::taken().iter().any(|message| message.contains("is a symbolic link")));
}

/// A folder above that others can write to is as good as one of theirs.
#[test]
fn folders_above_are_looked_at() {
    let before = warn::set_sink(|_| {});
    let folder = Folder::new("above");
    let (open, below) = (folder.0.join("open"), folder.0.join("open/kiln"));
    fs::create_dir(&open).unwrap();
    fs::DirBuilder::new().mode(0o700).create(&below).unwrap();
    for mode in [0o777, 0o775, 0o757] {
        fs::set_permissions(&open, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(refused(&below), Refused::Writable { path: open.clone(), mode });
    }
    // Where each can remove only what is theirs, nobody can exchange it.
    for mode in [0o1777, 0o755] {
        fs::set_permissions(&open, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(
            load(&KernelCache::at(&below), 8),
            if mode == 0o1777 { Origin::Compiler } else { Origin::Disk }
        );
    }
    // A link above is followed, and where it leads is looked at.
    let link = folder.0.join("link");
    symlink(&open, &link).unwrap();
    assert_eq!(KernelCache::at(&link.join("kiln")).directory().unwrap(), fs::canonicalize(&below).unwrap());
    warn::set_sink(before);
}

/// What lies where a file should be is not waited for, and files that others could have written are made again.
#[test]
fn only_plain_files_of_ones_own_are_read() {
    let folder = Folder::new("kinds");
    load(&KernelCache::at(&folder.0), 1);
    KernelCache::at(&folder.0).keep_plan("graph", b"steps");
    let (object, plan) = (folder.files(".so").remove(0), folder.files(".plan").remove(0));
    let start = std::time::Instant::now();
    for path in [&object, &plan] {
        let whole = fs::read(path).unwrap();
        let puts: [&dyn Fn(); 4] = [
            &|| assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
            &|| fs::create_dir(path).unwrap(),
            &|| {
                let aside = folder.0.join("aside");
                fs::write(&aside, &whole).unwrap();
                symlink(&aside, path).unwrap();
            },
            &|| {
                fs::write(path, &whole).unwrap();
                fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap();
            },
        ];
        for (number, put) in puts.iter().enumerate() {
            let _ = fs::remove_file(path);
            put();
            let cache = KernelCache::at(&folder.0);
            // Sockets and devices are what a pipe is: not plain.
            assert_eq!((number, cache.plan("graph").is_some()), (number, path != &plan));
            let expected = if path == &object { Origin::Compiler } else { Origin::Disk };
            assert_eq!(load(&cache, 1), expected, "kind {number}");
            if path.is_dir() {
                fs::remove_dir(path).unwrap();
            }
            let _ = fs::remove_file(path);
            fs::write(path, &whole).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        }
        assert_eq!(load(&KernelCache::at(&folder.0), 1), Origin::Disk);
    }
    assert!(start.elapsed().as_secs() < 30, "nothing was waited for");
}

/// Paths are handed to nobody who takes them apart.
#[test]
fn any_path_will_do() {
    let folder = Folder::new("path");
    for name in ["a \"quoted\" one", "it's $HOME", "two\nlines", "über", "-o"] {
        let path = folder.0.join(name);
        assert_eq!(load(&KernelCache::at(&path), 1), Origin::Compiler, "{name}");
        assert_eq!(load(&KernelCache::at(&path), 1), Origin::Disk, "{name}");
    }
}

/// The user whom nothing belongs to.
const NOBODY: u32 = 65534;

#[test]
fn another_users_directory_is_refused() {
    let before = warn::set_sink(|_| {});
    let folder = Folder::new("foreign");
    // Only the superuser can give a folder away; for others the root of the system is another's.
    let own = fs::metadata(&folder.0).unwrap().uid();
    let (path, owner) = if own == 0 { (folder.0.clone(), NOBODY) } else { (PathBuf::from("/"), 0) };
    if own == 0 {
        chown(&path, Some(NOBODY), None).unwrap();
    }
    assert_eq!(refused(&path), Refused::OtherOwner { path: path.clone(), owner, user: own });
    assert!(own != 0 || folder.files("").is_empty());
    warn::set_sink(before);
}

/// Objects of a read-only directory serve, new ones are done without. The superuser may write anywhere, so
/// then the job is another user's.
#[test]
fn a_read_only_directory_serves_what_it_has() {
    let folder = Folder::new("read-only");
    let set = |mode| fs::set_permissions(&folder.0, fs::Permissions::from_mode(mode)).unwrap();
    let is_root = fs::metadata(&folder.0).unwrap().uid() == 0;
    let job = |job: &str| {
        let mut command = child_process(&folder, job);
        if is_root {
            command.uid(NOBODY);
        }
        command.output()
    };
    if is_root {
        chown(&folder.0, Some(NOBODY), None).unwrap();
    }
    let Ok(output) = job("load") else { return }; // nobody can't reach this binary
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    set(0o500);
    let output = job("read only").unwrap();
    set(0o700);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(folder.files("").len(), 16 + OWN);
}

#[test]
fn what_was_used_least_recently_goes_first() {
    let folder = Folder::new("limit");
    let cache = KernelCache::at(&folder.0);
    (0..3).for_each(|number| assert_eq!(load(&cache, number), Origin::Compiler));
    let three = cache.contents().unwrap().bytes;
    // Older than anything that is written now, in another order than they were made in.
    for (number, age) in [(0, 10), (1, 30), (2, 20)] {
        let path = folder
            .files(".so")
            .into_iter()
            .find(|path| fs::read_to_string(path.with_extension("c")).unwrap() == source(number).text);
        let then = std::time::SystemTime::now() - std::time::Duration::from_secs(age * 1000);
        for path in [path.as_ref().unwrap(), &path.as_ref().unwrap().with_extension("c")] {
            let times = fs::FileTimes::new().set_accessed(then).set_modified(then);
            fs::File::options().append(true).open(path).unwrap().set_times(times).unwrap();
        }
    }
    // 1 is the oldest but used again; then 2 is the one that was used least recently.
    assert_eq!(load(&KernelCache::at(&folder.0), 1), Origin::Disk);
    let full = KernelCache::with_limit(&folder.0, three + three / 6);
    assert_eq!(load(&full, 3), Origin::Compiler);
    assert!(full.contents().unwrap().bytes <= full.limit().unwrap());
    let again = KernelCache::at(&folder.0);
    let origins: Vec<Origin> = [1, 3, 0, 2].map(|number| load(&again, number)).into();
    assert_eq!(origins, [Origin::Disk, Origin::Disk, Origin::Disk, Origin::Compiler]);
    // No room at all: kernels work, nothing stays.
    let none = KernelCache::with_limit(&folder.0, 0);
    assert_eq!(load(&none, 4), Origin::Compiler);
    assert_eq!((load(&none, 4), none.contents().unwrap()), (Origin::Memory, Contents::default()));
}

#[test]
fn contents_damage_and_clearing() {
    let folder = Folder::new("contents");
    let cache = KernelCache::at(&folder.0);
    (0..2).for_each(|number| _ = load(&cache, number));
    cache.keep_remark("measured", "7");
    cache.keep_plan("graph", b"steps");
    fs::write(folder.0.join("notes.txt"), "the user's own").unwrap();
    let leftover = folder.0.join("kiln-1-0-abc");
    fs::create_dir(&leftover).unwrap();
    let contents = cache.contents().unwrap();
    assert_eq!((contents.objects, contents.texts, contents.folders), (2, 2, 1));
    assert_eq!(contents.remarks, folder.files(".txt").len() - 1);
    assert_eq!((contents.plans, cache.plan("graph").as_deref()), (1, Some(&b"steps"[..])));
    assert!(cache.damaged().unwrap().is_empty());
    let object = folder.files(".so").remove(0);
    replace(&object, b"short");
    assert_eq!(cache.damaged().unwrap(), [object]);
    // Half a plan is none, and the next one takes its place.
    let plan = folder.files(".plan").remove(0);
    replace(&plan, &fs::read(&plan).unwrap()[..20]);
    assert_eq!((cache.plan("graph"), cache.damaged().unwrap().len()), (None, 2));
    cache.keep_plan("graph", b"other steps");
    assert_eq!(KernelCache::at(&folder.0).plan("graph").as_deref(), Some(&b"other steps"[..]));
    assert_eq!(cache.plan("another graph"), None);
    // A folder that was just made may be that of a compilation that runs; one that is old is not.
    cache.clear().unwrap();
    assert_eq!(folder.files("").len(), 3);
    let then = std::time::SystemTime::now() - std::time::Duration::from_secs(100_000);
    let times = fs::FileTimes::new().set_accessed(then).set_modified(then);
    fs::File::open(&leftover).unwrap().set_times(times).unwrap();
    cache.clear().unwrap();
    let mut left = folder.files("");
    left.sort();
    assert_eq!(left, ["key", "notes.txt"].map(|name| folder.0.join(name)));
    assert_eq!(load(&cache, 0), Origin::Memory);
    assert_eq!(load(&KernelCache::at(&folder.0), 0), Origin::Compiler);
}

#[test]
fn a_compiler_that_failed_is_not_asked_again() {
    let folder = Folder::new("failed");
    let cache = KernelCache::at(&folder.0);
    let bad = Source::new("not C", &[]);
    let first = cache.load(&bad).unwrap_err().to_string();
    assert_eq!(cache.load(&bad).unwrap_err().to_string(), first);
    assert!(cache.load_many(&[bad])[0].is_err());
    assert_eq!(cache.contents().unwrap().folders, 1, "one text that failed");
}

#[test]
fn a_directory_that_cannot_be_written_is_done_without() {
    let before = warn::set_sink(|_| {});
    // Not even the superuser makes files there.
    let cache = KernelCache::at(Path::new("/proc"));
    assert_eq!(load(&cache, 9), Origin::Compiler);
    warn::set_sink(before);
}

#[test]
fn the_directory_is_made_private() {
    let folder = Folder::new("made");
    let path = folder.0.join("a/b");
    assert_eq!(load(&KernelCache::at(&path), 1), Origin::Compiler);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn several_threads_compile_once() {
    let folder = Folder::new("threads");
    let cache = KernelCache::at(&folder.0);
    let origins: Vec<Origin> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| load(&cache, 1))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(origins.iter().filter(|origin| **origin == Origin::Compiler).count(), 1);
}

/// Starts this test binary again, to run `child` with the given environment.
fn child_process(folder: &Folder, job: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--ignored", "--exact", "child", "--nocapture"])
        .env("KILN_TEST_JOB", job)
        .env("KILN_CACHE_DIR", &folder.0);
    command
}

#[test]
#[ignore = "started by other tests, in a process of its own"]
fn child() {
    match std::env::var("KILN_TEST_JOB").as_deref() {
        Ok("load") => (0..8).for_each(|number| _ = load(KernelCache::global(), number)),
        Ok("read only") => {
            assert_eq!(load(KernelCache::global(), 3), Origin::Disk);
            assert_eq!(load(KernelCache::global(), 99), Origin::Compiler);
            assert_eq!(
                load(&KernelCache::at(KernelCache::global().directory().unwrap()), 99),
                Origin::Compiler
            );
        }
        Ok("no compiler") => {
            let error = KernelCache::global().load(&source(1)).unwrap_err();
            assert!(matches!(error, CacheError::Compiler(CcError::Disabled)), "{error}");
            assert!(KernelCache::global().load_many(&[source(1), source(2)]).iter().all(Result::is_err));
        }
        _ => {}
    }
}

#[test]
fn two_processes_at_once() {
    let folder = Folder::new("processes");
    let mut children: Vec<_> = (0..2).map(|_| child_process(&folder, "load").spawn().unwrap()).collect();
    assert!(children.iter_mut().all(|child| child.wait().unwrap().success()));
    assert_eq!((folder.files(".so").len(), folder.files("").len()), (8, 16 + OWN));
    let cache = KernelCache::at(&folder.0);
    (0..8).for_each(|number| assert_eq!(load(&cache, number), Origin::Disk));
}

#[test]
fn no_compiler_is_an_error_not_a_crash() {
    let folder = Folder::new("none");
    let output = child_process(&folder, "no compiler").env("KILN_CC", "none").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
