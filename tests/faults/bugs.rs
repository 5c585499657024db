//! Bugs planted one at a time: the lab has to find each. What it does not find it cannot promise either.

use kvc_router::fault_lab::Bug;

use super::{hush, play};

/// Schedules after which a planted bug must have been found.
const WITHIN: u64 = 700;
/// `FAULT_BUG=NAME FAULT_WITHIN=N cargo test --test faults planted` looks for one of them, further.
#[test]
fn planted_bugs_are_found() {
    hush();
    let only = std::env::var("FAULT_BUG").ok();
    let within = std::env::var("FAULT_WITHIN").map_or(WITHIN, |n| n.parse().unwrap());
    let mut missed = Vec::new();
    for bug in Bug::ALL {
        let name = format!("{bug:?}");
        if only.as_ref().is_some_and(|only| *only != name) {
            continue;
        }
        match (0..within).map(|seed| play(seed, Some(bug))).find(|report| !report.violations.is_empty()) {
            Some(found) => println!("{name:>22} | {:>4} | {}", found.seed + 1, found.violations[0]),
            None => missed.push(name),
        }
    }
    assert!(missed.is_empty(), "not found within {within} schedules: {missed:?}");
}
