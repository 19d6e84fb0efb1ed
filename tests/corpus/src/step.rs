//! How a program's step is called: as it is, or compiled. Programs are written once, for both.

use std::cell::RefCell;
use std::rc::Rc;

use kiln::{Backend, Compile, Explanation, Region, Result};

/// The step of a program: what it does again and again, and what a user would compile.
pub struct Step {
    region: Option<Region>,
    /// Every step of the program, this one included.
    all: Rc<RefCell<Vec<Region>>>,
    backend: Backend,
}

impl Step {
    /// A step that runs as it is written.
    pub fn eager() -> Step {
        Step { region: None, all: Rc::default(), backend: Backend::Eager }
    }

    /// A compiled step.
    pub fn compiled(name: &str, backend: Backend) -> Step {
        let step = Step { region: None, all: Rc::default(), backend };
        step.in_region(name)
    }

    fn in_region(&self, name: &str) -> Step {
        // It is capture that counts here, not speed: the C compiler need not take its time.
        let mut options = Compile::new().name(name).backend(self.backend);
        if let Ok(quick) = options.clone().option("opt_level", 0) {
            options = quick;
        }
        let region = options.region();
        self.all.borrow_mut().push(region.clone());
        Step { region: Some(region), all: self.all.clone(), backend: self.backend }
    }

    /// Another step of the same program, compiled if this one is.
    pub fn another(&self, name: &str) -> Step {
        match &self.region {
            Some(_) => self.in_region(name),
            None => Step::eager(),
        }
    }

    /// One call of the step.
    pub fn run<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        match &self.region {
            Some(region) => region.run(body),
            None => body(),
        }
    }

    /// What happened to all steps of the program.
    pub fn explain(&self) -> Vec<Explanation> {
        self.all.borrow().iter().map(Region::explain).collect()
    }
}
