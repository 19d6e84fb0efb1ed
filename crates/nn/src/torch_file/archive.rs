//! Zip archives of stored (not compressed) files, which is what PyTorch writes.

use std::collections::BTreeMap;
use std::io::{Error, Result as IoResult, Write};

type Result<T> = std::result::Result<T, String>;

const LOCAL: u32 = 0x0403_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END_64: u32 = 0x0606_4b50;
const LOCATOR_64: u32 = 0x0706_4b50;

/// The files of an archive in memory.
pub(super) struct Archive<'a>(BTreeMap<String, &'a [u8]>);

/// Little-endian numbers at a place, if there are that many bytes.
fn number(bytes: &[u8], at: usize, size: usize) -> Result<u64> {
    let end = at.checked_add(size).ok_or("it is cut off")?;
    let part = bytes.get(at..end).ok_or("it is cut off")?;
    Ok(part.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
}

fn place(value: u64) -> Result<usize> {
    usize::try_from(value).map_err(|_| "it is too large".to_string())
}

impl<'a> Archive<'a> {
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Archive<'a>> {
        // The end record is the last thing but a comment of at most 65535 bytes.
        let first = bytes.len().saturating_sub(22 + 65_535);
        let end = (first..bytes.len().saturating_sub(21))
            .rev()
            .find(|&at| number(bytes, at, 4) == Ok(u64::from(END)))
            .ok_or("it is no zip archive, as torch.save writes it")?;
        let (mut count, mut at) = (number(bytes, end + 10, 2)?, number(bytes, end + 16, 4)?);
        if end >= 20 && number(bytes, end - 20, 4)? == u64::from(LOCATOR_64) {
            let end_64 = place(number(bytes, end - 12, 8)?)?;
            if number(bytes, end_64, 4)? != u64::from(END_64) {
                return Err("its end record is broken".into());
            }
            (count, at) = (number(bytes, end_64 + 32, 8)?, number(bytes, end_64 + 48, 8)?);
        }
        let mut files = BTreeMap::new();
        let mut at = place(at)?;
        for _ in 0..count {
            if number(bytes, at, 4)? != u64::from(CENTRAL) {
                return Err("its directory is broken".into());
            }
            let [name_size, extra_size, comment_size] =
                [28, 30, 32].map(|offset| number(bytes, at + offset, 2).map_or(0, |size| size as usize));
            let name = bytes.get(at + 46..at + 46 + name_size).ok_or("it is cut off")?;
            let name = std::str::from_utf8(name).map_err(|_| "a name in it is no text")?;
            if number(bytes, at + 10, 2)? != 0 {
                return Err(format!("{name} is compressed"));
            }
            let extra =
                bytes.get(at + 46 + name_size..at + 46 + name_size + extra_size).ok_or("it is cut off")?;
            let [whole, size, offset] = wide_sizes(
                extra,
                [number(bytes, at + 24, 4)?, number(bytes, at + 20, 4)?, number(bytes, at + 42, 4)?],
            )?;
            if whole != size {
                return Err(format!("{name} is compressed"));
            }
            files.insert(name.to_string(), file(bytes, place(offset)?, place(size)?)?);
            at += 46 + name_size + extra_size + comment_size;
        }
        Ok(Archive(files))
    }

    /// A file, by its full name.
    pub(super) fn get(&self, name: &str) -> Option<&'a [u8]> {
        self.0.get(name).copied()
    }

    /// The folder that holds a file of this name, with its `/`, and the file.
    pub(super) fn root(&self, name: &str) -> Result<(&str, &'a [u8])> {
        self.0
            .iter()
            .find_map(|(path, bytes)| {
                let folder = path.strip_suffix(name)?;
                (folder.ends_with('/')).then_some((folder, *bytes))
            })
            .ok_or_else(|| format!("there is no {name} in it"))
    }
}

/// Sizes and offset of a directory entry: those that are too large for their fields are in the extra field 1.
fn wide_sizes(mut extra: &[u8], mut sizes: [u64; 3]) -> Result<[u64; 3]> {
    while extra.len() >= 4 {
        let (kind, size) = (number(extra, 0, 2)?, number(extra, 2, 2)? as usize);
        let field = extra.get(4..4 + size).ok_or("it is cut off")?;
        if kind == 1 {
            let mut at = 0;
            for size in sizes.iter_mut().filter(|size| **size == 0xffff_ffff) {
                *size = number(field, at, 8)?;
                at += 8;
            }
        }
        extra = &extra[4 + size..];
    }
    Ok(sizes)
}

fn file(bytes: &[u8], header: usize, size: usize) -> Result<&[u8]> {
    if number(bytes, header, 4)? != u64::from(LOCAL) {
        return Err("a file in it is not where its directory says".into());
    }
    let skip = 30 + number(bytes, header + 26, 2)? as usize + number(bytes, header + 28, 2)? as usize;
    let begin = header + skip;
    let end = begin.checked_add(size).ok_or("it is cut off")?;
    bytes.get(begin..end).ok_or_else(|| "it is cut off".to_string())
}

/// Writes an archive, file after file.
pub(super) struct Writer<'a> {
    file: &'a mut dyn Write,
    at: u64,
    directory: Vec<u8>,
    count: u64,
}

impl<'a> Writer<'a> {
    pub(super) fn new(file: &'a mut dyn Write) -> Writer<'a> {
        Writer { file, at: 0, directory: Vec::new(), count: 0 }
    }

    fn write(&mut self, bytes: &[u8]) -> IoResult<()> {
        self.at += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    pub(super) fn put(&mut self, name: &str, bytes: &[u8]) -> IoResult<()> {
        let size =
            u32::try_from(bytes.len()).map_err(|_| Error::other(format!("{name} is larger than 4 GiB")))?;
        let offset = u32::try_from(self.at).map_err(|_| Error::other("the file is larger than 4 GiB"))?;
        // Data begins at a multiple of 64 bytes, as PyTorch has it; an extra field fills what is missing.
        let begin = self.at + 30 + name.len() as u64 + 4;
        let padding = (begin.next_multiple_of(64) - begin) as u16;
        let mut common = Vec::new();
        // Version 2.0, names in UTF-8, stored, no time.
        for part in [20u16, 1 << 11, 0, 0, 0x21] {
            common.extend(part.to_le_bytes());
        }
        for part in [crc32(bytes), size, size] {
            common.extend(part.to_le_bytes());
        }
        common.extend((name.len() as u16).to_le_bytes());
        let mut header = LOCAL.to_le_bytes().to_vec();
        header.extend(&common);
        header.extend((padding + 4).to_le_bytes());
        header.extend(name.as_bytes());
        header.extend(*b"FB");
        header.extend(padding.to_le_bytes());
        header.resize(header.len() + usize::from(padding), b'Z');
        self.write(&header)?;
        self.write(bytes)?;
        self.directory.extend(CENTRAL.to_le_bytes());
        self.directory.extend(20u16.to_le_bytes());
        self.directory.extend(&common);
        // No extra field, no comment, first disk, no attributes.
        self.directory.extend([0; 12]);
        self.directory.extend(offset.to_le_bytes());
        self.directory.extend(name.as_bytes());
        self.count += 1;
        Ok(())
    }

    pub(super) fn finish(mut self) -> IoResult<()> {
        let begin = u32::try_from(self.at).map_err(|_| Error::other("the file is larger than 4 GiB"))?;
        let count =
            u16::try_from(self.count).map_err(|_| Error::other("there are more than 65535 tensors"))?;
        let mut end = std::mem::take(&mut self.directory);
        let size = end.len() as u32;
        end.extend(END.to_le_bytes());
        end.extend([0; 4]);
        end.extend(count.to_le_bytes());
        end.extend(count.to_le_bytes());
        end.extend(size.to_le_bytes());
        end.extend(begin.to_le_bytes());
        end.extend([0; 2]);
        self.write(&end)
    }
}

/// The checksum of zip archives.
fn crc32(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut i = 0;
        while i < 256 {
            let (mut value, mut bit) = (i as u32, 0);
            while bit < 8 {
                value = if value & 1 == 1 { value >> 1 ^ 0xedb8_8320 } else { value >> 1 };
                bit += 1;
            }
            table[i] = value;
            i += 1;
        }
        table
    };
    !bytes.iter().fold(!0, |sum, &byte| sum >> 8 ^ TABLE[((sum ^ u32::from(byte)) & 0xff) as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_zips() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }
}
