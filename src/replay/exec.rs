//! Runs settings × seeds × policies on all cores, with a progress bar and Ctrl-C.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::figures;
use super::hist::percentile;
use super::policy::Policy;
use super::report::Outcome;
use super::settings::Setting;
use super::sim::{self, Control, Run};
use super::trace::Trace;

/// One seed of one setting, for all policies: their latencies are compared over the turns that all served.
#[derive(Debug, Clone)]
pub struct Unit {
    /// The setting.
    pub setting: Setting,
    /// The seed.
    pub seed: u64,
}

/// Runs every unit; `done` is called as each ends, in any order. Units cut short by Ctrl-C report what they have
/// and are not passed to `done`.
pub fn run(
    trace: &Trace,
    units: &[Unit],
    policies: &[&Policy],
    jobs: usize,
    control: &Control,
    done: &(dyn Fn(usize, &[Outcome]) + Sync),
) -> Vec<Vec<Outcome>> {
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Vec<Outcome>>> = units.iter().map(|_| Mutex::new(Vec::new())).collect();
    let bar = progress(units.len() * policies.len());
    std::thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, units.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(unit) = units.get(i).filter(|_| !stopped(control)) else { break };
                    let outcomes = one(trace, unit, policies, control, &bar);
                    if outcomes.len() == policies.len() {
                        done(i, &outcomes);
                    }
                    if let Ok(mut slot) = results[i].lock() {
                        *slot = outcomes;
                    }
                }
            });
        }
    });
    bar.finish_and_clear();
    let results = results.into_iter().map(|m| m.into_inner().unwrap_or_default()).collect();
    comparable(results, policies.len())
}

/// Of a run that was cut short: seeds that every policy has finished, so that all are averaged over the same ones;
/// before the first such, whatever there is.
fn comparable(mut results: Vec<Vec<Outcome>>, policies: usize) -> Vec<Vec<Outcome>> {
    if results.iter().any(|unit| unit.len() == policies) {
        results.iter_mut().filter(|unit| unit.len() != policies).for_each(Vec::clear);
    }
    results
}

/// Whether Ctrl-C was pressed.
pub fn stopped(control: &Control) -> bool {
    control.stop.load(Ordering::Relaxed)
}

fn progress(runs: usize) -> ProgressBar {
    let bar = ProgressBar::new(runs as u64);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} runs, {msg} left {eta}, {elapsed} so far");
    if let Ok(style) = style {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

fn one(
    trace: &Trace,
    unit: &Unit,
    policies: &[&Policy],
    control: &Control,
    bar: &ProgressBar,
) -> Vec<Outcome> {
    let mut runs: Vec<(&Policy, Run, f64)> = Vec::new();
    for &policy in policies {
        let begin = Instant::now();
        let Some(run) = sim::run(trace, &unit.setting, policy, unit.seed, control) else { break };
        runs.push((policy, run, begin.elapsed().as_secs_f64()));
        bar.inc(1);
        bar.set_message(format!("{} turns,", control.turns.load(Ordering::Relaxed)));
    }
    let served = runs.iter().map(|(_, run, _)| figures::served(run));
    let common: HashSet<_> = served.reduce(|a, b| a.intersection(&b).copied().collect()).unwrap_or_default();
    runs.into_iter()
        .map(|(policy, run, wall_s)| Outcome {
            policy: policy.name.into(),
            figures: figures::figures(&run, &common, &unit.setting),
            wall_s,
            curve: curve(&run, &common),
            load: run.windows.iter().map(|w| w.running.clone()).collect(),
        })
        .collect()
}

/// TTFT in ms at each percent.
fn curve(run: &Run, common: &HashSet<(usize, usize)>) -> Vec<f64> {
    let timed = run.records.iter().filter(|r| r.served.is_ok() && common.contains(&r.key));
    let mut list: Vec<u64> = timed.map(|r| r.ttft).collect();
    list.sort_unstable();
    (0..=100).map(|q| percentile(&list, f64::from(q) / 100.0) as f64 / 1000.0).collect()
}

/// Lets Ctrl-C stop the runs; a second one ends the process.
pub fn watch_interrupt(control: &'static Control) {
    std::thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(async {
            if tokio::signal::ctrl_c().await.is_ok() {
                control.stop.store(true, Ordering::Relaxed);
            }
            if tokio::signal::ctrl_c().await.is_ok() {
                std::process::exit(130);
            }
        });
    });
}
