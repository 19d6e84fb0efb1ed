//! Source locations: which line of the user's program asked for an op.

use std::cell::Cell;
use std::fmt;
use std::panic::Location;

/// A line of the user's program. Capture puts one on every node.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Loc(Option<&'static Location<'static>>);

impl Loc {
    /// A location that nobody knows (parsed graphs, generated nodes).
    pub const UNKNOWN: Loc = Loc(None);

    /// The caller's line; for a line of library code that works on somebody's behalf, theirs.
    #[track_caller]
    #[inline]
    pub fn caller() -> Loc {
        let here = Location::caller();
        match BEHALF.get() {
            Some(work) if work.libraries.iter().any(|library| here.file().starts_with(library)) => {
                work.caller
            }
            _ => Loc(Some(here)),
        }
    }

    /// The caller's line, on whoever's behalf it works.
    #[track_caller]
    pub(crate) fn here() -> Loc {
        Loc(Some(Location::caller()))
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
        self.0.is_some()
    }

    /// File and line, if known. The file is shortened to its last component.
    pub fn file_line(self) -> Option<(&'static str, u32)> {
        self.0.map(|l| (l.file().rsplit(['/', '\\']).next().unwrap_or(l.file()), l.line()))
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
