//! The C compiler: found once, known by what it says of itself, and called with a time limit. One that has hung once is
//! not asked again.
//!
//! One call of the driver does everything. For a small kernel most of the time (about 20 ms) is the compiler
//! proper starting up; `-pipe` lets the assembler run beside it and `-nostdlib` spares the linker the
//! start-up files and libraries, together about a third of the whole. Calling assembler and linker directly
//! would save no more than a further millisecond.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use thiserror::Error;

use crate::isolate::is_isolated;

/// How long one compilation may take unless told otherwise.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Flags of every kernel. They keep IEEE semantics: no contraction to fma, no reassociation; what is given up
/// is only `errno` and the floating-point exception flags, which kernels never read. Memory is planned by
/// bytes, so one buffer may hold different types one after the other: no type-based aliasing.
const FLAGS: &[&str] = &[
    "-x",
    "c",
    "-w",
    "-pipe",
    "-shared",
    "-fPIC",
    "-nostdlib",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fno-asynchronous-unwind-tables",
    "-fno-stack-protector",
];

/// Checks that the C compiler puts into kernels, to find faults of the text that Kiln writes. They cost time,
/// so they are for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Sanitize {
    /// None.
    #[default]
    Off,
    /// What C leaves undefined ends the process at once, with an illegal instruction: nothing has to be linked.
    Undefined,
    /// Accesses outside of allocated memory as well; the process must have the sanitizer's library from its
    /// start (`LD_PRELOAD=$(gcc -print-file-name=libasan.so)`). Instructions written as assembler are not
    /// checked, so this is for the plain instruction set.
    Address,
}

impl Sanitize {
    /// All of them.
    pub const ALL: [Sanitize; 3] = [Sanitize::Off, Sanitize::Undefined, Sanitize::Address];

    /// The name that `KILN_SANITIZE` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Sanitize::Off => "off",
            Sanitize::Undefined => "undefined",
            Sanitize::Address => "address",
        }
    }

    /// The compiler's flags. Floats that no integer holds are undefined too, but not among what the general
    /// name covers.
    pub const fn flags(self) -> &'static [&'static str] {
        match self {
            Sanitize::Off => &[],
            Sanitize::Undefined => {
                &["-fsanitize=undefined,float-cast-overflow", "-fsanitize-undefined-trap-on-error"]
            }
            Sanitize::Address => &[
                "-fsanitize=address,undefined,float-cast-overflow",
                "-fsanitize-undefined-trap-on-error",
                "-fno-omit-frame-pointer",
                "-g",
            ],
        }
    }

    /// What `KILN_SANITIZE` asks for. Looked for once.
    pub fn asked() -> Sanitize {
        static ASKED: OnceLock<Sanitize> = OnceLock::new();
        *ASKED.get_or_init(|| {
            let text = std::env::var("KILN_SANITIZE").unwrap_or_default();
            let found = Sanitize::ALL.into_iter().find(|sanitize| sanitize.name() == text);
            if found.is_none() && !text.is_empty() {
                crate::warn::once("KILN_SANITIZE", || {
                    format!("KILN_SANITIZE={text} is not off, undefined or address; using off")
                });
            }
            found.unwrap_or_default()
        })
    }
}

/// Why there is no object to load.
#[derive(Debug, Clone, Error)]
pub enum CcError {
    /// The user asked for none.
    #[error("C compiler switched off by KILN_CC=none")]
    Disabled,
    /// None of the usual names is on the path.
    #[error("no C compiler found (tried {tried}); install gcc or clang, or set KILN_CC")]
    Missing {
        /// The names that were looked for.
        tried: String,
    },
    /// A compiler or file operation could not be started.
    #[error("cannot {action} {path}: {reason}")]
    System {
        /// What was to be done.
        action: &'static str,
        /// With which file.
        path: PathBuf,
        /// The system's message.
        reason: String,
    },
    /// The compiler reported an error.
    #[error("C compiler failed ({status}) on {saved}\n{command}\n{stderr}", saved = saved_source.display())]
    Failed {
        /// The command line.
        command: String,
        /// Its exit status.
        status: String,
        /// What it wrote.
        stderr: String,
        /// Where the source was kept.
        saved_source: PathBuf,
    },
    /// The compiler was stopped; it is not started again.
    #[error(
        "the C compiler ran longer than {limit:?} on {on} and was stopped; it is not used again\n{command}",
        on = on.display()
    )]
    TimedOut {
        /// The command line.
        command: String,
        /// The time it was given.
        limit: Duration,
        /// The source, which was kept, or the question that it did not answer.
        on: PathBuf,
    },
}

impl CcError {
    pub(crate) fn system(action: &'static str, path: &Path, reason: impl ToString) -> CcError {
        CcError::System { action, path: path.to_owned(), reason: reason.to_string() }
    }
}

/// A C compiler on this machine.
#[derive(Debug)]
pub struct Compiler {
    program: PathBuf,
    arguments: Vec<OsString>,
    file: String,
    is_script: bool,
    identity: OnceLock<String>,
    asking: Mutex<()>,
    time_limit: Duration,
    /// How it hung.
    hung: OnceLock<CcError>,
}

impl Compiler {
    /// The machine's compiler: `KILN_CC` (`none` for none), `CC`, then cc, gcc, clang. Looked for once.
    /// `KILN_CC_TIMEOUT` is its time limit in seconds.
    pub fn find() -> Result<&'static Compiler, CcError> {
        static FOUND: OnceLock<Result<Compiler, CcError>> = OnceLock::new();
        FOUND.get_or_init(Compiler::search).as_ref().map_err(Clone::clone)
    }

    fn search() -> Result<Compiler, CcError> {
        let limited = |compiler: Compiler| compiler.with_time_limit(time_limit());
        match std::env::var("KILN_CC") {
            Ok(command) if command == "none" => return Err(CcError::Disabled),
            // Who names a compiler does not want another one in its place.
            Ok(command) if !command.is_empty() => return Compiler::named(&command).map(limited),
            _ => {}
        }
        let asked = std::env::var("CC").ok().filter(|command| !command.is_empty());
        let names: Vec<&str> = asked.as_deref().into_iter().chain(["cc", "gcc", "clang"]).collect();
        let found = names.iter().find_map(|name| Compiler::named(name).ok());
        found.map(limited).ok_or_else(|| CcError::Missing { tried: names.join(", ") })
    }

    /// The compiler started by `command`: a name on the path or a file, and arguments after it.
    pub fn named(command: &str) -> Result<Compiler, CcError> {
        let missing = || CcError::Missing { tried: command.to_owned() };
        let mut words = command.split_whitespace();
        let name = words.next().ok_or_else(missing)?;
        let program = on_path(name).ok_or_else(missing)?;
        let arguments: Vec<OsString> = words.map(OsString::from).collect();
        let real = fs::canonicalize(&program).map_err(|_| missing())?;
        let data = fs::metadata(&real).map_err(|_| missing())?;
        let file = format!(
            "{} {arguments:?} {} {} {}.{} {}.{}",
            real.display(),
            data.ino(),
            data.size(),
            data.mtime(),
            data.mtime_nsec(),
            data.ctime(),
            data.ctime_nsec()
        );
        let mut start = [0; 2];
        let is_script =
            File::open(&real).and_then(|mut file| file.read_exact(&mut start)).is_err() || start == *b"#!";
        Ok(Compiler {
            program,
            arguments,
            file,
            is_script,
            identity: OnceLock::new(),
            asking: Mutex::new(()),
            time_limit: TIME_LIMIT,
            hung: OnceLock::new(),
        })
    }

    /// The same compiler with another time limit.
    pub fn with_time_limit(self, time_limit: Duration) -> Compiler {
        Compiler { time_limit, ..self }
    }

    /// The file that is started.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Tells this compiler from others and from other versions of itself: its version and the machine it compiles for,
    /// in its own words. `known` may remember them for the very same file; what was not remembered is told to `keep`.
    /// A script may start another compiler tomorrow, so it is asked by every process.
    pub(crate) fn identity(
        &self,
        known: impl FnOnce(&str) -> Option<String>,
        keep: impl FnOnce(&str, &str),
    ) -> Result<&str, CcError> {
        // Who comes while another asks waits for the answer.
        let _asking = self.identity.get().is_none().then(|| self.asking.lock());
        if let Some(identity) = self.identity.get() {
            return Ok(identity);
        }
        let identity = match known(&self.file).filter(|_| !self.is_script) {
            Some(identity) => identity,
            None => {
                let [version, machine] = self.ask(["--version", "-dumpmachine"])?;
                let identity = match (version.trim(), machine.trim()) {
                    // It has nothing to say: then the file has to do.
                    ("", _) => self.file.clone(),
                    (version, machine) => format!("{version}\n{machine}\n{:?}", self.arguments),
                };
                if !self.is_script {
                    keep(&self.file, &identity);
                }
                identity
            }
        };
        Ok(self.identity.get_or_init(|| identity))
    }

    /// What the compiler prints if called with each of these arguments alone; nothing where it fails.
    fn ask<const N: usize>(&self, questions: [&str; N]) -> Result<[String; N], CcError> {
        self.check_hung()?;
        // Side by side: most of the time is that of starting.
        let started = questions.map(|question| {
            let mut command = Command::new(&self.program);
            command.args(&self.arguments).arg(question).env("LC_ALL", "C");
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
            in_group(&mut command);
            (format!("{command:?}"), question, command.spawn())
        });
        let answers = started.map(|(command, question, child)| {
            let mut child = child.map_err(|error| CcError::system("start", &self.program, error))?;
            // It is short enough for a pipe, so nobody has to read while the compiler runs.
            let pipe = child.stdout.take();
            let status = self.wait(child, command, Path::new(question))?;
            let mut answer = Vec::new();
            if let (Some(mut pipe), true) = (pipe, status.success()) {
                // SAFETY: the descriptor is open. What a child of the compiler still writes is not waited for.
                unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
                let _ = pipe.read_to_end(&mut answer);
            }
            Ok(String::from_utf8_lossy(&answer).into_owned())
        });
        // All were waited for, whatever became of the first.
        let mut texts = [const { String::new() }; N];
        for (text, answer) in texts.iter_mut().zip(answers) {
            *text = answer?;
        }
        Ok(texts)
    }

    /// Compiles `source` to a shared object at `object`.
    ///
    /// `flags` follow the source on the command line, so they may name libraries. The source is written to
    /// `object` with the ending `.c` and stays there.
    pub fn compile_shared(&self, source: &str, flags: &[&str], object: &Path) -> Result<(), CcError> {
        self.check_hung()?;
        let source_path = object.with_extension("c");
        fs::write(&source_path, source).map_err(|error| CcError::system("write", &source_path, error))?;
        let log_path = object.with_extension("log");
        let log = File::create(&log_path).map_err(|error| CcError::system("write", &log_path, error))?;

        let mut command = Command::new(&self.program);
        command.args(&self.arguments).args(FLAGS);
        // Drivers hand paths on to other programs in ways of their own, and not all arrive: these names always do.
        if let (Some(folder), Some(object), Some(source)) =
            (object.parent(), object.file_name(), source_path.file_name())
        {
            command.current_dir(folder).arg("-o").arg(object).arg(source);
        }
        // What comes next is linked, not compiled, unless it is a flag.
        command.args(["-x", "none"]).args(flags);
        // A file, not a pipe: nobody has to read it while the compiler runs.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        in_group(&mut command);
        let text = format!("{command:?}");

        let child = command.spawn().map_err(|error| CcError::system("start", &self.program, error));
        let ended = child.and_then(|child| self.wait(child, text.clone(), &source_path));
        let stderr = fs::read(&log_path).unwrap_or_default();
        // Only a leftover if it fails.
        let _ = fs::remove_file(&log_path);
        let status = ended?;
        if status.success() {
            return Ok(());
        }
        Err(CcError::Failed {
            command: text,
            status: status.to_string(),
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
            saved_source: source_path,
        })
    }

    fn check_hung(&self) -> Result<(), CcError> {
        self.hung.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Waits for the process. After the time limit its whole group is killed, and nobody starts this compiler again:
    /// what hung once would hang for every kernel.
    fn wait(&self, mut child: Child, command: String, on: &Path) -> Result<ExitStatus, CcError> {
        let start = Instant::now();
        loop {
            match child.try_wait() {
                Ok(Some(status)) => return Ok(status),
                Ok(None) if start.elapsed() < self.time_limit => {
                    std::thread::sleep(Duration::from_micros(250));
                }
                Ok(None) => {
                    let pid = child.id() as libc::pid_t;
                    // SAFETY: the child has not been waited for yet, and the group is the one made for it.
                    unsafe { libc::kill(if is_isolated() { pid } else { -pid }, libc::SIGKILL) };
                    child.wait().map_err(|error| CcError::system("stop", &self.program, error))?;
                    let error = CcError::TimedOut { command, limit: self.time_limit, on: on.to_owned() };
                    return Err(self.hung.get_or_init(|| error).clone());
                }
                Err(error) => return Err(CcError::system("wait for", &self.program, error)),
            }
        }
    }
}

/// Gives a compiler a group of its own, so that the driver's children can be stopped with it. In an isolated process
/// it stays in that of the process: who stops the one stops the other, and what the driver leaves behind as well.
fn in_group(command: &mut Command) {
    if !is_isolated() {
        command.process_group(0);
    }
}

/// What `KILN_CC_TIMEOUT` allows, in seconds.
fn time_limit() -> Duration {
    let Some(text) = std::env::var("KILN_CC_TIMEOUT").ok().filter(|text| !text.is_empty()) else {
        return TIME_LIMIT;
    };
    let seconds = text.trim().parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.unwrap_or_else(|| {
        crate::warn::once("KILN_CC_TIMEOUT", || {
            format!("KILN_CC_TIMEOUT={text} is not a number of seconds; using {}", TIME_LIMIT.as_secs())
        });
        TIME_LIMIT
    })
}

fn on_path(name: &str) -> Option<PathBuf> {
    let runnable = |path: &Path| {
        fs::metadata(path).is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        let path = std::path::absolute(name).ok()?;
        return runnable(&path).then_some(path);
    }
    let path = std::env::var_os("PATH")?;
    let mut on_path =
        std::env::split_paths(&path).filter_map(|folder| std::path::absolute(folder.join(name)).ok());
    on_path.find(|path| runnable(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Folder;

    #[test]
    fn a_missing_compiler_is_an_error_with_its_name() {
        let error = Compiler::named("/nowhere/kiln-cc").unwrap_err();
        assert!(matches!(&error, CcError::Missing { tried } if tried == "/nowhere/kiln-cc"), "{error}");
        assert!(Compiler::named("").is_err());
    }

    #[test]
    fn a_bad_source_is_kept_and_named() {
        let folder = Folder::new("cc-bad");
        let error =
            Compiler::find().unwrap().compile_shared("int f( {", &["-O1"], &folder.path().join("k.so"));
        let Err(CcError::Failed { command, stderr, saved_source, .. }) = error else { panic!("{error:?}") };
        assert!(command.contains("-shared") && stderr.contains("error"), "{command}\n{stderr}");
        assert_eq!(fs::read_to_string(saved_source).unwrap(), "int f( {");
        assert!(!folder.path().join("k.log").exists());
    }

    #[test]
    fn a_compiler_that_hangs_is_stopped() {
        let folder = Folder::new("cc-hang");
        let script = folder.path().join("slow-cc");
        fs::write(&script, "#!/bin/sh\nsleep 100\n").unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
        let compiler = Compiler::named(script.to_str().unwrap()).unwrap();
        let compiler = compiler.with_time_limit(Duration::from_millis(100));
        let start = Instant::now();
        let error = compiler.compile_shared("", &[], &folder.path().join("k.so")).unwrap_err();
        assert!(matches!(error, CcError::TimedOut { .. }), "{error}");
        assert!(start.elapsed() < Duration::from_secs(10));
        // It is not started again, for any text, nor asked for its name.
        let start = Instant::now();
        assert!(compiler.compile_shared("int other;", &[], &folder.path().join("other.so")).is_err());
        assert!(!folder.path().join("other.c").exists());
        assert!(matches!(compiler.identity(|_| None, |_, _| ()), Err(CcError::TimedOut { .. })));
        assert!(start.elapsed() < Duration::from_millis(90));
    }
}
