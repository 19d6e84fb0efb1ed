//! The kernel cache: compiled sources in memory, then on disk, then from the compiler. What lies on disk, and
//! why it may be loaded, is in [`directory`](crate::directory).

mod source;
mod workshop;

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::cc::{CcError, Compiler};
use crate::directory::{self, Contents, DEFAULT_LIMIT, Directory, Refused};
use crate::kernel::KernelFn;
use crate::object::BadObject;
use workshop::Workshop;

pub use source::{Key, Source};

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

    /// Loads an object. Where programs can't be run from its folder, a copy elsewhere is loaded.
    fn open(path: &Path, symbols: &[String]) -> Result<Library, CacheError> {
        let library = Library::open_here(path).or_else(|error| {
            let Ok(workshop) = Workshop::temporary() else { return Err(error) };
            let copy = workshop.path.join("kernel.so");
            // Once loaded, the code no longer needs its file.
            fs::copy(path, &copy)
                .map_err(|_| error.clone())
                .and_then(|_| Library::open_here(&copy).map_err(|_| error))
        })?;
        match symbols.iter().find(|name| library.symbol(name).is_none()) {
            Some(name) => Err(CacheError::Object {
                path: path.to_owned(),
                reason: BadObject::MissingSymbol { name: name.clone() },
            }),
            None => Ok(library),
        }
    }

    fn open_here(path: &Path) -> Result<Library, CacheError> {
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
    /// The compiler said that all went well, but what it wrote can't be used.
    #[error("the C compiler reported success, but {path} can't be used: {reason}")]
    Object {
        /// The object.
        path: PathBuf,
        /// What is wrong with it.
        reason: BadObject,
    },
}

impl CacheError {
    /// Whether every source fails in this way: there is no compiler, or it hangs.
    pub fn is_for_all(&self) -> bool {
        let CacheError::Compiler(error) = self else { return false };
        matches!(error, CcError::Disabled | CcError::Missing { .. } | CcError::TimedOut { .. })
    }

    /// Whether the place where it was tried may be why: elsewhere it may work.
    fn is_of_the_place(&self, directory: &Directory) -> bool {
        match self {
            CacheError::Compiler(CcError::System { .. }) | CacheError::Load { .. } => true,
            CacheError::Compiler(CcError::Failed { .. }) | CacheError::Object { .. } => directory.is_full(),
            CacheError::Compiler(_) => false,
        }
    }
}

/// What is known of one source.
#[derive(Debug, Default)]
enum Known {
    #[default]
    Nothing,
    /// Its library, as long as somebody has it.
    Loaded(Weak<Library>),
    /// The compiler failed; it is not asked again for the same text.
    Failed(CacheError),
}

/// One source's place in memory; its lock makes threads that want the same source wait for the one compiling.
type Entry = Arc<Mutex<Known>>;

/// So many libraries stay loaded though nobody may use them any more. Each takes about four of the 65,530 mappings that
/// a process may have on Linux.
const UNUSED: usize = 256;

/// What this process has of the cache.
#[derive(Debug, Default)]
struct Memory {
    entries: HashMap<Key, Entry>,
    /// The libraries that were loaded last, which are not unloaded when their users are gone.
    recent: VecDeque<Arc<Library>>,
}

/// Compiled sources, in memory and in a directory.
#[derive(Debug)]
pub struct KernelCache {
    directory: Result<Directory, Refused>,
    memory: Mutex<Memory>,
    unused: usize,
}

static GLOBAL: OnceLock<KernelCache> = OnceLock::new();

/// Waits for the compiler's name, if somebody is asking for it: a process that forked now would wait without end.
#[cfg(target_os = "linux")]
pub(crate) fn settle() {
    if let Some(cache) = GLOBAL.get() {
        // Whoever needs the compiler is told why there is none.
        let _ = cache.compiler();
    }
}

impl KernelCache {
    /// The process's cache: `KILN_CACHE_DIR`, else `$XDG_CACHE_HOME/kiln` or `~/.cache/kiln`.
    pub fn global() -> &'static KernelCache {
        GLOBAL.get_or_init(|| {
            let variable =
                |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
            let directory = variable("KILN_CACHE_DIR")
                .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("kiln")))
                .or_else(|| Some(variable("HOME")?.join(".cache/kiln")))
                .ok_or(Refused::NoPlace);
            let cache = KernelCache::new(directory.and_then(|path| Directory::accept(&path, limit())));
            // A compiler that has to be asked who it is answers while graphs are taken through the passes.
            if cache.directory.as_ref().is_ok_and(Directory::is_new) {
                let _ = std::thread::Builder::new()
                    .name("kiln-cc".into())
                    .spawn(|| _ = KernelCache::global().compiler());
            }
            cache
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
            let message =
                format!("the kernel cache is off, every process compiles its own kernels: {reason}");
            crate::warn::once(&message, || message.clone());
        }
        KernelCache { directory, memory: Mutex::default(), unused: UNUSED }
    }

    /// The same cache, which keeps at most so many libraries loaded that nobody uses.
    pub fn with_unused(self, unused: usize) -> KernelCache {
        KernelCache { unused, ..self }
    }

    /// Unloads the libraries that nobody uses.
    pub fn release(&self) {
        let released = {
            let mut memory = self.memory.lock();
            let released = std::mem::take(&mut memory.recent);
            memory.forget_unloaded();
            released
        };
        // Outside of the lock: unloading takes the loader's.
        drop(released);
        self.memory.lock().forget_unloaded();
    }

    /// How many sources this process knows the library of, or why there is none.
    pub fn known(&self) -> usize {
        self.memory.lock().entries.len()
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
        String::from_utf8(self.directory.as_ref().ok()?.read(&self.remark_name(key)?)?).ok()
    }

    /// Keeps a remark beside the objects for this and other processes: what was measured, say. One that can't
    /// be kept is only missed.
    pub fn keep_remark(&self, key: &str, text: &str) {
        if let (Ok(directory), Some(name)) = (&self.directory, self.remark_name(key)) {
            directory.keep(&name, text.as_bytes());
        }
    }

    /// A plan that was kept under a key, if it is whole.
    pub fn plan(&self, key: &str) -> Option<Vec<u8>> {
        self.directory.as_ref().ok()?.read(&plan_name(key))
    }

    /// Keeps a plan beside the objects for other processes. One that can't be kept is only missed.
    pub fn keep_plan(&self, key: &str, bytes: &[u8]) {
        if let Ok(directory) = &self.directory {
            directory.keep(&plan_name(key), bytes);
        }
    }

    fn remark_name(&self, key: &str) -> Option<String> {
        let key = Key::new(&Source::new(key, &[]), self.compiler().ok()?.1);
        Some(format!("{key}.txt"))
    }

    /// The compiler, and what tells it from others. What it says of itself is kept in the directory.
    fn compiler(&self) -> Result<(&'static Compiler, &'static str), CcError> {
        let compiler = Compiler::find()?;
        let name = |file: &str| {
            let key = Key(Sha256::digest(format!("compiler {file}")).into());
            format!("{key}.txt")
        };
        let directory = self.directory.as_ref().ok();
        let known = |file: &str| String::from_utf8(directory?.read(&name(file))?).ok();
        let keep = |file: &str, identity: &str| {
            if let Some(directory) = directory {
                directory.keep(&name(file), identity.as_bytes());
            }
        };
        Ok((compiler, compiler.identity(known, keep)?))
    }

    /// The library of a source: from memory, from disk, or compiled now.
    pub fn load(&self, source: &Source) -> Result<Loaded, CacheError> {
        let start = Instant::now();
        let (key, entry) = self.entry(source)?;
        let mut place = entry.lock();
        if let Some(found) = self.look_up(key, source, &mut place, start) {
            return found;
        }
        let built = self.build(key, source).map(Arc::new);
        *place = match &built {
            Ok(library) => Known::Loaded(Arc::downgrade(library)),
            // What the compiler makes of a text does not change; what the system had no room for may.
            Err(CacheError::Compiler(CcError::System { .. }) | CacheError::Load { .. }) => Known::Nothing,
            Err(error) => Known::Failed(error.clone()),
        };
        drop(place);
        let library = built?;
        self.hold(&library);
        Ok(Loaded { library, origin: Origin::Compiler, time: start.elapsed() })
    }

    /// Keeps a library for a while, whoever else does.
    fn hold(&self, library: &Arc<Library>) {
        let dropped = {
            let mut memory = self.memory.lock();
            memory.recent.push_back(library.clone());
            let excess = memory.recent.len().saturating_sub(self.unused);
            let dropped: Vec<Arc<Library>> = memory.recent.drain(..excess).collect();
            if memory.entries.len() > 2 * (self.unused + memory.recent.len()) {
                memory.forget_unloaded();
            }
            dropped
        };
        // Outside of the lock: unloading takes the loader's.
        drop(dropped);
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
            Ok((key, entry)) => self.look_up(key, source, &mut entry.lock(), start),
        }
    }

    fn entry(&self, source: &Source) -> Result<(Key, Entry), CacheError> {
        // Objects are found by the compiler that would make them: without one there is nothing to find.
        let key = Key::new(source, self.compiler()?.1);
        Ok((key, self.memory.lock().entries.entry(key).or_default().clone()))
    }

    fn look_up(
        &self,
        key: Key,
        source: &Source,
        place: &mut Known,
        start: Instant,
    ) -> Option<Result<Loaded, CacheError>> {
        match place {
            Known::Failed(error) => return Some(Err(error.clone())),
            Known::Loaded(library) => {
                if let Some(library) = library.upgrade() {
                    return Some(Ok(Loaded { library, origin: Origin::Memory, time: start.elapsed() }));
                }
            }
            Known::Nothing => {}
        }
        let path = self.directory.as_ref().ok()?.find(&format!("{key}.so"))?;
        // An intact object that will not load (another system's, say) is rebuilt like a damaged one.
        let library = Arc::new(Library::open(&path, &source.symbols).ok()?);
        *place = Known::Loaded(Arc::downgrade(&library));
        self.hold(&library);
        Some(Ok(Loaded { library, origin: Origin::Disk, time: start.elapsed() }))
    }

    /// Compiles, checks, loads and publishes, in the directory or, where that can't be written to, without it.
    fn build(&self, key: Key, source: &Source) -> Result<Library, CacheError> {
        let compiler = self.compiler()?.0;
        if let Ok(directory) = &self.directory {
            match self.build_in(directory, compiler, key, source) {
                Err(error) if error.is_of_the_place(directory) => {}
                done => return done,
            }
        }
        let workshop = Workshop::temporary()?;
        let object = workshop.compile(compiler, source)?;
        // Once loaded, the code no longer needs its file.
        Library::open(&object, &source.symbols)
    }

    fn build_in(
        &self,
        directory: &Directory,
        compiler: &Compiler,
        key: Key,
        source: &Source,
    ) -> Result<Library, CacheError> {
        let workshop = Workshop::new(directory.path())
            .map_err(|error| CcError::system("make a folder in", directory.path(), error))?;
        let object = workshop.compile(compiler, source)?;
        let name = format!("{key}.so");
        directory.seal(&object, &name).map_err(|error| CcError::system("seal", &object, error))?;
        // Loaded before others can see it: an object that ends the process ends no other.
        let library = Library::open(&object, &source.symbols)?;
        let published = directory.path().join(name);
        let text = published.with_extension("c");
        // The text stays beside the object for people to read; losing it does no harm.
        let _ = fs::rename(object.with_extension("c"), &text);
        if fs::rename(&object, &published).is_ok() {
            directory.added(&[&published, &text]);
        }
        Ok(library)
    }
}

impl Memory {
    /// Drops what is known of libraries that are no longer loaded. A place that somebody is working on stays.
    fn forget_unloaded(&mut self) {
        self.entries.retain(|_, entry| {
            entry.try_lock().is_none_or(|known| match &*known {
                Known::Loaded(library) => library.strong_count() > 0,
                Known::Failed(_) => true,
                Known::Nothing => Arc::strong_count(entry) > 1,
            })
        });
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
            format!("KILN_CACHE_SIZE={text} is not a size such as 500M or 2G; using 1G")
        });
        DEFAULT_LIMIT
    })
}
