//! What is compiled, and what it is known by.

use sha2::{Digest, Sha256};

use crate::cpu::{self, Isa};
use crate::seal::MARK;

/// C text and how to compile it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The C text.
    pub text: String,
    /// Further flags, such as the optimisation level or `-lm`.
    pub flags: Vec<String>,
    /// The instruction set to compile for.
    pub isa: Isa,
    /// The functions that the object must have.
    pub symbols: Vec<String>,
}

impl Source {
    /// C text for this machine's best instruction set.
    pub fn new(text: impl Into<String>, flags: &[&str]) -> Source {
        Source {
            text: text.into(),
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            isa: cpu::isa(),
            symbols: Vec::new(),
        }
    }

    /// The same text, whose object is good only with these functions in it.
    pub fn with_symbols(self, symbols: impl IntoIterator<Item = String>) -> Source {
        Source { symbols: symbols.into_iter().collect(), ..self }
    }

    pub(super) fn all_flags(&self) -> Vec<&str> {
        self.isa.flags().iter().copied().chain(self.flags.iter().map(String::as_str)).collect()
    }
}

/// What identifies a compiled source: a hash of text, compiler, flags and instruction set.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key(pub(super) [u8; 32]);

impl Key {
    pub(super) fn new(source: &Source, compiler: &str) -> Key {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            // The length first, so that no two lists of parts run together to the same bytes.
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(MARK);
        part(compiler.as_bytes());
        part(source.isa.name().as_bytes());
        source.all_flags().iter().for_each(|flag| part(flag.as_bytes()));
        part(source.text.as_bytes());
        Key(hash.finalize().into())
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key({self})")
    }
}
