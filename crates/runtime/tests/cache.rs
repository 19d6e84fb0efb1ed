//! The kernel cache against real files and processes; every test has a directory of its own.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use kiln_runtime::cache::Refused;
use kiln_runtime::{Args, CacheError, CcError, Kernel, KernelCache, Origin, Source, warn};

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
    assert_eq!((folder.files(".so").len(), folder.files(".c").len(), folder.files("").len()), (3, 3, 6));
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
        fs::write(path, bytes).unwrap();
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
        .args(["--exact", "child", "--nocapture"])
        .env("KILN_TEST_JOB", job)
        .env("KILN_CACHE_DIR", &folder.0);
    command
}

#[test]
fn child() {
    match std::env::var("KILN_TEST_JOB").as_deref() {
        Ok("load") => (0..8).for_each(|number| _ = load(KernelCache::global(), number)),
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
    assert_eq!((folder.files(".so").len(), folder.files("").len()), (8, 16));
    let cache = KernelCache::at(&folder.0);
    (0..8).for_each(|number| assert_eq!(load(&cache, number), Origin::Disk));
}

#[test]
fn no_compiler_is_an_error_not_a_crash() {
    let folder = Folder::new("none");
    let output = child_process(&folder, "no compiler").env("KILN_CC", "none").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
