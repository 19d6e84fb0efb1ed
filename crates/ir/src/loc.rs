//! Source locations: which line of the user's program asked for an op.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::panic::Location;
use std::sync::{Mutex, PoisonError};

/// A line of the user's program. Capture puts one on every node.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Loc(Place);

#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default)]
enum Place {
    #[default]
    Unknown,
    /// Of this program: the compiler keeps it.
    Rust(&'static Location<'static>),
    /// Of another one, in whatever language: kept by [`Loc::at`].
    Other(&'static Position),
}

/// A place in a source that is not this program's.
#[derive(PartialEq, Eq, Hash, Debug)]
struct Position {
    file: String,
    line: u32,
    column: u32,
}

/// All positions there are: each is kept once, for as long as the process lives.
static POSITIONS: Mutex<Option<HashSet<&'static Position>>> = Mutex::new(None);

impl Loc {
    /// A location that nobody knows (parsed graphs, generated nodes).
    pub const UNKNOWN: Loc = Loc(Place::Unknown);

    /// A place in a source of another language, or in a file of graphs. Equal places are one, however often they are
    /// asked for.
    pub fn at(file: &str, line: u32, column: u32) -> Loc {
        let position = Position { file: file.into(), line, column };
        let mut positions = POSITIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let positions = positions.get_or_insert_default();
        let known = positions.get(&position).copied();
        Loc(Place::Other(known.unwrap_or_else(|| {
            let kept: &'static Position = Box::leak(Box::new(position));
            positions.insert(kept);
            kept
        })))
    }

    /// The caller's line; for a line of library code that works on somebody's behalf, theirs.
    #[track_caller]
    #[inline]
    pub fn caller() -> Loc {
        let here = Location::caller();
        match BEHALF.get() {
            Some(work) if work.libraries.iter().any(|library| here.file().starts_with(library)) => {
                work.caller
            }
            _ => Loc(Place::Rust(here)),
        }
    }

    /// The caller's line, on whoever's behalf it works.
    #[track_caller]
    pub(crate) fn here() -> Loc {
        Loc(Place::Rust(Location::caller()))
    }

    /// Until the returned value is dropped, ops that files below the folder `library` ask for are put down to
    /// this line (an optimizer's to the line that called `step`). Of nested ones the outermost line counts, for the
    /// folders of both.
    pub fn on_behalf(self, library: &'static str) -> Behalf {
        let previous = BEHALF.get();
        let work = match previous {
            None => Work { caller: self, libraries: [library; 2] },
            Some(outer) => Work { libraries: [outer.libraries[0], library], ..outer },
        };
        BEHALF.set(Some(work));
        Behalf { previous, _not_send: std::marker::PhantomData }
    }

    /// Whether a line is known.
    pub fn is_known(self) -> bool {
        self.0 != Place::Unknown
    }

    /// File and line, if known. The file is shortened to its last component.
    pub fn file_line(self) -> Option<(&'static str, u32)> {
        let (file, line) = match self.0 {
            Place::Unknown => return None,
            Place::Rust(location) => (location.file(), location.line()),
            Place::Other(position) => (position.file.as_str(), position.line),
        };
        Some((file.rsplit(['/', '\\']).next().unwrap_or(file), line))
    }
}

/// On whose behalf which folders of library code work.
#[derive(Copy, Clone)]
struct Work {
    caller: Loc,
    libraries: [&'static str; 2],
}

thread_local! {
    static BEHALF: Cell<Option<Work>> = const { Cell::new(None) };
}

/// See [`Loc::on_behalf`].
#[must_use = "it lasts as long as this value"]
pub struct Behalf {
    previous: Option<Work>,
    /// It is the thread's.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Drop for Behalf {
    fn drop(&mut self) {
        BEHALF.set(self.previous);
    }
}

/// A line of the user's program, as well as it is known: `Display` of a tensor is not told who called it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Line {
    /// The line itself.
    At(Loc),
    /// Found on the call stack: `model.rs:42`, or the function where the program has no debug information.
    Found(String),
    /// The line of the op before, where nothing more is known.
    After(Loc),
}

impl From<Loc> for Line {
    fn from(loc: Loc) -> Line {
        Line::At(loc)
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Line::At(loc) => write!(f, "{loc}"),
            Line::Found(text) => f.write_str(text),
            Line::After(loc) if loc.is_known() => write!(f, "a line after {loc}"),
            Line::After(loc) => write!(f, "{loc}"),
        }
    }
}

impl fmt::Display for Loc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.file_line() {
            Some((file, line)) => write!(f, "{file}:{line}"),
            None => f.write_str("unknown location"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_other_languages_are_kept_once() {
        let (a, b) = (Loc::at("net/model.py", 12, 8), Loc::at("net/model.py", 12, 8));
        assert!(matches!((a.0, b.0), (Place::Other(a), Place::Other(b)) if std::ptr::eq(a, b)));
        assert_eq!((a.to_string(), a.is_known()), ("model.py:12".into(), true));
        assert_ne!(a, Loc::at("net/model.py", 13, 8));
        assert_ne!(Loc::caller(), Loc::UNKNOWN);
    }
}
