//! The kernel cache: compiled sources in memory, then on disk, then from the compiler.
//!
//! [Note: what makes loading a file safe]
//! A cached object becomes code of this process, so the directory must belong to the user and nobody else
//! may write to it; anything else is refused with a reason, and the cache then works from private temporary
//! folders. An object ends with a checksum over its bytes that is verified before loading: a truncated or
//! damaged file is rebuilt. Objects are written under a name of their own and renamed into place, so other
//! processes see either nothing or all of it; two that build the same object at once write the same content.

use std::collections::HashMap;
use std::fmt::Write;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::cc::{CcError, Compiler};
use crate::cpu::Isa;
use crate::kernel::KernelFn;

/// Ends every object file, after its checksum; a new layout of the cache gets a new mark.
const MARK: &[u8; 8] = b"KILNOBJ1";
const TRAILER: usize = 32 + MARK.len();

/// C text and how to compile it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The C text.
    pub text: String,
    /// Further flags, such as the optimisation level or `-lm`.
    pub flags: Vec<String>,
    /// The instruction set to compile for.
    pub isa: Isa,
}

impl Source {
    /// C text for this machine's best instruction set.
    pub fn new(text: impl Into<String>, flags: &[&str]) -> Source {
        Source {
            text: text.into(),
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            isa: Isa::best(),
        }
    }

    fn all_flags(&self) -> Vec<&str> {
        self.isa.compiler_flags().iter().copied().chain(self.flags.iter().map(String::as_str)).collect()
    }
}

/// What identifies a compiled source: a hash of text, compiler, flags and instruction set.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

impl Key {
    fn new(source: &Source, compiler: &str) -> Key {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            // The length first, so that no two lists of parts run together to the same bytes.
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(MARK);
        part(compiler.as_bytes());
        part(source.isa.name().as_bytes());
        source.all_flags().iter().for_each(|flag| part(flag.as_bytes()));
        part(source.text.as_bytes());
        Key(hash.finalize().into())
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key({self})")
    }
}

/// A loaded object; unloaded when the last holder is gone.
#[derive(Debug)]
pub struct Library {
    handle: Handle,
}

impl Library {
    /// The function called `name`. Valid as long as the library is held.
    pub fn symbol(&self, name: &str) -> Option<KernelFn> {
        // SAFETY: every function of a kernel library has this one signature.
        unsafe { self.handle.get::<KernelFn>(name).ok().map(|symbol| *symbol) }
    }

    fn open(path: &Path) -> Result<Library, CacheError> {
        // SAFETY: the object was made by the compiler from our source, verified, from a directory that only
        // this user writes; kernels have no initialisers.
        let handle = unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let handle =
            handle.map_err(|error| CacheError::Load { path: path.to_owned(), reason: error.to_string() })?;
        Ok(Library { handle })
    }
}

/// Where a library came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// This process had it.
    Memory,
    /// An object on disk.
    Disk,
    /// Compiled just now.
    Compiler,
}

/// A loaded library, where it came from and how long that took.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The library.
    pub library: Arc<Library>,
    /// Where it came from.
    pub origin: Origin,
    /// How long it took.
    pub time: Duration,
}

/// Why a source could not be loaded.
#[derive(Debug, Clone, Error)]
pub enum CacheError {
    /// There is no compiler, or it failed.
    #[error(transparent)]
    Compiler(#[from] CcError),
    /// The object would not load.
    #[error("cannot load {path}: {reason}")]
    Load {
        /// The object.
        path: PathBuf,
        /// The loader's message.
        reason: String,
    },
}

/// Why a directory is not used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refused {
    /// There is no home directory to put it in.
    #[error("neither KILN_CACHE_DIR, XDG_CACHE_HOME nor HOME is set")]
    NoPlace,
    /// The path leads elsewhere.
    #[error("{0} is a symbolic link")]
    Symlink(PathBuf),
    /// Something else has the name.
    #[error("{0} is not a directory")]
    NotADirectory(PathBuf),
    /// Another user's.
    #[error("{path} belongs to user {owner}, not to user {user}")]
    OtherOwner {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The user of this process.
        user: u32,
    },
    /// Others may write to it.
    #[error("{path} can be written by others (mode {mode:o})")]
    Writable {
        /// The directory.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// It is not there and can't be made.
    #[error("{path}: {reason}")]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// The system's message.
        reason: String,
    },
}

/// One source's place in memory; its lock makes threads that want the same source wait for the one compiling.
type Entry = Arc<Mutex<Option<Arc<Library>>>>;

/// Compiled sources, in memory and in a directory.
#[derive(Debug)]
pub struct KernelCache {
    directory: Result<PathBuf, Refused>,
    entries: Mutex<HashMap<Key, Entry>>,
}

impl KernelCache {
    /// The process's cache: `KILN_CACHE_DIR`, else `$XDG_CACHE_HOME/kiln` or `~/.cache/kiln`.
    pub fn global() -> &'static KernelCache {
        static GLOBAL: OnceLock<KernelCache> = OnceLock::new();
        GLOBAL.get_or_init(|| {
            let variable =
                |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
            let directory = variable("KILN_CACHE_DIR")
                .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("kiln")))
                .or_else(|| Some(variable("HOME")?.join(".cache/kiln")))
                .ok_or(Refused::NoPlace);
            KernelCache::new(directory.and_then(|path| accept(&path)))
        })
    }

    /// A cache of its own in the given directory, which is made if it is not there.
    pub fn at(directory: &Path) -> KernelCache {
        KernelCache::new(accept(directory))
    }

    fn new(directory: Result<PathBuf, Refused>) -> KernelCache {
        if let Err(reason) = &directory {
            let message = format!("kernels are compiled anew by every process: {reason}");
            crate::warn::once(&message, || message.clone());
        }
        KernelCache { directory, entries: Mutex::default() }
    }

    /// The directory in use, or why there is none; without one every process compiles its own kernels.
    pub fn directory(&self) -> Result<&Path, &Refused> {
        self.directory.as_deref()
    }

    /// A remark that was kept under a key.
    pub fn remark(&self, key: &str) -> Option<String> {
        fs::read_to_string(self.remark_path(key)?).ok()
    }

    /// Keeps a remark beside the objects for this and other processes: what was measured, say. One that can't
    /// be kept is only missed.
    pub fn keep_remark(&self, key: &str, text: &str) {
        let Some(path) = self.remark_path(key) else { return };
        let Some(Ok(workshop)) = path.parent().map(Workshop::new) else { return };
        let draft = workshop.path.join("remark");
        // Written apart and renamed, so that nobody reads half of it.
        if fs::write(&draft, text).is_ok() {
            let _ = fs::rename(&draft, &path);
        }
    }

    fn remark_path(&self, key: &str) -> Option<PathBuf> {
        let compiler = Compiler::find().ok()?;
        let key = Key::new(&Source::new(key, &[]), compiler.identity());
        Some(object_path(self.directory.as_ref().ok()?, key).with_extension("txt"))
    }

    /// The library of a source: from memory, from disk, or compiled now.
    pub fn load(&self, source: &Source) -> Result<Loaded, CacheError> {
        let start = Instant::now();
        let (key, entry) = self.entry(source)?;
        let mut place = entry.lock();
        if let Some(found) = self.look_up(key, &mut place, start) {
            return Ok(found);
        }
        let library = Arc::new(self.build(key, source)?);
        *place = Some(library.clone());
        Ok(Loaded { library, origin: Origin::Compiler, time: start.elapsed() })
    }

    /// Loads several sources; those that have to be compiled run side by side, one compiler for each core.
    pub fn load_many(&self, sources: &[Source]) -> Vec<Result<Loaded, CacheError>> {
        let mut results: Vec<Option<Result<Loaded, CacheError>>> =
            sources.iter().map(|s| self.find(s)).collect();
        let missing: Vec<usize> = (0..sources.len()).filter(|index| results[*index].is_none()).collect();
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let next = AtomicUsize::new(0);
        let compile = || {
            let mut done = Vec::new();
            while let Some(index) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                done.push((*index, self.load(&sources[*index])));
            }
            done
        };
        let done = std::thread::scope(|scope| {
            let helpers: Vec<_> = (1..missing.len().min(cores)).map(|_| scope.spawn(compile)).collect();
            let mut done = compile();
            for helper in helpers {
                match helper.join() {
                    Ok(part) => done.extend(part),
                    Err(payload) => std::panic::resume_unwind(payload),
                }
            }
            done
        });
        for (index, result) in done {
            results[index] = Some(result);
        }
        results.into_iter().map(|result| result.expect("every source was found or compiled")).collect()
    }

    /// The source's library if nothing has to be compiled for it; an error if nothing can be.
    fn find(&self, source: &Source) -> Option<Result<Loaded, CacheError>> {
        let start = Instant::now();
        match self.entry(source) {
            Err(error) => Some(Err(error)),
            Ok((key, entry)) => self.look_up(key, &mut entry.lock(), start).map(Ok),
        }
    }

    fn entry(&self, source: &Source) -> Result<(Key, Entry), CacheError> {
        // Objects are found by the compiler that would make them: without one there is nothing to find.
        let key = Key::new(source, Compiler::find()?.identity());
        Ok((key, self.entries.lock().entry(key).or_default().clone()))
    }

    fn look_up(&self, key: Key, place: &mut Option<Arc<Library>>, start: Instant) -> Option<Loaded> {
        if let Some(library) = place {
            return Some(Loaded { library: library.clone(), origin: Origin::Memory, time: start.elapsed() });
        }
        let path = object_path(self.directory.as_ref().ok()?, key);
        if !fs::read(&path).is_ok_and(|bytes| is_whole(&bytes)) {
            return None;
        }
        // An intact object that will not load (another system's, say) is rebuilt like a damaged one.
        let library = Arc::new(Library::open(&path).ok()?);
        *place = Some(library.clone());
        Some(Loaded { library, origin: Origin::Disk, time: start.elapsed() })
    }

    /// Compiles, seals, publishes and loads. A directory that can't be written to is done without.
    fn build(&self, key: Key, source: &Source) -> Result<Library, CacheError> {
        let compiler = Compiler::find()?;
        if let Ok(directory) = &self.directory
            && let Ok(workshop) = Workshop::new(directory)
        {
            let object = workshop.compile(compiler, source)?;
            let published = object_path(directory, key);
            // The text stays beside the object for people to read; losing it does no harm.
            let _ = fs::rename(object.with_extension("c"), published.with_extension("c"));
            if fs::rename(&object, &published).is_ok() {
                return Library::open(&published);
            }
            return Library::open(&object);
        }
        let temporary = std::env::temp_dir();
        let workshop = Workshop::new(&temporary)
            .map_err(|error| CcError::system("make a folder in", &temporary, error))?;
        // Once loaded, the code no longer needs its file.
        Library::open(&workshop.compile(compiler, source)?)
    }
}

/// A private folder that a compilation works in; removed when done, unless a failed source was kept in it.
struct Workshop {
    path: PathBuf,
    keep: std::cell::Cell<bool>,
}

impl Workshop {
    fn new(parent: &Path) -> std::io::Result<Workshop> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        // In a folder shared with others, a guessed name may be taken: making the folder must be what makes it ours.
        for _ in 0..100 {
            let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            let name = format!(
                "kiln-{}-{}-{:x}",
                std::process::id(),
                NEXT.fetch_add(1, Ordering::Relaxed),
                clock.map_or(0, |time| time.subsec_nanos())
            );
            let path = parent.join(name);
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Workshop { path, keep: false.into() }),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            }
        }
        Err(std::io::ErrorKind::AlreadyExists.into())
    }

    /// The sealed object of a source.
    fn compile(&self, compiler: &Compiler, source: &Source) -> Result<PathBuf, CcError> {
        let object = self.path.join("kernel.so");
        if let Err(error) = compiler.compile_shared(&source.text, &source.all_flags(), &object) {
            self.keep.set(matches!(error, CcError::Failed { .. } | CcError::TimedOut { .. }));
            return Err(error);
        }
        seal(&object).map_err(|error| CcError::system("seal", &object, error))?;
        Ok(object)
    }
}

impl Drop for Workshop {
    fn drop(&mut self) {
        if !self.keep.get() {
            // Only litter if it fails.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

fn object_path(directory: &Path, key: Key) -> PathBuf {
    let mut name = String::with_capacity(67);
    // Writing to a string does not fail.
    let _ = write!(name, "{key}.so");
    directory.join(name)
}

/// Appends the checksum; loaders ignore what follows an object's own tables.
fn seal(object: &Path) -> std::io::Result<()> {
    let sum = Sha256::digest(fs::read(object)?);
    let mut file = OpenOptions::new().append(true).open(object)?;
    file.write_all(&[sum.as_slice(), MARK].concat())
}

fn is_whole(bytes: &[u8]) -> bool {
    let Some((object, trailer)) = bytes.split_last_chunk::<TRAILER>() else { return false };
    trailer[32..] == *MARK && Sha256::digest(object).as_slice() == &trailer[..32]
}

/// Makes sure of a directory that is ours alone.
fn accept(path: &Path) -> Result<PathBuf, Refused> {
    let unusable =
        |reason: std::io::Error| Refused::Unusable { path: path.to_owned(), reason: reason.to_string() };
    // Without a slash at the end, through which a link would be followed.
    let plain: PathBuf = path.components().collect();
    let data = match fs::symlink_metadata(&plain) {
        Ok(data) => data,
        Err(_) => {
            DirBuilder::new().recursive(true).mode(0o700).create(&plain).map_err(unusable)?;
            fs::symlink_metadata(&plain).map_err(unusable)?
        }
    };
    // SAFETY: geteuid has no preconditions.
    let user = unsafe { libc::geteuid() };
    let (owner, mode) = (data.uid(), data.mode() & 0o7777);
    if data.is_symlink() {
        Err(Refused::Symlink(plain))
    } else if !data.is_dir() {
        Err(Refused::NotADirectory(plain))
    } else if owner != user {
        Err(Refused::OtherOwner { path: plain, owner, user })
    } else if mode & 0o022 != 0 {
        Err(Refused::Writable { path: plain, mode })
    } else {
        std::path::absolute(&plain).map_err(unusable)
    }
}
