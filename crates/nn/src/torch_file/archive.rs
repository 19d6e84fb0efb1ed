//! Zip archives of stored (not compressed) files, which is what PyTorch writes.
//!
//! A directory can say anything: that a thousand files are all the same bytes, or larger than the archive. What it
//! says is held against the archive's length and against each other before anything is read, so that all files
//! together are at most as long as the archive.

use std::collections::BTreeMap;
use std::io::{Error, Read, Result as IoResult, Seek, SeekFrom, Write};

type Result<T> = std::result::Result<T, String>;

const LOCAL: u32 = 0x0403_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END_64: u32 = 0x0606_4b50;
const LOCATOR_64: u32 = 0x0706_4b50;

/// Sizes of the records, without names, fields and comments.
const LOCAL_SIZE: u64 = 30;
const CENTRAL_SIZE: usize = 46;
const END_SIZE: usize = 22;
const LOCATOR_64_SIZE: usize = 20;
const END_64_SIZE: u64 = 56;

/// The longest directory, and the longest file that is not a storage: hundreds of bytes for each of a million
/// tensors.
const LONGEST: u64 = 256 << 20;

/// An archive whose directory is read.
pub(super) struct Archive<R> {
    reader: R,
    files: BTreeMap<String, Place>,
}

/// Where a file lies and what its checksum is.
#[derive(Clone, Copy)]
struct Place {
    begin: u64,
    size: u64,
    checksum: u32,
}

/// Little-endian numbers at a place, if there are that many bytes.
fn number(bytes: &[u8], at: usize, size: usize) -> Result<u64> {
    let end = at.checked_add(size).ok_or("the file is truncated")?;
    let part = bytes.get(at..end).ok_or("the file is truncated")?;
    Ok(part.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
}

/// Bytes of a reader from a place on, of which it has `length`.
fn bytes_at(reader: &mut (impl Read + Seek), length: u64, at: u64, size: u64) -> Result<Vec<u8>> {
    if at.checked_add(size).is_none_or(|end| end > length) {
        return Err("the file is truncated".into());
    }
    if size > LONGEST {
        return Err(format!("a header is implausibly large: {size} bytes"));
    }
    let mut bytes = vec![0; size as usize];
    let read = reader.seek(SeekFrom::Start(at)).and_then(|_| reader.read_exact(&mut bytes));
    read.map_err(|error| error.to_string()).map(|()| bytes)
}

impl<R: Read + Seek> Archive<R> {
    pub(super) fn parse(mut reader: R) -> Result<Archive<R>> {
        let length = reader.seek(SeekFrom::End(0)).map_err(|error| error.to_string())?;
        // The end record is the last thing but a comment of at most 65535 bytes.
        let first = length.saturating_sub((LOCATOR_64_SIZE + END_SIZE + 65_535) as u64);
        let tail = bytes_at(&mut reader, length, first, length - first)?;
        let end = (0..(tail.len() + 1).saturating_sub(END_SIZE))
            .rev()
            .find(|&at| number(&tail, at, 4) == Ok(u64::from(END)))
            .ok_or("not a zip archive as written by torch.save")?;
        let (mut count, mut begin) = (number(&tail, end + 10, 2)?, number(&tail, end + 16, 4)?);
        let mut stop = first + end as u64;
        if let Some(locator) = end.checked_sub(LOCATOR_64_SIZE)
            && number(&tail, locator, 4)? == u64::from(LOCATOR_64)
        {
            stop = number(&tail, locator + 8, 8)?;
            let end = bytes_at(&mut reader, length, stop, END_64_SIZE)?;
            if number(&end, 0, 4)? != u64::from(END_64) {
                return Err("the end-of-directory record is damaged".into());
            }
            (count, begin) = (number(&end, 32, 8)?, number(&end, 48, 8)?);
        }
        let size = stop.checked_sub(begin).ok_or("the directory is damaged")?;
        let directory = bytes_at(&mut reader, length, begin, size)?;
        let mut files = BTreeMap::new();
        let mut at = 0;
        for _ in 0..count {
            let (name, offset, place, next) = entry(&directory, at)?;
            let begin = data_begin(&mut reader, length, offset)?;
            if begin.checked_add(place.size).is_none_or(|end| end > length) {
                return Err("the file is truncated".into());
            }
            if files.insert(name.to_string(), Place { begin, ..place }).is_some() {
                return Err(format!("the archive has two entries named {name}"));
            }
            at = next;
        }
        let mut places: Vec<&Place> = files.values().filter(|place| place.size > 0).collect();
        places.sort_by_key(|place| place.begin);
        if places.windows(2).any(|two| two[0].begin + two[0].size > two[1].begin) {
            return Err("entries overlap".into());
        }
        Ok(Archive { reader, files })
    }

    /// The bytes of a file, if there is one of this full name.
    pub(super) fn get(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(size) = self.size(name) else { return Ok(None) };
        if size > LONGEST {
            return Err(format!("{name} is too large: {size} bytes"));
        }
        self.read(name, |reader| {
            let mut bytes = vec![0; size as usize];
            reader.read_exact(&mut bytes).map_err(|error| error.to_string()).map(|()| bytes)
        })
        .map(Some)
    }

    /// How long a file is.
    pub(super) fn size(&self, name: &str) -> Option<u64> {
        Some(self.files.get(name)?.size)
    }

    /// Reads a file, all of it, and compares its checksum.
    pub(super) fn read<T>(&mut self, name: &str, body: impl FnOnce(&mut dyn Read) -> Result<T>) -> Result<T> {
        let place = *self.files.get(name).ok_or_else(|| format!("the archive has no {name}"))?;
        self.reader.seek(SeekFrom::Start(place.begin)).map_err(|error| error.to_string())?;
        let mut summed = Summed { inner: (&mut self.reader).take(place.size), sum: crc32fast::Hasher::new() };
        let result = body(&mut summed)?;
        // PyTorch writes 0 where it was asked not to compute checksums.
        if place.checksum != 0 && summed.sum.finalize() != place.checksum {
            return Err(format!("{name} is damaged: its CRC-32 does not match"));
        }
        Ok(result)
    }

    /// The folder that holds a file of this name, with its `/`.
    pub(super) fn root(&self, name: &str) -> Result<String> {
        let folders = self.files.keys().filter_map(|path| path.strip_suffix(name));
        let found = folders.into_iter().find(|folder| folder.ends_with('/'));
        found.map(String::from).ok_or_else(|| format!("the archive has no {name}"))
    }
}

/// A reader that sums up what passes.
struct Summed<R> {
    inner: R,
    sum: crc32fast::Hasher,
}

impl<R: Read> Read for Summed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> IoResult<usize> {
        let count = self.inner.read(buffer)?;
        self.sum.update(&buffer[..count]);
        Ok(count)
    }
}

/// A directory's entry: name, offset of its local record, what is known of its place, and where the next one is.
fn entry(directory: &[u8], at: usize) -> Result<(&str, u64, Place, usize)> {
    if number(directory, at, 4)? != u64::from(CENTRAL) {
        return Err("the directory is damaged".into());
    }
    let field = |offset: usize, size: usize| number(directory, at + offset, size);
    let [name_size, extra_size, comment_size] =
        [field(28, 2)?, field(30, 2)?, field(32, 2)?].map(|size| size as usize);
    let name_at = at + CENTRAL_SIZE;
    let extra_at = name_at + name_size;
    let name = directory.get(name_at..extra_at).ok_or("the file is truncated")?;
    let name = std::str::from_utf8(name).map_err(|_| "an entry name is not UTF-8")?;
    let extra = directory.get(extra_at..extra_at + extra_size).ok_or("the file is truncated")?;
    let [whole, size, offset] = wide_sizes(extra, [field(24, 4)?, field(20, 4)?, field(42, 4)?])?;
    if field(10, 2)? != 0 || whole != size {
        return Err(format!("{name} is compressed"));
    }
    let place = Place { begin: 0, size, checksum: field(16, 4)? as u32 };
    Ok((name, offset, place, extra_at + extra_size + comment_size))
}

/// Where a file's data begins, behind its local record.
fn data_begin(reader: &mut (impl Read + Seek), length: u64, offset: u64) -> Result<u64> {
    let header = bytes_at(reader, length, offset, LOCAL_SIZE)?;
    if number(&header, 0, 4)? != u64::from(LOCAL) {
        return Err("an entry is not where the directory says".into());
    }
    Ok(offset + LOCAL_SIZE + number(&header, 26, 2)? + number(&header, 28, 2)?)
}

/// Sizes and offset of a directory entry: those that are too large for their fields are in the extra field 1.
fn wide_sizes(mut extra: &[u8], mut sizes: [u64; 3]) -> Result<[u64; 3]> {
    while extra.len() >= 4 {
        let (kind, size) = (number(extra, 0, 2)?, number(extra, 2, 2)? as usize);
        let field = extra.get(4..4 + size).ok_or("the file is truncated")?;
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
        for part in [crc32fast::hash(bytes), size, size] {
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
