//! The kernel cache: compiled sources in memory, then on disk, then from the compiler. What lies on disk, and
//! why it may be loaded, is in [`directory`](crate::directory).

use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
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
use crate::directory::{self, Contents, DEFAULT_LIMIT, Directory, MARK, Refused};
use crate::kernel::KernelFn;

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

impl CacheError {
    /// Whether every source fails in this way: there is no compiler.
    pub fn is_for_all(&self) -> bool {
        matches!(self, CacheError::Compiler(CcError::Disabled | CcError::Missing { .. }))
    }
}

/// One source's place in memory; its lock makes threads that want the same source wait for the one compiling.
/// A compiler that failed is not asked again for the same text.
type Entry = Arc<Mutex<Option<Result<Arc<Library>, CacheError>>>>;

/// Compiled sources, in memory and in a directory.
#[derive(Debug)]
pub struct KernelCache {
    directory: Result<Directory, Refused>,
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
            KernelCache::new(directory.and_then(|path| Directory::accept(&path, limit())))
        })
    }

    /// A cache of its own in the given directory, which is made if it is not there.
    pub fn at(directory: &Path) -> KernelCache {
        KernelCache::with_limit(directory, DEFAULT_LIMIT)
    }

    /// The same with another limit to the bytes in the directory; what was used least recently goes first.
    pub fn with_limit(directory: &Path, limit: u64) -> KernelCache {
        KernelCache::new(Directory::accept(directory, limit))
    }

    fn new(directory: Result<Directory, Refused>) -> KernelCache {
        if let Err(reason) = &directory {
            let message = format!("kernels are compiled anew by every process: {reason}");
            crate::warn::once(&message, || message.clone());
        }
        KernelCache { directory, entries: Mutex::default() }
    }

    /// The directory in use, or why there is none; without one every process compiles its own kernels.
    pub fn directory(&self) -> Result<&Path, &Refused> {
        self.directory.as_ref().map(Directory::path)
    }

    /// How many bytes the directory may hold.
    pub fn limit(&self) -> Result<u64, &Refused> {
        self.directory.as_ref().map(Directory::limit)
    }

    /// What lies in the directory.
    pub fn contents(&self) -> Result<Contents, &Refused> {
        self.directory.as_ref().map(Directory::contents)
    }

    /// The objects on disk that are not whole; whoever wants them next has them compiled again.
    pub fn damaged(&self) -> Result<Vec<PathBuf>, &Refused> {
        self.directory.as_ref().map(Directory::damaged)
    }

    /// Removes what is on disk and returns what there was; what processes have loaded stays loaded.
    pub fn clear(&self) -> Result<Contents, &Refused> {
        self.directory.as_ref().map(Directory::clear)
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
        if fs::write(&draft, text).is_ok() && fs::rename(&draft, &path).is_ok() {
            self.added(&[&path]);
        }
    }

    /// A plan that was kept under a key, if it is whole.
    pub fn plan(&self, key: &str) -> Option<Vec<u8>> {
        self.directory.as_ref().ok()?.read(&plan_name(key))
    }

    /// Keeps a plan beside the objects for other processes. One that can't be kept is only missed.
    pub fn keep_plan(&self, key: &str, bytes: &[u8]) {
        let Ok(directory) = &self.directory else { return };
        let Ok(workshop) = Workshop::new(directory.path()) else { return };
        let (draft, path) = (workshop.path.join("plan"), directory.path().join(plan_name(key)));
        let sealed = [bytes, &directory::seal_of(bytes)].concat();
        // Written apart and renamed, so that nobody reads half of it.
        if fs::write(&draft, sealed).is_ok() && fs::rename(&draft, &path).is_ok() {
            self.added(&[&path]);
        }
    }

    fn added(&self, files: &[&Path]) {
        if let Ok(directory) = &self.directory {
            directory.added(files);
        }
    }

    fn remark_path(&self, key: &str) -> Option<PathBuf> {
        let compiler = Compiler::find().ok()?;
        let key = Key::new(&Source::new(key, &[]), compiler.identity());
        Some(self.directory.as_ref().ok()?.path().join(format!("{key}.txt")))
    }

    /// The library of a source: from memory, from disk, or compiled now.
    pub fn load(&self, source: &Source) -> Result<Loaded, CacheError> {
        let start = Instant::now();
        let (key, entry) = self.entry(source)?;
        let mut place = entry.lock();
        if let Some(found) = self.look_up(key, &mut place, start) {
            return found;
        }
        let built = self.build(key, source).map(Arc::new);
        // What the compiler makes of a text does not change; what the system had no room for may.
        let lasts =
            !matches!(built, Err(CacheError::Compiler(CcError::System { .. }) | CacheError::Load { .. }));
        *place = lasts.then(|| built.clone());
        Ok(Loaded { library: built?, origin: Origin::Compiler, time: start.elapsed() })
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
            Ok((key, entry)) => self.look_up(key, &mut entry.lock(), start),
        }
    }

    fn entry(&self, source: &Source) -> Result<(Key, Entry), CacheError> {
        // Objects are found by the compiler that would make them: without one there is nothing to find.
        let key = Key::new(source, Compiler::find()?.identity());
        Ok((key, self.entries.lock().entry(key).or_default().clone()))
    }

    fn look_up(
        &self,
        key: Key,
        place: &mut Option<Result<Arc<Library>, CacheError>>,
        start: Instant,
    ) -> Option<Result<Loaded, CacheError>> {
        let loaded = |library: &Arc<Library>, origin| {
            Ok(Loaded { library: library.clone(), origin, time: start.elapsed() })
        };
        match place {
            Some(Ok(library)) => return Some(loaded(library, Origin::Memory)),
            Some(Err(error)) => return Some(Err(error.clone())),
            None => {}
        }
        let path = self.directory.as_ref().ok()?.find(&format!("{key}.so"))?;
        // An intact object that will not load (another system's, say) is rebuilt like a damaged one.
        let library = Arc::new(Library::open(&path).ok()?);
        *place = Some(Ok(library.clone()));
        Some(loaded(&library, Origin::Disk))
    }

    /// Compiles, seals, publishes and loads. A directory that can't be written to is done without.
    fn build(&self, key: Key, source: &Source) -> Result<Library, CacheError> {
        let compiler = Compiler::find()?;
        if let Ok(directory) = &self.directory
            && let Ok(workshop) = Workshop::new(directory.path())
        {
            let object = workshop.compile(compiler, source)?;
            let published = directory.path().join(format!("{key}.so"));
            let text = published.with_extension("c");
            // The text stays beside the object for people to read; losing it does no harm.
            let _ = fs::rename(object.with_extension("c"), &text);
            if fs::rename(&object, &published).is_err() {
                return Library::open(&object);
            }
            let library = Library::open(&published);
            directory.added(&[&published, &text]);
            return library;
        }
        let temporary = std::env::temp_dir();
        let workshop = Workshop::new(&temporary)
            .map_err(|error| CcError::system("make a folder in", &temporary, error))?;
        // Once loaded, the code no longer needs its file.
        Library::open(&workshop.compile(compiler, source)?)
    }
}

/// The file of a plan: no compiler took part in it.
fn plan_name(key: &str) -> String {
    let key = Key(Sha256::digest(key.as_bytes()).into());
    format!("{key}.plan")
}

/// The bytes that `KILN_CACHE_SIZE` allows.
fn limit() -> u64 {
    let Some(text) = std::env::var("KILN_CACHE_SIZE").ok().filter(|text| !text.is_empty()) else {
        return DEFAULT_LIMIT;
    };
    directory::parse_size(&text).unwrap_or_else(|| {
        crate::warn::once("KILN_CACHE_SIZE", || {
            format!("KILN_CACHE_SIZE={text} is no size (such as 500M or 2G): using 1G")
        });
        DEFAULT_LIMIT
    })
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
        directory::seal(&object).map_err(|error| CcError::system("seal", &object, error))?;
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
