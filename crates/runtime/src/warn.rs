//! Warnings: libraries do not print, they hand each message once to a process-wide sink.

use std::collections::BTreeSet;
use std::io::Write;

use parking_lot::Mutex;

/// Where warnings go.
pub type Sink = fn(&str);

struct State {
    seen: BTreeSet<String>,
    messages: Vec<String>,
    sink: Sink,
}

static STATE: Mutex<State> =
    Mutex::new(State { seen: BTreeSet::new(), messages: Vec::new(), sink: to_stderr });

fn to_stderr(message: &str) {
    // A closed stderr must not turn a warning into a failure.
    let _ = writeln!(std::io::stderr(), "kiln: warning: {message}");
}

/// Sends every later warning to `sink` and returns the sink used so far.
pub fn set_sink(sink: Sink) -> Sink {
    std::mem::replace(&mut STATE.lock().sink, sink)
}

/// Hands `message()` to the sink unless a warning with this key was given before.
pub fn once(key: &str, message: impl FnOnce() -> String) {
    if STATE.lock().seen.contains(key) {
        return;
    }
    // The message and the sink run outside the lock: either may warn in turn.
    let message = message();
    let sink = {
        let mut state = STATE.lock();
        if !state.seen.insert(key.to_owned()) {
            return;
        }
        state.messages.push(message.clone());
        state.sink
    };
    sink(&message);
}

/// Takes the messages given since the last call; meant for tests.
pub fn taken() -> Vec<String> {
    std::mem::take(&mut STATE.lock().messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_warns_once() {
        let before = set_sink(|_| {});
        once("warn-test", || "first".to_owned());
        once("warn-test", || panic!("the second message must not be made"));
        set_sink(before);
        assert_eq!(taken().iter().filter(|m| *m == "first").count(), 1);
    }
}
