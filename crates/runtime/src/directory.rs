//! The kernel cache's directory: whose it may be, objects that prove themselves whole, and what goes when it
//! is full.
//!
//! [Note: what makes loading a file safe]
//! A cached object becomes code of this process, so the directory must belong to the user, and nobody else
//! may write to it, nor to a folder above it, through which it could be exchanged; anything else is refused with a
//! reason, and the cache then works from private temporary folders. Files are used if they are the user's, nobody
//! else can write them, and the [seal](crate::seal) under them is right; others are made again. They are written
//! under a name of their own and renamed into place, so other processes see either nothing or all of it; two that
//! build the same object at once write the same content.
//!
//! [Note: what goes when the directory is full]
//! What was used least recently. Using an object sets its access time (explicitly: file systems that are
//! mounted without access times keep what they are told). The directory is walked when this process has first
//! published something and whenever its own count of bytes passes the limit, so the limit may be exceeded by
//! what other processes wrote meanwhile. Objects in use stay mapped when their files go.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, FileTimes, Metadata, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use thiserror::Error;

use crate::seal::{self, Seal, read_own};

/// Bytes that a directory may hold unless `KILN_CACHE_SIZE` says otherwise.
pub const DEFAULT_LIMIT: u64 = 1 << 30;

/// A full directory is emptied to this many tenths of its limit, so that it is not full again at once.
const TENTHS_KEPT: u64 = 9;

/// A compilation's folder that nobody has touched for this long is a leftover of a process that is gone.
const LEFTOVER: Duration = Duration::from_secs(24 * 3600);

/// What a file system that is not full takes at once.
const PROBE: usize = 1 << 20;

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

/// What lies in a cache directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Contents {
    /// Compiled objects.
    pub objects: usize,
    /// C texts beside them, for people to read.
    pub texts: usize,
    /// What was measured.
    pub remarks: usize,
    /// What the compiler made of graphs.
    pub plans: usize,
    /// Folders of compilations that run, failed (with the text that failed) or were cut off.
    pub folders: usize,
    /// All bytes.
    pub bytes: u64,
}

/// A directory that is this user's alone.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    seal: Seal,
    limit: u64,
    /// Bytes in it as far as this process knows; `None` until it has looked.
    bytes: Mutex<Option<u64>>,
}

impl Directory {
    /// Makes sure of a directory that is ours alone; it is made if it is not there.
    pub fn accept(path: &Path, limit: u64) -> Result<Directory, Refused> {
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
        let (user, owner, mode) = (seal::user(), data.uid(), data.mode() & 0o7777);
        if data.is_symlink() {
            return Err(Refused::Symlink(plain));
        }
        if !data.is_dir() {
            return Err(Refused::NotADirectory(plain));
        }
        if owner != user {
            return Err(Refused::OtherOwner { path: plain, owner, user });
        }
        if mode & 0o022 != 0 {
            return Err(Refused::Writable { path: plain, mode });
        }
        // From here on the path has no links in it, and nobody else can put one there.
        let path = fs::canonicalize(&plain).map_err(unusable)?;
        check_above(&path)?;
        let seal = Seal::of(&path).map_err(unusable)?;
        Ok(Directory { path, seal, limit, bytes: Mutex::new(None) })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether nothing of ours was in it before this process.
    pub fn is_new(&self) -> bool {
        self.seal.is_new
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The object of this name, if it is there and whole; it counts as used now.
    pub fn find(&self, name: &str) -> Option<PathBuf> {
        self.read(name)?;
        Some(self.path.join(name))
    }

    /// The contents of a sealed file, without the seal, if it is there and whole; it counts as used now.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        let mut file = seal::open_own(&self.path.join(name)).ok()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        let bytes = self.seal.open(name, bytes)?;
        // A file that can't be told is only forgotten earlier.
        let _ = file.set_times(FileTimes::new().set_accessed(SystemTime::now()));
        Some(bytes)
    }

    /// Puts contents into a file of this name, sealed. One that can't be kept is only missed.
    pub fn keep(&self, name: &str, bytes: &[u8]) {
        let (draft, path) = (self.path.join(Directory::draft()), self.path.join(name));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let sealed = [bytes, &self.seal.put(name, bytes)].concat();
        let written = options.open(&draft).and_then(|mut file| file.write_all(&sealed));
        // Written apart and renamed, so that nobody reads half of it.
        if written.is_ok() && fs::rename(&draft, &path).is_ok() {
            self.added(&[&path]);
        } else {
            let _ = fs::remove_file(&draft);
        }
    }

    /// Appends the seal to an object that will have this name; loaders ignore what follows an object's own tables.
    pub fn seal(&self, object: &Path, name: &str) -> std::io::Result<()> {
        let seal = self.seal.put(name, &fs::read(object)?);
        // Whatever the compiler was allowed to: nobody else may write it.
        fs::set_permissions(object, fs::Permissions::from_mode(0o600))?;
        OpenOptions::new().append(true).open(object)?.write_all(&seal)
    }

    /// Whether a file of some size can't be written any more.
    pub fn is_full(&self) -> bool {
        let draft = self.path.join(Directory::draft());
        let probe = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft);
        let written = probe.and_then(|mut file| file.write_all(&[1; PROBE]).and_then(|()| file.sync_data()));
        let _ = fs::remove_file(&draft);
        written.is_err()
    }

    /// A name for a file that becomes another, in the form of the cache's own folders, which are removed when old.
    fn draft() -> String {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let mut number = [0; 8];
        // Two processes that share a number (in containers, say) still have different random ones.
        let _ = seal::random(&mut number);
        let count = NEXT.fetch_add(1, Ordering::Relaxed);
        format!("kiln-{}-{count}-{:x}.draft", std::process::id(), u64::from_le_bytes(number))
    }

    /// Counts what was just put into the directory, and makes room if that was too much.
    pub fn added(&self, files: &[&Path]) {
        let mut known = self.bytes.lock();
        let new: u64 = files.iter().filter_map(|path| fs::metadata(path).ok()).map(|data| data.len()).sum();
        let bytes = match *known {
            Some(bytes) => bytes + new,
            // The walk finds the new files too.
            None => self.entries().iter().map(|entry| entry.bytes).sum(),
        };
        *known = Some(if bytes > self.limit { self.make_room() } else { bytes });
    }

    /// Removes what was used least recently until the rest is well below the limit; returns the rest's bytes.
    fn make_room(&self) -> u64 {
        let mut entries = self.entries();
        let mut bytes: u64 = entries.iter().map(|entry| entry.bytes).sum();
        entries.sort_by_key(|entry| entry.used);
        for entry in &entries {
            if bytes <= self.limit / 10 * TENTHS_KEPT {
                break;
            }
            if entry.is_removable() {
                entry.remove();
                bytes -= entry.bytes;
            }
        }
        bytes
    }

    pub fn contents(&self) -> Contents {
        let mut contents = Contents::default();
        for entry in self.entries() {
            contents.bytes += entry.bytes;
            contents.objects += entry.count("so");
            contents.texts += entry.count("c");
            contents.remarks += entry.count("txt");
            contents.plans += entry.count("plan");
            contents.folders += usize::from(entry.is_folder);
        }
        contents
    }

    /// Objects and plans that would be made anew because they are not whole.
    pub fn damaged(&self) -> Vec<PathBuf> {
        let sealed =
            |path: &PathBuf| path.extension().is_some_and(|ending| ending == "so" || ending == "plan");
        let objects = self.entries().into_iter().flat_map(|entry| entry.files).filter(sealed);
        let is_damaged = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            !read_own(path).is_ok_and(|bytes| self.seal.is_on(name, &bytes))
        };
        objects.filter(is_damaged).collect()
    }

    /// Removes everything that is the cache's, but for the folders of compilations that may still run;
    /// returns what there was.
    pub fn clear(&self) -> Contents {
        let before = self.contents();
        for entry in self.entries().iter().filter(|entry| entry.is_removable()) {
            entry.remove();
        }
        *self.bytes.lock() = None;
        before
    }

    /// What the cache has put here. Files that it can't have made are left alone.
    fn entries(&self) -> Vec<Entry> {
        let mut entries: BTreeMap<String, Entry> = BTreeMap::new();
        for file in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            // Another process may have removed it meanwhile.
            let (path, Ok(data)) = (file.path(), file.metadata()) else { continue };
            let name = file.file_name();
            let Some((stem, ending)) = name.to_str().map(|name| name.rsplit_once('.').unwrap_or((name, "")))
            else {
                continue;
            };
            let is_key = stem.len() == 64 && stem.bytes().all(|byte| byte.is_ascii_hexdigit());
            let is_draft = data.is_file() && ending == "draft" || data.is_dir() && ending.is_empty();
            let is_folder = is_draft && stem.starts_with("kiln-");
            let is_file = data.is_file() && is_key && ["so", "c", "txt", "plan"].contains(&ending);
            if !is_folder && !is_file {
                continue;
            }
            // An object and its text come and go together.
            let entry = entries.entry(stem.to_owned()).or_insert_with(|| Entry::new(is_folder));
            entry.bytes += if data.is_dir() { folder_bytes(&path) } else { data.len() };
            entry.used = entry.used.max(used(&data, is_folder));
            entry.files.push(path);
        }
        entries.into_values().collect()
    }
}

/// Files that belong together, or the folder of a compilation, or a file that was to become another.
struct Entry {
    files: Vec<PathBuf>,
    bytes: u64,
    used: SystemTime,
    is_folder: bool,
}

impl Entry {
    fn new(is_folder: bool) -> Entry {
        Entry { files: Vec::new(), bytes: 0, used: SystemTime::UNIX_EPOCH, is_folder }
    }

    fn count(&self, ending: &str) -> usize {
        self.files.iter().filter(|path| path.extension().is_some_and(|own| own == ending)).count()
    }

    /// A compilation may still run in a folder that is not old.
    fn is_removable(&self) -> bool {
        !self.is_folder || self.used.elapsed().is_ok_and(|age| age > LEFTOVER)
    }

    fn remove(&self) {
        for path in &self.files {
            // Another process may be doing the same.
            let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        }
    }
}

fn folder_bytes(folder: &Path) -> u64 {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|data| data.len()).sum()
}

/// Looking into a folder is no use of it.
fn used(data: &Metadata, is_folder: bool) -> SystemTime {
    let changed = data.modified().unwrap_or(SystemTime::UNIX_EPOCH);
    if is_folder { changed } else { data.accessed().map_or(changed, |accessed| accessed.max(changed)) }
}

/// Makes sure that nobody but the user and the system can exchange a directory by way of those above it. In a folder
/// that all may write to, but where each can remove only what is theirs (`/tmp`), nobody can.
pub(crate) fn check_above(path: &Path) -> Result<(), Refused> {
    let user = seal::user();
    for above in path.ancestors().skip(1) {
        let data = fs::symlink_metadata(above)
            .map_err(|error| Refused::Unusable { path: above.to_owned(), reason: error.to_string() })?;
        let (owner, mode) = (data.uid(), data.mode() & 0o7777);
        if owner != user && owner != 0 {
            return Err(Refused::OtherOwner { path: above.to_owned(), owner, user });
        }
        if mode & 0o022 != 0 && mode & u32::from(libc::S_ISVTX as u16) == 0 {
            return Err(Refused::Writable { path: above.to_owned(), mode });
        }
    }
    Ok(())
}

/// A number of bytes as `KILN_CACHE_SIZE` has it: `500M`, `2G`, `1000000`.
pub(crate) fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "K" | "KB" | "KIB" => 1 << 10,
        "M" | "MB" | "MIB" => 1 << 20,
        "G" | "GB" | "GIB" => 1 << 30,
        _ => return None,
    };
    digits.trim().parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in
            [("0", 0), ("1000", 1000), ("3k", 3 << 10), ("500 MiB", 500 << 20), ("2G", 2 << 30)]
        {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
        for text in ["", "M", "-1", "1.5G", "many", "99999999999G"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
