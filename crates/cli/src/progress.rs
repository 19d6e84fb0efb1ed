//! A spinner or bar on standard error while something long runs; nothing where no terminal is there to see it.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Says what is going on until it is dropped.
pub struct Progress(ProgressBar);

impl Progress {
    /// A spinner with a line of text.
    pub fn spinner(text: &str) -> Progress {
        let bar = ProgressBar::new_spinner();
        bar.set_message(text.to_owned());
        bar.enable_steady_tick(Duration::from_millis(100));
        Progress(bar)
    }

    /// A bar of `steps` steps.
    pub fn bar(steps: usize) -> Progress {
        let bar = ProgressBar::new(steps as u64);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {bar:30} {pos}/{len}  {msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        Progress(bar)
    }

    /// What is being done now.
    pub fn says(&self, text: &str) {
        self.0.set_message(text.to_owned());
    }

    /// Says what the compiler is at, from now on.
    pub fn follow_compiler(&self) {
        let bar = self.0.clone();
        kiln::on_progress(move |progress| bar.set_message(progress.to_string()));
    }

    /// One step of the bar is done.
    pub fn step(&self) {
        self.0.inc(1);
    }

    /// So many steps of so many are done.
    pub fn at(&self, done: u64, steps: u64) {
        self.0.set_length(steps);
        self.0.set_position(done);
    }

    /// Runs `body` with the line taken away, for printing.
    pub fn hidden<T>(&self, body: impl FnOnce() -> T) -> T {
        self.0.suspend(body)
    }

    /// Runs `body` with the line standing still: a redraw must not disturb what is timed.
    pub fn quietly<T>(&self, body: impl FnOnce() -> T) -> T {
        self.0.disable_steady_tick();
        let result = body();
        self.0.enable_steady_tick(Duration::from_millis(100));
        result
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
