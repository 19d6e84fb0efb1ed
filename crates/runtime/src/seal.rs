//! Seals: what tells files of the cache that this user's processes wrote from all others, and how a file that
//! anybody may have put there is read.
//!
//! A sealed file ends with a keyed hash (HMAC-SHA-256) over its name and contents. The key is a file of the
//! directory that only the user can read. So a file that was damaged, changed, renamed or brought in from elsewhere is
//! not taken for one of ours, even by somebody who can write to the directory but not read the key.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use hmac::{Hmac, Mac as _};
use sha2::Sha256;

/// Ends every sealed file; a new layout of the cache gets a new mark.
pub(crate) const MARK: &[u8; 8] = b"KILNOBJ2";
const TRAILER: usize = 32 + MARK.len();

/// The file that holds a directory's key.
const KEY_FILE: &str = "key";

/// A user's key.
pub(crate) struct Seal {
    key: [u8; 32],
    /// Whether this process has made it.
    pub is_new: bool,
}

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Seal")
    }
}

impl Seal {
    /// The key of a directory, made if there is none. Where it can't be kept it is good for this process alone.
    pub fn of(directory: &Path) -> io::Result<Seal> {
        let path = directory.join(KEY_FILE);
        let there = |path: &Path| read_private(path).ok().and_then(|bytes| bytes.try_into().ok());
        if let Some(key) = there(&path) {
            return Ok(Seal { key, is_new: false });
        }
        let mut key = [0; 32];
        random(&mut key)?;
        let draft = directory.join(format!("{KEY_FILE}-{}", draft_name(&key)));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600).custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW);
        let written = options.open(&draft).and_then(|mut file| file.write_all(&key));
        if written.is_ok() && fs::hard_link(&draft, &path).is_err() {
            match there(&path) {
                // Another process was first.
                Some(first) => key = first,
                // What lies there is no key of ours: it goes, and with it what it sealed.
                None => _ = fs::rename(&draft, &path),
            }
        }
        // Only litter if it fails, or gone already.
        let _ = fs::remove_file(&draft);
        Ok(Seal { key, is_new: true })
    }

    fn hash(&self, name: &str, bytes: &[u8]) -> Hmac<Sha256> {
        #[allow(clippy::expect_used, reason = "HMAC takes keys of any length")]
        let mut hash = Hmac::<Sha256>::new_from_slice(&self.key).expect("a key of any length will do");
        // The length first, so that no name and contents run together to others.
        hash.update(&(name.len() as u64).to_le_bytes());
        hash.update(name.as_bytes());
        hash.update(bytes);
        hash
    }

    /// What follows these bytes in a file of this name.
    pub fn put(&self, name: &str, bytes: &[u8]) -> Vec<u8> {
        [self.hash(name, bytes).finalize().into_bytes().as_slice(), MARK].concat()
    }

    /// Whether these are the bytes of a file of this name as one of the user's processes wrote it.
    pub fn is_on(&self, name: &str, bytes: &[u8]) -> bool {
        let Some((contents, trailer)) = bytes.split_last_chunk::<TRAILER>() else { return false };
        trailer[32..] == *MARK && self.hash(name, contents).verify_slice(&trailer[..32]).is_ok()
    }

    /// The contents of a sealed file, without the seal, if the seal is on it.
    pub fn open(&self, name: &str, mut bytes: Vec<u8>) -> Option<Vec<u8>> {
        self.is_on(name, &bytes).then(|| bytes.truncate(bytes.len() - TRAILER)).map(|()| bytes)
    }
}

fn draft_name(key: &[u8; 32]) -> String {
    use sha2::Digest as _;
    // A name that nobody guesses and that says nothing of the key.
    Sha256::digest(key)[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Fills `bytes` with numbers that nobody can guess.
pub(crate) fn random(bytes: &mut [u8]) -> io::Result<()> {
    // SAFETY: the pointer and the length are those of one slice.
    let status = unsafe { libc::getentropy(bytes.as_mut_ptr().cast(), bytes.len()) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The user of this process.
pub(crate) fn user() -> u32 {
    // SAFETY: geteuid has no preconditions.
    unsafe { libc::geteuid() }
}

/// A file of this user that nobody else can write. A pipe or a device in its place is an error at once: opening it
/// does not wait.
pub(crate) fn open_own(path: &Path) -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let data = file.metadata()?;
    if data.is_file() && data.uid() == user() && data.mode() & 0o022 == 0 {
        Ok(file)
    } else {
        Err(io::ErrorKind::PermissionDenied.into())
    }
}

/// Its contents.
pub(crate) fn read_own(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_own(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The contents of a file that nobody else can even read.
fn read_private(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = open_own(path)?;
    if file.metadata()?.mode() & 0o077 != 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::testing::Folder;

    #[test]
    fn a_seal_is_for_one_key_one_name_and_these_bytes() {
        let folders = [Folder::new("seal"), Folder::new("seal")];
        let [mine, other] = [0, 1].map(|number: usize| Seal::of(folders[number].path()).unwrap());
        let sealed = [&b"contents"[..], &mine.put("name", b"contents")].concat();
        assert_eq!(mine.open("name", sealed.clone()).unwrap(), b"contents");
        assert!(!other.is_on("name", &sealed) && !mine.is_on("names", &sealed) && !mine.is_on("name", b""));
        for place in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[place] ^= 1;
            assert!(!mine.is_on("name", &changed), "byte {place}");
        }
        // The key stays the same, and is the user's secret.
        assert!(Seal::of(folders[0].path()).unwrap().is_on("name", &sealed));
        let key = folders[0].path().join(KEY_FILE);
        assert_eq!(fs::metadata(&key).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folders[0].path()).unwrap().count(), 1);
        // A key that others could read is replaced.
        fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(!Seal::of(folders[0].path()).unwrap().is_on("name", &sealed));
        assert_eq!(fs::metadata(&key).unwrap().mode() & 0o777, 0o600);
    }
}
