//! With the address sanitizer, the bytes behind a buffer's last one and those of dropped buffers are known to be nobody's.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::path::Path;
use std::process::Command;

use kiln_runtime::Buffer;

/// What the sanitizer says about a byte.
fn is_forbidden(byte: *const u8) -> bool {
    // SAFETY: a lookup by name, and a function of this type that only looks into the sanitizer's own memory.
    unsafe {
        let found = libc::dlsym(libc::RTLD_DEFAULT, c"__asan_address_is_poisoned".as_ptr());
        assert!(!found.is_null(), "the sanitizer's library is there");
        std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(*const u8) -> i32>(found)(byte) != 0
    }
}

#[test]
#[ignore = "started by the test below, with the sanitizer's library"]
fn ends_are_seen() {
    // Small ones that a thread keeps, larger ones of the pool's, and mapped ones; the second time from what is kept.
    for bytes in [1, 8, 61, 64, 100, 5000, 70_001, 5_000_001] {
        for _ in 0..2 {
            let buffer = Buffer::alloc(bytes).unwrap();
            let first = buffer.as_ptr();
            assert!(!is_forbidden(first) && !is_forbidden(first.wrapping_add(bytes - 1)), "{bytes}");
            if bytes % 64 != 0 {
                assert!(is_forbidden(first.wrapping_add(bytes)), "{bytes}");
            }
            drop(buffer);
            assert!(is_forbidden(first) && is_forbidden(first.wrapping_add(bytes - 1)), "{bytes}");
        }
    }
    kiln_runtime::pool::clear();
}

#[test]
fn the_sanitizer_knows_the_ends_of_buffers() {
    let Ok(found) = Command::new("gcc").arg("-print-file-name=libasan.so").output() else { return };
    let library = String::from_utf8(found.stdout).unwrap().trim().to_string();
    if !Path::new(&library).is_absolute() {
        return;
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "ends_are_seen"])
        .env("LD_PRELOAD", library)
        .env("ASAN_OPTIONS", "detect_leaks=0")
        .env("KILN_SANITIZE", "address")
        .output()
        .unwrap();
    assert!(
        child.status.success(),
        "{}{}",
        String::from_utf8_lossy(&child.stdout),
        String::from_utf8_lossy(&child.stderr)
    );
}
