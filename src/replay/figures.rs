//! From records to the figures of a report.

use std::collections::{BTreeMap, HashSet};

use super::bounds::{Evict, direct_pct};
use super::hist::{Hist, percentile};
use super::settings::Setting;
use super::sim::{Run, TurnRecord};
use crate::core::types::{Mode, Tokens};

/// Figures of one policy by dotted key (`ttft_ms.p99`). A flat map: means and deviations over seeds are then the
/// same code for each.
pub type Figures = BTreeMap<String, f64>;

/// Turns that a policy served.
pub fn served(run: &Run) -> HashSet<(usize, usize)> {
    run.records.iter().filter(|r| r.served.is_ok()).map(|r| r.key).collect()
}

/// The figures of a run. Latencies are those of the turns in `common`, which every policy served.
pub fn figures(run: &Run, common: &HashSet<(usize, usize)>, setting: &Setting) -> Figures {
    let mut f = Figures::new();
    let all = &run.records;
    let ok: Vec<&TurnRecord> = all.iter().filter(|r| r.served.is_ok()).collect();
    f.insert("turns".into(), all.len() as f64);
    f.insert("served".into(), ok.len() as f64);
    shares(&mut f, &ok, all);
    tokens(&mut f, run, &ok);
    sync(&mut f, run, setting);
    let timed: Vec<&TurnRecord> = ok.iter().copied().filter(|r| common.contains(&r.key)).collect();
    f.insert("compared".into(), timed.len() as f64);
    latencies(&mut f, "", &timed);
    floor(&mut f, &timed, setting);
    for mode in [Mode::Direct, Mode::Seed, Mode::Reseed, Mode::Fallback] {
        let of: Vec<&TurnRecord> = timed.iter().copied().filter(|r| mode_of(r) == Some(mode)).collect();
        if !of.is_empty() {
            latencies(&mut f, &format!("by_mode.{mode}."), &of);
            itl(&mut f, &format!("by_mode.{mode}."), &run.itl[mode as usize]);
        }
    }
    let mut whole = Hist::default();
    run.itl.iter().for_each(|h| whole.merge(h));
    itl(&mut f, "", &whole);
    slowest(&mut f, &timed);
    load(&mut f, run);
    objective(&mut f);
    bounds(&mut f, run, setting);
    f
}

fn mode_of(r: &TurnRecord) -> Option<Mode> {
    r.served.ok().map(|(mode, _)| mode)
}

fn pct(part: usize, whole: usize) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

fn shares(f: &mut Figures, ok: &[&TurnRecord], all: &[TurnRecord]) {
    let share = |test: &dyn Fn(&TurnRecord) -> bool| pct(ok.iter().filter(|r| test(r)).count(), ok.len());
    for mode in [Mode::Direct, Mode::Seed, Mode::Reseed, Mode::Fallback] {
        f.insert(format!("modes.{mode}"), share(&|r| mode_of(r) == Some(mode)));
    }
    for r in ok {
        if let Ok((_, rung)) = r.served {
            *f.entry(format!("rungs.{}", rung.as_str())).or_default() += pct(1, ok.len());
        }
    }
    f.insert("used_prefill_pct".into(), share(&|r| r.computed_p > 0));
    f.insert("moved_pct".into(), share(&|r| r.abandoned));
    let eligible = all.iter().filter(|r| r.eligible && r.served.is_ok()).count();
    let direct = ok.iter().filter(|r| r.eligible && mode_of(r) == Some(Mode::Direct)).count();
    f.insert("direct_pct".into(), pct(direct, eligible));
    f.insert("goodput_pct".into(), pct(ok.len(), all.len()));
    let reasons = ["too-large", "no-capacity", "busy", "no-workers"];
    for (i, reason) in reasons.iter().enumerate() {
        let n = all.iter().filter(|r| r.served.is_err_and(|why| why as usize == i)).count();
        f.insert(format!("rejects.{reason}"), n as f64);
    }
    f.insert("retries_429".into(), all.iter().map(|r| f64::from(r.refusals)).sum());
}

fn tokens(f: &mut Figures, run: &Run, ok: &[&TurnRecord]) {
    let sum = |what: &dyn Fn(&TurnRecord) -> u64| ok.iter().map(|r| what(r)).sum::<u64>() as f64;
    let input = sum(&|r| r.input).max(1.0);
    f.insert("hit_pct".into(), 100.0 * (1.0 - sum(&|r| (r.computed_p + r.computed_d).min(r.input)) / input));
    f.insert("ideal_hit_pct".into(), 100.0 * sum(&|r| r.ideal) / input);
    f.insert("prefill_tokens.p".into(), sum(&|r| r.computed_p));
    f.insert("prefill_tokens.d".into(), sum(&|r| r.computed_d));
    f.insert("moved_tokens".into(), sum(&|r| r.moved));
    f.insert("theorem_4.checked".into(), run.theorem_4.0 as f64);
    f.insert("theorem_4.violations".into(), run.theorem_4.1 as f64);
    let mean = |tokens: Tokens, count: u64| tokens as f64 / count.max(1) as f64;
    let evicted = &run.evicted;
    f.insert("evicted_tokens".into(), evicted.tokens as f64);
    f.insert("evictions".into(), evicted.count as f64);
    f.insert("evicted_per.eviction".into(), mean(evicted.tokens, evicted.count));
    f.insert("evicted_per.direct".into(), mean(evicted.direct_tokens, evicted.direct));
    f.insert("stuck".into(), run.stuck as f64);
}

/// D→P sync: what travelled against P→D, and β as a measured contract.
fn sync(f: &mut Figures, run: &Run, setting: &Setting) {
    let sync = &run.sync;
    let bytes = |tokens: f64| tokens * setting.cost.kv_bytes_per_token;
    let to_d = f.get("moved_tokens").copied().unwrap_or(0.0);
    f.insert("pushed_tokens".into(), sync.pushed as f64);
    f.insert("d2p.bytes".into(), bytes(sync.pushed as f64));
    f.insert("d2p.p2d_bytes".into(), bytes(to_d));
    let mut stale = sync.stale.clone();
    stale.sort_unstable();
    f.insert("d2p.staleness_p50".into(), percentile(&stale, 0.5) as f64);
    f.insert("d2p.staleness_p99".into(), percentile(&stale, 0.99) as f64);
    f.insert("d2p.beta_violations".into(), sync.over_beta as f64);
    let in_time = if sync.issued == 0 { 100.0 } else { 100.0 * sync.in_time as f64 / sync.issued as f64 };
    f.insert("d2p.synced_before_next_turn_pct".into(), in_time);
}

fn latencies(f: &mut Figures, prefix: &str, turns: &[&TurnRecord]) {
    for (name, what) in [("ttft_ms", (|r| r.ttft) as fn(&TurnRecord) -> u64), ("e2e_ms", |r| r.e2e)] {
        let mut list: Vec<u64> = turns.iter().map(|r| what(r)).collect();
        list.sort_unstable();
        for (q, share) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)] {
            f.insert(format!("{prefix}{name}.{q}"), percentile(&list, share) as f64 / 1000.0);
        }
        let mean = list.iter().sum::<u64>() as f64 / list.len().max(1) as f64 / 1000.0;
        f.insert(format!("{prefix}{name}.mean"), mean);
    }
}

fn itl(f: &mut Figures, prefix: &str, hist: &Hist) {
    for (q, share) in [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)] {
        if let Some(us) = hist.quantile(share) {
            f.insert(format!("{prefix}itl_ms.{q}"), us / 1000.0);
        }
    }
}

/// What no policy can be under: each turn computes what an endless cache would lack, at once, on an idle worker.
fn floor(f: &mut Figures, timed: &[&TurnRecord], setting: &Setting) {
    let us = |r: &&TurnRecord| {
        let known = r.ideal.min(r.input.saturating_sub(1));
        (setting.cost.prefill_ms(known, r.input - known) * 1000.0) as u64
    };
    let mut list: Vec<u64> = timed.iter().map(us).collect();
    list.sort_unstable();
    for (q, share) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)] {
        f.insert(format!("ttft_floor_ms.{q}"), percentile(&list, share) as f64 / 1000.0);
    }
}

/// Which modes the slowest 1 % used.
fn slowest(f: &mut Figures, timed: &[&TurnRecord]) {
    let mut by: Vec<&TurnRecord> = timed.to_vec();
    by.sort_by_key(|r| std::cmp::Reverse((r.ttft, r.key)));
    let n = by.len().div_ceil(100);
    for r in &by[..n] {
        if let Ok((mode, rung)) = r.served {
            *f.entry(format!("slowest_pct.{mode}-{}", rung.as_str())).or_default() += pct(1, n);
        }
    }
}

fn load(f: &mut Figures, run: &Run) {
    let full: Vec<_> = run.windows.iter().filter(|w| w.full).collect();
    let used = if full.is_empty() { run.windows.iter().collect() } else { full };
    let n = used.first().map_or(0, |w| w.served.len());
    let each: Vec<f64> = (0..n).map(|d| used.iter().map(|w| w.served[d] as f64).sum()).collect();
    let total = each.iter().sum::<f64>().max(1.0);
    for (d, tokens) in each.iter().enumerate() {
        f.insert(format!("worker_share.{d}"), tokens / total);
    }
    let most = each.iter().copied().fold(0.0, f64::max);
    f.insert("imbalance".into(), most * n as f64 / total);
    for (p, busy) in run.prefill_busy.iter().enumerate() {
        f.insert(format!("prefill_busy.{p}"), *busy);
    }
}

/// `w_ttft·TTFT + w_lat·E2E` over means, with both weights 1.
fn objective(f: &mut Figures) {
    let of = |f: &Figures, key: &str| f.get(key).copied().unwrap_or(0.0);
    let value = of(f, "ttft_ms.mean") + of(f, "e2e_ms.mean");
    f.insert("objective_ms".into(), value);
}

/// What residency alone would allow on these turns; fused workers pool nothing more than P and D do.
fn bounds(f: &mut Figures, run: &Run, setting: &Setting) {
    let (workers, k) = (run.windows.first().map_or(1, |w| w.served.len()), setting.kv_tokens);
    let pooled = Tokens::from(setting.prefill + setting.decode) * k;
    let tau = setting.kvc.tau_append;
    let mut put = |name: &str, pools, k, evict| {
        f.insert(format!("direct_bound_pct.{name}"), direct_pct(&run.accesses, pools, k, tau, evict));
    };
    put("lru", workers, k, Evict::Lru);
    put("belady", workers, k, Evict::Belady);
    put("belady_pooled", 1, pooled, Evict::Belady);
}

/// Mean and standard deviation of each figure over runs. A figure a run lacks counts as 0 where it is a share,
/// and is left out where it is a latency.
pub fn spread(runs: &[Figures]) -> (Figures, Figures) {
    let keys: HashSet<&String> = runs.iter().flat_map(|r| r.keys()).collect();
    let (mut mean, mut deviation) = (Figures::new(), Figures::new());
    for key in keys {
        let zero = ["rungs.", "slowest_pct.", "modes."].iter().any(|p| key.starts_with(p));
        let values: Vec<f64> =
            runs.iter().filter_map(|r| r.get(key).copied().or(zero.then_some(0.0))).collect();
        let n = values.len() as f64;
        let m = values.iter().sum::<f64>() / n;
        let var = values.iter().map(|v| (v - m) * (v - m)).sum::<f64>() / (n - 1.0).max(1.0);
        mean.insert(key.clone(), m);
        deviation.insert(key.clone(), var.sqrt());
    }
    (mean, deviation)
}
