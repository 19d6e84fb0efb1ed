//! Compilers that misbehave: they say that all went well and leave something else than an object, or hang. Nothing of
//! it may reach the cache, end a process, or go unnoticed; and a compiler that is well again is used again.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use kiln_runtime::object::BadObject;
use kiln_runtime::{Args, CacheError, CcError, Kernel, KernelCache, Source};

/// A folder with a compiler in it, and a cache beside.
struct Place(PathBuf);

impl Place {
    /// `misdeed` is shell text, run instead of the compiler unless `WELL` is set: `$out` is the file to write.
    fn new(name: &str, misdeed: &str) -> Place {
        let path = std::env::temp_dir().join(format!("kiln \"compilers\" {name} {}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        let script = format!(
            "#!/bin/sh
out=
before=
for word in \"$@\"; do
    [ \"$before\" = -o ] && out=$word
    before=$word
done
if [ -z \"$out\" ] || [ -n \"$WELL\" ]; then exec cc \"$@\"; fi
echo x >> \"$STARTS\"
{misdeed}
"
        );
        // Compilers are named by words, so there is no space in this path.
        let compiler = Place(path).compiler();
        fs::write(&compiler, script).unwrap();
        fs::set_permissions(&compiler, fs::Permissions::from_mode(0o700)).unwrap();
        Place(std::env::temp_dir().join(format!("kiln \"compilers\" {name} {}", std::process::id())))
    }

    fn compiler(&self) -> PathBuf {
        let name = self.0.file_name().unwrap().to_string_lossy().replace([' ', '"'], "-");
        std::env::temp_dir().join(format!("{name}-cc"))
    }

    fn cache(&self) -> PathBuf {
        self.0.join("cache")
    }

    fn objects(&self) -> usize {
        let files = fs::read_dir(self.cache()).into_iter().flatten().flatten();
        files.filter(|file| file.path().extension().is_some_and(|ending| ending == "so")).count()
    }

    fn starts(&self) -> usize {
        fs::read_to_string(self.0.join("starts")).unwrap_or_default().lines().count()
    }

    /// Runs a job of [`child`] with this compiler.
    fn run(&self, job: &str, is_well: bool) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "child", "--nocapture"]);
        command.env("KILN_TEST_JOB", job).env("KILN_CACHE_DIR", self.cache()).env("KILN_CC", self.compiler());
        let patience = if job == "hangs" { "0.3" } else { "60" };
        command.env("KILN_CC_TIMEOUT", patience).env("STARTS", self.0.join("starts"));
        if is_well {
            command.env("WELL", "1");
        }
        command.output().unwrap()
    }

    fn check(&self, job: &str, is_well: bool) {
        let output = self.run(job, is_well);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{job}: {}\n{text}", output.status);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn source(number: i32) -> Source {
    let text = format!(
        "int kernel(char *const *bufs, const long *ints, const double *scalars, long begin, long end, char *scratch)
         {{ *(int *)bufs[0] = {number}; return 0; }}"
    );
    Source::new(text, &["-O1"]).with_symbols(["kernel".to_string()])
}

fn works(number: i32) {
    let library = KernelCache::global().load(&source(number)).unwrap().library;
    let mut result = 0i32;
    let args = Args { bufs: &[(&raw mut result).cast()], ints: &[], scalars: &[] };
    // SAFETY: the kernel writes one int to its first buffer.
    unsafe { Kernel::new(library, "kernel").unwrap().launch(&args, 1, 1, 0) };
    assert_eq!(result, number);
}

fn fails(number: i32) -> BadObject {
    match KernelCache::global().load(&source(number)).unwrap_err() {
        CacheError::Object { reason, .. } => reason,
        other => panic!("{other}"),
    }
}

/// What the processes that tests start do.
#[test]
#[ignore = "started by other tests, in a process of its own"]
fn child() {
    match std::env::var("KILN_TEST_JOB").as_deref() {
        Ok("works") => (0..3).for_each(works),
        Ok("malformed") => assert!(matches!(fails(1), BadObject::Malformed { .. })),
        Ok("other machine") => assert!(matches!(fails(1), BadObject::OtherMachine { .. })),
        Ok("not shared") => assert!(matches!(fails(1), BadObject::NotShared { .. })),
        Ok("missing symbol") => assert_eq!(fails(1), BadObject::MissingSymbol { name: "kernel".into() }),
        Ok("hangs") => {
            let sources: Vec<Source> = (0..20).map(source).collect();
            let start = Instant::now();
            for outcome in KernelCache::global()
                .load_many(&sources)
                .into_iter()
                .chain((20..30).map(|number| KernelCache::global().load(&source(number))))
            {
                let error = outcome.unwrap_err();
                assert!(error.is_for_all(), "{error}");
                assert!(matches!(error, CacheError::Compiler(CcError::TimedOut { .. })), "{error}");
            }
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        }
        _ => {}
    }
}

#[test]
fn what_is_no_object_is_neither_kept_nor_loaded() {
    let cases = [
        ("nothing", "malformed", "exit 0"),
        ("empty", "malformed", ": > \"$out\""),
        ("text", "malformed", "echo '#!/bin/sh' > \"$out\""),
        ("garbage", "malformed", "head -c 16384 /dev/urandom > \"$out\""),
        (
            "elf-garbage",
            "malformed",
            "cc \"$@\" && dd if=/dev/urandom of=\"$out\" bs=1 seek=32 count=4000 conv=notrunc",
        ),
        ("half", "malformed", "cc \"$@\" && truncate -s 6000 \"$out\""),
        ("header", "malformed", "cc \"$@\" && truncate -s 64 \"$out\""),
        (
            "machine",
            "other machine",
            "cc \"$@\" && printf '\\267' | dd of=\"$out\" bs=1 seek=18 conv=notrunc",
        ),
        ("symbol", "missing symbol", "exec cc \"$@\" -Dkernel=colonel"),
        ("relocatable", "not shared", "exec cc -x c -c -o \"$out\" kernel.c"),
    ];
    for (name, outcome, misdeed) in cases {
        let place = Place::new(name, misdeed);
        place.check(outcome, false);
        assert_eq!((place.objects(), place.starts()), (0, 1), "{name}");
        // The same compiler, well again: nothing bad was kept.
        place.check("works", true);
        assert_eq!(place.objects(), 3, "{name}");
        let _ = fs::remove_file(place.compiler());
    }
}

/// A process that finds an object on disk without what it needs has it compiled again.
#[test]
fn a_kept_object_without_the_function_is_made_again() {
    let folder = Place::new("healed", "exit 1");
    let cache = KernelCache::at(&folder.cache());
    let plain = Source { symbols: Vec::new(), ..source(5) };
    cache.load(&Source { text: plain.text.replace("kernel", "colonel"), ..plain.clone() }).unwrap();
    let path = |name: &str| {
        let files = fs::read_dir(folder.cache()).unwrap().map(|file| file.unwrap().path());
        let of = |path: &PathBuf| {
            fs::read_to_string(path.with_extension("c")).is_ok_and(|text| text.contains(name))
        };
        files.filter(|path| path.extension().is_some_and(|ending| ending == "so")).find(of).unwrap()
    };
    let wrong = fs::read(path("colonel")).unwrap();
    cache.load(&source(5)).unwrap();
    // Another's seal is none: objects can't be exchanged by renaming them.
    let right = path("kernel(");
    fs::remove_file(&right).unwrap();
    fs::write(&right, wrong).unwrap();
    fs::set_permissions(&right, fs::Permissions::from_mode(0o600)).unwrap();
    let again = KernelCache::at(&folder.cache());
    assert_eq!(again.damaged().unwrap(), [right]);
    assert_eq!(again.load(&source(5)).unwrap().origin, kiln_runtime::Origin::Compiler);
    assert!(again.damaged().unwrap().is_empty());
    let _ = fs::remove_file(folder.compiler());
}

#[test]
fn a_compiler_that_hangs_is_started_once_a_thread() {
    let place = Place::new("hangs", "sleep 100");
    place.check("hangs", false);
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
    assert!(place.starts() <= threads, "{} starts", place.starts());
    let _ = fs::remove_file(place.compiler());
}

/// Unused libraries are unloaded, those in use are not.
#[cfg(target_os = "linux")]
#[test]
fn unused_libraries_are_unloaded() {
    let folder = Place::new("unloaded", "exit 1");
    let cache = KernelCache::at(&folder.cache()).with_unused(3);
    let maps = || {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let name = folder.cache().to_string_lossy().into_owned();
        maps.lines().filter(|line| line.contains(&name) && line.contains("r-xp")).count()
    };
    let used = Kernel::new(cache.load(&source(100)).unwrap().library, "kernel").unwrap();
    let sources: Vec<Source> = (101..125).map(source).collect();
    assert!(cache.load_many(&sources).iter().all(Result::is_ok));
    assert_eq!(maps(), 4, "three that were used last, and the one that is in use");
    assert_eq!(cache.load(&sources[0]).unwrap().origin, kiln_runtime::Origin::Disk);
    assert!(cache.known() < 15, "what is unloaded is forgotten, too");
    assert_eq!(cache.load(&source(100)).unwrap().origin, kiln_runtime::Origin::Memory);
    cache.release();
    assert_eq!((maps(), cache.known()), (1, 1));
    let mut result = 0i32;
    let args = Args { bufs: &[(&raw mut result).cast()], ints: &[], scalars: &[] };
    // SAFETY: the kernel writes one int to its first buffer.
    unsafe { used.launch(&args, 1, 1, 0) };
    assert_eq!(result, 100);
    drop(used);
    assert_eq!(maps(), 0);
    let _ = fs::remove_file(folder.compiler());
}
