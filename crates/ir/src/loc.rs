//! Source locations: which line of the user's program asked for an op.

use std::cell::Cell;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::panic::Location;
use std::sync::{Mutex, OnceLock};

use rustc_hash::FxHashMap;

/// A line of the user's program. Capture puts one on every node.
///
/// Mostly it is Rust's own [`Location`]; lines of graph files and of other languages have [names](Loc::named). It is one
/// pointer either way: every op that is called hands one on.
///
/// ```
/// use kiln_ir::Loc;
/// let line = Loc::named("model.py", 42);
/// assert_eq!(line.to_string(), "model.py:42");
/// assert_eq!((line, line == Loc::named("model.py", 43)), (Loc::named("model.py", 42), false));
/// ```
#[derive(Copy, Clone, Default)]
pub struct Loc(Option<&'static Location<'static>>);

/// Named lines by the address of what stands for them.
///
/// [Note: named lines] Nobody but the compiler can make a `Location`, but a copy of one is another place in memory. So a
/// named line is a copy of a location in this file, made once for each name, and its address says which it is.
#[derive(Default)]
struct Named {
    lines: FxHashMap<usize, (&'static str, u32)>,
    stand_ins: FxHashMap<(&'static str, u32), &'static Location<'static>>,
}

fn named() -> &'static Mutex<Named> {
    static NAMED: OnceLock<Mutex<Named>> = OnceLock::new();
    NAMED.get_or_init(Mutex::default)
}

/// What named lines are copies of.
fn original() -> &'static Location<'static> {
    Location::caller()
}

impl Loc {
    /// A line of a file that is not Rust. Equal names are one line.
    pub fn named(file: &str, line: u32) -> Loc {
        let mut named = named().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(known) = named.stand_ins.get(&(file, line)) {
            return Loc(Some(known));
        }
        // As long as the process: as the lines of the program itself.
        let file: &'static str = match named.stand_ins.keys().find(|(known, _)| *known == file) {
            Some((known, _)) => known,
            None => Box::leak(file.into()),
        };
        let stand_in: &'static Location<'static> = Box::leak(Box::new(*original()));
        named.lines.insert(std::ptr::from_ref(stand_in).addr(), (file, line));
        named.stand_ins.insert((file, line), stand_in);
        Loc(Some(stand_in))
    }

    /// The line that the rest of a line of text names in a comment: `; model.py:42`.
    pub fn written(rest: &str) -> Loc {
        let rest = rest.lines().next().unwrap_or_default();
        let line = rest.trim().strip_prefix(';').and_then(|comment| {
            let (file, line) = comment.trim().rsplit_once(':')?;
            let is_name = !file.is_empty() && !file.contains(char::is_whitespace);
            Some((file, line.parse().ok()?)).filter(|_| is_name)
        });
        line.map_or(Loc::UNKNOWN, |(file, line)| Loc::named(file, line))
    }

    /// The address of a named line.
    fn stand_in(self) -> Option<usize> {
        self.0.filter(|location| *location == original()).map(|location| std::ptr::from_ref(location).addr())
    }
}

impl PartialEq for Loc {
    fn eq(&self, other: &Loc) -> bool {
        self.0 == other.0 && self.stand_in() == other.stand_in()
    }
}

impl Eq for Loc {}

impl Hash for Loc {
    fn hash<H: Hasher>(&self, hash: &mut H) {
        (self.0, self.stand_in()).hash(hash);
    }
}

impl fmt::Debug for Loc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loc({self})")
    }
}

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
        let (file, line) = match self.stand_in() {
            Some(address) => {
                let named = named().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                *named.lines.get(&address)?
            }
            None => self.0.map(|location| (location.file(), location.line()))?,
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
