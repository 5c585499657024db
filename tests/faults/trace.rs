//! What happened, in order. Two runs of a seed have the same trace; its end goes with a violation.

use std::fmt;
use std::sync::Mutex;

use tokio::time::Instant;

/// Events shown with a violation.
const TAIL: usize = 60;

/// One event: what, and two numbers that say more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    us: u64,
    what: &'static str,
    a: u64,
    b: u64,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { us, what, a, b } = self;
        write!(f, "{:>10.3} ms  {what} {a:x} {b:x}", *us as f64 / 1000.0)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Trace {
    started: Instant,
    events: Mutex<Vec<Event>>,
}

impl Trace {
    pub fn new() -> Self {
        Self { started: Instant::now(), events: Mutex::default() }
    }

    pub fn push(&self, what: &'static str, a: u64, b: u64) {
        let us = self.started.elapsed().as_micros() as u64;
        self.events.lock().unwrap().push(Event { us, what, a, b });
    }

    pub fn events(&self) -> Vec<Event> {
        self.events.lock().unwrap().clone()
    }

    pub fn tail(&self) -> String {
        let events = self.events.lock().unwrap();
        // Loads come every second and say little.
        let telling: Vec<_> = events.iter().filter(|event| event.what != "load").collect();
        telling[telling.len().saturating_sub(TAIL)..].iter().map(|event| format!("  {event}\n")).collect()
    }
}
