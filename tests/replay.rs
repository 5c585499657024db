//! The replay lab on the sample trace.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use kvc_router::core::options::{Eviction, LargeAppend};
use kvc_router::replay::figures::{self, Figures};
use kvc_router::replay::policy::{self, POLICIES, Policy};
use kvc_router::replay::settings::{Arrival, Setting};
use kvc_router::replay::sim::{self, Control, Run};
use kvc_router::replay::trace::{SharedPrefix, Trace};
use kvc_router::replay::{report, sweep};

fn sample() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/sample.sessions.jsonl.gz")
}

/// `copies` of the sample under other names: more live sessions than one machine's pool takes.
fn crowd(copies: u64) -> Trace {
    let mut trace = Trace::read(&[sample()]).unwrap();
    let original = trace.sessions.clone();
    for copy in 1..copies {
        trace.sessions.extend(original.iter().cloned().map(|mut s| {
            s.name = format!("{}-{copy}", s.name);
            s.family ^= copy;
            s
        }));
    }
    trace
}

fn play(trace: &Trace, setting: &Setting, policy: &str) -> (Run, Figures) {
    let policy = Policy::named(policy).unwrap();
    let run = sim::run(trace, setting, policy, 42, &Control::default()).unwrap();
    let figures = figures::figures(&run, &figures::served(&run), setting);
    (run, figures)
}

/// Every turn ends in exactly one way under every policy, with room and without, and nothing is lost.
#[test]
fn every_turn_ends_once() {
    let trace = crowd(4);
    for kv_tokens in [92_104, 300_000] {
        for policy in &POLICIES {
            let setting = Setting { kv_tokens, ..Setting::default() };
            let (run, f) = play(&trace, &setting, policy.name);
            assert_eq!(run.stuck, 0, "{} at {kv_tokens}", policy.name);
            let rejected: f64 = ["too-large", "no-capacity", "busy", "no-workers"]
                .iter()
                .map(|r| f[&format!("rejects.{r}")])
                .sum();
            assert_eq!(f["served"] + rejected, f["turns"], "{}", policy.name);
            for r in run.records.iter().filter(|r| r.served.is_ok()) {
                assert!(0 < r.ttft && r.ttft <= r.e2e && r.ideal <= r.input);
                assert!(r.computed_p + r.computed_d > 0);
            }
        }
    }
}

/// The same seed gives the same bytes; another seed another run.
#[test]
fn a_seed_is_a_run() {
    let trace = crowd(3);
    let text = |seed| {
        let setting = Setting { kv_tokens: 200_000, seed, ..Setting::default() };
        let policy = Policy::named("kvc").unwrap();
        let run = sim::run(&trace, &setting, policy, seed, &Control::default()).unwrap();
        report::nest(&figures::figures(&run, &figures::served(&run), &setting)).to_string()
    };
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
}

/// With room for all, a session is computed where it lives; without D-side options it is not.
#[test]
fn options_do_what_they_are_for() {
    let trace = crowd(4);
    let mut setting = Setting { kv_tokens: 276_000, ..Setting::default() };
    let ample = Setting { kv_tokens: 2_000_000, ..setting.clone() };
    assert_eq!(play(&trace, &ample, "kvc").1["direct_pct"], 100.0);
    let (_, all_on) = play(&trace, &setting, "kvc");
    let (_, paper) = play(&trace, &setting, "kvc-paper");
    assert!(paper["direct_pct"] < 5.0 && paper["modes.fallback"] > 50.0, "the published failure");
    assert!(all_on["direct_pct"] > 25.0 && all_on["modes.fallback"] < 1.0, "{}", all_on["direct_pct"]);
    assert!(all_on["ttft_ms.p50"] < paper["ttft_ms.p50"] / 3.0);
    setting.kvc.eviction = Eviction::None;
    setting.kvc.large_append = LargeAppend::Reject;
    let (_, off) = play(&trace, &setting, "kvc");
    assert!(off["ttft_ms.p99"] > 1.5 * all_on["ttft_ms.p99"]);
}

/// Host memory at P lets evicted sessions come back without P's queue.
#[test]
fn backups_are_restored() {
    let trace = crowd(4);
    let mut setting = Setting { kv_tokens: 150_000, ..Setting::default() };
    setting.set("d2p_trigger=off").unwrap();
    let (_, without) = play(&trace, &setting, "kvc");
    setting.set("d2p_trigger=evict").unwrap();
    setting.set("lab.host_tokens=1000000").unwrap();
    let (_, with) = play(&trace, &setting, "kvc");
    assert!(with["rungs.restore"] > 5.0 && !without.contains_key("rungs.restore"));
    assert!(with["hit_pct"] > without["hit_pct"] + 5.0);
    assert!(with["ttft_ms.p90"] < without["ttft_ms.p90"]);
    // Theorem 4 in virtual time.
    assert!(with["theorem_4.checked"] > 0.0);
    assert_eq!(with["theorem_4.violations"], 0.0);
}

/// Both readings of R3 are one on chained hashes, and rejects that no success resets drive sessions away.
#[test]
fn ablations_that_need_the_lab() {
    let trace = crowd(4);
    let mut setting = Setting { kv_tokens: 150_000, ..Setting::default() };
    let (_, prefix) = play(&trace, &setting, "kvc");
    setting.set("overlap=set").unwrap();
    assert_eq!(play(&trace, &setting, "kvc").1, prefix);
    setting.set("lab.keep_rejects=true").unwrap();
    assert_eq!(play(&trace, &setting, "kvc").0.stuck, 0);
}

/// One system prompt for everybody does not send everybody to one worker.
#[test]
fn one_shared_prefix_does_not_pile_up() {
    let trace = crowd(6);
    for name in ["kvc", "kvc-fused"] {
        let shared_prefix = SharedPrefix::All;
        let setting = Setting { kv_tokens: 276_000, shared_prefix, ..Setting::default() };
        let (_, f) = play(&trace, &setting, name);
        assert!(f["imbalance"] < 1.35, "{name}: {}", f["imbalance"]);
    }
}

#[test]
fn open_loop_and_other_topologies_run() {
    let trace = crowd(2);
    let setting = Setting {
        arrival: Arrival::Open,
        prefill: 2,
        decode: 6,
        kv_tokens: 200_000,
        time_scale: 0.2,
        ..Setting::default()
    };
    for policy in &POLICIES {
        let (run, f) = play(&trace, &setting, policy.name);
        assert_eq!((run.stuck, run.turns), (0, trace.turns()), "{}", policy.name);
        assert!(f["served"] > 0.0);
    }
}

/// A sweep that is run again with its state file computes nothing twice and tells the same.
#[test]
fn a_sweep_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state.jsonl");
    let trace = Trace::read(&[sample()]).unwrap();
    let policies = policy::list("kvc,dp-sticky").unwrap();
    let cell = |kv_tokens| Setting { kv_tokens, seeds: 2, ..Setting::default() };
    let run = |cells: &[Setting]| {
        let control = Control::default();
        let (points, complete) = sweep::run(&trace, cells, &policies, 2, Some(&state), &control).unwrap();
        assert!(complete);
        let turns = control.turns.load(std::sync::atomic::Ordering::Relaxed);
        (turns, points.iter().map(|p| p.results[0].mean.clone()).collect::<Vec<_>>())
    };
    let (first, one) = run(&[cell(100_000)]);
    // A crash in the middle of a line.
    let mut text = std::fs::read_to_string(&state).unwrap();
    text.push_str("{\"key\": 12, \"resu");
    std::fs::write(&state, text).unwrap();
    let (again, same) = run(&[cell(100_000)]);
    let (more, two) = run(&[cell(100_000), cell(200_000)]);
    assert!(first > 0 && again == 0 && more > 0);
    assert_eq!((&one, &one[0]), (&same, &two[0]));
}

#[test]
fn settings_and_policies_are_checked() {
    let mut s = Setting::default();
    for good in ["tau_append=2048", "paper.rho=0.9", "cost.link_latency=3", "lab.warmup=0", "epsilon=2"] {
        s.set(good).unwrap();
    }
    assert_eq!((s.kvc.tau_append, s.paper.rho, s.lab.warmup, s.kvc.epsilon), (2048, 0.9, 0, Some(2)));
    s.check().unwrap();
    for bad in ["tau=1", "tau_append=x", "tau_append=-1", "lab.nothing=1", "moon.rho=1", "rho"] {
        assert!(s.set(bad).is_err(), "{bad}");
    }
    assert!(Setting { kv_tokens: 3, ..s.clone() }.check().is_err());
    assert!(Setting { time_scale: f64::NAN, ..s.clone() }.check().is_err());
    s.set("rho=1.5").unwrap();
    assert!(s.check().unwrap_err().contains("rho = 1.5"));
    assert!(policy::list("kvc,nonsense").unwrap_err().contains("\"nonsense\""));
    assert_eq!(policy::list("all").unwrap().len(), 13);
}
