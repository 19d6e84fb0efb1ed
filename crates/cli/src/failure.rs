//! What can go wrong in a command, as the one line the user sees.

/// Why a command stopped.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// From Kiln itself.
    #[error(transparent)]
    Kiln(#[from] kiln::Error),
    /// Writing or reading failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// There is no such device here.
    #[error("no CUDA device: this build of Kiln runs on the CPU only (--device cpu)")]
    NoDevice,
    /// Compiled and eager results are not the same.
    #[error(
        "{what}: compiled results differ from eager: relative error {relative:.1e}, allowed {allowed:.1e}"
    )]
    Differs {
        what: String,
        /// Largest difference over the largest magnitude, per tensor.
        relative: f64,
        allowed: f64,
    },
    /// Compiled results are further from f64 than they may be.
    #[error(
        "{what}: compiled results are less accurate than eager: error against f64 {compiled:.1e}, eager {eager:.1e}"
    )]
    Inexact {
        what: String,
        /// Relative to the size of the results.
        compiled: f64,
        eager: f64,
    },
    /// Kernels that the C compiler fails on run eagerly: what was measured is not compiled code.
    #[error("{what}: kernels failed to compile and ran eagerly: {reason}")]
    Refused { what: String, reason: String },
    /// Programs of the corpus whose compiled run gives something else.
    #[error("compiled results differ from eager: {}", .programs.join("; "))]
    Wrong { programs: Vec<String> },
    /// A saved program fails again.
    #[error("{path}: {failure}")]
    Reproduced { path: String, failure: String },
    /// No program has such a name.
    #[error("no program's name or theme contains `{name}`")]
    NoProgram { name: String },
    /// Compiled code is slower than eager.
    #[error("compiled is slower than eager: {ratio:.2} × eager's time, beyond the measured spread")]
    Slower { ratio: f64 },
    /// A process that measures something failed.
    #[error("{case}, in a child process: {reason}")]
    Child { case: String, reason: String },
    /// A file of peer results can't be read.
    #[error("{path}:{line}: {reason}")]
    Peer {
        path: String,
        /// The line in it, from 1; 0 for the file itself.
        line: usize,
        reason: String,
    },
    /// There is no kernel cache to look at.
    #[error("the kernel cache is off: {reason}")]
    NoCache {
        /// Why its directory is not used.
        reason: String,
    },
    /// Objects of the kernel cache are not what was written.
    #[error("damaged: {} (recompiled on demand)", .objects.join(", "))]
    Damaged { objects: Vec<String> },
    /// Something that Kiln needs is missing on this machine.
    #[error("needs attention: {}", .what.join(", "))]
    Unwell { what: Vec<&'static str> },
    /// The folder for a training loop's files can't be had.
    #[error("{path}: {reason}")]
    Folder { path: String, reason: String },
    /// A text to learn from can't be used.
    #[error("{path}: {reason}")]
    Text { path: String, reason: String },
    /// A prompt with a character that the text has not.
    #[error("the prompt contains {character:?}, which never occurs in the training text")]
    Character { character: char },
    /// A checkpoint that this run can't go on from.
    #[error("{path}: {reason}")]
    Resume { path: String, reason: String },
    /// A hand-written loop got no memory.
    #[error(transparent)]
    Memory(#[from] kiln_runtime::AllocError),
}

/// What a command returns.
pub type Done = Result<(), Failure>;
