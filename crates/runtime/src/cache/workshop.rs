//! The private folder that a compilation works in.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{CacheError, Source};
use crate::cc::{CcError, Compiler};
use crate::{directory, object};

/// The folder; removed when done, unless a failed source was kept in it.
pub(super) struct Workshop {
    pub(super) path: PathBuf,
    keep: std::cell::Cell<bool>,
}

impl Workshop {
    pub(super) fn new(parent: &Path) -> std::io::Result<Workshop> {
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

    /// One in the system's folder for temporary files.
    pub(super) fn temporary() -> Result<Workshop, CcError> {
        let folder = std::env::temp_dir();
        let fails = |reason: String| CcError::system("make a folder in", &folder, reason);
        // Nobody else may be able to exchange what is made in it.
        let real = fs::canonicalize(&folder).map_err(|error| fails(error.to_string()))?;
        directory::check_above(&real.join("kiln")).map_err(|error| fails(error.to_string()))?;
        Workshop::new(&real).map_err(|error| fails(error.to_string()))
    }

    /// The object of a source, checked.
    pub(super) fn compile(&self, compiler: &Compiler, source: &Source) -> Result<PathBuf, CacheError> {
        let object = self.path.join("kernel.so");
        if let Err(error) = compiler.compile_shared(&source.text, &source.all_flags(), &object) {
            self.keep.set(matches!(error, CcError::Failed { .. } | CcError::TimedOut { .. }));
            return Err(error.into());
        }
        // Nothing at all is what a compiler wrote that wrote nothing.
        let checked = object::check(&fs::read(&object).unwrap_or_default(), &source.symbols);
        self.keep.set(checked.is_err());
        checked.map_err(|reason| CacheError::Object { path: object.clone(), reason })?;
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
