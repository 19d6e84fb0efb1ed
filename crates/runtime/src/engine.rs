//! Engines: the memory of devices other than the CPU, and how plans run there.
//!
//! An engine takes work in order and may do it later: what is asked of it returns before it is done, and a [`Ticket`]
//! says when it is. The CPU has no engine: its memory is the [pool](crate::pool), and its plans are
//! [programs](crate::program).

use std::ptr::NonNull;
use std::sync::OnceLock;

use kiln_ir::{Device, Error};
use kiln_plan::{Numbers, Plan, Signature};

use crate::pool::AllocError;
use crate::program::Stopped;

/// Stands for all work that an engine was given up to some moment. They grow; 0 is done from the beginning.
pub type Ticket = u64;

/// A kernel of a plan, as text for an engine's compiler.
#[derive(Copy, Clone, Debug)]
pub struct Code<'a> {
    /// The function's name.
    pub name: &'a str,
    /// Its text.
    pub text: &'a str,
    /// How it is called.
    pub signature: &'a Signature,
}

/// See the [module](self).
pub trait Engine: Send + Sync {
    /// Memory with unspecified contents, for work that comes later.
    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, AllocError>;

    /// Takes memory back; work that was given before may still use it.
    ///
    /// # Safety
    /// [`allocate`](Engine::allocate) gave it, as so many bytes, and no later work uses it.
    unsafe fn free(&self, memory: NonNull<u8>, bytes: usize);

    /// Copies from main memory, which is free again when this returns.
    ///
    /// # Safety
    /// `from` is readable for `bytes`, and `to` is in memory of this engine that holds as many.
    unsafe fn upload(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<Ticket, Error>;

    /// Copies to main memory, after all work so far.
    ///
    /// # Safety
    /// `to` is writable for `bytes`, and `from` is in memory of this engine that holds as many.
    unsafe fn download(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<(), Error>;

    /// Makes a plan ready to run; and tells which numbers a run needs.
    fn load(&self, plan: &Plan, code: &[Code<'_>]) -> Result<(Box<dyn Loaded>, Numbers), String>;

    /// Waits until work is done. The error is that of a plan that stopped: the one whose ticket this is.
    fn wait(&self, ticket: Ticket) -> Result<(), Stopped<Error>>;
}

/// A plan that an engine made ready.
pub trait Loaded: Send + Sync {
    /// Runs all steps, sooner or later; those after one that fails are left out.
    ///
    /// # Safety
    /// As for [`Program::run`](crate::program::Program::run), with memory of the engine; and until the ticket is done.
    unsafe fn run(
        &self,
        inputs: &[*mut u8],
        outputs: &[*mut u8],
        scalars: &[u64],
    ) -> Result<Ticket, Stopped<Error>>;
}

/// How many devices of a kind there can be.
const MOST: usize = 16;

static ENGINES: [OnceLock<Box<dyn Engine>>; MOST] = [const { OnceLock::new() }; MOST];

fn place(device: Device) -> Option<&'static OnceLock<Box<dyn Engine>>> {
    match device {
        Device::Cpu => None,
        Device::Cuda(number) => ENGINES.get(usize::from(number)),
    }
}

/// The engine of a device that has one.
#[inline]
pub fn of(device: Device) -> Option<&'static dyn Engine> {
    place(device)?.get().map(|engine| &**engine)
}

/// Gives a device its engine, once and for all. Says whether it had none before.
pub fn register(device: Device, engine: Box<dyn Engine>) -> bool {
    place(device).is_some_and(|place| place.set(engine).is_ok())
}
