//! Whether what a compiler wrote may be given to the system's loader: it trusts every offset in a file, so an object
//! that was cut short, or was made for another machine, would end the process instead of failing to load.

use object::read::elf::{Dyn as _, ElfFile64, ProgramHeader as _};
use object::{
    Architecture, Endianness, FileKind, Object, ObjectKind, ObjectSection, ObjectSegment, ObjectSymbol, elf,
};
use thiserror::Error;

/// What is wrong with an object.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadObject {
    /// Not an object, or one that is cut short or inconsistent.
    #[error("not a complete object: {reason}")]
    Malformed {
        /// What does not fit.
        reason: String,
    },
    /// The code is for another processor.
    #[error("built for another machine: {found}, not {wanted}")]
    OtherMachine {
        /// Which.
        found: String,
        /// This one.
        wanted: String,
    },
    /// An executable, or an object that still has to be linked.
    #[error("not a shared library: {found}")]
    NotShared {
        /// What it is.
        found: String,
    },
    /// A function is not there.
    #[error("no function {name}")]
    MissingSymbol {
        /// Which.
        name: String,
    },
}

fn malformed(reason: impl ToString) -> BadObject {
    BadObject::Malformed { reason: reason.to_string() }
}

/// The processor of this process.
const fn own() -> Architecture {
    if cfg!(target_arch = "x86_64") {
        Architecture::X86_64
    } else if cfg!(target_arch = "aarch64") {
        Architecture::Aarch64
    } else {
        Architecture::Unknown
    }
}

/// Checks that the bytes are a whole shared library for this machine with all of these functions.
pub(crate) fn check(bytes: &[u8], symbols: &[String]) -> Result<(), BadObject> {
    let file = object::File::parse(bytes).map_err(malformed)?;
    if own() != Architecture::Unknown && file.architecture() != own() {
        let [found, wanted] = [file.architecture(), own()].map(|machine| format!("{machine:?}"));
        return Err(BadObject::OtherMachine { found, wanted });
    }
    if file.kind() != ObjectKind::Dynamic {
        return Err(BadObject::NotShared { found: format!("{:?}", file.kind()) });
    }
    for segment in file.segments() {
        segment.data().map_err(malformed)?;
        segment.address().checked_add(segment.size()).ok_or_else(|| malformed("a segment has no end"))?;
    }
    for section in file.sections() {
        section.data().map_err(malformed)?;
    }
    if FileKind::parse(bytes) == Ok(FileKind::Elf64) {
        check_elf(bytes)?;
    }
    let is_code = |address: u64| {
        let mut segments = file.segments();
        segments.any(|segment| (segment.address()..segment.address() + segment.size()).contains(&address))
    };
    for name in symbols {
        let is_it =
            |found: &[u8]| found == name.as_bytes() || found.strip_prefix(b"_") == Some(name.as_bytes());
        let mut defined =
            file.dynamic_symbols().filter(|symbol| symbol.is_definition() && is_code(symbol.address()));
        let exported =
            || file.exports().is_ok_and(|exports| exports.iter().any(|export| is_it(export.name())));
        let found = defined.any(|symbol| symbol.name_bytes().is_ok_and(is_it));
        if !found && (file.format() == object::BinaryFormat::Elf || !exported()) {
            return Err(BadObject::MissingSymbol { name: name.clone() });
        }
    }
    Ok(())
}

/// What the loader of ELF systems follows without looking: tables that the dynamic section points to.
fn check_elf(bytes: &[u8]) -> Result<(), BadObject> {
    let file = ElfFile64::<Endianness>::parse(bytes).map_err(malformed)?;
    let endian = file.endian();
    let headers = file.elf_program_headers();
    let of = |kind: u32| headers.iter().filter(move |header| header.p_type(endian) == kind);
    // Where bytes of the file come to lie.
    let mut loaded: Vec<(u64, u64)> = Vec::new();
    for header in of(elf::PT_LOAD) {
        let (start, size) = (header.p_vaddr(endian), header.p_memsz(endian));
        let end = start.checked_add(size).ok_or_else(|| malformed("a segment has no end"))?;
        if header.p_filesz(endian) > size || loaded.last().is_some_and(|(_, before)| start < *before) {
            return Err(malformed("its segments overlap"));
        }
        loaded.push((start, end));
    }
    let is_loaded = |start: u64, size: u64| {
        start
            .checked_add(size)
            .is_some_and(|end| loaded.iter().any(|(from, to)| *from <= start && end <= *to))
    };
    let dynamic = of(elf::PT_DYNAMIC).next().ok_or_else(|| malformed("it has no dynamic section"))?;
    if !is_loaded(dynamic.p_vaddr(endian), dynamic.p_memsz(endian)) {
        return Err(malformed("its dynamic section lies outside"));
    }
    let entries = dynamic.dynamic(endian, bytes).map_err(malformed)?.unwrap_or_default();
    let value = |tag: u32| {
        let of_tag = |entry: &&elf::Dyn64<Endianness>| entry.d_tag(endian) == u64::from(tag);
        entries.iter().find(of_tag).map(|entry| entry.d_val(endian))
    };
    let tables = [
        (elf::DT_SYMTAB, None),
        (elf::DT_GNU_HASH, None),
        (elf::DT_HASH, None),
        (elf::DT_PLTGOT, None),
        (elf::DT_INIT, None),
        (elf::DT_FINI, None),
        (elf::DT_VERSYM, None),
        (elf::DT_STRTAB, Some(elf::DT_STRSZ)),
        (elf::DT_RELA, Some(elf::DT_RELASZ)),
        (elf::DT_JMPREL, Some(elf::DT_PLTRELSZ)),
        (elf::DT_INIT_ARRAY, Some(elf::DT_INIT_ARRAYSZ)),
        (elf::DT_FINI_ARRAY, Some(elf::DT_FINI_ARRAYSZ)),
    ];
    for (tag, size) in tables {
        let Some(start) = value(tag) else { continue };
        if !is_loaded(start, size.and_then(value).unwrap_or(1)) {
            return Err(malformed(format_args!("a table of its dynamic section ({tag}) lies outside")));
        }
    }
    if value(elf::DT_SYMTAB).is_none() || value(elf::DT_STRTAB).is_none() {
        return Err(malformed("it has no symbols"));
    }
    for (offset, _) in file.dynamic_relocations().into_iter().flatten() {
        if !is_loaded(offset, 8) {
            return Err(malformed("a relocation lies outside"));
        }
    }
    Ok(())
}
