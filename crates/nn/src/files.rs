//! Files as Kiln reads and writes them: opened only if they are regular files, and replaced as a whole or not at all.
//!
//! [Note: writing atomically] A file is written under a name of its own in the same folder (`.kiln-<random>.part`,
//! created with `O_EXCL`), flushed to the disk, and renamed; then the folder is flushed, so that the new name
//! survives a crash as well. Whoever saves at the same time, in this process or in another one, has another part,
//! and the last rename wins.
//!
//! A writer holds its part's lock (`flock`), which ends with the process. So a part whose lock is free was left
//! behind by a process that was killed, and the next save into that folder removes it. The writer may lose its part
//! to such a clean-up between creating and locking it; it looks whether the name is still there once it has the lock,
//! since nobody takes it away from then on. Where a file system has no locks, parts are left alone.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use kiln_ir::Error;
use kiln_tensor::Result;

const PREFIX: &str = ".kiln-";
const SUFFIX: &str = ".part";
/// Hexadecimal digits between the two.
const DIGITS: usize = 32;

/// How many dims a tensor in a file may have.
pub(crate) const MOST_DIMS: usize = 64;

/// An error of the surroundings about a file.
pub fn fail(path: &Path, error: impl std::fmt::Display) -> Error {
    Error::Environment(format!("{}: {error}", path.display()))
}

/// Opens a regular file, and says how long it is. Opening a pipe would wait for whoever writes to it.
pub(crate) fn open(path: &Path) -> Result<(File, u64)> {
    regular(path)?.ok_or_else(|| fail(path, io::Error::from(ErrorKind::NotFound)))?;
    let file = File::open(path).map_err(|error| fail(path, error))?;
    let length = file.metadata().map_err(|error| fail(path, error))?.len();
    Ok((file, length))
}

/// The text of a regular file.
pub fn read_text(path: &Path) -> Result<String> {
    let (file, _) = open(path)?;
    io::read_to_string(file).map_err(|error| fail(path, error))
}

/// Writes a text file, atomically.
pub fn write_text(path: &Path, text: &str) -> Result<()> {
    write_atomically(path, |file| file.write_all(text.as_bytes()).map_err(|error| fail(path, error)))
}

/// What is known of a regular file; nothing if there is none, an error if something else has the name.
fn regular(path: &Path) -> Result<Option<fs::Metadata>> {
    match fs::metadata(path) {
        Ok(known) if known.is_file() => Ok(Some(known)),
        Ok(known) if known.is_dir() => Err(fail(path, "it is a folder")),
        Ok(_) => Err(fail(path, "it is not a regular file")),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(fail(path, error)),
    }
}

/// Writes a file so that whoever reads it, whenever that is, sees all of the old one or all of the new one, whoever
/// else saves to the same path. It keeps the permissions of the file that it replaces.
pub(crate) fn write_atomically(path: &Path, body: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    path.file_name().ok_or_else(|| fail(path, "not the name of a file"))?;
    let before = regular(path)?;
    let folder = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    remove_abandoned(folder);
    let (part, file) = create_part(folder)?;
    let write = || -> Result<()> {
        let here = |error| fail(path, error);
        let mut buffered = BufWriter::with_capacity(1 << 20, file);
        body(&mut buffered)?;
        let file = buffered.into_inner().map_err(|error| here(error.into_error()))?;
        if let Some(before) = before {
            file.set_permissions(before.permissions()).map_err(here)?;
        }
        file.sync_all().map_err(here)?;
        // The lock is held until the name is another one.
        fs::rename(&part, path).map_err(here)?;
        sync_folder(folder).map_err(here)
    };
    let written = write();
    if written.is_err() {
        // What is left of it is of no use; if it can't be removed, the first error says more.
        let _ = fs::remove_file(&part);
    }
    written
}

/// A number that no other process or thread has: keys of hash maps are seeded by the operating system.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(0u64)
}

/// A new, empty, locked file under a name that nobody else has.
fn create_part(folder: &Path) -> Result<(PathBuf, File)> {
    loop {
        let part = folder.join(format!("{PREFIX}{:016x}{:016x}{SUFFIX}", random(), random()));
        match File::create_new(&part) {
            Ok(file) => {
                // Without locks nobody cleans up, so there is nobody to tell that this one is in use.
                let _ = file.lock();
                if fs::symlink_metadata(&part).is_ok() {
                    return Ok((part, file));
                }
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(fail(folder, error)),
        }
    }
}

/// Removes the parts in a folder whose writers are gone. What can't be removed is for the next time.
fn remove_abandoned(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if is_part(&entry.file_name()) && entry.file_type().is_ok_and(|kind| kind.is_file()) {
            let part = entry.path();
            // Network file systems lock for writing only what is open for writing.
            if let Ok(file) = File::options().write(true).open(&part)
                && file.try_lock().is_ok()
            {
                let _ = fs::remove_file(&part);
            }
        }
    }
}

fn is_part(name: &OsStr) -> bool {
    let middle =
        name.to_str().and_then(|name| name.strip_prefix(PREFIX)).and_then(|name| name.strip_suffix(SUFFIX));
    middle
        .is_some_and(|digits| digits.len() == DIGITS && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

/// Puts the names in a folder on the disk, where folders can be opened.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(not(unix)) {
        return Ok(());
    }
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        // Some file systems have no such thing.
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// What the processes that these tests start are to do, and where.
    const TASK: &str = "KILN_FILES_TASK";
    const SIZE: usize = 300_000;
    const SAVES: u8 = 12;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("kiln-files-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn start(task: &str, path: &Path) -> Child {
        let test = "files::tests::other_process";
        Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", test, "--nocapture"])
            .env(TASK, format!("{task} {}", path.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn parts(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().flatten().filter(|entry| is_part(&entry.file_name())).count()
    }

    /// One version: the same byte all over, written in pieces, and its length depends on it.
    fn save_version(path: &Path, version: u8) {
        write_atomically(path, |file| {
            let all = vec![version; SIZE + usize::from(version)];
            all.chunks(10_000).try_for_each(|piece| file.write_all(piece)).map_err(|e| fail(path, e))
        })
        .unwrap();
    }

    fn save_versions(path: &Path, first: u8) {
        (first..first + SAVES).for_each(|version| save_version(path, version));
    }

    fn check_whole(path: &Path) {
        let bytes = fs::read(path).unwrap();
        assert!(bytes.len() == SIZE + usize::from(bytes[0]), "{} bytes of {}", bytes.len(), bytes[0]);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "two versions in one file");
    }

    /// Not a test by itself: what the other processes run.
    #[test]
    #[ignore = "started by other tests, in a process of its own"]
    fn other_process() {
        let Ok(task) = std::env::var(TASK) else { return };
        let (task, path) = task.split_once(' ').unwrap();
        let path = Path::new(path);
        match task {
            "hang" => write_text_and(path, || {
                writeln!(io::stdout(), "in the middle").unwrap();
                loop {
                    std::thread::park();
                }
            }),
            first => save_versions(path, first.parse().unwrap()),
        }
    }

    fn write_text_and(path: &Path, then: impl FnOnce()) {
        write_atomically(path, |file| {
            file.write_all(&[7; 5000]).map_err(|error| fail(path, error))?;
            file.flush().map_err(|error| fail(path, error))?;
            then();
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn saves_to_one_path_leave_a_whole_file() {
        let folder = folder("race");
        let path = folder.join("model");
        save_version(&path, 1);
        let others = [20u8, 60, 100].map(|first| start(&first.to_string(), &path));
        std::thread::scope(|scope| {
            let writers = [140u8, 180, 220].map(|first| {
                scope.spawn({
                    let path = &path;
                    move || save_versions(path, first)
                })
            });
            while !writers.iter().all(|writer| writer.is_finished()) {
                check_whole(&path);
            }
        });
        for other in others {
            assert!(other.wait_with_output().unwrap().status.success());
            check_whole(&path);
        }
        assert_eq!(parts(&folder), 0);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn parts_are_removed_when_their_writer_is_gone() {
        let folder = folder("killed");
        let path = folder.join("model");
        /// Ended even if the test fails.
        struct Ended(Child);
        impl Drop for Ended {
            fn drop(&mut self) {
                let _ = self.0.kill();
                let _ = self.0.wait();
            }
        }
        let mut other = Ended(start("hang", &path));
        let mut lines = BufReader::new(other.0.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("in the middle")));
        // Files that are not ours to remove: other names, a folder, a link.
        let digits = "0".repeat(DIGITS);
        let kept = [".kiln-12.part".into(), "a.part".into(), format!(".kiln-{}g.part", &digits[1..])];
        kept.iter().for_each(|name| fs::write(folder.join(name), "").unwrap());
        fs::create_dir(folder.join(format!(".kiln-{digits}.part"))).unwrap();

        save_version(&path, 1);
        assert_eq!(parts(&folder), 2, "the other process is still writing");
        drop(other);
        save_version(&path, 2);
        assert_eq!(parts(&folder), 1, "only the folder of that name is left");
        assert!(kept.iter().all(|name| folder.join(name).exists()));
        check_whole(&path);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_failing_save_changes_nothing() {
        let folder = folder("failing");
        let path = folder.join("model");
        save_version(&path, 1);
        let refused = write_atomically(&path, |file| {
            file.write_all(b"half").map_err(|error| fail(&path, error))?;
            Err(fail(&path, "enough"))
        });
        assert!(refused.unwrap_err().to_string().contains("enough"));
        check_whole(&path);
        let taken = folder.join("taken");
        fs::create_dir(&taken).unwrap();
        assert!(write_text(&taken, "").unwrap_err().to_string().contains("it is a folder"));
        assert!(write_text(&folder.join("none/model"), "").is_err());
        assert!(write_text(Path::new("/"), "").is_err());
        assert!(open(&taken).unwrap_err().to_string().contains("it is a folder"));
        assert_eq!(parts(&folder), 0);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn pipes_are_refused_and_permissions_stay() {
        use std::os::unix::fs::PermissionsExt;
        let folder = folder("pipes");
        let pipe = folder.join("pipe");
        if Command::new("mkfifo").arg(&pipe).status().is_ok_and(|status| status.success()) {
            let told = |result: Result<()>| result.unwrap_err().to_string();
            assert!(told(open(&pipe).map(drop)).contains("not a regular file"));
            assert!(told(write_text(&pipe, "")).contains("not a regular file"));
            assert!(!fs::symlink_metadata(&pipe).unwrap().is_file(), "the pipe is still there");
        }
        let path = folder.join("secret");
        write_text(&path, "a").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        write_text(&path, "b").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::remove_dir_all(&folder).unwrap();
    }
}
