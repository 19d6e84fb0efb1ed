//! What long work of the compiler tells whoever wants to show it.

use std::fmt;
use std::sync::Arc;

use parking_lot::RwLock;

/// Something that takes long, and how far it is.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Progress {
    /// What is being done: `compiling kernels`.
    pub what: &'static str,
    /// How much of it is done.
    pub done: usize,
    /// How much there is.
    pub total: usize,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.what, self.done, self.total)
    }
}

type Observer = Arc<dyn Fn(&Progress) + Send + Sync>;

static OBSERVER: RwLock<Option<Observer>> = RwLock::new(None);

/// Has a function called with the progress of everything in the process that takes long: kernels that are compiled,
/// forms that mode `max-autotune` measures. It replaces the function that was set before, and is called between
/// measurements, not while one runs.
///
/// ```
/// kiln_dynamo::on_progress(|progress| eprintln!("{progress}"));
/// ```
pub fn on_progress(observer: impl Fn(&Progress) + Send + Sync + 'static) {
    *OBSERVER.write() = Some(Arc::new(observer));
}

/// Tells the observer, if there is one.
pub(crate) fn tell(what: &'static str, done: usize, total: usize) {
    let observer = OBSERVER.read().clone();
    if let Some(observer) = observer {
        observer(&Progress { what, done, total });
    }
}
