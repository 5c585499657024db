//! The fault lab: real gateways, actors and workers under virtual time, over a network that loses, delays, doubles,
//! swaps and garbles, on machines that die, freeze and come back. A seed is a schedule; a violation prints the seed.
//!
//! `FAULT_SEEDS=A..B cargo test --release --test faults` plays a range.
#![allow(clippy::unwrap_used)]

mod after;
mod bugs;
mod client;
mod counters;
mod dice;
mod legs;
mod net;
mod node;
mod pipe;
mod rules;
mod schedule;
mod speech;
mod trace;
mod transport;
mod world;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

use world::{Report, play};

/// Schedules of a usual run.
const SEEDS: Range<u64> = 0..2000;

/// Panics that the lab asks for are not worth a word.
fn hush() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let asked =
                info.payload().downcast_ref::<&str>().is_some_and(|text| text.starts_with("fault lab"));
            if !asked {
                usual(info);
            }
        }));
    });
}

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("FAULT_SEEDS") else { return SEEDS };
    let (from, to) = text.split_once("..").expect("FAULT_SEEDS=A..B");
    from.parse().unwrap()..to.parse().unwrap()
}

fn explain(report: &Report) -> String {
    let seed = report.seed;
    let again = format!("FAULT_SEEDS={seed}..{} cargo test --release --test faults", seed + 1);
    format!("seed {seed}: {} [{again}]\n{}", report.violations.join("; "), report.tail)
}

/// Half of the seeds; two tests so that two cores are used.
fn schedules(part: u64) {
    hush();
    let started = Instant::now();
    let mut faults = BTreeMap::new();
    let mut failed = Vec::new();
    let (mut messages, mut asked, mut served, mut direct, mut runs) = (0, 0, 0, 0, 0);
    let mut longest = std::time::Duration::ZERO;
    for seed in seeds().filter(|seed| seed % 2 == part) {
        let report = play(seed, None);
        runs += 1;
        messages += report.messages;
        asked += report.ends.asked;
        served += report.ends.served;
        direct += report.ends.direct;
        longest = longest.max(report.longest);
        for (kind, count) in &report.faults {
            *faults.entry(*kind).or_insert(0u64) += count;
        }
        if !report.violations.is_empty() {
            eprintln!("{}", explain(&report));
            failed.push(seed);
            if failed.len() >= 10 {
                break;
            }
        }
    }
    println!("{runs} schedules, {asked} requests ({served} served, {direct} direct), {messages} messages");
    println!("longest wait of a client: {longest:?}; {:?} in all", started.elapsed());
    for ((what, how), count) in faults {
        println!("{what:>26} | {how:<18} | {count}");
    }
    assert!(failed.is_empty(), "violated by {failed:?}");
}

#[test]
fn promises_hold_in_even_schedules() {
    schedules(0);
}

#[test]
fn promises_hold_in_odd_schedules() {
    schedules(1);
}

/// A seed is one schedule: the same events at the same times.
#[test]
fn a_seed_replays() {
    hush();
    for seed in 0..40 {
        let (first, second) = (play(seed, None), play(seed, None));
        let differs = first.events.iter().zip(&second.events).position(|(a, b)| a != b);
        if let Some(place) = differs {
            let around = |report: &Report| {
                let events = &report.events[place.saturating_sub(8)..report.events.len().min(place + 2)];
                events.iter().map(|event| format!("{event}\n")).collect::<String>()
            };
            panic!("seed {seed} is not the same twice:\n{}\n{}", around(&first), around(&second));
        }
        assert_eq!(first.events.len(), second.events.len(), "seed {seed}");
    }
}
