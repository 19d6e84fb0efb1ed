//! Tests with files that were made to do harm: they end in an error or a value, soon, and in little memory.

use std::io::Cursor;
use std::time::{Duration, Instant};

use super::*;

/// A seeded stream of numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit.max(1)
    }

    /// A few bytes changed, and perhaps the end cut off, or a piece put in the place of another.
    fn change(&mut self, good: &[u8]) -> Vec<u8> {
        let mut bad = good.to_vec();
        for _ in 0..1 + self.below(4) {
            let at = self.below(bad.len());
            match self.below(4) {
                0 => bad[at] ^= 1 << self.below(8),
                1 => bad[at] = [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
                2 => {
                    let (from, size) = (self.below(bad.len()), self.below(16));
                    let piece = bad[from..(from + size).min(bad.len())].to_vec();
                    bad.splice(at..at, piece);
                }
                _ => bad[at] = self.below(256) as u8,
            }
        }
        if self.below(4) == 0 {
            bad.truncate(self.below(bad.len()));
        }
        bad
    }
}

/// The most memory that this process has had, in bytes; 0 where that can't be read.
fn peak_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok()).map_or(0, |kilo| kilo << 10)
}

/// Runs something that has to be over soon and not to take much.
fn bounded<T>(what: &str, run: impl FnOnce() -> T) -> T {
    let (before, start) = (peak_memory(), Instant::now());
    let result = run();
    // The kernel adds up pages of several processors when it likes: the peak may be told a little lower later on.
    let (taken, seconds) = (peak_memory().saturating_sub(before), start.elapsed());
    assert!(taken < 200 << 20, "{what}: {taken} bytes");
    assert!(seconds < Duration::from_secs(60), "{what}: {seconds:?}");
    result
}

/// Runs a program without storages.
fn run(program: &[u8]) -> std::result::Result<Value, String> {
    pickle::run(program, &mut |key, _| Err(format!("there is no storage {key}")))
}

/// Why a program is refused.
fn refused(what: &str, program: &[u8]) -> String {
    bounded(what, || run(program)).err().unwrap_or_else(|| panic!("{what}: it is not refused"))
}

fn file(parts: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut archive = archive::Writer::new(&mut bytes);
    parts.iter().for_each(|(name, part)| archive.put(&format!("archive/{name}"), part).unwrap());
    archive.finish().unwrap();
    bytes
}

fn state() -> StateDict {
    let mut state = StateDict::new();
    state.insert("a.weight", Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2]).unwrap());
    state.insert("a.count", Tensor::from_vec(vec![7i64], [0usize; 0]).unwrap());
    state
}

fn state_file() -> Vec<u8> {
    let parts: Vec<Vec<u8>> = state().iter().map(|(_, tensor)| tensor.to_bytes().unwrap()).collect();
    file(&[("data.pkl", &pickle::write(&state())), ("data/0", &parts[0]), ("data/1", &parts[1])])
}

/// A program that repeats one step after another.
fn program(begin: &[u8], step: &[u8], times: usize, end: &[u8]) -> Vec<u8> {
    [begin, &step.repeat(times), end].concat()
}

/// Where the directory's entries begin.
fn directory(file: &[u8]) -> Vec<usize> {
    (0..file.len() - 4).filter(|&at| file[at..at + 4] == 0x0201_4b50u32.to_le_bytes()).collect()
}

/// The same archive without checksums, as PyTorch writes it when asked to: changes get further.
fn without_checksums(mut file: Vec<u8>) -> Vec<u8> {
    directory(&file).into_iter().for_each(|at| file[at + 16..at + 20].fill(0));
    file
}

#[test]
fn memos_are_no_bombs() {
    // A tuple of twice the tuple before, a list of twice the list before.
    let told = refused("doubled tuples", &program(b")q\0", b"h\0h\0\x86q\0", 150, b"."));
    assert!(told.contains("values are repeated"), "{told}");
    refused("doubled lists", &program(b"]q\0", b"](h\0h\0eq\0", 150, b"."));
    refused("doubled dicts", &program(b"}q\0", b"}(K\0h\0K\x01h\0uq\0", 150, b"."));
    // A long text, again and again.
    let mut long = b"X\0\0\x10\0".to_vec();
    long.resize(5 + (1 << 20), b'x');
    refused("one text", &program(&[&long, &b"q\0]("[..]].concat(), b"h\0", 100_000, b"e."));
    // The same, thrown away: nothing is left of it but a number of references.
    let told = refused("texts in vain", &program(&[&long, &b"q\0"[..]].concat(), b"h\0", 100_000, b""));
    assert!(told.contains("truncated"), "{told}");
    // Below the limit, sharing is what it is in Python.
    let Ok(Value::List(shared)) = run(&program(b")q\0", b"h\0h\0\x86q\0", 10, b".")) else {
        panic!("a tuple")
    };
    let [Value::List(a), Value::List(b)] = &shared[..] else { panic!("two tuples") };
    assert!(Arc::ptr_eq(a, b));
}

#[test]
fn depth_is_bounded() {
    for (what, program) in [
        ("tuples", program(b")", b"\x85", 1_000_000, b".")),
        ("lists", program(b"", b"]", 1_000_000, &[&b"a".repeat(999_999)[..], b"."].concat())),
        ("dropped tuples", program(b")", b"\x85", 1_000_000, b"N.")),
        ("a list in itself", b"]q\0h\0a.".to_vec()),
        ("a dict in itself", b"}q\0K\0h\0s.".to_vec()),
    ] {
        match bounded(what, || run(&program)) {
            Err(told) => assert!(told.contains("nested more than"), "{what}: {told}"),
            Ok(_) => assert_eq!(what, "dropped tuples"),
        }
    }
    // A hundred is none too many, by whichever way it is met first.
    assert!(run(&program(b")", b"\x85", 100, b".")).is_ok());
    let twice = program(b")", b"\x85", 150, b"q\0");
    assert!(run(&[&twice[..], &b"\x85".repeat(100), b"h\0\x86."].concat()).is_err());
    assert!(run(&[&b"("[..], &twice, b"h\0", &b"\x85".repeat(100), b"t."].concat()).is_err());
}

/// `_rebuild_tensor_v2` of storage 0 with these sizes and strides, as instructions, the function as memo 0 and the
/// arguments as memo 1.
fn rebuild(sizes: &[u8], strides: &[u8]) -> Vec<u8> {
    let tuple = |numbers: &[u8]| {
        let mut out = b"(".to_vec();
        numbers.iter().for_each(|number| out.extend([b'K', *number]));
        [&out[..], b"t"].concat()
    };
    let mut out =
        b"ctorch._utils\n_rebuild_tensor_v2\nq\0((X\x07\0\0\0storagectorch\nFloatStorage\n".to_vec();
    out.extend(b"X\x01\0\0\x000X\x03\0\0\0cpuK\x01tQK\0");
    [&out[..], &tuple(sizes), &tuple(strides), b"\x89Ntq\x01R"].concat()
}

#[test]
fn storages_are_read_once() {
    let data = vec![0; 4 << 20];
    let build = |program: &[u8]| {
        bounded("a storage", || read(Cursor::new(file(&[("data.pkl", program), ("data/0", &data)]))))
    };
    // Four megabytes, a hundred thousand times.
    let many = program(&[&b"]("[..], &rebuild(&[2, 3], &[3, 1])].concat(), b"h\0h\x01R", 100_000, b"e.");
    let Ok(Value::List(tensors)) = build(&many) else { panic!("a list") };
    let [Value::Tensor(first), .., Value::Tensor(last)] = &tensors[..] else { panic!("tensors") };
    assert_eq!((tensors.len(), first.shape().to_vec()), (100_001, vec![2, 3]));
    first.fill_(3.0).unwrap();
    assert_eq!(last.to_vec::<f32>().unwrap(), [3.0; 6], "as in PyTorch, they are views of one storage");

    let told = |program: Vec<u8>| build(&[&program[..], b"."].concat()).err().unwrap_or_default();
    assert!(told(rebuild(&[200, 200, 200, 200], &[0, 0, 0, 0])).contains("repeats its elements"));
    assert!(told(rebuild(&[200; 30], &[0; 30])).contains("beyond its storage"));
    assert!(told(rebuild(&[1; 65], &[0; 65])).contains("65 dims"));
    assert!(told(rebuild(&[2, 2], &[1])).contains("different number of sizes and strides"));
    assert!(told(rebuild(&[200, 200], &[1, 200])).is_empty());
    assert!(told(rebuild(&[0, 200], &[1, 1])).is_empty());
    let mut other = rebuild(&[1], &[1]);
    let at = other.windows(5).position(|word| word == b"Float").unwrap();
    other.splice(at..at + 5, *b"Double");
    assert!(told([rebuild(&[1], &[1]), other].concat()).contains("storage 0 is used as f32 and as f64"));
}

#[test]
fn archives_are_checked() {
    let good = state_file();
    let read = |bytes: &[u8]| bounded("an archive", || super::read(Cursor::new(bytes)));
    let told = |bytes: &[u8]| read(bytes).err().unwrap_or_default();
    assert!(read(&good).is_ok());
    // One bit of the numbers.
    let at = good.windows(4).position(|bytes| bytes == 2.0f32.to_le_bytes()).unwrap();
    let mut bad = good.clone();
    bad[at] ^= 1;
    assert!(told(&bad).contains("data/0 is damaged"), "{}", told(&bad));
    assert!(read(&without_checksums(bad)).is_ok());
    // Two files at one place, two of one name, one that is longer than everything.
    let entries = directory(&good);
    let change = |from: usize, to: &[u8]| {
        let mut bad = good.clone();
        bad[from..from + to.len()].copy_from_slice(to);
        bad
    };
    let first: [u8; 4] = good[entries[0] + 42..entries[0] + 46].try_into().unwrap();
    assert!(told(&change(entries[1] + 42, &first)).contains("overlap"));
    let last = good.len() - 22 - 1;
    assert!(
        told(&change(last, b"0")).contains("two entries named archive/data/0"),
        "{}",
        told(&change(last, b"0"))
    );
    for at in [20, 24] {
        assert!(!told(&change(entries[0] + at, &[0xff; 4])).is_empty());
    }
    let mut long = good.clone();
    long[entries[0] + 20..entries[0] + 28].fill(0x7f);
    assert!(told(&long).contains("truncated"));
    // A directory of more entries than there are, and one that begins behind itself.
    assert!(told(&change(good.len() - 12, &[0xff; 2])).contains("truncated"));
    assert!(!told(&change(good.len() - 6, &[0xff; 4])).is_empty());
    assert!((0..good.len()).all(|length| read(&good[..length]).is_err()));
}

#[test]
fn functions_are_refused_by_name() {
    for program in [&b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."[..], b"\x80\x02cbuiltins\neval\n."] {
        let told = refused("a function", program);
        assert!(told.contains("refused"), "{told}");
    }
}

/// Random changes of good files, with and without checksums, and of their programs: an error or a value, never a
/// panic, never much memory, never long.
#[test]
fn changed_files_are_errors_or_values() {
    let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoint.pt");
    let real = std::fs::read(fixture).unwrap();
    let mut archive = Archive::parse(Cursor::new(&real)).unwrap();
    let root = archive.root("data.pkl").unwrap();
    let program = archive.get(&format!("{root}data.pkl")).unwrap().unwrap();
    let mut random = Random(1);
    bounded("all files", || {
        let unchecked = [without_checksums(state_file()), without_checksums(real.clone())];
        for (good, count) in [(&state_file(), 4_000), (&unchecked[0], 10_000), (&unchecked[1], 3_000)] {
            assert!(read(Cursor::new(good)).is_ok());
            let refused = (0..count).filter(|_| read(Cursor::new(random.change(good))).is_err()).count();
            assert!(refused > count / 3, "{refused} of {count}");
        }
        let zeros =
            |_: &str, dtype| Tensor::from_bytes(&vec![0; 64 * 8], [64 * 8 / DType::size(dtype)], dtype);
        for good in [&program, &pickle::write(&state())] {
            let mut values = 0;
            for _ in 0..20_000 {
                let bad = random.change(good);
                values += usize::from(
                    pickle::run(&bad, &mut |k, d| zeros(k, d).map_err(|e| e.to_string())).is_ok(),
                );
            }
            assert!(values > 100, "{values}: the changes are too coarse to get anywhere");
        }
    });
}
