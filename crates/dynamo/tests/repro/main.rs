//! Cases: recordings that run again without their program, judged, bisected and made smaller.

#![allow(clippy::unwrap_used, reason = "a test")]

mod ladder;
mod random;
mod verify;
